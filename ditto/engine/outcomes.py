"""Outcomes: what an attempt at a step came to, as a value. Deciding touches no store; committing comes after.

How an attempt ended, and what that means for each effect class:

| the handler …            | write               | infer             | pure, read, idempotent, local |
|--------------------------|---------------------|-------------------|-------------------------------|
| returned a value         | completed           | completed         | completed                     |
| … that cannot be used    | failed for good     | failed for good   | failed                        |
| raised EffectNotMade     | refused             | refused           | failed, may be tried again    |
| raised EffectRejected    | failed for good     | failed for good   | failed for good               |
| raised OutputError       | failed for good     | failed (invalid)  | failed                        |
| raised anything else     | unknown             | unknown           | failed, may be tried again    |
| missed its deadline      | unknown             | unknown           | failed, may be tried again    |
| was cancelled            | unknown             | unknown           | nothing is recorded           |

"May be tried again" holds where a policy allows it and the error does not say `retryable=False`. A `write` or `infer`
attempt that said `ctx.not_made(…)` before it was cut short is refused, not unknown. A worker may turn a definite
failure into a value (`Action.failure`): a tool's error is a value for the workflow. What a handler returns or raises
although its caller was cancelled counts as above; only an error of a class that is not admitted is then taken for the
cancellation.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from pydantic import ValidationError

from ditto.complaints import all_complaints
from ditto.contracts import Json
from ditto.effects import EffectClass
from ditto.engine.deadlines import RUN_TIMEOUT, TOTAL_TIMEOUT, Deadline, Limit
from ditto.errors import (
    STEP_ERRORS,
    DittoError,
    EffectNotMade,
    EffectRejected,
    InvalidValueError,
    LimitExceededError,
    OutputError,
    StepError,
    StepTimeoutError,
    StoreDamagedError,
    ToolError,
)
from ditto.store.records import StepRow
from ditto.store.schema import StepState
from ditto.store.values import Stored, decode
from ditto.waits import SECONDS_MAX
from ditto.worker import Action, as_data

MESSAGE_MAX: Final = 2_000
"""Characters of an error's message that are kept."""

_TIMEOUT_CODES: Final = {Limit.TOTAL: TOTAL_TIMEOUT, Limit.RUN: RUN_TIMEOUT}
"""The codes of missed deadlines that are not the attempt's own."""


@dataclass(frozen=True, slots=True)
class ErrorRecord:
    """An error as it is stored, and raised again from: names and texts only, never code."""

    kind: str
    """The class of the tree that it comes back as; one of STEP_ERRORS."""
    type: str
    """The name of the exception that was raised."""
    message: str
    code: str
    retryable: bool = False
    final: bool = False
    """Trying the step again is not allowed, not even by reopening the run."""
    step: str | None = None
    retry_after_s: float | None = None
    """How long the other side asks to wait before another try."""

    def to_text(self) -> str:
        """The stored form."""
        return json.dumps({name: getattr(self, name) for name in self.__slots__}, ensure_ascii=False)

    @classmethod
    def from_text(cls, text: str) -> ErrorRecord:
        """The record in a stored form. Raises StoreDamagedError if it is none."""
        try:
            return cls(**decode(text))
        except TypeError:
            raise StoreDamagedError("an error in the store is not as ditto writes it; restore a backup") from None

    def to_error(self, run_id: str) -> StepError:
        """The exception that the caller gets: the same in the first run and after a restart."""
        error = STEP_ERRORS.get(self.kind, StepError)(
            self.message,
            code=self.code,
            retryable=self.retryable,
            run_id=run_id,
            step=self.step,
            error_type=self.type,
        )
        if isinstance(error, EffectNotMade):
            error.retry_after_s = self.retry_after_s
        return error


@dataclass(frozen=True, slots=True)
class Completed:
    """The step has a value."""

    output: Stored


@dataclass(frozen=True, slots=True)
class Failed:
    """The step failed, with a definite outcome. `instead` is the value that its worker makes of that, if any."""

    error: ErrorRecord
    cause: BaseException | None = None
    kept: Stored | None = None
    instead: Stored | None = None
    again: bool = False
    """The error says nothing against another try, where that is safe and a policy allows it."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Nothing happened in the world; another attempt may be made."""

    error: ErrorRecord
    cause: BaseException | None = None
    instead: Stored | None = None
    again: bool = False


@dataclass(frozen=True, slots=True)
class Unknown:
    """The effect may have been made or not."""

    reason: str
    cause: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Cut:
    """The caller was cancelled before there was an outcome that matters: nothing is recorded."""


Outcome: TypeAlias = Completed | Failed | Refused | Unknown | Cut
Encode: TypeAlias = Callable[[Any, str], Stored]


@dataclass(frozen=True, slots=True)
class End:
    """How an attempt ended, before anything is decided about it: by a value, an error, a deadline or a cancellation."""

    value: Any = None
    error: Exception | None = None
    deadline: Deadline | None = None
    """The one that was missed."""
    cancelled: bool = False
    """The handler ended by the cancellation of its caller."""
    not_made: str | None = None
    cancellation: asyncio.CancelledError | None = None
    """The caller's cancellation, whatever the handler made of it: to be raised again once the outcome is recorded."""


def decide(action: Action, end: End, path: str, encode: Encode, redact: Callable[[str], str]) -> Outcome:
    """What an attempt's end means. Pure, but for the encoding of the value."""
    deciding = _Deciding(action, path, encode, redact)
    if end.error is not None:
        return Cut() if end.cancellation and not action.effect.admitted else deciding.error(end.error)
    if end.deadline is not None:
        return deciding.deadline(end.deadline, end.not_made)
    if end.cancelled:
        return deciding.cancelled(end)
    return deciding.value(end.value)


def record_error(
    error: BaseException, path: str | None, redact: Callable[[str], str], *, final: bool = False
) -> ErrorRecord:
    """The record of an exception: its class in the tree if it has one, its name, its text."""
    name, message, code = type(error).__name__, "", StepError.default_code
    if isinstance(error, DittoError):  # a class of the user's own may have left its __init__ out
        message, code = getattr(error, "message", ""), getattr(error, "code", error.default_code)
    return ErrorRecord(
        kind=next(cls.__name__ for cls in (*type(error).__mro__, StepError) if STEP_ERRORS.get(cls.__name__) is cls),
        type=str(getattr(error, "error_type", name)) if isinstance(error, StepError) else name,
        message=redact(str(message) or _text_of(error))[:MESSAGE_MAX] or name,
        code=str(code),
        retryable=bool(getattr(error, "retryable", False)),
        final=final,
        step=path,
        retry_after_s=_retry_after_s(error),
    )


def is_lost(row: StepRow | None) -> bool:
    """Whether an attempt was admitted and its outcome is not known."""
    return row is not None and row.state in (StepState.ADMITTED, StepState.UNKNOWN)


def lost_reason(row: StepRow) -> str:
    """Why the outcome of a lost attempt is not known."""
    if row.error is not None:
        return ErrorRecord.from_text(row.error).message
    return f"attempt {row.attempt} was admitted, and the process ended before its outcome was recorded"


def may_be_tried_again(error: BaseException) -> bool:
    """Whether the error says nothing against it; one that is not classified says nothing."""
    return bool(getattr(error, "retryable", True))


def _retry_after_s(error: BaseException) -> float | None:
    """How long the other side asks to wait; None for what is no time to come."""
    asked: Any = getattr(error, "retry_after_s", None)
    return float(asked) if type(asked) in (int, float) and 0 < asked <= SECONDS_MAX else None


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:  # noqa: BLE001 - the user's own __str__
        return f"its text cannot be read: {type(broken).__name__}"


@dataclass(frozen=True, slots=True)
class _Deciding:
    action: Action
    path: str
    encode: Encode
    redact: Callable[[str], str]

    def value(self, value: Any) -> Outcome:
        try:
            return Completed(self._encoded(value))
        except Exception as error:  # noqa: BLE001 - whatever is wrong with a value: the effect was made
            return self._unusable(error)

    def error(self, error: Exception) -> Outcome:
        effect = self.action.effect
        if isinstance(error, OutputError):
            return self._unusable(error)
        if isinstance(error, EffectRejected | ToolError):
            return self._failed(error, final=isinstance(error, EffectRejected))
        if isinstance(error, EffectNotMade):
            return self._refused(error) if effect.admitted else self._failed(error)
        if effect.admitted:
            return Unknown(self.redact(f"{type(error).__name__}: {_text_of(error)}")[:MESSAGE_MAX], error)
        return self._failed(error)

    def deadline(self, missed: Deadline, not_made: str | None) -> Outcome:
        text, code = f"{self.action.label} missed {missed}", _TIMEOUT_CODES.get(missed.limit)
        if self.action.effect.admitted:
            if not_made is None:
                return Unknown(text)
            return self._refused(EffectNotMade(f"{text}; {not_made}", code=code or StepTimeoutError.default_code))
        error = StepTimeoutError(text, code=code, retryable=True)
        return self._failed(error, may_be_a_value=missed.limit is Limit.ACTION)

    def cancelled(self, end: End) -> Outcome:
        if not self.action.effect.admitted:
            return Cut()
        if end.not_made is not None:
            error = EffectNotMade(end.not_made, code="effect.cancelled")
            return Refused(self._record(error), again=True)
        return Unknown("the caller was cancelled while the attempt was under way")

    def _failed(self, error: Exception, *, final: bool = False, may_be_a_value: bool = True) -> Failed:
        instead = self._instead(error) if may_be_a_value else None
        return Failed(self._record(error, final=final), error, instead=instead, again=may_be_tried_again(error))

    def _refused(self, error: EffectNotMade) -> Refused:
        return Refused(self._record(error), error, self._instead(error), again=may_be_tried_again(error))

    def _encoded(self, value: Any) -> Stored:
        result = as_data(self.action.result(value))
        if self.action.output is not None:
            result = self.action.output.model_validate(result).model_dump(mode="json")
        return self.encode(result, f"the output of {self.action.label}")

    def _unusable(self, error: Exception) -> Failed:
        """The effect was made, and its result cannot be used; what was received is kept where it can be."""
        if isinstance(error, DittoError):
            text = error.message
        else:
            said = all_complaints(error) if isinstance(error, ValidationError) else str(error)
            text = f"the output of {self.action.label} is not valid: {said}"
        code = error.code if isinstance(error, OutputError) else None
        # A value that does not fit will not fit the next time, unless its handler says otherwise.
        again = isinstance(error, OutputError) and may_be_tried_again(error)
        kept = self._kept(getattr(error, "kept", None))
        record = self._record(OutputError(text, code=code, retryable=again), final=self.action.effect.admitted)
        return Failed(record, error, kept=kept, again=again)

    def _kept(self, kept: Json) -> Stored | None:
        if kept is None:
            return None
        what = f"what {self.action.label} received"
        try:
            return self.encode(kept, what)
        except (InvalidValueError, LimitExceededError) as error:
            return self.encode({"not_kept": error.message}, what)

    def _instead(self, error: Exception) -> Stored | None:
        if self.action.effect is EffectClass.LOCAL:
            return None
        try:
            value = self.action.failure(error)
            return None if value is None else self.encode(as_data(value), f"the failure of {self.action.label}")
        except Exception:  # noqa: BLE001 - no value can be made of it: it stays an error of the step
            return None

    def _record(self, error: Exception, *, final: bool = False) -> ErrorRecord:
        return record_error(error, self.path, self.redact, final=final)
