"""KeyboardInterrupt and SystemExit from a handler end the process, and leave a run that a later process takes up."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from ditto import Graph, UnknownOutcomeError
from tests.engine.scene import opened, states, status


async def run(path: Path, graph: Graph) -> Any:
    async with opened(path) as runtime:
        return await runtime.run(graph, id="x")


async def look(path: Path) -> tuple[str, dict[str, str]]:
    async with opened(path) as runtime:
        return await status(runtime, "x"), await states(runtime, "x")


@pytest.mark.parametrize("raised", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("branches", [1, 2])
@pytest.mark.parametrize("effect", ["idempotent", "write"])
def test_the_run_is_let_go(store_path: Path, raised: type[BaseException], branches: int, effect: str) -> None:
    ended = False
    begun = asyncio.Event()

    async def end() -> str:
        if not ended:
            if branches == 2:
                await begun.wait()
            raise raised
        return "done"

    async def other() -> str:
        if not ended:
            begun.set()
            await asyncio.Event().wait()
        return "done"

    graph = Graph("g").step("first", lambda: 1).step("end", end, after=("first",), effect=effect)
    if branches == 2:
        graph = graph.step("other", other, after=("first",))
    with pytest.raises(raised):
        asyncio.run(run(store_path, graph))
    ended = True
    if effect == "write":
        assert asyncio.run(look(store_path)) == ("unknown", {"first": "completed", "end": "admitted"})
        with pytest.raises(UnknownOutcomeError):
            asyncio.run(run(store_path, graph))
    else:
        assert asyncio.run(look(store_path)) == ("interrupted", {"first": "completed"})
        assert asyncio.run(run(store_path, graph))["end"] == "done"


def test_the_interrupt_of_a_person_is_a_cancellation(store_path: Path) -> None:
    """asyncio.run turns Ctrl-C into the cancellation of its main task."""

    async def interrupted() -> None:
        main = asyncio.current_task()
        assert main is not None

        async def press() -> None:
            main.cancel()
            await asyncio.Event().wait()

        await run(store_path, Graph("g").step("first", lambda: 1).step("second", press, after=("first",)))

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(interrupted())
    assert asyncio.run(look(store_path)) == ("interrupted", {"first": "completed"})
