"""Asking: what is recorded of the runs in a store, as the caller sees it. Reads only.

A run of a dead owner still says `running` in its row: every answer shows it as what it is.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Final

import anyio

from ditto.clock import to_datetime
from ditto.engine.checking import Checker
from ditto.engine.listening import Place, listen
from ditto.engine.open_store import OpenStore, shown_status
from ditto.engine.outcomes import ErrorRecord, is_lost
from ditto.engine.questions import open_wait
from ditto.pieces import Heard
from ditto.runs import Checked, EventInfo, Health, RunInfo, RunSummary, StepInfo
from ditto.store import queries
from ditto.store.records import RunRow, StepRow
from ditto.store.schema import CLOSED, PAUSING, SCHEMA_VERSION, RunStatus, StepState

EVENTS_PAGE: Final = 500
"""Events read at once; no read transaction is open between two pages."""

FOLLOW_S: Final = 0.25
"""Between two looks for further events."""

LOST_SHOWN: Final = 100
MAX_ROW_ID: Final = 2**62


async def list_runs(opened: OpenStore, status: str | None, limit: int) -> list[RunSummary]:
    """See `Runtime.runs`."""
    found: list[RunSummary] = []
    # A run of a dead owner still says `running` in its row, and counts as interrupted.
    shown = {RunStatus.INTERRUPTED.value: RunStatus.RUNNING.value, PAUSING: RunStatus.PAUSED.value}
    wanted = status if status is None else shown.get(status, status)
    for recorded in dict.fromkeys((status, wanted)):
        page = await opened.store.read(queries.list_runs, recorded, MAX_ROW_ID, limit)
        found += [_summary(run, opened.live_status(run)) for run in page]
    found = [run for run in found if status is None or run.status == status]
    return sorted(found, key=lambda run: run.created_at, reverse=True)[:limit]


async def check_runs(opened: OpenStore, *, open_runs: bool, failed_runs: bool) -> tuple[Checked, ...]:
    """See `Runtime.check`."""
    checker = Checker(opened.store, opened.engine.router, opened.workflows, opened.live_status)
    found = await checker.check(queries.list_open) if open_runs else []
    if failed_runs:
        found += await checker.check(queries.list_reopenable)
    return tuple(found)


async def examine_store(opened: OpenStore) -> Health:
    """See `Runtime.health`."""
    path = opened.store.location.path
    counts: dict[str, int] = {}
    owners: set[str] = set()
    for status, owner, count in await opened.store.read(queries.count_runs):
        alive = owner is not None and opened.owner.is_alive(owner)
        if alive and owner is not None:
            owners.add(owner)
        live = shown_status(status, driven=alive)
        counts[live] = counts.get(live, 0) + count
    lost = await opened.store.read(queries.list_lost, LOST_SHOWN)
    wal = path.with_name(path.name + "-wal")
    return Health(
        schema_version=SCHEMA_VERSION,
        faults=tuple(await opened.store.read(queries.list_faults)),
        size_bytes=path.stat().st_size,
        wal_bytes=wal.stat().st_size if wal.exists() else 0,
        runs=counts,
        live_owners=len(owners),
        unknown=tuple(
            (run_id, step) for run_id, step, owner in lost if owner is None or not opened.owner.is_alive(owner)
        ),
    )


async def show_run(opened: OpenStore, run_id: str) -> RunInfo:
    """See `Runtime.get`."""
    run = await opened.find(run_id)
    rows = await opened.store.read(queries.list_steps, run.id)
    state = await opened.store.read(queries.load_state, run.state)
    status = opened.live_status(run)
    if status == RunStatus.INTERRUPTED and any(is_lost(row) for row in rows):
        status = RunStatus.UNKNOWN.value
    return RunInfo(
        run_id=run.run_id,
        generation=run.generation,
        kind=run.kind,
        workflow=run.workflow,
        version=run.version,
        status=status,
        iteration=run.iteration,
        state=None if state is None else state.plain(),
        error=None if run.error is None else ErrorRecord.from_text(run.error).to_error(run.run_id),
        created_at=to_datetime(run.created_at),
        updated_at=to_datetime(run.updated_at),
        deadline_at=None if run.deadline_at is None else to_datetime(run.deadline_at),
        steps=tuple(_step_info(run.run_id, row) for row in rows),
        waits=tuple(open_wait(run.run_id, row) for row in rows if row.state is StepState.WAITING),
    )


async def list_events(opened: OpenStore, run_id: str, after: int, *, follow: bool) -> AsyncGenerator[EventInfo, None]:
    """See `Runtime.events`."""
    run = await opened.find(run_id)
    while True:
        page = await opened.store.read(queries.list_events, run.id, after, EVENTS_PAGE)
        for number, at, kind, step, body in page:
            yield EventInfo(number, to_datetime(at), kind, step, body)
            after = number
        if len(page) == EVENTS_PAGE:
            continue
        # A closed run's events are all there before it is seen to be closed.
        if not follow or run.status in CLOSED:
            return
        await anyio.sleep(FOLLOW_S)
        run = await opened.store.read(queries.get_run_by_key, run.id)


async def list_receipts(opened: OpenStore, run_id: str | None, after: int) -> AsyncGenerator[str, None]:
    """See `Runtime.receipts`."""
    if run_id is not None:
        await opened.find(run_id)
    while True:
        page = await opened.store.read(queries.list_receipts, run_id, after, EVENTS_PAGE)
        for number, line in page:
            yield line
            after = number
        if len(page) < EVENTS_PAGE:
            return


async def listen_to(opened: OpenStore, run_id: str, place: Place) -> AsyncGenerator[Heard, None]:
    """See `Runtime.listen`."""
    while True:
        changed, run = opened.engine.changed.count, await opened.store.read(queries.get_run, run_id)
        if run_id not in opened.active or (run is not None and run.id in opened.engine.drives):
            break
        await opened.engine.changed.after(changed)  # it is about to be driven here
    run = run or await opened.find(run_id)
    async with aclosing(listen(opened.store, opened.engine, run, place, opened.is_driven)) as heard:
        async for told in heard:
            yield told


def _summary(run: RunRow, status: str) -> RunSummary:
    return RunSummary(
        run_id=run.run_id,
        generation=run.generation,
        kind=run.kind,
        workflow=run.workflow,
        status=status,
        created_at=to_datetime(run.created_at),
        updated_at=to_datetime(run.updated_at),
    )


def _step_info(run_id: str, row: StepRow) -> StepInfo:
    return StepInfo(
        path=row.path,
        type=row.type,
        effect=row.effect,
        state=row.state.value,
        attempt=row.attempt,
        key=row.key,
        output=None if row.output is None else row.output.decode(),
        error=None if row.error is None else ErrorRecord.from_text(row.error).to_error(run_id),
        admitted_at=None if row.admitted_at is None else to_datetime(row.admitted_at),
        settled_at=None if row.settled_at is None else to_datetime(row.settled_at),
        due_at=None if row.due_at is None else to_datetime(row.due_at),
    )
