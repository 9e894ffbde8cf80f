"""Serving: a process that drives whatever nobody drives, until it is stopped.

Each look reads a fixed number of rows: waits whose time has come, waiting runs whose deadline has passed, and runs that
nobody drives (their owner died, let go of them, or a wait of theirs is over). Each wake-up touches only its run. A run
that goes on to wait is let go of.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import anyio

from ditto.engine.expiry import wake_expired
from ditto.engine.ownership import Owner
from ditto.engine.recovering import Resume, Workflows, is_driven, take_up
from ditto.engine.waiting import over_output
from ditto.errors import StoreClosedError, StoreError, TransitionRefusedError
from ditto.runs import Recovered
from ditto.store import queries, transitions
from ditto.store.records import Event, RunRow
from ditto.store.store import Store
from ditto.waits import WaitKind

LOOK_S: Final = 0.5
"""Between two looks, when nobody has written meanwhile."""

PAGE: Final = 100

CRASHES_MAX: Final = 3
"""A run whose process died so often in a row, without any progress, is left to a person."""

STOP_S: Final = 2.0
"""How long a handler that was cut short may take to end."""

logger = logging.getLogger("ditto.engine")


@dataclass(slots=True)
class Serving:
    """One `serve` while it runs."""

    store: Store
    owner: Owner
    workflows: Workflows
    resume: Resume
    concurrency: int
    is_closing: Callable[[], bool]
    wake: anyio.Event = field(default_factory=anyio.Event)
    _left: dict[int, int] = field(default_factory=dict)
    """Runs that could not be driven, and the fence they had: looked at again once somebody has moved them."""
    _driving: dict[int, str] = field(default_factory=dict)
    """Runs that are under way: row id and run id."""
    ended: anyio.Event = field(default_factory=anyio.Event)
    """Set when nothing is driven, looked at or written any more."""
    _scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)

    async def serve(self) -> None:
        """Until the runtime is closing; runs that are under way then are drained before this returns."""
        try:
            with self._scope:
                await self._serve()
        finally:
            self.ended.set()

    async def stop(self) -> None:
        """Cut short what is still under way, and let go of it; the store must be open for that."""
        if not self.ended.is_set():
            if self._driving:
                logger.warning("not ended in time, and cut short: %s", ", ".join(sorted(self._driving.values())))
            self._scope.cancel()
            with anyio.move_on_after(STOP_S):
                await self.ended.wait()

    async def _serve(self) -> None:
        slots = anyio.Semaphore(self.concurrency)
        async with anyio.create_task_group() as tasks:

            async def drive(run: RunRow) -> None:
                try:
                    logger.info("run %s: taken up, %s %s", run.run_id, run.kind, run.workflow)
                    self._note_end(run, await take_up(self.store, run, self.resume))
                finally:
                    del self._driving[run.id]
                    slots.release()

            while not self.is_closing():
                try:
                    await self._end_due_waits()
                    await wake_expired(self.store)
                    for run in await self._list_undriven():
                        await slots.acquire()
                        if self.is_closing():
                            return
                        self._driving[run.id] = run.run_id
                        tasks.start_soon(drive, run)
                except StoreError as error:
                    if not error.retryable:
                        raise
                    logger.warning("the store could not be looked at: %s", error.message)
                with anyio.move_on_after(LOOK_S):
                    await self.wake.wait()
                self.wake = anyio.Event()

    def _note_end(self, run: RunRow, recovered: Recovered | None) -> None:
        """Tell how a run ended here; one that cannot go on is left until somebody moves it."""
        if recovered is None:
            logger.info("run %s: another runtime drives it", run.run_id)
        elif recovered.error is None or isinstance(recovered.error, StoreClosedError):
            logger.info("run %s: %s", run.run_id, recovered.status)
        else:
            where = "" if recovered.error.step is None else f"step {recovered.error.step}: "
            logger.info("run %s: %s: %s%s", run.run_id, recovered.status, where, recovered.error.message)
            self._left[run.id] = run.fence + 1

    async def _end_due_waits(self) -> None:
        """End the waits whose time has come; whoever drives such a run ends its waits, too, and one of both does."""
        for run, path, attempt, kind in await self.store.read(queries.list_due, self.store.clock.now_us(), PAGE):
            output = self.store.encode(over_output(WaitKind(kind)), f"the end of wait {path}")
            event = Event("wait_over", path)
            settle = partial(transitions.settle_wait, run=run, path=path, attempt=attempt, output=output, event=event)
            with suppress(TransitionRefusedError):
                await self.store.commit(settle)

    async def _list_undriven(self) -> list[RunRow]:
        """Runs of registered workflows that nobody drives, the oldest first, and that are not left to a person."""
        found: list[RunRow] = []
        after = 0
        while True:
            page = await self.store.read(queries.list_undriven, after, PAGE)
            for run in page:
                after = run.id
                if self._is_ours_to_drive(run):
                    found.append(run)
            if len(page) < PAGE or len(found) >= PAGE:
                return found

    def _is_ours_to_drive(self, run: RunRow) -> bool:
        if run.id in self._driving or (run.kind, run.workflow) not in self.workflows or is_driven(self.owner, run):
            return False
        if self._left.get(run.id, -1) >= run.fence:
            return False
        if run.crashes >= CRASHES_MAX:
            logger.error(
                "run %s: its process died %d times without any progress; it is left to a person: ditto resume %s",
                run.run_id, run.crashes, run.run_id,
            )  # fmt: skip
            self._left[run.id] = run.fence
            return False
        return True
