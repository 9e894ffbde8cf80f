"""The configuration: what `ditto.yaml` may hold, its defaults and ranges, and what the environment adds.

Owns the schema and `load_config`. The strict reading of the YAML text is `ditto.config_yaml`. Behaviour stands in the
file; credentials and addresses come from the environment and appear in no message, no repr and no dump. A `Config` is
a snapshot: once built it does not change, and `Config()` with nothing in it is complete. Start with `load_config`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Self, TypeVar
from urllib.parse import unquote_plus

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    SecretStr,
    StringConstraints,
    ValidationError,
    WrapSerializer,
    field_serializer,
    field_validator,
    model_validator,
)

from ditto.complaints import complaints, place_text
from ditto.contracts.model import PROVIDER_PATTERN, ModelRef
from ditto.errors import ConfigError
from ditto.sandbox import parse_origin, split_url
from ditto.secrets import SECRET_CHARS_MIN

KIB: Final = 1024
MIB: Final = 1024 * KIB
HOUR_S: Final = 3600.0
APP_DEPTH_MAX: Final = 64

_HEADER_CHARS: Final = frozenset("!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
_QUERY_MARK: Final = "?[redacted]"


def _text(value: str) -> str:
    if not value.isprintable() or value != value.strip():
        raise ValueError("the text has no control characters, and no space at its ends")
    return value


def _entry(value: str) -> str:
    if "*" in value:
        raise ValueError("there are no wildcards; list each one")
    return value


def _path(value: str) -> str:
    if value.startswith("~"):
        raise ValueError("write the path in full; ~ is not expanded")
    return value


def _origin(value: str) -> str:
    try:
        parse_origin(value)
    except ConfigError as error:
        raise ValueError(error.message) from None
    return value


def _frozen(value: Any, depth: int = 0) -> Any:
    """JSON data as read-only data: mappings stay mappings, lists become tuples."""
    if depth > APP_DEPTH_MAX:
        raise ValueError(f"the data is nested deeper than {APP_DEPTH_MAX} levels")
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise ValueError("a key is a text")
        return MappingProxyType({key: _frozen(item, depth + 1) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return tuple(_frozen(item, depth + 1) for item in value)
    if value is None or type(value) in (str, bool, int) or (type(value) is float and math.isfinite(value)):
        return value
    raise ValueError("the data is JSON: mappings, lists, texts, finite numbers, true, false and null")


def _thawed(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _thawed(item) for key, item in value.items()}
    return [_thawed(item) for item in value] if isinstance(value, tuple) else value


_T = TypeVar("_T")
_Text = Annotated[str, StringConstraints(min_length=1, max_length=4096), AfterValidator(_text)]
_PathText = Annotated[_Text, AfterValidator(_path)]
_Names = Annotated[tuple[Annotated[_Text, AfterValidator(_entry)], ...], Field(strict=False, max_length=1000)]
_Paths = Annotated[
    tuple[Annotated[_PathText, AfterValidator(_entry)], ...],
    Field(strict=False, max_length=1000),
]
_Origins = Annotated[
    tuple[Annotated[_Text, AfterValidator(_entry), AfterValidator(_origin)], ...],
    Field(strict=False, max_length=1000),
]
_ProviderName = Annotated[str, StringConstraints(pattern=PROVIDER_PATTERN)]
_plain_dict = BeforeValidator(lambda value: dict(value) if isinstance(value, Mapping) else value)
_read_only = AfterValidator(MappingProxyType)
_as_dict = WrapSerializer(lambda value, serialize: serialize(dict(value)))
_ByName = Annotated[Mapping[str, _T], _plain_dict, _read_only, _as_dict]
_ByProvider = Annotated[Mapping[_ProviderName, _T], Field(max_length=100), _plain_dict, _read_only, _as_dict]

_NOTHING: Final[Any] = Field(default_factory=lambda: MappingProxyType({}))


class _Section(BaseModel):
    """One section: unknown keys and wrong types are refused with ConfigError, and nothing changes once it is built."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, hide_input_in_errors=True, allow_inf_nan=False)

    if not TYPE_CHECKING:

        def __init__(self, **data: Any) -> None:
            problem = ""
            try:
                super().__init__(**data)
            except ValidationError as error:
                found = (place_text(path, text) for path, text in complaints(error))
                problem = "\n".join(f"{type(self).__name__}: {text}" for text in found)
            if problem:  # raised here, so that the values are not carried along as the error's context
                raise ConfigError(problem)

        # Lets pydantic validate a nested section by its fields, so that one error names every path from the top.
        __init__.__pydantic_base_init__ = True

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        return self  # nothing in it can change


class RuntimeConfig(_Section):
    """How runs are driven."""

    concurrency: Annotated[int, Field(ge=1, le=1024)] = 16
    """Running steps in one run, at most; 1 to 1024."""

    threads: Annotated[int, Field(ge=1, le=256)] = 8
    """Threads for the plain functions of one worker, at most; 1 to 256."""

    step_timeout_s: Annotated[float, Field(gt=0, le=7 * 24 * HOUR_S)] | None = None
    """Deadline of a step that sets none, in seconds; up to 7 days. None: no deadline."""

    max_iterations: Annotated[int, Field(ge=1, le=1_000_000)] = 1000
    """The most that a Loop may set as its own limit; one that asks for more is refused at start."""

    value_max_bytes: Annotated[int, Field(ge=KIB, le=64 * MIB)] = 8 * MIB
    """Size of the largest value that is stored, as JSON; 1 KiB to 64 MiB."""

    grace_s: Annotated[float, Field(ge=0, le=HOUR_S)] = 10.0
    """How long closing waits for what still runs, in seconds; up to an hour."""

    on_unknown_model_call: Literal["stop", "ask_again"] = "stop"
    """What follows a model call whose answer was lost: `stop` waits for a decision, `ask_again` may pay twice."""


class StoreConfig(_Section):
    """Where runs are kept."""

    path: _PathText = ".ditto/ditto.db"
    """The SQLite file; a relative path starts at the current directory. `DITTO_STORE` overrides it."""

    synchronous: Literal["full", "normal"] = "full"
    """`full`: an outcome survives a power cut. `normal`: it survives the process, and the last ones may be lost with
    the machine."""

    busy_timeout_s: Annotated[float, Field(gt=0, le=HOUR_S)] = 10.0
    """How long another process's lock is waited for, in seconds; up to an hour."""

    receipts: bool = True
    """Whether the outcomes of effects, of model calls and of decisions get signed receipts."""


class ContextWorkerConfig(_Section):
    """Bounds of the context worker."""

    items_max: Annotated[int, Field(ge=1, le=1_000_000)] = 1000
    """Items in one context, at most."""

    bytes_max: Annotated[int, Field(ge=KIB, le=64 * MIB)] = 1 * MIB
    """Size of one context, as JSON; 1 KiB to 64 MiB."""


class InferWorkerConfig(_Section):
    """Bounds of the infer worker."""

    concurrency: Annotated[int, Field(ge=1, le=1024)] = 8
    """Model calls at a time, at most."""

    response_max_bytes: Annotated[int, Field(ge=KIB, le=64 * MIB)] = 8 * MIB
    """Size of one answer of a provider; 1 KiB to 64 MiB."""


class InteractionWorkerConfig(_Section):
    """Bounds of the interaction worker."""

    concurrency: Annotated[int, Field(ge=1, le=1024)] = 16
    """Tool calls at a time, at most."""


class WorkersConfig(_Section):
    """The workers that come with ditto, each with its section."""

    context: ContextWorkerConfig = ContextWorkerConfig()
    infer: InferWorkerConfig = InferWorkerConfig()
    interaction: InteractionWorkerConfig = InteractionWorkerConfig()


class ProviderConfig(_Section):
    """How one provider behaves. Its address and its key come from the environment."""

    kind: Literal["openai"] = "openai"
    """The protocol: chat completions as OpenAI defined them."""

    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """The name under which a request limits its answer."""

    timeout_s: Annotated[float, Field(gt=0, le=24 * HOUR_S)] = 120.0
    """How long one call may take, in seconds; up to a day."""

    idle_timeout_s: Annotated[float, Field(gt=0, le=24 * HOUR_S)] = 60.0
    """How long a streamed answer that has begun may be silent, in seconds; up to a day. Any byte breaks the silence,
    a keep-alive comment too; `timeout_s` goes on regardless."""

    usage_in_stream: bool = True
    """Whether a streamed request asks for the usage at its end; false for servers that refuse the question."""

    reasoning_history: Literal["omit", "keep", "send"] = "omit"
    """The `reasoning_content` of earlier assistant messages, when they are sent again. `omit`: left out. `keep`: sent
    where the answer had one. `send`: sent with every assistant message, as an empty text where there was none. The
    journal keeps the reasoning in each case, so this may be changed at any time."""


class SandboxConfig(_Section):
    """What tools may touch. Everything is denied that is not listed; see `ditto.sandbox.Sandbox`."""

    tools: _Names = ()
    """Names of tools."""

    network: _Origins = ()
    """Origins, such as https://api.example.com."""

    mcp: _Names = ()
    """Names of MCP servers."""

    read: _Paths = ()
    """Files and directories that may be read; relative ones stay in the workspace."""

    write: _Paths = ()
    """Files and directories that may be written."""

    execute: _Names = ()
    """Programs, by name or absolute path."""


class Endpoint(_Section):
    """Where a provider is reached, and with what. Never in a file, an identity, a repr or a dump.

    `base_url` is http or https, without credentials and fragment, and is kept without its trailing slash. The values
    of its query are secret, as are `api_key` and the values of `headers`. What cannot be sent in a header is refused.
    """

    base_url: str
    api_key: SecretStr | None = None
    headers: _ByName[SecretStr] = _NOTHING

    @property
    def address(self) -> str:
        """The base URL without its query, for messages."""
        return self.base_url.partition("?")[0]

    def url(self, path: str) -> str:
        """The URL of a path below the base URL, such as `chat/completions`, with the base URL's query."""
        address, mark, query = self.base_url.partition("?")
        return f"{address}/{path.lstrip('/')}{mark}{query}"

    def secrets(self) -> Iterator[str]:
        """Every credential in it, of any length."""
        if self.api_key is not None:
            yield self.api_key.get_secret_value()
        yield from (value.get_secret_value() for value in self.headers.values())
        query = self.base_url.partition("?")[2]
        for parameter in filter(None, query.split("&")):
            name, _, value = parameter.partition("=")
            yield value or name
            yield unquote_plus(value or name)

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        yield "base_url", self._shown_base_url(self.base_url)
        yield "api_key", self.api_key
        yield "headers", dict(self.headers)

    @field_serializer("base_url")
    def _shown_base_url(self, base_url: str) -> str:
        return self.address + (_QUERY_MARK if "?" in base_url else "")

    @field_validator("base_url")
    @classmethod
    def _check_base_url(cls, text: str) -> str:
        parts = split_url(text)
        if isinstance(parts, str):
            raise ValueError(parts)
        if "#" in text:
            raise ValueError("it has a fragment")
        query = f"?{parts.query}" if parts.query else ""
        return f"{parts.scheme}://{parts.netloc.lower()}{parts.path.rstrip('/')}{query}"

    @field_validator("api_key")
    @classmethod
    def _check_api_key(cls, key: SecretStr | None) -> SecretStr | None:
        if key is not None:
            _check_header_value(key)
        return key

    @field_validator("headers")
    @classmethod
    def _check_headers(cls, headers: Mapping[str, SecretStr]) -> Mapping[str, SecretStr]:
        for name, value in headers.items():
            if not name or not _HEADER_CHARS.issuperset(name):
                raise ValueError("a header's name is letters, digits and dashes")
            _check_header_value(value)
        return headers


class Config(_Section):
    """The whole configuration. Every field has a default; `Config()` needs no file.

    `model` may be given as a ModelRef or as the text `provider/name`. `app` is any JSON mapping, read-only here (its
    lists come as tuples), and means nothing to ditto. `endpoints` maps a provider's name to where it is reached; it is
    filled from the environment by `load_config`, and left out of every dump. A provider that only `model` or
    `endpoints` mentions has the default ProviderConfig.
    """

    model: ModelRef | None = None
    runtime: RuntimeConfig = RuntimeConfig()
    store: StoreConfig = StoreConfig()
    app: Annotated[Mapping[str, Any], _plain_dict, AfterValidator(_frozen), PlainSerializer(_thawed)] = _NOTHING
    workers: WorkersConfig = WorkersConfig()
    providers: _ByProvider[ProviderConfig] = _NOTHING
    sandbox: SandboxConfig = SandboxConfig()
    endpoints: Annotated[_ByProvider[Endpoint], Field(exclude=True)] = _NOTHING

    def provider(self, name: str) -> ProviderConfig:
        """How the provider behaves; the defaults for one that is not configured."""
        return self.providers.get(name, ProviderConfig())

    def endpoint(self, provider: str) -> Endpoint:
        """Where the provider is reached; ConfigError, which names the variable to set, if that is not known."""
        try:
            return self.endpoints[provider]
        except KeyError:
            raise ConfigError(
                f"it is not known where the provider {provider!r} is reached: set {_variable(provider, 'BASE_URL')} in "
                f".env or the environment, and {_variable(provider, 'API_KEY')} if it wants a key; or pass "
                f"Config(endpoints={{{provider!r}: Endpoint(…)}})"
            ) from None

    def secrets(self) -> tuple[str, ...]:
        """Every credential of 8 characters or more: keys, header values, and query values of base URLs."""
        found = (secret for endpoint in self.endpoints.values() for secret in endpoint.secrets())
        return tuple(dict.fromkeys(secret for secret in found if len(secret) >= SECRET_CHARS_MIN))

    @model_validator(mode="after")
    def _add_providers(self) -> Config:
        mentioned = {*self.endpoints, *([self.model.provider] if self.model else [])}
        missing = {name: ProviderConfig() for name in sorted(mentioned - self.providers.keys())}
        if missing:
            object.__setattr__(self, "providers", MappingProxyType({**self.providers, **missing}))
        return self


def load_config(path: str | os.PathLike[str], env: Mapping[str, str] = os.environ) -> Config:
    """The configuration of one `ditto.yaml`, with what the environment adds.

    `env` is the only mapping that is read. Of it, `DITTO_MODEL` and `DITTO_STORE` override `model` and `store.path`;
    `{NAME}_BASE_URL` and `{NAME}_API_KEY`, the provider's name in upper case, give the endpoint of each provider that
    is listed or that the model names. An empty variable counts as unset. Nothing is expanded anywhere.

    Raises ConfigError, which names every problem that was found with file, line, column, key path and advice, or the
    variable. No message holds a value.
    """
    from ditto.config_yaml import read_config

    file = os.fspath(path)
    data, places = read_config(_read_file(file), file, Config)
    problem = ""
    try:
        return _with_environment(Config.model_validate(data), env)
    except ValidationError as error:
        problem = places.explain(error)
    raise ConfigError(problem)


def load_dotenv_file(path: str | os.PathLike[str]) -> dict[str, str]:
    """The variables of one `.env` file, as they are written in it; `{}` if there is no such file.

    Nothing is expanded, and the process's environment is neither read nor changed. The real environment wins:
    `load_config(path, {**load_dotenv_file(".env"), **os.environ})`. A line that cannot be read is refused with
    ConfigError, which names it.
    """
    from dotenv.parser import parse_stream

    file = Path(path)
    try:
        with file.open(encoding="utf-8-sig") as stream:
            bindings = list(parse_stream(stream))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: the file cannot be read: {type(error).__name__}") from None
    for binding in bindings:
        if binding.error:
            raise ConfigError(
                f"{file}:{binding.original.line}: this is not NAME=value; quote a value with quotes in it"
            )
    return {binding.key: binding.value for binding in bindings if binding.key and binding.value is not None}


def _with_environment(config: Config, env: Mapping[str, str]) -> Config:
    changes: dict[str, Any] = {}
    if text := _read_variable(env, "DITTO_MODEL"):
        with _naming("DITTO_MODEL"):
            changes["model"] = ModelRef.parse(text)
    if text := _read_variable(env, "DITTO_STORE"):
        with _naming("DITTO_STORE"):
            changes["store"] = StoreConfig(**{**dict(config.store), "path": text})
    model = changes.get("model", config.model)
    names = {*config.providers, model.provider} if model else config.providers.keys()
    changes["endpoints"] = {name: endpoint for name in sorted(names) if (endpoint := _endpoint(name, env))}
    return Config(**{**dict(config), **changes})


def _endpoint(provider: str, env: Mapping[str, str]) -> Endpoint | None:
    url_variable, key_variable = _variable(provider, "BASE_URL"), _variable(provider, "API_KEY")
    base_url, api_key = _read_variable(env, url_variable), _read_variable(env, key_variable)
    if not base_url:
        return None
    with _naming(url_variable):
        endpoint = Endpoint(base_url=base_url)
    with _naming(key_variable):
        return Endpoint(base_url=endpoint.base_url, api_key=SecretStr(api_key) if api_key else None)


def _variable(provider: str, what: str) -> str:
    return f"{provider.upper()}_{what}"


def _read_variable(env: Mapping[str, str], name: str) -> str:
    """The variable's value, exactly, or an empty text."""
    value = env.get(name, "")
    if "${" in value:
        raise ConfigError(
            f"{name}: this holds ${{…}}, and nothing is expanded here; set the variable to the value itself"
        )
    return value


@contextmanager
def _naming(variable: str) -> Iterator[None]:
    """A complaint about a value names the variable that it came from."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{variable}: {error.message}") from None


def _check_header_value(value: SecretStr) -> None:
    text = value.get_secret_value()
    if not text:
        raise ValueError("it is empty; leave it out")
    if not text.isascii() or not text.isprintable() or text != text.strip():
        raise ValueError(
            "it cannot be sent in a header: it has a line break, a space at its ends or a non-ASCII character"
        )


def _read_file(file: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except FileNotFoundError:
        raise ConfigError(f"{file}: there is no such file; start from ditto.yaml.example") from None
    except OSError as error:
        raise ConfigError(f"{file}: the file cannot be read: {error.strerror}") from None
