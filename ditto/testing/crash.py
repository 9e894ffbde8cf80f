"""Crash points: a process that kills itself at a named point, as no mocked exception can.

A point is named `step path:transition:before` or `…:after`: just before, and just after, the transition becomes
durable; or `…:asked`: it is decided on, and nothing of it has begun. The path begins with the workflow's name, for
example `prepare/sampled:admitted:after`; what happens to the run itself has the workflow's name alone, for example
`prepare:created:before`.

    python -m ditto.testing.crash --at prepare/sampled:admitted:after -m my.program argument…
    python -m ditto.testing.crash --record points.txt -m my.program argument…

The first kills the program with SIGKILL at that point (`#2` behind it: at the second time); the second writes down
every point that the program passes, one a line, so that a sweep can visit each; without those named `asked`, where
what is durable is the same as at `before`.
"""

from __future__ import annotations

import argparse
import os
import runpy
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from ditto.store.committer import Committer


def kill_at(point: str) -> None:
    """From now on, kill this process with SIGKILL when it comes to `point`, for the n-th time with `#n` behind it."""
    name, _, number = point.partition("#")
    left = int(number or 1)

    def probe(passed: str) -> None:
        nonlocal left
        if passed == name:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    Committer.probe = staticmethod(probe)


def record_points(file: Path) -> None:
    """From now on, append the name of every crash point that this process passes to `file`."""

    def probe(passed: str) -> None:
        if not passed.endswith(":asked"):
            with file.open("a", encoding="utf-8") as out:
                out.write(passed + "\n")

    Committer.probe = staticmethod(probe)


def watch_points(pass_point: Callable[[str], None]) -> None:
    """From now on, call `pass_point` with the name of every point, in the thread that comes to it and waits meanwhile.

    So a test holds a process at a point while another one moves. At `before`, it holds the store's write lock.
    """
    Committer.probe = staticmethod(pass_point)


def stop() -> None:
    """Neither kill, record nor watch any more."""
    Committer.probe = None


def main(arguments: list[str] | None = None) -> None:
    """The command; see the module's docstring."""
    parser = argparse.ArgumentParser(
        prog="python -m ditto.testing.crash", description="Run a module with a crash point."
    )
    wanted = parser.add_mutually_exclusive_group(required=True)
    wanted.add_argument("--at", metavar="POINT", help="kill the process at this point (POINT#2: at the second time)")
    wanted.add_argument("--record", metavar="FILE", type=Path, help="append the name of every point to FILE")
    parser.add_argument("-m", dest="module", required=True, metavar="MODULE", help="the module to run as a program")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    options = parser.parse_args(arguments)
    if options.at is not None:
        kill_at(options.at)
    else:
        record_points(options.record)
    sys.argv = [options.module, *options.arguments]
    runpy.run_module(options.module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
