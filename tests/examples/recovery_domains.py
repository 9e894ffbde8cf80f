"""The domains that the programs of the tests know, and what a folder's world is like: `world.json`."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from ditto.testing.provider import Script, order_script
from examples._shared.tools.fulfillment_ledger import read_ledger
from examples._shared.tools.fulfillment_service import Faults
from examples._shared.tools.recovery_store import RecoveryStore
from tests.examples.recovery_model import default_script, stalling_script
from tests.examples.recovery_world import JOB, JobStore, Ledger, Order, Site, open_world
from tests.examples.transfer_adapter import CHAIN, TRANSFER, TransferStore
from tests.examples.transfer_service import TransferFaults, read_bank
from tests.examples.transfer_world import Transfer, open_transfers

NOWHERE: Final = "http://127.0.0.1:1"


@dataclass(frozen=True, slots=True)
class Domain:
    """What is a domain's own: how its world and its files are opened."""

    open_world: Callable[..., Any]
    open_store: Callable[[Path, str], JobStore]
    read_ledger: Callable[[Path], Ledger]
    read_subject: Callable[..., Any]
    read_faults: Callable[[dict[str, Any]], Any]


ORDERS: Final = Domain(
    open_world, RecoveryStore, lambda directory: read_ledger(directory / "service.sqlite"), Order, Faults.from_json
)


def _transfers(profile: Any) -> Domain:
    return Domain(
        lambda directory, transfer, **options: open_transfers(directory, transfer, profile=profile, **options),
        lambda directory, url: TransferStore(directory, url, profile),
        lambda directory: read_bank(directory / "bank.sqlite"),
        Transfer,
        TransferFaults.from_json,
    )


DOMAINS: Final = {"orders": ORDERS, "transfer": _transfers(TRANSFER), "chain": _transfers(CHAIN)}


SCRIPTS: Final[dict[str, Script]] = {
    "default": default_script,
    "order": order_script,
    "stalling": stalling_script,
}


@dataclass(frozen=True, slots=True)
class Setting:
    """What the world of a folder is like for the programs that open it.

    `script` is what the model answers: `order` is never a real one, `stalling` never answers its first request. With
    `service_url` and `model_url` both live elsewhere, and the job is there already.
    """

    domain: str
    subject: dict[str, Any]
    faults: dict[str, Any] = field(default_factory=dict)
    requires_approval: bool = False
    script: Literal["default", "order", "stalling"] = "default"
    service_url: str | None = None
    model_url: str | None = None

    def write(self, directory: Path) -> None:
        (directory / "world.json").write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, directory: Path) -> Setting:
        return cls(**json.loads((directory / "world.json").read_text(encoding="utf-8")))

    @asynccontextmanager
    async def open(self, directory: Path) -> AsyncIterator[Site[Any]]:
        """The folder's world, with the job in it."""
        domain = DOMAINS[self.domain]
        if self.service_url is not None and self.model_url is not None:
            with closing(domain.open_store(directory, self.service_url)) as store:
                yield Site(directory, store, self.service_url, self.model_url)
            return
        async with domain.open_world(
            directory,
            domain.read_subject(**self.subject),
            faults=domain.read_faults(self.faults),
            script=SCRIPTS[self.script],
            requires_approval=self.requires_approval,
            create=not (directory / "results" / f"{JOB}.json").exists(),
        ) as world:
            yield world
