"""Listening: what one reader of a run is told, from its event log and, where it is driven here, from its live text.

The log is the backbone: it is read from its beginning, so that a reader may come at any time, and what ends a step is
told from the record only. Between two reads of it, the live text of running steps is told. A reader has no queue: it
knows how many characters it has of each step, and takes what is behind them when it comes for more.
"""

from __future__ import annotations

import zlib
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import anyio

from ditto.engine.executor import Engine
from ditto.engine.live import KINDS, LiveRun, read_texts
from ditto.errors import DefinitionError, StoreClosedError
from ditto.pieces import Ended, Heard, Piece, Restarted, TextKind
from ditto.store import queries
from ditto.store.records import RunRow, ToldEvent
from ditto.store.schema import StepState
from ditto.store.store import Store
from ditto.worker import Shown

LOOK_S: Final = 0.2
"""How often the log of a run that somebody else drives is read."""

PAGE: Final = 64
"""Events read at once, the values of finished steps with them."""

_TAKEN_UP: Final = frozenset({"run_resumed", "run_reopened"})
_ENDINGS: Final = frozenset({"step_completed", "step_failed", "step_refused", "step_unknown", "step_resolved"})
_ENDED: Final = frozenset(
    {StepState.COMPLETED, StepState.FAILED, StepState.REFUSED, StepState.RETRYING, StepState.UNKNOWN}
)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a reader goes on: the step that it wants (None: all), and what it has of that already."""

    step: str | None
    after: Mapping[TextKind, int]
    attempt: int | None
    """The attempt that `after` counts in; None takes it for the newest."""

    @classmethod
    def parse(cls, step: str | None, after: int | Mapping[TextKind, int], attempt: int | None) -> Place:
        """Raises DefinitionError for an offset below zero, and for one without a step."""
        counts: Mapping[TextKind, int] = {"text": after} if isinstance(after, int) else dict(after)
        for kind, count in counts.items():
            if kind not in KINDS or count < 0:
                raise DefinitionError(f"listen: after is characters, 0 or more, of text or reasoning, not {after!r}")
        if step is None and (any(counts.values()) or attempt is not None):
            raise DefinitionError("listen: after and attempt belong to one step; name it by step=…")
        return cls(step, {kind: count for kind, count in counts.items() if count}, attempt)


@dataclass(slots=True)
class _Has:
    """What a reader has of one step."""

    attempt: int
    """0: the newest one; it brought its offsets along without saying of which."""
    owes_restart: bool = False
    """The next piece is the first of a later attempt."""
    chars: dict[TextKind, int] = field(default_factory=dict)
    checks: dict[TextKind, int] = field(default_factory=dict)
    """A checksum of what was told; none of a text of which it brought some along."""
    was_heard: bool = False
    """There was text of this attempt."""
    is_stale: bool = False
    """The run was taken up since: what was not admitted counts its attempts anew, so the next text is another's."""
    ended: tuple[int, StepState] | None = None

    def begin(self, attempt: int) -> bool:
        """The step is at this attempt; True if what the reader has must be dropped."""
        if self.attempt == 0:
            self.attempt = attempt
        if attempt <= self.attempt and not self.is_stale:
            return False
        return self.drop(attempt)

    def drop(self, attempt: int) -> bool:
        """The reader has nothing of the step from here on; True if it had something."""
        had = any(self.chars.values())
        self.attempt, self.owes_restart = attempt, attempt > 1 and not had
        self.chars, self.checks = {}, {}
        self.was_heard, self.is_stale, self.ended = False, False, None
        return had

    def take(self, kind: TextKind, text: str) -> None:
        """The reader is told some more."""
        known = self.chars.get(kind, 0)
        self.chars[kind] = known + len(text)
        if not known or kind in self.checks:
            self.checks[kind] = zlib.crc32(text.encode(), self.checks.get(kind, 0))

    def is_beginning_of(self, texts: Mapping[TextKind, str]) -> bool:
        """Whether what the reader has may be the beginning of these texts."""
        for kind, known in self.chars.items():
            text = texts[kind]
            if known > len(text):
                return False
            if kind in self.checks and self.checks[kind] != zlib.crc32(text[:known].encode()):
                return False
        return True


class Reader:
    """One reader: turns events and live text into what it was not told yet. No I/O."""

    def __init__(self, run_id: str, place: Place, shown: Mapping[str, Shown]) -> None:
        self._run_id = run_id
        self._step = place.step
        self._shown = shown
        self._steps: dict[str, _Has] = {}
        self._withheld: dict[str, list[ToldEvent]] = {}
        """Partials of completed steps, by path: not told if the value has the whole text."""
        if place.step is not None and (place.after or place.attempt):
            self._steps[place.step] = _Has(place.attempt or 0, chars=dict(place.after))

    def hear_event(self, event: ToldEvent) -> list[Heard]:
        """What an event tells, given how its step stands by now."""
        if event.kind in _TAKEN_UP:
            for each in self._steps.values():
                each.is_stale = each.was_heard and each.ended is None
        path = event.step
        if path is None or self._is_elsewhere(path):
            return []
        has = self._steps.get(path)
        if has is not None and has.attempt == 0 and event.attempt:
            has.attempt = event.attempt
        if event.kind == "step_partial":
            if event.state is StepState.COMPLETED and event.type in self._shown:
                self._withheld.setdefault(path, []).append(event)
                return []
            return self._hear_partial(path, event)
        if event.kind == "step_admitted" and has is not None and has.begin(event.body["attempt"]):
            return [Restarted(self._run_id, path, has.attempt)]
        return self._end(path, event) if event.kind in _ENDINGS else []

    def hear_live(self, live: LiveRun) -> list[Heard]:
        """What running steps have shown meanwhile."""
        told: list[Heard] = []
        for path, speech in live.speeches.items():
            if self._is_elsewhere(path) or self._has_ended(path, speech.attempt):
                continue
            for kind in KINDS:
                known = self._known(path, speech.attempt, kind)
                told += self._hear(path, speech.attempt, kind, known, speech.after(kind, known))
        return told

    def _is_elsewhere(self, path: str) -> bool:
        return self._step is not None and path != self._step

    def _has_ended(self, path: str, attempt: int) -> bool:
        has = self._steps.get(path)
        return has is not None and has.ended is not None and attempt <= has.ended[0]

    def _known(self, path: str, attempt: int, kind: TextKind) -> int:
        has = self._steps.get(path)
        if has is None or has.attempt not in (0, attempt) or has.is_stale:
            return 0
        return has.chars.get(kind, 0)

    def _hear_partial(self, path: str, event: ToldEvent) -> list[Heard]:
        body = event.body
        return self._hear(path, body["attempt"], body["kind"], body["offset"], body["text"])

    def _hear(self, path: str, attempt: int, kind: TextKind, offset: int, text: str) -> list[Heard]:
        """Some text of an attempt: what is new of it. Behind a gap nothing is told; the outcome closes it."""
        told: list[Heard] = []
        if not text:
            return told
        has = self._steps.setdefault(path, _Has(attempt, owes_restart=attempt > 1))
        if has.begin(attempt):
            told.append(Restarted(self._run_id, path, attempt))
        if attempt != has.attempt:
            return told
        has.was_heard = True
        known = has.chars.get(kind, 0)
        if new := text[known - offset :] if offset <= known else "":
            if has.owes_restart:
                has.owes_restart = False
                told.append(Restarted(self._run_id, path, attempt))
            has.take(kind, new)
            told.append(Piece(self._run_id, path, attempt, kind, known, new))
        return told

    def _end(self, path: str, event: ToldEvent) -> list[Heard]:
        """The step has an outcome, unless it has moved on since: then another event tells of that."""
        told: list[Heard] = []
        state, attempt = event.state, max(event.attempt or 1, 1)
        shows = event.type in self._shown
        if state is None or state not in _ENDED or not (shows or path in self._steps):
            return told
        has = self._steps.setdefault(path, _Has(attempt, owes_restart=attempt > 1))
        if attempt == has.attempt:
            has.is_stale = False  # it is the lost attempt whose outcome was found, and no other
        if has.ended == (attempt, state) or (attempt < has.attempt and not has.is_stale):
            return told
        if has.begin(attempt):
            told.append(Restarted(self._run_id, path, attempt))
        withheld = self._withheld.pop(path, [])
        texts = (
            None if event.output is None or event.type is None else read_texts(event.output, self._shown[event.type])
        )
        if texts is None:
            for partial in withheld:
                told += self._hear_partial(path, partial)
        else:
            if not has.is_beginning_of(texts) and has.drop(attempt):
                told.append(Restarted(self._run_id, path, attempt))
            for kind in KINDS:
                told += self._hear(path, attempt, kind, 0, texts[kind])
        has.ended = attempt, state
        return [*told, Ended(self._run_id, path, attempt, state.value)]


async def listen(
    store: Store, engine: Engine, run: RunRow, place: Place, is_driven: Callable[[RunRow], bool]
) -> AsyncGenerator[Heard, None]:
    """All that is told of a run, until it is let go of, or the store is closed."""
    reader = Reader(run.run_id, place, engine.router.shown)
    number = 0
    read: tuple[LiveRun | None, int] = (None, 0)
    while True:
        drive, begun = engine.drives.get(run.id), engine.changed.count
        live = None if drive is None else drive.live
        changed = 0 if live is None else live.changed.count
        if live is None or read != (live, live.commits):
            # Anything committed from here on is a reason to read again.
            read = (live, 0 if live is None else live.commits)
            page_is_full = True
            while page_is_full:
                try:
                    run, page = await store.read(queries.list_told, run.id, number, PAGE, engine.router.shown)
                except StoreClosedError:
                    return
                page_is_full = len(page) == PAGE
                for event in page:
                    number = event.number
                    for told in reader.hear_event(event):
                        yield told
        if live is not None:
            for told in reader.hear_live(live):
                yield told
            await live.changed.after(changed)
        elif is_driven(run):
            with anyio.move_on_after(LOOK_S):
                await engine.changed.after(begun)
        else:
            return
