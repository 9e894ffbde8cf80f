"""Fallback: the primary catalog answers 503, and the backup is asked. Ends completed, with selectedSource backup.

python -m examples.control-flow.recovery.fallback
"""

from __future__ import annotations

import sys

from ditto.recovery import run_fallback
from examples._shared.recovery_story import Act, Story, enter_by, main
from examples._shared.tools.fulfillment_service import Faults

STORY = Story(
    name="fallback",
    enter=enter_by(run_fallback),
    ends="completed",
    begin=Act(faults=Faults(primary_unavailable=True), options={"allowed_sources": ["primary", "backup"]}),
    resume=Act(options={"allowed_sources": ["primary", "backup"]}),
)

if __name__ == "__main__":
    sys.exit(main(STORY))
