"""Caps on a Context: which items go when it holds too much.

The oldest go first, a call and its results together. Never dropped are protected items, the first system message,
summaries (they are all that is left of what they replaced), the newest group (what was just said, or a call that
still waits for its results), and whatever shares a group with one of them. If that alone is too much, it is an error
and no cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ditto import ContextItem, LimitExceededError
from ditto_workers.context.groups import Group, fixed_positions, group_items
from ditto_workers.context.identity import size_bytes


@dataclass(frozen=True, slots=True)
class Caps:
    """How many items, and how many bytes as JSON, a Context may hold; None: no bound."""

    items_max: int | None = None
    bytes_max: int | None = None

    def fit(self, items: int, size_bytes: int) -> bool:
        """Whether a Context of that size is within both."""
        return (self.items_max is None or items <= self.items_max) and (
            self.bytes_max is None or size_bytes <= self.bytes_max
        )


def smaller(*caps: int | None) -> int | None:
    """The smallest of the caps that are given; None if none is."""
    return min((cap for cap in caps if cap is not None), default=None)


def within(items: Sequence[ContextItem], caps: Caps) -> tuple[ContextItem, ...]:
    """The items that stay under the caps, in their order. LimitExceededError if what must stay is too much."""
    sizes = [size_bytes(item) for item in items]
    count, total = len(items), sum(sizes)
    dropped: set[int] = set()
    if not caps.fit(count, total):
        for group in _droppable(items):
            dropped.update(group.positions)
            count -= len(group.positions)
            total -= sum(sizes[position] for position in group.positions)
            if caps.fit(count, total):
                break
        else:
            raise LimitExceededError(
                f"a Context must keep {count} items of {total} bytes (protected items, the first system message, "
                f"summaries, the newest message or open call), which is over its caps of "
                f"{caps.items_max or 'any number of'} items and {caps.bytes_max or 'any number of'} bytes: raise the "
                "caps, protect less, or shorten the summary",
                code="limit.context",
            )
    return tuple(item for position, item in enumerate(items) if position not in dropped)


def _droppable(items: Sequence[ContextItem]) -> list[Group]:
    summaries = (position for position, item in enumerate(items) if item.replaces is not None)
    kept = {*fixed_positions(items), *summaries, len(items) - 1}
    return [group for group in group_items(items) if kept.isdisjoint(group.positions)]
