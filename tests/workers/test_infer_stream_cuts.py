"""Streamed answers, however they are cut: the same ending, and the Sample of the same answer not streamed."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ditto.testing.provider import Call, Reply, ScriptedProvider, Text, ToolCalls, sse
from ditto_workers.infer.openai import open_openai_provider
from tests.workers.test_infer_stream import ASK, ASK_WHOLE, config_for, every_byte, hear, heard
from tests.workers.test_infer_stream import BODIES as OTHER_BODIES
from tests.workers.test_infer_stream_calls import BODIES as CALL_BODIES

BODIES = {**OTHER_BODIES, **CALL_BODIES}


def cut_at(body: bytes, cuts: list[int]) -> list[bytes]:
    places = [0, *sorted(cuts), len(body)]
    return [body[start:end] for start, end in pairwise(places)]


@pytest.mark.parametrize("name", BODIES)
@settings(max_examples=15, deadline=None)
@given(is_cut=st.booleans(), data=st.data())
def test_the_cuts_between_chunks_decide_nothing(name: str, is_cut: bool, data: st.DataObject) -> None:
    body = BODIES[name]
    cuts = data.draw(st.lists(st.integers(0, len(body)), max_size=12))
    assert heard(cut_at(body, cuts), is_cut=is_cut).ending() == heard([body], is_cut=is_cut).ending()


@pytest.mark.parametrize("is_cut", [False, True], ids=["ended", "cut"])
@pytest.mark.parametrize("name", BODIES)
def test_a_body_byte_by_byte_is_the_same_body(name: str, is_cut: bool) -> None:
    body = BODIES[name]
    assert heard(every_byte(body), is_cut=is_cut).ending() == heard([body], is_cut=is_cut).ending()


# The same as without a stream

TEXTS = st.text(st.characters(codec="utf-8") | st.sampled_from("\ufeff\u2028\U0001f378\r\n\0 "), max_size=12)
WORDS = st.text("abc_-0", min_size=1, max_size=6)
CALL = st.builds(
    lambda id, name, arguments: {"id": id, "function": {"name": name, "arguments": arguments}},
    id=st.none() | WORDS,
    name=WORDS,
    arguments=TEXTS | st.sampled_from(["{}", '{"x":1}', "{bad", "null"]),
)
COUNT = st.none() | st.integers(0, 99)


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    message = {
        "role": "assistant",
        "content": draw(st.none() | TEXTS),
        "reasoning_content": draw(st.none() | TEXTS),
        "refusal": draw(st.none() | WORDS),
        "tool_calls": draw(st.none() | st.lists(CALL, max_size=3)),
    }
    usage = {"prompt_tokens": draw(COUNT), "completion_tokens": draw(COUNT)}
    return {
        "id": draw(st.none() | WORDS),
        "model": draw(st.none() | WORDS),
        "system_fingerprint": draw(st.none() | WORDS),
        "choices": [{"message": message, "finish_reason": draw(st.sampled_from(["stop", "LENGTH", "", None, "odd"]))}],
        "usage": draw(st.sampled_from([None, usage])),
    }


def pieces_of(draw: st.DrawFn, text: str | None) -> list[str]:
    """The text in pieces, cut where a program that counts in UTF-16 might cut it."""
    units = (text or "").encode("utf-16-le", "surrogatepass")
    halves = [units[at : at + 2].decode("utf-16-le", "surrogatepass") for at in range(0, len(units), 2)]
    cuts = sorted(draw(st.lists(st.integers(0, len(halves)), max_size=3)))
    places = [0, *cuts, len(halves)]
    return ["".join(halves[start:end]) for start, end in pairwise(places)]


@st.composite
def answers(draw: st.DrawFn) -> tuple[dict[str, Any], bytes]:
    """A document, and a stream that says the same."""
    document = draw(documents())
    choice = document["choices"][0]
    message = choice["message"]
    head = {name: document[name] for name in ("id", "model", "system_fingerprint")}
    deltas: list[dict[str, Any]] = [{"role": "assistant"}]
    deltas += [{"reasoning_content": piece} for piece in pieces_of(draw, message["reasoning_content"])]
    deltas += [{"content": piece} for piece in pieces_of(draw, message["content"])]
    deltas += [{"refusal": piece} for piece in pieces_of(draw, message["refusal"])]
    threads = []
    for index, call in enumerate(message["tool_calls"] or []):
        first, *rest = pieces_of(draw, call["function"]["arguments"])
        opening = {"id": call["id"], "function": {"name": call["function"]["name"], "arguments": first}}
        threads.append(
            [{"index": index, **each} for each in [opening, *({"function": {"arguments": p}} for p in rest)]]
        )
    while any(threads):
        thread = draw(st.sampled_from([each for each in threads if each]))
        deltas.append({"tool_calls": [thread.pop(0)]})
    events = [{**head, "choices": [{"delta": each, "finish_reason": None}]} for each in deltas]
    events.append({**head, "choices": [{"delta": {}, "finish_reason": choice["finish_reason"]}]})
    events.append({"choices": [], "usage": document["usage"]})
    ascii_only = draw(st.booleans())
    try:
        texts = [json.dumps(event, ensure_ascii=ascii_only) for event in events]
        return document, sse(texts)
    except UnicodeEncodeError:  # half a pair has no UTF-8
        return document, sse([json.dumps(event) for event in events])


@settings(max_examples=150, deadline=None)
@given(answer=answers(), data=st.data())
def test_a_streamed_answer_is_the_sample_of_the_same_answer_not_streamed(
    answer: tuple[dict[str, Any], bytes], data: st.DataObject
) -> None:
    document, body = answer
    cuts = data.draw(st.lists(st.integers(0, len(body)), max_size=8))
    streamed = heard(cut_at(body, cuts))
    whole = heard([json.dumps(document).encode()], request=ASK_WHOLE, content_type="application/json")
    assert streamed.ending()[:4] == whole.ending()[:4]
    assert not whole.shown
    message = document["choices"][0]["message"]
    for kind, name in (("text", "content"), ("reasoning", "reasoning_content")):
        assert streamed.text(kind) == (message[name] or ""), "what is shown is what it was"


@pytest.mark.asyncio
async def test_the_scripted_provider_says_the_same_streamed_and_not(tmp_path: Path) -> None:
    replies: list[Reply] = [
        Text("A text of more than twelve characters, 日本.", reasoning="I think, at length"),
        ToolCalls([Call("c1", "look", '{"where": "here"}'), Call(None, "stop", "")], content="so"),
        Text("cut", finish_reason="length", usage=None),
    ]
    for at, reply in enumerate(replies):
        samples = []
        for request in (ASK, ASK_WHOLE):
            path = tmp_path / f"{at}-{request.stream}.sqlite"
            async with ScriptedProvider(path, [reply]) as scripted, open_openai_provider() as provider:
                samples.append((await hear(provider, config_for(scripted.base_url), request)).answer)
        assert samples[0] == samples[1]
