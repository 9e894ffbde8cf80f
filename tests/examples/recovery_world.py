"""The world of one recovery test: a random order, the real service, the HTTP model, and what is left afterwards."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ditto import Config, Endpoint, ModelRef, Runtime, Sandbox, create_ditto
from ditto.recovery import Job, RecoveryInput
from ditto.testing.provider import Script, ScriptedProvider, order_script
from ditto_workers import create_context_worker, create_infer_worker, create_interaction_worker
from examples._shared.tools.fulfillment_ledger import read_ledger
from examples._shared.tools.fulfillment_service import Faults, FulfillmentService
from examples._shared.tools.recovery_store import RecoveryStore

REPOSITORY: Final = Path(__file__).parents[2]
JOB: Final = "task"
MODEL: Final = ModelRef("scripted", "order")
INPUT: Final = RecoveryInput(id=JOB, model=MODEL)


@dataclass(frozen=True, slots=True)
class Order:
    sku: str
    quantity: int
    address: str
    stock: int

    @classmethod
    def random(cls, seed: int) -> Order:
        """Small enough for the stock, and another one in each test."""
        choose = random.Random(seed)
        quantity = choose.randint(1, 9)
        address = f"Dock-{choose.choice(['North', 'South', 'Ost', 'Süd'])} {choose.randint(1, 99)}"
        return cls(f"SKU-{choose.randint(100, 999)}", quantity, address, quantity + choose.randint(0, 20))

    @property
    def text(self) -> str:
        return f"Fulfillment request. SKU: {self.sku}; quantity: {self.quantity}; delivery address: {self.address}."

    def to_json(self) -> dict[str, Any]:
        return {"sku": self.sku, "quantity": self.quantity, "address": self.address}


@dataclass
class World:
    """One job in one directory. `service`, `model` and `store` are open; runtimes come and go."""

    directory: Path
    order: Order
    service: FulfillmentService
    model: ScriptedProvider
    store: RecoveryStore

    @asynccontextmanager
    async def runtime(self) -> AsyncIterator[Runtime]:
        config = Config(model=MODEL, endpoints={MODEL.provider: Endpoint(base_url=self.model.base_url)})
        sandbox = Sandbox(tools=tuple(tool.name for tool in self.store.tools), network=(self.service.url,))
        workers = [create_context_worker(), create_infer_worker(), create_interaction_worker(tools=self.store.tools)]
        async with create_ditto(config, store=self.store.path, workers=workers, sandbox=sandbox) as runtime:
            yield runtime

    async def enter(self, entry: Any, **options: Any) -> Any:
        """One entry in a runtime of its own."""
        async with self.runtime() as runtime:
            return await entry(runtime, INPUT, **options)

    @property
    def job(self) -> Job:
        """The job as it is recorded."""
        return self.store.job(JOB)

    def requests(self) -> list[str]:
        """What the service was asked, in order: method and path."""
        return [f"{row['method']} {row['path']}" for row in read_ledger(self.service.path)["requests"]]


@asynccontextmanager
async def open_world(
    directory: Path,
    order: Order,
    *,
    faults: Faults | None = None,
    script: Script = order_script,
    requires_approval: bool = False,
    create: bool = True,
) -> AsyncIterator[World]:
    if create:
        (directory / f"{JOB}.txt").write_text(order.text, encoding="utf-8")
    service = FulfillmentService(directory / "service.sqlite", {order.sku: order.stock}, faults=faults)
    model = ScriptedProvider(directory / "model.sqlite", script)
    async with service, model:
        with closing(RecoveryStore(directory, service.url)) as store:
            if create:
                await store.create(JOB, requires_approval)
            yield World(directory, order, service, model, store)


@dataclass
class Audit:
    """What a fresh process finds in the folder. Checks, on the way, what must hold after every case."""

    job: dict[str, Any]
    stages: list[str]
    ledger: dict[str, list[dict[str, Any]]]
    calls: int
    made: Counter[str] = field(default_factory=Counter)
    """Committed operations, by kind."""

    @property
    def stage(self) -> str:
        return str(self.job["stage"])

    @property
    def posts(self) -> list[str]:
        return [row["path"].lstrip("/") for row in self.ledger["requests"] if row["method"] == "POST"]


def audit(directory: Path, order: Order) -> Audit:
    command = [sys.executable, "-m", "tests.examples.recovery_audit", str(directory)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=30, check=True)
    found = json.loads(done.stdout)
    made = Counter(row["kind"] for row in found["ledger"]["operations"] if row["state"] == "committed")
    result = Audit(found["job"], found["stages"], found["ledger"], found["calls"], made)
    assert found["projection"] == found["job"], "results/task.json is the job"
    assert found["revisions"] == list(range(1, found["job"]["revision"] + 1)), "each change has its event"
    _check_effects(result, order)
    return result


def _check_effects(found: Audit, order: Order) -> None:
    available = {row["sku"]: row["available"] for row in found.ledger["inventory"]}[order.sku]
    held = found.made["reserve"] - found.made["release"]
    assert available == order.stock - held * order.quantity
    assert max(found.made.values(), default=0) <= 1, "each effect was made once"
    if found.stage == "completed":
        assert found.made == {"reserve": 1, "ship": 1}
    if found.stage in ("failed", "timed-out", "rejected", "queued", "paused"):
        assert not found.ledger["operations"]
