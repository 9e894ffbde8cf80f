"""The reader: reads never block the loop or the writer, and nothing is held between two of them."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ditto import Graph, create_ditto
from ditto.errors import StoreClosedError, StoreDamagedError
from ditto.store import queries, transitions
from ditto.store.records import Event
from tests.processes import Child
from tests.store.files import opened
from tests.store.scenes import create


def truncate_wal(path: Path) -> int:
    """Bytes of the WAL after everything in it went back into the file; fails if a reader is in the way."""
    with closing(sqlite3.connect(path, isolation_level=None, timeout=0)) as db:
        busy, _, _ = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    assert busy == 0, "somebody holds a snapshot"
    return path.with_name(path.name + "-wal").stat().st_size


@pytest.mark.asyncio
async def test_i07_a_half_read_history_holds_no_snapshot(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ditto.engine.asking.EVENTS_PAGE", 10)
    async with create_ditto(store=store_path) as runtime:
        graph = Graph("flow")
        for number in range(30):
            graph = graph.step(f"s{number}", lambda: "x" * 8000, effect="idempotent")
        await runtime.run(graph, id="run")
        history = runtime.events("run")
        seen = [(await anext(history)).number]
        # The client is slow; meanwhile the log fills, and can be emptied again and again.
        for number in range(5):
            await runtime.run(Graph("other").step("s", lambda: "y" * 8000, effect="pure"), id=f"other {number}")
            assert truncate_wal(store_path) == 0
            seen.append((await anext(history)).number)
        seen += [event.number async for event in history]
        assert seen == list(range(1, len(seen) + 1))
        assert len(seen) == 32


@pytest.mark.asyncio
async def test_no_query_holds_a_snapshot_after_it_returned(store_path: Path) -> None:
    def raising(db: sqlite3.Connection) -> None:
        rows = db.execute("SELECT * FROM ditto_events")
        rows.fetchone()
        raise ValueError("half way")

    async with opened(store_path) as store:
        fence = await create(store)
        kept: list[Any] = []
        reads: list[Callable[[], Any]] = [
            lambda: store.read(queries.get_run, "run"),
            lambda: store.read(queries.get_run_by_key, fence.run),
            lambda: store.read(queries.list_steps, fence.run),
            lambda: store.read(queries.list_events, fence.run, 0, 1),
            lambda: store.read(raising),
        ]
        for read in reads:
            for _ in range(3):
                await store.commit(lambda tx: transitions.note_event(tx, fence.run, Event("note")))
            try:
                kept.append(await read())
            except ValueError as error:
                kept.append(error)
            await store.commit(lambda tx: transitions.note_event(tx, fence.run, Event("note")))
            assert truncate_wal(store_path) == 0
        assert isinstance(kept[-1], ValueError), "kept with its traceback, which keeps the cursor"


@pytest.mark.asyncio
async def test_a_slow_read_blocks_neither_the_loop_nor_the_writer(store_path: Path) -> None:
    begun, go = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def slow(db: sqlite3.Connection) -> int:
        loop.call_soon_threadsafe(begun.set)
        go.wait()
        return 1

    async with opened(store_path) as store:
        reading = asyncio.ensure_future(store.read(slow))
        await begun.wait()
        await create(store)
        assert not reading.done()
        go.set()
        assert await reading == 1


@pytest.mark.asyncio
async def test_a_read_sees_what_was_committed_before_it_was_asked(store_path: Path) -> None:
    async with opened(store_path) as store:
        fence = await create(store)
        for number in range(50):
            await store.commit(lambda tx: transitions.note_event(tx, fence.run, Event("note")))
            assert len(await store.read(queries.list_events, fence.run, 0, 1000)) == number + 2


@pytest.mark.asyncio
async def test_a_cancelled_read_takes_nothing_with_it(store_path: Path) -> None:
    begun, go = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def slow(db: sqlite3.Connection) -> int:
        loop.call_soon_threadsafe(begun.set)
        go.wait()
        return 1

    def failing(db: sqlite3.Connection) -> int:
        go.wait()
        raise ValueError("nobody listens")

    async with opened(store_path) as store:
        readings = [asyncio.ensure_future(store.read(query)) for query in (slow, failing)]
        await begun.wait()
        for reading in readings:
            reading.cancel()
        await asyncio.wait(readings)
        go.set()
        assert await store.read(lambda db: 2) == 2


@pytest.mark.asyncio
async def test_the_drivers_errors_become_errors_of_the_tree(store_path: Path) -> None:
    def damaged(db: sqlite3.Connection) -> None:
        error = sqlite3.DatabaseError("database disk image is malformed")
        error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
        raise error

    async with opened(store_path) as store:
        with pytest.raises(StoreDamagedError, match="restore a backup") as raised:
            await store.read(damaged)
        assert isinstance(raised.value.__cause__, sqlite3.DatabaseError)
        with pytest.raises(ZeroDivisionError):
            await store.read(lambda db: 1 / 0)
        assert await store.read(lambda db: 1) == 1


@pytest.mark.asyncio
async def test_closing_answers_what_was_asked_before_it(store_path: Path) -> None:
    async with opened(store_path) as store:
        readings = [asyncio.ensure_future(store.read(lambda db, number=number: number)) for number in range(5)]
        await asyncio.sleep(0)
        await store.close()
        assert [await reading for reading in readings] == list(range(5))
        with pytest.raises(StoreClosedError):
            await store.read(lambda db: 1)


POLL = """
import asyncio, sys
from pathlib import Path
from ditto.store import queries
from tests.store.files import look, opened

async def main():
    async with opened(Path(sys.argv[1])) as store:
        print("ready", flush=True)
        last = 0
        while last < 200:
            run = await store.read(queries.get_run, "run")
            events = await store.read(queries.list_events, run.id, last, 1000)
            assert [number for number, *_ in events] == list(range(last + 1, last + 1 + len(events)))
            last += len(events)
            look(Path(sys.argv[1]))
    print("done", last, flush=True)

asyncio.run(main())
"""


@pytest.mark.asyncio
async def test_i04_a_polling_process_meets_no_error_and_no_half(
    store_path: Path, start_child: Callable[..., Child]
) -> None:
    async with opened(store_path) as store:
        fence = await create(store)
        child = start_child(POLL, store_path)
        assert child.line() == "ready"
        for _ in range(199):
            await store.commit(lambda tx: transitions.note_event(tx, fence.run, Event("note")))
        assert await asyncio.to_thread(child.end) == (0, ["done 200"])
