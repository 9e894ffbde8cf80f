"""Attempts: one call of a handler, under its deadline, with every way it can end told apart.

Four things look alike in asyncio and must not be confused: our deadline, a TimeoutError of the handler's own, a stray
CancelledError that a library lets out, and the cancellation of the caller. The caller's is kept as it is, to be raised
again: who cancelled by a scope of anyio's knows its own cancellation by it.
"""

from __future__ import annotations

import asyncio
import inspect
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel

from ditto.engine.deadlines import Deadline, Limit
from ditto.engine.outcomes import End
from ditto.engine.threads import Late, Seat
from ditto.errors import StepError
from ditto.worker import Action, StepContext

if TYPE_CHECKING:
    from ditto.engine.expiry import RunDeadline


async def make_attempt(
    action: Action,
    ctx: StepContext,
    deadline: Deadline | None,
    seat: Seat | None,
    late: Late,
    run: RunDeadline | None = None,
) -> End:
    """Call the handler once, in the thread of `seat` or else here. Whatever it raises is an End, and so is the
    caller's cancellation. The deadline of the run cuts it, too."""
    task = asyncio.current_task()
    assert task is not None
    cancels_before = task.cancelling()
    if deadline is None:
        end = await _call(action, ctx, seat, late, task)
    else:
        end = await _call_in_time(action, ctx, deadline, seat, late, task, run)
    if end.cancellation is None and task.cancelling() > cancels_before:
        return replace(end, cancellation=await _swallowed())
    return end


async def _call_in_time(
    action: Action,
    ctx: StepContext,
    deadline: Deadline,
    seat: Seat | None,
    late: Late,
    task: asyncio.Task[Any],
    run: RunDeadline | None,
) -> End:
    try:
        with (
            anyio.CancelScope(deadline=anyio.current_time() + deadline.left_s) as scope,
            nullcontext() if run is None else run.cuts(scope),
        ):
            end = await _call(action, ctx, seat, late, task)
            if end.cancellation is not None:
                # Whose cancellation was it? The scope takes its own back here; one of the caller's goes on.
                await anyio.lowlevel.checkpoint()
            return end
    except asyncio.CancelledError as cancelled:
        return End(cancelled=True, cancellation=cancelled, not_made=ctx.not_made_reason)
    assert scope.cancelled_caught
    missed = deadline if run is None or run.over is None else Deadline(0, Limit.RUN)
    return End(deadline=missed, not_made=ctx.not_made_reason)


async def _call(action: Action, ctx: StepContext, seat: Seat | None, late: Late, task: asyncio.Task[Any]) -> End:
    cancels_before = task.cancelling()
    try:
        made = action.call(ctx) if seat is None else await seat.run(lambda: action.call(ctx), late)
        # A plain function may hand an awaitable through, as many decorators do.
        return End(value=await made if inspect.isawaitable(made) else made)
    except asyncio.CancelledError as cancelled:
        if task.cancelling() > cancels_before:
            return End(cancelled=True, cancellation=cancelled, not_made=ctx.not_made_reason)
        error = StepError(
            "a library under the handler cancelled it; nobody asked for that",
            error_type="CancelledError",
            retryable=True,
        )
        error.__cause__ = cancelled
        return End(error=error)
    except Exception as error:  # noqa: BLE001 - whatever a handler raises is an outcome
        return End(error=error)


async def _swallowed() -> asyncio.CancelledError:
    """The caller's cancellation, which a handler caught and kept: a scope of anyio's raises it anew."""
    try:
        await anyio.lowlevel.checkpoint()
    except asyncio.CancelledError as again:
        return again
    return asyncio.CancelledError("a handler swallowed the cancellation of its caller")
