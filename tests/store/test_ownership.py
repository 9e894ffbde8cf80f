"""Ownership: who is alive, told by locks that the kernel gives up for the dead."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from ditto import create_ditto
from ditto.engine.ownership import Owner
from ditto.errors import StoreError
from tests.processes import Child

StartChild = Callable[..., Child]

OWN = """
import sys
from pathlib import Path
from ditto.engine.ownership import Owner
owner = Owner(Path(sys.argv[1]))
print(owner.id, flush=True)
for line in sys.stdin:
    if line == "close\\n":
        owner.close()
        print("closed", flush=True)
    elif line == "end\\n":
        break
"""


@pytest.fixture
def store_path(store_path: Path) -> Path:
    store_path.parent.mkdir()
    return store_path


@pytest.fixture
def owner(store_path: Path) -> Iterator[Owner]:
    with closing(Owner(store_path)) as owner:
        yield owner


def names(store_path: Path) -> set[str]:
    return {path.name for path in store_path.with_name("ditto.db.owners").iterdir()}


def test_the_living_are_alive_and_the_closed_are_not(store_path: Path, owner: Owner) -> None:
    with closing(Owner(store_path)) as other:
        assert owner.is_alive(owner.id)
        assert owner.is_alive(other.id)
        assert other.is_alive(owner.id)
        assert names(store_path) == {owner.id, other.id}
    assert not owner.is_alive(other.id)
    assert names(store_path) == {owner.id}
    other.close()


def test_only_its_owner_may_look_into_the_folder(store_path: Path, owner: Owner) -> None:
    folder = store_path.with_name("ditto.db.owners")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / owner.id).stat().st_mode) == 0o600


def test_a_killed_owner_is_known_to_be_dead_at_once(store_path: Path, owner: Owner, start_child: StartChild) -> None:
    child = start_child(OWN, store_path)
    name = child.line()
    assert owner.is_alive(name)
    child.kill()
    assert not owner.is_alive(name)
    assert name in names(store_path), "its file is still there"
    with closing(Owner(store_path)) as next_one:
        assert names(store_path) == {owner.id, next_one.id}, "until the next one sweeps"
    assert not owner.is_alive(name)


@pytest.mark.parametrize("last", ["close", "end"])
def test_an_owner_that_ended_is_dead(store_path: Path, owner: Owner, start_child: StartChild, last: str) -> None:
    child = start_child(OWN, store_path)
    name = child.line()
    child.tell(last)
    if last == "close":
        assert child.line() == "closed"
    else:
        assert child.end()[0] == 0
    assert not owner.is_alive(name)


def test_the_same_store_by_another_path_has_the_same_owners(store_path: Path, tmp_path: Path) -> None:
    store_path.touch()
    link, folder = tmp_path / "link.db", tmp_path / "other"
    link.symlink_to(store_path)
    folder.symlink_to(store_path.parent)
    with ExitStack() as stack:
        owners = [
            stack.enter_context(closing(Owner(path)))
            for path in (store_path, link, folder / "ditto.db", store_path.parent / ".." / "data" / "ditto.db")
        ]
        assert all(one.is_alive(other.id) for one in owners for other in owners)


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../../../etc/passwd", "/etc/passwd", "a\x00b", "x" * 5000, "é", "0" * 36, "-" * 36]
)
def test_h01_an_edited_owner_is_dead_whatever_it_names(store_path: Path, owner: Owner, name: str) -> None:
    assert not owner.is_alive(name)


def test_what_else_lies_in_the_folder_is_left_alone(store_path: Path, owner: Owner) -> None:
    folder = store_path.with_name("ditto.db.owners")
    (folder / "a folder").mkdir()
    (folder / "a link").symlink_to("/nowhere")
    os.mkfifo(folder / "a pipe")
    with closing(Owner(store_path)) as other:
        assert owner.is_alive(other.id)
        assert {"a folder", "a link"} <= names(store_path)


def test_a_folder_that_cannot_be_made_is_named(store_path: Path) -> None:
    store_path.with_name("ditto.db.owners").write_text("in the way")
    with pytest.raises(StoreError, match="the owner's lock cannot be made"):
        Owner(store_path)


@pytest.mark.asyncio
async def test_a_runtime_without_an_owner_leaves_no_thread_behind(store_path: Path) -> None:
    store_path.with_name("ditto.db.owners").write_text("in the way")
    before = set(threading.enumerate())
    with pytest.raises(StoreError, match="the owner's lock cannot be made"):
        async with create_ditto(store=store_path):
            pass
    for thread in set(threading.enumerate()) - before:
        thread.join()


def test_a_file_that_cannot_be_asked_is_named(store_path: Path, owner: Owner) -> None:
    name = "0" * 36
    path = store_path.with_name("ditto.db.owners") / name
    path.symlink_to(path)
    with pytest.raises(StoreError, match="whether this owner is alive cannot be told"):
        owner.is_alive(name)


# Children must not keep a dead owner alive

FORK = """
import os, subprocess, sys
from pathlib import Path
from ditto.engine.ownership import Owner
owner = Owner(Path(sys.argv[1]))
# It lives until the test lets go of the standard input that it shares with its parent.
child = [sys.executable, "-c", "print('child', flush=True); import sys; sys.stdin.read()"]
match sys.argv[2]:
    case "fork":
        if os.fork() == 0:
            print("child", flush=True)
            os.read(0, 1)
            os._exit(0)
    case "fork, closed there":
        if os.fork() == 0:
            owner.close()
            print("child", flush=True)
            os.read(0, 1)
            os._exit(0)
    case "exec":
        subprocess.Popen(child)
    case "exec, nothing closed":
        subprocess.Popen(child, close_fds=False)
    case "exec, with a function before it":
        subprocess.Popen(child, preexec_fn=lambda: None)
print(owner.id, flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize(
    "kind", ["fork", "fork, closed there", "exec", "exec, nothing closed", "exec, with a function before it"]
)
def test_a_child_does_not_keep_its_dead_parent_alive(
    store_path: Path, owner: Owner, start_child: StartChild, kind: str
) -> None:
    parent = start_child(FORK, store_path, kind)
    (name,) = {parent.line(), parent.line()} - {"child"}
    assert owner.is_alive(name), "the parent lives, whatever its child did"
    parent.kill()
    assert not owner.is_alive(name), "the child does not count"


def test_the_dead_do_not_look_alive_while_they_are_swept(
    store_path: Path, owner: Owner, start_child: StartChild, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = start_child(OWN, store_path)
    name = child.line()
    child.kill()
    unlink, asked = Path.unlink, []

    def ask_first(self: Path, missing_ok: bool = False) -> None:
        asked.append(owner.is_alive(self.name))
        unlink(self, missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", ask_first)
        with closing(Owner(store_path)) as other:
            assert name not in names(store_path)
            assert other.is_alive(owner.id)
    assert asked[0] is False


# Many at once

SWEEP = """
import os, sys
from pathlib import Path
from ditto.engine.ownership import Owner

path, processes, rounds, dead = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
done, told = os.pipe()
for number in range(processes):
    if os.fork() == 0:
        for turn in range(rounds):
            owner = Owner(path)
            assert os.stat(path.with_name(path.name + ".owners") / owner.id).st_ino == os.fstat(owner._file).st_ino
            said = []
            for other in (path.with_name(path.name + ".owners")).iterdir():
                if other.name in dead and owner.is_alive(other.name):
                    said.append("dead, and alive")
            if any(owner.is_alive(name) for name in dead):
                said.append("dead, and alive")
            os.write(told, (f"{owner.id} {said}\\n").encode())
            owner.close()
        os._exit(0)
os.close(told)
results = os.fdopen(done)
for _ in range(processes * rounds):
    print(results.readline().split(" ", 1)[1].strip(), flush=True)
"""


def test_sweeping_together_never_revives_the_dead_and_never_buries_the_living(
    store_path: Path, owner: Owner, start_child: StartChild
) -> None:
    children = [start_child(OWN, store_path) for _ in range(3)]
    living, *dead = [child.line() for child in children]
    for child in children[1:]:
        child.kill()
    code, said = start_child(SWEEP, store_path, 8, 100, *dead).end()
    assert code == 0
    assert set(said) == {"[]"}
    assert len(said) == 800
    assert names(store_path) == {owner.id, living}
    assert owner.is_alive(living)
