"""Driving: a run from the call that asks for it to the end that the caller is told.

`drive_run` opens the run (`opening.py`), hands it to what moves its kind of workflow, and lets go of it, however that
ends: the run's end is on disk, or it can be resumed, or it is not ours any more. All are functions over an OpenStore.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import anyio

from ditto.engine import opening
from ditto.engine.approving import BELOW
from ditto.engine.drive import Drive, closing_error
from ditto.engine.executor import GraphResult, run_graph
from ditto.engine.flows import run_flow
from ditto.engine.loops import run_loop
from ditto.engine.open_store import OpenStore
from ditto.engine.opening import Closed, OnFinished, Opened, Request
from ditto.engine.questions import open_wait
from ditto.engine.recovering import recover_runs
from ditto.engine.serving import Serving
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
    RunPausedError,
    StepError,
    TransitionRefusedError,
)
from ditto.flow import Flow
from ditto.graph import Graph
from ditto.loop import Loop
from ditto.runs import Recovered
from ditto.store import queries
from ditto.store.records import COMPLETED, INTERRUPTED, PAUSED, Event, RunEnd, RunRow
from ditto.store.schema import CLOSED, REOPENABLE, SETTLED, RunStatus
from ditto.turn import ReceiptSink, Turn, TurnFunction
from ditto.waits import ON_WAIT, OnWait, Waiting, check_timeout

T = TypeVar("T")

logger = logging.getLogger("ditto")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a caller wants driven, and how. Raises DefinitionError for a word or a number that cannot be meant."""

    workflow: Graph | Loop | Flow
    input: Any
    id: str | None = None
    on_finished: OnFinished = "return"
    concurrency: int | None = None
    on_wait: OnWait = "block"
    timeout_s: float | None = None
    resumes: int | None = None
    """The fence of the paused run that goes on."""
    parent: Drive | None = None
    """The drive of the Flow that wants it."""

    def __post_init__(self) -> None:
        opening.check_run_id(self.id)
        opening.check_on_finished(self.on_finished)
        if self.on_wait not in ON_WAIT:
            raise DefinitionError(f"on_wait={self.on_wait!r}: use one of {', '.join(ON_WAIT)}")
        if self.concurrency is not None and self.concurrency < 1:
            raise DefinitionError(f"concurrency must be 1 or more, not {self.concurrency}")
        if self.timeout_s is not None:
            check_timeout(self.timeout_s, owner="timeout_s")


async def drive_run(opened: OpenStore, wanted: Wanted) -> Any:
    """Open the run that is wanted, drive it to its end, and return what it came to. Raises as `Runtime.run`."""
    opened.check_open()
    workflow, run_id, on_finished = wanted.workflow, wanted.id, wanted.on_finished
    if isinstance(workflow, Graph):
        opened.engine.router.check(workflow)
    elif isinstance(workflow, Loop) and isinstance(workflow.graph, Graph):
        opened.engine.router.check(workflow.graph)
    stored = opened.store.encode(wanted.input, f"the input of {workflow.name}")
    while run_id in opened.active:
        # Somebody here drives it already: what that comes to is the answer of this call, too.
        await opened.active[run_id].wait()
        on_finished = "return"
    released = asyncio.Event()
    if run_id is not None:
        opened.active[run_id] = released
    try:
        request = Request(run_id, workflow, stored, on_finished, wanted.timeout_s, resumes=wanted.resumes)
        if (parent := wanted.parent) is not None:
            again = parent.run.status in REOPENABLE
            request = replace(request, latest_at=parent.run.deadline_at, reopens_timed_out=again)
        run = await opening.open_run(opened.store, opened.owner, request)
        if run_id is None and isinstance(run, Opened):
            run_id = run.drive.run.run_id
            opened.active[run_id] = released
        if isinstance(run, Closed):
            return await _saved(opened, workflow, run.run)
        run.drive.may_block, run.drive.parent = wanted.on_wait == "block", parent
        run.drive.carries = not isinstance(workflow, Graph) and workflow.carries
        concurrency = wanted.concurrency or opened.engine.config.runtime.concurrency
        with run.drive.deadline.watched():
            return await _drive_to_end(opened, run, workflow, stored, concurrency)
    finally:
        released.set()
        if run_id is not None:
            opened.active.pop(run_id, None)
        opened.engine.changed.tell()


async def drive_turn(opened: OpenStore, turn: Turn, function: TurnFunction[T], on_receipt: ReceiptSink | None) -> T:
    """Drive the run of a turn; what its function came to in this process is what comes back, or is raised."""
    came = Came()
    if on_receipt is not None and not opened.store.certifies:
        raise ConfigError("on_receipt: this store keeps no receipts; set store.receipts to true")
    flow = turn_flow(turn, function, opened.engine.router, opened.store, came, on_receipt)
    saved: Any = None
    try:
        saved = await drive_run(opened, Wanted(flow, turn.identity, turn.run_id, "reopen"))
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
    run = await opened.find(turn.run_id)
    return await replay_turn(turn, function, opened.engine.router, opened.store, run.id)


async def resume(opened: OpenStore, run_id: str, on_wait: OnWait, timeout_s: float | None) -> Any:
    """Drive a run that is known by its id alone, with its recorded input. Raises as `Runtime.resume`."""
    run = await opened.find(run_id)
    workflow = opened.workflows.get((run.kind, run.workflow))
    if workflow is None:
        raise RunBlockedError(
            f"run {run_id}: {run.kind} {run.workflow!r} is not registered; pass it to create_ditto(workflows=[…])",
            run_id=run_id,
        )
    stored = await opened.store.read(queries.load_value, run.input)
    assert stored is not None
    resumes = run.fence if run.status is RunStatus.PAUSED else None
    return await drive_run(
        opened,
        Wanted(workflow, stored.decode(), run_id, "reopen", on_wait=on_wait, timeout_s=timeout_s, resumes=resumes),
    )


async def recover(opened: OpenStore) -> tuple[Recovered, ...]:
    """Drive, once, what nobody drives. See `Runtime.recover`."""
    concurrency = opened.engine.config.runtime.concurrency
    return await recover_runs(opened.store, opened.owner, opened.workflows, partial(resume_found, opened), concurrency)


async def resume_found(opened: OpenStore, run: RunRow) -> None:
    """Drive a run that was found undriven; RunBusyError if somebody else was faster."""
    opened.check_open()
    stored = await opened.store.read(queries.load_value, run.input)
    assert stored is not None
    if run.run_id not in opened.active:
        workflow = opened.workflows[run.kind, run.workflow]
        await drive_run(opened, Wanted(workflow, stored.decode(), run.run_id, on_wait="return"))


async def serve(opened: OpenStore) -> None:
    """Drive what nobody drives until the runtime is closing. See `Runtime.serve`."""
    serving = Serving(
        opened.store,
        opened.owner,
        opened.workflows,
        partial(resume_found, opened),
        opened.engine.config.runtime.concurrency,
        lambda: opened.engine.closing,
    )
    opened.serving = serving
    opened.store.watch(opened.notice_outsiders)
    try:
        await serving.serve()
    finally:
        opened.serving = None


async def _drive_to_end(
    opened: OpenStore, run: Opened, workflow: Graph | Loop | Flow, input: Any, concurrency: int
) -> Any:
    """Drive a run that is ours until its end or its deadline, and let go of it, however it ends."""
    drive, trouble = run.drive, Trouble(run.drive.halted, run.error)
    value: Callable[[], Any] = lambda: None  # noqa: E731
    end, ended, iterations = COMPLETED, False, 0
    opened.engine.begin(drive)
    opened.store.watch(opened.notice_outsiders)
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
                run_child=partial(_run_child, opened, drive),
            )  # fmt: skip
            if result is not None:
                drive.hold_result(result)
                value = result.decode
        else:
            assert run.loop is not None
            looped = await run_loop(opened.engine, drive, workflow, run.loop, concurrency=concurrency, trouble=trouble)
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
        stopped = await _stop_driving(drive, trouble, error)
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


async def _run_child(opened: OpenStore, parent: Drive, workflow: Graph | Loop | Flow, input: Any, run_id: str) -> Any:
    """A run of its own for a Flow, which waits for it, or not, as its own caller does; no longer than the Flow."""
    opened.check_open()
    active = opened.active
    with parent.halted.until_set():
        while run_id in active:
            await active[run_id].wait()
    if parent.halted.is_set() and run_id in active:
        return None
    on_wait: OnWait = "block" if parent.blocks else "return"
    return await drive_run(opened, Wanted(workflow, input, run_id, on_wait=on_wait, parent=parent))


async def _stop_driving(drive: Drive, trouble: Trouble, error: BaseException) -> BaseException:
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
            error = await _let_go(drive, trouble, error)
    if isinstance(error, DittoError) and error.run_id is None:
        error.run_id = drive.run.run_id
    return error


async def _let_go(drive: Drive, trouble: Trouble, error: BaseException) -> BaseException:
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


async def _saved(opened: OpenStore, workflow: Graph | Loop | Flow, run: RunRow) -> Any:
    """What a closed run came to, as its first caller got it."""
    opening.raise_saved(run)
    if run.kind != "graph":
        state = await opened.store.read(queries.load_state, run.state)
        return None if state is None else state.plain()
    assert isinstance(workflow, Graph)
    rows = await opened.store.read(queries.list_steps, run.id)
    settled = {row.path: row.output for row in rows if row.state in SETTLED and not row.path.endswith(BELOW)}
    return GraphResult(settled, True).decode(workflow)
