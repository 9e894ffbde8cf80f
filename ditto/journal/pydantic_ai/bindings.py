"""Bindings: what an agent of Pydantic AI's is built from within a JournaledAgent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic_ai.models import Model

from ditto import ToolOffer, TurnContext
from ditto.journal.agent import JournaledTool, tools_of
from ditto.journal.pydantic_ai.model import JournaledModel
from ditto.journal.pydantic_ai.toolset import DittoToolset


@dataclass(frozen=True, slots=True)
class PydanticBindings:
    """`Agent(bindings.model, toolsets=[bindings.toolset])`: with these, and nothing else that acts, it is durable."""

    model: JournaledModel
    toolset: DittoToolset
    tools: Mapping[str, JournaledTool]
    """The same tools, for code that calls them itself."""


def bind(model: Model[Any], offers: tuple[ToolOffer, ...], ctx: TurnContext) -> PydanticBindings:
    """The bindings of a turn."""
    return PydanticBindings(JournaledModel(model, ctx), DittoToolset(offers, ctx), tools_of(offers, ctx))
