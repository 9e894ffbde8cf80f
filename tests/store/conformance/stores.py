"""The stores that the conformance suite is put to. A second dialect is one more entry here."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final

from tests.store.conformance import sqlite
from tests.store.conformance.under_test import StoreUnderTest

STORES: Final[dict[str, Callable[[Path], AbstractContextManager[StoreUnderTest]]]] = {"sqlite": sqlite.sqlite_store}
"""By dialect: a new store, which may use the folder, and whose connections meet faults while it is used."""


def find(address: str) -> StoreUnderTest:
    """The store with this address, in a process of its own; without faults."""
    assert address.startswith(sqlite.PREFIX)
    return sqlite.SqliteStore(Path(address.removeprefix(sqlite.PREFIX)))
