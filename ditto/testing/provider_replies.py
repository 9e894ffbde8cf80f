"""What the scripted provider may answer: one frozen dataclass a kind, each of which can be written as JSON.

Owns the reply kinds and their JSON form. Does not own how a reply becomes bytes (`provider_wire`), nor who takes
which reply (`provider_scripts`). Start at `Reply`, the union at the end.

In JSON a reply is an object with its `kind` beside its fields; nested replies are objects of the same form, and bytes
are a string, or `{"base64": ...}` where they are no UTF-8:

    [{"kind": "text", "content": "hello"},
     {"kind": "failure", "status": 429, "headers": {"Retry-After": "2"}},
     {"kind": "delay", "ms": 50, "reply": {"kind": "text", "content": "late"}}]
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Final, Literal, TypeAlias

from ditto.errors import ConfigError

When: TypeAlias = Literal["before", "after_headers", "mid_body"]
"""A point of an answer: before its first byte, after its headers, or inside its body."""


@dataclass(frozen=True, slots=True)
class Usage:
    """The token counts that an answer reports. They are made up: the stand-in counts nothing."""

    prompt_tokens: int = 10
    completion_tokens: int = 5


@dataclass(frozen=True, slots=True)
class Call:
    """One tool call. `arguments` is the exact string that is sent, valid or not; an `id` of None is left out."""

    id: str | None
    name: str
    arguments: str = "{}"

    def __post_init__(self) -> None:
        if not isinstance(self.arguments, str):
            raise ConfigError(f"Call.arguments is the exact string to send; use json.dumps(...): {self.arguments!r}")


@dataclass(frozen=True, slots=True)
class Text:
    """A text answer. `usage=None` leaves the usage out; `reasoning` is sent as `reasoning_content`."""

    content: str | None
    finish_reason: str | None = "stop"
    usage: Usage | None = field(default_factory=Usage)
    reasoning: str | None = None


@dataclass(frozen=True, slots=True)
class ToolCalls:
    """An answer that asks for tools."""

    calls: Sequence[Call]
    content: str | None = None
    finish_reason: str | None = "tool_calls"
    usage: Usage | None = field(default_factory=Usage)
    reasoning: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "calls", tuple(self.calls))


@dataclass(frozen=True, slots=True)
class Failure:
    """An error answer. `body`, when given, is sent as it is (JSON, or a string as plain text) in place of the usual
    `{"error": {"message", "type", "code"}}`."""

    status: int
    message: str = "the script says so"
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Any = None


@dataclass(frozen=True, slots=True)
class Raw:
    """An answer given byte for byte, such as a page of HTML with status 200."""

    body: bytes | str
    status: int = 200
    content_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "body", as_bytes(self.body))


@dataclass(frozen=True, slots=True)
class Chunks:
    """A body in exact pieces, each its own HTTP chunk; `size_bytes` cuts the joined pieces anew into that size.

    `pauses_ms[i]` passes before piece i. With `drop` the connection is closed after the last piece, without the end
    of the body. A client that reads by HTTP chunk (httpx does) sees exactly these pieces.
    """

    pieces: Sequence[bytes | str]
    pauses_ms: Sequence[int] = ()
    size_bytes: int | None = None
    drop: bool = False
    status: int = 200
    content_type: str = "text/event-stream"

    def __post_init__(self) -> None:
        if isinstance(self.pieces, bytes | str):
            raise ConfigError("Chunks.pieces is a list of pieces; for one piece write Chunks([data])")
        if self.size_bytes is not None and self.size_bytes < 1:
            raise ConfigError(f"Chunks.size_bytes is {self.size_bytes}; use 1 or more")
        object.__setattr__(self, "pieces", tuple(as_bytes(piece) for piece in self.pieces))
        object.__setattr__(self, "pauses_ms", tuple(self.pauses_ms))


@dataclass(frozen=True, slots=True)
class Drop:
    """Closes the TCP connection in the course of `reply`, cleanly or (with `reset`) by a TCP reset.

    `mid_body` sends `after_bytes` bytes of the body, fewer than its length; None means half of it, between two chunks
    where there are several. A clean close is httpx's RemoteProtocolError, a reset its ReadError.
    """

    when: When = "before"
    after_bytes: int | None = None
    reset: bool = False
    reply: Reply = field(default_factory=lambda: Text("This answer is never received as a whole."))


@dataclass(frozen=True, slots=True)
class StreamCut:
    """Closes the TCP connection after the first `after_chunks` chunks of the streamed `reply`.

    The first chunk of a Text holds the role only, the second the first piece of the text. A request that does not
    ask for a stream has one chunk, so that only 0 cuts it.
    """

    after_chunks: int
    reply: Reply = field(default_factory=lambda: Text("This answer is never received as a whole."))


@dataclass(frozen=True, slots=True)
class Stall:
    """Stops until `provider.release()`, or until the client goes away; then goes on with `then`.

    `when` says how much of `then` is sent before the stop. Without a `then` nothing is ever answered: a release
    closes the connection, after the headers if `when` is not "before".
    """

    then: Reply | None = None
    when: When = "before"


@dataclass(frozen=True, slots=True)
class Delay:
    """Answers `reply` after `ms` milliseconds of the provider's clock."""

    ms: int
    reply: Reply


Reply: TypeAlias = Text | ToolCalls | Failure | Raw | Chunks | Drop | StreamCut | Stall | Delay
"""What a script may answer."""

REPLY_KINDS: Final[dict[str, type[Any]]] = {
    "text": Text,
    "tool_calls": ToolCalls,
    "failure": Failure,
    "raw": Raw,
    "chunks": Chunks,
    "drop": Drop,
    "stream_cut": StreamCut,
    "stall": Stall,
    "delay": Delay,
}
"""The word for each kind in JSON."""

_KIND_OF: Final = {cls: kind for kind, cls in REPLY_KINDS.items()}


def as_bytes(data: bytes | str) -> bytes:
    """The bytes that a Raw body, or a piece of Chunks, is sent as."""
    return data.encode() if isinstance(data, str) else bytes(data)


def sse(events: Iterable[Mapping[str, Any] | str], *, done: bool = True) -> bytes:
    """The exact bytes of a stream of these events, each a JSON object or a literal string, to be used in Chunks."""
    texts = [event if isinstance(event, str) else json.dumps(event, ensure_ascii=False) for event in events]
    return b"".join(f"data: {text}\n\n".encode() for text in [*texts, *(["[DONE]"] if done else [])])


def reply_to_json(reply: Reply) -> dict[str, Any]:
    """The JSON form of a reply; fields that hold their default are left out."""
    document: dict[str, Any] = {"kind": _KIND_OF[type(reply)]}
    for spec in fields(reply):
        value = getattr(reply, spec.name)
        default = spec.default if spec.default_factory is MISSING else spec.default_factory()
        if default is MISSING or value != default:
            document[spec.name] = _to_json(value)
    return document


def reply_from_json(document: Any, *, where: str = "reply") -> Reply:
    """The reply that a JSON object describes. ConfigError names `where` and what is wrong with it."""
    if not isinstance(document, dict):
        raise ConfigError(f"{where}: expected an object with a kind, got {type(document).__name__}")
    cls = REPLY_KINDS.get(str(document.get("kind")))
    if cls is None:
        raise ConfigError(f"{where}: kind {document.get('kind')!r} is unknown; use one of {', '.join(REPLY_KINDS)}")
    arguments = {
        name: _from_json(cls, name, value, where=f"{where}.{name}")
        for name, value in document.items()
        if name != "kind"
    }
    reply: Reply = _build(cls, arguments, where=where)
    return reply


def _to_json(value: Any) -> Any:
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return {"base64": base64.b64encode(value).decode()}
    if isinstance(value, tuple):
        return [_to_json(item) for item in value]
    if type(value) in _KIND_OF:
        return reply_to_json(value)
    if isinstance(value, Usage | Call):
        return {spec.name: getattr(value, spec.name) for spec in fields(value)}
    return dict(value) if isinstance(value, Mapping) else value


def _from_json(cls: type[Any], name: str, value: Any, *, where: str) -> Any:
    match name:
        case "usage" if value is not None:
            return _build(Usage, value, where=where)
        case "calls":
            return [_build(Call, call, where=f"{where}[{at}]") for at, call in enumerate(_a_list(value, where))]
        case "pieces":
            return [_bytes_from_json(piece) for piece in _a_list(value, where)]
        case "body" if cls is Raw:
            return _bytes_from_json(value)
        case "reply" | "then" if value is not None:
            return reply_from_json(value, where=where)
        case _:
            return value


def _bytes_from_json(value: Any) -> Any:
    return base64.b64decode(value["base64"]) if isinstance(value, dict) and set(value) == {"base64"} else value


def _a_list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise ConfigError(f"{where}: expected a list, got {type(value).__name__}")
    return value


def _build(cls: type[Any], arguments: Any, *, where: str) -> Any:
    known = [spec.name for spec in fields(cls)]
    if not isinstance(arguments, dict) or not set(arguments) <= set(known):
        raise ConfigError(f"{where}: {cls.__name__} takes {', '.join(known)}; got {arguments!r}")
    try:
        return cls(**arguments)
    except (TypeError, AttributeError, ConfigError) as error:
        raise ConfigError(f"{where}: {error}") from error
