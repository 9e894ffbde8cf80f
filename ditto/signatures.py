"""How the functions that users hand to ditto are called: checked once, when a workflow or worker is defined."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from ditto.errors import DefinitionError

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def named_parameters(function: Callable[..., Any], *, allowed: Sequence[str], owner: str, role: str) -> tuple[str, ...]:
    """The names by which `function` takes its values, each one of `allowed`; a default value is left to it.

    `**values` takes all that it does not name, but for `ctx`. `owner` and `role` are named in the DefinitionError that
    refuses another name, or `*args`.
    """
    if not callable(function):
        raise DefinitionError(f"{owner}: {role} must be a function, not {type(function).__name__}")
    names: list[str] = []
    for parameter in _parameters(function, owner=owner, role=role):
        if parameter.kind is parameter.VAR_KEYWORD:
            names += [each for each in allowed if each not in names and each != "ctx"]
            continue
        if parameter.kind not in _NAMED:
            raise DefinitionError(
                f"{owner}: {role} takes its values by name; {parameter} cannot be bound. "
                f"Name what it needs out of: {', '.join(allowed)}"
            )
        if parameter.name in allowed:
            names.append(parameter.name)
        elif parameter.default is parameter.empty:
            raise DefinitionError(
                f"{owner}: {role} asks for {parameter.name!r}, which it cannot get. It may name: {', '.join(allowed)}"
            )
    return tuple(names)


def takes_context(function: Callable[..., Any], *, owner: str, first: str = "arguments") -> bool:
    """Whether a handler is written `handler(arguments, ctx)` rather than `handler(arguments)`."""
    if not callable(function):
        raise DefinitionError(f"{owner}: the handler must be a function, not {type(function).__name__}")
    positional = [p for p in _parameters(function, owner=owner, role="handler") if p.kind is not p.KEYWORD_ONLY]
    count = len([p for p in positional if p.kind is not p.VAR_POSITIONAL])
    if count == 1:
        return False
    if count == 2:
        return True
    raise DefinitionError(f"{owner}: the handler must be written handler({first}) or handler({first}, ctx)")


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling `function` gives an awaitable: an `async def`, also behind partial or a `__call__`."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def require_sync(function: Callable[..., Any] | None, *, owner: str, role: str) -> None:
    """Refuse an `async def` where ditto calls a plain function: a pure one, or one inside a transaction."""
    if function is not None and is_async(function):
        raise DefinitionError(f"{owner}: {role} must be a plain function, not async")


def _parameters(function: Callable[..., Any], *, owner: str, role: str) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise DefinitionError(f"{owner}: the signature of {role} cannot be read ({error}); wrap it in a def") from None
