"""The Graphs that run under a job. Each bind is a pure function of the run's input and of recorded outcomes.

Their names and their nodes' names are part of the record and of the crash points: do not rename them. A tool's
failure is a value here; the bind that cannot go on with it raises a ToolError, whose code the run then fails with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from ditto import ExternalResult, Graph, Message, ToolError
from ditto.recovery.answers import read_payload, read_session_answer
from ditto.recovery.checkpoint import (
    LOOKUP_UNCONFIRMED,
    OPERATION_NOT_SENT,
    OPERATION_PENDING,
    OPERATION_UNCERTAIN,
    is_fault,
)
from ditto.recovery.job import Operation

TOOL: Final = "INTERACTION.ACT.TOOL"
LOAD: Final = "CONTEXT.LOAD"
UPDATE: Final = "CONTEXT.UPDATE"
SAMPLE: Final = "INFER.REASONING.SAMPLE"


def call(name: str, **arguments: Any) -> dict[str, Any]:
    """The input of an ACT.TOOL node."""
    return {"tool": name, "arguments": arguments}


def result_of(output: Mapping[str, Any]) -> ExternalResult:
    """The output of an ACT.TOOL node."""
    return ExternalResult.model_validate(output)


# --- one tool, run anew by every entry that needs it ----------------------------------------------------------------

READ: Final = Graph("read").node("job", TOOL, bind=lambda input: call("recovery_read", id=input["id"]))

SOURCE: Final = Graph("source").node(
    "source", TOOL, bind=lambda input: call("recovery_source", id=input["id"], maxBytes=input["maxBytes"])
)

STATE: Final = Graph("state").node("changed", TOOL, bind=lambda input: call("recovery_state", **input))

REPORT: Final = Graph("report").node("reported", TOOL, bind=lambda input: call("recovery_report", id=input["id"]))


def catalog_graph(timeout_s: float | None) -> Graph:
    """One read of one source of the catalog, with a deadline or without."""
    return Graph("catalog").node(
        "catalog",
        TOOL,
        bind=lambda input: call("recovery_catalog", id=input["id"], source=input["source"]),
        timeout_s=timeout_s,
    )


# --- preparation: what the model reads out of the source, once ------------------------------------------------------


def _messages(context: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The messages of a Context, as the model is shown them."""
    return [{name: item[name] for name in Message.model_fields if name in item} for item in context["items"]]


def _add_answer(context: Mapping[str, Any], sampled: Mapping[str, Any]) -> dict[str, Any]:
    return {"context": context, "add": [{"role": "assistant", "content": sampled["message"]["content"]}]}


def _bind_loaded(input: dict[str, Any]) -> dict[str, Any]:
    system = {"role": "system", "content": input["prompt"], "protected": True}
    user = {"role": "user", "content": input["text"], "source": input["sourceHash"], "protected": True}
    return {"items": [system, user]}


def _bind_prepared_sample(input: dict[str, Any], loaded: dict[str, Any]) -> dict[str, Any]:
    return {"model": input["model"], "messages": _messages(loaded), "response_schema": input["payload"]}


def _bind_prepared_answer(input: dict[str, Any], loaded: dict[str, Any], sampled: dict[str, Any]) -> dict[str, Any]:
    read_payload(sampled, input["payload"])
    return _add_answer(loaded, sampled)


def _bind_prepared(input: dict[str, Any], sampled: dict[str, Any], answered: dict[str, Any]) -> dict[str, Any]:
    order = read_payload(sampled, input["payload"])
    return call("recovery_prepare", id=input["id"], order=order, context=answered, sourceHash=input["sourceHash"])


PREPARE: Final = (
    Graph("prepare")
    .node("loaded", LOAD, bind=_bind_loaded)
    .node("sampled", SAMPLE, after=("loaded",), bind=_bind_prepared_sample)
    .node("answered", UPDATE, after=("loaded", "sampled"), bind=_bind_prepared_answer)
    .node("saved", TOOL, after=("sampled", "answered"), bind=_bind_prepared)
)


# --- an operation: look up, submit what is absent, save what is confirmed -------------------------------------------


def is_absent(result: ExternalResult) -> bool:
    """Whether a look-up confirms that the other side has no such operation."""
    return result.status == "success" and Operation.model_validate(result.structured).state == "absent"


def _bind_look_up(input: dict[str, Any]) -> dict[str, Any]:
    return call("recovery_operation", id=input["id"], kind=input["kind"], apply=False)


def _bind_submission(input: dict[str, Any]) -> dict[str, Any]:
    return call("recovery_operation", id=input["id"], kind=input["kind"], apply=True)


def _bind_checkpoint(input: dict[str, Any], found: dict[str, Any], submitted: dict[str, Any] | None) -> dict[str, Any]:
    operation = _look_up_answer(result_of(found)) if submitted is None else _submission_answer(result_of(submitted))
    if operation.state not in ("committed", "rejected"):
        raise ToolError(
            f"{operation.key} is {operation.state} over there; enter the job again to look it up",
            code=OPERATION_PENDING,
        )
    return call("recovery_checkpoint", id=input["id"], kind=input["kind"], operation=operation.to_json())


def _look_up_answer(result: ExternalResult) -> Operation:
    """The operation that was looked up. Whatever keeps a look-up from answering, nothing was sent."""
    if result.status == "success":
        return Operation.model_validate(result.structured)
    raise _refusal(result, code=LOOKUP_UNCONFIRMED)


def _submission_answer(result: ExternalResult) -> Operation:
    """The operation that was submitted. Only `failed` says that this submission did nothing."""
    if result.status == "success":
        return Operation.model_validate(result.structured)
    if result.status != "failed":
        raise _refusal(result, code=OPERATION_UNCERTAIN)
    if result.error is not None and result.error.retryable:
        raise _refusal(result, code=OPERATION_NOT_SENT)
    raise _refusal(result)


def _refusal(result: ExternalResult, code: str | None = None) -> ToolError:
    """The error of a call as the run's: under `code`, unless it is a fault of the program or its setup."""
    error = result.error
    if error is None:
        return ToolError(f"{result.source} ended as {result.status}", code=code or "OPERATION_FAILED")
    if code is None or is_fault(error):
        return ToolError(error.message, code=error.code)
    return ToolError(f"{error.code}: {error.message}", code=code)


OPERATION: Final = (
    Graph("operation")
    .node("found", TOOL, bind=_bind_look_up)
    .node("submitted", TOOL, after=("found",), when=lambda found: is_absent(result_of(found)), bind=_bind_submission)
    .node("saved", TOOL, after=("found", "submitted"), bind=_bind_checkpoint)
)

LOOKUP: Final = Graph("lookup").node("found", TOOL, bind=_bind_look_up)


# --- a session: a question about the checkpoint, in the context that was saved --------------------------------------


def _bind_asked(input: dict[str, Any], restored: dict[str, Any]) -> dict[str, Any]:
    checkpoint = json.dumps({"order": input["order"], "stage": input["stage"]}, ensure_ascii=False)
    asked = (
        f"{input['question']}\n\n"
        f"The checkpoint now: {checkpoint}\n\n"
        f"Answer with one JSON object and nothing else, with exactly these fields, as the checkpoint has them: "
        f"{', '.join(input['expected'])}."
    )
    return {"context": restored, "add": [{"role": "user", "content": asked}]}


def _bind_session_sample(input: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
    return {"model": input["model"], "messages": _messages(asked), "response_schema": input["schema"]}


def _bind_session_answer(input: dict[str, Any], asked: dict[str, Any], sampled: dict[str, Any]) -> dict[str, Any]:
    read_session_answer(sampled, input["expected"])
    return _add_answer(asked, sampled)


def _bind_remembered(input: dict[str, Any], sampled: dict[str, Any], answered: dict[str, Any]) -> dict[str, Any]:
    answer = read_session_answer(sampled, input["expected"])
    return call("recovery_context", id=input["id"], context=answered, answer=answer)


SESSION: Final = (
    Graph("session")
    .node("restored", LOAD, bind=lambda input: {"context": input["context"]})
    .node("asked", UPDATE, after=("restored",), bind=_bind_asked)
    .node("sampled", SAMPLE, after=("asked",), bind=_bind_session_sample)
    .node("answered", UPDATE, after=("asked", "sampled"), bind=_bind_session_answer)
    .node("saved", TOOL, after=("sampled", "answered"), bind=_bind_remembered)
)
