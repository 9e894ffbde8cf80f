"""What every contract shares: data only, unknown fields refused, immutable once validated."""

from __future__ import annotations

from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, JsonValue, SecretBytes, SecretStr

from ditto.errors import DefinitionError

Json = JsonValue
"""Any JSON value: None, bool, int, float, str, list or dict with text keys."""


def refuse_secrets(model: type[BaseModel], *, owner: str) -> None:
    """Refuse a model with a SecretStr or SecretBytes anywhere in it: what goes through a contract is stored.

    Raises DefinitionError with the field's path.
    """
    found = _find_secret(model, model.__name__, frozenset())
    if found is not None:
        raise DefinitionError(
            f"{owner}: {found} is a secret, and what goes through a contract is stored; "
            "read credentials from ctx.config or the environment inside the handler"
        )


def _find_secret(annotation: Any, path: str, seen: frozenset[Any]) -> str | None:
    if annotation in (SecretStr, SecretBytes):
        return path
    if isinstance(annotation, type) and issubclass(annotation, BaseModel) and annotation not in seen:
        fields = annotation.model_fields.items()
        found = (_find_secret(field.annotation, f"{path}.{name}", seen | {annotation}) for name, field in fields)
    else:
        found = (_find_secret(each, path, seen) for each in get_args(annotation))
    return next((each for each in found if each is not None), None)


class Contract(BaseModel):
    """Base of node inputs and outputs: frozen, unknown fields refused, NaN refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)
