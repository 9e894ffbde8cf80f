"""Changed code: whether the recorded steps of a run still fit the Graph that wants to go on from them.

They fit if each one that completed, waits, or is in doubt still exists with the same type, dependencies and version.
Nodes that have not run may be changed, added or removed. What a step asked before it ran goes with its node.
"""

from __future__ import annotations

from collections.abc import Mapping

from ditto.engine.approving import BELOW, owner_missing
from ditto.graph import Graph
from ditto.store.records import StepRow
from ditto.store.schema import SETTLED, StepState
from ditto.store.values import decode

_KEPT = SETTLED | {StepState.ADMITTED, StepState.UNKNOWN, StepState.WAITING}
"""Step states that bind the code: what completed, what may have changed the world, and what somebody is to answer."""


def list_differences(graph: Graph, rows: Mapping[str, StepRow], prefix: str = "") -> list[str]:
    """What differs between the recorded steps below `prefix` and the Graph; empty if the run may go on."""
    differences: list[str] = []
    for path, row in rows.items():
        if row.state not in _KEPT or not path.startswith(prefix):
            continue
        name = path[len(prefix) :]
        if (owner := name.removesuffix(BELOW)) != name:
            if owner not in graph.nodes and prefix + owner not in rows:
                differences.append(owner_missing(row, prefix + owner, f"the graph has no node {owner}"))
            continue
        node = graph.nodes.get(name)
        if node is None:
            differences.append(f"step {path} is recorded as {row.state}, and the graph has no node {name}")
            continue
        recorded = (row.type, decode(row.after), row.version)
        present = (node.type, list(node.after), node.version)
        for what, was, now in zip(("type", "dependencies", "version"), recorded, present, strict=True):
            if was != now:
                differences.append(f"step {path} is recorded with {what} {was}, and now has {now}")
        if row.state is StepState.WAITING and node.wait is not None and row.key != node.wait.name:
            differences.append(f"step {path} waits for {row.key}, and would now wait for {node.wait.name}")
    return differences
