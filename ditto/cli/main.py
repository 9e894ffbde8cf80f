"""The verbs of the `ditto` command.

Every verb takes `--store PATH`; every verb that reads takes `--json`. Exit codes: 0 done, 1 failed, 2 usage or
configuration, 3 rejected or cancelled, 4 an outcome is unknown, 75 enter again later, 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final

import anyio
import typer

from ditto.cli import output
from ditto.cli.application import load_application
from ditto.cli.doctor import examine
from ditto.config import Config, load_config, load_dotenv_file
from ditto.errors import (
    ConfigError,
    DefinitionError,
    DittoError,
    EffectRejected,
    InvalidValueError,
    RunBlockedError,
    RunBusyError,
    RunCancelledError,
    RunConflictError,
    RunNotFoundError,
    StoreBusyError,
    StoreClosedError,
    StoreForeignError,
    StoreSchemaError,
    UnknownOutcomeError,
)
from ditto.runtime import Runtime, create_ditto

DONE, FAILED, USAGE, REJECTED, UNKNOWN, LATER, INTERRUPTED = 0, 1, 2, 3, 4, 75, 130

_EXIT_CODES: Final[tuple[tuple[type[DittoError], int], ...]] = (
    (ConfigError, USAGE),
    (DefinitionError, USAGE),
    (InvalidValueError, USAGE),
    (RunNotFoundError, USAGE),
    (RunConflictError, USAGE),
    (StoreForeignError, USAGE),
    (StoreSchemaError, USAGE),
    (RunCancelledError, REJECTED),
    (EffectRejected, REJECTED),
    (UnknownOutcomeError, UNKNOWN),
    (RunBlockedError, UNKNOWN),
    (RunBusyError, LATER),
    (StoreBusyError, LATER),
    (StoreClosedError, LATER),
)

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__.split("\n")[0]
)

StoreOption = Annotated[
    Path | None,
    typer.Option("--store", metavar="PATH", help="The SQLite file; else ditto.yaml's, else .ditto/ditto.db."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="The run's id.")]
ActorOption = Annotated[str, typer.Option("--actor", metavar="NAME", help="Who decides; recorded, not verified.")]
ReasonOption = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why; recorded.")]


@app.command("runs")
def list_runs(
    store: StoreOption = None,
    status: Annotated[str | None, typer.Option(help="Only runs with this status.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="At most this many, newest first.")] = 50,
    as_json: JsonOption = False,
) -> None:
    """List runs, newest first."""

    async def ask(runtime: Runtime) -> None:
        output.print_runs(await runtime.runs(status=status, limit=limit), as_json=as_json)

    _with_runtime(store, ask)


@app.command("show")
def show_run(
    run: RunArgument,
    store: StoreOption = None,
    data: Annotated[bool, typer.Option("--data", help="Show values, too; they may be private.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show one run: its status, its steps, and what to do next."""

    async def ask(runtime: Runtime) -> None:
        output.print_run(await runtime.get(run), with_data=data, as_json=as_json)

    _with_runtime(store, ask)


@app.command("events")
def list_events(
    run: RunArgument,
    store: StoreOption = None,
    after: Annotated[int, typer.Option(min=0, help="Only events after this number.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Print a run's history, one event a line."""

    async def ask(runtime: Runtime) -> None:
        async for event in runtime.events(run, after):
            output.print_event(event, as_json=as_json)

    _with_runtime(store, ask)


@app.command("resume")
def resume_run(
    run: RunArgument,
    application: Annotated[
        str, typer.Option("--app", metavar="MODULE:FACTORY", help="A function that returns the runtime.")
    ],
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take a run up again with the application's code, and print what it comes to."""

    async def drive() -> None:
        runtime = load_application(application, store)
        _check_exists(runtime.location.path)
        async with runtime:
            output.print_result(await runtime.resume(run), as_json=as_json)

    _run(drive)


@app.command("cancel")
def cancel_run(run: RunArgument, actor: ActorOption, reason: ReasonOption, store: StoreOption = None) -> None:
    """Cancel an open run for good, whoever drives it."""

    async def decide(runtime: Runtime) -> None:
        await runtime.cancel(run, actor=actor, reason=reason)

    _with_runtime(store, decide)


@app.command("resolve")
def resolve_step(
    run: RunArgument,
    step: Annotated[str, typer.Argument(metavar="STEP", help="The step's path.")],
    actor: ActorOption,
    reason: ReasonOption,
    store: StoreOption = None,
    committed: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The effect was made; its result, as JSON (- reads stdin).")
    ] = None,
    response: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The model's answer, as JSON or text (- reads stdin).")
    ] = None,
    absent: Annotated[bool, typer.Option("--absent", help="The effect was not made; try again.")] = False,
    ask_again: Annotated[bool, typer.Option("--ask-again", help="Ask the model again; may be paid twice.")] = False,
    abandon: Annotated[bool, typer.Option("--abandon", help="The step has failed.")] = False,
    attempt: Annotated[
        int | None, typer.Option(min=1, help="Refuse if the step has moved on from this attempt.")
    ] = None,
) -> None:
    """Record a decision on a step whose outcome is unknown. Exactly one way out is to be given."""
    values: dict[str, Any] = {}
    with _errors_told():
        if committed is not None:
            values["committed"] = output.read_json(committed)
        if response is not None:
            values["response"] = output.read_json_or_text(response)

    async def decide(runtime: Runtime) -> None:
        await runtime.resolve(
            run, step, actor=actor, reason=reason, absent=absent, ask_again=ask_again, abandon=abandon,
            attempt=attempt, **values,
        )  # fmt: skip
        typer.echo(
            f"recorded: step {step} of run {run}. Run the workflow again, or: ditto resume {run} --app …", err=True
        )

    _with_runtime(store, decide)


@app.command("doctor")
def examine_store(store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Check the store: whether the file is sound, what is open, who drives it, what waits for a person."""

    async def ask(runtime: Runtime) -> None:
        report = await examine(runtime)
        output.print_report(report, as_json=as_json)
        if not report["sound"]:
            raise typer.Exit(FAILED)

    _with_runtime(store, ask)


def main() -> None:
    """The console script."""
    app()


def _with_runtime(store: Path | None, work: Callable[[Runtime], Awaitable[None]]) -> None:
    """Do something with a runtime on a store that exists already: looking must not make one."""

    async def opened() -> None:
        async with _existing_store(store) as runtime:
            await work(runtime)

    _run(opened)


def _existing_store(store: Path | None) -> Runtime:
    config = _config()
    path = Path(config.store.path if store is None else store)
    _check_exists(path)
    return create_ditto(config, store=path)


def _check_exists(path: Path) -> None:
    if not path.is_file():
        raise ConfigError(f"{path}: there is no store; name another one with --store")


def _config() -> Config:
    """`ditto.yaml` in the current folder, with the `.env` beside it; the defaults if there is none."""
    file = Path("ditto.yaml")
    return load_config(file, {**load_dotenv_file(".env"), **os.environ}) if file.is_file() else Config()


def _run(work: Callable[[], Awaitable[None]]) -> None:
    with _errors_told():
        anyio.run(work)


@contextmanager
def _errors_told() -> Iterator[None]:
    """Turn an error of the tree into its message and its exit code."""
    try:
        yield
    except DittoError as error:
        typer.echo(f"ditto: {error.message}", err=True)
        sys.exit(next((code for kind, code in _EXIT_CODES if isinstance(error, kind)), FAILED))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
