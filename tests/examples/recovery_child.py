"""One entry in a process of its own, which a test kills: `python -m … DIRECTORY ENTRY [OPTIONS as JSON]`.

The folder holds `world.json` (order, faults, requiresApproval). The service and the model live in this process and die
with it; their files stay. A decision is recorded before the entry where OPTIONS has one. Prints the job, or the error.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import anyio

from ditto import DittoError
from ditto import recovery as entries
from examples._shared.tools.fulfillment_service import Faults
from tests.examples.recovery_world import JOB, Order, open_world


async def enter(directory: Path, entry: str, options: dict[str, Any]) -> dict[str, Any]:
    world = json.loads((directory / "world.json").read_text(encoding="utf-8"))
    faults = Faults.from_json(options.pop("faults", world["faults"]))
    decision = options.pop("decision", None)
    create = not (directory / "results" / f"{JOB}.json").exists()
    async with open_world(
        directory,
        Order(**world["order"]),
        faults=faults,
        requires_approval=world["requiresApproval"],
        create=create,
    ) as opened:
        if decision is not None and opened.job.stage == "paused":
            opened.store.decide(JOB, decision, "Ada")
        try:
            result = await opened.enter(getattr(entries, entry), **options)
        except DittoError as error:
            return {"error": error.code, "type": type(error).__name__, "stage": opened.job.stage}
        return dict(result.to_json())


if __name__ == "__main__":
    given = json.loads(sys.argv[3]) if len(sys.argv) > 3 else {}
    sys.stdout.write(json.dumps(anyio.run(enter, Path(sys.argv[1]), sys.argv[2], given)) + "\n")
