"""Recovering: every run that nobody drives is found and taken up, once.

The list of such runs is read in pages and may be old by the time a run's turn comes: the claim's guard decides, and a
run that somebody else took first is left to them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Final, TypeAlias, TypeVar

import anyio

from ditto.engine.expiry import wake_expired
from ditto.engine.ownership import Owner
from ditto.errors import DittoError, RunBusyError, StoreError
from ditto.flow import Flow
from ditto.graph import Graph
from ditto.loop import Loop
from ditto.runs import Recovered
from ditto.store import queries
from ditto.store.records import RunRow
from ditto.store.store import Store

T = TypeVar("T")

PAGE: Final = 100
STORE_TRIES_MAX: Final = 6
STORE_WAIT_S: Final = 0.2
"""First wait before a run is tried again that a busy or failing store kept from going on; doubled each time."""

Workflows: TypeAlias = Mapping[tuple[str, str], Graph | Loop | Flow]
Resume: TypeAlias = Callable[[RunRow], Awaitable[None]]


async def recover_runs(
    store: Store, owner: Owner, workflows: Workflows, resume: Resume, concurrency: int
) -> tuple[Recovered, ...]:
    """Take up every undriven run of these workflows, some at a time; one Recovered for each.

    A run that waits is left to wait, unless its deadline has passed.
    """
    found: list[Recovered] = []
    slots = anyio.Semaphore(concurrency)

    async def drive(run: RunRow) -> None:
        try:
            recovered = await take_up(store, run, resume)
        finally:
            slots.release()
        if recovered is not None:
            found.append(recovered)

    while await _patiently(partial(wake_expired, store)):
        pass
    async with anyio.create_task_group() as tasks:
        after = 0
        while True:
            page = await _patiently(partial(store.read, queries.list_undriven, after, PAGE))
            for run in page:
                after = run.id
                if (run.kind, run.workflow) in workflows and not is_driven(owner, run):
                    await slots.acquire()
                    tasks.start_soon(drive, run)
            if len(page) < PAGE:
                break
    return tuple(sorted(found, key=lambda each: each.run_id))


def is_driven(owner: Owner, run: RunRow) -> bool:
    """Whether another runtime, which is alive, drives the run."""
    return run.owner is not None and run.owner != owner.id and owner.is_alive(run.owner)


async def take_up(store: Store, run: RunRow, resume: Resume) -> Recovered | None:
    """Drive one run; None if somebody else was faster."""
    error: DittoError | None = None
    try:
        await _patiently(lambda: resume(run))
    except RunBusyError:
        return None
    except DittoError as raised:
        error = raised
    try:
        now = await _patiently(lambda: store.read(queries.get_run_by_key, run.id))
    except StoreError as failed:
        return Recovered(run.run_id, run.status.value, error or failed)
    return Recovered(run.run_id, now.status.value, error)


async def _patiently(work: Callable[[], Awaitable[T]]) -> T:
    """Try again after a fault of the store that may pass: a run that it stopped is not dropped for that."""
    for tried in range(1, STORE_TRIES_MAX):
        try:
            return await work()
        except StoreError as error:
            if not error.retryable:
                raise
            await anyio.sleep(STORE_WAIT_S * 2 ** (tried - 1))
    return await work()
