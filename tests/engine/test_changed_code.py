"""Changed code: a run goes on if what completed still fits; else it is blocked, and every difference is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ditto import DefinitionError, Graph, RunBlockedError, StepError, UnknownOutcomeError, Worker
from tests.engine.scene import World, opened, states, status, story

pytestmark = pytest.mark.asyncio


def fail() -> None:
    raise ValueError("broken")


def lose() -> None:
    raise ConnectionError("dead")


WAS = (
    Graph("g")
    .step("a", lambda: 1)
    .step("b", lambda a: a + 1, after=("a",))
    .step("c", fail, after=("b",))
    .step("d", lambda c: c, after=("c",))
)


async def begin(path: Path, graph: Graph = WAS) -> None:
    async with opened(path) as runtime:
        with pytest.raises((StepError, UnknownOutcomeError)):
            await runtime.run(graph, id="x")


BLOCKED: list[tuple[str, Graph, tuple[str, ...]]] = [
    (
        "a completed node is gone",
        Graph("g").step("a", lambda: 1).step("c", lambda: 1, after=("a",)),
        ("step b is recorded as completed, and the graph has no node b",),
    ),
    (
        "renamed",
        Graph("g").step("a", lambda: 1).step("x", lambda a: a, after=("a",)).step("c", lambda: 1, after=("x",)),
        ("step b is recorded as completed, and the graph has no node b",),
    ),
    (
        "another dependency",
        Graph("g").step("a", lambda: 1).step("b", lambda: 2).step("c", lambda: 1, after=("a", "b")),
        ("step b is recorded with dependencies ['a'], and now has []",),
    ),
    (
        "another version",
        Graph("g").step("a", lambda: 1, version="2").step("b", lambda a: a, after=("a",)).step("c", lambda: 1),
        ("step a is recorded with version 1, and now has 2",),
    ),
    (
        "another type",
        Graph("g").node("a", "SHOP.PRICE").step("b", lambda a: a, after=("a",)).step("c", lambda: 1),
        ("step a is recorded with type STEP, and now has SHOP.PRICE",),
    ),
    (
        "several",
        Graph("g").step("b", lambda: 1, version="2"),
        (
            "step a is recorded as completed, and the graph has no node a",
            "step b is recorded with dependencies ['a'], and now has []",
            "step b is recorded with version 1, and now has 2",
        ),
    ),
]


@pytest.mark.parametrize(("now", "differences"), [case[1:] for case in BLOCKED], ids=[case[0] for case in BLOCKED])
async def test_f01_what_does_not_fit_is_blocked_and_named_and_nothing_is_written(
    store_path: Path, now: Graph, differences: tuple[str, ...]
) -> None:
    await begin(store_path)
    worker = Worker("SHOP").node("SHOP.PRICE", lambda arguments: 1, effect="read")
    async with opened(store_path, workers=[worker]) as runtime:
        before = await story(runtime, "x")
        for _ in range(5):
            with pytest.raises(RunBlockedError) as caught:
                await runtime.run(now, id="x", on_finished="reopen")
            assert caught.value.differences == differences
            assert all(difference in caught.value.message for difference in differences)
            assert caught.value.run_id == "x"
        assert await story(runtime, "x") == before
        assert await status(runtime, "x") == "failed"
        # Other runs start; and the run may be begun anew.
        await runtime.run(Graph("other").step("a", lambda: 1), id="y")
        assert await runtime.run(Graph("g").step("a", lambda: 7), id="x", on_finished="new") == {"a": 7}


FITS: list[tuple[str, Graph]] = [
    ("mended", WAS.step("e", lambda: 1)),
    ("what has not run is gone", Graph("g").step("a", lambda: 1).step("b", lambda a: a, after=("a",))),
    (
        "what has not run is another",
        Graph("g")
        .step("a", lambda: 1)
        .step("b", lambda a: a, after=("a",))
        .step("c", lambda a, b: [a, b], after=("a", "b"), version="9")
        .step("new", lambda c: c, after=("c",))
        .step("d", lambda new: new, after=("new",), effect="pure"),
    ),
    (
        "what completed does something else now",
        Graph("g").step("a", lambda: 100).step("b", lambda a: 100, after=("a",), effect="write"),
    ),
    (
        "another order of writing",
        Graph("g").step("z", lambda: 1).step("a", lambda: 1).step("b", lambda a: a, after=("a",)),
    ),
]


@pytest.mark.parametrize("now", [case[1] for case in FITS[1:]], ids=[case[0] for case in FITS[1:]])
async def test_what_has_not_completed_may_change(store_path: Path, now: Graph) -> None:
    await begin(store_path)
    async with opened(store_path) as runtime:
        outputs = await runtime.run(now, id="x", on_finished="reopen")
        assert list(outputs) == list(now.nodes)
        assert (outputs["a"], outputs["b"]) == (1, 2)
        assert await status(runtime, "x") == "completed"
        # What its caller got is what is saved, even if a step of the older code had failed.
        assert await runtime.run(now, id="x") == outputs


async def test_a_step_that_was_changed_before_it_completed_is_recorded_as_what_completed(store_path: Path) -> None:
    await begin(store_path, Graph("g").step("a", lambda: 1).step("b", fail))
    worker = Worker("SHOP").node("SHOP.PRICE", lambda arguments: 2, effect="read")
    mended = Graph("g").step("a", lambda: 1).node("b", "SHOP.PRICE", after=("a",), version="2")
    async with opened(store_path, workers=[worker]) as runtime:
        with pytest.raises(StepError):
            await runtime.run(mended.step("c", fail, after=("b",)), id="x", on_finished="reopen")
        # The same code again: what completed is what it says.
        outputs = await runtime.run(mended.step("c", lambda b: b, after=("b",)), id="x", on_finished="reopen")
        assert outputs == {"a": 1, "b": 2, "c": 2}
        step = (await runtime.get("x")).step("b")
        assert step is not None
        assert step.type == "SHOP.PRICE"


async def test_f04_results_are_kept_by_name_and_never_by_position(store_path: Path, world: World) -> None:
    def fetch(name: str) -> Any:
        return lambda ctx: f"{name}: {world.act(ctx)}"

    was = Graph("g").step("fetch_a", fetch("a")).step("fetch_b", fetch("b"), after=("fetch_a",))
    was = was.step("end", fail, after=("fetch_b",))
    await begin(store_path, was)
    swapped = Graph("g").step("fetch_b", fetch("b")).step("fetch_a", fetch("a"), after=("fetch_b",))
    async with opened(store_path) as runtime:
        with pytest.raises(RunBlockedError) as caught:
            await runtime.run(swapped, id="x", on_finished="reopen")
        assert set(caught.value.differences) == {
            "step fetch_a is recorded with dependencies [], and now has ['fetch_b']",
            "step fetch_b is recorded with dependencies ['fetch_a'], and now has []",
        }
    assert world.total == 2


async def test_f06_another_graph_under_the_same_id_never_continues_the_old_one(store_path: Path) -> None:
    await begin(store_path, Graph("g").step("old", lambda: 1).step("trade", fail, after=("old",)))
    async with opened(store_path) as runtime:
        new = Graph("g").step("new", lambda: 2).step("trade", lambda new: new, after=("new",))
        with pytest.raises(RunBlockedError):
            await runtime.run(new, id="x", on_finished="reopen")
        assert await states(runtime, "x") == {"old": "completed", "trade": "failed"}


async def test_what_may_have_changed_the_world_binds_the_code_too(store_path: Path) -> None:
    await begin(store_path, Graph("g").step("a", lambda: 1).step("pay", lose, after=("a",), effect="write"))
    async with opened(store_path) as runtime:
        without = Graph("g").step("a", lambda: 1).step("send", lambda: 1, after=("a",))
        with pytest.raises(RunBlockedError) as caught:
            await runtime.run(without, id="x")
        assert caught.value.differences == ("step pay is recorded as unknown, and the graph has no node pay",)
        assert await status(runtime, "x") == "blocked"


async def test_skipped_steps_bind_the_code_as_completed_ones_do(store_path: Path) -> None:
    await begin(store_path, Graph("g").step("a", lambda: 1, when=lambda: False).step("b", fail, when=lambda: True))
    async with opened(store_path) as runtime:
        with pytest.raises(RunBlockedError) as caught:
            await runtime.run(Graph("g").step("b", lambda: 1), id="x", on_finished="reopen")
        assert caught.value.differences == ("step a is recorded as skipped, and the graph has no node a",)


async def test_the_graphs_own_version_is_a_name_for_people(store_path: Path) -> None:
    await begin(store_path, Graph("g", version="1").step("a", fail))
    async with opened(store_path) as runtime:
        assert await runtime.run(Graph("g", version="2").step("a", lambda: 1), id="x", on_finished="reopen") == {"a": 1}
        assert (await runtime.get("x")).version == "1"


# A run that waits for an answer


def asking(question: str, act: str, done: list[str]) -> Graph:
    """An approval, and what it permits."""

    def do() -> str:
        done.append(act)
        return act

    return (
        Graph("asks")
        .step("before", lambda: 1)
        .approval(question, show=lambda before: {"pay": before}, after=("before",))
        .step(act, do, after=(question,), effect="write")
    )


async def test_b12_an_approval_does_not_pass_to_a_node_of_another_name(store_path: Path) -> None:
    done: list[str] = []
    was, now = asking("review", "pay", done), asking("check", "transfer", done)
    async with opened(store_path) as runtime:
        await runtime.run(was, id="x", on_wait="return")
        with pytest.raises(
            RunBlockedError, match="step review is recorded as waiting, and the graph has no node review"
        ):
            await runtime.run(now, id="x", on_wait="return")
        with pytest.raises(DefinitionError, match="step check asks for no approval"):
            await runtime.decide("x", "check", decision="approve", actor="ada")
        assert [wait.step for wait in (await runtime.get("x")).waits] == ["review"], "whose it is stays named"
        await runtime.decide("x", decision="approve", actor="ada")
        with pytest.raises(
            RunBlockedError, match="step review is recorded as completed, and the graph has no node review"
        ):
            await runtime.run(now, id="x", on_wait="return")
        assert done == []
        assert (await runtime.run(was, id="x"))["pay"] == "pay"
    assert done == ["pay"]
