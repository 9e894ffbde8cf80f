"""Trouble: why a run cannot complete now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ditto.engine.halt import Halt
from ditto.engine.outcomes import ErrorRecord, is_lost, lost_reason
from ditto.errors import DittoError, LimitExceededError, RunPausedError, UnknownOutcomeError
from ditto.store.records import Event, RunEnd, RunRow, StepRow
from ditto.store.schema import RunStatus


@dataclass(slots=True)
class Trouble:
    """The first error of a run, and its unknown outcomes. An unknown outranks the error in the run's status."""

    halted: Halt
    """Set when nothing further may be started here."""
    error: ErrorRecord | None = None
    cause: BaseException | None = None
    unknown: dict[str, str] = field(default_factory=dict)
    """Path of each step whose outcome is unknown, and why."""
    waits: dict[str, StepRow] = field(default_factory=dict)
    """The open waits of a run that nothing else is wrong with."""
    child_paused: RunPausedError | None = None
    """One of these waits is for a child run that somebody paused."""

    def __bool__(self) -> bool:
        return self.error is not None or bool(self.unknown)

    def fail(self, error: ErrorRecord, cause: BaseException | None = None) -> None:
        """Keep the first error."""
        if self.error is None:
            self.error, self.cause = error, cause

    def note_lost(self, rows: Mapping[str, StepRow]) -> None:
        """What was lost and not settled in this drive is unknown, too."""
        for path, row in rows.items():
            if is_lost(row):
                self.unknown.setdefault(path, lost_reason(row))

    def end(self) -> RunEnd:
        """How the run is let go: unknown while an outcome is, failed once none is, else waiting."""
        error = None if self.error is None else self.error.to_text()
        if self.unknown:
            body = {"steps": sorted(self.unknown)}
            return RunEnd(RunStatus.UNKNOWN, error, Event("run_unknown", body=body))
        if self.error is None:
            event = Event("run_waiting", body={"steps": sorted(self.waits)})
            return RunEnd(RunStatus.WAITING, event=event, waits=len(self.waits))
        return RunEnd(RunStatus.FAILED, error, Event("run_failed", self.error.step, {"code": self.error.code}))

    def to_error(self, run: RunRow) -> DittoError:
        """What the caller gets: the first error, else that an outcome is unknown and how it can be settled."""
        if self.error is not None:
            raised = self.error.to_error(run.run_id)
            raised.__cause__ = self.cause
            return raised
        return unknown_outcome(run.run_id, self.unknown)


def unknown_outcome(run_id: str, unknown: dict[str, str]) -> UnknownOutcomeError:
    """The error that names the steps and the ways out."""
    listed = "; ".join(f"{path}: {reason}" for path, reason in sorted(unknown.items()))
    first = min(unknown)
    return UnknownOutcomeError(
        f"run {run_id}: the outcome of {'a step is' if len(unknown) == 1 else f'{len(unknown)} steps is'} unknown "
        f"({listed}). Run it again to ask a look-up once more, or record a decision: "
        f"runtime.resolve({run_id!r}, {first!r}, …)",
        steps=tuple(sorted(unknown)),
        run_id=run_id,
    )


def exhausted(run_id: str, workflow: str, iterations: int) -> LimitExceededError:
    """The error of a loop that hit its guard."""
    return LimitExceededError(
        f"loop {workflow}: not done after {iterations} iterations; its state is kept. "
        "Run it again with a higher max_iterations to go on",
        code="loop.exhausted",
        run_id=run_id,
    )
