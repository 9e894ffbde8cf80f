"""A drive: one run while this runtime drives it. Everything it makes durable goes through here.

Outcomes of pure and read steps are *held*: they ride with the run's next barrier (an admission, an outcome of another
class, the end), or go by themselves after HELD_MAX of them or HELD_S seconds. What is held is an outcome for the
steps that depend on it, and for nobody else.

In a run that *carries*, every other outcome rides with the next admission, too, if that comes within CARRIED_S: so a
round of an agent, an answer of the model and the tools it asks for, costs two flushes. No step that rests on it is
attempted before it is on disk. What drives a turn gets it before that, to ask for what follows from it; who shows it to
somebody settles it first (`TurnContext.settle`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import anyio
import anyio.lowlevel

from ditto.engine.certifying import as_late
from ditto.engine.deadlines import Timers
from ditto.engine.expiry import RunDeadline
from ditto.engine.halt import Halt
from ditto.engine.live import LiveRun
from ditto.errors import (
    DittoError,
    RunBusyError,
    RunCancelledError,
    RunPausedError,
    StepError,
    StoreClosedError,
    StoreError,
    TransitionRefusedError,
)
from ditto.items import Items
from ditto.store import queries, transitions
from ditto.store.committer import Durable, Transition, Unit, UsersError
from ditto.store.records import Event, Fence, LoopState, RunEnd, Seen, StepRow
from ditto.store.schema import RunStatus
from ditto.store.transitions import Transaction
from ditto.store.values import State, Stored
from ditto.worker import Action, as_data

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from ditto.receipts.body import Draft
    from ditto.store.records import RunRow
    from ditto.store.store import Store

HELD_MAX: Final = 64
HELD_S: Final = 0.05

GROWN_MAX: Final = 8
"""Conversations that a run may be in at once without storing one of them anew."""

CARRIED_S: Final = 0.005
"""How long an outcome that changed the world waits for the run's next admission, to be committed with it."""

SLOW_LOCAL_S: Final = 0.25
"""A user's function that takes longer inside a transaction keeps every other run waiting: reported by name."""

LocalHandler: TypeAlias = "Callable[[Connection], tuple[StepRow, Event]]"
CommitPart: TypeAlias = "Callable[[Connection], None]"

logger = logging.getLogger("ditto.engine")


class Drive:
    """What a runtime knows of the run it drives, and how it writes it. Used on the event loop's thread."""

    def __init__(
        self, store: Store, run: RunRow, fence: Fence, rows: dict[str, StepRow], *, resumed: bool = False
    ) -> None:
        self.store = store
        self.run = run
        self.fence = fence
        self.rows = rows
        """Rows of steps as they stand in the store, by path."""
        self.halted = Halt()
        """Set once no further attempt may start: a step failed, the run was stopped, or the runtime closes."""
        self.stopped: DittoError | None = None
        """Why nothing more of this run can be written: it is not ours any more, or the store cannot write."""
        self.timers = Timers(store.clock)
        self.deadline = RunDeadline(run, self.timers, self.halted)
        self.resumed = resumed
        """The run was there before: it may have rows that are not in `rows` yet."""
        self.ending: DittoError | None = None
        """Why the run is let go of before its end: it was paused, or the runtime closes. What is under way is drained
        and recorded, and nothing further is started."""
        self.may_block = True
        """The caller wants to wait for what the run waits for."""
        self.parent: Drive | None = None
        """The drive of the Flow that started this run, and waits for it."""
        self.wakes: set[Callable[[], None]] = set()
        """Called when a wait may be over."""
        self.carries = False
        """Outcomes of admitted and idempotent steps ride with the next admission."""
        self.ended = False
        """We let go of the run: its end, or its release, is on disk."""
        self.live = LiveRun(store, run.id)
        """The text that its running steps show."""
        self._grown: dict[str, deque[Items]] = {}
        """The lists in the latest arguments, by field, the newest first."""
        self._held = _Held()
        self._held_since = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._last: Durable | None = None
        self._told: list[Durable] = []
        """What was kept as late."""
        self._was_paused = False
        """A transaction of ours has found the run paused. Set in the committer's thread."""

    @property
    def blocks(self) -> bool:
        """A wait is waited for here; else the run is let go of while it lasts."""
        return self.may_block and self.ending is None and (self.parent is None or self.parent.blocks)

    def drain(self, reason: DittoError) -> None:
        """Start nothing further, and let go of the run when what is under way is recorded. The first reason is kept."""
        if self.ending is None:
            self.ending = reason
            self.halted.set()
            self.wake()

    def pause(self) -> None:
        """Somebody paused the run."""
        self.drain(paused_error(self.run))

    def stop(self, reason: DittoError) -> None:
        """Write nothing more of this run, and start no further attempt. The first reason is kept."""
        self.stopped = self.stopped or reason
        self.halted.set()

    def encode_arguments(self, action: Action) -> State:
        """What is recorded with an admission, in its stored form. Raises InvalidValueError, LimitExceededError."""
        recorded, what = action.recorded(), f"the arguments of {action.label}"
        if not action.growing:
            return self.store.encode(recorded, what)
        for name in action.growing:
            recorded[name] = self._grow(name, recorded[name])
        return self.store.encode_growing(recorded, what)

    def _grow(self, name: str, values: list[Any]) -> Items:
        """The values as Items that share what the longest known beginning of them has."""
        known = self._grown.setdefault(name, deque(maxlen=GROWN_MAX))
        begun = max((items for items in known if _begins_with(values, items)), key=len, default=None)
        if begun is not None:
            known.remove(begun)
        items = Items(values) if begun is None else begun.add(*values[len(begun) :])
        known.appendleft(items)
        return items

    # Held outcomes

    async def hold(self, row: StepRow, event: Event) -> None:
        """Keep an outcome that may wait for the next barrier. Lets other tasks have their turn now and then."""
        self._held.rows.append(row)
        self._held.events.append(event)
        self._schedule()
        if len(self._held.rows) >= HELD_MAX or asyncio.get_running_loop().time() >= self._held_since + HELD_S:
            # Steps that never wait would let neither the timer nor anybody else run.
            self._flush()
            await anyio.lowlevel.checkpoint()

    def carry(self, row: StepRow, event: Event, seen: Seen | None) -> None:
        """Keep an outcome for the run's next admission, for CARRIED_S at most."""
        self._check_stopped()
        self._held.moves.append((row, event, seen))
        self.rows[row.path] = row
        self._schedule(CARRIED_S)

    def hold_call(self, row: StepRow, event: Event) -> None:
        """Keep what a call of a Flow came to: it stands for steps whose outcomes are recorded."""
        self._held.calls.append(row)
        self._held.events.append(event)
        self._schedule()

    def hold_event(self, event: Event) -> None:
        """Keep a line of history until the next barrier."""
        self._held.events.append(event)
        self._schedule()

    def hold_loop(self, state: LoopState) -> None:
        """Keep how far the loop is until the next barrier; it can be computed again."""
        self._held.loops[state.path] = state
        self._held.events.append(Event("loop_advanced", state.path, {"iteration": state.iteration}))
        self._schedule()

    def hold_result(self, result: State) -> None:
        """Keep what a Flow came to, until its end."""
        self._held.loops[None] = LoopState(0, result)

    async def barrier(self) -> None:
        """Return when all outcomes so far are durable, those that another branch is committing included.

        A loop's state is no outcome: what it is computed from is durable.
        """
        # Units become durable in their order, so one wait is enough: what other branches hold or commit meanwhile is
        # none of our causes.
        if self._held.rows or self._held.moves:
            await self._commit([])
        elif self._last is not None and not self._last.done():
            await asyncio.wait([self._last])
        self._check_stopped()

    # Transitions of one step. `seen` is the state its row is known to have; None if it has no row yet. Each one takes
    # along all that is held, and the run's end if it is given. TransitionRefusedError: somebody else moved first.

    async def record(self, row: StepRow, event: Event, *, seen: Seen | None = None, end: RunEnd | None = None) -> None:
        """Make an outcome or an admission durable."""
        await self._commit([self._write_step(row, event, seen)], [row], end)

    async def admit(self, row: StepRow, event: Event, *, seen: Seen | None) -> None:
        """Make an admission durable. Raises `ending` if the run was paused first: nothing is admitted then."""
        await self._commit([self._write_step(row, event, seen, begins=True)], [row])

    async def record_with(
        self, row: StepRow, event: Event, part: CommitPart, *, seen: Seen | None, end: RunEnd | None
    ) -> None:
        """Make an outcome durable together with what its commit part writes. What that raises undoes both.

        If the caller is cancelled meanwhile, what the part raised is the cause of the cancellation.
        """

        def run_part(tx: Transaction) -> None:
            with self._timed(row.path), self.store.local.inside(self.store.committer.driver) as connection:
                part(connection)

        await self._commit([self._write_step(row, event, seen), _users(run_part)], [row], end, alone=True)

    async def run_local(self, path: str, handler: LocalHandler, *, seen: Seen | None, end: RunEnd | None) -> StepRow:
        """Run a `local` handler in the transaction that commits its step. What it raises undoes all of it.

        Raises `ending` as `admit` does.
        """
        written: list[StepRow] = []
        events: list[Event] = []

        def run_handler(tx: Transaction) -> None:
            with self._timed(path), self.store.local.inside(self.store.committer.driver) as connection:
                row, event = handler(connection)
            written[:], events[:] = [row], [event]

        def write(tx: Transaction) -> None:
            self._write_step(written[0], events[0], seen)(tx)

        guard: Transition = lambda tx: transitions.record_steps(tx, self.fence, (), (), begins=True)  # noqa: E731
        await self._commit([guard, _users(run_handler), write], written, end, alone=True, point=f"{path}:completed")
        return written[0]

    async def begin_wait(self, row: StepRow, signal: str | None, event: Event, *, seen: Seen | None = None) -> StepRow:
        """A step begins to wait, unless its signal is there already. Returns the row as it stands then.

        Raises `ending` as `admit` does.
        """
        written: list[StepRow] = []

        def begin(tx: Transaction) -> None:
            if seen is not None:
                transitions.move_step(tx, self.fence, row, seen, (event,), begins=True)
            written[:] = [row] if seen else [transitions.begin_wait(tx, self.fence, row, signal, event)]

        await self._commit([begin], written, point=f"{row.path}:waiting")
        return written[0]

    async def end_wait(self, row: StepRow, output: Stored, event: Event) -> None:
        """The time of a wait has come. TransitionRefusedError: it was ended otherwise first."""
        await self.store.commit(
            lambda tx: transitions.settle_wait(tx, self.fence.run, row.path, row.attempt, output, event),
            points=[f"{self.fence.workflow}/{row.path}:completed"],
        )

    async def look_at_wait(self, path: str) -> StepRow:
        """The row of a waiting step as it stands now."""
        row = await self.store.read(queries.get_step, self.fence.run, path)
        assert row is not None
        self.rows[path] = row
        return row

    def wake(self) -> None:
        """Somebody else wrote to the store: waits may be over. Called on the event loop's thread."""
        self.live.note_commit()
        for wake in list(self.wakes):
            wake()

    # Transitions of the run

    async def finish(self, end: RunEnd) -> None:
        """Let go of the run, with all that is held."""
        await self._commit([], end=end)

    async def release(self, end: RunEnd) -> None:
        """Let go of the run after it stopped, with what is held if that can still be written."""
        if self.stopped is None:
            with suppress(StoreError):
                await self.finish(end)
                return
        await self.store.commit(lambda tx: transitions.release_run(tx, self.fence, end))

    def note_returned(self, path: str, attempt: int, result: Any, error: BaseException | None) -> None:
        """Keep what a handler returned after its step had ended without it."""
        if error is not None:
            self._tell_late(path, attempt, error=f"{type(error).__name__}: {error}")
            return
        try:
            value = self.store.encode(as_data(result), f"the late result of step {path}")
        except Exception as refused:  # noqa: BLE001 - whatever a handler returned
            self._tell_late(path, attempt, error=str(refused))
        else:
            self._tell_late(path, attempt, value=value)

    async def note_late(
        self,
        path: str,
        attempt: int,
        *,
        value: Stored | None = None,
        error: str | None = None,
        receipt: Draft | None = None,
    ) -> None:
        """Keep an outcome that came too late to be one, for a person to look at, whoever drives the run now."""
        if (told := self._tell_late(path, attempt, value=value, error=error, receipt=receipt)) is not None:
            await asyncio.wait([told])

    def _tell_late(
        self,
        path: str,
        attempt: int,
        *,
        value: Stored | None = None,
        error: str | None = None,
        receipt: Draft | None = None,
    ) -> Durable | None:
        body: dict[str, Any] = {"attempt": attempt}
        if value is not None:
            body["value"] = value.column
        if error is not None:
            body["error"] = self.store.redact(error)
        event = Event("step_returned_late", path, body)
        try:
            told = self.store.commit(lambda tx: transitions.note_event(tx, self.fence.run, event, value, receipt))
            self._told.append(told)
            return told
        except StoreClosedError:
            logger.warning("step %s of run %s returned after the runtime was closed", path, self.fence.run_id)
            return None

    async def tell_lost(self) -> None:
        """The run is not ours any more: keep what was carried as late. Returns when all that is late is on disk."""
        held = self._take_held()
        for row, _, _ in [] if held is None else held.moves:
            self._tell_late(row.path, row.attempt, value=row.output, error=row.error, receipt=as_late(row.receipt))
        if self._told:
            for told in (await asyncio.wait(self._told))[0]:
                told.exception()

    async def explain(self, refused: TransitionRefusedError) -> DittoError:
        """Why a transition was refused: the run was cancelled, another runtime has it, or only the step moved."""
        run = await self.store.read(queries.get_run_by_key, self.fence.run)
        if run.status is RunStatus.CANCELLED:
            return RunCancelledError(f"run {run.run_id} was cancelled", run_id=run.run_id)
        # Without an owner, and at our fence, it is we who have just let go of it.
        if run.fence != self.fence.fence or run.owner not in (self.fence.owner, None):
            return RunBusyError(f"run {run.run_id} was taken over by another runtime", run_id=run.run_id)
        return refused

    def forget_held(self) -> None:
        """Drop what is held: a later drive computes it again."""
        self._held = _Held()
        self._stop_timer()

    async def _commit(
        self,
        writes: list[Transition],
        rows: Sequence[StepRow] = (),
        end: RunEnd | None = None,
        *,
        alone: bool = False,
        point: str | None = None,
    ) -> None:
        """Commit, with all that is held. Once it is on disk, `rows` are how those steps stand, cancelled or not."""
        self._check_stopped()
        points = [self._point(row) for row in rows] if point is None else [f"{self.fence.workflow}/{point}"]
        taken, kept = self._take_held(), None
        held = self._unit_of(taken)
        if held is not None and alone:
            kept = held
        elif held is not None:
            writes, points = [*held.transitions, *writes], [*held.points, *points]
        if end is not None:
            writes = [*writes, lambda tx: transitions.release_run(tx, self.fence, end)]
            points = [*points, f"{self.fence.workflow}:{end.status}"]
        writes = [*writes, self._look]
        waiter = self._last = self.store.commit(*writes, points=points, alone=alone, kept=kept, after=self._last)
        try:
            await waiter
        except UsersError as raised:
            raise raised.error from None
        except asyncio.CancelledError as cancelled:
            # It is delivered in the place of the outcome, which must not be lost for that.
            if waiter.done() and isinstance(outcome := waiter.exception(), UsersError):
                raise cancelled from outcome.error
            raise
        except TransitionRefusedError as refused:
            if refused.transition == transitions.BEGIN:
                # What was taken along stands: it came before what would have begun.
                self.pause()
                assert self.ending is not None
                raise self.ending from None
            if (moved := self._lose_carried(taken, refused)) is not None:
                raise moved from refused
            raise
        except StoreError:
            raise
        except Exception as error:
            raise _as_store_error(error) from error
        finally:
            # Known even if a cancellation was delivered in its place: a unit cannot be cut short.
            if waiter.done():
                self._learn(waiter.exception(), rows, end)

    def _learn(self, error: BaseException | None, rows: Sequence[StepRow], end: RunEnd | None) -> None:
        if error is None:
            self.rows.update((row.path, row) for row in rows)
            self.ended = self.ended or end is not None
            self.live.note_commit()
            self._notice()
        elif not isinstance(error, UsersError | TransitionRefusedError):
            self.stop(_as_store_error(error))

    def _look(self, tx: Transaction) -> None:
        """See whether the run is paused, where its row was read anyway. In the committer's thread."""
        self._was_paused = self._was_paused or self.fence.run in tx.paused

    def _notice(self) -> None:
        """What a transaction has seen, on the event loop's thread."""
        if self._was_paused:
            self.pause()

    def _schedule(self, within_s: float = HELD_S) -> None:
        loop = asyncio.get_running_loop()
        if self._timer is None:
            self._held_since = loop.time()
        elif self._timer.when() > loop.time() + within_s:
            self._timer.cancel()
        else:
            return
        self._timer = loop.call_later(within_s, self._flush)

    def _flush(self) -> None:
        """Commit what is held without waiting for it; what goes wrong stops the run at its next write."""
        if self.stopped is not None or (held := self._unit_of(taken := self._take_held())) is None:
            return
        try:
            self._last = self.store.commit(*held.transitions, points=held.points, after=self._last)
        except StoreError as error:
            self.stop(error)
        else:
            self._last.add_done_callback(partial(self._flushed, taken))

    def _flushed(self, held: _Held | None, waiter: asyncio.Future[Any]) -> None:
        error = waiter.exception()
        if isinstance(error, TransitionRefusedError):
            self.stop(self._lose_carried(held, error) or error)
        elif error is not None:
            self.stop(_as_store_error(error))
        else:
            self.live.note_commit()
            self._notice()

    def _lose_carried(self, held: _Held | None, refused: TransitionRefusedError) -> StepError | None:
        """Outcomes on their way to the disk were refused: they are kept as late. None: the fault is not theirs alone.

        Other steps may have gone on from them, in memory: so the run stops, and goes on from what is recorded.
        """
        moves = [] if held is None else held.moves
        for row, _, _ in moves:
            self._tell_late(row.path, row.attempt, value=row.output, error=row.error, receipt=as_late(row.receipt))
        if refused.step is None or refused.step not in {row.path for row, _, _ in moves}:
            return None
        moved = StepError(
            f"step {refused.step}: another process settled it before its outcome was on disk; what it recorded stands, "
            "the outcome is kept as late. Run again",
            code="step.moved",
            retryable=True,
            step=refused.step,
        )
        moved.__cause__ = refused
        self.stop(moved)
        return moved

    def _check_stopped(self) -> None:
        if self.stopped is not None:
            raise self.stopped

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _take_held(self) -> _Held | None:
        """What is held, to be written now."""
        self._stop_timer()
        if not self._held:
            return None
        held, self._held = self._held, _Held()
        return held

    def _unit_of(self, held: _Held | None) -> Unit | None:
        """What is held as one unit: what is carried, then all that is new."""
        if held is None:
            return None
        writes = [self._write_step(row, event, seen) for row, event, seen in held.moves]
        if held.events or held.loops:
            writes.append(
                lambda tx: transitions.record_steps(
                    tx, self.fence, held.rows, held.events, tuple(held.loops.values()), held.calls
                )
            )
        writes.append(self._look)
        rows = [*(row for row, _, _ in held.moves), *held.rows]
        return Unit(writes, tuple(self._point(row) for row in rows), after=self._last)

    def _write_step(self, row: StepRow, event: Event, seen: Seen | None, *, begins: bool = False) -> Transition:
        if seen is None:
            return lambda tx: transitions.record_steps(tx, self.fence, (row,), (event,), begins=begins)
        return lambda tx: transitions.move_step(tx, self.fence, row, seen, (event,), begins=begins)

    def _point(self, row: StepRow) -> str:
        return f"{self.fence.workflow}/{row.path}:{row.state}"

    def _timed(self, path: str) -> _Timed:
        return _Timed(f"step {path} of run {self.fence.run_id}")


@dataclass(slots=True)
class _Held:
    """Outcomes that wait for the next barrier."""

    rows: list[StepRow] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    calls: list[StepRow] = field(default_factory=list)
    moves: list[tuple[StepRow, Event, Seen | None]] = field(default_factory=list)
    """Outcomes that ride with the next admission, and what each one's row is known to be."""
    loops: dict[str | None, LoopState] = field(default_factory=dict)
    """How far each loop is, by the path of its call; None for a run that is a loop."""

    def __bool__(self) -> bool:
        return bool(self.events or self.loops or self.moves)


class _Timed:
    """Reports a user's function that keeps the store for too long."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._began = time.monotonic()

    def __exit__(self, *_error: object) -> None:
        took_s = time.monotonic() - self._began
        if took_s > SLOW_LOCAL_S:
            logger.warning("%s held the store for %.2f s: local handlers must be short", self._name, took_s)


def _begins_with(values: list[Any], items: Items) -> bool:
    """Whether the values begin with these, to the type: 1, 1.0 and True are equal, and not the same."""
    begun = values[: len(items)]
    return begun == items and repr(begun) == repr(items[:])


def paused_error(run: RunRow) -> RunPausedError:
    """The error of a call for a run that is paused."""
    way = f"go on with it by: ditto resume {run.run_id}"
    if run.kind == "turn":
        way = f"runtime.unpause({run.run_id!r}) ends that; then ask its agent again for this turn"
    return RunPausedError(f"run {run.run_id} is paused; {way}", run_id=run.run_id)


def closing_error() -> StoreClosedError:
    """The error of a call whose runtime was closed."""
    return StoreClosedError("the runtime was closed; the run is interrupted and can be resumed")


def _as_store_error(error: BaseException) -> StoreError:
    return error if isinstance(error, StoreError) else StoreError(f"{type(error).__name__}: {error}")


def _users(function: Callable[[Transaction], None]) -> Transition:
    """A user's function as a transition. A refused guard is no error of the user's.

    In the committer's thread nobody is cancelled or interrupted: an exception that would mean so there means nothing.
    """

    def run(tx: Transaction) -> None:
        try:
            function(tx)
        except TransitionRefusedError:
            raise
        except BaseException as error:
            plain = isinstance(error, Exception) and not isinstance(error, StopIteration)
            raise UsersError(error if plain else RuntimeError(f"it raised {error!r}")) from error

    return run
