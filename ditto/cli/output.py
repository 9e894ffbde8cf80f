"""What the command prints: tables for people, JSON for programs. Values are shown only when they are asked for."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import typer

from ditto.errors import DittoError, InvalidValueError
from ditto.runs import EventInfo, RunInfo, RunSummary, StepInfo

HIDDEN = "(hidden; --data shows it)"


def print_runs(runs: Sequence[RunSummary], *, as_json: bool) -> None:
    """One run a line."""
    if as_json:
        _print_json([asdict(run) for run in runs])
        return
    rows = [(run.run_id, run.status, run.workflow, _local(run.updated_at)) for run in runs]
    _print_table(("RUN", "STATUS", "WORKFLOW", "UPDATED"), rows)


def print_run(run: RunInfo, *, with_data: bool, as_json: bool) -> None:
    """A run with its steps, and the command that follows."""
    if as_json:
        _print_json(_run_data(run, with_data=with_data))
        return
    typer.echo(f"run        {run.run_id} (generation {run.generation})")
    typer.echo(f"workflow   {run.kind} {run.workflow}, version {run.version}")
    typer.echo(f"status     {run.status}")
    typer.echo(f"created    {_local(run.created_at)}, updated {_local(run.updated_at)}")
    if run.kind == "loop":
        typer.echo(f"iteration  {run.iteration}")
        if with_data:
            typer.echo(f"state      {json.dumps(run.state, ensure_ascii=False)}")
    if run.error is not None:
        typer.echo(f"error      {run.error.code}: {run.error.message}")
    rows = [
        (step.path, step.state, step.effect or "-", str(step.attempt), _step_detail(step, with_data))
        for step in run.steps
    ]
    typer.echo("")
    _print_table(("STEP", "STATE", "EFFECT", "ATTEMPT", "DETAIL"), rows)
    if advice := next_command(run):
        typer.echo(f"\nnext: {advice}")


def print_event(event: EventInfo, *, as_json: bool) -> None:
    """One line; with JSON, one object a line."""
    if as_json:
        typer.echo(json.dumps(asdict(event), default=_plain, ensure_ascii=False))
        return
    body = "" if event.body is None else json.dumps(event.body, ensure_ascii=False)
    typer.echo(f"{event.number:>6}  {_local(event.at)}  {event.kind:<20} {event.step or '':<24} {body}".rstrip())


def print_result(result: Any, *, as_json: bool) -> None:
    """What a run came to."""
    typer.echo(json.dumps(result, ensure_ascii=False, indent=None if as_json else 2))


def print_report(report: Mapping[str, Any], *, as_json: bool) -> None:
    """What `doctor` found."""
    if as_json:
        _print_json(report)
        return
    for name, value in report.items():
        shown = ", ".join(f"{key} {count}" for key, count in value.items()) if isinstance(value, dict) else value
        if isinstance(value, list):
            shown = "; ".join(str(each) for each in value) or "none"
        typer.echo(f"{name.replace('_', ' '):<16} {shown if shown != '' else 'none'}")


def next_command(run: RunInfo) -> str | None:
    """What a person does next with this run, as one line; None if there is nothing to do."""
    lost = [step for step in run.steps if step.state in ("unknown", "admitted")]
    match run.status:
        case "unknown" if lost:
            way = "--ask-again" if lost[0].effect == "infer" else "--committed FILE"
            return (
                f"run it again to ask the look-up once more, or: "
                f"ditto resolve {run.run_id} {lost[0].path} {way} --actor … --reason …"
            )
        case "interrupted":
            return f"ditto resume {run.run_id} --app module:factory"
        case "failed" | "exhausted":
            return "run it with on_finished='reopen' to take it up where it stopped"
        case _:
            return None


def read_json(file: Path) -> Any:
    """The JSON value in a file; `-` is standard input. Raises InvalidValueError."""
    text = _read(file)
    try:
        return json.loads(text)
    except ValueError as error:
        raise InvalidValueError(f"{file}: it holds no JSON ({error})") from None


def read_json_or_text(file: Path) -> Any:
    """A whole Sample, which is a JSON object with a message; else the text in the file, JSON or not."""
    text = _read(file)
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, dict) and "message" in value else text


def _read(file: Path) -> str:
    try:
        return sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidValueError(f"{file}: it cannot be read ({error})") from None


def _run_data(run: RunInfo, *, with_data: bool) -> dict[str, Any]:
    data = {name: getattr(run, name) for name in RunInfo.__slots__ if name not in ("steps", "error", "state")}
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
    data["next"] = next_command(run)
    return data


def _error_data(error: DittoError | None) -> dict[str, Any] | None:
    if error is None:
        return None
    return {"code": error.code, "message": error.message, "retryable": error.retryable, "step": error.step}


def _step_detail(step: StepInfo, with_data: bool) -> str:
    if step.error is not None:
        return f"{step.error.code}: {step.error.message}"
    if step.output is None:
        return ""
    return json.dumps(step.output, ensure_ascii=False) if with_data else HIDDEN


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, default=_plain, ensure_ascii=False, indent=2))


def _print_table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    for row in (header, *rows):
        typer.echo("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def _plain(value: Any) -> str:
    if isinstance(value, datetime):
        return value.isoformat()
    raise TypeError(f"{type(value).__name__} is no JSON")


def _local(at: datetime) -> str:
    return at.strftime("%Y-%m-%d %H:%M:%SZ")
