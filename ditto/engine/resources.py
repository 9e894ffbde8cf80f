"""Resources: what workers open once per runtime, each opened and closed in one and the same task."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from ditto.config import Config
from ditto.errors import StepError
from ditto.sandbox import Sandbox
from ditto.worker import Worker, WorkerSetup


class ResourceHost:
    """Opens a worker's resources on first use; a failed opening is tried again by the next step that needs it."""

    def __init__(self, config: Config, sandbox: Sandbox) -> None:
        self._config = config
        self._sandbox = sandbox
        self._open: dict[str, tuple[asyncio.Task[None], asyncio.Future[Any], asyncio.Event]] = {}

    async def get(self, worker: Worker) -> Any:
        """The worker's resources; None if it has none. Raises what the factory raises."""
        if worker.resources is None:
            return None
        if worker.type not in self._open:
            ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            stop = asyncio.Event()
            task = asyncio.create_task(self._hold(worker, ready, stop), name=f"ditto-resources-{worker.type}")
            self._open[worker.type] = (task, ready, stop)
        return await asyncio.shield(self._open[worker.type][1])

    async def close(self) -> None:
        """Close all that is open, each in its own task."""
        opened = list(self._open.values())
        self._open.clear()
        for _, _, stop in opened:
            stop.set()
        for task, _, _ in opened:
            await task

    async def _hold(self, worker: Worker, ready: asyncio.Future[Any], stop: asyncio.Event) -> None:
        assert worker.resources is not None
        setup = WorkerSetup(self._config, self._sandbox, logging.getLogger(f"ditto.worker.{worker.type.lower()}"))
        try:
            async with worker.resources(setup) as resources:
                ready.set_result(resources)
                await stop.wait()
        except Exception as error:
            if ready.done():
                setup.logger.exception("the resources of worker %s did not close", worker.type)
            else:
                self._fail(worker, ready, error)
        finally:
            if not ready.done():  # cancelled, or the process is about to end: nobody may wait for it for ever
                self._fail(worker, ready, StepError(f"the resources of worker {worker.type} were not opened"))

    def _fail(self, worker: Worker, ready: asyncio.Future[Any], error: Exception) -> None:
        self._open.pop(worker.type, None)
        ready.set_exception(error)
        ready.exception()
