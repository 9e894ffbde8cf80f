"""One step: from its bind to its commit.

run ─ skip?
    ─ plan ─ slot ┬ local:  handler and commit in one transaction
                  └ others: (look-up of a lost outcome) → thread → admit → attempt → decide → (look-up) → commit

In a run that carries its outcomes, a turn, a read or idempotent call is counted, `open`, where others are admitted.

What waits for a slot or a thread is not begun: when the run halts meanwhile, it is not. A failed attempt that another
one follows ends with a row that says when: the step waits without a slot, a thread or a task.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import anyio
from pydantic import ValidationError

from ditto.complaints import all_complaints
from ditto.effects import Absent, Committed, EffectClass, Many, Pending, Rejected
from ditto.engine import waiting
from ditto.engine.approving import NotAsApprovedError, Question, denial, value_of
from ditto.engine.attempts import make_attempt
from ditto.engine.certifying import ASK_AGAIN, CANCELLED, LOOKUP, Subject, as_late, certify_attempt, subject_of
from ditto.engine.deadlines import RUN_TIMEOUT, Deadline, Limit, choose_deadline, earliest
from ditto.engine.live import Speech
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
    record_error,
)
from ditto.engine.retrying import Again, Total, back_off_left_s, decide_retry, total_over
from ditto.engine.threads import Seat, Threads
from ditto.errors import (
    DefinitionError,
    DittoError,
    EffectNotMade,
    EffectRejected,
    InvalidValueError,
    LimitExceededError,
    OutputError,
    RunBusyError,
    RunCancelledError,
    StepError,
    TransitionRefusedError,
)
from ditto.graph import STEP_TYPE, Node
from ditto.signatures import is_async
from ditto.store.records import Event, RunEnd, Seen, StepRow
from ditto.store.schema import REOPENABLE, StepState
from ditto.store.values import State, Stored, by_reference
from ditto.waits import Wait, WaitKind
from ditto.worker import Action, StepContext
from ditto.worker import Outcome as RecordedOutcome

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from ditto.engine.drive import Drive
    from ditto.engine.executor import Engine
    from ditto.engine.halt import Halt
    from ditto.receipts.body import Draft

TRIES_MAX: Final = 3
"""Tries of a read or idempotent call of a turn, none of which has ended, before it counts as failed."""

logger = logging.getLogger("ditto.engine")

Values: TypeAlias = Callable[[tuple[str, ...]], dict[str, Any]]
"""Gives each named value its reader asks for, made anew from what is stored."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """The step does not run: its condition says so, or all its parents were skipped."""


@dataclass(frozen=True, slots=True)
class NotStarted:
    """The run halted before an attempt, or before another one: nothing is recorded, the step is as it was."""


@dataclass(frozen=True, slots=True)
class Waits:
    """The step waits for somebody, for a time, or for its next attempt."""

    row: StepRow


@dataclass(frozen=True, slots=True)
class _Resend:
    """The other side has no record of the attempt, and that is final: another one may be made, under the same key."""

    reason: str


StepEnd: TypeAlias = Completed | Skipped | Failed | Unknown | Waits | NotStarted


_ENDED: Final = frozenset({StepState.COMPLETED, StepState.SKIPPED, StepState.FAILED, StepState.WAITING})
"""States without tries that a total could bound."""


def is_lost(row: StepRow | None) -> bool:
    """Whether an attempt was admitted and its outcome is not known."""
    return row is not None and row.state in (StepState.ADMITTED, StepState.UNKNOWN)


def lost_reason(row: StepRow) -> str:
    """Why the outcome of a lost attempt is not known."""
    if row.error is not None:
        return ErrorRecord.from_text(row.error).message
    return f"attempt {row.attempt} was admitted, and the process ended before its outcome was recorded"


class Step:
    """One node of one run, while it is brought to its end."""

    def __init__(
        self, engine: Engine, drive: Drive, node: Node, path: str, halted: Halt, *, ends_failed: bool = False
    ) -> None:
        self.engine = engine
        self.halted = halted
        self.refused = StepState.FAILED if ends_failed else StepState.REFUSED
        """How the row of a step ends that was refused for the last time: a Flow may go on from it, and must not see
        another outcome when it is replayed."""
        self.drive = drive
        self.node = node
        self.path = path
        self.row = drive.rows.get(path)
        self.route = engine.router.route(node.type if node.planned is None else STEP_TYPE)
        self.attempt = 0 if self.row is None else self.row.attempt
        self.spent = self.attempt if drive.run.status in REOPENABLE else 0
        """Attempts made before the run failed: who reopens it gives its steps all their tries again."""
        begun_at = None if self.row is None or self.spent else self.row.deadline_at
        self.total = Total(node.retry, drive.timers, path, begun_at)
        self.arguments: State | None = None
        """What is recorded with an admission."""
        self.resent = False
        self.settled_by: str | None = None
        """What settles the outcome of the attempt, if it is not its own end."""
        self._subject: Subject | None = None
        self.again: str | None = None
        """Why an attempt whose outcome is lost is made again; told with the next admission."""
        self.question = Question(drive, path)

    async def run(self, values: Values, *, skip: bool, end: RunEnd | None) -> StepEnd:
        """Bring the step to its end. `end`, the run's own, is committed with a value of the step, and only then.

        Raises the caller's cancellation, TransitionRefusedError if somebody else moved the step or the run, and
        StoreError if the store cannot write.
        """
        if (failed := self._failed_for_good()) is not None:
            return failed
        if self.node.wait is not None:
            return await self._wait(self.node.wait, values, skip=skip)
        if self._backs_off():
            assert self.row is not None
            return NotStarted() if self.halted.is_set() else Waits(self.row)
        try:
            wanted = is_lost(self.row) or not (skip or not self._wanted(values))
            action = self._plan(values) if wanted else None
        except Exception as error:  # noqa: BLE001 - a user's function raised: that fails the step
            self.question.require_owner(None, self.row, f"its call cannot be made: {error}")
            return await self._fail_before(error)
        self.question.require_owner(action, self.row, f"step {self.path} asks for no approval now")
        if action is None:
            return await self._skip()
        while True:
            if (end_before := await self._ask_for_approval(action, end)) is not None:
                return end_before
            try:
                return await self._start(action, end)
            except NotAsApprovedError:
                if is_lost(self.row):
                    return Unknown("its call is not the one that was approved; it is not made again")

    async def _start(self, action: Action, end: RunEnd | None) -> StepEnd:
        if action.effect.admitted:
            self.drive.store.open_chain()
        try:
            resources = await self.route.open_resources()
        except Exception as error:  # noqa: BLE001 - the worker's own factory raised
            return await self._fail_before(error)
        if action.effect is EffectClass.LOCAL:
            return NotStarted() if self.halted.is_set() else await self._run_local(action, resources, end)
        try:
            return await self._carry_out(action, resources, end)
        finally:
            self.drive.live.close(self.path)

    # Before the attempt

    async def _ask_for_approval(self, action: Action, end: RunEnd | None) -> StepEnd | None:
        """Ask for the approval that the action needs. None: it needs none, or has it."""
        if action.approval is None or is_lost(self.row):
            return None
        try:
            asked = await self.question.ask(action.approval, action.label, self.row, self.halted)
        except (InvalidValueError, LimitExceededError) as error:
            return await self._fail_before(error)
        if asked is None:
            return NotStarted()
        if asked.state is StepState.WAITING:
            return Waits(asked)
        if (denied := denial(asked, action.label)) is None:
            return None
        record = record_error(denied, self.path, self._redact, final=True)
        failed = Failed(record, denied, instead=value_of(action.approval, denied, self.drive.store.encode))
        return await self._commit(failed, replace(action, record=None), end)

    async def _fail_before(self, error: Exception) -> Failed | Unknown:
        """Nothing was attempted now; but what was lost before stays lost."""
        record = record_error(error, self.path, self._redact)
        if self.row is not None and is_lost(self.row):
            return Unknown(f"{lost_reason(self.row)}; it cannot be looked up: {record.type}: {record.message}", error)
        return await self._commit_failure(Failed(record, error))

    def _failed_for_good(self) -> Failed | None:
        if self.row is None or self.row.state is not StepState.FAILED or self.row.error is None:
            return None
        error = ErrorRecord.from_text(self.row.error)
        return Failed(error) if error.final else None

    def _wanted(self, values: Values) -> bool:
        return self.node.when is None or bool(self.node.when(**values(self.node.when_names)))

    def _plan(self, values: Values) -> Action:
        """The Action for the bound arguments; for a lost attempt, what it was admitted as."""
        action = self._make_action(values)
        if (finish := self.node.finish) is not None:
            made = action.result
            action = replace(action, result=lambda value: finish(made(value)))
        key: Any = action.key
        if key is not None and not (isinstance(key, str) and key and key.isprintable()):
            raise DefinitionError(f"{action.label}: key must give text without control characters, not {key!r}")
        if self.row is not None and is_lost(self.row) and self.row.effect is not None:
            self.arguments = self.row.arguments
            return replace(action, effect=EffectClass(self.row.effect))
        if action.effect.admitted:
            self.arguments = self.drive.encode_arguments(action)
        return action

    def _make_action(self, values: Values) -> Action:
        node = self.node
        if node.planned is not None:
            return node.planned()
        recorded = self.row.arguments if self.row is not None and is_lost(self.row) else None
        if node.type == STEP_TYPE:
            return node.plan_step(values(node.bind_names) if recorded is None else recorded.plain())
        handler = self.engine.router.handler(node.type)
        if recorded is not None:
            arguments = recorded.plain()
        elif node.bind is None:
            arguments = values(("input",))["input"]
        else:
            arguments = node.bind(**values(node.bind_names))
        if handler.input is not None and not isinstance(arguments, handler.input):
            try:
                arguments = handler.input.model_validate(arguments)
            except ValidationError as error:
                told = f"the arguments of node {node.name} do not fit {node.type}: {all_complaints(error)}"
                raise InvalidValueError(told) from None
        return handler.plan(arguments)

    async def _skip(self) -> Skipped:
        row = self._new_row(StepState.SKIPPED, effect=None)
        if self.row is None:
            await self.drive.hold(row, Event("step_skipped", self.path))
        else:
            await self.drive.record(row, Event("step_skipped", self.path), seen=self._seen())
        return Skipped()

    # Waits

    async def _wait(self, wait: Wait, values: Values, *, skip: bool) -> StepEnd:
        """Begin to wait, or see whether the wait is over."""
        if self.row is not None and self.row.state is StepState.WAITING:
            return await self._wait_on(await self.drive.look_at_wait(self.path))
        if self.halted.is_set():
            return NotStarted()
        try:
            if skip or not self._wanted(values):
                return await self._skip()
            shown = None if self.node.bind is None else self.node.bind(**values(self.node.bind_names))
            duration_s = wait.duration_s(values(wait.seconds_names))
            arguments = self.drive.store.encode(shown, f"what approval {self.path} shows")
        except Exception as error:  # noqa: BLE001 - a user's function raised: that fails the step
            return await self._fail_before(error)
        self.attempt += 1
        row = replace(
            self._new_row(StepState.WAITING, key=wait.name, arguments=arguments),
            due_at=waiting.due_at(self.drive, duration_s),
        )
        body = {"for": wait.kind.value, "name": wait.name}
        if wait.kind is WaitKind.APPROVAL:
            body["digest"] = waiting.shown_digest(self.drive.run.run_id, self.path, arguments)
        signal = wait.name if wait.kind is WaitKind.SIGNAL else None
        begun = await self.drive.begin_wait(row, signal, Event("step_waiting", self.path, body))
        return await self._wait_on(begun)

    async def _wait_on(self, row: StepRow) -> StepEnd:
        """What a wait that has begun stands at; if its time has come, it is over."""
        row = self.row = await waiting.look(self.drive, row)
        if row.state is StepState.WAITING:
            return Waits(row)
        if row.state is StepState.COMPLETED and row.output is not None:
            return Completed(row.output)
        return Unknown("another process changed the wait; run again")

    # Attempts

    async def _carry_out(self, action: Action, resources: Any, end: RunEnd | None) -> StepEnd:
        """Attempt after attempt, until one's outcome stands."""
        if self.row is not None and self.row.state is StepState.OPEN and self.attempt >= TRIES_MAX:
            return await self._commit(self._never_ended(action), action, end)
        if is_lost(self.row):
            assert self.row is not None
            found = await self._settle(action, resources, Unknown(lost_reason(self.row)))
            if isinstance(found, _Resend) and self.halted.is_set():
                found = self._not_made(found.reason)
            if not isinstance(found, _Resend):
                return await self._commit(found, action, end)
            self.again = found.reason
        while True:
            outcome = await self._attempt(action, resources)
            if outcome is None:
                return NotStarted()
            if isinstance(outcome, Unknown):
                settled = await self._settle(action, resources, outcome)
                if isinstance(settled, _Resend):
                    if not self.resent and not self.halted.is_set() and self.total.left_s != 0:
                        self.resent, self.again = True, settled.reason
                        continue
                    settled = self._not_made(settled.reason)
                outcome = self._try_again(settled, action)
            if isinstance(outcome, Again):
                return await self._commit_retry(outcome, action)
            self.total.forget()
            return await self._commit(outcome, action, end)

    async def _attempt(self, action: Action, resources: Any) -> Outcome | Again | None:
        """Take a slot, admit where the class asks for it, then call the handler once. None: the run halted before."""
        async with AsyncExitStack() as place:
            seat = await self._take_place(action, place)
            if self.drive.deadline.is_over() or self.halted.is_set():
                return None
            if action.approval is not None:
                self.question.require_approved(action.approval)
            if self.total.left_s == 0:
                return self._out_of_time(action)
            self.total.begin(self.drive.store.clock.now_us())
            self.attempt += 1
            if action.effect.admitted:
                await self._admit(action)
            elif self.drive.carries and action.effect in (EffectClass.READ, EffectClass.IDEMPOTENT):
                await self._begin(action)
            elif not action.effect.held:
                await self.drive.barrier()
            if self.drive.deadline.is_over():
                told = "the deadline of its run passed before the attempt"
                return self._not_made(told, RUN_TIMEOUT) if action.effect.admitted else None
            late = partial(self.drive.note_returned, self.path, self.attempt)
            speech = Speech(self.drive.live, self.path, self.attempt, self.engine.router.shown_chars_max)
            ctx, run = self._context(action, resources, speech), self.drive.deadline
            made = await make_attempt(action, ctx, self._deadline(action), seat, late, run)
            if made.deadline is not None and made.deadline.limit is Limit.RUN:
                run.expire()
            outcome = self._try_again(self._decide(action, made), action)
            value = outcome.output if isinstance(outcome, Completed) else None
            speech.end(value, self.engine.router.shown.get(self.node.type))
            if isinstance(outcome, Failed | Refused) and outcome.instead is None:
                self.halted.set()  # before anybody gets our slot
        if made.cancellation is not None:
            if isinstance(outcome, Again):
                outcome = outcome.outcome
            if not isinstance(outcome, Cut):
                await self._shielded(self._commit(outcome, action, None))
            raise made.cancellation
        return outcome

    async def _admit(self, action: Action) -> None:
        """The last durable act before the attempt. A cancellation that comes with it finds nothing attempted."""
        row = self._new_row(StepState.ADMITTED, effect=action.effect, key=self._key(action), arguments=self.arguments)
        self.settled_by = None
        body: dict[str, Any] = {"attempt": self.attempt, "key": row.key}
        if self.again is not None:
            body["again"], self.again = self.again, None
        if action.approval is not None:
            body["approval"] = self.question.path
        try:
            await self.drive.admit(row, Event("step_admitted", self.path, body), seen=self._seen())
        except asyncio.CancelledError:
            if self.drive.rows.get(self.path) is row:
                self.row = row
                not_made = self._not_made("the caller was cancelled before the attempt", CANCELLED)
                await self._shielded(self._commit(not_made, action, None))
            raise
        row.admitted_at = self.drive.store.clock.now_us()
        self.row = row

    async def _begin(self, action: Action) -> None:
        """Count a try that may be made again, so that one in which the process dies each time is not made for ever."""
        row = self._new_row(StepState.OPEN, effect=action.effect)
        await self._record(row, Event("step_begun", self.path, {"attempt": self.attempt}))

    def _never_ended(self, action: Action) -> Outcome:
        """What becomes of a call that has had all its tries, and ended in none."""
        error = StepError(
            f"{action.label} was begun {self.attempt} times, and each time the process ended before it did; it is not "
            "begun again in this turn",
            code="step.never_ended",
        )
        outcome = self._decide(action, End(error=error))
        assert isinstance(outcome, Failed)
        return replace(outcome, error=replace(outcome.error, final=True))

    def _deadline(self, action: Action) -> Deadline | None:
        return earliest(self._own_deadline(action), self.total.deadline, self.drive.deadline.of_attempt)

    def _own_deadline(self, action: Action) -> Deadline | None:
        return choose_deadline(self.node.timeout_s, action.timeout_s, self.engine.config.runtime.step_timeout_s)

    async def _take_place(self, action: Action, place: AsyncExitStack) -> Seat | None:
        """Wait for a slot of the worker, and for a thread if the handler needs one; given up when the run halts, or
        when no time is left for another try."""
        seat: Seat | None = None
        in_thread = not action.is_async and action.effect is not EffectClass.PURE
        if not in_thread and self.route.limiter is None:
            return seat
        with self.halted.until_set(), anyio.move_on_after(self.total.left_s) as in_time:
            if in_thread and not action.effect.held:
                await self._threads.ended(self._name)
            if self.route.limiter is not None:
                await place.enter_async_context(self.route.limiter)
            if in_thread:
                seat = await place.enter_async_context(self._threads.seat(self._name))
        if in_time.cancelled_caught:
            self.total.is_over = True
        return seat

    async def _halted_within(self, seconds: float) -> bool:
        """Wait; True if no further attempt may start any more."""
        with self.halted.until_set():
            await anyio.sleep(seconds)
        return self.halted.is_set()

    def _backs_off(self) -> bool:
        """Whether the time of the next attempt has not come. Who reopens a run does not wait for it."""
        if self.row is None or self.row.state is not StepState.RETRYING or self.attempt == self.spent:
            return False
        if back_off_left_s(self.drive.timers, self.row) > 0:
            return True
        self.drive.timers.forget(("retry", self.path))
        return False

    def _try_again(self, outcome: Outcome, action: Action) -> Outcome | Again:
        """The outcome, or that another attempt follows it. None does once the run has halted, but for one that is only
        let go of: that keeps its further tries."""
        if self.halted.is_set() and self.drive.ending is None:
            return outcome
        tries, left_s = self.attempt - self.spent, self.total.left_s
        return decide_retry(outcome, self.node.retry, admitted=action.effect.admitted, tries=tries, left_s=left_s)

    def _out_of_time(self, action: Action) -> Outcome:
        """The total passed before another attempt could begin: the last one's failure stands."""
        error: StepError = EffectNotMade("it was not sent again")
        if self.row is not None and self.row.state is StepState.RETRYING and self.row.error is not None:
            error = ErrorRecord.from_text(self.row.error).to_error(self.drive.run.run_id)
        last = self._decide(action, End(error=error))
        assert self.node.retry is not None
        assert isinstance(last, Failed | Refused)
        return total_over(last, self.node.retry, self.attempt - self.spent)

    # Lost outcomes

    async def _settle(self, action: Action, resources: Any, unknown: Unknown) -> Outcome | _Resend:
        """What is known of a lost outcome: the look-up's answer, the policy for model calls, or nothing."""
        if action.effect is EffectClass.INFER:
            if self.engine.config.runtime.on_unknown_model_call == "ask_again":
                self.settled_by = ASK_AGAIN
                return _Resend("by policy, a model call with no recorded answer is asked again")
            return unknown
        if action.lookup is None:
            return unknown
        try:
            found = await self._look_up(action, resources, unknown)
        except asyncio.CancelledError:
            await self._shielded(self._commit(unknown, action, None))
            raise
        if not isinstance(found, Unknown):
            self.settled_by = LOOKUP
        return found

    async def _look_up(self, action: Action, resources: Any, unknown: Unknown) -> Outcome | _Resend:
        reason = unknown.reason
        while True:
            made = await self._ask(action, resources)
            if made.cancellation is not None:
                raise made.cancellation
            if made.error is not None:
                record = record_error(made.error, self.path, self._redact)
                return Unknown(f"{reason}; the look-up failed: {record.type}: {record.message}", made.error)
            if made.deadline is not None:
                return Unknown(f"{reason}; the look-up missed the deadline of {made.deadline.left_s} s")
            match made.value:
                case Committed(value):
                    return self._decide(action, End(value=value))
                case Rejected(text, code):
                    return self._decide(action, End(error=EffectRejected(text, code=code)))
                case Absent() if self._threads.is_running(self._name):
                    return Unknown(f"{reason}; the look-up found nothing, but its handler still runs in a thread")
                case Absent() if action.absence_is_final:
                    wait_s = self._grace_left_s(action)
                    if wait_s <= 0:
                        return _Resend(f"{reason}; the look-up found no trace of it")
                    if await self._halted_within(wait_s):
                        return Unknown(f"{reason}; the look-up has found nothing yet")
                case Absent():
                    return Unknown(f"{reason}; the look-up found nothing, which does not prove that nothing was done")
                case Pending():
                    return Unknown(f"{reason}; the look-up says it is pending")
                case Many(ids):
                    return Unknown(f"{reason}; the look-up found more than one: {', '.join(map(str, ids))}")
                case other:
                    return Unknown(f"{reason}; the look-up answered {type(other).__name__}, which is no LookupResult")

    async def _ask(self, action: Action, resources: Any) -> End:
        """Call the look-up: an attempt like any other, of class read, under the same deadline."""
        lookup = action.lookup
        assert lookup is not None
        asking = replace(
            action, effect=EffectClass.READ, is_async=is_async(lookup), call=lambda ctx: lookup(ctx.key, ctx)
        )
        async with nullcontext() if asking.is_async else self._threads.seat((self._name, "look-up")) as seat:
            ctx = self._context(action, resources)
            return await make_attempt(asking, ctx, self._look_up_deadline(action), seat, lambda _result, _error: None)

    def _look_up_deadline(self, action: Action) -> Deadline | None:
        """The step's own. It starts nothing, so the run's deadline only bounds it, and gives it `grace_s` more."""
        left_s = self.drive.deadline.left_s
        most = None if left_s == math.inf else Deadline(max(left_s, self.engine.config.runtime.grace_s))
        return earliest(self._own_deadline(action), most)

    def _grace_left_s(self, action: Action) -> float:
        admitted_at = self.row.admitted_at if self.row is not None else None
        if not action.absence_grace_s or admitted_at is None:
            return 0.0
        return action.absence_grace_s - (self.drive.store.clock.now_us() - admitted_at) / 1_000_000

    # Commits

    async def _commit(self, outcome: Outcome, action: Action, end: RunEnd | None) -> StepEnd:
        """Make an outcome durable, or hold it if it may wait. If the run is not ours any more, it is kept as late."""
        try:
            return await self._commit_outcome(outcome, action, end)
        except (TransitionRefusedError, RunBusyError, RunCancelledError):
            await self._note_late(outcome)
            raise

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

    async def _commit_outcome(self, outcome: Outcome, action: Action, end: RunEnd | None) -> StepEnd:
        match outcome:
            case Completed(output):
                return await self._commit_value(output, action, end, None)
            case Failed(error, instead=Stored() as instead) | Refused(error, instead=Stored() as instead):
                return await self._commit_value(instead, action, end, error)
            case Failed():
                return await self._commit_failure(outcome)
            case Refused(error, cause):
                row = self._new_row(self.refused, like=self.row, error=error)
                await self._record(row, Event("step_refused", self.path, _error_body(error, self.attempt)))
                return Failed(error, cause)
            case Unknown(reason):
                error = ErrorRecord("StepError", "Unknown", reason, "outcome.unknown", step=self.path)
                row = self._new_row(StepState.UNKNOWN, like=self.row, error=error)
                await self._record(row, Event("step_unknown", self.path, _error_body(error, self.attempt)))
                return outcome
            case Cut():
                raise asyncio.CancelledError

    async def _commit_value(
        self, output: Stored, action: Action, end: RunEnd | None, error: ErrorRecord | None
    ) -> StepEnd:
        body = {"attempt": self.attempt} if self.attempt > 1 else None
        event = Event("step_completed", self.path, body if error is None else _error_body(error, self.attempt))
        if action.effect is EffectClass.INFER:
            output = by_reference(output)
        row = self._new_row(StepState.COMPLETED, like=self.row, effect=action.effect, output=output, stands_for=error)
        if action.record is not None:
            return await self._commit_with_part(row, event, action, end)
        if action.effect.held and self.row is None and end is None:
            await self.drive.hold(row, event)
        elif self.drive.carries and end is None:
            self.drive.carry(row, event, self._seen())
            self.row = row
        else:
            await self._record(row, event, end)
        return Completed(output)

    async def _commit_with_part(self, row: StepRow, event: Event, action: Action, end: RunEnd | None) -> StepEnd:
        """The commit part runs in the transaction of the outcome. If it raises, the outcome is kept without it."""
        assert action.record is not None
        assert row.output is not None
        part, told = action.record, self._told(action, row.output)
        try:
            await self.drive.record_with(row, event, lambda db: part(db, told), seen=self._seen(), end=end)
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
        record = record_error(OutputError(text), self.path, self._redact, final=True)
        return await self._commit_failure(Failed(record, error, kept=row.output))

    async def _commit_failure(self, failed: Failed) -> Failed:
        row = self._new_row(StepState.FAILED, like=self.row, output=failed.kept, error=failed.error)
        await self._record(row, Event("step_failed", self.path, _error_body(failed.error, max(self.attempt, 1))))
        return failed

    async def _commit_retry(self, again: Again, action: Action) -> Waits:
        """Another attempt follows: when, and how many there were, is durable before the wait begins."""
        error = again.outcome.error
        row = self._new_row(StepState.RETRYING, like=self.row, effect=action.effect, error=error)
        row.due_at = self.drive.store.clock.now_us() + round(again.delay_s * 1_000_000)
        body = {**_error_body(error, self.attempt), "delay_s": round(again.delay_s, 3), "due_at": row.due_at}
        await self._record(row, Event("step_retrying", self.path, body))
        return Waits(row)

    async def _run_local(self, action: Action, resources: Any, end: RunEnd | None) -> StepEnd:
        """Handler, validation, outcome and events in one transaction; whatever goes wrong undoes all of it."""
        if action.is_async:
            error = DefinitionError(f"{action.label} is local, and must be a plain function, not async")
            return await self._commit_failure(Failed(record_error(error, self.path, self._redact), error))
        if action.approval is not None:
            self.question.require_approved(action.approval)
        self.attempt += 1
        ctx = self._context(action, resources)

        def handle(connection: Connection) -> tuple[StepRow, Event]:
            ctx._connection = connection
            outcome = self._decide(action, End(value=action.call(ctx)))
            if not isinstance(outcome, Completed):
                assert isinstance(outcome, Failed)
                raise _LocalFailed(outcome)
            if action.record is not None:
                action.record(connection, self._told(action, outcome.output))
            row = self._new_row(StepState.COMPLETED, like=self.row, effect=action.effect, output=outcome.output)
            return row, Event("step_completed", self.path)

        try:
            row = await self.drive.run_local(self.path, handle, seen=self._seen(), end=end)
        except _LocalFailed as failed:
            return await self._commit_failure(failed.outcome)
        except (asyncio.CancelledError, TransitionRefusedError):
            raise
        except BaseException as error:
            if self.drive.stopped is not None or error is self.drive.ending:
                raise
            outcome = self._decide(
                action, End(error=error if isinstance(error, Exception) else RuntimeError(repr(error)))
            )
            assert isinstance(outcome, Failed)
            return await self._commit_failure(outcome)
        self.row = row
        assert row.output is not None
        return Completed(row.output)

    async def _record(self, row: StepRow, event: Event, end: RunEnd | None = None) -> None:
        await self.drive.record(row, event, seen=self._seen(), end=end)
        self.row = row

    # Small things

    @property
    def _threads(self) -> Threads:
        return self.route.threads

    @property
    def _name(self) -> tuple[int, str]:
        """Whose handler it is, over all attempts and drives of this runtime."""
        return self.drive.run.id, self.path

    def _new_row(
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
        row = self.row
        if row is None or not is_lost(row) or not self.drive.store.certifies:
            return None
        if self._subject is None:
            self._subject = subject_of(row.type, row.effect, row.arguments)
        return certify_attempt(
            self.drive.run, row, self._subject, state, output=output, error=error, by=self.settled_by
        )

    def _seen(self) -> Seen | None:
        return None if self.row is None else Seen(self.row.state, self.row.attempt)

    def _key(self, action: Action) -> str:
        """The operation's key: the one that it was admitted with, if it was."""
        if self.row is not None and is_lost(self.row) and self.row.key is not None:
            return self.row.key
        run = self.drive.run
        return action.key if action.key is not None else f"{run.run_id}/{run.generation}/{self.path}"

    def _context(self, action: Action, resources: Any, speech: Speech | None = None) -> StepContext:
        return StepContext(
            run_id=self.drive.run.run_id,
            path=self.path,
            key=self._key(action),
            attempt=max(self.attempt, 1),
            config=self.engine.config,
            sandbox=self.engine.sandbox,
            logger=self.route.logger,
            resources=resources,
            _partial=None if speech is None else speech.show,
        )

    def _told(self, action: Action, output: Stored) -> RecordedOutcome:
        return RecordedOutcome(
            value=output.decode(),
            arguments=action.arguments,
            key=self._key(action),
            run_id=self.drive.run.run_id,
            path=self.path,
        )

    def _decide(self, action: Action, end: End) -> Outcome:
        return decide(action, end, self.path, self.drive.store.encode, self._redact)

    def _not_made(self, reason: str, code: str | None = None) -> Refused:
        return Refused(record_error(EffectNotMade(reason, code=code), self.path, self._redact), again=True)

    def _redact(self, text: str) -> str:
        return self.drive.store.redact(text)

    async def _shielded(self, work: Awaitable[Any]) -> None:
        """The last words of a step whose caller was cancelled. If they cannot be written, admitted says the same."""
        with anyio.CancelScope(shield=True):
            try:
                await work
            except DittoError as error:
                logger.warning("step %s of run %s: %s", self.path, self.drive.run.run_id, error)


class _LocalFailed(Exception):
    """Undoes the transaction of a `local` handler whose value cannot be used."""

    def __init__(self, outcome: Failed) -> None:
        super().__init__(outcome.error.message)
        self.outcome = outcome


def _error_body(error: ErrorRecord, attempt: int) -> dict[str, Any]:
    return {"attempt": attempt, "code": error.code, "error": error.type, "message": error.message[:200]}


def _names(after: tuple[str, ...]) -> str:
    return json.dumps(after, separators=(",", ":")) if after else "[]"
