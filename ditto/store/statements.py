"""Statements: written once in SQLAlchemy Core, compiled once to the dialect's SQL, run on the driver's connection.

Executing through Core costs several times the processor of the driver; on the hot path that would be most of a step.
"""

from __future__ import annotations

import sqlite3
from typing import Any, Final

from sqlalchemy import BindParameter, and_, bindparam, case, func, insert, null, or_, select, update
from sqlalchemy.dialects import sqlite
from sqlalchemy.sql import ClauseElement
from sqlalchemy.sql.compiler import SQLCompiler

from ditto.store.schema import (
    CLOSED,
    FINISHED,
    REOPENABLE,
    UNDRIVEN,
    RunStatus,
    StepState,
    events,
    lists,
    meta,
    receipts,
    runs,
    signals,
    steps,
    values,
)

_DIALECT: Final = sqlite.dialect(paramstyle="qmark")


class Statement:
    """One compiled statement. Called with the driver's connection and named values; returns the driver's cursor.

    Constants stand in the SQL itself: only so may SQLite use an index of some of a table's rows.
    """

    __slots__ = ("_names", "sql")

    def __init__(self, clause: ClauseElement) -> None:
        compiled = clause.compile(dialect=_DIALECT)
        assert isinstance(compiled, SQLCompiler)
        names = compiled.positiontup or []
        first, *rest = str(compiled).split("?")
        self.sql = first + "".join(_place(compiled.binds[name]) + part for name, part in zip(names, rest, strict=True))
        self._names: tuple[str, ...] = tuple(name for name in names if compiled.binds[name].required)

    def __call__(self, db: sqlite3.Connection, /, **given: Any) -> sqlite3.Cursor:
        return db.execute(self.sql, [given[name] for name in self._names])


def _place(parameter: BindParameter[Any]) -> str:
    """`?` for what is given with each call; a constant as itself."""
    if parameter.required:
        return "?"
    value = parameter.value
    if value is None or isinstance(value, int):
        return "NULL" if value is None else str(int(value))
    return "'" + str(value).replace("'", "''") + "'"


_OPEN: Final = and_(*[runs.c.status != status.value for status in sorted(CLOSED)])
"""The run is not closed. Spelled out, since a list parameter would be rendered anew on every call."""


_UNFINISHED: Final = and_(*[runs.c.status != status.value for status in sorted(FINISHED)])
"""The run is open, or may be reopened."""

_later = runs.alias("later")
_NEWEST: Final = ~(
    select(_later.c.id).where(_later.c.run_id == runs.c.run_id, _later.c.generation > runs.c.generation).exists()
)
"""The run is the newest generation of its id."""


def _fenced() -> Any:
    """The run is still ours: same owner, same fence. The guard of every transition of an owner.

    `b_barred` is a status in which the transition is refused; none has the name "".
    """
    return (
        runs.c.id == bindparam("b_run"),
        runs.c.owner == bindparam("b_owner"),
        runs.c.fence == bindparam("b_fence"),
        runs.c.status != bindparam("b_barred"),
    )


STEP_COLUMNS: Final = (
    "run", "path", "type", "version", "after", "effect", "state", "attempt",
    "key", "arguments", "output", "error", "admitted_at", "settled_at", "due_at", "deadline_at",
)  # fmt: skip
SHAPE_COLUMNS: Final = ("path", "type", "version", "after", "effect", "state", "attempt", "key")
"""A step without its values."""
_RUN_COLUMNS: Final = tuple(column.name for column in runs.columns)

INSERT_RUN: Final = Statement(
    insert(runs).from_select(
        [c for c in _RUN_COLUMNS if c != "id"],
        select(*[bindparam(c) for c in _RUN_COLUMNS if c != "id"]).where(
            ~select(runs.c.id)
            .where(runs.c.run_id == bindparam("run_id"), or_(runs.c.generation == bindparam("generation"), _OPEN))
            .exists()
        ),
    )
)

TOUCH_RUN: Final = Statement(
    update(runs).where(*_fenced()).values(seq=runs.c.seq + bindparam("b_events"), updated_at=bindparam("b_at"))
)
ADVANCE_LOOP: Final = Statement(
    update(runs)
    .where(runs.c.id == bindparam("b_run"))
    .values(iteration=bindparam("b_iteration"), state=bindparam("b_state"))
)
RELEASE_RUN: Final = Statement(
    update(runs)
    .where(*_fenced())
    .values(
        seq=runs.c.seq + bindparam("b_events"),
        updated_at=bindparam("b_at"),
        # What was paused stays so until somebody resumes it, unless it has come to its end.
        status=case(
            (and_(runs.c.status == RunStatus.PAUSED.value, bindparam("b_closed") == 0), RunStatus.PAUSED.value),
            else_=bindparam("b_status"),
        ),
        error=bindparam("b_error"),
        crashes=0,
        owner=None,
    )
)
CLAIM_RUN: Final = Statement(
    update(runs)
    .where(
        runs.c.id == bindparam("b_run"),
        runs.c.fence == bindparam("b_seen_fence"),
        runs.c.status == bindparam("b_seen_status"),
    )
    .values(
        owner=bindparam("b_owner"),
        fence=runs.c.fence + 1,
        status=bindparam("b_status"),
        error=bindparam("b_error"),
        crashes=bindparam("b_crashes"),
        deadline_at=bindparam("b_deadline_at"),
        claimed_seq=runs.c.seq + bindparam("b_events"),
        seq=runs.c.seq + bindparam("b_events"),
        updated_at=bindparam("b_at"),
    )
)
BLOCK_RUN: Final = Statement(
    update(runs)
    .where(
        runs.c.id == bindparam("b_run"),
        runs.c.fence == bindparam("b_seen_fence"),
        runs.c.status == bindparam("b_seen_status"),
    )
    .values(
        status=RunStatus.BLOCKED.value,
        owner=None,
        seq=runs.c.seq + bindparam("b_events"),
        updated_at=bindparam("b_at"),
    )
)
PAUSE_RUN: Final = Statement(
    update(runs)
    .where(
        runs.c.id == bindparam("b_run"),
        runs.c.fence == bindparam("b_seen_fence"),
        runs.c.status == bindparam("b_seen_status"),
    )
    .values(
        status=bindparam("b_status"),
        owner=bindparam("b_owner"),
        seq=runs.c.seq + bindparam("b_events"),
        updated_at=bindparam("b_at"),
    )
)
MOVE_RUN: Final = Statement(
    update(runs)
    .where(runs.c.id == bindparam("b_run"), _OPEN)
    .values(
        owner=None,
        fence=runs.c.fence + 1,
        status=bindparam("b_status"),
        seq=runs.c.seq + bindparam("b_events"),
        updated_at=bindparam("b_at"),
    )
)
COUNT_EVENTS: Final = Statement(
    update(runs)
    .where(runs.c.id == bindparam("b_run"))
    .values(seq=runs.c.seq + bindparam("b_events"), updated_at=bindparam("b_at"))
)
COUNT_PARTIALS: Final = Statement(
    update(runs)
    .where(runs.c.id == bindparam("b_run"))
    .values(
        seq=runs.c.seq + bindparam("b_events"),
        claimed_seq=runs.c.claimed_seq + bindparam("b_events"),
        updated_at=bindparam("b_at"),
    )
)
SETTLE_STATUS: Final = Statement(
    update(runs)
    .where(runs.c.id == bindparam("b_run"), runs.c.owner.is_(None), _OPEN, runs.c.status != RunStatus.PAUSED.value)
    .values(status=bindparam("b_status"))
)
WAKE_RUN: Final = Statement(
    update(runs)
    .where(runs.c.id == bindparam("b_run"), runs.c.status == RunStatus.WAITING.value)
    .values(status=RunStatus.INTERRUPTED.value)
)
WAKE_EXPIRED: Final = Statement(
    update(runs)
    .where(
        runs.c.id == bindparam("b_run"),
        runs.c.status == RunStatus.WAITING.value,
        runs.c.deadline_at <= bindparam("b_at"),
    )
    .values(status=RunStatus.INTERRUPTED.value)
)
_child = runs.alias("child")
COUNT_WAITS: Final = Statement(
    select(func.count())
    .select_from(steps)
    .where(
        steps.c.run == bindparam("b_run"),
        steps.c.state == StepState.WAITING.value,
        ~and_(
            steps.c.type == "WAIT.CHILD",
            select(_child.c.id)
            .where(_child.c.run_id == steps.c.key, or_(*[_child.c.status == each.value for each in sorted(CLOSED)]))
            .correlate(steps)
            .exists(),
        ),
    )
)
WAKE_PARENTS: Final = Statement(
    update(runs)
    .where(
        runs.c.status == RunStatus.WAITING.value,
        runs.c.id.in_(
            select(steps.c.run).where(
                steps.c.state == StepState.WAITING.value,
                steps.c.type == "WAIT.CHILD",
                steps.c.key == bindparam("b_run_id"),
            )
        ),
    )
    .values(status=RunStatus.INTERRUPTED.value)
)
GET_STATUS: Final = Statement(select(runs.c.status).where(runs.c.id == bindparam("b_run")))
GET_SEQ: Final = Statement(select(runs.c.seq, runs.c.status).where(runs.c.id == bindparam("b_run")))

INSERT_STEP: Final = Statement(insert(steps).values({name: bindparam(name) for name in STEP_COLUMNS}))
MOVE_STEP: Final = Statement(
    update(steps)
    .where(
        steps.c.run == bindparam("b_run"),
        steps.c.path == bindparam("b_path"),
        steps.c.state == bindparam("b_seen_state"),
        steps.c.attempt == bindparam("b_seen_attempt"),
        select(runs.c.id).where(*_fenced()).exists(),
    )
    .values(
        {name: bindparam(f"n_{name}") for name in STEP_COLUMNS if name not in ("run", "path", "arguments")}
        | {"arguments": func.coalesce(bindparam("n_arguments"), steps.c.arguments)}
    )
)
SET_ARGUMENTS: Final = Statement(
    update(steps)
    .where(steps.c.run == bindparam("b_run"), steps.c.path == bindparam("b_path"))
    .values(arguments=bindparam("n_arguments"))
)
RESOLVE_STEP: Final = Statement(
    update(steps)
    .where(
        steps.c.run == bindparam("b_run"),
        steps.c.path == bindparam("b_path"),
        steps.c.state == bindparam("b_seen_state"),
        steps.c.attempt == bindparam("b_seen_attempt"),
    )
    .values(
        state=bindparam("n_state"),
        output=bindparam("n_output"),
        error=bindparam("n_error"),
        settled_at=bindparam("n_settled_at"),
    )
)
ADVANCE_CALL: Final = Statement(
    update(steps)
    .where(
        steps.c.run == bindparam("b_run"), steps.c.path == bindparam("b_path"), steps.c.state == StepState.OPEN.value
    )
    .values(attempt=bindparam("n_attempt"), output=bindparam("n_output"))
)
MOVE_CALL: Final = Statement(
    update(steps)
    .where(steps.c.run == bindparam("b_run"), steps.c.path == bindparam("b_path"))
    .values({name: bindparam(f"n_{name}") for name in ("version", "state", "attempt", "output", "error", "settled_at")})
)
LIST_CALLS: Final = Statement(
    select(steps.c.id, *[steps.c[name] for name in STEP_COLUMNS])
    .where(steps.c.run == bindparam("b_run"), steps.c.id > bindparam("b_after"), steps.c.path.not_like("%/%"))
    .order_by(steps.c.id)
    .limit(bindparam("b_limit"))
)
LIST_STEPS_PAGE: Final = Statement(
    select(steps.c.id, *[steps.c[name] for name in STEP_COLUMNS])
    .where(steps.c.run == bindparam("b_run"), steps.c.id > bindparam("b_after"))
    .order_by(steps.c.id)
    .limit(bindparam("b_limit"))
)
SETTLE_WAIT: Final = Statement(
    update(steps)
    .where(
        steps.c.run == bindparam("b_run"),
        steps.c.path == bindparam("b_path"),
        steps.c.state == StepState.WAITING.value,
        steps.c.attempt == bindparam("b_attempt"),
        select(runs.c.id).where(runs.c.id == bindparam("b_run"), _UNFINISHED).exists(),
    )
    .values(state=StepState.COMPLETED.value, output=bindparam("n_output"), settled_at=bindparam("n_settled_at"))
)
FIND_WAIT: Final = Statement(
    select(steps.c.path, steps.c.attempt)
    .where(
        steps.c.run == bindparam("b_run"),
        steps.c.state == StepState.WAITING.value,
        steps.c.type == bindparam("b_type"),
        steps.c.key == bindparam("b_name"),
    )
    .order_by(steps.c.id)
    .limit(1)
)
INSERT_SIGNAL: Final = Statement(
    insert(signals).from_select(
        ["run", "name", "signal_id", "body", "actor", "at", "step"],
        select(
            bindparam("run"),
            bindparam("name"),
            bindparam("signal_id"),
            bindparam("body"),
            bindparam("actor"),
            bindparam("at"),
            null(),
        ).where(
            select(runs.c.id).where(runs.c.id == bindparam("run"), _OPEN).exists(),
            ~select(signals.c.id)
            .where(signals.c.run == bindparam("run"), signals.c.signal_id == bindparam("signal_id"))
            .exists(),
        ),
    )
)
FIND_SIGNAL: Final = Statement(
    select(signals.c.id, signals.c.body, signals.c.actor, signals.c.at, signals.c.signal_id)
    .where(signals.c.run == bindparam("b_run"), signals.c.name == bindparam("b_name"), signals.c.step.is_(None))
    .order_by(signals.c.id)
    .limit(1)
)
TAKE_SIGNAL: Final = Statement(
    update(signals).where(signals.c.id == bindparam("b_id")).values(step=bindparam("n_step"))
)
GET_OWNED: Final = Statement(
    select(runs.c.status).where(runs.c.id == bindparam("b_run"), runs.c.owner == bindparam("b_owner"))
)
LIST_DUE: Final = Statement(
    select(steps.c.run, steps.c.path, steps.c.attempt, steps.c.type)
    .join_from(steps, runs, steps.c.run == runs.c.id)
    .where(steps.c.state == StepState.WAITING.value, steps.c.due_at <= bindparam("b_now"), _UNFINISHED)
    .order_by(steps.c.due_at)
    .limit(bindparam("b_limit"))
)
LIST_EXPIRED: Final = Statement(
    select(runs.c.id)
    .where(runs.c.status == RunStatus.WAITING.value, runs.c.deadline_at <= bindparam("b_now"))
    .order_by(runs.c.deadline_at)
    .limit(bindparam("b_limit"))
)
LIST_STEP_APPROVALS: Final = Statement(
    select(*[steps.c[name] for name in STEP_COLUMNS])
    .where(steps.c.run == bindparam("b_run"), steps.c.type == "WAIT.APPROVAL", steps.c.path.like("%/%"))
    .order_by(steps.c.id)
)
COUNT_LOST: Final = Statement(
    select(func.count())
    .select_from(steps)
    .where(
        steps.c.run == bindparam("b_run"),
        or_(steps.c.state == StepState.UNKNOWN.value, steps.c.state == StepState.ADMITTED.value),
    )
)

INSERT_EVENT: Final = Statement(insert(events).values({c.name: bindparam(c.name) for c in events.columns}))
HAS_EVENT: Final = Statement(
    select(events.c.id).where(events.c.id == bindparam("b_id"), events.c.at == bindparam("b_at"))
)
INSERT_VALUE: Final = Statement(
    insert(values).from_select(
        ["digest", "body"],
        select(bindparam("digest"), bindparam("body")).where(
            ~select(values.c.id).where(values.c.digest == bindparam("digest")).exists()
        ),
    )
)

GET_RUN: Final = Statement(
    select(*runs.columns).where(runs.c.run_id == bindparam("b_run_id")).order_by(runs.c.generation.desc()).limit(1)
)
GET_RUN_BY_KEY: Final = Statement(select(*runs.columns).where(runs.c.id == bindparam("b_run")))
LIST_STEPS: Final = Statement(
    select(*[steps.c[name] for name in STEP_COLUMNS])
    .where(steps.c.run == bindparam("b_run"), steps.c.path >= bindparam("b_from"), steps.c.path < bindparam("b_to"))
    .order_by(steps.c.id)
)
LIST_ALL_STEPS: Final = Statement(
    select(*[steps.c[name] for name in STEP_COLUMNS]).where(steps.c.run == bindparam("b_run")).order_by(steps.c.id)
)
LIST_RUNS: Final = Statement(
    select(*runs.columns)
    .where(
        runs.c.id < bindparam("b_before"),
        or_(bindparam("b_status") == "", runs.c.status == bindparam("b_status")),
        _NEWEST,
    )
    .order_by(runs.c.id.desc())
    .limit(bindparam("b_limit"))
)
_by_age = runs.c.id + 0
"""Not the bare key: SQLite would rather walk through all runs in its order than sort the few that are wanted."""
LIST_UNDRIVEN: Final = Statement(
    select(*runs.columns).where(_by_age > bindparam("b_after"), UNDRIVEN).order_by(_by_age).limit(bindparam("b_limit"))
)
LIST_OPEN: Final = Statement(
    select(*runs.columns).where(runs.c.id > bindparam("b_after"), _OPEN).order_by(runs.c.id).limit(bindparam("b_limit"))
)
LIST_REOPENABLE: Final = Statement(
    select(*runs.columns)
    .where(
        runs.c.id > bindparam("b_after"),
        or_(*[runs.c.status == status.value for status in sorted(REOPENABLE)]),
        _NEWEST,
    )
    .order_by(runs.c.id)
    .limit(bindparam("b_limit"))
)
COUNT_RUNS: Final = Statement(select(runs.c.status, runs.c.owner, func.count()).group_by(runs.c.status, runs.c.owner))
LIST_LOST: Final = Statement(
    select(runs.c.run_id, steps.c.path, runs.c.owner)
    .join_from(steps, runs, steps.c.run == runs.c.id)
    .where(
        or_(steps.c.state == StepState.UNKNOWN.value, steps.c.state == StepState.ADMITTED.value),
        _OPEN,
    )
    .order_by(steps.c.id)
    .limit(bindparam("b_limit"))
)
LIST_SHAPES: Final = Statement(
    select(*[steps.c[name] for name in SHAPE_COLUMNS])
    .where(steps.c.run == bindparam("b_run"), steps.c.path > bindparam("b_after"), steps.c.path < bindparam("b_to"))
    .order_by(steps.c.path)
    .limit(bindparam("b_limit"))
)
LIST_CALL_TYPES: Final = Statement(
    select(steps.c.type, func.min(steps.c.path))
    .where(steps.c.run == bindparam("b_run"), steps.c.path.not_like("%/%"))
    .group_by(steps.c.type)
    .order_by(steps.c.type)
)
GET_STEP: Final = Statement(
    select(*[steps.c[name] for name in STEP_COLUMNS]).where(
        steps.c.run == bindparam("b_run"), steps.c.path == bindparam("b_path")
    )
)
LIST_EVENTS: Final = Statement(
    select(*events.columns)
    .where(events.c.id > bindparam("b_after"), events.c.id <= bindparam("b_last"))
    .order_by(events.c.id)
    .limit(bindparam("b_limit"))
)
LIST_TOLD: Final = Statement(
    select(
        events.c.id, events.c.kind, events.c.step, events.c.body,
        steps.c.type, steps.c.state, steps.c.attempt, steps.c.output,
    )
    .outerjoin_from(events, steps, and_(steps.c.run == bindparam("b_run"), steps.c.path == events.c.step))
    .where(events.c.id > bindparam("b_after"), events.c.id <= bindparam("b_last"))
    .order_by(events.c.id)
    .limit(bindparam("b_limit"))
)  # fmt: skip
GET_VALUE: Final = Statement(select(values.c.body).where(values.c.digest == bindparam("b_digest")))
GET_VALUE_ID: Final = Statement(select(values.c.id).where(values.c.digest == bindparam("b_digest")))
GET_VALUE_BY_ID: Final = Statement(select(values.c.digest, values.c.body).where(values.c.id == bindparam("b_id")))

INSERT_LIST: Final = Statement(
    insert(lists).values(base=bindparam("base"), length=bindparam("length"), added=bindparam("added"))
)
GET_LIST: Final = Statement(select(lists.c.base, lists.c.added).where(lists.c.id == bindparam("b_id")))
INSERT_RECEIPT: Final = Statement(insert(receipts).values({c.name: bindparam(c.name) for c in receipts.columns}))
GET_TIP: Final = Statement(select(receipts.c.id, receipts.c.hash).order_by(receipts.c.id.desc()).limit(1))
LIST_RECEIPTS: Final = Statement(
    select(receipts.c.id, receipts.c.line)
    .where(receipts.c.id > bindparam("b_after"))
    .order_by(receipts.c.id)
    .limit(bindparam("b_limit"))
)
LIST_RUN_RECEIPTS: Final = Statement(
    select(receipts.c.id, receipts.c.line)
    .where(
        receipts.c.run.in_(select(runs.c.id).where(runs.c.run_id == bindparam("b_run_id"))),
        receipts.c.id > bindparam("b_after"),
    )
    .order_by(receipts.c.id)
    .limit(bindparam("b_limit"))
)
IS_UNDER_WAY: Final = Statement(
    select(steps.c.id)
    .join_from(steps, runs, steps.c.run == runs.c.id)
    .where(
        steps.c.run == bindparam("b_run"),
        steps.c.path == bindparam("b_path"),
        steps.c.state == StepState.ADMITTED.value,
        steps.c.attempt == bindparam("b_attempt"),
        runs.c.status == RunStatus.CANCELLED.value,
    )
)
GET_META: Final = Statement(select(meta.c.value).where(meta.c.name == bindparam("b_name")))
MOVE_META: Final = Statement(update(meta).where(meta.c.name == bindparam("b_name")).values(value=bindparam("n_value")))
SET_META: Final = Statement(insert(meta).values(name=bindparam("name"), value=bindparam("value")))
