"""Threads: where plain `def` handlers run, so that none of them blocks the event loop.

They are daemon threads of our own, bounded, made on demand. A handler cannot be stopped from outside: when its step
misses the deadline or the caller is cancelled, its thread is left to end, keeps its slot until then, and what it
returns is handed on as late.
"""

from __future__ import annotations

import asyncio
import contextvars
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

Late: TypeAlias = Callable[[Any, BaseException | None], None]
"""Told, on the event loop, what an abandoned handler returned or raised."""


@dataclass(slots=True)
class _Job:
    call: Callable[[], Any]
    context: contextvars.Context
    done: asyncio.Future[Any]
    late: Late | None = None


class Threads:
    """At most `limit` daemon threads. `run` may be called from the event loop's thread only."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._inbox: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._unfinished = 0
        self._loop = asyncio.get_running_loop()
        self._idle = asyncio.Event()
        self._idle.set()

    async def run(self, call: Callable[[], Any], late: Late) -> Any:
        """What `call()` returns, from a thread. If the wait is cancelled, `late` gets the result when it comes."""
        job = _Job(call, contextvars.copy_context(), self._loop.create_future())
        self._unfinished += 1
        self._idle.clear()
        if self._unfinished > len(self._threads) and len(self._threads) < self._limit:
            thread = threading.Thread(target=self._serve, name=f"ditto-step-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._inbox.put(job)
        try:
            return await asyncio.shield(job.done)
        except asyncio.CancelledError:
            job.late = late
            raise

    async def close(self, grace_s: float) -> bool:
        """Wait up to `grace_s` for handlers to end; False if some are still running (they die with the process)."""
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        finally:
            for _ in self._threads:
                self._inbox.put(None)
        return True

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
        self._unfinished -= 1
        if self._unfinished == 0:
            self._idle.set()
        if job.late is not None:
            job.late(result, error)
            job.done.cancel()
        elif isinstance(error, StopIteration | asyncio.CancelledError):
            job.done.set_exception(RuntimeError(f"the handler raised {type(error).__name__}"))
        elif error is not None:
            job.done.set_exception(error)
        else:
            job.done.set_result(result)
