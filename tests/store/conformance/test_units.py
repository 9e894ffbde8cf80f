"""Units: one transaction for all that waits, nothing told before it is durable, and each one fails alone."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from typing import Any

import pytest
import pytest_asyncio

from ditto.clock import Clock
from ditto.errors import StoreClosedError, StoreError, TransitionRefusedError
from ditto.store import committer as committer_module
from ditto.store import transitions
from ditto.store.committer import Transition, Unit, UsersError
from ditto.store.records import Event
from ditto.store.store import Store
from ditto.store.transitions import Transaction
from tests.store.conformance.under_test import Fault, StoreUnderTest, opened
from tests.store.scenes import all_at_once, create, step, told

pytestmark = pytest.mark.asyncio


class Numbers:
    """A run whose history is the numbers that were written, in the order in which they became durable."""

    def __init__(self, run: int) -> None:
        self._run = run

    def write(self, number: int) -> Transition:
        """A transition that writes a number, and returns it."""

        def note(tx: Transaction) -> int:
            transitions.note_event(tx, self._run, Event("number", body={"n": number}))
            return number

        return note


@pytest_asyncio.fixture
async def numbers(store: Store) -> Numbers:
    """Made as the first thing in the store."""
    return Numbers((await create(store, "numbers")).run)


def durable(under_test: StoreUnderTest) -> list[int]:
    """The numbers that an outsider finds."""
    return [json.loads(body)["n"] for _, _, kind, _, body in under_test.look().events if kind == "number"]


def refuse(tx: Transaction) -> None:
    raise TransitionRefusedError("refuse", "somebody else moved first")


# One transaction for all that waits


async def test_units_that_wait_together_are_one_commit_in_their_order(
    under_test: StoreUnderTest, store: Store, numbers: Numbers
) -> None:
    async with all_at_once(store):
        before = store.commits
        waiters = [store.commit(numbers.write(number)) for number in reversed(range(100))]
    assert await asyncio.gather(*waiters) == list(reversed(range(100)))
    assert store.commits == before + 2, "the one that held the others up, and theirs"
    assert durable(under_test) == list(reversed(range(100)))


async def test_a_batch_has_a_limit(
    under_test: StoreUnderTest, store: Store, numbers: Numbers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(committer_module, "BATCH_MAX", 10)
    async with all_at_once(store):
        before = store.commits
        waiters = [store.commit(numbers.write(number)) for number in range(25)]
    await asyncio.gather(*waiters)
    assert store.commits == before + 1 + 3
    assert durable(under_test) == list(range(25))


async def test_nothing_is_told_before_it_is_durable(under_test: StoreUnderTest, store: Store, numbers: Numbers) -> None:
    seen: list[list[int]] = []
    waiter = store.commit(numbers.write(1))
    waiter.add_done_callback(lambda _: seen.append(durable(under_test)))
    await waiter
    await asyncio.sleep(0)
    assert seen == [[1]]


async def test_a_unit_that_must_be_alone_has_a_transaction_of_its_own(under_test: StoreUnderTest) -> None:
    together: list[tuple[str, int]] = []

    def note(name: str) -> Transition:
        return lambda tx: together.append((name, tx.at))

    class Ticking(Clock):
        at = 0

        def now_us(self) -> int:
            self.at += 1
            return self.at

    async with opened(under_test, clock=Ticking()) as store:
        async with all_at_once(store):
            names = ["a", "b", "ALONE", "c", "ALONE", "ALONE", "d", "e"]
            waiters = [store.commit(note(name), alone=name == "ALONE") for name in names]
        await asyncio.gather(*waiters)
    first = together[0][1]
    assert [(name, at - first) for name, at in together] == [
        ("a", 0), ("b", 0), ("ALONE", 1), ("c", 2), ("ALONE", 3), ("ALONE", 4), ("d", 5), ("e", 5),
    ]  # fmt: skip


# Each one fails alone


async def test_a_refused_transition_fails_alone(under_test: StoreUnderTest, store: Store, numbers: Numbers) -> None:
    async with all_at_once(store):
        before = store.commits
        waiters = [
            store.commit(numbers.write(1)),
            store.commit(refuse, numbers.write(2)),
            store.commit(numbers.write(3)),
        ]
    results = await asyncio.gather(*waiters, return_exceptions=True)
    assert isinstance(results[1], TransitionRefusedError)
    assert durable(under_test) == [1, 3]
    assert store.commits == before + 2


@pytest.mark.parametrize("culprit", ["constraint", "bug", "argument"])
async def test_an_unexpected_error_fails_only_the_culprit(
    under_test: StoreUnderTest, store: Store, numbers: Numbers, culprit: str
) -> None:
    fence = await create(store, "other")
    row = step("a")
    again: Transition = lambda tx: transitions.record_steps(tx, fence, [row], [told(row)])  # noqa: E731
    await store.commit(again)
    fault: Transition = {
        "constraint": again,
        "bug": lambda tx: 1 / 0,
        "argument": lambda tx: transitions.note_event(tx, fence.run, Event("\ud800")),
    }[culprit]
    async with all_at_once(store):
        waiters = [
            store.commit(numbers.write(1)),
            store.commit(numbers.write(2)),
            store.commit(numbers.write(3), fault),
            store.commit(refuse),
            store.commit(numbers.write(4)),
        ]
    results = await asyncio.gather(*waiters, return_exceptions=True)
    assert [isinstance(each, Exception) for each in results] == [False, False, True, True, False]
    assert isinstance(results[3], TransitionRefusedError)
    assert durable(under_test) == [1, 2, 4]
    assert under_test.can_write()


async def test_what_an_alone_unit_takes_along_stands_if_its_users_function_raises(
    under_test: StoreUnderTest, store: Store, numbers: Numbers
) -> None:
    def raising(tx: Transaction) -> None:
        raise UsersError(ValueError("mine"))

    for number, last in ((1, numbers.write(11)), (2, raising), (3, refuse)):
        async with all_at_once(store):
            before = store.commits
            kept = Unit([numbers.write(number)])
            unit = store.commit(numbers.write(number + 100), last, alone=True, kept=kept)
            later = store.commit(numbers.write(number + 200), after=unit)
        result = (await asyncio.gather(unit, return_exceptions=True))[0]
        await later
        assert isinstance(result, int if number == 1 else (UsersError, TransitionRefusedError))
        assert store.commits == before + 3, "the held one, this one, the later one"
    assert durable(under_test) == [1, 101, 11, 201, 2, 202, 3, 203]


@pytest.mark.parametrize("fault", Fault)
@pytest.mark.parametrize("alone", [False, True])
async def test_what_rests_on_a_lost_unit_is_not_applied(
    under_test: StoreUnderTest, store: Store, numbers: Numbers, fault: Fault, alone: bool
) -> None:
    async with all_at_once(store):
        # The cause gets a transaction of its own, so that what rests on it comes in a later one.
        under_test.faults.arm(fault, 1, only="INSERT")
        cause = store.commit(numbers.write(1), alone=True)
        kept = Unit([numbers.write(3)], after=cause) if alone else None
        rests = store.commit(numbers.write(2), after=cause, alone=alone, kept=kept)
        rests_on_that = store.commit(numbers.write(4), after=rests)
        other = store.commit(numbers.write(5))
    results = await asyncio.gather(cause, rests, rests_on_that, other, return_exceptions=True)
    assert {type(each) for each in results[:3]} == {fault.error}
    assert results[3] == 5
    assert durable(under_test) == [5]


# Closing


async def test_closing_commits_what_waits_and_then_refuses(under_test: StoreUnderTest) -> None:
    async with opened(under_test) as store:
        numbers = Numbers((await create(store, "numbers")).run)
        async with all_at_once(store):
            waiters = [store.commit(numbers.write(number), alone=number % 3 == 0) for number in range(10)]
            closing_store = asyncio.ensure_future(store.close())
            await asyncio.sleep(0)
        await closing_store
        assert all(waiter.done() for waiter in waiters)
        assert durable(under_test) == list(range(10))
        with pytest.raises(StoreClosedError, match="open a new runtime"):
            store.commit(numbers.write(11))
        with pytest.raises(StoreClosedError, match="open a new runtime"):
            await store.read(lambda db: None)
        await store.close()


async def test_a_loop_that_ended_before_it_was_told_takes_nothing_with_it(
    under_test: StoreUnderTest, caplog: pytest.LogCaptureFixture
) -> None:
    go = threading.Event()

    async def leave() -> Store:
        store = under_test.open()
        numbers = Numbers((await create(store, "numbers")).run)
        store.commit(lambda tx: go.wait() and None, numbers.write(1))
        return store

    def live() -> None:
        store = asyncio.run(leave())
        go.set()
        asyncio.run(store.close())

    caplog.set_level(logging.INFO, "ditto.store")
    await asyncio.to_thread(live)
    assert "the event loop was closed before it could be told" in caplog.text
    assert durable(under_test) == [1]


# Waiting for a commit cannot be cut short


async def test_e07_a_cancellation_comes_once_the_outcome_is_known(
    under_test: StoreUnderTest, store: Store, numbers: Numbers
) -> None:
    known: list[Any] = []

    async def commit() -> None:
        waiter = store.commit(numbers.write(1))
        try:
            await waiter
        except asyncio.CancelledError:
            known.append(waiter.result())
            raise

    async with all_at_once(store):
        task = asyncio.ensure_future(commit())
        await asyncio.sleep(0)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0)
        assert not task.done()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert known == [1]
    assert durable(under_test) == [1]
    assert under_test.can_write()


async def test_a_deadline_does_not_cut_a_commit_short(store: Store, numbers: Numbers) -> None:
    async with all_at_once(store):
        waiter = store.commit(numbers.write(1))

        async def wait() -> None:
            async with asyncio.timeout(0):
                await waiter

        task = asyncio.ensure_future(wait())
        for _ in range(10):
            await asyncio.sleep(0)
        assert not task.done()
    with pytest.raises(TimeoutError):
        await task
    assert waiter.result() == 1


# Errors of BEGIN, COMMIT and ROLLBACK


async def test_a_lock_that_is_not_given_up_fails_the_batch_once(
    under_test: StoreUnderTest, store: Store, numbers: Numbers
) -> None:
    async with all_at_once(store):
        under_test.faults.arm(Fault.LOCKED, 1, until=1, only="BEGIN")
        waiters = [store.commit(numbers.write(number)) for number in range(5)]
    results = await asyncio.gather(*waiters, return_exceptions=True)
    assert {type(each) for each in results} == {Fault.LOCKED.error}
    assert len({id(each) for each in results}) == 5, "each task has an exception of its own"
    assert len(under_test.faults.met) == 1, "waited for once, not once a unit"
    assert durable(under_test) == []
    await store.commit(numbers.write(7))
    assert durable(under_test) == [7]


@pytest.mark.parametrize("fault", Fault)
@pytest.mark.parametrize("units", [1, 3])
async def test_a_commit_that_failed_is_found_not_to_have_happened(
    under_test: StoreUnderTest, store: Store, fault: Fault, units: int
) -> None:
    row = step("a")
    record: list[Transition] = []
    for number in range(units):
        fence = await create(store, f"run {number}")
        record.append(lambda tx, fence=fence: transitions.record_steps(tx, fence, [row], [told(row)]))  # type: ignore[misc]
    before = under_test.look()
    async with all_at_once(store):
        under_test.faults.arm(fault, 2, only="COMMIT")
        waiters = [store.commit(each) for each in record]
    results = await asyncio.gather(*waiters, return_exceptions=True)
    assert {type(each) for each in results} == {fault.error}
    assert "nothing was written" in str(results[0])
    assert under_test.look() == before
    for each in record:
        await store.commit(each)
    assert len(under_test.look().steps) == units


async def test_a_commit_that_reported_an_error_is_found_to_have_happened(
    under_test: StoreUnderTest, store: Store, numbers: Numbers, caplog: pytest.LogCaptureFixture
) -> None:
    before = store.commits
    under_test.faults.arm(Fault.IO, 1, only="COMMIT", after=True)
    assert await store.commit(numbers.write(1)) == 1
    assert store.commits == before + 1
    assert "but the transaction is on disk" in caplog.text
    assert durable(under_test) == [1]
    await store.commit(numbers.write(2))
    assert durable(under_test) == [1, 2]


@pytest.mark.parametrize("happened", [False, True])
async def test_a_commit_whose_end_cannot_be_looked_up_leaves_the_outcome_open_and_says_so(
    under_test: StoreUnderTest, store: Store, numbers: Numbers, happened: bool
) -> None:
    with under_test.unreachable():
        under_test.faults.arm(Fault.IO, 1, only="COMMIT", after=happened)
        with pytest.raises(StoreError, match="is not known") as open_end:
            await store.commit(numbers.write(1))
        assert open_end.value.code == "store.commit_unknown"
        assert open_end.value.retryable
        assert "Run again: it goes on from what is there" in str(open_end.value)
        assert "nothing was written" not in str(open_end.value)
        with pytest.raises(StoreError):
            await store.commit(numbers.write(2))
        results = await asyncio.gather(
            *(store.commit(numbers.write(number)) for number in range(3, 6)), return_exceptions=True
        )
        assert all(isinstance(each, StoreError) for each in results)
        assert len({id(each) for each in results}) == 3, "each task has an exception of its own"
    # It can be reached again: it goes on, and what is there is the truth.
    assert durable(under_test) == [1] * happened
    await store.commit(numbers.write(6))
    assert durable(under_test) == [1] * happened + [6]


async def test_a_rollback_that_fails_costs_the_connection_and_nothing_else(
    under_test: StoreUnderTest, store: Store, numbers: Numbers
) -> None:
    under_test.faults.arm(Fault.IO, 1, only="ROLLBACK")
    with pytest.raises(ZeroDivisionError):
        await store.commit(numbers.write(1), lambda tx: 1 / 0)
    assert len(under_test.faults.met) == 1
    assert under_test.can_write()
    await store.commit(numbers.write(2))
    assert durable(under_test) == [2]
