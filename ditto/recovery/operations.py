"""run_checkpoint and run_side_effect_check: the operations, each looked up by its key before every attempt."""

from __future__ import annotations

from ditto.recovery.checkpoint import Checkpoint
from ditto.recovery.entry import Course, advance, enter
from ditto.recovery.errors import RecoveryError
from ditto.recovery.job import Job, RecoveryInput, Stage
from ditto.recovery.profile import Profile
from ditto.recovery.runs import JobRuns, RecoveryRuntime


async def run_checkpoint(runtime: RecoveryRuntime, input: RecoveryInput, *, stop_after: str | None = None) -> Job:
    """Go on to the end, or to a stage, skipping what is confirmed.

    `stop_after`: `prepared`, or the stage of one of the profile's operations; None goes to the end. An operation that
    was committed over there while its checkpoint was lost here is found by its key. Raises RecoveryError for another
    stage.
    """

    async def way(runs: JobRuns, at: Checkpoint) -> Checkpoint:
        _check_stop(at.profile, stop_after)
        return await advance(runs, at, Course(stop_after=stop_after))

    return (await enter(runtime, input, way)).job


async def run_side_effect_check(runtime: RecoveryRuntime, input: RecoveryInput) -> Job:
    """Go on to the end, each operation looked up by its key before it is sent.

    Absent: it is sent under that key. Pending, or no answer: the job is uncertain, and nothing is sent. Committed: its
    receipt and fingerprint are verified, then it is saved. Rejected: the reason is kept. A response that is lost
    causes one look-up; if that does not settle it, the job is uncertain, and the next entry looks up again.
    """
    return (await enter(runtime, input, lambda runs, at: advance(runs, at, Course()))).job


def _check_stop(profile: Profile, stage: str | None) -> None:
    stops = [Stage.PREPARED.value, *(each.stage for each in profile.operations)]
    if stage is not None and stage not in stops:
        raise RecoveryError(f"stop_after may be {', '.join(stops)} or None, not {stage!r}", code="recovery.option")
