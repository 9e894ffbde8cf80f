"""Retry: a read limit of 16 bytes is too low, and is corrected to what the source needs. Ends completed.

python -m examples.control-flow.recovery.retry
"""

from __future__ import annotations

import sys

from ditto.recovery import run_retry
from examples._shared.recovery_story import Act, Story, enter_by, main

STORY = Story(
    name="retry",
    enter=enter_by(run_retry),
    ends="completed",
    begin=Act(options={"initial_max_bytes": 16, "max_attempts": 3}),
    resume=Act(options={"initial_max_bytes": 16, "max_attempts": 3}),
)

if __name__ == "__main__":
    sys.exit(main(STORY))
