"""What a child of the crash tests does: the workflow that is killed everywhere, or one of the stories.

Its order: {"store", "world", "workflow", "kill_in": a handler and a side of its effect}; or with "story", one of
`stories.py`, in the place of the workflow, and what that story asks for.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from tests.crash.flow import Flow, drive
from tests.crash.order import drive_order
from tests.crash.stories import STORIES
from tests.crash.world import World


def live(order: dict[str, Any]) -> Any:
    """What a child does, and comes to."""
    if "story" in order:
        return asyncio.run(tell(order))
    world = World(Path(order["world"]))
    if order["workflow"] == "order":
        return asyncio.run(drive_order(Path(order["store"]), world))
    flow = Flow(world, order.get("kill_in"))
    return asyncio.run(drive(Path(order["store"]), flow, order["workflow"]))


async def tell(order: dict[str, Any]) -> Any:
    """One story."""
    return await STORIES[order["story"]](order)


def warm_up(folder: Path) -> None:
    """Import what is imported on first use, by running once."""
    live({"store": folder / "ditto.db", "world": folder / "world.db", "workflow": "graph"})
