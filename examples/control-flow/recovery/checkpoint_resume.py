"""Checkpoint: the order is reserved, and the process ends there. `--directory` ships it, and asks no model again.

python -m examples.control-flow.recovery.checkpoint_resume
python -m examples.control-flow.recovery.checkpoint_resume --directory .examples-recovery/checkpoint_resume-…
"""

from __future__ import annotations

import sys

from ditto.recovery import run_checkpoint
from examples._shared.recovery_story import Act, Story, enter_by, main

STORY = Story(
    name="checkpoint_resume",
    enter=enter_by(run_checkpoint),
    ends="reserved",
    begin=Act(options={"stop_after": "reserved"}),
)

if __name__ == "__main__":
    sys.exit(main(STORY))
