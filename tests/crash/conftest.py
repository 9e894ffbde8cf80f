"""Fixtures of the crash tests."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.crash.world import World
from tests.nursery import Nursery


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    """Bears child processes."""
    nursery = Nursery("tests.crash.program")
    yield nursery
    nursery.close()


@dataclass
class Case:
    """One run of one workflow in a folder of its own, over several processes."""

    nursery: Nursery
    folder: Path
    workflow: str = ""

    @property
    def store(self) -> Path:
        return self.folder / "ditto.db"

    @property
    def world(self) -> World:
        return World(self.folder / "world.db")

    def live(self, **order: Any) -> dict[str, Any]:
        """One process."""
        self.folder.mkdir(exist_ok=True)
        return self.nursery.bear(store=self.store, world=self.folder / "world.db", workflow=self.workflow, **order)

    def result(self) -> Any:
        """What a process that nobody kills comes to."""
        answer = self.live()
        assert "result" in answer, answer.get("error", answer)
        return answer["result"]

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """What stands in the store."""
        with closing(sqlite3.connect(self.store)) as db:
            return db.execute(query).fetchall()
