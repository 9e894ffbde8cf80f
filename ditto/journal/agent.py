"""JournaledAgent: the model and the tools of one turn, for an agent's own code or a framework's."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from types import MappingProxyType, TracebackType
from typing import Any, Final, TypeAlias, TypeVar

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
)
from ditto.contracts import SampleInput
from ditto.journal.answers import plan_calls, tool_messages
from ditto.journal.block import TurnBlock, TurnClient

T = TypeVar("T")

FRAMEWORKS: Final = {"pydantic_ai": "ditto.journal.pydantic_ai"}
"""The module whose `bind(model, offers, ctx)` gives the bindings, by the package that a model's class is from."""

Bind: TypeAlias = Callable[[TurnContext], Any]


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

    - `client`: a runtime, whose interaction worker runs the tools.
    - `model`: `provider/name`, asked by the runtime's infer worker, or a model of a framework: Pydantic AI's.
    - `tools`: the Tools, out of the interaction worker's, that the model is offered.
    - `namespace`, `thread`, `turn`, `model_key` and the limits: see `Turn`. The same four, and the turn goes on.
    - `on_receipt`: gets the signed receipt of each tool call; see `Runtime.turn`.

    The bindings are Bindings, or what the framework's module calls so: `ditto.journal.pydantic_ai.PydanticBindings`.

    `await agent.run(function)` or `async with agent as bindings`. Success is reported only when the whole function, or
    block, has ended. Raises DefinitionError.
    """

    def __init__(
        self,
        client: TurnClient,
        model: ModelRef | str | object,
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
        self._bind = _binder(model, tuple(offer(tool) for tool in tools))
        self._on_receipt = on_receipt
        self._block: TurnBlock | None = None

    async def run(self, function: Callable[[Any], Awaitable[T]]) -> T:
        """Call `function(bindings)` and return what it returns, or what was saved. Raises what `Runtime.turn` does."""
        return await self._client.turn(self.turn, lambda ctx: function(self._bind(ctx)), on_receipt=self._on_receipt)

    async def __aenter__(self) -> Any:
        if self._block is not None:
            raise DefinitionError("this agent is at work already; make one for each turn")
        self._block = TurnBlock(self._client, self.turn, on_receipt=self._on_receipt)
        return self._bind(await self._block.begin())

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._block is not None
        block, self._block = self._block, None
        await block.end(error)


def tools_of(offers: Iterable[ToolOffer], ctx: TurnContext) -> Mapping[str, JournaledTool]:
    """The tools of a turn, by name."""
    return MappingProxyType({each.name: JournaledTool(each.name, ctx) for each in offers})


def offer(tool: Tool) -> ToolOffer:
    """A tool as a model is offered it."""
    schema: Any = tool.input_schema
    parameters = schema if isinstance(schema, dict) else schema.model_json_schema()
    return ToolOffer(name=tool.name, description=tool.description, parameters=parameters)


def _binder(model: ModelRef | str | object, offers: tuple[ToolOffer, ...]) -> Bind:
    """What makes the bindings for this model."""
    if isinstance(model, ModelRef | str):
        ref = ModelRef.parse(model) if isinstance(model, str) else model
        return lambda ctx: Bindings(JournaledModel(ref, offers, ctx), tools_of(offers, ctx))
    for kind in type(model).__mro__:
        module = FRAMEWORKS.get(kind.__module__.partition(".")[0])
        if module is not None:
            return partial(import_module(module).bind, model, offers)
    raise DefinitionError(
        f"a JournaledAgent's model is provider/name, a ModelRef, or a model of {', '.join(FRAMEWORKS)}, "
        f"not {type(model).__name__}"
    )
