"""INFER.REASONING.SAMPLE: one question to a model, one complete answer."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ditto.contracts.contract import Contract, Json
from ditto.contracts.messages import Message, ToolOffer
from ditto.contracts.model import ModelRef


class SampleInput(Contract):
    """Everything the provider gets, but for addresses and credentials: this is what the request hash covers."""

    model: ModelRef
    messages: tuple[Message, ...] = Field(min_length=1)
    tools: tuple[ToolOffer, ...] = ()
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    max_tokens: int | None = Field(default=None, ge=1)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    response_schema: dict[str, object] | None = None
    """The JSON Schema that the answer's text is asked to follow; None asks for plain text."""
    stream: bool = False
    """Whether the answer is asked for in pieces, which are shown as they come. The Sample is the same."""


class Usage(Contract):
    """Tokens as the provider counted them; None where it said nothing. Never invented, never zero by default."""

    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_input_tokens: int | None = None
    reasoning_tokens: int | None = None


class Sample(Contract):
    """A complete answer. `finish_reason` is the provider's own word, mapped where it is known."""

    status: Literal["completed"] = "completed"
    message: Message
    finish_reason: str
    usage: Usage = Usage()
    model: str | None = None
    """The model that the provider says it used."""
    response_id: str | None = None
    raw: dict[str, Json] = Field(default_factory=dict)
    """What the provider said and no other field holds: `finish_reason`, its own word where that is another one;
    `prompt_filter_results`; `system_fingerprint`; `refusal`, where there is text beside it."""
