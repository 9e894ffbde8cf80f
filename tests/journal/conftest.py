"""Agents that are killed: a nursery of them, and their model in a process of its own."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from ditto.testing.provider import Request, read_requests
from tests.crash.world import World
from tests.nursery import Nursery
from tests.processes import ROOT


@dataclass(frozen=True)
class Model:
    """The model's process: where it is asked, and what keeps its requests."""

    base_url: str
    db: Path


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    """Bears agents."""
    nursery = Nursery("tests.journal.program")
    yield nursery
    nursery.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """One model for all agents of a module; each conversation has a script of its own."""
    db = tmp_path_factory.mktemp("model") / "model.db"
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.journal.model", db],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'workers'}"},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    yield Model(process.stdout.readline().strip(), db)
    process.stdin.close()
    process.stdout.close()
    process.wait()


@dataclass
class Case:
    """One agent in a folder of its own, over several processes."""

    nursery: Nursery
    model: Model
    folder: Path
    way: str = "agent"
    stream: bool = False
    tools: int = 1
    at_once: int = 1
    rounds: int = 1

    @property
    def store(self) -> Path:
        return self.folder / "ditto.db"

    @property
    def world(self) -> World:
        return World(self.folder / "world.db")

    @property
    def order(self) -> dict[str, Any]:
        kind = {name: getattr(self, name) for name in ("way", "stream", "tools", "at_once", "rounds")}
        paths = {"store": self.store, "world": self.folder / "world.db", "base_url": self.model.base_url}
        return {"case": str(self.folder), **kind, **paths}

    def live(self, **order: Any) -> dict[str, Any]:
        """One process."""
        self.folder.mkdir(exist_ok=True)
        return self.nursery.bear(**{**self.order, **order})

    def result(self, **order: Any) -> dict[str, Any]:
        """What a process that nobody kills comes to."""
        answer = self.live(**order)
        assert "result" in answer, answer.get("error", answer)
        result: dict[str, Any] = answer["result"]
        return result

    @property
    def requests(self) -> int:
        """How often the model was asked."""
        told = json.dumps(str(self.folder))
        return sum(told in str(request.body.get("messages", [{}])[0].get("content")) for request in self.asked())

    def asked(self) -> list[Request]:
        """All requests to the model, those of other cases, too."""
        return [request for request in read_requests(self.model.db) if request.is_chat]

    @property
    def effects(self) -> Counter[str]:
        """How often each tool did each thing."""
        found: Counter[str] = Counter()
        for (kind, _), count in self.world.calls().items():
            found[kind] += count
        return found

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """What stands in the store; nothing if there is none yet."""
        if not self.store.exists():
            return []
        with closing(sqlite3.connect(self.store)) as db:
            return db.execute(query).fetchall()

    @property
    def states(self) -> dict[str, str]:
        """The state of each step, by its path."""
        return dict(self.rows("SELECT path, state FROM ditto_steps ORDER BY id"))


@pytest_asyncio.fixture(autouse=True)
async def http_clients() -> AsyncIterator[None]:
    """The HTTP clients that a test's models were given are closed with it."""
    yield
    scene = sys.modules.get("tests.journal.pydantic_scene")
    while scene is not None and scene.CLIENTS:
        await scene.CLIENTS.pop().aclose()
