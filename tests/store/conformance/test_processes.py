"""Several processes on one store: each change was decided on the one before, and only the dead are replaced."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import pytest

from ditto import Graph, RunBusyError, StepContext
from ditto.store import queries
from ditto.store.records import Event
from ditto.store.store import Store
from ditto.store.transitions import note_event
from tests.processes import Child
from tests.store.conformance.under_test import StoreUnderTest
from tests.store.scenes import create, get

StartChild: TypeAlias = Callable[..., Child]

PROGRAM = """
import asyncio, sys
from ditto.errors import TransitionRefusedError
from ditto.store import queries, transitions
from ditto.store.records import Event
from tests.store.conformance.stores import find
from tests.store.conformance.under_test import opened
from tests.store.scenes import claim, create, get

name, count = sys.argv[2], int(sys.argv[3])

async def claim_often(store):
    wanted, lost = count, 0
    while wanted:
        try:
            await claim(store, await get(store), name)
            wanted -= 1
        except TransitionRefusedError:
            lost += 1
    print("done", lost, flush=True)

async def create_all(store):
    for number in range(count):
        try:
            await create(store, f"run {number}", owner=name)
            print("created", flush=True)
        except TransitionRefusedError:
            pass

async def note_all(store):
    run = (await get(store)).id
    noted = [
        store.commit(lambda tx, number=number: transitions.note_event(tx, run, Event("note", name, {"n": number})))
        for number in range(count)
    ]
    await asyncio.gather(*noted)

async def main():
    async with opened(find(sys.argv[1])) as store:
        print("ready", flush=True)
        sys.stdin.readline()
        await globals()[sys.argv[4]](store)

asyncio.run(main())
"""


def together(start_child: StartChild, under_test: StoreUnderTest, what: str, count: int) -> list[list[str]]:
    """Two processes that do the same at once, and what each has said."""
    children = [start_child(PROGRAM, under_test.address, f"child {number}", count, what) for number in range(2)]
    assert [child.line() for child in children] == ["ready", "ready"]
    for child in children:
        child.tell()
    ends = [child.end() for child in children]
    assert [code for code, _ in ends] == [0, 0]
    return [lines for _, lines in ends]


@pytest.mark.asyncio
async def test_i01_two_processes_that_read_and_then_write_never_meet_a_lock(
    under_test: StoreUnderTest, store: Store, start_child: StartChild
) -> None:
    await create(store)
    await asyncio.to_thread(together, start_child, under_test, "claim_often", 100)
    run = await get(store)
    assert run.fence == 201, "each change of hands was decided on the one before"
    assert run.seq == 201
    under_test.look()


def test_two_processes_that_create_one_run_agree_whose_it_is(
    under_test: StoreUnderTest, start_child: StartChild
) -> None:
    said = together(start_child, under_test, "create_all", 50)
    assert sum(len(lines) for lines in said) == 50
    assert len(under_test.look().runs) == 50


@pytest.mark.asyncio
async def test_the_history_of_a_run_has_no_gap_whoever_writes_it(
    under_test: StoreUnderTest, store: Store, start_child: StartChild
) -> None:
    fence = await create(store)
    writing = asyncio.ensure_future(asyncio.to_thread(together, start_child, under_test, "note_all", 200))
    ours = 0
    while not writing.done():
        event = Event("note", "parent", {"n": ours})
        await store.commit(partial(note_event, run=fence.run, event=event))
        ours += 1
    await writing
    found: list[tuple[Any, ...]] = []
    while page := await store.read(queries.list_events, fence.run, len(found), 97):
        found += page
    assert [number for number, *_ in found] == list(range(1, 402 + ours))
    for name, count in (("child 0", 200), ("child 1", 200), ("parent", ours)):
        noted = [body["n"] for _, _, kind, step, body in found if (kind, step) == ("note", name)]
        assert noted == list(range(count)), "each writer's own, in its own order"
    under_test.look()


OWN = """
import asyncio, sys
from ditto import Graph
from tests.store.conformance.stores import find

async def wait():
    print("inside", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    return "theirs"

GRAPH = Graph("flow").step("before", lambda: 1).step("wait", wait, after=("before",))

async def main():
    async with find(sys.argv[1]).create_runtime() as runtime:
        await runtime.run(GRAPH, id="run")

asyncio.run(main())
"""


@pytest.mark.asyncio
async def test_a_live_owner_is_left_alone_and_a_dead_one_is_replaced(
    under_test: StoreUnderTest, start_child: StartChild
) -> None:
    seen: list[str] = []

    def wait(ctx: StepContext) -> str:
        seen.append(ctx.key)
        return "ours"

    graph = Graph("flow").step("before", lambda: 1).step("wait", wait, after=("before",))
    async with under_test.create_runtime() as runtime:
        child = start_child(OWN, under_test.address)
        assert await asyncio.to_thread(child.line) == "inside"
        for _ in range(3):
            with pytest.raises(RunBusyError, match="is driven by another runtime, which is alive"):
                await runtime.run(graph, id="run")
        assert seen == []
        child.kill()
        assert await runtime.run(graph, id="run") == {"before": 1, "wait": "ours"}
    assert seen == ["run/1/wait"]
    [(*_, status, owner, fence, _, _)] = under_test.look().runs
    assert (status, owner, fence) == ("completed", None, 2)
