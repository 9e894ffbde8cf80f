"""The interaction worker: what is refused before a call, how calls are planned, and how they end."""

from __future__ import annotations

import inspect
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from ditto import (
    Absent,
    Action,
    Committed,
    Config,
    DefinitionError,
    EffectClass,
    EffectNotMade,
    EffectRejected,
    ExternalResult,
    OutputError,
    ResultError,
    Sandbox,
    SandboxDenied,
    StepContext,
    StepTimeoutError,
    Tool,
    ToolError,
)
from ditto.contracts import OutputInput, ToolInput
from ditto.worker import as_data
from ditto_workers import create_interaction_worker

ADD_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"x": {"type": "integer"}},
    "required": ["x"],
    "additionalProperties": False,
}


class Add(BaseModel):
    x: int
    label: str = "none"


def step_context(*tools: str) -> StepContext:
    return StepContext(
        run_id="r-1",
        path="act",
        key="r-1/1/act",
        attempt=1,
        config=Config(),
        sandbox=Sandbox(tools=tools),
        logger=logging.getLogger("ditto.test"),
    )


def plan(tool: Tool, arguments: dict[str, Any], *, node: str = "ACT.TOOL", call_id: str | None = "c1") -> Action:
    worker = create_interaction_worker(tools=[tool])
    request = ToolInput(tool=tool.name, arguments=arguments, call_id=call_id)
    return worker.handlers[f"INTERACTION.{node}"].plan(request)


async def end(action: Action, ctx: StepContext | None = None) -> Any:
    """The action's value, as the engine makes it."""
    returned = action.call(ctx or step_context("add"))
    return action.result(await returned if inspect.isawaitable(returned) else returned)


def add(arguments: dict[str, Any]) -> int:
    return int(arguments["x"]) + 1


def tool(handler: Any = add, **more: Any) -> Tool:
    return Tool(name="add", handler=handler, **{"input_schema": ADD_SCHEMA, "effect": "read", **more})


def never(arguments: Any) -> None:
    raise AssertionError("the handler must not be called")


def test_importing_the_workers_brings_in_neither_httpx_nor_jsonschema() -> None:
    code = "import ditto_workers, sys; print(sorted({'httpx', 'jsonschema', 'referencing'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=_env())
    assert found.stdout.strip() == "[]"


def _env() -> dict[str, str]:
    import ditto
    import ditto_workers

    folders = {Path(module.__file__ or "").parents[1] for module in (ditto, ditto_workers)}
    return {"PYTHONPATH": ":".join(map(str, sorted(folders)))}


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(DefinitionError, match="two tools are called 'add'"):
        create_interaction_worker(tools=[tool(), tool()])


def test_a_tool_nobody_has_is_refused_with_the_close_names() -> None:
    worker = create_interaction_worker(tools=[tool()])
    with pytest.raises(EffectRejected, match="did you mean add") as raised:
        worker.handlers["INTERACTION.ACT.TOOL"].plan(ToolInput(tool="addd"))
    assert raised.value.code == "tool.unknown"


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "objekt"}, "no valid JSON Schema"),
        ({"properties": {"a": {"$ref": "https://example.com/a.json"}}}, "is remote"),
        ({"$defs": {"a": {"$dynamicRef": "other.json#x"}}}, "is remote"),
    ],
)
def test_a_schema_that_is_none_or_leads_outside_is_refused_when_the_worker_is_created(
    schema: dict[str, Any], message: str
) -> None:
    for place in ("input_schema", "output_schema"):
        with pytest.raises(DefinitionError, match=message) as raised:
            create_interaction_worker(tools=[tool(**{place: schema})])
        assert f"tool add: {place}" in str(raised.value)


@pytest.mark.parametrize("schema", [ADD_SCHEMA, Add])
@pytest.mark.parametrize(
    ("arguments", "named"), [({"x": "abc"}, "x: "), ({}, "x"), ({"x": 1.5}, "x: ")], ids=["wrong", "missing", "part"]
)
def test_a08_arguments_that_fail_the_schema_name_the_field_before_anything_is_called(
    schema: Any, arguments: dict[str, Any], named: str
) -> None:
    with pytest.raises(ToolError) as raised:
        plan(tool(never, input_schema=schema), arguments, call_id=None)
    assert raised.value.code == "tool.arguments"
    assert not raised.value.retryable
    assert named in str(raised.value)


@pytest.mark.asyncio
async def test_a08_a_call_of_a_model_that_fails_the_schema_is_told_so_and_admits_nothing() -> None:
    action = plan(tool(never), {"x": "abc"}, call_id="c1")
    assert action.effect is EffectClass.PURE
    told = await end(action)
    assert (told.call_id, told.source, told.status) == ("c1", "add", "failed")
    assert told.error is not None
    assert told.error.code == "tool.arguments"
    assert "x: " in told.error.message


def test_many_and_long_problems_are_cut() -> None:
    schema = {"type": "object", "additionalProperties": {"type": "integer"}}
    with pytest.raises(ToolError) as raised:
        plan(tool(never, input_schema=schema), {f"k{n}": "y" * 5000 for n in range(20)}, call_id=None)
    assert "and 15 more" in str(raised.value)
    assert len(str(raised.value)) < 1500


def test_a_reference_inside_the_schema_is_followed_and_one_that_leads_nowhere_is_named() -> None:
    schema = {"properties": {"x": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"type": "integer"}}}
    assert plan(tool(input_schema=schema), {"x": 1}).arguments == {"x": 1}
    with pytest.raises(ToolError):
        plan(tool(input_schema=schema), {"x": "a"}, call_id=None)
    with pytest.raises(DefinitionError, match="leads nowhere"):
        plan(tool(input_schema={"properties": {"x": {"$ref": "#/$defs/m"}}}), {"x": 1})


@pytest.mark.asyncio
async def test_an_action_carries_all_that_the_tool_declares(tmp_path: Path) -> None:
    def record(connection: Any, outcome: Any) -> None: ...

    asked: list[Any] = []

    def lookup(key: str, arguments: Add, ctx: StepContext) -> Absent:
        asked.append((key, arguments, ctx.run_id))
        return Absent()

    declared = Tool(
        name="add",
        handler=lambda arguments: arguments.x,
        input_schema=Add,
        effect=lambda arguments: "write" if arguments.x > 0 else "read",
        key=lambda arguments: f"add-{arguments.x}",
        lookup=lookup,
        absence_is_final=True,
        absence_grace_s=2.5,
        record=record,
        database=tmp_path / "a.db",
        timeout_s=9.0,
    )
    action = plan(declared, {"x": 1})
    assert (action.label, action.effect, action.key) == ("tool add", EffectClass.WRITE, "add-1")
    assert action.arguments == Add(x=1)
    assert action.recorded() == {"tool": "add", "arguments": {"x": 1, "label": "none"}}
    assert (action.absence_is_final, action.absence_grace_s, action.timeout_s) == (True, 2.5, 9.0)
    assert (action.record, action.database, action.output) == (record, tmp_path / "a.db", ExternalResult)
    assert not action.is_async
    assert action.lookup is not None
    assert action.lookup("add-1", step_context("add")) == Absent()
    assert asked == [("add-1", Add(x=1), "r-1")]
    assert plan(declared, {"x": 0}).effect is EffectClass.READ
    handlers = create_interaction_worker(tools=[declared]).handlers
    assert handlers["INTERACTION.ACT.TOOL"].local_databases == (("add", tmp_path / "a.db"),)


def test_a_tool_that_declares_nothing_is_a_write_without_key_or_lookup() -> None:
    action = plan(Tool(name="add", handler=add, input_schema=ADD_SCHEMA), {"x": 1})
    assert (action.effect, action.key, action.lookup) == (EffectClass.WRITE, None, None)


def test_a_key_that_is_no_text_and_an_effect_that_is_none_are_mistakes_of_the_program() -> None:
    with pytest.raises(DefinitionError, match=r"key\(arguments\)"):
        plan(tool(key=lambda arguments: ""), {"x": 1})
    with pytest.raises(DefinitionError, match="effect 'wrote' is unknown"):
        plan(tool(effect=lambda arguments: "wrote"), {"x": 1})


def test_a_local_handler_must_be_a_plain_function() -> None:
    async def handler(arguments: Any) -> None: ...

    with pytest.raises(DefinitionError, match="plain function"):
        create_interaction_worker(tools=[tool(handler, effect="local")])
    with pytest.raises(DefinitionError, match="plain function"):
        plan(tool(handler, effect=lambda arguments: "local"), {"x": 1})


@pytest.mark.asyncio
async def test_a_tool_that_the_sandbox_does_not_list_is_neither_called_nor_looked_up() -> None:
    action = plan(tool(never, effect="write", lookup=lambda key, arguments, ctx: never(key)), {"x": 1})
    with pytest.raises(SandboxDenied, match=r"sandbox\.tools") as raised:
        await end(action, step_context("other"))
    assert action.failure(raised.value) is None, "the tool has not begun, so this is no answer from outside"
    assert action.lookup is not None
    with pytest.raises(SandboxDenied):
        action.lookup("k", step_context("other"))


@pytest.mark.asyncio
@pytest.mark.parametrize("with_context", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
async def test_handlers_are_called_as_they_are_written(with_context: bool, is_async: bool) -> None:
    def one(arguments: Any) -> Any:
        return {"got": arguments["x"], "key": None}

    def two(arguments: Any, ctx: StepContext) -> Any:
        return {"got": arguments["x"], "key": ctx.key}

    async def one_async(arguments: Any) -> Any:
        return one(arguments)

    async def two_async(arguments: Any, ctx: StepContext) -> Any:
        return two(arguments, ctx)

    handler = {(0, 0): one, (1, 0): two, (0, 1): one_async, (1, 1): two_async}[with_context, is_async]
    action = plan(tool(handler), {"x": 7})
    assert action.is_async is is_async
    result = await end(action)
    assert result.structured == {"got": 7, "key": "r-1/1/act" if with_context else None}


@pytest.mark.asyncio
async def test_a_handler_that_changes_its_arguments_changes_nothing_else() -> None:
    def handler(arguments: dict[str, Any]) -> str:
        arguments["x"] = 99
        return "done"

    action = plan(tool(handler), {"x": 1})
    await end(action)
    assert action.recorded() == {"tool": "add", "arguments": {"x": 1}}


class Sum(BaseModel):
    total: int


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("returned", "content", "structured"),
    [
        ("text", "text", None),
        ({"a": [1, None, True]}, "", {"a": [1, None, True]}),
        ([1], "", [1]),
        (None, "", None),
        (0, "", 0),
        (Sum(total=3), "", {"total": 3}),
    ],
)
async def test_text_becomes_content_and_other_data_structured(returned: Any, content: str, structured: Any) -> None:
    result = await end(plan(tool(lambda arguments: returned), {"x": 1}))
    assert result == ExternalResult(
        call_id="c1", source="add", status="success", content=content, structured=structured
    )


@pytest.mark.asyncio
async def test_n04_an_external_result_is_what_it_says_and_text_is_not_searched_for_errors() -> None:
    failed = ExternalResult(source="shop", status="failed", error=ResultError(code="NONE", message="no such element"))
    result = await end(plan(tool(lambda arguments: failed), {"x": 1}))
    assert result == failed.model_copy(update={"call_id": "c1"})
    own = await end(plan(tool(lambda arguments: failed.model_copy(update={"call_id": "own"})), {"x": 1}))
    assert own.call_id == "own"
    title = await end(plan(tool(lambda arguments: "Error: page title"), {"x": 1}))
    assert (title.status, title.error) == ("success", None)


@pytest.mark.asyncio
@pytest.mark.parametrize("returned", [b"bytes", {1, 2}, {"a": (1, 2)}, {1: "a"}, float("nan"), {"a": object()}])
async def test_what_is_no_json_data_is_an_output_error_that_names_the_tool(returned: Any) -> None:
    with pytest.raises(OutputError, match="add was called, but its result is no JSON data"):
        await end(plan(tool(lambda arguments: returned, effect="write"), {"x": 1}))


@pytest.mark.asyncio
@pytest.mark.parametrize("schema", [Sum, {"type": "object", "required": ["total"]}])
async def test_a_result_must_follow_the_output_schema(schema: Any) -> None:
    def planned(returned: Any) -> Action:
        return plan(tool(lambda arguments: returned, output_schema=schema), {"x": 1})

    assert (await end(planned({"total": 3}))).structured == {"total": 3}
    own = ExternalResult(source="own", status="success", structured={"total": 3})
    assert (await end(planned(own))).structured == {"total": 3}
    for wrong in ({"sum": 3}, "text", own.model_copy(update={"structured": {}})):
        with pytest.raises(OutputError, match="output schema"):
            await end(planned(wrong))
    failed = ExternalResult(source="own", status="failed", error=ResultError(code="X", message="x"))
    assert (await end(planned(failed))).status == "failed", "a failure has no output to check"


@pytest.mark.asyncio
async def test_g05_lone_surrogates_from_outside_are_repaired_and_flagged() -> None:
    result = await end(plan(tool(lambda arguments: "ok \ud83d \U0001f378"), {"x": 1}))
    assert (result.content, result.metadata) == ("ok \ufffd \U0001f378", {"repaired": True})
    nested = await end(plan(tool(lambda arguments: {"\ud800": ["\udfff"]}), {"x": 1}))
    assert (nested.structured, nested.metadata) == ({"\ufffd": ["\ufffd"]}, {"repaired": True})
    own = ExternalResult(source="s", status="success", content="\ud83d", metadata={"page": 2})
    assert (await end(plan(tool(lambda arguments: own), {"x": 1}))).metadata == {"page": 2, "repaired": True}
    failure: Any = plan(tool(), {"x": 1}).failure(ToolError("half \ud83d", code="X"))
    assert failure.error.message == "half \ufffd"


def failure_of(effect: str, error: Exception) -> Any:
    return plan(tool(effect=effect), {"x": 1}).failure(error)


@pytest.mark.parametrize("effect", ["pure", "read", "idempotent", "write"])
@pytest.mark.parametrize("kind", [ToolError, EffectRejected, EffectNotMade, SandboxDenied])
def test_a_definite_failure_is_a_result(effect: str, kind: type[ToolError]) -> None:
    result = failure_of(effect, kind("out of stock", code="NO_STOCK", retryable=True))
    assert as_data(result) == as_data(
        ExternalResult(
            call_id="c1",
            source="add",
            status="failed",
            error=ResultError(code="NO_STOCK", message="out of stock", retryable=True),
        )
    )


@pytest.mark.parametrize("effect", ["pure", "read", "idempotent"])
def test_any_other_exception_of_what_can_be_repeated_is_a_result_too(effect: str) -> None:
    result = failure_of(effect, KeyError("sku"))
    assert (result.status, result.error.code, result.error.message) == ("failed", "tool.exception", "KeyError: 'sku'")
    late = failure_of(effect, StepTimeoutError("after 9 s"))
    assert (late.status, late.error.code) == ("timeout", "step.timeout")


def test_any_other_exception_of_a_write_tells_nothing() -> None:
    assert failure_of("write", KeyError("sku")) is None
    assert failure_of("write", TimeoutError()) is None
    assert failure_of("write", StepTimeoutError("after 9 s")) is None


def test_a_local_handler_that_raises_fails_the_step() -> None:
    assert failure_of("local", ToolError("no")) is None
    assert failure_of("local", KeyError("sku")) is None


def test_a_result_that_cannot_be_used_stays_an_error() -> None:
    assert failure_of("read", OutputError("no JSON")) is None


@pytest.mark.asyncio
async def test_what_a_look_up_found_is_wrapped_like_what_the_handler_returns() -> None:
    async def lookup(key: str, arguments: Any, ctx: StepContext) -> Committed:
        return Committed({"id": key})

    action = plan(tool(effect="write", lookup=lookup), {"x": 1})
    assert inspect.iscoroutinefunction(action.lookup)
    found = await action.lookup("k-1", step_context("add"))
    assert action.result(found.value) == ExternalResult(
        call_id="c1", source="add", status="success", structured={"id": "k-1"}
    )


def test_observe_takes_only_what_reads_with_these_arguments() -> None:
    declared = tool(effect=lambda arguments: "read" if arguments["x"] == 0 else "idempotent")
    assert plan(declared, {"x": 0}, node="OBSERVE").effect is EffectClass.READ
    with pytest.raises(EffectRejected, match=r"Use INTERACTION\.ACT\.TOOL") as raised:
        plan(declared, {"x": 1}, node="OBSERVE")
    assert raised.value.code == "tool.not_read"


def output_action(output: Any = None) -> Action:
    message = OutputInput(content={"total": 3}, channel="mail")
    return create_interaction_worker(output=output).handlers["INTERACTION.OUTPUT"].plan(message)


@pytest.mark.asyncio
async def test_output_calls_the_function_of_the_application() -> None:
    seen: list[Any] = []

    def output(message: OutputInput) -> None:
        seen.append((message.channel, message.content))

    async def output_with_context(message: OutputInput, ctx: StepContext) -> str:
        seen.append(ctx.key)
        return "sent"

    action = output_action(output)
    assert (action.effect, action.is_async) == (EffectClass.IDEMPOTENT, False)
    assert action.recorded() == {"content": {"total": 3}, "channel": "mail"}
    assert await end(action) == ExternalResult(source="output", status="success")
    assert (await end(output_action(output_with_context))).content == "sent"
    assert seen == [("mail", {"total": 3}), "r-1/1/act"]
    failed: Any = action.failure(OSError("no route"))
    assert (failed.status, failed.error.message) == ("failed", "OSError: no route")


@pytest.mark.asyncio
async def test_output_without_a_function_hands_its_content_through() -> None:
    result = await end(output_action())
    assert result == ExternalResult(source="output", status="success", structured={"total": 3})
