"""Parked runs cost a row each: a runtime beside thousands of them does what it does beside a few.

What is counted is SQLite's own work, in hundreds of instructions of its virtual machine, on every connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from ditto import Graph, Runtime, create_ditto
from ditto.engine import serving
from ditto.store import committer, reader
from ditto.store.connection import connect
from tests.engine.scene import status, wait_until

pytestmark = pytest.mark.asyncio

FEW, MANY = 20, 2_000

PARKED = Graph("parked").wait("paid").sleep("pause", 3600, after=("paid",))


@contextmanager
def work_counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Counts the work of every connection that is opened inside."""
    counted = [0]

    def count() -> int:
        counted[0] += 1
        return 0

    def connect_counted(*arguments: Any, **options: Any) -> Any:
        opened = connect(*arguments, **options)
        opened.set_progress_handler(count, 100)
        return opened

    with monkeypatch.context() as patched:
        patched.setattr(reader, "connect", connect_counted)
        patched.setattr(committer, "connect", connect_counted)
        yield counted


async def park(path: Path, number: int) -> None:
    async with create_ditto(store=path, workflows=[PARKED]) as runtime:
        for first in range(0, number, 500):
            async with anyio.create_task_group() as tasks:
                for at in range(first, min(first + 500, number)):
                    tasks.start_soon(partial(runtime.run, PARKED, id=f"run-{at}", on_wait="return"))


async def serve_and_wake_one(path: Path, looks: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The work of opening a runtime, of some looks of `serve`, and of waking one run."""
    monkeypatch.setattr(serving, "LOOK_S", 0.01)
    looked = 0
    original = serving.Serving._end_due_waits

    async def counting(self: serving.Serving) -> None:
        nonlocal looked
        looked += 1
        await original(self)

    monkeypatch.setattr(serving.Serving, "_end_due_waits", counting)
    work: dict[str, int] = {}
    with work_counted(monkeypatch) as counted:
        async with create_ditto(store=path, workflows=[PARKED]) as runtime:
            work["open"], tasks_before = counted[0], len(asyncio.all_tasks())
            served = asyncio.create_task(runtime.serve())
            await wait_until(lambda: looked >= looks)
            work["looks"] = counted[0] - work["open"]
            assert len(asyncio.all_tasks()) <= tasks_before + 2
            before = counted[0]
            await runtime.signal("run-7", "paid", {"amount": 1})
            await woken(runtime, "run-7")
            work["wake"] = counted[0] - before
            assert await status(runtime, "run-7") == "waiting"
            assert [event.kind async for event in runtime.events("run-8")][-1] == "run_waiting"
            served.cancel()
            await asyncio.wait([served])
    return work


async def woken(runtime: Runtime, run_id: str) -> None:
    """Return when the run waits again, for its timer."""
    for _ in range(10_000):
        if (
            any(step.path == "pause" for step in (await runtime.get(run_id)).steps)
            and await status(runtime, run_id) == "waiting"
        ):
            return
        await anyio.sleep(0.01)
    pytest.fail("the run was not woken")


async def test_a_runtime_beside_many_parked_runs_does_what_it_does_beside_a_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = []
    for number in (FEW, MANY):
        path = tmp_path / f"{number}.db"
        await park(path, number)
        with monkeypatch.context() as patched:
            work.append(await serve_and_wake_one(path, 5, patched))
    few, many = work
    # Deeper B-trees cost a little; one look at each row would cost a hundred times as much.
    assert many["open"] <= 2 * few["open"] + 5
    assert many["looks"] <= 2 * few["looks"] + 5
