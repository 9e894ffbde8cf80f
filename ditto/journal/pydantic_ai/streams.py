"""Streams: an answer on its way from the task that reads and records it to the consumer.

Text and thinking go to the consumer as they come. At the first tool call the rest is held back, and given out from the
recorded answer: so no tool runs, and nobody hears of one, before the answer is durable.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import datetime
from typing import TYPE_CHECKING, Any

from pydantic_ai.messages import (
    FinalResultEvent,
    ModelResponse,
    ModelResponsePart,
    ModelResponseStreamEvent,
    PartDeltaEvent,
    PartEndEvent,
    PartStartEvent,
    TextPart,
    TextPartDelta,
    ThinkingPart,
    ThinkingPartDelta,
    ToolCallPart,
    ToolCallPartDelta,
)
from pydantic_ai.models import ModelRequestParameters, StreamedResponse
from pydantic_ai.usage import RequestUsage

from ditto import StepContext

if TYPE_CHECKING:
    from typing import TypeAlias

    Piece: TypeAlias = PartStartEvent | PartDeltaEvent


class Relay:
    """Pieces of an answer, from the task that reads it to the consumer, and when there are no more."""

    def __init__(self) -> None:
        self._source: asyncio.Future[StreamedResponse | None] = asyncio.get_running_loop().create_future()
        self._pieces: asyncio.Queue[Piece | None] = asyncio.Queue()

    @property
    def is_open(self) -> bool:
        """Whether the provider has begun to answer."""
        return self._source.done()

    async def read(self, source: StreamedResponse, step: StepContext) -> ModelResponse:
        """Read the whole answer, passing on what may be shown at once."""
        if not self._source.done():
            self._source.set_result(source)
        shows = True
        async for event in source:
            if isinstance(event, FinalResultEvent | PartEndEvent):
                continue  # the consumer's own stream makes them
            shows = shows and not _is_of_a_call(event)
            if shows:
                self._pieces.put_nowait(event)
                _show(event, step)
        return source.get()

    def end(self, answered: asyncio.Task[Any]) -> None:
        """The answer is there, or will not come."""
        if not answered.cancelled():
            answered.exception()  # whoever asked for it may be gone
        if not self._source.done():
            self._source.set_result(None)
        self._pieces.put_nowait(None)

    async def opened(self) -> StreamedResponse | None:
        """The provider's stream, once it is open; None if there is none: the answer is recorded, or failed."""
        return await asyncio.shield(self._source)

    async def pieces(self) -> AsyncIterator[Piece]:
        """The pieces until the answer is durable."""
        while (piece := await self._pieces.get()) is not None:
            yield piece


class LiveStream(StreamedResponse):
    """The consumer's side of an answer that is still coming."""

    def __init__(
        self,
        parameters: ModelRequestParameters,
        source: StreamedResponse,
        relay: Relay,
        answered: asyncio.Task[ModelResponse],
    ) -> None:
        super().__init__(parameters)
        self._source = source
        self._relay = relay
        self._answered = answered
        self._response: ModelResponse | None = None

    async def _get_event_iterator(self) -> AsyncIterator[ModelResponseStreamEvent]:
        shown = self._parts_manager
        async for piece in self._relay.pieces():
            shown.apply_event(piece)
            yield piece
        response = await asyncio.shield(self._answered)
        for index, part in enumerate(response.parts):
            known = shown.get_parts()
            if index < len(known):
                rest = _rest_of(index, known[index], part)
                if rest is not None:
                    shown.apply_event(rest)
                    yield rest
            else:
                yield shown.handle_part(vendor_part_id=None, part=part)
        self._response = response
        self.state, self.finish_reason = response.state, response.finish_reason
        self.canonical_system, self.metadata = response.canonical_system, response.metadata
        self.provider_response_id, self.provider_details = response.provider_response_id, response.provider_details

    def get(self) -> ModelResponse:
        """The recorded answer, or what was shown of it so far."""
        return self._response if self._response is not None else super().get()

    @property
    def usage(self) -> RequestUsage:
        """The usage so far."""
        return self._source.usage if self._response is None else self._response.usage

    @property
    def model_name(self) -> str:
        return self._source.model_name

    @property
    def provider_name(self) -> str | None:
        return self._source.provider_name

    @property
    def provider_url(self) -> str | None:
        return self._source.provider_url

    @property
    def timestamp(self) -> datetime:
        return self._source.timestamp


def _is_of_a_call(event: ModelResponseStreamEvent) -> bool:
    if isinstance(event, PartStartEvent):
        return isinstance(event.part, ToolCallPart)
    return isinstance(event, PartDeltaEvent) and isinstance(event.delta, ToolCallPartDelta)


def _show(event: Piece, step: StepContext) -> None:
    """Text and thinking for whoever watches the run."""
    what = event.part if isinstance(event, PartStartEvent) else event.delta
    match what:
        case TextPart(content=text) | TextPartDelta(content_delta=text) if text:
            step.partial(text)
        case ThinkingPart(content=text) | ThinkingPartDelta(content_delta=text) if text:
            step.partial(text, kind="reasoning")


def _rest_of(index: int, shown: ModelResponsePart, whole: ModelResponsePart) -> PartDeltaEvent | None:
    """What was held back of a part that had begun before the first tool call."""
    match shown, whole:
        case TextPart(content=begun), TextPart(content=text) if begun != text:
            return PartDeltaEvent(index=index, delta=TextPartDelta(content_delta=text[len(begun) :]))
        case ThinkingPart(content=begun), ThinkingPart(content=text) if begun != text:
            return PartDeltaEvent(index=index, delta=ThinkingPartDelta(content_delta=text[len(begun) :]))
    return None
