"""The recovery workflows in another domain, unchanged: money transfers, and a chain of four that is undone in reverse.

Q01, Q02 and Q04 are known failures of systems that compensate: a wrong order, a failed undo that is reported as done,
and a crash in the middle.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ditto.recovery import (
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
from tests.examples.recovery_domains import Setting
from tests.examples.recovery_processes import do_acts, start_acts
from tests.examples.recovery_world import JOB, Audit, examine
from tests.examples.transfer_adapter import CHAIN
from tests.examples.transfer_service import TransferFaults
from tests.examples.transfer_world import Transfer, check_transfer, effects, open_transfers

FORWARD = ["hold", "capture"]


def audit(directory: Path, transfer: Transfer, domain: str = "transfer", *, killed: bool = False) -> Audit:
    found = examine(domain, directory, killed=killed)
    check_transfer(found, transfer)
    return found


# --- the eight -------------------------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_case_27_retry(tmp_path: Path, transfer: Transfer) -> None:
    async with open_transfers(tmp_path, transfer) as world:
        assert (await world.enter(run_retry)).order == transfer.to_json()
    found = audit(tmp_path, transfer)
    assert (found.stage, found.calls, effects(found)) == ("completed", 1, FORWARD)


@pytest.mark.asyncio
async def test_case_27_fallback(tmp_path: Path, transfer: Transfer) -> None:
    async with open_transfers(tmp_path, transfer, faults=TransferFaults(down=("core",))) as world:
        assert (await world.enter(run_fallback)).selected_source == "mirror"
    found = audit(tmp_path, transfer)
    assert (found.stage, found.calls, effects(found)) == ("completed", 1, FORWARD)


@pytest.mark.asyncio
async def test_case_27_timeout(tmp_path: Path, transfer: Transfer) -> None:
    async with open_transfers(tmp_path, transfer, faults=TransferFaults(stalled=True)) as world:
        job = await world.enter(run_timeout)
        assert job.stage == "timed-out" and job.error is not None and job.error.code == "CATALOG_TIMEOUT"
        world.service.faults = TransferFaults()
        await world.enter(run_timeout, timeout_ms=10_000)
    found = audit(tmp_path, transfer)
    assert (found.stage, found.calls, effects(found)) == ("completed", 1, FORWARD)


@pytest.mark.asyncio
async def test_case_27_checkpoint(tmp_path: Path, transfer: Transfer) -> None:
    async with open_transfers(tmp_path, transfer) as world:
        assert (await world.enter(run_checkpoint, stop_after="held")).stage == "held"
        assert effects(audit(tmp_path, transfer)) == ["hold"]
        await world.enter(run_checkpoint)
    found = audit(tmp_path, transfer)
    assert (found.stage, found.calls, effects(found)) == ("completed", 1, FORWARD)


@pytest.mark.asyncio
async def test_case_27_pause(tmp_path: Path, transfer: Transfer) -> None:
    async with open_transfers(tmp_path, transfer, requires_approval=True) as world:
        assert (await world.enter(run_pause)).stage == "paused"
        assert world.requests() == []
        world.store.decide(JOB, "approve", "Ada")
        await world.enter(resume_paused)
    found = audit(tmp_path, transfer)
    assert (found.stage, found.calls, effects(found)) == ("completed", 1, FORWARD)


@pytest.mark.asyncio
async def test_case_27_session(tmp_path: Path, transfer: Transfer) -> None:
    async with open_transfers(tmp_path, transfer) as world:
        await world.enter(run_checkpoint, stop_after="held")
        found = await world.enter(run_session)
        assert found.answer == {"from": transfer.payer, "amount": transfer.amount, "stage": "held"}
    left = audit(tmp_path, transfer)
    assert (left.stage, left.calls, effects(left)) == ("held", 2, ["hold"])


@pytest.mark.asyncio
async def test_case_27_compensation(tmp_path: Path, transfer: Transfer) -> None:
    async with open_transfers(tmp_path, transfer, faults=TransferFaults(rejected=("capture",))) as world:
        job = await world.enter(run_compensation)
        assert job.error is not None and job.error.code == "CAPTURE_REFUSED"
    found = audit(tmp_path, transfer)
    assert (found.stage, found.calls, effects(found)) == ("compensated", 1, ["hold", "void"])


@pytest.mark.asyncio
async def test_case_27_side_effect_check(tmp_path: Path, transfer: Transfer) -> None:
    async with open_transfers(tmp_path, transfer, faults=TransferFaults(dropped=("hold",))) as world:
        await world.enter(run_side_effect_check)
        asked = ["GET /operations/task-hold", "POST /operations/task-hold", "GET /operations/task-hold"]
        assert world.requests()[:3] == asked
    found = audit(tmp_path, transfer)
    assert (found.stage, found.calls, effects(found)) == ("completed", 1, FORWARD)


# --- four in a row, undone in reverse --------------------------------------------------------------------------------

DONE = ["register", "hold", "announce"]
UNDONE = ["retract", "void", "unregister"]


@pytest.mark.asyncio
async def test_case_27_chain_goes_to_its_end(tmp_path: Path, transfer: Transfer) -> None:
    async with open_transfers(tmp_path, transfer, profile=CHAIN) as world:
        await world.enter(run_compensation)
    found = audit(tmp_path, transfer, "chain")
    assert (found.stage, effects(found)) == ("completed", [*DONE, "capture"])
    assert found.stages == ["queued", "prepared", "registered", "held", "announced", "completed"]


@pytest.mark.asyncio
@pytest.mark.parametrize("number", range(4))
async def test_case_27_q01_undone_in_reverse(tmp_path: Path, transfer: Transfer, number: int) -> None:
    """Whichever is rejected, what stood before it is undone, the last first; the rejected one is not."""
    rejected = CHAIN.operations[number].kind
    async with open_transfers(tmp_path, transfer, profile=CHAIN, faults=TransferFaults(rejected=(rejected,))) as world:
        job = await world.enter(run_compensation)
        assert job.error is not None and job.error.code == f"{rejected.upper()}_REFUSED"
        asked = world.requests()
        assert (await world.enter(run_compensation)).to_json() == job.to_json()
        assert world.requests() == asked
    found = audit(tmp_path, transfer, "chain")
    assert found.stage == ("compensated" if number else "failed")
    assert effects(found) == [*DONE[:number], *UNDONE[3 - number :]]


@pytest.mark.asyncio
async def test_case_27_q02_an_undo_that_fails_twice(tmp_path: Path, transfer: Transfer) -> None:
    """Each entry tries again what it knows not to have been done; nothing is called compensated before."""
    faults = TransferFaults(rejected=("capture",), refused={"void": 2})
    async with open_transfers(tmp_path, transfer, profile=CHAIN, faults=faults) as world:
        job = await world.enter(run_compensation)
        assert job.stage == "uncertain" and job.error is not None and job.error.operation == "void"
        assert effects(audit(tmp_path, transfer, "chain")) == [*DONE, "retract"]
        job = await world.enter(run_compensation)
        assert job.stage == "compensated" and job.error is not None and job.error.code == "CAPTURE_REFUSED"
    found = audit(tmp_path, transfer, "chain")
    assert (found.calls, effects(found)) == (1, [*DONE, *UNDONE])


@pytest.mark.asyncio
async def test_case_27_q02_an_undo_that_is_rejected_for_good(tmp_path: Path, transfer: Transfer) -> None:
    """It is never called compensated, and what is left is for a person."""
    async with open_transfers(
        tmp_path, transfer, profile=CHAIN, faults=TransferFaults(rejected=("capture", "void"))
    ) as world:
        job = await world.enter(run_compensation)
        assert job.stage == "needs-review"
        assert job.error is not None and job.error.code == "COMPENSATION_VOID_REJECTED"
        asked = world.requests()
        assert (await world.enter(run_compensation)).to_json() == job.to_json()
        assert world.requests() == asked
    found = audit(tmp_path, transfer, "chain")
    assert "compensated" not in found.stages
    assert (found.stage, effects(found)) == ("needs-review", [*DONE, "retract"])


@pytest.mark.parametrize(
    "point", ["submitted:admitted:after#6", "submitted:completed:before#6", "saved:completed:after#5"]
)
def test_case_27_q04_killed_in_the_middle_of_undoing(tmp_path: Path, transfer: Transfer, point: str) -> None:
    setting(transfer, TransferFaults(rejected=("capture",))).write(tmp_path)
    code, _ = start_acts(tmp_path, {"enter": "run_compensation"}, kill_at=f"operation/{point}").end()
    assert code == -9
    killed = effects(audit(tmp_path, transfer, "chain", killed=True))
    assert killed[:4] == [*DONE, "retract"] and "unregister" not in killed
    [said] = do_acts(tmp_path, {"enter": "run_compensation"})
    assert said["stage"] == "compensated"
    found = audit(tmp_path, transfer, "chain")
    assert (found.stage, found.calls, effects(found)) == ("compensated", 1, [*DONE, *UNDONE])


def setting(transfer: Transfer, faults: TransferFaults) -> Setting:
    subject = {"payer": transfer.payer, "payee": transfer.payee, "amount": transfer.amount, "funds": transfer.funds}
    return Setting("chain", subject, faults.to_json())
