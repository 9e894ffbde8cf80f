"""`ditto serve`: from its start to its orderly end.

    SIGTERM or SIGINT → nothing further is taken up → what runs is drained, for `runtime.grace_s` → last commits → close

A second signal ends the process at once, as a kill would: a later process goes on from what is recorded.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from typing import Final

from ditto.cli.session import INTERRUPTED
from ditto.cli.terminal import LineFormatter
from ditto.runtime import Runtime

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)

LAST_S: Final = 1.0
"""How long `serve` may take to return when all is closed."""

logger = logging.getLogger("ditto")


def log_to_stderr() -> None:
    """Write ditto's log to standard error, unless the application has set up logging itself."""
    if not logger.hasHandlers():
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(LineFormatter())
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)


async def serve_until_stopped(runtime: Runtime) -> int:
    """Serve, and return the exit code: 0 after SIGTERM, which asks for an orderly end, 130 after SIGINT."""
    stopped = asyncio.Event()
    received: list[signal.Signals] = []
    loop = asyncio.get_running_loop()

    def stop(number: signal.Signals) -> None:
        received.append(number)
        for each in SIGNALS:
            loop.remove_signal_handler(each)
            signal.signal(each, signal.SIG_DFL)
        stopped.set()

    for each in SIGNALS:
        loop.add_signal_handler(each, stop, each)
    async with runtime:
        logger.info("serving on %s", runtime.location.path)
        serving = asyncio.create_task(runtime.serve())
        serving.add_done_callback(lambda _: stopped.set())
        await stopped.wait()
        if received:
            logger.info(
                "%s: nothing further is taken up; what runs has %g s to end. Again to stop at once",
                received[0].name, runtime.config.runtime.grace_s,
            )  # fmt: skip
        await runtime.close()
        await asyncio.wait({serving}, timeout=LAST_S)
        if not serving.done():
            logger.error("a handler ignores its cancellation; the process ends without it")
            logging.shutdown()
            os._exit(128 + received[0])
        await serving
    logger.info("stopped")
    return INTERRUPTED if received == [signal.SIGINT] else 0
