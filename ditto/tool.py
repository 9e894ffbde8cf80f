"""Tools: functions that act outside the workflow, declared with what they do to the world."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from pydantic import BaseModel

from ditto.contracts import Json
from ditto.contracts.contract import refuse_secrets
from ditto.effects import EffectClass, EffectDeclaration, check_effect
from ditto.errors import DefinitionError
from ditto.signatures import require_sync, takes_context
from ditto.waits import check_seconds
from ditto.worker import Record

Schema: TypeAlias = "type[BaseModel] | dict[str, Json]"
"""A pydantic model, or a JSON Schema (draft 2020-12) without remote references."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,127}")


@dataclass(frozen=True)
class Tool:
    """One tool. Run by `INTERACTION.ACT.TOOL`; its arguments are checked before anything is admitted.

    - `handler(arguments)` or `handler(arguments, ctx)`: `arguments` is an instance of the model given as
      `input_schema`, or a dict that satisfies the JSON Schema. `async def` runs on the event loop, `def` in a
      thread, unless the effect is `pure` or `local`. What it returns becomes an ExternalResult.
    - `effect`: a class, or a pure function from the arguments to one. **A tool that declares none is `write`.**
    - `key(arguments)`: the operation's stable key, where the other side has names of its own.
    - `lookup(key, arguments, ctx)`: finds a lost outcome; answers with a LookupResult. `absence_is_final` says that
      an unused key proves that nothing was or will be done, `absence_grace_s` after how long.
    - `record(connection, outcome)`: a plain function, run in the transaction that commits the outcome.
    - `database`: for `local` tools, the file they belong to; a runtime on another store refuses them at start.
    - `timeout_s`: the tool's own deadline.
    - `requires_approval`: True, or a pure function from the arguments to a bool: the call waits for a person's yes to
      exactly these arguments. Rejected, or without a decision for `approval_expires_s`, it is not made, and the result
      is `failed` with the code `approval.rejected` or `approval.expired`.

    A handler says that nothing happened by EffectNotMade, that the other side refused for good by EffectRejected,
    and reports a classified failure by ToolError. Anything else that a `write` handler raises leaves the outcome
    unknown. Raises DefinitionError.
    """

    name: str
    handler: Callable[..., Any]
    input_schema: Schema
    output_schema: Schema | None = None
    effect: EffectDeclaration = EffectClass.WRITE
    key: Callable[[Any], str] | None = None
    lookup: Callable[..., Any] | None = None
    absence_is_final: bool = False
    absence_grace_s: float = 0.0
    record: Record | None = None
    database: Path | None = None
    timeout_s: float | None = None
    description: str = ""
    requires_approval: bool | Callable[[Any], bool] = False
    approval_expires_s: float | None = None

    def __post_init__(self) -> None:
        owner = f"tool {self.name}"
        if not _NAME.fullmatch(self.name):
            raise DefinitionError(
                f"tool {self.name!r}: a name is 1 to 128 of letters, digits, '_', '-' and '.', first no digit"
            )
        for schema in (self.input_schema, self.output_schema):
            if isinstance(schema, type):
                refuse_secrets(schema, owner=owner)
        check_effect(self.effect, owner=owner)
        takes_context(self.handler, owner=owner)
        require_sync(self.key, owner=owner, role="key")
        require_sync(self.record, owner=owner, role="record")
        if not isinstance(self.requires_approval, bool):
            if not callable(self.requires_approval):
                raise DefinitionError(f"{owner}: requires_approval must be a bool or a function to one")
            require_sync(self.requires_approval, owner=owner, role="requires_approval")
        if self.approval_expires_s is not None:
            check_seconds(self.approval_expires_s, owner=f"{owner}: approval_expires_s")
        if self.absence_grace_s < 0:
            raise DefinitionError(f"{owner}: absence_grace_s must not be negative")
        if self.timeout_s is not None and self.timeout_s <= 0:
            raise DefinitionError(f"{owner}: timeout_s must be more than 0")
        if self.database is not None:
            object.__setattr__(self, "database", Path(self.database).resolve())
