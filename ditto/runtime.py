"""The runtime: what an application holds. It opens the store, drives runs, and answers questions about them.

`create_ditto()` reads nothing and opens nothing; the store is opened by the first call, or on entering `async with`.
Start reading at `Runtime.run`; how a run moves is in `ditto.engine`.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self, TypeVar, overload

import anyio
import uuid_utils

from ditto.clock import Clock, to_datetime
from ditto.config import Config
from ditto.engine import opening
from ditto.engine.approving import BELOW
from ditto.engine.certifying import certify_approval, certify_resolution
from ditto.engine.checking import Checker
from ditto.engine.drive import Drive, closing_error
from ditto.engine.executor import Engine, GraphResult, run_graph
from ditto.engine.flows import run_flow
from ditto.engine.listening import Place, listen
from ditto.engine.loops import run_loop
from ditto.engine.opening import Closed, OnFinished, Opened, Request
from ditto.engine.outcomes import ErrorRecord
from ditto.engine.ownership import Owner
from ditto.engine.questions import find_question, open_wait
from ditto.engine.recovering import recover_runs
from ditto.engine.resolving import Decision, decide_resolution
from ditto.engine.routing import Router
from ditto.engine.serving import Serving
from ditto.engine.steps import is_lost
from ditto.engine.trouble import Trouble, exhausted
from ditto.engine.turns import Came, replay_turn, turn_flow
from ditto.errors import (
    ConfigError,
    DefinitionError,
    DittoError,
    ReplayMismatchError,
    RunBlockedError,
    RunBusyError,
    RunCancelledError,
    RunNotFoundError,
    RunPausedError,
    StepError,
    StoreClosedError,
    StoreError,
    TransitionRefusedError,
)
from ditto.flow import Flow
from ditto.graph import Graph, check_name
from ditto.loop import Loop
from ditto.pieces import Heard, TextKind
from ditto.runs import Checked, EventInfo, Health, Recovered, RunInfo, RunSummary, StepInfo
from ditto.sandbox import Sandbox
from ditto.secrets import LogFilter, Redactor
from ditto.store import queries, transitions
from ditto.store.connection import Location
from ditto.store.records import COMPLETED, INTERRUPTED, PAUSED, Event, RunEnd, RunRow, Seen, StepRow
from ditto.store.schema import CLOSED, PAUSING, REOPENABLE, SCHEMA_VERSION, SETTLED, RunStatus, StepState
from ditto.store.store import Store
from ditto.turn import ReceiptSink, Turn, TurnFunction
from ditto.waits import ON_WAIT, OnWait, Waiting, check_timeout
from ditto.worker import Worker

T = TypeVar("T")

EVENTS_PAGE: Final = 500
"""Events read at once; no read transaction is open between two pages."""

FOLLOW_S: Final = 0.25
"""Between two looks for further events."""

LOST_SHOWN: Final = 100
MAX_ROW_ID: Final = 2**62

logger = logging.getLogger("ditto")


def create_ditto(
    config: Config | None = None,
    *,
    store: str | Path | None = None,
    workers: Iterable[Worker] = (),
    workflows: Iterable[Graph | Loop | Flow] = (),
    sandbox: Sandbox | None = None,
    clock: Clock | None = None,
) -> Runtime:
    """A runtime for this configuration: `async with create_ditto() as runtime`, or `await runtime.close()`.

    `store` is the path of the SQLite file (else the configuration's, `.ditto/ditto.db`). `workers` carry out node
    types; plain steps need none. `workflows` are those that `recover` and `resume` may take up by name; the store keeps
    names only. `sandbox` replaces the configuration's. Raises ConfigError.
    """
    config = config or Config()
    path = Path(config.store.path if store is None else store).absolute()
    if sandbox is not None and not isinstance(sandbox, Sandbox):
        raise ConfigError(f"sandbox must be a Sandbox, not {type(sandbox).__name__}")
    return Runtime(
        config=config,
        location=Location(path, config.store.synchronous, config.store.busy_timeout_s),
        workers=tuple(workers),
        workflows=_by_name(workflows),
        sandbox=sandbox or Sandbox.from_config(config.sandbox),
        clock=clock or Clock(),
    )


@dataclass(slots=True)
class _Open:
    """What a runtime has while its store is open."""

    store: Store
    owner: Owner
    engine: Engine
    loop: asyncio.AbstractEventLoop
    process: int = field(default_factory=os.getpid)
    active: dict[str, asyncio.Event] = field(default_factory=dict)
    """Runs that this runtime drives now, by id; the event is set when it lets go."""
    serving: Serving | None = None
    looking: asyncio.Task[None] | None = None
    """Looks, after another process has written, whether our runs are still ours."""
    log_filter: LogFilter | None = None
    """Keeps the configuration's credentials out of what ditto's loggers write."""


class Runtime:
    """Drives runs on one store. Made by `create_ditto`; belongs to one event loop and one process."""

    def __init__(
        self,
        *,
        config: Config,
        location: Location,
        workers: tuple[Worker, ...],
        workflows: Mapping[tuple[str, str], Graph | Loop | Flow],
        sandbox: Sandbox,
        clock: Clock,
    ) -> None:
        self.config = config
        self.location = location
        self.sandbox = sandbox
        self._workers = workers
        self._workflows = workflows
        self._clock = clock
        self._opened: _Open | None = None
        self._opening = asyncio.Lock()
        self._closed = False

    async def __aenter__(self) -> Self:
        await self._ready()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop starting steps, let what runs end for at most `runtime.grace_s`, commit, close. Safe to call twice.

        Runs that did not end are interrupted: a later runtime goes on with them. What `serve` drives and did not end
        in that time is cut short before the last commits. Nothing is taken up any more from the first moment on.
        """
        self._closed = True
        opened, self._opened = self._opened, None
        if opened is None or opened.store.is_inherited:
            return  # in a forked child all of it is the parent's, and no event loop runs
        with anyio.CancelScope(shield=True):
            opened.engine.close()
            serving = opened.serving
            with anyio.move_on_after(self.config.runtime.grace_s):
                for released in list(opened.active.values()):
                    await released.wait()
                if serving is not None:
                    serving.wake.set()
                    await serving.ended.wait()
            if serving is not None:
                await serving.stop()
            await opened.engine.router.close(self.config.runtime.grace_s)
            await opened.store.close()
            opened.owner.close()
        if opened.log_filter is not None:
            for each in _loggers(opened.engine.router):
                each.removeFilter(opened.log_filter)

    # Driving

    @overload
    async def run(
        self,
        workflow: Graph,
        input: Any = None,
        /,
        *,
        id: str | None = None,
        on_finished: OnFinished = "return",
        on_wait: Literal["block"] = "block",
        timeout_s: float | None = None,
        concurrency: int | None = None,
    ) -> dict[str, Any]: ...
    @overload
    async def run(
        self,
        workflow: Graph,
        input: Any = None,
        /,
        *,
        id: str | None = None,
        on_finished: OnFinished = "return",
        on_wait: OnWait,
        timeout_s: float | None = None,
        concurrency: int | None = None,
    ) -> dict[str, Any] | Waiting: ...
    @overload
    async def run(
        self,
        workflow: Loop | Flow,
        input: Any = None,
        /,
        *,
        id: str | None = None,
        on_finished: OnFinished = "return",
        on_wait: OnWait = "block",
        timeout_s: float | None = None,
        concurrency: int | None = None,
    ) -> Any: ...
    async def run(
        self,
        workflow: Graph | Loop | Flow,
        input: Any = None,
        /,
        *,
        id: str | None = None,
        on_finished: OnFinished = "return",
        on_wait: OnWait = "block",
        timeout_s: float | None = None,
        concurrency: int | None = None,
    ) -> Any:
        """Run a workflow to its end. A Graph returns `{node: output}`, None for a skipped node; a Loop its last state;
        a Flow what its function returned.

        A new `id` starts; an open run goes on; a closed one returns what is saved, or raises it. `on_finished`
        says what else a closed run may do: "new" starts a new generation, "new_if_failed" does if it failed,
        "reopen" takes a failed run up again where it stopped. Without an id a fresh one is made. A run that waits is
        waited for, or, by `on_wait="return"`, let go of: what comes back then is a Waiting, and the run is a row.

        `timeout_s` gives the run a deadline when it starts, or is reopened, waits and restarts included; an open run
        keeps the one it has. When it passes, nothing further starts, what runs is cut as by a deadline of its own, and
        the run fails with StepTimeoutError, code `run.timeout`.

        Raises StepError (a step failed), UnknownOutcomeError, RunConflictError (the id belongs to another workflow
        or input), RunBusyError (another live runtime drives it), RunBlockedError (the code changed),
        RunPausedError (somebody paused it, before or now: `resume` goes on with it), ReplayMismatchError (a Flow
        asks for something other than what is recorded), LimitExceededError (a Loop hit `max_iterations`: what was
        found is kept, and a later call with a higher one goes on), StoreError, DefinitionError, InvalidValueError. A
        cancelled caller gets its cancellation; the run can be resumed.
        """
        if isinstance(workflow, Loop):
            self._check_iterations(workflow)
        elif not isinstance(workflow, Graph | Flow):
            raise DefinitionError(f"runtime.run takes a Graph, a Loop or a Flow, not {type(workflow).__name__}")
        return await self._drive(workflow, input, id, on_finished, concurrency, on_wait, timeout_s)

    async def loop(
        self,
        loop: Loop,
        state: Any = None,
        *,
        id: str | None = None,
        on_finished: OnFinished = "return",
        on_wait: OnWait = "block",
        timeout_s: float | None = None,
        concurrency: int | None = None,
    ) -> Any:
        """Run a Loop from `state` until it is done and return its last state. Otherwise as `run`."""
        if not isinstance(loop, Loop):
            raise DefinitionError(
                f"runtime.loop takes a Loop, not {type(loop).__name__}; a Graph is run by runtime.run"
            )
        self._check_iterations(loop)
        return await self._drive(loop, state, id, on_finished, concurrency, on_wait, timeout_s)

    async def turn(self, turn: Turn, function: TurnFunction[T], *, on_receipt: ReceiptSink | None = None) -> T:
        """Call `function(ctx)` with a TurnContext, whose calls are journaled, and return what it returns.

        The turn's run is found by its key. One that was cut short, or failed, goes on: what is recorded is answered
        from the record. One that is completed returns what was saved, or, if that was no JSON data, calls the function
        once more and answers it from the record; nothing is asked and nothing is done.

        `on_receipt` gets the receipt of each tool call that came to something, in the order of the chain, before the
        model is asked anything further, and before this returns; after a restart it gets them again.

        Raises the first error of its calls, whatever the function made of that; else what the function raises;
        UnknownOutcomeError, RunBusyError (another process drives the turn), RunConflictError (it was started with
        another model key), ReplayMismatchError (it asks for something else than what is recorded), StoreError.
        """
        opened = await self._ready()
        came = Came()
        if on_receipt is not None and not opened.store.certifies:
            raise ConfigError("on_receipt: this store keeps no receipts; set store.receipts to true")
        flow = turn_flow(turn, function, opened.engine.router, opened.store, came, on_receipt)
        saved: Any = None
        try:
            saved = await self._drive(flow, turn.identity, turn.run_id, "reopen", None, "block")
        except StepError as error:
            if came.error is None or error.__cause__ is not came.error:
                raise
        if came.error is not None:
            raise came.error
        if came.values:
            last: T = came.values[-1]
            return last
        if "value" in saved:
            value: T = saved["value"]
            return value
        run = await self._find(opened, turn.run_id)
        return await replay_turn(turn, function, opened.engine.router, opened.store, run.id)

    async def resume(self, run_id: str, *, on_wait: OnWait = "block", timeout_s: float | None = None) -> Any:
        """Take a run up by its id alone, with its recorded input: open, paused, failed and exhausted runs go on.

        A reopened run has the deadline that `timeout_s` gives it, or none; an open one keeps its own, if it has one.

        Its workflow must be among `create_ditto(workflows=…)`. Returns and raises as `run` and `loop` do, and
        RunNotFoundError; RunBlockedError if the workflow is not registered; RunPausedError if it is paused again.
        """
        opened = await self._ready()
        run = await self._find(opened, run_id)
        workflow = self._workflows.get((run.kind, run.workflow))
        if workflow is None:
            raise RunBlockedError(
                f"run {run_id}: {run.kind} {run.workflow!r} is not registered; pass it to create_ditto(workflows=[…])",
                run_id=run_id,
            )
        stored = await opened.store.read(queries.load_value, run.input)
        assert stored is not None
        resumes = run.fence if run.status is RunStatus.PAUSED else None
        return await self._drive(workflow, stored.decode(), run_id, "reopen", None, on_wait, timeout_s, resumes=resumes)

    async def recover(self) -> tuple[Recovered, ...]:
        """Take up, once, every run of a registered workflow that nobody drives: its owner died, or let go of it.

        They are driven to their ends, `runtime.concurrency` at a time. What goes wrong with one is told in its
        Recovered and harms no other; a store that is busy for a moment is tried again. Runs that are unknown wait for
        `resume` or a person.
        """
        opened = await self._ready()
        return await recover_runs(
            opened.store, opened.owner, self._workflows, self._resume_found, self.config.runtime.concurrency
        )

    async def serve(self) -> None:
        """Drive the runs of registered workflows that nobody drives, until the runtime is closed, or the caller
        cancelled: runs of dead owners, and waiting runs whose signal, decision or time has come.

        `runtime.concurrency` runs at a time. A run that goes on to wait is let go of. One whose process died three
        times in a row without any progress is left to a person. On `close`, no further run is taken up, and what runs
        is drained.
        """
        opened = await self._ready()
        serving = Serving(
            opened.store,
            opened.owner,
            self._workflows,
            self._resume_found,
            self.config.runtime.concurrency,
            lambda: opened.engine.closing,
        )
        opened.serving = serving
        opened.store.watch(partial(self._notice_outsiders, opened))
        try:
            await serving.serve()
        finally:
            opened.serving = None

    async def _resume_found(self, run: RunRow) -> None:
        """Drive a run that was found undriven; RunBusyError if somebody else was faster."""
        opened = await self._ready()
        stored = await opened.store.read(queries.load_value, run.input)
        assert stored is not None
        if run.run_id not in opened.active:
            await self._drive(
                self._workflows[run.kind, run.workflow], stored.decode(), run.run_id, "return", None, "return"
            )

    # Asking and deciding

    async def runs(self, *, status: str | None = None, limit: int = 50) -> list[RunSummary]:
        """The newest generation of each run, newest first: at most `limit`, with this status if one is given."""
        if status is not None and status not in (*RunStatus, PAUSING):
            raise DefinitionError(f"status {status!r}: use one of {', '.join((*RunStatus, PAUSING))}")
        opened = await self._ready()
        found: list[RunSummary] = []
        before = MAX_ROW_ID
        # A run of a dead owner still says `running` in its row, and counts as interrupted.
        shown = {RunStatus.INTERRUPTED.value: RunStatus.RUNNING.value, PAUSING: RunStatus.PAUSED.value}
        wanted = status if status is None else shown.get(status, status)
        for recorded in dict.fromkeys((status, wanted)):
            page = await opened.store.read(queries.list_runs, recorded, before, limit)
            found += [_summary(run, self._live_status(opened, run)) for run in page]
        found = [run for run in found if status is None or run.status == status]
        return sorted(found, key=lambda run: run.created_at, reverse=True)[:limit]

    async def check(self, *, open_runs: bool = True, failed_runs: bool = False) -> tuple[Checked, ...]:
        """Which recorded runs this code can take up, and what differs for each other one; one Checked a run.

        `open_runs` are those that are not closed, whoever drives them; `failed_runs` those that failed or are
        exhausted and could be reopened. Nothing is started or written; of a workflow only the functions by which a
        Loop chooses its Graph are called. What a Flow asks for is known only by running it. Raises StoreError.
        """
        opened = await self._ready()
        checker = Checker(opened.store, opened.engine.router, self._workflows, partial(self._live_status, opened))
        found = await checker.check(queries.list_open) if open_runs else []
        if failed_runs:
            found += await checker.check(queries.list_reopenable)
        return tuple(found)

    async def health(self) -> Health:
        """Examine the store: SQLite's own checks, what is open, who drives it. Reads the whole file."""
        opened = await self._ready()
        path = self.location.path
        counts: dict[str, int] = {}
        owners: set[str] = set()
        for status, owner, count in await opened.store.read(queries.count_runs):
            alive = owner is not None and opened.owner.is_alive(owner)
            if alive and owner is not None:
                owners.add(owner)
            live = _live_status(status, driven=alive)
            counts[live] = counts.get(live, 0) + count
        lost = await opened.store.read(queries.list_lost, LOST_SHOWN)
        wal = path.with_name(path.name + "-wal")
        return Health(
            schema_version=SCHEMA_VERSION,
            faults=tuple(await opened.store.read(queries.list_faults)),
            size_bytes=path.stat().st_size,
            wal_bytes=wal.stat().st_size if wal.exists() else 0,
            runs=counts,
            live_owners=len(owners),
            unknown=tuple(
                (run_id, step) for run_id, step, owner in lost if owner is None or not opened.owner.is_alive(owner)
            ),
        )

    async def get(self, run_id: str) -> RunInfo:
        """A run as it stands: its newest generation, with its steps. Raises RunNotFoundError."""
        opened = await self._ready()
        run = await self._find(opened, run_id)
        rows = await opened.store.read(queries.list_steps, run.id)
        state = await opened.store.read(queries.load_state, run.state)
        status = self._live_status(opened, run)
        if status == RunStatus.INTERRUPTED and any(is_lost(row) for row in rows):
            status = RunStatus.UNKNOWN.value
        return RunInfo(
            run_id=run.run_id,
            generation=run.generation,
            kind=run.kind,
            workflow=run.workflow,
            version=run.version,
            status=status,
            iteration=run.iteration,
            state=None if state is None else state.plain(),
            error=None if run.error is None else ErrorRecord.from_text(run.error).to_error(run.run_id),
            created_at=to_datetime(run.created_at),
            updated_at=to_datetime(run.updated_at),
            deadline_at=None if run.deadline_at is None else to_datetime(run.deadline_at),
            steps=tuple(_step_info(run.run_id, row) for row in rows),
            waits=tuple(open_wait(run.run_id, row) for row in rows if row.state is StepState.WAITING),
        )

    async def events(self, run_id: str, after: int = 0, *, follow: bool = False) -> AsyncIterator[EventInfo]:
        """The history of a run's newest generation, from the event after number `after`. Raises RunNotFoundError.

        With `follow` it goes on until that generation is closed, looking for more every quarter of a second; between
        two looks no read transaction is open.
        """
        opened = await self._ready()
        run = await self._find(opened, run_id)
        while True:
            page = await opened.store.read(queries.list_events, run.id, after, EVENTS_PAGE)
            for number, at, kind, step, body in page:
                yield EventInfo(number, to_datetime(at), kind, step, body)
                after = number
            if len(page) == EVENTS_PAGE:
                continue
            # A closed run's events are all there before it is seen to be closed.
            if not follow or run.status in CLOSED:
                return
            await anyio.sleep(FOLLOW_S)
            run = await opened.store.read(queries.get_run_by_key, run.id)

    async def receipts(self, run_id: str | None = None, after: int = 0) -> AsyncIterator[str]:
        """The signed receipts of all generations of a run, or of the whole store, in the order of their chain: each
        one's original line, from the one after number `after`. Raises RunNotFoundError."""
        opened = await self._ready()
        if run_id is not None:
            await self._find(opened, run_id)
        while True:
            page = await opened.store.read(queries.list_receipts, run_id, after, EVENTS_PAGE)
            for number, line in page:
                yield line
                after = number
            if len(page) < EVENTS_PAGE:
                return

    async def listen(
        self,
        run_id: str,
        step: str | None = None,
        after: int | Mapping[TextKind, int] = 0,
        *,
        attempt: int | None = None,
    ) -> AsyncGenerator[Heard, None]:
        """The text of a run's steps while it comes: Pieces, and what says that a step's text Restarted or Ended.

        Told first is what is recorded, then what comes, until the run ends or is let go of, or the runtime is closed.
        A completed step's text is told from its record, in full. Of a run that this runtime does not drive, text is
        told when it is recorded, once a second. Listening slows nobody, and may be left at any time.

        `step` is the path of the only step that is wanted. `after` says how many characters of its text the caller
        has already, or `{"text": …, "reasoning": …}`; `attempt` of which attempt: if it is another one now, its text
        Restarted. Raises RunNotFoundError, DefinitionError.
        """
        place = Place.parse(step, after, attempt)
        opened = await self._ready()
        while True:
            changed, run = opened.engine.changed.count, await opened.store.read(queries.get_run, run_id)
            if run_id not in opened.active or (run is not None and run.id in opened.engine.drives):
                break
            await opened.engine.changed.after(changed)  # it is about to be driven here
        run = run or await self._find(opened, run_id)
        is_driven = partial(self._is_driven, opened)
        async with aclosing(listen(opened.store, opened.engine, run, place, is_driven)) as heard:
            async for told in heard:
                yield told

    async def resolve(
        self,
        run_id: str,
        step: str,
        *,
        actor: str,
        reason: str,
        committed: Any = ...,
        response: Any = ...,
        absent: bool = False,
        ask_again: bool = False,
        abandon: bool = False,
        attempt: int | None = None,
    ) -> None:
        """Record a person's decision on a step whose outcome is unknown. Exactly one of:

        - `committed=value`: the effect was made, and this is the step's value (for a tool, the tool's result);
        - `response=value`: the model's answer to a model call, as a Sample or as text;
        - `absent=True`: the effect was not made; the next run attempts it again;
        - `ask_again=True`: a model call is made again by the next run, and may be paid for twice;
        - `abandon=True`: the step has failed.

        `actor` and `reason` are recorded, not verified. `attempt` refuses the decision if the step has moved on.
        It is guarded by the state and attempt that were read, in one transaction with its event. Afterwards run the
        workflow again. Raises RunNotFoundError, RunBusyError (the attempt is still being made),
        TransitionRefusedError, DefinitionError, InvalidValueError.
        """
        decision = Decision.parse(
            actor=actor, reason=reason, committed=committed, response=response,
            absent=absent, ask_again=ask_again, abandon=abandon,
        )  # fmt: skip
        opened = await self._ready()
        run = await self._find(opened, run_id)
        row = await opened.store.read(queries.get_step, run.id, step)
        if row is None or not is_lost(row) or (attempt is not None and attempt != row.attempt):
            found = "has no record" if row is None else f"is {row.state} at attempt {row.attempt}"
            raise DefinitionError(f"run {run_id}: step {step} {found}; only an unknown outcome can be resolved")
        if row.state is StepState.ADMITTED and self._is_driven(opened, run):
            raise RunBusyError(f"run {run_id}: step {step} is being attempted right now; wait for it", run_id=run_id)
        resolution = decide_resolution(decision, row, opened.store.encode, opened.store.redact)
        receipt = None
        if opened.store.certifies:
            opened.store.open_chain()
            receipt = certify_resolution(run, row, decision, opened.store.redact, resolution.output)
        seen = Seen(row.state, row.attempt)
        await opened.store.commit(
            lambda tx: transitions.resolve_step(
                tx, run.id, step, seen, resolution.state, resolution.output, resolution.error, resolution.event, receipt
            )
        )

    async def signal(self, run_id: str, name: str, body: Any = None, *, id: str | None = None, actor: str = "") -> bool:
        """Send a signal to an open run. It is queued, and ends the wait for that name, or the next such wait.

        `id` makes sending it again harmless: False says that a signal with that id is there already. The signal, the
        end of the wait and the events are one transaction. Raises RunNotFoundError, TransitionRefusedError if the run
        is closed, InvalidValueError, DefinitionError.
        """
        check_name(name, what="signal")
        opened = await self._ready()
        run = await self._find(opened, run_id)
        signal_id = opening.check_run_id(id) or str(uuid_utils.uuid7())
        told = opened.store.redact(actor)
        stored = opened.store.encode(body, f"the body of signal {name}")
        sent: bool = await opened.store.commit(
            lambda tx: transitions.send_signal(tx, run.id, name, signal_id, stored, told),
            points=[f"{run.workflow}:signalled"],
        )
        self._wake(opened, run.id)
        return sent

    async def decide(
        self,
        run_id: str,
        step: str | None = None,
        *,
        decision: Literal["approve", "reject"],
        actor: str,
        reason: str = "",
        digest: str | None = None,
    ) -> None:
        """Record the one decision on an open approval, addressed by its step, or by nothing while only one is open.

        The question of a step that asks before it is attempted has the path `<step>/approval`; `<step>` will do.
        `digest`, from the OpenWait that was shown, refuses the decision if something else is shown by now. `actor` is
        recorded, not verified. Exactly one decision is kept; who comes later is told which. Raises RunNotFoundError,
        DefinitionError for no or several questions, TransitionRefusedError if it was decided, or shown differently.
        """
        if decision not in ("approve", "reject"):
            raise DefinitionError(f"decision {decision!r}: use approve or reject")
        if not actor.strip():
            raise DefinitionError("decide needs actor: who decides")
        opened = await self._ready()
        run = await self._find(opened, run_id)
        question = find_question(run_id, step, await opened.store.read(queries.list_steps, run.id))
        shown = open_wait(run_id, question)
        if digest is not None and digest != shown.digest:
            raise self._shows_else(run_id, question.path)
        made = {
            "decision": decision,
            "actor": opened.store.redact(actor),
            "reason": opened.store.redact(reason),
            "digest": shown.digest,
            "at": self._clock.now_us(),
        }
        output = opened.store.encode(made, "the decision")
        event = Event("approval_decided", question.path, {name: made[name] for name in ("decision", "actor", "digest")})
        receipt = None
        if opened.store.certifies:
            opened.store.open_chain()
            receipt = certify_approval(run, question, made, output)
        try:
            await opened.store.commit(
                lambda tx: transitions.settle_wait(tx, run.id, question.path, question.attempt, output, event, receipt),
                points=[f"{run.workflow}/{question.path}:completed"],
            )
        except TransitionRefusedError:
            now = find_question(run_id, question.path, await opened.store.read(queries.list_steps, run.id))
            if now.attempt != question.attempt:
                raise self._shows_else(run_id, question.path) from None
            raise
        self._wake(opened, run.id)

    @staticmethod
    def _shows_else(run_id: str, step: str) -> TransitionRefusedError:
        told = f"step {step} shows something else by now; look again"
        return TransitionRefusedError("decide", told, run_id=run_id, step=step)

    @staticmethod
    def _wake(opened: _Open, run: int) -> None:
        if (drive := opened.engine.drives.get(run)) is not None:
            drive.wake()
        if opened.serving is not None:
            opened.serving.wake.set()

    async def cancel(self, run_id: str, *, actor: str = "", reason: str = "") -> None:
        """Cancel an open run for good, whoever drives it: its owner starts no further step.

        What is under way is drained there, and recorded as late. Raises RunNotFoundError, and
        TransitionRefusedError if the run is closed.
        """
        opened = await self._ready()
        run = await self._find(opened, run_id)
        body = {"actor": opened.store.redact(actor), "reason": opened.store.redact(reason)}
        await opened.store.commit(lambda tx: transitions.cancel_run(tx, run.id, Event("run_cancelled", body=body)))
        if (drive := opened.engine.drives.get(run.id)) is not None:
            drive.stop(RunCancelledError(f"run {run_id} was cancelled", run_id=run_id))

    async def pause(self, run_id: str, actor: str = "", reason: str = "") -> None:
        """Pause an open run, whoever drives it: it is drained, and stays `paused` until `resume` or `cancel`.

        From now on no write, model call or local step of it begins, and a moment later, when its owner has noticed,
        nothing else. What is under way ends and is recorded; until then the run is shown as `pausing`. Signals and
        decisions are kept meanwhile. Who drives it gets RunPausedError, unless the run came to its end all the same. A
        child run under way is driven to its end or its next wait: it has an id of its own. Pausing twice changes
        nothing. `actor` and `reason` are recorded, not verified. Raises RunNotFoundError, and TransitionRefusedError
        if the run is closed.
        """
        opened = await self._ready()
        body = {"actor": opened.store.redact(actor), "reason": opened.store.redact(reason)}
        while (run := await self._find(opened, run_id)).status is not RunStatus.PAUSED:
            if run.status in CLOSED:
                told = f"run {run_id} is {run.status}; only an open run can be paused"
                raise TransitionRefusedError("pause_run", told, run_id=run_id)
            driven = self._is_driven(opened, run)
            pause = partial(transitions.pause_run, seen=run, event=Event("run_paused", body=body), driven=driven)
            with suppress(TransitionRefusedError):  # somebody moved it meanwhile: look again
                await opened.store.commit(pause, points=[f"{run.workflow}:{PAUSING if driven else RunStatus.PAUSED}"])
                break
        if (drive := opened.engine.drives.get(run.id)) is not None:
            drive.pause()

    async def unpause(self, run_id: str, actor: str = "", reason: str = "") -> None:
        """End a pause without driving the run: it is interrupted, for `serve`, or for the next call, to take up.

        `actor` and `reason` are recorded, not verified. Raises RunNotFoundError, RunBusyError while the run is still
        being drained, and TransitionRefusedError if it is not paused.
        """
        opened = await self._ready()
        run = await self._find(opened, run_id)
        if run.status is not RunStatus.PAUSED:
            raise TransitionRefusedError("unpause_run", f"run {run_id} is {run.status}, not paused", run_id=run_id)
        if self._is_driven(opened, run):
            raise RunBusyError(f"run {run_id} is still being drained; wait for it", run_id=run_id, retryable=True)
        body = {"actor": opened.store.redact(actor), "reason": opened.store.redact(reason)}
        unpause = partial(transitions.unpause_run, seen=run, event=Event("run_unpaused", body=body))
        await opened.store.commit(unpause, points=[f"{run.workflow}:unpaused"])
        self._wake(opened, run.id)

    @property
    def commits(self) -> int:
        """Transactions that this runtime has committed so far, but for `partial_commits`."""
        return 0 if self._opened is None else self._opened.store.commits

    @property
    def partial_commits(self) -> int:
        """Transactions that only recorded text that was shown before its outcome; at most one a second and attempt,
        and one more for an attempt that did not complete."""
        return 0 if self._opened is None else self._opened.store.partial_commits

    # Inside

    def _check_iterations(self, loop: Loop) -> None:
        limit = self.config.runtime.max_iterations
        if loop.max_iterations > limit:
            raise DefinitionError(
                f"loop {loop.name}: max_iterations {loop.max_iterations} is above the configured "
                f"runtime.max_iterations {limit}"
            )

    async def _drive(
        self,
        workflow: Graph | Loop | Flow,
        input: Any,
        id: str | None,
        on_finished: OnFinished,
        concurrency: int | None,
        on_wait: OnWait,
        timeout_s: float | None = None,
        *,
        resumes: int | None = None,
        parent: Drive | None = None,
    ) -> Any:
        run_id = opening.check_run_id(id)
        opening.check_on_finished(on_finished)
        if on_wait not in ON_WAIT:
            raise DefinitionError(f"on_wait={on_wait!r}: use one of {', '.join(ON_WAIT)}")
        if concurrency is not None and concurrency < 1:
            raise DefinitionError(f"concurrency must be 1 or more, not {concurrency}")
        if timeout_s is not None:
            check_timeout(timeout_s, owner="timeout_s")
        opened = await self._ready()
        if isinstance(workflow, Graph):
            opened.engine.router.check(workflow)
        elif isinstance(workflow, Loop) and isinstance(workflow.graph, Graph):
            opened.engine.router.check(workflow.graph)
        stored = opened.store.encode(input, f"the input of {workflow.name}")
        while run_id in opened.active:
            # Somebody here drives it already: what that comes to is the answer of this call, too.
            await opened.active[run_id].wait()
            on_finished = "return"
        released = asyncio.Event()
        if run_id is not None:
            opened.active[run_id] = released
        try:
            request = Request(run_id, workflow, stored, on_finished, timeout_s, resumes=resumes)
            if parent is not None:
                again = parent.run.status in REOPENABLE
                request = replace(request, latest_at=parent.run.deadline_at, reopens_timed_out=again)
            run = await opening.open_run(opened.store, opened.owner, request)
            if run_id is None and isinstance(run, Opened):
                run_id = run.drive.run.run_id
                opened.active[run_id] = released
            if isinstance(run, Closed):
                return await self._saved(opened, workflow, run.run)
            run.drive.may_block, run.drive.parent = on_wait == "block", parent
            run.drive.carries = not isinstance(workflow, Graph) and workflow.carries
            return await self._drive_opened(
                opened, run, workflow, stored, concurrency or self.config.runtime.concurrency
            )
        finally:
            released.set()
            if run_id is not None:
                opened.active.pop(run_id, None)
            opened.engine.changed.tell()

    async def _drive_opened(
        self, opened: _Open, run: Opened, workflow: Graph | Loop | Flow, input: Any, concurrency: int
    ) -> Any:
        """Drive a run that is ours until its end or its deadline, and let go of it, however it ends."""
        with run.drive.deadline.watched():
            return await self._drive_to_end(opened, run, workflow, input, concurrency)

    async def _drive_to_end(
        self, opened: _Open, run: Opened, workflow: Graph | Loop | Flow, input: Any, concurrency: int
    ) -> Any:
        drive, trouble = run.drive, Trouble(run.drive.halted, run.error)
        value: Callable[[], Any] = lambda: None  # noqa: E731
        end, ended, iterations = COMPLETED, False, 0
        opened.engine.begin(drive)
        opened.store.watch(partial(self._notice_outsiders, opened))
        if drive.parent is not None:
            drive.parent.wakes.add(drive.wake)
        if opened.engine.closing:
            drive.drain(closing_error())
        try:
            if isinstance(workflow, Graph):
                ran = await run_graph(
                    opened.engine, drive, workflow, input, prefix="", concurrency=concurrency, trouble=trouble,
                    end=COMPLETED,
                )  # fmt: skip
                ended, value = ran.ended, partial(ran.decode, workflow)
            elif isinstance(workflow, Flow):
                result = await run_flow(
                    opened.engine, drive, workflow, input, concurrency=concurrency, trouble=trouble,
                    run_child=partial(self._run_child, drive),
                )  # fmt: skip
                if result is not None:
                    drive.hold_result(result)
                    value = result.decode
            else:
                assert run.loop is not None
                looped = await run_loop(
                    opened.engine, drive, workflow, run.loop, concurrency=concurrency, trouble=trouble
                )
                end, value = looped.end or COMPLETED, looped.state.plain
                iterations = looped.iteration
            if ended:
                return value()
            if trouble or trouble.waits:
                trouble.note_lost(drive.rows)
                end = trouble.end()
            await drive.finish(end)
        except GeneratorExit:
            raise
        except BaseException as error:
            stopped = await self._stop_driving(drive, trouble, error)
            if stopped is error:
                raise
            raise stopped from None
        finally:
            opened.engine.end(drive)
            if drive.parent is not None:
                drive.parent.wakes.discard(drive.wake)
            if not opened.engine.drives and opened.serving is None:
                opened.store.watch(None)
            drive.forget_held()
        let_go = None if end.status in CLOSED else drive.ending
        if isinstance(let_go, RunPausedError):
            raise let_go
        if trouble:
            raise trouble.to_error(drive.run)
        if trouble.waits:
            if drive.may_block and (reason := let_go or trouble.child_paused) is not None:
                raise reason
            return Waiting(drive.run.run_id, tuple(open_wait(drive.run.run_id, row) for row in trouble.waits.values()))
        if end.status is RunStatus.EXHAUSTED:
            raise exhausted(drive.run.run_id, workflow.name, iterations)
        return value()

    async def _run_child(self, parent: Drive, workflow: Graph | Loop | Flow, input: Any, run_id: str) -> Any:
        """A run of its own for a Flow, which waits for it, or not, as its own caller does; no longer than the Flow."""
        active = (await self._ready()).active
        with parent.halted.until_set():
            while run_id in active:
                await active[run_id].wait()
        if parent.halted.is_set() and run_id in active:
            return None
        on_wait: OnWait = "block" if parent.blocks else "return"
        return await self._drive(workflow, input, run_id, "return", None, on_wait, parent=parent)

    def _notice_outsiders(self, opened: _Open) -> None:
        """Another process has written: waits may be over, and runs may not be ours any more."""
        for drive in opened.engine.drives.values():
            drive.wake()
        if opened.serving is not None:
            opened.serving.wake.set()
        if opened.looking is None or opened.looking.done():
            opened.looking = asyncio.create_task(self._look_for_lost_runs(opened), name="ditto-outsiders")

    async def _look_for_lost_runs(self, opened: _Open) -> None:
        """Stop driving what was cancelled, or taken over; drain what was paused."""
        try:
            driven = dict(opened.engine.drives)
            owned = await opened.store.read(queries.list_owned, opened.owner.id, list(driven))
            for key, drive in driven.items():
                if owned.get(key) == RunStatus.PAUSED:
                    drive.pause()
                if key not in owned and opened.engine.drives.get(key) is drive:
                    refused = TransitionRefusedError("drive", "the run is not ours any more", run_id=drive.run.run_id)
                    reason = await drive.explain(refused)
                    if reason is not refused:
                        drive.stop(reason)
                        drive.wake()
        except StoreError as error:
            logger.info("other writers could not be looked at: %s", error)

    async def _stop_driving(self, drive: Drive, trouble: Trouble, error: BaseException) -> BaseException:
        """Something came between: nobody drives the run any more. Returns what is to be raised."""
        with anyio.CancelScope(shield=True):
            if error is drive.ending and drive.stopped is not None:
                error = drive.stopped
            refused = error if isinstance(error, TransitionRefusedError) else error.__cause__
            if isinstance(refused, TransitionRefusedError):
                reason = await drive.explain(refused)
                error = error if reason is refused else reason
            # What is not ours any more, and what has ended in the same instant, is not ours to let go of.
            if isinstance(error, RunBusyError | RunCancelledError):
                await drive.tell_lost()
            elif not drive.ended:
                error = await self._let_go(drive, trouble, error)
        if isinstance(error, DittoError) and error.run_id is None:
            error.run_id = drive.run.run_id
        return error

    async def _let_go(self, drive: Drive, trouble: Trouble, error: BaseException) -> BaseException:
        """Leave the run so that it can be resumed; the first error waits for what is unknown to be settled.

        Returns what is to be raised.
        """
        trouble.note_lost(drive.rows)
        end = PAUSED if isinstance(error, RunPausedError) else INTERRUPTED
        if trouble.unknown:
            end = trouble.end()
        if isinstance(error, ReplayMismatchError | RunBlockedError):
            differences = list(error.differences) if isinstance(error, RunBlockedError) else []
            told = {"differences": differences} if differences else {"reason": error.message}
            end = RunEnd(RunStatus.BLOCKED, event=Event("run_blocked", body=told))
        try:
            await drive.release(end)
        except DittoError as failed:
            if error is drive.ending and isinstance(failed, TransitionRefusedError):
                return await drive.explain(failed)  # cancelled while it was drained
            logger.warning("run %s was not released: %s", drive.run.run_id, failed)
        return error

    async def _saved(self, opened: _Open, workflow: Graph | Loop | Flow, run: RunRow) -> Any:
        """What a closed run came to, as its first caller got it."""
        opening.raise_saved(run)
        if run.kind != "graph":
            state = await opened.store.read(queries.load_state, run.state)
            return None if state is None else state.plain()
        assert isinstance(workflow, Graph)
        rows = await opened.store.read(queries.list_steps, run.id)
        settled = {row.path: row.output for row in rows if row.state in SETTLED and not row.path.endswith(BELOW)}
        return GraphResult(settled, True).decode(workflow)

    @staticmethod
    def _is_driven(opened: _Open, run: RunRow) -> bool:
        """Whether a live runtime, this one or another, has the run."""
        if run.owner is None:
            return False
        return run.run_id in opened.active if run.owner == opened.owner.id else opened.owner.is_alive(run.owner)

    def _live_status(self, opened: _Open, run: RunRow) -> str:
        """A run's status, with a dead owner seen for what it is."""
        if run.status not in (RunStatus.RUNNING, RunStatus.PAUSED):
            return run.status.value
        return _live_status(run.status, driven=self._is_driven(opened, run))

    async def _find(self, opened: _Open, run_id: str) -> RunRow:
        run = await opened.store.read(queries.get_run, run_id)
        if run is None:
            raise RunNotFoundError(f"no run has the id {run_id!r} in {self.location.path}", run_id=run_id)
        return run

    async def _ready(self) -> _Open:
        """The open store, opened on first use. Raises StoreClosedError after `close`, and on another event loop."""
        if self._opened is not None:
            # A forked child is told by the store, in words of its own.
            if self._opened.loop is not asyncio.get_running_loop() and self._opened.process == os.getpid():
                raise StoreClosedError("this runtime belongs to another event loop; create one in each asyncio.run")
            return self._opened
        async with self._opening:
            if self._closed:
                raise StoreClosedError("the runtime is closed; create a new one")
            if self._opened is None:
                self._opened = self._open()
            return self._opened

    def _open(self) -> _Open:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            told = "no event loop runs here; in a child that was forked off one there is none: start it with 'spawn'"
            raise StoreError(told, code="store.forked") from None
        redactor = Redactor(self.config.secrets())
        router = Router(self.config, self.sandbox, self.location, self._workers)
        store = Store(
            self.location,
            redactor=redactor,
            clock=self._clock,
            value_max_bytes=self.config.runtime.value_max_bytes,
            receipts=self.config.store.receipts,
        )
        engine = Engine(self.config, self.sandbox, router)
        try:
            owner = Owner(self.location.path)
        except BaseException:
            store.stop()
            raise
        opened = _Open(store, owner, engine, asyncio.get_running_loop())
        if redactor.active:
            # A logger's filter sees only its own records, so each logger that we write to gets it.
            opened.log_filter = LogFilter(redactor)
            for each in _loggers(router):
                each.addFilter(opened.log_filter)
        return opened


def _by_name(workflows: Iterable[Graph | Loop | Flow]) -> dict[tuple[str, str], Graph | Loop | Flow]:
    """Workflows by kind and name. Raises ConfigError for two of one name."""
    named: dict[tuple[str, str], Graph | Loop | Flow] = {}
    for workflow in workflows:
        if not isinstance(workflow, Graph | Loop | Flow):
            raise ConfigError(f"workflows takes Graphs, Loops and Flows, not {type(workflow).__name__}")
        key = (opening.kind_of(workflow), workflow.name)
        if key in named:
            raise ConfigError(f"two workflows are {key[0]} {workflow.name!r}; runs are found by that name")
        named[key] = workflow
    return named


def _live_status(status: str, *, driven: bool) -> str:
    """The status that is shown, when it is known whether a live runtime has the run."""
    match status:
        case RunStatus.RUNNING if not driven:
            return RunStatus.INTERRUPTED.value
        case RunStatus.PAUSED if driven:
            return PAUSING
        case _:
            return str(status)


def _summary(run: RunRow, status: str) -> RunSummary:
    return RunSummary(
        run_id=run.run_id,
        generation=run.generation,
        kind=run.kind,
        workflow=run.workflow,
        status=status,
        created_at=to_datetime(run.created_at),
        updated_at=to_datetime(run.updated_at),
    )


def _loggers(router: Router) -> list[logging.Logger]:
    return [logger, *(logging.getLogger(f"ditto.{name}") for name in ("engine", "store")), *router.loggers()]


def _step_info(run_id: str, row: StepRow) -> StepInfo:
    return StepInfo(
        path=row.path,
        type=row.type,
        effect=row.effect,
        state=row.state.value,
        attempt=row.attempt,
        key=row.key,
        output=None if row.output is None else row.output.decode(),
        error=None if row.error is None else ErrorRecord.from_text(row.error).to_error(run_id),
        admitted_at=None if row.admitted_at is None else to_datetime(row.admitted_at),
        settled_at=None if row.settled_at is None else to_datetime(row.settled_at),
        due_at=None if row.due_at is None else to_datetime(row.due_at),
    )
