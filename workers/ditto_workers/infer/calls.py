"""The tool calls of a streamed answer: which part belongs to which call. Pure.

A part carries an index, and the first part of a call its id and its name; the arguments come in pieces. Servers leave
each of these out, or repeat it, so the rules are, in this order:

- A part that says nothing is none. A call that is repeated whole, id, name and arguments, is said once.
- A part belongs to the call of its index; without an index, to the call before it.
- It starts another call there if it brings a name, and with it an id or a name that is another one. (With an index,
  only both together, or one of them after whole arguments: some servers make up a new id for every part, some give
  every call the index 0.) Without an index, another id alone is enough.
- It starts another call, too, if it brings the name again and more arguments, where the arguments are whole already
  and no id says that it is the same call.
- An id or a name that is missing or empty changes nothing, nor does one that is repeated.

Ids are left as they come, missing ones empty: the journal makes them unique.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from ditto_workers.infer.arguments import raw_arguments
from ditto_workers.infer.completion import ImproperAnswer
from ditto_workers.infer.texts import join_pairs


@dataclass(frozen=True, slots=True)
class _Part:
    index: int | None
    id: str
    name: str
    arguments: str


@dataclass(slots=True)
class _Call:
    index: int
    id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list)

    def add(self, part: _Part) -> None:
        self.id = self.id or part.id
        if part.name and part.name != self.name and not any(self.arguments):
            self.name += part.name  # A name in pieces.
        self.arguments.append(part.arguments)

    def is_whole(self) -> bool:
        """Whether the arguments are a JSON object, so that nothing can be missing from them."""
        last = next((piece.rstrip() for piece in reversed(self.arguments) if piece.strip()), "")
        if not last.endswith("}"):
            return False
        try:
            return isinstance(json.loads("".join(self.arguments)), dict)
        except (ValueError, RecursionError):
            return False


class Calls:
    """The calls of one answer, growing."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._by_index: dict[int, _Call] = {}

    def __bool__(self) -> bool:
        return bool(self._calls)

    def add(self, received: Any) -> bool:
        """Adds one part of a call; False if it said nothing. Raises ImproperAnswer."""
        part = _part(received)
        if not (part.id or part.name or part.arguments):
            return False
        call = self._call_of(part)
        if call is None or _starts_another(call, part):
            call = self._start(part)
        elif _repeats(call, part):
            return True
        call.add(part)
        return True

    def as_list(self) -> list[dict[str, Any]]:
        """The calls in the order of their indexes, as a document that is not streamed has them."""
        return [
            {"id": call.id, "function": {"name": call.name, "arguments": join_pairs("".join(call.arguments))}}
            for call in sorted(self._calls, key=lambda call: call.index)
        ]

    def _call_of(self, part: _Part) -> _Call | None:
        if part.index is not None:
            return self._by_index.get(part.index)
        return self._calls[-1] if self._calls else None

    def _start(self, part: _Part) -> _Call:
        index = part.index if part.index is not None else max(self._by_index, default=-1) + 1
        call = self._by_index[index] = _Call(index)
        self._calls.append(call)
        return call


def _starts_another(call: _Call, part: _Part) -> bool:
    has_other_id = bool(part.id and call.id and part.id != call.id)
    has_other_name = bool(part.name and call.name and part.name != call.name)
    if part.index is None:
        return has_other_id or has_other_name or _comes_after(call, part)
    if not part.name or (part.id and part.id == call.id):
        return False
    if has_other_id or has_other_name:
        return (has_other_id and has_other_name) or call.is_whole()
    return _comes_after(call, part)


def _comes_after(call: _Call, part: _Part) -> bool:
    """Whether these are the arguments of a further call of the same function."""
    return bool(part.name and part.arguments.strip()) and not _repeats(call, part) and call.is_whole()


def _repeats(call: _Call, part: _Part) -> bool:
    return (
        bool(part.id and part.arguments)
        and (part.id, part.name) == (call.id, call.name)
        and part.arguments == "".join(call.arguments)
        and call.is_whole()
    )


def _part(received: Any) -> _Part:
    function = (received.get("function") or {}) if isinstance(received, dict) else None
    if not isinstance(function, dict):
        raise ImproperAnswer("one of its tool calls names no function")
    index = received.get("index")
    return _Part(
        index=index if isinstance(index, int) and not isinstance(index, bool) else None,
        id=_word(received.get("id")),
        name=_word(function.get("name")),
        arguments=raw_arguments(function.get("arguments")),
    )


def _word(value: Any) -> str:
    return value if isinstance(value, str) else ""
