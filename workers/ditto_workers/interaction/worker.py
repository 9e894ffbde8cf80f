"""The worker of INTERACTION.ACT.TOOL, OBSERVE and OUTPUT."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

from ditto import (
    Action,
    DefinitionError,
    EffectClass,
    EffectRejected,
    ExternalResult,
    NodeHandler,
    ResultError,
    Tool,
    ToolError,
    Worker,
)
from ditto.contracts import OutputInput, ToolInput
from ditto_workers.interaction.binding import BoundTool
from ditto_workers.interaction.output import OutputFunction, output_plan


def create_interaction_worker(tools: Iterable[Tool] = (), output: OutputFunction | None = None) -> Worker:
    """A Worker for INTERACTION.ACT.TOOL, INTERACTION.OBSERVE and INTERACTION.OUTPUT.

    - ACT.TOOL runs one of `tools`, if the sandbox lists it; OBSERVE only where its effect, with these arguments, is
      `pure` or `read`. A tool that is unknown, or whose arguments fail its schema, fails the step before anything is
      admitted; a call of a model (with a `call_id`) comes to a failed result then. A tool that the sandbox does not
      list fails the step before its handler is called. Once it has begun, a definite failure is an ExternalResult.
    - OUTPUT calls `output(message)` or `output(message, ctx)` with the OutputInput. Its effect is `idempotent`: after
      a crash it is called again, with the same `ctx.key`. Without a function the result is a success whose
      `structured` is the content.

    Raises DefinitionError for two tools of one name, and for a schema that is none.
    """
    bound = _bind(tools)
    databases = tuple((each.tool.name, each.tool.database) for each in bound.values() if each.tool.database is not None)

    def act(request: ToolInput) -> Action:
        try:
            return _find(bound, request.tool).plan(request)
        except (ToolError, EffectRejected) as error:
            if request.call_id is None:
                raise
            return _refusal(request, error)

    def observe(request: ToolInput) -> Action:
        action = act(request)
        if action.effect not in (EffectClass.PURE, EffectClass.READ):
            raise EffectRejected(
                f"INTERACTION.OBSERVE takes only what reads; {action.label} is {action.effect} with these arguments. "
                "Use INTERACTION.ACT.TOOL",
                code="tool.not_read",
            )
        return action

    return (
        Worker(type="INTERACTION")
        .with_handler(NodeHandler(type="INTERACTION.ACT.TOOL", plan=act, input=ToolInput, local_databases=databases))
        .with_handler(NodeHandler(type="INTERACTION.OBSERVE", plan=observe, input=ToolInput))
        .with_handler(NodeHandler(type="INTERACTION.OUTPUT", plan=output_plan(output), input=OutputInput))
    )


def _bind(tools: Iterable[Tool]) -> dict[str, BoundTool]:
    bound: dict[str, BoundTool] = {}
    for tool in tools:
        if tool.name in bound:
            raise DefinitionError(f"two tools are called {tool.name!r}; a name says which one a call means")
        bound[tool.name] = BoundTool(tool)
    return bound


def _refusal(request: ToolInput, error: ToolError | EffectRejected) -> Action:
    """What a model is told of a call that cannot be made: nothing is admitted."""
    result = ExternalResult(
        call_id=request.call_id,
        source=request.tool,
        status="failed",
        error=ResultError(code=error.code, message=error.message),
    )
    return Action(
        label=f"tool {request.tool}",
        effect=EffectClass.PURE,
        call=lambda ctx: result,
        is_async=False,
        arguments=request,
        output=ExternalResult,
    )


def _find(bound: Mapping[str, BoundTool], name: str) -> BoundTool:
    if name in bound:
        return bound[name]
    close = difflib.get_close_matches(name, bound, n=3)
    advice = f"did you mean {', '.join(close)}?" if close else "give it to create_interaction_worker(tools=[…])"
    raise EffectRejected(f"no tool is called {name!r}; {advice}", code="tool.unknown")
