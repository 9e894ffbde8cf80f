"""Pieces: what somebody who listens to a run is told. Provisional, until the step they belong to has its outcome."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

TextKind: TypeAlias = Literal["text", "reasoning"]
"""What a text is: the answer itself, or what a thinking model says beside it."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Some text of one attempt at a step. All of one kind, put together, are the text that is recorded, or its
    beginning."""

    run_id: str
    step: str
    attempt: int
    kind: TextKind
    offset: int
    """Characters of the attempt's text of this kind that stand before it, however it was cut into pieces."""
    text: str


@dataclass(frozen=True, slots=True)
class Restarted:
    """Drop what was told of this step: its text begins anew.

    Another attempt has begun, or what is recorded is something else than what was shown.
    """

    run_id: str
    step: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The step's outcome is on disk, and all its text was told. Another attempt, or a person's decision, may follow."""

    run_id: str
    step: str
    attempt: int
    state: str
    """`completed`, `failed`, `refused`, `retrying` or `unknown`."""


Heard: TypeAlias = Piece | Restarted | Ended
"""What `runtime.listen` tells."""
