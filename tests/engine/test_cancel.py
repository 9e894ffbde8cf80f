"""Cancellation and deadlines: four that look alike are told apart, and a run that was cut goes on, nothing twice."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from sqlalchemy import text

from ditto import (
    Absent,
    Committed,
    EffectNotMade,
    Graph,
    LookupResult,
    Loop,
    Pending,
    Retry,
    RunCancelledError,
    Runtime,
    StepContext,
    StepError,
    StepTimeoutError,
    UnknownOutcomeError,
    Worker,
)
from tests.engine.scene import AtWait, Gate, World, events, on_disk, opened, states, status, story, wait_until

pytestmark = pytest.mark.asyncio

EFFECTS = ["pure", "read", "idempotent", "write", "infer"]
ADMITTED = ["write", "infer"]


# The four


async def by_native_cancel(run: Callable[[], Awaitable[Any]], gate: Gate) -> None:
    task = asyncio.ensure_future(run())
    await gate.came()
    task.cancel("by the test")
    with pytest.raises(asyncio.CancelledError):
        await task


async def by_scope(run: Callable[[], Awaitable[Any]], gate: Gate) -> None:
    async with anyio.create_task_group() as group:
        with anyio.CancelScope() as scope:

            async def cancel() -> None:
                await gate.came()
                scope.cancel()

            group.start_soon(cancel)
            await run()
        assert scope.cancelled_caught


async def by_timeout(run: Callable[[], Awaitable[Any]], gate: Gate) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(None) as limit:

            async def expire() -> None:
                await gate.came()
                limit.reschedule(asyncio.get_running_loop().time())

            expiring = asyncio.create_task(expire())
            await run()
    await expiring


CALLERS = [by_native_cancel, by_scope, by_timeout]


@pytest.mark.parametrize("cut", CALLERS)
@pytest.mark.parametrize("branches", [1, 2])
@pytest.mark.parametrize("timeout_s", [None, 1_000], ids=["no deadline", "deadline"])
@pytest.mark.parametrize("effect", EFFECTS)
async def test_the_callers_cancellation_reaches_the_caller_as_it_was(
    store_path: Path, cut: Any, branches: int, timeout_s: float | None, effect: str
) -> None:
    gate = Gate()
    graph = Graph("g")
    for number in range(branches):
        graph = graph.step(f"a{number}", gate.pause, effect=effect, timeout_s=timeout_s)
    async with opened(store_path) as runtime:
        await cut(lambda: runtime.run(graph, id="x"), gate)
        lost = {"a0", "a1"} if branches == 2 else {"a0"}
        if effect in ADMITTED:
            assert await states(runtime, "x") == dict.fromkeys(lost, "unknown")
            assert await status(runtime, "x") == "unknown"
            assert (await story(runtime, "x"))[-1] == "run_unknown"
        else:
            assert await states(runtime, "x") == {}
            assert await status(runtime, "x") == "interrupted"
            gate.open()
            assert set(await runtime.run(graph, id="x")) == lost


@pytest.mark.parametrize("effect", EFFECTS)
@pytest.mark.parametrize("where", ["node", "action", "config"])
@pytest.mark.parametrize("branches", [1, 2])
async def test_a_missed_deadline_is_told_as_one(store_path: Path, effect: str, where: str, branches: int) -> None:
    async def slow(arguments: Any) -> None:
        await asyncio.Event().wait()

    worker = Worker("W").node("W.SLOW", slow, effect=effect, timeout_s=0.01 if where == "action" else None)
    graph = Graph("g").node("a", "W.SLOW", timeout_s=0.01 if where == "node" else None)
    if branches == 2:
        graph = graph.step("b", lambda: 1)
    settings: dict[str, Any] = {"step_timeout_s": 0.01} if where == "config" else {}
    async with opened(store_path, workers=[worker], **settings) as runtime:
        expected = UnknownOutcomeError if effect in ADMITTED else StepTimeoutError
        with pytest.raises(expected, match=r"missed its deadline of 0\.01 s"):
            await runtime.run(graph, id="x")
        assert (await states(runtime, "x"))["a"] == ("unknown" if effect in ADMITTED else "failed")


async def test_the_nodes_deadline_replaces_the_configured_one_and_the_earlier_of_node_and_action_counts(
    store_path: Path,
) -> None:
    async def slow(arguments: Any) -> str:
        await anyio.sleep(0.03)
        return "done"

    worker = Worker("W").node("W.SLOW", slow, effect="read")
    async with opened(store_path, workers=[worker], step_timeout_s=0.01) as runtime:
        assert await runtime.run(Graph("g").node("a", "W.SLOW", timeout_s=1_000)) == {"a": "done"}
    strict = Worker("W").node("W.SLOW", slow, effect="read", timeout_s=0.01)
    async with opened(store_path, workers=[strict]) as runtime:
        with pytest.raises(StepTimeoutError):
            await runtime.run(Graph("g").node("a", "W.SLOW", timeout_s=1_000))


@pytest.mark.parametrize("effect", EFFECTS)
@pytest.mark.parametrize("branches", [1, 2])
async def test_e08_a_handlers_own_timeout_error_is_its_error(store_path: Path, effect: str, branches: int) -> None:
    async def remote() -> None:
        raise TimeoutError("remote")

    graph = Graph("g").step("a", remote, effect=effect, timeout_s=1_000)
    if branches == 2:
        graph = graph.step("b", lambda: 1)
    async with opened(store_path) as runtime:
        if effect in ADMITTED:
            with pytest.raises(UnknownOutcomeError, match="TimeoutError: remote"):
                await runtime.run(graph, id="x")
        else:
            with pytest.raises(StepError, match="remote") as caught:
                await runtime.run(graph, id="x")
            assert (caught.value.error_type, caught.value.code) == ("TimeoutError", "step.failed")


async def let_out() -> None:
    raise asyncio.CancelledError


async def inner_timeout() -> None:
    with anyio.fail_after(0.001):
        await asyncio.Event().wait()


async def inner_asyncio_timeout() -> None:
    async with asyncio.timeout(0.001):
        await asyncio.Event().wait()


async def awaits_a_cancelled_task() -> None:
    task = asyncio.create_task(asyncio.sleep(1_000))
    await asyncio.sleep(0)
    task.cancel()
    await task


@pytest.mark.parametrize("stray", [let_out, awaits_a_cancelled_task])
@pytest.mark.parametrize("timeout_s", [None, 1_000], ids=["no deadline", "deadline"])
@pytest.mark.parametrize("effect", EFFECTS)
@pytest.mark.parametrize("branches", [1, 2])
async def test_e08_a_librarys_stray_cancellation_is_an_error_of_the_step(
    store_path: Path, stray: Any, timeout_s: float | None, effect: str, branches: int
) -> None:
    graph = Graph("g").step("a", stray, effect=effect, timeout_s=timeout_s)
    if branches == 2:
        graph = graph.step("b", lambda: 1)
    async with opened(store_path) as runtime:
        with pytest.raises((StepError, UnknownOutcomeError), match="a library under the handler cancelled it"):
            await runtime.run(graph, id="x")
        assert await status(runtime, "x") == ("unknown" if effect in ADMITTED else "failed")
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0


@pytest.mark.parametrize("inner", [inner_timeout, inner_asyncio_timeout])
@pytest.mark.parametrize("branches", [1, 2])
@pytest.mark.parametrize("timeout_s", [None, 1_000], ids=["no deadline", "deadline"])
async def test_a_timeout_inside_a_handler_is_its_own(
    store_path: Path, inner: Any, branches: int, timeout_s: float | None
) -> None:
    graph = Graph("g").step("a", inner, timeout_s=timeout_s)
    if branches == 2:
        graph = graph.step("b", lambda: 1)
    async with opened(store_path) as runtime:
        with pytest.raises(StepError) as caught:
            await runtime.run(graph, id="x")
        assert caught.value.error_type == "TimeoutError"


async def test_a_library_that_cancels_the_steps_own_task_does_not_complete_the_run(
    store_path: Path, world: World
) -> None:
    broken = True

    async def cancel_own_task(ctx: StepContext) -> str:
        task = asyncio.current_task()
        assert task is not None
        if broken:
            task.cancel()
            await asyncio.sleep(0)
        return world.act(ctx)

    graph = Graph("g").step("a", cancel_own_task).step("b", world.act).step("c", world.act, after=("a", "b"))
    async with opened(store_path) as runtime:
        with pytest.raises(StepError, match="step a: a library under the handler cancelled the step's task for good"):
            await runtime.run(graph, id="x")
        assert await status(runtime, "x") == "interrupted"
        broken = False
        assert len(await runtime.run(graph, id="x")) == 3
    assert set(world.effects.values()) == {1}


# What a handler makes of its cancellation


@pytest.mark.parametrize("cut", CALLERS)
@pytest.mark.parametrize("branches", [1, 2])
@pytest.mark.parametrize("effect", EFFECTS)
async def test_a_handler_that_swallows_the_cancellation_does_not_undo_it(
    store_path: Path, world: World, cut: Any, branches: int, effect: str
) -> None:
    gate = Gate()

    async def stubborn(ctx: StepContext) -> str:
        try:
            await gate.pause()
        except asyncio.CancelledError:
            world.act(ctx)
        return "done"

    graph = Graph("g").step("a", stubborn, effect=effect).step("next", world.act, after=("a",), effect="write")
    if branches == 2:
        graph = graph.step("b", gate.pause)
    async with opened(store_path) as runtime:
        await cut(lambda: runtime.run(graph, id="x"), gate)
        # What it returned is known, and recorded; the workflow does not go on.
        assert await states(runtime, "x") == {"a": "completed"}
        assert await status(runtime, "x") == "interrupted"
        gate.open()
        outputs = await runtime.run(graph, id="x")
        assert (outputs["a"], outputs["next"]) == ("done", "done x/1/next")
    assert world.effects == {"x/1/a": 1, "x/1/next": 1}


@pytest.mark.parametrize("cut", CALLERS)
@pytest.mark.parametrize("effect", EFFECTS)
async def test_an_error_that_a_handler_makes_of_the_cancellation(store_path: Path, cut: Any, effect: str) -> None:
    gate = Gate()

    async def translating() -> None:
        try:
            await gate.pause()
        except asyncio.CancelledError:
            raise RuntimeError("the connection was closed") from None

    graph = Graph("g").step("a", translating, effect=effect, retry=Retry(3, initial_s=0))
    async with opened(store_path) as runtime:
        await cut(lambda: runtime.run(graph, id="x"), gate)
        if effect in ADMITTED:
            assert await states(runtime, "x") == {"a": "unknown"}
            assert await status(runtime, "x") == "unknown"
        else:
            assert await states(runtime, "x") == {}
            assert await status(runtime, "x") == "interrupted"
    assert gate.count == 1


@pytest.mark.parametrize("cut", CALLERS)
@pytest.mark.parametrize("effect", ADMITTED)
async def test_what_says_that_nothing_was_sent_is_not_unknown(store_path: Path, cut: Any, effect: str) -> None:
    gate = Gate()

    async def careful(ctx: StepContext) -> None:
        try:
            await gate.pause()
        except asyncio.CancelledError:
            ctx.not_made("the connection was not open yet")
            raise

    graph = Graph("g").step("a", careful, effect=effect)
    async with opened(store_path) as runtime:
        await cut(lambda: runtime.run(graph, id="x"), gate)
        assert await states(runtime, "x") == {"a": "refused"}
        assert await status(runtime, "x") == "interrupted"
        gate.open()
        assert await runtime.run(graph, id="x") == {"a": None}


async def test_a_handler_that_swallows_its_deadline_and_returns_has_a_value(store_path: Path) -> None:
    async def stubborn() -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "all the same"
        return "never"

    async with opened(store_path) as runtime:
        assert await runtime.run(Graph("g").step("a", stubborn, effect="write", timeout_s=0.01), id="x") == {
            "a": "all the same"
        }


@pytest.mark.parametrize("effect", EFFECTS)
async def test_e01_a_cancellation_in_the_tick_in_which_the_work_finishes(
    store_path: Path, world: World, effect: str
) -> None:
    begun = asyncio.Event()
    finished: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def work() -> str:
        begun.set()
        return await finished

    graph = (
        Graph("g").step("a", work, effect=effect, timeout_s=1_000).step("post", world.act, after=("a",), effect="write")
    )
    async with opened(store_path) as runtime:
        run = asyncio.create_task(runtime.run(graph, id="x"))
        await begun.wait()
        finished.set_result("done")
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        assert world.total == 0
        assert await status(runtime, "x") in ("interrupted", "unknown")


async def test_a_cancellation_during_draining_keeps_the_first_error_of_what_is_unknown(store_path: Path) -> None:
    gate = Gate()

    async def fail() -> None:
        await gate.came()
        raise ValueError("first")

    graph = Graph("g").step("lost", gate.pause, effect="write").step("fail", fail)
    async with opened(store_path) as runtime:
        run = asyncio.create_task(runtime.run(graph, id="x"))
        await wait_until(lambda: on_disk(store_path, "x").get("fail") == "failed")
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        assert await status(runtime, "x") == "unknown"
        await runtime.resolve("x", "lost", actor="mia", reason="seen", committed=1)
        with pytest.raises(StepError, match="first"):
            await runtime.run(graph, id="x")
        assert await status(runtime, "x") == "failed"


# Every wait of a run


class Service:
    """A world with every kind of step; its look-up tells the truth."""

    def __init__(self) -> None:
        self.world = World()
        self.refused = False
        self.lost = False

    async def put(self, ctx: StepContext) -> str:
        await asyncio.sleep(0)
        return self.world.act(ctx)

    async def send(self, ctx: StepContext) -> str:
        await asyncio.sleep(0)
        done = self.world.act(ctx)
        await asyncio.sleep(0)
        return done

    async def send_lossy(self, ctx: StepContext) -> str:
        """Not made at first, then made with the answer lost."""
        if not self.refused:
            self.refused = True
            raise EffectNotMade("not yet")
        done = await self.send(ctx)
        if not self.lost:
            self.lost = True
            raise ConnectionError("dead")
        return done

    def send_in_thread(self, ctx: StepContext) -> str:
        return self.world.act(ctx)

    def book(self, ctx: StepContext) -> int:
        ctx.connection.execute(text("CREATE TABLE IF NOT EXISTS book (entry TEXT)"))
        ctx.connection.execute(text("INSERT INTO book VALUES (:key)"), {"key": ctx.key})
        return int(ctx.connection.execute(text("SELECT count(*) FROM book")).scalar_one())

    async def find(self, key: str, arguments: Any, ctx: StepContext) -> LookupResult:
        await asyncio.sleep(0)
        return Committed(f"done {key}") if self.world.effects[key] else Absent()

    def graph(self) -> Graph:
        sure: dict[str, Any] = {"effect": "write", "lookup": self.find, "absence_is_final": True}
        return (
            Graph("g")
            .step("pure", lambda: 1, effect="pure")
            .step("read", self.read, effect="read", after=("pure",))
            .step("put", self.put, after=("read",))
            .step("send", self.send, after=("put",), **sure)
            .step("lossy", self.send_lossy, after=("send",), retry=Retry(3, initial_s=0.0), **sure)
            .step("thread", self.send_in_thread, after=("lossy",), **sure)
            .step("book", self.book, after=("thread",), effect="local")
            .step("last", lambda book: book, after=("book",), effect="pure")
        )

    async def read(self) -> int:
        await asyncio.sleep(0)
        return 1

    def check(self, outputs: dict[str, Any]) -> None:
        assert outputs["last"] == outputs["book"] == 1
        writes = {key: count for key, count in self.world.effects.items() if key != "x/1/put"}
        assert writes == {"x/1/send": 1, "x/1/lossy": 1, "x/1/thread": 1}
        assert 1 <= self.world.effects["x/1/put"] <= 2


async def waits_of(path: Path) -> int:
    service = Service()
    async with opened(path) as runtime:
        counted = AtWait(runtime.run(service.graph(), id="x"), {})
        service.check(await counted)
    return counted.count


async def test_cancelled_at_each_wait_nothing_is_done_twice_and_the_run_goes_on(tmp_path: Path) -> None:
    for wait in range(1, await waits_of(tmp_path / "counted.db") + 1):
        for second in (None, wait + 1) if wait % 3 == 0 else (None,):
            service = Service()
            async with opened(tmp_path / f"{wait}-{second}.db") as runtime:
                waits = [wait] if second is None else [wait, second]
                with pytest.raises(asyncio.CancelledError):
                    await asyncio.create_task(cancelled(runtime, service, waits))
                assert await status(runtime, "x") in ("interrupted", "unknown", "completed")
                service.check(await runtime.run(service.graph(), id="x"))
                told = await events(runtime, "x")
                assert [event.number for event in told] == list(range(1, len(told) + 1))


async def cancelled(runtime: Runtime, service: Service, waits: list[int]) -> Any:
    task = asyncio.current_task()
    assert task is not None
    return await AtWait(runtime.run(service.graph(), id="x"), dict.fromkeys(waits, task.cancel))


async def test_a_scope_cancelled_at_each_wait_nothing_is_done_twice(tmp_path: Path) -> None:
    for wait in range(1, await waits_of(tmp_path / "counted.db") + 1):
        service = Service()
        async with opened(tmp_path / f"{wait}.db") as runtime:
            with anyio.CancelScope() as scope:
                await AtWait(runtime.run(service.graph(), id="x"), {wait: scope.cancel})
            task = asyncio.current_task()
            assert task is not None
            assert task.cancelling() == 0
            assert scope.cancel_called
            service.check(await runtime.run(service.graph(), id="x"))


# A cancelled run


@pytest.mark.parametrize("same_runtime", [True, False], ids=["the same runtime", "another runtime"])
@pytest.mark.parametrize("effect", ["pure", "read", "idempotent", "write"])
@pytest.mark.parametrize("branches", [1, 2])
async def test_d05_a_cancelled_run_starts_nothing_and_what_comes_later_is_kept_as_late(
    store_path: Path, world: World, same_runtime: bool, effect: str, branches: int
) -> None:
    gate = Gate()

    async def wait(ctx: StepContext) -> str:
        await gate.pause()
        return world.act(ctx)

    graph = Graph("g").step("a", wait, effect=effect).step("next", world.act, after=("a",))
    if branches == 2:
        graph = graph.step("b", wait, effect=effect)
    async with opened(store_path) as runtime, opened(store_path) as other:
        run = asyncio.create_task(runtime.run(graph, id="x"))
        await gate.came()
        await (runtime if same_runtime else other).cancel("x", actor="mia", reason="not wanted")
        gate.open()
        with pytest.raises(RunCancelledError, match="run x was cancelled"):
            await run
        assert await status(runtime, "x") == "cancelled"
        told = await events(runtime, "x")
        late = {event.step: event.body for event in told if event.kind == "step_returned_late"}
        if effect == "write":
            assert late["a"] == {"attempt": 1, "value": '"done x/1/a"'}
        assert [event.number for event in told] == list(range(1, len(told) + 1))
        assert "next" not in await states(runtime, "x")
    assert "x/1/next" not in world.effects


async def test_a_cancelled_run_ends_its_back_off(store_path: Path) -> None:
    failed = asyncio.Event()

    async def fail() -> None:
        failed.set()
        raise ValueError("not now")

    graph = Graph("g").step("a", fail, retry=Retry(initial_s=1_000, max_s=1_000))
    async with opened(store_path) as runtime:
        run = asyncio.create_task(runtime.run(graph, id="x"))
        await failed.wait()
        await runtime.cancel("x")
        with pytest.raises(RunCancelledError):
            await run


async def test_a_cancelled_loop_starts_no_further_iteration(store_path: Path, world: World) -> None:
    gate = Gate()

    async def wait(ctx: StepContext) -> str:
        await gate.pause()
        return world.act(ctx)

    loop = Loop(
        "l",
        graph=Graph("body").step("a", wait, effect="read"),
        update=lambda state, outputs: state + 1,
        done=lambda state: state == 3,
        max_iterations=5,
    )
    async with opened(store_path) as runtime:
        run = asyncio.create_task(runtime.loop(loop, 0, id="x"))
        await gate.came()
        await runtime.cancel("x")
        gate.open()
        with pytest.raises(RunCancelledError):
            await run
    assert world.total == 1


async def test_a_long_pure_loop_can_be_cancelled(store_path: Path) -> None:
    loop = Loop(
        "l",
        graph=Graph("body").step("a", lambda: 1, effect="pure"),
        update=lambda state, outputs: state + 1,
        done=lambda state: False,
        max_iterations=1_000_000,
    )
    async with opened(store_path, max_iterations=1_000_000) as runtime:
        with anyio.move_on_after(0.1) as scope:
            await runtime.loop(loop, 0, id="x")
        assert scope.cancelled_caught
        assert await status(runtime, "x") == "interrupted"
        assert (await runtime.get("x")).iteration > 0


async def test_a_lost_outcome_that_is_looked_up_while_the_caller_is_cancelled_stays_unknown(store_path: Path) -> None:
    gate = Gate()

    async def lose() -> None:
        raise ConnectionError("dead")

    async def find(key: str, arguments: Any, ctx: StepContext) -> LookupResult:
        await gate.pause()
        return Pending()

    graph = Graph("g").step("a", lose, effect="write", lookup=find)
    async with opened(store_path) as runtime:
        await by_native_cancel(lambda: runtime.run(graph, id="x"), gate)
        assert await states(runtime, "x") == {"a": "unknown"}
        assert await status(runtime, "x") == "unknown"
        gate.open()
        with pytest.raises(UnknownOutcomeError, match="dead; the look-up says it is pending"):
            await runtime.run(graph, id="x")
