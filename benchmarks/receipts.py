"""What verifying receipts costs: `python -m benchmarks.receipts [--json] [--number N]`.

The bare cost is that of the signature checks and hashes alone, over the same bytes, in the same run; only the ratio
means anything. Memory is the most that was in use at once, for a tenth of the receipts and for all of them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from ditto.receipts import Draft, Kind, ReceiptOutcome, verify_receipts
from ditto.receipts.body import Place, read_receipt, write_receipt
from ditto.receipts.signing import PublicKey, Signer

NUMBER = 10_000
ROUNDS = 5


def lines(signer: Signer, number: int) -> Iterator[bytes]:
    """A chain of so many receipts."""
    previous = None
    for each in range(1, number + 1):
        draft = Draft(
            run=f"order-{each}",
            generation=1,
            step="pay",
            attempt=1,
            key=f"order-{each}/1/pay",
            kind=Kind.TOOL,
            tool="pay",
            arguments_hash="a" * 64,
            outcome=ReceiptOutcome.ALLOW,
            outcome_hash="b" * 64,
        )
        place = Place("01a22d46-0000-7000-8000-000000000001", each, previous, 1_790_000_000_000_000 + each, signer.id)
        previous, line = write_receipt(draft, place, signer.sign)
        yield line.encode() + b"\n"


def processor_us(work: Callable[[], object]) -> float:
    """Microseconds of processor time."""
    began = time.process_time()
    work()
    return (time.process_time() - began) * 1_000_000


def check_bare(public: Ed25519PublicKey, parts: list[tuple[bytes, bytes]]) -> None:
    """The signature checks and hashes, and nothing else."""
    for body, signature in parts:
        public.verify(signature, body)
        hashlib.sha256(body).hexdigest()


def verify(file: Path, trusted: dict[str, PublicKey]) -> None:
    """The whole verification."""
    with file.open("rb") as opened:
        assert verify_receipts(opened, trusted).complete


def peak_kib(file: Path, trusted: dict[str, PublicKey]) -> float:
    """The most memory in use while a file is verified."""
    tracemalloc.start()
    verify(file, trusted)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / 1024


def measure(folder: Path, number: int) -> dict[str, float]:
    """All figures, by name. Each round measures both costs, so a busy machine slows both; the middle round counts."""
    key = Ed25519PrivateKey.generate()
    signer, public = Signer(key), key.public_key()
    trusted: dict[str, PublicKey] = {signer.id: public}
    made = list(lines(signer, number))
    few, many = folder / "few.ndjson", folder / "many.ndjson"
    few.write_bytes(b"".join(made[: number // 10]))
    many.write_bytes(b"".join(made))
    parts = []
    for line in made:
        receipt, body = read_receipt(line.rstrip(b"\n"))
        parts.append((body, bytes.fromhex(receipt.signature)))
    rounds = [
        (processor_us(lambda: check_bare(public, parts)), processor_us(lambda: verify(many, trusted)))
        for _ in range(ROUNDS)
    ]
    bare, whole = sorted(rounds, key=lambda each: each[1] / each[0])[ROUNDS // 2]
    return {
        "bare_us_per_receipt": bare / number,
        "verify_us_per_receipt": whole / number,
        "verify_ratio": whole / bare,
        "peak_kib_tenth": peak_kib(few, trusted),
        "peak_kib": peak_kib(many, trusted),
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.receipts", description="What verifying receipts costs.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--number", type=int, default=NUMBER, help="receipts to verify")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ditto-receipts-") as folder:
        figures = {name: round(value, 2) for name, value in measure(Path(folder), options.number).items()}
    if options.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name:24} {value:>10,.2f}")


if __name__ == "__main__":
    main()
