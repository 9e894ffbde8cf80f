"""Cancelling a task at its n-th wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from typing import Any


class CancelAt:
    """Awaits a coroutine, and cancels the task that does so when it waits for the n-th time, for each n given."""

    def __init__(self, work: Coroutine[Any, Any, Any], *waits: int, before: Callable[[], None] = lambda: None) -> None:
        self._work = work
        self._before = before
        self._waits = waits
        self.count = 0
        """How often it has waited."""

    def __await__(self) -> Generator[Any, Any, Any]:
        task = asyncio.current_task()
        assert task is not None
        thrown: BaseException | None = None
        while True:
            try:
                pending = self._work.send(None) if thrown is None else self._work.throw(thrown)
            except StopIteration as end:
                return end.value
            self.count += 1
            if self.count in self._waits:
                self._before()
                task.cancel()
            thrown = None
            try:
                yield pending
            except BaseException as error:  # noqa: BLE001 - handed on to the coroutine, whatever it is
                thrown = error
