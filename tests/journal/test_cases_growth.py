"""What a journal costs as it grows (case 25): the benchmark's counts, on fewer entries."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import journal

pytestmark = pytest.mark.asyncio


async def test_j25_an_entry_costs_the_same_however_many_there_are(tmp_path: Path) -> None:
    assert await journal.bytes_per_entry(tmp_path / "ditto.db", 1_000) <= 1.1


@pytest.mark.sweep
async def test_j25_ten_thousand_entries(tmp_path: Path) -> None:
    assert await journal.bytes_per_entry(tmp_path / "ditto.db", 10_000) <= 1.1


async def test_j25_each_message_of_a_growing_conversation_is_stored_once(tmp_path: Path) -> None:
    rows, growth = await journal.conversation(tmp_path / "ditto.db", 64)
    assert rows == 1
    assert growth < 1.5, "what is bound for a round does not follow the length of the history"


@pytest.mark.parametrize("history", [1, 200])
async def test_j25_a_round_costs_two_flushes_whatever_the_history_is(tmp_path: Path, history: int) -> None:
    assert await journal.flushes_per_round(tmp_path / "ditto.db", history, 20) <= 2


async def test_j25_a_finished_agent_of_a_hundred_calls_asks_and_does_nothing_again(tmp_path: Path) -> None:
    _, requests, effects = await journal.replay(tmp_path)
    assert (requests, effects) == (0, 0)
