"""Timeout: the catalog takes 5 seconds, and the read has 75 ms. Ends timed-out; `--directory` goes on from there.

python -m examples.control-flow.recovery.timeout
"""

from __future__ import annotations

import sys

from ditto.recovery import run_timeout
from examples._shared.recovery_story import Act, Story, enter_by, main
from examples._shared.tools.fulfillment_service import Faults

STORY = Story(
    name="timeout",
    enter=enter_by(run_timeout),
    ends="timed-out",
    begin=Act(faults=Faults(catalog_delay_ms=5000), options={"timeout_ms": 75}),
    resume=Act(options={"timeout_ms": 10_000}),
)

if __name__ == "__main__":
    sys.exit(main(STORY))
