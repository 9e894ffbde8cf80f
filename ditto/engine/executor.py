"""The executor: the core loop. How a Graph moves, one step at a time or many at once.

    run_graph → _run_step → bind → plan → (settle what is lost) → admit → attempt → decide → commit → dependants

- `next_steps` says what may start; a chain runs in the caller's task, branches run in tasks of their own.
- A step's value is always the decoded form of what is stored, made anew for each reader.
- After an error no new attempt starts; what was started is drained, and its outcome stands. What an earlier process
  lost is still looked up.
- An unknown outcome blocks only what depends on it.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import anyio
import anyio.lowlevel

from ditto.config import Config
from ditto.engine.deadlines import look_s
from ditto.engine.drive import Drive, closing_error
from ditto.engine.live import Signal
from ditto.engine.outcomes import Completed, ErrorRecord, Failed, Unknown, is_lost
from ditto.engine.retrying import back_off_left_s
from ditto.engine.routing import Router
from ditto.engine.scheduling import Frontier
from ditto.engine.steps import NotStarted, Skipped, Step, StepEnd, Waits
from ditto.engine.trouble import Trouble
from ditto.errors import DittoError, StepError, TransitionRefusedError
from ditto.graph import Graph, Node
from ditto.sandbox import Sandbox
from ditto.store import queries
from ditto.store.records import RunEnd, StepRow
from ditto.store.schema import SETTLED, StepState
from ditto.store.values import State, Stored


@dataclass(slots=True)
class Engine:
    """What all runs of a runtime share."""

    config: Config
    sandbox: Sandbox
    router: Router
    drives: dict[int, Drive] = field(default_factory=dict)
    """The runs that are driven now, by the keys of their rows."""
    changed: Signal = field(default_factory=Signal)
    """A run has begun to be driven, or could not be, or is let go of."""
    closing: bool = False
    """No new attempt is started; what runs is drained."""

    def begin(self, drive: Drive) -> None:
        """A run is driven from here on."""
        self.drives[drive.run.id] = drive
        self.changed.tell()

    def end(self, drive: Drive) -> None:
        """It is let go of."""
        self.drives.pop(drive.run.id, None)
        self.changed.tell()
        drive.live.note_commit()

    def close(self) -> None:
        """Start no new attempt."""
        self.closing = True
        for drive in self.drives.values():
            drive.drain(closing_error())


@dataclass(frozen=True, slots=True)
class GraphResult:
    """What a Graph came to: the stored output of each settled node, None for a skipped one."""

    outputs: dict[str, Stored | None]
    ended: bool
    """The run's end was committed with the last outcome."""

    def decode(self, graph: Graph) -> dict[str, Any]:
        """The outputs as the caller gets them: in the order of the Graph, however they came about."""
        order = [name for name in graph.nodes if name in self.outputs]
        order += [name for name in self.outputs if name not in graph.nodes]
        return {name: None if (stored := self.outputs[name]) is None else stored.decode() for name in order}


async def run_graph(
    engine: Engine,
    drive: Drive,
    graph: Graph,
    input: State,
    *,
    prefix: str,
    concurrency: int,
    trouble: Trouble,
    end: RunEnd | None = None,
) -> GraphResult:
    """Run what has not settled yet.

    `prefix` stands before the names of the nodes in their paths. If the Graph ends a run, `end` is committed with
    its last outcome. What goes wrong is put into `trouble`. Raises the caller's cancellation, and a DittoError if the
    run is not ours any more or the store cannot write.
    """
    execution = _Execution(engine, drive, graph, input, prefix, concurrency, trouble, end)
    await execution.run()
    return GraphResult(execution.outputs, execution.ended)


class _Execution:
    """One Graph while it runs."""

    def __init__(
        self,
        engine: Engine,
        drive: Drive,
        graph: Graph,
        input: State,
        prefix: str,
        concurrency: int,
        trouble: Trouble,
        end: RunEnd | None,
    ) -> None:
        self.engine = engine
        self.drive = drive
        self.graph = graph
        self.input = input
        self.prefix = prefix
        self.concurrency = concurrency
        self.trouble = trouble
        self.end = end
        self.ended = False
        """The run's end was committed with the last outcome."""
        self.outputs: dict[str, Stored | None] = {}
        for name in graph.nodes:
            row = drive.rows.get(prefix + name)
            if row is not None and row.state in SETTLED:
                self.outputs[name] = row.output
        self.frontier = Frontier(graph, {name: output is not None for name, output in self.outputs.items()})
        self.settling = False
        """The run has failed: what was lost is settled, and nothing else is started."""
        self.waits: dict[str, StepRow] = {}
        """Nodes that wait, for their next attempt or for anything else, and their rows."""
        self.retried: dict[str, Step] = {}
        """Steps whose last attempt failed, until the next one."""
        self.running = 0
        self.changed = asyncio.Event()
        self.look_again = False
        """Waits may be over."""
        self.stop: DittoError | None = None

    async def run(self) -> None:
        """Until nothing runs and nothing may start. A step's error outranks the end of a run that is let go of."""
        # A chain needs no task group: most workflows are chains, and each step would pay for it.
        while self._may_start() and len(self.frontier.ready) == 1:
            await self._run_step(self.frontier.ready.popleft())
        if self._may_start() or self._must_wait():
            await self._run_branches()
            # A branch may have heard of the caller's cancellation before this task has.
            await anyio.lowlevel.checkpoint_if_cancelled()
        if self.stop is not None and not (self.stop is self.drive.ending and self.trouble.error is not None):
            raise self.stop
        self.trouble.waits.update((row.path, row) for row in self.waits.values() if row.state is StepState.WAITING)
        assert self.trouble or self.waits or not self.frontier.unsettled, "a run without trouble settles all its nodes"

    async def _run_branches(self) -> None:
        self.drive.wakes.add(self.wake)
        try:
            async with anyio.create_task_group() as branches:
                while self.running or self._may_start() or self._must_wait():
                    while self._may_start() and self.running < self.concurrency:
                        self.running += 1
                        branches.start_soon(self._run_branch, self.frontier.ready.popleft())
                    await self._wait_for_change()
        finally:
            self.drive.wakes.discard(self.wake)

    async def _wait_for_change(self) -> None:
        """Until a branch has ended, the run halts, or a wait may be over; the latter are looked at again."""
        halted = self.trouble.halted
        if self.waits and not halted.is_set():
            with halted.until_set(), anyio.move_on_after(look_s(self._next_due_s())) as timer:
                await self.changed.wait()
            self.look_again = self.look_again or timer.cancelled_caught
        else:
            await self.changed.wait()
        self.changed.clear()
        if self.look_again and self.drive.ending is None:
            self.look_again = False
            self.frontier.ready.extend(self.graph.nodes[name] for name in self.waits)
            self.waits.clear()

    def wake(self) -> None:
        """Somebody else wrote to the store: waits may be over."""
        self.look_again = True
        self.changed.set()

    def _next_due_s(self) -> float:
        """Seconds until a wait here may be over by itself."""
        now_us = self.drive.store.clock.now_us()
        left_s = [
            back_off_left_s(self.drive.timers, row) if _is_retried(row) else (row.due_at - now_us) / 1_000_000
            for row in self.waits.values()
            if row.due_at is not None
        ]
        return min(left_s, default=math.inf)

    def _must_wait(self) -> bool:
        """Nothing else is left to do here but to wait."""
        return self.stop is None and not self.trouble.halted.is_set() and self._waits_here()

    def _waits_here(self) -> bool:
        """Whether anything is waited for here: the next attempt at a step always, the rest if the caller wants to."""
        blocks = bool(self.waits) and self.drive.blocks and not self.trouble
        return blocks or any(_is_retried(row) for row in self.waits.values())

    def _may_start(self) -> bool:
        if self.drive.deadline.over is not None and self.frontier.unsettled:
            self.trouble.fail(self.drive.deadline.over)
        if self.trouble.error is not None and not self.settling:
            self._settle_only()
        if self.stop is None and self.drive.stopped is not None:
            self.stop = self.drive.stopped
        if self.stop is None and (self.frontier.ready or self._waits_here()):
            self.stop = self.drive.ending
        return bool(self.frontier.ready) and self.stop is None

    def _settle_only(self) -> None:
        """From now on start nothing but the look-up of what was lost before."""
        self.settling = True
        self.trouble.halted.set()
        lost = [node for node in self.frontier.ready if is_lost(self.drive.rows.get(self.prefix + node.name))]
        self.frontier.ready = deque(lost)

    async def _run_branch(self, node: Node) -> None:
        try:
            await self._run_step(node)
        except asyncio.CancelledError:
            if anyio.current_effective_deadline() == -math.inf:
                raise
            self.stop = self.stop or StepError(
                f"step {self.prefix}{node.name}: a library under the handler cancelled the step's task for good, and "
                "nobody asked for that; the run is interrupted and can be resumed",
                step=self.prefix + node.name,
                error_type="CancelledError",
            )
        finally:
            self.running -= 1
            self.changed.set()

    async def _run_step(self, node: Node) -> None:
        """Bring one node to its end, and see what that means for the Graph."""
        step = self.retried.pop(node.name, None)
        if step is None:
            step = Step(self.engine, self.drive, node, self.prefix + node.name, self.trouble.halted)
        last = self.frontier.unsettled == 1 and not self.trouble and node.wait is None
        end = self.end if last else None
        try:
            try:
                outcome = await step.run(self._values, skip=self._all_parents_skipped(node), end=end)
            except TransitionRefusedError as refused:
                outcome, end = await adopt(self.drive, step, refused), None
        except DittoError as error:
            self.stop = self.stop or error
            self.drive.halted.set()
            return
        match outcome:
            case Completed(output):
                self.outputs[node.name] = output
                self._release_children(node)
                self.ended = end is not None
            case Skipped():
                self.outputs[node.name] = None
                self._release_children(node)
            case Failed(error=record, cause=cause):
                if self.drive.deadline.over is not None:
                    self.trouble.fail(self.drive.deadline.over, cause)
                self.trouble.fail(record, cause)
                self.trouble.halted.set()
            case Unknown(reason):
                self.trouble.unknown[step.path] = reason
            case Waits(row):
                self.waits[node.name] = row
                if _is_retried(row):
                    self.retried[node.name] = step
            case NotStarted():
                self.stop = self.stop or self.drive.ending

    def _release_children(self, node: Node) -> None:
        if not self.settling:
            self.frontier.settle(node.name)

    def _values(self, names: tuple[str, ...]) -> dict[str, Any]:
        """The named values, decoded anew for this reader; None for a skipped node."""
        values: dict[str, Any] = {}
        for name in names:
            stored: State | None = self.input if name == "input" else self.outputs[name]
            values[name] = None if stored is None else stored.decode()
        return values

    def _all_parents_skipped(self, node: Node) -> bool:
        return bool(node.after) and all(self.outputs[parent] is None for parent in node.after)


def _is_retried(row: StepRow) -> bool:
    """Whether the step waits for its next attempt, and for nobody."""
    return row.state is StepState.RETRYING


async def adopt(drive: Drive, step: Step, refused: TransitionRefusedError) -> StepEnd:
    """Somebody else settled the step while we were at it: what they recorded stands, and ours is late."""
    reason = await drive.explain(refused)
    row = await drive.store.read(queries.get_step, drive.run.id, step.path)
    if reason is not refused or row is None:
        drive.stop(reason)
        raise reason
    drive.rows[step.path] = row
    if row.state is StepState.COMPLETED and row.output is not None:
        return Completed(row.output)
    error = ErrorRecord.from_text(row.error) if row.error else None
    if row.state is StepState.FAILED and error is not None:
        return Failed(error)
    return Unknown("another process changed the step while it ran; run again")
