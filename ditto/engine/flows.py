"""Flows: an async function, replayed call by call.

Each call is a row whose path is the call's name: a step, a wait, or a `CALL.…` that stands for a Graph, a Loop or a
child run, whose own steps have paths below it. A recorded call is answered from its row. What a call was asked with is
kept as its version; asked with something else, or for something new before what is recorded, the run stops before
anything further is started.

A call that cannot go on (an unknown outcome; a wait, if the caller does not want to wait) blocks only itself. When all
that is left of the flow is blocked, it is stopped by a BaseException that goes through the user's function.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, NoReturn, TypeVar

import anyio
import uuid_utils

from ditto.effects import EffectClass, EffectDeclaration, check_effect
from ditto.engine.approving import BELOW
from ditto.engine.changes import list_differences
from ditto.engine.deadlines import RUN_TIMEOUT, look_s
from ditto.engine.drive import Drive, closing_error
from ditto.engine.executor import Engine, adopt, run_graph
from ditto.engine.halt import Halt
from ditto.engine.loops import run_loop
from ditto.engine.outcomes import Completed, ErrorRecord, Failed, Unknown, is_lost, record_error
from ditto.engine.retrying import back_off_left_s
from ditto.engine.steps import NotStarted, Skipped, Step, StepEnd, Waits
from ditto.engine.trouble import Trouble, exhausted
from ditto.errors import (
    ConfigError,
    DefinitionError,
    DittoError,
    InvalidValueError,
    LimitExceededError,
    ReplayMismatchError,
    RunBlockedError,
    RunPausedError,
    StepError,
    TransitionRefusedError,
    UnknownOutcomeError,
)
from ditto.flow import Decision, Flow
from ditto.graph import STEP_TYPE, Graph, Node, Retry, check_name
from ditto.loop import Loop
from ditto.signatures import is_async, takes_context
from ditto.store import queries
from ditto.store.records import Event, LoopState, StepRow
from ditto.store.schema import RunStatus, StepState
from ditto.store.values import State, Stored, digest
from ditto.waits import Wait, Waiting, WaitKind, check_seconds

T = TypeVar("T")

CALLS_PAGE: Final = 500
"""Recorded calls that are read at once."""

BRANCH_TICKS: Final = 5
"""Turns of the event loop in which a branch that was begun comes to its first call."""

GRAPH: Final = "CALL.GRAPH"
LOOP: Final = "CALL.LOOP"
CHILD: Final = WaitKind.CHILD.value

_FOR_THE_FLOW: Final = (StepError, LimitExceededError, DefinitionError, ConfigError, InvalidValueError)
"""Errors that the flow's function may handle; any other one stops the run."""

RunChild = Callable[[Graph | Loop | Flow, Any, str], Awaitable[Any]]
"""Runs a workflow under an id of its own; a Waiting if it waits and the caller does not."""


class FlowStopped(BaseException):
    """Goes through a Flow's function when the engine must stop it. Never caught by `except Exception`."""


async def run_flow(
    engine: Engine,
    drive: Drive,
    flow: Flow,
    input: Stored,
    *,
    concurrency: int,
    trouble: Trouble,
    run_child: RunChild,
) -> Stored | None:
    """Call the function, answering what is recorded and making what is not. Returns what it came to, None in trouble.

    Raises the caller's cancellation, and a DittoError if the run must stop: not ours any more, a store that cannot
    write, ReplayMismatchError, RunBlockedError.
    """
    nested = flow.kind != Flow.kind
    calls = await _load_calls(drive, nested=nested)
    run = FlowRun(engine, drive, concurrency, trouble, run_child, calls)
    run.questioned = {_asking_call(path, nested=nested) for path in drive.rows}
    value: Any = None
    try:
        value = await flow.function(run, input.decode())
    except FlowStopped:
        run.note_deadline()
    except BaseExceptionGroup as group:
        stopped, rest = group.split(FlowStopped)
        if rest is not None and not isinstance(rest, Exception):
            raise
        if stopped is not None:
            run.note_deadline()
        if rest is not None:
            error = rest if stopped is not None else group
            trouble.fail(record_error(error, None, drive.store.redact), error)
    except (asyncio.CancelledError, GeneratorExit):
        raise
    except Exception as error:  # noqa: BLE001 - the user's function raised: that fails the run
        path = error.step if isinstance(error, StepError) else None
        trouble.fail(record_error(error, path, drive.store.redact), error)
    if run.stop is not None:
        raise run.stop
    if trouble or trouble.waits:
        return None
    run.check_all_asked()
    try:
        return drive.store.encode(value, f"what flow {flow.name} returned")
    except DittoError as error:
        trouble.fail(record_error(error, None, drive.store.redact), error)
        return None


async def _load_calls(drive: Drive, *, nested: bool) -> dict[str, StepRow]:
    """The recorded calls of a run that goes on, by name; read in pages."""
    calls: dict[str, StepRow] = {}
    after: int | None = 0 if drive.resumed else None
    while after is not None:
        page, after = await drive.store.read(
            partial(queries.list_calls, nested=nested), drive.run.id, after, CALLS_PAGE
        )
        calls.update((row.path, row) for row in page if row.path not in drive.rows)
    return calls


def _asking_call(path: str, *, nested: bool) -> str:
    """The call whose step asked the question with this path; where calls are nested, a call is a step."""
    return path.removesuffix(BELOW) if nested else path.partition("/")[0]


class FlowRun:
    """The FlowContext of one run while it is driven."""

    def __init__(
        self,
        engine: Engine,
        drive: Drive,
        concurrency: int,
        trouble: Trouble,
        run_child: RunChild,
        calls: dict[str, StepRow],
    ) -> None:
        self._engine = engine
        self._drive = drive
        self._concurrency = concurrency
        self._trouble = trouble
        self._run_child = run_child
        self._calls = calls
        self._task = asyncio.current_task()
        """The one that the function runs in; its branches have tasks of their own."""
        self._asked: set[str] = set()
        self.questioned: set[str] = set()
        """Calls below which a step has asked for an approval: they were made, whether they have a row or not."""
        self._retried = _failing_path(drive)
        """The path that the run failed at before it was reopened: it is tried again."""
        self._busy = 0
        self._blocked: list[asyncio.Future[None]] = []
        self._turn_halt = Halt(drive.halted)
        """Set once a call of a turn has failed: no other one is begun."""
        self.stop: DittoError | None = None
        """Why the whole run must stop."""

    # The calls

    @property
    def run_id(self) -> str:
        return self._drive.run.run_id

    async def run(self, name: str, graph: Graph, input: Any = None) -> dict[str, Any]:
        self._engine.router.check(graph)
        outputs: dict[str, Any] = await self._call(name, lambda: self._run_graph(name, graph, input))
        return outputs

    async def loop(self, name: str, loop: Loop, state: Any = None) -> Any:
        return await self._call(name, lambda: self._run_loop(name, loop, state))

    async def step(
        self,
        name: str,
        function: Callable[..., Any],
        input: Any = None,
        *,
        effect: EffectDeclaration = EffectClass.IDEMPOTENT,
        retry: Retry | None = None,
        timeout_s: float | None = None,
        lookup: Callable[..., Any] | None = None,
        absence_is_final: bool = False,
    ) -> Any:
        with_context = takes_context(function, owner=f"call {name}", first="input")
        node = replace(
            _node(name, STEP_TYPE),
            bind_names=("input",),
            function=_as_step(function, with_context=with_context),
            takes_context=with_context,
            effect=check_effect(effect, owner=f"call {name}"),
            retry=retry,
            timeout_s=timeout_s,
            lookup=lookup,
            absence_is_final=absence_is_final,
        )
        return await self._call(name, lambda: self._run_node(node, input))

    async def node(
        self, name: str, type: str, arguments: Any = None, *, retry: Retry | None = None, timeout_s: float | None = None
    ) -> Any:
        self._engine.router.handler(type)
        node = replace(_node(name, type), retry=retry, timeout_s=timeout_s)
        return await self._call(name, lambda: self._run_node(node, arguments))

    async def wait(self, name: str, *, timeout_s: float | None = None) -> Any:
        output = await self._wait(name, WaitKind.SIGNAL, timeout_s, None)
        if output["timed_out"]:
            raise TimeoutError(f"no signal {name!r} came within {timeout_s} s")
        return output["body"]

    async def approve(self, name: str, show: Any, *, expires_s: float | None = None) -> Decision:
        output = await self._wait(name, WaitKind.APPROVAL, expires_s, show)
        return Decision(output["decision"], output["actor"], output["reason"], output["digest"])

    async def sleep(self, name: str, seconds: float) -> None:
        await self._wait(name, WaitKind.TIMER, seconds, None)

    async def now(self, name: str) -> datetime:
        at_us = await self._recorded(name, self._drive.store.clock.now_us)
        return datetime.fromtimestamp(at_us / 1_000_000, UTC)

    async def random(self, name: str) -> float:
        number: float = await self._recorded(name, random.random)
        return number

    async def uuid(self, name: str) -> str:
        made: str = await self._recorded(name, lambda: str(uuid_utils.uuid7()))
        return made

    async def child(self, name: str, workflow: Graph | Loop | Flow, input: Any = None, *, id: str | None = None) -> Any:
        return await self._call(name, lambda: self._run_child_call(name, workflow, input, id))

    def note_deadline(self) -> None:
        """The function was stopped: by the run's deadline, if that has passed."""
        if self._drive.deadline.over is not None:
            self._trouble.fail(self._drive.deadline.over)

    def check_all_asked(self) -> None:
        """Refuse an end that leaves recorded calls unasked for. Raises ReplayMismatchError."""
        if left := self._left():
            raise ReplayMismatchError(
                f"run {self.run_id}: the flow ended without asking for what is recorded: {', '.join(left)}; "
                "run it with the code that it was started with",
                run_id=self.run_id,
            )

    def _left(self) -> list[str]:
        """What is recorded, and was not asked for yet."""
        return sorted((set(self._calls) | self.questioned) - self._asked)

    async def _refuse_what_comes_before_records(self, name: str) -> None:
        """A new call while a recorded one is still to be asked for: the code has changed, and would do again, under
        another name, what it did. Only a branch might still ask for it: then the end tells. Raises ReplayMismatchError.
        """
        if name in self._calls or name in self.questioned or not self._left():
            return
        if asyncio.current_task() is not self._task:
            return
        for _ in range(BRANCH_TICKS):  # branches that were begun just now have their turn
            await asyncio.sleep(0)
        if self._busy == 1 and not self._blocked and (left := self._left()):
            raise ReplayMismatchError(
                f"run {self.run_id}: call {name!r} is new, and comes before what is recorded: {', '.join(left)}; "
                "nothing further was started. Run it with the code that it was started with",
                run_id=self.run_id,
            )

    # For turns, whose calls are named by what makes them

    def recorded(self, path: str) -> StepRow | None:
        """The row of a call, if it has one."""
        return self._calls.get(path)

    async def perform(
        self, node: Node, check: Callable[[int], Awaitable[None]], blocked: Callable[[], Awaitable[None]] | None
    ) -> Any:
        """What the call `node` comes to, or came to; one that was refused, or failed, is made again.

        `check(run)` is asked first; ReplayMismatchError from it stops the run. `blocked()` is called if the call cannot
        go on in this drive.
        """

        async def make() -> Any:
            await check(self._drive.run.id)
            return await self._run_node(node, None, in_turn=_InTurn(self._turn_halt, blocked))

        return await self._call(node.name, make, named=False)

    async def settle(self) -> None:
        """Return once all outcomes so far are durable."""
        await self._drive.barrier()

    # How each kind is made

    async def _run_graph(self, name: str, graph: Graph, input: Any) -> Any:
        store = self._drive.store
        given = store.encode(input, f"the input of call {name}")
        call = StepRow(name, GRAPH, _version(given), "[]", None, StepState.COMPLETED, 1, key=graph.name)
        if (recorded := self._recorded_call(call)) is not None:
            return _raise_or_decode(recorded, self.run_id)
        prefix = f"{name}/"
        await self._load_rows(graph, prefix)
        trouble = self._new_trouble()
        result = await run_graph(
            self._engine,
            self._drive,
            graph,
            given,
            prefix=prefix,
            concurrency=self._concurrency,
            trouble=trouble,
        )
        await self._settle_call(call, trouble)
        call.output = store.encode(result.decode(graph), f"the outputs of call {name}")
        self._drive.hold_call(call, Event("call_completed", name))
        return _raise_or_decode(call, self.run_id)

    async def _run_loop(self, name: str, loop: Loop, state: Any) -> Any:
        store = self._drive.store
        given = store.encode(state, f"the state of call {name}")
        call = StepRow(name, LOOP, _version(given), "[]", None, StepState.COMPLETED, 1, key=loop.name)
        if (recorded := self._recorded_call(call)) is not None:
            return _raise_or_decode(recorded, self.run_id)
        row = self._calls.get(name)
        done, kept = (0, given) if row is None or row.progress is None else (row.attempt, row.progress)
        begun = LoopState(done, kept, name, loop.name, call.version)
        if self._drive.resumed:
            rows = await store.read(queries.list_steps, self._drive.run.id, f"{name}/{done + 1}/")
            self._drive.rows.update((each.path, each) for each in rows)
        trouble = self._new_trouble()
        result = await run_loop(self._engine, self._drive, loop, begun, concurrency=self._concurrency, trouble=trouble)
        if result.end is not None and result.end.status is RunStatus.EXHAUSTED:
            over = exhausted(self.run_id, loop.name, result.iteration)
            trouble.fail(record_error(over, name, store.redact), over)
        await self._settle_call(call, trouble)
        call.attempt = result.iteration
        call.output = store.encode(result.state.plain(), f"the state of call {name}")
        self._drive.hold_call(call, Event("call_completed", name))
        return _raise_or_decode(call, self.run_id)

    async def _run_node(self, node: Node, input: Any, *, in_turn: _InTurn | None = None) -> Any:
        given = self._drive.store.encode(input, f"the input of call {node.name}")
        node = replace(node, version=node.version or _version(given))
        row = self._calls.get(node.name)
        if row is not None:
            self._refuse_mismatch(row, node.type, node.version, row.key)
            stands = row.state is StepState.FAILED and in_turn is None and self._retried != row.path
            if row.state is StepState.COMPLETED or stands:
                return _raise_or_decode(row, self.run_id)
            self._drive.rows[node.name] = row
        if self._drive.deadline.is_over() and not is_lost(row):
            await self._halt()
        outcome = await self._bring_to_end(node, given, in_turn)
        if isinstance(outcome, Failed):
            if outcome.error.code == RUN_TIMEOUT and self._drive.deadline.over is not None:
                await self._halt()
            raise _error_of(outcome.error, outcome.cause, self.run_id)
        assert isinstance(outcome, Completed)
        return outcome.output.decode()

    async def _bring_to_end(self, node: Node, given: State, in_turn: _InTurn | None) -> StepEnd:
        """A step until its outcome stands; what blocks it blocks this call alone."""

        def values(names: tuple[str, ...]) -> dict[str, Any]:
            return {each: given.decode() for each in names}

        halt = Halt(self._drive.halted) if in_turn is None else in_turn.halt
        step = Step(self._engine, self._drive, node, node.name, halt, ends_failed=in_turn is None)
        while True:
            try:
                outcome = await step.run(values, skip=False, end=None)
            except TransitionRefusedError as refused:
                outcome = await adopt(self._drive, step, refused)
            match outcome:
                case Unknown(reason):
                    self._trouble.unknown[step.path] = reason
                    if in_turn is not None and in_turn.blocked is not None:
                        await in_turn.blocked()
                    await self._block()
                case Waits(row):
                    await self._wait_for(row)
                case NotStarted():
                    if in_turn is not None and not self._drive.halted.is_set():
                        raise not_begun(node.name)
                    await self._halt()
                case Completed() | Failed():
                    return outcome
                case Skipped():
                    raise AssertionError("a call of a flow has no condition")

    async def _wait(self, name: str, kind: WaitKind, seconds: float | None, shown: Any) -> dict[str, Any]:
        if seconds is not None:
            check_seconds(seconds, owner=f"call {name}")
        show = (lambda input: input) if kind is WaitKind.APPROVAL else None
        node = replace(_node(name, kind.value), bind=show, wait=Wait(kind, name, seconds))
        output: dict[str, Any] = await self._call(name, lambda: self._run_node(node, shown))
        return output

    async def _wait_for(self, row: StepRow) -> None:
        """Until the wait may be over; or block, if the caller does not want to wait for it."""
        retried = row.state is StepState.RETRYING
        if not self._drive.blocks and not retried:
            self._trouble.waits[row.path] = row
            await self._block()
        woken = asyncio.Event()
        wake = woken.set
        self._drive.wakes.add(wake)
        try:
            left_s = math.inf
            if retried:
                left_s = back_off_left_s(self._drive.timers, row)
            elif row.due_at is not None:
                left_s = (row.due_at - self._drive.store.clock.now_us()) / 1_000_000
            with self._drive.halted.until_set(), anyio.move_on_after(look_s(left_s)):
                await woken.wait()
        finally:
            self._drive.wakes.discard(wake)
        if self._drive.halted.is_set():
            await self._halt()

    async def _recorded(self, name: str, make: Callable[[], Any]) -> Any:
        """What `make()` returned when this call was first made."""
        node = replace(_node(name, STEP_TYPE), bind=None, bind_names=(), function=make, effect=EffectClass.PURE)
        return await self._call(name, lambda: self._run_node(node, None))

    async def _run_child_call(self, name: str, workflow: Graph | Loop | Flow, input: Any, id: str | None) -> Any:
        store = self._drive.store
        given = store.encode(input, f"the input of call {name}")
        child_id = id or f"{self.run_id}/{name}"
        call = StepRow(name, CHILD, _version(given), "[]", None, StepState.COMPLETED, 1, key=child_id)
        if (recorded := self._recorded_call(call)) is not None:
            return _raise_or_decode(recorded, self.run_id)
        if self._drive.deadline.is_over() and await store.read(queries.get_run, child_id) is None:
            await self._halt()
        if self._drive.ending is not None:
            raise self._drive.ending
        await self._drive.barrier()
        value: Any = None
        try:
            value = await self._run_child(workflow, given.decode(), child_id)
        except UnknownOutcomeError as unknown:
            self._trouble.unknown[name] = f"child run {child_id}: {unknown.message}"
            await self._block()
        except RunPausedError as paused:
            self._trouble.child_paused = paused
            value = Waiting(child_id, ())
        except StepError as error:
            if error.code == RUN_TIMEOUT and self._drive.deadline.is_over():
                await self._halt()
            raise
        if value is None and self._drive.halted.is_set():
            await self._halt()
        if isinstance(value, Waiting):
            call.state = StepState.WAITING
            self._drive.hold_call(call, Event("step_waiting", name, {"for": CHILD, "child": child_id}))
            self._trouble.waits[name] = call
            await self._block()
        call.output = store.encode(value, f"what child {child_id} came to")
        self._drive.hold_call(call, Event("call_completed", name))
        return _raise_or_decode(call, self.run_id)

    # What all calls share

    async def _call(self, name: str, make: Callable[[], Awaitable[T]], *, named: bool = True) -> T:
        """Make a call, or answer it; while it is under way the flow is busy."""
        if named:
            check_name(name, what="call")
        if name in self._asked:
            raise DefinitionError(f"flow: a call is named {name!r} already; each call needs a name of its own")
        self._asked.add(name)
        self._busy += 1
        try:
            self._raise_stop()
            if named:
                await self._refuse_what_comes_before_records(name)
            value = await make()
            if named:
                # The function may act on it at once, by means that nobody records.
                await self._drive.barrier()
            return value
        except DittoError as error:
            if isinstance(error, _FOR_THE_FLOW) and self._drive.stopped is None:
                raise
            self.stop = self.stop or error
            if self.stop is self._drive.ending and self._drive.stopped is None:
                await self._block()  # the flow is stopped when its other calls are drained
            self._stop_all()
            raise FlowStopped from error
        finally:
            self._busy -= 1
            self._look_whether_idle()

    def _recorded_call(self, call: StepRow) -> StepRow | None:
        """The record of a call, if it answers it."""
        row = self._calls.get(call.path)
        if row is None:
            return None
        self._refuse_mismatch(row, call.type, call.version, call.key)
        if row.state is StepState.COMPLETED:
            return row
        retried = self._retried is not None and (self._retried + "/").startswith(f"{row.path}/")
        return row if row.state is StepState.FAILED and not retried else None

    def _refuse_mismatch(self, row: StepRow, type: str, version: str, key: str | None) -> None:
        asked, recorded = (type, key, version), (row.type, row.key, row.version)
        if asked == recorded:
            return
        what = "with another input" if asked[:2] == recorded[:2] else f"as {row.type} {row.key or ''}".rstrip()
        now = "" if asked[:2] == recorded[:2] else f", and is asked for as {type} {key or ''}".rstrip()
        raise ReplayMismatchError(
            f"run {self.run_id}: call {row.path!r} was recorded {what}{now}; nothing further was started. "
            "Run it with the code that it was started with",
            run_id=self.run_id,
        )

    async def _load_rows(self, graph: Graph, prefix: str) -> None:
        if not self._drive.resumed:
            return
        rows = {row.path: row for row in await self._drive.store.read(queries.list_steps, self._drive.run.id, prefix)}
        differences = list_differences(graph, rows, prefix)
        if differences:
            raise RunBlockedError(
                f"run {self.run_id}: the code changed under it: {'; '.join(differences)}",
                differences=tuple(differences),
                run_id=self.run_id,
            )
        self._drive.rows.update(rows)

    async def _settle_call(self, call: StepRow, trouble: Trouble) -> None:
        """What went wrong inside a Graph or a Loop: it blocks, or it fails the call, which is recorded."""
        if trouble.unknown or trouble.waits:
            self._trouble.unknown.update(trouble.unknown)
            self._trouble.waits.update(trouble.waits)
            await self._block()
        if trouble.error is not None:
            if self._drive.stopped is not None or self._drive.deadline.over is not None:
                await self._halt()
            failed = replace(call, state=StepState.FAILED, error=trouble.error.to_text())
            self._drive.hold_call(failed, Event("call_failed", call.path, {"code": trouble.error.code}))
            raise _error_of(trouble.error, trouble.cause, self.run_id)

    async def _block(self) -> None:
        """This call cannot go on in this drive. Raises FlowStopped once nothing else can, either."""
        blocked: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._blocked.append(blocked)
        self._busy -= 1
        self._look_whether_idle()
        try:
            await blocked
        finally:
            self._busy += 1

    def _look_whether_idle(self) -> None:
        """If only blocked calls are left, and no task of the flow is about to make another one: stop."""
        if self._busy == 0 and self._blocked:
            loop = asyncio.get_running_loop()
            loop.call_soon(loop.call_soon, loop.call_soon, self._stop_if_idle)

    def _stop_if_idle(self) -> None:
        if self._busy == 0:
            self._stop_all()

    def _stop_all(self) -> None:
        for blocked in self._blocked:
            if not blocked.done():
                blocked.set_exception(FlowStopped())
                blocked.exception()
        self._blocked.clear()

    def _raise_stop(self) -> None:
        if self.stop is not None:
            raise self.stop

    def _new_trouble(self) -> Trouble:
        """That of a Graph or a Loop inside. Once the run is over, all that is left to do there is to settle."""
        return Trouble(Halt(self._drive.halted), self._drive.deadline.over if self._drive.deadline.is_over() else None)

    async def _halt(self) -> NoReturn:
        """Nothing further may be begun in this drive, so this call cannot go on. What the run's deadline stops is for
        nobody to handle: the other calls come to their ends, and the function is stopped."""
        if self._drive.stopped is None and self._drive.deadline.over is not None:
            await self._block()
        raise self._drive.stopped or self._drive.ending or closing_error()


@dataclass(frozen=True, slots=True)
class _InTurn:
    """How a call of a turn differs from one of a Flow: it is tried again if it failed, and its failure stops others."""

    halt: Halt
    blocked: Callable[[], Awaitable[None]] | None
    """Called if it cannot go on in this drive."""


def not_begun(path: str, failure: DittoError | None = None) -> StepError:
    """The error of a call that comes after another one has failed, by `failure`."""
    why = "" if failure is None else f": {failure.message}"
    error = StepError(f"call {path} was not begun: another call of the turn failed{why}", code="turn.stopped")
    error.__cause__ = failure
    return error


def _node(name: str, type: str) -> Node:
    """A node outside of a Graph: one call of a flow, whose input is what it was asked with."""
    return Node(
        name=name, type=type, after=(), version="", bind=lambda input: input, bind_names=("input",), when=None,
        when_names=(), retry=None, timeout_s=None,
    )  # fmt: skip


def _as_step(function: Callable[..., Any], *, with_context: bool) -> Callable[..., Any]:
    """The function of a call as that of a plain step, which gets its values by name."""
    if is_async(function):

        async def call_async(input: Any, **named: Any) -> Any:
            return await (function(input, named["ctx"]) if with_context else function(input))

        return call_async

    def call(input: Any, **named: Any) -> Any:
        return function(input, named["ctx"]) if with_context else function(input)

    return call


def _version(given: Stored) -> str:
    """What a call was asked with, in short."""
    return digest(given.body)[:16]


def _failing_path(drive: Drive) -> str | None:
    """The path that a reopened run failed at."""
    if drive.run.error is None or drive.run.status not in (RunStatus.FAILED, RunStatus.EXHAUSTED):
        return None
    return ErrorRecord.from_text(drive.run.error).step


def _raise_or_decode(row: StepRow, run_id: str) -> Any:
    if row.state is StepState.FAILED and row.error is not None:
        raise _error_of(ErrorRecord.from_text(row.error), None, run_id)
    return None if row.output is None else row.output.decode()


def _error_of(record: ErrorRecord, cause: BaseException | None, run_id: str) -> DittoError:
    error = record.to_error(run_id)
    error.__cause__ = cause
    return error
