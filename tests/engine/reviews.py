"""An application whose runs wait, as the `ditto` command is given it: `--app tests.engine.reviews:create`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ditto import Flow, FlowContext, Graph, Loop, Runtime, Waiting, create_ditto

PRIVATE = "private-4711"

REVIEWED = (
    Graph("reviewed")
    .step("draft", lambda input: {"text": input}, effect="pure")
    .approval("review", show=lambda draft: draft, after=("draft",), expires_s=86_400)
    .step("send", lambda review: review["decision"], after=("review",))
)
WITHOUT_REVIEW = Graph("reviewed").step("draft", lambda input: {"text": input}, effect="pure")
THREE = Graph("three")
for _name in ("n1", "n2", "n3"):
    THREE = THREE.approval(_name, show=lambda input: input)
PAID = Graph("paid").wait("paid", signal="bank.paid").step("end", lambda paid: paid["body"], after=("paid",))
NAP = Graph("nap").sleep("nap", 0.05)
LOOP = Loop("tries", Graph("try").step("try", lambda input: input), lambda s, o: s + 1, lambda s: s > 4, 2)
LONGER = Loop("tries", Graph("try").step("try", lambda input: input), lambda s, o: s + 1, lambda s: s > 4, 9)


async def _flow(ctx: FlowContext, input: Any) -> Any:
    return await ctx.child("inner", PAID, None)


FLOW = Flow("outer", _flow)


def create(store: Path | str = "ditto.db") -> Runtime:
    """The runtime of this application."""
    return create_ditto(store=store, workflows=[REVIEWED, THREE, PAID, NAP, LOOP, FLOW])


def create_next(store: Path | str = "ditto.db") -> Runtime:
    """That of its next release: nothing is reviewed, tries are longer, and there is no flow."""
    return create_ditto(store=store, workflows=[WITHOUT_REVIEW, THREE, PAID, NAP, LONGER])


async def park(workflow: Graph | Loop | Flow, run_id: str, input: Any = PRIVATE) -> None:
    """Begin a run on the store in the current folder, and leave it as it waits."""
    async with create() as runtime:
        assert isinstance(await runtime.run(workflow, input, id=run_id, on_wait="return"), Waiting)
