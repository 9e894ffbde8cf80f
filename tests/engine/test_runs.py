"""Runs: what an id stands for, what a closed run gives back, and what is recorded of it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from ditto import (
    DefinitionError,
    Graph,
    InvalidValueError,
    Loop,
    Retry,
    RunCancelledError,
    RunConflictError,
    RunNotFoundError,
    StepError,
    StoreClosedError,
    TransitionRefusedError,
    Worker,
    create_ditto,
)
from tests.engine.scene import Gate, World, events, opened, states, status, story, told

pytestmark = pytest.mark.asyncio
Loose: Any = None

ADD = Graph("add").step("a", lambda input: input + 1).step("b", lambda a: a + 1, after=("a",))


# New, open, closed


async def test_a_new_id_starts_and_a_completed_one_gives_its_result_again(store_path: Path) -> None:
    world = World()
    graph = Graph("g").step("a", world.act)
    async with opened(store_path) as runtime:
        first = await runtime.run(graph, id="x")
        assert first == {"a": "done x/1/a"}
        assert await runtime.run(graph, id="x") == first
    async with opened(store_path) as runtime:
        assert await runtime.run(graph, id="x") == first
    assert world.total == 1


async def test_without_an_id_each_call_is_a_run_of_its_own(store_path: Path) -> None:
    async with opened(store_path) as runtime:
        for _ in range(2):
            assert await runtime.run(ADD, 1) == {"a": 2, "b": 3}
        runs = await runtime.runs()
        assert len({run.run_id for run in runs}) == 2
        assert {run.status for run in runs} == {"completed"}


async def test_a_failed_run_raises_what_it_raised_and_tries_nothing(store_path: Path) -> None:
    calls = 0

    def fail() -> None:
        nonlocal calls
        calls += 1
        raise ValueError("no luck")

    async with opened(store_path) as runtime:
        with pytest.raises(StepError) as first:
            await runtime.run(Graph("g").step("a", fail), id="x")
        assert isinstance(first.value.__cause__, ValueError)
    async with opened(store_path) as runtime:
        with pytest.raises(StepError) as again:
            await runtime.run(Graph("g").step("a", fail), id="x")
        for error in (first.value, again.value):
            assert (error.message, error.error_type, error.code) == ("no luck", "ValueError", "step.failed")
            assert (error.run_id, error.step, error.retryable) == ("x", "a", False)
        assert await status(runtime, "x") == "failed"
        assert await story(runtime, "x") == ["run_created", "step_failed a", "run_failed a"]
    assert calls == 1


async def test_an_empty_graph_completes(store_path: Path) -> None:
    async with opened(store_path) as runtime:
        assert await runtime.run(Graph("empty"), id="x") == {}
        assert await runtime.run(Graph("empty"), id="x") == {}
        assert await story(runtime, "x") == ["run_created", "run_completed"]


async def test_reopening_a_failed_run_takes_it_up_where_it_stopped(store_path: Path) -> None:
    world = World()
    broken = True

    def second(ctx: Any) -> str:
        if broken:
            raise ValueError("broken")
        return world.act(ctx)

    graph = Graph("g").step("a", world.act).step("b", second, after=("a",))
    async with opened(store_path) as runtime:
        with pytest.raises(StepError):
            await runtime.run(graph, id="x")
        broken = False
        with pytest.raises(StepError, match="broken"):
            await runtime.run(graph, id="x")
        assert await runtime.run(graph, id="x", on_finished="reopen") == {"a": "done x/1/a", "b": "done x/1/b"}
        info = await runtime.get("x")
        assert (info.status, info.generation) == ("completed", 1)
        step = info.step("b")
        assert step is not None
        assert step.attempt == 2
        assert await story(runtime, "x") == [
            "run_created",
            "step_completed a",
            "step_failed b",
            "run_failed b",
            "run_reopened",
            "step_completed b",
            "run_completed",
        ]
    assert world.effects == {"x/1/a": 1, "x/1/b": 1}


async def test_o04_a_reopened_step_has_all_its_tries_again(store_path: Path) -> None:
    attempts: list[int] = []

    async def fail(ctx: Any) -> None:
        attempts.append(ctx.attempt)
        raise ValueError("no")

    graph = Graph("g").step("a", fail, retry=Retry(max_attempts=2, initial_s=0))
    async with opened(store_path) as runtime:
        for on_finished in ("return", "reopen", "return", "reopen"):
            with pytest.raises(StepError):
                await runtime.run(graph, id="x", on_finished=on_finished)
    assert attempts == [1, 2, 3, 4, 5, 6]


async def test_a_new_generation_starts_from_nothing_with_keys_of_its_own(store_path: Path) -> None:
    world = World()
    graph = Graph("g").step("a", world.act)
    async with opened(store_path) as runtime:
        assert await runtime.run(graph, 1, id="x") == {"a": "done x/1/a"}
        assert await runtime.run(graph, 2, id="x", on_finished="new") == {"a": "done x/2/a"}
        assert await runtime.run(graph, 2, id="x") == {"a": "done x/2/a"}
        assert (await runtime.get("x")).generation == 2
        assert [run.generation for run in await runtime.runs()] == [2]
        assert await story(runtime, "x") == ["run_created", "step_completed a", "run_completed"]
    assert world.effects == {"x/1/a": 1, "x/2/a": 1}


async def test_new_if_failed_returns_what_completed_and_begins_anew_what_failed(store_path: Path) -> None:
    broken = True

    def a() -> int:
        if broken:
            raise ValueError("broken")
        return 1

    graph = Graph("g").step("a", a)
    async with opened(store_path) as runtime:
        with pytest.raises(StepError):
            await runtime.run(graph, id="x", on_finished="new_if_failed")
        broken = False
        assert await runtime.run(graph, id="x", on_finished="new_if_failed") == {"a": 1}
        assert await runtime.run(graph, id="x", on_finished="new_if_failed") == {"a": 1}
        assert (await runtime.get("x")).generation == 2
        with pytest.raises(RunConflictError):
            await runtime.run(graph, "other input", id="x", on_finished="new_if_failed")


@pytest.mark.parametrize("on_finished", ["return", "new", "new_if_failed", "reopen"])
async def test_an_open_run_goes_on_whatever_is_asked_of_closed_ones(store_path: Path, on_finished: Any) -> None:
    world, gate = World(), Gate()

    async def wait(ctx: Any) -> str:
        await gate.pause()
        return world.act(ctx)

    graph = Graph("g").step("a", world.act).step("b", wait, after=("a",))
    async with opened(store_path) as runtime:
        task = asyncio.create_task(runtime.run(graph, id="x"))
        await gate.came()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.open()
        await runtime.run(graph, id="x", on_finished=on_finished)
        assert (await runtime.get("x")).generation == 1
    assert world.effects == {"x/1/a": 1, "x/1/b": 1}


async def test_a_cancelled_run_is_closed_for_good(store_path: Path) -> None:
    gate = Gate()
    graph = Graph("g").step("a", gate.pause)
    async with opened(store_path) as runtime:
        task = asyncio.create_task(runtime.run(graph, id="x"))
        await gate.came()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await runtime.cancel("x", actor="mia", reason="not wanted")
        for on_finished in ("return", "new_if_failed", "reopen"):
            with pytest.raises(RunCancelledError, match="run x was cancelled"):
                await runtime.run(graph, id="x", on_finished=on_finished)
        with pytest.raises(TransitionRefusedError):
            await runtime.cancel("x")
        last = (await events(runtime, "x"))[-1]
        assert (last.kind, last.body) == ("run_cancelled", {"actor": "mia", "reason": "not wanted"})
        gate.open()
        assert await runtime.run(graph, id="x", on_finished="new") == {"a": None}


async def test_what_is_not_there_is_said(store_path: Path) -> None:
    async with opened(store_path) as runtime:
        for ask in (runtime.get("x"), runtime.cancel("x"), story(runtime, "x")):
            with pytest.raises(RunNotFoundError, match="no run has the id 'x'"):
                await ask


# Conflicts


async def test_another_workflow_under_the_same_id_is_a_conflict(store_path: Path) -> None:
    loop = Loop("add", graph=ADD, update=lambda s, o: s, done=lambda s: True, max_iterations=1)
    async with opened(store_path) as runtime:
        await runtime.run(ADD, 1, id="x")
        with pytest.raises(RunConflictError, match="belongs to graph 'add', not to graph 'other'"):
            await runtime.run(Graph("other"), 1, id="x")
        with pytest.raises(RunConflictError, match="belongs to graph 'add', not to loop 'add'"):
            await runtime.loop(loop, 1, id="x")


@pytest.mark.parametrize(
    ("was", "now", "path"),
    [
        (1, 2, "input"),
        (1, True, "input"),
        (1, 1.0, "input"),
        ({"a": 1}, {"a": 2}, "input.a"),
        ({"a": 1}, {"b": 1}, "input.a"),
        ({"a": 1}, {"a": 1, "b": 1}, "input.b"),
        ({"a": [1, {"b": 2}]}, {"a": [1, {"b": 3}]}, r"input.a\[1\].b"),
        ({"a": [1]}, {"a": [1, 2]}, "the length of input.a"),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, "the order of its keys"),
        (None, [], "input"),
    ],
    ids=str,
)
async def test_another_input_is_a_conflict_that_names_the_path_and_no_value(
    store_path: Path, was: Any, now: Any, path: str
) -> None:
    graph = Graph("g").step("a", lambda: 1)
    async with opened(store_path) as runtime:
        await runtime.run(graph, was, id="x")
        with pytest.raises(RunConflictError, match=f"it differs at {path}; use another id"):
            await runtime.run(graph, now, id="x")
        assert await runtime.run(graph, was, id="x") == {"a": 1}


async def test_f06_a_conflict_is_found_in_an_open_run_too(store_path: Path) -> None:
    gate = Gate()
    async with opened(store_path) as runtime:
        task = asyncio.create_task(runtime.run(Graph("g").step("a", gate.pause), 1, id="x"))
        await gate.came()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(RunConflictError):
            await runtime.run(Graph("g").step("a", gate.pause), 2, id="x")
        assert await status(runtime, "x") == "interrupted"


# Joined calls


async def test_calls_for_one_id_join_and_the_work_is_done_once(store_path: Path) -> None:
    world, gate = World(), Gate()

    async def wait(ctx: Any) -> str:
        await gate.pause()
        return world.act(ctx)

    graph = Graph("g").step("a", wait, effect="write")
    async with opened(store_path) as runtime:
        calls = [asyncio.create_task(runtime.run(graph, id="x", on_finished="new")) for _ in range(5)]
        await gate.came()
        gate.open()
        results = await asyncio.gather(*calls)
        assert results == [{"a": "done x/1/a"}] * 5
        assert (await runtime.get("x")).generation == 1
    assert world.total == 1


async def test_a_joined_call_raises_what_the_run_came_to(store_path: Path) -> None:
    gate = Gate()
    tries = 0

    async def fail() -> None:
        nonlocal tries
        tries += 1
        await gate.pause()
        raise ValueError("no luck")

    graph = Graph("g").step("a", fail)
    async with opened(store_path) as runtime:
        calls = [asyncio.create_task(runtime.run(graph, id="x")) for _ in range(3)]
        await gate.came()
        gate.open()
        errors = await asyncio.gather(*calls, return_exceptions=True)
        assert [str(error) for error in errors] == ["no luck"] * 3
        assert len({id(error) for error in errors}) == 3
    assert tries == 1


async def test_a_joined_call_goes_on_with_a_run_whose_caller_was_cancelled(store_path: Path) -> None:
    world, gate = World(), Gate()

    async def wait(ctx: Any) -> str:
        await gate.pause()
        return world.act(ctx)

    graph = Graph("g").step("a", wait)
    async with opened(store_path) as runtime:
        first = asyncio.create_task(runtime.run(graph, id="x"))
        await gate.came()
        second = asyncio.create_task(runtime.run(graph, id="x"))
        await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        gate.open()
        assert await second == {"a": "done x/1/a"}
    assert world.total == 1


async def test_a_joined_call_with_another_input_is_a_conflict(store_path: Path) -> None:
    gate = Gate()
    graph = Graph("g").step("a", gate.pause)
    async with opened(store_path) as runtime:
        first = asyncio.create_task(runtime.run(graph, 1, id="x"))
        await gate.came()
        second = asyncio.create_task(runtime.run(graph, 2, id="x"))
        await asyncio.sleep(0)
        gate.open()
        assert await first == {"a": None}
        with pytest.raises(RunConflictError):
            await second


async def test_one_workflow_serves_many_runs_at_once(store_path: Path) -> None:
    async with opened(store_path) as runtime:
        results = await asyncio.gather(*(runtime.run(ADD, number, id=f"x{number}") for number in range(50)))
        assert results == [{"a": number + 1, "b": number + 2} for number in range(50)]


# Order, ids, words


async def test_outputs_come_in_the_order_of_the_graph_now_and_later(store_path: Path) -> None:
    gate = Gate()

    async def slow() -> int:
        await gate.pause()
        return 1

    async def quick() -> int:
        gate.open()
        return 2

    graph = (
        Graph("g")
        .step("z", slow)
        .step("y", quick)
        .step("x", lambda: 3, effect="pure", when=lambda: False)
        .step("w", lambda z, y: 4, after=("z", "y"), effect="write")
    )
    async with opened(store_path) as runtime:
        first = await runtime.run(graph, id="x")
        assert list(first) == ["z", "y", "x", "w"]
        again = await runtime.run(graph, id="x")
        assert (list(again), again) == (list(first), first)


@pytest.mark.parametrize("run_id", ["", " ", "a\nb", "a\x00b", "x" * 513, "é" * 257, "\ud800", 5, b"x"], ids=ascii)
async def test_an_id_that_cannot_be_one_is_refused_and_nothing_is_written(store_path: Path, run_id: Any) -> None:
    async with opened(store_path) as runtime:
        with pytest.raises(DefinitionError, match="run id"):
            await runtime.run(ADD, 1, id=run_id)
        assert await runtime.runs() == []


@pytest.mark.parametrize("run_id", ["x", "a/b c", "é✅", "x" * 512, "'; DROP TABLE ditto_runs; --", "%_"])
async def test_ids_are_text_and_nothing_else(store_path: Path, run_id: str) -> None:
    async with opened(store_path) as runtime:
        await runtime.run(ADD, 1, id=run_id)
        assert (await runtime.get(run_id)).run_id == run_id
        assert await status(runtime, run_id) == "completed"


async def test_wrong_words_are_refused_before_anything_is_written(store_path: Path) -> None:
    wrong: Any = ADD
    async with opened(store_path) as runtime:
        loose: Any = runtime
        with pytest.raises(DefinitionError, match="on_finished='again': use one of return, new"):
            await loose.run(ADD, 1, id="x", on_finished="again")
        with pytest.raises(DefinitionError, match="concurrency must be 1 or more"):
            await runtime.run(ADD, 1, id="x", concurrency=0)
        with pytest.raises(DefinitionError, match=r"runtime\.run takes a Graph, a Loop or a Flow, not str"):
            await loose.run("add", 1)
        with pytest.raises(DefinitionError, match=r"runtime\.loop takes a Loop, not Graph"):
            await runtime.loop(wrong, 1)
        with pytest.raises(InvalidValueError, match=r"the input of add\.at: is a object"):
            await runtime.run(ADD, {"at": object()}, id="x")
        with pytest.raises(DefinitionError, match=r"graph h, node n: no worker carries out node type SHOP\.PRICE"):
            await runtime.run(Graph("h").node("n", "SHOP.PRICE"), id="x")
        assert await runtime.runs() == []


# Events


async def test_events_are_numbered_in_the_run_without_gaps_and_read_from_anywhere(store_path: Path) -> None:
    graph = Graph("g")
    for number in range(20):
        graph = graph.step(f"n{number}", lambda: 1, effect=("pure", "idempotent", "write")[number % 3])
    async with opened(store_path) as runtime:
        await asyncio.gather(*(runtime.run(graph, id=f"x{number}") for number in range(10)))
        for run in range(10):
            told = await events(runtime, f"x{run}")
            assert [event.number for event in told] == list(range(1, len(told) + 1))
            assert (told[0].kind, told[-1].kind) == ("run_created", "run_completed")
            assert [event.at for event in told] == sorted(event.at for event in told)
            assert [event.number async for event in runtime.events(f"x{run}", after=7)] == [
                event.number for event in told[7:]
            ]
            # Each step's admission stands before its outcome, and each outcome once.
            outcomes = [event.step for event in told if event.kind == "step_completed"]
            assert sorted(map(str, outcomes)) == sorted(graph.nodes)


async def test_events_after_the_end_are_none(store_path: Path) -> None:
    async with opened(store_path) as runtime:
        await runtime.run(ADD, 1, id="x")
        assert [event async for event in runtime.events("x", after=100)] == []


# Closing


async def test_a_closed_runtime_starts_nothing(store_path: Path) -> None:
    runtime = create_ditto(store=store_path)
    await runtime.run(ADD, 1, id="x")
    await runtime.close()
    await runtime.close()
    for ask in (runtime.run(ADD, 1), runtime.get("x"), runtime.cancel("x")):
        with pytest.raises(StoreClosedError):
            await ask
    never = create_ditto(store=store_path)
    await never.close()
    with pytest.raises(StoreClosedError):
        await never.run(ADD, 1)


@pytest.mark.parametrize("branches", [1, 3])
async def test_d08_closing_drains_what_runs_and_leaves_the_run_to_be_resumed(store_path: Path, branches: int) -> None:
    world, gate = World(), Gate()

    async def wait(ctx: Any) -> str:
        await gate.pause()
        return world.act(ctx)

    graph = Graph("g")
    for number in range(branches):
        graph = graph.step(f"a{number}", wait, effect="write").step(f"b{number}", world.act, after=(f"a{number}",))
    async with opened(store_path) as runtime:
        run = asyncio.create_task(runtime.run(graph, id="x"))
        await gate.came()
        closing = asyncio.create_task(runtime.close())
        await asyncio.sleep(0)
        gate.open()
        with pytest.raises(StoreClosedError, match="the run is interrupted and can be resumed"):
            await run
        await closing
    assert world.effects == {f"x/1/a{number}": 1 for number in range(branches)}
    async with opened(store_path) as runtime:
        assert await status(runtime, "x") == "interrupted"
        assert await states(runtime, "x") == {f"a{number}": "completed" for number in range(branches)}
        assert len(await runtime.run(graph, id="x")) == 2 * branches
    assert set(world.effects.values()) == {1}


async def test_closing_ends_a_back_off_at_once(store_path: Path) -> None:
    failed = asyncio.Event()

    async def fail() -> None:
        failed.set()
        raise ValueError("not now")

    graph = Graph("g").step("a", fail, retry=Retry(initial_s=1_000, max_s=1_000))
    async with opened(store_path, grace_s=1_000) as runtime:
        run = asyncio.create_task(runtime.run(graph, id="x"))
        await failed.wait()
        await runtime.close()
        with pytest.raises(StoreClosedError):
            await run
    async with opened(store_path) as runtime:
        assert await status(runtime, "x") == "interrupted"


async def test_closing_ends_the_waiting_for_a_slot_at_once(store_path: Path) -> None:
    gate = Gate()
    worker = Worker("SHOP", concurrency=1).node("SHOP.PAY", lambda arguments: gate.pause(), effect="write")
    graph = Graph("g").node("a", "SHOP.PAY").node("b", "SHOP.PAY")
    async with opened(store_path, workers=[worker]) as runtime:
        first = asyncio.create_task(runtime.run(graph, id="x"))
        await gate.came()
        second = asyncio.create_task(runtime.run(Graph("g").node("a", "SHOP.PAY"), id="y"))
        await told(runtime, "y", "run_created")
        closing = asyncio.create_task(runtime.close())
        with pytest.raises(StoreClosedError):
            await second
        assert not first.done()
        gate.open()
        with pytest.raises(StoreClosedError):
            await first
        await closing
    assert gate.count == 1


async def test_a_handler_that_outlasts_the_grace_leaves_what_it_did_to_be_looked_up(store_path: Path) -> None:
    gate = Gate()
    graph = Graph("g").step("a", gate.pause, effect="write")
    async with opened(store_path, grace_s=0) as runtime:
        run = asyncio.create_task(runtime.run(graph, id="x"))
        await gate.came()
        await runtime.close()
        gate.open()
        with pytest.raises(StoreClosedError):
            await run
    async with opened(store_path) as runtime:
        assert await status(runtime, "x") == "unknown"
        assert await states(runtime, "x") == {"a": "admitted"}


async def test_without_closing_a_run_may_end_during_the_grace(store_path: Path) -> None:
    gate = Gate()
    async with opened(store_path) as runtime:
        run = asyncio.create_task(runtime.run(Graph("g").step("a", gate.pause), id="x"))
        await gate.came()
        closing = asyncio.create_task(runtime.close())
        await asyncio.sleep(0)
        gate.open()
        assert await run == {"a": None}
        await closing
