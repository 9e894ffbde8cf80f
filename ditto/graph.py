"""Graph: an immutable DAG of nodes. No I/O, no worker, no address, no credential in it.

Each method returns a new Graph; what is wrong is refused where it is written, with the node named. Since a node may
only come after nodes that exist already, a Graph has no cycles.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Final

from ditto.effects import EffectClass, EffectDeclaration, check_effect, effect_of
from ditto.errors import DefinitionError
from ditto.signatures import is_async, named_parameters, require_sync
from ditto.waits import Wait, WaitKind, check_seconds, check_timeout
from ditto.worker import Action, Record, StepContext, lookup_for

if TYPE_CHECKING:
    import networkx

STEP_TYPE: Final = "STEP"
"""The node type of a plain step: the function stands in the Graph itself."""

NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,127}")
"""Names of workflows and nodes: they become parts of paths and must be no more than that."""


def check_name(name: str, *, what: str) -> str:
    """The name, if it may stand in a path: 1 to 128 of letters, digits and `_ . : -`, and no `/`."""
    given: Any = name
    if not isinstance(given, str) or not NAME.fullmatch(given):
        raise DefinitionError(f"{what} {name!r}: a name is 1 to 128 of letters, digits, '_', '.', ':' and '-'")
    return name


def check_version(version: str, *, owner: str) -> str:
    """The version, if it is text: it is recorded as that, and compared with what is recorded."""
    given: Any = version
    if not isinstance(given, str) or not given.isprintable() or not 1 <= len(given) <= 128:
        raise DefinitionError(f"{owner}: version must be a text of 1 to 128 characters, not {version!r}")
    return version


@dataclass(frozen=True, slots=True)
class Retry:
    """How often and how soon a step is tried again after a failure that is safe to repeat.

    Safe are: any error of a pure, read or idempotent step, and EffectNotMade of any step; but none that says
    `retryable=False`. The n-th wait is `initial_s * factor ** (n - 1)`, at most `max_s`, less up to `jitter` of it at
    random. An error's `retry_after_s` is waited for instead if it is longer; longer than `max_s`, it ends the tries.
    `total_s` bounds all of them from the start of the first one, waits included. Raises DefinitionError.
    """

    max_attempts: int = 3
    initial_s: float = 0.5
    factor: float = 2.0
    max_s: float = 30.0
    jitter: float = 0.2
    total_s: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.max_attempts <= 100:
            raise DefinitionError(f"Retry: max_attempts must be 1 to 100, not {self.max_attempts}")
        check_seconds(self.initial_s, owner="Retry: initial_s")
        check_seconds(self.max_s, owner="Retry: max_s")
        if not (1 <= self.factor <= 1000 and 0 <= self.jitter <= 1):
            raise DefinitionError("Retry: factor must be 1 to 1000, jitter 0 to 1")
        if self.total_s is not None:
            check_timeout(self.total_s, owner="Retry: total_s")

    def delay_s(self, attempt: int, *, random_unit: Callable[[], float] = random.random) -> float:
        """Seconds to wait after the `attempt`-th try failed."""
        return min(self.max_s, self.initial_s * self.factor ** (attempt - 1)) * (1 - self.jitter * random_unit())


@dataclass(frozen=True, slots=True)
class Node:
    """One node of a Graph. Made by `Graph.node` and `Graph.step`."""

    name: str
    type: str
    after: tuple[str, ...]
    version: str
    bind: Callable[..., Any] | None
    bind_names: tuple[str, ...]
    when: Callable[..., Any] | None
    when_names: tuple[str, ...]
    retry: Retry | None
    timeout_s: float | None
    function: Callable[..., Any] | None = None
    """The plain step's function; None for a node that a worker carries out."""
    effect: EffectDeclaration | None = None
    key: Callable[[Any], str] | None = None
    lookup: Callable[..., Any] | None = None
    absence_is_final: bool = False
    absence_grace_s: float = 0.0
    record: Record | None = None
    takes_context: bool = False
    wait: Wait | None = None
    """What the node waits for, if it is a wait; its bind then makes what an approval shows."""
    planned: Callable[[], Action] | None = None
    """Gives the Action of a call that neither a worker nor a function of the Graph carries out."""
    finish: Callable[[Any], Any] | None = None
    """Makes the step's value out of what its worker made of the result."""

    def plan_step(self, arguments: dict[str, Any]) -> Action:
        """The Action of a plain step with these values for its function."""
        function, owner = self.function, f"step {self.name}"
        assert function is not None
        assert self.effect is not None

        def call(ctx: StepContext) -> Any:
            return function(**arguments, ctx=ctx) if self.takes_context else function(**arguments)

        return Action(
            label=owner,
            effect=effect_of(self.effect, arguments, owner=owner),
            call=call,
            is_async=is_async(function),
            arguments=arguments,
            recorded=lambda: arguments,
            key=self.key(arguments) if self.key else None,
            lookup=lookup_for(self.lookup, arguments),
            absence_is_final=self.absence_is_final,
            absence_grace_s=self.absence_grace_s,
            record=self.record,
        )


@dataclass(frozen=True, slots=True)
class Graph:
    """An immutable DAG of nodes with a name and a version.

    `Graph("report").node(…).step(…)`; run it by `runtime.run(graph, input)`, which returns `{node: output}`,
    with None for a node that was skipped.
    """

    kind: ClassVar[str] = "graph"

    name: str
    version: str = "1"
    nodes: Mapping[str, Node] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        check_name(self.name, what="graph")
        check_version(self.version, owner=f"graph {self.name}")

    def node(
        self,
        name: str,
        type: str,
        *,
        after: Iterable[str] = (),
        bind: Callable[..., Any] | None = None,
        when: Callable[..., Any] | None = None,
        retry: Retry | None = None,
        timeout_s: float | None = None,
        version: str = "1",
    ) -> Graph:
        """A Graph with one more node, carried out by the worker that has the node type `type`.

        `after` names the nodes it depends on. `bind` is a pure function that makes its arguments; `when` a pure
        function that says whether it runs at all. Both may name `input` and the nodes in `after`, and get each
        one's value, None for a skipped one; `**values` gets all that is not named. Without `bind` the arguments are
        the input. Raises DefinitionError.
        """
        if not type or type == STEP_TYPE or "." not in type or type.startswith("WAIT."):
            raise DefinitionError(f"node {name}: {type!r} is no node type; use FAMILY.NAME, or .step(name, function)")
        after = self._check_after(name, after)
        return self._with(
            name,
            Node(
                name=name,
                type=type,
                after=after,
                version=check_version(version, owner=f"node {name}"),
                bind=bind,
                bind_names=self._names(name, bind, after, "bind"),
                when=when,
                when_names=self._names(name, when, after, "when"),
                retry=retry,
                timeout_s=_check_timeout(name, timeout_s),
            ),
        )

    def step(
        self,
        name: str,
        function: Callable[..., Any],
        *,
        after: Iterable[str] = (),
        effect: EffectDeclaration = EffectClass.IDEMPOTENT,
        when: Callable[..., Any] | None = None,
        retry: Retry | None = None,
        timeout_s: float | None = None,
        key: Callable[[Any], str] | None = None,
        lookup: Callable[..., Any] | None = None,
        absence_is_final: bool = False,
        absence_grace_s: float = 0.0,
        record: Record | None = None,
        version: str = "1",
    ) -> Graph:
        """A Graph with one more node that calls `function`, which may name `input`, the nodes in `after`, and `ctx`.

        **A plain step that declares no effect is `idempotent`: killed in the middle, it is run again**, with the
        same `ctx.key`. `async def` runs on the event loop, `def` in a thread unless pure. Raises DefinitionError.
        """
        owner = f"node {name}"
        after = self._check_after(name, after)
        names = self._names(name, function, after, "the step's function", "ctx")
        if effect == EffectClass.LOCAL:
            require_sync(function, owner=owner, role="a local step's function")
            if timeout_s is not None or retry is not None:
                raise DefinitionError(
                    f"{owner}: a local step takes no timeout_s and no retry: it runs inside a transaction, to its end"
                )
        require_sync(key, owner=owner, role="key")
        require_sync(record, owner=owner, role="record")
        return self._with(
            name,
            Node(
                name=name,
                type=STEP_TYPE,
                after=after,
                version=check_version(version, owner=owner),
                bind=None,
                bind_names=tuple(each for each in names if each != "ctx"),
                when=when,
                when_names=self._names(name, when, after, "when"),
                retry=retry,
                timeout_s=_check_timeout(name, timeout_s),
                function=function,
                effect=check_effect(effect, owner=owner),
                key=key,
                lookup=lookup,
                absence_is_final=absence_is_final,
                absence_grace_s=absence_grace_s,
                record=record,
                takes_context="ctx" in names,
            ),
        )

    def wait(
        self,
        name: str,
        *,
        signal: str | None = None,
        after: Iterable[str] = (),
        when: Callable[..., Any] | None = None,
        timeout_s: float | Callable[..., float] | None = None,
    ) -> Graph:
        """A Graph with one more node that waits for a signal of the node's name, or of the name `signal`.

        Its output is `{"timed_out", "body", "actor", "at"}`; after `timeout_s` without a signal, timed_out is true and
        the others are None. A signal that came before the wait began counts. Raises DefinitionError.
        """
        return self._with_wait(name, WaitKind.SIGNAL, signal or name, after, when, timeout_s, None)

    def approval(
        self,
        name: str,
        *,
        show: Callable[..., Any],
        after: Iterable[str] = (),
        when: Callable[..., Any] | None = None,
        expires_s: float | Callable[..., float] | None = None,
    ) -> Graph:
        """A Graph with one more node that waits for one decision on what `show`, a pure function like a bind, returns.

        Its output is `{"decision", "actor", "reason", "digest", "at"}`, the decision being `approve`, `reject` or,
        after `expires_s` without one, `expired`. Raises DefinitionError.
        """
        return self._with_wait(name, WaitKind.APPROVAL, name, after, when, expires_s, show)

    def sleep(
        self,
        name: str,
        seconds: float | Callable[..., float],
        *,
        after: Iterable[str] = (),
        when: Callable[..., Any] | None = None,
    ) -> Graph:
        """A Graph with one more node that waits so many seconds by the clock of the record. Raises DefinitionError."""
        return self._with_wait(name, WaitKind.TIMER, name, after, when, seconds, None)

    def to_networkx(self) -> networkx.DiGraph[str]:
        """The same DAG as a networkx DiGraph: nodes with `type` and `version`, edges from dependency to node."""
        import networkx as nx

        drawn: nx.DiGraph[str] = nx.DiGraph(name=self.name, version=self.version)
        for node in self.nodes.values():
            drawn.add_node(node.name, type=node.type, version=node.version)
            drawn.add_edges_from((parent, node.name) for parent in node.after)
        return drawn

    def to_mermaid(self) -> str:
        """The DAG as a Mermaid flowchart, with conditions, waits and effect classes; `ditto graph` draws the same."""
        from ditto.drawing import to_mermaid

        return to_mermaid(self)

    def _with_wait(
        self,
        name: str,
        kind: WaitKind,
        waited: str,
        after: Iterable[str],
        when: Callable[..., Any] | None,
        seconds: float | Callable[..., float] | None,
        show: Callable[..., Any] | None,
    ) -> Graph:
        owner = f"node {name}"
        after = self._check_after(name, after)
        check_name(waited, what="signal")
        if seconds is not None and not callable(seconds):
            check_seconds(seconds, owner=owner)
        seconds_names = self._names(name, seconds, after, "seconds") if callable(seconds) else ()
        if callable(seconds):
            require_sync(seconds, owner=owner, role="seconds")
        return self._with(
            name,
            Node(
                name=name,
                type=kind.value,
                after=after,
                version="1",
                bind=show,
                bind_names=self._names(name, show, after, "bind"),
                when=when,
                when_names=self._names(name, when, after, "when"),
                retry=None,
                timeout_s=None,
                wait=Wait(kind, waited, seconds, seconds_names),
            ),
        )

    def _with(self, name: str, node: Node) -> Graph:
        return replace(self, nodes=MappingProxyType({**self.nodes, name: node}))

    def _check_after(self, name: str, after: Iterable[str]) -> tuple[str, ...]:
        check_name(name, what="node")
        if name in ("input", "ctx"):
            raise DefinitionError(f"node {name}: 'input' and 'ctx' are taken; choose another name")
        if name in self.nodes:
            raise DefinitionError(f"node {name}: graph {self.name} has a node of that name already")
        if isinstance(after, str):
            raise DefinitionError(f"node {name}: after must be a tuple of node names, for example after=({after!r},)")
        names = tuple(after)
        for each in names:
            if each not in self.nodes:
                raise DefinitionError(
                    f"node {name}: it comes after {each!r}, which graph {self.name} does not have yet"
                )
        if len(set(names)) != len(names):
            raise DefinitionError(f"node {name}: after names a node twice")
        return names

    def _names(
        self, name: str, function: Callable[..., Any] | None, after: tuple[str, ...], role: str, *more: str
    ) -> tuple[str, ...]:
        if function is None:
            return ()
        if role in ("bind", "when"):
            require_sync(function, owner=f"node {name}", role=role)
        return named_parameters(function, allowed=("input", *after, *more), owner=f"node {name}", role=role)


def _check_timeout(name: str, timeout_s: float | None) -> float | None:
    if timeout_s is not None and not timeout_s > 0:
        raise DefinitionError(f"node {name}: timeout_s must be more than 0, not {timeout_s}")
    return timeout_s
