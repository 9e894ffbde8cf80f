"""Where a user's function meets a transaction of ours: `local` handlers and commit parts.

It gets a SQLAlchemy connection on the committer's own driver connection. That connection refuses COMMIT, ROLLBACK,
savepoints, ATTACH and PRAGMA; and once SQLite has rolled back by itself (a full disk, `ON CONFLICT ROLLBACK`), it
refuses every further statement, so that nothing can slip out of the transaction. Results that were not read to their
end are closed with the transaction: one left open would hold a snapshot, and keep the committer from writing again.
"""

from __future__ import annotations

import sqlite3
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Self

from sqlalchemy import Connection, Engine, create_engine
from sqlalchemy.pool import StaticPool

from ditto.errors import StoreError
from ditto.store.connection import Driver

_SAVEPOINT: Final = 32
"""SQLite's authorizer code for savepoints, which the driver's module does not name."""

_REFUSED: Final = frozenset(
    {sqlite3.SQLITE_TRANSACTION, sqlite3.SQLITE_ATTACH, sqlite3.SQLITE_DETACH, sqlite3.SQLITE_PRAGMA, _SAVEPOINT}
)


class LocalConnections:
    """Makes SQLAlchemy connections on the committer's driver connection. Used in the committer's thread only."""

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._driver: Driver | None = None
        self._cursors: weakref.WeakSet[sqlite3.Cursor] = weakref.WeakSet()

    @contextmanager
    def inside(self, driver: Driver) -> Iterator[Connection]:
        """A guarded connection in the open transaction. Raises StoreError if SQLite rolled it back meanwhile."""
        with self._engine_on(driver).connect() as connection:
            driver.guarded = True
            driver.set_authorizer(_authorize)
            # On this one connection, and only meanwhile: the committer's own statements pay nothing for it.
            guards = self._guards(driver)
            vars(driver).update(guards)
            try:
                yield connection
            except Exception as error:
                if _is_refused(error):
                    text = "a local handler must not begin, divide or end the transaction, nor ATTACH or use PRAGMA"
                    raise StoreError(f"{text}: {error}") from error
                raise
            finally:
                for name in guards:
                    vars(driver).pop(name, None)
                driver.guarded = False
                self._close_results()
                driver.set_authorizer(None)
        if not driver.in_transaction:
            raise StoreError("SQLite rolled the transaction back inside the handler; nothing of it was kept")

    def _engine_on(self, driver: Driver) -> Engine:
        """The engine for this driver connection; a connection made anew after a fault gets a new one."""
        if self._engine is None or self._driver is not driver:
            engine = create_engine("sqlite://", creator=lambda: driver, poolclass=StaticPool, pool_reset_on_return=None)
            engine.connect().close()
            self._engine, self._driver = engine, driver
        return self._engine

    def _guards(self, driver: Driver) -> dict[str, Callable[..., sqlite3.Cursor]]:
        """The methods of the connection by which statements are carried out, each by a cursor of ours."""

        def cursor(*_factory: Any) -> sqlite3.Cursor:
            made = sqlite3.Connection.cursor(driver, _LocalCursor)
            self._cursors.add(made)
            return made

        return {
            "cursor": cursor,
            "execute": lambda *given: cursor().execute(*given),
            "executemany": lambda *given: cursor().executemany(*given),
            "executescript": lambda *given: cursor().executescript(*given),
        }

    def _close_results(self) -> None:
        for cursor in list(self._cursors):
            cursor.close()
        self._cursors.clear()


class _LocalCursor(sqlite3.Cursor):
    """Carries out nothing outside of the transaction, where it would be durable at once."""

    def execute(self, sql: str, parameters: Any = (), /) -> Self:
        self._refuse_outside()
        return super().execute(sql, parameters)

    def executemany(self, sql: str, parameters: Iterable[Any], /) -> Self:
        self._refuse_outside()
        return super().executemany(sql, parameters)

    def executescript(self, script: str, /) -> sqlite3.Cursor:
        self._refuse_outside()
        return super().executescript(script)

    def _refuse_outside(self) -> None:
        if not self.connection.in_transaction:
            raise StoreError("SQLite rolled the transaction back; the handler cannot go on")


def _authorize(action: int, *_details: Any) -> int:
    return sqlite3.SQLITE_DENY if action in _REFUSED else sqlite3.SQLITE_OK


def _is_refused(error: Exception) -> bool:
    """Whether the authorizer refused a statement; by SQLAlchemy, or by the driver itself."""
    return getattr(getattr(error, "orig", error), "sqlite_errorcode", None) == sqlite3.SQLITE_AUTH
