"""Repair of lone surrogates in data from outside: half of an emoji, cut by a tool or a provider.

Such text cannot be stored, and the outcome of an effect must not be lost for it: each half becomes U+FFFD, and the
caller flags it. The program's own values are not repaired but refused, which is the engine's business.
"""

from __future__ import annotations

import re
from typing import Any, Final

_LONE: Final = re.compile("[\ud800-\udfff]")


def repair(value: Any) -> tuple[Any, bool]:
    """`value` (JSON data) with each lone surrogate in its texts and keys replaced, and whether there was one.

    Valid pairs, already joined into one character by every JSON parser, are kept. Without a lone surrogate the very
    same object comes back.
    """
    if not _has_lone(value):
        return value, False
    return _repaired(value), True


def _has_lone(value: Any) -> bool:
    if isinstance(value, str):
        return not value.isascii() and _LONE.search(value) is not None
    if isinstance(value, dict):
        return any(_has_lone(key) or _has_lone(each) for key, each in value.items())
    if isinstance(value, list | tuple):
        return any(_has_lone(each) for each in value)
    return False


def _repaired(value: Any) -> Any:
    if isinstance(value, str):
        return _LONE.sub("\ufffd", value)
    if isinstance(value, dict):
        return {_repaired(key): _repaired(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_repaired(each) for each in value)
    return value
