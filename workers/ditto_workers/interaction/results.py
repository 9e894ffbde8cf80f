"""What came back from outside, as an ExternalResult: values, and failures whose outcome is definite."""

from __future__ import annotations

from typing import Any, Final

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticSerializationError

from ditto import (
    EffectClass,
    EffectNotMade,
    EffectRejected,
    ExternalResult,
    OutputError,
    ResultError,
    StepError,
    StepTimeoutError,
    ToolError,
)
from ditto.contracts.interaction import ResultStatus
from ditto_workers.interaction.schemas import Check, SchemaViolation
from ditto_workers.surrogates import repair

_REPEATABLE: Final = (EffectClass.PURE, EffectClass.READ, EffectClass.IDEMPOTENT)


def to_result(value: Any, *, source: str, call_id: str | None, check: Check | None = None) -> ExternalResult:
    """What a handler or a look-up returned, as a result.

    An ExternalResult stays what it is, with the call id filled in; text becomes `content`, other JSON data and
    pydantic models `structured`. With `check`, what a successful call returned must follow the output schema. Lone
    surrogates become U+FFFD, and `metadata` says `repaired`. Raises only OutputError: the call was made.
    """
    try:
        data, repaired = repair(_as_data(value))
        result = _parsed(data, check) if isinstance(value, ExternalResult) else _wrapped(data, check, source)
    except SchemaViolation as error:
        raise OutputError(f"{source} was called, but its result does not follow its output schema: {error}") from None
    except (ValidationError, PydanticSerializationError) as error:
        raise OutputError(
            f"{source} was called, but its result is no JSON data: {_problem(error)}. "
            "Return text, JSON data, a pydantic model or an ExternalResult"
        ) from None
    changes: dict[str, Any] = {}
    if result.call_id is None and call_id is not None:
        changes["call_id"] = call_id
    if repaired:
        changes["metadata"] = {**result.metadata, "repaired": True}
    return result.model_copy(update=changes) if changes else result


def to_failed_result(
    error: Exception, *, effect: EffectClass, source: str, call_id: str | None
) -> ExternalResult | None:
    """A failure whose outcome is definite, as a result; None where it is not, or must stay an error.

    ToolError, EffectRejected and EffectNotMade say what happened. Any other exception tells nothing about a `write`
    (None: unknown) and undoes a `local` handler (None: the step fails); else it is a failed result.
    """
    if effect is EffectClass.LOCAL or isinstance(error, OutputError):
        return None
    status: ResultStatus = "failed"
    if isinstance(error, ToolError | EffectRejected | EffectNotMade):
        details = error.details if isinstance(error, ToolError) else {}
        reason = ResultError(code=error.code, message=error.message, retryable=error.retryable, details=details)
    elif effect not in _REPEATABLE:
        return None
    elif isinstance(error, StepTimeoutError):
        status = "timeout"
        reason = ResultError(code=error.code, message=error.message, retryable=error.retryable)
    elif isinstance(error, StepError) and error.code == "step.never_ended":
        reason = ResultError(code=error.code, message=error.message)
    else:
        reason = ResultError(code="tool.exception", message=f"{type(error).__name__}: {error}")
    return ExternalResult(
        call_id=call_id,
        source=source,
        status=status,
        error=ResultError.model_validate(repair(reason.model_dump(mode="json"))[0]),
    )


def _parsed(data: Any, check: Check | None) -> ExternalResult:
    result = ExternalResult.model_validate(data)
    if check is None or result.status != "success":
        return result
    if result.structured is None and result.content:
        return result.model_copy(update={"content": _as_data(check(result.content))})
    return result.model_copy(update={"structured": _as_data(check(result.structured))})


def _wrapped(data: Any, check: Check | None, source: str) -> ExternalResult:
    returned = data if check is None else _as_data(check(data))
    if isinstance(returned, str):
        return ExternalResult(source=source, status="success", content=returned)
    return ExternalResult(source=source, status="success", structured=returned)


def _as_data(value: Any) -> Any:
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else value


def _problem(error: ValidationError | PydanticSerializationError) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
