"""run_retry: a read limit that is too low is corrected, and nothing else is tried twice."""

from __future__ import annotations

from typing import Any, Final

from ditto import ExternalResult, Json, Loop
from ditto.recovery.checkpoint import SOURCE_TOO_LARGE
from ditto.recovery.entry import SOURCE_MAX_BYTES, Course, advance, check_range, enter
from ditto.recovery.graphs import SOURCE, result_of
from ditto.recovery.job import Job, RecoveryInput
from ditto.recovery.runs import JobRuns, RecoveryRuntime

MAX_ATTEMPTS: Final = 5


async def run_retry(
    runtime: RecoveryRuntime, input: RecoveryInput, *, initial_max_bytes: int = 16, max_attempts: int = 3
) -> Job:
    """Read the source with a limit that is raised when it is too low, then go on to the end.

    `initial_max_bytes`: 1 to 65536. `max_attempts`: 1 to 5 reads. Only SOURCE_TOO_LARGE, marked retryable and with a
    `requiredBytes` that is allowed and larger than the limit, is read again. Every other failure, and the last
    attempt's, ends the job as failed, before any model call. Raises RecoveryError for an option out of its range.
    """
    check_range("initial_max_bytes", initial_max_bytes, 1, SOURCE_MAX_BYTES)
    check_range("max_attempts", max_attempts, 1, MAX_ATTEMPTS)

    async def read_source(runs: JobRuns) -> ExternalResult:
        begun = {"maxBytes": initial_max_bytes, "attemptsLeft": max_attempts, "result": None}
        ended = await runs.repeat(retry_loop(max_attempts), begun)
        return result_of(ended["result"])

    course = Course(read_source=read_source)
    at = await enter(runtime, input, lambda runs, at: advance(runs, at, course))
    return at.job


def retry_loop(max_attempts: int) -> Loop:
    """Read, look at the answer, raise the limit; `max_iterations` is the guard behind `done`."""
    return Loop("retry", graph=SOURCE, update=_update, done=_is_done, max_iterations=max_attempts)


def _update(state: dict[str, Any], outputs: dict[str, Any]) -> dict[str, Any]:
    """The next limit, or the result that ends the loop: a success, a permanent failure, or the last attempt's."""
    result = result_of(outputs["source"])
    left = state["attemptsLeft"] - 1
    required = _required_bytes(result)
    if left and required is not None and state["maxBytes"] < required <= SOURCE_MAX_BYTES:
        return {**state, "maxBytes": required, "attemptsLeft": left}
    return {**state, "attemptsLeft": left, "result": outputs["source"]}


def _is_done(state: dict[str, Any]) -> bool:
    return state["result"] is not None


def _required_bytes(result: ExternalResult) -> int | None:
    """How much must be read, if that is what went wrong and reading more may help."""
    error = result.error
    if result.status == "success" or error is None or error.code != SOURCE_TOO_LARGE or not error.retryable:
        return None
    required: Json = error.details.get("requiredBytes")
    return required if isinstance(required, int) and not isinstance(required, bool) else None
