"""An agent as a program that is killed: by JournaledAgent, by run_agent, or as a saved turn of a bridge."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TextIO

from ditto import (
    Absent,
    Committed,
    Config,
    DittoError,
    LookupResult,
    Message,
    ModelRef,
    Runtime,
    Sample,
    StepContext,
    Tool,
    Turn,
    UnknownOutcomeError,
    create_ditto,
)
from ditto.config import Endpoint, RuntimeConfig, SandboxConfig, StoreConfig
from ditto.journal import (
    Bindings,
    JournaledAgent,
    SavedCall,
    SavedTurn,
    recorded_messages,
    replay_saved_turn,
    run_agent,
)
from ditto_workers import create_infer_worker, create_interaction_worker
from tests.crash.world import World
from tests.journal.model import TOOLS

MODEL: Final = ModelRef("scripted", "tiny")
KEY: Final[dict[str, Any]] = {"namespace": "agent", "thread": "thread-1", "turn": "turn-1"}
RUN: Final = Turn(**KEY, model_key=MODEL.key).run_id
SCHEMA: Final[dict[str, Any]] = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}


@dataclass(frozen=True)
class Agent:
    """One agent, as its order describes it: `way`, `stream`, `tools`, `rounds`, `at_once`, `kill_in`."""

    order: dict[str, Any]
    world: World

    @property
    def prompt(self) -> str:
        return json.dumps({name: self.order.get(name) for name in ("case", "tools", "rounds", "slow")})

    def tools(self) -> list[Tool]:
        """A write that nobody can look up, one that can be, and a read."""
        return [
            Tool("notify", self.handler("notify"), SCHEMA),
            Tool("publish", self.handler("publish"), SCHEMA, lookup=self.find, absence_is_final=True),
            Tool("look", self.handler("look"), SCHEMA, effect="read"),
        ][: self.order["tools"]]

    def handler(self, name: str) -> Any:
        async def act(arguments: dict[str, Any], ctx: StepContext) -> str:
            await asyncio.sleep(0)
            self.die(f"{name}:before")
            if self.order.get("wait_in") == name:
                sys.stdout.write(f"in {name}\n")
                sys.stdout.flush()
                await line_of(sys.stdin)
            self.world.act(f"{name} {arguments['text']}", ctx.key)
            self.die(f"{name}:after")
            return f"{name} {arguments['text']}"

        return act

    def die(self, place: str) -> None:
        if self.order.get("kill_in") == place:
            os.kill(os.getpid(), signal.SIGKILL)

    async def find(self, key: str, arguments: dict[str, Any], ctx: StepContext) -> LookupResult:
        """A look-up that tells the truth."""
        return Committed(f"publish {arguments['text']}") if self.world.has_key(key) else Absent()

    async def run(self, runtime: Runtime) -> str:
        """To its end."""
        if self.order["way"] == "run_agent":
            result = await run_agent(
                runtime, self.prompt, model=MODEL, tools=self.tools(), stream=self.order["stream"], **KEY
            )
            return result.text
        if self.order["way"] == "next":
            return await self.go_on(runtime)
        if self.order["way"] == "bridge":
            saved = SavedTurn(
                KEY["thread"],
                KEY["turn"],
                tuple(SavedCall(f"c{at}", TOOLS[at], {"text": "0"}) for at in range(self.order["tools"])),
            )
            told = await replay_saved_turn(saved, runtime, self.tools(), namespace=KEY["namespace"])
            return json.dumps([(call_id, result.content) for call_id, result in told])
        agent = JournaledAgent(
            runtime, MODEL, self.tools(), **KEY, model_key=MODEL.key, max_concurrency=self.order["at_once"]
        )
        return await agent.run(self.converse)

    async def go_on(self, runtime: Runtime) -> str:
        """The next turn of the thread, with what the one before has recorded."""
        recorded = recorded_messages(await runtime.get(RUN))
        messages = [Message(role="user", content=self.prompt), *recorded, Message(role="user", content="and now?")]
        agent = JournaledAgent(runtime, MODEL, self.tools(), **{**KEY, "turn": "turn-2"}, model_key=MODEL.key)
        sample: Sample = await agent.run(lambda bindings: bindings.model.sample(messages))
        return sample.message.content

    async def converse(self, bindings: Bindings) -> str:
        messages = [Message(role="user", content=self.prompt)]
        while True:
            sample = await bindings.model.sample(messages, stream=self.order["stream"])
            messages += [sample.message, *await bindings.act(sample)]
            if not sample.message.tool_calls:
                return sample.message.content


async def line_of(file: TextIO) -> None:
    """Return when there is a line to read. A thread that reads could not be cancelled."""
    come = asyncio.Event()
    asyncio.get_running_loop().add_reader(file, come.set)
    try:
        await come.wait()
        file.readline()
    finally:
        asyncio.get_running_loop().remove_reader(file)


def open_runtime(order: dict[str, Any], agent: Agent) -> Runtime:
    """The runtime of one process."""
    config = Config(
        endpoints={MODEL.provider: Endpoint(base_url=order["base_url"])},
        sandbox=SandboxConfig(tools=TOOLS),
        runtime=RuntimeConfig(
            on_unknown_model_call=order.get("policy", "stop"), grace_s=5, concurrency=order["at_once"]
        ),
        store=StoreConfig(synchronous="normal"),  # processes are killed here, not machines
    )
    workers = [create_infer_worker(), create_interaction_worker(tools=agent.tools())]
    return create_ditto(config, store=order["store"], workers=workers)


async def drive(order: dict[str, Any]) -> dict[str, Any]:
    """What the agent says. What only a person can decide is decided by looking into the world, if `decide` is set."""
    agent = Agent(order, World(Path(order["world"])))
    decided: list[str] = []
    async with open_runtime(order, agent) as runtime:
        while True:
            try:
                return {"text": await agent.run(runtime), "decided": decided}
            except UnknownOutcomeError as unknown:
                if not order.get("decide", True):
                    return {"unknown": list(unknown.steps)}
                for path in unknown.steps:
                    await settle(runtime, agent.world, path)
                    decided.append(path)


async def settle(runtime: Runtime, world: World, path: str) -> None:
    """A person's decision. A model call is asked again; a tool call was made, or not."""
    step = (await runtime.get(RUN)).step(path)
    assert step is not None
    made: dict[str, Any]
    if step.effect == "infer":
        made = {"ask_again": True}
    else:
        assert step.key is not None
        assert (step.effect, "publish" in str(step.output)) == ("write", False)
        made = {"committed": "notify 0"} if world.has_key(step.key) else {"absent": True}
    await runtime.resolve(RUN, path, actor="test", reason="seen in the world", attempt=step.attempt, **made)


def live(order: dict[str, Any]) -> Any:
    """What a child does."""
    return asyncio.run(drive(order))


def warm_up(folder: Path) -> None:
    """Import what is imported on first use; nobody answers at that address."""
    order = {"store": folder / "ditto.db", "world": folder / "world.db", "base_url": "http://127.0.0.1:9/v1"}
    order |= {"case": "warm", "stream": True, "tools": 3, "rounds": 1, "at_once": 3}
    for way in ("agent", "bridge"):
        try:
            live({**order, "way": way, "store": folder / f"{way}.db"})
        except DittoError:
            assert way == "agent"
