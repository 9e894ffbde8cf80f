"""The `ditto` command and runs that wait: what they wait for, how that is answered, and how they go on."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import anyio
import pytest
from typer.testing import Result

from ditto import DittoError, Flow, FlowContext, Graph, Turn, TurnContext, create_ditto
from tests.engine import reviews
from tests.engine.commands import ditto, told_json
from tests.engine.reviews import FLOW, LOOP, NAP, PAID, PRIVATE, REVIEWED, THREE, park

APP = ("--app", "tests.engine.reviews:create")
NEXT = ("--app", "tests.engine.reviews:create_next")
KIM = ("--actor", "kim")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, which is empty."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def begin(workflow: Any, run_id: str, input: Any = PRIVATE) -> None:
    """Begin a run that waits."""
    anyio.run(park, workflow, run_id, input)


def fail(workflow: Any, run_id: str, input: Any = None) -> None:
    """Begin a run that does not come to its end."""

    async def run() -> None:
        async with reviews.create() as runtime:
            with pytest.raises(DittoError):
                await runtime.run(workflow, input, id=run_id)

    anyio.run(run)


def history(run_id: str, *options: object) -> list[dict[str, Any]]:
    return [json.loads(line) for line in ditto("events", run_id, "--json", *options).stdout.splitlines()]


def kinds(run_id: str) -> list[str]:
    return [event["kind"] for event in history(run_id)]


def status(run_id: str) -> str:
    word: str = told_json("show", run_id)["status"]
    return word


def printed_command(result: Result, verb: str) -> list[str]:
    """The words of the command of that verb that was printed, without `ditto`."""
    lines = [line.strip() for line in result.stdout.splitlines()]
    [found] = [line for line in lines if line.startswith(f"ditto {verb}")]
    return shlex.split(found)[1:]


# --- what is waited for ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run_id", ["r-1", "it's $HOME; rm *", "-rf"])
def test_show_prints_the_command_that_answers_and_it_does(run_id: str) -> None:
    begin(REVIEWED, run_id)
    shown = ditto("show", "--", run_id)
    assert "  review: approval until " in shown.stdout
    words = printed_command(shown, "approve")
    words[words.index("NAME")] = "kim"
    assert "recorded: approve by kim" in ditto(words[0], *words[1:]).stderr
    [review] = [each for each in told_json("show", "--", run_id)["steps"] if each["path"] == "review"]
    assert review["state"] == "completed"


def test_show_tells_every_kind_of_wait() -> None:
    begin(PAID, "paid")
    assert "  paid: signal bank.paid\n      ditto send paid bank.paid --body JSON\n" in ditto("show", "paid").stdout
    begin(Graph("late").sleep("late", 3600), "late")
    assert "  late: time until " in ditto("show", "late").stdout
    begin(FLOW, "outer")
    told = ditto("show", "outer").stdout
    assert "  inner: run outer/inner\n      ditto show outer/inner\n" in told
    assert told.endswith("\nnext: ditto show outer/inner\n")
    [wait] = told_json("show", "paid")["waits"]
    assert wait == {
        "step": "paid", "kind": "WAIT.SIGNAL", "name": "bank.paid", "shown": None, "digest": None, "due_at": None,
        "answer": "ditto send paid bank.paid --body JSON",
    }  # fmt: skip


def test_what_an_approval_shows_is_hidden_unless_it_is_asked_for() -> None:
    begin(REVIEWED, "r")
    for options in ([], ["--json"]):
        assert PRIVATE not in ditto("show", "r", *options).stdout
        assert PRIVATE in ditto("show", "r", "--data", *options).stdout
    assert "shown: (hidden; --data shows it)" in ditto("show", "r").stdout
    assert told_json("show", "r", "--data")["waits"][0]["shown"] == {"text": PRIVATE}
    assert PRIVATE not in ditto("resume", "r", *APP, code=75).stdout


def test_a_closed_run_waits_for_nothing() -> None:
    begin(REVIEWED, "r")
    ditto("cancel", "r", *KIM, "--reason", "x")
    assert "waits for" not in ditto("show", "r").stdout
    assert told_json("show", "r")["waits"] == []


# --- deciding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["approve", "reject"])
def test_b04_without_a_step_one_open_approval_is_meant_and_never_several(verb: str) -> None:
    begin(THREE, "r")
    before = kinds("r")
    told = ditto(verb, "r", *KIM, code=2).stderr
    assert "3 approvals are open (n1, n2, n3); say which step" in told
    assert kinds("r") == before
    assert [wait["step"] for wait in told_json("show", "r")["waits"]] == ["n1", "n2", "n3"]
    for step in ("n2", "n3"):
        ditto(verb, "r", step, *KIM)
    assert [wait["step"] for wait in told_json("show", "r")["waits"]] == ["n1"]
    ditto(verb, "r", *KIM)
    assert kinds("r").count("approval_decided") == 3
    assert "no approval is open" in ditto(verb, "r", *KIM, code=2).stderr
    outputs = told_json("resume", "r", *APP)
    assert {outputs[step]["decision"] for step in ("n1", "n2", "n3")} == {verb}


def test_a_decision_is_kept_once_with_who_and_why() -> None:
    begin(REVIEWED, "r")
    assert "shows something else" in ditto("approve", "r", *KIM, "--digest", "0" * 64, code=1).stderr
    told = ditto("reject", "r", "review", *KIM, "--reason", "too dear").stderr
    assert told == (
        "recorded: reject by kim, run r. Whoever serves goes on with it, or: ditto resume r --app module:factory\n"
    )
    assert "already decided: reject by kim" in ditto("approve", "r", "review", "--actor", "bo", code=1).stderr
    [decided] = [event for event in history("r") if event["kind"] == "approval_decided"]
    assert (decided["step"], decided["body"]["decision"], decided["body"]["actor"]) == ("review", "reject", "kim")
    [review] = [each for each in told_json("show", "r", "--data")["steps"] if each["path"] == "review"]
    assert review["output"]["reason"] == "too dear"


def test_a_paused_run_stays_until_it_is_resumed() -> None:
    begin(PAID, "r")
    told = ditto("pause", "r", *KIM, "--reason", "wait for the bank").stderr
    assert told == (
        "recorded: pause of run r. What is under way is drained. Go on by: ditto resume r --app module:factory\n"
    )
    assert status("r") == "paused"
    assert told_json("show", "r")["next"] == "ditto resume r --app module:factory"
    [paused] = [event["body"] for event in history("r") if event["kind"] == "run_paused"]
    assert paused == {"actor": "kim", "reason": "wait for the bank"}
    ditto("send", "r", "bank.paid", "--body", "7")
    assert status("r") == "paused"
    assert told_json("resume", "r", *APP)["end"] == 7
    assert "only an open run can be paused" in ditto("pause", "r", *KIM, "--reason", "x", code=1).stderr
    ditto("pause", "x", *KIM, "--reason", "x", code=2)
    ditto("pause", "r", *KIM, code=2)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["approve", "r"], "--actor"),
        (["approve", "r", "--actor", " "], "who decides"),
        (["approve", "r", "draft", *KIM], "asks for no approval"),
        (["reject", "x", *KIM], "no run has the id 'x'"),
        (["send", "x", "bank.paid"], "no run has the id 'x'"),
        (["send", "r", "a b"], "signal 'a b'"),
        (["send", "r", "paid", "--body", "{"], "--body: it holds no JSON"),
        (["send", "r", "paid", "--body", "@none.json"], "none.json: it cannot be read"),
        (["send", "r", "paid", "--body", "[NaN]"], "which JSON cannot hold"),
    ],
    ids=str,
)
def test_what_does_not_fit_changes_nothing(arguments: list[str], says: str) -> None:
    begin(REVIEWED, "r")
    before = kinds("r")
    assert says in ditto(arguments[0], *arguments[1:], code=2).stderr
    assert kinds("r") == before


@pytest.mark.parametrize(
    ("options", "stdin", "body"),
    [
        ([], None, None),
        (["--body", '{"by": "bank"}'], None, {"by": "bank"}),
        (["--body", "@body.json"], None, [1, 2]),
        (["--body", "-"], '"text"', "text"),
    ],
    ids=["none", "json", "file", "stdin"],
)
def test_send_gives_the_body_to_the_wait(folder: Path, options: list[str], stdin: str | None, body: Any) -> None:
    (folder / "body.json").write_text("[1, 2]", encoding="utf-8")
    begin(PAID, "r")
    told = ditto("send", "r", "bank.paid", *options, *KIM, stdin=stdin).stderr
    assert told.startswith("sent: signal bank.paid to run r. ")
    assert history("r")[-1]["body"]["actor"] == "kim"
    assert told_json("resume", "r", *APP)["end"] == body


def test_a_signal_with_an_id_is_sent_once() -> None:
    begin(PAID, "r")
    assert ditto("send", "r", "bank.paid", "--id", "p-9").stderr.startswith("sent: ")
    before = kinds("r")
    assert "p-9" in ditto("send", "r", "bank.paid", "--id", "p-9").stderr
    assert kinds("r") == before
    ditto("resume", "r", *APP)
    assert "the run is completed" in ditto("send", "r", "bank.paid", code=1).stderr


# --- going on --------------------------------------------------------------------------------------------------------


def test_resume_returns_with_75_and_what_it_waits_for() -> None:
    begin(REVIEWED, "r")
    told = ditto("resume", "r", *APP, code=75).stdout
    assert told.startswith("waits for:\n  review: approval until ")
    data = told_json("resume", "r", *APP, code=75)
    assert (data["run_id"], data["status"], data["waits"][0]["step"]) == ("r", "waiting", "review")
    assert data["waits"][0]["answer"].startswith("ditto approve r review --digest ")
    assert status("r") == "waiting"


def test_resume_may_wait_too() -> None:
    begin(NAP, "r")
    assert told_json("resume", "r", *APP, "--on-wait", "block") == {"nap": {"timed_out": True}}
    ditto("resume", "r", *APP, "--on-wait", "sleep", code=2)


def test_retry_takes_up_what_failed_and_refuses_what_is_open_or_done() -> None:
    begin(PAID, "waits")
    assert "run waits is waiting; retry is for runs that are failed" in ditto("retry", "waits", *APP, code=2).stderr
    assert kinds("waits")[-1] == "run_waiting"
    fail(LOOP, "tries", 0)
    assert status("tries") == "exhausted"
    assert told_json("show", "tries")["next"] == "ditto retry tries --app module:factory"
    assert "higher max_iterations" in ditto("retry", "tries", *APP, code=1).stderr
    assert told_json("retry", "tries", *NEXT) == 5
    assert kinds("tries").count("run_reopened") == 2
    assert "run tries is completed" in ditto("retry", "tries", *NEXT, code=2).stderr


def test_a_blocked_run_says_so_and_goes_on_with_code_that_fits() -> None:
    begin(REVIEWED, "r")
    assert "the graph has no node review" in ditto("resume", "r", *NEXT, code=4).stderr
    assert status("r") == "blocked"
    assert told_json("show", "r")["next"] == "with code that fits: ditto retry r --app module:factory"
    ditto("approve", "r", *KIM)
    assert "the graph has no node review" in ditto("retry", "r", *NEXT, code=4).stderr
    assert told_json("retry", "r", *APP)["send"] == "approve"


def test_a_flow_that_asks_for_something_else_needs_a_person() -> None:
    begin(FLOW, "r", None)

    async def other(ctx: FlowContext, input: Any) -> Any:
        return await ctx.wait("inner")

    async def block() -> None:
        async with create_ditto(store="ditto.db", workflows=[Flow("outer", other)]) as runtime:
            with pytest.raises(DittoError):
                await runtime.resume("r")

    anyio.run(block)
    assert status("r") == "blocked"


# --- the preflight ---------------------------------------------------------------------------------------------------


def test_f07_check_lists_every_run_that_a_release_would_strand() -> None:
    begin(REVIEWED, "reviewed-1")
    begin(REVIEWED, "reviewed-2")
    begin(PAID, "paid")
    begin(FLOW, "outer")
    assert ditto("check", "--open-runs", *APP).stdout.endswith("\n5 of 5 can be taken up by this code\n")
    found = told_json("check", "--open-runs", *NEXT, code=4)
    assert {each["run_id"]: each["resumable"] for each in found} == {
        "reviewed-1": False, "reviewed-2": False, "paid": True, "outer": False, "outer/inner": True,
    }  # fmt: skip
    assert found[0]["differences"] == ["step review is recorded as waiting, and the graph has no node review"]
    told = ditto("check", "--open-runs", *NEXT, code=4).stdout
    assert "\nreviewed-1:\n  step review is recorded as waiting, and the graph has no node review\n" in told
    assert "\nouter:\n  flow outer is not registered\n" in told
    assert told.endswith("\n2 of 5 can be taken up by this code\n")
    assert {status(run_id) for run_id in ("reviewed-1", "reviewed-2", "paid", "outer")} == {"waiting"}


def test_a_turn_is_left_to_its_agent() -> None:
    turn = Turn("report", "thread-1", "turn-1", "tiny/1")

    async def broken(ctx: TurnContext) -> None:
        raise ValueError("broken")

    async def ask() -> None:
        async with create_ditto(store="ditto.db") as runtime:
            with pytest.raises(ValueError, match="broken"):
                await runtime.turn(turn, broken)

    anyio.run(ask)
    assert told_json("show", turn.run_id)["next"] == "ask its agent again for this turn"
    [found] = told_json("check", "--failed-runs", *APP, code=4)
    assert (found["kind"], found["resumable"]) == ("turn", False)
    assert "when its agent is asked for it again" in found["differences"][0]


def test_check_asks_for_the_runs_that_are_meant() -> None:
    fail(LOOP, "tries", 0)
    assert told_json("check", "--open-runs", *APP) == []
    assert ditto("check", "--open-runs", *APP).stdout == "\n0 of 0 can be taken up by this code\n"
    [found] = told_json("check", "--failed-runs", *APP)
    assert (found["run_id"], found["status"], found["kind"], found["workflow"]) == (
        "tries", "exhausted", "loop", "tries",
    )  # fmt: skip
    assert "say what to check" in ditto("check", *APP, code=2).stderr
    assert "--app" in ditto("check", "--open-runs", code=2).stderr


# --- drawing ---------------------------------------------------------------------------------------------------------


def test_graph_draws_without_a_store(folder: Path) -> None:
    told = ditto("graph", "tests.engine.reviews:REVIEWED").stdout
    assert told == REVIEWED.to_mermaid()
    assert '{{"review<br/>' in told
    assert "subgraph body" in ditto("graph", "tests.engine.reviews:LOOP").stdout
    assert "known only by running it" in ditto("graph", "tests.engine.reviews:FLOW").stdout
    assert told_json("graph", "tests.engine.reviews:REVIEWED")["nodes"][1]["name"] == "review"
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("tests.engine.reviews", "write module:name"),
        ("tests.engine.reviews:", "write module:name"),
        ("nothing.here:GRAPH", "No module named"),
        ("tests.engine.reviews:MISSING", "it names nothing"),
        ("tests.engine.reviews:PRIVATE", "it names a str"),
    ],
)
def test_graph_of_what_is_no_workflow(name: str, says: str) -> None:
    assert says in ditto("graph", name, code=2).stderr


# --- events ----------------------------------------------------------------------------------------------------------


def test_following_a_closed_run_ends_at_once() -> None:
    begin(PAID, "r")
    ditto("send", "r", "bank.paid")
    ditto("resume", "r", *APP)
    assert ditto("events", "r", "--follow").stdout == ditto("events", "r").stdout
    assert history("r", "--follow", "--after", 2) == history("r")[2:]


def test_what_came_too_late_is_hidden_unless_it_is_asked_for() -> None:
    async def late() -> None:
        begun, go_on = anyio.Event(), anyio.Event()

        async def slow() -> str:
            begun.set()
            with anyio.CancelScope(shield=True):
                await go_on.wait()
            return PRIVATE

        async with create_ditto(store="ditto.db") as runtime, anyio.create_task_group() as tasks:

            async def drive() -> None:
                with pytest.raises(DittoError):
                    await runtime.run(Graph("g").step("slow", slow), id="r")

            tasks.start_soon(drive)
            await begun.wait()
            await runtime.cancel("r", actor="kim", reason="x")
            go_on.set()

    anyio.run(late)
    assert kinds("r")[-1] == "step_returned_late"
    for options in ([], ["--json"]):
        assert PRIVATE not in ditto("events", "r", *options).stdout
        assert PRIVATE in ditto("events", "r", "--data", *options).stdout


# --- what people wrote is shown, and does nothing ---------------------------------------------------------------------

WILD = "\x1b[2J\x1b]0;owned\x07\r\nrun        forged\x9b31m\u202eevil\u2028\x7f"


def test_stored_text_cannot_reach_the_terminal_raw() -> None:
    def wild() -> None:
        raise ValueError(WILD)

    fail(Graph("g").step("wild", wild), "r")
    begin(PAID, "p", WILD)
    ditto("send", "p", "bank.paid", "--actor", WILD, "--body", json.dumps(WILD))
    ditto("cancel", "p", "--actor", WILD, "--reason", WILD)
    for verb, *words in (
        ["show", "r"], ["show", "p", "--data"], ["events", "r"], ["events", "p", "--data"], ["runs"], ["doctor"],
    ):  # fmt: skip
        for options in ([], ["--json"]):
            told = ditto(verb, *words, *options).stdout
            assert all(line.isprintable() for line in told.split("\n")), told
            assert not any(line.startswith("run        forged") for line in told.split("\n"))
    assert told_json("show", "r")["error"]["message"] == WILD
    assert history("p")[-1]["body"] == {"actor": WILD, "reason": WILD}
    assert "\\x1b[2J" in ditto("show", "r").stdout
    told = ditto("show", WILD, code=2).stderr
    assert all(line.isprintable() for line in told.split("\n"))


@pytest.mark.parametrize("odd", ["x') OR 1=1 --", 'a"b', "a.b[0]", "$", "%", "_", "r\x00"], ids=ascii)
def test_h03_odd_words_are_data_and_match_only_themselves(odd: str) -> None:
    begin(PAID, "r")
    assert "use one of" in ditto("runs", "--status", odd, code=2).stderr
    for verb, *words in (["show"], ["events"], ["approve", *KIM], ["cancel", *KIM, "--reason", "x"]):
        told = ditto(verb, *words, odd, code=2).stderr
        assert "no run has the id" in told
        assert "SQL" not in told
    assert status("r") == "waiting"
