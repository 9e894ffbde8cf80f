"""Views: what the runtime tells of runs, steps and events. Data only, as it stood when it was read."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ditto.errors import DittoError, StepError
from ditto.waits import OpenWait


@dataclass(frozen=True, slots=True)
class StepInfo:
    """One step of a run: `state` is admitted, completed, failed, skipped, refused, retrying, unknown, waiting
    or open."""

    path: str
    type: str
    effect: str | None
    state: str
    attempt: int
    key: str | None
    output: Any
    """The value, or what was received from an attempt that failed for good; None where there is none."""
    error: StepError | None
    admitted_at: datetime | None
    settled_at: datetime | None
    due_at: datetime | None = None
    """When a wait is over by itself, or a failed step is tried again."""


@dataclass(frozen=True, slots=True)
class RunInfo:
    """One run, its newest generation. `status` is one of the words of the state machine in the docs."""

    run_id: str
    generation: int
    kind: str
    workflow: str
    version: str
    status: str
    iteration: int
    state: Any
    """A Loop's state after `iteration` rounds, or what a Flow returned; None for a Graph."""
    error: StepError | None
    created_at: datetime
    updated_at: datetime
    steps: tuple[StepInfo, ...]
    waits: tuple[OpenWait, ...] = ()
    """What the run waits for, oldest first."""
    deadline_at: datetime | None = None

    def step(self, path: str) -> StepInfo | None:
        """The step with this path, if it has a record."""
        return next((step for step in self.steps if step.path == path), None)


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One run in a list: its newest generation, without its steps."""

    run_id: str
    generation: int
    kind: str
    workflow: str
    status: str
    created_at: datetime
    updated_at: datetime


@dataclass(frozen=True, slots=True)
class Recovered:
    """What became of one run that `recover` took up: its status, and the error that its driver met, if any."""

    run_id: str
    status: str
    error: DittoError | None = None


@dataclass(frozen=True, slots=True)
class Checked:
    """Whether this code can take one run up, as far as that is known without running it."""

    run_id: str
    workflow: str
    kind: str
    status: str
    resumable: bool
    differences: tuple[str, ...]
    """Why it cannot: each workflow, worker and step that is missing or does not fit; empty if it can."""


@dataclass(frozen=True, slots=True)
class Health:
    """What an examination of the store found. `faults` is empty for a sound file."""

    schema_version: int
    faults: tuple[str, ...]
    size_bytes: int
    wal_bytes: int
    runs: dict[str, int]
    """Runs by status; one that says running and has no live owner counts as interrupted."""
    live_owners: int
    unknown: tuple[tuple[str, str], ...]
    """Run id and path of steps that wait for a look-up or a person; at most 100."""


@dataclass(frozen=True, slots=True)
class EventInfo:
    """One line of a run's history. `number` counts from 1 within the run."""

    number: int
    at: datetime
    kind: str
    step: str | None
    body: Any
