"""What a durable step costs, in counts: `python -m benchmarks.smoke [--json]`.

Counts decide: commits, bytes bound to statements, bytes on disk. The two rates stand side by side, measured in the
same run on the same disk; only their ratio means anything.
"""

from __future__ import annotations

import argparse
import gc
import json
import sqlite3
import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio

from ditto import Config, Graph, Loop, Runtime, create_ditto
from ditto.store.statements import Statement

STEPS = 1_000
LOOP_STEPS = 1_024
PARKED = 10_000
RESULT = {"text": "x" * 1_000, "number": 1}


async def answer(input: Any) -> dict[str, Any]:
    """A step that does no I/O and returns 1 KiB."""
    return RESULT


def chain(length: int, effect: str) -> Graph:
    """A Graph of steps one behind the other."""
    graph = Graph(f"chain-{effect}")
    after: tuple[str, ...] = ()
    for number in range(length):
        graph = graph.step(f"s{number}", answer, after=after, effect=effect)
        after = (f"s{number}",)
    return graph


@contextmanager
def bytes_bound() -> Iterator[list[int]]:
    """Counts the bytes that are bound to the store's statements, one number for each statement."""
    counted: list[int] = []
    original = Statement.__call__

    def counting(self: Statement, db: sqlite3.Connection, /, **given: Any) -> sqlite3.Cursor:
        sizes = (
            len(value.encode()) if isinstance(value, str) else len(value)
            for value in given.values()
            if isinstance(value, str | bytes)
        )
        counted.append(sum(sizes) + 8 * sum(isinstance(value, int) for value in given.values()))
        return original(self, db, **given)

    Statement.__call__ = counting  # type: ignore[method-assign]
    try:
        yield counted
    finally:
        Statement.__call__ = original  # type: ignore[method-assign]


async def commits_per_step(runtime: Runtime, effect: str) -> float:
    """Commits of a chain, per step."""
    before = runtime.commits
    await runtime.run(chain(STEPS, effect), {})
    return (runtime.commits - before) / STEPS


async def commits_of_many(runtime: Runtime) -> float:
    """Commits per step of 200 runs of 10 idempotent steps at once."""
    graph = chain(10, "idempotent")
    before = runtime.commits
    async with anyio.create_task_group() as runs:
        for number in range(200):
            runs.start_soon(runtime.run, graph, {"number": number})
    return (runtime.commits - before) / 2_000


async def growth(folder: Path) -> tuple[float, float]:
    """(bytes bound late / early, bytes on disk / payload) of a Loop whose append list gains 1 KiB a step."""
    bound: list[int] = []
    per_iteration: list[int] = []

    def update(state: dict[str, Any], outputs: dict[str, Any]) -> dict[str, Any]:
        per_iteration.append(sum(bound))
        return {**state, "messages": state["messages"].add(outputs["message"])}

    async def message(input: dict[str, Any]) -> dict[str, Any]:
        return {"number": input["number"], "text": "x" * 1_000}

    loop = Loop(
        "growing",
        graph=Graph("one").step("message", message),
        bind=lambda state: {"number": len(state["messages"])},
        update=update,
        done=lambda state: len(state["messages"]) >= LOOP_STEPS,
        max_iterations=LOOP_STEPS,
        append=("messages",),
    )
    path = folder / "growth.db"
    payload = sum(len(json.dumps({"number": number, "text": "x" * 1_000})) for number in range(LOOP_STEPS))
    with bytes_bound() as counted:
        bound = counted
        async with create_ditto(
            Config.model_validate({"runtime": {"max_iterations": LOOP_STEPS}}), store=path
        ) as runtime:
            await runtime.loop(loop, {"messages": []})
    steps = [late - early for early, late in pairwise(per_iteration)]
    early, late = steps[15:31], steps[511:1023]
    return (sum(late) / len(late)) / (sum(early) / len(early)), path.stat().st_size / payload


async def parked_kib(folder: Path) -> float:
    """Memory in KiB that a new runtime takes beside each of 10,000 interrupted runs; no task stands for one."""
    path = folder / "parked.db"
    begun = anyio.Semaphore(0)

    async def wait(input: Any) -> None:
        begun.release()
        await anyio.sleep_forever()

    graph = Graph("parked").step("wait", wait)
    async with create_ditto(Config.model_validate({"runtime": {"concurrency": 1_000}}), store=path) as runtime:
        for block in range(PARKED // 1_000):
            async with anyio.create_task_group() as runs:
                for number in range(1_000):
                    runs.start_soon(_swallow, runtime, graph, f"{block}-{number}")
                for _ in range(1_000):
                    await begun.acquire()
                runs.cancel_scope.cancel()
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    async with create_ditto(store=path) as runtime:
        found = await runtime.health()
        assert found.runs == {"interrupted": PARKED}, found.runs
        gc.collect()
        used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return used / 1024 / PARKED


async def _swallow(runtime: Runtime, graph: Graph, run_id: str) -> None:
    await runtime.run(graph, {}, id=run_id)


def raw_commits_per_s(folder: Path) -> float:
    """Commits a second of a bare loop: one insert of 1 KiB and one update, with the store's own settings."""
    db = sqlite3.connect(folder / "raw.db", isolation_level=None)
    db.execute("PRAGMA journal_mode=WAL")
    db.execute("PRAGMA synchronous=FULL")
    db.execute("CREATE TABLE run (id INTEGER PRIMARY KEY, seq INTEGER NOT NULL)")
    db.execute("CREATE TABLE event (id INTEGER PRIMARY KEY, body TEXT NOT NULL)")
    db.execute("INSERT INTO run VALUES (1, 0)")
    body = json.dumps(RESULT)
    began = time.perf_counter()
    for number in range(STEPS):
        db.execute("BEGIN IMMEDIATE")
        db.execute("UPDATE run SET seq=? WHERE id=1", (number,))
        db.execute("INSERT INTO event VALUES (?,?)", (number, body))
        db.execute("COMMIT")
    rate = STEPS / (time.perf_counter() - began)
    db.close()
    return rate


async def measure(folder: Path) -> dict[str, float]:
    """All figures, by name."""
    figures: dict[str, float] = {}
    async with create_ditto(store=folder / "steps.db") as runtime:
        for effect in ("idempotent", "write", "pure"):
            figures[f"commits_per_{effect}_step"] = await commits_per_step(runtime, effect)
        figures["commits_per_step_200x10"] = await commits_of_many(runtime)
        graph = chain(STEPS, "idempotent")
        began = time.perf_counter()
        await runtime.run(graph, {})
        figures["steps_per_s"] = STEPS / (time.perf_counter() - began)
    figures["raw_commits_per_s"] = raw_commits_per_s(folder)
    figures["growth_ratio"], figures["bytes_per_payload_byte"] = await growth(folder)
    figures["parked_kib_per_run"] = await parked_kib(folder)
    return {name: round(value, 4) for name, value in figures.items()}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.smoke", description="What a durable step costs.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ditto-smoke-") as folder:
        figures = anyio.run(measure, Path(folder))
    if options.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name:28} {value:>12,.4f}")


if __name__ == "__main__":
    main()
