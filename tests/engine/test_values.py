"""Values: what goes in is what comes out, for every reader, now and after a restart; nobody shares."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ditto import Graph, Loop, StepContext, StepError
from tests.engine.scene import opened

pytestmark = pytest.mark.asyncio

VALUES: list[Any] = [
    None,
    True,
    0,
    -0.0,
    1.0,
    1e300,
    2**63,
    2**200,
    2**53 + 1,
    "",
    "日本✅é\u2028\x00",
    [],
    {},
    {"b": 1, "a": 2},
    {"": {"": [[], {}]}},
    ["x" * 10_000],
    {"deep": [[[[[[{"a": None}]]]]]]},
]


def same(left: Any, right: Any) -> bool:
    """Equal in value, type and order of keys."""
    return json.dumps(left) == json.dumps(right) and type(left) is type(right)


@pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value)[:20])
@pytest.mark.parametrize("effect", ["pure", "idempotent", "write"])
async def test_a_dependant_sees_the_same_value_in_the_first_run_and_after_a_restart(
    store_path: Path, value: Any, effect: str
) -> None:
    seen: list[Any] = []
    broken = True

    def look(input: Any, a: Any, b: Any) -> Any:
        seen.append([input, a, b])
        if broken:
            raise ValueError("broken")
        return a

    graph = (
        Graph("g")
        .step("a", lambda input: input, effect=effect)
        .step("b", lambda a: {"wrapped": a}, after=("a",), effect=effect)
        .step("c", look, after=("a", "b"), effect="read")
    )
    async with opened(store_path) as runtime:
        with pytest.raises(StepError):
            await runtime.run(graph, value, id="x")
    broken = False
    async with opened(store_path) as runtime:
        outputs = await runtime.run(graph, value, id="x", on_finished="reopen")
    first, second = seen
    assert same(first, [value, value, {"wrapped": value}])
    assert same(second, first)
    assert same(outputs, {"a": value, "b": {"wrapped": value}, "c": value})
    async with opened(store_path) as runtime:
        assert same(await runtime.run(graph, value, id="x"), outputs)


async def test_what_decodes_to_an_equal_value_comes_back_as_plain_data(store_path: Path) -> None:
    class Text(str):
        pass

    class Table(dict[str, Any]):
        pass

    async with opened(store_path) as runtime:
        outputs = await runtime.run(Graph("g").step("a", lambda: Table(name=Text("x")), effect="pure"), id="x")
        assert type(outputs["a"]) is dict
        assert type(outputs["a"]["name"]) is str


@pytest.mark.parametrize("effect", ["pure", "read", "idempotent", "write"])
async def test_g09_what_a_handler_does_to_its_value_afterwards_changes_nothing(store_path: Path, effect: str) -> None:
    kept: list[Any] = []
    seen: list[Any] = []

    async def make() -> Any:
        value = {"items": [1], "more": {"n": 1}}
        kept.append(value)

        async def meddle() -> None:
            for _ in range(50):
                value["items"].append("meddled")  # type: ignore[attr-defined]
                value["more"] = "meddled"
                await asyncio.sleep(0)

        kept.append(asyncio.create_task(meddle()))
        return value

    def spoil(a: Any) -> Any:
        seen.append(json.dumps(a))
        a["items"].append("spoiled")
        a.clear()
        return None

    graph = Graph("g").step("a", make, effect=effect)
    for number in range(4):
        graph = graph.step(f"b{number}", spoil, after=("a",), effect=("pure", "read")[number % 2])
    async with opened(store_path) as runtime:
        outputs = await runtime.run(graph, id="x")
        await kept[1]
        assert outputs["a"] == {"items": [1], "more": {"n": 1}}
        outputs["a"].clear()
        assert (await runtime.run(graph, id="x"))["a"] == {"items": [1], "more": {"n": 1}}
    assert seen == ['{"items": [1], "more": {"n": 1}}'] * 4
    with closing(sqlite3.connect(store_path)) as db:
        (stored,) = db.execute("SELECT output FROM ditto_steps WHERE path = 'a'").fetchone()
    assert json.loads(stored) == {"items": [1], "more": {"n": 1}}


async def test_g09_the_callers_input_is_taken_when_the_run_begins(store_path: Path) -> None:
    given: dict[str, Any] = {"n": [1]}
    seen: list[Any] = []

    async def spoil(input: Any) -> None:
        seen.append(json.dumps(input))
        given["n"].append(2)
        input["n"].append(3)

    graph = Graph("g").step("a", spoil).step("b", spoil, after=("a",)).step("c", spoil, after=("b",))
    async with opened(store_path) as runtime:
        await runtime.run(graph, given, id="x")
        assert seen == ['{"n": [1]}'] * 3
        assert await runtime.run(graph, {"n": [1]}, id="x") is not None


async def test_g09_conditions_and_binds_share_nothing_either(store_path: Path) -> None:
    seen: list[Any] = []

    def spoil(a: Any) -> bool:
        seen.append(json.dumps(a))
        a["n"] = "spoiled"
        return True

    graph = Graph("g").step("a", lambda: {"n": 1}, effect="pure").step("b", spoil, after=("a",), when=spoil)
    async with opened(store_path) as runtime:
        assert (await runtime.run(graph, id="x"))["a"] == {"n": 1}
    assert seen == ['{"n": 1}'] * 2


async def test_g09_a_loops_functions_share_nothing(store_path: Path) -> None:
    def update(state: Any, outputs: Any) -> Any:
        state["n"] += 1
        outputs["a"]["n"] = "spoiled"
        return state

    def done(state: Any) -> bool:
        answer = state["n"] == 3
        state["n"] = 100
        return bool(answer)

    def bind(state: Any) -> Any:
        state["n"] += 100
        return state

    loop = Loop(
        "l",
        graph=Graph("body").step("a", lambda input: input),
        bind=bind,
        update=update,
        done=done,
        max_iterations=5,
    )
    async with opened(store_path) as runtime:
        assert await runtime.loop(loop, {"n": 0}, id="x") == {"n": 3}


async def test_a_large_value_is_stored_once_however_often_it_is_returned(store_path: Path) -> None:
    big = "x" * 100_000
    graph = Graph("g")
    for number in range(10):
        graph = graph.step(f"n{number}", lambda: big)
    async with opened(store_path) as runtime:
        await runtime.run(graph, big, id="x")
        await runtime.run(graph, big, id="y")
    with closing(sqlite3.connect(store_path)) as db:
        assert db.execute("SELECT count(*), sum(length(body)) FROM ditto_values").fetchone() == (1, 100_002)


async def test_record_is_told_the_value_as_it_is_stored(store_path: Path) -> None:
    told: list[Any] = []

    class Name(str):
        pass

    def record(connection: Any, outcome: Any) -> None:
        told.append((outcome.value, type(outcome.value), outcome.key, outcome.run_id, outcome.path))

    def act(input: Any, ctx: StepContext) -> str:
        return Name("mia")

    async with opened(store_path) as runtime:
        await runtime.run(Graph("g").step("a", act, effect="write", record=record), 1, id="x")
    assert told == [("mia", str, "x/1/a", "x", "a")]
