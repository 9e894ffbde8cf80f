"""Differences of JSON values, by path; never a value, which might be private."""

from __future__ import annotations

from typing import Any


def first_difference(recorded: Any, given: Any, path: str) -> str:
    """The path of the first difference of two values; empty for equal ones. The order of keys does not count."""
    if isinstance(recorded, dict) and isinstance(given, dict):
        for key in [*recorded, *(key for key in given if key not in recorded)]:
            if (key in recorded) != (key in given):
                return f"{path}.{key}"
            if found := first_difference(recorded[key], given[key], f"{path}.{key}"):
                return found
        return ""
    if isinstance(recorded, list) and isinstance(given, list):
        if len(recorded) != len(given):
            return f"the length of {path}"
        for index, (was, now) in enumerate(zip(recorded, given, strict=True)):
            if found := first_difference(was, now, f"{path}[{index}]"):
                return found
        return ""
    return "" if type(recorded) is type(given) and recorded == given else path
