"""The chain in the store: one order for all processes, the order of the commits, and no gap whoever dies."""

from __future__ import annotations

import asyncio
import signal
import sqlite3
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from ditto import Graph, StoreDamagedError, create_ditto
from ditto.receipts.signing import open_signer
from ditto.store import transitions
from ditto.store.chain import Chain
from ditto.store.records import Seen
from ditto.store.schema import StepState
from tests.processes import Child
from tests.receipts.chains import PAID, certified
from tests.store.files import look, opened
from tests.store.scenes import create, step, told

PROGRAM = """
import asyncio, os, signal, sys
from pathlib import Path
from ditto import Graph, create_ditto
from ditto.store.committer import Committer

store, run_id, kill_after = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])

async def pay(ctx):
    await asyncio.sleep(0)
    return ctx.key

graph = Graph("many")
for number in range(50):
    graph = graph.step(f"s{number}", pay, effect="write")

passed = 0
def probe(point):
    global passed
    passed += point.endswith(":completed:before")
    if passed == kill_after:
        os.kill(os.getpid(), signal.SIGKILL)

async def main():
    async with create_ditto(store=store) as runtime:
        print("open", flush=True)
        sys.stdin.readline()
        if kill_after:
            Committer.probe = staticmethod(probe)
        print(len(await runtime.run(graph, id=run_id, concurrency=50)), flush=True)

asyncio.run(main())
"""


def outcomes(path: Path, run_id: str) -> list[str]:
    """The steps of a run in the order in which their outcomes were committed."""
    with closing(sqlite3.connect(path)) as db:
        query = (
            "SELECT e.step FROM ditto_events e JOIN ditto_runs r ON e.id >> 32 = r.id "
            "WHERE r.run_id = ? AND e.kind = 'step_completed' ORDER BY e.id"
        )
        return [name for (name,) in db.execute(query, (run_id,))]


def test_h09_two_processes_add_to_one_chain_in_the_order_of_their_commits(
    store_path: Path, start_child: Callable[..., Child]
) -> None:
    children = [start_child(PROGRAM, store_path, run_id, 0) for run_id in ("a", "b")]
    assert [child.line() for child in children] == ["open", "open"]
    for child in children:
        child.tell()
    assert [child.line() for child in children] == ["50", "50"]
    receipts = certified(store_path)
    assert [each["number"] for each in receipts] == list(range(1, 101)), "no gap"
    assert len({each["previous"] for each in receipts}) == 100, "no two with the same predecessor"
    for run_id in ("a", "b"):
        assert [each["step"] for each in receipts if each["run"] == run_id] == outcomes(store_path, run_id)
    assert len({each["signer"] for each in receipts}) == 1


@pytest.mark.parametrize("kill_after", [1, 25])
def test_a_process_that_is_killed_before_its_commit_leaves_no_receipt_and_no_gap(
    store_path: Path, start_child: Callable[..., Child], kill_after: int
) -> None:
    alive, killed = start_child(PROGRAM, store_path, "a", 0), start_child(PROGRAM, store_path, "b", kill_after)
    assert [alive.line(), killed.line()] == ["open", "open"]
    alive.tell()
    killed.tell()
    assert killed.end()[0] == -signal.SIGKILL
    assert alive.line() == "50"
    receipts = certified(store_path)
    assert [each["step"] for each in receipts if each["run"] == "b"] == outcomes(store_path, "b")
    assert [each["step"] for each in receipts if each["run"] == "a"] == outcomes(store_path, "a")
    again = start_child(PROGRAM, store_path, "c", 0)
    again.line()
    again.tell()
    assert again.line() == "50"
    assert len(certified(store_path)) == len(receipts) + 50


@pytest.mark.asyncio
async def test_a_transition_that_is_refused_certifies_nothing_and_its_neighbours_do(store_path: Path) -> None:
    async with opened(store_path) as store:
        store.open_chain()
        fence = await create(store)
        for name in ("a", "b", "c"):
            row = step(name, StepState.ADMITTED)
            await store.commit(partial(transitions.record_steps, fence=fence, rows=[row], events=[told(row)]))
        units = []
        for name, seen in (("a", 1), ("b", 7), ("c", 1)):
            row = step(name)
            row.receipt = PAID
            at = Seen(StepState.ADMITTED, seen)
            units.append(
                store.commit(partial(transitions.move_step, fence=fence, row=row, seen=at, events=[told(row)]))
            )
        results = [isinstance(each, Exception) for each in await asyncio.gather(*units, return_exceptions=True)]
        assert results == [False, True, False]
    assert [row[1:3] for row in look(store_path).steps] == [("a", "completed"), ("b", "admitted"), ("c", "completed")]
    with closing(sqlite3.connect(store_path)) as db:
        assert db.execute("SELECT id FROM ditto_receipts").fetchall() == [(1,), (2,)]


def test_the_end_of_the_chain_is_read_in_each_transaction(tmp_path: Path) -> None:
    """Another process may have written: what a transaction knows of the end is forgotten with it."""
    signer = open_signer(tmp_path / "ditto.db", may_create=True)
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as db:
        db.execute("CREATE TABLE ditto_receipts (id INTEGER PRIMARY KEY, run, step, attempt, hash, line)")
        reads: list[str] = []
        db.set_trace_callback(lambda sql: reads.append(sql) if sql.startswith("SELECT") else None)
        chain = Chain("store", signer)
        for number in range(3):
            tx = transitions.Transaction(db, 1, chain)
            tx.certify(1, PAID)
            tx.certify(1, PAID)
            assert len(reads) == number + 1
        assert [row[0] for row in db.execute("SELECT id FROM ditto_receipts")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.asyncio
async def test_an_edited_chain_is_damage_and_is_not_gone_on_with(store_path: Path) -> None:
    graph = Graph("act").step("act", lambda: 1, effect="write")
    async with create_ditto(store=store_path) as runtime:
        await runtime.run(graph, id="x")
    with closing(sqlite3.connect(store_path, isolation_level=None)) as db:
        db.execute("UPDATE ditto_receipts SET hash = 'evil'")
    async with create_ditto(store=store_path) as runtime:
        with pytest.raises(StoreDamagedError, match="ditto_receipts, row 1"):
            await runtime.run(graph, id="y")
    with closing(sqlite3.connect(store_path, isolation_level=None)) as db:
        db.execute("UPDATE ditto_receipts SET line = x'00'")
    async with create_ditto(store=store_path) as runtime:
        with pytest.raises(StoreDamagedError, match="ditto_receipts, row 1"):
            assert [line async for line in runtime.receipts()]
