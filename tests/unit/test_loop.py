"""Loops are checked where they are written."""

from __future__ import annotations

import functools
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from ditto.errors import DefinitionError
from ditto.graph import Graph
from ditto.loop import Loop

BODY = Graph("body").step("a", lambda input: input)
Loose: Any = Loop  # for arguments of the wrong type


class AsyncCallable:
    async def __call__(self, *values: Any) -> Any:
        return values


async def coroutine(*values: Any) -> Any:
    return values


def loop(**changes: Any) -> Loop:
    made: Loop = Loose(
        **{
            "name": "retry",
            "graph": BODY,
            "update": lambda state, outputs: state,
            "done": lambda state: True,
            "max_iterations": 3,
            **changes,
        }
    )
    return made


def refusal(**changes: Any) -> str:
    with pytest.raises(DefinitionError) as caught:
        loop(**changes)
    return caught.value.message


@pytest.mark.parametrize("name", ["", "a/b", None, 5], ids=repr)
def test_the_name_becomes_part_of_paths(name: Any) -> None:
    assert f"loop {name!r}: a name is 1 to 128" in refusal(name=name)


@pytest.mark.parametrize("version", ["", 2, None], ids=repr)
def test_the_version_is_text(version: Any) -> None:
    assert "loop retry: version must be a text" in refusal(version=version)


@pytest.mark.parametrize("role", ["update", "done", "bind"])
def test_a_role_that_is_no_function_is_refused_by_name(role: str) -> None:
    assert f"loop retry: {role} must be a function" in refusal(**{role: 5})


@pytest.mark.parametrize("role", ["graph", "update", "done", "bind"])
@pytest.mark.parametrize(
    "function", [coroutine, AsyncCallable(), functools.partial(AsyncCallable())], ids=["def", "object", "partial"]
)
def test_a_role_that_is_computed_again_on_resume_is_no_async_function(role: str, function: Any) -> None:
    assert f"loop retry: {role} must be a plain function, not async" in refusal(**{role: function})


@pytest.mark.parametrize("graph", [None, 5, "body"], ids=repr)
def test_the_graph_is_one_or_a_function_to_one(graph: Any) -> None:
    assert "loop retry: graph must be a Graph, or a function from the state to one" in refusal(graph=graph)


@pytest.mark.parametrize("guard", [0, -1, 1.5, True, None, "3"], ids=repr)
def test_the_guard_is_a_number_of_rounds(guard: Any) -> None:
    assert f"loop retry: max_iterations must be 1 or more, not {guard!r}" in refusal(max_iterations=guard)


def test_fields_that_grow_are_a_tuple() -> None:
    assert "loop retry: append must be a tuple" in refusal(append="findings")


def test_the_state_chooses_the_graph() -> None:
    other = Graph("other")
    chosen = loop(graph=lambda state: other if state else BODY)
    assert (chosen.choose(0), chosen.choose(1)) == (BODY, other)
    assert loop().choose({"any": "state"}) is BODY
    with pytest.raises(DefinitionError, match="loop retry: its graph function returned str, not a Graph"):
        loop(graph=lambda state: "body").choose(0)


def test_a_loop_cannot_be_changed() -> None:
    fixed: Any = loop()
    with pytest.raises(FrozenInstanceError):
        fixed.max_iterations = 4
