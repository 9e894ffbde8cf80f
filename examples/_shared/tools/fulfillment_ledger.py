"""The ledger of the reference fulfillment service: its words, its rules and its SQL.

Owns what an operation is (kinds, states, keys, the normal form of an order, the fingerprint), the business rules
(`decide_settlement`) and every statement on the service's SQLite file. Does not own HTTP, tasks, delays or fault
switches: those are `fulfillment_service.py`. It needs the standard library only, so that an adapter may import
`operation_fingerprint` without a web server. Start with `admit` and `settle`: the two transitions of an operation.

    (absent) ── admit ──> pending ── settle ──> committed   with a receipt and the effect, in one transaction
                                          └───> rejected    with a reason and no effect

An operation is recorded `pending` in a transaction of its own before any work is done for it. A key names one
operation for ever: `admit` never replaces a row, and `settle` is guarded by `state = 'pending'`, so a second
submitter, a second process or a restart can never make the effect twice.
"""

from __future__ import annotations

import hashlib
import json
import re
import sqlite3
import unicodedata
from collections.abc import Generator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Final, assert_never
from uuid import uuid4

__all__ = [
    "Kind",
    "Operation",
    "Order",
    "Reason",
    "Reservation",
    "State",
    "Submission",
    "SubmissionError",
    "admit",
    "decide_settlement",
    "get_available",
    "get_operation",
    "has_submissions",
    "list_pending",
    "normalise_order",
    "normalise_sku",
    "open_ledger",
    "operation_fingerprint",
    "parse_key",
    "parse_submission",
    "read_ledger",
    "record_request",
    "settle",
    "stock_inventory",
]

SCHEMA_VERSION: Final = 1
QUANTITY_MAX: Final = 1_000_000
SKU_LENGTH_MAX: Final = 64
ADDRESS_LENGTH_MAX: Final = 500

_KEY = re.compile(r"([A-Za-z0-9_-]{1,64})-(reserve|ship|release)", re.ASCII)

_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS inventory (
    sku TEXT PRIMARY KEY,
    available INTEGER NOT NULL CHECK (available >= 0)
);
CREATE TABLE IF NOT EXISTS operations (
    key TEXT PRIMARY KEY,
    kind TEXT NOT NULL CHECK (kind IN ('reserve', 'ship', 'release')),
    fingerprint TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('pending', 'committed', 'rejected')),
    sku TEXT NOT NULL,
    quantity INTEGER NOT NULL,
    address TEXT NOT NULL,
    reservation_key TEXT NOT NULL,
    result TEXT,
    reason TEXT,
    recorded_at TEXT NOT NULL,
    settled_at TEXT,
    CHECK ((result IS NOT NULL) = (state = 'committed')),
    CHECK ((reason IS NOT NULL) = (state = 'rejected'))
);
CREATE TABLE IF NOT EXISTS reservations (
    key TEXT PRIMARY KEY REFERENCES operations (key),
    sku TEXT NOT NULL REFERENCES inventory (sku),
    quantity INTEGER NOT NULL CHECK (quantity >= 1),
    address TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('reserved', 'shipped', 'released')),
    at TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS shipments (
    key TEXT PRIMARY KEY REFERENCES operations (key),
    reservation_key TEXT NOT NULL UNIQUE REFERENCES reservations (key),
    sku TEXT NOT NULL,
    quantity INTEGER NOT NULL,
    address TEXT NOT NULL,
    at TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS requests (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    method TEXT NOT NULL,
    path TEXT NOT NULL,
    query TEXT NOT NULL,
    body TEXT,
    at TEXT NOT NULL
);
"""


# --- words ---------------------------------------------------------------------------------------------------------


class Kind(StrEnum):
    RESERVE = "reserve"
    SHIP = "ship"
    RELEASE = "release"


class State(StrEnum):
    PENDING = "pending"
    COMMITTED = "committed"
    REJECTED = "rejected"


class SubmissionError(ValueError):
    """A submission, a key or an order is malformed. Nothing was recorded for it; the message names the member."""


@dataclass(frozen=True, slots=True)
class Order:
    """An order in its normal form; see `normalise_order`."""

    sku: str
    quantity: int
    address: str

    def to_json(self) -> dict[str, object]:
        return {"sku": self.sku, "quantity": self.quantity, "address": self.address}


@dataclass(frozen=True, slots=True)
class Reason:
    code: str
    message: str

    def to_json(self) -> dict[str, object]:
        return {"code": self.code, "message": self.message}


@dataclass(frozen=True, slots=True)
class Submission:
    """What a client asks for, checked and in its normal form."""

    key: str
    kind: Kind
    order: Order
    reservation_key: str
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Operation:
    """One row of the ledger. `receipt` is there when committed, `reason` when rejected."""

    key: str
    kind: Kind
    state: State
    fingerprint: str
    order: Order
    reservation_key: str
    receipt: Mapping[str, object] | None
    reason: Reason | None

    def to_json(self) -> dict[str, object]:
        return {
            "key": self.key,
            "kind": self.kind.value,
            "state": self.state.value,
            "fingerprint": self.fingerprint,
            "order": self.order.to_json(),
            "reservationKey": self.reservation_key,
            "receipt": None if self.receipt is None else dict(self.receipt),
            "reason": None if self.reason is None else self.reason.to_json(),
        }


@dataclass(frozen=True, slots=True)
class Reservation:
    order: Order
    state: str


# --- normal forms --------------------------------------------------------------------------------------------------


def normalise_sku(value: object, name: str = "sku") -> str:
    """The SKU in NFC, without surrounding white space, in upper case; 1 to 64 characters, none of them white space."""
    text = _text(_text(value, name, SKU_LENGTH_MAX).upper(), name, SKU_LENGTH_MAX)
    if " " in text:
        raise SubmissionError(f"{name} must not contain white space.")
    return text


def normalise_order(order: object) -> Order:
    """The order in its normal form; raises SubmissionError.

    sku: see `normalise_sku`. quantity: an int from 1 to 1,000,000, never a bool, float or text. address: NFC, runs
    of white space become one space, none at the ends, the case is kept; 1 to 500 characters. Other members are
    refused, since they would not be in the fingerprint.
    """
    members = _members(order, "order", {"sku", "quantity", "address"})
    quantity = members["quantity"]
    if type(quantity) is not int or not 1 <= quantity <= QUANTITY_MAX:
        raise SubmissionError(f"order.quantity must be an integer from 1 to {QUANTITY_MAX}.")
    return Order(
        sku=normalise_sku(members["sku"], "order.sku"),
        quantity=quantity,
        address=_text(members["address"], "order.address", ADDRESS_LENGTH_MAX),
    )


def operation_fingerprint(kind: str, order: Mapping[str, object], reservation_key: str) -> str:
    """The SHA-256 (64 hex digits) that binds a kind, the normal form of an order and a reservation key.

    It is taken over the UTF-8 of the JSON `{"kind", "order": {"address", "quantity", "sku"}, "reservationKey"}` with
    sorted names, no white space and no escaping beyond what JSON needs. Raises SubmissionError.
    """
    if kind not in set(Kind):
        raise SubmissionError(f"kind must be one of {', '.join(Kind)}.")
    _check_reservation_key(reservation_key)
    return _fingerprint(Kind(kind), normalise_order(order), reservation_key)


def parse_key(key: object) -> Kind:
    """The kind that an operation's key ends with. Keys are `<id>-<kind>`, the id 1 to 64 of letters, digits, _, -."""
    match = _KEY.fullmatch(key) if isinstance(key, str) else None
    if match is None:
        raise SubmissionError("key must be <id>-reserve, <id>-ship or <id>-release, the id 1 to 64 of A-Z a-z 0-9 _ -.")
    return Kind(match[2])


def parse_submission(kind: Kind, body: bytes) -> Submission:
    """The submission in a request's body, for the operation that the path names; raises SubmissionError."""
    try:
        value = json.loads(body.decode())
    except (ValueError, RecursionError) as error:
        raise SubmissionError("The body must be one JSON object in UTF-8.") from error
    members = _members(value, "The body", {"key", "order", "reservationKey"})
    key, reservation_key = members["key"], members["reservationKey"]
    if parse_key(key) is not kind:
        raise SubmissionError(f"key must end with -{kind}, since that is the operation of this path.")
    _check_reservation_key(reservation_key)
    if kind is Kind.RESERVE and reservation_key != key:
        raise SubmissionError("reservationKey must equal key in a reserve operation: it is the reservation's name.")
    order = normalise_order(members["order"])
    assert isinstance(key, str) and isinstance(reservation_key, str)
    return Submission(key, kind, order, reservation_key, _fingerprint(kind, order, reservation_key))


def _fingerprint(kind: Kind, order: Order, reservation_key: str) -> str:
    bound = {"kind": kind.value, "order": order.to_json(), "reservationKey": reservation_key}
    return hashlib.sha256(_canonical(bound).encode()).hexdigest()


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _members(value: object, name: str, expected: set[str]) -> dict[str, object]:
    if not isinstance(value, Mapping):
        raise SubmissionError(f"{name} must be a JSON object.")
    if missing := expected - value.keys():
        raise SubmissionError(f"{name} lacks {', '.join(sorted(missing))}.")
    if value.keys() - expected:
        raise SubmissionError(f"{name} may only have {', '.join(sorted(expected))}.")
    return dict(value)


def _text(value: object, name: str, length_max: int) -> str:
    if not isinstance(value, str):
        raise SubmissionError(f"{name} must be text.")
    text = " ".join(unicodedata.normalize("NFC", value).split())
    if not 1 <= len(text) <= length_max:
        raise SubmissionError(f"{name} must have 1 to {length_max} characters.")
    # A lone surrogate can be written in JSON, but neither hashed nor stored as UTF-8.
    if any(unicodedata.category(character) in {"Cc", "Cs"} for character in text):
        raise SubmissionError(f"{name} must not contain control characters or lone surrogates.")
    return text


def _check_reservation_key(key: object) -> None:
    try:
        kind = parse_key(key)
    except SubmissionError as error:
        raise SubmissionError("reservationKey must be the key of a reserve operation, <id>-reserve.") from error
    if kind is not Kind.RESERVE:
        raise SubmissionError("reservationKey must be the key of a reserve operation, <id>-reserve.")


# --- rules ---------------------------------------------------------------------------------------------------------


def decide_settlement(
    kind: Kind, order: Order, available: int | None, reservation: Reservation | None, refusal: Reason | None
) -> Reason | None:
    """Why the operation is rejected, or None when it may be committed.

    `available` is the stock of the order's SKU (None: unknown SKU), `reservation` the committed reservation that
    the operation names, `refusal` what the outside world says to an operation that the rules allow.
    """
    match kind:
        case Kind.RESERVE:
            broken = _check_stock(order, available)
        case Kind.SHIP | Kind.RELEASE:
            broken = _check_reservation(order, reservation)
        case _:
            assert_never(kind)
    return broken or refusal


def _check_stock(order: Order, available: int | None) -> Reason | None:
    if available is None:
        return Reason("UNKNOWN_SKU", f"There is no {order.sku}.")
    if available < order.quantity:
        return Reason("INSUFFICIENT_STOCK", f"{order.quantity} of {order.sku} asked for, {available} available.")
    return None


def _check_reservation(order: Order, reservation: Reservation | None) -> Reason | None:
    if reservation is None:
        return Reason("RESERVATION_NOT_FOUND", "No committed reservation has that key.")
    if reservation.state == "shipped":
        return Reason("RESERVATION_SHIPPED", "The reservation was shipped.")
    if reservation.state == "released":
        return Reason("RESERVATION_RELEASED", "The reservation was released.")
    if reservation.order != order:
        return Reason("RESERVATION_MISMATCH", "The reservation was made for another order.")
    return None


# --- transitions ---------------------------------------------------------------------------------------------------


def open_ledger(path: Path) -> sqlite3.Connection:
    """Open the ledger, make what is missing of it, and leave everything else as it is.

    Every commit is flushed to the disk (WAL, synchronous FULL); another process's lock is waited for, for 10 s.
    """
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        connection.execute("PRAGMA busy_timeout = 10000")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")
        with _transaction(connection):
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, SCHEMA_VERSION):
                raise sqlite3.DatabaseError(f"{path} is a ledger of version {version}, which this code does not know.")
            for statement in _SCHEMA.split(";"):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    except BaseException:
        connection.close()
        raise
    return connection


def stock_inventory(connection: sqlite3.Connection, inventory: Mapping[str, int]) -> None:
    """Insert the SKUs that the ledger does not have. The stock of the others is what the operations made of it.

    Raises ValueError for a quantity that is no int of at least 0, or a malformed SKU.
    """
    if wrong := [sku for sku, quantity in inventory.items() if type(quantity) is not int or quantity < 0]:
        raise ValueError(f"The stock of {', '.join(wrong)} must be an integer of at least 0.")
    with _transaction(connection):
        connection.executemany(
            "INSERT INTO inventory (sku, available) VALUES (?, ?) ON CONFLICT (sku) DO NOTHING",
            [(normalise_sku(sku), quantity) for sku, quantity in inventory.items()],
        )


def record_request(connection: sqlite3.Connection, method: str, path: str, query: str, body: str | None) -> None:
    """Write down that a request was received, before anything is done for it."""
    with _transaction(connection):
        connection.execute(
            "INSERT INTO requests (method, path, query, body, at) VALUES (?, ?, ?, ?, ?)",
            (method, path, query, body, _now()),
        )


def admit(connection: sqlite3.Connection, submission: Submission) -> Operation:
    """absent → pending. Returns the operation that has the key, which may be an earlier one.

    The caller compares fingerprints: an earlier operation with other parameters is a conflict.
    """
    order = submission.order
    with _transaction(connection):
        connection.execute(
            "INSERT INTO operations"
            " (key, kind, fingerprint, state, sku, quantity, address, reservation_key, recorded_at)"
            " VALUES (?, ?, ?, 'pending', ?, ?, ?, ?, ?) ON CONFLICT (key) DO NOTHING",
            (
                submission.key,
                submission.kind,
                submission.fingerprint,
                order.sku,
                order.quantity,
                order.address,
                submission.reservation_key,
                _now(),
            ),
        )
        operation = get_operation(connection, submission.key)
    assert operation is not None
    return operation


def settle(connection: sqlite3.Connection, key: str, refusal: Reason | None = None) -> Operation:
    """pending → committed or rejected, with the effect in the same transaction. A settled operation stays as it is."""
    with _transaction(connection):
        operation = get_operation(connection, key)
        assert operation is not None, "only an admitted operation is settled"
        if operation.state is not State.PENDING:
            return operation
        reason = decide_settlement(
            operation.kind,
            operation.order,
            get_available(connection, operation.order.sku),
            _get_reservation(connection, operation.reservation_key),
            refusal,
        )
        if reason is None:
            _commit_operation(connection, operation)
        else:
            _commit_rejection(connection, operation, reason)
        settled = get_operation(connection, key)
    assert settled is not None
    return settled


def _commit_rejection(connection: sqlite3.Connection, operation: Operation, reason: Reason) -> None:
    connection.execute(
        "UPDATE operations SET state = 'rejected', reason = ?, settled_at = ? WHERE key = ? AND state = 'pending'",
        (_canonical(reason.to_json()), _now(), operation.key),
    )


def _commit_operation(connection: sqlite3.Connection, operation: Operation) -> None:
    at = _now()
    receipt = {
        "id": f"receipt-{uuid4().hex}",
        "key": operation.key,
        "kind": operation.kind.value,
        "fingerprint": operation.fingerprint,
        "reservationKey": operation.reservation_key,
        "at": at,
    }
    connection.execute(
        "UPDATE operations SET state = 'committed', result = ?, settled_at = ? WHERE key = ? AND state = 'pending'",
        (_canonical(receipt), at, operation.key),
    )
    order = operation.order
    match operation.kind:
        case Kind.RESERVE:
            connection.execute(
                "INSERT INTO reservations (key, sku, quantity, address, state, at) VALUES (?, ?, ?, ?, 'reserved', ?)",
                (operation.key, order.sku, order.quantity, order.address, at),
            )
            _change_stock(connection, order.sku, -order.quantity)
        case Kind.SHIP:
            _change_reservation(connection, operation.reservation_key, "shipped")
            connection.execute(
                "INSERT INTO shipments (key, reservation_key, sku, quantity, address, at) VALUES (?, ?, ?, ?, ?, ?)",
                (operation.key, operation.reservation_key, order.sku, order.quantity, order.address, at),
            )
        case Kind.RELEASE:
            _change_reservation(connection, operation.reservation_key, "released")
            _change_stock(connection, order.sku, order.quantity)
        case _:
            assert_never(operation.kind)


def _change_stock(connection: sqlite3.Connection, sku: str, change: int) -> None:
    connection.execute("UPDATE inventory SET available = available + ? WHERE sku = ?", (change, sku))


def _change_reservation(connection: sqlite3.Connection, key: str, state: str) -> None:
    connection.execute("UPDATE reservations SET state = ? WHERE key = ? AND state = 'reserved'", (state, key))


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Generator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


# --- reads ---------------------------------------------------------------------------------------------------------


def get_available(connection: sqlite3.Connection, sku: str) -> int | None:
    """The stock of a SKU in its normal form; None for an unknown one."""
    row = connection.execute("SELECT available FROM inventory WHERE sku = ?", (sku,)).fetchone()
    return None if row is None else int(row[0])


def get_operation(connection: sqlite3.Connection, key: str) -> Operation | None:
    """The operation that has the key; None when it is absent."""
    row = connection.execute(
        "SELECT key, kind, state, fingerprint, sku, quantity, address, reservation_key, result, reason"
        " FROM operations WHERE key = ?",
        (key,),
    ).fetchone()
    if row is None:
        return None
    _, kind, state, fingerprint, sku, quantity, address, reservation_key, result, reason = row
    return Operation(
        key=key,
        kind=Kind(kind),
        state=State(state),
        fingerprint=fingerprint,
        order=Order(sku, quantity, address),
        reservation_key=reservation_key,
        receipt=None if result is None else json.loads(result),
        reason=None if reason is None else Reason(**json.loads(reason)),
    )


def list_pending(connection: sqlite3.Connection) -> list[Operation]:
    """The operations that were recorded but not settled, in the order in which they came."""
    keys = connection.execute("SELECT key FROM operations WHERE state = 'pending' ORDER BY rowid").fetchall()
    return [operation for (key,) in keys if (operation := get_operation(connection, key)) is not None]


def has_submissions(connection: sqlite3.Connection) -> bool:
    """Whether this ledger was ever asked for an operation, by any process."""
    row = connection.execute(
        "SELECT 1 FROM requests WHERE method = 'POST' AND path IN ('/reserve', '/ship', '/release') LIMIT 1"
    ).fetchone()
    return row is not None


def read_ledger(path: Path) -> dict[str, list[dict[str, object]]]:
    """Every table of a ledger, row by row, read in one transaction by a connection of its own.

    For tests and reports, while a service runs, after it was killed, or in another process.
    """
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)) as connection:
        connection.row_factory = sqlite3.Row
        connection.execute("BEGIN")
        return {
            table: [dict(row) for row in connection.execute(f"SELECT * FROM {table} ORDER BY rowid")]
            for table in ("inventory", "operations", "reservations", "shipments", "requests")
        }


def _get_reservation(connection: sqlite3.Connection, key: str) -> Reservation | None:
    row = connection.execute("SELECT sku, quantity, address, state FROM reservations WHERE key = ?", (key,)).fetchone()
    return None if row is None else Reservation(Order(row[0], row[1], row[2]), row[3])
