"""The list of field failures: complete, and every test that it names exists."""

from __future__ import annotations

import ast
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CASES = tomllib.loads((ROOT / "tests" / "cases.toml").read_text())

COUNTS = {
    "A": 9, "B": 9, "C": 8, "D": 8, "E": 8, "F": 7, "G": 7, "H": 7, "I": 9, "J": 4,
    "K": 6, "L": 8, "M": 6, "N": 4, "O": 4, "P": 4, "Q": 4, "R": 2, "S": 2,
}  # fmt: skip


@cache
def _functions(path: str) -> frozenset[str]:
    """Names of the functions at the top of a test file."""
    tree = ast.parse((ROOT / path).read_text())
    return frozenset(each.name for each in tree.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))


def test_all_cases_are_listed() -> None:
    assert Counter(case[0] for case in CASES) == COUNTS
    assert sum(COUNTS.values()) == 116


@pytest.mark.parametrize("case", CASES)
def test_a_case_names_its_tests_or_says_why_it_has_none(case: str) -> None:
    listed = CASES[case]
    assert listed["priority"] in {"P1", "P2", "P3"}
    [told] = set(listed) - {"priority"}
    assert told in {"tests", "waits", "not_applicable"}
    if told != "tests":
        assert len(listed[told]) > 20, "a reason is a sentence"
        return
    assert listed["tests"]
    for test in listed["tests"]:
        path, name = test.split("::")
        assert name in _functions(path), f"{test} does not exist"
        assert f"_{case.lower()}_" in name, f"{name} is not named after {case}"
