"""Stores in SQLite files: opened as one process would, and looked at from outside."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

from ditto.clock import Clock
from ditto.secrets import Redactor
from ditto.store.connection import Location
from ditto.store.store import Store
from tests.store.scenes import VALUE_MAX, Picture, check_whole, take_picture


def open_file(path: Path, *, busy_timeout_s: float = 10.0, clock: Clock | None = None) -> Store:
    """A store; to be closed."""
    location = Location(path, busy_timeout_s=busy_timeout_s)
    return Store(location, redactor=Redactor(()), clock=clock or Clock(), value_max_bytes=VALUE_MAX)


@asynccontextmanager
async def opened(path: Path, *, busy_timeout_s: float = 10.0) -> AsyncIterator[Store]:
    """A store, closed afterwards."""
    store = open_file(path, busy_timeout_s=busy_timeout_s)
    try:
        yield store
    finally:
        await store.close()


def look(path: Path) -> Picture:
    """What a second connection sees. Asserts that no half of anything is there."""
    with closing(sqlite3.connect(path, isolation_level=None, timeout=0)) as db:
        db.execute("BEGIN")
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert db.execute("PRAGMA foreign_key_check").fetchall() == []
        picture = take_picture(lambda query: db.execute(query).fetchall())
    check_whole(picture)
    return picture


def can_write(path: Path, *, timeout_s: float = 0) -> bool:
    """Whether another connection can write: at once, or when a transaction that is under way has ended."""
    with closing(sqlite3.connect(path, isolation_level=None, timeout=timeout_s)) as db:
        try:
            db.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return False
        db.execute("ROLLBACK")
    return True
