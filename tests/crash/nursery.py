"""Real processes at the price of a fork: a program that has imported all it needs, has nothing open, and forks.

One JSON line in: {"store", "world", "workflow", "at": a crash point, "record": a file, "kill_in": a handler}; or with
"story", one of `stories.py`, in the place of the workflow, and what that story asks for.
One JSON line out: {"signal": n} for a child that was killed, {"result": …} for one that came to its end, {"error": …}
for one that failed.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ditto.testing import crash
from tests.crash.flow import Flow, drive
from tests.crash.order import drive_order
from tests.crash.stories import STORIES
from tests.crash.world import World


def live(order: dict[str, Any]) -> Any:
    """What a child does."""
    if order.get("record"):
        crash.record_points(Path(order["record"]))
    if order.get("at"):
        crash.kill_at(order["at"])
    if "story" in order:
        return asyncio.run(tell(order))
    world = World(Path(order["world"]))
    if order["workflow"] == "order":
        return asyncio.run(drive_order(Path(order["store"]), world))
    flow = Flow(world, order.get("kill_in"))
    return asyncio.run(drive(Path(order["store"]), flow, order["workflow"]))


async def tell(order: dict[str, Any]) -> Any:
    return await STORIES[order["story"]](order)


def bear(order: dict[str, Any], live: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """Fork a child that does what `live` does, and wait for it."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            answer = {"result": live(order)}
        except BaseException:  # noqa: BLE001 - told to the test
            answer = {"error": traceback.format_exc()}
        with os.fdopen(writing, "w", encoding="utf-8") as out:
            out.write(json.dumps(answer))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as told:
        text = told.read()
    _, wait_status = os.waitpid(child, 0)
    if os.WIFSIGNALED(wait_status):
        return {"signal": os.WTERMSIG(wait_status)}
    answer = json.loads(text)
    assert isinstance(answer, dict)
    return answer


def serve(live: Callable[[dict[str, Any]], Any], first: dict[str, Any]) -> None:
    """Bear a child for each order until the input ends.

    Imports what is imported on first use by living once, with the order `first`, in a folder of its own; afterwards
    nothing is open, and no thread runs.
    """
    with tempfile.TemporaryDirectory() as folder:
        live({"store": f"{folder}/ditto.db", "world": f"{folder}/world.db", **first})
    for thread in threading.enumerate():
        if thread is not threading.main_thread():
            thread.join()
    gc.freeze()
    for line in sys.stdin:
        sys.stdout.write(json.dumps(bear(json.loads(line), live)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    serve(live, {"workflow": "graph"})
