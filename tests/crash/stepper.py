"""The stepper: processes on one file that stop at claim, effect and commit, and move one at a time.

A point is a crash point of `ditto.testing.crash` (`flow:claimed:asked`: decided on, and not begun; `…:before` and
`…:after` its commit), or a side of an effect (`flow/send:effect:before`). At `before`, a process holds the write lock:
whoever wants to write then waits for it, and says nothing.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tests.crash.world import World
from tests.processes import Child
from tests.store.files import look
from tests.store.scenes import Picture


class Scene:
    """A store and a world, in a folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.store = folder / "ditto.db"
        self.world = World(folder / "world.db")

    def look(self) -> Picture:
        """What is durable; asserts that it is whole."""
        return look(self.store)

    def kinds(self) -> list[str]:
        """The events' kinds, in their order, of all generations."""
        return [kind for _, _, kind, _, _ in self.look().events]


class Crew:
    """Two processes, of one test after another: they take long to begin. Whoever was left in mid-order is replaced."""

    def __init__(self) -> None:
        self._members: list[Stepped] = []

    def muster(self) -> tuple[Stepped, Stepped]:
        """Both, ready for orders."""
        for member in [each for each in self._members if not each.is_idle]:
            member.child.close()
            self._members.remove(member)
        new = [Stepped() for _ in range(2 - len(self._members))]
        for member in new:
            member.wait_until_ready()
        self._members += new
        return self._members[0], self._members[1]

    def close(self) -> None:
        """End both."""
        for member in self._members:
            member.child.close()


class Stepped:
    """A process. It is idle, stopped at a point, or under way."""

    def __init__(self) -> None:
        self.child = Child("from tests.crash.stepped import main; main()")
        self.at: str | None = None
        """The point that it stopped at."""
        self.result: Any = None
        """What its last order came to."""
        self.passed: list[str] = []
        """The points at which it has stopped in this order."""
        self.is_idle = False
        """It is ready for an order."""

    def wait_until_ready(self) -> None:
        """Until it has imported all it needs."""
        assert json.loads(self.child.line()) == {"ready": True}
        self.is_idle = True

    @property
    def holds_the_lock(self) -> bool:
        """It has stopped before a COMMIT."""
        return self.at is not None and self.at.endswith(":before") and ":effect:" not in self.at

    def begin(
        self, scene: Scene, do: str, id: str = "x", *, leave_at: str | None = None, waits: bool = False
    ) -> Stepped:
        """Order something, and wait until it stops for the first time, or is done. With `leave_at`, what is driven is
        let go of at that point; with `waits`, it is known not to arrive yet."""
        assert self.is_idle
        self.is_idle, self.result, self.passed = False, None, []
        order = {"do": do, "store": scene.store, "world": scene.folder / "world.db", "id": id, "leave_at": leave_at}
        self.child.tell(json.dumps(order, default=str))
        return self if waits else self.arrive()

    def leave(self) -> None:
        """Let it go on; `arrive` waits for where it gets to."""
        assert self.at is not None
        self.at = None
        self.child.tell()

    def arrive(self) -> Stepped:
        """Wait until it stops, or is done."""
        said = json.loads(self.child.line() or '{"ended": true}')
        if "at" in said:
            self.at = said["at"]
            self.passed.append(said["at"])
        else:
            self.result = said.get("result", said.get("error"))
            self.is_idle = "ended" not in said
        return self

    def go(self) -> Stepped:
        """On to the next point, or the end."""
        self.leave()
        return self.arrive()

    def go_to(self, point: str) -> Stepped:
        """On to this point."""
        while self.at != point:
            assert self.at is not None, f"{point} was not passed: {self.result}"
            self.go()
        return self

    def finish(self) -> Any:
        """On to the end; what the order came to."""
        while self.at is not None:
            self.go()
        return self.result


def interleave(processes: list[Stepped], chance: random.Random) -> None:
    """Move stopped processes to their ends, in an order of chance.

    A process that holds the write lock moves on first: who waits for it would not arrive.
    """
    while stopped := [each for each in processes if each.at is not None]:
        chance.choice([each for each in stopped if each.holds_the_lock] or stopped).go()
