"""CONTEXT.*: what a model is shown, as an ordered list of items that each step makes anew.

An item's id is the hash of its canonical content, so the same message has the same id wherever it stands.
All CONTEXT node types are `pure` and deterministic.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ditto.contracts.contract import Contract
from ditto.contracts.messages import Message, Role


class NewItem(Message):
    """A message to be put into a Context. A protected item is never dropped by a limit."""

    source: str | None = None
    protected: bool = False


class ContextItem(NewItem):
    """A message in a Context, with its id: 64 hex digits."""

    id: str = Field(pattern="^[0-9a-f]{64}$")


class Context(Contract):
    """An ordered list of items."""

    schema_version: Literal[1] = 1
    items: tuple[ContextItem, ...] = ()


class ContextLimits(Contract):
    """Caps on what a Context may hold; the configuration's caps hold beside them, whichever is smaller."""

    items_max: int | None = Field(default=None, ge=1)
    bytes_max: int | None = Field(default=None, ge=1)


class LoadInput(Contract):
    """CONTEXT.LOAD: restore a saved Context, or begin one, and put items behind it."""

    context: Context = Context()
    items: tuple[NewItem, ...] = ()
    limits: ContextLimits = ContextLimits()


class UpdateInput(Contract):
    """CONTEXT.UPDATE: a Context with items added behind it."""

    context: Context
    add: tuple[NewItem, ...] = Field(min_length=1)
    limits: ContextLimits = ContextLimits()


class SelectInput(Contract):
    """CONTEXT.SELECT: the items that match all that is given, in their order.

    A call and its results are selected together or not at all; protected items always are.
    """

    context: Context
    roles: tuple[Role, ...] | None = None
    ids: tuple[str, ...] | None = None
    sources: tuple[str, ...] | None = None
    last: int | None = Field(default=None, ge=1)
    limits: ContextLimits = ContextLimits()
