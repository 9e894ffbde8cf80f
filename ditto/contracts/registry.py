"""The registry of node types: each one's name, effect class, and the contracts of its input and output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from pydantic import BaseModel

from ditto.contracts.context import CompressInput, Context, LoadInput, SelectInput, UpdateInput
from ditto.contracts.inference import Sample, SampleInput
from ditto.contracts.interaction import ExternalResult, OutputInput, ToolInput
from ditto.effects import EffectClass


@dataclass(frozen=True, slots=True)
class NodeType:
    """A named semantic operation with a typed contract. `effect` is None where the arguments decide it."""

    name: str
    input: type[BaseModel]
    output: type[BaseModel]
    effect: EffectClass | None


def _types(*types: NodeType) -> Mapping[str, NodeType]:
    return MappingProxyType({each.name: each for each in types})


NODE_TYPES: Final[Mapping[str, NodeType]] = _types(
    NodeType("CONTEXT.COMPRESS", CompressInput, Context, EffectClass.PURE),
    NodeType("CONTEXT.LOAD", LoadInput, Context, EffectClass.PURE),
    NodeType("CONTEXT.SELECT", SelectInput, Context, EffectClass.PURE),
    NodeType("CONTEXT.UPDATE", UpdateInput, Context, EffectClass.PURE),
    NodeType("INFER.REASONING.SAMPLE", SampleInput, Sample, EffectClass.INFER),
    NodeType("INTERACTION.ACT.TOOL", ToolInput, ExternalResult, None),
    NodeType("INTERACTION.OBSERVE", ToolInput, ExternalResult, None),
    NodeType("INTERACTION.OUTPUT", OutputInput, ExternalResult, EffectClass.IDEMPOTENT),
)
"""The node types that ditto defines. Applications add their own through `Worker.node`."""

RESERVED_FAMILIES: Final = ("CONTEXT", "INFER", "INTERACTION")
"""First words of node type names that only ditto defines."""
