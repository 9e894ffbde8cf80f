"""The reference fulfillment service: every endpoint, state, fault and limit; races, kills, clients that go away.

Real HTTP, real SQLite files, a real SIGKILL. Nothing here sleeps: a test waits for the operation, the response or
the process that it is about.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import signal
import sqlite3
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any, Final

import anyio
import httpx
import pytest

from examples._shared.tools import fulfillment_ledger, fulfillment_service
from examples._shared.tools.fulfillment_ledger import (
    Kind,
    Order,
    Reason,
    Reservation,
    SubmissionError,
    decide_settlement,
    normalise_order,
    parse_key,
    read_ledger,
)
from examples._shared.tools.fulfillment_service import (
    BODY_SIZE_MAX_BYTES,
    Faults,
    FulfillmentService,
    operation_fingerprint,
    start_fulfillment_service,
)

REPOSITORY: Final = Path(__file__).parents[2]
ORDER: Final = {"sku": "SKU-731", "quantity": 2, "address": "Dock-North"}
STOCK: Final = {"SKU-731": 20}
LOST: Final = (httpx.RemoteProtocolError, httpx.ReadError)
TIMEOUT_S: Final = 20


class Client:
    """The protocol as an adapter would speak it, for one order `job`."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http

    async def submit(self, kind: str, order: Mapping[str, Any] = ORDER, job: str = "job") -> httpx.Response:
        return await self.http.post(f"/{kind}", json=submission(kind, order, job))

    async def look_up(self, kind: str, job: str = "job") -> httpx.Response:
        return await self.http.get(f"/operations/{job}-{kind}")

    async def catalog(self, source: str, sku: str = "SKU-731") -> httpx.Response:
        return await self.http.get(f"/catalog/{source}", params={"sku": sku})


def submission(kind: str, order: Mapping[str, Any] = ORDER, job: str = "job") -> dict[str, Any]:
    return {"key": f"{job}-{kind}", "order": dict(order), "reservationKey": f"{job}-reserve"}


@asynccontextmanager
async def connected(service: FulfillmentService) -> AsyncIterator[Client]:
    async with httpx.AsyncClient(base_url=service.url, timeout=TIMEOUT_S, verify=False) as http:
        yield Client(http)


@asynccontextmanager
async def serving(
    path: Path, faults: Faults | None = None, inventory: Mapping[str, int] = STOCK
) -> AsyncIterator[tuple[FulfillmentService, Client]]:
    async with (
        asyncio.timeout(TIMEOUT_S),
        FulfillmentService(path, inventory, faults=faults) as service,
        connected(service) as client,
    ):
        yield service, client


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No test leaves a warning or a traceback in the log, neither uvicorn's nor asyncio's nor the service's."""
    yield
    for phase in ("setup", "call"):
        assert [record for record in caplog.get_records(phase) if record.levelno >= logging.WARNING] == []


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "service.sqlite"


def available(path: Path) -> dict[str, int]:
    return {str(row["sku"]): row["available"] for row in read_ledger(path)["inventory"]}  # type: ignore[misc]


def states(path: Path, table: str = "operations") -> dict[str, str]:
    return {str(row["key"]): str(row["state"]) for row in read_ledger(path)[table]}


def posts(path: Path) -> list[str]:
    return [str(row["path"]) for row in read_ledger(path)["requests"] if row["method"] == "POST"]


# --- catalog -------------------------------------------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize("source", ["primary", "backup"])
async def test_catalog_answers_the_stock(path: Path, source: str) -> None:
    async with serving(path) as (_, client):
        response = await client.catalog(source, " sku-731 ")
        assert response.status_code == 200
        assert response.json() == {"source": source, "sku": "SKU-731", "available": 20}
        await client.submit("reserve")
        assert (await client.catalog(source)).json()["available"] == 18


@pytest.mark.asyncio
async def test_catalog_refuses_what_it_does_not_have(path: Path) -> None:
    async with serving(path) as (_, client):
        unknown = await client.catalog("primary", "SKU-0")
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "UNKNOWN_SKU")
        nameless = await client.http.get("/catalog/primary")
        assert (nameless.status_code, nameless.json()["error"]["code"]) == (400, "INVALID_REQUEST")
        other = await client.catalog("tertiary")
        assert (other.status_code, other.json()["error"]["code"]) == (404, "NOT_FOUND")


@pytest.mark.asyncio
async def test_primary_unavailable_leaves_the_backup(path: Path) -> None:
    async with serving(path, Faults(primary_unavailable=True)) as (service, client):
        primary = await client.catalog("primary")
        assert (primary.status_code, primary.json()["error"]["code"]) == (503, "UNAVAILABLE")
        assert (await client.catalog("backup")).status_code == 200
        service.faults = Faults()
        assert (await client.catalog("primary")).status_code == 200


@pytest.mark.asyncio
async def test_catalog_delay_outlasts_a_deadline_and_ends(path: Path) -> None:
    async with serving(path, Faults(catalog_delay_ms=600_000)) as (service, client):
        with pytest.raises(httpx.ReadTimeout):
            await client.http.get("/catalog/primary?sku=SKU-731", timeout=0.05)
        service.faults = Faults(catalog_delay_ms=1)
        assert (await client.catalog("primary")).status_code == 200


# --- operations ----------------------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_unused_key_is_absent(path: Path) -> None:
    async with serving(path) as (_, client):
        response = await client.look_up("reserve")
        assert (response.status_code, response.json()) == (200, {"state": "absent", "key": "job-reserve"})


@pytest.mark.asyncio
async def test_reserve_then_ship(path: Path) -> None:
    async with serving(path) as (_, client):
        reserved = await client.submit("reserve", {"sku": " sku-731", "quantity": 2, "address": "Dock-North\n"})
        assert reserved.status_code == 200
        body = reserved.json()
        receipt = body.pop("receipt")
        fingerprint = operation_fingerprint("reserve", ORDER, "job-reserve")
        assert body == {
            "key": "job-reserve",
            "kind": "reserve",
            "state": "committed",
            "fingerprint": fingerprint,
            "order": ORDER,
            "reservationKey": "job-reserve",
            "reason": None,
        }
        assert set(receipt) == {"id", "key", "kind", "fingerprint", "reservationKey", "at"}
        assert (receipt["key"], receipt["kind"], receipt["fingerprint"]) == ("job-reserve", "reserve", fingerprint)
        found = await client.look_up("reserve")
        assert (found.status_code, found.json()) == (200, reserved.json())

        shipped = await client.submit("ship")
        assert (shipped.status_code, shipped.json()["state"]) == (200, "committed")
        assert shipped.json()["receipt"]["id"] != receipt["id"]
    assert available(path) == {"SKU-731": 18}
    assert states(path, "reservations") == {"job-reserve": "shipped"}
    (shipment,) = read_ledger(path)["shipments"]
    assert (shipment["key"], shipment["reservation_key"], shipment["quantity"]) == ("job-ship", "job-reserve", 2)


@pytest.mark.asyncio
async def test_reserve_then_release_restores_the_stock(path: Path) -> None:
    async with serving(path) as (_, client):
        await client.submit("reserve")
        released = await client.submit("release")
        assert (released.status_code, released.json()["state"]) == (200, "committed")
    assert available(path) == {"SKU-731": 20}
    assert states(path, "reservations") == {"job-reserve": "released"}


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("order", "code"),
    [
        ({**ORDER, "quantity": 21}, "INSUFFICIENT_STOCK"),
        ({**ORDER, "sku": "SKU-0"}, "UNKNOWN_SKU"),
    ],
)
async def test_reserve_is_rejected_for_good(path: Path, order: dict[str, Any], code: str) -> None:
    async with serving(path) as (_, client):
        rejected = await client.submit("reserve", order)
        assert rejected.status_code == 422
        assert (rejected.json()["state"], rejected.json()["reason"]["code"]) == ("rejected", code)
        assert rejected.json()["receipt"] is None
        assert (await client.submit("reserve", order)).json() == rejected.json()
        found = await client.look_up("reserve")
        assert (found.status_code, found.json()) == (422, rejected.json())
    assert available(path) == {"SKU-731": 20}
    assert states(path, "reservations") == {}


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("before", "kind", "code"),
    [
        ([], "ship", "RESERVATION_NOT_FOUND"),
        ([], "release", "RESERVATION_NOT_FOUND"),
        (["reserve", "ship"], "release", "RESERVATION_SHIPPED"),
        (["reserve", "release"], "ship", "RESERVATION_RELEASED"),
    ],
)
async def test_ship_and_release_need_an_open_reservation(path: Path, before: list[str], kind: str, code: str) -> None:
    async with serving(path) as (_, client):
        for earlier in before:
            assert (await client.submit(earlier)).status_code == 200
        stock = available(path)
        rejected = await client.submit(kind)
        assert (rejected.status_code, rejected.json()["reason"]["code"]) == (422, code)
    assert available(path) == stock
    assert len(read_ledger(path)["shipments"]) == before.count("ship")


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["ship", "release"])
async def test_a_second_operation_on_one_reservation_is_rejected(path: Path, kind: str) -> None:
    async with serving(path) as (_, client):
        await client.submit("reserve")
        await client.submit(kind)
        again = {"key": f"other-{kind}", "order": ORDER, "reservationKey": "job-reserve"}
        assert (await client.http.post(f"/{kind}", json=again)).status_code == 422
    assert available(path) == {"SKU-731": 18 if kind == "ship" else 20}


@pytest.mark.asyncio
async def test_a_reservation_is_shipped_as_it_was_made(path: Path) -> None:
    async with serving(path) as (_, client):
        await client.submit("reserve")
        rejected = await client.submit("ship", {**ORDER, "quantity": 3})
        assert (rejected.status_code, rejected.json()["reason"]["code"]) == (422, "RESERVATION_MISMATCH")
    assert states(path, "reservations") == {"job-reserve": "reserved"}


@pytest.mark.parametrize(
    ("available", "expected"), [(None, "UNKNOWN_SKU"), (1, "INSUFFICIENT_STOCK"), (2, "REFUSED"), (3, "REFUSED")]
)
def test_the_rules_come_before_a_refusal(available: int | None, expected: str) -> None:
    order, refusal = Order("A", 2, "B"), Reason("REFUSED", "No.")
    reason = decide_settlement(Kind.RESERVE, order, available, None, refusal)
    assert reason is not None and reason.code == expected
    assert decide_settlement(Kind.SHIP, order, None, Reservation(order, "reserved"), None) is None


# --- one key, one operation ----------------------------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["reserve", "ship", "release"])
async def test_the_same_key_is_the_same_operation(path: Path, kind: str) -> None:
    async with serving(path) as (_, client):
        if kind != "reserve":
            await client.submit("reserve")
        first = await client.submit(kind)
        stock = available(path)
        assert (await client.submit(kind, {**ORDER, "sku": "sku-731 "})).json() == first.json()
    assert available(path) == stock
    assert posts(path).count(f"/{kind}") == 2


@pytest.mark.asyncio
@pytest.mark.parametrize("change", [{"sku": "SKU-2"}, {"quantity": 3}, {"address": "Dock-South"}])
async def test_the_same_key_with_another_order_conflicts(path: Path, change: dict[str, Any]) -> None:
    async with serving(path) as (_, client):
        first = await client.submit("reserve")
        conflict = await client.submit("reserve", {**ORDER, **change})
        assert (conflict.status_code, conflict.json()["error"]["code"]) == (409, "KEY_CONFLICT")
        assert (await client.look_up("reserve")).json() == first.json()
    assert available(path) == {"SKU-731": 18}


@pytest.mark.asyncio
async def test_the_same_key_with_another_reservation_conflicts(path: Path) -> None:
    async with serving(path) as (_, client):
        await client.submit("ship")
        other = {**submission("ship"), "reservationKey": "other-reserve"}
        assert (await client.http.post("/ship", json=other)).status_code == 409


@pytest.mark.asyncio
async def test_a_conflict_with_a_pending_operation_does_not_wait(path: Path) -> None:
    async with serving(path, Faults(reservation_hold=True)) as (service, client), asyncio.TaskGroup() as tasks:
        first = tasks.create_task(client.submit("reserve"))
        await service.recorded("job-reserve")
        assert (await client.submit("reserve", {**ORDER, "quantity": 3})).status_code == 409
        service.faults = Faults()
        assert (await first).status_code == 200


@pytest.mark.asyncio
async def test_two_submitters_after_absent_make_one_operation(path: Path) -> None:
    async with serving(path, Faults(reservation_hold=True)) as (service, one), connected(service) as other:
        absent = await asyncio.gather(one.look_up("reserve"), other.look_up("reserve"))
        assert [response.json()["state"] for response in absent] == ["absent", "absent"]
        async with asyncio.TaskGroup() as tasks:
            first, second = tasks.create_task(one.submit("reserve")), tasks.create_task(other.submit("reserve"))
            await service.recorded("job-reserve")
            service.faults = Faults()
        assert first.result().status_code == second.result().status_code == 200
        assert first.result().json() == second.result().json()
    assert available(path) == {"SKU-731": 18}
    assert posts(path) == ["/reserve", "/reserve"]


@pytest.mark.asyncio
async def test_many_submitters_of_few_keys_never_oversell(path: Path) -> None:
    async with serving(path, inventory={"SKU-731": 5}) as (_, client):
        jobs = [f"job-{number}" for number in range(4)] * 4
        responses = await asyncio.gather(*(client.submit("reserve", job=job) for job in jobs))
    assert sorted(response.status_code for response in responses) == [200] * 8 + [422] * 8
    assert available(path) == {"SKU-731": 1}
    assert sorted(states(path).values()) == ["committed", "committed", "rejected", "rejected"]


def test_settling_twice_has_one_effect(path: Path) -> None:
    with closing(fulfillment_ledger.open_ledger(path)) as connection:
        fulfillment_ledger.stock_inventory(connection, STOCK)
        asked = fulfillment_ledger.parse_submission(Kind.RESERVE, json.dumps(submission("reserve")).encode())
        assert fulfillment_ledger.admit(connection, asked).state == "pending"
        settled = fulfillment_ledger.settle(connection, asked.key)
        assert settled.state == "committed"
        assert fulfillment_ledger.settle(connection, asked.key, Reason("LATE", "No.")) == settled
        assert fulfillment_ledger.admit(connection, asked) == settled
    assert available(path) == {"SKU-731": 18}


@pytest.mark.asyncio
async def test_two_services_on_one_ledger_make_one_operation(path: Path) -> None:
    hold = Faults(reservation_hold=True)
    async with serving(path, hold) as (first, one), serving(path, hold) as (second, other):
        async with asyncio.TaskGroup() as tasks:
            submitted = [tasks.create_task(client.submit("reserve")) for client in (one, other)]
            for service in (first, second):
                await service.recorded("job-reserve")
            first.faults = second.faults = Faults()
        bodies = [task.result().json() for task in submitted]
        assert bodies[0] == bodies[1]
        assert bodies[0]["state"] == "committed"
    assert available(path) == {"SKU-731": 18}


# --- pending, restarts, kills --------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_pending_is_recorded_before_the_work(path: Path) -> None:
    async with serving(path, Faults(reservation_hold=True)) as (service, client), asyncio.TaskGroup() as tasks:
        submitted = tasks.create_task(client.submit("reserve"))
        await service.recorded("job-reserve")
        service.faults = Faults(reservation_hold=True, shipping_rejected=True)
        pending = await client.look_up("reserve")
        assert pending.status_code == 202
        body = pending.json()
        assert (body["state"], body["receipt"], body["reason"], body["order"]) == ("pending", None, None, ORDER)
        assert available(path) == {"SKU-731": 20}
        service.faults = Faults()
        assert (await submitted).json()["state"] == "committed"
    assert available(path) == {"SKU-731": 18}


@pytest.mark.asyncio
async def test_a_client_that_goes_away_changes_nothing(path: Path) -> None:
    async with serving(path, Faults(reservation_hold=True)) as (service, client):
        submitted = asyncio.create_task(client.submit("reserve"))
        await service.recorded("job-reserve")
        submitted.cancel()
        with pytest.raises(asyncio.CancelledError):
            await submitted
        assert (await client.look_up("reserve")).status_code == 202
        service.faults = Faults()
        await service.settled("job-reserve")
        assert (await client.look_up("reserve")).status_code == 200
    assert available(path) == {"SKU-731": 18}
    assert posts(path) == ["/reserve"]


@pytest.mark.asyncio
@pytest.mark.parametrize("faults", [Faults(reservation_hold=True), Faults(reservation_delay_ms=600_000)])
async def test_closing_leaves_pending_and_reopening_settles(path: Path, faults: Faults) -> None:
    async with serving(path, faults) as (service, client):
        submitted = asyncio.create_task(client.submit("reserve"))
        await service.recorded("job-reserve")
        await service.close()
        with pytest.raises(LOST):
            await submitted
    assert states(path) == {"job-reserve": "pending"}
    assert available(path) == {"SKU-731": 20}

    async with serving(path, faults) as (_, client):
        assert (await client.look_up("reserve")).status_code == 202
    async with serving(path) as (_, client):
        # Nothing delays it now, so even the first look-up finds it settled.
        assert (await client.look_up("reserve")).status_code == 200
        assert (await client.submit("reserve")).status_code == 200
    assert available(path) == {"SKU-731": 18}


@pytest.mark.asyncio
async def test_the_ledger_outlives_the_service(path: Path) -> None:
    async with serving(path) as (_, client):
        await client.submit("reserve")
    async with serving(path, inventory={"SKU-731": 99, "sku-2": 7}) as (_, client):
        assert (await client.look_up("reserve")).json()["state"] == "committed"
        assert (await client.catalog("primary")).json()["available"] == 18
        assert (await client.catalog("primary", "SKU-2")).json()["available"] == 7


@asynccontextmanager
async def child(path: Path, *options: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, Client]]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-W", "error", "-m", "examples._shared.tools.fulfillment_service", "--db", str(path)),
        *("--sku", "SKU-731", "--quantity", "20", *options),
        cwd=REPOSITORY,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(TIMEOUT_S):
            url = json.loads(await process.stdout.readline())["url"]
            async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, verify=False) as http:
                yield process, Client(http)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@pytest.mark.asyncio
async def test_a_killed_service_settles_once_when_it_is_reopened(path: Path) -> None:
    async with child(path, "--fault", "reservation_delay_ms=600000") as (process, client):
        submitted = asyncio.create_task(client.submit("reserve"))
        while (await client.look_up("reserve")).status_code != 202:
            pass
        process.send_signal(signal.SIGKILL)
        with pytest.raises(LOST):
            await submitted
        assert await process.wait() == -signal.SIGKILL
    assert states(path) == {"job-reserve": "pending"}
    assert available(path) == {"SKU-731": 20}

    async with child(path) as (process, client):
        assert (await client.look_up("reserve")).status_code == 200
        assert (await client.submit("reserve")).status_code == 200
        process.terminate()
        assert await process.wait() == 0
    assert states(path) == {"job-reserve": "committed"}
    assert available(path) == {"SKU-731": 18}
    assert posts(path) == ["/reserve", "/reserve"]


@pytest.mark.asyncio
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_the_command_ends_on_a_signal_with_work_and_connections_open(path: Path, number: signal.Signals) -> None:
    async with child(path, "--fault", "reservation_hold") as (process, client):
        submitted = asyncio.create_task(client.submit("reserve"))
        while (await client.look_up("reserve")).status_code != 202:
            pass
        process.send_signal(number)
        with pytest.raises(LOST):
            await submitted
        _, progress = await process.communicate()
        assert (process.returncode, progress) == (0, b"")
    assert states(path) == {"job-reserve": "pending"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sku", "A"], "each --sku needs its --quantity"),
        (["--fault", "gremlins"], "There is no fault named gremlins"),
        (["--fault", "catalog_delay_ms"], "catalog_delay_ms must be of type int"),
        (["--fault", "lookup_unavailable=sometimes"], "lookup_unavailable must be one of never, always, after_write"),
    ],
)
def test_the_command_refuses_wrong_options(
    path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        fulfillment_service.main(["--db", str(path), *options])
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


def test_the_command_says_why_it_cannot_start(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fulfillment_service.main(["--db", str(path), "--sku", "A", "--quantity", "-1"]) == 1
    assert "must be an integer of at least 0" in capsys.readouterr().err
    path.with_name("other").write_text("no database, but long enough to be read as one" * 100)
    assert fulfillment_service.main(["--db", str(path.with_name("other"))]) == 1
    assert "not a database" in capsys.readouterr().err


# --- faults --------------------------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_rejected_shipment_is_recorded_and_stays(path: Path) -> None:
    async with serving(path, Faults(shipping_rejected=True)) as (service, client):
        await client.submit("reserve")
        rejected = await client.submit("ship")
        assert (rejected.status_code, rejected.json()["reason"]["code"]) == (422, "SHIPPING_REJECTED")
        service.faults = Faults()
        assert (await client.submit("ship")).json() == rejected.json()
        assert (await client.submit("release")).status_code == 200
    assert available(path) == {"SKU-731": 20}
    assert read_ledger(path)["shipments"] == []


@pytest.mark.asyncio
async def test_a_rejected_release_keeps_the_reservation(path: Path) -> None:
    async with serving(path, Faults(release_rejected=True)) as (_, client):
        await client.submit("reserve")
        rejected = await client.submit("release")
        assert (rejected.status_code, rejected.json()["reason"]["code"]) == (422, "RELEASE_REJECTED")
        assert (await client.look_up("release")).json() == rejected.json()
    assert available(path) == {"SKU-731": 18}
    assert states(path, "reservations") == {"job-reserve": "reserved"}


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("kind", "faults"),
    [("reserve", Faults(drop_reservation_response=True)), ("release", Faults(drop_release_response=True))],
)
async def test_a_dropped_response_is_committed(path: Path, kind: str, faults: Faults) -> None:
    async with serving(path) as (service, client):
        if kind == "release":
            await client.submit("reserve")
        service.faults = faults
        # Twice: on a connection that was in use, and on the fresh one after it.
        for _ in range(2):
            with pytest.raises(LOST):
                await client.submit(kind)
        assert (await client.look_up(kind)).json()["state"] == "committed"
        service.faults = Faults()
        assert (await client.submit(kind)).status_code == 200
    assert available(path) == {"SKU-731": 18 if kind == "reserve" else 20}
    assert posts(path).count(f"/{kind}") == 3


@pytest.mark.asyncio
async def test_only_its_own_response_is_dropped(path: Path) -> None:
    async with serving(path, Faults(drop_release_response=True)) as (service, client):
        assert (await client.submit("reserve")).status_code == 200
        service.faults = Faults(drop_reservation_response=True)
        assert (await client.submit("ship")).status_code == 200


@pytest.mark.asyncio
async def test_lookups_are_unavailable_always(path: Path) -> None:
    async with serving(path, Faults(lookup_unavailable="always")) as (_, client):
        response = await client.look_up("reserve")
        assert (response.status_code, response.json()["error"]["code"]) == (503, "UNAVAILABLE")
        assert (await client.submit("reserve")).status_code == 200


@pytest.mark.asyncio
async def test_lookups_are_unavailable_after_a_write_of_this_ledger(path: Path) -> None:
    faults = Faults(lookup_unavailable="after_write")
    async with serving(path, faults) as (_, client):
        assert (await client.look_up("reserve")).json()["state"] == "absent"
        assert (await client.look_up("reserve")).json()["state"] == "absent"
        assert (await client.submit("reserve")).status_code == 200
        assert (await client.look_up("reserve")).status_code == 503
    async with serving(path, faults) as (service, client):
        assert (await client.look_up("reserve", job="other")).status_code == 503
        service.faults = Faults()
        assert (await client.look_up("reserve")).status_code == 200


@pytest.mark.asyncio
async def test_a_delayed_reservation_ends_by_itself(path: Path) -> None:
    async with serving(path, Faults(reservation_delay_ms=1)) as (_, client):
        assert (await client.submit("reserve")).status_code == 200


def test_faults_are_json() -> None:
    faults = Faults(shipping_rejected=True, lookup_unavailable="after_write", reservation_delay_ms=250)
    assert Faults.from_json(json.loads(json.dumps(faults.to_json()))) == faults
    assert Faults.from_json({}) == Faults()
    for wrong in (
        {"gremlins": True},
        {"shipping_rejected": 1},
        {"catalog_delay_ms": True},
        {"catalog_delay_ms": -1},
        {"reservation_delay_ms": 600_001},
        {"lookup_unavailable": True},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Faults.from_json(wrong)


# --- requests and limits -------------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_every_request_is_written_down(path: Path) -> None:
    async with serving(path) as (_, client):
        await client.catalog("primary")
        await client.submit("reserve")
        await client.http.post("/reserve", content=b"{")
        await client.http.post("/reserve", content=b"x" * (BODY_SIZE_MAX_BYTES + 1))
        assert (await client.http.get("/reserve")).status_code == 405
        assert (await client.http.post("/reserve/", content=b"")).status_code == 404
    requests = read_ledger(path)["requests"]
    assert [(row["seq"], row["method"], row["path"], row["query"]) for row in requests] == [
        (1, "GET", "/catalog/primary", "sku=SKU-731"),
        (2, "POST", "/reserve", ""),
        (3, "POST", "/reserve", ""),
        (4, "POST", "/reserve", ""),
        (5, "GET", "/reserve", ""),
        (6, "POST", "/reserve/", ""),
    ]
    assert json.loads(str(requests[1]["body"])) == submission("reserve")
    assert [row["body"] for row in requests[2:]] == ["{", None, None, None]


@pytest.mark.asyncio
@pytest.mark.parametrize("size_bytes", [BODY_SIZE_MAX_BYTES + 1, 300_000])
async def test_a_body_that_is_too_large_is_refused(path: Path, size_bytes: int) -> None:
    async with serving(path) as (_, client):
        response = await client.http.post("/reserve", content=b" " * size_bytes)
        assert (response.status_code, response.json()["error"]["code"]) == (413, "BODY_TOO_LARGE")
        assert (await client.submit("reserve")).status_code == 200


@pytest.mark.asyncio
async def test_an_endless_body_is_not_read_to_its_end(path: Path) -> None:
    async with serving(path) as (service, _), asyncio.timeout(TIMEOUT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(service.url).port)
        writer.write(b"POST /reserve HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000\r\n\r\n" + b" " * 1_200_000)
        head = await reader.readuntil(b"\r\n\r\n")
        assert b" 413 " in head
        assert b"connection: close" in head
        writer.close()
    assert posts(path) == ["/reserve"]


@pytest.mark.asyncio
async def test_a_body_of_the_limit_is_accepted(path: Path) -> None:
    async with serving(path) as (_, client):
        content = json.dumps(submission("reserve")).encode().ljust(BODY_SIZE_MAX_BYTES)
        assert (await client.http.post("/reserve", content=content)).status_code == 200


MALFORMED: Final[dict[str, tuple[Any, str]]] = {
    "empty": (b"", "one JSON object"),
    "no JSON": (b"{", "one JSON object"),
    "no UTF-8": (b'"\xff"', "one JSON object"),
    "nested too deep": (b"[" * 8000, "one JSON object"),
    "a number of 8000 digits": (b"9" * 8000, "one JSON object"),
    "no object": ([], "must be a JSON object"),
    "nothing in it": ({}, "lacks key, order, reservationKey"),
    "something else in it": ({**submission("reserve"), "note": 1}, "may only have"),
    "key of another kind": ({**submission("reserve"), "key": "job-ship"}, "must end with -reserve"),
    "key without id": ({**submission("reserve"), "key": "-reserve"}, "key must be"),
    "key too long": ({**submission("reserve"), "key": "j" * 65 + "-reserve"}, "key must be"),
    "key with a line end": ({**submission("reserve"), "key": "job-reserve\n"}, "key must be"),
    "key no text": ({**submission("reserve"), "key": 1}, "key must be"),
    "reservation of nothing": ({**submission("reserve"), "reservationKey": None}, "reservationKey must be"),
    "reservation of a shipment": ({**submission("reserve"), "reservationKey": "job-ship"}, "reservationKey must be"),
    "reservation of another": ({**submission("reserve"), "reservationKey": "x-reserve"}, "must equal key"),
    "order no object": ({**submission("reserve"), "order": "two"}, "order must be a JSON object"),
    "order lacks": (submission("reserve", {"sku": "A", "quantity": 1}), "order lacks address"),
    "order has more": (submission("reserve", {**ORDER, "colour": "red"}), "order may only have"),
    "quantity none": (submission("reserve", {**ORDER, "quantity": 0}), "order.quantity"),
    "quantity huge": (submission("reserve", {**ORDER, "quantity": 10**18}), "order.quantity"),
    "quantity bool": (submission("reserve", {**ORDER, "quantity": True}), "order.quantity"),
    "quantity float": (submission("reserve", {**ORDER, "quantity": 2.0}), "order.quantity"),
    "quantity text": (submission("reserve", {**ORDER, "quantity": "2"}), "order.quantity"),
    "sku empty": (submission("reserve", {**ORDER, "sku": " "}), "order.sku must have"),
    "sku long": (submission("reserve", {**ORDER, "sku": "S" * 65}), "order.sku must have"),
    "sku grows": (submission("reserve", {**ORDER, "sku": "\ufb03" * 64}), "order.sku must have"),
    "sku of two words": (submission("reserve", {**ORDER, "sku": "SKU 1"}), "white space"),
    "sku no text": (submission("reserve", {**ORDER, "sku": 731}), "order.sku must be text"),
    "address long": (submission("reserve", {**ORDER, "address": "a" * 501}), "order.address must have"),
    "address with NUL": (submission("reserve", {**ORDER, "address": "a\0b"}), "control characters"),
    "address half a character": (submission("reserve", {**ORDER, "address": "\ud83d"}), "lone surrogates"),
}


@pytest.mark.asyncio
async def test_malformed_submissions_are_refused_and_change_nothing(path: Path) -> None:
    async with serving(path) as (_, client):
        for name, (body, message) in MALFORMED.items():
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            response = await client.http.post("/reserve", content=content)
            assert (response.status_code, response.json()["error"]["code"]) == (400, "INVALID_REQUEST"), name
            assert message in response.json()["error"]["message"], name
    assert states(path) == {}
    assert len(posts(path)) == len(MALFORMED)


@pytest.mark.asyncio
@pytest.mark.parametrize("key", ["job", "job-refund", "job-reserve%0A", "%2E-ship", "j" * 65 + "-reserve"])
async def test_lookups_of_malformed_keys_are_refused(path: Path, key: str) -> None:
    async with serving(path) as (_, client):
        assert (await client.http.get(f"/operations/{key}")).status_code == 400


# --- the normal form and the fingerprint ---------------------------------------------------------------------------


def test_the_fingerprint_is_what_its_docstring_says() -> None:
    order = {"sku": " sku-é ", "quantity": 2, "address": " Straße\t\u00a01 "}
    canonical = '{"kind":"ship","order":{"address":"Straße 1","quantity":2,"sku":"SKU-É"},"reservationKey":"a-reserve"}'
    assert operation_fingerprint("ship", order, "a-reserve") == hashlib.sha256(canonical.encode()).hexdigest()


def test_the_fingerprint_binds_everything_and_nothing_more() -> None:
    first = operation_fingerprint("ship", ORDER, "a-reserve")
    assert operation_fingerprint("ship", normalise_order(ORDER).to_json(), "a-reserve") == first
    others = [
        operation_fingerprint("release", ORDER, "a-reserve"),
        operation_fingerprint("ship", ORDER, "b-reserve"),
        *(
            operation_fingerprint("ship", {**ORDER, **change}, "a-reserve")
            for change in ({"sku": "SKU-732"}, {"quantity": 3}, {"address": "dock-north"})
        ),
    ]
    assert len({first, *others}) == 6


@pytest.mark.parametrize(
    ("kind", "reservation_key"), [("refund", "a-reserve"), ("ship", "a-ship"), ("ship", ""), ("ship", "a")]
)
def test_no_fingerprint_of_what_is_no_operation(kind: str, reservation_key: str) -> None:
    with pytest.raises(SubmissionError):
        operation_fingerprint(kind, ORDER, reservation_key)


def test_a_key_ends_with_its_kind() -> None:
    assert parse_key("a-ship-reserve") is Kind.RESERVE


# --- life ----------------------------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_it_works_beside_other_work_in_anyio(path: Path) -> None:
    """A caller's scope that is cancelled still closes the service, and leaves what was pending."""
    with anyio.CancelScope() as scope:
        async with (
            serving(path, Faults(reservation_hold=True)) as (service, client),
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(client.submit, "reserve")
            await service.recorded("job-reserve")
            scope.cancel()
    assert scope.cancelled_caught
    assert not path.with_name(f"{path.name}-wal").exists(), "the ledger was not closed"
    assert states(path) == {"job-reserve": "pending"}
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", httpx.URL(service.url).port)


@pytest.mark.asyncio
async def test_closing_does_not_wait_for_clients(path: Path) -> None:
    async with asyncio.timeout(3):
        service = await start_fulfillment_service(path, STOCK, faults=Faults(catalog_delay_ms=600_000))
        port = httpx.URL(service.url).port
        idle = await asyncio.open_connection("127.0.0.1", port)
        stalled = await asyncio.open_connection("127.0.0.1", port)
        slow = await asyncio.open_connection("127.0.0.1", port)
        async with connected(service) as client:
            assert (await client.look_up("reserve")).status_code == 200
            stalled[1].write(b"POST /reserve HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            slow[1].write(b"GET /catalog/primary?sku=SKU-731 HTTP/1.1\r\nHost: x\r\n\r\n")
            await client.submit("reserve")
            await asyncio.gather(service.close(), service.close())
            await service.close()
        for reader, writer in (idle, stalled, slow):
            assert await reader.read() == b""
            writer.close()
    assert posts(path) == ["/reserve"]


@pytest.mark.asyncio
async def test_it_starts_once(path: Path) -> None:
    service = FulfillmentService(path, STOCK)
    with pytest.raises(RuntimeError, match="not started"):
        _ = service.url
    async with service:
        with pytest.raises(RuntimeError, match="started once"):
            await service.start()
    with pytest.raises(RuntimeError, match="started once"):
        await service.start()
    with pytest.raises(RuntimeError, match="not open"):
        await service.settled("job-reserve")


@pytest.mark.asyncio
async def test_a_start_that_is_cancelled_leaves_nothing_open(path: Path) -> None:
    opened, may_go_on = threading.Event(), threading.Event()

    class Slow(FulfillmentService):
        def _open_connection(self) -> None:
            super()._open_connection()
            opened.set()
            assert may_go_on.wait(TIMEOUT_S)

    starting = asyncio.create_task(Slow(path, STOCK).start())
    await asyncio.to_thread(opened.wait, TIMEOUT_S)
    starting.cancel()
    asyncio.get_running_loop().call_soon(may_go_on.set)
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not path.with_name(f"{path.name}-wal").exists(), "the ledger was not closed"


@pytest.mark.asyncio
async def test_it_takes_the_port_that_it_is_given(path: Path) -> None:
    async with serving(path) as (service, _):
        port = httpx.URL(service.url).port
        assert port is not None
        with pytest.raises(OSError, match="in use"):
            await start_fulfillment_service(path.with_name("other.sqlite"), port=port)
    async with FulfillmentService(path, port=port) as service:
        assert service.url == f"http://127.0.0.1:{port}"


@pytest.mark.asyncio
async def test_a_ledger_that_cannot_write_is_unavailable_and_recovers(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*arguments: object) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    async with serving(path) as (_, client):
        for transition in ("record_request", "settle"):
            with monkeypatch.context() as broken:
                broken.setattr(fulfillment_service, transition, fail)
                response = await client.submit("reserve")
                assert (response.status_code, response.json()["error"]["code"]) == (503, "LEDGER_UNAVAILABLE")
        assert "submit it again" in caplog.text
        caplog.clear()
        assert (await client.look_up("reserve")).status_code == 202
        assert (await client.submit("reserve")).status_code == 200
    assert available(path) == {"SKU-731": 18}


@pytest.mark.asyncio
async def test_a_ledger_of_another_version_is_left_alone(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 99")
    with pytest.raises(sqlite3.DatabaseError, match="version 99"):
        await start_fulfillment_service(path)
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,)


def test_the_ledger_flushes_every_commit(path: Path) -> None:
    with closing(fulfillment_ledger.open_ledger(path)) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert connection.execute("PRAGMA synchronous").fetchone() == (2,)
        assert connection.execute("PRAGMA busy_timeout").fetchone() == (10_000,)


@pytest.mark.parametrize("module", [fulfillment_ledger, fulfillment_service])
def test_what_is_public_is_there(module: Any) -> None:
    assert len(set(module.__all__)) == len(module.__all__)
    assert all(hasattr(module, name) for name in module.__all__)
