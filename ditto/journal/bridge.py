"""ToolBridge: tools for an application that keeps whole answers of its model itself.

It must keep them before any of their calls is made. A framework's hook that runs after a step comes too late: a process
that dies in between has made effects that nobody can match with an answer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

import anyio

from ditto import DefinitionError, ExternalResult, ReceiptSink, Tool, Turn, TurnContext
from ditto.journal.agent import JournaledTool
from ditto.journal.block import TurnClient

T = TypeVar("T")

MODEL_KEY = "kept by the application"


@dataclass(frozen=True, slots=True)
class SavedCall:
    """One call of a saved answer. `arguments` is a JSON object."""

    id: str
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class SavedTurn:
    """The tool calls of an answer that the application has kept, in their order."""

    thread: str
    turn: str
    tool_calls: tuple[SavedCall, ...]


class ToolBridge:
    """Runs the tools of one turn: a call that was made is not made again, whoever calls it. Never asks a model.

    `client` is a runtime whose interaction worker has the `tools`. Raises DefinitionError.
    """

    def __init__(
        self,
        client: TurnClient,
        tools: Iterable[Tool],
        *,
        namespace: str,
        thread: str,
        turn: str,
        max_concurrency: int = 1,
        on_receipt: ReceiptSink | None = None,
    ) -> None:
        self.turn = Turn(namespace, thread, turn, MODEL_KEY, max_concurrency=max_concurrency)
        self.names = tuple(tool.name for tool in tools)
        self._client = client
        self._on_receipt = on_receipt

    async def run(self, function: Callable[[Mapping[str, JournaledTool], anyio.CancelScope], Awaitable[T]]) -> T:
        """Call `function(tools, scope)`: the tools by name, and the scope that ends the function's own work.

        What is under way is drained before this returns. Raises what `Runtime.turn` raises.
        """

        async def with_tools(ctx: TurnContext) -> T:
            with anyio.CancelScope() as scope:
                return await function(MappingProxyType({name: JournaledTool(name, ctx) for name in self.names}), scope)
            raise DefinitionError("the function was ended by its own scope, and returned nothing")

        return await self._client.turn(self.turn, with_tools, on_receipt=self._on_receipt)


async def replay_saved_turn(
    saved: SavedTurn,
    client: TurnClient,
    tools: Iterable[Tool],
    *,
    namespace: str,
    on_receipt: ReceiptSink | None = None,
) -> list[tuple[str, ExternalResult]]:
    """Make the calls of a saved answer, one after another, those that were made before excepted.

    Returns (call id, result) pairs in their order. All names are checked before the first call: DefinitionError.
    Raises what `Runtime.turn` raises.
    """
    bridge = ToolBridge(client, tools, namespace=namespace, thread=saved.thread, turn=saved.turn, on_receipt=on_receipt)
    unknown = sorted({call.name for call in saved.tool_calls} - set(bridge.names))
    if unknown:
        raise DefinitionError(
            f"the saved turn calls {', '.join(unknown)}, which is none of the tools; nothing was called"
        )

    async def make(available: Mapping[str, JournaledTool], scope: anyio.CancelScope) -> list[Any]:
        results = [(call.id, await available[call.name](call.id, call.arguments)) for call in saved.tool_calls]
        return [[call_id, result.model_dump(mode="json")] for call_id, result in results]

    return [(call_id, ExternalResult.model_validate(result)) for call_id, result in await bridge.run(make)]
