"""What pydantic complains of, in words that hold no value.

A value that fails its schema may be a credential in the wrong place, or a whole document. So ditto's messages name
the path and the rule, never what was found there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from pydantic import ValidationError

KeyPath: TypeAlias = tuple[str | int, ...]
"""The keys and indexes that lead to a value."""


def complaints(error: ValidationError) -> Iterator[tuple[KeyPath, str]]:
    """The path and the text of each complaint, in the schema's order."""
    for detail in error.errors(include_url=False, include_context=False, include_input=False):
        yield tuple(part for part in detail["loc"] if part != "[key]"), detail["msg"].removeprefix("Value error, ")


def path_text(path: KeyPath) -> str:
    """One path as text, such as `sandbox.tools[2]`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def all_complaints(error: ValidationError) -> str:
    """Every complaint in one line, without a value."""
    return "; ".join(place_text(path, text) for path, text in complaints(error))


def place_text(path: KeyPath, text: str) -> str:
    """`path: text`, or the text alone where the path is the root."""
    return f"{path_text(path)}: {text}" if path else text
