"""Endings: what a model call of Pydantic AI's came to, other than a proper answer.

| the framework says                                                        | it means                            |
|---------------------------------------------------------------------------|-------------------------------------|
| HTTP status 4xx, 429, 5xx, but for the two below; an error in the stream  | refused: nothing was decided        |
| no connection was made; no slot for it; the request is wrong by itself    | refused: nothing was sent           |
| 408, 504, a timeout, a cut connection, a stream without an end            | unknown: it may have answered       |
| an answer that is none: no JSON, an unknown finish reason                 | invalid: kept, and not asked again  |

Pure. What goes on as another exception leaves the call unknown.
"""

from __future__ import annotations

from collections.abc import Collection, Generator
from contextlib import contextmanager
from json import JSONDecodeError
from typing import Any, Final

from pydantic_ai.exceptions import (
    ConcurrencyLimitExceeded,
    FallbackExceptionGroup,
    ModelAPIError,
    ModelConnectionError,
    ModelHTTPError,
    ModelQuotaExceededError,
    ModelRateLimitError,
    ModelRequestRejectedError,
    ModelServerError,
    ModelUnavailableError,
    UnexpectedModelBehavior,
    UserError,
)
from pydantic_ai.messages import ModelResponse

from ditto import EffectNotMade, OutputError
from ditto.journal.pydantic_ai.records import write_response

ANSWER_LOST_STATUSES: Final = (408, 504)
"""Somebody on the way gave up waiting; the model may have answered all the same."""

FINISH_REASONS: Final = frozenset(
    {"end_turn", "eos", "eos_token", "max_tokens", "model_length", "refusal", "stop_sequence", "tool_use"}
)
"""Proper endings that some compatible providers have their own words for, and the framework none."""

_SAYS_NO: Final = (
    ModelQuotaExceededError,
    ModelRateLimitError,
    ModelRequestRejectedError,
    ModelUnavailableError,
)


class ResponseLost(Exception):
    """The request was sent, and no complete answer came back. Asking again may cost a second answer."""


@contextmanager
def told_apart() -> Generator[None]:
    """Raises the framework's exceptions as what they mean for the journal."""
    try:
        yield
    except UnexpectedModelBehavior as error:
        raise invalid_answer(error.message, error.body) from error
    except Exception as error:
        if isinstance(error, ModelAPIError) and isinstance(error.__cause__, JSONDecodeError | UnicodeDecodeError):
            raise invalid_answer(error.message, _undecodable(error.__cause__)) from error
        refusal = refusal_of(error)
        if refusal is None:
            raise
        raise refusal from error


def _undecodable(error: JSONDecodeError | UnicodeDecodeError) -> str:
    return error.doc if isinstance(error, JSONDecodeError) else error.object.decode("utf-8", "replace")


def refusal_of(error: Exception) -> EffectNotMade | None:
    """The refusal that an exception stands for; None if it does not prove that nothing was decided."""
    match error:
        case FallbackExceptionGroup():
            refusals = [refusal_of(each) for each in error.exceptions]
            if not all(refusals):
                return None
            last = refusals[-1]
            assert last is not None
            return _refused(str(error.message), last.code, retryable=any(each and each.retryable for each in refusals))
        case ModelHTTPError() if not error.in_stream:
            return _refused_by_status(error)
        case ModelConnectionError():
            if error.phase not in ("pool", "connect"):
                return None
            return _refused(f"nothing was sent: {error.message}", "provider.unreachable", retryable=True)
        case ModelAPIError() if isinstance(error, _SAYS_NO) or error.in_stream:
            retryable = isinstance(error, ModelRateLimitError | ModelUnavailableError | ModelServerError)
            return _refused(error.message, "provider.error", retryable=retryable, after_s=error.retry_after)
        case ConcurrencyLimitExceeded():
            return _refused(error.message, "provider.unreachable", retryable=True)
        case UserError():
            return _refused(error.message, "provider.request", retryable=False)
    return None


def _refused_by_status(error: ModelHTTPError) -> EffectNotMade | None:
    status = error.status_code
    if status < 400 or status in ANSWER_LOST_STATUSES:
        return None
    retryable = status in (409, 425, 429) or status >= 500
    return _refused(error.message, f"provider.http_{status}", retryable=retryable, after_s=error.retry_after)


def _refused(message: str, code: str, *, retryable: bool, after_s: float | None = None) -> EffectNotMade:
    return EffectNotMade(
        f"the provider was asked, and refused: {message}", code=code, retryable=retryable, retry_after_s=after_s
    )


def invalid_answer(message: str, kept: Any) -> OutputError:
    """The error of an answer that is not proper, with what was received."""
    return OutputError(message, code="provider.invalid_answer", kept={"received": kept})


def check_ending(response: ModelResponse, *, streamed: bool, further_words: Collection[str]) -> None:
    """Let pass an answer that ended properly. `further_words` are endings of this provider's own; "" is none at all.

    Raises ResponseLost if a stream just stopped, OutputError if its word for the end is not known.
    """
    if response.state == "suspended":
        return
    if response.state != "complete":
        raise ResponseLost(f"the answer of {response.model_name} stopped before its end ({response.state})")
    details = response.provider_details or {}
    word = details.get("finish_reason") or ""
    if word:
        if response.finish_reason is None and word not in FINISH_REASONS and word not in further_words:
            raise invalid_answer(
                f"the answer of {response.model_name} ended with {word!r}, which is no known finish reason",
                write_response(response),
            )
    elif streamed and "" not in further_words and "refusal" not in details:
        raise ResponseLost(
            f"the stream of {response.model_name} ended without a finish reason, so it may have been cut"
        )
