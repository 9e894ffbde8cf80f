"""Values: how data becomes bytes in the store, and comes back the same.

The stored form is compact JSON in the given order with Python's number text. What would come back changed, or not at
all, is refused with its path: NaN, lone surrogates, sets, tuples, objects, keys that are not text. Digests are SHA-256
over the stored bytes.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from ditto.errors import InvalidValueError, LimitExceededError, StoreDamagedError
from ditto.items import Items

NESTING_MAX: Final = 200
"""Lists and objects within one another. Whoever reads a value back has his own stack, and must not run out of it."""

INLINE_BYTES_MAX: Final = 512
"""A longer value is stored once, under its digest, in `ditto_values`."""

GROWING: Final = "+"
"""First character of a column that holds a value with lists that grow."""

REFERENCE: Final = "@"
"""First character of a column that holds a digest. No JSON text begins with it."""


def _list_of_items(value: Any) -> list[Any]:
    """Items outside of a field that grows are a list like any other."""
    if isinstance(value, Items):
        return value[:]
    raise TypeError(f"{type(value).__name__} is no JSON")


_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_list_of_items).encode
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Stored:
    """A value in its stored form. `column` is what a value column holds; `body` is its JSON text."""

    column: str
    body: str

    @property
    def by_reference(self) -> bool:
        """Whether the body stands in `ditto_values`."""
        return self.column[0] == REFERENCE

    @property
    def digest(self) -> bytes:
        """The digest of a value that is stored by reference."""
        return bytes.fromhex(self.column[1:])

    @property
    def hash(self) -> str:
        """SHA-256 of the stored bytes, 64 hex digits."""
        return self.column[1:] if self.by_reference else digest(self.body)

    def decode(self) -> Any:
        """The value, made anew on every call, so that no two readers share it."""
        return decode(self.body)

    def plain(self) -> Any:
        """The value, made anew."""
        return decode(self.body)


@dataclass(frozen=True, slots=True)
class Growing:
    """A value with lists that grow: an object, and the Items of some of its fields."""

    rest: Stored
    """The object, with null in the place of each list."""
    lists: dict[str, Items]

    def decode(self) -> dict[str, Any]:
        """The object made anew, with the shared, read-only Items in it."""
        value: dict[str, Any] = self.rest.decode()
        value.update(self.lists)
        return value

    def plain(self) -> dict[str, Any]:
        """The object with plain lists, for those who do not go on from it."""
        value: dict[str, Any] = self.rest.decode()
        value.update({name: items[:] for name, items in self.lists.items()})
        return value


State: TypeAlias = Stored | Growing
"""The stored form of a Loop's state, or of a Graph's input while it runs."""


def encode(value: Any, *, what: str, max_bytes: int) -> str:
    """The stored form of a value: JSON text that decodes to an equal value.

    `what` names the value in the error. Raises InvalidValueError with the path of what cannot be stored, and
    LimitExceededError above `max_bytes`.
    """
    try:
        text = _encode(value)
        size_bytes = len(text.encode())
        same = json.loads(text) == value
    except (TypeError, ValueError, RecursionError) as error:
        raise _refusal(value, what, error) from None
    if not same or (text.count("[") + text.count("{") > NESTING_MAX and _is_too_deep(value)):
        raise _refusal(value, what, None)
    if size_bytes > max_bytes:
        raise LimitExceededError(
            f"{what} takes {size_bytes} bytes; the limit is {max_bytes} (runtime.value_max_bytes). "
            "Store large data elsewhere and pass a reference"
        )
    return text


def store_text(text: str) -> Stored:
    """The stored form of JSON text: in the column if it is small, else by its digest."""
    if len(text) <= INLINE_BYTES_MAX and len(text.encode()) <= INLINE_BYTES_MAX:
        return Stored(text, text)
    return Stored(REFERENCE + digest(text), text)


def by_reference(value: Stored) -> Stored:
    """The value under its digest, however small it is: so it cannot be altered unnoticed."""
    return value if value.by_reference else Stored(REFERENCE + digest(value.body), value.body)


def digest(text: str) -> str:
    """SHA-256 of the stored bytes, 64 hex digits."""
    return hashlib.sha256(text.encode()).hexdigest()


def decode(text: str) -> Any:
    """The value of a stored JSON text. Raises StoreDamagedError if it is none."""
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise StoreDamagedError(f"a value in the store is no JSON ({error}); restore a backup") from None


def repair(text: str) -> str:
    """Text from outside with each lone surrogate replaced by U+FFFD."""
    return _SURROGATE.sub("\ufffd", text)


def _refusal(value: Any, what: str, error: Exception | None) -> InvalidValueError:
    path, reason = _find_fault(value, "") or ("", f"cannot be stored as JSON ({error or 'it would come back changed'})")
    return InvalidValueError(f"{what}{path}: {reason}", path=path)


def _is_too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(NESTING_MAX):
        level = [
            child
            for each in level
            for child in (each.values() if isinstance(each, dict) else each)
            if isinstance(child, dict | list | Items)
        ]
        if not level:
            return False
    return True


def _find_fault(value: Any, path: str, depth: int = 0) -> tuple[str, str] | None:
    """Where in a refused value the fault is, and what is wrong with it."""
    if depth >= NESTING_MAX and isinstance(value, dict | list):
        return path[:80] + "…", f"is nested more than {NESTING_MAX} deep"
    if value is None or isinstance(value, bool):
        return None
    if isinstance(value, str):
        return (path, "holds a lone surrogate, which is no Unicode text") if _SURROGATE.search(value) else None
    if isinstance(value, int):
        digits_max = sys.get_int_max_str_digits()
        return (path, "is an integer with too many digits") if digits_max and abs(value) >= 10**digits_max else None
    if isinstance(value, float):
        return (path, f"is {value}, which JSON cannot hold") if value != value or abs(value) == float("inf") else None
    if isinstance(value, dict):
        for key, each in value.items():
            if not isinstance(key, str):
                return f"{path}[{key!r}]", f"has a key of type {type(key).__name__}; keys must be text"
            found = _find_fault(key, f"{path}.<key>", depth + 1) or _find_fault(each, f"{path}.{key}", depth + 1)
            if found:
                return found
        return None
    if isinstance(value, list):
        for index, each in enumerate(value):
            found = _find_fault(each, f"{path}[{index}]", depth + 1)
            if found:
                return found
        return None
    name = type(value).__name__
    advice = "; use a list" if isinstance(value, tuple | set | frozenset) else "; return plain data"
    return path, f"is a {name}, which is not storable{advice}"
