"""Serving and its end: nothing further is taken up, what runs is drained or cut short, and the store closes last."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import anyio
import pytest

from ditto import Graph, Runtime, StepContext, Waiting
from tests.engine.scene import Gate, World, events, opened, states, status, story, told, wait_until

pytestmark = pytest.mark.asyncio


async def interrupt(path: Path, graph: Graph, *run_ids: str) -> None:
    """Leave runs that nobody drives, and that have made one step."""
    async with opened(path) as runtime:
        for run_id in run_ids:
            assert isinstance(await runtime.run(graph, id=run_id, on_wait="return"), Waiting)
            await runtime.signal(run_id, "go")


async def test_d08_what_is_under_way_is_drained_before_the_store_closes(
    store_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    world, gate = World(), Gate()

    async def act(ctx: StepContext) -> str:
        await gate.pause()
        return world.act(ctx)

    graph = Graph("g").wait("go").step("a", act, after=("go",), effect="write").step("b", world.act, after=("a",))
    await interrupt(store_path, graph, "r-1", "r-2", "r-3")
    async with opened(store_path, workflows=[graph], concurrency=2) as runtime, opened(store_path) as outsider:
        serving = asyncio.create_task(runtime.serve())
        await wait_until(lambda: gate.count == 2)
        before = await story(outsider, "r-3")
        closing = asyncio.create_task(runtime.close())
        await asyncio.sleep(0)
        gate.open()
        await asyncio.gather(closing, serving)
        for run_id in ("r-1", "r-2"):
            assert await status(outsider, run_id) == "interrupted"
            assert await states(outsider, run_id) == {"go": "completed", "a": "completed"}
        assert await story(outsider, "r-3") == before
    assert world.effects == {"r-1/1/a": 1, "r-2/1/a": 1}
    assert "closed" not in caplog.text
    assert [record.message for record in caplog.records if record.name == "ditto.engine"] == [
        "run r-1: taken up, graph g",
        "run r-2: taken up, graph g",
        "run r-1: interrupted",
        "run r-2: interrupted",
    ]
    async with opened(store_path, workflows=[graph]) as runtime:
        assert [each.status for each in await runtime.recover()] == ["completed"] * 3
    assert set(world.effects.values()) == {1}


async def test_what_does_not_end_in_time_is_cut_short_and_let_go(
    store_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate()

    async def hang() -> None:
        gate.count += 1
        await asyncio.Event().wait()

    put = Graph("put").wait("go").step("a", hang, after=("go",))
    send = Graph("send").wait("go").step("a", hang, after=("go",), effect="write")
    await interrupt(store_path, put, "put")
    await interrupt(store_path, send, "send")
    async with opened(store_path, workflows=[put, send], grace_s=0) as runtime, opened(store_path) as outsider:
        serving = asyncio.create_task(runtime.serve())
        await wait_until(lambda: gate.count == 2)
        await runtime.close()
        await serving
        assert await status(outsider, "put") == "interrupted"
        assert await status(outsider, "send") == "unknown"
        assert await states(outsider, "send") == {"go": "completed", "a": "unknown"}
    assert "not ended in time, and cut short: put, send" in caplog.text
    assert "closed" not in caplog.text


async def test_it_tells_how_each_run_ended(store_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ditto.engine")

    def fail() -> None:
        raise ValueError("broken")

    done = Graph("done").wait("go")
    waits = Graph("waits").wait("go").wait("again", after=("go",))
    fails = Graph("fails").wait("go").step("a", fail, after=("go",))
    for graph in (done, waits, fails):
        await interrupt(store_path, graph, graph.name)
    async with opened(store_path, workflows=[done, waits, fails], concurrency=1) as runtime:
        serving = asyncio.create_task(runtime.serve())
        await told(runtime, "fails", "run_failed")
        await runtime.close()
        await serving
    ended = [record.message for record in caplog.records if "taken up" not in record.message]
    assert ended == ["run done: completed", "run waits: waiting", "run fails: failed: step a: broken"]


async def read(runtime: Runtime, run_id: str, after: int = 0) -> list[str]:
    return [event.kind async for event in runtime.events(run_id, after, follow=True)]


async def test_followed_events_come_in_order_once_until_the_run_is_closed(
    store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ditto.engine.asking.EVENTS_PAGE", 3)
    graph = Graph("g")
    for number in range(7):
        graph = graph.step(f"a{number}", lambda: 1)
    graph = graph.wait("go", after=tuple(graph.nodes))
    numbers: list[int] = []
    waits = anyio.Event()

    async def follow(reader: Runtime) -> None:
        async for event in reader.events("r", follow=True):
            numbers.append(event.number)
            if event.kind == "run_waiting":
                waits.set()

    async with opened(store_path) as runtime, opened(store_path) as reader:
        await runtime.run(graph, id="r", on_wait="return")
        following = asyncio.create_task(follow(reader))
        await waits.wait()
        assert not following.done()
        with closing(sqlite3.connect(store_path, isolation_level=None)) as db:
            [busy, *_] = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            assert busy == 0, "whoever follows holds no snapshot"
        await runtime.signal("r", "go")
        await runtime.run(graph, id="r")
        await following
        assert numbers == list(range(1, len(await events(runtime, "r")) + 1))
        kinds = await read(reader, "r")
        assert kinds[-1] == "run_completed"
        assert await read(reader, "r", len(numbers) - 1) == ["run_completed"]
        assert await read(reader, "r", len(numbers)) == []
        assert await read(reader, "r", 1_000) == []


async def test_following_stays_with_the_generation_it_began_with(store_path: Path) -> None:
    graph = Graph("g").wait("go")
    first = anyio.Event()

    async def follow(runtime: Runtime) -> list[Any]:
        found = []
        async for event in runtime.events("r", follow=True):
            found.append((event.kind, event.body))
            first.set()
        return found

    async with opened(store_path) as runtime, opened(store_path) as reader:
        await runtime.run(graph, id="r", on_wait="return")
        following = asyncio.create_task(follow(reader))
        await first.wait()
        await runtime.cancel("r", actor="kim", reason="x")
        await runtime.run(graph, id="r", on_wait="return", on_finished="new")
        found = await following
    assert found[0] == ("run_created", {"workflow": "g", "generation": 1})
    assert found[-1] == ("run_cancelled", {"actor": "kim", "reason": "x"})
    assert [kind for kind, _ in found].count("run_created") == 1
