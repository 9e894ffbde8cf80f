"""A Flow that waits: a step, a signal, a tool that needs a person's yes, a child run that waits for another yes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from ditto import (
    Absent,
    Committed,
    Config,
    Flow,
    FlowContext,
    Graph,
    LookupResult,
    Sandbox,
    StepContext,
    Tool,
    Waiting,
    WaitKind,
    create_ditto,
)
from ditto.config import RuntimeConfig, StoreConfig
from ditto_workers import create_interaction_worker
from tests.crash.world import World

RUN: Final = "x"
RESULT: Final = ["put x/1/first", 7, "send x/1/pay", "put x/kid/1/last", "ada"]


def make_order(world: World) -> tuple[Flow, list[Tool]]:
    """The Flow, and the tool that it calls."""

    async def put(ctx: StepContext) -> str:
        return world.act("put", ctx.key)

    async def first(input: Any, ctx: StepContext) -> str:
        return world.act("put", ctx.key)

    async def send(arguments: Any, ctx: StepContext) -> str:
        return world.act("send", ctx.key)

    def find(key: str, arguments: Any, ctx: StepContext) -> LookupResult:
        return Committed(f"send {key}") if world.has("send", key) else Absent()

    kid = (
        Graph("kid")
        .approval("ok", show=lambda input: input)
        .step("last", put, after=("ok",), when=lambda ok: ok["decision"] == "approve")
    )

    async def order(ctx: FlowContext, input: Any) -> Any:
        done = await ctx.step("first", first)
        paid = await ctx.wait("paid")
        sent = await ctx.node("pay", "INTERACTION.ACT.TOOL", {"tool": "pay", "arguments": {"amount": paid}})
        outputs = await ctx.child("kid", kid, paid)
        return [done, paid, sent["content"], outputs["last"], outputs["ok"]["actor"]]

    pay = Tool(
        "pay", send, {"type": "object"}, effect="write", lookup=find, absence_is_final=True, requires_approval=True
    )
    return Flow("order", order), [pay]


async def drive_order(store: Path, world: World) -> Any:
    """Run to the end; what is waited for comes from here, and may have come before a kill."""
    flow, tools = make_order(world)
    runtime = create_ditto(
        Config(runtime=RuntimeConfig(grace_s=5), store=StoreConfig(synchronous="normal")),
        store=store,
        workers=[create_interaction_worker(tools=tools)],
        sandbox=Sandbox(tools=tuple(tool.name for tool in tools)),
    )
    async with runtime:
        while isinstance(result := await runtime.run(flow, None, id=RUN, on_wait="return"), Waiting):
            for wait in result.waits:
                match wait.kind:
                    case WaitKind.SIGNAL:
                        await runtime.signal(RUN, wait.name, 7, id="payment-1")
                    case WaitKind.APPROVAL:
                        await runtime.decide(RUN, wait.step, decision="approve", actor="ada", digest=wait.digest)
                    case WaitKind.CHILD:
                        await runtime.decide(wait.name, decision="approve", actor="ada")
        return result
