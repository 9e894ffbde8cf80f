"""run_pause and resume_paused: nothing external before a person has approved the order.

The pause is a stage of the job. The decision is recorded by the adapter, outside any run, and bound to the fingerprint
of the order; the tool that writes checks it again itself.
"""

from __future__ import annotations

from ditto.recovery.checkpoint import Checkpoint
from ditto.recovery.entry import Course, advance, enter
from ditto.recovery.errors import RecoveryError
from ditto.recovery.job import Job, RecoveryInput
from ditto.recovery.runs import JobRuns, RecoveryRuntime


async def run_pause(runtime: RecoveryRuntime, input: RecoveryInput) -> Job:
    """Prepare the job and pause it; once it is approved, go on to the end.

    The job must have been created with requires_approval, else RecoveryError `recovery.approval`.
    """
    return (await enter(runtime, input, _to_the_decision_or_beyond)).job


async def resume_paused(runtime: RecoveryRuntime, input: RecoveryInput) -> Job:
    """Go on after the decision: to the end if it was approved; a rejected job stays rejected.

    Without a decision the job stays paused, and nothing happens. Raises as run_pause does.
    """
    return (await enter(runtime, input, _to_the_decision_or_beyond)).job


async def _to_the_decision_or_beyond(runs: JobRuns, at: Checkpoint) -> Checkpoint:
    if not at.job.requires_approval and not at.is_closed:
        raise RecoveryError(
            f"job {at.job.id} needs no approval; create it with requires_approval, or enter it by another workflow",
            code="recovery.approval",
        )
    return await advance(runs, at, Course())
