"""Routing: which worker carries out a node type, and how many of its steps may run at once."""

from __future__ import annotations

import asyncio
import difflib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio

from ditto.config import Config
from ditto.engine.resources import ResourceHost
from ditto.engine.threads import Threads
from ditto.errors import ConfigError, DefinitionError
from ditto.graph import STEP_TYPE, Graph
from ditto.sandbox import Sandbox
from ditto.store.connection import Location
from ditto.waits import WaitKind
from ditto.worker import NodeHandler, Shown, Worker

WAIT_TYPES = frozenset(kind.value for kind in WaitKind)


@dataclass(slots=True)
class Route:
    """Where steps of one worker are carried out."""

    worker: Worker | None
    threads: Threads
    limiter: anyio.Semaphore | None
    """No CapacityLimiter: a handler may run a workflow whose steps take slots in the same task."""
    logger: logging.Logger
    resources: ResourceHost

    async def open_resources(self) -> Any:
        """The worker's resources, opened on first use."""
        return None if self.worker is None else await self.resources.get(self.worker)


class Router:
    """The workers of one runtime. Raises ConfigError for two of one type, or for one node type."""

    def __init__(self, config: Config, sandbox: Sandbox, location: Location, workers: tuple[Worker, ...]) -> None:
        self.config = config
        self._resources = ResourceHost(config, sandbox)
        self._routes: dict[str, tuple[Route, NodeHandler]] = {}
        self._steps = self._route(None)
        names: set[str] = set()
        for worker in workers:
            if worker.type in names:
                raise ConfigError(f"two workers have the type {worker.type}; each needs its own")
            names.add(worker.type)
            route = self._route(worker)
            for handler in worker.handlers.values():
                if handler.type in self._routes:
                    raise ConfigError(f"two workers carry out {handler.type}; a node type needs exactly one")
                _check_databases(handler.local_databases, location.path)
                self._routes[handler.type] = (route, handler)
        self.shown: Mapping[str, Shown] = {
            name: handler.shown for name, (_, handler) in self._routes.items() if handler.shown is not None
        }
        """The node types that show text, and how it is read from their recorded values."""
        self.shown_chars_max = config.workers.infer.response_max_bytes
        """How much text an attempt shows before it has an outcome."""

    def handler(self, node_type: str) -> NodeHandler:
        """How a node type is carried out. Raises DefinitionError naming what is missing."""
        if node_type not in self._routes:
            close = difflib.get_close_matches(node_type, self._routes, n=1)
            hint = f"; did you mean {close[0]}?" if close else "; pass its worker to create_ditto(workers=[…])"
            raise DefinitionError(f"no worker carries out node type {node_type}{hint}")
        return self._routes[node_type][1]

    def route(self, node_type: str) -> Route:
        """Where steps of a node type run."""
        return self._steps if is_built_in(node_type) else self._routes[node_type][0]

    def check(self, graph: Graph) -> None:
        """Refuse a Graph with a node that no worker carries out. Raises DefinitionError."""
        for node in graph.nodes.values():
            if not is_built_in(node.type):
                try:
                    self.handler(node.type)
                except DefinitionError as error:
                    raise DefinitionError(f"graph {graph.name}, node {node.name}: {error.message}") from None

    def loggers(self) -> list[logging.Logger]:
        """The loggers that handlers are given."""
        return list({route.logger.name: route.logger for route in self._all()}.values())

    def _all(self) -> list[Route]:
        return [self._steps, *{id(route): route for route, _ in self._routes.values()}.values()]

    async def close(self, grace_s: float) -> None:
        """Wait up to `grace_s` for handlers in threads, then close the workers' resources."""
        await asyncio.gather(*(route.threads.close(grace_s) for route in self._all()))
        await self._resources.close()

    def _route(self, worker: Worker | None) -> Route:
        name = "step" if worker is None else worker.type.lower()
        limit = None if worker is None else worker.concurrency or self._configured_limit(worker)
        return Route(
            worker=worker,
            threads=Threads(self.config.runtime.threads),
            limiter=None if limit is None else anyio.Semaphore(limit, fast_acquire=True),
            logger=logging.getLogger(f"ditto.worker.{name}"),
            resources=self._resources,
        )

    def _configured_limit(self, worker: Worker) -> int | None:
        """The limit that the configuration sets for one of ditto's own workers."""
        section = getattr(self.config.workers, worker.type.lower(), None)
        limit: int | None = getattr(section, "concurrency", None)
        return limit


def is_built_in(node_type: str) -> bool:
    """Whether the engine itself carries out nodes of this type: plain steps and waits."""
    return node_type == STEP_TYPE or node_type in WAIT_TYPES


def _check_databases(local_databases: tuple[tuple[str, Path], ...], store: Path) -> None:
    """A `local` tool works in the runtime's own transaction, so its database must be the runtime's store."""
    for tool, database in local_databases:
        if database.resolve() != store.resolve():
            raise ConfigError(
                f"tool {tool} is local to {database}, but the runtime's store is {store}; "
                f"use create_ditto(store={str(database)!r})"
            )
