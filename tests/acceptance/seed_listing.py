"""An application of the recovery workflows: an order is reserved, everything is closed, opened again, and shipped.

Run by `test_wheel.py` outside the repository, with the installed package and a copy of `examples/` beside it. The
scripted provider stands in for a configured model. Prints the stages, the model calls and where `ditto` came from.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path

import anyio

import ditto
import ditto_workers
from ditto import Sandbox, create_ditto, load_config
from ditto.recovery import Job, RecoveryInput, run_checkpoint
from ditto.testing.provider import ScriptedProvider, order_script
from ditto_workers import create_context_worker, create_infer_worker, create_interaction_worker
from examples._shared.tools.fulfillment_ledger import read_ledger
from examples._shared.tools.fulfillment_service import start_fulfillment_service
from examples._shared.tools.recovery_store import RecoveryStore

ORDER = "order-731"


async def advance(directory: Path, *, create: bool = False, stop_after: str | None = None) -> tuple[Job, int]:
    """Open everything, enter once, close everything: the job, and how often the model has been asked so far."""
    service = await start_fulfillment_service(directory / "service.sqlite", {"SKU-731": 20})
    store = RecoveryStore(directory, service.url)
    try:
        if create:
            await store.create(ORDER)
        async with ScriptedProvider(directory / "model.sqlite", order_script) as provider:
            config = load_config(directory / "ditto.yaml", {"SCRIPTED_BASE_URL": provider.base_url})
            if config.model is None:
                raise SystemExit("Configure the model")
            runtime = create_ditto(
                config,
                store=store.path,
                sandbox=dataclasses.replace(
                    Sandbox.from_config(config.sandbox),
                    tools=tuple(tool.name for tool in store.tools),
                    network=(*config.sandbox.network, service.url),
                ),
                workers=[
                    create_context_worker(),
                    create_infer_worker(),
                    create_interaction_worker(tools=store.tools),
                ],
            )
            try:
                job = await run_checkpoint(runtime, RecoveryInput(id=ORDER, model=config.model), stop_after=stop_after)
            finally:
                await runtime.close()
            return job, provider.count
    finally:
        store.close()
        await service.close()


async def main() -> None:
    with tempfile.TemporaryDirectory(prefix="fulfillment-") as name:
        directory = Path(name)
        (directory / "ditto.yaml").write_text("model: scripted/order\n", encoding="utf-8")
        (directory / f"{ORDER}.txt").write_text(
            "Fulfillment request. SKU: SKU-731; quantity: 2; delivery address: Dock-North.", encoding="utf-8"
        )
        reserved, calls = await advance(directory, create=True, stop_after="reserved")
        assert reserved.stage == "reserved"
        assert calls == 1
        completed, calls = await advance(directory)
        assert completed.stage == "completed"
        assert calls == 1, "what was committed is not asked again"
        operations = [[row["kind"], row["state"]] for row in read_ledger(directory / "service.sqlite")["operations"]]
        found = {
            "stages": [reserved.stage, completed.stage],
            "calls": calls,
            "operations": operations,
            "modules": [ditto.__file__, ditto_workers.__file__],
        }
    print(json.dumps(found))  # noqa: T201 - what the test reads


if __name__ == "__main__":
    anyio.run(main)
