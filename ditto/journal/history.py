"""Histories: the conversation of a turn that was cut, made whole for the next turn of its thread. Pure.

Nothing is made again, and what is recorded stays as it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator

from ditto import ExternalResult, Message, RunInfo, Sample
from ditto.journal.answers import plan_calls, tool_messages

ANSWER = re.compile(r"m/(\d+)|(\d+)/sample")
"""The paths of a turn's answers: by an agent of one's own, and by run_agent."""


def mend_history(messages: Iterable[Message]) -> list[Message]:
    """A conversation that was cut, as a strict provider accepts it: each call has one result, right behind its answer.

    A call without a result gets one that says that its outcome is unknown; it is not made again, and what is recorded
    of it stays as it is. A result that answers none of the calls before it is left out. A conversation that is whole
    comes back unchanged.
    """
    mended: list[Message] = []
    results: dict[str, Message | None] = {}

    def close() -> None:
        mended.extend(result or _cut_result(call_id) for call_id, result in results.items())
        results.clear()

    for message in messages:
        if message.role == "tool":
            call_id = message.tool_call_id or ""
            if call_id in results and results[call_id] is None:
                results[call_id] = message
            continue
        close()
        mended.append(message)
        results.update((call.id, None) for call in message.tool_calls)
    close()
    return mended


def recorded_messages(run: RunInfo) -> list[Message]:
    """What a turn has recorded, by `JournaledAgent` or `run_agent`: each answer, and a result for each of its calls.

    For the next turn of a thread whose process was killed in this one: put the prompt before them. A call whose outcome
    is not recorded has a result that says so; see `mend_history`. Raises pydantic's ValidationError for a turn whose
    model was asked by a client of its own, in another shape.
    """
    results = dict(_results(run))
    messages: list[Message] = []
    for sample in _answers(run):
        called = {call.name for call in sample.message.tool_calls}
        planned = [call for call in plan_calls(sample, called) if call.refusal is not None or call.call_id in results]
        messages += [sample.message, *tool_messages(planned, results)]
    return mend_history(messages)


def _answers(run: RunInfo) -> list[Sample]:
    found: dict[int, Sample] = {}
    for step in run.steps:
        if (named := ANSWER.fullmatch(step.path)) is not None and step.state == "completed":
            found[int(named[1] or named[2])] = Sample.model_validate(step.output)
    return [found[number] for number in sorted(found)]


def _results(run: RunInfo) -> Iterator[tuple[str, ExternalResult]]:
    for step in run.steps:
        if step.type == "INTERACTION.ACT.TOOL" and step.state == "completed":
            result = ExternalResult.model_validate(step.output)
            if result.call_id is not None:
                yield result.call_id, result


def _cut_result(call_id: str) -> Message:
    told = {"status": "unknown", "message": "this call was cut short: whether it was made is not known"}
    return Message(role="tool", content=json.dumps(told), tool_call_id=call_id)
