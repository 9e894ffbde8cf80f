"""The key of a store: made once, kept apart, refused when others may have it, and never replaced silently."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from ditto import Graph, Runtime, StoreError, create_ditto
from ditto.errors import ConfigError
from ditto.receipts import load_trusted_keys
from ditto.receipts.signing import key_path, make_new_key, open_signer, public_path
from tests.processes import Child
from tests.receipts.chains import fields, verify_store

made: list[str] = []


def act(ctx: object) -> str:
    made.append("act")
    return "done"


ACT = Graph("act").step("act", lambda ctx: act(ctx), effect="write")


@pytest.fixture(autouse=True)
def nothing_made() -> None:
    made.clear()


async def run(path: Path, run_id: str = "x") -> None:
    async with create_ditto(store=path) as runtime:
        await runtime.run(ACT, id=run_id)


async def lines(runtime: Runtime) -> list[str]:
    return [line async for line in runtime.receipts()]


def contents(path: Path) -> bytes:
    return path.read_bytes()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.asyncio
async def test_the_key_is_made_on_first_use_and_is_not_in_the_database(store_path: Path) -> None:
    async with create_ditto(store=store_path) as runtime:
        await runtime.run(Graph("pure").step("one", lambda: 1, effect="pure"), id="pure")
        assert not key_path(store_path).exists(), "nothing got a receipt yet"
        await runtime.run(ACT, id="x")
    assert (mode(key_path(store_path)), mode(public_path(store_path))) == (0o600, 0o644)
    text = key_path(store_path).read_text()
    assert text.startswith("-----BEGIN PRIVATE KEY-----")
    assert text.split("\n")[1].encode() not in contents(store_path)
    assert sorted(each.name for each in store_path.parent.iterdir()) == [
        "ditto.db", "ditto.db.key", "ditto.db.owners", "ditto.db.pub",
    ]  # fmt: skip
    before = key_path(store_path).read_bytes(), public_path(store_path).read_bytes()
    await run(store_path, "y")
    assert (key_path(store_path).read_bytes(), public_path(store_path).read_bytes()) == before


@pytest.mark.asyncio
async def test_a_store_has_one_key_by_whichever_path_it_is_reached(store_path: Path, tmp_path: Path) -> None:
    await run(store_path)
    (tmp_path / "link.db").symlink_to(store_path)
    await run(tmp_path / "link.db", "y")
    assert not (tmp_path / "link.db.key").exists()
    assert await verify_store(store_path) == "complete up to 2, end not anchored"


OPEN = """
import sys
from pathlib import Path
from ditto.receipts.signing import open_signer
print("ready", flush=True)
sys.stdin.readline()
print(open_signer(Path(sys.argv[1]), may_create=True).id, flush=True)
"""


def test_processes_that_make_the_key_at_once_get_the_same_one(
    tmp_path: Path, start_child: Callable[..., Child]
) -> None:
    children = [start_child(OPEN, tmp_path / "ditto.db") for _ in range(6)]
    for child in children:
        assert child.line() == "ready"
    for child in children:
        child.tell()
    assert len({child.line() for child in children}) == 1
    assert all(child.end()[0] == 0 for child in children)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["ditto.db.key", "ditto.db.pub"]
    assert len(load_trusted_keys([tmp_path / "ditto.db.pub"])) == 1


@pytest.mark.asyncio
@pytest.mark.parametrize("bits", [0o640, 0o604, 0o660, 0o700 | 0o001])
async def test_a_key_that_others_may_touch_is_refused_before_anything_is_attempted(store_path: Path, bits: int) -> None:
    await run(store_path)
    key_path(store_path).chmod(bits)
    made.clear()
    with pytest.raises(
        StoreError, match=rf"its mode is {bits:04o}: others may have the key. Set it to 0600"
    ) as refused:
        await run(store_path, "y")
    assert (refused.value.code, made) == ("store.key", [])
    key_path(store_path).chmod(0o600)
    await run(store_path, "y")
    assert made == ["act"]


@pytest.mark.asyncio
async def test_a_lost_key_is_never_replaced_silently(store_path: Path) -> None:
    await run(store_path)
    kept = key_path(store_path).read_bytes()
    key_path(store_path).unlink()
    made.clear()
    for _ in range(2):
        with pytest.raises(StoreError, match=r"Put it back from a backup.*ditto receipt new-key") as gone:
            await run(store_path, "y")
        assert (gone.value.code, made) == ("store.key", [])
        assert not key_path(store_path).exists()
    async with create_ditto(store=store_path) as runtime:
        assert (await runtime.get("y")).status == "interrupted"
        assert len(await lines(runtime)) == 1, "what is there is read without a key"
    # Even without the public half beside it.
    kept_public = public_path(store_path).read_bytes()
    public_path(store_path).unlink()
    with pytest.raises(StoreError, match="it is gone"):
        await run(store_path, "y")
    key_path(store_path).write_bytes(kept)
    key_path(store_path).chmod(0o600)
    await run(store_path, "y")
    assert made == ["act"]
    assert public_path(store_path).read_bytes() == kept_public


@pytest.mark.asyncio
async def test_a_new_key_that_was_asked_for_goes_on_with_the_chain(store_path: Path) -> None:
    await run(store_path)
    with pytest.raises(StoreError, match="the store has its key"):
        make_new_key(store_path)
    key_path(store_path).unlink()
    signer = make_new_key(store_path)
    await run(store_path, "y")
    async with create_ditto(store=store_path) as runtime:
        first, second = [fields(line.encode()) for line in await lines(runtime)]
    assert (first["signer"] != signer.id, second["signer"] == signer.id) == (True, True)
    assert second["previous"] == first["id"]
    assert len(load_trusted_keys([public_path(store_path)])) == 2
    assert await verify_store(store_path) == "complete up to 2, end not anchored"


def test_a_key_and_a_public_half_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    for name in ("a.db", "b.db"):
        open_signer(tmp_path / name, may_create=True)
    public_path(tmp_path / "a.db").write_bytes(public_path(tmp_path / "b.db").read_bytes())
    with pytest.raises(StoreError, match=r"a\.db\.pub: it lacks the public half of a\.db\.key"):
        open_signer(tmp_path / "a.db", may_create=True)


@pytest.mark.parametrize("text", [b"", b"no key", b"ec"])
def test_a_file_that_holds_no_key_of_the_kind_is_refused(tmp_path: Path, text: bytes) -> None:
    if text == b"ec":
        key = generate_private_key(SECP256R1())
        text = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    path = key_path(tmp_path / "ditto.db")
    path.write_bytes(text)
    path.chmod(0o600)
    with pytest.raises(StoreError, match="no Ed25519 private key in PEM"):
        open_signer(tmp_path / "ditto.db", may_create=True)
    with pytest.raises(ConfigError, match="no Ed25519 public key in PEM"):
        load_trusted_keys([path])


def test_a_key_that_is_no_file_or_cannot_be_made_is_refused(tmp_path: Path) -> None:
    key_path(tmp_path / "ditto.db").mkdir()
    with pytest.raises(StoreError, match=r"ditto\.db\.key"):
        open_signer(tmp_path / "ditto.db", may_create=True)
    os.mkfifo(key_path(tmp_path / "other.db"))
    with pytest.raises(StoreError, match="it is no file"):
        open_signer(tmp_path / "other.db", may_create=True)
    with pytest.raises(StoreError, match="the store's key cannot be used"):
        open_signer(tmp_path / "nowhere" / "ditto.db", may_create=True)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_trusted_keys([tmp_path / "nothing.pub"])
