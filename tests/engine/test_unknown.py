"""Unknown outcomes: when there is one, what a look-up settles, what it blocks, and what a person may decide."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ditto import (
    Absent,
    Committed,
    DefinitionError,
    EffectNotMade,
    EffectRejected,
    Graph,
    InvalidValueError,
    LookupResult,
    Many,
    OutputError,
    Pending,
    Rejected,
    Retry,
    RunBusyError,
    Runtime,
    Sample,
    StepContext,
    StepError,
    UnknownOutcomeError,
    Worker,
)
from ditto.clock import Clock
from tests.engine.scene import Gate, World, events, on_disk, opened, states, status, wait_until

pytestmark = pytest.mark.asyncio


class Bank(World):
    """A service whose answers get lost, and which can be asked afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.lose = 1
        """How many answers get lost, first ones first."""
        self.answer: Callable[[], Any] = Absent
        self.absence_is_final = False
        self.absence_grace_s = 0.0

    def pay(self, arguments: Any, ctx: StepContext) -> Any:
        if self.lose:
            self.lose -= 1
            raise ConnectionError("the line is dead")
        return self.act(ctx)

    def find(self, key: str, arguments: Any, ctx: StepContext) -> LookupResult:
        self.asked.append(key)
        assert key == ctx.key
        answer: LookupResult = self.answer()
        return answer

    async def find_async(self, key: str, arguments: Any, ctx: StepContext) -> LookupResult:
        return self.find(key, arguments, ctx)

    def worker(self, *, lookup: bool = True, is_async: bool = False) -> Worker:
        return Worker("BANK").node(
            "BANK.PAY",
            self.pay,
            effect="write",
            lookup=(self.find_async if is_async else self.find) if lookup else None,
            absence_is_final=self.absence_is_final,
            absence_grace_s=self.absence_grace_s,
        )


@pytest.fixture
def bank() -> Bank:
    return Bank()


def pay(retry: Retry | None = None) -> Graph:
    return Graph("g").node("pay", "BANK.PAY", retry=retry)


AGAIN = Retry(3, initial_s=0)


def raiser(error: BaseException) -> Callable[[], Any]:
    def answer() -> Any:
        raise error

    return answer


# What is not unknown


@pytest.mark.parametrize(("retry", "tries"), [(None, 1), (AGAIN, 3)], ids=["no retry", "retry"])
async def test_what_was_not_made_is_tried_again_by_policy_and_then_fails(
    store_path: Path, retry: Retry | None, tries: int
) -> None:
    attempts: list[int] = []

    async def refuse(ctx: StepContext) -> None:
        attempts.append(ctx.attempt)
        raise EffectNotMade("no connection")

    async with opened(store_path) as runtime:
        with pytest.raises(EffectNotMade, match="no connection"):
            await runtime.run(Graph("g").step("a", refuse, effect="write", retry=retry), id="x")
        assert await states(runtime, "x") == {"a": "refused"}
        assert await status(runtime, "x") == "failed"
    assert attempts == list(range(1, tries + 1))


async def test_what_was_rejected_fails_for_good(store_path: Path, bank: Bank) -> None:
    def reject() -> None:
        raise EffectRejected("card blocked")

    async with opened(store_path) as runtime:
        with pytest.raises(EffectRejected):
            await runtime.run(Graph("g").step("a", reject, effect="write", retry=AGAIN), id="x")
        assert await states(runtime, "x") == {"a": "failed"}


# Without a look-up


async def test_any_other_error_is_unknown_and_nothing_is_sent_again(store_path: Path, bank: Bank) -> None:
    async with opened(store_path, workers=[bank.worker(lookup=False)]) as runtime:
        with pytest.raises(UnknownOutcomeError) as caught:
            await runtime.run(pay(AGAIN), id="x")
        assert caught.value.steps == ("pay",)
        assert "ConnectionError: the line is dead" in caught.value.message
        assert "runtime.resolve('x', 'pay', …)" in caught.value.message
        for _ in range(2):
            with pytest.raises(UnknownOutcomeError, match="the line is dead"):
                await runtime.run(pay(AGAIN), id="x")
        assert await states(runtime, "x") == {"pay": "unknown"}
        assert await status(runtime, "x") == "unknown"
    assert bank.total == 0


# Look-ups. Each answer, when the outcome is lost in this process, and when a later process asks.


@pytest.mark.parametrize("is_async", [False, True], ids=["def", "async def"])
@pytest.mark.parametrize("later", [False, True], ids=["at once", "on resume"])
@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (Pending, "the look-up says it is pending"),
        (Absent, "the look-up found nothing, which does not prove that nothing was done"),
        (lambda: Many(("p1", "p2")), "the look-up found more than one: p1, p2"),
        (raiser(OSError("no route")), "the look-up failed: OSError: no route"),
        (raiser(asyncio.CancelledError()), "the look-up failed: "),
        (lambda: None, "the look-up answered NoneType, which is no LookupResult"),
        (lambda: {"state": "done"}, "the look-up answered dict, which is no LookupResult"),
    ],
    ids=["pending", "absent", "many", "raises", "stray cancellation", "nothing", "garbage"],
)
async def test_what_a_look_up_does_not_settle_stays_unknown(
    store_path: Path, bank: Bank, answer: Callable[[], Any], says: str, later: bool, is_async: bool
) -> None:
    bank.answer = Pending if later else answer
    async with opened(store_path, workers=[bank.worker(is_async=is_async)]) as runtime:
        with pytest.raises(UnknownOutcomeError) as caught:
            await runtime.run(pay(AGAIN), id="x")
    bank.answer = answer
    async with opened(store_path, workers=[bank.worker(is_async=is_async)]) as runtime:
        if later:
            with pytest.raises(UnknownOutcomeError) as caught:
                await runtime.run(pay(AGAIN), id="x")
        assert says in caught.value.message
        assert await states(runtime, "x") == {"pay": "unknown"}
    # Once when the outcome was lost, once on every resume.
    assert bank.asked == ["x/1/pay"] * (2 if later else 1)
    assert bank.total == 0


@pytest.mark.parametrize("later", [False, True], ids=["at once", "on resume"])
@pytest.mark.parametrize("is_async", [False, True], ids=["def", "async def"])
async def test_what_was_committed_is_adopted(store_path: Path, bank: Bank, later: bool, is_async: bool) -> None:
    bank.answer = Pending if later else lambda: Committed({"receipt": 7})
    async with opened(store_path, workers=[bank.worker(is_async=is_async)]) as runtime:
        if later:
            with pytest.raises(UnknownOutcomeError):
                await runtime.run(pay(), id="x")
            bank.answer = lambda: Committed({"receipt": 7})
        assert await runtime.run(pay(), id="x") == {"pay": {"receipt": 7}}
        assert await status(runtime, "x") == "completed"
    assert bank.total == 0


async def test_what_was_committed_and_cannot_be_used_fails_for_good(store_path: Path, bank: Bank) -> None:
    bank.answer = lambda: Committed(object())
    async with opened(store_path, workers=[bank.worker()]) as runtime:
        for on_finished in ("return", "reopen"):
            with pytest.raises(OutputError):
                await runtime.run(pay(), id="x", on_finished=on_finished)
    assert bank.total == 0


async def test_what_was_rejected_there_is_rejected_here(store_path: Path, bank: Bank) -> None:
    bank.answer = lambda: Rejected("no cover", code="card.cover")
    async with opened(store_path, workers=[bank.worker()]) as runtime:
        for on_finished in ("return", "reopen"):
            with pytest.raises(EffectRejected, match="no cover") as caught:
                await runtime.run(pay(AGAIN), id="x", on_finished=on_finished)
            assert caught.value.code == "card.cover"
        assert await states(runtime, "x") == {"pay": "failed"}
    assert bank.asked == ["x/1/pay"]


@pytest.mark.parametrize("later", [False, True], ids=["at once", "on resume"])
async def test_a_final_absence_is_sent_again_once_under_the_same_key(store_path: Path, bank: Bank, later: bool) -> None:
    bank.absence_is_final = True
    bank.answer = Pending if later else Absent
    async with opened(store_path, workers=[bank.worker()]) as runtime:
        if later:
            with pytest.raises(UnknownOutcomeError):
                await runtime.run(pay(), id="x")
            bank.answer = Absent
        assert await runtime.run(pay(), id="x") == {"pay": "done x/1/pay"}
        step = (await runtime.get("x")).step("pay")
        assert step is not None
        assert (step.attempt, step.key) == (2, "x/1/pay")
    assert bank.effects == {"x/1/pay": 1}


async def test_a_service_that_swallows_requests_is_not_asked_for_ever(store_path: Path, bank: Bank) -> None:
    bank.absence_is_final, bank.lose = True, 100
    async with opened(store_path, workers=[bank.worker()]) as runtime:
        with pytest.raises(EffectNotMade, match="the look-up found no trace of it"):
            await runtime.run(pay(), id="x")
        assert await states(runtime, "x") == {"pay": "refused"}
        assert await status(runtime, "x") == "failed"
    assert bank.lose == 98


class Hands(Clock):
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.at_us = 1_700_000_000_000_000

    def now_us(self) -> int:
        return self.at_us


async def test_q05_an_absence_counts_after_its_grace_only(store_path: Path, bank: Bank) -> None:
    clock = Hands()
    bank.absence_is_final, bank.absence_grace_s = True, 1_000.0
    asked = asyncio.Event()

    def absent() -> LookupResult:
        asked.set()
        return Absent()

    bank.answer = absent
    async with opened(store_path, workers=[bank.worker(is_async=True)], clock=clock) as runtime:
        first = asyncio.create_task(runtime.run(pay(), id="x"))
        await asked.wait()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert await states(runtime, "x") == {"pay": "unknown"}
        clock.at_us += 1_000_000_000
        assert await runtime.run(pay(), id="x") == {"pay": "done x/1/pay"}
    assert bank.effects == {"x/1/pay": 1}


async def test_q05_nothing_then_something_is_adopted_after_the_wait(store_path: Path, bank: Bank) -> None:
    clock = Hands()
    answers: list[LookupResult] = [Absent(), Committed("found")]
    bank.absence_is_final, bank.absence_grace_s = True, 0.01

    def answer() -> LookupResult:
        clock.at_us += 5_000
        return answers.pop(0)

    bank.answer = answer
    async with opened(store_path, workers=[bank.worker()], clock=clock) as runtime:
        assert await runtime.run(pay(), id="x") == {"pay": "found"}
    assert bank.total == 0


async def test_a_look_up_has_the_deadline_of_an_attempt(store_path: Path) -> None:
    async def lose() -> None:
        raise ConnectionError("dead")

    async def never(key: str, arguments: Any, ctx: StepContext) -> LookupResult:
        await asyncio.Event().wait()
        return Pending()

    graph = Graph("g").step("a", lose, effect="write", lookup=never, timeout_s=0.01)
    async with opened(store_path) as runtime:
        with pytest.raises(UnknownOutcomeError, match=r"dead; the look-up missed the deadline of 0\.01 s"):
            await runtime.run(graph, id="x")


async def test_a_lost_step_is_looked_up_with_the_key_and_arguments_that_it_was_admitted_with(
    store_path: Path,
) -> None:
    lost, seen = True, list[Any]()

    def act(input: Any, ctx: StepContext) -> str:
        if lost:
            raise ConnectionError("dead")
        seen.append(("sent", ctx.key, input))
        return "sent"

    def find(key: str, arguments: Any, ctx: StepContext) -> LookupResult:
        seen.append(("asked", key, arguments))
        return Absent()

    def graph(prefix: str) -> Graph:
        def key(arguments: Any) -> str:
            return f"{prefix}-{arguments['input']}"

        return Graph("g").step("a", act, effect="write", lookup=find, key=key)

    worker = Worker("W").node(
        "W.ACT", act, effect="write", lookup=find, absence_is_final=True, key=lambda arguments: f"k-{arguments['n']}"
    )
    moved = Worker("W").node(
        "W.ACT", act, effect="read", lookup=find, absence_is_final=True, key=lambda arguments: f"other-{arguments['n']}"
    )
    async with opened(store_path) as runtime:
        with pytest.raises(UnknownOutcomeError):
            await runtime.run(graph("k"), 1, id="step")
        seen.clear()
        with pytest.raises(UnknownOutcomeError):
            await runtime.run(graph("other"), 1, id="step")
        assert seen == [("asked", "k-1", {"input": 1})]
    seen.clear()
    bound = Graph("g").node("a", "W.ACT", bind=lambda input: {"n": input})
    changed = Graph("g").node("a", "W.ACT", bind=lambda input: {"n": input + 100})
    lost = False
    async with opened(store_path, workers=[worker]) as runtime:
        lost = True
        with pytest.raises((UnknownOutcomeError, EffectNotMade)):
            await runtime.run(bound, 1, id="node", concurrency=1)
        await runtime.run(Graph("nothing"))
    assert [entry[:2] for entry in seen if entry[0] == "asked"] == [("asked", "k-1")] * 2
    async with opened(store_path, workers=[moved]) as runtime:
        # Refused, the effect was not made: the next attempt is a new one, and takes what the code says now.
        lost = False
        seen.clear()
        await runtime.run(changed, 1, id="node", on_finished="reopen")
        assert seen == [("sent", "other-101", {"n": 101})]


async def test_the_class_of_a_lost_step_is_the_one_it_was_admitted_with(store_path: Path) -> None:
    calls: list[int] = []

    async def lose() -> None:
        calls.append(1)
        raise ConnectionError("dead")

    async with opened(store_path) as runtime:
        with pytest.raises(UnknownOutcomeError):
            await runtime.run(Graph("g").step("a", lose, effect="write"), id="x")
        for effect in ("pure", "read", "idempotent", "infer"):
            with pytest.raises(UnknownOutcomeError):
                await runtime.run(Graph("g").step("a", lose, effect=effect), id="x")
        with pytest.raises(UnknownOutcomeError):
            await runtime.run(Graph("g").step("a", lambda: 1, effect="local"), id="x")
    assert calls == [1]


async def test_what_cannot_be_looked_up_now_stays_unknown(store_path: Path, bank: Bank) -> None:
    """Its worker's resources do not open, or its planning raises: the effect may have been made all the same."""
    healthy = True

    class Resources:
        async def __aenter__(self) -> str:
            if not healthy:
                raise OSError("no port")
            return "open"

        async def __aexit__(self, *_error: object) -> None:
            return None

    def key(arguments: Any) -> str:
        if not healthy:
            raise LookupError("no key")
        return "k"

    def worker(**options: Any) -> Worker:
        return Worker("BANK", resources=options.pop("resources", None)).node(
            "BANK.PAY", bank.pay, effect="write", lookup=bank.find, **options
        )

    for name, options in (("resources", {"resources": lambda setup: Resources()}), ("plan", {"key": key})):
        healthy, bank.lose, bank.answer = True, 1, Pending
        async with opened(store_path, workers=[worker(**options)]) as runtime:
            with pytest.raises(UnknownOutcomeError):
                await runtime.run(pay(), id=name)
        healthy = False
        async with opened(store_path, workers=[worker(**options)]) as runtime:
            with pytest.raises(UnknownOutcomeError, match=r"it cannot be looked up: (OSError: no port|LookupError)"):
                await runtime.run(pay(), id=name)
            assert await states(runtime, name) == {"pay": "unknown"}
            assert await status(runtime, name) == "unknown"


# What an unknown blocks


async def lose() -> None:
    raise ConnectionError("dead")


async def test_an_unknown_blocks_only_what_depends_on_it(store_path: Path, world: World) -> None:
    graph = (
        Graph("g")
        .step("lost", lose, effect="write")
        .step("child", world.act, after=("lost",))
        .step("a", world.act)
        .step("b", world.act, after=("a",), effect="write")
        .step("join", world.act, after=("b", "child"))
    )
    async with opened(store_path) as runtime:
        with pytest.raises(UnknownOutcomeError) as caught:
            await runtime.run(graph, id="x")
        assert caught.value.steps == ("lost",)
        assert await states(runtime, "x") == {"lost": "unknown", "a": "completed", "b": "completed"}
        await runtime.resolve("x", "lost", actor="mia", reason="seen in the bank's list", committed="paid")
        outputs = await runtime.run(graph, id="x")
        assert outputs["lost"] == "paid"
    assert world.effects == {"x/1/a": 1, "x/1/b": 1, "x/1/child": 1, "x/1/join": 1}


async def test_several_unknowns_are_all_named(store_path: Path) -> None:
    graph = Graph("g").step("b", lose, effect="write").step("a", lose, effect="write").step("c", lose, effect="infer")
    async with opened(store_path) as runtime:
        with pytest.raises(UnknownOutcomeError, match="the outcome of 3 steps is unknown") as caught:
            await runtime.run(graph, id="x")
        assert caught.value.steps == ("a", "b", "c")
        assert (await runtime.health()).unknown == (("x", "b"), ("x", "a"), ("x", "c"))


# Unknown and failed


def torn(gate: Gate, log: list[str], find: Any = None) -> Graph:
    """Two branches: one is lost, the other fails first."""

    async def lost() -> None:
        log.append("lost")
        await gate.pause()
        raise ConnectionError("dead")

    async def fail() -> None:
        log.append("fail")
        await gate.came()
        gate.open()
        raise ValueError("first")

    async def later() -> None:
        log.append("later")

    return (
        Graph("g")
        .step("lost", lost, effect="write", lookup=find)
        .step("fail", fail)
        .step("after_lost", later, after=("lost",))
        .step("after_fail", later, after=("fail",))
    )


async def test_unknown_outranks_failed_and_the_first_error_is_raised(store_path: Path) -> None:
    log: list[str] = []
    graph = torn(Gate(), log)
    async with opened(store_path) as runtime:
        with pytest.raises(StepError, match="first"):
            await runtime.run(graph, id="x")
        assert await status(runtime, "x") == "unknown"
        assert await states(runtime, "x") == {"lost": "unknown", "fail": "failed"}
        # Nothing is begun by asking again: what failed has failed.
        with pytest.raises(StepError, match="first"):
            await runtime.run(graph, id="x")
        assert await status(runtime, "x") == "unknown"
        assert log == ["lost", "fail"]
        await runtime.resolve("x", "lost", actor="mia", reason="seen", committed="paid")
        with pytest.raises(StepError, match="first"):
            await runtime.run(graph, id="x")
        assert await status(runtime, "x") == "failed"
        assert await states(runtime, "x") == {"lost": "completed", "fail": "failed"}
        with pytest.raises(StepError, match="first"):
            await runtime.run(graph, id="x")
    assert log == ["lost", "fail"]


@pytest.mark.parametrize("answer", [lambda: Committed("paid"), lambda: Rejected("no")], ids=["committed", "rejected"])
async def test_a_look_up_settles_a_failed_run_and_begins_nothing(store_path: Path, answer: Any) -> None:
    log: list[str] = []
    answers: list[Any] = [Pending(), answer()]
    graph = torn(Gate(), log, lambda key, arguments, ctx: answers.pop(0))
    async with opened(store_path) as runtime:
        for expected in ("unknown", "failed"):
            with pytest.raises(StepError, match="first"):
                await runtime.run(graph, id="x")
            assert await status(runtime, "x") == expected
    assert log == ["lost", "fail"]
    assert answers == []


async def test_a_failed_run_sends_nothing_again_even_if_the_absence_is_final(store_path: Path, bank: Bank) -> None:
    bank.absence_is_final, bank.lose, bank.answer = True, 1, Pending
    gate = Gate()

    async def fail() -> None:
        raise ValueError("first")

    graph = Graph("g").node("pay", "BANK.PAY").step("fail", fail)
    async with opened(store_path, workers=[bank.worker()]) as runtime:
        with pytest.raises(StepError, match="first"):
            await runtime.run(graph, id="x")
        assert await status(runtime, "x") == "unknown"
        bank.answer = Absent
        with pytest.raises(StepError, match="first"):
            await runtime.run(graph, id="x")
        assert await states(runtime, "x") == {"pay": "refused", "fail": "failed"}
        assert await status(runtime, "x") == "failed"
    assert bank.total == 0
    assert gate.count == 0


async def test_a_lost_step_is_looked_up_even_if_another_fails_before_its_turn(store_path: Path, bank: Bank) -> None:
    bank.answer = Pending
    async with opened(store_path, workers=[bank.worker()]) as runtime:
        with pytest.raises(UnknownOutcomeError):
            await runtime.run(Graph("g").node("pay", "BANK.PAY"), id="x")

        async def fail() -> None:
            raise ValueError("first")

        graph = Graph("g").step("fail", fail).node("pay", "BANK.PAY")
        with pytest.raises(StepError, match="first"):
            await runtime.run(graph, id="x", concurrency=1)
        assert await status(runtime, "x") == "unknown"
        assert bank.asked == ["x/1/pay"] * 2
        bank.answer = lambda: Committed("paid")
        with pytest.raises(StepError, match="first"):
            await runtime.run(graph, id="x", concurrency=1)
        assert await status(runtime, "x") == "failed"


# Draining


async def test_after_an_error_nothing_begins_and_what_runs_is_drained(store_path: Path, world: World) -> None:
    gate = Gate()

    async def slow(ctx: StepContext) -> str:
        await gate.pause()
        return world.act(ctx)

    async def fail() -> None:
        await gate.came()
        raise ValueError("first")

    async def fail_later() -> None:
        await gate.pause()
        raise ValueError("second")

    graph = (
        Graph("g")
        .step("slow", slow, effect="write")
        .step("fail", fail)
        .step("later", fail_later)
        .step("after", world.act, after=("slow",))
        .step("waiting", world.act)
    )
    async with opened(store_path) as runtime:
        run = asyncio.create_task(runtime.run(graph, id="x", concurrency=3))
        await wait_until(lambda: on_disk(store_path, "x").get("fail") == "failed")
        gate.open()
        with pytest.raises(StepError, match="first"):
            await run
        assert await states(runtime, "x") == {"slow": "completed", "fail": "failed", "later": "failed"}
    assert world.effects == {"x/1/slow": 1}


async def test_what_waits_for_a_slot_is_not_begun_after_an_error(store_path: Path) -> None:
    calls: list[int] = []

    async def fail(arguments: Any) -> None:
        calls.append(1)
        raise EffectRejected("no")

    worker = Worker("SHOP", concurrency=1).node("SHOP.PAY", fail, effect="write")
    graph = Graph("g")
    for number in range(10):
        graph = graph.node(f"n{number}", "SHOP.PAY")
    async with opened(store_path, workers=[worker]) as runtime:
        with pytest.raises(EffectRejected):
            await runtime.run(graph, id="x")
        assert await states(runtime, "x") == {"n0": "failed"}
    assert calls == [1]


@pytest.mark.parametrize("effect", ["read", "idempotent", "write"])
async def test_a_back_off_ends_when_another_step_fails(store_path: Path, effect: str) -> None:
    attempts: list[int] = []
    failed_once = asyncio.Event()

    async def again(ctx: StepContext) -> None:
        attempts.append(ctx.attempt)
        failed_once.set()
        raise EffectNotMade("not yet")

    async def fail() -> None:
        await failed_once.wait()
        raise ValueError("first")

    graph = (
        Graph("g").step("again", again, effect=effect, retry=Retry(5, initial_s=1_000, max_s=1_000)).step("fail", fail)
    )
    async with opened(store_path) as runtime:
        with pytest.raises(StepError, match="first"):
            await runtime.run(graph, id="x")
        assert await status(runtime, "x") == "failed"
    assert attempts == [1]


@pytest.mark.parametrize("effect", ["read", "idempotent", "write"])
async def test_waiting_for_another_runs_slot_ends_when_a_step_fails(store_path: Path, effect: str) -> None:
    gate = Gate()
    calls: list[str] = []

    async def pay(arguments: Any, ctx: StepContext) -> None:
        calls.append(ctx.run_id)
        await gate.pause()

    worker = Worker("SHOP", concurrency=1).node("SHOP.PAY", pay, effect=effect)

    async def fail() -> None:
        raise ValueError("first")

    async with opened(store_path, workers=[worker]) as runtime:
        other = asyncio.create_task(runtime.run(Graph("other").node("pay", "SHOP.PAY"), id="other"))
        await gate.came()
        with pytest.raises(StepError, match="first"):
            await runtime.run(Graph("g").node("pay", "SHOP.PAY").step("fail", fail), id="x")
        assert await states(runtime, "x") == {"fail": "failed"}
        # The slot that was waited for is not lost.
        gate.open()
        await other
        await runtime.run(Graph("other").node("pay", "SHOP.PAY"), id="after")
    assert calls == ["other", "after"]


# Decisions


async def unknown_run(runtime: Runtime, effect: str = "write") -> Graph:
    graph = Graph("g").step("a", lose, effect=effect).step("b", lambda a: [a], after=("a",))
    with pytest.raises(UnknownOutcomeError):
        await runtime.run(graph, id="x")
    return graph


async def test_a_person_says_that_it_was_made(store_path: Path) -> None:
    async with opened(store_path) as runtime:
        graph = await unknown_run(runtime)
        await runtime.resolve("x", "a", actor="mia", reason="seen", committed={"receipt": 7})
        assert await status(runtime, "x") == "interrupted"
        assert await runtime.run(graph, id="x") == {"a": {"receipt": 7}, "b": [{"receipt": 7}]}
        decided = [event for event in await events(runtime, "x") if event.kind == "step_resolved"]
        assert [(event.step, event.body) for event in decided] == [
            ("a", {"attempt": 1, "decision": "committed", "actor": "mia", "reason": "seen"})
        ]


async def test_a_person_says_that_it_was_not_made(store_path: Path, bank: Bank) -> None:
    async with opened(store_path, workers=[bank.worker(lookup=False)]) as runtime:
        with pytest.raises(UnknownOutcomeError):
            await runtime.run(pay(), id="x")
        await runtime.resolve("x", "pay", actor="mia", reason="not in the list", absent=True)
        assert await states(runtime, "x") == {"pay": "refused"}
        assert await runtime.run(pay(), id="x") == {"pay": "done x/1/pay"}
    assert bank.effects == {"x/1/pay": 1}


async def test_a_person_gives_up(store_path: Path) -> None:
    async with opened(store_path) as runtime:
        graph = await unknown_run(runtime)
        await runtime.resolve("x", "a", actor="mia", reason="too late", abandon=True)
        for _ in range(2):
            with pytest.raises(StepError, match="abandoned by mia: too late") as caught:
                await runtime.run(graph, id="x", on_finished="reopen")
            assert caught.value.code == "step.abandoned"


async def test_a_model_call_is_answered_or_asked_again(store_path: Path) -> None:
    async with opened(store_path) as runtime:
        graph = await unknown_run(runtime, "infer")
        await runtime.resolve("x", "a", actor="mia", reason="from the log", response="hello")
        assert await runtime.run(graph, id="x") == {"a": "hello", "b": ["hello"]}
    asked: list[int] = []

    async def model(ctx: StepContext) -> str:
        asked.append(ctx.attempt)
        if ctx.attempt == 1:
            raise ConnectionError("dead")
        return "hello"

    graph = Graph("g").step("a", model, effect="infer")
    async with opened(store_path) as runtime:
        with pytest.raises(UnknownOutcomeError):
            await runtime.run(graph, id="y")
        await runtime.resolve("y", "a", actor="mia", reason="it may cost twice", ask_again=True)
        assert await runtime.run(graph, id="y") == {"a": "hello"}
    assert asked == [1, 2]


async def test_by_policy_a_lost_model_call_is_asked_again_once(store_path: Path) -> None:
    asked: list[int] = []

    async def model(ctx: StepContext) -> str:
        asked.append(ctx.attempt)
        raise ConnectionError("dead")

    graph = Graph("g").step("a", model, effect="infer")
    async with opened(store_path, on_unknown_model_call="ask_again") as runtime:
        with pytest.raises(EffectNotMade, match="asked again"):
            await runtime.run(graph, id="x")
    assert asked == [1, 2]


@pytest.mark.parametrize(
    ("effect", "wrong"), [("write", ["response", "ask_again"]), ("infer", ["committed", "absent"])]
)
async def test_ways_that_do_not_fit_are_refused(store_path: Path, effect: str, wrong: list[str]) -> None:
    async with opened(store_path) as runtime:
        await unknown_run(runtime, effect)
        for way in wrong:
            value = "text" if way in ("committed", "response") else True
            with pytest.raises(DefinitionError, match=r"step a is (no|a) model call: use"):
                await runtime.resolve("x", "a", actor="mia", reason="why", **{way: value})  # type: ignore[arg-type]
        assert await states(runtime, "x") == {"a": "unknown"}


async def test_a_decision_is_one_and_has_a_person_and_a_reason(store_path: Path) -> None:
    wrong: list[dict[str, Any]] = [
        {},
        {"committed": 1, "absent": True},
        {"absent": True, "abandon": True},
        {"abandon": True, "actor": " "},
        {"abandon": True, "reason": ""},
        {"abandon": True, "reason": "x" * 1_001},
    ]
    async with opened(store_path) as runtime:
        await unknown_run(runtime)
        for options in wrong:
            with pytest.raises(DefinitionError, match="resolve"):
                await runtime.resolve("x", "a", **{"actor": "mia", "reason": "why", **options})
        with pytest.raises(InvalidValueError):
            await runtime.resolve("x", "a", actor="mia", reason="why", committed=object())
        assert await states(runtime, "x") == {"a": "unknown"}


async def test_none_is_a_value_that_may_have_been_committed(store_path: Path) -> None:
    async with opened(store_path) as runtime:
        graph = await unknown_run(runtime)
        await runtime.resolve("x", "a", actor="mia", reason="seen", committed=None)
        assert await runtime.run(graph, id="x") == {"a": None, "b": [None]}


async def test_only_what_is_unknown_can_be_resolved_and_only_once(store_path: Path) -> None:
    async with opened(store_path) as runtime:
        await runtime.run(Graph("g").step("a", lambda: 1), id="done")
        for step, found in (("a", "is completed at attempt 1"), ("b", "has no record")):
            with pytest.raises(DefinitionError, match=found):
                await runtime.resolve("done", step, actor="mia", reason="why", abandon=True)
        await unknown_run(runtime)
        await runtime.resolve("x", "a", actor="mia", reason="seen", committed=1)
        with pytest.raises(DefinitionError, match="is completed at attempt 1"):
            await runtime.resolve("x", "a", actor="mia", reason="seen", abandon=True)


async def test_a_decision_on_an_older_attempt_is_refused(store_path: Path, bank: Bank) -> None:
    bank.lose = 2
    async with opened(store_path, workers=[bank.worker(lookup=False)]) as runtime:
        with pytest.raises(UnknownOutcomeError):
            await runtime.run(pay(), id="x")
        await runtime.resolve("x", "pay", actor="mia", reason="not there", absent=True, attempt=1)
        with pytest.raises(UnknownOutcomeError):
            await runtime.run(pay(), id="x")
        with pytest.raises(DefinitionError, match="is unknown at attempt 2"):
            await runtime.resolve("x", "pay", actor="tom", reason="not there", absent=True, attempt=1)
        await runtime.resolve("x", "pay", actor="tom", reason="there", committed="paid", attempt=2)
        assert await runtime.run(pay(), id="x") == {"pay": "paid"}


async def test_an_attempt_that_is_being_made_is_not_decided_on(store_path: Path) -> None:
    gate = Gate()
    graph = Graph("g").step("a", gate.pause, effect="write")
    async with opened(store_path) as runtime, opened(store_path) as other:
        run = asyncio.create_task(runtime.run(graph, id="x"))
        await gate.came()
        for asked in (runtime, other):
            with pytest.raises(RunBusyError, match="step a is being attempted right now"):
                await asked.resolve("x", "a", actor="mia", reason="why", abandon=True)
        gate.open()
        assert await run == {"a": None}


async def test_b07_of_many_decisions_at_once_one_is_kept(store_path: Path) -> None:
    async with opened(store_path) as runtime:
        graph = await unknown_run(runtime)
        decisions = [
            runtime.resolve("x", "a", actor=f"u{number}", reason="why", committed=number) for number in range(20)
        ]
        ended = await asyncio.gather(*decisions, return_exceptions=True)
        kept = [number for number, error in enumerate(ended) if error is None]
        assert len(kept) == 1
        assert (await runtime.run(graph, id="x"))["a"] == kept[0]
        assert [event.body["actor"] for event in await events(runtime, "x") if event.kind == "step_resolved"] == [
            f"u{kept[0]}"
        ]


@pytest.mark.parametrize("choice", ["committed", "absent", "abandon"])
async def test_a_decision_during_the_look_up_stands_and_the_answer_is_late(
    store_path: Path, bank: Bank, choice: str
) -> None:
    gate = Gate()

    async def find(key: str, arguments: Any, ctx: StepContext) -> LookupResult:
        await gate.pause()
        return Committed("by the look-up")

    graph = Graph("g").step("a", lose, effect="write", lookup=lambda key, arguments, ctx: Pending())
    asking = Graph("g").step("a", lose, effect="write", lookup=find)
    async with opened(store_path) as runtime, opened(store_path) as other:
        with pytest.raises(UnknownOutcomeError):
            await runtime.run(graph, id="x")
        run = asyncio.create_task(runtime.run(asking, id="x"))
        await gate.came()
        decision: dict[str, Any] = {choice: "by mia" if choice == "committed" else True}
        await other.resolve("x", "a", actor="mia", reason="seen", **decision)
        gate.open()
        if choice == "committed":
            assert await run == {"a": "by mia"}
            assert await status(runtime, "x") == "completed"
        elif choice == "abandon":
            with pytest.raises(StepError, match="abandoned"):
                await run
            assert await status(runtime, "x") == "failed"
        else:
            with pytest.raises(UnknownOutcomeError, match="another process changed the step while it ran"):
                await run
            assert await states(runtime, "x") == {"a": "refused"}
        late = [event for event in await events(runtime, "x") if event.kind == "step_returned_late"]
        assert [(event.step, event.body) for event in late] == [("a", {"attempt": 1, "value": '"by the look-up"'})]


async def test_a_resolved_value_has_the_shape_of_its_node_type(store_path: Path) -> None:
    assert Sample.model_fields  # the shapes of ditto's own node types are tested with their workers
    async with opened(store_path) as runtime:
        await unknown_run(runtime)
        await runtime.resolve("x", "a", actor="mia", reason="seen", committed=[1, {"a": None}])
        step = (await runtime.get("x")).step("a")
        assert step is not None
        assert step.output == [1, {"a": None}]
