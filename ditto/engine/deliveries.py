"""Deliveries: the receipts of a turn's tool calls, handed to whoever keeps them outside of the store."""

from __future__ import annotations

import asyncio
import inspect
import json
from typing import Final

from ditto.receipts.body import Kind
from ditto.store import queries
from ditto.store.store import Store
from ditto.turn import ReceiptEvent, ReceiptSink

PAGE: Final = 100

OPERATIONS: Final = "t/"
"""What the paths of a turn's tool calls begin with."""


class Deliveries:
    """Hands over each receipt of one run, in the order of the chain, from the first one on."""

    def __init__(self, store: Store, run_id: str, sink: ReceiptSink) -> None:
        self._store = store
        self._run_id = run_id
        self._sink = sink
        self._delivered = 0
        self._one_at_a_time = asyncio.Lock()

    async def hand_over(self) -> None:
        """Return when the sink has taken every receipt that is on disk. Raises what the sink raises."""
        async with self._one_at_a_time:
            while True:
                page = await self._store.read(queries.list_receipts, self._run_id, self._delivered, PAGE)
                for number, line in page:
                    await self._deliver(line)
                    self._delivered = number
                if len(page) < PAGE:
                    return

    async def _deliver(self, line: str) -> None:
        receipt = json.loads(line)
        if receipt["kind"] != Kind.TOOL or not receipt["step"].startswith(OPERATIONS):
            return
        taken = self._sink(ReceiptEvent(line, receipt["key"], receipt["step"].removeprefix(OPERATIONS)))
        if inspect.isawaitable(taken):
            await taken
