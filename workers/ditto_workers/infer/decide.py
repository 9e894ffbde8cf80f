"""What an answer over HTTP means: a Sample, or one of the endings of `endings.py`. Pure; start at `decide_ending`."""

from __future__ import annotations

import codecs
import json
import re
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from ditto import OutputError, Sample
from ditto_workers.infer.completion import ImproperAnswer, error_in, read_completion
from ditto_workers.infer.endings import (
    ANSWER_LOST_STATUSES,
    ProviderRefused,
    ResponseLost,
    invalid_answer,
    lost_answer,
    retry_after_s,
)
from ditto_workers.infer.exchange import Received
from ditto_workers.infer.stream import Stream
from ditto_workers.surrogates import repair

_MESSAGE_CHARS_MAX: Final = 300
_START_CHARS_MAX: Final = 200
_CODE_CHARS_MAX: Final = 64

_TRANSIENT_WORD: Final = re.compile(
    "rate_?limit|overload|unavailable|server_?error|internal|busy|try_?again", re.IGNORECASE
)
_STREAM_LINE: Final = re.compile("(data|event|id|retry)?:")
_LOST_WORD: Final = re.compile("time_?(d_?)?out", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Answer:
    """A proper answer, and whether text in it had to be repaired."""

    sample: Sample
    repaired: bool


def decide_ending(
    received: Received, *, kind: str, max_bytes: int, now: datetime, stream: Stream | None = None
) -> Answer:
    """The answer. Raises ProviderRefused, ResponseLost or OutputError; see `endings.py`.

    `stream` has heard the answer that was asked for as a stream; the answer need not have come as one.
    """
    status = received.status
    if status in ANSWER_LOST_STATUSES:
        raise ResponseLost(
            f"{received.url} answered {status}: somebody on the way stopped waiting; the model may have answered"
        )
    if 300 <= status < 400:
        raise ProviderRefused(
            f"{received.url} answered {status} and redirects to {received.redirect_origin or 'nowhere'}; redirects "
            "are not followed. Check the provider's base_url",
            code=f"provider.http_{status}",
        )
    if status >= 400:
        raise _refusal(received, now)
    if received.over_limit:
        raise _improper(
            received,
            f"the answer of {received.url} is longer than {max_bytes} bytes; raise workers.infer.response_max_bytes, "
            "or ask for less",
        )
    if stream is not None and _came_as_stream(received, stream):
        return _decide_stream(received, stream, kind, now)
    if received.cut is not None:
        raise lost_answer(received.url, received.cut)
    return _decide_document(received, kind, now, "JSON" if stream is None else "a stream of events, or JSON,")


def _decide_document(received: Received, kind: str, now: datetime, expected: str) -> Answer:
    document = _document(received, _text(received))
    if document is None:
        raise _improper(received, _no_json(received, expected))
    error = error_in(document)
    if error is not None:
        raise _refusal_in_body(received, error, now)
    return _read(received, document, kind)


def _decide_stream(received: Received, stream: Stream, kind: str, now: datetime) -> Answer:
    if stream.error is not None:
        raise _refusal_in_body(received, stream.error, now)
    if not stream.has_end:
        reason = "its stream cannot be decompressed" if received.undecodable else received.cut
        raise lost_answer(received.url, reason or "its stream stops without a finish reason and without an end mark")
    if stream.problem is not None:
        raise _improper(received, f"{received.url} answered, but not properly: {stream.problem}")
    return _read(received, stream.document(), kind)


def _came_as_stream(received: Received, stream: Stream) -> bool:
    """Whether this is a stream, be it cut before its first event, and no page or document in place of it."""
    text = _text(received).lstrip()
    if stream.has_begun or _STREAM_LINE.match(text):
        return True
    return _content_type(received) == "text/event-stream" and not text.startswith(("<", "{", "["))


def _read(received: Received, document: dict[str, Any], kind: str) -> Answer:
    try:
        whole, repaired = repair(document)
        return Answer(read_completion(whole, kind=kind), repaired or not _is_utf8(received.body))
    except ImproperAnswer as improper:
        problem = str(improper)
    except RecursionError:
        problem = "it is nested too deep"
    raise _improper(received, f"{received.url} answered, but not properly: {problem}")


def _improper(received: Received, message: str) -> OutputError:
    kept = {"status": received.status, "content_type": _content_type(received), "body": _text(received)}
    return invalid_answer(message, kept=kept)


def _document(received: Received, text: str) -> dict[str, Any] | None:
    """The body as a JSON object; None if it is none."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        if not received.has_length and text.lstrip().startswith("{"):
            # The connection's end was the body's only end mark, and the JSON says that it is not the end.
            raise ResponseLost(
                f"the answer of {received.url} ends in the middle; the model may have answered, and billed"
            ) from None
        return None
    return document if isinstance(document, dict) else None


def _no_json(received: Received, expected: str) -> str:
    got = "data that cannot be decompressed" if received.undecodable else _content_type(received) or "no content type"
    start = " ".join(_text(received)[:_START_CHARS_MAX].split())
    return (
        f"expected {expected} from {received.url}, got {got}: {start!r}. Check the provider's base_url"
        f"{_hint(received.url)}"
    )


def _refusal(received: Received, now: datetime) -> ProviderRefused:
    status = received.status
    document = _json_or_none(received)
    said = _message_of(document) if document is not None else _cut(_text(received))
    hint = ""
    if status in (401, 403):
        hint = ". Check the provider's key"
    elif status == 404:
        hint = f". Check the model's name and the provider's base_url{_hint(received.url)}"
    return _refused(
        f"{received.url} answered {status}", said + hint, f"http_{status}", _is_transient(status), received, now
    )


def _refusal_in_body(received: Received, error: Any, now: datetime) -> Exception:
    """The failure that a gateway reports after it has already said 200."""
    code = error.get("code") if isinstance(error, dict) else None
    if code in (None, "") and isinstance(error, dict):
        code = error.get("type") or error.get("status")
    word = str(code) if isinstance(code, str | int) and not isinstance(code, bool) else ""
    status = int(word) if re.fullmatch("[45][0-9]{2}", word, re.ASCII) else None
    what = f"{received.url} answered 200 with an error{f' {word[:_CODE_CHARS_MAX]}' if word else ''}"
    if status in ANSWER_LOST_STATUSES or _LOST_WORD.search(word):
        return ResponseLost(f"{what}: somebody on the way stopped waiting; the model may have answered")
    if status is not None:
        return _refused(what, _message_of({"error": error}), f"http_{status}", _is_transient(status), received, now)
    stable = re.sub("[^a-z0-9_.-]", "_", word.lower())[:_CODE_CHARS_MAX] or "error"
    transient = _TRANSIENT_WORD.search(word) is not None
    return _refused(what, _message_of({"error": error}), stable, transient, received, now)


def _refused(what: str, said: str, code: str, retryable: bool, received: Received, now: datetime) -> ProviderRefused:
    wait_s = retry_after_s(received.headers, now=now)
    asks = f" (asks to wait {wait_s:g} s)" if wait_s is not None else ""
    text = f"{what}{asks}: {said}" if said else what + asks
    return ProviderRefused(repair(text)[0], code=f"provider.{code}", retryable=retryable, retry_after_s=wait_s)


def _is_transient(status: int) -> bool:
    return status == 429 or status >= 500


def _message_of(document: Any) -> str:
    """The provider's own words in an error document, cut."""
    error = document.get("error") or document if isinstance(document, dict) else document
    said = error
    if isinstance(error, dict):
        said = next((error[name] for name in ("message", "detail", "msg") if error.get(name)), error)
    text = said if isinstance(said, str) else json.dumps(said, ensure_ascii=False)
    return _cut(text)


def _json_or_none(received: Received) -> Any:
    try:
        return json.loads(_text(received))
    except (ValueError, RecursionError):
        return None


def _text(received: Received) -> str:
    """The body as UTF-8, whatever charset was or was not announced."""
    return received.body.decode("utf-8-sig", "replace")


def _is_utf8(body: bytes) -> bool:
    try:
        codecs.getincrementaldecoder("utf-8")().decode(body)  # a stream may have been left in the middle of a character
    except UnicodeDecodeError:
        return False
    return True


def _content_type(received: Received) -> str:
    return received.headers.get("content-type", "").partition(";")[0].strip()


def _hint(url: str) -> str:
    """The most common mistake in a base URL."""
    return "; it ends in /v1, try it without" if "/v1/" in url else "; try it with /v1 at its end"


def _cut(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= _MESSAGE_CHARS_MAX else words[: _MESSAGE_CHARS_MAX - 1] + "…"
