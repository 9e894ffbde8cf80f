"""One HTTP exchange with a provider: sent once, read to a bound, and honest about how far it came.

Knows nothing of models: it gives what was received, or says that nothing was sent, or that the answer is lost.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import anyio
import httpx

from ditto import EffectRejected
from ditto_workers.infer.endings import ProviderRefused, lost_answer

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
    cut: str | None = None
    """Why the body ends before its end, where a Listener heard the beginning of it."""


class Listener(Protocol):
    """Hears a successful answer while it comes."""

    @property
    def ended(self) -> bool:
        """The answer has said that it ends here: nothing more of it is read."""
        ...

    async def hear(self, pieces: AsyncIterator[bytes]) -> None:
        """Takes the body's pieces, until there are no more."""
        ...


async def exchange(
    client: httpx.AsyncClient,
    request: httpx.Request,
    *,
    timeout_s: float,
    max_bytes: int,
    not_made: Callable[[str], None],
    listener: Listener | None = None,
    idle_timeout_s: float | None = None,
) -> Received:
    """Sends `request` once and reads the answer, all within `timeout_s`.

    `listener` hears the body of a successful answer, between two bytes of which at most `idle_timeout_s` may pass.

    Raises ProviderRefused if nothing was sent, EffectRejected if nothing like it can ever be sent, ResponseLost if
    it was sent and no complete answer came; but what a `listener` began to hear is returned, with the reason why it
    was cut, since only the listener knows whether it was complete. Cancelled before anything came back, it calls
    `not_made`.
    """
    progress = _Progress(request, listener)
    try:
        with anyio.fail_after(timeout_s):
            return await progress.run(client, max_bytes, idle_timeout_s)
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
    cause = _cause(error)
    if not progress.sent:
        reason = "no connection in time" if timed_out else cause
        raise ProviderRefused(
            f"{url} was not reached, and nothing was sent: {reason}", code="provider.unreachable", retryable=True
        ) from error
    reason = f"no complete answer within {timeout_s:g} s" if timed_out else cause
    if progress.response is not None and progress.response.status_code >= 300:
        return progress.received()  # A definite no; only its text is incomplete.
    if progress.response is not None and progress.listener is not None:
        progress.cut = reason
        return progress.received()
    raise lost_answer(url, reason) from error


def _cause(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


@dataclass(slots=True)
class _Progress:
    """How far one exchange has come."""

    request: httpx.Request
    listener: Listener | None = None
    sent: bool = False
    response: httpx.Response | None = None
    body: bytearray = field(default_factory=bytearray)
    over_limit: bool = False
    undecodable: bool = False
    cut: str | None = None

    async def run(self, client: httpx.AsyncClient, max_bytes: int, idle_timeout_s: float | None) -> Received:
        self.request.extensions = {**self.request.extensions, "trace": self._trace}
        self.response = await client.send(self.request, stream=True)
        self.sent = True  # Whatever the transport traces.
        try:
            await self._read(self.response, max_bytes, idle_timeout_s)
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
            cut=self.cut,
        )

    async def _read(self, response: httpx.Response, max_bytes: int, idle_timeout_s: float | None) -> None:
        if response.is_success and self.listener is not None:
            await self._let_hear(self.listener, self._pieces(response, max_bytes), idle_timeout_s)
            return
        limit = max_bytes if response.is_success else min(max_bytes, _ERROR_BODY_MAX_BYTES)
        async for _ in self._pieces(response, limit):
            pass

    async def _let_hear(self, listener: Listener, pieces: AsyncIterator[bytes], idle_timeout_s: float | None) -> None:
        with anyio.CancelScope() as silence:

            async def heard() -> AsyncIterator[bytes]:
                try:
                    _limit(silence, idle_timeout_s)
                    async for piece in pieces:
                        yield piece
                        if listener.ended:
                            self.over_limit = False
                            return
                        _limit(silence, idle_timeout_s)
                except httpx.TransportError as error:
                    self.cut = _cause(error)

            await listener.hear(heard())
        if silence.cancelled_caught:
            self.cut = f"no byte for {idle_timeout_s:g} s, the provider's idle_timeout_s"

    async def _pieces(self, response: httpx.Response, limit: int) -> AsyncIterator[bytes]:
        """The body as it comes, up to the limit."""
        async for chunk in response.aiter_bytes():
            room = limit - len(self.body)
            self.body += chunk[:room]
            self.over_limit = len(chunk) > room
            yield chunk[:room]
            if self.over_limit:
                return

    async def _trace(self, event: str, info: Mapping[str, Any]) -> None:
        if event.endswith(".send_request_headers.started"):
            self.sent = True


def _limit(silence: anyio.CancelScope, idle_timeout_s: float | None) -> None:
    if idle_timeout_s is not None:
        silence.deadline = anyio.current_time() + idle_timeout_s


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
