"""What verifying finds: every change of a file of receipts, and who may have signed it."""

from __future__ import annotations

import gc
import hashlib
import io
import json
import tracemalloc
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import rfc8785
from hypothesis import given
from hypothesis import strategies as st

from ditto.errors import ConfigError
from ditto.receipts import Draft, Receipt, Verified, hash_arguments, verify_receipts
from ditto.receipts.body import LINE_BYTES_MAX, Place, read_receipt, write_receipt
from ditto.receipts.signing import Signer
from tests.receipts.chains import KEY, OTHER, PAID, chain, drafts, fields, reason, signed, trusted, verify

CHAIN = chain(drafts(20))
HEAD = fields(CHAIN[-1])["id"]


def test_a_whole_chain_verifies() -> None:
    assert verify(CHAIN) == Verified(
        lines=20, unique=20, repeats=0, gaps=0, first=1, last=20, head=HEAD, complete=True, anchored=None
    )
    assert verify(CHAIN).summary == "complete up to 20, end not anchored"
    assert verify(CHAIN, head=HEAD).summary == "complete up to 20, anchored by the given head"
    assert verify(CHAIN, head=fields(CHAIN[14])["id"]).summary == (
        "complete up to 15, anchored by the given head; 5 after it are not anchored"
    )
    assert verify([*CHAIN[:-1], CHAIN[-1].removesuffix(b"\n")]).complete, "the last line feed may be missing"


def test_nothing_verifies_without_a_line() -> None:
    assert reason(verify([])) == (0, "the file is empty, which proves nothing")
    assert reason(verify([CHAIN[0], b"\n", CHAIN[1]])) == (
        2,
        "it is no JSON (Expecting value: line 1 column 1 (char 0))",
    )


# Whose key


def test_h06_a_receipt_is_never_verified_with_a_key_that_comes_with_it() -> None:
    forged = [signed(fields(line), OTHER) for line in chain(drafts(1), OTHER)]
    assert verify(forged, OTHER).complete, "it is well made"
    assert reason(verify(forged)) == (1, "its signer is none of the trusted keys")
    with_key = signed({**fields(forged[0]), "public_key": trusted(OTHER).keys().__iter__().__next__()}, OTHER)
    assert reason(verify([with_key])) == (1, "it has an unknown field 'public_key'")
    assert reason(verify([with_key], OTHER)) == (1, "it has an unknown field 'public_key'")
    # In the name of the trusted key, with a signature of another one.
    data = fields(CHAIN[0])
    data["signature"] = fields(forged[0])["signature"]
    assert reason(verify([rfc8785.dumps(data)])) == (1, "its signature is not valid")
    with pytest.raises(ConfigError, match="verified against the public key of the store that you trust"):
        verify_receipts(io.BytesIO(b"".join(CHAIN)), {})


def test_a_store_that_got_a_new_key_verifies_with_both() -> None:
    first = chain(drafts(2))
    later = dict(fields(first[1]), number=3, previous=fields(first[1])["id"])
    both = [*first, signed(later, OTHER)]
    assert verify(both, KEY, OTHER).complete
    assert reason(verify(both)) == (3, "its signer is none of the trusted keys")


# Every change


def changed(value: Any) -> Any:
    if isinstance(value, int):
        return value + 1
    if value is None:
        return "x"
    return ("b" if value[0] != "b" else "c") + value[1:]


@pytest.mark.parametrize("name", list(Receipt.__slots__))
def test_h08_a_change_of_any_field_is_found(name: str) -> None:
    data = fields(CHAIN[7])
    data[name] = changed(data[name])
    line = rfc8785.dumps(data) + b"\n"
    for head in (None, HEAD):
        found = reason(verify([*CHAIN[:7], line, *CHAIN[8:]], head=head))
        assert found[0] == 8
    # Signed anew by somebody else, it is found all the same; and so it is by the store itself, from its links.
    assert reason(verify([*CHAIN[:7], signed(data, OTHER), *CHAIN[8:]]))[0] == 8
    if name not in ("id", "signature", "signer"):
        assert reason(verify([*CHAIN[:7], signed(data), *CHAIN[8:]]))[0] in (8, 9)


def test_h08_a_change_of_any_byte_is_found() -> None:
    line = CHAIN[0].removesuffix(b"\n")
    for at in range(len(line)):
        edited = line[:at] + bytes([line[at] ^ 1]) + line[at + 1 :]
        assert reason(verify([edited, *CHAIN[1:]]))[0] == 1


def test_h08_with_a_head_that_was_recorded_elsewhere_every_cut_is_found() -> None:
    missing_end = "the given head is not among the 17 receipts: the end is missing, or changed"
    assert reason(verify(CHAIN[:-3], head=HEAD)) == (0, missing_end)
    assert reason(verify(CHAIN[3:], head=HEAD)) == (1, "receipt 1 should stand here, not 4")
    assert reason(verify([*CHAIN[:9], *CHAIN[10:]], head=HEAD)) == (10, "receipt 10 should stand here, not 11")
    swapped = [*CHAIN[:4], CHAIN[5], CHAIN[4], *CHAIN[6:]]
    assert reason(verify(swapped, head=HEAD)) == (5, "receipt 5 should stand here, not 6")
    assert verify([*CHAIN, CHAIN[-1]], head=HEAD).repeats == 1


def test_h08_without_a_head_the_answer_says_how_far_it_goes_and_that_its_end_is_open() -> None:
    cut = verify(CHAIN[:-3])
    assert (cut.complete, cut.summary) == (True, "complete up to 17, end not anchored")
    for lines, gaps, first in (
        (CHAIN[3:], 0, 4),
        ([*CHAIN[:9], *CHAIN[10:12], *CHAIN[14:]], 3, 1),
        ([*CHAIN[:4], CHAIN[5], CHAIN[4], *CHAIN[6:]], 0, 1),
    ):
        found = verify(lines)
        assert (found.fault, found.complete, found.gaps, found.first) == (None, False, gaps, first)
        assert found.summary == f"a selection of the chain between {first} and 20, end not anchored"


def test_repeats_are_counted_and_must_be_the_same() -> None:
    found = verify([*CHAIN[:3], CHAIN[1], CHAIN[1], *CHAIN[3:]])
    assert (found.lines, found.unique, found.repeats, found.complete) == (22, 20, 2, True)
    another = signed({**fields(CHAIN[1]), "at": 7})
    assert reason(verify([*CHAIN, another])) == (21, "it has the number 2, which another receipt has")


def test_links_are_checked_in_whatever_order_the_neighbours_come() -> None:
    forked = signed({**fields(CHAIN[5]), "previous": "a" * 64})
    told = "it does not link to its neighbour in the chain"
    assert reason(verify([CHAIN[4], forked])) == (2, told)
    assert reason(verify([forked, CHAIN[4]])) == (2, told)
    assert verify([CHAIN[8], CHAIN[2], CHAIN[7]]).fault is None
    first = "the first receipt of a chain, and no other, has none before it"
    assert reason(verify([signed({**fields(CHAIN[0]), "previous": "a" * 64})])) == (1, first)
    assert reason(verify([signed({**fields(CHAIN[5]), "previous": None})])) == (1, first)


def test_receipts_of_two_stores_are_not_one_chain() -> None:
    other = chain(drafts(2), store="another store")
    assert reason(verify([CHAIN[0], other[1]])) == (2, "it belongs to another store than the lines before it")


# Strictly


def edited(**given: Any) -> bytes:
    return json.dumps({**fields(CHAIN[0]), **given}, sort_keys=True, separators=(",", ":")).encode()


LINE = CHAIN[0].removesuffix(b"\n")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (edited(more=1), "it has an unknown field 'more'"),
        (LINE.replace(b'"attempt":1', b'"attempt":1,"attempt":1'), "it has a name twice in one object"),
        (LINE.replace(b'"attempt":1', b'"attempt":NaN'), "it holds NaN, which is no JSON"),
        (LINE.replace(b'"attempt":1', b'"attempt":1.0'), "its field 'attempt' holds what no receipt has there"),
        (edited(attempt=True), "its field 'attempt' holds what no receipt has there"),
        (edited(attempt=2**53), "its field 'attempt' holds what no receipt has there"),
        (edited(number=0), "its field 'number' holds what no receipt has there"),
        (edited(outcome="allowed"), "its field 'outcome' holds what no receipt has there"),
        (edited(kind="decision"), "a decision names its actor, and nothing else does"),
        (edited(actor="ada"), "a decision names its actor, and nothing else does"),
        (edited(step={"a": 1}), "its field 'step' holds what no receipt has there"),
        (edited(id=fields(CHAIN[0])["id"].upper()), "its field 'id' holds what no receipt has there"),
        (edited(schema="ditto.receipt.v2"), "its schema is not ditto.receipt.v1"),
        (b"[]", "it is no JSON object"),
        (b"[" * 100_000, "it is nested too deeply"),
        (b'{"attempt":' + b"9" * 5000 + b"}", "it is no JSON"),
        (b"\xff\xfe", "it is no UTF-8"),
        (LINE.decode().encode("utf-16"), "it is no UTF-8"),
        (b" " + LINE, "it is not written in canonical form (RFC 8785)"),
        (LINE + b"\r", "it is not written in canonical form (RFC 8785)"),
        (LINE.replace(b'"pay"', b'"p\\u0061y"'), "it is not written in canonical form (RFC 8785)"),
        (LINE.replace(b'"pay"', b'"\\ud83d"'), "it has no canonical form: input contains non-UTF-8 codepoints"),
        (LINE.replace(b'"tool":"pay"', b'"tool":"pay"')[:-1], "it is no JSON"),
        (b'"' + b"x" * LINE_BYTES_MAX, f"it is longer than {LINE_BYTES_MAX} bytes"),
    ],
)
def test_a_line_that_is_no_receipt_is_named_with_its_reason(line: bytes, told: str) -> None:
    found = reason(verify([CHAIN[0], line + b"\n", CHAIN[1]]))
    assert found[0] == 2
    assert found[1].startswith(told)


@pytest.mark.parametrize("name", list(Receipt.__slots__))
def test_no_field_may_be_missing(name: str) -> None:
    data = {each: value for each, value in fields(CHAIN[0]).items() if each != name}
    told = "its schema is not ditto.receipt.v1" if name == "schema" else f"it has no field {name!r}"
    assert reason(verify([rfc8785.dumps(data)])) == (1, told)


# What they were asked


def test_arguments_are_compared_by_the_key_of_their_operation() -> None:
    asked = {f"order-1/1/pay{number}": {"amount": 40} for number in (1, 3)}
    assert verify(CHAIN, arguments=asked).complete
    told = "its arguments are not the ones that are given for its key"
    assert reason(verify(CHAIN, arguments={**asked, "order-1/1/pay3": {"amount": 41}})) == (3, told)
    told = "no receipt has the key 'order-9/1/pay', for which arguments are given"
    assert reason(verify(CHAIN, arguments={**asked, "order-9/1/pay": {}})) == (0, told)


def test_the_order_of_keys_is_no_part_of_the_arguments() -> None:
    assert hash_arguments({"to": "ada", "amount": {"b": 1, "a": [1, "ß"]}}) == hash_arguments(
        json.loads('{"amount": {"a": [1, "\\u00df"], "b": 1}, "to": "ada"}')
    )
    assert hash_arguments({"n": 1}) != hash_arguments({"n": 1.0})
    assert hash_arguments({"n": 2**64}) != hash_arguments({"n": 2**64 + 1})


plain = st.characters(codec="utf-8", max_codepoint=0xFFFF)
"""Beyond them, RFC 8785 orders keys by UTF-16, and Python by code points."""


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**53) + 1, 2**53 - 1) | st.text(plain),
        lambda each: st.lists(each) | st.dictionaries(st.text(plain), each),
        max_leaves=20,
    )
)
def test_arguments_without_fractions_are_hashed_in_their_rfc_8785_form(value: Any) -> None:
    assert hash_arguments(value) == hashlib.sha256(rfc8785.dumps(value)).hexdigest()


# How it is written


texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=40) | st.sampled_from(
    ['","key":"', ',"key":', '"signer":', ',"signer":', ',"id":"' + "a" * 64 + '"', "\\", '"', "\x7f", "\u2028", "🙂"]
)


@given(st.tuples(texts, texts, texts, texts | st.none(), texts | st.none()))
def test_whatever_it_says_a_line_is_the_canonical_json_of_its_fields(said: tuple[Any, ...]) -> None:
    run, step, tool, key, why = said
    draft = replace(PAID, run=run, step=step, tool=tool, key=key, reason=why)
    [line] = chain([draft])
    assert rfc8785.dumps(fields(line)) == line.removesuffix(b"\n")
    receipt, _ = read_receipt(line.removesuffix(b"\n"))
    assert {name: getattr(receipt, name) for name in Draft.__slots__} == {
        name: getattr(draft, name) for name in Draft.__slots__
    }
    assert verify([line]).complete


def test_a_key_shows_itself_nowhere() -> None:
    signer = Signer(KEY)
    assert bytes(range(32)).hex() not in repr(signer)
    receipt_id, line = write_receipt(PAID, Place("s", 1, None, 1, signer.id), signer.sign)
    assert receipt_id in line


# What it costs


class Counted:
    """A public key that counts what it is asked, and a file that counts how it is read."""

    def __init__(self) -> None:
        self.checks = self.reads = 0

    def verify(self, signature: bytes, data: bytes, /) -> None:
        self.checks += 1
        KEY.public_key().verify(signature, data)


class Lines(io.RawIOBase):
    """Lines that are made while they are read."""

    def __init__(self, lines: Iterable[bytes], counted: Counted) -> None:
        self._lines, self._counted = iter(lines), counted

    def readline(self, size: int | None = -1, /) -> bytes:
        self._counted.reads += 1
        return next(self._lines, b"")


def count(number: int) -> tuple[Counted, int]:
    """Verify so many receipts; the most memory in use meanwhile, in bytes."""
    counted = Counted()
    lines = chain(drafts(number))
    [signer] = trusted()
    file: Any = Lines(lines, counted)
    gc.collect()
    tracemalloc.start()
    found = verify_receipts(file, {signer: counted})
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found.complete
    return counted, peak


def test_each_line_is_read_once_and_costs_one_signature_check_and_no_memory() -> None:
    few, small = count(100)
    many, large = count(3_000)
    for counted, number in ((few, 100), (many, 3_000)):
        assert counted.checks == number
        assert counted.reads == number + 1
    assert large - small < 2_900 * 32, "not even a hash is kept of each line"
