"""Certifying: what the receipt of an outcome says. Pure: it decides, and the transition of the outcome writes it.

| an admitted attempt …                                        | outcome     |
|--------------------------------------------------------------|-------------|
| has a value                                                  | `allow`     |
| was refused for good by the other side, or by the sandbox    | `deny`      |
| is known not to have been made; failed; gave no usable value | `failed`    |
| was cut short before anything was sent                       | `cancelled` |
| was lost                                                     | `unknown`   |

A tool's failure that became a value is what it was before. One receipt for each attempt; one that is `unknown` may be
followed by one that settles it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from ditto.effects import EffectClass
from ditto.engine.outcomes import ErrorRecord
from ditto.receipts.body import Draft, Kind, ReceiptOutcome, hash_arguments
from ditto.store.records import StepRow
from ditto.store.schema import StepState
from ditto.store.values import State, Stored, digest

if TYPE_CHECKING:
    from ditto.engine.resolving import Decision
    from ditto.store.records import RunRow

CANCELLED: Final = "effect.cancelled"
"""The code of an attempt that was cut short before anything was sent."""

LOOKUP: Final = "lookup"
ASK_AGAIN: Final = "ask_again"
LATE: Final = "late"
"""What settled an attempt, where it was neither its own end nor a person."""

_DENIED: Final = ("EffectRejected", "SandboxDenied")

_RESOLVED: Final = {
    "committed": ReceiptOutcome.ALLOW,
    "response": ReceiptOutcome.ALLOW,
    "absent": ReceiptOutcome.FAILED,
    "ask_again": ReceiptOutcome.UNKNOWN,
    "abandon": ReceiptOutcome.UNKNOWN,
}
"""Who gives an effect up, or has a model asked again, does not know what became of the first attempt."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What was asked of whom, for all receipts of a step."""

    kind: Kind
    tool: str
    arguments_hash: str | None


def subject_of(type: str, effect: str | None, arguments: State | None) -> Subject:
    """What a step of this node type is about, from what its admission recorded."""
    kind = Kind.MODEL if effect == EffectClass.INFER else Kind.TOOL
    recorded: Any = None if arguments is None else arguments.plain()
    tool = type
    if isinstance(recorded, dict):
        match recorded:
            case {"tool": str(name), "arguments": asked} if type.startswith("INTERACTION."):
                tool, recorded = name, asked
            case {"model": {"provider": str(provider), "name": str(name)}} if type.startswith("INFER."):
                tool = f"{provider}/{name}"
            case {"model": str(name)} if type.startswith("INFER.") and name:
                tool = name
    return Subject(kind, tool, None if arguments is None else hash_arguments(recorded))


def certify_attempt(
    run: RunRow,
    seen: StepRow,
    subject: Subject,
    state: StepState,
    *,
    output: Stored | None = None,
    error: ErrorRecord | None = None,
    by: str | None = None,
) -> Draft | None:
    """The receipt of the attempt `seen`, whose outcome is not recorded yet, when its step moves to `state`.

    `error` is what the attempt came to, even where a value stands for it; `by` is what settled it. None where the move
    tells nothing new of the attempt: what is unknown stays unknown.
    """
    outcome, reason = _judge(state, error, by)
    if outcome is ReceiptOutcome.UNKNOWN and seen.state is StepState.UNKNOWN:
        return None
    told = output.hash if output is not None else None if error is None else digest(error.to_text())
    return Draft(
        run=run.run_id,
        generation=run.generation,
        step=seen.path,
        attempt=seen.attempt,
        key=seen.key,
        kind=subject.kind,
        tool=subject.tool,
        arguments_hash=subject.arguments_hash,
        outcome=outcome,
        outcome_hash=None if outcome is ReceiptOutcome.UNKNOWN else told,
        decision=by,
        reason=reason,
    )


def _judge(state: StepState, error: ErrorRecord | None, by: str | None) -> tuple[ReceiptOutcome, str | None]:
    if state is StepState.UNKNOWN or by == ASK_AGAIN:
        return ReceiptOutcome.UNKNOWN, "outcome.unknown"
    if state is StepState.ADMITTED:
        # The look-up found no trace of the attempt, and another one takes its place.
        return ReceiptOutcome.FAILED, "effect.not_made"
    if error is None:
        return ReceiptOutcome.ALLOW, None
    if error.code == CANCELLED:
        return ReceiptOutcome.CANCELLED, error.code
    return ReceiptOutcome.DENY if error.kind in _DENIED else ReceiptOutcome.FAILED, error.code


def as_late(receipt: Draft | None) -> Draft | None:
    """The receipt of an outcome that came after its run was cancelled."""
    return None if receipt is None else replace(receipt, decision=LATE)


def certify_resolution(run: RunRow, row: StepRow, decision: Decision, redact: Any, output: Stored | None) -> Draft:
    """The receipt of a person's decision on an outcome that nobody else could tell."""
    subject = subject_of(row.type, row.effect, row.arguments)
    return Draft(
        run=run.run_id,
        generation=run.generation,
        step=row.path,
        attempt=row.attempt,
        key=row.key,
        kind=Kind.DECISION,
        tool=subject.tool,
        arguments_hash=subject.arguments_hash,
        outcome=_RESOLVED[decision.choice],
        outcome_hash=None if output is None else output.hash,
        decision=decision.choice,
        reason=redact(decision.reason),
        actor=redact(decision.actor),
    )


def certify_approval(run: RunRow, question: StepRow, made: dict[str, Any], output: Stored) -> Draft:
    """The receipt of a person's decision on an approval; the arguments are what was shown."""
    shown = question.arguments
    return Draft(
        run=run.run_id,
        generation=run.generation,
        step=question.path,
        attempt=question.attempt,
        key=None,
        kind=Kind.DECISION,
        tool=question.key or question.type,
        arguments_hash=None if shown is None else hash_arguments(shown.plain()),
        outcome=ReceiptOutcome.ALLOW if made["decision"] == "approve" else ReceiptOutcome.DENY,
        outcome_hash=output.hash,
        decision=made["decision"],
        reason=made["reason"],
        actor=made["actor"],
    )
