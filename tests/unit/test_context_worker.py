"""The context worker: ids, order, selection and caps; no cut parts a call from its result."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ditto import (
    Config,
    Context,
    ContextItem,
    EffectClass,
    InvalidValueError,
    LimitExceededError,
    NewItem,
    Sandbox,
    StepContext,
    ToolCall,
)
from ditto.contracts import CompressInput, ContextLimits, LoadInput, SelectInput, UpdateInput
from ditto_workers import create_context_worker

INPUTS = {
    "CONTEXT.COMPRESS": CompressInput,
    "CONTEXT.LOAD": LoadInput,
    "CONTEXT.SELECT": SelectInput,
    "CONTEXT.UPDATE": UpdateInput,
}
WORKER = create_context_worker()


def step_context(config: Config | None = None) -> StepContext:
    return StepContext(
        run_id="r-1",
        path="context",
        key="r-1/1/context",
        attempt=1,
        config=config or Config(),
        sandbox=Sandbox(),
        logger=logging.getLogger("ditto.test"),
    )


def run(node_type: str, config: Config | None = None, **arguments: Any) -> Context:
    action = WORKER.handlers[node_type].plan(INPUTS[node_type](**arguments))
    assert action.effect is EffectClass.PURE
    assert not action.is_async
    context: Context = action.call(step_context(config))
    return context


def load(*items: NewItem, **limits: int) -> Context:
    return run("CONTEXT.LOAD", items=items, limits=ContextLimits(**limits))


def texts(context: Context) -> list[str]:
    return [item.content for item in context.items]


def user(text: str, **more: Any) -> NewItem:
    return NewItem(role="user", content=text, **more)


def system(text: str) -> NewItem:
    return NewItem(role="system", content=text)


def assistant(text: str) -> NewItem:
    return NewItem(role="assistant", content=text)


def calls(*ids: str) -> NewItem:
    return NewItem(role="assistant", tool_calls=tuple(ToolCall(id=each, name="look") for each in ids))


def answer(call_id: str) -> NewItem:
    return NewItem(role="tool", content=f"result of {call_id}", tool_call_id=call_id)


def test_an_id_is_the_hash_of_the_canonical_content() -> None:
    item = load(user("grüße", source="mail", protected=True)).items[0]
    content: dict[str, Any] = {
        "content": "grüße",
        "name": None,
        "reasoning": None,
        "role": "user",
        "source": "mail",
        "tool_call_id": None,
        "tool_calls": [],
    }
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert item.id == hashlib.sha256(canonical.encode()).hexdigest()


def test_protection_is_no_part_of_an_id_and_every_other_field_is() -> None:
    plain = load(user("a")).items[0].id
    assert load(user("a", protected=True)).items[0].id == plain
    others = [user("b"), system("a"), user("a", name="n"), user("a", source="s"), user("a", reasoning="r")]
    assert len({plain, *(load(other).items[0].id for other in others)}) == 6


def test_a_message_that_is_there_twice_stays_twice() -> None:
    context = load(user("again"), user("again"))
    assert texts(context) == ["again", "again"]
    assert context.items[0].id == context.items[1].id


def test_load_puts_items_behind_a_saved_context_and_works_its_ids_out_anew() -> None:
    saved = Context(items=(ContextItem(role="user", content="[redacted]", id="0" * 64),))
    loaded = run("CONTEXT.LOAD", context=saved, items=(user("new"),))
    assert texts(loaded) == ["[redacted]", "new"]
    assert loaded.items[0].id == load(user("[redacted]")).items[0].id


def test_update_leaves_the_context_it_got_alone() -> None:
    before = load(system("s"), user("a"))
    after = run("CONTEXT.UPDATE", context=before, add=(assistant("b"),))
    assert texts(before) == ["s", "a"]
    assert texts(after) == ["s", "a", "b"]
    assert after.items[:2] == before.items


def test_a_lone_surrogate_of_the_program_is_refused_with_advice() -> None:
    with pytest.raises(InvalidValueError, match="lone surrogate"):
        load(user("half \ud83d"))


def test_the_oldest_unprotected_go_first() -> None:
    context = load(
        user("first"),
        system("rules"),
        user("kept", protected=True),
        user("old"),
        assistant("mid"),
        user("new"),
        items_max=4,
    )
    assert texts(context) == ["rules", "kept", "mid", "new"]


def test_only_the_first_system_message_is_safe() -> None:
    assert texts(load(system("one"), system("two"), user("ask"), items_max=2)) == ["one", "ask"]


def test_bytes_are_capped_too_and_the_smaller_cap_wins() -> None:
    size = len(load(user("x" * 100)).items[0].model_dump_json().encode())
    items = [user(letter * 100) for letter in "abcd"]
    assert texts(load(*items, bytes_max=2 * size)) == ["c" * 100, "d" * 100]
    assert texts(load(*items, bytes_max=2 * size - 1)) == ["d" * 100]
    assert texts(load(*items, bytes_max=2 * size, items_max=1)) == ["d" * 100]


def test_the_caps_of_the_configuration_hold_beside_those_of_the_input() -> None:
    config = Config(workers={"context": {"items_max": 2, "bytes_max": 1024}})  # type: ignore[arg-type]
    items = (user("a"), user("b"), user("c"))
    assert texts(run("CONTEXT.LOAD", config, items=items)) == ["b", "c"]
    assert texts(run("CONTEXT.LOAD", config, items=items, limits=ContextLimits(items_max=1))) == ["c"]
    assert texts(run("CONTEXT.LOAD", config, items=items, limits=ContextLimits(items_max=9))) == ["b", "c"]


def test_what_must_stay_and_does_not_fit_is_an_error_that_names_the_caps() -> None:
    with pytest.raises(LimitExceededError, match=r"must keep 3 items .* caps of 2 items") as raised:
        load(system("s"), user("p", protected=True), user("old"), user("new"), items_max=2)
    assert raised.value.code == "limit.context"


def test_the_message_just_added_is_never_the_one_to_go() -> None:
    context = load(system("s"), user("a", protected=True))
    with pytest.raises(LimitExceededError):
        run("CONTEXT.UPDATE", context=context, add=(user("question"),), limits=ContextLimits(items_max=2))


def test_o02_a_call_and_its_results_go_together() -> None:
    context = load(user("a"), calls("c1", "c2"), answer("c2"), answer("c1"), assistant("done"), user("b"), items_max=4)
    assert texts(context) == ["done", "b"]


def test_o02_an_unanswered_last_call_is_kept_with_the_results_it_has() -> None:
    context = load(user("a"), user("b"), calls("c1", "c2"), answer("c1"), items_max=2)
    assert [item.role for item in context.items] == ["assistant", "tool"]


def test_o02_a_protected_result_keeps_its_call() -> None:
    protected = answer("c1").model_copy(update={"protected": True})
    context = load(calls("c1", "c2"), answer("c2"), protected, user("a"), user("b"), items_max=4)
    assert [item.role for item in context.items] == ["assistant", "tool", "tool", "user"]
    assert texts(context)[-1] == "b"


def test_o02_an_id_that_is_used_again_belongs_to_the_latest_open_call() -> None:
    context = load(calls("c1"), answer("c1"), user("next"), calls("c1"), answer("c1"), items_max=3)
    assert [item.role for item in context.items] == ["user", "assistant", "tool"]


def test_o02_what_came_unpaired_stays_as_it_is_until_it_goes_alone() -> None:
    items = (answer("lost"), user("a"), calls("open"), user("b"))
    assert len(load(*items).items) == 4
    assert texts(load(*items, items_max=3)) == ["a", "", "b"]
    assert texts(load(*items, items_max=1)) == ["b"]


def test_select_takes_what_matches_all_that_is_given() -> None:
    context = load(user("a", source="mail"), user("b", source="chat"), assistant("c"), user("d", source="mail"))
    assert texts(run("CONTEXT.SELECT", context=context, roles=("user",), sources=("mail",))) == ["a", "d"]
    assert texts(run("CONTEXT.SELECT", context=context, sources=("mail",), last=1)) == ["d"]
    assert texts(run("CONTEXT.SELECT", context=context, ids=(context.items[2].id,))) == ["c"]
    assert texts(run("CONTEXT.SELECT", context=context, roles=())) == []


def test_select_takes_a_call_with_its_results_or_not_at_all() -> None:
    context = load(user("a"), calls("c1"), answer("c1"), user("b"))
    assert texts(run("CONTEXT.SELECT", context=context, roles=("user", "assistant"))) == ["a", "b"]
    assert texts(run("CONTEXT.SELECT", context=context, last=2)) == ["b"]
    assert len(run("CONTEXT.SELECT", context=context, last=3).items) == 3


def test_select_always_takes_what_is_protected() -> None:
    context = load(user("a", protected=True), user("b"), user("c"))
    assert texts(run("CONTEXT.SELECT", context=context, last=1)) == ["a", "c"]
    assert texts(run("CONTEXT.SELECT", context=context, roles=("tool",))) == ["a"]


@st.composite
def histories(draw: st.DrawFn) -> list[NewItem]:
    """A well-formed history: each call answered directly after it, but perhaps for the last."""
    items = [system("rules")] if draw(st.booleans()) else []
    for turn in range(draw(st.integers(0, 12))):
        items.append(user(f"question {turn}", protected=draw(st.integers(0, 7)) == 0))
        count = draw(st.integers(0, 3))
        if count:
            # Some providers count their ids from zero in every answer.
            ids = [f"call_{each}" if draw(st.booleans()) else f"call_{turn}_{each}" for each in range(count)]
            items.append(calls(*ids))
            items.extend(answer(each) for each in draw(st.permutations(ids)))
        items.append(assistant("x" * draw(st.integers(0, 40))))
    if draw(st.booleans()):
        items.append(calls("open_1", "open_2"))
        items.extend([answer("open_2")] if draw(st.booleans()) else [])
    return items


def unpaired(items: tuple[ContextItem, ...]) -> Iterator[str]:
    """What a strict provider refuses; the calls of the last message that makes some are left out."""
    open_calls: list[str] = []
    for item in items:
        if item.role == "tool":
            if item.tool_call_id not in open_calls:
                yield f"result {item.tool_call_id} has no call"
            else:
                open_calls.remove(item.tool_call_id)
            continue
        yield from (f"call {each} has no result" for each in open_calls)
        open_calls = [call.id for call in item.tool_calls]


@settings(max_examples=30, deadline=None)
@given(histories(), st.data())
def test_o02_no_cut_of_any_size_parts_a_call_from_its_result(history: list[NewItem], data: st.DataObject) -> None:
    whole = load(*history)
    assert list(unpaired(whole.items)) == []
    size = sum(len(item.model_dump_json()) for item in whole.items)
    cuts = [{"items_max": most} for most in range(1, len(history) + 1)]
    cuts += [{"bytes_max": data.draw(st.integers(1, size + 1))} for _ in range(5)]
    for cut in cuts:
        try:
            kept = load(*history, **cut).items
        except LimitExceededError:
            continue
        assert list(unpaired(kept)) == []
        assert len(kept) <= cut.get("items_max", len(kept))
        assert sum(len(item.model_dump_json()) for item in kept) <= cut.get("bytes_max", size)
        remaining = iter(whole.items)
        assert all(item in remaining for item in kept), "the order is kept"
        assert [item for item in kept if item.protected] == [item for item in whole.items if item.protected]
        assert kept[-1:] == whole.items[-1:]
        if history and history[0].role == "system":
            assert kept[0] == whole.items[0]


@settings(max_examples=40, deadline=None)
@given(histories(), st.integers(1, 12), st.sampled_from([None, ("user", "assistant"), ("assistant", "tool")]))
def test_o02_no_selection_parts_a_call_from_its_result(
    history: list[NewItem], last: int, roles: tuple[str, ...] | None
) -> None:
    selected = run("CONTEXT.SELECT", context=load(*history), last=last, roles=roles)
    assert [problem for problem in unpaired(selected.items) if not problem.startswith("call open_")] == []
