"""Expiry: a run may have a deadline, by the clock of the record, and is over when it passes.

From then on nothing further is started, what runs is cut at its attempt, and the run fails with the code `run.timeout`;
what was lost is settled all the same, and an unknown outcome outranks the failure. A run that waits, and that nobody
drives, is taken up to be ended by whoever serves or recovers.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Final

import anyio

from ditto.clock import to_datetime
from ditto.engine.deadlines import RUN_TIMEOUT, Deadline, Limit, Timers, look_s
from ditto.engine.halt import Halt
from ditto.engine.outcomes import ErrorRecord
from ditto.errors import StepTimeoutError, TransitionRefusedError
from ditto.store import queries, transitions
from ditto.store.records import RunRow
from ditto.store.store import Store

PAGE: Final = 100


class RunDeadline:
    """The deadline of a run that is driven; it may have none. Used on the event loop's thread."""

    def __init__(self, run: RunRow, timers: Timers, halted: Halt) -> None:
        self._run = run
        self._timers = timers
        self._halted = halted
        self._attempts: set[anyio.CancelScope] = set()
        self.over: ErrorRecord | None = None
        """The run's error, once the deadline has passed."""

    @property
    def left_s(self) -> float:
        """Seconds until it passes."""
        at = self._run.deadline_at
        if at is None:
            return math.inf
        return self._timers.left_s("run", at, max(at - self._run.created_at, 0) / 1_000_000)

    @property
    def of_attempt(self) -> Deadline | None:
        """It, as a deadline of an attempt."""
        return None if self._run.deadline_at is None else Deadline(self.left_s, Limit.RUN)

    @contextmanager
    def cuts(self, attempt: anyio.CancelScope) -> Iterator[None]:
        """While inside, the attempt is cut when it passes, also if that is sooner by the clock of the record."""
        self._attempts.add(attempt)
        try:
            yield
        finally:
            self._attempts.discard(attempt)

    def is_over(self) -> bool:
        """Whether it has passed; then nothing further is started from now on."""
        if self.over is None and self.left_s <= 0:
            self.expire()
        return self.over is not None

    def expire(self) -> None:
        """It has passed. Safe to call twice."""
        if self.over is None and self._run.deadline_at is not None:
            self.over = _timeout_error(self._run.run_id, self._run.deadline_at)
            self._halted.set()
            for attempt in self._attempts:
                attempt.cancel()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """While inside, the run is halted when it passes, or at once if it has passed already."""
        timer: asyncio.TimerHandle | None = None

        def look() -> None:
            nonlocal timer
            if not self.is_over():
                timer = asyncio.get_running_loop().call_later(look_s(self.left_s), look)

        if self._run.deadline_at is not None:
            look()
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()


async def wake_expired(store: Store) -> bool:
    """Let runs whose deadline passed while they waited be taken up: a page of them. Whether there may be more."""
    expired = await store.read(queries.list_expired, store.clock.now_us(), PAGE)
    for run in expired:
        with suppress(TransitionRefusedError):  # it was woken, or ended, in the meantime
            await store.commit(partial(transitions.wake_expired, run=run))
    return len(expired) == PAGE


def _timeout_error(run_id: str, deadline_at: int) -> ErrorRecord:
    name = StepTimeoutError.__name__
    told = (
        f"run {run_id} missed its deadline, {to_datetime(deadline_at).isoformat()}; "
        "resume it, or run it with on_finished='reopen', with a new timeout_s"
    )
    return ErrorRecord(name, name, told, RUN_TIMEOUT, retryable=True)
