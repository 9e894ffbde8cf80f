"""The calls that providers' answers ask for, as an agent makes them: class L of the field failures, end to end."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ditto import Message, Runtime, StepError, Tool, TurnContext
from ditto.journal import AgentResult, Bindings, JournaledAgent, mend_history, run_agent
from ditto.testing.provider import Call, Chunks, Failure, Raw, Reply, ScriptedProvider, Text, ToolCalls, sse
from ditto.turn import Turn
from tests.journal.scene import MODEL, TURN, agents, request

pytestmark = pytest.mark.asyncio

WAYS = pytest.mark.parametrize("way", ["turn", "run_agent"])

NUMBER: dict[str, Any] = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}

ANY: dict[str, Any] = {"type": "object"}


@dataclass
class Bench:
    """An agent with four tools, and what they were called with."""

    store: Path
    way: str
    done: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def tools(self) -> list[Tool]:
        return [self.tool("a"), self.tool("b"), self.tool("health"), self.tool("add", NUMBER)]

    def tool(self, name: str, schema: dict[str, Any] = ANY) -> Tool:
        async def handler(arguments: dict[str, Any]) -> str:
            self.done.append((name, arguments))
            return f"{name} done"

        return Tool(name, handler, schema)

    async def run(self, provider: ScriptedProvider, *, stream: bool = True) -> str:
        """One process."""
        async with agents(self.store, provider, self.tools()) as runtime:
            return await self.act(runtime, stream=stream)

    async def act(self, runtime: Runtime, *, stream: bool) -> str:
        if self.way == "run_agent":
            return (await self.agent(runtime, stream=stream)).text
        agent = JournaledAgent(runtime, MODEL, self.tools(), namespace="n", thread="t", turn="1", model_key="tiny/1")
        return await agent.run(lambda bindings: self.converse(bindings, stream=stream))

    async def converse(self, bindings: Bindings, *, stream: bool) -> str:
        messages = [Message(role="user", content="go")]
        while True:
            sample = await bindings.model.sample(messages, stream=stream)
            messages += [sample.message, *await bindings.act(sample)]
            if not sample.message.tool_calls:
                return sample.message.content

    async def agent(self, runtime: Runtime, *, stream: bool) -> AgentResult:
        return await run_agent(runtime, "go", model=MODEL, tools=self.tools(), thread="t", turn="1", stream=stream)

    async def answer(self, provider: ScriptedProvider, number: int) -> dict[str, Any]:
        """The n-th answer of the model, as it is recorded."""
        run_id = Turn("n" if self.way == "turn" else "agent", "t", "1", "any").run_id
        async with agents(self.store, provider, self.tools()) as runtime:
            step = (await runtime.get(run_id)).step(f"m/{number}" if self.way == "turn" else f"{number}/sample")
        assert step is not None
        assert isinstance(step.output, dict)
        return step.output


@pytest.fixture
def bench(tmp_path: Path, way: str) -> Bench:
    return Bench(tmp_path / "ditto.db", way)


def deltas(*parts: dict[str, Any], reason: Any = "tool_calls") -> Chunks:
    chunks = [{"choices": [{"index": 0, "delta": part}]} for part in parts]
    return Chunks([sse([*chunks, {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}])])


def part(**call: Any) -> dict[str, Any]:
    named = {name: call.pop(name) for name in ("name", "arguments") if name in call}
    return {"tool_calls": [{**call, "function": named}]}


def told(provider: ScriptedProvider, number: int) -> list[str]:
    """What the model was told of its calls, in its n-th request."""
    messages = provider.requests()[number - 1].body["messages"]
    return [message["content"] for message in messages if message["role"] == "tool"]


@WAYS
async def test_l01_two_calls_without_an_index_are_two_and_each_runs_once(tmp_path: Path, bench: Bench) -> None:
    reply = deltas(part(id="c1", name="a", arguments='{"x":1}'), part(id="c2", name="b", arguments='{"y":2}'))
    async with ScriptedProvider(tmp_path / "model.db", [reply, Text("done")], strict=True) as provider:
        for _ in range(2):
            assert await bench.run(provider) == "done"
        assert provider.count == 2
    assert sorted(bench.done, key=str) == [("a", {"x": 1}), ("b", {"y": 2})]


@WAYS
async def test_l02_a_call_without_an_id_gets_one_that_is_the_same_after_a_restart(tmp_path: Path, bench: Bench) -> None:
    pieces = ["", '{"x":', "1}"]
    reply = deltas(*[part(index=0, arguments=each, **({} if at else {"name": "a"})) for at, each in enumerate(pieces)])
    script: list[Reply] = [reply, Failure(500), Text("done")]
    async with ScriptedProvider(tmp_path / "model.db", script, strict=True) as provider:
        with pytest.raises(StepError):
            await bench.run(provider)
        first = await bench.answer(provider, 1)
        assert await bench.run(provider) == "done"
        assert await bench.answer(provider, 1) == first
        [call] = first["message"]["tool_calls"]
        assert call["id"]
        assert first["message"]["content"] == ""
        sent = [request.body["messages"][1]["tool_calls"][0]["id"] for request in provider.requests()[1:]]
        assert sent == [call["id"], call["id"]]
    assert bench.done == [("a", {"x": 1})]


@WAYS
async def test_l04_one_id_for_two_calls_is_made_two_and_a_strict_provider_goes_on(tmp_path: Path, bench: Bench) -> None:
    reply = ToolCalls([Call("x", "a", '{"n":1}'), Call("x", "b", '{"n":2}')])
    async with ScriptedProvider(tmp_path / "model.db", [reply, Text("done")], strict=True) as provider:
        assert await bench.run(provider) == "done"
        answer = await bench.answer(provider, 1)
        ids = [call["id"] for call in answer["message"]["tool_calls"]]
        assert ids[0] == "x"
        assert answer["raw"]["call_ids"] == {ids[1]: "x"}
    assert sorted(bench.done, key=str) == [("a", {"n": 1}), ("b", {"n": 2})]


@WAYS
@pytest.mark.parametrize("stream", [True, False])
async def test_l06_of_an_answer_that_was_cut_by_its_length_no_call_is_made(
    tmp_path: Path, bench: Bench, stream: bool
) -> None:
    """The first one's arguments are whole, too."""
    cut = ToolCalls([Call("c1", "a", '{"text":"abc"}'), Call("c2", "b", '{"te')], finish_reason="length")
    async with ScriptedProvider(tmp_path / "model.db", [cut, Text("done")], strict=True) as provider:
        assert await bench.run(provider, stream=stream) == "done"
        assert (await bench.answer(provider, 1))["finish_reason"] == "length"
        assert len(told(provider, 2)) == 2
        assert all("cut by its length limit" in text and "send the call again" in text for text in told(provider, 2))
    assert bench.done == []


@WAYS
@pytest.mark.parametrize("reason", ["stop", "function_call", "", None, "end_turn"])
async def test_l08_a_call_is_made_whatever_the_reason_is(tmp_path: Path, bench: Bench, reason: Any) -> None:
    reply = deltas(part(index=0, id="c1", name="a", arguments="{}"), reason=reason)
    async with ScriptedProvider(tmp_path / "model.db", [reply, Text("done")], strict=True) as provider:
        assert await bench.run(provider) == "done"
        found = await bench.answer(provider, 1)
        kept = {"stop": "stop", "function_call": "tool_calls", "end_turn": "stop"}.get(reason, "missing")
        assert found["finish_reason"] == kept
        assert found["raw"].get("finish_reason") == (reason if reason != kept else None)
    assert bench.done == [("a", {})]


@WAYS
@pytest.mark.parametrize("arguments", ["", " ", None, "missing", "{}", "null", {}])
async def test_l09_no_arguments_are_an_empty_object(tmp_path: Path, bench: Bench, arguments: Any) -> None:
    function = {} if arguments == "missing" else {"arguments": arguments}
    made = [{"id": f"c-{name}", "function": {"name": name, **function}} for name in ("health", "add")]
    message = {"role": "assistant", "tool_calls": made}
    body = {"choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}]}
    script: list[Reply] = [Raw(json.dumps(body)), Text("done")]
    async with ScriptedProvider(tmp_path / "model.db", script, strict=True) as provider:
        assert await bench.run(provider, stream=False) == "done"
        health, add = told(provider, 2)
        assert health == "health done"
        assert "x" in json.loads(add)["error"]["message"]
        sent = provider.requests()[1].body["messages"][1]["tool_calls"]
        assert [call["function"]["arguments"] for call in sent] == ["{}", "{}"]
    assert bench.done == [("health", {})]


@WAYS
async def test_l11_a_bad_call_in_the_history_does_not_stop_what_follows(tmp_path: Path, bench: Bench) -> None:
    """Over a restart, too; and in the next turn of the thread."""
    made = [("add", ""), ("add", "{bad"), ("nothing", "{}"), ("add", "[1]")]
    bad = ToolCalls([Call(f"c{at}", name, arguments) for at, (name, arguments) in enumerate(made)])
    script: list[Reply] = [bad, Failure(500), ToolCalls([Call("c5", "a", "{}")]), Text("done"), Text("well")]
    async with ScriptedProvider(tmp_path / "model.db", script, strict=True) as provider:
        with pytest.raises(StepError):
            await bench.run(provider)
        assert await bench.run(provider) == "done"
        kept = (await bench.answer(provider, 1))["message"]["tool_calls"]
        assert [call["arguments"] for call in kept] == ["", "{bad", "{}", "[1]"]
        codes = [json.loads(text)["error"]["code"] for text in told(provider, 2)]
        assert codes == ["tool.arguments", "tool.arguments", "tool.unknown", "tool.arguments"]
        assert [request.refused for request in provider.requests()] == [None] * 4
    assert bench.done == [("a", {})]


@WAYS
@pytest.mark.parametrize("repeated", [False, True])
async def test_l12_a_name_that_comes_again_or_empty_changes_nothing(
    tmp_path: Path, bench: Bench, repeated: bool
) -> None:
    name: Any = "a" if repeated else ""
    later: Any = "a" if repeated else None
    reply = deltas(
        part(index=0, id="c", name="a"),
        part(index=0, id="", name=name, arguments="{"),
        part(index=0, id=None, name=later, arguments="}"),
    )
    async with ScriptedProvider(tmp_path / "model.db", [reply, Text("done")], strict=True) as provider:
        assert await bench.run(provider) == "done"
    assert bench.done == [("a", {})]


# Histories that were cut, as data


def answer(*ids: str) -> Message:
    calls = [{"id": call_id, "name": "a", "arguments": "{}"} for call_id in ids]
    return Message.model_validate({"role": "assistant", "tool_calls": calls})


def result(call_id: str, text: str = "done") -> Message:
    return Message(role="tool", content=text, tool_call_id=call_id)


GO = Message(role="user", content="go")


async def test_o01_a_whole_conversation_is_left_as_it_is() -> None:
    whole = [GO, answer("c1", "c2"), result("c1"), result("c2"), answer(), GO]
    assert mend_history(whole) == whole
    assert mend_history([]) == []


async def test_o01_missing_results_are_stated_and_stray_ones_left_out() -> None:
    cut = [result("c0"), GO, answer("c1", "c2"), result("c2"), result("c2", "again"), GO, answer("c3"), result("c1")]
    mended = mend_history(cut)
    assert [(message.role, message.tool_call_id) for message in mended] == [
        ("user", None), ("assistant", None), ("tool", "c1"), ("tool", "c2"), ("user", None), ("assistant", None),
        ("tool", "c3"),
    ]  # fmt: skip
    assert mended[3] == result("c2")
    for message in (mended[2], mended[6]):
        assert json.loads(message.content)["status"] == "unknown"
    assert mend_history(mended) == mended


async def test_l06_a_turn_makes_no_call_of_a_cut_answer_whoever_asks_for_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "ditto.db", "turn")
    cut = ToolCalls([Call("c1", "a", '{"text":"abc"}')], finish_reason="length")

    async def agent(ctx: TurnContext) -> str:
        await ctx.sample(request())
        found = await ctx.call("a", "c1", {"text": "abc"})
        assert found.error is not None
        return found.error.code

    async with (
        ScriptedProvider(tmp_path / "model.db", [cut]) as provider,
        agents(bench.store, provider, bench.tools()) as runtime,
    ):
        assert await runtime.turn(TURN, agent) == "answer.cut"
    assert bench.done == []
