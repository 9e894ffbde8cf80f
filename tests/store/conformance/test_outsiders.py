"""An owner and an outsider who write to one run at once: what each has decided stands, or is refused as a whole.

The owner drives a run with an admitted step `pay` and a waiting step `ask`. Each thing that it does comes before, after
and beside each thing that an outsider does, from a connection of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, TypeAlias

import pytest

from ditto.errors import TransitionRefusedError
from ditto.store import queries, transitions
from ditto.store.committer import Transition
from ditto.store.records import COMPLETED, INTERRUPTED, Event, Fence, Seen
from ditto.store.schema import StepState
from ditto.store.store import Store
from tests.store.conformance.under_test import StoreUnderTest, opened
from tests.store.scenes import create, record, signal_wait, step, stored, told

pytestmark = pytest.mark.asyncio

ADMITTED: Final = Seen(StepState.ADMITTED, 1)
PAID: Final = step("pay", output="paid")

Act: TypeAlias = Callable[[Fence], Transition]

OWNER: Final[dict[str, Act]] = {
    "outcome": lambda fence: lambda tx: transitions.move_step(tx, fence, PAID, ADMITTED, [told(PAID)]),
    "step": lambda fence: lambda tx: transitions.record_steps(tx, fence, [step("a")], [told(step("a"))]),
    "wait": lambda fence: (
        lambda tx: transitions.begin_wait(tx, fence, signal_wait("other", "go"), "go", Event("step_waiting", "other"))
    ),
    "time": lambda fence: (
        lambda tx: transitions.settle_wait(
            tx, fence.run, "ask", 1, stored({"timed_out": True}), Event("wait_over", "ask")
        )
    ),
    "let go": lambda fence: lambda tx: transitions.release_run(tx, fence, INTERRUPTED),
    "end": lambda fence: lambda tx: transitions.release_run(tx, fence, COMPLETED),
}

OUTSIDER: Final[dict[str, Act]] = {
    "signal": lambda fence: lambda tx: transitions.send_signal(tx, fence.run, "go", "1", stored(1), "ada"),
    "decision": lambda fence: (
        lambda tx: transitions.settle_wait(
            tx, fence.run, "ask", 1, stored({"decision": "approve"}), Event("approval_decided", "ask")
        )
    ),
    "settlement": lambda fence: (
        lambda tx: transitions.resolve_step(
            tx, fence.run, "pay", ADMITTED, StepState.COMPLETED, stored("seen"), None, Event("step_completed", "pay")
        )
    ),
    "cancel": lambda fence: lambda tx: transitions.cancel_run(tx, fence.run, Event("run_cancelled")),
}

FIRST_WINS: Final = {("outcome", "settlement"), ("time", "decision"), ("end", "cancel")}
"""Whichever comes first, the other is refused."""

REFUSED_AFTER_OWNER: Final = FIRST_WINS | {("end", "signal"), ("end", "decision")}

REFUSED_AFTER_OUTSIDER: Final = FIRST_WINS | {(owner, "cancel") for owner in OWNER}
"""A cancelled run is nobody's: neither its outcomes nor the ends of its waits are written any more."""


async def done(store: Store, transition: Transition) -> bool:
    """Whether it was written; if not, it was refused."""
    try:
        await store.commit(transition)
    except TransitionRefusedError:
        return False
    return True


async def begin(store: Store) -> Fence:
    """A run that the owner drives."""
    fence = await create(store)
    await record(store, fence, step("pay", StepState.ADMITTED))
    ask = signal_wait("ask", "never")
    await store.commit(lambda tx: transitions.begin_wait(tx, fence, ask, "never", Event("step_waiting", "ask")))
    return fence


def check(under_test: StoreUnderTest, owner: str, outsider: str, wrote: tuple[bool, bool]) -> None:
    """The record says of each what it was told."""
    picture = under_test.look()
    kinds = [(kind, step) for _, _, kind, step, _ in picture.events]
    states = {path: (state, output) for _, path, state, _, output in picture.steps}
    [(_, _, status, driver, *_)] = picture.runs
    if (owner, outsider) == ("outcome", "settlement"):
        assert states["pay"] == ("completed", '"paid"' if wrote[0] else '"seen"')
        assert kinds.count(("step_completed", "pay")) == 1
    if (owner, outsider) == ("time", "decision"):
        assert (("wait_over", "ask") in kinds, ("approval_decided", "ask") in kinds) == wrote
    if outsider == "cancel":
        assert (status, driver) == ("cancelled" if wrote[1] else "completed", None)
        assert kinds.count(("run_cancelled", None)) == wrote[1]
    if outsider == "signal":
        assert under_test.rows("SELECT count(*) FROM ditto_signals") == [(int(wrote[1]),)]
        if owner == "wait":
            assert states["other"][0] == "completed"


@pytest.mark.parametrize("outsider", OUTSIDER)
@pytest.mark.parametrize("owner", OWNER)
@pytest.mark.parametrize("first", ["owner", "outsider"])
async def test_what_was_written_first_stands(
    under_test: StoreUnderTest, store: Store, owner: str, outsider: str, first: str
) -> None:
    fence = await begin(store)
    ours, theirs = OWNER[owner](fence), OUTSIDER[outsider](fence)
    async with opened(under_test) as outside:
        if first == "owner":
            wrote = (await done(store, ours), await done(outside, theirs))
            assert wrote == (True, (owner, outsider) not in REFUSED_AFTER_OWNER)
        else:
            theirs_written = await done(outside, theirs)
            wrote = (await done(store, ours), theirs_written)
            assert wrote == ((owner, outsider) not in REFUSED_AFTER_OUTSIDER, True)
    check(under_test, owner, outsider, wrote)


@pytest.mark.parametrize("outsider", OUTSIDER)
@pytest.mark.parametrize("owner", OWNER)
async def test_who_write_at_once_come_one_after_the_other(
    under_test: StoreUnderTest, store: Store, owner: str, outsider: str
) -> None:
    fence = await begin(store)
    async with opened(under_test) as outside:
        ours = done(store, OWNER[owner](fence))
        theirs = done(outside, OUTSIDER[outsider](fence))
        wrote = await asyncio.gather(ours, theirs)
    either = {
        (True, (owner, outsider) not in REFUSED_AFTER_OWNER),
        ((owner, outsider) not in REFUSED_AFTER_OUTSIDER, True),
    }
    assert tuple(wrote) in either
    check(under_test, owner, outsider, (wrote[0], wrote[1]))


async def test_what_comes_too_late_is_kept_as_a_line_of_history(under_test: StoreUnderTest, store: Store) -> None:
    fence = await begin(store)
    async with opened(under_test) as outside:
        assert await done(outside, OUTSIDER["cancel"](fence))
    assert not await done(store, OWNER["outcome"](fence))
    late = Event("step_returned_late", "pay", {"attempt": 1})
    await store.commit(lambda tx: transitions.note_event(tx, fence.run, late, stored("x" * 1000)))
    picture = under_test.look()
    assert picture.events[-1][2] == "step_returned_late"
    assert ("run", "pay", "admitted", 1, None) in picture.steps
    run = await store.read(queries.get_run, "run")
    assert run is not None
    assert run.status == "cancelled"
