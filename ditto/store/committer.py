"""The committer: one thread, one writing connection, and every transition of a runtime.

It takes all that waits, applies it in one `BEGIN IMMEDIATE … COMMIT`, then tells the waiting tasks: group commit
without added delay. Nothing is told before it is on disk. What is handed over in one turn of the event loop is never
divided: tools that a model asked for together are admitted together.

- A refused transition fails alone (its guard wrote nothing). An unexpected error rolls the batch back, and each unit
  is applied again by itself, so only the culprit fails. An error from BEGIN is nobody's: the whole batch fails at once.
- An error from COMMIT leaves the outcome open: the connection is made anew and the batch's mark is read.
- A unit that runs a user's function (`alone`) has a transaction of its own. What it takes along (`kept`) is committed
  without it if that function raises.
- A unit that comes `after` another is not applied if that one is lost: no effect before its causes.
- When nothing comes for a while, the WAL goes back into the file.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from ditto.clock import Clock
from ditto.errors import StoreClosedError, StoreError, TransitionRefusedError
from ditto.store import statements as sql
from ditto.store.chain import Chain
from ditto.store.connection import Driver, Location, connect
from ditto.store.faults import store_error
from ditto.store.transitions import Transaction

BATCH_MAX: Final = 512
"""Units in one transaction."""

OUTSIDE_S: Final = 0.2
"""How often other writers are looked for, while somebody wants to know."""

IDLE_S: Final = 1.0
"""After so long without a unit the WAL is checkpointed."""

logger = logging.getLogger("ditto.store")

Transition: TypeAlias = Callable[[Transaction], Any]
Probe: TypeAlias = Callable[[str], None]
"""Told `step path:transition:asked` when a unit is handed over, then `…:before` and `…:after` around the moment it is
durable; in the thread that passes the point. For `ditto.testing`."""


class Durable(asyncio.Future[Any]):
    """The result of a unit. Waiting for it cannot be cut short: a cancellation is delivered once it is known.

    So no task ever believes that a commit did not happen when it did.
    """

    lost: BaseException | None = None
    """Why the unit is not on disk, if it failed. Set in the committer's thread, before the waiting task is told."""

    def cancel(self, msg: Any = None) -> bool:
        """Not to be cancelled: the transaction goes its way."""
        return False


class UsersError(Exception):
    """Carries what a user's function raised through the committer, whatever it is."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(slots=True)
class Unit:
    """Transitions that belong in one transaction, in order. The result is that of the last one."""

    transitions: Sequence[Transition]
    points: tuple[str, ...] = ()
    """`step path:transition` of each thing that becomes durable with it."""
    alone: bool = False
    kept: Unit | None = None
    """What an `alone` unit takes along: it goes first, and is committed without it if the user's function raises."""
    after: Durable | None = None
    """The unit that this one rests on: if that one is lost, so is this."""
    apart: bool = False
    """No part of what is promised: a transaction of such units only is counted in `partial_commits`."""
    result: Any = None
    error: BaseException | None = None
    waiter: Durable | None = field(default=None, repr=False)


class Committer:
    """Owns the writing connection. `submit` may be called from the event loop's thread only."""

    probe: Probe | None = None
    """Set on the class by `ditto.testing.crash`; None costs one comparison a unit, and two a batch."""

    def __init__(self, location: Location, clock: Clock) -> None:
        self.commits = 0
        """Transactions committed so far, but for those that are counted apart."""
        self.partial_commits = 0
        """Transactions that only recorded text that was shown."""
        self._location = location
        self._clock = clock
        self._inbox: queue.SimpleQueue[list[Unit] | None] = queue.SimpleQueue()
        self._submitted: list[Unit] = []
        """Units of this turn of the event loop."""
        self._taken: deque[Unit] = deque()
        """Units out of the inbox that are not applied yet; for the thread alone."""
        self._db: Driver | None = connect(location)
        self.chain: Chain | None = None
        """Where receipts are written; None until the store's key is needed."""
        self.on_outside_write: Callable[[], None] | None = None
        """Called on the event loop when another process has written; None: nobody wants to know."""
        self._outside_version = -1
        self._look_at = 0.0
        self._written = False
        """Something was committed since the last checkpoint."""
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="ditto-committer", daemon=True)

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def submit(self, unit: Unit) -> Durable:
        """Hand over a unit; the future has its result once it is on disk. Raises StoreClosedError."""
        if self._closed:
            raise StoreClosedError("the store is closed; open a new runtime")
        self._tell_probe([unit], "asked")
        unit.waiter = Durable(loop=self._loop)
        self._submitted.append(unit)
        if len(self._submitted) == 1:
            self._loop.call_soon(self._hand_over)
        return unit.waiter

    def _hand_over(self) -> None:
        if self._submitted:
            self._inbox.put(self._submitted)
            self._submitted = []

    def stop(self) -> None:
        """Close without waiting until it is done."""
        if not self._closed:
            self._closed = True
            self._hand_over()
            self._inbox.put(None)

    async def close(self) -> None:
        """Commit what waits, checkpoint the WAL, close the connection. Safe to call twice."""
        self.stop()
        while self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)

    @property
    def driver(self) -> Driver:
        """The writing connection, for `local` handlers, in the committer's thread only."""
        assert self._db is not None
        return self._db

    def _serve(self) -> None:
        try:
            while (batch := self._take()) is not None:
                self._commit(batch)
                try:
                    self._loop.call_soon_threadsafe(_deliver, batch)
                except RuntimeError:
                    logger.info("the event loop was closed before it could be told of a commit")
                self._look_outside()
        finally:
            self._checkpoint()
            self._drop_connection()

    def _take(self) -> list[Unit] | None:
        """All that waits, up to a unit that must be alone; None when closed."""
        if not self._taken:
            if (units := self._wait()) is None:
                return None
            self._taken.extend(units)
        first = self._taken.popleft()
        if first.alone:
            return [first] if first.kept is None else [first.kept, first]
        batch = [first]
        while len(batch) < BATCH_MAX and self._has_next() and not self._taken[0].alone:
            batch.append(self._taken.popleft())
        return batch

    def _has_next(self) -> bool:
        """Whether another unit is there, without waiting for one."""
        if not self._taken:
            with suppress(queue.Empty):
                units = self._inbox.get_nowait()
                if units is None:
                    self._inbox.put(None)
                else:
                    self._taken.extend(units)
        return bool(self._taken)

    def _wait(self) -> list[Unit] | None:
        """The next units; meanwhile the WAL goes back into the file, and other writers are noticed."""
        idle_s = 0.0
        while self._written or self.on_outside_write is not None:
            pause_s = IDLE_S if self.on_outside_write is None else OUTSIDE_S
            try:
                return self._inbox.get(timeout=pause_s)
            except queue.Empty:
                idle_s += pause_s
                self._look_outside()
                if self._written and idle_s >= IDLE_S:
                    self._checkpoint()
        return self._inbox.get()

    def _look_outside(self) -> None:
        """Tell the event loop if another process has written to the file since the last look."""
        if (tell := self.on_outside_write) is None or self._db is None or time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + OUTSIDE_S
        try:
            version = self._db.execute("PRAGMA data_version").fetchone()[0]
        except sqlite3.Error as error:
            logger.info("the store could not be asked for other writers: %s", error)
            return
        if version != self._outside_version:
            self._outside_version = version
            self._loop.call_soon_threadsafe(tell)

    def _commit(self, batch: list[Unit]) -> None:
        try:
            self._apply(batch)
        except (UsersError, TransitionRefusedError) as error:
            self._roll_back()
            self._commit_kept(batch, error)
        except _BatchLostError as lost:
            self._roll_back()
            for unit in batch:
                self._lose(unit, lost.error)
        except BaseException as error:  # noqa: BLE001 - it is handed to the tasks that wait
            self._roll_back()
            if len(batch) == 1 or batch[-1].alone:
                for unit in batch:
                    self._lose(unit, error)
                return
            for unit in batch:
                unit.result = unit.error = None
                self._commit([unit])

    def _commit_kept(self, batch: list[Unit], error: UsersError | TransitionRefusedError) -> None:
        """The last unit of a batch is undone by its user's function, or by its guard; what it took along stands."""
        *kept, undone = batch
        if kept:
            self._commit(kept)
        undone.error = next((unit.error for unit in kept if unit.error is not None), error)

    def _apply(self, batch: list[Unit]) -> None:
        """One transaction. Raises what it meets; the caller rolls back."""
        db = self._begin()
        tx = Transaction(db, self._clock.now_us(), self.chain)
        for unit in batch:
            if unit.after is not None and unit.after.lost is not None:
                self._lose(unit, unit.after.lost)
                continue
            try:
                for transition in unit.transitions:
                    unit.result = transition(tx)
            except TransitionRefusedError as refused:
                if unit.alone:
                    raise
                unit.error = refused
        self._tell_probe(batch, "before")
        try:
            db.execute("COMMIT")
        except sqlite3.Error as error:
            self._settle_lost_commit(tx, error)
        for done in tx.after_commit:
            done()
        if all(unit.apart for unit in batch):
            self.partial_commits += 1
        else:
            self.commits += 1
        self._written = True
        self._tell_probe(batch, "after")

    def _begin(self) -> Driver:
        """Open a transaction, on a new connection if the last one had to be given up."""
        try:
            if self._db is None:
                self._db = connect(self._location)
            self._db.execute("BEGIN IMMEDIATE")
        except (sqlite3.Error, StoreError) as error:
            raise _BatchLostError(error) from error
        return self._db

    def _settle_lost_commit(self, tx: Transaction, error: sqlite3.Error) -> None:
        """Find out, on a new connection, whether a COMMIT that reported an error happened all the same."""
        self._drop_connection()
        try:
            self._db = connect(self._location)
            happened = tx.mark is not None and sql.HAS_EVENT(self._db, b_id=tx.mark, b_at=tx.at).fetchone() is not None
        except (sqlite3.Error, StoreError) as unreadable:
            text = (
                f"{self._location.path}: COMMIT reported {error}, and then the file could not be read "
                f"({unreadable.__cause__ or unreadable}): whether the last change is on disk is not known. "
                "Run again: it goes on from what is there"
            )
            raise _BatchLostError(StoreError(text, code="store.commit_unknown", retryable=True)) from error
        if not happened:
            raise _BatchLostError(error) from error
        logger.warning("COMMIT reported %s, but the transaction is on disk", error)

    def _roll_back(self) -> None:
        try:
            if self._db is not None and self._db.in_transaction:
                self._db.execute("ROLLBACK")
        except sqlite3.Error:
            self._drop_connection()

    def _drop_connection(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None

    def _lose(self, unit: Unit, error: BaseException) -> None:
        """Nothing of the unit is on disk. Each one gets an exception of its own: tasks add to what they are given."""
        if isinstance(error, sqlite3.Error):
            unit.error = store_error(error, self._location.path)
            unit.error.__cause__ = error
        elif isinstance(error, StoreError):
            unit.error = type(error)(error.message, code=error.code, retryable=error.retryable)
            unit.error.__cause__ = error
        else:
            unit.error = error
        if unit.waiter is not None:
            unit.waiter.lost = error

    def _tell_probe(self, batch: list[Unit], when: str) -> None:
        if (probe := type(self).probe) is not None:
            for unit in batch:
                if unit.error is None:
                    for point in unit.points:
                        probe(f"{point}:{when}")

    def _checkpoint(self) -> None:
        """Bring the WAL back into the file, unless a reader or another writer is in the way."""
        self._written = False
        if self._db is None:
            return
        try:
            # Not to be waited for: SQLite would keep every other writer waiting meanwhile.
            self._db.execute("PRAGMA busy_timeout=0")
            self._written = bool(self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0])
            self._db.execute(f"PRAGMA busy_timeout={round(self._location.busy_timeout_s * 1000)}")
        except sqlite3.Error as error:
            logger.info("the WAL was not checkpointed: %s", error)
            self._drop_connection()


class _BatchLostError(Exception):
    """Nothing of a batch is on disk, or nobody can tell; and none of its units is to blame."""

    def __init__(self, error: sqlite3.Error | StoreError) -> None:
        super().__init__(str(error))
        self.error = error


def _deliver(batch: list[Unit]) -> None:
    for unit in batch:
        if unit.waiter is None or unit.waiter.done():
            continue
        if unit.error is not None:
            unit.waiter.set_exception(unit.error)
            unit.waiter.exception()
        else:
            unit.waiter.set_result(unit.result)
