"""Flows: recorded calls are returned, not made; something else than what is recorded stops the run."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from ditto import Flow, FlowContext, Graph, Loop, ReplayMismatchError, StepError, Waiting, create_ditto
from tests.engine.scene import on_disk

pytestmark = pytest.mark.asyncio

DOUBLE = Graph("double").step("twice", lambda input: input * 2)


class World:
    """What was done, in the order in which it was done."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def step(self, name: str) -> Any:
        async def act(input: Any) -> str:
            self.done.append(name)
            return name

        return act


async def test_a_flow_goes_on_over_restarts_and_makes_each_call_once(tmp_path: Path) -> None:
    world = World()
    count = Loop(
        "count",
        graph=Graph("one").step("n", lambda input: input["n"] + 1),
        update=lambda state, outputs: {"n": outputs["n"], "seen": state["seen"].add(outputs["n"])},
        done=lambda state: state["n"] >= 3,
        max_iterations=5,
        append=("seen",),
    )

    async def order(ctx: FlowContext, input: Any) -> Any:
        doubled = await ctx.run("prepare", DOUBLE, input)
        made = [await ctx.uuid("id"), await ctx.random("number"), (await ctx.now("now")).isoformat()]
        first, second = await asyncio.gather(
            ctx.step("first", world.step("first")), ctx.step("second", world.step("second"))
        )
        counted = await ctx.loop("rounds", count, {"n": 0, "seen": []})
        decision = await ctx.approve("review", {"total": doubled["twice"]})
        paid = await ctx.wait("paid")
        kid = await ctx.child("kid", DOUBLE, 5)
        return [doubled, made, first, second, counted, decision.approved, paid, kid]

    flow = Flow("order", order)
    async with create_ditto(store=tmp_path / "d.db") as runtime:
        waiting = await runtime.run(flow, 4, id="o", on_wait="return")
        assert isinstance(waiting, Waiting)
        assert waiting.waits[0].shown == {"total": 8}
    async with create_ditto(store=tmp_path / "d.db", workflows=[flow]) as runtime:
        await runtime.decide("o", decision="approve", actor="ada")
        await runtime.signal("o", "paid", 7)
        result = await runtime.resume("o")
        assert result == await runtime.run(flow, 4, id="o")
        assert (await runtime.get("o/kid")).status == "completed"
    assert result[0] == {"twice": 8}
    assert result[2:] == ["first", "second", {"n": 3, "seen": [1, 2, 3]}, True, 7, {"twice": 10}]
    assert sorted(world.done) == ["first", "second"]


async def test_f04_a_changed_call_is_a_mismatch_and_starts_nothing(tmp_path: Path) -> None:
    world = World()

    async def first(ctx: FlowContext, input: Any) -> Any:
        await ctx.step("a", world.step("a"), 1)
        await ctx.wait("go")

    async def changed(ctx: FlowContext, input: Any) -> Any:
        await ctx.step("a", world.step("a"), 2)
        await ctx.step("b", world.step("b"))

    async def shorter(ctx: FlowContext, input: Any) -> Any:
        return "done"

    async with create_ditto(store=tmp_path / "d.db") as runtime:
        await runtime.run(Flow("f", first), None, id="r", on_wait="return")
        for code, match in ((changed, "call 'a' was recorded with another input"), (shorter, "without asking for")):
            for _ in range(2):
                with pytest.raises(ReplayMismatchError, match=match):
                    await runtime.run(Flow("f", code), None, id="r")
        assert (await runtime.get("r")).status == "blocked"
        await runtime.signal("r", "go")
        await runtime.run(Flow("f", first), None, id="r")
    assert world.done == ["a"]


async def test_f10_an_error_that_the_flow_handles_is_handled_on_every_replay(tmp_path: Path) -> None:
    world = World()

    async def fail(input: Any) -> None:
        world.done.append("fail")
        raise ValueError("no")

    async def handling(ctx: FlowContext, input: Any) -> str:
        try:
            await ctx.step("fail", fail)
        except StepError as error:
            repaired = await ctx.step("repair", world.step("repair"))
            await ctx.wait("go")
            return f"{repaired} after {error.error_type}"
        return "never"

    flow = Flow("f", handling)
    async with create_ditto(store=tmp_path / "d.db") as runtime:
        await runtime.run(flow, None, id="r", on_wait="return")
    async with create_ditto(store=tmp_path / "d.db") as runtime:
        await runtime.signal("r", "go")
        assert await runtime.run(flow, None, id="r") == "repair after ValueError"
    assert world.done == ["fail", "repair"]


async def test_an_error_that_the_flow_does_not_handle_fails_it_and_reopening_tries_again(tmp_path: Path) -> None:
    broken = True
    world = World()

    async def act(input: Any) -> str:
        if broken:
            raise ValueError("no")
        return "done"

    async def plain(ctx: FlowContext, input: Any) -> str:
        await ctx.step("before", world.step("before"))
        done: str = await ctx.step("act", act)
        return done

    flow = Flow("f", plain)
    async with create_ditto(store=tmp_path / "d.db") as runtime:
        for _ in range(2):
            with pytest.raises(StepError, match="no"):
                await runtime.run(flow, None, id="r")
        broken = False
        assert await runtime.run(flow, None, id="r", on_finished="reopen") == "done"
    assert world.done == ["before"]


async def test_a_flow_of_a_thousand_calls_resumes_without_running_one(tmp_path: Path) -> None:
    made = 0

    async def act(input: Any) -> Any:
        nonlocal made
        made += 1
        return input

    async def long(ctx: FlowContext, input: Any) -> int:
        total = 0
        for number in range(1_000):
            total += await ctx.step(f"s{number}", act, number, effect="read")
        await ctx.wait("go")
        return total

    flow = Flow("long", long)
    async with create_ditto(store=tmp_path / "d.db") as runtime:
        await runtime.run(flow, None, id="r", on_wait="return")
        await runtime.signal("r", "go")
        before = runtime.commits
        assert await runtime.run(flow, None, id="r") == sum(range(1_000))
        assert runtime.commits - before <= 4
    assert made == 1_000


async def test_what_a_call_came_to_is_on_disk_before_the_function_sees_it(tmp_path: Path) -> None:
    """The function may act on it by means that nobody records: a later process must find the same."""
    path = tmp_path / "d.db"
    seen: list[tuple[str, str | None]] = []

    def look(name: str) -> None:
        seen.append((name, on_disk(path, "o").get(name)))

    async def order(ctx: FlowContext, input: Any) -> Any:
        await ctx.step("read", lambda input: 1, effect="read")
        look("read")
        await ctx.random("number")
        look("number")
        await ctx.run("graph", DOUBLE, 4)
        look("graph/twice")
        await asyncio.gather(*(ctx.step(f"s{n}", lambda input: 1, effect="pure") for n in range(3)))
        look("s2")

    async with create_ditto(store=path) as runtime:
        await runtime.run(Flow("order", order), None, id="o")
    assert seen == [(name, "completed") for name in ("read", "number", "graph/twice", "s2")]


@pytest.mark.parametrize("changed", ["renamed", "inserted"])
async def test_f04_a_new_call_before_what_is_recorded_is_a_mismatch_and_makes_nothing(
    tmp_path: Path, changed: str
) -> None:
    world = World()
    new = False

    async def order(ctx: FlowContext, input: Any) -> Any:
        if new and changed == "inserted":
            await ctx.step("before", world.step("before"))
        await ctx.step("pay_again" if new and changed == "renamed" else "pay", world.step("pay"), effect="write")
        await ctx.wait("go")
        return "done"

    flow = Flow("order", order)
    async with create_ditto(store=tmp_path / "d.db") as runtime:
        await runtime.run(flow, None, id="o", on_wait="return")
        before = [event.kind async for event in runtime.events("o")]
        new = True
        with pytest.raises(ReplayMismatchError, match="comes before what is recorded: go, pay"):
            await runtime.run(flow, None, id="o", on_wait="return")
        assert (await runtime.get("o")).status == "blocked"
        assert [event.kind async for event in runtime.events("o")][len(before) :] == ["run_resumed", "run_blocked"]
        new = False
        await runtime.signal("o", "go")
        assert await runtime.run(flow, None, id="o") == "done"
    assert world.done == ["pay"]


async def test_a_branch_may_still_ask_for_what_is_recorded_when_the_function_makes_a_new_call(tmp_path: Path) -> None:
    world, hangs = World(), asyncio.Event()

    async def main(input: Any) -> str:
        if not hangs.is_set():
            hangs.set()
            await asyncio.sleep(3600)
        return "main"

    async def order(ctx: FlowContext, input: Any) -> Any:
        async with asyncio.TaskGroup() as branches:
            branches.create_task(ctx.step("first", world.step("first"), effect="write"))
            if not hangs.is_set():
                await asyncio.sleep(0.05)
            return await ctx.step("main", main)

    async with create_ditto(store=tmp_path / "d.db") as runtime:
        running = asyncio.ensure_future(runtime.run(Flow("order", order), None, id="o"))
        await hangs.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert on_disk(tmp_path / "d.db", "o") == {"first": "completed"}
        assert await runtime.run(Flow("order", order), None, id="o") == "main"
    assert world.done == ["first"]
