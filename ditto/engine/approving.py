"""Approving: an action that needs a person's yes asks for it first, and is attempted only as it was shown.

    plan → ask ┬ unanswered: the step waits; its question is a row of its own, at `<step>/approval`
               ├ no, or too late: the step has a value or an error, and nothing was attempted
               └ yes, to this very call → slot → check again → admit → attempt

A decision is bound to the run, the step and what was shown. Where that has changed, a new question is asked, as the
row's next attempt; the old decision stays in the history. A question whose step is gone, or asks for something of
another name, blocks the run: an answer never goes to what it was not given for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from ditto.engine import waiting
from ditto.engine.drive import Drive
from ditto.engine.outcomes import Encode
from ditto.errors import (
    EffectRejected,
    InvalidValueError,
    LimitExceededError,
    RunBlockedError,
    TransitionRefusedError,
)
from ditto.store.records import Event, Seen, StepRow
from ditto.store.schema import StepState
from ditto.store.values import Stored
from ditto.waits import WaitKind
from ditto.worker import Approval, as_data

if TYPE_CHECKING:
    from ditto.engine.halt import Halt
    from ditto.worker import Action

BELOW: Final = "/approval"
"""Behind a step's path: the path of its question."""

REJECTED: Final = "approval.rejected"
EXPIRED: Final = "approval.expired"


class NotAsApprovedError(Exception):
    """What is about to be attempted is not what was approved: nothing is attempted."""


class Question:
    """What one step asks before its action is attempted, if it asks anything."""

    def __init__(self, drive: Drive, step: str) -> None:
        self.drive = drive
        self.step = step
        self.path = step + BELOW

    @property
    def row(self) -> StepRow | None:
        """The question as it was last seen; None if nothing was asked."""
        return self.drive.rows.get(self.path)

    def require_owner(self, action: Action | None, step: StepRow | None, why: str) -> None:
        """Refuse to leave a question, or its answer, behind that the code knows nothing of.

        `step` is the step's own row: once something was attempted, its question has served. Raises RunBlockedError.
        """
        if self.row is not None and step is None and (action is None or action.approval is None):
            raise self._orphaned(self.row, why)

    async def ask(self, approval: Approval, label: str, step: StepRow | None, halted: Halt) -> StepRow | None:
        """The question as it stands: waiting, or decided about this very call. None: halted before it was asked.

        Raises RunBlockedError, `drive.ending` if the run was paused first, and InvalidValueError or LimitExceededError
        if what is to be shown cannot be.
        """
        shown = self._encode(approval)
        row = self.row and await self.drive.look_at_wait(self.path)
        while row is None or not self._is_about(row, shown):
            if row is not None and step is None and row.key != approval.name and (_is_open(row) or is_approved(row)):
                raise self._orphaned(row, f"{label} is what step {self.step} would ask for now")
            if halted.is_set():
                return None
            row = await self._begin(approval, shown, row)
        return await waiting.look(self.drive, row)

    def require_approved(self, approval: Approval) -> None:
        """Right before the attempt: what it will be made with is what was approved. Raises NotAsApprovedError."""
        row = self.row
        try:
            fits = row is not None and is_approved(row) and self._is_about(row, self._encode(approval))
        except (InvalidValueError, LimitExceededError):
            fits = False
        if not fits:
            raise NotAsApprovedError

    async def _begin(self, approval: Approval, shown: Stored, was: StepRow | None) -> StepRow:
        """Ask, or ask anew. If the old question was answered just then, that is what it stands at."""
        attempt = 1 if was is None else was.attempt + 1
        row = StepRow(
            path=self.path,
            type=WaitKind.APPROVAL.value,
            version="1",
            after="[]",
            effect=None,
            state=StepState.WAITING,
            attempt=attempt,
            key=approval.name,
            arguments=shown,
            due_at=waiting.due_at(self.drive, approval.expires_s),
        )
        body = {"for": row.type, "name": row.key, "digest": self._digest(shown)}
        event = Event("step_waiting", self.path, body if was is None else {**body, "attempt": attempt})
        seen = None if was is None else Seen(was.state, was.attempt)
        try:
            return await self.drive.begin_wait(row, None, event, seen=seen)
        except TransitionRefusedError:
            if was is None:
                raise
            now = await self.drive.look_at_wait(self.path)
            if (now.state, now.attempt) == (was.state, was.attempt):
                raise
            return now

    def _is_about(self, row: StepRow, shown: Stored) -> bool:
        """Whether the question, or the decision on it, is about what is shown now."""
        decided = None if _is_open(row) else _decision(row).get("digest")
        if decided is not None:
            return bool(decided == self._digest(shown))
        return isinstance(row.arguments, Stored) and row.arguments.body == shown.body

    def _encode(self, approval: Approval) -> Stored:
        what = f"what approval {self.path} shows"
        try:
            shown = approval.shown()
        except Exception as error:
            raise InvalidValueError(f"{what} cannot be made: {type(error).__name__}: {error}") from error
        return self.drive.store.encode(shown, what)

    def _digest(self, shown: Stored) -> str:
        return waiting.shown_digest(self.drive.run.run_id, self.path, shown)

    def _orphaned(self, row: StepRow, why: str) -> RunBlockedError:
        run_id = self.drive.run.run_id
        difference = owner_missing(row, self.step, why)
        return RunBlockedError(
            f"run {run_id}: the code changed under it: {difference}. Run it with the code that asked, or cancel it",
            differences=(difference,),
            run_id=run_id,
        )


def owner_missing(row: StepRow, step: str, why: str) -> str:
    """Of a question whose step is gone or changed: what it was asked for, and why it has no owner."""
    return f"step {row.path} is recorded as {row.state}, owner missing: {step}/{row.key}; {why}"


def is_approved(row: StepRow) -> bool:
    """Whether somebody said yes."""
    return not _is_open(row) and _decision(row).get("decision") == "approve"


def denial(row: StepRow, label: str) -> EffectRejected | None:
    """Why a decided question keeps the action from being attempted; None if it was approved."""
    if is_approved(row):
        return None
    made = _decision(row)
    if made.get("decision") == "expired":
        return EffectRejected(f"{label} was not called: nobody approved it in time", code=EXPIRED)
    reason = f": {made['reason']}" if made.get("reason") else ""
    return EffectRejected(f"{label} was not called: {made.get('actor')} rejected it{reason}", code=REJECTED)


def value_of(approval: Approval, denied: EffectRejected, encode: Encode) -> Stored | None:
    """The value that a no becomes; None if it stays an error of the step."""
    try:
        value = approval.denied(denied)
        return None if value is None else encode(as_data(value), f"the denial of {approval.name}")
    except Exception:  # noqa: BLE001 - no value can be made of it: it stays an error of the step
        return None


def _is_open(row: StepRow) -> bool:
    return row.state is StepState.WAITING


def _decision(row: StepRow) -> dict[str, Any]:
    made = None if row.output is None else row.output.decode()
    return made if isinstance(made, dict) else {}
