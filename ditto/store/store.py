"""The store of one runtime: a file, the one writer, a reader, and the form that values take in it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from ditto.clock import Clock
from ditto.errors import StoreClosedError
from ditto.items import Items
from ditto.secrets import Redactor
from ditto.store import queries, values
from ditto.store.chain import Chain
from ditto.store.committer import Committer, Durable, Transition, Unit
from ditto.store.connection import Location, driver_errors, open_store
from ditto.store.local import LocalConnections
from ditto.store.reader import Reader
from ditto.store.values import Growing, State, Stored

T = TypeVar("T")


class Store:
    """Open from construction to `close`. Belongs to the event loop and the process that opened it."""

    def __init__(
        self, location: Location, *, redactor: Redactor, clock: Clock, value_max_bytes: int, receipts: bool = True
    ) -> None:
        self.id = open_store(location)
        self.location = location
        self.clock = clock
        self.certifies = receipts
        """Whether outcomes of effects get receipts."""
        self.local = LocalConnections()
        self._redactor = redactor
        self._value_max_bytes = value_max_bytes
        self._process = os.getpid()
        self._committer = Committer(location, clock)
        try:
            with driver_errors(location.path):
                self._has_receipts = queries.has_receipts(self._committer.driver)
            self._reader = Reader(location)
        except BaseException:
            self._committer.driver.close()
            raise
        self._committer.start()
        self._reader.start()

    @property
    def commits(self) -> int:
        """Transactions that this runtime has committed, but for `partial_commits`."""
        return self._committer.commits

    @property
    def partial_commits(self) -> int:
        """Transactions that only recorded text that was shown before its outcome."""
        return self._committer.partial_commits

    @property
    def committer(self) -> Committer:
        """The one writer."""
        return self._committer

    def encode(self, value: Any, what: str) -> Stored:
        """A value in its stored form, with secrets replaced. Raises InvalidValueError, LimitExceededError."""
        text = values.encode(value, what=what, max_bytes=self._value_max_bytes)
        return values.store_text(self._redactor.redact_json_text(text))

    def encode_growing(self, value: Any, what: str, append: Sequence[str] = ()) -> State:
        """The same for an object some of whose fields hold Items: each item is encoded once, whoever shares it.

        A plain list in a field named in `append` is made an Items. Raises as `encode`.
        """
        if not isinstance(value, dict):
            return self.encode(value, what)
        lists = {
            name: each if isinstance(each, Items) else Items(each)
            for name, each in value.items()
            if isinstance(each, Items) or (name in append and isinstance(each, list))
        }
        if not lists:
            return self.encode(value, what)
        for name, items in lists.items():
            items.growth.encode(len(items), partial(self._encode_item, f"an item of {what}.{name}"))
        return Growing(self.encode({**value, **dict.fromkeys(lists)}, what), lists)

    def _encode_item(self, what: str, item: Any) -> str:
        text = values.encode(item, what=what, max_bytes=self._value_max_bytes)
        return self._redactor.redact_json_text(text)

    def redact(self, text: str) -> str:
        """Text that may be written or shown: secrets replaced, lone surrogates repaired."""
        return self._redactor.redact_text(values.repair(text))

    def redact_beginning(self, text: str) -> tuple[str, str]:
        """See `Redactor.redact_beginning`."""
        return self._redactor.redact_beginning(text)

    def commit(
        self,
        *transitions: Transition,
        points: Sequence[str] = (),
        alone: bool = False,
        kept: Unit | None = None,
        after: Durable | None = None,
        apart: bool = False,
    ) -> Durable:
        """Apply transitions in one transaction; the future has the last one's result once it is on disk. See Unit."""
        self._refuse_fork()
        unit = Unit(transitions, tuple(points), alone=alone, kept=kept, after=after, apart=apart)
        return self._committer.submit(unit)

    def open_chain(self) -> None:
        """Have the key for receipts ready, before the first thing that gets one; afterwards it costs nothing.

        The key is made if the store has neither a key nor receipts. Raises StoreError (`store.key`).
        """
        if not self.certifies or self._committer.chain is not None:
            return
        from ditto.receipts.signing import open_signer

        signer = open_signer(self.location.path, may_create=not self._has_receipts)
        self._committer.chain = Chain(self.id, signer)

    def watch(self, tell: Callable[[], None] | None) -> None:
        """Call `tell` on the event loop whenever another process has written to the file; None stops that."""
        self._committer.on_outside_write = tell

    async def read(self, query: Callable[..., T], *arguments: Any) -> T:
        """The result of a query, run in the reader's thread."""
        self._refuse_fork()
        return await self._reader.read(query, *arguments)

    def stop(self) -> None:
        """Close without waiting until it is done."""
        self._reader.stop()
        self._committer.stop()

    async def close(self) -> None:
        """Commit what waits and close both connections. In a forked child: nothing, they are the parent's."""
        if not self.is_inherited:
            await self._reader.close()
            await self._committer.close()

    @property
    def is_inherited(self) -> bool:
        """Whether this process was forked off the one that opened the store."""
        return os.getpid() != self._process

    def _refuse_fork(self) -> None:
        if self.is_inherited:
            raise StoreClosedError(
                "this runtime was opened before fork(), and works in the parent only; start the child with 'spawn', "
                "or fork before the store is opened"
            )
