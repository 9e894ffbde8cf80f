"""What the driver's errors mean: each one as an error of the tree, which says what to do."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from ditto.errors import StoreBusyError, StoreDamagedError, StoreError, StoreForeignError, StoreFullError

_PRIMARY = 0xFF


def store_error(error: sqlite3.Error, path: Path) -> StoreError:
    """The error of the tree for a driver's error. Extended SQLite codes are folded into their primary one."""
    code = getattr(error, "sqlite_errorcode", None)
    match None if code is None else code & _PRIMARY:
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            return StoreBusyError(
                f"{path}: another process held the write lock for longer than store.busy_timeout_s; "
                "nothing was written, run again",
                retryable=True,
            )
        case sqlite3.SQLITE_FULL:
            return StoreFullError(
                f"{path}: the disk is full; nothing was written. Free space and run again", retryable=True
            )
        case sqlite3.SQLITE_CORRUPT:
            return StoreDamagedError(f"{path}: the file is damaged ({error}); restore a backup")
        case sqlite3.SQLITE_NOTADB:
            return StoreForeignError(f"{path}: the file is no SQLite database; choose another path")
        case sqlite3.SQLITE_READONLY | sqlite3.SQLITE_PERM | sqlite3.SQLITE_AUTH:
            return StoreError(
                f"{path}: the file cannot be written ({error}); check its owner and mode", code="store.readonly"
            )
        case sqlite3.SQLITE_CANTOPEN:
            return StoreError(f"{path}: the file cannot be opened ({error}); check the folder and its mode")
        case sqlite3.SQLITE_IOERR:
            return StoreError(f"{path}: the disk reports an error ({error}); nothing was written", retryable=True)
        case _:
            return StoreError(f"{path}: {type(error).__name__}: {error}")
