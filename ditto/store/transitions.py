"""Transitions: every write to the store, one function each, with its contract above it.

A transition runs inside a transaction of the committer. Its first statement is its guard, which names in its WHERE
the fence or the state that the change was decided on. If the guard matches no row, TransitionRefusedError says so
and nothing of the transition is written; other transitions of the same transaction are not touched by that.

                     create_run
                         │
                      running ◄───────────── claim_run ◄──────────────┐
                         │                                            │
       record_steps, move_step (the outcomes)                         │
                         │                                            │
                     release_run ──► interrupted · unknown ─► resolve_step
                         │      └──► failed · exhausted (reopened by name)
                         └──► completed
                       pause_run ──► paused (its owner, if it has one, drains it, then lets go) ─► unpause_run
                      cancel_run ──► cancelled
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from ditto.errors import TransitionRefusedError
from ditto.items import Items, Kept
from ditto.receipts.body import Draft
from ditto.store import statements as sql
from ditto.store.chain import Chain, Tip
from ditto.store.records import DRAINED, Event, Fence, LoopState, NewRun, RunEnd, RunRow, Seen, StepRow
from ditto.store.schema import CLOSED, REOPENABLE, UNDER_WAY, RunStatus, StepState
from ditto.store.values import GROWING, Growing, Stored, digest, store_text

EVENT_ID_SHIFT: Final = 32
"""The id of an event is `run << 32 | seq`: a run's events lie side by side, and need no index of their own."""


BEGIN: Final = "begin"
"""Names the refusal of what would begin something in a run that was paused, and is ours to drain."""


class Transaction:
    """One open transaction: the driver's connection, its time, and a mark by which a lost COMMIT can be found."""

    __slots__ = ("_chain", "_tip", "after_commit", "at", "db", "mark", "paused")

    def __init__(self, db: sqlite3.Connection, at: int, chain: Chain | None = None) -> None:
        self.db = db
        self.at = at
        self._chain = chain
        self._tip: Tip | None = None
        self.mark: int | None = None
        """The id of the first event written: it exists, with this time, if and only if the transaction committed."""
        self.after_commit: list[Callable[[], None]] = []
        """Called in the committer's thread once the transaction is on disk."""
        self.paused: set[int] = set()
        """Runs that were found to be paused when their events were written."""

    def keep(self, value: Stored | Growing | None) -> str | None:
        """Store a value, if it is not stored yet; returns what its column holds."""
        if value is None:
            return None
        if isinstance(value, Growing):
            lists = {name: self._keep_list(items) for name, items in value.lists.items()}
            return GROWING + json.dumps([self.keep(value.rest), lists], separators=(",", ":"))
        if value.by_reference:
            sql.INSERT_VALUE(self.db, digest=value.digest, body=value.body)
        return value.column

    def _keep_list(self, items: Items) -> int:
        """Store what the list adds to its stored prefix; all of it when the additions weigh as much as the whole."""
        growth, length = items.growth, len(items)
        stored, ids, full_length = growth.kept
        if stored is not None and len(ids) == length:
            return stored
        ids = ids[:length] + tuple(self._keep_item(growth.text(position)) for position in range(len(ids), length))
        full = stored is None or len(growth.kept.ids) > length or length - full_length >= full_length
        shown = ids if full else ids[len(growth.kept.ids) :]
        inserted = sql.INSERT_LIST(
            self.db,
            base=None if full else stored,
            length=length,
            added=json.dumps(shown, separators=(",", ":")),
        ).lastrowid
        assert inserted is not None
        kept = Kept(inserted, ids, length if full else full_length)
        self.after_commit.append(lambda: growth.mark_stored(kept))
        return inserted

    def _keep_item(self, text: str) -> int:
        key = bytes.fromhex(digest(text))
        inserted = sql.INSERT_VALUE(self.db, digest=key, body=text)
        if inserted.rowcount == 1:
            assert inserted.lastrowid is not None
            return inserted.lastrowid
        found: int = sql.GET_VALUE_ID(self.db, b_digest=key).fetchone()[0]
        return found

    def tell(self, run: int, events: Sequence[Event]) -> None:
        """Write a run's events; its `seq` has been raised by their number already."""
        if not events:
            return
        last, status = sql.GET_SEQ(self.db, b_run=run).fetchone()
        if status == RunStatus.PAUSED:
            self.paused.add(run)
        number = (run << EVENT_ID_SHIFT) | (last - len(events) + 1)
        if self.mark is None:
            self.mark = number
        for offset, event in enumerate(events):
            sql.INSERT_EVENT(
                self.db, id=number + offset, at=self.at, kind=event.kind, step=event.step, body=event.body_text()
            )

    def certify(self, run: int, draft: Draft | None) -> None:
        """Add a receipt to the chain; None where there is nothing to certify."""
        if draft is not None:
            assert self._chain is not None, "the chain is opened before anything that it certifies"
            self._tip = self._chain.append(self.db, self.at, run, draft, self._tip)


def create_run(tx: Transaction, new: NewRun, events: Sequence[Event]) -> int:
    """A new generation, running, owned by its creator at fence 1.

    Guard: no such run id and generation yet, and no other generation of it is open.
    Returns the row id of the run.
    """
    created = sql.INSERT_RUN(
        tx.db,
        run_id=new.run_id,
        generation=new.generation,
        kind=new.kind,
        workflow=new.workflow,
        version=new.version,
        input=new.input.column,
        input_digest=new.input_digest,
        status=RunStatus.RUNNING.value,
        owner=new.owner,
        fence=1,
        seq=len(events),
        iteration=0,
        state=None if new.state is None else new.state.column,
        error=None,
        crashes=0,
        claimed_seq=len(events),
        created_at=tx.at,
        updated_at=tx.at,
        deadline_at=new.deadline_at,
    )
    if created.rowcount != 1:
        raise TransitionRefusedError("create_run", "the id exists already", run_id=new.run_id)
    run = created.lastrowid
    assert run is not None
    for value in (new.input, new.state):
        tx.keep(value)
    tx.tell(run, events)
    return run


def claim_run(tx: Transaction, seen: RunRow, owner: str, events: Sequence[Event], *, deadline_at: int | None) -> int:
    """The run is ours: running, fence + 1, until its deadline. Guard: fence and status are the ones seen.

    The first error of a run that was unknown when it failed is kept until what is unknown has been settled; a reopened
    run forgets it. Returns the new fence.
    """
    claimed = sql.CLAIM_RUN(
        tx.db,
        b_run=seen.id,
        b_seen_fence=seen.fence,
        b_seen_status=seen.status.value,
        b_owner=owner,
        b_crashes=_crashes(seen),
        b_status=RunStatus.RUNNING.value,
        b_error=None if seen.status in REOPENABLE else seen.error,
        b_deadline_at=deadline_at,
        b_events=len(events),
        b_at=tx.at,
    )
    if claimed.rowcount != 1:
        raise TransitionRefusedError("claim_run", "another runtime took the run first", run_id=seen.run_id)
    tx.tell(seen.id, events)
    return seen.fence + 1


def _crashes(seen: RunRow) -> int:
    """How often in a row the run's process has died without any progress, this time included."""
    if seen.status is not RunStatus.RUNNING or seen.owner is None:
        return 0
    return 1 if seen.seq > seen.claimed_seq else seen.crashes + 1


def block_run(tx: Transaction, seen: RunRow, event: Event) -> None:
    """The code does not fit the run: it is left as it is, until it is run with other code. Guard: fence and status."""
    blocked = sql.BLOCK_RUN(
        tx.db, b_run=seen.id, b_seen_fence=seen.fence, b_seen_status=seen.status.value, b_events=1, b_at=tx.at
    )
    if blocked.rowcount != 1:
        raise TransitionRefusedError("block_run", "another runtime moved the run first", run_id=seen.run_id)
    tx.tell(seen.id, (event,))


def record_steps(
    tx: Transaction,
    fence: Fence,
    rows: Sequence[StepRow],
    events: Sequence[Event],
    loops: Sequence[LoopState] = (),
    calls: Sequence[StepRow] = (),
    *,
    begins: bool = False,
) -> None:
    """Rows of steps that have none yet: outcomes, admissions, skips; and how far the loop is. Guard: the fence.

    `begins`: something is about to be started, so the run must not be paused, either.
    """
    touched = sql.TOUCH_RUN(tx.db, **_fenced(fence, begins=begins), b_events=len(events), b_at=tx.at)
    if touched.rowcount != 1:
        _refuse_paused(tx, fence, begins=begins)
        raise _fence_lost("record_steps", fence)
    for loop in loops:
        if loop.path is None:
            sql.ADVANCE_LOOP(tx.db, b_run=fence.run, b_iteration=loop.iteration, b_state=tx.keep(loop.state))
        else:
            _advance_call(tx, fence.run, loop)
    for call in calls:
        if not _move_call(tx, fence.run, call):
            _insert_step(tx, fence.run, call)
    for row in rows:
        _insert_step(tx, fence.run, row)
    tx.tell(fence.run, events)


def _move_call(tx: Transaction, run: int, call: StepRow) -> bool:
    """A call of a Flow that has a row already: a Loop that was open, a failure that was tried again."""
    moved = sql.MOVE_CALL(
        tx.db,
        b_run=run,
        b_path=call.path,
        n_version=call.version,
        n_state=call.state.value,
        n_attempt=call.attempt,
        n_output=tx.keep(call.output),
        n_error=call.error,
        n_settled_at=tx.at,
    )
    return moved.rowcount == 1


def _insert_step(tx: Transaction, run: int, row: StepRow) -> None:
    sql.INSERT_STEP(
        tx.db,
        run=run,
        path=row.path,
        type=row.type,
        version=row.version,
        after=row.after,
        effect=row.effect,
        state=row.state.value,
        attempt=row.attempt,
        key=row.key,
        arguments=tx.keep(row.arguments),
        output=tx.keep(row.output),
        error=row.error,
        admitted_at=tx.at if row.state is StepState.ADMITTED else row.admitted_at,
        settled_at=None if row.state in UNDER_WAY else tx.at,
        due_at=row.due_at,
        deadline_at=row.deadline_at,
    )


def _advance_call(tx: Transaction, run: int, loop: LoopState) -> None:
    """How far a Loop inside a Flow is: the row of its call, open, with the state after `attempt` iterations."""
    state = tx.keep(loop.state)
    moved = sql.ADVANCE_CALL(tx.db, b_run=run, b_path=loop.path, n_attempt=loop.iteration, n_output=state)
    if moved.rowcount == 0:
        sql.INSERT_STEP(
            tx.db, run=run, path=loop.path, type="CALL.LOOP", version=loop.version, after="[]", effect=None,
            state=StepState.OPEN.value, attempt=loop.iteration, key=loop.name, arguments=None, output=state, error=None,
            admitted_at=None, settled_at=None, due_at=None, deadline_at=None,
        )  # fmt: skip


def begin_wait(tx: Transaction, fence: Fence, row: StepRow, signal: str | None, event: Event) -> StepRow:
    """A step begins to wait; for a signal that was sent before, it is over at once. Guard: the fence, and not paused.

    Returns the row as it stands.
    """
    found = None if signal is None else sql.FIND_SIGNAL(tx.db, b_run=fence.run, b_name=signal).fetchone()
    if found is None:
        record_steps(tx, fence, (row,), (event,), begins=True)
        return row
    number, body, actor, at, signal_id = found
    settled = replace(row, state=StepState.COMPLETED, output=store_text(signal_output(body, actor, at)), due_at=None)
    received = Event("signal_received", row.path, {"name": signal, "signal": signal_id, "actor": actor})
    record_steps(tx, fence, (settled,), (event, received), begins=True)
    sql.TAKE_SIGNAL(tx.db, b_id=number, n_step=row.path)
    return settled


def send_signal(tx: Transaction, run: int, name: str, signal_id: str, body: Stored, actor: str) -> bool:
    """A signal for an open run: queued, or given to the step that waits for it. Guard: the run is open.

    False if a signal with that id was sent before: nothing is written then. A run that waited may go on.
    """
    sent = sql.INSERT_SIGNAL(tx.db, run=run, name=name, signal_id=signal_id, body=body.body, actor=actor, at=tx.at)
    if sent.rowcount != 1:
        status = sql.GET_STATUS(tx.db, b_run=run).fetchone()
        if status is not None and status[0] in CLOSED:
            raise TransitionRefusedError("send_signal", f"the run is {status[0]}")
        return False
    sql.COUNT_EVENTS(tx.db, b_run=run, b_events=1, b_at=tx.at)
    waits = sql.FIND_WAIT(tx.db, b_run=run, b_type="WAIT.SIGNAL", b_name=name).fetchone()
    step = None if waits is None else waits[0]
    tx.tell(run, (Event("signal_received", step, {"name": name, "signal": signal_id, "actor": actor}),))
    if waits is not None:
        output = store_text(signal_output(body.body, actor, tx.at))
        assert sent.lastrowid is not None
        sql.TAKE_SIGNAL(tx.db, b_id=sent.lastrowid, n_step=step)
        _settle_wait(tx, run, waits[0], waits[1], output)
    return True


def settle_wait(
    tx: Transaction,
    run: int,
    path: str,
    attempt: int,
    output: Stored,
    event: Event,
    receipt: Draft | None = None,
) -> None:
    """A decision, or a time that has come, ends a wait. Guard: the step still waits.

    So exactly one of several deciders, timers and signals ends it. A run that waited may go on.
    """
    _settle_wait(tx, run, path, attempt, output)
    sql.COUNT_EVENTS(tx.db, b_run=run, b_events=1, b_at=tx.at)
    tx.tell(run, (event,))
    tx.certify(run, receipt)


def _settle_wait(tx: Transaction, run: int, path: str, attempt: int, output: Stored) -> None:
    settled = sql.SETTLE_WAIT(
        tx.db, b_run=run, b_path=path, b_attempt=attempt, n_output=output.column, n_settled_at=tx.at
    )
    if settled.rowcount != 1:
        raise TransitionRefusedError("settle_wait", f"step {path} waits no more", step=path)
    tx.keep(output)
    sql.WAKE_RUN(tx.db, b_run=run)


def wake_expired(tx: Transaction, run: int) -> None:
    """A run whose deadline passed while it waited is to be taken up, and ended. Guard: it waits, and has passed."""
    if sql.WAKE_EXPIRED(tx.db, b_run=run, b_at=tx.at).rowcount != 1:
        raise TransitionRefusedError("wake_expired", "the run waits no more, or has time left")


def signal_output(body: str, actor: str, at: int) -> str:
    """The output of a wait that a signal ended, as JSON text around the signal's body."""
    told = json.dumps({"actor": actor, "at": at}, ensure_ascii=False, separators=(",", ":"))
    return f'{{"timed_out":false,"body":{body},{told[1:]}'


def move_step(
    tx: Transaction, fence: Fence, row: StepRow, seen: Seen, events: Sequence[Event], *, begins: bool = False
) -> None:
    """A step that has a row moves on: the outcome of an admitted attempt, a new admission, a look-up's answer.

    Guard: the step's state and attempt are the ones seen, and the fence. `begins` as for `record_steps`. Its receipt
    is written with it.
    """
    moved = sql.MOVE_STEP(
        tx.db,
        **_fenced(fence, begins=begins),
        b_path=row.path,
        b_seen_state=seen.state.value,
        b_seen_attempt=seen.attempt,
        n_type=row.type,
        n_version=row.version,
        n_after=row.after,
        n_effect=row.effect,
        n_state=row.state.value,
        n_attempt=row.attempt,
        n_key=row.key,
        n_arguments=row.arguments.column if isinstance(row.arguments, Stored) else None,
        n_output=None if row.output is None else row.output.column,
        n_error=row.error,
        n_admitted_at=tx.at if row.state is StepState.ADMITTED else row.admitted_at,
        n_due_at=row.due_at,
        n_deadline_at=row.deadline_at,
        n_settled_at=None if row.state in UNDER_WAY else tx.at,
    )
    if moved.rowcount != 1:
        _refuse_paused(tx, fence, begins=begins)
        raise TransitionRefusedError(
            "move_step",
            f"step {row.path} is no longer {seen.state} at attempt {seen.attempt}, or the run changed hands",
            run_id=fence.run_id,
            step=row.path,
        )
    if isinstance(row.arguments, Growing) and row.state is StepState.ADMITTED:
        sql.SET_ARGUMENTS(tx.db, b_run=fence.run, b_path=row.path, n_arguments=tx.keep(row.arguments))
    elif isinstance(row.arguments, Stored):
        tx.keep(row.arguments)
    tx.keep(row.output)
    sql.TOUCH_RUN(tx.db, **_fenced(fence), b_events=len(events), b_at=tx.at)
    tx.tell(fence.run, events)
    tx.certify(fence.run, row.receipt)


def release_run(tx: Transaction, fence: Fence, end: RunEnd) -> None:
    """The owner lets go: completed, failed, exhausted, unknown, waiting or interrupted. Guard: the fence.

    A run that was paused meanwhile, and has not come to its end, stays paused: it is drained.
    """
    closed = end.status in CLOSED
    released = sql.RELEASE_RUN(
        tx.db,
        **_fenced(fence),
        b_events=1,
        b_at=tx.at,
        b_status=end.status.value,
        b_closed=int(closed),
        b_error=end.error,
    )
    if released.rowcount != 1:
        raise _fence_lost("release_run", fence)
    event = end.event
    if not closed and sql.GET_STATUS(tx.db, b_run=fence.run).fetchone()[0] == RunStatus.PAUSED:
        event = DRAINED
    if end.waits and sql.COUNT_WAITS(tx.db, b_run=fence.run).fetchone()[0] < end.waits:
        # A wait ended while the run was still driven: nobody else will wake it.
        sql.WAKE_RUN(tx.db, b_run=fence.run)
    if closed:
        sql.WAKE_PARENTS(tx.db, b_run_id=fence.run_id)
    tx.tell(fence.run, (event,))


def pause_run(tx: Transaction, seen: RunRow, event: Event, *, driven: bool) -> None:
    """The run is paused, whoever drives it. Guard: fence and status are the ones seen.

    `driven`: its owner lives, and keeps it until what is under way is drained and recorded; else nobody has it.
    """
    paused = sql.PAUSE_RUN(
        tx.db,
        b_run=seen.id,
        b_seen_fence=seen.fence,
        b_seen_status=seen.status.value,
        b_status=RunStatus.PAUSED.value,
        b_owner=seen.owner if driven else None,
        b_events=1,
        b_at=tx.at,
    )
    if paused.rowcount != 1:
        raise TransitionRefusedError("pause_run", "somebody else moved the run first", run_id=seen.run_id)
    tx.tell(seen.id, (event,))


def unpause_run(tx: Transaction, seen: RunRow, event: Event) -> None:
    """A paused run, which nobody drives, is interrupted, and may be taken up. Guard: paused, at the fence seen."""
    moved = sql.PAUSE_RUN(
        tx.db,
        b_run=seen.id,
        b_seen_fence=seen.fence,
        b_seen_status=RunStatus.PAUSED.value,
        b_status=RunStatus.INTERRUPTED.value,
        b_owner=None,
        b_events=1,
        b_at=tx.at,
    )
    if moved.rowcount != 1:
        raise TransitionRefusedError("unpause_run", "the run is not paused any more", run_id=seen.run_id)
    tx.tell(seen.id, (event,))


def resolve_step(
    tx: Transaction,
    run: int,
    path: str,
    seen: Seen,
    state: StepState,
    output: Stored | None,
    error: str | None,
    event: Event,
    receipt: Draft | None = None,
) -> None:
    """A person's decision on a step whose outcome is lost. Guard: the state and attempt it was decided on.

    A run that nobody drives is left unknown while another of its steps is lost, else interrupted; a paused one paused.
    """
    resolved = sql.RESOLVE_STEP(
        tx.db,
        b_run=run,
        b_path=path,
        b_seen_state=seen.state.value,
        b_seen_attempt=seen.attempt,
        n_state=state.value,
        n_output=None if output is None else output.column,
        n_error=error,
        n_settled_at=tx.at,
    )
    if resolved.rowcount != 1:
        raise TransitionRefusedError(
            "resolve_step", f"step {path} is no longer {seen.state} at attempt {seen.attempt}; look again", step=path
        )
    tx.keep(output)
    lost = sql.COUNT_LOST(tx.db, b_run=run).fetchone()[0]
    sql.SETTLE_STATUS(tx.db, b_run=run, b_status=(RunStatus.UNKNOWN if lost else RunStatus.INTERRUPTED).value)
    sql.COUNT_EVENTS(tx.db, b_run=run, b_events=1, b_at=tx.at)
    tx.tell(run, (event,))
    tx.certify(run, receipt)


def cancel_run(tx: Transaction, run: int, event: Event) -> None:
    """The run is cancelled for good, whoever drives it. Guard: it is open."""
    cancelled = sql.MOVE_RUN(tx.db, b_run=run, b_status=RunStatus.CANCELLED.value, b_events=1, b_at=tx.at)
    if cancelled.rowcount != 1:
        raise TransitionRefusedError("cancel_run", "the run is closed already")
    tx.tell(run, (event,))


def note_event(
    tx: Transaction, run: int, event: Event, value: Stored | None = None, receipt: Draft | None = None
) -> None:
    """A line of history that changes no state, for example a result that came too late. Guard: the run exists.

    `receipt` is for an attempt that was under way when its run was cancelled: no transition will ever settle it. Where
    somebody else settles it, theirs counts.
    """
    noted = sql.COUNT_EVENTS(tx.db, b_run=run, b_events=1, b_at=tx.at)
    if noted.rowcount != 1:
        raise TransitionRefusedError("note_event", "no such run")
    tx.keep(value)
    tx.tell(run, (event,))
    if receipt is not None and _was_cancelled_under_way(tx, run, receipt):
        tx.certify(run, receipt)


def _was_cancelled_under_way(tx: Transaction, run: int, receipt: Draft) -> bool:
    found = sql.IS_UNDER_WAY(tx.db, b_run=run, b_path=receipt.step, b_attempt=receipt.attempt)
    return found.fetchone() is not None


def note_partials(tx: Transaction, run: int, events: Sequence[Event]) -> None:
    """Text that was shown before its step has an outcome. It is no progress of the run. Guard: the run exists."""
    noted = sql.COUNT_PARTIALS(tx.db, b_run=run, b_events=len(events), b_at=tx.at)
    if noted.rowcount != 1:
        raise TransitionRefusedError("note_partials", "no such run")
    tx.tell(run, events)


def _fenced(fence: Fence, *, begins: bool = False) -> dict[str, int | str]:
    barred = RunStatus.PAUSED.value if begins else ""
    return {"b_run": fence.run, "b_owner": fence.owner, "b_fence": fence.fence, "b_barred": barred}


def _refuse_paused(tx: Transaction, fence: Fence, *, begins: bool) -> None:
    """Say that a pause is why, if it is."""
    if begins and sql.GET_OWNED(tx.db, b_run=fence.run, b_owner=fence.owner).fetchone() == (RunStatus.PAUSED.value,):
        raise TransitionRefusedError(BEGIN, "the run was paused first", run_id=fence.run_id)


def _fence_lost(transition: str, fence: Fence) -> TransitionRefusedError:
    return TransitionRefusedError(
        transition, "the run is not ours any more: it was cancelled, or changed hands", run_id=fence.run_id
    )
