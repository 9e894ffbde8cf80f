"""Ordinary agents of Pydantic AI at work: its OpenAI model over real HTTP, and tools that act on a world outside.

Also a program, killed and started again: `live(order)` runs one process's life of a durable agent.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from ditto import Absent, Committed, Config, LookupResult, Runtime, StepContext, create_ditto
from ditto.config import RuntimeConfig
from ditto.journal.pydantic_ai import DittoDurability, current_step
from ditto.testing.provider import Call, Reply, Text, ToolCalls
from tests.crash.world import World

KEY: dict[str, Any] = {"namespace": "report-v1", "thread": "thread-1", "turn": "turn-1"}

TOOLS = ("alpha", "beta", "gamma")

PROMPT = "publish the report"
SAID = "I publish it now."
DONE = "It is published."


CLIENTS: list[httpx2.AsyncClient] = []
"""Closed at the end of a test."""


def openai_model(base_url: str) -> OpenAIChatModel:
    """What an ordinary program has: a model of Pydantic AI's, whose client is free to retry."""
    client = httpx2.AsyncClient()
    CLIENTS.append(client)
    provider = OpenAIProvider(base_url=base_url, api_key="sk-not-for-the-store", http_client=client)
    assert provider.client.max_retries == 2
    return OpenAIChatModel("tiny", provider=provider)


@asynccontextmanager
async def durable(store: Path, **settings: Any) -> AsyncIterator[Runtime]:
    """A runtime with no worker at all: the agent brings its own model and tools."""
    async with create_ditto(Config(runtime=RuntimeConfig(**settings)), store=store, workers=[]) as runtime:
        yield runtime


def report(request: dict[str, Any], index: int) -> Reply:
    """The script: a call of each tool that is offered, all in one answer, then the end.

    It reads the request, not the position, so a call asked again gets the same answer.
    """
    if any(message["role"] == "tool" for message in request["messages"]):
        return Text(DONE)
    names = [tool["function"]["name"] for tool in request["tools"]]
    return ToolCalls([Call(f"call-{name}", name, json.dumps({"text": name})) for name in names], content=SAID)


def report_agent(
    runtime: Runtime,
    base_url: str,
    world: World,
    *,
    tools: int = 2,
    effect: str = "write",
    before: Callable[[str], None] | None = None,
) -> Agent[None, str]:
    """An ordinary agent, with the one added line. Its tools can be looked up by their key."""
    agent = Agent(
        openai_model(base_url),
        capabilities=[DittoDurability(runtime, **KEY, max_concurrency=tools)],  # the one added line
        instructions="Publish what you are asked for.",
    )

    def find(key: str, arguments: dict[str, Any], step: StepContext) -> LookupResult:
        name = arguments["text"]
        return Committed(f"{name} is out") if world.has(name, key) else Absent()

    def add(name: str) -> None:
        async def publish(text: str) -> str:
            if before is not None:
                before(f"{name}:before")
            world.act(name, current_step().key)
            if before is not None:
                before(f"{name}:after")
            return f"{text} is out"

        declared = {"effect": effect, "lookup": find, "absence_is_final": True}
        agent.tool_plain(name=name, metadata={"ditto": declared})(publish)

    for name in TOOLS[:tools]:
        add(name)
    return agent


async def work(order: dict[str, Any]) -> dict[str, Any]:
    """One life: what the consumer saw, in order, and what the run came to."""

    def before(point: str) -> None:
        if order.get("kill_in") == point:
            os.kill(os.getpid(), signal.SIGKILL)

    world = World(Path(order["world"]))
    async with durable(Path(order["store"]), on_unknown_model_call=order.get("policy", "stop")) as runtime:
        effect = order.get("effect", "write")
        agent = report_agent(runtime, order["base_url"], world, tools=order["tools"], effect=effect, before=before)
        if order["mode"] == "generate":
            result = await agent.run(PROMPT)
            return {"output": result.output, "events": []}
        events: list[str] = []

        async def watch(ctx: Any, stream: Any) -> None:
            events.extend([type(event).__name__ async for event in stream])

        result = await agent.run(PROMPT, event_stream_handler=watch)
        return {"output": result.output, "events": events}


def live(order: dict[str, Any]) -> dict[str, Any]:
    """What a process does that is killed somewhere."""
    return asyncio.run(work(order))


def warm_up(folder: Path, base_url: str) -> None:
    """Import what is imported on first use, by living once."""
    paths = {"store": str(folder / "ditto.db"), "world": str(folder / "world.db")}
    live({"mode": "generate", "tools": 1, "base_url": base_url, **paths})


if __name__ == "__main__":
    sys.stdout.write(json.dumps(live(json.loads(sys.argv[1]))) + "\n")
