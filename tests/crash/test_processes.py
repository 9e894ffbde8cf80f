"""Two processes and one run: one works, the other is told; a dead owner is replaced at once, a stopped one is not."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

from tests.crash.world import World
from tests.processes import Child

StartChild: TypeAlias = Callable[..., Child]

PROGRAM = """
import asyncio, sys
from pathlib import Path
from ditto import DittoError, Graph, RunCancelledError, create_ditto
from tests.crash.world import World

store, world = Path(sys.argv[1]), World(Path(sys.argv[2]))

async def say(line):
    print(line, flush=True)

async def hear():
    return await asyncio.to_thread(sys.stdin.readline)

async def act(ctx):
    await say("inside")
    await hear()
    return world.act("send", ctx.key)

GRAPH = (
    Graph("flow")
    .step("first", lambda ctx: world.act("put", ctx.key))
    .step("send", act, after=("first",), effect="write")
    .step("last", lambda ctx: world.act("put", ctx.key), after=("send",))
)

async def main():
    async with create_ditto(store=store) as runtime:
        await say("open")
        while (line := (await hear()).strip()):
            try:
                if line == "run":
                    await say(f"result {await runtime.run(GRAPH, id='x')}")
                elif line == "cancel":
                    await runtime.cancel("x", actor="test", reason="stopped")
                    await say("cancelled")
                elif line == "absent":
                    await runtime.resolve("x", "send", actor="test", reason="not there", absent=True)
                    await say("resolved")
                elif line == "status":
                    await say((await runtime.get("x")).status)
                elif line == "events":
                    await say(" ".join([event.kind async for event in runtime.events("x")]))
            except DittoError as error:
                await say(f"{type(error).__name__}: {error.message}")

asyncio.run(main())
"""

RESULT = "result {'first': 'put x/1/first', 'send': 'send x/1/send', 'last': 'put x/1/last'}"


class Process:
    """One process with a runtime."""

    def __init__(self, start_child: StartChild, folder: Path) -> None:
        self.child = start_child(PROGRAM, folder / "ditto.db", folder / "world.db")
        assert self.child.line() == "open"

    def ask(self, line: str) -> str:
        """Tell it something, and read what it says."""
        self.child.tell(line)
        return self.child.line()


@pytest.fixture
def start(start_child: StartChild, tmp_path: Path) -> Callable[[], Process]:
    return lambda: Process(start_child, tmp_path)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "world.db")


ONCE = {("put", "x/1/first"): 1, ("send", "x/1/send"): 1, ("put", "x/1/last"): 1}


def test_of_two_processes_one_works_and_the_other_is_told(start: Callable[[], Process], world: World) -> None:
    first, second = start(), start()
    assert first.ask("run") == "inside"
    assert second.ask("run").startswith("RunBusyError: run x is driven by another runtime, which is alive")
    assert second.ask("status") == "running"
    assert second.ask("absent").startswith("RunBusyError: run x: step send is being attempted right now")
    assert first.ask("") == RESULT
    assert second.ask("run") == RESULT
    assert world.calls() == ONCE


def test_two_processes_that_enter_at_once_do_the_work_once(start: Callable[[], Process], world: World) -> None:
    processes = [start(), start()]
    for process in processes:
        process.child.tell("run")
    answers = [process.child.line() for process in processes]
    worker = answers.index("inside")
    assert answers[1 - worker].startswith("RunBusyError")
    assert processes[worker].ask("") == RESULT
    assert world.calls() == ONCE


def test_a_killed_owner_is_replaced_at_once(start: Callable[[], Process], world: World) -> None:
    first, second = start(), start()
    assert first.ask("run") == "inside"
    first.child.kill()
    # Its runtime was open before the owner died, and knows at once all the same.
    assert second.ask("status") == "unknown"
    assert second.ask("run").startswith("UnknownOutcomeError: run x: the outcome of a step is unknown (send: attempt 1")
    assert second.ask("absent") == "resolved"
    assert second.ask("status") == "interrupted"
    assert second.ask("run") == "inside"
    assert second.ask("") == RESULT
    assert world.calls() == ONCE


def test_an_owner_that_ended_without_closing_is_dead(start: Callable[[], Process], world: World) -> None:
    first = start()
    assert first.ask("run") == "inside"
    os.kill(first.child.pid, signal.SIGTERM)
    first.child.end()
    second = start()
    assert second.ask("status") == "unknown"


def test_a_stopped_owner_is_not_dead_and_what_it_does_later_is_late(start: Callable[[], Process], world: World) -> None:
    first, second = start(), start()
    assert first.ask("run") == "inside"
    os.kill(first.child.pid, signal.SIGSTOP)
    # It holds its lock: nobody takes its place, however long it sleeps.
    assert second.ask("run").startswith("RunBusyError")
    assert second.ask("cancel") == "cancelled"
    assert second.ask("status") == "cancelled"
    os.kill(first.child.pid, signal.SIGCONT)
    assert first.ask("") == "RunCancelledError: run x was cancelled"
    # D05: what is closed stays closed, and what was done all the same is in the history.
    assert second.ask("status") == "cancelled"
    assert second.ask("events") == ("run_created step_completed step_admitted run_cancelled step_returned_late")
    assert second.ask("run") == "RunCancelledError: run x was cancelled"
    assert world.calls() == {("put", "x/1/first"): 1, ("send", "x/1/send"): 1}
