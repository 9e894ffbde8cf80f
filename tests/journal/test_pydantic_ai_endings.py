"""How a model call of Pydantic AI's may end: refused, unknown or invalid, told apart as by ditto's own worker."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from socket import socket
from typing import Any, cast

import pytest
from pydantic_ai import Agent
from pydantic_ai.exceptions import (
    ConcurrencyLimitExceeded,
    FallbackExceptionGroup,
    ModelAPIError,
    ModelConnectionError,
    ModelHTTPError,
    ModelOverloadedError,
    ModelRateLimitError,
    ModelRequestTimeout,
    ModelServerError,
    UserError,
)
from pydantic_ai.messages import ModelResponse, TextPart
from pydantic_ai.settings import ModelSettings

from ditto import EffectNotMade, OutputError, Turn, UnknownOutcomeError
from ditto.journal.pydantic_ai import DittoDurability
from ditto.journal.pydantic_ai.endings import ResponseLost, check_ending, refusal_of
from ditto.testing.provider import Chunks, Drop, Failure, Raw, Reply, ScriptedProvider, Stall, StreamCut, Text, sse
from tests.journal.pydantic_scene import KEY, durable, openai_model

RUN_ID = Turn(**KEY, model_key="any").run_id


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "ditto.db"


Run = Callable[[Agent[None, str]], Any]


async def generate(agent: Agent[None, str]) -> str:
    return (await agent.run("go")).output


async def stream(agent: Agent[None, str]) -> str:
    async with agent.run_stream("go") as result:
        return await result.get_output()


modes = pytest.mark.parametrize("run", [generate, stream])


def agent_of(runtime: Any, base_url: str, **settings: Any) -> Agent[None, str]:
    sent = cast(ModelSettings, settings)
    return Agent(openai_model(base_url), model_settings=sent, capabilities=[DittoDurability(runtime, **KEY)])


@modes
@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 422, 429, 500, 503])
@pytest.mark.asyncio
async def test_a_refusal_is_definite_and_the_next_run_asks_again(
    tmp_path: Path, store: Path, run: Run, status: int
) -> None:
    """Asked once each time: the client's own retries are off."""
    async with ScriptedProvider(tmp_path / "model.db", [Failure(status), Text("done")]) as provider:
        async with durable(store) as runtime:
            with pytest.raises(EffectNotMade) as refused:
                await run(agent_of(runtime, provider.base_url))
            assert refused.value.code == f"provider.http_{status}"
            assert refused.value.retryable == (status in (409, 429, 500, 503))
            assert (await runtime.get(RUN_ID)).status == "failed"
            assert provider.count == 1
            assert await run(agent_of(runtime, provider.base_url)) == "done"
        assert provider.count == 2


@modes
@pytest.mark.asyncio
async def test_where_nobody_listens_nothing_was_sent(store: Path, run: Run) -> None:
    with closing(socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        async with durable(store) as runtime:
            with pytest.raises(EffectNotMade) as refused:
                await run(agent_of(runtime, f"http://127.0.0.1:{port}/v1"))
    assert refused.value.code == "provider.unreachable"
    assert refused.value.retryable


LOST: list[tuple[str, Reply]] = [
    ("408", Failure(408)),
    ("504", Failure(504)),
    ("cut before", Drop("before")),
    ("cut after the headers", Drop("after_headers")),
    ("cut in the body", Drop("mid_body")),
    ("reset in the body", Drop("mid_body", reset=True)),
]


@modes
@pytest.mark.parametrize("reply", [reply for _, reply in LOST], ids=[name for name, _ in LOST])
@pytest.mark.asyncio
async def test_an_answer_that_is_lost_is_unknown_and_not_asked_for_again(
    tmp_path: Path, store: Path, run: Run, reply: Reply
) -> None:
    async with ScriptedProvider(tmp_path / "model.db", [reply, Text("done")]) as provider:
        for _ in range(2):
            async with durable(store) as runtime:
                with pytest.raises(UnknownOutcomeError) as unknown:
                    await run(agent_of(runtime, provider.base_url))
                assert unknown.value.steps == ("m/1",)
        assert provider.count == 1
        async with durable(store, on_unknown_model_call="ask_again") as runtime:
            assert await run(agent_of(runtime, provider.base_url)) == "done"
        assert provider.count == 2


@modes
@pytest.mark.asyncio
async def test_a_timeout_is_unknown(tmp_path: Path, store: Path, run: Run) -> None:
    async with ScriptedProvider(tmp_path / "model.db", [Stall()]) as provider, durable(store) as runtime:
        with pytest.raises(UnknownOutcomeError, match="m/1"):
            await run(agent_of(runtime, provider.base_url, timeout=0.2))
        assert provider.count == 1


@pytest.mark.asyncio
async def test_a_cut_stream_is_unknown_and_shows_no_tool(tmp_path: Path, store: Path) -> None:
    async with (
        ScriptedProvider(tmp_path / "model.db", [StreamCut(2, Text("This is cut."))]) as provider,
        durable(store) as runtime,
    ):
        with pytest.raises(UnknownOutcomeError):
            await stream(agent_of(runtime, provider.base_url))


def chunk(delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    return {
        "id": "x",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "tiny",
        "choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}],
    }


@pytest.mark.asyncio
async def test_a_stream_that_just_stops_is_unknown_unless_its_provider_always_does(tmp_path: Path, store: Path) -> None:
    """The connection ends cleanly, with an end mark even; but the framework hides those, and gives no reason."""
    reply = Chunks([sse([chunk({"role": "assistant"}), chunk({"content": "hello"})])])
    async with (
        ScriptedProvider(tmp_path / "model.db", [reply, reply]) as provider,
        durable(store) as runtime,
    ):
        with pytest.raises(UnknownOutcomeError, match="without a finish reason"):
            await stream(agent_of(runtime, provider.base_url))
        agent = Agent(
            openai_model(provider.base_url),
            capabilities=[DittoDurability(runtime, **{**KEY, "turn": "turn-2"}, finish_reasons=("",))],
        )
        assert await stream(agent) == "hello"


@modes
@pytest.mark.asyncio
async def test_an_unknown_word_for_the_end_is_invalid(tmp_path: Path, store: Path, run: Run) -> None:
    """Except for the words that the agent was told of."""
    script: list[Reply] = [Text("hello", finish_reason="whatever"), Text("hello", finish_reason="enough")]
    async with ScriptedProvider(tmp_path / "model.db", script) as provider, durable(store) as runtime:
        for _ in range(2):
            with pytest.raises(OutputError) as invalid:
                await run(agent_of(runtime, provider.base_url))
            assert invalid.value.code == "provider.invalid_answer"
        assert provider.count == 1
        step = (await runtime.get(RUN_ID)).step("m/1")
        assert step is not None
        assert "hello" in str(step.output)
        agent = Agent(
            openai_model(provider.base_url),
            capabilities=[DittoDurability(runtime, **{**KEY, "turn": "turn-2"}, finish_reasons=("enough",))],
        )
        assert await run(agent) == "hello"


@pytest.mark.parametrize(
    "reply",
    [Raw("<html>busy</html>", content_type="text/html"), Raw('{"choices": null}'), Raw('{"choices": [')],
    ids=["a page", "no answer", "no JSON"],
)
@pytest.mark.asyncio
async def test_what_is_no_answer_is_invalid_and_not_asked_for_again(tmp_path: Path, store: Path, reply: Raw) -> None:
    async with ScriptedProvider(tmp_path / "model.db", [reply, Text("done")]) as provider:
        for _ in range(2):
            async with durable(store) as runtime:
                with pytest.raises(OutputError) as invalid:
                    await generate(agent_of(runtime, provider.base_url))
                assert invalid.value.code == "provider.invalid_answer"
        assert provider.count == 1


@pytest.mark.asyncio
async def test_what_is_no_stream_is_invalid_and_kept(tmp_path: Path, store: Path) -> None:
    reply = Chunks(["data: {this is no JSON}\n\n"])
    async with ScriptedProvider(tmp_path / "model.db", [reply]) as provider, durable(store) as runtime:
        with pytest.raises(OutputError) as invalid:
            await stream(agent_of(runtime, provider.base_url))
        assert invalid.value.code == "provider.invalid_answer"
        step = (await runtime.get(RUN_ID)).step("m/1")
        assert step is not None
        assert step.output == {"received": "{this is no JSON}"}


@pytest.mark.asyncio
async def test_an_error_in_a_stream_is_the_providers_no(tmp_path: Path, store: Path) -> None:
    """Whatever came before it."""
    reply = Chunks([sse([chunk({"content": "hel"}), {"error": {"message": "overloaded", "type": "server_error"}}])])
    async with ScriptedProvider(tmp_path / "model.db", [reply, Text("done")]) as provider, durable(store) as runtime:
        with pytest.raises(EffectNotMade, match="overloaded"):
            await stream(agent_of(runtime, provider.base_url))
        assert await stream(agent_of(runtime, provider.base_url)) == "done"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ModelHTTPError(502, "tiny"), "provider.http_502"),
        (ModelHTTPError(504, "tiny"), None),
        (ModelHTTPError(200, "tiny"), None),
        (ModelConnectionError("tiny", "x", phase="pool"), "provider.unreachable"),
        (ModelConnectionError("tiny", "x", phase="connect"), "provider.unreachable"),
        (ModelConnectionError("tiny", "x", phase="write"), None),
        (ModelConnectionError("tiny", "x", phase=None), None),
        (ModelRateLimitError("tiny", "x", retry_after=2.0), "provider.error"),
        (ModelOverloadedError("tiny", "x"), "provider.error"),
        (ModelServerError("tiny", "x"), None),
        (ModelServerError("tiny", "x", in_stream=True), "provider.error"),
        (ModelHTTPError(504, "tiny", in_stream=True), "provider.error"),
        (ModelAPIError("tiny", "x", in_stream=True), "provider.error"),
        (ModelRequestTimeout("tiny", 3), None),
        (ModelAPIError("tiny", "x"), None),
        (ConcurrencyLimitExceeded("x"), "provider.unreachable"),
        (UserError("x"), "provider.request"),
        (RuntimeError("x"), None),
        (FallbackExceptionGroup("all", [ModelHTTPError(429, "a"), ModelHTTPError(500, "b")]), "provider.http_500"),
        (FallbackExceptionGroup("all", [ModelHTTPError(429, "a"), ModelHTTPError(504, "b")]), None),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_proves_that_nothing_was_decided(error: Exception, code: str | None) -> None:
    refusal = refusal_of(error)
    assert (refusal and refusal.code) == code
    if isinstance(error, ModelRateLimitError):
        assert refusal is not None
        assert refusal.retry_after_s == 2.0


def test_endings_of_answers() -> None:
    def ends(state: Any = "complete", word: str | None = None, reason: Any = None, **more: Any) -> None:
        details = {} if word is None else {"finish_reason": word}
        response = ModelResponse(
            parts=[TextPart("x")], provider_details={**details, **more}, finish_reason=reason, state=state
        )
        check_ending(response, streamed=True, further_words=())

    ends(word="stop", reason="stop")
    ends(word="eos")
    ends(state="suspended")
    ends(reason="content_filter", refusal="no")
    with pytest.raises(ResponseLost):
        ends(state="incomplete", word="stop", reason="stop")
    with pytest.raises(ResponseLost):
        ends(reason="stop")
    with pytest.raises(OutputError):
        ends(word="whatever")
