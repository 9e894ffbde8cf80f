"""run_compensation: what stands is undone, in reverse, after an operation was confirmed as rejected."""

from __future__ import annotations

from ditto.recovery.checkpoint import Checkpoint
from ditto.recovery.entry import Course, advance, enter, operate
from ditto.recovery.job import Job, RecoveryInput, Stage
from ditto.recovery.runs import JobRuns, RecoveryRuntime


async def run_compensation(runtime: RecoveryRuntime, input: RecoveryInput) -> Job:
    """Go on to the end; if an operation is rejected on the way, undo what was committed before it.

    Only a *confirmed* rejection permits this: an unknown operation undoes nothing, and a completed job needs a
    business reversal of its own. Each undoing is an operation like any other: looked up, keyed, made once.
    `compensated` once all are confirmed, with the rejected operation's reason kept; `needs-review` when one of them is
    rejected; `uncertain` while one cannot be confirmed. Takes up a job that another entry has left in needs-review, if
    nothing was undone in vain there.
    """
    return (await enter(runtime, input, _forward_or_back)).job


async def _forward_or_back(runs: JobRuns, at: Checkpoint) -> Checkpoint:
    at = await advance(runs, at, Course())
    while at.job.stage == Stage.NEEDS_REVIEW and at.next_undo is not None:
        at = await operate(runs, at, at.next_undo)
    return at
