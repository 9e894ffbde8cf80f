"""Waits: what a run may wait for, for a moment or for days. A wait costs a row.

- a **signal**: somebody's input to an open run, by name; queued if it comes early, delivered once;
- an **approval**: one decision on what is shown, bound to its digest; kept with who and when;
- a **child**: the end of another run, which a Flow started;
- a **timer**: by the clock of the record, so that it outlives the process and is unharmed by clock changes inside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Final, Literal, TypeAlias

from ditto.errors import DefinitionError

SECONDS_MAX: Final = 100 * 365 * 24 * 3600.0
"""The longest wait: a hundred years."""


OnWait: TypeAlias = Literal["block", "return"]
"""What a caller wants when its run waits: to wait, too, or to be told."""

ON_WAIT: Final[tuple[OnWait, ...]] = ("block", "return")


class WaitKind(StrEnum):
    """What is waited for; the node type of a wait."""

    SIGNAL = "WAIT.SIGNAL"
    APPROVAL = "WAIT.APPROVAL"
    TIMER = "WAIT.TIMER"
    CHILD = "WAIT.CHILD"


@dataclass(frozen=True, slots=True)
class Wait:
    """A wait, as it is defined.

    `name` is the signal's or the question's name. `seconds` is how long a timer runs, or after how long the wait for
    a signal or an approval is over without one; a number, or a pure function of the bound values.
    """

    kind: WaitKind
    name: str
    seconds: float | Callable[..., float] | None = None
    seconds_names: tuple[str, ...] = ()

    def duration_s(self, values: dict[str, Any]) -> float | None:
        """How long, for these values. Raises DefinitionError for what is no duration."""
        seconds = self.seconds(**values) if callable(self.seconds) else self.seconds
        return None if seconds is None else check_seconds(seconds, owner=f"wait {self.name}")


def check_seconds(seconds: float, *, owner: str) -> float:
    """A duration from 0 to a hundred years. Raises DefinitionError for a negative one, NaN, or more."""
    if type(seconds) not in (int, float) or math.isnan(seconds):
        raise DefinitionError(f"{owner}: {seconds!r} is no duration in seconds")
    if not 0 <= seconds <= SECONDS_MAX:
        raise DefinitionError(f"{owner}: a duration is 0 to {SECONDS_MAX:.0f} s, not {seconds}")
    return float(seconds)


def check_timeout(seconds: float, *, owner: str) -> float:
    """A duration as `check_seconds`, and more than 0."""
    if check_seconds(seconds, owner=owner) == 0:
        raise DefinitionError(f"{owner}: it must be more than 0 s")
    return float(seconds)


@dataclass(frozen=True, slots=True)
class Waiting:
    """What `run(…, on_wait="return")` returns for a run that waits: nothing drives it until it is woken."""

    run_id: str
    waits: tuple[OpenWait, ...]


@dataclass(frozen=True, slots=True)
class OpenWait:
    """One wait of a run, while it is open. `shown` is what an approval is about, `digest` what a decision names."""

    step: str
    kind: WaitKind
    name: str
    shown: Any = None
    digest: str | None = None
    due_at: datetime | None = None
    """When it is over by itself."""
