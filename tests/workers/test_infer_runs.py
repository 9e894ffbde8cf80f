"""Model steps in runs, against a real HTTP server: who tries again, and how often."""

from __future__ import annotations

from pathlib import Path

import pytest

from ditto import Config, Endpoint, Graph, Retry, StepError, create_ditto
from ditto.testing.provider import Failure, ScriptedProvider
from ditto_workers import create_infer_worker


@pytest.mark.asyncio
@pytest.mark.parametrize("attempts", [None, 1, 3])
async def test_a07_only_the_policy_of_the_node_asks_again(tmp_path: Path, attempts: int | None) -> None:
    """Neither the HTTP client nor the worker tries again by itself: the provider sees what the history tells."""
    retry = None if attempts is None else Retry(attempts, initial_s=0)
    ask = Graph("ask").node(
        "sampled",
        "INFER.REASONING.SAMPLE",
        bind=lambda: {"model": "scripted/tiny", "messages": [{"role": "user", "content": "hi"}]},
        retry=retry,
    )
    async with ScriptedProvider(tmp_path / "model.db", [Failure(500, "overloaded")], repeat_last=True) as provider:
        config = Config(endpoints={"scripted": Endpoint(base_url=provider.base_url)})
        async with create_ditto(config, store=tmp_path / "ditto.db", workers=[create_infer_worker()]) as runtime:
            with pytest.raises(StepError, match="500") as failed:
                await runtime.run(ask, id="x")
            events = [event async for event in runtime.events("x")]
        assert provider.count == (attempts or 1)
    assert failed.value.code == "provider.http_500"
    told = [(event.kind, event.body) for event in events if event.step == "sampled"]
    admitted = [body["attempt"] for kind, body in told if kind == "step_admitted"]
    assert admitted == list(range(1, (attempts or 1) + 1))
    retried = [(body["attempt"], body["code"], body["delay_s"]) for kind, body in told if kind == "step_retrying"]
    assert retried == [(number, "provider.http_500", 0) for number in range(1, attempts or 1)]
