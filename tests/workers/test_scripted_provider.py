"""The scripted provider, asked through real httpx: each reply kind, the record across kills, strict mode, scripts.

Nothing here sleeps: tests wait for the provider's own events, for bytes, or for a process to end.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, closing, contextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from ditto.errors import ConfigError
from ditto.testing.provider import (
    Call,
    Chunks,
    Delay,
    Drop,
    Failure,
    Raw,
    Reply,
    ScriptedProvider,
    Stall,
    StreamCut,
    Text,
    ToolCalls,
    Usage,
    first_user_message,
    main,
    order_script,
    read_requests,
    reply_from_json,
    reply_to_json,
    sse,
)
from ditto.testing.provider_strict import find_problem

ROOT = Path(__file__).resolve().parents[2]
ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
ORDER_TEXT = "Fulfillment request. SKU: SKU-731; quantity: 2; delivery address: Dock-North."


@pytest.fixture
def db(tmp_path: Path) -> Path:
    return tmp_path / "model.sqlite"


def client() -> httpx.AsyncClient:
    return httpx.AsyncClient(trust_env=False, timeout=20)


async def ask(provider: ScriptedProvider, http: httpx.AsyncClient, **more: Any) -> httpx.Response:
    return await http.post(f"{provider.base_url}/chat/completions", json={**ASK, **more})


def ask_stream(
    provider: ScriptedProvider, http: httpx.AsyncClient, **more: Any
) -> AbstractAsyncContextManager[httpx.Response]:
    return http.stream("POST", f"{provider.base_url}/chat/completions", json={**ASK, **more})


async def one_answer(db: Path, reply: Reply, **more: Any) -> httpx.Response:
    async with ScriptedProvider(db, [reply]) as provider, client() as http:
        return await ask(provider, http, **more)


async def raw_pieces(db: Path, reply: Reply, **more: Any) -> list[bytes]:
    """The body as httpx gives it, piece by piece, up to its end or the error that ended it."""
    pieces: list[bytes] = []
    async with (
        ScriptedProvider(db, [reply]) as provider,
        client() as http,
        ask_stream(provider, http, **more) as response,
    ):
        try:
            async for piece in response.aiter_raw():
                pieces.append(piece)  # noqa: PERF401 - what came before an error is wanted
        except httpx.RemoteProtocolError:
            pieces.append(b"<cut>")
    return pieces


def events(pieces: list[bytes]) -> list[Any]:
    data = [line[len("data: ") :] for line in b"".join(pieces).decode().split("\n\n") if line]
    assert data[-1] == "[DONE]"
    return [json.loads(text) for text in data[:-1]]


# --- answers ---------------------------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_text_with_and_without_the_v1_prefix(db: Path) -> None:
    async with ScriptedProvider(db, script=[Text("hello")], repeat_last=True) as provider, client() as http:
        first = await ask(provider, http)
        assert provider.base_url.startswith("http://127.0.0.1:") and provider.base_url.endswith("/v1")
        second = await http.post(provider.base_url.removesuffix("/v1") + "/chat/completions", json=ASK)
    assert first.status_code == second.status_code == 200
    document = first.json()
    assert document["object"] == "chat.completion" and document["id"] == "chatcmpl-1" and document["model"] == "m"
    assert document["choices"] == [
        {"index": 0, "message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}
    ]
    assert document["usage"] == {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
    assert second.json()["choices"] == document["choices"]


@pytest.mark.asyncio
async def test_tool_calls_send_the_arguments_string_exactly(db: Path) -> None:
    calls = [Call("c1", "add", '{"x": 1}'), Call(None, "health", "{bad")]
    document = (await one_answer(db, ToolCalls(calls, reasoning="hm", usage=None))).json()
    (choice,) = document["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["reasoning_content"] == "hm"
    assert choice["message"]["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}},
        {"type": "function", "function": {"name": "health", "arguments": "{bad"}},
    ]
    assert "usage" not in document


@pytest.mark.asyncio
async def test_streamed_text_in_pieces_with_usage_and_end_mark(db: Path) -> None:
    text = "日本✅é and some more text than one piece"
    pieces = await raw_pieces(db, Text(text, usage=Usage(3, 1)), stream=True, stream_options={"include_usage": True})
    *chunks, finish, usage = events(pieces)
    assert len(pieces) == len(chunks) + 3  # each event, and the end mark, is one HTTP chunk
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == text
    assert finish["choices"] == [{"index": 0, "delta": {}, "finish_reason": "stop"}]
    assert finish["usage"] is None
    assert usage["choices"] == []
    assert usage["usage"] == {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}


@pytest.mark.asyncio
async def test_no_usage_chunk_unless_asked_for(db: Path) -> None:
    assert not any("usage" in event for event in events(await raw_pieces(db, Text("x"), stream=True)))


@pytest.mark.asyncio
async def test_streamed_tool_calls_can_be_put_together_by_index(db: Path) -> None:
    calls = (Call("c1", "write", '{"path": "f", "text": "abcdef"}'), Call("c2", "health", ""))
    put_together: dict[int, list[str]] = {}
    for event in events(await raw_pieces(db, ToolCalls(calls), stream=True)):
        for delta in event["choices"][0]["delta"].get("tool_calls", []):
            parts = put_together.setdefault(delta["index"], ["", "", ""])
            parts[0] += delta.get("id", "")
            parts[1] += delta["function"].get("name", "")
            parts[2] += delta["function"]["arguments"]
    assert [tuple(put_together[index]) for index in (0, 1)] == [(call.id, call.name, call.arguments) for call in calls]


@pytest.mark.asyncio
async def test_failure_with_headers_and_with_a_body_of_its_own(db: Path) -> None:
    script = [
        Failure(429, "slow down", code="rate_limit", headers={"Retry-After": "2", "retry-after-ms": "1500"}),
        Failure(504, body="upstream timed out"),
        Failure(200, body={"error": {"code": 502}}),
    ]
    async with ScriptedProvider(db, script) as provider, client() as http:
        limited, late, odd = [await ask(provider, http) for _ in script]
    assert limited.status_code == 429 and limited.headers["retry-after"] == "2"
    assert limited.headers["retry-after-ms"] == "1500"
    assert limited.json()["error"]["message"] == "slow down" and limited.json()["error"]["code"] == "rate_limit"
    assert (late.status_code, late.text) == (504, "upstream timed out")
    assert (odd.status_code, odd.json()) == (200, {"error": {"code": 502}})


@pytest.mark.asyncio
async def test_raw_page_and_redirect(db: Path) -> None:
    page = "<!doctype html><title>Sign in</title>"
    script = [Raw(page, content_type="text/html"), Raw(b"", status=302, headers={"Location": "/login"})]
    async with ScriptedProvider(db, script) as provider, client() as http:
        html, redirect = await ask(provider, http), await ask(provider, http)
    assert (html.status_code, html.headers["content-type"], html.text) == (200, "text/html", page)
    assert (redirect.status_code, redirect.headers["location"]) == (302, "/login")


@pytest.mark.asyncio
async def test_chunks_one_byte_at_a_time(db: Path) -> None:
    data = sse([{"choices": [{"index": 0, "delta": {"content": "日本✅é"}, "finish_reason": "stop"}]}])
    assert data.endswith(b"data: [DONE]\n\n")
    assert await raw_pieces(db, Chunks([data], size_bytes=1)) == [bytes([byte]) for byte in data]


@pytest.mark.asyncio
async def test_chunks_keep_their_pieces_and_pauses(db: Path) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    pieces = [b"\xef\xbb\xbf: ping\n\n", "data: \xe9".encode()[:-1], b"\xa9\n\n"]
    reply = Chunks(pieces, pauses_ms=[0, 250], content_type="text/event-stream; charset=utf-8")
    async with (
        ScriptedProvider(db, [reply], sleep=sleep) as provider,
        client() as http,
        ask_stream(provider, http) as response,
    ):
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert [piece async for piece in response.aiter_raw()] == pieces
    assert slept == [0, 0.25]


@pytest.mark.asyncio
async def test_chunks_may_end_with_a_dropped_connection(db: Path) -> None:
    assert await raw_pieces(db, Chunks(["data: 1\n\n", "data: 2\n\n"], drop=True)) == [
        b"data: 1\n\n",
        b"data: 2\n\n",
        b"<cut>",
    ]


# --- closed connections ----------------------------------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize("reply", [Drop(), Drop("after_headers"), Drop("mid_body"), StreamCut(0)])
async def test_dropped_connections_are_protocol_errors_without_a_traceback(
    db: Path, reply: Reply, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(httpx.RemoteProtocolError):
        await one_answer(db, reply)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.asyncio
@pytest.mark.parametrize("when", ["before", "after_headers", "mid_body"])
async def test_a_reset_is_a_read_error(db: Path, when: Any) -> None:
    with pytest.raises(httpx.ReadError):
        await one_answer(db, Drop(when, reset=True))


@pytest.mark.asyncio
async def test_a_drop_after_bytes_sends_exactly_these_of_the_announced_length(db: Path) -> None:
    body = b'{"whole": true}'
    received = b""
    async with (
        ScriptedProvider(db, [Drop("mid_body", after_bytes=4, reply=Raw(body))]) as provider,
        client() as http,
        ask_stream(provider, http) as response,
    ):
        assert response.headers["content-length"] == str(len(body))
        with pytest.raises(httpx.RemoteProtocolError):
            async for piece in response.aiter_raw():
                received += piece
    assert received == body[:4]


@pytest.mark.asyncio
async def test_a_stream_is_cut_after_so_many_chunks(db: Path) -> None:
    *pieces, end = await raw_pieces(db, StreamCut(2, Text("a text of more than one piece")), stream=True)
    assert end == b"<cut>" and len(pieces) == 2
    assert b'"role": "assistant"' in pieces[0] and b'"content": "a text of mo"' in pieces[1]


@pytest.mark.asyncio
async def test_a_dropped_stream_is_cut_between_two_chunks(db: Path) -> None:
    *pieces, end = await raw_pieces(db, Drop("mid_body"), stream=True)
    assert end == b"<cut>" and len(pieces) > 1 and all(piece.endswith(b"\n\n") for piece in pieces)


# --- time ------------------------------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_stall_answers_when_released(db: Path) -> None:
    script = [Stall(Text("late")), Stall(Text("later"))]
    async with ScriptedProvider(db, script) as provider, client() as http:
        asked = [asyncio.create_task(ask(provider, http)) for _ in script]
        await provider.wait_for(stalled=2)
        assert provider.count == 2 and not any(task.done() for task in asked)
        assert (provider.release(), provider.release()) == (2, 0)
        contents = {(await task).json()["choices"][0]["message"]["content"] for task in asked}
    assert contents == {"late", "later"}


@pytest.mark.asyncio
@pytest.mark.parametrize("when", ["before", "after_headers", "mid_body"])
async def test_a_stall_with_nothing_to_say_closes_when_released(db: Path, when: Any) -> None:
    async with ScriptedProvider(db, [Stall(when=when)]) as provider, client() as http:
        asked = asyncio.create_task(ask(provider, http))
        await provider.wait_for(stalled=1)
        provider.release()
        with pytest.raises(httpx.RemoteProtocolError):
            await asked


@pytest.mark.asyncio
async def test_a_stall_in_the_body_sends_the_rest_after_the_release(db: Path) -> None:
    reply = Stall(Chunks([b"one", b"two", b"three", b"four"]), when="mid_body")
    async with (
        ScriptedProvider(db, [reply]) as provider,
        client() as http,
        ask_stream(provider, http) as response,
    ):
        pieces = response.aiter_raw()
        assert [await anext(pieces), await anext(pieces)] == [b"one", b"two"]
        await provider.wait_for(stalled=1)
        provider.release()
        assert [piece async for piece in pieces] == [b"three", b"four"]


@pytest.mark.asyncio
@pytest.mark.parametrize("reply", [Stall(), Stall(when="after_headers"), Delay(3_600_000, Text("x"))])
async def test_a_client_may_go_away(db: Path, reply: Reply, caplog: pytest.LogCaptureFixture) -> None:
    async with ScriptedProvider(db, [reply, Text("next")]) as provider, client() as http:
        asked = asyncio.create_task(ask(provider, http))
        await provider.wait_for(arrived=1)
        asked.cancel()
        await asyncio.wait([asked])
        await provider.wait_for(gone=1)
        assert (await ask(provider, http)).json()["choices"][0]["message"]["content"] == "next"
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.asyncio
@pytest.mark.parametrize("reply", [Stall(), Stall(Text("x"), when="mid_body"), Delay(3_600_000, Text("x"))])
async def test_closing_does_not_wait_for_stalled_requests(db: Path, reply: Reply) -> None:
    async with client() as http:
        async with ScriptedProvider(db, [reply]) as provider:
            asked = asyncio.create_task(ask(provider, http))
            await provider.wait_for(arrived=1)
        with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)):
            await asked
        with pytest.raises(httpx.ConnectError):
            await ask(provider, http)


@pytest.mark.asyncio
async def test_closing_inside_a_cancelled_scope(db: Path) -> None:
    with anyio.CancelScope() as scope:
        async with ScriptedProvider(db, [Text("x")]) as provider, client() as http:
            await ask(provider, http)
            scope.cancel()
    assert provider.count == 1


@pytest.mark.asyncio
async def test_delay_waits_on_the_given_clock(db: Path) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    async with ScriptedProvider(db, [Delay(1500, Text("late"))], sleep=sleep) as provider, client() as http:
        assert (await ask(provider, http)).status_code == 200
    assert slept == [1.5]


# --- the record ------------------------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_every_request_is_recorded_and_only_those_to_the_model_are_counted(db: Path) -> None:
    async with ScriptedProvider(db, [Text("a"), Text("b")]) as provider, client() as http:
        assert provider.count == 0
        models = await http.get(f"{provider.base_url}/models")
        assert (await http.post(f"{provider.base_url}/embeddings", json={})).status_code == 404
        assert (await http.get(f"{provider.base_url}/chat/completions")).status_code == 405
        await ask(provider, http)
        bad = await http.post(f"{provider.base_url}/chat/completions", content=b"\xff[")
        await ask(provider, http, temperature=0)
    assert models.json()["data"][0]["object"] == "model"
    assert bad.status_code == 400
    assert [(seen.seq, seen.path, seen.script_step) for seen in provider.requests()] == [
        (4, "/v1/chat/completions", 0),
        (5, "/v1/chat/completions", None),
        (6, "/v1/chat/completions", 1),
    ]
    assert provider.count == 3
    assert provider.requests()[0].body == ASK
    assert provider.requests()[1].body == {} and provider.requests()[1].text == b"\xff["
    assert provider.requests()[2].body == {**ASK, "temperature": 0}
    assert [(seen.method, seen.path) for seen in read_requests(db)[:3]] == [
        ("GET", "/v1/models"),
        ("POST", "/v1/embeddings"),
        ("GET", "/v1/chat/completions"),
    ]


@pytest.mark.asyncio
async def test_credentials_are_not_stored(db: Path) -> None:
    async with ScriptedProvider(db, [Text("x")]) as provider, client() as http:
        url = f"{provider.base_url}/chat/completions?api-key=query-secret"
        headers = {"Authorization": "Bearer header-secret", "X-Tenant": "other-secret"}
        await http.post(url, json=ASK, headers=headers)
        files = b"".join(path.read_bytes() for path in sorted(db.parent.iterdir()))
    assert b"hi" in files and b"secret" not in files
    (seen,) = provider.requests()
    assert {"authorization", "x-tenant"} <= set(seen.header_names)


def look_into(db: Path) -> tuple[list[Any], str]:
    with closing(sqlite3.connect(db)) as other:
        rows = other.execute("SELECT seq, script_step FROM requests").fetchall()
        return rows, other.execute("PRAGMA journal_mode").fetchone()[0]


@pytest.mark.asyncio
async def test_the_row_is_durable_before_anything_is_answered(db: Path) -> None:
    async with (
        ScriptedProvider(db, [Stall(when="after_headers")]) as provider,
        client() as http,
        ask_stream(provider, http),
    ):
        rows, mode = look_into(db)
    assert rows == [(1, 0)]
    assert mode == "wal"


@pytest.mark.asyncio
async def test_two_requests_at_once_get_two_numbers_and_two_replies(db: Path) -> None:
    async with ScriptedProvider(db, [Text("a"), Text("b")]) as provider, client() as http:
        answers = await asyncio.gather(ask(provider, http), ask(provider, http))
    assert {answer.json()["choices"][0]["message"]["content"] for answer in answers} == {"a", "b"}
    assert [(seen.seq, seen.script_step) for seen in provider.requests()] == [(1, 0), (2, 1)]


@pytest.mark.asyncio
async def test_the_position_survives_a_restart_and_belongs_to_the_script(db: Path) -> None:
    async def contents(script: list[Reply], count: int, **more: Any) -> list[Any]:
        async with ScriptedProvider(db, script, **more) as provider, client() as http:
            answers = [await ask(provider, http) for _ in range(count)]
        return [answer.json()["choices"][0]["message"]["content"] for answer in answers]

    script: list[Reply] = [Text("a"), Text("b"), Text("c")]
    assert await contents(script, 1) == ["a"]
    assert await contents([Text("other")], 1) == ["other"]
    assert await contents(script, 2) == ["b", "c"]
    assert await contents(script, 1, name="again") == ["a"]
    assert [seen.seq for seen in read_requests(db)] == [1, 2, 3, 4, 5]


@pytest.mark.asyncio
async def test_past_the_end_is_a_500_or_the_last_reply_again(db: Path) -> None:
    async with ScriptedProvider(db, [Text("a")]) as provider, client() as http:
        await ask(provider, http)
        past = await ask(provider, http)
    assert past.status_code == 500 and "1 replies and this is request 2" in past.json()["error"]["message"]
    async with ScriptedProvider(db, [Text("a")], repeat_last=True) as provider, client() as http:
        assert (await ask(provider, http)).json()["choices"][0]["message"]["content"] == "a"


@pytest.mark.asyncio
async def test_conversations_have_their_own_positions(db: Path) -> None:
    script = [Text("a"), Text("b")]
    async with ScriptedProvider(db, script, conversation=first_user_message) as provider, client() as http:
        others = [{"role": "user", "content": [{"type": "text", "text": "other"}]}]
        answers = [await ask(provider, http), await ask(provider, http, messages=others), await ask(provider, http)]
    assert [answer.json()["choices"][0]["message"]["content"] for answer in answers] == ["a", "a", "b"]
    assert [seen.seq for seen in provider.requests()] == [1, 2, 3]


@pytest.mark.asyncio
async def test_a_callable_script_gets_the_request_and_its_index(db: Path, caplog: pytest.LogCaptureFixture) -> None:
    def script(request: dict[str, Any], index: int) -> Reply:
        if index == 1:
            raise LookupError("no idea")
        return Text(f"{index}: {request['messages'][-1]['content']}")

    async with ScriptedProvider(db, script) as provider, client() as http:
        assert (await ask(provider, http)).json()["choices"][0]["message"]["content"] == "0: hi"
        broken = await ask(provider, http)
    assert broken.status_code == 500 and "LookupError: no idea" in broken.json()["error"]["message"]
    assert "the script failed on request 2" in caplog.text


@pytest.mark.asyncio
async def test_a_reply_that_cannot_be_cut_there_is_a_failed_script(db: Path, caplog: pytest.LogCaptureFixture) -> None:
    script: list[Reply] = [Drop("mid_body", after_bytes=2, reply=Raw("ab")), StreamCut(9)]
    async with ScriptedProvider(db, script) as provider, client() as http:
        answers = [await ask(provider, http), await ask(provider, http, stream=True)]
    assert [answer.status_code for answer in answers] == [500, 500]
    assert "use 0 to 1" in answers[0].text and "cannot be cut after 9" in answers[1].text
    assert caplog.text.count("the script failed") == 2


@pytest.mark.asyncio
async def test_a_provider_is_started_once_on_a_port_that_is_free(db: Path) -> None:
    provider = ScriptedProvider(db, [])
    assert provider.count == 0
    with pytest.raises(ConfigError, match="async with"):
        _ = provider.base_url
    async with provider:
        port = int(provider.base_url.split(":")[2].removesuffix("/v1"))
        with pytest.raises(ConfigError, match=f"port {port}"):
            await ScriptedProvider(db, [], port=port).__aenter__()
    with pytest.raises(ConfigError, match="started before"):
        await provider.__aenter__()
    async with ScriptedProvider(db, [], port=port) as again:
        assert again.base_url == provider.base_url


@pytest.mark.asyncio
@pytest.mark.parametrize("missing", ["starlette", "uvicorn"])
async def test_a_missing_extra_is_named(db: Path, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.delitem(sys.modules, "ditto.testing.provider_http", raising=False)
    monkeypatch.delattr("ditto.testing.provider_http", raising=False)
    for name in [name for name in sys.modules if name.partition(".")[0] == missing]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"ditto-runtime\[testing\]"):
        await ScriptedProvider(db, []).__aenter__()


# --- strict mode -----------------------------------------------------------------------------------------------------


def turn(*calls: tuple[str, str], **more: Any) -> dict[str, Any]:
    made = [{"id": name, "type": "function", "function": {"name": "f", "arguments": text}} for name, text in calls]
    return {"role": "assistant", "content": None, **({"tool_calls": made} if made else {"content": "ok"}), **more}


def result(call_id: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": "done"}


USER = {"role": "user", "content": "go"}


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([USER], None),
        ([USER, turn(("a", "{}"), ("b", '{"x": 1}')), result("b"), result("a"), turn(), USER], None),
        ([], "at least one message"),
        ([{"role": "robot", "content": "x"}], "role"),
        ([{"role": "user"}], "content: missing"),
        ([USER, turn(("a", "{}"))], "the tool calls a have no result"),
        ([USER, turn(("a", "{}"), ("b", "{}")), result("a"), USER], "before the results of the tool calls b"),
        ([USER, result("a")], "'a' answers no call"),
        ([USER, turn(("a", "{}")), result("a"), result("a")], "'a' answers no call"),
        ([USER, turn(("a", "{}"), ("a", "{}")), result("a")], "is the id of messages[1].tool_calls[0] too"),
        (
            [turn(("a", "{}")), result("a"), turn(("a", "{}")), result("a")],
            "is the id of messages[0].tool_calls[0] too",
        ),
        ([turn(("", "{}")), result("")], "tool_calls[0].id"),
        ([turn(("a", "")), result("a")], "expected a JSON object in a string, got ''"),
        ([turn(("a", "{bad")), result("a")], "expected a JSON object"),
        ([turn(("a", "[1]")), result("a")], "expected a JSON object"),
        ([turn(("a", '{"x": NaN}')), result("a")], "expected a JSON object"),
    ],
)
def test_strict_rules(messages: list[Any], problem: str | None) -> None:
    found = find_problem({"messages": messages}, strict=True, reasoning_content="ignore")
    assert (found is None) if problem is None else (found is not None and problem in found)
    assert find_problem({"messages": messages}, strict=False, reasoning_content="ignore") is None


@pytest.mark.parametrize("strict", [True, False])
def test_reasoning_content_is_required_refused_or_ignored(strict: bool) -> None:
    with_it, without = {"messages": [USER, turn(reasoning_content="hm")]}, {"messages": [USER, turn()]}
    assert find_problem(with_it, strict=strict, reasoning_content="require") is None
    assert find_problem(without, strict=strict, reasoning_content="refuse") is None
    assert "requires" in str(find_problem(without, strict=strict, reasoning_content="require"))
    assert "refuses" in str(find_problem(with_it, strict=strict, reasoning_content="refuse"))
    assert find_problem(with_it, strict=strict, reasoning_content="ignore") is None


@pytest.mark.asyncio
async def test_a_strict_provider_answers_400_and_the_script_does_not_move(db: Path) -> None:
    async with ScriptedProvider(db, [Text("a")], strict=True) as provider, client() as http:
        refused = await ask(provider, http, messages=[USER, turn(("a", "{}"))])
        accepted = await ask(provider, http)
    assert refused.status_code == 400 and "no result" in refused.json()["error"]["message"]
    assert accepted.status_code == 200
    assert [(seen.script_step, bool(seen.refused)) for seen in provider.requests()] == [(None, True), (0, False)]


# --- replies as JSON -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reply",
    [
        Text("x"),
        Text(None, finish_reason=None, usage=None, reasoning="hm"),
        ToolCalls([Call("a", "f", "{bad"), Call(None, "g")], usage=Usage(1, 2)),
        Failure(429, "no", headers={"Retry-After": "2"}),
        Failure(200, body={"base64": "kept as it is"}),
        Raw(b"\xff\x00", content_type="text/html"),
        Chunks([b"\xe6", "é"], pauses_ms=[1], size_bytes=1, drop=True),
        Drop("mid_body", after_bytes=3, reset=True, reply=Raw("abcdef")),
        StreamCut(2, Text("abc")),
        Stall(),
        Stall(Delay(5, Text("x")), when="mid_body"),
    ],
)
def test_replies_come_back_from_json(reply: Reply) -> None:
    assert reply_from_json(json.loads(json.dumps(reply_to_json(reply)))) == reply


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("text", "reply: expected an object"),
        ({"kind": "song"}, "kind 'song' is unknown; use one of text,"),
        ({"kind": "text"}, "reply: .*content"),
        ({"kind": "text", "content": "x", "colour": "red"}, "Text takes content, finish_reason"),
        ({"kind": "delay", "ms": 1, "reply": {"kind": "x"}}, "reply.reply: kind 'x'"),
        ({"kind": "tool_calls", "calls": [{"id": "a"}]}, r"reply.calls\[0\]"),
        ({"kind": "tool_calls", "calls": [{"id": "a", "name": "f", "arguments": {}}]}, "exact string"),
        ({"kind": "chunks", "pieces": "data"}, "reply.pieces: expected a list"),
    ],
)
def test_a_wrong_reply_is_named(document: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        reply_from_json(document)


# --- the order script ------------------------------------------------------------------------------------------------


def order_answer(*messages: tuple[str, Any], **more: Any) -> Any:
    request = {"messages": [{"role": role, "content": content} for role, content in messages], **more}
    reply = order_script(request, 0)
    return json.loads(reply.content or "") if isinstance(reply, Text) else reply


@pytest.mark.parametrize(
    "content",
    [
        ORDER_TEXT,
        f"Extract the order of this text: {ORDER_TEXT}",
        f"{ORDER_TEXT}\n\nAnswer with JSON only.",
        [{"type": "text", "text": ORDER_TEXT}],
        json.dumps({"source": ORDER_TEXT}),
    ],
)
def test_the_order_script_reads_the_order(content: Any) -> None:
    expected = {"sku": "SKU-731", "quantity": 2, "address": "Dock-North"}
    assert order_answer(("system", "Extract sku, quantity and address."), ("user", content)) == expected


CHECKPOINT = {"order": {"sku": "SKU-731", "quantity": 2, "address": "Dock-North"}, "stage": "reserved"}
SESSION = {"sku": "SKU-731", "quantity": 2, "stage": "reserved"}


@pytest.mark.parametrize(
    "messages",
    [
        [("user", json.dumps({**CHECKPOINT, "question": "Which stage?"}))],
        [("user", f"{ORDER_TEXT}\nCheckpoint: {json.dumps(CHECKPOINT, indent=1)}\nWhich stage: now?")],
        [("user", ORDER_TEXT), ("assistant", "{}"), ("user", json.dumps({"job": CHECKPOINT})), ("user", "Which?")],
        [("system", json.dumps({**CHECKPOINT, "stage": "prepared"})), ("user", json.dumps(CHECKPOINT)), ("user", "?")],
    ],
)
def test_the_order_script_answers_about_the_latest_checkpoint(messages: list[tuple[str, Any]]) -> None:
    assert order_answer(*messages) == SESSION


def test_the_order_script_follows_a_schema_of_another_domain() -> None:
    schema = {
        "type": "object",
        "properties": {
            "from_account": {"type": "string"},
            "account": {"type": "string"},
            "amountCents": {"type": "integer"},
            "rate": {"anyOf": [{"type": "number"}, {"type": "null"}]},
            "urgent": {"type": ["boolean", "null"]},
            "note": {"type": "string"},
        },
        "required": ["from_account", "account", "amountCents"],
    }
    text = "Transfer. From account: ACC-1; to account: ACC-2;\namount cents: -1250;\nrate: 1.5; urgent: yes;"
    expected = {"from_account": "ACC-1", "account": "ACC-2", "amountCents": -1250, "rate": 1.5, "urgent": True}
    wrapped = {"type": "json_schema", "json_schema": {"name": "transfer", "schema": schema}}
    assert order_answer(("user", text), response_format=wrapped) == expected
    assert order_answer(("system", f"The schema:\n{json.dumps(schema, indent=2)}"), ("user", text)) == expected
    assert order_answer(("system", text), ("user", json.dumps({"payload": schema}, indent=2))) == expected


def test_the_order_script_answers_about_a_checkpoint_of_another_domain() -> None:
    checkpoint = json.dumps({"order": {"amount": 5, "to": "B"}, "stage": "held"})
    assert order_answer(("user", checkpoint)) == {"amount": 5, "to": "B", "stage": "held"}
    schema = {"schema": {"properties": {"amount": {"type": "integer"}, "stage": {"type": "string"}}}}
    assert order_answer(("user", checkpoint), response_format=schema) == {"amount": 5, "stage": "held"}


@pytest.mark.parametrize("content", ["How are you?", "SKU: X; quantity: many; address: Y", '{"stage": 1, "order": {}}'])
def test_the_order_script_says_what_it_does_not_understand(content: str) -> None:
    refusal = order_answer(("user", content))
    assert isinstance(refusal, Failure) and refusal.status == 400 and "understands nothing else" in refusal.message


# --- the command -----------------------------------------------------------------------------------------------------


@contextmanager
def command(db: Path, *arguments: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The command in a process of its own, once it listens; killed at the end if it still runs."""
    line = [sys.executable, "-W", "error", "-m", "ditto.testing.provider", "--db", str(db), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        line, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            first = process.stdout.readline()
            assert first, process.stderr.read()
            yield json.loads(first)["base_url"], process
        finally:
            process.kill()


def ask_command(base_url: str, content: str = "hi") -> Any:
    body = {**ASK, "messages": [{"role": "user", "content": content}]}
    answer = httpx.post(f"{base_url}/chat/completions", json=body, trust_env=False, timeout=20)
    return answer.raise_for_status().json()["choices"][0]["message"]["content"]


def test_the_command_counts_across_sigkill_and_goes_on(db: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    replies: list[Reply] = [Text("one"), Stall(when="after_headers"), Text("three")]
    script.write_text(json.dumps([reply_to_json(reply) for reply in replies]))
    with command(db, "--script", str(script)) as (base_url, process):
        assert ask_command(base_url) == "one"
        with httpx.stream("POST", f"{base_url}/chat/completions", json=ASK, trust_env=False, timeout=20) as response:
            process.send_signal(signal.SIGKILL)  # the headers are here, so the request is on disk
            assert process.wait() == -signal.SIGKILL
            with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)):
                response.read()
    assert [seen.seq for seen in read_requests(db)] == [1, 2]
    with command(db, "--script", str(script)) as (base_url, process):
        assert ask_command(base_url) == "three"
    assert [(seen.seq, seen.script_step) for seen in read_requests(db)] == [(1, 0), (2, 1), (3, 2)]


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT])
def test_the_command_ends_cleanly_though_a_request_is_stalled(db: Path, tmp_path: Path, end: signal.Signals) -> None:
    script = tmp_path / "script.json"
    script.write_text(json.dumps([reply_to_json(Stall(when="after_headers"))]))
    with (
        command(db, "--script", str(script), "--strict", "--per-conversation") as (base_url, process),
        httpx.stream("POST", f"{base_url}/chat/completions", json=ASK, trust_env=False, timeout=20),
    ):
        process.send_signal(end)
        rest, complaints = process.communicate(timeout=20)
    assert (process.returncode, rest, complaints) == (0, "", "")


def test_the_command_plays_the_order_script_by_default(db: Path) -> None:
    with command(db) as (base_url, _):
        assert json.loads(ask_command(base_url, ORDER_TEXT))["sku"] == "SKU-731"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--script", "nobody"], "neither a file nor one of order"),
        (["--script", __file__], "cannot be read as a script"),
        (["--db", "/nonexistent/folder/model.sqlite"], "unable to open database file"),
    ],
)
def test_the_command_says_why_it_cannot_start(
    db: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--db", str(db), *arguments]) == 2
    assert message in capsys.readouterr().err
