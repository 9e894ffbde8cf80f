"""Compensation: the shipment is rejected, and the reserved stock is released again. Ends compensated.

python -m examples.control-flow.recovery.compensation
"""

from __future__ import annotations

import sys

from ditto.recovery import run_compensation
from examples._shared.recovery_story import Act, Story, enter_by, main
from examples._shared.tools.fulfillment_service import Faults

STORY = Story(
    name="compensation",
    enter=enter_by(run_compensation),
    ends="compensated",
    begin=Act(faults=Faults(shipping_rejected=True)),
)

if __name__ == "__main__":
    sys.exit(main(STORY))
