"""CONTEXT.COMPRESS: what a summary replaces and what it leaves, where it is put, its trace, and the caps."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import chain, count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from ditto import Context, ContextItem, LimitExceededError, ModelRef, NewItem
from ditto.config import ProviderConfig
from ditto.contracts import ContextLimits, Replaced, SampleInput
from ditto.testing.provider_strict import find_problem
from ditto_workers.infer.request import build_request
from tests.unit.test_context_worker import answer, assistant, calls, load, run, system, texts, unpaired, user

SUMMARY = "in short"


def compress(context: Context, keep_last: int, summary: str = SUMMARY, **more: Any) -> Context:
    return run("CONTEXT.COMPRESS", context=context, keep_last=keep_last, summary=summary, **more)


def update(context: Context, *add: NewItem, **limits: int) -> Context:
    return run("CONTEXT.UPDATE", context=context, add=add, limits=ContextLimits(**limits))


def digest(*lines: str) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def size(items: Sequence[ContextItem]) -> int:
    return sum(len(item.model_dump_json().encode()) for item in items)


def result(call_id: str, text: str, **more: Any) -> NewItem:
    return NewItem(role="tool", content=text, tool_call_id=call_id, **more)


def test_the_summary_stands_where_the_first_item_was_that_it_replaces() -> None:
    before = load(system("rules"), user("a"), assistant("b"), user("c"), assistant("d"))
    after = compress(before, keep_last=2)
    assert texts(after) == ["rules", SUMMARY, "c", "d"]
    summary = after.items[1]
    assert (summary.role, summary.source, summary.protected) == ("user", "summary", False)
    assert summary.id == load(user(SUMMARY, source="summary")).items[0].id
    assert summary.replaces == Replaced(count=2, digest=digest(before.items[1].id, before.items[2].id))
    assert (after.items[0], *after.items[2:]) == (before.items[0], *before.items[3:])
    assert texts(before) == ["rules", "a", "b", "c", "d"]


def test_its_role_and_source_are_the_callers() -> None:
    summary = compress(load(user("a")), 0, role="system", source="nightly").items[0]
    assert (summary.role, summary.source) == ("system", "nightly")


@pytest.mark.parametrize("wrong", [{"summary": ""}, {"summary": "half \ud83d"}, {"keep_last": -1}, {"role": "tool"}])
def test_what_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        compress(load(user("a")), **{"keep_last": 0, **wrong})


def test_with_nothing_to_replace_the_context_comes_back_as_it_was() -> None:
    fixed = load(system("rules"), user("kept", protected=True), calls("c1", "c2"), answer("c1"))
    assert compress(fixed, 0) == fixed
    assert compress(Context(), 0) == Context()
    few = load(user("a"), assistant("b"))
    assert compress(few, 2) == few
    assert compress(few, 40) == few


def test_the_same_summary_a_second_time_changes_nothing() -> None:
    once = compress(load(system("rules"), user("a"), assistant("b"), user("c")), 1)
    assert compress(once, 1) == once


def test_only_the_first_system_message_is_safe_and_a_summary_is_none() -> None:
    assert texts(compress(load(system("one"), system("two"), user("a")), 1)) == ["one", SUMMARY, "a"]
    once = compress(load(user("a"), system("rules"), user("b")), 0, role="system")
    assert texts(once) == [SUMMARY, "rules"]
    assert texts(compress(update(once, user("c")), 0, summary="shorter")) == ["shorter", "rules"]


def test_protected_items_stay_with_their_group_and_the_summary_covers_both_sides() -> None:
    before = load(user("a"), calls("c1", "c2"), answer("c2"), result("c1", "kept", protected=True), user("b"))
    after = compress(before, 0)
    assert texts(after) == [SUMMARY, "", "result of c2", "kept"]
    assert after.items[0].replaces == Replaced(count=2, digest=digest(before.items[0].id, before.items[4].id))


def test_an_unanswered_last_call_stays_though_something_was_said_since() -> None:
    waiting = load(user("a"), calls("c1"), user("hurry"))
    assert [item.role for item in compress(waiting, 0).items] == ["user", "assistant"]
    answered = compress(update(compress(waiting, 0), answer("c1")), 0, summary="shorter")
    assert texts(answered) == ["shorter"]


def test_what_came_unpaired_before_the_last_call_is_replaced_like_the_rest() -> None:
    before = load(answer("lost"), calls("forgotten"), user("a"), calls("c1"), answer("c1"))
    assert texts(compress(before, 1)) == [SUMMARY, "", "result of c1"]


def test_a_group_that_just_got_its_result_is_among_the_newest() -> None:
    before = load(calls("c1"), user("hurry"), answer("c1"))
    assert texts(compress(before, 1)) == ["", SUMMARY, "result of c1"]


def test_a_summary_of_a_summary_counts_on_and_does_not_grow() -> None:
    first = compress(load(user("a"), assistant("b"), user("c")), 0).items[0]
    assert first.replaces is not None
    context = update(Context(items=(first,)), assistant("d"))
    second = compress(context, 0, summary="shorter").items[0]
    new = context.items[1].id
    assert second.replaces == Replaced(count=4, digest=digest(f"{first.id} {first.replaces.digest}", new))
    assert len(second.model_dump_json()) == len(first.model_dump_json()) - len(SUMMARY) + len("shorter")


def test_a_saved_summary_keeps_its_trace_and_other_items_are_saved_as_before() -> None:
    context = compress(load(user("a"), user("b")), 1)
    saved = context.model_dump(mode="json")
    assert ["replaces" in item for item in saved["items"]] == [True, False]
    assert run("CONTEXT.LOAD", context=saved) == context


def test_the_caps_apply_and_drop_no_summary() -> None:
    long = load(system("rules"), *(user(letter) for letter in "abcdef"))
    capped = compress(long, 3, limits=ContextLimits(items_max=4))
    assert texts(capped) == ["rules", SUMMARY, "e", "f"]
    assert texts(update(capped, user("g"), items_max=3)) == ["rules", SUMMARY, "g"]
    assert texts(compress(long, 9, limits=ContextLimits(items_max=2))) == ["rules", "f"]
    with pytest.raises(LimitExceededError, match="must keep 3 items"):
        compress(long, 1, limits=ContextLimits(items_max=2))
    with pytest.raises(LimitExceededError, match="shorten the summary"):
        compress(long, 1, summary="x" * 2000, limits=ContextLimits(bytes_max=2000))


@pytest.mark.parametrize("order", [("call_1", "call_2"), ("call_2", "call_1")])
def test_o06_a_kept_pair_and_a_new_one_with_its_call_id_stay_with_their_own(order: tuple[str, str]) -> None:
    turns = chain.from_iterable((user(f"question {turn}"), assistant(f"answer {turn}")) for turn in range(4))
    fifth = [user("fifth"), calls("call_1"), result("call_1", "old")]
    compacted = compress(load(system("rules"), *turns, *fifth), keep_last=1)
    assert texts(compacted) == ["rules", SUMMARY, "", "old"]

    sixth = [calls("call_1", "call_2"), *(result(each, f"new {each}") for each in order)]
    later = update(compacted, user("sixth"), *sixth)
    new = ["", *(f"new {each}" for each in order)]
    assert texts(compress(later, 3, summary="shorter")) == ["rules", "shorter", "", "old", "sixth", *new]
    assert texts(compress(later, 1, summary="shorter")) == ["rules", "shorter", *new]


def test_o06_a_protected_pair_outlives_a_later_one_with_its_call_id() -> None:
    old = [calls("call_1"), result("call_1", "old", protected=True)]
    before = load(user("a"), *old, user("b"), calls("call_1"), result("call_1", "new"), user("c"))
    assert texts(compress(before, 1)) == [SUMMARY, "", "old", "c"]
    waiting = load(user("a"), *old, user("b"), calls("call_1"))
    assert texts(compress(waiting, 0)) == [SUMMARY, "", "old", ""]


@st.composite
def grouped_histories(draw: st.DrawFn, call_ids: str) -> list[list[NewItem]]:
    """A well-formed history of 1 to 40 messages, group by group; no two messages are equal.

    `call_ids`: "unique", or "again": counted from zero in every answer. The last call may lack results.
    """
    groups: list[list[NewItem]] = [[system("rules")]] if draw(st.booleans()) else []
    for turn in range(draw(st.integers(1, 12))):
        groups.append([system(f"hint {turn}") if draw(st.integers(0, 7)) == 0 else user(f"question {turn}")])
        parallel = draw(st.integers(0, 3))
        if parallel:
            ids = [f"call_{each}" if call_ids == "again" else f"call_{turn}_{each}" for each in range(parallel)]
            asked = calls(*ids).model_copy(update={"content": f"look {turn}"})
            groups.append([asked, *(result(each, f"{turn}: {each}") for each in draw(st.permutations(ids)))])
        if draw(st.booleans()):
            groups.append([assistant(f"answer {turn}")])
    while sum(map(len, groups)) > 40:
        groups.pop()
    if len(groups[-1]) > 1 and draw(st.booleans()):
        groups[-1] = groups[-1][: draw(st.integers(1, len(groups[-1]) - 1))]
    protected = draw(st.sets(st.integers(0, 39), max_size=4))
    position = count()
    return [[item.model_copy(update={"protected": next(position) in protected}) for item in group] for group in groups]


def stays(group: list[NewItem], groups: list[list[NewItem]]) -> bool:
    """Whether the group may not be replaced at all."""
    first = next((item for item in chain.from_iterable(groups) if item.role == "system"), None)
    return (
        any(item.protected for item in group)
        or group[0] is first
        or (group is groups[-1] and len(group) <= len(group[0].tool_calls))
    )


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["unique", "again"]).flatmap(grouped_histories))
def test_o02_what_a_summary_replaces_and_what_it_leaves(groups: list[list[NewItem]]) -> None:
    before = load(*chain.from_iterable(groups))
    assert list(unpaired(before.items)) == []
    for keep_last in range(len(groups) + 2):
        older = groups[: max(0, len(groups) - keep_last)]
        gone = {item.id for group in older if not stays(group, groups) for item in load(*group).items}
        after = compress(before, keep_last)
        assert compress(before, keep_last) == after
        assert compress(after, keep_last) == after
        assert list(unpaired(after.items)) == []
        if not gone:
            assert after == before
            continue
        [summary] = [item for item in after.items if item.replaces is not None]
        first = next(position for position, item in enumerate(before.items) if item.id in gone)
        assert after.items.index(summary) == first
        assert [item for item in after.items if item is not summary] == [
            item for item in before.items if item.id not in gone
        ]
        replaced = [item.id for item in before.items if item.id in gone]
        assert summary.replaces == Replaced(count=len(replaced), digest=digest(*replaced))
        assert len(after.items) <= len(before.items)
        assert size(after.items) <= size(before.items) + size([summary])


@settings(max_examples=60, deadline=None)
@given(grouped_histories("unique"), st.lists(st.integers(0, 12), min_size=1, max_size=4))
def test_o02_a_strict_provider_accepts_the_history_however_often_it_was_compressed(
    groups: list[list[NewItem]], cuts: list[int]
) -> None:
    context = load(*chain.from_iterable(groups))
    answered = {item.tool_call_id for item in groups[-1]}
    missing = [call.id for call in groups[-1][0].tool_calls if call.id not in answered]
    for number, keep_last in enumerate(cuts):
        context = compress(context, keep_last, summary=f"summary {number}")
        if not missing:
            context = update(context, user(f"next {number}"))
    if missing:
        context = update(context, *(answer(each) for each in missing))
    request = SampleInput(model=ModelRef(provider="fake", name="m"), messages=context.items)
    assert find_problem(build_request(request, ProviderConfig()), strict=True, reasoning_content="ignore") is None


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 3)), min_size=1, max_size=12))
def test_a_chain_of_summaries_counts_all_that_was_said_and_stays_small(turns: list[tuple[int, int]]) -> None:
    context, said = Context(), 0
    for number, (added, keep_last) in enumerate(turns):
        context = update(context, *(user(f"{number}.{each}") for each in range(added)))
        context = compress(context, keep_last, summary=f"summary {number}")
        said += added
        summaries = [item for item in context.items if item.replaces is not None]
        assert len(summaries) <= 1, "each summary replaces the one before it"
        counted = sum(item.replaces.count for item in summaries if item.replaces is not None)
        assert counted + len(context.items) - len(summaries) == said
        assert size(summaries) < 400
