"""Tools that need a person's yes: asked before anything is admitted, and called as they were shown, or not at all."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from sqlalchemy import Connection, text

from ditto import (
    Absent,
    Action,
    Approval,
    DefinitionError,
    EffectClass,
    EffectNotMade,
    EffectRejected,
    Flow,
    FlowContext,
    Graph,
    Loop,
    NodeHandler,
    OpenWait,
    Outcome,
    ReplayMismatchError,
    Retry,
    RunBlockedError,
    RunPausedError,
    Runtime,
    Sandbox,
    StepContext,
    StepError,
    Tool,
    TransitionRefusedError,
    UnknownOutcomeError,
    Waiting,
    Worker,
    create_ditto,
)
from ditto.turn import Turn, TurnContext
from ditto_workers import create_interaction_worker
from tests.engine.scene import MovedClock, events, states, status, story, told

pytestmark = pytest.mark.asyncio

ACT = "INTERACTION.ACT.TOOL"


class Payment(BaseModel):
    to: str
    amount: int
    currency: str = "EUR"


class Bank:
    """What is outside: every payment that was made, in order."""

    def __init__(self) -> None:
        self.paid: list[tuple[str, int]] = []

    async def pay(self, payment: Payment, ctx: StepContext) -> dict[str, Any]:
        self.paid.append((payment.to, payment.amount))
        return {"receipt": len(self.paid)}

    def tool(self, **changes: Any) -> Tool:
        return replace(Tool("pay", self.pay, Payment, requires_approval=True), **changes)


def runtime_with(path: Path, *tools: Tool, **options: Any) -> Runtime:
    """A runtime whose sandbox lists these tools."""
    sandbox = Sandbox(tools=tuple(tool.name for tool in tools))
    return create_ditto(store=path, workers=[create_interaction_worker(tools=tools)], sandbox=sandbox, **options)


def paying(tool: str = "pay", node: str = "pay", amount: int | None = None) -> Graph:
    """A Graph that pays what its input says."""

    def call(input: dict[str, Any]) -> dict[str, Any]:
        return {"tool": tool, "arguments": {**input, "amount": amount or input["amount"]}, "call_id": "c-1"}

    return Graph("paying").node(node, ACT, bind=call)


FIVE = {"to": "acct-1", "amount": 5}


async def park(runtime: Runtime, workflow: Any, input: Any, run_id: str = "r") -> tuple[OpenWait, ...]:
    waiting = await runtime.run(workflow, input, id=run_id, on_wait="return")
    assert isinstance(waiting, Waiting)
    return waiting.waits


def edit(path: Path, statement: str, *values: Any) -> None:
    """What somebody does to the store behind ditto's back."""
    with closing(sqlite3.connect(path)) as db:
        assert db.execute(statement, values).rowcount == 1
        db.commit()


async def test_a_tool_is_called_after_a_yes_to_what_was_shown_and_nothing_is_admitted_before(tmp_path: Path) -> None:
    bank = Bank()
    async with runtime_with(tmp_path / "d.db", bank.tool()) as runtime:
        [question] = await park(runtime, paying(), FIVE)
        assert (question.step, question.kind.value, question.name) == ("pay/approval", "WAIT.APPROVAL", "pay")
        assert question.shown == {
            "tool": "pay",
            "arguments": {"amount": 5, "currency": "EUR", "to": "acct-1"},
        }
        assert await states(runtime, "r") == {"pay/approval": "waiting"}
        assert await status(runtime, "r") == "waiting"
        assert bank.paid == []
    async with runtime_with(tmp_path / "d.db", bank.tool(), workflows=[paying()]) as runtime:
        await runtime.decide("r", decision="approve", actor="ada", reason="fine", digest=question.digest)
        outputs = await runtime.run(paying(), FIVE, id="r")
        assert outputs["pay"]["structured"] == {"receipt": 1}
        # What is saved is what the first caller got: the question is no node.
        assert await runtime.run(paying(), FIVE, id="r") == outputs
        assert list(outputs) == ["pay"]
        assert await story(runtime, "r") == [
            "run_created",
            "step_waiting pay/approval",
            "run_waiting",
            "approval_decided pay/approval",
            "run_resumed",
            "step_admitted pay",
            "step_completed pay",
            "run_completed",
        ]
        told_of = {event.kind: event.body for event in await events(runtime, "r")}
        assert told_of["approval_decided"] == {"decision": "approve", "actor": "ada", "digest": question.digest}
        assert told_of["step_admitted"] == {"attempt": 1, "key": "r/1/pay", "approval": "pay/approval"}
        assert bank.paid == [("acct-1", 5)]


@pytest.mark.parametrize("effect", ["pure", "read", "idempotent", "write", "local"])
@pytest.mark.parametrize("decision", ["approve", "reject"])
async def test_every_class_of_tool_can_ask(tmp_path: Path, effect: str, decision: Any) -> None:
    called: list[int] = []
    recorded: list[str] = []

    def act(arguments: dict[str, Any]) -> str:
        called.append(arguments["n"])
        return "done"

    def record(connection: Connection, outcome: Outcome) -> None:
        recorded.append(outcome.path)
        connection.execute(text("CREATE TABLE IF NOT EXISTS notes (path TEXT)"))

    tool = Tool("act", act, {"type": "object"}, effect=effect, requires_approval=True, record=record)
    graph = (
        Graph("g")
        .node("act", ACT, bind=lambda input: {"tool": "act", "arguments": {"n": 1}, "call_id": "c-7"})
        .step("after", lambda act: act["status"], after=("act",))
    )
    async with runtime_with(tmp_path / "d.db", tool, workflows=[graph]) as runtime:
        await park(runtime, graph, None)
        assert called == []
        await runtime.decide("r", "act", decision=decision, actor="ada", reason="too much")
        outputs = await runtime.run(graph, None, id="r")
        step = (await runtime.get("r")).step("act")
        assert step is not None
        assert (step.state, step.effect) == ("completed", effect)
        if decision == "approve":
            assert (called, recorded) == ([1], ["act"])
            assert outputs["after"] == "success"
            return
        assert (called, recorded) == ([], [])
        assert outputs["after"] == "failed"
        result = outputs["act"]
        assert (result["source"], result["call_id"], result["structured"]) == ("act", "c-7", None)
        assert result["error"] == {
            "code": "approval.rejected",
            "message": "tool act was not called: ada rejected it: too much",
            "retryable": False,
            "details": {},
        }
        assert "step_admitted" not in [event.kind for event in await events(runtime, "r")]


@pytest.mark.parametrize("served", [False, True])
async def test_without_a_decision_in_time_the_call_is_not_made(tmp_path: Path, served: bool) -> None:
    bank, clock = Bank(), MovedClock()
    tool = bank.tool(approval_expires_s=60)
    async with runtime_with(tmp_path / "d.db", tool, workflows=[paying()], clock=clock) as runtime:
        await park(runtime, paying(), FIVE)
        clock.at += 59 * 1_000_000
        await park(runtime, paying(), FIVE)
        clock.at += 1_000_000
        if served:
            serving = asyncio.ensure_future(runtime.serve())
            await told(runtime, "r", "run_completed")
            serving.cancel()
            await asyncio.wait([serving])
        outputs = await runtime.run(paying(), FIVE, id="r")
        assert outputs["pay"]["status"] == "failed"
        assert outputs["pay"]["error"]["code"] == "approval.expired"
        with pytest.raises(TransitionRefusedError, match="expired without a decision"):
            await runtime.decide("r", "pay/approval", decision="approve", actor="ada")
    assert bank.paid == []


async def test_whether_to_ask_may_depend_on_the_arguments(tmp_path: Path) -> None:
    bank = Bank()
    tool = bank.tool(requires_approval=lambda payment: payment.amount > 100)
    async with runtime_with(tmp_path / "d.db", tool) as runtime:
        assert (await runtime.run(paying(), FIVE, id="small"))["pay"]["status"] == "success"
        await park(runtime, paying(), {"to": "acct-1", "amount": 101}, "large")
        assert bank.paid == [("acct-1", 5)]
        for number, wrong in enumerate((lambda payment: 1, lambda payment: payment.nothing)):
            async with runtime_with(tmp_path / "d.db", bank.tool(requires_approval=wrong)) as careless:
                with pytest.raises(StepError):
                    await careless.run(paying(), FIVE, id=f"wrong-{number}")
    assert bank.paid == [("acct-1", 5)]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"requires_approval": "yes"}, "requires_approval must be a bool or a function"),
        ({"requires_approval": Bank().pay}, "requires_approval must be a plain function"),
        ({"approval_expires_s": -1}, "approval_expires_s"),
        ({"approval_expires_s": float("nan")}, "approval_expires_s"),
    ],
)
async def test_a_wrong_rule_is_refused_where_it_is_written(change: dict[str, Any], match: str) -> None:
    with pytest.raises(DefinitionError, match=match):
        Bank().tool(**change)


async def test_b01_two_questions_of_one_batch_have_ids_of_their_own_over_a_restart(tmp_path: Path) -> None:
    drawn: list[str] = []

    async def draw(arguments: dict[str, Any]) -> str:
        drawn.append(arguments["what"])
        return "drawn"

    tool = Tool("draw", draw, {"type": "object"}, requires_approval=True)

    def call(what: str) -> Callable[..., Any]:
        return lambda input: {"tool": "draw", "arguments": {"what": what}}

    graph = Graph("turn").node("circle", ACT, bind=call("circle")).node("square", ACT, bind=call("square"))
    async with runtime_with(tmp_path / "d.db", tool) as runtime:
        first = await park(runtime, graph, None)
        assert [question.step for question in first] == ["circle/approval", "square/approval"]
        assert len({question.digest for question in first}) == 2
        with pytest.raises(DefinitionError, match=r"2 approvals are open \(circle/approval, square/approval\)"):
            await runtime.decide("r", decision="approve", actor="ada")
        with pytest.raises(TransitionRefusedError, match="shows something else"):
            await runtime.decide("r", "square/approval", decision="approve", actor="ada", digest=first[0].digest)
        await runtime.decide("r", "square/approval", decision="reject", actor="ada", digest=first[1].digest)
    async with runtime_with(tmp_path / "d.db", tool) as runtime:
        second = await park(runtime, graph, None)
        assert second == first[:1]
        assert drawn == []
    async with runtime_with(tmp_path / "d.db", tool) as runtime:
        await runtime.decide("r", "circle/approval", decision="approve", actor="bo", digest=first[0].digest)
        outputs = await runtime.run(graph, None, id="r")
        assert [outputs["circle"]["status"], outputs["square"]["status"]] == ["success", "failed"]
    assert drawn == ["circle"]


@pytest.mark.parametrize("how", ["run", "resume", "serve"])
async def test_b11_an_approved_run_goes_on_however_it_is_taken_up(tmp_path: Path, how: str) -> None:
    bank = Bank()
    async with runtime_with(tmp_path / "d.db", bank.tool()) as runtime:
        await park(runtime, paying(), FIVE)
        await runtime.decide("r", decision="approve", actor="ada")
    async with runtime_with(tmp_path / "d.db", bank.tool(), workflows=[paying()]) as runtime:
        if how == "run":
            await runtime.run(paying(), FIVE, id="r")
        elif how == "resume":
            await runtime.resume("r")
        else:
            serving = asyncio.ensure_future(runtime.serve())
            await told(runtime, "r", "run_completed")
            serving.cancel()
            await asyncio.wait([serving])
        assert await status(runtime, "r") == "completed"
        assert [event.kind for event in await events(runtime, "r")].count("step_waiting") == 1
    assert bank.paid == [("acct-1", 5)]


# What is shown and what is called


def sampled(answer: int) -> Graph:
    """The amount comes from a step before, as a model's answer would."""
    return (
        Graph("sampled")
        .step("model", lambda input: {"amount": answer}, effect="pure")
        .node(
            "pay",
            ACT,
            after=("model",),
            bind=lambda input, model: {"tool": "pay", "arguments": {"to": input, "amount": model["amount"]}},
        )
    )


@pytest.mark.parametrize("answered", [False, True], ids=["while it is open", "after the yes"])
async def test_b13_other_arguments_than_the_approved_ones_are_asked_for_anew(tmp_path: Path, answered: bool) -> None:
    """The pending arguments change in the store, as they do when a model is asked again."""
    path, bank = tmp_path / "d.db", Bank()
    async with runtime_with(path, bank.tool()) as runtime:
        [old] = await park(runtime, sampled(5), "acct-1")
        if answered:
            await runtime.decide("r", decision="approve", actor="ada", digest=old.digest)
    edit(path, "UPDATE ditto_steps SET output = ? WHERE path = 'model'", '{"amount":500}')
    async with runtime_with(path, bank.tool()) as runtime:
        [new] = await park(runtime, sampled(5), "acct-1")
        assert bank.paid == []
        assert (new.step, new.shown["arguments"]["amount"]) == ("pay/approval", 500)
        assert new.digest != old.digest
        step = (await runtime.get("r")).step("pay/approval")
        assert step is not None
        assert (step.state, step.attempt) == ("waiting", 2)
        with pytest.raises(TransitionRefusedError, match="shows something else"):
            await runtime.decide("r", decision="approve", actor="ada", digest=old.digest)
        decided = [event.body for event in await events(runtime, "r") if event.kind == "approval_decided"]
        assert decided == ([{"decision": "approve", "actor": "ada", "digest": old.digest}] if answered else [])
        asked = [event.body for event in await events(runtime, "r") if event.kind == "step_waiting"]
        assert [(body["digest"], body.get("attempt")) for body in asked] == [(old.digest, None), (new.digest, 2)]
        await runtime.decide("r", decision="approve", actor="bo", digest=new.digest)
        await runtime.run(sampled(5), "acct-1", id="r")
    assert bank.paid == [("acct-1", 500)]


async def test_b13_a_question_that_was_edited_is_no_yes_to_the_call(tmp_path: Path) -> None:
    """Somebody makes the question look harmless, lets it be approved, and the call is another one."""
    path, bank = tmp_path / "d.db", Bank()
    async with runtime_with(path, bank.tool()) as runtime:
        await park(runtime, paying(amount=500), FIVE)
        harmless = '{"tool":"pay","arguments":{"amount":5,"currency":"EUR","to":"acct-1"}}'
        edit(path, "UPDATE ditto_steps SET arguments = ? WHERE path = 'pay/approval'", harmless)
        await runtime.decide("r", decision="approve", actor="ada")
        [again] = await park(runtime, paying(amount=500), FIVE)
        assert again.shown["arguments"]["amount"] == 500
    assert bank.paid == []


async def test_b13_changed_code_that_makes_another_call_of_it_asks_anew(tmp_path: Path) -> None:
    class Later(Payment):
        currency: str = "USD"

    bank = Bank()
    async with runtime_with(tmp_path / "d.db", bank.tool()) as runtime:
        await park(runtime, paying(), FIVE)
        await runtime.decide("r", decision="approve", actor="ada")
    async with runtime_with(tmp_path / "d.db", bank.tool(input_schema=Later)) as runtime:
        [again] = await park(runtime, paying(), FIVE)
        assert again.shown["arguments"]["currency"] == "USD"
        assert bank.paid == []


async def test_a_decision_and_a_new_question_at_once_leave_one_of_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old question is answered just before the new one is asked: the answer stays with the old one."""
    from ditto.engine.drive import Drive

    path, bank = tmp_path / "d.db", Bank()
    async with runtime_with(path, bank.tool()) as runtime:
        await park(runtime, sampled(5), "acct-1")
    edit(path, "UPDATE ditto_steps SET output = ? WHERE path = 'model'", '{"amount":500}')
    begin, decided = Drive.begin_wait, list[str]()
    async with runtime_with(path, bank.tool()) as runtime, runtime_with(path, bank.tool()) as other:

        async def late(drive: Drive, *given: Any, **named: Any) -> Any:
            if not decided:
                decided.append("approve")
                await other.decide("r", decision="approve", actor="ada")
            return await begin(drive, *given, **named)

        monkeypatch.setattr(Drive, "begin_wait", late)
        [new] = await park(runtime, sampled(5), "acct-1")
        assert (decided, new.shown["arguments"]["amount"]) == (["approve"], 500)
        assert bank.paid == []


async def test_what_changes_between_the_yes_and_the_attempt_is_not_attempted(tmp_path: Path) -> None:
    """Right before the admission the call is compared once more: here it changes after it was looked at."""
    seen: list[int] = []
    called: list[int] = []
    shown = [1, 1, 2]

    def plan(arguments: Any) -> Action:
        def show() -> int:
            seen.append(len(seen))
            return shown[min(len(seen) - 1, 2)]

        return Action("call", EffectClass.WRITE, lambda ctx: called.append(1), False, approval=Approval("call", show))

    worker = Worker("W").with_handler(NodeHandler("W.CALL", plan))
    graph = Graph("g").node("call", "W.CALL")
    async with create_ditto(store=tmp_path / "d.db", workers=[worker]) as runtime:
        await park(runtime, graph, None)
        await runtime.decide("r", decision="approve", actor="ada")
        [again] = await park(runtime, graph, None)
        assert (again.shown, called) == (2, [])
        await runtime.decide("r", decision="approve", actor="ada")
        assert await runtime.run(graph, None, id="r") == {"call": None}
    assert called == [1]


async def test_a_lost_call_whose_arguments_were_edited_is_not_sent_again(tmp_path: Path) -> None:
    path, sent = tmp_path / "d.db", list[int]()

    async def lose(payment: Payment) -> None:
        sent.append(payment.amount)
        raise ConnectionError("lost")

    def find(key: str, payment: Payment, ctx: StepContext) -> Absent:
        raise OSError("no route")

    tool = Tool("pay", lose, Payment, requires_approval=True, lookup=find, absence_is_final=True)
    found = replace(tool, lookup=lambda key, payment, ctx: Absent())
    async with runtime_with(path, tool) as runtime:
        await park(runtime, paying(), FIVE)
        await runtime.decide("r", decision="approve", actor="ada")
        with pytest.raises(UnknownOutcomeError):
            await runtime.run(paying(), FIVE, id="r")
    edited = '{"tool":"pay","arguments":{"to":"acct-1","amount":500,"currency":"EUR"}}'
    edit(path, "UPDATE ditto_steps SET arguments = ? WHERE path = 'pay'", edited)
    async with runtime_with(path, found) as runtime:
        with pytest.raises(UnknownOutcomeError, match="not the one that was approved"):
            await runtime.run(paying(), FIVE, id="r")
    assert sent == [5]


async def test_a_yes_holds_over_further_tries_of_the_same_call(tmp_path: Path) -> None:
    tries: list[int] = []

    async def flaky(payment: Payment, ctx: StepContext) -> str:
        tries.append(ctx.attempt)
        if len(tries) < 3:
            raise EffectNotMade("not yet")
        return "paid"

    tool = Tool("pay", flaky, Payment, requires_approval=True)
    graph = Graph("paying").node(
        "pay", ACT, bind=lambda input: {"tool": "pay", "arguments": input}, retry=Retry(3, initial_s=0)
    )
    async with runtime_with(tmp_path / "d.db", tool) as runtime:
        await park(runtime, graph, FIVE)
        await runtime.decide("r", decision="approve", actor="ada")
        assert (await runtime.run(graph, FIVE, id="r"))["pay"]["content"] == "paid"
    assert tries == [1, 2, 3]


async def test_an_action_of_any_worker_may_ask_and_a_no_is_an_error_where_it_makes_no_value(tmp_path: Path) -> None:
    called: list[Any] = []

    def plan(arguments: Any) -> Action:
        asked = Approval("refund", shown=lambda: {"refund": arguments}, expires_s=60)
        return Action("refund", EffectClass.WRITE, called.append, False, arguments=arguments, approval=asked)

    worker = Worker("SHOP").with_handler(NodeHandler("SHOP.REFUND", plan))
    graph = Graph("g").node("refund", "SHOP.REFUND")
    async with create_ditto(store=tmp_path / "d.db", workers=[worker]) as runtime:
        for run_id in ("yes", "no"):
            [question] = await park(runtime, graph, 7, run_id)
            assert question.shown == {"refund": 7}
        await runtime.decide("yes", decision="approve", actor="ada")
        assert await runtime.run(graph, 7, id="yes") == {"refund": None}
        await runtime.decide("no", decision="reject", actor="ada")
        for on_finished in ("return", "reopen"):
            with pytest.raises(EffectRejected, match="ada rejected it") as caught:
                await runtime.run(graph, 7, id="no", on_finished=on_finished)
            assert caught.value.code == "approval.rejected"
    assert len(called) == 1


async def test_what_cannot_be_shown_is_not_asked_and_a_no_without_a_value_is_an_error(tmp_path: Path) -> None:
    called: list[Any] = []
    shows = [1]

    def broken(error: EffectRejected) -> Any:
        raise RuntimeError("no value")

    def plan(arguments: Any) -> Action:
        asked = Approval("call", shown=lambda: shows[0], denied=broken)
        return Action("call", EffectClass.WRITE, called.append, False, approval=asked)

    worker = Worker("W").with_handler(NodeHandler("W.CALL", plan))
    graph = Graph("g").node("call", "W.CALL")
    async with create_ditto(store=tmp_path / "d.db", workers=[worker]) as runtime:
        await park(runtime, graph, None, "no")
        await runtime.decide("no", decision="reject", actor="ada")
        with pytest.raises(EffectRejected, match="ada rejected it"):
            await runtime.run(graph, None, id="no")
        shows.clear()
        with pytest.raises(StepError, match="what approval call/approval shows cannot be made: IndexError"):
            await runtime.run(graph, None, id="broken")
        assert await states(runtime, "broken") == {"call": "failed"}
    assert called == []


# Where the question stands


async def test_questions_in_loops_and_flows_have_the_path_of_their_step(tmp_path: Path) -> None:
    bank = Bank()
    graph = paying()
    loop = Loop(
        "rounds",
        graph=graph,
        update=lambda state, outputs: {**state, "amount": state["amount"] + 1},
        done=lambda state: state["amount"] > 7,
        max_iterations=5,
    )

    async def order(ctx: FlowContext, input: Any) -> Any:
        first = await ctx.node("pay", ACT, {"tool": "pay", "arguments": input})
        second = await ctx.run("inner", graph, {**input, "amount": 8})
        return [first["status"], second["pay"]["status"]]

    flow = Flow("order", order)
    async with runtime_with(tmp_path / "d.db", bank.tool(), workflows=[loop, flow]) as runtime:
        for number in (1, 2, 3):
            [question] = await park(runtime, loop, FIVE, "loop")
            assert question.step == f"{number}/pay/approval"
            await runtime.decide("loop", f"{number}/pay", decision="approve", actor="ada")
        assert await runtime.run(loop, FIVE, id="loop") == {"to": "acct-1", "amount": 8}
        [question] = await park(runtime, flow, FIVE, "flow")
        assert question.step == "pay/approval"
        await runtime.decide("flow", decision="approve", actor="ada")
        [question] = await park(runtime, flow, FIVE, "flow")
        assert question.step == "inner/pay/approval"
    async with runtime_with(tmp_path / "d.db", bank.tool(), workflows=[loop, flow]) as runtime:
        await runtime.decide("flow", decision="reject", actor="ada")
        assert await runtime.resume("flow") == ["success", "failed"]
    assert bank.paid == [("acct-1", amount) for amount in (5, 6, 7, 5)]


async def test_b01_the_tools_of_one_turn_of_an_agent_ask_each_for_itself(tmp_path: Path) -> None:
    drawn: list[str] = []

    async def draw(arguments: dict[str, Any]) -> str:
        drawn.append(arguments["what"])
        return "drawn"

    tool = Tool("draw", draw, {"type": "object"}, requires_approval=True)

    async def function(ctx: TurnContext) -> list[str]:
        calls = [ctx.call("draw", f"c-{what}", {"what": what}) for what in ("circle", "square")]
        return [result.status for result in await asyncio.gather(*calls)]

    turn, path = Turn("app", "thread", "turn", "model", max_concurrency=2), tmp_path / "d.db"
    for decision, call_id in (("reject", "c-square"), ("approve", "c-circle")):
        async with runtime_with(path, tool) as runtime, runtime_with(path) as other:
            driving = asyncio.ensure_future(runtime.turn(turn, function))
            await told(other, turn.run_id, "step_waiting")
            asked = f"t/{call_id}/approval"
            while asked not in [wait.step for wait in (await other.get(turn.run_id)).waits]:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            if decision == "reject":
                driving.cancel()
                await asyncio.wait([driving])
            await other.decide(turn.run_id, f"t/{call_id}", decision=decision, actor="ada")  # type: ignore[arg-type]
            if decision == "approve":
                assert await driving == ["success", "failed"]
            assert await other.runs(status="blocked") == []
    assert drawn == ["circle"]


async def test_a_call_that_waits_with_its_run_is_woken_by_the_decision(tmp_path: Path) -> None:
    bank = Bank()

    async def order(ctx: FlowContext, input: Any) -> Any:
        return await ctx.node("pay", ACT, {"tool": "pay", "arguments": input})

    path = tmp_path / "d.db"
    async with runtime_with(path, bank.tool()) as runtime, runtime_with(path, bank.tool()) as other:
        for run_id, workflow in (("graph", paying()), ("flow", Flow("order", order))):
            driving = asyncio.ensure_future(runtime.run(workflow, FIVE, id=run_id))
            await told(other, run_id, "step_waiting")
            await other.decide(run_id, decision="approve", actor="ada")
            await driving
    assert len(bank.paid) == 2


async def test_a_paused_run_keeps_the_answer_and_calls_when_it_is_resumed(tmp_path: Path) -> None:
    bank = Bank()
    async with runtime_with(tmp_path / "d.db", bank.tool(), workflows=[paying()]) as runtime:
        driving = asyncio.ensure_future(runtime.run(paying(), FIVE, id="r"))
        await told(runtime, "r", "step_waiting")
        await runtime.pause("r")
        with pytest.raises(RunPausedError):
            await driving
        await runtime.decide("r", decision="approve", actor="ada")
        assert await runtime.recover() == ()
        assert bank.paid == []
        assert (await runtime.resume("r"))["pay"]["status"] == "success"
    assert bank.paid == [("acct-1", 5)]


# Changed code


async def blocked(runtime: Runtime, graph: Any, input: Any, difference: str) -> None:
    """The run is blocked for this reason, however often it is tried, and its question is still listed."""
    for _ in range(2):
        with pytest.raises(RunBlockedError) as caught:
            await runtime.run(graph, input, id="r", on_wait="return")
        assert difference in caught.value.message
        assert difference in caught.value.differences[0]
    assert await status(runtime, "r") == "blocked"


@pytest.mark.parametrize("answered", [False, True])
async def test_b12_a_question_whose_code_was_renamed_goes_to_nothing_else(tmp_path: Path, answered: bool) -> None:
    bank, path = Bank(), tmp_path / "d.db"
    transfer = bank.tool(name="transfer")
    async with runtime_with(path, bank.tool()) as runtime:
        await park(runtime, paying(node="review"), FIVE)
        if answered:
            await runtime.decide("r", decision="approve", actor="ada")
    broken = Graph("paying").node("review", ACT, bind=lambda input: input["nothing"])
    word = "completed" if answered else "waiting"
    missing = f"recorded as {word}, owner missing: review/pay"
    for tools, graph, why in [
        ((transfer,), paying("transfer", node="check"), "the graph has no node check"),
        ((transfer,), paying("transfer", node="review"), "tool transfer is what step review would ask for now"),
        ((transfer,), paying("pay", node="review"), "step review asks for no approval now"),
        ((bank.tool(),), broken, "its call cannot be made: 'nothing'"),
        ((bank.tool(), transfer), paying("transfer", node="review"), "tool transfer is what step review would ask"),
    ]:
        async with runtime_with(path, *tools) as runtime:
            why = why.replace("no node check", "no node review")
            await blocked(runtime, graph, FIVE, f"{missing}; {why}")
            assert [wait.name for wait in (await runtime.get("r")).waits] == ([] if answered else ["pay"])
            assert [run.status for run in await runtime.runs()] == ["blocked"]
            with pytest.raises(DefinitionError):
                await runtime.decide("r", "check/approval", decision="approve", actor="ada")
    assert bank.paid == []
    async with runtime_with(path, bank.tool()) as runtime:
        if not answered:
            await runtime.decide("r", "review", decision="approve", actor="ada")
        assert (await runtime.run(paying(node="review"), FIVE, id="r"))["review"]["status"] == "success"
    assert bank.paid == [("acct-1", 5)]


async def test_b12_code_that_asks_for_nothing_any_more_leaves_no_question_behind(tmp_path: Path) -> None:
    bank, path = Bank(), tmp_path / "d.db"
    free = bank.tool(requires_approval=False)
    never = Graph("paying").node("pay", ACT, when=lambda input: False, bind=lambda input: {"tool": "pay"})
    async with runtime_with(path, bank.tool()) as runtime:
        await park(runtime, paying(), FIVE)
    for tool, graph in ((free, paying()), (bank.tool(), never)):
        async with runtime_with(path, tool) as runtime:
            await blocked(runtime, graph, FIVE, "owner missing: pay/pay; step pay asks for no approval now")
    async with runtime_with(path, bank.tool()) as runtime:
        await runtime.decide("r", decision="reject", actor="ada")
    # A no is not forgotten because nobody would be asked by now.
    async with runtime_with(path, free) as runtime:
        await blocked(runtime, paying(), FIVE, "owner missing: pay/pay; step pay asks for no approval now")
    async with runtime_with(path, bank.tool()) as runtime:
        assert (await runtime.run(paying(), FIVE, id="r"))["pay"]["error"]["code"] == "approval.rejected"
    assert bank.paid == []


async def test_b12_a_question_that_was_answered_with_no_lets_the_new_code_ask_its_own(tmp_path: Path) -> None:
    bank, path = Bank(), tmp_path / "d.db"
    transfer = bank.tool(name="transfer")
    async with runtime_with(path, bank.tool()) as runtime:
        await park(runtime, paying(), FIVE)
        await runtime.decide("r", decision="reject", actor="ada")
    async with runtime_with(path, transfer) as runtime:
        [own] = await park(runtime, paying("transfer"), FIVE)
        assert (own.step, own.name) == ("pay/approval", "transfer")
        await runtime.decide("r", decision="approve", actor="bo")
        assert (await runtime.run(paying("transfer"), FIVE, id="r"))["pay"]["status"] == "success"
    assert bank.paid == [("acct-1", 5)]


async def test_b12_a_flow_that_renamed_its_call_is_not_done_with_the_old_question(tmp_path: Path) -> None:
    bank, path = Bank(), tmp_path / "d.db"

    def order(name: str, tool: str = "pay") -> Flow:
        async def function(ctx: FlowContext, input: Any) -> Any:
            return await ctx.node(name, ACT, {"tool": tool, "arguments": input})

        return Flow("order", function)

    transfer = bank.tool(name="transfer")
    async with runtime_with(path, bank.tool(), transfer) as runtime:
        await park(runtime, order("review"), FIVE)
        await runtime.decide("r", "review", decision="approve", actor="ada")
        with pytest.raises(RunBlockedError, match="owner missing: review/pay"):
            await runtime.run(order("review", "transfer"), FIVE, id="r", on_wait="return")
        # The renamed call asks nothing of its own while the old one has not been asked for.
        with pytest.raises(ReplayMismatchError, match="'check' is new, and comes before what is recorded: review"):
            await runtime.run(order("check"), FIVE, id="r")
        assert await status(runtime, "r") == "blocked"
        assert {step.path for step in (await runtime.get("r")).steps} == {"review/approval"}
    assert bank.paid == []


async def test_f07_a_run_that_waits_at_a_node_that_is_gone_is_blocked_and_its_answer_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "d.db"
    old = (
        Graph("g")
        .step("draft", lambda input: input)
        .approval("review", show=lambda draft: draft, after=("draft",))
        .step("send", lambda review: review["actor"], after=("review",))
    )
    new = Graph("g").step("draft", lambda input: input).step("send", lambda draft: "sent", after=("draft",))
    async with create_ditto(store=path) as runtime:
        await park(runtime, old, "text")
    async with create_ditto(store=path, workflows=[new]) as runtime:
        await blocked(runtime, new, "text", "step review is recorded as waiting, and the graph has no node review")
        [question] = (await runtime.get("r")).waits
        await runtime.decide("r", decision="approve", actor="ada", digest=question.digest)
        assert await runtime.recover() == ()
        await blocked(runtime, new, "text", "step review is recorded as completed, and the graph has no node review")
        assert await states(runtime, "r") == {"draft": "completed", "review": "completed"}
    async with create_ditto(store=path) as runtime:
        assert (await runtime.run(old, "text", id="r"))["send"] == "ada"
