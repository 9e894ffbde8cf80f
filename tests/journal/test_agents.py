"""The ways in: an agent of one's own, ditto's own, and the bridge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ditto import DefinitionError, Message
from ditto.journal import Bindings, JournaledAgent, SavedCall, SavedTurn, replay_saved_turn, run_agent
from ditto.testing.provider import Reply, ScriptedProvider, Text
from tests.journal.scene import MODEL, Effects, agents, calls

pytestmark = pytest.mark.asyncio

KEY: dict[str, Any] = {"namespace": "report-v1", "thread": "thread-1", "turn": "turn-1", "model_key": "tiny/1"}


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "ditto.db"


async def converse(bindings: Bindings) -> str:
    messages = [Message(role="user", content="go")]
    while True:
        sample = await bindings.model.sample(messages)
        messages += [sample.message, *await bindings.act(sample)]
        if not sample.message.tool_calls:
            return sample.message.content


async def test_an_agent_works_in_a_function_and_in_a_block(tmp_path: Path, store: Path) -> None:
    effects = Effects()
    publish = effects.tool("publish")
    script: list[Reply] = [calls(("c1", "publish", "a")), Text("done"), calls(("c1", "publish", "b")), Text("well")]
    async with (
        ScriptedProvider(tmp_path / "model.db", script) as provider,
        agents(store, provider, [publish]) as runtime,
    ):
        assert await JournaledAgent(runtime, MODEL, [publish], **KEY).run(converse) == "done"
        assert await JournaledAgent(runtime, MODEL, [publish], **KEY).run(converse) == "done"
        second = JournaledAgent(runtime, MODEL, [publish], **{**KEY, "turn": "turn-2"})
        async with second as bindings:
            assert await converse(bindings) == "well"
        with pytest.raises(DefinitionError, match="completed"):
            async with second:
                pass
        assert provider.count == 4
    assert effects.done == [("publish", "a"), ("publish", "b")]


async def test_dittos_own_agent_is_a_loop(tmp_path: Path, store: Path) -> None:
    effects = Effects()
    publish = effects.tool("publish")
    script: list[Reply] = [
        calls(("c1", "publish", "a"), ("c1", "publish", "b"), ("c9", "nothing", "x")),
        calls(("c1", "publish", "c")),
        Text("done"),
    ]
    async with ScriptedProvider(tmp_path / "model.db", script, strict=True) as provider:
        results = []
        for _ in range(2):
            async with agents(store, provider, [publish]) as runtime:
                results.append(
                    await run_agent(runtime, "go", model=MODEL, tools=[publish], thread="thread-1", turn="turn-1")
                )
        result = results[0]
        assert results == [result, result]
        assert (result.text, result.steps, result.finish_reason) == ("done", 3, "stop")
        assert provider.count == 3
    assert sorted(effects.done) == [("publish", "a"), ("publish", "b"), ("publish", "c")]
    ids = [call.id for message in result.messages for call in message.tool_calls]
    assert len(set(ids)) == len(ids) == 4
    told = [message.content for message in result.messages if message.role == "tool"]
    assert "no tool is called 'nothing'" in told[2]


async def test_a_saved_turn_is_replayed_without_a_model(tmp_path: Path, store: Path) -> None:
    effects = Effects()
    publish = effects.tool("publish")
    saved = SavedTurn("thread-1", "turn-1", tuple(SavedCall(f"c{n}", "publish", {"text": str(n)}) for n in range(3)))
    async with ScriptedProvider(tmp_path / "model.db", []) as provider, agents(store, provider, [publish]) as runtime:
        for _ in range(2):
            results = await replay_saved_turn(saved, runtime, [publish], namespace="review")
            assert [(call_id, result.content) for call_id, result in results] == [
                (f"c{n}", f"publish:{n}") for n in range(3)
            ]
        wrong = SavedTurn("thread-1", "turn-2", (*saved.tool_calls, SavedCall("c4", "nothing", {})))
        with pytest.raises(DefinitionError, match="nothing"):
            await replay_saved_turn(wrong, runtime, [publish], namespace="review")
        assert provider.count == 0
    assert len(effects.done) == 3
