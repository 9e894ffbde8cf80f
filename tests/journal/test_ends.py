"""A turn that is cut short: cancelled, by SIGTERM, by a deadline; and how the next turn of its thread goes on (O01)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from ditto import Action, EffectClass, Message, StepError, Tool, UnknownOutcomeError
from ditto.config import ProviderConfig
from ditto.journal import Bindings, JournaledAgent, mend_history, recorded_messages, run_agent
from ditto.testing.provider import Reply, ScriptedProvider, Stall, Text
from ditto.turn import Turn
from tests.engine.scene import Gate, on_disk
from tests.journal.conftest import Case
from tests.journal.scene import MODEL, PUBLISH, TURN, Effects, agents, calls, request, talk
from tests.processes import Child

KEY: dict[str, Any] = {"namespace": "report-v1", "thread": "thread-1", "turn": "turn-1", "model_key": "tiny/1"}

AGENT = Turn("agent", "t", "1", "any")

TWO = calls(("c1", "one", "a"), ("c2", "two", "b"))


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "ditto.db"


def gated(effects: Effects, name: str, gate: Gate, **options: Any) -> Tool:
    async def handler(arguments: dict[str, Any]) -> str:
        effects.done.append((name, arguments["text"]))
        await gate.pause()
        return f"{name}:{arguments['text']}"

    return Tool(name, handler, PUBLISH, **options)


@asynccontextmanager
async def cancelled_when(came: Any) -> AsyncIterator[None]:
    """Cancels what is inside by a scope of anyio's, once `came()` returns."""
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as group:

            async def cancel() -> None:
                await came()
                scope.cancel()

            group.start_soon(cancel)
            yield
            group.cancel_scope.cancel()
    assert scope.cancelled_caught


# Cancelled


@pytest.mark.asyncio
@pytest.mark.parametrize("way", ["task", "scope"])
@pytest.mark.parametrize("entered", ["run", "block", "run_agent"])
async def test_cancelled_inside_a_tool_its_outcome_is_unknown_and_what_waits_never_begins(
    tmp_path: Path, store: Path, way: str, entered: str
) -> None:
    effects, gate = Effects(), Gate()
    tools = [gated(effects, "one", gate), effects.tool("two")]
    run_id = AGENT.run_id if entered == "run_agent" else TURN.run_id

    async with ScriptedProvider(tmp_path / "model.db", [TWO, Text("done")]) as provider:
        async with agents(store, provider, tools, concurrency=1) as runtime:

            async def work() -> None:
                agent = JournaledAgent(runtime, MODEL, tools, **KEY)
                if entered == "run":
                    await agent.run(converse)
                elif entered == "block":
                    async with agent as bindings:
                        await converse(bindings)
                else:
                    await run_agent(runtime, "go", model=MODEL, tools=tools, thread="t", turn="1")

            if way == "scope":
                async with cancelled_when(gate.came):
                    await work()
            else:
                task = asyncio.create_task(work())
                await gate.came()
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            # Whoever was cancelled has its cancellation only after what was under way is recorded.
            step = "2/t1" if entered == "run_agent" else "t/c1"
            answer = "1/sample" if entered == "run_agent" else "m/1"
            assert on_disk(store, run_id) == {answer: "completed", step: "unknown"}
            assert effects.done == [("one", "a")]
            await runtime.resolve(run_id, step, actor="mia", reason="seen", committed="one:a")
        async with agents(store, provider, tools) as runtime:
            if entered == "run_agent":
                assert (await run_agent(runtime, "go", model=MODEL, tools=tools, thread="t", turn="1")).text == "done"
            else:
                assert await JournaledAgent(runtime, MODEL, tools, **KEY).run(converse) == "done"
        assert provider.count == 2
    assert effects.done == [("one", "a"), ("two", "b")]


@pytest.mark.asyncio
@pytest.mark.parametrize("way", ["task", "scope"])
@pytest.mark.parametrize("entered", ["run", "block"])
async def test_a_cancellation_comes_once_a_tool_has_cleaned_up_after_itself(
    tmp_path: Path, store: Path, way: str, entered: str
) -> None:
    gate, cleaned = Gate(), asyncio.Event()

    async def handler(arguments: dict[str, Any]) -> str:
        try:
            await gate.pause()
        finally:
            with anyio.CancelScope(shield=True):
                for _ in range(50):
                    await anyio.sleep(0.001)
                cleaned.set()
        return "done"

    tools = [Tool("one", handler, PUBLISH)]
    async with (
        ScriptedProvider(tmp_path / "model.db", [calls(("c1", "one", "a"))]) as provider,
        agents(store, provider, tools) as runtime,
    ):

        async def work() -> None:
            agent = JournaledAgent(runtime, MODEL, tools, **KEY)
            if entered == "run":
                await agent.run(converse)
            else:
                async with agent as bindings:
                    await converse(bindings)

        if way == "scope":
            async with cancelled_when(gate.came):
                await work()
        else:
            task = asyncio.create_task(work())
            await gate.came()
            task.cancel()
            await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert cleaned.is_set()
        assert on_disk(store, TURN.run_id) == {"m/1": "completed", "t/c1": "unknown"}


async def converse(bindings: Bindings) -> str:
    messages = [Message(role="user", content="go")]
    while True:
        sample = await bindings.model.sample(messages)
        messages += [sample.message, *await bindings.act(sample)]
        if not sample.message.tool_calls:
            return sample.message.content


@pytest.mark.asyncio
@pytest.mark.parametrize("way", ["turn", "run_agent"])
async def test_cancelled_before_anything_was_received_a_model_call_is_refused(
    tmp_path: Path, store: Path, way: str
) -> None:
    async with ScriptedProvider(tmp_path / "model.db", [Stall(), Text("done")]) as provider:
        async with agents(store, provider) as runtime:

            async def work() -> str:
                if way == "turn":
                    return await runtime.turn(TURN, lambda ctx: talk(ctx, request()))
                return (await run_agent(runtime, "go", model=MODEL, thread="t", turn="1")).text

            async with cancelled_when(lambda: provider.wait_for(stalled=1)):
                await work()
            assert set(on_disk(store, TURN.run_id if way == "turn" else AGENT.run_id).values()) == {"refused"}
            assert await work() == "done"
        assert provider.count == 2


@pytest.mark.asyncio
async def test_a_model_call_that_the_framework_gives_up_stops_the_turn(tmp_path: Path, store: Path) -> None:
    """Its own timeout: what it would ask next is the same decision again."""
    script: list[Reply] = [Stall(Text("late"), when="mid_body"), Text("done")]
    async with ScriptedProvider(tmp_path / "model.db", script) as provider:

        async def agent(ctx: Any) -> str:
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as group:

                    async def give_up() -> None:
                        await provider.wait_for(stalled=1)
                        scope.cancel()

                    group.start_soon(give_up)
                    await ctx.sample(request(stream=True))
            return await talk(ctx, request(stream=True))

        async with agents(store, provider) as runtime:
            with pytest.raises(StepError, match="gave it up") as raised:
                await runtime.turn(TURN, agent)
            assert raised.value.code == "turn.given_up"
            assert provider.count == 1
            if on_disk(store, TURN.run_id)["m/1"] == "unknown":
                with pytest.raises(UnknownOutcomeError):
                    await runtime.turn(TURN, lambda ctx: talk(ctx, request(stream=True)))
                await runtime.resolve(TURN.run_id, "m/1", actor="mia", reason="again", ask_again=True)
            assert await runtime.turn(TURN, lambda ctx: talk(ctx, request(stream=True))) == "done"
        assert provider.count == 2


@pytest.mark.asyncio
async def test_a_tool_that_the_framework_gives_up_is_drained_and_stops_the_turn(tmp_path: Path, store: Path) -> None:
    """The model would be told that it timed out, and the record says that it was done."""
    effects, gate = Effects(), Gate()
    tools = [gated(effects, "one", gate)]

    async def agent(ctx: Any) -> str:
        first = await ctx.sample(request())
        async with anyio.create_task_group() as group:

            async def act() -> None:
                await ctx.call("one", "c1", {"text": "a"})

            group.start_soon(act)
            await gate.came()
            group.cancel_scope.cancel()
        asyncio.get_running_loop().call_later(0.01, gate.open)
        told = Message(role="tool", content="it timed out", tool_call_id="c1")
        return await talk(ctx, request(Message(role="user", content="go"), first.message, told))

    async with (
        ScriptedProvider(tmp_path / "model.db", [calls(("c1", "one", "a")), Text("done")]) as provider,
        agents(store, provider, tools) as runtime,
    ):
        with pytest.raises(StepError, match="tool call c1 was given up by its caller"):
            await runtime.turn(TURN, agent)
        assert on_disk(store, TURN.run_id) == {"m/1": "completed", "t/c1": "completed"}
        assert await runtime.turn(TURN, lambda ctx: talk(ctx, request())) == "done"
        assert provider.count == 2
    assert effects.done == [("one", "a")]


# SIGTERM

PROGRAM = """
import asyncio, json, signal, sys
from pathlib import Path
from tests.crash.world import World
from tests.journal.program import Agent, open_runtime

async def main(order):
    agent = Agent(order, World(Path(order["world"])))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asyncio.current_task().cancel)
    async with open_runtime(order, agent) as runtime:
        print("open", flush=True)
        try:
            print(await agent.run(runtime), flush=True)
        finally:
            print("let go of", flush=True)

asyncio.run(main(json.loads(sys.argv[1])))
"""


@pytest.mark.parametrize("way", ["agent", "run_agent"])
def test_sigterm_inside_a_tool_lets_go_of_the_turn_and_the_next_process_goes_on(
    nursery: Any, model: Any, tmp_path: Path, start_child: Any, way: str
) -> None:
    case = Case(nursery, model, tmp_path / "case", way=way, tools=3)
    case.folder.mkdir()
    child: Child = start_child(PROGRAM, json.dumps({**case.order, "wait_in": "look"}, default=str))
    assert [child.line(), child.line()] == ["open", "in look"]
    child.terminate()
    assert child.line() == "let go of"
    assert child.end()[0] != 0
    assert case.rows("SELECT status, owner FROM ditto_runs") == [("interrupted", None)]
    assert case.effects == {"notify 0": 1, "publish 0": 1}
    assert case.result() == {"text": "done", "decided": []}
    assert (case.requests, case.effects) == (2, {"notify 0": 1, "publish 0": 1, "look 0": 1})


@pytest.mark.asyncio
async def test_a_block_that_is_cancelled_again_and_again_ends_once_its_tools_have(tmp_path: Path, store: Path) -> None:
    begun, cleaned = anyio.Event(), anyio.Event()
    ended: list[str] = []

    async def handler(arguments: dict[str, Any]) -> str:
        begun.set()
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await cleaned.wait()
            ended.append("tool")
        return ""

    tools = [Tool("one", handler, PUBLISH)]
    script: list[Reply] = [calls(("c1", "one", "a"))]
    async with ScriptedProvider(tmp_path / "model.db", script) as provider, agents(store, provider, tools) as runtime:

        async def work() -> None:
            async with JournaledAgent(runtime, MODEL, tools, **KEY) as bindings:
                sample = await bindings.model.sample([Message(role="user", content="go")])
                await bindings.act(sample)

        working = asyncio.ensure_future(work())
        await begun.wait()
        for _ in range(4):
            working.cancel()
            for _ in range(20):
                await asyncio.sleep(0)
            assert not working.done()
        cleaned.set()
        await asyncio.wait([working])
        ended.append("block")
        assert working.cancelled()
        assert (await runtime.get(TURN.run_id)).status == "unknown"
    assert ended == ["tool", "block"]


@pytest.mark.asyncio
async def test_a_block_that_is_cancelled_before_it_begins_leaves_nothing_behind(tmp_path: Path, store: Path) -> None:
    async with (
        ScriptedProvider(tmp_path / "model.db", []) as provider,
        agents(store, provider) as runtime,
        JournaledAgent(runtime, MODEL, **KEY),
    ):
        before = asyncio.all_tasks()

        async def wait_for_it() -> None:
            async with JournaledAgent(runtime, MODEL, **KEY):
                pytest.fail("the turn is another block's")

        waiting = asyncio.ensure_future(wait_for_it())
        for _ in range(20):
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled()
        assert asyncio.all_tasks() - {waiting} == before


# Deadlines


@pytest.mark.asyncio
@pytest.mark.parametrize("way", ["turn", "run_agent"])
@pytest.mark.parametrize("effect", ["write", "read", "idempotent"])
async def test_a_tool_that_misses_its_deadline(tmp_path: Path, store: Path, way: str, effect: str) -> None:
    """A write is unknown; of anything else the model is told."""
    effects = Effects()
    tools = [gated(effects, "one", Gate(), effect=effect, timeout_s=0.05)]
    async with (
        ScriptedProvider(tmp_path / "model.db", [calls(("c1", "one", "a")), Text("done")]) as provider,
        agents(store, provider, tools) as runtime,
    ):

        async def work() -> str:
            if way == "turn":
                return await runtime.turn(TURN, lambda ctx: talk(ctx, request()))
            return (await run_agent(runtime, "go", model=MODEL, tools=tools, thread="t", turn="1")).text

        if effect == "write":
            for _ in range(2):
                with pytest.raises(UnknownOutcomeError, match="missed its deadline"):
                    await work()
            assert provider.count == 1
        else:
            assert await work() == "done"
            assert "missed its deadline" in str(provider.requests()[1].text)
    assert effects.done == [("one", "a")]


@pytest.mark.asyncio
@pytest.mark.parametrize("way", ["turn", "run_agent"])
async def test_a_model_that_does_not_answer_in_time_is_unknown(tmp_path: Path, store: Path, way: str) -> None:
    slow = {"scripted": ProviderConfig(timeout_s=0.3)}
    async with (
        ScriptedProvider(tmp_path / "model.db", [Stall()]) as provider,
        agents(store, provider, providers=slow) as runtime,
    ):
        for _ in range(2):
            with pytest.raises(UnknownOutcomeError, match=r"no complete answer within 0\.3 s"):
                if way == "turn":
                    await runtime.turn(TURN, lambda ctx: talk(ctx, request()))
                else:
                    await run_agent(runtime, "go", model=MODEL, thread="t", turn="1")
        assert provider.count == 1


# The next turn of the thread


@pytest.mark.asyncio
@pytest.mark.parametrize("cut", ["after the answer", "during the first", "between the tools"])
async def test_o01_the_next_turn_of_a_cut_thread_is_accepted_by_a_strict_provider(
    tmp_path: Path, store: Path, cut: str
) -> None:
    effects, gate = Effects(), Gate()
    slow = gated(effects, "one", gate) if cut == "during the first" else effects.tool("one")
    tools = [slow, gated(effects, "two", gate) if cut == "between the tools" else effects.tool("two")]
    messages = [Message(role="user", content="go")]

    async def agent(bindings: Bindings) -> str:
        """Keeps the conversation in a list of its own, and is cut while that is not whole."""
        sample = await bindings.model.sample(messages)
        messages.append(sample.message)
        if cut == "after the answer":
            gate.open()
            await gate.pause()
            await anyio.sleep_forever()
        for call in sample.message.tool_calls:
            result = await bindings.tools[call.name](call.id, json.loads(call.arguments))
            messages.append(Message(role="tool", content=result.content, tool_call_id=call.id))
        return ""

    script: list[Reply] = [TWO, Text("never mind")]
    async with ScriptedProvider(tmp_path / "model.db", script, strict=True) as provider:
        async with agents(store, provider, tools) as runtime, cancelled_when(gate.came):
            await JournaledAgent(runtime, MODEL, tools, **KEY).run(agent)
        done, recorded = list(effects.done), on_disk(store, TURN.run_id)
        kept = list(messages)
        mended = mend_history(messages)
        assert messages == kept
        async with agents(store, provider, tools) as runtime:

            async def goes_on(bindings: Bindings) -> str:
                following = [*mended, Message(role="user", content="what of it?")]
                return (await bindings.model.sample(following)).message.content

            assert await JournaledAgent(runtime, MODEL, tools, **{**KEY, "turn": "turn-2"}).run(goes_on) == "never mind"
        assert [request.refused for request in provider.requests()] == [None, None]
    assert effects.done == done
    assert on_disk(store, TURN.run_id) == recorded
    told = {message.tool_call_id: message.content for message in mended if message.role == "tool"}
    assert set(told) == {"c1", "c2"}
    assert "unknown" in told["c2"]
    assert told["c1"] == "one:a" if cut == "between the tools" else "unknown" in told["c1"]


@pytest.mark.asyncio
@pytest.mark.parametrize("way", ["agent", "run_agent"])
async def test_c07_what_ended_in_a_cut_batch_goes_into_the_next_request(tmp_path: Path, store: Path, way: str) -> None:
    effects, gate = Effects(), Gate()
    tools = [effects.tool("one"), effects.tool("two"), gated(effects, "three", gate)]
    batch = calls(("c1", "one", "a"), ("c2", "two", "b"), ("c3", "three", "c"))

    async def converse(bindings: Bindings) -> str:
        sample = await bindings.model.sample([Message(role="user", content="go")])
        await bindings.act(sample)
        return ""

    async with ScriptedProvider(tmp_path / "model.db", [batch, Text("I see")], strict=True) as provider:
        async with agents(store, provider, tools) as runtime, cancelled_when(gate.came):
            if way == "agent":
                await JournaledAgent(runtime, MODEL, tools, **KEY, max_concurrency=3).run(converse)
            else:
                await run_agent(runtime, "go", model=MODEL, tools=tools, thread="t", turn="1", model_key="any")
        done = list(effects.done)
        async with agents(store, provider, tools) as runtime:
            cut = await runtime.get(TURN.run_id if way == "agent" else AGENT.run_id)
            messages = [Message(role="user", content="go"), *recorded_messages(cut)]
            messages.append(Message(role="user", content="and what of the third?"))
            result = await run_agent(runtime, messages, model=MODEL, tools=tools, thread="t", turn="2")
            assert result.text == "I see"
        asked = provider.requests()[1].body["messages"]
    sent = {each["tool_call_id"]: each["content"] for each in asked if each["role"] == "tool"}
    assert (sent["c1"], sent["c2"]) == ("one:a", "two:b")
    assert "unknown" in sent["c3"]
    assert effects.done == done
    assert sorted(done) == [("one", "a"), ("three", "c"), ("two", "b")]


@pytest.mark.asyncio
async def test_a_read_of_ones_own_that_is_cut_three_times_has_failed_for_good(tmp_path: Path, store: Path) -> None:
    """A cut try is one that never ended, whoever cut it. There is no result for the model, so the turn fails."""
    begun = 0

    async def look(ctx: Any) -> str:
        nonlocal begun
        begun += 1
        gate.set()
        await anyio.sleep_forever()
        return ""

    def plan() -> Action:
        return Action("look", EffectClass.READ, look, is_async=True)

    async def agent(ctx: Any) -> Any:
        return await ctx.invoke("c1", "look", {}, plan)

    async with ScriptedProvider(tmp_path / "model.db", []) as provider, agents(store, provider) as runtime:
        for tries in (1, 2, 3):
            gate = anyio.Event()
            async with cancelled_when(gate.wait):
                await runtime.turn(TURN, agent)
            assert begun == tries
            assert on_disk(store, TURN.run_id) == {"t/c1": "open"}
        for _ in range(2):
            with pytest.raises(StepError, match="look was begun 3 times") as raised:
                await runtime.turn(TURN, agent)
            assert raised.value.code == "step.never_ended"
    assert begun == 3
