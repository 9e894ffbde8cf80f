"""The recovery cases in which processes die: real ones, by a real SIGKILL, at a crash point or when they have said so.

Who goes on is a new process, and who looks at what is left is another one.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import httpx
import pytest

from ditto.recovery import run_checkpoint
from examples._shared.tools.fulfillment_service import Faults, FulfillmentService
from tests.examples.recovery_domains import Setting
from tests.examples.recovery_processes import ENVIRONMENT, Process, do_acts, start_acts
from tests.examples.recovery_world import JOB, Order, audit, open_world

TO_THE_END = {"enter": "run_checkpoint"}
TO_RESERVED = {"enter": "run_checkpoint", "stop_after": "reserved"}
PREPARE = f"{JOB}:prepare"


def set_up(directory: Path, order: Order, faults: Faults | None = None, **more: Any) -> None:
    """What the world of this folder is like, for the next processes."""
    subject = {**order.to_json(), "stock": order.stock}
    Setting("orders", subject, (faults or Faults()).to_json(), **more).write(directory)


def killed_after(directory: Path, act: dict[str, Any], stage: str) -> None:
    """A process that has brought the job to a stage, and is killed there."""
    child = start_acts(directory, act, {"hold": "done"})
    assert json.loads(child.line())["stage"] == stage
    assert json.loads(child.line()) == {"holds": "done"}
    child.kill()


def killed_at(directory: Path, point: str, *acts: dict[str, Any]) -> None:
    """A process that kills itself at a crash point."""
    code, _ = start_acts(directory, *acts, kill_at=point).end()
    assert code == -9, f"{point} was not passed"


# --- killed, and gone on with ----------------------------------------------------------------------------------------


def test_case_09_killed_after_reserved(tmp_path: Path, order: Order) -> None:
    set_up(tmp_path, order)
    killed_after(tmp_path, TO_RESERVED, "reserved")
    assert audit(tmp_path, order).calls == 1
    do_acts(tmp_path, TO_THE_END)
    found = audit(tmp_path, order)
    assert (found.stage, found.calls, found.posts) == ("completed", 1, ["reserve", "ship"])


def test_case_10_killed_while_paused(tmp_path: Path, order: Order) -> None:
    set_up(tmp_path, order, requires_approval=True)
    killed_after(tmp_path, {"enter": "run_pause"}, "paused")
    assert audit(tmp_path, order).ledger["requests"] == []
    do_acts(tmp_path, {"decide": "approve"}, {"enter": "resume_paused"})
    found = audit(tmp_path, order)
    assert (found.stage, found.calls) == ("completed", 1)
    assert found.stages == ["queued", "prepared", "paused", "approved", "reserved", "completed"]


def test_case_12_killed_after_reserved_and_asked(tmp_path: Path, order: Order) -> None:
    set_up(tmp_path, order)
    killed_after(tmp_path, TO_RESERVED, "reserved")
    [said] = do_acts(tmp_path, {"enter": "run_session", "question": "How far is it?"})
    assert said["result"]["answer"] == {"sku": order.sku, "quantity": order.quantity, "stage": "reserved"}
    found = audit(tmp_path, order)
    assert (found.stage, found.calls, found.posts) == ("reserved", 2, ["reserve"])


LOST = Faults(drop_reservation_response=True, lookup_unavailable="after_write")


def test_case_16_killed_while_uncertain(tmp_path: Path, order: Order) -> None:
    set_up(tmp_path, order, LOST)
    killed_after(tmp_path, {"enter": "run_side_effect_check"}, "uncertain")
    confirmed_later(tmp_path, order)


@pytest.mark.parametrize("point", ["operation/submitted:unknown:before", "operation/submitted:unknown:after"])
def test_case_16_killed_before_it_is_known_to_be_uncertain(tmp_path: Path, order: Order, point: str) -> None:
    set_up(tmp_path, order, LOST)
    killed_at(tmp_path, point, {"enter": "run_side_effect_check"})
    confirmed_later(tmp_path, order)


def confirmed_later(directory: Path, order: Order) -> None:
    """An entry while look-ups are down changes nothing; a later one confirms."""
    [said] = do_acts(directory, {"enter": "run_side_effect_check"})
    assert said["stage"] == "uncertain"
    set_up(directory, order)
    [said] = do_acts(directory, {"enter": "run_side_effect_check"})
    assert said["stage"] == "completed"
    found = audit(directory, order)
    assert (found.stage, found.calls, found.posts) == ("completed", 1, ["reserve", "ship"])


@pytest.mark.parametrize("point", ["prepare/sampled:completed:after", "prepare/saved:completed:before"])
def test_case_21_killed_between_the_answer_and_its_checkpoint(tmp_path: Path, order: Order, point: str) -> None:
    set_up(tmp_path, order)
    killed_at(tmp_path, point, TO_THE_END)
    found = audit(tmp_path, order, killed=True)
    assert (found.stage, found.calls) == ("queued", 1)
    do_acts(tmp_path, TO_THE_END)
    found = audit(tmp_path, order)
    assert (found.stage, found.calls, found.posts) == ("completed", 1, ["reserve", "ship"])


# --- a model call whose outcome is unknown ---------------------------------------------------------------------------


def killed_in_flight(directory: Path, order: Order) -> None:
    """A process that is killed while the model answers. Others do not ask again by themselves."""
    set_up(directory, order, script="stalling")
    child = start_acts(directory, TO_THE_END)
    assert json.loads(child.line()) == {"stalled": 1}
    child.kill()
    for _ in range(2):
        [said] = do_acts(directory, TO_THE_END, code=4)
        assert (said["run"], said["steps"]) == (PREPARE, ["sampled"])
    found = audit(directory, order)
    assert (found.stage, found.calls, found.ledger["requests"]) == ("queued", 1, [])


def settled(directory: Path, order: Order, calls: int) -> None:
    do_acts(directory, TO_THE_END)
    found = audit(directory, order)
    assert (found.stage, found.calls, found.posts) == ("completed", calls, ["reserve", "ship"])


def test_case_24_asked_again_by_a_decision(tmp_path: Path, order: Order) -> None:
    killed_in_flight(tmp_path, order)
    do_acts(tmp_path, {"resolve": PREPARE, "step": "sampled", "ask_again": True})
    settled(tmp_path, order, calls=2)


def test_case_24_answered_by_a_decision(tmp_path: Path, order: Order) -> None:
    killed_in_flight(tmp_path, order)
    answer = json.dumps(order.to_json())
    do_acts(tmp_path, {"resolve": PREPARE, "step": "sampled", "response": answer})
    settled(tmp_path, order, calls=1)


@pytest.mark.parametrize(("decision", "calls"), [(["--ask-again"], 2), (["--response", "answer.json"], 1)])
def test_case_24_decided_on_the_command_line(tmp_path: Path, order: Order, decision: list[str], calls: int) -> None:
    killed_in_flight(tmp_path, order)
    message = {"role": "assistant", "content": json.dumps(order.to_json())}
    answer = {"message": message, "finish_reason": "stop"}
    (tmp_path / "answer.json").write_text(json.dumps(answer), encoding="utf-8")
    ditto = shutil.which("ditto", path=Path(sys.executable).parent)
    assert ditto is not None
    who = ["--actor", "Ada", "--reason", "seen", "--store", "tasks.sqlite"]
    subprocess.run([ditto, "resolve", PREPARE, "sampled", *decision, *who], cwd=tmp_path, check=True)
    settled(tmp_path, order, calls)


# --- two at once -----------------------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_case_26_two_processes_enter_at_once(tmp_path: Path, order: Order) -> None:
    async with open_world(tmp_path, order, faults=Faults(reservation_hold=True)) as world:
        set_up(tmp_path, order, service_url=world.service_url, model_url=world.model_url)
        both = [start_acts(tmp_path, {"hold": "ready"}, TO_THE_END) for _ in range(2)]
        for child in both:
            await anyio.to_thread.run_sync(child.line)
        for child in both:
            child.tell()
        said: list[dict[str, Any]] = []

        async def listen(child: Process) -> None:
            said.append(json.loads(await anyio.to_thread.run_sync(child.line)))
            world.service.faults = Faults()  # the one who works goes on, now that the other has been told

        async with anyio.create_task_group() as group:
            for child in both:
                group.start_soon(listen, child)
    told, worked = said
    assert (told["error"], worked["stage"]) == ("run.busy", "completed")
    assert sorted(child.end()[0] for child in both) == [0, 75]
    found = audit(tmp_path, order)
    assert (found.stage, found.calls, found.posts) == ("completed", 1, ["reserve", "ship"])


@pytest.mark.asyncio
async def test_case_26_a_command_is_told_that_another_process_has_the_job(tmp_path: Path, order: Order) -> None:
    nothing: dict[str, Any] = {"faults": {}, "options": {}}
    fixture = {
        "inventory": {order.sku: order.stock}, "requiresApproval": False, "begin": nothing, "resume": nothing
    }  # fmt: skip
    (tmp_path / "fixture.json").write_text(json.dumps(fixture), encoding="utf-8")
    command = [sys.executable, "-m", "examples.control-flow.recovery.checkpoint_resume", "--directory", str(tmp_path)]
    faults = Faults(reservation_hold=True)
    async with open_world(tmp_path, order, faults=faults) as world, anyio.create_task_group() as group:
        group.start_soon(world.enter, run_checkpoint)
        await world.service.recorded("task-reserve")
        done = await anyio.run_process(command, env=ENVIRONMENT, check=False)
        world.service.faults = Faults()
    assert done.returncode == 75
    assert json.loads(done.stdout)["checkpoint"]["stage"] == "prepared"
    found = audit(tmp_path, order)
    assert (found.stage, found.posts) == ("completed", ["reserve", "ship"])


@pytest.mark.asyncio
async def test_case_32_a_key_belongs_to_one_order(tmp_path: Path, order: Order) -> None:
    async with open_world(tmp_path, order) as world, httpx.AsyncClient(base_url=world.service_url) as client:
        other = {**order.to_json(), "address": f"{order.address} back door"}
        await submit(client, order.to_json())
        refused = await client.post("/reserve", json=body_of(other))
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "KEY_CONFLICT")
        assert (await world.enter(run_checkpoint)).stage == "completed"
    found = audit(tmp_path, order)
    assert found.ledger["shipments"][0]["address"] == order.address


@pytest.mark.asyncio
async def test_case_32_a_job_whose_key_another_order_has_waits_for_a_person(tmp_path: Path, order: Order) -> None:
    async with open_world(tmp_path, order) as world, httpx.AsyncClient(base_url=world.service_url) as client:
        await submit(client, {**order.to_json(), "address": f"{order.address} back door"})
        job = await world.enter(run_checkpoint)
        assert job.stage == "needs-review"
        assert job.error is not None and job.error.code == "RECEIPT_MISMATCH"
    assert audit(tmp_path, order).posts == ["reserve"]


@pytest.mark.asyncio
async def test_case_32_two_submitters_after_absent(tmp_path: Path, order: Order) -> None:
    ledger, stock = tmp_path / "service.sqlite", {order.sku: order.stock}
    async with FulfillmentService(ledger, stock, faults=Faults(reservation_hold=True)) as here:
        there = Process("examples._shared.tools.fulfillment_service", "--db", ledger)
        url = json.loads(await anyio.to_thread.run_sync(there.line))["url"]
        async with httpx.AsyncClient(base_url=here.url) as ours, httpx.AsyncClient(base_url=url) as theirs:
            for client in (ours, theirs):
                assert (await client.get("/operations/task-reserve")).json()["state"] == "absent"
            answers: list[dict[str, Any]] = []

            async def send(client: httpx.AsyncClient) -> None:
                answers.append(await submit(client, order.to_json()))
                here.faults = Faults()

            async with anyio.create_task_group() as group:
                group.start_soon(send, ours)
                await here.recorded("task-reserve")
                group.start_soon(send, theirs)
        there.kill()
    one, other = answers
    assert one == other and one["state"] == "committed"
    async with open_world(tmp_path, order) as world:
        await world.enter(run_checkpoint)
    found = audit(tmp_path, order)
    assert (found.stage, found.posts) == ("completed", ["reserve", "reserve", "ship"])


async def submit(client: httpx.AsyncClient, order: dict[str, Any]) -> dict[str, Any]:
    response = await client.post("/reserve", json=body_of(order))
    assert response.status_code == 200
    return dict(response.json())


def body_of(order: dict[str, Any]) -> dict[str, Any]:
    return {"key": "task-reserve", "order": order, "reservationKey": "task-reserve"}
