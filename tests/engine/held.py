"""An application that is served in a process of its own, and whose handlers say that they have begun:
`--app tests.engine.held:create`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import anyio

from ditto import Config, Graph, Runtime, StepContext, create_ditto
from ditto.config import RuntimeConfig
from ditto.engine import serving

EFFECTS = Path("effects.txt")


def _say(text: str) -> None:
    """A line in one piece, whoever else writes."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _hold(ctx: StepContext) -> str:
    """Goes on when a byte comes."""
    _say(f"holds {ctx.run_id}")
    os.read(0, 1)
    with EFFECTS.open("a", encoding="utf-8") as file:
        file.write(f"{ctx.key}\n")
    return "held"


async def _hang() -> None:
    _say("hangs")
    await anyio.sleep_forever()


async def _ignore() -> None:
    _say("hangs")
    while True:
        try:
            await anyio.sleep_forever()
        except anyio.get_cancelled_exc_class():
            continue


HELD = (
    Graph("held")
    .wait("go")
    .step("hold", _hold, after=("go",), effect="write")
    .step("after", lambda hold: hold, after=("hold",))
)
HANGS = Graph("hangs").wait("go").step("hang", _hang, after=("go",))
IGNORES = Graph("ignores").wait("go").step("ignore", _ignore, after=("go",))


def create(store: Path | str = "ditto.db") -> Runtime:
    """Two runs at a time, and time enough to end."""
    return _create(store, 60.0)


def create_short(store: Path | str = "ditto.db") -> Runtime:
    """No time to end."""
    return _create(store, 0.0)


def create_impatient(store: Path | str = "ditto.db") -> Runtime:
    """No time to end, and hardly any to be cut short: a handler that ignores its end is waited for no longer."""
    vars(serving)["STOP_S"] = 0.05
    return _create(store, 0.0)


def _create(store: Path | str, grace_s: float) -> Runtime:
    config = Config(runtime=RuntimeConfig(concurrency=2, grace_s=grace_s))
    return create_ditto(config, store=store, workflows=[HELD, HANGS, IGNORES])


async def leave(graph: Graph, *run_ids: str) -> None:
    """Leave runs that nobody drives, on the store in the current folder."""
    async with create() as runtime:
        for run_id in run_ids:
            await runtime.run(graph, id=run_id, on_wait="return")
            await runtime.signal(run_id, "go")
