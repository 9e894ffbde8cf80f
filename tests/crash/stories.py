"""Stories: what the processes of the crash tests do, beside the workflow that is killed everywhere (`flow.py`).

Each is an async function of the process's order; it opens a runtime, does its part, and returns JSON data.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias

import anyio

from ditto import (
    Absent,
    Committed,
    Config,
    Endpoint,
    Flow,
    FlowContext,
    Graph,
    LookupResult,
    Loop,
    Runtime,
    StepContext,
    Waiting,
    Worker,
    create_ditto,
)
from ditto.config import RuntimeConfig, StoreConfig
from ditto_workers import create_infer_worker
from tests.crash.world import World

Order: TypeAlias = Mapping[str, Any]
RUN: Final = "x"


def open_runtime(order: Order, **given: Any) -> Runtime:
    """A runtime on the order's store; a lost model call is asked again."""
    config = Config(
        endpoints={"scripted": Endpoint(base_url=order["provider"])} if "provider" in order else {},
        runtime=RuntimeConfig(on_unknown_model_call="ask_again", grace_s=5, max_iterations=100_000),
        store=StoreConfig(synchronous="normal"),  # processes are killed here, not machines
    )
    return create_ditto(config, store=Path(order["store"]), **given)


def acting(order: Order, kind: str) -> Callable[..., Any]:
    """A handler that does something outside."""

    async def act(ctx: StepContext) -> str:
        return World(Path(order["world"])).act(kind, ctx.key)

    return act


# A02: a loop that asks a person in each round


def review(order: Order) -> Loop:
    """Each round posts a draft, and asks about it."""
    post = acting(order, "post")
    body = (
        Graph("round")
        .step("post", post, effect="idempotent")
        .approval("ask", show=lambda input, post: {"round": input["round"], "drafts": input["drafts"], "posted": post},
                  after=("post",))
    )  # fmt: skip
    return Loop(
        "review",
        graph=body,
        update=lambda state, outputs: {
            "round": state["round"] + 1,
            "drafts": [*state["drafts"], outputs["post"]],
            "answers": [*state["answers"], outputs["ask"]["decision"]],
        },
        done=lambda state: "approve" in state["answers"],
        max_iterations=10,
    )


async def answer(order: Order) -> Any:
    """Give the answer of the order, if it has one, and go on until the next question; or to the end."""
    async with open_runtime(order) as runtime:
        if "decision" in order:
            await runtime.decide(RUN, decision=order["decision"], actor="ada")
        begun = {"round": 1, "drafts": [], "answers": []}
        came_to = await runtime.loop(review(order), begun, id=RUN, on_wait="return")
        return {"asks": came_to.waits[0].shown} if isinstance(came_to, Waiting) else {"ended": came_to}


# A12, A13: turns with a model


def turns(order: Order) -> Loop:
    """Each turn asks the model, and does what it asks for."""

    def messages(state: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"role": "user", "content": "go on"}, *state["said"]]

    async def act(sampled: dict[str, Any], ctx: StepContext) -> list[dict[str, Any]]:
        world = World(Path(order["world"]))
        return [
            {"role": "tool", "tool_call_id": call["id"], "content": world.act("tool", f"{ctx.key}/{call['id']}")}
            for call in sampled["message"]["tool_calls"]
        ]

    def find(key: str, arguments: Any, ctx: StepContext) -> LookupResult:
        [call] = arguments["sampled"]["message"]["tool_calls"]
        found = World(Path(order["world"])).has("tool", f"{key}/{call['id']}")
        told = {"role": "tool", "tool_call_id": call["id"], "content": f"tool {key}/{call['id']}"}
        return Committed([told]) if found else Absent()

    body = (
        Graph("turn")
        .node("sampled", "INFER.REASONING.SAMPLE",
              bind=lambda input: {"model": "scripted/tiny", "messages": messages(input)})
        .step("acted", act, after=("sampled",), effect="write", lookup=find, absence_is_final=True)
    )  # fmt: skip

    def said(sampled: dict[str, Any]) -> dict[str, Any]:
        return {name: sampled["message"][name] for name in ("role", "content", "tool_calls")}

    return Loop(
        "turns",
        graph=body,
        update=lambda state, outputs: {
            "said": [*state["said"], said(outputs["sampled"]), *outputs["acted"]],
            "ended": outputs["sampled"]["finish_reason"] == "stop",
        },
        done=lambda state: bool(state["ended"]),
        max_iterations=10,
    )


async def converse(order: Order) -> Any:
    """Turns until the model has no more to ask for: what was said last, and what it all took by the record."""
    async with open_runtime(order, workers=[create_infer_worker()]) as runtime:
        state = await runtime.loop(turns(order), {"said": [], "ended": False}, id=RUN)
        steps = (await runtime.get(RUN)).steps
        used = [step.output["usage"] for step in steps if step.path.endswith("/sampled")]
        return {
            "last": state["said"][-1]["content"],
            "tokens": sum(each["input_tokens"] + each["output_tokens"] for each in used),
        }


# A10: the same question twice, asked for two tenants


async def ask_who(order: Order) -> Any:
    """One tool is called twice with equal arguments; what it depends on has changed meanwhile."""
    tenants = iter(order["tenants"])

    def who_am_i(arguments: Any, ctx: StepContext) -> str:
        World(Path(order["world"])).act("who", ctx.key)
        return str(next(tenants))

    graph = (
        Graph("who")
        .node("first", "APP.WHO", bind=lambda: {"q": "whoami"})
        .node("second", "APP.WHO", after=("first",), bind=lambda: {"q": "whoami"})
        .step("both", lambda first, second: [first, second], after=("first", "second"))
    )
    worker = Worker("APP").node("APP.WHO", who_am_i, effect="read")
    async with open_runtime(order, workers=[worker]) as runtime:
        return (await runtime.run(graph, id=order.get("id", RUN)))["both"]


# C12: a pause deep inside


def nested(order: Order) -> Flow:
    """X, a question, Y; `depth` levels below Z. By `how`, a level is a child run, or a Graph inside the flow."""

    async def at(depth: int, ctx: FlowContext, input: Any) -> Any:
        if depth == 0 and order["how"] == "graph":
            return await ctx.run("inner", inner(), input)
        if depth == 0:
            posted = await ctx.step("x", named("x"))
            await ctx.approve("ask", {"posted": posted})
            return [posted, await ctx.step("y", named("y"))]
        below = await ctx.child("below", level(depth - 1), input)
        return [*(below.values() if isinstance(below, dict) else below), await ctx.step("z", named("z"))]

    def level(depth: int) -> Flow:
        async def function(ctx: FlowContext, input: Any) -> Any:
            return await at(depth, ctx, input)

        return Flow(f"level-{depth}", function)

    def named(kind: str) -> Callable[..., Any]:
        async def act(_: Any, ctx: StepContext) -> str:
            return World(Path(order["world"])).act(kind, ctx.key)

        return act

    def inner() -> Graph:
        return (
            Graph("inner")
            .step("x", acting(order, "x"))
            .approval("ask", show=lambda x: {"posted": x}, after=("x",))
            .step("y", acting(order, "y"), after=("ask",))
        )

    return level(int(order["depth"]))


async def dive(order: Order) -> Any:
    """Give the answer, if the order has one, and go on until nothing more can be done."""
    flow = nested(order)
    async with open_runtime(order) as runtime:
        if "answer" in order:
            deepest = RUN + "/below" * int(order["depth"])
            asked = [wait.step for wait in (await runtime.get(deepest)).waits]
            await runtime.decide(deepest, asked[0], decision=order["answer"], actor="ada")
        came_to = await runtime.run(flow, None, id=RUN, on_wait="return")
        return {"waits": [wait.step for wait in came_to.waits]} if isinstance(came_to, Waiting) else {"ended": came_to}


# D04: the one slot of a worker


async def use_slot(order: Order) -> Any:
    """Two runs at once of a worker that does one thing at a time; the process may die while the first one does it."""
    world = World(Path(order["world"]))
    inside = 0

    async def use(arguments: Any, ctx: StepContext) -> str:
        nonlocal inside
        inside += 1
        assert inside == 1, "one at a time"
        done = world.act("use", ctx.key)
        if order.get("dies"):
            os.kill(os.getpid(), signal.SIGKILL)
        inside -= 1
        return done

    worker = Worker("DB", concurrency=1).node("DB.USE", use, effect="idempotent")
    graph = Graph("use").node("use", "DB.USE", bind=lambda: {}).step("after", lambda: 1, after=("use",))
    async with open_runtime(order, workers=[worker], workflows=[graph]) as runtime:
        if order.get("dies"):
            async with anyio.create_task_group() as runs:
                for name in ("a", "b"):
                    runs.start_soon(partial(runtime.run, graph, id=name))
        return [[each.run_id, each.status] for each in await runtime.recover()]


# J04: a long loop


async def count(order: Order) -> Any:
    """So many rounds, each with a pure step."""
    rounds = int(order["rounds"])
    loop = Loop(
        "count",
        graph=Graph("round").step("next", lambda input: input + 1, effect="pure"),
        update=lambda state, outputs: outputs["next"],
        done=lambda state: state == rounds,
        max_iterations=rounds,
    )
    async with open_runtime(order) as runtime:
        return await runtime.loop(loop, 0, id=RUN)


STORIES: Final[dict[str, Callable[[Order], Awaitable[Any]]]] = {
    each.__name__: each for each in (answer, converse, ask_who, dive, use_slot, count)
}
