"""Pause: the order waits for a person, and nothing is reserved before that. Ends paused.

python -m examples.control-flow.recovery.pause_resume
python -m examples.control-flow.recovery.pause_resume --directory DIRECTORY --decision approve --actor NAME
"""

from __future__ import annotations

import sys

from ditto.recovery import Job, resume_paused, run_pause
from examples._shared.recovery_story import Scene, Story, main


async def enter(scene: Scene) -> Job:
    """Up to the pause; in a later process, on from the decision."""
    async with scene.open_runtime() as runtime:
        entry = run_pause if scene.is_first else resume_paused
        return await entry(runtime, scene.input)


STORY = Story(name="pause_resume", enter=enter, ends="paused", requires_approval=True)

if __name__ == "__main__":
    sys.exit(main(STORY))
