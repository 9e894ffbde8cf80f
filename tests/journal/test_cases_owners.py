"""Two processes and one turn, a person's decision, and an answer that comes late (cases 11 and 24)."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from ditto import (
    DefinitionError,
    Message,
    RunBusyError,
    RunCancelledError,
    Runtime,
    StepError,
    UnknownOutcomeError,
)
from ditto.contracts import ToolCall
from ditto.journal import run_agent
from ditto.testing.provider import Failure, Reply, ScriptedProvider, Stall, Text
from tests.engine.scene import events, states
from tests.engine.test_ownership_lost import forget_owners
from tests.journal.conftest import Case
from tests.journal.scene import MODEL, TURN, Effects, agents, calls, request, talk
from tests.processes import Child

CALLS = calls(("c1", "publish", "a"))


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "ditto.db"


async def turn(runtime: Runtime) -> str:
    return await runtime.turn(TURN, lambda ctx: talk(ctx, request()))


async def late(runtime: Runtime) -> list[dict[str, Any]]:
    return [event.body for event in await events(runtime, TURN.run_id) if event.kind == "step_returned_late"]


def sample(text: str, *made: ToolCall) -> dict[str, Any]:
    message = Message(role="assistant", content=text, tool_calls=made)
    return {"message": message.model_dump(mode="json"), "finish_reason": "tool_calls" if made else "stop"}


# 11: two processes

PROGRAM = """
import asyncio, json, sys
from pathlib import Path
from ditto import DittoError
from tests.crash.world import World
from tests.journal.program import Agent, open_runtime

async def main(order):
    agent = Agent(order, World(Path(order["world"])))
    async with open_runtime(order, agent) as runtime:
        print("open", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        try:
            print(await agent.run(runtime), flush=True)
        except DittoError as error:
            print(error.code, flush=True)

asyncio.run(main(json.loads(sys.argv[1])))
"""


@pytest.mark.parametrize("way", ["agent", "run_agent"])
def test_j11_of_two_processes_on_one_turn_one_asks_and_the_other_is_told(
    nursery: Any, model: Any, tmp_path: Path, start_child: Any, way: str
) -> None:
    """The second comes while the first is inside its tool, which waits for it."""
    case = Case(nursery, model, tmp_path / "case", way=way)
    case.folder.mkdir()
    order = json.dumps({**case.order, "wait_in": "notify"}, default=str)
    first, second = start_child(PROGRAM, order), start_child(PROGRAM, order)
    for child in (first, second):
        assert child.line() == "open"
    first.tell()
    assert first.line() == "in notify"
    second.tell()
    assert second.line() == "run.busy"
    assert case.requests == 1
    first.tell()
    assert first.line() == "done"
    assert (case.requests, case.effects) == (2, {"notify 0": 1})
    assert case.result() == {"text": "done", "decided": []}


def test_j11_killed_while_the_model_answers_another_process_finds_the_call_unknown(
    nursery: Any, model: Any, tmp_path: Path, start_child: Any
) -> None:
    """From outside, by SIGKILL, at no point of ours; the model has the request by then."""
    case = Case(nursery, model, tmp_path / "case")
    case.folder.mkdir()
    child: Child = start_child(PROGRAM, json.dumps({**case.order, "slow": True}, default=str))
    assert child.line() == "open"
    child.tell()
    while not case.requests:
        time.sleep(0.01)
    child.kill()
    assert case.result(slow=True, decide=False) == {"unknown": ["m/1"]}
    assert case.requests == 1


# 24: what a person decides


async def lose(tmp_path: Path, store: Path, provider: ScriptedProvider, effects: Effects) -> None:
    """A turn whose first model call is lost."""
    async with agents(store, provider, [effects.tool("publish")]) as runtime:
        with pytest.raises(UnknownOutcomeError):
            await turn(runtime)


@pytest.mark.asyncio
async def test_j24_an_attached_response_is_the_models(tmp_path: Path, store: Path) -> None:
    effects = Effects()
    async with ScriptedProvider(tmp_path / "model.db", [Failure(504), Text("done")], strict=True) as provider:
        await lose(tmp_path, store, provider, effects)
        call = ToolCall(id="c7", name="publish", arguments='{"text": "attached"}')
        async with agents(store, provider, [effects.tool("publish")]) as runtime:
            with pytest.raises(DefinitionError, match="use response, ask_again or abandon"):
                await runtime.resolve(TURN.run_id, "m/1", actor="mia", reason="seen", committed={})
            await runtime.resolve(
                TURN.run_id, "m/1", actor="mia", reason="from the provider's log", response=sample("", call), attempt=1
            )
            assert await turn(runtime) == "done"
            resolved = [each for each in await events(runtime, TURN.run_id) if each.kind == "step_resolved"]
            assert [(each.step, each.body["actor"], each.body["decision"]) for each in resolved] == [
                ("m/1", "mia", "response")
            ]
        assert provider.count == 2
    assert effects.done == [("publish", "attached")]


@pytest.mark.asyncio
@pytest.mark.parametrize("way", ["turn", "run_agent"])
async def test_j24_an_abandoned_call_fails_the_turn_for_good(tmp_path: Path, store: Path, way: str) -> None:
    effects = Effects()
    publish = effects.tool("publish")

    async def run(runtime: Runtime) -> Any:
        if way == "turn":
            return await turn(runtime)
        return await run_agent(runtime, "go", model=MODEL, tools=[publish], thread="t", turn="1")

    async with (
        ScriptedProvider(tmp_path / "model.db", [Failure(504)]) as provider,
        agents(store, provider, [publish]) as runtime,
    ):
        with pytest.raises(UnknownOutcomeError) as unknown:
            await run(runtime)
        assert unknown.value.run_id is not None
        await runtime.resolve(
            unknown.value.run_id, unknown.value.steps[0], actor="mia", reason="not worth it", abandon=True
        )
        for _ in range(2):
            with pytest.raises(StepError, match="abandoned by mia: not worth it") as abandoned:
                await run(runtime)
            assert abandoned.value.code == "step.abandoned"
        assert provider.count == 1
    assert effects.done == []


@pytest.mark.asyncio
async def test_j24_a_call_asked_again_is_asked_once_and_the_old_attempt_stays_readable(
    tmp_path: Path, store: Path
) -> None:
    effects = Effects()
    async with ScriptedProvider(tmp_path / "model.db", [Failure(504), CALLS, Text("done")]) as provider:
        await lose(tmp_path, store, provider, effects)
        async with agents(store, provider, [effects.tool("publish")]) as runtime:
            await runtime.resolve(TURN.run_id, "m/1", actor="mia", reason="the provider has no trace", ask_again=True)
            assert provider.count == 1
            assert await turn(runtime) == "done"
            told = [
                (each.kind, each.body["attempt"])
                for each in await events(runtime, TURN.run_id)
                if each.step == "m/1" and each.body
            ]
            expected = {"admitted": 1, "unknown": 1, "resolved": 1, "admitted again": 2, "completed": 2}
            assert told == [(f"step_{kind.split()[0]}", attempt) for kind, attempt in expected.items()]
        assert provider.count == 3
    assert effects.done == [("publish", "a")]


@pytest.mark.asyncio
@pytest.mark.parametrize("attached", [True, False])
async def test_j24_an_original_that_comes_late_is_kept_as_late_and_fenced(
    tmp_path: Path, store: Path, attached: bool
) -> None:
    """Its process lost the turn while the model was answering: another one took it over, and a person decided."""
    effects = Effects()
    script: list[Reply] = [Stall(calls(("late", "publish", "late"))), Text("done")]
    async with (
        ScriptedProvider(tmp_path / "model.db", script) as provider,
        agents(store, provider, [effects.tool("publish")]) as first,
        agents(store, provider, [effects.tool("publish")]) as second,
    ):
        asking = asyncio.create_task(turn(first))
        await provider.wait_for(stalled=1)
        with pytest.raises(RunBusyError, match="being attempted right now"):
            await second.resolve(TURN.run_id, "m/1", actor="mia", reason="too early", ask_again=True)
        forget_owners(store)
        with pytest.raises(UnknownOutcomeError):
            await turn(second)
        if attached:
            await second.resolve(TURN.run_id, "m/1", actor="mia", reason="known", response="attached")
            assert await turn(second) == "attached"
        else:
            await second.resolve(TURN.run_id, "m/1", actor="mia", reason="too slow", ask_again=True)
            assert await turn(second) == "done"
        provider.release()
        with pytest.raises(RunBusyError, match="taken over"):
            await asking
        [kept] = await late(second)
        assert kept["attempt"] == 1
        assert (await second.get(TURN.run_id)).status == "completed"
        assert await turn(second) == ("attached" if attached else "done")
        assert list(await states(second, TURN.run_id)) == ["m/1"]
    assert effects.done == []


@pytest.mark.asyncio
async def test_j24_an_answer_to_a_turn_that_was_cancelled_is_kept_as_late(tmp_path: Path, store: Path) -> None:
    effects = Effects()
    async with (
        ScriptedProvider(tmp_path / "model.db", [Stall(CALLS)]) as provider,
        agents(store, provider, [effects.tool("publish")]) as runtime,
    ):
        asking = asyncio.create_task(turn(runtime))
        await provider.wait_for(stalled=1)
        await runtime.cancel(TURN.run_id, actor="mia", reason="no longer wanted")
        provider.release()
        with pytest.raises(RunCancelledError):
            await asking
        [kept] = await late(runtime)
        assert kept["attempt"] == 1
        assert (await runtime.get(TURN.run_id)).status == "cancelled"
        with pytest.raises(RunCancelledError):
            await turn(runtime)
        assert provider.count == 1
    assert effects.done == []
