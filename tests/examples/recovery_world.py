"""The world of one recovery test: a random order, the real service, the HTTP model, and what is left afterwards."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Generic, Protocol, TypeAlias, TypeVar

from ditto import Endpoint, Runtime, Sandbox, Tool, create_ditto
from ditto.recovery import Job, RecoveryInput
from ditto.testing.provider import Script, ScriptedProvider
from ditto_workers import create_context_worker, create_infer_worker, create_interaction_worker
from examples._shared.tools.fulfillment_ledger import read_ledger
from examples._shared.tools.fulfillment_service import Faults, FulfillmentService
from examples._shared.tools.recovery_store import RecoveryStore
from tests.examples import recovery_facts
from tests.examples.recovery_model import CONFIG, MODEL, default_script
from tests.examples.recovery_processes import audit_all

JOB: Final = "task"
INPUT: Final = RecoveryInput(id=JOB, model=MODEL)

Ledger: TypeAlias = dict[str, list[dict[str, Any]]]
"""Every table of a service, row by row; `requests` is one of them."""


class JobStore(Protocol):
    """What the harness needs of an adapter."""

    @property
    def path(self) -> Path: ...
    @property
    def tools(self) -> list[Tool]: ...
    async def create(self, id: str, requires_approval: bool = False) -> Job: ...
    def job(self, id: str) -> Job: ...
    def events(self, id: str) -> list[dict[str, Any]]: ...
    def decide(self, id: str, decision: Any, actor: str) -> Job: ...
    def close(self) -> None: ...


StoreT = TypeVar("StoreT", bound=JobStore)
ServiceT = TypeVar("ServiceT")


@dataclass
class Site(Generic[StoreT]):
    """One job in one directory, with a service and a model somewhere. Runtimes come and go."""

    directory: Path
    store: StoreT
    service_url: str
    model_url: str

    @asynccontextmanager
    async def runtime(self) -> AsyncIterator[Runtime]:
        config = CONFIG.model_copy(update={"endpoints": {MODEL.provider: Endpoint(base_url=self.model_url)}})
        sandbox = Sandbox(tools=tuple(tool.name for tool in self.store.tools), network=(self.service_url,))
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


@dataclass
class World(Site[StoreT], Generic[ServiceT, StoreT]):
    """A site whose service and model live in this process."""

    service: ServiceT
    model: ScriptedProvider
    read_ledger: Callable[[], Ledger]

    def requests(self) -> list[str]:
        """What the service was asked, in order: method and path."""
        return [f"{row['method']} {row['path']}" for row in self.read_ledger()["requests"]]


# --- orders ----------------------------------------------------------------------------------------------------------


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


@asynccontextmanager
async def open_world(
    directory: Path,
    order: Order,
    *,
    faults: Faults | None = None,
    script: Script = default_script,
    requires_approval: bool = False,
    create: bool = True,
) -> AsyncIterator[World[FulfillmentService, RecoveryStore]]:
    if create:
        (directory / f"{JOB}.txt").write_text(order.text, encoding="utf-8")
    service = FulfillmentService(directory / "service.sqlite", {order.sku: order.stock}, faults=faults)
    model = ScriptedProvider(directory / "model.sqlite", script)
    async with service, model:
        with closing(RecoveryStore(directory, service.url)) as store:
            if create:
                await store.create(JOB, requires_approval)
            yield World(
                directory, store, service.url, model.base_url, service, model, lambda: read_ledger(service.path)
            )


# --- what is left ----------------------------------------------------------------------------------------------------


@dataclass
class Audit:
    """What a fresh process finds in the folder."""

    job: dict[str, Any]
    stages: list[str]
    ledger: Ledger
    calls: int
    made: Counter[str] = field(default_factory=Counter)
    """Committed operations, by kind."""

    @property
    def stage(self) -> str:
        return str(self.job["stage"])

    @property
    def posts(self) -> list[str]:
        """The operations that the service was asked for, in order."""
        return [row["path"].lstrip("/") for row in self.ledger["requests"] if row["method"] == "POST"]


def audit(directory: Path, order: Order, *, killed: bool = False) -> Audit:
    """What a fresh process finds. Checks, on the way, what must hold after every case of orders."""
    found = examine("orders", directory, killed=killed)
    check_order(found, order)
    return found


def examine(domain: str, directory: Path, *, killed: bool = False) -> Audit:
    """What a fresh process finds, of whichever domain the job is."""
    return read_finding(audit_all(domain, [directory])[0], killed=killed)


def read_finding(found: dict[str, Any], *, killed: bool = False) -> Audit:
    """What the audit has said. Checks what must hold after every case, and notes it for the report.

    Only where an entry was `killed`, and none has come after it, the projection may be one of before.
    """
    made = Counter(row["kind"] for row in found["ledger"]["operations"] if row["state"] == "committed")
    recovery_facts.note_finding(found)
    assert killed or found["projection"] == found["job"], "results/task.json is the job"
    assert found["revisions"] == list(range(1, found["job"]["revision"] + 1)), "each change has its event"
    assert max(made.values(), default=0) <= 1, "each effect was made once"
    result = Audit(found["job"], found["stages"], found["ledger"], found["calls"], made)
    if result.stage in ("failed", "timed-out", "rejected", "queued", "paused"):
        assert not made
    return result


def check_order(found: Audit, order: Order) -> None:
    """The stock is down by what is held or shipped, and a completed job has both effects."""
    if found.stage in ("timed-out", "rejected", "queued", "paused"):
        assert not found.ledger["operations"]
    available = {row["sku"]: row["available"] for row in found.ledger["inventory"]}[order.sku]
    held = found.made["reserve"] - found.made["release"]
    assert available == order.stock - held * order.quantity
    if found.stage == "completed":
        assert found.made == {"reserve": 1, "ship": 1}
