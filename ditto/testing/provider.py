"""The scripted provider: a real HTTP server on loopback that answers as a model would, by a script.

It speaks the OpenAI chat-completions format, plain and streamed, and keeps every request in a SQLite file, committed
before a byte is answered, so that model calls can be counted after any number of kills. The script's position is
counted there too: a provider that is started again on the same file goes on where it was.

Owns the server's life and the command. Does not own the replies (`provider_replies`), their bytes (`provider_wire`),
the scripts (`provider_scripts`), strict mode (`provider_strict`), the record (`provider_record`), or HTTP
(`provider_http`), which needs the extra `ditto-runtime[testing]`. Start at `ScriptedProvider`:

    async with ScriptedProvider(db_path, script=[Text("hello")]) as provider:
        ...                   # ask at provider.base_url
        provider.count        # 1

and as a command, which prints one line `{"base_url": ...}` and runs until SIGTERM or SIGINT:

    python -m ditto.testing.provider --port 0 --db PATH [--script order|FILE]
"""

from __future__ import annotations

import argparse
import json
import signal
import socket
import sqlite3
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Final

import anyio

from ditto.errors import ConfigError
from ditto.testing.provider_gate import Gate
from ditto.testing.provider_record import Request, RequestRecord, count_chat, read_requests
from ditto.testing.provider_replies import (
    Call,
    Chunks,
    Delay,
    Drop,
    Failure,
    Raw,
    Reply,
    Stall,
    StreamCut,
    Text,
    ToolCalls,
    Usage,
    reply_from_json,
    reply_to_json,
    sse,
)
from ditto.testing.provider_scripts import (
    SCRIPTS,
    Script,
    find_script,
    first_user_message,
    load_script,
    name_script,
    order_script,
    take_reply,
)
from ditto.testing.provider_strict import ReasoningRule, find_problem

__all__ = [
    "Call",
    "Chunks",
    "Delay",
    "Drop",
    "Failure",
    "Raw",
    "Reply",
    "Request",
    "SCRIPTS",
    "Script",
    "ScriptedProvider",
    "Stall",
    "StreamCut",
    "Text",
    "ToolCalls",
    "Usage",
    "first_user_message",
    "load_script",
    "order_script",
    "read_requests",
    "reply_from_json",
    "reply_to_json",
    "sse",
]

_HOST: Final = "127.0.0.1"
_NEEDED: Final = ("starlette", "uvicorn")


class ScriptedProvider:
    """A model behind HTTP that answers by a script, as an async context manager in the caller's loop.

    script: a list of replies, request n taking the n-th, or a function `(request, index) -> Reply`.
    port: 0 takes a free one.
    repeat_last: past the end of a list, its last reply; otherwise a 500 that says so.
    strict, reasoning_content: refuse with 400 what real providers refuse (`provider_strict`); the script is not
        asked then, and does not move on.
    name: the script's name in the record. Its position is counted under this name; by default that of the function,
        or a digest of the replies.
    conversation: from a request to the conversation it belongs to, each of which has its own position in the script,
        such as `first_user_message`. By default all requests are one conversation.
    sleep: takes seconds; how Delay and the pauses of Chunks wait.

    `requests`, `count` and the record may be read at any time, before, during and after, from any thread.
    """

    def __init__(
        self,
        db_path: str | Path,
        script: Script,
        *,
        port: int = 0,
        repeat_last: bool = False,
        strict: bool = False,
        reasoning_content: ReasoningRule = "ignore",
        name: str | None = None,
        conversation: Callable[[dict[str, Any]], str] | None = None,
        sleep: Callable[[float], Awaitable[object]] = anyio.sleep,
    ) -> None:
        if reasoning_content not in ("require", "refuse", "ignore"):
            raise ConfigError(f"reasoning_content is {reasoning_content!r}; use require, refuse or ignore")
        self._db_path = Path(db_path)
        self._script = script if callable(script) else tuple(script)
        self._port = port
        self._repeat_last = repeat_last
        self._strict = strict
        self._reasoning_content = reasoning_content
        self._name = name or name_script(self._script)
        self._conversation = conversation or (lambda request: "")
        self._sleep = sleep
        self._gate = Gate()
        self._base_url: str | None = None
        self._server: Any = None
        self._record: RequestRecord | None = None

    @property
    def base_url(self) -> str:
        """Where clients are pointed, such as `http://127.0.0.1:45678/v1`."""
        if self._base_url is None:
            raise ConfigError("the scripted provider has no address yet: use it inside `async with`")
        return self._base_url

    @property
    def count(self) -> int:
        """How many requests to the model the record holds, those of earlier processes and refused ones included."""
        return count_chat(self._db_path)

    def requests(self) -> list[Request]:
        """The requests to the model, in the order of arrival. Other requests are in `read_requests(db_path)`."""
        return [request for request in read_requests(self._db_path) if request.is_chat]

    async def wait_for(self, *, arrived: int = 0, stalled: int = 0, gone: int = 0) -> None:
        """Returns once that many requests to the model were recorded, that many were stalled, and that many clients
        went away from a stalled or delayed answer, all since this provider was started."""
        await self._gate.reached(arrived=arrived, stalled=stalled, gone=gone)

    def release(self) -> int:
        """Lets every stalled answer go on, and returns how many these were. A stall that begins later is not
        released: wait for it first."""
        return self._gate.release()

    async def __aenter__(self) -> ScriptedProvider:
        http = _import_http()
        if self._record is not None:
            raise ConfigError("this scripted provider was started before: make a new one on the same file")
        with ExitStack() as undo:
            self._record = record = RequestRecord(self._db_path)
            undo.callback(record.close)
            bound = undo.enter_context(_bind(self._port))
            app = http.ProviderApp(
                record,
                self._gate,
                script=self._name,
                take=self._take,
                talk=self._conversation,
                find_problem=self._find_problem,
                sleep=self._sleep,
            )
            self._server = http.ProviderServer(app)
            self._base_url = f"http://{_HOST}:{bound.getsockname()[1]}/v1"
            await self._server.start(bound)
            undo.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Closes every connection, stalled ones too, then the record. Does not wait for any client."""
        assert self._record is not None
        try:
            with anyio.CancelScope(shield=True):
                await self._server.stop()
        finally:
            self._record.close()

    def _take(self, request: dict[str, Any], index: int) -> Reply:
        return take_reply(self._script, request, index, repeat_last=self._repeat_last)

    def _find_problem(self, request: dict[str, Any]) -> str | None:
        return find_problem(request, strict=self._strict, reasoning_content=self._reasoning_content)


def _import_http() -> ModuleType:
    try:
        from ditto.testing import provider_http
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in _NEEDED:
            raise
        raise ImportError(
            f"the scripted provider needs {' and '.join(_NEEDED)}, and {error.name} is not installed:"
            " pip install 'ditto-runtime[testing]'",
            name=error.name,
        ) from error
    return provider_http


def _bind(port: int) -> socket.socket:
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((_HOST, port))
    except OSError as error:
        bound.close()
        raise ConfigError(f"port {port} of {_HOST} cannot be had: {error.strerror}; use 0 for a free one") from error
    return bound


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. 0 after SIGTERM or SIGINT, 2 if it cannot start."""
    parser = argparse.ArgumentParser(prog="python -m ditto.testing.provider", description="A scripted model over HTTP.")
    parser.add_argument("--port", type=int, default=0, help="0, the default, takes a free one")
    parser.add_argument("--db", type=Path, required=True, help="the SQLite file that keeps every request")
    parser.add_argument(
        "--script", default="order", help=f"{', '.join(SCRIPTS)}, or a JSON file with a list of replies"
    )
    parser.add_argument("--repeat-last", action="store_true", help="past the end of a file, repeat its last reply")
    parser.add_argument("--strict", action="store_true", help="refuse with 400 what strict providers refuse")
    parser.add_argument("--reasoning-content", choices=("require", "refuse", "ignore"), default="ignore")
    parser.add_argument(
        "--per-conversation", action="store_true", help="a position in the script for each first user message"
    )
    options = parser.parse_args(arguments)
    try:
        provider = ScriptedProvider(
            options.db,
            find_script(options.script),
            port=options.port,
            repeat_last=options.repeat_last,
            strict=options.strict,
            reasoning_content=options.reasoning_content,
            conversation=first_user_message if options.per_conversation else None,
        )
        anyio.run(_serve, provider)
    except (ConfigError, ImportError, sqlite3.Error) as error:
        sys.stderr.write(f"{parser.prog}: {error}\n")
        return 2
    return 0


async def _serve(provider: ScriptedProvider) -> None:
    """Serves until SIGTERM or SIGINT."""
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with provider:
            sys.stdout.write(json.dumps({"base_url": provider.base_url}) + "\n")
            sys.stdout.flush()
            async for _ in signals:
                return


if __name__ == "__main__":
    sys.exit(main())
