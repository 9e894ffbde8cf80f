"""Items: a list that grows, and costs only what was added.

A Loop names the fields of its state that hold one: `Loop(append=("findings",), …)`. There the state carries an
immutable `Items` in place of a list. `items.add(x)` gives a longer one that shares its prefix, and only `x` is stored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn, overload

from ditto.errors import InvalidValueError


class Items(Sequence[Any]):
    """An immutable list of JSON values. Equal to another Items, or to a list, with equal values.

    What comes out of it is read-only: a change in place would not be stored, so it raises TypeError. To change an item,
    build a new list; a plain list in an append field is stored as a new list.
    """

    __slots__ = ("_growth", "_length")

    _growth: Growth
    _length: int

    def __init__(self, values: Iterable[Any] = ()) -> None:
        growth = Growth()
        for value in values:
            growth.append(value)
        self._growth = growth
        self._length = len(growth.values)

    @classmethod
    def over(cls, growth: Growth, length: int) -> Items:
        """The first `length` values of a growth; for the store."""
        items = cls.__new__(cls)
        items._growth = growth
        items._length = length
        return items

    def add(self, *values: Any) -> Items:
        """A longer Items: these values, then the new ones. Costs what is added. Raises InvalidValueError."""
        growth = self._growth if self._length == len(self._growth.values) else self._growth.fork(self._length)
        for value in values:
            growth.append(value)
        return Items.over(growth, len(growth.values))

    @classmethod
    def loaded(cls, values: list[Any], stored: int, ids: list[int], *, full_length: int) -> Items:
        """The list with this id, as it stands in the store; for the store."""
        growth = Growth()
        growth.values = [freeze(value) for value in values]
        growth.kept = Kept(stored, tuple(ids), full_length)
        return cls.over(growth, len(values))

    @property
    def growth(self) -> Growth:
        """What this shares with the Items it grew from; for the store."""
        return self._growth

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return self._growth.values[: self._length][index]
        position = index + self._length if index < 0 else index
        if not 0 <= position < self._length:
            raise IndexError(f"index {index} is outside of {self._length} items")
        return self._growth.values[position]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._growth.values[: self._length])

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Items):
            if other._growth is self._growth:
                return other._length == self._length
            return self[:] == other[:]
        return self[:] == other if isinstance(other, list) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Items({self[:]!r})"


class Kept(NamedTuple):
    """What the store has of a growth: the id of the newest list, the ids of its values, and how many of them the
    newest list that is stored in full has."""

    stored: int | None = None
    ids: tuple[int, ...] = ()
    full_length: int = 0


class Growth:
    """The values that Items share which grew from one another, and what the store knows of them.

    Values are only ever appended, on the event loop's thread. The committer's thread replaces `kept`, whole, once a
    longer prefix is on disk.
    """

    __slots__ = ("_texts", "kept", "values")

    def __init__(self) -> None:
        self.values: list[Any] = []
        self.kept = Kept()
        self._texts: dict[int, str] = {}

    def append(self, value: Any) -> None:
        """Put a value behind the others, in the form that it will be read in."""
        self.values.append(freeze(value, f"[{len(self.values)}]"))

    def encode(self, length: int, encode: Callable[[Any], str]) -> None:
        """Make the JSON text of each value that is not stored yet, once; then the value is what it decodes to."""
        for position in range(len(self.kept.ids), length):
            if position not in self._texts:
                text = encode(self.values[position])
                self._texts[position] = text
                self.values[position] = freeze(json.loads(text))

    def text(self, position: int) -> str:
        """The JSON text of a value that is not stored yet."""
        return self._texts[position]

    def fork(self, length: int) -> Growth:
        """Another growth, from the same first values."""
        forked = Growth()
        forked.values = self.values[:length]
        # Texts first: one that is gone by now belongs to a value that `kept` has.
        forked._texts = {position: text for position, text in self._texts.copy().items() if position < length}
        stored, ids, full_length = self.kept
        if len(ids) <= length:
            forked.kept = Kept(stored, ids, full_length)
        else:
            forked.kept = Kept(None, ids[:length], 0)
        return forked

    def mark_stored(self, kept: Kept) -> None:
        """A longer prefix is on disk."""
        before = len(self.kept.ids)
        self.kept = kept
        for position in range(before, len(kept.ids)):
            self._texts.pop(position, None)


class FrozenDict(dict[str, Any]):
    """A dict that cannot be changed. `copy()` gives one that can."""

    __slots__ = ()

    def _refuse(self, *_args: Any, **_named: Any) -> NoReturn:
        raise TypeError("this value is stored and read-only; change a copy of it")

    __setitem__ = __delitem__ = clear = pop = popitem = setdefault = update = __ior__ = _refuse

    def copy(self) -> dict[str, Any]:
        """A shallow copy that may be changed."""
        return dict(self)


class FrozenList(list[Any]):
    """A list that cannot be changed. `copy()` gives one that can."""

    __slots__ = ()

    def _refuse(self, *_args: Any, **_named: Any) -> NoReturn:
        raise TypeError("this value is stored and read-only; change a copy of it")

    __setitem__ = __delitem__ = __iadd__ = __imul__ = append = clear = extend = insert = _refuse
    pop = remove = reverse = sort = _refuse

    def copy(self) -> list[Any]:
        """A shallow copy that may be changed."""
        return list(self)


def freeze(value: Any, path: str = "") -> Any:
    """JSON data, read-only all the way down. Raises InvalidValueError for anything else, with its path."""
    if value is None or type(value) in (FrozenDict, FrozenList, str, int, float, bool):
        return value
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise InvalidValueError(
                    f"item{path} has a key of type {type(key).__name__}; keys must be text", path=path
                )
        return FrozenDict((key, freeze(each, f"{path}.{key}")) for key, each in value.items())
    if isinstance(value, list | Items):
        return FrozenList(freeze(each, f"{path}[{index}]") for index, each in enumerate(value))
    if isinstance(value, str | int | float):
        return value
    raise InvalidValueError(f"item{path} is a {type(value).__name__}, which is not storable", path=path)
