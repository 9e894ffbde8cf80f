"""RecoveryStore: the orders' adapter of the recovery workflows. Jobs in one SQLite file, and the tools that keep them.

Owns the tools and the files of one directory: `tasks.sqlite` (the jobs, and the runtime's own tables beside them),
`<id>.txt` (the sources, read only) and `results/<id>.json` (projections, which can be made again). What a job may
become is `recovery_jobs.py`; what an order is, and the service's protocol, `recovery_orders.py`.

    store = RecoveryStore(directory, service.url)
    await store.create("order-731")
    runtime = create_ditto(config, store=store.path, sandbox=…,
        workers=[create_context_worker(), create_infer_worker(), create_interaction_worker(tools=store.tools)])

The tools that keep the job are `local`: they write in the transaction that commits their step, so that job and run
never tell two stories. `create`, `decide` and `job` use short transactions of their own, from any process.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import anyio.to_thread
from pydantic import ConfigDict, Field
from pydantic.alias_generators import to_camel
from sqlalchemy import Connection

from ditto import (
    Absent,
    Committed,
    ConfigError,
    Context,
    Contract,
    ExternalResult,
    Json,
    LookupResult,
    Outcome,
    Pending,
    ResultError,
    StepContext,
    Tool,
    ToolError,
)
from ditto.recovery import ID_PATTERN, Approval, Job, JobError, Operation, Stage
from examples._shared.tools import recovery_jobs as jobs
from examples._shared.tools.recovery_orders import (
    PROFILE,
    FulfillmentClient,
    NoAnswerError,
    OrderJob,
    as_order_job,
    check_permitted,
    check_proof,
    key_of,
    parse_order,
    reservation_key,
)

SOURCE_MAX_BYTES: Final = 65536
ACTOR_MAX_CHARS: Final = 200

_BLOCK_BYTES: Final = 65536


# --- what the tools are given ----------------------------------------------------------------------------------------


class Arguments(Contract):
    """The arguments of every tool, in camel case."""

    model_config = ConfigDict(alias_generator=to_camel)

    id: str = Field(pattern=ID_PATTERN)


class SourceArguments(Arguments):
    max_bytes: int = Field(ge=1, le=SOURCE_MAX_BYTES, strict=True)


class PreparationArguments(Arguments):
    order: dict[str, Json]
    context: Context
    source_hash: str


class CatalogArguments(Arguments):
    source: Literal["primary", "backup"]


class OperationArguments(Arguments):
    kind: Literal["reserve", "ship", "release"]
    apply: bool = Field(strict=True)


class CheckpointArguments(Arguments):
    kind: Literal["reserve", "ship", "release"]
    operation: Operation


class StateArguments(Arguments):
    stage: Literal["paused", "timed-out", "uncertain", "needs-review", "failed"]
    error: JobError | None = None


class ContextArguments(Arguments):
    context: Context
    answer: dict[str, Json]


class SubmissionUnknown(Exception):
    """The operation was sent, and what became of it is not known. The engine asks `look_up`."""


# --- the store -------------------------------------------------------------------------------------------------------


class RecoveryStore:
    """Jobs about orders, kept in `tasks.sqlite` of an existing directory.

    `service_origin`: http(s)://host:port of the fulfillment service, which the sandbox must allow. Raises ConfigError,
    and StoreSchemaError for a file of another version. Close it after the runtime.
    """

    def __init__(self, directory: str | os.PathLike[str], service_origin: str) -> None:
        self.directory: Final = Path(directory).resolve()
        if not self.directory.is_dir():
            raise ConfigError(f"{self.directory} is no directory; make it first")
        self.path: Final = self.directory / "tasks.sqlite"
        self._service = FulfillmentClient(service_origin)
        self._engine = jobs.open_jobs(self.path)

    @property
    def tools(self) -> list[Tool]:
        """The tools of the workflows, for create_interaction_worker and for the sandbox's list of tools."""
        return [*self._local_tools(), *self._outside_tools()]

    async def create(self, id: str, requires_approval: bool = False) -> OrderJob:
        """A queued job for `<id>.txt`, bound to the file as it is now.

        ToolError ID_INVALID, SOURCE_NOT_FOUND, or JOB_EXISTS; nothing is changed then.
        """
        return await anyio.to_thread.run_sync(self._create, id, requires_approval)

    def job(self, id: str) -> OrderJob:
        """The job as it is recorded. ToolError JOB_NOT_FOUND or SCHEMA_UNSUPPORTED."""
        with self._engine.connect() as connection:
            return as_order_job(jobs.get_job(connection, id))

    def events(self, id: str) -> list[dict[str, Any]]:
        """The job's history, one event for each revision."""
        with self._engine.connect() as connection:
            return jobs.list_events(connection, id)

    def decide(self, id: str, decision: Literal["approve", "reject"], actor: str) -> OrderJob:
        """A person's decision about a paused job, bound to the order as it is now. One for each pause.

        `actor` is recorded, not verified: who may decide is the application's to know. ToolError NOT_PAUSED,
        ACTOR_MISSING or DECISION_INVALID; nothing is changed then.
        """
        if decision not in ("approve", "reject"):
            raise ToolError(f"a decision is approve or reject, not {decision!r}", code="DECISION_INVALID")
        if not 1 <= len(actor.strip()) <= ACTOR_MAX_CHARS:
            raise ToolError(f"say who decides, in 1 to {ACTOR_MAX_CHARS} characters", code="ACTOR_MISSING")
        with jobs.transaction(self._engine) as connection:
            order = jobs.get_job(connection, id).order or {}
            approval = Approval(actor=actor.strip(), decision=decision, fingerprint=jobs.order_fingerprint(order))
            decided = jobs.commit_decision(connection, id, approval)
        self._project(id)
        return as_order_job(decided)

    def close(self) -> None:
        """Let go of the file. After the runtime that uses it."""
        self._engine.dispose()

    def _create(self, id: str, requires_approval: bool) -> OrderJob:
        source = _read_source(self._source_path(_check_id(id)), 0)
        if source is None:
            raise ToolError(f"{id}.txt is not there; write the source before the job", code="SOURCE_NOT_FOUND")
        with jobs.transaction(self._engine) as connection:
            jobs.commit_creation(connection, id, source.digest, requires_approval)
        self._project(id)
        return self.job(id)

    # --- local tools: the job, in the transaction that commits the step ----------------------------------------------

    def _local_tools(self) -> list[Tool]:
        handlers: dict[str, tuple[Any, type[Arguments], str]] = {
            "recovery_read": (_read, Arguments, "The job and its profile."),
            "recovery_prepare": (_prepare, PreparationArguments, "Save order and context: queued to prepared."),
            "recovery_checkpoint": (_checkpoint, CheckpointArguments, "Verify an operation and save its stage."),
            "recovery_state": (_state, StateArguments, "Save a stage that says why the job does not go on."),
            "recovery_context": (_context, ContextArguments, "Save a session's conversation."),
        }
        return [
            Tool(name, handler, input_schema=schema, effect="local", database=self.path, description=description)
            for name, (handler, schema, description) in handlers.items()
        ]

    # --- tools that reach outside the transaction --------------------------------------------------------------------

    def _outside_tools(self) -> list[Tool]:
        return [
            Tool(
                "recovery_source",
                self._source,
                input_schema=SourceArguments,
                effect="read",
                description="The source's text, if it is unchanged and no longer than maxBytes.",
            ),
            Tool(
                "recovery_catalog",
                self._catalog,
                input_schema=CatalogArguments,
                effect="read",
                record=_select,
                description="Whether a source of the catalog has what the order asks for; the one that has is kept.",
            ),
            Tool(
                "recovery_operation",
                self._operation,
                input_schema=OperationArguments,
                effect=lambda arguments: "write" if arguments.apply else "read",
                key=lambda arguments: key_of(arguments.id, arguments.kind),
                lookup=self._look_up,
                absence_is_final=True,
                description="Look an operation up by its key, or submit it under that key.",
            ),
            Tool(
                "recovery_report",
                self._report,
                input_schema=Arguments,
                effect="idempotent",
                description="Write results/<id>.json anew.",
            ),
        ]

    def _source(self, arguments: SourceArguments) -> ExternalResult | dict[str, Json]:
        job = self.job(arguments.id)
        source = _read_source(self._source_path(arguments.id), arguments.max_bytes)
        if source is None:
            raise ToolError(f"{arguments.id}.txt is not there", code="SOURCE_NOT_FOUND")
        if source.digest != job.source_hash:
            raise ToolError(f"{arguments.id}.txt was changed after the job was created", code="SOURCE_CHANGED")
        if source.size_bytes > arguments.max_bytes:
            return _too_large(source.size_bytes, arguments.max_bytes)
        if not source.head.strip():
            raise ToolError(f"{arguments.id}.txt is empty", code="EMPTY_SOURCE")
        try:
            return {"text": source.head.decode(), "sourceHash": source.digest}
        except UnicodeDecodeError:
            raise ToolError(f"{arguments.id}.txt is no UTF-8 text", code="SOURCE_INVALID") from None

    async def _catalog(self, arguments: CatalogArguments, ctx: StepContext) -> dict[str, Json]:
        job = await self._load(arguments.id)
        if job.order is None:
            raise ToolError(f"job {job.id} has no order yet", code="NOT_PREPARED")
        return await self._service.read_catalog(ctx, arguments.source, job.order)

    async def _operation(self, arguments: OperationArguments, ctx: StepContext) -> dict[str, Any]:
        if arguments.apply:
            return await self._submit(arguments, ctx)
        try:
            operation = await self._service.look_up(ctx, key_of(arguments.id, arguments.kind), arguments.kind)
        except NoAnswerError as error:
            raise ToolError(
                f"the look-up confirms nothing: {error}", code="LOOKUP_UNAVAILABLE", retryable=True
            ) from None
        return operation.to_json()

    async def _submit(self, arguments: OperationArguments, ctx: StepContext) -> dict[str, Any]:
        """Submit what the store permits now. Raises SubmissionUnknown, a plain exception, when the answer is lost."""
        job = await self._load(arguments.id)
        order = check_permitted(job, arguments.kind)
        key = key_of(job.id, arguments.kind)
        try:
            operation = await self._service.submit(ctx, key, arguments.kind, order, reservation_key(job.id))
        except NoAnswerError as error:
            if not error.sent:
                raise ToolError(f"{key} was not sent: {error}", code="UNAVAILABLE", retryable=True) from None
            raise SubmissionUnknown(f"{key}: {error}") from error
        if operation.state not in ("committed", "rejected"):
            raise SubmissionUnknown(f"{key} is {operation.state} over there")
        return operation.to_json()

    async def _look_up(self, key: str, arguments: OperationArguments, ctx: StepContext) -> LookupResult:
        """What became of a submission. A rejected operation is an answer like a committed one."""
        operation = await self._service.look_up(ctx, key, arguments.kind)
        match operation.state:
            case "absent":
                return Absent()
            case "pending":
                return Pending()
            case "committed" | "rejected":
                return Committed(operation.to_json())

    def _report(self, arguments: Arguments) -> dict[str, Json]:
        return {"path": f"results/{arguments.id}.json", "revision": self._project(arguments.id)}

    # --- files -------------------------------------------------------------------------------------------------------

    async def _load(self, id: str) -> OrderJob:
        return await anyio.to_thread.run_sync(self.job, id)

    def _source_path(self, id: str) -> Path:
        return self.directory / f"{id}.txt"

    def _project(self, id: str) -> int:
        """Write the job's projection; returns the revision it shows.

        Whoever has written looks again: of two who write at once, the last one leaves what is recorded.
        """
        while True:
            job = self.job(id)
            _write_atomically(self.directory / "results" / f"{id}.json", job.to_json())
            if self.job(id).revision == job.revision:
                return job.revision


# --- local handlers: run in the transaction that commits their step --------------------------------------------------


def _read(arguments: Arguments, ctx: StepContext) -> dict[str, Any]:
    job = jobs.get_job(ctx.connection, arguments.id)
    return {"job": _shown(job), "profile": PROFILE.model_dump(mode="json")}


def _prepare(arguments: PreparationArguments, ctx: StepContext) -> dict[str, Any]:
    order = parse_order(arguments.order)
    source_hash = arguments.source_hash
    return _shown(jobs.commit_preparation(ctx.connection, arguments.id, order, arguments.context, source_hash))


def _checkpoint(arguments: CheckpointArguments, ctx: StepContext) -> dict[str, Any]:
    operation = arguments.operation
    if operation.kind != arguments.kind or operation.state not in ("committed", "rejected"):
        raise ToolError(f"{operation.key} is no confirmed {arguments.kind}", code="RECEIPT_MISMATCH")
    check_proof(jobs.get_job(ctx.connection, arguments.id), operation)
    return _shown(jobs.commit_operation(ctx.connection, PROFILE, arguments.id, operation))


def _state(arguments: StateArguments, ctx: StepContext) -> dict[str, Any]:
    return _shown(jobs.commit_stage(ctx.connection, arguments.id, Stage(arguments.stage), arguments.error))


def _context(arguments: ContextArguments, ctx: StepContext) -> dict[str, Any]:
    return _shown(jobs.commit_context(ctx.connection, arguments.id, arguments.context, arguments.answer))


def _select(connection: Connection, outcome: Outcome) -> None:
    """The commit part of recovery_catalog: the source that answered is the job's."""
    if outcome.value["status"] == "success":
        jobs.commit_selection(connection, outcome.arguments.id, outcome.arguments.source)


def _shown(job: Job) -> dict[str, Any]:
    return as_order_job(job).to_json()


# --- sources and projections -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Source:
    head: bytes
    """As much as was asked for."""
    size_bytes: int
    digest: str


def _read_source(path: Path, head_bytes: int) -> _Source | None:
    """The file's beginning, size and SHA-256, in one pass; None if it is not there."""
    digest, head, size_bytes = hashlib.sha256(), b"", 0
    try:
        with path.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
                head += block[: head_bytes - len(head)]
                size_bytes += len(block)
    except FileNotFoundError:
        return None
    return _Source(head, size_bytes, digest.hexdigest())


def _too_large(size_bytes: int, max_bytes: int) -> ExternalResult:
    error = ResultError(
        code="SOURCE_TOO_LARGE",
        message=f"the source has {size_bytes} bytes, and {max_bytes} may be read",
        retryable=size_bytes <= SOURCE_MAX_BYTES,
        details={"requiredBytes": size_bytes},
    )
    return ExternalResult(source="recovery_source", status="failed", error=error)


def _write_atomically(path: Path, value: Json) -> None:
    """The file with this content, or as it was; never a part of it."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(value, file, ensure_ascii=False, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _check_id(id: str) -> str:
    if not re.fullmatch(ID_PATTERN, id):
        raise ToolError("an id is 1 to 64 of letters, digits, '_' and '-'", code="ID_INVALID")
    return id
