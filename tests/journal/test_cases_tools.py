"""Tool calls of a turn: what one that fails, is lost or is given up means for the others (cases 14, 16 and 18)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from ditto import (
    DefinitionError,
    Message,
    Runtime,
    SandboxDenied,
    StepError,
    Tool,
    TurnContext,
    UnknownOutcomeError,
)
from ditto.journal import ToolBridge
from ditto.testing.provider import Reply, ScriptedProvider, Text
from tests.engine.scene import Gate, on_disk, states, wait_until
from tests.journal.scene import PUBLISH, TURN, Effects, agents, calls, request, talk

pytestmark = pytest.mark.asyncio

THREE = calls(("c1", "one", "a"), ("c2", "two", "b"), ("c3", "three", "c"))


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "ditto.db"


def failing(name: str, error: Callable[[], Exception], before: Callable[[], Awaitable[Any]] | None = None) -> Tool:
    """A tool of class write that raises, after `before()`."""

    async def handler(arguments: dict[str, Any]) -> str:
        if before is not None:
            await before()
        raise error()

    return Tool(name, handler, PUBLISH)


def gated(effects: Effects, name: str, gate: Gate, **options: Any) -> Tool:
    """A tool that notes its call, then waits at the gate."""

    async def handler(arguments: dict[str, Any]) -> str:
        effects.done.append((name, arguments["text"]))
        await gate.pause()
        return f"{name}:{arguments['text']}"

    return Tool(name, handler, PUBLISH, **options)


async def status(runtime: Runtime) -> str:
    return (await runtime.get(TURN.run_id)).status


async def test_j14_a_sibling_in_flight_is_drained_and_stands_and_a_queued_one_never_starts(
    tmp_path: Path, store: Path
) -> None:
    """The framework's task group cancels the siblings of a call that failed: that cuts nothing short."""
    effects, gate = Effects(), Gate()
    tools = [effects.tool("one"), gated(effects, "two", gate), effects.tool("three")]
    turn = replace(TURN, max_concurrency=2)
    async with ScriptedProvider(tmp_path / "model.db", [THREE, Text("done")]) as provider:
        async with agents(store, provider, tools, allowed=("two", "three")) as runtime:
            # The first call is denied by the sandbox; the second has begun by then, and the third waits for a slot.
            driven = asyncio.create_task(runtime.turn(turn, lambda ctx: talk(ctx, request(), order=("c2", "c1", "c3"))))
            await gate.came()
            await wait_until(lambda: on_disk(store, TURN.run_id).get("t/c1") == "refused")
            gate.open()
            with pytest.raises(SandboxDenied):
                await driven
            assert await states(runtime, TURN.run_id) == {"m/1": "completed", "t/c2": "completed", "t/c1": "refused"}
            assert await status(runtime) == "failed"
        assert effects.done == [("two", "b")]
        # Allowed now, the turn goes on: what stood is not made again, what never started is made once.
        again = [effects.tool("one"), effects.tool("two"), effects.tool("three")]
        async with agents(store, provider, again) as runtime:
            assert await runtime.turn(turn, lambda ctx: talk(ctx, request())) == "done"
        assert provider.count == 2
    assert sorted(effects.done) == [("one", "a"), ("three", "c"), ("two", "b")]


async def test_j14_a_call_that_is_given_up_before_it_began_never_begins(tmp_path: Path, store: Path) -> None:
    """A framework's own error ends its tasks; one of them waits for a slot."""
    effects, gate = Effects(), Gate()

    async def agent(ctx: TurnContext) -> None:
        sample = await ctx.sample(request())

        async def act(call_id: str) -> None:
            call = next(each for each in sample.message.tool_calls if each.id == call_id)
            await ctx.call(call.name, call.id, json.loads(call.arguments))

        async with anyio.create_task_group() as group:
            for call in sample.message.tool_calls:
                group.start_soon(act, call.id)
            await gate.came()
            asyncio.get_running_loop().call_later(0, gate.open)
            raise RuntimeError("the framework has had enough")

    tools = [gated(effects, "one", gate), effects.tool("two"), effects.tool("three")]
    async with (
        ScriptedProvider(tmp_path / "model.db", [THREE]) as provider,
        agents(store, provider, tools) as runtime,
    ):
        with pytest.raises(BaseExceptionGroup, match="unhandled errors"):
            await runtime.turn(TURN, agent)
        assert await states(runtime, TURN.run_id) == {"m/1": "completed", "t/c1": "completed"}
        assert await status(runtime) == "failed"
    assert effects.done == [("one", "a")]


async def test_j14_what_a_bridge_has_begun_is_drained_when_its_scope_ends_the_work(tmp_path: Path, store: Path) -> None:
    effects, gate = Effects(), Gate()
    tools = [gated(effects, "one", gate), effects.tool("two")]
    async with ScriptedProvider(tmp_path / "model.db", []) as provider, agents(store, provider, tools) as runtime:
        bridge = ToolBridge(runtime, tools, namespace="n", thread="t", turn="1")

        async def work(available: Any, scope: anyio.CancelScope) -> None:
            async with anyio.create_task_group() as group:
                group.start_soon(available["one"], "c1", {"text": "a"})
                await gate.came()
                group.start_soon(available["two"], "c2", {"text": "b"})
                await anyio.lowlevel.checkpoint()
                asyncio.get_running_loop().call_later(0, gate.open)
                scope.cancel()

        with pytest.raises(DefinitionError, match="ended by its own scope"):
            await bridge.run(work)
        assert await states(runtime, bridge.turn.run_id) == {"t/c1": "completed"}
    assert effects.done == [("one", "a")]


async def test_j16_a_swallowed_denial_is_still_a_failure_and_the_model_is_not_asked_on(
    tmp_path: Path, store: Path
) -> None:
    effects = Effects()

    async def agent(ctx: TurnContext) -> str:
        sample = await ctx.sample(request())
        told = "fine"
        try:
            await ctx.call("one", sample.message.tool_calls[0].id, {"text": "a"})
        except StepError as error:
            told = error.message
        messages = (
            Message(role="user", content="go"),
            sample.message,
            Message(role="tool", content=told, tool_call_id="c1"),
        )
        with pytest.raises(StepError) as refused:
            await ctx.sample(request(*messages))
        assert refused.value.code == "turn.stopped"
        return "all is well"

    script: list[Reply] = [calls(("c1", "one", "a")), Text("done")]
    async with ScriptedProvider(tmp_path / "model.db", script) as provider:
        async with agents(store, provider, [effects.tool("one")], allowed=()) as runtime:
            with pytest.raises(SandboxDenied):
                await runtime.turn(TURN, agent)
            assert await status(runtime) == "failed"
            assert provider.count == 1
        async with agents(store, provider, [effects.tool("one")]) as runtime:
            assert await runtime.turn(TURN, lambda ctx: talk(ctx, request())) == "done"
        assert provider.count == 2
    assert effects.done == [("one", "a")]


@pytest.mark.parametrize("effect", ["read", "idempotent", "local"])
async def test_j16_calls_that_failed_are_all_made_again_by_the_next_run(
    tmp_path: Path, store: Path, effect: str
) -> None:
    """However many failed, and whatever the framework wraps their errors in."""
    effects = Effects()
    tools = [effects.tool(name, effect=effect) for name in ("one", "two", "three")]
    if effect == "local":
        tools = [Tool(name, lambda arguments: "ok", PUBLISH, effect=effect) for name in ("one", "two", "three")]
    async with ScriptedProvider(tmp_path / "model.db", [THREE, Text("done")]) as provider:
        async with agents(store, provider, tools, allowed=()) as runtime:
            with pytest.raises(StepError) as denied:
                await runtime.turn(replace(TURN, max_concurrency=3), lambda ctx: talk(ctx, request()))
            assert denied.value.code == "sandbox.denied"
        async with agents(store, provider, tools) as runtime:
            assert await runtime.turn(TURN, lambda ctx: talk(ctx, request())) == "done"
        assert provider.count == 2


@pytest.mark.parametrize("at_once", [1, 3])
async def test_j18_an_unknown_call_blocks_only_what_rests_on_it(tmp_path: Path, store: Path, at_once: int) -> None:
    """Its siblings run, once; the model is not asked before it is settled."""
    effects = Effects()
    tools = [failing("one", lambda: OSError("the line went dead")), effects.tool("two"), effects.tool("three")]
    turn = replace(TURN, max_concurrency=at_once)
    async with ScriptedProvider(tmp_path / "model.db", [THREE, Text("done")]) as provider:
        for _ in range(2):
            async with agents(store, provider, tools) as runtime:
                with pytest.raises(UnknownOutcomeError, match="went dead") as unknown:
                    await runtime.turn(turn, lambda ctx: talk(ctx, request()))
                assert unknown.value.steps == ("t/c1",)
                found = await states(runtime, TURN.run_id)
                assert found == {"m/1": "completed", "t/c1": "unknown", "t/c2": "completed", "t/c3": "completed"}
            assert sorted(effects.done) == [("three", "c"), ("two", "b")]
            assert provider.count == 1
        async with agents(store, provider, tools) as runtime:
            await runtime.resolve(TURN.run_id, "t/c1", actor="mia", reason="seen there", committed="one:a")
            assert await runtime.turn(turn, lambda ctx: talk(ctx, request())) == "done"
        assert provider.count == 2
        assert '"one:a"' in str(provider.requests()[1].text)
    assert sorted(effects.done) == [("three", "c"), ("two", "b")]


async def test_j18_an_unknown_call_beside_one_that_failed_keeps_both(tmp_path: Path, store: Path) -> None:
    effects = Effects()
    tools = [failing("one", lambda: OSError("the line went dead")), effects.tool("two"), effects.tool("three")]
    async with (
        ScriptedProvider(tmp_path / "model.db", [THREE]) as provider,
        agents(store, provider, tools, allowed=("one",)) as runtime,
    ):
        with pytest.raises(SandboxDenied):
            await runtime.turn(replace(TURN, max_concurrency=3), lambda ctx: talk(ctx, request()))
        assert await status(runtime) == "unknown"
        assert (await states(runtime, TURN.run_id))["t/c1"] == "unknown"
    assert effects.done == []
