"""Threads: where plain `def` handlers run, so that none of them blocks the event loop.

They are daemon threads of our own, bounded, made on demand. Who wants one takes a seat first, and waits for it before
anything is admitted. A handler cannot be stopped from outside: when its step misses the deadline or the caller is
cancelled, its thread is left to end, keeps its seat until then, and what it returns is handed on as late.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import queue
import threading
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import anyio

Late: TypeAlias = Callable[[Any, BaseException | None], None]
"""Told, on the event loop, what an abandoned handler returned or raised."""


@dataclass(slots=True)
class _Job:
    call: Callable[[], Any]
    context: contextvars.Context
    done: asyncio.Future[Any]
    late: Late | None = None


@dataclass(slots=True)
class Seat:
    """The right to use one of the threads. `name` is whose handler it is."""

    threads: Threads
    name: Hashable
    abandoned: bool = False
    """Its handler runs on although nobody waits for it; the seat is given back when that ends."""

    async def run(self, call: Callable[[], Any], late: Late) -> Any:
        """What `call()` returns, from a thread. If the wait is cancelled, `late` gets the result when it comes."""
        job = self.threads.start(call, self)
        try:
            return await asyncio.shield(job.done)
        except asyncio.CancelledError:
            if job.done.done():
                return job.done.result()  # It ended just before: what is known is told, and the cancellation goes on.
            job.late = late
            self.abandoned = True
            raise


class Threads:
    """At most `limit` daemon threads. Used on the event loop's thread only."""

    def __init__(self, limit: int) -> None:
        self._seats = anyio.Semaphore(limit, fast_acquire=True)
        self._inbox: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._running: dict[asyncio.Future[Any], Seat] = {}
        self._loop = asyncio.get_running_loop()

    @asynccontextmanager
    async def seat(self, name: Hashable) -> AsyncIterator[Seat]:
        """Wait until a thread is free, and keep it."""
        await self._seats.acquire()
        seat = Seat(self, name)
        try:
            yield seat
        finally:
            if not seat.abandoned:
                self._seats.release()

    def is_running(self, name: Hashable) -> bool:
        """Whether a handler of that name still runs although nobody waits for it any more."""
        return bool(self._abandoned(name))

    async def ended(self, name: Hashable) -> None:
        """Return when no abandoned handler of that name runs any more."""
        while running := self._abandoned(name):
            await asyncio.wait(running)

    async def close(self, grace_s: float) -> bool:
        """Wait up to `grace_s` for handlers to end; False if some are still running (they die with the process)."""
        if self._running:
            await asyncio.wait(self._running, timeout=grace_s)
        for _ in self._threads:
            self._inbox.put(None)
        return not self._running

    def start(self, call: Callable[[], Any], seat: Seat) -> _Job:
        """Hand a call over to a thread: an idle one, or a new one. Who has a seat never waits for another's handler."""
        job = _Job(call, contextvars.copy_context(), self._loop.create_future())
        self._running[job.done] = seat
        if len(self._running) > len(self._threads):
            thread = threading.Thread(target=self._serve, name=f"ditto-step-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._inbox.put(job)
        return job

    def _abandoned(self, name: Hashable) -> list[asyncio.Future[Any]]:
        return [done for done, seat in self._running.items() if seat.abandoned and seat.name == name]

    def _serve(self) -> None:
        while (job := self._inbox.get()) is not None:
            result, error = None, None
            try:
                result = job.context.run(job.call)
            except BaseException as raised:  # noqa: BLE001 - it is handed to the task that waits
                error = raised
            try:
                self._loop.call_soon_threadsafe(self._finish, job, result, error)
            except RuntimeError:  # the loop was closed while an abandoned handler still ran: nobody is left to tell
                return

    def _finish(self, job: _Job, result: Any, error: BaseException | None) -> None:
        del self._running[job.done]
        if job.late is not None:
            self._seats.release()
            job.done.cancel()
            if inspect.iscoroutine(result):  # handed through by a plain function, and nobody is left to await it
                result.close()
            job.late(result, error)
        elif isinstance(error, StopIteration | asyncio.CancelledError):
            job.done.set_exception(RuntimeError(f"the handler raised {type(error).__name__}"))
        elif error is not None:
            job.done.set_exception(error)
        else:
            job.done.set_result(result)
