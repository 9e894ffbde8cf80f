"""What the command prints: nothing in a text can do more than be read."""

from __future__ import annotations

import json
import logging
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ditto.cli.terminal import LineFormatter, json_text, plain


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain äöü 漢字 🚀", "plain äöü 漢字 🚀"),
        ("a\u3000b\u00a0c", "a\u3000b\u00a0c"),
        ("\x1b[2J", "\\x1b[2J"),
        ("a\nb\r\tc\x00", "a\\nb\\r\\tc\\x00"),
        ("\x9b31m\x7f", "\\x9b31m\\x7f"),
        ("\u202eevil\u2028", "\\u202eevil\\u2028"),
        ("\U000e0041", "\\U000e0041"),
        ("\ud800", "\\ud800"),
    ],
)
def test_what_is_not_to_be_seen_is_written_out(text: str, shown: str) -> None:
    assert plain(text) == shown


@given(st.text(st.characters()))
def test_json_is_safe_to_look_at_and_comes_back_equal(text: str) -> None:
    for indent in (None, 2):
        written = json_text({"text": [text]}, indent=indent)
        assert json.loads(written) == {"text": [text]}
        assert "\x1b" not in written
        assert len(written.split("\n")) == (1 if indent is None else 5)
        assert plain(written).replace("\\n", "\n") == written.replace("\\n", "\n")


def test_a_log_line_stays_one_line_and_a_traceback_several() -> None:
    record = logging.LogRecord("ditto", logging.INFO, "", 0, "run %s: %s", ("r", "bad\x1b[2J\nrun x: done"), None)
    record.created = 0.0
    assert LineFormatter().format(record) == "1970-01-01 00:00:00Z INFO    run r: bad\\x1b[2J\\nrun x: done"
    try:
        raise ValueError("bad\x1b[2J")
    except ValueError:
        record.exc_info = sys.exc_info()
    lines = LineFormatter().format(record).split("\n")
    assert lines[1] == "Traceback (most recent call last):"
    assert lines[-1] == "ValueError: bad\\x1b[2J"
