"""Receipts of an agent's turn: its model calls by the model, its tool calls by the tool, in one chain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ditto import RunCancelledError, StepError, create_ditto
from ditto.receipts import hash_arguments
from ditto.testing.provider import Reply, ScriptedProvider, Text
from tests.journal.scene import TURN, Effects, agents, calls, request, talk
from tests.receipts.chains import certified

SAID = ("step", "kind", "tool", "outcome", "decision")


def told(path: Path) -> list[tuple[Any, ...]]:
    return [tuple(each[name] for name in SAID) for each in certified(path)]


@pytest.mark.asyncio
async def test_a_turn_is_certified_call_by_call(store_path: Path, tmp_path: Path) -> None:
    effects = Effects()
    script: list[Reply] = [calls(("c1", "publish", "one")), Text("done")]
    async with (
        ScriptedProvider(tmp_path / "provider.db", script) as provider,
        agents(store_path, provider, [effects.tool("publish")]) as runtime,
    ):
        assert await runtime.turn(TURN, lambda ctx: talk(ctx, request())) == "done"
        assert await runtime.turn(TURN, lambda ctx: talk(ctx, request())) == "done"
    assert told(store_path) == [
        ("m/1", "model", "scripted/tiny", "allow", None),
        ("t/c1", "tool", "publish", "allow", None),
        ("m/2", "model", "scripted/tiny", "allow", None),
    ]
    first, tool, second = certified(store_path)
    assert tool["arguments_hash"] == hash_arguments({"text": "one"})
    assert first["arguments_hash"] == hash_arguments(request().model_dump(mode="json"))
    assert second["arguments_hash"] != first["arguments_hash"]


@pytest.mark.asyncio
async def test_an_answer_that_waited_for_the_next_admission_is_certified_though_the_turn_was_cancelled(
    store_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ditto.engine.drive.CARRIED_S", 60.0)
    effects = Effects()

    async def cancelled_between(ctx: Any) -> None:
        await ctx.sample(request())
        assert told(store_path) == [], "it rides with the next admission"
        async with create_ditto(store=store_path) as other:
            await other.cancel(ctx.run_id, actor="ada", reason="enough")
        await ctx.call("publish", "c1", {"text": "one"})

    async with (
        ScriptedProvider(tmp_path / "provider.db", [Text("hello")]) as provider,
        agents(store_path, provider, [effects.tool("publish")]) as runtime,
    ):
        with pytest.raises((StepError, RunCancelledError)):
            await runtime.turn(TURN, cancelled_between)
    assert told(store_path) == [("m/1", "model", "scripted/tiny", "allow", "late")]
    assert effects.done == []
