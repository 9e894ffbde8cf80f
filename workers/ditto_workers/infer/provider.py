"""The seam between INFER steps and whoever answers them.

A provider says how a call ended by how `sample` ends:

    a Sample           it answered, properly                                 completed
    EffectNotMade      it said no, or nothing was sent                       refused; may be asked again
    EffectRejected     this configuration can never ask it                   failed; nothing was sent
    OutputError        it answered, but not properly; `kept` holds it        invalid; never asked again by itself
    anything else      the answer is lost, and may have been made            unknown

If `request.stream` is set, it shows text and reasoning by `ctx.partial` as they come, up to the first tool call. The
Sample is the same as without.

If it is cancelled before anything was received, and has closed its connection, it calls `ctx.not_made(reason)` and
lets the cancellation through.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol, TypeAlias

from ditto import Sample, StepContext, WorkerSetup
from ditto.contracts import SampleInput


class Provider(Protocol):
    """Answers one question. Never asks twice: retries are the engine's."""

    async def sample(self, request: SampleInput, ctx: StepContext) -> Sample:
        """One complete answer to `request`, asked once."""
        ...


ProviderFactory: TypeAlias = Callable[[WorkerSetup], AbstractAsyncContextManager[Provider]]
"""Opens a provider once per runtime, and closes it with the runtime, both in one task."""
