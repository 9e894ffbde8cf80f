"""What the conformance suite asks of a store under test. One implementation a dialect; `stores.py` lists them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from enum import StrEnum
from typing import Any, Protocol, TypeAlias

from ditto import Runtime
from ditto.clock import Clock
from ditto.errors import StoreBusyError, StoreError, StoreFullError, TransitionRefusedError
from ditto.store.committer import Transition
from ditto.store.store import Store
from tests.store.scenes import Picture


class Fault(StrEnum):
    """What a statement may meet."""

    LOCKED = "locked"
    """Somebody else has a lock that it needs, and does not give it up in time."""
    FULL = "full"
    """There is no space."""
    IO = "I/O"
    """The disk, or the connection, is gone in the middle of it."""

    @property
    def error(self) -> type[StoreError]:
        """How the store tells it."""
        match self:
            case Fault.LOCKED:
                return StoreBusyError
            case Fault.FULL:
                return StoreFullError
            case Fault.IO:
                return StoreError


class Faults(Protocol):
    """What the statements of the writing connections meet. They are counted from 1 after `arm`."""

    met: list[str]
    """The statements that failed."""

    def arm(self, fault: Fault, at: int, *, until: int = 0, only: str = "", after: bool = False) -> None:
        """From now on the statement number `at`, and all that follow up to number `until`, fail.

        `only` counts those that begin with this text (`BEGIN`, `COMMIT`, `ROLLBACK`, `INSERT INTO ditto_steps`), and no
        others. With `after`, the statement is carried out, and fails all the same.
        """

    def disarm(self) -> None:
        """No more faults."""


class StoreUnderTest(Protocol):
    """One store of a dialect. It is empty, and laid out when it is first opened."""

    @property
    def name(self) -> str:
        """How it is named in errors."""

    @property
    def address(self) -> str:
        """By which another process finds it: see `stores.find`."""

    @property
    def faults(self) -> Faults:
        """What its connections meet."""

    def fresh(self) -> StoreUnderTest:
        """Another one, empty, of the same dialect and with the same faults."""

    def open(self, *, clock: Clock | None = None) -> Store:
        """It, as one process opens it; opened a second time, as another process does. To be closed."""

    def create_runtime(self, **given: Any) -> Runtime:
        """`create_ditto` on it, with what is given to that."""

    def look(self) -> Picture:
        """What an outsider sees, in one snapshot. Asserts that it is whole: `scenes.check_whole`."""

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """What an outsider finds; nothing if a table that it asks for is not there yet."""

    def can_write(self, *, timeout_s: float = 0) -> bool:
        """Whether an outsider can write: at once, or when a transaction that is under way has ended."""

    def unreachable(self) -> AbstractContextManager[None]:
        """Meanwhile nobody gets a new connection."""


@asynccontextmanager
async def opened(under_test: StoreUnderTest, *, clock: Clock | None = None) -> AsyncIterator[Store]:
    """It, opened, and closed afterwards."""
    store = under_test.open(clock=clock)
    try:
        yield store
    finally:
        await store.close()


Refused: TypeAlias = Callable[[Transition, str], Awaitable[TransitionRefusedError]]
"""Asserts that a transition is refused under a name, and that nothing of it is written."""
