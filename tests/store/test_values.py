"""Values: what goes in comes out, or is refused with its path."""

from __future__ import annotations

import datetime
import decimal
import enum
import hashlib
import json
import math
import socket
import sys
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ditto.errors import InvalidValueError, LimitExceededError, StoreDamagedError
from ditto.store.values import INLINE_BYTES_MAX, NESTING_MAX, decode, digest, encode, repair, store_text

MAX = 1_000_000

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


class Point(NamedTuple):
    x: int


def round_trip(value: Any) -> Any:
    return store_text(encode(value, what="state", max_bytes=MAX)).decode()


def refusal(value: Any) -> InvalidValueError:
    with pytest.raises(InvalidValueError) as refused:
        encode(value, what="state", max_bytes=MAX)
    return refused.value


@given(json_values)
def test_what_goes_in_comes_out(value: Any) -> None:
    text = encode(value, what="state", max_bytes=MAX)
    # By repr: 1 and 1.0 and True are equal, and so are 0.0 and -0.0, but they are not the same.
    assert repr(decode(text)) == repr(value)
    assert repr(store_text(text).decode()) == repr(value)
    assert json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON")) == value


@given(json_values)
def test_the_digest_is_over_the_stored_bytes(value: Any) -> None:
    text = encode(value, what="state", max_bytes=MAX)
    stored = store_text(text)
    assert digest(text) == hashlib.sha256(text.encode()).hexdigest()
    assert stored.body == text
    assert stored.column == ("@" + digest(text) if len(text.encode()) > INLINE_BYTES_MAX else text)


@given(json_values)
def test_two_readers_share_nothing(value: Any) -> None:
    stored = store_text(encode(value, what="state", max_bytes=MAX))
    first, second = stored.decode(), stored.decode()
    if isinstance(first, list):
        first.append("changed")
    elif isinstance(first, dict):
        first["changed"] = True
    assert repr(second) == repr(value)


@pytest.mark.parametrize(
    "value",
    [2**63, -(2**63) - 1, 2**53 + 1, 2**1000, -0.0, 0.0, 1e308, 5e-324, 0.1, 1.0, 1, True, "", "\x00", "\U0001f378"],
)
def test_g03_g04_numbers_and_texts_keep_value_and_type(value: Any) -> None:
    for wrapped in (value, [value], {"n": value}):
        assert repr(round_trip(wrapped)) == repr(wrapped)
    assert type(round_trip(value)) is type(value)
    if value == 0:
        assert math.copysign(1, round_trip(value)) == math.copysign(1, value)


def test_the_order_of_keys_is_kept() -> None:
    value = {"b": 1, "a": 2, "": 3}
    assert list(round_trip(value)) == ["b", "a", ""]


@pytest.mark.parametrize(
    ("value", "path", "says"),
    [
        ({1: "a", "1": "b"}, "[1]", "key of type int"),
        ({1: "a"}, "[1]", "key of type int"),
        ({None: 1}, "[None]", "key of type NoneType"),
        ({"t": {True: 1}}, ".t[True]", "key of type bool"),
        ({"t": {1.5: 1}}, ".t[1.5]", "key of type float"),
        ({"t": {(1, 2): 1}}, ".t[(1, 2)]", "key of type tuple"),
        ({"t": (1, 2)}, ".t", "is a tuple, which is not storable; use a list"),
        ([[()]], "[0][0]", "is a tuple"),
        ({"t": {1, 2}}, ".t", "is a set, which is not storable; use a list"),
        (frozenset(), "", "is a frozenset"),
        ([0, {"deep": [b"x"]}], "[1].deep[0]", "is a bytes, which is not storable"),
        (bytearray(b"x"), "", "is a bytearray"),
        (datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC), "", "is a datetime"),
        ({"d": datetime.date(2026, 1, 1)}, ".d", "is a date"),
        ({"price": decimal.Decimal("1.10")}, ".price", "is a Decimal"),
        (complex(1, 2), "", "is a complex"),
        (range(3), "", "is a range"),
        (len, "", "is a builtin_function_or_method"),
        (Path("x"), "", "is a PosixPath"),
        (Point(1), "", "is a Point, which is not storable; use a list"),
    ],
)  # fmt: skip
def test_g03_what_would_come_back_changed_is_refused_with_its_path(value: Any, path: str, says: str) -> None:
    error = refusal(value)
    assert error.path == path
    assert error.message.startswith(f"state{path}: ")
    assert says in error.message


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("wrap", "path"),
    [(lambda x: x, ""), (lambda x: {"a": [1, x]}, ".a[1]"), (lambda x: [{"b": {"c": x}}], "[0].b.c")],
    ids=["bare", "in a list", "in an object"],
)
def test_g04_nan_and_infinities_are_refused_with_their_path(number: float, wrap: Any, path: str) -> None:
    error = refusal(wrap(number))
    assert error.path == path
    assert f"is {number}, which JSON cannot hold" in error.message


@pytest.mark.parametrize(
    ("value", "path"),
    [("ok \ud83d", ""), ({"a": ["x", "\udc00"]}, ".a[1]"), ({"a": {"k\ud800": 1}}, ".a.<key>")],
    ids=["bare", "nested", "key"],
)
def test_g05_the_programs_own_lone_surrogates_are_refused_with_their_path(value: Any, path: str) -> None:
    error = refusal(value)
    assert error.path == path
    assert "lone surrogate" in error.message
    assert error.message.isprintable()


def test_g05_pairs_are_kept_and_outside_text_is_repaired() -> None:
    assert round_trip("\U0001f378") == "\U0001f378"
    assert round_trip(json.loads('"\\ud83c\\udf78"')) == "\U0001f378"
    assert repair("ok \ud83d, \U0001f378") == "ok \ufffd, \U0001f378"
    assert round_trip(repair("ok \ud83d")) == "ok \ufffd"


def test_g07_an_object_is_refused_by_its_path_and_never_becomes_none() -> None:
    with socket.socket() as client:
        error = refusal({"client": client, "n": 1})
    assert error.message == "state.client: is a socket, which is not storable; return plain data"
    assert refusal({"a": [1, [threading.Lock()]]}).message.startswith("state.a[1][0]: is a lock")


class Phase(enum.Enum):
    READY = "ready"


class Word(enum.StrEnum):
    READY = "ready"


class OldWord(str, enum.Enum):  # noqa: UP042 - many programs still have these
    READY = "ready"


class Number(enum.IntEnum):
    ONE = 1


def test_g01_an_enum_is_refused_and_a_member_that_is_text_or_a_number_comes_back_as_that() -> None:
    assert refusal({"phase": Phase.READY}).message == (
        "state.phase: is a Phase, which is not storable; return plain data"
    )
    # A member of a StrEnum or an IntEnum *is* its text or number: what comes back is equal, and plain.
    for member, plain in ((Word.READY, "ready"), (OldWord.READY, "ready"), (Number.ONE, 1)):
        back = round_trip({"phase": member, "list": [member]})
        assert back == {"phase": member, "list": [member]}
        assert type(back["phase"]) is type(plain)
    assert round_trip({Word.READY: 1}) == {"ready": 1}


def test_an_ordered_dict_is_an_object() -> None:
    assert round_trip(OrderedDict(a=1)) == {"a": 1}


def test_an_integer_beyond_pythons_limit_of_digits_is_refused() -> None:
    digits_max = sys.get_int_max_str_digits()
    assert round_trip(10 ** (digits_max - 1)) == 10 ** (digits_max - 1)
    error = refusal({"n": [10**digits_max]})
    assert error.path == ".n[0]"
    assert "too many digits" in error.message
    # The largest that can be stored is not the one to blame.
    assert refusal([10 ** (digits_max - 1), {1}]).path == "[1]"


def nest(depth: int, wrap: Any) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = wrap(value)
    return value


@pytest.mark.parametrize(
    "wrap", [lambda x: [x], lambda x: {"a": x}, lambda x: {"]": 0, "x": x, "[": "{"}], ids=["list", "object", "mixed"]
)
def test_nesting_has_a_limit_that_does_not_depend_on_the_callers_stack(wrap: Any) -> None:
    deepest = nest(NESTING_MAX, wrap)
    assert round_trip(deepest) == deepest
    for depth in (NESTING_MAX + 1, 900, 50_000):
        assert f"nested more than {NESTING_MAX} deep" in refusal(nest(depth, wrap)).message


def test_what_was_stored_can_be_read_from_a_deeper_stack() -> None:
    text = encode(nest(NESTING_MAX, lambda x: [x]), what="state", max_bytes=MAX)

    def read_below(frames: int) -> Any:
        return decode(text) if frames == 0 else read_below(frames - 1)

    assert read_below(500) == decode(text)


def test_many_brackets_are_no_depth() -> None:
    wides: list[Any] = [[[]] * 1000, [{}] * 1000, ["[" * 1000], {"a": [[[]]] * 400}]
    for wide in wides:
        assert round_trip(wide) == wide


def test_a_value_that_holds_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    assert "nested" in refusal(value).message


def test_a_value_above_the_limit_is_refused_with_its_size() -> None:
    assert encode("é" * 4, what="state", max_bytes=10) == '"éééé"'
    with pytest.raises(
        LimitExceededError, match=r"the output of step x takes 12 bytes; the limit is 10 \(runtime"
    ) as big:
        encode("é" * 5, what="the output of step x", max_bytes=10)
    assert big.value.code == "limit"


def test_small_values_stand_in_the_row_and_larger_ones_by_their_digest() -> None:
    small, large = '"' + "x" * (INLINE_BYTES_MAX - 2) + '"', '"' + "x" * (INLINE_BYTES_MAX - 1) + '"'
    assert not store_text(small).by_reference
    assert store_text(large).by_reference
    assert store_text('"' + "é" * (INLINE_BYTES_MAX - 2) + '"').by_reference, "bytes count, not characters"


@pytest.mark.parametrize("text", ["", "{", "{'a': 1}", "ditto:run", "[" * 100_000])
def test_h01_stored_text_that_is_no_json_is_damage_and_nothing_else(text: str) -> None:
    with pytest.raises(StoreDamagedError, match="restore a backup"):
        decode(text)
