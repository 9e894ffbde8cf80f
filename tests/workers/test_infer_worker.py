"""The infer worker: the request that is sent, and how each answer ends, against a real HTTP server."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from pydantic import SecretStr

from ditto import (
    Config,
    EffectClass,
    EffectNotMade,
    EffectRejected,
    Endpoint,
    Message,
    ModelRef,
    OutputError,
    Sample,
    Sandbox,
    StepContext,
    ToolCall,
    ToolOffer,
    Usage,
    WorkerSetup,
)
from ditto.config import InferWorkerConfig, ProviderConfig, WorkersConfig
from ditto.contracts import SampleInput
from ditto.testing.provider import (
    Call,
    Chunks,
    Drop,
    Failure,
    Raw,
    Reply,
    ScriptedProvider,
    Stall,
    Text,
    ToolCalls,
)
from ditto_workers import create_infer_worker
from ditto_workers.infer.arguments import raw_arguments, sent_arguments
from ditto_workers.infer.endings import ResponseLost, retry_after_s
from ditto_workers.infer.openai import OpenAIProvider, open_openai_provider
from ditto_workers.infer.request import build_request

NOW = datetime(2030, 1, 1, tzinfo=UTC)
KEY = "sk-test-0123456789"
ASK = SampleInput(model=ModelRef("scripted", "tiny"), messages=(Message(role="user", content="hi"),))


def config_for(base_url: str, *, api_key: str | None = KEY, **settings: Any) -> Config:
    max_bytes = settings.pop("response_max_bytes", 1024 * 1024)
    return Config(
        endpoints={"scripted": Endpoint(base_url=base_url, api_key=SecretStr(api_key) if api_key else None)},
        providers={"scripted": ProviderConfig(**settings)},
        workers=WorkersConfig(infer=InferWorkerConfig(response_max_bytes=max_bytes)),
    )


def step_context(config: Config, resources: Any = None) -> StepContext:
    return StepContext(
        run_id="r-1",
        path="sampled",
        key="r-1/1/sampled",
        attempt=1,
        config=config,
        sandbox=Sandbox(),
        logger=logging.getLogger("ditto.test"),
        resources=resources,
    )


class Asked:
    """A scripted provider, and the provider that asks it."""

    def __init__(self, scripted: ScriptedProvider, provider: OpenAIProvider) -> None:
        self.scripted = scripted
        self.provider = provider

    def context(self, **settings: Any) -> StepContext:
        return step_context(config_for(self.scripted.base_url, **settings))

    async def sample(self, request: SampleInput = ASK, **settings: Any) -> Sample:
        return await self.provider.sample(request, self.context(**settings))

    def last_body(self) -> Any:
        return self.scripted.requests()[-1].body


@pytest.fixture
def ask(tmp_path: Path) -> Any:
    """`async with ask(reply, …) as asked`"""

    @asynccontextmanager
    async def opened(*script: Reply, **options: Any) -> AsyncIterator[Asked]:
        async with (
            ScriptedProvider(tmp_path / "model.sqlite", list(script), **options) as scripted,
            open_openai_provider() as provider,
        ):
            yield Asked(scripted, provider)

    return opened


def completion(message: dict[str, Any] | None = None, **changes: Any) -> Raw:
    """A whole answer; `changes` go to its choice, but for `usage` and `error`."""
    choice: dict[str, Any] = {"index": 0, "message": {"role": "assistant", "content": "hi", **(message or {})}}
    document: dict[str, Any] = {"id": "r-7", "model": "tiny-1"}
    for name in ("usage", "error"):
        if name in changes:
            document[name] = changes.pop(name)
    return Raw(json.dumps({**document, "choices": [{**choice, "finish_reason": "stop", **changes}]}))


# The plan and the worker


def test_the_action_records_all_that_the_provider_gets_and_no_address() -> None:
    action = create_infer_worker().handlers["INFER.REASONING.SAMPLE"].plan(ASK)
    assert (action.effect, action.is_async, action.output, action.key) == (EffectClass.INFER, True, Sample, None)
    assert action.label == "model scripted/tiny"
    assert action.recorded() == ASK.model_dump(mode="json")


@pytest.mark.asyncio
async def test_the_worker_opens_one_client_and_the_providers_of_ones_own(ask: Any) -> None:
    events: list[str] = []

    class Parrot:
        async def sample(self, request: SampleInput, ctx: StepContext) -> Sample:
            return Sample(message=Message(role="assistant", content=request.messages[-1].content), finish_reason="stop")

    def open_parrot(setup: WorkerSetup) -> AbstractAsyncContextManager[Parrot]:
        @asynccontextmanager
        async def opened() -> AsyncIterator[Parrot]:
            events.append("opened")
            yield Parrot()
            events.append("closed")

        return opened()

    worker = create_infer_worker(providers={"parrot": open_parrot})
    assert worker.resources is not None
    plan = worker.handlers["INFER.REASONING.SAMPLE"].plan
    async with ask(Text("hello")) as asked:
        config = config_for(asked.scripted.base_url)
        setup = WorkerSetup(config=config, sandbox=Sandbox(), logger=logging.getLogger("ditto.test"))
        async with worker.resources(setup) as resources:
            ctx = step_context(config, resources)
            own = await plan(ASK.model_copy(update={"model": ModelRef("parrot", "grey")})).call(ctx)
            assert own.message.content == "hi"
            assert (await plan(ASK).call(ctx)).message.content == "hello"
        assert asked.scripted.count == 1
    assert events == ["opened", "closed"]


@pytest.mark.asyncio
async def test_a_provider_without_an_address_is_a_definite_failure_that_names_the_variable(ask: Any) -> None:
    async with ask() as asked:
        with pytest.raises(EffectRejected, match="ELSEWHERE_BASE_URL") as raised:
            await asked.sample(ASK.model_copy(update={"model": ModelRef("elsewhere", "m")}))
        assert raised.value.code == "provider.unknown"
        assert asked.scripted.count == 0


# The request


def test_the_request_holds_what_is_set_and_leaves_the_rest_to_the_provider() -> None:
    assert build_request(ASK, ProviderConfig()) == {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hi"}],
    }
    full = SampleInput(
        model=ModelRef("scripted", "tiny"),
        messages=(Message(role="system", content="s", name="boss"), Message(role="user", content="u")),
        tools=(ToolOffer(name="look", description="looks"), ToolOffer(name="stop")),
        temperature=0.0,
        top_p=0.5,
        max_tokens=9,
        seed=0,
        stop=("END",),
        response_schema={"type": "object"},
    )
    empty = {"type": "object", "properties": {}}
    assert build_request(full, ProviderConfig(max_tokens_field="max_completion_tokens")) == {
        "model": "tiny",
        "messages": [{"role": "system", "content": "s", "name": "boss"}, {"role": "user", "content": "u"}],
        "tools": [
            {"type": "function", "function": {"name": "look", "parameters": empty, "description": "looks"}},
            {"type": "function", "function": {"name": "stop", "parameters": empty}},
        ],
        "temperature": 0.0,
        "top_p": 0.5,
        "seed": 0,
        "max_completion_tokens": 9,
        "stop": ["END"],
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": {"type": "object"}, "strict": False},
        },
    }


RAW_AND_SENT = [
    ("", "{}"),
    (" ", "{}"),
    ("null", "{}"),
    ("{bad", "{}"),
    ("[1]", "{}"),
    ('{"x": NaN}', "{}"),
    ("[" * 100_000, "{}"),
    ("{}", "{}"),
    (' {"x" : 1} ', ' {"x" : 1} '),
]


@pytest.mark.parametrize(("raw", "sent"), RAW_AND_SENT)
def test_l09_arguments_are_sent_as_an_object_whatever_is_stored(raw: str, sent: str) -> None:
    assert sent_arguments(raw) == sent


@pytest.mark.parametrize(
    ("received", "kept"), [(None, ""), ("", ""), (" ", " "), ("null", "null"), ({"x": "ü"}, '{"x": "ü"}'), ([1], "[1]")]
)
def test_l09_what_a_provider_sends_as_arguments_is_kept_as_its_text(received: Any, kept: str) -> None:
    assert raw_arguments(received) == kept


@pytest.mark.asyncio
async def test_l11_a_strict_provider_takes_a_history_with_bad_calls(ask: Any) -> None:
    async with ask(
        ToolCalls([Call("c1", "health", ""), Call("c2", "add", "{bad")]), Text("fine"), strict=True
    ) as asked:
        first = await asked.sample()
        assert [call.arguments for call in first.message.tool_calls] == ["", "{bad"]
        history = (
            *ASK.messages,
            first.message,
            Message(role="tool", content="ok", tool_call_id="c1"),
            Message(role="tool", content="x missing", tool_call_id="c2"),
        )
        assert (await asked.sample(ASK.model_copy(update={"messages": history}))).message.content == "fine"


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("rule", "setting"), [("require", "send"), ("refuse", "omit"), ("ignore", "keep"), ("ignore", "send")]
)
async def test_m07_reasoning_goes_back_as_the_setting_says(ask: Any, rule: str, setting: str) -> None:
    replies = [
        ToolCalls([Call("c1", "look")], reasoning="think"),
        Text("text only"),
        Text(None, reasoning="reasoning only"),
        Text("end"),
    ]
    history = ASK.messages
    async with ask(*replies, strict=True, reasoning_content=rule) as asked:
        for _ in replies:
            sample = await asked.sample(ASK.model_copy(update={"messages": history}), reasoning_history=setting)
            history = (*history, sample.message)
            if sample.message.tool_calls:
                history = (*history, Message(role="tool", content="seen", tool_call_id="c1"))
            history = (*history, Message(role="user", content="go on"))
        sent = [message.get("reasoning_content") for message in asked.last_body()["messages"]]
    assert [message.reasoning for message in history if message.role == "assistant"][:1] == ["think"]
    expected = {"send": ["think", "", "reasoning only"], "keep": ["think", "reasoning only"], "omit": []}
    assert [each for each in sent if each is not None] == expected[setting]


@pytest.mark.asyncio
async def test_key_and_headers_travel_and_no_proxy_or_netrc_is_asked(ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    seen: list[httpx.Request] = []

    def respond(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, content=completion().body)

    endpoint = Endpoint(
        base_url="https://api.example.com/v1?version=secret-version",
        api_key=SecretStr(KEY),
        headers={"X-Team": SecretStr("red-team-7")},
    )
    ctx = step_context(Config(endpoints={"scripted": endpoint}))
    async with httpx.AsyncClient(transport=httpx.MockTransport(respond)) as client:
        await OpenAIProvider(client).sample(ASK, ctx)
    assert str(seen[0].url) == "https://api.example.com/v1/chat/completions?version=secret-version"
    assert seen[0].headers["authorization"] == f"Bearer {KEY}"
    assert seen[0].headers["x-team"] == "red-team-7"
    assert seen[0].headers["accept-encoding"] == "identity"
    async with ask(Text("past the proxies")) as asked:
        assert (await asked.sample(api_key=None)).message.content == "past the proxies"


# Proper answers


@pytest.mark.asyncio
async def test_a_proper_answer_is_a_sample(ask: Any) -> None:
    async with ask(ToolCalls([Call("c1", "look", '{"x":1}')], content="so", reasoning="why")) as asked:
        sample = await asked.sample()
    assert sample == Sample(
        message=Message(
            role="assistant",
            content="so",
            tool_calls=(ToolCall(id="c1", name="look", arguments='{"x":1}'),),
            reasoning="why",
        ),
        finish_reason="tool_calls",
        usage=Usage(input_tokens=10, output_tokens=5),
        model="tiny",
        response_id="chatcmpl-1",
    )


@pytest.mark.asyncio
async def test_k01_characters_cut_by_chunk_borders_come_out_whole(ask: Any) -> None:
    body = json.dumps({"choices": [{"message": {"content": "日本✅é"}, "finish_reason": "stop"}]}, ensure_ascii=False)
    async with ask(Chunks([body], size_bytes=1, content_type="application/json")) as asked:
        assert (await asked.sample()).message.content == "日本✅é"


@pytest.mark.asyncio
async def test_a_byte_order_mark_and_another_charset_do_no_harm(ask: Any) -> None:
    body = "\ufeff" + json.dumps(
        {"choices": [{"message": {"content": "é"}, "finish_reason": "stop"}]}, ensure_ascii=False
    )
    async with ask(Raw(body, content_type="application/json; charset=latin-1")) as asked:
        assert (await asked.sample()).message.content == "é"


@pytest.mark.asyncio
async def test_g05_lone_surrogates_are_repaired_and_said_in_the_log(ask: Any, caplog: pytest.LogCaptureFixture) -> None:
    body = '{"choices":[{"message":{"content":"ok \\ud83d \\ud83c\\udf78"},"finish_reason":"stop"}]}'
    async with ask(Raw(body), Text("�")) as asked:
        assert (await asked.sample()).message.content == "ok � \U0001f378"
        assert "sampled: the answer of scripted/tiny held broken characters" in caplog.text
        caplog.clear()
        assert (await asked.sample()).message.content == "�"
        assert caplog.text == "", "the provider's own replacement character is no damage"


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("word", "mapped"),
    [
        ("stop", "stop"),
        ("STOP", "stop"),
        ("end_turn", "stop"),
        ("eos", "stop"),
        ("length", "length"),
        ("max_tokens", "length"),
        ("function_call", "tool_calls"),
        ("content_filter", "content_filter"),
        (None, "missing"),
        ("", "missing"),
    ],
)
async def test_l08_k04_a_finish_reason_is_mapped_and_a_missing_one_is_recorded(
    ask: Any, word: str | None, mapped: str
) -> None:
    calls = [{"id": "c", "type": "function", "function": {"name": "a", "arguments": "{}"}}]
    async with ask(completion({"content": None, "tool_calls": calls}, finish_reason=word)) as asked:
        sample = await asked.sample()
    assert sample.finish_reason == mapped
    assert [call.name for call in sample.message.tool_calls] == ["a"]


@pytest.mark.asyncio
async def test_the_old_form_of_a_call_a_refusal_and_text_in_parts_are_understood(ask: Any) -> None:
    async with ask(
        completion({"content": None, "function_call": {"name": "a", "arguments": '{"x":1}'}}),
        completion({"content": None, "refusal": "I would rather not"}),
        completion({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}),
    ) as asked:
        assert (await asked.sample()).message.tool_calls == (ToolCall(id="", name="a", arguments='{"x":1}'),)
        refusal = await asked.sample()
        assert (refusal.message.content, refusal.finish_reason) == ("I would rather not", "refusal")
        assert (await asked.sample()).message.content == "ab"


@pytest.mark.asyncio
async def test_l04_ids_are_left_as_they_come(ask: Any) -> None:
    async with ask(ToolCalls([Call("x", "a"), Call("x", "b"), Call(None, "c")])) as asked:
        assert [call.id for call in (await asked.sample()).message.tool_calls] == ["x", "x", ""]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("said", "usage"),
    [
        (None, Usage()),
        ({}, Usage()),
        ({"prompt_tokens": 0, "completion_tokens": None}, Usage(input_tokens=0)),
        ({"prompt_tokens": "3", "completion_tokens": -1}, Usage()),
        (
            {
                "prompt_tokens": 3,
                "completion_tokens": 1,
                "prompt_tokens_details": {"cached_tokens": 2},
                "completion_tokens_details": {"reasoning_tokens": 0},
            },
            Usage(input_tokens=3, output_tokens=1, cached_input_tokens=2, reasoning_tokens=0),
        ),
    ],
)
async def test_m02_usage_is_what_the_provider_said_and_else_unknown(ask: Any, said: Any, usage: Usage) -> None:
    async with ask(completion(usage=said), Text("no usage at all", usage=None)) as asked:
        assert (await asked.sample()).usage == usage
        assert (await asked.sample()).usage == Usage()


# Refused


async def refused(asked: Asked, **settings: Any) -> EffectNotMade:
    with pytest.raises(EffectNotMade) as raised:
        await asked.sample(**settings)
    assert KEY not in str(raised.value)
    return raised.value


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("status", "retryable"),
    [(400, False), (401, False), (404, False), (409, False), (429, True), (500, True), (503, True)],
)
async def test_an_error_status_is_a_refusal_asked_once(ask: Any, status: int, retryable: bool) -> None:
    async with ask(Failure(status, "the reason\nof it " + "y" * 1000)) as asked:
        error = await refused(asked)
        assert (error.code, error.retryable) == (f"provider.http_{status}", retryable)
        assert f"/v1/chat/completions answered {status}: the reason of it y" in str(error)
        assert len(str(error)) < 500
        assert asked.scripted.count == 1, "a07: nobody below the engine retries"
        assert error.error_type == "EffectNotMade", "a record names only the engine's classes"


@pytest.mark.asyncio
async def test_an_error_without_json_says_what_it_is(ask: Any) -> None:
    async with ask(
        Failure(502, body="bad\ngateway"), Failure(400, body={"detail": "no"}), Failure(404, body="")
    ) as asked:
        assert "answered 502: bad gateway" in str(await refused(asked))
        assert "answered 400: no" in str(await refused(asked))
        assert "Check the model's name and the provider's base_url" in str(await refused(asked))


@pytest.mark.asyncio
async def test_an_error_whose_body_is_cut_is_still_that_error(ask: Any) -> None:
    async with ask(Drop("mid_body", reply=Failure(500)), Stall(Failure(429), when="after_headers")) as asked:
        assert (await refused(asked)).code == "provider.http_500"
        assert (await refused(asked, timeout_s=0.2)).code == "provider.http_429"


HTTP_DATE = format_datetime(NOW + timedelta(seconds=2), usegmt=True)
PAST = format_datetime(NOW - timedelta(seconds=2), usegmt=True)


@pytest.mark.parametrize(
    ("headers", "wait_s"),
    [
        ({"retry-after": "2"}, 2.0),
        ({"retry-after": "1.5"}, 1.5),
        ({"retry-after": "0"}, 0.0),
        ({"retry-after": "999999"}, 999999.0),
        ({"retry-after": HTTP_DATE}, 2.0),
        ({"retry-after": PAST}, None),
        ({"retry-after": "-3"}, None),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "1e3"}, None),
        ({"retry-after": "٣"}, None),
        ({"retry-after": ""}, None),
        ({}, None),
        ({"retry-after-ms": "250", "retry-after": "2"}, 0.25),
        ({"retry-after-ms": "soon", "retry-after": "2"}, 2.0),
    ],
)
def test_m01_retry_after_is_read_in_all_its_forms(headers: dict[str, str], wait_s: float | None) -> None:
    assert retry_after_s(headers, now=NOW) == wait_s


@pytest.mark.asyncio
async def test_m01_the_wait_is_on_the_error_and_in_its_text(ask: Any) -> None:
    async with ask(Failure(429, "slow down", headers={"Retry-After": "1.5"})) as asked:
        error = await refused(asked)
    assert getattr(error, "retry_after_s", None) == 1.5
    assert "answered 429 (asks to wait 1.5 s): slow down" in str(error)


@pytest.mark.asyncio
async def test_k09_a_redirect_is_not_followed_and_only_its_origin_is_named(ask: Any) -> None:
    headers = {"location": "https://user:pass@login.example.com:8443/in?token=abc"}
    async with ask(Raw("", status=302, headers=headers)) as asked:
        error = await refused(asked)
    assert (error.code, error.retryable) == ("provider.http_302", False)
    assert "redirects to https://login.example.com:8443;" in str(error)
    assert "token" not in str(error)
    assert "pass" not in str(error)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("error", "code", "retryable"),
    [
        ({"code": 502, "message": "upstream busy"}, "provider.http_502", True),
        ({"code": "502", "message": "upstream busy"}, "provider.http_502", True),
        ({"code": 400, "message": "bad"}, "provider.http_400", False),
        ({"code": None, "message": "upstream busy"}, "provider.error", False),
        ({"code": None, "type": "overloaded_error", "message": "m"}, "provider.overloaded_error", True),
        ({"code": "rate_limit_exceeded", "message": "m"}, "provider.rate_limit_exceeded", True),
        ({"code": "Odd Code!", "message": "m"}, "provider.odd_code_", False),
        ("upstream busy", "provider.error", False),
    ],
)
async def test_k07_a_failure_inside_a_200_is_a_refusal(ask: Any, error: Any, code: str, retryable: bool) -> None:
    said = error if isinstance(error, str) else error["message"]
    async with ask(Raw(json.dumps({"error": error})), completion(error=error, finish_reason="error")) as asked:
        for _ in range(2):
            refusal = await refused(asked)
            assert (refusal.code, refusal.retryable) == (code, retryable)
            assert "answered 200 with an error" in str(refusal)
            assert str(refusal).endswith(f": {said}")


@pytest.mark.asyncio
async def test_k07_an_error_of_null_is_none_and_one_in_the_choice_counts(ask: Any) -> None:
    choice = {"message": {"content": ""}, "finish_reason": "error", "error": {"code": 503, "message": "m"}}
    async with ask(completion(error=None), Raw(json.dumps({"choices": [choice]}))) as asked:
        assert (await asked.sample()).message.content == "hi"
        assert (await refused(asked)).code == "provider.http_503"


@pytest.mark.asyncio
async def test_m06_a_connection_never_made_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_such_name(host: Any, *args: Any, **kwargs: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    async def fails_at(url: str) -> None:
        async with open_openai_provider() as provider:
            with pytest.raises(EffectNotMade, match="nothing was sent") as raised:
                await provider.sample(ASK, step_context(config_for(f"{url}/v1?key=secret-query")))
        assert (raised.value.code, raised.value.retryable) == ("provider.unreachable", True)
        assert f"{url}/v1/chat/completions was not reached" in str(raised.value)
        assert "secret-query" not in str(raised.value)

    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        await fails_at(f"http://127.0.0.1:{unused.getsockname()[1]}")
    monkeypatch.setattr(socket, "getaddrinfo", no_such_name)
    await fails_at("http://no-such-host.example")


@pytest.mark.asyncio
async def test_a_cancelled_call_that_heard_nothing_was_not_made(ask: Any) -> None:
    async with ask(Stall()) as asked:
        ctx = asked.context()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(asked.provider.sample, ASK, ctx)
            await asked.scripted.wait_for(stalled=1)
            tasks.cancel_scope.cancel()
        assert ctx.not_made_reason == "cancelled before the provider answered; connection closed"
        await asked.scripted.wait_for(gone=1)


@pytest.mark.asyncio
async def test_a_cancelled_call_that_heard_the_beginning_is_unknown(ask: Any) -> None:
    async with ask(Stall(Text("late"), when="mid_body")) as asked:
        ctx = asked.context()
        heard = asyncio.Event()

        class Heard(httpx.AsyncHTTPTransport):
            async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
                response = await super().handle_async_request(request)
                heard.set()
                return response

        async with httpx.AsyncClient(transport=Heard()) as client, anyio.create_task_group() as tasks:
            tasks.start_soon(OpenAIProvider(client).sample, ASK, ctx)
            await heard.wait()
            await asked.scripted.wait_for(stalled=1)
            tasks.cancel_scope.cancel()
        assert ctx.not_made_reason is None


# Unknown


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "reply",
    [
        Failure(408),
        Failure(504),
        Raw('{"error":{"code":504,"message":"m"}}'),
        Raw('{"error":{"code":"gateway_timeout","message":"m"}}'),
        Drop("before"),
        Drop("after_headers"),
        Drop("mid_body"),
        Drop("mid_body", reset=True),
        Chunks(['{"choices":[{"message":'], drop=True, content_type="application/json"),
    ],
    ids=lambda reply: type(reply).__name__,
)
async def test_m06_k04_an_answer_that_is_lost_is_no_definite_ending(ask: Any, reply: Reply) -> None:
    async with ask(reply) as asked:
        with pytest.raises(ResponseLost, match="may have answered") as raised:
            await asked.sample()
        assert KEY not in str(raised.value)
        assert asked.scripted.count == 1


@pytest.mark.asyncio
@pytest.mark.parametrize("when", ["before", "mid_body"])
async def test_m06_a_provider_that_never_answers_is_left_after_the_timeout(ask: Any, when: Any) -> None:
    async with ask(Stall(Text("late"), when=when)) as asked:
        ctx = asked.context(timeout_s=0.2)
        with pytest.raises(ResponseLost, match=r"no complete answer within 0\.2 s"):
            await asked.provider.sample(ASK, ctx)
        assert ctx.not_made_reason is None, "the deadline is the provider's, not a cancellation"


@pytest.mark.asyncio
async def test_an_answer_that_only_the_connection_ends_is_lost_if_its_json_is_cut() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n" + b'{"choices":[{"mess')
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    async with server, open_openai_provider() as provider:
        config = config_for(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1")
        with pytest.raises(ResponseLost, match="ends in the middle"):
            await provider.sample(ASK, step_context(config))


# Invalid


async def invalid(asked: Asked, **settings: Any) -> OutputError:
    with pytest.raises(OutputError) as raised:
        await asked.sample(**settings)
    assert raised.value.code == "provider.invalid_answer"
    assert not raised.value.retryable
    assert raised.value.kept["status"] == 200
    assert asked.scripted.count == 1
    return raised.value


@pytest.mark.asyncio
@pytest.mark.parametrize("content_type", ["text/html", "application/json"])
async def test_k09_a_page_in_place_of_an_answer_is_named_and_kept(ask: Any, content_type: str) -> None:
    page = "<!doctype html><title>Sign in</title>" + "x" * 500
    async with ask(Raw(page, content_type=content_type)) as asked:
        error = await invalid(asked)
        assert f"expected JSON from {asked.scripted.base_url}/chat/completions, got {content_type}" in str(error)
    assert page[:200] in str(error)
    assert page[:201] not in str(error)
    assert "it ends in /v1, try it without" in str(error)
    assert error.kept["body"] == page


@pytest.mark.asyncio
async def test_k09_an_address_without_v1_gets_the_other_hint(tmp_path: Path) -> None:
    async with (
        ScriptedProvider(tmp_path / "model.sqlite", [Raw("hello")]) as scripted,
        open_openai_provider() as provider,
    ):
        base_url = scripted.base_url.removesuffix("/v1") + "?api-version=secret-version"
        with pytest.raises(OutputError, match="try it with /v1 at its end") as raised:
            await provider.sample(ASK, step_context(config_for(base_url)))
        assert "secret-version" not in str(raised.value)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("reply", "named"),
    [
        (Raw(""), "expected JSON"),
        (Raw("[]"), "expected JSON"),
        (Raw("[" * 100_000), "expected JSON"),
        (Raw('{"choices": [' + "9" * 5000 + "]}"), "expected JSON"),
        (Raw(b"\xff\xfe"), "expected JSON"),
        (Raw("data: {}\n\n", content_type="text/event-stream"), "got text/event-stream"),
        (Raw("not gzip", headers={"content-encoding": "gzip"}), "cannot be decompressed"),
        (Raw("{}"), "no choices"),
        (Raw('{"choices": []}'), "no choices"),
        (Raw('{"choices": [{"finish_reason": "stop"}]}'), "no message"),
        (completion({"content": None}, finish_reason=None), "neither text nor tool calls nor a finish reason"),
        (completion({"content": 7}), "content is no text"),
        (completion({"tool_calls": [{"id": "c", "function": {"arguments": "{}"}}]}), "names no function"),
        (completion({"tool_calls": {"id": "c"}}), "tool_calls are no list"),
        (completion(finish_reason="sudden"), "finish reason 'sudden' is unknown"),
        (completion(finish_reason=7), "finish reason '7' is unknown"),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
async def test_k04_what_is_no_proper_answer_is_invalid_and_kept(ask: Any, reply: Raw, named: str) -> None:
    async with ask(reply) as asked:
        error = await invalid(asked)
    assert named in str(error)
    assert len(str(error)) < 700
    if named != "cannot be decompressed":
        assert error.kept["body"] == bytes(reply.body).decode("utf-8", "replace")  # type: ignore[arg-type]


@pytest.mark.asyncio
async def test_an_answer_over_the_limit_is_invalid_and_no_more_of_it_is_read(ask: Any) -> None:
    pieces = ["x" * 1000, "y" * 1000]
    async with ask(Chunks(pieces, drop=True, content_type="application/json")) as asked:
        error = await invalid(asked, response_max_bytes=1024)
    assert "longer than 1024 bytes; raise workers.infer.response_max_bytes" in str(error)
    assert error.kept["body"] == "x" * 1000 + "y" * 24


def test_nothing_here_streams() -> None:
    assert inspect.iscoroutinefunction(OpenAIProvider.sample)
    assert "stream" not in build_request(ASK, ProviderConfig())
