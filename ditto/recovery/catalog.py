"""run_fallback and run_timeout: reads of a catalog, which may be repeated, before any operation.

A catalog's refusal fails a job only if its first operation is confirmed as absent: an earlier entry may have sent it,
and been cancelled before anything was recorded. Then that operation is what counts, and is gone on with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ditto import ExternalResult, StepTimeoutError
from ditto.recovery.checkpoint import CATALOG_TIMEOUT, LOOKUP_UNCONFIRMED, UNAVAILABLE, Checkpoint
from ditto.recovery.entry import Course, advance, check_range, enter, failure_of
from ditto.recovery.errors import RecoveryError
from ditto.recovery.graphs import is_absent
from ditto.recovery.job import Job, JobError, RecoveryInput, Stage
from ditto.recovery.profile import Profile
from ditto.recovery.runs import JobRuns, RecoveryRuntime

TIMEOUT_MAX_MS: Final = 60_000


async def run_fallback(
    runtime: RecoveryRuntime, input: RecoveryInput, *, allowed_sources: Sequence[str] | None = None
) -> Job:
    """Ask the allowed sources of the catalog in the profile's order, then go on to the end.

    `allowed_sources`: some of the profile's sources, at least one, each once; None allows all. Only UNAVAILABLE moves
    on to the next one; any other refusal, and the last source's UNAVAILABLE, ends the job as failed, before any
    operation. `job.selected_source` says which one answered. Raises RecoveryError for other sources.
    """
    allowed = None if allowed_sources is None else _check_sources(allowed_sources)

    async def way(runs: JobRuns, at: Checkpoint) -> Checkpoint:
        sources = _choose_sources(at.profile, allowed)

        async def consult(runs: JobRuns, at: Checkpoint) -> Checkpoint | None:
            if at.job.selected_source in sources:
                return None
            return await _take(runs, at, await _ask(runs, sources))

        return await advance(runs, at, Course(consult=consult))

    return (await enter(runtime, input, way)).job


async def run_timeout(runtime: RecoveryRuntime, input: RecoveryInput, *, timeout_ms: int = 75) -> Job:
    """Ask the first source of the catalog under a deadline, then go on to the end.

    `timeout_ms`: 1 to 60000. A read that misses it ends as timed-out with CATALOG_TIMEOUT, and the next entry goes on
    from there; every other refusal ends the job as failed. The caller's own cancellation stays a cancellation.
    """
    timeout_s = check_range("timeout_ms", timeout_ms, 1, TIMEOUT_MAX_MS) / 1000

    async def consult(runs: JobRuns, at: Checkpoint) -> Checkpoint | None:
        if at.job.selected_source is not None:
            return None
        try:
            result = await runs.read_catalog(at.profile.sources[0], timeout_s)
        except StepTimeoutError:
            return await _record_timeout(runs, timeout_ms)
        if result.status == "timeout":
            return await _record_timeout(runs, timeout_ms)
        return await _take(runs, at, result)

    at = await enter(runtime, input, lambda runs, at: advance(runs, at, Course(consult=consult)))
    return at.job


async def _ask(runs: JobRuns, sources: Sequence[str]) -> ExternalResult:
    """The answer of the first source that is not unavailable, or the last one's."""
    *others, last = sources
    for source in others:
        result = await runs.read_catalog(source)
        if result.error is None or result.error.code != UNAVAILABLE:
            return result
    return await runs.read_catalog(last)


async def _take(runs: JobRuns, at: Checkpoint, result: ExternalResult) -> Checkpoint | None:
    """None to go on: the catalog has answered, or an earlier entry has sent the first operation already."""
    if result.status == "success":
        return None
    error = failure_of(result)
    assert at.next_operation is not None
    first = await runs.look_up(at.next_operation)
    if is_absent(first):
        return await runs.record(Stage.FAILED, error)
    if first.status == "success":
        return None
    unconfirmed = f"the catalog refused ({error.code}), and no look-up says whether {at.next_operation} was sent before"
    return await runs.record(Stage.UNCERTAIN, JobError(code=LOOKUP_UNCONFIRMED, message=unconfirmed))


async def _record_timeout(runs: JobRuns, timeout_ms: int) -> Checkpoint:
    message = f"the catalog did not answer within {timeout_ms} ms; enter the job again to ask once more"
    return await runs.record(Stage.TIMED_OUT, JobError(code=CATALOG_TIMEOUT, message=message))


def _check_sources(allowed: Sequence[str]) -> tuple[str, ...]:
    if isinstance(allowed, str) or not allowed or len(set(allowed)) != len(allowed):
        raise RecoveryError("allowed_sources must be a list of one or more names, each once", code="recovery.option")
    return tuple(allowed)


def _choose_sources(profile: Profile, allowed: tuple[str, ...] | None) -> list[str]:
    """The allowed ones of the profile's sources, in the profile's order."""
    unknown = sorted(set(allowed or ()) - set(profile.sources))
    if unknown:
        raise RecoveryError(
            f"allowed_sources may name {', '.join(profile.sources)}, and not {', '.join(unknown)}",
            code="recovery.option",
        )
    return [source for source in profile.sources if allowed is None or source in allowed]
