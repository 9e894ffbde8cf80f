"""Values that are given on the command line, in a file, or on standard input."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from ditto.errors import InvalidValueError


def read_json(file: Path) -> Any:
    """The JSON value in a file; `-` is standard input. Raises InvalidValueError."""
    return _parse(_read(file), str(file))


def read_json_or_text(file: Path) -> Any:
    """A whole Sample, which is a JSON object with a message; else the text in the file, JSON or not.

    The line feed at its end is no part of a text. Raises InvalidValueError for an empty file, and for one that begins
    like an object and is none: it was cut short.
    """
    text = _read(file).removesuffix("\n")
    if not text.strip():
        raise InvalidValueError(f"{file}: it is empty; put the model's answer into it")
    try:
        value = json.loads(text)
    except ValueError as error:
        if text.lstrip().startswith("{"):
            raise InvalidValueError(
                f"{file}: it begins like a JSON object, and is none ({error}); nothing was recorded"
            ) from None
        return text
    return value if isinstance(value, dict) and {"message", "finish_reason"} & value.keys() else text


def read_body(given: str) -> Any:
    """A JSON value as it is written, in `@file`, or, for `-`, on standard input. Raises InvalidValueError."""
    if given == "-" or given.startswith("@"):
        return read_json(Path(given.removeprefix("@")))
    return _parse(given, "--body")


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidValueError(f"{where}: it holds no JSON ({error})") from None


def _read(file: Path) -> str:
    try:
        return sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidValueError(f"{file}: it cannot be read ({error})") from None
