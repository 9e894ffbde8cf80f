"""Redaction: no form of a secret is left, JSON stays JSON, and text without secrets is untouched."""

from __future__ import annotations

import base64
import io
import json
import logging
import re
from collections.abc import Callable
from urllib.parse import quote, quote_plus, urlencode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ditto.secrets import LogFilter, Redactor

SECRET = "zq-7f3-not-a-known-prefix"
ODD = "pa/ss \"w+ö\\rd~'& "

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
secrets = st.text(st.characters(exclude_categories=["Cs"]), min_size=8, max_size=24)


def forms(secret: str) -> dict[str, str]:
    octets = secret.encode()
    return {
        "plain": secret,
        "json": json.dumps(secret)[1:-1],
        "json utf-8": json.dumps(secret, ensure_ascii=False)[1:-1],
        "json upper": json.dumps(secret)[1:-1].replace("\\u00f6", "\\u00F6"),
        "base64": base64.b64encode(octets).decode(),
        "base64 unpadded": base64.b64encode(octets).decode().rstrip("="),
        "base64url": base64.urlsafe_b64encode(octets).decode(),
        "quote": quote(secret),
        "quote strict": quote(secret, safe=""),
        "quote lower": re.sub("%..", lambda found: found[0].lower(), quote(secret, safe="")),
        "quote_plus": quote_plus(secret),
        "query": urlencode({"key": secret}),
    }


@pytest.mark.parametrize("secret", [SECRET, ODD])
@pytest.mark.parametrize("form", list(forms(SECRET)))
def test_h05_every_form_is_replaced(secret: str, form: str) -> None:
    text = forms(secret)[form]
    redacted = Redactor([secret]).redact_text(f"before {text} after")
    assert redacted.startswith("before ")
    assert redacted.endswith(" after")
    assert "[redacted]" in redacted
    assert not any(found in redacted for found in forms(secret).values())


@pytest.mark.parametrize("before", ["", "a", "ab", "user:", "Bearer "])
@pytest.mark.parametrize("after", ["", "x", "yz", ":tail"])
@pytest.mark.parametrize("secret", [SECRET, "12345678", "öööö", "a?>b~~ÿÿ"])
def test_h05_base64_at_every_alignment(secret: str, before: str, after: str) -> None:
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        encoded = encode(f"{before}{secret}{after}".encode()).decode()
        redacted = Redactor([secret] if len(secret) >= 8 else [secret * 2]).redact_text(encoded)
        if len(secret) >= 8:
            assert "[redacted]" in redacted
            # What is left of the secret's own characters is less than one on each side.
            assert len(redacted.replace("[redacted]", "")) <= len(encoded) - (len(secret.encode()) * 8 - 12) // 6


def test_longest_first_and_every_occurrence() -> None:
    redactor = Redactor(["abcdefgh", "abcdefghijkl", "qrstuvwx"])
    assert (
        redactor.redact_text("abcdefghijkl abcdefgh qrstuvwx abcdefgh") == "[redacted] [redacted] [redacted] [redacted]"
    )


def test_short_secrets_are_left_and_cost_nothing() -> None:
    redactor = Redactor(["", "zq-1", "1234567"])
    text = "zq-1 1234567"
    assert not redactor.active
    assert redactor.redact_text(text) is text
    assert redactor.redact_json_text(text) is text


def let_through(redactor: Redactor, pieces: list[str]) -> tuple[list[str], str]:
    """What is let through with each piece, and what is kept back at the end."""
    shown, rest = [], ""
    for piece in pieces:
        certain, rest = redactor.redact_beginning(rest + piece)
        shown.append(certain)
    return shown, rest


@pytest.mark.parametrize("secret", [SECRET, ODD])
@pytest.mark.parametrize("form", list(forms(SECRET)))
def test_h05_a_secret_that_is_cut_anywhere_is_never_let_through(secret: str, form: str) -> None:
    text, redactor = f"before {forms(secret)[form]} after", Redactor([secret])
    for at in range(len(text) + 1):
        shown, rest = let_through(redactor, [text[:at], text[at:]])
        assert ("".join(shown), rest) == (redactor.redact_text(text), ""), at
        assert redactor.redact_text(text).startswith(shown[0])
    assert "".join(let_through(redactor, list(text))[0]) == redactor.redact_text(text)


def test_what_might_become_a_secret_is_kept_back_and_no_more() -> None:
    redactor = Redactor([SECRET])
    shown, rest = let_through(redactor, ["so zz", "q", "-7f3-n", "ever. ", SECRET[:-1], SECRET[-1]])
    assert shown == ["so z", "", "", "zq-7f3-never. ", "", "[redacted]"]
    assert rest == ""


def test_of_two_secrets_with_one_beginning_the_longer_is_waited_for() -> None:
    redactor = Redactor(["zq-7f3-not", "zq-7f3-not-here"])
    assert let_through(redactor, ["zq-7f3-not", "-her"]) == (["", ""], "zq-7f3-not-her")
    assert let_through(redactor, ["zq-7f3-not", "-her", "o"]) == (["", "", "[redacted]-hero"], "")
    assert let_through(redactor, ["zq-7f3-not", "-here"]) == (["", "[redacted]"], "")


def test_without_secrets_nothing_is_kept_back() -> None:
    assert Redactor().redact_beginning("anything") == ("anything", "")


@given(
    st.lists(st.text("ab", min_size=8, max_size=10), min_size=1, max_size=3),
    st.lists(st.text("ab", max_size=6), max_size=12),
)
def test_cuts_decide_nothing(secrets: list[str], pieces: list[str]) -> None:
    redactor, whole = Redactor(secrets), "".join(pieces)
    shown, rest = let_through(redactor, pieces)
    assert "".join(shown) + redactor.redact_text(rest) == redactor.redact_text(whole)
    assert not rest or any(form.startswith(rest) for form in redactor._forms if form != rest)


def test_redacting_twice_changes_nothing_more() -> None:
    redactor = Redactor([SECRET, "redacted", "[redacted]"])
    once = redactor.redact_text(f"{SECRET} {SECRET}")
    assert once == "[redacted] [redacted]"
    assert redactor.redact_text(once) is once


def test_the_repr_shows_no_secret() -> None:
    assert SECRET not in repr(Redactor([SECRET]))
    assert SECRET not in repr(vars(LogFilter(Redactor([SECRET]))))


@given(secret=secrets, before=texts, after=texts)
def test_no_plain_secret_survives(secret: str, before: str, after: str) -> None:
    if secret in "[redacted]":
        return
    redacted = Redactor([secret]).redact_text(before + secret + after)
    assert secret not in redacted.replace("[redacted]", "\0")


# JSON


@pytest.mark.parametrize(
    ("secret", "value", "expected"),
    [
        (SECRET, {"a": [f"x {SECRET}", 1]}, {"a": ["x [redacted]", 1]}),
        (SECRET, {SECRET: SECRET}, {"[redacted]": "[redacted]"}),
        (ODD, {"a": ODD, "b": "\n\\"}, {"a": "[redacted]", "b": "\n\\"}),
        ("12345678", {"n": 12345678, "m": 1.123456789, "s": "12345678", "k": 5}, None),
        ("nabcdefgh", ["\nabcdefgh", "nabcdefgh"], ["\nabcdefgh", "[redacted]"]),
        ("u0007abc", ["\x07abc", "u0007abc"], ["\x07abc", "[redacted]"]),
        ('","b":"cde', {"a": "x", "b": "cde"}, {"a": "x", "b": "cde"}),
        ("true,false", [True, False, "true,false"], [True, False, "[redacted]"]),
        (SECRET, [json.dumps({"k": [SECRET, '"']})], [json.dumps({"k": ["[redacted]", '"']})]),
        (SECRET, ["\ud800 ö " + SECRET], ["\ud800 ö [redacted]"]),
    ],
)
def test_json_stays_json(secret: str, value: object, expected: object) -> None:
    if expected is None:
        expected = {"n": "[redacted]", "m": "[redacted]", "s": "[redacted]", "k": 5}
    redactor = Redactor([secret])
    for text in (json.dumps(value), json.dumps(value, separators=(",", ":")), json.dumps(value, indent=1)):
        assert json.loads(redactor.redact_json_text(text)) == expected


@pytest.mark.parametrize("secret", ['abcdefg"', '"abcdefg', '"abcdef"'])
def test_the_quotation_marks_of_json_belong_to_no_secret(secret: str) -> None:
    redactor = Redactor([secret])
    for text in (secret.strip('"'), secret, f"a{secret}b"):
        stored = json.loads(redactor.redact_json_text(json.dumps({"a": text, "b": 1})))
        assert stored == {"a": redactor.redact_text(text), "b": 1}


def test_json_without_a_secret_keeps_its_bytes() -> None:
    text = '{"a": "\\u00e9\\/\\n", "b":1.10, "c":  [ ]}'
    assert Redactor([SECRET]).redact_json_text(text) == text
    touched = f'{{"a":  "\\u00e9", "b": 1.10, "c": "{SECRET}"}}'
    assert Redactor([SECRET]).redact_json_text(touched) == '{"a":  "\\u00e9", "b": 1.10, "c": "[redacted]"}'


@pytest.mark.parametrize("secret", [SECRET, ODD, 'a"b\\c\nd/e'])
@pytest.mark.parametrize("ascii", [True, False])
def test_json_within_json_hides_no_secret(secret: str, ascii: bool) -> None:  # noqa: A002
    document: object = {"key": f"<{secret}>"}
    for _ in range(3):
        document = json.dumps(document, ensure_ascii=ascii)
        redacted = Redactor([secret]).redact_json_text(document)
        assert "[redacted]" in redacted
        json.loads(redacted)


def test_json_with_needless_escapes_hides_no_secret() -> None:
    text = '["' + "".join(f"\\u{ord(c):04X}" for c in SECRET) + '"]'
    assert json.loads(Redactor([SECRET]).redact_json_text(text)) == ["[redacted]"]


@pytest.mark.parametrize(
    "text", [f"not json {SECRET}", f'{{"a": "{SECRET}', f"\\{SECRET}", f'["a" "{SECRET}", {SECRET}']
)
def test_what_is_not_json_is_redacted_as_text(text: str) -> None:
    assert SECRET not in Redactor([SECRET]).redact_json_text(text)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=12),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=12), children, max_size=4),
    max_leaves=12,
)


@given(
    value=json_values,
    secret=secrets | st.sampled_from(['":0,"1":', "\\\\\\\\\\\\\\\\", "00000000", '""""""""']),
    ascii=st.booleans(),
)
def test_json_always_stays_valid(value: object, secret: str, ascii: bool) -> None:  # noqa: A002
    document = json.dumps([value, secret, {secret: value}], ensure_ascii=ascii)
    redacted = json.loads(Redactor([secret]).redact_json_text(document))
    if secret not in "[redacted]":
        assert redacted[1] == "[redacted]"


# Logging

Log = Callable[[logging.Logger], None]


def logged(redactor: Redactor, log: Log, formatter: logging.Formatter | None = None) -> str:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.addFilter(LogFilter(redactor))
    handler.setFormatter(formatter or logging.Formatter("%(message)s %(name)s"))
    logger = logging.Logger("ditto.test")  # outside the tree, so that no other handler sees its records
    logger.addHandler(handler)
    log(logger)
    return stream.getvalue()


def failing(logger: logging.Logger) -> None:
    try:
        try:
            raise ValueError(f"refused: Authorization: Bearer {SECRET}")
        except ValueError as error:
            raise RuntimeError("call failed") from error
    except RuntimeError:
        logger.exception("it failed with %s", SECRET, stack_info=True)


@pytest.mark.parametrize(
    "log",
    [
        lambda logger: logger.info("key " + SECRET),
        lambda logger: logger.debug("key %s, header %r", 1, {"X-Team": SECRET}),
        lambda logger: logger.info("%(key)s", {"key": base64.b64encode(SECRET.encode()).decode()}),
        lambda logger: logger.info("two %s %s", SECRET),
        lambda logger: logger.info({"key": SECRET}),
        failing,
    ],
    ids=["message", "arguments", "mapping", "wrong count", "object", "exception"],
)
def test_h05_no_log_record_shows_a_secret(log: Log, capsys: pytest.CaptureFixture[str]) -> None:
    output = logged(Redactor([SECRET]), log)
    assert "[redacted]" in output
    everything = output + "".join(capsys.readouterr())
    assert not any(form in everything for form in forms(SECRET).values())


def test_a_record_keeps_the_rest_of_its_text() -> None:
    output = logged(Redactor([SECRET]), failing)
    assert "it failed with [redacted]" in output
    assert "Authorization: Bearer [redacted]" in output
    assert "RuntimeError: call failed" in output
    assert "Stack (most recent call last)" in output


def test_added_attributes_are_redacted() -> None:
    formatter = logging.Formatter("%(message)s %(url)s %(count)d")
    output = logged(
        Redactor([SECRET]),
        lambda logger: logger.info("m", extra={"url": f"http://h?k={SECRET}", "count": 3}),
        formatter,
    )
    assert output == "m http://h?k=[redacted] 3\n"


def test_exceptions_are_gone_for_handlers_that_show_locals() -> None:
    try:
        raise ValueError(SECRET)
    except ValueError as error:
        raised = (type(error), error, error.__traceback__)
    record = logging.LogRecord("n", logging.ERROR, "f", 1, "m", (), raised)
    assert LogFilter(Redactor([SECRET])).filter(record)
    assert record.exc_info is None
    assert record.exc_text is not None
    assert record.exc_text.endswith("ValueError: [redacted]")


def test_without_secrets_a_record_is_not_touched() -> None:
    record = logging.LogRecord("n", logging.INFO, "f", 1, "a %s", ("b",), None)
    before = dict(vars(record))
    assert LogFilter(Redactor()).filter(record)
    assert vars(record) == before
