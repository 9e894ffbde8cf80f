"""Little runs in a store of any dialect, and the picture that an outsider has of them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

from ditto.store import queries, transitions
from ditto.store.records import COMPLETED, Event, Fence, NewRun, RunEnd, RunRow, StepRow
from ditto.store.schema import StepState
from ditto.store.store import Store
from ditto.store.transitions import Transaction
from ditto.store.values import Stored, digest, encode, store_text

VALUE_MAX = 10_000_000

WAIT_ENDS: Final = frozenset({"signal_received", "approval_decided", "wait_over"})
"""Events that end a wait, and so complete its step."""


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


def signal_wait(path: str, name: str, *, due_at: int | None = None) -> StepRow:
    """The row of a step that waits for a signal."""
    return replace(step(path, StepState.WAITING), type="WAIT.SIGNAL", effect=None, key=name, due_at=due_at)


def told(row: StepRow) -> Event:
    """The event that goes with a step's row."""
    return Event(f"step_{row.state}", row.path)


async def create(store: Store, run_id: str = "run", *, owner: str = "owner", generation: int = 1) -> Fence:
    """A run that is ours."""
    new = new_run(run_id, owner=owner, generation=generation)
    run = await store.commit(lambda tx: transitions.create_run(tx, new, (Event("run_created"),)))
    return Fence(run, owner, 1, run_id, "flow")


def record(store: Store, fence: Fence, *rows: StepRow) -> asyncio.Future[Any]:
    """Rows of steps that have none yet, with their events."""
    return store.commit(lambda tx: transitions.record_steps(tx, fence, rows, [told(row) for row in rows]))


def release(store: Store, fence: Fence, end: RunEnd = COMPLETED) -> asyncio.Future[Any]:
    """Let go of a run."""
    return store.commit(lambda tx: transitions.release_run(tx, fence, end))


async def claim(store: Store, run: RunRow, owner: str = "owner") -> Fence:
    """Take a run over, as it was seen."""
    fence = await store.commit(
        lambda tx: transitions.claim_run(tx, run, owner, [Event("run_resumed")], deadline_at=None)
    )
    return Fence(run.id, owner, fence, run.run_id, run.workflow)


async def get(store: Store, run_id: str = "run") -> RunRow:
    """A run as it stands."""
    run = await store.read(queries.get_run, run_id)
    assert run is not None
    return run


@asynccontextmanager
async def all_at_once(store: Store) -> AsyncIterator[None]:
    """What is submitted inside waits for the committer together: it is busy until the end of the block."""
    begun, go = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def hold(tx: Transaction) -> None:
        loop.call_soon_threadsafe(begun.set)
        go.wait()

    held = store.commit(hold)
    try:
        await begun.wait()
        yield
    finally:
        go.set()
        await held


@dataclass(frozen=True)
class Picture:
    """What is durable, times left out."""

    runs: list[tuple[Any, ...]]
    """(run id, generation, status, owner, fence, seq, error)"""
    steps: list[tuple[Any, ...]]
    """(run, path, state, attempt, output with its body)"""
    events: list[tuple[Any, ...]]
    """(run, number, kind, step, body)"""


def take_picture(read: Callable[[str], list[tuple[Any, ...]]]) -> Picture:
    """What these queries find, all asked in one snapshot."""
    ids = {id: _name(*run) for id, *run in read("SELECT id, run_id, generation FROM ditto_runs")}
    bodies = {bytes(digest).hex(): body for digest, body in read("SELECT digest, body FROM ditto_values")}
    steps = read("SELECT run, path, state, attempt, output FROM ditto_steps ORDER BY run, path")
    events = read("SELECT id >> 32, id & 4294967295, kind, step, body FROM ditto_events ORDER BY id")
    return Picture(
        runs=read("SELECT run_id, generation, status, owner, fence, seq, error FROM ditto_runs ORDER BY id"),
        steps=[
            (ids[run], path, state, attempt, bodies[output[1:]] if output and output[0] == "@" else output)
            for run, path, state, attempt, output in steps
        ],
        events=[(ids[run], *rest) for run, *rest in events],
    )


def _name(run_id: str, generation: int) -> str:
    return run_id if generation == 1 else f"{run_id}#{generation}"


def check_whole(picture: Picture) -> None:
    """No event without its change, no change without its event."""
    changes = {f"step_{state}": state.value for state in StepState} | dict.fromkeys(WAIT_ENDS, "completed")
    for run_id, generation, status, owner, _, seq, _ in picture.runs:
        name = _name(run_id, generation)
        history = [event for event in picture.events if event[0] == name]
        assert [number for _, number, *_ in history] == list(range(1, seq + 1)), "each number once, none missing"
        owned = owner is not None
        assert owned == (status == "running") or status == "paused", "whoever drives or drains it owns it"
        last = {step: changes[kind] for _, _, kind, step, _ in history if kind in changes and step is not None}
        assert {path: state for run, path, state, *_ in picture.steps if run == name} == last
