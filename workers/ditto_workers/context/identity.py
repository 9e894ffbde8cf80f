"""The id of a context item, the hash of its canonical content; and the trace of what a summary replaced."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Final

from ditto import ContextItem, InvalidValueError, NewItem
from ditto.contracts import Replaced

_CONTENT: Final = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "source")


def item_id(item: NewItem) -> str:
    """64 hex digits: SHA-256 over compact JSON with sorted keys of everything that the item says.

    `protected` says how the item is kept and `replaces` what was there before, not what it is: no part of it.
    """
    content = item.model_dump(mode="json", include=set(_CONTENT))
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(_utf8(canonical)).hexdigest()


def identified(items: Iterable[NewItem]) -> tuple[ContextItem, ...]:
    """The items in their order, each with its id; one that is there twice stays twice."""
    return tuple(
        ContextItem(
            **{name: getattr(item, name) for name in NewItem.model_fields},
            id=item_id(item),
            replaces=item.replaces if isinstance(item, ContextItem) else None,
        )
        for item in items
    )


def traced(items: Sequence[ContextItem]) -> Replaced:
    """The trace that the summary of these items carries. Nothing in it grows with their number, but for the count."""
    lines = [item.id if item.replaces is None else f"{item.id} {item.replaces.digest}" for item in items]
    return Replaced(
        count=sum(1 if item.replaces is None else item.replaces.count for item in items),
        digest=hashlib.sha256("\n".join(lines).encode()).hexdigest(),
    )


def size_bytes(item: ContextItem) -> int:
    """The size of an item as JSON: what is counted against `bytes_max`."""
    return len(_utf8(json.dumps(item.model_dump(mode="json"), separators=(",", ":"), ensure_ascii=False)))


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise InvalidValueError(
            "a message holds half of a character (a lone surrogate), which cannot be stored; repair it where it comes "
            "from, for example by text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')"
        ) from None
