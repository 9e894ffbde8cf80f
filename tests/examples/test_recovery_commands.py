"""The eight commands, as a person calls them: each in a fresh folder, then gone on with by `--directory`."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

from examples._shared.recovery_story import main
from tests.examples import recovery_facts
from tests.examples.recovery_model import CONFIG, SCRIPTED, VARIABLE
from tests.examples.recovery_processes import ENVIRONMENT, Process, audit_all
from tests.examples.recovery_world import Audit, read_finding

AT_ONCE: Final = 2
STOCK: Final = 20
QUANTITY: Final = 2


@dataclass(frozen=True, slots=True)
class Told:
    """How a command ends: its exit code, the job's stage, what else is true of it, and the effects so far."""

    code: int
    stage: str
    made: Mapping[str, int]
    calls: int
    shows: Mapping[str, Any] = field(default_factory=dict)


NOTHING: Final[Mapping[str, int]] = {}
BOTH: Final = {"reserve": 1, "ship": 1}

FIRST: Final = {
    "retry": Told(0, "completed", BOTH, 1),
    "fallback": Told(0, "completed", BOTH, 1, {"selectedSource": "backup"}),
    "timeout": Told(0, "timed-out", NOTHING, 1),
    "checkpoint_resume": Told(0, "reserved", {"reserve": 1}, 1),
    "pause_resume": Told(0, "paused", NOTHING, 1),
    "session_resume": Told(0, "reserved", {"reserve": 1}, 2),
    "compensation": Told(0, "compensated", {"reserve": 1, "release": 1}, 1),
    "side_effect_check": Told(0, "completed", BOTH, 1),
}
"""The default stories."""

AGAIN: Final = {
    **FIRST,
    "timeout": Told(0, "completed", BOTH, 1, {"selectedSource": "primary"}),
    "checkpoint_resume": Told(0, "completed", BOTH, 1),
    "pause_resume": Told(75, "paused", NOTHING, 1),
    "session_resume": Told(0, "reserved", {"reserve": 1}, 3),
}
"""What `--directory` makes of each."""

DECIDED: Final = {"approve": Told(0, "completed", BOTH, 1), "reject": Told(3, "rejected", NOTHING, 1)}


def module_of(name: str) -> str:
    return f"examples.control-flow.recovery.{name}"


def model_arguments() -> list[str]:
    return [] if CONFIG is SCRIPTED else ["--config", str(Path(os.environ[VARIABLE]).resolve())]


class Command:
    """One command, as a person calls it, in a folder."""

    def __init__(self, name: str, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module_of(name), *model_arguments()],
            cwd=folder,
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._fact = recovery_facts.note_process(module_of(name), self._process.pid)

    def end(self) -> tuple[int, str]:
        """Wait for it: its exit code, and what it has printed."""
        printed, _ = self._process.communicate()
        self._fact["exit"] = self._process.returncode
        return self._process.returncode, printed


@dataclass(frozen=True, slots=True)
class Ending:
    """What a command has left."""

    code: int
    said: dict[str, Any]
    found: Audit

    @property
    def folder(self) -> str:
        return str(self.said["directory"])


def begin(folder: Path, names: Sequence[str]) -> dict[str, Ending]:
    """Commands that make a folder of their own, two at a time."""
    ended: dict[str, tuple[int, str]] = {}
    for batch in (names[at : at + AT_ONCE] for at in range(0, len(names), AT_ONCE)):
        running = {name: Command(name, folder) for name in batch}
        ended |= {name: command.end() for name, command in running.items()}
    return look_at(ended)


def go_on(calls: Mapping[str, tuple[str, Sequence[str]]]) -> dict[str, Ending]:
    """Commands that go on with a folder: a name and its arguments, by a label."""
    ended: dict[str, tuple[int, str]] = {}
    for label, (name, arguments) in calls.items():
        code, lines = Process(module_of(name), *model_arguments(), *arguments).end()
        ended[label] = code, "\n".join(lines)
    return look_at(ended)


def look_at(ended: Mapping[str, tuple[int, str]]) -> dict[str, Ending]:
    """What they have said, and what a fresh process finds in their folders."""
    said = {label: json.loads(printed) for label, (_, printed) in ended.items()}
    found = audit_all("orders", [Path(each["directory"]) for each in said.values()])
    return {
        label: Ending(ended[label][0], said[label], read_finding(finding))
        for label, finding in zip(said, found, strict=True)
    }


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Ending]]:
    """All eight, and all eight again; after that one pause is approved, and another one rejected."""
    folder = tmp_path_factory.mktemp("commands")
    first = begin(folder, list(FIRST))
    again = go_on({name: (name, ["--directory", first[name].folder]) for name in AGAIN})
    paused = {"approve": first["pause_resume"].folder, "reject": begin(folder, ["pause_resume"])["pause_resume"].folder}
    decided = {
        decision: ("pause_resume", ["--directory", where, "--decision", decision, "--actor", "Ada"])
        for decision, where in paused.items()
    }
    return [first, again, go_on(decided)]


@pytest.mark.parametrize("name", FIRST)
def test_command_tells_its_story(told: list[dict[str, Ending]], name: str) -> None:
    check(told[0][name], FIRST[name])
    folder = Path(told[0][name].folder)
    assert folder.parent.name == ".examples-recovery" and folder.name.startswith(f"{name}-")
    for file in ("task.txt", "fixture.json", "tasks.sqlite", "service.sqlite", "results/task.json"):
        assert (folder / file).is_file(), file


@pytest.mark.parametrize("name", AGAIN)
def test_command_goes_on(told: list[dict[str, Ending]], name: str) -> None:
    check(told[1][name], AGAIN[name])
    assert told[1][name].folder == told[0][name].folder
    if FIRST[name] is AGAIN[name]:
        assert told[1][name].said == told[0][name].said, "a job that is done is returned as it is"


@pytest.mark.parametrize("decision", DECIDED)
def test_pause_is_decided_by_a_command(told: list[dict[str, Ending]], decision: str) -> None:
    check(told[2][decision], DECIDED[decision])
    approval = told[2][decision].said["checkpoint"]["approval"]
    assert (approval["decision"], approval["actor"]) == (decision, "Ada")


def check(ending: Ending, expected: Told) -> None:
    said, found = ending.said, ending.found
    assert (ending.code, found.stage) == (expected.code, expected.stage)
    assert list(said) == ["directory", "result", "checkpoint"], "and nothing else is on standard output"
    assert said["checkpoint"] == found.job
    assert said["result"].get("job", said["result"]) == found.job
    assert {name: found.job[name] for name in expected.shows} == expected.shows
    assert found.made == expected.made
    held = found.made["reserve"] - found.made["release"]
    assert found.ledger["inventory"] == [{"sku": "SKU-731", "available": STOCK - held * QUANTITY}]
    if CONFIG is SCRIPTED:
        assert found.calls == expected.calls


def test_stories_end_as_they_are_told(told: list[dict[str, Ending]]) -> None:
    first = {name: ending.said for name, ending in told[0].items()}
    assert first["timeout"]["result"]["error"]["code"] == "CATALOG_TIMEOUT"
    assert first["compensation"]["result"]["error"]["code"] == "SHIPPING_REJECTED"
    assert first["session_resume"]["result"]["answer"] == {"sku": "SKU-731", "quantity": 2, "stage": "reserved"}
    asked = [f"{row['method']} {row['path']}" for row in told[0]["side_effect_check"].found.ledger["requests"]]
    assert asked[:3] == ["GET /operations/task-reserve", "POST /reserve", "GET /operations/task-reserve"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--unknown"],
        ["--directory", "."],
        ["--directory", "nowhere"],
        ["--decision", "approve", "--actor", "Ada"],
        ["--directory", "{}", "--decision", "approve"],
        ["--directory", "{}", "--actor", "Ada"],
        ["--directory", "{}", "--decision", "perhaps", "--actor", "Ada"],
        ["--directory", "{}", "--decision", "approve", "--actor", " "],
        ["--config", "nowhere.yaml"],
    ],
    ids=" ".join,
)
def test_wrong_usage_ends_with_2(
    told: list[dict[str, Ending]], arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    done = told[0]["retry"]
    story = importlib.import_module(module_of("pause_resume")).STORY
    try:
        code: Any = main(story, [text.format(done.folder) for text in arguments])
    except SystemExit as ended:
        code = ended.code
    assert (code, capsys.readouterr().out) == (2, "")
    assert json.loads((Path(done.folder) / "results" / "task.json").read_text()) == done.said["checkpoint"]
