"""The report agent, run in every mode and killed, with its figures counted from outside."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_exercise_prints_the_table_of_figures_and_they_are_right() -> None:
    command = [sys.executable, "-m", "examples.agents.report.exercise", "--json"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    rows = json.loads(ran.stdout)
    counted = [(row["publications"], row["provider_calls"], row["complete"], row["attempts"]) for row in rows]
    assert counted == [(1, 2, True, 1), (1, 2, True, 1), (0, 1, False, 1), (1, 2, True, 2), (1, 2, True, 2)]
    assert [row["receipts"] for row in rows] == [1, 1, 0, 2, 2]
    assert all(row["receipts_equal"] and row["verified"] for row in rows)


@pytest.mark.parametrize(
    "arguments", [[], ["--directory", "x"], ["--directory", "x", "--endpoint", "u", "--model", "?"]]
)
def test_wrong_usage_is_answered(arguments: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "examples.agents.report.worker", *arguments]
    ran = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60, env={"PYTHONPATH": str(ROOT)}
    )
    assert ran.returncode == 2
    assert ran.stderr
