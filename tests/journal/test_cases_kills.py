"""Agents that are killed at every point and inside their tools (cases 1, 3, 4, 17 and 18).

Whatever happens: the model is not asked twice for one decision, but where a person says so; each effect is made once;
nothing is begun before its cause is recorded, and nothing is claimed that is not.
"""

from __future__ import annotations

import json
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.journal.conftest import Case, Model
from tests.journal.model import TOOLS
from tests.journal.program import RUN
from tests.nursery import Nursery

KINDS: list[dict[str, Any]] = [
    {"way": way, "stream": stream, "tools": tools, "at_once": at_once}
    for way in ("agent", "run_agent")
    for stream in (False, True)
    for tools, at_once in ((1, 1), (3, 1), (3, 3))
] + [{"way": "bridge", "tools": tools} for tools in (1, 3)]

IN_TOOLS = [f"{tool}:{side}" for tool in TOOLS for side in ("before", "after")]

READ_TRIES = 3


def named(kind: dict[str, Any]) -> str:
    return "-".join(str(value) for value in kind.values())


def flow_of(case: Case) -> str:
    return "agent" if case.way == "run_agent" else "turn"


def paths(case: Case) -> dict[str, str]:
    """What the steps of the first round are called: the model's answer, the calls, the last answer."""
    if case.way == "run_agent":
        return {"answer": "1/sample", "call": "2/t1", "last": "2/sample"}
    return {"answer": "m/1", "call": "t/c0" if case.way == "bridge" else "t/c0_0", "last": "m/2"}


def check_causes(case: Case) -> None:
    """What stands in the store when a process was killed: nothing outside was done without its record."""
    rows = case.rows("SELECT effect, key, attempt FROM ditto_steps")
    keys = {key for effect, key, _ in rows if effect == "write"}
    for kind, key in case.world.calls():
        assert kind.startswith("look") or key in keys, f"{kind} was done, and no admission of it is recorded"
    tries = {effect: sum(attempt for each, _, attempt in rows if each == effect) for effect in ("infer", "read")}
    assert case.requests <= tries["infer"], "the model was asked, and no admission of it is recorded"
    assert case.effects["look 0"] <= tries["read"], "a read was begun, and is not counted"
    states = case.states
    begun = [path for path in states if path.startswith("t/") or path.partition("/")[2].startswith("t")]
    if begun and case.way != "bridge":
        assert states[paths(case)["answer"]] == "completed", "a tool was begun before the answer was recorded"


def check_end(case: Case, kills: int, note: str) -> dict[str, Any]:
    """The next process comes to the end as if nothing had happened."""
    result = case.result()
    told = [[f"c{at}", f"{tool} 0"] for at, tool in enumerate(TOOLS[: case.tools])]
    assert result["text"] == (json.dumps(told) if case.way == "bridge" else "done"), note
    decisions = case.rows("SELECT body FROM ditto_events WHERE kind = 'step_resolved'")
    asked_again = sum('"ask_again"' in body for (body,) in decisions)
    asked = 0 if case.way == "bridge" else case.rounds + 1
    # A recorded decision to ask again is one request more, unless the first was never sent.
    assert asked <= case.requests <= asked + asked_again, note
    effects = case.effects
    rounds = range(1 if case.way == "bridge" else case.rounds)
    assert set(effects) == {f"{tool} {n}" for tool in TOOLS[: case.tools] for n in rounds}, note
    for effect, count in effects.items():
        assert count == 1 or (effect.startswith("look") and count <= 1 + kills), f"{note}: {effect} {count} times"
    assert set(case.states.values()) == {"completed"}, note
    events = case.rows("SELECT id & 0xffffffff, kind FROM ditto_events ORDER BY id")
    assert [number for number, _ in events] == list(range(1, len(events) + 1)), note
    assert [kind for _, kind in events].count("run_completed") == 1, note
    assert case.rows("SELECT run_id, status, owner FROM ditto_runs") == [(RUN, "completed", None)], note
    before = case.requests, effects
    assert case.result() == {"text": result["text"], "decided": []}, note
    assert (case.requests, case.effects) == before, note
    return result


def points(nursery: Nursery, model: Model, folder: Path, kind: dict[str, Any]) -> list[str]:
    """Every point that an undisturbed run passes, `#2` for the second time, and so on."""
    record = folder / "points.txt"
    case = Case(nursery, model, folder / "recorded", **kind)
    case.live(record=record)
    seen: Counter[str] = Counter()
    found = []
    for point in record.read_text(encoding="utf-8").splitlines():
        seen[point] += 1
        found.append(point if seen[point] == 1 else f"{point}#{seen[point]}")
    return found


@pytest.fixture
def case(nursery: Nursery, model: Model, tmp_path: Path) -> Case:
    return Case(nursery, model, tmp_path / "case")


@pytest.mark.parametrize("kind", KINDS, ids=named)
def test_j01_undisturbed_everything_is_done_once(
    nursery: Nursery, model: Model, tmp_path: Path, kind: dict[str, Any]
) -> None:
    case = Case(nursery, model, tmp_path / "case", **kind)
    assert check_end(case, 0, "undisturbed")["decided"] == []


SAMPLE: list[tuple[dict[str, Any], str]] = [
    ({"way": "agent", "stream": False, "tools": 1}, "turn:created:after"),
    ({"way": "agent", "stream": False, "tools": 3, "at_once": 3}, "turn/m/1:completed:after"),
    ({"way": "agent", "stream": True, "tools": 3, "at_once": 3}, "turn/t/c0_1:admitted:after"),
    ({"way": "agent", "stream": True, "tools": 1}, "turn/t/c0_0:completed:before"),
    ({"way": "agent", "stream": False, "tools": 3, "at_once": 1}, "turn/t/c0_1:completed:after"),
    ({"way": "agent", "stream": True, "tools": 3, "at_once": 1}, "turn:completed:before"),
    ({"way": "run_agent", "stream": False, "tools": 1}, "agent/1/sample:admitted:before"),
    ({"way": "run_agent", "stream": True, "tools": 3, "at_once": 3}, "agent/1/sample:completed:after"),
    ({"way": "run_agent", "stream": False, "tools": 3, "at_once": 3}, "agent/2/t2:admitted:after"),
    ({"way": "run_agent", "stream": True, "tools": 1}, "agent/2/t1:completed:before"),
    ({"way": "run_agent", "stream": False, "tools": 3, "at_once": 1}, "agent/2/sample:completed:before"),
    ({"way": "bridge", "tools": 3}, "turn/t/c1:admitted:after"),
]


@pytest.mark.parametrize(("kind", "point"), SAMPLE, ids=[f"{named(kind)}-{point}" for kind, point in SAMPLE])
def test_j03_killed_at_a_point_the_next_process_goes_on(
    nursery: Nursery, model: Model, tmp_path: Path, kind: dict[str, Any], point: str
) -> None:
    case = Case(nursery, model, tmp_path / "case", **kind)
    assert case.live(at=point) == {"signal": signal.SIGKILL}
    check_causes(case)
    check_end(case, 1, point)


@pytest.mark.sweep
@pytest.mark.parametrize("kind", KINDS, ids=named)
def test_j03_killed_at_every_point_the_next_process_goes_on(
    nursery: Nursery, model: Model, tmp_path: Path, kind: dict[str, Any]
) -> None:
    passed = points(nursery, model, tmp_path, kind)
    assert len(passed) == len(set(passed)) >= 8
    for number, point in enumerate(passed):
        case = Case(nursery, model, tmp_path / str(number), **kind)
        assert case.live(at=point) == {"signal": signal.SIGKILL}, point
        check_causes(case)
        check_end(case, 1, point)


@pytest.mark.sweep
@pytest.mark.parametrize("kind", KINDS, ids=named)
def test_j17_killed_in_every_tool_the_next_process_goes_on(
    nursery: Nursery, model: Model, tmp_path: Path, kind: dict[str, Any]
) -> None:
    for number, place in enumerate(IN_TOOLS[: 2 * kind["tools"]]):
        case = Case(nursery, model, tmp_path / str(number), **kind)
        assert case.live(kill_in=place) == {"signal": signal.SIGKILL}, place
        check_causes(case)
        check_end(case, 1, place)


@pytest.mark.sweep
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind["tools"] == 3], ids=named)
def test_j03_killed_again_while_it_goes_on(
    nursery: Nursery, model: Model, tmp_path: Path, kind: dict[str, Any]
) -> None:
    passed = points(nursery, model, tmp_path, kind)
    for number, (first, second) in enumerate(zip(passed[::5], passed[2::5], strict=False)):
        case = Case(nursery, model, tmp_path / str(number), **kind)
        assert case.live(at=first) == {"signal": signal.SIGKILL}
        answer = case.live(at=second)
        check_causes(case)
        check_end(case, 2 if "signal" in answer else 1, f"{first}, then {second}")


# 4: what was asked and not recorded


@pytest.mark.parametrize("way", ["agent", "run_agent"])
@pytest.mark.parametrize("sent", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_j04_killed_between_admission_and_answer_is_unknown_and_a_rerun_adds_no_call(
    case: Case, way: str, sent: bool, stream: bool
) -> None:
    case.way, case.stream = way, stream
    answer = paths(case)["answer"]
    point = f"{flow_of(case)}/{answer}:{'completed:before' if sent else 'admitted:after'}"
    assert case.live(at=point) == {"signal": signal.SIGKILL}
    for _ in range(2):
        assert case.result(decide=False) == {"unknown": [answer]}
        assert case.requests == int(sent)
        assert not case.effects
    assert check_end(case, 1, point)["decided"] == [answer]
    assert case.requests == 2 + int(sent)


@pytest.mark.parametrize("way", ["agent", "run_agent"])
def test_a12_j04_by_policy_a_lost_answer_is_asked_for_again_once_and_a_recorded_one_is_not(
    case: Case, way: str
) -> None:
    """Three answers; killed after the last byte of the second and before its commit, then after a commit."""
    case.way, case.rounds = way, 2
    second = "2/sample" if way == "run_agent" else "m/2"
    assert case.live(at=f"{flow_of(case)}/{second}:completed:before", policy="ask_again") == {"signal": signal.SIGKILL}
    assert case.requests == 2
    assert case.live(at=f"{flow_of(case)}/{second}:completed:after", policy="ask_again") == {"signal": signal.SIGKILL}
    assert case.requests == 3
    assert case.result(policy="ask_again")["text"] == "done"
    assert case.requests == 4
    assert case.effects == {"notify 0": 1, "notify 1": 1}
    events = case.rows(f"SELECT kind, body FROM ditto_events WHERE step = '{second}' ORDER BY id")
    assert [kind for kind, _ in events] == ["step_admitted", "step_admitted", "step_completed"]
    assert "a model call with no recorded answer is asked again" in events[1][1]


# 17, 18: killed inside a tool


@pytest.mark.parametrize("way", ["agent", "run_agent", "bridge"])
@pytest.mark.parametrize("side", ["before", "after"])
def test_j17_killed_in_a_write_it_is_unknown_and_a_person_settles_it(case: Case, way: str, side: str) -> None:
    case.way = way
    assert case.live(kill_in=f"notify:{side}") == {"signal": signal.SIGKILL}
    check_causes(case)
    made = int(side == "after")
    for _ in range(2):
        assert case.result(decide=False) == {"unknown": [paths(case)["call"]]}
        assert case.effects.total() == made
        assert case.requests == (0 if way == "bridge" else 1)
    assert check_end(case, 1, side)["decided"] == [paths(case)["call"]]


@pytest.mark.parametrize("way", ["agent", "run_agent", "bridge"])
@pytest.mark.parametrize("side", ["before", "after"])
def test_j17_killed_in_a_write_with_a_look_up_nobody_need_settle_it(case: Case, way: str, side: str) -> None:
    case.way, case.tools = way, 3
    assert case.live(kill_in=f"publish:{side}") == {"signal": signal.SIGKILL}
    check_causes(case)
    assert check_end(case, 1, side)["decided"] == []


@pytest.mark.parametrize("way", ["agent", "run_agent", "bridge"])
def test_j17_killed_in_a_read_it_is_tried_three_times_at_most(case: Case, way: str) -> None:
    """Then the model is told that it failed, and the turn goes on."""
    case.way, case.tools = way, 3
    for tries in range(1, READ_TRIES + 1):
        assert case.live(kill_in="look:after") == {"signal": signal.SIGKILL}
        assert case.effects["look 0"] == tries
        check_causes(case)
    result = case.result(kill_in="look:after")
    assert case.effects == {"notify 0": 1, "publish 0": 1, "look 0": READ_TRIES}
    assert case.requests == (0 if way == "bridge" else 2)
    if way != "bridge":
        assert result == {"text": "done", "decided": []}
        told = case.rows("SELECT output FROM ditto_steps WHERE type = 'INTERACTION.ACT.TOOL' AND effect = 'read'")
        assert "was begun 3 times" in str(told)


@pytest.mark.parametrize("way", ["agent", "run_agent"])
def test_j18_killed_in_the_first_of_three_the_others_run_once(case: Case, way: str) -> None:
    case.way, case.tools = way, 3
    assert case.live(kill_in="notify:after") == {"signal": signal.SIGKILL}
    assert case.effects == {"notify 0": 1}
    for _ in range(2):
        assert case.result(decide=False) == {"unknown": [paths(case)["call"]]}
        assert case.effects == {"notify 0": 1, "publish 0": 1, "look 0": 1}
        assert case.requests == 1
    check_end(case, 1, "three calls")


# The next turn of a thread that was cut


@pytest.mark.parametrize("way", ["agent", "run_agent"])
@pytest.mark.parametrize("cut", ["after the answer", "during the first", "between the tools"])
def test_o01_after_a_kill_the_next_turn_is_accepted_by_a_strict_provider(case: Case, way: str, cut: str) -> None:
    """With what the cut turn has recorded: nothing of it is made again, and its records stay as they are."""
    case.way, case.tools = way, 3
    if cut == "after the answer":
        first = {"at": f"{flow_of(case)}/{paths(case)['answer']}:completed:after"}
    else:
        first = {"kill_in": "notify:after" if cut == "during the first" else "look:before"}
    assert case.live(**first) == {"signal": signal.SIGKILL}
    recorded = f"SELECT path, state FROM ditto_steps WHERE run = (SELECT id FROM ditto_runs WHERE run_id = '{RUN}')"
    before = case.rows(recorded), case.effects
    assert case.result(way="next") == {"text": "done", "decided": []}
    assert (case.rows(recorded), case.effects) == before
    sent = [request for request in case.asked() if json.dumps(str(case.folder)) in str(request.body)]
    assert [request.refused for request in sent] == [None, None]
    told = [message["content"] for message in sent[1].body["messages"] if message["role"] == "tool"]
    unknown = '"status": "unknown"'
    assert [unknown in text for text in told] == [cut != "between the tools"] * 2 + [True]
    if cut == "between the tools":
        assert told[:2] == ["notify 0", "publish 0"]
