"""A runtime that lost a run, or its event loop, in mid-run: it writes nothing more, and says so."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ditto import (
    Graph,
    RunBusyError,
    Runtime,
    StepContext,
    StoreClosedError,
    TransitionRefusedError,
    UnknownOutcomeError,
    create_ditto,
)
from ditto.engine.drive import Drive
from ditto.store.committer import Committer
from tests.engine.scene import Gate, World, events, opened, states, status, story, wait_until


def forget_owners(path: Path) -> None:
    """Make every owner look dead, as a person does who clears the folder away."""
    for file in path.with_name(path.name + ".owners").iterdir():
        file.unlink()


@pytest.mark.asyncio
@pytest.mark.parametrize("effect", ["read", "idempotent", "write"])
@pytest.mark.parametrize("branches", [1, 2])
async def test_a_run_that_was_taken_over_is_left_to_its_new_owner(
    store_path: Path, world: World, effect: str, branches: int
) -> None:
    gates = [Gate(), Gate()]
    calls = 0

    async def act(ctx: StepContext) -> str:
        nonlocal calls
        mine, calls = calls, calls + 1
        await gates[min(mine // branches, 1)].pause()
        return world.act(ctx)

    graph = Graph("g").step("a", act, effect=effect)
    if branches == 2:
        graph = graph.step("b", act, effect=effect)
    graph = graph.step("next", world.act, after=("a",))
    async with opened(store_path) as first, opened(store_path) as second:
        run = asyncio.create_task(first.run(graph, id="x"))
        await gates[0].came()
        await wait_until(lambda: calls == branches)
        forget_owners(store_path)
        gates[1].open()
        if effect == "write":
            with pytest.raises(UnknownOutcomeError):
                await second.run(graph, id="x")
        else:
            assert (await second.run(graph, id="x"))["a"] == "done x/1/a"
        before = await status(second, "x")
        gates[0].open()
        with pytest.raises(RunBusyError, match="run x was taken over by another runtime"):
            await run
        assert await status(second, "x") == before
        late = [event for event in await events(second, "x") if event.kind == "step_returned_late"]
        if effect != "read":
            assert {event.step for event in late} >= {"a"}
        told = await events(second, "x")
        assert [event.number for event in told] == list(range(1, len(told) + 1))
        if effect == "write":
            await second.resolve("x", "a", actor="mia", reason="it returned late", committed="done x/1/a")


@pytest.mark.asyncio
@pytest.mark.parametrize("point", ["admitted", "completed"])
@pytest.mark.parametrize("times", [1, 2])
async def test_a_cancellation_that_comes_with_a_commit(
    store_path: Path, world: World, monkeypatch: pytest.MonkeyPatch, point: str, times: int
) -> None:
    """Whatever is being made durable is durable; what was admitted and not attempted is known not to have happened."""
    loop = asyncio.get_running_loop()
    task: asyncio.Task[Any] | None = None

    def cancel_before(passed: str) -> None:
        if passed == f"g/a:{point}:before":
            asked = threading.Event()

            def cancel() -> None:
                assert task is not None
                for _ in range(times):
                    task.cancel()
                asked.set()

            loop.call_soon_threadsafe(cancel)
            asked.wait()

    graph = Graph("g").step("a", world.act, effect="write").step("next", world.act, after=("a",))
    async with opened(store_path) as runtime:
        monkeypatch.setattr(Committer, "probe", staticmethod(cancel_before))
        task = asyncio.create_task(runtime.run(graph, id="x"))
        with pytest.raises(asyncio.CancelledError):
            await task
        monkeypatch.setattr(Committer, "probe", None)
        assert await states(runtime, "x") == {"a": "refused" if point == "admitted" else "completed"}
        assert await status(runtime, "x") == "interrupted"
        assert world.total == (0 if point == "admitted" else 1)
        assert len(await runtime.run(graph, id="x")) == 2
    assert world.effects == {"x/1/a": 1, "x/1/next": 1}


@pytest.mark.asyncio
async def test_a_cancellation_that_comes_with_the_last_commit_finds_the_run_completed(
    store_path: Path, world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loop = asyncio.get_running_loop()
    task: asyncio.Task[Any] | None = None

    def cancel_before(passed: str) -> None:
        if passed == "g:completed:before":
            asked = threading.Event()

            def cancel() -> None:
                assert task is not None
                task.cancel()
                asked.set()

            loop.call_soon_threadsafe(cancel)
            asked.wait()

    async with opened(store_path) as runtime:
        monkeypatch.setattr(Committer, "probe", staticmethod(cancel_before))
        task = asyncio.create_task(runtime.run(Graph("g").step("a", world.act), id="x"))
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await status(runtime, "x") == "completed"
        assert (await story(runtime, "x"))[-1] == "run_completed"
    assert not caplog.records


def test_a_runtime_belongs_to_one_event_loop(store_path: Path) -> None:
    runtime = create_ditto(store=store_path)
    asyncio.run(use(runtime))
    with pytest.raises(StoreClosedError, match="belongs to another event loop"):
        asyncio.run(use(runtime))
    asyncio.run(runtime.close())
    asyncio.run(use_another(store_path))


async def use(runtime: Runtime) -> None:
    assert await runtime.run(Graph("g").step("a", lambda: 1, effect="pure"), id="x") == {"a": 1}


async def use_another(path: Path) -> None:
    async with opened(path) as runtime:
        await use(runtime)


@pytest.mark.asyncio
async def test_a_handler_that_closes_its_own_runtime_waits_for_the_grace_only(store_path: Path) -> None:
    closing: list[Callable[[], Any]] = []

    async def close() -> None:
        await closing[0]()

    async with opened(store_path, grace_s=0) as runtime:
        closing.append(runtime.close)
        with pytest.raises(StoreClosedError):
            await runtime.run(Graph("g").step("a", close), id="x")
    async with opened(store_path) as runtime:
        assert await status(runtime, "x") == "interrupted"


@pytest.mark.asyncio
async def test_a_run_that_we_have_just_let_go_of_was_not_taken_over(store_path: Path) -> None:
    """Another process writes, and we look, after our end is on disk and before we were told so."""
    driven: list[Drive] = []
    async with opened(store_path) as runtime:

        def note() -> int:
            assert runtime._opened is not None
            driven.extend(runtime._opened.engine.drives.values())
            return 1

        await runtime.run(Graph("g").step("a", note, effect="idempotent"), id="x")
        refused = TransitionRefusedError("drive", "the run is not ours any more", run_id="x")
        assert await driven[0].explain(refused) is refused
