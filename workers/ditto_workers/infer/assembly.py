"""Deltas, put together: the chunks of a streamed answer become the document of the same answer, not streamed. Pure.

So whatever holds for a document, finish reasons, usage, ids, holds for a stream, in one place: `completion.py`. How
the parts of tool calls find each other is `calls.py`. Start at `Assembly.add`.
The format: https://platform.openai.com/docs/api-reference/chat-streaming.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ditto_workers.infer.calls import Calls
from ditto_workers.infer.completion import KEPT, ImproperAnswer, as_text, reasoning_in
from ditto_workers.infer.texts import GrowingText


@dataclass(frozen=True, slots=True)
class Delta:
    """What one chunk added: text that may be shown, and whether it was part of a tool call."""

    text: str = ""
    reasoning: str = ""
    has_calls: bool = False


class Assembly:
    """One answer, growing."""

    def __init__(self) -> None:
        self._head: dict[str, Any] = {}
        self._content = GrowingText()
        self._reasoning = GrowingText()
        self._refusal = GrowingText()
        self._calls = Calls()
        self._legacy_calls = Calls()
        self._finish_reason: Any = None
        self.is_finished = False
        """A finish reason came, and nothing was added after it."""

    def add(self, chunk: dict[str, Any]) -> Delta:
        """Adds one chunk. Raises ImproperAnswer, which says what is wrong with it."""
        self._add_head(chunk)
        choice = _choice(chunk)
        if choice is None:
            return Delta()
        try:
            return self._add_delta(choice)
        finally:  # An end is one, whatever is wrong with what comes with it.
            self._finish(choice.get("finish_reason"))

    def document(self) -> dict[str, Any]:
        """The document, as far as it has come."""
        message = {
            "content": self._content.whole(),
            "reasoning_content": self._reasoning.whole(),
            "refusal": self._refusal.whole(),
            "tool_calls": self._calls.as_list(),
            "function_call": next((call["function"] for call in self._legacy_calls.as_list()), None),
        }
        return {**self._head, "choices": [{"message": message, "finish_reason": self._finish_reason}]}

    def _add_delta(self, choice: dict[str, Any]) -> Delta:
        delta = choice.get("delta") or self._whole(choice) or {}
        if not isinstance(delta, dict):
            raise ImproperAnswer("one of its deltas is no object")
        added = Delta(
            text=self._content.add(as_text(delta.get("content"), "content")),
            reasoning=self._reasoning.add(reasoning_in(delta) or ""),
            has_calls=self._add_calls(delta),
        )
        refused = self._refusal.add(as_text(delta.get("refusal"), "refusal"))
        if added != Delta() or refused:
            self.is_finished = False
        return added

    def _add_head(self, chunk: dict[str, Any]) -> None:
        for name in ("id", "model", *KEPT):
            if chunk.get(name):
                self._head.setdefault(name, chunk[name])
        if chunk.get("usage"):
            self._head["usage"] = chunk["usage"]

    def _whole(self, choice: dict[str, Any]) -> Any:
        """The message of a server that streams its whole answer as one chunk; not the repetition of what came."""
        return choice.get("message") if self._is_empty() else None

    def _is_empty(self) -> bool:
        return not (self._content or self._reasoning or self._refusal or self._calls or self._legacy_calls)

    def _add_calls(self, delta: dict[str, Any]) -> bool:
        parts = delta.get("tool_calls") or []
        if not isinstance(parts, list):
            raise ImproperAnswer("its tool_calls are no list")
        said = [self._calls.add(part) for part in parts]
        legacy = delta.get("function_call")
        if legacy:
            said.append(self._legacy_calls.add({"index": 0, "function": legacy}))
        return any(said)

    def _finish(self, word: Any) -> None:
        if word is None or word == "":
            # Servers write one or the other until they know; only at the end does it mean that there is none.
            self._finish_reason = word if self._finish_reason is None else self._finish_reason
            return
        if self._finish_reason not in (None, "", word):
            raise ImproperAnswer(f"it finishes twice, with {_short(self._finish_reason)} and with {_short(word)}")
        self._finish_reason = word
        self.is_finished = True


def _choice(chunk: dict[str, Any]) -> dict[str, Any] | None:
    """The part of a chunk that belongs to the first choice, the only one that was asked for."""
    choices = chunk.get("choices") or []
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise ImproperAnswer("its choices are no list of objects")
    return next((choice for choice in choices if choice.get("index") in (0, None)), None)


def _short(word: Any) -> str:
    return repr(str(word)[:64])
