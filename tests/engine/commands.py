"""The `ditto` command, in this process or in one of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from ditto.cli.main import app
from tests.processes import ROOT


def python(folder: Path, *arguments: object, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=folder,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'workers'}"},
    )


def ditto(verb: str, *arguments: object, code: int = 0, stdin: str | None = None) -> Result:
    """The command in this process, on the store in the current folder."""
    store = [] if verb == "graph" else ["--store", "ditto.db"]
    result = CliRunner().invoke(app, [verb, *store, *map(str, arguments)], input=stdin)
    told = f"{result.exit_code}\n{result.stdout}\n{result.stderr}\n{result.exception!r}"
    assert result.exception is None or isinstance(result.exception, SystemExit), told
    assert result.exit_code == code, told
    if code:
        assert "Traceback" not in result.stderr
    return result


def told_json(verb: str, *arguments: object, code: int = 0) -> Any:
    """What it prints for programs."""
    return json.loads(ditto(verb, "--json", *arguments, code=code).stdout)


def command(folder: Path, *arguments: object, code: int = 0, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    done = python(folder, "-m", "ditto.cli", *arguments, stdin=stdin)
    assert done.returncode == code, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr
    return done
