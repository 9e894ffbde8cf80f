"""Halts: why nothing further is started, in a whole run or in one call of a Flow."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import anyio


class Halt:
    """Set once, for good: no further attempt may start; what was started is drained.

    An inner halt is set with its outer one, not the other way round.
    """

    def __init__(self, outer: Halt | None = None) -> None:
        self._is_set = False
        self._scopes: set[anyio.CancelScope] = set()
        self._inner: weakref.WeakSet[Halt] = weakref.WeakSet()
        if outer is not None:
            outer._inner.add(self)
            if outer.is_set():
                self.set()

    def set(self) -> None:
        """Start no further attempt, and give up the waiting for one."""
        self._is_set = True
        for scope in self._scopes:
            scope.cancel()
        for inner in list(self._inner):
            inner.set()

    def is_set(self) -> bool:
        """Whether no further attempt may start."""
        return self._is_set

    @contextmanager
    def until_set(self) -> Iterator[None]:
        """What is waited for inside is given up when this is set. Ask `is_set` afterwards."""
        with anyio.CancelScope() as scope:
            if self._is_set:
                scope.cancel()
            self._scopes.add(scope)
            try:
                yield
            finally:
                self._scopes.discard(scope)
