"""The chain of receipts: each one is written in the transaction of the outcome it tells of, and names the one before.

So the order of the chain is the order of the commits, whichever process made them: only the holder of SQLite's write
lock adds to it, and it reads the end of the chain under that lock.
"""

from __future__ import annotations

import re
import sqlite3
from typing import TYPE_CHECKING, Final, TypeAlias

from ditto.errors import StoreDamagedError
from ditto.receipts.body import Draft, Place, write_receipt
from ditto.store import statements as sql

if TYPE_CHECKING:
    from ditto.receipts.signing import Signer

_HASH: Final = re.compile("[0-9a-f]{64}")

Tip: TypeAlias = tuple[int, str | None]
"""Number and id of the newest receipt; (0, None) before the first one."""


class Chain:
    """Adds receipts to open transactions. Used in the committer's thread."""

    def __init__(self, store_id: str, signer: Signer) -> None:
        self._store_id = store_id
        self._signer = signer

    def append(self, db: sqlite3.Connection, at: int, run: int, draft: Draft, tip: Tip | None) -> Tip:
        """Write one receipt. `tip` is what this transaction appended last; None if it appended nothing yet.

        Returns the new tip.
        """
        number, previous = read_tip(db) if tip is None else tip
        place = Place(self._store_id, number + 1, previous, at, self._signer.id)
        receipt_id, line = write_receipt(draft, place, self._signer.sign)
        sql.INSERT_RECEIPT(
            db, id=place.number, run=run, step=draft.step, attempt=draft.attempt, hash=receipt_id, line=line
        )
        return place.number, receipt_id


def read_tip(db: sqlite3.Connection) -> Tip:
    """The end of the chain as it stands. Raises StoreDamagedError if somebody edited it."""
    row = sql.GET_TIP(db).fetchone()
    if row is None:
        return 0, None
    if not isinstance(row[1], str) or _HASH.fullmatch(row[1]) is None:
        raise StoreDamagedError(f"ditto_receipts, row {row[0]}: its hash is not as ditto writes it; restore a backup")
    return row[0], row[1]
