"""Live text: what the attempts of a driven run have shown so far. Each text is kept once, whoever reads it.

What a handler shows is repaired, redacted and bounded before anybody sees it, so that it is a beginning of what will
be recorded. Once a second it goes into the event log, apart from the commits of the promise. Readers take it from here
by offset (`listening.py`): a slow one keeps nobody waiting, and costs nothing.
"""

from __future__ import annotations

import asyncio
import io
import logging
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from ditto.errors import DefinitionError, StoreClosedError
from ditto.pieces import TextKind
from ditto.store import transitions
from ditto.store.committer import Durable
from ditto.store.records import Event

if TYPE_CHECKING:
    from ditto.store.store import Store
    from ditto.store.values import Stored
    from ditto.worker import Shown

PARTIAL_S: Final = 1.0
"""How long shown text may stay unrecorded while its attempt is under way; it is written no more often than that."""

KINDS: Final[tuple[TextKind, ...]] = ("reasoning", "text")
"""In the order in which a model says them."""

logger = logging.getLogger("ditto.engine")


class Signal:
    """Something has changed. Who knows the count that he has seen misses none."""

    def __init__(self) -> None:
        self.count = 0
        self._event = asyncio.Event()

    def tell(self) -> None:
        """Wake all that wait. Called on the event loop's thread."""
        self.count += 1
        self._event.set()
        self._event.clear()

    async def after(self, count: int) -> None:
        """Return when the count is another one."""
        while self.count == count:
            await self._event.wait()


class LiveRun:
    """The live text of one run while it is driven. Used on the event loop's thread."""

    def __init__(self, store: Store, run: int) -> None:
        self.store = store
        self.speeches: dict[str, Speech] = {}
        """The newest attempt of each running step that has shown anything, by path."""
        self.changed = Signal()
        """There is more text, or more was committed."""
        self.commits = 0
        self.loop = asyncio.get_running_loop()
        self.thread = threading.get_ident()
        self._run = run

    def close(self, path: str) -> None:
        """The step has its outcome, or is given up: its text is read from the record now."""
        if (speech := self.speeches.pop(path, None)) is not None:
            speech.end()

    def note_commit(self) -> None:
        """Something of the run was committed, or may have been: readers look at the record."""
        self.commits += 1
        self.changed.tell()

    def record(self, events: list[Event]) -> Durable:
        """Write shown text into the event log. Raises StoreClosedError."""
        return self.store.commit(lambda tx: transitions.note_partials(tx, self._run, events), apart=True)


class Speech:
    """What one attempt has shown: at most `chars_max` characters; the rest comes with the outcome."""

    __slots__ = ("_chars_left", "_is_over", "_live", "_texts", "_timer", "attempt", "path")

    def __init__(self, live: LiveRun, path: str, attempt: int, chars_max: int) -> None:
        self.path = path
        self.attempt = attempt
        self._live = live
        self._chars_left = chars_max
        self._texts: dict[TextKind, _Text] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._is_over = False

    def show(self, text: str, kind: TextKind) -> None:
        """Show some more. A handler may call it in a thread of its own. Raises DefinitionError for no text."""
        if kind not in KINDS or not isinstance(text, str):
            raise DefinitionError(
                f"step {self.path}: ctx.partial takes a str, and the kind 'text' or 'reasoning', "
                f"not {type(text).__name__} and {kind!r}"
            )
        if threading.get_ident() == self._live.thread:
            self._add(text, kind)
            return
        try:
            # In the same way, and so behind it, comes what the handler returns.
            self._live.loop.call_soon_threadsafe(self._add, text, kind)
        except RuntimeError:  # the loop was closed while an abandoned handler still ran: nobody is left to show it to
            return

    def after(self, kind: TextKind, offset: int) -> str:
        """The text of this kind from that character on, as far as it has come."""
        return self._texts[kind].after(offset) if kind in self._texts else ""

    def end(self, value: Stored | None = None, shown: Shown | None = None) -> None:
        """The attempt is over: nothing more is shown of it. What was shown is recorded, unless its value has it."""
        if self._is_over:
            return
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()
        if self._texts and not self._is_in(None if value is None else read_texts(value, shown)):
            self._record()

    def _is_in(self, texts: Mapping[TextKind, str] | None) -> bool:
        return texts is not None and all(texts[kind].startswith(text.after(0)) for kind, text in self._texts.items())

    def _add(self, piece: str, kind: TextKind) -> None:
        if self._is_over or not self._chars_left:
            return
        text = self._texts.get(kind) or self._texts.setdefault(kind, _Text())
        shown = text.add(piece, self._live.store, self._chars_left)
        if not shown:
            return
        self._chars_left -= shown
        self._live.speeches[self.path] = self
        self._schedule()
        self._live.changed.tell()

    def _schedule(self) -> None:
        if self._timer is None and not self._is_over:
            self._timer = self._live.loop.call_later(PARTIAL_S, self._record)

    def _record(self) -> None:
        """Write what was shown since the last time. If that fails, the next time takes it along."""
        self._timer = None
        events: list[Event] = []
        starts: list[tuple[_Text, int]] = []
        for kind, text in self._texts.items():
            if text.recorded < text.length:
                body = {"attempt": self.attempt, "kind": kind, "offset": text.recorded}
                events.append(Event("step_partial", self.path, {**body, "text": text.after(text.recorded)}))
                starts.append((text, text.recorded))
                text.recorded = text.length
        if not events:
            return

        def written(done: Durable) -> None:
            if (error := done.exception()) is not None:
                logger.warning("step %s: text that was shown is not recorded yet: %s", self.path, error)
                for text, start in starts:
                    text.recorded = min(text.recorded, start)
                self._schedule()

        try:
            self._live.record(events).add_done_callback(written)
        except StoreClosedError as closed:
            logger.warning("step %s: text that was shown is not recorded: %s", self.path, closed)


class _Text:
    """The text of one kind. What might yet become a secret, or a character, is not in it."""

    __slots__ = ("_buffer", "_rest", "length", "recorded")

    def __init__(self) -> None:
        self._buffer = io.StringIO()
        self._rest = ""
        self.length = 0
        self.recorded = 0
        """Characters that are in the event log, or on their way there."""

    def add(self, piece: str, store: Store, chars_max: int) -> int:
        """Add a piece, cut after `chars_max` characters; returns how many more can be shown."""
        text, half = _whole_characters(self._rest + piece)
        certain, rest = store.redact_beginning(text)
        self._rest = rest + half
        shown = certain[:chars_max]
        self._buffer.seek(self.length)
        self._buffer.write(shown)
        self.length += len(shown)
        return len(shown)

    def after(self, offset: int) -> str:
        self._buffer.seek(offset)
        return self._buffer.read()


def read_texts(value: Stored, shown: Shown | None) -> Mapping[TextKind, str] | None:
    """The texts in a recorded value; None if they cannot be read: it may be another client's than its worker's."""
    if shown is None:
        return None
    try:
        found = shown(value.decode())
        texts: dict[TextKind, str] = {kind: found.get(kind) or "" for kind in KINDS}
        return texts if all(isinstance(text, str) for text in texts.values()) else None
    except Exception as error:  # noqa: BLE001 - a user's function raised
        logger.info("no text can be read from a value: %s", type(error).__name__)
        return None


def _whole_characters(text: str) -> tuple[str, str]:
    """The text with surrogate pairs joined and lone halves replaced; and the half at its end, which may find its other
    half yet."""
    if text.isascii():
        return text, ""
    half = text[-1] if "\ud800" <= text[-1] <= "\udbff" else ""
    whole = text.removesuffix(half).encode("utf-16-le", "surrogatepass")
    return whole.decode("utf-16-le", "replace"), half
