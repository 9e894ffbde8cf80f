"""The job: its stages, and its checkpoint as data. No I/O, and nothing about any one domain.

                 ┌────────────────────────────────────────────┐
    queued ──► prepared ──► paused ──► approved ──► <a stage for each operation> ──► completed ■
      │           │            └─────► rejected ■                  │
      │           ▼                                                │ an operation was rejected
      │       timed-out, uncertain ──► (go on where they were)     ▼
      └──────────────────────────────► failed ■              needs-review ■ ──► uncertain ──► compensated ■

■ is terminal. `paused` is left only by a decision. `timed-out` and `uncertain` may be reached from every stage that is
not terminal, and the next entry goes on from what is recorded; `failed` only while no operation has been committed.
`needs-review` is left only by run_compensation, and only if an operation was rejected and nothing was undone in vain.

A job's JSON has camel-case names (schemaVersion, sourceHash, …). Beside `operations` an adapter may show some of them
under names of its own: the orders' `reservation` and `shipment`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Final, Literal

from pydantic import ConfigDict, Field
from pydantic.alias_generators import to_camel

from ditto import Context, Contract, Json, ModelRef

ID_PATTERN: Final = "^[A-Za-z0-9_-]{1,64}$"


class Stage(StrEnum):
    """Where a job stands. Between `prepared` and `completed` each operation of the profile has a stage of its own."""

    QUEUED = "queued"
    PREPARED = "prepared"
    PAUSED = "paused"
    APPROVED = "approved"
    COMPLETED = "completed"
    REJECTED = "rejected"
    TIMED_OUT = "timed-out"
    UNCERTAIN = "uncertain"
    COMPENSATED = "compensated"
    NEEDS_REVIEW = "needs-review"
    FAILED = "failed"


TERMINAL: Final = frozenset({Stage.COMPLETED, Stage.COMPENSATED, Stage.REJECTED, Stage.FAILED, Stage.NEEDS_REVIEW})
"""Entering a job here again returns it and causes nothing; the exceptions are run_session and run_compensation."""

OperationState = Literal["absent", "pending", "committed", "rejected"]


class _Record(Contract):
    """A contract whose JSON names are in camel case."""

    model_config = ConfigDict(alias_generator=to_camel, validate_by_name=True, validate_by_alias=True)

    def to_json(self) -> dict[str, Any]:
        """As JSON data, under the names that are stored and shown."""
        return self.model_dump(mode="json", by_alias=True)


class RecoveryInput(Contract):
    """What every entry needs: the job, 1 to 64 of letters, digits, `_` and `-`, and the model it asks."""

    id: str = Field(pattern=ID_PATTERN)
    model: ModelRef


class Reason(_Record):
    """Why an operation was rejected: the other side's code and words."""

    code: str
    message: str


class Operation(_Record):
    """What the other side says about one operation.

    `fingerprint` binds what was asked for; a committed operation has a receipt, a rejected one a reason.
    """

    kind: str
    key: str
    state: OperationState
    fingerprint: str | None = None
    receipt: Json = None
    reason: Reason | None = None


class Approval(_Record):
    """A person's decision, bound to the fingerprint of what was shown. The actor is recorded, not verified."""

    actor: str
    decision: Literal["approve", "reject"]
    fingerprint: str


class JobError(_Record):
    """Why the job is where it is. `operation` is the kind that it is about: in `uncertain`, the one to settle first."""

    code: str
    message: str
    operation: str | None = None


class Job(_Record):
    """The checkpoint of one job. `revision` rises by one with every change.

    `order` is the payload that the model extracted, `operations` what is confirmed of each kind. Further JSON names,
    each an operation or null, are the adapter's own, and readable as attributes.
    """

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Operation | None] = Field(init=False)

    schema_version: Literal[1]
    id: str = Field(pattern=ID_PATTERN)
    revision: int
    stage: str
    """A Stage, or the stage of one of the profile's operations."""
    source_hash: str
    order: dict[str, Json] | None = None
    context: Context | None = None
    operations: dict[str, Operation] = Field(default_factory=dict)
    approval: Approval | None = None
    requires_approval: bool = False
    selected_source: str | None = None
    error: JobError | None = None


class SessionResult(_Record):
    """What run_session found. `answer` is None for a job that ended before it had an order."""

    job: Job
    answer: dict[str, Json] | None
