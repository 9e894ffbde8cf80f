"""Records: requests, answers and tools' results of Pydantic AI as JSON data, by its own adapters. Pure.

A request's record holds all that the provider gets, and nothing that differs from one start of the program to the next:
no time, no run's or conversation's id, no usage, no address, no credential, no header.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Final, Literal, TypeAlias

from pydantic import TypeAdapter
from pydantic_ai import ApprovalRequired, CallDeferred, ModelRetry, ToolFailed, ToolReturn
from pydantic_ai.messages import (
    FinishReason,
    ModelMessage,
    ModelMessagesTypeAdapter,
    ModelRequest,
    ModelResponse,
    TextPart,
    ToolCallPart,
    ToolReturnPart,
)
from pydantic_ai.models import Model, ModelRequestParameters
from pydantic_ai.settings import ModelSettings
from pydantic_core import PydanticSerializationError, to_jsonable_python

from ditto import DefinitionError, ExternalResult, Sample
from ditto import ModelRequest as AskedRequest

Kind: TypeAlias = Literal["generate", "stream", "compact"]

TRANSPORT_SETTINGS: Final = frozenset(
    {"timeout", "request_timeout", "first_event_timeout", "max_retries", "extra_headers"}
)
"""Model settings that say how a request travels, not what it asks."""

_NOT_SENT: Final = {
    "request": frozenset({"timestamp", "run_id", "conversation_id", "metadata"}),
    "response": frozenset(
        {
            "timestamp",
            "run_id",
            "conversation_id",
            "metadata",
            "usage",
            "model_id",
            "provider_url",
            "workspace_ref",
            "history_digest",
            "failed_attempts",
        }
    ),
}
"""Fields of a message that its provider does not get."""

_TOOL_NOT_SENT: Final = {"__all__": {"metadata", "timeout", "toolset_id", "capability_id"}}
_NATIVE_SECRETS: Final = ("authorization_token", "headers")
_UNORDERED: Final = ("revealed_tool_names", "introduced_tool_names", "deferred_capability_ids")

_parameters: Final = TypeAdapter(ModelRequestParameters)
_tool_return: Final = TypeAdapter(ToolReturn)

CALL_IDS: Final = "ditto.call_ids"
"""Where an answer's `metadata` keeps the provider's own ids of the calls that were given others, by the new one."""

_CALL_ID_BYTES_MAX: Final = 256


def request_record(
    kind: Kind,
    model: Model[Any],
    messages: Sequence[ModelMessage],
    settings: ModelSettings | None,
    parameters: ModelRequestParameters,
) -> AskedRequest:
    """All that identifies a request. Raises DefinitionError if it holds what is no data."""
    try:
        offered = _parameters.dump_python(
            parameters, mode="json", exclude={"function_tools": _TOOL_NOT_SENT, "output_tools": _TOOL_NOT_SENT}
        )
        sampling = {
            name: to_jsonable_python(value)
            for name, value in (settings or {}).items()
            if name not in TRANSPORT_SETTINGS
        }
        sent = ModelMessagesTypeAdapter.dump_python(list(messages), mode="json")
    except PydanticSerializationError as error:
        raise DefinitionError(f"a request to model {model.model_name} cannot be written down: {error}") from None
    for name in _UNORDERED:
        offered[name] = sorted(offered[name] or ())
    offered["native_tools"] = [_without_secrets(tool) for tool in offered["native_tools"]]
    parts = {
        "kind": kind,
        "model": model.model_id,
        "settings": sampling,
        "tools": offered.pop("function_tools"),
        "messages": [_as_sent(message) for message in sent],
        "output": offered,
    }
    return AskedRequest(f"model {model.model_name}", parts)


def _as_sent(message: dict[str, Any]) -> dict[str, Any]:
    left_out = _NOT_SENT[message["kind"]]
    kept = {name: value for name, value in message.items() if name not in left_out}
    kept["parts"] = [_part_as_sent(part) for part in message["parts"]]
    return kept


def _part_as_sent(part: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in part.items() if name not in ("timestamp", "metadata")}
    if part["part_kind"] == "user-prompt" and isinstance(part["content"], list):
        kept["content"] = [_content_as_sent(each) for each in part["content"]]
    return kept


def _content_as_sent(content: Any) -> Any:
    if not isinstance(content, dict):
        return content
    return {name: value for name, value in content.items() if name != "metadata"}


def _without_secrets(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool that the provider runs: its address may hold a credential, too, so only its digest is kept."""
    kept = {name: value for name, value in tool.items() if name not in _NATIVE_SECRETS}
    if isinstance(kept.get("url"), str):
        kept["url"] = f"sha256:{hashlib.sha256(kept['url'].encode()).hexdigest()}"
    return kept


# Answers


def write_response(response: ModelResponse) -> dict[str, Any]:
    """A model's answer as JSON data."""
    written: dict[str, Any] = ModelMessagesTypeAdapter.dump_python([response], mode="json")[0]
    return written


def read_response(written: Any) -> ModelResponse:
    """The answer that was written; or the Sample that a person gave in place of one that was lost."""
    if "message" in written:
        return _of_sample(Sample.model_validate(written))
    message = ModelMessagesTypeAdapter.validate_python([written])[0]
    assert isinstance(message, ModelResponse)
    return message


def _of_sample(sample: Sample) -> ModelResponse:
    given = sample.message
    calls = [ToolCallPart(call.name, call.arguments, tool_call_id=call.id) for call in given.tool_calls]
    texts = [TextPart(given.content)] if given.content else []
    reasons: dict[str, FinishReason] = {"length": "length", "content_filter": "content_filter"}
    reason = reasons.get(sample.finish_reason, "tool_call" if calls else "stop")
    return ModelResponse(parts=[*texts, *calls], finish_reason=reason)


def has_calls(response: ModelResponse) -> bool:
    """Whether an answer calls a tool that runs here."""
    return any(isinstance(part, ToolCallPart) for part in response.parts)


class ResponseCallIds:
    """The ids of the tool calls in a written answer. One that cannot name an operation counts as left out."""

    def read(self, answer: Any) -> list[str | None]:
        """The id of each call, in the answer's order."""
        return [_usable(part["tool_call_id"]) for part in _calls(answer)]

    def replace(self, answer: Any, ids: Sequence[str]) -> Any:
        """The answer with these ids; those of the provider are in its metadata."""
        given = [part["tool_call_id"] for part in _calls(answer)]
        new = iter(ids)
        parts = [
            {**part, "tool_call_id": next(new)} if part["part_kind"] == "tool-call" else part
            for part in answer["parts"]
        ]
        replaced = {made: old for made, old in zip(ids, given, strict=True) if made != old}
        return {**answer, "parts": parts, "metadata": {**(answer["metadata"] or {}), CALL_IDS: replaced}}


def _calls(answer: Any) -> list[dict[str, Any]]:
    if "message" in answer:
        return [{"tool_call_id": call["id"]} for call in answer["message"]["tool_calls"]]
    return [part for part in answer["parts"] if part["part_kind"] == "tool-call"]


def _usable(call_id: Any) -> str | None:
    if not isinstance(call_id, str) or not call_id.isprintable() or "/" in call_id:
        return None
    return call_id if len(call_id.encode("utf-8", "replace")) <= _CALL_ID_BYTES_MAX else None


def find_call(messages: Sequence[ModelMessage], call_id: str) -> tuple[ToolCallPart, ModelResponse] | None:
    """The call with this id in a conversation, the latest first, and the answer that it is from."""
    for message in reversed(messages):
        if isinstance(message, ModelResponse):
            for part in message.parts:
                if isinstance(part, ToolCallPart) and part.tool_call_id == call_id:
                    return part, message
    return None


# What a tool came to


def write_result(result: Any) -> dict[str, Any]:
    """What a tool returned, or the signal to the framework that it raised, as JSON data.

    Raises PydanticSerializationError for what is neither data nor a file's content.
    """
    match result:
        case ModelRetry():
            return {"kind": "retry", "message": result.message}
        case ToolFailed():
            return {"kind": "failed", "message": result.message}
        case ApprovalRequired():
            return {"kind": "approval", "metadata": to_jsonable_python(result.metadata)}
        case CallDeferred():
            return {"kind": "deferred", "of": result.kind, "metadata": to_jsonable_python(result.metadata)}
        case ToolReturn():
            return {"kind": "return", "return": _tool_return.dump_python(result, mode="json")}
    return {"kind": "content", "content": _dump_content(result)}


def read_result(written: Any) -> Any:
    """What the tool returned, or a person said that it did. Raises the signal that it raised."""
    match written.get("kind"):
        case None:
            return value_of(ExternalResult.model_validate(written))
        case "retry":
            raise ModelRetry(written["message"])
        case "failed":
            raise ToolFailed(written["message"])
        case "approval":
            raise ApprovalRequired(written["metadata"])
        case "deferred":
            raise CallDeferred(written["metadata"], kind=written["of"])
        case "return":
            return _tool_return.validate_python(written["return"])
    return _load_content(written["content"])


def value_of(result: ExternalResult) -> Any:
    """What the model is told of a result of ditto's own kind. Raises ToolFailed for one that is no success."""
    if result.error is not None:
        raise ToolFailed(f"{result.error.code}: {result.error.message}")
    if result.status != "success":
        raise ToolFailed(result.status)
    return result.content if result.structured is None else result.structured


def _dump_content(content: Any) -> Any:
    """By the part that would hold it: so files in it come back as files."""
    part = ToolReturnPart(tool_name="", content=content, tool_call_id="")
    return ModelMessagesTypeAdapter.dump_python([ModelRequest(parts=[part])], mode="json")[0]["parts"][0]


def _load_content(written: Any) -> Any:
    (part,) = ModelMessagesTypeAdapter.validate_python([{"kind": "request", "parts": [written]}])[0].parts
    assert isinstance(part, ToolReturnPart)
    return part.content
