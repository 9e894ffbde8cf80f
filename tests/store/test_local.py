"""`local` handlers and commit parts: a user's function in a transaction of ours."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import pytest
from sqlalchemy import Connection, text

from ditto import Graph, Runtime, Worker, create_ditto
from ditto.errors import DefinitionError, OutputError, StepError, StoreError
from ditto.worker import Outcome, StepContext
from tests.store.files import can_write, look

INSERT = "INSERT INTO mine VALUES (?)"

SETUP = [
    "CREATE TABLE mine (x)",
    "CREATE TABLE one (x UNIQUE)",
    "INSERT INTO one VALUES (1)",
    "CREATE TRIGGER no BEFORE INSERT ON one WHEN NEW.x = 13 BEGIN SELECT RAISE(ROLLBACK, 'unlucky'); END",
]


def insert(connection: Connection, x: int) -> None:
    connection.execute(text("INSERT INTO mine VALUES (:x)"), {"x": x})


def driver(connection: Connection) -> Any:
    return connection.connection.dbapi_connection


async def set_up(runtime: Runtime) -> None:
    def lay_out(ctx: StepContext) -> None:
        for statement in SETUP:
            ctx.connection.execute(text(statement))

    await runtime.run(Graph("set-up").step("tables", lay_out, effect="local"), id="set-up")


def mine(path: Path) -> list[int]:
    with closing(sqlite3.connect(path)) as db:
        return [x for (x,) in db.execute("SELECT x FROM mine ORDER BY rowid").fetchall()]


def states(path: Path, run_id: str = "run") -> dict[str, str]:
    return {step: state for run, step, state, *_ in look(path).steps if run == run_id}


def one_local(handler: Callable[..., Any]) -> tuple[Graph, list[int]]:
    """A pure step and then a local one; and how often the pure one was called."""
    calls: list[int] = []

    def before() -> str:
        calls.append(1)
        return "before"

    graph = Graph("flow").step("before", before, effect="pure").step("local", handler, effect="local", after=["before"])
    return graph, calls


# What it may do


@pytest.mark.asyncio
async def test_its_rows_its_outcome_and_the_end_of_the_run_are_one_commit(store_path: Path) -> None:
    def handler(ctx: StepContext) -> int:
        insert(ctx.connection, 1)
        ctx.connection.execute(text("CREATE TABLE made (y)"))
        return int(ctx.connection.execute(text("SELECT count(*) FROM mine")).scalar_one())

    async with create_ditto(store=store_path) as runtime:
        await set_up(runtime)
        commits = runtime.commits
        graph, _ = one_local(handler)
        assert await runtime.run(graph, id="run") == {"before": "before", "local": 1}
        assert runtime.commits == commits + 2, "created; and all the rest"
        assert (await runtime.get("run")).status == "completed"
    assert mine(store_path) == [1]
    assert states(store_path) == {"before": "completed", "local": "completed"}


@pytest.mark.asyncio
async def test_it_runs_in_the_committers_thread_and_only_a_local_handler_has_the_connection(store_path: Path) -> None:
    kept: list[StepContext] = []

    def handler(ctx: StepContext) -> str:
        kept.append(ctx)
        return threading.current_thread().name

    async with create_ditto(store=store_path) as runtime:
        assert await runtime.run(Graph("flow").step("local", handler, effect="local")) == {"local": "ditto-committer"}
        with pytest.raises(Exception, match="closed"):
            kept[0].connection.execute(text("SELECT 1"))
        with pytest.raises(StepError, match=r"only a handler of effect class local has ctx\.connection"):
            await runtime.run(Graph("flow").step("read", lambda ctx: ctx.connection, effect="read"))


@pytest.mark.asyncio
async def test_a_result_that_was_not_read_to_its_end_does_not_hold_a_snapshot(store_path: Path) -> None:
    kept: list[Any] = []

    def handler(ctx: StepContext) -> None:
        for x in range(100):
            insert(ctx.connection, x)
        kept.append(ctx.connection.execute(text("SELECT x FROM mine")))
        kept[0].fetchone()
        kept.append(ctx.connection.execute(text("INSERT INTO mine VALUES (100), (101) RETURNING x")))
        kept[1].fetchone()

    async with create_ditto(store=store_path) as runtime:
        await set_up(runtime)
        await runtime.run(one_local(handler)[0], id="run")
        with closing(sqlite3.connect(store_path, isolation_level=None, timeout=0)) as other:
            other.execute(INSERT, [-1])
            assert other.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0
        await runtime.run(one_local(lambda: 1)[0], id="other")
        assert len(mine(store_path)) == 103


# What it may not do


def commit_by_context(connection: Connection) -> None:
    with driver(connection):
        pass


def begin_and_end(connection: Connection) -> None:
    transaction = connection.get_transaction()
    assert transaction is not None
    transaction.close()
    with connection.begin():
        pass


def change_isolation(connection: Connection) -> None:
    driver(connection).isolation_level = None


REFUSED: dict[str, Callable[[Connection], Any]] = {
    "commit": lambda c: c.commit(),
    "rollback": lambda c: c.rollback(),
    "begin": begin_and_end,
    "begin_nested": lambda c: c.begin_nested(),
    "driver.commit": lambda c: driver(c).commit(),
    "driver.rollback": lambda c: driver(c).rollback(),
    "driver as a context": commit_by_context,
    "driver.executescript": lambda c: driver(c).executescript("SELECT 1"),
    "driver.isolation_level": change_isolation,
    "AUTOCOMMIT": lambda c: c.execution_options(isolation_level="AUTOCOMMIT"),
    "close": lambda c: c.close(),
    **{
        statement: lambda c, statement=statement: c.exec_driver_sql(statement)  # type: ignore[misc]
        for statement in (
            "COMMIT", "END", "end transaction", "/* please */ COMMIT", "ROLLBACK", "BEGIN", "SAVEPOINT x", "RELEASE x",
            "ROLLBACK TO x", "ATTACH ':memory:' AS x", "DETACH main", "PRAGMA synchronous=OFF", "PRAGMA user_version",
            "PRAGMA journal_mode=DELETE", "VACUUM",
        )
    },
    "driver.execute": lambda c: driver(c).execute("COMMIT"),
    "driver.cursor": lambda c: driver(c).cursor().execute("SAVEPOINT x"),
}  # fmt: skip


@pytest.mark.asyncio
@pytest.mark.parametrize("swallowed", [False, True], ids=["raised", "swallowed"])
@pytest.mark.parametrize("forbidden", REFUSED.values(), ids=REFUSED)
async def test_i02_it_can_neither_end_nor_divide_the_transaction(
    store_path: Path, forbidden: Callable[[Connection], Any], swallowed: bool
) -> None:
    seen: list[bool] = []

    def handler(ctx: StepContext) -> None:
        db = driver(ctx.connection)
        insert(ctx.connection, 1)
        try:
            forbidden(ctx.connection)
        except Exception:
            if not swallowed:
                raise
        else:
            seen.append(True)
        finally:
            assert db.in_transaction
            assert mine(store_path) == [], "nothing is durable before its step"

    async with create_ditto(store=store_path) as runtime:
        await set_up(runtime)
        graph, _ = one_local(handler)
        if swallowed:
            await runtime.run(graph, id="run")
        else:
            with pytest.raises(StepError):
                await runtime.run(graph, id="run")
        assert seen == [], "it was refused"
        assert mine(store_path) == [1] * swallowed
        assert states(store_path) == {"before": "completed", "local": "completed" if swallowed else "failed"}
        assert can_write(store_path)
        await runtime.run(one_local(lambda ctx: insert(ctx.connection, 2))[0], id="other")
        assert mine(store_path)[-1] == 2


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("forbidden", "says"),
    [
        ("commit", "must not commit: its writes are committed together with its step"),
        ("rollback", "must not roll back: raise an exception, and its writes are undone"),
        ("begin_nested", "must not begin, divide or end the transaction, nor ATTACH or use PRAGMA"),
        ("PRAGMA user_version", "must not begin, divide or end the transaction, nor ATTACH or use PRAGMA"),
        ("driver.execute", "must not begin, divide or end the transaction, nor ATTACH or use PRAGMA"),
    ],
)
async def test_the_refusal_says_what_to_do(store_path: Path, forbidden: str, says: str) -> None:
    def handler(ctx: StepContext) -> None:
        ctx.connection.execute(text("SELECT 1"))
        REFUSED[forbidden](ctx.connection)

    async with create_ditto(store=store_path) as runtime:
        with pytest.raises(StepError, match=says) as failed:
            await runtime.run(Graph("flow").step("local", handler, effect="local"))
        assert failed.value.error_type == "StoreError"


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "destroy",
    [
        lambda c: driver(c).close(),
        lambda c: c.invalidate(),
        lambda c: c.detach(),
        lambda c: c.engine.dispose(),
    ],
    ids=["close", "invalidate", "detach", "dispose"],
)
async def test_a_connection_that_it_destroyed_is_made_anew(
    store_path: Path, destroy: Callable[[Connection], Any]
) -> None:
    def handler(ctx: StepContext) -> None:
        insert(ctx.connection, 1)
        destroy(ctx.connection)

    async with create_ditto(store=store_path) as runtime:
        await set_up(runtime)
        with pytest.raises(StepError):
            await runtime.run(one_local(handler)[0], id="run")
        assert mine(store_path) == []
        assert states(store_path) == {"before": "completed", "local": "failed"}
        await runtime.run(one_local(lambda ctx: insert(ctx.connection, 2))[0], id="other")
        assert mine(store_path) == [2]


# How it fails


class Odd(BaseException):
    """No Exception, and no business of the store's."""


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("fault", "error_type"),
    [
        (ValueError("no"), "ValueError"),
        (StoreError("no"), "StoreError"),
        (sqlite3.OperationalError("no"), "OperationalError"),
        (StopIteration("no"), "RuntimeError"),
        (Odd("no"), "RuntimeError"),
        (asyncio.CancelledError("no"), "RuntimeError"),
        (KeyboardInterrupt("no"), "RuntimeError"),
    ],
    ids=lambda each: each if isinstance(each, str) else type(each).__name__,
)
async def test_what_it_raises_undoes_its_writes_and_nothing_else(
    store_path: Path, fault: BaseException, error_type: str
) -> None:
    def handler(ctx: StepContext) -> None:
        insert(ctx.connection, 1)
        raise fault

    async with create_ditto(store=store_path) as runtime:
        await set_up(runtime)
        graph, calls = one_local(handler)
        with pytest.raises(StepError) as failed:
            await runtime.run(graph, id="run")
        assert failed.value.step == "local"
        assert failed.value.error_type == error_type
        assert mine(store_path) == []
        assert states(store_path) == {"before": "completed", "local": "failed"}
        assert (await runtime.get("run")).status == "failed"
        assert can_write(store_path)
    async with create_ditto(store=store_path) as runtime:
        better, calls_again = one_local(lambda ctx: insert(ctx.connection, 2))
        await runtime.run(better, id="run", on_finished="reopen")
        assert (len(calls), len(calls_again)) == (1, 0), "what was held was committed with the failure"
        assert mine(store_path) == [2]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "output", [{1, 2}, {"a": float("nan")}, "\ud800", object()], ids=["set", "nan", "text", "object"]
)
async def test_g07_an_output_that_cannot_be_stored_undoes_its_writes(store_path: Path, output: Any) -> None:
    def handler(ctx: StepContext) -> Any:
        insert(ctx.connection, 1)
        return output

    async with create_ditto(store=store_path) as runtime:
        await set_up(runtime)
        with pytest.raises(OutputError, match="the output of step local"):
            await runtime.run(one_local(handler)[0], id="run")
        assert mine(store_path) == []
        assert states(store_path)["local"] == "failed"


AUTOMATIC: dict[str, Callable[[Connection], Any]] = {
    "INSERT OR ROLLBACK": lambda c: c.exec_driver_sql("INSERT OR ROLLBACK INTO one VALUES (1)"),
    "RAISE(ROLLBACK)": lambda c: c.exec_driver_sql("INSERT INTO one VALUES (13)"),
    "by the driver": lambda c: driver(c).execute("INSERT OR ROLLBACK INTO one VALUES (1)"),
    "by its cursor": lambda c: driver(c).cursor().execute("INSERT OR ROLLBACK INTO one VALUES (1)"),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("swallowed", [False, True], ids=["raised", "swallowed"])
@pytest.mark.parametrize("roll_back", AUTOMATIC.values(), ids=AUTOMATIC)
async def test_an_automatic_rollback_is_a_failed_step_and_nothing_else(
    store_path: Path, roll_back: Callable[[Connection], Any], swallowed: bool
) -> None:
    after: list[type[BaseException] | None] = []

    def attempt(function: Callable[[], Any]) -> None:
        try:
            function()
            after.append(None)
        except Exception as error:  # noqa: BLE001 - which one is what the test asks
            after.append(type(error))

    def handler(ctx: StepContext) -> None:
        insert(ctx.connection, 1)
        prepared = "INSERT INTO mine VALUES (6)"
        driver(ctx.connection).execute(prepared)
        try:
            roll_back(ctx.connection)
        except Exception:
            if not swallowed:
                raise
        # What came now would be committed by itself, at once.
        attempt(lambda: insert(ctx.connection, 2))
        attempt(lambda: ctx.connection.exec_driver_sql("INSERT INTO mine VALUES (3)"))
        attempt(lambda: driver(ctx.connection).execute("INSERT INTO mine VALUES (4)"))
        attempt(lambda: driver(ctx.connection).execute(prepared))
        attempt(lambda: driver(ctx.connection).executemany("INSERT INTO mine VALUES (?)", [(7,)]))
        attempt(lambda: driver(ctx.connection).executescript("INSERT INTO mine VALUES (8)"))
        attempt(lambda: driver(ctx.connection).cursor().execute(prepared))
        attempt(lambda: driver(ctx.connection).execute("BEGIN"))

    async with create_ditto(store=store_path) as runtime:
        await set_up(runtime)
        graph, calls = one_local(handler)
        with pytest.raises(StepError, match="rolled the transaction back" if swallowed else "UNIQUE|unlucky"):
            await runtime.run(graph, id="run")
        assert None not in after
        assert len(after) == 8 * swallowed
        assert mine(store_path) == []
        assert states(store_path) == {"before": "completed", "local": "failed"}
        await runtime.run(one_local(lambda ctx: insert(ctx.connection, 5))[0], id="other")
        assert mine(store_path) == [5]
    assert len(calls) == 1


@pytest.mark.asyncio
@pytest.mark.parametrize("roll_back", AUTOMATIC.values(), ids=AUTOMATIC)
async def test_other_runs_in_the_same_moment_are_not_harmed(
    store_path: Path, roll_back: Callable[[Connection], Any]
) -> None:
    entered, go = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def handler(ctx: StepContext) -> None:
        loop.call_soon_threadsafe(entered.set)
        go.wait()
        insert(ctx.connection, 1)
        roll_back(ctx.connection)

    async with create_ditto(store=store_path) as runtime:
        await set_up(runtime)
        failing = asyncio.ensure_future(runtime.run(one_local(handler)[0], id="run"))
        await entered.wait()
        others = [
            asyncio.ensure_future(
                runtime.run(one_local(lambda ctx, x=x: insert(ctx.connection, x))[0], id=f"other {x}")
            )
            for x in range(2, 7)
        ]
        await asyncio.sleep(0)
        go.set()
        results = await asyncio.gather(failing, *others, return_exceptions=True)
        assert isinstance(results[0], StepError)
        assert all(isinstance(each, dict) for each in results[1:])
        assert sorted(mine(store_path)) == [2, 3, 4, 5, 6]
        assert states(store_path)["local"] == "failed"


@pytest.mark.asyncio
async def test_a_handler_for_another_class_is_no_local_one(store_path: Path) -> None:
    async with create_ditto(store=store_path) as runtime:
        with pytest.raises(StepError) as failed:
            await runtime.run(Graph("flow").step("pure", lambda ctx: ctx.connection, effect="pure"))
        assert failed.value.error_type == DefinitionError.__name__


# Commit parts

SOLD = "the item was sold"


def shop(record: Callable[[Connection, Outcome], None], effects: list[str], *, lookup: Any = None) -> Worker:
    def sell(arguments: Any, ctx: StepContext) -> str:
        effects.append(ctx.key)
        return SOLD

    return Worker("SHOP").node("SHOP.SELL", sell, effect="write", record=record, lookup=lookup)


SALE = Graph("sale").step("price", lambda: 5, effect="pure").node("sell", "SHOP.SELL", after=["price"])


@pytest.mark.asyncio
async def test_a_commit_part_is_one_transaction_with_the_outcome(store_path: Path) -> None:
    told: list[Outcome] = []

    def record(connection: Connection, outcome: Outcome) -> None:
        told.append(outcome)
        insert(connection, 1)
        assert mine(store_path) == []

    effects: list[str] = []
    async with create_ditto(store=store_path, workers=[shop(record, effects)]) as runtime:
        await set_up(runtime)
        assert await runtime.run(SALE, {"n": 1}, id="run") == {"price": 5, "sell": SOLD}
    assert mine(store_path) == [1]
    assert told == [Outcome(SOLD, {"n": 1}, "run/1/sell", "run", "sell")]
    assert states(store_path) == {"price": "completed", "sell": "completed"}


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "fault",
    [
        lambda c: 1 / 0,
        lambda c: c.commit(),
        lambda c: c.exec_driver_sql("INSERT OR ROLLBACK INTO one VALUES (1)"),
        lambda c: c.exec_driver_sql("SAVEPOINT x"),
        lambda c: driver(c).close(),
        lambda c: (_ for _ in ()).throw(Odd("no")),
    ],
    ids=["raises", "commits", "rolls back", "divides", "closes", "odd"],
)
async def test_a_commit_part_that_raises_loses_no_outcome_and_repeats_no_effect(
    store_path: Path, fault: Callable[[Connection], Any]
) -> None:
    effects: list[str] = []

    def record(connection: Connection, outcome: Outcome) -> None:
        insert(connection, 1)
        fault(connection)

    async with create_ditto(store=store_path, workers=[shop(record, effects)]) as runtime:
        await set_up(runtime)
        with pytest.raises(OutputError, match="the outcome is known, but its commit part raised") as failed:
            await runtime.run(SALE, id="run")
        assert failed.value.step == "sell"
        assert mine(store_path) == []
        info = await runtime.get("run")
        assert info.status == "failed"
        assert {step.path: step.state for step in info.steps} == {"price": "completed", "sell": "failed"}
        assert [step.output for step in info.steps if step.path == "sell"] == [SOLD], "what was done is kept"
    async with create_ditto(store=store_path, workers=[shop(lambda *_: None, effects)]) as runtime:
        modes: list[Literal["return", "reopen"]] = ["return", "reopen"]
        for on_finished in modes:
            with pytest.raises(OutputError, match="its commit part raised"):
                await runtime.run(SALE, id="run", on_finished=on_finished)
    assert effects == ["run/1/sell"]


@pytest.mark.asyncio
async def test_a_slow_handler_is_reported_by_name(
    store_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ditto.engine.drive.SLOW_LOCAL_S", -1)
    async with create_ditto(store=store_path) as runtime:
        await runtime.run(one_local(lambda: 1)[0], id="run")
    assert "step local of run run held the store for" in caplog.text
