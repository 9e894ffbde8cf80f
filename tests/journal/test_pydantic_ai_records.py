"""What identifies a request of Pydantic AI's: all that the provider gets, and nothing that changes by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from pydantic_ai import BinaryContent, TextContent, ToolDefinition
from pydantic_ai.messages import (
    ImageUrl,
    ModelMessage,
    ModelRequest,
    ModelResponse,
    SystemPromptPart,
    TextPart,
    ThinkingPart,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_ai.models import ModelRequestParameters
from pydantic_ai.models.test import TestModel
from pydantic_ai.native_tools import MCPServerTool, WebSearchTool
from pydantic_ai.usage import RequestUsage

from ditto import DefinitionError
from ditto.journal.pydantic_ai.records import request_record

THEN, NOW = datetime(2026, 1, 2, tzinfo=UTC), datetime(2026, 3, 4, tzinfo=UTC)


def conversation(at: datetime, run: str) -> list[ModelMessage]:
    """A conversation as one process has it, at one time."""
    return [
        ModelRequest(
            parts=[
                SystemPromptPart("be good", timestamp=at),
                UserPromptPart(["go", TextContent("on", metadata={"seen": run})], timestamp=at),
            ],
            instructions="publish",
            timestamp=at,
            run_id=run,
            conversation_id=run,
            metadata={"seen": run},
        ),
        ModelResponse(
            parts=[
                ThinkingPart("hm", signature="signed"),
                TextPart("I do"),
                ToolCallPart("publish", {"text": "a"}, tool_call_id="c1"),
            ],
            timestamp=at,
            run_id=run,
            conversation_id=run,
            usage=RequestUsage(input_tokens=at.month),
            provider_url=f"http://{run}",
            metadata={"seen": run},
        ),
        ModelRequest(
            parts=[
                ToolReturnPart(
                    "publish", {"timestamp": "t", "metadata": 1}, tool_call_id="c1", metadata=run, timestamp=at
                )
            ],
            timestamp=at,
            run_id=run,
        ),
    ]


TOOL = ToolDefinition(
    name="publish",
    description="Publishes.",
    parameters_json_schema={"type": "object", "properties": {"text": {"type": "string"}}},
)

PARAMETERS = ModelRequestParameters(function_tools=[TOOL], native_tools=[WebSearchTool()])


def parts(messages: list[ModelMessage], settings: Any = None, parameters: ModelRequestParameters = PARAMETERS) -> Any:
    return request_record("generate", TestModel(), messages, settings, parameters).parts


def test_nothing_that_changes_by_itself_is_in_it() -> None:
    declared = replace(TOOL, metadata={"ditto": {"key": print}}, timeout=3.0, toolset_id="other")
    assert parts(conversation(THEN, "one"), {"timeout": 1, "extra_headers": {"key": "x"}}) == parts(
        conversation(NOW, "two"),
        {"timeout": 2, "max_retries": 5},
        replace(PARAMETERS, function_tools=[declared]),
    )


def with_part(message: int, part: int, new: Any) -> Callable[[list[ModelMessage]], None]:
    def change(messages: list[ModelMessage]) -> None:
        changed: Any = list(messages[message].parts)
        changed[part] = new
        messages[message] = replace(messages[message], parts=changed)

    return change


VISIBLE = {
    "system prompt": with_part(0, 0, SystemPromptPart("be bad")),
    "prompt": with_part(0, 1, UserPromptPart(["go", TextContent("off")])),
    "picture": with_part(0, 1, UserPromptPart(["go", BinaryContent(b"x", media_type="image/png")])),
    "address of a picture": with_part(0, 1, UserPromptPart(["go", ImageUrl("http://x/y.png")])),
    "thinking": with_part(1, 0, ThinkingPart("hm", signature="forged")),
    "answer": with_part(1, 1, TextPart("I don't")),
    "arguments": with_part(1, 2, ToolCallPart("publish", {"text": "b"}, tool_call_id="c1")),
    "call id": with_part(1, 2, ToolCallPart("publish", {"text": "a"}, tool_call_id="c2")),
    "result": with_part(2, 0, ToolReturnPart("publish", {"timestamp": "u", "metadata": 1}, tool_call_id="c1")),
    "its metadata": with_part(2, 0, ToolReturnPart("publish", {"timestamp": "t", "metadata": 2}, tool_call_id="c1")),
    "outcome": with_part(
        2, 0, ToolReturnPart("publish", {"timestamp": "t", "metadata": 1}, tool_call_id="c1", outcome="failed")
    ),
}


@pytest.mark.parametrize("change", VISIBLE.values(), ids=VISIBLE)
def test_all_that_the_model_sees_of_a_conversation_is_in_it(change: Callable[[list[ModelMessage]], None]) -> None:
    messages = conversation(THEN, "one")
    change(messages)
    assert parts(messages) != parts(conversation(THEN, "one"))


@pytest.mark.parametrize(
    "changed",
    [
        replace(PARAMETERS, function_tools=[replace(TOOL, description="Erases.")]),
        replace(PARAMETERS, function_tools=[replace(TOOL, strict=True)]),
        replace(PARAMETERS, function_tools=[replace(TOOL, parameters_json_schema={"type": "object"})]),
        replace(PARAMETERS, native_tools=[]),
        replace(PARAMETERS, native_tools=[WebSearchTool(max_uses=1)]),
        replace(PARAMETERS, output_tools=[replace(TOOL, kind="output")]),
        replace(PARAMETERS, allow_text_output=False),
        replace(PARAMETERS, thinking="high"),
    ],
)
def test_all_that_the_model_is_offered_is_in_it(changed: ModelRequestParameters) -> None:
    messages = conversation(THEN, "one")
    assert parts(messages, None, changed) != parts(messages)


def test_settings_are_in_it() -> None:
    messages = conversation(THEN, "one")
    assert parts(messages, {"temperature": 0.1}) != parts(messages, {"temperature": 0.2})
    assert parts(messages, {"extra_body": {"x": 1}}) != parts(messages)
    with pytest.raises(DefinitionError, match="cannot be written down"):
        parts(messages, {"extra_body": object()})


def test_no_credential_of_a_native_tool_is_in_it() -> None:
    def with_server(**options: Any) -> Any:
        server = MCPServerTool(id="files", url="https://u:secret-1@files/", **options)
        return parts([], None, ModelRequestParameters(native_tools=[server]))

    bare = with_server()
    assert bare == with_server(authorization_token="secret-2", headers={"key": "secret-3"})
    assert "secret" not in str(bare)
    assert bare != with_server(allowed_tools=["read"])


def test_sets_have_an_order() -> None:
    names = {f"tool-{number}" for number in range(20)}
    record = parts([], None, ModelRequestParameters(revealed_tool_names=names))
    assert record["output"]["revealed_tool_names"] == sorted(names)
