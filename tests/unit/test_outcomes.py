"""What an attempt's end means: the table of `ditto.engine.outcomes`, cell by cell."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pydantic import BaseModel

from ditto.effects import EffectClass
from ditto.engine.deadlines import Deadline, Limit
from ditto.engine.outcomes import (
    MESSAGE_MAX,
    Completed,
    Cut,
    End,
    ErrorRecord,
    Failed,
    Outcome,
    Refused,
    Unknown,
    decide,
    record_error,
)
from ditto.errors import (
    STEP_ERRORS,
    EffectNotMade,
    EffectRejected,
    OutputError,
    SandboxDenied,
    StepError,
    StepTimeoutError,
    ToolError,
)
from ditto.store.values import Stored, encode, store_text
from ditto.worker import Action

ALL = list(EffectClass)
ADMITTED = [EffectClass.WRITE, EffectClass.INFER]
REPEATABLE = [effect for effect in ALL if effect not in ADMITTED]
PATH = "3/pay"


class Receipt(BaseModel):
    number: int


def stored(value: Any, what: str) -> Stored:
    return store_text(encode(value, what=what, max_bytes=1_000))


def action(effect: EffectClass, **changes: Any) -> Action:
    return Action(label="tool pay", effect=effect, call=lambda ctx: None, is_async=False, **changes)


def outcome(effect: EffectClass, end: End, **changes: Any) -> Outcome:
    return decide(action(effect, **changes), end, PATH, stored, lambda text: text)


def failed(effect: EffectClass, end: End, **changes: Any) -> Failed:
    found = outcome(effect, end, **changes)
    assert isinstance(found, Failed)
    assert found.error.step == PATH
    return found


def refused(effect: EffectClass, end: End, **changes: Any) -> Refused:
    found = outcome(effect, end, **changes)
    assert isinstance(found, Refused)
    assert found.error.step == PATH
    return found


def unknown(effect: EffectClass, end: End, **changes: Any) -> Unknown:
    found = outcome(effect, end, **changes)
    assert isinstance(found, Unknown)
    return found


# A value


@pytest.mark.parametrize("effect", ALL)
def test_a_value_completes(effect: EffectClass) -> None:
    assert outcome(effect, End(value={"n": 1})) == Completed(Stored('{"n":1}', '{"n":1}'))
    assert outcome(effect, End()) == Completed(Stored("null", "null"))


@pytest.mark.parametrize("effect", ALL)
def test_a_contract_is_checked_and_stored_as_data(effect: EffectClass) -> None:
    for value in (Receipt(number=1), {"number": 1}, {"number": "1"}):
        assert outcome(effect, End(value=value), output=Receipt) == Completed(Stored('{"number":1}', '{"number":1}'))
    assert outcome(effect, End(value=Receipt(number=1))) == Completed(Stored('{"number":1}', '{"number":1}'))


@pytest.mark.parametrize("effect", ALL)
@pytest.mark.parametrize(
    ("value", "changes"),
    [
        (object(), {}),
        (float("nan"), {}),
        ("x" * 2_000, {}),
        ({"number": "none"}, {"output": Receipt}),
        (1, {"result": lambda value: value.text}),
    ],
    ids=["not storable", "no number", "too large", "not by its contract", "its worker's result function raises"],
)
def test_a_value_that_cannot_be_used_fails_the_step_and_is_final_where_an_effect_was_made(
    effect: EffectClass, value: Any, changes: dict[str, Any]
) -> None:
    found = failed(effect, End(value=value), **changes)
    assert (found.error.kind, found.error.code) == ("OutputError", "step.output")
    assert found.error.final is (effect in ADMITTED)
    assert found.instead is None


# Errors


@pytest.mark.parametrize("effect", ALL)
@pytest.mark.parametrize(
    "raised", [EffectNotMade("no connection"), SandboxDenied("no")], ids=lambda error: type(error).__name__
)
def test_effect_not_made_may_be_tried_again(effect: EffectClass, raised: EffectNotMade) -> None:
    end = End(error=raised)
    error = refused(effect, end).error if effect in ADMITTED else failed(effect, end).error
    assert (error.kind, error.code, error.final) == (type(raised).__name__, raised.code, False)


@pytest.mark.parametrize("effect", ALL)
def test_effect_rejected_is_final(effect: EffectClass) -> None:
    error = failed(effect, End(error=EffectRejected("no", code="card.blocked"))).error
    assert (error.kind, error.code, error.final) == ("EffectRejected", "card.blocked", True)


@pytest.mark.parametrize("effect", ALL)
def test_an_output_error_keeps_what_was_received(effect: EffectClass) -> None:
    found = failed(effect, End(error=OutputError("no JSON", code="model.cut", kept={"bytes": "{"})))
    assert (found.error.code, found.error.final) == ("model.cut", effect in ADMITTED)
    assert found.kept is not None
    assert found.kept.decode() == {"bytes": "{"}


@pytest.mark.parametrize("kept", ["x" * 2_000, object(), float("inf")], ids=["too large", "an object", "no number"])
def test_what_cannot_be_kept_is_said_and_loses_no_outcome(kept: Any) -> None:
    found = failed(EffectClass.WRITE, End(error=OutputError("no JSON", kept=kept)))
    assert found.kept is not None
    assert found.kept.decode()["not_kept"].startswith("what tool pay received")


@pytest.mark.parametrize("effect", ALL)
@pytest.mark.parametrize(
    "raised", [ValueError("odd"), TimeoutError("remote"), StepError("odd"), ExceptionGroup("odd", [ValueError("odd")])]
)
def test_any_other_error_is_unknown_where_an_effect_may_have_been_made(effect: EffectClass, raised: Exception) -> None:
    end = End(error=raised)
    if effect in ADMITTED:
        assert unknown(effect, end).reason.startswith(f"{type(raised).__name__}: ")
    else:
        error = failed(effect, end).error
        assert (error.kind, error.type, error.code, error.final) == (
            "StepError",
            type(raised).__name__,
            "step.failed",
            False,
        )


@pytest.mark.parametrize("effect", ALL)
def test_a_tools_own_failure_is_definite_and_may_become_a_value(effect: EffectClass) -> None:
    raised = ToolError("out of stock", code="stock.empty", details={"left": 0})
    assert failed(effect, End(error=raised)).error.code == "stock.empty"
    instead = failed(effect, End(error=raised), failure=lambda error: {"failed": str(error)}).instead
    if effect is EffectClass.LOCAL:  # its writes were rolled back: no value may stand for them
        assert instead is None
    else:
        assert instead is not None
        assert instead.decode() == {"failed": "out of stock"}


@pytest.mark.parametrize(
    "failure", [lambda error: object(), lambda error: error.nothing], ids=["not storable", "it raises"]
)
def test_a_failure_that_cannot_become_a_value_stays_an_error(failure: Any) -> None:
    assert failed(EffectClass.WRITE, End(error=ToolError("no")), failure=failure).instead is None
    assert refused(EffectClass.WRITE, End(error=EffectNotMade("no")), failure=failure).instead is None


# Deadlines and cancellations


@pytest.mark.parametrize("effect", ALL)
def test_a_missed_deadline_is_unknown_where_an_effect_may_have_been_made(effect: EffectClass) -> None:
    end = End(deadline=Deadline(2.5))
    if effect in ADMITTED:
        assert unknown(effect, end).reason == "tool pay missed its deadline of 2.5 s"
    else:
        error = failed(effect, end).error
        assert (error.kind, error.code, error.retryable) == ("StepTimeoutError", "step.timeout", True)


@pytest.mark.parametrize("effect", ADMITTED)
def test_what_said_that_nothing_was_sent_is_refused(effect: EffectClass) -> None:
    late = refused(effect, End(deadline=Deadline(2.5), not_made="no connection yet"))
    assert (late.error.kind, late.error.code) == ("EffectNotMade", "step.timeout")
    assert "no connection yet" in late.error.message
    cut = refused(effect, End(cancelled=True, not_made="no connection yet", cancellation=asyncio.CancelledError()))
    assert (cut.error.kind, cut.error.code) == ("EffectNotMade", "effect.cancelled")


@pytest.mark.parametrize("own", [True, False])
def test_a_tools_own_deadline_may_become_a_value_and_the_nodes_may_not(own: bool) -> None:
    found = failed(
        EffectClass.READ, End(deadline=Deadline(1, Limit.ACTION if own else Limit.STEP)), failure=lambda error: "late"
    )
    assert (found.instead is not None) is own


@pytest.mark.parametrize("effect", ALL)
def test_a_cancelled_attempt_is_unknown_or_leaves_no_trace(effect: EffectClass) -> None:
    found = outcome(effect, End(cancelled=True, cancellation=asyncio.CancelledError()))
    if effect in ADMITTED:
        assert isinstance(found, Unknown)
    else:
        assert found == Cut()


@pytest.mark.parametrize("effect", ALL)
def test_what_a_handler_makes_of_a_cancellation_counts(effect: EffectClass) -> None:
    cancellation = asyncio.CancelledError()
    assert isinstance(outcome(effect, End(value=1, cancellation=cancellation)), Completed)
    error = outcome(effect, End(error=ValueError("closed"), cancellation=cancellation))
    assert isinstance(error, Unknown) if effect in ADMITTED else error == Cut()
    rejected = outcome(effect, End(error=EffectRejected("no"), cancellation=cancellation))
    assert isinstance(rejected, Failed) if effect in ADMITTED else rejected == Cut()


# The record of an error


class OwnError(Exception):
    def __init__(self, code: int, detail: str) -> None:
        super().__init__(code, detail)
        self.code, self.detail = code, detail

    def __str__(self) -> str:
        return f"{self.detail} ({self.code})"


class OwnRejection(EffectRejected):
    pass


class Forgetful(EffectRejected):
    def __init__(self, number: int) -> None:
        self.number = number


class Unreadable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


def recorded(error: BaseException) -> StepError:
    record = record_error(error, PATH, lambda text: text.replace("secret", "[redacted]"))
    return ErrorRecord.from_text(record.to_text()).to_error("run")


def test_f09_an_error_comes_back_by_name_and_no_class_of_the_users_is_called() -> None:
    error = recorded(OwnError(7, "x"))
    assert (type(error), error.error_type, error.message) == (StepError, "OwnError", "x (7)")
    assert (error.code, error.retryable, error.run_id, error.step) == ("step.failed", False, "run", PATH)


@pytest.mark.parametrize("cls", STEP_ERRORS.values(), ids=lambda cls: str(cls.__name__))
def test_the_classes_of_the_tree_come_back_as_themselves(cls: type[StepError]) -> None:
    error = recorded(cls("no", code="my.code", retryable=True))
    assert (type(error), error.message, error.code, error.retryable) == (cls, "no", "my.code", True)
    assert error.error_type == cls.__name__


def test_a_subclass_comes_back_as_the_class_of_the_tree_that_it_is() -> None:
    assert (type(recorded(OwnRejection("no"))), recorded(OwnRejection("no")).error_type) == (
        EffectRejected,
        "OwnRejection",
    )


def test_a_class_of_the_same_name_is_not_taken_for_one_of_the_tree() -> None:
    stranger = type("ToolError", (Exception,), {})
    assert (type(recorded(stranger("odd"))), recorded(stranger("odd")).error_type) == (StepError, "ToolError")


def test_an_error_whose_class_is_careless_is_recorded_all_the_same() -> None:
    assert (type(recorded(Forgetful(3))), recorded(Forgetful(3)).code) == (EffectRejected, "effect.rejected")
    assert recorded(Forgetful(3)).message == "3"
    assert recorded(Unreadable()).message == "its text cannot be read: ValueError"
    assert unknown(EffectClass.WRITE, End(error=Unreadable())).reason == (
        "Unreadable: its text cannot be read: ValueError"
    )
    assert recorded(ValueError()).message == "ValueError"


def test_a_message_is_redacted_and_has_a_limit() -> None:
    assert recorded(ValueError("a secret")).message == "a [redacted]"
    assert len(recorded(ValueError("x" * 10_000)).message) == MESSAGE_MAX


def test_a_record_that_names_no_class_of_the_tree_is_a_plain_step_error() -> None:
    text = ErrorRecord("os.system", "os.system", "no", "step.failed").to_text()
    assert type(ErrorRecord.from_text(text).to_error("run")) is StepError


def test_a_missed_deadline_is_told_as_such() -> None:
    assert isinstance(failed(EffectClass.READ, End(deadline=Deadline(1))).error.to_error("run"), StepTimeoutError)
