"""COMPRESS as a pure function of its input and the caps: which items a summary replaces, and where it is put.

A call and its results are replaced together or not at all, so what stays keeps its pairs.
"""

from __future__ import annotations

from collections.abc import Sequence

from ditto import Context, ContextItem, NewItem
from ditto.contracts import CompressInput
from ditto_workers.context.groups import fixed_positions, group_items
from ditto_workers.context.identity import identified, traced
from ditto_workers.context.limits import Caps, within


def compress(request: CompressInput, caps: Caps) -> Context:
    """The Context with one item, the summary, where the first of the items was that it replaces.

    Unchanged, but for the caps, if there is nothing to replace, or only what says the same already: so the same
    summary a second time changes nothing.
    """
    items = request.context.items
    old = _replaceable(items, request.keep_last)
    summary = identified([NewItem(role=request.role, content=request.summary, source=request.source)])[0]
    if all(items[position].id == summary.id for position in old):
        return Context(items=within(items, caps))
    summary = summary.model_copy(update={"replaces": traced([items[position] for position in old])})
    first, rest = old[0], set(old[1:])
    compressed = [summary if position == first else item for position, item in enumerate(items) if position not in rest]
    return Context(items=within(compressed, caps))


def _replaceable(items: Sequence[ContextItem], keep_last: int) -> list[int]:
    """The positions of what a summary replaces, in order. The newest group is the one that was last added to."""
    groups = group_items(items)
    last_call = next((group for group in reversed(groups) if group.calls), None)
    older = sorted(groups, key=lambda group: group.positions[-1])[: max(0, len(groups) - keep_last)]
    fixed = fixed_positions(items)
    return sorted(
        position
        for group in older
        if fixed.isdisjoint(group.positions) and not (group is last_call and group.waits)
        for position in group.positions
    )
