"""`python -m ditto.testing.crash`: records the points of any program, and kills it at one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.crash.world import World
from tests.processes import ROOT


def crash(folder: Path, *options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ditto.testing.crash", *map(str, options)]
    return subprocess.run(
        [*command, "-m", "tests.crash.once", str(folder / "ditto.db"), str(folder / "world.db")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'workers'}"},
    )


def test_it_records_every_point_in_order(tmp_path: Path) -> None:
    ended = crash(tmp_path, "--record", tmp_path / "points.txt")
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["send"] == "send x/1/send"
    points = (tmp_path / "points.txt").read_text(encoding="utf-8").splitlines()
    assert points[0] == "flow:created:before"
    assert points[-1] == "flow:completed:after"
    assert points.index("flow/send:admitted:after") < points.index("flow/send:completed:before")


@pytest.mark.parametrize("point", ["flow/send:admitted:after", "flow/flaky:admitted:before#2"])
def test_it_kills_at_the_point_and_the_next_run_goes_on(tmp_path: Path, point: str) -> None:
    killed = crash(tmp_path, "--at", point)
    assert killed.returncode == -signal.SIGKILL
    ended = crash(tmp_path, "--at", "flow/never:admitted:after")
    assert ended.returncode == 0, ended.stderr
    assert World(tmp_path / "world.db").calls()["send", "x/1/send"] == 1
