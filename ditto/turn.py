"""Turn: one request of a user to an agent, with all the model calls and tool calls that it takes to answer it.

A turn is a run. Its key comes from namespace, thread and turn, so a process that starts again addresses the same one;
its steps are `m/<ordinal>`, one for each model call (the journal), and `t/<call id>`, one for each tool call (the
operations). What drives it is the application's own code, or a framework's: it asks, and what is recorded is answered
from the record. See `ditto.journal` for the ways in.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

from ditto.contracts import ExternalResult, Sample, SampleInput
from ditto.errors import DefinitionError
from ditto.worker import Action, StepContext

T = TypeVar("T")

PART_BYTES_MAX = 1024
MODEL_CALLS_MAX = 64

Ask: TypeAlias = Callable[[StepContext], Awaitable[Any]]
"""Asks the provider once, and returns its whole answer as JSON data. Raises EffectNotMade if it was refused or never
sent, OutputError if the answer is no proper one; anything else leaves the call unknown."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Which turn, and within which limits. Raises DefinitionError.

    `namespace`, `thread`, `turn` and `model_key` have 1 to 1024 bytes, no control characters, no space at their ends.
    The first three are the turn's key. `model_key` names what decides (a model, its prompt's version): it is stored
    with the turn, and another one is a conflict. `max_model_calls` are asked at most; one more is refused.
    `max_concurrency` tools run at once.
    """

    namespace: str
    thread: str
    turn: str
    model_key: str
    max_model_calls: int = MODEL_CALLS_MAX
    max_concurrency: int = 1

    def __post_init__(self) -> None:
        for name in ("namespace", "thread", "turn", "model_key"):
            part: Any = getattr(self, name)
            if not isinstance(part, str) or not part.isprintable() or part != part.strip():
                raise DefinitionError(
                    f"turn: {name} must be text without control characters, and no space at its ends, not {part!r}"
                )
            if not 1 <= len(part.encode("utf-8", "replace")) <= PART_BYTES_MAX:
                raise DefinitionError(f"turn: {name} must have 1 to {PART_BYTES_MAX} bytes")
        for name in ("max_model_calls", "max_concurrency"):
            limit: Any = getattr(self, name)
            if type(limit) is not int or not 1 <= limit <= 10_000:
                raise DefinitionError(f"turn: {name} must be 1 to 10000, not {limit!r}")

    @property
    def run_id(self) -> str:
        """The id of the run: `turn-` and 64 hex digits of the SHA-256 of the key's parts."""
        parts = json.dumps([self.namespace, self.thread, self.turn], ensure_ascii=False, separators=(",", ":"))
        return f"turn-{hashlib.sha256(parts.encode()).hexdigest()}"

    @property
    def identity(self) -> dict[str, str]:
        """What is stored as the run's input."""
        return {name: getattr(self, name) for name in ("namespace", "thread", "turn", "model_key")}


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """Everything that a provider gets, but for addresses, credentials and configured headers: JSON data.

    `label` is for people. The parts named in `growing` are lists that grow from call to call, as messages do: each of
    their items is stored once.
    """

    label: str
    parts: dict[str, Any]
    growing: tuple[str, ...] = ("messages", "tools")


@dataclass(frozen=True, slots=True)
class ReceiptEvent:
    """The signed receipt of what a tool call came to, for whoever keeps it outside of the store.

    `receipt_json` is the original line, the same bytes each time it is handed over.
    """

    receipt_json: str
    operation_key: str
    tool_call_id: str


ReceiptSink: TypeAlias = Callable[[ReceiptEvent], Awaitable[None] | None]
"""Takes receipts, plain or async. It may get one again, after a restart; what it raises fails the turn."""


class CallIds(Protocol):
    """How the ids of the tool calls in an answer are read and replaced, in whatever shape the answer has."""

    def read(self, answer: Any) -> Sequence[str | None]:
        """The id of each call, in the answer's order; None for a call without one."""
        ...

    def replace(self, answer: Any, ids: Sequence[str]) -> Any:
        """The answer with these ids, the provider's own kept beside them."""
        ...


class TurnContext(Protocol):
    """What a turn's function may ask for. Whatever is recorded is answered from the record, and makes nothing.

    A call that cannot go on (an outcome that is unknown) goes through the function as a BaseException: do not catch
    those. An error that one of these raises fails the turn, even if the function swallows it.
    """

    @property
    def run_id(self) -> str:
        """The run's id."""
        ...

    async def sample(self, request: SampleInput) -> Sample:
        """The model's next answer in this turn, by the runtime's infer worker.

        Raises ReplayMismatchError if another request was recorded at this place, LimitExceededError above
        `max_model_calls`, StepError for a refusal or an answer that is no proper one.
        """
        ...

    async def ask(self, request: ModelRequest, ask: Ask, *, ids: CallIds | None = None) -> Any:
        """The same through a client of the application's own: `ask(ctx)` is called if nothing is recorded."""
        ...

    async def call(self, name: str, call_id: str, arguments: Any) -> ExternalResult:
        """What a tool of the runtime's interaction worker came to, for this call of the model.

        A tool that does not exist, and arguments that are no object or fail its schema, come back as a failed result:
        nothing is admitted. Raises ReplayMismatchError if the same call was recorded with another tool or other
        arguments, and StepError if the call was refused or its outcome cannot be used.
        """
        ...

    async def invoke(self, call_id: str, name: str, arguments: Any, plan: Callable[[], Action]) -> Any:
        """The same for a tool of the application's own: `plan()` gives the Action, JSON data come back."""
        ...

    async def settle(self) -> None:
        """Return once all that was answered so far is durable: before it is shown as such.

        An outcome else rides with the admission of the next call, which is before that call's effect.
        """
        ...


TurnFunction: TypeAlias = Callable[[TurnContext], Awaitable[T]]
