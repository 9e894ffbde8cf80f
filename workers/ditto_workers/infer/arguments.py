"""The arguments of a model's tool call: kept as the provider's text, sent back only as a JSON object.

Providers write "no arguments" as an empty text, a blank, null or nothing at all, and refuse a history for ever in
which arguments are no JSON object. So the stored text stays as it came, and the sent form is repaired.
"""

from __future__ import annotations

import json
from typing import Any


def raw_arguments(received: Any) -> str:
    """The text to keep: a text as it came, nothing for null or missing, anything else as its JSON text."""
    if received is None:
        return ""
    return received if isinstance(received, str) else json.dumps(received, ensure_ascii=False)


def sent_arguments(raw: str) -> str:
    """The text to send: `raw` itself if it is a JSON object, else `{}`."""
    try:
        is_object = isinstance(json.loads(raw, parse_constant=_refuse_constant), dict)
    except (ValueError, RecursionError):
        is_object = False
    return raw if is_object else "{}"


def _refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is not JSON")
