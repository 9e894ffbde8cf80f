"""A text that comes in pieces, which may be cut in the middle of a character's surrogate pair. Pure."""

from __future__ import annotations

import re
from typing import Final

from ditto_workers.surrogates import repair

_PAIR: Final = re.compile("[\ud800-\udbff][\udc00-\udfff]")


class GrowingText:
    """A text in pieces. Half of a surrogate pair at the end of a piece is held back until its other half comes."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._half = ""

    def __bool__(self) -> bool:
        return bool(self._pieces or self._half)

    def add(self, piece: str) -> str:
        """Adds a piece; what can be shown now, repaired."""
        if not piece:
            return ""
        text = join_pairs(self._half + piece)
        self._half = text[-1] if "\ud800" <= text[-1] <= "\udbff" else ""
        text = text.removesuffix(self._half)
        self._pieces.append(text)
        shown: str = repair(text)[0]
        return shown

    def whole(self) -> str:
        """All of it, as it came."""
        return "".join([*self._pieces, self._half])


def join_pairs(text: str) -> str:
    """The text with each surrogate pair, whose halves came apart, as the one character that it is."""
    if text.isascii():
        return text
    return _PAIR.sub(lambda pair: pair[0].encode("utf-16-le", "surrogatepass").decode("utf-16-le"), text)
