"""Effects: what a function tool of Pydantic AI's does to the world, declared in its metadata, as an Action."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pydantic_ai import ApprovalRequired, CallDeferred, ModelRetry, ToolFailed
from pydantic_ai.tools import ToolDefinition

from ditto import (
    Action,
    DefinitionError,
    DittoError,
    EffectClass,
    EffectNotMade,
    EffectRejected,
    StepContext,
    StepError,
    ToolError,
)
from ditto.journal.pydantic_ai.records import write_result

METADATA_KEY: Final = "ditto"

SIGNALS: Final = (ModelRetry, ToolFailed, ApprovalRequired, CallDeferred)
"""What a tool tells the framework by raising it: a definite value, not an unknown outcome."""

NEVER_ENDED: Final = "step.never_ended"
"""The code of a repeatable call in which the process died time and again."""

_SAID: Final = (ToolError, EffectRejected, EffectNotMade)


class WithinFailed(Exception):
    """Another run, which a tool started, did not complete."""


@dataclass(frozen=True, slots=True)
class ToolEffect:
    """The declaration `metadata={"ditto": {…}}` of a tool; the words are those of `ditto.Tool`.

    A tool that declares none is a `write`. Raises DefinitionError for a wrong one.
    """

    effect: Any = EffectClass.WRITE
    key: Callable[[dict[str, Any]], str] | None = None
    lookup: Callable[[str, dict[str, Any], StepContext], Any] | None = None
    absence_is_final: bool = False
    absence_grace_s: float = 0.0

    @classmethod
    def of(cls, tool: ToolDefinition) -> ToolEffect:
        """What the tool declares."""
        declared: Any = (tool.metadata or {}).get(METADATA_KEY, {})
        if not isinstance(declared, Mapping) or not set(declared) <= set(cls.__slots__):
            raise DefinitionError(
                f'tool {tool.name}: metadata["{METADATA_KEY}"] takes {", ".join(cls.__slots__)}; '
                'for example {"effect": "read"}'
            )
        return cls(**declared)

    def action(self, name: str, arguments: dict[str, Any], attempt: Callable[[StepContext], Awaitable[Any]]) -> Action:
        """One call, made by `attempt`, which raises SIGNALS or returns what the tool returned."""

        async def call(step: StepContext) -> Any:
            try:
                return await attempt(step)
            except SIGNALS as signal:
                if isinstance(signal, ModelRetry) and isinstance(signal.__context__, TimeoutError) and not effect.held:
                    # The framework cut it short, and would let the model call it again.
                    raise TimeoutError(f"tool {name} was cut short: {signal.message}") from signal
                return signal
            except DittoError as error:
                if error.run_id is None:
                    raise
                # It says what another run came to, and nothing about what else this tool did.
                raise WithinFailed(f"{type(error).__name__}: {error.message}") from error

        effect = self._effect_of(name, arguments)
        return Action(
            label=f"tool {name}",
            effect=effect,
            call=call,
            is_async=True,
            arguments=arguments,
            recorded=lambda: arguments,
            key=None if self.key is None else self.key(arguments),
            lookup=self._lookup_for(arguments),
            absence_is_final=self.absence_is_final,
            absence_grace_s=self.absence_grace_s,
            result=write_result,
            failure=_told,
        )

    def _effect_of(self, name: str, arguments: dict[str, Any]) -> EffectClass:
        declared = self.effect(arguments) if callable(self.effect) else self.effect
        allowed = [each for each in EffectClass if each not in (EffectClass.INFER, EffectClass.LOCAL)]
        if declared not in allowed:
            raise DefinitionError(f"tool {name}: effect {declared!r} is none of {', '.join(allowed)}")
        return EffectClass(declared)

    def _lookup_for(self, arguments: dict[str, Any]) -> Callable[[str, StepContext], Any] | None:
        if self.lookup is None:
            return None
        asked = self.lookup
        return lambda key, step: asked(key, arguments, step)


def _told(error: Exception) -> Any | None:
    """What the model is told of a definite failure; None for one that fails the run instead."""
    if isinstance(error, _SAID) or (isinstance(error, StepError) and error.code == NEVER_ENDED):
        return write_result(ToolFailed(error.message))
    return None
