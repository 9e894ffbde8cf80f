"""Advice: the command that a person types next, ready to be copied into a shell."""

from __future__ import annotations

import re
import shlex

from ditto.runs import RunInfo
from ditto.waits import OpenWait, WaitKind

_APP = "--app module:factory"

_TURN = re.compile("turn-[0-9a-f]{64}")
"""The id of a turn's run: it goes on with its agent, which no factory knows."""


def next_command(run: RunInfo) -> str | None:
    """What a person does next with this run, as one line; None if there is nothing to do."""
    if run.kind == "turn" and run.status == "paused":
        return f"runtime.unpause({run.run_id!r}), then ask its agent again for this turn"
    if run.kind == "turn" and run.status in ("interrupted", "failed", "blocked"):
        return "ask its agent again for this turn"
    lost = [step for step in run.steps if step.state in ("unknown", "admitted")]
    match run.status:
        case "unknown" if lost:
            way = "--ask-again" if lost[0].effect == "infer" else "--committed FILE"
            return "run it again (a look-up is asked once more), or: " + _command(
                "resolve", run.run_id, lost[0].path, options=f"{way} --actor … --reason …"
            )
        case "interrupted" | "paused":
            return _command("resume", run.run_id, options=_APP)
        case "failed" | "exhausted":
            return _command("retry", run.run_id, options=_APP)
        case "blocked":
            return "with code that fits: " + _command("retry", run.run_id, options=_APP)
        case "waiting":
            return next((answer for wait in run.waits if (answer := answer_command(run.run_id, wait))), None)
        case _:
            return None


def answer_command(run_id: str, wait: OpenWait) -> str | None:
    """The command that ends a wait, or that looks at what it is for; None for a time."""
    match wait.kind:
        case WaitKind.SIGNAL:
            return _command("send", run_id, wait.name, options="--body JSON")
        case WaitKind.APPROVAL:
            digest = "" if wait.digest is None else f"--digest {wait.digest} "
            return _command("approve", run_id, wait.step, options=f"{digest}--actor NAME")
        case WaitKind.CHILD:
            return _command("show", wait.name)
        case WaitKind.TIMER:
            return None


def go_on_command(run_id: str) -> str:
    """How a run that nobody drives goes on after a decision."""
    if _TURN.fullmatch(run_id):
        return "ask its agent again for this turn"
    return _command("resume", run_id, options=_APP)


def _command(verb: str, *words: str, options: str = "") -> str:
    quoted = " ".join(map(shlex.quote, words))
    if any(word.startswith("-") for word in words):
        return " ".join(filter(None, ("ditto", verb, options, "--", quoted)))
    return " ".join(filter(None, ("ditto", verb, quoted, options)))
