"""Concurrency: many branches, many runs, and the bounds of runs and workers."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ditto import EffectNotMade, Graph, Retry, StepContext, Worker
from tests.engine.scene import World, opened, states

pytestmark = pytest.mark.asyncio

BRANCHES = 30


class Meter:
    """How many are inside at once, at most."""

    def __init__(self) -> None:
        self.inside = 0
        self.most = 0

    async def serve(self, arguments: Any) -> int:
        """As the handler of a node type."""
        return await self.visit()

    async def visit(self) -> int:
        """As the function of a step."""
        self.inside += 1
        self.most = max(self.most, self.inside)
        for _ in range(3):
            await asyncio.sleep(0)
        self.inside -= 1
        return 1


def fan(function: Callable[..., Any], width: int = BRANCHES, **options: Any) -> Graph:
    graph = Graph("fan")
    for number in range(width):
        graph = graph.step(f"n{number}", function, **options)
    return graph.step("join", lambda n0: n0, after=tuple(f"n{number}" for number in range(width)), effect="pure")


async def c06_once(path: Path, threaded: bool, effect: str) -> None:
    if threaded:
        barrier = threading.Barrier(BRANCHES)

        def together(ctx: StepContext) -> str:
            barrier.wait()
            return ctx.path

        graph = fan(together, effect=effect)
    else:
        arrived, go = 0, asyncio.Event()

        async def together_async(ctx: StepContext) -> str:
            nonlocal arrived
            arrived += 1
            if arrived == BRANCHES:
                go.set()
            await go.wait()
            return ctx.path

        graph = fan(together_async, effect=effect)
    async with opened(path, concurrency=BRANCHES, threads=BRANCHES) as runtime:
        outputs = await runtime.run(graph, id="x")
        assert outputs == {f"n{number}": f"n{number}" for number in range(BRANCHES)} | {"join": "n0"}
        assert await states(runtime, "x") == dict.fromkeys(graph.nodes, "completed")
        assert await runtime.run(graph, id="x") == outputs


@pytest.mark.parametrize("threaded", [False, True], ids=["tasks", "threads"])
@pytest.mark.parametrize("effect", ["read", "idempotent", "write"])
async def test_c06_branches_that_finish_in_the_same_instant_are_all_stored(
    tmp_path: Path, threaded: bool, effect: str
) -> None:
    for number in range(5):
        await c06_once(tmp_path / f"{number}.db", threaded, effect)


@pytest.mark.sweep
@pytest.mark.parametrize("threaded", [False, True], ids=["tasks", "threads"])
async def test_c06_two_hundred_times(tmp_path: Path, threaded: bool) -> None:
    for number in range(200):
        await c06_once(tmp_path / f"{number}.db", threaded, ("read", "idempotent", "write")[number % 3])


@pytest.mark.parametrize("limit", [1, 2, 7])
async def test_a_runs_concurrency_bounds_its_steps(store_path: Path, limit: int) -> None:
    meter = Meter()
    async with opened(store_path) as runtime:
        await runtime.run(fan(meter.visit), concurrency=limit)
        assert meter.most == limit


async def test_the_configured_concurrency_holds_where_a_run_sets_none(store_path: Path) -> None:
    meter = Meter()
    async with opened(store_path, concurrency=3) as runtime:
        await runtime.run(fan(meter.visit))
    assert meter.most == 3


async def test_a_workers_concurrency_bounds_its_steps_over_all_runs(store_path: Path) -> None:
    meter, free = Meter(), Meter()
    worker = Worker("SHOP", concurrency=2).node("SHOP.PRICE", meter.serve, effect="read")
    graph = Graph("g")
    for number in range(6):
        graph = graph.node(f"n{number}", "SHOP.PRICE").step(f"s{number}", free.visit)
    async with opened(store_path, workers=[worker], concurrency=64) as runtime:
        await asyncio.gather(*(runtime.run(graph) for _ in range(5)))
    assert meter.most == 2
    assert free.most > 2


async def test_a_slot_is_free_during_a_back_off(store_path: Path) -> None:
    """A step that waits to be tried again keeps nobody else waiting."""
    waited = asyncio.Event()

    async def price(arguments: Any, ctx: StepContext) -> str:
        if ctx.path == "a" and not waited.is_set():
            raise EffectNotMade("not yet")
        waited.set()
        return ctx.path

    worker = Worker("SHOP", concurrency=1).node("SHOP.PRICE", price, effect="read")
    graph = Graph("g").node("a", "SHOP.PRICE", retry=Retry(100, initial_s=0.001, factor=1)).node("b", "SHOP.PRICE")
    async with opened(store_path, workers=[worker]) as runtime:
        assert await runtime.run(graph) == {"a": "a", "b": "b"}


@pytest.mark.parametrize(("effect", "steps"), [("pure", 10), ("idempotent", 10)])
async def test_many_runs_share_commits(store_path: Path, effect: str, steps: int) -> None:
    runs = 200

    async def act() -> int:
        return 1

    graph = Graph("g")
    for number in range(steps):
        graph = graph.step(f"n{number}", act, after=(f"n{number - 1}",) if number else (), effect=effect)
    async with opened(store_path) as runtime:
        await runtime.run(Graph("warm"))
        before = runtime.commits
        await asyncio.gather(*(runtime.run(graph, id=f"x{number}") for number in range(runs)))
        assert runtime.commits - before <= 0.05 * runs * steps


async def test_diamonds_of_all_effects_in_random_orders(store_path: Path, world: World) -> None:
    """Each body runs once, whatever the order in which branches finish."""
    choose = random.Random(7)
    effects = ["pure", "read", "idempotent", "write", "infer"]

    async def act(ctx: StepContext) -> str:
        for _ in range(choose.randrange(5)):
            await asyncio.sleep(0)
        return world.act(ctx)

    async with opened(store_path, concurrency=8) as runtime:
        for run in range(10):
            graph = Graph("g")
            for number in range(25):
                parents = choose.sample(range(number), min(number, choose.randrange(3)))
                graph = graph.step(
                    f"n{number}", act, after=tuple(f"n{parent}" for parent in parents), effect=choose.choice(effects)
                )
            outputs = await runtime.run(graph, id=f"x{run}")
            assert outputs == {name: f"done x{run}/1/{name}" for name in graph.nodes}
    assert set(world.effects.values()) == {1}
    assert world.total == 250


async def crash_and_resume(path: Path, seed: int) -> None:
    """F02: three parallel steps with random delays, stopped after some of them, resumed with other delays."""
    world, choose = World(), random.Random(seed)

    async def act(ctx: StepContext) -> str:
        for _ in range(choose.randrange(20)):
            await asyncio.sleep(0)
        return world.act(ctx)

    graph = Graph("g")
    for name in "abc":
        graph = graph.step(name, act, effect=choose.choice(["idempotent", "write"]))
    graph = graph.step("join", lambda a, b, c: [a, b, c], after=("a", "b", "c"))
    async with opened(path) as runtime:
        run = asyncio.create_task(runtime.run(graph, id="x"))
        for _ in range(choose.randrange(60)):
            await asyncio.sleep(0)
        run.cancel()
        await asyncio.wait([run])
        for name, state in (await states(runtime, "x")).items() if await runtime.runs() else ():
            if state == "unknown":
                made = world.effects[f"x/1/{name}"]
                assert made <= 1
                decision: dict[str, Any] = {"committed": f"done x/1/{name}"} if made else {"absent": True}
                await runtime.resolve("x", name, actor="mia", reason="seen", **decision)
        outputs = await runtime.run(graph, id="x")
        assert outputs["join"] == [f"done x/1/{name}" for name in "abc"]
        assert all(world.effects[f"x/1/{name}"] == 1 for name in "abc" if str(graph.nodes[name].effect) == "write"), (
            f"seed {seed}"
        )


async def test_f02_parallel_steps_are_kept_by_name_in_whatever_order_they_end(tmp_path: Path) -> None:
    for seed in range(15):
        await crash_and_resume(tmp_path / f"{seed}.db", seed)


@pytest.mark.sweep
async def test_f02_two_hundred_seeds(tmp_path: Path) -> None:
    for seed in range(15, 215):
        await crash_and_resume(tmp_path / f"{seed}.db", seed)
