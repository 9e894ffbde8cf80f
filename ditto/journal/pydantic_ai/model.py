"""JournaledModel: a model of Pydantic AI's whose answers are asked for once, and kept before anybody gets them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from typing import Any, Final, cast

import anyio
from pydantic_ai import RunContext
from pydantic_ai.messages import ModelMessage, ModelResponse
from pydantic_ai.models import (
    CompletedStreamedResponse,
    Model,
    ModelRequestContext,
    ModelRequestParameters,
    StreamedResponse,
)
from pydantic_ai.models.wrapper import WrapperModel
from pydantic_ai.settings import ModelSettings

from ditto import ModelRequest as AskedRequest
from ditto import StepContext, TurnContext
from ditto.journal.pydantic_ai.endings import check_ending, told_apart
from ditto.journal.pydantic_ai.records import (
    Kind,
    ResponseCallIds,
    has_calls,
    read_response,
    request_record,
    write_response,
)
from ditto.journal.pydantic_ai.streams import LiveStream, Relay

IN_PROCESS: Final = frozenset({"function", "test"})
"""Systems of models that run here: nothing can cut their streams."""


class JournaledModel(WrapperModel):
    """The model of one turn. Each request is a step `m/<ordinal>` of it; a recorded one is answered from the record.

    `finish_reasons` are further words of the provider's for a proper end; "" accepts streams that end without one.
    Retries of the provider's client are off: they would ask twice for one decision.
    """

    def __init__(self, wrapped: Model[Any], turn: TurnContext, *, finish_reasons: Collection[str] = ()) -> None:
        super().__init__(wrapped)
        self._turn = turn
        self._finish_reasons = {*finish_reasons, *({""} if wrapped.system in IN_PROCESS else ())}

    async def request(
        self,
        messages: list[ModelMessage],
        model_settings: ModelSettings | None,
        model_request_parameters: ModelRequestParameters,
    ) -> ModelResponse:
        """The next answer. Raises what `TurnContext.ask` raises."""
        settings = _single_attempt(model_settings)

        async def ask() -> ModelResponse:
            return await self.wrapped.request(messages, settings, model_request_parameters)

        return await self._ask(self._record("generate", messages, model_settings, model_request_parameters), ask)

    async def compact_messages(
        self, request_context: ModelRequestContext, *, instructions: str | None = None
    ) -> ModelResponse:
        """A summary of the conversation by the model: an answer like any other."""
        asked = request_context
        record = self._record("compact", asked.messages, asked.model_settings, asked.model_request_parameters)
        record.parts["instructions"] = instructions
        return await self._ask(record, lambda: self.wrapped.compact_messages(asked, instructions=instructions))

    @asynccontextmanager
    async def request_stream(
        self,
        messages: list[ModelMessage],
        model_settings: ModelSettings | None,
        model_request_parameters: ModelRequestParameters,
        run_context: RunContext[Any] | None = None,
    ) -> AsyncGenerator[StreamedResponse]:
        """The next answer while it comes: text at once, the first tool call and all after it once it is durable.

        A recorded answer is given out again as a stream. Left early, the rest of it is waited for, and kept.
        """
        settings = _single_attempt(model_settings)
        relay = Relay()

        async def ask(step: StepContext) -> Any:
            try:
                with told_apart():
                    async with self.wrapped.request_stream(
                        messages, settings, model_request_parameters, run_context
                    ) as stream:
                        response = await relay.read(stream, step)
            except asyncio.CancelledError:
                if not relay.is_open:
                    step.not_made("cancelled before the provider answered; connection closed")
                raise
            return self._checked(response, streamed=True)

        async def answer() -> ModelResponse:
            response = read_response(await self._turn.ask(record, ask, ids=ResponseCallIds()))
            if has_calls(response):
                await self._turn.settle()
            return response

        record = self._record("stream", messages, model_settings, model_request_parameters)
        answered = asyncio.ensure_future(answer())
        answered.add_done_callback(relay.end)
        try:
            source = await relay.opened()
            if source is None:
                yield CompletedStreamedResponse(
                    await answered, model_request_parameters=model_request_parameters, replay_events=True
                )
            else:
                yield LiveStream(model_request_parameters, source, relay, answered)
                await asyncio.shield(answered)
        except (asyncio.CancelledError, GeneratorExit):
            answered.cancel()
            raise
        finally:
            # Whatever else ended the consumer: the answer is kept.
            with anyio.CancelScope(shield=True):
                await asyncio.wait((answered,))

    async def _ask(self, record: AskedRequest, ask: Callable[[], Awaitable[ModelResponse]]) -> ModelResponse:
        async def asked(step: StepContext) -> Any:
            with told_apart():
                response = await ask()
            return self._checked(response, streamed=False)

        return read_response(await self._turn.ask(record, asked, ids=ResponseCallIds()))

    def _record(
        self,
        kind: Kind,
        messages: list[ModelMessage],
        settings: ModelSettings | None,
        parameters: ModelRequestParameters,
    ) -> AskedRequest:
        return request_record(kind, self.wrapped, messages, settings, parameters)

    def _checked(self, response: ModelResponse, *, streamed: bool) -> Any:
        check_ending(response, streamed=streamed, further_words=self._finish_reasons)
        return write_response(response)


def _single_attempt(settings: ModelSettings | None) -> ModelSettings:
    """The settings that a request is sent with. The framework warns if a model's client cannot be told."""
    return cast("ModelSettings", {**(settings or {}), "max_retries": 0})
