"""Loops: the state rides along, the guard keeps what was found, and a stopped loop goes on in the middle."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ditto import (
    Committed,
    DefinitionError,
    Graph,
    LimitExceededError,
    Loop,
    Pending,
    RunBlockedError,
    StepContext,
    StepError,
    UnknownOutcomeError,
)
from tests.engine.scene import Gate, World, events, opened, states, status, story

pytestmark = pytest.mark.asyncio


def counting(
    act: Callable[..., Any] = lambda input: input, *, until: int = 3, effect: str = "idempotent", **changes: Any
) -> Loop:
    """A loop that counts its rounds in its state."""
    options: dict[str, Any] = {
        "graph": Graph("body").step("act", act, effect=effect),
        "update": lambda state, outputs: {"n": state["n"] + 1, "found": [*state["found"], outputs["act"]]},
        "done": lambda state: state["n"] >= until,
        "max_iterations": 10,
        **changes,
    }
    return Loop("count", **options)


BEGIN: dict[str, Any] = {"n": 0, "found": []}


async def test_a_loop_runs_until_it_is_done_and_gives_its_state_again(store_path: Path, world: World) -> None:
    async with opened(store_path) as runtime:
        first = await runtime.loop(counting(world.act), BEGIN, id="x")
        assert first == {"n": 3, "found": ["done x/1/1/act", "done x/1/2/act", "done x/1/3/act"]}
        assert await runtime.loop(counting(world.act), BEGIN, id="x") == first
        info = await runtime.get("x")
        assert (info.status, info.kind, info.iteration, info.state) == ("completed", "loop", 3, first)
        assert await states(runtime, "x") == {f"{number}/act": "completed" for number in (1, 2, 3)}
    async with opened(store_path) as runtime:
        assert await runtime.loop(counting(world.act), BEGIN, id="x") == first
    assert world.effects == {f"x/1/{number}/act": 1 for number in (1, 2, 3)}


async def test_a_loop_that_is_done_before_it_begins_runs_nothing(store_path: Path, world: World) -> None:
    async with opened(store_path) as runtime:
        state = {"n": 3, "found": []}
        assert await runtime.loop(counting(world.act), state, id="x") == state
        assert await story(runtime, "x") == ["run_created", "run_completed"]


@pytest.mark.parametrize("effect", ["pure", "read", "idempotent", "write"])
async def test_the_state_rides_with_what_follows_and_costs_no_commit_of_its_own(store_path: Path, effect: str) -> None:
    async def act() -> int:
        return 1

    async with opened(store_path) as runtime:
        await runtime.run(Graph("warm"))
        before = runtime.commits
        await runtime.loop(counting(act, until=10, effect=effect), BEGIN, id="x")
        spent = runtime.commits - before
        per_round = {"pure": 0, "read": 0, "idempotent": 1, "write": 2}[effect]
        # The creation, each round, and the end, which carries the last state.
        assert spent == 1 + 10 * per_round + 1


async def test_a_pure_loop_of_many_rounds_costs_few_commits(store_path: Path) -> None:
    loop = Loop(
        "l",
        graph=Graph("body").step("a", lambda input: input, effect="pure"),
        update=lambda state, outputs: state + 1,
        done=lambda state: state == 500,
        max_iterations=1_000,
    )
    async with opened(store_path) as runtime:
        assert await runtime.loop(loop, 0, id="x") == 500
        assert runtime.commits <= 500 / 64 + 10
        advanced = [event for event in await events(runtime, "x") if event.kind == "loop_advanced"]
        assert [event.body for event in advanced] == [{"iteration": number} for number in range(1, 501)]


async def test_c09_the_guard_keeps_what_was_found_and_a_higher_one_goes_on(store_path: Path, world: World) -> None:
    async with opened(store_path) as runtime:
        for _ in range(2):
            with pytest.raises(LimitExceededError, match="not done after 4 iterations") as caught:
                await runtime.loop(counting(world.act, until=99, max_iterations=4), BEGIN, id="x")
            assert (caught.value.code, caught.value.run_id) == ("loop.exhausted", "x")
        info = await runtime.get("x")
        assert (info.status, info.iteration, len(info.state["found"])) == ("exhausted", 4, 4)
    async with opened(store_path) as runtime:
        with pytest.raises(LimitExceededError, match="not done after 6 iterations"):
            await runtime.loop(counting(world.act, until=99, max_iterations=6), BEGIN, id="x")
        # A lower guard does not take anything back.
        with pytest.raises(LimitExceededError, match="not done after 6 iterations"):
            await runtime.loop(counting(world.act, until=99, max_iterations=3), BEGIN, id="x")
        assert (await runtime.loop(counting(world.act, until=7), BEGIN, id="x"))["n"] == 7
        assert [line for line in await story(runtime, "x") if line.startswith("run_")] == [
            "run_created",
            "run_exhausted",
            "run_reopened",
            "run_exhausted",
            "run_reopened",
            "run_completed",
        ]
    assert world.effects == {f"x/1/{number}/act": 1 for number in range(1, 8)}


async def test_a_guard_above_the_configured_one_is_refused(store_path: Path) -> None:
    async with opened(store_path, max_iterations=9) as runtime:
        with pytest.raises(
            DefinitionError, match=r"max_iterations 10 is above the configured runtime\.max_iterations 9"
        ):
            await runtime.loop(counting(), BEGIN, id="x")
        assert await runtime.runs() == []


async def test_c11_a_new_generation_of_a_loop_begins_at_the_beginning(store_path: Path, world: World) -> None:
    async with opened(store_path) as runtime:
        await runtime.loop(counting(world.act), BEGIN, id="x")
        again = await runtime.loop(counting(world.act), BEGIN, id="x", on_finished="new")
        assert again["found"] == [f"done x/2/{number}/act" for number in (1, 2, 3)]


# Errors of the loop's own functions


def raising(*_values: Any) -> Any:
    raise ValueError("broken")


@pytest.mark.parametrize(
    ("role", "broken", "completed"),
    [
        ("done", {"done": raising}, []),
        ("graph", {"graph": raising}, []),
        ("graph", {"graph": lambda state: "body"}, []),
        ("bind", {"bind": raising}, []),
        ("bind", {"bind": lambda state: object()}, []),
        ("update", {"update": raising}, ["1/act"]),
        ("update", {"update": lambda state, outputs: {"n": {1}}}, ["1/act"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("effect", ["pure", "write"])
async def test_an_error_of_its_own_functions_fails_the_run_after_all_outcomes(
    store_path: Path, world: World, role: str, broken: dict[str, Any], completed: list[str], effect: str
) -> None:
    async with opened(store_path) as runtime:
        for _ in range(2):
            with pytest.raises(StepError, match=f"{role} of loop count: ") as caught:
                await runtime.loop(counting(world.act, effect=effect, **broken), BEGIN, id="x")
            assert caught.value.run_id == "x"
        assert await status(runtime, "x") == "failed"
        assert await states(runtime, "x") == dict.fromkeys(completed, "completed")
        # Mended, it goes on with what was recorded.
        mended = await runtime.loop(counting(world.act, effect=effect), BEGIN, id="x", on_finished="reopen")
        assert mended["n"] == 3
    assert world.effects == {f"x/1/{number}/act": 1 for number in (1, 2, 3)}


async def test_an_error_in_a_later_round_keeps_the_earlier_ones(store_path: Path, world: World) -> None:
    broken = True

    def update(state: Any, outputs: Any) -> Any:
        if broken and state["n"] == 2:
            raise ValueError("broken")
        return {"n": state["n"] + 1, "found": [*state["found"], outputs["act"]]}

    async with opened(store_path) as runtime:
        with pytest.raises(StepError, match="update of loop count: broken"):
            await runtime.loop(counting(world.act, until=5, update=update), BEGIN, id="x")
        info = await runtime.get("x")
        assert (info.status, info.iteration) == ("failed", 2)
        broken = False
        done = await runtime.loop(counting(world.act, until=5, update=update), BEGIN, id="x", on_finished="reopen")
        assert done["found"] == [f"done x/1/{number}/act" for number in range(1, 6)]
    assert set(world.effects.values()) == {1}


async def test_a_node_type_that_nobody_carries_out_fails_the_run(store_path: Path) -> None:
    loop = counting(graph=lambda state: Graph("body").node("act", "SHOP.PRICE"))
    async with opened(store_path) as runtime:
        with pytest.raises(StepError, match=r"graph of loop count: .*no worker carries out node type SHOP\.PRICE"):
            await runtime.loop(loop, BEGIN, id="x")


# Stopping in the middle


async def test_a_stopped_loop_goes_on_inside_its_iteration(store_path: Path, world: World) -> None:
    gate = Gate()

    async def wait(ctx: StepContext) -> str:
        if ctx.path == "2/second":
            await gate.pause()
        return world.act(ctx)

    loop = Loop(
        "l",
        graph=Graph("body").step("first", world.act).step("second", wait, after=("first",)),
        update=lambda state, outputs: state + 1,
        done=lambda state: state == 3,
        max_iterations=5,
    )
    async with opened(store_path) as runtime:
        run = asyncio.create_task(runtime.loop(loop, 0, id="x"))
        await gate.came()
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        info = await runtime.get("x")
        assert (info.status, info.iteration, info.state) == ("interrupted", 1, 1)
    gate.open()
    async with opened(store_path) as runtime:
        assert await runtime.loop(loop, 0, id="x") == 3
    assert world.effects == {f"x/1/{number}/{name}": 1 for number in (1, 2, 3) for name in ("first", "second")}


async def test_the_state_chooses_each_iterations_graph(store_path: Path, world: World) -> None:
    def choose(state: Any) -> Graph:
        graph = Graph(f"round-{state['n']}").step("act", world.act)
        return graph.step("more", world.act, after=("act",)) if state["n"] == 1 else graph

    async with opened(store_path) as runtime:
        await runtime.loop(counting(graph=choose), BEGIN, id="x")
        assert list(await states(runtime, "x")) == ["1/act", "2/act", "2/more", "3/act"]


# Unknown and failed


async def test_an_unknown_in_an_iteration_stops_the_loop_there(store_path: Path, world: World) -> None:
    lose = True

    def act(ctx: StepContext) -> str:
        if lose and ctx.path == "2/act":
            raise ConnectionError("dead")
        return world.act(ctx)

    loop = counting(act, effect="write")
    async with opened(store_path) as runtime:
        for _ in range(2):
            with pytest.raises(UnknownOutcomeError) as caught:
                await runtime.loop(loop, BEGIN, id="x")
            assert caught.value.steps == ("2/act",)
        assert await status(runtime, "x") == "unknown"
        lose = False
        await runtime.resolve("x", "2/act", actor="mia", reason="seen", committed="by mia")
        assert (await runtime.loop(loop, BEGIN, id="x"))["found"] == ["done x/1/1/act", "by mia", "done x/1/3/act"]
    assert world.effects == {"x/1/1/act": 1, "x/1/3/act": 1}


async def test_unknown_outranks_failed_in_an_iteration_too(store_path: Path) -> None:
    gate = Gate()
    answers: list[Any] = [Pending(), Pending(), Committed("paid")]
    log: list[str] = []

    async def lost() -> None:
        log.append("lost")
        await gate.pause()
        raise ConnectionError("dead")

    async def fail() -> None:
        log.append("fail")
        await gate.came()
        gate.open()
        raise ValueError("first")

    body = (
        Graph("body")
        .step("lost", lost, effect="write", lookup=lambda key, arguments, ctx: answers.pop(0))
        .step("fail", fail)
    )
    loop = Loop("l", graph=body, update=lambda s, o: s, done=lambda s: False, max_iterations=3)
    async with opened(store_path) as runtime:
        for expected in ("unknown", "unknown", "failed"):
            with pytest.raises(StepError, match="first"):
                await runtime.loop(loop, {}, id="x")
            assert await status(runtime, "x") == expected
        assert await states(runtime, "x") == {"1/lost": "completed", "1/fail": "failed"}
    assert log == ["lost", "fail"]


async def test_what_is_lost_stays_unknown_if_the_loops_own_functions_raise_on_resume(store_path: Path) -> None:
    def lose() -> None:
        raise ConnectionError("dead")

    async with opened(store_path) as runtime:
        for role in ("done", "bind", "graph"):
            broken: dict[str, Any] = {role: raising}
            with pytest.raises(UnknownOutcomeError):
                await runtime.loop(counting(lose, effect="write"), BEGIN, id=role)
            for _ in range(2):
                with pytest.raises(StepError, match=f"{role} of loop count: broken"):
                    await runtime.loop(counting(lose, effect="write", **broken), BEGIN, id=role)
                assert await status(runtime, role) == "unknown"
                assert await states(runtime, role) == {"1/act": "unknown"}


# Changed code


async def test_f01_changed_code_in_an_iteration_blocks_before_anything_is_written(store_path: Path) -> None:
    def body(name: str) -> Graph:
        return Graph("body").step(name, lambda: 1).step("fail", raising_step, after=(name,))

    def raising_step() -> None:
        raise ValueError("broken")

    async with opened(store_path) as runtime:
        with pytest.raises(StepError):
            await runtime.loop(counting(graph=body("a")), BEGIN, id="x")
        before = await story(runtime, "x")
        for graph in (body("b"), lambda state: body("b")):
            with pytest.raises(RunBlockedError) as caught:
                await runtime.loop(counting(graph=graph), BEGIN, id="x", on_finished="reopen")
            assert caught.value.differences == ("step 1/a is recorded as completed, and the graph has no node a",)
        assert await story(runtime, "x") == before
        assert await status(runtime, "x") == "failed"


async def test_an_iteration_that_has_not_begun_may_be_other_code(store_path: Path, world: World) -> None:
    async with opened(store_path) as runtime:
        with pytest.raises(LimitExceededError):
            await runtime.loop(counting(world.act, until=4, max_iterations=2), BEGIN, id="x")
        other = Graph("body").step("new", lambda: 1).step("act", world.act, after=("new",), version="2")
        assert (await runtime.loop(counting(graph=other, until=4), BEGIN, id="x"))["n"] == 4
        assert list(await states(runtime, "x")) == ["1/act", "2/act", "3/new", "3/act", "4/new", "4/act"]
