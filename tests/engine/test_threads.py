"""Plain functions run in threads of ditto's own: bounded, daemons, with the caller's context; a late return is kept."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ditto import (
    Absent,
    Committed,
    Graph,
    LookupResult,
    Retry,
    StepContext,
    StepError,
    StepTimeoutError,
    StoreClosedError,
    UnknownOutcomeError,
    Worker,
    create_ditto,
)
from ditto.engine.threads import Threads
from tests.engine.scene import World, events, on_disk, opened, states, status, told, wait_until

pytestmark = pytest.mark.asyncio


class Door:
    """A plain handler stops here, in its thread."""

    def __init__(self) -> None:
        self.inside = 0
        self.most = 0
        self.count = 0
        self._lock = threading.Lock()
        self._go = threading.Event()

    def pause(self) -> None:
        """Called by the handler."""
        with self._lock:
            self.inside += 1
            self.count += 1
            self.most = max(self.most, self.inside)
        self._go.wait()
        with self._lock:
            self.inside -= 1

    def open(self) -> None:
        """Let all go on, now and later."""
        self._go.set()


@pytest.fixture
def door() -> Any:
    door = Door()
    yield door
    door.open()


# Where a handler runs


@pytest.mark.parametrize("effect", ["pure", "read", "idempotent", "write", "infer"])
async def test_a_plain_function_runs_in_a_daemon_thread_unless_it_is_pure(store_path: Path, effect: str) -> None:
    async with opened(store_path) as runtime:

        def where() -> list[Any]:
            thread = threading.current_thread()
            return [thread is threading.main_thread(), thread.name, thread.daemon]

        outputs = await runtime.run(Graph("g").step("a", where, effect=effect))
        on_loop, name, daemon = outputs["a"]
        assert on_loop is (effect == "pure")
        if effect != "pure":
            assert name.startswith("ditto-step-")
            assert daemon


async def test_an_async_function_runs_on_the_loop(store_path: Path) -> None:
    async def where() -> bool:
        return threading.current_thread() is threading.main_thread()

    async with opened(store_path) as runtime:
        assert await runtime.run(Graph("g").step("a", where)) == {"a": True}


async def test_a_thread_has_the_callers_context(store_path: Path) -> None:
    tenant: contextvars.ContextVar[str] = contextvars.ContextVar("tenant")

    def who() -> str:
        seen = tenant.get()
        tenant.set("changed in the thread")
        return seen

    async with opened(store_path) as runtime:
        graph = Graph("g").step("a", who).step("b", who, after=("a",)).step("c", who).step("d", who)
        tenant.set("t-a")
        assert await runtime.run(graph) == dict.fromkeys("abcd", "t-a")
        assert tenant.get() == "t-a"


@pytest.mark.parametrize("limit", [1, 3])
async def test_threads_are_bounded(store_path: Path, door: Door, limit: int) -> None:
    graph = Graph("g")
    for number in range(10):
        graph = graph.step(f"n{number}", door.pause, effect="write")
    async with opened(store_path, threads=limit) as runtime:
        run = asyncio.create_task(runtime.run(graph, id="x"))
        await wait_until(lambda: door.inside == limit)
        # What waits for a thread is not admitted yet.
        assert list(on_disk(store_path, "x").values()) == ["admitted"] * limit
        door.open()
        await run
    assert (door.most, door.count) == (limit, 10)


async def test_each_worker_has_threads_of_its_own(store_path: Path, door: Door) -> None:
    workers = [Worker(name).node(f"{name}.ACT", lambda _: door.pause(), effect="read") for name in ("A", "B")]
    graph = Graph("g").node("a", "A.ACT").node("b", "B.ACT").step("c", door.pause)
    async with opened(store_path, workers=workers, threads=1) as runtime:
        run = asyncio.create_task(runtime.run(graph))
        await wait_until(lambda: door.inside == 3)
        door.open()
        await run


async def test_threads_are_reused(store_path: Path) -> None:
    graph = Graph("g").step("n0", lambda: threading.current_thread().name)
    for number in range(1, 20):
        graph = graph.step(f"n{number}", lambda: threading.current_thread().name, after=(f"n{number - 1}",))
    async with opened(store_path) as runtime:
        assert set((await runtime.run(graph)).values()) == {"ditto-step-0"}


# What a thread raises


@pytest.mark.parametrize(
    "error", [StopIteration("x"), asyncio.CancelledError("x"), ValueError("x")], ids=lambda error: type(error).__name__
)
async def test_whatever_a_thread_raises_is_an_error_of_the_step(store_path: Path, error: BaseException) -> None:
    def fail() -> None:
        raise error

    async with opened(store_path) as runtime:
        with pytest.raises(StepError, match=r"the handler raised|x"):
            await runtime.run(Graph("g").step("a", fail))


# Deadlines


@pytest.mark.parametrize("effect", ["read", "idempotent"])
async def test_past_its_deadline_a_repeatable_handler_is_failed(store_path: Path, door: Door, effect: str) -> None:
    async with opened(store_path) as runtime:
        with pytest.raises(StepTimeoutError, match=r"step a missed its deadline of 0\.01 s"):
            await runtime.run(Graph("g").step("a", door.pause, effect=effect, timeout_s=0.01), id="x")
        assert await states(runtime, "x") == {"a": "failed"}
        door.open()


async def test_past_its_deadline_a_write_is_unknown_and_its_return_is_kept_as_late(
    store_path: Path, door: Door, world: World
) -> None:
    def act(ctx: StepContext) -> str:
        door.pause()
        return world.act(ctx)

    graph = Graph("g").step("a", act, effect="write", timeout_s=0.01)
    async with opened(store_path) as runtime:
        with pytest.raises(UnknownOutcomeError, match="missed its deadline"):
            await runtime.run(graph, id="x")
        door.open()
        await told(runtime, "x", "step_returned_late")
        late = [event for event in await events(runtime, "x") if event.kind == "step_returned_late"]
        assert [(event.step, event.body) for event in late] == [("a", {"attempt": 1, "value": '"done x/1/a"'})]
        # It is told, not merged: a person decides.
        assert await states(runtime, "x") == {"a": "unknown"}
        await runtime.resolve("x", "a", actor="mia", reason="it returned late", committed="done x/1/a")
        assert await runtime.run(graph, id="x") == {"a": "done x/1/a"}
    assert world.total == 1


@pytest.mark.parametrize(
    ("ending", "body"),
    [
        (lambda: ["big"], {"value": '["big"]'}),
        (
            lambda: object(),
            {"error": "the late result of step a: is a object, which is not storable; return plain data"},
        ),
    ],
    ids=["a value", "no data"],
)
async def test_what_returns_late_is_recorded_whatever_it_is(
    store_path: Path, door: Door, ending: Callable[[], Any], body: dict[str, Any]
) -> None:
    def act() -> Any:
        door.pause()
        return ending()

    async with opened(store_path) as runtime:
        with pytest.raises(UnknownOutcomeError):
            await runtime.run(Graph("g").step("a", act, effect="write", timeout_s=0.01), id="x")
        door.open()
        await told(runtime, "x", "step_returned_late")
        assert (await events(runtime, "x"))[-1].body == {"attempt": 1, **body}


async def test_what_is_raised_late_is_recorded(store_path: Path, door: Door) -> None:
    def act() -> None:
        door.pause()
        raise ValueError("too late")

    async with opened(store_path) as runtime:
        with pytest.raises(UnknownOutcomeError):
            await runtime.run(Graph("g").step("a", act, effect="write", timeout_s=0.01), id="x")
        door.open()
        await told(runtime, "x", "step_returned_late")
        assert (await events(runtime, "x"))[-1].body == {"attempt": 1, "error": "ValueError: too late"}


async def test_e03_an_idempotent_handler_is_not_begun_again_before_its_thread_has_ended(
    store_path: Path, door: Door, world: World
) -> None:
    def act(ctx: StepContext) -> str:
        door.pause()
        return world.act(ctx)

    graph = Graph("g").step("a", act, timeout_s=0.05, retry=Retry(2, initial_s=0))
    async with opened(store_path) as runtime:
        run = asyncio.create_task(runtime.run(graph, id="x"))
        await told(runtime, "x", "step_retrying")
        assert door.count == 1
        door.open()
        assert await run == {"a": "done x/1/a"}
        bodies = {event.kind: event.body for event in await events(runtime, "x")}
        assert bodies["step_returned_late"] == {"attempt": 1, "value": '"done x/1/a"'}
    assert door.most == 1
    assert world.effects == {"x/1/a": 2}


@pytest.mark.parametrize("what", ["its own thread", "any thread"])
async def test_waiting_for_a_thread_ends_when_another_step_fails(store_path: Path, door: Door, what: str) -> None:
    async def fail() -> None:
        await wait_until(lambda: door.inside == 1)
        await told(runtime, "x", "step_retrying" if what == "its own thread" else "run_created")
        raise ValueError("first")

    graph = Graph("g").step("a", door.pause, timeout_s=0.02, retry=Retry(2, initial_s=0))
    if what == "any thread":
        graph = Graph("g").step("a", door.pause, timeout_s=0.02).step("b", door.pause, effect="write")
    async with opened(store_path, threads=1) as runtime:
        with pytest.raises(StepError):
            await runtime.run(graph.step("fail", fail), id="x")
        assert await status(runtime, "x") == "failed"
        assert "b" not in await states(runtime, "x")
        door.open()
    assert door.count == 1


async def test_a_read_may_be_tried_again_at_once(store_path: Path, door: Door) -> None:
    def read(ctx: StepContext) -> int:
        if ctx.attempt == 1:
            door.pause()
        return ctx.attempt

    graph = Graph("g").step("a", read, effect="read", timeout_s=0.05, retry=Retry(2, initial_s=0))
    async with opened(store_path) as runtime:
        assert await runtime.run(graph, id="x") == {"a": 2}
        assert door.inside == 1
        door.open()
        await told(runtime, "x", "step_returned_late")
        assert (await events(runtime, "x"))[-1].body == {"attempt": 1, "value": "1"}
        assert await runtime.run(graph, id="x") == {"a": 2}


async def test_e03_an_absence_is_not_believed_while_the_handler_still_runs(
    store_path: Path, door: Door, world: World
) -> None:
    """The look-up says that nothing was done; the thread is about to do it."""

    def act(ctx: StepContext) -> str:
        door.pause()
        return world.act(ctx)

    def find(key: str, arguments: Any, ctx: StepContext) -> LookupResult:
        return Committed("found") if world.effects[key] else Absent()

    worker = Worker("BANK").node(
        "BANK.PAY",
        lambda arguments, ctx: act(ctx),
        effect="write",
        lookup=find,
        absence_is_final=True,
        timeout_s=0.05,
    )
    graph = Graph("g").node("a", "BANK.PAY")
    async with opened(store_path, workers=[worker]) as runtime:
        for _ in range(2):
            with pytest.raises(UnknownOutcomeError, match="its handler still runs in a thread"):
                await runtime.run(graph, id="x")
        door.open()
        await told(runtime, "x", "step_returned_late")
        assert await runtime.run(graph, id="x") == {"a": "found"}
    assert world.effects == {"x/1/a": 1}


# Cancellation


@pytest.mark.parametrize("effect", ["read", "idempotent", "write"])
async def test_a_caller_that_is_cancelled_does_not_wait_for_the_thread(
    store_path: Path, door: Door, world: World, effect: str
) -> None:
    def act(ctx: StepContext) -> str:
        door.pause()
        return world.act(ctx)

    graph = Graph("g").step("a", act, effect=effect)
    async with opened(store_path) as runtime:
        run = asyncio.create_task(runtime.run(graph, id="x"))
        await wait_until(lambda: door.inside == 1)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        assert await status(runtime, "x") == ("unknown" if effect == "write" else "interrupted")
        if effect == "idempotent":
            # The same process does not begin it a second time beside the first.
            again = asyncio.create_task(runtime.run(graph, id="x"))
            await wait_until(lambda: (runtime.commits, door.count)[1] == 1)
            door.open()
            assert await again == {"a": "done x/1/a"}
        door.open()
        await told(runtime, "x", "step_returned_late")
    assert door.most == 1 if effect != "read" else door.most <= 2


async def test_closing_waits_for_threads_for_the_grace_at_most(store_path: Path, door: Door) -> None:
    graph = Graph("g").step("a", door.pause, effect="write")
    async with opened(store_path, grace_s=0.01) as runtime:
        run = asyncio.create_task(runtime.run(graph, id="x"))
        await wait_until(lambda: door.inside == 1)
        await runtime.close()
        door.open()
        with pytest.raises(StoreClosedError):
            await run
    async with opened(store_path) as runtime:
        assert await status(runtime, "x") == "unknown"


async def test_a_late_return_after_closing_harms_nobody(
    store_path: Path, door: Door, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = create_ditto(store=store_path)
    run = asyncio.create_task(runtime.run(Graph("g").step("a", door.pause, effect="write"), id="x"))
    await wait_until(lambda: door.inside == 1)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    closing = asyncio.create_task(runtime.close())
    await asyncio.sleep(0)
    door.open()
    await closing
    async with opened(store_path) as again:
        # Closing waited for it: what it returned is in the history.
        assert (await events(again, "x"))[-1].kind == "step_returned_late"
    assert not caplog.records


# The threads themselves


async def test_a_seat_is_kept_until_an_abandoned_handler_ends(door: Door) -> None:
    threads = Threads(1)
    late: list[Any] = []

    async def use() -> None:
        async with threads.seat("first") as seat:
            await seat.run(door.pause, lambda result, error: late.append((result, error)))

    first = asyncio.create_task(use())
    await wait_until(lambda: door.inside == 1)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert threads.is_running("first")
    assert not threads.is_running("second")

    async def other() -> Any:
        async with threads.seat("second") as seat:
            return await seat.run(lambda: "mine", lambda result, error: None)

    second = asyncio.create_task(other())
    ended = asyncio.create_task(threads.ended("first"))
    await asyncio.sleep(0)
    assert not second.done()
    door.open()
    await ended
    assert await second == "mine"
    assert late == [(None, None)]
    assert await threads.close(10)


async def test_a_result_that_came_with_the_cancellation_is_not_lost() -> None:
    threads = Threads(1)
    finished = threading.Event()

    def work() -> str:
        finished.wait()
        return "done"

    async def use() -> str:
        async with threads.seat("a") as seat:
            return str(await seat.run(work, lambda result, error: None))

    task = asyncio.create_task(use())
    await wait_until(lambda: bool(threads._running))
    (done,) = threads._running
    done.add_done_callback(lambda _: task.cancel())
    finished.set()
    assert await task == "done"
    assert task.cancelling() == 1
    assert await threads.close(10)
