"""The `ditto` command on real stores: what it tells, what it keeps to itself, what it decides, and how it ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import pytest
from typer.testing import CliRunner

from ditto.cli.main import app
from ditto.store.connection import Location, open_store
from tests.engine.commands import command, ditto, python, told_json
from tests.processes import ROOT, Child

SECRET: Final = "private-4711"
WHO: Final = ("--actor", "kim", "--reason", "asked the bank")

SHOP: Final = '''
"""An application: each file in the current folder makes something go wrong."""

import os
import sys
from pathlib import Path

import anyio

from ditto import DittoError, EffectNotMade, EffectRejected, Graph, create_ditto


def pay():
    if Path("lose").exists():
        raise ConnectionError("the line is dead")
    return {"paid": "private-4711"}


def ask():
    if Path("lose").exists():
        raise ConnectionError("the line is dead")
    return "42"


def pack():
    if Path("break").exists():
        raise EffectNotMade("the box is torn")
    if Path("reject").exists():
        raise EffectRejected("no such address")
    return "packed"


def think():
    if Path("die").exists():
        os._exit(9)
    return "thought"


async def hold():
    if Path("hold").exists():
        print("holds", flush=True)
        await anyio.sleep_forever()
    return "held"


ORDER = Graph("order").step("pay", pay, effect="write")
QUESTION = Graph("question").step("ask", ask, effect="infer")
PARCEL = Graph("parcel").step("pack", pack, effect="write")
THOUGHT = Graph("thought").step("think", think, effect="read")
HELD = Graph("held").step("hold", hold, effect="write")
ALL = [ORDER, QUESTION, PARCEL, THOUGHT, HELD]


def create(store="ditto.db"):
    return create_ditto(store=store, workflows=ALL)


def create_fixed():
    return create_ditto(store="ditto.db", workflows=ALL)


def create_empty(store="ditto.db"):
    return create_ditto(store=store)


def create_nothing():
    return None


def run(name, run_id, *files):
    async def drive():
        async with create() as runtime:
            try:
                await runtime.run(next(each for each in ALL if each.name == name), {"note": "private-4711"}, id=run_id)
            except DittoError:
                pass

    for file in files:
        Path(file).touch()
    anyio.run(drive)
    for file in files:
        Path(file).unlink()


def make():
    run("order", "paid")
    run("order", "lost", "lose")
    run("question", "asked", "lose")
    run("parcel", "torn", "break")
    run("parcel", "refused", "reject")
'''


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the application and a store that has a run of each kind, made by other processes."""
    folder = tmp_path_factory.mktemp("shop")
    (folder / "shop.py").write_text(SHOP, encoding="utf-8")
    done = python(folder, "-c", "import shop; shop.make()")
    assert done.returncode == 0, done.stderr
    assert python(folder, "-c", "import shop; shop.run('thought', 'died', 'die')").returncode == 9
    (folder / "die").unlink()
    return folder


@pytest.fixture
def shop(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that folder, which is the current one."""
    folder = tmp_path / "shop"
    shutil.copytree(made, folder)
    monkeypatch.chdir(folder)
    return folder


def step(run_id: str, path: str) -> Any:
    return next(each for each in told_json("show", run_id)["steps"] if each["path"] == path)


# --- looking ---------------------------------------------------------------------------------------------------------

STATUSES: Final = {
    "paid": "completed", "lost": "unknown", "asked": "unknown", "torn": "failed", "refused": "failed",
    "died": "interrupted",
}  # fmt: skip


def test_runs_lists_the_newest_first(shop: Path) -> None:
    lines = ditto("runs").stdout.splitlines()
    assert lines[0].split() == ["RUN", "STATUS", "WORKFLOW", "UPDATED"]
    assert [line.split()[0] for line in lines[1:]] == ["died", "refused", "torn", "asked", "lost", "paid"]
    assert {each["run_id"]: each["status"] for each in told_json("runs")} == STATUSES


def test_runs_by_status_and_limit(shop: Path) -> None:
    assert [each["run_id"] for each in told_json("runs", "--status", "failed")] == ["refused", "torn"]
    assert [each["run_id"] for each in told_json("runs", "--status", "interrupted")] == ["died"]
    assert [each["run_id"] for each in told_json("runs", "--limit", "1")] == ["died"]
    assert "use one of" in ditto("runs", "--status", "lost", code=2).stderr
    ditto("runs", "--limit", "0", code=2)


def test_show_hides_values_unless_they_are_asked_for(shop: Path) -> None:
    for options in ([], ["--json"]):
        assert SECRET not in ditto("show", "paid", *options).stdout
        assert SECRET in ditto("show", "paid", "--data", *options).stdout
    assert "(hidden; --data shows it)" in ditto("show", "paid").stdout
    assert told_json("show", "paid", "--data")["steps"][0]["output"] == {"paid": SECRET}


@pytest.mark.parametrize(
    ("run_id", "advice"),
    [
        ("paid", None),
        ("lost", "ditto resolve lost pay --committed FILE"),
        ("asked", "ditto resolve asked ask --ask-again"),
        ("torn", "ditto retry torn --app module:factory"),
        ("died", "ditto resume died --app module:factory"),
    ],
)
def test_show_says_what_to_do_next(shop: Path, run_id: str, advice: str | None) -> None:
    shown = told_json("show", run_id)
    assert shown["status"] == STATUSES[run_id]
    assert shown["next"] is None if advice is None else advice in shown["next"]
    assert ("next: " in ditto("show", run_id).stdout) == (advice is not None)


def test_show_tells_the_error(shop: Path) -> None:
    assert "the box is torn" in ditto("show", "torn").stdout
    assert step("torn", "pack")["error"]["message"].endswith("the box is torn")
    assert step("lost", "pay")["state"] == "unknown"


def test_events_are_one_a_line_and_begin_where_asked(shop: Path) -> None:
    found = [json.loads(line) for line in ditto("events", "paid", "--json").stdout.splitlines()]
    assert [each["number"] for each in found] == list(range(1, len(found) + 1))
    assert found[0]["kind"] == "run_created"
    assert len(ditto("events", "paid").stdout.splitlines()) == len(found)
    later = ditto("events", "paid", "--after", len(found) - 1, "--json").stdout
    assert json.loads(later) == found[-1]
    assert ditto("events", "paid", "--after", len(found)).stdout == ""
    assert SECRET not in ditto("events", "paid").stdout


@pytest.mark.parametrize(
    "verb", [["show", "x"], ["events", "x"], ["cancel", "x", *WHO], ["resolve", "x", "a", *WHO, "--absent"]]
)
def test_a_run_that_is_not_there(shop: Path, verb: list[str]) -> None:
    assert "no run has the id 'x'" in ditto(*verb, code=2).stderr


# --- stores ----------------------------------------------------------------------------------------------------------

EVERY_VERB: Final = [
    ["runs"], ["show", "x"], ["events", "x"], ["doctor"], ["cancel", "x", *WHO],
    ["resolve", "x", "a", *WHO, "--absent"], ["resume", "x", "--app", "shop:create"],
    ["send", "x", "paid"], ["approve", "x", "--actor", "kim"], ["reject", "x", "--actor", "kim"],
    ["check", "--open-runs", "--app", "shop:create"], ["retry", "x", "--app", "shop:create"],
]  # fmt: skip


@pytest.mark.parametrize("verb", EVERY_VERB, ids=lambda verb: str(verb[0]))
def test_a_store_that_is_missing_is_not_made(made: Path, tmp_path: Path, verb: list[str]) -> None:
    shutil.copy(made / "shop.py", tmp_path)
    done = command(tmp_path, *verb, "--store", "data/none.db", code=2)
    assert "there is no store" in done.stderr
    assert not (tmp_path / "data").exists()
    assert done.stdout == ""


def make_empty(file: Path) -> None:
    file.touch()


def make_theirs(file: Path) -> None:
    with closing(sqlite3.connect(file, isolation_level=None)) as db:
        db.execute("CREATE TABLE theirs (x)")


def make_theirs_with_a_wal(file: Path) -> None:
    """In WAL mode, closed as it should be."""
    with closing(sqlite3.connect(file, isolation_level=None)) as db:
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("CREATE TABLE theirs (x)")


def make_theirs_left_open(file: Path) -> None:
    """In WAL mode, by a process that died: what it wrote is in the WAL alone."""
    source = (
        "import os, sqlite3, sys; db = sqlite3.connect(sys.argv[1], isolation_level=None);"
        "db.execute('PRAGMA journal_mode=WAL'); db.execute('CREATE TABLE theirs (x)'); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", source, str(file)], check=True)


def make_named(file: Path) -> None:
    """Another application's, by its id."""
    with closing(sqlite3.connect(file, isolation_level=None)) as db:
        db.execute("PRAGMA application_id=252006673")


def make_newer(file: Path) -> None:
    """A store, of a schema that is not known yet."""
    open_store(Location(file))
    with closing(sqlite3.connect(file, isolation_level=None)) as db:
        db.execute("UPDATE ditto_meta SET value='9999' WHERE name='schema_version'")


@pytest.mark.parametrize("verb", EVERY_VERB, ids=lambda verb: str(verb[0]))
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (make_empty, "there is no store of ditto in this file; choose another path"),
        (make_theirs, "there is no store of ditto in this file; choose another path"),
        (make_theirs_with_a_wal, "there is no store of ditto in this file; choose another path"),
        (make_theirs_left_open, "there is no store of ditto in this file; choose another path"),
        (make_named, "belongs to another application (id 252006673)"),
        (make_newer, "the store has schema 9999, this ditto knows up to"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_what_is_no_store_is_refused_and_not_altered(
    made: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    verb: list[str],
    make: Callable[[Path], None],
    says: str,
) -> None:
    shutil.copy(made / "shop.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "ditto.db")

    def lies_there() -> dict[str, bytes]:
        return {
            file.name: file.read_bytes()
            for file in tmp_path.iterdir()
            if file.is_file() and not file.name.endswith("-shm")
        }

    before = lies_there()
    result = ditto(*verb, code=2)
    assert says in result.stderr
    assert result.stdout == ""
    assert lies_there() == before
    assert not (tmp_path / "ditto.db.owners").exists()


def test_a_store_that_another_process_has_open_is_looked_at(shop: Path, start_child: Callable[..., Child]) -> None:
    child = start_child(
        "import asyncio, shop, sys\n"
        "async def main():\n"
        "    async with shop.create() as runtime:\n"
        "        print('open', flush=True)\n"
        "        sys.stdin.readline()\n"
        "asyncio.run(main())",
    )
    assert child.line() == "open"
    assert len(told_json("runs")) == len(STATUSES)


HOLD: Final = """
import sqlite3, sys
db = sqlite3.connect(sys.argv[1], isolation_level=None)
db.execute("BEGIN IMMEDIATE")
print("locked", flush=True)
sys.stdin.readline()
"""


def test_i13_a_lock_that_is_not_given_up_ends_it_with_75_and_a_later_start_goes_on(
    shop: Path, start_child: Callable[..., Child]
) -> None:
    (shop / "ditto.yaml").write_text("store:\n  path: ditto.db\n  busy_timeout_s: 0.2\n", encoding="utf-8")
    child = start_child(HOLD, shop / "ditto.db")
    assert child.line() == "locked"
    done = command(shop, "cancel", "torn2", *WHO, code=2)
    assert "no run has the id" in done.stderr, "looking does not need the lock"
    done = command(shop, "cancel", "lost", *WHO, code=75)
    assert "ditto.db: another process held the write lock for longer than store.busy_timeout_s" in done.stderr
    assert "nothing was written, run again" in done.stderr
    child.kill()
    assert told_json("show", "lost")["status"] == "unknown"
    command(shop, "cancel", "lost", *WHO)
    assert told_json("show", "lost")["status"] == "cancelled"


def test_the_store_is_the_one_of_the_configuration(shop: Path) -> None:
    assert ".ditto/ditto.db: there is no store" in command(shop, "runs", code=2).stderr
    (shop / "ditto.yaml").write_text("store:\n  path: ditto.db\n", encoding="utf-8")
    assert len(json.loads(command(shop, "runs", "--json").stdout)) == len(STATUSES)
    (shop / ".env").write_text("DITTO_STORE=other.db\n", encoding="utf-8")
    assert "other.db: there is no store" in command(shop, "runs", code=2).stderr
    (shop / "ditto.yaml").write_text("stoer: 1\n", encoding="utf-8")
    assert "ditto.yaml" in command(shop, "runs", code=2).stderr


def test_doctor_on_a_sound_store(shop: Path) -> None:
    report = told_json("doctor")
    assert report["sound"]
    assert report["faults"] == []
    assert report["runs"] == {"completed": 1, "unknown": 2, "failed": 2, "interrupted": 1}
    assert report["live_owners"] == 0
    assert report["unknown"] == ["lost pay", "asked ask"]
    told = ditto("doctor").stdout
    assert "lost pay; asked ask" in told
    assert SECRET not in told


def test_doctor_on_a_store_that_has_lost_rows(shop: Path) -> None:
    with closing(sqlite3.connect("ditto.db", isolation_level=None)) as db:
        db.execute("PRAGMA foreign_keys=OFF")
        db.execute("DELETE FROM ditto_runs WHERE run_id = 'paid'")
    result = ditto("doctor", "--json", code=1)
    report = json.loads(result.stdout)
    assert not report["sound"]
    assert "is gone" in report["faults"][0]
    assert "is gone" in ditto("doctor", code=1).stdout


def test_a_damaged_file_is_no_traceback(shop: Path) -> None:
    with closing(sqlite3.connect("ditto.db")) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    file = shop / "ditto.db"
    file.write_bytes(file.read_bytes()[:4096] + b"\xa5" * (file.stat().st_size - 4096))
    result = ditto("doctor", code=1)
    assert "damaged" in result.stderr or "sound            False" in result.stdout
    assert "damaged" in ditto("runs", code=1).stderr


def test_a_file_of_another_kind(shop: Path) -> None:
    for file in ("ditto.db-wal", "ditto.db-shm"):
        Path(file).unlink(missing_ok=True)
    (shop / "ditto.db").write_bytes(b"no database at all, but long enough to be one\n" * 200)
    before = (shop / "ditto.db").read_bytes()
    for verb in (["runs"], ["doctor"]):
        assert "no SQLite database" in ditto(*verb, code=2).stderr
    assert (shop / "ditto.db").read_bytes() == before


# --- deciding --------------------------------------------------------------------------------------------------------


def resume(shop: Path, run_id: str, *options: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    return command(shop, "resume", run_id, "--app", "shop:create", "--store", "ditto.db", *options, code=code)


def test_committed_from_a_file(shop: Path) -> None:
    (shop / "value.json").write_text('{"paid": 7}', encoding="utf-8")
    told = ditto("resolve", "lost", "pay", *WHO, "--committed", "value.json").stderr
    assert "recorded: step pay of run lost" in told
    assert step("lost", "pay")["state"] == "completed"
    event = [json.loads(line) for line in ditto("events", "lost", "--json").stdout.splitlines()][-1]
    assert event["kind"] == "step_resolved"
    assert event["body"] == {"attempt": 1, "decision": "committed", "actor": "kim", "reason": "asked the bank"}
    assert json.loads(resume(shop, "lost", "--json").stdout) == {"pay": {"paid": 7}}


def test_committed_from_standard_input(shop: Path) -> None:
    ditto("resolve", "lost", "pay", *WHO, "--committed", "-", stdin="null")
    assert json.loads(resume(shop, "lost").stdout) == {"pay": None}


def test_absent_is_tried_again(shop: Path) -> None:
    ditto("resolve", "lost", "pay", *WHO, "--absent")
    assert step("lost", "pay")["state"] == "refused"
    assert json.loads(resume(shop, "lost").stdout) == {"pay": {"paid": SECRET}}
    assert step("lost", "pay")["attempt"] == 2


def test_abandon_has_failed(shop: Path) -> None:
    ditto("resolve", "lost", "pay", *WHO, "--abandon")
    assert step("lost", "pay")["error"]["code"] == "step.abandoned"
    assert (
        "abandoned by kim"
        in command(shop, "resume", "lost", "--app", "shop:create", "--store", "ditto.db", code=1).stderr
    )


@pytest.mark.parametrize(("text", "answer"), [("41", "41"), ('{"a": 1}', '{"a": 1}'), ("some words", "some words")])
def test_response_is_the_answer(shop: Path, text: str, answer: str) -> None:
    ditto("resolve", "asked", "ask", *WHO, "--response", "-", stdin=text)
    assert json.loads(resume(shop, "asked").stdout) == {"ask": answer}


def test_ask_again_asks_again(shop: Path) -> None:
    ditto("resolve", "asked", "ask", *WHO, "--ask-again")
    assert json.loads(resume(shop, "asked").stdout) == {"ask": "42"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["lost", "pay", *WHO], "exactly one"),
        (["lost", "pay", *WHO, "--absent", "--abandon"], "exactly one"),
        (["lost", "pay", *WHO, "--committed", "value.json", "--absent"], "exactly one"),
        (["lost", "pay", *WHO, "--ask-again"], "no model call"),
        (["lost", "pay", *WHO, "--response", "value.json"], "no model call"),
        (["asked", "ask", *WHO, "--absent"], "is a model call"),
        (["asked", "ask", *WHO, "--committed", "value.json"], "is a model call"),
        (["lost", "pay", *WHO, "--absent", "--attempt", "2"], "at attempt 1"),
        (["lost", "other", *WHO, "--absent"], "has no record"),
        (["paid", "pay", *WHO, "--absent"], "is completed"),
        (["lost", "pay", "--actor", " ", "--reason", "x", "--absent"], "actor"),
        (["lost", "pay", "--actor", "kim", "--reason", "", "--absent"], "reason"),
        (["lost", "pay", "--reason", "x", "--absent"], "--actor"),
        (["lost", "pay", "--actor", "kim", "--absent"], "--reason"),
        (["lost", "pay", *WHO, "--committed", "broken.json"], "it holds no JSON"),
        (["lost", "pay", *WHO, "--committed", "nan.json"], "NaN"),
        (["lost", "pay", *WHO, "--committed", "none.json"], "cannot be read"),
        (["asked", "ask", *WHO, "--response", "none.json"], "cannot be read"),
        (["asked", "ask", *WHO, "--response", "empty.txt"], "it is empty"),
        (["asked", "ask", *WHO, "--response", "cut.json"], "begins like a JSON object, and is none"),
    ],
    ids=str,
)
def test_a_decision_that_does_not_fit_changes_nothing(shop: Path, arguments: list[str], says: str) -> None:
    (shop / "value.json").write_text("1", encoding="utf-8")
    (shop / "broken.json").write_text("{", encoding="utf-8")
    (shop / "nan.json").write_text("[NaN]", encoding="utf-8")
    (shop / "empty.txt").write_text("\n", encoding="utf-8")
    (shop / "cut.json").write_text('{"message": {"role": "assistant"', encoding="utf-8")
    before = ditto("events", arguments[0]).stdout
    assert says.lower() in ditto("resolve", *arguments, code=2).stderr.lower()
    assert ditto("events", arguments[0]).stdout == before


def test_the_attempt_guard_lets_the_right_attempt_through(shop: Path) -> None:
    ditto("resolve", "lost", "pay", *WHO, "--absent", "--attempt", "1")
    assert "only an unknown outcome" in ditto("resolve", "lost", "pay", *WHO, "--absent", code=2).stderr


def test_cancel_is_for_good(shop: Path) -> None:
    ditto("cancel", "died", *WHO)
    assert told_json("show", "died")["status"] == "cancelled"
    event = [json.loads(line) for line in ditto("events", "died", "--json").stdout.splitlines()][-1]
    assert (event["kind"], event["body"]) == ("run_cancelled", {"actor": "kim", "reason": "asked the bank"})
    assert "cancelled" in resume(shop, "died", code=3).stderr
    ditto("cancel", "died", *WHO, code=1)
    ditto("cancel", "paid", *WHO, code=1)


# --- taking up -------------------------------------------------------------------------------------------------------


def test_resume_goes_on(shop: Path) -> None:
    assert json.loads(resume(shop, "died", "--json").stdout) == {"think": "thought"}
    assert told_json("show", "died")["status"] == "completed"
    assert json.loads(resume(shop, "torn").stdout) == {"pack": "packed"}
    assert json.loads(resume(shop, "paid").stdout) == {"pay": {"paid": SECRET}}


def test_resume_finds_its_module_on_the_path_too(shop: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ditto.cli", "resume", "died", "--app", "shop:create", "--store", shop / "ditto.db"],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "workers", shop)))},
    )  # fmt: skip
    assert (done.returncode, json.loads(done.stdout)) == (0, {"think": "thought"})


@pytest.mark.parametrize(
    ("run_id", "files", "code", "says"),
    [
        ("torn", ["break"], 1, "the box is torn"),
        ("torn", ["reject"], 3, "no such address"),
        ("lost", [], 4, "the line is dead"),
        ("asked", [], 4, "the line is dead"),
        ("none", [], 2, "no run has the id"),
    ],
)
def test_how_resume_ends(shop: Path, run_id: str, files: list[str], code: int, says: str) -> None:
    for file in files:
        (shop / file).touch()
    done = resume(shop, run_id, code=code)
    assert done.stderr.startswith("ditto: ")
    assert says in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("application", "code", "says"),
    [
        ("shop", 2, "write module:factory"),
        ("shop:", 2, "write module:factory"),
        (":create", 2, "write module:factory"),
        ("nothing.here:create", 2, "No module named"),
        ("shop:missing", 2, "has no function missing"),
        ("shop:ALL", 2, "has no function ALL"),
        ("shop:create_nothing", 2, "takes no store="),
        ("shop:create_fixed", 2, "takes no store="),
        ("shop:create_empty", 4, "is not registered"),
    ],
)
def test_an_application_that_cannot_be_used(shop: Path, application: str, code: int, says: str) -> None:
    done = command(shop, "resume", "died", "--app", application, "--store", "ditto.db", code=code)
    assert says in done.stderr
    assert told_json("show", "died")["status"] == "interrupted"


def test_a_factory_that_makes_no_runtime(shop: Path) -> None:
    done = command(shop, "resume", "died", "--app", "shop:create_nothing", code=2)
    assert "returned NoneType; it must return create_ditto" in done.stderr


def test_a_factory_may_choose_the_store(shop: Path) -> None:
    done = command(shop, "resume", "died", "--app", "shop:create_fixed")
    assert json.loads(done.stdout) == {"think": "thought"}


def test_what_another_process_drives_is_entered_later(shop: Path, start_child: Callable[..., Child]) -> None:
    child = start_child("import shop; shop.run('held', 'held', 'hold')")
    assert child.line() == "holds"
    assert "another" in resume(shop, "held", code=75).stderr
    assert "right now" in ditto("resolve", "held", "hold", *WHO, "--absent", code=75).stderr
    assert told_json("show", "held")["status"] == "running"
    assert told_json("doctor")["live_owners"] == 1
    child.kill()
    (shop / "hold").unlink()
    assert told_json("show", "held")["status"] == "unknown"
    ditto("resolve", "held", "hold", *WHO, "--absent")
    assert json.loads(resume(shop, "held").stdout) == {"hold": "held"}


def test_an_interrupt_ends_it_with_130(shop: Path, start_child: Callable[..., Child]) -> None:
    child = start_child("import shop; shop.run('held', 'held', 'hold')")
    assert child.line() == "holds"
    child.kill()
    ditto("resolve", "held", "hold", *WHO, "--absent")
    again = start_child(
        "from ditto.cli.main import main; main()",
        "resume", "held", "--app", "shop:create", "--store", "ditto.db",
    )  # fmt: skip
    assert again.line() == "holds"
    os.kill(again.pid, signal.SIGINT)
    assert again.end() == (130, [])
    assert told_json("show", "held")["status"] == "unknown"


# --- the command itself ----------------------------------------------------------------------------------------------


def test_the_module_and_the_script_are_the_same(shop: Path) -> None:
    script = Path(sys.executable).with_name("ditto")
    done = subprocess.run(
        [script, "runs", "--store", "ditto.db", "--json"], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout == command(shop, "runs", "--store", "ditto.db", "--json").stdout


def test_wrong_usage(shop: Path) -> None:
    for words in ([], ["nothing"], ["show"], ["resume", "x"], ["runs", "--nothing"]):
        assert CliRunner().invoke(app, words).exit_code == 2
    assert CliRunner().invoke(app, ["--help"]).exit_code == 0
