"""DittoDurability: the one line that makes an ordinary agent of Pydantic AI's durable."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from pydantic_ai import RunContext
from pydantic_ai.capabilities import AbstractCapability, CapabilityOrdering, WrapRunHandler
from pydantic_ai.models import Model
from pydantic_ai.run import AgentRunResult
from pydantic_ai.toolsets import AbstractToolset

from ditto import DefinitionError, ReceiptSink, Turn, TurnContext
from ditto.journal.block import TurnBlock, TurnClient
from ditto.journal.pydantic_ai.model import JournaledModel
from ditto.journal.pydantic_ai.toolset import JournaledToolset, current_call

METADATA_KEY: Final = "ditto"

Named: TypeAlias = str | Callable[[RunContext[Any]], str]
"""A name, or what gives it for a run."""


class DittoDurability(AbstractCapability[Any]):
    """Each run of the agent is a turn: its answers and its tools' results are journaled, and replayed after a restart.

    - `client`: the runtime, opened in the same event loop.
    - `namespace`, `thread`, `turn`, `model_key` and the limits: see `Turn`. `thread` and `turn` differ from run to run:
      give a function of the RunContext, or `agent.run(…, metadata={"ditto": {"thread": …, "turn": …}})`, which wins.
      Run within another durable agent's tool, and told neither, the turn is named after that tool call.
      `model_key` is the model's id if left out.
    - `finish_reasons`: further words of the provider's for a proper end of an answer; "" for streams without any.
    - `on_receipt`: gets the signed receipt of each tool call; see `Runtime.turn`.

    A run raises what `Runtime.turn` raises, too. Raises DefinitionError.
    """

    def __init__(
        self,
        client: TurnClient,
        *,
        namespace: str,
        thread: Named | None = None,
        turn: Named | None = None,
        model_key: str | None = None,
        max_model_calls: int = 64,
        max_concurrency: int = 1,
        finish_reasons: Collection[str] = (),
        on_receipt: ReceiptSink | None = None,
    ) -> None:
        self._client = client
        self._namespace = namespace
        self._thread = thread
        self._turn = turn
        self._model_key = model_key
        self._limits = {"max_model_calls": max_model_calls, "max_concurrency": max_concurrency}
        self._finish_reasons = finish_reasons
        self._on_receipt = on_receipt
        self._run: _Run | None = None

    def get_ordering(self) -> CapabilityOrdering:
        """Innermost: what the journal keeps is what the provider and the tools really gave."""
        return CapabilityOrdering(position="innermost")

    async def for_run(self, ctx: RunContext[Any]) -> DittoDurability:
        """The capability of one run, with its turn."""
        bound = copy.copy(self)
        turn = self._turn_of(ctx)
        bound._run = _Run(turn, TurnBlock(self._client, turn, replays=True, on_receipt=self._on_receipt))
        return bound

    def get_wrapper_model(self, model: Model[Any]) -> Model[Any]:
        """The model that serves a request, journaled."""
        return JournaledModel(model, self._at_work.context(), finish_reasons=self._finish_reasons)

    def get_wrapper_toolset(self, toolset: AbstractToolset[Any]) -> AbstractToolset[Any]:
        """The agent's function tools, journaled."""
        return JournaledToolset(toolset, self._at_work.turn, self._at_work.context)

    async def wrap_run(self, ctx: RunContext[Any], *, handler: WrapRunHandler) -> AgentRunResult[Any]:
        """The run, as the function of its turn."""
        block = self._at_work.block
        self._at_work.ctx = await block.begin()
        try:
            result = await handler()
        except BaseException as error:
            await block.end(error)
            raise
        await block.end(None)
        return result

    async def on_run_error(self, ctx: RunContext[Any], *, error: BaseException) -> AgentRunResult[Any]:
        """What the turn came to by the error: an outcome that is unknown, above all."""
        await self._at_work.block.end(error)
        raise error

    @property
    def _at_work(self) -> _Run:
        if self._run is None:
            raise DefinitionError("DittoDurability works within a run of an agent")
        return self._run

    def _turn_of(self, ctx: RunContext[Any]) -> Turn:
        given = (ctx.metadata or {}).get(METADATA_KEY, {})
        if not isinstance(given, Mapping) or not set(given) <= {"thread", "turn"}:
            raise DefinitionError(f'metadata["{METADATA_KEY}"] of a run takes thread and turn')
        thread, turn = given.get("thread", self._thread), given.get("turn", self._turn)
        if thread is None and turn is None and (outer := current_call()) is not None:
            outer.agents[self._namespace] = count = outer.agents.get(self._namespace, 0) + 1
            thread, turn = outer.turn.thread, f"{outer.turn.turn}/{outer.call_id}/{count}"
        if thread is None or turn is None:
            raise DefinitionError(
                "which turn is this run? Give DittoDurability a thread and a turn, or the run "
                'metadata={"ditto": {"thread": …, "turn": …}}'
            )
        return Turn(
            self._namespace,
            thread(ctx) if callable(thread) else thread,
            turn(ctx) if callable(turn) else turn,
            self._model_key or ctx.model.model_id,
            **self._limits,
        )


@dataclass(slots=True)
class _Run:
    """One run at work."""

    turn: Turn
    block: TurnBlock
    ctx: TurnContext | None = None

    def context(self) -> TurnContext:
        """The turn's context."""
        if self.ctx is None:
            raise DefinitionError("a durable agent's model and tools work within its run")
        return self.ctx
