"""Time, as one small object that tests replace."""

from __future__ import annotations

import time
from datetime import UTC, datetime


class Clock:
    """The wall clock of the record. Durations inside a process are measured by the event loop's own clock."""

    def now_us(self) -> int:
        """Whole microseconds since the epoch, UTC."""
        return time.time_ns() // 1000


def to_datetime(at_us: int) -> datetime:
    """An aware UTC time."""
    return datetime.fromtimestamp(at_us / 1_000_000, UTC)
