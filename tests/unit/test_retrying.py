"""What follows a failed attempt: another one, when, and why no more."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from typing import Any

import pytest

from ditto.effects import EffectClass
from ditto.engine.deadlines import TOTAL_TIMEOUT, Deadline, Limit, Timers, choose_deadline, earliest, look_s
from ditto.engine.outcomes import Completed, End, ErrorRecord, Failed, Outcome, Refused, Unknown, decide
from ditto.engine.retrying import Again, back_off_left_s, decide_retry
from ditto.errors import (
    ConfigError,
    EffectNotMade,
    EffectRejected,
    InvalidValueError,
    OutputError,
    SandboxDenied,
    StepError,
    ToolError,
)
from ditto.graph import Retry
from ditto.store.records import StepRow
from ditto.store.schema import StepState
from ditto.store.values import Stored
from ditto.worker import Action
from tests.engine.scene import MovedClock

RETRY = Retry(3, initial_s=1, factor=2, max_s=10, jitter=0)


def outcome_of(error: Exception, effect: EffectClass = EffectClass.READ) -> Outcome:
    action = Action(label="tool pay", effect=effect, call=lambda ctx: None, is_async=False)
    return decide(action, End(error=error), "pay", lambda value, what: Stored("1", "1"), lambda text: text)


def after(error: Exception, *, effect: EffectClass = EffectClass.READ, tries: int = 1, **options: Any) -> Any:
    """What follows an attempt that raised `error`."""
    retry = options.pop("retry", RETRY)
    return decide_retry(outcome_of(error, effect), retry, admitted=effect.admitted, tries=tries, **options)


# Whether


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (ValueError("no"), True),
        (TimeoutError("no"), True),
        (EffectNotMade("no"), True),
        (EffectNotMade("no", retryable=False), False),
        (StepError("no"), False),
        (StepError("no", retryable=True), True),
        (ToolError("no"), False),
        (ToolError("no", retryable=True), True),
        (OutputError("no"), False),
        (OutputError("no", retryable=True), True),
        (EffectRejected("no", retryable=True), False),
        (SandboxDenied("no"), False),
        (ConfigError("no"), False),
        (InvalidValueError("no"), False),
    ],
    ids=lambda value: (
        f"{type(value).__name__} {getattr(value, 'retryable', '')}" if isinstance(value, Exception) else ""
    ),
)
def test_an_error_that_says_so_is_not_tried_again(error: Exception, again: bool) -> None:
    assert isinstance(after(error), Again) is again


def test_what_may_have_been_made_is_not_tried_again() -> None:
    for effect in (EffectClass.WRITE, EffectClass.INFER):
        assert isinstance(after(EffectNotMade("no"), effect=effect), Again)
        assert isinstance(after(EffectNotMade("no", retryable=False), effect=effect), Refused)
        assert isinstance(after(ToolError("no", retryable=True), effect=effect), Failed)
        assert isinstance(after(OutputError("no", retryable=True), effect=effect), Failed)
        assert isinstance(after(ValueError("no"), effect=effect), Unknown)


def test_without_a_policy_or_a_failure_nothing_follows() -> None:
    assert isinstance(after(ValueError("no"), retry=None), Failed)
    value = Completed(Stored("1", "1"))
    assert decide_retry(value, RETRY, admitted=False, tries=1) is value


def test_the_tries_are_counted() -> None:
    assert [isinstance(after(ValueError("no"), tries=tries), Again) for tries in (1, 2, 3, 4)] == [
        True,
        True,
        False,
        False,
    ]


# When


def test_the_back_off_is_that_of_the_policy_and_jitter_is_drawn_once() -> None:
    assert [after(ValueError("no"), tries=tries).delay_s for tries in (1, 2)] == [1, 2]
    drawn = iter([0.25])
    jittered = after(ValueError("no"), retry=Retry(jitter=1, initial_s=1), random_unit=lambda: next(drawn))
    assert jittered.delay_s == 0.75


@pytest.mark.parametrize(
    ("asked", "delay_s"),
    [
        (2, 2),
        (1.5, 1.5),
        (10, 10),
        (0.5, 1),
        (0, 1),
        (-3, 1),
        (math.nan, 1),
        (math.inf, 1),
        ("2", 1),
        (True, 1),
        (None, 1),
    ],
)
def test_m01_what_the_other_side_asks_for_is_waited_if_it_is_longer(asked: Any, delay_s: float) -> None:
    assert after(EffectNotMade("busy", retry_after_s=asked)).delay_s == delay_s


def test_m01_a_wait_beyond_the_limit_ends_the_tries_at_once() -> None:
    found = after(EffectNotMade("429: busy", code="provider.http_429", retry_after_s=999999), effect=EffectClass.INFER)
    assert isinstance(found, Refused)
    assert found.error.message == ("asked to wait 999999 s, the limit is 10 s (Retry: max_s); the last: 429: busy")
    assert (found.error.code, found.error.retry_after_s) == ("provider.http_429", 999999)
    error = found.error.to_error("run")
    assert isinstance(error, EffectNotMade)
    assert error.retry_after_s == 999999


def test_m01_what_is_left_of_the_total_is_a_limit_too() -> None:
    retry = Retry(3, initial_s=1, max_s=10, jitter=0, total_s=20)
    found = after(EffectNotMade("busy", retry_after_s=8), retry=retry, left_s=7.5)
    assert isinstance(found, Failed)
    assert found.error.message.startswith("asked to wait 8 s, the limit is 7.5 s (Retry: what is left of total_s 20)")
    assert after(EffectNotMade("busy", retry_after_s=7), retry=retry, left_s=7.5).delay_s == 7


# The total


@pytest.mark.parametrize("left_s", [0, 0.5, 1])
def test_e11_no_wait_begins_that_the_total_would_end(left_s: float) -> None:
    found = after(ValueError("slow"), retry=Retry(9, initial_s=1, jitter=0, total_s=30), tries=2, left_s=left_s)
    assert isinstance(found, Failed)
    assert found.error.message == "total deadline of 30 s: 2 tries were made; the last: slow"
    assert found.error.code == TOTAL_TIMEOUT


def test_e11_an_attempt_that_the_total_cut_is_the_last() -> None:
    action = Action(label="tool pay", effect=EffectClass.READ, call=lambda ctx: None, is_async=False)
    missed = End(deadline=Deadline(0.2, Limit.TOTAL, 30))
    cut = decide(action, missed, "pay", lambda value, what: Stored("1", "1"), lambda text: text)
    found = decide_retry(cut, Retry(9, initial_s=0, total_s=30), admitted=False, tries=1, left_s=0.001)
    assert isinstance(found, Failed)
    assert found.error.message == (
        "total deadline of 30 s: 1 try was made; the last: tool pay missed the total deadline of 30 s for all its tries"
    )


def test_a_final_failure_says_nothing_of_tries() -> None:
    found = after(EffectRejected("no"), retry=Retry(total_s=30), left_s=0)
    assert isinstance(found, Failed)
    assert found.error.message == "no"


# Records


def test_a_record_of_an_earlier_release_has_no_wait() -> None:
    record = ErrorRecord("EffectNotMade", "EffectNotMade", "busy", "effect.not_made", True)
    older = record.to_text().replace(', "retry_after_s": null', "")
    assert older != record.to_text()
    assert ErrorRecord.from_text(older) == record


# Deadlines and timers


def test_the_earliest_deadline_counts() -> None:
    own, total, run = choose_deadline(5, None, 1), Deadline(3, Limit.TOTAL, 9), Deadline(4, Limit.RUN)
    assert own == Deadline(5)
    assert earliest(own, None, total, run) is total
    assert earliest(None) is None
    assert choose_deadline(5, 2, None) == Deadline(2, Limit.ACTION)
    assert choose_deadline(None, None, 7) == Deadline(7)


def test_a_timer_looks_at_the_clock_now_and_then() -> None:
    assert [look_s(left_s) for left_s in (-1, 0, 0.25, 1, 1e9, math.inf)] == [0, 0, 0.25, 1, 1, math.inf]


class Moments(asyncio.SelectorEventLoop):
    """An event loop whose own clock is moved by hand."""

    at_s = 50.0

    def time(self) -> float:
        return self.at_s


@pytest.fixture
def loop() -> Iterator[Moments]:
    loop = Moments()
    asyncio._set_running_loop(loop)
    yield loop
    asyncio._set_running_loop(None)
    loop.close()


def test_s01_a_clock_that_is_set_back_makes_no_wait_longer(loop: Moments) -> None:
    clock = MovedClock()
    timers = Timers(clock)
    due = clock.at + 10_000_000
    assert timers.left_s("a", due) == 10
    clock.move(-3600)
    assert timers.left_s("a", due) == 10
    loop.at_s += 4
    assert timers.left_s("a", due) == 6
    loop.at_s += 7
    assert timers.left_s("a", due) == 0


def test_s01_a_clock_that_is_set_forward_ends_a_wait_and_none_is_negative(loop: Moments) -> None:
    clock = MovedClock()
    timers = Timers(clock)
    due = clock.at + 10_000_000
    assert timers.left_s("a", due) == 10
    clock.move(3600)
    assert timers.left_s("a", due) == 0
    timers.forget("a")
    assert timers.left_s("a", due + 1) == 0


def test_s01_after_a_restart_no_wait_is_longer_than_the_whole(loop: Moments) -> None:
    clock = MovedClock()
    row = StepRow("a", "STEP", "1", "[]", "read", StepState.RETRYING, 1)
    row.settled_at, row.due_at = clock.at, clock.at + 10_000_000
    clock.move(4)
    assert back_off_left_s(Timers(clock), row) == 6
    clock.move(-3600)
    assert back_off_left_s(Timers(clock), row) == 10


def test_a_new_moment_under_an_old_name_is_counted_anew(loop: Moments) -> None:
    clock = MovedClock()
    timers = Timers(clock)
    assert timers.left_s("a", clock.at + 1_000_000) == 1
    loop.at_s += 1
    clock.move(1)
    assert timers.left_s("a", clock.at + 5_000_000) == 5


@pytest.mark.parametrize("days", [25, 50, 3650])
def test_s02_a_very_long_wait_does_not_overflow(loop: Moments, days: int) -> None:
    clock = MovedClock()
    delay_s = Retry(initial_s=days * 86_400, max_s=days * 86_400, jitter=0).delay_s(1)
    due = clock.at + round(delay_s * 1_000_000)
    timers = Timers(clock)
    assert timers.left_s("a", due) == days * 86_400
    clock.move(days * 86_400 - 1)
    assert timers.left_s("a", due) == 1
    clock.move(1)
    assert timers.left_s("a", due) == 0
