"""Tool calls of streamed answers: which part belongs to which call, and what is left as it came."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ditto import Sample, ToolCall
from ditto.testing.provider import Call, Chunks, Drop, Raw, ToolCalls, sse
from ditto_workers.infer.endings import ResponseLost
from tests.workers.test_infer_stream import ASK, ASK_WHOLE, ask, both_ways, calls, delta, every_byte, heard, part


def names_and_arguments(sample: Sample) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in sample.message.tool_calls]


L01 = sse(
    [
        calls(part(id="c1", name="a", arguments='{"x":1}')),
        calls(part(id="c2", name="b", arguments='{"y":2}')),
        delta("tool_calls"),
    ]
)
L02 = sse(
    [
        calls(part(0, name="a", arguments="")),
        calls(part(0, arguments='{"x":')),
        calls(part(0, arguments="1}")),
        delta("tool_calls"),
    ]
)
L04 = sse(
    [
        calls(part(0, id="x", name="a", arguments="")),
        calls(part(0, arguments='{"n":1}')),
        calls(part(1, id="x", name="b", arguments="")),
        calls(part(1, arguments='{"n":2}')),
        delta("tool_calls"),
    ]
)
L12 = sse(
    [
        calls(part(0, id="c", name="get")),
        calls(part(0, id="", name="", arguments="{")),
        calls(part(0, id=None, name=None, arguments="}")),
        delta("tool_calls"),
    ]
)
L12_REPEATED = sse(
    [
        calls(part(0, id="c", name="get")),
        calls(part(0, id="c", name="get", arguments="{")),
        calls(part(0, id="c", name="get", arguments="}")),
        calls(part(0, id="c", name="get", arguments="")),
        delta("tool_calls"),
    ]
)


def l08(word: Any) -> bytes:
    return sse([calls(part(0, id="c", name="a", arguments="{}")), delta(word)])


L09_VARIANTS: list[tuple[dict[str, Any], str]] = [
    ({"arguments": ""}, ""),
    ({"arguments": " "}, " "),
    ({"arguments": None}, ""),
    ({}, ""),
    ({"arguments": "{}"}, "{}"),
    ({"arguments": "null"}, "null"),
    ({"arguments": {"x": 1}}, '{"x": 1}'),
]


def l09(arguments: dict[str, Any]) -> bytes:
    return sse([calls(part(0, id="c", name="health", **arguments)), delta("tool_calls")])


BODIES: dict[str, bytes] = {
    "l01": L01,
    "l02": L02,
    "l04": L04,
    "l08": l08("end_turn"),
    "l12": L12,
    "l12-repeated": L12_REPEATED,
    **{f"l09-{at}": l09(arguments) for at, (arguments, _) in enumerate(L09_VARIANTS)},
}
"""For `test_infer_stream_cuts`."""


@pytest.mark.asyncio
async def test_l01_without_an_index_a_new_id_starts_a_new_call(tmp_path: Path) -> None:
    async with ask(tmp_path, *both_ways(L01)) as asked:
        for _ in range(2):
            assert (await asked.hear()).answer.message.tool_calls == (
                ToolCall(id="c1", name="a", arguments='{"x":1}'),
                ToolCall(id="c2", name="b", arguments='{"y":2}'),
            )


@pytest.mark.asyncio
async def test_l02_a_call_without_an_id_is_kept_without_one(tmp_path: Path) -> None:
    async with ask(tmp_path, *both_ways(L02)) as asked:
        for _ in range(2):
            got = await asked.hear()
            assert got.answer.message.tool_calls == (ToolCall(id="", name="a", arguments='{"x":1}'),)
            assert got.answer.message.content == got.text() == ""


@pytest.mark.asyncio
async def test_l04_one_id_for_two_calls_is_left_as_it_comes(tmp_path: Path) -> None:
    async with ask(tmp_path, *both_ways(L04)) as asked:
        for _ in range(2):
            assert (await asked.hear()).answer.message.tool_calls == (
                ToolCall(id="x", name="a", arguments='{"n":1}'),
                ToolCall(id="x", name="b", arguments='{"n":2}'),
            )


@pytest.mark.asyncio
async def test_l06_a_length_ending_is_named_so_and_keeps_the_calls(tmp_path: Path) -> None:
    cut = [Call("c1", "write", '{"path":"f","text":"abc"}'), Call("c2", "write", '{"pa')]
    async with ask(tmp_path, ToolCalls(cut, finish_reason="length")) as asked:
        answer = (await asked.hear()).answer
    assert answer.finish_reason == "length"
    assert names_and_arguments(answer) == [(call.name, call.arguments) for call in cut]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("word", "mapped", "raw"),
    [
        ("stop", "stop", {}),
        ("function_call", "tool_calls", {"finish_reason": "function_call"}),
        ("end_turn", "stop", {"finish_reason": "end_turn"}),
        ("STOP", "stop", {"finish_reason": "STOP"}),
        ("", "missing", {"finish_reason": ""}),
        (None, "missing", {}),
    ],
)
async def test_l08_the_calls_are_there_whatever_the_reason_is(tmp_path: Path, word: Any, mapped: str, raw: Any) -> None:
    message = {"tool_calls": [{"id": "c", "function": {"name": "a", "arguments": "{}"}}]}
    document = json.dumps({"choices": [{"message": message, "finish_reason": word}]})
    async with ask(tmp_path, *both_ways(l08(word)), Raw(document)) as asked:
        for request in (ASK, ASK, ASK_WHOLE):
            answer = (await asked.hear(request)).answer
            assert names_and_arguments(answer) == [("a", "{}")]
            assert (answer.finish_reason, answer.raw) == (mapped, raw)


@pytest.mark.asyncio
@pytest.mark.parametrize(("arguments", "kept"), L09_VARIANTS)
async def test_l09_arguments_are_kept_as_they_come(tmp_path: Path, arguments: dict[str, Any], kept: str) -> None:
    message = {"tool_calls": [part(id="c", name="health", **arguments)]}
    document = json.dumps({"choices": [{"message": message, "finish_reason": "tool_calls"}]})
    async with ask(tmp_path, *both_ways(l09(arguments)), Raw(document)) as asked:
        for request in (ASK, ASK, ASK_WHOLE):
            assert names_and_arguments((await asked.hear(request)).answer) == [("health", kept)]


@pytest.mark.asyncio
async def test_l12_a_name_that_comes_again_or_empty_changes_nothing(tmp_path: Path) -> None:
    async with ask(tmp_path, *both_ways(L12), *both_ways(L12_REPEATED)) as asked:
        for _ in range(4):
            assert (await asked.hear()).answer.message.tool_calls == (ToolCall(id="c", name="get", arguments="{}"),)


ONE = ("a", '{"x":1}')
TWO = ("b", '{"y":2}')
OBJECT = ("a", '{"x": 1}')


A1, B2 = {"name": "a", "arguments": '{"x":1}'}, {"name": "b", "arguments": '{"y":2}'}
HEAD, TAIL = {"name": "a", "arguments": '{"x"'}, {"arguments": ":1}"}


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        # Without an index: another id or another name, or a name and arguments after whole ones.
        ([part(id="1", name="a"), part(arguments='{"x":'), part(arguments="1}"), part(id="2", **B2)], [ONE, TWO]),
        ([part(id="1", **HEAD), part(id="1", **TAIL)], [ONE]),
        ([part(**A1), part(**B2)], [ONE, TWO]),
        ([part(**A1), part(**A1)], [ONE, ONE]),
        ([part(**HEAD), part(name="a", **TAIL), part(name="a", arguments="")], [ONE]),
        ([part(id="x", **A1), part(id="x", **B2)], [ONE, TWO]),
        ([part(id="x", **A1), part(id="x", **A1)], [ONE]),
        # Every call has the index 0.
        ([part(0, id="1", **A1), part(0, id="2", **B2)], [ONE, TWO]),
        ([part(0, id="1", **A1), part(0, id="2", **A1)], [ONE, ONE]),
        ([part(0, id="1", name="a"), part(0, id="2", name="b")], [("a", ""), ("b", "")]),
        ([part(0, **A1), part(0, **B2)], [ONE, TWO]),
        # Every part has a new id.
        ([part(0, id="1", **HEAD), part(0, id="2", name="a", **TAIL)], [ONE]),
        ([part(0, id="1", **HEAD), part(0, id="2", **TAIL)], [ONE]),
        # A whole call is repeated; a name comes in pieces; an id comes late.
        ([part(0, id="1", **A1), part(0, id="1", **A1)], [ONE]),
        ([part(0, id="1", name="a", arguments={"x": 1}), part(0, id="1", name="a", arguments={"x": 1})], [OBJECT]),
        ([part(0, name="get_"), part(0, name="it", arguments="{}")], [("get_it", "{}")]),
        ([part(0, **HEAD), part(0, id="1", **TAIL)], [ONE]),
        # The order is that of the indexes, and parts of calls may alternate.
        ([part(1, id="2", **B2), part(0, id="1", **A1)], [ONE, TWO]),
        ([part(0, **HEAD), part(1, name="b"), part(0, **TAIL), part(1, arguments='{"y":2}')], [ONE, TWO]),
        ([part(id="1", **HEAD), part(0, **TAIL)], [ONE]),
        ([part(0, id="1", **A1), part(1, id="", name="", arguments="")], [ONE]),
    ],
)
def test_the_parts_of_calls_find_each_other(parts: list[dict[str, Any]], expected: list[tuple[str, str]]) -> None:
    one_by_one = sse([*(calls(each) for each in parts), delta("tool_calls")])
    together = sse([calls(*parts), delta("tool_calls")])
    for body in (one_by_one, together):
        assert names_and_arguments(heard([body]).answer) == expected


def test_g05_halves_of_a_character_in_arguments_are_joined() -> None:
    halves = [r"{\"s\":\"\ud83c", r"\udf78\"}"]
    events = [json.dumps(calls(part(0, name="f", arguments="HALF"))).replace("HALF", half) for half in halves]
    assert names_and_arguments(heard([sse(events)]).answer) == [("f", '{"s":"\U0001f378"}')]


def test_the_old_form_of_a_call_is_understood_and_does_not_double_the_new_one() -> None:
    old = [delta(function_call={"name": "a", "arguments": '{"x"'}), delta(function_call={"arguments": ":1}"})]
    assert names_and_arguments(heard([sse([*old, delta("function_call")])]).answer) == [ONE]
    both = [*old, calls(part(0, id="1", name="a", arguments='{"x":1}')), delta("tool_calls")]
    assert heard([sse(both)]).answer.message.tool_calls == (ToolCall(id="1", name="a", arguments='{"x":1}'),)


# Asked again

M04_FIRST = sse([delta(content="Hel"), calls(part(0, id="c", name="run", arguments='{"code":"pri'))], done=False)
M04_SECOND = sse(
    [
        delta(content="Hello"),
        calls(part(0, id="c", name="run", arguments='{"code":"print(1)"}')),
        delta("tool_calls"),
    ]
)


@pytest.mark.asyncio
@pytest.mark.parametrize("size", [None, 1], ids=["whole", "bytes"])
async def test_m04_a_second_try_starts_anew(tmp_path: Path, size: int | None) -> None:
    first = Chunks([M04_FIRST, b": more"], size_bytes=size)
    async with ask(
        tmp_path,
        Drop("mid_body", after_bytes=len(M04_FIRST), reset=True, reply=first),
        Chunks([M04_SECOND], size_bytes=size),
    ) as asked:
        lost, second = await asked.hear(), await asked.hear()
        assert asked.scripted.count == 2
    assert isinstance(lost.error, ResponseLost)
    assert lost.shown in ([("text", "Hel")], []), "a reset may overtake what was sent"
    assert second.shown == [("text", "Hello")]
    assert second.answer.message.content == "Hello"
    assert names_and_arguments(second.answer) == [("run", '{"code":"print(1)"}')]


def test_m04_what_was_shown_of_a_lost_try_holds_nothing_of_its_calls() -> None:
    for body in ([M04_FIRST], every_byte(M04_FIRST)):
        got = heard(body, is_cut=True)
        assert isinstance(got.error, ResponseLost)
        assert got.shown == [("text", "Hel")]
