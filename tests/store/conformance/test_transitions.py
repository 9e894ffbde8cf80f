"""Transitions: every change of state has a guard, and what the guard refuses leaves no trace."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ditto.errors import RunNotFoundError, StoreError
from ditto.store import queries, transitions
from ditto.store.committer import Transition
from ditto.store.records import COMPLETED, INTERRUPTED, Event, Fence, LoopState, RunEnd, Seen
from ditto.store.schema import CLOSED, RunStatus, StepState
from ditto.store.store import Store
from tests.store.conformance.under_test import Refused, StoreUnderTest
from tests.store.scenes import claim, create, get, new_run, record, release, step, stored, told

pytestmark = pytest.mark.asyncio

ADMITTED = Seen(StepState.ADMITTED, 1)
FAILED = RunEnd(RunStatus.FAILED, '{"message": "no"}', Event("run_failed"))
UNKNOWN = RunEnd(RunStatus.UNKNOWN, '{"message": "first"}', Event("run_unknown"))


# Runs


async def test_a_run_is_created_once(store: Store, refused: Refused) -> None:
    await create(store)
    again = await refused(lambda tx: transitions.create_run(tx, new_run(owner="other"), ()), "create_run")
    assert again.run_id == "run"
    assert (await get(store)).owner == "owner"


@pytest.mark.parametrize("end", [COMPLETED, FAILED, UNKNOWN, INTERRUPTED, None])
async def test_a_new_generation_needs_the_older_ones_to_be_closed(
    store: Store, refused: Refused, end: RunEnd | None
) -> None:
    fence = await create(store)
    if end is not None:
        await release(store, fence, end)
    if end is not None and end.status in CLOSED:
        await create(store, generation=2)
        assert (await get(store)).generation == 2
        # Another process had seen the first one failed, and reopens it: now there is a second one, which is open.
        await refused(lambda tx: transitions.create_run(tx, new_run(generation=3), ()), "create_run")
    else:
        await refused(lambda tx: transitions.create_run(tx, new_run(generation=2), ()), "create_run")


async def test_a_run_that_was_seen_otherwise_is_not_claimed(store: Store, refused: Refused) -> None:
    fence = await create(store)
    seen = await get(store)
    await release(store, fence, INTERRUPTED)
    await refused(lambda tx: transitions.claim_run(tx, seen, "late", (), deadline_at=None), "claim_run")
    seen = await get(store)
    mine = await claim(store, seen)
    assert mine.fence == 2
    await refused(lambda tx: transitions.claim_run(tx, seen, "late", (), deadline_at=None), "claim_run")
    assert (await get(store)).owner == "owner"


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


@pytest.mark.parametrize("lost", ["owner", "fence", "released", "cancelled", "claimed"])
async def test_whoever_lost_the_run_writes_nothing_more(
    under_test: StoreUnderTest, store: Store, refused: Refused, lost: str
) -> None:
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
    await refused(lambda tx: transitions.record_steps(tx, fence, [step("a")], [told(step("a"))]), "record_steps")
    await refused(lambda tx: transitions.record_steps(tx, fence, [], [Event("x")], [state]), "record_steps")
    await refused(lambda tx: transitions.move_step(tx, fence, large, ADMITTED, [told(large)]), "move_step")
    await refused(lambda tx: transitions.release_run(tx, fence, COMPLETED), "release_run")
    assert under_test.rows("SELECT count(*) FROM ditto_values") == [(0,)]


@pytest.mark.parametrize("end", [COMPLETED, FAILED, None])
async def test_a_run_is_cancelled_once_and_only_while_it_is_open(
    store: Store, refused: Refused, end: RunEnd | None
) -> None:
    fence = await create(store)
    cancel: Transition = lambda tx: transitions.cancel_run(tx, fence.run, Event("run_cancelled"))  # noqa: E731
    if end is not None:
        await release(store, fence, end)
    else:
        await store.commit(cancel)
    await refused(cancel, "cancel_run")


async def test_a_note_needs_a_run_and_changes_no_state(store: Store, refused: Refused) -> None:
    fence = await create(store)
    await release(store, fence)
    await store.commit(
        lambda tx: transitions.note_event(tx, fence.run, Event("note", "pay", {"n": 1}), stored("x" * 999))
    )
    assert (await get(store)).status is RunStatus.COMPLETED
    assert (await store.read(queries.list_events, fence.run, 0, 10))[-1][0] == 3
    await refused(lambda tx: transitions.note_event(tx, fence.run + 1, Event("note")), "note_event")


# Steps


@pytest.mark.parametrize("seen", [Seen(StepState.UNKNOWN, 1), Seen(StepState.ADMITTED, 2), Seen(StepState.REFUSED, 1)])
async def test_a_step_that_moved_on_is_not_moved_by_what_was_decided_before(
    store: Store, refused: Refused, seen: Seen
) -> None:
    fence = await create(store)
    await record(store, fence, step("pay", StepState.ADMITTED))
    row = step("pay")
    error = await refused(lambda tx: transitions.move_step(tx, fence, row, seen, [told(row)]), "move_step")
    assert (error.step, error.run_id) == ("pay", "run")
    for state in (StepState.COMPLETED, StepState.FAILED):
        resolved, event = stored("x" * 1000), Event(f"step_{state}", "pay")
        await refused(
            lambda tx, state=state, resolved=resolved, event=event: transitions.resolve_step(  # type: ignore[misc]
                tx, fence.run, "pay", seen, state, resolved, None, event
            ),
            "resolve_step",
        )


async def test_a_late_outcome_does_not_replace_a_decision(
    under_test: StoreUnderTest, store: Store, refused: Refused
) -> None:
    fence = await create(store)
    await record(store, fence, step("pay", StepState.ADMITTED))
    await store.commit(
        lambda tx: transitions.resolve_step(
            tx, fence.run, "pay", ADMITTED, StepState.COMPLETED, stored("by hand"), None, Event("step_completed", "pay")
        )
    )
    late = step("pay", output="late")
    await refused(lambda tx: transitions.move_step(tx, fence, late, ADMITTED, [told(late)]), "move_step")
    assert under_test.look().steps[0][4] == '"by hand"'
    assert (await get(store)).status is RunStatus.RUNNING, "its owner still drives it"


async def test_a_resolved_run_is_unknown_until_its_last_lost_step_is_settled(
    under_test: StoreUnderTest, store: Store
) -> None:
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
        under_test.look()
        assert (await get(store)).status == status


async def test_a_step_is_recorded_once(under_test: StoreUnderTest, store: Store) -> None:
    fence = await create(store)
    await record(store, fence, step("a"))
    before = under_test.look()
    with pytest.raises(StoreError):
        await record(store, fence, step("b"), step("a"))
    assert under_test.look() == before


# What comes from outside is a parameter

ODD = [
    "a'b", 'a"b', "'; DROP TABLE ditto_runs; --", "x') OR 1=1 --", "a", "%", "_", "a.b", "a[0]", "$",
    "?", ":b_run_id", "é", "e\u0301", "\U0001f378", " a", "a ", "A", "\\", "\n", "a" * 5000, "null", "1", "01",
]  # fmt: skip


async def test_h03_odd_names_are_data_and_match_only_themselves(under_test: StoreUnderTest, store: Store) -> None:
    for name in ODD:
        fence = await create(store, name, owner=name)
        row = replace(step(name), key=name, type=name, version=name, error=name)
        await store.commit(
            lambda tx, fence=fence, row=row, name=name: transitions.record_steps(  # type: ignore[misc]
                tx, fence, [row], [Event("step_completed", row.path, {name: name})]
            )
        )
    under_test.look()
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
    for absent in ("", "%%", "' OR ''='"):
        assert await store.read(queries.get_run, absent) is None
    assert len(under_test.look().runs) == len(ODD)


async def test_a_prefix_finds_what_is_below_it_and_nothing_beside_it(store: Store) -> None:
    fence = await create(store)
    paths = ["3", "3/a", "3/b/c", "3-/x", "3./x", "30/a", "3:/x", "2/a", "4/a", "3/", "3/\U0001f378", "3 /a", "3_/a"]
    await record(store, fence, *(step(path) for path in paths))
    found = await store.read(queries.list_steps, fence.run, "3/")
    assert [row.path for row in found] == ["3/a", "3/b/c", "3/", "3/\U0001f378"]


async def test_a_run_that_is_not_there(store: Store) -> None:
    assert await store.read(queries.get_run, "run") is None
    assert await store.read(queries.get_step, 1, "a") is None
    with pytest.raises(RunNotFoundError):
        await store.read(queries.get_run_by_key, 1)
