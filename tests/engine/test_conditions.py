"""Conditions: what is skipped, what joins do about it, and that it is decided once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ditto import Graph, StepError, Worker
from tests.engine.scene import World, opened, states, status, story

pytestmark = pytest.mark.asyncio


def fork(world: World, log: list[str]) -> Graph:
    """START → (A or B), join [A, B] → C → D."""

    def step(name: str) -> Any:
        def run(ctx: Any) -> str:
            log.append(name)
            world.act(ctx)
            return name

        return run

    def join(a: str | None, b: str | None, ctx: Any) -> list[str | None]:
        log.append("c")
        world.act(ctx)
        return [a, b]

    return (
        Graph("fork")
        .step("a", step("a"), when=lambda input: input == "a")
        .step("b", step("b"), when=lambda input: input == "b")
        .step("c", join, after=("a", "b"))
        .step("d", step("d"), after=("c",))
    )


@pytest.mark.parametrize("chosen", ["a", "b"])
async def test_c01_a_join_runs_when_its_parents_are_settled_and_one_completed(
    store_path: Path, world: World, chosen: str
) -> None:
    log: list[str] = []
    async with opened(store_path) as runtime:
        outputs = await runtime.run(fork(world, log), chosen, id="x")
        other = {"a": "b", "b": "a"}[chosen]
        assert outputs == {chosen: chosen, other: None, "c": ["a", None] if chosen == "a" else [None, "b"], "d": "d"}
        assert await runtime.run(fork(world, log), chosen, id="x") == outputs
        assert await states(runtime, "x") == {
            chosen: "completed",
            other: "skipped",
            "c": "completed",
            "d": "completed",
        }
        assert await status(runtime, "x") == "completed"
    assert log == [chosen, "c", "d"]


async def test_c01_all_parents_skipped_skips_what_follows_to_the_end(store_path: Path, world: World) -> None:
    log: list[str] = []
    async with opened(store_path) as runtime:
        assert await runtime.run(fork(world, log), "none", id="x") == {"a": None, "b": None, "c": None, "d": None}
        assert set((await states(runtime, "x")).values()) == {"skipped"}
        assert (await story(runtime, "x"))[-1] == "run_completed"
        assert await runtime.run(fork(world, log), "none", id="x") == {"a": None, "b": None, "c": None, "d": None}
    assert log == []


async def test_a_completed_none_is_no_skip(store_path: Path) -> None:
    graph = Graph("g").step("a", lambda: None).step("b", lambda a: [a], after=("a",))
    async with opened(store_path) as runtime:
        assert await runtime.run(graph, id="x") == {"a": None, "b": [None]}
        assert await states(runtime, "x") == {"a": "completed", "b": "completed"}


async def test_a_condition_of_a_join_is_asked_only_if_a_parent_completed(store_path: Path) -> None:
    asked: list[Any] = []

    def wanted(a: Any, b: Any) -> bool:
        asked.append((a, b))
        return True

    graph = (
        Graph("g")
        .step("a", lambda: 1, when=lambda input: "a" in input)
        .step("b", lambda: 2, when=lambda input: "b" in input)
        .step("c", lambda a, b: [a, b], after=("a", "b"), when=wanted)
    )
    async with opened(store_path) as runtime:
        for chosen in ("", "a", "b", "ab"):
            await runtime.run(graph, chosen)
    assert asked == [(1, None), (None, 2), (1, 2)]


async def test_workers_nodes_have_conditions_too(store_path: Path) -> None:
    worker = Worker("SHOP").node("SHOP.PRICE", lambda arguments: arguments, effect="read")
    graph = (
        Graph("g")
        .node("a", "SHOP.PRICE", when=lambda input: False)
        .node("b", "SHOP.PRICE", after=("a",), bind=lambda input, a: [input, a])
        .step("c", lambda: 1)
        .node("d", "SHOP.PRICE", after=("a", "c"), bind=lambda a, c: [a, c])
    )
    async with opened(store_path, workers=[worker]) as runtime:
        assert await runtime.run(graph, 5) == {"a": None, "b": None, "c": 1, "d": [None, 1]}


async def test_skips_are_recorded_and_not_decided_again(store_path: Path, world: World) -> None:
    asked: list[str] = []
    broken = True

    def when(name: str, answer: bool) -> Any:
        def wanted(input: Any) -> bool:
            asked.append(name)
            return answer

        return wanted

    def last(ctx: Any) -> str:
        if broken:
            raise ValueError("broken")
        return world.act(ctx)

    graph = (
        Graph("g")
        .step("a", world.act, when=when("a", False))
        .step("b", world.act, when=when("b", True))
        .step("c", last, after=("a", "b"))
    )
    async with opened(store_path) as runtime:
        with pytest.raises(StepError):
            await runtime.run(graph, id="x")
        assert await states(runtime, "x") == {"a": "skipped", "b": "completed", "c": "failed"}
    broken = False
    async with opened(store_path) as runtime:
        outputs = await runtime.run(graph, id="x", on_finished="reopen")
        assert outputs == {"a": None, "b": "done x/1/b", "c": "done x/1/c"}
    assert asked == ["a", "b"]
    assert world.effects == {"x/1/b": 1, "x/1/c": 1}


async def test_a_step_that_failed_may_be_skipped_by_other_code_when_the_run_is_reopened(store_path: Path) -> None:
    def fail() -> None:
        raise ValueError("broken")

    async with opened(store_path) as runtime:
        with pytest.raises(StepError):
            await runtime.run(Graph("g").step("a", fail), id="x")
        skipping = Graph("g").step("a", fail, when=lambda: False).step("b", lambda a: 1, after=("a",))
        assert await runtime.run(skipping, id="x", on_finished="reopen") == {"a": None, "b": None}
        assert await states(runtime, "x") == {"a": "skipped", "b": "skipped"}


@pytest.mark.parametrize("effect", ["pure", "write"])
async def test_a_condition_that_raises_fails_its_step_and_nothing_before_it(
    store_path: Path, world: World, effect: str
) -> None:
    graph = (
        Graph("g")
        .step("a", world.act, effect="write")
        .step("b", world.act, after=("a",), effect=effect, when=lambda a: a["missing"])
        .step("c", world.act, after=("b",))
    )
    async with opened(store_path) as runtime:
        with pytest.raises(StepError) as caught:
            await runtime.run(graph, id="x")
        assert (caught.value.step, caught.value.error_type) == ("b", "TypeError")
        assert await states(runtime, "x") == {"a": "completed", "b": "failed"}
    assert world.effects == {"x/1/a": 1}


async def test_a_condition_may_be_any_truth(store_path: Path) -> None:
    graph = Graph("g").step("a", lambda: 1, when=lambda input: input).step("b", lambda: 1, when=lambda input: [])
    async with opened(store_path) as runtime:
        assert await runtime.run(graph, [0]) == {"a": 1, "b": None}
