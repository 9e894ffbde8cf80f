"""A fault at each statement in turn, until none is left: the state is whole, and the next attempt goes on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import pytest

from ditto.clock import Clock
from ditto.errors import StoreError
from ditto.store import transitions
from ditto.store.committer import Transition
from ditto.store.records import COMPLETED, Event, Fence, LoopState, RunEnd, RunRow, Seen
from ditto.store.schema import RunStatus, StepState
from ditto.store.store import Store
from tests.store.conformance.under_test import Fault, StoreUnderTest, opened
from tests.store.scenes import Picture, get, new_run, signal_wait, step, stored, told

Commit: TypeAlias = Callable[..., Awaitable[Any]]
Life: TypeAlias = Callable[[Store, Commit], Awaitable[None]]

LARGE = "x" * 3000


class Still(Clock):
    """Two lives look the same."""

    def now_us(self) -> int:
        return 1_000_000


async def work(store: Store, commit: Commit) -> None:
    """Three outcomes, an admission, its outcome, the end."""
    run = await commit(lambda tx: transitions.create_run(tx, new_run(input=LARGE), (Event("run_created"),)))
    fence = Fence(run, "owner", 1, "run", "flow")
    rows = [step("a"), step("b", output=LARGE), step("c", StepState.SKIPPED)]
    await commit(lambda tx: transitions.record_steps(tx, fence, rows, [told(row) for row in rows]))
    admitted = step("pay", StepState.ADMITTED)
    await commit(lambda tx: transitions.record_steps(tx, fence, [admitted], [told(admitted)]))
    settled, seen = step("pay", output=LARGE + "y"), Seen(StepState.ADMITTED, 1)
    await commit(
        lambda tx: transitions.move_step(tx, fence, settled, seen, [told(settled)]),
        lambda tx: transitions.release_run(tx, fence, COMPLETED),
    )


async def change_hands(store: Store, commit: Commit) -> None:
    """A wait, a signal that was early, one that ends the wait; a lost step that a person settles; another owner."""
    run = await commit(lambda tx: transitions.create_run(tx, new_run(), (Event("run_created"),)))
    fence = Fence(run, "owner", 1, "run", "flow")
    for name in ("go", "on"):
        await commit(lambda tx, name=name: transitions.send_signal(tx, run, name, f"id {name}", stored(LARGE), "ada"))
    wait, begun = signal_wait("wait", "go"), Event("step_waiting", "wait")
    await commit(lambda tx: transitions.begin_wait(tx, fence, wait, "go", begun))
    late, begun_late = signal_wait("late", "never"), Event("step_waiting", "late")
    await commit(lambda tx: transitions.begin_wait(tx, fence, late, "never", begun_late))
    pay = step("pay", StepState.ADMITTED)
    await commit(lambda tx: transitions.record_steps(tx, fence, [pay], [told(pay)]))
    unknown = RunEnd(RunStatus.UNKNOWN, '{"message": "lost"}', Event("run_unknown"))
    await commit(lambda tx: transitions.release_run(tx, fence, unknown))
    over = Event("wait_over", "late")
    await commit(lambda tx: transitions.settle_wait(tx, run, "late", 1, stored({"timed_out": True}), over))
    found, settled = Seen(StepState.ADMITTED, 1), Event("step_completed", "pay")
    await commit(
        lambda tx: transitions.resolve_step(
            tx, run, "pay", found, StepState.COMPLETED, stored(LARGE + "y"), None, settled
        )
    )
    seen: RunRow = await get(store)
    number = await commit(lambda tx: transitions.claim_run(tx, seen, "other", [Event("run_resumed")], deadline_at=None))
    other = Fence(run, "other", number, "run", "flow")
    state = LoopState(1, stored({"n": LARGE + "z"}))
    await commit(lambda tx: transitions.record_steps(tx, other, [], [Event("loop_advanced")], [state]))
    await commit(lambda tx: transitions.cancel_run(tx, run, Event("run_cancelled")))
    await commit(lambda tx: transitions.note_event(tx, run, Event("step_returned_late", "pay"), stored(LARGE + "l")))


@pytest.mark.asyncio
@pytest.mark.parametrize("fault", Fault)
@pytest.mark.parametrize("burst", [1, 3])
@pytest.mark.parametrize("life", [work, change_hands], ids=lambda life: life.__name__)
async def test_a_fault_at_any_statement_leaves_a_whole_state_and_the_next_attempt_goes_on(
    under_test: StoreUnderTest, fault: Fault, burst: int, life: Life
) -> None:
    pictures = [await picture_when_empty(under_test)]
    async with opened(under_test, clock=Still()) as store:

        async def commit_soundly(*given: Transition) -> Any:
            result = await store.commit(*given)
            pictures.append(under_test.look())
            return result

        await life(store, commit_soundly)
    for at in range(1, 1000):
        broken, done, met = under_test.fresh(), 0, 0
        async with opened(broken, clock=Still()) as store:

            async def commit(*given: Transition, store: Store = store, broken: StoreUnderTest = broken) -> Any:
                nonlocal done, met
                while True:
                    try:
                        result = await store.commit(*given)
                    except StoreError as error:
                        met += 1
                        # In a burst, the connection that should look for the commit may fail, too.
                        assert burst > 1 or (type(error), "nothing was written" in str(error)) == (fault.error, True)
                        assert "nothing was written" in str(error) or error.code == "store.commit_unknown"
                        assert broken.name in str(error)
                        assert error.retryable
                        assert broken.look() == pictures[done]
                        assert broken.can_write()
                    else:
                        done += 1
                        return result

            broken.faults.arm(fault, at, until=at + burst - 1)
            await life(store, commit)
            reached = bool(broken.faults.met)
            broken.faults.disarm()
            assert broken.look() == pictures[-1]
        if not reached:
            assert at > 20
            return
        assert met >= 1
    pytest.fail("the faults did not run out")


async def picture_when_empty(under_test: StoreUnderTest) -> Picture:
    async with opened(under_test):
        return under_test.look()


@pytest.mark.asyncio
@pytest.mark.parametrize("life", [work, change_hands], ids=lambda life: life.__name__)
async def test_a_commit_that_reports_an_error_and_happened_is_told_as_one(
    under_test: StoreUnderTest, life: Life
) -> None:
    """Whichever transition it is of; a repetition would be refused, or would write twice."""
    async with opened(under_test, clock=Still()) as store:
        await life(store, store.commit)
        sound, commits = under_test.look(), store.commits
    for at in range(1, commits + 1):
        broken = under_test.fresh()
        async with opened(broken, clock=Still()) as store:
            broken.faults.arm(Fault.IO, at, only="COMMIT", after=True)
            await life(store, store.commit)
            assert len(broken.faults.met) == 1
            assert store.commits == commits
        assert broken.look() == sound
