"""Questions: what an open approval shows, and which one a decision is meant for."""

from __future__ import annotations

from collections.abc import Sequence

from ditto.clock import to_datetime
from ditto.engine.approving import BELOW
from ditto.engine.waiting import shown_digest
from ditto.errors import DefinitionError, TransitionRefusedError
from ditto.store.records import StepRow
from ditto.store.schema import StepState
from ditto.store.values import Stored
from ditto.waits import OpenWait, WaitKind


def open_wait(run_id: str, row: StepRow) -> OpenWait:
    """A waiting step as it is shown to whoever ends the wait."""
    kind = WaitKind(row.type)
    shown = row.arguments if kind is WaitKind.APPROVAL and isinstance(row.arguments, Stored) else None
    return OpenWait(
        step=row.path,
        kind=kind,
        name=row.key or row.path,
        shown=None if shown is None else shown.decode(),
        digest=None if shown is None else shown_digest(run_id, row.path, shown),
        due_at=None if row.due_at is None else to_datetime(row.due_at),
    )


def find_question(run_id: str, step: str | None, rows: Sequence[StepRow]) -> StepRow:
    """The open approval that is meant: the step's own path, or that of the step which asks before it is attempted.

    Raises DefinitionError if there is none, or it is not clear which one; TransitionRefusedError, which tells the
    decision, if it was decided.
    """
    approvals = [row for row in rows if row.type == WaitKind.APPROVAL]
    waiting = [row for row in approvals if row.state is StepState.WAITING]
    if step is None:
        if len(waiting) == 1:
            return waiting[0]
        if waiting:
            listed = ", ".join(row.path for row in waiting)
            raise DefinitionError(f"run {run_id}: {len(waiting)} approvals are open ({listed}); say which step")
        if len(approvals) == 1:
            raise _already(run_id, approvals[0])
        raise DefinitionError(f"run {run_id}: no approval is open")
    for row in approvals:
        if row.path in (step, step + BELOW):
            if row.state is StepState.WAITING:
                return row
            raise _already(run_id, row)
    raise DefinitionError(f"run {run_id}: step {step} asks for no approval, or not yet")


def _already(run_id: str, row: StepRow) -> TransitionRefusedError:
    return TransitionRefusedError("decide", f"step {row.path}: {_settled(row)}", run_id=run_id, step=row.path)


def _settled(row: StepRow) -> str:
    decided = None if row.output is None else row.output.decode()
    if decided is None:
        return "it waits no more"
    if decided["decision"] == "expired":
        return "it expired without a decision"
    return f"already decided: {decided['decision']} by {decided['actor']}"
