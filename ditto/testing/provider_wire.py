"""How a reply becomes bytes: a pure function from a reply and a request to a list of actions on the connection.

Owns the OpenAI chat-completions format, streamed and not, and where a drop, a stall or a delay falls in it. Does not
touch a socket: `provider_http` carries the actions out. Start at `plan_reply`.

The format is that of https://platform.openai.com/docs/api-reference/chat.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from ditto.errors import ConfigError
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
    When,
    as_bytes,
    sse,
)

PIECE_CHARS: Final = 12
"""A streamed text, and a streamed argument string, is cut into pieces of this many characters."""


@dataclass(frozen=True, slots=True)
class Head:
    """Send the status line and these headers."""

    status: int
    headers: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Body:
    """Send this piece of the body: one HTTP chunk, unless the headers announce a length."""

    data: bytes


@dataclass(frozen=True, slots=True)
class End:
    """End the body properly."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Let the time pass."""

    ms: int


@dataclass(frozen=True, slots=True)
class Hold:
    """Wait for a release."""


@dataclass(frozen=True, slots=True)
class Close:
    """Close the TCP connection as it is."""

    reset: bool = False


Action: TypeAlias = Head | Body | End | Pause | Hold | Close
Plan: TypeAlias = tuple[Action, ...]


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request and its record say about the form of an answer."""

    completion_id: str
    created: int
    model: str
    stream: bool
    include_usage: bool

    @classmethod
    def by(cls, request: dict[str, Any], *, seq: int, created: int) -> Asked:
        """Read from the body of a request, without judging it."""
        options = request.get("stream_options")
        return cls(
            completion_id=f"chatcmpl-{seq}",
            created=created,
            model=str(request.get("model", "scripted")),
            stream=request.get("stream") is True,
            include_usage=isinstance(options, dict) and options.get("include_usage") is True,
        )


def plan_reply(reply: Reply, asked: Asked) -> Plan:
    """What to do on the connection, in order. ConfigError if the reply cannot be carried out on this request."""
    match reply:
        case Text() | ToolCalls():
            return _plan_stream(reply, asked) if asked.stream else plan_json(200, _completion(reply, asked))
        case Failure():
            return _plan_failure(reply)
        case Raw():
            return _plan_bytes(reply.status, as_bytes(reply.body), reply.content_type, tuple(reply.headers.items()))
        case Chunks():
            return _plan_chunks(reply)
        case Drop():
            before, _ = _split(plan_reply(reply.reply, asked), reply.when, reply.after_bytes)
            return (*before, Close(reply.reset))
        case StreamCut():
            return (*_first_chunks(plan_reply(reply.reply, asked), reply.after_chunks), Close())
        case Stall():
            then = plan_reply(reply.then or Drop(_no_body(reply.when)), asked)
            before, after = _split(then, reply.when if reply.then else _no_body(reply.when), None)
            return (*before, Hold(), *after)
        case Delay():
            return (Pause(reply.ms), *plan_reply(reply.reply, asked))


def plan_json(status: int, document: Any, headers: tuple[tuple[str, str], ...] = ()) -> Plan:
    """A whole JSON answer."""
    return _plan_bytes(status, json.dumps(document, ensure_ascii=False).encode(), "application/json", headers)


def error_document(message: str, *, code: str | None = None, kind: str = "scripted_provider") -> dict[str, Any]:
    """The body of an error in the provider's format."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def _plan_bytes(status: int, body: bytes, content_type: str, headers: tuple[tuple[str, str], ...]) -> Plan:
    head = Head(status, (("content-type", content_type), ("content-length", str(len(body))), *headers))
    return (head, Body(body), End())


def _plan_failure(reply: Failure) -> Plan:
    headers = tuple(reply.headers.items())
    if isinstance(reply.body, str):
        return _plan_bytes(reply.status, reply.body.encode(), "text/plain; charset=utf-8", headers)
    document = error_document(reply.message, code=reply.code) if reply.body is None else reply.body
    return plan_json(reply.status, document, headers)


def _plan_chunks(reply: Chunks) -> Plan:
    actions: list[Action] = [Head(reply.status, (("content-type", reply.content_type),))]
    for at, piece in enumerate(_pieces(reply)):
        if at < len(reply.pauses_ms):
            actions.append(Pause(reply.pauses_ms[at]))
        actions.append(Body(piece))
    return (*actions, Close() if reply.drop else End())


def _pieces(reply: Chunks) -> list[bytes]:
    pieces, size = [as_bytes(piece) for piece in reply.pieces], reply.size_bytes
    if size is None:
        return pieces
    data = b"".join(pieces)
    return [data[at : at + size] for at in range(0, len(data), size)]


def _plan_stream(reply: Text | ToolCalls, asked: Asked) -> Plan:
    head = Head(200, (("content-type", "text/event-stream; charset=utf-8"), ("cache-control", "no-cache")))
    events = (sse([event], done=False) for event in _events(reply, asked))
    return (head, *(Body(event) for event in events), Body(sse([])), End())


def _completion(reply: Text | ToolCalls, asked: Asked) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": reply.content}
    if reply.reasoning is not None:
        message["reasoning_content"] = reply.reasoning
    if isinstance(reply, ToolCalls):
        message["tool_calls"] = [_call(call, call.arguments) for call in reply.calls]
    document = _envelope("chat.completion", asked)
    document["choices"] = [{"index": 0, "message": message, "finish_reason": reply.finish_reason}]
    if reply.usage is not None:
        document["usage"] = _usage(reply.usage)
    return document


def _events(reply: Text | ToolCalls, asked: Asked) -> Iterator[dict[str, Any]]:
    for delta in ({"role": "assistant", "content": "" if reply.content else None}, *_deltas(reply)):
        yield _event([{"index": 0, "delta": delta, "finish_reason": None}], asked)
    yield _event([{"index": 0, "delta": {}, "finish_reason": reply.finish_reason}], asked)
    if asked.include_usage and reply.usage is not None:
        yield _event([], asked) | {"usage": _usage(reply.usage)}


def _deltas(reply: Text | ToolCalls) -> Iterator[dict[str, Any]]:
    for piece in _cut(reply.reasoning):
        yield {"reasoning_content": piece}
    for piece in _cut(reply.content):
        yield {"content": piece}
    if isinstance(reply, ToolCalls):
        for index, call in enumerate(reply.calls):
            yield {"tool_calls": [{"index": index, **_call(call, "")}]}
            for piece in _cut(call.arguments):
                yield {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}


def _event(choices: list[Any], asked: Asked) -> dict[str, Any]:
    event = _envelope("chat.completion.chunk", asked) | {"choices": choices}
    return event | {"usage": None} if asked.include_usage else event


def _envelope(kind: str, asked: Asked) -> dict[str, Any]:
    return {"id": asked.completion_id, "object": kind, "created": asked.created, "model": asked.model}


def _call(call: Call, arguments: str) -> dict[str, Any]:
    identity = {} if call.id is None else {"id": call.id}
    return {**identity, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _usage(usage: Usage) -> dict[str, int]:
    prompt, completion = usage.prompt_tokens, usage.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _cut(text: str | None) -> Iterator[str]:
    for at in range(0, len(text or ""), PIECE_CHARS):
        yield (text or "")[at : at + PIECE_CHARS]


def _no_body(when: When) -> When:
    """The same point of an answer that has no body."""
    return "before" if when == "before" else "after_headers"


def _split(plan: Plan, when: When, after_bytes: int | None) -> tuple[Plan, Plan]:
    """The plan before and after a point of the answer."""
    if when == "before":
        return (), plan
    head = next(at for at, action in enumerate(plan) if isinstance(action, Head)) + 1
    if when == "after_headers":
        return plan[:head], plan[head:]
    bodies = [at for at, action in enumerate(plan) if isinstance(action, Body)]
    if after_bytes is None and len(bodies) > 1:
        middle = bodies[len(bodies) // 2]
        return plan[:middle], plan[middle:]
    return _split_bytes(plan, after_bytes)


def _split_bytes(plan: Plan, after_bytes: int | None) -> tuple[Plan, Plan]:
    size = sum(len(action.data) for action in plan if isinstance(action, Body))
    left = size // 2 if after_bytes is None else after_bytes
    if not 0 <= left < size:
        raise ConfigError(f"a body of {size} bytes cannot be cut after {left}; use 0 to {size - 1}")
    for at, action in enumerate(plan):
        if isinstance(action, Body):
            if left < len(action.data):
                first, rest = Body(action.data[:left]), Body(action.data[left:])
                return (*plan[:at], first), (rest, *plan[at + 1 :])
            left -= len(action.data)
    raise AssertionError("a body shorter than its own length")


def _first_chunks(plan: Plan, count: int) -> Plan:
    """The plan up to and with its `count`-th chunk; nothing after its headers if that is 0."""
    last = [at for at, action in enumerate(plan) if isinstance(action, Head | Body)]
    if not 0 <= count < len(last) - 1:
        raise ConfigError(f"a reply of {len(last) - 1} chunks cannot be cut after {count}; use 0 to {len(last) - 2}")
    return plan[: last[count] + 1]
