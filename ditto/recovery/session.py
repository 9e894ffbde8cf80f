"""run_session: a question about a job, asked in the conversation that its preparation began."""

from __future__ import annotations

from typing import Final

from ditto import Json
from ditto.recovery.checkpoint import Checkpoint
from ditto.recovery.entry import Course, enter, prepare
from ditto.recovery.errors import RecoveryError
from ditto.recovery.job import RecoveryInput, SessionResult
from ditto.recovery.runs import JobRuns, RecoveryRuntime

QUESTION_MAX_CHARS: Final = 1000
DEFAULT_QUESTION: Final = "What was asked for, and how far has it come?"


async def run_session(runtime: RecoveryRuntime, input: RecoveryInput, *, question: str | None = None) -> SessionResult:
    """Answer a question about the job, at whatever stage it is, and keep the conversation.

    `question`: 1 to 1000 characters; None asks a default one. The saved context is restored, the current order and
    stage and the question are added, and the answer must repeat them exactly; then question and answer are saved. One
    model call for each question asked, at a terminal or paused job too, and no operation of any kind: an uncertain one
    stays uncertain. A queued job is prepared first. A job that ended without an order has no answer.

    An answer that is wrong raises StepError SESSION_INVALID and is not saved; the next entry asks once more.
    """
    text = DEFAULT_QUESTION if question is None else question
    if not text.strip() or len(text) > QUESTION_MAX_CHARS:
        raise RecoveryError(f"question must have 1 to {QUESTION_MAX_CHARS} characters", code="recovery.option")
    answers: list[dict[str, Json]] = []

    async def way(runs: JobRuns, at: Checkpoint) -> Checkpoint:
        if not at.is_prepared and not at.is_closed:
            at = await prepare(runs, at, Course())
        if not at.is_prepared:
            return at
        answers.append(await runs.ask(at, text))
        return await runs.read()

    at = await enter(runtime, input, way)
    return SessionResult(job=at.job, answer=answers[0] if answers else None)
