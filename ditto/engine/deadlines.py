"""Deadlines: what bounds an attempt, and how long it is until a moment of the record.

Four limits may cut an attempt: its own (the node's `timeout_s`, or the configured one), its tool's, the total of all
tries at the step, and the run's. The earliest one counts, and it says in the record which one it was.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum
from typing import Final

from ditto.clock import Clock

CLOCK_LOOK_S: Final = 1.0
"""How long a timer may sleep before it looks at the clock of the record again."""

RUN_TIMEOUT: Final = "run.timeout"
TOTAL_TIMEOUT: Final = "step.total_timeout"


class Limit(Enum):
    """Whose deadline it is."""

    STEP = "step"
    ACTION = "action"
    """The action's own, for example a tool's: it may become a value."""
    TOTAL = "total"
    """That of all tries at the step."""
    RUN = "run"


@dataclass(frozen=True, slots=True)
class Deadline:
    """Seconds that an attempt may take now. `stated_s` is the limit as it was given, if that is another number."""

    left_s: float
    limit: Limit = Limit.STEP
    stated_s: float | None = None

    def __str__(self) -> str:
        match self.limit:
            case Limit.RUN:
                return "the deadline of its run"
            case Limit.TOTAL:
                return f"the total deadline of {self.stated_s:g} s for all its tries"
            case Limit.STEP | Limit.ACTION:
                return f"its deadline of {self.left_s} s"


def choose_deadline(node_s: float | None, action_s: float | None, default_s: float | None) -> Deadline | None:
    """The earliest of the node's deadline (or the configured default) and the action's own."""
    node_s = default_s if node_s is None else node_s
    if action_s is not None and (node_s is None or action_s < node_s):
        return Deadline(action_s, Limit.ACTION)
    return None if node_s is None else Deadline(node_s)


def earliest(*deadlines: Deadline | None) -> Deadline | None:
    """The one that comes first; the first of two that come at once."""
    return min((each for each in deadlines if each is not None), key=lambda each: each.left_s, default=None)


def look_s(left_s: float) -> float:
    """How long to sleep before looking again, for a moment so far away: the clock of the record may jump."""
    return left_s if left_s == math.inf else min(max(left_s, 0.0), CLOCK_LOOK_S)


class Timers:
    """How long it is until moments of the record, in one process.

    A moment comes by the clock of the record, so that it holds over restarts. By the event loop's own clock it never
    comes later than it was away when it was first asked for: a clock that is set back makes no wait longer.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._latest: dict[Hashable, tuple[int, float]] = {}

    def left_s(self, name: Hashable, at_us: int, longest_s: float = math.inf) -> float:
        """Seconds until `at_us`, 0 once it has come. `longest_s` is as far as it can ever have been away."""
        now = asyncio.get_running_loop().time()
        left_s = (at_us - self._clock.now_us()) / 1_000_000
        asked = self._latest.get(name)
        if asked is None or asked[0] != at_us:
            asked = self._latest[name] = (at_us, now + max(min(left_s, longest_s), 0.0))
        return max(min(left_s, asked[1] - now), 0.0)

    def forget(self, name: Hashable) -> None:
        """It is not asked for any more."""
        self._latest.pop(name, None)
