"""What users tell of such systems, played over processes that are killed: each thing is done, and paid for, once."""

from __future__ import annotations

import asyncio
import json
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from ditto.store.connection import Driver
from ditto.testing.provider import Call, Reply, Text, ToolCalls, Usage, read_requests, reply_to_json
from tests.crash import stories
from tests.crash.conftest import Case
from tests.nursery import Nursery
from tests.processes import ROOT

KILLED = {"signal": signal.SIGKILL}


@pytest.fixture
def case(nursery: Nursery, tmp_path: Path) -> Case:
    return Case(nursery, tmp_path / "case")


def events(case: Case, kind: str) -> list[tuple[str | None, dict[str, Any] | None]]:
    """Step and body of each event of that kind, in order."""
    found = case.rows("SELECT kind, step, body FROM ditto_events ORDER BY id")
    return [(step, None if body is None else json.loads(body)) for each, step, body in found if each == kind]


# A02


def test_a02_each_round_of_a_review_is_made_once_whoever_delivers_the_answer(case: Case) -> None:
    first = case.live(story="answer")
    rejected = [case.live(story="answer", decision="reject") for _ in range(3)]
    asked = [each["result"]["asks"] for each in (first, *rejected)]
    ended = case.live(story="answer", decision="approve")["result"]["ended"]
    posts = [f"post x/1/{number}/post" for number in range(1, 5)]
    assert asked == [
        {"round": number, "drafts": posts[: number - 1], "posted": posts[number - 1]} for number in range(1, 5)
    ]
    assert ended["answers"] == ["reject", "reject", "reject", "approve"]
    assert case.world.calls() == {("post", f"x/1/{number}/post"): 1 for number in range(1, 5)}
    assert len(events(case, "step_waiting")) == len(events(case, "approval_decided")) == 4


# A10


def test_a10_two_equal_questions_keep_their_own_answers(case: Case) -> None:
    killed = case.live(story="ask_who", tenants=["t-a", "t-b"], at="who/second:completed:after")
    assert killed == KILLED
    assert case.live(story="ask_who", tenants=[])["result"] == ["t-a", "t-b"]
    assert case.world.calls() == {("who", "x/1/first"): 1, ("who", "x/1/second"): 1}
    assert case.live(story="ask_who", tenants=["t-c", "t-d"], id="y")["result"] == ["t-c", "t-d"]


# A12, A13

StartProvider: TypeAlias = Callable[[list[Reply]], str]


@pytest.fixture
def start_provider(case: Case) -> Iterator[StartProvider]:
    """Starts a scripted provider in a process of its own; its address."""
    started: list[subprocess.Popen[str]] = []

    def start(replies: list[Reply]) -> str:
        case.folder.mkdir(exist_ok=True)
        script = case.folder / "replies.json"
        script.write_text(json.dumps([reply_to_json(reply) for reply in replies]), encoding="utf-8")
        process = subprocess.Popen(
            [sys.executable, "-m", "ditto.testing.provider", "--strict",
             "--db", str(case.folder / "model.db"), "--script", str(script)],
            cwd=ROOT, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        started.append(process)
        assert process.stdout is not None
        told: str = json.loads(process.stdout.readline())["base_url"]
        return told

    yield start
    for process in started:
        process.terminate()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


FIRST = ToolCalls([Call("call-1", "act")])
SECOND = ToolCalls([Call("call-2", "act")])
LAST = Text("done")


def test_a12_what_the_model_answered_is_not_paid_for_again(case: Case, start_provider: StartProvider) -> None:
    provider = start_provider([FIRST, SECOND, LAST])
    assert case.live(story="converse", provider=provider, at="turns/2/sampled:completed:after") == KILLED
    assert len(read_requests(case.folder / "model.db")) == 2
    assert case.live(story="converse", provider=provider)["result"]["last"] == "done"
    assert len(read_requests(case.folder / "model.db")) == 3
    assert case.world.calls() == {
        ("tool", "x/1/1/acted/call-1"): 1,
        ("tool", "x/1/2/acted/call-2"): 1,
    }
    assert [body for _, body in events(case, "step_admitted") if body is not None and "again" in body] == []


def test_a12_an_answer_that_was_lost_is_asked_for_once_more_and_the_history_says_so(
    case: Case, start_provider: StartProvider
) -> None:
    provider = start_provider([FIRST, SECOND, SECOND, LAST])
    assert case.live(story="converse", provider=provider, at="turns/2/sampled:completed:before") == KILLED
    assert len(read_requests(case.folder / "model.db")) == 2, "its last byte was read"
    assert case.live(story="converse", provider=provider)["result"]["last"] == "done"
    requests = read_requests(case.folder / "model.db")
    assert len(requests) == 4, "exactly one more"
    assert requests[1].body == requests[2].body
    assert case.world.calls() == {
        ("tool", "x/1/1/acted/call-1"): 1,
        ("tool", "x/1/2/acted/call-2"): 1,
    }
    sampled = [(step, body) for step, body in events(case, "step_admitted") if step == "2/sampled"]
    again = "by policy, a model call with no recorded answer is asked again"
    assert sampled == [
        ("2/sampled", {"attempt": 1, "key": "x/1/2/sampled"}),
        ("2/sampled", {"attempt": 2, "key": "x/1/2/sampled", "again": again}),
    ]


def test_a13_what_was_spent_is_counted_from_the_record(case: Case, start_provider: StartProvider) -> None:
    """There are no hooks that a recovery runs again: what a call took stands in its step's output."""
    seven = Usage(prompt_tokens=5, completion_tokens=2)
    calls: list[Reply] = [ToolCalls([Call(f"call-{number}", "act")], usage=seven) for number in (1, 2, 3)]
    provider = start_provider([*calls, Text("done", usage=seven)])
    assert case.live(story="converse", provider=provider, at="turns/3/sampled:completed:after") == KILLED
    assert case.live(story="converse", provider=provider)["result"] == {"last": "done", "tokens": 28}
    assert len(read_requests(case.folder / "model.db")) == 4
    assert [step for step, _ in events(case, "step_completed") if step is not None and step.endswith("sampled")] == [
        f"{number}/sampled" for number in range(1, 5)
    ]


# C12


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("how", ["flow", "graph"])
@pytest.mark.parametrize(
    "killed", ["x:completed:after", "ask:waiting:after", "y:completed:before", "z:completed:before"]
)
def test_c12_a_pause_deep_inside_begins_nothing_again(case: Case, depth: int, how: str, killed: str) -> None:
    """X, a pause and Y are `depth` runs below the one that is run; Z follows at each level above them."""
    prefix = "inner/" if how == "graph" else ""
    waits = {"waits": ["below"]}
    order: dict[str, Any] = {"story": "dive", "depth": depth, "how": how}
    if killed[0] in "xa":
        assert case.live(**order, at=f"level-0/{prefix}{killed}") == KILLED
    assert case.live(**order)["result"] == waits
    point = f"level-0/{prefix}{killed}" if killed[0] == "y" else f"level-1/{killed}" if killed[0] == "z" else None
    if point is not None:
        assert case.live(**order, answer="approve", at=point) == KILLED
        ended = case.live(**order)
    else:
        ended = case.live(**order, answer="approve")
    assert "ended" in ended["result"], ended
    deepest = "x" + "/below" * depth
    calls = case.world.calls()
    repeated = {"y": ("y", f"{deepest}/1/{prefix}y"), "z": ("z", f"{deepest.removesuffix('/below')}/1/z")}.get(
        killed[0]
    )
    assert calls.pop(("x", f"{deepest}/1/{prefix}x")) == 1
    levels = [("x" + "/below" * above + "/1/z") for above in range(depth)]
    assert calls.keys() == {("y", f"{deepest}/1/{prefix}y"), *(("z", key) for key in levels)}
    for call, count in calls.items():
        # Killed between its effect and its commit, an effect with the same key is made again, as documented.
        assert count == (2 if call == repeated else 1), call
    assert len(events(case, "approval_decided")) == 1


# D04


def test_d04_the_slot_of_a_holder_that_was_killed_is_free(case: Case) -> None:
    """A slot is a semaphore of a live runtime: there is no count in the store that a dead holder could leave there."""
    assert case.live(story="use_slot", dies=True) == KILLED
    [((kind, held), count)] = case.world.calls().items()
    assert (kind, count) == ("use", 1), "the other one waited for the slot"
    assert case.live(story="use_slot")["result"] == [["a", "completed"], ["b", "completed"]]
    assert case.world.calls() == {("use", key): 2 if key == held else 1 for key in ("a/1/use", "b/1/use")}


# J04


class Counting(Driver):
    """Counts what the connections are asked, and how much SQLite has to do for it."""

    statements = 0
    thousands = 0
    """Of the instructions that SQLite's machine carried out."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.set_progress_handler(self._worked, 1_000)

    def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
        Counting.statements += 1
        return super().execute(sql, parameters)

    @staticmethod
    def _worked() -> None:
        Counting.thousands += 1


def cost_of_resuming(case: Case, rounds: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Of the last ten rounds, after a process was killed before them: statements, and thousands of instructions."""
    order = {"story": "count", "rounds": rounds}
    assert case.live(**order, at=f"count/{rounds - 10}/next:completed:after") == KILLED
    Counting.statements = Counting.thousands = 0
    with monkeypatch.context() as patch:
        patch.setattr("ditto.store.connection.Driver", Counting)
        assert asyncio.run(stories.count({**order, "store": case.store})) == rounds
    return Counting.statements, Counting.thousands


@pytest.mark.sweep
def test_j04_a_loop_of_twenty_thousand_rounds_goes_on_from_its_state(
    nursery: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it costs to go on does not depend on how far it is: nothing is replayed, and no history is read."""
    short = cost_of_resuming(Case(nursery, tmp_path / "short"), 200, monkeypatch)
    long = cost_of_resuming(Case(nursery, tmp_path / "long"), 20_000, monkeypatch)
    # At most 64 outcomes are held: so many rounds may have to be computed again.
    assert long[0] <= short[0] + 200
    assert long[1] <= short[1] + 5
