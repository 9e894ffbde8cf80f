"""A process is killed at every point that it passes, and in its handlers; the next goes on, nothing is done twice."""

from __future__ import annotations

import itertools
import signal
from collections import Counter
from pathlib import Path

import pytest

from tests.crash.conftest import Case
from tests.crash.flow import ROUNDS, RUN
from tests.nursery import Nursery
from tests.receipts.chains import certified

WORKFLOWS = ["graph", "loop"]

IN_HANDLERS = [
    f"{name}:{side}"
    for name in ("read", "put", "send", "flaky", "blind", "model", "book", "noted", "left", "right", "thread")
    for side in ("before", "after")
]

EXPECTED = {
    "pure": {"n": 1},
    "read": "read x/1/read",
    "put": "put x/1/put",
    "send": "send x/1/send",
    "flaky": "send x/1/flaky",
    "again": "put x/1/again",
    "blind": "blind x/1/blind",
    "model": "model x/1/model",
    "book": 1,
    "noted": "send x/1/noted",
    "left": "send x/1/left",
    "right": "put x/1/right",
    "skipped": None,
    "thread": "send x/1/thread",
    "join": ["send x/1/left", "put x/1/right", None, "send x/1/thread"],
}

MOST = {"read": 2, "put": 2, "model": 2, "send": 1, "blind": 1}
"""How often a kind of call may be made when one process was killed. Writes: once, whatever happens."""


def points(nursery: Nursery, folder: Path, workflow: str) -> list[str]:
    """Every point that an undisturbed run passes, `#2` for the second time, and so on."""
    record = folder / "points.txt"
    Case(nursery, folder / "recorded", workflow).live(record=record)
    seen: Counter[str] = Counter()
    named = []
    for point in record.read_text(encoding="utf-8").splitlines():
        seen[point] += 1
        named.append(point if seen[point] == 1 else f"{point}#{seen[point]}")
    return named


def check(case: Case, kills: int, note: str) -> None:
    """The run ends as if nothing had happened, and the world saw each effect once."""
    result = case.result()
    calls = case.world.calls()
    if case.workflow == "graph":
        assert result == EXPECTED, note
        assert case.rows("SELECT entry FROM book ORDER BY entry") == [("x/1/book",), ("x/1/noted",)], note
        expected = {value for value in EXPECTED.values() if isinstance(value, str)}
    else:
        assert result == [f"send x/1/{number}/send" for number in range(1, ROUNDS + 1)], note
        expected = set(result)
    assert {f"{kind} {key}" for kind, key in calls} == expected, note
    for (kind, key), count in calls.items():
        most = MOST[kind] if kind in ("send", "blind") else 1 + (MOST[kind] - 1) * kills
        assert count <= most, f"{note}: {kind} {key} was made {count} times"
    events = case.rows("SELECT id & 0xffffffff, kind FROM ditto_events ORDER BY id")
    assert [number for number, _ in events] == list(range(1, len(events) + 1)), note
    assert [kind for _, kind in events].count("run_completed") == 1, note
    assert {state for (state,) in case.rows("SELECT state FROM ditto_steps")} <= {"completed", "skipped"}, note
    assert case.rows("SELECT run_id, generation, status, owner FROM ditto_runs") == [(RUN, 1, "completed", None)], note
    # One whole chain of receipts, in which the last attempt of each effect ends with the outcome that is recorded.
    last = {receipt["step"]: (receipt["attempt"], receipt["outcome"]) for receipt in certified(case.store)}
    effects = case.rows("SELECT path, attempt FROM ditto_steps WHERE effect IN ('write', 'infer')")
    assert last == {path: (attempt, "allow") for path, attempt in effects}, note


@pytest.mark.parametrize("workflow", WORKFLOWS)
def test_undisturbed_everything_is_done_once(nursery: Nursery, tmp_path: Path, workflow: str) -> None:
    case = Case(nursery, tmp_path / "case", workflow)
    check(case, 0, "undisturbed")
    result, calls = case.result(), case.world.calls()
    assert set(calls.values()) == {1}
    # Run again, it gives what is saved, and does nothing.
    assert case.result() == result
    assert case.world.calls() == calls


@pytest.mark.parametrize("workflow", WORKFLOWS)
def test_d06_killed_at_every_point_the_next_process_goes_on(nursery: Nursery, tmp_path: Path, workflow: str) -> None:
    passed = points(nursery, tmp_path, workflow)
    assert len(passed) == len(set(passed))
    for number, point in enumerate(passed):
        case = Case(nursery, tmp_path / str(number), workflow)
        assert case.live(at=point) == {"signal": signal.SIGKILL}, point
        check(case, 1, point)


def test_the_points_are_those_that_the_transitions_pass(nursery: Nursery, tmp_path: Path) -> None:
    """A transition without a point could not be killed at."""
    passed = set(points(nursery, tmp_path, "graph"))
    for step in EXPECTED:
        state = "skipped" if step == "skipped" else "completed"
        assert {f"flow/{step}:{state}:before", f"flow/{step}:{state}:after"} <= passed
    for step in ("send", "flaky", "blind", "model", "noted", "left", "thread"):
        assert {f"flow/{step}:admitted:before", f"flow/{step}:admitted:after"} <= passed
    for step in ("flaky", "again"):
        assert {f"flow/{step}:retrying:before", f"flow/{step}:retrying:after"} <= passed
    assert {"flow/flaky:admitted:before#2", "flow/flaky:admitted:after#2"} <= passed
    assert {"flow:created:before", "flow:created:after", "flow:completed:before", "flow:completed:after"} <= passed


@pytest.mark.parametrize("side", IN_HANDLERS)
def test_a05_killed_in_a_handler_its_effect_is_counted_once(nursery: Nursery, tmp_path: Path, side: str) -> None:
    case = Case(nursery, tmp_path / "case", "graph")
    assert case.live(kill_in=side) == {"signal": signal.SIGKILL}
    name, where = side.split(":")
    made = case.world.calls()[kind_of(name), f"x/1/{name}"]
    assert made == (1 if where == "after" and name != "book" else 0)
    check(case, 1, side)
    again = case.world.calls()[kind_of(name), f"x/1/{name}"]
    if name in ("read", "put", "right", "model"):
        # Repeated as documented: a read, an effect with the same key, a model call by policy.
        assert again == made + 1
    elif name != "book":
        assert again == 1


def kind_of(name: str) -> str:
    return str(EXPECTED[name]).split(" ")[0]


@pytest.mark.parametrize("round_", range(1, 4))
def test_killed_in_a_handler_of_a_loop(nursery: Nursery, tmp_path: Path, round_: int) -> None:
    case = Case(nursery, tmp_path / "case", "loop")
    assert case.live(at=f"rounds/{round_}/send:admitted:after") == {"signal": signal.SIGKILL}
    assert case.live(kill_in="send:after") == {"signal": signal.SIGKILL}
    check(case, 2, f"round {round_}")


def test_killed_again_while_it_goes_on(nursery: Nursery, tmp_path: Path) -> None:
    """The second process is killed where it takes the run over, and where it settles what was lost."""
    for number, second in enumerate(
        [
            "flow:claimed:before",
            "flow:claimed:after",
            "flow/blind:unknown:before",
            "flow/blind:unknown:after",
            "flow:unknown:before",
            "flow:unknown:after",
        ]
    ):
        case = Case(nursery, tmp_path / str(number), "graph")
        assert case.live(kill_in="blind:after") == {"signal": signal.SIGKILL}
        assert case.live(at=second) == {"signal": signal.SIGKILL}, second
        check(case, 2, second)


@pytest.mark.sweep
@pytest.mark.parametrize("workflow", WORKFLOWS)
def test_killed_at_every_pair_of_points(nursery: Nursery, tmp_path: Path, workflow: str) -> None:
    passed = points(nursery, tmp_path, workflow)
    folder = itertools.count()
    for first in passed[::3]:
        for second in passed[::4]:
            case = Case(nursery, tmp_path / str(next(folder)), workflow)
            assert case.live(at=first) == {"signal": signal.SIGKILL}
            answer = case.live(at=second)
            kills = 2 if answer == {"signal": signal.SIGKILL} else 1
            assert kills == 2 or "result" in answer, answer
            check(case, kills, f"{first}, then {second}")
