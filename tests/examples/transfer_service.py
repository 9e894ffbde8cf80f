"""A bank for the transfers of the tests: a real HTTP server on loopback, with a ledger that outlives it.

It keeps the contract of the recovery workflows (a unique operation ledger, pending before work, look-up by key,
parameters bound to the key, four states) under names and routes of its own:

    GET  /funds/core?account=   /funds/mirror?account=    200 {account, funds}; 404; 503
    GET  /operations/<key>                                200 absent or committed; 202 pending; 422 rejected
    POST /operations/<key>  {kind, transfer}              200 committed; 422 rejected; 409 bound to something else; 503

`effects` is what was done, in order. Start at `TransferService._submit`.
"""

from __future__ import annotations

import hashlib
import json
import socket
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Self, cast

import anyio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ditto.testing.provider_http import ProviderServer

HELD: Final = "(held)"
"""The account of what is on hold."""

MOVES: Final[Mapping[str, tuple[int, int, int]]] = {
    "register": (0, 0, 0),
    "unregister": (0, 0, 0),
    "hold": (-1, 1, 0),
    "void": (1, -1, 0),
    "announce": (0, 0, 0),
    "retract": (0, 0, 0),
    "capture": (0, -1, 1),
    "reverse": (0, 1, -1),
}
"""What each kind does to the payer, to what is on hold, and to the payee, in amounts."""

_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS accounts (name TEXT PRIMARY KEY, funds INTEGER NOT NULL CHECK (funds >= 0));
CREATE TABLE IF NOT EXISTS operations (
    key TEXT PRIMARY KEY, kind TEXT NOT NULL, transfer TEXT NOT NULL, fingerprint TEXT NOT NULL, state TEXT NOT NULL,
    receipt TEXT, reason TEXT
);
CREATE TABLE IF NOT EXISTS effects (
    seq INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE REFERENCES operations (key), kind TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS requests (seq INTEGER PRIMARY KEY, method TEXT NOT NULL, path TEXT NOT NULL, body TEXT);
"""


@dataclass(frozen=True, slots=True)
class TransferFaults:
    """The setup of an experiment; never part of the protocol.

    down: sources that answer 503. stalled: no source ever answers. rejected: kinds that are recorded as rejected.
    dropped: kinds that are carried out, and then the connection is closed. refused: how many submissions of a kind are
    answered 503 before anything is done, counted in the ledger.
    """

    down: tuple[str, ...] = ()
    stalled: bool = False
    rejected: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    refused: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> TransferFaults:
        given: dict[str, Any] = {name: tuple(each) if isinstance(each, list) else each for name, each in value.items()}
        return cls(**given)


def fingerprint(kind: str, transfer: Mapping[str, Any]) -> str:
    """Binds what is asked for."""
    return hashlib.sha256(json.dumps([kind, dict(transfer)], sort_keys=True).encode()).hexdigest()


def read_bank(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Every table of the ledger, by a connection of its own."""
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as ledger:
        ledger.row_factory = sqlite3.Row
        return {
            table: [dict(row) for row in ledger.execute(f"SELECT * FROM {table} ORDER BY rowid")]
            for table in ("accounts", "operations", "effects", "requests")
        }


class TransferService:
    """The bank on 127.0.0.1, as an async context manager; `accounts` are the funds of accounts it does not have yet."""

    def __init__(self, path: Path, accounts: Mapping[str, int], *, faults: TransferFaults | None = None) -> None:
        self.path: Final = path
        self.faults = faults or TransferFaults()
        self.url = ""
        self._accounts: Final = {**accounts, HELD: 0}
        self._server = ProviderServer(cast(Any, self._build_routes()))

    async def __aenter__(self) -> Self:
        self._ledger = sqlite3.connect(self.path, isolation_level=None, timeout=10)
        self._ledger.execute("PRAGMA journal_mode = WAL")
        self._ledger.executescript(_SCHEMA)
        self._ledger.executemany("INSERT OR IGNORE INTO accounts VALUES (?, ?)", self._accounts.items())
        for (key,) in self._ledger.execute("SELECT key FROM operations WHERE state = 'pending'").fetchall():
            self._settle(key)  # what a bank that was killed had begun
        bound = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        await self._server.start(bound)
        return self

    async def __aexit__(self, *_: object) -> None:
        with anyio.CancelScope(shield=True):
            await self._server.stop()
        self._ledger.close()

    # --- HTTP --------------------------------------------------------------------------------------------------------

    def _build_routes(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/funds/{source}", self._get_funds, methods=["GET"]),
                Route("/operations/{key}", self._get_operation, methods=["GET"]),
                Route("/operations/{key}", self._submit, methods=["POST"]),
            ]
        )

    async def _get_funds(self, request: Request) -> Response:
        await self._note(request)
        if self.faults.stalled:
            await _disconnected(request)
        if request.path_params["source"] in self.faults.down:
            return JSONResponse({"error": "this source is down"}, 503)
        account = request.query_params["account"]
        row = self._ledger.execute("SELECT funds FROM accounts WHERE name = ?", (account,)).fetchone()
        return JSONResponse(
            {"account": account, "funds": row[0]} if row else {"error": "no account"}, 200 if row else 404
        )

    async def _get_operation(self, request: Request) -> Response:
        await self._note(request)
        return self._answer(request.path_params["key"])

    async def _submit(self, request: Request) -> Response:
        asked = json.loads(await self._note(request))
        key, kind, transfer = request.path_params["key"], asked["kind"], asked["transfer"]
        if self._is_refused(key, kind):
            return JSONResponse({"error": "not now"}, 503)
        bound = fingerprint(kind, transfer)
        # Pending is on disk before any work begins; a key that is taken stays what it is.
        self._ledger.execute(
            "INSERT INTO operations (key, kind, transfer, fingerprint, state) VALUES (?, ?, ?, ?, 'pending')"
            " ON CONFLICT (key) DO NOTHING",
            (key, kind, json.dumps(transfer), bound),
        )
        if self._get(key)["fingerprint"] != bound:
            return JSONResponse({"error": f"{key} is bound to something else"}, 409)
        self._settle(key)
        if kind in self.faults.dropped:
            request.scope["state"]["transport"].abort()
            await _disconnected(request)
        return self._answer(key)

    async def _note(self, request: Request) -> str:
        body = (await request.body()).decode()
        row = (request.method, request.url.path, body)
        self._ledger.execute("INSERT INTO requests (method, path, body) VALUES (?, ?, ?)", row)
        return body

    def _is_refused(self, key: str, kind: str) -> bool:
        asked = "SELECT count(*) FROM requests WHERE method = 'POST' AND path = ?"
        count: int = self._ledger.execute(asked, (f"/operations/{key}",)).fetchone()[0]
        return count <= self.faults.refused.get(kind, 0)

    def _answer(self, key: str) -> Response:
        found = self._get(key)
        status = {"absent": 200, "pending": 202, "committed": 200, "rejected": 422}[found["state"]]
        return JSONResponse(found, status)

    # --- ledger ------------------------------------------------------------------------------------------------------

    def _get(self, key: str) -> dict[str, Any]:
        row = self._ledger.execute(
            "SELECT kind, fingerprint, state, receipt, reason FROM operations WHERE key = ?", (key,)
        ).fetchone()
        if row is None:
            return {"key": key, "state": "absent"}
        return {"key": key, **dict(zip(("kind", "fingerprint", "state", "receipt", "reason"), row, strict=True))}

    def _settle(self, key: str) -> None:
        """pending → committed, with the effect in the same transaction, or rejected. What is settled stays as it is."""
        with self._transaction():
            found = self._get(key)
            if found["state"] != "pending":
                return
            kind = found["kind"]
            asked = self._ledger.execute("SELECT transfer FROM operations WHERE key = ?", (key,)).fetchone()[0]
            transfer = json.loads(asked)
            reason = self._refusal(kind, transfer)
            state, receipt = ("rejected", None) if reason else ("committed", f"receipt-{key}")
            self._ledger.execute(
                "UPDATE operations SET state = ?, receipt = ?, reason = ? WHERE key = ?", (state, receipt, reason, key)
            )
            if reason is None:
                self._ledger.execute("INSERT INTO effects (key, kind) VALUES (?, ?)", (key, kind))
                for account, times in zip((transfer["from"], HELD, transfer["to"]), MOVES[kind], strict=True):
                    self._ledger.execute(
                        "UPDATE accounts SET funds = funds + ? WHERE name = ?", (times * transfer["amount"], account)
                    )

    def _refusal(self, kind: str, transfer: Mapping[str, Any]) -> str | None:
        if kind in self.faults.rejected:
            return f"the bank does not {kind} this"
        row = self._ledger.execute("SELECT funds FROM accounts WHERE name = ?", (transfer["from"],)).fetchone()
        if kind == "hold" and (row is None or row[0] < transfer["amount"]):
            return "there is not enough on the account"
        return None

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._ledger.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._ledger.execute("COMMIT")
        finally:
            if self._ledger.in_transaction:
                self._ledger.execute("ROLLBACK")


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
