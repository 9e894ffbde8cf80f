"""Retries: the wait and the number of the attempt are in the record, and mean the same after a kill."""

from __future__ import annotations

import asyncio
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from ditto import (
    EffectNotMade,
    Flow,
    FlowContext,
    Graph,
    Loop,
    Retry,
    RunPausedError,
    Runtime,
    StepContext,
    StepError,
    StepTimeoutError,
    StoreClosedError,
    UnknownOutcomeError,
    Waiting,
    Worker,
)
from tests.engine.scene import Gate, MovedClock, events, opened, states, status, story, told, wait_until
from tests.processes import Child

pytestmark = pytest.mark.asyncio

EFFECTS = ["pure", "read", "idempotent", "write", "infer"]
HOUR = Retry(3, initial_s=3600, max_s=3600, jitter=0)


class Flaky:
    """A handler whose first attempts are not made."""

    def __init__(self, failures: int = 1) -> None:
        self.failures = failures
        self.attempts: list[int] = []

    async def act(self, ctx: StepContext) -> str:
        self.attempts.append(ctx.attempt)
        if len(self.attempts) <= self.failures:
            raise EffectNotMade(f"not made in attempt {ctx.attempt}")
        return "done"

    def graph(self, effect: str, retry: Retry | None = HOUR, **options: Any) -> Graph:
        return Graph("g").step("a", self.act, effect=effect, retry=retry, **options)


async def seen(runtime: Runtime, line: str, times: int = 1, run_id: str = "x") -> None:
    """Return when the run's history has that line so often."""
    await told(runtime, run_id, line.split()[0])
    while (await story(runtime, run_id)).count(line) < times:  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(0.001)


async def retry_of(runtime: Runtime, run_id: str = "x") -> dict[str, Any]:
    """The body of the one `step_retrying` event."""
    [found] = [event.body for event in await events(runtime, run_id) if event.kind == "step_retrying"]
    assert isinstance(found, dict)
    return found


# The wait is in the record


CHILD = """
import asyncio, sys
from ditto import Config, create_ditto
from tests.engine.scene import told
from tests.engine.test_retries import Flaky

async def main():
    async with create_ditto(store=sys.argv[1]) as runtime:
        running = asyncio.ensure_future(runtime.run(Flaky().graph(sys.argv[2]), id="x"))
        await told(runtime, "x", "step_retrying")
        print("waiting", flush=True)
        await running

asyncio.run(main())
"""


@pytest.mark.parametrize("effect", EFFECTS)
async def test_d11_s01_killed_while_it_waits_the_wait_goes_on_where_it_was(
    store_path: Path, effect: str, looking: None
) -> None:
    child = Child(CHILD, store_path, effect)
    try:
        assert child.line() == "waiting"
        child.kill()
    finally:
        child.close()
    flaky = Flaky(failures=0)
    clock = MovedClock(time.time_ns() // 1000)
    async with opened(store_path, clock=clock) as runtime:
        step = (await runtime.get("x")).step("a")
        assert step is not None
        assert (step.state, step.attempt) == ("retrying", 1)
        assert step.due_at is not None
        due_us = (await retry_of(runtime))["due_at"]
        assert round(step.due_at.timestamp() * 1_000_000) == due_us
        running = asyncio.ensure_future(runtime.run(flaky.graph(effect), id="x"))
        await clock.looked_at()
        clock.at = due_us - 1
        await clock.looked_at()
        assert flaky.attempts == []
        clock.at = due_us
        assert await running == {"a": "done"}
        assert (await story(runtime, "x")).count("step_retrying a") == 1
    assert flaky.attempts == [2]


@pytest.mark.parametrize("effect", EFFECTS)
async def test_the_attempts_are_counted_over_restarts(store_path: Path, effect: str, looking: None) -> None:
    clock, flaky = MovedClock(), Flaky(failures=9)
    graph = flaky.graph(effect)
    for lived in (1, 2):
        async with opened(store_path, clock=clock) as runtime:
            running = asyncio.ensure_future(runtime.run(graph, id="x"))
            await seen(runtime, "step_retrying a", lived)
            await runtime.close()
            with pytest.raises(StoreClosedError):
                await running
        clock.move(3600)
    async with opened(store_path, clock=clock) as runtime:
        with pytest.raises(StepError, match="not made in attempt 3"):
            await runtime.run(graph, id="x")
    assert flaky.attempts == [1, 2, 3]


@pytest.mark.parametrize("effect", EFFECTS)
async def test_a_failed_attempt_costs_one_commit_and_its_event_tells_of_the_next(store_path: Path, effect: str) -> None:
    clock, flaky = MovedClock(), Flaky()
    async with opened(store_path, clock=clock) as runtime:
        await runtime.run(flaky.graph(effect, Retry(initial_s=0)), id="x")
        body = await retry_of(runtime)
        assert {"attempt": 1, "code": "effect.not_made", "delay_s": 0.0, "due_at": clock.at}.items() <= body.items()
        step = (await runtime.get("x")).step("a")
        assert step is not None
        assert (step.attempt, step.due_at) == (2, None)
        # created, the failed attempt, the outcome with the end; and an admission before each attempt
        assert runtime.commits == (5 if effect in ("write", "infer") else 3)


async def test_s01_a_clock_that_is_set_back_makes_no_wait_longer(store_path: Path) -> None:
    clock = MovedClock()
    calls: list[int] = []

    async def act(ctx: StepContext) -> str:
        calls.append(ctx.attempt)
        if len(calls) < 3:
            clock.move(-3600)
            raise EffectNotMade("not yet")
        return "done"

    graph = Graph("g").step("a", act, effect="read", retry=Retry(initial_s=0.05, factor=1, jitter=0))
    async with opened(store_path, clock=clock) as runtime:
        running = asyncio.ensure_future(runtime.run(graph, id="x"))
        await told(runtime, "x", "step_retrying")
        clock.move(-3600)
        assert await running == {"a": "done"}
    assert calls == [1, 2, 3]


async def test_s01_the_clock_is_set_back_over_a_restart_in_another_time_zone(
    store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, flaky = MovedClock(), Flaky()
    graph = flaky.graph("read", Retry(initial_s=0.2, jitter=0))
    monkeypatch.setenv("TZ", "Pacific/Auckland")
    time.tzset()
    try:
        async with opened(store_path, clock=clock) as runtime:
            running = asyncio.ensure_future(runtime.run(graph, id="x"))
            await told(runtime, "x", "step_retrying")
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
        monkeypatch.setenv("TZ", "America/New_York")
        time.tzset()
        clock.move(-3600)
        async with opened(store_path, clock=clock) as runtime:
            assert await runtime.run(graph, id="x") == {"a": "done"}
    finally:
        monkeypatch.undo()
        time.tzset()
    assert flaky.attempts == [1, 2]


@pytest.mark.parametrize("days", [25, 50, 3650])
async def test_s02_neither_a_back_off_nor_a_timer_of_years_comes_early(
    store_path: Path, days: int, looking: None
) -> None:
    clock, flaky = MovedClock(), Flaky()
    seconds = days * 86_400.0
    graph = flaky.graph("read", Retry(initial_s=seconds, max_s=seconds, jitter=0)).sleep("nap", seconds)
    async with opened(store_path, clock=clock) as runtime:
        running = asyncio.ensure_future(runtime.run(graph, id="x"))
        await told(runtime, "x", "step_retrying")
        await told(runtime, "x", "step_waiting")
        await runtime.close()
        with pytest.raises(StoreClosedError):
            await running
    clock.move(seconds / 2)
    async with opened(store_path, clock=clock) as runtime:
        running = asyncio.ensure_future(runtime.run(graph, id="x"))
        await clock.looked_at()
        clock.move(seconds / 2 - 1)
        await clock.looked_at()
        assert flaky.attempts == [1]
        assert (await states(runtime, "x"))["nap"] == "waiting"
        clock.move(1)
        assert await running == {"a": "done", "nap": {"timed_out": True}}
        assert (await story(runtime, "x")).count("wait_over nap") == 1
    assert flaky.attempts == [1, 2]


async def test_m01_parallel_runs_do_not_come_back_at_the_same_time(store_path: Path) -> None:
    retry = Retry(2, initial_s=0.2, jitter=0.5)
    async with opened(store_path) as runtime:

        async def act(ctx: StepContext) -> None:
            if ctx.attempt == 1:
                raise EffectNotMade("busy")

        graph = Graph("g").step("a", act, effect="write", retry=retry)
        await asyncio.gather(*(runtime.run(graph, id=f"x{number}") for number in range(20)))
        delays = [(await retry_of(runtime, f"x{number}"))["delay_s"] for number in range(20)]
    assert len(set(delays)) > 10
    assert all(0.1 <= delay_s <= 0.2 for delay_s in delays)


# While it waits


async def test_a_step_that_waits_for_its_next_attempt_takes_no_slot(store_path: Path, looking: None) -> None:
    clock = MovedClock()
    order: list[str] = []

    async def act(arguments: Any, ctx: StepContext) -> str:
        order.append(f"{ctx.path}{ctx.attempt}")
        if ctx.path == "a" and ctx.attempt == 1:
            raise EffectNotMade("not yet")
        return ctx.path

    worker = Worker("SHOP", concurrency=1).node("SHOP.PRICE", act, effect="read")
    graph = (
        Graph("g")
        .node("a", "SHOP.PRICE", retry=HOUR)
        .node("b", "SHOP.PRICE")
        .node("c", "SHOP.PRICE", after=("b",), bind=lambda b: b)
    )
    async with opened(store_path, workers=[worker], clock=clock) as runtime:
        running = asyncio.ensure_future(runtime.run(graph, id="x", concurrency=1))
        await wait_until(lambda: "c1" in order)
        assert order == ["a1", "b1", "c1"]
        clock.move(3600)
        assert await running == {"a": "a", "b": "b", "c": "c"}
    assert order == ["a1", "b1", "c1", "a2"]


async def test_a_run_that_waits_for_a_retry_is_not_let_go_of(store_path: Path, looking: None) -> None:
    clock, flaky = MovedClock(), Flaky()
    graph = flaky.graph("read").wait("paid")
    async with opened(store_path, clock=clock) as runtime:
        running = asyncio.ensure_future(runtime.run(graph, id="x", on_wait="return"))
        await told(runtime, "x", "step_retrying")
        assert await status(runtime, "x") == "running"
        clock.move(3600)
        waiting = await running
        assert isinstance(waiting, Waiting)
        assert [wait.step for wait in waiting.waits] == ["paid"]
        assert await states(runtime, "x") == {"a": "completed", "paid": "waiting"}


async def test_a_retry_goes_on_beside_an_unknown_outcome(store_path: Path, looking: None) -> None:
    clock, flaky = MovedClock(), Flaky()

    async def lose() -> None:
        raise ValueError("lost")

    async with opened(store_path, clock=clock) as runtime:
        running = asyncio.ensure_future(runtime.run(flaky.graph("read").step("b", lose, effect="write"), id="x"))
        await told(runtime, "x", "step_unknown")
        await told(runtime, "x", "step_retrying")
        clock.move(3600)
        with pytest.raises(UnknownOutcomeError):
            await running
        assert await states(runtime, "x") == {"a": "completed", "b": "unknown"}


async def test_d08_closing_lets_go_of_a_run_that_waits(store_path: Path) -> None:
    async def nap(ctx: FlowContext, input: Any) -> Any:
        return await ctx.wait("paid")

    waiting: list[Any] = [Graph("w").wait("paid"), Graph("w").sleep("nap", 3600), Flow("w", nap), Flaky().graph("read")]
    for number, workflow in enumerate(waiting):
        async with opened(store_path) as runtime:
            running = asyncio.ensure_future(runtime.run(workflow, id=f"x{number}"))
            await told(runtime, f"x{number}", "step_retrying" if number == 3 else "step_waiting")
            await runtime.close()
            with pytest.raises(StoreClosedError):
                await running
        async with opened(store_path) as runtime:
            # The next attempt is somebody's to make; else nobody need drive the run, unless it was about to look again.
            left = {"interrupted"} if number == 3 else {"waiting", "interrupted"}
            assert await status(runtime, f"x{number}") in left


async def test_who_reopens_a_run_waits_for_nothing_and_has_all_tries_again(store_path: Path, looking: None) -> None:
    clock, flaky = MovedClock(), Flaky(failures=9)
    fails = asyncio.Event()

    async def fail() -> None:
        await fails.wait()
        raise ValueError("first")

    graph = flaky.graph("read").step("b", fail)
    async with opened(store_path, clock=clock) as runtime:
        running = asyncio.ensure_future(runtime.run(graph, id="x"))
        await told(runtime, "x", "step_retrying")
        fails.set()
        with pytest.raises(StepError, match="first"):
            await running
        assert await states(runtime, "x") == {"a": "retrying", "b": "failed"}
        running = asyncio.ensure_future(runtime.run(flaky.graph("read"), id="x", on_finished="reopen"))
        for times in (2, 3):
            await seen(runtime, "step_retrying a", times)
            clock.move(3600)
        with pytest.raises(StepError, match="not made in attempt 4"):
            await running
        delays = [event.body["delay_s"] for event in await events(runtime, "x") if event.kind == "step_retrying"]
        assert delays == [3600, 3600, 3600]
    assert flaky.attempts == [1, 2, 3, 4]


async def test_the_back_off_of_a_reopened_run_begins_anew(store_path: Path) -> None:
    flaky = Flaky(failures=9)
    graph = flaky.graph("idempotent", Retry(2, initial_s=0.001, factor=8, jitter=0))
    async with opened(store_path) as runtime:
        for on_finished in ("return", "reopen"):
            with pytest.raises(StepError):
                await runtime.run(graph, id="x", on_finished=on_finished)
        delays = [event.body["delay_s"] for event in await events(runtime, "x") if event.kind == "step_retrying"]
    assert delays == [0.001, 0.001]
    assert flaky.attempts == [1, 2, 3, 4]


async def test_steps_of_loops_and_flows_wait_alike(store_path: Path, looking: None) -> None:
    clock = MovedClock()
    own, in_graph, in_loop = Flaky(), Flaky(), Flaky()

    def rounds(flaky: Flaky) -> Loop:
        return Loop(
            "rounds", graph=flaky.graph("read"), update=lambda state, out: out["a"],
            done=lambda state: state == "done", max_iterations=2,
        )  # fmt: skip

    async def compose(ctx: FlowContext, input: Any) -> Any:
        return [
            await ctx.step("own", lambda input, ctx: own.act(ctx), effect="write", retry=HOUR),
            await ctx.run("graph", in_graph.graph("read")),
            await ctx.loop("loop", rounds(in_loop)),
        ]

    async def wait_alike(runtime: Runtime, workflow: Loop | Flow, steps: dict[str, Flaky]) -> Any:
        running = asyncio.ensure_future(runtime.run(workflow, id=workflow.name, on_wait="return"))
        for step, flaky in steps.items():
            await seen(runtime, f"step_retrying {step}", run_id=workflow.name)
            await clock.looked_at()
            assert flaky.attempts == [1]
            clock.move(3600)
            await seen(runtime, f"step_completed {step}", run_id=workflow.name)
            assert flaky.attempts == [1, 2]
        return await running

    async with opened(store_path, clock=clock) as runtime:
        alone = Flaky()
        assert await wait_alike(runtime, rounds(alone), {"1/a": alone}) == "done"
        steps = {"own": own, "graph/a": in_graph, "loop/1/a": in_loop}
        assert await wait_alike(runtime, Flow("f", compose), steps) == ["done", {"a": "done"}, "done"]


async def test_a_call_of_a_flow_goes_on_waiting_after_a_restart(store_path: Path, looking: None) -> None:
    clock, flaky = MovedClock(), Flaky()

    async def compose(ctx: FlowContext, input: Any) -> Any:
        return await ctx.step("own", lambda input, ctx: flaky.act(ctx), effect="write", retry=HOUR)

    async with opened(store_path, clock=clock) as runtime:
        running = asyncio.ensure_future(runtime.run(Flow("f", compose), id="x"))
        await told(runtime, "x", "step_retrying")
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    clock.move(1800)
    async with opened(store_path, clock=clock) as runtime:
        running = asyncio.ensure_future(runtime.run(Flow("f", compose), id="x"))
        await clock.looked_at()
        assert flaky.attempts == [1]
        clock.move(1800)
        assert await running == "done"
        assert len([event for event in await events(runtime, "x") if event.kind == "step_retrying"]) == 1
    assert flaky.attempts == [1, 2]


async def test_e09_a_run_that_is_paused_while_it_waits_goes_on_with_the_same_wait(
    store_path: Path, looking: None
) -> None:
    clock, flaky = MovedClock(), Flaky()
    graph = flaky.graph("write")
    async with opened(store_path, clock=clock, workflows=[graph]) as runtime:
        running = asyncio.ensure_future(runtime.run(graph, id="x"))
        await told(runtime, "x", "step_retrying")
        await runtime.pause("x", actor="ada")
        with pytest.raises(RunPausedError):
            await running
        clock.move(1800)
        assert await status(runtime, "x") == "paused"
        running = asyncio.ensure_future(runtime.resume("x"))
        await clock.looked_at()
        assert flaky.attempts == [1]
        clock.move(1800)
        assert await running == {"a": "done"}
        assert len([event for event in await events(runtime, "x") if event.kind == "step_retrying"]) == 1
    assert flaky.attempts == [1, 2]


# What hangs


@pytest.mark.parametrize(("tries", "ends"), [(3, "completed"), (2, "failed")])
async def test_d11_a_retry_that_hangs_is_abandoned_and_tried_again_or_failed_by_policy(
    store_path: Path, tries: int, ends: str
) -> None:
    attempts: list[int] = []

    async def hang(ctx: StepContext) -> str:
        attempts.append(ctx.attempt)
        if ctx.attempt == 1:
            raise ValueError("failed")
        if ctx.attempt == 2:
            await asyncio.Event().wait()
        return "done"

    graph = Graph("g").step("a", hang, effect="read", timeout_s=0.02, retry=Retry(tries, initial_s=0))
    async with opened(store_path) as runtime:
        if ends == "completed":
            assert await runtime.run(graph, id="x") == {"a": "done"}
        else:
            with pytest.raises(StepTimeoutError, match=r"missed its deadline of 0\.02 s"):
                await runtime.run(graph, id="x")
        assert await status(runtime, "x") == ends
    # The run's lock is free: another runtime may drive what is left of it.
    async with opened(store_path) as runtime:
        with pytest.raises(StepTimeoutError) if ends == "failed" else nullcontext():
            await runtime.run(graph, id="x")
    assert attempts == list(range(1, tries + 1))


async def test_d11_killed_while_the_retry_hangs_it_is_made_again(store_path: Path) -> None:
    gate = Gate()
    attempts: list[int] = []

    async def hang(ctx: StepContext) -> str:
        attempts.append(ctx.attempt)
        if ctx.attempt == 1:
            raise ValueError("failed")
        await gate.pause()
        return "done"

    graph = Graph("g").step("a", hang, retry=Retry(3, initial_s=0))
    async with opened(store_path) as runtime:
        running = asyncio.ensure_future(runtime.run(graph, id="x"))
        await gate.came()
        assert await status(runtime, "x") == "running"
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert await status(runtime, "x") == "interrupted"
    gate.open()
    async with opened(store_path, workflows=[graph]) as runtime:
        assert [run.status for run in await runtime.recover()] == ["completed"]
    assert attempts == [1, 2, 2]


# What an error says


@pytest.mark.parametrize("effect", EFFECTS)
async def test_an_error_that_says_so_is_not_tried_again(store_path: Path, effect: str) -> None:
    calls: list[int] = []

    async def refuse(ctx: StepContext) -> None:
        calls.append(ctx.attempt)
        raise EffectNotMade("the key is wrong", retryable=False)

    async with opened(store_path) as runtime:
        with pytest.raises(EffectNotMade, match="the key is wrong") as caught:
            await runtime.run(Graph("g").step("a", refuse, effect=effect, retry=Retry(5, initial_s=0)), id="x")
        assert not caught.value.retryable
        assert "step_retrying a" not in await story(runtime, "x")
    assert calls == [1]


async def test_m01_the_wait_that_is_asked_for_is_exact_and_survives_a_restart(store_path: Path, looking: None) -> None:
    clock = MovedClock()
    attempts: list[int] = []

    async def busy(ctx: StepContext) -> str:
        attempts.append(ctx.attempt)
        if ctx.attempt == 1:
            raise EffectNotMade("busy", retry_after_s=720.25)
        return "done"

    graph = Graph("g").step("a", busy, effect="write", retry=Retry(2, initial_s=1, max_s=1_000))
    async with opened(store_path, clock=clock) as runtime:
        running = asyncio.ensure_future(runtime.run(graph, id="x"))
        await told(runtime, "x", "step_retrying")
        body = await retry_of(runtime)
        assert (body["delay_s"], body["due_at"]) == (720.25, clock.at + 720_250_000)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    clock.move(100)
    async with opened(store_path, clock=clock) as runtime:
        running = asyncio.ensure_future(runtime.run(graph, id="x"))
        await told(runtime, "x", "run_resumed")
        await clock.looked_at()
        clock.move(620)
        await clock.looked_at()
        assert attempts == [1]
        clock.move(0.25)
        assert await running == {"a": "done"}
    assert attempts == [1, 2]


# The total


TOTAL = Retry(9, initial_s=100, factor=1, max_s=100, jitter=0, total_s=250)


@pytest.mark.parametrize("effect", EFFECTS)
async def test_e11_the_total_ends_the_tries_and_says_how_many_there_were(
    store_path: Path, effect: str, looking: None
) -> None:
    clock, flaky = MovedClock(), Flaky(failures=9)
    async with opened(store_path, clock=clock) as runtime:
        running = asyncio.ensure_future(runtime.run(flaky.graph(effect, TOTAL), id="x"))
        for tries in (1, 2):
            await seen(runtime, "step_retrying a", tries)
            clock.move(100)
        said = "total deadline of 250 s: 3 tries were made; the last: not made in attempt 3"
        with pytest.raises(EffectNotMade, match=said) as caught:
            await running
        assert caught.value.code == "step.total_timeout"
    assert flaky.attempts == [1, 2, 3]


@pytest.mark.parametrize("effect", EFFECTS)
async def test_e11_the_total_goes_on_over_a_restart(store_path: Path, effect: str, looking: None) -> None:
    clock, flaky = MovedClock(), Flaky(failures=9)
    graph = flaky.graph(effect, TOTAL)
    async with opened(store_path, clock=clock) as runtime:
        running = asyncio.ensure_future(runtime.run(graph, id="x"))
        await told(runtime, "x", "step_retrying")
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    clock.move(250)
    async with opened(store_path, clock=clock) as runtime:
        with pytest.raises(EffectNotMade, match="total deadline of 250 s: 1 try was made; the last: not made"):
            await runtime.run(graph, id="x")
        # Who reopens it begins a new total.
        running = asyncio.ensure_future(runtime.run(graph, id="x", on_finished="reopen"))
        await wait_until(lambda: flaky.attempts == [1, 2])
        await runtime.close()
        with pytest.raises(StoreClosedError):
            await running


@pytest.mark.parametrize("effect", EFFECTS[1:])
async def test_e11_an_attempt_gets_what_is_left_of_the_total(store_path: Path, effect: str) -> None:
    clock = MovedClock()
    attempts: list[int] = []

    async def silent(ctx: StepContext) -> None:
        attempts.append(ctx.attempt)
        if ctx.attempt == 1:
            clock.move(99.95)
            raise EffectNotMade("slow")
        await asyncio.Event().wait()

    retry = Retry(9, initial_s=0, total_s=100)
    async with opened(store_path, clock=clock) as runtime:
        missed = "step a missed the total deadline of 100 s for all its tries"
        expected: type[Exception] = StepTimeoutError
        said = f"total deadline of 100 s: 2 tries were made; the last: {missed}"
        if effect in ("write", "infer"):
            expected, said = UnknownOutcomeError, missed
        graph = Graph("g").step("a", silent, effect=effect, timeout_s=1_000, retry=retry)
        with pytest.raises(expected, match=said):
            await runtime.run(graph, id="x")
        assert (await states(runtime, "x"))["a"] == ("unknown" if effect in ("write", "infer") else "failed")
    assert attempts == [1, 2]


async def test_e11_a_silent_side_costs_no_more_than_the_total(store_path: Path) -> None:
    clock = MovedClock()
    attempts: list[int] = []

    async def silent(ctx: StepContext) -> None:
        attempts.append(ctx.attempt)
        clock.move(1_000)
        await asyncio.Event().wait()

    retry = Retry(3, initial_s=0, total_s=1_500)
    async with opened(store_path, clock=clock) as runtime:
        with pytest.raises(StepTimeoutError, match="total deadline of 1500 s: 2 tries were made"):
            await runtime.run(Graph("g").step("a", silent, effect="read", timeout_s=0.02, retry=retry), id="x")
    assert attempts == [1, 2]


async def test_a_total_that_passes_while_a_slot_is_waited_for_begins_no_try(store_path: Path, looking: None) -> None:
    clock, gate = MovedClock(), Gate()
    attempts: list[int] = []

    async def act(arguments: Any, ctx: StepContext) -> None:
        if ctx.run_id == "other":
            await gate.pause()
            return
        attempts.append(ctx.attempt)
        raise EffectNotMade("not yet")

    worker = Worker("SHOP", concurrency=1).node("SHOP.PAY", act, effect="write")
    graph = Graph("g").node("a", "SHOP.PAY", retry=Retry(9, initial_s=50, max_s=50, jitter=0, total_s=100))
    async with opened(store_path, workers=[worker], clock=clock) as runtime:
        running = asyncio.ensure_future(runtime.run(graph, id="x"))
        await told(runtime, "x", "step_retrying")
        other = asyncio.ensure_future(runtime.run(graph, id="other"))
        await gate.came()
        clock.move(99.95)
        with pytest.raises(EffectNotMade, match="total deadline of 100 s: 1 try was made; the last: not yet"):
            await running
        assert await states(runtime, "x") == {"a": "refused"}
        gate.open()
        await other
    assert attempts == [1]


# The author's own error branch


async def test_f10_a_flow_handles_the_last_error_after_all_tries(store_path: Path) -> None:
    flaky = Flaky(failures=9)
    repaired: list[str] = []

    async def handling(ctx: FlowContext, input: Any) -> str:
        try:
            await ctx.step("fail", lambda input, ctx: flaky.act(ctx), retry=Retry(3, initial_s=0))
        except StepError as error:
            await ctx.step("repair", repaired.append, error.message)
            return f"handled: {error.message}"
        return "never"

    async with opened(store_path) as runtime:
        for _ in range(2):
            assert await runtime.run(Flow("f", handling), id="x") == "handled: not made in attempt 3"
        assert await status(runtime, "x") == "completed"
    assert flaky.attempts == [1, 2, 3]
    assert repaired == ["not made in attempt 3"]
