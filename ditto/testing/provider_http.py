"""The scripted provider's HTTP side: the application, and the server that carries it.

Owns the routes, and the carrying out of a plan of actions (`provider_wire`) on the connection, up to a close or reset
of the TCP connection. This is the one module that needs starlette and uvicorn; `provider` imports it when a provider
is started. Start at `ProviderApp.__call__`.

uvicorn's HTTP protocol is put on a socket that is already bound, by `loop.create_server`, without `uvicorn.Server`:
that one installs signal handlers, and sleeps a tenth of a second several times when it ends.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final

import anyio
import uvicorn
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from ditto.testing.provider_gate import Gate
from ditto.testing.provider_record import CHAT_PATHS, Entry, RequestRecord, json_object
from ditto.testing.provider_replies import Reply
from ditto.testing.provider_wire import (
    Asked,
    Body,
    Close,
    End,
    Head,
    Hold,
    Pause,
    Plan,
    error_document,
    plan_json,
    plan_reply,
)

_MODEL_PATHS: Final = ("/v1/models", "/models")
_MODELS: Final = {
    "object": "list",
    "data": [{"id": "scripted", "object": "model", "created": 0, "owned_by": "ditto.testing"}],
}

logger = logging.getLogger("ditto.testing.provider")


class ProviderApp:
    """The ASGI application. `find_problem`, `take` and `talk` are the judgement, the script and the conversation."""

    def __init__(
        self,
        record: RequestRecord,
        gate: Gate,
        *,
        script: str,
        take: Callable[[dict[str, Any], int], Reply],
        talk: Callable[[dict[str, Any]], str],
        find_problem: Callable[[dict[str, Any]], str | None],
        sleep: Callable[[float], Awaitable[object]],
    ) -> None:
        self._record = record
        self._gate = gate
        self._script = script
        self._take = take
        self._talk = talk
        self._find_problem = find_problem
        self._sleep = sleep

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            body = await request.body()
        except ClientDisconnect:
            return  # half a request is none: nothing is recorded
        await self._carry_out(self._decide(request, body), scope, receive, send)

    def _decide(self, request: Request, body: bytes) -> Plan:
        """Records the request, and says what to do about it."""
        path = request.url.path
        if path in CHAT_PATHS and request.method == "POST":
            return self._decide_chat(request, body)
        self._append(request, body)
        if path in _MODEL_PATHS and request.method == "GET":
            return plan_json(200, _MODELS)
        if path in CHAT_PATHS or path in _MODEL_PATHS:
            return plan_json(405, error_document(f"{request.method} is not allowed on {path}"))
        return plan_json(404, error_document(f"there is no {path}; the model is asked at {CHAT_PATHS[0]}"))

    def _decide_chat(self, request: Request, body: bytes) -> Plan:
        document = json_object(body)
        problem = "the body is no JSON object" if document is None else self._find_problem(document)
        if document is None or problem is not None:
            self._append(request, body, refused=problem)
            self._gate.note(arrived=1)
            return plan_json(400, error_document(str(problem), kind="invalid_request_error"))
        entry = self._append(request, body, script=self._script, conversation=self._talk(document))
        self._gate.note(arrived=1)
        assert entry.script_step is not None
        asked = Asked.by(document, seq=entry.seq, created=int(entry.at.timestamp()))
        try:
            return plan_reply(self._take(document, entry.script_step), asked)
        except Exception as error:  # a script may raise anything: it is shown to both sides
            logger.exception("the script failed on request %d", entry.seq)
            message = f"the script failed on request {entry.seq}: {type(error).__name__}: {error}"
            return plan_json(500, error_document(message, code="script_failed"))

    def _append(self, request: Request, body: bytes, **more: Any) -> Entry:
        names = tuple(sorted({name.lower() for name in request.headers}))
        return self._record.append(method=request.method, path=request.url.path, body=body, header_names=names, **more)

    async def _carry_out(self, plan: Plan, scope: Scope, receive: Receive, send: Send) -> None:
        for action in plan:
            match action:
                case Head(status, headers):
                    raw = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers]
                    await send({"type": "http.response.start", "status": status, "headers": raw})
                case Body(data):
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                case End():
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
                case Pause(ms):
                    if not await self._stays(partial(self._sleep, ms / 1000), receive):
                        return
                case Hold():
                    if not await self._stays(self._gate.hold, receive):
                        return
                case Close(reset):
                    _close(scope["state"]["transport"], reset=reset)
                    await _disconnected(receive)

    async def _stays(self, wait: Callable[[], Awaitable[object]], receive: Receive) -> bool:
        """Waits; False, and at once, if the client goes away before that."""
        gone = False
        async with anyio.create_task_group() as group:

            async def watch() -> None:
                nonlocal gone
                await _disconnected(receive)
                gone = True
                group.cancel_scope.cancel()

            group.start_soon(watch)
            await wait()
            group.cancel_scope.cancel()
        if gone:
            self._gate.note(gone=1)
        return not gone


class ProviderServer:
    """uvicorn's HTTP/1.1 on one bound socket, in the running loop."""

    def __init__(self, app: ProviderApp) -> None:
        self._config = uvicorn.Config(
            app,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            timeout_keep_alive=24 * 3600,  # an idle connection closed under a client looks like a lost answer
        )
        self._state = ServerState()
        self._server: asyncio.Server | None = None

    async def start(self, bound: socket.socket) -> None:
        """Listens on the socket, which is the server's from now on."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: _Protocol(self._config, self._state, {}, loop), sock=bound, backlog=self._config.backlog
        )

    async def stop(self) -> None:
        """Closes the socket and every connection, and returns when nothing is left of them."""
        assert self._server is not None
        self._server.close()
        while self._state.connections or self._state.tasks:
            for connection in list(self._state.connections):
                connection.transport.abort()
            await asyncio.sleep(0)
        await self._server.wait_closed()


class _Protocol(H11Protocol):
    """Hands the transport to the application, which closes it where the script says so."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.app_state = {**self.app_state, "transport": transport}
        super().connection_made(transport)


def _close(transport: asyncio.Transport, *, reset: bool) -> None:
    """Closes a connection after what was written, by a FIN, or by a RST."""
    if reset:
        linger_s = struct.pack("ii", 1, 0)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger_s)
    transport.close()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
