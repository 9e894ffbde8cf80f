"""All recovery cases, and a report of what each has left: `python -m benchmarks.acceptance [--config FILE]`.

The cases are the tests in `tests/examples`: real processes that are killed, real files, a real HTTP service. Their
model is the scripted one, or with `--config` that of a ditto.yaml, whose calls are counted all the same; cases that
need an answer of their own (28, a cut body) and the sweeps (22, 23) stay with the scripted one.

Prints one line a case and writes report.json to `.acceptance`, or where `--keep DIR` says: stages, model calls,
process ids, signals, ledgers. The folders stay beside it; of a sweep only those in which something did not hold.
Exit codes: 0 all cases passed, 1 one failed or was not run, 2 usage or configuration.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import sys
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import pytest

from ditto import ConfigError

ROOT: Final = Path(__file__).parents[1]
CONFIG_VARIABLE: Final = "DITTO_ACCEPTANCE_CONFIG"

CASES: Final[dict[int, str]] = {
    1: "read limit corrected",
    2: "retry exhausted",
    3: "source missing",
    4: "primary 503, backup allowed",
    5: "primary 503, backup not allowed",
    6: "no stock: no switch to the backup",
    7: "catalog slower than the deadline",
    8: "catalog inside the deadline",
    9: "killed after reserved",
    10: "killed while paused, then approved",
    11: "rejected by a person",
    12: "killed after reserved, then asked",
    13: "shipment rejected, stock restored",
    14: "release rejected",
    15: "reservation response dropped",
    16: "the same, look-up down, killed",
    17: "caller cancels a slow reservation",
    18: "look-up unavailable from the start",
    19: "completed job entered again",
    20: "cancelled before any work",
    21: "killed between the model's answer and its checkpoint",
    22: "killed at every crash point",
    23: "the same for compensation and approval",
    24: "killed while the model request is in flight",
    25: "order edited after the approval",
    26: "two processes enter at once",
    27: "another domain through all eight",
    28: "model answer invalid",
    29: "release response lost, look-up down",
    30: "no decision, and every entry on a paused job",
    31: "source edited, and other named errors",
    32: "one key, one operation",
}

_CASE: Final = re.compile(r"test_(?:case_)?(\d\d)_")


@dataclass
class Acceptance:
    """A pytest plugin: takes what each test has left when it ends."""

    tests: list[dict[str, Any]] = field(default_factory=list)
    _failed: set[str] = field(default_factory=set)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.failed or report.skipped:
            self._failed.add(item.nodeid)
        if report.when == "teardown":
            self.tests.append(self._describe(item))
        return report

    def _describe(self, item: pytest.Item) -> dict[str, Any]:
        from tests.examples import recovery_facts

        case = _CASE.match(item.name)
        taken = recovery_facts.take()
        folder = getattr(item, "funcargs", {}).get("tmp_path")
        return {
            "test": item.nodeid.rpartition("/")[2],
            "case": int(case[1]) if case else None,
            "passed": item.nodeid not in self._failed,
            "folder": None if folder is None else str(folder),
            "processes": [_describe_process(each) for each in taken["processes"]],
            "findings": [_describe_finding(each) for each in taken["findings"]],
        }

    def cases(self) -> list[dict[str, Any]]:
        """One entry for each case, in their order; a case without a test has not passed."""
        found = []
        for number, title in CASES.items():
            tests = [test for test in self.tests if test["case"] == number]
            findings = [finding for test in tests for finding in test["findings"]]
            found.append(
                {
                    "case": number,
                    "title": title,
                    "passed": bool(tests) and all(test["passed"] for test in tests),
                    "stages": sorted({finding["stage"] for test in tests for finding in test["findings"][-1:]}),
                    "calls": max((finding["calls"] for finding in findings), default=0),
                    "killed": sum(each["signal"] == "SIGKILL" for test in tests for each in test["processes"]),
                    "tests": tests,
                }
            )
        return found

    def others(self) -> list[dict[str, Any]]:
        """Tests beside the cases."""
        return [test for test in self.tests if test["case"] is None]


def _describe_process(fact: dict[str, Any]) -> dict[str, Any]:
    code = fact["exit"]
    killed_by = signal.Signals(-code).name if code is not None and code < 0 else None
    return {"program": fact["program"], "pid": fact["pid"], "exit": code, "signal": killed_by}


def _describe_finding(finding: dict[str, Any]) -> dict[str, Any]:
    job = finding["job"]
    return {
        "folder": finding["folder"],
        "stage": job["stage"],
        "stages": finding["stages"],
        "error": job["error"],
        "calls": finding["calls"],
        "ledger": finding["ledger"],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.acceptance", description="Run all recovery cases.")
    parser.add_argument("--config", type=Path, help="a ditto.yaml with a model to ask, instead of the scripted one")
    parser.add_argument("--keep", type=Path, default=ROOT / ".acceptance", help="where report and folders are kept")
    given = parser.parse_args(arguments)
    os.environ.pop(CONFIG_VARIABLE, None)
    if given.config is not None:
        os.environ[CONFIG_VARIABLE] = str(given.config.resolve())
    sys.path[:0] = [str(ROOT), str(ROOT / "workers")]
    try:
        from tests.examples.recovery_model import MODEL
    except ConfigError as error:
        print(f"acceptance: {error}", file=sys.stderr)
        return 2
    given.keep.mkdir(parents=True, exist_ok=True)
    report = _run(given.keep.resolve(), str(MODEL))
    (given.keep / "report.json").write_text(json.dumps(report, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    _print(report)
    return 0 if report["passed"] else 1


def _run(keep: Path, model: str) -> dict[str, Any]:
    began, plugin = datetime.now(UTC), Acceptance()
    files = sorted(str(path) for path in (ROOT / "tests" / "examples").glob("test_recovery_*.py"))
    # The configuration was read before pytest could prepare what it rewrites; nothing of that holds assertions of ours.
    early = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    options = [*early, "-q", "--no-header", "--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml")]
    code = pytest.main([*options, "--basetemp", str(keep / "folders"), *files], plugins=[plugin])
    cases, others = plugin.cases(), plugin.others()
    return {
        "passed": code == pytest.ExitCode.OK and all(case["passed"] for case in cases),
        "model": model,
        "began": began.isoformat(timespec="seconds"),
        "ended": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cases": cases,
        "others": others,
    }


def _print(report: dict[str, Any]) -> None:
    for case in report["cases"]:
        passed = "passed" if case["passed"] else "FAILED" if case["tests"] else "NOT RUN"
        killed = f", {case['killed']} killed" if case["killed"] else ""
        left = f"{', '.join(case['stages']) or '-'}; calls {case['calls']}{killed}"
        print(f"{case['case']:>2}  {passed:<7}  {case['title']:<52}  {left}")
    failed = [test["test"] for test in report["others"] if not test["passed"]]
    print(f"beside the cases: {len(report['others'])} tests, {len(failed)} failed", *failed)


if __name__ == "__main__":
    sys.exit(main())
