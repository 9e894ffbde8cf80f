"""Checking: which runs this code can take up, and why not the others. Reads only; starts and writes nothing.

For a Graph, and for the iteration that a Loop is in, that is known: the recorded steps are compared with the code. What
a Flow will ask for is known only by running it; here its name, its version and the node types it called are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from ditto.engine.changes import list_differences
from ditto.engine.flows import GRAPH, LOOP
from ditto.engine.recovering import Workflows
from ditto.engine.routing import Router, is_built_in
from ditto.engine.turns import TurnFlow
from ditto.errors import DefinitionError
from ditto.flow import Flow
from ditto.graph import Graph
from ditto.loop import Loop
from ditto.runs import Checked
from ditto.store import queries
from ditto.store.records import RunRow, StepRow
from ditto.store.schema import RunStatus
from ditto.store.store import Store

RUNS_PAGE: Final = 100
STEPS_PAGE: Final = 500


@dataclass(frozen=True, slots=True)
class Checker:
    """Compares recorded runs with the workflows and workers of one runtime."""

    store: Store
    router: Router
    workflows: Workflows
    live_status: Callable[[RunRow], str]

    async def check(self, query: Callable[..., list[RunRow]]) -> list[Checked]:
        """One Checked for each run that `query` lists, oldest first."""
        found: list[Checked] = []
        after = 0
        while True:
            page = await self.store.read(query, after, RUNS_PAGE)
            for run in page:
                after = run.id
                found.append(await self._check(run))
            if len(page) < RUNS_PAGE:
                return found

    async def _check(self, run: RunRow) -> Checked:
        status = self.live_status(run)
        if status == RunStatus.INTERRUPTED and await self.store.read(queries.has_lost, run.id):
            status = RunStatus.UNKNOWN
        differences = await self._differences(run)
        return Checked(run.run_id, run.workflow, run.kind, str(status), not differences, tuple(differences))

    async def _differences(self, run: RunRow) -> list[str]:
        match self.workflows.get((run.kind, run.workflow)):
            case None:
                return [self._missing(run)]
            case Graph() as graph:
                return await self._graph_differences(run, graph, "")
            case Loop() as loop:
                return await self._loop_differences(run, loop)
            case Flow() as flow:
                return await self._flow_differences(run, flow)

    def _missing(self, run: RunRow) -> str:
        if run.kind == TurnFlow.kind:
            return "a turn is no workflow that is registered: it goes on when its agent is asked for it again"
        others = [kind for kind, name in self.workflows if name == run.workflow]
        hint = f"; that name is registered for a {others[0]}" if others else ""
        return f"{run.kind} {run.workflow} is not registered{hint}"

    async def _graph_differences(self, run: RunRow, graph: Graph, prefix: str) -> list[str]:
        rows = await self._shapes(run, prefix)
        missing = [
            self._without_worker(node.type, f"node {node.name} of graph {graph.name}") for node in graph.nodes.values()
        ]
        return [each for each in missing if each] + list_differences(graph, rows, prefix)

    async def _loop_differences(self, run: RunRow, loop: Loop) -> list[str]:
        """What differs in the iteration that is under way; of earlier ones only the state is left."""
        graph: Any = loop.graph
        if not isinstance(graph, Graph):
            stored = await self.store.read(queries.load_state, run.state)
            try:
                if loop.done(None if stored is None else stored.decode()):
                    return []
                graph = loop.choose(None if stored is None else stored.decode())
            except Exception as error:  # noqa: BLE001 - a user's function raised: so it would when the run goes on
                return [f"a function of loop {loop.name} raised {type(error).__name__} for the recorded state"]
        return await self._graph_differences(run, graph, f"{run.iteration + 1}/")

    async def _flow_differences(self, run: RunRow, flow: Flow) -> list[str]:
        differences: list[str] = []
        if run.status is RunStatus.BLOCKED:
            differences.append("it is blocked, and only running it tells whether this code fits its recorded calls")
        if run.version != flow.version:
            differences.append(
                f"flow {flow.name} was at version {run.version} and is at {flow.version}: "
                "only running it tells whether its recorded calls fit"
            )
        for type_, path in await self.store.read(queries.list_call_types, run.id):
            if type_ not in (GRAPH, LOOP) and (missing := self._without_worker(type_, f"call {path}")):
                differences.append(missing)
        return differences

    def _without_worker(self, node_type: str, what: str) -> str | None:
        if is_built_in(node_type):
            return None
        try:
            self.router.handler(node_type)
        except DefinitionError as error:
            return f"{what}: {error.message}"
        return None

    async def _shapes(self, run: RunRow, prefix: str) -> Mapping[str, StepRow]:
        rows: dict[str, StepRow] = {}
        after = ""
        while True:
            page = await self.store.read(queries.list_shapes, run.id, prefix, after, STEPS_PAGE)
            for row in page:
                after = row.path
                rows[row.path] = row
            if len(page) < STEPS_PAGE:
                return rows
