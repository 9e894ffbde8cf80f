"""Ownership: which runtime drives a run, and how another one knows that it is dead.

Each runtime holds an exclusive `flock` on a file of its own beside the store. The kernel gives the lock up when the
process ends, however it ends; so a dead owner is known at once, without process ids and without waiting for a lease.
A dead owner is not a dead effect: what it had admitted is looked up, or unknown.
"""

from __future__ import annotations

import fcntl
import os
import re
import weakref
from pathlib import Path
from typing import Final

import uuid_utils

from ditto.errors import StoreError

_NAME: Final = re.compile(r"[0-9a-f-]{36}")


class Owner:
    """One runtime's name and lock. Close-on-exec, and closed in forked children, so that only we hold it."""

    def __init__(self, store_path: Path) -> None:
        self.id = str(uuid_utils.uuid7())
        # By whichever path a store is reached: there is one folder of owners.
        real = store_path.resolve()
        self._folder = real.with_name(real.name + ".owners")
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            self._sweep()
            self._file = self._lock()
        except OSError as error:
            raise StoreError(f"{self._folder}: the owner's lock cannot be made ({error.strerror})") from None
        _owners.add(self)

    def is_alive(self, owner: str) -> bool:
        """Whether the runtime of that name still runs on this machine. Ourselves: yes. Raises StoreError."""
        if owner == self.id:
            return True
        if not _NAME.fullmatch(owner):
            return False
        try:
            file = os.open(self._folder / owner, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise StoreError(
                f"{self._folder / owner}: whether this owner is alive cannot be told ({error.strerror})"
            ) from None
        try:
            return not _lock_shared(file)
        finally:
            os.close(file)

    def close(self) -> None:
        """Give the lock up and remove its file. Safe to call twice."""
        if self._file >= 0:
            (self._folder / self.id).unlink(missing_ok=True)
            os.close(self._file)
            self._file = -1

    def _lock(self) -> int:
        """Make and lock our file; again if a sweeping runtime removed it between the two."""
        path = self._folder / self.id
        while True:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(file, fcntl.LOCK_EX)
            if os.fstat(file).st_nlink:
                return file
            os.close(file)

    def _sweep(self) -> None:
        """Remove the files of dead runtimes. Their names are never used again.

        By a shared lock, like every other probe: an exclusive one would make a dead owner look alive to them.
        """
        for path in self._folder.iterdir():
            try:
                file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            except OSError:
                continue
            try:
                if _lock_shared(file):
                    path.unlink(missing_ok=True)
            except OSError:
                continue
            finally:
                os.close(file)


_owners: Final[weakref.WeakSet[Owner]] = weakref.WeakSet()


def _lock_shared(file: int) -> bool:
    """Whether nobody holds the exclusive lock."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _close_after_fork() -> None:
    """A lock belongs to the open file, which a forked child shares: it must not outlive us there."""
    for owner in list(_owners):
        if owner._file >= 0:
            os.close(owner._file)
            owner._file = -1


os.register_at_fork(after_in_child=_close_after_fork)
