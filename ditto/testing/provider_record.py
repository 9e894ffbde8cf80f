"""The scripted provider's record: every request, in one SQLite file that outlives any kill.

Owns the table `requests`; the row is on disk (WAL, `synchronous = FULL`) before a byte is answered, so that a count is
right after any SIGKILL. Owns the script's position too: it is read from the table in the same transaction, never from
memory. Of the headers only the names are stored, and of the address only the path: credentials may be in the rest.
Start at `RequestRecord.append`; `read_requests` reads the file from any process, at any time.
"""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

CHAT_PATHS: Final = ("/v1/chat/completions", "/chat/completions")
"""Where a model is asked. A POST here is what `count` counts."""

_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS requests (
    seq          INTEGER PRIMARY KEY,  -- 1, 2, 3, ... in the order of arrival
    method       TEXT NOT NULL,
    path         TEXT NOT NULL,        -- without the query
    body,                              -- text as it came; a blob if it is no UTF-8
    at           TEXT NOT NULL,        -- UTC, ISO 8601
    header_names TEXT NOT NULL,        -- JSON list; never a header's value
    script       TEXT,                 -- the script that was asked; NULL if none was
    conversation TEXT,
    script_step  INTEGER,              -- position in the script, from 0, within script and conversation
    refused      TEXT,                 -- why the script was not asked
    UNIQUE (script, conversation, script_step)
)
"""

_INSERT: Final = """
INSERT INTO requests (method, path, body, at, header_names, script, conversation, script_step, refused)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)
"""

_NEXT_STEP: Final = "SELECT coalesce(max(script_step) + 1, 0) FROM requests WHERE script = ? AND conversation = ?"


@dataclass(frozen=True, slots=True)
class Request:
    """One recorded request.

    `body` is the JSON object that was sent, or {} if it was none; `text` is what was sent. `script_step` is None, and
    `refused` says why, where the script was not asked.
    """

    seq: int
    method: str
    path: str
    body: dict[str, Any]
    text: str | bytes
    at: datetime
    header_names: tuple[str, ...]
    script: str | None
    conversation: str | None
    script_step: int | None
    refused: str | None

    @property
    def is_chat(self) -> bool:
        """It asked the model, whatever the answer was."""
        return self.method == "POST" and self.path in CHAT_PATHS


@dataclass(frozen=True, slots=True)
class Entry:
    """What `append` has made durable."""

    seq: int
    script_step: int | None
    at: datetime


class RequestRecord:
    """The writing end: one connection, used in the thread that made it."""

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(path, timeout=10, isolation_level=None)
        try:
            for statement in ("PRAGMA journal_mode = WAL", "PRAGMA synchronous = FULL", _SCHEMA):
                self._connection.execute(statement).close()
        except sqlite3.Error:
            self._connection.close()
            raise

    def append(
        self,
        *,
        method: str,
        path: str,
        body: bytes,
        header_names: tuple[str, ...],
        script: str | None = None,
        conversation: str = "",
        refused: str | None = None,
    ) -> Entry:
        """Records one request, durably, and takes the next step of `script` for it, in one transaction."""
        at = datetime.now(UTC)
        connection = self._connection
        connection.execute("BEGIN IMMEDIATE")
        try:
            step = None
            if script is not None:
                step = connection.execute(_NEXT_STEP, (script, conversation)).fetchone()[0]
            names = json.dumps(header_names)
            talk = None if script is None else conversation
            row = (method, path, _text(body), at.isoformat(), names, script, talk, step, refused)
            seq = connection.execute(_INSERT, row).lastrowid
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        assert seq is not None
        return Entry(seq, step, at)

    def close(self) -> None:
        """Closes the connection; the file stays."""
        self._connection.close()


def read_requests(path: str | Path) -> list[Request]:
    """Every recorded request, in the order of arrival; [] if the file does not exist yet."""
    if not Path(path).exists():
        return []
    with closing(sqlite3.connect(path, timeout=10)) as connection:
        rows = connection.execute(
            "SELECT seq, method, path, body, at, header_names, script, conversation, script_step, refused"
            " FROM requests ORDER BY seq"
        ).fetchall()
    return [
        Request(
            seq=seq,
            method=method,
            path=path,
            body=json_object(text) or {},
            text=text,
            at=datetime.fromisoformat(at),
            header_names=tuple(json.loads(names)),
            script=script,
            conversation=conversation,
            script_step=step,
            refused=refused,
        )
        for seq, method, path, text, at, names, script, conversation, step, refused in rows
    ]


def count_chat(path: str | Path) -> int:
    """How many recorded requests asked the model; 0 if the file does not exist yet."""
    if not Path(path).exists():
        return 0
    with closing(sqlite3.connect(path, timeout=10)) as connection:
        statement = "SELECT count(*) FROM requests WHERE method = 'POST' AND path IN (?, ?)"
        count: int = connection.execute(statement, CHAT_PATHS).fetchone()[0]
    return count


def json_object(text: str | bytes) -> dict[str, Any] | None:
    """The JSON object in a body, or None if it holds none."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _text(body: bytes) -> str | bytes:
    try:
        return body.decode()
    except UnicodeDecodeError:
        return body
