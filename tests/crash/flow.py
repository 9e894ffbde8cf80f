"""The workflow that is killed everywhere: a step of every class, branches, a commit part, and a loop."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Connection, text

from ditto import (
    Absent,
    Committed,
    Config,
    EffectNotMade,
    Graph,
    LookupResult,
    Loop,
    Outcome,
    Retry,
    Runtime,
    StepContext,
    UnknownOutcomeError,
    create_ditto,
)
from ditto.config import RuntimeConfig, StoreConfig
from tests.crash.world import World

RUN: Final = "x"
ROUNDS: Final = 3


class Flow:
    """The workflows over one world. `kill_in` names a handler and a side of its effect: `send:before`."""

    def __init__(self, world: World, kill_in: str | None = None) -> None:
        self.world = world
        self.kill_in = kill_in

    def graph(self) -> Graph:
        """A Graph with everything in it."""
        sure: dict[str, Any] = {"effect": "write", "lookup": self.find("send"), "absence_is_final": True}
        return (
            Graph("flow")
            .step("pure", lambda: {"n": 1}, effect="pure")
            .step("read", self.call("read"), effect="read", after=("pure",))
            .step("put", self.call("put"), after=("read",))
            .step("send", self.call("send"), after=("put",), **sure)
            .step("flaky", self.flaky, after=("send",), retry=Retry(3, initial_s=0), **sure)
            .step("again", self.again, after=("flaky",), retry=Retry(2, initial_s=0))
            .step("blind", self.call("blind"), after=("again",), effect="write")
            .step("model", self.call("model"), after=("blind",), effect="infer")
            .step("book", self.book, after=("model",), effect="local")
            .step("noted", self.call("send"), after=("book",), record=self.note, **sure)
            .step("left", self.call("send"), after=("noted",), **sure)
            .step("right", self.call("put"), after=("noted",))
            .step("skipped", self.call("put"), after=("noted",), when=lambda noted: False)
            .step("thread", self.call_in_thread, after=("noted",), **sure)
            .step("join", lambda left, right, skipped, thread: [left, right, skipped, thread],
                  after=("left", "right", "skipped", "thread"), effect="pure")
        )  # fmt: skip

    def loop(self) -> Loop:
        """Rounds, each with a pure step and a write."""
        body = (
            Graph("round")
            .step("pure", lambda input: input, effect="pure")
            .step(
                "send",
                self.call("send"),
                after=("pure",),
                effect="write",
                lookup=self.find("send"),
                absence_is_final=True,
            )
            .step("last", lambda send: send, after=("send",), effect="pure")
        )
        return Loop(
            "rounds",
            graph=body,
            update=lambda state, outputs: [*state, outputs["last"]],
            done=lambda state: len(state) == ROUNDS,
            max_iterations=10,
        )

    # Handlers

    def call(self, kind: str) -> Callable[..., Any]:
        """An async handler that does one thing outside."""

        async def act(ctx: StepContext) -> str:
            await asyncio.sleep(0)
            return self.act(kind, ctx)

        return act

    def call_in_thread(self, ctx: StepContext) -> str:
        return self.act("send", ctx)

    def act(self, kind: str, ctx: StepContext) -> str:
        name = ctx.path.rpartition("/")[2]
        if self.kill_in == f"{name}:before":
            os.kill(os.getpid(), signal.SIGKILL)
        done = self.world.act(kind, ctx.key)
        if self.kill_in == f"{name}:after":
            os.kill(os.getpid(), signal.SIGKILL)
        return done

    async def flaky(self, ctx: StepContext) -> str:
        """Not made at first."""
        if ctx.attempt == 1:
            raise EffectNotMade("not yet")
        return self.act("send", ctx)

    async def again(self, ctx: StepContext) -> str:
        """Fails at first; with a policy of two tries, over all processes."""
        if ctx.attempt == 1:
            raise ValueError("not yet")
        return self.act("put", ctx)

    def book(self, ctx: StepContext) -> int:
        """Write into the store's own database."""
        if self.kill_in == "book:before":
            os.kill(os.getpid(), signal.SIGKILL)
        ctx.connection.execute(text("CREATE TABLE IF NOT EXISTS book (entry TEXT)"))
        ctx.connection.execute(text("INSERT INTO book VALUES (:key)"), {"key": ctx.key})
        if self.kill_in == "book:after":
            os.kill(os.getpid(), signal.SIGKILL)
        return int(ctx.connection.execute(text("SELECT count(*) FROM book")).scalar_one())

    def note(self, connection: Connection, outcome: Outcome) -> None:
        """A commit part."""
        connection.execute(text("INSERT INTO book VALUES (:key)"), {"key": outcome.key})

    def find(self, kind: str) -> Callable[..., Any]:
        """A look-up that tells the truth."""

        async def find(key: str, arguments: Any, ctx: StepContext) -> LookupResult:
            await asyncio.sleep(0)
            return Committed(f"{kind} {key}") if self.world.has(kind, key) else Absent()

        return find


def open_runtime(store: Path) -> Runtime:
    """The runtime of the crash tests: a lost model call is asked again."""
    config = Config(
        runtime=RuntimeConfig(on_unknown_model_call="ask_again", grace_s=5),
        store=StoreConfig(synchronous="normal"),  # processes are killed here, not machines
    )
    return create_ditto(config, store=store)


async def drive(store: Path, flow: Flow, workflow: str) -> Any:
    """Run to the end. What only a person can decide is decided by looking into the world."""
    async with open_runtime(store) as runtime:
        while True:
            try:
                if workflow == "loop":
                    return await runtime.loop(flow.loop(), [], id=RUN)
                return await runtime.run(flow.graph(), id=RUN)
            except UnknownOutcomeError as unknown:
                for path in unknown.steps:
                    await decide(runtime, flow.world, path)


async def decide(runtime: Runtime, world: World, path: str) -> None:
    step = (await runtime.get(RUN)).step(path)
    assert step is not None
    assert (path, step.effect) == ("blind", "write"), f"{path} should have been settled without a person"
    assert step.key is not None
    made: dict[str, Any] = {"absent": True}
    if world.has("blind", step.key):
        made = {"committed": f"blind {step.key}"}
    await runtime.resolve(RUN, path, actor="test", reason="seen in the world", attempt=step.attempt, **made)
