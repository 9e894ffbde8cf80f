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


class Replaced(Contract):
    """What a summary stands for: of one size, however much that is and however often it was summarised."""

    count: int = Field(ge=1)
    """How many items; a summary among them counts for the items that it stood for."""
    digest: str = Field(pattern="^[0-9a-f]{64}$")
    """SHA-256 over a line for each item replaced, in order: its id and, of a summary, a space and its digest."""


class ContextItem(NewItem):
    """A message in a Context, with its id: 64 hex digits. One with `replaces` is a summary, made by COMPRESS."""

    id: str = Field(pattern="^[0-9a-f]{64}$")
    replaces: Replaced | None = Field(default=None, exclude_if=lambda replaces: replaces is None)


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


class CompressInput(Contract):
    """CONTEXT.COMPRESS: a Context with its older part replaced by one item that holds the summary.

    A group is a call with its results, or any other item alone. All groups but the newest `keep_last` are replaced,
    except the first system message, those with a protected item, and the last call while a result is missing.
    If there is nothing to replace, or only what has the id that the summary would get, the Context comes back as it
    was. Then the caps apply as in UPDATE; they drop no summary.
    """

    context: Context
    summary: str = Field(min_length=1)
    """The text, which comes from elsewhere, for example from the answer of a SAMPLE node. Stored as it is given."""
    keep_last: int = Field(ge=0)
    role: Literal["user", "system", "assistant"] = "user"
    """Who says the summary. Many providers take one system message only, and only as the first: hence "user"."""
    source: str = "summary"
    limits: ContextLimits = ContextLimits()
