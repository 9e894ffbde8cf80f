"""The preflight: which recorded runs this code can take up, and what differs for the others; nothing is written."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ditto import Checked, Flow, FlowContext, Graph, Loop, RunBlockedError, Runtime, StepError, Worker
from ditto.store.schema import metadata
from tests.engine.scene import opened, states, status, story

pytestmark = pytest.mark.asyncio

Workflow = Graph | Loop | Flow


def fail() -> None:
    raise ValueError("broken")


REVIEWED = (
    Graph("reviewed")
    .step("draft", lambda: 1)
    .approval("review", show=lambda draft: draft, after=("draft",))
    .step("send", lambda review: review["decision"], after=("review",))
)
WITHOUT_REVIEW = Graph("reviewed").step("draft", lambda: 1).step("send", lambda draft: draft, after=("draft",))


async def park(path: Path, workflow: Workflow, run_id: str, input: Any = None, **options: Any) -> None:
    """Begin a run, and leave it waiting or failed."""
    async with opened(path, **options) as runtime:
        try:
            await runtime.run(workflow, input, id=run_id, on_wait="return")
        except StepError:
            pass


async def check(
    path: Path, *workflows: Workflow, workers: Iterable[Worker] = (), **options: bool
) -> dict[str, tuple[str, bool, tuple[str, ...]]]:
    async with opened(path, workflows=workflows, workers=workers) as runtime:
        found = await runtime.check(**options)
    assert all(checked.resumable == (not checked.differences) for checked in found)
    return {each.run_id: (each.status, each.resumable, each.differences) for each in found}


def everything(path: Path) -> dict[str, list[tuple[Any, ...]]]:
    """Every row of every table."""
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:
        return {name: db.execute(f"SELECT * FROM {name} ORDER BY 1").fetchall() for name in metadata.tables}


async def test_f07_a_run_that_waits_at_a_node_that_is_gone_is_named_before_and_keeps_its_answer(
    store_path: Path,
) -> None:
    for number in range(3):
        await park(store_path, REVIEWED, f"r-{number}")
    await park(store_path, Graph("other").wait("go"), "other")
    gone = ("step review is recorded as waiting, and the graph has no node review",)
    assert await check(store_path, WITHOUT_REVIEW, Graph("other").wait("go")) == {
        **{f"r-{number}": ("waiting", False, gone) for number in range(3)},
        "other": ("waiting", True, ()),
    }

    async with opened(store_path, workflows=[WITHOUT_REVIEW]) as runtime:
        with pytest.raises(RunBlockedError) as caught:
            await runtime.resume("r-0")
        assert caught.value.differences == gone
        assert await status(runtime, "r-0") == "blocked"
        await runtime.decide("r-0", decision="approve", actor="kim")
        assert await states(runtime, "r-0") == {"draft": "completed", "review": "completed"}
        before = await story(runtime, "r-0")
        for _ in range(5):
            with pytest.raises(RunBlockedError):
                await runtime.resume("r-0")
        assert await story(runtime, "r-0") == before
    async with opened(store_path, workflows=[REVIEWED]) as runtime:
        assert (await runtime.resume("r-0"))["send"] == "approve"


async def test_f01_the_check_names_what_resuming_would_refuse(store_path: Path) -> None:
    was = Graph("g").step("a", lambda: 1).step("b", lambda a: a, after=("a",)).step("c", fail, after=("b",))
    now = Graph("g").step("a", lambda: 1, version="2").step("x", lambda a: a, after=("a",)).step("c", fail)
    await park(store_path, was, "x")
    assert await check(store_path, now) == {}
    assert await check(store_path, was, open_runs=False, failed_runs=True) == {"x": ("failed", True, ())}
    [found] = (await check(store_path, now, failed_runs=True)).values()
    assert found == (
        "failed",
        False,
        (
            "step a is recorded with version 1, and now has 2",
            "step b is recorded as completed, and the graph has no node b",
        ),
    )
    async with opened(store_path, workflows=[now]) as runtime:
        with pytest.raises(RunBlockedError) as caught:
            await runtime.resume("x")
        assert set(caught.value.differences) == set(found[2])


@pytest.mark.parametrize(
    ("now", "difference"),
    [
        (Graph("g").wait("paid", signal="bill"), "step paid waits for paid, and would now wait for bill"),
        (Graph("g").sleep("paid", 5), "step paid is recorded with type WAIT.SIGNAL, and now has WAIT.TIMER"),
        (
            Graph("g").step("first", lambda: 1).wait("paid", after=("first",)),
            "step paid is recorded with dependencies [], and now has ['first']",
        ),
    ],
    ids=["another signal", "another kind", "another dependency"],
)
async def test_f07_a_wait_that_is_another_one_now_is_named(store_path: Path, now: Graph, difference: str) -> None:
    await park(store_path, Graph("g").wait("paid"), "r")
    assert await check(store_path, now) == {"r": ("waiting", False, (difference,))}
    async with opened(store_path, workflows=[now]) as runtime:
        with pytest.raises(RunBlockedError):
            await runtime.resume("r")


async def test_what_has_not_run_may_change(store_path: Path) -> None:
    await park(store_path, REVIEWED, "r")
    now = REVIEWED.step("archive", lambda send: send, after=("send",))
    assert await check(store_path, now) == {"r": ("waiting", True, ())}


async def test_what_is_not_registered_is_named(store_path: Path) -> None:
    await park(store_path, REVIEWED, "r")
    assert await check(store_path) == {"r": ("waiting", False, ("graph reviewed is not registered",))}

    async def function(ctx: FlowContext, input: Any) -> None:
        return None

    assert await check(store_path, Flow("reviewed", function)) == {
        "r": ("waiting", False, ("graph reviewed is not registered; that name is registered for a flow",))
    }


async def test_a_worker_that_is_missing_is_named(store_path: Path) -> None:
    worker = Worker("SHOP").node("SHOP.PRICE", lambda arguments: 1, effect="read")
    graph = Graph("g").node("price", "SHOP.PRICE").wait("go", after=("price",))
    await park(store_path, graph, "r", workers=[worker])
    assert await check(store_path, graph, workers=[worker]) == {"r": ("waiting", True, ())}
    [(_, resumable, [difference])] = (await check(store_path, graph)).values()
    assert not resumable
    assert difference.startswith("node price of graph g: no worker carries out node type SHOP.PRICE; ")


def loop_over(body: Any, **options: Any) -> Loop:
    return Loop("rounds", body, lambda state, outputs: state + 1, lambda state: state == 3, 5, **options)


async def test_a_loop_is_checked_in_the_iteration_that_is_under_way(store_path: Path) -> None:
    body = Graph("body").step("a", lambda: 1).wait("go", after=("a",))
    async with opened(store_path) as runtime:
        await runtime.run(loop_over(body), 0, id="r", on_wait="return")
        await runtime.signal("r", "go")
        await runtime.run(loop_over(body), 0, id="r", on_wait="return")
    changed = Graph("body").step("b", lambda: 1).wait("go", after=("b",))
    assert await check(store_path, loop_over(body)) == {"r": ("waiting", True, ())}
    assert await check(store_path, loop_over(changed)) == {
        "r": (
            "waiting",
            False,
            (
                "step 2/a is recorded as completed, and the graph has no node a",
                "step 2/go is recorded with dependencies ['a'], and now has ['b']",
            ),
        )
    }
    chosen = loop_over(lambda state: body if state == 1 else changed)
    assert await check(store_path, chosen) == {"r": ("waiting", True, ())}
    broken = loop_over(lambda state: [][state])
    told = "a function of loop rounds raised IndexError for the recorded state"
    assert await check(store_path, broken) == {"r": ("waiting", False, (told,))}


async def test_of_a_flow_is_told_what_is_known_without_running_it(store_path: Path) -> None:
    called = 0

    async def function(ctx: FlowContext, input: Any) -> Any:
        nonlocal called
        called += 1
        await ctx.node("price", "SHOP.PRICE", 1)
        await ctx.run("inner", Graph("inner").step("a", lambda: 1))
        return await ctx.wait("go")

    worker = Worker("SHOP").node("SHOP.PRICE", lambda arguments: 1, effect="read")
    await park(store_path, Flow("f", function), "r", workers=[worker])
    assert called == 1
    assert await check(store_path, Flow("f", function), workers=[worker]) == {"r": ("waiting", True, ())}
    [(_, _, differences)] = (await check(store_path, Flow("f", function, version="2"))).values()
    assert differences[0].startswith("flow f was at version 1 and is at 2: only running it tells")
    assert differences[1].startswith("call price: no worker carries out node type SHOP.PRICE")
    assert len(differences) == 2
    assert called == 1


async def test_a_blocked_flow_is_not_said_to_fit(store_path: Path) -> None:
    async def was(ctx: FlowContext, input: Any) -> Any:
        return await ctx.wait("go")

    async def now(ctx: FlowContext, input: Any) -> Any:
        return await ctx.sleep("go", 5)

    await park(store_path, Flow("f", was), "r")
    async with opened(store_path, workflows=[Flow("f", now)]) as runtime:
        with pytest.raises(Exception, match="was recorded as"):
            await runtime.resume("r")
    [(blocked, resumable, [difference])] = (await check(store_path, Flow("f", was))).values()
    assert (blocked, resumable) == ("blocked", False)
    assert "only running it tells" in difference


async def test_it_writes_nothing_starts_nothing_and_reads_every_page(
    store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ditto.engine.checking.RUNS_PAGE", 2)
    monkeypatch.setattr("ditto.engine.checking.STEPS_PAGE", 1)
    started = 0

    def start() -> int:
        nonlocal started
        started += 1
        return started

    graph = Graph("g").step("a", start).wait("go", after=("a",)).step("b", start, after=("go",))
    async with opened(store_path) as runtime:
        for number in range(5):
            await runtime.run(graph, id=f"r-{number}", on_wait="return")
        await runtime.cancel("r-4")
        await runtime.run(Graph("done").step("a", lambda: 1), id="done")
    before = everything(store_path)
    assert await check(store_path, graph) == {f"r-{number}": ("waiting", True, ()) for number in range(4)}
    assert everything(store_path) == before
    assert started == 5


async def test_a_run_that_this_process_drives_is_open_too(store_path: Path) -> None:
    found: tuple[Checked, ...] = ()
    holder: list[Runtime] = []

    async def look() -> None:
        nonlocal found
        found = await holder[0].check()

    graph = Graph("g").step("look", look)
    async with opened(store_path, workflows=[graph]) as runtime:
        holder.append(runtime)
        await runtime.run(graph, id="r")
    assert found == (Checked("r", "g", "graph", "running", True, ()),)
