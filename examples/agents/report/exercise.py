"""Runs the report agent in every mode, kills it, and counts from outside what happened.

    python -m examples.agents.report.exercise [--json]

Publications are counted in the tool's own database, requests in the provider's own record, receipts are verified
against the store's public key: nothing is taken from what the agent says of itself. Exits 1 if a figure is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ditto.receipts import load_trusted_keys, verify_receipts
from ditto.testing.provider_record import count_chat
from examples.agents.report.publication import count_publications

ROOT = Path(__file__).parents[3]
WORKER = "examples.agents.report.worker"
EXERCISED = "examples.agents.report.killed_worker"


@dataclass(frozen=True, slots=True)
class Mode:
    """One way to run the agent, and what must come of it."""

    name: str
    script: str
    stream: bool
    publications: int
    provider_calls: int
    complete: bool
    attempts: int = 1
    killed: bool = False


MODES = (
    Mode("generate", "report", False, 1, 2, True),
    Mode("stream", "report", True, 1, 2, True),
    Mode("truncated-stream", "report-truncated", True, 0, 1, False),
    Mode("generate, killed after the first receipt", "report", False, 1, 2, True, attempts=2, killed=True),
    Mode("stream, killed after the first receipt", "report", True, 1, 2, True, attempts=2, killed=True),
)


@dataclass(frozen=True, slots=True)
class Row:
    """What was counted."""

    mode: str
    publications: int
    provider_calls: int
    complete: bool
    attempts: int
    receipts: int
    receipts_equal: bool
    """Each receipt that was handed over again is the same, byte for byte."""
    verified: bool

    def is_right(self, mode: Mode) -> bool:
        """Whether the figures are those that must come of the mode."""
        counted = (self.publications, self.provider_calls, self.complete, self.attempts)
        wanted = (mode.publications, mode.provider_calls, mode.complete, mode.attempts)
        handed_over = self.receipts == mode.publications * mode.attempts
        return counted == wanted and handed_over and self.receipts_equal and self.verified


def exercise(mode: Mode, directory: Path) -> Row:
    """Run one mode in a fresh directory."""
    record = directory / "model.db"
    with provider(record, mode.script) as endpoint:
        attempts, complete = 0, False
        for module in [EXERCISED, WORKER] if mode.killed else [WORKER]:
            attempts += 1
            complete = run_worker(module, directory, endpoint, mode.stream)
    lines = (
        (directory / "receipts.ndjson").read_bytes().splitlines() if (directory / "receipts.ndjson").exists() else []
    )
    return Row(
        mode=mode.name,
        publications=count_publications(directory / "reports.db"),
        provider_calls=count_chat(record),
        complete=complete,
        attempts=attempts,
        receipts=len(lines),
        receipts_equal=len(set(lines)) == min(len(lines), 1),
        verified=not lines or is_verified(directory),
    )


def run_worker(module: str, directory: Path, endpoint: str, stream: bool) -> bool:
    """Whether the worker, a process of its own, completed the report."""
    command = [sys.executable, "-m", module, "--directory", str(directory), "--endpoint", endpoint]
    ran = subprocess.run(
        [*command, *(["--stream"] if stream else [])],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    return ran.returncode == 0 and json.loads(ran.stdout)["complete"] is True


def is_verified(directory: Path) -> bool:
    """Whether every line of the receipts is what the store signed."""
    trusted = load_trusted_keys([directory / "ditto.db.pub"])
    with (directory / "receipts.ndjson").open("rb") as file:
        return verify_receipts(file, trusted).fault is None


@contextmanager
def provider(record: Path, script: str) -> Iterator[str]:
    """The scripted provider, a process of its own, and where it is reached."""
    command = [sys.executable, "-m", "ditto.testing.provider", "--db", str(record), "--script", script]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env={**os.environ}) as server:
        assert server.stdout is not None
        try:
            yield json.loads(server.stdout.readline())["base_url"]
        finally:
            server.terminate()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m examples.agents.report.exercise", description="Runs every mode.")
    parser.add_argument("--json", action="store_true", help="print the rows as a JSON array")
    options = parser.parse_args(arguments)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="ditto-report-") as folder:
        for number, mode in enumerate(MODES):
            directory = Path(folder) / str(number)
            directory.mkdir(mode=0o700)
            rows.append(exercise(mode, directory))
    if options.json:
        sys.stdout.write(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    else:
        sys.stdout.write(table(rows))
    return 0 if all(row.is_right(mode) for row, mode in zip(rows, MODES, strict=True)) else 1


def table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    names: dict[str, Any] = {name: name.replace("_", " ") for name in asdict(rows[0])}
    lines = [list(names.values()), ["---"] * len(names)]
    lines += [[str(getattr(row, name)) for name in names] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
