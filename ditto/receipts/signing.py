"""Keys: one Ed25519 key for each store, beside its database and never in it.

`<store>.key` is the private key (PKCS#8 PEM, mode 0600), `<store>.pub` has the public halves of all keys that the store
has signed with, one PEM block after the other. Both are made on first use.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, Protocol

import uuid_utils
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)

from ditto.errors import ConfigError, StoreError

_FILE_BYTES_MAX: Final = 64 * 1024
_PEM_BLOCK: Final = re.compile(rb"-----BEGIN PUBLIC KEY-----\n.+?\n-----END PUBLIC KEY-----\n?", re.DOTALL)


class PublicKey(Protocol):
    """What can check a signature: `cryptography`'s Ed25519PublicKey, for one."""

    def verify(self, signature: bytes, data: bytes, /) -> None:
        """Raises InvalidSignature."""


class Signer:
    """A private key and the id of its public half. Its repr shows no key."""

    __slots__ = ("_key", "id")

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.id = key_id(key.public_key())

    def sign(self, body: bytes) -> str:
        """The signature, in hex."""
        return self._key.sign(body).hex()

    def public_pem(self) -> bytes:
        """The public half, as one PEM block."""
        return self._key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def key_id(key: Ed25519PublicKey) -> str:
    """What a receipt calls its signer: SHA-256 of the public key's 32 bytes."""
    return hashlib.sha256(key.public_bytes(Encoding.Raw, PublicFormat.Raw)).hexdigest()


def key_path(store: Path) -> Path:
    """Where the private key of a store is, by whichever path the store is reached."""
    real = store.resolve()
    return real.with_name(real.name + ".key")


def public_path(store: Path) -> Path:
    """Where the public keys of a store are."""
    real = store.resolve()
    return real.with_name(real.name + ".pub")


def open_signer(store: Path, *, may_create: bool) -> Signer:
    """The store's key. Made if there is none and `may_create`; processes that make it at once get the same one.

    Raises StoreError (`store.key`) for a key that others may read, that is damaged, or that is gone.
    """
    path = key_path(store)
    try:
        text = _read_private(path)
        if text is None:
            if not may_create or public_path(store).exists():
                raise _key_error(
                    path,
                    "the store had a key to sign its receipts with, and it is gone. Put it back from a backup. If it "
                    "is lost, go on with another one: ditto receipt new-key",
                )
            _write_new(path, _new_pem(), 0o600)
            text = _read_private(path)
        signer = Signer(_parse_private(path, text or b""))
        _publish(public_path(store), signer)
    except OSError as error:
        raise _key_error(path, f"the store's key cannot be used ({error.strerror})") from None
    return signer


def make_new_key(store: Path) -> Signer:
    """Another key for a store whose key is gone; the old public ones are kept. Raises StoreError if there is one."""
    path = key_path(store)
    try:
        if not _write_new(path, _new_pem(), 0o600):
            raise _key_error(path, "the store has its key. To replace it, move it out of the way first")
        signer = Signer(_parse_private(path, _read_private(path) or b""))
        _publish(public_path(store), signer, beside_others=True)
    except OSError as error:
        raise _key_error(path, f"the key cannot be made ({error.strerror})") from None
    return signer


def load_trusted_keys(files: Iterable[Path]) -> Mapping[str, PublicKey]:
    """The public keys in PEM files, by the id that receipts call them. Raises ConfigError for a file without any."""
    trusted: dict[str, PublicKey] = {}
    for file in files:
        try:
            text = _read(file)
        except OSError as error:
            raise ConfigError(f"{file}: the public key cannot be read ({error.strerror})") from None
        found = _parse_public(text)
        if not found:
            raise ConfigError(f"{file}: it holds no Ed25519 public key in PEM; give the store's own .pub file")
        trusted.update(found)
    return trusted


def _new_pem() -> bytes:
    return Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _parse_private(path: Path, text: bytes) -> Ed25519PrivateKey:
    try:
        key = load_pem_private_key(text, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise _key_error(path, "the file holds no Ed25519 private key in PEM. Put the store's key back from a backup")
    return key


def _parse_public(text: bytes) -> dict[str, Ed25519PublicKey]:
    found: dict[str, Ed25519PublicKey] = {}
    for block in _PEM_BLOCK.findall(text.replace(b"\r\n", b"\n")):
        try:
            key = load_pem_public_key(block)
        except (ValueError, UnsupportedAlgorithm):
            continue
        if isinstance(key, Ed25519PublicKey):
            found[key_id(key)] = key
    return found


def _read_private(path: Path) -> bytes | None:
    """The private key's file; None if there is none. Refused if anybody else may touch it."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    with os.fdopen(file, "rb") as opened:
        mode = os.fstat(file).st_mode
        if not stat.S_ISREG(mode):
            raise _key_error(path, "it is no file")
        if mode & 0o077:
            raise _key_error(path, f"its mode is {mode & 0o777:04o}: others may have the key. Set it to 0600")
        return opened.read(_FILE_BYTES_MAX)


def _read(path: Path) -> bytes:
    with path.open("rb") as opened:
        return opened.read(_FILE_BYTES_MAX)


def _publish(path: Path, signer: Signer, *, beside_others: bool = False) -> None:
    """Have the public half in the public file. A file that is there and lacks it belongs to another key."""
    try:
        others = _read(path)
    except FileNotFoundError:
        others = b""
    if signer.id in _parse_public(others):
        return
    if others and not beside_others:
        told = f"it lacks the public half of {path.with_suffix('.key').name}: one of the two is another store's"
        raise _key_error(path, f"{told}. Put both back from a backup")
    new = path.with_name(f".{path.name}.{uuid_utils.uuid4()}")
    _write(new, others + signer.public_pem(), 0o644)
    new.replace(path)
    _flush_folder(path.parent)


def _write_new(path: Path, data: bytes, mode: int) -> bool:
    """Write a file whole, or leave the one that is there; False then. Nobody ever sees half of it."""
    new = path.with_name(f".{path.name}.{uuid_utils.uuid4()}")
    _write(new, data, mode)
    try:
        os.link(new, path)
    except FileExistsError:
        return False
    finally:
        new.unlink()
    _flush_folder(path.parent)
    return True


def _write(path: Path, data: bytes, mode: int) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with os.fdopen(file, "wb") as opened:
        opened.write(data)
        opened.flush()
        os.fsync(file)


def _flush_folder(folder: Path) -> None:
    file = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _key_error(path: Path, text: str) -> StoreError:
    return StoreError(f"{path}: {text}", code="store.key")
