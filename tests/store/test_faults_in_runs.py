"""Runs on an SQLite file: on a disk that is full, while another process has the lock, and in a forked child."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ditto import Config, Graph, Runtime, Worker, create_ditto
from ditto.config import StoreConfig
from ditto.effects import Absent, Committed
from ditto.errors import StoreBusyError, StoreFullError
from ditto.worker import StepContext
from tests.processes import Child
from tests.store.files import look


def execute(runtime: Runtime, statement: str) -> asyncio.Future[Any]:
    """Carry out a statement on the writing connection."""
    assert runtime._opened is not None
    return runtime._opened.store.commit(lambda tx: tx.db.execute(statement).fetchone())


# The disk, and the lock on the file


@pytest.mark.asyncio
async def test_i06_a_full_disk_stops_the_run_and_space_lets_it_go_on(store_path: Path) -> None:
    effects: list[str] = []

    def sell(arguments: Any, ctx: StepContext) -> str:
        effects.append(ctx.key)
        return "x" * 200_000

    def find(key: str, arguments: Any, ctx: StepContext) -> Committed:
        return Committed("found" if key in effects else "?")

    shop = Worker("SHOP").node("SHOP.SELL", sell, effect="write", lookup=find)
    graph = Graph("sale").node("sell", "SHOP.SELL", bind=lambda: {})
    async with create_ditto(store=store_path, workers=[shop]) as runtime:
        (pages,) = await execute(runtime, "PRAGMA page_count")
        await execute(runtime, f"PRAGMA max_page_count={pages + 2}")
        with pytest.raises(StoreFullError, match="the disk is full; nothing was written") as full:
            await runtime.run(graph, id="run")
        assert full.value.run_id == "run"
        picture = look(store_path)
        assert [row[1:4] for row in picture.steps] == [("sell", "admitted", 1)]
        assert [event[2] for event in picture.events] == ["run_created", "step_admitted", "run_unknown"]
        await execute(runtime, "PRAGMA max_page_count=1000000")
        assert await runtime.run(graph, id="run") == {"sell": "found"}
    assert effects == ["run/1/sell"]


HOLD = """
import sqlite3, sys
db = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=60)
db.execute("BEGIN IMMEDIATE")
print("locked", flush=True)
sys.stdin.readline()
"""


@pytest.mark.asyncio
async def test_i13_a_run_that_meets_a_lock_in_its_middle_stops_and_a_later_start_goes_on(
    store_path: Path, start_child: Callable[..., Child]
) -> None:
    """Another process takes the lock for long just when an effect was made."""
    effects: list[str] = []
    holders: list[Child] = []

    def pay(arguments: Any, ctx: StepContext) -> str:
        effects.append(ctx.key)
        holders.append(start_child(HOLD, store_path))
        assert holders[0].line() == "locked"
        return "paid"

    def find(key: str, arguments: Any, ctx: StepContext) -> Committed | Absent:
        return Committed("paid") if key in effects else Absent()

    graph = (
        Graph("order")
        .step("before", lambda: 1)
        .node("pay", "BANK.PAY", after=("before",), bind=lambda: {})
        .step("after", lambda pay: pay, after=("pay",))
    )
    bank = Worker("BANK").node("BANK.PAY", pay, effect="write", lookup=find)
    config = Config(store=StoreConfig(busy_timeout_s=0.2))
    async with create_ditto(config, store=store_path, workers=[bank]) as runtime:
        with pytest.raises(StoreBusyError, match=r"longer than store\.busy_timeout_s; nothing was written") as busy:
            await runtime.run(graph, id="run")
        assert str(store_path) in str(busy.value)
        assert busy.value.run_id == "run"
        assert (await runtime.get("run")).status == "unknown", "reading does not need the lock"
    holders[0].kill()
    assert [row[1:4] for row in look(store_path).steps] == [("before", "completed", 1), ("pay", "admitted", 1)]
    async with create_ditto(config, store=store_path, workers=[bank]) as runtime:
        assert await runtime.run(graph, id="run") == {"before": 1, "pay": "paid", "after": "paid"}
    assert effects == ["run/1/pay"]
    look(store_path)


# Fork

FORK = """
import asyncio, gc, multiprocessing, sqlite3, sys
from pathlib import Path
from ditto import Graph, create_ditto
from ditto.errors import StoreClosedError, StoreError

path = Path(sys.argv[1])
graph = Graph("flow").step("a", lambda: 1, effect="pure").step("b", lambda: 2, effect="idempotent", after=["a"])

async def use(runtime):
    for name, call in (("run", lambda: runtime.run(graph, id="child")), ("get", lambda: runtime.get("before"))):
        try:
            await call()
            print(f"{name}: it worked", flush=True)
        except StoreClosedError as error:
            print(f"{name}: {error.code}: {error}", flush=True)
    await runtime.close()
    print("closed", flush=True)
    try:
        async with create_ditto(store=path):
            print("opened", flush=True)
    except StoreError as error:
        print(f"new: {error.code}", flush=True)

def child(runtime):
    asyncio.run(use(runtime))
    if sys.argv[2] == "connections closed there":
        for connection in [each for each in gc.get_objects() if isinstance(each, sqlite3.Connection)]:
            connection.close()

async def main():
    async with create_ditto(store=path) as runtime:
        await runtime.run(graph, id="before")
        process = multiprocessing.get_context("fork").Process(target=child, args=[runtime])
        process.start()
        for number in range(20):
            await runtime.run(graph, id=f"parent {number}")
        process.join()
        print("exit", process.exitcode, flush=True)
        for number in range(20, 40):
            await runtime.run(graph, id=f"parent {number}")
    print("end", flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize("how", ["", "connections closed there"])
def test_i09_a_runtime_does_not_work_in_a_forked_child_and_the_parent_does_not_notice(
    store_path: Path, start_child: Callable[..., Child], how: str
) -> None:
    code, said = start_child(FORK, store_path, how).end()
    assert code == 0
    closed = (
        "store.closed: this runtime was opened before fork(), and works in the parent only; start the child with "
        "'spawn', or fork before the store is opened"
    )
    assert said == [f"run: {closed}", f"get: {closed}", "closed", "new: store.forked", "exit 0", "end"]
    picture = look(store_path)
    assert sorted(run[0] for run in picture.runs) == sorted(["before", *(f"parent {number}" for number in range(40))])
    assert {run[2] for run in picture.runs} == {"completed"}
