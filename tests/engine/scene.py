"""Runtimes on real files, and what they say of a run."""

from __future__ import annotations

import asyncio
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterable, Mapping
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any, Final

from ditto import Config, Flow, Graph, Loop, RunNotFoundError, Runtime, StepContext, Worker, create_ditto
from ditto.clock import Clock
from ditto.config import RuntimeConfig
from ditto.runs import EventInfo

HANGS_S: Final = 60
"""A test that takes longer waits for something that does not come."""


@asynccontextmanager
async def opened(
    path: Path,
    *,
    workers: Iterable[Worker] = (),
    workflows: Iterable[Graph | Loop | Flow] = (),
    clock: Clock | None = None,
    **settings: Any,
) -> AsyncIterator[Runtime]:
    """A runtime with these `runtime` settings, closed afterwards."""
    config = Config(runtime=RuntimeConfig(**{"grace_s": 5.0, **settings}))
    runtime = create_ditto(config, store=path, workers=workers, workflows=workflows, clock=clock)
    async with asyncio.timeout(HANGS_S), runtime:
        yield runtime


async def events(runtime: Runtime, run_id: str) -> list[EventInfo]:
    """A run's history."""
    return [event async for event in runtime.events(run_id)]


async def story(runtime: Runtime, run_id: str) -> list[str]:
    """A run's history in words: `run_created`, `step_completed a`."""
    return [
        event.kind if event.step is None else f"{event.kind} {event.step}" for event in await events(runtime, run_id)
    ]


async def states(runtime: Runtime, run_id: str) -> dict[str, str]:
    """The state of each step that has a record."""
    return {step.path: step.state for step in (await runtime.get(run_id)).steps}


async def status(runtime: Runtime, run_id: str) -> str:
    """A run's status."""
    return (await runtime.get(run_id)).status


def on_disk(path: Path, run_id: str) -> dict[str, str]:
    """Step states as another process sees them: what is committed, and nothing else."""
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:
        return dict(
            db.execute(
                "SELECT s.path, s.state FROM ditto_steps s JOIN ditto_runs r ON s.run = r.id WHERE r.run_id = ?",
                (run_id,),
            ).fetchall()
        )


async def wait_until(seen: Callable[[], bool]) -> None:
    """Return when something outside this process's event loop has come about."""
    while not seen():  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(0.001)


async def told(runtime: Runtime, run_id: str, kind: str) -> None:
    """Return when the run's history has an event of that kind."""
    while True:
        with suppress(RunNotFoundError):
            if kind in [event.kind for event in await events(runtime, run_id)]:
                return
        await asyncio.sleep(0.001)


class MovedClock(Clock):
    """The clock of the record, moved by hand."""

    def __init__(self, at: int = 1_000_000_000_000_000) -> None:
        self.at = at
        self.asked = 0
        """How often anybody has looked at it."""

    def now_us(self) -> int:
        self.asked += 1
        return self.at

    def move(self, seconds: float) -> None:
        """So much later, or earlier."""
        self.at += round(seconds * 1_000_000)

    async def looked_at(self, times: int = 20) -> None:
        """Return when it has been looked at so often again: whoever waits for it has seen what it says now."""
        until = self.asked + times
        while self.asked < until:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0)


class World:
    """What is outside: it counts what is done to it, by key, and can be made to fail in stated ways."""

    def __init__(self) -> None:
        self.effects: Counter[str] = Counter()

    def act(self, ctx: StepContext) -> str:
        """Do something under the step's key."""
        self.effects[ctx.key] += 1
        return f"done {ctx.key}"

    @property
    def total(self) -> int:
        """How often anything was done."""
        return self.effects.total()


class AtWait:
    """Awaits a coroutine, and does something when it waits for the n-th time."""

    def __init__(self, work: Coroutine[Any, Any, Any], acts: Mapping[int, Callable[[], Any]]) -> None:
        self._work = work
        self._acts = acts
        self.count = 0
        """How often it has waited."""

    def __await__(self) -> Generator[Any, Any, Any]:
        thrown: BaseException | None = None
        while True:
            try:
                pending = self._work.send(None) if thrown is None else self._work.throw(thrown)
            except StopIteration as end:
                return end.value
            self.count += 1
            self._acts.get(self.count, lambda: None)()
            thrown = None
            try:
                yield pending
            except BaseException as error:  # noqa: BLE001 - handed on to the coroutine, whatever it is
                thrown = error


class Gate:
    """A handler stops here: the test waits until it has come, and lets it go on."""

    def __init__(self) -> None:
        self._came = asyncio.Event()
        self._go = asyncio.Event()
        self.count = 0

    async def pause(self) -> None:
        """Called by the handler."""
        self.count += 1
        self._came.set()
        await self._go.wait()

    async def came(self) -> None:
        """Return when a handler is there."""
        await self._came.wait()

    def open(self) -> None:
        """Let all go on, now and later."""
        self._go.set()


class LoopClock:
    """The running loop's own clock, by which timers go; the test moves it on."""

    def __init__(self) -> None:
        loop, self._skipped = asyncio.get_running_loop(), 0.0
        really = loop.time
        loop.time = lambda: really() + self._skipped  # type: ignore[method-assign]

    def skip(self, seconds: float) -> None:
        """What is due by then is done in the loop's next round."""
        self._skipped += seconds
