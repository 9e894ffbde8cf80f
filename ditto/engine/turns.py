"""Turns: a run whose steps are asked for by an agent's own code, or a framework's.

A turn is driven like a Flow: its function is called anew, and each recorded call is answered from its row. Model calls
are counted, `m/1`, `m/2`, …, and carry the hash of their request; tool calls have the path `t/<call id>` and carry the
digest of tool and arguments. Asked for anything else, the turn stops before a provider or a tool is touched.

Tool calls run in tasks of the turn: a framework that gives up one call because another one failed does not cut short
what was admitted. It is drained, and its outcome stands; what was not begun is not. After an error no call is begun.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Final, TypeVar, cast

import anyio

from ditto.contracts import ExternalResult, ResultError, Sample, SampleInput, ToolInput
from ditto.contracts.calls import CALL_ID_BYTES_MAX, CUT_ANSWER, is_call_id, unique_ids, with_unique_ids
from ditto.effects import EffectClass
from ditto.engine.deliveries import Deliveries
from ditto.engine.flows import FlowRun, FlowStopped, not_begun
from ditto.engine.outcomes import ErrorRecord
from ditto.engine.requests import list_differences, request_hash
from ditto.engine.routing import Router
from ditto.errors import (
    DittoError,
    InvalidValueError,
    LimitExceededError,
    ReplayMismatchError,
    StepError,
)
from ditto.flow import Flow
from ditto.graph import Node
from ditto.store import queries
from ditto.store.records import StepRow
from ditto.store.schema import StepState
from ditto.store.store import Store
from ditto.store.values import digest, encode
from ditto.turn import Ask, CallIds, ModelRequest, ReceiptSink, Turn, TurnFunction
from ditto.worker import Action, as_data

T = TypeVar("T")

SAMPLE: Final = "INFER.REASONING.SAMPLE"
TOOL: Final = "INTERACTION.ACT.TOOL"

ARGUMENTS_BYTES_MAX: Final = 64 * 1024 * 1024
RESULT_BYTES_MAX: Final = 1024 * 1024

VERSION_DIGITS: Final = 32
"""Hex digits of a digest that are kept with a call, to tell whether it is asked for again."""

DIFFERENCES_SHOWN: Final = 5


@dataclass(frozen=True, slots=True)
class TurnFlow(Flow):
    """The workflow of a turn's run."""

    kind: ClassVar[str] = "turn"
    carries: ClassVar[bool] = True
    tries_again: ClassVar[bool] = True


@dataclass(slots=True)
class Came:
    """What a turn's function came to in this process: it may be no data, or an error of any class."""

    values: list[Any] = field(default_factory=list)
    error: Exception | None = None


def turn_flow(
    turn: Turn, function: TurnFunction[Any], router: Router, store: Store, came: Came, on_receipt: ReceiptSink | None
) -> TurnFlow:
    """The Flow that calls `function` with a TurnContext; `came` is told how that ended.

    The run's own result is `{"value": …}`, or `{}` if that is nothing that can be stored.
    """

    async def run(ctx: Any, input: Any) -> dict[str, Any]:
        flow = cast(FlowRun, ctx)
        deliveries = None if on_receipt is None else Deliveries(store, turn.run_id, on_receipt)
        calls = _Driven(turn, router, store, flow, deliveries)
        value: Any = None
        try:
            value = await function(calls)
        except Exception as error:  # noqa: BLE001 - told below, unless an error of its calls came first
            came.error = error
        except BaseExceptionGroup as group:
            if calls.failure is None or group.split((FlowStopped, Exception))[1] is not None:
                raise
        finally:
            await calls.drain()
        came.error = calls.failure or came.error
        if came.error is None:
            try:
                await calls.hand_over_receipts()
            except StepError as error:
                came.error = error
        if came.error is not None:
            raise came.error
        came.values.append(value)
        try:
            encode(value, what="the result", max_bytes=RESULT_BYTES_MAX)
        except DittoError:
            return {}
        return {"value": value}

    return TurnFlow("turn", run)


async def replay_turn(turn: Turn, function: TurnFunction[T], router: Router, store: Store, run: int) -> T:
    """Call `function` once more, answering it from the records of a turn that is completed; nothing is made."""
    rows: dict[str, StepRow] = {}
    after: int | None = 0
    while after is not None:
        page, after = await store.read(partial(queries.list_calls, nested=True), run, after, 500)
        rows.update((row.path, row) for row in page)
    calls = _Replayed(turn, router, store, run, rows)
    try:
        value = await function(calls)
    except Exception:
        if calls.failure is not None:
            raise calls.failure from None
        raise
    if calls.failure is not None:
        raise calls.failure
    calls.check_all_asked()
    return value


class _TurnCalls(ABC):
    """What driven and replayed turns share: which call is which. A TurnContext."""

    def __init__(self, turn: Turn, router: Router, store: Store) -> None:
        self.turn = turn
        self.store = store
        self.failure: DittoError | None = None
        """The first error that a call raised: the turn fails by it, whatever its function makes of it."""
        self.operations: dict[str, _Operation] = {}
        self.is_over = False
        """The function has ended: no call is begun any more."""
        self._router = router
        self._model_calls = 0
        self._asking = False
        self._ids: set[str] = set()
        """The ids of all tool calls in the answers so far."""
        self._cut: set[str] = set()
        """Those of answers that were cut by their length limit."""

    @property
    def run_id(self) -> str:
        return self.turn.run_id

    # Model calls

    async def sample(self, request: SampleInput) -> Sample:
        asked, taken = ModelRequest(f"model {request.model}", as_data(request)), frozenset(self._ids)
        # The request need not hold all calls of the turn: an agent may have left some out of its history.
        node = replace(
            _node(SAMPLE), bind=lambda: request, finish=lambda answer: with_unique_ids(answer, request, taken)
        )
        answer = await self._model_call(asked, node)
        sample = Sample.model_validate(answer)
        ids = [call.id for call in sample.message.tool_calls]
        self._ids.update(ids)
        if sample.finish_reason == "length":
            self._cut.update(ids)
        return sample

    async def ask(self, request: ModelRequest, ask: Ask, *, ids: CallIds | None = None) -> Any:
        ordinal, taken = self._model_calls + 1, frozenset(self._ids)

        def finish(answer: Any) -> Any:
            if ids is None:
                return answer
            given = list(ids.read(answer))
            made = unique_ids(given, taken, ordinal)
            return answer if made == given else ids.replace(answer, made)

        action = Action(
            label=request.label,
            effect=EffectClass.INFER,
            call=ask,
            is_async=True,
            recorded=lambda: dict(request.parts),
            growing=tuple(name for name in request.growing if name in request.parts),
            result=finish,
        )
        answer = await self._model_call(request, replace(_node(SAMPLE), planned=lambda: action))
        if ids is not None:
            self._ids.update(each for each in ids.read(answer) if each)
        return answer

    async def _model_call(self, request: ModelRequest, node: Node) -> Any:
        path = f"m/{self._model_calls + 1}"
        self._check_may_begin(path)
        if given_up := [call_id for call_id, each in self.operations.items() if each.is_given_up]:
            raise self._fail(
                StepError(
                    f"model call {path} was not begun: tool call {', '.join(given_up)} was given up by its caller, "
                    "and is still under way; let a tool end by a timeout_s of its own",
                    code="turn.given_up",
                )
            )
        if self._asking:
            raise self._fail(
                StepError("a turn asks its model once at a time; wait for the answer", code="turn.concurrent_call")
            )
        if self._model_calls >= self.turn.max_model_calls:
            raise self._fail(
                LimitExceededError(
                    f"turn {self.run_id}: its model was asked {self._model_calls} times, which is its max_model_calls; "
                    "what is recorded is kept: run it with a higher limit to go on",
                    code="turn.model_calls",
                    run_id=self.run_id,
                )
            )
        self._asking = True
        self._model_calls += 1
        node = replace(node, name=path, version=request_hash(request)[:VERSION_DIGITS])
        try:
            return await self._noted(self._perform(node, request.parts))
        except asyncio.CancelledError:
            self._fail(
                StepError(
                    f"the caller of model call {path} gave it up, so the turn cannot go on; let it end by a timeout of "
                    "the provider, or of runtime.step_timeout_s. Run again",
                    code="turn.given_up",
                    retryable=True,
                )
            )
            raise
        finally:
            self._asking = False

    # Tool calls

    async def call(self, name: str, call_id: str, arguments: Any) -> ExternalResult:
        if call_id in self._cut:
            return _not_admitted(name, call_id, "answer.cut", CUT_ANSWER)
        if not isinstance(arguments, dict):
            return _not_admitted(name, call_id, "tool.arguments", f"the arguments of {name} must be a JSON object")
        request = ToolInput(tool=name, arguments=arguments, call_id=call_id)
        result = await self._operation(call_id, name, arguments, replace(_node(TOOL), bind=lambda: request))
        return ExternalResult.model_validate(result)

    async def invoke(self, call_id: str, name: str, arguments: Any, plan: Callable[[], Action]) -> Any:
        return await self._operation(call_id, name, arguments, replace(_node(TOOL), planned=plan))

    @abstractmethod
    async def settle(self) -> None:
        """See TurnContext."""

    async def _operation(self, call_id: str, name: str, arguments: Any, node: Node) -> Any:
        """The outcome of a tool call. Asked for again, it is the same one; its caller may give it up, it goes on."""
        asked = {"tool": name, "arguments": arguments}
        try:
            check_call_id(call_id)
            version = digest(encode(asked, what=f"the call of {name}: ", max_bytes=ARGUMENTS_BYTES_MAX))
        except DittoError as error:
            raise self._fail(error) from None
        known = self.operations.get(call_id)
        if known is None:
            self._check_may_begin(f"t/{call_id}")
            node = replace(node, name=f"t/{call_id}", version=version[:VERSION_DIGITS])
            known = self.operations[call_id] = _Operation(version)
            known.outcome = asyncio.ensure_future(self._noted(self._start(known, node, asked)))
            known.outcome.add_done_callback(_look_at)
        elif known.version != version:
            raise self._fail(self._conflict(f"t/{call_id}", ["another tool, or other arguments"]))
        known.callers += 1
        try:
            return await asyncio.shield(known.outcome)
        finally:
            known.callers -= 1
            if known.is_given_up and not known.begun:
                # Nobody wants it any more, and it waits for its turn.
                del self.operations[call_id]
                known.outcome.cancel()

    async def _start(self, operation: _Operation, node: Node, asked: dict[str, Any]) -> Any:
        return await self._perform(node, asked)

    def _check_may_begin(self, path: str) -> None:
        """Raises StepError after an error, and after the end."""
        if self.is_over:
            raise StepError(f"call {path} was not begun: the turn's function has ended", code="turn.over")
        if self.failure is not None:
            raise not_begun(path, self.failure)

    # How each is made

    @abstractmethod
    async def _perform(self, node: Node, asked: dict[str, Any]) -> Any:
        """What the call comes to, or came to. `asked` is what it was asked with, to tell how a recorded one differs."""

    @abstractmethod
    def _row(self, path: str) -> StepRow | None:
        """The record of a call."""

    async def _refuse_mismatch(self, node: Node, asked: dict[str, Any], run: int) -> None:
        """Stop before anything is touched, if something else was recorded here. Raises ReplayMismatchError."""
        row = self._row(node.name)
        if row is None or (row.type, row.version) == (node.type, node.version):
            return
        recorded = await self.store.read(queries.get_step, run, node.name)
        arguments = None if recorded is None or recorded.arguments is None else recorded.arguments.plain()
        raise self._conflict(node.name, list_differences(arguments, asked))

    async def _noted(self, work: Awaitable[T]) -> T:
        """The work's result. An error of it fails the turn, but for one that only says that another call did."""
        try:
            return await work
        except DittoError as error:
            if error.code == "turn.stopped":
                raise
            raise self._fail(error) from error.__cause__

    def _fail(self, error: DittoError) -> DittoError:
        self.failure = self.failure or error
        return error

    def _conflict(self, path: str, differences: list[str]) -> ReplayMismatchError:
        more = f" and {len(differences) - DIFFERENCES_SHOWN} more" if len(differences) > DIFFERENCES_SHOWN else ""
        return ReplayMismatchError(
            f"turn {self.run_id}: {path} was recorded for something else; it differs in "
            f"{', '.join(differences[:DIFFERENCES_SHOWN])}{more}. No provider and no tool was touched: "
            "run it with what it was started with, or start another turn",
            run_id=self.run_id,
        )


class _Driven(_TurnCalls):
    """A turn that is driven."""

    def __init__(self, turn: Turn, router: Router, store: Store, flow: FlowRun, deliveries: Deliveries | None) -> None:
        super().__init__(turn, router, store)
        self._flow = flow
        self._deliveries = deliveries
        self._slots = asyncio.Semaphore(turn.max_concurrency)

    def _row(self, path: str) -> StepRow | None:
        return self._flow.recorded(path)

    async def _start(self, operation: _Operation, node: Node, asked: dict[str, Any]) -> Any:
        """A call is admitted when it starts, so one that waits for its turn is never unknown."""
        async with AsyncExitStack() as slot:
            await slot.enter_async_context(self._slots)
            self._check_may_begin(node.name)
            operation.begun = True
            # One that cannot go on makes room for the others: what is unknown blocks only what rests on it.
            return await self._perform(node, asked, blocked=slot.aclose)

    async def _perform(
        self, node: Node, asked: dict[str, Any], *, blocked: Callable[[], Awaitable[None]] | None = None
    ) -> Any:
        if node.type == SAMPLE:
            await self.hand_over_receipts()
        return await self._flow.perform(node, lambda run: self._refuse_mismatch(node, asked, run), blocked)

    async def hand_over_receipts(self) -> None:
        """Make all outcomes durable and hand over their receipts, before the model is asked anything further.

        It must not be under way meanwhile: a process that dies in the sink would leave that call unknown.
        """
        if self._deliveries is None:
            return
        await self._flow.settle()
        try:
            await self._deliveries.hand_over()
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            told = f"turn {self.run_id}: on_receipt raised {said}; run it again, and it gets what it got once more"
            raise self._fail(StepError(told, code="turn.receipt_sink", retryable=True)) from error

    async def settle(self) -> None:
        await self._noted(self._flow.settle())

    async def drain(self) -> None:
        """Return when no tool call is under way; a cancellation of the turn itself cuts them short.

        Whoever was cancelled is told once they have ended, however often it is cancelled.
        """
        self.is_over = True
        under_way = {each.outcome for each in self.operations.values() if not each.outcome.done()}
        task = asyncio.current_task()
        cut = task is not None and task.cancelling() > 0
        if cut:
            _cancel_all(under_way)
        cancellation: asyncio.CancelledError | None = None
        with anyio.CancelScope(shield=True):
            while under_way:
                try:
                    _, under_way = await asyncio.wait(under_way)
                except asyncio.CancelledError as cancelled:
                    if not cut:
                        _cancel_all(under_way)
                    cut, cancellation = True, cancelled
        if cancellation is not None:
            raise cancellation


class _Replayed(_TurnCalls):
    """A turn that is completed: answered from its records."""

    def __init__(self, turn: Turn, router: Router, store: Store, run: int, rows: dict[str, StepRow]) -> None:
        super().__init__(turn, router, store)
        self._run = run
        self._rows = rows
        self._asked: set[str] = set()

    def _row(self, path: str) -> StepRow | None:
        return self._rows.get(path)

    async def settle(self) -> None:
        """All of it is durable."""

    def check_all_asked(self) -> None:
        """Refuse an end that leaves recorded calls unasked for. Raises ReplayMismatchError."""
        left = sorted(set(self._rows) - self._asked)
        if left:
            raise ReplayMismatchError(
                f"turn {self.run_id} is completed, and its function ended without asking for what is recorded: "
                f"{', '.join(left)}; run it with the code that it was started with",
                run_id=self.run_id,
            )

    async def _perform(self, node: Node, asked: dict[str, Any]) -> Any:
        self._asked.add(node.name)
        row = self._rows.get(node.name)
        if row is None:
            raise ReplayMismatchError(
                f"turn {self.run_id} is completed, and holds no {node.name}; start another turn", run_id=self.run_id
            )
        await self._refuse_mismatch(node, asked, self._run)
        if row.state is StepState.COMPLETED and row.output is not None:
            return row.output.decode()
        assert row.error is not None
        raise ErrorRecord.from_text(row.error).to_error(self.run_id)


@dataclass(slots=True)
class _Operation:
    """A tool call of this turn: the digest of what it was asked with, and its outcome, once it is known."""

    version: str
    outcome: asyncio.Future[Any] = field(init=False)
    callers: int = 0
    """Those who wait for the outcome now."""
    begun: bool = False
    """It has its slot."""

    @property
    def is_given_up(self) -> bool:
        """Nobody waits for it, and it has not ended."""
        return self.callers == 0 and not self.outcome.done()


def check_call_id(call_id: str) -> None:
    """A tool call's id becomes a part of a path. Raises InvalidValueError."""
    given: Any = call_id
    if not isinstance(given, str) or not is_call_id(given):
        raise InvalidValueError(
            f"the id of a tool call is text of 1 to {CALL_ID_BYTES_MAX} bytes without control characters and '/', not "
            f"{str(given)[:80]!r}"
        )


def _node(type: str) -> Node:
    """A call, before it has a name."""
    return Node(
        name="", type=type, after=(), version="", bind=None, bind_names=(), when=None, when_names=(), retry=None,
        timeout_s=None,
    )  # fmt: skip


def _not_admitted(name: str, call_id: str, code: str, message: str) -> ExternalResult:
    """What the model is told of a call that was not made."""
    return ExternalResult(call_id=call_id, source=name, status="failed", error=ResultError(code=code, message=message))


def _cancel_all(outcomes: Iterable[asyncio.Future[Any]]) -> None:
    for outcome in outcomes:
        outcome.cancel()


def _look_at(outcome: asyncio.Future[Any]) -> None:
    """Whoever asked for it may be gone."""
    if not outcome.cancelled():
        outcome.exception()
