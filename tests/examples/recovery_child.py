"""Entries in a process of their own, which a test kills: `python -m … DIRECTORY ACT…`, each act a JSON object.

    {"enter": "run_checkpoint", …}  one entry, with its options; prints the outcome
    {"decide": "approve"}           a decision, if the job is paused
    {"resolve": "task:prepare", "step": …, …}   a person's decision on a step, with the arguments of runtime.resolve
    {"hold": …}                     says that it waits, and waits for a line

What the world is like stands in the folder's `world.json`; the service and the model live in this process and die with
it, unless that file says where they are; their files stay. A model call that is never answered is told by a line. Ends
with 75 if the last entry was told that another process has the job, with 4 if it was told of an unknown outcome, and
with 1 if it failed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from ditto import DittoError, RunBusyError, UnknownOutcomeError
from ditto import recovery as entries
from tests.examples.recovery_domains import Setting
from tests.examples.recovery_world import JOB, Site, World

FAILED, UNKNOWN, BUSY = 1, 4, 75


async def perform(directory: Path, acts: list[dict[str, Any]]) -> int:
    setting, code = Setting.read(directory), 0
    async with setting.open(directory) as site, anyio.create_task_group() as group:
        if setting.script == "stalling" and isinstance(site, World):
            group.start_soon(tell_of_stall, site)
        for act in acts:
            code = await perform_one(site, act)
        group.cancel_scope.cancel()
    return code


async def tell_of_stall(world: World[Any, Any]) -> None:
    await world.model.wait_for(stalled=1)
    say({"stalled": world.model.count})


async def perform_one(site: Site[Any], act: dict[str, Any]) -> int:
    kind, value = next(iter(act.items()))
    options = {name: given for name, given in act.items() if name != kind}
    match kind:
        case "enter":
            return await enter(site, value, options)
        case "decide":
            if site.job.stage == "paused":
                site.store.decide(JOB, value, "Ada")
        case "resolve":
            async with site.runtime() as runtime:
                await runtime.resolve(value, actor="Ada", reason="seen by the test", **options)
        case "hold":
            say({"holds": value})
            await anyio.to_thread.run_sync(sys.stdin.readline)
        case _:
            raise ValueError(f"there is no act {kind}")
    return 0


async def enter(site: Site[Any], entry: str, options: dict[str, Any]) -> int:
    try:
        result = await site.enter(getattr(entries, entry), **options)
    except DittoError as error:
        steps = list(error.steps) if isinstance(error, UnknownOutcomeError) else []
        say({"error": error.code, "stage": site.job.stage, "run": error.run_id, "steps": steps})
        if isinstance(error, RunBusyError):
            return BUSY
        return UNKNOWN if isinstance(error, UnknownOutcomeError) else FAILED
    say({"result": result.to_json(), "stage": site.job.stage})
    return 0


def say(what: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(anyio.run(perform, Path(sys.argv[1]), [json.loads(act) for act in sys.argv[2:]]))
