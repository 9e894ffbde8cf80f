"""Toolsets: each call of the model, named by its id, is an operation of the turn, and is made once."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final

from pydantic_ai import RunContext, ToolFailed
from pydantic_ai.tools import ToolDefinition
from pydantic_ai.toolsets import AbstractToolset, ToolsetTool, WrapperToolset
from pydantic_core import PydanticSerializationError, SchemaValidator, core_schema, to_jsonable_python

from ditto import DefinitionError, StepContext, ToolOffer, Turn, TurnContext
from ditto.contracts import CUT_ANSWER
from ditto.journal.pydantic_ai.effects import ToolEffect
from ditto.journal.pydantic_ai.records import find_call, read_result, value_of


@dataclass(slots=True)
class CurrentCall:
    """The tool call that is being made here."""

    turn: Turn
    step: StepContext
    call_id: str
    agents: dict[str, int] = field(default_factory=dict)
    """Turns of other agents that were begun within it, by namespace."""


_current: ContextVar[CurrentCall | None] = ContextVar("ditto.pydantic_ai.current_call", default=None)


def current_call() -> CurrentCall | None:
    """The call that this code is part of, None outside of a tool of a durable agent."""
    return _current.get()


def current_step() -> StepContext:
    """For a tool's function: its operation. `key` is the idempotency key to give to the other side.

    Raises DefinitionError outside of a tool of a durable agent.
    """
    call = _current.get()
    if call is None:
        raise DefinitionError("current_step() is for the functions of a durable agent's tools")
    return call.step


@dataclass
class JournaledToolset(WrapperToolset[Any]):
    """The function tools of one turn. A recorded call is answered from its record.

    A call that a tool makes of another one, through the framework, is part of the first one's effect.
    """

    turn: Turn
    context: Callable[[], TurnContext]
    """Gives the turn's context, once there is one: a toolset is made before the run begins."""

    async def call_tool(
        self, name: str, tool_args: dict[str, Any], ctx: RunContext[Any], tool: ToolsetTool[Any]
    ) -> Any:
        """What the call came to: its value, or the signal that it raised. Raises what `TurnContext.invoke` raises."""
        outer = _current.get()
        if outer is not None and outer.turn == self.turn:
            return await self.wrapped.call_tool(name, tool_args, ctx, tool)
        call_id = _call_id(ctx)
        _refuse_cut(ctx, call_id)
        arguments = _arguments(ctx, call_id, tool_args)

        async def attempt(step: StepContext) -> Any:
            token = _current.set(CurrentCall(self.turn, step, call_id))
            try:
                return await self.wrapped.call_tool(name, tool_args, ctx, tool)
            finally:
                _current.reset(token)

        action = ToolEffect.of(tool.tool_def).action(name, arguments, attempt)
        asked = {"approved": True, "arguments": arguments} if ctx.tool_call_approved else arguments
        return read_result(await self.context().invoke(call_id, name, asked, lambda: action))


class DittoToolset(AbstractToolset[Any]):
    """Tools of the runtime's interaction worker, as a toolset. The worker checks their arguments."""

    def __init__(self, offers: tuple[ToolOffer, ...], ctx: TurnContext) -> None:
        self._offers = offers
        self._ctx = ctx

    @property
    def id(self) -> str:
        return "ditto"

    async def get_tools(self, ctx: RunContext[Any]) -> dict[str, ToolsetTool[Any]]:
        """The tools that were offered."""
        return {
            offer.name: ToolsetTool(
                toolset=self,
                tool_def=ToolDefinition(
                    name=offer.name, description=offer.description, parameters_json_schema=dict(offer.parameters)
                ),
                max_retries=ctx.max_retries,
                args_validator=_ANY_OBJECT,
            )
            for offer in self._offers
        }

    async def call_tool(
        self, name: str, tool_args: dict[str, Any], ctx: RunContext[Any], tool: ToolsetTool[Any]
    ) -> Any:
        """What the call came to; a failure goes to the model. Raises what `TurnContext.call` raises."""
        call_id = _call_id(ctx)
        _refuse_cut(ctx, call_id)
        return value_of(await self._ctx.call(name, call_id, tool_args))


_ANY_OBJECT: Final = SchemaValidator(core_schema.dict_schema(core_schema.str_schema(), core_schema.any_schema()))


def _call_id(ctx: RunContext[Any]) -> str:
    if ctx.tool_call_id is None:
        raise DefinitionError("a tool was called without an id, so its operation has no name; call it through a run")
    return ctx.tool_call_id


def _refuse_cut(ctx: RunContext[Any], call_id: str) -> None:
    """No call of an answer that was cut by its length limit is made. Raises ToolFailed: the model is told."""
    found = find_call(ctx.messages, call_id)
    if found is not None and found[1].finish_reason == "length":
        raise ToolFailed(CUT_ANSWER)


def _arguments(ctx: RunContext[Any], call_id: str, validated: dict[str, Any]) -> dict[str, Any]:
    """The arguments as the model gave them: these are the same after a restart, whatever they are validated to."""
    found = find_call(ctx.messages, call_id)
    if found is not None:
        return found[0].args_as_dict()
    try:
        arguments: dict[str, Any] = to_jsonable_python(validated)
    except PydanticSerializationError as error:
        raise DefinitionError(f"the arguments of call {call_id} are no data: {error}") from None
    return arguments
