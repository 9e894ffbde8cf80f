"""The verbs that look: runs, show, events, check, graph, doctor. They start nothing and decide nothing."""

from __future__ import annotations

from typing import Annotated

import typer

from ditto.cli import output
from ditto.cli.application import load_workflow
from ditto.cli.doctor import examine
from ditto.cli.session import (
    FAILED,
    REVIEW,
    AppOption,
    DataOption,
    JsonOption,
    RunArgument,
    StoreOption,
    errors_told,
    with_application,
    with_store,
)
from ditto.cli.terminal import line, print_json
from ditto.drawing import to_data, to_mermaid
from ditto.errors import DefinitionError
from ditto.runtime import Runtime


def list_runs(
    store: StoreOption = None,
    status: Annotated[str | None, typer.Option(help="Only runs with this status.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="At most this many, newest first.")] = 50,
    as_json: JsonOption = False,
) -> None:
    """List runs, newest first."""

    async def ask(runtime: Runtime) -> None:
        output.print_runs(await runtime.runs(status=status, limit=limit), as_json=as_json)

    with_store(store, ask)


def show_run(
    run: RunArgument, store: StoreOption = None, data: DataOption = False, as_json: JsonOption = False
) -> None:
    """Show one run: its status, its steps, what it waits for, and what to do next."""

    async def ask(runtime: Runtime) -> None:
        output.print_run(await runtime.get(run), with_data=data, as_json=as_json)

    with_store(store, ask)


def list_events(
    run: RunArgument,
    store: StoreOption = None,
    after: Annotated[int, typer.Option(min=0, help="Only events after this number.")] = 0,
    follow: Annotated[bool, typer.Option("--follow", help="Go on until the run is closed.")] = False,
    data: DataOption = False,
    as_json: JsonOption = False,
) -> None:
    """Print a run's history, one event a line."""

    async def ask(runtime: Runtime) -> None:
        async for event in runtime.events(run, after, follow=follow):
            output.print_event(event, with_data=data, as_json=as_json)

    with_store(store, ask)


def check_runs(
    application: AppOption,
    store: StoreOption = None,
    open_runs: Annotated[bool, typer.Option("--open-runs", help="Check the runs that are open.")] = False,
    failed_runs: Annotated[bool, typer.Option("--failed-runs", help="Check failed and exhausted runs.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Say which recorded runs the application's code can take up, and what differs for the others."""

    async def ask(runtime: Runtime) -> None:
        if not open_runs and not failed_runs:
            raise DefinitionError("say what to check: --open-runs, --failed-runs, or both")
        found = await runtime.check(open_runs=open_runs, failed_runs=failed_runs)
        output.print_checked(found, as_json=as_json)
        if not all(each.resumable for each in found):
            raise typer.Exit(REVIEW)

    with_application(application, store, ask)


def draw_workflow(
    name: Annotated[str, typer.Argument(metavar="MODULE:NAME", help="A Graph, a Loop or a Flow.")],
    as_json: JsonOption = False,
) -> None:
    """Draw a workflow as Mermaid text."""
    with errors_told():
        workflow = load_workflow(name)
    if as_json:
        print_json(to_data(workflow))
        return
    for each in to_mermaid(workflow).splitlines():
        line(each)


def examine_store(store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Check the store: whether the file is sound, what is open, who drives it, what waits for a person."""

    async def ask(runtime: Runtime) -> None:
        report = await examine(runtime)
        output.print_report(report, as_json=as_json)
        if not report["sound"]:
            raise typer.Exit(FAILED)

    with_store(store, ask)
