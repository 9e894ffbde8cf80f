"""Retrying: whether a failed attempt is followed by another, when, and when no more.

An attempt is followed by another if a policy allows it, the outcome is safe to repeat and the error does not say
`retryable=False`. The time of the next one is written with the failure, in one transaction: after a kill the wait goes
on where it was, and is not drawn anew.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from ditto.engine.deadlines import TOTAL_TIMEOUT, Deadline, Limit, Timers
from ditto.engine.outcomes import MESSAGE_MAX, Failed, Outcome, Refused
from ditto.graph import Retry
from ditto.store.records import StepRow


@dataclass(frozen=True, slots=True)
class Again:
    """The attempt failed, and another one follows after so long."""

    outcome: Failed | Refused
    delay_s: float


def decide_retry(
    outcome: Outcome,
    retry: Retry | None,
    *,
    admitted: bool,
    tries: int,
    left_s: float | None = None,
    random_unit: Callable[[], float] = random.random,
) -> Outcome | Again:
    """What follows an attempt that came to `outcome`: another one, or the outcome as it is to be recorded.

    `admitted` says that only a refusal is safe to repeat. `tries` counts those that this policy has made, `left_s` is
    what is left of its total. Where the total or too long a wait ends the tries, the error says so.
    """
    if retry is None or not isinstance(outcome, Failed | Refused):
        return outcome
    if outcome.error.final or (admitted and isinstance(outcome, Failed)):
        return outcome
    if outcome.error.code == TOTAL_TIMEOUT or (left_s is not None and left_s <= 0):
        return total_over(outcome, retry, tries)
    if not outcome.again or tries >= retry.max_attempts:
        return outcome
    delay_s, asked_s = retry.delay_s(tries, random_unit=random_unit), outcome.error.retry_after_s
    if asked_s is not None and asked_s > delay_s:
        limit_s = retry.max_s if left_s is None else min(retry.max_s, left_s)
        if asked_s > limit_s:
            whose = "max_s" if limit_s == retry.max_s else f"what is left of total_s {retry.total_s:g}"
            return _told(outcome, f"asked to wait {asked_s:.10g} s, the limit is {limit_s:.10g} s (Retry: {whose})")
        return Again(outcome, asked_s)
    if left_s is not None and delay_s >= left_s:
        return total_over(outcome, retry, tries)
    return Again(outcome, delay_s)


def total_over(outcome: Failed | Refused, retry: Retry, tries: int) -> Failed | Refused:
    """The outcome of the last of so many tries, when there is no time for another one."""
    made = "1 try was made" if tries == 1 else f"{tries} tries were made"
    return _told(outcome, f"total deadline of {retry.total_s:g} s: {made}", code=TOTAL_TIMEOUT)


def _told(outcome: Failed | Refused, why: str, *, code: str | None = None) -> Failed | Refused:
    """The outcome with the reason why nothing follows it. What its worker made of it stays."""
    error, message = outcome.error, f"{why}; the last: {outcome.error.message}"
    return replace(outcome, error=replace(error, code=code or error.code, message=message[:MESSAGE_MAX]))


class Total:
    """The time for all tries at a step, waits included. It begins with the first one, and holds over restarts."""

    def __init__(self, retry: Retry | None, timers: Timers, path: str, at_us: int | None) -> None:
        self._total_s = None if retry is None else retry.total_s
        self._timers = timers
        self._name = ("total", path)
        self.at_us = at_us
        """When it is over; None if no try has been made yet, or there is no limit."""
        self.is_over = False

    def begin(self, now_us: int) -> None:
        """The first try begins, if it has not begun before."""
        if self._total_s is not None and self.at_us is None:
            self.at_us = now_us + round(self._total_s * 1_000_000)

    @property
    def left_s(self) -> float | None:
        """What is left, 0 once it is over; None if nothing is limited yet."""
        if self._total_s is None or self.at_us is None:
            return None
        left_s = self._timers.left_s(self._name, self.at_us, self._total_s)
        self.is_over = self.is_over or left_s == 0
        return 0.0 if self.is_over else left_s

    @property
    def deadline(self) -> Deadline | None:
        """It, as a deadline of the next attempt."""
        left_s = self.left_s
        return None if left_s is None else Deadline(left_s, Limit.TOTAL, self._total_s)

    def forget(self) -> None:
        """The step has come to its end."""
        self._timers.forget(self._name)


def back_off_left_s(timers: Timers, row: StepRow) -> float:
    """Seconds until the next attempt at a step that is retried; never more than the whole wait."""
    assert row.due_at is not None
    whole_s = math.inf if row.settled_at is None else max(row.due_at - row.settled_at, 0) / 1_000_000
    return timers.left_s(("retry", row.path), row.due_at, whole_s)
