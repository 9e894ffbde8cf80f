"""The recovery cases that need no kill: each entry against the real service, the HTTP model and real SQLite files.

The numbers are those of the list of cases. What is left afterwards is read by a fresh process (`recovery_audit`).
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import anyio
import pytest

from ditto import StepError, ToolError, UnknownOutcomeError
from ditto.recovery import (
    RecoveryError,
    resume_paused,
    run_checkpoint,
    run_compensation,
    run_fallback,
    run_pause,
    run_retry,
    run_session,
    run_side_effect_check,
    run_timeout,
)
from ditto.testing.provider import Drop, Failure, Reply, Text
from examples._shared.tools.fulfillment_service import Faults
from tests.examples.recovery_world import INPUT, JOB, Order, audit, open_world

pytestmark = pytest.mark.asyncio
LOOKED_UP = "GET /operations/task-"


def answer(order: Order, **changed: Any) -> Text:
    return Text(json.dumps({**order.to_json(), **changed}))


# --- retry -----------------------------------------------------------------------------------------------------------


async def test_01_read_limit_is_corrected(tmp_path: Path, order: Order) -> None:
    async with open_world(tmp_path, order) as world:
        job = await world.enter(run_retry)
        assert job.order == order.to_json()
        assert job.to_json() == world.job.to_json()
    found = audit(tmp_path, order)
    assert (found.stage, found.calls) == ("completed", 1)
    limits = read_limits(tmp_path)
    assert limits == [16, len(order.text.encode())]


async def test_02_retry_is_exhausted(tmp_path: Path, order: Order) -> None:
    async with open_world(tmp_path, order) as world:
        job = await world.enter(run_retry, max_attempts=1)
        assert job.error is not None and job.error.code == "SOURCE_TOO_LARGE"
    found = audit(tmp_path, order)
    assert (found.stage, found.calls) == ("failed", 0)


async def test_03_source_is_missing(tmp_path: Path, order: Order) -> None:
    async with open_world(tmp_path, order) as world:
        (tmp_path / "task.txt").unlink()
        job = await world.enter(run_retry)
        assert job.error is not None and job.error.code == "SOURCE_NOT_FOUND"
    found = audit(tmp_path, order)
    assert (found.stage, found.calls) == ("failed", 0)
    assert len(read_limits(tmp_path)) == 1


def read_limits(directory: Path) -> list[int]:
    """The limits of the retry's reads: each answer that was too large names the next one."""
    with closing(sqlite3.connect(directory / "tasks.sqlite")) as db:
        rows = db.execute(
            "SELECT steps.output FROM ditto_steps AS steps JOIN ditto_runs AS runs ON runs.id = steps.run"
            " WHERE runs.workflow = 'retry' ORDER BY steps.id"
        ).fetchall()
    results = [json.loads(text) for (text,) in rows]
    return [16, *(result["error"]["details"]["requiredBytes"] for result in results[:-1])]


# --- fallback --------------------------------------------------------------------------------------------------------


async def test_04_backup_is_asked(tmp_path: Path, order: Order) -> None:
    async with open_world(tmp_path, order, faults=Faults(primary_unavailable=True)) as world:
        assert (await world.enter(run_fallback)).selected_source == "backup"
    found = audit(tmp_path, order)
    assert (found.stage, found.calls) == ("completed", 1)


async def test_05_backup_is_not_allowed(tmp_path: Path, order: Order) -> None:
    async with open_world(tmp_path, order, faults=Faults(primary_unavailable=True)) as world:
        job = await world.enter(run_fallback, allowed_sources=["primary"])
        assert job.error is not None and job.error.code == "UNAVAILABLE"
        assert "GET /catalog/backup" not in world.requests()
    found = audit(tmp_path, order)
    assert (found.stage, found.calls) == ("failed", 1)


async def test_06_business_refusal_is_not_hidden(tmp_path: Path, order: Order) -> None:
    short = Order(order.sku, order.quantity, order.address, stock=order.quantity - 1)
    async with open_world(tmp_path, short) as world:
        job = await world.enter(run_fallback)
        assert job.error is not None and job.error.code == "INSUFFICIENT_STOCK"
        assert "GET /catalog/backup" not in world.requests()
    found = audit(tmp_path, short)
    assert (found.stage, found.calls) == ("failed", 1)


async def test_catalog_refusal_does_not_fail_a_job_whose_reservation_was_sent(tmp_path: Path, order: Order) -> None:
    exact = Order(order.sku, order.quantity, order.address, stock=order.quantity)
    async with open_world(tmp_path, exact, faults=Faults(reservation_hold=True)) as world:
        await cancelled_in_reserve(world)
        world.service.faults = Faults()
        await world.service.settled("task-reserve")
        assert (await world.enter(run_fallback)).stage == "completed"
    assert audit(tmp_path, exact).posts == ["reserve", "ship"]


# --- timeout ---------------------------------------------------------------------------------------------------------


async def test_07_catalog_misses_its_deadline(tmp_path: Path, order: Order) -> None:
    async with open_world(tmp_path, order, faults=Faults(catalog_delay_ms=60_000)) as world:
        await world.enter(run_checkpoint, stop_after="prepared")
        with anyio.fail_after(30):  # half of what the catalog takes
            job = await world.enter(run_timeout, timeout_ms=75)
        assert job.error is not None and job.error.code == "CATALOG_TIMEOUT"
        assert job.selected_source is None
    found = audit(tmp_path, order)
    assert (found.stage, found.calls) == ("timed-out", 1)


async def test_timed_out_job_goes_on(tmp_path: Path, order: Order) -> None:
    async with open_world(tmp_path, order, faults=Faults(catalog_delay_ms=60_000)) as world:
        await world.enter(run_timeout)
        world.service.faults = Faults()
        assert (await world.enter(run_timeout, timeout_ms=10_000)).selected_source == "primary"
    assert audit(tmp_path, order).stages == ["queued", "prepared", "timed-out", "prepared", "reserved", "completed"]


async def test_08_catalog_is_inside_its_deadline(tmp_path: Path, order: Order) -> None:
    async with open_world(tmp_path, order, faults=Faults(catalog_delay_ms=20)) as world:
        await world.enter(run_timeout, timeout_ms=10_000)
    found = audit(tmp_path, order)
    assert (found.stage, found.calls) == ("completed", 1)


# --- pause -----------------------------------------------------------------------------------------------------------


async def test_10_approved_job_goes_on(tmp_path: Path, order: Order) -> None:
    async with open_world(tmp_path, order, requires_approval=True) as world:
        assert (await world.enter(run_pause)).stage == "paused"
        assert world.requests() == []
        world.store.decide(JOB, "approve", "Ada")
        job = await world.enter(resume_paused)
        assert job.approval is not None and job.approval.actor == "Ada"
    found = audit(tmp_path, order)
    assert (found.stage, found.calls) == ("completed", 1)
    assert found.stages == ["queued", "prepared", "paused", "approved", "reserved", "completed"]


async def test_11_rejected_job_stays_rejected(tmp_path: Path, order: Order) -> None:
    async with open_world(tmp_path, order, requires_approval=True) as world:
        await world.enter(run_pause)
        world.store.decide(JOB, "reject", "Ada")
        assert (await world.enter(resume_paused)).stage == "rejected"
        with pytest.raises(ToolError) as refused:
            world.store.decide(JOB, "approve", "Ada")
        assert refused.value.code == "NOT_PAUSED"
    found = audit(tmp_path, order)
    assert (found.stage, found.calls) == ("rejected", 1)
    assert found.ledger["requests"] == []


async def test_25_order_edited_after_approval(tmp_path: Path, order: Order) -> None:
    async with open_world(tmp_path, order, requires_approval=True) as world:
        await world.enter(run_pause)
        world.store.decide(JOB, "approve", "Ada")
        with closing(sqlite3.connect(world.store.path)) as db:
            db.execute("UPDATE jobs SET order_json = json_set(order_json, '$.address', 'Elsewhere')")
            db.commit()
        job = await world.enter(resume_paused)
        assert job.error is not None and job.error.code == "APPROVAL_MISMATCH"
    found = audit(tmp_path, order)
    assert found.stage == "failed" and found.posts == []


ENTRIES: list[Callable[..., Any]] = [
    run_retry,
    run_fallback,
    run_timeout,
    run_checkpoint,
    run_pause,
    resume_paused,
    run_session,
    run_compensation,
    run_side_effect_check,
]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda each: each.__name__)
async def test_30_every_entry_leaves_a_paused_job_paused(
    tmp_path: Path, order: Order, entry: Callable[..., Any]
) -> None:
    async with open_world(tmp_path, order, requires_approval=True) as world:
        await world.enter(run_pause)
        await world.enter(entry)
    found = audit(tmp_path, order)
    assert found.stage == "paused" and found.ledger["requests"] == []
    assert found.calls == (2 if entry is run_session else 1)


# --- compensation ----------------------------------------------------------------------------------------------------


async def test_13_shipment_rejected_stock_restored(tmp_path: Path, order: Order) -> None:
    async with open_world(tmp_path, order, faults=Faults(shipping_rejected=True)) as world:
        job = await world.enter(run_compensation)
        assert job.error is not None and job.error.code == "SHIPPING_REJECTED"
        asked = world.requests()
        again = await world.enter(run_compensation)
        assert again.to_json() == job.to_json() and world.requests() == asked
    found = audit(tmp_path, order)
    assert (found.stage, found.calls) == ("compensated", 1)
    assert found.made == {"reserve": 1, "release": 1}


async def test_14_release_rejected(tmp_path: Path, order: Order) -> None:
    async with open_world(tmp_path, order, faults=Faults(shipping_rejected=True, release_rejected=True)) as world:
        job = await world.enter(run_compensation)
        assert job.error is not None and job.error.code == "COMPENSATION_RELEASE_REJECTED"
        await world.enter(run_compensation)
    found = audit(tmp_path, order)
    assert (found.stage, found.calls, found.made) == ("needs-review", 1, {"reserve": 1})
    assert found.posts == ["reserve", "ship", "release"]


async def test_shipment_rejected_elsewhere_is_taken_up_by_compensation_only(tmp_path: Path, order: Order) -> None:
    async with open_world(tmp_path, order, faults=Faults(shipping_rejected=True)) as world:
        job = await world.enter(run_side_effect_check)
        assert job.stage == "needs-review" and job.error is not None and job.error.code == "SHIPPING_REJECTED"
        assert job.operations["reserve"].state == "committed"
        assert (await world.enter(run_checkpoint)).stage == "needs-review"
        assert (await world.enter(run_compensation)).stage == "compensated"
    assert audit(tmp_path, order).made == {"reserve": 1, "release": 1}


async def test_29_release_response_lost_and_look_up_down(tmp_path: Path, order: Order) -> None:
    faults = Faults(shipping_rejected=True, drop_release_response=True)
    async with open_world(tmp_path, order, faults=faults) as world:
        await world.enter(run_side_effect_check)
        world.service.faults = Faults(drop_release_response=True, lookup_unavailable="always")
        # The look-up before the release is down, too: nothing is sent.
        job = await world.enter(run_compensation)
        assert job.stage == "uncertain" and job.error is not None and job.error.operation == "release"
    found = audit(tmp_path, order)
    assert (found.stage, found.posts) == ("uncertain", ["reserve", "ship"])


async def test_29_release_lost_after_it_was_sent(tmp_path: Path, order: Order) -> None:
    faults = Faults(shipping_rejected=True, drop_release_response=True)
    async with open_world(tmp_path, order, faults=faults) as world:
        break_look_up_after(world, "/release")
        job = await world.enter(run_compensation)
        assert job.stage == "uncertain" and job.error is not None and job.error.operation == "release"
        assert (await world.enter(run_checkpoint)).stage == "uncertain"
        world.service.faults = Faults()
        job = await world.enter(run_compensation)
        assert job.stage == "compensated" and job.error is not None and job.error.code == "SHIPPING_REJECTED"
    found = audit(tmp_path, order)
    assert found.posts.count("release") == 1 and found.calls == 1


def break_look_up_after(world: Any, path: str) -> None:
    """Once this path is asked for, look-ups are down."""
    submit = world.service._submit

    async def watched(kind: Any, request: Any) -> Any:
        response = await submit(kind, request)
        if request.url.path == path:
            world.service.faults = Faults(drop_release_response=True, lookup_unavailable="always")
        return response

    world.service._submit = watched
    world.service._routes = world.service._build_routes()


# --- operations ------------------------------------------------------------------------------------------------------


async def test_15_reservation_response_dropped(tmp_path: Path, order: Order) -> None:
    async with open_world(tmp_path, order, faults=Faults(drop_reservation_response=True)) as world:
        await world.enter(run_side_effect_check)
        assert world.requests()[:3] == [LOOKED_UP + "reserve", "POST /reserve", LOOKED_UP + "reserve"]
    found = audit(tmp_path, order)
    assert (found.stage, found.calls) == ("completed", 1)
    assert found.posts == ["reserve", "ship"]


async def test_16_reservation_lost_and_look_up_down(tmp_path: Path, order: Order) -> None:
    faults = Faults(drop_reservation_response=True, lookup_unavailable="after_write")
    async with open_world(tmp_path, order, faults=faults) as world:
        job = await world.enter(run_side_effect_check)
        assert job.stage == "uncertain" and job.error is not None and job.error.operation == "reserve"
        assert (await world.enter(run_side_effect_check)).revision == job.revision
        world.service.faults = Faults()
        await world.enter(run_side_effect_check)
    found = audit(tmp_path, order)
    assert (found.stage, found.calls, found.posts) == ("completed", 1, ["reserve", "ship"])


async def test_17_caller_cancels_a_slow_reservation(tmp_path: Path, order: Order) -> None:
    async with open_world(tmp_path, order, faults=Faults(reservation_hold=True)) as world:
        await cancelled_in_reserve(world)
        job = await world.enter(run_checkpoint)
        assert job.stage == "uncertain"
        assert world.requests().count("POST /reserve") == 1
        world.service.faults = Faults()
        await world.service.settled("task-reserve")
        await world.enter(run_checkpoint)
    found = audit(tmp_path, order)
    assert (found.stage, found.calls, found.posts) == ("completed", 1, ["reserve", "ship"])


async def cancelled_in_reserve(world: Any) -> None:
    """An entry whose caller gives up while the reservation is pending over there."""
    async with world.runtime() as runtime:
        ended = []
        async with anyio.create_task_group() as group:

            async def enter() -> None:
                await run_checkpoint(runtime, INPUT)
                ended.append("returned")

            group.start_soon(enter)
            await world.service.recorded("task-reserve")
            group.cancel_scope.cancel()
        assert ended == []


async def test_18_look_up_unavailable_from_the_start(tmp_path: Path, order: Order) -> None:
    async with open_world(tmp_path, order, faults=Faults(lookup_unavailable="always")) as world:
        job = await world.enter(run_side_effect_check)
        assert job.error is not None and (job.error.code, job.error.operation) == ("LOOKUP_UNCONFIRMED", "reserve")
        world.service.faults = Faults()
        found = audit(tmp_path, order)
        assert (found.stage, found.calls, found.posts) == ("uncertain", 1, [])
        assert (await world.enter(run_side_effect_check)).stage == "completed"


async def test_19_completed_job_entered_again(tmp_path: Path, order: Order) -> None:
    async with open_world(tmp_path, order) as world:
        job = await world.enter(run_checkpoint)
        asked = world.requests()
        for entry in ENTRIES:
            if entry is not run_session:
                assert (await world.enter(entry)).to_json() == job.to_json()
        assert world.requests() == asked
    found = audit(tmp_path, order)
    assert (found.stage, found.calls) == ("completed", 1)


async def test_20_cancelled_before_any_work(tmp_path: Path, order: Order) -> None:
    async with open_world(tmp_path, order) as world, world.runtime() as runtime:
        with anyio.CancelScope() as scope:
            scope.cancel()
            await run_checkpoint(runtime, INPUT)
        assert scope.cancelled_caught
    found = audit(tmp_path, order)
    assert (found.stage, found.calls) == ("queued", 0)


# --- the model's answers ---------------------------------------------------------------------------------------------

BROKEN: dict[str, Callable[[Order], Reply]] = {
    "no JSON": lambda order: Text("I would rather not."),
    "a list": lambda order: Text("[1]"),
    "empty": lambda order: Text(""),
    "a name twice": lambda order: Text('{"sku":"A","sku":"B","quantity":1,"address":"C"}'),
    "NaN": lambda order: Text('{"sku":"A","quantity":NaN,"address":"C"}'),
    "a field too many": lambda order: answer(order, note="x"),
    "quantity 0": lambda order: answer(order, quantity=0),
    "quantity a text": lambda order: answer(order, quantity="2"),
    "cut at the length": lambda order: Text(json.dumps(order.to_json()), finish_reason="length"),
    "HTTP 500": lambda order: Failure(500),
    "HTTP 200 and no answer": lambda order: Text(None),
}


@pytest.mark.parametrize("name", BROKEN)
async def test_28_broken_answer_is_asked_for_once_more(tmp_path: Path, order: Order, name: str) -> None:
    async with open_world(tmp_path, order, script=[BROKEN[name](order), answer(order)]) as world:
        with pytest.raises(StepError) as failed:
            await world.enter(run_checkpoint)
        assert not isinstance(failed.value, UnknownOutcomeError)
        found = audit(tmp_path, order)
        assert (found.stage, found.calls, found.ledger["requests"]) == ("queued", 1, [])
        await world.enter(run_checkpoint)
    found = audit(tmp_path, order)
    assert (found.stage, found.calls) == ("completed", 2)


async def test_24_cut_answer_is_unknown_and_not_asked_again(tmp_path: Path, order: Order) -> None:
    script: list[Reply] = [Drop("mid_body", reply=answer(order)), answer(order)]
    async with open_world(tmp_path, order, script=script) as world:
        with pytest.raises(UnknownOutcomeError):
            await world.enter(run_checkpoint)
        with pytest.raises(UnknownOutcomeError) as unknown:
            await world.enter(run_checkpoint)
        found = audit(tmp_path, order)
        assert (found.stage, found.calls) == ("queued", 1)
        async with world.runtime() as runtime:
            await runtime.resolve(
                f"{JOB}:prepare", unknown.value.steps[0], ask_again=True, actor="Ada", reason="it was cut"
            )
        await world.enter(run_checkpoint)
    found = audit(tmp_path, order)
    assert (found.stage, found.calls) == ("completed", 2)


async def test_session_answer_must_repeat_the_checkpoint(tmp_path: Path, order: Order) -> None:
    said = {"sku": order.sku, "quantity": order.quantity, "stage": "prepared"}
    script = [answer(order), Text(json.dumps({**said, "quantity": float(order.quantity)})), Text(json.dumps(said))]
    async with open_world(tmp_path, order, script=script) as world:
        await world.enter(run_checkpoint, stop_after="prepared")
        with pytest.raises(StepError) as failed:
            await world.enter(run_session)
        assert failed.value.code == "SESSION_INVALID"
        found = await world.enter(run_session, question="How far?")
        assert found.answer == said
        assert [item.role for item in found.job.context.items] == ["system", "user", "assistant", "user", "assistant"]
    assert audit(tmp_path, order).calls == 3


# --- names for what is wrong -----------------------------------------------------------------------------------------


async def test_31_source_edited_after_creation(tmp_path: Path, order: Order) -> None:
    async with open_world(tmp_path, order) as world:
        (tmp_path / "task.txt").write_text(order.text + " Twice.", encoding="utf-8")
        job = await world.enter(run_checkpoint)
        assert job.error is not None and job.error.code == "SOURCE_CHANGED"
    found = audit(tmp_path, order)
    assert (found.stage, found.calls) == ("failed", 0)


async def test_31_second_create_unknown_job_other_version(tmp_path: Path, order: Order) -> None:
    async with open_world(tmp_path, order) as world:
        with pytest.raises(ToolError) as refused:
            await world.store.create(JOB)
        assert refused.value.code == "JOB_EXISTS"
        with pytest.raises(ToolError) as refused:
            world.store.job("nobody")
        assert refused.value.code == "JOB_NOT_FOUND"
        with closing(sqlite3.connect(world.store.path)) as db:
            db.execute("UPDATE jobs SET schema_version = 2")
            db.commit()
        with pytest.raises(StepError) as failed:
            await world.enter(run_checkpoint)
        assert failed.value.code == "SCHEMA_UNSUPPORTED"
        assert world.requests() == [] and world.model.count == 0


@pytest.mark.parametrize(
    ("entry", "options"),
    [
        (run_retry, {"initial_max_bytes": 0}),
        (run_retry, {"initial_max_bytes": 65537}),
        (run_retry, {"initial_max_bytes": True}),
        (run_retry, {"max_attempts": 6}),
        (run_fallback, {"allowed_sources": []}),
        (run_fallback, {"allowed_sources": ["primary", "primary"]}),
        (run_fallback, {"allowed_sources": ["other"]}),
        (run_timeout, {"timeout_ms": 0}),
        (run_timeout, {"timeout_ms": 60_001}),
        (run_checkpoint, {"stop_after": "shipped"}),
        (run_session, {"question": "x" * 1001}),
        (run_session, {"question": " "}),
        (run_pause, {}),
    ],
)
async def test_wrong_options_start_nothing(
    tmp_path: Path, order: Order, entry: Callable[..., Any], options: dict[str, Any]
) -> None:
    async with open_world(tmp_path, order) as world:
        with pytest.raises(RecoveryError):
            await world.enter(entry, **options)
        assert world.job.revision == 1 and world.model.count == 0
