"""Live text: what who listens to a run is told, when, and what of it is recorded before there is an outcome."""

from __future__ import annotations

import asyncio
import gc
import queue
import sqlite3
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ditto import (
    Config,
    DefinitionError,
    EffectNotMade,
    Ended,
    Graph,
    Heard,
    Piece,
    Restarted,
    Retry,
    RunNotFoundError,
    Runtime,
    StepContext,
    StepError,
    UnknownOutcomeError,
    Worker,
    create_ditto,
)
from ditto.config import InferWorkerConfig, WorkersConfig
from ditto.store import queries
from tests.engine.scene import Gate, LoopClock, events, on_disk, opened, story, told, wait_until
from tests.processes import Child


class Talker:
    """A node type whose handler says and does what the test puts in: text, (kind, text), an error, or its end."""

    def __init__(self) -> None:
        self.inbox: asyncio.Queue[Any] = asyncio.Queue()
        self.attempts: list[int] = []

    def say(self, *acts: Any) -> None:
        for act in acts:
            self.inbox.put_nowait(act)

    def end(self, text: str, reasoning: str = "") -> None:
        """Return this value."""
        self.say({"said": text, "thought": reasoning})

    async def talk(self, arguments: Any, ctx: StepContext) -> Any:
        self.attempts.append(ctx.attempt)
        while True:
            match await self.inbox.get():
                case str(text):
                    ctx.partial(text)
                case (kind, text):
                    ctx.partial(text, kind=kind)
                case Exception() as error:
                    raise error
                case value:
                    return value

    def worker(self, *, effect: str = "infer", with_shown: bool = True) -> Worker:
        shown = (lambda value: {"text": value["said"], "reasoning": value["thought"]}) if with_shown else None
        return Worker("TALK").node("TALK.SAY", self.talk, effect=effect, shown=shown)


def saying(**options: Any) -> Graph:
    return Graph("saying").node("said", "TALK.SAY", **options)


class Scene:
    """A talker, a runtime, and a run of one step under way."""

    def __init__(self, talker: Talker, runtime: Runtime, running: asyncio.Task[Any]) -> None:
        self.talker = talker
        self.runtime = runtime
        self.running = running

    def listen(self, *place: Any, **more: Any) -> Any:
        return self.runtime.listen("r", *place, **more)

    async def rest(self, *place: Any, **more: Any) -> list[Heard]:
        return [heard async for heard in self.listen(*place, **more)]

    async def end(self, text: str, reasoning: str = "") -> None:
        self.talker.end(text, reasoning)
        await self.running

    async def fail(self, error: Exception) -> None:
        self.talker.say(error)
        with pytest.raises(StepError):
            await self.running


@asynccontextmanager
async def scene(
    path: Path, *, graph: Graph | None = None, worker: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[Scene]:
    talker = Talker()
    async with opened(path, workers=[talker.worker(**(worker or {}))], **settings) as runtime:
        running = asyncio.create_task(runtime.run(graph or saying(), {}, id="r"))
        yield Scene(talker, runtime, running)
        if not running.done():
            running.cancel()
        with suppress(asyncio.CancelledError, StepError, UnknownOutcomeError):
            await running


def piece(offset: int, text: str, kind: Any = "text", *, attempt: int = 1, step: str = "said") -> Piece:
    return Piece("r", step, attempt, kind, offset, text)


def restarted(attempt: int, step: str = "said") -> Restarted:
    return Restarted("r", step, attempt)


def ended(state: str = "completed", attempt: int = 1, step: str = "said") -> Ended:
    return Ended("r", step, attempt, state)


def partials(found: list[Any]) -> list[dict[str, Any]]:
    return [event.body for event in found if event.kind == "step_partial"]


# What is told, and when


@pytest.mark.asyncio
async def test_text_is_told_as_it_comes_and_the_end_when_it_is_on_disk(store_path: Path) -> None:
    async with scene(store_path) as it:
        heard = it.listen()
        it.talker.say("Hel")
        assert await anext(heard) == piece(0, "Hel")
        assert on_disk(store_path, "r") == {"said": "admitted"}
        it.talker.say(("reasoning", "hm"))
        assert await anext(heard) == piece(0, "hm", "reasoning")
        it.talker.say("lo")
        assert await anext(heard) == piece(3, "lo")
        it.talker.end("Hello!", "hm")
        assert await anext(heard) == piece(5, "!")
        assert await anext(heard) == ended()
        assert on_disk(store_path, "r") == {"said": "completed"}
        assert [told async for told in heard] == []
        assert await it.running == {"said": {"said": "Hello!", "thought": "hm"}}


@pytest.mark.asyncio
async def test_who_comes_in_the_middle_or_after_the_end_goes_on_where_he_was(store_path: Path) -> None:
    async with scene(store_path) as it:
        first = it.listen()
        it.talker.say(("reasoning", "so"), "Hello ")
        assert [await anext(first), await anext(first)] == [piece(0, "so", "reasoning"), piece(0, "Hello ")]
        late, again = it.listen("said", 2), it.listen("said", {"text": 6, "reasoning": 2}, attempt=1)
        assert [await anext(late), await anext(late)] == [piece(0, "so", "reasoning"), piece(2, "llo ")]
        it.talker.say("there")
        assert [await anext(each) for each in (first, late, again)] == [piece(6, "there")] * 3
        await it.end("Hello there", "so")
        assert [[told async for told in each] for each in (first, late, again)] == [[ended()]] * 3
        assert await it.rest() == [piece(0, "so", "reasoning"), piece(0, "Hello there"), ended()]
        assert await it.rest("said", {"text": 4, "reasoning": 2}) == [piece(4, "o there"), ended()]
        assert await it.rest("said", {"text": 11, "reasoning": 2}, attempt=1) == [ended()]
        assert await it.rest("other") == []


@pytest.mark.asyncio
async def test_a_slow_reader_keeps_nobody_waiting_and_is_told_the_rest_at_once(store_path: Path) -> None:
    async with scene(store_path) as it:
        slow, fast = it.listen(), it.listen()
        it.talker.say("0")
        assert await anext(slow) == await anext(fast) == piece(0, "0")
        for number in range(1, 500):
            it.talker.say(f" {number}")
            assert (await anext(fast)).text == f" {number}"
        assert await anext(slow) == piece(1, "".join(f" {number}" for number in range(1, 500)))
        whole = " ".join(map(str, range(500)))
        await it.end(whole)
        assert [told async for told in fast] == [ended()]
        assert await it.rest() == [piece(0, whole), ended()]
    assert [told async for told in slow] == [], "the runtime is closed: nobody is told any more"


@pytest.mark.asyncio
async def test_a_step_that_never_showed_anything_is_told_from_its_value(store_path: Path) -> None:
    async with scene(store_path) as it:
        heard = it.listen()
        await it.end("Hello", "hm")
        assert [told async for told in heard] == [piece(0, "hm", "reasoning"), piece(0, "Hello"), ended()]


@pytest.mark.asyncio
async def test_steps_side_by_side_are_told_apart_and_plain_steps_not_at_all(store_path: Path) -> None:
    graph = (
        Graph("two")
        .step("begin", lambda: 1, effect="pure")
        .node("a", "TALK.SAY", after=("begin",), bind=lambda begin: "a")
        .node("b", "TALK.SAY", after=("begin",), bind=lambda begin: "b")
    )

    async def talk(arguments: str, ctx: StepContext) -> Any:
        ctx.partial(f"{arguments}1")
        await gates[arguments].pause()
        ctx.partial(f"{arguments}2")
        return arguments

    gates = {"a": Gate(), "b": Gate()}
    async with opened(store_path, workers=[Worker("TALK").node("TALK.SAY", talk, effect="infer")]) as runtime:
        running = asyncio.create_task(runtime.run(graph, {}, id="r"))
        both, one = runtime.listen("r"), runtime.listen("r", "b")
        assert {await anext(both), await anext(both)} == {piece(0, "a1", step="a"), piece(0, "b1", step="b")}
        gates["b"].open()
        assert [await anext(both), await anext(both)] == [piece(2, "b2", step="b"), ended(step="b")]
        gates["a"].open()
        assert [told async for told in both] == [piece(2, "a2", step="a"), ended(step="a")]
        await running
        assert [told async for told in one] == [piece(0, "b1b2", step="b"), ended(step="b")]


@pytest.mark.asyncio
async def test_who_listens_before_the_run_has_begun_is_told_of_it(store_path: Path) -> None:
    async with scene(store_path) as it:
        heard = it.listen()
        first = asyncio.create_task(anext(heard))
        it.talker.say("a")
        assert await first == piece(0, "a")
        with pytest.raises(RunNotFoundError, match="other"):
            await anext(it.runtime.listen("other"))


@pytest.mark.parametrize(
    "place",
    [
        {"after": 3},
        {"attempt": 1},
        {"step": "said", "after": -1},
        {"step": "said", "after": {"sound": 1}},
        {"step": "said", "after": {"text": -1}},
    ],
)
@pytest.mark.asyncio
async def test_a_place_that_makes_no_sense_is_refused(store_path: Path, place: dict[str, Any]) -> None:
    async with opened(store_path) as runtime:
        with pytest.raises(DefinitionError, match="listen"):
            await anext(runtime.listen("r", **place))


@pytest.mark.parametrize("effect", ["infer", "idempotent"])
@pytest.mark.asyncio
async def test_another_attempt_begins_with_a_restart(store_path: Path, effect: str) -> None:
    graph = saying(retry=Retry(2, initial_s=0))
    async with scene(store_path, graph=graph, worker={"effect": effect}) as it:
        heard, slow = it.listen(), it.listen()
        it.talker.say("Hel")
        assert await anext(heard) == await anext(slow) == piece(0, "Hel")
        it.talker.say(EffectNotMade("busy"), "Good")
        assert [await anext(heard), await anext(heard)] == [restarted(2), piece(0, "Good", attempt=2)]
        await it.end("Good day")
        assert [told async for told in heard] == [piece(4, " day", attempt=2), ended(attempt=2)]
        assert [told async for told in slow] == [restarted(2), piece(0, "Good day", attempt=2), ended(attempt=2)]
        assert await it.rest("said", 3, attempt=1) == [restarted(2), piece(0, "Good day", attempt=2), ended(attempt=2)]
        assert await it.rest("said", 4, attempt=2) == [piece(4, " day", attempt=2), ended(attempt=2)]
        assert await it.rest("said", 4) == [piece(4, " day", attempt=2), ended(attempt=2)]
        assert partials(await events(it.runtime, "r")) == [
            {"attempt": 1, "kind": "text", "offset": 0, "text": "Hel"}
        ], "of what is in the outcome nothing is kept twice"


@pytest.mark.asyncio
async def test_an_attempt_that_shows_nothing_restarts_nobody_who_has_nothing(store_path: Path) -> None:
    async with scene(store_path, graph=saying(retry=Retry(2, initial_s=0))) as it:
        heard = it.listen()
        it.talker.say(EffectNotMade("busy"))
        await it.end("")
        assert [told async for told in heard] == [ended(attempt=2)]


@pytest.mark.parametrize(("error", "state"), [(EffectNotMade("no"), "refused"), (OSError("cut"), "unknown")])
@pytest.mark.asyncio
async def test_a_step_without_a_value_ends_with_what_was_shown(store_path: Path, error: Exception, state: str) -> None:
    async with scene(store_path) as it:
        heard = it.listen()
        it.talker.say(("reasoning", "hm"), "Hel")
        assert [await anext(heard), await anext(heard)] == [piece(0, "hm", "reasoning"), piece(0, "Hel")]
        it.talker.say("lo", error)
        with pytest.raises((StepError, UnknownOutcomeError)):
            await it.running
        assert [told async for told in heard] == [piece(3, "lo"), ended(state)]
        assert await it.rest() == [piece(0, "hm", "reasoning"), piece(0, "Hello"), ended(state)]


@pytest.mark.asyncio
async def test_an_answer_that_a_person_gives_takes_the_place_of_what_was_shown(store_path: Path) -> None:
    async with scene(store_path) as it:
        it.talker.say("Hello", OSError("cut"))
        with pytest.raises(UnknownOutcomeError):
            await it.running
        await it.runtime.resolve(
            "r", "said", actor="ada", reason="it was logged", response={"said": "Hell no", "thought": ""}
        )
        # What stands is told, not what came before it.
        assert await it.rest() == [piece(0, "Hell no"), ended()]


@pytest.mark.parametrize(("decided", "expected"), [
    ("Hello there", [piece(5, " there"), ended()]),
    ("Hell no", [restarted(1), piece(0, "Hell no"), ended()]),
    ("Hell", [restarted(1), piece(0, "Hell"), ended()]),
])  # fmt: skip
@pytest.mark.asyncio
async def test_what_was_shown_and_is_not_recorded_is_taken_back(
    store_path: Path, decided: str, expected: list[Heard]
) -> None:
    graph = saying().step("other", lambda ctx: gate.pause())
    async with scene(store_path, graph=graph) as it:
        gate = Gate()
        heard = it.listen()
        it.talker.say("Hello", OSError("cut"))
        assert [await anext(heard), await anext(heard)] == [piece(0, "Hello"), ended("unknown")]
        # The other branch goes on meanwhile.
        async with opened(store_path) as outside:
            await outside.resolve(
                "r", "said", actor="ada", reason="it was logged", response={"said": decided, "thought": ""}
            )
        assert [await anext(heard) for _ in expected] == expected
        gate.open()
        assert [told async for told in heard] == []


@pytest.mark.asyncio
async def test_a_handler_that_shows_something_else_than_it_returns_is_corrected(store_path: Path) -> None:
    async with scene(store_path) as it:
        heard = it.listen()
        it.talker.say("Hello")
        assert await anext(heard) == piece(0, "Hello")
        await it.end("Hell")
        assert [told async for told in heard] == [restarted(1), piece(0, "Hell"), ended()]
        assert await it.rest() == [piece(0, "Hell"), ended()]
        assert partials(await events(it.runtime, "r")) == [{"attempt": 1, "kind": "text", "offset": 0, "text": "Hello"}]


@pytest.mark.asyncio
async def test_of_a_value_that_its_worker_cannot_read_what_was_shown_is_kept(store_path: Path) -> None:
    async with scene(store_path) as it:
        heard = it.listen()
        it.talker.say("Hello")
        assert await anext(heard) == piece(0, "Hello")
        it.talker.say({"another": "shape"})
        await it.running
        assert [told async for told in heard] == [ended()]
        assert await it.rest() == [piece(0, "Hello"), ended()]


# From a thread, in any pieces, of any size


@pytest.mark.asyncio
async def test_a_handler_in_a_thread_shows_text_in_its_order(store_path: Path) -> None:
    def talk(arguments: Any, ctx: StepContext) -> str:
        for number in range(200):
            ctx.partial(f"{number} ")
        return "".join(f"{number} " for number in range(200))

    worker = Worker("TALK").node("TALK.SAY", talk, effect="infer", shown=lambda value: {"text": value})
    async with opened(store_path, workers=[worker]) as runtime:
        running = asyncio.create_task(runtime.run(saying(), {}, id="r"))
        heard = [told async for told in runtime.listen("r")]
        assert "".join(told.text for told in heard if isinstance(told, Piece)) == (await running)["said"]
        assert heard[-1] == ended()


@pytest.mark.asyncio
async def test_what_a_thread_shows_after_its_deadline_is_not_told(store_path: Path) -> None:
    late = asyncio.Event()
    loop = asyncio.get_running_loop()
    contexts: list[StepContext] = []

    def talk(arguments: Any, ctx: StepContext) -> str:
        ctx.partial("in time")
        contexts.append(ctx)
        loop.call_soon_threadsafe(late.set)
        return "".join(iter(gate.get, None))

    gate: queue.Queue[str | None] = queue.Queue()
    worker = Worker("TALK").node("TALK.SAY", talk, effect="infer")
    async with opened(store_path, workers=[worker]) as runtime:
        clock = LoopClock()
        running = asyncio.create_task(runtime.run(saying(timeout_s=30), {}, id="r"))
        await late.wait()
        clock.skip(31)
        with pytest.raises(UnknownOutcomeError):
            await running
        await asyncio.to_thread(contexts[0].partial, " too late")
        gate.put(None)
        assert [told async for told in runtime.listen("r")] == [piece(0, "in time"), ended("unknown")]


TEXT = 'ab\U0001f378é\n"\\ cd'


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, len(TEXT)), max_size=6).map(sorted), st.integers(0, len(TEXT)))
def test_offsets_are_those_of_the_text_however_it_is_cut(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int], after: int
) -> None:
    path = tmp_path_factory.mktemp("cuts") / "ditto.db"
    borders = [0, *cuts, len(TEXT)]
    pieces = [TEXT[start:stop] for start, stop in pairwise(borders)]

    async def main() -> None:
        async with scene(path) as it:
            live = it.listen()
            for text in pieces:
                it.talker.say(text)
                if text:
                    assert (await anext(live)).text == text
            reattached = it.listen("said", after)
            if after < len(TEXT):
                assert await anext(reattached) == piece(after, TEXT[after:])
            await it.end(TEXT)
            assert [told async for told in live] == [told async for told in reattached] == [ended()]
            assert await it.rest("said", after) == [*([piece(after, TEXT[after:])] if TEXT[after:] else []), ended()]

    asyncio.run(main())


@pytest.mark.asyncio
async def test_halves_of_a_character_are_joined_and_lone_ones_replaced(store_path: Path) -> None:
    async with scene(store_path) as it:
        heard = it.listen()
        it.talker.say("a\ud83c")
        assert await anext(heard) == piece(0, "a")
        it.talker.say("\udf78b")
        assert await anext(heard) == piece(1, "\U0001f378b")
        it.talker.say("\udf78c\ud83c")
        assert await anext(heard) == piece(3, "\ufffdc")
        it.talker.say("d")
        assert await anext(heard) == piece(5, "\ufffdd")
        await it.end("a\U0001f378b\ufffdc\ufffdd.")
        assert [told async for told in heard] == [piece(7, "."), ended()]


@pytest.mark.asyncio
async def test_text_beyond_the_limit_of_a_response_comes_with_the_outcome(store_path: Path) -> None:
    talker = Talker()
    config = Config(workers=WorkersConfig(infer=InferWorkerConfig(response_max_bytes=1024)))
    async with create_ditto(config, store=store_path, workers=[talker.worker()]) as runtime:
        running = asyncio.create_task(runtime.run(saying(), {}, id="r"))
        heard = runtime.listen("r")
        talker.say("x" * 1000)
        assert await anext(heard) == piece(0, "x" * 1000)
        talker.say("y" * 1000)
        assert await anext(heard) == piece(1000, "y" * 24)
        talker.say("z" * 1000)
        talker.end("x" * 1000 + "y" * 1000 + "z" * 1000)
        await running
        assert [told async for told in heard] == [piece(1024, "y" * 976 + "z" * 1000), ended()]


@pytest.mark.parametrize(("text", "kind"), [(b"bytes", "text"), (None, "text"), ("a", "sound")])
@pytest.mark.asyncio
async def test_what_is_no_text_is_a_mistake_of_the_handler(store_path: Path, text: Any, kind: Any) -> None:
    async with scene(store_path, worker={"effect": "idempotent"}) as it:
        it.talker.say((kind, text))
        with pytest.raises(StepError, match="takes a str"):
            await it.running


# What is recorded meanwhile


@pytest.mark.asyncio
async def test_shown_text_is_recorded_once_a_second_and_counted_apart(store_path: Path) -> None:
    async with scene(store_path) as it:
        clock, heard = LoopClock(), it.listen()
        it.talker.say("Hel", ("reasoning", "hm"))
        assert {await anext(heard), await anext(heard)} == {piece(0, "Hel"), piece(0, "hm", "reasoning")}
        clock.skip(0.9)
        it.talker.say("lo")
        assert await anext(heard) == piece(3, "lo")
        commits = it.runtime.commits
        assert it.runtime.partial_commits == 0
        clock.skip(0.1)
        await told(it.runtime, "r", "step_partial")
        assert (it.runtime.commits, it.runtime.partial_commits) == (commits, 1)
        it.talker.say(" you")
        assert await anext(heard) == piece(5, " you")
        clock.skip(0.9)
        await asyncio.sleep(0)
        clock.skip(0.1)
        await wait_until(lambda: it.runtime.partial_commits == 2)
        it.talker.say("!")
        assert await anext(heard) == piece(9, "!")
        await it.end("Hello you!", "hm")
        assert (it.runtime.commits, it.runtime.partial_commits) == (commits + 1, 2)
        assert partials(await events(it.runtime, "r")) == [
            {"attempt": 1, "kind": "text", "offset": 0, "text": "Hello"},
            {"attempt": 1, "kind": "reasoning", "offset": 0, "text": "hm"},
            {"attempt": 1, "kind": "text", "offset": 5, "text": " you"},
        ]


@pytest.mark.asyncio
async def test_a_short_answer_costs_no_commit_and_no_event_more(tmp_path: Path) -> None:
    stories, commits = [], []
    for pieces in ([], ["Hel", "lo"]):
        async with scene(tmp_path / f"{len(pieces)}.db") as it:
            it.talker.say(*pieces)
            await it.end("Hello")
            stories.append(await story(it.runtime, "r"))
            commits.append((it.runtime.commits, it.runtime.partial_commits))
    assert stories[0] == stories[1]
    assert commits[0] == commits[1]
    assert commits[0][1] == 0


@pytest.mark.asyncio
async def test_without_a_worker_that_reads_the_value_all_that_was_shown_is_recorded(store_path: Path) -> None:
    async with scene(store_path, worker={"with_shown": False, "effect": "pure"}) as it:
        it.talker.say("Hel", "lo")
        await it.end("something else")
        assert await story(it.runtime, "r") == [
            "run_created", "step_partial said", "step_completed said", "run_completed",
        ]  # fmt: skip
        assert await it.rest() == [piece(0, "Hello"), ended()]


@pytest.mark.parametrize("effect", ["infer", "idempotent"])
@pytest.mark.asyncio
async def test_a_cancelled_attempt_leaves_what_it_showed(store_path: Path, effect: str) -> None:
    async with scene(store_path, worker={"effect": effect}) as it:
        heard = it.listen()
        it.talker.say("Hel")
        assert await anext(heard) == piece(0, "Hel")
        it.running.cancel()
        rest = [told async for told in heard]
        assert rest == ([ended("unknown")] if effect == "infer" else [])
        assert partials(await events(it.runtime, "r")) == [{"attempt": 1, "kind": "text", "offset": 0, "text": "Hel"}]
        with suppress(asyncio.CancelledError):
            await it.running
        assert await it.rest() == [piece(0, "Hel"), *rest]


@pytest.mark.asyncio
async def test_a_step_that_is_run_anew_restarts_although_it_counts_from_one(store_path: Path) -> None:
    async with scene(store_path, worker={"effect": "idempotent"}) as it:
        heard = it.listen()
        it.talker.say("Hel")
        assert await anext(heard) == piece(0, "Hel")
        it.running.cancel()
        assert [told async for told in heard] == []
        running = asyncio.create_task(it.runtime.run(saying(), {}, id="r"))
        # `runtime.run` has claimed it when the first text comes.
        it.talker.say("Good")
        heard = it.listen()
        assert [await anext(heard) for _ in range(3)] == [piece(0, "Hel"), restarted(1), piece(0, "Good")]
        reattached = it.listen("said", 3, attempt=1)
        assert [await anext(reattached) for _ in range(2)] == [restarted(1), piece(0, "Good")]
        it.talker.end("Good day")
        await running
        assert it.talker.attempts == [1, 1]
        assert [told async for told in heard] == [piece(4, " day"), ended()]


@pytest.mark.asyncio
async def test_shown_text_is_no_progress_of_its_run(store_path: Path) -> None:
    async with scene(store_path, worker={"effect": "idempotent"}) as it:
        clock, heard = LoopClock(), it.listen()
        it.talker.say("Hel")
        assert await anext(heard) == piece(0, "Hel")
        clock.skip(1)
        await told(it.runtime, "r", "step_partial")
        store = it.runtime._opened.store  # type: ignore[union-attr]
        run = await store.read(queries.get_run, "r")
        assert run is not None
        assert run.seq == run.claimed_seq == 2
        await it.end("Hello")


@pytest.mark.asyncio
async def test_text_that_could_not_be_recorded_is_recorded_the_next_time(
    store_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    talker = Talker()
    config = Config.model_validate({"store": {"busy_timeout_s": 0.01}})
    async with create_ditto(config, store=store_path, workers=[talker.worker()]) as runtime:
        clock = LoopClock()
        running = asyncio.create_task(runtime.run(saying(), {}, id="r"))
        heard = runtime.listen("r")
        talker.say("Hel")
        assert await anext(heard) == piece(0, "Hel")
        with closing(sqlite3.connect(store_path, isolation_level=None)) as another:
            another.execute("BEGIN IMMEDIATE")
            clock.skip(1)
            await wait_until(lambda: "text that was shown is not recorded yet" in caplog.text)
        talker.say("lo")
        assert await anext(heard) == piece(3, "lo")
        clock.skip(1)
        await told(runtime, "r", "step_partial")
        assert partials(await events(runtime, "r")) == [{"attempt": 1, "kind": "text", "offset": 0, "text": "Hello"}]
        talker.end("Hello")
        await running


# Runs that somebody else drives


@pytest.mark.asyncio
async def test_a_run_of_another_runtime_is_told_as_it_is_recorded(store_path: Path) -> None:
    async with scene(store_path) as it, opened(store_path, workers=[Talker().worker()]) as outside:
        clock, live = LoopClock(), it.listen()
        it.talker.say("Hel")
        assert await anext(live) == piece(0, "Hel")
        heard = outside.listen("r")
        first = asyncio.create_task(anext(heard))
        it.talker.say("lo")
        assert await anext(live) == piece(3, "lo")
        clock.skip(1)
        assert await first == piece(0, "Hello")
        await it.end("Hello!")
        assert [told async for told in heard] == [piece(5, "!"), ended()]


CHILD = """
import asyncio, sys
from ditto import Graph, Worker, create_ditto
from tests.engine.scene import LoopClock, told

async def talk(arguments, ctx):
    ctx.partial("Hel")
    LoopClock().skip(1)
    await told(runtime, "r", "step_partial")
    print("recorded", flush=True)
    await asyncio.Event().wait()

async def main():
    global runtime
    runtime = create_ditto(store=sys.argv[1], workers=[Worker("TALK").node("TALK.SAY", talk, effect="infer")])
    await runtime.run(Graph("saying").node("said", "TALK.SAY"), {}, id="r")

asyncio.run(main())
"""


@pytest.mark.asyncio
async def test_listening_ends_when_the_process_that_drives_the_run_dies(
    store_path: Path, start_child: Callable[..., Child]
) -> None:
    child = start_child(CHILD, store_path)
    assert await asyncio.to_thread(child.line) == "recorded"
    async with opened(store_path) as runtime:
        heard = runtime.listen("r")
        assert await anext(heard) == piece(0, "Hel")
        rest = asyncio.create_task(anext(heard, None))
        await asyncio.to_thread(child.kill)
        assert await rest is None


# Nothing is left behind


@pytest.mark.asyncio
async def test_readers_that_leave_early_leave_nothing_behind(store_path: Path) -> None:
    async with scene(store_path) as it:
        first = it.listen()
        it.talker.say("Hel")
        assert await anext(first) == piece(0, "Hel")
        await first.aclose()
        [drive] = it.runtime._opened.engine.drives.values()  # type: ignore[union-attr]
        tasks = asyncio.all_tasks()

        async def leave_while_waiting() -> None:
            heard = it.listen("said", 3)
            waiting = asyncio.create_task(anext(heard))
            await wait_until(lambda: bool(drive.live.changed._event._waiters))
            waiting.cancel()
            with suppress(asyncio.CancelledError):
                await waiting

        async def leave_at_a_piece() -> weakref.ref[Any]:
            async for heard in (leaving := it.listen()):
                assert heard == piece(0, "Hel")
                break
            return weakref.ref(leaving)

        await leave_while_waiting()
        gone = await leave_at_a_piece()
        gc.collect()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert gone() is None
        assert not drive.live.changed._event._waiters
        assert asyncio.all_tasks() <= tasks
        await it.end("Hello")
        assert not drive.live.speeches, "text is kept while its step runs, and no longer"
