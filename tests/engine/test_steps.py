"""Steps: what each effect class costs, when it may begin, and what a handler may be and return."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from sqlalchemy import text

from ditto import (
    EffectNotMade,
    EffectRejected,
    Graph,
    Outcome,
    OutputError,
    Retry,
    Runtime,
    StepContext,
    StepError,
    UnknownOutcomeError,
    Worker,
)
from tests.engine.scene import Gate, World, events, on_disk, opened, states, status, story, wait_until

pytestmark = pytest.mark.asyncio


def chain(length: int, function: Callable[..., Any], **options: Any) -> Graph:
    graph = Graph("chain")
    for number in range(length):
        after = (f"n{number - 1}",) if number else ()
        graph = graph.step(f"n{number}", function, after=after, **options)
    return graph


async def commits_of(runtime: Runtime, graph: Graph) -> int:
    await runtime.run(Graph("warm").step("up", lambda: 1))
    before = runtime.commits
    await runtime.run(graph, id="counted")
    assert await status(runtime, "counted") == "completed"
    return runtime.commits - before


# What each class costs in commits. The creation of a run is one; its end rides with its last outcome.


@pytest.mark.parametrize("effect", ["pure", "read"])
async def test_a_chain_of_held_outcomes_costs_one_commit_for_sixty_four_and_a_few(
    store_path: Path, effect: str
) -> None:
    async def step() -> int:
        return 1

    async with opened(store_path) as runtime:
        assert await commits_of(runtime, chain(1000, step, effect=effect)) <= 1000 / 64 + 3


async def test_a_short_chain_of_held_outcomes_costs_the_creation_and_the_end(store_path: Path) -> None:
    async with opened(store_path) as runtime:
        assert await commits_of(runtime, chain(20, lambda: 1, effect="pure")) == 2


async def test_a_chain_of_idempotent_steps_costs_one_commit_each(store_path: Path) -> None:
    async def step() -> int:
        return 1

    async with opened(store_path) as runtime:
        assert await commits_of(runtime, chain(20, step)) == 21


@pytest.mark.parametrize("effect", ["write", "infer"])
async def test_what_is_admitted_costs_two_commits_each(store_path: Path, effect: str) -> None:
    async def step() -> int:
        return 1

    async with opened(store_path) as runtime:
        assert await commits_of(runtime, chain(20, step, effect=effect)) == 41


async def test_a_local_step_costs_one_commit_which_carries_what_was_held_and_the_end(store_path: Path) -> None:
    def step(ctx: StepContext) -> int:
        return int(ctx.connection.execute(text("SELECT 1")).scalar_one())

    graph = Graph("g").step("p", lambda: 1, effect="pure").step("l", step, effect="local", after=("p",))
    async with opened(store_path) as runtime:
        assert await commits_of(runtime, graph) == 2


async def test_held_outcomes_ride_with_the_next_barrier(store_path: Path) -> None:
    async def step() -> int:
        return 1

    graph = (
        Graph("g")
        .step("p", lambda: 1, effect="pure")
        .step("r", step, effect="read", after=("p",))
        .step("w", step, effect="write", after=("r",))
        .step("q", lambda: 1, effect="pure", after=("w",))
        .step("i", step, after=("q",))
        .step("s", lambda: 1, effect="pure", after=("i",), when=lambda: False)
        .step("j", step, effect="write", after=("i",))
    )
    async with opened(store_path) as runtime:
        # created; p + r + admission; outcome; q; outcome of i; admission + skip; outcome + end
        assert await commits_of(runtime, graph) <= 8


async def test_held_outcomes_go_by_themselves_while_a_step_takes_its_time(store_path: Path) -> None:
    gate = Gate()
    graph = Graph("g").step("p", lambda: 1, effect="pure").step("r", gate.pause, effect="read", after=("p",))
    async with opened(store_path) as runtime:
        run = asyncio.create_task(runtime.run(graph, id="x"))
        await gate.came()
        await wait_until(lambda: on_disk(store_path, "x") == {"p": "completed"})
        gate.open()
        await run


# No effect before its causes


@pytest.mark.parametrize("effect", ["idempotent", "write", "infer"])
@pytest.mark.parametrize("threaded", [False, True], ids=["async def", "def"])
async def test_an_effect_begins_when_all_its_causes_are_on_disk(store_path: Path, effect: str, threaded: bool) -> None:
    seen: list[dict[str, str]] = []

    def look() -> None:
        seen.append(on_disk(store_path, "x"))

    async def look_async() -> None:
        look()

    graph = (
        Graph("g")
        .step("p", lambda: 1, effect="pure")
        .step("q", lambda: 1, effect="pure", after=("p",), when=lambda: False)
        .step("r", lambda p: p, effect="pure", after=("p",))
        .step("e", look if threaded else look_async, effect=effect, after=("q", "r"))
        .step("f", look if threaded else look_async, effect=effect, after=("e",))
    )
    async with opened(store_path) as runtime:
        await runtime.run(graph, id="x")
    causes = {"p": "completed", "q": "skipped", "r": "completed"}
    own = {"e": "admitted"} if effect != "idempotent" else {}
    later = {"f": "admitted"} if effect != "idempotent" else {}
    assert seen == [causes | own, causes | {"e": "completed"} | later]


@pytest.mark.parametrize("effect", ["idempotent", "write", "local"])
async def test_parallel_branches_wait_for_their_own_causes_only_on_disk(store_path: Path, effect: str) -> None:
    width = 20
    missing: list[str] = []

    def look(name: str) -> Callable[..., Any]:
        def handler(ctx: StepContext) -> None:
            if effect == "local":  # its causes are in its own transaction at the latest
                rows = ctx.connection.execute(text("SELECT path FROM ditto_steps WHERE state = 'completed'"))
                there = {path for (path,) in rows}
            else:
                there = {path for path, state in on_disk(store_path, "x").items() if state == "completed"}
            missing.extend({"root", f"p{name}"} - there)

        async def handler_async(ctx: StepContext) -> None:
            handler(ctx)

        return handler if effect == "local" else handler_async

    async def cause() -> int:
        await asyncio.sleep(0)
        return 1

    graph = Graph("g").step("root", lambda: 1, effect="pure")
    for number in range(width):
        graph = graph.step(f"p{number}", cause, effect=("pure", "read")[number % 2], after=("root",))
        graph = graph.step(f"e{number}", look(str(number)), effect=effect, after=(f"p{number}",))
    async with opened(store_path) as runtime:
        await runtime.run(graph, id="x", concurrency=width)
        assert set((await states(runtime, "x")).values()) == {"completed"}
    assert missing == []


async def test_c03_a_step_waits_for_its_causes_and_not_for_other_branches(store_path: Path) -> None:
    order: list[str] = []

    async def other() -> None:
        order.append("other")

    async def ours(cause: int) -> None:
        order.append("ours")

    graph = chain(40, other).step("cause", lambda: 1, effect="pure").step("ours", ours, after=("cause",))
    async with opened(store_path) as runtime:
        await runtime.run(graph, id="x")
    # Its barrier takes one commit; the other branch commits all the time, which is none of its business.
    assert order.index("ours") <= 4


async def test_a_pure_chain_lets_other_runs_have_their_turn(store_path: Path) -> None:
    ended: list[str] = []

    async def run(runtime: Runtime, graph: Graph, name: str) -> None:
        await runtime.run(graph, id=name)
        ended.append(name)

    async with opened(store_path) as runtime:
        await asyncio.gather(
            run(runtime, chain(2_000, lambda: 1, effect="pure"), "long"), run(runtime, Graph("g"), "short")
        )
    assert ended == ["short", "long"]


# What a handler may be and return


class Price(BaseModel):
    cents: int


def through(function: Any) -> Callable[..., Any]:
    """A decorator that hides that a function is async, as many do."""

    @functools.wraps(function)
    def wrapper() -> Any:
        return function()

    return wrapper


class Caller:
    def __call__(self) -> str:
        return "called"


class AsyncCaller:
    async def __call__(self) -> str:
        return "called"


async def plainly() -> str:
    return "called"


@pytest.mark.parametrize("effect", ["pure", "read", "idempotent", "write", "infer"])
@pytest.mark.parametrize(
    "function",
    [
        lambda: "called",
        plainly,
        Caller(),
        AsyncCaller(),
        functools.partial(plainly),
        functools.partial(AsyncCaller()),
        lambda: plainly(),
        through(plainly),
    ],
    ids=["lambda", "async def", "object", "async object", "partial", "partial object", "lambda to async", "decorated"],
)
async def test_a_handler_may_be_anything_that_can_be_called(store_path: Path, function: Any, effect: str) -> None:
    async with opened(store_path) as runtime:
        assert await runtime.run(Graph("g").step("a", function, effect=effect), id="x") == {"a": "called"}


async def test_a_model_is_stored_as_its_data_and_dependants_get_data(store_path: Path) -> None:
    seen: list[Any] = []

    def raise_price(a: Any) -> list[Any]:
        seen.append(a)
        return [{"cents": a["cents"] + 1}]

    graph = Graph("g").step("a", lambda: Price(cents=5)).step("b", raise_price, after=("a",))
    async with opened(store_path) as runtime:
        assert await runtime.run(graph, id="x") == {"a": {"cents": 5}, "b": [{"cents": 6}]}
        assert await runtime.run(graph, id="x") == {"a": {"cents": 5}, "b": [{"cents": 6}]}
    assert seen == [{"cents": 5}]


@pytest.mark.parametrize("value", [object(), {1: 2}, (1, 2), {"a": {1}}, float("nan"), "\ud800"], ids=repr)
@pytest.mark.parametrize(
    ("effect", "final"), [("pure", False), ("idempotent", False), ("write", True), ("infer", True)]
)
async def test_g07_a_value_that_cannot_be_stored_fails_the_step(
    store_path: Path, value: Any, effect: str, final: bool
) -> None:
    calls: list[int] = []

    def make() -> Any:
        calls.append(1)
        return value

    graph = Graph("g").step("a", make, effect=effect, retry=Retry(2, initial_s=0))
    async with opened(store_path) as runtime:
        for on_finished in ("return", "reopen"):
            with pytest.raises(OutputError, match="the output of step a"):
                await runtime.run(graph, id="x", on_finished=on_finished)
        assert await states(runtime, "x") == {"a": "failed"}
        assert await status(runtime, "x") == "failed"
    # No policy tries it again: it would not fit then, either. Reopening does, unless an effect was made.
    assert len(calls) == (1 if final else 2)


async def test_a_value_above_the_limit_fails_the_step_once_and_names_size_and_limit(store_path: Path) -> None:
    calls: list[int] = []

    def dump() -> str:
        calls.append(1)
        return "x" * 4_000

    graph = Graph("g").step("dump", dump, effect="write")
    async with opened(store_path, value_max_bytes=1_024) as runtime:
        with pytest.raises(OutputError, match="the output of step dump takes 4002 bytes; the limit is 1024"):
            await runtime.run(graph, id="x")
        with pytest.raises(OutputError):
            await runtime.run(graph, id="x", on_finished="reopen")
    assert len(calls) == 1


async def test_arguments_that_cannot_be_recorded_fail_the_step_before_anything_is_attempted(store_path: Path) -> None:
    called: list[Any] = []
    worker = Worker("SHOP").node("SHOP.PAY", called.append, effect="write")
    graph = Graph("g").node("pay", "SHOP.PAY", bind=lambda: {"card": object()})
    async with opened(store_path, workers=[worker]) as runtime:
        with pytest.raises(StepError, match=r"the arguments of node type SHOP\.PAY\.card: is a object"):
            await runtime.run(graph, id="x")
        assert await story(runtime, "x") == ["run_created", "step_failed pay", "run_failed pay"]
    assert called == []


@pytest.mark.parametrize("key", ["", "a\nb", 5, "\ud800"], ids=ascii)
async def test_a_key_that_is_no_text_fails_the_step_before_anything_is_attempted(store_path: Path, key: Any) -> None:
    called: list[int] = []
    graph = Graph("g").step("a", lambda: called.append(1), effect="write", key=lambda arguments: key)
    async with opened(store_path) as runtime:
        with pytest.raises(StepError, match="step a: key must give text"):
            await runtime.run(graph, id="x")
    assert called == []


async def test_arguments_are_checked_by_the_node_types_model(store_path: Path) -> None:
    seen: list[Any] = []
    worker = Worker("SHOP").node("SHOP.PAY", seen.append, effect="write", input=Price)
    graph = Graph("g").node("pay", "SHOP.PAY")
    async with opened(store_path, workers=[worker]) as runtime:
        with pytest.raises(StepError, match=r"the arguments of node pay do not fit SHOP\.PAY"):
            await runtime.run(graph, {"cents": "many"}, id="x")
        assert await runtime.run(graph, {"cents": 5}, id="y") == {"pay": None}
    assert seen == [Price(cents=5)]


# The context


async def test_the_context_says_who_where_and_how_often(store_path: Path) -> None:
    seen: list[tuple[Any, ...]] = []

    async def act(ctx: StepContext) -> None:
        seen.append((ctx.run_id, ctx.path, ctx.key, ctx.attempt))
        if ctx.attempt < 3:
            raise EffectNotMade("not yet")

    graph = Graph("g").step("a", act, effect="write", retry=Retry(initial_s=0))
    async with opened(store_path) as runtime:
        await runtime.run(graph, id="x")
        assert await story(runtime, "x") == [
            "run_created",
            "step_admitted a",
            "step_retrying a",
            "step_admitted a",
            "step_retrying a",
            "step_admitted a",
            "step_completed a",
            "run_completed",
        ]
    assert seen == [("x", "a", "x/1/a", attempt) for attempt in (1, 2, 3)]


async def test_a_key_of_the_users_own_is_given_and_recorded(store_path: Path) -> None:
    keys: list[str] = []
    graph = Graph("g").step(
        "a",
        lambda input, ctx: keys.append(ctx.key),
        effect="write",
        key=lambda arguments: f"order-{arguments['input']}",
    )
    async with opened(store_path) as runtime:
        await runtime.run(graph, 17, id="x")
        step = (await runtime.get("x")).step("a")
        assert step is not None
        assert step.key == "order-17"
    assert keys == ["order-17"]


async def test_only_local_handlers_have_the_connection(store_path: Path) -> None:
    async with opened(store_path) as runtime:
        with pytest.raises(StepError, match="only a handler of effect class local has"):
            await runtime.run(Graph("g").step("a", lambda ctx: ctx.connection), id="x")


# Retries


@pytest.mark.parametrize(
    ("effect", "error", "tries"),
    [
        ("pure", ValueError("no"), 3),
        ("read", ValueError("no"), 3),
        ("idempotent", ValueError("no"), 3),
        ("write", EffectNotMade("no"), 3),
        ("infer", EffectNotMade("no"), 3),
        ("pure", EffectRejected("no"), 1),
        ("idempotent", EffectRejected("no"), 1),
        ("write", EffectRejected("no"), 1),
        ("write", OutputError("no"), 1),
        ("write", ValueError("no"), 1),
        ("infer", ValueError("no"), 1),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
async def test_only_what_is_safe_to_repeat_is_repeated(
    store_path: Path, effect: str, error: Exception, tries: int
) -> None:
    calls: list[int] = []

    def fail(ctx: StepContext) -> None:
        calls.append(ctx.attempt)
        raise error

    async with opened(store_path) as runtime:
        with pytest.raises((StepError, UnknownOutcomeError)):
            await runtime.run(Graph("g").step("a", fail, effect=effect, retry=Retry(3, initial_s=0)), id="x")
    assert calls == list(range(1, tries + 1))


async def test_a_final_failure_is_final_even_when_the_run_is_reopened(store_path: Path) -> None:
    calls: list[int] = []

    def fail() -> None:
        calls.append(1)
        raise EffectRejected("no", code="card.blocked")

    graph = Graph("g").step("a", fail, effect="write")
    async with opened(store_path) as runtime:
        for on_finished in ("return", "reopen", "reopen"):
            with pytest.raises(EffectRejected) as caught:
                await runtime.run(graph, id="x", on_finished=on_finished)
            assert caught.value.code == "card.blocked"
    assert calls == [1]


# Resources and slots


async def test_resources_are_opened_once_on_first_use_and_closed_in_the_same_task(store_path: Path) -> None:
    log: list[tuple[str, Any]] = []

    @asynccontextmanager
    async def resources(_setup: Any) -> Any:
        task = asyncio.current_task()
        log.append(("opened", task))
        yield "connection"
        log.append(("closed", asyncio.current_task()))

    seen: list[Any] = []
    worker = Worker("SHOP", resources=resources).node(
        "SHOP.PRICE", lambda arguments, ctx: seen.append(ctx.resources), effect="read"
    )
    async with opened(store_path, workers=[worker]) as runtime:
        await runtime.run(Graph("other").step("a", lambda: 1))
        assert log == []
        for _ in range(3):
            await runtime.run(Graph("g").node("a", "SHOP.PRICE").node("b", "SHOP.PRICE"))
    assert seen == ["connection"] * 6
    assert [what for what, _ in log] == ["opened", "closed"]
    assert log[0][1] is log[1][1]


async def test_resources_that_do_not_open_fail_the_step_and_are_tried_again(store_path: Path) -> None:
    tries: list[int] = []

    @asynccontextmanager
    async def resources(_setup: Any) -> Any:
        tries.append(1)
        if tries:
            raise OSError("no port")
        yield

    worker = Worker("SHOP", resources=resources).node("SHOP.PAY", lambda arguments: 1, effect="write")
    graph = Graph("g").node("a", "SHOP.PAY")
    async with opened(store_path, workers=[worker]) as runtime:
        for on_finished in ("return", "reopen"):
            with pytest.raises(StepError, match="no port"):
                await runtime.run(graph, id="x", on_finished=on_finished)
        assert await states(runtime, "x") == {"a": "failed"}
    assert tries == [1, 1]


@pytest.mark.parametrize("raised", [asyncio.CancelledError(), GeneratorExit()], ids=repr)
async def test_resources_whose_opening_is_cancelled_keep_nobody_waiting(
    store_path: Path, raised: BaseException | None
) -> None:
    @asynccontextmanager
    async def resources(_setup: Any) -> Any:
        if raised is not None:
            raise raised
        yield

    worker = Worker("SHOP", resources=resources).node("SHOP.PAY", lambda arguments: 1, effect="write")
    async with opened(store_path, workers=[worker]) as runtime:
        with pytest.raises(StepError, match="the resources of worker SHOP were not opened"):
            await runtime.run(Graph("g").node("a", "SHOP.PAY"), id="x")


async def test_a_slot_is_waited_for_before_anything_is_admitted(store_path: Path) -> None:
    gate = Gate()

    async def pay(arguments: Any) -> int:
        await gate.pause()
        return 1

    worker = Worker("SHOP", concurrency=1).node("SHOP.PAY", pay, effect="write")
    graph = Graph("g").node("a", "SHOP.PAY").node("b", "SHOP.PAY").node("c", "SHOP.PAY")
    async with opened(store_path, workers=[worker]) as runtime:
        run = asyncio.create_task(runtime.run(graph, id="x"))
        await gate.came()
        await runtime.run(Graph("other").step("a", lambda: 1))
        assert on_disk(store_path, "x") == {"a": "admitted"}
        gate.open()
        await run


async def test_a_handler_may_run_a_workflow_that_needs_slots_of_the_same_worker(store_path: Path) -> None:
    async def nest(arguments: int) -> int:
        if arguments == 0:
            return 0
        inner = await runtime.run(Graph("inner").node("a", "SHOP.NEST"), arguments - 1)
        return int(inner["a"]) + 1

    worker = Worker("SHOP", concurrency=4).node("SHOP.NEST", nest, effect="idempotent")
    async with opened(store_path, workers=[worker]) as runtime:
        assert await runtime.run(Graph("g").node("a", "SHOP.NEST"), 3) == {"a": 3}


# Commit parts


async def test_a_commit_part_is_in_the_transaction_of_its_outcome(store_path: Path, world: World) -> None:
    def record(connection: Any, outcome: Outcome) -> None:
        connection.execute(text("CREATE TABLE book (key TEXT, value TEXT)"))
        connection.execute(text("INSERT INTO book VALUES (:k, :v)"), {"k": outcome.key, "v": outcome.value})

    seen: list[Any] = []

    def look(ctx: StepContext) -> None:
        seen.extend(tuple(row) for row in ctx.connection.execute(text("SELECT key, value FROM book")))

    graph = Graph("g").step("a", world.act, effect="write", record=record).step("b", look, effect="local", after=("a",))
    async with opened(store_path) as runtime:
        await runtime.run(graph, id="x")
    assert seen == [("x/1/a", "done x/1/a")]


@pytest.mark.parametrize("effect", ["pure", "idempotent", "write", "local"])
@pytest.mark.parametrize("raised", [ValueError("no"), KeyboardInterrupt(), SystemExit(1)], ids=repr)
async def test_a_commit_part_that_raises_fails_the_step_and_the_outcome_is_kept_without_it(
    store_path: Path, effect: str, raised: BaseException
) -> None:
    calls: list[int] = []

    def record(connection: Any, outcome: Outcome) -> None:
        connection.execute(text("CREATE TABLE book (key TEXT)"))
        raise raised

    def make() -> str:
        calls.append(1)
        return "made"

    graph = Graph("g").step("a", make, effect=effect, record=record)
    async with opened(store_path) as runtime:
        with pytest.raises(
            StepError, match="no" if effect == "local" and str(raised) == "no" else type(raised).__name__
        ):
            await runtime.run(graph, id="x")
        step = (await runtime.get("x")).step("a")
        assert step is not None
        assert step.state == "failed"
        if effect != "local":
            assert step.output == "made"
            assert step.error is not None
            assert step.error.code == "step.output"
        with pytest.raises(StepError):
            await runtime.run(graph, id="x", on_finished="reopen")
    assert calls == ([1, 1] if effect == "local" else [1])


# Ends of the process that a handler asks for


class Odd(BaseException):
    pass


@pytest.mark.parametrize("raised", [Odd("odd"), GeneratorExit()], ids=repr)
@pytest.mark.parametrize("branches", [1, 2])
@pytest.mark.parametrize("threaded", [False, True], ids=["async def", "def"])
async def test_what_is_no_error_goes_to_the_caller_and_the_run_is_let_go(
    store_path: Path, raised: BaseException, branches: int, threaded: bool
) -> None:
    def end() -> None:
        raise raised

    async def end_async() -> None:
        raise raised

    graph = Graph("g").step("a", end if threaded else end_async, effect="write")
    if branches == 2:
        graph = graph.step("b", asyncio.Event().wait)
    async with opened(store_path) as runtime:
        with pytest.raises(BaseException) as caught:
            await runtime.run(graph, id="x")
        assert caught.value is raised or (
            isinstance(caught.value, BaseExceptionGroup) and caught.value.exceptions == (raised,)
        )
        # As after a crash in the middle: it may have happened or not.
        assert await states(runtime, "x") == {"a": "admitted"}
        assert await status(runtime, "x") == "unknown"
        with pytest.raises(UnknownOutcomeError):
            await runtime.run(Graph("g").step("a", lambda: 1, effect="write"), id="x")


async def test_failures_carry_their_events(store_path: Path) -> None:
    def fail() -> None:
        raise EffectRejected("card blocked", code="card.blocked")

    async with opened(store_path) as runtime:
        with pytest.raises(EffectRejected):
            await runtime.run(Graph("g").step("a", fail, effect="write"), id="x")
        bodies = {event.kind: event.body for event in await events(runtime, "x")}
        assert bodies["step_admitted"] == {"attempt": 1, "key": "x/1/a"}
        assert bodies["step_failed"] == {
            "attempt": 1,
            "code": "card.blocked",
            "error": "EffectRejected",
            "message": "card blocked",
        }
        assert bodies["run_failed"] == {"code": "card.blocked"}


async def test_d11_a_retry_that_hangs_is_given_up_and_made_again_and_nothing_waits_for_it(
    store_path: Path, world: World
) -> None:
    """Its deadline ends it; and if its process ends first, the run is nobody's, and is taken up at once."""
    begun = 0
    hangs = asyncio.Event()

    async def act(ctx: StepContext) -> str:
        nonlocal begun
        begun += 1
        if ctx.attempt == 1:
            raise ValueError("the first attempt fails")
        if ctx.attempt in (2, 3):
            hangs.set()
            await asyncio.Event().wait()
        return world.act(ctx)

    def graph(timeout_s: float) -> Graph:
        retry = Retry(5, initial_s=0)
        return Graph("g").step("a", act, retry=retry, timeout_s=timeout_s)

    async with opened(store_path) as runtime:
        assert await runtime.run(graph(0.02), id="x") == {"a": "done x/1/a"}
        assert (await story(runtime, "x")).count("step_retrying a") == 3
        assert (begun, world.effects) == (4, {"x/1/a": 1})
    async with opened(store_path, grace_s=0) as runtime:
        hangs.clear()
        running = asyncio.create_task(runtime.run(graph(3600), id="y"))
        await hangs.wait()
        running.cancel()
        await asyncio.wait([running])
        assert await status(runtime, "y") == "interrupted"
    async with opened(store_path, workflows=[graph(0.02)]) as runtime:
        assert [(each.run_id, each.status) for each in await runtime.recover()] == [("y", "completed")]
    assert world.effects == {"x/1/a": 1, "y/1/a": 1}
