"""The world of a money transfer: a random one, the bank, the HTTP model, and what is left afterwards."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ditto.recovery import Profile
from ditto.testing.provider import Script, ScriptedProvider
from tests.examples.recovery_model import default_script
from tests.examples.recovery_world import JOB, Audit, World
from tests.examples.transfer_adapter import TRANSFER, TransferStore
from tests.examples.transfer_service import HELD, TransferFaults, TransferService, read_bank


@dataclass(frozen=True, slots=True)
class Transfer:
    payer: str
    payee: str
    amount: int
    funds: int

    @classmethod
    def random(cls, seed: int) -> Transfer:
        choose = random.Random(seed)
        amount = choose.randint(1, 900)
        payer, payee = choose.sample(range(100, 1000), 2)
        return cls(f"ACC-{payer}", f"ACC-{payee}", amount, amount + choose.randint(0, 100))

    @property
    def text(self) -> str:
        return f"Transfer request. From: {self.payer}; to: {self.payee}; amount: {self.amount}."

    def to_json(self) -> dict[str, Any]:
        return {"from": self.payer, "to": self.payee, "amount": self.amount}


@asynccontextmanager
async def open_transfers(
    directory: Path,
    transfer: Transfer,
    *,
    profile: Profile = TRANSFER,
    faults: TransferFaults | None = None,
    script: Script = default_script,
    requires_approval: bool = False,
    create: bool = True,
) -> AsyncIterator[World[TransferService, TransferStore]]:
    if create:
        (directory / f"{JOB}.txt").write_text(transfer.text, encoding="utf-8")
    accounts = {transfer.payer: transfer.funds, transfer.payee: 0}
    bank = TransferService(directory / "bank.sqlite", accounts, faults=faults)
    model = ScriptedProvider(directory / "model.sqlite", script)
    async with bank, model:
        with closing(TransferStore(directory, bank.url, profile)) as store:
            if create:
                await store.create(JOB, requires_approval)
            yield World(directory, store, bank.url, model.base_url, bank, model, lambda: read_bank(bank.path))


def effects(found: Audit) -> list[str]:
    """What the bank has done, in order."""
    return [row["kind"] for row in found.ledger["effects"]]


def check_transfer(found: Audit, transfer: Transfer) -> None:
    """No money is made or lost, and it is where the effects say."""
    funds = {row["name"]: row["funds"] for row in found.ledger["accounts"]}
    captured = (found.made["capture"] - found.made["reverse"]) * transfer.amount
    held = (found.made["hold"] - found.made["void"]) * transfer.amount - captured
    assert funds == {transfer.payer: transfer.funds - held - captured, HELD: held, transfer.payee: captured}
    assert sorted(effects(found)) == sorted(found.made.elements())
    if found.stage == "compensated":
        assert captured == held == 0
