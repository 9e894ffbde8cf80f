"""Loop: bounded repetition. Choose a Graph from the state, run it, update the state, ask whether it is done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from ditto.errors import DefinitionError
from ditto.graph import Graph, check_name, check_version
from ditto.signatures import is_async

Selector: TypeAlias = Callable[[Any], Graph]


@dataclass(frozen=True, slots=True)
class Loop:
    """Bounded repetition of a Graph over a state, which is JSON data.

    - `graph`: the Graph of each iteration, or a pure function from the state to one.
    - `bind(state)`: the input of the iteration's Graph; left out, the state itself.
    - `update(state, outputs)`: the next state. `done(state)`: whether to stop; asked before each iteration, too.
    - `max_iterations`: the guard. Hitting it ends the run as `exhausted` and keeps all that was found; a later run
      with a higher one goes on. It is no part of the loop's identity.

    - `append`: fields of the state, an object, that hold a list which grows. They carry an immutable Items: with
      `state["findings"].add(x)` only `x` is stored. Any other value costs its own size each iteration.

    - `carries`: outcomes ride with the next admission of the run where that comes within a few milliseconds. It halves
      the flushes of an agent; a process that dies in between leaves such an outcome unknown.

    The functions are plain and pure: they are asked again on resume. Raises DefinitionError.
    """

    kind: ClassVar[str] = "loop"

    name: str
    graph: Graph | Selector
    update: Callable[[Any, dict[str, Any]], Any]
    done: Callable[[Any], bool]
    max_iterations: int
    bind: Callable[[Any], Any] | None = None
    append: tuple[str, ...] = ()
    version: str = "1"
    carries: bool = False

    def __post_init__(self) -> None:
        owner = f"loop {self.name}"
        check_name(self.name, what="loop")
        check_version(self.version, owner=owner)
        if not isinstance(self.graph, Graph) and not callable(self.graph):
            raise DefinitionError(f"{owner}: graph must be a Graph, or a function from the state to one")
        selector = None if isinstance(self.graph, Graph) else self.graph
        roles = (("graph", selector), ("update", self.update), ("done", self.done), ("bind", self.bind))
        for role, function in roles:
            if function is not None and not callable(function):
                raise DefinitionError(f"{owner}: {role} must be a function")
            if function is not None and is_async(function):
                raise DefinitionError(
                    f"{owner}: {role} must be a plain function, not async: it is computed again on resume"
                )
        if not isinstance(self.append, tuple):
            raise DefinitionError(f"{owner}: append must be a tuple of field names, for example ('findings',)")
        if type(self.max_iterations) is not int or self.max_iterations < 1:
            raise DefinitionError(f"{owner}: max_iterations must be 1 or more, not {self.max_iterations!r}")

    def choose(self, state: Any) -> Graph:
        """The Graph of the iteration that begins with this state."""
        if isinstance(self.graph, Graph):
            return self.graph
        chosen = self.graph(state)
        if not isinstance(chosen, Graph):
            raise DefinitionError(f"loop {self.name}: its graph function returned {type(chosen).__name__}, not a Graph")
        return chosen
