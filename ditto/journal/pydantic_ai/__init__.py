"""Pydantic AI: an ordinary agent becomes durable by one added line.

    Agent(model, tools=[…], capabilities=[DittoDurability(runtime, namespace="report-v1", thread=…, turn=…)])

Needs the extra `ditto-runtime[pydantic-ai]`. The rest of ditto never imports this package.

Of the framework's two public seams, `pydantic_ai.durable_exec` is for engines that run a request as a unit and give
out its events when the unit is done; the hooks of a capability let text through as it comes, and see a tool's call
where its effect is made. So this uses the hooks: `wrap_run`, `get_wrapper_model`, `get_wrapper_toolset`.
"""

from __future__ import annotations

try:
    import pydantic_ai as _pydantic_ai  # noqa: F401
except ImportError as error:
    if error.name != "pydantic_ai":
        raise
    raise ImportError(
        "ditto.journal.pydantic_ai needs Pydantic AI, which is not installed: pip install 'ditto-runtime[pydantic-ai]'",
        name=error.name,
    ) from error

from ditto.journal.pydantic_ai.bindings import PydanticBindings, bind
from ditto.journal.pydantic_ai.durability import DittoDurability
from ditto.journal.pydantic_ai.toolset import current_step

__all__ = ["DittoDurability", "PydanticBindings", "bind", "current_step"]
