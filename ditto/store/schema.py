"""The tables of the store, in SQLAlchemy Core. Columns are integers and text only: the driver reads and writes them.

Times are whole microseconds since the epoch, UTC. A value column holds JSON text, or `@` and the digest of a row of
`ditto_values`, or `+` and JSON of a value with lists that grow. A list is a row of `ditto_lists`: the ids of the values
that it adds to the list it is based on. The id of an event packs its run and its number in the run: `run << 32 | seq`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from sqlalchemy import (
    BigInteger,
    Column,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    or_,
)

SCHEMA_VERSION: Final = 6
"""Rises with every change of these tables."""

APPLICATION_ID: Final = 0x44495454
"""`DITT`, in the header of every store."""


class RunStatus(StrEnum):
    """Where a run stands."""

    RUNNING = "running"
    WAITING = "waiting"
    PAUSED = "paused"
    INTERRUPTED = "interrupted"
    UNKNOWN = "unknown"
    BLOCKED = "blocked"
    FAILED = "failed"
    EXHAUSTED = "exhausted"
    COMPLETED = "completed"
    CANCELLED = "cancelled"


PAUSING: Final = "pausing"
"""Shown for a run that is paused and whose owner still drains it. Never stored."""

REOPENABLE: Final = frozenset({RunStatus.FAILED, RunStatus.EXHAUSTED})
"""Closed, but reopened when asked for by name."""

FINISHED: Final = frozenset({RunStatus.COMPLETED, RunStatus.CANCELLED})
"""Closed for good."""

CLOSED: Final = REOPENABLE | FINISHED


class StepState(StrEnum):
    """Where a step stands. A step without a row has not begun, or left no trace that matters."""

    ADMITTED = "admitted"
    """An attempt is about to be made, or was made and its outcome is lost."""
    COMPLETED = "completed"
    FAILED = "failed"
    SKIPPED = "skipped"
    REFUSED = "refused"
    """The last attempt is known to have changed nothing; another may be made."""
    UNKNOWN = "unknown"
    RETRYING = "retrying"
    """The last attempt failed, and the next one follows at `due_at`."""
    OPEN = "open"
    """Under way: a Loop inside a Flow, whose output is the state after `attempt` iterations; or the try `attempt` of a
    turn's call that may simply be made again."""
    WAITING = "waiting"
    """Open until a signal, a decision or a time settles it; nobody need drive the run meanwhile."""


SETTLED: Final = frozenset({StepState.COMPLETED, StepState.SKIPPED})
"""Dependants may go on."""

UNDER_WAY: Final = frozenset({StepState.ADMITTED, StepState.OPEN, StepState.WAITING})
"""Begun, and not ended."""

metadata = MetaData()

runs = Table(
    "ditto_runs",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("run_id", Text, nullable=False),
    Column("generation", Integer, nullable=False),
    Column("kind", Text, nullable=False),
    Column("workflow", Text, nullable=False),
    Column("version", Text, nullable=False),
    Column("input", Text, nullable=False),
    Column("input_digest", Text, nullable=False),
    Column("status", Text, nullable=False),
    Column("owner", Text),
    Column("fence", Integer, nullable=False),
    Column("seq", Integer, nullable=False),
    Column("iteration", Integer, nullable=False),
    Column("state", Text),
    Column("error", Text),
    Column("crashes", Integer, nullable=False, server_default="0"),
    Column("claimed_seq", Integer, nullable=False, server_default="0"),
    Column("created_at", BigInteger, nullable=False),
    Column("updated_at", BigInteger, nullable=False),
    Column("deadline_at", BigInteger),
    UniqueConstraint("run_id", "generation"),
)
UNDRIVEN: Final = or_(runs.c.status == RunStatus.RUNNING.value, runs.c.status == RunStatus.INTERRUPTED.value)
"""Somebody drives the run, or may have to. A query that says it in these words needs to look at no other run."""

Index("ditto_runs_undriven", runs.c.owner, sqlite_where=UNDRIVEN)
Index("ditto_runs_deadline", runs.c.deadline_at, sqlite_where=runs.c.status == RunStatus.WAITING.value)

steps = Table(
    "ditto_steps",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("run", Integer, ForeignKey(runs.c.id), nullable=False),
    Column("path", Text, nullable=False),
    Column("type", Text, nullable=False),
    Column("version", Text, nullable=False),
    Column("after", Text, nullable=False),
    Column("effect", Text),
    Column("state", Text, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("key", Text),
    Column("arguments", Text),
    Column("output", Text),
    Column("error", Text),
    Column("admitted_at", BigInteger),
    Column("settled_at", BigInteger),
    Column("due_at", BigInteger),
    Column("deadline_at", BigInteger),
    UniqueConstraint("run", "path"),
)
Index("ditto_steps_due", steps.c.due_at, sqlite_where=steps.c.state == StepState.WAITING.value)

Index("ditto_steps_waiting", steps.c.key, sqlite_where=steps.c.state == StepState.WAITING.value)

signals = Table(
    "ditto_signals",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("run", Integer, ForeignKey(runs.c.id), nullable=False),
    Column("name", Text, nullable=False),
    Column("signal_id", Text, nullable=False),
    Column("body", Text, nullable=False),
    Column("actor", Text, nullable=False),
    Column("at", BigInteger, nullable=False),
    Column("step", Text),
    UniqueConstraint("run", "signal_id"),
)

events = Table(
    "ditto_events",
    metadata,
    Column("id", BigInteger().with_variant(Integer, "sqlite"), primary_key=True),
    Column("at", BigInteger, nullable=False),
    Column("kind", Text, nullable=False),
    Column("step", Text),
    Column("body", Text),
)

values = Table(
    "ditto_values",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("digest", LargeBinary, nullable=False, unique=True),
    Column("body", Text, nullable=False),
)

lists = Table(
    "ditto_lists",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("base", Integer, ForeignKey("ditto_lists.id")),
    Column("length", Integer, nullable=False),
    Column("added", Text, nullable=False),
)

receipts = Table(
    "ditto_receipts",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("run", Integer, ForeignKey(runs.c.id), nullable=False),
    Column("step", Text, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("hash", Text, nullable=False),
    Column("line", Text, nullable=False),
)
Index("ditto_receipts_run", receipts.c.run)

meta = Table(
    "ditto_meta",
    metadata,
    Column("name", Text, primary_key=True),
    Column("value", Text, nullable=False),
)
