"""The reader: one thread with a read-only connection, so that no read ever blocks the event loop or the committer."""

from __future__ import annotations

import asyncio
import queue
import sqlite3
import threading
import traceback
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

from ditto.errors import StoreClosedError
from ditto.store.connection import Location, connect
from ditto.store.faults import store_error

T = TypeVar("T")
_Job: TypeAlias = "tuple[Callable[..., Any], tuple[Any, ...], asyncio.Future[Any]]"


class Reader:
    """Runs queries one after another. `read` may be called from the event loop's thread only."""

    def __init__(self, location: Location) -> None:
        self._location = location
        self._inbox: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._db = connect(location, read_only=True)
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="ditto-reader", daemon=True)

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    async def read(self, query: Callable[..., T], *arguments: Any) -> T:
        """The result of `query(connection, *arguments)`. Raises StoreError."""
        if self._closed:
            raise StoreClosedError("the store is closed; open a new runtime")
        waiter: asyncio.Future[T] = self._loop.create_future()
        self._inbox.put((query, arguments, waiter))
        return await waiter

    def stop(self) -> None:
        """Close without waiting until it is done."""
        if not self._closed:
            self._closed = True
            self._inbox.put(None)

    async def close(self) -> None:
        """Let running reads end and close the connection. Safe to call twice."""
        self.stop()
        while self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)

    def _serve(self) -> None:
        while (job := self._inbox.get()) is not None:
            query, arguments, waiter = job
            try:
                result = query(self._db, *arguments)
            except Exception as error:  # noqa: BLE001 - it is handed to the task that asked
                # Whoever keeps the error keeps its frames, and in them a cursor that would hold a snapshot.
                traceback.clear_frames(error.__traceback__)
                self._tell(_fail, waiter, self._explained(error))
            else:
                self._tell(_answer, waiter, result)
        self._db.close()

    def _explained(self, error: Exception) -> Exception:
        if not isinstance(error, sqlite3.Error):
            return error
        explained = store_error(error, self._location.path)
        explained.__cause__ = error
        return explained

    def _tell(self, how: Callable[..., None], waiter: asyncio.Future[Any], what: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(how, waiter, what)
        except RuntimeError:  # the loop was closed meanwhile: nobody is left to tell
            return


def _answer(waiter: asyncio.Future[Any], result: Any) -> None:
    if not waiter.done():
        waiter.set_result(result)


def _fail(waiter: asyncio.Future[Any], error: Exception) -> None:
    if not waiter.done():
        waiter.set_exception(error)
