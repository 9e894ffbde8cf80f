"""The receipt: its fields, and the one way in which it is written.

A line is the canonical JSON (RFC 8785) of all fields. The *body* is the same without `id` and `signature`: its SHA-256
is the id, and its bytes are what is signed. Every field is always there, null where there is nothing to say.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, Final, NoReturn

from ditto.errors import InvalidValueError

SCHEMA: Final = "ditto.receipt.v1"

LINE_BYTES_MAX: Final = 1024 * 1024
"""No receipt is longer; a longer line is not read to its end."""

INTEGER_MAX: Final = 2**53 - 1
"""Larger integers are not the same for every reader of JSON."""

NUMBER_MAX: Final = 2**37
"""No chain is longer: at a thousand receipts a second this takes four years."""


class Kind(StrEnum):
    """What a receipt is about."""

    TOOL = "tool"
    """An attempt of a step of class `write`."""
    MODEL = "model"
    """An attempt of a step of class `infer`."""
    DECISION = "decision"
    """What a person decided: on an approval, or on an outcome that nobody else could tell."""


class ReceiptOutcome(StrEnum):
    """What became of it, as far as the store knows."""

    ALLOW = "allow"
    """It was done, and has a value; a person approved it."""
    DENY = "deny"
    """The other side, the sandbox or a person refused it."""
    FAILED = "failed"
    """It was not done, or was done with a result that cannot be used: `reason` says which."""
    CANCELLED = "cancelled"
    """It was cut short before anything was sent."""
    UNKNOWN = "unknown"
    """It may have been done or not."""


class ReceiptError(ValueError):
    """A line is no receipt; the text says why, and shows no value of it."""


@dataclass(frozen=True, slots=True)
class Draft:
    """What a receipt says, before it has its place in the chain. Its texts are redacted already."""

    run: str
    generation: int
    step: str
    attempt: int
    key: str | None
    """The operation's key; null for an approval, which is no operation."""
    kind: Kind
    tool: str
    """The tool's name, the model's key, the approval's name; else the step's node type."""
    arguments_hash: str | None
    outcome: ReceiptOutcome
    outcome_hash: str | None
    """SHA-256 of the step's output as it is stored, or of its error where it has no output."""
    decision: str | None = None
    """What settled it, where that was not the attempt's own end."""
    reason: str | None = None
    """An error's code; in a decision, the person's words."""
    actor: str | None = None


@dataclass(frozen=True, slots=True)
class Receipt:
    """One receipt, with its place in the chain of its store."""

    schema: str
    id: str
    store: str
    number: int
    """Its place in the chain, from 1."""
    run: str
    generation: int
    step: str
    attempt: int
    key: str | None
    kind: Kind
    tool: str
    arguments_hash: str | None
    outcome: ReceiptOutcome
    outcome_hash: str | None
    decision: str | None
    reason: str | None
    actor: str | None
    at: int
    """Whole microseconds since the epoch, UTC."""
    previous: str | None
    """The id of the receipt before it; null in the first one."""
    signer: str
    """SHA-256 of the public key's 32 bytes."""
    signature: str


@dataclass(frozen=True, slots=True)
class Place:
    """Where in which chain a receipt stands, since when, and whose signature it gets."""

    store: str
    number: int
    previous: str | None
    at: int
    signer: str


def write_receipt(draft: Draft, place: Place, sign: Callable[[bytes], str]) -> tuple[str, str]:
    """The id and the line of a receipt. `sign` gets the body and returns the signature in hex."""
    said = {name: getattr(draft, name) for name in _DRAFT_FIELDS}
    body = _canonical({"schema": SCHEMA, **said, **{name: getattr(place, name) for name in _PLACE_FIELDS}})
    receipt_id = hashlib.sha256(body).hexdigest()
    line = body
    for following, part in zip((b',"key":', b',"signer":'), _seal(receipt_id, sign(body)), strict=True):
        line = line.replace(following, part + following, 1)
    return receipt_id, line.decode()


def read_receipt(line: bytes) -> tuple[Receipt, bytes]:
    """The receipt in a line, without its line feed, and its body. All is checked but the signature and the chain.

    Raises ReceiptError.
    """
    data = _read_object(line)
    if data.get("schema") != SCHEMA:
        raise ReceiptError(f"its schema is not {SCHEMA}")
    if unknown := sorted(data.keys() - _CHECKS.keys()):
        raise ReceiptError(f"it has an unknown field {unknown[0][:64]!r}")
    for name, fits in _CHECKS.items():
        if name not in data:
            raise ReceiptError(f"it has no field {name!r}")
        if not fits(data[name]):
            raise ReceiptError(f"its field {name!r} holds what no receipt has there")
    if (data["kind"] == Kind.DECISION) != (data["actor"] is not None):
        raise ReceiptError("a decision names its actor, and nothing else does")
    if _canonical(data) != line:
        raise ReceiptError("it is not written in canonical form (RFC 8785)")
    receipt = Receipt(**{**data, "kind": Kind(data["kind"]), "outcome": ReceiptOutcome(data["outcome"])})
    body = line
    for part in _seal(receipt.id, receipt.signature):
        body = body.replace(part, b"", 1)
    if hashlib.sha256(body).hexdigest() != receipt.id:
        raise ReceiptError("its id is not the hash of its body")
    return receipt, body


def _seal(receipt_id: str, signature: str) -> tuple[bytes, bytes]:
    """The two fields that a line has and its body lacks, as they stand in canonical order: before `key`, and before
    `signer`. A quote inside a text is escaped there, so no text can look like them."""
    return b',"id":"%s"' % receipt_id.encode(), b',"signature":"%s"' % signature.encode()


def hash_arguments(value: Any) -> str:
    """SHA-256 of arguments as JSON: keys in order, no spaces, numbers as Python writes them.

    Where all numbers are integers below 2**53 that is their RFC 8785 form. Raises InvalidValueError.
    """
    try:
        text = json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidValueError(f"the arguments are no JSON data ({error})") from None


def read_json_strictly(text: str) -> Any:
    """The value of a JSON text. Raises ReceiptError for what two readers may understand in two ways."""
    try:
        return json.loads(text, object_pairs_hook=_object, parse_constant=_refuse_constant)
    except RecursionError:
        raise ReceiptError("it is nested too deeply") from None
    except ReceiptError:
        raise
    except ValueError as error:
        raise ReceiptError(f"it is no JSON ({error.args[0] if error.args else error})") from None


def _read_object(line: bytes) -> dict[str, Any]:
    if len(line) > LINE_BYTES_MAX:
        raise ReceiptError(f"it is longer than {LINE_BYTES_MAX} bytes")
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError:
        raise ReceiptError("it is no UTF-8") from None
    data = read_json_strictly(text)
    if not isinstance(data, dict):
        raise ReceiptError("it is no JSON object")
    return data


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) != len(pairs):
        raise ReceiptError("it has a name twice in one object")
    return data


def _refuse_constant(word: str) -> NoReturn:
    raise ReceiptError(f"it holds {word}, which is no JSON")


def _canonical(data: Mapping[str, Any]) -> bytes:
    import rfc8785

    try:
        return rfc8785.dumps(dict(data))
    except rfc8785.CanonicalizationError as error:
        raise ReceiptError(f"it has no canonical form: {error}") from None


def _text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _hash(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


def _signature(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{128}", value) is not None


def _integer(least: int, most: int = INTEGER_MAX) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and least <= value <= most


def _or_null(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or fits(value)


def _one_of(words: type[StrEnum]) -> Callable[[Any], bool]:
    known = frozenset(word.value for word in words)
    return lambda value: isinstance(value, str) and value in known


_CHECKS: Final[dict[str, Callable[[Any], bool]]] = {
    "schema": _text,
    "id": _hash,
    "store": _text,
    "number": _integer(1, NUMBER_MAX),
    "run": _text,
    "generation": _integer(1),
    "step": _text,
    "attempt": _integer(1),
    "key": _or_null(_text),
    "kind": _one_of(Kind),
    "tool": _text,
    "arguments_hash": _or_null(_hash),
    "outcome": _one_of(ReceiptOutcome),
    "outcome_hash": _or_null(_hash),
    "decision": _or_null(_text),
    "reason": _or_null(lambda value: isinstance(value, str)),
    "actor": _or_null(_text),
    "at": _integer(0),
    "previous": _or_null(_hash),
    "signer": _hash,
    "signature": _signature,
}
_DRAFT_FIELDS: Final = tuple(each.name for each in fields(Draft))
_PLACE_FIELDS: Final = tuple(each.name for each in fields(Place))
