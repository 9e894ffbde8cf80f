"""A pause in the store: guarded by what was seen, it leaves the owner its outcomes and lets it begin nothing."""

from __future__ import annotations

import pytest

from ditto.store import transitions
from ditto.store.committer import Transition
from ditto.store.records import COMPLETED, DRAINED, INTERRUPTED, Event, RunEnd, RunRow, Seen
from ditto.store.schema import RunStatus, StepState
from ditto.store.store import Store
from tests.store.conformance.under_test import Refused, StoreUnderTest
from tests.store.scenes import claim, create, get, record, release, step, stored, told

pytestmark = pytest.mark.asyncio

ASKED = Event("run_paused", body={"actor": "ada", "reason": ""})
WAITING = RunEnd(RunStatus.WAITING, event=Event("run_waiting"))
UNKNOWN = RunEnd(RunStatus.UNKNOWN, '{"message": "first"}', Event("run_unknown"))
FAILED = RunEnd(RunStatus.FAILED, '{"message": "no"}', Event("run_failed"))


def pause(seen: RunRow, *, driven: bool) -> Transition:
    return lambda tx: transitions.pause_run(tx, seen, ASKED, driven=driven)


async def test_a_pause_is_refused_if_the_run_was_moved_since_it_was_seen(store: Store, refused: Refused) -> None:
    fence = await create(store)
    seen = await get(store)
    await release(store, fence, INTERRUPTED)
    await refused(pause(seen, driven=True), "pause_run")
    released = await get(store)
    await claim(store, released)
    await refused(pause(released, driven=False), "pause_run")
    await store.commit(pause(await get(store), driven=True))
    await refused(pause(seen, driven=True), "pause_run")


@pytest.mark.parametrize("end", [INTERRUPTED, WAITING, UNKNOWN], ids=lambda end: end.status.value)
async def test_its_owner_records_what_is_under_way_and_leaves_it_paused(
    under_test: StoreUnderTest, store: Store, refused: Refused, end: RunEnd
) -> None:
    fence = await create(store)
    await record(store, fence, step("sent", StepState.ADMITTED))
    await store.commit(pause(await get(store), driven=True))
    run = await get(store)
    assert (run.status, run.owner, run.fence) == (RunStatus.PAUSED, "owner", 1)
    sent = step("sent")
    seen = Seen(StepState.ADMITTED, 1)
    await store.commit(lambda tx: transitions.move_step(tx, fence, sent, seen, [told(sent)]))
    await record(store, fence, step("read"))
    await release(store, fence, end)
    picture = under_test.look()
    assert picture.runs == [("run", 1, "paused", None, 1, 6, end.error)]
    assert [kind for _, _, kind, *_ in picture.events][-1] == DRAINED.kind
    await refused(lambda tx: transitions.record_steps(tx, fence, (step("late"),), ()), "record_steps")


async def test_its_owner_begins_nothing(store: Store, refused: Refused) -> None:
    fence = await create(store)
    await record(store, fence, step("again", StepState.REFUSED))
    await store.commit(pause(await get(store), driven=True))
    admitted, waits = step("new", StepState.ADMITTED), step("wait", StepState.WAITING)
    again = step("again", StepState.ADMITTED, attempt=2)
    seen = Seen(StepState.REFUSED, 1)
    begun: list[Transition] = [
        lambda tx: transitions.record_steps(tx, fence, (admitted,), [told(admitted)], begins=True),
        lambda tx: transitions.record_steps(tx, fence, (), (), begins=True),
        lambda tx: transitions.begin_wait(tx, fence, waits, None, told(waits)),
        lambda tx: transitions.move_step(tx, fence, again, seen, [told(again)], begins=True),
    ]
    for transition in begun:
        await refused(transition, transitions.BEGIN)
    # Of a run that is not ours any more it is said that it is not.
    await release(store, fence, INTERRUPTED)
    await refused(begun[0], "record_steps")


@pytest.mark.parametrize("end", [COMPLETED, FAILED], ids=lambda end: end.status.value)
async def test_a_run_that_comes_to_its_end_is_not_paused_any_more(store: Store, end: RunEnd) -> None:
    fence = await create(store)
    await store.commit(pause(await get(store), driven=True))
    await release(store, fence, end)
    assert (await get(store)).status is end.status


async def test_nothing_but_a_claim_or_a_cancellation_ends_a_pause(store: Store) -> None:
    fence = await create(store)
    waits = step("wait", StepState.WAITING)
    await store.commit(lambda tx: transitions.begin_wait(tx, fence, waits, None, told(waits)))
    await record(store, fence, step("lost", StepState.ADMITTED))
    await release(store, fence, UNKNOWN)
    await store.commit(pause(await get(store), driven=False))
    over = Event("step_completed", "wait")
    await store.commit(lambda tx: transitions.settle_wait(tx, fence.run, "wait", 1, stored(1), over))
    seen, found = Seen(StepState.ADMITTED, 1), Event("step_completed", "lost")
    await store.commit(
        lambda tx: transitions.resolve_step(tx, fence.run, "lost", seen, StepState.COMPLETED, stored(2), None, found)
    )
    assert (await get(store)).status is RunStatus.PAUSED
    await claim(store, await get(store))
    assert (await get(store)).status is RunStatus.RUNNING


async def test_a_pause_is_ended_without_a_claim_once(store: Store, refused: Refused) -> None:
    fence = await create(store)
    ended = Event("run_unpaused")
    seen = await get(store)
    await refused(lambda tx: transitions.unpause_run(tx, seen, ended), "unpause_run")
    await store.commit(pause(seen, driven=True))
    await release(store, fence, INTERRUPTED)
    paused = await get(store)
    await store.commit(lambda tx: transitions.unpause_run(tx, paused, ended))
    run = await get(store)
    assert (run.status, run.owner, run.fence) == (RunStatus.INTERRUPTED, None, 1)
    await refused(lambda tx: transitions.unpause_run(tx, paused, ended), "unpause_run")


async def test_a_question_that_is_asked_anew_waits_again(
    under_test: StoreUnderTest, store: Store, refused: Refused
) -> None:
    fence = await create(store)
    waits = step("pay/approval", StepState.WAITING)
    await store.commit(lambda tx: transitions.begin_wait(tx, fence, waits, None, told(waits)))
    over = Event("step_completed", "pay/approval")
    await store.commit(lambda tx: transitions.settle_wait(tx, fence.run, "pay/approval", 1, stored("yes"), over))
    again = step("pay/approval", StepState.WAITING, attempt=2)
    seen = Seen(StepState.COMPLETED, 1)
    await store.commit(lambda tx: transitions.move_step(tx, fence, again, seen, [told(again)], begins=True))
    assert under_test.look().steps == [("run", "pay/approval", "waiting", 2, None)]
    # Who decides on the first question is too late.
    settle: Transition = lambda tx: transitions.settle_wait(  # noqa: E731
        tx, fence.run, "pay/approval", 1, stored("no"), over
    )
    await refused(settle, "settle_wait")
