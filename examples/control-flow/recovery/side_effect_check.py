"""Side-effect check: the response to the reservation is lost, and a look-up by its key finds it. Ends completed.

python -m examples.control-flow.recovery.side_effect_check
"""

from __future__ import annotations

import sys

from ditto.recovery import run_side_effect_check
from examples._shared.recovery_story import Act, Story, enter_by, main
from examples._shared.tools.fulfillment_service import Faults

STORY = Story(
    name="side_effect_check",
    enter=enter_by(run_side_effect_check),
    ends="completed",
    begin=Act(faults=Faults(drop_reservation_response=True)),
)

if __name__ == "__main__":
    sys.exit(main(STORY))
