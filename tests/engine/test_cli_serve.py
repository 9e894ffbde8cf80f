"""The `ditto` command as a process that goes on until it is told to stop: serve, resume, events that are followed."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from ditto import Graph
from tests.engine.commands import ditto, told_json
from tests.engine.held import EFFECTS, HANGS, HELD, IGNORES, leave
from tests.engine.reviews import PAID, park
from tests.processes import Child

MAIN = "import os; os.dup2(1, 2); from ditto.cli.main import main; main()"
"""The command, its standard error in one stream with its standard output."""

Start = Callable[..., Child]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, which is empty."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def begin(graph: Graph, *run_ids: str) -> None:
    anyio.run(leave, graph, *run_ids)


def serve(start_child: Start, factory: str = "create") -> Child:
    return start_child(MAIN, "serve", "--app", f"tests.engine.held:{factory}", "--store", "ditto.db")


def lines_until(child: Child, *words: str) -> list[str]:
    """The lines up to the one in which the last of these words has come."""
    lines: list[str] = []
    wanted = list(words)
    while wanted:
        line = child.line()
        assert line, f"it ended before it said {wanted}: {lines}"
        lines.append(line)
        wanted = [word for word in wanted if word not in line]
    return lines


def status(run_id: str) -> str:
    word: str = told_json("show", run_id)["status"]
    return word


def states(run_id: str) -> dict[str, str]:
    return {step["path"]: step["state"] for step in told_json("show", run_id)["steps"]}


def test_d08_sigterm_drains_commits_and_closes(start_child: Start) -> None:
    begin(HELD, "r-1", "r-2", "r-3")
    untouched = ditto("events", "r-3").stdout
    child = serve(start_child)
    lines = lines_until(child, "holds r-1", "holds r-2")
    os.kill(child.pid, signal.SIGTERM)
    lines += lines_until(child, "SIGTERM: nothing further is taken up; what runs has 60 s to end")
    child.tell()
    child.tell()
    code, rest = child.end()
    assert code == 0
    assert "serving on " in lines[0]
    assert sorted(line.partition("INFO")[2].strip() for line in rest[:-1]) == [
        "run r-1: interrupted", "run r-2: interrupted",
    ]  # fmt: skip
    assert rest[-1].endswith("stopped")
    told = "\n".join(lines + rest)
    assert "closed" not in told
    assert "Traceback" not in told
    for run_id in ("r-1", "r-2"):
        assert status(run_id) == "interrupted"
        assert states(run_id) == {"go": "completed", "hold": "completed"}
        assert told_json("resume", run_id, "--app", "tests.engine.held:create")["after"] == "held"
    assert ditto("events", "r-3").stdout == untouched
    assert sorted(EFFECTS.read_text(encoding="utf-8").split()) == ["r-1/1/hold", "r-2/1/hold"]


def test_serve_drives_what_comes_and_says_so(start_child: Start, folder: Path) -> None:
    child = serve(start_child)
    lines_until(child, "serving on ")
    assert (folder / "ditto.db").exists()
    begin(HELD, "r")
    lines_until(child, "run r: taken up, graph held", "holds r")
    child.tell()
    lines_until(child, "run r: completed")
    os.kill(child.pid, signal.SIGINT)
    code, rest = child.end()
    assert code == 130
    assert [line.partition("INFO")[2].strip().partition(";")[0] for line in rest] == [
        "SIGINT: nothing further is taken up", "stopped",
    ]  # fmt: skip


def test_a_second_signal_ends_it_at_once_and_a_later_process_goes_on(start_child: Start) -> None:
    begin(HELD, "r")
    child = serve(start_child)
    lines_until(child, "holds r")
    os.kill(child.pid, signal.SIGTERM)
    lines_until(child, "SIGTERM: ")
    os.kill(child.pid, signal.SIGTERM)
    assert child.line() == ""
    assert child.end() == (-signal.SIGTERM, [])
    assert status("r") == "unknown"
    ditto("resolve", "r", "hold", "--actor", "kim", "--reason", "looked", "--committed", "-", stdin='"held"')
    assert told_json("resume", "r", "--app", "tests.engine.held:create")["after"] == "held"


def test_what_does_not_end_in_time_is_cut_short_and_can_be_resumed(start_child: Start) -> None:
    begin(HANGS, "r")
    child = serve(start_child, "create_short")
    lines_until(child, "hangs")
    os.kill(child.pid, signal.SIGTERM)
    code, rest = child.end()
    assert code == 0
    assert "not ended in time, and cut short: r" in "\n".join(rest)
    assert "closed" not in "\n".join(rest)
    assert status("r") == "interrupted"
    assert states("r") == {"go": "completed"}


def test_a_handler_that_ignores_its_end_does_not_keep_the_process(start_child: Start) -> None:
    begin(IGNORES, "r")
    child = serve(start_child, "create_impatient")
    lines_until(child, "hangs")
    os.kill(child.pid, signal.SIGTERM)
    code, rest = child.end()
    assert code == 143
    assert rest[-1].endswith("a handler ignores its cancellation; the process ends without it")
    assert status("r") == "interrupted"


def test_sigterm_lets_go_of_what_resume_drives(start_child: Start) -> None:
    begin(HANGS, "r")
    child = start_child(MAIN, "resume", "r", "--app", "tests.engine.held:create", "--store", "ditto.db")
    assert child.line() == "hangs"
    os.kill(child.pid, signal.SIGTERM)
    assert child.end() == (143, [])
    assert status("r") == "interrupted"


def test_events_are_followed_over_other_processes_to_the_end(start_child: Start) -> None:
    anyio.run(park, PAID, "r")
    child = start_child(MAIN, "events", "r", "--follow", "--json", "--store", "ditto.db")
    followed = [json.loads(line) for line in lines_until(child, "run_waiting")]
    ditto("send", "r", "bank.paid")
    ditto("resume", "r", "--app", "tests.engine.reviews:create")
    code, rest = child.end()
    assert code == 0
    followed += [json.loads(line) for line in rest]
    assert followed == [json.loads(line) for line in ditto("events", "r", "--json").stdout.splitlines()]
    assert followed[-1]["kind"] == "run_completed"


def test_following_ends_by_ctrl_c_without_a_trace(start_child: Start) -> None:
    anyio.run(park, PAID, "r")
    child = start_child(MAIN, "events", "r", "--follow", "--store", "ditto.db")
    lines_until(child, "run_waiting")
    os.kill(child.pid, signal.SIGINT)
    assert child.end() == (130, [])
    assert status("r") == "waiting"
