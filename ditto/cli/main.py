"""The `ditto` command: its verbs by theme. What they share, exit codes included, is in `session.py`.

Every verb that works on a store takes `--store PATH`; every verb that reads takes `--json`.
"""

from __future__ import annotations

import io
import sys

import typer

from ditto.cli import asking, deciding, driving, receipts

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Look at durable runs, take them up, decide what only a person can.",
)

app.command("runs")(asking.list_runs)
app.command("show")(asking.show_run)
app.command("events")(asking.list_events)
app.command("check")(asking.check_runs)
app.command("graph")(asking.draw_workflow)
app.command("doctor")(asking.examine_store)

app.command("resume")(driving.resume_run)
app.command("retry")(driving.retry_run)
app.command("serve")(driving.serve_runs)

app.command("send")(deciding.send_signal)
app.command("approve")(deciding.approve_step)
app.command("reject")(deciding.reject_step)
app.command("pause")(deciding.pause_run)
app.command("cancel")(deciding.cancel_run)
app.command("resolve")(deciding.resolve_step)

app.add_typer(receipts.app, name="receipt")


def main() -> None:
    """The console script."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    app()
