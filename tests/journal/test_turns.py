"""Turns: what is recorded is answered from the record, what is not is made once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ditto import ReplayMismatchError, RunCancelledError, StepError, TurnContext
from ditto.contracts import Message
from ditto.testing.provider import Failure, Reply, ScriptedProvider, Text
from tests.journal.scene import TURN, Effects, agents, calls, request, talk

pytestmark = pytest.mark.asyncio


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "ditto.db"


async def test_a_turn_asks_and_acts_once_and_returns_what_was_saved(tmp_path: Path, store: Path) -> None:
    effects = Effects()
    script: list[Reply] = [calls(("c1", "publish", "hello")), Text("done")]
    async with ScriptedProvider(tmp_path / "model.db", script) as provider:
        for _ in range(2):
            async with agents(store, provider, [effects.tool("publish")]) as runtime:
                assert await runtime.turn(TURN, lambda ctx: talk(ctx, request())) == "done"
        assert provider.count == 2
    assert effects.done == [("publish", "hello")]


async def test_a_round_costs_two_flushes_after_the_first(tmp_path: Path, store: Path) -> None:
    effects = Effects()
    rounds = 20
    script: list[Reply] = [calls((f"c{n}", "publish", str(n)), (f"d{n}", "publish", str(n))) for n in range(rounds)]
    async with (
        ScriptedProvider(tmp_path / "model.db", [*script, Text("done")]) as provider,
        agents(store, provider, [effects.tool("publish")]) as runtime,
    ):
        await runtime.turn(replace(TURN, max_concurrency=2), lambda ctx: talk(ctx, request()))
        # The creation, the first admission, two for each round, the last answer with the end.
        assert runtime.commits <= 2 + 2 * rounds + 1
    assert len(effects.done) == 2 * rounds


async def test_another_prompt_is_a_conflict_and_touches_nothing(tmp_path: Path, store: Path) -> None:
    effects = Effects()
    script: list[Reply] = [calls(("c1", "publish", "hello")), Failure(500)]
    async with ScriptedProvider(tmp_path / "model.db", script) as provider:
        async with agents(store, provider, [effects.tool("publish")]) as runtime:
            with pytest.raises(StepError):
                await runtime.turn(TURN, lambda ctx: talk(ctx, request()))
        async with agents(store, provider, [effects.tool("publish")]) as runtime:
            with pytest.raises(ReplayMismatchError, match=r"messages\[0\].content"):
                await runtime.turn(TURN, lambda ctx: talk(ctx, request(Message(role="user", content="other"))))
            with pytest.raises(ReplayMismatchError, match="temperature"):
                await runtime.turn(TURN, lambda ctx: talk(ctx, request(temperature=0.5)))
        assert provider.count == 2
    assert effects.done == [("publish", "hello")]


async def test_a_turn_raises_what_its_function_raises(tmp_path: Path, store: Path) -> None:
    """The very exception, not one rebuilt from the record: a framework's own errors are caught by its users."""

    class Broken(Exception):
        pass

    async def breaks(ctx: object) -> None:
        raise Broken("a user's own")

    async with ScriptedProvider(tmp_path / "model.db", []) as provider, agents(store, provider) as runtime:
        with pytest.raises(Broken, match="a user's own"):
            await runtime.turn(TURN, breaks)
        info = await runtime.get(TURN.run_id)
        assert info.status == "failed"
        assert info.error is not None
        assert info.error.error_type == "Broken"


async def test_a_run_that_is_cancelled_while_an_outcome_is_carried_says_so(tmp_path: Path, store: Path) -> None:
    effects = Effects()
    script: list[Reply] = [calls(("c1", "publish", "hello")), Text("done")]
    async with (
        ScriptedProvider(tmp_path / "model.db", script) as provider,
        agents(store, provider, [effects.tool("publish")]) as runtime,
        agents(store, provider) as other,
    ):

        async def cut(ctx: TurnContext) -> str:
            sample = await ctx.sample(request())
            await other.cancel(TURN.run_id, actor="ada", reason="no more")
            await ctx.call("publish", sample.message.tool_calls[0].id, {"text": "hello"})
            return "done"

        with pytest.raises(RunCancelledError):
            await runtime.turn(TURN, cut)
    assert effects.done == []
