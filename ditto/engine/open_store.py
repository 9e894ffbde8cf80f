"""The open store: what a runtime has from its first call until it is closed. It opens, closes, and sees other writers.

Who drives (`driving.py`), answers (`asking.py`) or records what somebody says (`deciding.py`) is given this.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Self

import anyio

from ditto.clock import Clock
from ditto.config import Config
from ditto.engine.executor import Engine
from ditto.engine.ownership import Owner
from ditto.engine.recovering import Workflows
from ditto.engine.routing import Router
from ditto.engine.serving import Serving
from ditto.errors import RunNotFoundError, StoreClosedError, StoreError, TransitionRefusedError
from ditto.sandbox import Sandbox
from ditto.secrets import LogFilter, Redactor
from ditto.store import queries
from ditto.store.connection import Location
from ditto.store.records import RunRow
from ditto.store.schema import PAUSING, RunStatus
from ditto.store.store import Store
from ditto.worker import Worker

logger = logging.getLogger("ditto")


@dataclass(slots=True)
class OpenStore:
    """What a runtime has while its store is open. Belongs to one event loop and one process."""

    store: Store
    owner: Owner
    engine: Engine
    workflows: Workflows
    """Those that may be taken up by name."""
    loop: asyncio.AbstractEventLoop
    process: int = field(default_factory=os.getpid)
    active: dict[str, asyncio.Event] = field(default_factory=dict)
    """Runs that this runtime drives now, by id; the event is set when it lets go."""
    serving: Serving | None = None
    _looking: asyncio.Task[None] | None = None
    """Looks, after another process has written, whether our runs are still ours."""
    _log_filter: LogFilter | None = None
    """Keeps the configuration's credentials out of what ditto's loggers write."""

    @classmethod
    def open(
        cls,
        *,
        config: Config,
        location: Location,
        sandbox: Sandbox,
        workers: Iterable[Worker],
        workflows: Workflows,
        clock: Clock,
    ) -> Self:
        """Open the file and lock an owner's file beside it. Raises StoreError, also where no event loop runs."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            told = "no event loop runs here; in a child that was forked off one there is none: start it with 'spawn'"
            raise StoreError(told, code="store.forked") from None
        redactor = Redactor(config.secrets())
        router = Router(config, sandbox, location, tuple(workers))
        store = Store(
            location,
            redactor=redactor,
            clock=clock,
            value_max_bytes=config.runtime.value_max_bytes,
            receipts=config.store.receipts,
        )
        engine = Engine(config, sandbox, router)
        try:
            owner = Owner(location.path)
        except BaseException:
            store.stop()
            raise
        opened = cls(store, owner, engine, workflows, loop)
        if redactor.active:
            # A logger's filter sees only its own records, so each logger that we write to gets it.
            opened._log_filter = LogFilter(redactor)
            for each in _loggers(router):
                each.addFilter(opened._log_filter)
        return opened

    async def close(self) -> None:
        """Start nothing further, drain for at most `runtime.grace_s`, cut short what is served still, commit, close."""
        grace_s = self.engine.config.runtime.grace_s
        with anyio.CancelScope(shield=True):
            self.engine.close()
            serving = self.serving
            with anyio.move_on_after(grace_s):
                for released in list(self.active.values()):
                    await released.wait()
                if serving is not None:
                    serving.wake.set()
                    await serving.ended.wait()
            if serving is not None:
                await serving.stop()
            await self.engine.router.close(grace_s)
            await self.store.close()
            self.owner.close()
        if self._log_filter is not None:
            for each in _loggers(self.engine.router):
                each.removeFilter(self._log_filter)

    def check_open(self) -> None:
        """Raises StoreClosedError once the runtime is closing."""
        if self.engine.closing:
            raise closed_error()

    async def find(self, run_id: str) -> RunRow:
        """The newest generation of a run. Raises RunNotFoundError."""
        run = await self.store.read(queries.get_run, run_id)
        if run is None:
            raise RunNotFoundError(f"no run has the id {run_id!r} in {self.store.location.path}", run_id=run_id)
        return run

    def is_driven(self, run: RunRow) -> bool:
        """Whether a live runtime, this one or another, has the run."""
        if run.owner is None:
            return False
        return run.run_id in self.active if run.owner == self.owner.id else self.owner.is_alive(run.owner)

    def live_status(self, run: RunRow) -> str:
        """A run's status, with a dead owner seen for what it is."""
        if run.status not in (RunStatus.RUNNING, RunStatus.PAUSED):
            return run.status.value
        return shown_status(run.status, driven=self.is_driven(run))

    def wake(self, run: int) -> None:
        """Something was written that may end a wait of this run: whoever drives it, or serves, looks again."""
        if (drive := self.engine.drives.get(run)) is not None:
            drive.wake()
        if self.serving is not None:
            self.serving.wake.set()

    def notice_outsiders(self) -> None:
        """Another process has written: waits may be over, and runs may not be ours any more."""
        for drive in self.engine.drives.values():
            drive.wake()
        if self.serving is not None:
            self.serving.wake.set()
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look_for_lost_runs(), name="ditto-outsiders")

    async def _look_for_lost_runs(self) -> None:
        """Stop driving what was cancelled, or taken over; drain what was paused."""
        try:
            driven = dict(self.engine.drives)
            owned = await self.store.read(queries.list_owned, self.owner.id, list(driven))
            for key, drive in driven.items():
                if owned.get(key) == RunStatus.PAUSED:
                    drive.pause()
                if key not in owned and self.engine.drives.get(key) is drive:
                    refused = TransitionRefusedError("drive", "the run is not ours any more", run_id=drive.run.run_id)
                    reason = await drive.explain(refused)
                    if reason is not refused:
                        drive.stop(reason)
                        drive.wake()
        except StoreClosedError:
            return  # nothing is ours any more
        except StoreError as error:
            logger.info("other writers could not be looked at: %s", error)


def closed_error() -> StoreClosedError:
    """What a call gets that comes after `close`."""
    return StoreClosedError("the runtime is closed; create a new one")


def shown_status(status: str, *, driven: bool) -> str:
    """The status that is shown, when it is known whether a live runtime has the run."""
    match status:
        case RunStatus.RUNNING if not driven:
            return RunStatus.INTERRUPTED.value
        case RunStatus.PAUSED if driven:
            return PAUSING
        case _:
            return str(status)


def _loggers(router: Router) -> list[logging.Logger]:
    return [logger, *(logging.getLogger(f"ditto.{name}") for name in ("engine", "store")), *router.loggers()]
