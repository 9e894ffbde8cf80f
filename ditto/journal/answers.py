"""Answers: what a model's answer asks for, and what it is told of what came of that. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ditto import ExternalResult, Message, ResultError, Sample, ToolCall
from ditto.contracts import CUT_ANSWER


@dataclass(frozen=True, slots=True)
class PlannedCall:
    """One call of an answer: to be made with `arguments`, or answered with `refusal` and not made."""

    call_id: str
    name: str
    arguments: dict[str, Any]
    refusal: ExternalResult | None = None


def plan_calls(sample: Sample, offered: Iterable[str]) -> list[PlannedCall]:
    """The calls of an answer, in its order.

    Not made are: a call to a tool that was not offered, one whose arguments are no JSON object, and every call of an
    answer that was cut by its length limit, even if it parses. No arguments at all are an empty object.
    """
    names = frozenset(offered)
    cut = sample.finish_reason == "length"
    return [_plan(call, names, cut=cut) for call in sample.message.tool_calls]


def tool_messages(calls: Iterable[PlannedCall], results: Mapping[str, ExternalResult]) -> list[Message]:
    """What the model is told of each call, in their order: its result, or why it was not made."""
    told = [(call, call.refusal or results[call.call_id]) for call in calls]
    return [Message(role="tool", content=_text_of(result), tool_call_id=call.call_id) for call, result in told]


def _plan(call: ToolCall, offered: frozenset[str], *, cut: bool) -> PlannedCall:
    if cut:
        return _refused(call, "answer.cut", CUT_ANSWER)
    if call.name not in offered:
        known = ", ".join(sorted(offered)) or "none"
        return _refused(call, "tool.unknown", f"no tool is called {call.name!r}; there are: {known}")
    try:
        arguments = json.loads(call.arguments) if call.arguments.strip() else {}
    except (ValueError, RecursionError):
        return _refused(call, "tool.arguments", "the arguments are no JSON; send the call again with a JSON object")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return _refused(call, "tool.arguments", "the arguments must be a JSON object; send the call again")
    return PlannedCall(call.id, call.name, arguments)


def _refused(call: ToolCall, code: str, message: str) -> PlannedCall:
    error = ResultError(code=code, message=message)
    result = ExternalResult(call_id=call.id, source=call.name or "unknown", status="failed", error=error)
    return PlannedCall(call.id, call.name, {}, result)


def _text_of(result: ExternalResult) -> str:
    if result.error is not None:
        return json.dumps({"error": {"code": result.error.code, "message": result.error.message}}, ensure_ascii=False)
    if result.status != "success":
        return json.dumps({"status": result.status}, ensure_ascii=False)
    if result.structured is not None:
        return json.dumps(result.structured, ensure_ascii=False)
    return result.content
