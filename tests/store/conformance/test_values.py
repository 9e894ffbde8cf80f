"""Values through the store: what another process reads is what was written, to the type, the sign and the order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ditto.clock import Clock
from ditto.errors import InvalidValueError, LimitExceededError
from ditto.items import Items
from ditto.store import queries, transitions
from ditto.store.records import Event, Fence, LoopState
from ditto.store.store import Store
from ditto.store.values import INLINE_BYTES_MAX, NESTING_MAX
from tests.store.conformance.under_test import StoreUnderTest, opened
from tests.store.scenes import VALUE_MAX, create, get, new_run, record, step

pytestmark = pytest.mark.asyncio

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


HARD: Final = {
    "integers": [0, -1, 2**53 + 1, 2**63, -(2**63) - 1, 10**300],
    "floats": [0.0, -0.0, 1.0, 0.1, 1e308, 5e-324, 1e22],
    "truth": [True, False, None],
    "texts": ["", " ", "\x00", "\x7f", "\n\r\t", "é", "e\u0301", "\u2028", "\ufffe", "\U0001f378"],
    "marks": ["'", '"', "\\", "%s", "?", ":name", "--", "$1"],
    "texts that look like others": ["null", "1", "1.0", "true", "@00", "+[]", "2026-01-01", "NaN"],
    "keys": {"b": 1, "a": 2, "": 3, "\x00": 4, "B": 5, "é": 6, "__class__": 7},
    "empty": [{}, [], [[]], {"a": {}}],
    "deep": nested(NESTING_MAX - 1),
    "just small": "x" * (INLINE_BYTES_MAX - 2),
    "just large": "x" * (INLINE_BYTES_MAX - 1),
    "large by its bytes": "é" * (INLINE_BYTES_MAX - 2),
    "very large": "x" * 1_000_000,
}  # fmt: skip


async def written_and_read(under_test: StoreUnderTest, store: Store, fence: Fence, path: str, value: Any) -> Any:
    """A step's output, as another process reads it."""
    row = replace(step(path), output=store.encode(value, "value"))
    await record(store, fence, row)
    async with opened(under_test) as other:
        found = await other.read(queries.get_step, fence.run, path)
    assert found is not None
    assert found.output is not None
    return found.output.decode()


@pytest.mark.parametrize("name", HARD)
async def test_what_goes_in_comes_out(under_test: StoreUnderTest, store: Store, name: str) -> None:
    fence = await create(store)
    # By repr: 1 and 1.0 and True are equal, and so are 0.0 and -0.0, but they are not the same.
    assert repr(await written_and_read(under_test, store, fence, "a", HARD[name])) == repr(HARD[name])


@given(values=st.lists(json_values, max_size=20))
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_whatever_goes_in_comes_out(under_test: StoreUnderTest, values: list[Any]) -> None:
    fresh = under_test.fresh()
    async with opened(fresh) as store:
        fence = await create(store)
        rows = [replace(step(f"s{at}"), output=store.encode(each, "value")) for at, each in enumerate(values)]
        await record(store, fence, *rows)
    async with opened(fresh) as other:
        found = await other.read(queries.list_steps, fence.run)
        assert [repr(row.output.decode()) for row in found if row.output is not None] == [repr(each) for each in values]


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), "\ud800", {1: 2}, (1,), {1}, b"x", object(), nested(NESTING_MAX + 1)],
    ids=["nan", "infinity", "surrogate", "key", "tuple", "set", "bytes", "object", "too deep"],
)  # fmt: skip
async def test_what_would_come_back_changed_is_refused_and_nothing_is_written(
    under_test: StoreUnderTest, store: Store, value: Any
) -> None:
    before = under_test.look()
    with pytest.raises(InvalidValueError):
        store.encode(value, "value")
    with pytest.raises(InvalidValueError):
        store.encode_growing({"list": Items([value])}, "value", ("list",))
    with pytest.raises(LimitExceededError):
        store.encode("x" * VALUE_MAX, "value")
    assert under_test.look() == before


async def test_equal_large_values_are_kept_once(under_test: StoreUnderTest, store: Store) -> None:
    fences = [await create(store, f"run {number}") for number in range(3)]
    for fence in fences:
        for path in ("a", "b"):
            await record(store, fence, replace(step(path), output=store.encode("x" * 5000, "value")))
    assert under_test.rows("SELECT count(*) FROM ditto_values") == [(1,)]
    assert {output for *_, output in under_test.look().steps} == {f'"{"x" * 5000}"'}


async def test_a_runs_input_state_and_events_are_kept_as_they_were(under_test: StoreUnderTest, store: Store) -> None:
    for at, value in enumerate(HARD.values()):
        name = f"run {at}"
        new = replace(new_run(name), input=store.encode(value, "input"))
        run = await store.commit(lambda tx, new=new: transitions.create_run(tx, new, (Event("run_created"),)))  # type: ignore[misc]
        fence = Fence(run, "owner", 1, name, "flow")
        state = LoopState(3, store.encode_growing({"v": value, "list": Items([value, value])}, "state", ("list",)))
        event = Event("note", "\u2028", {"value": value})
        await store.commit(
            lambda tx, fence=fence, event=event, state=state: transitions.record_steps(  # type: ignore[misc]
                tx, fence, (), (event,), (state,)
            )
        )
        async with opened(under_test) as other:
            found = await get(other, name)
            stored = await other.read(queries.load_value, found.input)
            loop = await other.read(queries.load_state, found.state)
            [*_, (_, _, _, step_, body)] = await other.read(queries.list_events, run, 0, 10)
        assert stored is not None
        assert loop is not None
        assert repr(stored.decode()) == repr(value)
        assert repr(loop.plain()) == repr({"v": value, "list": [value, value]})
        assert (step_, repr(body)) == ("\u2028", repr({"value": value}))


async def test_a_list_that_grows_is_read_whole_and_stored_once(under_test: StoreUnderTest, store: Store) -> None:
    fence, items = await create(store), Items()
    for number in range(1, 41):
        items = items.add({"n": number})
        state = LoopState(number, store.encode_growing({"list": items}, "state", ("list",)))
        await store.commit(
            lambda tx, state=state: transitions.record_steps(tx, fence, (), (Event("loop_advanced"),), (state,))  # type: ignore[misc]
        )
        async with opened(under_test) as other:
            found = await other.read(queries.load_state, (await get(other)).state)
        assert found is not None
        assert found.plain() == {"list": [{"n": each} for each in range(1, number + 1)]}
    assert under_test.rows("SELECT count(*) FROM ditto_values") == [(40,)]


async def test_times_are_whole_microseconds(under_test: StoreUnderTest) -> None:
    class Late(Clock):
        def now_us(self) -> int:
            return 9_007_199_254_740_993  # beyond what a double holds

    async with opened(under_test, clock=Late()) as store:
        fence = await create(store)
        await record(store, fence, step("a"))
        found = await store.read(queries.get_step, fence.run, "a")
        assert found is not None
        assert found.settled_at == 9_007_199_254_740_993
        assert (await get(store)).created_at == 9_007_199_254_740_993
