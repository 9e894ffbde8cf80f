"""Pause: what is under way is drained and counts, nothing further is started, and the run stays until it is resumed."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from pathlib import Path
from typing import Any

import pytest

from ditto import (
    Action,
    EffectClass,
    EffectNotMade,
    Flow,
    FlowContext,
    Graph,
    Loop,
    Retry,
    RunBusyError,
    RunCancelledError,
    RunNotFoundError,
    RunPausedError,
    Runtime,
    StepContext,
    StepError,
    StoreClosedError,
    TransitionRefusedError,
    UnknownOutcomeError,
    Waiting,
)
from ditto.engine.drive import Drive
from ditto.engine.open_store import OpenStore
from ditto.store.records import RunEnd
from ditto.turn import Turn, TurnContext
from tests.engine.scene import Gate, MovedClock, World, events, opened, states, status, story, told, wait_until

pytestmark = pytest.mark.asyncio

WHO: dict[str, str] = {"actor": "ada", "reason": "stock count"}


def chain(gate: Gate, world: World) -> Graph:
    """Three steps; the first one stops at the gate."""

    async def first(ctx: StepContext) -> str:
        await gate.pause()
        return world.act(ctx)

    return (
        Graph("chain")
        .step("step1", first)
        .step("step2", lambda ctx: world.act(ctx), after=("step1",), effect="write")
        .step("step3", lambda ctx: world.act(ctx), after=("step2",))
    )


async def pausing(runtime: Runtime, run_id: str) -> None:
    """Return when the run's own drive knows that it is paused."""
    assert runtime._opened is not None
    drives = runtime._opened.engine.drives
    await wait_until(lambda: any(d.run.run_id == run_id and d.ending is not None for d in drives.values()))


@pytest.mark.parametrize("outside", [False, True], ids=["its owner's process", "an outside writer"])
async def test_e09_what_is_under_way_is_drained_and_no_further_step_starts(
    store_path: Path, world: World, outside: bool
) -> None:
    gate = Gate()
    graph = chain(gate, world)
    async with opened(store_path, workflows=[graph]) as owner, opened(store_path) as other:
        driving = asyncio.ensure_future(owner.run(graph, id="r"))
        await gate.came()
        await (other if outside else owner).pause("r", **WHO)
        for runtime in (owner, other):
            assert await status(runtime, "r") == "pausing"
            assert [run.run_id for run in await runtime.runs(status="pausing")] == ["r"]
            assert await runtime.runs(status="paused") == []
        assert (await other.health()).runs == {"pausing": 1}
        with pytest.raises(RunBusyError):
            await opened_resume(store_path, graph)
        gate.open()
        with pytest.raises(RunPausedError, match="ditto resume r") as caught:
            await driving
        assert (caught.value.code, caught.value.run_id) == ("run.paused", "r")
        assert await status(other, "r") == "paused"
        assert await states(other, "r") == {"step1": "completed"}
        assert await story(other, "r") == ["run_created", "run_paused", "step_completed step1", "run_drained"]
        assert (await events(other, "r"))[1].body == WHO
        assert (world.total, gate.count) == (1, 1)
        # A plain call, and whoever looks for runs that nobody drives, leave it alone.
        for _ in range(2):
            with pytest.raises(RunPausedError):
                await owner.run(graph, id="r")
        assert await owner.recover() == ()
        assert await status(owner, "r") == "paused"
        outputs = await owner.resume("r")
        assert outputs == {name: f"done r/1/{name}" for name in ("step1", "step2", "step3")}
        assert (await events(owner, "r"))[4].body == {"was": "paused"}
        assert (world.total, gate.count) == (3, 1)


async def opened_resume(path: Path, graph: Graph) -> None:
    async with opened(path, workflows=[graph]) as third:
        await third.resume("r")


async def test_no_write_is_admitted_once_pause_has_returned(
    store_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner has not noticed yet: its own transitions find it, before anything is sent."""
    graph = chain(Gate(), world)
    between = asyncio.Event()
    begun = asyncio.Event()
    admit = Drive.admit

    async def late(self: Drive, *given: Any, **named: Any) -> None:
        begun.set()
        await between.wait()
        await admit(self, *given, **named)

    monkeypatch.setattr(Drive, "admit", late)
    monkeypatch.setattr(OpenStore, "notice_outsiders", lambda *_: None)
    gate = Gate()
    gate.open()
    graph = chain(gate, world)
    async with opened(store_path) as owner, opened(store_path) as other:
        driving = asyncio.ensure_future(owner.run(graph, id="r"))
        await begun.wait()
        await other.pause("r")
        between.set()
        with pytest.raises(RunPausedError):
            await driving
        assert await states(other, "r") == {"step1": "completed"}
        assert world.total == 1


@pytest.mark.parametrize("effect", ["pure", "read", "idempotent", "local"])
async def test_an_owner_that_does_not_look_finds_the_pause_in_its_next_transaction(
    store_path: Path, monkeypatch: pytest.MonkeyPatch, effect: str
) -> None:
    monkeypatch.setattr(OpenStore, "notice_outsiders", lambda *_: None)
    gate, did = Gate(), list[int]()

    async def first() -> int:
        await gate.pause()
        return 1

    def after(ctx: StepContext) -> int:
        did.append(1)
        return 2

    graph = Graph("g").step("a", first).step("b", after, after=("a",), effect=effect)
    async with opened(store_path) as owner, opened(store_path) as other:
        driving = asyncio.ensure_future(owner.run(graph, id="r"))
        await gate.came()
        await other.pause("r")
        gate.open()
        with pytest.raises(RunPausedError):
            await driving
        assert await states(other, "r") == {"a": "completed"}
        assert did == []


async def test_a_run_that_comes_to_its_end_while_it_is_drained_has_ended(store_path: Path) -> None:
    for fails in (False, True):
        gate = Gate()

        async def act(gate: Gate = gate, fails: bool = fails) -> int:
            await gate.pause()
            if fails:
                raise ValueError("no")
            return 1

        graph = Graph("g").step("a", act)
        name = f"r{fails}"
        async with opened(store_path) as runtime:
            driving = asyncio.ensure_future(runtime.run(graph, id=name))
            await gate.came()
            await runtime.pause(name)
            gate.open()
            if fails:
                with pytest.raises(StepError, match="no"):
                    await driving
            else:
                assert await driving == {"a": 1}
            assert await status(runtime, name) == ("failed" if fails else "completed")
            with pytest.raises(TransitionRefusedError, match=f"{name} is (completed|failed); only an open run"):
                await runtime.pause(name)


@pytest.mark.parametrize("before", [True, False], ids=["while it backs off", "before it fails"])
async def test_branches_are_drained_and_a_step_that_failed_keeps_its_further_tries(
    store_path: Path, world: World, before: bool
) -> None:
    slow, tried, clock = Gate(), Gate(), MovedClock()

    async def left(ctx: StepContext) -> str:
        await slow.pause()
        return world.act(ctx)

    async def right(ctx: StepContext) -> str:
        await tried.pause()
        if ctx.attempt == 1:
            raise EffectNotMade("not yet")
        return world.act(ctx)

    graph = (
        Graph("g")
        .step("left", left, effect="write")
        .step("right", right, effect="write", retry=Retry(3, initial_s=3600))
        .step("join", lambda left, right: [left, right], after=("left", "right"))
    )
    async with opened(store_path, workflows=[graph], clock=clock) as runtime:
        driving = asyncio.ensure_future(runtime.run(graph, id="r"))
        await slow.came()
        await tried.came()
        if before:
            tried.open()
            await told(runtime, "r", "step_retrying")
        await runtime.pause("r")
        tried.open()
        assert await status(runtime, "r") == "pausing"
        slow.open()
        with pytest.raises(RunPausedError):
            await driving
        assert await states(runtime, "r") == {"left": "completed", "right": "retrying"}
        clock.move(3600)
        assert (await runtime.resume("r"))["join"] == ["done r/1/left", "done r/1/right"]
        assert tried.count == 2


async def test_pausing_twice_changes_nothing_and_unknown_runs_are_named(store_path: Path) -> None:
    async with opened(store_path) as runtime:
        with pytest.raises(RunNotFoundError):
            await runtime.pause("r")
        graph = Graph("g").wait("go")
        await runtime.run(graph, id="r", on_wait="return")
        await runtime.pause("r", "ada")
        before = await story(runtime, "r")
        await runtime.pause("r", "bo")
        assert await story(runtime, "r") == before == ["run_created", "step_waiting go", "run_waiting", "run_paused"]


async def test_a_run_that_nobody_drives_is_paused_at_once(store_path: Path) -> None:
    """Waiting, interrupted, unknown."""

    async def lose() -> None:
        raise ConnectionError("lost")

    async def hang() -> None:
        await asyncio.Event().wait()

    graphs = {
        "waiting": Graph("waiting").wait("go"),
        "unknown": Graph("unknown").step("send", lose, effect="write"),
        "interrupted": Graph("interrupted").step("hang", hang),
    }
    async with opened(store_path, workflows=graphs.values()) as runtime:
        await runtime.run(graphs["waiting"], id="waiting", on_wait="return")
        with pytest.raises(UnknownOutcomeError):
            await runtime.run(graphs["unknown"], id="unknown")
        driving = asyncio.ensure_future(runtime.run(graphs["interrupted"], id="interrupted"))
        await told(runtime, "interrupted", "run_created")
        driving.cancel()
        await asyncio.wait([driving])
        for name in graphs:
            assert await status(runtime, name) == name
            await runtime.pause(name)
            assert await status(runtime, name) == "paused"
            with pytest.raises(RunPausedError):
                await runtime.run(graphs[name], id=name)
        assert await runtime.recover() == ()
        # What a person decides meanwhile is kept, and the run stays paused.
        await runtime.resolve("unknown", "send", actor="mia", reason="seen", committed=7)
        assert await status(runtime, "unknown") == "paused"
        assert await runtime.resume("unknown") == {"send": 7}


async def test_a_wait_may_end_while_the_run_is_paused_and_it_stays_so(store_path: Path) -> None:
    clock = MovedClock()
    graph = (
        Graph("asks")
        .approval("ok", show=lambda input: input)
        .wait("paid")
        .sleep("nap", 60)
        .step("end", lambda ok, paid: [ok["actor"], paid["body"]], after=("ok", "paid", "nap"))
    )
    async with opened(store_path, workflows=[graph], clock=clock) as runtime:
        await runtime.run(graph, 1, id="r", on_wait="return")
        await runtime.pause("r")
        serving = asyncio.ensure_future(runtime.serve())
        await runtime.decide("r", "ok", decision="approve", actor="ada")
        assert await runtime.signal("r", "paid", 7)
        clock.at += 60 * 1_000_000
        await told(runtime, "r", "wait_over")
        assert await status(runtime, "r") == "paused"
        assert (await runtime.get("r")).waits == ()
        serving.cancel()
        await asyncio.wait([serving])
        assert await status(runtime, "r") == "paused"
        assert (await runtime.resume("r"))["end"] == ["ada", 7]


@pytest.mark.parametrize("outside", [False, True], ids=["its owner's process", "an outside writer"])
@pytest.mark.parametrize("kind", ["graph", "loop", "flow"])
async def test_a_call_that_waits_with_its_run_is_woken(store_path: Path, kind: str, outside: bool) -> None:
    graph = Graph("waits").wait("go").step("end", lambda go: go["body"], after=("go",))
    loop = Loop(
        "waits", graph=graph, update=lambda state, outputs: outputs["end"], done=lambda state: state == 1,
        max_iterations=2,
    )  # fmt: skip

    async def ask(ctx: FlowContext, input: Any) -> Any:
        first, _ = await asyncio.gather(ctx.wait("go"), ctx.wait("on"))
        return first

    workflow: Any = {"graph": graph, "loop": loop, "flow": Flow("waits", ask)}[kind]
    async with opened(store_path, workflows=[workflow]) as owner, opened(store_path) as other:
        driving = asyncio.ensure_future(owner.run(workflow, None, id="r"))
        await told(other, "r", "step_waiting")
        await (other if outside else owner).pause("r")
        with pytest.raises(RunPausedError):
            await driving
        assert await status(other, "r") == "paused"
        await other.signal("r", "go", 1)
        if kind == "flow":
            waiting = await owner.resume("r", on_wait="return")
            assert [wait.step for wait in waiting.waits] == ["on"]
            await other.signal("r", "on", 2)
        assert await owner.resume("r") == ({"go": ANY, "end": 1} if kind == "graph" else 1)


class _Any:
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


ANY: Any = _Any()


async def test_a_loop_goes_on_in_the_round_in_which_it_was_paused(store_path: Path) -> None:
    gate, rounds = Gate(), list[int]()

    async def act(input: int) -> int:
        rounds.append(input)
        if input == 1:
            await gate.pause()
        return input + 1

    loop = Loop(
        "rounds",
        graph=Graph("round").step("n", act).step("m", lambda n: n, after=("n",)),
        update=lambda state, outputs: outputs["m"],
        done=lambda state: state == 4,
        max_iterations=9,
    )
    async with opened(store_path, workflows=[loop]) as runtime:
        driving = asyncio.ensure_future(runtime.loop(loop, 0, id="r"))
        await gate.came()
        await runtime.pause("r")
        gate.open()
        with pytest.raises(RunPausedError):
            await driving
        assert await states(runtime, "r") == {"1/n": "completed", "1/m": "completed", "2/n": "completed"}
        assert await runtime.resume("r") == 4
        assert rounds == [0, 1, 2, 3]


async def test_a_flow_drains_all_its_calls_before_it_is_stopped(store_path: Path, world: World) -> None:
    """The branch that cannot go on does not end the others: none is cut short, and none is lost."""
    slow, quick = Gate(), Gate()
    began: list[str] = []

    def step(name: str, gate: Gate | None = None) -> Any:
        async def act(input: Any, ctx: StepContext) -> str:
            began.append(name)
            if gate is not None:
                await gate.pause()
            return world.act(ctx)

        return act

    async def both(ctx: FlowContext, input: Any) -> Any:
        async def one() -> Any:
            await ctx.step("slow", step("slow", slow), effect="write")
            return await ctx.step("after-slow", step("after-slow"))

        async def two() -> Any:
            await ctx.step("quick", step("quick", quick), effect="write")
            return await ctx.run("after-quick", Graph("g").step("in", lambda ctx: world.act(ctx)))

        async def three() -> Any:
            return await ctx.wait("paid")

        return await asyncio.gather(one(), two(), three())

    flow = Flow("both", both)
    async with opened(store_path, workflows=[flow]) as runtime:
        driving = asyncio.ensure_future(runtime.run(flow, None, id="r"))
        await slow.came()
        await quick.came()
        await told(runtime, "r", "step_waiting")
        await runtime.pause("r")
        quick.open()
        await wait_until(lambda: world.effects["r/1/quick"] == 1)
        for _ in range(10):
            await asyncio.sleep(0)
        assert not driving.done()
        assert await status(runtime, "r") == "pausing"
        slow.open()
        with pytest.raises(RunPausedError):
            await driving
        assert await states(runtime, "r") == {"slow": "completed", "quick": "completed", "paid": "waiting"}
        assert sorted(began) == ["quick", "slow"]
        await runtime.signal("r", "paid", 7)
        result = await runtime.resume("r")
        assert result == ["done r/1/after-slow", {"in": "done r/1/after-quick/in"}, 7]
        assert set(world.effects.values()) == {1}


async def test_an_error_that_is_drained_is_recorded_and_handled_after_the_pause(store_path: Path) -> None:
    gate, handled = Gate(), list[str]()

    async def fail() -> None:
        await gate.pause()
        raise ValueError("no")

    async def flow_function(ctx: FlowContext, input: Any) -> str:
        try:
            await ctx.run("inner", Graph("inner").step("fail", fail).step("never", lambda fail: 1, after=("fail",)))
        except StepError as error:
            handled.append(str(error.error_type))
            repaired: str = await ctx.step("repair", lambda input: "repaired")
            return repaired
        return "never"

    flow = Flow("f", flow_function)
    async with opened(store_path, workflows=[flow]) as runtime:
        driving = asyncio.ensure_future(runtime.run(flow, None, id="r"))
        await gate.came()
        await runtime.pause("r")
        gate.open()
        with pytest.raises(RunPausedError):
            await driving
        assert await states(runtime, "r") == {"inner/fail": "failed", "inner": "failed"}
        assert await runtime.resume("r") == "repaired"
    assert handled == ["ValueError"] * 2
    assert gate.count == 1


async def test_a_child_run_is_driven_to_its_next_wait_and_can_be_paused_by_its_own_id(store_path: Path) -> None:
    kid = Graph("kid").wait("go").step("end", lambda go: go["body"], after=("go",))

    async def parent(ctx: FlowContext, input: Any) -> Any:
        outputs = await ctx.child("kid", kid)
        return outputs["end"]

    flow = Flow("parent", parent)
    async with opened(store_path, workflows=[flow, kid]) as runtime:
        driving = asyncio.ensure_future(runtime.run(flow, None, id="r"))
        await told(runtime, "r/kid", "step_waiting")
        await runtime.pause("r")
        with pytest.raises(RunPausedError):
            await driving
        assert [await status(runtime, name) for name in ("r", "r/kid")] == ["paused", "waiting"]
        # The child alone: its parent waits for it, and says what for.
        await runtime.pause("r/kid")
        with pytest.raises(RunPausedError, match="ditto resume r/kid") as caught:
            await runtime.resume("r")
        assert caught.value.run_id == "r/kid"
        waiting = await runtime.resume("r", on_wait="return")
        assert isinstance(waiting, Waiting)
        assert [(wait.kind.value, wait.name) for wait in waiting.waits] == [("WAIT.CHILD", "r/kid")]
        assert [await status(runtime, name) for name in ("r", "r/kid")] == ["waiting", "paused"]
        await runtime.signal("r/kid", "go", 5)
        assert await runtime.resume("r/kid") == {"go": ANY, "end": 5}
        assert await status(runtime, "r") == "interrupted"
        assert await runtime.run(flow, None, id="r") == 5


async def test_a_pause_may_be_ended_without_driving_the_run(store_path: Path, world: World) -> None:
    gate = Gate()
    graph = chain(gate, world)
    async with opened(store_path, workflows=[graph]) as owner, opened(store_path) as other:
        driving = asyncio.ensure_future(owner.run(graph, id="r"))
        await gate.came()
        with pytest.raises(TransitionRefusedError, match="r is running, not paused"):
            await other.unpause("r")
        await other.pause("r")
        with pytest.raises(RunBusyError, match="still being drained"):
            await other.unpause("r")
        gate.open()
        with pytest.raises(RunPausedError):
            await driving
        serving = asyncio.ensure_future(owner.serve())
        await other.unpause("r", **WHO)
        await told(other, "r", "run_completed")
        serving.cancel()
        await asyncio.wait([serving])
        assert [event.body for event in await events(other, "r") if event.kind == "run_unpaused"] == [WHO]
        with pytest.raises(TransitionRefusedError, match="completed, not paused"):
            await other.unpause("r")
    assert world.total == 3


async def test_a_turn_that_was_paused_goes_on_when_the_pause_is_ended(store_path: Path, world: World) -> None:
    gate = Gate()

    async def hold(ctx: StepContext) -> str:
        await gate.pause()
        return world.act(ctx)

    def plan() -> Action:
        return Action("send", EffectClass.WRITE, hold, is_async=True, recorded=lambda: {"tool": "send"})

    async def function(ctx: TurnContext) -> list[Any]:
        return [await ctx.invoke(call_id, "send", {}, plan) for call_id in ("c-1", "c-2")]

    turn = Turn("app", "thread", "turn", "model")
    async with opened(store_path) as runtime:
        driving = asyncio.ensure_future(runtime.turn(turn, function))
        await gate.came()
        await runtime.pause(turn.run_id)
        gate.open()
        with pytest.raises(RunPausedError, match="unpause"):
            await driving
        with pytest.raises(RunPausedError):
            await runtime.turn(turn, function)
        assert world.total == 1
        await runtime.unpause(turn.run_id)
        assert await runtime.turn(turn, function) == [f"done {turn.run_id}/1/t/c-{number}" for number in (1, 2)]
    assert world.total == 2


async def test_cancel_works_before_and_after_a_paused_run_is_drained(store_path: Path, world: World) -> None:
    for outside in (False, True):
        gate, name = Gate(), f"r{outside}"
        graph = chain(gate, world)
        async with opened(store_path) as owner, opened(store_path) as other:
            driving = asyncio.ensure_future(owner.run(graph, id=name))
            await gate.came()
            await owner.pause(name)
            await (other if outside else owner).cancel(name)
            gate.open()
            with pytest.raises(RunCancelledError):
                await driving
            assert await status(owner, name) == "cancelled"
    async with opened(store_path) as runtime:
        waits = Graph("waits").wait("go")
        await runtime.run(waits, id="w", on_wait="return")
        await runtime.pause("w")
        await runtime.cancel("w")
        assert await status(runtime, "w") == "cancelled"


async def test_a_paused_run_stays_paused_whatever_becomes_of_its_owner(store_path: Path, world: World) -> None:
    """Its caller is cancelled, or its runtime closed, before it is drained."""
    for closed in (False, True):
        gate, name = Gate(), f"r{closed}"
        graph = chain(gate, world)
        async with opened(store_path, grace_s=0.05, workflows=[graph]) as owner:
            driving = asyncio.ensure_future(owner.run(graph, id=name))
            await gate.came()
            await owner.pause(name)
            if closed:
                await owner.close()
            driving.cancel()
            await asyncio.wait([driving])
        async with opened(store_path, workflows=[graph]) as runtime:
            assert await status(runtime, name) == "paused"
            assert await runtime.recover() == ()
            gate.open()
            assert len(await runtime.resume(name)) == 3


async def test_who_joined_the_run_is_told_and_who_asked_to_resume_goes_on(store_path: Path, world: World) -> None:
    gate = Gate()
    graph = chain(gate, world)
    async with opened(store_path, workflows=[graph]) as runtime:
        driving = asyncio.ensure_future(runtime.run(graph, id="r"))
        await gate.came()
        joined = asyncio.ensure_future(runtime.run(graph, id="r"))
        early = asyncio.ensure_future(runtime.resume("r"))  # before the pause: it asks for no more than to join
        await asyncio.sleep(0.05)
        await runtime.pause("r")
        late = asyncio.ensure_future(runtime.resume("r"))
        await asyncio.sleep(0.05)
        gate.open()
        for waited in (driving, joined, early):
            with pytest.raises(RunPausedError):
                await waited
        assert len(await late) == 3
        assert await status(runtime, "r") == "completed"


async def test_closing_wakes_a_call_that_waits_with_its_run(store_path: Path) -> None:
    graph = Graph("waits").wait("go")
    runtime: Runtime
    async with opened(store_path, grace_s=50.0) as runtime:
        driving = asyncio.ensure_future(runtime.run(graph, id="r"))
        await told(runtime, "r", "step_waiting")
        await runtime.close()
        with pytest.raises(StoreClosedError):
            await driving
    async with opened(store_path) as runtime:
        assert await status(runtime, "r") == "waiting"


async def test_the_pause_that_comes_while_the_run_is_let_go_of(
    store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = Graph("waits").wait("go")
    async with opened(store_path) as owner, opened(store_path) as other:
        finish = Drive.finish

        async def late(drive: Drive, end: RunEnd) -> None:
            await other.pause("r")
            await finish(drive, end)

        monkeypatch.setattr(Drive, "finish", late)
        with pytest.raises(RunPausedError):
            await owner.run(graph, id="r", on_wait="return")
        assert await status(other, "r") == "paused"
        assert (await story(other, "r"))[-2:] == ["run_paused", "run_drained"]


async def test_a_thread_is_drained_too(store_path: Path) -> None:
    came, go = threading.Event(), threading.Event()

    def block() -> int:
        came.set()
        go.wait(30)
        return 1

    graph = Graph("g").step("a", block).step("b", lambda a: a, after=("a",))
    async with opened(store_path, workflows=[graph]) as runtime:
        driving = asyncio.ensure_future(runtime.run(graph, id="r"))
        await wait_until(came.is_set)
        await runtime.pause("r")
        assert await status(runtime, "r") == "pausing"
        go.set()
        with contextlib.suppress(RunPausedError):
            await driving
        assert await states(runtime, "r") == {"a": "completed"}
        assert await runtime.resume("r") == {"a": 1, "b": 1}
