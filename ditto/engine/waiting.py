"""Waiting: what a wait's row stands at, and how a wait ends when its time has come."""

from __future__ import annotations

from typing import Any

from ditto.engine.drive import Drive
from ditto.errors import TransitionRefusedError
from ditto.store.records import Event, StepRow
from ditto.store.schema import StepState
from ditto.store.values import Stored, digest
from ditto.waits import WaitKind


async def look(drive: Drive, row: StepRow) -> StepRow:
    """A wait that has begun, as it stands now: if its time has come, it is over."""
    kind = WaitKind(row.type)
    if row.state is StepState.WAITING and row.due_at is not None and row.due_at <= drive.store.clock.now_us():
        output = drive.store.encode(over_output(kind), f"the end of wait {row.path}")
        try:
            await drive.end_wait(row, output, Event("wait_over", row.path, {"name": row.key}))
        except TransitionRefusedError:
            pass  # a signal or a decision was faster: it stands
        row = await drive.look_at_wait(row.path)
    return row


def shown_digest(run_id: str, path: str, shown: Stored) -> str:
    """What a decision is bound to: the run, the step, and what was shown."""
    return digest(f"{run_id}\n{path}\n{shown.body}")


def over_output(kind: WaitKind) -> dict[str, Any]:
    """The output of a wait whose time has come."""
    match kind:
        case WaitKind.SIGNAL:
            return {"timed_out": True, "body": None, "actor": None, "at": None}
        case WaitKind.APPROVAL:
            return {"decision": "expired", "actor": None, "reason": None, "digest": None, "at": None}
        case WaitKind.TIMER | WaitKind.CHILD:
            return {"timed_out": True}


def due_at(drive: Drive, seconds: float | None) -> int | None:
    """When a wait that begins now is over by itself, by the clock of the record."""
    return None if seconds is None else drive.store.clock.now_us() + round(seconds * 1_000_000)
