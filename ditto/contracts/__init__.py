"""Contracts: the pydantic models of node inputs and outputs, and the registry of node types.

Start at `registry.py`. A contract is data only; nothing here does I/O.
"""

from ditto.contracts.calls import CUT_ANSWER
from ditto.contracts.context import (
    CompressInput,
    Context,
    ContextItem,
    ContextLimits,
    LoadInput,
    NewItem,
    Replaced,
    SelectInput,
    UpdateInput,
)
from ditto.contracts.contract import Contract, Json
from ditto.contracts.inference import Sample, SampleInput, Usage
from ditto.contracts.interaction import ExternalResult, OutputInput, ResultError, ToolInput
from ditto.contracts.messages import Message, ToolCall, ToolOffer
from ditto.contracts.model import ModelRef
from ditto.contracts.registry import NODE_TYPES, RESERVED_FAMILIES, NodeType

__all__ = [
    "CUT_ANSWER",
    "NODE_TYPES",
    "RESERVED_FAMILIES",
    "CompressInput",
    "Context",
    "ContextItem",
    "ContextLimits",
    "Contract",
    "ExternalResult",
    "Json",
    "LoadInput",
    "Message",
    "ModelRef",
    "NewItem",
    "NodeType",
    "OutputInput",
    "Replaced",
    "ResultError",
    "Sample",
    "SampleInput",
    "SelectInput",
    "ToolCall",
    "ToolInput",
    "ToolOffer",
    "UpdateInput",
    "Usage",
]
