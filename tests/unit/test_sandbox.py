"""The sandbox denies by default, paths and redirects lead nowhere else, and bodies are bounded."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from ditto.config import SandboxConfig
from ditto.errors import ConfigError, LimitExceededError, SandboxDenied, StepError
from ditto.sandbox import Sandbox, parse_origin

ORIGIN = "http://shop.example:8080"

Loose: Any = Sandbox  # for entries of the wrong type


def test_everything_is_denied_by_default(tmp_path: Path) -> None:
    sandbox = Sandbox(workspace=tmp_path)
    attempts: list[tuple[Callable[[], Any], str]] = [
        (lambda: sandbox.allow_tool("ship"), "add ship to sandbox.tools"),
        (lambda: sandbox.allow_mcp("files"), "add files to sandbox.mcp"),
        (lambda: sandbox.allow_url(f"{ORIGIN}/x?key=zq-7f3"), f"add {ORIGIN} to sandbox.network"),
        (lambda: sandbox.resolve_read("a.txt"), "to sandbox.read"),
        (lambda: sandbox.resolve_write("a.txt"), "to sandbox.write"),
        (lambda: sandbox.allow_execute("git"), "add git to sandbox.execute"),
    ]
    for attempt, advice in attempts:
        with pytest.raises(SandboxDenied) as caught:
            attempt()
        assert advice in caught.value.message
        assert "zq-7f3" not in caught.value.message


def test_the_configuration_makes_the_sandbox(tmp_path: Path) -> None:
    settings = SandboxConfig(
        tools=("ship",), network=(ORIGIN,), mcp=("files",), read=(".",), write=("out",), execute=("git",)
    )
    sandbox = Sandbox.from_config(settings, workspace=tmp_path)
    assert sandbox == Sandbox(
        tools=("ship",),
        network=(ORIGIN,),
        mcp=("files",),
        read=(".",),
        write=("out",),
        execute=("git",),
        workspace=tmp_path,
    )
    assert sandbox.allow_tool("ship") == "ship"
    assert sandbox.allow_mcp("files") == "files"
    assert sandbox.allow_url(f"{ORIGIN}/a?b") == f"{ORIGIN}/a?b"
    assert sandbox.resolve_read("a") == tmp_path / "a"
    assert sandbox.resolve_write("out/b") == tmp_path / "out/b"
    assert sandbox.allow_execute(["git", "status; rm -rf /"]) == ("git", "status; rm -rf /")
    assert Sandbox.from_config(SandboxConfig()).workspace == Path.cwd().resolve()


def test_names_are_compared_exactly() -> None:
    sandbox = Sandbox(tools=("ship",), execute=("git", "/usr/bin/make"))
    for name in ("Ship", "ship ", "shi", ""):
        with pytest.raises(SandboxDenied):
            sandbox.allow_tool(name)
    assert sandbox.allow_execute("/usr/bin/make") == ("/usr/bin/make",)
    for command in ("git status", "./git", "/usr/bin/git", "make", [], ["git", "a\0b"], ""):
        with pytest.raises(SandboxDenied):
            sandbox.allow_execute(command)


@pytest.mark.parametrize(
    "build",
    [
        lambda: Loose(tools="ship"),
        lambda: Loose(tools=("*",)),
        lambda: Loose(network=("https://*.example.com",)),
        lambda: Loose(tools=("",)),
        lambda: Loose(execute=(1,)),
        lambda: Loose(read="data"),
        lambda: Loose(read=Path("data")),
        lambda: Loose(read=("~/data",)),
        lambda: Loose(read=("..",)),
        lambda: Loose(write=("a/../../b",)),
        lambda: Loose(network=("example.com",)),
        lambda: Loose(network=("https://example.com/v1",)),
        lambda: Loose(network=("https://example.com?x",)),
        lambda: Loose(network=("https://user:zq-7f3@example.com",)),
        lambda: Loose(network=("ftp://example.com",)),
    ],
)
def test_wrong_entries_are_refused_at_start(build: Callable[[], Sandbox]) -> None:
    with pytest.raises(ConfigError) as caught:
        build()
    assert "sandbox." in caught.value.message
    assert "zq-7f3" not in caught.value.message


# Origins


@pytest.mark.parametrize(
    ("text", "origin"),
    [
        ("https://Example.COM", "https://example.com"),
        ("HTTPS://example.com:443/", "https://example.com"),
        ("http://example.com:80", "http://example.com"),
        ("http://example.com:443", "http://example.com:443"),
        ("http://127.0.0.1:8080", "http://127.0.0.1:8080"),
        ("http://[::1]:8080", "http://[::1]:8080"),
        ("http://[0:0:0:0:0:0:0:1]", "http://[::1]"),
    ],
)
def test_origins_have_one_form(text: str, origin: str) -> None:
    assert parse_origin(text) == origin


@pytest.mark.parametrize(
    ("listed", "url"),
    [
        ("https://example.com", "https://EXAMPLE.com/a/b?c=d#e"),
        ("https://example.com", "https://example.com:443"),
        ("https://example.com:443", "https://example.com/"),
        ("http://[::1]:80", "http://[0::1]/x"),
    ],
)
def test_urls_of_a_listed_origin_are_allowed(listed: str, url: str) -> None:
    assert Sandbox(network=(listed,)).allow_url(url) == url


@pytest.mark.parametrize(
    "url",
    [
        "http://example.com/",
        "https://example.com:8443/",
        "https://example.com.evil.test/",
        "https://evil.test/https://example.com",
        "https://evil.test#https://example.com",
        "https://sub.example.com/",
        "https://example.com@evil.test/",
        "https://user:zq-7f3@example.com/",
        "https://@example.com/",
        "https://example.com\\@evil.test/",
        "https://evil.test\\.example.com/",
        "https://example.com\t/",
        " https://example.com/",
        "https://example.com/a b",
        "https://ex%61mple.com/",
        "https://exаmple.com/",  # noqa: RUF001 - a Cyrillic letter is the point
        "https://example.com./",
        "//example.com/",
        "/path",
        "",
        "https:///x",
        "https:example.com",
        "file:///etc/passwd",
        "https://example.com:x/",
        "https://example.com:99999/",
        "https://[::1",
        "https://[fe80::1%25eth0]/",
    ],
)
def test_other_urls_are_denied(url: str) -> None:
    sandbox = Sandbox(network=("https://example.com",))
    with pytest.raises(SandboxDenied) as caught:
        sandbox.allow_url(url)
    assert "zq-7f3" not in caught.value.message


# Paths


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    workspace = tmp_path / "work"
    for directory in (workspace / "data/sub", workspace / "private", tmp_path / "outside", tmp_path / "work-2"):
        directory.mkdir(parents=True)
    (tmp_path / "outside/secret.txt").write_text("s")
    (workspace / "data/a.txt").write_text("a")
    return workspace


@pytest.mark.parametrize(
    "path", ["data", "data/a.txt", "data/absent/b", "data/sub/../a.txt", "private/../data/a.txt", "./data"]
)
def test_paths_below_a_listed_directory_are_allowed(workspace: Path, path: str) -> None:
    sandbox = Sandbox(read=("data",), workspace=workspace)
    assert sandbox.resolve_read(path) == (workspace / path).resolve()
    assert sandbox.resolve_read(workspace / path) == (workspace / path).resolve()


@pytest.mark.parametrize(
    "path",
    [
        "..",
        "private",
        "data/..",
        "data/../private/x",
        "data/../../outside/secret.txt",
        "/etc/passwd",
        "datax",
        "a\0b",
        "",
    ],
)
def test_paths_elsewhere_are_denied(workspace: Path, path: str) -> None:
    sandbox = Sandbox(read=("data",), write=("data",), workspace=workspace)
    for resolve in (sandbox.resolve_read, sandbox.resolve_write):
        with pytest.raises(SandboxDenied):
            resolve(path)


def test_the_workspace_has_its_whole_name(workspace: Path) -> None:
    sandbox = Sandbox(read=(".",), workspace=workspace)
    assert sandbox.resolve_read("private/x") == workspace / "private/x"
    with pytest.raises(SandboxDenied):
        sandbox.resolve_read("../work-2/x")


def test_symbolic_links_do_not_lead_out(workspace: Path) -> None:
    outside = workspace.parent / "outside"
    (workspace / "data/link").symlink_to(outside)
    (workspace / "data/file").symlink_to(outside / "secret.txt")
    (workspace / "data/dangling").symlink_to(outside / "new.txt")
    (workspace / "data/inner").symlink_to(workspace / "data/sub")
    (workspace / "data/loop").symlink_to(workspace / "data/loop")
    sandbox = Sandbox(read=("data",), write=("data",), workspace=workspace)
    for path in ("data/link/secret.txt", "data/file", "data/dangling", "data/link/../x"):
        with pytest.raises(SandboxDenied):
            sandbox.resolve_write(path)
    assert sandbox.resolve_read("data/inner/x") == workspace / "data/sub/x"


def test_a_listed_directory_that_becomes_a_link_leads_nowhere(workspace: Path) -> None:
    sandbox = Sandbox(write=("data/new",), workspace=workspace)
    assert sandbox.resolve_write("data/new/x") == workspace / "data/new/x"
    (workspace / "data/new").symlink_to(workspace.parent / "outside")
    with pytest.raises(SandboxDenied):
        sandbox.resolve_write("data/new/x")


def test_a_relative_entry_that_leads_out_is_refused_at_start(workspace: Path) -> None:
    (workspace / "link").symlink_to(workspace.parent / "outside")
    with pytest.raises(ConfigError, match="leaves the workspace"):
        Sandbox(read=("link",), workspace=workspace)
    sandbox = Sandbox(read=(workspace.parent / "outside", "data/a.txt"), workspace=workspace)
    assert sandbox.resolve_read("../outside/secret.txt") == workspace.parent / "outside/secret.txt"
    assert sandbox.resolve_read("data/a.txt") == workspace / "data/a.txt"
    with pytest.raises(SandboxDenied):
        sandbox.resolve_read("data/b.txt")


def test_reading_and_writing_are_apart(workspace: Path) -> None:
    sandbox = Sandbox(write=("data",), workspace=workspace)
    with pytest.raises(SandboxDenied, match=r"sandbox\.read"):
        sandbox.resolve_read("data/a.txt")


# Requests


class Server:
    """Answers as told, and keeps what it was asked and how much of its body was taken."""

    def __init__(
        self, status: int = 200, body: bytes | list[bytes] = b"ok", headers: dict[str, str] | None = None
    ) -> None:
        self.requests: list[httpx.Request] = []
        self.chunks_taken = 0
        self.closed = False
        self._status, self._body, self._headers = status, body, headers

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        content = self._body if isinstance(self._body, bytes) else self._stream(self._body)
        return httpx.Response(self._status, headers=self._headers, content=content)

    async def _stream(self, chunks: list[bytes]) -> AsyncIterator[bytes]:
        try:
            for chunk in chunks:
                self.chunks_taken += 1
                yield chunk
        finally:
            self.closed = True

    def client(self, **options: Any) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.MockTransport(self), **options)


SANDBOX = Sandbox(network=(ORIGIN,))


@pytest.mark.asyncio
async def test_a_request_comes_back_whole() -> None:
    server = Server(201, b'{"a": 1}', {"x-id": "7"})
    async with server.client() as client:
        answer = await SANDBOX.request(client, "POST", f"{ORIGIN}/a", json={"b": 2}, headers={"Idempotency-Key": "k"})
    assert (answer.status_code, answer.json(), answer.headers["x-id"]) == (201, {"a": 1}, "7")
    assert answer.request.url == f"{ORIGIN}/a"
    (request,) = server.requests
    assert (request.method, request.content, request.headers["idempotency-key"]) == ("POST", b'{"b":2}', "k")
    assert request.headers["accept-encoding"] == "identity"


@pytest.mark.asyncio
async def test_a_denied_origin_is_not_asked() -> None:
    server = Server()
    async with server.client(base_url="http://other.example", auth=("user", "zq-7f3")) as client:
        for url in ("http://other.example/a?key=zq-7f3", "/a", "http://shop.example/a"):
            with pytest.raises(SandboxDenied) as caught:
                await SANDBOX.request(client, "GET", url)
            assert "zq-7f3" not in caught.value.message
    assert server.requests == []


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("location", "named"),
    [
        ("https://user:pass@evil.example/path?token=zq-7f3", "an address that cannot be read"),
        ("https://evil.example:8443/path?token=zq-7f3", "https://evil.example:8443;"),
        ("/other?token=zq-7f3", f"{ORIGIN};"),
        ("//evil.example/zq-7f3", "http://evil.example;"),
        (f"{ORIGIN}/zq-7f3", f"{ORIGIN};"),
        ("", f"{ORIGIN};"),
    ],
)
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_redirects_are_refused_and_only_their_origin_is_named(status: int, location: str, named: str) -> None:
    server = Server(status, b"", {"location": location})
    async with server.client(follow_redirects=True) as client:
        with pytest.raises(StepError) as caught:
            await SANDBOX.request(client, "POST", f"{ORIGIN}/a?key=zq-7f3")
    assert len(server.requests) == 1
    assert caught.value.code == "sandbox.redirect"
    assert not isinstance(caught.value, SandboxDenied), "the request was sent, so a write may have been made"
    assert named in caught.value.message
    for word in ("zq-7f3", "path", "pass@", "other"):
        assert word not in caught.value.message


@pytest.mark.asyncio
async def test_not_modified_is_no_redirect() -> None:
    async with Server(304, b"").client() as client:
        assert (await SANDBOX.request(client, "GET", f"{ORIGIN}/a")).status_code == 304


@pytest.mark.asyncio
async def test_j02_a_body_is_bounded_while_it_is_read() -> None:
    server = Server(body=[b"x" * 1000] * 100)
    async with server.client() as client:
        with pytest.raises(LimitExceededError) as caught:
            await SANDBOX.request(client, "GET", f"{ORIGIN}/dump?key=zq-7f3", max_bytes=2500)
    assert server.chunks_taken == 3
    assert "2500" in caught.value.message
    assert ORIGIN in caught.value.message
    assert "zq-7f3" not in caught.value.message


@pytest.mark.asyncio
async def test_j02_a_declared_length_is_refused_before_reading() -> None:
    for length in ("4000000", "9" * 5000):
        server = Server(body=[b"x"] * 10, headers={"content-length": length})
        async with server.client() as client:
            with pytest.raises(LimitExceededError, match="65536 bytes"):
                await SANDBOX.request(client, "GET", f"{ORIGIN}/dump")
            assert server.chunks_taken == 0
            assert (await SANDBOX.request(client, "HEAD", f"{ORIGIN}/dump")).status_code == 200


@pytest.mark.asyncio
async def test_a_body_of_exactly_the_limit_is_read() -> None:
    async with Server(body=[b"x" * 65536]).client() as client:
        assert len((await SANDBOX.request(client, "GET", f"{ORIGIN}/a")).content) == 65536


@pytest.mark.asyncio
async def test_compressed_answers_are_refused() -> None:
    import gzip

    server = Server(body=gzip.compress(b"x" * 10_000_000), headers={"content-encoding": "gzip"})
    async with server.client() as client:
        with pytest.raises(LimitExceededError, match="compressed"):
            await SANDBOX.request(client, "GET", f"{ORIGIN}/a")


@pytest.mark.asyncio
async def test_follow_redirects_cannot_be_asked_for() -> None:
    async with Server().client() as client:
        with pytest.raises(TypeError):
            await SANDBOX.request(client, "GET", f"{ORIGIN}/a", follow_redirects=True)
