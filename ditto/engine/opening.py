"""Opening: what a run id stands for, and whether this runtime may drive it.

no such run                           → create_run
another workflow or input             → RunConflictError
closed                                → what is saved; or a new generation, or reopened, if asked for
paused, and not resumed by name       → RunPausedError
open, its owner alive                 → RunBusyError
open, code does not fit               → RunBlockedError
open                                  → claim_run
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import anyio
import uuid_utils

from ditto.engine.changes import list_differences
from ditto.engine.deadlines import RUN_TIMEOUT
from ditto.engine.differences import first_difference
from ditto.engine.drive import Drive, paused_error
from ditto.engine.outcomes import ErrorRecord
from ditto.engine.ownership import Owner
from ditto.engine.trouble import exhausted
from ditto.errors import (
    DefinitionError,
    DittoError,
    RunBlockedError,
    RunBusyError,
    RunCancelledError,
    RunConflictError,
    TransitionRefusedError,
)
from ditto.flow import Flow
from ditto.graph import Graph
from ditto.loop import Loop
from ditto.store import queries, transitions
from ditto.store.records import INTERRUPTED, Event, Fence, LoopState, NewRun, RunRow, StepRow
from ditto.store.schema import CLOSED, REOPENABLE, RunStatus
from ditto.store.store import Store
from ditto.store.values import State, Stored, digest

OnFinished: TypeAlias = Literal["return", "new", "new_if_failed", "reopen"]

ON_FINISHED: tuple[OnFinished, ...] = ("return", "new", "new_if_failed", "reopen")

RUN_ID_BYTES_MAX = 512


@dataclass(frozen=True, slots=True)
class Request:
    """What a caller wants to run."""

    run_id: str | None
    workflow: Graph | Loop | Flow
    input: Stored
    on_finished: OnFinished
    timeout_s: float | None = None
    latest_at: int | None = None
    """A child's run is over when its parent's is, whatever else was said."""
    reopens_timed_out: bool = False
    """A run that its deadline ended goes on: its parent does, which had the same one."""

    def deadline_at(self, run: RunRow | None, now_us: int) -> int | None:
        """When the run is over: as it was recorded for an open one, else so long after it starts or is reopened."""
        at = None if run is None or run.status in REOPENABLE else run.deadline_at
        if at is None and self.timeout_s is not None:
            at = now_us + round(self.timeout_s * 1_000_000)
        return min((each for each in (at, self.latest_at) if each is not None), default=None)

    resumes: int | None = None
    """The fence of the paused run that is to go on: one that was paused again since then does not."""

    @property
    def kind(self) -> str:
        """`graph`, `loop`, `flow` or `turn`."""
        return kind_of(self.workflow)


@dataclass(frozen=True, slots=True)
class Opened:
    """The run is ours to drive."""

    drive: Drive
    loop: LoopState | None
    error: ErrorRecord | None
    """The first error of a run that is still unknown."""


@dataclass(frozen=True, slots=True)
class Closed:
    """The run is closed, and what it came to is saved."""

    run: RunRow


def kind_of(workflow: Graph | Loop | Flow) -> str:
    """`graph`, `loop`, `flow` or `turn`."""
    return workflow.kind


def check_run_id(run_id: str | None) -> str | None:
    """A run id is 1 to 512 bytes of text without control characters; None asks for a fresh one."""
    if run_id is None:
        return None
    given: Any = run_id
    if not isinstance(given, str) or not given.strip() or not given.isprintable():
        raise DefinitionError(f"run id {run_id!r}: it must be text without control characters")
    if len(run_id.encode(errors="replace")) > RUN_ID_BYTES_MAX:
        raise DefinitionError(f"run id {run_id[:40]!r}…: it is longer than {RUN_ID_BYTES_MAX} bytes")
    return run_id


def check_on_finished(on_finished: str) -> None:
    """Refuse a word that is none of ON_FINISHED."""
    if on_finished not in ON_FINISHED:
        raise DefinitionError(f"on_finished={on_finished!r}: use one of {', '.join(ON_FINISHED)}")


async def open_run(store: Store, owner: Owner, request: Request) -> Opened | Closed:
    """Create the run, claim it, or find it closed. Raises what the table above names."""
    generation = 1
    while True:
        # Creating first costs a new run no read; an id that exists is refused by the guard.
        opened = await _create(store, owner, request, generation)
        if opened is not None:
            return opened
        assert request.run_id is not None
        run = await store.read(queries.get_run, request.run_id)
        assert run is not None
        if run.status in CLOSED:
            if _wants_new_generation(run, request.on_finished):
                generation = run.generation + 1
                continue
            await _refuse_conflict(store, run, request)
            if not _wants_reopening(run, request):
                return Closed(run)
        else:
            await _refuse_conflict(store, run, request)
            if run.status is RunStatus.PAUSED and run.fence != request.resumes:
                raise paused_error(run)
        try:
            return await _claim(store, owner, run, request)
        except TransitionRefusedError:
            continue


def raise_saved(run: RunRow) -> None:
    """Raise what a closed run came to, unless it completed."""
    error: DittoError | None = None
    if run.status is RunStatus.FAILED and run.error is not None:
        error = ErrorRecord.from_text(run.error).to_error(run.run_id)
    elif run.status is RunStatus.EXHAUSTED:
        error = exhausted(run.run_id, run.workflow, run.iteration)
    elif run.status is RunStatus.CANCELLED:
        error = RunCancelledError(f"run {run.run_id} was cancelled", run_id=run.run_id)
    if error is not None:
        raise error


async def _create(store: Store, owner: Owner, request: Request, generation: int) -> Opened | None:
    run_id = request.run_id or str(uuid_utils.uuid7())
    workflow = request.workflow
    loop = LoopState(0, request.input) if isinstance(workflow, Loop) else None
    new = NewRun(
        run_id=run_id,
        generation=generation,
        kind=request.kind,
        workflow=workflow.name,
        version=workflow.version,
        input=request.input,
        input_digest=digest(request.input.body),
        owner=owner.id,
        state=None if loop is None else request.input,
        deadline_at=request.deadline_at(None, store.clock.now_us()),
    )
    event = Event("run_created", body=_told(new.deadline_at, workflow=workflow.name, generation=generation))
    created = store.commit(lambda tx: transitions.create_run(tx, new, (event,)), points=[f"{workflow.name}:created"])
    try:
        await created
    except TransitionRefusedError:
        return None
    except asyncio.CancelledError:
        if created.exception() is None:
            await _let_go(store, Fence(created.result(), owner.id, 1, run_id, workflow.name))
        raise
    run = _as_created(created.result(), new, store.clock.now_us())
    fence = Fence(run.id, owner.id, run.fence, run_id, workflow.name)
    return Opened(Drive(store, run, fence, {}), loop, None)


async def _claim(store: Store, owner: Owner, run: RunRow, request: Request) -> Opened:
    if run.owner is not None and run.owner != owner.id and owner.is_alive(run.owner):
        which = run.run_id if run.generation == 1 else f"{run.run_id} (generation {run.generation})"
        does = "is still being drained" if run.status is RunStatus.PAUSED else "is driven"
        raise RunBusyError(
            f"run {which} {does} by another runtime, which is alive; wait for it, or cancel the run",
            run_id=run.run_id,
            retryable=True,
        )
    workflow = request.workflow
    state = await store.read(queries.load_state, run.state)
    rows, differences = await _recorded_steps(store, run, workflow, state)
    if differences:
        await _block(store, run, differences)
        raise RunBlockedError(
            f"run {run.run_id}: the code changed under it: {'; '.join(differences)}. "
            "Run it with the code that it was started with, or cancel it",
            differences=tuple(differences),
            run_id=run.run_id,
        )
    deadline_at = request.deadline_at(run, store.clock.now_us())
    body = _told(None if deadline_at == run.deadline_at else deadline_at, was=run.status.value)
    event = Event("run_reopened" if run.status in REOPENABLE else "run_resumed", body=body)
    fence = Fence(run.id, owner.id, run.fence + 1, run.run_id, workflow.name)
    # A Flow's replay may come to nothing new: that it was taken up is then no line of its history, either.
    told = () if isinstance(workflow, Flow) else (event,)
    claimed = store.commit(
        lambda tx: transitions.claim_run(tx, run, owner.id, told, deadline_at=deadline_at),
        points=[f"{workflow.name}:claimed"],
    )
    try:
        await claimed
    except asyncio.CancelledError:
        if claimed.exception() is None:
            await _let_go(store, fence)
        raise
    drive = Drive(store, replace(run, deadline_at=deadline_at), fence, rows, resumed=True)
    if not told:
        drive.hold_event(event)
    again = isinstance(workflow, Flow) and workflow.tries_again
    kept = None if run.status in REOPENABLE or again else run.error
    return Opened(
        drive,
        None if state is None else LoopState(run.iteration, state),
        None if kept is None else ErrorRecord.from_text(kept),
    )


async def _block(store: Store, run: RunRow, differences: list[str]) -> None:
    """Say of an open run that the code does not fit it; once, however often it is tried."""
    if run.status is RunStatus.BLOCKED or run.status in CLOSED:
        return
    event = Event("run_blocked", body={"differences": differences})
    with suppress(TransitionRefusedError):
        await store.commit(lambda tx: transitions.block_run(tx, run, event))


async def _recorded_steps(
    store: Store, run: RunRow, workflow: Graph | Loop | Flow, state: State | None
) -> tuple[dict[str, StepRow], list[str]]:
    """The rows that the code goes on from, and how they differ from it.

    A Flow asks for its own as it goes; but the questions that its steps asked are known.
    """
    if isinstance(workflow, Flow):
        return {row.path: row for row in await store.read(queries.list_step_approvals, run.id)}, []
    prefix = "" if isinstance(workflow, Graph) else f"{run.iteration + 1}/"
    rows = {row.path: row for row in await store.read(queries.list_steps, run.id, prefix)}
    graph = workflow if isinstance(workflow, Graph) else _graph_of(workflow, state)
    return rows, [] if graph is None else list_differences(graph, rows, prefix)


def _graph_of(loop: Loop, state: State | None) -> Graph | None:
    """The Graph of the iteration that is under way; None if the loop's own function raises, which fails the run."""
    try:
        return loop.choose(None if state is None else state.decode())
    except Exception:  # noqa: BLE001 - asked again, and told, when the run is driven
        return None


def _told(deadline_at: int | None, **body: Any) -> dict[str, Any]:
    """The body of an event, with the deadline that the run has got with it."""
    return body if deadline_at is None else {**body, "deadline_at": deadline_at}


async def _let_go(store: Store, fence: Fence) -> None:
    """The caller was cancelled just as the run became ours: nobody drives it."""
    with anyio.CancelScope(shield=True):
        await store.commit(lambda tx: transitions.release_run(tx, fence, INTERRUPTED))


def _as_created(key: int, new: NewRun, at: int) -> RunRow:
    """The row of a run that was just created, without reading it."""
    return RunRow(
        id=key,
        run_id=new.run_id,
        generation=new.generation,
        kind=new.kind,
        workflow=new.workflow,
        version=new.version,
        input=new.input.column,
        input_digest=new.input_digest,
        status=RunStatus.RUNNING,
        owner=new.owner,
        fence=1,
        seq=1,
        iteration=0,
        state=None if new.state is None else new.state.column,
        error=None,
        crashes=0,
        claimed_seq=1,
        created_at=at,
        updated_at=at,
        deadline_at=new.deadline_at,
    )


async def _refuse_conflict(store: Store, run: RunRow, request: Request) -> None:
    workflow = request.workflow
    if (run.kind, run.workflow) != (request.kind, workflow.name):
        raise RunConflictError(
            f"run {run.run_id} belongs to {run.kind} {run.workflow!r}, not to {request.kind} {workflow.name!r}; "
            "use another id",
            run_id=run.run_id,
        )
    if run.input_digest != digest(request.input.body):
        recorded = await store.read(queries.load_value, run.input)
        where = "" if recorded is None else first_difference(recorded.decode(), request.input.decode(), "input")
        raise RunConflictError(
            f"run {run.run_id} was started with another input: it differs at {where or 'the order of its keys'}; "
            "use another id",
            run_id=run.run_id,
        )


def _wants_new_generation(run: RunRow, on_finished: OnFinished) -> bool:
    return on_finished == "new" or (on_finished == "new_if_failed" and run.status in REOPENABLE)


def _wants_reopening(run: RunRow, request: Request) -> bool:
    """Asked for by name; or a loop that hit its guard is run again with a higher one."""
    if run.status not in REOPENABLE:
        return False
    if request.on_finished == "reopen":
        return True
    if request.reopens_timed_out and run.error is not None:
        return ErrorRecord.from_text(run.error).code == RUN_TIMEOUT
    return (
        run.status is RunStatus.EXHAUSTED
        and isinstance(request.workflow, Loop)
        and request.workflow.max_iterations > run.iteration
    )
