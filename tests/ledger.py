"""A ledger: a small HTTP service in a process of its own, with a file of its own. It outlives every kill of the engine.

POST /<key>   with a JSON body: applied once for each key, counted every time; answers {"receipt": n}
GET /<key>    {"receipt": n}, or 404
GET /         {key: [how often it was asked for, its body]}
"""

from __future__ import annotations

import json
import sqlite3
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import unquote

SOURCE: Final = "import sys; from tests.ledger import serve; serve(sys.argv[1])"


class _Ledger:
    def __init__(self, path: str) -> None:
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA synchronous=OFF")
        self._db.execute("CREATE TABLE IF NOT EXISTS posts (key TEXT PRIMARY KEY, body TEXT, count INTEGER)")
        self._lock = threading.Lock()

    def post(self, key: str, body: str) -> dict[str, int]:
        with self._lock:
            self._db.execute(
                "INSERT INTO posts VALUES (?, ?, 1) ON CONFLICT (key) DO UPDATE SET count = count + 1", (key, body)
            )
        found = self.get(key)
        assert found is not None
        return found

    def get(self, key: str) -> dict[str, int] | None:
        with self._lock:
            row = self._db.execute("SELECT rowid FROM posts WHERE key = ?", (key,)).fetchone()
        return None if row is None else {"receipt": row[0]}

    def all(self) -> dict[str, Any]:
        with self._lock:
            rows = self._db.execute("SELECT key, count, body FROM posts").fetchall()
        return {key: [count, json.loads(body)] for key, count, body in rows}


def serve(path: str) -> None:
    """Print the port, then serve until standard input ends."""
    ledger = _Ledger(path)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            self._answer(ledger.post(self._key, body))

        def do_GET(self) -> None:
            self._answer(ledger.get(self._key) if self._key else ledger.all())

        @property
        def _key(self) -> str:
            return unquote(self.path.removeprefix("/"))

        def _answer(self, value: Any) -> None:
            text = json.dumps(value).encode()
            self.send_response(404 if value is None else 200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: Any) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdout.write(f"{server.server_port}\n")
    sys.stdout.flush()
    sys.stdin.read()
