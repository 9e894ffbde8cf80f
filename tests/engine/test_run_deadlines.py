"""Deadlines of runs: they hold over waits and restarts, end what runs, and an unknown outcome outranks them."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from ditto import (
    Committed,
    DefinitionError,
    EffectNotMade,
    Flow,
    FlowContext,
    Graph,
    Loop,
    Retry,
    RunBlockedError,
    Runtime,
    StepContext,
    StepError,
    StepTimeoutError,
    Waiting,
    Worker,
)
from ditto.engine.drive import Drive
from ditto.engine.steps import Step
from tests.engine.scene import Gate, MovedClock, events, opened, states, status, story, told, wait_until

pytestmark = pytest.mark.asyncio

EFFECTS = ["read", "idempotent", "write", "infer"]
ADMITTED = ["write", "infer"]
MISSED = "run x missed its deadline"


def body_of(history: list[Any], kind: str) -> Any:
    """The body of the one event of that kind."""
    [found] = [event.body for event in history if event.kind == kind]
    return found


async def timed_out(running: Any, match: str = MISSED) -> StepTimeoutError:
    """The error that a run fails with when its deadline passes."""
    with pytest.raises(StepTimeoutError, match=match) as caught:
        await running
    assert caught.value.code == "run.timeout"
    return caught.value


# What runs, and what does not start


@pytest.mark.parametrize("in_thread", [False, True], ids=["async", "thread"])
@pytest.mark.parametrize("effect", EFFECTS)
async def test_what_runs_is_cut_and_nothing_further_starts(
    store_path: Path, effect: str, in_thread: bool, looking: None
) -> None:
    clock, gate = MovedClock(), Gate()
    begun: list[int] = []
    ends = asyncio.Event()
    loop = asyncio.get_running_loop()

    def block() -> None:
        loop.call_soon_threadsafe(begun.append, 1)
        asyncio.run_coroutine_threadsafe(ends.wait(), loop).result()

    graph = Graph("g").step("a", block if in_thread else gate.pause, effect=effect).step("b", lambda a: a, after=("a",))
    async with opened(store_path, clock=clock) as runtime:
        running = asyncio.ensure_future(runtime.run(graph, id="x", timeout_s=100))
        await (wait_until(lambda: bool(begun)) if in_thread else gate.came())
        info = await runtime.get("x")
        assert info.deadline_at == datetime.fromtimestamp(clock.at / 1_000_000 + 100, UTC)
        clock.move(99)
        await clock.looked_at()
        assert not running.done()
        clock.move(1)
        await timed_out(running)
        lost = effect in ADMITTED
        assert await states(runtime, "x") == {"a": "unknown" if lost else "failed"}
        assert await status(runtime, "x") == ("unknown" if lost else "failed")
        step = (await runtime.get("x")).step("a")
        assert step is not None
        assert step.error is not None
        assert step.error.message == "step a missed the deadline of its run"
        assert (await story(runtime, "x"))[-1] == ("run_unknown" if lost else "run_failed")
        ends.set()


async def test_a_deadline_passes_by_itself(store_path: Path) -> None:
    gate = Gate()
    async with opened(store_path) as runtime:
        await timed_out(runtime.run(Graph("g").step("a", gate.pause, effect="read"), id="x", timeout_s=0.05))
        assert await status(runtime, "x") == "failed"
    assert gate.count == 1


async def test_s01_a_clock_that_is_set_back_makes_no_run_longer(store_path: Path) -> None:
    clock, gate = MovedClock(), Gate()
    async with opened(store_path, clock=clock) as runtime:
        running = asyncio.ensure_future(
            runtime.run(Graph("g").step("a", gate.pause, effect="read"), id="x", timeout_s=0.2)
        )
        await gate.came()
        clock.move(-3600)
        await timed_out(running)
    clock.move(-3600)
    async with opened(store_path, clock=clock) as runtime:
        # Nor is one that is taken up before it began, by that clock, longer than it was to be.
        running = asyncio.ensure_future(runtime.run(Graph("g").wait("paid"), id="y", timeout_s=0.05))
        await told(runtime, "y", "step_waiting")
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        clock.move(-3600)
        await timed_out(runtime.run(Graph("g").wait("paid"), id="y"), "run y missed")


@pytest.mark.parametrize("what", ["a slot", "a back-off", "a signal", "a time", "a thread"])
async def test_what_is_waited_for_is_waited_for_no_longer(store_path: Path, what: str, looking: None) -> None:
    clock, gate = MovedClock(), Gate()
    calls: list[str] = []

    async def act(arguments: Any, ctx: StepContext) -> None:
        calls.append(ctx.run_id)
        if ctx.run_id == "other":
            await gate.pause()

    async def flaky() -> None:
        calls.append("flaky")
        raise EffectNotMade("not yet")

    worker = Worker("SHOP", concurrency=1).node("SHOP.PRICE", act, effect="read")
    priced = Graph("priced").node("a", "SHOP.PRICE")
    graph = {
        "a slot": priced,
        "a back-off": Graph("g").step("a", flaky, effect="write", retry=Retry(initial_s=1_000, max_s=1_000)),
        "a signal": Graph("g").wait("a"),
        "a time": Graph("g").sleep("a", 1_000),
        "a thread": Graph("g").step("a", lambda: calls.append("x"), effect="write"),
    }[what]
    loop = asyncio.get_running_loop()

    def block() -> None:
        asyncio.run_coroutine_threadsafe(gate.pause(), loop).result()

    async with opened(store_path, workers=[worker], clock=clock, threads=1) as runtime:
        others: list[asyncio.Future[Any]] = []
        if what == "a slot":
            others.append(asyncio.ensure_future(runtime.run(priced, id="other")))
            await gate.came()
        if what == "a thread":
            others.append(asyncio.ensure_future(runtime.run(Graph("other").step("a", block), id="other")))
            await gate.came()
        running = asyncio.ensure_future(runtime.run(graph, id="x", timeout_s=100))
        if what not in ("a slot", "a thread"):
            await told(runtime, "x", "step_retrying" if what == "a back-off" else "step_waiting")
        else:
            await told(runtime, "x", "run_created")
        before = list(calls)
        clock.move(100)
        await timed_out(running)
        assert await status(runtime, "x") == "failed"
        assert calls == before
        gate.open()
        await asyncio.gather(*others)


async def test_what_completes_in_time_is_complete(store_path: Path, looking: None) -> None:
    clock = MovedClock()

    async def slow() -> str:
        clock.move(100)
        return "done"

    graph = Graph("g").step("a", slow)
    async with opened(store_path, clock=clock) as runtime:
        # It ends in the instant in which the deadline passes: nothing is left that could be ended.
        assert await runtime.run(graph, id="x", timeout_s=100) == {"a": "done"}
        clock.move(1_000)
        assert await runtime.run(graph, id="x", timeout_s=100) == {"a": "done"}
        await timed_out(runtime.run(graph.step("b", lambda a: a, after=("a",)), id="y", timeout_s=100), "run y missed")
        assert await states(runtime, "y") == {"a": "completed"}


async def test_what_failed_before_is_the_error(store_path: Path, looking: None) -> None:
    clock, gate = MovedClock(), Gate()

    async def fail() -> None:
        await gate.came()
        raise ValueError("first")

    graph = Graph("g").step("a", gate.pause, effect="read").step("fail", fail)
    async with opened(store_path, clock=clock) as runtime:
        running = asyncio.ensure_future(runtime.run(graph, id="x", timeout_s=100))
        await told(runtime, "x", "step_failed")
        clock.move(100)
        with pytest.raises(StepError, match="first"):
            await running
        assert await states(runtime, "x") == {"a": "failed", "fail": "failed"}


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), float("inf"), True, "1"])
async def test_s02_what_is_no_duration_is_refused(store_path: Path, timeout_s: Any) -> None:
    async with opened(store_path) as runtime:
        with pytest.raises(DefinitionError, match="timeout_s"):
            await runtime.run(Graph("g").step("a", lambda: 1), id="x", timeout_s=timeout_s)
        assert await runtime.runs() == []


async def test_s02_a_deadline_of_ten_years_does_not_pass_early(store_path: Path, looking: None) -> None:
    clock = MovedClock()
    seconds = 3650 * 86_400.0
    graph = Graph("g").wait("paid")
    async with opened(store_path, clock=clock) as runtime:
        running = asyncio.ensure_future(runtime.run(graph, id="x", timeout_s=seconds))
        await told(runtime, "x", "step_waiting")
        clock.move(seconds - 1)
        await clock.looked_at()
        assert not running.done()
        clock.move(1)
        await timed_out(running)


# What is in doubt


@pytest.mark.parametrize("look_up", [True, False])
async def test_an_unknown_outcome_outranks_it_and_a_look_up_may_settle_it(
    store_path: Path, look_up: bool, looking: None
) -> None:
    clock, gate = MovedClock(), Gate()

    async def find(key: str, arguments: Any, ctx: StepContext) -> Any:
        await asyncio.sleep(0)
        return Committed("found")

    options: dict[str, Any] = {"lookup": find} if look_up else {}
    graph = Graph("g").step("a", gate.pause, effect="write", **options).step("b", lambda a: a, after=("a",))
    async with opened(store_path, clock=clock) as runtime:
        running = asyncio.ensure_future(runtime.run(graph, id="x", timeout_s=100))
        await gate.came()
        clock.move(100)
        await timed_out(running)
        if not look_up:
            assert await status(runtime, "x") == "unknown"
            await timed_out(runtime.run(graph, id="x"))
            await runtime.resolve("x", "a", actor="ada", reason="seen", committed="found")
            await timed_out(runtime.run(graph, id="x"))
        assert await states(runtime, "x") == {"a": "completed"}
        assert await status(runtime, "x") == "failed"
        assert await runtime.run(graph, id="x", on_finished="reopen") == {"a": "found", "b": "found"}


async def test_a_look_up_that_hangs_is_given_no_more_than_the_grace(store_path: Path, looking: None) -> None:
    clock, gate, asked = MovedClock(), Gate(), Gate()

    async def find(key: str, arguments: Any, ctx: StepContext) -> Any:
        await asked.pause()

    graph = Graph("g").step("a", gate.pause, effect="write", lookup=find)
    async with opened(store_path, clock=clock, grace_s=0.02) as runtime:
        running = asyncio.ensure_future(runtime.run(graph, id="x", timeout_s=100))
        await gate.came()
        clock.move(100)
        await timed_out(running)
        step = (await runtime.get("x")).step("a")
        assert step is not None
        assert step.state == "unknown"
        assert step.error is not None
        assert "the look-up missed the deadline of 0.02 s" in step.error.message
    assert asked.count == 1


# Restarts, waiting runs


async def park(runtime: Runtime, graph: Any, **options: Any) -> None:
    """A run that waits, and that nobody drives."""
    assert isinstance(await runtime.run(graph, id="x", on_wait="return", **options), Waiting)


async def test_the_deadline_holds_over_restarts_and_is_no_part_of_the_identity(store_path: Path) -> None:
    clock = MovedClock()
    graph = Graph("g").wait("paid").step("b", lambda paid: "b", after=("paid",))
    async with opened(store_path, clock=clock) as runtime:
        await park(runtime, graph, timeout_s=100)
        deadline_at = (await runtime.get("x")).deadline_at
        assert body_of(await events(runtime, "x"), "run_created")["deadline_at"] == clock.at + 100_000_000
    clock.move(60)
    async with opened(store_path, clock=clock) as runtime:
        # The same call as before does not begin a new deadline, and another one is no other run.
        await park(runtime, graph, timeout_s=100)
        await park(runtime, graph, timeout_s=5)
        await park(runtime, graph)
        assert (await runtime.get("x")).deadline_at == deadline_at
    clock.move(40)
    async with opened(store_path, clock=clock) as runtime:
        await timed_out(runtime.run(graph, id="x", timeout_s=100, on_wait="return"))
        assert await status(runtime, "x") == "failed"
        assert await states(runtime, "x") == {"paid": "waiting"}


async def test_an_open_run_without_a_deadline_gets_one(store_path: Path) -> None:
    clock = MovedClock()
    graph = Graph("g").wait("paid")
    async with opened(store_path, clock=clock) as runtime:
        await park(runtime, graph)
        assert (await runtime.get("x")).deadline_at is None
        await park(runtime, graph, timeout_s=100)
        assert (await events(runtime, "x"))[-2].body == {"was": "waiting", "deadline_at": clock.at + 100_000_000}
        clock.move(100)
        await timed_out(runtime.run(graph, id="x"))


@pytest.mark.parametrize("by", ["recover", "serve"])
@pytest.mark.parametrize("kind", ["graph", "flow"])
async def test_a_waiting_run_is_ended_by_whoever_serves_or_recovers(store_path: Path, by: str, kind: str) -> None:
    clock = MovedClock()

    async def wait(ctx: FlowContext, input: Any) -> Any:
        return await ctx.wait("paid")

    workflow: Any = Graph("w").wait("paid") if kind == "graph" else Flow("w", wait)
    async with opened(store_path, clock=clock) as runtime:
        await park(runtime, workflow, timeout_s=100)
        await runtime.run(workflow, id="y", on_wait="return", timeout_s=200)
        await runtime.run(workflow, id="z", on_wait="return")
    clock.move(100)
    async with opened(store_path, clock=clock, workflows=[workflow]) as runtime:
        if by == "recover":
            assert [(run.run_id, run.status) for run in await runtime.recover()] == [("x", "failed")]
        else:
            serving = asyncio.ensure_future(runtime.serve())
            await told(runtime, "x", "run_failed")
            await runtime.close()
            await serving
    async with opened(store_path, clock=clock) as runtime:
        assert [await status(runtime, run_id) for run_id in "xyz"] == ["failed", "waiting", "waiting"]
        assert body_of(await events(runtime, "x"), "run_failed") == {"code": "run.timeout"}


async def test_the_runs_of_dead_owners_are_ended_too(store_path: Path) -> None:
    clock, gate = MovedClock(), Gate()
    graph = Graph("g").step("a", gate.pause, effect="write").step("b", lambda a: a, after=("a",))
    async with opened(store_path, clock=clock) as runtime:
        running = asyncio.ensure_future(runtime.run(graph, id="x", timeout_s=100))
        await gate.came()
        # As a process leaves it that is killed here.
        with closing(sqlite3.connect(store_path)) as copy, closing(sqlite3.connect(store_path.with_name("c.db"))) as to:
            copy.backup(to)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    clock.move(100)
    async with opened(store_path.with_name("c.db"), clock=clock, workflows=[graph]) as runtime:
        [found] = await runtime.recover()
        assert found.status == "unknown"
        assert found.error is not None
        assert found.error.code == "run.timeout"
        assert await states(runtime, "x") == {"a": "unknown"}
    assert gate.count == 1


async def test_a_changed_workflow_is_blocked_all_the_same(store_path: Path) -> None:
    clock = MovedClock()
    graph = Graph("g").step("a", lambda: 1).wait("paid", after=("a",))
    async with opened(store_path, clock=clock) as runtime:
        await park(runtime, graph, timeout_s=100)
        clock.move(100)
        with pytest.raises(RunBlockedError):
            await runtime.run(Graph("g").wait("paid"), id="x")


async def test_a_paused_run_is_left_as_it_is_until_it_is_taken_up(store_path: Path) -> None:
    clock = MovedClock()
    graph = Graph("g").wait("paid")
    async with opened(store_path, clock=clock, workflows=[graph]) as runtime:
        await park(runtime, graph, timeout_s=100)
        await runtime.pause("x", actor="ada")
        clock.move(100)
        assert await runtime.recover() == ()
        assert await status(runtime, "x") == "paused"
        await timed_out(runtime.resume("x", timeout_s=100))
        assert isinstance(await runtime.resume("x", timeout_s=100, on_wait="return"), Waiting)


# Reopening


@pytest.mark.parametrize("by", ["resume", "run"])
async def test_who_reopens_a_run_gives_it_a_new_deadline_or_none(store_path: Path, by: str) -> None:
    clock = MovedClock()
    graph = Graph("g").wait("paid").step("b", lambda paid: paid["body"], after=("paid",))

    async def reopen(**options: Any) -> Any:
        if by == "resume":
            return await runtime.resume("x", **options)
        return await runtime.run(graph, id="x", on_finished="reopen", **options)

    async with opened(store_path, clock=clock, workflows=[graph]) as runtime:
        await park(runtime, graph, timeout_s=100)
        clock.move(100)
        await timed_out(reopen())
        await timed_out(runtime.run(graph, id="x"))
        assert isinstance(await reopen(timeout_s=50, on_wait="return"), Waiting)
        reopened = body_of(await events(runtime, "x"), "run_reopened")
        assert reopened == {"was": "failed", "deadline_at": clock.at + 50_000_000}
        clock.move(50)
        await timed_out(reopen(on_wait="return"))
        assert isinstance(await reopen(on_wait="return"), Waiting)
        assert (await runtime.get("x")).deadline_at is None
        clock.move(1_000)
        await runtime.signal("x", "paid", 7)
        assert (await runtime.run(graph, id="x"))["b"] == 7


# Loops, Flows, children


async def test_a_loop_is_ended_between_its_rounds_and_in_them(store_path: Path, looking: None) -> None:
    clock = MovedClock()
    rounds: list[int] = []

    async def work(input: int) -> int:
        rounds.append(input)
        clock.move(40)
        return input + 1

    loop = Loop(
        "count", graph=Graph("one").step("n", work, effect="write"), update=lambda state, outputs: outputs["n"],
        done=lambda state: state == 5, max_iterations=9,
    )  # fmt: skip
    async with opened(store_path, clock=clock, workflows=[loop]) as runtime:
        await timed_out(runtime.loop(loop, 0, id="x", timeout_s=100))
        info = await runtime.get("x")
        assert (info.status, info.state) == ("failed", 3)
        assert rounds == [0, 1, 2]
        assert await runtime.resume("x", timeout_s=1_000) == 5
    assert rounds == [0, 1, 2, 3, 4]


async def test_a_flow_cannot_handle_it_and_starts_nothing_further(store_path: Path, looking: None) -> None:
    clock, gate = MovedClock(), Gate()
    done: list[str] = []

    async def act(input: str) -> str:
        done.append(input)
        return input

    async def hang(input: Any) -> None:
        await gate.pause()

    async def careless(ctx: FlowContext, input: Any) -> Any:
        await ctx.step("before", act, "before")
        try:
            await ctx.step("hang", hang, effect="read")
        except StepError:
            await ctx.step("after", act, "after")
        return "handled"

    flow = Flow("f", careless)
    async with opened(store_path, clock=clock) as runtime:
        running = asyncio.ensure_future(runtime.run(flow, id="x", timeout_s=100))
        await gate.came()
        clock.move(100)
        await timed_out(running)
        assert await status(runtime, "x") == "failed"
        assert await states(runtime, "x") == {"before": "completed", "hang": "failed"}
        assert done == ["before"]


async def test_the_calls_of_a_flow_come_to_their_ends_before_it_is_stopped(store_path: Path, looking: None) -> None:
    clock, gate = MovedClock(), Gate()

    async def hang(input: Any = None) -> None:
        await gate.pause()

    inner = Graph("inner").step("write", hang, effect="write").step("next", lambda write: write, after=("write",))
    rounds = Loop("rounds", graph=inner, update=lambda s, o: s, done=lambda state: False, max_iterations=2)

    async def compose(ctx: FlowContext, input: Any) -> Any:
        await asyncio.gather(
            ctx.step("read", hang, effect="read"),
            ctx.step("write", hang, effect="write"),
            ctx.run("graph", inner),
            ctx.loop("loop", rounds),
            ctx.wait("paid"),
            ctx.sleep("nap", 1_000),
        )

    flow = Flow("f", compose)
    async with opened(store_path, clock=clock) as runtime:
        running = asyncio.ensure_future(runtime.run(flow, id="x", timeout_s=100))
        await wait_until(lambda: gate.count == 4)
        clock.move(100)
        await timed_out(running)
        assert await status(runtime, "x") == "unknown"
        found = await states(runtime, "x")
        lost = {"write", "graph/write", "loop/1/write"}
        assert {path for path, state in found.items() if state == "unknown"} == lost
        assert found["read"] == "failed"
        # Run again, it settles what is lost and nothing else.
        await timed_out(runtime.run(flow, id="x"))
        assert await states(runtime, "x") == found
        for path in sorted(lost):
            await runtime.resolve("x", path, actor="ada", reason="seen", committed=None)
        await timed_out(runtime.run(flow, id="x"))
        assert await status(runtime, "x") == "failed"
        assert gate.count == 4


@pytest.mark.parametrize("on_wait", ["block", "return"])
async def test_a_child_run_is_over_with_its_parent_and_reopened_with_it(
    store_path: Path, on_wait: Any, looking: None
) -> None:
    clock = MovedClock()
    child = Graph("child").wait("paid").step("b", lambda paid: paid["body"], after=("paid",))

    async def compose(ctx: FlowContext, input: Any) -> Any:
        try:
            return await ctx.child("kid", child)
        except StepError:
            return "handled"

    flow = Flow("f", compose)
    async with opened(store_path, clock=clock, workflows=[flow, child]) as runtime:
        running = asyncio.ensure_future(runtime.run(flow, id="x", timeout_s=100, on_wait=on_wait))
        await told(runtime, "x/kid", "step_waiting")
        assert (await runtime.get("x/kid")).deadline_at == (await runtime.get("x")).deadline_at
        if on_wait == "return":
            assert isinstance(await running, Waiting)
            clock.move(100)
            ended = {run.run_id: run.status for run in await runtime.recover()}
            assert ended == {"x": "failed", "x/kid": "failed"}
        else:
            clock.move(100)
            await timed_out(running)
        assert [await status(runtime, run_id) for run_id in ("x", "x/kid")] == ["failed", "failed"]
        running = asyncio.ensure_future(runtime.resume("x", timeout_s=500))
        await told(runtime, "x/kid", "run_reopened")
        await runtime.signal("x/kid", "paid", 7)
        assert (await running)["b"] == 7
        assert (await runtime.get("x/kid")).deadline_at == (await runtime.get("x")).deadline_at


async def test_a_child_that_was_there_before_is_not_longer_than_its_parent(store_path: Path) -> None:
    clock = MovedClock()
    child = Graph("child").wait("paid")

    async def compose(ctx: FlowContext, input: Any) -> Any:
        return await ctx.child("kid", child, id="kid")

    async with opened(store_path, clock=clock) as runtime:
        await runtime.run(child, id="kid", on_wait="return", timeout_s=1_000)
        await runtime.run(Flow("f", compose), id="x", on_wait="return", timeout_s=100)
        assert (await runtime.get("kid")).deadline_at == (await runtime.get("x")).deadline_at
        await runtime.run(Flow("f", compose), id="y", on_wait="return", timeout_s=500)
        assert (await runtime.get("kid")).deadline_at == (await runtime.get("x")).deadline_at


async def test_a_childs_own_earlier_deadline_is_an_error_for_the_parent_to_handle(store_path: Path) -> None:
    clock = MovedClock()
    child = Graph("child").wait("paid")

    async def compose(ctx: FlowContext, input: Any) -> Any:
        try:
            await ctx.child("kid", child, id="kid")
        except StepTimeoutError as error:
            return error.code

    async with opened(store_path, clock=clock) as runtime:
        await runtime.run(child, id="kid", on_wait="return", timeout_s=10)
        clock.move(10)
        assert await runtime.run(Flow("f", compose), id="x", timeout_s=100) == "run.timeout"


async def test_a_run_that_is_over_begins_no_step_no_wait_and_no_child(store_path: Path) -> None:
    clock = MovedClock()
    begun: list[str] = []
    child = Graph("child").step("a", lambda: begun.append("child"))

    async def compose(ctx: FlowContext, input: Any) -> Any:
        await ctx.wait("go")
        await asyncio.gather(
            ctx.child("kid", child),
            ctx.step("a", lambda input: begun.append("a")),
            ctx.run("g", child),
            ctx.wait("later"),
            ctx.approve("ask", 1),
        )

    flow = Flow("f", compose)
    async with opened(store_path, clock=clock) as runtime:
        await park(runtime, flow, timeout_s=100)
        await runtime.signal("x", "go")
        clock.move(100)
        await timed_out(runtime.run(flow, id="x"))
        assert [run.run_id for run in await runtime.runs()] == ["x"]
        assert await states(runtime, "x") == {"go": "completed"}
    assert begun == []


async def test_a_child_that_somebody_else_drives_is_not_waited_for_longer(store_path: Path, looking: None) -> None:
    clock, gate = MovedClock(), Gate()
    child = Graph("child").step("a", gate.pause, effect="read")

    async def compose(ctx: FlowContext, input: Any) -> Any:
        return await ctx.child("kid", child, id="kid")

    async with opened(store_path, clock=clock) as runtime:
        alone = asyncio.ensure_future(runtime.run(child, id="kid"))
        await gate.came()
        running = asyncio.ensure_future(runtime.run(Flow("f", compose), id="x", timeout_s=100))
        await told(runtime, "x", "run_created")
        clock.move(100)
        await timed_out(running)
        assert await status(runtime, "kid") == "running"
        gate.open()
        assert await alone == {"a": None}


@pytest.mark.parametrize("effect", EFFECTS[1:])
async def test_a_deadline_that_passes_with_the_admission_begins_no_attempt(
    store_path: Path, effect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = MovedClock()
    calls: list[int] = []

    def late(function: Any) -> Any:
        async def passing(*arguments: Any, **named: Any) -> Any:
            await function(*arguments, **named)
            clock.move(100)

        return passing

    async with opened(store_path, clock=clock) as runtime:
        monkeypatch.setattr(Drive, "barrier", late(Drive.barrier))
        monkeypatch.setattr(Step, "_admit", late(Step._admit))
        graph = Graph("g").step("a", lambda: calls.append(1), effect=effect)
        await timed_out(runtime.run(graph, id="x", timeout_s=100))
        assert await states(runtime, "x") == ({"a": "refused"} if effect in ADMITTED else {})
        assert await status(runtime, "x") == "failed"
    assert calls == []
