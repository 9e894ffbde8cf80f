"""Receipts: signed records of what became of each effect, in one chain for each store.

`body.py` has the receipt and its one written form, `signing.py` the keys, `verify.py` the check of a file of receipts,
which needs no store. The format, for those who write a verifier of their own, is in docs/reference/receipts.md.
Importing this package brings in no cryptography.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ditto.receipts.body import SCHEMA, Draft, Kind, Receipt, ReceiptOutcome, hash_arguments

if TYPE_CHECKING:
    from ditto.receipts.signing import load_trusted_keys
    from ditto.receipts.verify import Fault, Verified, verify_receipts

__all__ = [
    "SCHEMA",
    "Draft",
    "Fault",
    "Kind",
    "Receipt",
    "ReceiptOutcome",
    "Verified",
    "hash_arguments",
    "load_trusted_keys",
    "verify_receipts",
]


def __getattr__(name: str) -> Any:
    """What needs cryptography, on first use."""
    if name == "load_trusted_keys":
        from ditto.receipts import signing

        return signing.load_trusted_keys
    if name in __all__:
        from ditto.receipts import verify

        return getattr(verify, name)
    raise AttributeError(f"module 'ditto.receipts' has no attribute {name!r}")
