"""Verifying: whether a file of receipts is what a trusted store signed, and how much of its chain it is.

Read line by line; what was seen is kept in a temporary file, so that memory does not grow with the file. Which keys are
trusted is for the caller to say: a key that comes with the receipts proves nothing.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, Final, NamedTuple

from cryptography.exceptions import InvalidSignature

from ditto.errors import ConfigError
from ditto.receipts.body import LINE_BYTES_MAX, Receipt, ReceiptError, hash_arguments, read_receipt
from ditto.receipts.signing import PublicKey

_HASH_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class Fault:
    """The first thing that is wrong. `line` counts from 1; 0 where it is the file as a whole."""

    line: int
    reason: str


@dataclass(frozen=True, slots=True)
class Verified:
    """What a file of receipts proves. Nothing, if there is a fault: what was counted is then what came before it."""

    lines: int
    unique: int
    repeats: int
    gaps: int
    """Receipts that are missing between the lowest and the highest number."""
    first: int | None
    """The lowest number."""
    last: int | None
    """The highest number."""
    head: str | None
    """The id of the receipt with the highest number."""
    complete: bool
    """All receipts from the first of the chain to `last` are there, in order."""
    anchored: int | None
    """The number of the receipt that the given head names."""
    fault: Fault | None = None

    @property
    def summary(self) -> str:
        """How much of the chain it is, in words."""
        if self.fault is not None:
            return f"line {self.fault.line}: {self.fault.reason}" if self.fault.line else self.fault.reason
        if self.anchored is not None:
            later = (self.last or 0) - self.anchored
            told = f"complete up to {self.anchored}, anchored by the given head"
            return f"{told}; {later} after it are not anchored" if later else told
        if self.complete:
            return f"complete up to {self.last}, end not anchored"
        return f"a selection of the chain between {self.first} and {self.last}, end not anchored"


def verify_receipts(
    file: BinaryIO,
    trusted: Mapping[str, PublicKey],
    *,
    head: str | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> Verified:
    """Check every line: JSON, fields, canonical form, id, signature by a trusted key, and its links to the others.

    `trusted` comes from `load_trusted_keys`; without any key nothing can be verified, which is an error and no result.
    With `head`, the id of a receipt that was recorded elsewhere, the file must be the chain from its beginning, in
    order, with that receipt in it. `arguments` maps operation keys to what they were given. Stops at the first fault.
    Raises ConfigError.
    """
    if not trusted:
        raise ConfigError("receipts are verified against the public key of the store that you trust: name it")
    verifying = _Verifying(trusted, head, {key: hash_arguments(value) for key, value in (arguments or {}).items()})
    with tempfile.TemporaryFile(buffering=0) as seen:
        verifying.seen = _Seen(seen.fileno())
        while line := file.readline(LINE_BYTES_MAX + 2):
            verifying.lines += 1
            try:
                verifying.check(*read_receipt(line.removesuffix(b"\n")))
            except ReceiptError as error:
                return verifying.result(Fault(verifying.lines, str(error)))
    return verifying.result(verifying.last_fault())


class _Known(NamedTuple):
    """What is kept of a receipt."""

    id: bytes
    previous: bytes


class _Seen:
    """The receipts that were seen, by number, in a file with holes."""

    def __init__(self, file: int) -> None:
        self._file = file

    def get(self, number: int) -> _Known | None:
        found = os.pread(self._file, 2 * _HASH_BYTES, number * 2 * _HASH_BYTES)
        return _Known(found[:_HASH_BYTES], found[_HASH_BYTES:]) if any(found) else None

    def put(self, number: int, known: _Known) -> None:
        os.pwrite(self._file, known.id + known.previous, number * 2 * _HASH_BYTES)


class _Verifying:
    """One file while it is read."""

    seen: _Seen

    def __init__(self, trusted: Mapping[str, PublicKey], head: str | None, arguments: dict[str, str]) -> None:
        self.trusted = trusted
        self.wanted_head = head
        self.arguments = arguments
        self.arguments_met: set[str] = set()
        self.lines = self.unique = self.repeats = 0
        self.in_order = True
        self.store: str | None = None
        self.first: int | None = None
        self.last = 0
        self.head: str | None = None
        self.anchored: int | None = None

    def check(self, receipt: Receipt, body: bytes) -> None:
        """One receipt whose form is right. Raises ReceiptError."""
        self._check_signature(receipt, body)
        if self.store not in (None, receipt.store):
            raise ReceiptError("it belongs to another store than the lines before it")
        self.store = receipt.store
        self._check_arguments(receipt)
        self._check_place(receipt)

    def _check_signature(self, receipt: Receipt, body: bytes) -> None:
        key = self.trusted.get(receipt.signer)
        if key is None:
            raise ReceiptError("its signer is none of the trusted keys")
        try:
            key.verify(bytes.fromhex(receipt.signature), body)
        except InvalidSignature:
            raise ReceiptError("its signature is not valid") from None

    def _check_arguments(self, receipt: Receipt) -> None:
        if receipt.key in self.arguments:
            self.arguments_met.add(receipt.key)
            if receipt.arguments_hash != self.arguments[receipt.key]:
                raise ReceiptError("its arguments are not the ones that are given for its key")

    def _check_place(self, receipt: Receipt) -> None:
        """Count it, and check its links to the neighbours that were seen."""
        number = receipt.number
        known = _Known(bytes.fromhex(receipt.id), bytes.fromhex(receipt.previous or "0" * 2 * _HASH_BYTES))
        if (before := self.seen.get(number)) is not None:
            if before != known:
                raise ReceiptError(f"it has the number {number}, which another receipt has")
            self.repeats += 1
            return
        if self.wanted_head is not None and number != self.last + 1:
            raise ReceiptError(f"receipt {self.last + 1} should stand here, not {number}")
        if (receipt.previous is None) != (number == 1):
            raise ReceiptError("the first receipt of a chain, and no other, has none before it")
        left, right = self.seen.get(number - 1), self.seen.get(number + 1)
        if (left is not None and left.id != known.previous) or (right is not None and right.previous != known.id):
            raise ReceiptError("it does not link to its neighbour in the chain")
        self.seen.put(number, known)
        self.unique += 1
        self.in_order = self.in_order and number > self.last
        self.first = number if self.first is None else min(self.first, number)
        if number > self.last:
            self.last, self.head = number, receipt.id
        if receipt.id == self.wanted_head:
            self.anchored = number

    def last_fault(self) -> Fault | None:
        """What can be told only at the end of the file."""
        if not self.lines:
            return Fault(0, "the file is empty, which proves nothing")
        if self.wanted_head is not None and self.anchored is None:
            return Fault(0, f"the given head is not among the {self.unique} receipts: the end is missing, or changed")
        if missing := sorted(self.arguments.keys() - self.arguments_met):
            return Fault(0, f"no receipt has the key {missing[0]!r}, for which arguments are given")
        return None

    def result(self, fault: Fault | None) -> Verified:
        """What was found."""
        gaps = 0 if self.first is None else self.last - self.first + 1 - self.unique
        return Verified(
            lines=self.lines,
            unique=self.unique,
            repeats=self.repeats,
            gaps=gaps,
            first=self.first,
            last=self.last or None,
            head=self.head,
            complete=fault is None and self.first == 1 and gaps == 0 and self.in_order,
            anchored=None if fault is not None else self.anchored,
            fault=fault,
        )
