"""The reference fulfillment service: a real HTTP server on loopback, with a ledger that outlives it.

Owns HTTP, the tasks that settle operations, and the fault switches of the experiments. Does not own the ledger: its
words, rules and SQL are `fulfillment_ledger.py`. Start with `FulfillmentService` and its `_submit`.

    GET  /catalog/primary?sku=   /catalog/backup?sku=    200 {source, sku, available}; 404 UNKNOWN_SKU; 503 UNAVAILABLE
    GET  /operations/<key>                               200 {state: "absent", key}; 202 pending; 200 committed;
                                                         422 rejected; 503 UNAVAILABLE
    POST /reserve  /ship  /release                       200 committed; 422 rejected; 400; 409 KEY_CONFLICT; 413
         {key, order: {sku, quantity, address}, reservationKey}

An operation answers `{key, kind, state, fingerprint, order, reservationKey, receipt, reason}`, everything that went
wrong `{error: {code, message}}`. A request is written to the ledger before it is handled.

A submission is recorded as pending, then settled by a task of the service, not of the request: a client that goes
away changes nothing. Whoever submits the same key with the same parameters joins that task. A service that is closed
or killed in between leaves the operation pending; it is settled when the service is opened on the ledger again, or,
after a failure of the ledger itself, when it is submitted again.

As a program: `python -m examples._shared.tools.fulfillment_service --db service.sqlite --sku SKU-731 --quantity 20`
prints one JSON line, `{"url": …}`, once it listens, and runs until SIGTERM or SIGINT.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import logging
import signal
import socket
import sqlite3
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, Final, Literal, ParamSpec, Self, TypeVar, get_args

import anyio
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from examples._shared.tools.fulfillment_ledger import (
    Kind,
    Operation,
    Reason,
    State,
    SubmissionError,
    admit,
    get_available,
    get_operation,
    has_submissions,
    list_pending,
    normalise_sku,
    open_ledger,
    operation_fingerprint,
    parse_key,
    parse_submission,
    record_request,
    settle,
    stock_inventory,
)

__all__ = [
    "BODY_SIZE_MAX_BYTES",
    "Faults",
    "FulfillmentService",
    "LookupUnavailable",
    "main",
    "operation_fingerprint",
    "start_fulfillment_service",
]

BODY_SIZE_MAX_BYTES: Final = 8 * 1024
DELAY_MAX_MS: Final = 600_000

_CLOSE_GRACE_S: Final = 1
_DRAIN_MAX_BYTES: Final = 1024 * 1024
_PATH_LENGTH_MAX: Final = 1024
_STATUS: Final = {State.PENDING: 202, State.COMMITTED: 200, State.REJECTED: 422}

LookupUnavailable = Literal["never", "always", "after_write"]

P = ParamSpec("P")
T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Faults:
    """The setup of an experiment; never part of the protocol. Everything is off unless it is switched on.

    primary_unavailable: the primary catalog answers 503. catalog_delay_ms: both catalogs answer that much later.
    shipping_rejected, release_rejected: an operation that the rules allow is recorded as rejected, with the code
    SHIPPING_REJECTED or RELEASE_REJECTED. drop_reservation_response, drop_release_response: the operation is settled,
    then the connection is closed without a response, each time. lookup_unavailable: look-ups answer 503, always or
    once this ledger has received any POST of an operation. reservation_delay_ms: the time between pending and
    settled of a reservation. reservation_hold: reservations stay pending until the switch is turned off.

    Delays are 0 to 600,000 ms. `to_json` and `from_json` use the names of the fields. Raises ValueError.
    """

    primary_unavailable: bool = False
    catalog_delay_ms: int = 0
    shipping_rejected: bool = False
    drop_reservation_response: bool = False
    drop_release_response: bool = False
    release_rejected: bool = False
    lookup_unavailable: LookupUnavailable = "never"
    reservation_delay_ms: int = 0
    reservation_hold: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "lookup_unavailable":
                if value not in get_args(LookupUnavailable):
                    raise ValueError(f"{field.name} must be one of {', '.join(get_args(LookupUnavailable))}.")
            elif type(value) is not type(field.default):
                raise ValueError(f"{field.name} must be of type {type(field.default).__name__}.")
            elif type(value) is int and not 0 <= value <= DELAY_MAX_MS:
                raise ValueError(f"{field.name} must be 0 to {DELAY_MAX_MS}.")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Faults:
        if unknown := value.keys() - {field.name for field in fields(cls)}:
            raise ValueError(f"There is no fault named {', '.join(sorted(unknown))}.")
        return cls(**value)


class FulfillmentService:
    """A service on 127.0.0.1, in the running asyncio loop; `async with`, or `start` and `close`.

    `path` is the ledger's file, made if it is missing. `inventory` is the stock of SKUs that the ledger does not have
    yet. `port` 0 takes a free one. Use it on the loop's thread only; SQLite runs in a thread of its own.
    """

    def __init__(
        self,
        path: str | Path,
        inventory: Mapping[str, int] | None = None,
        *,
        faults: Faults | None = None,
        port: int = 0,
    ) -> None:
        self.path: Final = Path(path)
        self._inventory: Final = dict(inventory or {})
        self._faults = faults or Faults()
        self._port = port
        self._url: str | None = None
        self._socket: socket.socket | None = None
        self._server: uvicorn.Server | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._connection: sqlite3.Connection | None = None
        self._settlements: Final[dict[str, asyncio.Task[Operation]]] = {}
        self._changed = asyncio.Event()
        self._stopping: Final = asyncio.Event()
        self._routes: Final = self._build_routes()

    @property
    def url(self) -> str:
        """The origin, `http://127.0.0.1:PORT`; known once the service is started."""
        if self._url is None:
            raise RuntimeError("The service is not started: use it in `async with`, or call start() first.")
        return self._url

    @property
    def faults(self) -> Faults:
        """The switches. Assigning others works from the next request or settlement on."""
        return self._faults

    @faults.setter
    def faults(self, faults: Faults) -> None:
        self._faults = faults
        self._announce_change()

    # --- life ------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Open the ledger, take up what an earlier service left pending, and listen."""
        if self._thread is not None or self._stopping.is_set():
            raise RuntimeError("A service is started once: make another one for the same ledger.")
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="fulfillment-ledger")
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._open_connection)
            await self._run(stock_inventory, self._inventory)
            # The tasks queue for the ledger before the first request can: what nothing delays is settled by then.
            for operation in await self._run(list_pending):
                self._start_settlement(operation)
            await self._listen()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Stop, without waiting for delays: what is pending stays pending, and its clients get no response.

        Only a request that is still being sent is waited for, for a second.
        """
        with anyio.CancelScope(shield=True):
            self._stopping.set()
            settlements = list(self._settlements.values())
            for settlement in settlements:
                settlement.cancel()
            await self._stop_listening()
            if settlements:
                await asyncio.wait(settlements)
            thread, self._thread = self._thread, None
            if thread is not None:
                await asyncio.get_running_loop().run_in_executor(thread, self._close_connection)
                thread.shutdown()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def _listen(self) -> None:
        # The protocol is named, since asyncio turns Nagle's algorithm off (40 ms a response) only where it reads TCP.
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", self._port))
        config = uvicorn.Config(
            self._handle,
            http=_Protocol,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,
        )
        config.load()
        server = uvicorn.Server(config)
        server.lifespan = config.lifespan_class(config)
        server.lifespan.state["stopping"] = self._stopping
        # Only this part of `Server.serve`: the rest of it takes the process's signals and polls.
        await server.startup(sockets=[self._socket])
        self._server = server
        self._url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    async def _stop_listening(self) -> None:
        if self._server is not None:
            server, self._server = self._server, None
            for listener in server.servers:
                listener.close()
            connections, requests = server.server_state.connections, server.server_state.tasks
            for connection in list(connections):
                connection.shutdown()
            if requests:
                await asyncio.wait(list(requests), timeout=_CLOSE_GRACE_S)
            for connection in list(connections):
                connection.transport.abort()
            if requests:
                await asyncio.wait(list(requests))
            for listener in server.servers:
                await listener.wait_closed()
        if self._socket is not None:
            self._socket.close()

    # Both run in the ledger's thread, so that a start that is cancelled while it opens still closes what it opened.
    def _open_connection(self) -> None:
        self._connection = open_ledger(self.path)

    def _close_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    async def _run(
        self, function: Callable[Concatenate[sqlite3.Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run a function of the ledger in the ledger's thread; they run one after another, in the order of calls."""
        if self._thread is None or self._connection is None:
            raise RuntimeError("The service is not open.")
        call = functools.partial(function, self._connection, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    # --- operations ------------------------------------------------------------------------------------------------

    async def recorded(self, key: str) -> Operation:
        """Wait until the operation is in the ledger, pending or settled. For tests; cancel to give up."""
        return await self._wait_until(key, lambda operation: True)

    async def settled(self, key: str) -> Operation:
        """Wait until the operation is committed or rejected. For tests; cancel to give up."""
        return await self._wait_until(key, lambda operation: operation.state is not State.PENDING)

    async def _wait_until(self, key: str, condition: Callable[[Operation], bool]) -> Operation:
        while True:
            changed = self._changed
            operation = await self._run(get_operation, key)
            if operation is not None and condition(operation):
                return operation
            await changed.wait()

    def _announce_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _start_settlement(self, operation: Operation) -> asyncio.Task[Operation]:
        key = operation.key
        if key not in self._settlements:
            task = asyncio.create_task(self._settle(operation), name=f"settle {key}")
            self._settlements[key] = task
            task.add_done_callback(functools.partial(self._end_settlement, key))
        return self._settlements[key]

    async def _settle(self, operation: Operation) -> Operation:
        if operation.kind is Kind.RESERVE:
            await asyncio.sleep(self._faults.reservation_delay_ms / 1000)
            while self._faults.reservation_hold:
                await self._changed.wait()
        return await self._run(settle, operation.key, self._refusal(operation.kind))

    def _end_settlement(self, key: str, task: asyncio.Task[Operation]) -> None:
        del self._settlements[key]
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.warning("%s stays pending, submit it again: %s", key, error)
        self._announce_change()

    def _refusal(self, kind: Kind) -> Reason | None:
        if kind is Kind.SHIP and self._faults.shipping_rejected:
            return Reason("SHIPPING_REJECTED", "The carrier refused the shipment.")
        if kind is Kind.RELEASE and self._faults.release_rejected:
            return Reason("RELEASE_REJECTED", "The warehouse refused the release.")
        return None

    # --- HTTP ------------------------------------------------------------------------------------------------------

    def _build_routes(self) -> Starlette:
        routes = Starlette(
            routes=[
                Route("/catalog/{source}", self._get_catalog, methods=["GET"]),
                Route("/operations/{key}", self._get_operation, methods=["GET"]),
                *(Route(f"/{kind}", functools.partial(self._submit, kind), methods=["POST"]) for kind in Kind),
            ],
            exception_handlers={
                HTTPException: _http_error,
                SubmissionError: _submission_error,
                sqlite3.Error: _ledger_error,
            },
        )
        routes.router.redirect_slashes = False
        return routes

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the whole request, write it down, and only then hand it to the routes."""
        if self._stopping.is_set():
            await _NoResponse()(scope, receive, send)
            return
        try:
            body = await _read_body(receive)
        except ClientDisconnect:
            return
        app = await self._record(scope, body)
        await app(scope, _Replay(body or b"", receive), send)

    async def _record(self, scope: Scope, body: bytes | None) -> ASGIApp:
        """Write the request down; returns what answers it."""
        path = scope["path"][:_PATH_LENGTH_MAX]
        query = scope["query_string"].decode("ascii", "replace")[:_PATH_LENGTH_MAX]
        text = body.decode(errors="replace") if body else None
        try:
            await self._run(record_request, scope["method"], path, query, text)
        except sqlite3.Error as error:
            return await _ledger_error(Request(scope), error)
        return _too_large() if body is None else self._routes

    async def _get_catalog(self, request: Request) -> Response:
        source = request.path_params["source"]
        if source not in ("primary", "backup"):
            raise HTTPException(404)
        sku = normalise_sku(request.query_params.get("sku"))
        if await self._stopped_within(self._faults.catalog_delay_ms / 1000):
            return _NoResponse()
        if source == "primary" and self._faults.primary_unavailable:
            return _error(503, "UNAVAILABLE", "The primary catalog is unavailable.")
        available = await self._run(get_available, sku)
        if available is None:
            return _error(404, "UNKNOWN_SKU", f"There is no {sku}.")
        return JSONResponse({"source": source, "sku": sku, "available": available})

    async def _get_operation(self, request: Request) -> Response:
        key = request.path_params["key"]
        parse_key(key)
        if await self._is_lookup_unavailable():
            return _error(503, "UNAVAILABLE", "Look-ups are unavailable.")
        operation = await self._run(get_operation, key)
        if operation is None:
            return JSONResponse({"state": "absent", "key": key})
        return _operation_response(operation)

    async def _submit(self, kind: Kind, request: Request) -> Response:
        submission = parse_submission(kind, await request.body())
        operation = await self._run(admit, submission)
        self._announce_change()
        if operation.fingerprint != submission.fingerprint:
            return _error(409, "KEY_CONFLICT", f"{operation.key} belongs to an operation with other parameters.")
        if operation.state is State.PENDING:
            if self._stopping.is_set():
                return _NoResponse()
            settlement = self._start_settlement(operation)
            await asyncio.wait([settlement])
            if settlement.cancelled():
                return _NoResponse()
            operation = settlement.result()
        return _NoResponse() if self._is_response_dropped(kind) else _operation_response(operation)

    async def _is_lookup_unavailable(self) -> bool:
        if self._faults.lookup_unavailable == "after_write":
            return await self._run(has_submissions)
        return self._faults.lookup_unavailable == "always"

    def _is_response_dropped(self, kind: Kind) -> bool:
        return (kind is Kind.RESERVE and self._faults.drop_reservation_response) or (
            kind is Kind.RELEASE and self._faults.drop_release_response
        )

    async def _stopped_within(self, delay_s: float) -> bool:
        if delay_s:
            try:
                async with asyncio.timeout(delay_s):
                    await self._stopping.wait()
            except TimeoutError:
                pass
        return self._stopping.is_set()


async def start_fulfillment_service(
    path: str | Path, inventory: Mapping[str, int] | None = None, *, faults: Faults | None = None, port: int = 0
) -> FulfillmentService:
    """A service that listens; the caller closes it."""
    service = FulfillmentService(path, inventory, faults=faults, port=port)
    await service.start()
    return service


class _Protocol(H11Protocol):
    """uvicorn's protocol, which also shows the application its transport, so that a fault can close it.

    A connection that was accepted just before the service stopped listening is closed at once.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.app_state["stopping"].is_set():
            transport.abort()
        self.app_state = {**self.app_state, "transport": transport}


class _NoResponse(Response):
    """The connection is closed without a response, as by a service that died after its commit."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"]["transport"].abort()
        # uvicorn complains about a missing response unless it has seen the connection go.
        while (await receive())["type"] != "http.disconnect":
            pass


class _Replay:
    """The receive channel of a request whose body was already read."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._first: Message | None = {"type": "http.request", "body": body, "more_body": False}
        self._receive = receive

    async def __call__(self) -> Message:
        message, self._first = self._first, None
        return message or await self._receive()


async def _read_body(receive: Receive) -> bytes | None:
    """The body, or None when it is too large. Raises ClientDisconnect when the client went away before its end."""
    body, size_bytes, more = b"", 0, True
    # A client writes its whole body before it reads, so a body that is too large is read on for a while, unkept.
    while more and size_bytes <= _DRAIN_MAX_BYTES:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunk = message.get("body", b"")
        size_bytes += len(chunk)
        body = body + chunk if size_bytes <= BODY_SIZE_MAX_BYTES else b""
        more = message.get("more_body", False)
    return body if size_bytes <= BODY_SIZE_MAX_BYTES else None


def _operation_response(operation: Operation) -> Response:
    return JSONResponse(operation.to_json(), _STATUS[operation.state])


def _error(status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> Response:
    return JSONResponse({"error": {"code": code, "message": message}}, status, headers)


def _too_large() -> Response:
    message = f"A body has at most {BODY_SIZE_MAX_BYTES} bytes."
    return _error(413, "BODY_TOO_LARGE", message, {"connection": "close"})


async def _submission_error(request: Request, error: Exception) -> Response:
    return _error(400, "INVALID_REQUEST", str(error))


async def _ledger_error(request: Request, error: Exception) -> Response:
    logger.warning("%s %s: the ledger could not do it: %s", request.method, request.url.path, error)
    return _error(503, "LEDGER_UNAVAILABLE", "The ledger could not do it; look the operation up, then try again.")


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: "NOT_FOUND", 405: "METHOD_NOT_ALLOWED"}.get(error.status_code, "HTTP_ERROR")
    return _error(error.status_code, code, error.detail, error.headers)


# --- command ---------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(prog="fulfillment_service", description="The reference fulfillment service.")
    parser.add_argument("--db", type=Path, required=True, help="the ledger's SQLite file")
    parser.add_argument("--port", type=int, default=0, help="0 (the default) takes a free port")
    parser.add_argument("--sku", action="append", default=[], help="a SKU to stock; repeat, each with --quantity")
    parser.add_argument("--quantity", action="append", default=[], type=int, help="its stock, if it is a new SKU")
    parser.add_argument("--fault", action="append", default=[], metavar="NAME[=VALUE]", help="see Faults; repeat")
    options = parser.parse_args(arguments)
    if len(options.sku) != len(options.quantity):
        parser.error("each --sku needs its --quantity")
    try:
        faults = Faults.from_json(dict(_parse_fault(fault) for fault in options.fault))
    except ValueError as error:
        parser.error(str(error))
    inventory = dict(zip(options.sku, options.quantity, strict=True))
    try:
        asyncio.run(_serve(FulfillmentService(options.db, inventory, faults=faults, port=options.port)))
    except (OSError, sqlite3.Error, ValueError) as error:
        print(f"fulfillment_service: {error}", file=sys.stderr)
        return 1
    return 0


def _parse_fault(text: str) -> tuple[str, object]:
    name, _, value = text.partition("=")
    return name, True if not value else int(value) if value.isdecimal() else value


async def _serve(service: FulfillmentService) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    async with service:
        print(json.dumps({"url": service.url}), flush=True)
        await stopped.wait()


if __name__ == "__main__":
    sys.exit(main())
