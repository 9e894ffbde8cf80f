"""Runs that wait, pause and ask, in processes that are killed: one decision, each effect once, paused stays paused."""

from __future__ import annotations

import json
import re
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import httpx
import pytest

from tests import ledger
from tests.crash.conftest import Case
from tests.crash.order import RESULT
from tests.nursery import Nursery
from tests.processes import Child

StartChild: TypeAlias = Callable[..., Child]

# A flow that is killed at every point


def points(nursery: Nursery, folder: Path) -> list[str]:
    """Every point that an undisturbed run passes, `#2` for the second time, and so on."""
    record = folder / "points.txt"
    Case(nursery, folder / "recorded", "order").live(record=record)
    seen: Counter[str] = Counter()
    named = []
    for point in record.read_text(encoding="utf-8").splitlines():
        seen[point] += 1
        named.append(point if seen[point] == 1 else f"{point}#{seen[point]}")
    return named


def check(case: Case, kills: int, note: str) -> None:
    """The run ends as if nothing had happened; one decision for each question, one signal, each effect once."""
    assert case.result() == RESULT, note
    calls = case.world.calls()
    assert calls.pop(("send", "x/1/pay")) == 1, note
    assert set(calls) == {("put", "x/1/first"), ("put", "x/kid/1/last")}, note
    assert all(count <= 1 + kills for count in calls.values()), f"{note}: {calls}"
    told = case.rows("SELECT id >> 32, id & 0xffffffff, kind, step FROM ditto_events ORDER BY id")
    for run in {run for run, *_ in told}:
        numbers = [number for each, number, *_ in told if each == run]
        assert numbers == list(range(1, len(numbers) + 1)), note
    kinds = Counter((kind, step) for _, _, kind, step in told)
    for asked in ("pay/approval", "ok"):
        assert (kinds["step_waiting", asked], kinds["approval_decided", asked]) == (1, 1), note
    assert kinds["signal_received", "paid"] == 1, note
    assert 1 <= kinds["step_admitted", "pay"] <= 1 + kills, note
    assert {state for (state,) in case.rows("SELECT state FROM ditto_steps")} == {"completed"}, note
    runs = case.rows("SELECT run_id, generation, status, owner FROM ditto_runs ORDER BY id")
    assert runs == [("x", 1, "completed", None), ("x/kid", 1, "completed", None)], note


def test_undisturbed_everything_is_asked_and_done_once(nursery: Nursery, tmp_path: Path) -> None:
    case = Case(nursery, tmp_path / "case", "order")
    check(case, 0, "undisturbed")
    check(case, 0, "again")
    passed = set(points(nursery, tmp_path))
    for point in ("first:completed", "paid:waiting", "pay/approval:waiting", "pay/approval:completed", "pay:admitted"):
        assert {f"order/{point}:before", f"order/{point}:after"} <= passed
    assert {"order:signalled:after", "order:waiting:after", "order:claimed:after", "kid:waiting:before"} <= passed


def test_killed_around_its_waits_the_next_process_goes_on(nursery: Nursery, tmp_path: Path) -> None:
    for number, point in enumerate(points(nursery, tmp_path)[1::5]):
        case = Case(nursery, tmp_path / str(number), "order")
        assert case.live(at=point) == {"signal": signal.SIGKILL}, point
        check(case, 1, point)


@pytest.mark.sweep
def test_killed_at_every_point_and_again_the_next_process_goes_on(nursery: Nursery, tmp_path: Path) -> None:
    passed = points(nursery, tmp_path)
    cases: list[tuple[str, str | None]] = [(point, None) for point in passed]
    cases += [(first, second) for first in passed[::3] for second in passed[::4]]
    for number, (first, second) in enumerate(cases):
        case, kills = Case(nursery, tmp_path / str(number), "order"), 1
        assert case.live(at=first) == {"signal": signal.SIGKILL}, first
        if second is not None:
            answer = case.live(at=second)
            kills += answer == {"signal": signal.SIGKILL}
            assert kills == 2 or "result" in answer, answer
        check(case, kills, f"{first}, then {second}")


# Processes that are spoken to

PROGRAM = """
import asyncio, json, os, signal, sys
import httpx
from ditto import (
    Absent, Committed, DittoError, Flow, Graph, RunNotFoundError, Sandbox, Tool, create_ditto,
)
from ditto.testing import crash
from ditto_workers import create_interaction_worker

store, ledger, code = sys.argv[1:]

def say(*words):
    print(*words, flush=True)

async def hear():
    return (await asyncio.to_thread(sys.stdin.readline)).split()

async def post(key, body):
    async with httpx.AsyncClient() as client:
        return (await client.post(f"{ledger}/{key.replace('/', '%2F')}", json=body)).json()["receipt"]

async def reserve(input, ctx):
    return await post(ctx.key, input)

async def pay(arguments, ctx):
    if os.environ.get("KILL") == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    receipt = await post(ctx.key, arguments)
    if os.environ.get("KILL") == "after":
        os.kill(os.getpid(), signal.SIGKILL)
    return {"receipt": receipt}

async def find(key, arguments, ctx):
    async with httpx.AsyncClient() as client:
        answer = await client.get(f"{ledger}/{key.replace('/', '%2F')}")
    return Committed({"receipt": answer.json()["receipt"]}) if answer.status_code == 200 else Absent()

PAY = Tool(
    "pay", pay, {"type": "object"}, lookup=find, absence_is_final=True, requires_approval=True,
    description="pays" if code == "old" else "pays, at last",
)

async def order(ctx, input):
    reserved = await ctx.step("reserve", reserve, input)
    paid = await ctx.node("pay", "INTERACTION.ACT.TOOL", {"tool": "pay", "arguments": input})
    if code == "old":
        return "the old code did not get here"
    closed = await ctx.step("close", lambda input: f"closed {input}", paid["status"], effect="pure")
    return [reserved, paid["structured"], paid["error"], closed]

async def hold(input):
    say("inside")
    await hear()
    return input

held = Graph("held").step("step1", hold).step("step2", lambda step1, ctx: say("step2") or step1, after=("step1",))

FLOW = Flow("order", order)
WORKFLOWS = {"order": FLOW, "held": held}

async def has_begun_to_wait(runtime):
    try:
        return "step_waiting" in [event.kind async for event in runtime.events("o-17")]
    except RunNotFoundError:
        return False

async def main():
    runtime = create_ditto(
        store=store, workers=[create_interaction_worker(tools=[PAY])], sandbox=Sandbox(tools=("pay",)),
        workflows=WORKFLOWS.values(),
    )
    async with runtime:
        say("open")
        while words := await hear():
            verb, *rest = words
            try:
                if verb == "run":
                    result = await runtime.run(WORKFLOWS[rest[0]], {"order": "o-17", "amount": 5}, id="o-17")
                    say("result", json.dumps(result))
                elif verb == "start":
                    asyncio.ensure_future(runtime.run(WORKFLOWS[rest[0]], {"order": "o-17", "amount": 5}, id="o-17"))
                    while not await has_begun_to_wait(runtime):
                        await asyncio.sleep(0.005)
                    say("waits")
                elif verb == "resume":
                    say("result", json.dumps(await runtime.resume("o-17")))
                elif verb == "recover":
                    say("recovered", len(await runtime.recover()))
                elif verb == "crash":
                    crash.kill_at(rest[0])
                    say("armed")
                elif verb == "kill":
                    os.environ["KILL"] = rest[0]
                    say("armed")
                elif verb == "decide":
                    decision, many, actor = rest
                    async def decide(number):
                        try:
                            await runtime.decide("o-17", "pay", decision=decision, actor=f"{actor}-{number}")
                            return f"decided {decision} by {actor}-{number}"
                        except DittoError as error:
                            return error.message
                    say(json.dumps(await asyncio.gather(*(decide(number + 1) for number in range(int(many))))))
                elif verb == "pause":
                    await runtime.pause("o-17", actor="ada", reason="stock count")
                    say("paused")
                elif verb == "status":
                    say((await runtime.get("o-17")).status)
                elif verb == "events":
                    say(json.dumps([[each.kind, each.step] async for each in runtime.events("o-17")]))
            except DittoError as error:
                say(type(error).__name__, error.code)

asyncio.run(main())
"""

RUN_KEY, PAY_KEY = "o-17/1/reserve", "o-17/1/pay"


class World:
    """A store, a ledger, and processes that work on both."""

    def __init__(self, start_child: StartChild, folder: Path) -> None:
        self._start = start_child
        self._store = folder / "ditto.db"
        self._ledger = start_child(ledger.SOURCE, folder / "ledger.db")
        self._url = f"http://127.0.0.1:{self._ledger.line()}"

    def process(self, code: str = "new") -> Child:
        child = self._start(PROGRAM, self._store, self._url, code)
        assert child.line() == "open"
        return child

    def posts(self) -> dict[str, int]:
        """How often each key was posted."""
        return {key: count for key, (count, _) in httpx.get(f"{self._url}/").json().items()}


@pytest.fixture
def world(start_child: StartChild, tmp_path: Path) -> World:
    """What outlives the processes."""
    return World(start_child, tmp_path)


def ask(child: Child, line: str) -> str:
    """Tell it something, and read what it says; "" if it was killed by that."""
    child.tell(line)
    return child.line()


def told(child: Child) -> list[tuple[str, str | None]]:
    return [(kind, step) for kind, step in json.loads(ask(child, "events"))]


def test_a01_killed_while_it_waits_the_work_before_the_question_is_done_once(world: World) -> None:
    first = world.process()
    assert ask(first, "start order") == "waits"
    first.kill()
    assert world.posts() == {RUN_KEY: 1}
    second = world.process()
    assert ask(second, "status") == "interrupted"
    [decided] = json.loads(ask(second, "decide approve 1 ada"))
    assert decided == "decided approve by ada-1"
    assert ask(second, "run order") == 'result [1, {"receipt": 2}, null, "closed success"]'
    assert world.posts() == {RUN_KEY: 1, PAY_KEY: 1}
    kinds = Counter(kind for kind, _ in told(second))
    assert (kinds["step_waiting"], kinds["run_resumed"], kinds["step_admitted"]) == (1, 1, 1)


@pytest.mark.parametrize(
    "killed",
    [
        "crash order:claimed:after",
        "crash order/pay:admitted:after",
        "kill after",
        *(
            pytest.param(point, marks=pytest.mark.sweep)
            for point in (
                "crash order:claimed:before",
                "crash order/pay:admitted:before",
                "kill before",
                "crash order/pay:completed:before",
                "crash order/pay:completed:after",
            )
        ),
    ],
)
def test_the_story_of_an_approval_over_kills_changed_code_and_two_people(world: World, killed: str) -> None:
    """It waits, and is killed; other code; two people answer at once; it goes on, is killed again, and ends right."""
    waits = world.process("old")
    assert ask(waits, "start order") == "waits"
    waits.kill()

    people = [world.process(), world.process()]
    for person, name in zip(people, ("ada", "bo"), strict=True):
        person.tell(f"decide approve 1 {name}")
    answers = [answer for person in people for answer in json.loads(person.line())]
    [decided] = [answer for answer in answers if answer.startswith("decided")]
    [late] = [answer for answer in answers if not answer.startswith("decided")]
    assert late.endswith(f"already {decided.replace('decided', 'decided:')}")
    for person in people:
        person.kill()

    resumes = world.process()
    assert ask(resumes, killed) == "armed"
    assert ask(resumes, "resume") == ""
    assert resumes.end()[0] == -signal.SIGKILL
    assert world.posts().get(PAY_KEY, 0) == (0 if re.search("claimed|admitted|kill before", killed) else 1)

    ends = world.process()
    assert ask(ends, "resume") == 'result [1, {"receipt": 2}, null, "closed success"]'
    assert world.posts() == {RUN_KEY: 1, PAY_KEY: 1}
    kinds = Counter(told(ends))
    assert kinds["approval_decided", "pay/approval"] == 1
    assert kinds["step_waiting", "pay/approval"] == 1
    assert kinds["step_completed", "pay"] == 1
    assert ask(ends, "status") == "completed"


def test_b07_of_twenty_yeses_one_is_kept_and_the_call_is_made_once(world: World) -> None:
    waits = world.process()
    assert ask(waits, "start order") == "waits"
    waits.kill()
    decides = world.process()
    answers = json.loads(ask(decides, "decide approve 20 u"))
    [decided] = [answer for answer in answers if answer.startswith("decided")]
    actor = decided.split()[-1]
    assert len([answer for answer in answers if answer.endswith(f"already decided: approve by {actor}")]) == 19
    assert ask(decides, "resume") == 'result [1, {"receipt": 2}, null, "closed success"]'
    assert world.posts() == {RUN_KEY: 1, PAY_KEY: 1}
    assert Counter(told(decides))["approval_decided", "pay/approval"] == 1


def test_b07_a_yes_and_a_no_from_two_processes_come_to_one_decision(world: World) -> None:
    waits = world.process()
    assert ask(waits, "start order") == "waits"
    waits.kill()
    yes, no = world.process(), world.process()
    yes.tell("decide approve 5 yes")
    no.tell("decide reject 5 no")
    answers = json.loads(yes.line()) + json.loads(no.line())
    [decided] = [answer for answer in answers if answer.startswith("decided")]
    assert len([answer for answer in answers if answer.endswith(f"already {decided.replace('ided', 'ided:', 1)}")]) == 9
    result = json.loads(ask(yes, "resume").removeprefix("result "))
    if decided.startswith("decided approve"):
        assert result == [1, {"receipt": 2}, None, "closed success"]
        assert world.posts() == {RUN_KEY: 1, PAY_KEY: 1}
    else:
        assert (result[1], result[2]["code"]) == (None, "approval.rejected")
        assert world.posts() == {RUN_KEY: 1}


# Paused, and killed


@pytest.mark.parametrize("when", ["before it is drained", "crash held:paused:before", "crash held:paused:after"])
def test_e09_a_pause_outlives_its_owner(world: World, when: str) -> None:
    owner, other = world.process(), world.process()
    if when.startswith("crash"):
        assert ask(owner, when) == "armed"
    owner.tell("run held")
    assert owner.line() == "inside"
    assert ask(other, "pause") == "paused"
    assert ask(other, "status") == "pausing"
    if when == "before it is drained":
        owner.kill()
    else:
        assert ask(owner, "go") == ""
        assert owner.end()[0] == -signal.SIGKILL
    assert ask(other, "status") == "paused"
    assert ask(other, "recover") == "recovered 0"
    assert ask(other, "run held") == "RunPausedError run.paused"
    other.tell("resume")
    drained = when != "before it is drained"
    if not drained:
        assert other.line() == "inside"
        other.tell("go")
    assert other.line() == "step2"
    assert other.line().startswith("result")
    kinds = Counter(told(other))
    assert kinds["run_paused", None] == 1
    assert kinds["run_drained", None] == (when == "crash held:paused:after")
    assert kinds["step_completed", "step1"] == 1


@pytest.mark.parametrize("when", ["before", "after"])
def test_killed_while_it_writes_the_pause_the_run_is_paused_or_not(world: World, when: str) -> None:
    owner, other = world.process(), world.process()
    owner.tell("run held")
    assert owner.line() == "inside"
    assert ask(other, f"crash held:pausing:{when}") == "armed"
    assert ask(other, "pause") == ""
    assert other.end()[0] == -signal.SIGKILL
    owner.tell("go")
    if when == "after":
        assert owner.line() == "RunPausedError run.paused"
        assert ask(owner, "status") == "paused"
    else:
        assert owner.line() == "step2"
        assert owner.line().startswith("result")
