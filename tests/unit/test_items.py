"""Items: immutable, shared, read-only, and equal to what was put in."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ditto.errors import InvalidValueError
from ditto.items import FrozenDict, Items

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@given(st.lists(json_values, max_size=5), st.lists(json_values, max_size=5))
def test_adding_gives_a_longer_one_and_leaves_the_shorter_alone(first: list[object], second: list[object]) -> None:
    items = Items(first)
    longer = items.add(*second)
    assert items == first
    assert longer == first + second
    assert len(longer) == len(first) + len(second)
    assert json.loads(json.dumps(longer[:])) == first + second


def test_two_branches_from_one_prefix_do_not_see_each_other() -> None:
    base = Items([1, 2])
    left = base.add("left")
    right = base.add("right")
    assert left == [1, 2, "left"]
    assert right == [1, 2, "right"]
    assert left.growth is base.growth
    assert right.growth is not base.growth


def test_items_are_read_only_all_the_way_down() -> None:
    given = {"a": [1, {"b": 2}]}
    items = Items([given])
    given["a"].append(3)
    assert items[0] == {"a": [1, {"b": 2}]}
    with pytest.raises(TypeError, match="read-only"):
        items[0]["a"].append(4)
    with pytest.raises(TypeError, match="read-only"):
        items[0]["a"][1]["b"] = 5
    changed = items[0].copy()
    changed["a"] = 1
    assert isinstance(items[0], FrozenDict)
    assert changed == {"a": 1}


@pytest.mark.parametrize(
    ("value", "path"), [({1, 2}, "[0]"), ({"a": [object()]}, "[0].a[0]"), ({1: 2}, "[0]"), ((1,), "[0]")]
)
def test_what_is_no_json_is_refused_with_its_path(value: object, path: str) -> None:
    with pytest.raises(InvalidValueError) as refused:
        Items([value])
    assert refused.value.path == path


def test_indexing_knows_its_own_length() -> None:
    items = Items([1, 2])
    longer = items.add(3)
    assert (items[-1], longer[-1], longer[0:2], list(longer)) == (2, 3, [1, 2], [1, 2, 3])
    with pytest.raises(IndexError):
        items[2]
