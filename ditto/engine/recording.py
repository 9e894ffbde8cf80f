"""Recording: one step's row, and each move of it to another state, with its events and receipts.

begun   ─ admitted, counted as open, or skipped
decided ─ row, event, receipt ┬ held, or carried with a later transition of the run
                              ├ in one transaction with its commit part
                              ├ local: in one transaction with the handler itself
                              └ by itself
refused, since the run is not ours any more ─ a late note

What an admission recorded stays with the row until the next one.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import anyio

from ditto.effects import EffectClass
from ditto.engine.certifying import CANCELLED, Subject, as_late, certify_attempt, subject_of
from ditto.engine.outcomes import (
    Completed,
    Cut,
    End,
    ErrorRecord,
    Failed,
    Outcome,
    Refused,
    Unknown,
    decide,
    is_lost,
    record_error,
)
from ditto.engine.retrying import Again, Total
from ditto.errors import (
    DittoError,
    EffectNotMade,
    OutputError,
    RunBusyError,
    RunCancelledError,
    TransitionRefusedError,
)
from ditto.store.records import Event, RunEnd, Seen, StepRow
from ditto.store.schema import StepState
from ditto.store.values import State, Stored, by_reference
from ditto.worker import Action, StepContext
from ditto.worker import Outcome as RecordedOutcome

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from ditto.engine.drive import Drive
    from ditto.graph import Node
    from ditto.receipts.body import Draft

Recorded: TypeAlias = Completed | Failed | Unknown
"""What a step's outcome is once it is durable, or held."""

_ENDED: Final = frozenset({StepState.COMPLETED, StepState.SKIPPED, StepState.FAILED, StepState.WAITING})
"""States without tries that a total could bound."""

logger = logging.getLogger("ditto.engine")


class StepRecord:
    """One step as it is recorded."""

    def __init__(self, drive: Drive, node: Node, path: str, total: Total, *, refused: StepState) -> None:
        self.drive = drive
        self.node = node
        self.path = path
        self.total = total
        self.refused = refused
        """How the row of a step ends that was refused for the last time."""
        self.row = drive.rows.get(path)
        """As it was last written; None if it was not."""
        self.attempt = 0 if self.row is None else self.row.attempt
        """The number of the last attempt that was begun; counted by who makes it."""
        self.settled_by: str | None = None
        """What settles the outcome of the attempt, if it is not its own end."""
        self._subject: Subject | None = None

    @property
    def lost(self) -> StepRow | None:
        """The row, if its attempt was admitted and the outcome is not known."""
        return self.row if is_lost(self.row) else None

    # Before an outcome

    async def skip(self) -> None:
        """The step does not run."""
        row = self.new_row(StepState.SKIPPED, effect=None)
        if self.row is None:
            await self.drive.hold(row, Event("step_skipped", self.path))
        else:
            await self.drive.record(row, Event("step_skipped", self.path), seen=self.seen())

    async def admit(self, action: Action, arguments: State | None, *, again: str | None, approval: str | None) -> None:
        """The last durable act before the attempt. A cancellation that comes with it finds nothing attempted.

        `again` says why a lost attempt is made again, `approval` which question was answered with yes.
        """
        row = self.new_row(StepState.ADMITTED, effect=action.effect, key=self.key(action), arguments=arguments)
        self.settled_by = None
        body: dict[str, Any] = {"attempt": self.attempt, "key": row.key}
        if again is not None:
            body["again"] = again
        if approval is not None:
            body["approval"] = approval
        try:
            await self.drive.admit(row, Event("step_admitted", self.path, body), seen=self.seen())
        except asyncio.CancelledError:
            if self.drive.rows.get(self.path) is row:
                self.row = row
                not_made = self.not_made("the caller was cancelled before the attempt", CANCELLED)
                await self.commit_shielded(not_made, action)
            raise
        row.admitted_at = self.drive.store.clock.now_us()
        self.row = row

    async def begin(self, action: Action) -> None:
        """Count a try that may be made again, so that one in which the process dies each time is not made for ever."""
        row = self.new_row(StepState.OPEN, effect=action.effect)
        await self._write(row, Event("step_begun", self.path, {"attempt": self.attempt}))

    # Outcomes

    async def commit(self, outcome: Outcome, action: Action, end: RunEnd | None) -> Recorded:
        """Make an outcome durable, or hold it if it may wait. If the run is not ours any more, it is kept as late."""
        try:
            return await self._commit_outcome(outcome, action, end)
        except (TransitionRefusedError, RunBusyError, RunCancelledError):
            await self._note_late(outcome)
            raise

    async def commit_shielded(self, outcome: Outcome, action: Action) -> None:
        """The last words of a step whose caller was cancelled. If they cannot be written, admitted says the same."""
        await self._shielded(self.commit(outcome, action, None))

    async def _shielded(self, work: Awaitable[Any]) -> None:
        with anyio.CancelScope(shield=True):
            try:
                await work
            except DittoError as error:
                logger.warning("step %s of run %s: %s", self.path, self.drive.run.run_id, error)

    async def _note_late(self, outcome: Outcome) -> None:
        note = partial(self.drive.note_late, self.path, self.attempt)
        match outcome:
            case Completed(output):
                await note(value=output, receipt=as_late(self._receipt(StepState.COMPLETED, output)))
            case Failed(error) | Refused(error):
                receipt = as_late(self._receipt(StepState.FAILED, error=error))
                await note(error=f"{error.type}: {error.message}", receipt=receipt)
            case Unknown(reason):
                receipt = as_late(self._receipt(StepState.UNKNOWN))
                await note(error=f"its outcome is unknown: {reason}", receipt=receipt)

    async def _commit_outcome(self, outcome: Outcome, action: Action, end: RunEnd | None) -> Recorded:
        match outcome:
            case Completed(output):
                return await self._commit_value(output, action, end, None)
            case Failed(error, instead=Stored() as instead) | Refused(error, instead=Stored() as instead):
                return await self._commit_value(instead, action, end, error)
            case Failed():
                return await self.commit_failure(outcome)
            case Refused(error, cause):
                row = self.new_row(self.refused, like=self.row, error=error)
                await self._write(row, Event("step_refused", self.path, _error_body(error, self.attempt)))
                return Failed(error, cause)
            case Unknown(reason):
                error = ErrorRecord("StepError", "Unknown", reason, "outcome.unknown", step=self.path)
                row = self.new_row(StepState.UNKNOWN, like=self.row, error=error)
                await self._write(row, Event("step_unknown", self.path, _error_body(error, self.attempt)))
                return outcome
            case Cut():
                raise asyncio.CancelledError

    async def _commit_value(
        self, output: Stored, action: Action, end: RunEnd | None, error: ErrorRecord | None
    ) -> Recorded:
        body = {"attempt": self.attempt} if self.attempt > 1 else None
        event = Event("step_completed", self.path, body if error is None else _error_body(error, self.attempt))
        if action.effect is EffectClass.INFER:
            output = by_reference(output)
        row = self.new_row(StepState.COMPLETED, like=self.row, effect=action.effect, output=output, stands_for=error)
        if action.record is not None:
            return await self._commit_with_part(row, event, action, end)
        if action.effect.held and self.row is None and end is None:
            await self.drive.hold(row, event)
        elif self.drive.carries and end is None:
            self.drive.carry(row, event, self.seen())
            self.row = row
        else:
            await self._write(row, event, end)
        return Completed(output)

    async def _commit_with_part(self, row: StepRow, event: Event, action: Action, end: RunEnd | None) -> Recorded:
        """The commit part runs in the transaction of the outcome. If it raises, the outcome is kept without it."""
        assert action.record is not None
        assert row.output is not None
        part, told = action.record, self._told(action, row.output)
        try:
            await self.drive.record_with(row, event, lambda db: part(db, told), seen=self.seen(), end=end)
        except asyncio.CancelledError as cancelled:
            if cancelled.__cause__ is not None:
                await self._shielded(self._commit_without_part(row, cancelled.__cause__))
            raise
        except TransitionRefusedError:
            raise
        except BaseException as error:
            if self.drive.stopped is not None:
                raise
            return await self._commit_without_part(row, error)
        self.row = row
        return Completed(row.output)

    async def _commit_without_part(self, row: StepRow, error: BaseException) -> Failed:
        text = f"the outcome is known, but its commit part raised {type(error).__name__}: {error}"
        record = record_error(OutputError(text), self.path, self.redact, final=True)
        return await self.commit_failure(Failed(record, error, kept=row.output))

    async def commit_failure(self, failed: Failed) -> Failed:
        """The step has failed; what was received is kept with it."""
        row = self.new_row(StepState.FAILED, like=self.row, output=failed.kept, error=failed.error)
        await self._write(row, Event("step_failed", self.path, _error_body(failed.error, max(self.attempt, 1))))
        return failed

    async def commit_retry(self, again: Again, action: Action) -> StepRow:
        """Another attempt follows: when, and how many there were, is durable before the wait begins."""
        error = again.outcome.error
        row = self.new_row(StepState.RETRYING, like=self.row, effect=action.effect, error=error)
        row.due_at = self.drive.store.clock.now_us() + round(again.delay_s * 1_000_000)
        body = {**_error_body(error, self.attempt), "delay_s": round(again.delay_s, 3), "due_at": row.due_at}
        await self._write(row, Event("step_retrying", self.path, body))
        return row

    async def run_local(self, action: Action, ctx: StepContext, end: RunEnd | None) -> Recorded:
        """Handler, validation, outcome and events in one transaction; whatever goes wrong undoes all of it."""

        def handle(connection: Connection) -> tuple[StepRow, Event]:
            ctx._connection = connection
            outcome = self.decide(action, End(value=action.call(ctx)))
            if not isinstance(outcome, Completed):
                assert isinstance(outcome, Failed)
                raise _LocalFailed(outcome)
            if action.record is not None:
                action.record(connection, self._told(action, outcome.output))
            row = self.new_row(StepState.COMPLETED, like=self.row, effect=action.effect, output=outcome.output)
            return row, Event("step_completed", self.path)

        try:
            row = await self.drive.run_local(self.path, handle, seen=self.seen(), end=end)
        except _LocalFailed as failed:
            return await self.commit_failure(failed.outcome)
        except (asyncio.CancelledError, TransitionRefusedError):
            raise
        except BaseException as error:
            if self.drive.stopped is not None or error is self.drive.ending:
                raise
            outcome = self.decide(
                action, End(error=error if isinstance(error, Exception) else RuntimeError(repr(error)))
            )
            assert isinstance(outcome, Failed)
            return await self.commit_failure(outcome)
        self.row = row
        assert row.output is not None
        return Completed(row.output)

    async def _write(self, row: StepRow, event: Event, end: RunEnd | None = None) -> None:
        await self.drive.record(row, event, seen=self.seen(), end=end)
        self.row = row

    # Small things

    @property
    def name(self) -> tuple[int, str]:
        """Whose handler it is, over all attempts and drives of this runtime."""
        return self.drive.run.id, self.path

    def new_row(
        self,
        state: StepState,
        *,
        like: StepRow | None = None,
        effect: EffectClass | None = None,
        key: str | None = None,
        arguments: State | None = None,
        output: Stored | None = None,
        error: ErrorRecord | None = None,
        stands_for: ErrorRecord | None = None,
    ) -> StepRow:
        """The step's row in a new state. What an admission recorded stays with it.

        `stands_for` is the failure that the worker made the output of.
        """
        return StepRow(
            path=self.path,
            type=self.node.type,
            version=self.node.version,
            after=_names(self.node.after),
            effect=like.effect if like is not None and effect is None else effect,
            state=state,
            attempt=self.attempt,
            key=like.key if like is not None and key is None else key,
            arguments=like.arguments if like is not None and arguments is None else arguments,
            output=output,
            error=None if error is None else error.to_text(),
            admitted_at=None if like is None else like.admitted_at,
            deadline_at=None if state in _ENDED else self.total.at_us,
            receipt=self._receipt(state, output, error or stands_for),
        )

    def _receipt(
        self, state: StepState, output: Stored | None = None, error: ErrorRecord | None = None
    ) -> Draft | None:
        """What is certified when the step moves to this state: the outcome of an attempt that had none."""
        row = self.lost
        if row is None or not self.drive.store.certifies:
            return None
        if self._subject is None:
            self._subject = subject_of(row.type, row.effect, row.arguments)
        return certify_attempt(
            self.drive.run, row, self._subject, state, output=output, error=error, by=self.settled_by
        )

    def seen(self) -> Seen | None:
        """What the row must still stand at for its next move."""
        return None if self.row is None else Seen(self.row.state, self.row.attempt)

    def key(self, action: Action) -> str:
        """The operation's key: the one that it was admitted with, if it was."""
        if (lost := self.lost) is not None and lost.key is not None:
            return lost.key
        run = self.drive.run
        return action.key if action.key is not None else f"{run.run_id}/{run.generation}/{self.path}"

    def _told(self, action: Action, output: Stored) -> RecordedOutcome:
        return RecordedOutcome(
            value=output.decode(),
            arguments=action.arguments,
            key=self.key(action),
            run_id=self.drive.run.run_id,
            path=self.path,
        )

    def decide(self, action: Action, end: End) -> Outcome:
        """What an attempt at this step came to, in values that the store can hold."""
        return decide(action, end, self.path, self.drive.store.encode, self.redact)

    def not_made(self, reason: str, code: str | None = None) -> Refused:
        """An attempt that is known not to have been made."""
        return Refused(record_error(EffectNotMade(reason, code=code), self.path, self.redact), again=True)

    def redact(self, text: str) -> str:
        """The text without secrets."""
        return self.drive.store.redact(text)


class _LocalFailed(Exception):
    """Undoes the transaction of a `local` handler whose value cannot be used."""

    def __init__(self, outcome: Failed) -> None:
        super().__init__(outcome.error.message)
        self.outcome = outcome


def _error_body(error: ErrorRecord, attempt: int) -> dict[str, Any]:
    return {"attempt": attempt, "code": error.code, "error": error.type, "message": error.message[:200]}


def _names(after: tuple[str, ...]) -> str:
    return json.dumps(after, separators=(",", ":")) if after else "[]"
