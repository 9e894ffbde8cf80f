"""Streamed answers of the infer worker: what is shown of them, and how each one ends.

`ask` is a real socket, over which each body of a case is sent whole and byte by byte; `heard` goes past the socket and
gives exactly the pieces that it is told. Tool calls are in `test_infer_stream_calls`, and that the cuts between pieces
decide nothing is in `test_infer_stream_cuts`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import selectors
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import anyio
import httpx
import pytest

from ditto import (
    Config,
    EffectNotMade,
    Endpoint,
    Message,
    ModelRef,
    OutputError,
    Sample,
    Sandbox,
    StepContext,
    Usage,
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
    StreamCut,
    Text,
    ToolCalls,
    sse,
)
from ditto_workers import create_infer_worker
from ditto_workers.infer.endings import ResponseLost
from ditto_workers.infer.openai import OpenAIProvider, open_openai_provider
from ditto_workers.infer.request import build_request

ASK = SampleInput(model=ModelRef("scripted", "tiny"), messages=(Message(role="user", content="hi"),), stream=True)
ASK_WHOLE = ASK.model_copy(update={"stream": False})
T = TypeVar("T")


# Asking


@dataclass
class Heard:
    """How one call ended, and what was shown on the way."""

    sample: Sample | None = None
    error: Exception | None = None
    shown: list[tuple[str, str]] = field(default_factory=list)
    not_made: str | None = None

    def text(self, kind: str = "text") -> str:
        return "".join(text for each, text in self.shown if each == kind)

    def ending(self) -> tuple[Any, ...]:
        """All that must not depend on how the bytes were cut."""
        error = self.error
        return (self.sample, type(error), getattr(error, "code", None), str(error), self.text(), self.text("reasoning"))

    @property
    def answer(self) -> Sample:
        if self.error is not None:
            raise self.error
        assert self.sample is not None
        return self.sample


def config_for(base_url: str, **settings: Any) -> Config:
    max_bytes = settings.pop("response_max_bytes", 1024 * 1024)
    return Config(
        endpoints={"scripted": Endpoint(base_url=base_url)},
        providers={"scripted": ProviderConfig(**settings)},
        workers=WorkersConfig(infer=InferWorkerConfig(response_max_bytes=max_bytes)),
    )


def step_context(config: Config, show: Callable[[str, str], None] | None = None, attempt: int = 1) -> StepContext:
    return StepContext(
        run_id="r-1",
        path="sampled",
        key="r-1/1/sampled",
        attempt=attempt,
        config=config,
        sandbox=Sandbox(),
        logger=logging.getLogger("ditto.test"),
        _partial=show,
    )


async def hear(provider: OpenAIProvider, config: Config, request: SampleInput = ASK) -> Heard:
    heard = Heard()
    ctx = step_context(config, lambda text, kind: heard.shown.append((kind, text)))
    try:
        heard.sample = await provider.sample(request, ctx)
    except (EffectNotMade, OutputError, ResponseLost) as error:
        heard.error = error
    heard.not_made = ctx.not_made_reason
    return heard


@dataclass
class Asked:
    """A scripted provider, and the provider that asks it."""

    scripted: ScriptedProvider
    provider: OpenAIProvider

    def config(self, **settings: Any) -> Config:
        return config_for(self.scripted.base_url, **settings)

    async def hear(self, request: SampleInput = ASK, **settings: Any) -> Heard:
        return await hear(self.provider, self.config(**settings), request)


@asynccontextmanager
async def ask(folder: Path, *script: Reply) -> AsyncIterator[Asked]:
    """A provider that will answer by the script."""
    async with (
        ScriptedProvider(folder / "model.sqlite", list(script)) as scripted,
        open_openai_provider() as provider,
    ):
        yield Asked(scripted, provider)


def both_ways(body: bytes, **options: Any) -> tuple[Chunks, Chunks]:
    """The body as one chunk, and byte by byte."""
    return Chunks([body], **options), Chunks([body], size_bytes=1, **options)


class Body(httpx.AsyncByteStream):
    """Pieces of a body, then its end, or the connection's."""

    def __init__(self, pieces: Sequence[bytes | float], *, is_cut: bool = False) -> None:
        self.pieces = pieces
        self.is_cut = is_cut

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self.pieces:
            if isinstance(piece, bytes):
                yield piece
            else:
                await asyncio.sleep(piece)
        if self.is_cut:
            raise httpx.ReadError("cut")


def heard(
    pieces: Sequence[bytes | float],
    *,
    request: SampleInput = ASK,
    is_cut: bool = False,
    content_type: str = "text/event-stream",
    loop: Callable[[], asyncio.AbstractEventLoop] | None = None,
    **settings: Any,
) -> Heard:
    """The same without a socket: exactly these pieces, with pauses in seconds between them."""

    def respond(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, headers={"content-type": content_type}, stream=Body(pieces, is_cut=is_cut))

    async def call() -> Heard:
        async with httpx.AsyncClient(transport=httpx.MockTransport(respond)) as client:
            return await hear(OpenAIProvider(client), config_for("http://model.test/v1", **settings), request)

    return run(call(), loop)


def run(main: Coroutine[Any, Any, T], loop: Callable[[], asyncio.AbstractEventLoop] | None = None) -> T:
    with asyncio.Runner(loop_factory=loop) as runner:
        return runner.run(main)


class JumpingLoop(asyncio.SelectorEventLoop):
    """A loop whose clock jumps to the next timer instead of waiting for it. No sockets, no threads."""

    def __init__(self) -> None:
        selector = selectors.DefaultSelector()
        super().__init__(selector)
        self.now = 0.0
        really = selector.select

        def select(timeout: float | None = None) -> Any:
            assert timeout is not None, "nothing is ready, and nothing ever will be"
            self.now += max(timeout, 0)
            return really(0)

        selector.select = select  # type: ignore[method-assign]

    def time(self) -> float:
        return self.now


# Writing streams


def delta(finish_reason: Any = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish_reason}]}


def part(index: Any = None, **fields: Any) -> dict[str, Any]:
    """One part of a tool call; `name` and `arguments` go into its function."""
    function = {name: fields.pop(name) for name in ("name", "arguments") if name in fields}
    numbered = {} if index is None else {"index": index}
    return {**numbered, **fields, "function": function}


def every_byte(body: bytes) -> list[bytes]:
    return [body[at : at + 1] for at in range(len(body))]


def calls(*parts: dict[str, Any], finish_reason: Any = None) -> dict[str, Any]:
    return delta(finish_reason, tool_calls=list(parts))


K01 = (
    'data: {"choices":[{"index":0,"delta":{"content":"日本✅é"},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
).encode()

K03 = (
    '\ufeff: ping\n\nid: 7\nevent: message\nretry: 10\ndata:{"choices":[{"index":0,"delta":{"content":"h"}}]}\n\n'
    ': ping\n\n\ndata: {"choices":[{"index":0,\ndata: "delta":{"content":"i"},"finish_reason":"stop"}]}\n\n'
    ":\n\ndata: [DONE]\n\n"
).encode()

HELLO = delta(content="Hello")
K04 = {
    "1-close": sse([HELLO], done=False),
    "2-done": sse([{"choices": [{"index": 0, "delta": {"content": "Hello"}}]}]),
    "3-null-done": sse([HELLO, delta(None)]),
    "4-stop": sse([HELLO, delta("stop")], done=False),
    "5-stop-done": sse([HELLO, delta("stop")]),
}

K05 = sse(
    [
        {"id": "", "choices": [], "prompt_filter_results": [{"prompt_index": 0}]},
        {"id": "r-7", "system_fingerprint": "fp_1", **delta(role="assistant", content="")},
        {"id": "r-7", **delta(content="ok"), "usage": None},
        {"id": "r-7", **delta("stop"), "usage": None},
        {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 1}},
    ]
)


def k07(error: Any) -> dict[str, Any]:
    return {"error": error, "choices": [{"index": 0, "delta": {}, "finish_reason": "error"}]}


BUSY = {"code": 502, "message": "upstream busy"}

BODIES: dict[str, bytes] = {
    "k01": K01,
    "k03": K03,
    "k03-crlf": K03.replace(b"\n", b"\r\n"),
    "k03-cr": K03.replace(b"\n", b"\r"),
    **{f"k04-{name}": body for name, body in K04.items()},
    "k05": K05,
    "k07": sse([delta(content="a"), delta(content="b"), k07(BUSY)]),
    "k07-first": sse([k07({"code": None, "message": "m"})]),
    "k07-event": b'data: {"choices":[]}\n\nevent: error\ndata: {"message": "m", "code": 504}\n\n',
    "k09": b"<!doctype html><title>Sign in</title>",
    "json": b'{"choices":[{"message":{"content":"\xc3\xa9"},"finish_reason":"stop"}]}',
    "no-utf8": b'data: {"choices":[{"delta":{"content":"a\xff\xe2\x28\xe6\x97"},"finish_reason":"stop"}]}\n\n',
    "halves": sse(
        [r'{"choices":[{"delta":{"content":"ok \ud83c"}}]}', r'{"choices":[{"delta":{"content":"\udf78"}}]}']
    ),
    "half": sse([r'{"choices":[{"delta":{"content":"ok \ud83c"},"finish_reason":"stop"}]}']),
    "line-separator": sse([delta("stop", content="a\u2028b\x85c\x0bd")]),
    "no-last-line": sse([HELLO, delta("stop")])[:-2],
    "torn-end": sse([HELLO, delta("stop")])[:-6],
    "torn-reason": sse([HELLO, delta("stop")], done=False)[:-20],
    "torn-character": sse([HELLO])[:30] + "é".encode()[:1],
    "no-json": sse([HELLO, "upstream timed out", delta("stop")]),
    "nothing": b"",
    "pings": b": ping\n\n: ping\n\n",
    "two-finishes": sse([HELLO, delta("stop"), delta("length")]),
    "unknown-finish": sse([HELLO, delta("sudden")]),
}


# The request


def test_a_stream_is_part_of_what_is_asked_and_recorded() -> None:
    plan = create_infer_worker().handlers["INFER.REASONING.SAMPLE"].plan
    assert plan(ASK).recorded()["stream"] is True
    assert plan(ASK_WHOLE).recorded()["stream"] is False
    body = build_request(ASK, ProviderConfig())
    assert (body["stream"], body["stream_options"]) == (True, {"include_usage": True})
    assert "stream_options" not in build_request(ASK, ProviderConfig(usage_in_stream=False))
    assert not {"stream", "stream_options"} & build_request(ASK_WHOLE, ProviderConfig()).keys()


@pytest.mark.asyncio
async def test_m02_usage_is_asked_for_unless_the_provider_refuses_the_question(tmp_path: Path) -> None:
    async with ask(tmp_path, Text("a"), Text("b")) as asked:
        assert (await asked.hear()).answer.usage == Usage(input_tokens=10, output_tokens=5)
        assert (await asked.hear(usage_in_stream=False)).answer.usage == Usage()
        assert ["stream_options" in request.body for request in asked.scripted.requests()] == [True, False]


@pytest.mark.parametrize(
    "events",
    [
        [delta("stop", content="a")],
        [delta("stop", content="a") | {"usage": None}],
        [delta("stop", content="a") | {"usage": {}}, {"choices": []}],
    ],
)
def test_m02_usage_that_is_not_said_is_unknown(events: list[dict[str, Any]]) -> None:
    assert heard([sse(events)]).answer.usage == Usage()
    said = {"prompt_tokens": 0, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 0}}
    more = [*events, {"choices": [], "usage": said}, {"choices": [], "usage": None}]
    assert heard([sse(more)]).answer.usage == Usage(input_tokens=0, output_tokens=2, cached_input_tokens=0)


# What is shown


def test_text_and_reasoning_are_shown_piece_by_piece() -> None:
    body = sse(
        [delta(reasoning_content="I "), delta(reasoning="see"), delta(content="Hel"), delta("stop", content="lo")]
    )
    got = heard([body])
    assert got.shown == [("reasoning", "I "), ("reasoning", "see"), ("text", "Hel"), ("text", "lo")]
    assert (got.answer.message.reasoning, got.answer.message.content) == ("I see", "Hello")


def test_pieces_are_shown_before_the_next_ones_come() -> None:
    shown: list[str] = []

    async def body() -> AsyncIterator[bytes]:
        for word in ("a", "b"):
            yield sse([delta(content=word)], done=False)
            assert shown[-1] == word
        yield sse([delta("stop")])

    async def call() -> None:
        transport = httpx.MockTransport(lambda _: httpx.Response(200, content=body()))
        async with httpx.AsyncClient(transport=transport) as client:
            ctx = step_context(config_for("http://model.test/v1"), lambda text, kind: shown.append(text))
            await OpenAIProvider(client).sample(ASK, ctx)

    run(call())
    assert shown == ["a", "b"]


def test_from_the_first_tool_call_on_nothing_is_shown() -> None:
    body = sse(
        [
            delta(content="a"),
            delta(content="b", tool_calls=[]),
            delta(content="c", tool_calls=[part(0, id="x", name="f", arguments="{}")]),
            delta("tool_calls", content="d", reasoning_content="e"),
        ]
    )
    got = heard([body])
    assert got.shown == [("text", "a"), ("text", "b")]
    assert (got.answer.message.content, got.answer.message.reasoning) == ("abcd", "e")
    legacy = sse([delta(content="a"), delta(function_call={"name": "f"}), delta("function_call", content="b")])
    assert heard([legacy]).text() == "a"


def test_nothing_is_shown_after_something_improper() -> None:
    got = heard([sse([delta(content="a"), "no json", delta("stop", content="b")])])
    assert isinstance(got.error, OutputError)
    assert got.text() == "a"


def test_a_context_without_a_listener_shows_nothing() -> None:
    ctx = step_context(Config())
    ctx.partial("a")
    ctx.partial("b", kind="reasoning")


# K: framing and ending


@pytest.mark.asyncio
@pytest.mark.parametrize("content_type", ["text/event-stream", "text/event-stream; charset=latin-1", "text/plain"])
async def test_k01_a_character_cut_by_a_chunk_border_comes_out_whole(tmp_path: Path, content_type: str) -> None:
    async with ask(tmp_path, *both_ways(K01, content_type=content_type)) as asked:
        for _ in range(2):
            got = await asked.hear()
            assert got.answer.message.content == got.text() == "日本✅é"


@pytest.mark.asyncio
@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"], ids=["lf", "crlf", "cr"])
async def test_k03_comments_fields_and_a_byte_order_mark_do_no_harm(tmp_path: Path, newline: str) -> None:
    async with ask(tmp_path, *both_ways(K03.replace(b"\n", newline.encode()))) as asked:
        for _ in range(2):
            got = await asked.hear()
            assert got.answer.message.content == got.text() == "hi"


def test_k03_a_byte_order_mark_right_before_the_data_does_no_harm() -> None:
    assert heard([b"\xef\xbb\xbf" + sse([delta("stop", content="hi")])]).answer.message.content == "hi"


def test_k03_only_line_ends_end_a_line() -> None:
    assert heard([BODIES["line-separator"]]).answer.message.content == "a\u2028b\x85c\x0bd"


@pytest.mark.asyncio
@pytest.mark.parametrize("drop", [False, True], ids=["ended", "cut"])
async def test_k04_a_stream_without_reason_and_end_mark_is_lost(tmp_path: Path, drop: bool) -> None:
    async with ask(tmp_path, *both_ways(K04["1-close"], drop=drop)) as asked:
        for _ in range(2):
            got = await asked.hear()
            assert isinstance(got.error, ResponseLost)
            assert "may have answered, and billed" in str(got.error)
            assert got.text() == "Hello"
        assert asked.scripted.count == 2, "nobody here asks again"


@pytest.mark.asyncio
@pytest.mark.parametrize("name", ["2-done", "3-null-done"])
async def test_k04_an_end_mark_without_a_reason_is_an_answer_whose_reason_is_missing(tmp_path: Path, name: str) -> None:
    async with ask(tmp_path, *both_ways(K04[name])) as asked:
        for _ in range(2):
            answer = (await asked.hear()).answer
            assert (answer.message.content, answer.finish_reason, answer.raw) == ("Hello", "missing", {})


@pytest.mark.asyncio
@pytest.mark.parametrize(("name", "drop"), [("4-stop", False), ("4-stop", True), ("5-stop-done", False)])
async def test_k04_a_reason_or_a_reason_and_an_end_mark_is_an_answer(tmp_path: Path, name: str, drop: bool) -> None:
    async with ask(tmp_path, *both_ways(K04[name], drop=drop)) as asked:
        for _ in range(2):
            answer = (await asked.hear()).answer
            assert (answer.message.content, answer.finish_reason) == ("Hello", "stop")


@pytest.mark.asyncio
@pytest.mark.parametrize("after_chunks", [0, 1, 2, 3])
async def test_k04_a_stream_cut_anywhere_before_its_end_is_lost(tmp_path: Path, after_chunks: int) -> None:
    calls = ToolCalls([Call("c", "pay", '{"sum": 1}')], content="so")
    async with ask(
        tmp_path, StreamCut(after_chunks, calls), Drop("mid_body", reset=True, reply=calls), Drop("before", reply=calls)
    ) as asked:
        for _ in range(3):
            assert isinstance((await asked.hear()).error, ResponseLost)


@pytest.mark.parametrize("name", ["nothing", "pings", "torn-reason", "torn-character"])
def test_k04_a_stream_cut_before_it_said_anything_whole_is_lost(name: str) -> None:
    for is_cut in (False, True):
        assert isinstance(heard([BODIES[name]], is_cut=is_cut).error, ResponseLost)


@pytest.mark.parametrize("name", ["no-last-line", "torn-end"])
@pytest.mark.parametrize("is_cut", [False, True])
def test_k04_what_is_torn_off_after_the_reason_is_not_missed(name: str, is_cut: bool) -> None:
    assert heard([BODIES[name]], is_cut=is_cut).answer == heard([K04["5-stop-done"]]).answer


def test_k04_a_last_event_without_its_blank_line_counts_if_it_is_whole() -> None:
    whole = sse([delta("stop", content="Hello")], done=False)
    assert heard([whole.rstrip()]).answer.message.content == "Hello"
    assert isinstance(heard([whole.rstrip()[:-1]]).error, ResponseLost)


def test_k04_a_reason_with_more_text_after_it_is_no_end() -> None:
    events = [delta("stop", content="a"), delta(content="b")]
    assert isinstance(heard([sse(events, done=False)]).error, ResponseLost)
    assert heard([sse(events)]).answer.message.content == "ab"
    assert heard([sse([*events, delta("stop")], done=False)]).answer.message.content == "ab"


@pytest.mark.asyncio
async def test_k04_after_its_end_mark_a_stream_is_not_waited_for(tmp_path: Path) -> None:
    body = sse([HELLO, delta("stop")])
    async with ask(tmp_path, Stall(Chunks([body, b": more\n\n"]), when="mid_body")) as asked:
        assert (await asked.hear()).answer.message.content == "Hello"
        await asked.scripted.wait_for(gone=1)


@pytest.mark.parametrize("limits", [(1.0, 60.0), (60.0, 1.0)], ids=["total", "idle"])
def test_k04_after_its_reason_a_stream_may_run_out_of_time(limits: tuple[float, float]) -> None:
    body = sse([HELLO, delta("stop")], done=False)
    got = heard([body, 90.0], loop=JumpingLoop, timeout_s=limits[0], idle_timeout_s=limits[1])
    assert got.answer.message.content == "Hello"
    got = heard([body[:-20], 90.0], loop=JumpingLoop, timeout_s=limits[0], idle_timeout_s=limits[1])
    assert isinstance(got.error, ResponseLost)


@pytest.mark.parametrize(
    ("events", "named"),
    [
        ([HELLO, delta("stop"), delta("length")], "finishes twice, with 'stop' and with 'length'"),
        ([HELLO, delta("sudden")], "finish reason 'sudden' is unknown"),
        ([HELLO, delta(7)], "finish reason '7' is unknown"),
        ([HELLO, "no json", delta("stop")], "no JSON object"),
        ([HELLO, "[]", delta("stop")], "no JSON object"),
        ([HELLO, "[" * 100_000, delta("stop")], "no JSON object"),
        ([HELLO, {"choices": {"index": 0}}], "choices are no list"),
        ([HELLO, {"choices": [7]}], "choices are no list"),
        ([HELLO, {"choices": [{"delta": "x"}]}], "deltas is no object"),
        ([delta("stop", content=7)], "content is no text"),
        ([delta("stop", tool_calls={"id": "c"})], "tool_calls are no list"),
        ([delta("stop", tool_calls=["c"])], "names no function"),
        ([delta("stop", tool_calls=[{"id": "c", "function": "f"}])], "names no function"),
        ([calls(part(0, id="c", arguments="{}"), finish_reason="tool_calls")], "names no function"),
        ([delta()], "neither text nor tool calls nor a finish reason"),
        ([], "neither text nor tool calls nor a finish reason"),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
def test_k04_a_stream_that_ends_and_is_not_proper_is_invalid_and_kept(events: list[Any], named: str) -> None:
    body = sse(events)
    error = heard([body]).error
    assert isinstance(error, OutputError)
    assert (error.code, error.retryable) == ("provider.invalid_answer", False)
    assert named in str(error)
    assert error.kept == {"status": 200, "content_type": "text/event-stream", "body": body.decode()}


def test_k04_a_reason_is_an_end_whatever_comes_with_it() -> None:
    assert isinstance(heard([sse([delta("stop", content=7)], done=False)]).error, OutputError)
    assert isinstance(heard([sse([delta("stop"), delta("length")], done=False)]).error, OutputError)


def test_k04_a_stream_that_is_not_proper_and_does_not_end_is_lost() -> None:
    for body in (sse([HELLO, "upstream timed out"], done=False), sse([delta(content=7)], done=False)):
        assert isinstance(heard([body]).error, ResponseLost)


def test_k04_the_same_reason_twice_is_one() -> None:
    assert heard([sse([HELLO, delta("stop"), delta("stop"), delta("")])]).answer.finish_reason == "stop"


@pytest.mark.asyncio
async def test_k05_chunks_without_choices_bring_filter_results_and_usage(tmp_path: Path) -> None:
    async with ask(tmp_path, *both_ways(K05)) as asked:
        for _ in range(2):
            got = await asked.hear()
            assert got.answer == Sample(
                message=Message(role="assistant", content="ok"),
                finish_reason="stop",
                usage=Usage(input_tokens=3, output_tokens=1),
                response_id="r-7",
                raw={"prompt_filter_results": [{"prompt_index": 0}], "system_fingerprint": "fp_1"},
            )
            assert got.text() == "ok"


@pytest.mark.parametrize("value", ["[NaN]", "[1e999]", json.dumps("x" * 20_000)], ids=["nan", "inf", "long"])
def test_k05_what_cannot_be_kept_does_not_cost_the_answer(value: str) -> None:
    chunk = f'{{"choices":[],"prompt_filter_results":{value}}}'
    answer = heard([sse([chunk, delta("stop", content="ok")])]).answer
    assert (answer.message.content, answer.raw) == ("ok", {})


def test_what_is_nested_too_deep_is_invalid_streamed_and_not() -> None:
    deep = "[" * 500 + "]" * 500
    chunk = f'{{"choices":[],"prompt_filter_results":{deep}}}'
    document = f'{{"choices":[{{"message":{{"content":"ok"}},"finish_reason":"stop"}}],"x":{deep}}}'
    for got in (
        heard([sse([chunk, delta("stop", content="ok")])]),
        heard([document.encode()], request=ASK_WHOLE, content_type="application/json"),
    ):
        assert isinstance(got.error, OutputError)
        assert "nested too deep" in str(got.error)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("error", "code", "retryable"),
    [
        (BUSY, "provider.http_502", True),
        ({"code": "502", "message": "upstream busy"}, "provider.http_502", True),
        ({"code": 400, "message": "upstream busy"}, "provider.http_400", False),
        ({"code": None, "message": "upstream busy"}, "provider.error", False),
        ({"type": "overloaded_error", "message": "upstream busy"}, "provider.overloaded_error", True),
        ("upstream busy", "provider.error", False),
    ],
)
async def test_k07_an_error_in_the_stream_is_the_providers_no(
    tmp_path: Path, error: Any, code: str, retryable: bool
) -> None:
    texts = [delta(content="a"), delta(content="b")]
    bodies = [
        sse([*texts, k07(error)]),
        sse([*texts, k07(error)], done=False),
        sse([k07(error)], done=False),
        sse([{"error": error}]),
        sse([*texts, {"choices": [{"delta": {}, "finish_reason": "error", "error": error}]}]),
        sse([calls(part(0, id="c", name="pay", arguments="{}")), k07(error)]),
        sse([*texts, delta("stop"), {"error": error}]),
        sse([*texts, "no json", {"error": error}]),
        json.dumps({"error": error}).encode(),
    ]
    replies = [reply for body in bodies for reply in both_ways(body)]
    async with ask(tmp_path, *replies) as asked:
        for body in bodies:
            for _ in range(2):
                got = await asked.hear()
                assert isinstance(got.error, EffectNotMade)
                assert (got.error.code, got.error.retryable) == (code, retryable)
                assert str(got.error).endswith(": upstream busy")
                assert got.text() == ("ab" if b'"content": "b"' in body else "")
        assert asked.scripted.count == len(replies)


@pytest.mark.parametrize(
    "event",
    [
        k07({"code": 504, "message": "m"}),
        k07({"code": "gateway_timeout", "message": "m"}),
        {"object": "error", "message": "m", "code": 408},
    ],
)
def test_k07_an_error_that_says_timeout_leaves_the_answer_unknown(event: dict[str, Any]) -> None:
    assert isinstance(heard([sse([HELLO, event])]).error, ResponseLost)


def test_k07_an_event_named_error_is_one_and_what_follows_it_is_not_read() -> None:
    for data in ('{"message": "m", "code": 503}', '{"error": {"message": "m", "code": 503}}'):
        body = sse([HELLO], done=False) + f"event: error\ndata: {data}\n\n".encode()
        error = heard([body, *every_byte(sse([delta("stop")]))]).error
        assert isinstance(error, EffectNotMade)
        assert (error.code, error.retryable) == ("provider.http_503", True)
    plain = heard([b"event: error\ndata: upstream busy\n\n"]).error
    assert isinstance(plain, EffectNotMade)
    assert str(plain).endswith("answered 200 with an error: upstream busy")


def test_k07_a_torn_error_may_be_a_timeout() -> None:
    for torn in (b'event: error\ndata: {"code": 50', b'data: {"error": {"code": 50'):
        assert isinstance(heard([sse([HELLO], done=False), torn]).error, ResponseLost)


def test_k07_an_error_of_null_is_none() -> None:
    assert heard([sse([HELLO | {"error": None}, delta("stop") | {"error": None}])]).answer.message.content == "Hello"


@pytest.mark.asyncio
@pytest.mark.parametrize("content_type", ["text/html", "application/json", "text/event-stream"])
async def test_k09_a_page_in_place_of_a_stream_is_named_and_kept(tmp_path: Path, content_type: str) -> None:
    page = "<!doctype html><title>Sign in</title>" + "x" * 500
    async with ask(tmp_path, *both_ways(page.encode(), content_type=content_type)) as asked:
        for _ in range(2):
            error = (await asked.hear()).error
            assert isinstance(error, OutputError)
            url = f"{asked.scripted.base_url}/chat/completions"
            assert f"expected a stream of events, or JSON, from {url}, got {content_type}" in str(error)
            assert page[:200] in str(error)
            assert page[:201] not in str(error)
            assert "it ends in /v1, try it without" in str(error)
            assert error.kept["body"] == page
        assert asked.scripted.count == 2


@pytest.mark.asyncio
async def test_k09_a_redirect_and_an_error_status_end_as_they_do_without_a_stream(tmp_path: Path) -> None:
    async with ask(
        tmp_path,
        Raw("", status=302, headers={"location": "https://login.example.com/in?token=abc"}),
        Failure(429, headers={"Retry-After": "1.5"}),
        Failure(504),
    ) as asked:
        redirect, busy, late = [(await asked.hear()).error for _ in range(3)]
    assert isinstance(redirect, EffectNotMade)
    assert redirect.code == "provider.http_302"
    assert "token" not in str(redirect)
    assert isinstance(busy, EffectNotMade)
    assert getattr(busy, "retry_after_s", None) == 1.5
    assert isinstance(late, ResponseLost)


@pytest.mark.asyncio
async def test_k09_a_whole_document_in_place_of_a_stream_is_read_as_one(tmp_path: Path) -> None:
    document = json.dumps({"choices": [{"message": {"content": "é"}, "finish_reason": "stop"}]}, ensure_ascii=False)
    async with ask(
        tmp_path,
        *both_ways(document.encode(), content_type="application/json"),
        Chunks([document[:-4]], drop=True, content_type="application/json"),
    ) as asked:
        for _ in range(2):
            got = await asked.hear()
            assert (got.answer.message.content, got.shown) == ("é", [])
        assert isinstance((await asked.hear()).error, ResponseLost)


def test_a_whole_message_in_one_chunk_is_taken_and_a_repetition_of_what_came_is_not() -> None:
    whole = {"choices": [{"message": {"content": "Hello"}, "finish_reason": "stop"}]}
    assert heard([sse([whole])]).answer.message.content == "Hello"
    assert heard([sse([HELLO, whole])]).answer.message.content == "Hello"


def test_only_the_first_choice_is_taken() -> None:
    other = {"index": 1, "delta": {"content": "other"}, "finish_reason": "length"}
    mixed = [{"choices": [other, *each["choices"]]} for each in (HELLO, delta("stop"))]
    answer = heard([sse(mixed)]).answer
    assert (answer.message.content, answer.finish_reason) == ("Hello", "stop")


def test_a_refusal_is_the_answer_where_there_is_no_other() -> None:
    got = heard([sse([delta(refusal="I would "), delta("stop", refusal="rather not")])])
    assert (got.answer.message.content, got.answer.finish_reason) == ("I would rather not", "refusal")
    assert got.answer.raw == {"finish_reason": "stop"}
    beside = heard([sse([delta(content="so", refusal="no"), delta("stop")])]).answer
    assert (beside.message.content, beside.finish_reason, beside.raw) == ("so", "stop", {"refusal": "no"})


# Limits and damage


@pytest.mark.parametrize("size", [1, 7, 5000])
def test_a_stream_over_the_limit_is_invalid_and_no_more_of_it_is_read(size: int) -> None:
    body = sse([delta(content="x" * 50)] * 30 + [delta("stop")])
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    error = heard(pieces, response_max_bytes=1024).error
    assert isinstance(error, OutputError)
    assert "longer than 1024 bytes; raise workers.infer.response_max_bytes" in str(error)
    assert error.kept["body"] == body[:1024].decode()


@pytest.mark.parametrize("size", [1, 7, 5000])
def test_what_comes_after_the_end_mark_does_not_count(size: int) -> None:
    body = sse([HELLO, delta("stop")])
    body = b":" * (1024 - len(body) - 2) + b"\n\n" + body + b": more\n\n"
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    assert heard(pieces, response_max_bytes=1024).answer.message.content == "Hello"


def test_g05_halves_of_a_character_are_joined_and_lone_ones_repaired(caplog: pytest.LogCaptureFixture) -> None:
    joined = heard([BODIES["halves"]])
    assert joined.answer.message.content == joined.text() == "ok \U0001f378"
    assert not caplog.text
    lone = heard([BODIES["half"]])
    assert lone.answer.message.content == "ok �"
    assert lone.text() == "ok ", "what is shown is a beginning of what it was"
    assert "held broken characters" in caplog.text
    caplog.clear()
    inner = heard([sse([r'{"choices":[{"delta":{"content":"\ud83c "}}]}', delta("stop", content="x")])])
    assert inner.answer.message.content == inner.text() == "� x"
    assert "held broken characters" in caplog.text


def test_bytes_that_are_no_utf8_are_repaired_and_said(caplog: pytest.LogCaptureFixture) -> None:
    answer = heard([BODIES["no-utf8"]]).answer
    assert answer.message.content.startswith("a�")
    assert "held broken characters" in caplog.text


# Time


@pytest.mark.asyncio
async def test_e11_a_silent_provider_ends_with_the_total_limit(tmp_path: Path) -> None:
    async with ask(tmp_path, Stall(), Stall(Text("late"), when="after_headers")) as asked:
        for _ in range(2):
            got = await asked.hear(timeout_s=0.2, idle_timeout_s=30)
            assert isinstance(got.error, ResponseLost)
            assert "no complete answer within 0.2 s" in str(got.error)
            assert got.not_made is None
        assert asked.scripted.count == 2, "one request a call"
        await asked.scripted.wait_for(gone=2)


@pytest.mark.asyncio
async def test_e11_comments_do_not_put_off_the_total_limit(tmp_path: Path) -> None:
    pings = Chunks([sse([HELLO], done=False), *[b": ping\n\n"] * 5000], pauses_ms=[5] * 5001)
    async with ask(tmp_path, pings) as asked:
        got = await asked.hear(timeout_s=0.3, idle_timeout_s=30)
        assert isinstance(got.error, ResponseLost)
        assert "no complete answer within 0.3 s" in str(got.error)
        assert asked.scripted.count == 1


@pytest.mark.asyncio
async def test_e11_a_stream_that_falls_silent_ends_with_the_idle_limit(tmp_path: Path) -> None:
    async with ask(tmp_path, Stall(Text("some words, and more"), when="mid_body")) as asked:
        got = await asked.hear(timeout_s=60, idle_timeout_s=0.2)
        assert isinstance(got.error, ResponseLost)
        assert "no byte for 0.2 s, the provider's idle_timeout_s" in str(got.error)
        assert got.not_made is None
        assert asked.scripted.count == 1
        await asked.scripted.wait_for(gone=1)


@pytest.mark.parametrize(
    ("pieces", "reason"),
    [
        ([b": ping\n\n", 0.2] * 100, "no complete answer within 1.5 s"),
        ([b": ping\n\n", 0.4] * 100, "no byte for 0.3 s"),
        ([sse([HELLO], done=False), *[0.2, b":"] * 5, 9.0], "no byte for 0.3 s"),
        ([9.0], "no byte for 0.3 s"),
    ],
)
def test_e11_any_byte_breaks_the_silence_and_none_moves_the_total(pieces: list[bytes | float], reason: str) -> None:
    got = heard(pieces, loop=JumpingLoop, timeout_s=1.5, idle_timeout_s=0.3)
    assert isinstance(got.error, ResponseLost)
    assert reason in str(got.error)


def test_e11_a_slow_answer_that_stays_within_both_limits_is_an_answer() -> None:
    events = sse([HELLO, delta("stop")])
    got = heard([0.2, events[:50], 0.25, events[50:]], loop=JumpingLoop, timeout_s=0.5, idle_timeout_s=0.3)
    assert got.answer.message.content == "Hello"


def test_e11_without_a_stream_there_is_no_idle_limit() -> None:
    document = b'{"choices":[{"message":{"content":"ok"},"finish_reason":"stop"}]}'
    got = heard([5.0, document], request=ASK_WHOLE, loop=JumpingLoop, idle_timeout_s=0.3)
    assert got.answer.message.content == "ok"


# Cancelled


@pytest.mark.asyncio
async def test_a_cancelled_stream_that_heard_nothing_was_not_made(tmp_path: Path) -> None:
    async with ask(tmp_path, Stall()) as asked:
        ctx = step_context(asked.config())
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(asked.provider.sample, ASK, ctx)
            await asked.scripted.wait_for(stalled=1)
            tasks.cancel_scope.cancel()
        assert ctx.not_made_reason == "cancelled before the provider answered; connection closed"
        await asked.scripted.wait_for(gone=1)


@pytest.mark.asyncio
async def test_e12_a_stream_cancelled_after_six_pieces_is_unknown_and_the_six_were_shown(tmp_path: Path) -> None:
    pieces = [sse([delta(content=f"piece {number} ")], done=False) for number in range(1, 11)]
    chunks = Chunks([*pieces, sse([delta("stop")], done=False), sse([])])
    async with ask(tmp_path, Stall(chunks, when="mid_body")) as asked:
        shown: list[str] = []
        six = asyncio.Event()

        def show(text: str, kind: str) -> None:
            shown.append(text)
            if len(shown) == 6:
                six.set()

        ctx = step_context(asked.config(), show)
        ended: list[str] = []

        async def call() -> None:
            try:
                await asked.provider.sample(ASK, ctx)
            except anyio.get_cancelled_exc_class():
                ended.append("cancelled")
                raise

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call)
            await six.wait()
            tasks.cancel_scope.cancel()
        assert ended == ["cancelled"]
        assert ctx.not_made_reason is None, "somebody has begun to answer"
        assert shown == [f"piece {number} " for number in range(1, 7)]
