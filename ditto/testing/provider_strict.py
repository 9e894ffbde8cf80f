"""What a strict provider refuses: a pure check of the history in a request.

Owns the rules that real providers enforce and lenient stand-ins forget: tool calls and results in pairs, call ids
that occur once, arguments that are a JSON object in a string, and the reasoning field, which some providers require
and others refuse. Start at `find_problem`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal, TypeAlias

ReasoningRule: TypeAlias = Literal["require", "refuse", "ignore"]
"""Whether each assistant message must, must not or may carry `reasoning_content`."""

_ROLES = ("system", "developer", "user", "assistant", "tool")


def find_problem(request: dict[str, Any], *, strict: bool, reasoning_content: ReasoningRule) -> str | None:
    """The first thing wrong with the request, in words; None if it would be accepted.

    `reasoning_content` is checked whether `strict` is set or not; everything else only if it is.
    """
    messages = request.get("messages")
    if strict:
        if not isinstance(messages, list) or not messages:
            return "messages: expected a list of at least one message"
        for problem in (_shape(messages), _calls(messages), _pairs(messages)):
            found = next(problem, None)
            if found is not None:
                return found
    if reasoning_content == "ignore" or not isinstance(messages, list):
        return None
    return next(_reasoning(messages, wanted=reasoning_content == "require"), None)


def _shape(messages: list[Any]) -> Iterator[str]:
    for at, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in _ROLES:
            yield f"messages[{at}]: expected an object with a role of {', '.join(_ROLES)}"
        elif not isinstance(message.get("tool_calls") or [], list):
            yield f"messages[{at}].tool_calls: expected a list"
        elif message.get("content") is None and message["role"] != "assistant":
            yield f"messages[{at}].content: missing"


def _calls(messages: list[dict[str, Any]]) -> Iterator[str]:
    seen: dict[str, str] = {}
    for where, call in _each_call(messages):
        if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
            yield f"{where}: expected an object with a function"
            continue
        call_id, function = call.get("id"), call["function"]
        if not isinstance(call_id, str) or not call_id:
            yield f"{where}.id: expected a string"
        elif call_id in seen:
            yield f"{where}.id: {call_id!r} is the id of {seen[call_id]} too"
        else:
            seen[call_id] = where
        if not isinstance(function.get("name"), str) or not function["name"]:
            yield f"{where}.function.name: expected a string"
        if not _is_object_text(function.get("arguments")):
            yield f"{where}.function.arguments: expected a JSON object in a string, got {function.get('arguments')!r}"


def _pairs(messages: list[dict[str, Any]]) -> Iterator[str]:
    """Each call is answered once, directly after the message that made it; no result answers anything else."""
    open_calls: list[str] = []
    for at, message in enumerate(messages):
        if message["role"] == "tool":
            call_id = message.get("tool_call_id")
            if call_id not in open_calls:
                yield f"messages[{at}].tool_call_id: {call_id!r} answers no call of the assistant message before it"
            else:
                open_calls.remove(call_id)
            continue
        if open_calls:
            yield f"messages[{at}]: comes before the results of the tool calls {', '.join(open_calls)}"
        open_calls = [call["id"] for _, call in _each_call([message])]
    if open_calls:
        yield f"messages: the tool calls {', '.join(open_calls)} have no result"


def _reasoning(messages: list[Any], *, wanted: bool) -> Iterator[str]:
    for at, message in enumerate(messages):
        if isinstance(message, dict) and message.get("role") == "assistant":
            present = message.get("reasoning_content") is not None
            if present != wanted:
                word = "missing, and this provider requires it" if wanted else "present, and this provider refuses it"
                yield f"messages[{at}].reasoning_content: {word}"


def _each_call(messages: list[dict[str, Any]]) -> Iterator[tuple[str, Any]]:
    for at, message in enumerate(messages):
        for number, call in enumerate(message.get("tool_calls") or []):
            yield f"messages[{at}].tool_calls[{number}]", call


def _is_object_text(arguments: Any) -> bool:
    if not isinstance(arguments, str):
        return False
    try:
        return isinstance(json.loads(arguments, parse_constant=_no_constant), dict)
    except ValueError:
        return False


def _no_constant(word: str) -> None:
    raise ValueError(f"{word} is not JSON")
