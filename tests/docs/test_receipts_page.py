"""The page on the format of receipts: its example is verified by a reader who knows nothing but the page."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any, Final

import pytest
import rfc8785
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_public_key

import ditto.receipts
from ditto.receipts import Kind, Receipt, ReceiptOutcome, Verified
from tests.receipts.chains import verify

PAGE: Final = (Path(__file__).parents[2] / "docs" / "reference" / "receipts.md").read_text(encoding="utf-8")


def block(name: str) -> str:
    """A file that the page shows."""
    found = re.search(rf"<!-- file: {re.escape(name)} -->\n```text\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None, name
    return found[1]


def column(first: str) -> list[list[str]]:
    """The words in the first column of the table with this heading, and the other cells."""
    table = PAGE.partition(f"\n| {first} |")[2].partition("\n\n")[0].split("\n")[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


LINES: Final = block("receipts.ndjson").encode().splitlines()


def read(line: bytes, trusted: Ed25519PublicKey, before: dict[str, Any] | None) -> dict[str, Any]:
    """A receipt by the rules of the page. AssertionError or InvalidSignature for one that breaks them."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len({name for name, _ in pairs}) == len(pairs)
        return dict(pairs)

    receipt: dict[str, Any] = json.loads(line.decode("utf-8"), object_pairs_hook=once, parse_constant=pytest.fail)
    names = {name for cells in column("field") for name in re.findall(r"`(\w+)`", cells[0])}
    assert set(receipt) == names
    assert receipt["schema"] == "ditto.receipt.v1"
    assert all(0 <= value < 2**53 for value in receipt.values() if isinstance(value, int))
    assert f"`{receipt['outcome']}`" in [cells[0] for cells in column("outcome")]
    assert receipt["kind"] in ("tool", "model", "decision")
    assert (receipt["actor"] is not None) == (receipt["kind"] == "decision")
    assert rfc8785.dumps(receipt) == line
    body = rfc8785.dumps({name: value for name, value in receipt.items() if name not in ("id", "signature")})
    assert hashlib.sha256(body).hexdigest() == receipt["id"]
    raw = trusted.public_bytes(Encoding.Raw, PublicFormat.Raw)
    assert receipt["signer"] == hashlib.sha256(raw).hexdigest()
    trusted.verify(bytes.fromhex(receipt["signature"]), body)
    if before is None:
        assert (receipt["number"], receipt["previous"]) == (1, None)
    else:
        assert (receipt["number"], receipt["previous"]) == (before["number"] + 1, before["id"])
        assert receipt["store"] == before["store"]
    return receipt


def page_key() -> Ed25519PublicKey:
    key = load_pem_public_key(block("example.pub").encode())
    assert isinstance(key, Ed25519PublicKey)
    return key


def test_the_example_verifies_by_the_rules_of_the_page() -> None:
    before: dict[str, Any] | None = None
    told = []
    for line in LINES:
        before = read(line, page_key(), before)
        told.append((before["kind"], before["outcome"], before["decision"]))
    assert told == [("tool", "allow", None), ("tool", "unknown", None), ("decision", "allow", "committed")]


def test_the_example_is_what_the_code_says_it_is() -> None:
    key = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
    assert key.public_key() == page_key()
    arguments = json.loads(block("arguments.json"))
    found = verify([line + b"\n" for line in LINES], arguments=arguments)
    assert found.complete
    assert found.head is not None
    assert found.head in PAGE
    results = re.findall(r"stored as `(.*?)`, that of the last one as `(.*?)`", PAGE)[0]
    hashes = [json.loads(line)["outcome_hash"] for line in (LINES[0], LINES[2])]
    assert hashes == [hashlib.sha256(text.encode()).hexdigest() for text in results]


@pytest.mark.parametrize("number", range(3))
def test_no_byte_of_the_example_may_differ(number: int) -> None:
    before = None if number == 0 else json.loads(LINES[number - 1])
    for at in range(len(LINES[number])):
        line = LINES[number][:at] + bytes([LINES[number][at] ^ 1]) + LINES[number][at + 1 :]
        with pytest.raises((AssertionError, InvalidSignature, ValueError, KeyError)):
            read(line, page_key(), before)


def test_the_page_names_all_that_there_is() -> None:
    fields = [name for cells in column("field") for name in re.findall(r"`(\w+)`", cells[0])]
    assert sorted(fields) == sorted(Receipt.__slots__)
    assert [cells[0].strip("`") for cells in column("outcome")] == [word.value for word in ReceiptOutcome]
    assert ", ".join(f"`{word}`" for word in list(Kind)[:2]) + f" or `{Kind.DECISION}`" in PAGE
    named = PAGE.partition("## From Python")[2]
    assert not [name for name in ditto.receipts.__all__ if f"`{name}" not in named]
    assert not [name for name in Verified.__slots__ if f"`{name}`" not in named]
