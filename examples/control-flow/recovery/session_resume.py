"""Session: a question about an order that is reserved, asked in a new runtime, in the conversation that was saved.

python -m examples.control-flow.recovery.session_resume
"""

from __future__ import annotations

import sys

from ditto.recovery import SessionResult, run_checkpoint, run_session
from examples._shared.recovery_story import Act, Scene, Story, main

QUESTION = "Which item was ordered, how many of it, and how far is the order?"


async def enter(scene: Scene) -> SessionResult:
    """Reserve in one runtime, the first time; then restore the session in another and ask."""
    if scene.is_first:
        async with scene.open_runtime() as runtime:
            await run_checkpoint(runtime, scene.input, stop_after="reserved")
    async with scene.open_runtime() as runtime:
        return await run_session(runtime, scene.input, **scene.options)


STORY = Story(
    name="session_resume",
    enter=enter,
    ends="reserved",
    begin=Act(options={"question": QUESTION}),
    resume=Act(options={"question": QUESTION}),
)

if __name__ == "__main__":
    sys.exit(main(STORY))
