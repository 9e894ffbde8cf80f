"""A process that stops at each point that it passes, and goes on when it is told to: the child of `stepper.Stepped`.

One JSON line in begins an order: {"do", "store", "world", "id", "leave_at"}, see `ORDERS`. From then on it says, one
JSON line each, where it stopped, {"at": point}, and waits for a line; or what the order came to: {"result": …} or
{"error": text}.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

from ditto import Absent, Committed, Config, DittoError, Graph, LookupResult, Loop, Runtime, StepContext, create_ditto
from ditto.config import RuntimeConfig, StoreConfig
from ditto.testing import crash
from tests.crash.world import World

_talking = threading.Lock()


def say(**told: Any) -> None:
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()


def stop(point: str) -> None:
    """Say where we are, and wait to be told to go on. Whoever else comes to a point meanwhile waits, too."""
    with _talking:
        say(at=point)
        sys.stdin.readline()


class Leaving:
    """Lets go of what is driven, at a point: the task that drives it is cancelled there."""

    def __init__(self, point: str | None) -> None:
        self._point = point
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()

    def stop(self, point: str) -> None:
        stop(point)
        if point == self._point and self._task is not None:
            self._loop.call_soon_threadsafe(self._task.cancel)


class Work:
    """The workflows: an effect with the same key, a write that can be looked up, and one more effect."""

    def __init__(self, world: World) -> None:
        self._world = world

    def graph(self) -> Graph:
        return (
            Graph("flow")
            .step("first", self._put)
            .step("send", self._send, after=("first",), effect="write", lookup=self._find, absence_is_final=True)
            .step("last", self._put, after=("send",))
        )

    def loop(self) -> Loop:
        """Two rounds of one write."""
        return Loop(
            "turns",
            graph=Graph("turn").step("send", self._send, effect="write", lookup=self._find, absence_is_final=True),
            update=lambda state, outputs: [*state, outputs["send"]],
            done=lambda state: len(state) == 2,
            max_iterations=2,
        )

    async def _put(self, ctx: StepContext) -> str:
        stop(f"flow/{ctx.path}:effect")
        return self._world.act("put", ctx.key)

    async def _send(self, ctx: StepContext) -> str:
        """The whole event loop stands still where it stops, as under a handler that blocks it."""
        stop(f"flow/{ctx.path}:effect:before")
        sent = self._world.act("send", ctx.key)
        stop(f"flow/{ctx.path}:effect:after")
        return sent

    def _find(self, key: str, arguments: Any, ctx: StepContext) -> LookupResult:
        return Committed(f"send {key}") if self._world.has("send", key) else Absent()


async def recover(runtime: Runtime, work: Work, order: dict[str, Any]) -> Any:
    return [(each.run_id, each.status, str(each.error or "")) for each in await runtime.recover()]


async def cancel(runtime: Runtime, work: Work, order: dict[str, Any]) -> Any:
    await runtime.cancel(order["id"], actor="test", reason="stopped")


ORDERS: Final[dict[str, Callable[[Runtime, Work, dict[str, Any]], Awaitable[Any]]]] = {
    "run": lambda runtime, work, order: runtime.run(work.graph(), id=order["id"]),
    "run anew": lambda runtime, work, order: runtime.run(work.graph(), id=order["id"], on_finished="new"),
    "loop": lambda runtime, work, order: runtime.loop(work.loop(), [], id=order["id"]),
    "recover": recover,
    "cancel": cancel,
}


async def carry_out(order: dict[str, Any]) -> Any:
    crash.watch_points(Leaving(order["leave_at"]).stop)
    work = Work(World(Path(order["world"])))
    config = Config(
        runtime=RuntimeConfig(grace_s=5),
        store=StoreConfig(synchronous="normal", busy_timeout_s=60),  # nobody's machine fails here
    )
    async with create_ditto(config, store=Path(order["store"]), workflows=[work.graph(), work.loop()]) as runtime:
        return await ORDERS[order["do"]](runtime, work, order)


def main() -> None:
    """Carry out orders until the input ends."""
    say(ready=True)
    while line := sys.stdin.readline():
        try:
            result = asyncio.run(carry_out(json.loads(line)))
        except DittoError as error:
            say(error=f"{type(error).__name__}: {error.message}")
        except asyncio.CancelledError:
            say(result="let go")
        else:
            say(result=result)
