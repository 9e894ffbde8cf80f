"""Effect classes: what a step may do to the world, and what each one demands of the engine.

A class is declared with the step, the node type or the tool, as a word or as a pure function from the validated
arguments to a word. It is recorded with the step and never worked out again.

| class      | may start before its causes are durable | admitted | after a crash in the middle |
|------------|-----------------------------------------|----------|-----------------------------|
| pure       | yes                                     | no       | run again                   |
| read       | yes                                     | no       | run again                   |
| idempotent | no                                      | no       | run again, same key         |
| write      | no                                      | yes      | look-up, else unknown       |
| infer      | no                                      | yes      | unknown                     |
| local      | no                                      | no       | run again: rolled back      |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeAlias

from ditto.errors import DefinitionError


class EffectClass(StrEnum):
    """What a step may do to the world."""

    PURE = "pure"
    READ = "read"
    IDEMPOTENT = "idempotent"
    WRITE = "write"
    INFER = "infer"
    LOCAL = "local"

    @property
    def held(self) -> bool:
        """Its outcome may wait for the run's next barrier: losing it costs running the step again, nothing else."""
        return self in (EffectClass.PURE, EffectClass.READ)

    @property
    def admitted(self) -> bool:
        """An attempt is recorded, durably, just before it is made."""
        return self in (EffectClass.WRITE, EffectClass.INFER)


EffectDeclaration: TypeAlias = EffectClass | str | Callable[[Any], "EffectClass | str"]
"""An effect class, its word, or a pure function from the validated arguments to one of them."""


def parse_effect(declared: EffectClass | str, *, owner: str) -> EffectClass:
    """The effect class for a declared word; `owner` is named in the error if there is no such class."""
    try:
        return EffectClass(declared)
    except ValueError:
        words = ", ".join(EffectClass)
        raise DefinitionError(f"{owner}: effect {declared!r} is unknown; use one of {words}") from None


def check_effect(declared: EffectDeclaration, *, owner: str) -> EffectDeclaration:
    """The declaration, with a word already parsed, so that a wrong one is refused where it is written."""
    return declared if callable(declared) else parse_effect(declared, owner=owner)


def effect_of(declared: EffectDeclaration, arguments: Any, *, owner: str) -> EffectClass:
    """The effect class of one call with these validated arguments."""
    return parse_effect(declared(arguments) if callable(declared) else declared, owner=owner)


@dataclass(frozen=True, slots=True)
class Committed:
    """Look-up: the effect was made, and this was its result."""

    value: Any


@dataclass(frozen=True, slots=True)
class Rejected:
    """Look-up: the other side refused the effect for good."""

    reason: str
    code: str = "effect.rejected"


@dataclass(frozen=True, slots=True)
class Pending:
    """Look-up: the other side has the request and has not settled it. The outcome stays unknown."""


@dataclass(frozen=True, slots=True)
class Absent:
    """Look-up: the other side knows no such key. Sent again only if the tool declares `absence_is_final`."""


@dataclass(frozen=True, slots=True)
class Many:
    """Look-up: more than one record carries the key. The outcome stays unknown; `ids` are named to the person."""

    ids: tuple[str, ...]


LookupResult: TypeAlias = Committed | Rejected | Pending | Absent | Many
"""What a look-up may answer. A look-up that raises leaves the outcome unknown."""
