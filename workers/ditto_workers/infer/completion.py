"""An OpenAI-compatible completion, from its JSON document to a Sample. Pure.

Tolerant of the forms in which servers write the same thing, strict about what would lose or invent something.
The format: https://platform.openai.com/docs/api-reference/chat/object.
"""

from __future__ import annotations

from typing import Any

from ditto import Message, Sample, ToolCall, Usage
from ditto_workers.infer.arguments import raw_arguments
from ditto_workers.infer.endings import FINISH_REASONS, MISSING


class ImproperAnswer(Exception):
    """The document is no complete answer; the text says what is wrong with it."""


def read_completion(document: dict[str, Any], *, kind: str) -> Sample:
    """The first choice as a Sample. `kind` says whose finish reasons it uses. Raises ImproperAnswer.

    Tool-call ids are left as they came, missing ones are empty: the journal makes them unique.
    """
    choices = document.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise ImproperAnswer("it holds no choices")
    choice = choices[0]
    body = choice.get("message")
    if not isinstance(body, dict):
        raise ImproperAnswer("its choice holds no message")
    message = _message(body)
    finish_reason = _finish_reason(choice.get("finish_reason"), message, kind)
    if not message.content and (refusal := _text(body.get("refusal"), "refusal")):
        message = message.model_copy(update={"content": refusal})
        finish_reason = "refusal"
    return Sample(
        message=message,
        finish_reason=finish_reason,
        usage=_usage(document.get("usage")),
        model=_word(document.get("model")),
        response_id=_word(document.get("id")),
    )


def _message(body: dict[str, Any]) -> Message:
    return Message(
        role="assistant",
        content=_text(body.get("content"), "content"),
        tool_calls=tuple(_call(call) for call in _calls(body)),
        reasoning=_word(body.get("reasoning_content")) or _word(body.get("reasoning")),
    )


def _finish_reason(word: Any, message: Message, kind: str) -> str:
    if word is None or word == "":
        # A whole JSON document is an end mark of its own, so a missing word does not make the answer incomplete.
        if message.content or message.tool_calls or message.reasoning:
            return MISSING
        raise ImproperAnswer("it holds neither text nor tool calls nor a finish reason")
    known = FINISH_REASONS.get(kind, FINISH_REASONS["openai"])
    if isinstance(word, str) and word.lower() in known:
        return known[word.lower()]
    raise ImproperAnswer(f"its finish reason {str(word)[:64]!r} is unknown; known are {', '.join(known)}")


def _text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
    ):
        return "".join(part["text"] for part in content)
    raise ImproperAnswer(f"the message's {where} is no text")


def _calls(body: dict[str, Any]) -> list[Any]:
    calls = body.get("tool_calls") or []
    if not isinstance(calls, list):
        raise ImproperAnswer("its tool_calls are no list")
    legacy = body.get("function_call")
    return calls if calls or not legacy else [{"function": legacy}]


def _call(call: Any) -> ToolCall:
    function = call.get("function") if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not name:
        raise ImproperAnswer("one of its tool calls names no function")
    return ToolCall(id=_word(call.get("id")) or "", name=name, arguments=raw_arguments(function.get("arguments")))


def _usage(usage: Any) -> Usage:
    """What the provider counted; None wherever it said nothing. Zero only where it said zero."""
    said = usage if isinstance(usage, dict) else {}
    return Usage(
        input_tokens=_count(said, "prompt_tokens"),
        output_tokens=_count(said, "completion_tokens"),
        cached_input_tokens=_count(said.get("prompt_tokens_details"), "cached_tokens"),
        reasoning_tokens=_count(said.get("completion_tokens_details"), "reasoning_tokens"),
    )


def _count(said: Any, name: str) -> int | None:
    count = said.get(name) if isinstance(said, dict) else None
    return count if isinstance(count, int) and not isinstance(count, bool) and count >= 0 else None


def _word(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None
