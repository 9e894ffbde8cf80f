"""SQLite connections whose committer meets faults at a chosen statement."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final
from unittest import mock

from ditto.store.connection import Driver
from tests.store.conformance.under_test import Fault

LOCKED, FULL, IO = Fault.LOCKED, Fault.FULL, Fault.IO

_ERRORS: Final = {
    LOCKED: ("database is locked", sqlite3.SQLITE_BUSY),
    FULL: ("database or disk is full", sqlite3.SQLITE_FULL),
    IO: ("disk I/O error", sqlite3.SQLITE_IOERR),
}


def sqlite_error(fault: Fault) -> sqlite3.OperationalError:
    """The error that the driver raises for it."""
    text, code = _ERRORS[fault]
    error = sqlite3.OperationalError(text)
    error.sqlite_errorcode = code
    return error


@dataclass
class Faults:
    """What the committer's statements meet. See `under_test.Faults`."""

    fault: Fault = IO
    at: int = 0
    """The statement that fails; 0 for none."""
    until: int = 0
    """The last one that fails; 0 for the first one only."""
    only: str = ""
    """Count the statements that begin with this, and no others."""
    after: bool = False
    """The statement is carried out, and fails all the same."""
    count: int = 0
    met: list[str] = field(default_factory=list)
    """The statements that failed."""

    def arm(self, fault: Fault, at: int, *, until: int = 0, only: str = "", after: bool = False) -> None:
        """From now on, fail."""
        self.fault, self.at, self.until, self.only, self.after, self.count = fault, at, until, only, after, 0
        self.met = []

    def disarm(self) -> None:
        """No more faults."""
        self.at = self.until = 0

    def meets(self, statement: str) -> bool:
        """Whether this statement fails."""
        if threading.current_thread().name != "ditto-committer" or not statement.startswith(self.only):
            return False
        self.count += 1
        failing = self.at > 0 and self.at <= self.count <= max(self.at, self.until)
        if failing:
            self.met.append(statement)
        return failing


class FaultyDriver(Driver):
    """The driver's connection, with faults."""

    faults: ClassVar[Faults] = Faults()

    def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
        """Carry out a statement, or fail."""
        failing = self.faults.meets(sql)
        if failing and not self.faults.after:
            raise sqlite_error(self.faults.fault)
        cursor = super().execute(sql, parameters)
        if failing:
            raise sqlite_error(self.faults.fault)
        return cursor


@contextmanager
def faulty_drivers() -> Iterator[Faults]:
    """Every connection that is made meanwhile may meet these faults."""
    faults = Faults()
    with (
        mock.patch("ditto.store.connection.Driver", FaultyDriver),
        mock.patch.object(FaultyDriver, "faults", faults),
    ):
        yield faults
