"""Loops: choose a Graph from the state, run it, update the state, ask whether it is done.

The state after an iteration is a pure function of recorded values: it is held, rides with the run's next barrier,
and is computed again if the process died before that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from ditto.engine.drive import Drive
from ditto.engine.executor import Engine, run_graph
from ditto.engine.outcomes import record_error
from ditto.engine.trouble import Trouble
from ditto.graph import Graph
from ditto.loop import Loop
from ditto.store.records import Event, LoopState, RunEnd
from ditto.store.schema import RunStatus
from ditto.store.values import State

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LoopResult:
    """Where a Loop stands: its state, and whether it is done or hit its guard."""

    state: State
    iteration: int
    end: RunEnd | None
    """How the run ends; None if something went wrong, which is in the trouble."""


async def run_loop(
    engine: Engine, drive: Drive, loop: Loop, state: LoopState, *, concurrency: int, trouble: Trouble
) -> LoopResult:
    """Go on from this state until done, exhausted or in trouble. Raises as `run_graph` does."""
    user = _Asked(loop, drive, trouble)
    if state.iteration == 0:
        state = replace(state, state=_stored_state(drive, loop, state.state.decode()))
    while True:
        # A run that has failed already is here to settle what its iteration lost, and for nothing else.
        if not trouble:
            done = user.ask("done", partial(_is_done, loop, state.state))
            if done is None:
                return LoopResult(state.state, state.iteration, None)
            if done:
                return LoopResult(state.state, state.iteration, RunEnd(RunStatus.COMPLETED))
            if state.iteration >= loop.max_iterations:
                event = Event("run_exhausted", body={"iterations": state.iteration})
                return LoopResult(state.state, state.iteration, RunEnd(RunStatus.EXHAUSTED, event=event))
        following = await _iterate(engine, drive, loop, state, user, concurrency=concurrency, trouble=trouble)
        if following is None:
            return LoopResult(state.state, state.iteration, None)
        state = following


async def _iterate(
    engine: Engine, drive: Drive, loop: Loop, state: LoopState, user: _Asked, *, concurrency: int, trouble: Trouble
) -> LoopState | None:
    """One iteration; None if it ran into trouble."""
    number = state.iteration + 1
    prefix = f"{number}/" if state.path is None else f"{state.path}/{number}/"
    graph = user.ask("graph", lambda: _chosen(engine, loop, state.state.decode()))
    bound = user.ask(
        "bind",
        lambda: drive.store.encode_growing(_bound(loop, state.state.decode()), f"the input of iteration {number}"),
    )
    if graph is None or bound is None:
        return None
    result = await run_graph(engine, drive, graph, bound, prefix=prefix, concurrency=concurrency, trouble=trouble)
    if trouble or trouble.waits:
        return None
    updated = user.ask(
        "update",
        lambda: _stored_state(drive, loop, loop.update(state.state.decode(), result.decode(graph))),
    )
    if updated is None:
        return None
    following = replace(state, iteration=number, state=updated)
    drive.hold_loop(following)
    for path in [each for each in drive.rows if each.startswith(prefix)]:
        del drive.rows[path]
    return following


def _stored_state(drive: Drive, loop: Loop, state: Any) -> State:
    return drive.store.encode_growing(state, f"the state of loop {loop.name}", loop.append)


def _chosen(engine: Engine, loop: Loop, state: Any) -> Graph:
    graph = loop.choose(state)
    engine.router.check(graph)
    return graph


def _is_done(loop: Loop, state: State) -> bool:
    return bool(loop.done(state.decode()))


def _bound(loop: Loop, state: Any) -> Any:
    return state if loop.bind is None else loop.bind(state)


@dataclass(frozen=True, slots=True)
class _Asked:
    """Asks the loop's own functions; what one raises is the run's trouble, after all outcomes."""

    loop: Loop
    drive: Drive
    trouble: Trouble

    def ask(self, role: str, question: Callable[[], T]) -> T | None:
        """The answer, or None and the trouble."""
        try:
            return question()
        except Exception as error:  # noqa: BLE001 - a user's function raised: that fails the run
            record = record_error(error, None, self.drive.store.redact)
            text = f"{role} of loop {self.loop.name}: {record.message}"
            self.trouble.fail(replace(record, message=text), error)
            return None
