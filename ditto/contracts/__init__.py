"""Contracts: the pydantic models of node inputs and outputs, and the registry of node types.

Start at `registry.py`. A contract is data only; nothing here does I/O.
"""

from ditto.contracts.context import Context, ContextItem, ContextLimits, LoadInput, NewItem, SelectInput, UpdateInput
from ditto.contracts.contract import Contract, Json
from ditto.contracts.inference import Sample, SampleInput, Usage
from ditto.contracts.interaction import ExternalResult, OutputInput, ResultError, ToolInput
from ditto.contracts.messages import Message, ToolCall, ToolOffer
from ditto.contracts.model import ModelRef
from ditto.contracts.registry import NODE_TYPES, RESERVED_FAMILIES, NodeType

__all__ = [
    "NODE_TYPES",
    "RESERVED_FAMILIES",
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
