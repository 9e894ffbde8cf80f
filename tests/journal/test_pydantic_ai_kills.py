"""An ordinary agent of Pydantic AI's, killed by SIGKILL and started again: one decision, each effect once.

The provider and the world outside count for themselves, in files of their own.
"""

from __future__ import annotations

import json
import signal
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from anyio import to_thread

from ditto.testing.provider import ScriptedProvider
from tests.crash.world import World
from tests.journal.pydantic_scene import DONE, TOOLS, report
from tests.nursery import Nursery

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass
class Stage:
    """One provider, and processes that come and go."""

    provider: ScriptedProvider
    nursery: Nursery
    folder: Path
    cases: int = 0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    """Bears processes whose provider runs here."""
    folder = tmp_path_factory.mktemp("kills")
    async with ScriptedProvider(folder / "model.db", report, strict=True) as provider:
        nursery = Nursery("tests.journal.pydantic_scene", provider.base_url)
        try:
            stage = Stage(provider, nursery, folder)
            await Case(stage, "generate", 1).live()  # it asks the provider itself, to warm up
            yield stage
        finally:
            await to_thread.run_sync(nursery.close)


class Case:
    """One turn, over several processes."""

    def __init__(self, stage: Stage, mode: str, tools: int) -> None:
        self.stage = stage
        stage.cases += 1
        self.folder = stage.folder / str(stage.cases)
        self.folder.mkdir()
        self.mode = mode
        self.tools = tools
        self.asked_before = stage.provider.count
        self.world = World(self.folder / "world.db")

    @property
    def asked(self) -> int:
        """Requests that the provider got in this case."""
        return self.stage.provider.count - self.asked_before

    async def live(self, **order: Any) -> dict[str, Any]:
        """One process."""
        given = {
            "store": self.folder / "ditto.db",
            "world": self.folder / "world.db",
            "base_url": self.stage.provider.base_url,
            "mode": self.mode,
            "tools": self.tools,
            **order,
        }
        return await to_thread.run_sync(lambda: self.stage.nursery.bear(**given))

    async def points(self) -> list[str]:
        """Every point that an undisturbed run passes, `#2` for the second time."""
        record = self.folder / "points.txt"
        assert (await self.live(record=record))["result"]["output"] == DONE
        seen: Counter[str] = Counter()
        named = []
        for point in record.read_text(encoding="utf-8").splitlines():
            seen[point] += 1
            named.append(point if seen[point] == 1 else f"{point}#{seen[point]}")
        return named

    def check_effects(self, note: str) -> None:
        """Each tool acted once."""
        made = Counter(kind for kind, _ in self.world.calls().elements())
        assert made == Counter(TOOLS[: self.tools]), note

    def states(self) -> dict[str, str]:
        """How each step stands."""
        with closing(sqlite3.connect(self.folder / "ditto.db")) as db:
            return dict(db.execute("SELECT path, state FROM ditto_steps"))


shapes = pytest.mark.parametrize(("mode", "tools"), [(m, t) for m in ("generate", "stream") for t in (1, 3)])


async def visit(stage: Stage, mode: str, tools: int, point: dict[str, str]) -> None:
    """Killed at a point, and gone on with: effects once, and at most one further answer, by policy."""
    note = f"{mode}, {tools} tools, {point}"
    case = Case(stage, mode, tools)
    killed = await case.live(**point)
    assert killed == {"signal": signal.SIGKILL}, note
    lost = [path for path, state in case.states().items() if path.startswith("m/") and state == "admitted"]
    again = await case.live(policy="ask_again")
    assert again["result"]["output"] == DONE, f"{note}: {again}"
    case.check_effects(note)
    assert set(case.states().values()) == {"completed"}, note
    assert case.asked <= 2 + len(lost), note
    asked = case.asked
    assert (await case.live())["result"]["output"] == DONE, note
    assert case.asked == asked, note
    case.check_effects(note)


modes = pytest.mark.parametrize("mode", ["generate", "stream"])


@modes
@pytest.mark.parametrize("side", ["before", "after"])
async def test_killed_inside_a_tool(stage: Stage, mode: str, side: str) -> None:
    """Whether it acted or not is looked up; the model is not asked again."""
    case = Case(stage, mode, 3)
    assert await case.live(kill_in=f"beta:{side}") == {"signal": signal.SIGKILL}
    assert case.asked == 1
    result = (await case.live())["result"]
    assert result["output"] == DONE
    assert case.asked == 2
    case.check_effects(f"{mode} {side}")


@pytest.mark.parametrize("effect", ["read", "idempotent"])
async def test_a_call_that_may_be_repeated_is_repeated_three_times(stage: Stage, effect: str) -> None:
    """And then the model is told that it never ended."""
    case = Case(stage, "generate", 1)
    for _ in range(3):
        assert await case.live(kill_in="alpha:after", effect=effect) == {"signal": signal.SIGKILL}
    assert (await case.live(effect=effect))["result"]["output"] == DONE
    assert sum(case.world.calls().values()) == 3
    assert case.asked == 2
    told = stage.provider.requests()[-1].body["messages"][-1]
    assert "was begun 3 times" in told["content"]


@modes
async def test_killed_between_question_and_answer_it_is_unknown_and_not_asked_again(stage: Stage, mode: str) -> None:
    case = Case(stage, mode, 1)
    assert await case.live(at="turn/m/1:admitted:after") == {"signal": signal.SIGKILL}
    for _ in range(2):
        assert "UnknownOutcomeError" in (await case.live())["error"]
    assert case.asked == 0
    assert case.world.calls() == Counter()


@shapes
async def test_killed_at_a_few_points(stage: Stage, mode: str, tools: int) -> None:
    points = await Case(stage, mode, tools).points()
    step = len(points) // 3
    for point in points[step - 1 :: step]:
        await visit(stage, mode, tools, {"at": point})


@pytest.mark.sweep
@shapes
async def test_killed_at_every_point(stage: Stage, mode: str, tools: int) -> None:
    points = [{"at": point} for point in await Case(stage, mode, tools).points()]
    points += [{"kill_in": f"{name}:{side}"} for name in TOOLS[:tools] for side in ("before", "after")]
    for point in points:
        await visit(stage, mode, tools, point)


async def test_an_ordinary_program_killed_in_its_second_tool(tmp_path: Path, start_child: Any) -> None:
    """A process of its own, with nothing shared but the files: started, killed in the second tool, started again."""
    async with ScriptedProvider(tmp_path / "model.db", report, strict=True) as provider:
        order = {
            "store": str(tmp_path / "ditto.db"),
            "world": str(tmp_path / "world.db"),
            "base_url": provider.base_url,
            "mode": "generate",
            "tools": 2,
        }
        source = "import json, sys\nfrom tests.journal.pydantic_scene import live\nprint(live(json.loads(sys.argv[1])))"
        killed = start_child(source, json.dumps({**order, "kill_in": "beta:after"}))
        assert await to_thread.run_sync(killed.end) == (-signal.SIGKILL, [])
        assert provider.count == 1
        again = start_child(source, json.dumps(order))
        assert await to_thread.run_sync(again.end) == (0, [str({"output": DONE, "events": []})])
        assert provider.count == 2
    made = World(tmp_path / "world.db").calls()
    assert Counter(kind for kind, _ in made.elements()) == Counter(["alpha", "beta"])
