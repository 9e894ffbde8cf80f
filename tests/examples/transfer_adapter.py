"""Money transfers: a second adapter of the recovery workflows, with other names and two profiles.

`TRANSFER` holds the money and captures it; a hold can be voided. `CHAIN` has four operations in a row, each of which
can be undone. The table of jobs is the one of the orders (`recovery_jobs`), which knows no domain; everything else is
of this module: payload, prompt, sources, kinds, protocol, and what the bank must prove. Start at `TransferStore`.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Final, Literal

import anyio.to_thread
import httpx
from sqlalchemy import Connection

from ditto import (
    Absent,
    Committed,
    Context,
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
from ditto.recovery import TERMINAL, Approval, Job, JobError, Operation, PlannedOperation, Profile, Reason, Stage
from examples._shared.tools import recovery_jobs as jobs
from tests.examples.transfer_service import fingerprint

_PAYLOAD: Final[dict[str, Json]] = {
    "type": "object",
    "properties": {
        "from": {"type": "string", "pattern": "^ACC-[0-9]+$"},
        "to": {"type": "string", "pattern": "^ACC-[0-9]+$"},
        "amount": {"type": "integer", "minimum": 1},
    },
    "required": ["from", "to", "amount"],
    "additionalProperties": False,
}
_PROMPT: Final = (
    "You read transfer requests. Extract the account that pays, the account that is paid, and the amount as a whole "
    "number. Answer with one JSON object and nothing else, with the fields from, to and amount."
)

TRANSFER: Final = Profile(
    payload=_PAYLOAD,
    prompt=_PROMPT,
    sources=("core", "mirror"),
    operations=(
        PlannedOperation(kind="hold", stage="held", undo="void"),
        PlannedOperation(kind="capture", stage="completed"),
    ),
    answer=("from", "amount"),
)

CHAIN: Final = Profile(
    payload=_PAYLOAD,
    prompt=_PROMPT,
    sources=("core",),
    operations=(
        PlannedOperation(kind="register", stage="registered", undo="unregister"),
        PlannedOperation(kind="hold", stage="held", undo="void"),
        PlannedOperation(kind="announce", stage="announced", undo="retract"),
        PlannedOperation(kind="capture", stage="completed", undo="reverse"),
    ),
)

_ANY: Final[dict[str, Json]] = {"type": "object", "required": ["id"]}


class TransferStore:
    """Jobs about transfers, in `jobs.sqlite` of a directory."""

    def __init__(self, directory: Path, origin: str, profile: Profile = TRANSFER) -> None:
        self.directory: Final = directory
        self.path: Final = directory / "jobs.sqlite"
        self.profile: Final = profile
        self._origin = origin
        self._engine = jobs.open_jobs(self.path)

    async def create(self, id: str, requires_approval: bool = False) -> Job:
        """A queued job for `<id>.txt` as it is now."""
        digest = hashlib.sha256((self.directory / f"{id}.txt").read_bytes()).hexdigest()
        with jobs.transaction(self._engine) as connection:
            jobs.commit_creation(connection, id, digest, requires_approval)
        self._project(id)
        return self.job(id)

    def job(self, id: str) -> Job:
        """The job as it is recorded."""
        with self._engine.connect() as connection:
            return jobs.get_job(connection, id)

    def events(self, id: str) -> list[dict[str, Any]]:
        """The job's history."""
        with self._engine.connect() as connection:
            return jobs.list_events(connection, id)

    def decide(self, id: str, decision: Literal["approve", "reject"], actor: str) -> Job:
        """A person's decision about a paused job, bound to the transfer."""
        with jobs.transaction(self._engine) as connection:
            shown = jobs.order_fingerprint(jobs.get_job(connection, id).order or {})
            approval = Approval(actor=actor, decision=decision, fingerprint=shown)
            decided = jobs.commit_decision(connection, id, approval)
        self._project(id)
        return decided

    def close(self) -> None:
        """Let go of the file."""
        self._engine.dispose()

    @property
    def tools(self) -> list[Tool]:
        """The nine tools that the workflows call."""
        local = (self._read, self._prepare, self._checkpoint, self._state, self._context)
        return [
            *(Tool(f"recovery{each.__name__}", each, _ANY, effect="local", database=self.path) for each in local),
            Tool("recovery_source", self._source, _ANY, effect="read"),
            Tool("recovery_catalog", self._catalog, _ANY, effect="read", record=_select),
            Tool(
                "recovery_operation",
                self._operation,
                _ANY,
                effect=lambda arguments: "write" if arguments["apply"] else "read",
                key=lambda arguments: _key(arguments["id"], arguments["kind"]),
                lookup=self._look_up,
                absence_is_final=True,
            ),
            Tool("recovery_report", self._report, _ANY, effect="idempotent"),
        ]

    # --- local: in the transaction that commits the step -------------------------------------------------------------

    def _read(self, arguments: dict[str, Any], ctx: StepContext) -> dict[str, Any]:
        job = jobs.get_job(ctx.connection, arguments["id"])
        return {"job": job.to_json(), "profile": self.profile.model_dump(mode="json")}

    def _prepare(self, arguments: dict[str, Any], ctx: StepContext) -> dict[str, Any]:
        transfer = arguments["order"]
        if transfer["from"] == transfer["to"]:
            raise ToolError("payer and payee are one account", code="TRANSFER_INVALID")
        context = Context.model_validate(arguments["context"])
        source_hash = arguments["sourceHash"]
        return jobs.commit_preparation(ctx.connection, arguments["id"], transfer, context, source_hash).to_json()

    def _checkpoint(self, arguments: dict[str, Any], ctx: StepContext) -> dict[str, Any]:
        operation = Operation.model_validate(arguments["operation"])
        job = jobs.get_job(ctx.connection, arguments["id"])
        expected = (_key(job.id, operation.kind), fingerprint(operation.kind, job.order or {}))
        if (operation.key, operation.fingerprint) != expected:
            raise ToolError(f"the bank's {operation.key} is not what {job.id} asks for", code="RECEIPT_MISMATCH")
        return jobs.commit_operation(ctx.connection, self.profile, job.id, operation).to_json()

    def _state(self, arguments: dict[str, Any], ctx: StepContext) -> dict[str, Any]:
        error = None if arguments["error"] is None else JobError.model_validate(arguments["error"])
        return jobs.commit_stage(ctx.connection, arguments["id"], Stage(arguments["stage"]), error).to_json()

    def _context(self, arguments: dict[str, Any], ctx: StepContext) -> dict[str, Any]:
        context = Context.model_validate(arguments["context"])
        return jobs.commit_context(ctx.connection, arguments["id"], context, arguments["answer"]).to_json()

    # --- outside -----------------------------------------------------------------------------------------------------

    def _source(self, arguments: dict[str, Any]) -> ExternalResult | dict[str, Json]:
        text = (self.directory / f"{arguments['id']}.txt").read_bytes()
        digest = hashlib.sha256(text).hexdigest()
        if digest != self.job(arguments["id"]).source_hash:
            raise ToolError("the request was changed after the job was created", code="SOURCE_CHANGED")
        if len(text) > arguments["maxBytes"]:
            error = ResultError(
                code="SOURCE_TOO_LARGE",
                message=f"{len(text)} bytes",
                retryable=True,
                details={"requiredBytes": len(text)},
            )
            return ExternalResult(source="recovery_source", status="failed", error=error)
        return {"text": text.decode(), "sourceHash": digest}

    async def _catalog(self, arguments: dict[str, Any], ctx: StepContext) -> dict[str, Json]:
        transfer = (await self._load(arguments["id"])).order or {}
        params = {"account": transfer["from"]}
        status, found = await self._exchange(ctx, "GET", f"/funds/{arguments['source']}", params=params)
        if status != 200:
            raise ToolError(str(found), code="UNAVAILABLE" if status == 503 else "NO_ACCOUNT")
        if found["funds"] < transfer["amount"]:
            raise ToolError("there is not enough on the account", code="INSUFFICIENT_FUNDS")
        return {"funds": found["funds"]}

    async def _operation(self, arguments: dict[str, Any], ctx: StepContext) -> dict[str, Any]:
        key, kind = _key(arguments["id"], arguments["kind"]), arguments["kind"]
        if not arguments["apply"]:
            try:
                return (await self._ask(ctx, "GET", key, kind)).to_json()
            except NoAnswer as error:
                raise ToolError(f"the look-up confirms nothing: {error}", code="LOOKUP_UNAVAILABLE") from None
        body = {"kind": kind, "transfer": self._permitted(await self._load(arguments["id"]), kind)}
        operation = await self._ask(ctx, "POST", key, kind, json=body)
        if operation.state == "pending":
            raise NoAnswer(f"{key} is pending over there")
        return operation.to_json()

    async def _look_up(self, key: str, arguments: dict[str, Any], ctx: StepContext) -> LookupResult:
        operation = await self._ask(ctx, "GET", key, arguments["kind"])
        match operation.state:
            case "absent":
                return Absent()
            case "pending":
                return Pending()
            case _:
                return Committed(operation.to_json())

    def _report(self, arguments: dict[str, Any]) -> dict[str, Json]:
        return {"revision": self._project(arguments["id"])}

    def _permitted(self, job: Job, kind: str) -> dict[str, Any]:
        """What may be asked of the bank for this job now."""
        transfer = job.order or {}
        if job.requires_approval and (
            job.approval is None or job.approval.fingerprint != jobs.order_fingerprint(transfer)
        ):
            raise ToolError("this transfer is not approved", code="APPROVAL_MISMATCH")
        if self.profile.undone_by(kind) is not None:
            if not jobs.may_undo(job, self.profile, kind):
                raise ToolError(f"nothing permits {kind}", code="UNDO_NOT_PERMITTED")
        elif job.stage in TERMINAL:
            raise ToolError(f"the job is {job.stage}", code="STAGE_CONFLICT")
        return transfer

    async def _ask(self, ctx: StepContext, method: str, key: str, kind: str, **options: Any) -> Operation:
        """What the bank says of an operation. NoAnswer, a plain exception, where it says nothing that can be used."""
        status, found = await self._exchange(ctx, method, f"/operations/{key}", **options)
        if status == 409:
            raise ToolError(str(found), code="OPERATION_CONFLICT")
        if status not in (200, 202, 422) or found.get("key") != key:
            raise NoAnswer(f"status {status}: {found}")
        if found["state"] == "absent":
            return Operation(kind=kind, key=key, state="absent")
        reason = None if found["reason"] is None else Reason(code=f"{kind.upper()}_REFUSED", message=found["reason"])
        return Operation.model_validate({**found, "reason": reason})

    async def _exchange(self, ctx: StepContext, method: str, path: str, **options: Any) -> tuple[int, dict[str, Any]]:
        try:
            async with httpx.AsyncClient(trust_env=False, verify=False) as client:
                response = await ctx.sandbox.request(client, method, self._origin + path, **options)
        except httpx.HTTPError as error:
            raise NoAnswer(f"no answer ({type(error).__name__})") from error
        return response.status_code, response.json()

    async def _load(self, id: str) -> Job:
        return await anyio.to_thread.run_sync(self.job, id)

    def _project(self, id: str) -> int:
        """Write `results/<id>.json`; returns the revision it shows."""
        job = self.job(id)
        path = self.directory / "results" / f"{id}.json"
        path.parent.mkdir(exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(job.to_json(), ensure_ascii=False), encoding="utf-8")
        part.replace(path)
        return job.revision


class NoAnswer(Exception):
    """The bank said nothing that can be used. What was asked of it may have been done."""


def _select(connection: Connection, outcome: Outcome) -> None:
    if outcome.value["status"] == "success":
        jobs.commit_selection(connection, outcome.arguments["id"], outcome.arguments["source"])


def _key(id: str, kind: str) -> str:
    return f"{id}-{kind}"
