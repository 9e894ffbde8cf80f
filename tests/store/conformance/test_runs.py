"""Runs on a store that fails, and runs that are cancelled: a whole record, and a later attempt that goes on."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from contextlib import AsyncExitStack
from typing import Any

import pytest
from sqlalchemy import Connection, text

from ditto import Graph, Runtime, Worker
from ditto.effects import Absent, Committed
from ditto.errors import OutputError, StepError, StoreError
from ditto.store.store import Store
from ditto.worker import Outcome, StepContext
from tests.store.cancelling import CancelAt
from tests.store.conformance.under_test import Fault, StoreUnderTest
from tests.store.scenes import all_at_once

pytestmark = pytest.mark.asyncio


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
    ctx.connection.execute(text("CREATE TABLE IF NOT EXISTS book (entry TEXT)"))
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


def entries(under_test: StoreUnderTest) -> int:
    [(count,)] = under_test.rows("SELECT count(*) FROM book")
    return int(count)


def store_of(runtime: Runtime) -> Store:
    """The store that a runtime has open."""
    assert runtime._opened is not None
    return runtime._opened.store


async def until_waiting(runtime: Runtime, units: int) -> None:
    """Return when so many units wait for the committer, which is held up."""
    committer = store_of(runtime).committer
    for _ in range(100_000):
        if committer._inbox.qsize() + len(committer._taken) >= units:
            return
        await asyncio.sleep(0)
    pytest.fail("nothing came to be committed")


# Faults at the n-th statement


@pytest.mark.parametrize(
    ("fault", "until", "same_runtime"),
    [
        pytest.param(fault, until, same, id=f"{fault}, {how}, {where}", marks=() if quick else pytest.mark.sweep)
        for fault in Fault
        for how, until in (("once", 0), ("for good", 10_000))
        for where, same in (("same runtime", True), ("next runtime", False))
        for quick in [(fault, same) in ((Fault.LOCKED, True), (Fault.IO, False))]
    ],
)
async def test_a_run_stops_cleanly_at_any_fault_and_goes_on(
    under_test: StoreUnderTest, fault: Fault, until: int, same_runtime: bool
) -> None:
    for at in range(1, 1000):
        store, world = under_test.fresh(), World()
        async with store.create_runtime(workers=[world.worker()]) as runtime:
            under_test.faults.arm(fault, at, until=until)
            try:
                result = await runtime.run(FLOW, id="run")
            except StoreError as error:
                result = None
                assert store.name in str(error)
                assert "run again" in str(error).lower() or "nothing was written" in str(error)
                assert store.can_write()
                store.look()
            met = list(under_test.faults.met)
            under_test.faults.disarm()
            if result is None and same_runtime:
                result = await runtime.run(FLOW, id="run")
        if result is None:
            store.look()
            async with store.create_runtime(workers=[world.worker()]) as runtime:
                result = await runtime.run(FLOW, id="run")
        assert result == RESULT
        assert world.effects == {"run/1/pay": 1}
        assert entries(store) == 1
        picture = store.look()
        assert [run[2] for run in picture.runs] == ["completed"]
        assert {row[2] for row in picture.steps} == {"completed"}
        if not met:
            assert at > 30
            return
    pytest.fail("the faults did not run out")


# No effect before its causes


@pytest.mark.parametrize("fault", Fault)
async def test_no_effect_is_attempted_when_what_it_rests_on_was_lost(
    under_test: StoreUnderTest, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    monkeypatch.setattr("ditto.engine.drive.HELD_S", 0)
    world, held, go, busy = World(), asyncio.Event(), asyncio.Event(), AsyncExitStack()

    async def cause() -> int:
        if not go.is_set():
            await busy.enter_async_context(all_at_once(store_of(runtime)))
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
    async with under_test.create_runtime(workers=[world.worker()]) as runtime, busy:
        running = asyncio.ensure_future(runtime.run(graph, id="run"))
        # The outcomes of `cause` and `wait` are on their way by themselves, and the admission of `pay` is a third unit.
        await held.wait()
        await until_waiting(runtime, 1)
        go.set()
        await until_waiting(runtime, 3)
        under_test.faults.arm(fault, 1, until=2, only="INSERT INTO ditto_steps")
        await busy.aclose()
        with pytest.raises(StoreError):
            await running
        assert world.effects == {}
        assert under_test.look().steps == []
        under_test.faults.disarm()
        assert (await runtime.run(graph, id="run"))["pay"] == "paid"
    assert world.effects == {"run/1/pay": 1}


async def test_what_a_failing_local_handler_took_along_is_durable_before_what_rests_on_it(
    under_test: StoreUnderTest,
) -> None:
    seen: list[dict[str, str]] = []
    entered, go = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def failing(ctx: StepContext) -> None:
        loop.call_soon_threadsafe(entered.set)
        go.wait()
        raise ValueError("no")

    async def pay(arguments: Any, ctx: StepContext) -> str:
        seen.append({step: state for _, step, state, *_ in under_test.look().steps})
        return "paid"

    graph = (
        Graph("flow")
        .step("cause", lambda: 1, effect="pure")
        .step("local", failing, effect="local", after=["cause"])
        .node("pay", "BANK.PAY", after=["cause"], bind=lambda cause: cause)
    )
    async with under_test.create_runtime(workers=[Worker("BANK").node("BANK.PAY", pay)]) as runtime:
        running = asyncio.ensure_future(runtime.run(graph, id="run"))
        await entered.wait()
        await until_waiting(runtime, 1)  # the admission of `pay`
        go.set()
        await asyncio.wait([running])
        assert isinstance(running.exception(), StepError)
    assert [(states["cause"], states["pay"]) for states in seen] == [("completed", "admitted")]
    assert {step: state for _, step, state, *_ in under_test.look().steps} == {
        "cause": "completed", "local": "failed", "pay": "completed",
    }  # fmt: skip


# Cancelled at every wait


@pytest.mark.parametrize("again", [0, 1, 2], ids=["once", "and at the next wait", "and at the one after"])
async def test_e05_e07_cancelled_at_any_wait_the_record_is_whole_and_the_run_goes_on(
    under_test: StoreUnderTest, again: int, caplog: pytest.LogCaptureFixture
) -> None:
    for at in range(1, 1000):
        store, world = under_test.fresh(), World()
        async with store.create_runtime(workers=[world.worker()]) as runtime:
            work = CancelAt(runtime.run(FLOW, id="run"), *({at, at + again}))

            async def run(work: CancelAt = work) -> Any:
                return await work

            task = asyncio.ensure_future(run())
            await asyncio.wait([task])
            # A handler that nobody waits for any more may just be having its late return noted.
            assert store.can_write(timeout_s=10), "no transaction is left open"
            if not task.cancelled():
                assert task.result() == RESULT
                assert work.count < at
                assert at > 5
                return
            picture = store.look()
            assert [run[2] for run in picture.runs] in ([], ["interrupted"], ["unknown"], ["completed"])
            assert not any(row[2] == "admitted" for row in picture.steps if picture.runs[0][2] != "unknown")
            assert sum(world.effects.values()) <= 1
            assert await runtime.run(FLOW, id="run") == RESULT
            assert world.effects == {"run/1/pay": 1}
            assert entries(store) == 1
            store.look()
            assert "was not released" not in caplog.text
    pytest.fail("the waits did not run out")


@pytest.mark.parametrize("fault", Fault)
async def test_e07_a_cancellation_while_a_commit_fails_believes_the_record(
    under_test: StoreUnderTest, fault: Fault
) -> None:
    for at in range(1, 1000):
        store, world = under_test.fresh(), World()
        async with store.create_runtime(workers=[world.worker()]) as runtime:
            # Every commit from the moment of the cancellation on fails.
            work = CancelAt(
                runtime.run(FLOW, id="run"), at, before=lambda: under_test.faults.arm(fault, 1, until=10_000)
            )

            async def run(work: CancelAt = work) -> Any:
                return await work

            task = asyncio.ensure_future(run())
            await asyncio.wait([task])
            under_test.faults.disarm()
            assert store.can_write(timeout_s=10)
            if work.count < at:
                assert task.result() == RESULT
                return
            assert task.cancelled(), f"a cancelled task is cancelled, not {task!r}"
            store.look()
            assert await runtime.run(FLOW, id="run") == RESULT
            assert world.effects == {"run/1/pay": 1}
            assert entries(store) == 1
    pytest.fail("the waits did not run out")


@pytest.mark.parametrize("raises", [False, True])
async def test_a_cancellation_while_a_commit_part_runs_loses_no_outcome(
    under_test: StoreUnderTest, raises: bool
) -> None:
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
    async with under_test.create_runtime(workers=[bank]) as runtime:
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
    under_test.look()
