"""Schemas of tools, compiled once: a pydantic model, or a JSON Schema of draft 2020-12 without remote references.

`compile_schema` gives a checker: data in, validated value out (an instance of the model, or the data itself);
`SchemaViolation` otherwise.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, TypeAlias

from pydantic import BaseModel, ValidationError

from ditto import DefinitionError

Check: TypeAlias = Callable[[Any], Any]

_PROBLEMS_MAX: Final = 5
_PROBLEM_CHARS_MAX: Final = 200


class SchemaViolation(Exception):
    """The data does not follow the schema; the text names each field and what is wrong with it."""


def compile_schema(schema: type[BaseModel] | dict[str, Any], *, owner: str) -> Check:
    """The checker for a schema. DefinitionError, naming `owner`, if it is no valid schema."""
    if isinstance(schema, type) and issubclass(schema, BaseModel):
        return _model_check(schema)
    if isinstance(schema, dict):
        return _json_schema_check(copy.deepcopy(schema), owner=owner)
    raise DefinitionError(f"{owner} must be a pydantic model or a JSON Schema (a dict), not {schema!r}")


def _model_check(model: type[BaseModel]) -> Check:
    def check(data: Any) -> Any:
        try:
            return model.model_validate(data)
        except ValidationError as error:
            problems = error.errors(include_url=False, include_context=False, include_input=False)
            raise SchemaViolation(_sentence((each["loc"], each["msg"]) for each in problems)) from None

    return check


def _json_schema_check(schema: dict[str, Any], *, owner: str) -> Check:
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    remote = next(_remote_references(schema), None)
    if remote is not None:
        raise DefinitionError(f"{owner}: the reference {remote!r} is remote; put what it names under $defs")
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        raise DefinitionError(f"{owner}: no valid JSON Schema at {error.json_path}: {_cut(error.message)}") from None
    # An empty registry: nothing is ever fetched.
    validator = Draft202012Validator(schema, registry=Registry())

    def check(data: Any) -> Any:
        try:
            problems = sorted(validator.iter_errors(data), key=lambda each: each.json_path)
        except Unresolvable as error:
            raise DefinitionError(f"{owner}: the reference {error.ref!r} leads nowhere") from None
        if problems:
            raise SchemaViolation(_sentence((each.absolute_path, each.message) for each in problems))
        return data

    return check


def _remote_references(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        for word in ("$ref", "$dynamicRef"):
            target = schema.get(word)
            if isinstance(target, str) and not target.startswith("#"):
                yield target
    for each in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from _remote_references(each)


def _sentence(problems: Iterable[tuple[Iterable[Any], str]]) -> str:
    texts = []
    for path, problem in problems:
        field = ".".join(map(str, path))
        texts.append(_cut(f"{field}: {problem}" if field else problem))
    more = len(texts) - _PROBLEMS_MAX
    return "; ".join(texts[:_PROBLEMS_MAX]) + (f"; and {more} more" if more > 0 else "")


def _cut(text: str) -> str:
    return text if len(text) <= _PROBLEM_CHARS_MAX else text[: _PROBLEM_CHARS_MAX - 1] + "…"
