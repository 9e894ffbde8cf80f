"""Resolving: a person's decision on a step whose outcome nobody else can tell. Pure: it decides, others commit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from pydantic import ValidationError

from ditto.complaints import all_complaints
from ditto.contracts import NODE_TYPES, ExternalResult, Message, Sample
from ditto.effects import EffectClass
from ditto.engine.outcomes import Encode, ErrorRecord
from ditto.errors import DefinitionError, InvalidValueError
from ditto.store.records import Event, StepRow
from ditto.store.schema import StepState
from ditto.store.values import Stored, by_reference
from ditto.worker import as_data

Choice: TypeAlias = Literal["committed", "response", "absent", "ask_again", "abandon"]

_TEXT_MAX: Final = 1_000


@dataclass(frozen=True, slots=True)
class Decision:
    """What was decided, by whom, and why."""

    choice: Choice
    value: Any
    actor: str
    reason: str

    @classmethod
    def parse(
        cls, *, actor: str, reason: str, committed: Any, response: Any, absent: bool, ask_again: bool, abandon: bool
    ) -> Decision:
        """The one choice that was made. Raises DefinitionError for none, several, or a missing actor or reason."""
        made: list[tuple[Choice, Any]] = []
        if committed is not ...:
            made.append(("committed", committed))
        if response is not ...:
            made.append(("response", response))
        flags: tuple[tuple[Choice, bool], ...] = (("absent", absent), ("ask_again", ask_again), ("abandon", abandon))
        made += [(choice, None) for choice, wanted in flags if wanted]
        if len(made) != 1:
            raise DefinitionError("resolve takes exactly one of committed, response, absent, ask_again and abandon")
        for name, text in (("actor", actor), ("reason", reason)):
            if not text.strip() or len(text) > _TEXT_MAX:
                raise DefinitionError(f"resolve needs {name}: 1 to {_TEXT_MAX} characters that say who and why")
        return cls(*made[0], actor=actor, reason=reason)


@dataclass(frozen=True, slots=True)
class Resolution:
    """The state that the step gets."""

    state: StepState
    output: Stored | None
    error: str | None
    event: Event


def decide_resolution(decision: Decision, row: StepRow, encode: Encode, redact: Any) -> Resolution:
    """What a decision means for this step. Raises DefinitionError and InvalidValueError for one that does not fit."""
    infer = row.effect == EffectClass.INFER.value
    if infer and decision.choice in ("committed", "absent"):
        raise DefinitionError(f"step {row.path} is a model call: use response, ask_again or abandon")
    if not infer and decision.choice in ("response", "ask_again"):
        raise DefinitionError(f"step {row.path} is no model call: use committed, absent or abandon")
    actor, reason = redact(decision.actor), redact(decision.reason)
    event = Event(
        "step_resolved",
        row.path,
        {"attempt": row.attempt, "decision": decision.choice, "actor": actor, "reason": reason},
    )
    match decision.choice:
        case "committed" | "response":
            value = _fit(row, decision.value)
            stored = encode(value, f"the value for step {row.path}")
            return Resolution(StepState.COMPLETED, by_reference(stored) if infer else stored, None, event)
        case "absent" | "ask_again":
            error = ErrorRecord(
                "EffectNotMade", "Resolved", f"{actor}: {reason}", "effect.not_made", True, step=row.path
            )
            return Resolution(StepState.REFUSED, None, error.to_text(), event)
        case "abandon":
            text = f"abandoned by {actor}: {reason}"
            error = ErrorRecord("StepError", "Abandoned", text, "step.abandoned", final=True, step=row.path)
            return Resolution(StepState.FAILED, None, error.to_text(), event)


def _fit(row: StepRow, value: Any) -> Any:
    """The value in the shape that the step's node type promises."""
    value = as_data(value)
    node_type = NODE_TYPES.get(row.type)
    if node_type is None:
        return value
    shaped = value
    if node_type.output is Sample and isinstance(value, str):
        shaped = {"message": as_data(Message(role="assistant", content=value)), "finish_reason": "stop"}
    if node_type.output is ExternalResult and not (isinstance(value, dict) and {"source", "status"} <= value.keys()):
        recorded = {} if row.arguments is None else row.arguments.plain()
        text = {"content": value} if isinstance(value, str) else {"structured": value}
        shaped = {"source": recorded.get("tool", "resolved"), "status": "success", **text}
    try:
        return node_type.output.model_validate(shaped).model_dump(mode="json")
    except ValidationError as error:
        told = f"the value for step {row.path} is no {node_type.output.__name__}: {all_complaints(error)}"
        raise InvalidValueError(told) from None
