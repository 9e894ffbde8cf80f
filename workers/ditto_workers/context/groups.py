"""Which items of a Context belong together: a call and its results, which no cut may part.

A provider refuses a history in which a result has no call or a call no result, and then refuses it for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from ditto import ContextItem


@dataclass(slots=True)
class Group:
    """Items that are kept or dropped as one, by their positions, in order.

    An assistant message with calls and the results that follow it are one group; every other item is its own, and
    so is a result whose call is not there.
    """

    positions: list[int]
    calls: int = 0

    @property
    def waits(self) -> bool:
        """Whether a call of the group has no result yet."""
        return len(self.positions) <= self.calls


def group_items(items: Sequence[ContextItem]) -> list[Group]:
    """The groups in the order of their first items. A result belongs to the latest open call with its id."""
    groups: list[Group] = []
    open_calls: dict[str, list[Group]] = {}
    for position, item in enumerate(items):
        waiting = open_calls.get(item.tool_call_id or "") if item.role == "tool" else None
        if waiting:
            waiting.pop().positions.append(position)
            continue
        calls = item.tool_calls if item.role == "assistant" else ()
        group = Group([position], len(calls))
        groups.append(group)
        for call in calls:
            open_calls.setdefault(call.id, []).append(group)
    return groups


def fixed_positions(items: Sequence[ContextItem]) -> set[int]:
    """Where the items are that nothing takes out: the protected, and the first system message that is no summary."""
    protected = {position for position, item in enumerate(items) if item.protected}
    system = (position for position, item in enumerate(items) if item.role == "system" and item.replaces is None)
    return protected.union(islice(system, 1))
