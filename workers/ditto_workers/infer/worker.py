"""The worker of INFER.REASONING.SAMPLE: one question, one complete answer, asked once."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from types import MappingProxyType
from typing import Any, Final

from ditto import Action, EffectClass, NodeHandler, Sample, StepContext, Worker, WorkerSetup
from ditto.contracts import SampleInput
from ditto.contracts.calls import with_unique_ids
from ditto.worker import as_data
from ditto_workers.infer.provider import Provider, ProviderFactory

_TYPE: Final = "INFER.REASONING.SAMPLE"


def create_infer_worker(providers: Mapping[str, ProviderFactory] | None = None) -> Worker:
    """A Worker for INFER.REASONING.SAMPLE.

    `providers` maps a provider's name, the first word of a model such as `local/tiny`, to a factory of one's own.
    Every other name is asked over HTTP in OpenAI's format, at the address that the configuration has for it.
    """
    factories = dict(providers or {})

    def open_resources(setup: WorkerSetup) -> AbstractAsyncContextManager[Providers]:
        return _open_providers(factories, setup)

    return Worker(type="INFER", resources=open_resources).with_handler(
        NodeHandler(type=_TYPE, plan=plan_sample, input=SampleInput, shown=shown_text)
    )


def plan_sample(request: SampleInput) -> Action:
    """The Action of one model call; `ctx.resources` is what this worker's factory opened."""

    async def call(ctx: StepContext) -> Sample:
        providers: Providers = ctx.resources
        answer = await providers.find(request.model.provider).sample(request, ctx)
        return with_unique_ids(answer, request)

    return Action(
        label=f"model {request.model}",
        effect=EffectClass.INFER,
        call=call,
        is_async=True,
        arguments=request,
        recorded=lambda: as_data(request),
        growing=("messages", "tools"),
        output=Sample,
    )


def shown_text(sample: dict[str, Any]) -> dict[str, str]:
    """The texts in a recorded Sample."""
    message = sample["message"]
    return {"text": message["content"], "reasoning": message["reasoning"] or ""}


class Providers:
    """The open providers of one runtime: those with a name, and one for every other name."""

    def __init__(self, named: Mapping[str, Provider], default: Provider) -> None:
        self._named = MappingProxyType(dict(named))
        self._default = default

    def find(self, name: str) -> Provider:
        """The provider of that name."""
        return self._named.get(name, self._default)


@asynccontextmanager
async def _open_providers(factories: Mapping[str, ProviderFactory], setup: WorkerSetup) -> AsyncIterator[Providers]:
    from ditto_workers.infer.openai import open_openai_provider

    async with AsyncExitStack() as stack:
        named = {name: await stack.enter_async_context(factory(setup)) for name, factory in factories.items()}
        yield Providers(named, await stack.enter_async_context(open_openai_provider()))
