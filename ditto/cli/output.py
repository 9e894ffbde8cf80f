"""What the command prints: tables for people, JSON for programs. Values are shown only when they are asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any

from ditto.cli.advice import answer_command, next_command
from ditto.cli.terminal import json_text, line, print_json, table
from ditto.errors import DittoError
from ditto.runs import Checked, EventInfo, RunInfo, RunSummary, StepInfo
from ditto.store.schema import CLOSED
from ditto.waits import OpenWait, Waiting, WaitKind

HIDDEN = "(hidden; --data shows it)"


def print_runs(runs: Sequence[RunSummary], *, as_json: bool) -> None:
    """One run a line."""
    if as_json:
        print_json([asdict(run) for run in runs])
        return
    rows = [(run.run_id, run.status, run.workflow, _utc(run.updated_at)) for run in runs]
    table(("RUN", "STATUS", "WORKFLOW", "UPDATED"), rows)


def print_run(run: RunInfo, *, with_data: bool, as_json: bool) -> None:
    """A run with its steps, what it waits for, and the command that follows."""
    if as_json:
        print_json(_run_data(run, with_data=with_data))
        return
    line(f"run        {run.run_id} (generation {run.generation})")
    line(f"workflow   {run.kind} {run.workflow}, version {run.version}")
    line(f"status     {run.status}")
    line(f"created    {_utc(run.created_at)}, updated {_utc(run.updated_at)}")
    if run.deadline_at is not None:
        line(f"deadline   {_utc(run.deadline_at)}")
    if run.kind == "loop":
        line(f"iteration  {run.iteration}")
    if run.kind != "graph" and with_data:
        line(f"state      {json_text(run.state)}")
    if run.error is not None:
        line(f"error      {run.error.code}: {run.error.message}")
    rows = [
        (step.path, step.state, step.effect or "-", str(step.attempt), _step_detail(step, with_data))
        for step in run.steps
    ]
    line()
    table(("STEP", "STATE", "EFFECT", "ATTEMPT", "DETAIL"), rows)
    if waits := _open_waits(run):
        line()
        print_waits(run.run_id, waits, with_data=with_data)
    if advice := next_command(run):
        line()
        line(f"next: {advice}")


def print_waits(run_id: str, waits: Sequence[OpenWait], *, with_data: bool) -> None:
    """Each open wait, and below it the command that answers it."""
    line("waits for:")
    for wait in waits:
        line(f"  {wait.step}: {_wait_text(wait)}")
        if wait.digest is not None:
            line(f"      shown: {json_text(wait.shown) if with_data else HIDDEN}")
        if answer := answer_command(run_id, wait):
            line(f"      {answer}")


def print_event(event: EventInfo, *, with_data: bool, as_json: bool) -> None:
    """One line; with JSON, one object a line."""
    body = event.body
    if isinstance(body, dict) and "value" in body and not with_data:
        body = {**body, "value": None if as_json else HIDDEN}
    if as_json:
        print_json({**asdict(event), "body": body}, indent=None)
        return
    text = "" if body is None else json_text(body)
    line(f"{event.number:>6}  {_utc(event.at)}  {event.kind:<20} {event.step or '':<24} {text}".rstrip())


def print_result(result: Any, *, as_json: bool) -> None:
    """What a run came to, or what it waits for."""
    if not isinstance(result, Waiting):
        print_json(result, indent=None if as_json else 2)
    elif as_json:
        waits = [_wait_data(result.run_id, wait, with_data=False) for wait in result.waits]
        print_json({"run_id": result.run_id, "status": "waiting", "waits": waits}, indent=None)
    else:
        print_waits(result.run_id, result.waits, with_data=False)


def print_checked(found: Sequence[Checked], *, as_json: bool) -> None:
    """Which runs the code can take up, and below each other one what differs."""
    if as_json:
        print_json([asdict(each) for each in found])
        return
    rows = [(each.run_id, each.status, f"{each.kind} {each.workflow}", _verdict(each)) for each in found]
    if rows:
        table(("RUN", "STATUS", "WORKFLOW", "GOES ON"), rows)
    for each in found:
        if each.differences:
            line()
            line(f"{each.run_id}:")
        for difference in each.differences:
            line(f"  {difference}")
    resumable = sum(each.resumable for each in found)
    line()
    line(f"{resumable} of {len(found)} can be taken up by this code")


def print_report(report: Mapping[str, Any], *, as_json: bool) -> None:
    """What `doctor` found."""
    if as_json:
        print_json(report)
        return
    for name, value in report.items():
        shown = ", ".join(f"{key} {count}" for key, count in value.items()) if isinstance(value, dict) else value
        if isinstance(value, list):
            shown = "; ".join(str(each) for each in value) or "none"
        line(f"{name.replace('_', ' '):<16} {shown if shown != '' else 'none'}")


def _verdict(checked: Checked) -> str:
    return "yes" if checked.resumable else "no"


def _run_data(run: RunInfo, *, with_data: bool) -> dict[str, Any]:
    data = {name: getattr(run, name) for name in RunInfo.__slots__ if name not in ("steps", "error", "state", "waits")}
    data["error"] = _error_data(run.error)
    data["state"] = run.state if with_data else None
    data["steps"] = [
        {
            **{name: getattr(step, name) for name in StepInfo.__slots__ if name not in ("output", "error")},
            "error": _error_data(step.error),
            "output": step.output if with_data else None,
        }
        for step in run.steps
    ]
    data["waits"] = [_wait_data(run.run_id, wait, with_data=with_data) for wait in _open_waits(run)]
    data["next"] = next_command(run)
    return data


def _open_waits(run: RunInfo) -> Sequence[OpenWait]:
    """What somebody may still answer: a closed run takes no answers."""
    return () if run.status in CLOSED else run.waits


def _wait_data(run_id: str, wait: OpenWait, *, with_data: bool) -> dict[str, Any]:
    shown = {"shown": wait.shown} if with_data else {"shown": None}
    return {**asdict(wait), **shown, "answer": answer_command(run_id, wait)}


def _wait_text(wait: OpenWait) -> str:
    until = "" if wait.due_at is None else f" until {_utc(wait.due_at)}"
    match wait.kind:
        case WaitKind.SIGNAL:
            return f"signal {wait.name}{until}"
        case WaitKind.APPROVAL:
            return f"approval{until}"
        case WaitKind.CHILD:
            return f"run {wait.name}"
        case WaitKind.TIMER:
            return f"time{until}"


def _error_data(error: DittoError | None) -> dict[str, Any] | None:
    if error is None:
        return None
    return {"code": error.code, "message": error.message, "retryable": error.retryable, "step": error.step}


def _step_detail(step: StepInfo, with_data: bool) -> str:
    if step.error is not None:
        again = f"again at {_utc(step.due_at)}; " if step.state == "retrying" and step.due_at is not None else ""
        return f"{again}{step.error.code}: {step.error.message}"
    if step.output is None:
        return ""
    return json_text(step.output) if with_data else HIDDEN


def _utc(at: datetime) -> str:
    return at.strftime("%Y-%m-%d %H:%M:%SZ")
