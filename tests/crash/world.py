"""What is outside in the crash tests: a service with a small SQLite file of its own, which survives every kill."""

from __future__ import annotations

import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path


class World:
    """Counts every call, by kind and key. Each call is durable when it returns."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with closing(self._connect()) as db:
            db.execute("CREATE TABLE IF NOT EXISTS calls (kind TEXT NOT NULL, key TEXT NOT NULL)")

    def act(self, kind: str, key: str) -> str:
        """Do it, and answer with what a repetition under the same key would answer, too."""
        with closing(self._connect()) as db:
            db.execute("INSERT INTO calls VALUES (?, ?)", (kind, key))
        return f"{kind} {key}"

    def has(self, kind: str, key: str) -> bool:
        """Whether it was done."""
        return self.calls()[kind, key] > 0

    def has_key(self, key: str) -> bool:
        """Whether anything was done under that key."""
        return any(each == key for _, each in self.calls())

    def calls(self) -> Counter[tuple[str, str]]:
        """How often each was done."""
        with closing(self._connect()) as db:
            return Counter((kind, key) for kind, key in db.execute("SELECT kind, key FROM calls"))

    def _connect(self) -> sqlite3.Connection:
        db = sqlite3.connect(self._path, timeout=30, isolation_level=None)
        db.execute("PRAGMA synchronous=OFF")  # processes are killed here, not machines
        return db
