"""Any provider that speaks OpenAI's chat completions, over httpx: asked once, never retried, never redirected."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any, Final

import httpx

from ditto import Config, ConfigError, EffectRejected, Endpoint, Sample, StepContext
from ditto.contracts import SampleInput
from ditto_workers.infer.decide import decide_ending
from ditto_workers.infer.exchange import exchange
from ditto_workers.infer.request import build_request
from ditto_workers.infer.stream import Stream

_CONNECT_TIMEOUT_S: Final = 10.0

Now = Callable[[], datetime]


@asynccontextmanager
async def open_openai_provider() -> AsyncIterator[OpenAIProvider]:
    """An OpenAIProvider with its own HTTP client, closed at the end.

    No connection is kept alive: the other side may close an idle one just as the next request is written to it, and
    then nobody knows whether that request was read. A new connection costs less than an unknown outcome.
    """
    async with httpx.AsyncClient(
        trust_env=False,
        follow_redirects=False,
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
    ) as client:
        yield OpenAIProvider(client)


class OpenAIProvider:
    """Asks `POST {base_url}/chat/completions`. Address and key come from `config.endpoints`, at every call anew."""

    def __init__(self, client: httpx.AsyncClient, *, now: Now = lambda: datetime.now(UTC)) -> None:
        self._client = client
        self._now = now

    async def sample(self, request: SampleInput, ctx: StepContext) -> Sample:
        """One complete answer. Ends as `ditto_workers.infer.provider` says."""
        settings = ctx.config.provider(request.model.provider)
        max_bytes = ctx.config.workers.infer.response_max_bytes
        stream = Stream(ctx.partial) if request.stream else None
        received = await exchange(
            self._client,
            self._request(request, ctx.config),
            timeout_s=settings.timeout_s,
            max_bytes=max_bytes,
            not_made=ctx.not_made,
            listener=stream,
            idle_timeout_s=settings.idle_timeout_s,
        )
        answer = decide_ending(received, kind=settings.kind, max_bytes=max_bytes, now=self._now(), stream=stream)
        if answer.repaired:
            ctx.logger.warning(
                "%s: the answer of %s held broken characters; they are U+FFFD now", ctx.path, request.model
            )
        return answer.sample

    def _request(self, request: SampleInput, config: Config) -> httpx.Request:
        endpoint = _endpoint(config, request.model.provider)
        settings = config.provider(request.model.provider)
        return self._client.build_request(
            "POST",
            endpoint.url("chat/completions"),
            content=_encoded(build_request(request, settings)),
            headers=_headers(endpoint, stream=request.stream),
            timeout=httpx.Timeout(settings.timeout_s, connect=min(settings.timeout_s, _CONNECT_TIMEOUT_S)),
        )


def _endpoint(config: Config, provider: str) -> Endpoint:
    try:
        return config.endpoint(provider)
    except ConfigError as error:
        # As a step's ending: nothing was sent, and asking again would change nothing.
        raise EffectRejected(error.message, code="provider.unknown") from None


def _encoded(body: dict[str, Any]) -> bytes:
    try:
        return json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise EffectRejected(
            f"the request is no JSON data, and was not sent: {error}", code="provider.request"
        ) from None


def _headers(endpoint: Endpoint, *, stream: bool) -> dict[str, str]:
    accepted = "text/event-stream, application/json" if stream else "application/json"
    headers = {"content-type": "application/json", "accept": accepted, "accept-encoding": "identity"}
    if endpoint.api_key is not None:
        headers["authorization"] = f"Bearer {endpoint.api_key.get_secret_value()}"
    headers.update({name.lower(): value.get_secret_value() for name, value in endpoint.headers.items()})
    return headers
