"""Agents at work: a scripted provider over real HTTP, tools that count their effects, and turns on one store."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio

from ditto import Config, ModelRef, Runtime, Sample, Tool, ToolCall, TurnContext, create_ditto
from ditto.config import Endpoint, ProviderConfig, RuntimeConfig, SandboxConfig, StoreConfig, WorkersConfig
from ditto.contracts import Message, SampleInput, ToolOffer
from ditto.testing.provider import Call, ScriptedProvider, ToolCalls
from ditto.turn import Turn
from ditto_workers import create_infer_worker, create_interaction_worker

MODEL = ModelRef("scripted", "tiny")

TURN = Turn("report-v1", "thread-1", "turn-1", "tiny/1")

PUBLISH: dict[str, Any] = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}


@dataclass
class Effects:
    """What the tools did to the world, in order."""

    done: list[tuple[str, str]] = field(default_factory=list)

    def tool(self, name: str, **options: Any) -> Tool:
        """A tool that notes its call and returns `<name>:<text>`."""

        async def handler(arguments: dict[str, Any]) -> str:
            self.done.append((name, arguments["text"]))
            return f"{name}:{arguments['text']}"

        return Tool(name, handler, PUBLISH, **options)


def calls(*made: tuple[str, str, str]) -> ToolCalls:
    """An answer with these calls: (id, tool, text)."""
    return ToolCalls([Call(call_id, name, f'{{"text": "{text}"}}') for call_id, name, text in made])


def request(*messages: Message, **options: Any) -> SampleInput:
    """A request with the tools that the scene has."""
    offers = (ToolOffer(name="publish", parameters=PUBLISH),)
    return SampleInput(model=MODEL, messages=messages or (Message(role="user", content="go"),), tools=offers, **options)


@asynccontextmanager
async def agents(
    store: Path,
    provider: ScriptedProvider,
    tools: Sequence[Tool] = (),
    *,
    allowed: Sequence[str] | None = None,
    workers: WorkersConfig | None = None,
    providers: dict[str, ProviderConfig] | None = None,
    receipts: bool = True,
    **runtime_settings: Any,
) -> AsyncIterator[Runtime]:
    """A runtime whose model is the scripted provider. The sandbox allows all `tools`, or those that are `allowed`."""
    names = [tool.name for tool in tools] if allowed is None else allowed
    settings = Config(
        model=MODEL,
        endpoints={"scripted": Endpoint(base_url=provider.base_url)},
        sandbox=SandboxConfig(tools=tuple(names)),
        workers=workers or WorkersConfig(),
        providers=providers or {},
        runtime=RuntimeConfig(**{"grace_s": 5.0, **runtime_settings}),
        store=StoreConfig(receipts=receipts),
    )
    async with create_ditto(
        settings, store=store, workers=[create_infer_worker(), create_interaction_worker(tools=tools)]
    ) as runtime:
        yield runtime


async def talk(ctx: TurnContext, first: SampleInput, *, order: Sequence[str] = ()) -> str:
    """The smallest agent: ask, call what is asked for side by side, until there is an answer.

    The calls are begun in the `order` of their ids, or else in the answer's.
    """
    messages = list(first.messages)
    while True:
        sample = await ctx.sample(first.model_copy(update={"messages": tuple(messages)}))
        messages.append(sample.message)
        if not sample.message.tool_calls:
            return str(sample.message.content)
        messages += await _act(ctx, sample, order)


async def _act(ctx: TurnContext, sample: Sample, order: Sequence[str]) -> list[Message]:
    results: dict[str, str] = {}
    asked = {call.id: call for call in sample.message.tool_calls}

    async def make(call: ToolCall) -> None:
        result = await ctx.call(call.name, call.id, json.loads(call.arguments))
        results[call.id] = result.content or str(result.error)

    async with anyio.create_task_group() as group:
        for call_id in order or asked:
            group.start_soon(make, asked[call_id])
    return [Message(role="tool", content=results[call.id], tool_call_id=call.id) for call in sample.message.tool_calls]
