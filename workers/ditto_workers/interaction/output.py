"""INTERACTION.OUTPUT: what a workflow hands to its application."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

from ditto import Action, EffectClass, ExternalResult, StepContext
from ditto.contracts import OutputInput
from ditto.signatures import is_async, takes_context
from ditto.worker import Plan, as_data
from ditto_workers.interaction.results import to_failed_result, to_result

OutputFunction: TypeAlias = Callable[..., Any]
"""`output(message)` or `output(message, ctx)`, plain or async; `message` is an OutputInput."""

_SOURCE: Final = "output"


def output_plan(output: OutputFunction | None) -> Plan:
    """How an OUTPUT step is carried out: by `output`, or, without one, by handing its content through."""
    if output is None:
        return _hand_through
    function = output
    with_context = takes_context(function, owner=_SOURCE, first="message")
    function_is_async = is_async(function)

    def plan(message: OutputInput) -> Action:
        def call(ctx: StepContext) -> Any:
            return function(message, ctx) if with_context else function(message)

        async def call_async(ctx: StepContext) -> Any:
            return await call(ctx)

        return Action(
            label=f"output {message.channel}",
            effect=EffectClass.IDEMPOTENT,
            call=call_async if function_is_async else call,
            is_async=function_is_async,
            arguments=message,
            recorded=lambda: as_data(message),
            result=lambda value: to_result(value, source=_SOURCE, call_id=None),
            failure=lambda error: to_failed_result(error, effect=EffectClass.IDEMPOTENT, source=_SOURCE, call_id=None),
            output=ExternalResult,
        )

    return plan


def _hand_through(message: OutputInput) -> Action:
    async def call(ctx: StepContext) -> ExternalResult:
        return ExternalResult(source=_SOURCE, status="success", structured=message.content)

    return Action(
        label=f"output {message.channel}",
        effect=EffectClass.IDEMPOTENT,
        call=call,
        is_async=True,
        arguments=message,
        recorded=lambda: as_data(message),
        output=ExternalResult,
    )
