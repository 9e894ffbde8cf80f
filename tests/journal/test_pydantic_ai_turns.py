"""Turns of Pydantic AI's agents: which run is which turn, drift, approvals, and agents within tools."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic_ai import Agent, ApprovalRequired, CallDeferred, DeferredToolRequests, DeferredToolResults, RunContext
from pydantic_ai.models.test import TestModel

from ditto import DefinitionError, ReplayMismatchError, RunConflictError, Runtime, StepError, Turn
from ditto.journal.pydantic_ai import DittoDurability, current_step
from ditto.testing.provider import Call, Failure, Reply, ScriptedProvider, Text, ToolCalls
from tests.journal.pydantic_scene import KEY, durable, openai_model

pytestmark = pytest.mark.asyncio

CALL = ToolCalls([Call("c1", "publish", '{"text": "a"}')])


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "ditto.db"


# Which turn a run is


async def test_one_agent_serves_many_turns(tmp_path: Path, store: Path) -> None:
    script: list[Reply] = [Text("one"), Text("two")]
    async with ScriptedProvider(tmp_path / "model.db", script) as provider, durable(store) as runtime:
        agent: Agent[Any, str] = Agent(
            openai_model(provider.base_url),
            capabilities=[
                DittoDurability(
                    runtime, namespace="shop", thread=lambda ctx: ctx.deps["user"], turn=lambda ctx: str(ctx.run_id)
                )
            ],
        )
        for _ in range(2):
            first = await agent.run("go", deps={"user": "ada"}, run_id="1")
            assert first.output == "one"
            named = {"ditto": {"thread": "ada", "turn": "2"}}
            second = await agent.run("on", deps=None, message_history=first.all_messages(), metadata=named)
            assert second.output == "two"
        assert provider.count == 2
        for turn in ("1", "2"):
            info = await runtime.get(Turn("shop", "ada", turn, "any").run_id)
            assert info.kind == "turn"
            assert info.status == "completed"


async def test_a_run_may_bring_the_capability_itself(tmp_path: Path, store: Path) -> None:
    async with ScriptedProvider(tmp_path / "model.db", [Text("one")]) as provider, durable(store) as runtime:
        agent = Agent(openai_model(provider.base_url))
        for _ in range(2):
            result = await agent.run("go", capabilities=[DittoDurability(runtime, **KEY)])
            assert result.output == "one"
        assert provider.count == 1


async def test_a_run_that_names_no_turn_is_refused(store: Path) -> None:
    async with durable(store) as runtime:
        agent = Agent(TestModel(), capabilities=[DittoDurability(runtime, namespace="shop")])
        with pytest.raises(DefinitionError, match="which turn is this run"):
            await agent.run("go")
        with pytest.raises(DefinitionError, match="takes thread and turn"):
            await agent.run("go", metadata={"ditto": {"id": "1"}})
        with pytest.raises(DefinitionError, match="thread must"):
            await agent.run("go", metadata={"ditto": {"thread": "", "turn": "1"}})


# Drift


Make = Callable[..., Agent[None, Any]]


def publisher(runtime: Runtime, base_url: str, **changed: Any) -> Agent[None, Any]:
    options: dict[str, Any] = {"instructions": "Publish.", "model_settings": {"temperature": 0.1}}
    tool = changed.pop("tool", "Publishes a text.")
    durability = {**KEY, "model_key": changed.pop("model_key", "tiny/1")}
    agent = Agent(
        openai_model(base_url), **{**options, **changed}, capabilities=[DittoDurability(runtime, **durability)]
    )

    @agent.tool_plain(description=tool)
    async def publish(text: str) -> str:
        return f"{text} is out"

    return agent


@pytest.mark.parametrize(
    ("changed", "prompt", "named"),
    [
        ({}, "stop", r"messages\[0\].parts\[0\].content"),
        ({"instructions": "Publish nothing."}, "go", r"messages\[0\].instructions"),
        ({"model_settings": {"temperature": 0.2}}, "go", "settings.temperature"),
        ({"tool": "Publishes a text, twice."}, "go", r"tools\[0\].description"),
        ({"output_type": [str, int]}, "go", "output"),
    ],
    ids=["prompt", "instructions", "temperature", "tool", "output"],
)
async def test_a_changed_agent_is_a_conflict_and_touches_nothing(
    tmp_path: Path, store: Path, changed: dict[str, Any], prompt: str, named: str
) -> None:
    async with ScriptedProvider(tmp_path / "model.db", [CALL, Failure(500)]) as provider:
        async with durable(store) as runtime:
            with pytest.raises(StepError):
                await publisher(runtime, provider.base_url).run("go")
        async with durable(store) as runtime:
            with pytest.raises(ReplayMismatchError, match=named):
                await publisher(runtime, provider.base_url, **changed).run(prompt)
        assert provider.count == 2


async def test_another_model_key_is_a_conflict(tmp_path: Path, store: Path) -> None:
    async with ScriptedProvider(tmp_path / "model.db", [Text("done")]) as provider, durable(store) as runtime:
        await publisher(runtime, provider.base_url).run("go")
        with pytest.raises(RunConflictError):
            await publisher(runtime, provider.base_url, model_key="tiny/2").run("go")
        assert provider.count == 1


async def test_what_only_says_how_a_request_travels_is_no_drift(tmp_path: Path, store: Path) -> None:
    """Another address, time-out, header or number of retries, and another day."""
    settings = {"temperature": 0.1, "timeout": 3.0, "extra_headers": {"x-trace": "1"}, "max_retries": 4}
    async with (
        ScriptedProvider(tmp_path / "one.db", [CALL, Failure(500)]) as one,
        ScriptedProvider(tmp_path / "two.db", [Text("done")]) as two,
    ):
        async with durable(store) as runtime:
            with pytest.raises(StepError):
                await publisher(runtime, one.base_url).run("go", run_id="first", conversation_id="first")
        async with durable(store) as runtime:
            result = await publisher(runtime, two.base_url, model_settings=settings).run("go")
            assert result.output == "done"
        assert (one.count, two.count) == (2, 1)


# Approvals and deferred calls


async def test_a_call_that_needs_approval_is_made_in_the_turn_after_it(tmp_path: Path, store: Path) -> None:
    done: list[str] = []
    script: list[Reply] = [
        ToolCalls([Call("c1", "publish", '{"text": "a"}'), Call("c2", "erase", '{"text": "b"}')]),
        Text("done"),
    ]

    def report(runtime: Runtime, base_url: str) -> Agent[None, Any]:
        agent = Agent(
            openai_model(base_url),
            output_type=[str, DeferredToolRequests],
            capabilities=[DittoDurability(runtime, namespace="shop", thread="ada")],
        )

        @agent.tool_plain(requires_approval=True)
        async def publish(text: str) -> str:
            done.append(f"publish {text}")
            return "out"

        @agent.tool
        async def erase(ctx: RunContext[None], text: str) -> str:
            if not ctx.tool_call_approved:
                raise ApprovalRequired(metadata={"why": "it is final"})
            done.append(f"erase {text}")
            return "gone"

        return agent

    async with ScriptedProvider(tmp_path / "model.db", script, strict=True) as provider:
        for _ in range(2):
            async with durable(store) as runtime:
                agent = report(runtime, provider.base_url)
                asked = await agent.run("go", metadata={"ditto": {"turn": "1"}})
                assert isinstance(asked.output, DeferredToolRequests)
                assert sorted(call.tool_call_id for call in asked.output.approvals) == ["c1", "c2"]
                assert asked.output.metadata == {"c2": {"why": "it is final"}}
                answers = DeferredToolResults(approvals={"c1": True, "c2": True})
                with pytest.raises(ReplayMismatchError, match=r"(start another turn|differs in)"):
                    await agent.run(
                        message_history=asked.all_messages(),
                        deferred_tool_results=answers,
                        metadata={"ditto": {"turn": "1"}},
                    )
                result = await agent.run(
                    message_history=asked.all_messages(),
                    deferred_tool_results=answers,
                    metadata={"ditto": {"turn": "2"}},
                )
                assert result.output == "done"
        assert provider.count == 2
    assert sorted(done) == ["erase b", "publish a"]


async def test_a_deferred_call_is_deferred_once(tmp_path: Path, store: Path) -> None:
    queued: list[str] = []
    async with ScriptedProvider(tmp_path / "model.db", [CALL]) as provider:
        for _ in range(2):
            async with durable(store) as runtime:
                agent = Agent(
                    openai_model(provider.base_url),
                    output_type=[str, DeferredToolRequests],
                    capabilities=[DittoDurability(runtime, **KEY)],
                )

                @agent.tool_plain
                async def publish(text: str) -> str:
                    queued.append(text)
                    raise CallDeferred(metadata={"job": 7})

                result = await agent.run("go")
                assert isinstance(result.output, DeferredToolRequests)
                assert result.output.metadata == {"c1": {"job": 7}}
        assert provider.count == 1
    assert queued == ["a"]


# Agents within tools


def editor(runtime: Runtime, base_url: str, *, durable_inside: bool, acted: list[str]) -> Agent[None, str]:
    """An agent that asks another one within its tool, twice."""
    inside = [DittoDurability(runtime, namespace="writer")] if durable_inside else []
    writer = Agent(openai_model(base_url), capabilities=inside, name="writer")

    @writer.tool_plain
    async def note(text: str) -> str:
        acted.append(f"note {text}")
        return "noted"

    agent = Agent(openai_model(base_url), capabilities=[DittoDurability(runtime, **KEY)], name="editor")

    @agent.tool_plain(metadata={"ditto": {"effect": "idempotent"}})
    async def write(text: str) -> str:
        acted.append(f"write {text} at {current_step().attempt}")
        first = await writer.run(f"first {text}")
        second = await writer.run(f"second {text}")
        return f"{first.output}, {second.output}"

    return agent


def writers(request: dict[str, Any], index: int) -> Reply:
    """One script for both: what is asked decides."""
    said = [message["content"] for message in request["messages"]]
    if said[0] == "go":
        told = any(message["role"] == "tool" for message in request["messages"])
        return Text("done") if told else ToolCalls([Call("c1", "write", '{"text": "a"}')])
    if said[0] == "second a" and index == 3:
        return Failure(400)
    if said[-1] != "noted":
        return ToolCalls([Call("c1", "note", f'{{"text": "{said[0]}"}}')])
    return Text(f"text of {said[0]}")


async def test_a_durable_agent_within_a_tool_has_turns_of_its_own(tmp_path: Path, store: Path) -> None:
    """The second one fails: the first one's turn is completed, and is not lived again when the tool is run again."""
    acted: list[str] = []
    async with ScriptedProvider(tmp_path / "model.db", writers) as provider:
        async with durable(store) as runtime:
            with pytest.raises(StepError, match="400"):
                await editor(runtime, provider.base_url, durable_inside=True, acted=acted).run("go")
        assert acted == ["write a at 1", "note first a"]
        assert provider.count == 4
        for _ in range(2):
            async with durable(store) as runtime:
                agent = editor(runtime, provider.base_url, durable_inside=True, acted=acted)
                result = await agent.run("go")
                assert result.output == "done"
                assert "text of first a, text of second a" in str(result.all_messages())
                for number in (1, 2):
                    inner = Turn("writer", "thread-1", f"turn-1/c1/{number}", "any")
                    assert (await runtime.get(inner.run_id)).status == "completed"
        assert provider.count == 4 + 3
    assert acted == ["write a at 1", "note first a", "write a at 2", "note second a"]


async def test_another_agent_within_a_tool_is_part_of_its_effect(tmp_path: Path, store: Path) -> None:
    """Without the capability nothing of it is recorded: run again, it asks and acts again."""
    acted: list[str] = []
    async with ScriptedProvider(tmp_path / "model.db", writers) as provider:
        async with durable(store) as runtime:
            with pytest.raises(StepError, match="400"):
                await editor(runtime, provider.base_url, durable_inside=False, acted=acted).run("go")
        async with durable(store) as runtime:
            assert (await editor(runtime, provider.base_url, durable_inside=False, acted=acted).run("go")).output
            assert len(await runtime.runs()) == 1
    assert acted == ["write a at 1", "note first a", "write a at 2", "note first a", "note second a"]
