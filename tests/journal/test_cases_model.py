"""How a model call may end, and what that means for the next run (cases 4, 5, 6 and 13)."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import anyio
import pytest

from ditto import (
    DittoError,
    EffectNotMade,
    ModelRequest,
    OutputError,
    Runtime,
    StoreDamagedError,
    Tool,
    TurnContext,
    UnknownOutcomeError,
)
from ditto.config import InferWorkerConfig, WorkersConfig
from ditto.journal import run_agent
from ditto.pieces import Piece
from ditto.testing.provider import (
    Call,
    Chunks,
    Drop,
    Failure,
    Raw,
    Reply,
    ScriptedProvider,
    Stall,
    StreamCut,
    Text,
    ToolCalls,
    sse,
)
from ditto.turn import Turn
from tests.engine.scene import on_disk
from tests.journal.scene import MODEL, PUBLISH, TURN, Effects, agents, calls, request, talk

pytestmark = pytest.mark.asyncio

WAYS = pytest.mark.parametrize("way", ["turn", "run_agent"])

CALLS = calls(("c1", "publish", "a"))


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "ditto.db"


def run_id(way: str) -> str:
    return TURN.run_id if way == "turn" else Turn("agent", "t", "1", "any").run_id


async def act(runtime: Runtime, effects: Effects, way: str, *, stream: bool = False) -> str:
    """Run the agent, once or once more."""
    if way == "turn":
        return await runtime.turn(TURN, lambda ctx: talk(ctx, request(stream=stream)))
    publish = effects.tool("publish")
    return (await run_agent(runtime, "go", model=MODEL, tools=[publish], thread="t", turn="1", stream=stream)).text


def first_call(way: str) -> str:
    return "m/1" if way == "turn" else "1/sample"


# 1: text before the commit, tools after


@WAYS
async def test_j01_text_of_a_stream_is_heard_before_the_commit_and_its_tool_is_called_after(
    tmp_path: Path, store: Path, way: str
) -> None:
    seen: list[tuple[str, str]] = []

    def note(what: str) -> None:
        seen.append((what, on_disk(store, run_id(way))[first_call(way)]))

    async def handler(arguments: dict[str, Any]) -> str:
        note("tool")
        return "published"

    async def listen(runtime: Runtime) -> None:
        async for heard in runtime.listen(run_id(way), first_call(way)):
            if isinstance(heard, Piece):
                note("text")
                provider.release()
                return

    publish = Tool("publish", handler, PUBLISH)
    answer = ToolCalls(list(CALLS.calls), content="I am on it, and it will not take long.")
    script: list[Reply] = [Stall(answer, when="mid_body"), Text("done")]
    async with (
        ScriptedProvider(tmp_path / "model.db", script) as provider,
        agents(store, provider, [publish]) as runtime,
        anyio.create_task_group() as group,
    ):
        effects = Effects()
        turn = asyncio.create_task(act(runtime, effects, way, stream=True))
        await provider.wait_for(stalled=1)
        group.start_soon(listen, runtime)
        assert await turn == "done"
        assert provider.count == 2
    assert seen == [("text", "admitted"), ("tool", "completed")]


# 4: the connection is lost


@WAYS
@pytest.mark.parametrize(
    ("stream", "lost"),
    [
        (False, Drop("before")),
        (False, Drop("after_headers", reset=True)),
        (False, Drop("mid_body", reply=CALLS)),
        (True, Drop("mid_body", reply=CALLS)),
        (True, StreamCut(2, CALLS)),
        (True, Drop("after_headers")),
    ],
)
async def test_j04_a_connection_lost_after_sending_is_unknown_and_no_tool_runs(
    tmp_path: Path, store: Path, way: str, stream: bool, lost: Reply
) -> None:
    effects = Effects()
    async with ScriptedProvider(tmp_path / "model.db", [lost, CALLS, Text("done")]) as provider:
        for _ in range(2):
            async with agents(store, provider, [effects.tool("publish")]) as runtime:
                with pytest.raises(UnknownOutcomeError, match="the model may have answered") as unknown:
                    await act(runtime, effects, way, stream=stream)
                assert unknown.value.steps == (first_call(way),)
                assert (await runtime.get(run_id(way))).status == "unknown"
            assert (provider.count, effects.done) == (1, [])
        async with agents(store, provider, [effects.tool("publish")], on_unknown_model_call="ask_again") as runtime:
            assert await act(runtime, effects, way, stream=stream) == "done"
        assert provider.count == 3
    assert effects.done == [("publish", "a")]


# 5: what the provider says no to


@WAYS
@pytest.mark.parametrize("status", [400, 401, 429, 500, 502, 503])
async def test_j05_a_refusal_is_recorded_and_the_next_run_asks_again(
    tmp_path: Path, store: Path, way: str, status: int
) -> None:
    effects = Effects()
    script: list[Reply] = [Failure(status), CALLS, Failure(status), Text("done")]
    async with ScriptedProvider(tmp_path / "model.db", script) as provider:
        async with agents(store, provider, [effects.tool("publish")]) as runtime:
            with pytest.raises(EffectNotMade, match=f"answered {status}") as refused:
                await act(runtime, effects, way)
            assert refused.value.code == f"provider.http_{status}"
            step = (await runtime.get(run_id(way))).step(first_call(way))
            assert step is not None
            assert (step.state, step.attempt) == ("refused", 1)
            assert (provider.count, effects.done) == (1, [])
        async with agents(store, provider, [effects.tool("publish")]) as runtime:
            with pytest.raises(EffectNotMade):
                await act(runtime, effects, way)
            assert (provider.count, effects.done) == (3, [("publish", "a")])
            assert await act(runtime, effects, way) == "done"
        assert provider.count == 4
    assert effects.done == [("publish", "a")]


@WAYS
@pytest.mark.parametrize("status", [408, 504])
async def test_j05_somebody_on_the_way_who_stopped_waiting_leaves_it_unknown(
    tmp_path: Path, store: Path, way: str, status: int
) -> None:
    effects = Effects()
    async with ScriptedProvider(tmp_path / "model.db", [Failure(status)]) as provider:
        for _ in range(2):
            async with agents(store, provider, [effects.tool("publish")]) as runtime:
                with pytest.raises(UnknownOutcomeError, match=f"answered {status}"):
                    await act(runtime, effects, way)
        assert (provider.count, effects.done) == (1, [])


@WAYS
async def test_j05_a_connection_that_was_never_made_is_a_refusal(tmp_path: Path, store: Path, way: str) -> None:
    effects = Effects()
    async with ScriptedProvider(tmp_path / "other.db", []) as gone:
        pass
    async with agents(store, gone, [effects.tool("publish")]) as runtime:
        with pytest.raises(EffectNotMade, match="nothing was sent"):
            await act(runtime, effects, way)
    async with (
        ScriptedProvider(tmp_path / "model.db", [CALLS, Text("done")]) as provider,
        agents(store, provider, [effects.tool("publish")]) as runtime,
    ):
        assert await act(runtime, effects, way) == "done"
        assert provider.count == 2
    assert effects.done == [("publish", "a")]


# 6: streams and answers that do not end as they should


def chunk(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    return {"id": "x", "model": "tiny", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


WHOLE_CALL = {"tool_calls": [{"index": 0, "id": "c1", "function": {"name": "publish", "arguments": '{"text": "a"}'}}]}


def stream(*chunks: dict[str, Any], done: bool) -> Chunks:
    return Chunks([sse(chunks, done=done)])


ENDINGS: dict[str, tuple[Reply, str]] = {
    "truncated": (stream(chunk({"content": "Hel"}), chunk(WHOLE_CALL), done=False), "unknown"),
    "torn off": (Chunks([sse([chunk(WHOLE_CALL)], done=False)], drop=True), "unknown"),
    "neither reason nor end mark": (stream(chunk(WHOLE_CALL), chunk({}), done=False), "unknown"),
    "an error part": (
        stream(chunk(WHOLE_CALL), {"error": {"code": 503, "message": "upstream busy"}}, done=True), "refused",
    ),
    "an error part that says timeout": (
        stream(chunk(WHOLE_CALL), {"error": {"code": 504, "message": "upstream timed out"}}, done=True), "unknown",
    ),
    "unknown finish": (stream(chunk(WHOLE_CALL), chunk({}, "sparkling"), done=True), "failed"),
    "two finishes": (stream(chunk(WHOLE_CALL), chunk({}, "stop"), chunk({}, "length"), done=True), "failed"),
}  # fmt: skip


@WAYS
@pytest.mark.parametrize("ending", ENDINGS)
async def test_j06_a_stream_that_does_not_end_properly_releases_no_tool(
    tmp_path: Path, store: Path, way: str, ending: str
) -> None:
    effects = Effects()
    reply, state = ENDINGS[ending]
    raised: dict[str, type[DittoError]] = {
        "unknown": UnknownOutcomeError, "refused": EffectNotMade, "failed": OutputError,
    }  # fmt: skip
    async with ScriptedProvider(tmp_path / "model.db", [reply, reply]) as provider:
        for tries in (1, 2):
            async with agents(store, provider, [effects.tool("publish")]) as runtime:
                with pytest.raises(raised[state]):
                    await act(runtime, effects, way, stream=True)
                step = (await runtime.get(run_id(way))).step(first_call(way))
                assert step is not None
                assert step.state == state
                if state == "failed":
                    assert "publish" in step.output["body"], "what was received is kept"
            # Only what was refused is asked for again: the model decided, or may have decided, the others.
            assert provider.count == (tries if state == "refused" else 1)
    assert effects.done == []


@WAYS
@pytest.mark.parametrize(
    "body", ["<!doctype html><title>Sign in</title>", '{"choices": []}', '{"choices": [{"message":']
)
async def test_j06_an_answer_that_is_none_is_kept_and_never_asked_for_again(
    tmp_path: Path, store: Path, way: str, body: str
) -> None:
    effects = Effects()
    async with ScriptedProvider(tmp_path / "model.db", [Raw(body)]) as provider:
        for _ in range(2):
            async with agents(store, provider, [effects.tool("publish")]) as runtime:
                with pytest.raises(OutputError) as invalid:
                    await act(runtime, effects, way)
                assert invalid.value.code == "provider.invalid_answer"
                step = (await runtime.get(run_id(way))).step(first_call(way))
                assert step is not None
                assert step.output["body"] == body
        assert provider.count == 1
    assert effects.done == []


# 13: too large, missing, altered


@WAYS
async def test_j13_an_answer_that_is_too_large_is_invalid_and_never_asked_for_again(
    tmp_path: Path, store: Path, way: str
) -> None:
    effects = Effects()
    large = ToolCalls([Call("c1", "publish", json.dumps({"text": "x" * 5_000}))])
    workers = WorkersConfig(infer=InferWorkerConfig(response_max_bytes=2_048))
    async with ScriptedProvider(tmp_path / "model.db", [large]) as provider:
        for _ in range(2):
            async with agents(store, provider, [effects.tool("publish")], workers=workers) as runtime:
                with pytest.raises(OutputError, match=r"longer than 2048 bytes; raise workers\.infer\."):
                    await act(runtime, effects, way)
        assert provider.count == 1
    assert effects.done == []


@WAYS
async def test_j13_an_answer_above_the_limit_of_values_is_invalid_and_never_asked_for_again(
    tmp_path: Path, store: Path, way: str
) -> None:
    effects = Effects()
    large = ToolCalls([Call("c1", "publish", json.dumps({"text": "x" * 5_000}))])
    async with ScriptedProvider(tmp_path / "model.db", [large]) as provider:
        for _ in range(2):
            async with agents(store, provider, [effects.tool("publish")], value_max_bytes=4_096) as runtime:
                with pytest.raises(OutputError, match=r"the limit is 4096 \(runtime.value_max_bytes\)"):
                    await act(runtime, effects, way)
        assert provider.count == 1
    assert effects.done == []


def remove(db: sqlite3.Connection, value: int) -> None:
    db.execute("PRAGMA foreign_keys=OFF")
    db.execute("DELETE FROM ditto_values WHERE id = ?", (value,))


def alter(db: sqlite3.Connection, value: int) -> None:
    db.execute("UPDATE ditto_values SET body = replace(body, 'tool', 'TOOL') WHERE id = ?", (value,))
    assert db.execute("SELECT changes()").fetchone() == (1,)


FAULTS: dict[str, tuple[Callable[[sqlite3.Connection, int], None], str, str]] = {
    "missing": (remove, "store.value_missing", "is missing from ditto_values"),
    "altered": (alter, "store.value_altered", "is not what was stored"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("finished", [False, True])
async def test_j13_an_answer_that_is_missing_or_altered_is_named_and_not_asked_for_again(
    tmp_path: Path, store: Path, fault: str, finished: bool
) -> None:
    """However short it is; a finished turn that is replayed, too."""
    effects = Effects()
    spoil, code, text = FAULTS[fault]

    async def agent(ctx: TurnContext) -> Any:
        await talk(ctx, request())
        return object()

    script: list[Reply] = [CALLS, Text("done") if finished else Failure(500), Text("again"), Text("again")]
    async with ScriptedProvider(tmp_path / "model.db", script) as provider:
        async with agents(store, provider, [effects.tool("publish")]) as runtime:
            try:
                await runtime.turn(TURN, agent)
            except EffectNotMade:
                assert not finished
        with closing(sqlite3.connect(store, isolation_level=None)) as db:
            [(value,)] = db.execute(
                "SELECT id FROM ditto_values WHERE body LIKE '%\"tool_calls\":[{%' AND body LIKE '%status%'"
            ).fetchall()
            spoil(db, value)
        before = provider.count
        for _ in range(2):
            async with agents(store, provider, [effects.tool("publish")]) as runtime:
                with pytest.raises(StoreDamagedError, match=text) as raised:
                    await runtime.turn(TURN, agent)
                assert raised.value.code == code
        assert provider.count == before == 2
    assert effects.done == [("publish", "a")]


async def test_j13_a_message_of_a_loop_that_is_altered_is_named(tmp_path: Path, store: Path) -> None:
    effects = Effects()
    async with ScriptedProvider(tmp_path / "model.db", [CALLS, Failure(500), Text("again")]) as provider:
        async with agents(store, provider, [effects.tool("publish")]) as runtime:
            with pytest.raises(EffectNotMade):
                await act(runtime, effects, "run_agent")
        with closing(sqlite3.connect(store, isolation_level=None)) as db:
            [(value,)] = db.execute('SELECT id FROM ditto_values WHERE body LIKE \'{"role":"assistant"%\'').fetchall()
            alter(db, value)
        async with agents(store, provider, [effects.tool("publish")]) as runtime:
            with pytest.raises(StoreDamagedError, match="is not what was stored"):
                await act(runtime, effects, "run_agent")
        assert provider.count == 2
    assert effects.done == [("publish", "a")]


async def test_j13_an_answer_of_a_client_of_ones_own_that_cannot_be_stored_is_invalid(
    tmp_path: Path, store: Path
) -> None:
    asked = 0

    async def ask(ctx: Any) -> Any:
        nonlocal asked
        asked += 1
        return {"text": float("nan")}

    async with ScriptedProvider(tmp_path / "model.db", []) as provider, agents(store, provider) as runtime:
        for _ in range(2):
            with pytest.raises(OutputError, match=r"\.text: is nan"):
                await runtime.turn(TURN, lambda ctx: ctx.ask(ModelRequest("mine", {"messages": []}), ask))
    assert asked == 1
