"""Receipts of a turn's tool calls, handed to whoever keeps them outside of the store."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ditto import ConfigError, ReceiptEvent, StepError
from ditto.journal import SavedCall, SavedTurn, replay_saved_turn
from ditto.testing.provider import Reply, ScriptedProvider, Text
from tests.journal.scene import TURN, Effects, agents, calls, request, talk

pytestmark = pytest.mark.asyncio

SCRIPT: list[Reply] = [
    calls(("c1", "publish", "a"), ("c2", "publish", "b")),
    calls(("c3", "publish", "c")),
    Text("done"),
]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "ditto.db"


async def test_each_receipt_is_handed_over_before_the_model_is_asked_again(tmp_path: Path, store: Path) -> None:
    effects = Effects()
    seen: list[tuple[str, int]] = []
    async with (
        ScriptedProvider(tmp_path / "model.db", SCRIPT) as provider,
        agents(store, provider, [effects.tool("publish")]) as runtime,
    ):

        async def keep(event: ReceiptEvent) -> None:
            seen.append((event.tool_call_id, provider.count))
            receipt = json.loads(event.receipt_json)
            assert (receipt["tool"], receipt["outcome"], receipt["key"]) == ("publish", "allow", event.operation_key)

        assert await runtime.turn(TURN, lambda ctx: talk(ctx, request()), on_receipt=keep) == "done"
        lines = [line async for line in runtime.receipts(TURN.run_id)]
    assert seen == [("c1", 1), ("c2", 1), ("c3", 2)]
    assert [json.loads(line)["kind"] for line in lines].count("model") == 3


async def test_j15_a_sink_that_raises_fails_the_turn_and_gets_the_same_bytes_again(tmp_path: Path, store: Path) -> None:
    effects = Effects()
    kept: list[str] = []
    broken = True

    def keep(event: ReceiptEvent) -> None:
        kept.append(event.receipt_json)
        if broken and event.tool_call_id == "c2":
            raise OSError("the disk is gone")

    async with ScriptedProvider(tmp_path / "model.db", SCRIPT) as provider:
        async with agents(store, provider, [effects.tool("publish")]) as runtime:
            with pytest.raises(StepError, match="the disk is gone"):
                await runtime.turn(TURN, lambda ctx: talk(ctx, request()), on_receipt=keep)
        assert provider.count == 1
        broken = False
        async with agents(store, provider, [effects.tool("publish")]) as runtime:
            assert await runtime.turn(TURN, lambda ctx: talk(ctx, request()), on_receipt=keep) == "done"
        assert provider.count == 3
    assert kept[:2] == kept[2:4]
    assert len(set(kept)) == 3
    assert len(effects.done) == 3


async def test_a_bridge_hands_over_receipts_too(tmp_path: Path, store: Path) -> None:
    effects = Effects()
    publish = effects.tool("publish")
    kept: list[ReceiptEvent] = []
    saved = SavedTurn("thread-1", "turn-1", (SavedCall("c1", "publish", {"text": "a"}),))
    async with ScriptedProvider(tmp_path / "model.db", []) as provider, agents(store, provider, [publish]) as runtime:
        await replay_saved_turn(saved, runtime, [publish], namespace="review", on_receipt=kept.append)
    assert [event.tool_call_id for event in kept] == ["c1"]


async def test_a_store_that_keeps_no_receipts_says_so(tmp_path: Path, store: Path) -> None:
    async with (
        ScriptedProvider(tmp_path / "model.db", []) as provider,
        agents(store, provider, receipts=False) as runtime,
    ):
        with pytest.raises(ConfigError, match=r"store\.receipts"):
            await runtime.turn(TURN, lambda ctx: talk(ctx, request()), on_receipt=print)
