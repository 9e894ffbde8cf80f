"""The committer: one writer, one transaction for all that waits, and the truth about every fault."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest

from ditto.clock import Clock
from ditto.errors import (
    StoreBusyError,
    StoreClosedError,
    StoreError,
    StoreFullError,
    TransitionRefusedError,
)
from ditto.secrets import Redactor
from ditto.store import committer as committer_module
from ditto.store import transitions
from ditto.store.committer import Committer, Transition, Unit, UsersError
from ditto.store.connection import Driver, Location, connect
from ditto.store.records import COMPLETED, Event, Fence, Seen, StepRow
from ditto.store.schema import StepState
from ditto.store.store import Store
from ditto.store.transitions import Transaction
from tests.processes import Child
from tests.store.faults import FULL, IO, LOCKED, Faults, FaultyDriver
from tests.store.scenes import VALUE_MAX, can_write, create, look, new_run, opened, step, told

StartChild = Callable[..., Child]


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    """Every connection from now on may meet faults."""
    monkeypatch.setattr("ditto.store.connection.Driver", FaultyDriver)
    faults = Faults()
    monkeypatch.setattr(FaultyDriver, "faults", faults)
    return faults


@asynccontextmanager
async def all_at_once(store: Store) -> AsyncIterator[None]:
    """What is submitted inside waits for the committer together: it is busy until the end of the block."""
    begun, go = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def hold(tx: Transaction) -> None:
        loop.call_soon_threadsafe(begun.set)
        go.wait()

    held = store.commit(hold)
    try:
        await begun.wait()
        yield
    finally:
        go.set()
        await held


def insert(number: int) -> Transition:
    return lambda tx: tx.db.execute("INSERT INTO numbers VALUES (?)", [number]).lastrowid


def refuse(tx: Transaction) -> None:
    raise TransitionRefusedError("refuse", "somebody else moved first")


async def make_numbers(store: Store) -> None:
    await store.commit(lambda tx: tx.db.execute("CREATE TABLE numbers (number INTEGER UNIQUE)"))


def numbers(path: Path) -> list[int]:
    with closing(sqlite3.connect(path)) as db:
        return [row[0] for row in db.execute("SELECT number FROM numbers ORDER BY rowid").fetchall()]


# One transaction for all that waits


@pytest.mark.asyncio
async def test_units_that_wait_together_are_one_commit_in_their_order(store_path: Path) -> None:
    async with opened(store_path) as store:
        await make_numbers(store)
        async with all_at_once(store):
            before = store.commits
            waiters = [store.commit(insert(number)) for number in reversed(range(100))]
        assert await asyncio.gather(*waiters) == list(range(1, 101))
        assert store.commits == before + 2, "the one that held the others up, and theirs"
        assert numbers(store_path) == list(reversed(range(100)))


@pytest.mark.asyncio
async def test_a_batch_has_a_limit(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(committer_module, "BATCH_MAX", 10)
    async with opened(store_path) as store:
        await make_numbers(store)
        async with all_at_once(store):
            before = store.commits
            waiters = [store.commit(insert(number)) for number in range(25)]
        await asyncio.gather(*waiters)
        assert store.commits == before + 1 + 3
        assert numbers(store_path) == list(range(25))


@pytest.mark.asyncio
async def test_nothing_is_told_before_it_is_on_disk(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []
    async with opened(store_path) as store:
        await make_numbers(store)
        waiter = store.commit(insert(1))
        waiter.add_done_callback(lambda _: seen.append(numbers(store_path)))
        await waiter
        await asyncio.sleep(0)
    assert seen == [[1]]


@pytest.mark.asyncio
async def test_a_unit_that_must_be_alone_has_a_transaction_of_its_own(store_path: Path) -> None:
    together: list[tuple[str, int]] = []

    def note(name: str) -> Transition:
        return lambda tx: together.append((name, id(tx.db) and tx.at))

    class Ticking(Clock):
        at = 0

        def now_us(self) -> int:
            self.at += 1
            return self.at

    store = Store(Location(store_path), redactor=Redactor(()), clock=Ticking(), value_max_bytes=VALUE_MAX)
    try:
        async with all_at_once(store):
            names = ["a", "b", "ALONE", "c", "ALONE", "ALONE", "d", "e"]
            waiters = [store.commit(note(name), alone=name == "ALONE") for name in names]
        await asyncio.gather(*waiters)
    finally:
        await store.close()
    first = together[0][1]
    assert [(name, at - first) for name, at in together] == [
        ("a", 0), ("b", 0), ("ALONE", 1), ("c", 2), ("ALONE", 3), ("ALONE", 4), ("d", 5), ("e", 5),
    ]  # fmt: skip


@pytest.mark.asyncio
async def test_a_refused_transition_fails_alone(store_path: Path) -> None:
    async with opened(store_path) as store:
        await make_numbers(store)
        async with all_at_once(store):
            before = store.commits
            waiters = [store.commit(insert(1)), store.commit(refuse, insert(2)), store.commit(insert(3))]
        results = await asyncio.gather(*waiters, return_exceptions=True)
        assert isinstance(results[1], TransitionRefusedError)
        assert numbers(store_path) == [1, 3]
        assert store.commits == before + 2


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "fault",
    [
        insert(1),
        lambda tx: 1 / 0,
        lambda tx: tx.db.execute("SELECT nothing"),
        lambda tx: tx.db.execute("?", ["\ud800"]),
    ],
    ids=["constraint", "bug", "statement", "argument"],
)
async def test_an_unexpected_error_fails_only_the_culprit(store_path: Path, fault: Transition) -> None:
    async with opened(store_path) as store:
        await make_numbers(store)
        async with all_at_once(store):
            waiters = [
                store.commit(insert(1)),
                store.commit(insert(2)),
                store.commit(insert(3), fault),
                store.commit(refuse),
                store.commit(insert(4)),
            ]
        results = await asyncio.gather(*waiters, return_exceptions=True)
        assert [isinstance(each, Exception) for each in results] == [False, False, True, True, False]
        assert isinstance(results[3], TransitionRefusedError)
        assert numbers(store_path) == [1, 2, 4]
        assert can_write(store_path)


@pytest.mark.asyncio
async def test_what_an_alone_unit_takes_along_stands_if_its_users_function_raises(store_path: Path) -> None:
    def raising(tx: Transaction) -> None:
        raise UsersError(ValueError("mine"))

    async with opened(store_path) as store:
        await make_numbers(store)
        for number, last in ((1, insert(11)), (2, raising), (3, refuse)):
            async with all_at_once(store):
                before = store.commits
                unit = store.commit(insert(number + 100), last, alone=True, kept=Unit([insert(number)]))
                later = store.commit(insert(number + 200), after=unit)
            result = (await asyncio.gather(unit, return_exceptions=True))[0]
            await later
            assert isinstance(result, int if number == 1 else (UsersError, TransitionRefusedError))
            assert store.commits == before + 3, "the held one, this one, the later one"
        assert numbers(store_path) == [1, 101, 11, 201, 2, 202, 3, 203]


# Closing


@pytest.mark.asyncio
async def test_closing_commits_what_waits_and_then_refuses(store_path: Path) -> None:
    async with opened(store_path) as store:
        await make_numbers(store)
        async with all_at_once(store):
            waiters = [store.commit(insert(number), alone=number % 3 == 0) for number in range(10)]
            closing_store = asyncio.ensure_future(store.close())
            await asyncio.sleep(0)
        await closing_store
        assert all(waiter.done() for waiter in waiters)
        assert numbers(store_path) == list(range(10))
        with pytest.raises(StoreClosedError, match="open a new runtime"):
            store.commit(insert(11))
        with pytest.raises(StoreClosedError, match="open a new runtime"):
            await store.read(lambda db: None)
        await store.close()
    assert [path.name for path in store_path.parent.iterdir()] == ["ditto.db"], "the WAL is gone"


@pytest.mark.asyncio
async def test_closing_does_not_wait_for_a_foreign_reader(store_path: Path) -> None:
    async with opened(store_path, busy_timeout_s=3600) as store:
        await make_numbers(store)
        with closing(sqlite3.connect(store_path, isolation_level=None)) as reader:
            reader.execute("BEGIN")
            reader.execute("SELECT * FROM numbers").fetchall()
            await store.commit(insert(1))
            await store.close()
            assert can_write(store_path)
            reader.execute("ROLLBACK")
    assert numbers(store_path) == [1]


def test_a_loop_that_ended_before_it_was_told_takes_nothing_with_it(
    store_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    go = threading.Event()

    async def leave() -> Store:
        store = Store(Location(store_path), redactor=Redactor(()), clock=Clock(), value_max_bytes=VALUE_MAX)
        await make_numbers(store)
        store.commit(lambda tx: go.wait() and None, insert(1))
        return store

    caplog.set_level(logging.INFO, "ditto.store")
    store = asyncio.run(leave())
    go.set()
    asyncio.run(store.close())
    assert "the event loop was closed before it could be told" in caplog.text
    assert numbers(store_path) == [1]


@pytest.mark.asyncio
async def test_i07_the_wal_goes_back_into_the_file_when_nothing_is_to_do(
    store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, tried = asyncio.get_running_loop(), asyncio.Event()
    checkpoint = Committer._checkpoint

    def told_of(self: Committer) -> None:
        checkpoint(self)
        loop.call_soon_threadsafe(tried.set)

    async def try_again() -> int:
        tried.clear()
        await tried.wait()
        return wal.stat().st_size

    monkeypatch.setattr(committer_module, "IDLE_S", 0.001)
    monkeypatch.setattr(Committer, "_checkpoint", told_of)
    wal = store_path.with_name("ditto.db-wal")
    async with opened(store_path, busy_timeout_s=3600) as store:
        await make_numbers(store)
        with closing(sqlite3.connect(store_path, isolation_level=None)) as reader:
            reader.execute("BEGIN")
            reader.execute("SELECT * FROM numbers").fetchall()
            await store.commit(insert(1))
            await try_again()
            assert await try_again() > 0, "the reader is in the way, and nobody waits for it"
            assert can_write(store_path)
            reader.execute("ROLLBACK")
        while await try_again():
            pass
        assert numbers(store_path) == [1]
        await store.commit(insert(2))
        while await try_again():
            pass


@pytest.mark.asyncio
async def test_a_store_that_cannot_be_opened_to_the_end_leaves_no_thread_behind(
    store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any, **__: Any) -> Any:
        raise StoreError("no more files")

    threads = threading.active_count()
    for part in ("reader", "committer"):
        with monkeypatch.context() as patch:
            patch.setattr(f"ditto.store.{part}.connect", failing)
            with pytest.raises(StoreError, match="no more files"):
                async with opened(store_path):
                    pass
        assert threading.active_count() == threads
        assert can_write(store_path)


# Errors of BEGIN and COMMIT


@pytest.mark.asyncio
async def test_a_lock_that_is_not_given_up_fails_the_batch_once(store_path: Path, faults: Faults) -> None:
    async with opened(store_path) as store:
        await make_numbers(store)
        async with all_at_once(store):
            faults.arm(LOCKED, 1, until=1, only="BEGIN")
            waiters = [store.commit(insert(number)) for number in range(5)]
        results = await asyncio.gather(*waiters, return_exceptions=True)
        assert {type(each) for each in results} == {StoreBusyError}
        assert len({id(each) for each in results}) == 5, "each task has an exception of its own"
        assert faults.met == ["BEGIN IMMEDIATE"], "waited for once, not once a unit"
        assert numbers(store_path) == []
        await store.commit(insert(7))
        assert numbers(store_path) == [7]


@pytest.mark.asyncio
@pytest.mark.parametrize("fault", [IO, FULL, LOCKED])
@pytest.mark.parametrize("units", [1, 3])
async def test_a_commit_that_failed_is_found_not_to_have_happened(
    store_path: Path, faults: Faults, fault: tuple[str, int], units: int
) -> None:
    async with opened(store_path) as store:
        fences = [await create(store, f"run {number}") for number in range(units)]
        before = look(store_path)
        async with all_at_once(store):
            faults.arm(fault, 2, only="COMMIT")
            waiters = [record(store, fence, step("a")) for fence in fences]
        results = await asyncio.gather(*waiters, return_exceptions=True)
        assert all(isinstance(each, StoreError) for each in results)
        assert "nothing was written" in str(results[0])
        assert look(store_path) == before
        for fence in fences:
            await record(store, fence, step("a"))
        assert len(look(store_path).steps) == units


@pytest.mark.asyncio
async def test_a_commit_that_reported_an_error_is_found_to_have_happened(
    store_path: Path, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(store_path) as store:
        fence = await create(store)
        before = store.commits
        faults.arm(IO, 1, only="COMMIT", after=True)
        await record(store, fence, step("a"))
        assert store.commits == before + 1
        assert "but the transaction is on disk" in caplog.text
        assert [row[1:3] for row in look(store_path).steps] == [("a", "completed")]
        with pytest.raises(StoreError):
            await record(store, fence, step("a"))
        await record(store, fence, step("b"))
        assert len(look(store_path).steps) == 2


@pytest.mark.asyncio
async def test_the_event_of_another_transaction_is_not_taken_for_ours(
    store_path: Path, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect_after_another(location: Location) -> Driver:
        """Before it is looked for, somebody else writes an event of that number."""
        with closing(sqlite3.connect(store_path, isolation_level=None)) as other:
            last, at = other.execute("SELECT max(id), max(at) FROM ditto_events").fetchone()
            other.execute("UPDATE ditto_runs SET seq=2")
            other.execute("INSERT INTO ditto_events (id, at, kind) VALUES (?, ?, 'theirs')", [last + 1, at + 1_000_000])
        return connect(location)

    async with opened(store_path) as store:
        fence = await create(store)
        monkeypatch.setattr(committer_module, "connect", connect_after_another)
        faults.arm(IO, 1, only="COMMIT")
        with pytest.raises(StoreError, match="nothing was written"):
            await record(store, fence, step("a"))
        assert [event[2] for event in look(store_path).events] == ["run_created", "theirs"]


@pytest.mark.asyncio
async def test_a_file_that_cannot_be_read_after_commit_leaves_the_outcome_open_and_says_so(
    store_path: Path, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    for after in (False, True):
        async with opened(store_path) as store:
            fence = await create(store, f"run {after}")

            def unreadable(*_: Any, **__: Any) -> Any:
                raise StoreError("the disk is gone")

            with monkeypatch.context() as patch:
                patch.setattr(committer_module, "connect", unreadable)
                faults.arm(IO, 1, only="COMMIT", after=after)
                with pytest.raises(StoreError, match="is not known") as open_end:
                    await record(store, fence, step("a"))
                assert open_end.value.code == "store.commit_unknown"
                assert "Run again: it goes on from what is there" in str(open_end.value)
                assert "nothing was written" not in str(open_end.value)
                with pytest.raises(StoreError, match="the disk is gone"):
                    await record(store, fence, step("b"))
                results = await asyncio.gather(
                    *(record(store, fence, step(name)) for name in "xyz"), return_exceptions=True
                )
                assert all(isinstance(each, StoreError) for each in results)
                assert len({id(each) for each in results}) == 3, "each task has an exception of its own"
            # The disk is back: it goes on, and what is there is the truth.
            assert len([row for row in look(store_path).steps if row[0] == fence.run_id]) == int(after)
            await record(store, fence, step("c"))
            assert len([row for row in look(store_path).steps if row[0] == fence.run_id]) == 1 + int(after)


@pytest.mark.asyncio
async def test_a_rollback_that_fails_costs_the_connection_and_nothing_else(store_path: Path, faults: Faults) -> None:
    async with opened(store_path) as store:
        await make_numbers(store)
        faults.arm(IO, 1, only="ROLLBACK")
        with pytest.raises(ZeroDivisionError):
            await store.commit(insert(1), lambda tx: 1 / 0)
        assert faults.met == ["ROLLBACK"]
        assert can_write(store_path)
        await store.commit(insert(2))
        assert numbers(store_path) == [2]


@pytest.mark.asyncio
async def test_a_file_that_was_taken_away_is_named_and_not_made_anew(store_path: Path, faults: Faults) -> None:
    async with opened(store_path) as store:
        fence = await create(store)
        for path in list(store_path.parent.iterdir()):
            path.unlink()
        faults.arm(IO, 1, only="COMMIT")
        with pytest.raises(StoreError):
            await record(store, fence, step("a"))
        with pytest.raises(StoreError, match="cannot be opened"):
            await record(store, fence, step("b"))
    assert list(store_path.parent.iterdir()) == []


# No effect before its causes


@pytest.mark.asyncio
@pytest.mark.parametrize("fault", [LOCKED, FULL, IO])
@pytest.mark.parametrize("alone", [False, True])
async def test_what_rests_on_a_lost_unit_is_not_applied(
    store_path: Path, faults: Faults, fault: tuple[str, int], alone: bool
) -> None:
    async with opened(store_path) as store:
        await make_numbers(store)
        async with all_at_once(store):
            # The cause gets a transaction of its own, so that what rests on it comes in a later one.
            faults.arm(fault, 1, only="INSERT")
            cause = store.commit(insert(1), alone=True)
            rests = store.commit(
                insert(2), after=cause, alone=alone, kept=Unit([insert(3)], after=cause) if alone else None
            )
            rests_on_that = store.commit(insert(4), after=rests)
            other = store.commit(insert(5))
        results = await asyncio.gather(cause, rests, rests_on_that, other, return_exceptions=True)
        assert len({type(each) for each in results[:3]}) == 1
        assert isinstance(results[0], StoreError)
        assert isinstance(results[3], int)
        assert numbers(store_path) == [5]


# Faults at the n-th statement


def record(store: Store, fence: Fence, *rows: StepRow) -> asyncio.Future[Any]:
    return store.commit(lambda tx: transitions.record_steps(tx, fence, rows, [told(row) for row in rows]))


async def live(store: Store, commit: Callable[..., Any]) -> None:
    """A little run: three outcomes, an admission, its outcome, the end."""
    large = "x" * 3000
    run = await commit(lambda tx: transitions.create_run(tx, new_run(input=large), (Event("run_created"),)))
    fence = Fence(run, "owner", 1, "run", "flow")
    rows = [step("a"), step("b", output=large), step("c", StepState.SKIPPED)]
    await commit(lambda tx: transitions.record_steps(tx, fence, rows, [told(row) for row in rows]))
    admitted = step("pay", StepState.ADMITTED)
    await commit(lambda tx: transitions.record_steps(tx, fence, [admitted], [told(admitted)]))
    settled, seen = step("pay", output=large + "y"), Seen(StepState.ADMITTED, 1)
    await commit(
        lambda tx: transitions.move_step(tx, fence, settled, seen, [told(settled)]),
        lambda tx: transitions.release_run(tx, fence, COMPLETED),
    )


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (LOCKED, "nothing was written, run again"),
        (FULL, "nothing was written. Free space and run again"),
        (IO, "nothing was written"),
    ],
    ids=["locked", "full", "I/O"],
)
@pytest.mark.parametrize("burst", [1, 3])
async def test_a_fault_at_any_statement_leaves_a_whole_state_and_the_next_attempt_goes_on(
    tmp_path: Path, faults: Faults, fault: tuple[str, int], says: str, burst: int
) -> None:
    async with opened(tmp_path / "sound" / "ditto.db") as store:
        await live(store, store.commit)
        sound = look(tmp_path / "sound" / "ditto.db")
    for at in range(1, 1000):
        path, met = tmp_path / str(at) / "ditto.db", 0
        async with opened(path) as store:

            async def commit(*transitions: Transition, store: Store = store, path: Path = path) -> Any:
                nonlocal met
                while True:
                    before = look(path)
                    try:
                        return await store.commit(*transitions)
                    except StoreError as error:
                        met += 1
                        # In a burst, the connection that should look for the commit may fail, too.
                        assert says in str(error) or (burst > 1 and error.code == "store.commit_unknown")
                        assert str(path) in str(error)
                        assert error.retryable
                        assert look(path) == before
                        assert can_write(path)

            faults.arm(fault, at, until=at + burst - 1)
            await live(store, commit)
            reached = bool(faults.met)
            faults.disarm()
            assert look(path) == sound
        if not reached:
            assert at > 20
            break
        assert met >= 1
    else:
        pytest.fail("the faults did not run out")


@pytest.mark.asyncio
async def test_i06_a_full_disk_is_named_and_leaves_nothing_half_written(store_path: Path) -> None:
    async with opened(store_path) as store:
        fence = await create(store)
        await record(store, fence, step("pay", StepState.ADMITTED))
        before = look(store_path)
        pages = await store.commit(lambda tx: tx.db.execute("PRAGMA page_count").fetchone()[0])
        await store.commit(lambda tx: tx.db.execute(f"PRAGMA max_page_count={pages + 2}").fetchone())
        settled, seen = step("pay", output="x" * 200_000), Seen(StepState.ADMITTED, 1)

        def settle() -> asyncio.Future[Any]:
            return store.commit(lambda tx: transitions.move_step(tx, fence, settled, seen, [told(settled)]))

        for _ in range(2):
            with pytest.raises(StoreFullError, match="the disk is full; nothing was written"):
                await settle()
            assert look(store_path) == before
        # Another run's small change fits, also in one batch with the one that does not.
        async with all_at_once(store):
            large, small = settle(), store.commit(lambda tx: transitions.note_event(tx, fence.run, Event("note")))
        results = await asyncio.gather(large, small, return_exceptions=True)
        assert isinstance(results[0], StoreFullError)
        assert results[1] is None
        await store.commit(lambda tx: tx.db.execute("PRAGMA max_page_count=1000000").fetchone())
        await settle()
        assert look(store_path).steps[0][2] == "completed"


# The event loop is never blocked

HOLD = """
import sqlite3, sys
db = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=60)
while True:
    db.execute("BEGIN IMMEDIATE")
    print("locked", flush=True)
    sys.stdin.readline()
    db.execute("ROLLBACK")
    print("free", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.asyncio
async def test_i13_the_loop_goes_on_while_another_process_holds_the_lock(
    store_path: Path, start_child: StartChild
) -> None:
    async with opened(store_path, busy_timeout_s=3600) as store:
        await make_numbers(store)
        child = start_child(HOLD, store_path)
        assert child.line() == "locked"
        waiter = store.commit(insert(1))
        for _ in range(10_000):
            await asyncio.sleep(0)
        assert not waiter.done()
        assert await store.read(lambda db: db.execute("SELECT count(*) FROM numbers").fetchone()) == (0,)
        child.tell()
        await waiter
        assert child.line() == "free"
    assert numbers(store_path) == [1]


@pytest.mark.asyncio
async def test_i13_a_lock_held_beyond_the_timeout_is_named_and_a_later_attempt_goes_on(
    store_path: Path, start_child: StartChild
) -> None:
    async with opened(store_path, busy_timeout_s=0.3) as store:
        await make_numbers(store)
        child = start_child(HOLD, store_path)
        assert child.line() == "locked"
        waiter, ticks = store.commit(insert(1)), 0
        while not waiter.done():
            await asyncio.sleep(0)
            ticks += 1
        assert ticks > 100
        with pytest.raises(StoreBusyError, match=r"longer than store\.busy_timeout_s"):
            await waiter
        child.tell()
        assert child.line() == "free"
        await store.commit(insert(1))
    assert numbers(store_path) == [1]


# Waiting for a commit cannot be cut short


@pytest.mark.asyncio
async def test_e07_a_cancellation_comes_once_the_outcome_is_known(store_path: Path) -> None:
    async with opened(store_path) as store:
        await make_numbers(store)
        known: list[Any] = []

        async def commit() -> None:
            waiter = store.commit(insert(1))
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
        assert numbers(store_path) == [1]
        assert can_write(store_path)


@pytest.mark.asyncio
async def test_a_deadline_does_not_cut_a_commit_short(store_path: Path) -> None:
    async with opened(store_path) as store:
        await make_numbers(store)
        async with all_at_once(store):
            waiter = store.commit(insert(1))

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
