"""What folders of recovery jobs hold, read by a process that had no part in it: one JSON object a line.

python -m tests.examples.recovery_audit orders|transfer|chain DIRECTORY…
"""

from __future__ import annotations

import json
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from ditto.testing.provider import read_requests
from tests.examples.recovery_domains import DOMAINS, NOWHERE
from tests.examples.recovery_world import JOB


def read_audit(domain: str, directory: Path) -> dict[str, Any]:
    with closing(DOMAINS[domain].open_store(directory, NOWHERE)) as store:
        job, events = store.job(JOB).to_json(), store.events(JOB)
    return {
        "folder": str(directory),
        "job": job,
        "revisions": [event["revision"] for event in events],
        "stages": [event["stage"] for event in events],
        "projection": json.loads((directory / "results" / f"{JOB}.json").read_text(encoding="utf-8")),
        "ledger": DOMAINS[domain].read_ledger(directory),
        "calls": sum(request.is_chat for request in read_requests(directory / "model.sqlite")),
    }


if __name__ == "__main__":
    for folder in sys.argv[2:]:
        sys.stdout.write(json.dumps(read_audit(sys.argv[1], Path(folder))) + "\n")
