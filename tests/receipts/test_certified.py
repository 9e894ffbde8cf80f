"""What gets a receipt, and what the receipt says: attempts of effects and model calls, settlements, decisions."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ditto import (
    Config,
    EffectNotMade,
    EffectRejected,
    Graph,
    Loop,
    OutputError,
    Retry,
    RunCancelledError,
    RunNotFoundError,
    Runtime,
    SandboxDenied,
    StepContext,
    StepError,
    Tool,
    ToolError,
    TransitionRefusedError,
    UnknownOutcomeError,
    Worker,
    create_ditto,
)
from ditto.config import SandboxConfig
from ditto.effects import Absent, Committed, Pending, Rejected
from ditto.receipts import hash_arguments, load_trusted_keys, verify_receipts
from ditto.receipts.signing import public_path
from ditto.store.values import store_text
from ditto_workers import create_interaction_worker
from tests.engine.scene import Gate, opened
from tests.receipts.chains import fields, lines_of

SAID = ("step", "attempt", "kind", "tool", "outcome", "reason", "decision", "actor")


async def told(runtime: Runtime, run_id: str | None = None) -> list[tuple[Any, ...]]:
    """What the receipts say, after they were verified as one chain."""
    lines = await lines_of(runtime)
    found = verify_receipts(io.BytesIO(b"".join(lines)), load_trusted_keys([public_path(runtime.location.path)]))
    assert found.complete, found
    return [tuple(fields(line)[name] for name in SAID) for line in await lines_of(runtime, run_id)]


def raising(error: Exception) -> Callable[..., Any]:
    def handler(arguments: Any, ctx: StepContext) -> Any:
        raise error

    return handler


def one(handler: Callable[..., Any], *, effect: str = "write", **node: Any) -> tuple[Worker, Graph]:
    """A worker with one handler, and a Graph of it."""
    lookup = node.pop("lookup", None)
    final = node.pop("absence_is_final", False)
    worker = Worker("SHOP").node("SHOP.PAY", handler, effect=effect, lookup=lookup, absence_is_final=final)
    return worker, Graph("shop").node("pay", "SHOP.PAY", bind=lambda: {"amount": 40, "to": "ada"}, **node)


@pytest.mark.asyncio
async def test_a_receipt_says_what_was_done_by_whom_under_which_key(store_path: Path) -> None:
    large = "x" * 5_000
    worker, graph = one(lambda arguments, ctx: large)
    async with opened(store_path, workers=[worker]) as runtime:
        await runtime.run(graph, id="x")
        settled_at = (await runtime.get("x")).steps[0].settled_at
        [line] = await lines_of(runtime, "x")
        assert runtime._opened is not None
        store_id = runtime._opened.store.id
    receipt = fields(line)
    assert settled_at is not None
    assert {name: receipt[name] for name in receipt.keys() - {"id", "signature", "signer"}} == {
        "schema": "ditto.receipt.v1",
        "store": store_id,
        "number": 1,
        "previous": None,
        "run": "x",
        "generation": 1,
        "step": "pay",
        "attempt": 1,
        "key": "x/1/pay",
        "kind": "tool",
        "tool": "SHOP.PAY",
        "arguments_hash": hash_arguments({"to": "ada", "amount": 40}),
        "outcome": "allow",
        "outcome_hash": store_text(json.dumps(large)).hash,
        "decision": None,
        "reason": None,
        "actor": None,
        "at": round(settled_at.timestamp() * 1_000_000),
    }


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("error", "outcome", "reason"),
    [
        (EffectRejected("no", code="card.stolen"), "deny", "card.stolen"),
        (SandboxDenied("not listed"), "deny", "sandbox.denied"),
        (EffectNotMade("not sent"), "failed", "effect.not_made"),
        (EffectNotMade("cut", code="effect.cancelled"), "cancelled", "effect.cancelled"),
        (OutputError("unreadable"), "failed", "step.output"),
        (ToolError("out of stock", code="stock.none"), "failed", "stock.none"),
        (ConnectionError("the line went dead"), "unknown", "outcome.unknown"),
    ],
)
@pytest.mark.parametrize("effect", ["write", "infer"])
async def test_an_attempt_that_came_to_no_value(
    store_path: Path, error: Exception, outcome: str, reason: str, effect: str
) -> None:
    worker, graph = one(raising(error), effect=effect)
    async with opened(store_path, workers=[worker]) as runtime:
        with pytest.raises((StepError, UnknownOutcomeError)):
            await runtime.run(graph, id="x")
        kind = "tool" if effect == "write" else "model"
        assert await told(runtime) == [("pay", 1, kind, "SHOP.PAY", outcome, reason, None, None)]
        [line] = await lines_of(runtime)
        assert (fields(line)["outcome_hash"] is None) == (outcome == "unknown")


@pytest.mark.asyncio
@pytest.mark.parametrize("effect", ["idempotent", "read", "pure", "local"])
async def test_what_may_be_repeated_gets_none(store_path: Path, effect: str) -> None:
    async with opened(store_path) as runtime:
        await runtime.run(Graph("g").step("one", lambda: 1, effect=effect), id="x")
        with pytest.raises(StepError):
            await runtime.run(Graph("h").step("one", lambda: 1 / 0, effect=effect), id="y")
        assert await lines_of(runtime) == []


@pytest.mark.asyncio
async def test_nothing_was_attempted_nothing_is_certified(store_path: Path) -> None:
    worker, _ = one(lambda arguments, ctx: 1)
    graph = Graph("shop").node("pay", "SHOP.PAY", bind=lambda: {"rate": 1 / 0})
    async with opened(store_path, workers=[worker]) as runtime:
        with pytest.raises(StepError):
            await runtime.run(graph, id="x")
        assert await lines_of(runtime) == []


@pytest.mark.asyncio
async def test_every_attempt_has_its_own_receipt(store_path: Path) -> None:
    attempts: list[int] = []

    def flaky(arguments: Any, ctx: StepContext) -> str:
        attempts.append(ctx.attempt)
        if len(attempts) < 3:
            raise EffectNotMade("busy", code="shop.busy")
        return "paid"

    worker, graph = one(flaky, retry=Retry(max_attempts=3, initial_s=0.001))
    async with opened(store_path, workers=[worker]) as runtime:
        await runtime.run(graph, id="x")
        assert [(each[1], *each[4:6]) for each in await told(runtime)] == [
            (1, "failed", "shop.busy"),
            (2, "failed", "shop.busy"),
            (3, "allow", None),
        ]


@pytest.mark.asyncio
async def test_a_tool_is_called_by_its_name_and_its_failure_is_no_success(store_path: Path) -> None:
    def refuse(arguments: dict[str, Any]) -> str:
        raise EffectRejected("no", code="card.stolen")

    def pay(arguments: dict[str, Any]) -> str:
        return "paid"

    schema: dict[str, Any] = {"type": "object"}
    tools = [Tool("refuse", refuse, schema), Tool("pay", pay, schema), Tool("hidden", pay, schema)]
    config = Config(sandbox=SandboxConfig(tools=("refuse", "pay")))
    graph = Graph("tools")
    for name in ("refuse", "pay", "hidden"):
        request = {"tool": name, "arguments": {"z": 1, "a": [True]}}
        graph = graph.node(name, "INTERACTION.ACT.TOOL", bind=lambda request=request: request)
    async with create_ditto(config, store=store_path, workers=[create_interaction_worker(tools=tools)]) as runtime:
        with pytest.raises(StepError):
            await runtime.run(graph, id="x", concurrency=1)
        # A failure that became a value is not taken for a success.
        assert {step.path: step.state for step in (await runtime.get("x")).steps}["refuse"] == "completed"
        assert await told(runtime) == [
            ("refuse", 1, "tool", "refuse", "deny", "card.stolen", None, None),
            ("pay", 1, "tool", "pay", "allow", None, None, None),
            ("hidden", 1, "tool", "hidden", "deny", "sandbox.denied", None, None),
        ]
        for line in await lines_of(runtime):
            assert fields(line)["arguments_hash"] == hash_arguments({"a": [True], "z": 1})


# Settled later


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("answer", "settled"),
    [
        (Committed("found"), ("allow", None)),
        (Rejected("no", code="card.stolen"), ("deny", "card.stolen")),
    ],
)
async def test_a_look_up_settles_an_unknown_once(store_path: Path, answer: Any, settled: tuple[Any, ...]) -> None:
    answers: list[Any] = [Pending(), Pending(), answer]

    def find(key: str, arguments: Any, ctx: StepContext) -> Any:
        return answers.pop(0)

    worker, graph = one(raising(ConnectionError("dead")), lookup=find)
    async with opened(store_path, workers=[worker]) as runtime:
        for _ in range(2):
            with pytest.raises(UnknownOutcomeError):
                await runtime.run(graph, id="x")
        unknown = ("pay", 1, "tool", "SHOP.PAY", "unknown", "outcome.unknown", None, None)
        assert await told(runtime) == [unknown], "still unknown is nothing new"
        try:
            await runtime.run(graph, id="x")
        except StepError:
            assert settled[0] == "deny"
        assert await told(runtime) == [unknown, ("pay", 1, "tool", "SHOP.PAY", *settled, "lookup", None)]


@pytest.mark.asyncio
async def test_a_lost_attempt_that_left_no_trace_failed_and_the_next_one_has_its_own(store_path: Path) -> None:
    sent: list[int] = []

    def pay(arguments: Any, ctx: StepContext) -> str:
        sent.append(ctx.attempt)
        if ctx.attempt == 1:
            raise ConnectionError("dead")
        return "paid"

    worker, graph = one(pay, lookup=lambda key, arguments, ctx: Absent(), absence_is_final=True)
    async with opened(store_path, workers=[worker]) as runtime:
        await runtime.run(graph, id="x")
        assert await told(runtime) == [
            ("pay", 1, "tool", "SHOP.PAY", "failed", "effect.not_made", "lookup", None),
            ("pay", 2, "tool", "SHOP.PAY", "allow", None, None, None),
        ]


@pytest.mark.asyncio
async def test_a_model_that_is_asked_again_by_policy_leaves_the_first_call_unknown(store_path: Path) -> None:
    def ask(arguments: Any, ctx: StepContext) -> str:
        if ctx.attempt == 1:
            raise ConnectionError("dead")
        return "hello"

    worker, graph = one(ask, effect="infer")
    async with opened(store_path, workers=[worker], on_unknown_model_call="ask_again") as runtime:
        await runtime.run(graph, id="x")
        assert await told(runtime) == [
            ("pay", 1, "model", "SHOP.PAY", "unknown", "outcome.unknown", "ask_again", None),
            ("pay", 2, "model", "SHOP.PAY", "allow", None, None, None),
        ]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("choice", "outcome"),
    [({"committed": "r-17"}, "allow"), ({"absent": True}, "failed"), ({"abandon": True}, "unknown")],
)
async def test_a_persons_decision_on_an_unknown_is_signed(
    store_path: Path, choice: dict[str, Any], outcome: str
) -> None:
    worker, graph = one(raising(ConnectionError("dead")))
    async with opened(store_path, workers=[worker]) as runtime:
        with pytest.raises(UnknownOutcomeError):
            await runtime.run(graph, id="x")
        await runtime.resolve("x", "pay", actor="ada", reason="seen in the log", **choice)
        [decision] = choice
        assert (await told(runtime))[1:] == [
            ("pay", 1, "decision", "SHOP.PAY", outcome, "seen in the log", decision, "ada")
        ]
        _, line = await lines_of(runtime)
        assert fields(line)["key"] == "x/1/pay"
        assert fields(line)["arguments_hash"] == hash_arguments({"amount": 40, "to": "ada"})


@pytest.mark.asyncio
@pytest.mark.parametrize(("decision", "outcome"), [("approve", "allow"), ("reject", "deny")])
async def test_a_decision_on_an_approval_is_signed_with_what_was_shown(
    store_path: Path, decision: Any, outcome: str
) -> None:
    graph = Graph("g").approval("ship", show=lambda input: {"order": input["order"], "total": 40})
    async with opened(store_path) as runtime:
        await runtime.run(graph, {"order": "o-1"}, id="x", on_wait="return")
        await runtime.decide("x", decision=decision, actor="ada", reason="fine")
        assert await told(runtime, "x") == [("ship", 1, "decision", "ship", outcome, "fine", decision, "ada")]
        [line] = await lines_of(runtime)
        assert fields(line)["key"] is None
        assert fields(line)["arguments_hash"] == hash_arguments({"total": 40, "order": "o-1"})
        with pytest.raises(TransitionRefusedError, match="already decided"):
            await runtime.decide("x", "ship", decision="reject", actor="eve", reason="no")
        assert len(await lines_of(runtime)) == 1


@pytest.mark.asyncio
async def test_an_approval_that_expires_by_itself_was_decided_by_nobody(store_path: Path) -> None:
    graph = Graph("g").approval("ship", show=lambda: {}, expires_s=0)
    async with opened(store_path) as runtime:
        assert (await runtime.run(graph, id="x"))["ship"]["decision"] == "expired"
        assert await lines_of(runtime) == []


# Cancelled


@pytest.mark.asyncio
async def test_an_effect_made_although_its_run_was_cancelled_has_its_receipt(store_path: Path) -> None:
    gate = Gate()

    async def pay(arguments: Any, ctx: StepContext) -> str:
        await gate.pause()
        return "paid"

    worker, graph = one(pay)
    async with opened(store_path, workers=[worker]) as runtime:
        running = asyncio.ensure_future(runtime.run(graph, id="x"))
        await gate.came()
        await runtime.cancel("x", actor="ada", reason="changed her mind")
        gate.open()
        with pytest.raises(RunCancelledError):
            await running
        assert await told(runtime) == [("pay", 1, "tool", "SHOP.PAY", "allow", None, "late", None)]


@pytest.mark.asyncio
async def test_an_attempt_that_was_cut_before_anything_was_sent_is_cancelled(store_path: Path) -> None:
    begun = asyncio.Event()

    async def pay(arguments: Any, ctx: StepContext) -> str:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ctx.not_made("nothing was sent")
            raise
        return "paid"

    worker, graph = one(pay)
    async with opened(store_path, workers=[worker]) as runtime:
        running = asyncio.ensure_future(runtime.run(graph, id="x"))
        await begun.wait()
        running.cancel()
        await asyncio.wait([running])
        assert await told(runtime) == [("pay", 1, "tool", "SHOP.PAY", "cancelled", "effect.cancelled", None, None)]


# Which ones are read


@pytest.mark.asyncio
async def test_receipts_come_in_the_order_of_the_chain_from_any_number_and_of_one_run(store_path: Path) -> None:
    worker, _ = one(lambda arguments, ctx: arguments)
    loop = Loop(
        "many",
        graph=Graph("body").node("pay", "SHOP.PAY", bind=lambda input: {"n": input["n"]}),
        update=lambda state, outputs: {"n": state["n"] + 1},
        done=lambda state: state["n"] == 600,
        max_iterations=600,
    )
    _, graph = one(lambda arguments, ctx: 1)
    async with opened(store_path, workers=[worker]) as runtime:
        await runtime.loop(loop, {"n": 0}, id="many")
        await runtime.run(graph, id="one")
        await runtime.run(graph, id="one", on_finished="new")
        numbers = [fields(line)["number"] for line in await lines_of(runtime)]
        assert numbers == list(range(1, 603)), "more than a page"
        ones = [fields(line) for line in await lines_of(runtime, "one")]
        assert [(each["number"], each["generation"]) for each in ones] == [(601, 1), (602, 2)]
        assert [fields(line.encode())["number"] async for line in runtime.receipts("many", 590)] == [*range(591, 601)]
        with pytest.raises(RunNotFoundError):
            await lines_of(runtime, "nothing")


@pytest.mark.asyncio
async def test_no_secret_is_in_a_receipt_nor_hashed_into_it(store_path: Path) -> None:
    secret = "hunter2-hunter2"
    worker, graph = one(raising(ConnectionError("dead")))
    graph = Graph("shop").node("pay", "SHOP.PAY", bind=lambda: {"amount": secret})
    config = Config.model_validate({"endpoints": {"shop": {"base_url": "http://127.0.0.1/v1", "api_key": secret}}})
    async with create_ditto(config, store=store_path, workers=[worker]) as runtime:
        with pytest.raises(UnknownOutcomeError):
            await runtime.run(graph, id="x")
        await runtime.resolve("x", "pay", actor=f"ada {secret}", reason=f"it was {secret}", committed=secret)
        for line in await lines_of(runtime):
            assert secret.encode() not in line
            assert fields(line)["arguments_hash"] == hash_arguments({"amount": "[redacted]"})
        assert fields(line)["reason"] == "it was [redacted]"


@pytest.mark.asyncio
async def test_receipts_may_be_switched_off(store_path: Path) -> None:
    worker, graph = one(lambda arguments, ctx: 1)
    config = Config.model_validate({"store": {"receipts": False}})
    async with create_ditto(config, store=store_path, workers=[worker]) as runtime:
        await runtime.run(graph, id="x")
        assert await lines_of(runtime) == []
    assert not store_path.with_name("ditto.db.key").exists()
    async with create_ditto(store=store_path, workers=[worker]) as runtime:
        await runtime.run(graph, id="y")
        assert [each[0] for each in await told(runtime)] == ["pay"]
