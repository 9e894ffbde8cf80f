"""What the eight recovery commands share: a directory, a world of its own, one entry, and one JSON object at the end.

A story is told in a fresh directory, and gone on with by `--directory` in a new process: its job, the service's ledger
and the model's record are files there, and `fixture.json` says what the world is like. Its `begin` holds for the
process that made the directory; everyone who comes later finds the world as `resume` says, by default in order. Edit
the file to make it otherwise. Start at `main`.

Exit codes: 0 the job is done, or the story has ended as it is told; 1 the job failed, or the entry did; 2 wrong usage
or configuration; 3 rejected; 4 uncertain, needs review, or a model call whose outcome is unknown; 75 enter it again
later: it is paused and was not decided, or another process has it; 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import anyio

from ditto import (
    Config,
    ConfigError,
    DittoError,
    Endpoint,
    ModelRef,
    RunBusyError,
    Runtime,
    Sandbox,
    StepError,
    UnknownOutcomeError,
    create_ditto,
    load_config,
)
from ditto.config import load_dotenv_file
from ditto.recovery import Job, RecoveryError, RecoveryInput, SessionResult, Stage
from ditto.testing.provider import ScriptedProvider, order_script
from ditto_workers import create_context_worker, create_infer_worker, create_interaction_worker
from examples._shared.tools.fulfillment_service import Faults, FulfillmentService
from examples._shared.tools.recovery_store import RecoveryStore

JOB: Final = "task"
ORDER: Final = "Fulfillment request. SKU: SKU-731; quantity: 2; delivery address: Dock-North."
INVENTORY: Final = {"SKU-731": 20}
PARENT: Final = Path(".examples-recovery")
SCRIPTED: Final = ModelRef("scripted", "order")

DONE, FAILED, USAGE, REJECTED, UNSETTLED, LATER, INTERRUPTED = 0, 1, 2, 3, 4, 75, 130

_EXIT_BY_STAGE: Final[Mapping[str, int]] = {
    Stage.QUEUED: FAILED,
    Stage.FAILED: FAILED,
    Stage.TIMED_OUT: FAILED,
    Stage.REJECTED: REJECTED,
    Stage.UNCERTAIN: UNSETTLED,
    Stage.NEEDS_REVIEW: UNSETTLED,
    Stage.PAUSED: LATER,
}

Result: TypeAlias = Job | SessionResult


# --- a story and its scene -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Act:
    """How things are for one process: what is wrong with the world, and the entry's own arguments."""

    faults: Faults = field(default_factory=Faults)
    options: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {"faults": self.faults.to_json(), "options": dict(self.options)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Act:
        return cls(Faults.from_json(value.get("faults", {})), dict(value.get("options", {})))


@dataclass(frozen=True, slots=True)
class Story:
    """One command: what it enters, in which world, and at which stage it ends as told when it is told first."""

    name: str
    enter: Callable[[Scene], Awaitable[Result]]
    ends: str
    begin: Act = Act()
    resume: Act = Act()
    requires_approval: bool = False


@dataclass(frozen=True, slots=True)
class Scene:
    """What an entry is given: one directory, the service on its ledger, a model, and what was decided."""

    directory: Path
    service_url: str
    config: Config
    options: Mapping[str, Any]
    is_first: bool

    @property
    def input(self) -> RecoveryInput:
        assert self.config.model is not None
        return RecoveryInput(id=JOB, model=self.config.model)

    def open_store(self) -> RecoveryStore:
        """The jobs of this directory. Close it."""
        return RecoveryStore(self.directory, self.service_url)

    @asynccontextmanager
    async def open_runtime(self) -> AsyncIterator[Runtime]:
        """A runtime on the jobs' own file, with the three workers and nothing allowed but what they need."""
        with closing(self.open_store()) as store:
            sandbox = Sandbox.from_config(self.config.sandbox)
            allowed = replace(
                sandbox,
                tools=(*sandbox.tools, *(tool.name for tool in store.tools)),
                network=(*sandbox.network, self.service_url),
            )
            workers = [create_context_worker(), create_infer_worker(), create_interaction_worker(tools=store.tools)]
            async with create_ditto(self.config, store=store.path, workers=workers, sandbox=allowed) as runtime:
                yield runtime


def enter_by(entry: Callable[..., Awaitable[Result]]) -> Callable[[Scene], Awaitable[Result]]:
    """A story that is one entry, with the options of its act."""

    async def enter(scene: Scene) -> Result:
        async with scene.open_runtime() as runtime:
            return await entry(runtime, scene.input, **scene.options)

    return enter


# --- the command -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Arguments:
    directory: Path | None
    decision: Literal["approve", "reject"] | None
    actor: str | None
    config: Path | None


@dataclass(frozen=True, slots=True)
class Ending:
    """What the command prints, and its exit code."""

    directory: Path
    result: Result
    checkpoint: Job
    code: int

    def to_json(self) -> dict[str, Any]:
        return {
            "directory": str(self.directory),
            "result": self.result.to_json(),
            "checkpoint": self.checkpoint.to_json(),
        }


def main(story: Story, arguments: Sequence[str] | None = None) -> int:
    """Tell the story, or go on with it; print one JSON object on standard output. Returns the exit code."""
    given = _parse_arguments(story, arguments)
    try:
        ending = anyio.run(_tell, story, given)
    except KeyboardInterrupt:
        _say("interrupted; --directory goes on with it")
        return INTERRUPTED
    except (ConfigError, RecoveryError, DecisionRefused) as error:
        _say(f"{error}")
        return USAGE
    except DittoError as error:
        _say(f"{error.code}: {error}")
        return FAILED
    print(json.dumps(ending.to_json(), ensure_ascii=False, indent=2))
    return ending.code


class DecisionRefused(Exception):
    """The decision was not recorded."""


async def _tell(story: Story, given: Arguments) -> Ending:
    is_first = given.directory is None
    directory = _make_directory(story) if given.directory is None else given.directory.resolve()
    fixture = _read_fixture(directory)
    act = Act.from_json(fixture["begin" if is_first else "resume"])
    _say(f"{story.name}: {directory}")
    service = FulfillmentService(directory / "service.sqlite", fixture["inventory"], faults=act.faults)
    async with service, _open_model(directory, given.config) as config:
        scene = Scene(directory, service.url, config, act.options, is_first)
        with closing(scene.open_store()) as store:
            if is_first:
                await store.create(JOB, fixture["requiresApproval"])
            seen = store.job(JOB).revision
            _decide(store, given)
            result, code = await _enter(story, scene, store)
            _say_events(store, seen)
            return Ending(directory, result, store.job(JOB), code)


async def _enter(story: Story, scene: Scene, store: RecoveryStore) -> tuple[Result, int]:
    """What the entry returned, or the job as an error has left it, and the exit code."""
    try:
        result = await story.enter(scene)
    except (StepError, UnknownOutcomeError, RunBusyError) as error:
        _say(f"{error.code}: {error}")
        return store.job(JOB), _exit_after(error)
    return result, _exit_of(story, scene, result)


def _exit_of(story: Story, scene: Scene, result: Result) -> int:
    if isinstance(result, SessionResult):
        return FAILED if result.answer is None else DONE
    if scene.is_first and result.stage == story.ends:
        return DONE
    return _EXIT_BY_STAGE.get(result.stage, DONE)


def _exit_after(error: DittoError) -> int:
    if isinstance(error, UnknownOutcomeError):
        return UNSETTLED
    return LATER if isinstance(error, RunBusyError) else FAILED


def _decide(store: RecoveryStore, given: Arguments) -> None:
    if given.decision is None:
        return
    try:
        store.decide(JOB, given.decision, given.actor or "")
    except DittoError as error:
        raise DecisionRefused(f"{error.code}: {error}") from None


def _parse_arguments(story: Story, arguments: Sequence[str] | None) -> Arguments:
    module = f"examples.control-flow.recovery.{story.name}"
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=f"The recovery story {story.name}.")
    parser.add_argument("--directory", type=Path, help="go on with an earlier one; without it a new one is made")
    parser.add_argument("--decision", choices=("approve", "reject"), help="decide the pause first; needs --actor")
    parser.add_argument("--actor", help="who decides; recorded, not verified")
    parser.add_argument("--config", type=Path, help="a ditto.yaml with a model to ask, instead of the scripted one")
    found = parser.parse_args(arguments)
    if (found.decision is None) != (found.actor is None) or (found.decision is not None and found.directory is None):
        parser.error("--decision, --actor and --directory belong together")
    if found.directory is not None and not (found.directory / "fixture.json").is_file():
        parser.error(f"{found.directory} was not made by a recovery command: it has no fixture.json")
    return Arguments(found.directory, found.decision, found.actor, found.config)


# --- the world -------------------------------------------------------------------------------------------------------


def _make_directory(story: Story) -> Path:
    PARENT.mkdir(mode=0o700, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix=f"{story.name}-", dir=PARENT)).resolve()
    (directory / f"{JOB}.txt").write_text(ORDER, encoding="utf-8")
    fixture = {
        "story": story.name,
        "inventory": INVENTORY,
        "requiresApproval": story.requires_approval,
        "begin": story.begin.to_json(),
        "resume": story.resume.to_json(),
    }
    (directory / "fixture.json").write_text(json.dumps(fixture, indent=2) + "\n", encoding="utf-8")
    return directory


def _read_fixture(directory: Path) -> dict[str, Any]:
    try:
        fixture: dict[str, Any] = json.loads((directory / "fixture.json").read_text(encoding="utf-8"))
        for act in ("begin", "resume"):
            Act.from_json(fixture[act])
        return {
            "inventory": dict(fixture["inventory"]),
            "requiresApproval": bool(fixture["requiresApproval"]),
            **fixture,
        }
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{directory / 'fixture.json'} cannot be used: {error!r}") from None


def _open_model(directory: Path, path: Path | None) -> AbstractAsyncContextManager[Config]:
    """A configuration with a model to ask: the one of a ditto.yaml, or the scripted provider on its record."""
    if path is None:
        return _open_scripted_model(directory)
    config = load_config(path, {**load_dotenv_file(path.parent / ".env"), **os.environ})
    if config.model is None:
        raise ConfigError(f"{path} names no model; add a line such as `model: openai/gpt-5-mini`")
    return nullcontext(config)


@asynccontextmanager
async def _open_scripted_model(directory: Path) -> AsyncIterator[Config]:
    async with ScriptedProvider(directory / "model.sqlite", order_script) as provider:
        yield Config(model=SCRIPTED, endpoints={SCRIPTED.provider: Endpoint(base_url=provider.base_url)})


def _say_events(store: RecoveryStore, after: int) -> None:
    for event in store.events(JOB):
        if event["revision"] > after:
            _say(f"  {event['revision']:>3}  {event['kind']:<10} {event['stage']}")


def _say(text: str) -> None:
    """Progress, for people: on standard error."""
    print(text, file=sys.stderr, flush=True)
