"""Stores with little runs in them, and what a second connection sees of them."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ditto.clock import Clock
from ditto.secrets import Redactor
from ditto.store import transitions
from ditto.store.connection import Location
from ditto.store.records import Event, Fence, NewRun, StepRow
from ditto.store.schema import StepState
from ditto.store.store import Store
from ditto.store.values import Stored, digest, encode, store_text

VALUE_MAX = 10_000_000


@asynccontextmanager
async def opened(path: Path, *, busy_timeout_s: float = 10.0) -> AsyncIterator[Store]:
    """A store, closed afterwards."""
    location = Location(path, busy_timeout_s=busy_timeout_s)
    store = Store(location, redactor=Redactor(()), clock=Clock(), value_max_bytes=VALUE_MAX)
    try:
        yield store
    finally:
        await store.close()


def stored(value: Any) -> Stored:
    """The stored form of a value."""
    return store_text(encode(value, what="value", max_bytes=VALUE_MAX))


def new_run(run_id: str = "run", *, generation: int = 1, owner: str = "owner", input: Any = None) -> NewRun:
    """What a run of graph `flow` is created with."""
    value = stored(input)
    return NewRun(run_id, generation, "graph", "flow", "1", value, digest(value.body), owner)


def step(path: str, state: StepState = StepState.COMPLETED, *, attempt: int = 1, output: Any = "done") -> StepRow:
    """A step's row; only a completed one has an output."""
    return StepRow(
        path=path,
        type="STEP",
        version="1",
        after="[]",
        effect="write",
        state=state,
        attempt=attempt,
        output=stored(output) if state is StepState.COMPLETED else None,
    )


def told(row: StepRow) -> Event:
    """The event that goes with a step's row."""
    return Event(f"step_{row.state}", row.path)


async def create(store: Store, run_id: str = "run", *, owner: str = "owner", generation: int = 1) -> Fence:
    """A run that is ours."""
    new = new_run(run_id, owner=owner, generation=generation)
    run = await store.commit(lambda tx: transitions.create_run(tx, new, (Event("run_created"),)))
    return Fence(run, owner, 1, run_id, "flow")


@dataclass(frozen=True)
class Picture:
    """What is durable, times left out."""

    runs: list[tuple[Any, ...]]
    """(run id, generation, status, owner, fence, seq, error)"""
    steps: list[tuple[Any, ...]]
    """(run, path, state, attempt, output with its body)"""
    events: list[tuple[Any, ...]]
    """(run, number, kind, step, body)"""


def look(path: Path) -> Picture:
    """What a second connection sees. Asserts that no half of anything is there."""
    with closing(sqlite3.connect(path, isolation_level=None, timeout=0)) as db:
        db.execute("BEGIN")
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert db.execute("PRAGMA foreign_key_check").fetchall() == []
        ids = {id: _name(*run) for id, *run in db.execute("SELECT id, run_id, generation FROM ditto_runs").fetchall()}
        runs = db.execute("SELECT run_id, generation, status, owner, fence, seq, error FROM ditto_runs ORDER BY id")
        steps = db.execute("SELECT run, path, state, attempt, output FROM ditto_steps ORDER BY run, path").fetchall()
        events = db.execute(
            "SELECT id >> 32, id & 4294967295, kind, step, body FROM ditto_events ORDER BY id"
        ).fetchall()
        bodies = {digest.hex(): body for digest, body in db.execute("SELECT digest, body FROM ditto_values").fetchall()}
        picture = Picture(
            runs=runs.fetchall(),
            steps=[
                (ids[run], path, state, attempt, bodies[output[1:]] if output and output[0] == "@" else output)
                for run, path, state, attempt, output in steps
            ],
            events=[(ids[run], *rest) for run, *rest in events],
        )
    check_whole(picture)
    return picture


def _name(run_id: str, generation: int) -> str:
    return run_id if generation == 1 else f"{run_id}#{generation}"


def check_whole(picture: Picture) -> None:
    """No event without its change, no change without its event."""
    changes = {f"step_{state}" for state in StepState}
    for run_id, generation, status, owner, _, seq, _ in picture.runs:
        name = _name(run_id, generation)
        history = [event for event in picture.events if event[0] == name]
        assert [number for _, number, *_ in history] == list(range(1, seq + 1)), "each number once, none missing"
        assert (owner is not None) == (status == "running"), "whoever drives it owns it, and nobody else"
        last = {step: kind for _, _, kind, step, _ in history if kind in changes}
        states = {path: state for run, path, state, *_ in picture.steps if run == name}
        assert {path: f"step_{state}" for path, state in states.items()} == last


def can_write(path: Path, *, timeout_s: float = 0) -> bool:
    """Whether another connection can write: at once, or when a transaction that is under way has ended."""
    with closing(sqlite3.connect(path, isolation_level=None, timeout=timeout_s)) as db:
        try:
            db.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return False
        db.execute("ROLLBACK")
    return True
