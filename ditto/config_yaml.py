"""The strict reading of `ditto.yaml`: text in, plain data out, and a place in the file for every complaint.

YAML turns plain words into other things: `no` into false, `3.10` into 3.1, `12:30` into 750. So every scalar is kept
as the text that was written, together with its line, and becomes a number or a truth value only where the schema asks
for one. Nothing is expanded, shared or constructed: `${`, anchors, aliases, tags, merge keys and second documents are
refused. No message echoes a value, as it might be a credential in the wrong place.

Owns the reading; the schema and its ranges are `ditto.config`. Imported by `load_config` only, so that importing ditto
does not load PyYAML. Start with `read_config`.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from types import NoneType, UnionType
from typing import Annotated, Any, Final, TypeAlias, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from ditto.complaints import KeyPath, complaints, place_text
from ditto.contracts.model import ModelRef
from ditto.errors import ConfigError

FILE_MAX_BYTES: Final = 262_144
DEPTH_MAX: Final = 32

_NULL_WORDS: Final = frozenset({"", "~", "null", "Null", "NULL"})
_JSON_NUMBER: Final = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]{1,3})?")
_YAML_1_2_NUMBER: Final = re.compile(r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?|0o[0-7]+")
_NUMBER: Final = "a number, and might write it in another way; quote it for text, or write it as JSON would (1.1, 1000)"
_YAML_READS: Final = {
    "bool": "a truth value; quote it for text, or write true or false",
    "int": _NUMBER,
    "float": _NUMBER,
    "timestamp": "a date; quote it for text",
}
_INTEGER_MAX: Final = 2**63 - 1
_VARIABLE: Final = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)")
_CREDENTIAL_TEXT: Final = re.compile(
    r"https?://[^/?#\s]*@|[a-z][a-z0-9+.-]*://[^/?#\s@]*:[^/?#\s]*@|^bearer [\w.~+/=-]{8,}$", re.IGNORECASE
)
_CREDENTIAL_KEY: Final = re.compile(
    r"(.+_)?(api_?key|secret|secret_?key|private_?key|password|passwd|credentials?|authorization)"
    r"|((access|api|auth|bearer|refresh)_?)?token"
)
_ADDRESS_KEYS: Final = frozenset({"base_url", "url", "api_base", "endpoint", "address", "host", "headers", "endpoints"})
_NO_CREDENTIALS: Final = "credentials and addresses do not belong in this file; put them in .env or the environment"
_NO_NULL: Final = 'nothing is written here; leave the key out, or quote it ("null") if it is text'


@dataclass(frozen=True, slots=True)
class Scalar:
    """One scalar as written. `plain` tells text without quotes from quoted or block text. Lines count from 1."""

    text: str
    plain: bool
    line: int
    column: int


@dataclass(frozen=True, slots=True)
class Sequence:
    """A list."""

    items: tuple[Node, ...]
    line: int
    column: int


@dataclass(frozen=True, slots=True)
class Pairs:
    """A mapping; `keys` holds where each key stands."""

    values: Mapping[str, Node]
    keys: Mapping[str, Scalar]
    line: int
    column: int


Node: TypeAlias = Scalar | Sequence | Pairs


def read_config(octets: bytes, file: str, schema: type[BaseModel]) -> tuple[dict[str, Any], Places]:
    """The file's data, ready to be validated by the schema, and the places of its values.

    Numbers, truth values, text and lists are read as the schema's fields want them. ConfigError names every problem
    that is found, one a line, each with file, line, column, key path and advice.
    """
    root = read_tree(octets, file)
    places = Places(file, root)
    if root is None:
        return {}, places
    reader = _Reader(places, schema)
    reader.check_text(root, ())
    data = reader.section(root, schema, ())
    if reader.problems:
        raise ConfigError("\n".join(reader.problems))
    return data, places


@dataclass(frozen=True, slots=True)
class Places:
    """Where the values of one file stand."""

    file: str
    root: Node | None

    def problem(self, path: KeyPath, text: str) -> str:
        """One line of an error: file, line and column of the value (or of what is nearest to it), path, text."""
        node = self._nearest(path)
        place = f"{self.file}:{node.line}:{node.column}" if node else self.file
        return f"{place}: {place_text(path, text)}"

    def explain(self, error: ValidationError) -> str:
        """Every complaint of the schema, one a line. The values are not echoed."""
        return "\n".join(self.problem(path, text) for path, text in complaints(error))

    def _nearest(self, path: KeyPath) -> Node | None:
        node = place = self.root
        for part in path:
            if isinstance(node, Pairs) and part in node.values:
                key, node = node.keys[str(part)], node.values[str(part)]
                place = node if isinstance(node, Scalar) else key
            elif isinstance(node, Sequence) and isinstance(part, int) and part < len(node.items):
                node = place = node.items[part]
            else:
                break
        return place


def read_tree(octets: bytes, file: str) -> Node | None:
    """The file's one document as it was written, or None for a file with nothing in it; ConfigError names the line."""
    if len(octets) > FILE_MAX_BYTES:
        raise ConfigError(f"{file}: the file is larger than {FILE_MAX_BYTES} bytes")
    try:
        text = octets.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = octets.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{file}:{line}: the file is not UTF-8; save it as UTF-8") from None
    try:
        return _TreeLoader(text, file).read()
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(f"{file}:{line}: there is a character that YAML does not allow") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{file}:{mark.line + 1}:{mark.column + 1}" if mark else file
        raise ConfigError(f"{place}: this is not YAML: {error.problem or error.context}") from None


class _TreeLoader(yaml.SafeLoader):
    """PyYAML's scanner and parser, and none of its constructors: the events become a tree of text."""

    def __init__(self, text: str, file: str) -> None:
        super().__init__(text)
        self._file = file

    def read(self) -> Node | None:
        self._take()  # the start of the stream
        if self.check_event(yaml.StreamEndEvent):
            return None
        self._take()  # the start of the document
        root = self._node(())
        self._take()  # the end of the document
        if not self.check_event(yaml.StreamEndEvent):
            raise self._refused(self._peek(), (), "a second document begins here; keep one in the file")
        return None if isinstance(root, Scalar) and root.plain and not root.text else root

    def _node(self, path: KeyPath) -> Node:
        event = self._take()
        if isinstance(event, yaml.AliasEvent):
            raise self._refused(event, path, "aliases (*name) are not read; write the value out")
        if event.anchor is not None:
            raise self._refused(event, path, "anchors (&name) are not read; write the value out where it is used")
        if event.tag is not None:
            raise self._refused(event, path, "tags (!name) are not read; write plain text, a number, a list or keys")
        if len(path) > DEPTH_MAX:
            raise self._refused(event, path[:2], f"this is nested deeper than {DEPTH_MAX} levels")
        line, column = event.start_mark.line + 1, event.start_mark.column + 1
        if isinstance(event, yaml.ScalarEvent):
            return Scalar(event.value, event.style is None, line, column)
        if isinstance(event, yaml.SequenceStartEvent):
            return Sequence(tuple(self._items(path)), line, column)
        return self._pairs(path, line, column)

    def _items(self, path: KeyPath) -> Iterator[Node]:
        index = 0
        while not self.check_event(yaml.SequenceEndEvent):
            yield self._node((*path, index))
            index += 1
        self._take()

    def _pairs(self, path: KeyPath, line: int, column: int) -> Pairs:
        values: dict[str, Node] = {}
        keys: dict[str, Scalar] = {}
        while not self.check_event(yaml.MappingEndEvent):
            event = self._peek()
            key = self._node(path)
            if not isinstance(key, Scalar) or not key.text:
                raise self._refused(event, path, "a key is a word")
            if "${" in key.text:
                raise self._refused(event, path, "a key holds ${…}, and nothing is expanded here; write the key out")
            if key.plain and key.text == "<<":
                raise self._refused(event, path, "merge keys (<<) are not read; write the keys out")
            if key.text in keys:
                first = keys[key.text].line
                raise self._refused(event, (*path, key.text), f"this key is already on line {first}; keep one of them")
            keys[key.text] = key
            values[key.text] = self._node((*path, key.text))
        self._take()
        return Pairs(values, keys, line, column)

    def _take(self) -> Any:
        return self.get_event()  # type: ignore[no-untyped-call]

    def _peek(self) -> Any:
        return self.peek_event()  # type: ignore[no-untyped-call]

    def _refused(self, event: Any, path: KeyPath, text: str) -> ConfigError:
        mark = event.start_mark
        return ConfigError(f"{self._file}:{mark.line + 1}:{mark.column + 1}: {place_text(path, text)}")


class _Reader:
    """Turns the tree into the data that the schema's fields want, and keeps a list of what it cannot turn."""

    def __init__(self, places: Places, schema: type[BaseModel]) -> None:
        self._problems: list[tuple[int, int, str]] = []
        self._refused: set[int] = set()
        self._places = places
        self._schema = schema

    @property
    def problems(self) -> list[str]:
        """Every complaint, in the order of the file."""
        return [text for _, _, text in sorted(self._problems)]

    def check_text(self, node: Node, path: KeyPath) -> None:
        """Refuses what no value anywhere may hold."""
        if isinstance(node, Pairs):
            for key, value in node.values.items():
                self.check_text(value, (*path, key))
        elif isinstance(node, Sequence):
            for index, item in enumerate(node.items):
                self.check_text(item, (*path, index))
        elif "${" in node.text:
            found = _VARIABLE.search(node.text)
            name = f" (the variable {found[1]})" if found else ""
            self._refuse(
                node,
                path,
                f"this holds ${{…}}{name}, and nothing is expanded here; write the value out. Credentials and "
                "addresses are read from the environment, under names of their own",
            )
        elif _CREDENTIAL_TEXT.search(node.text):
            self._refuse(node, path, _NO_CREDENTIALS)

    def section(self, node: Node, schema: type[BaseModel], path: KeyPath) -> dict[str, Any]:
        """The keys of one section that its schema knows."""
        data: dict[str, Any] = {}
        for key, value in self._pairs(node, path):
            field = schema.model_fields.get(key.text)
            if field is None or field.exclude:
                self._unknown(key, schema, (*path, key.text))
            else:
                data[key.text] = self._value(value, field.annotation, (*path, key.text))
        return data

    def _pairs(self, node: Node, path: KeyPath) -> Iterator[tuple[Scalar, Node]]:
        if isinstance(node, Pairs):
            yield from ((node.keys[key], value) for key, value in node.values.items())
        elif not _is_nothing(node):
            self._refuse(node, path, "this is a section; write its keys below it, one a line")

    def _value(self, node: Node, annotation: Any, path: KeyPath) -> Any:
        wanted, optional = unwrapped(annotation)
        if wanted is int or wanted is float:
            return self._number(node, wanted, optional, path)
        if wanted is bool:
            return self._bool(node, path)
        if wanted is Any:
            return self._json(node, path)
        if is_section(wanted):
            return self.section(node, wanted, path)
        if get_origin(wanted) is tuple:
            return self._list(node, get_args(wanted)[0], path)
        if is_mapping(wanted):
            item = get_args(wanted)[1]
            return {key.text: self._value(value, item, (*path, key.text)) for key, value in self._pairs(node, path)}
        return self._text(node, path)

    def _text(self, node: Node, path: KeyPath) -> str:
        if not isinstance(node, Scalar):
            self._refuse(node, path, "this is text; a list or keys were written")
            return ""
        if _is_null(node):
            self._refuse(node, path, _NO_NULL)
        return node.text

    def _number(self, node: Node, wanted: type, optional: bool, path: KeyPath) -> int | float | None:
        what = "a whole number" if wanted is int else "a number"
        if not isinstance(node, Scalar):
            self._refuse(node, path, f"this is {what}; a list or keys were written")
        elif not node.plain:
            self._refuse(node, path, f"this is {what}; write it without quotes")
        elif optional and node.text == "null":
            return None
        elif _JSON_NUMBER.fullmatch(node.text) is None or len(node.text) > 64:
            self._refuse(node, path, f"this is {what}; write digits, such as 30 or 1e3, without a leading 0, _ or unit")
        elif wanted is float:
            return float(node.text)
        else:
            value = Decimal(node.text)
            if abs(value) <= _INTEGER_MAX and value == int(value):
                return int(value)
            self._refuse(node, path, "this is a whole number")
        return None

    def _bool(self, node: Node, path: KeyPath) -> bool:
        if isinstance(node, Scalar) and node.plain and node.text in ("true", "false"):
            return node.text == "true"
        self._refuse(node, path, "this is true or false, in these words and without quotes")
        return False

    def _list(self, node: Node, item: Any, path: KeyPath) -> list[Any]:
        if isinstance(node, Sequence):
            return [self._value(value, item, (*path, index)) for index, value in enumerate(node.items)]
        if not _is_nothing(node):
            self._refuse(node, path, "this is a list; write [one, two], or one item a line after a dash")
        return []

    def _json(self, node: Node, path: KeyPath) -> Any:
        """A value that no schema describes: JSON as it is written; what YAML would change is refused."""
        if isinstance(node, Sequence):
            return [self._json(value, (*path, index)) for index, value in enumerate(node.items)]
        if isinstance(node, Pairs):
            return {key: self._json(value, (*path, key)) for key, value in node.values.items()}
        if _is_credential(path[-1], node):
            self._refuse(node, path, f"{_NO_CREDENTIALS}, where a tool can read them")
        if not node.plain:
            return node.text
        if node.text in ("true", "false") or _is_exact_number(node.text):
            return json.loads(node.text)
        if _is_null(node):
            self._refuse(node, path, _NO_NULL)
        elif changed := _yaml_reads(node.text):
            self._refuse(node, path, f"YAML reads this as {changed}")
        return node.text

    def _unknown(self, key: Scalar, schema: type[BaseModel], path: KeyPath) -> None:
        name = _snake(key.text)
        if name in _ADDRESS_KEYS or _CREDENTIAL_KEY.fullmatch(name):
            provider = str(path[1]).upper() if len(path) > 2 and path[0] == "providers" else "OPENAI"
            self._refuse(key, path, f"{_NO_CREDENTIALS}, as {provider}_BASE_URL and {provider}_API_KEY")
            return
        known = [known for known, field in schema.model_fields.items() if not field.exclude]
        near = difflib.get_close_matches(name, known, n=1) or [
            word for word in known if name.replace("_", "") in word.replace("_", "")
        ]
        elsewhere = [other for other in key_paths(self._schema) if other.rpartition(".")[2] == name]
        if near:
            advice = f"did you mean {near[0]}?"
        elif elsewhere:
            advice = f"did you mean {elsewhere[0]}?"
        else:
            advice = f"known here: {', '.join(known)}"
        self._refuse(key, path, f"this key is unknown; {advice}")

    def _refuse(self, node: Node, path: KeyPath, text: str) -> None:
        if id(node) in self._refused:
            return  # one complaint about one value is enough, and the first is the most to the point
        self._refused.add(id(node))
        line, column = node.line, node.column
        self._problems.append((line, column, f"{self._places.file}:{line}:{column}: {place_text(path, text)}"))


def key_paths(schema: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """The path of every key that a file may hold; a provider's name is shown as `<name>`."""
    for name, field in schema.model_fields.items():
        if field.exclude:
            continue
        yield f"{prefix}{name}"
        wanted, _ = unwrapped(field.annotation)
        if is_mapping(wanted):
            wanted, _ = unwrapped(get_args(wanted)[1])
            name = f"{name}.<name>"
        if is_section(wanted):
            yield from key_paths(wanted, f"{prefix}{name}.")


def unwrapped(annotation: Any) -> tuple[Any, bool]:
    """A field's type without constraints and without None, and whether None was among its types."""
    optional = False
    while get_origin(annotation) in (Annotated, Union, UnionType):
        options = get_args(annotation)
        if get_origin(annotation) is not Annotated:
            optional = NoneType in options
            options = tuple(option for option in options if option is not NoneType)
        annotation = options[0]
    return annotation, optional


def is_section(wanted: Any) -> bool:
    """A model that a file writes as keys. A ModelRef is written as text."""
    return isinstance(wanted, type) and issubclass(wanted, BaseModel) and wanted is not ModelRef


def is_mapping(wanted: Any) -> bool:
    """A mapping with names of the user's choice."""
    return get_origin(wanted) is Mapping


def _is_nothing(node: Node) -> bool:
    """A section or a list with everything in it commented out."""
    return isinstance(node, Scalar) and node.plain and not node.text


def _is_null(node: Scalar) -> bool:
    return node.plain and node.text in _NULL_WORDS


def _is_credential(key: str | int, node: Scalar) -> bool:
    """A text or a number under a name that credentials go by."""
    written = not _is_null(node) and node.text not in ("", "true", "false")
    return written and isinstance(key, str) and _CREDENTIAL_KEY.fullmatch(_snake(key)) is not None


def _is_exact_number(text: str) -> bool:
    """A number that is written as Python and JSON write it: nothing is lost by reading it."""
    if _JSON_NUMBER.fullmatch(text) is None or len(text) > 32:
        return False
    number = json.loads(text)
    return json.dumps(number) == text and (isinstance(number, float) or abs(number) <= _INTEGER_MAX)


def _yaml_reads(text: str) -> str | None:
    """What a plain scalar is to YAML 1.1, or to YAML 1.2, if it is not text to both."""
    if _YAML_1_2_NUMBER.fullmatch(text):
        return _NUMBER
    resolver = yaml.resolver.Resolver()
    tag = resolver.resolve(yaml.ScalarNode, text, (True, False)).rpartition(":")[2]  # type: ignore[no-untyped-call]
    return None if tag == "str" else _YAML_READS.get(tag, "something else; quote it for text")


def _snake(key: str) -> str:
    """A key in the manner of this file: `apiKey` and `api-key` are `api_key`."""
    return re.sub(r"[^a-z0-9]+", "_", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key).lower())
