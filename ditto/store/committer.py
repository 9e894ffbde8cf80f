"""The committer: one thread, one writing connection, and every transition of a runtime.

It takes all that waits, applies it in one `BEGIN IMMEDIATE … COMMIT`, then tells the waiting tasks: group commit
without added delay. Nothing is told before it is on disk.

- A refused transition fails alone (its guard wrote nothing). An unexpected error rolls the batch back, and each unit
  is applied again by itself, so only the culprit fails.
- An error from COMMIT leaves the outcome open: the connection is made anew and the batch's mark is read.
- A unit that runs a user's function (`alone`) has a transaction of its own.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import sqlite3
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from ditto.clock import Clock
from ditto.errors import DittoError, StoreClosedError, TransitionRefusedError
from ditto.store import statements as sql
from ditto.store.connection import Driver, Location, connect
from ditto.store.faults import store_error
from ditto.store.transitions import Transaction

BATCH_MAX: Final = 512
"""Units in one transaction."""

logger = logging.getLogger("ditto.store")

Transition: TypeAlias = Callable[[Transaction], Any]
Probe: TypeAlias = Callable[[str], None]
"""Told `step path:transition:before` and `…:after`, around the moment each becomes durable. For `ditto.testing`."""


class Durable(asyncio.Future[Any]):
    """The result of a unit. Waiting for it cannot be cut short: a cancellation is delivered once it is known.

    So no task ever believes that a commit did not happen when it did.
    """

    def cancel(self, msg: Any = None) -> bool:
        """Not to be cancelled: the transaction goes its way."""
        return False


@dataclass(slots=True)
class Unit:
    """Transitions that belong in one transaction, in order. The result is that of the last one."""

    transitions: Sequence[Transition]
    points: tuple[str, ...] = ()
    """`step path:transition` of each thing that becomes durable with it."""
    alone: bool = False
    result: Any = None
    error: BaseException | None = None
    waiter: Durable | None = field(default=None, repr=False)


class Committer:
    """Owns the writing connection. `submit` may be called from the event loop's thread only."""

    probe: Probe | None = None
    """Set on the class by `ditto.testing.crash`; None costs one comparison a batch."""

    def __init__(self, location: Location, clock: Clock) -> None:
        self.commits = 0
        """Transactions committed so far."""
        self._location = location
        self._clock = clock
        self._inbox: queue.SimpleQueue[Unit | None] = queue.SimpleQueue()
        self._held: Unit | None = None
        self._db: Driver = connect(location)
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="ditto-committer", daemon=True)
        self._thread.start()

    def submit(self, unit: Unit) -> Durable:
        """Hand over a unit; the future has its result once it is on disk. Raises StoreClosedError."""
        if self._closed:
            raise StoreClosedError("the store is closed; open a new runtime")
        unit.waiter = Durable(loop=self._loop)
        self._inbox.put(unit)
        return unit.waiter

    async def close(self) -> None:
        """Commit what waits, checkpoint the WAL, close the connection. Safe to call twice."""
        if not self._closed:
            self._closed = True
            self._inbox.put(None)
        while self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)

    @property
    def driver(self) -> Driver:
        """The writing connection, for `local` handlers, in the committer's thread only."""
        return self._db

    def _serve(self) -> None:
        try:
            while (batch := self._take()) is not None:
                self._commit(batch)
                self._loop.call_soon_threadsafe(_deliver, batch)
        finally:
            self._close_connection()

    def _take(self) -> list[Unit] | None:
        """All that waits, up to a unit that must be alone; None when closed."""
        first = self._held or self._inbox.get()
        self._held = None
        if first is None or first.alone:
            return None if first is None else [first]
        batch = [first]
        while len(batch) < BATCH_MAX:
            try:
                unit = self._inbox.get_nowait()
            except queue.Empty:
                break
            if unit is None:
                self._inbox.put(None)
                break
            if unit.alone:
                self._held = unit
                break
            batch.append(unit)
        return batch

    def _commit(self, batch: list[Unit]) -> None:
        try:
            self._apply(batch)
        except BaseException as error:  # noqa: BLE001 - it is handed to the tasks that wait
            self._roll_back()
            if len(batch) > 1 and not isinstance(error, _CommitLost):
                for unit in batch:
                    unit.result = unit.error = None
                    self._commit([unit])
                return
            for unit in batch:
                unit.error = self._explained(error)

    def _apply(self, batch: list[Unit]) -> None:
        """One transaction. Raises what it meets; the caller rolls back."""
        db = self._db
        db.execute("BEGIN IMMEDIATE")
        tx = Transaction(db, self._clock.now_us())
        for unit in batch:
            try:
                for transition in unit.transitions:
                    unit.result = transition(tx)
            except TransitionRefusedError as refused:
                unit.error = refused
        self._tell_probe(batch, "before")
        try:
            db.execute("COMMIT")
        except sqlite3.Error as error:
            self._settle_lost_commit(tx, error)
        self.commits += 1
        self._tell_probe(batch, "after")

    def _settle_lost_commit(self, tx: Transaction, error: sqlite3.Error) -> None:
        """Find out, on a new connection, whether a COMMIT that reported an error happened all the same."""
        self._reconnect()
        if tx.mark is None or sql.HAS_EVENT(self._db, b_id=tx.mark, b_at=tx.at).fetchone() is None:
            raise _CommitLost from error
        logger.warning("COMMIT reported %s, but the transaction is on disk", error)

    def _roll_back(self) -> None:
        try:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
        except sqlite3.Error:
            self._reconnect()

    def _reconnect(self) -> None:
        self._db.close()
        self._db = connect(self._location)

    def _explained(self, error: BaseException) -> BaseException:
        if isinstance(error, _CommitLost) and isinstance(error.__cause__, sqlite3.Error):
            error = error.__cause__
        if isinstance(error, sqlite3.Error):
            explained = store_error(error, self._location.path)
            explained.__cause__ = error
            return explained
        return error

    def _tell_probe(self, batch: list[Unit], when: str) -> None:
        if (probe := type(self).probe) is not None:
            for unit in batch:
                if unit.error is None:
                    for point in unit.points:
                        probe(f"{point}:{when}")

    def _close_connection(self) -> None:
        try:
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        except sqlite3.Error as error:
            logger.info("the WAL was not checkpointed on close: %s", error)
        self._db.close()


class _CommitLost(DittoError):
    """COMMIT failed, and the transaction is known not to be on disk."""

    def __init__(self) -> None:
        super().__init__("COMMIT failed")


def _deliver(batch: list[Unit]) -> None:
    for unit in batch:
        if unit.waiter is None or unit.waiter.done():
            continue
        if unit.error is not None:
            unit.waiter.set_exception(unit.error)
            unit.waiter.exception()
        else:
            unit.waiter.set_result(unit.result)
