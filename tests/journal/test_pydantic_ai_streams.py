"""Streams of a durable agent of Pydantic AI's: text at once, tools when the answer is kept, the same text on replay."""

from __future__ import annotations

import json
from collections.abc import AsyncIterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest
from pydantic_ai import Agent, AgentStreamEvent, RunContext
from pydantic_ai.messages import (
    FunctionToolCallEvent,
    FunctionToolResultEvent,
    ModelResponse,
    PartDeltaEvent,
    PartStartEvent,
    TextPart,
    TextPartDelta,
    ThinkingPart,
    ThinkingPartDelta,
    ToolCallPart,
)

from ditto import Piece, ReplayMismatchError, Restarted, Runtime, Turn, UnknownOutcomeError
from ditto.journal.pydantic_ai import DittoDurability
from ditto.testing.provider import Call, Reply, ScriptedProvider, Stall, StreamCut, Text, ToolCalls
from tests.journal.pydantic_scene import KEY, durable, openai_model

pytestmark = pytest.mark.asyncio

RUN_ID = Turn(**KEY, model_key="any").run_id

CALLS = ToolCalls([Call("c1", "publish", '{"text": "a"}')], content="I publish it now.", reasoning="It is ready.")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "ditto.db"


def publisher(runtime: Runtime, base_url: str, done: list[str], **options: Any) -> Agent[None, str]:
    agent = Agent(openai_model(base_url), capabilities=[DittoDurability(runtime, **{**KEY, **options})])

    @agent.tool_plain
    async def publish(text: str) -> str:
        done.append(text)
        return f"{text} is out"

    return agent


class Watcher:
    """An event stream handler: what it is shown, in order, text put together."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.text = ""

    async def __call__(self, ctx: RunContext[Any], events: AsyncIterable[AgentStreamEvent]) -> None:
        async for event in events:
            match event:
                case (
                    PartStartEvent(part=TextPart(content=text))
                    | PartDeltaEvent(delta=TextPartDelta(content_delta=text))
                ):
                    self._add("text", text)
                case PartStartEvent(part=ThinkingPart()) | PartDeltaEvent(delta=ThinkingPartDelta()):
                    self._add("thinking", "")
                case PartStartEvent(part=ToolCallPart(tool_name=name)):
                    self.seen.append(f"asks for {name}")
                case FunctionToolCallEvent():
                    self.seen.append("calls")
                case FunctionToolResultEvent():
                    self.seen.append("came to")

    def _add(self, what: str, text: str) -> None:
        self.text += text
        if not self.seen or self.seen[-1] != what:
            self.seen.append(what)


async def test_a_handler_sees_the_same_then_and_on_replay(tmp_path: Path, store: Path) -> None:
    done: list[str] = []
    watchers = []
    async with ScriptedProvider(tmp_path / "model.db", [CALLS, Text("It is published.")]) as provider:
        for _ in range(2):
            async with durable(store) as runtime:
                watchers.append(Watcher())
                result = await publisher(runtime, provider.base_url, done).run("go", event_stream_handler=watchers[-1])
                assert result.output == "It is published."
        assert provider.count == 2
    assert done == ["a"]
    assert watchers[0].seen == ["thinking", "text", "asks for publish", "calls", "came to", "text"]
    assert watchers[1].seen == watchers[0].seen
    assert watchers[1].text == watchers[0].text == "I publish it now.It is published."


@pytest.mark.parametrize("final", [False, True], ids=["with a call", "the end"])
async def test_text_comes_while_the_provider_still_speaks_and_a_tool_does_not(
    tmp_path: Path, store: Path, final: bool
) -> None:
    """The provider stops in the middle of its answer: the consumer has seen text by then, and nothing of a call."""
    done: list[str] = []
    stalled = Stall(Text("It is published.") if final else CALLS, when="mid_body")
    script: list[Reply] = [CALLS, stalled] if final else [stalled, Text("It is published.")]
    async with ScriptedProvider(tmp_path / "model.db", script) as provider, durable(store) as runtime:
        agent = publisher(runtime, provider.base_url, done)
        watcher = Watcher()
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: agent.run("go", event_stream_handler=watcher))
            await provider.wait_for(stalled=1)
            with anyio.fail_after(30):
                while len(watcher.text) <= (len("I publish it now.") if final else 0):
                    await anyio.lowlevel.checkpoint()
            assert done == (["a"] if final else [])
            assert ("asks for publish" in watcher.seen) == final
            step = (await runtime.get(RUN_ID)).step("m/2" if final else "m/1")
            assert step is not None
            assert step.state == "admitted"
            provider.release()
        assert done == ["a"]
        assert watcher.text == "I publish it now.It is published."


async def test_a_call_is_shown_when_its_answer_is_durable(tmp_path: Path, store: Path) -> None:
    """Seen from outside, by another connection to the file, at the moment at which the consumer hears of it."""
    import sqlite3
    from contextlib import closing

    states: list[str] = []

    async def watch(ctx: RunContext[Any], events: AsyncIterable[AgentStreamEvent]) -> None:
        async for event in events:
            if isinstance(event, PartStartEvent) and isinstance(event.part, ToolCallPart):
                with closing(sqlite3.connect(store)) as db:
                    states.extend(state for (state,) in db.execute("SELECT state FROM ditto_steps WHERE path = 'm/1'"))

    async with ScriptedProvider(tmp_path / "model.db", [CALLS, Text("done")]) as provider, durable(store) as runtime:
        await publisher(runtime, provider.base_url, []).run("go", event_stream_handler=watch)
    assert states == ["completed"]


async def test_who_listens_to_the_run_is_told_the_text_too(tmp_path: Path, store: Path) -> None:
    """While it comes, and again afterwards, from what was kept of it."""
    calls = replace(CALLS, reasoning=None)

    async def heard(runtime: Runtime) -> list[tuple[str, str]]:
        told: dict[str, str] = {}
        async for each in runtime.listen(RUN_ID):
            match each:
                case Piece(kind="text"):
                    told[each.step] = told.get(each.step, "") + each.text
                case Restarted():
                    told.pop(each.step, None)
        return list(told.items())

    async with ScriptedProvider(tmp_path / "model.db", [calls, Text("It is published.")]) as provider:
        async with durable(store) as runtime:
            agent = publisher(runtime, provider.base_url, [])
            told: list[tuple[str, str]] = []

            async def listen() -> None:
                told.extend(await heard(runtime))

            async with anyio.create_task_group() as group:
                group.start_soon(lambda: agent.run("go", event_stream_handler=Watcher()))
                await provider.wait_for(arrived=1)
                group.start_soon(listen)
            assert told == [("m/1", "I publish it now."), ("m/2", "It is published.")]
        async with durable(store) as runtime:
            assert await heard(runtime) == told


async def test_text_of_a_run_stream_comes_as_it_is_spoken_and_again_on_replay(tmp_path: Path, store: Path) -> None:
    texts = []
    async with ScriptedProvider(tmp_path / "model.db", [Text("one two three four")]) as provider:
        for _ in range(2):
            async with durable(store) as runtime:
                agent = publisher(runtime, provider.base_url, [])
                async with agent.run_stream("go") as result:
                    texts.append([piece async for piece in result.stream_text(delta=True, debounce_by=None)])
                    assert await result.get_output() == "one two three four"
        assert provider.count == 1
    live, replayed = texts
    assert len(live) > 1
    assert "".join(live) == "".join(replayed) == "one two three four"


async def test_nodes_may_be_driven_and_streamed_by_hand(tmp_path: Path, store: Path) -> None:
    done: list[str] = []
    async with ScriptedProvider(tmp_path / "model.db", [CALLS, Text("done")]) as provider:
        for _ in range(2):
            async with durable(store) as runtime:
                agent = publisher(runtime, provider.base_url, done)
                async with agent.iter("go") as run:
                    async for node in run:
                        if Agent.is_model_request_node(node):
                            async with node.stream(run.ctx) as pieces:
                                async for _piece in pieces:
                                    pass
                assert run.result is not None
                assert run.result.output == "done"
        assert provider.count == 2
    assert done == ["a"]


async def test_a_stream_that_is_cut_releases_no_tool(tmp_path: Path, store: Path) -> None:
    """The call had come as a whole; only the end is missing."""
    done: list[str] = []
    watcher = Watcher()
    chunks = 8
    async with ScriptedProvider(tmp_path / "model.db", [StreamCut(chunks, CALLS)]) as provider:
        for _ in range(2):
            async with durable(store) as runtime:
                with pytest.raises(UnknownOutcomeError):
                    await publisher(runtime, provider.base_url, done).run("go", event_stream_handler=watcher)
        assert provider.count == 1
    assert done == []
    assert "asks for publish" not in watcher.seen


async def test_a_stream_left_early_is_kept_to_its_end(tmp_path: Path, store: Path) -> None:
    async with ScriptedProvider(tmp_path / "model.db", [Text("one two three four")]) as provider:
        async with durable(store) as runtime:
            async with publisher(runtime, provider.base_url, []).run_stream("go") as result:
                async for _ in result.stream_text(delta=True, debounce_by=None):
                    break
            step = (await runtime.get(RUN_ID)).step("m/1")
            assert step is not None
            assert step.state == "completed"
        async with (
            durable(store) as runtime,
            publisher(runtime, provider.base_url, []).run_stream("go") as result,
        ):
            assert await result.get_output() == "one two three four"
        assert provider.count == 1


async def test_a_stream_cannot_be_cancelled_by_half(tmp_path: Path, store: Path) -> None:
    """Said clearly, where a piece of an answer would else stand for the whole. The answer is kept."""
    script: list[Reply] = [Text("one two three four")]
    async with ScriptedProvider(tmp_path / "model.db", script) as provider, durable(store) as runtime:
        agent = publisher(runtime, provider.base_url, [])
        with pytest.raises(NotImplementedError, match="cancellation is not implemented"):
            async with agent.run_stream("go") as result:
                async for _ in result.stream_text(delta=True, debounce_by=None):
                    await result.cancel()
        step = (await runtime.get(RUN_ID)).step("m/1")
        assert step is not None
        assert step.state == "completed"


@pytest.mark.parametrize(("when", "state"), [("before", "refused"), ("mid_body", "unknown")])
async def test_a_cancelled_stream_is_unknown_once_the_provider_answers(
    tmp_path: Path, store: Path, when: Any, state: str
) -> None:
    script: list[Reply] = [Stall(Text("one two three four"), when=when), Text("done")]
    async with ScriptedProvider(tmp_path / "model.db", script) as provider, durable(store) as runtime:
        agent = publisher(runtime, provider.base_url, [])
        watcher = Watcher()
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: agent.run("go", event_stream_handler=watcher))
            await provider.wait_for(stalled=1)
            with anyio.fail_after(30):
                while state == "unknown" and not watcher.text:
                    await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()
        await provider.wait_for(gone=1)
        step = (await runtime.get(RUN_ID)).step("m/1")
        assert step is not None
        assert step.state == state
        if state == "unknown":
            with pytest.raises(UnknownOutcomeError):
                await agent.run("go", event_stream_handler=Watcher())
            assert provider.count == 1
        else:
            assert (await agent.run("go", event_stream_handler=Watcher())).output == "done"
            assert provider.count == 2


async def test_generate_and_stream_are_two_requests(tmp_path: Path, store: Path) -> None:
    done: list[str] = []
    async with ScriptedProvider(tmp_path / "model.db", [CALLS, Text("done")]) as provider:
        async with durable(store) as runtime:
            await publisher(runtime, provider.base_url, done).run("go")
            with pytest.raises(ReplayMismatchError, match="differs in kind"):
                await publisher(runtime, provider.base_url, done).run("go", event_stream_handler=Watcher())
        assert provider.count == 2
    assert done == ["a"]


async def test_ids_of_streamed_calls_are_made_unique_before_anybody_sees_them(tmp_path: Path, store: Path) -> None:
    done: list[str] = []
    twice = ToolCalls([Call("c1", "publish", json.dumps({"text": text})) for text in "ab"])
    shown: list[str] = []

    async def watch(ctx: RunContext[Any], events: AsyncIterable[AgentStreamEvent]) -> None:
        shown.extend(
            [
                event.part.tool_call_id
                async for event in events
                if isinstance(event, PartStartEvent) and isinstance(event.part, ToolCallPart)
            ]
        )

    async with ScriptedProvider(tmp_path / "model.db", [twice, Text("done")]) as provider, durable(store) as runtime:
        result = await publisher(runtime, provider.base_url, done).run("go", event_stream_handler=watch)
        answers = [message for message in result.all_messages() if isinstance(message, ModelResponse)]
        assert [call.tool_call_id for call in answers[0].tool_calls] == shown == ["c1", "call_1_2"]
    assert done == ["a", "b"]
