"""Halts: why nothing further is started, in a whole run or in one call of a Flow."""

from __future__ import annotations

import asyncio
import weakref


class Halt:
    """Like an event that is set once and stays set. An inner halt is set with its outer one, not the other way."""

    def __init__(self, outer: Halt | None = None) -> None:
        self._event = asyncio.Event()
        self._inner: weakref.WeakSet[Halt] = weakref.WeakSet()
        if outer is not None:
            outer._inner.add(self)
            if outer.is_set():
                self.set()

    def set(self) -> None:
        """Start nothing further."""
        self._event.set()
        for inner in self._inner:
            inner.set()

    def is_set(self) -> bool:
        """Whether nothing further may be started."""
        return self._event.is_set()

    async def wait(self) -> None:
        """Return when nothing further may be started."""
        await self._event.wait()
