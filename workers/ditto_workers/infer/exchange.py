"""One HTTP exchange with a provider: sent once, read to a bound, and honest about how far it came.

Knows nothing of models: it gives what was received, or says that nothing was sent, or that the answer is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import anyio
import httpx

from ditto import EffectRejected
from ditto_workers.infer.endings import ProviderRefused, ResponseLost

_ERROR_BODY_MAX_BYTES: Final = 65536


@dataclass(frozen=True, slots=True)
class Received:
    """What came back: the status, the headers (names in lower case), and the body as far as it was read."""

    url: str
    """Where it came from, without query and credentials."""
    status: int
    headers: Mapping[str, str]
    body: bytes
    redirect_origin: str | None = None
    over_limit: bool = False
    """The body is longer than allowed; the rest was not read."""
    undecodable: bool = False
    """The body is compressed, although no compression was asked for, and cannot be decompressed."""
    has_length: bool = True
    """The body said how long it is, so that a cut would have been noticed."""


async def exchange(
    client: httpx.AsyncClient,
    request: httpx.Request,
    *,
    timeout_s: float,
    max_bytes: int,
    not_made: Callable[[str], None],
) -> Received:
    """Sends `request` once and reads the answer, all within `timeout_s`.

    Raises ProviderRefused if nothing was sent, EffectRejected if nothing like it can ever be sent, ResponseLost if
    it was sent and no complete answer came. Cancelled before anything came back, it calls `not_made`.
    """
    progress = _Progress(request)
    try:
        with anyio.fail_after(timeout_s):
            return await progress.run(client, max_bytes)
    except anyio.get_cancelled_exc_class():
        if progress.response is None:
            not_made("cancelled before the provider answered; connection closed")
        raise
    except httpx.LocalProtocolError:
        # Its text may hold the header that is at fault, and with it the key.
        raise EffectRejected(
            f"the request to {shown_url(request.url)} cannot be sent: its key or one of its configured headers holds "
            "characters that HTTP does not allow, such as a line break",
            code="provider.config",
        ) from None
    except (TimeoutError, httpx.TransportError) as error:
        return _after_failure(progress, error, timeout_s)


def shown_url(url: httpx.URL) -> str:
    """The URL for people: without query, fragment and credentials."""
    return f"{_origin(url)}{url.path}"


def _after_failure(progress: _Progress, error: Exception, timeout_s: float) -> Received:
    url = shown_url(progress.request.url)
    timed_out = isinstance(error, TimeoutError | httpx.TimeoutException)
    cause = f"{type(error).__name__}: {error}"
    if not progress.sent:
        reason = "no connection in time" if timed_out else cause
        raise ProviderRefused(
            f"{url} was not reached, and nothing was sent: {reason}", code="provider.unreachable", retryable=True
        ) from error
    if progress.response is not None and progress.response.status_code >= 300:
        return progress.received()  # A definite no; only its text is incomplete.
    reason = f"no complete answer within {timeout_s:g} s" if timed_out else cause
    raise ResponseLost(
        f"the request to {url} was sent and its answer is lost ({reason}); the model may have answered, and billed"
    ) from error


@dataclass(slots=True)
class _Progress:
    """How far one exchange has come."""

    request: httpx.Request
    sent: bool = False
    response: httpx.Response | None = None
    body: bytearray = field(default_factory=bytearray)
    over_limit: bool = False
    undecodable: bool = False

    async def run(self, client: httpx.AsyncClient, max_bytes: int) -> Received:
        self.request.extensions = {**self.request.extensions, "trace": self._trace}
        self.response = await client.send(self.request, stream=True)
        try:
            await self._read(self.response, max_bytes)
        except httpx.DecodingError:
            self.undecodable = True
        finally:
            await self.response.aclose()
        return self.received()

    def received(self) -> Received:
        response = self.response
        assert response is not None
        headers = {name.lower(): value for name, value in response.headers.items()}
        return Received(
            url=shown_url(self.request.url),
            status=response.status_code,
            headers=headers,
            body=bytes(self.body),
            redirect_origin=_redirect_origin(self.request.url, headers.get("location")),
            over_limit=self.over_limit,
            undecodable=self.undecodable,
            has_length="content-length" in headers or "transfer-encoding" in headers,
        )

    async def _read(self, response: httpx.Response, max_bytes: int) -> None:
        limit = max_bytes if response.is_success else min(max_bytes, _ERROR_BODY_MAX_BYTES)
        async for chunk in response.aiter_bytes():
            room = limit - len(self.body)
            self.body += chunk[:room]
            if len(chunk) > room:
                self.over_limit = True
                return

    async def _trace(self, event: str, info: Mapping[str, Any]) -> None:
        if event.endswith(".send_request_headers.started"):
            self.sent = True


def _redirect_origin(url: httpx.URL, location: str | None) -> str | None:
    if location is None:
        return None
    try:
        return _origin(url.join(location))
    except httpx.InvalidURL:
        return "an address that cannot be read"


def _origin(url: httpx.URL) -> str:
    host = f"[{url.host}]" if ":" in url.host else url.host
    return f"{url.scheme}://{host}" + (f":{url.port}" if url.port is not None else "")
