"""What model-call recovery costs, in counts: `python -m benchmarks.journal [--json] [--entries N]`.

Counts decide: bytes bound to statements for each journal entry, rows, flushes. The two processor times stand side by
side, measured in the same run; only their ratio means anything.
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import anyio

from benchmarks.smoke import bytes_bound
from ditto import Config, Message, ModelRef, ModelRequest, Runtime, Sample, Tool, ToolCall, Turn, create_ditto
from ditto.config import RuntimeConfig, SandboxConfig, StoreConfig
from ditto.journal import Bindings, JournaledAgent, run_agent
from ditto_workers import create_infer_worker, create_interaction_worker

ENTRIES: Final = 10_000
CALLS: Final = 100
SHARE: Final = 10
"""The first and the last tenth of the entries are compared."""

MODEL: Final = ModelRef("fake", "tiny")
SCHEMA: Final[dict[str, Any]] = {"type": "object", "properties": {"text": {"type": "string"}}}
ANSWER: Final = {"text": "x" * 1_000}


@dataclass
class FakeModel:
    """A provider in the process itself: it asks for one call in each round, then says that it is done."""

    rounds: int
    asked: int = 0

    async def sample(self, request: Any, ctx: Any) -> Sample:
        self.asked += 1
        done = sum(message.role == "assistant" for message in request.messages)
        text = json.dumps({"text": f"{done} " + "x" * 200})
        calls = (ToolCall(id=f"c{done}", name="publish", arguments=text),) if done < self.rounds else ()
        message = Message(role="assistant", content="" if calls else "done", tool_calls=calls)
        return Sample(message=message, finish_reason="tool_calls" if calls else "stop")


@dataclass
class Bench:
    """A runtime on a store of its own, its model and its tool."""

    model: FakeModel
    effects: list[str] = field(default_factory=list)

    @property
    def tool(self) -> Tool:
        async def publish(arguments: dict[str, Any]) -> str:
            self.effects.append(arguments["text"])
            return f"published {arguments['text']}"

        return Tool("publish", publish, SCHEMA)

    @asynccontextmanager
    async def open(self, store: Path) -> AsyncIterator[Runtime]:
        """A new runtime."""

        @asynccontextmanager
        async def provider(setup: Any) -> AsyncIterator[FakeModel]:
            yield self.model

        config = Config(
            sandbox=SandboxConfig(tools=("publish",)),
            runtime=RuntimeConfig(max_iterations=1_000),
            store=StoreConfig(synchronous="normal"),
        )
        workers = [
            create_infer_worker(providers={MODEL.provider: provider}),
            create_interaction_worker(tools=[self.tool]),
        ]
        async with create_ditto(config, store=store, workers=workers) as runtime:
            yield runtime

    async def agent(self, runtime: Runtime) -> str:
        """ditto's own agent, to its end."""
        rounds = self.model.rounds
        result = await run_agent(
            runtime, "go", model=MODEL, tools=[self.tool], thread="t", turn="1", max_steps=rounds + 1
        )
        return result.text

    async def turn(self, runtime: Runtime, history: Sequence[Message] = ()) -> str:
        """The same agent by its own code, after a history."""
        agent = JournaledAgent(
            runtime, MODEL, [self.tool], namespace="n", thread="t", turn="1", model_key="k", max_model_calls=1_000
        )

        async def converse(bindings: Bindings) -> str:
            messages = [*history, Message(role="user", content="go")]
            while True:
                sample = await bindings.model.sample(messages)
                messages += [sample.message, *await bindings.act(sample)]
                if not sample.message.tool_calls:
                    return sample.message.content

        return await agent.run(converse)


async def bytes_per_entry(store: Path, entries: int) -> float:
    """Bytes bound for the last tenth of a turn's journal entries, over those for the first; each request is as large.

    The entries are kept: none is archived.
    """
    tenth = entries // SHARE
    marks: dict[int, int] = {}

    async def ask(ctx: Any) -> Any:
        return ANSWER

    async def agent(ctx: Any) -> None:
        for number in range(entries):
            if number in (1, tenth, entries - tenth, entries - 1):
                marks[number] = sum(bound)
            await ctx.ask(ModelRequest("fake", {"model": "tiny", "messages": [{"number": number, **ANSWER}]}), ask)

    with bytes_bound() as bound:
        async with create_ditto(Config(store=StoreConfig(synchronous="normal")), store=store) as runtime:
            await runtime.turn(Turn("n", "t", "1", "k", max_model_calls=entries), agent)
    return (marks[entries - 1] - marks[entries - tenth]) / (marks[tenth] - marks[1])


async def conversation(store: Path, rounds: int) -> tuple[float, float]:
    """(rows of messages / messages, bytes bound late / early) of a conversation that grows by two messages a round."""
    bench = Bench(FakeModel(rounds))
    with bytes_bound() as bound:
        marks: list[int] = []
        ask = bench.model.sample

        async def marked(request: Any, ctx: Any) -> Sample:
            marks.append(sum(bound))
            return await ask(request, ctx)

        bench.model.sample = marked  # type: ignore[method-assign]
        async with bench.open(store) as runtime:
            await bench.turn(runtime)
    with closing(sqlite3.connect(store)) as db:
        [(rows,)] = db.execute("SELECT count(*) FROM ditto_values WHERE body LIKE '{\"role\":%'").fetchall()
    messages = 1 + 2 * rounds  # the last answer is sent to nobody
    early = marks[rounds // 4] - marks[rounds // 8]
    late = marks[rounds - 1] - marks[rounds - 1 - (rounds // 4 - rounds // 8)]
    return rows / messages, late / early


async def flushes_per_round(store: Path, history: int, rounds: int) -> float:
    """Commits of a round of an agent, after a history of so many messages."""
    bench = Bench(FakeModel(rounds))
    told = [Message(role="user" if at % 2 == 0 else "system", content=f"message {at}") for at in range(history)]
    async with bench.open(store) as runtime:
        await bench.turn(runtime, told)
        # The creation, the first admission, the last answer with the end.
        return (runtime.commits - 3) / rounds


async def replay(folder: Path) -> tuple[float, int, int]:
    """(processor time of a replay / of the run itself, requests, effects during the replay) of `CALLS` model calls."""
    bench = Bench(FakeModel(CALLS - 1))
    store = folder / "replay.db"
    async with bench.open(store) as runtime:
        began = time.process_time()
        assert await bench.agent(runtime) == "done"
        ran = time.process_time() - began
    asked, done = bench.model.asked, len(bench.effects)
    assert (asked, done) == (CALLS, CALLS - 1)
    async with bench.open(store) as runtime:
        began = time.process_time()
        assert await bench.agent(runtime) == "done"
        again = time.process_time() - began
    return again / ran, bench.model.asked - asked, len(bench.effects) - done


async def measure(folder: Path, entries: int) -> dict[str, float]:
    """All figures, by name."""
    figures: dict[str, float] = {"entries": entries}
    figures["bytes_per_entry_last_over_first"] = await bytes_per_entry(folder / "entries.db", entries)
    rows, growth = await conversation(folder / "conversation.db", 64)
    figures["rows_per_message"], figures["bytes_per_round_late_over_early"] = rows, growth
    for history in (1, 200):
        figures[f"flushes_per_round_history_{history}"] = await flushes_per_round(
            folder / f"flushes-{history}.db", history, 20
        )
    ratio, requests, effects = await replay(folder)
    figures["replay_processor_ratio"] = ratio
    figures["replay_requests"], figures["replay_effects"] = requests, effects
    return {name: round(value, 4) for name, value in figures.items()}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.journal", description="What model-call recovery costs.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--entries", type=int, default=ENTRIES, help=f"journal entries of one turn ({ENTRIES})")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ditto-journal-") as folder:
        figures = anyio.run(measure, Path(folder), options.entries)
    if options.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name:36} {value:>12,.4f}")


if __name__ == "__main__":
    main()
