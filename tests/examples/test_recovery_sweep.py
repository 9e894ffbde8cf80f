"""Cases 22 and 23: killed at every crash point, one process each, and gone on with in a new one.

A point is a step's path, a transition, and whether the process dies before or after it is durable; `#2` is the second
time that it is passed. A sample of the points is killed by `make test`, all of them by `make test-full`. The model is
always the scripted one: there are hundreds of points.
"""

from __future__ import annotations

import shutil
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from examples._shared.tools.fulfillment_service import Faults
from tests.examples.recovery_domains import Setting
from tests.examples.recovery_processes import audit_all, start_acts
from tests.examples.recovery_world import Audit, Order, check_order, examine, read_finding
from tests.examples.transfer_service import TransferFaults
from tests.examples.transfer_world import Transfer, check_transfer, effects

AT_ONCE: Final = 4
"""Processes that run at a time."""

IN_DOUBT: Final = frozenset({"prepare/sampled:admitted:after", "prepare/sampled:completed:before"})
"""Between the admission of the model call and the commit of its answer: only a person can say whether to ask again."""

PERHAPS_IN_DOUBT: Final = IN_DOUBT | {"prepare/loaded:completed:after"}
"""What is loaded may wait for the admission, and be committed with it."""

UNKNOWN: Final = 4
RESOLVED: Final = {"resolve": "task:prepare", "step": "sampled", "ask_again": True}


@dataclass(frozen=True)
class Tale:
    """Entries that are killed somewhere, and how the job ends when they are entered again."""

    setting: Setting
    acts: Sequence[dict[str, Any]]
    stages: Sequence[str]
    made: Sequence[str]
    """The effects, in the order in which they are committed."""

    def check(self, found: Audit) -> None:
        """What must hold at the end, wherever it was killed."""
        assert found.stages == ["queued", *self.stages]
        match self.setting.domain:
            case "orders":
                check_order(found, Order(**self.setting.subject))
                done = [row["kind"] for row in found.ledger["operations"] if row["state"] == "committed"]
            case _:
                check_transfer(found, Transfer(**self.setting.subject))
                done = effects(found)
        assert done == self.made


def orders(order: Order, faults: Faults | None = None, *, requires_approval: bool = False) -> Setting:
    subject = {**order.to_json(), "stock": order.stock}
    return Setting("orders", subject, (faults or Faults()).to_json(), requires_approval, script="order")


def happy(order: Order) -> Tale:
    return Tale(
        orders(order), [{"enter": "run_checkpoint"}], ["prepared", "reserved", "completed"], ["reserve", "ship"]
    )


def compensated(order: Order) -> Tale:
    return Tale(
        orders(order, Faults(shipping_rejected=True)),
        [{"enter": "run_compensation"}],
        ["prepared", "reserved", "needs-review", "compensated"],
        ["reserve", "release"],
    )


def approved(order: Order) -> Tale:
    return Tale(
        orders(order, requires_approval=True),
        [{"enter": "run_pause"}, {"decide": "approve"}, {"enter": "resume_paused"}],
        ["prepared", "paused", "approved", "reserved", "completed"],
        ["reserve", "ship"],
    )


def undone(transfer: Transfer) -> Tale:
    subject = {"payer": transfer.payer, "payee": transfer.payee, "amount": transfer.amount, "funds": transfer.funds}
    done, reverse = ["register", "hold", "announce"], ["retract", "void", "unregister"]
    return Tale(
        Setting("chain", subject, TransferFaults(rejected=("capture",)).to_json(), script="order"),
        [{"enter": "run_compensation"}],
        ["prepared", "registered", "held", "announced", *["needs-review"] * 3, "compensated"],
        [*done, *reverse],
    )


SAMPLE: Final = [
    "prepare/sampled:admitted:before",
    "prepare/sampled:admitted:after",
    "prepare/sampled:completed:before",
    "prepare/sampled:completed:after",
    "operation/submitted:admitted:before",
    "operation/submitted:admitted:after#2",
    "operation/submitted:completed:before",
    "operation/submitted:completed:after#2",
    "operation/saved:completed:before",
]
"""Both sides of the admissions and of the outcomes."""


def test_case_22_sample_of_the_crash_points(tmp_path: Path, order: Order) -> None:
    assert list_problems(tmp_path, happy(order), SAMPLE) == []


@pytest.mark.sweep
def test_case_22_every_crash_point(tmp_path: Path, order: Order) -> None:
    sweep(tmp_path, happy(order))


@pytest.mark.sweep
def test_case_23_every_crash_point_of_a_compensation(tmp_path: Path, order: Order) -> None:
    sweep(tmp_path, compensated(order))


@pytest.mark.sweep
def test_case_23_every_crash_point_of_an_approval(tmp_path: Path, order: Order) -> None:
    sweep(tmp_path, approved(order))


@pytest.mark.sweep
def test_case_23_q04_every_crash_point_of_a_chain_that_is_undone(tmp_path: Path, transfer: Transfer) -> None:
    sweep(tmp_path, undone(transfer))


def sweep(directory: Path, tale: Tale) -> None:
    points = record_points(directory / "recorded", tale)
    assert IN_DOUBT.issubset(points)
    assert list_problems(directory, tale, points) == []


def record_points(directory: Path, tale: Tale) -> list[str]:
    """Every crash point that the tale passes when nobody kills it, each with its number where it has one."""
    directory.mkdir()
    tale.setting.write(directory)
    code, lines = start_acts(directory, *tale.acts, record=directory / "points.txt").end()
    assert code == 0, lines
    tale.check(examine(tale.setting.domain, directory))
    passed: Counter[str] = Counter()
    points = []
    for name in (directory / "points.txt").read_text(encoding="utf-8").split():
        passed[name] += 1
        points.append(name if passed[name] == 1 else f"{name}#{passed[name]}")
    return points


def list_problems(directory: Path, tale: Tale, points: Sequence[str]) -> list[str]:
    """Kill the tale at each point, go on, and compare: what did not hold, and where. Folders that are sound go."""
    problems: list[str] = []
    for batch in (points[at : at + AT_ONCE] for at in range(0, len(points), AT_ONCE)):
        folders = {point: directory / point.replace("/", "-").replace(":", "-") for point in batch}
        for point, problem in visit(tale, folders):
            if problem is None:
                shutil.rmtree(folders[point])
            else:
                problems.append(f"{point}: {problem} ({folders[point]})")
    return problems


def visit(tale: Tale, folders: dict[str, Path]) -> Iterator[tuple[str, str | None]]:
    """For each point what did not hold there, or None."""
    for folder in folders.values():
        folder.mkdir()
        tale.setting.write(folder)
    killed = [start_acts(folder, *tale.acts, kill_at=point) for point, folder in folders.items()]
    ended = {point: child.end()[0] for point, child in zip(folders, killed, strict=True)}
    entered = [start_acts(folder, *tale.acts) for folder in folders.values()]
    outcomes = {point: child.end()[0] for point, child in zip(folders, entered, strict=True)}
    in_doubt = {point: 0 for point, code in outcomes.items() if code == UNKNOWN and point in PERHAPS_IN_DOUBT}
    for point in in_doubt:
        in_doubt[point] = examine(tale.setting.domain, folders[point]).calls
        outcomes[point] = start_acts(folders[point], RESOLVED, *tale.acts).end()[0]
    for point, found in zip(folders, audit_all(tale.setting.domain, folders.values()), strict=True):
        try:
            audit = read_finding(found)
            assert ended[point] == -signal.SIGKILL, f"it was not killed: {ended[point]}"
            assert outcomes[point] == 0, f"who went on ended with {outcomes[point]}"
            assert point in in_doubt or point not in IN_DOUBT, "the model call was not unknown"
            assert in_doubt.get(point, 0) <= 1, "the model was asked twice before anybody decided"
            assert audit.calls == (in_doubt[point] + 1 if point in in_doubt else 1), f"{audit.calls} calls"
            tale.check(audit)
        except AssertionError as error:
            yield point, str(error).split("\n", maxsplit=1)[0] or repr(error)
        else:
            yield point, None
