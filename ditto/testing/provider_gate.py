"""What a test in the same process waits for, and lets go, without sleeping.

Owns the counts of what has happened at the provider since it started, and the release of what is stalled. Start at
`Gate.reached`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import anyio


@dataclass(slots=True)
class Gate:
    """Counts that only rise, an event for each change of them, and an event for the next release."""

    arrived: int = 0
    """Requests to the model that are recorded."""
    stalled: int = 0
    """Stalls that were entered."""
    gone: int = 0
    """Clients that went away from an answer that was stalled or delayed."""
    held: int = 0
    """Stalls that are open now; the one count that falls."""
    _changed: anyio.Event = field(default_factory=anyio.Event)
    _released: anyio.Event = field(default_factory=anyio.Event)

    async def reached(self, *, arrived: int = 0, stalled: int = 0, gone: int = 0) -> None:
        """Returns once each count is at least what is asked for."""
        while self.arrived < arrived or self.stalled < stalled or self.gone < gone:
            await self._changed.wait()

    def note(self, *, arrived: int = 0, gone: int = 0) -> None:
        """Counts what has happened, and wakes who waits for it."""
        self.arrived += arrived
        self.gone += gone
        self._wake()

    async def hold(self) -> None:
        """One stall: returns at the next release."""
        released = self._released
        self.stalled += 1
        self.held += 1
        self._wake()
        try:
            await released.wait()
        finally:
            if not released.is_set():
                self.held -= 1

    def release(self) -> int:
        """Ends every stall that is open now, and says how many these are. Later stalls are not touched."""
        released, self._released = self._released, anyio.Event()
        count, self.held = self.held, 0
        released.set()
        return count

    def _wake(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()
