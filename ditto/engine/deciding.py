"""Deciding: what somebody outside a run says of it, recorded. Each is one guarded transaction with its event.

Drives nothing: whoever drives the run, here or in another process, is woken or notices by itself.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any, Literal

import uuid_utils

from ditto.engine import opening
from ditto.engine.certifying import certify_approval, certify_resolution
from ditto.engine.open_store import OpenStore
from ditto.engine.outcomes import is_lost
from ditto.engine.questions import find_question, open_wait
from ditto.engine.resolving import Decision, decide_resolution
from ditto.errors import DefinitionError, RunBusyError, RunCancelledError, TransitionRefusedError
from ditto.store import queries, transitions
from ditto.store.records import Event, Seen
from ditto.store.schema import CLOSED, PAUSING, RunStatus, StepState


async def resolve(opened: OpenStore, run_id: str, step: str, decision: Decision, attempt: int | None) -> None:
    """See `Runtime.resolve`."""
    run = await opened.find(run_id)
    row = await opened.store.read(queries.get_step, run.id, step)
    if row is None or not is_lost(row) or (attempt is not None and attempt != row.attempt):
        found = "has no record" if row is None else f"is {row.state} at attempt {row.attempt}"
        raise DefinitionError(f"run {run_id}: step {step} {found}; only an unknown outcome can be resolved")
    if row.state is StepState.ADMITTED and opened.is_driven(run):
        raise RunBusyError(f"run {run_id}: step {step} is being attempted right now; wait for it", run_id=run_id)
    resolution = decide_resolution(decision, row, opened.store.encode, opened.store.redact)
    receipt = None
    if opened.store.certifies:
        opened.store.open_chain()
        receipt = certify_resolution(run, row, decision, opened.store.redact, resolution.output)
    seen = Seen(row.state, row.attempt)
    await opened.store.commit(
        lambda tx: transitions.resolve_step(
            tx, run.id, step, seen, resolution.state, resolution.output, resolution.error, resolution.event, receipt
        )
    )


async def signal(opened: OpenStore, run_id: str, name: str, body: Any, id: str | None, actor: str) -> bool:
    """See `Runtime.signal`."""
    run = await opened.find(run_id)
    signal_id = opening.check_run_id(id) or str(uuid_utils.uuid7())
    told = opened.store.redact(actor)
    stored = opened.store.encode(body, f"the body of signal {name}")
    sent: bool = await opened.store.commit(
        lambda tx: transitions.send_signal(tx, run.id, name, signal_id, stored, told),
        points=[f"{run.workflow}:signalled"],
    )
    opened.wake(run.id)
    return sent


async def decide(
    opened: OpenStore,
    run_id: str,
    step: str | None,
    decision: Literal["approve", "reject"],
    *,
    actor: str,
    reason: str,
    digest: str | None,
) -> None:
    """See `Runtime.decide`."""
    run = await opened.find(run_id)
    question = find_question(run_id, step, await opened.store.read(queries.list_steps, run.id))
    if run.status in CLOSED:
        raise TransitionRefusedError(
            "decide", f"the run is {run.status}, and nothing waits for the decision; reopen it first", run_id=run_id
        )
    shown = open_wait(run_id, question)
    if digest is not None and digest != shown.digest:
        raise _shows_else(run_id, question.path)
    made = {
        "decision": decision,
        "actor": opened.store.redact(actor),
        "reason": opened.store.redact(reason),
        "digest": shown.digest,
        "at": opened.store.clock.now_us(),
    }
    output = opened.store.encode(made, "the decision")
    event = Event("approval_decided", question.path, {name: made[name] for name in ("decision", "actor", "digest")})
    receipt = None
    if opened.store.certifies:
        opened.store.open_chain()
        receipt = certify_approval(run, question, made, output)
    try:
        await opened.store.commit(
            lambda tx: transitions.settle_wait(tx, run.id, question.path, question.attempt, output, event, receipt),
            points=[f"{run.workflow}/{question.path}:completed"],
        )
    except TransitionRefusedError:
        now = find_question(run_id, question.path, await opened.store.read(queries.list_steps, run.id))
        if now.attempt != question.attempt:
            raise _shows_else(run_id, question.path) from None
        raise
    opened.wake(run.id)


async def cancel(opened: OpenStore, run_id: str, actor: str, reason: str) -> None:
    """See `Runtime.cancel`."""
    run = await opened.find(run_id)
    body = {"actor": opened.store.redact(actor), "reason": opened.store.redact(reason)}
    await opened.store.commit(lambda tx: transitions.cancel_run(tx, run.id, Event("run_cancelled", body=body)))
    if (drive := opened.engine.drives.get(run.id)) is not None:
        drive.stop(RunCancelledError(f"run {run_id} was cancelled", run_id=run_id))


async def pause(opened: OpenStore, run_id: str, actor: str, reason: str) -> None:
    """See `Runtime.pause`."""
    body = {"actor": opened.store.redact(actor), "reason": opened.store.redact(reason)}
    while (run := await opened.find(run_id)).status is not RunStatus.PAUSED:
        if run.status in CLOSED:
            told = f"run {run_id} is {run.status}; only an open run can be paused"
            raise TransitionRefusedError("pause_run", told, run_id=run_id)
        driven = opened.is_driven(run)
        write = partial(transitions.pause_run, seen=run, event=Event("run_paused", body=body), driven=driven)
        with suppress(TransitionRefusedError):  # somebody moved it meanwhile: look again
            await opened.store.commit(write, points=[f"{run.workflow}:{PAUSING if driven else RunStatus.PAUSED}"])
            break
    if (drive := opened.engine.drives.get(run.id)) is not None:
        drive.pause()


async def unpause(opened: OpenStore, run_id: str, actor: str, reason: str) -> None:
    """See `Runtime.unpause`."""
    run = await opened.find(run_id)
    if run.status is not RunStatus.PAUSED:
        raise TransitionRefusedError("unpause_run", f"run {run_id} is {run.status}, not paused", run_id=run_id)
    if opened.is_driven(run):
        raise RunBusyError(f"run {run_id} is still being drained; wait for it", run_id=run_id, retryable=True)
    body = {"actor": opened.store.redact(actor), "reason": opened.store.redact(reason)}
    write = partial(transitions.unpause_run, seen=run, event=Event("run_unpaused", body=body))
    await opened.store.commit(write, points=[f"{run.workflow}:unpaused"])
    opened.wake(run.id)


def _shows_else(run_id: str, step: str) -> TransitionRefusedError:
    told = f"step {step} shows something else by now; look again"
    return TransitionRefusedError("decide", told, run_id=run_id, step=step)
