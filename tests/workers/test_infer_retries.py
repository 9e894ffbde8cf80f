"""Model calls that are tried again by policy: how often, when, and when no more, against a real HTTP server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest

from ditto import Config, EffectNotMade, Endpoint, Graph, Retry, Runtime, UnknownOutcomeError, create_ditto
from ditto.config import ProviderConfig, RuntimeConfig
from ditto.testing.provider import Chunks, Failure, Reply, ScriptedProvider, Stall, Text
from ditto_workers import create_infer_worker
from tests.engine.scene import HANGS_S, MovedClock, events, states, story, told

pytestmark = pytest.mark.asyncio

ASK = {"model": "scripted/tiny", "messages": [{"role": "user", "content": "hi"}]}


@asynccontextmanager
async def asking(
    folder: Path, scripted: ScriptedProvider, clock: MovedClock | None = None, **settings: Any
) -> AsyncIterator[Runtime]:
    config = Config(
        endpoints={"scripted": Endpoint(base_url=scripted.base_url)},
        providers={"scripted": ProviderConfig()},
        runtime=RuntimeConfig(**settings),
    )
    runtime = create_ditto(config, store=folder / "d.db", workers=[create_infer_worker()], clock=clock)
    async with asyncio.timeout(HANGS_S), runtime:
        yield runtime


def sampled(retry: Retry | None, **options: Any) -> Graph:
    return Graph("ask").node("sampled", "INFER.REASONING.SAMPLE", retry=retry, **options)


def script(folder: Path, *replies: Reply, **options: Any) -> ScriptedProvider:
    return ScriptedProvider(folder / "model.sqlite", list(replies), repeat_last=True, **options)


async def waits_of(runtime: Runtime, run_id: str = "x") -> list[tuple[float, int]]:
    """Each wait of a run before another attempt: how long, and until when."""
    bodies = [event.body for event in await events(runtime, run_id) if event.kind == "step_retrying"]
    return [(body["delay_s"], body["due_at"]) for body in bodies]


@pytest.mark.parametrize(
    ("retry", "tries"), [(Retry(3, initial_s=0.01, jitter=0), 3), (None, 1)], ids=["three", "none"]
)
async def test_a07_the_provider_sees_as_many_requests_as_the_policy_says(
    tmp_path: Path, retry: Retry | None, tries: int
) -> None:
    async with script(tmp_path, Failure(500, "down")) as scripted, asking(tmp_path, scripted) as runtime:
        with pytest.raises(EffectNotMade, match="answered 500: down") as caught:
            await runtime.run(sampled(retry), ASK, id="x")
        assert caught.value.code == "provider.http_500"
        told_of = [event for event in await events(runtime, "x") if event.kind.startswith("step_")]
        attempts = [event.body["attempt"] for event in told_of if event.kind == "step_admitted"]
        assert attempts == list(range(1, tries + 1))
        assert [waited for waited, _ in await waits_of(runtime)] == [0.01, 0.02][: tries - 1]
        assert told_of[-1].kind == "step_refused"
        assert scripted.count == tries


@pytest.mark.parametrize("status", [400, 401, 404, 422])
async def test_a_refusal_that_would_come_again_is_not_asked_for_again(tmp_path: Path, status: int) -> None:
    async with script(tmp_path, Failure(status, "no")) as scripted, asking(tmp_path, scripted) as runtime:
        with pytest.raises(EffectNotMade, match=f"answered {status}"):
            await runtime.run(sampled(Retry(5, initial_s=0)), ASK, id="x")
        assert scripted.count == 1


AHEAD = timedelta(seconds=6)
"""A date in a header has whole seconds only."""


@pytest.mark.parametrize(
    ("headers", "delay_s"),
    [
        ({"Retry-After": "2"}, 2),
        ({"Retry-After": "1.5"}, 1.5),
        ({"Retry-After": "date ahead"}, None),
        ({"Retry-After": "date past"}, 0.25),
        ({"Retry-After": "-3"}, 0.25),
        ({"Retry-After": "soon"}, 0.25),
        ({"Retry-After": ""}, 0.25),
        ({"retry-after-ms": "1250", "Retry-After": "2"}, 1.25),
        ({}, 0.25),
    ],
    ids=str,
)
async def test_m01_what_the_provider_asks_for_is_waited(
    tmp_path: Path, headers: dict[str, str], delay_s: float | None, looking: None
) -> None:
    clock, now = MovedClock(), datetime.now(UTC)
    dates = {"date ahead": now + AHEAD, "date past": now - AHEAD}
    headers = {
        name: format_datetime(dates[text], usegmt=True) if text in dates else text for name, text in headers.items()
    }
    graph = sampled(Retry(2, initial_s=0.25, max_s=10, jitter=0))
    async with script(tmp_path, Failure(429, "slow down", headers=headers), Text("hello")) as scripted:
        async with asking(tmp_path, scripted, clock) as runtime:
            running = asyncio.ensure_future(runtime.run(graph, ASK, id="x"))
            await told(runtime, "x", "step_retrying")
            [(waited, due_us)] = await waits_of(runtime)
            assert waited == delay_s if delay_s is not None else 0.25 < waited <= AHEAD.total_seconds()
            assert abs(due_us - clock.at - waited * 1_000_000) <= 500  # the event shows milliseconds
            clock.at = due_us
            assert (await running)["sampled"]["message"]["content"] == "hello"
        assert scripted.count == 2


async def test_m01_the_wait_survives_a_restart(tmp_path: Path, looking: None) -> None:
    clock = MovedClock()
    graph = sampled(Retry(2, max_s=1_000))
    busy = Failure(429, "slow down", headers={"Retry-After": "600"})
    async with script(tmp_path, busy, Text("hello")) as scripted:
        async with asking(tmp_path, scripted, clock) as runtime:
            running = asyncio.ensure_future(runtime.run(graph, ASK, id="x"))
            await told(runtime, "x", "step_retrying")
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
        clock.move(200)
        async with asking(tmp_path, scripted, clock) as runtime:
            running = asyncio.ensure_future(runtime.run(graph, ASK, id="x"))
            await told(runtime, "x", "run_resumed")
            clock.move(399)
            await clock.looked_at()
            assert scripted.count == 1
            clock.move(1)
            assert (await running)["sampled"]["message"]["content"] == "hello"
            assert [waited for waited, _ in await waits_of(runtime)] == [600]
        assert scripted.count == 2


async def test_m01_too_long_a_wait_fails_at_once_and_says_so(tmp_path: Path) -> None:
    busy = Failure(429, "slow down", headers={"Retry-After": "999999"})
    async with script(tmp_path, busy) as scripted, asking(tmp_path, scripted) as runtime:
        with pytest.raises(EffectNotMade, match="asked to wait 999999 s, the limit is 10 s") as caught:
            await runtime.run(sampled(Retry(5, max_s=10)), ASK, id="x")
        assert (caught.value.code, caught.value.retry_after_s) == ("provider.http_429", 999999)
        assert scripted.count == 1
        # The same from the record.
        with pytest.raises(EffectNotMade, match="asked to wait 999999 s, the limit is 10 s") as caught:
            await runtime.run(sampled(Retry(5, max_s=10)), ASK, id="x")
        assert caught.value.retry_after_s == 999999


async def test_m01_twenty_runs_that_are_refused_at_once_do_not_come_back_at_once(tmp_path: Path) -> None:
    replies: list[Reply] = [*[Failure(429, "slow down")] * 20, Text("hello")]
    async with script(tmp_path, *replies) as scripted, asking(tmp_path, scripted) as runtime:
        graph = sampled(Retry(5, initial_s=0.1, jitter=1))
        await asyncio.gather(*(runtime.run(graph, ASK, id=f"x{number}") for number in range(20)))
        first = [waited for number in range(20) for waited, _ in (await waits_of(runtime, f"x{number}"))[:1]]
    assert len(first) > 10
    assert len(set(first)) > 5


@pytest.mark.parametrize("policy", ["stop", "ask_again"])
@pytest.mark.parametrize("reply", ["nothing", "comments"])
async def test_e11_a_silent_provider_costs_no_more_than_the_total(
    tmp_path: Path, reply: str, policy: Any, looking: None
) -> None:
    """By the clock of the record, each request takes 1,000 s; each is cut at the deadline of its attempt."""
    clock = MovedClock()
    replies: dict[str, Reply] = {
        "nothing": Stall(),
        "comments": Chunks([b": keep-alive\n\n"] * 10_000, pauses_ms=[5] * 10_000),
    }
    stream = {**ASK, "stream": True} if reply == "comments" else ASK
    retry = Retry(100, initial_s=0, total_s=1_500)
    async with (
        script(tmp_path, replies[reply]) as scripted,
        asking(tmp_path, scripted, clock, on_unknown_model_call=policy) as runtime,
    ):

        async def pass_the_time() -> None:
            seen = 0
            while True:
                await scripted.wait_for(arrived=seen + 1)
                seen += 1
                clock.move(1_000)

        passing = asyncio.ensure_future(pass_the_time())
        with pytest.raises((EffectNotMade, UnknownOutcomeError)) as caught:
            await runtime.run(sampled(retry, timeout_s=0.3), stream, id="x")
        passing.cancel()
        requests = scripted.count
        if reply == "comments" and policy == "stop":
            # It began to answer, so whether it was paid for is not known: that is for nobody to ask again.
            assert (requests, await states(runtime, "x")) == (1, {"sampled": "unknown"})
            return
        tries = "1 try was made" if requests == 1 else f"{requests} tries were made"
        assert f"total deadline of 1500 s: {tries}" in str(caught.value)
        assert 1 <= requests <= 3
        assert (await story(runtime, "x")).count("step_admitted sampled") == requests
