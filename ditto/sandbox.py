"""What a run's tools may touch: a cooperative guard, not confinement.

Owns the decision whether a tool, an origin, a path or a program is allowed, and one bounded HTTP request made under
it. It is consulted by ditto and by tools that mean well. It cannot hold code that does not ask: whoever needs that
runs the worker in a container, or under another user. Start with `Sandbox`; it denies whatever is not listed.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol
from urllib.parse import SplitResult, urljoin, urlsplit

from ditto.errors import ConfigError, LimitExceededError, SandboxDenied, StepError

if TYPE_CHECKING:
    import httpx

RESPONSE_MAX_BYTES: Final = 65536

_DEFAULT_PORTS: Final = {"http": 80, "https": 443}
_HOST_CHARS: Final = frozenset("abcdefghijklmnopqrstuvwxyz0123456789-._")
_NOT_MODIFIED: Final = 304
_KEPT_EXTENSIONS: Final = frozenset({"http_version", "reason_phrase"})
_DONE: Final = {"read": "read", "write": "written"}


class SandboxSettings(Protocol):
    """The lists that a configuration holds; `ditto.config.SandboxConfig` is one."""

    @property
    def tools(self) -> tuple[str, ...]: ...
    @property
    def network(self) -> tuple[str, ...]: ...
    @property
    def mcp(self) -> tuple[str, ...]: ...
    @property
    def read(self) -> tuple[str, ...]: ...
    @property
    def write(self) -> tuple[str, ...]: ...
    @property
    def execute(self) -> tuple[str, ...]: ...


@dataclass(frozen=True)
class Sandbox:
    """What is allowed; everything else is denied with `SandboxDenied`, before anything is attempted.

    - `tools`, `mcp`: names of tools and of MCP servers, compared exactly.
    - `network`: origins, `scheme://host` or `scheme://host:port`.
    - `read`, `write`: files and directories with all below them; relative ones start at `workspace` and stay in it,
      others are absolute. `write` does not imply `read`.
    - `execute`: programs, by the name or the absolute path under which they are called.
    - `workspace`: an existing or future directory; the current one by default.

    There are no wildcards. A wrong entry raises ConfigError here. Where the listed paths lead is settled here, once: a
    listed directory that is replaced by a symbolic link later leads nowhere.
    """

    tools: tuple[str, ...] = ()
    network: tuple[str, ...] = ()
    mcp: tuple[str, ...] = ()
    read: tuple[str | Path, ...] = ()
    write: tuple[str | Path, ...] = ()
    execute: tuple[str, ...] = ()
    workspace: Path = field(default_factory=Path.cwd)

    _origins: frozenset[str] = field(init=False, repr=False, compare=False)
    _read_roots: tuple[Path, ...] = field(init=False, repr=False, compare=False)
    _write_roots: tuple[Path, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("tools", "network", "mcp", "read", "write", "execute"):
            object.__setattr__(self, name, _checked_list(name, getattr(self, name)))
        workspace = Path(os.path.realpath(self.workspace))
        object.__setattr__(self, "workspace", workspace)
        object.__setattr__(self, "_origins", _origins(self.network))
        object.__setattr__(self, "_read_roots", _roots("read", self.read, workspace))
        object.__setattr__(self, "_write_roots", _roots("write", self.write, workspace))

    @classmethod
    def from_config(cls, settings: SandboxSettings, *, workspace: Path | None = None) -> Sandbox:
        """The sandbox that `config.sandbox` describes, around this workspace (default: the current directory)."""
        return cls(
            tools=settings.tools,
            network=settings.network,
            mcp=settings.mcp,
            read=settings.read,
            write=settings.write,
            execute=settings.execute,
            workspace=Path.cwd() if workspace is None else workspace,
        )

    def allow_tool(self, name: str) -> str:
        """The name of a tool that may be called; SandboxDenied if it is not listed."""
        if name not in self.tools:
            raise _denied(f"the tool {name!r} is not allowed", "tools", name)
        return name

    def allow_mcp(self, server: str) -> str:
        """The name of an MCP server that may be used; SandboxDenied if it is not listed."""
        if server not in self.mcp:
            raise _denied(f"the MCP server {server!r} is not allowed", "mcp", server)
        return server

    def allow_url(self, url: str) -> str:
        """The URL, if its origin is listed; SandboxDenied, which names the origin only, if not.

        Scheme and host are compared without case, and a scheme's own port may be written or not. A URL with
        credentials in it is refused, and so is one that HTTP libraries might read differently from this check: spaces,
        control characters, backslashes, a host that is not plain ASCII.
        """
        origin = _origin_of(url)
        if origin not in self._origins:
            raise _denied(f"the origin {origin} is not allowed", "network", origin)
        return url

    def resolve_read(self, path: str | os.PathLike[str]) -> Path:
        """The real, absolute path of a file or directory that may be read; a relative one starts at the workspace.

        Symbolic links and `..` are followed before the path is compared, so neither leads out. Nothing has to exist
        at the path. SandboxDenied if it lies in no listed file or directory.
        """
        return self._resolve(path, self._read_roots, "read")

    def resolve_write(self, path: str | os.PathLike[str]) -> Path:
        """As `resolve_read`, for a path that may be written, created or deleted."""
        return self._resolve(path, self._write_roots, "write")

    def allow_execute(self, command: str | Sequence[str]) -> tuple[str, ...]:
        """The argument list of a command whose program is listed; SandboxDenied if it is not.

        `command` is a list of arguments, or a program alone. It is never split and never meant for a shell: run what
        is returned, with `shell=False`. A program listed by name is found through PATH by whoever runs it.
        """
        arguments = (command,) if isinstance(command, str) else tuple(command)
        if not arguments or any("\0" in argument for argument in arguments):
            raise SandboxDenied("a command is a list of texts, the program first, without NUL characters")
        if arguments[0] not in self.execute:
            raise _denied(f"the program {arguments[0]!r} is not allowed", "execute", arguments[0])
        return arguments

    async def request(
        self,
        client: httpx.AsyncClient,
        method: str,
        url: str,
        *,
        max_bytes: int = RESPONSE_MAX_BYTES,
        auth: Any = None,
        **options: Any,
    ) -> httpx.Response:
        """One HTTP request to a listed origin, its answer read to the end; `options` as for `client.build_request`.

        An answer of more than `max_bytes` raises LimitExceededError as soon as that is known; its rest is not read.
        Compressed answers are not asked for and not accepted, as their size could not be bounded. A redirect is never
        followed: it raises StepError with code `sandbox.redirect`, which names the origin it leads to and nothing more
        of its address. For a write both leave the outcome unknown, since the request has reached the server. The
        client's own errors pass through. `SandboxDenied` means that nothing was sent.
        """
        self.allow_url(url)
        built = client.build_request(method, url, **options)
        self.allow_url(str(built.url))  # what the client made of it is what is sent
        built.headers["accept-encoding"] = "identity"
        credentials = {} if auth is None else {"auth": auth}
        response = await client.send(built, stream=True, follow_redirects=False, **credentials)
        try:
            _refuse_redirect(response, url)
            return await _read_bounded(response, url, max_bytes)
        finally:
            await response.aclose()

    def _resolve(self, path: str | os.PathLike[str], roots: tuple[Path, ...], listed: str) -> Path:
        text = os.fspath(path)
        if "\0" in text:
            raise SandboxDenied("a path has no NUL characters")
        real = Path(os.path.realpath(self.workspace / text))
        if not any(real.is_relative_to(root) for root in roots):
            raise _denied(f"the path {text!r} may not be {_DONE[listed]}", listed, "its directory")
        return real


def parse_origin(text: str) -> str:
    """The origin in one form: lower case, and without a port that the scheme implies.

    ConfigError if it is not `http://host`, `https://host`, or one of them with a port.
    """
    parts = split_url(text)
    if isinstance(parts, str):
        raise ConfigError(f"{parts}; write an origin such as https://api.example.com or http://127.0.0.1:8080")
    if parts.path not in ("", "/") or "?" in text or "#" in text:
        raise ConfigError("an origin has no path, query or fragment: write https://api.example.com")
    return _origin(parts)


def split_url(url: str) -> SplitResult | str:
    """The parts of an absolute http(s) URL without credentials, or what is wrong with it, in words that do not echo it.

    Refused too is what another library might read differently: spaces, control characters, backslashes, and a host
    that is not plain ASCII.
    """
    if not url.isascii() or not url.isprintable() or " " in url or "\\" in url:
        return "it holds a character that does not belong in a URL; percent-encode it, and write the host in ASCII"
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 - reading it checks it
    except ValueError:
        return "its host or port cannot be read"
    if parts.scheme not in _DEFAULT_PORTS:
        return "it does not begin with http:// or https://"
    if "@" in parts.netloc:
        return "it holds credentials; give them in a header"
    host = parts.hostname or ""
    if not host or not (_HOST_CHARS.issuperset(host) or _is_ipv6(host)):
        return "its host cannot be read"
    return parts


def _origin_of(url: str) -> str:
    parts = split_url(url)
    if isinstance(parts, str):
        raise SandboxDenied(f"the URL is refused: {parts}")
    return _origin(parts)


def _origin(parts: SplitResult) -> str:
    host = parts.hostname or ""
    if ":" in host:
        host = f"[{ipaddress.IPv6Address(host)}]"
    port = parts.port
    return f"{parts.scheme}://{host}" + (f":{port}" if port not in (None, _DEFAULT_PORTS[parts.scheme]) else "")


def _is_ipv6(host: str) -> bool:
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return "%" not in host


def _checked_list(name: str, entries: Sequence[Any]) -> tuple[Any, ...]:
    if isinstance(entries, str | bytes | os.PathLike):
        raise ConfigError(f"sandbox.{name} is a list; write [{entries!r}]")
    checked = tuple(entries)
    for entry in checked:
        text = os.fspath(entry) if isinstance(entry, str | os.PathLike) else None
        if not isinstance(text, str) or not text.strip():
            raise ConfigError(f"sandbox.{name}: an entry is a text that is not empty")
        if "*" in text:
            raise ConfigError(f"sandbox.{name}: {text!r}: there are no wildcards; list each one")
    return checked


def _origins(entries: tuple[str, ...]) -> frozenset[str]:
    origins = set()
    for index, entry in enumerate(entries):
        try:
            origins.add(parse_origin(entry))
        except ConfigError as error:
            raise ConfigError(f"sandbox.network[{index}]: {error.message}") from None
    return frozenset(origins)


def _roots(name: str, entries: tuple[str | Path, ...], workspace: Path) -> tuple[Path, ...]:
    roots = []
    for entry in entries:
        text = os.fspath(entry)
        if "\0" in text or text.startswith("~"):
            raise ConfigError(f"sandbox.{name}: {text!r}: write the path in full; ~ is not expanded")
        root = Path(os.path.realpath(workspace / text))
        if not Path(text).is_absolute() and not root.is_relative_to(workspace):
            raise ConfigError(
                f"sandbox.{name}: {text!r} leaves the workspace; write where it leads as an absolute path"
            )
        roots.append(root)
    return tuple(roots)


def _denied(what: str, listed: str, entry: str) -> SandboxDenied:
    return SandboxDenied(
        f"{what}. To allow it, add {entry} to sandbox.{listed} in ditto.yaml, or to Sandbox({listed}=[…])."
    )


def _refuse_redirect(response: httpx.Response, url: str) -> None:
    if not 300 <= response.status_code < 400 or response.status_code == _NOT_MODIFIED:
        return
    try:
        parts = split_url(urljoin(url, response.headers.get("location", "")))
    except ValueError:
        parts = ""
    target = "an address that cannot be read" if isinstance(parts, str) else _origin(parts)
    raise StepError(
        f"{_origin_of(url)} answered {response.status_code} and redirects to {target}; redirects are not followed. "
        "Call the address it leads to, if the sandbox should allow that.",
        code="sandbox.redirect",
    )


async def _read_bounded(response: httpx.Response, url: str, max_bytes: int) -> httpx.Response:
    import httpx

    if response.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise LimitExceededError(
            f"{_origin_of(url)} answered with a compressed body, though none was asked for; its size cannot be bounded",
            code="sandbox.encoding",
        )
    declared = response.headers.get("content-length", "")
    if response.request.method != "HEAD" and declared.isdecimal() and int(declared[:20]) > max_bytes:
        raise _too_long(url, f"is {declared[:20]} bytes long", max_bytes)
    # A transport that answers from memory, as tests have it, has read its own answer already.
    body = bytearray(response.content if response.is_stream_consumed else b"")
    if not response.is_stream_consumed:
        async for chunk in response.aiter_raw():
            body += chunk
            if len(body) > max_bytes:
                break
    if len(body) > max_bytes:
        raise _too_long(url, "goes on", max_bytes)
    return httpx.Response(
        response.status_code,
        headers=response.headers,
        content=bytes(body),
        request=response.request,
        extensions={name: value for name, value in response.extensions.items() if name in _KEPT_EXTENSIONS},
    )


def _too_long(url: str, how: str, max_bytes: int) -> LimitExceededError:
    return LimitExceededError(
        f"the answer of {_origin_of(url)} {how}; the limit is {max_bytes} bytes. Ask for less, or raise max_bytes.",
        code="sandbox.response_size",
    )
