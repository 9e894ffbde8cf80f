"""Runs on a store that fails, and runs that are cancelled: a whole record, and a later attempt that goes on."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, text

from ditto import Graph, Runtime, Worker, create_ditto
from ditto.effects import Absent, Committed
from ditto.errors import OutputError, StepError, StoreError, StoreFullError
from ditto.store.transitions import Transaction
from ditto.worker import Outcome, StepContext
from tests.processes import Child
from tests.store.cancelling import CancelAt
from tests.store.faults import FULL, IO, LOCKED, Faults
from tests.store.files import can_write, look


class World:
    """What is outside: it counts what is done to it, by key."""

    def __init__(self) -> None:
        self.effects: Counter[str] = Counter()

    def pay(self, arguments: Any, ctx: StepContext) -> str:
        self.effects[ctx.key] += 1
        return "paid"

    def find(self, key: str, arguments: Any, ctx: StepContext) -> Committed | Absent:
        return Committed("paid") if self.effects[key] else Absent()

    def worker(self) -> Worker:
        return Worker("BANK").node("BANK.PAY", self.pay, effect="write", lookup=self.find, absence_is_final=True)


def book(ctx: StepContext) -> int:
    ctx.connection.execute(text("CREATE TABLE IF NOT EXISTS book (entry)"))
    ctx.connection.execute(text("INSERT INTO book VALUES ('paid')"))
    return 1


FLOW = (
    Graph("flow")
    .step("large", lambda: "x" * 2000, effect="pure")
    .step("small", lambda: 1, effect="read", after=["large"])
    .step("put", lambda small: small + 1, effect="idempotent", after=["small"])
    .node("pay", "BANK.PAY", after=["put"], bind=lambda put: {"amount": put})
    .step("book", book, effect="local", after=["pay"])
    .step("last", lambda: "done", effect="pure", after=["book"])
)
RESULT = {"large": "x" * 2000, "small": 1, "put": 2, "pay": "paid", "book": 1, "last": "done"}


def entries(path: Path) -> int:
    with closing(sqlite3.connect(path)) as db, suppress(sqlite3.OperationalError):
        return int(db.execute("SELECT count(*) FROM book").fetchone()[0])
    return 0


@asynccontextmanager
async def held_up(runtime: Runtime) -> AsyncIterator[None]:
    """The committer is busy until the end of the block."""
    assert runtime._opened is not None
    begun, go = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def hold(tx: Transaction) -> None:
        loop.call_soon_threadsafe(begun.set)
        go.wait()

    held = runtime._opened.store.commit(hold)
    try:
        await begun.wait()
        yield
    finally:
        go.set()
        await held


async def until_waiting(runtime: Runtime, units: int) -> None:
    """Return when so many units wait for the committer, which is held up."""
    assert runtime._opened is not None
    for _ in range(100_000):
        committer = runtime._opened.store.committer
        if committer._inbox.qsize() + len(committer._taken) >= units:
            return
        await asyncio.sleep(0)
    pytest.fail("nothing came to be committed")


def execute(runtime: Runtime, statement: str) -> asyncio.Future[Any]:
    """Carry out a statement on the writing connection."""
    assert runtime._opened is not None
    return runtime._opened.store.commit(lambda tx: tx.db.execute(statement).fetchone())


# Faults at the n-th statement


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("fault", "until", "same_runtime"),
    [
        pytest.param(fault, until, same, id=f"{name}, {how}, {where}", marks=() if quick else pytest.mark.sweep)
        for name, fault in (("locked", LOCKED), ("full", FULL), ("I/O", IO))
        for how, until in (("once", 0), ("for good", 10_000))
        for where, same in (("same runtime", True), ("next runtime", False))
        for quick in [(name, same) in (("locked", True), ("I/O", False))]
    ],
)
async def test_a_run_stops_cleanly_at_any_fault_and_goes_on(
    tmp_path: Path, faults: Faults, fault: tuple[str, int], until: int, same_runtime: bool
) -> None:
    for at in range(1, 1000):
        path, world = tmp_path / str(at) / "ditto.db", World()
        async with create_ditto(store=path, workers=[world.worker()]) as runtime:
            faults.arm(fault, at, until=until)
            try:
                result = await runtime.run(FLOW, id="run")
            except StoreError as error:
                result = None
                assert str(path) in str(error)
                assert "run again" in str(error).lower() or "nothing was written" in str(error)
                assert can_write(path)
                look(path)
            met = list(faults.met)
            faults.disarm()
            if result is None and same_runtime:
                result = await runtime.run(FLOW, id="run")
        if result is None:
            look(path)
            async with create_ditto(store=path, workers=[world.worker()]) as runtime:
                result = await runtime.run(FLOW, id="run")
        assert result == RESULT
        assert world.effects == {"run/1/pay": 1}
        assert entries(path) == 1
        picture = look(path)
        assert [run[2] for run in picture.runs] == ["completed"]
        assert {row[2] for row in picture.steps} == {"completed"}
        if not met:
            assert at > 30
            return
    pytest.fail("the faults did not run out")


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


# No effect before its causes


@pytest.mark.asyncio
@pytest.mark.parametrize("fault", [LOCKED, FULL, IO], ids=["locked", "full", "I/O"])
async def test_no_effect_is_attempted_when_what_it_rests_on_was_lost(
    store_path: Path, faults: Faults, monkeypatch: pytest.MonkeyPatch, fault: tuple[str, int]
) -> None:
    monkeypatch.setattr("ditto.engine.drive.HELD_S", 0)
    world, held, go, busy = World(), asyncio.Event(), asyncio.Event(), AsyncExitStack()

    async def cause() -> int:
        if not go.is_set():
            await busy.enter_async_context(held_up(runtime))
            held.set()
        return 1

    async def wait() -> int:
        await go.wait()
        return 2

    graph = (
        Graph("flow")
        .step("cause", cause, effect="read")
        .step("wait", wait, effect="read", after=["cause"])
        .node("pay", "BANK.PAY", after=["wait"], bind=lambda wait: {"amount": wait})
    )
    async with create_ditto(store=store_path, workers=[world.worker()]) as runtime, busy:
        running = asyncio.ensure_future(runtime.run(graph, id="run"))
        # The outcomes of `cause` and `wait` are on their way by themselves, and the admission of `pay` is a third unit.
        await held.wait()
        await until_waiting(runtime, 1)
        go.set()
        await until_waiting(runtime, 3)
        faults.arm(fault, 1, until=2, only="INSERT INTO ditto_steps")
        await busy.aclose()
        with pytest.raises(StoreError):
            await running
        assert world.effects == {}
        assert look(store_path).steps == []
        faults.disarm()
        assert (await runtime.run(graph, id="run"))["pay"] == "paid"
    assert world.effects == {"run/1/pay": 1}


@pytest.mark.asyncio
async def test_what_a_failing_local_handler_took_along_is_durable_before_what_rests_on_it(store_path: Path) -> None:
    seen: list[dict[str, str]] = []
    entered, go = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def failing(ctx: StepContext) -> None:
        loop.call_soon_threadsafe(entered.set)
        go.wait()
        raise ValueError("no")

    async def pay(arguments: Any, ctx: StepContext) -> str:
        seen.append({step: state for _, step, state, *_ in look(store_path).steps})
        return "paid"

    graph = (
        Graph("flow")
        .step("cause", lambda: 1, effect="pure")
        .step("local", failing, effect="local", after=["cause"])
        .node("pay", "BANK.PAY", after=["cause"], bind=lambda cause: cause)
    )
    async with create_ditto(store=store_path, workers=[Worker("BANK").node("BANK.PAY", pay)]) as runtime:
        running = asyncio.ensure_future(runtime.run(graph, id="run"))
        await entered.wait()
        await until_waiting(runtime, 1)  # the admission of `pay`
        go.set()
        await asyncio.wait([running])
        assert isinstance(running.exception(), StepError)
    assert [(states["cause"], states["pay"]) for states in seen] == [("completed", "admitted")]
    assert {step: state for _, step, state, *_ in look(store_path).steps} == {
        "cause": "completed", "local": "failed", "pay": "completed",
    }  # fmt: skip


# Cancelled at every wait


@pytest.mark.asyncio
@pytest.mark.parametrize("again", [0, 1, 2], ids=["once", "and at the next wait", "and at the one after"])
async def test_e05_e07_cancelled_at_any_wait_the_record_is_whole_and_the_run_goes_on(
    tmp_path: Path, again: int, caplog: pytest.LogCaptureFixture
) -> None:
    for at in range(1, 1000):
        path, world = tmp_path / str(at) / "ditto.db", World()
        async with create_ditto(store=path, workers=[world.worker()]) as runtime:
            work = CancelAt(runtime.run(FLOW, id="run"), *({at, at + again}))

            async def run(work: CancelAt = work) -> Any:
                return await work

            task = asyncio.ensure_future(run())
            await asyncio.wait([task])
            # A handler that nobody waits for any more may just be having its late return noted.
            assert can_write(path, timeout_s=10), "no transaction is left open"
            if not task.cancelled():
                assert task.result() == RESULT
                assert work.count < at
                assert at > 5
                return
            picture = look(path)
            assert [run[2] for run in picture.runs] in ([], ["interrupted"], ["unknown"], ["completed"])
            assert not any(row[2] == "admitted" for row in picture.steps if picture.runs[0][2] != "unknown")
            assert sum(world.effects.values()) <= 1
            assert await runtime.run(FLOW, id="run") == RESULT
            assert world.effects == {"run/1/pay": 1}
            assert entries(path) == 1
            look(path)
            assert "was not released" not in caplog.text
    pytest.fail("the waits did not run out")


@pytest.mark.asyncio
@pytest.mark.parametrize("fault", [LOCKED, FULL, IO], ids=["locked", "full", "I/O"])
async def test_e07_a_cancellation_while_a_commit_fails_believes_the_record(
    tmp_path: Path, faults: Faults, fault: tuple[str, int]
) -> None:
    for at in range(1, 1000):
        path, world = tmp_path / str(at) / "ditto.db", World()
        async with create_ditto(store=path, workers=[world.worker()]) as runtime:
            # Every commit from the moment of the cancellation on fails.
            work = CancelAt(runtime.run(FLOW, id="run"), at, before=lambda: faults.arm(fault, 1, until=10_000))

            async def run(work: CancelAt = work) -> Any:
                return await work

            task = asyncio.ensure_future(run())
            await asyncio.wait([task])
            faults.disarm()
            assert can_write(path, timeout_s=10)
            if work.count < at:
                assert task.result() == RESULT
                return
            assert task.cancelled(), f"a cancelled task is cancelled, not {task!r}"
            look(path)
            assert await runtime.run(FLOW, id="run") == RESULT
            assert world.effects == {"run/1/pay": 1}
            assert entries(path) == 1
    pytest.fail("the waits did not run out")


@pytest.mark.asyncio
@pytest.mark.parametrize("raises", [False, True])
async def test_a_cancellation_while_a_commit_part_runs_loses_no_outcome(store_path: Path, raises: bool) -> None:
    loop = asyncio.get_running_loop()
    tasks: list[asyncio.Task[Any]] = []

    def record(connection: Connection, outcome: Outcome) -> None:
        if not tasks[0].done():
            cancelled = threading.Event()
            loop.call_soon_threadsafe(tasks[0].cancel)
            loop.call_soon_threadsafe(cancelled.set)
            cancelled.wait()
        if raises:
            raise ValueError("no")

    # Without a look-up: what is lost here is lost.
    world, graph = World(), Graph("sale").node("pay", "BANK.PAY", bind=lambda: {})
    bank = Worker("BANK").node("BANK.PAY", world.pay, record=record)
    async with create_ditto(store=store_path, workers=[bank]) as runtime:
        tasks.append(asyncio.ensure_future(runtime.run(graph, id="run")))
        await asyncio.wait(tasks)
        assert tasks[0].cancelled()
        if raises:
            with pytest.raises(OutputError, match="its commit part raised"):
                await runtime.run(graph, id="run")
        else:
            assert await runtime.run(graph, id="run") == {"pay": "paid"}
        assert [step.output for step in (await runtime.get("run")).steps] == ["paid"]
    assert world.effects == {"run/1/pay": 1}
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
