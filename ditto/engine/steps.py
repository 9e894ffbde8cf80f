"""One step: from its bind to its commit.

run ─ skip?
    ─ plan ─ slot ┬ local:  handler and commit in one transaction
                  └ others: (look-up of a lost outcome) → thread → admit → attempt → decide → (look-up) → commit

In a run that carries its outcomes, a turn, a read or idempotent call is counted, `open`, where others are admitted.

The order of these is kept here. What is written, and in which transaction, is in `recording.py`; what a look-up finds
of a lost outcome, in `settling.py`.

What waits for a slot or a thread is not begun: when the run halts meanwhile, it is not. A failed attempt that another
one follows ends with a row that says when: the step waits without a slot, a thread or a task.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import anyio
from pydantic import ValidationError

from ditto.complaints import all_complaints
from ditto.effects import EffectClass
from ditto.engine import waiting
from ditto.engine.approving import NotAsApprovedError, Question, denial, value_of
from ditto.engine.attempts import make_attempt
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
    lost_reason,
    record_error,
)
from ditto.engine.recording import StepRecord
from ditto.engine.retrying import Again, Total, back_off_left_s, decide_retry, total_over
from ditto.engine.settling import Resend, Settling
from ditto.engine.threads import Seat
from ditto.errors import DefinitionError, EffectNotMade, InvalidValueError, LimitExceededError, StepError
from ditto.graph import STEP_TYPE, Node
from ditto.store.records import Event, RunEnd, StepRow
from ditto.store.schema import REOPENABLE, StepState
from ditto.store.values import State
from ditto.waits import Wait, WaitKind
from ditto.worker import Action, StepContext

if TYPE_CHECKING:
    from ditto.engine.drive import Drive
    from ditto.engine.executor import Engine
    from ditto.engine.halt import Halt

TRIES_MAX: Final = 3
"""Tries of a read or idempotent call of a turn, none of which has ended, before it counts as failed."""

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


StepEnd: TypeAlias = Completed | Skipped | Failed | Unknown | Waits | NotStarted


class Step:
    """One node of one run, while it is brought to its end."""

    def __init__(
        self, engine: Engine, drive: Drive, node: Node, path: str, halted: Halt, *, ends_failed: bool = False
    ) -> None:
        self.engine = engine
        self.halted = halted
        self.drive = drive
        self.node = node
        self.path = path
        self.route = engine.router.route(node.type if node.planned is None else STEP_TYPE)
        row = drive.rows.get(path)
        self.spent = 0 if row is None or drive.run.status not in REOPENABLE else row.attempt
        """Attempts made before the run failed: who reopens it gives its steps all their tries again."""
        self.total = Total(node.retry, drive.timers, path, None if row is None or self.spent else row.deadline_at)
        # A Flow may go on from a step that was refused, and must not see another outcome when it is replayed.
        refused = StepState.FAILED if ends_failed else StepState.REFUSED
        self.record = StepRecord(drive, node, path, self.total, refused=refused)
        self.arguments: State | None = None
        """What is recorded with an admission."""
        self.resent = False
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
            assert self.record.row is not None
            return NotStarted() if self.halted.is_set() else Waits(self.record.row)
        try:
            wanted = self.record.lost is not None or not (skip or not self._wanted(values))
            action = self._plan(values) if wanted else None
        except Exception as error:  # noqa: BLE001 - a user's function raised: that fails the step
            self.question.require_owner(None, self.record.row, f"its call cannot be made: {error}")
            return await self._fail_before(error)
        self.question.require_owner(action, self.record.row, f"step {self.path} asks for no approval now")
        if action is None:
            await self.record.skip()
            return Skipped()
        while True:
            if (end_before := await self._ask_for_approval(action, end)) is not None:
                return end_before
            try:
                return await self._start(action, end)
            except NotAsApprovedError:
                if self.record.lost is not None:
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
        if action.approval is None or self.record.lost is not None:
            return None
        try:
            asked = await self.question.ask(action.approval, action.label, self.record.row, self.halted)
        except (InvalidValueError, LimitExceededError) as error:
            return await self._fail_before(error)
        if asked is None:
            return NotStarted()
        if asked.state is StepState.WAITING:
            return Waits(asked)
        if (denied := denial(asked, action.label)) is None:
            return None
        record = record_error(denied, self.path, self.record.redact, final=True)
        failed = Failed(record, denied, instead=value_of(action.approval, denied, self.drive.store.encode))
        return await self.record.commit(failed, replace(action, record=None), end)

    async def _fail_before(self, error: Exception) -> Failed | Unknown:
        """Nothing was attempted now; but what was lost before stays lost."""
        record = record_error(error, self.path, self.record.redact)
        if (lost := self.record.lost) is not None:
            return Unknown(f"{lost_reason(lost)}; it cannot be looked up: {record.type}: {record.message}", error)
        return await self.record.commit_failure(Failed(record, error))

    def _failed_for_good(self) -> Failed | None:
        row = self.record.row
        if row is None or row.state is not StepState.FAILED or row.error is None:
            return None
        error = ErrorRecord.from_text(row.error)
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
        if (lost := self.record.lost) is not None and lost.effect is not None:
            self.arguments = lost.arguments
            return replace(action, effect=EffectClass(lost.effect))
        if action.effect.admitted:
            self.arguments = self.drive.encode_arguments(action)
        return action

    def _make_action(self, values: Values) -> Action:
        node = self.node
        if node.planned is not None:
            return node.planned()
        recorded = None if self.record.lost is None else self.record.lost.arguments
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

    # Waits

    async def _wait(self, wait: Wait, values: Values, *, skip: bool) -> StepEnd:
        """Begin to wait, or see whether the wait is over."""
        if (row := self.record.row) is not None and row.state is StepState.WAITING:
            return await self._wait_on(await self.drive.look_at_wait(self.path))
        if self.halted.is_set():
            return NotStarted()
        try:
            if skip or not self._wanted(values):
                await self.record.skip()
                return Skipped()
            shown = None if self.node.bind is None else self.node.bind(**values(self.node.bind_names))
            duration_s = wait.duration_s(values(wait.seconds_names))
            arguments = self.drive.store.encode(shown, f"what approval {self.path} shows")
        except Exception as error:  # noqa: BLE001 - a user's function raised: that fails the step
            return await self._fail_before(error)
        self.record.attempt += 1
        row = replace(
            self.record.new_row(StepState.WAITING, key=wait.name, arguments=arguments),
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
        row = self.record.row = await waiting.look(self.drive, row)
        if row.state is StepState.WAITING:
            return Waits(row)
        if row.state is StepState.COMPLETED and row.output is not None:
            return Completed(row.output)
        return Unknown("another process changed the wait; run again")

    # Attempts

    async def _run_local(self, action: Action, resources: Any, end: RunEnd | None) -> StepEnd:
        """The one attempt at a `local` step, in the transaction of its outcome."""
        if action.is_async:
            error = DefinitionError(f"{action.label} is local, and must be a plain function, not async")
            return await self.record.commit_failure(Failed(record_error(error, self.path, self.record.redact), error))
        if action.approval is not None:
            self.question.require_approved(action.approval)
        self.record.attempt += 1
        return await self.record.run_local(action, self._context(action, resources), end)

    async def _carry_out(self, action: Action, resources: Any, end: RunEnd | None) -> StepEnd:
        """Attempt after attempt, until one's outcome stands."""
        if (row := self.record.row) is not None and row.state is StepState.OPEN and self.record.attempt >= TRIES_MAX:
            return await self.record.commit(self._never_ended(action), action, end)
        if (lost := self.record.lost) is not None:
            found = await self._settle(action, resources, Unknown(lost_reason(lost)))
            if isinstance(found, Resend) and self.halted.is_set():
                found = self.record.not_made(found.reason)
            if not isinstance(found, Resend):
                return await self.record.commit(found, action, end)
            self.again = found.reason
        while True:
            outcome = await self._attempt(action, resources)
            if outcome is None:
                return NotStarted()
            if isinstance(outcome, Unknown):
                settled = await self._settle(action, resources, outcome)
                if isinstance(settled, Resend):
                    if not self.resent and not self.halted.is_set() and self.total.left_s != 0:
                        self.resent, self.again = True, settled.reason
                        continue
                    settled = self.record.not_made(settled.reason)
                outcome = self._try_again(settled, action)
            if isinstance(outcome, Again):
                return Waits(await self.record.commit_retry(outcome, action))
            self.total.forget()
            return await self.record.commit(outcome, action, end)

    async def _settle(self, action: Action, resources: Any, unknown: Unknown) -> Outcome | Resend:
        """What is known of a lost outcome, before anybody is asked."""
        context, deadline = partial(self._context, action, resources), self._own_deadline(action)
        config, threads = self.engine.config.runtime, self.route.threads
        return await Settling(action, self.record, config, threads, self.halted, context, deadline).settle(unknown)

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
            self.record.attempt += 1
            if action.effect.admitted:
                await self._admit(action)
            elif self.drive.carries and action.effect in (EffectClass.READ, EffectClass.IDEMPOTENT):
                await self.record.begin(action)
            elif not action.effect.held:
                await self.drive.barrier()
            if self.drive.deadline.is_over():
                told = "the deadline of its run passed before the attempt"
                return self.record.not_made(told, RUN_TIMEOUT) if action.effect.admitted else None
            late = partial(self.drive.note_returned, self.path, self.record.attempt)
            speech = Speech(self.drive.live, self.path, self.record.attempt, self.engine.router.shown_chars_max)
            ctx, run = self._context(action, resources, speech), self.drive.deadline
            made = await make_attempt(action, ctx, self._deadline(action), seat, late, run)
            if made.deadline is not None and made.deadline.limit is Limit.RUN:
                run.expire()
            outcome = self._try_again(self.record.decide(action, made), action)
            value = outcome.output if isinstance(outcome, Completed) else None
            speech.end(value, self.engine.router.shown.get(self.node.type))
            if isinstance(outcome, Failed | Refused) and outcome.instead is None:
                self.halted.set()  # before anybody gets our slot
        if made.cancellation is not None:
            if isinstance(outcome, Again):
                outcome = outcome.outcome
            if not isinstance(outcome, Cut):
                await self.record.commit_shielded(outcome, action)
            raise made.cancellation
        return outcome

    async def _admit(self, action: Action) -> None:
        """The last durable act before the attempt."""
        again, self.again = self.again, None
        approval = None if action.approval is None else self.question.path
        await self.record.admit(action, self.arguments, again=again, approval=approval)

    def _never_ended(self, action: Action) -> Outcome:
        """What becomes of a call that has had all its tries, and ended in none."""
        error = StepError(
            f"{action.label} was begun {self.record.attempt} times, and each time the process ended before it did; "
            "it is not begun again in this turn",
            code="step.never_ended",
        )
        outcome = self.record.decide(action, End(error=error))
        assert isinstance(outcome, Failed)
        return replace(outcome, error=replace(outcome.error, final=True))

    def _context(self, action: Action, resources: Any, speech: Speech | None = None) -> StepContext:
        return StepContext(
            run_id=self.drive.run.run_id,
            path=self.path,
            key=self.record.key(action),
            attempt=max(self.record.attempt, 1),
            config=self.engine.config,
            sandbox=self.engine.sandbox,
            logger=self.route.logger,
            resources=resources,
            _partial=None if speech is None else speech.show,
        )

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
                await self.route.threads.ended(self.record.name)
            if self.route.limiter is not None:
                await place.enter_async_context(self.route.limiter)
            if in_thread:
                seat = await place.enter_async_context(self.route.threads.seat(self.record.name))
        if in_time.cancelled_caught:
            self.total.is_over = True
        return seat

    def _backs_off(self) -> bool:
        """Whether the time of the next attempt has not come. Who reopens a run does not wait for it."""
        row = self.record.row
        if row is None or row.state is not StepState.RETRYING or self.record.attempt == self.spent:
            return False
        if back_off_left_s(self.drive.timers, row) > 0:
            return True
        self.drive.timers.forget(("retry", self.path))
        return False

    def _try_again(self, outcome: Outcome, action: Action) -> Outcome | Again:
        """The outcome, or that another attempt follows it. None does once the run has halted, but for one that is only
        let go of: that keeps its further tries."""
        if self.halted.is_set() and self.drive.ending is None:
            return outcome
        tries, left_s = self.record.attempt - self.spent, self.total.left_s
        return decide_retry(outcome, self.node.retry, admitted=action.effect.admitted, tries=tries, left_s=left_s)

    def _out_of_time(self, action: Action) -> Outcome:
        """The total passed before another attempt could begin: the last one's failure stands."""
        error: StepError = EffectNotMade("it was not sent again")
        row = self.record.row
        if row is not None and row.state is StepState.RETRYING and row.error is not None:
            error = ErrorRecord.from_text(row.error).to_error(self.drive.run.run_id)
        last = self.record.decide(action, End(error=error))
        assert self.node.retry is not None
        assert isinstance(last, Failed | Refused)
        return total_over(last, self.node.retry, self.record.attempt - self.spent)
