"""Attempts: one call of a handler, under its deadline, with every way it can end told apart.

Four things look alike in asyncio and must not be confused: our deadline, a TimeoutError of the handler's own, a stray
CancelledError that a library lets out, and the cancellation of the caller.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import anyio
import anyio.lowlevel

from ditto.effects import EffectClass
from ditto.engine.outcomes import End
from ditto.engine.threads import Late, Threads
from ditto.errors import StepError
from ditto.worker import Action, StepContext


@dataclass(frozen=True, slots=True)
class Deadline:
    """Seconds that an attempt may take; `own` if the action, not the node, set it."""

    seconds: float
    own: bool


def choose_deadline(node_s: float | None, action_s: float | None, default_s: float | None) -> Deadline | None:
    """The earliest of the node's deadline (or the configured default) and the action's own."""
    node_s = default_s if node_s is None else node_s
    if action_s is not None and (node_s is None or action_s < node_s):
        return Deadline(action_s, own=True)
    return None if node_s is None else Deadline(node_s, own=False)


async def make_attempt(
    action: Action, ctx: StepContext, deadline: Deadline | None, threads: Threads, late: Late
) -> End:
    """Call the handler once. Whatever it raises is an End, and so is the caller's cancellation."""
    task = asyncio.current_task()
    assert task is not None
    cancels_before = task.cancelling()
    if deadline is None:
        return await _call(action, ctx, threads, late, task, cancels_before)
    try:
        with anyio.CancelScope(deadline=anyio.current_time() + deadline.seconds) as scope:
            end = await _call(action, ctx, threads, late, task, cancels_before)
            if end.cancelled:
                # Whose cancellation was it? The scope takes its own back here; one of the caller's goes on.
                await anyio.lowlevel.checkpoint()
            return end
    except asyncio.CancelledError:
        return End(cancelled=True, not_made=ctx.not_made_reason)
    assert scope.cancelled_caught
    return End(deadline_s=deadline.seconds, own_deadline=deadline.own, not_made=ctx.not_made_reason)


async def _call(
    action: Action, ctx: StepContext, threads: Threads, late: Late, task: asyncio.Task[Any], cancels_before: int
) -> End:
    try:
        if action.is_async:
            return End(value=await action.call(ctx))
        if action.effect is EffectClass.PURE:
            return End(value=action.call(ctx))
        return End(value=await threads.run(lambda: action.call(ctx), late))
    except asyncio.CancelledError as stray:
        if task.cancelling() > cancels_before:
            return End(cancelled=True, not_made=ctx.not_made_reason)
        error = StepError(
            "a library under the handler cancelled it; nobody asked for that", error_type="CancelledError"
        )
        error.__cause__ = stray
        return End(error=error)
    except Exception as error:  # noqa: BLE001 - whatever a handler raises is an outcome
        return End(error=error)
