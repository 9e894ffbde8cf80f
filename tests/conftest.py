"""Fixtures that any test may use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from ditto.engine import deadlines
from tests.processes import Child
from tests.store.faults import Faults, faulty_drivers

# A busy machine is no failure: no example has a deadline.
settings.register_profile("ditto", deadline=None, print_blob=True)
settings.load_profile("ditto")


@pytest.fixture
def store_path(tmp_path: Path) -> Path:
    """Where a new store may be made; neither the file nor its folder exists."""
    return tmp_path / "data" / "ditto.db"


@pytest.fixture
def start_child() -> Iterator[Callable[..., Child]]:
    """Starts `Child(source, *arguments)`; those that still run at the end of the test are killed."""
    children: list[Child] = []

    def start(source: str, *arguments: object) -> Child:
        child = Child(source, *arguments)
        children.append(child)
        return child

    yield start
    for child in children:
        child.close()


@pytest.fixture
def faults() -> Iterator[Faults]:
    """What the connections of SQLite stores meet that are opened from now on."""
    with faulty_drivers() as faults:
        yield faults


@pytest.fixture
def looking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for a time looks at the clock of the record all the time, so that a test may move it."""
    monkeypatch.setattr(deadlines, "CLOCK_LOOK_S", 0.0)
