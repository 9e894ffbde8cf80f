"""Waits: a parked run is a row; signals, decisions and times end a wait exactly once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import anyio
import pytest

from ditto import (
    DefinitionError,
    Flow,
    FlowContext,
    Graph,
    Loop,
    RunNotFoundError,
    Runtime,
    StepError,
    TransitionRefusedError,
    Waiting,
    create_ditto,
)
from ditto.engine.drive import Drive
from ditto.store.records import RunEnd
from tests.engine.scene import Gate, MovedClock, told

pytestmark = pytest.mark.asyncio


class Ledger:
    """What was done in the world."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def reviewed(self, name: str) -> Graph:
        async def act(review: dict[str, Any]) -> str:
            self.done.append(name)
            return name

        return (
            Graph("reviewed")
            .approval("review", show=lambda input: {"pay": input["amount"]})
            .step("pay", act, after=("review",), when=lambda review: review["decision"] == "approve")
        )


async def waits_at(runtime: Runtime, run_id: str, step: str) -> None:
    """Return when the run waits at that step."""
    while step not in [wait.step for wait in (await runtime.get(run_id)).waits]:  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(0.001)


async def park(runtime: Runtime, graph: Graph, input: Any, run_id: str) -> Waiting:
    waiting = await runtime.run(graph, input, id=run_id, on_wait="return")
    assert isinstance(waiting, Waiting)
    return waiting


async def test_a01_the_work_before_a_question_is_done_once(tmp_path: Path) -> None:
    posted: list[int] = []

    async def post(input: dict[str, int]) -> int:
        posted.append(input["amount"])
        return len(posted)

    graph = (
        Graph("ask")
        .step("post", post)
        .approval("review", show=lambda post: post, after=("post",))
        .step("end", lambda post, review: [post, review["decision"]], after=("post", "review"))
    )
    async with create_ditto(store=tmp_path / "d.db") as runtime:
        waiting = await park(runtime, graph, {"amount": 5}, "o-17")
        assert (await runtime.get("o-17")).status == "waiting"
    async with create_ditto(store=tmp_path / "d.db") as runtime:
        await runtime.decide("o-17", "review", decision="approve", actor="ada", digest=waiting.waits[0].digest)
        assert (await runtime.run(graph, {"amount": 5}, id="o-17"))["end"] == [1, "approve"]
    assert posted == [5]


async def test_b01_two_questions_at_once_have_names_of_their_own_over_restarts(tmp_path: Path) -> None:
    drawn: list[str] = []

    def draw(shape: str) -> Callable[[], None]:
        return lambda: drawn.append(shape)

    def approved(answer: str) -> Callable[..., bool]:
        return (
            (lambda circle: circle["decision"] == "approve")
            if answer == "circle"
            else (lambda square: square["decision"] == "approve")
        )

    graph = Graph("draw")
    for shape in ("circle", "square"):
        graph = graph.approval(shape, show=lambda input: {"draw": input["size"]}).step(
            f"draw-{shape}", draw(shape), after=(shape,), when=approved(shape), effect="write"
        )

    async def look(decide: Literal["approve", "reject"] | None, step: str) -> dict[str, Any]:
        async with create_ditto(store=tmp_path / "d.db") as runtime:
            came_to = await runtime.run(graph, {"size": 3}, id="r", on_wait="return")
            waits = came_to.waits if isinstance(came_to, Waiting) else ()
            if decide is not None:
                await runtime.decide("r", step, decision=decide, actor="ada")
            return {wait.step: wait.digest for wait in waits}

    first = await look("reject", "square")
    assert sorted(first) == ["circle", "square"]
    assert first["circle"] != first["square"], "what is shown is the same, and where it is asked is not"
    assert await look("approve", "circle") == {"circle": first["circle"]}
    assert await look(None, "") == {}
    assert drawn == ["circle"]


async def test_b06_an_answer_is_not_lost_when_another_branch_ends(tmp_path: Path) -> None:
    """B asks three times; each answer and each next question come while A runs, and A ends in the middle of B."""
    gate = Gate()

    async def slow(input: Any) -> str:
        await gate.pause()
        return "a"

    questions = Loop(
        "questions",
        graph=Graph("round").approval("ask", show=lambda input: len(input)),
        update=lambda state, outputs: [*state, outputs["ask"]["reason"]],
        done=lambda state: len(state) == 3,
        max_iterations=3,
    )

    async def both(ctx: FlowContext, input: Any) -> Any:
        return await asyncio.gather(ctx.step("a", slow), ctx.loop("b", questions, []))

    async with create_ditto(store=tmp_path / "d.db") as runtime:
        running = asyncio.ensure_future(runtime.run(Flow("both", both), None, id="r"))
        await gate.came()
        for number in range(1, 4):
            step = f"b/{number}/ask"
            await waits_at(runtime, "r", step)
            if number == 2:
                gate.open()
                await told(runtime, "r", "step_completed")
                assert [wait.step for wait in (await runtime.get("r")).waits] == [step], "its second round is intact"
            await runtime.decide("r", step, decision="approve", actor="ada", reason=f"answer {number}")
        assert await running == ["a", ["answer 1", "answer 2", "answer 3"]]
        kinds = [event.kind async for event in runtime.events("r")]
        assert kinds.count("step_waiting") == kinds.count("approval_decided") == 3
    assert gate.count == 1


async def test_b02_b04_one_answer_ends_one_of_three_waits(tmp_path: Path) -> None:
    graph = Graph("three")
    for name in ("n1", "n2", "n3"):
        graph = graph.approval(name, show=lambda input: input)
    graph = graph.step(
        "join", lambda n1, n2, n3: [n1["decision"], n2["decision"], n3["decision"]], after=("n1", "n2", "n3")
    )
    async with create_ditto(store=tmp_path / "d.db") as runtime:
        await park(runtime, graph, 1, "r")
        with pytest.raises(DefinitionError, match="n1, n2, n3"):
            await runtime.decide("r", decision="approve", actor="ada")
        await runtime.decide("r", "n2", decision="reject", actor="ada")
        waiting = await park(runtime, graph, 1, "r")
        assert sorted(wait.step for wait in waiting.waits) == ["n1", "n3"]
        await runtime.decide("r", "n1", decision="approve", actor="ada")
        await runtime.decide("r", decision="approve", actor="bo")
        assert (await runtime.run(graph, 1, id="r"))["join"] == ["approve", "reject", "approve"]


async def test_b07_exactly_one_of_twenty_decisions_is_kept(tmp_path: Path) -> None:
    ledger = Ledger()
    graph = ledger.reviewed("pay")
    answers: list[str] = []
    async with create_ditto(store=tmp_path / "d.db") as one, create_ditto(store=tmp_path / "d.db") as two:
        await park(one, graph, {"amount": 5}, "r")

        async def decide(runtime: Runtime, number: int) -> None:
            try:
                await runtime.decide("r", "review", decision="approve" if number % 2 else "reject", actor=f"u-{number}")
            except TransitionRefusedError as refused:
                answers.append(refused.message)

        async with anyio.create_task_group() as deciders:
            for number in range(20):
                deciders.start_soon(decide, one if number < 10 else two, number)
        outputs = await one.run(graph, {"amount": 5}, id="r")
    decided = outputs["review"]
    assert len(answers) == 19
    assert all(f"already decided: {decided['decision']} by {decided['actor']}" in text for text in answers)
    assert ledger.done == (["pay"] if decided["decision"] == "approve" else [])


async def test_b09_a_signal_is_delivered_once_whenever_it_comes(tmp_path: Path) -> None:
    graph = Graph("paid").wait("first", signal="paid").wait("second", signal="paid", after=("first",))
    async with create_ditto(store=tmp_path / "d.db") as runtime:
        with pytest.raises(RunNotFoundError):
            await runtime.signal("r", "paid", 0)
        gate = Graph("gated").wait("gate").wait("paid", after=("gate",))
        await park(runtime, gate, None, "early")
        assert await runtime.signal("early", "paid", 1, id="s-1")
        assert not await runtime.signal("early", "paid", 1, id="s-1")
        await runtime.signal("early", "gate")
        assert (await runtime.run(gate, None, id="early"))["paid"]["body"] == 1
        with pytest.raises(TransitionRefusedError, match="completed"):
            await runtime.signal("early", "paid", 2)
        running = asyncio.ensure_future(runtime.run(graph, None, id="r"))
        await told(runtime, "r", "step_waiting")
        await runtime.signal("r", "paid", 1)
        await runtime.signal("r", "paid", 2)
        outputs = await running
        assert [outputs["first"]["body"], outputs["second"]["body"]] == [1, 2]


async def test_b13_a_decision_is_bound_to_what_was_shown(tmp_path: Path) -> None:
    ledger = Ledger()
    async with create_ditto(store=tmp_path / "d.db") as runtime:
        await park(runtime, ledger.reviewed("pay"), {"amount": 5}, "r")
        with pytest.raises(TransitionRefusedError, match="shows something else"):
            await runtime.decide("r", "review", decision="approve", actor="ada", digest="0" * 64)
        assert (await runtime.get("r")).status == "waiting"


async def test_s01_a_timer_goes_by_the_clock_of_the_record(tmp_path: Path) -> None:
    clock = MovedClock()
    graph = Graph("nap").sleep("nap", 7200).step("up", lambda: "up", after=("nap",))
    async with create_ditto(store=tmp_path / "d.db", clock=clock) as runtime:
        await park(runtime, graph, None, "r")
        clock.at -= 3600 * 1_000_000
        await park(runtime, graph, None, "r")
    clock.at += (3600 + 7199) * 1_000_000
    async with create_ditto(store=tmp_path / "d.db", clock=clock) as runtime:
        await park(runtime, graph, None, "r")
        clock.at += 1_000_000
        assert (await runtime.run(graph, None, id="r"))["up"] == "up"


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf"), True, "1"])
async def test_s02_what_is_no_duration_is_refused(seconds: Any) -> None:
    with pytest.raises(DefinitionError):
        Graph("nap").sleep("nap", seconds)


async def test_a_wait_that_is_over_without_a_signal_says_so(tmp_path: Path) -> None:
    clock = MovedClock()
    graph = Graph("late").wait("paid", timeout_s=10).approval("ok", show=lambda input: 1, expires_s=20)
    async with create_ditto(store=tmp_path / "d.db", clock=clock) as runtime:
        await park(runtime, graph, None, "r")
        clock.at += 20 * 1_000_000
        outputs = await runtime.run(graph, None, id="r")
    assert outputs["paid"]["timed_out"] is True
    assert outputs["ok"]["decision"] == "expired"


async def test_a_decision_for_a_run_that_failed_meanwhile_is_refused(tmp_path: Path) -> None:
    def fail() -> None:
        raise ValueError("no")

    graph = Graph("late").approval("ok", show=lambda input: 1).step("fail", fail)
    async with create_ditto(store=tmp_path / "d.db") as runtime:
        with pytest.raises(StepError):
            await runtime.run(graph, None, id="r")
        with pytest.raises(TransitionRefusedError, match="the run is failed"):
            await runtime.decide("r", "ok", decision="approve", actor="ada")


async def test_b07_who_comes_later_is_told_the_decision_whether_he_names_the_step_or_not(tmp_path: Path) -> None:
    graph = Graph("one").approval("ok", show=lambda input: 1)
    async with create_ditto(store=tmp_path / "d.db") as runtime:
        await park(runtime, graph, None, "r")
        await runtime.decide("r", decision="approve", actor="ada")
        for step in (None, "ok"):
            with pytest.raises(TransitionRefusedError, match="already decided: approve by ada"):
                await runtime.decide("r", step, decision="reject", actor="bob")


async def test_serve_takes_up_what_was_woken_and_ends_with_the_runtime(tmp_path: Path) -> None:
    ledger = Ledger()
    graph = ledger.reviewed("pay")
    async with create_ditto(store=tmp_path / "d.db") as runtime:
        await park(runtime, graph, {"amount": 5}, "r")
    async with (
        create_ditto(store=tmp_path / "d.db", workflows=[graph]) as runtime,
        create_ditto(store=tmp_path / "d.db") as outsider,
    ):
        serving = asyncio.ensure_future(runtime.serve())
        await outsider.decide("r", decision="approve", actor="ada")
        await told(outsider, "r", "run_completed")
        await runtime.close()
        await serving
    assert ledger.done == ["pay"]


async def test_b09_a_wait_that_ends_while_the_run_is_let_go_of_wakes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = Graph("paid").wait("paid")
    async with create_ditto(store=tmp_path / "d.db") as runtime:
        finish = Drive.finish

        async def late(drive: Drive, end: RunEnd) -> None:
            await runtime.signal("r", "paid", 1)
            await finish(drive, end)

        monkeypatch.setattr(Drive, "finish", late)
        await park(runtime, graph, None, "r")
        monkeypatch.undo()
        assert (await runtime.get("r")).status == "interrupted"
    async with create_ditto(store=tmp_path / "d.db", workflows=[graph]) as runtime:
        assert [run.status for run in await runtime.recover()] == ["completed"]


async def test_a_wait_of_a_cancelled_run_is_not_ended_any_more(tmp_path: Path) -> None:
    clock = MovedClock()
    graph = Graph("ask").approval("ok", show=lambda input: 1, expires_s=5)
    async with create_ditto(store=tmp_path / "d.db", clock=clock) as runtime:
        await park(runtime, graph, None, "r")
        await runtime.cancel("r")
        with pytest.raises(TransitionRefusedError):
            await runtime.decide("r", decision="approve", actor="ada")
        run = await runtime.get("r")
        step = run.step("ok")
        assert run.status == "cancelled"
        assert step is not None
        assert step.state == "waiting"
