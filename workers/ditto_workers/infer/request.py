"""The body of a chat-completions request, built from a SampleInput and the provider's behaviour alone.

So the step's recorded arguments are all that the provider gets, but for the address, the key and the configured
headers. The format: https://platform.openai.com/docs/api-reference/chat/create.
"""

from __future__ import annotations

from typing import Any, Final

from ditto import Message, ToolOffer
from ditto.config import ProviderConfig
from ditto.contracts import SampleInput
from ditto_workers.infer.arguments import sent_arguments

_SCHEMA_NAME: Final = "answer"


def build_request(request: SampleInput, provider_config: ProviderConfig) -> dict[str, Any]:
    """The body as JSON data. What the request does not set is left out, so that the provider's default holds."""
    body: dict[str, Any] = {
        "model": request.model.name,
        "messages": [_message(message, provider_config) for message in request.messages],
    }
    if request.tools:
        body["tools"] = [_tool(offer) for offer in request.tools]
    for name in ("temperature", "top_p", "seed"):
        value = getattr(request, name)
        if value is not None:
            body[name] = value
    if request.max_tokens is not None:
        body[provider_config.max_tokens_field] = request.max_tokens
    if request.stop:
        body["stop"] = list(request.stop)
    if request.stream:
        body["stream"] = True
        if provider_config.usage_in_stream:
            body["stream_options"] = {"include_usage": True}
    if request.response_schema is not None:
        body["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": _SCHEMA_NAME, "schema": request.response_schema, "strict": False},
        }
    return body


def _message(message: Message, provider_config: ProviderConfig) -> dict[str, Any]:
    sent: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name is not None:
        sent["name"] = message.name
    if message.tool_call_id is not None:
        sent["tool_call_id"] = message.tool_call_id
    if message.role != "assistant":
        return sent
    if message.tool_calls:
        sent["content"] = message.content or None
        sent["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": sent_arguments(call.arguments)},
            }
            for call in message.tool_calls
        ]
    reasoning = _reasoning(message, provider_config)
    if reasoning is not None:
        sent["reasoning_content"] = reasoning
    return sent


def _reasoning(message: Message, provider_config: ProviderConfig) -> str | None:
    """What is sent back of the reasoning: some providers require it, some refuse it."""
    match provider_config.reasoning_history:
        case "omit":
            return None
        case "keep":
            return message.reasoning
        case "send":
            return message.reasoning or ""


def _tool(offer: ToolOffer) -> dict[str, Any]:
    function: dict[str, Any] = {"name": offer.name, "parameters": offer.parameters}
    if offer.description:
        function["description"] = offer.description
    return {"type": "function", "function": function}
