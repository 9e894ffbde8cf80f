"""What is recorded of a job, and what follows from it. Pure: every decision of the entries is made here.

The codes below are what the workflows understand of an adapter's answers; every other code is kept as a reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ditto import EffectNotMade, ResultError, StepError, UnknownOutcomeError
from ditto.recovery.job import TERMINAL, Job, JobError, Stage
from ditto.recovery.profile import Profile

SOURCE_TOO_LARGE: Final = "SOURCE_TOO_LARGE"
"""From recovery_source: read again with a higher limit, `requiredBytes` in its details. Only run_retry does."""
UNAVAILABLE: Final = "UNAVAILABLE"
"""From recovery_catalog: another allowed source may be asked. Only run_fallback does."""
CATALOG_TIMEOUT: Final = "CATALOG_TIMEOUT"
"""Ours: the catalog read missed the deadline of run_timeout."""
STAGE_CONFLICT: Final = "STAGE_CONFLICT"
"""From a local tool: the job has moved on meanwhile. It is the caller's to enter again, and nothing is recorded."""

OPERATION_UNCERTAIN: Final = "OPERATION_UNCERTAIN"
"""Ours: the operation was sent, and neither its response nor the look-up says what became of it."""
OPERATION_PENDING: Final = "OPERATION_PENDING"
"""Ours: the other side has the operation and has not settled it."""
OPERATION_NOT_SENT: Final = "OPERATION_NOT_SENT"
"""Ours: nothing was done over there, and sending may succeed later."""
LOOKUP_UNCONFIRMED: Final = "LOOKUP_UNCONFIRMED"
"""Ours: the look-up failed, so nothing was sent."""
UNSETTLED: Final = frozenset({OPERATION_UNCERTAIN, OPERATION_PENDING, OPERATION_NOT_SENT, LOOKUP_UNCONFIRMED})

OPERATION_CONFLICT: Final = "OPERATION_CONFLICT"
"""From recovery_operation: the key belongs to an operation with other parameters."""
RECEIPT_MISMATCH: Final = "RECEIPT_MISMATCH"
"""From recovery_checkpoint: what is committed over there is not what the job asked for."""
FOR_REVIEW: Final = frozenset({OPERATION_CONFLICT, RECEIPT_MISMATCH})
"""Something exists in the world that the job does not account for."""

_FAULTS: Final = ("sandbox.", "tool.exception", STAGE_CONFLICT)
"""What says something about the program or its setup, not about the job."""

_HALTS: Final = TERMINAL | {Stage.PAUSED, Stage.TIMED_OUT, Stage.UNCERTAIN}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A job as it is recorded, with the profile that explains it."""

    job: Job
    profile: Profile

    @property
    def is_closed(self) -> bool:
        """Nothing here moves by being entered: the job is terminal, or waits for a person's decision."""
        return self.job.stage in TERMINAL or self.job.stage == Stage.PAUSED

    @property
    def is_halted(self) -> bool:
        """The entry that has brought the job here ends here."""
        return self.job.stage in _HALTS

    @property
    def is_prepared(self) -> bool:
        return self.job.order is not None

    @property
    def awaits_approval(self) -> bool:
        return self.job.requires_approval and self.job.approval is None

    @property
    def has_begun(self) -> bool:
        """An operation is confirmed. One that was sent and lost is found by its own run."""
        return bool(self.job.operations)

    @property
    def unsettled(self) -> str | None:
        """The operation whose outcome is to be settled before anything else."""
        error = self.job.error
        return error.operation if error is not None and self.job.stage == Stage.UNCERTAIN else None

    @property
    def next_operation(self) -> str | None:
        """The first operation that is not confirmed."""
        return next((each.kind for each in self.profile.operations if each.kind not in self.job.operations), None)

    @property
    def next_undo(self) -> str | None:
        """What undoes the last operation that still stands; None unless an operation was *confirmed* as rejected.

        None, too, when an undoing was rejected: what is left is for a person.
        """
        found = self.job.operations
        rejected = [kind for kind, operation in found.items() if operation.state == "rejected"]
        if not rejected or any(self.profile.planned(kind) is None for kind in rejected):
            return None
        standing = [each for each in self.profile.operations if self._is_committed(each.kind)]
        return next((each.undo for each in reversed(standing) if each.undo and each.undo not in found), None)

    def reached(self, stage: str | None) -> bool:
        """Whether the job has come as far as `prepared`, or as the stage of one of its operations."""
        if stage == Stage.PREPARED:
            return self.is_prepared
        return any(each.stage == stage and self._is_committed(each.kind) for each in self.profile.operations)

    def _is_committed(self, kind: str) -> bool:
        operation = self.job.operations.get(kind)
        return operation is not None and operation.state == "committed"


def is_fault(error: StepError | ResultError) -> bool:
    """Whether a failure is one of the program or its setup: it is raised to the caller and never kept as a reason."""
    return error.code.startswith(_FAULTS)


def decide_stage(at: Checkpoint, kind: str, failure: StepError) -> tuple[Stage, JobError] | None:
    """Where the failed run of an operation leads; None if the failure says nothing about the job.

    What is not settled stays uncertain. A definite failure is `failed` only while nothing stands in the world; else a
    person is to look at it.
    """
    if isinstance(failure, EffectNotMade):  # sent, and the look-up proves that nothing came of it
        return Stage.UNCERTAIN, JobError(code=OPERATION_NOT_SENT, message=failure.message, operation=kind)
    error = JobError(code=failure.code, message=failure.message, operation=kind)
    if failure.code in UNSETTLED:
        return Stage.UNCERTAIN, error
    if failure.error_type != "ToolError" or is_fault(failure) or at.job.stage == Stage.NEEDS_REVIEW:
        return None
    if failure.code in FOR_REVIEW or at.has_begun:
        return Stage.NEEDS_REVIEW, error
    return Stage.FAILED, error


def uncertain_error(kind: str, unknown: UnknownOutcomeError) -> JobError:
    """Why a job is uncertain whose operation was sent, and is lost. The same words each time: nothing has changed."""
    message = (
        f"{kind} was sent, and no response and no look-up says what became of it. Enter the job again to look it up; "
        f"if that can never settle it, decide on step {', '.join(unknown.steps)} of run {unknown.run_id}"
    )
    return JobError(code=OPERATION_UNCERTAIN, message=message, operation=kind)
