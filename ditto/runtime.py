"""The runtime: what an application holds. It opens the store, drives runs, and answers questions about them.

`create_ditto()` reads nothing and opens nothing; the store is opened by the first call, or on entering `async with`.
This is the face alone: each method hands the open store (`engine/open_store.py`) to `engine/driving.py`, `asking.py` or
`deciding.py`. Start reading at `Runtime.run`, then `driving.drive_run`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, overload

from ditto.clock import Clock
from ditto.config import Config
from ditto.engine import asking, deciding, driving
from ditto.engine.driving import Wanted
from ditto.engine.listening import Place
from ditto.engine.open_store import OpenStore, closed_error
from ditto.engine.opening import OnFinished, kind_of
from ditto.engine.recovering import Workflows
from ditto.engine.resolving import Decision
from ditto.errors import ConfigError, DefinitionError, StoreClosedError
from ditto.flow import Flow
from ditto.graph import Graph, check_name
from ditto.loop import Loop
from ditto.pieces import Heard, TextKind
from ditto.runs import Checked, EventInfo, Health, Recovered, RunInfo, RunSummary
from ditto.sandbox import Sandbox
from ditto.store.connection import Location
from ditto.store.schema import PAUSING, RunStatus
from ditto.turn import ReceiptSink, Turn, TurnFunction
from ditto.waits import OnWait, Waiting
from ditto.worker import Worker

T = TypeVar("T")


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


class Runtime:
    """Drives runs on one store. Made by `create_ditto`; belongs to one event loop and one process."""

    def __init__(
        self,
        *,
        config: Config,
        location: Location,
        workers: tuple[Worker, ...],
        workflows: Workflows,
        sandbox: Sandbox,
        clock: Clock,
    ) -> None:
        self.config = config
        self.location = location
        self.sandbox = sandbox
        self._workers = workers
        self._workflows = workflows
        self._clock = clock
        self._opened: OpenStore | None = None
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
        # In a forked child all of it is the parent's, and no event loop runs.
        if opened is not None and not opened.store.is_inherited:
            await opened.close()

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
        return await self._drive(Wanted(workflow, input, id, on_finished, concurrency, on_wait, timeout_s))

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
        return await self._drive(Wanted(loop, state, id, on_finished, concurrency, on_wait, timeout_s))

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
        return await driving.drive_turn(await self._ready(), turn, function, on_receipt)

    async def resume(self, run_id: str, *, on_wait: OnWait = "block", timeout_s: float | None = None) -> Any:
        """Take a run up by its id alone, with its recorded input: open, paused, failed and exhausted runs go on.

        A reopened run has the deadline that `timeout_s` gives it, or none; an open one keeps its own, if it has one.

        Its workflow must be among `create_ditto(workflows=…)`. Returns and raises as `run` and `loop` do, and
        RunNotFoundError; RunBlockedError if the workflow is not registered; RunPausedError if it is paused again.
        """
        return await driving.resume(await self._ready(), run_id, on_wait, timeout_s)

    async def recover(self) -> tuple[Recovered, ...]:
        """Take up, once, every run of a registered workflow that nobody drives: its owner died, or let go of it.

        They are driven to their ends, `runtime.concurrency` at a time. What goes wrong with one is told in its
        Recovered and harms no other; a store that is busy for a moment is tried again. Runs that are unknown wait for
        `resume` or a person.
        """
        return await driving.recover(await self._ready())

    async def serve(self) -> None:
        """Drive the runs of registered workflows that nobody drives, until the runtime is closed, or the caller
        cancelled: runs of dead owners, and waiting runs whose signal, decision or time has come.

        `runtime.concurrency` runs at a time. A run that goes on to wait is let go of. One whose process died three
        times in a row without any progress is left to a person. On `close`, no further run is taken up, and what runs
        is drained.
        """
        await driving.serve(await self._ready())

    # Asking and deciding

    async def runs(self, *, status: str | None = None, limit: int = 50) -> list[RunSummary]:
        """The newest generation of each run, newest first: at most `limit`, with this status if one is given."""
        if status is not None and status not in (*RunStatus, PAUSING):
            raise DefinitionError(f"status {status!r}: use one of {', '.join((*RunStatus, PAUSING))}")
        return await asking.list_runs(await self._ready(), status, limit)

    async def check(self, *, open_runs: bool = True, failed_runs: bool = False) -> tuple[Checked, ...]:
        """Which recorded runs this code can take up, and what differs for each other one; one Checked a run.

        `open_runs` are those that are not closed, whoever drives them; `failed_runs` those that failed or are
        exhausted and could be reopened. Nothing is started or written; of a workflow only the functions by which a
        Loop chooses its Graph are called. What a Flow asks for is known only by running it. Raises StoreError.
        """
        return await asking.check_runs(await self._ready(), open_runs=open_runs, failed_runs=failed_runs)

    async def health(self) -> Health:
        """Examine the store: SQLite's own checks, what is open, who drives it. Reads the whole file."""
        return await asking.examine_store(await self._ready())

    async def get(self, run_id: str) -> RunInfo:
        """A run as it stands: its newest generation, with its steps. Raises RunNotFoundError."""
        return await asking.show_run(await self._ready(), run_id)

    async def events(self, run_id: str, after: int = 0, *, follow: bool = False) -> AsyncIterator[EventInfo]:
        """The history of a run's newest generation, from the event after number `after`. Raises RunNotFoundError.

        With `follow` it goes on until that generation is closed, looking for more every quarter of a second; between
        two looks no read transaction is open.
        """
        async with aclosing(asking.list_events(await self._ready(), run_id, after, follow=follow)) as events:
            async for event in events:
                yield event

    async def receipts(self, run_id: str | None = None, after: int = 0) -> AsyncIterator[str]:
        """The signed receipts of all generations of a run, or of the whole store, in the order of their chain: each
        one's original line, from the one after number `after`. Raises RunNotFoundError."""
        async with aclosing(asking.list_receipts(await self._ready(), run_id, after)) as lines:
            async for line in lines:
                yield line

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
        async with aclosing(asking.listen_to(await self._ready(), run_id, place)) as heard:
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
        await deciding.resolve(await self._ready(), run_id, step, decision, attempt)

    async def signal(self, run_id: str, name: str, body: Any = None, *, id: str | None = None, actor: str = "") -> bool:
        """Send a signal to an open run. It is queued, and ends the wait for that name, or the next such wait.

        `id` makes sending it again harmless: False says that a signal with that id is there already. The signal, the
        end of the wait and the events are one transaction. Raises RunNotFoundError, TransitionRefusedError if the run
        is closed, InvalidValueError, DefinitionError.
        """
        check_name(name, what="signal")
        return await deciding.signal(await self._ready(), run_id, name, body, id, actor)

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
        await deciding.decide(opened, run_id, step, decision, actor=actor, reason=reason, digest=digest)

    async def cancel(self, run_id: str, *, actor: str = "", reason: str = "") -> None:
        """Cancel an open run for good, whoever drives it: its owner starts no further step.

        What is under way is drained there, and recorded as late. Raises RunNotFoundError, and
        TransitionRefusedError if the run is closed.
        """
        await deciding.cancel(await self._ready(), run_id, actor, reason)

    async def pause(self, run_id: str, actor: str = "", reason: str = "") -> None:
        """Pause an open run, whoever drives it: it is drained, and stays `paused` until `resume` or `cancel`.

        From now on no write, model call or local step of it begins, and a moment later, when its owner has noticed,
        nothing else. What is under way ends and is recorded; until then the run is shown as `pausing`. Signals and
        decisions are kept meanwhile. Who drives it gets RunPausedError, unless the run came to its end all the same. A
        child run under way is driven to its end or its next wait: it has an id of its own. Pausing twice changes
        nothing. `actor` and `reason` are recorded, not verified. Raises RunNotFoundError, and TransitionRefusedError
        if the run is closed.
        """
        await deciding.pause(await self._ready(), run_id, actor, reason)

    async def unpause(self, run_id: str, actor: str = "", reason: str = "") -> None:
        """End a pause without driving the run: it is interrupted, for `serve`, or for the next call, to take up.

        `actor` and `reason` are recorded, not verified. Raises RunNotFoundError, RunBusyError while the run is still
        being drained, and TransitionRefusedError if it is not paused.
        """
        await deciding.unpause(await self._ready(), run_id, actor, reason)

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

    async def _drive(self, wanted: Wanted) -> Any:
        return await driving.drive_run(await self._ready(), wanted)

    async def _ready(self) -> OpenStore:
        """The open store, opened on first use. Raises StoreClosedError after `close`, and on another event loop."""
        if self._opened is not None:
            # A forked child is told by the store, in words of its own.
            if self._opened.loop is not asyncio.get_running_loop() and self._opened.process == os.getpid():
                raise StoreClosedError("this runtime belongs to another event loop; create one in each asyncio.run")
            return self._opened
        async with self._opening:
            if self._closed:
                raise closed_error()
            if self._opened is None:
                self._opened = OpenStore.open(
                    config=self.config,
                    location=self.location,
                    sandbox=self.sandbox,
                    workers=self._workers,
                    workflows=self._workflows,
                    clock=self._clock,
                )
            return self._opened


def _by_name(workflows: Iterable[Graph | Loop | Flow]) -> dict[tuple[str, str], Graph | Loop | Flow]:
    """Workflows by kind and name. Raises ConfigError for two of one name."""
    named: dict[tuple[str, str], Graph | Loop | Flow] = {}
    for workflow in workflows:
        if not isinstance(workflow, Graph | Loop | Flow):
            raise ConfigError(f"workflows takes Graphs, Loops and Flows, not {type(workflow).__name__}")
        key = (kind_of(workflow), workflow.name)
        if key in named:
            raise ConfigError(f"two workflows are {key[0]} {workflow.name!r}; runs are found by that name")
        named[key] = workflow
    return named
