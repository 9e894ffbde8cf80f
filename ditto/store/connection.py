"""Connections: how a store's file is opened, checked and, on first use, laid out.

Every connection has the same settings: WAL, the configured `synchronous`, a busy timeout, foreign keys, and the
driver's implicit transactions off. Nothing is written to a file before it is known to be ours.

SQLite's locks on a file belong to the process. So this module opens an existing file through SQLite only: closing any
other descriptor of it would drop the locks of the connections that are open already, and another process could then
delete the WAL under them (sqlite.org/howtocorrupt.html, 2.2). And a forked child, whose SQLite believes in locks that
only its parent has, may not open a file that the parent had open (the same page, 2.6).
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import uuid_utils
from sqlalchemy.dialects import sqlite
from sqlalchemy.schema import CreateIndex, CreateTable

from ditto.errors import StoreDamagedError, StoreError, StoreForeignError, StoreSchemaError
from ditto.store import statements as sql
from ditto.store.faults import store_error
from ditto.store.schema import APPLICATION_ID, SCHEMA_VERSION, metadata

_PAGE_BYTES_MIN: Final = 512
"""No database is shorter. SQLite takes a file of one byte for an empty one, and would overwrite it."""

_MOUNTS: Final = Path("/proc/self/mounts")
_NETWORK_FILE_SYSTEMS: Final = ("nfs", "cifs", "smb", "9p", "fuse.sshfs", "glusterfs", "ceph", "lustre", "afs")


@dataclass(frozen=True, slots=True)
class Location:
    """Where a store is, and how its file is opened."""

    path: Path
    synchronous: str = "full"
    busy_timeout_s: float = 10.0


class Driver(sqlite3.Connection):
    """The driver's connection. `guarded` is set while a user's function works in a transaction of ours."""

    guarded = False
    file: tuple[int, int] | None = None
    """Device and inode while it is open."""

    def close(self) -> None:
        """Close it. Safe to call twice."""
        self.file = None
        super().close()

    def commit(self) -> None:
        """Refused: transactions belong to the committer, which runs its own BEGIN and COMMIT."""
        raise StoreError("a local handler must not commit: its writes are committed together with its step")

    def rollback(self) -> None:
        """Refused in a user's function; nothing else ever asks for it through the driver."""
        if self.guarded:
            raise StoreError("a local handler must not roll back: raise an exception, and its writes are undone")


_connections: Final[weakref.WeakSet[Driver]] = weakref.WeakSet()
_inherited: Final[set[tuple[int, int]]] = set()
"""Files that were open when this process was forked off."""

_creating = threading.Lock()


def connect(location: Location, *, read_only: bool = False, mode: Literal["rw", "ro"] = "rw") -> Driver:
    """A connection with the store's settings to a file that exists, opened in this mode of SQLite's. Raises StoreError.

    A `read_only` connection does not write; but the last one to be closed brings a WAL back into the file, unless it
    was opened in mode `ro`.
    """
    path = location.path
    with driver_errors(path):
        db = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode={mode}",
            uri=True,
            timeout=location.busy_timeout_s,
            isolation_level=None,
            check_same_thread=False,
            factory=Driver,
        )
        try:
            db.file = _identify(path)
            _connections.add(db)
            db.execute("PRAGMA foreign_keys=ON")
            db.execute(f"PRAGMA synchronous={'FULL' if location.synchronous == 'full' else 'NORMAL'}")
            _check_header(db, path)
            if read_only:
                db.execute("PRAGMA query_only=ON")
            elif _switch_to_wal(db, location.busy_timeout_s) != "wal":
                raise StoreError(f"{path}: the file system does not allow SQLite's WAL; choose a local disk")
        except BaseException:
            db.close()
            raise
    return db


def _switch_to_wal(db: Driver, timeout_s: float) -> str:
    """Returns the journal mode that the file has now.

    While another process switches it, SQLite refuses at once, whatever the busy timeout: so it is tried again.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            mode: str = db.execute("PRAGMA journal_mode=WAL").fetchone()[0]
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.005)
        else:
            return mode


def open_store(location: Location) -> str:
    """Check the file, lay it out if it is new, and return the store's id. Refuses what is not ours, by name.

    A new folder gets mode 0700, a new file 0600. A file without ditto's tables, other people's tables or none in it,
    gets them in one transaction, so that processes that start at once agree. A store of an older schema is upgraded, in
    one transaction, too.
    """
    path = location.path
    _refuse_network_file_system(path)
    _create_file(path)
    with closing(connect(location)) as db, driver_errors(path):
        if _check_header(db, path) == SCHEMA_VERSION:
            return _store_id(db)
        db.execute("BEGIN IMMEDIATE")
        try:
            found = _check_header(db, path)
            if found == 0:
                _lay_out(db)
            elif found < SCHEMA_VERSION:
                _upgrade(db, found)
            store_id = _store_id(db)
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise
        return store_id


def check_is_store(location: Location) -> None:
    """Look whether the file is a store of ditto. Neither the file nor what lies beside it is altered.

    Raises StoreForeignError for any other file, StoreSchemaError for a newer store, StoreError.
    """
    path = location.path
    real = path.resolve()
    # What a process that died has left beside the file is not ours to bring back into it; and only in mode `rw` does
    # SQLite remove again what it makes beside a file that has nothing there.
    left = any(real.with_name(real.name + end).exists() for end in ("-wal", "-journal"))
    with closing(connect(location, read_only=True, mode="ro" if left else "rw")) as db, driver_errors(path):
        if _check_header(db, path) == 0:
            raise StoreForeignError(f"{path}: there is no store of ditto in this file; choose another path")


def _create_file(path: Path) -> None:
    """Make folder and file if they are new; refuse what can be told without opening an existing file."""
    try:
        real = path.resolve()
        real.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _creating:
            try:
                os.close(os.open(real, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            except FileExistsError:
                if 0 < real.stat().st_size < _PAGE_BYTES_MIN:
                    raise StoreForeignError(f"{path}: the file is no SQLite database; choose another path") from None
        writable = os.access(real, os.W_OK)
    except OSError as error:
        raise StoreError(f"{path}: cannot be opened for writing ({error.strerror})", code="store.readonly") from None
    if not writable:
        raise StoreError(f"{path}: the file cannot be written; check its owner and mode", code="store.readonly")


def _identify(path: Path) -> tuple[int, int]:
    """Device and inode of a file. Raises StoreError if it was open when this process was forked off."""
    try:
        status = path.stat()
    except OSError as error:
        raise StoreError(f"{path}: the file is gone ({error.strerror})") from None
    file = (status.st_dev, status.st_ino)
    if file in _inherited:
        raise StoreError(
            f"{path}: this process was forked while its parent had the store open, and SQLite's locks do not survive "
            "that; start the child with 'spawn', or fork before the store is opened",
            code="store.forked",
        )
    return file


def _after_fork() -> None:
    global _creating
    _creating = threading.Lock()
    _inherited.update(db.file for db in _connections if db.file is not None)


os.register_at_fork(after_in_child=_after_fork)


@contextmanager
def driver_errors(path: Path) -> Iterator[None]:
    """Turn the driver's errors into the tree's."""
    try:
        yield
    except sqlite3.Error as error:
        raise store_error(error, path) from error


def _check_header(db: sqlite3.Connection, path: Path) -> int:
    """The schema of the store in the file, this one or an older one; 0 for a file that has no ditto tables yet."""
    application = db.execute("PRAGMA application_id").fetchone()[0]
    if application not in (0, APPLICATION_ID):
        raise StoreForeignError(
            f"{path}: the file belongs to another application (id {application}); choose another path"
        )
    if db.execute("SELECT 1 FROM sqlite_master WHERE type='table' AND name='ditto_meta'").fetchone() is None:
        return 0
    found = sql.GET_META(db, b_name="schema_version").fetchone()
    if found is None or not str(found[0]).isdecimal():
        raise StoreForeignError(f"{path}: its ditto_meta table has no schema version; the file is no store of ditto")
    if int(found[0]) > SCHEMA_VERSION:
        raise StoreSchemaError(
            f"{path}: the store has schema {found[0]}, this ditto knows up to {SCHEMA_VERSION}; upgrade ditto-runtime"
        )
    return int(found[0])


def _upgrade(db: Driver, found: int) -> None:
    """Bring an older store to this schema. Alembic is loaded here, and only here."""
    from ditto.store import migrations

    migrations.upgrade(db, found, SCHEMA_VERSION)
    sql.MOVE_META(db, b_name="schema_version", n_value=str(SCHEMA_VERSION))


def _lay_out(db: sqlite3.Connection) -> None:
    dialect = sqlite.dialect()
    for table in metadata.sorted_tables:
        db.execute(str(CreateTable(table).compile(dialect=dialect)))
        for index in sorted(table.indexes, key=lambda each: str(each.name)):
            db.execute(str(CreateIndex(index).compile(dialect=dialect)))
    sql.SET_META(db, name="schema_version", value=str(SCHEMA_VERSION))
    sql.SET_META(db, name="store_id", value=str(uuid_utils.uuid7()))
    db.execute(f"PRAGMA application_id={APPLICATION_ID}")


def _store_id(db: sqlite3.Connection) -> str:
    found = sql.GET_META(db, b_name="store_id").fetchone()
    if found is None:
        raise StoreDamagedError("the store has lost its id in ditto_meta; restore a backup")
    return str(found[0])


def _refuse_network_file_system(path: Path) -> None:
    """SQLite's WAL needs shared memory, which no network file system gives between machines."""
    if not _MOUNTS.exists():
        return
    real = path.resolve()
    best, kind = "", ""
    for line in _MOUNTS.read_text(errors="replace").splitlines():
        fields = line.split(" ")
        if len(fields) > 2 and len(fields[1]) >= len(best) and real.is_relative_to(fields[1].replace("\\040", " ")):
            best, kind = fields[1], fields[2]
    if kind.startswith(_NETWORK_FILE_SYSTEMS):
        raise StoreError(
            f"{path}: {best} is a network file system ({kind}), where SQLite's WAL is not safe; use a local disk"
        )
