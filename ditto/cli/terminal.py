"""What reaches the terminal: lines and JSON in which no stored text can move the cursor, hide, or forge a line."""

from __future__ import annotations

import json
import logging
import time
import unicodedata
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

import typer


def plain(text: str) -> str:
    """The text with every character that is not to be seen written as an escape: `\\x1b`, `\\n`, `\\u202e`."""
    return _escape(text, lambda each: each.encode("unicode_escape", "backslashreplace").decode("ascii"))


def line(text: str = "", *, err: bool = False) -> None:
    """Print one line, and only one, whatever is in it."""
    typer.echo(plain(text), err=err)


def table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    """Print columns as wide as they need be."""
    shown = [tuple(map(plain, row)) for row in (header, *rows)]
    widths = [max(len(row[column]) for row in shown) for column in range(len(header))]
    for row in shown:
        line("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def json_text(value: Any, *, indent: int | None = None) -> str:
    """JSON with what is not to be seen escaped, so that it is safe to look at, too; times in ISO 8601."""
    text = json.dumps(value, default=_as_json, ensure_ascii=False, indent=indent)
    return "\n".join(_escape(each, lambda bad: json.dumps(bad)[1:-1]) for each in text.split("\n"))


def print_json(value: Any, *, indent: int | None = 2) -> None:
    """Print a JSON value."""
    typer.echo(json_text(value, indent=indent))


class LineFormatter(logging.Formatter):
    """Log lines in UTC whose text cannot forge another line; the lines of a traceback stay lines."""

    def __init__(self) -> None:
        self.converter = time.gmtime
        super().__init__("%(asctime)s %(levelname)-7s %(message)s", "%Y-%m-%d %H:%M:%SZ")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        record.message = plain(record.message)
        return super().formatMessage(record)

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(plain(each) for each in super().format(record).split("\n"))


def _escape(text: str, escaped: Callable[[str], str]) -> str:
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or unicodedata.category(each) == "Zs" else escaped(each) for each in text)


def _as_json(value: Any) -> str:
    if isinstance(value, datetime):
        return value.isoformat()
    raise TypeError(f"{type(value).__name__} is no JSON")
