"""INTERACTION.*: tools, observations and output, all answered with an ExternalResult."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ditto.contracts.contract import Contract, Json

ResultStatus = Literal["success", "failed", "cancelled", "timeout", "unknown"]


class ToolInput(Contract):
    """INTERACTION.ACT.TOOL and INTERACTION.OBSERVE: which tool, with which arguments.

    OBSERVE takes only tools whose effect, with these arguments, is `pure` or `read`.
    """

    tool: str = Field(min_length=1, max_length=128)
    arguments: dict[str, Json] = Field(default_factory=dict)
    call_id: str | None = None
    """The id of the model's call that this answers, where there is one."""


class OutputInput(Contract):
    """INTERACTION.OUTPUT: what the application's output function gets."""

    content: Json
    channel: str = Field(default="default", min_length=1, max_length=128)


class ResultError(Contract):
    """Why a call failed: a stable code, a text, and whether trying again may help. `details` is the tool's own."""

    code: str
    message: str
    retryable: bool = False
    details: dict[str, Json] = Field(default_factory=dict)


class ExternalResult(Contract):
    """What came back from outside. Where a tool returns no ExternalResult of its own, text becomes `content`
    and any other value `structured`."""

    call_id: str | None = None
    source: str
    status: ResultStatus
    content: str = ""
    structured: Json = None
    references: tuple[str, ...] = ()
    error: ResultError | None = None
    metadata: dict[str, Json] = Field(default_factory=dict)
