"""Rows of the store as plain data: what transitions write and queries read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from sqlalchemy import Column, Text

from ditto.errors import StoreDamagedError
from ditto.receipts.body import Draft
from ditto.store.schema import RunStatus, StepState, runs
from ditto.store.values import State, Stored

Kinds: TypeAlias = tuple[tuple[type, ...], ...]
"""The types that the driver may give for the columns of a row."""


def kinds_of(columns: Iterable[Column[Any]]) -> Kinds:
    """What these columns hold."""
    return tuple(
        (str if isinstance(column.type, Text) else int, *([type(None)] if column.nullable else []))
        for column in columns
    )


def check_row(row: Sequence[Any], kinds: Kinds, what: str) -> None:
    """Refuse a row that somebody else wrote: SQLite keeps anything in any column. Raises StoreDamagedError."""
    if not all(map(isinstance, row, kinds)):
        raise StoreDamagedError(f"{what}: a column holds another type than ditto writes; restore a backup")


_RUN_KINDS: Final = kinds_of(runs.columns)


@dataclass(frozen=True, slots=True)
class RunRow:
    """A run as it stands in the store. Value columns are still in their stored form."""

    id: int
    run_id: str
    generation: int
    kind: str
    workflow: str
    version: str
    input: str
    input_digest: str
    status: RunStatus
    owner: str | None
    fence: int
    seq: int
    iteration: int
    state: str | None
    error: str | None
    crashes: int
    """How often in a row its process died without any progress."""
    claimed_seq: int
    """The number of its last event when it was last claimed."""
    created_at: int
    updated_at: int
    deadline_at: int | None = None
    """When the run is over, whatever it waits for; None for never."""

    @classmethod
    def from_row(cls, row: tuple[Any, ...]) -> RunRow:
        """The row as the driver gives it, columns in the table's order."""
        check_row(row, _RUN_KINDS, f"ditto_runs, row {row[0]}")
        columns = list(row)
        try:
            columns[8] = RunStatus(columns[8])
        except ValueError:
            raise StoreDamagedError(
                f"ditto_runs, row {row[0]}: no release of ditto writes the status {row[8]!r}; restore a backup"
            ) from None
        return cls(*columns)


@dataclass(frozen=True, slots=True)
class NewRun:
    """What a run is created with."""

    run_id: str
    generation: int
    kind: str
    workflow: str
    version: str
    input: Stored
    input_digest: str
    owner: str
    state: Stored | None = None
    deadline_at: int | None = None


@dataclass(slots=True)
class StepRow:
    """A step as it stands in the store, or as a transition will make it stand."""

    path: str
    type: str
    version: str
    after: str
    """The names of the nodes it depends on, as a JSON list."""
    effect: str | None
    state: StepState
    attempt: int
    key: str | None = None
    arguments: State | None = None
    output: Stored | None = None
    error: str | None = None
    admitted_at: int | None = None
    settled_at: int | None = None
    due_at: int | None = None
    """When a waiting step is over by itself, or a failed one is tried again."""
    deadline_at: int | None = None
    """When all tries at the step are over."""
    progress: State | None = None
    """The state of an open Loop inside a Flow."""
    receipt: Draft | None = None
    """What is certified with the change that leads to this row."""


@dataclass(frozen=True, slots=True)
class Event:
    """One line of a run's history. `body` is small JSON data about it, never a value of the workflow."""

    kind: str
    step: str | None = None
    body: dict[str, Any] | None = None

    def body_text(self) -> str | None:
        """The body as it is stored."""
        return None if self.body is None else json.dumps(self.body, separators=(",", ":"), ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class ToldEvent:
    """A line of history as it is told to who listens, and how its step stands by the time that it is read."""

    number: int
    kind: str
    step: str | None
    body: Any
    type: str | None
    """The step's node type; None, as the rest, if it has no row."""
    state: StepState | None
    attempt: int | None
    output: Stored | None
    """Its value, if it is completed and of one of the types that were asked for."""


@dataclass(frozen=True, slots=True)
class Seen:
    """The state and attempt that a change of a step was decided on."""

    state: StepState
    attempt: int


@dataclass(frozen=True, slots=True)
class Fence:
    """Who may write a run: its row, its owner, and the number that rises each time it changes hands."""

    run: int
    owner: str
    fence: int
    run_id: str
    workflow: str


@dataclass(frozen=True, slots=True)
class LoopState:
    """A Loop's state after `iteration` rounds."""

    iteration: int
    state: State
    path: str | None = None
    """The path of the call, for a Loop inside a Flow."""
    name: str = ""
    """The Loop's name, and what it was asked with, for a Loop inside a Flow."""
    version: str = ""


@dataclass(frozen=True, slots=True)
class RunEnd:
    """How a runtime lets go of a run: the status it leaves, and the error it keeps."""

    status: RunStatus
    error: str | None = None
    event: Event = field(default_factory=lambda: Event("run_completed"))
    waits: int = 0
    """How many waits the run is let go of with; if one of them is over by then, it may go on at once."""


COMPLETED: Final = RunEnd(RunStatus.COMPLETED)
INTERRUPTED: Final = RunEnd(RunStatus.INTERRUPTED, event=Event("run_interrupted"))
DRAINED: Final = Event("run_drained")
PAUSED: Final = RunEnd(RunStatus.PAUSED, event=DRAINED)
