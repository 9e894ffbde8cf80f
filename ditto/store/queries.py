"""Queries: every read of the store, on a connection of its own.

A read holds no snapshot after it has returned. Values come back in their stored form, with their bodies fetched.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Sequence
from typing import Any, Final

from ditto.errors import RunNotFoundError, StoreDamagedError
from ditto.items import Items
from ditto.store import statements as sql
from ditto.store.records import RunRow, StepRow, ToldEvent, check_row, kinds_of
from ditto.store.schema import StepState, receipts, steps
from ditto.store.transitions import EVENT_ID_SHIFT
from ditto.store.values import GROWING, REFERENCE, Growing, State, Stored, decode, digest

_SETTLED_TEXTS: Final = frozenset(state.value for state in (StepState.COMPLETED, StepState.FAILED, StepState.SKIPPED))

_STEP_KINDS: Final = kinds_of(steps.c[name] for name in sql.STEP_COLUMNS)

_SHAPE_KINDS: Final = kinds_of(steps.c[name] for name in sql.SHAPE_COLUMNS)

_AFTER_ALL_PATHS: Final = "\x7f"
"""Paths are of letters, digits and `_ . : - /`."""
_RECEIPT_KINDS: Final = kinds_of([receipts.c.id, receipts.c.line])

_AFTER_SLASH: Final = "0"
"""The character after `/`: paths below `p/` are those from `p/` up to, not including, `p0`."""


def get_run(db: sqlite3.Connection, run_id: str) -> RunRow | None:
    """The newest generation of a run."""
    row = sql.GET_RUN(db, b_run_id=run_id).fetchone()
    return None if row is None else RunRow.from_row(row)


def get_run_by_key(db: sqlite3.Connection, run: int) -> RunRow:
    """The run with this row id. Raises RunNotFoundError."""
    row = sql.GET_RUN_BY_KEY(db, b_run=run).fetchone()
    if row is None:
        raise RunNotFoundError(f"no run has the key {run}")
    return RunRow.from_row(row)


def list_runs(db: sqlite3.Connection, status: str | None, before: int, limit: int) -> list[RunRow]:
    """Runs by the age of their newest generation, newest first, with row ids below `before`."""
    rows = sql.LIST_RUNS(db, b_before=before, b_status=status or "", b_limit=limit)
    return [RunRow.from_row(row) for row in rows.fetchall()]


def list_undriven(db: sqlite3.Connection, after: int, limit: int) -> list[RunRow]:
    """Runs that are interrupted, or say that they run, oldest first; whether an owner lives is not asked here."""
    rows = sql.LIST_UNDRIVEN(db, b_after=after, b_limit=limit)
    return [RunRow.from_row(row) for row in rows.fetchall()]


def list_open(db: sqlite3.Connection, after: int, limit: int) -> list[RunRow]:
    """Runs that are open, oldest first, with row ids above `after`."""
    return [RunRow.from_row(row) for row in sql.LIST_OPEN(db, b_after=after, b_limit=limit).fetchall()]


def list_reopenable(db: sqlite3.Connection, after: int, limit: int) -> list[RunRow]:
    """Runs whose newest generation failed or is exhausted, oldest first, with row ids above `after`."""
    return [RunRow.from_row(row) for row in sql.LIST_REOPENABLE(db, b_after=after, b_limit=limit).fetchall()]


def count_runs(db: sqlite3.Connection) -> list[tuple[str, str | None, int]]:
    """(status, owner, number of runs) for all generations."""
    return [(status, owner, count) for status, owner, count in sql.COUNT_RUNS(db).fetchall()]


def list_lost(db: sqlite3.Connection, limit: int) -> list[tuple[str, str, str | None]]:
    """(run id, step path, owner) of the steps of open runs whose outcome is not known, oldest first."""
    return [(run_id, path, owner) for run_id, path, owner in sql.LIST_LOST(db, b_limit=limit).fetchall()]


def list_faults(db: sqlite3.Connection) -> list[str]:
    """What SQLite's own checks of the file find; empty for a sound one. Reads the whole file."""
    found = [row[0] for row in db.execute("PRAGMA integrity_check(20)").fetchall() if row[0] != "ok"]
    broken = db.execute("PRAGMA foreign_key_check").fetchmany(20)
    return found + [f"a row of {table} refers to a row of {parent} that is gone" for table, _, parent, _ in broken]


def list_steps(db: sqlite3.Connection, run: int, prefix: str = "") -> list[StepRow]:
    """The rows of a run's steps below a path prefix (`""` for all, or `3/`), in the order they were first written."""
    if prefix:
        rows = sql.LIST_STEPS(db, b_run=run, b_from=prefix, b_to=prefix[:-1] + _AFTER_SLASH)
    else:
        rows = sql.LIST_ALL_STEPS(db, b_run=run)
    return [_step(db, row) for row in rows.fetchall()]


def list_shapes(db: sqlite3.Connection, run: int, prefix: str, after: str, limit: int) -> list[StepRow]:
    """A page of a run's steps below a path prefix without their values, by path, from the one after `after`."""
    end = prefix[:-1] + _AFTER_SLASH if prefix else _AFTER_ALL_PATHS
    rows = sql.LIST_SHAPES(db, b_run=run, b_after=max(prefix, after), b_to=end, b_limit=limit)
    return [_shape(row) for row in rows.fetchall()]


def list_call_types(db: sqlite3.Connection, run: int) -> list[tuple[str, str]]:
    """(node type, path of one of them) of a Flow's recorded calls."""
    return [(type_, path) for type_, path in sql.LIST_CALL_TYPES(db, b_run=run).fetchall()]


def has_lost(db: sqlite3.Connection, run: int) -> bool:
    """Whether a step of the run was admitted and has no outcome."""
    return bool(sql.COUNT_LOST(db, b_run=run).fetchone()[0])


def get_step(db: sqlite3.Connection, run: int, path: str) -> StepRow | None:
    """One step's row."""
    row = sql.GET_STEP(db, b_run=run, b_path=path).fetchone()
    return None if row is None else _step(db, row)


def list_events(
    db: sqlite3.Connection, run: int, after: int, limit: int
) -> list[tuple[int, int, str, str | None, Any]]:
    """Up to `limit` events with a number above `after`: (number, time, kind, step, body)."""
    base = run << EVENT_ID_SHIFT
    rows = sql.LIST_EVENTS(db, b_after=base + after, b_last=base + (1 << EVENT_ID_SHIFT) - 1, b_limit=limit)
    return [
        (number - base, at, kind, step, None if body is None else decode(body))
        for number, at, kind, step, body in rows.fetchall()
    ]


def has_receipts(db: sqlite3.Connection) -> bool:
    """Whether the chain of receipts has begun."""
    return sql.GET_TIP(db).fetchone() is not None


def list_receipts(db: sqlite3.Connection, run_id: str | None, after: int, limit: int) -> list[tuple[int, str]]:
    """Up to `limit` receipts with a number above `after`, of all generations of a run, or all: (number, line)."""
    if run_id is None:
        rows = sql.LIST_RECEIPTS(db, b_after=after, b_limit=limit).fetchall()
    else:
        rows = sql.LIST_RUN_RECEIPTS(db, b_run_id=run_id, b_after=after, b_limit=limit).fetchall()
    for row in rows:
        check_row(row, _RECEIPT_KINDS, f"ditto_receipts, row {row[0]}")
    return [(number, line) for number, line in rows]


def list_told(
    db: sqlite3.Connection, run: int, after: int, limit: int, types: Collection[str]
) -> tuple[RunRow, list[ToldEvent]]:
    """The run, and then up to `limit` of its events with a number above `after`, each with how its step stands.

    All that the run's owner wrote before the run stood so is among the events, or comes on a later page.
    """
    row, base = get_run_by_key(db, run), run << EVENT_ID_SHIFT
    found = sql.LIST_TOLD(
        db, b_run=run, b_after=base + after, b_last=base + (1 << EVENT_ID_SHIFT) - 1, b_limit=limit
    ).fetchall()
    return row, [_told(db, base, types, *columns) for columns in found]


def _told(
    db: sqlite3.Connection,
    base: int,
    types: Collection[str],
    number: int,
    kind: str,
    step: str | None,
    body: str | None,
    type_: str | None,
    state: str | None,
    attempt: int | None,
    output: str | None,
) -> ToldEvent:
    stands = None if state is None or step is None else _step_state(state, step)
    is_wanted = stands is StepState.COMPLETED and type_ in types
    return ToldEvent(
        number=number - base,
        kind=kind,
        step=step,
        body=None if body is None else decode(body),
        type=type_,
        state=stands,
        attempt=attempt,
        output=load_value(db, output) if is_wanted else None,
    )


def load_value(db: sqlite3.Connection, column: str | None) -> Stored | None:
    """A value column with its body. Raises StoreDamagedError if the body is gone, or is not what was stored."""
    if column is None:
        return None
    if not column.startswith(REFERENCE):
        if not column:
            raise StoreDamagedError("a value column holds no value; restore a backup")
        return Stored(column, column)
    try:
        row = sql.GET_VALUE(db, b_digest=bytes.fromhex(column[1:])).fetchone()
    except ValueError:
        row = None
    if row is None:
        raise _missing(column[1:])
    return Stored(column, _sound(column[1:], row[0]))


def list_calls(
    db: sqlite3.Connection, run: int, after: int, limit: int, *, nested: bool = False
) -> tuple[list[StepRow], int | None]:
    """A page of a Flow's recorded calls, in the order they were first written, and where the next page begins.

    `nested`: also what has a `/` in its path. What a settled call was asked with is left out.
    """
    statement = sql.LIST_STEPS_PAGE if nested else sql.LIST_CALLS
    rows = statement(db, b_run=run, b_after=after, b_limit=limit).fetchall()
    return [_step(db, row[1:], with_arguments=False) for row in rows], rows[-1][0] if len(rows) == limit else None


def list_step_approvals(db: sqlite3.Connection, run: int) -> list[StepRow]:
    """The questions that steps of a run asked before they were attempted, oldest first."""
    return [_step(db, row) for row in sql.LIST_STEP_APPROVALS(db, b_run=run).fetchall()]


def list_owned(db: sqlite3.Connection, owner: str, runs: Collection[int]) -> dict[int, str]:
    """Which of these runs this owner still has, and their statuses: what is paused it is to drain."""
    found = {run: sql.GET_OWNED(db, b_run=run, b_owner=owner).fetchone() for run in runs}
    return {run: row[0] for run, row in found.items() if row is not None}


def list_due(db: sqlite3.Connection, now: int, limit: int) -> list[tuple[int, str, int, str]]:
    """(run, path, attempt, type) of waits whose time has come, the longest due first."""
    return [
        (run, path, attempt, kind) for run, path, attempt, kind in sql.LIST_DUE(db, b_now=now, b_limit=limit).fetchall()
    ]


def list_expired(db: sqlite3.Connection, now: int, limit: int) -> list[int]:
    """Row ids of waiting runs whose deadline has passed, the longest past first."""
    return [run for (run,) in sql.LIST_EXPIRED(db, b_now=now, b_limit=limit).fetchall()]


def load_state(db: sqlite3.Connection, column: str | None) -> State | None:
    """The state column of a Loop, with its lists. Raises StoreDamagedError if a part of it is gone."""
    if column is None or not column.startswith(GROWING):
        return load_value(db, column)
    try:
        rest_column, lists = decode(column[1:])
        rest = load_value(db, rest_column)
        assert rest is not None
        return Growing(rest, {name: _load_list(db, number) for name, number in lists.items()})
    except (TypeError, ValueError, AttributeError, AssertionError, sqlite3.Error) as error:
        raise StoreDamagedError(f"the state of a loop is not as ditto writes it ({error}); restore a backup") from error


def _load_list(db: sqlite3.Connection, number: int) -> Items:
    """A list's items: those of the lists it is based on, then its own."""
    parts: list[list[int]] = []
    base: int | None = number
    while base is not None:
        row = sql.GET_LIST(db, b_id=base).fetchone()
        if row is None:
            raise StoreDamagedError(f"the list {base} is missing from ditto_lists; restore a backup")
        if row[0] is not None and row[0] >= base:
            raise StoreDamagedError(f"the list {base} is based on a later one; restore a backup")
        added = decode(row[1])
        if not isinstance(added, list):
            raise StoreDamagedError(f"the list {base} holds no list; restore a backup")
        parts.append(added)
        base = row[0]
    ids = [value for part in reversed(parts) for value in part]
    return Items.loaded([_load_item(db, value) for value in ids], number, ids, full_length=len(parts[-1]))


def _load_item(db: sqlite3.Connection, value: int) -> Any:
    row = sql.GET_VALUE_BY_ID(db, b_id=value).fetchone()
    if row is None:
        raise _missing(str(value))
    return decode(_sound(row[0].hex(), row[1]))


def _sound(expected: str, body: Any) -> str:
    """The body of a value, if that is its digest. Raises StoreDamagedError."""
    if not isinstance(body, str) or digest(body) != expected:
        raise StoreDamagedError(
            f"the value {expected} in ditto_values is not what was stored: its text was altered; restore a backup",
            code="store.value_altered",
        )
    return body


def _missing(value: str) -> StoreDamagedError:
    return StoreDamagedError(
        f"the value {value} is missing from ditto_values; restore a backup", code="store.value_missing"
    )


def _step(db: sqlite3.Connection, row: Sequence[Any], *, with_arguments: bool = True) -> StepRow:
    check_row(row, _STEP_KINDS, f"ditto_steps, step {row[1]!r}")
    _, path, type_, version, after, effect, state, attempt, key, arguments, output, error, *times = row
    admitted_at, settled_at, due_at, deadline_at = times
    return StepRow(
        path=path,
        type=type_,
        version=version,
        after=after,
        effect=effect,
        state=_step_state(state, path),
        attempt=attempt,
        key=key,
        arguments=load_state(db, arguments) if with_arguments or state not in _SETTLED_TEXTS else None,
        output=None if state == StepState.OPEN else load_value(db, output),
        progress=load_state(db, output) if state == StepState.OPEN else None,
        error=error,
        admitted_at=admitted_at,
        settled_at=settled_at,
        due_at=due_at,
        deadline_at=deadline_at,
    )


def _shape(row: Sequence[Any]) -> StepRow:
    check_row(row, _SHAPE_KINDS, f"ditto_steps, step {row[0]!r}")
    path, type_, version, after, effect, state, attempt, key = row
    return StepRow(path, type_, version, after, effect, _step_state(state, path), attempt, key=key)


def _step_state(state: str, path: str) -> StepState:
    try:
        return StepState(state)
    except ValueError:
        raise StoreDamagedError(
            f"ditto_steps, step {path}: no release of ditto writes the state {state!r}; restore a backup"
        ) from None
