"""What a model answered, checked. Pure: the binds of the graphs call these, and raise their ToolError.

A broken answer is a decision of the model that cannot be used, so it ends the run that asked as failed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from ditto import Json, Sample, ToolError

PREPARATION_INVALID: Final = "PREPARATION_INVALID"
"""The answer is no payload: cut short, no JSON, or fields that the payload's schema does not allow."""
SESSION_INVALID: Final = "SESSION_INVALID"
"""The answer does not repeat what the checkpoint says, or says more."""

_COMPLETE: Final = "stop"


def read_payload(sampled: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Json]:
    """The payload in a complete answer that satisfies the schema; ToolError PREPARATION_INVALID."""
    from jsonschema import Draft202012Validator

    payload = _read_object(sampled, PREPARATION_INVALID)
    if problem := next(iter(Draft202012Validator(schema).iter_errors(payload)), None):
        field = ".".join(str(part) for part in problem.absolute_path) or "the answer"
        raise _invalid(PREPARATION_INVALID, f"{field}: {problem.message[:200]}")
    return payload


def read_session_answer(sampled: Mapping[str, Any], expected: Mapping[str, Json]) -> dict[str, Json]:
    """The answer, which must have exactly the fields that are expected and their values; ToolError SESSION_INVALID."""
    answer = _read_object(sampled, SESSION_INVALID)
    if answer.keys() != expected.keys():
        raise _invalid(SESSION_INVALID, f"it has {_listed(answer)}, and was to have exactly {_listed(expected)}")
    for field, value in expected.items():
        if _canonical(answer[field]) != _canonical(value):
            raise _invalid(SESSION_INVALID, f"{field} is not what the checkpoint says")
    return answer


def _read_object(sampled: Mapping[str, Any], code: str) -> dict[str, Json]:
    """The one JSON object that a complete answer of the assistant consists of."""
    sample = Sample.model_validate(sampled)
    if sample.finish_reason != _COMPLETE:
        raise _invalid(code, f"it ended with {sample.finish_reason!r}, not {_COMPLETE!r}")
    if sample.message.role != "assistant":
        raise _invalid(code, f"it is a message of role {sample.message.role}")
    if sample.message.tool_calls:
        raise _invalid(code, "it calls tools, and none were offered")
    if not sample.message.content.strip():
        raise _invalid(code, "it is empty")
    return _parse_object(sample.message.content, code)


def _parse_object(text: str, code: str) -> dict[str, Json]:
    try:
        value = json.loads(text, object_pairs_hook=_unique_names)
        # What JSON text can say and a store cannot keep: NaN, numbers beyond a float's range, lone surrogates.
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise _invalid(code, f"it is no JSON ({error})") from None
    if not isinstance(value, dict):
        raise _invalid(code, "it is no JSON object")
    return value


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands twice in one object")
    return found


def _canonical(value: Json) -> str:
    """Tells 1 from True and from 1.0, which Python's `==` does not."""
    return json.dumps(value, sort_keys=True)


def _listed(fields: Mapping[str, Any]) -> str:
    return ", ".join(sorted(fields)) or "no field"


def _invalid(code: str, why: str) -> ToolError:
    return ToolError(f"the model's answer cannot be used: {why}. Enter the job again to ask once more", code=code)
