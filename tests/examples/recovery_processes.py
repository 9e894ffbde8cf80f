"""Programs of the tests in processes of their own, which are killed: each as by `python -m`, only sooner.

They are forked from a process that has done nothing but import the libraries, so that a sweep may start hundreds. Start
at `Process`. A test waits for what a program says, or for its end, never for time.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import runpy
import signal
import socket
import sys
from collections.abc import Iterable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, Final

from tests.examples import recovery_facts

PATIENCE_S: Final = 120
"""After this long without a word the test fails, rather than wait for ever."""

ENVIRONMENT: Final = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
"""For programs that are to find what we find."""

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "anyio._backends._asyncio",
        "ditto.testing.provider_http",
        "ditto_workers.infer.openai",
        "examples._shared.recovery_story",
        "httpcore",
        "jsonschema",
        "tests.examples.recovery_domains",
    ]
)


class Process:
    """`python -m module arguments…`. Kill it, or wait for its end: it is not left alone."""

    def __init__(self, module: str, *arguments: object) -> None:
        ours, theirs = socket.socketpair()
        ours.settimeout(PATIENCE_S)
        given = [str(argument) for argument in arguments]
        _start_server()
        self._process = _context.Process(target=_run_module, args=(theirs, module, given), daemon=True)
        self._process.start()
        theirs.close()
        self._socket, self._said = ours, ours.makefile("r", encoding="utf-8")
        self._facts = recovery_facts.note_process(module, self.pid)

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process.pid is not None
        return self._process.pid

    def line(self) -> str:
        """The next line it prints; "" when it has ended. Waits for it."""
        return self._said.readline().rstrip("\n")

    def tell(self, text: str = "") -> None:
        """Give it a line to read."""
        self._socket.sendall(f"{text}\n".encode())

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        os.kill(self.pid, signal.SIGKILL)
        code, _ = self.end()
        assert code == -signal.SIGKILL

    def end(self) -> tuple[int, list[str]]:
        """Wait until it has ended: its exit code, or the negative signal, and the lines that were not read yet."""
        lines = self._said.read().splitlines()
        self._process.join()
        self._said.close()
        self._socket.close()
        code = self._process.exitcode
        assert code is not None
        self._facts["exit"] = code
        return code, lines


def start_acts(
    directory: Path, *acts: dict[str, Any], kill_at: str | None = None, record: Path | None = None
) -> Process:
    """Begin acts of `recovery_child` in a process; killed at a crash point, or with its points written to a file."""
    module, given = "tests.examples.recovery_child", [directory, *map(json.dumps, acts)]
    if kill_at is not None:
        return Process("ditto.testing.crash", "--at", kill_at, "-m", module, *given)
    if record is not None:
        return Process("ditto.testing.crash", "--record", record, "-m", module, *given)
    return Process(module, *given)


def do_acts(directory: Path, *acts: dict[str, Any], code: int = 0) -> list[dict[str, Any]]:
    """Acts in a fresh process, to their end: what it says of each entry. `code` is how it must end."""
    ended, lines = start_acts(directory, *acts).end()
    assert ended == code, lines
    return [json.loads(line) for line in lines]


def audit_all(domain: str, folders: Iterable[Path]) -> list[dict[str, Any]]:
    """What one fresh process finds in each of the folders."""
    code, lines = Process("tests.examples.recovery_audit", domain, *folders).end()
    assert code == 0, "the audit failed"
    return [json.loads(line) for line in lines]


@functools.cache
def _start_server() -> None:
    """Start what the processes are forked from, with our path: multiprocessing would not tell it before it imports."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = ENVIRONMENT["PYTHONPATH"]
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def _run_module(talk: socket.socket, module: str, arguments: list[str]) -> None:
    """In the new process: what `python -m` does."""
    os.dup2(talk.fileno(), 0)
    os.dup2(talk.fileno(), 1)
    talk.close()
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - it is the process's own
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
