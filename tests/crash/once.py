"""The workflow of the crash tests as a program: `python -m tests.crash.once STORE WORLD`."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from tests.crash.flow import Flow, drive
from tests.crash.world import World

if __name__ == "__main__":
    store, world = map(Path, sys.argv[1:])
    sys.stdout.write(json.dumps(asyncio.run(drive(store, Flow(World(world)), "graph"))) + "\n")
