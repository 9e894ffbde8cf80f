"""A streamed answer while it comes: from bytes to events, from events to what is shown and to what it was.

Owns the framing, and what the end of a stream is. How deltas become a document is `assembly.py`; what the ending means
is `decide.py`. Start at `Stream.hear`.

httpx-sse reads the lines and the fields of the events
(https://html.spec.whatwg.org/multipage/server-sent-events.html). Around it, three things that it leaves open: the
bytes are UTF-8 with or without a byte-order mark, whatever charset is announced; an event without data is none (once
an `id` came, httpx-sse makes one of every blank line); and the last event counts without the blank line after it if it
is whole, since some servers leave that line out.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any, Final, Literal, Protocol

import httpx
from httpx_sse import EventSource, ServerSentEvent

from ditto_workers.infer.assembly import Assembly
from ditto_workers.infer.completion import ImproperAnswer, error_in

_END_MARK: Final = "[DONE]"
_TYPE: Final = {"content-type": "text/event-stream"}


class Show(Protocol):
    """Shows a piece of an answer that is still coming; `StepContext.partial` is one."""

    def __call__(self, text: str, *, kind: Literal["text", "reasoning"]) -> None: ...


class Stream:
    """What one streamed answer has said so far. `show` gets text and reasoning as they come.

    From the first tool call on nothing is shown: it might belong to what may only be seen once it is durable.
    """

    def __init__(self, show: Show) -> None:
        self._show = show
        self._answer = Assembly()
        self._is_shown = True
        self._has_closed = False
        self._has_end_mark = False
        self.has_begun = False
        """An event with data has come."""
        self.error: Any = None
        """The failure that the provider reports in the stream."""
        self.problem: str | None = None
        """The first thing in it that is not proper."""

    @property
    def ended(self) -> bool:
        """It has said that nothing more will come."""
        return self._has_end_mark or self.error is not None

    @property
    def has_end(self) -> bool:
        """It ended properly: by its end mark, or by a finish reason after which nothing was added."""
        return self._has_end_mark or self._answer.is_finished

    def document(self) -> dict[str, Any]:
        """The answer as the document that it would be if it had not been streamed."""
        return self._answer.document()

    async def hear(self, pieces: AsyncIterator[bytes]) -> None:
        """Takes the bytes of the body, cut anywhere, until there are no more."""
        response = httpx.Response(200, headers=_TYPE, content=self._with_last_line(pieces))
        response.encoding = "utf-8-sig"
        async for event in EventSource(response).aiter_sse():
            self._take(event)

    async def _with_last_line(self, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for piece in pieces:
            yield piece
        self._has_closed = True
        yield b"\n\n"

    def _take(self, event: ServerSentEvent) -> None:
        data = event.data.strip()
        if not data or self.ended:
            return
        self.has_begun = True
        if data == _END_MARK:
            self._has_end_mark = True
            return
        chunk = _object(data)
        if chunk is None and self._has_closed:
            return  # The beginning of an event, cut; the specification drops it too.
        if event.event == "error":
            self.error = (error_in(chunk) or chunk) if chunk is not None else data
        elif chunk is None:
            self._note("one of its events is no JSON object")
        else:
            self.error = error_in(chunk)
            if self.error is None:
                self._add(chunk)

    def _add(self, chunk: dict[str, Any]) -> None:
        try:
            delta = self._answer.add(chunk)
        except ImproperAnswer as improper:
            self._note(str(improper))
            return
        except RecursionError:
            self._note("it is nested too deep")
            return
        if delta.has_calls:
            self._is_shown = False
        if self._is_shown and delta.reasoning:
            self._show(delta.reasoning, kind="reasoning")
        if self._is_shown and delta.text:
            self._show(delta.text, kind="text")

    def _note(self, problem: str) -> None:
        self._is_shown = False
        if self.problem is None:
            self.problem = problem


def _object(data: str) -> dict[str, Any] | None:
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None
