"""Workers: the implementations of node types, and what a handler is given.

A `Worker` names node types and the functions that carry them out. Before a step runs, its validated arguments are
turned into an `Action`: the effect class, the key, the call itself, and the look-up that can settle a lost outcome.
The engine knows only Actions; what a tool or a provider is, only its worker knows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from pydantic import BaseModel

from ditto.contracts import NODE_TYPES, RESERVED_FAMILIES
from ditto.contracts.contract import refuse_secrets
from ditto.effects import EffectClass, EffectDeclaration, check_effect, effect_of
from ditto.errors import DefinitionError, EffectRejected
from ditto.pieces import TextKind
from ditto.signatures import is_async, require_sync, takes_context

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from ditto.config import Config
    from ditto.sandbox import Sandbox


@dataclass(slots=True)
class StepContext:
    """What a handler may know and use. One per attempt."""

    run_id: str
    path: str
    """The step's path in its run."""
    key: str
    """Stable over retries and restarts: give it to the other side as the idempotency key."""
    attempt: int
    """From 1, over all processes."""
    config: Config
    sandbox: Sandbox
    logger: logging.Logger
    resources: Any = None
    """What the worker's `resources` factory opened, once per runtime."""
    _connection: Connection | None = None
    not_made_reason: str | None = None
    _partial: Callable[[str, TextKind], None] | None = None

    @property
    def connection(self) -> Connection:
        """The SQLAlchemy connection of the transaction that commits this step; only for `local` handlers."""
        if self._connection is None:
            raise DefinitionError(f"step {self.path}: only a handler of effect class local has ctx.connection")
        return self._connection

    def not_made(self, reason: str) -> None:
        """Say, before a cancellation is let through, that nothing was sent: the outcome is then known, not unknown."""
        self.not_made_reason = reason

    def partial(self, text: str, *, kind: TextKind = "text") -> None:
        """Show the next piece of an answer that is still coming. It is provisional: the outcome is what counts.

        The pieces of one kind, put together, are a beginning of what the outcome will hold. They go to whoever calls
        `runtime.listen`, and once a second into the event log. Does nothing in a look-up and in a `local` handler. May
        be called from the handler's own thread. Raises DefinitionError for no text.
        """
        if self._partial is not None:
            self._partial(text, kind)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a commit part (`record`) is told, inside the transaction that commits the step."""

    value: Any
    """The step's value, decoded from what is stored."""
    arguments: Any
    """The validated arguments of the call."""
    key: str
    run_id: str
    path: str


Record: TypeAlias = "Callable[[Connection, Outcome], None]"
"""A plain function, run in the transaction that commits the outcome it records."""


@dataclass(frozen=True, slots=True)
class Approval:
    """A person's yes, which an Action needs before it is attempted.

    The step asks at the path `<step>/approval` and waits. What is attempted is what was shown, or nothing.
    """

    name: str
    """What is asked for, in a word: a tool's name. An answer is never taken for another name."""
    shown: Callable[[], Any]
    """What the decision is about, as JSON data; made anew whenever it is compared with what was approved."""
    expires_s: float | None = None
    """Without a decision for so long it is as good as a no."""
    denied: Callable[[EffectRejected], Any | None] = lambda error: None
    """Turns a no (code `approval.rejected`, `approval.expired`) into a value; None leaves it an error of the step."""


@dataclass(frozen=True, slots=True)
class Action:
    """One call, ready to be made: what it does to the world, how it is made, and how it is found again."""

    label: str
    """For people: `tool pay`, `step total`."""
    effect: EffectClass
    call: Callable[[StepContext], Any]
    """Makes the call. Async if `is_async`; else run in a thread, unless pure or local."""
    is_async: bool
    arguments: Any = None
    """The validated arguments, as the handler, the key and the look-up get them."""
    recorded: Callable[[], Any] = lambda: None
    """The arguments as JSON data, kept with an admission."""
    growing: tuple[str, ...] = ()
    """Fields of `recorded()` that hold a list which mostly is longer than in the run's call before, as messages are:
    only what was added is stored."""
    key: str | None = None
    """The operation's stable key; None takes run id, generation and path."""
    lookup: Callable[[str, StepContext], Any] | None = None
    absence_is_final: bool = False
    absence_grace_s: float = 0.0
    record: Record | None = None
    database: Path | None = None
    """The database that a `local` action belongs to; None means whichever the runtime has."""
    timeout_s: float | None = None
    result: Callable[[Any], Any] = lambda value: value
    """Turns what the handler, or the look-up, returned into the step's value."""
    failure: Callable[[Exception], Any | None] = lambda error: None
    """Turns a definite failure into a value; None leaves it an error of the step."""
    output: type[BaseModel] | None = None
    """The contract that the value must fulfil."""
    approval: Approval | None = None
    """The yes that it needs, in whichever class it is."""


Plan: TypeAlias = Callable[[Any], Action]

Model: TypeAlias = "type[BaseModel]"
"""A pydantic model class. (Inside classes with a field `type`, the word is taken.)"""


Shown: TypeAlias = Callable[[Any], Mapping[str, str]]
"""A pure function from a step's recorded value to its texts, by kind: `{"text": …, "reasoning": …}`."""


@dataclass(frozen=True, slots=True)
class NodeHandler:
    """How one node type is carried out by one worker."""

    type: str
    plan: Plan
    input: Model | None = None
    local_databases: tuple[tuple[str, Path], ...] = ()
    """Tools of class `local` and the database each one names, checked when the runtime starts."""
    shown: Shown | None = None
    """For a type that shows text: the whole of it, of which the pieces given to `ctx.partial` are a beginning."""


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """What a worker's `resources` factory is given when the runtime starts it."""

    config: Config
    sandbox: Sandbox
    logger: logging.Logger


Resources: TypeAlias = Callable[[WorkerSetup], AbstractAsyncContextManager[Any]]


@dataclass(frozen=True)
class Worker:
    """The implementation of some node types, with its resources and its limit.

    `concurrency` bounds the steps of this worker that run at once, over all runs of the runtime (None: no bound of
    its own). `resources` is opened once, on first use, and closed with the runtime, both in one task.
    `node` returns a new Worker.
    """

    type: str
    concurrency: int | None = None
    resources: Resources | None = None
    handlers: Mapping[str, NodeHandler] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.type:
            raise DefinitionError("a Worker needs a type, for example Worker(type='SHOP')")
        if self.concurrency is not None and self.concurrency < 1:
            raise DefinitionError(f"worker {self.type}: concurrency must be 1 or more, not {self.concurrency}")

    def node(
        self,
        type: str,
        handler: Callable[..., Any],
        *,
        effect: EffectDeclaration = EffectClass.WRITE,
        input: Model | None = None,
        output: Model | None = None,
        key: Callable[[Any], str] | None = None,
        lookup: Callable[..., Any] | None = None,
        absence_is_final: bool = False,
        absence_grace_s: float = 0.0,
        record: Record | None = None,
        timeout_s: float | None = None,
        shown: Shown | None = None,
    ) -> Worker:
        """A Worker that also carries out the node type `type` by `handler(arguments)` or `handler(arguments, ctx)`.

        `arguments` is what the node's bind returned: an instance of `input` where one is given, else JSON data.
        `effect` is the class, or a pure function from the arguments to it; left out, it is `write`.
        `lookup(key, arguments, ctx)` answers with a LookupResult. `shown(value)`, for a handler that calls
        `ctx.partial`, gives the texts in the recorded value as `{"text": …, "reasoning": …}`. Raises DefinitionError.
        """
        owner = f"node type {type}"
        if type.split(".")[0] in RESERVED_FAMILIES:
            raise DefinitionError(f"{owner}: the families {', '.join(RESERVED_FAMILIES)} belong to ditto's own workers")
        for model in (input, output):
            if model is not None:
                refuse_secrets(model, owner=owner)
        declared = check_effect(effect, owner=owner)
        with_context = takes_context(handler, owner=owner)
        handler_is_async = is_async(handler)
        require_sync(key, owner=owner, role="key")
        require_sync(record, owner=owner, role="record")
        require_sync(shown, owner=owner, role="shown")

        def plan(arguments: Any) -> Action:
            return Action(
                label=owner,
                effect=effect_of(declared, arguments, owner=owner),
                call=(lambda ctx: handler(arguments, ctx)) if with_context else (lambda ctx: handler(arguments)),
                is_async=handler_is_async,
                arguments=arguments,
                recorded=lambda: as_data(arguments),
                key=key(arguments) if key else None,
                lookup=lookup_for(lookup, arguments),
                absence_is_final=absence_is_final,
                absence_grace_s=absence_grace_s,
                record=record,
                timeout_s=timeout_s,
                output=output,
            )

        return self.with_handler(NodeHandler(type=type, plan=plan, input=input, shown=shown))

    def with_handler(self, handler: NodeHandler) -> Worker:
        """A Worker that also has this handler; for workers that plan their own Actions."""
        if handler.type in self.handlers:
            raise DefinitionError(f"worker {self.type}: node type {handler.type} is declared twice")
        if handler.type.split(".")[0] in RESERVED_FAMILIES and handler.type not in NODE_TYPES:
            raise DefinitionError(f"worker {self.type}: ditto has no node type {handler.type}")
        return replace(self, handlers={**self.handlers, handler.type: handler})


def lookup_for(lookup: Callable[..., Any] | None, arguments: Any) -> Callable[[str, StepContext], Any] | None:
    """The look-up of one call; async if `lookup` is, so that it needs no thread."""
    if lookup is None:
        return None
    asked = lookup

    async def find_async(key: str, ctx: StepContext) -> Any:
        return await asked(key, arguments, ctx)

    def find(key: str, ctx: StepContext) -> Any:
        return asked(key, arguments, ctx)

    return find_async if is_async(lookup) else find


def as_data(value: Any) -> Any:
    """A contract as JSON data; anything else as it is."""
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else value
