"""A store of an older schema is upgraded when it is opened, in one transaction, and its open runs go on."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ditto import Graph, create_ditto
from ditto.store.connection import Location, open_store
from ditto.store.schema import SCHEMA_VERSION

FIRST = (Path(__file__).parent / "schema_1.sql").read_text(encoding="utf-8")

calls: list[str] = []


async def first(input: dict[str, Any]) -> int:
    calls.append("first")
    return int(input["n"]) * 2


async def second(first: int) -> int:
    calls.append("second")
    return first + 1


ORDER = Graph("order").step("first", first).step("second", second, after=("first",))


@pytest.fixture
def old_store(tmp_path: Path) -> Path:
    """A store of the first schema, with an open run whose first step is completed."""
    path = tmp_path / "old.db"
    with closing(sqlite3.connect(path)) as db:
        db.executescript(FIRST)
    return path


def schema_of(path: Path) -> dict[str, object]:
    """Tables with their columns, and indexes, of ditto's own; without Alembic's note."""
    with closing(sqlite3.connect(path)) as db:
        tables = [
            name
            for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type='table' AND name LIKE 'ditto_%'")
            if name != "ditto_alembic"
        ]
        columns = {
            table: {
                (name, kind, notnull, key)
                for _, name, kind, notnull, _, key in db.execute(f"PRAGMA table_info({table})")
            }
            for table in tables
        }
        indexes = {
            name: (table, [column for _, _, column in db.execute(f"PRAGMA index_info({name})")])
            for name, table in db.execute(
                "SELECT name, tbl_name FROM sqlite_master WHERE type='index' AND sql NOT NULL"
            )
        }
        keys = {table: sorted(row[2:5] for row in db.execute(f"PRAGMA foreign_key_list({table})")) for table in tables}
    return {"columns": columns, "indexes": indexes, "keys": keys}


def version_of(path: Path) -> str:
    with closing(sqlite3.connect(path)) as db:
        version: str = db.execute("SELECT value FROM ditto_meta WHERE name='schema_version'").fetchone()[0]
    return version


@pytest.mark.asyncio
async def test_an_open_run_of_the_first_schema_goes_on(old_store: Path) -> None:
    calls.clear()
    async with create_ditto(store=old_store) as runtime:
        assert await runtime.run(ORDER, {"n": 2}, id="open") == {"first": 4, "second": 5}
        assert [event.number async for event in runtime.events("open")][:3] == [1, 2, 3]
    assert calls == ["second"]
    assert version_of(old_store) == str(SCHEMA_VERSION)


def test_an_upgraded_store_has_the_schema_of_a_new_one(old_store: Path, tmp_path: Path) -> None:
    new = tmp_path / "new.db"
    open_store(Location(new))
    store_id = open_store(Location(old_store))
    assert store_id == "01a22d46-0000-7000-8000-000000000001"
    assert schema_of(old_store) == schema_of(new)
    assert open_store(Location(old_store)) == store_id


KILLED = """
import os, signal, sys
from pathlib import Path
from alembic import op
from ditto.store.connection import Location, open_store

create = op.create_table
def create_and_die(*args, **named):
    create(*args, **named)
    os.kill(os.getpid(), signal.SIGKILL)
op.create_table = create_and_die
open_store(Location(Path(sys.argv[1])))
"""


def test_a_process_that_is_killed_during_the_migration_leaves_the_old_store(old_store: Path) -> None:
    before = schema_of(old_store)
    died = subprocess.run([sys.executable, "-c", KILLED, str(old_store)], check=False)
    assert died.returncode == -9
    assert schema_of(old_store) == before
    assert version_of(old_store) == "1"
    open_store(Location(old_store))
    assert version_of(old_store) == str(SCHEMA_VERSION)


def test_alembic_is_loaded_only_for_an_older_store(old_store: Path, tmp_path: Path) -> None:
    probe = (
        "import sys; from pathlib import Path; from ditto.store.connection import Location, open_store;"
        "open_store(Location(Path(sys.argv[1]))); print('alembic' in sys.modules)"
    )

    def loads_alembic(path: Path) -> str:
        return subprocess.run(
            [sys.executable, "-c", probe, str(path)], check=True, capture_output=True, text=True
        ).stdout.strip()

    assert loads_alembic(tmp_path / "new.db") == "False"
    assert loads_alembic(old_store) == "True"
    assert loads_alembic(old_store) == "False"
