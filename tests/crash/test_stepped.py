"""Two processes on one file, stepped by hand and by seeds: whoever is late writes nothing, and does nothing twice."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from ditto.store import transitions
from ditto.store.records import Event
from tests.crash.stepper import Crew, Scene, Stepped, interleave
from tests.store.files import opened
from tests.store.scenes import new_run

RESULT = {"first": "put x/1/first", "send": "send x/1/send", "last": "put x/1/last"}
ONCE = {("put", "x/1/first"): 1, ("send", "x/1/send"): 1, ("put", "x/1/last"): 1}
LEAVE_AT = ["flow:claimed:after", "flow/first:completed:after", "flow/send:completed:after"]
DEAD = "00000000-0000-0000-0000-000000000000"


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path / "scene")


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with closing(Crew()) as crew:
        yield crew


@pytest.fixture
def both(crew: Crew) -> tuple[Stepped, Stepped]:
    """Two processes."""
    return crew.muster()


def abandon(scene: Scene) -> None:
    """A run whose owner died before its first step."""

    async def create() -> None:
        async with opened(scene.store) as store:
            new = new_run("x", owner=DEAD)
            await store.commit(lambda tx: transitions.create_run(tx, new, (Event("run_created"),)))

    asyncio.run(create())


def declare_dead(scene: Scene) -> None:
    """Every owner looks dead from now on, as if somebody had cleared the folder away."""
    for file in scene.store.with_name("ditto.db.owners").iterdir():
        file.unlink()


def only_run(scene: Scene) -> tuple[str, int]:
    """Status and fence of the one run that there is."""
    [(_, _, status, _, fence, _, _)] = scene.look().runs
    return status, fence


def late_steps(scene: Scene) -> list[str]:
    return [step for _, _, kind, step, _ in scene.look().events if kind == "step_returned_late"]


# D02: an old list of abandoned runs


def test_d02_who_claims_by_an_old_list_changes_no_row_and_does_nothing(
    scene: Scene, both: tuple[Stepped, Stepped]
) -> None:
    abandon(scene)
    first, second = both
    for process in both:
        assert process.begin(scene, "recover").at == "flow:created:asked", "it has read the list"
    second.go_to("flow:claimed:asked")
    assert first.finish() == [["x", "completed", ""]]
    before = scene.look()
    assert second.finish() == [["x", "completed", ""]]
    assert [point for point in second.passed if "claimed" in point] == ["flow:claimed:asked"], "it was refused"
    assert not [point for point in second.passed if "effect" in point]
    assert scene.look() == before
    assert scene.world.calls() == ONCE
    assert only_run(scene) == ("completed", 2)


def test_d02_who_claims_while_another_drives_is_refused_and_leaves_it_to_him(
    scene: Scene, both: tuple[Stepped, Stepped]
) -> None:
    abandon(scene)
    first, second = both
    for process in both:
        process.begin(scene, "recover").go_to("flow:claimed:asked")
    first.go_to("flow/send:effect:before")
    assert second.finish() == [], "none is his"
    assert first.finish() == [["x", "completed", ""]]
    assert scene.world.calls() == ONCE
    assert scene.kinds().count("run_resumed") == 1


@pytest.mark.parametrize("way", ["let go", "killed"])
def test_d02_who_claims_what_was_claimed_and_given_back_looks_again(
    scene: Scene, both: tuple[Stepped, Stepped], way: str
) -> None:
    abandon(scene)
    first, second = both
    point = "flow/first:completed:after"
    first.begin(scene, "recover", leave_at=point if way == "let go" else None)
    second.begin(scene, "recover").go_to("flow:claimed:asked")
    first.go_to(point)
    if way == "killed":
        first.child.kill()
    else:
        assert first.finish() == "let go"
    assert only_run(scene) == ("interrupted" if way == "let go" else "running", 2)
    assert second.finish() == [["x", "completed", ""]]
    asked = [point for point in second.passed if "claimed" in point or point.endswith("first:effect")]
    assert asked == ["flow:claimed:asked", "flow:claimed:asked", "flow:claimed:before", "flow:claimed:after"]
    assert scene.world.calls() == ONCE
    assert only_run(scene) == ("completed", 3)


def play(both: tuple[Stepped, Stepped], folder: Path, seed: int) -> None:
    """Two processes take up an abandoned run at once, in an order of chance; one of them may give it back."""
    chance = random.Random(seed)
    scene = Scene(folder)
    abandon(scene)
    leave_at = chance.choice(
        [None, None, "flow:claimed:after", "flow/first:completed:after", "flow/send:completed:after"]
    )
    for process, point in zip(chance.sample(both, 2), (None, leave_at), strict=True):
        process.begin(scene, chance.choice(["run", "recover"]), leave_at=point)
    interleave(list(both), chance)
    status, fence = only_run(scene)
    assert fence == 1 + scene.kinds().count("run_resumed"), "each change of hands was decided on the one before"
    assert status == "completed" or leave_at is not None
    assert both[0].begin(scene, "run").finish() == RESULT
    assert scene.world.calls() == ONCE
    assert only_run(scene)[0] == "completed"
    assert scene.kinds().count("run_completed") == 1


def play_seeds(both: tuple[Stepped, Stepped], folder: Path, seeds: range) -> None:
    for seed in seeds:
        try:
            play(both, folder / str(seed), seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}; play it again with SEED={seed} and -k replay") from error
        shutil.rmtree(folder / str(seed))


def test_d02_interleaved_by_fifteen_seeds_the_work_is_done_once(both: tuple[Stepped, Stepped], tmp_path: Path) -> None:
    play_seeds(both, tmp_path, range(15))


@pytest.mark.sweep
def test_d02_interleaved_by_two_hundred_seeds_the_work_is_done_once(
    both: tuple[Stepped, Stepped], tmp_path: Path
) -> None:
    play_seeds(both, tmp_path, range(15, 215))


@pytest.mark.skipif("SEED" not in os.environ, reason="SEED names the seed to be played again")
def test_replay(both: tuple[Stepped, Stepped], tmp_path: Path) -> None:
    seed = int(os.environ["SEED"])
    play_seeds(both, tmp_path, range(seed, seed + 1))


# D05: who says that it is dead, and who says that it is done


def test_d05_what_is_completed_is_not_taken_up_by_who_thought_it_dead(
    scene: Scene, both: tuple[Stepped, Stepped]
) -> None:
    owner, watchdog = both
    owner.begin(scene, "run").go_to("flow/last:completed:asked")
    declare_dead(scene)
    watchdog.begin(scene, "recover").go_to("flow:claimed:asked")
    assert owner.finish() == RESULT
    before = scene.look()
    assert watchdog.finish() == [["x", "completed", ""]]
    assert scene.look() == before
    assert only_run(scene) == ("completed", 1)
    assert scene.world.calls() == ONCE


def test_d05_who_was_thought_dead_changes_nothing_and_its_result_is_kept_as_late(
    scene: Scene, both: tuple[Stepped, Stepped]
) -> None:
    owner, watchdog = both
    owner.begin(scene, "run").go_to("flow/send:effect:after")
    declare_dead(scene)
    assert watchdog.begin(scene, "recover").finish() == [["x", "completed", ""]]
    assert only_run(scene) == ("completed", 2)
    assert owner.finish() == "RunBusyError: run x was taken over by another runtime"
    assert only_run(scene) == ("completed", 2)
    assert late_steps(scene) == ["send"]
    assert scene.world.calls() == ONCE, "it was looked up, and not sent again"


@pytest.mark.parametrize("point", ["flow/send:effect:before", "flow/send:effect:after", "flow/send:completed:asked"])
def test_d05_what_is_cancelled_stays_cancelled_whatever_its_owner_says(
    scene: Scene, both: tuple[Stepped, Stepped], point: str
) -> None:
    owner, other = both
    owner.begin(scene, "run").go_to(point)
    other.begin(scene, "cancel").finish()
    assert owner.finish() == "RunCancelledError: run x was cancelled"
    assert only_run(scene)[0] == "cancelled"
    assert late_steps(scene) == ["send"]
    assert other.begin(scene, "run").finish() == "RunCancelledError: run x was cancelled"
    assert scene.world.calls() == {("put", "x/1/first"): 1, ("send", "x/1/send"): 1}


def test_d05_who_cancels_in_the_moment_of_a_commit_comes_after_it(scene: Scene, both: tuple[Stepped, Stepped]) -> None:
    owner, other = both
    owner.begin(scene, "run").go_to("flow/send:completed:before")
    other.begin(scene, "cancel", waits=True)
    assert owner.go().at == "flow/send:completed:after"
    assert other.arrive().result is None
    assert owner.finish() == "RunCancelledError: run x was cancelled"
    assert only_run(scene)[0] == "cancelled"
    assert ("x", "send", "completed", 1, '"send x/1/send"') in scene.look().steps


# D09: two who append at once


def test_d09_of_two_who_append_at_once_one_does_and_the_other_is_told_which(
    scene: Scene, both: tuple[Stepped, Stepped]
) -> None:
    """The session is a run id, each of whose generations is a turn."""
    first, second = both
    for _ in range(7):
        assert first.begin(scene, "run anew").finish() is not None
    for process in both:
        process.begin(scene, "run anew")
        process.go()
        assert process.at == "flow:created:asked", "it has seen seven turns, and is about to begin the eighth"
    first.go_to("flow/first:effect")
    assert second.finish() == (
        "RunBusyError: run x (generation 8) is driven by another runtime, which is alive; "
        "wait for it, or cancel the run"
    )
    assert first.finish()["send"] == "send x/8/send"
    assert second.begin(scene, "run anew").finish()["send"] == "send x/9/send"
    assert [(generation, status) for _, generation, status, *_ in scene.look().runs] == [
        (number, "completed") for number in range(1, 10)
    ]
    calls = scene.world.calls()
    assert {key for kind, key in calls if kind == "send"} == {f"x/{number}/send" for number in range(1, 10)}
    assert set(calls.values()) == {1}


def test_d09_of_two_who_begin_the_same_turn_the_later_one_goes_on_after_it(
    scene: Scene, both: tuple[Stepped, Stepped]
) -> None:
    first, second = both
    assert first.begin(scene, "run").finish() == RESULT
    for process in both:
        process.begin(scene, "run anew").go()
    assert first.finish()["send"] == "send x/2/send"
    assert second.finish()["send"] == "send x/3/send", "it was refused, read again, and appended"
    assert [generation for _, generation, *_ in scene.look().runs] == [1, 2, 3]
    assert set(scene.world.calls().values()) == {1}


def test_d09_of_two_who_go_on_from_the_same_point_one_does(scene: Scene, both: tuple[Stepped, Stepped]) -> None:
    first, second = both
    assert first.begin(scene, "loop", leave_at="turns/1/send:completed:after").finish() == "let go"
    for process in both:
        process.begin(scene, "loop").go_to("turns:claimed:asked")
    first.go_to("turns/2/send:admitted:after")
    assert second.finish().startswith("RunBusyError: run x is driven by another runtime")
    assert first.finish() == ["send x/1/1/send", "send x/1/2/send"]
    assert set(scene.world.calls().values()) == {1}
    assert only_run(scene) == ("completed", 2)


# A03: an owner that does not answer is not dead


@pytest.mark.parametrize("stopped", [False, True], ids=["its loop blocked", "stopped"])
@pytest.mark.parametrize("side", ["before", "after"])
def test_a03_an_owner_that_does_not_answer_is_not_replaced(
    scene: Scene, both: tuple[Stepped, Stepped], stopped: bool, side: str
) -> None:
    """Its lock is the kernel's, and no lease that must be renewed: nobody waits for one to lapse."""
    owner, other = both
    owner.begin(scene, "run").go_to(f"flow/send:effect:{side}")
    if stopped:
        os.kill(owner.child.pid, signal.SIGSTOP)
    before = scene.look()
    for _ in range(3):
        assert other.begin(scene, "recover").finish() == []
        assert other.begin(scene, "run").finish().startswith("RunBusyError: run x is driven by another runtime")
        assert not [point for point in other.passed if "effect" in point or "claimed" in point]
    assert scene.look() == before
    if stopped:
        os.kill(owner.child.pid, signal.SIGCONT)
    assert owner.finish() == RESULT
    assert scene.world.calls() == ONCE
    assert only_run(scene) == ("completed", 1)


def test_a03_what_an_owner_writes_with_an_old_fence_is_refused_and_kept_as_late(
    scene: Scene, both: tuple[Stepped, Stepped]
) -> None:
    owner, other = both
    owner.begin(scene, "run").go_to("flow/send:completed:asked")
    declare_dead(scene)
    other.begin(scene, "recover").go_to("flow/last:effect")
    assert only_run(scene) == ("running", 2)
    assert owner.finish() == "RunBusyError: run x was taken over by another runtime"
    assert late_steps(scene) == ["send"]
    assert other.finish() == [["x", "completed", ""]]
    assert scene.world.calls() == ONCE
    assert ("x", "send", "completed", 1, '"send x/1/send"') in scene.look().steps
