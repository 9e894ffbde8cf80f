"""Recovering: undriven runs of registered workflows are taken up once; what goes wrong with one harms no other."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from ditto import (
    Absent,
    Committed,
    ConfigError,
    Graph,
    LookupResult,
    Loop,
    RunBlockedError,
    RunNotFoundError,
    Runtime,
    StepContext,
    StepError,
    UnknownOutcomeError,
    create_ditto,
)
from ditto.engine import recovering
from tests.engine.scene import Gate, World, opened, status, wait_until
from tests.store.faults import FULL, IO, LOCKED, Faults

pytestmark = pytest.mark.asyncio


class Shop:
    """A workflow of three steps, the second of which waits until the test lets it go."""

    def __init__(self) -> None:
        self.world = World()
        self.gate = Gate()

    async def wait(self, ctx: StepContext) -> str:
        await self.gate.pause()
        return self.world.act(ctx)

    def find(self, key: str, arguments: Any, ctx: StepContext) -> LookupResult:
        return Committed(f"done {key}") if self.world.effects[key] else Absent()

    def graph(self, name: str = "order") -> Graph:
        return (
            Graph(name)
            .step("first", self.world.act)
            .step("wait", self.wait, after=("first",))
            .step(
                "last",
                self.world.act,
                after=("wait",),
                effect="write",
                lookup=self.find,
                absence_is_final=True,
            )
        )

    def loop(self) -> Loop:
        return Loop(
            "rounds",
            graph=Graph("round").step("wait", self.wait),
            update=lambda state, outputs: state + 1,
            done=lambda state: state == 3,
            max_iterations=5,
        )


@pytest.fixture
def shop() -> Shop:
    return Shop()


async def interrupt(path: Path, shop: Shop, runs: int, workflow: Graph | None = None) -> None:
    """Leave so many runs in their second step."""
    async with opened(path) as runtime:
        graph = workflow or shop.graph()
        tasks = [asyncio.create_task(runtime.run(graph, number, id=f"x{number}")) for number in range(runs)]
        await wait_until(lambda: shop.gate.count == runs)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert {run.status for run in await runtime.runs()} == {"interrupted"}
    shop.gate.open()


def once(runs: int) -> dict[str, int]:
    return {f"x{number}/1/{name}": 1 for number in range(runs) for name in ("first", "wait", "last")}


async def test_undriven_runs_are_driven_to_their_ends(store_path: Path, shop: Shop) -> None:
    await interrupt(store_path, shop, 5)
    async with opened(store_path, workflows=[shop.graph()], concurrency=2) as runtime:
        recovered = await runtime.recover()
        assert [(each.run_id, each.status, each.error) for each in recovered] == [
            (f"x{number}", "completed", None) for number in range(5)
        ]
        assert await runtime.recover() == ()
    assert shop.world.effects == once(5)


async def test_only_registered_workflows_are_taken_up(store_path: Path, shop: Shop) -> None:
    await interrupt(store_path, shop, 2)
    async with opened(store_path, workflows=[shop.graph("other")]) as runtime:
        assert await runtime.recover() == ()
        assert await status(runtime, "x0") == "interrupted"
    loop = Loop("order", graph=shop.graph(), update=lambda s, o: s, done=lambda s: True, max_iterations=1)
    async with opened(store_path, workflows=[loop]) as runtime:
        assert await runtime.recover() == ()


async def test_loops_are_taken_up_where_they_stopped(store_path: Path, shop: Shop) -> None:
    async with opened(store_path) as runtime:
        task = asyncio.create_task(runtime.loop(shop.loop(), 0, id="x"))
        await shop.gate.came()
        task.cancel()
        await asyncio.wait([task])
    shop.gate.open()
    async with opened(store_path, workflows=[shop.loop()]) as runtime:
        (recovered,) = await runtime.recover()
        assert (recovered.run_id, recovered.status) == ("x", "completed")
        assert (await runtime.get("x")).state == 3
    assert shop.world.effects == {f"x/1/{number}/wait": 1 for number in (1, 2, 3)}


async def test_runs_that_somebody_drives_are_left_to_them(store_path: Path, shop: Shop) -> None:
    async with opened(store_path) as driving, opened(store_path, workflows=[shop.graph()]) as recovering_one:
        task = asyncio.create_task(driving.run(shop.graph(), 0, id="x0"))
        await shop.gate.came()
        assert await recovering_one.recover() == ()
        shop.gate.open()
        await task
    assert shop.world.effects == once(1)


async def test_what_is_unknown_waits_for_a_person(store_path: Path) -> None:
    def lose() -> None:
        raise ConnectionError("dead")

    graph = Graph("order").step("pay", lose, effect="write")
    async with opened(store_path, workflows=[graph]) as runtime:
        with pytest.raises(UnknownOutcomeError):
            await runtime.run(graph, id="x")
        assert await runtime.recover() == ()
        await runtime.resolve("x", "pay", actor="mia", reason="seen", committed=1)
        assert [(each.run_id, each.status) for each in await runtime.recover()] == [("x", "completed")]


async def test_one_that_goes_wrong_harms_no_other(store_path: Path, shop: Shop) -> None:
    await interrupt(store_path, shop, 5)

    def last(input: int, ctx: StepContext) -> str:
        if input == 1:
            raise ValueError("broken")
        if input == 2:
            raise ConnectionError("dead")
        return shop.world.act(ctx)

    def changed(input: int, ctx: StepContext) -> str:
        return last(input, ctx)

    graph = (
        Graph("order")
        .step("first", shop.world.act)
        .step("wait", shop.wait, after=("first",))
        .step("last", changed, after=("wait",), effect=lambda arguments: "write" if arguments["input"] == 2 else "read")
    )
    async with opened(store_path, workflows=[graph]) as runtime:
        recovered = {each.run_id: each for each in await runtime.recover()}
        assert {run_id: each.status for run_id, each in recovered.items()} == {
            "x0": "completed",
            "x1": "failed",
            "x2": "unknown",
            "x3": "completed",
            "x4": "completed",
        }
        assert isinstance(recovered["x1"].error, StepError)
        assert isinstance(recovered["x2"].error, UnknownOutcomeError)
        assert recovered["x0"].error is None


async def test_changed_code_blocks_its_run_and_no_other(store_path: Path, shop: Shop) -> None:
    await interrupt(store_path, shop, 2)
    graph = Graph("order").step("renamed", shop.world.act)
    async with opened(store_path, workflows=[graph]) as runtime:
        recovered = await runtime.recover()
        assert [type(each.error) for each in recovered] == [RunBlockedError] * 2
        assert await status(runtime, "x0") == "blocked"


async def test_d02_two_that_recover_at_once_do_the_work_once(store_path: Path, shop: Shop) -> None:
    await interrupt(store_path, shop, 20)
    async with (
        opened(store_path, workflows=[shop.graph()], concurrency=3) as first,
        opened(store_path, workflows=[shop.graph()], concurrency=3) as second,
    ):
        await asyncio.gather(first.recover(), second.recover())
        assert {run.status for run in await first.runs()} == {"completed"}
    assert shop.world.effects == once(20)


@pytest.mark.parametrize("fault", [LOCKED, IO, FULL], ids=["locked", "I/O", "full"])
@pytest.mark.parametrize("at", [1, 4, 9, 16])
async def test_d01_a_store_that_fails_for_a_while_drops_no_run(
    store_path: Path, shop: Shop, faults: Faults, fault: Any, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovering, "STORE_WAIT_S", 0.001)
    await interrupt(store_path, shop, 10)
    async with opened(store_path, workflows=[shop.graph()]) as runtime:
        await runtime.runs()
        faults.arm(fault, at, until=at + 2, only="BEGIN")
        recovered = await runtime.recover()
        faults.disarm()
        assert [each.status for each in recovered] == ["completed"] * 10
        assert {run.status for run in await runtime.runs()} == {"completed"}
    assert shop.world.effects.keys() == once(10).keys()
    assert all(count == 1 for key, count in shop.world.effects.items() if key.endswith("last"))


async def test_a_run_is_taken_up_by_its_id_alone(store_path: Path, shop: Shop) -> None:
    await interrupt(store_path, shop, 1)
    async with opened(store_path, workflows=[shop.graph()]) as runtime:
        assert await runtime.resume("x0") == {name: f"done x0/1/{name}" for name in ("first", "wait", "last")}
        assert await runtime.resume("x0") == {name: f"done x0/1/{name}" for name in ("first", "wait", "last")}
        with pytest.raises(RunNotFoundError):
            await runtime.resume("y")
    async with opened(store_path) as runtime:
        with pytest.raises(RunBlockedError, match="graph 'order' is not registered"):
            await runtime.resume("x0")


async def test_a_failed_run_is_reopened_by_resume(store_path: Path) -> None:
    broken = True

    def act() -> int:
        if broken:
            raise ValueError("broken")
        return 1

    graph = Graph("g").step("a", act)
    async with opened(store_path, workflows=[graph]) as runtime:
        with pytest.raises(StepError):
            await runtime.run(graph, id="x")
        assert await runtime.recover() == ()
        broken = False
        assert await runtime.resume("x") == {"a": 1}


async def test_workflows_are_registered_by_name() -> None:
    loose: Any = create_ditto
    with pytest.raises(ConfigError, match="two workflows are graph 'g'"):
        create_ditto(workflows=[Graph("g"), Graph("g")])
    with pytest.raises(ConfigError, match="workflows takes Graphs, Loops and Flows, not str"):
        loose(workflows=["g"])
    same = Loop("g", graph=Graph("g"), update=lambda s, o: s, done=lambda s: True, max_iterations=1)
    assert isinstance(create_ditto(workflows=[Graph("g"), same]), Runtime)
