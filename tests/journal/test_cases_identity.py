"""Which call is which: ids, arguments, drift, and how many calls there may be (cases 2, 7 to 12)."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from ditto import (
    DefinitionError,
    LimitExceededError,
    Message,
    ModelRef,
    ModelRequest,
    ReplayMismatchError,
    RunConflictError,
    Runtime,
    Sample,
    StepError,
    Tool,
    TurnContext,
)
from ditto.contracts import SampleInput, ToolOffer
from ditto.journal import run_agent
from ditto.testing.provider import Call, Failure, Raw, Reply, ScriptedProvider, Text, ToolCalls
from tests.engine.scene import states
from tests.journal.scene import MODEL, PUBLISH, TURN, Effects, agents, calls, request, talk

pytestmark = pytest.mark.asyncio


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "ditto.db"


def made(call_id: str | None, text: str) -> Call:
    return Call(call_id, "publish", json.dumps({"text": text}))


async def ask_model(ctx: TurnContext) -> Sample:
    return await ctx.sample(request())


# 2: finished, and run again


@pytest.mark.parametrize("result", ["text", "a model", "nothing to store"])
async def test_j02_a_finished_turn_asks_and_does_nothing_and_returns_the_same(
    tmp_path: Path, store: Path, result: str
) -> None:
    effects = Effects()

    async def agent(ctx: TurnContext) -> Any:
        text = await talk(ctx, request())
        return {"text": text, "a model": Message(role="user", content=text), "nothing to store": (text,)}[result]

    script: list[Reply] = [calls(("c1", "publish", "a")), Text("done")]
    came: list[Any] = []
    async with ScriptedProvider(tmp_path / "model.db", script) as provider:
        for _ in range(3):
            async with agents(store, provider, [effects.tool("publish")]) as runtime:
                came.append(await runtime.turn(TURN, agent))
                written = len([event async for event in runtime.events(TURN.run_id)])
                assert written == 8, "a finished turn has no further history"
        assert provider.count == 2
    assert came[0] == came[1] == came[2]
    assert {type(each) for each in came} == {type(came[0])}
    assert effects.done == [("publish", "a")]


# 7: ids of calls


@pytest.mark.parametrize("stream", [False, True])
async def test_j07_repeated_and_missing_ids_are_made_unique_and_the_providers_kept(
    tmp_path: Path, store: Path, stream: bool
) -> None:
    """Equal arguments, too: two calls are two effects."""
    effects = Effects()
    script: list[Reply] = [
        ToolCalls([made("x", "a"), made("x", "a"), made(None, "b")]),
        ToolCalls([made("x", "a"), made("call_1", "c")]),
        Text("done"),
    ]
    steps: dict[str, Any] = {}
    async with ScriptedProvider(tmp_path / "model.db", script, strict=True) as provider:
        for _ in range(2):
            async with agents(store, provider, [effects.tool("publish")]) as runtime:
                assert await runtime.turn(TURN, lambda ctx: talk(ctx, request(stream=stream))) == "done"
                steps = {step.path: step for step in (await runtime.get(TURN.run_id)).steps}
        assert provider.count == 3
    assert sorted(effects.done) == [("publish", "a")] * 3 + [("publish", "b"), ("publish", "c")]
    operations = [path for path in steps if path.startswith("t/")]
    assert len(operations) == 5
    first, second = steps["m/1"].output, steps["m/2"].output
    assert operations == [f"t/{call['id']}" for answer in (first, second) for call in answer["message"]["tool_calls"]]
    assert sorted(first["raw"]["call_ids"].values()) == ["", "x"]
    assert list(second["raw"]["call_ids"].values()) == ["x"]
    assert second["message"]["tool_calls"][1]["id"] == "call_1"


@pytest.mark.parametrize("odd", ["a/b", "x" * 300, "tab\there", "\u200b"])
@pytest.mark.parametrize("way", ["turn", "run_agent"])
async def test_j07_an_id_that_no_path_can_hold_is_replaced(tmp_path: Path, store: Path, odd: str, way: str) -> None:
    effects = Effects()
    publish = effects.tool("publish")
    message = {
        "role": "assistant",
        "tool_calls": [{"id": odd, "function": {"name": "publish", "arguments": '{"text":"a"}'}}],
    }
    body = json.dumps({"choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}]})
    async with ScriptedProvider(tmp_path / "model.db", [Raw(body), Text("done")], strict=True) as provider:
        for _ in range(2):
            async with agents(store, provider, [publish]) as runtime:
                if way == "turn":
                    assert await runtime.turn(TURN, lambda ctx: talk(ctx, request())) == "done"
                else:
                    result = await run_agent(runtime, "go", model=MODEL, tools=[publish], thread="t", turn="1")
                    assert result.text == "done"
        assert provider.count == 2
        sent = provider.requests()[1].body["messages"][1]["tool_calls"][0]["id"]
        assert sent == "call_1_1"
    assert effects.done == [("publish", "a")]


async def test_j07_an_id_that_is_used_again_after_the_history_was_cut_is_another_call(
    tmp_path: Path, store: Path
) -> None:
    """The agent leaves the first round out of what it sends on; the provider counts its ids from the start."""
    effects = Effects()

    async def agent(ctx: TurnContext) -> str:
        last = ""
        for _ in range(2):
            sample = await ctx.sample(request())
            for call in sample.message.tool_calls:
                last = call.id
                await ctx.call(call.name, call.id, json.loads(call.arguments))
        return last

    script: list[Reply] = [ToolCalls([made("call_1", "a")]), ToolCalls([made("call_1", "a")])]
    async with ScriptedProvider(tmp_path / "model.db", script) as provider:
        for _ in range(2):
            async with agents(store, provider, [effects.tool("publish")]) as runtime:
                assert await runtime.turn(TURN, agent) != "call_1"
        assert provider.count == 2
    assert effects.done == [("publish", "a"), ("publish", "a")]


async def test_j07_ids_are_made_unique_for_a_client_of_ones_own(tmp_path: Path, store: Path) -> None:
    effects = Effects()
    asked = 0

    class Ids:
        def read(self, answer: Any) -> list[str | None]:
            return [call.get("id") for call in answer]

        def replace(self, answer: Any, ids: Any) -> Any:
            return [{**call, "id": new, "was": call.get("id")} for call, new in zip(answer, ids, strict=True)]

    async def ask(ctx: Any) -> Any:
        nonlocal asked
        asked += 1
        return [{"id": "x"}, {"id": "x"}, {}]

    async def agent(ctx: TurnContext) -> Any:
        seen = []
        for number in range(2):
            answer = await ctx.ask(ModelRequest("mine", {"messages": [number]}), ask, ids=Ids())
            for call in answer:
                await ctx.call("publish", call["id"], {"text": call["id"]})
            seen += answer
        return seen

    came = []
    async with ScriptedProvider(tmp_path / "model.db", []) as provider:
        for _ in range(2):
            async with agents(store, provider, [effects.tool("publish")]) as runtime:
                came.append(await runtime.turn(TURN, agent))
    assert came[0] == came[1]
    assert [call["was"] if "was" in call else call["id"] for call in came[0]] == ["x", "x", None] * 2
    ids = [call["id"] for call in came[0]]
    assert len(set(ids)) == 6
    assert effects.done == [("publish", call_id) for call_id in ids]
    assert asked == 2


# 8: drift


CHANGES: dict[str, tuple[Callable[[], SampleInput], str]] = {
    "prompt": (lambda: request(Message(role="user", content="go on")), r"messages\[0\].content"),
    "one more message": (
        lambda: request(Message(role="user", content="go"), Message(role="user", content="x")),
        "the length of messages",
    ),
    "temperature": (lambda: request(temperature=0.5), "temperature"),
    "sampling": (lambda: request(max_tokens=7, seed=1), "max_tokens, seed"),
    "kind": (lambda: request(stream=True), "stream"),
    "model": (lambda: request().model_copy(update={"model": ModelRef("scripted", "other")}), "model.name"),
    "tool schema": (
        lambda: request().model_copy(
            update={"tools": (ToolOffer(name="publish", parameters={**PUBLISH, "required": []}),)}
        ),
        r"the length of tools\[0\].parameters.required",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("after", ["an answer", "a refusal", "a lost answer"])
async def test_j08_what_changed_is_named_and_nothing_is_touched(
    tmp_path: Path, store: Path, change: str, after: str
) -> None:
    effects = Effects()
    replies: dict[str, list[Reply]] = {
        "an answer": [calls(("c1", "publish", "a")), Failure(500)],
        "a refusal": [Failure(429)],
        "a lost answer": [Failure(504)],
    }
    async with ScriptedProvider(tmp_path / "model.db", replies[after]) as provider:
        async with agents(store, provider, [effects.tool("publish")]) as runtime:
            with pytest.raises(Exception, match=r"answered 4|answered 5"):
                await runtime.turn(TURN, lambda ctx: talk(ctx, request()))
        before = provider.count, list(effects.done)
        changed, named = CHANGES[change]
        for _ in range(2):
            async with agents(store, provider, [effects.tool("publish")]) as runtime:
                with pytest.raises(ReplayMismatchError, match=rf"m/1 .* it differs in {named}\. No provider") as raised:
                    await runtime.turn(TURN, lambda ctx: talk(ctx, changed()))
                assert "go on" not in raised.value.message, "a message shows paths, never a value"
        assert (provider.count, effects.done) == before


async def test_j08_another_model_key_is_a_conflict(tmp_path: Path, store: Path) -> None:
    effects = Effects()
    script: list[Reply] = [calls(("c1", "publish", "a")), Failure(500)]
    async with ScriptedProvider(tmp_path / "model.db", script) as provider:
        async with agents(store, provider, [effects.tool("publish")]) as runtime:
            with pytest.raises(StepError):
                await runtime.turn(TURN, lambda ctx: talk(ctx, request()))
            with pytest.raises(RunConflictError, match=r"differs at input\.model_key;"):
                await runtime.turn(replace(TURN, model_key="tiny/2"), lambda ctx: talk(ctx, request()))
        assert provider.count == 2
    assert effects.done == [("publish", "a")]


AGENT_CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "prompt": ({"prompt": "go on"}, r"input.messages\[0\].content"),
    "system": ({"system": "be brief"}, "the length of input.messages"),
    "temperature": ({"temperature": 0.5}, "input.request.temperature"),
    "kind": ({"stream": True}, "input.request.stream"),
    "tool schema": ({"schema": {**PUBLISH, "required": []}}, r"input.request.tools.publish"),
    "model": ({"model": ModelRef("scripted", "other"), "model_key": MODEL.key}, "input.request.model.name"),
    "model key": ({"model_key": "tiny/2"}, "input.turn.model_key"),
}


@pytest.mark.parametrize("change", AGENT_CHANGES)
@pytest.mark.parametrize("finished", [False, True])
async def test_j08_dittos_own_agent_refuses_what_changed(
    tmp_path: Path, store: Path, change: str, finished: bool
) -> None:
    effects = Effects()
    changed, named = AGENT_CHANGES[change]

    async def run(runtime: Runtime, *, prompt: str = "go", schema: Any = PUBLISH, **options: Any) -> str:
        publish = Tool("publish", lambda arguments: "", schema)
        given = {"model": MODEL, "tools": [publish], "thread": "t", "turn": "1", **options}
        return (await run_agent(runtime, prompt, **given)).text

    script: list[Reply] = [calls(("c1", "publish", "a")), Text("done") if finished else Failure(500)]
    async with ScriptedProvider(tmp_path / "model.db", script) as provider:
        async with agents(store, provider, [effects.tool("publish")]) as runtime:
            try:
                assert await run(runtime) == "done"
            except StepError:
                assert not finished
            with pytest.raises(RunConflictError, match=f"it differs at {named}; use another id"):
                await run(runtime, **changed)
        assert provider.count == 2
    assert effects.done == [("publish", "a")]


# 9: the same call with other arguments


@pytest.mark.parametrize("finished", ["interrupted", "completed", "in one run"])
@pytest.mark.parametrize("what", ["arguments", "tool"])
async def test_j09_a_call_with_other_arguments_is_a_conflict(
    tmp_path: Path, store: Path, finished: str, what: str
) -> None:
    effects = Effects()
    tools = [effects.tool("publish"), effects.tool("other")]
    text, name = ("b", "publish") if what == "arguments" else ("a", "other")

    async def first(ctx: TurnContext) -> Any:
        await ctx.call("publish", "c1", {"text": "a"})
        if finished == "interrupted":
            raise KeyError("the framework has a fault")
        if finished == "in one run":
            await ctx.call(name, "c1", {"text": text})
        return object()

    async def second(ctx: TurnContext) -> Any:
        return await ctx.call(name, "c1", {"text": text})

    async with ScriptedProvider(tmp_path / "model.db", []) as provider:
        async with agents(store, provider, tools) as runtime:
            try:
                await runtime.turn(TURN, first)
            except KeyError:
                assert finished == "interrupted"
            except ReplayMismatchError as error:
                assert finished == "in one run"
                assert "another tool, or other arguments" in error.message
            assert await states(runtime, TURN.run_id) == {"t/c1": "completed"}
        if finished != "in one run":
            named = "tool" if what == "tool" else "arguments.text"
            async with agents(store, provider, tools) as runtime:
                with pytest.raises(ReplayMismatchError, match=f"t/c1 .* differs in {named}"):
                    await runtime.turn(TURN, second)
    assert effects.done == [("publish", "a")]


async def test_a10_a_result_belongs_to_its_call_whatever_its_arguments_are(tmp_path: Path, store: Path) -> None:
    """Two calls with equal arguments, in a process that sees another tenant each time; and another turn."""
    made_for: list[str] = []
    tenants = iter(["t-a", "t-b", "t-c"])

    async def whoami(arguments: dict[str, Any]) -> str:
        made_for.append(next(tenants))
        return made_for[-1]

    async def agent(ctx: TurnContext) -> list[str]:
        return [(await ctx.call("whoami", call_id, {})).content for call_id in ("c1", "c2")]

    async def once(ctx: TurnContext) -> str:
        return (await ctx.call("whoami", "c1", {})).content

    async def killed(ctx: TurnContext) -> None:
        await agent(ctx)
        raise KeyError("ended after both")

    tool = Tool("whoami", whoami, {"type": "object"})
    async with ScriptedProvider(tmp_path / "model.db", []) as provider:
        async with agents(store, provider, [tool]) as runtime:
            with pytest.raises(KeyError):
                await runtime.turn(TURN, killed)
        async with agents(store, provider, [tool]) as runtime:
            assert await runtime.turn(TURN, agent) == ["t-a", "t-b"]
            assert made_for == ["t-a", "t-b"]
            assert await runtime.turn(replace(TURN, turn="turn-2"), once) == "t-c"
    assert made_for == ["t-a", "t-b", "t-c"]


# 10: fewer calls, and more


@pytest.mark.parametrize("state", ["interrupted", "completed"])
@pytest.mark.parametrize("left_out", ["a model call", "a tool call"])
async def test_j10_fewer_calls_than_are_recorded_are_an_error(
    tmp_path: Path, store: Path, state: str, left_out: str
) -> None:
    effects = Effects()

    async def whole(ctx: TurnContext) -> Any:
        sample = await ask_model(ctx)
        for call in sample.message.tool_calls:
            await ctx.call(call.name, call.id, json.loads(call.arguments))
        await ctx.sample(request(Message(role="user", content="and now?")))
        if state == "interrupted":
            raise KeyError("ended here")
        return object()

    async def less(ctx: TurnContext) -> str:
        sample = await ask_model(ctx)
        for call in sample.message.tool_calls[: 2 if left_out == "a model call" else 1]:
            await ctx.call(call.name, call.id, json.loads(call.arguments))
        if left_out == "a tool call":
            await ctx.sample(request(Message(role="user", content="and now?")))
        return "all is well"

    script: list[Reply] = [calls(("c1", "publish", "a"), ("c2", "publish", "b")), Text("done")]
    async with ScriptedProvider(tmp_path / "model.db", script) as provider:
        async with agents(store, provider, [effects.tool("publish")]) as runtime:
            try:
                await runtime.turn(TURN, whole)
            except KeyError:
                assert state == "interrupted"
        missing = "m/2" if left_out == "a model call" else "t/c2"
        async with agents(store, provider, [effects.tool("publish")]) as runtime:
            with pytest.raises(ReplayMismatchError, match=f"without asking for what is recorded: {missing}"):
                await runtime.turn(TURN, less)
        assert provider.count == 2
    assert effects.done == [("publish", "a"), ("publish", "b")]


async def test_j10_one_more_model_call_than_allowed_is_not_sent(tmp_path: Path, store: Path) -> None:
    effects = Effects()
    script: list[Reply] = [calls((f"c{n}", "publish", str(n))) for n in range(3)]
    async with ScriptedProvider(tmp_path / "model.db", [*script, Text("done")]) as provider:
        async with agents(store, provider, [effects.tool("publish")]) as runtime:
            for _ in range(2):
                with pytest.raises(LimitExceededError, match="max_model_calls") as raised:
                    await runtime.turn(replace(TURN, max_model_calls=2), lambda ctx: talk(ctx, request()))
                assert raised.value.code == "turn.model_calls"
                assert provider.count == 2
            # What is recorded is kept; a higher limit goes on.
            assert await runtime.turn(replace(TURN, max_model_calls=4), lambda ctx: talk(ctx, request())) == "done"
        assert provider.count == 4
    assert effects.done == [("publish", str(n)) for n in range(3)]


async def test_j10_dittos_own_agent_stops_at_its_limit_and_goes_on_with_a_higher_one(
    tmp_path: Path, store: Path
) -> None:
    effects = Effects()
    publish = effects.tool("publish")
    script: list[Reply] = [calls((f"c{n}", "publish", str(n))) for n in range(3)]
    async with ScriptedProvider(tmp_path / "model.db", [*script, Text("done")]) as provider:
        async with agents(store, provider, [publish]) as runtime:
            for steps, asked in ((2, 2), (2, 2), (3, 3)):
                with pytest.raises(LimitExceededError):
                    await run_agent(runtime, "go", model=MODEL, tools=[publish], thread="t", turn="1", max_steps=steps)
                assert provider.count == asked
            result = await run_agent(runtime, "go", model=MODEL, tools=[publish], thread="t", turn="1", max_steps=4)
            assert result.text == "done"
        assert provider.count == 4
    assert effects.done == [("publish", str(n)) for n in range(3)]


# 12: one model call at a time


async def test_j12_a_second_model_call_at_the_same_time_is_an_error(tmp_path: Path, store: Path) -> None:
    async def agent(ctx: TurnContext) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(ask_model, ctx)
            group.start_soon(ask_model, ctx)

    async with (
        ScriptedProvider(tmp_path / "model.db", [Text("one"), Text("two")]) as provider,
        agents(store, provider) as runtime,
    ):
        with pytest.raises(StepError, match="asks its model once at a time") as raised:
            await runtime.turn(TURN, agent)
        assert raised.value.code == "turn.concurrent_call"
        assert provider.count <= 1
        assert list(await states(runtime, TURN.run_id)) in ([], ["m/1"])


async def test_a_call_after_the_functions_end_is_refused(tmp_path: Path, store: Path) -> None:
    """A stream, or a task, may not leave the turn."""
    left: list[TurnContext] = []

    async def agent(ctx: TurnContext) -> str:
        left.append(ctx)
        return "done"

    async with ScriptedProvider(tmp_path / "model.db", []) as provider, agents(store, provider) as runtime:
        assert await runtime.turn(TURN, agent) == "done"
        with pytest.raises(StepError, match="has ended"):
            await ask_model(left[0])
        with pytest.raises(StepError, match="has ended"):
            await left[0].call("publish", "c1", {})
        assert provider.count == 0
        with pytest.raises(DefinitionError):
            replace(TURN, max_model_calls=0)
