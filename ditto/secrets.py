"""Keeping credentials out of everything that is written or shown.

Owns the search for the configuration's credentials, in the forms in which they travel, and their replacement. What
counts as a credential is decided by `ditto.config.Config.secrets`; nothing here guesses from a prefix or a name.
Start with `Redactor`.
"""

from __future__ import annotations

import json
import logging
import re
from base64 import b64encode
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import Final
from urllib.parse import quote, quote_plus

SECRET_CHARS_MIN: Final = 8
"""A credential shorter than this is not searched for: replacing it would tear ordinary text apart."""

REDACTED: Final = "[redacted]"

_JSON_TOKEN: Final = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|-?\d[\d.eE+-]*', re.DOTALL)
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_UNICODE_ESCAPE: Final = re.compile(r"\\u([0-9a-f]{4})")
_PERCENT: Final = re.compile("%[0-9A-F]{2}")

# `safe` of the encoders in use: strict, Python's default, JavaScript's encodeURIComponent, a query as httpx writes it.
_URL_SAFE_SETS: Final = ("", "/", "!'()*~", "!$&'()*+,;=:/?@~")

# How many characters of the encoded text depend on what stands before the secret, by its offset modulo 3.
_BASE64_HEADS: Final = (0, 2, 3)


class Redactor:
    """Replaces every given secret of 8 characters or more by `[redacted]`.

    Found are the plain form, JSON escapes (also twice over), base64 (standard and URL-safe, at each of the three
    alignments, padded or not) and URL encoding (with `%20` or `+`, upper-case or lower-case digits). Longer forms are
    replaced first. Shorter secrets are left alone. Without secrets every call returns its argument. Thread-safe; its
    repr shows no secret.
    """

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        forms = {form for secret in secrets if len(secret) >= SECRET_CHARS_MIN for form in _forms(secret)}
        # A form inside the marker itself would be found again in every text that was redacted before.
        ordered = sorted((form for form in forms if form not in REDACTED), key=lambda form: (-len(form), form))
        self._forms = tuple(ordered)
        # Forms that JSON has no reason to escape: printable ASCII without quotes and backslashes.
        self._plain = all(json.dumps(form) == f'"{form}"' for form in ordered)
        self._pattern = re.compile("|".join(map(re.escape, ordered))) if ordered else None
        self._sorted = sorted(ordered)
        firsts = "".join(sorted({form[0] for form in ordered}))
        self._first = re.compile(f"[{re.escape(firsts)}]") if ordered else None

    def __repr__(self) -> str:
        return f"Redactor({'active' if self._pattern else 'no secrets'})"

    @property
    def active(self) -> bool:
        """Whether there is anything to look for."""
        return self._pattern is not None

    def redact_text(self, text: str) -> str:
        """The text, each secret in it replaced by `[redacted]`."""
        if not self._pattern:
            return text
        # Searching for each form on its own is many times faster than the pattern, and nearly every text has none.
        for form in self._forms:
            if form in text:
                return self._pattern.sub(REDACTED, text)
        return text

    def redact_beginning(self, text: str) -> tuple[str, str]:
        """What is certain of a text that may go on: its beginning, redacted, and the rest as it is, to be put before
        what follows. The rest might be the beginning of a secret; it is as short as that allows.
        """
        if not self._pattern:
            return text, ""
        certain: list[str] = []
        at = 0
        while True:
            open_at = self._open_at(text, at)
            found = self._pattern.search(text, at)
            # A form that is still open is longer than any that is complete, and would be taken in its place.
            if found is None or open_at <= found.start():
                return "".join([*certain, text[at:open_at]]), text[open_at:]
            certain += [text[at : found.start()], REDACTED]
            at = found.end()

    def _open_at(self, text: str, at: int) -> int:
        """Where, from `at` on, the first form begins that the end of the text leaves unfinished; its length if none."""
        assert self._first is not None
        for first in self._first.finditer(text, max(at, len(text) - len(self._forms[0]) + 1)):
            rest = text[first.start() :]
            next_form = bisect_right(self._sorted, rest)
            if next_form < len(self._sorted) and self._sorted[next_form].startswith(rest):
                return first.start()
        return len(text)

    def redact_json_text(self, text: str) -> str:
        """The JSON document, each secret in its strings and keys replaced; valid JSON comes back valid.

        A number that holds a secret becomes the string `"[redacted]"`. What holds no secret keeps its bytes. Text
        that is not JSON is redacted as plain text.
        """
        if not self._pattern:
            return text
        if self.redact_text(text) is text and not self._may_be_escaped(text):
            return text
        redacted = _JSON_TOKEN.sub(self._redact_token, text)
        if self.redact_text(redacted) is not redacted and not _is_json(redacted):
            return self.redact_text(redacted)
        return redacted

    def _may_be_escaped(self, text: str) -> bool:
        """Whether a secret may stand in this JSON in a form that only decoding shows."""
        if self._plain:
            return "\\u" in text or "\\/" in text
        return "\\" in text

    def _redact_token(self, match: re.Match[str]) -> str:
        token = match[0]
        if token[0] != '"':
            return token if self.redact_text(token) is token else f'"{REDACTED}"'
        if "\\" not in token:
            text = token[1:-1]  # a secret may begin or end with a quotation mark, and the token's are none of its own
            redacted = self.redact_text(text)
            return token if redacted is text else f'"{redacted}"'
        # An escape may split the secret, or the secret may begin in the middle of one: only the decoded form counts.
        try:
            decoded = json.loads(token, strict=False)
        except ValueError:
            return token
        redacted = self.redact_text(decoded)
        if redacted is decoded:
            return token
        encoded = json.dumps(redacted, ensure_ascii=False)
        return _SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", encoded)


class LogFilter(logging.Filter):
    """Redacts a log record: its message, arguments, exception, stack and added text attributes.

    Put it on handlers: a filter on a logger does not see the records of the loggers below it. The exception is
    turned into redacted text, and `exc_info` is removed, because a handler that shows local variables would show the
    secrets among them. Never drops a record. Without secrets a record is not touched.
    """

    def __init__(self, redactor: Redactor) -> None:
        super().__init__()
        self._redactor = redactor

    def filter(self, record: logging.LogRecord) -> bool:
        """True; the record is changed in place."""
        if not self._redactor.active:
            return True
        redact = self._redactor.redact_text
        try:
            message = record.getMessage()
        except Exception:  # noqa: BLE001 - arguments that do not fit: logging would print them, unredacted, to stderr
            message = f"{record.msg!r} {record.args!r}"
        record.msg, record.args = redact(message), None
        if record.exc_info:
            record.exc_text = logging.Formatter().formatException(record.exc_info)
            record.exc_info = None
        for name, value in list(vars(record).items()):
            if isinstance(value, str):
                setattr(record, name, redact(value))
        return True


def _forms(secret: str) -> Iterator[str]:
    """Every text under which the secret may appear."""
    yield secret
    ascii_json = json.dumps(secret)[1:-1]
    upper_json = _UNICODE_ESCAPE.sub(lambda found: "\\u" + found[1].upper(), ascii_json)
    for form in (ascii_json, upper_json, json.dumps(secret, ensure_ascii=False)[1:-1], repr(secret)[1:-1]):
        yield form
        yield form.replace("/", "\\/")
        # JSON as a text within JSON, as a tool call's arguments are.
        yield json.dumps(form)[1:-1]
        yield json.dumps(form, ensure_ascii=False)[1:-1]
    octets = secret.encode("utf-8", "surrogatepass")
    for offset, head in enumerate(_BASE64_HEADS):
        core = b64encode(bytes(offset) + octets).decode("ascii")[head : (offset + len(octets)) * 8 // 6]
        yield core
        yield core.replace("+", "-").replace("/", "_")
    whole = b64encode(octets).decode("ascii")
    for form in (whole, whole.rstrip("=")):
        yield form
        yield form.replace("+", "-").replace("/", "_")
    for safe in _URL_SAFE_SETS:
        for encode in (quote, quote_plus):
            form = encode(octets, safe=safe)
            yield form
            yield _PERCENT.sub(lambda found: found[0].lower(), form)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
