"""Messages between people, models and tools, in the one shape that all workers share."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ditto.contracts.contract import Contract

Role = Literal["system", "user", "assistant", "tool"]


class ToolCall(Contract):
    """One call that a model asked for. `arguments` is the provider's text, which may be no valid JSON."""

    id: str
    name: str
    arguments: str = "{}"


class Message(Contract):
    """One message. `reasoning` is what a thinking model said beside its answer, kept as it came."""

    role: Role
    content: str = ""
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    reasoning: str | None = None


class ToolOffer(Contract):
    """A tool that a model may call: its name, what it is for, and the JSON Schema of its arguments."""

    name: str = Field(min_length=1, max_length=128)
    description: str = ""
    parameters: dict[str, object] = Field(default_factory=lambda: dict[str, object](type="object", properties={}))
