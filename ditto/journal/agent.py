"""JournaledAgent: the model and the tools of one turn, for an agent's own code or a framework's."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType, TracebackType
from typing import Any, Protocol, TypeVar

import anyio

from ditto import (
    DefinitionError,
    ExternalResult,
    Message,
    ModelRef,
    ReceiptSink,
    Sample,
    Tool,
    ToolOffer,
    Turn,
    TurnContext,
    TurnFunction,
)
from ditto.contracts import SampleInput
from ditto.journal.answers import plan_calls, tool_messages

T = TypeVar("T")


class TurnClient(Protocol):
    """Whoever keeps the journal and runs the tools: a Runtime."""

    async def turn(self, turn: Turn, function: TurnFunction[T], *, on_receipt: ReceiptSink | None = None) -> T:
        """Drive a turn; see `Runtime.turn`."""
        ...


@dataclass(frozen=True, slots=True)
class JournaledModel:
    """The model of a turn: each answer is asked for once, and kept before it is given out."""

    ref: ModelRef
    offers: tuple[ToolOffer, ...]
    ctx: TurnContext

    async def sample(self, messages: Sequence[Message], **options: Any) -> Sample:
        """The next answer. `options` are the other fields of SampleInput; the tools are the agent's, if left out.

        Raises what `TurnContext.sample` raises.
        """
        asked = {"tools": self.offers, **options, "model": self.ref, "messages": tuple(messages)}
        return await self.ctx.sample(SampleInput(**asked))


@dataclass(frozen=True, slots=True)
class JournaledTool:
    """A tool of a turn: each call of the model, named by its id, is made once."""

    name: str
    ctx: TurnContext

    async def __call__(self, call_id: str, arguments: dict[str, Any]) -> ExternalResult:
        """What the call came to. Raises what `TurnContext.call` raises."""
        return await self.ctx.call(self.name, call_id, arguments)


@dataclass(frozen=True, slots=True)
class Bindings:
    """What an agent's code works with instead of a model and tools of its own."""

    model: JournaledModel
    tools: Mapping[str, JournaledTool]

    async def act(self, sample: Sample) -> list[Message]:
        """Make all calls of an answer, side by side, and return what the model is to be told, in their order."""
        planned = plan_calls(sample, self.tools)
        results: dict[str, ExternalResult] = {}

        async def make(call_id: str, name: str, arguments: dict[str, Any]) -> None:
            results[call_id] = await self.tools[name](call_id, arguments)

        async with anyio.create_task_group() as calls:
            for call in planned:
                if call.refusal is None:
                    calls.start_soon(make, call.call_id, call.name, call.arguments)
        return tool_messages(planned, results)


class JournaledAgent:
    """Owns the journal of one turn.

    - `client`: a runtime, whose infer and interaction workers ask the model and run the tools.
    - `model`: `provider/name`; `tools`: the Tools, out of the interaction worker's, that the model is offered.
    - `namespace`, `thread`, `turn`, `model_key` and the limits: see `Turn`. The same four, and the turn goes on.
    - `on_receipt`: gets the signed receipt of each tool call; see `Runtime.turn`.

    `await agent.run(function)` or `async with agent as bindings`. Success is reported only when the whole function, or
    block, has ended. Raises DefinitionError.
    """

    def __init__(
        self,
        client: TurnClient,
        model: ModelRef | str,
        tools: Iterable[Tool] = (),
        *,
        namespace: str,
        thread: str,
        turn: str,
        model_key: str,
        max_model_calls: int = 64,
        max_concurrency: int = 1,
        on_receipt: ReceiptSink | None = None,
    ) -> None:
        self.turn = Turn(namespace, thread, turn, model_key, max_model_calls, max_concurrency)
        self._client = client
        self._on_receipt = on_receipt
        self._model = ModelRef.parse(model) if isinstance(model, str) else model
        self._offers = tuple(offer(tool) for tool in tools)
        self._block: _Block | None = None

    async def run(self, function: Callable[[Bindings], Awaitable[T]]) -> T:
        """Call `function(bindings)` and return what it returns, or what was saved. Raises what `Runtime.turn` does."""
        return await self._client.turn(self.turn, lambda ctx: function(self._bind(ctx)), on_receipt=self._on_receipt)

    async def __aenter__(self) -> Bindings:
        if self._block is not None:
            raise DefinitionError("this agent is at work already; make one for each turn")
        self._block = _Block()
        return await self._block.begin(partial(self._client.turn, self.turn, on_receipt=self._on_receipt), self._bind)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._block is not None
        block, self._block = self._block, None
        await block.end(error)

    def _bind(self, ctx: TurnContext) -> Bindings:
        tools = {each.name: JournaledTool(each.name, ctx) for each in self._offers}
        return Bindings(JournaledModel(self._model, self._offers, ctx), MappingProxyType(tools))


class _Block:
    """The body of an `async with`, as the function of a turn."""

    def __init__(self) -> None:
        self._bound: asyncio.Future[Bindings] = asyncio.get_running_loop().create_future()
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._turn: asyncio.Task[None] | None = None

    async def begin(
        self, drive: Callable[[TurnFunction[None]], Awaitable[None]], bind: Callable[[TurnContext], Bindings]
    ) -> Bindings:
        """The bindings, once the turn is ours."""

        async def body(ctx: TurnContext) -> None:
            self._bound.set_result(bind(ctx))
            await self._ended

        self._turn = asyncio.ensure_future(drive(body))
        try:
            await asyncio.wait((self._turn, self._bound), return_when=asyncio.FIRST_COMPLETED)
        except BaseException:
            self._turn.cancel()
            await self._turn_ended()
            if not self._turn.cancelled():
                self._turn.exception()
            raise
        if self._bound.done():
            return self._bound.result()
        self._turn.result()
        raise DefinitionError("this turn is completed; `async with` cannot replay it: use agent.run(function)")

    async def end(self, error: BaseException | None) -> None:
        """The block ended, by itself or by `error`. Raises what the turn raises, if that says more."""
        assert self._turn is not None
        if isinstance(error, asyncio.CancelledError):
            self._turn.cancel()
        elif error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)
        if (cancelled := await self._turn_ended()) is not None and error is None:
            raise cancelled
        try:
            self._turn.result()
        except asyncio.CancelledError:
            if not isinstance(error, asyncio.CancelledError):
                raise
        except BaseException as raised:
            if raised is not error:
                raise

    async def _turn_ended(self) -> asyncio.CancelledError | None:
        """Return when the turn has let go of everything; a cancellation meanwhile cuts it short, and comes back."""
        assert self._turn is not None
        cancellation: asyncio.CancelledError | None = None
        with anyio.CancelScope(shield=True):
            while not self._turn.done():
                try:
                    await asyncio.wait([self._turn])
                except asyncio.CancelledError as cancelled:
                    self._turn.cancel()
                    cancellation = cancelled
        return cancellation


def offer(tool: Tool) -> ToolOffer:
    """A tool as a model is offered it."""
    schema: Any = tool.input_schema
    parameters = schema if isinstance(schema, dict) else schema.model_json_schema()
    return ToolOffer(name=tool.name, description=tool.description, parameters=parameters)
