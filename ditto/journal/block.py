"""Blocks: a turn whose code runs elsewhere, between a beginning and an end."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol, TypeVar

import anyio

from ditto import DefinitionError, ReceiptSink, Turn, TurnContext, TurnFunction

T = TypeVar("T")


class TurnClient(Protocol):
    """Whoever keeps the journal and runs the tools: a Runtime."""

    async def turn(self, turn: Turn, function: TurnFunction[T], *, on_receipt: ReceiptSink | None = None) -> T:
        """Drive a turn; see `Runtime.turn`."""
        ...


class TurnBlock:
    """One turn, from `begin` to `end`, for code that is no function of its own: an `async with`, a framework's run.

    A turn that is completed can be begun again only if the block `replays`: it is then answered from the record.
    """

    def __init__(
        self, client: TurnClient, turn: Turn, *, replays: bool = False, on_receipt: ReceiptSink | None = None
    ) -> None:
        self._client = client
        self._turn = turn
        self._replays = replays
        self._on_receipt = on_receipt
        self._bound: asyncio.Future[TurnContext] = asyncio.get_running_loop().create_future()
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._driven: asyncio.Task[Any] | None = None

    @property
    def ended(self) -> bool:
        """Whether `end` was called."""
        return self._ended.done()

    async def begin(self) -> TurnContext:
        """The context, once the turn is ours. Raises what `Runtime.turn` raises when it cannot begin."""

        async def body(ctx: TurnContext) -> Any:
            self._bound.set_result(ctx)
            await self._ended
            # What is no JSON data is not saved as the turn's value, so that a completed turn is replayed.
            return object() if self._replays else None

        self._driven = asyncio.ensure_future(self._client.turn(self._turn, body, on_receipt=self._on_receipt))
        try:
            await asyncio.wait((self._driven, self._bound), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._driven.cancel()
            await _wait_for(self._driven)
            if not self._driven.cancelled():
                self._driven.exception()
            raise
        if self._bound.done():
            return self._bound.result()
        await self._driven
        raise DefinitionError("this turn is completed; `async with` cannot replay it: use agent.run(function)")

    async def end(self, error: BaseException | None) -> None:
        """The code ended, by itself or by `error`. Raises what the turn raises, if that says more."""
        assert self._driven is not None
        if not self.ended:
            if error is None:
                self._ended.set_result(None)
            elif isinstance(error, asyncio.CancelledError):
                self._ended.cancel()
                self._driven.cancel()
            else:
                self._ended.set_exception(error)
                self._ended.exception()
        if (cancellation := await _wait_for(self._driven)) is not None:
            raise cancellation
        try:
            self._driven.result()
        except BaseException as raised:
            if raised is not error and not isinstance(error, asyncio.CancelledError):
                raise


async def _wait_for(driven: asyncio.Task[Any]) -> asyncio.CancelledError | None:
    """Return when the turn has let go of everything. A cancellation meanwhile, however often it comes, cuts the turn
    short, and comes back."""
    cancellation: asyncio.CancelledError | None = None
    with anyio.CancelScope(shield=True):
        while not driven.done():
            try:
                await asyncio.wait((driven,))
            except asyncio.CancelledError as cancelled:
                driven.cancel()
                cancellation = cancelled
    return cancellation
