"""An ordinary agent of Pydantic AI with the one added line: what it asks, does and returns, also after a restart."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import pytest
from pydantic import BaseModel
from pydantic_ai import Agent, BinaryImage, ModelRetry, RunContext, ToolFailed, ToolReturn
from pydantic_ai.capabilities import AbstractCapability, ModelFallback
from pydantic_ai.messages import ModelResponse, TextPart, ToolCallPart, ToolReturnPart
from pydantic_ai.models.fallback import FallbackModel
from pydantic_ai.models.function import FunctionModel
from pydantic_ai.models.test import TestModel
from pydantic_ai.run import AgentRunResult

from ditto import (
    Absent,
    Committed,
    DefinitionError,
    EffectNotMade,
    LimitExceededError,
    ReceiptEvent,
    StepError,
    Tool,
    ToolError,
    Turn,
    UnknownOutcomeError,
    create_ditto,
)
from ditto.config import Config, SandboxConfig
from ditto.journal import JournaledAgent
from ditto.journal.pydantic_ai import DittoDurability, PydanticBindings, current_step
from ditto.testing.provider import Call, Drop, Failure, Reply, ScriptedProvider, Text, ToolCalls
from ditto_workers import create_interaction_worker
from tests.journal.pydantic_scene import CLIENTS, KEY, durable, openai_model
from tests.journal.scene import PUBLISH
from tests.processes import ROOT

pytestmark = pytest.mark.asyncio


@dataclass
class Found:
    """What a tool returns that is no JSON data by itself."""

    count: int


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "ditto.db"


def say(*made: tuple[str, str, str], **options: Any) -> ToolCalls:
    """An answer with these calls: (id, tool, text)."""
    return ToolCalls([Call(call_id, name, f'{{"text": "{text}"}}') for call_id, name, text in made], **options)


def results_of(messages: Any) -> list[tuple[Any, str]]:
    """What the model was told of each call: (content, outcome)."""
    parts = [part for message in messages for part in message.parts]
    return [(part.content, part.outcome) for part in parts if isinstance(part, ToolReturnPart)]


async def test_an_agent_asks_and_acts_once_and_is_replayed_without_its_provider(tmp_path: Path, store: Path) -> None:
    done: list[str] = []
    script: list[Reply] = [say(("c1", "publish", "a"), ("c2", "look", "b")), Text("done")]
    results = []
    for life in range(2):
        async with (
            ScriptedProvider(tmp_path / "model.db", script, strict=True) as provider,
            durable(store) as runtime,
        ):
            # The second provider is at another address, and is never asked.
            agent = Agent(openai_model(provider.base_url), capabilities=[DittoDurability(runtime, **KEY)])

            @agent.tool_plain
            async def publish(text: str) -> str:
                done.append(f"publish {text}")
                return f"{text} is out"

            @agent.tool_plain(metadata={"ditto": {"effect": "read"}})
            def look(text: str) -> dict[str, str]:
                done.append(f"look {text}")
                return {"found": text}

            results.append(await agent.run("go"))
            assert provider.count == 2, life
    first, second = results
    assert (first.output, second.output) == ("done", "done")
    assert done == ["publish a", "look b"]
    assert results_of(second.all_messages()) == [("a is out", "success"), ({"found": "b"}, "success")]
    assert [m.parts for m in first.all_messages() if isinstance(m, ModelResponse)] == [
        m.parts for m in second.all_messages() if isinstance(m, ModelResponse)
    ]
    assert first.usage.input_tokens == second.usage.input_tokens


async def test_signals_of_a_tool_are_values_for_the_model(tmp_path: Path, store: Path) -> None:
    asked: list[str] = []
    script: list[Reply] = [
        say(("c1", "publish", "retry")),
        say(("c2", "publish", "failed")),
        say(("c3", "publish", "refused")),
        say(("c4", "publish", "a")),
        Text("done"),
    ]
    async with ScriptedProvider(tmp_path / "model.db", script) as provider:
        for _ in range(2):
            async with durable(store) as runtime:
                agent = Agent(openai_model(provider.base_url), capabilities=[DittoDurability(runtime, **KEY)])

                @agent.tool_plain
                async def publish(text: str) -> str:
                    asked.append(text)
                    match text:
                        case "retry":
                            raise ModelRetry("say it with an a")
                        case "failed":
                            raise ToolFailed("there is no such thing")
                        case "refused":
                            raise ToolError("no", code="shop.closed")
                    return "out"

                result = await agent.run("go")
                assert results_of(result.all_messages()) == [
                    ("say it with an a", "retried"),
                    ("there is no such thing", "failed"),
                    ("no", "failed"),
                    ("out", "success"),
                ]
        assert provider.count == 5
    assert asked == ["retry", "failed", "refused", "a"]


async def test_an_output_that_is_refused_is_asked_for_again_once(tmp_path: Path, store: Path) -> None:
    class Answer(BaseModel):
        text: str

    script: list[Reply] = [
        ToolCalls([Call("o1", "final_result", '{"wrong": 1}')]),
        ToolCalls([Call("o2", "final_result", '{"text": "short"}')]),
        ToolCalls([Call("o3", "final_result", '{"text": "long enough"}')]),
    ]
    async with ScriptedProvider(tmp_path / "model.db", script) as provider:
        for _ in range(2):
            async with durable(store) as runtime:
                agent = Agent(
                    openai_model(provider.base_url),
                    output_type=Answer,
                    retries=3,
                    capabilities=[DittoDurability(runtime, **KEY)],
                )

                @agent.output_validator
                def check(answer: Answer) -> Answer:
                    if len(answer.text) < 6:
                        raise ModelRetry("longer")
                    return answer

                assert (await agent.run("go")).output.text == "long enough"
        assert provider.count == 3


async def test_what_a_write_raises_is_unknown_and_what_a_read_raises_is_tried_again(
    tmp_path: Path, store: Path
) -> None:
    broken = True
    done: list[str] = []

    def report(runtime: Any, base_url: str, turn: str) -> Agent[None, str]:
        agent = Agent(openai_model(base_url), capabilities=[DittoDurability(runtime, **{**KEY, "turn": turn})])

        @agent.tool_plain
        async def publish(text: str) -> str:
            done.append("publish")
            raise OSError("the line went dead")

        @agent.tool_plain(metadata={"ditto": {"effect": "read"}})
        async def look(text: str) -> str:
            done.append("look")
            if broken:
                raise OSError("the line went dead")
            return "found"

        return agent

    script: list[Reply] = [say(("c1", "publish", "a")), say(("c1", "look", "a")), Text("done")]
    async with ScriptedProvider(tmp_path / "model.db", script) as provider:
        async with durable(store) as runtime:
            for _ in range(2):
                with pytest.raises(UnknownOutcomeError) as unknown:
                    await report(runtime, provider.base_url, "writes").run("go")
                assert unknown.value.steps == ("t/c1",)
            with pytest.raises(StepError, match="the line went dead"):
                await report(runtime, provider.base_url, "reads").run("go")
        assert done == ["publish", "look"]
        broken = False
        async with durable(store) as runtime:
            assert (await report(runtime, provider.base_url, "reads").run("go")).output == "done"
        assert done == ["publish", "look", "look"]
        assert provider.count == 3


async def test_a_write_that_the_framework_cuts_short_is_unknown(store: Path) -> None:
    async with durable(store) as runtime:
        agent = Agent(
            TestModel(), capabilities=[DittoDurability(runtime, **KEY)], tool_timeout=0.01, retries={"tools": 5}
        )

        @agent.tool_plain
        async def publish(text: str) -> str:
            await anyio.sleep_forever()
            return "never"

        with pytest.raises(UnknownOutcomeError, match="cut short"):
            await agent.run("go")


async def test_a_lost_write_is_looked_up_by_its_key(tmp_path: Path, store: Path) -> None:
    outside: dict[str, str] = {}
    script: list[Reply] = [say(("c1", "publish", "a")), Text("done")]
    async with ScriptedProvider(tmp_path / "model.db", script) as provider, durable(store) as runtime:
        agent = Agent(openai_model(provider.base_url), capabilities=[DittoDurability(runtime, **KEY)])

        def find(key: str, arguments: dict[str, Any], step: Any) -> Any:
            return Committed(outside[key]) if key in outside else Absent()

        declared = {"key": lambda arguments: f"report/{arguments['text']}", "lookup": find}

        @agent.tool_plain(metadata={"ditto": declared})
        def publish(text: str) -> str:
            outside[current_step().key] = f"{text} is out"
            raise OSError("the answer was lost")

        result = await agent.run("go")
        assert outside == {"report/a": "a is out"}
        assert results_of(result.all_messages()) == [("a is out", "success")]


@pytest.mark.parametrize(
    ("committed", "told"),
    [
        ("a is out", ("a is out", "success")),
        ({"id": 7}, ({"id": 7}, "success")),
        (
            {"source": "shop", "status": "failed", "error": {"code": "shop.closed", "message": "no"}},
            ("shop.closed: no", "failed"),
        ),
    ],
)
async def test_a_person_settles_what_was_lost(
    tmp_path: Path, store: Path, committed: Any, told: tuple[Any, str]
) -> None:
    """Of a model's answer by text, of a tool's by its result; the run then goes on from that."""
    run_id = Turn(**KEY, model_key="any").run_id
    script: list[Reply] = [say(("c1", "publish", "a")), Drop("mid_body")]
    async with ScriptedProvider(tmp_path / "model.db", script) as provider, durable(store) as runtime:
        agent = Agent(openai_model(provider.base_url), capabilities=[DittoDurability(runtime, **KEY)])

        @agent.tool_plain
        async def publish(text: str) -> str:
            raise OSError("the line went dead")

        for step, settled in [("t/c1", {"committed": committed}), ("m/2", {"response": "It is done."})]:
            with pytest.raises(UnknownOutcomeError) as unknown:
                await agent.run("go")
            assert unknown.value.steps == (step,)
            await runtime.resolve(run_id, step, actor="ada", reason="I looked", **settled)
        result = await agent.run("go")
        assert result.output == "It is done."
        assert results_of(result.all_messages()) == [told]
        assert provider.count == 2


async def test_call_ids_that_a_provider_uses_twice_are_made_unique(tmp_path: Path, store: Path) -> None:
    done: list[str] = []
    script: list[Reply] = [
        say(("c1", "publish", "a"), ("c1", "publish", "b")),
        say(("c1", "publish", "c"), ("a/b", "publish", "d")),
        Text("done"),
    ]
    async with ScriptedProvider(tmp_path / "model.db", script, strict=True) as provider:
        for _ in range(2):
            async with durable(store) as runtime:
                agent = Agent(openai_model(provider.base_url), capabilities=[DittoDurability(runtime, **KEY)])

                @agent.tool_plain
                async def publish(text: str) -> str:
                    done.append(text)
                    return text

                result = await agent.run("go")
                answers = [m for m in result.all_messages() if isinstance(m, ModelResponse)]
                assert [[call.tool_call_id for call in answer.tool_calls] for answer in answers] == [
                    ["c1", "call_1_2"],
                    ["call_2_1", "call_2_2"],
                    [],
                ]
                assert answers[1].metadata == {"ditto.call_ids": {"call_2_1": "c1", "call_2_2": "a/b"}}
        assert provider.count == 3
    assert done == ["a", "b", "c", "d"]


async def test_no_call_of_an_answer_that_was_cut_is_made(tmp_path: Path, store: Path) -> None:
    script: list[Reply] = [say(("c1", "publish", "a"), finish_reason="length"), Text("done")]
    async with ScriptedProvider(tmp_path / "model.db", script) as provider, durable(store) as runtime:
        agent = Agent(openai_model(provider.base_url), capabilities=[DittoDurability(runtime, **KEY)])

        @agent.tool_plain
        async def publish(text: str) -> str:
            raise AssertionError("it was called")

        result = await agent.run("go")
        ((content, outcome),) = results_of(result.all_messages())
        assert outcome == "failed"
        assert "cut by its length limit" in str(content)


async def test_files_and_returns_come_back_as_they_were(store: Path) -> None:
    picture = BinaryImage(b"\x89PNG", media_type="image/png")
    told = []

    async with durable(store) as runtime:
        for _ in range(2):
            agent = Agent(TestModel(), capabilities=[DittoDurability(runtime, **KEY)])

            @agent.tool_plain
            def picture_of() -> Any:
                return [picture, {"kind": "tool-return"}]

            @agent.tool_plain
            def find() -> Found:
                return Found(3)

            @agent.tool_plain
            def explain() -> ToolReturn:
                return ToolReturn({"n": 1}, content=["see", picture], metadata={"seen": True})

            messages = (await agent.run("go")).all_messages()
            parts = [part for message in messages for part in message.parts if isinstance(part, ToolReturnPart)]
            told.append([(part.content, part.metadata) for part in parts])
    assert told[0] == [([picture, {"kind": "tool-return"}], None), ({"count": 3}, None), ({"n": 1}, {"seen": True})]
    assert told[1] == told[0]


async def test_what_is_no_data_is_an_error_after_the_effect(store: Path) -> None:
    async with durable(store) as runtime:
        agent = Agent(TestModel(), capabilities=[DittoDurability(runtime, **KEY)])

        @agent.tool_plain
        def publish() -> Any:
            return object()

        for _ in range(2):
            with pytest.raises(StepError, match="is not valid"):
                await agent.run("go")


async def test_side_by_side_one_that_is_unknown_blocks_only_itself(tmp_path: Path, store: Path) -> None:
    done: list[str] = []
    script: list[Reply] = [say(*((f"c{n}", "publish", str(n)) for n in range(3)))]
    async with ScriptedProvider(tmp_path / "model.db", script) as provider, durable(store) as runtime:
        agent = Agent(openai_model(provider.base_url), capabilities=[DittoDurability(runtime, **KEY)])

        @agent.tool_plain
        async def publish(text: str) -> str:
            done.append(text)
            if text == "0":
                raise OSError("the line went dead")
            return text

        with pytest.raises(UnknownOutcomeError) as unknown:
            await agent.run("go")
        assert done == ["0", "1", "2"]
        assert unknown.value.steps == ("t/c0",)


async def test_a_swallowed_error_fails_the_run_all_the_same(tmp_path: Path, store: Path) -> None:
    """A capability outside that recovers from what the journal raised does not make the run a success."""

    class Swallows(AbstractCapability[Any]):
        async def on_tool_execute_error(self, ctx: RunContext[Any], **about: Any) -> Any:
            return "never mind"

        async def on_run_error(self, ctx: RunContext[Any], *, error: BaseException) -> AgentRunResult[Any]:
            return AgentRunResult("all is well")

    script: list[Reply] = [say(("c1", "look", "a")), Text("done")]
    async with ScriptedProvider(tmp_path / "model.db", script) as provider, durable(store) as runtime:
        agent = Agent(openai_model(provider.base_url), capabilities=[Swallows(), DittoDurability(runtime, **KEY)])

        @agent.tool_plain(metadata={"ditto": {"effect": "read"}})
        def look(text: str) -> str:
            raise OSError("the line went dead")

        with pytest.raises(StepError, match="the line went dead"):
            await agent.run("go")


async def test_one_more_model_call_than_allowed_is_not_sent(tmp_path: Path, store: Path) -> None:
    script: list[Reply] = [say((f"c{n}", "look", "a")) for n in range(5)]
    async with ScriptedProvider(tmp_path / "model.db", script) as provider, durable(store) as runtime:
        agent = Agent(
            openai_model(provider.base_url), capabilities=[DittoDurability(runtime, **KEY, max_model_calls=2)]
        )

        @agent.tool_plain(metadata={"ditto": {"effect": "read"}})
        def look(text: str) -> str:
            return text

        with pytest.raises(LimitExceededError, match="max_model_calls"):
            await agent.run("go")
        assert provider.count == 2


async def test_a_tool_called_within_a_tool_is_part_of_its_effect(tmp_path: Path, store: Path) -> None:
    """The turn has one slot: the inner call neither waits for it nor is an operation of its own."""
    done: list[str] = []
    script: list[Reply] = [say(("c1", "outer", "a")), Text("done")]
    async with ScriptedProvider(tmp_path / "model.db", script) as provider, durable(store) as runtime:
        agent = Agent(openai_model(provider.base_url), capabilities=[DittoDurability(runtime, **KEY)])

        @agent.tool
        async def outer(ctx: RunContext[None], text: str) -> str:
            done.append("outer")
            assert ctx.tool_manager is not None
            return str(await ctx.tool_manager.handle_call(ToolCallPart("inner", {"text": text}, tool_call_id="i1")))

        @agent.tool_plain
        async def inner(text: str) -> str:
            done.append("inner")
            return f"{text}!"

        result = await agent.run("go")
        assert results_of(result.all_messages())[0] == ("a!", "success")
        steps = (await runtime.get(Turn(**KEY, model_key="x").run_id)).steps
        assert [step.path for step in steps] == ["m/1", "t/c1", "m/2"]
    assert done == ["outer", "inner"]


async def test_one_of_several_models_may_answer(tmp_path: Path, store: Path) -> None:
    """A FallbackModel is one model: what its first one refuses is decided within one call."""
    async with (
        ScriptedProvider(tmp_path / "one.db", [Failure(503)]) as one,
        ScriptedProvider(tmp_path / "two.db", [Text("done")]) as two,
        durable(store) as runtime,
    ):
        model = FallbackModel(openai_model(one.base_url), openai_model(two.base_url))
        agent = Agent(model, capabilities=[DittoDurability(runtime, **KEY)])
        for _ in range(2):
            assert (await agent.run("go")).output == "done"
        assert (one.count, two.count) == (1, 1)


async def test_a_fallback_outside_of_the_journal_does_not_hide_a_refusal(tmp_path: Path, store: Path) -> None:
    async with (
        ScriptedProvider(tmp_path / "one.db", [Failure(503)]) as one,
        ScriptedProvider(tmp_path / "two.db", [Text("done")]) as two,
        durable(store) as runtime,
    ):
        agent = Agent(
            openai_model(one.base_url),
            capabilities=[ModelFallback(openai_model(two.base_url)), DittoDurability(runtime, **KEY)],
        )
        with pytest.raises(EffectNotMade) as refused:
            await agent.run("go")
        assert refused.value.code == "provider.http_503"
        assert (one.count, two.count) == (1, 0)


async def test_a_wrong_declaration_says_what_is_right(store: Path) -> None:
    async with durable(store) as runtime:
        for number, (declared, complaint) in enumerate(
            [
                ({"effects": "read"}, "takes effect, key, lookup"),
                ({"effect": "reads"}, "'reads' is none of pure, read, idempotent, write"),
                ({"effect": "local"}, "'local' is none of"),
                ("read", "takes effect, key, lookup"),
            ]
        ):
            agent = Agent(TestModel(), capabilities=[DittoDurability(runtime, **{**KEY, "turn": str(number)})])

            @agent.tool_plain(metadata={"ditto": declared})
            def look() -> str:
                raise AssertionError("it was called")

            with pytest.raises(DefinitionError, match=complaint):
                await agent.run("go")
    with pytest.raises(DefinitionError, match="durable agent's tools"):
        current_step()


async def test_each_operation_has_a_receipt(tmp_path: Path, store: Path) -> None:
    """Handed over before the model is asked on; the same bytes again to a run that goes on."""
    script: list[Reply] = [say(("c1", "publish", "a")), Failure(500), Text("done")]
    handed: list[list[tuple[str, str]]] = []

    def keep(event: ReceiptEvent) -> None:
        handed[-1].append((event.tool_call_id, event.receipt_json))

    async with ScriptedProvider(tmp_path / "model.db", script) as provider:
        for life in range(2):
            handed.append([])
            async with durable(store) as runtime:
                agent = Agent(
                    openai_model(provider.base_url),
                    capabilities=[DittoDurability(runtime, **KEY, on_receipt=keep)],
                )

                @agent.tool_plain
                def publish(text: str) -> str:
                    return "out"

                with pytest.raises(EffectNotMade) if life == 0 else nullcontext():
                    assert (await agent.run("go")).output == "done"
    assert [call_id for call_id, _ in handed[0]] == ["c1"]
    assert handed[1] == handed[0]


async def test_a_tool_says_that_nothing_was_made(store: Path) -> None:
    """An EffectNotMade is told to the model, as with ditto's own tools."""
    async with durable(store) as runtime:
        agent = Agent(TestModel(), capabilities=[DittoDurability(runtime, **KEY)])

        @agent.tool_plain
        def publish() -> str:
            raise EffectNotMade("the shop is closed")

        assert results_of((await agent.run("go")).all_messages()) == [("the shop is closed", "failed")]


async def test_no_credential_is_stored(tmp_path: Path, store: Path) -> None:
    sent: list[str] = []

    async def note(request: Any) -> None:
        sent.append(request.headers["x-tenant"])

    async with ScriptedProvider(tmp_path / "model.db", [Failure(401), Text("done")]) as provider:
        async with durable(store) as runtime:
            model = openai_model(provider.base_url)
            CLIENTS[-1].event_hooks["request"].append(note)
            agent = Agent(
                model,
                model_settings={"extra_headers": {"x-tenant": "header-not-for-the-store"}},
                capabilities=[DittoDurability(runtime, **KEY)],
            )
            with pytest.raises(EffectNotMade):
                await agent.run("go")
            assert (await agent.run("go")).output == "done"
        assert sent == ["header-not-for-the-store"] * 2
    kept = b"".join(path.read_bytes() for path in store.parent.glob("ditto.db*") if path.is_file())
    assert b"not-for-the-store" not in kept


# Within a JournaledAgent


async def test_a_journaled_agent_binds_the_models_of_a_framework(tmp_path: Path, store: Path) -> None:
    done: list[str] = []

    async def handler(arguments: dict[str, Any]) -> str:
        done.append(arguments["text"])
        if arguments["text"] == "bad":
            raise ToolError("no such report", code="report.unknown")
        return f"{arguments['text']} is out"

    publish = Tool("publish", handler, PUBLISH, description="Publishes.")

    async def converse(bindings: PydanticBindings) -> str:
        agent = Agent(bindings.model, toolsets=[bindings.toolset])
        result = await agent.run("go")
        assert results_of(result.all_messages())[:2] == [
            ("a is out", "success"),
            ("report.unknown: no such report", "failed"),
        ]
        assert "tool.arguments" in str(results_of(result.all_messages())[2])
        assert set(bindings.tools) == {"publish"}
        return result.output

    script: list[Reply] = [
        ToolCalls(
            [
                Call("c1", "publish", '{"text": "a"}'),
                Call("c2", "publish", '{"text": "bad"}'),
                Call("c3", "publish", '{"txt": "a"}'),
            ]
        ),
        Text("done"),
    ]
    async with ScriptedProvider(tmp_path / "model.db", script) as provider:
        for _ in range(2):
            config = Config(sandbox=SandboxConfig(tools=("publish",)))
            async with create_ditto(
                config, store=store, workers=[create_interaction_worker(tools=[publish])]
            ) as runtime:
                agent = JournaledAgent(runtime, openai_model(provider.base_url), [publish], **KEY, model_key="tiny/1")
                assert await agent.run(converse) == "done"
        assert provider.count == 2
    assert done == ["a", "bad"]


async def test_a_model_of_no_known_framework_is_refused(store: Path) -> None:
    async with durable(store) as runtime:
        with pytest.raises(DefinitionError, match="or a model of pydantic_ai, not int"):
            JournaledAgent(runtime, 3, **KEY, model_key="tiny/1")


# The package


async def test_ditto_never_imports_the_framework_and_says_what_is_missing() -> None:
    program = """
import sys
import ditto, ditto.journal
assert not [name for name in sys.modules if name.partition(".")[0] == "pydantic_ai"]
sys.modules["pydantic_ai"] = None
try:
    import ditto.journal.pydantic_ai
except ImportError as error:
    print(error)
"""
    done = await anyio.run_process([sys.executable, "-c", program], cwd=ROOT)
    assert b"pip install 'ditto-runtime[pydantic-ai]'" in done.stdout


async def test_a_function_model_may_stand_in(store: Path) -> None:
    """Models that run in the program need no provider, and are journaled like any other."""
    asked = 0

    def answer(messages: Any, info: Any) -> ModelResponse:
        nonlocal asked
        asked += 1
        return ModelResponse(parts=[TextPart(f"answer {asked}")])

    async with durable(store) as runtime:
        for _ in range(2):
            agent = Agent(FunctionModel(answer), capabilities=[DittoDurability(runtime, **KEY)])
            assert (await agent.run("go")).output == "answer 1"
