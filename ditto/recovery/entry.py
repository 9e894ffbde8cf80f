"""The way of every entry through a job. Start at `advance`, which reads as the story it tells.

An entry is an ordinary async function over durable runs: it may be cancelled or killed anywhere, and whichever entry
comes next goes on from what is recorded.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

from ditto import ExternalResult, ResultError, RunBusyError, RunConflictError, StepError, UnknownOutcomeError
from ditto.recovery.checkpoint import Checkpoint, decide_stage, is_fault, uncertain_error
from ditto.recovery.errors import RecoveryError
from ditto.recovery.job import JobError, RecoveryInput, Stage
from ditto.recovery.runs import JobRuns, RecoveryRuntime

SOURCE_MAX_BYTES: Final = 65536

_STORE_STILL_WORKS: Final = (StepError, UnknownOutcomeError, RunBusyError, RunConflictError)


async def read_whole_source(runs: JobRuns) -> ExternalResult:
    """The source, in one read."""
    return await runs.read_source(SOURCE_MAX_BYTES)


@dataclass(frozen=True, slots=True)
class Course:
    """What sets one entry apart on the common way.

    `read_source` reads what the model is to see. `consult` asks the catalog, once the job is prepared and before its
    first operation; it returns where the entry ends, or None to go on. `stop_after` is the stage to stop at.
    """

    read_source: Callable[[JobRuns], Awaitable[ExternalResult]] = read_whole_source
    consult: Callable[[JobRuns, Checkpoint], Awaitable[Checkpoint | None]] | None = None
    stop_after: str | None = None


Way = Callable[[JobRuns, Checkpoint], Awaitable[Checkpoint]]


async def enter(runtime: RecoveryRuntime, input: RecoveryInput, way: Way) -> Checkpoint:
    """Read the job, go the way, and leave a projection of what is recorded; also when the way ends in an error."""
    runs = JobRuns.of(runtime, input)
    at = await runs.read()
    try:
        at = await way(runs, at)
    except _STORE_STILL_WORKS:
        await runs.report()
        raise
    await runs.report()
    return at


async def advance(runs: JobRuns, at: Checkpoint, course: Course) -> Checkpoint:
    """As far as the job goes: settle what is unsettled, prepare, pause, consult, operate."""
    if at.is_closed:
        return at
    if at.unsettled is not None:
        at = await operate(runs, at, at.unsettled)
        if at.is_halted:
            return at
    if not at.is_prepared:
        at = await prepare(runs, at, course)
        if at.is_halted:
            return at
    if at.reached(course.stop_after):
        return at
    if at.awaits_approval:
        return await runs.record(Stage.PAUSED)
    if course.consult is not None and not at.has_begun:
        ended = await course.consult(runs, at)
        if ended is not None:
            return ended
    return await operate_all(runs, at, course)


async def prepare(runs: JobRuns, at: Checkpoint, course: Course) -> Checkpoint:
    """Read the source and have the model read it. A source that cannot be read fails the job, without a model call.

    An answer that cannot be used raises the run's StepError and changes nothing: the next entry asks once more.
    """
    source = await course.read_source(runs)
    if source.status != "success":
        return await runs.record(Stage.FAILED, failure_of(source))
    await runs.prepare(at, text_of(source, at.job.source_hash))
    return await runs.read()


async def operate_all(runs: JobRuns, at: Checkpoint, course: Course) -> Checkpoint:
    """The operations that are not confirmed yet, in their order, up to where the entry is to stop."""
    while at.next_operation is not None and not at.reached(course.stop_after):
        at = await operate(runs, at, at.next_operation)
        if at.is_halted:
            break
    return at


async def operate(runs: JobRuns, at: Checkpoint, kind: str) -> Checkpoint:
    """One operation. What cannot be confirmed is recorded as uncertain, what definitely failed by its reason."""
    try:
        await runs.operate(at, kind)
    except UnknownOutcomeError as unknown:
        return await runs.record(Stage.UNCERTAIN, uncertain_error(kind, unknown))
    except StepError as failure:
        decided = decide_stage(at, kind, failure)
        if decided is None:
            raise
        return await runs.record(*decided)
    return await runs.read()


def failure_of(result: ExternalResult) -> JobError:
    """Why a read failed, to be kept on the job; StepError if it failed by a fault of the program or its setup."""
    error = result.error or ResultError(code="READ_FAILED", message=f"{result.source} ended as {result.status}")
    if is_fault(error):
        raise StepError(f"{result.source}: {error.message}", code=error.code)
    return JobError(code=error.code, message=error.message)


def text_of(source: ExternalResult, source_hash: str) -> str:
    """The text that was read, which must be the one that the job was created for."""
    found = source.structured
    if not isinstance(found, dict) or not isinstance(found.get("text"), str) or found.get("sourceHash") != source_hash:
        raise RecoveryError("recovery_source: it returned no text with the job's sourceHash", code="recovery.profile")
    return str(found["text"])


def check_range(name: str, value: Any, least: int, most: int) -> int:
    """An option within its range; RecoveryError `recovery.option`, before anything has been started."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise RecoveryError(f"{name} must be an integer from {least} to {most}, not {value!r}", code="recovery.option")
    return value
