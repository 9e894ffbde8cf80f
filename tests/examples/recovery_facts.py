"""What a test leaves for the acceptance report: noted by the harness on the way, taken by `benchmarks.acceptance`."""

from __future__ import annotations

from typing import Any

_processes: list[dict[str, Any]] = []
_findings: list[dict[str, Any]] = []


def note_process(program: str, pid: int) -> dict[str, Any]:
    """A process has begun; its `exit` is added to what is returned, negative for a signal."""
    fact: dict[str, Any] = {"program": program, "pid": pid, "exit": None}
    _processes.append(fact)
    return fact


def note_finding(finding: dict[str, Any]) -> None:
    """What was found in a folder afterwards."""
    _findings.append(finding)


def take() -> dict[str, Any]:
    """All that was noted since the last time, by the test that has just ended."""
    taken = {"processes": [*_processes], "findings": [*_findings]}
    _processes.clear()
    _findings.clear()
    return taken
