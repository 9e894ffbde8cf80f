"""The verbs that make runs move: resume, retry, serve. They need the application's code."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import anyio
import typer

from ditto.cli import output
from ditto.cli.application import load_application
from ditto.cli.serving import log_to_stderr, serve_until_stopped
from ditto.cli.session import LATER, AppOption, JsonOption, RunArgument, StoreOption, errors_told, with_application
from ditto.errors import DefinitionError
from ditto.runtime import Runtime
from ditto.waits import Waiting


class OnWaitChoice(StrEnum):
    """What to do when the run waits."""

    RETURN = "return"
    BLOCK = "block"


OnWaitOption = Annotated[
    OnWaitChoice, typer.Option("--on-wait", help="When the run waits: return with exit code 75, or wait with it.")
]

_RETRIED = ("failed", "exhausted", "blocked")


def resume_run(
    run: RunArgument,
    application: AppOption,
    store: StoreOption = None,
    on_wait: OnWaitOption = OnWaitChoice.RETURN,
    as_json: JsonOption = False,
) -> None:
    """Take a run up again with the application's code, and print what it comes to."""

    async def drive(runtime: Runtime) -> None:
        await _drive(runtime, run, on_wait, as_json)

    with_application(application, store, drive)


def retry_run(
    run: RunArgument,
    application: AppOption,
    store: StoreOption = None,
    on_wait: OnWaitOption = OnWaitChoice.RETURN,
    as_json: JsonOption = False,
) -> None:
    """Take a run up that has failed, is exhausted or is blocked, where it stopped; refuse any other."""

    async def drive(runtime: Runtime) -> None:
        status = (await runtime.get(run)).status
        if status not in _RETRIED:
            raise DefinitionError(
                f"run {run} is {status}; retry is for runs that are {', '.join(_RETRIED)}. "
                "An open run goes on by: ditto resume"
            )
        await _drive(runtime, run, on_wait, as_json)

    with_application(application, store, drive)


def serve_runs(application: AppOption, store: StoreOption = None) -> None:
    """Drive what nobody drives until SIGTERM or SIGINT; then let what runs end, and close."""
    with errors_told():
        runtime = load_application(application, store)
        log_to_stderr()
        code = anyio.run(serve_until_stopped, runtime)
    raise typer.Exit(code)


async def _drive(runtime: Runtime, run: str, on_wait: OnWaitChoice, as_json: bool) -> None:
    result = await runtime.resume(run, on_wait="block" if on_wait is OnWaitChoice.BLOCK else "return")
    output.print_result(result, as_json=as_json)
    if isinstance(result, Waiting):
        raise typer.Exit(LATER)
