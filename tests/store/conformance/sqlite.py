"""The SQLite store under test: a file in a folder of its own."""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Final
from unittest import mock

from ditto import Runtime, create_ditto
from ditto.clock import Clock
from ditto.errors import StoreError
from ditto.store.store import Store
from tests.store import files
from tests.store.conformance.under_test import StoreUnderTest
from tests.store.faults import Faults, faulty_drivers
from tests.store.scenes import Picture

PREFIX: Final = "sqlite:"


class SqliteStore:
    """See `StoreUnderTest`."""

    def __init__(self, path: Path, faults: Faults | None = None) -> None:
        self._path = path
        self._numbers = itertools.count(1)
        self.name = str(path)
        self.address = f"{PREFIX}{path}"
        self.faults = faults or Faults()

    def fresh(self) -> StoreUnderTest:
        path = self._path.parent / f"fresh {next(self._numbers)}" / self._path.name
        return SqliteStore(path, self.faults)

    def open(self, *, clock: Clock | None = None) -> Store:
        return files.open_file(self._path, clock=clock)

    def create_runtime(self, **given: Any) -> Runtime:
        return create_ditto(store=self._path, **given)

    def look(self) -> Picture:
        return files.look(self._path)

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        with closing(sqlite3.connect(self._path)) as db, suppress(sqlite3.OperationalError):
            return db.execute(query).fetchall()
        return []

    def can_write(self, *, timeout_s: float = 0) -> bool:
        return files.can_write(self._path, timeout_s=timeout_s)

    @contextmanager
    def unreachable(self) -> Iterator[None]:
        with (
            mock.patch("ditto.store.committer.connect", side_effect=StoreError("the disk is gone")),
            mock.patch("ditto.store.reader.connect", side_effect=StoreError("the disk is gone")),
        ):
            yield


@contextmanager
def sqlite_store(folder: Path) -> Iterator[StoreUnderTest]:
    """A new one, with connections that may meet faults as long as it is used."""
    with faulty_drivers() as faults:
        yield SqliteStore(folder / "data" / "ditto.db", faults)
