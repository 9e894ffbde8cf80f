"""`ditto receipt`: export, verify without the store, a new key; what it prints, and how it ends."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from typer.testing import CliRunner, Result

from ditto import Graph, create_ditto
from ditto.cli.main import app
from tests.engine.commands import command
from tests.receipts.chains import KEY, OTHER, chain, drafts, fields

GRAPH = Graph("act").step("act", lambda input: input, effect="write")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a store in it that has three receipts of two runs."""
    monkeypatch.chdir(tmp_path)

    async def run() -> None:
        async with create_ditto(store="ditto.db") as runtime:
            for run_id in ("a", "b"):
                await runtime.run(GRAPH, {"n": 1}, id=run_id)
            await runtime.run(GRAPH, {"n": 1}, id="a", on_finished="new")

    asyncio.run(run())
    return tmp_path


def receipt(verb: str, *arguments: object, code: int = 0, stdin: bytes | None = None) -> Result:
    result = CliRunner().invoke(app, ["receipt", verb, *map(str, arguments)], input=stdin)
    told = f"{result.exit_code}\n{result.stdout}\n{result.stderr}\n{result.exception!r}"
    assert result.exception is None or isinstance(result.exception, SystemExit), told
    assert result.exit_code == code, told
    return result


def export(*arguments: object) -> Result:
    return receipt("export", "--store", "ditto.db", *arguments)


def test_what_is_exported_verifies_against_the_head_that_it_tells(folder: Path) -> None:
    told = export("--output", "receipts.ndjson")
    assert told.stdout == ""
    lines = (folder / "receipts.ndjson").read_bytes().splitlines()
    head = fields(lines[-1])["id"]
    assert told.stderr == f"3 receipts\nhead {head}\n"
    assert export().stdout_bytes == (folder / "receipts.ndjson").read_bytes()
    verify = ("verify", "--input", "receipts.ndjson", "--trusted-pubkey", "ditto.db.pub")
    assert receipt(*verify, "--head", head).stdout == (
        f"lines    3\nunique   3\nrepeats  0\ngaps     0\nhead     {head}\n"
        "complete up to 3, anchored by the given head\n"
    )
    assert receipt(*verify).stdout.endswith("complete up to 3, end not anchored\n")
    found = json.loads(receipt(*verify, "--head", head, "--json").stdout)
    assert found == {
        "sound": True, "lines": 3, "unique": 3, "repeats": 0, "gaps": 0, "first": 1, "last": 3, "head": head,
        "complete": True, "anchored": 3, "fault": None, "summary": "complete up to 3, anchored by the given head",
    }  # fmt: skip


def test_a_run_is_exported_as_a_selection(folder: Path) -> None:
    told = export("--run", "a")
    assert told.stderr == "2 receipts, a selection: those of run a\n"
    assert [fields(line)["number"] for line in told.stdout_bytes.splitlines()] == [1, 3]
    found = receipt("verify", "--input", "-", "--trusted-pubkey", "ditto.db.pub", stdin=told.stdout_bytes)
    assert found.stdout.endswith("a selection of the chain between 1 and 3, end not anchored\n")
    assert "no run has the id" in receipt("export", "--store", "ditto.db", "--run", "z", code=2).stderr


def test_verifying_needs_neither_store_nor_configuration(tmp_path: Path) -> None:
    (tmp_path / "receipts.ndjson").write_bytes(b"".join(chain(drafts(3))))
    for name, key in (("right.pub", KEY), ("wrong.pub", OTHER)):
        pem = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        (tmp_path / name).write_bytes(pem)
    (tmp_path / "ditto.yaml").write_text("no: such\n")
    verify = ("receipt", "verify", "--input", "receipts.ndjson", "--trusted-pubkey")
    command(tmp_path, *verify, "right.pub")
    command(tmp_path, *verify, "wrong.pub", "--trusted-pubkey", "right.pub")
    assert command(tmp_path, *verify, "wrong.pub", code=1).stdout == "line 1: its signer is none of the trusted keys\n"
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "ditto.yaml", "receipts.ndjson", "right.pub", "wrong.pub",
    ]  # fmt: skip


def test_a_fault_is_told_with_its_line_and_exit_code_1(folder: Path) -> None:
    lines = export().stdout_bytes.splitlines(keepends=True)
    verify = ("verify", "--input", "-", "--trusted-pubkey", "ditto.db.pub")
    bad = b"".join([lines[0], lines[1].replace(b"allow", b"deny "), lines[2]])
    assert receipt(*verify, code=1, stdin=bad).stdout == "line 2: its field 'outcome' holds what no receipt has there\n"
    assert receipt(*verify, code=1, stdin=b"").stdout == "the file is empty, which proves nothing\n"
    head = fields(lines[-1])["id"]
    cut = b"".join(lines[:-1])
    assert "the given head is not among the 2 receipts" in receipt(*verify, "--head", head, code=1, stdin=cut).stdout
    found = json.loads(receipt(*verify, "--json", code=1, stdin=bad).stdout)
    assert (found["sound"], found["complete"], found["fault"]["line"]) == (False, False, 2)


def test_arguments_are_compared(folder: Path) -> None:
    asked = {"a/1/act": {"input": {"n": 1}}}
    (folder / "args.json").write_text(json.dumps(asked, indent=2))
    lines = export().stdout_bytes
    verify = ("verify", "--input", "-", "--trusted-pubkey", "ditto.db.pub", "--args", "args.json")
    receipt(*verify, stdin=lines)
    (folder / "args.json").write_text(json.dumps({"a/1/act": {"input": {"n": 2}}}))
    assert receipt(*verify, code=1, stdin=lines).stdout == (
        "line 1: its arguments are not the ones that are given for its key\n"
    )
    for text in ("[]", "{", '{"a": 1, "a": 2}', '{"a": "\\ud83d"}'):
        (folder / "args.json").write_text(text)
        told = receipt(*verify, code=2, stdin=lines).stderr
        assert told.startswith(("ditto: args.json: it ", "ditto: the arguments are no JSON data"))


def test_what_is_missing_is_a_mistake_of_usage(folder: Path) -> None:
    assert "--trusted-pubkey" in receipt("verify", "--input", "x", code=2).stderr
    for arguments in (
        ("--input", "nothing.ndjson", "--trusted-pubkey", "ditto.db.pub"),
        ("--input", "ditto.db.pub", "--trusted-pubkey", "nothing.pub"),
        ("--input", "ditto.db.pub", "--trusted-pubkey", "ditto.db"),
        ("--input", "ditto.db.pub", "--trusted-pubkey", "ditto.db.key"),
        ("--input", "ditto.db.pub", "--trusted-pubkey", "ditto.db.pub", "--head", "abc"),
    ):
        assert receipt("verify", *arguments, code=2).stderr.startswith("ditto: ")
    assert "there is no store" in receipt("export", "--store", "nothing.db", code=2).stderr
    assert not (folder / "nothing.db").exists()


def test_a_new_key_is_made_only_where_the_old_one_is_gone(folder: Path) -> None:
    assert "the store has its key" in receipt("new-key", "--store", "ditto.db", code=1).stderr
    (folder / "ditto.db.key").unlink()
    told = receipt("new-key", "--store", "ditto.db")
    assert told.stdout.startswith("signer ")
    assert (folder / "ditto.db.key").stat().st_mode & 0o777 == 0o600

    async def run() -> None:
        async with create_ditto(store="ditto.db") as runtime:
            await runtime.run(GRAPH, {"n": 1}, id="c")

    asyncio.run(run())
    lines = export().stdout_bytes
    assert fields(lines.splitlines()[-1])["signer"] == told.stdout.split()[1]
    verify = ("verify", "--input", "-", "--trusted-pubkey", "ditto.db.pub")
    assert receipt(*verify, stdin=lines).stdout.endswith("complete up to 4, end not anchored\n")
