"""Ownership: which runtime drives a run, and how another one knows that it is dead.

Each runtime holds an exclusive `flock` on a file of its own beside the store. The kernel gives the lock up when the
process ends, however it ends; so a dead owner is known at once, without process ids and without waiting for a lease.
A dead owner is not a dead effect: what it had admitted is looked up, or unknown.
"""

from __future__ import annotations

import fcntl
import os
import weakref
from pathlib import Path

import uuid_utils

from ditto.errors import StoreError


class Owner:
    """One runtime's name and lock. Close-on-exec, and closed in forked children, so that only we hold it."""

    def __init__(self, store_path: Path) -> None:
        self.id = str(uuid_utils.uuid7())
        self._folder = store_path.with_name(store_path.name + ".owners")
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            self._sweep()
            self._file = self._lock()
        except OSError as error:
            raise StoreError(f"{self._folder}: the owner's lock cannot be made ({error.strerror})") from None
        _close_after_fork(self)

    def is_alive(self, owner: str) -> bool:
        """Whether the runtime of that name still runs on this machine. Ourselves: yes."""
        if owner == self.id:
            return True
        try:
            file = os.open(self._folder / owner, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(file)
        return False

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
        """Remove the files of dead runtimes. Their names are never used again."""
        for path in self._folder.iterdir():
            try:
                file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)
            except BlockingIOError:
                continue
            finally:
                os.close(file)


def _close_after_fork(owner: Owner) -> None:
    """A lock belongs to the open file, which a forked child shares: it must not outlive us there."""
    reference = weakref.ref(owner)

    def close() -> None:
        inherited = reference()
        if inherited is not None and inherited._file >= 0:
            os.close(inherited._file)
            inherited._file = -1

    os.register_at_fork(after_in_child=close)
