"""The worker of CONTEXT.LOAD, SELECT, UPDATE and COMPRESS: all `pure`, all deterministic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import BaseModel

from ditto import Action, Context, EffectClass, NodeHandler, StepContext, Worker
from ditto.contracts import CompressInput, ContextLimits, LoadInput, SelectInput, UpdateInput
from ditto_workers.context.compression import compress
from ditto_workers.context.limits import Caps, smaller
from ditto_workers.context.operations import load, select, update


def create_context_worker() -> Worker:
    """A Worker for CONTEXT.LOAD, CONTEXT.SELECT, CONTEXT.UPDATE and CONTEXT.COMPRESS.

    The caps are those of the step's input and of `workers.context` in the configuration, whichever is smaller. What
    must stay although it is over them fails the step with LimitExceededError.
    """
    return (
        Worker(type="CONTEXT")
        .with_handler(_handler("CONTEXT.LOAD", LoadInput, load))
        .with_handler(_handler("CONTEXT.SELECT", SelectInput, select))
        .with_handler(_handler("CONTEXT.UPDATE", UpdateInput, update))
        .with_handler(_handler("CONTEXT.COMPRESS", CompressInput, compress))
    )


def _handler(node_type: str, contract: type[BaseModel], operation: Callable[[Any, Caps], Context]) -> NodeHandler:
    def plan(request: Any) -> Action:
        return Action(
            label=node_type,
            effect=EffectClass.PURE,
            call=lambda ctx: operation(request, _caps(request.limits, ctx)),
            is_async=False,
            arguments=request,
            output=Context,
        )

    return NodeHandler(type=node_type, plan=plan, input=contract)


def _caps(limits: ContextLimits, ctx: StepContext) -> Caps:
    configured = ctx.config.workers.context
    return Caps(
        items_max=smaller(limits.items_max, configured.items_max),
        bytes_max=smaller(limits.bytes_max, configured.bytes_max),
    )
