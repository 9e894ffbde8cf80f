"""Random lives of random runs: cancelled, closed, paused, failing, on a store that fails; record and world agree.

Each seed makes a graph and a series of lives, one runtime after another, until the run is closed. A failing seed is
named in the message; `SEED=… pytest tests/engine/test_lives.py -k replay` plays it again.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import pytest

from ditto import (
    Absent,
    Committed,
    EffectNotMade,
    EffectRejected,
    Graph,
    LookupResult,
    Pending,
    Retry,
    RunCancelledError,
    RunNotFoundError,
    RunPausedError,
    Runtime,
    StepContext,
    StepError,
    StoreError,
    TransitionRefusedError,
    UnknownOutcomeError,
    Worker,
)
from tests.engine.scene import events, on_disk, opened
from tests.store.faults import FULL, IO, LOCKED, Faults

LIVES_MAX = 60
CALM_AFTER = 40
"""Lives after which nothing bad happens any more: the run must come to its end."""

EFFECTS = ["pure", "read", "idempotent", "write", "infer"]


@dataclass
class Fate:
    """What happens in one seed: decided anew for each attempt, from one source of chance."""

    chance: random.Random
    path: Path
    acts: Counter[str] = field(default_factory=Counter)
    wrongs: list[str] = field(default_factory=list)
    """What must never happen, and did."""
    graph: Graph = field(default_factory=lambda: Graph("g"))
    calm: bool = False

    def trouble(self, likelihood: float) -> bool:
        return not self.calm and self.chance.random() < likelihood

    def act(self, ctx: StepContext, effect: str) -> str:
        """Change the world. It is checked here that the causes are on disk."""
        if effect in ("idempotent", "write"):
            disk = on_disk(self.path, "x")
            for parent in self.graph.nodes[ctx.path].after:
                if disk.get(parent) not in ("completed", "skipped"):
                    self.wrongs.append(f"{ctx.path} began before {parent} was on disk")
        self.acts[ctx.key] += 1
        if effect == "write" and self.acts[ctx.key] > 1:
            self.wrongs.append(f"{ctx.key} was done twice")
        return f"done {ctx.key}"

    def handler(self, effect: str) -> Any:
        async def handle(ctx: StepContext) -> str:
            await self.dawdle()
            if self.trouble(0.06):
                raise EffectNotMade("not yet")
            if self.trouble(0.06):
                raise ConnectionError("lost before")
            if self.trouble(0.01):
                raise EffectRejected("no")
            done = self.act(ctx, effect)
            try:
                await self.dawdle()
            except asyncio.CancelledError:
                if self.trouble(0.3):
                    return done  # a handler that swallows it
                raise
            if self.trouble(0.06):
                raise ConnectionError("lost after")
            if self.trouble(0.02):
                raise asyncio.CancelledError("stray")
            return done

        return handle

    def plain_handler(self, effect: str) -> Any:
        def handle(ctx: StepContext) -> str:
            done = self.act(ctx, effect)
            if self.trouble(0.06):
                raise ConnectionError("lost after")
            return done

        return handle

    async def dawdle(self) -> None:
        for _ in range(self.chance.randrange(4)):
            await asyncio.sleep(0)
        if self.trouble(0.05):
            await asyncio.sleep(0.004)

    def find(self, key: str, arguments: Any, ctx: StepContext) -> LookupResult:
        if self.trouble(0.2):
            return Pending()
        if self.trouble(0.1):
            raise OSError("no route")
        return Committed(f"done {key}") if self.acts[key] else Absent()

    async def find_async(self, key: str, arguments: Any, ctx: StepContext) -> LookupResult:
        await self.dawdle()
        return self.find(key, arguments, ctx)

    def make_graph(self) -> None:
        """Nodes of all classes, plain steps and workers' nodes, with conditions, retries and deadlines."""
        graph, chance = Graph("g"), self.chance
        for number in range(chance.randrange(1, 12)):
            name = f"n{number}"
            after = tuple(f"n{parent}" for parent in chance.sample(range(number), min(number, chance.randrange(3))))
            effect = chance.choice(EFFECTS)
            options: dict[str, Any] = {"after": after}
            if chance.random() < 0.15:
                options["when"] = lambda input: False
            if chance.random() < 0.4:
                options["retry"] = Retry(3, initial_s=0.001)
            if chance.random() < 0.3:
                options["timeout_s"] = 0.003 if chance.random() < 0.3 else 1_000
            if effect == "write" and chance.random() < 0.7:
                graph = graph.node(name, chance.choice(["W.SEND", "W.TELL"]), **options)
            else:
                plain = effect in ("read", "idempotent") and chance.random() < 0.3
                made = self.plain_handler(effect) if plain else self.handler(effect)
                graph = graph.step(name, made, effect=effect, **options)
        self.graph = graph

    def worker(self) -> Worker:
        handle = self.handler("write")

        async def send(arguments: Any, ctx: StepContext) -> str:
            done: str = await handle(ctx)
            return done

        return (
            Worker("W", concurrency=2)
            .node("W.SEND", send, effect="write", lookup=self.find_async, absence_is_final=True)
            .node("W.TELL", send, effect="write", lookup=self.find)
        )

    # One life

    async def live(self, runtime: Runtime) -> Any:
        """Drive the run until something happens to it. Returns its result, or what it raised."""
        on_finished: Any = self.chance.choice(["return", "reopen", "reopen"])
        task = asyncio.create_task(self.drive(runtime, on_finished))
        if self.trouble(0.6):
            for _ in range(self.chance.randrange(60)):
                await asyncio.sleep(0)
            match self.chance.randrange(4):
                case 0:
                    task.cancel()
                case 1:
                    await runtime.close()
                case 2:
                    if self.trouble(0.05):
                        with suppress(RunNotFoundError, StoreError, TransitionRefusedError):
                            await runtime.cancel("x")
                case 3:
                    async with opened(self.path) as other:
                        with suppress(RunNotFoundError, StoreError, TransitionRefusedError):
                            await self.chance.choice([runtime, other]).pause("x")
        await asyncio.wait([task])
        return asyncio.CancelledError() if task.cancelled() else task.exception() or task.result()

    async def drive(self, runtime: Runtime, on_finished: Any) -> Any:
        if not self.trouble(0.3):
            return await self.run_or_resume(runtime, on_finished)
        with anyio.move_on_after(self.chance.random() * 0.02):
            return await self.run_or_resume(runtime, on_finished)
        raise asyncio.CancelledError

    async def run_or_resume(self, runtime: Runtime, on_finished: Any) -> Any:
        concurrency = self.chance.choice([1, 2, 16])
        try:
            return await runtime.run(self.graph, id="x", on_finished=on_finished, concurrency=concurrency)
        except RunPausedError:
            if self.trouble(0.4):
                raise
            return await runtime.resume("x")

    def check_outcome(self, outcome: Any) -> None:
        allowed = (StepError, UnknownOutcomeError, StoreError, RunCancelledError, RunPausedError)
        if isinstance(outcome, BaseException) and not isinstance(outcome, (*allowed, asyncio.CancelledError)):
            raise outcome

    async def examine(self, runtime: Runtime, outcome: Any) -> bool:
        """Whether the run has come to its end; and that what is recorded makes sense."""
        try:
            info = await runtime.get("x")
        except RunNotFoundError:
            return False
        lost = [step.path for step in info.steps if step.state in ("admitted", "unknown")]
        states = {step.path: step.state for step in info.steps}
        assert info.status in ("completed", "failed", "unknown", "interrupted", "cancelled", "paused")
        if lost and info.status not in ("cancelled", "paused"):
            assert info.status == "unknown", (info.status, states)
        if info.status == "unknown":
            assert lost
        if info.status == "completed":
            assert set(states) == set(self.graph.nodes)
            assert set(states.values()) <= {"completed", "skipped"}
            for step in info.steps:
                if step.state == "completed":
                    assert step.output == f"done x/1/{step.path}"
        if isinstance(outcome, dict):
            assert info.status == "completed"
            assert list(outcome) == list(self.graph.nodes)
        told = await events(runtime, "x")
        assert [event.number for event in told] == list(range(1, len(told) + 1))
        completed = Counter(event.step for event in told if event.kind == "step_completed")
        assert all(count == 1 for count in completed.values()), completed
        paused = False
        for event in told:
            paused = event.kind == "run_paused" or (paused and event.kind not in ("run_resumed", "run_reopened"))
            assert not (paused and event.kind == "step_admitted"), "admitted while it was paused"
        for path in lost:
            # A person looks into the world, once everything that was begun has ended.
            if self.calm or self.chance.random() < 0.3:
                await self.decide(runtime, path, info.status)
        final = any(step.state == "failed" and is_final(step.error) for step in info.steps)
        return info.status in ("completed", "cancelled") or (info.status == "failed" and final)

    async def decide(self, runtime: Runtime, path: str, status: str) -> None:
        if status == "cancelled":
            return
        infer = str(self.graph.nodes[path].effect) == "infer"
        key = f"x/1/{path}"
        decision: dict[str, Any]
        if infer:
            decision = {"response": f"done {key}"} if self.acts[key] else {"ask_again": True}
        else:
            decision = {"committed": f"done {key}"} if self.acts[key] else {"absent": True}
        await runtime.resolve("x", path, actor="mia", reason="seen", **decision)


def is_final(error: StepError | None) -> bool:
    return isinstance(error, EffectRejected)


async def play(path: Path, seed: int, faults: Faults) -> None:
    fate = Fate(random.Random(seed), path)
    fate.make_graph()
    for life in range(LIVES_MAX):
        fate.calm = life >= CALM_AFTER
        async with opened(path, workers=[fate.worker()], workflows=[fate.graph], threads=2) as runtime:
            await runtime.runs()
            if fate.trouble(0.3):
                faults.arm(fate.chance.choice([FULL, IO, LOCKED]), fate.chance.randrange(1, 60))
            outcome = await fate.live(runtime)
            faults.disarm()
        fate.check_outcome(outcome)
        async with opened(path, workers=[fate.worker()]) as runtime:
            if await fate.examine(runtime, outcome):
                break
    else:
        pytest.fail("the run never came to its end")
    assert fate.wrongs == []


async def play_seeds(folder: Path, seeds: range, faults: Faults) -> None:
    for seed in seeds:
        try:
            await play(folder / f"{seed}.db", seed, faults)
        except BaseException as error:
            error.add_note(f"seed {seed}: SEED={seed} pytest tests/engine/test_lives.py -k replay")
            raise


@pytest.mark.asyncio
async def test_the_record_and_the_world_agree(tmp_path: Path, faults: Faults) -> None:
    await play_seeds(tmp_path, range(15), faults)


@pytest.mark.sweep
@pytest.mark.asyncio
@pytest.mark.parametrize("first", range(15, 515, 50))
async def test_the_record_and_the_world_agree_in_many_lives(tmp_path: Path, faults: Faults, first: int) -> None:
    await play_seeds(tmp_path, range(first, first + 50), faults)


@pytest.mark.skipif("SEED" not in os.environ, reason="SEED names the seed to be played again")
@pytest.mark.asyncio
async def test_replay(tmp_path: Path, faults: Faults) -> None:
    await play_seeds(tmp_path, range(int(os.environ["SEED"]), int(os.environ["SEED"]) + 1), faults)
