"""The committer on SQLite: its WAL, its locks, and a disk that is full. What any store owes is in `conformance/`."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ditto.errors import StoreBusyError, StoreError, StoreFullError
from ditto.store import committer as committer_module
from ditto.store import transitions
from ditto.store.committer import Committer, Transition
from ditto.store.connection import Driver, Location, connect
from ditto.store.records import Event, Seen
from ditto.store.schema import StepState
from ditto.store.store import Store
from tests.processes import Child
from tests.store.faults import IO, Faults
from tests.store.files import can_write, look, opened
from tests.store.scenes import all_at_once, create, record, step, told

StartChild = Callable[..., Child]


def insert(number: int) -> Transition:
    return lambda tx: tx.db.execute("INSERT INTO numbers VALUES (?)", [number]).lastrowid


async def make_numbers(store: Store) -> None:
    await store.commit(lambda tx: tx.db.execute("CREATE TABLE numbers (number INTEGER UNIQUE)"))


def numbers(path: Path) -> list[int]:
    with closing(sqlite3.connect(path)) as db:
        return [row[0] for row in db.execute("SELECT number FROM numbers ORDER BY rowid").fetchall()]


# Closing


@pytest.mark.asyncio
async def test_closing_leaves_one_file(store_path: Path) -> None:
    async with opened(store_path) as store:
        await make_numbers(store)
        assert store_path.with_name("ditto.db-wal").exists()
    assert [path.name for path in store_path.parent.iterdir()] == ["ditto.db"], "the WAL is gone"


@pytest.mark.asyncio
async def test_closing_does_not_wait_for_a_foreign_reader(store_path: Path) -> None:
    async with opened(store_path, busy_timeout_s=3600) as store:
        await make_numbers(store)
        with closing(sqlite3.connect(store_path, isolation_level=None)) as reader:
            reader.execute("BEGIN")
            reader.execute("SELECT * FROM numbers").fetchall()
            await store.commit(insert(1))
            await store.close()
            assert can_write(store_path)
            reader.execute("ROLLBACK")
    assert numbers(store_path) == [1]


@pytest.mark.asyncio
async def test_i07_the_wal_goes_back_into_the_file_when_nothing_is_to_do(
    store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, tried = asyncio.get_running_loop(), asyncio.Event()
    checkpoint = Committer._checkpoint

    def told_of(self: Committer) -> None:
        checkpoint(self)
        loop.call_soon_threadsafe(tried.set)

    async def try_again() -> int:
        tried.clear()
        await tried.wait()
        return wal.stat().st_size

    monkeypatch.setattr(committer_module, "IDLE_S", 0.001)
    monkeypatch.setattr(Committer, "_checkpoint", told_of)
    wal = store_path.with_name("ditto.db-wal")
    async with opened(store_path, busy_timeout_s=3600) as store:
        await make_numbers(store)
        with closing(sqlite3.connect(store_path, isolation_level=None)) as reader:
            reader.execute("BEGIN")
            reader.execute("SELECT * FROM numbers").fetchall()
            await store.commit(insert(1))
            await try_again()
            assert await try_again() > 0, "the reader is in the way, and nobody waits for it"
            assert can_write(store_path)
            reader.execute("ROLLBACK")
        while await try_again():
            pass
        assert numbers(store_path) == [1]
        await store.commit(insert(2))
        while await try_again():
            pass


@pytest.mark.asyncio
async def test_a_store_that_cannot_be_opened_to_the_end_leaves_no_thread_behind(
    store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any, **__: Any) -> Any:
        raise StoreError("no more files")

    threads = threading.active_count()
    for part in ("reader", "committer"):
        with monkeypatch.context() as patch:
            patch.setattr(f"ditto.store.{part}.connect", failing)
            with pytest.raises(StoreError, match="no more files"):
                async with opened(store_path):
                    pass
        assert threading.active_count() == threads
        assert can_write(store_path)


# The file under a COMMIT


@pytest.mark.asyncio
async def test_the_event_of_another_transaction_is_not_taken_for_ours(
    store_path: Path, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect_after_another(location: Location) -> Driver:
        """Before it is looked for, somebody else writes an event of that number."""
        with closing(sqlite3.connect(store_path, isolation_level=None)) as other:
            last, at = other.execute("SELECT max(id), max(at) FROM ditto_events").fetchone()
            other.execute("UPDATE ditto_runs SET seq=2")
            other.execute("INSERT INTO ditto_events (id, at, kind) VALUES (?, ?, 'theirs')", [last + 1, at + 1_000_000])
        return connect(location)

    async with opened(store_path) as store:
        fence = await create(store)
        monkeypatch.setattr(committer_module, "connect", connect_after_another)
        faults.arm(IO, 1, only="COMMIT")
        with pytest.raises(StoreError, match="nothing was written"):
            await record(store, fence, step("a"))
        assert [event[2] for event in look(store_path).events] == ["run_created", "theirs"]


@pytest.mark.asyncio
async def test_a_file_that_was_taken_away_is_named_and_not_made_anew(store_path: Path, faults: Faults) -> None:
    async with opened(store_path) as store:
        fence = await create(store)
        for path in list(store_path.parent.iterdir()):
            path.unlink()
        faults.arm(IO, 1, only="COMMIT")
        with pytest.raises(StoreError):
            await record(store, fence, step("a"))
        with pytest.raises(StoreError, match="cannot be opened"):
            await record(store, fence, step("b"))
    assert list(store_path.parent.iterdir()) == []


@pytest.mark.asyncio
async def test_i06_a_full_disk_is_named_and_leaves_nothing_half_written(store_path: Path) -> None:
    async with opened(store_path) as store:
        fence = await create(store)
        await record(store, fence, step("pay", StepState.ADMITTED))
        before = look(store_path)
        pages = await store.commit(lambda tx: tx.db.execute("PRAGMA page_count").fetchone()[0])
        await store.commit(lambda tx: tx.db.execute(f"PRAGMA max_page_count={pages + 2}").fetchone())
        settled, seen = step("pay", output="x" * 200_000), Seen(StepState.ADMITTED, 1)

        def settle() -> asyncio.Future[Any]:
            return store.commit(lambda tx: transitions.move_step(tx, fence, settled, seen, [told(settled)]))

        for _ in range(2):
            with pytest.raises(StoreFullError, match="the disk is full; nothing was written"):
                await settle()
            assert look(store_path) == before
        # Another run's small change fits, also in one batch with the one that does not.
        async with all_at_once(store):
            large, small = settle(), store.commit(lambda tx: transitions.note_event(tx, fence.run, Event("note")))
        results = await asyncio.gather(large, small, return_exceptions=True)
        assert isinstance(results[0], StoreFullError)
        assert results[1] is None
        await store.commit(lambda tx: tx.db.execute("PRAGMA max_page_count=1000000").fetchone())
        await settle()
        assert look(store_path).steps[0][2] == "completed"


# The event loop is never blocked

HOLD = """
import sqlite3, sys
db = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=60)
while True:
    db.execute("BEGIN IMMEDIATE")
    print("locked", flush=True)
    sys.stdin.readline()
    db.execute("ROLLBACK")
    print("free", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.asyncio
async def test_i13_the_loop_goes_on_while_another_process_holds_the_lock(
    store_path: Path, start_child: StartChild
) -> None:
    async with opened(store_path, busy_timeout_s=3600) as store:
        await make_numbers(store)
        child = start_child(HOLD, store_path)
        assert child.line() == "locked"
        waiter = store.commit(insert(1))
        for _ in range(10_000):
            await asyncio.sleep(0)
        assert not waiter.done()
        assert await store.read(lambda db: db.execute("SELECT count(*) FROM numbers").fetchone()) == (0,)
        child.tell()
        await waiter
        assert child.line() == "free"
    assert numbers(store_path) == [1]


@pytest.mark.asyncio
async def test_i13_a_lock_held_beyond_the_timeout_is_named_and_a_later_attempt_goes_on(
    store_path: Path, start_child: StartChild
) -> None:
    async with opened(store_path, busy_timeout_s=0.3) as store:
        await make_numbers(store)
        child = start_child(HOLD, store_path)
        assert child.line() == "locked"
        waiter, ticks = store.commit(insert(1)), 0
        while not waiter.done():
            await asyncio.sleep(0)
            ticks += 1
        assert ticks > 100
        with pytest.raises(StoreBusyError, match=r"longer than store\.busy_timeout_s"):
            await waiter
        child.tell()
        assert child.line() == "free"
        await store.commit(insert(1))
    assert numbers(store_path) == [1]
