"""The verbs that record what somebody says: send, approve, reject, pause, cancel, resolve. They drive nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ditto.cli.advice import go_on_command
from ditto.cli.reading import read_body, read_json, read_json_or_text
from ditto.cli.session import ActorOption, ReasonOption, RunArgument, StoreOption, errors_told, with_store
from ditto.cli.terminal import line
from ditto.runtime import Runtime

QuestionArgument = Annotated[
    str | None, typer.Argument(metavar="STEP", help="The approval's path; may be left out while only one is open.")
]
DigestOption = Annotated[
    str | None, typer.Option("--digest", metavar="DIGEST", help="Refuse if something else is shown by now.")
]
WhyOption = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why; recorded.")]


def send_signal(
    run: RunArgument,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The signal's name.")],
    store: StoreOption = None,
    body: Annotated[
        str, typer.Option("--body", metavar="JSON", help="Its body: JSON, @FILE, or - for standard input.")
    ] = "null",
    signal_id: Annotated[
        str | None, typer.Option("--id", metavar="SIGNAL_ID", help="Makes sending it again harmless.")
    ] = None,
    actor: Annotated[str, typer.Option("--actor", metavar="NAME", help="Who sends; recorded, not verified.")] = "",
) -> None:
    """Send a signal to an open run."""
    with errors_told():
        value = read_body(body)

    async def send(runtime: Runtime) -> None:
        if await runtime.signal(run, name, value, id=signal_id, actor=actor):
            _tell(f"sent: signal {name} to run {run}", run)
        else:
            line(f"sent before: signal {name} with the id {signal_id} to run {run}; nothing was done", err=True)

    with_store(store, send)


def approve_step(
    run: RunArgument,
    actor: ActorOption,
    step: QuestionArgument = None,
    store: StoreOption = None,
    reason: WhyOption = "",
    digest: DigestOption = None,
) -> None:
    """Say yes to an open approval."""
    _decide(run, step, store, decision="approve", actor=actor, reason=reason, digest=digest)


def reject_step(
    run: RunArgument,
    actor: ActorOption,
    step: QuestionArgument = None,
    store: StoreOption = None,
    reason: WhyOption = "",
    digest: DigestOption = None,
) -> None:
    """Say no to an open approval."""
    _decide(run, step, store, decision="reject", actor=actor, reason=reason, digest=digest)


def pause_run(run: RunArgument, actor: ActorOption, reason: ReasonOption, store: StoreOption = None) -> None:
    """Pause an open run, whoever drives it, until it is resumed."""

    async def decide(runtime: Runtime) -> None:
        await runtime.pause(run, actor=actor, reason=reason)
        line(f"recorded: pause of run {run}. What is under way is drained. Go on by: {go_on_command(run)}", err=True)

    with_store(store, decide)


def cancel_run(run: RunArgument, actor: ActorOption, reason: ReasonOption, store: StoreOption = None) -> None:
    """Cancel an open run for good, whoever drives it."""

    async def decide(runtime: Runtime) -> None:
        await runtime.cancel(run, actor=actor, reason=reason)

    with_store(store, decide)


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
    with errors_told():
        if committed is not None:
            values["committed"] = read_json(committed)
        if response is not None:
            values["response"] = read_json_or_text(response)

    async def decide(runtime: Runtime) -> None:
        await runtime.resolve(
            run, step, actor=actor, reason=reason, absent=absent, ask_again=ask_again, abandon=abandon,
            attempt=attempt, **values,
        )  # fmt: skip
        line(f"recorded: step {step} of run {run}. Run the workflow again, or: {go_on_command(run)}", err=True)

    with_store(store, decide)


def _decide(
    run: str,
    step: str | None,
    store: Path | None,
    *,
    decision: Literal["approve", "reject"],
    actor: str,
    reason: str,
    digest: str | None,
) -> None:
    async def decide(runtime: Runtime) -> None:
        await runtime.decide(run, step, decision=decision, actor=actor, reason=reason, digest=digest)
        _tell(f"recorded: {decision} by {actor}, run {run}", run)

    with_store(store, decide)


def _tell(what: str, run: str) -> None:
    line(f"{what}. Whoever serves goes on with it, or: {go_on_command(run)}", err=True)
