"""How a model call may end other than by a proper answer, and the table of finish reasons.

ProviderRefused   it said no, or nothing was sent: nothing is decided, it may be asked again
ResponseLost      the request was sent and the answer is lost: it may have been made, and billed
(OutputError)     it answered, but not properly

A stream ends properly by a finish reason or by its end mark. One that ends by neither is lost, whatever was in it; one
that ends, but is not proper, is an OutputError; and an error in it is the provider's no, whatever came before.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import Any, Final

from ditto import EffectNotMade, OutputError

MISSING: Final = "missing"
"""The finish reason of a complete answer that came without one."""

ANSWER_LOST_STATUSES: Final = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.GATEWAY_TIMEOUT)
"""Somebody on the way gave up waiting; the model may have answered all the same."""

_OPENAI: Final[Mapping[str, str]] = {
    "stop": "stop",
    "end_turn": "stop",
    "stop_sequence": "stop",
    "eos": "stop",
    "eos_token": "stop",
    "length": "length",
    "max_tokens": "length",
    "model_length": "length",
    "tool_calls": "tool_calls",
    "tool_use": "tool_calls",
    "function_call": "tool_calls",
    "content_filter": "content_filter",
    "refusal": "refusal",
}

FINISH_REASONS: Final[Mapping[str, Mapping[str, str]]] = {"openai": _OPENAI}
"""By kind of provider: its words, and what each one means. A word that is not here is no proper ending."""

_SECONDS: Final = re.compile(r"\d{1,15}(\.\d{1,9})?", re.ASCII)


class ProviderRefused(EffectNotMade):
    """The provider said no, or nothing was sent. `retry_after_s` is how long it asks to wait, if it says."""

    def __init__(self, message: str, *, code: str, retryable: bool = False, retry_after_s: float | None = None) -> None:
        # Recorded as what it is to the engine: a record names only the classes of ditto.errors.
        super().__init__(message, code=code, retryable=retryable, error_type=EffectNotMade.__name__)
        self.retry_after_s = retry_after_s


class ResponseLost(Exception):
    """The request was sent, and no complete answer came back. Asking again may cost a second answer."""


def lost_answer(url: str, reason: str) -> ResponseLost:
    """The error of an answer that did not come, or not as a whole."""
    return ResponseLost(
        f"the request to {url} was sent and its answer is lost ({reason}); the model may have answered, and billed"
    )


def invalid_answer(message: str, *, kept: dict[str, Any]) -> OutputError:
    """The error of an answer that is not proper, with what was received."""
    return OutputError(message, code="provider.invalid_answer", kept=kept)


def retry_after_s(headers: Mapping[str, str], *, now: datetime) -> float | None:
    """How long the provider asks to wait: `retry-after-ms`, else `Retry-After` in seconds or as a date (RFC 9110).

    None for a date that is past, a negative number, or anything else.
    """
    milliseconds = headers.get("retry-after-ms", "").strip()
    if _SECONDS.fullmatch(milliseconds):
        return float(milliseconds) / 1000
    text = headers.get("retry-after", "").strip()
    if _SECONDS.fullmatch(text):
        return float(text)
    try:
        at = parsedate_to_datetime(text)
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    wait_s = (at.replace(tzinfo=at.tzinfo or UTC) - now).total_seconds()
    return wait_s if wait_s > 0 else None
