"""Model-call recovery: a restart never asks the model to decide twice, and never makes an effect twice.

Two records make a turn resumable: the journal keeps each complete answer of the model before any of its tool calls may
run, the operations keep what each of those came to. Three ways in:

- `JournaledAgent`: an agent of your own code or of a framework, whose model and tools are journaled;
- `run_agent`: ditto's own small agent, a native Loop;
- `ToolBridge`, `replay_saved_turn`: for an application that keeps whole answers itself.

They use ditto's public names only.
"""

from __future__ import annotations

from ditto import ReceiptEvent, ReceiptSink
from ditto.journal.agent import Bindings, JournaledAgent, JournaledModel, JournaledTool
from ditto.journal.answers import PlannedCall, plan_calls, tool_messages
from ditto.journal.block import TurnClient
from ditto.journal.bridge import SavedCall, SavedTurn, ToolBridge, replay_saved_turn
from ditto.journal.history import mend_history, recorded_messages
from ditto.journal.loop import AgentResult, run_agent

__all__ = [
    "AgentResult",
    "Bindings",
    "JournaledAgent",
    "JournaledModel",
    "JournaledTool",
    "PlannedCall",
    "ReceiptEvent",
    "ReceiptSink",
    "SavedCall",
    "SavedTurn",
    "ToolBridge",
    "TurnClient",
    "mend_history",
    "plan_calls",
    "recorded_messages",
    "replay_saved_turn",
    "run_agent",
    "tool_messages",
]
