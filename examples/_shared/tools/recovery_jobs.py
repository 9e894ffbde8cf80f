"""The table of jobs: every statement on it, and every move a job may make. Knows no domain but the profile it is given.

Owns the tables `jobs`, `job_events` and `job_meta`, which lie beside ditto's own in one SQLite file. Does not own
sources, HTTP or tools: those are `recovery_store.py` and `recovery_orders.py`. Start at `commit_change`, which every
transition goes through: it raises the revision by one, under a guard, and writes the event, in the transaction of its
caller. That is the engine's, where a `local` tool calls, and a short one of our own for `create` and `decide`.

What cannot be done is a ToolError with a code: JOB_NOT_FOUND, JOB_EXISTS, SCHEMA_UNSUPPORTED, STAGE_CONFLICT (the job
has moved on), SOURCE_CHANGED, RECEIPT_MISMATCH, NOT_PAUSED.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Column, Connection, Engine, Integer, MetaData, Table, Text, create_engine, event, select
from sqlalchemy.pool import NullPool

from ditto import Context, StoreSchemaError, ToolError
from ditto.recovery import TERMINAL, Approval, Job, JobError, Operation, Profile, Stage

SCHEMA_VERSION: Final = 1
"""Of the tables, and of each job."""

_BUSY_TIMEOUT_S: Final = 10

metadata = MetaData()

jobs = Table(
    "jobs",
    metadata,
    Column("id", Text, primary_key=True),
    Column("schema_version", Integer),
    Column("revision", Integer, nullable=False),
    Column("stage", Text, nullable=False),
    Column("source_hash", Text, nullable=False),
    Column("order_json", Text),
    Column("context_json", Text),
    Column("operations_json", Text, nullable=False),
    Column("approval_json", Text),
    Column("requires_approval", Integer, nullable=False),
    Column("selected_source", Text),
    Column("error_json", Text),
)

job_events = Table(
    "job_events",
    metadata,
    Column("job_id", Text, primary_key=True),
    Column("revision", Integer, primary_key=True),
    Column("at", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("stage", Text, nullable=False),
    Column("data_json", Text),
)

job_meta = Table("job_meta", metadata, Column("name", Text, primary_key=True), Column("value", Text, nullable=False))


# --- the file --------------------------------------------------------------------------------------------------------


def open_jobs(path: Path) -> Engine:
    """An engine for short transactions of our own, on a file that has the tables afterwards.

    Each connection has WAL, synchronous FULL and a busy timeout, and is closed after use. StoreSchemaError for tables
    of another version.
    """
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    engine = create_engine(f"sqlite:///{path}", poolclass=NullPool, connect_args={"timeout": _BUSY_TIMEOUT_S})
    event.listen(engine, "connect", _set_up)
    with transaction(engine) as connection:
        metadata.create_all(connection)
        found = connection.scalar(select(job_meta.c.value).where(job_meta.c.name == "schema_version"))
        if found is None:
            connection.execute(job_meta.insert().values(name="schema_version", value=str(SCHEMA_VERSION)))
        elif found != str(SCHEMA_VERSION):
            raise StoreSchemaError(f"{path}: the job tables have version {found}, this code knows {SCHEMA_VERSION}")
    return engine


@contextmanager
def transaction(engine: Engine) -> Iterator[Connection]:
    """One short transaction of our own: BEGIN IMMEDIATE … COMMIT, or nothing at all."""
    with engine.connect() as connection:
        connection.exec_driver_sql("BEGIN IMMEDIATE")
        yield connection
        connection.commit()


def _set_up(driver: sqlite3.Connection, _record: Any) -> None:
    driver.isolation_level = None  # the driver's implicit transactions off: BEGIN is ours
    for pragma in ("journal_mode=WAL", "synchronous=FULL"):
        driver.execute(f"PRAGMA {pragma}").close()


# --- reads -----------------------------------------------------------------------------------------------------------


def get_job(connection: Connection, id: str) -> Job:
    """The job as it is recorded. ToolError JOB_NOT_FOUND, or SCHEMA_UNSUPPORTED for one that this code cannot read."""
    row = connection.execute(select(jobs).where(jobs.c.id == id)).mappings().first()
    if row is None:
        raise ToolError(f"there is no job {id}; create it first", code="JOB_NOT_FOUND")
    if row["schema_version"] != SCHEMA_VERSION:
        raise ToolError(
            f"job {id} has schemaVersion {row['schema_version']}, this code knows {SCHEMA_VERSION}; nothing changed",
            code="SCHEMA_UNSUPPORTED",
        )
    return _job_of(dict(row))


def list_events(connection: Connection, id: str) -> list[dict[str, Any]]:
    """The job's history, one event for each revision."""
    found = select(job_events).where(job_events.c.job_id == id).order_by(job_events.c.revision)
    return [dict(row) for row in connection.execute(found).mappings()]


def order_fingerprint(order: Mapping[str, Any]) -> str:
    """The SHA-256 (64 hex digits) of an order's canonical JSON: what an approval is bound to."""
    canonical = json.dumps(order, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


# --- transitions -----------------------------------------------------------------------------------------------------


def commit_creation(connection: Connection, id: str, source_hash: str, requires_approval: bool) -> None:
    """A new job, queued, at revision 1. ToolError JOB_EXISTS."""
    if connection.execute(select(jobs.c.id).where(jobs.c.id == id)).first() is not None:
        raise ToolError(f"there is a job {id} already; it was not changed", code="JOB_EXISTS")
    job = Job(
        schema_version=SCHEMA_VERSION,
        id=id,
        revision=1,
        stage=Stage.QUEUED,
        source_hash=source_hash,
        requires_approval=requires_approval,
    )
    connection.execute(jobs.insert().values(_row_of(job)))
    _tell(connection, job, "created", {"sourceHash": source_hash})


def commit_preparation(
    connection: Connection, id: str, order: dict[str, Any], context: Context, source_hash: str
) -> Job:
    """queued → prepared: order and context, read from the source that the job was created for."""
    job = get_job(connection, id)
    if job.stage != Stage.QUEUED:
        raise _moved_on(job, "prepared")
    if source_hash != job.source_hash:
        raise ToolError("the order was read from another source than the job's", code="SOURCE_CHANGED")
    return commit_change(
        connection, job, "prepared", {"order": order}, stage=Stage.PREPARED, order=order, context=context, error=None
    )


def commit_selection(connection: Connection, id: str, source: str) -> Job:
    """The catalog source that answered. A job that had timed out is where it was before."""
    job = get_job(connection, id)
    if job.stage in TERMINAL or job.stage == Stage.PAUSED:
        raise _moved_on(job, "given a source")
    back = {"stage": Stage.PREPARED if job.approval is None else Stage.APPROVED, "error": None}
    changes = back if job.stage == Stage.TIMED_OUT else {}
    return commit_change(connection, job, "selected", {"source": source}, selected_source=source, **changes)


def commit_operation(connection: Connection, profile: Profile, id: str, operation: Operation) -> Job:
    """What is confirmed of an operation, committed or rejected, and the stage that follows from it."""
    job = get_job(connection, id)
    known = job.operations.get(operation.kind)
    if known == operation:
        return job
    if known is not None or not _may_be_confirmed(job, profile, operation.kind):
        raise _moved_on(job, f"given the operation {operation.kind}")
    stage, error = _decide_after(job, profile, operation)
    operations = {**job.operations, operation.kind: operation}
    told = {"operation": operation.to_json()}
    return commit_change(connection, job, operation.kind, told, stage=stage, error=error, operations=operations)


def commit_stage(connection: Connection, id: str, stage: Stage, error: JobError | None) -> Job:
    """prepared → paused (if an approval is required); or a stage that says why the job does not go on.

    timed-out, uncertain, needs-review and failed may follow every stage that is not terminal, but paused; timed-out
    and failed not once an operation is committed; uncertain not for an operation that is confirmed. needs-review may
    become uncertain while what would undo it is untried. The same stage and reason again change nothing.
    """
    job = get_job(connection, id)
    if job.stage == stage and job.error == error:
        return job
    if not _may_become(job, stage, error):
        raise _moved_on(job, stage)
    return commit_change(connection, job, "stage", {}, stage=stage, error=error)


def commit_context(connection: Connection, id: str, context: Context, answer: Mapping[str, Any]) -> Job:
    """The conversation with one more answer, which must still be true of the job."""
    job = get_job(connection, id)
    if job.order is None or answer.get("stage") != job.stage:
        raise _moved_on(job, f"given an answer about {answer.get('stage')}")
    return commit_change(connection, job, "answered", {"answer": dict(answer)}, context=context)


def commit_decision(connection: Connection, id: str, approval: Approval) -> Job:
    """paused → approved or rejected, once. ToolError NOT_PAUSED."""
    job = get_job(connection, id)
    if job.stage != Stage.PAUSED:
        raise ToolError(f"job {id} is {job.stage}; only a paused job is decided", code="NOT_PAUSED")
    stage = Stage.APPROVED if approval.decision == "approve" else Stage.REJECTED
    return commit_change(connection, job, "decided", {"approval": approval.to_json()}, stage=stage, approval=approval)


def commit_change(connection: Connection, job: Job, kind: str, told: dict[str, Any], **changes: Any) -> Job:
    """The job with these changes, at the next revision, and the event that tells of it.

    Guard: the revision and the stage that the change was decided on. ToolError STAGE_CONFLICT if they are gone.
    """
    changed = job.model_copy(update={**changes, "revision": job.revision + 1})
    guard = (jobs.c.id == job.id) & (jobs.c.revision == job.revision) & (jobs.c.stage == job.stage)
    if connection.execute(jobs.update().where(guard).values(_row_of(changed))).rowcount != 1:
        raise _moved_on(job, kind)
    if changed.error is not None and changed.error != job.error:
        told = {**told, "error": changed.error.to_json()}
    _tell(connection, changed, kind, told)
    return changed


# --- rules -----------------------------------------------------------------------------------------------------------


def may_undo(job: Job, profile: Profile, kind: str) -> bool:
    """Whether this kind may undo what it undoes: that is committed, and a later operation is confirmed as rejected."""
    undone = profile.undone_by(kind)
    return undone is not None and _is(job, undone.kind, "committed") and _rejected(job, profile) is not None


def _may_be_confirmed(job: Job, profile: Profile, kind: str) -> bool:
    if profile.planned(kind) is None:
        return job.stage in (Stage.NEEDS_REVIEW, Stage.UNCERTAIN) and may_undo(job, profile, kind)
    before = [each.kind for each in profile.operations[: [each.kind for each in profile.operations].index(kind)]]
    closed = job.stage in TERMINAL or job.stage in (Stage.QUEUED, Stage.PAUSED)
    return not closed and all(_is(job, each, "committed") for each in before)


def _decide_after(job: Job, profile: Profile, operation: Operation) -> tuple[str, JobError | None]:
    """The stage after a confirmed operation, and why it is that."""
    planned = profile.planned(operation.kind)
    if planned is None:
        return _decide_after_undoing(job, profile, operation)
    if operation.state == "committed":
        return planned.stage, None
    return (Stage.NEEDS_REVIEW if job.operations else Stage.FAILED), _reason_of(operation)


def _decide_after_undoing(job: Job, profile: Profile, operation: Operation) -> tuple[str, JobError | None]:
    """compensated once nothing stands that can be undone, for the reason of the operation that was rejected."""
    rejected = _rejected(job, profile)
    assert rejected is not None
    reason = _reason_of(rejected)
    if operation.state == "rejected":
        message = f"{rejected.kind} was rejected ({reason.message}), and so was {operation.kind}: "
        code = f"COMPENSATION_{operation.kind.upper()}_REJECTED"
        return Stage.NEEDS_REVIEW, JobError(
            code=code, message=message + _reason_of(operation).message, operation=operation.kind
        )
    undone = {*job.operations, operation.kind}
    standing = [each for each in profile.operations if _is(job, each.kind, "committed")]
    left = [each for each in standing if each.undo is not None and each.undo not in undone]
    return (Stage.NEEDS_REVIEW if left else Stage.COMPENSATED), reason


def _may_become(job: Job, stage: Stage, error: JobError | None) -> bool:
    operation = None if error is None else error.operation
    if stage is Stage.PAUSED:
        return job.stage == Stage.PREPARED and job.requires_approval and job.approval is None
    if job.stage == Stage.NEEDS_REVIEW:
        rejected = any(each.state == "rejected" for each in job.operations.values())
        return stage is Stage.UNCERTAIN and rejected and operation is not None and operation not in job.operations
    if job.stage in TERMINAL or job.stage == Stage.PAUSED:
        return False
    if stage is Stage.UNCERTAIN:
        return operation is None or operation not in job.operations
    if stage in (Stage.TIMED_OUT, Stage.FAILED):
        return not job.operations
    return stage is Stage.NEEDS_REVIEW


def _is(job: Job, kind: str, state: str) -> bool:
    operation = job.operations.get(kind)
    return operation is not None and operation.state == state


def _rejected(job: Job, profile: Profile) -> Operation | None:
    """The operation that was confirmed as rejected; not one that undoes."""
    return next((job.operations[each.kind] for each in profile.operations if _is(job, each.kind, "rejected")), None)


def _reason_of(operation: Operation) -> JobError:
    reason = operation.reason
    code, message = (reason.code, reason.message) if reason else ("REJECTED", "no reason was given")
    return JobError(code=code, message=message, operation=operation.kind)


def _moved_on(job: Job, what: str) -> ToolError:
    return ToolError(f"job {job.id} is {job.stage} and cannot be {what} now; enter it again", code="STAGE_CONFLICT")


# --- rows ------------------------------------------------------------------------------------------------------------


def _tell(connection: Connection, job: Job, kind: str, told: dict[str, Any]) -> None:
    connection.execute(
        job_events.insert().values(
            job_id=job.id,
            revision=job.revision,
            at=datetime.now(UTC).isoformat(timespec="milliseconds"),
            kind=kind,
            stage=job.stage,
            data_json=_encode(told) if told else None,
        )
    )


_JSON_COLUMNS: Final = ("order", "context", "operations", "approval", "error")


def _row_of(job: Job) -> dict[str, Any]:
    row = job.model_dump(mode="json", include=set(Job.model_fields))
    row["requires_approval"] = int(job.requires_approval)
    for name in _JSON_COLUMNS:
        value = row.pop(name)
        row[f"{name}_json"] = None if value is None else _encode(value)
    return row


def _job_of(data: dict[str, Any]) -> Job:
    data["requires_approval"] = bool(data["requires_approval"])
    for name in _JSON_COLUMNS:
        text = data.pop(f"{name}_json")
        data[name] = None if text is None else json.loads(text)
    return Job.model_validate(data)


def _encode(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
