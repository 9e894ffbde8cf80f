"""Graphs are checked where they are written, and never change afterwards."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from typing import Any

import networkx as nx
import pytest

from ditto.effects import EffectClass
from ditto.errors import DefinitionError
from ditto.graph import Graph, Node, Retry

Loose: Any = Graph  # for arguments of the wrong type


def one() -> int:
    return 1


def refusal(write: Callable[[], Any]) -> str:
    with pytest.raises(DefinitionError) as caught:
        write()
    assert caught.value.code == "definition"
    return caught.value.message


# Names


@pytest.mark.parametrize(
    "name", ["", "a/b", "a b", "é", "-a", ".a", "a\n", "x" * 129, "a\x00", "/", None, 5, b"a"], ids=repr
)
def test_a_name_that_cannot_be_part_of_a_path_is_refused_and_named(name: Any) -> None:
    for what, write in (
        ("graph", lambda: Loose(name)),
        ("node", lambda: Loose("g").step(name, one)),
        ("node", lambda: Loose("g").node(name, "A.B")),
    ):
        assert f"{what} {name!r}: a name is 1 to 128" in refusal(write)


@pytest.mark.parametrize("name", ["a", "A.b-c:d_e", "0", "_", "x" * 128])
def test_names_of_letters_digits_and_a_few_signs_are_taken(name: str) -> None:
    assert list(Graph(name).step(name, lambda: 1).nodes) == [name]


@pytest.mark.parametrize("name", ["input", "ctx"])
def test_names_that_mean_something_else_are_refused(name: str) -> None:
    assert f"node {name}: 'input' and 'ctx' are taken" in refusal(lambda: Graph("g").step(name, lambda: 1))


def test_two_nodes_of_one_name_are_refused() -> None:
    graph = Graph("g").step("a", lambda: 1)
    assert "node a: graph g has a node of that name already" in refusal(lambda: graph.step("a", lambda: 2))
    assert "node a: graph g has a node of that name already" in refusal(lambda: graph.node("a", "A.B"))


# Dependencies


def test_a_node_comes_after_nodes_that_exist_so_there_are_no_cycles() -> None:
    graph = Graph("g").step("a", lambda: 1)
    assert "node b: it comes after 'c', which graph g does not have yet" in refusal(
        lambda: graph.step("b", lambda: 1, after=("c",))
    )
    assert "node b: it comes after 'b'" in refusal(lambda: graph.step("b", lambda: 1, after=("b",)))
    assert nx.is_directed_acyclic_graph(graph.step("b", lambda: 1, after=("a",)).to_networkx())


def test_dependencies_are_a_collection_each_named_once() -> None:
    graph = Graph("g").step("first", lambda: 1)
    assert "node b: after must be a tuple of node names, for example after=('first',)" in refusal(
        lambda: graph.step("b", lambda first: first, after="first")
    )
    assert "node b: after names a node twice" in refusal(lambda: graph.step("b", lambda: 1, after=("first", "first")))


def test_dependencies_may_come_from_a_generator() -> None:
    graph = Graph("g").step("a", lambda: 1)
    step = graph.step("b", lambda a: a, after=(name for name in ["a"])).nodes["b"]
    node = graph.node("b", "A.B", after=iter(["a"]), bind=lambda a: a, when=lambda a: a).nodes["b"]
    assert (step.after, step.bind_names) == (("a",), ("a",))
    assert (node.after, node.bind_names, node.when_names) == (("a",), ("a",), ("a",))


# Signatures


class Callable_:  # noqa: N801
    def __call__(self, input: Any) -> Any:
        return input

    def method(self, input: Any) -> Any:
        return input


class AsyncCallable:
    async def __call__(self, input: Any) -> Any:
        return input


async def coroutine(input: Any) -> Any:
    return input


def star(*values: Any) -> Any:
    return values


def positional(input: Any, /) -> Any:
    return input


def two(input: Any, a: Any) -> Any:
    return input, a


@functools.wraps(two)
def wrapped(*values: Any, **named: Any) -> Any:
    return two(*values, **named)


GOOD: list[tuple[str, Callable[..., Any], tuple[str, ...]]] = [
    ("a lambda", lambda input: input, ("input",)),
    ("nothing", lambda: 1, ()),
    ("several, in any order", lambda a, input: 1, ("a", "input")),
    ("keyword only", lambda *, a: a, ("a",)),
    ("a default of its own", lambda input, x=1: x, ("input",)),
    ("a default for a value", lambda input, a=1: a, ("input", "a")),
    ("a partial", functools.partial(two, a=1), ("input", "a")),
    ("a partial by position", functools.partial(two, 1), ("a",)),
    ("a callable object", Callable_(), ("input",)),
    ("a bound method", Callable_().method, ("input",)),
    ("a wrapped function", wrapped, ("input", "a")),
]


@pytest.mark.parametrize(("function", "names"), [case[1:] for case in GOOD], ids=[case[0] for case in GOOD])
def test_functions_name_the_values_they_want(function: Callable[..., Any], names: tuple[str, ...]) -> None:
    graph = Graph("g").step("a", lambda: 1)
    assert graph.node("n", "A.B", after=("a",), bind=function).nodes["n"].bind_names == names
    assert graph.node("n", "A.B", after=("a",), when=function).nodes["n"].when_names == names
    assert graph.step("n", function, after=("a",)).nodes["n"].bind_names == names


BAD: list[tuple[str, Any, str]] = [
    ("*args", star, "*values: 'Any' cannot be bound"),
    ("positional only", positional, "input: 'Any' cannot be bound"),
    ("another name", lambda other: 1, "asks for 'other', which it cannot get. It may name: input, a"),
    ("a node that it does not come after", lambda b: 1, "asks for 'b'"),
    ("no function", 5, "must be a function, not int"),
    ("text", "a", "must be a function, not str"),
    ("a signature that cannot be read", max, "cannot be"),
]


@pytest.mark.parametrize(("function", "says"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_a_wrong_signature_is_refused_and_the_node_and_role_are_named(function: Any, says: str) -> None:
    graph = Graph("g").step("a", lambda: 1).step("b", lambda: 1)
    for role, write in (
        ("bind", lambda: graph.node("n", "A.B", after=("a",), bind=function)),
        ("when", lambda: graph.node("n", "A.B", after=("a",), when=function)),
        ("the step's function", lambda: graph.step("n", function, after=("a",))),
    ):
        message = refusal(write)
        assert message.startswith(f"node n: {role}") or f"node n: the signature of {role}" in message
        assert says in message


@pytest.mark.parametrize(
    "function",
    [coroutine, AsyncCallable(), functools.partial(coroutine), functools.partial(AsyncCallable())],
    ids=["async def", "async __call__", "partial", "partial of async __call__"],
)
def test_what_is_computed_again_on_resume_must_be_a_plain_function(function: Any) -> None:
    for role, write in (
        ("bind", lambda: Graph("g").node("n", "A.B", bind=function)),
        ("when", lambda: Graph("g").node("n", "A.B", when=function)),
        ("when", lambda: Graph("g").step("n", lambda: 1, when=function)),
        ("key", lambda: Graph("g").step("n", lambda: 1, key=function)),
        ("record", lambda: Graph("g").step("n", lambda: 1, record=function)),
        ("a local step's function", lambda: Graph("g").step("n", function, effect="local")),
    ):
        assert f"node n: {role} must be a plain function, not async" in refusal(write)


def test_a_bind_gets_no_context_and_a_step_may() -> None:
    assert "asks for 'ctx'" in refusal(lambda: Graph("g").node("n", "A.B", bind=lambda ctx: 1))
    step = Graph("g").step("n", lambda input, ctx: 1).nodes["n"]
    assert (step.takes_context, step.bind_names) == (True, ("input",))
    assert not Graph("g").step("n", lambda input: 1).nodes["n"].takes_context


# What else is checked


@pytest.mark.parametrize("type_", ["", "STEP", "NODOT"])
def test_a_node_needs_a_node_type(type_: str) -> None:
    assert f"node n: {type_!r} is no node type; use FAMILY.NAME" in refusal(lambda: Graph("g").node("n", type_))


@pytest.mark.parametrize("version", ["", 2, None, 1.5, "a\nb", "x" * 129], ids=repr)
def test_a_version_is_text_since_it_is_compared_with_what_is_recorded(version: Any) -> None:
    assert "graph g: version must be a text" in refusal(lambda: Loose("g", version=version))
    assert "node n: version must be a text" in refusal(lambda: Loose("g").step("n", one, version=version))
    assert "node n: version must be a text" in refusal(lambda: Loose("g").node("n", "A.B", version=version))


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan")])
def test_a_deadline_is_more_than_nothing(timeout_s: float) -> None:
    assert "node n: timeout_s must be more than 0" in refusal(
        lambda: Graph("g").step("n", lambda: 1, timeout_s=timeout_s)
    )
    assert "node n: timeout_s must be more than 0" in refusal(lambda: Graph("g").node("n", "A.B", timeout_s=timeout_s))


@pytest.mark.parametrize("option", [{"timeout_s": 1}, {"retry": Retry()}], ids=["timeout_s", "retry"])
def test_a_local_step_runs_in_its_transaction_once_and_to_its_end(option: dict[str, Any]) -> None:
    assert "node n: a local step takes no timeout_s and no retry" in refusal(
        lambda: Graph("g").step("n", lambda: 1, effect="local", **option)
    )


def test_effects_are_words_or_functions_and_a_plain_step_is_idempotent() -> None:
    assert Graph("g").step("n", lambda: 1).nodes["n"].effect is EffectClass.IDEMPOTENT
    for word in EffectClass:
        assert Graph("g").step("n", lambda: 1, effect=word.value).nodes["n"].effect is word
    assert callable(Graph("g").step("n", lambda: 1, effect=lambda arguments: "read").nodes["n"].effect)
    assert "node n: effect 'wild' is unknown; use one of pure, read" in refusal(
        lambda: Graph("g").step("n", lambda: 1, effect="wild")
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_attempts": 0},
        {"max_attempts": 101},
        {"initial_s": -1},
        {"initial_s": float("nan")},
        {"max_s": -0.1},
        {"factor": 0.5},
        {"factor": 1e10},
        {"jitter": 1.1},
        {"jitter": float("nan")},
        {"initial_s": float("inf")},
        {"max_s": float("inf")},
        {"total_s": 0},
        {"total_s": -1},
        {"total_s": float("nan")},
        {"total_s": float("inf")},
        {"total_s": True},
    ],
    ids=str,
)
def test_a_retry_that_cannot_be_counted_is_refused(wrong: dict[str, Any]) -> None:
    assert refusal(lambda: Retry(**wrong)).startswith("Retry: ")


def test_back_off_grows_to_its_maximum_and_jitter_only_shortens_it() -> None:
    retry = Retry(max_attempts=100, initial_s=1, factor=1000, max_s=30, jitter=0.5)
    assert [retry.delay_s(n, random_unit=lambda: 0.0) for n in (1, 2, 99)] == [1, 30, 30]
    assert retry.delay_s(2, random_unit=lambda: 1.0) == 15


# Immutability


def test_adding_a_node_makes_another_graph() -> None:
    first = Graph("g").step("a", lambda: 1)
    second = first.step("b", lambda: 1, after=("a",))
    assert (list(first.nodes), list(second.nodes)) == (["a"], ["a", "b"])


def test_a_graph_cannot_be_changed() -> None:
    graph: Any = Graph("g").step("a", lambda: 1)
    with pytest.raises(FrozenInstanceError):
        graph.name = "h"
    with pytest.raises(TypeError):
        graph.nodes["b"] = graph.nodes["a"]
    with pytest.raises(FrozenInstanceError):
        graph.nodes["a"].after = ("b",)
    assert isinstance(graph.nodes["a"], Node)


# Drawings

DIAMOND = (
    Graph("diamond", version="3")
    .step("a", lambda: 1)
    .step("b", lambda a: 1, after=("a",))
    .node("c", "SHOP.PRICE", after=("a",), bind=lambda a: a, when=lambda a: a, version="2")
    .step("d", lambda b, c: 1, after=("b", "c"))
)


def test_to_networkx_has_the_nodes_and_edges() -> None:
    drawn = DIAMOND.to_networkx()
    assert set(drawn.edges) == {("a", "b"), ("a", "c"), ("b", "d"), ("c", "d")}
    assert drawn.nodes["c"] == {"type": "SHOP.PRICE", "version": "2"}
    assert drawn.graph == {"name": "diamond", "version": "3"}


def test_two_stars_take_all_that_is_not_named() -> None:
    graph = Graph("g").step("a", lambda: 1).step("b-2", lambda: 2)
    join = graph.step("join", lambda a, **values: values, after=("a", "b-2")).nodes["join"]
    assert join.bind_names == ("a", "input", "b-2")
    with_context = graph.step("join", lambda ctx, **values: values, after=("a",)).nodes["join"]
    assert (with_context.bind_names, with_context.takes_context) == (("input", "a"), True)
