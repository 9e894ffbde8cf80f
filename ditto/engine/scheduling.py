"""Scheduling: what may run next. Pure: it knows a Graph and what has settled, and nothing of tasks or stores."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from ditto.graph import Graph, Node


def next_steps(graph: Graph, settled: Mapping[str, bool]) -> list[Node]:
    """The nodes that may start, given the settled ones: by name, True for completed, False for skipped.

    A node may start when all nodes it comes after are settled.
    """
    return [
        node
        for node in graph.nodes.values()
        if node.name not in settled and all(parent in settled for parent in node.after)
    ]


class Frontier:
    """The same, step by step: each settled node costs its children, not the whole Graph."""

    def __init__(self, graph: Graph, settled: Mapping[str, bool]) -> None:
        self._graph = graph
        self._children: dict[str, list[str]] = {name: [] for name in graph.nodes}
        self._waiting: dict[str, int] = {}
        for node in graph.nodes.values():
            for parent in node.after:
                self._children[parent].append(node.name)
            if node.name not in settled:
                self._waiting[node.name] = sum(parent not in settled for parent in node.after)
        self.ready = deque(next_steps(graph, settled))
        self.unsettled = len(self._waiting)
        """Nodes that are not settled yet, running ones included."""

    def settle(self, name: str) -> None:
        """A node is completed or skipped: those that waited for it alone become ready."""
        self.unsettled -= 1
        for child in self._children[name]:
            self._waiting[child] -= 1
            if self._waiting[child] == 0:
                self.ready.append(self._graph.nodes[child])
