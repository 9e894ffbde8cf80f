"""Fixtures of the crash tests."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.crash.world import World
from tests.processes import ROOT


class Nursery:
    """See `nursery.py`."""

    def __init__(self, module: str = "tests.crash.nursery", *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'workers'}"},
        )

    def bear(self, **order: Any) -> dict[str, Any]:
        """One child, to its end."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order, default=str) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        assert isinstance(answer, dict)
        return answer

    def close(self) -> None:
        """No more children."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    """Bears child processes."""
    nursery = Nursery()
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
