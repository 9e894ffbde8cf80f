"""Orders: what the recovery workflows are told of them, and the HTTP protocol of the service that carries them out.

Owns the profile, the orders' JSON names, what may be sent for a job, and what an answer of the service must prove. The
protocol is the one of `fulfillment_service.py`; nothing of the service is used here but the form of its fingerprint.
Start at `PROFILE` and `FulfillmentClient`.
"""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import quote, urlsplit

import anyio
import httpx

from ditto import (
    ConfigError,
    DittoError,
    Json,
    LimitExceededError,
    SandboxDenied,
    StepContext,
    ToolError,
)
from ditto.recovery import TERMINAL, Job, Operation, PlannedOperation, Profile
from examples._shared.tools.fulfillment_ledger import SubmissionError, normalise_order, operation_fingerprint
from examples._shared.tools.recovery_jobs import may_undo, order_fingerprint

CAP_S: Final = 10.0
"""How long one request may take, whatever the workflow's own deadline is."""

RESPONSE_MAX_BYTES: Final = 65536

PROFILE: Final = Profile(
    payload={
        "type": "object",
        "properties": {
            "sku": {"type": "string", "minLength": 1, "maxLength": 64},
            "quantity": {"type": "integer", "minimum": 1, "maximum": 1_000_000},
            "address": {"type": "string", "minLength": 1, "maxLength": 500},
        },
        "required": ["sku", "quantity", "address"],
        "additionalProperties": False,
    },
    prompt=(
        "You read fulfillment requests. Extract the stock-keeping unit, the quantity as a whole number, and the "
        "delivery address, exactly as they are written. Answer with one JSON object and nothing else, with the fields "
        "sku, quantity and address."
    ),
    sources=("primary", "backup"),
    operations=(
        PlannedOperation(kind="reserve", stage="reserved", undo="release"),
        PlannedOperation(kind="ship", stage="completed"),
    ),
    answer=("sku", "quantity"),
)

_STATES_BY_STATUS: Final = {200: ("absent", "committed"), 202: ("pending",), 422: ("rejected",)}


class OrderJob(Job):
    """A job about an order: two of its operations have names of their own."""

    reservation: Operation | None = None
    shipment: Operation | None = None


def as_order_job(job: Job) -> OrderJob:
    """The job with the orders' names beside `operations`."""
    found = job.operations
    return OrderJob(**dict(job), reservation=found.get("reserve"), shipment=found.get("ship"))


# --- what an order is, and what may be sent for it -------------------------------------------------------------------


def parse_order(payload: dict[str, Any]) -> dict[str, Any]:
    """The order in its normal form. ToolError ORDER_INVALID."""
    try:
        return normalise_order(payload).to_json()
    except SubmissionError as error:
        raise ToolError(f"this is no order: {error}", code="ORDER_INVALID") from None


def check_permitted(job: Job, kind: str) -> dict[str, Any]:
    """The order, if this operation may be submitted for the job now.

    ToolError NOT_PREPARED, APPROVAL_MISSING, APPROVAL_MISMATCH (the order is not the one that was approved),
    STAGE_CONFLICT, or UNDO_NOT_PERMITTED (only a confirmed rejection permits a release).
    """
    if job.order is None:
        raise ToolError(f"job {job.id} has no order yet", code="NOT_PREPARED")
    if job.requires_approval:
        _check_approval(job, order_fingerprint(job.order))
    if PROFILE.undone_by(kind) is not None:
        if not may_undo(job, PROFILE, kind):
            raise ToolError(f"nothing that {kind} would undo was confirmed as rejected", code="UNDO_NOT_PERMITTED")
    elif job.stage in TERMINAL:
        raise ToolError(f"job {job.id} is {job.stage}; nothing more is sent for it", code="STAGE_CONFLICT")
    return job.order


def check_proof(job: Job, operation: Operation) -> None:
    """What the service confirms must be what the job asked for. ToolError RECEIPT_MISMATCH."""
    assert job.order is not None
    expected = operation_fingerprint(operation.kind, job.order, reservation_key(job.id))
    proven = operation.key == key_of(job.id, operation.kind) and operation.fingerprint == expected
    if operation.state == "committed":
        receipt = operation.receipt if isinstance(operation.receipt, dict) else {}
        proven = proven and bool(receipt.get("id"))
        proven = proven and (receipt.get("key"), receipt.get("fingerprint")) == (operation.key, expected)
    if not proven:
        raise ToolError(
            f"{operation.key} is {operation.state} over there, but not with what job {job.id} asks for; a person must "
            "compare the two ledgers",
            code="RECEIPT_MISMATCH",
        )


def key_of(id: str, kind: str) -> str:
    """The operation's stable key."""
    return f"{id}-{kind}"


def reservation_key(id: str) -> str:
    """The name of the job's reservation."""
    return key_of(id, "reserve")


def _check_approval(job: Job, fingerprint: str) -> None:
    approval = job.approval
    if approval is None or approval.decision != "approve":
        raise ToolError(f"job {job.id} is not approved; nothing was sent", code="APPROVAL_MISSING")
    if approval.fingerprint != fingerprint:
        raise ToolError(
            f"the order of job {job.id} is not the one that {approval.actor} approved; nothing was sent",
            code="APPROVAL_MISMATCH",
        )


# --- the service -----------------------------------------------------------------------------------------------------


class NoAnswerError(Exception):
    """No answer that can be used. What was asked for may have been done, unless `sent` is False.

    `reached` says that the service answered something, only nothing that its protocol knows.
    """

    def __init__(self, message: str, *, sent: bool = True, reached: bool = False) -> None:
        super().__init__(message)
        self.sent = sent
        self.reached = reached


class FulfillmentClient:
    """The service's protocol. Every request goes through the sandbox of the step that makes it."""

    def __init__(self, origin: str) -> None:
        self.origin: Final = _check_origin(origin)

    async def read_catalog(self, ctx: StepContext, source: str, order: dict[str, Any]) -> dict[str, Json]:
        """What a source has of the order's SKU.

        ToolError UNAVAILABLE (also past the ten seconds), INSUFFICIENT_STOCK, CATALOG_INVALID, or the service's code.
        """
        try:
            status, body = await self._exchange(
                ctx, "GET", f"/catalog/{quote(source, safe='')}", params={"sku": order["sku"]}
            )
        except NoAnswerError as error:
            code = "CATALOG_INVALID" if error.reached else "UNAVAILABLE"
            raise ToolError(f"catalog {source}: {error}", code=code, retryable=not error.reached) from None
        if status >= 500:
            raise ToolError(f"catalog {source}: {_error_text(body)}", code="UNAVAILABLE", retryable=True)
        if status != 200:
            raise ToolError(f"catalog {source}: {_error_text(body)}", code=_error_code(body, "CATALOG_INVALID"))
        return _check_stock(source, order, body)

    async def look_up(self, ctx: StepContext, key: str, kind: str) -> Operation:
        """What the service knows under a key. NoAnswerError for everything that is no confirmed state."""
        status, body = await self._exchange(ctx, "GET", f"/operations/{quote(key, safe='')}")
        return _parse_operation(status, body, key, kind)

    async def submit(self, ctx: StepContext, key: str, kind: str, order: dict[str, Any], reservation: str) -> Operation:
        """An operation asked for under its key. NoAnswerError where it is not known what became of it.

        ToolError OPERATION_CONFLICT or REQUEST_REFUSED: this request has done nothing.
        """
        body = {"key": key, "order": order, "reservationKey": reservation}
        status, answer = await self._exchange(ctx, "POST", f"/{kind}", json=body)
        if status == 409:
            raise ToolError(_error_text(answer), code="OPERATION_CONFLICT")
        if 400 <= status < 500 and status not in (408, 422, 429):
            raise ToolError(f"the service refused the request: {_error_text(answer)}", code="REQUEST_REFUSED")
        return _parse_operation(status, answer, key, kind)

    async def _exchange(self, ctx: StepContext, method: str, path: str, **options: Any) -> tuple[int, dict[str, Any]]:
        """One request: its status and the JSON object it was answered with."""
        try:
            with anyio.fail_after(CAP_S):
                async with httpx.AsyncClient(timeout=CAP_S, trust_env=False, verify=self._is_encrypted) as client:
                    response = await ctx.sandbox.request(
                        client, method, self.origin + path, max_bytes=RESPONSE_MAX_BYTES, **options
                    )
            return response.status_code, _json_object(response)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise NoAnswerError(f"no connection ({error})", sent=False) from error
        except (httpx.HTTPError, TimeoutError) as error:
            raise NoAnswerError(f"no answer ({type(error).__name__})") from error
        except SandboxDenied:
            raise
        except (LimitExceededError, DittoError, ValueError) as error:  # too long, a redirect, no JSON
            raise NoAnswerError(f"no usable answer ({error})", reached=True) from error

    @property
    def _is_encrypted(self) -> bool:
        return self.origin.startswith("https:")


def _parse_operation(status: int, body: dict[str, Any], key: str, kind: str) -> Operation:
    """The operation in an answer, if status, key, kind and state fit together."""
    state = body.get("state")
    if state not in _STATES_BY_STATUS.get(status, ()) or body.get("key") != key:
        raise NoAnswerError(f"status {status} confirms nothing about {key}: {_error_text(body)}", reached=True)
    if state == "absent":
        return Operation(kind=kind, key=key, state="absent")
    try:
        operation = Operation.model_validate({name: body.get(name) for name in Operation.model_fields})
    except ValueError as error:
        raise NoAnswerError(f"the answer about {key} is no operation: {error}", reached=True) from None
    if operation.kind != kind or (state == "rejected") != (operation.reason is not None):
        raise NoAnswerError(f"the answer about {key} contradicts itself", reached=True)
    return operation


def _check_stock(source: str, order: dict[str, Any], body: dict[str, Any]) -> dict[str, Json]:
    available = body.get("available")
    if body.get("sku") != order["sku"] or not isinstance(available, int) or isinstance(available, bool):
        raise ToolError(f"catalog {source} answered about something else", code="CATALOG_INVALID")
    if available < order["quantity"]:
        raise ToolError(
            f"catalog {source} has {available} of {order['sku']}, and {order['quantity']} are asked for",
            code="INSUFFICIENT_STOCK",
        )
    return {"source": source, "sku": order["sku"], "available": available}


def _json_object(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    if not isinstance(body, dict):
        raise ValueError("it is no JSON object")
    return body


def _error_code(body: dict[str, Any], default: str) -> str:
    error = body.get("error")
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, str) and code.isupper() else default


def _error_text(body: dict[str, Any]) -> str:
    error = body.get("error")
    message = error.get("message") if isinstance(error, dict) else None
    return f"{_error_code(body, 'no code')}: {str(message)[:200]}"


def _check_origin(origin: str) -> str:
    """The origin, http or https, without credentials, path, query or fragment. ConfigError."""
    parts = urlsplit(origin)
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
        raise ConfigError("the service's origin is http://host:port or https://host, without credentials")
    if parts.path not in ("", "/") or parts.query or parts.fragment:
        raise ConfigError("the service's origin has no path, query or fragment")
    return f"{parts.scheme}://{parts.netloc}"
