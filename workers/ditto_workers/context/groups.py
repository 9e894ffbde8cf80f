"""Which items of a Context belong together: a call and its results, which no cut may part.

A provider refuses a history in which a result has no call or a call no result, and then refuses it for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ditto import ContextItem


@dataclass(slots=True)
class Group:
    """Items that are kept or dropped as one, by their positions, in order.

    An assistant message with calls and the results that follow it are one group; every other item is its own, and
    so is a result whose call is not there.
    """

    positions: list[int]


def group_items(items: Sequence[ContextItem]) -> list[Group]:
    """The groups in the order of their first items. A result belongs to the latest open call with its id."""
    groups: list[Group] = []
    open_calls: dict[str, list[Group]] = {}
    for position, item in enumerate(items):
        waiting = open_calls.get(item.tool_call_id or "") if item.role == "tool" else None
        if waiting:
            waiting.pop().positions.append(position)
            continue
        group = Group([position])
        groups.append(group)
        for call in item.tool_calls if item.role == "assistant" else ():
            open_calls.setdefault(call.id, []).append(group)
    return groups
