"""Who takes which reply: scripts, their names and files, and the built-in order script.

A script is a list of replies, of which request n takes the n-th, or a function `(request, index) -> Reply`. Owns also
`SCRIPTS`, the built-in scripts by the name the command takes; another one is added there. Does not own the position:
the record counts it (`provider_record`). Start at `take_reply`, and for the recovery examples at `order_script`.

`order_script` is a stand-in for a model and no more: it reads `label: value;` out of a text with a regular
expression, and answers the question about a checkpoint by copying from the checkpoint. It understands nothing else,
and says so with a 400.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

from ditto.errors import ConfigError
from ditto.testing.provider_replies import (
    Call,
    Failure,
    Reply,
    StreamCut,
    Text,
    ToolCalls,
    reply_from_json,
    reply_to_json,
)

ScriptFunction: TypeAlias = Callable[[dict[str, Any], int], Reply]
"""From the body of a request and its index in the script, from 0, to a reply."""

Script: TypeAlias = Sequence[Reply] | ScriptFunction


def take_reply(script: Script, request: dict[str, Any], index: int, *, repeat_last: bool) -> Reply:
    """The reply to request `index`. Past the end of a list: its last one, or a 500 that says so."""
    if callable(script):
        return script(request, index)
    if index < len(script):
        return script[index]
    if repeat_last and script:
        return script[-1]
    return Failure(
        500,
        f"the script has {len(script)} replies and this is request {index + 1}, counted in the database: add a reply,"
        " set repeat_last, or use a new database",
        code="script_exhausted",
    )


def name_script(script: Script) -> str:
    """A name that is the same after a restart, under which the position is counted."""
    if callable(script):
        named = script if hasattr(script, "__qualname__") else type(script)
        return f"{named.__module__}.{named.__qualname__}"
    text = json.dumps([reply_to_json(reply) for reply in script], sort_keys=True, default=repr)
    return f"replies:{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def load_script(path: str | Path) -> list[Reply]:
    """The replies in a JSON file that holds a list of them. ConfigError names the reply that is wrong."""
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as a script: {error}") from error
    if not isinstance(document, list):
        raise ConfigError(f"{path}: expected a JSON list of replies, got {type(document).__name__}")
    return [reply_from_json(reply, where=f"{path}: reply {at}") for at, reply in enumerate(document)]


def find_script(name: str) -> Script:
    """A built-in script by its name, or the replies of a file."""
    if name in SCRIPTS:
        return SCRIPTS[name]
    if Path(name).is_file():
        return load_script(name)
    raise ConfigError(f"script {name!r} is neither a file nor one of {', '.join(SCRIPTS)}")


def first_user_message(request: dict[str, Any]) -> str:
    """A conversation's identity: a digest of its first user message. For conversations that share one script."""
    first = next((text for role, text in _texts(request) if role == "user"), "")
    return hashlib.sha256(first.encode(errors="surrogatepass")).hexdigest()[:16]


def order_script(request: dict[str, Any], index: int) -> Reply:
    """The model of the recovery examples. Answers with JSON text:

    - the last user message holds a checkpoint (a JSON object with an `order` and a `stage`): its sku, quantity, stage;
    - it holds `label: value;` text: the fields that the JSON Schema in the request asks for (in `response_format`,
      or in a message), or sku, quantity and address if there is none;
    - it holds neither: the same two, in the messages before it, the latest first, and a checkpoint first of all.
    """
    texts = [(role, *_split_json(text)) for role, text in _texts(request)]
    texts.reverse()
    last = next((objects for role, objects, _ in texts if role == "user"), [])
    sources = [_labels(objects, prose) for wanted in _READ_FROM for role, objects, prose in texts if role == wanted]
    checkpoints = [found for _, objects, _ in texts for found in _checkpoints(objects)]
    schema = _schema(request, texts)
    if _checkpoints(last):
        return _answer_session(request, texts, _checkpoints(last)[0])
    if sources and (order := _extract(sources[0], schema)):
        return _answer(order)
    if checkpoints:
        return _answer_session(request, texts, checkpoints[0])
    for labels in sources[1:]:
        if order := _extract(labels, schema):
            return _answer(order)
    return Failure(
        400,
        "the order script found neither a checkpoint (a JSON object with an order and a stage) nor"
        f" 'label: value;' text for {', '.join(schema['properties'])}; it understands nothing else",
        code="order_script",
    )


def report_script(request: dict[str, Any], index: int) -> Reply:
    """The model of the report agent: asks once for `publish_report`, then says what was published."""
    messages = request.get("messages")
    last = messages[-1] if isinstance(messages, list) and messages else {}
    if isinstance(last, dict) and last.get("role") == "tool":
        return Text("The report on last week's tides is published.")
    report = {"title": "Tides", "text": "High water was highest on Tuesday, and lowest on Friday."}
    return ToolCalls([Call("call_publish", "publish_report", json.dumps(report))])


def truncated_report_script(request: dict[str, Any], index: int) -> Reply:
    """The same, but each answer is cut before its end."""
    return StreamCut(2, report_script(request, index))


SCRIPTS: Final[dict[str, ScriptFunction]] = {
    "order": order_script,
    "recovery": order_script,
    "report": report_script,
    "report-truncated": truncated_report_script,
}
"""The built-in scripts, by the name that `--script` takes."""

_READ_FROM: Final = ("user", "system", "developer")
_ORDER_SCHEMA: Final[dict[str, Any]] = {
    "properties": {"sku": {"type": "string"}, "quantity": {"type": "integer"}, "address": {"type": "string"}}
}
_Texts: TypeAlias = list[tuple[str, list[Any], str]]


def _texts(request: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Role and text of each message; the parts of a content in parts are joined."""
    messages = request.get("messages")
    for message in messages if isinstance(messages, list) else []:
        if isinstance(message, dict):
            content = message.get("content")
            parts = content if isinstance(content, list) else [{"text": content}]
            texts = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
            yield str(message.get("role")), "\n".join(texts)


def _split_json(text: str) -> tuple[list[Any], str]:
    """The JSON objects in a text, and the text without them."""
    decoder, objects, prose, at = json.JSONDecoder(), [], [], 0
    while (start := text.find("{", at)) >= 0:
        try:
            value, end = decoder.raw_decode(text, start)
            objects.append(value)
            prose.append(text[at:start])
        except ValueError:
            end = start + 1
            prose.append(text[at:end])
        at = end
    return objects, "".join([*prose, text[at:]])


def _inside(value: Any) -> Iterator[Any]:
    """A JSON value and everything within it, outermost first."""
    yield value
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _inside(item)


def _checkpoints(objects: list[Any]) -> list[dict[str, Any]]:
    """The objects with an order and a stage, the latest first."""
    return [
        found
        for value in reversed(objects)
        for found in _inside(value)
        if isinstance(found, dict) and isinstance(found.get("order"), dict) and isinstance(found.get("stage"), str)
    ]


def _answer_session(request: dict[str, Any], texts: _Texts, checkpoint: dict[str, Any]) -> Reply:
    known = {**checkpoint["order"], "stage": checkpoint["stage"]}
    schema = _schema(request, texts, having="stage")
    if schema is not _ORDER_SCHEMA:
        wanted = list(schema["properties"])
    else:
        wanted = ["sku", "quantity", "stage"] if "sku" in known else list(known)
    return _answer({name: known[name] for name in wanted if name in known})


def _answer(document: dict[str, Any]) -> Reply:
    return Text(json.dumps(document, ensure_ascii=False))


def _schema(request: dict[str, Any], texts: _Texts, *, having: str | None = None) -> dict[str, Any]:
    """The JSON Schema of the answer: that of `response_format`, else the latest in a message, else an order's."""
    given = [request.get("response_format"), *(value for _, objects, _ in texts for value in reversed(objects))]
    for found in (inner for value in given for inner in _inside(value)):
        properties = found.get("properties") if isinstance(found, dict) else None
        if isinstance(properties, dict) and properties and (having is None or having in properties):
            assert isinstance(found, dict)
            return found
    return _ORDER_SCHEMA


def _labels(objects: list[Any], prose: str) -> dict[tuple[str, ...], str]:
    """The `label: value` pairs, separated by semicolons or line ends, of a text and of the strings in its JSON."""
    found: dict[tuple[str, ...], str] = {}
    strings = [leaf for value in objects for leaf in _inside(value) if isinstance(leaf, str)]
    for segment in re.split(r"[;\n]", "\n".join([*strings, prose])):
        for colon in re.finditer(":", segment):
            label = re.split(r":|[.!?]\s", segment[: colon.start()])[-1]  # what follows the last colon or full stop
            value = segment[colon.end() :].strip().removesuffix(".").strip()
            if value and (words := _words(label)):
                found[words] = value
    return found


def _words(name: str) -> tuple[str, ...]:
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name)
    return tuple(word.lower() for word in re.findall(r"[^\W_]+", spaced))


def _extract(labels: dict[tuple[str, ...], str], schema: dict[str, Any]) -> dict[str, Any] | None:
    """The schema's properties from the labelled values; None if a required one is not there."""
    properties: dict[str, Any] = schema["properties"]
    order = {}
    for name, spec in properties.items():
        words = _words(name)
        named = [value for label, value in labels.items() if label == words]
        ending = [value for label, value in labels.items() if words and label[-len(words) :] == words]
        value = _typed((named or ending)[-1], spec) if named or ending else None
        if value is not None:
            order[name] = value
    required = schema.get("required", list(properties))
    return order if order and all(name in order for name in required) else None


def _typed(text: str, spec: Any) -> Any:
    """The text as the type that a property's schema names; None if it is none."""
    match _type(spec):
        case "integer":
            number = re.match(r"[-+]?\d+", text)
            return int(number.group()) if number else None
        case "number":
            number = re.match(r"[-+]?\d+(\.\d+)?", text)
            return float(number.group()) if number else None
        case "boolean":
            return {"true": True, "yes": True, "false": False, "no": False}.get(text.lower())
        case "string":
            return text
        case _:
            return None


def _type(spec: Any) -> str:
    """The first type, other than null, that a property's schema allows; a string if it names none."""
    if not isinstance(spec, dict):
        return "string"
    named = spec.get("type", [_type(choice) for choice in spec.get("anyOf", ())] or "string")
    return next((word for word in (named if isinstance(named, list) else [named]) if word != "null"), "string")
