"""Chains of receipts that a test makes itself, by a key that everybody may know."""

from __future__ import annotations

import hashlib
import io
import json
import sqlite3
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import rfc8785
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from ditto import Runtime, create_ditto
from ditto.receipts import (
    Draft,
    Kind,
    ReceiptOutcome,
    Verified,
    hash_arguments,
    load_trusted_keys,
    verify_receipts,
)
from ditto.receipts.body import Place, write_receipt
from ditto.receipts.signing import PublicKey, Signer, key_id, public_path

KEY: Final = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
OTHER: Final = Ed25519PrivateKey.from_private_bytes(bytes(range(1, 33)))
STORE: Final = "01a22d46-0000-7000-8000-000000000001"

PAID: Final = Draft(
    run="order-1",
    generation=1,
    step="pay",
    attempt=1,
    key="order-1/1/pay",
    kind=Kind.TOOL,
    tool="pay",
    arguments_hash=hash_arguments({"amount": 40}),
    outcome=ReceiptOutcome.ALLOW,
    outcome_hash="c" * 64,
)


def trusted(*keys: Ed25519PrivateKey) -> Mapping[str, PublicKey]:
    """The public halves, as `load_trusted_keys` gives them."""
    return {key_id(key.public_key()): key.public_key() for key in keys or (KEY,)}


def drafts(number: int) -> list[Draft]:
    """What so many receipts say, each of a step of its own."""
    return [replace(PAID, step=f"pay{each}", key=f"order-1/1/pay{each}") for each in range(1, number + 1)]


def chain(said: Iterable[Draft], key: Ed25519PrivateKey = KEY, *, store: str = STORE) -> list[bytes]:
    """The lines of a whole chain, each with its line feed."""
    signer, previous, lines = Signer(key), None, []
    for number, draft in enumerate(said, 1):
        place = Place(store, number, previous, 1_790_000_000_000_000 + number, signer.id)
        previous, line = write_receipt(draft, place, signer.sign)
        lines.append(line.encode() + b"\n")
    return lines


def signed(fields: Mapping[str, Any], key: Ed25519PrivateKey = KEY) -> bytes:
    """A line with these fields, id and signature made anew, whatever the fields are."""
    signer = Signer(key)
    body = {**{name: value for name, value in fields.items() if name not in ("id", "signature")}, "signer": signer.id}
    text = rfc8785.dumps(body)
    return rfc8785.dumps({**body, "id": hashlib.sha256(text).hexdigest(), "signature": signer.sign(text)}) + b"\n"


def fields(line: bytes) -> dict[str, Any]:
    """The fields of a line."""
    data: dict[str, Any] = json.loads(line)
    return data


def verify(lines: Iterable[bytes], *keys: Ed25519PrivateKey, **options: Any) -> Verified:
    """Verify lines by the fixed key, or by these."""
    return verify_receipts(io.BytesIO(b"".join(lines)), trusted(*keys), **options)


def reason(found: Verified) -> tuple[int, str]:
    """Line and reason of what is wrong."""
    assert found.fault is not None, found
    return found.fault.line, found.fault.reason


async def lines_of(runtime: Runtime, run_id: str | None = None) -> list[bytes]:
    """The receipts that a runtime gives, as lines of a file."""
    return [line.encode() + b"\n" async for line in runtime.receipts(run_id)]


def certified(path: Path) -> list[dict[str, Any]]:
    """The receipts in a store's file, as another process sees them: one whole chain, by the keys beside it."""
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:
        rows = db.execute("SELECT id, step, attempt, hash, line FROM ditto_receipts ORDER BY id").fetchall()
    if not rows:
        return []
    head = rows[-1][3]
    file = io.BytesIO("".join(f"{row[4]}\n" for row in rows).encode())
    found = verify_receipts(file, load_trusted_keys([public_path(path)]), head=head)
    assert (found.fault, found.complete, found.anchored) == (None, True, len(rows)), found
    receipts = [json.loads(row[4]) for row in rows]
    assert [row[:4] for row in rows] == [
        tuple(each[name] for name in ("number", "step", "attempt", "id")) for each in receipts
    ]
    for attempt, told in groupby(sorted(receipts, key=_attempt), key=_attempt):
        outcomes = [each["outcome"] for each in told]
        assert len(outcomes) == 1 or (len(outcomes), outcomes[0]) == (2, "unknown"), f"{attempt}: {outcomes}"
    return receipts


def _attempt(receipt: dict[str, Any]) -> tuple[Any, ...]:
    return (receipt["run"], receipt["generation"], receipt["step"], receipt["attempt"])


async def verify_store(path: Path) -> str:
    """What a store's receipts prove by the keys beside it, and by what it says is the end of its chain."""
    async with create_ditto(store=path) as runtime:
        lines = await lines_of(runtime)
    return verify_receipts(io.BytesIO(b"".join(lines)), load_trusted_keys([public_path(path)])).summary
