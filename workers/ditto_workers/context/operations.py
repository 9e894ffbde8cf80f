"""LOAD, SELECT and UPDATE as pure functions of their input and the caps."""

from __future__ import annotations

from ditto import Context, ContextItem
from ditto.contracts import LoadInput, SelectInput, UpdateInput
from ditto_workers.context.groups import group_items
from ditto_workers.context.identity import identified
from ditto_workers.context.limits import Caps, within


def load(request: LoadInput, caps: Caps) -> Context:
    """The saved Context with the items behind it.

    Every id is worked out anew: a Context that comes from elsewhere, or in which a credential was redacted since,
    has the ids of what it says now.
    """
    return Context(items=within(identified((*request.context.items, *request.items)), caps))


def update(request: UpdateInput, caps: Caps) -> Context:
    """The Context with the items behind it; the items that it has keep their ids."""
    return Context(items=within((*request.context.items, *identified(request.add)), caps))


def select(request: SelectInput, caps: Caps) -> Context:
    """The items that match all that is given, in their order.

    `last` counts among the items that match the rest. A call and its results are taken if each of them matches, else
    none is; a protected item is always taken, with its group.
    """
    items = request.context.items
    matching = [position for position, item in enumerate(items) if _matches(request, item)]
    matched = set(matching if request.last is None else matching[-request.last :])
    taken: set[int] = set()
    for group in group_items(items):
        if matched.issuperset(group.positions) or any(items[position].protected for position in group.positions):
            taken.update(group.positions)
    return Context(items=within([item for position, item in enumerate(items) if position in taken], caps))


def _matches(request: SelectInput, item: ContextItem) -> bool:
    return (
        (request.roles is None or item.role in request.roles)
        and (request.ids is None or item.id in request.ids)
        and (request.sources is None or item.source in request.sources)
    )
