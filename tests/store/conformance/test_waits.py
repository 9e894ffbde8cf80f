"""Waits: a signal, a decision or a time ends a wait once, whoever writes it, and wakes the run that waits."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from ditto.errors import TransitionRefusedError
from ditto.store import queries, transitions
from ditto.store.records import COMPLETED, INTERRUPTED, Event, Fence, RunEnd, StepRow
from ditto.store.schema import RunStatus, StepState
from ditto.store.store import Store
from ditto.store.values import decode
from tests.store.conformance.under_test import Refused, StoreUnderTest, opened
from tests.store.scenes import claim, create, get, release, signal_wait, stored

pytestmark = pytest.mark.asyncio

BEGUN = Event("step_waiting", "wait")
OVER = Event("wait_over", "wait")
TIME = stored({"timed_out": True})


def waiting(waits: int) -> RunEnd:
    """Let go of a run with so many waits."""
    return RunEnd(RunStatus.WAITING, event=Event("run_waiting"), waits=waits)


def begin(store: Store, fence: Fence, row: StepRow, signal: str | None = "go") -> asyncio.Future[StepRow]:
    event = replace(BEGUN, step=row.path)
    return store.commit(lambda tx: transitions.begin_wait(tx, fence, row, signal, event))


def send(store: Store, fence: Fence, name: str, id: str, body: object = None) -> asyncio.Future[bool]:
    return store.commit(lambda tx: transitions.send_signal(tx, fence.run, name, id, stored(body), "ada"))


def settle(store: Store, fence: Fence, path: str = "wait", attempt: int = 1) -> asyncio.Future[None]:
    event = replace(OVER, step=path)
    return store.commit(lambda tx: transitions.settle_wait(tx, fence.run, path, attempt, TIME, event))


async def output_of(store: Store, fence: Fence, path: str = "wait") -> object:
    row = await store.read(queries.get_step, fence.run, path)
    assert row is not None
    return None if row.output is None else row.output.decode()


async def test_a_signal_ends_the_oldest_wait_for_its_name_and_no_other(
    under_test: StoreUnderTest, store: Store
) -> None:
    fence = await create(store)
    other = await create(store, "other")
    for owner, path, name in ((fence, "a", "go"), (fence, "b", "go"), (fence, "c", "on"), (other, "a", "go")):
        row = await begin(store, owner, signal_wait(path, name), name)
        assert row.state is StepState.WAITING
    assert await send(store, fence, "go", "1", {"n": 1})
    under_test.look()
    assert {(run, path): state for run, path, state, *_ in under_test.look().steps} == {
        ("run", "a"): "completed", ("run", "b"): "waiting", ("run", "c"): "waiting", ("other", "a"): "waiting",
    }  # fmt: skip
    output = await output_of(store, fence, "a")
    assert isinstance(output, dict)
    assert (output["body"], output["actor"], output["timed_out"]) == ({"n": 1}, "ada", False)


async def test_signals_that_come_early_are_kept_in_their_order_and_each_is_given_once(
    under_test: StoreUnderTest, store: Store
) -> None:
    fence = await create(store)
    for number in range(3):
        assert await send(store, fence, "go", f"id {number}", number)
    for number in range(3):
        row = await begin(store, fence, signal_wait(f"w{number}", "go"))
        assert row.state is StepState.COMPLETED
        assert row.output is not None
        assert row.output.decode()["body"] == number
        output = await output_of(store, fence, f"w{number}")
        assert isinstance(output, dict)
        assert output["body"] == number
    assert (await begin(store, fence, signal_wait("w3", "go"))).state is StepState.WAITING
    under_test.look()


async def test_a_signal_that_is_sent_again_is_none(under_test: StoreUnderTest, store: Store) -> None:
    fence = await create(store)
    other = await create(store, "other")
    assert await send(store, fence, "go", "1", "first")
    before = under_test.look()
    assert not await send(store, fence, "go", "1", "second")
    assert not await send(store, fence, "on", "1", "second")
    assert under_test.look() == before
    assert await send(store, other, "go", "1"), "ids are those of one run"


@pytest.mark.parametrize("closed", ["completed", "failed", "cancelled"])
async def test_a_closed_run_takes_no_signal(store: Store, refused: Refused, closed: str) -> None:
    fence = await create(store)
    if closed == "cancelled":
        await store.commit(lambda tx: transitions.cancel_run(tx, fence.run, Event("run_cancelled")))
    else:
        await release(store, fence, RunEnd(RunStatus(closed), event=Event(f"run_{closed}")))
    await refused(lambda tx: transitions.send_signal(tx, fence.run, "go", "1", stored(1), "ada"), "send_signal")


async def test_a_wait_needs_the_fence(store: Store, refused: Refused) -> None:
    fence = await create(store)
    late, row = replace(fence, fence=2), signal_wait("wait", "go")
    await refused(lambda tx: transitions.begin_wait(tx, late, row, "go", BEGUN), "record_steps")
    await send(store, fence, "go", "1")
    await refused(lambda tx: transitions.begin_wait(tx, late, row, "go", BEGUN), "record_steps")
    assert (await begin(store, fence, row)).state is StepState.COMPLETED, "the signal was not used up"


async def test_a_wait_ends_once(under_test: StoreUnderTest, store: Store, refused: Refused) -> None:
    fence = await create(store)
    await begin(store, fence, signal_wait("wait", "go"))
    await refused(lambda tx: transitions.settle_wait(tx, fence.run, "wait", 2, TIME, OVER), "settle_wait")
    await settle(store, fence)
    await refused(lambda tx: transitions.settle_wait(tx, fence.run, "wait", 1, TIME, OVER), "settle_wait")
    assert await send(store, fence, "go", "1"), "it is queued: nothing waits for it"
    assert await output_of(store, fence) == {"timed_out": True}
    under_test.look()


async def test_exactly_one_of_many_ends_a_wait(under_test: StoreUnderTest, store: Store) -> None:
    fence = await create(store)
    await begin(store, fence, signal_wait("wait", "go"))
    await release(store, fence, waiting(1))
    async with opened(under_test) as other:
        ends = [settle(each, fence) for _ in range(10) for each in (store, other)]
        results = await asyncio.gather(*ends, return_exceptions=True)
    assert results.count(None) == 1
    assert sum(isinstance(each, TransitionRefusedError) for each in results) == 19
    under_test.look()
    assert (await get(store)).status is RunStatus.INTERRUPTED


@pytest.mark.parametrize("end", ["cancelled", "completed"])
async def test_the_wait_of_a_finished_run_is_not_ended_any_more(store: Store, refused: Refused, end: str) -> None:
    fence = await create(store)
    await begin(store, fence, signal_wait("wait", "go"))
    if end == "cancelled":
        await store.commit(lambda tx: transitions.cancel_run(tx, fence.run, Event("run_cancelled")))
    else:
        await release(store, fence, COMPLETED)
    await refused(lambda tx: transitions.settle_wait(tx, fence.run, "wait", 1, TIME, OVER), "settle_wait")


@pytest.mark.parametrize("how", ["signal", "time"])
@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_run_that_is_let_go_of_with_a_wait_is_woken_when_it_ends(
    under_test: StoreUnderTest, store: Store, how: str, when: str
) -> None:
    fence = await create(store)
    await begin(store, fence, signal_wait("wait", "go"))
    await begin(store, fence, signal_wait("another", "never"), "never")

    async def end_wait() -> None:
        await (settle(store, fence) if how == "time" else send(store, fence, "go", "1"))

    if when == "before":
        await end_wait()
    await release(store, fence, waiting(2))
    assert (await get(store)).status is (RunStatus.INTERRUPTED if when == "before" else RunStatus.WAITING)
    if when == "after":
        await end_wait()
    run = await get(store)
    assert (run.status, run.owner) == (RunStatus.INTERRUPTED, None)
    rows = await store.read(queries.list_steps, fence.run)
    assert [row.path for row in rows if row.state is StepState.WAITING] == ["another"]
    under_test.look()


async def test_the_end_of_a_child_wakes_the_run_that_waits_for_it(store: Store) -> None:
    parent, child = await create(store, "parent"), await create(store, "parent/kid")
    row = replace(signal_wait("kid", "parent/kid"), type="WAIT.CHILD")
    await begin(store, parent, row, None)
    await release(store, parent, waiting(1))
    await release(store, child, INTERRUPTED)
    assert (await get(store, "parent")).status is RunStatus.WAITING
    await release(store, await claim(store, await get(store, "parent/kid")), COMPLETED)
    assert (await get(store, "parent")).status is RunStatus.INTERRUPTED


async def test_waits_whose_time_has_come_are_found_the_longest_due_first(store: Store) -> None:
    fence = await create(store)
    for path, due_at in (("late", 30), ("never", None), ("first", 10), ("second", 20)):
        await begin(store, fence, signal_wait(path, path, due_at=due_at), path)
    closed = await create(store, "closed")
    await begin(store, closed, signal_wait("first", "x", due_at=5), "x")
    await release(store, closed, COMPLETED)
    due = await store.read(queries.list_due, 20, 10)
    assert due == [(fence.run, "first", 1, "WAIT.SIGNAL"), (fence.run, "second", 1, "WAIT.SIGNAL")]
    assert await store.read(queries.list_due, 9, 10) == []
    assert len(await store.read(queries.list_due, 1000, 2)) == 2
    await settle(store, fence, "first")
    assert [path for _, path, *_ in await store.read(queries.list_due, 20, 10)] == ["second"]


async def test_the_output_of_a_wait_holds_the_body_as_it_was_sent(store: Store) -> None:
    fence = await create(store)
    bodies = [None, "", 'a"b\\', {"n": [1.0, 1, True]}, "x" * 5000, "\U0001f378"]
    for number, body in enumerate(bodies):
        await send(store, fence, "go", f"id {number}", body)
        row = await begin(store, fence, signal_wait(f"w{number}", "go"))
        assert row.output is not None
        assert decode(row.output.body)["body"] == body
        output = await output_of(store, fence, f"w{number}")
        assert isinstance(output, dict)
        assert repr(output["body"]) == repr(body)
