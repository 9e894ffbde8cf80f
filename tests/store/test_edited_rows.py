"""H01: whoever can write the store's rows can break runs, but runs no code by it."""

from __future__ import annotations

import importlib
import pickle
import shutil
import sqlite3
import sys
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from ditto import Graph, Loop, Worker, create_ditto
from ditto.effects import Committed
from ditto.errors import DittoError, LimitExceededError, StoreDamagedError
from ditto.store import queries
from ditto.store.schema import metadata
from ditto.store.store import Store
from ditto.worker import StepContext
from tests.store.files import opened
from tests.store.scenes import create, get, record, step

MARKER = """
from pathlib import Path
Path(__file__).with_name("imported").touch()
def touch(*_):
    Path(__file__).with_name("called").touch()
class Marker(Exception):
    def __init__(self, *_, **__):
        touch()
"""


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module that leaves a mark when it is imported or called."""
    (tmp_path / "evil_marker.py").write_text(MARKER)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


class Touch:
    def __reduce__(self) -> Any:
        return (__import__, ("evil_marker",))


EDITS: dict[str, Any] = {
    "a name": "evil_marker:touch",
    "a dotted name": "evil_marker.Marker",
    "an object": '{"__class__": "evil_marker.Marker", "type": "evil_marker.Marker", "kind": "evil_marker.Marker"}',
    "an error": '{"kind": "Marker", "type": "evil_marker.Marker", "message": "m", "code": "c", "step": null}',
    "YAML": "!!python/object/apply:evil_marker.touch []",
    "pickle": pickle.dumps(Touch()),
    "nothing": "",
    "a list": "[]",
}

QUICK = ("a dotted name", "an object", "pickle")

# The columns that are numbers are left to SQLite's own checks of types.
COLUMNS = [
    (table.name, column.name)
    for table in metadata.sorted_tables
    for column in table.columns
    if str(column.type) in ("TEXT", "BLOB")
]


def worker() -> Worker:
    def ask(arguments: Any, ctx: StepContext) -> str:
        raise TimeoutError("nobody knows")

    def find(key: str, arguments: Any, ctx: StepContext) -> Committed:
        return Committed("found" * 200)

    return Worker("W").node("W.ASK", ask).node("W.FIND", ask, lookup=find)


GRAPH = (
    Graph("flow")
    .step("large", lambda input: "x" * 2000, effect="idempotent")
    .node("find", "W.FIND", after=["large"], bind=lambda large: {"n": 1})
    .node("ask", "W.ASK", after=["find"], bind=lambda find: {"n": 2})
)
LOOP = Loop(
    "loop",
    graph=Graph("body").step("one", lambda input: "y" * 1000, effect="pure"),
    update=lambda state, outputs: {"n": state["n"] + 1, "found": state["found"].add(outputs["one"])},
    done=lambda state: False,
    max_iterations=2,
    append=("found",),
)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "edit",
    [pytest.param(edit, id=name, marks=() if name in QUICK else pytest.mark.sweep) for name, edit in EDITS.items()],
)
async def test_h01_no_edited_row_names_code_that_is_run(store_path: Path, marker: Path, edit: Any) -> None:
    async with create_ditto(store=store_path, workers=[worker()]) as runtime:
        for run in (runtime.run(GRAPH, {"a": 1}, id="graph"), runtime.loop(LOOP, {"n": 0, "found": []}, id="loop")):
            with pytest.raises(DittoError):
                await run
    sound = shutil.copyfile(store_path, store_path.with_name("sound.db"))
    for table, column in COLUMNS:
        shutil.copyfile(sound, store_path)
        with closing(sqlite3.connect(store_path, isolation_level=None)) as db:
            db.execute(f"UPDATE OR IGNORE {table} SET {column}=?", [edit])
        await use_everything(store_path, f"{table}.{column}")
        assert not (marker / "imported").exists(), f"{table}.{column}"
        assert "evil_marker" not in sys.modules
    importlib.import_module("evil_marker")
    assert (marker / "imported").exists(), "the marker itself works"
    del sys.modules["evil_marker"]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE ditto_lists SET base=id",
        "UPDATE ditto_lists SET base=(SELECT max(id) FROM ditto_lists)",
        "UPDATE ditto_lists SET base=4711",
        "UPDATE ditto_lists SET added='[4711]'",
        "UPDATE ditto_lists SET added='{}'",
        "UPDATE ditto_lists SET added='[[1]]'",
        "DELETE FROM ditto_lists",
        "UPDATE ditto_runs SET state='+'",
        "UPDATE ditto_runs SET state='+[]'",
        "UPDATE ditto_runs SET state='+[null,{}]'",
        "UPDATE ditto_runs SET state='+[\"{}\",[1]]'",
        "UPDATE ditto_runs SET state='@zz'",
    ],
)
async def test_an_edited_list_is_damage_and_never_read_for_ever(store_path: Path, statement: str) -> None:
    async with create_ditto(store=store_path) as runtime:
        with pytest.raises(LimitExceededError):
            await runtime.loop(LOOP, {"n": 0, "found": []}, id="loop")
    with closing(sqlite3.connect(store_path, isolation_level=None)) as db:
        db.execute("PRAGMA foreign_keys=OFF")
        db.execute(statement)
    async with create_ditto(store=store_path) as runtime:
        with pytest.raises(StoreDamagedError, match="restore a backup"):
            await runtime.get("loop")


async def use_everything(path: Path, where: str) -> None:
    """List, load, resume. Whatever goes wrong is an error of the tree, which says what to do."""

    async def drain(events: AsyncIterator[Any]) -> None:
        async for _ in events:
            pass

    try:
        runtime = create_ditto(store=path, workers=[worker()])
        async with runtime:
            for use in (
                lambda: runtime.get("graph"),
                lambda: runtime.get("loop"),
                lambda: drain(runtime.events("graph")),
                lambda: drain(runtime.events("loop")),
                lambda: drain(runtime.receipts()),
                lambda: drain(runtime.receipts("graph")),
                lambda: runtime.run(GRAPH, {"a": 1}, id="graph"),
                lambda: runtime.run(GRAPH, {"a": 1}, id="graph", on_finished="reopen"),
                lambda: runtime.loop(LOOP, {"n": 0, "found": []}, id="loop"),
                lambda: runtime.loop(LOOP, {"n": 0, "found": []}, id="loop", on_finished="reopen"),
                lambda: runtime.resolve("graph", "ask", actor="me", reason="r", committed=1),
                lambda: runtime.cancel("graph"),
            ):
                try:
                    await use()
                except DittoError:
                    pass
                except Exception as error:  # noqa: BLE001 - it is the fault that the test looks for
                    pytest.fail(f"{where}: {type(error).__name__}: {error}")
    except DittoError as error:
        assert "ditto_meta" in where, f"{where}: {error}"


# One row, edited


@pytest_asyncio.fixture
async def store(store_path: Path) -> AsyncIterator[Store]:
    """An open store."""
    async with opened(store_path) as store:
        yield store


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("statement", "says"),
    [
        ("UPDATE ditto_runs SET status='os.system'", "ditto_runs, row 1: no release of ditto writes the status"),
        ("UPDATE ditto_steps SET state='marker:touch'", "ditto_steps, step a: no release of ditto writes the state"),
        ("UPDATE ditto_steps SET output='@00'", "missing from ditto_values"),
        ("UPDATE ditto_steps SET output=''", "holds no value"),
        ("UPDATE ditto_steps SET output=x'80049503'", "another type than ditto writes"),
        ("UPDATE ditto_events SET body='!!python/object:os.system'", "is no JSON"),
        ("UPDATE ditto_events SET body=x'80049503'", "is no JSON"),
    ],
)
async def test_h01_an_edited_row_is_named_as_damage(store: Store, statement: str, says: str) -> None:
    fence = await create(store)
    await record(store, fence, step("a"))
    await store.commit(lambda tx: tx.db.execute(statement).rowcount)

    def read_all(db: Any) -> None:
        queries.get_run(db, "run")
        queries.list_steps(db, fence.run)
        queries.list_events(db, fence.run, 0, 10)

    with pytest.raises(StoreDamagedError, match=says):
        await store.read(read_all)


@pytest.mark.asyncio
@pytest.mark.parametrize("body", ["", "os.system", "[1", "!!python/object/apply:os.system [id]"])
async def test_h01_an_edited_value_is_named_as_damage(store: Store, body: str) -> None:
    fence = await create(store)
    await record(store, fence, step("a", output="x" * 1000))
    await store.commit(lambda tx: tx.db.execute("UPDATE ditto_values SET body=?", [body]).rowcount)
    with pytest.raises(StoreDamagedError, match="restore a backup") as raised:
        await store.read(queries.get_step, fence.run, "a")
    assert raised.value.code == "store.value_altered"


@pytest.mark.asyncio
async def test_h03_a_name_with_a_nul_in_it_matches_only_itself(store: Store) -> None:
    """SQLite keeps it; whoever runs a workflow cannot give it, since it cannot be printed."""
    names = ["a\x00b", "a", "a\x00", "a\x00b\x00"]
    for name in names:
        await create(store, name)
    assert [(await get(store, name)).run_id for name in names] == names
    assert await store.read(queries.get_run, "a\x00c") is None
