"""ditto: durable workflows for agents, on one SQLite file.

Compose a `Graph` or a `Loop`, run it by `create_ditto()`; kill the process anywhere and start it again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ditto.config import Config, Endpoint, load_config, load_dotenv_file
from ditto.contracts import (
    Context,
    ContextItem,
    Contract,
    ExternalResult,
    Json,
    Message,
    ModelRef,
    NewItem,
    ResultError,
    Sample,
    ToolCall,
    ToolOffer,
    Usage,
)
from ditto.effects import Absent, Committed, EffectClass, LookupResult, Many, Pending, Rejected
from ditto.errors import (
    ConfigError,
    DefinitionError,
    DittoError,
    EffectNotMade,
    EffectRejected,
    InvalidValueError,
    LimitExceededError,
    OutputError,
    ReplayMismatchError,
    RunBlockedError,
    RunBusyError,
    RunCancelledError,
    RunConflictError,
    RunNotFoundError,
    RunPausedError,
    SandboxDenied,
    StepError,
    StepTimeoutError,
    StoreBusyError,
    StoreClosedError,
    StoreDamagedError,
    StoreError,
    StoreForeignError,
    StoreFullError,
    StoreSchemaError,
    ToolError,
    TransitionRefusedError,
    UnknownOutcomeError,
)
from ditto.flow import Decision, Flow, FlowContext
from ditto.graph import Graph, Node, Retry
from ditto.items import Items
from ditto.loop import Loop
from ditto.pieces import Ended, Heard, Piece, Restarted
from ditto.runs import Checked, EventInfo, Health, Recovered, RunInfo, RunSummary, StepInfo
from ditto.sandbox import Sandbox
from ditto.tool import Tool
from ditto.turn import ModelRequest, ReceiptEvent, ReceiptSink, Turn, TurnContext, TurnFunction
from ditto.waits import OpenWait, Waiting, WaitKind
from ditto.worker import Action, Approval, NodeHandler, Outcome, StepContext, Worker, WorkerSetup

if TYPE_CHECKING:
    from ditto.runtime import Runtime, create_ditto

__version__ = "0.1.0"

__all__ = [
    "Absent",
    "Action",
    "Checked",
    "Approval",
    "Committed",
    "Config",
    "ConfigError",
    "Context",
    "ContextItem",
    "Contract",
    "Decision",
    "DefinitionError",
    "DittoError",
    "EffectClass",
    "EffectNotMade",
    "EffectRejected",
    "Ended",
    "Endpoint",
    "EventInfo",
    "ExternalResult",
    "Flow",
    "TurnFunction",
    "TurnContext",
    "Turn",
    "ModelRequest",
    "ReceiptEvent",
    "ReceiptSink",
    "FlowContext",
    "Graph",
    "Health",
    "Heard",
    "InvalidValueError",
    "Items",
    "Json",
    "LimitExceededError",
    "LookupResult",
    "Loop",
    "Many",
    "Message",
    "ModelRef",
    "NewItem",
    "Node",
    "NodeHandler",
    "OpenWait",
    "Outcome",
    "OutputError",
    "Pending",
    "Piece",
    "Recovered",
    "Rejected",
    "ReplayMismatchError",
    "Restarted",
    "ResultError",
    "Retry",
    "RunBlockedError",
    "RunBusyError",
    "RunCancelledError",
    "RunConflictError",
    "RunInfo",
    "RunNotFoundError",
    "RunPausedError",
    "RunSummary",
    "Runtime",
    "Sample",
    "Sandbox",
    "SandboxDenied",
    "StepContext",
    "StepError",
    "StepInfo",
    "StepTimeoutError",
    "StoreBusyError",
    "StoreClosedError",
    "StoreDamagedError",
    "StoreError",
    "StoreForeignError",
    "StoreFullError",
    "StoreSchemaError",
    "Tool",
    "ToolCall",
    "ToolError",
    "ToolOffer",
    "TransitionRefusedError",
    "UnknownOutcomeError",
    "Usage",
    "WaitKind",
    "Waiting",
    "Worker",
    "WorkerSetup",
    "create_ditto",
    "load_config",
    "load_dotenv_file",
]

_LAZY = ("Runtime", "create_ditto")


def __getattr__(name: str) -> Any:
    """`create_ditto` and `Runtime` on first use: they bring in SQLAlchemy, which definitions do not need."""
    if name in _LAZY:
        from ditto import runtime

        return getattr(runtime, name)
    raise AttributeError(f"module 'ditto' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
