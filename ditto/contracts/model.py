"""The name of a model: which provider, and what the provider calls it.

It is part of a run's identity, so it holds no address and no credential. Where the provider is reached and with
which key is `ditto.config.Endpoint`.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, StringConstraints, ValidationError, field_validator, model_validator

from ditto.complaints import complaints, place_text
from ditto.errors import ConfigError

PROVIDER_PATTERN: Final = r"^[a-z][a-z0-9_]{0,63}$"
"""What a provider may be called: the upper-cased name is the prefix of its environment variables."""

_FORM: Final = "write it as provider/model-name, for example openai/gpt-5-mini"


class ModelRef(BaseModel):
    """A model by provider and name, for example `ModelRef("openai", "gpt-5-mini")`.

    `provider` is a lower-case word of 1 to 64 characters, `name` has 1 to 256 printable characters and may hold
    slashes. Where a contract has a field of this type, the text `provider/name` is accepted too. A wrong one raises
    pydantic's ValidationError here, and ConfigError from `parse`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, hide_input_in_errors=True)

    provider: Annotated[str, StringConstraints(max_length=64)]
    name: Annotated[str, StringConstraints(min_length=1, max_length=256)]

    def __init__(self, provider: str, name: str) -> None:
        super().__init__(provider=provider, name=name)

    # Lets pydantic validate a nested ModelRef by its fields, as if there were no `__init__` of our own.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @classmethod
    def parse(cls, text: str) -> ModelRef:
        """The model that `provider/name` names; ConfigError if the text names none. The text is not echoed."""
        problem = ""
        try:
            return cls.model_validate(text)
        except ValidationError as error:
            problem = "; ".join(place_text(path, text) for path, text in complaints(error))
        raise ConfigError(f"this is no model: {problem}")

    @property
    def key(self) -> str:
        """`provider/name`: the model's part of a request's identity."""
        return f"{self.provider}/{self.name}"

    def __str__(self) -> str:
        return self.key

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        provider, slash, name = value.partition("/")
        if not (provider and slash and name):
            raise ValueError(_FORM)
        return {"provider": provider, "name": name}

    @field_validator("provider")
    @classmethod
    def _check_provider(cls, provider: str) -> str:
        if re.fullmatch(PROVIDER_PATTERN, provider) is None:
            raise ValueError(f"a provider is a lower-case word of letters, digits and _; {_FORM}")
        return provider

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if not name.isprintable() or name != name.strip():
            raise ValueError("a model's name has no control characters, and no space at its ends")
        return name
