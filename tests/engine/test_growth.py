"""Growth: what a long run costs follows what is added, on disk and when it is taken up again."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ditto import (
    Action,
    Config,
    EffectClass,
    Endpoint,
    Flow,
    FlowContext,
    Graph,
    LimitExceededError,
    Loop,
    NodeHandler,
    Runtime,
    StepContext,
    UnknownOutcomeError,
    Worker,
    create_ditto,
)
from ditto.config import RuntimeConfig
from ditto.store import queries
from ditto.testing.provider import ScriptedProvider, Text
from ditto_workers import create_infer_worker
from tests.engine.scene import opened

pytestmark = pytest.mark.asyncio

SAID = "q" * 500
ANSWERED = "a" * 500
TURN = 1_000
"""Bytes of text in a turn: a question and its answer."""


def messages(said: Any) -> dict[str, Any]:
    return {"model": "scripted/tiny", "messages": [*said, {"role": "user", "content": SAID}]}


def add_turn(said: Any, output: dict[str, Any]) -> Any:
    turn = ({"role": "user", "content": SAID}, {"role": "assistant", "content": output["message"]["content"]})
    return said.add(*turn) if hasattr(said, "add") else [*said, *turn]


def loop(turns: int) -> Loop:
    return Loop(
        "session",
        graph=Graph("turn").node("asked", "INFER.REASONING.SAMPLE", bind=lambda input: messages(input["said"])),
        update=lambda state, outputs: {"said": add_turn(state["said"], outputs["asked"])},
        done=lambda state: False,
        max_iterations=turns,
        append=("said",),
    )


async def hold_by_loop(runtime: Runtime, turns: int) -> None:
    """In two halves: the second goes on from the record."""
    for so_far in (turns // 2, turns):
        with pytest.raises(LimitExceededError):
            await runtime.loop(loop(so_far), {"said": []}, id="session")


async def hold_by_flow(runtime: Runtime, turns: int) -> None:
    async def talk(ctx: FlowContext, input: Any) -> int:
        said: list[Any] = []
        for number in range(turns):
            said = add_turn(said, await ctx.node(f"ask-{number}", "INFER.REASONING.SAMPLE", messages(said)))
        return len(said)

    assert await runtime.run(Flow("session", talk), None, id="session") == 2 * turns


async def hold_by_turns_of_two(runtime: Runtime, turns: int) -> None:
    """Two conversations in turns: neither displaces the other."""

    async def talk(ctx: FlowContext, input: Any) -> None:
        both: dict[str, list[Any]] = {who: [{"role": "system", "content": who}] for who in "ab"}
        for number in range(turns // 2):
            for who, said in both.items():
                output = await ctx.node(f"{who}-{number}", "INFER.REASONING.SAMPLE", messages(said))
                both[who] = add_turn(said, output)

    await runtime.run(Flow("session", talk), None, id="session")


async def size_bytes(folder: Path, hold: Any, turns: int) -> int:
    """The file of a session of so many turns, after VACUUM."""
    path = folder / "ditto.db"
    async with ScriptedProvider(folder / "model.db", [Text(ANSWERED)], repeat_last=True) as provider:
        config = Config(
            endpoints={"scripted": Endpoint(base_url=provider.base_url)}, runtime=RuntimeConfig(max_iterations=turns)
        )
        async with create_ditto(config, store=path, workers=[create_infer_worker()]) as runtime:
            await hold(runtime, turns)
        asked = [len(request.body["messages"]) for request in provider.requests()]
    assert len(asked) == turns
    assert max(asked) >= turns, "the whole conversation is sent each time"
    with closing(sqlite3.connect(path)) as db:
        db.execute("VACUUM")
        [(pages,)], [(page_bytes,)] = (db.execute(f"PRAGMA {name}").fetchall() for name in ("page_count", "page_size"))
    return int(pages) * int(page_bytes)


@pytest.mark.parametrize("hold", [hold_by_loop, hold_by_flow, hold_by_turns_of_two])
async def test_j01_a_session_costs_what_is_said_in_it(tmp_path: Path, hold: Any) -> None:
    folders = {turns: tmp_path / str(turns) for turns in (100, 200)}
    for folder in folders.values():
        folder.mkdir()
    hundred, two_hundred = [await size_bytes(folder, hold, turns) for turns, folder in folders.items()]
    assert two_hundred / hundred < 2.5
    assert (two_hundred - hundred) / 100 < 3.2 * TURN, "as the reference of the store says"


@pytest.mark.parametrize(("first", "second"), [([1, "a"], [True, "a"]), ([{"n": 0.0}], [{"n": -0.0}, 1])])
async def test_what_is_shared_is_equal_to_the_type(store_path: Path, first: list[Any], second: list[Any]) -> None:
    """1 and True are equal, and what was asked with one of them was not asked with the other."""

    def plan(arguments: Any) -> Action:
        def call(ctx: StepContext) -> None:
            if ctx.path == "b":
                raise ConnectionError("lost, so that what was asked is kept for a person")

        return Action(
            label="ask", effect=EffectClass.WRITE, call=call, is_async=False, arguments=arguments,
            recorded=lambda: {"list": list(arguments)}, growing=("list",),
        )  # fmt: skip

    graph = (
        Graph("twice").node("a", "APP.ASK", bind=lambda: first).node("b", "APP.ASK", after=("a",), bind=lambda: second)
    )
    worker = Worker("APP").with_handler(NodeHandler("APP.ASK", plan))
    async with opened(store_path, workers=[worker]) as runtime:
        with pytest.raises(UnknownOutcomeError):
            await runtime.run(graph, id="x")
        assert runtime._opened is not None
        row = await runtime._opened.store.read(queries.get_step, 1, "b")
        assert row is not None
        assert row.arguments is not None
        assert repr(row.arguments.plain()) == repr({"list": second})
