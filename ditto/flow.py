"""Flow: an async function that composes Graphs, Loops, steps and waits. Durable by replaying its recorded calls.

    async def order(ctx, input):
        prepared = await ctx.run("prepare", prepare, input)
        paid = await ctx.wait("paid", timeout_s=3 * 24 * 3600)
        ...

    flow = Flow("order", order)

When a run goes on, the function is called anew from its top. Each call has an explicit name, unique in the flow; a call
that is recorded returns what is recorded and makes nothing. So the function must ask for the same things each time:
the time, random numbers and ids come from `ctx`.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, ClassVar, Protocol, TypeAlias

from ditto.effects import EffectClass, EffectDeclaration
from ditto.errors import DefinitionError
from ditto.graph import Graph, Retry, check_name
from ditto.loop import Loop
from ditto.signatures import is_async


@dataclass(frozen=True, slots=True)
class Decision:
    """How an approval ended: `decision` is `approve`, `reject` or `expired`."""

    decision: str
    actor: str | None = None
    reason: str | None = None
    digest: str | None = None

    @property
    def approved(self) -> bool:
        """Whether somebody said yes."""
        return self.decision == "approve"


class FlowContext(Protocol):
    """What a Flow's function may ask for. Every call has a `name`, unique in the flow; calls may run side by side.

    A failed call raises its StepError, here and on every replay once the flow has gone on from it. What else the
    engine must stop for (a wait with nobody to wait for it, an unknown outcome) goes through the function as a
    BaseException: do not catch those.
    """

    @property
    def run_id(self) -> str:
        """The run's id."""
        ...

    async def run(self, name: str, graph: Graph, input: Any = None) -> dict[str, Any]:
        """The outputs of a Graph, whose steps have paths below `name/`."""
        ...

    async def loop(self, name: str, loop: Loop, state: Any = None) -> Any:
        """The last state of a Loop, whose steps have paths below `name/<iteration>/`."""
        ...

    async def step(
        self,
        name: str,
        function: Callable[..., Any],
        input: Any = None,
        *,
        effect: EffectDeclaration = EffectClass.IDEMPOTENT,
        retry: Retry | None = None,
        timeout_s: float | None = None,
        lookup: Callable[..., Any] | None = None,
        absence_is_final: bool = False,
    ) -> Any:
        """What `function(input)` or `function(input, ctx)` returns: a plain step of a Graph, as one call."""
        ...

    async def node(
        self, name: str, type: str, arguments: Any = None, *, retry: Retry | None = None, timeout_s: float | None = None
    ) -> Any:
        """The output of one node that a worker carries out."""
        ...

    async def wait(self, name: str, *, timeout_s: float | None = None) -> Any:
        """The body of the next signal of that name; raises TimeoutError after `timeout_s` without one."""
        ...

    async def approve(self, name: str, show: Any, *, expires_s: float | None = None) -> Decision:
        """The one decision on what is shown."""
        ...

    async def sleep(self, name: str, seconds: float) -> None:
        """Wait by the clock of the record: over restarts, the time is counted from when the wait began."""
        ...

    async def now(self, name: str) -> datetime:
        """The time when this call was first made, aware, UTC."""
        ...

    async def random(self, name: str) -> float:
        """A random number from 0 up to 1, the same on every replay."""
        ...

    async def uuid(self, name: str) -> str:
        """A fresh id, the same on every replay."""
        ...

    async def child(self, name: str, workflow: Graph | Loop | Flow, input: Any = None, *, id: str | None = None) -> Any:
        """What a run of its own comes to, under the id `id` or `<run id>/<name>`."""
        ...


FlowFunction: TypeAlias = Callable[[FlowContext, Any], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class Flow:
    """An async function `function(ctx, input)` with a name and a version. Raises DefinitionError."""

    kind: ClassVar[str] = "flow"
    carries: ClassVar[bool] = False
    tries_again: ClassVar[bool] = False
    """Taken up again, it makes what failed once more: an error of before does not stand."""

    name: str
    function: FlowFunction
    version: str = "1"

    def __post_init__(self) -> None:
        owner = f"flow {self.name}"
        check_name(self.name, what="flow")
        if not is_async(self.function):
            raise DefinitionError(f"{owner}: its function must be an async def")
        if len(inspect.signature(self.function).parameters) != 2:
            raise DefinitionError(f"{owner}: its function must be written function(ctx, input)")
