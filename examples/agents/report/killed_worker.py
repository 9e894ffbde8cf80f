"""The ordinary report worker, but it kills itself right after it saved its first receipt. For the exercise."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from ditto.journal import ReceiptEvent
from examples.agents.report import worker

_save = worker.save_receipt


def save_and_die(file: Path, event: ReceiptEvent) -> None:
    """Save a receipt, and end this process at once, as a crash would."""
    _save(file, event)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    worker.save_receipt = save_and_die
    sys.exit(worker.main())
