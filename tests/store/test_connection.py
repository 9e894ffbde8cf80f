"""Connections: what a store's file is made with, what is refused by name, and what SQLite's locks ask of a process."""

from __future__ import annotations

import os
import sqlite3
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ditto.errors import (
    StoreBusyError,
    StoreDamagedError,
    StoreError,
    StoreForeignError,
    StoreSchemaError,
)
from ditto.store import queries
from ditto.store.connection import Driver, Location, connect, driver_errors, open_store
from ditto.store.schema import APPLICATION_ID, SCHEMA_VERSION
from tests.processes import Child
from tests.store.faults import LOCKED, sqlite_error

StartChild = Callable[..., Child]


def make_database(path: Path, *statements: str) -> bytes:
    """A database that is not ours; returns its bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        for statement in statements:
            db.execute(statement)
    return path.read_bytes()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# A new store


def test_a_new_folder_and_file_are_the_owners_alone(store_path: Path) -> None:
    before = os.umask(0)
    try:
        open_store(Location(store_path))
        with closing(connect(Location(store_path))) as db:
            db.execute("CREATE TABLE mine (x)")
            assert mode(store_path.parent) == 0o700
            assert {path.name: mode(path) for path in store_path.parent.iterdir()} == {
                "ditto.db": 0o600,
                "ditto.db-wal": 0o600,
                "ditto.db-shm": 0o600,
            }
    finally:
        os.umask(before)


def test_an_existing_folder_keeps_its_mode(store_path: Path) -> None:
    store_path.parent.mkdir(mode=0o755)
    open_store(Location(store_path))
    assert mode(store_path.parent) == 0o755


def test_a_store_keeps_its_id(store_path: Path) -> None:
    first = open_store(Location(store_path))
    assert open_store(Location(store_path)) == first
    assert open_store(Location(store_path.with_name("other.db"))) != first


@pytest.mark.parametrize("name", ["a b.db", "100%.db", "what?.db", "x#y.db", "naïve-\U0001f378.db", "file:x?mode=ro"])
def test_a_path_is_a_path_whatever_is_in_it(store_path: Path, name: str) -> None:
    location = Location(store_path.with_name(name))
    open_store(location)
    connect(location).close()
    assert [path.name for path in store_path.parent.iterdir()] == [name]


def test_a_link_to_nothing_yet_is_followed(store_path: Path) -> None:
    store_path.parent.mkdir()
    link = store_path.with_name("link.db")
    link.symlink_to(store_path)
    assert open_store(Location(link)) == open_store(Location(store_path))
    assert mode(store_path) == 0o600


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize(("synchronous", "level"), [("full", 2), ("normal", 1)])
def test_i04_every_connection_has_the_settings(store_path: Path, synchronous: str, level: int, read_only: bool) -> None:
    location = Location(store_path, synchronous, busy_timeout_s=1.25)
    open_store(location)
    for _ in range(2):
        with closing(connect(location, read_only=read_only)) as db:
            found = {
                name: db.execute(f"PRAGMA {name}").fetchone()[0]
                for name in ("journal_mode", "synchronous", "busy_timeout", "foreign_keys", "query_only")
            }
            assert found == {
                "journal_mode": "wal",
                "synchronous": level,
                "busy_timeout": 1250,
                "foreign_keys": 1,
                "query_only": int(read_only),
            }
            assert db.isolation_level is None
            assert not db.in_transaction


def test_a_reading_connection_cannot_write(store_path: Path) -> None:
    open_store(Location(store_path))
    with closing(connect(Location(store_path), read_only=True)) as db, pytest.raises(sqlite3.OperationalError):
        db.execute("DELETE FROM ditto_meta")


def test_a_connection_never_makes_a_file(store_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot be opened"):
        connect(Location(store_path))
    store_path.parent.mkdir()
    with pytest.raises(StoreError, match="cannot be opened"):
        connect(Location(store_path))
    assert list(store_path.parent.iterdir()) == []


# What is refused, and left as it is


@pytest.mark.parametrize("content", [b"x", b"no database", b"y" * 511, b"y" * 100_000, b"SQLite format 2\x00" * 64])
def test_a_file_that_is_no_sqlite_is_refused_and_not_touched(store_path: Path, content: bytes) -> None:
    store_path.parent.mkdir()
    store_path.write_bytes(content)
    with pytest.raises(StoreForeignError, match="is no SQLite database; choose another path") as refused:
        open_store(Location(store_path))
    assert refused.value.code == "store.foreign"
    assert store_path.read_bytes() == content
    assert list(store_path.parent.iterdir()) == [store_path]


def test_another_applications_database_is_refused_and_not_touched(store_path: Path) -> None:
    before = make_database(store_path, "PRAGMA application_id=252006673", "CREATE TABLE theirs (x)")
    with pytest.raises(StoreForeignError, match=r"another application \(id 252006673\); choose another path"):
        open_store(Location(store_path))
    assert store_path.read_bytes() == before, "not even its journal mode"


def test_a_newer_schema_is_refused_and_not_touched(store_path: Path) -> None:
    open_store(Location(store_path))
    with closing(sqlite3.connect(store_path, isolation_level=None)) as db:
        db.execute("UPDATE ditto_meta SET value=? WHERE name='schema_version'", [str(SCHEMA_VERSION + 1)])
    before = store_path.read_bytes()
    with pytest.raises(StoreSchemaError, match=rf"schema {SCHEMA_VERSION + 1}, .* upgrade ditto-runtime") as refused:
        open_store(Location(store_path))
    assert refused.value.code == "store.schema"
    assert store_path.read_bytes() == before


@pytest.mark.parametrize("version", [None, "", "two", "²", "-1", "1.0"])
def test_a_meta_table_without_a_version_is_no_store(store_path: Path, version: str | None) -> None:
    make_database(store_path, "CREATE TABLE ditto_meta (name TEXT PRIMARY KEY, value TEXT)")
    if version is not None:
        with closing(sqlite3.connect(store_path, isolation_level=None)) as db:
            db.execute("INSERT INTO ditto_meta VALUES ('schema_version', ?)", [version])
    with pytest.raises(StoreForeignError, match="no schema version"):
        open_store(Location(store_path))


def test_a_store_that_lost_its_id_is_damaged(store_path: Path) -> None:
    open_store(Location(store_path))
    with closing(sqlite3.connect(store_path, isolation_level=None)) as db:
        db.execute("DELETE FROM ditto_meta WHERE name='store_id'")
    with pytest.raises(StoreDamagedError, match="restore a backup"):
        open_store(Location(store_path))


def test_other_peoples_tables_are_welcome(store_path: Path) -> None:
    make_database(store_path, "CREATE TABLE orders (id)", "INSERT INTO orders VALUES (7)", "CREATE VIEW v AS SELECT 1")
    store_id = open_store(Location(store_path))
    assert open_store(Location(store_path)) == store_id
    with closing(connect(Location(store_path))) as db:
        assert db.execute("SELECT id FROM orders").fetchall() == [(7,)]
        assert db.execute("PRAGMA application_id").fetchone() == (APPLICATION_ID,)


def test_a_schema_that_cannot_be_laid_out_leaves_nothing_behind(store_path: Path) -> None:
    make_database(store_path, "CREATE TABLE ditto_steps (theirs)")
    with pytest.raises(StoreError, match="ditto_steps already exists"):
        open_store(Location(store_path))
    with closing(sqlite3.connect(store_path)) as db:
        assert db.execute("SELECT name FROM sqlite_master").fetchall() == [("ditto_steps",)]
        assert db.execute("PRAGMA application_id").fetchone() == (0,)


def test_a_damaged_file_is_named_when_it_is_used(store_path: Path) -> None:
    open_store(Location(store_path))
    with closing(connect(Location(store_path))) as db:
        page = db.execute("PRAGMA page_size").fetchone()[0]
        db.execute("CREATE TABLE filler (x)")
        db.executemany("INSERT INTO filler VALUES (?)", [("x" * page,)] * 50)
    content = store_path.read_bytes()
    store_path.write_bytes(content[:page] + b"\xff" * (len(content) - page))
    with pytest.raises(StoreDamagedError, match="is damaged") as damaged:
        open_store(Location(store_path))
    assert damaged.value.code == "store.damaged"
    assert "restore a backup" in str(damaged.value)

    # The tables are found, and what is in them is not.
    store_path.write_bytes(content[: 2 * page] + b"\xff" * (len(content) - 2 * page))
    with pytest.raises(StoreDamagedError), driver_errors(store_path), closing(connect(Location(store_path))) as db:
        queries.get_run(db, "any")
        db.execute("SELECT * FROM filler").fetchall()


def test_a_truncated_file_is_damaged(store_path: Path) -> None:
    open_store(Location(store_path))
    with closing(connect(Location(store_path))) as db:
        page = db.execute("PRAGMA page_size").fetchone()[0]
    store_path.write_bytes(store_path.read_bytes()[: 3 * page])
    with pytest.raises(StoreDamagedError), driver_errors(store_path), closing(connect(Location(store_path))) as db:
        db.execute("PRAGMA quick_check").fetchall()
        queries.get_run(db, "any")


@pytest.mark.parametrize(
    ("kind", "refused"),
    [
        ("nfs4", True),
        ("nfs", True),
        ("cifs", True),
        ("fuse.sshfs", True),
        ("9p", True),
        ("ext4", False),
        ("zfs", False),
    ],
)
@pytest.mark.parametrize("folder", ["on the share", "on the share/deeper"])
def test_a_network_file_system_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, refused: bool, folder: str
) -> None:
    share = str(tmp_path / "on the share").replace(" ", "\\040")
    mounts = tmp_path / "mounts"
    mounts.write_text(f"rootfs / ext4 rw 0 0\nhost:/x {share} {kind} rw 0 0\nother {tmp_path}/on nfs rw 0 0\n")
    monkeypatch.setattr("ditto.store.connection._MOUNTS", mounts)
    path = tmp_path / folder / "ditto.db"
    if not refused:
        assert open_store(Location(path))
        return
    with pytest.raises(StoreError, match=rf"is a network file system \({kind}\), .*; use a local disk"):
        open_store(Location(path))
    assert not path.parent.exists(), "nothing was made there"


# Files that cannot be written. Root may write everything, so a child gives its rights away.


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user may enter."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


OPEN = """
import os, sys
from pathlib import Path
from ditto.errors import StoreError
from ditto.store.connection import Location, connect, open_store
if os.getuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
try:
    open_store(Location(Path(sys.argv[1])))
    print("opened")
except StoreError as error:
    print(f"{error.code}: {error}")
"""


@pytest.mark.parametrize("wal", [False, True])
def test_a_read_only_file_is_named(open_folder: Path, start_child: StartChild, wal: bool) -> None:
    path = open_folder / "ditto.db"
    open_store(Location(path))
    if not wal:
        with closing(sqlite3.connect(path)) as db:
            db.execute("PRAGMA journal_mode=DELETE")
    path.chmod(0o444)
    assert start_child(OPEN, path).line() == (
        f"store.readonly: {path}: the file cannot be written; check its owner and mode"
    )


def test_a_read_only_folder_is_named(open_folder: Path, start_child: StartChild) -> None:
    path = open_folder / "ditto.db"
    open_folder.chmod(0o555)
    assert start_child(OPEN, path).line() == (
        f"store.readonly: {path}: cannot be opened for writing (Permission denied)"
    )
    open_store(Location(path))
    path.chmod(0o666)
    said = start_child(OPEN, path).line()
    assert said.startswith("store")
    assert "check the folder and its mode" in said or "check its owner and mode" in said
    open_folder.chmod(0o755)


def test_a_folder_in_the_place_of_the_file_is_named(store_path: Path) -> None:
    store_path.mkdir(parents=True)
    with pytest.raises(StoreError, match="cannot be opened"):
        open_store(Location(store_path))


def test_a_file_in_the_place_of_the_folder_is_named(store_path: Path) -> None:
    store_path.parent.write_text("x")
    with pytest.raises(StoreError, match="cannot be opened for writing"):
        open_store(Location(store_path))


# More than one at a time

OPEN_TOGETHER = """
import os, sys, threading
from pathlib import Path
from ditto.errors import DittoError
from ditto.store.connection import Location, connect, open_store

folder, processes, threads, rounds = Path(sys.argv[1]), *map(int, sys.argv[2:])

def child(number, go, done):
    for turn in range(rounds):
        os.read(go, 1)
        path, said = folder / str(turn) / "ditto.db", []
        def work():
            try:
                said.append(open_store(Location(path)))
                connect(Location(path)).close()
            except BaseException as error:
                said.append(f"error: {error!r}")
        workers = [threading.Thread(target=work) for _ in range(threads)]
        for worker in workers: worker.start()
        for worker in workers: worker.join()
        os.write(done, ("\\n".join(said) + "\\n").encode())
    os._exit(0)

pipes = []
done, told = os.pipe()
for number in range(processes):
    listen, go = os.pipe()
    if os.fork() == 0:
        child(number, listen, told)
    pipes.append(go)
os.close(told)
results = os.fdopen(done)
for turn in range(rounds):
    for go in pipes: os.write(go, b"x")
    said = [results.readline().strip() for _ in range(processes * threads)]
    print(f"{len(said)} {' '.join(sorted(set(said)))}", flush=True)
"""


@pytest.mark.parametrize(("processes", "threads", "rounds"), [(20, 1, 10), (3, 8, 5)])
def test_i12_many_processes_and_threads_open_one_new_path_at_once(
    tmp_path: Path, start_child: StartChild, processes: int, threads: int, rounds: int
) -> None:
    code, said = start_child(OPEN_TOGETHER, tmp_path, processes, threads, rounds).end()
    assert code == 0
    assert len(said) == rounds
    for turn, line in enumerate(said):
        path = tmp_path / str(turn) / "ditto.db"
        assert line == f"{processes * threads} {open_store(Location(path))}"
        with closing(connect(Location(path))) as db:
            assert db.execute("SELECT count(*) FROM ditto_meta WHERE name='schema_version'").fetchone() == (1,)
            assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)


class Switching(Driver):
    """Another process switches the file to WAL at the same moment: SQLite refuses at once, again and again."""

    refusals = 3

    def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
        if sql == "PRAGMA journal_mode=WAL" and Switching.refusals:
            Switching.refusals -= 1
            raise sqlite_error(LOCKED)
        return super().execute(sql, parameters)


def test_i12_a_switch_to_wal_that_is_refused_at_once_is_tried_again(
    store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ditto.store.connection.Driver", Switching)
    assert open_store(Location(store_path))
    assert Switching.refusals == 0
    monkeypatch.setattr(Switching, "refusals", 10**9)
    with pytest.raises(StoreBusyError):
        connect(Location(store_path, busy_timeout_s=0.01))


OPEN_AND_BE_KILLED = """
import os, signal, sys
from pathlib import Path
from ditto.store.connection import Location, open_store

folder, rounds = Path(sys.argv[1]), int(sys.argv[2])
for turn in range(rounds):
    path, listen, children = folder / str(turn) / "ditto.db", os.pipe(), []
    for number in range(8):
        child = os.fork()
        if child == 0:
            os.read(listen[0], 1)
            open_store(Location(path))
            os._exit(0)
        children.append(child)
    os.write(listen[1], b"x" * 8)
    for child in children[turn % 4 :: 2]: os.kill(child, signal.SIGKILL)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    print(sorted(set(codes) - {0, -signal.SIGKILL}), open_store(Location(path)), flush=True)
"""


def test_i12_processes_killed_while_they_open_a_new_path_leave_no_trouble(
    tmp_path: Path, start_child: StartChild
) -> None:
    code, said = start_child(OPEN_AND_BE_KILLED, tmp_path, 12).end()
    assert code == 0
    for turn in range(12):
        path = tmp_path / str(turn) / "ditto.db"
        assert said[turn] == f"[] {open_store(Location(path))}"
        with closing(connect(Location(path))) as db:
            assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)


OPEN_AND_CLOSE = """
import sqlite3, sys
db = sqlite3.connect(sys.argv[1], isolation_level=None)
for statement in sys.argv[2:]:
    print(db.execute(statement).fetchall(), flush=True)
db.close()
print("closed", flush=True)
"""


def test_opening_a_store_again_does_not_drop_the_locks_of_this_process(
    store_path: Path, start_child: StartChild
) -> None:
    open_store(Location(store_path))
    with closing(connect(Location(store_path))) as first:
        first.execute("CREATE TABLE mine (x)")
        open_store(Location(store_path))
        connect(Location(store_path)).close()
        # Without our lock on the file, this process would take itself for the last one, and delete the WAL.
        start_child(OPEN_AND_CLOSE, store_path, "SELECT 1").end()
        first.execute("INSERT INTO mine VALUES (1)")
        assert store_path.with_name("ditto.db-wal").exists()
        assert start_child(OPEN_AND_CLOSE, store_path, "SELECT x FROM mine").line() == "[(1,)]"


def test_a_new_store_waits_for_a_foreign_lock_and_then_says_so(store_path: Path) -> None:
    make_database(store_path, "CREATE TABLE theirs (x)", "PRAGMA journal_mode=WAL")
    with closing(sqlite3.connect(store_path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreBusyError, match=r"store\.busy_timeout_s; nothing was written, run again") as busy:
            open_store(Location(store_path, busy_timeout_s=0.01))
        assert busy.value.retryable
        other.execute("ROLLBACK")
    assert open_store(Location(store_path))


FORK = """
import os, sys
from pathlib import Path
from ditto.errors import StoreError
from ditto.store.connection import Location, connect, open_store

store = Location(Path(sys.argv[1]))
other = Location(store.path.with_name("other.db"))
open_store(store)
db = connect(store)

def in_child(what):
    if os.fork() == 0:
        try:
            what()
        except StoreError as error:
            print(f"{error.code}: {error}", flush=True)
        os._exit(0)
    assert os.wait()[1] == 0

in_child(lambda: open_store(store))
in_child(lambda: connect(store, read_only=True))
in_child(lambda: in_child(lambda: open_store(store)))
in_child(lambda: print("other", len(open_store(other)), flush=True))
db.close()
in_child(lambda: print("closed before", len(open_store(store)), flush=True))
"""


def test_i09_a_forked_child_may_not_open_what_its_parent_had_open(store_path: Path, start_child: StartChild) -> None:
    code, said = start_child(FORK, store_path).end()
    assert code == 0
    refused = (
        f"store.forked: {store_path}: this process was forked while its parent had the store open, and SQLite's locks "
        "do not survive that; start the child with 'spawn', or fork before the store is opened"
    )
    assert said == [refused, refused, refused, "other 36", "closed before 36"]
