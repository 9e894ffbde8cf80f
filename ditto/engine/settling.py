"""Settling: what is found again of an outcome that was lost, before anybody is asked.

| the step …                    | what is known                                                          |
|-------------------------------|------------------------------------------------------------------------|
| has a look-up                 | what it answers; that nothing was done only if its absence is final    |
| is a model call               | nothing; by the policy `ask_again` it is asked again                   |
| has neither                   | nothing: a person decides                                              |

A look-up is called like an attempt of class read, and asked again until its grace is over.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import anyio

from ditto.effects import Absent, Committed, EffectClass, Many, Pending, Rejected
from ditto.engine.attempts import make_attempt
from ditto.engine.certifying import ASK_AGAIN, LOOKUP
from ditto.engine.deadlines import Deadline, earliest
from ditto.engine.outcomes import End, Outcome, Unknown, record_error
from ditto.errors import EffectRejected
from ditto.signatures import is_async
from ditto.worker import Action, StepContext

if TYPE_CHECKING:
    from ditto.config import RuntimeConfig
    from ditto.engine.halt import Halt
    from ditto.engine.recording import StepRecord
    from ditto.engine.threads import Threads


@dataclass(frozen=True, slots=True)
class Resend:
    """The other side has no record of the attempt, and that is final: another one may be made, under the same key."""

    reason: str


@dataclass(frozen=True, slots=True)
class Settling:
    """One lost outcome of a step, while it is looked for."""

    action: Action
    record: StepRecord
    config: RuntimeConfig
    threads: Threads
    halted: Halt
    context: Callable[[], StepContext]
    """Makes one for each call of the look-up."""
    deadline: Deadline | None
    """The step's own, for each call of the look-up."""

    async def settle(self, unknown: Unknown) -> Outcome | Resend:
        """What is known of a lost outcome: the look-up's answer, the policy for model calls, or nothing."""
        if self.action.effect is EffectClass.INFER:
            if self.config.on_unknown_model_call == "ask_again":
                self.record.settled_by = ASK_AGAIN
                return Resend("by policy, a model call with no recorded answer is asked again")
            return unknown
        if self.action.lookup is None:
            return unknown
        try:
            found = await self._look_up(unknown)
        except asyncio.CancelledError:
            await self.record.commit_shielded(unknown, self.action)
            raise
        if not isinstance(found, Unknown):
            self.record.settled_by = LOOKUP
        return found

    async def _look_up(self, unknown: Unknown) -> Outcome | Resend:
        reason = unknown.reason
        while True:
            made = await self._ask()
            if made.cancellation is not None:
                raise made.cancellation
            if made.error is not None:
                record = record_error(made.error, self.record.path, self.record.redact)
                return Unknown(f"{reason}; the look-up failed: {record.type}: {record.message}", made.error)
            if made.deadline is not None:
                return Unknown(f"{reason}; the look-up missed the deadline of {made.deadline.left_s} s")
            match made.value:
                case Committed(value):
                    return self.record.decide(self.action, End(value=value))
                case Rejected(text, code):
                    return self.record.decide(self.action, End(error=EffectRejected(text, code=code)))
                case Absent() if self.threads.is_running(self.record.name):
                    return Unknown(f"{reason}; the look-up found nothing, but its handler still runs in a thread")
                case Absent() if self.action.absence_is_final:
                    wait_s = self._grace_left_s()
                    if wait_s <= 0:
                        return Resend(f"{reason}; the look-up found no trace of it")
                    if await self._halted_within(wait_s):
                        return Unknown(f"{reason}; the look-up has found nothing yet")
                case Absent():
                    return Unknown(f"{reason}; the look-up found nothing, which does not prove that nothing was done")
                case Pending():
                    return Unknown(f"{reason}; the look-up says it is pending")
                case Many(ids):
                    return Unknown(f"{reason}; the look-up found more than one: {', '.join(map(str, ids))}")
                case other:
                    return Unknown(f"{reason}; the look-up answered {type(other).__name__}, which is no LookupResult")

    async def _ask(self) -> End:
        """Call the look-up: an attempt like any other, of class read, under the same deadline."""
        lookup = self.action.lookup
        assert lookup is not None
        asking = replace(
            self.action, effect=EffectClass.READ, is_async=is_async(lookup), call=lambda ctx: lookup(ctx.key, ctx)
        )
        async with nullcontext() if asking.is_async else self.threads.seat((self.record.name, "look-up")) as seat:
            deadline = self._look_up_deadline()
            return await make_attempt(asking, self.context(), deadline, seat, lambda _result, _error: None)

    def _look_up_deadline(self) -> Deadline | None:
        """The step's own. It starts nothing, so the run's deadline only bounds it, and gives it `grace_s` more."""
        left_s = self.record.drive.deadline.left_s
        most = None if left_s == math.inf else Deadline(max(left_s, self.config.grace_s))
        return earliest(self.deadline, most)

    def _grace_left_s(self) -> float:
        row = self.record.row
        admitted_at = row.admitted_at if row is not None else None
        if not self.action.absence_grace_s or admitted_at is None:
            return 0.0
        return self.action.absence_grace_s - (self.record.drive.store.clock.now_us() - admitted_at) / 1_000_000

    async def _halted_within(self, seconds: float) -> bool:
        """Wait; True if no further attempt may start any more."""
        with self.halted.until_set():
            await anyio.sleep(seconds)
        return self.halted.is_set()
