"""The profile: all that the workflows know about a domain, as data. The adapter's `recovery_read` returns it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Self

from pydantic import Field, model_validator

from ditto import Contract, Json
from ditto.recovery.job import Stage

_TAKEN_KINDS: Final = frozenset({"prepare", "session"})
"""Names of runs under a job that are not operations."""


class PlannedOperation(Contract):
    """One operation: the stage that its confirmation brings, and the kind that undoes it.

    Without `undo` there is nothing to take back when a later operation is rejected.
    """

    kind: str = Field(pattern="^[a-z][a-z0-9_]{0,31}$")
    stage: str = Field(pattern="^[a-z][a-z0-9-]{0,31}$")
    undo: str | None = Field(default=None, pattern="^[a-z][a-z0-9_]{0,31}$")


class Profile(Contract):
    """What a job is about.

    - `payload`: the JSON Schema (draft 2020-12, an object) of what the model extracts; `prompt`: how it is asked.
    - `sources`: the read-only catalogs, in the order in which they are tried.
    - `operations`: in their order. The last one's stage is `completed`, the others have stages of their own.
    - `answer`: the fields of the payload that the answer of a session repeats, beside the stage.
    """

    payload: dict[str, Json]
    prompt: str = Field(min_length=1)
    sources: tuple[str, ...] = Field(min_length=1)
    operations: tuple[PlannedOperation, ...] = Field(min_length=1)
    answer: tuple[str, ...] = ()

    def kinds(self) -> Iterator[str]:
        """Every kind of operation, those that undo included."""
        for planned in self.operations:
            yield planned.kind
            if planned.undo is not None:
                yield planned.undo

    def planned(self, kind: str) -> PlannedOperation | None:
        """The operation of this kind; None for one that undoes."""
        return next((each for each in self.operations if each.kind == kind), None)

    def undone_by(self, kind: str) -> PlannedOperation | None:
        """The operation that this kind undoes; None for one that undoes nothing."""
        return next((each for each in self.operations if each.undo == kind), None)

    @property
    def answer_schema(self) -> dict[str, Json]:
        """The JSON Schema of a session's answer: exactly the fields of `answer`, and the stage."""
        properties = self.payload.get("properties")
        assert isinstance(properties, dict)
        fields: dict[str, Json] = {name: properties[name] for name in self.answer}
        fields["stage"] = {"type": "string"}
        required: list[Json] = list(fields)
        return {"type": "object", "properties": fields, "required": required, "additionalProperties": False}

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._check_payload()
        kinds = list(self.kinds())
        if len(set(kinds)) != len(kinds) or _TAKEN_KINDS.intersection(kinds):
            raise ValueError(f"kinds are unique, and none of {', '.join(sorted(_TAKEN_KINDS))}")
        *stages, last = (each.stage for each in self.operations)
        if last != Stage.COMPLETED:
            raise ValueError(f"the stage of the last operation is {Stage.COMPLETED}, not {last}")
        if len(set(stages)) != len(stages) or set(stages).intersection(Stage):
            raise ValueError("the stages of the operations before the last are unique and their own")
        if len(set(self.sources)) != len(self.sources):
            raise ValueError("sources are unique")
        return self

    def _check_payload(self) -> None:
        from jsonschema import Draft202012Validator
        from jsonschema.exceptions import SchemaError

        try:
            Draft202012Validator.check_schema(self.payload)
        except SchemaError as error:
            raise ValueError(f"payload is no JSON Schema: {error.message}") from None
        properties = self.payload.get("properties")
        if self.payload.get("type") != "object" or not isinstance(properties, dict):
            raise ValueError("payload is the JSON Schema of an object with properties")
        if unknown := [name for name in self.answer if name not in properties or name == "stage"]:
            raise ValueError(f"answer names {', '.join(unknown)}, which the payload does not have")
