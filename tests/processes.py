"""Programs in processes of their own, spoken to line by line: a test waits for what they say, never for time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


class Child:
    """A Python program given as text. Its first arguments are in `sys.argv[1:]`."""

    def __init__(self, source: str, *arguments: object) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", source, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # Buffered, so that a line is written in one piece, whoever else writes to the same pipe.
            env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'workers'}", "PYTHONUNBUFFERED": ""},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def line(self) -> str:
        """The next line it prints; "" when it has ended. Waits for it."""
        return self._stdout.readline().rstrip("\n")

    def tell(self, text: str = "") -> None:
        """Give it a line to read."""
        self._stdin.write(text + "\n")
        self._stdin.flush()

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def terminate(self) -> None:
        """SIGTERM."""
        self._process.send_signal(signal.SIGTERM)

    def end(self) -> tuple[int, list[str]]:
        """Wait until it has ended: its exit code, and the lines that were not read yet."""
        self._stdin.close()
        lines = self._stdout.read().splitlines()
        return self._process.wait(), lines

    def close(self) -> None:
        """Kill it if it still runs."""
        if self._process.poll() is None:
            self.kill()
        self._stdin.close()
        self._stdout.close()
