"""Ids of tool calls: unique in their conversation, whatever a provider makes of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from ditto.contracts.inference import Sample, SampleInput
from ditto.contracts.messages import Message

CUT_ANSWER: Final = (
    "the answer was cut by its length limit before this call was complete; send the call again, or a shorter one"
)
"""What a model is told of each call of such an answer: none of them is made, even if it parses."""


CALL_ID_BYTES_MAX: Final = 256


def is_call_id(text: str) -> bool:
    """Whether a text can be the id of a call, which becomes a part of a path: printable, without `/`, not too long."""
    return text.isprintable() and "/" not in text and 0 < len(text.encode("utf-8", "replace")) <= CALL_ID_BYTES_MAX


def unique_ids(given: Sequence[str | None], taken: Iterable[str], ordinal: int) -> list[str]:
    """The ids themselves where each is usable and new; else `call_<ordinal>_<position>`, counted from 1."""
    used = set(taken)
    made: list[str] = []
    for position, call_id in enumerate(given, start=1):
        chosen = call_id or ""
        if not is_call_id(chosen) or chosen in used:
            chosen = f"call_{ordinal}_{position}"
            while chosen in used or chosen in given:
                chosen += "_"
        used.add(chosen)
        made.append(chosen)
    return made


def calls_of(messages: Iterable[Message]) -> list[str]:
    """The ids of all calls in a conversation."""
    return [call.id for message in messages for call in message.tool_calls]


def with_unique_ids(sample: Sample, request: SampleInput, taken: Iterable[str] = ()) -> Sample:
    """The answer to a request, each of its calls with an id that no call before it has, and that is not `taken`.

    The provider's own ids, where they were replaced, are in `raw["call_ids"]`, by the new one.
    """
    calls = sample.message.tool_calls
    ordinal = 1 + sum(message.role == "assistant" for message in request.messages)
    ids = unique_ids([call.id for call in calls], [*calls_of(request.messages), *taken], ordinal)
    if all(made == call.id for made, call in zip(ids, calls, strict=True)):
        return sample
    before: dict[str, Any] = dict(sample.raw.get("call_ids") or {})  # type: ignore[arg-type]
    provided = {made: before.get(call.id, call.id) for made, call in zip(ids, calls, strict=True)}
    replaced = {made: own for made, own in provided.items() if made != own}
    named = tuple(call.model_copy(update={"id": made}) for made, call in zip(ids, calls, strict=True))
    return sample.model_copy(
        update={
            "message": sample.message.model_copy(update={"tool_calls": named}),
            "raw": {**sample.raw, "call_ids": replaced},
        }
    )
