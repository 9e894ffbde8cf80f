"""An OpenAI-compatible completion, from its JSON document to a Sample. Pure.

Tolerant of the forms in which servers write the same thing, strict about what would lose or invent something.
The format: https://platform.openai.com/docs/api-reference/chat/object.
"""

from __future__ import annotations

import json
from typing import Any, Final

from ditto import Json, Message, Sample, ToolCall, Usage
from ditto_workers.infer.arguments import raw_arguments
from ditto_workers.infer.endings import FINISH_REASONS, MISSING

KEPT: Final = ("prompt_filter_results", "system_fingerprint")
"""Fields of the document that no field of a Sample holds, and that are kept as they are, in `Sample.raw`."""

_KEPT_CHARS_MAX: Final = 16_384


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
    said = choice.get("finish_reason")
    finish_reason = _finish_reason(said, message, kind)
    refusal = as_text(body.get("refusal"), "refusal")
    if refusal and not message.content:
        message = message.model_copy(update={"content": refusal})
        finish_reason = "refusal"
    others = {
        "finish_reason": said if said != finish_reason else None,
        "refusal": refusal if refusal and refusal != message.content else None,
    }
    return Sample(
        message=message,
        finish_reason=finish_reason,
        usage=_usage(document.get("usage")),
        model=_word(document.get("model")),
        response_id=_word(document.get("id")),
        raw=_raw({**{name: document.get(name) or None for name in KEPT}, **others}),
    )


def error_in(document: dict[str, Any]) -> Any:
    """The error that a document reports, at its top, as a whole, or in its first choice; None if it reports none."""
    if document.get("object") == "error":
        return document.get("error") or document
    choices = document.get("choices")
    first = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    return document.get("error") or first.get("error") or None


def as_text(content: Any, where: str) -> str:
    """A text, or a list of parts of a text, as one text; nothing for null. Raises ImproperAnswer for all else."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
    ):
        return "".join(part["text"] for part in content)
    raise ImproperAnswer(f"the message's {where} is no text")


def reasoning_in(body: dict[str, Any]) -> str | None:
    """What a thinking model said beside its answer, under either of the two names in use."""
    return _word(body.get("reasoning_content")) or _word(body.get("reasoning"))


def _message(body: dict[str, Any]) -> Message:
    return Message(
        role="assistant",
        content=as_text(body.get("content"), "content"),
        tool_calls=tuple(_call(call) for call in _calls(body)),
        reasoning=reasoning_in(body),
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


def _raw(said: dict[str, Any]) -> dict[str, Json]:
    """What was said, without what is missing, and without what cannot be stored or is too long for a side note."""
    kept: dict[str, Json] = {}
    for name, value in said.items():
        try:
            fits = len(json.dumps(value, allow_nan=False)) <= _KEPT_CHARS_MAX
        except (ValueError, RecursionError):
            fits = False
        if value is not None and fits:
            kept[name] = value
    return kept


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
