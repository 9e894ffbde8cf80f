"""Real processes at the price of a fork: a program that has imported all it needs, has nothing open, and forks.

`python -m tests.nursery MODULE …`, where the module has `live(order)`, what a child does and comes to, and
`warm_up(folder, …)`, which has everything imported that is imported on first use, and leaves nothing open.

One JSON line in: the order, whose `at` is a crash point and whose `record` is a file for the points that are passed.
One JSON line out: {"signal": n} for a child that was killed, {"result": …} for one that came to its end, {"error": …}
for one that failed.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ditto.testing import crash
from tests.processes import ROOT


class Nursery:
    """The program, from outside."""

    def __init__(self, module: str, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.nursery", module, *arguments],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'workers'}"},
        )

    def bear(self, **order: Any) -> dict[str, Any]:
        """One child, to its end."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order, default=str) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        assert isinstance(answer, dict)
        return answer

    def close(self) -> None:
        """No more children."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


Live = Callable[[dict[str, Any]], Any]


def bear(live: Live, order: dict[str, Any]) -> dict[str, Any]:
    """Fork a child, and wait for it."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            if order.get("record"):
                crash.record_points(Path(order["record"]))
            if order.get("at"):
                crash.kill_at(order["at"])
            answer = {"result": live(order)}
        except BaseException:  # noqa: BLE001 - told to the test
            answer = {"error": traceback.format_exc()}
        with os.fdopen(writing, "w", encoding="utf-8") as out:
            out.write(json.dumps(answer))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as told:
        text = told.read()
    _, wait_status = os.waitpid(child, 0)
    if os.WIFSIGNALED(wait_status):
        return {"signal": os.WTERMSIG(wait_status)}
    answer = json.loads(text)
    assert isinstance(answer, dict)
    return answer


def main(module: str, *arguments: str) -> None:
    """Serve until the input ends."""
    program: Any = importlib.import_module(module)
    with tempfile.TemporaryDirectory() as folder:
        program.warm_up(Path(folder), *arguments)
    for thread in threading.enumerate():
        if thread is not threading.main_thread():
            thread.join()
    gc.freeze()
    for line in sys.stdin:
        sys.stdout.write(json.dumps(bear(program.live, json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
