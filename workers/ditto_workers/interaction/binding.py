"""One tool, made ready once: how its handler is called, its compiled schemas, and the Action of each call.

Whatever is wrong with a call is found while it is planned, before anything is admitted: those are exceptions. Once
the tool has begun, a definite failure is a result.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Final

from ditto import (
    Action,
    Approval,
    DefinitionError,
    EffectClass,
    EffectRejected,
    ExternalResult,
    SandboxDenied,
    StepContext,
    Tool,
    ToolError,
)
from ditto.contracts import ToolInput
from ditto.effects import effect_of
from ditto.signatures import is_async, require_sync, takes_context
from ditto.worker import as_data
from ditto_workers.interaction.results import to_failed_result, to_result
from ditto_workers.interaction.schemas import SchemaViolation, compile_schema

KEY_BYTES_MAX: Final = 1024


class BoundTool:
    """A tool whose schemas and signature were checked when the worker was created. Raises DefinitionError."""

    def __init__(self, tool: Tool) -> None:
        self.tool = tool
        self.owner = f"tool {tool.name}"
        self._check_arguments = compile_schema(tool.input_schema, owner=f"{self.owner}: input_schema")
        self.check_output = (
            None
            if tool.output_schema is None
            else compile_schema(tool.output_schema, owner=f"{self.owner}: output_schema")
        )
        self.wants_context = takes_context(tool.handler, owner=self.owner)
        self._is_async = is_async(tool.handler)
        if tool.effect == EffectClass.LOCAL:
            self._require_plain_handler()

    def plan(self, request: ToolInput) -> Action:
        """The Action of one call. Raises ToolError with code `tool.arguments` if the arguments fail the schema."""
        tool = self.tool
        arguments = self._validated(request.arguments)
        effect = effect_of(tool.effect, arguments, owner=self.owner)
        if effect is EffectClass.LOCAL:
            self._require_plain_handler()
        call = _Call(self, request, arguments, effect)
        return Action(
            label=self.owner,
            effect=effect,
            call=call.make_async if self._is_async else call.make,
            is_async=self._is_async,
            arguments=arguments,
            recorded=lambda: {"tool": tool.name, "arguments": as_data(arguments)},
            key=self._key(arguments),
            lookup=self._look_up_of(call),
            absence_is_final=tool.absence_is_final,
            absence_grace_s=tool.absence_grace_s,
            record=tool.record,
            database=tool.database,
            timeout_s=tool.timeout_s,
            result=call.result,
            failure=call.failure,
            output=ExternalResult,
            approval=self._approval(call, arguments),
        )

    def _approval(self, call: _Call, arguments: Any) -> Approval | None:
        """The yes that a call with these arguments needs. Raises DefinitionError if the tool's rule gives no bool."""
        needed = self.tool.requires_approval
        if callable(needed):
            needed = needed(copy.deepcopy(arguments))
        if not isinstance(needed, bool):
            raise DefinitionError(f"{self.owner}: requires_approval(arguments) must give a bool, not {needed!r}")
        if not needed:
            return None
        return Approval(
            name=self.tool.name,
            shown=lambda: {"tool": self.tool.name, "arguments": _sorted(as_data(arguments))},
            expires_s=self.tool.approval_expires_s,
            denied=call.denied,
        )

    def _look_up_of(self, call: _Call) -> Callable[[str, StepContext], Any] | None:
        if self.tool.lookup is None:
            return None
        return call.look_up_async if is_async(self.tool.lookup) else call.look_up

    def _require_plain_handler(self) -> None:
        require_sync(self.tool.handler, owner=self.owner, role="a handler of effect local")

    def _validated(self, arguments: dict[str, Any]) -> Any:
        try:
            return self._check_arguments(arguments)
        except SchemaViolation as error:
            raise ToolError(
                f"{self.owner} was not called, its arguments do not follow its schema: {error}", code="tool.arguments"
            ) from None

    def _key(self, arguments: Any) -> str | None:
        if self.tool.key is None:
            return None
        key: Any = self.tool.key(arguments)
        if not isinstance(key, str) or not 0 < len(key.encode("utf-8", "replace")) <= KEY_BYTES_MAX:
            raise DefinitionError(f"{self.owner}: key(arguments) must give a text of 1 to {KEY_BYTES_MAX} bytes")
        return key


class _Call:
    """One call of a tool: what its Action does."""

    def __init__(self, bound: BoundTool, request: ToolInput, arguments: Any, effect: EffectClass) -> None:
        self._bound = bound
        self._request = request
        self._arguments = arguments
        self._effect = effect
        self._denied: SandboxDenied | None = None

    def make(self, ctx: StepContext) -> Any:
        self._ask_sandbox(ctx)
        # A copy: a handler that changes its arguments must not change what the look-up and the record are told.
        arguments = copy.deepcopy(self._arguments)
        handler = self._bound.tool.handler
        return handler(arguments, ctx) if self._bound.wants_context else handler(arguments)

    async def make_async(self, ctx: StepContext) -> Any:
        return await self.make(ctx)

    def look_up(self, key: str, ctx: StepContext) -> Any:
        self._ask_sandbox(ctx)
        assert self._bound.tool.lookup is not None
        return self._bound.tool.lookup(key, copy.deepcopy(self._arguments), ctx)

    async def look_up_async(self, key: str, ctx: StepContext) -> Any:
        return await self.look_up(key, ctx)

    def result(self, value: Any) -> ExternalResult:
        return to_result(
            value, source=self._bound.tool.name, call_id=self._request.call_id, check=self._bound.check_output
        )

    def failure(self, error: Exception) -> ExternalResult | None:
        if error is self._denied:
            return None  # The tool has not begun: a mistake of the configuration, not an answer from outside.
        return to_failed_result(error, effect=self._effect, source=self._bound.tool.name, call_id=self._request.call_id)

    def denied(self, error: EffectRejected) -> ExternalResult | None:
        # Nothing has begun, so there is a result for every effect class.
        return to_failed_result(
            error, effect=EffectClass.PURE, source=self._bound.tool.name, call_id=self._request.call_id
        )

    def _ask_sandbox(self, ctx: StepContext) -> None:
        try:
            ctx.sandbox.allow_tool(self._bound.tool.name)
        except SandboxDenied as denied:
            self._denied = denied
            raise


def _sorted(value: Any) -> Any:
    """JSON data with the keys of its objects in order: the same call is shown as the same text."""
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value)}
    return [_sorted(each) for each in value] if isinstance(value, list | tuple) else value
