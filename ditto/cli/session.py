"""What all verbs share: their options, the runtime they ask, their exit codes.

Exit codes: 0 done, 1 failed, 2 usage or configuration, 3 rejected or cancelled, 4 a person has to look (an outcome is
unknown, the code does not fit), 75 enter again later (busy, or it waits), 130 and 143 ended by SIGINT and SIGTERM.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final

import anyio
import typer

from ditto.cli.application import load_application
from ditto.cli.terminal import line
from ditto.config import Config, load_config, load_dotenv_file
from ditto.errors import (
    ConfigError,
    DefinitionError,
    DittoError,
    EffectRejected,
    InvalidValueError,
    ReplayMismatchError,
    RunBlockedError,
    RunBusyError,
    RunCancelledError,
    RunConflictError,
    RunNotFoundError,
    RunPausedError,
    StoreBusyError,
    StoreClosedError,
    StoreForeignError,
    StoreSchemaError,
    UnknownOutcomeError,
)
from ditto.runtime import Runtime, create_ditto
from ditto.store.connection import Location, check_is_store

FAILED: Final = 1
USAGE: Final = 2
REJECTED: Final = 3
REVIEW: Final = 4
LATER: Final = 75
INTERRUPTED: Final = 128 + signal.SIGINT
TERMINATED: Final = 128 + signal.SIGTERM

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
    (UnknownOutcomeError, REVIEW),
    (RunBlockedError, REVIEW),
    (ReplayMismatchError, REVIEW),
    (RunBusyError, LATER),
    (RunPausedError, LATER),
    (StoreBusyError, LATER),
    (StoreClosedError, LATER),
)

StoreOption = Annotated[
    Path | None,
    typer.Option("--store", metavar="PATH", help="The SQLite file; else ditto.yaml's, else .ditto/ditto.db."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
DataOption = Annotated[bool, typer.Option("--data", help="Show values, too; they may be private.")]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="The run's id.")]
AppOption = Annotated[str, typer.Option("--app", metavar="MODULE:FACTORY", help="A function that returns the runtime.")]
ActorOption = Annotated[str, typer.Option("--actor", metavar="NAME", help="Who decides; recorded, not verified.")]
ReasonOption = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why; recorded.")]


def with_store(store: Path | None, work: Callable[[Runtime], Awaitable[None]]) -> None:
    """Do something with a runtime on a store that exists already: looking must not make one."""
    with errors_told():
        config = _config()
        runtime = create_ditto(config, store=Path(config.store.path if store is None else store))
        _check_store(runtime.location)
        anyio.run(_entered, runtime, work)


def with_application(application: str, store: Path | None, work: Callable[[Runtime], Awaitable[None]]) -> None:
    """The same with the application's own runtime. SIGTERM cancels the work, as Ctrl-C does: exit code 143."""
    with errors_told():
        runtime = load_application(application, store)
        _check_store(runtime.location)
        anyio.run(_entered, runtime, lambda opened: _until_terminated(work(opened)))


@contextmanager
def errors_told() -> Iterator[None]:
    """Turn an error of the tree into its message and its exit code."""
    try:
        yield
    except DittoError as error:
        line(f"ditto: {error.message}", err=True)
        sys.exit(next((code for kind, code in _EXIT_CODES if isinstance(error, kind)), FAILED))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


async def _entered(runtime: Runtime, work: Callable[[Runtime], Awaitable[None]]) -> None:
    async with runtime:
        await work(runtime)


async def _until_terminated(work: Awaitable[Any]) -> None:
    loop = asyncio.get_running_loop()
    with anyio.CancelScope() as scope:
        loop.add_signal_handler(signal.SIGTERM, scope.cancel)
        try:
            await work
        finally:
            loop.remove_signal_handler(signal.SIGTERM)
    if scope.cancelled_caught:
        raise typer.Exit(TERMINATED)


def _check_store(location: Location) -> None:
    """Refuse what is no store before it is opened: opening would lay one out."""
    if not location.path.is_file():
        raise ConfigError(f"{location.path}: there is no store; name another one with --store")
    check_is_store(location)


def _config() -> Config:
    """`ditto.yaml` in the current folder, with the `.env` beside it; the defaults if there is none."""
    file = Path("ditto.yaml")
    return load_config(file, {**load_dotenv_file(".env"), **os.environ}) if file.is_file() else Config()
