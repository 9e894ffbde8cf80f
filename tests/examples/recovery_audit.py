"""What a folder of a recovery job holds, read by a process that had no part in it: one JSON object."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from ditto.testing.provider import read_requests
from examples._shared.tools.fulfillment_ledger import read_ledger
from examples._shared.tools.recovery_store import RecoveryStore

JOB = "task"


def read_audit(directory: Path) -> dict[str, Any]:
    with closing(RecoveryStore(directory, "http://127.0.0.1:1")) as store:
        job, events = store.job(JOB).to_json(), store.events(JOB)
    return {
        "job": job,
        "revisions": [event["revision"] for event in events],
        "stages": [event["stage"] for event in events],
        "projection": json.loads((directory / "results" / f"{JOB}.json").read_text(encoding="utf-8")),
        "ledger": read_ledger(directory / "service.sqlite"),
        "calls": sum(request.is_chat for request in read_requests(directory / "model.sqlite")),
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(read_audit(Path(sys.argv[1]))) + "\n")
