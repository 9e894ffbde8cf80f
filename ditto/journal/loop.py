"""run_agent: ditto's own small agent, a native Loop over INFER.REASONING.SAMPLE and INTERACTION.ACT.TOOL.

    iteration n:   t1 ┐                    the calls of answer n - 1, side by side
                   t2 ┼─► sample ─► state  answer n, and the conversation so far
                   …  ┘

The state is the conversation, of which only what is added is stored. Resuming reads it; no step is replayed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ditto import DefinitionError, ExternalResult, Graph, Loop, Message, ModelRef, Sample, Tool, Turn
from ditto.contracts import SampleInput
from ditto.journal.agent import offer
from ditto.journal.answers import PlannedCall, plan_calls, tool_messages


class AgentRuntime(Protocol):
    """Whoever runs the Loop: a Runtime."""

    async def loop(self, loop: Loop, state: Any = None, *, id: str | None = None, on_finished: Any = "return") -> Any:
        """See `Runtime.loop`."""
        ...


@dataclass(frozen=True, slots=True)
class AgentResult:
    """What an agent came to: the text of its last answer, why that ended, and the whole conversation."""

    text: str
    finish_reason: str
    messages: tuple[Message, ...]
    run_id: str
    steps: int
    """Answers of the model."""


async def run_agent(
    runtime: AgentRuntime,
    prompt: str | Sequence[Message],
    *,
    model: ModelRef | str,
    tools: Iterable[Tool] = (),
    thread: str,
    turn: str,
    namespace: str = "agent",
    model_key: str | None = None,
    system: str = "",
    max_steps: int = 16,
    **options: Any,
) -> AgentResult:
    """Ask the model, make the calls it asks for, and so on until it answers without any; durable at every point.

    The run's id is the turn's key, so the same namespace, thread and turn go on, and a finished turn returns what was
    saved. `model_key` names what decides, by default the model's name. Another one, another prompt, other tools or
    options are a conflict.
    `options` are the other fields of SampleInput (temperature, stream, …). `tools` must be the runtime's interaction
    worker's.

    Raises LimitExceededError after `max_steps` answers (the state is kept; a higher limit goes on), and what
    `Runtime.loop` raises: a refused model call can be tried again by calling this again.
    """
    ref = ModelRef.parse(model) if isinstance(model, str) else model
    key = Turn(namespace, thread, turn, model_key or ref.key)
    offers = tuple(offer(tool) for tool in tools)
    messages = [Message(role="user", content=prompt)] if isinstance(prompt, str) else list(prompt)
    if system:
        messages.insert(0, Message(role="system", content=system))
    if not messages:
        raise DefinitionError("run_agent needs a prompt: text, or a sequence of Messages")
    request = SampleInput(model=ref, messages=tuple(messages), tools=offers, **options)
    agent = _Agent(request)
    state = {
        "turn": key.identity,
        "request": _identity(request),
        "messages": [each.model_dump(mode="json") for each in messages],
        "answer": None,
    }
    last = await runtime.loop(agent.loop(max_steps), state, id=key.run_id, on_finished="reopen")
    answer = Sample.model_validate(last["answer"])
    return AgentResult(
        text=answer.message.content,
        finish_reason=answer.finish_reason,
        messages=tuple(Message.model_validate(each) for each in last["messages"]),
        run_id=key.run_id,
        steps=sum(each["role"] == "assistant" for each in last["messages"][len(messages) :]),
    )


def _identity(request: SampleInput) -> dict[str, Any]:
    """What an agent's requests have in common: another one is a conflict. Tools stand for themselves by a digest."""
    data = request.model_dump(mode="json", exclude={"messages", "tools"})
    return {**data, "tools": {tool.name: _digest(tool.model_dump(mode="json")) for tool in request.tools}}


def _digest(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


class _Agent:
    """The pure functions of the Loop."""

    def __init__(self, request: SampleInput) -> None:
        self._request = request
        self._names = frozenset(each.name for each in request.tools)

    def loop(self, max_steps: int) -> Loop:
        return Loop(
            "agent",
            graph=self._graph,
            update=self._update,
            done=self._done,
            max_iterations=max_steps,
            append=("messages",),
            carries=True,
        )

    def _planned(self, state: dict[str, Any]) -> list[PlannedCall]:
        return [] if state["answer"] is None else plan_calls(Sample.model_validate(state["answer"]), self._names)

    def _graph(self, state: dict[str, Any]) -> Graph:
        graph = Graph("agent")
        nodes = []
        for position, call in enumerate(self._planned(state), start=1):
            if call.refusal is None:
                data = {"tool": call.name, "arguments": call.arguments, "call_id": call.call_id}
                graph = graph.node(f"t{position}", "INTERACTION.ACT.TOOL", bind=lambda data=data: data)
                nodes.append(f"t{position}")
        return graph.node("sample", "INFER.REASONING.SAMPLE", after=nodes, bind=self._bind)

    def _bind(self, input: dict[str, Any], **results: dict[str, Any]) -> SampleInput:
        messages = [Message.model_validate(each) for each in input["messages"]] + self._told(input, results)
        return self._request.model_copy(update={"messages": tuple(messages)})

    def _update(self, state: dict[str, Any], outputs: dict[str, Any]) -> dict[str, Any]:
        answer = outputs["sample"]
        told = [each.model_dump(mode="json") for each in self._told(state, outputs)]
        return {"turn": state["turn"], "messages": state["messages"].add(*told, answer["message"]), "answer": answer}

    def _told(self, state: dict[str, Any], outputs: dict[str, Any]) -> list[Message]:
        """What the model is told of the calls of its last answer."""
        planned = self._planned(state)
        results = {
            call.call_id: ExternalResult.model_validate(outputs[f"t{position}"])
            for position, call in enumerate(planned, start=1)
            if call.refusal is None
        }
        return tool_messages(planned, results)

    def _done(self, state: dict[str, Any]) -> bool:
        return state["answer"] is not None and not state["answer"]["message"]["tool_calls"]
