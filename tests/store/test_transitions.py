"""Transitions: every change of state has a guard, and what the guard refuses leaves no trace."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from ditto.errors import DittoError, RunNotFoundError, StoreDamagedError, StoreError, TransitionRefusedError
from ditto.store import queries, transitions
from ditto.store.committer import Transition
from ditto.store.records import COMPLETED, INTERRUPTED, Event, Fence, LoopState, RunEnd, RunRow, Seen, StepRow
from ditto.store.schema import CLOSED, RunStatus, StepState
from ditto.store.store import Store
from tests.processes import Child
from tests.store.scenes import create, look, new_run, opened, step, stored, told

ADMITTED = Seen(StepState.ADMITTED, 1)
FAILED = RunEnd(RunStatus.FAILED, '{"message": "no"}', Event("run_failed"))
UNKNOWN = RunEnd(RunStatus.UNKNOWN, '{"message": "first"}', Event("run_unknown"))


@pytest_asyncio.fixture
async def store(store_path: Path) -> AsyncIterator[Store]:
    async with opened(store_path) as store:
        yield store


async def refused(store: Store, transition: Transition, name: str) -> TransitionRefusedError:
    """The transition is refused by name, and nothing of it is written."""
    before = look(store.location.path)
    with pytest.raises(TransitionRefusedError) as error:
        await store.commit(transition)
    assert error.value.transition == name
    assert str(error.value).startswith(f"{name}: ")
    assert look(store.location.path) == before
    return error.value


def record(store: Store, fence: Fence, *rows: StepRow) -> asyncio.Future[Any]:
    return store.commit(lambda tx: transitions.record_steps(tx, fence, rows, [told(row) for row in rows]))


def release(store: Store, fence: Fence, end: RunEnd = COMPLETED) -> asyncio.Future[Any]:
    return store.commit(lambda tx: transitions.release_run(tx, fence, end))


async def claim(store: Store, run: RunRow, owner: str = "owner") -> Fence:
    fence = await store.commit(lambda tx: transitions.claim_run(tx, run, owner, [Event("run_resumed")]))
    return Fence(run.id, owner, fence, run.run_id, run.workflow)


async def get(store: Store, run_id: str = "run") -> RunRow:
    run = await store.read(queries.get_run, run_id)
    assert run is not None
    return run


# Runs


@pytest.mark.asyncio
async def test_a_run_is_created_once(store: Store) -> None:
    await create(store)
    again = await refused(store, lambda tx: transitions.create_run(tx, new_run(owner="other"), ()), "create_run")
    assert again.run_id == "run"
    assert (await get(store)).owner == "owner"


@pytest.mark.asyncio
@pytest.mark.parametrize("end", [COMPLETED, FAILED, UNKNOWN, INTERRUPTED, None])
async def test_a_new_generation_needs_the_older_ones_to_be_closed(store: Store, end: RunEnd | None) -> None:
    fence = await create(store)
    if end is not None:
        await release(store, fence, end)
    if end is not None and end.status in CLOSED:
        await create(store, generation=2)
        assert (await get(store)).generation == 2
        # Another process had seen the first one failed, and reopens it: now there is a second one, which is open.
        await refused(store, lambda tx: transitions.create_run(tx, new_run(generation=3), ()), "create_run")
    else:
        await refused(store, lambda tx: transitions.create_run(tx, new_run(generation=2), ()), "create_run")


@pytest.mark.asyncio
async def test_a_run_that_was_seen_otherwise_is_not_claimed(store: Store) -> None:
    fence = await create(store)
    seen = await get(store)
    await release(store, fence, INTERRUPTED)
    await refused(store, lambda tx: transitions.claim_run(tx, seen, "late", ()), "claim_run")
    seen = await get(store)
    mine = await claim(store, seen)
    assert mine.fence == 2
    await refused(store, lambda tx: transitions.claim_run(tx, seen, "late", ()), "claim_run")
    assert (await get(store)).owner == "owner"


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("end", "kept"), [(UNKNOWN, '{"message": "first"}'), (FAILED, None), (INTERRUPTED, None), (None, None)]
)
async def test_claiming_keeps_the_first_error_of_an_unknown_run_only(
    store: Store, end: RunEnd | None, kept: str | None
) -> None:
    fence = await create(store)
    if end is not None:
        await release(store, fence, end)
    await claim(store, await get(store))
    assert (await get(store)).error == kept


@pytest.mark.asyncio
@pytest.mark.parametrize("lost", ["owner", "fence", "released", "cancelled", "claimed"])
async def test_whoever_lost_the_run_writes_nothing_more(store: Store, lost: str) -> None:
    fence = await create(store)
    await record(store, fence, step("pay", StepState.ADMITTED))
    match lost:
        case "owner":
            fence = replace(fence, owner="somebody")
        case "fence":
            fence = replace(fence, fence=2)
        case "released":
            await release(store, fence, INTERRUPTED)
        case "cancelled":
            await store.commit(lambda tx: transitions.cancel_run(tx, fence.run, Event("run_cancelled")))
        case "claimed":
            await claim(store, await get(store), "other")
    state = LoopState(1, stored({"n": 1}))
    large = step("pay", output="x" * 1000)
    await refused(store, lambda tx: transitions.record_steps(tx, fence, [step("a")], [told(step("a"))]), "record_steps")
    await refused(store, lambda tx: transitions.record_steps(tx, fence, [], [Event("x")], [state]), "record_steps")
    await refused(store, lambda tx: transitions.move_step(tx, fence, large, ADMITTED, [told(large)]), "move_step")
    await refused(store, lambda tx: transitions.release_run(tx, fence, COMPLETED), "release_run")
    assert await store.read(lambda db: db.execute("SELECT count(*) FROM ditto_values").fetchone()) == (0,)


@pytest.mark.asyncio
@pytest.mark.parametrize("end", [COMPLETED, FAILED, None])
async def test_a_run_is_cancelled_once_and_only_while_it_is_open(store: Store, end: RunEnd | None) -> None:
    fence = await create(store)
    cancel: Transition = lambda tx: transitions.cancel_run(tx, fence.run, Event("run_cancelled"))  # noqa: E731
    if end is not None:
        await release(store, fence, end)
    else:
        await store.commit(cancel)
    await refused(store, cancel, "cancel_run")


@pytest.mark.asyncio
async def test_a_note_needs_a_run_and_changes_no_state(store: Store) -> None:
    fence = await create(store)
    await release(store, fence)
    await store.commit(
        lambda tx: transitions.note_event(tx, fence.run, Event("note", "pay", {"n": 1}), stored("x" * 999))
    )
    assert (await get(store)).status is RunStatus.COMPLETED
    assert (await store.read(queries.list_events, fence.run, 0, 10))[-1][0] == 3
    await refused(store, lambda tx: transitions.note_event(tx, fence.run + 1, Event("note")), "note_event")


# Steps


@pytest.mark.asyncio
@pytest.mark.parametrize("seen", [Seen(StepState.UNKNOWN, 1), Seen(StepState.ADMITTED, 2), Seen(StepState.REFUSED, 1)])
async def test_a_step_that_moved_on_is_not_moved_by_what_was_decided_before(store: Store, seen: Seen) -> None:
    fence = await create(store)
    await record(store, fence, step("pay", StepState.ADMITTED))
    row = step("pay")
    error = await refused(store, lambda tx: transitions.move_step(tx, fence, row, seen, [told(row)]), "move_step")
    assert (error.step, error.run_id) == ("pay", "run")
    for state in (StepState.COMPLETED, StepState.FAILED):
        resolved, event = stored("x" * 1000), Event(f"step_{state}", "pay")
        await refused(
            store,
            lambda tx, state=state, resolved=resolved, event=event: transitions.resolve_step(  # type: ignore[misc]
                tx, fence.run, "pay", seen, state, resolved, None, event
            ),
            "resolve_step",
        )


@pytest.mark.asyncio
async def test_a_late_outcome_does_not_replace_a_decision(store: Store) -> None:
    fence = await create(store)
    await record(store, fence, step("pay", StepState.ADMITTED))
    await store.commit(
        lambda tx: transitions.resolve_step(
            tx, fence.run, "pay", ADMITTED, StepState.COMPLETED, stored("by hand"), None, Event("step_completed", "pay")
        )
    )
    late = step("pay", output="late")
    await refused(store, lambda tx: transitions.move_step(tx, fence, late, ADMITTED, [told(late)]), "move_step")
    assert look(store.location.path).steps[0][4] == '"by hand"'
    assert (await get(store)).status is RunStatus.RUNNING, "its owner still drives it"


@pytest.mark.asyncio
async def test_a_resolved_run_is_unknown_until_its_last_lost_step_is_settled(store: Store) -> None:
    fence = await create(store)
    await record(store, fence, step("pay", StepState.ADMITTED), step("ship", StepState.UNKNOWN))
    await release(store, fence, UNKNOWN)
    for path, seen, status in (("pay", ADMITTED, "unknown"), ("ship", Seen(StepState.UNKNOWN, 1), "interrupted")):
        event = Event("step_failed", path)
        await store.commit(
            lambda tx, path=path, seen=seen, event=event: transitions.resolve_step(  # type: ignore[misc]
                tx, fence.run, path, seen, StepState.FAILED, None, '{"message": "no"}', event
            )
        )
        look(store.location.path)
        assert (await get(store)).status == status


@pytest.mark.asyncio
async def test_a_step_is_recorded_once(store: Store) -> None:
    fence = await create(store)
    await record(store, fence, step("a"))
    before = look(store.location.path)
    with pytest.raises(StoreError, match="UNIQUE"):
        await record(store, fence, step("b"), step("a"))
    assert look(store.location.path) == before


# What comes from outside is a parameter

ODD = [
    "a'b", 'a"b', "'; DROP TABLE ditto_runs; --", "x') OR 1=1 --", "a\x00b", "a", "a\x00", "%", "_", "a.b", "a[0]", "$",
    "?", ":b_run_id", "é", "e\u0301", "\U0001f378", " a", "a ", "A", "\\", "\n", "a" * 5000, "null", "1", "01",
]  # fmt: skip


@pytest.mark.asyncio
async def test_h03_odd_names_are_data_and_match_only_themselves(store: Store) -> None:
    for name in ODD:
        fence = await create(store, name, owner=name)
        row = replace(step(name), key=name, type=name, version=name, error=name)
        await store.commit(
            lambda tx, fence=fence, row=row, name=name: transitions.record_steps(  # type: ignore[misc]
                tx, fence, [row], [Event("step_completed", row.path, {name: name})]
            )
        )
    look(store.location.path)
    for name in ODD:
        run = await get(store, name)
        assert (run.run_id, run.owner) == (name, name)
        found = await store.read(queries.get_step, run.id, name)
        assert found is not None
        assert (found.path, found.key, found.type, found.version, found.error) == (name,) * 5
        assert [each.path for each in await store.read(queries.list_steps, run.id)] == [name]
        assert (await store.read(queries.list_events, run.id, 1, 10))[0][3:] == (name, {name: name})
        await store.commit(
            lambda tx, run=run, name=name: transitions.release_run(  # type: ignore[misc]
                tx, Fence(run.id, name, 1, name, "flow"), COMPLETED
            )
        )
    for absent in ("", "%%", "a\x00c", "' OR ''='", "a\x00b\x00"):
        assert await store.read(queries.get_run, absent) is None
    assert len(look(store.location.path).runs) == len(ODD)


@pytest.mark.asyncio
async def test_a_prefix_finds_what_is_below_it_and_nothing_beside_it(store: Store) -> None:
    fence = await create(store)
    paths = ["3", "3/a", "3/b/c", "3-/x", "3./x", "30/a", "3:/x", "2/a", "4/a", "3/", "3/\U0001f378", "3 /a", "3_/a"]
    await record(store, fence, *(step(path) for path in paths))
    found = await store.read(queries.list_steps, fence.run, "3/")
    assert [row.path for row in found] == ["3/a", "3/b/c", "3/", "3/\U0001f378"]


@pytest.mark.asyncio
async def test_a_run_that_is_not_there(store: Store) -> None:
    assert await store.read(queries.get_run, "run") is None
    assert await store.read(queries.get_step, 1, "a") is None
    with pytest.raises(RunNotFoundError):
        await store.read(queries.get_run_by_key, 1)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("statement", "says"),
    [
        ("UPDATE ditto_runs SET status='os.system'", "ditto_runs, row 1: no release of ditto writes the status"),
        ("UPDATE ditto_steps SET state='marker:touch'", "ditto_steps, step a: no release of ditto writes the state"),
        ("UPDATE ditto_steps SET output='@00'", "missing from ditto_values"),
        ("UPDATE ditto_steps SET output=''", "holds no value"),
        ("UPDATE ditto_steps SET output=x'80049503'", "another type than ditto writes"),
        ("UPDATE ditto_events SET body='!!python/object:os.system'", "is no JSON"),
        ("UPDATE ditto_events SET body=x'80049503'", "is no JSON"),
    ],
)
async def test_h01_an_edited_row_is_named_as_damage(store: Store, statement: str, says: str) -> None:
    fence = await create(store)
    await record(store, fence, step("a"))
    await store.commit(lambda tx: tx.db.execute(statement).rowcount)

    def read_all(db: Any) -> None:
        queries.get_run(db, "run")
        queries.list_steps(db, fence.run)
        queries.list_events(db, fence.run, 0, 10)

    with pytest.raises(StoreDamagedError, match=says):
        await store.read(read_all)


@pytest.mark.asyncio
@pytest.mark.parametrize("body", ["", "os.system", "[1", "!!python/object/apply:os.system [id]"])
async def test_h01_an_edited_value_is_named_as_damage(store: Store, body: str) -> None:
    fence = await create(store)
    await record(store, fence, step("a", output="x" * 1000))
    await store.commit(lambda tx: tx.db.execute("UPDATE ditto_values SET body=?", [body]).rowcount)
    row = await store.read(queries.get_step, fence.run, "a")
    assert row is not None
    assert row.output is not None
    with pytest.raises(StoreDamagedError, match="restore a backup"):
        row.output.decode()


# Two processes

CLAIM = """
import asyncio, sys
from pathlib import Path
from ditto.errors import TransitionRefusedError
from ditto.store import queries, transitions
from ditto.store.records import Event, Fence, INTERRUPTED
from tests.store.scenes import opened

async def main():
    owner, wanted, lost = sys.argv[2], int(sys.argv[3]), 0
    async with opened(Path(sys.argv[1])) as store:
        print("ready", flush=True)
        sys.stdin.readline()
        while wanted:
            run = await store.read(queries.get_run, "run")
            try:
                fence = await store.commit(lambda tx: transitions.claim_run(tx, run, owner, [Event("run_resumed")]))
            except TransitionRefusedError:
                lost += 1
                continue
            wanted -= 1
    print("done", lost, flush=True)

asyncio.run(main())
"""


@pytest.mark.asyncio
async def test_i01_two_processes_that_read_and_then_write_never_meet_a_lock(
    store: Store, store_path: Path, start_child: Callable[..., Child]
) -> None:
    await create(store)
    children = [start_child(CLAIM, store_path, f"child {number}", 100) for number in range(2)]
    assert [child.line() for child in children] == ["ready", "ready"]
    for child in children:
        child.tell()
    assert [child.end()[0] for child in children] == [0, 0]
    run = await get(store)
    assert run.fence == 201, "each change of hands was decided on the one before"
    assert run.seq == 201
    look(store_path)


CREATE = """
import asyncio, sys
from pathlib import Path
from ditto.errors import TransitionRefusedError
from tests.store.scenes import create, opened

async def main():
    async with opened(Path(sys.argv[1])) as store:
        print("ready", flush=True)
        sys.stdin.readline()
        for number in range(50):
            try:
                await create(store, f"run {number}", owner=sys.argv[2])
                print("created", flush=True)
            except TransitionRefusedError:
                pass

asyncio.run(main())
"""


def test_two_processes_that_create_one_run_agree_whose_it_is(
    store_path: Path, start_child: Callable[..., Child]
) -> None:
    children = [start_child(CREATE, store_path, f"child {number}") for number in range(2)]
    assert [child.line() for child in children] == ["ready", "ready"]
    for child in children:
        child.tell()
    ends = [child.end() for child in children]
    assert [code for code, _ in ends] == [0, 0]
    assert sum(len(lines) for _, lines in ends) == 50
    assert len(look(store_path).runs) == 50


def test_every_error_of_the_store_is_of_the_tree() -> None:
    assert issubclass(TransitionRefusedError, DittoError)
    assert issubclass(StoreDamagedError, StoreError)
