"""A model's text while it comes, from a real HTTP stream to whoever listens, over cancels, second tries and kills.

Between two chunks of a stream the provider waits until the test lets it go on, so that each piece is told before the
next one is sent.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from ditto import (
    Config,
    Ended,
    Endpoint,
    Graph,
    Heard,
    Message,
    ModelRef,
    ModelRequest,
    Piece,
    Restarted,
    RunCancelledError,
    Runtime,
    StepContext,
    Turn,
    TurnContext,
    UnknownOutcomeError,
    create_ditto,
)
from ditto.contracts import SampleInput
from ditto.testing.provider import Chunks, Drop, Raw, Reply, ScriptedProvider, sse
from ditto_workers import create_infer_worker
from tests.engine.scene import HANGS_S, Gate, LoopClock, events, on_disk, told
from tests.processes import Child
from tests.workers.test_infer_stream import calls, delta, part

ASK = Graph("ask").node(
    "said",
    "INFER.REASONING.SAMPLE",
    bind=lambda input: {
        "model": "scripted/tiny",
        "messages": [{"role": "user", "content": str(input)}],
        "stream": True,
    },
)


class Beats:
    """How a provider waits: until the test lets one more chunk pass."""

    def __init__(self) -> None:
        self._passes = asyncio.Semaphore(0)

    async def sleep(self, _: float) -> None:
        await self._passes.acquire()

    def go(self, chunks: int = 1) -> None:
        for _ in range(chunks):
            self._passes.release()


def stream(*deltas: Any, end: str | None = "stop") -> Chunks:
    """Each delta a chunk of its own, and the end another; before each one the provider waits."""
    chunks = [sse([each], done=False) for each in deltas]
    if end is not None:
        chunks.append(sse([delta(end)]))
    return Chunks(chunks, pauses_ms=[1] * len(chunks))


def texts(*pieces: str, end: str | None = "stop") -> Chunks:
    return stream(*(delta(content=piece) for piece in pieces), end=end)


class Scene:
    """A provider, and a runtime that asks it."""

    def __init__(self, provider: ScriptedProvider, beats: Beats, runtime: Runtime) -> None:
        self.provider = provider
        self.beats = beats
        self.runtime = runtime

    def start(self, graph: Graph = ASK) -> asyncio.Task[Any]:
        return asyncio.create_task(self.runtime.run(graph, {}, id="r"))

    def listen(self, *place: Any, **more: Any) -> Any:
        return self.runtime.listen("r", *place, **more)

    async def rest(self, *place: Any, **more: Any) -> list[Heard]:
        return [heard async for heard in self.listen(*place, **more)]

    async def next(self, heard: AsyncIterator[Heard]) -> Heard:
        """Lets one chunk pass, and gives what is told of it."""
        self.beats.go()
        return await anext(heard)

    async def partials(self) -> list[tuple[int, str, int, str]]:
        found = await events(self.runtime, "r")
        return [tuple(event.body.values()) for event in found if event.kind == "step_partial"]


def config_for(base_url: str, *, key: str | None = None, policy: str = "stop") -> Config:
    config = Config.model_validate({"runtime": {"on_unknown_model_call": policy}})
    endpoint = Endpoint(base_url=base_url, api_key=SecretStr(key) if key else None)
    return config.model_copy(update={"endpoints": {"scripted": endpoint}})


@asynccontextmanager
async def scene(folder: Path, *script: Reply, **settings: Any) -> AsyncIterator[Scene]:
    beats = Beats()
    async with (
        asyncio.timeout(HANGS_S),
        ScriptedProvider(folder / "model.sqlite", list(script), sleep=beats.sleep) as provider,
        create_ditto(
            config_for(provider.base_url, **settings), store=folder / "ditto.db", workers=[create_infer_worker()]
        ) as runtime,
    ):
        yield Scene(provider, beats, runtime)


def piece(offset: int, text: str, kind: Any = "text", *, attempt: int = 1) -> Piece:
    return Piece("r", "said", attempt, kind, offset, text)


def ended(state: str = "completed", attempt: int = 1) -> Ended:
    return Ended("r", "said", attempt, state)


RESTARTED = Restarted("r", "said", 2)


@pytest.mark.asyncio
async def test_each_chunk_is_told_before_the_next_one_is_sent(tmp_path: Path) -> None:
    answer = stream(
        delta(reasoning_content="Let me "), delta(reasoning="see"), delta(content="Hel"), delta(content="lo")
    )
    async with scene(tmp_path, answer) as it:
        running, heard, slow = it.start(), it.listen(), it.listen()
        assert await it.next(heard) == await anext(slow) == piece(0, "Let me ", "reasoning")
        assert await it.next(heard) == piece(7, "see", "reasoning")
        assert await it.next(heard) == piece(0, "Hel")
        middle = it.listen("said", {"reasoning": 10, "text": 1})
        assert await anext(middle) == piece(1, "el")
        assert await it.next(heard) == await anext(middle) == piece(3, "lo")
        assert on_disk(tmp_path / "ditto.db", "r") == {"said": "admitted"}
        assert await it.next(heard) == ended()
        assert on_disk(tmp_path / "ditto.db", "r") == {"said": "completed"}
        assert await anext(middle) == ended()
        message = (await running)["said"]["message"]
        assert (message["reasoning"], message["content"]) == ("Let me see", "Hello")
        assert [told async for told in slow] == [piece(7, "see", "reasoning"), piece(0, "Hello"), ended()]
        assert await it.rest("said", 3, attempt=1) == [piece(0, "Let me see", "reasoning"), piece(3, "lo"), ended()]
        assert (it.provider.count, it.runtime.partial_commits) == (1, 0)


@pytest.mark.asyncio
async def test_an_answer_that_was_not_streamed_is_told_from_the_record(tmp_path: Path) -> None:
    message = {"content": "Hello", "reasoning_content": "hm"}
    async with scene(tmp_path, Raw(json.dumps({"choices": [{"message": message, "finish_reason": "stop"}]}))) as it:
        running, heard = it.start(), it.listen()
        assert [told async for told in heard] == [piece(0, "hm", "reasoning"), piece(0, "Hello"), ended()]
        await running


@pytest.mark.asyncio
async def test_what_comes_with_tool_calls_is_told_when_it_is_durable(tmp_path: Path) -> None:
    answer = stream(
        delta(content="I look. "),
        calls(part(0, id="c1", name="look", arguments='{"at":')),
        delta(content="Now."),
        calls(part(0, arguments='"it"}')),
        end="tool_calls",
    )
    async with scene(tmp_path, answer) as it:
        running, heard = it.start(), it.listen()
        assert await it.next(heard) == piece(0, "I look. ")
        it.beats.go(3)
        assert await it.next(heard) == piece(8, "Now.")
        assert on_disk(tmp_path / "ditto.db", "r") == {"said": "completed"}
        assert await anext(heard) == ended()
        assert [call["name"] for call in (await running)["said"]["message"]["tool_calls"]] == ["look"]


@pytest.mark.asyncio
async def test_half_of_a_character_is_told_with_its_other_half(tmp_path: Path) -> None:
    chunks = [
        b'data: {"choices":[{"delta":{"content":"ok \\ud83c"}}]}\n\n',
        b'data: {"choices":[{"delta":{"content":"\\udf78 \\ud83c"}}]}\n\n',
        sse([delta("stop")]),
    ]
    async with scene(tmp_path, Chunks(chunks, pauses_ms=[1, 1, 1])) as it:
        running, heard = it.start(), it.listen()
        assert await it.next(heard) == piece(0, "ok ")
        assert await it.next(heard) == piece(3, "\U0001f378 ")
        assert await it.next(heard) == piece(5, "\ufffd")
        assert await anext(heard) == ended()
        assert (await running)["said"]["message"]["content"] == "ok \U0001f378 \ufffd"
        assert await it.rest() == [piece(0, "ok \U0001f378 \ufffd"), ended()]


@pytest.mark.asyncio
async def test_the_answers_of_a_turn_are_told_by_their_ordinals(tmp_path: Path) -> None:
    turn = Turn("test", "thread", "1", "scripted/tiny")
    gate = Gate()

    async def ask_mine(ctx: StepContext) -> Any:
        ctx.partial("My ")
        await gate.pause()
        ctx.partial("own")
        return {"in": "a shape of its own"}

    async def talk(ctx: TurnContext) -> str:
        request = SampleInput(model=ModelRef("scripted", "tiny"), messages=(Message(role="user"),), stream=True)
        await ctx.sample(request)
        await ctx.ask(ModelRequest("mine", {"messages": [], "tools": []}), ask_mine)
        return "said"

    def told(ordinal: int, offset: int, text: str) -> Piece:
        return Piece(turn.run_id, f"m/{ordinal}", 1, "text", offset, text)

    async with scene(tmp_path, texts("Hel", "lo")) as it:
        running = asyncio.create_task(it.runtime.turn(turn, talk))
        heard = it.runtime.listen(turn.run_id)
        assert [await it.next(heard), await it.next(heard)] == [told(1, 0, "Hel"), told(1, 3, "lo")]
        assert await it.next(heard) == Ended(turn.run_id, "m/1", 1, "completed")
        assert await anext(heard) == told(2, 0, "My ")
        gate.open()
        assert [each async for each in heard] == [told(2, 3, "own"), Ended(turn.run_id, "m/2", 1, "completed")]
        assert await running == "said"
        assert [each async for each in it.runtime.listen(turn.run_id)] == [
            told(1, 0, "Hello"),
            Ended(turn.run_id, "m/1", 1, "completed"),
            told(2, 0, "My own"),
            Ended(turn.run_id, "m/2", 1, "completed"),
        ]


# Secrets


KEY = "sk-live-0123456789"


def store_bytes(folder: Path) -> bytes:
    return b"".join(file.read_bytes() for file in folder.glob("ditto.db*") if file.is_file())


@pytest.mark.asyncio
async def test_a_secret_that_is_split_over_two_pieces_is_never_shown(tmp_path: Path) -> None:
    text = f"key {KEY}, sk-live-0 is none"
    safe = "key [redacted], sk-live-0 is none"
    cuts = range(1, len(text))
    script = [texts(text[:cut], text[cut:]) for cut in cuts]
    async with scene(tmp_path, *script, key=KEY) as it:
        clock = LoopClock()
        for cut in cuts:
            run_id = f"r-{cut}"
            running = asyncio.create_task(it.runtime.run(ASK, {}, id=run_id))
            heard = it.runtime.listen(run_id)
            it.beats.go()
            first = await anext(heard)
            assert isinstance(first, Piece)
            assert safe.startswith(first.text), cut
            clock.skip(1)
            await told(it.runtime, run_id, "step_partial")
            it.beats.go(2)
            shown = first.text + "".join([each.text async for each in heard if isinstance(each, Piece)])
            assert shown == (await running)["said"]["message"]["content"] == safe, cut
            recorded = [event.body for event in await events(it.runtime, run_id) if event.kind == "step_partial"]
            assert "".join(body["text"] for body in recorded) == safe[: sum(len(body["text"]) for body in recorded)]
    kept = store_bytes(tmp_path)
    assert b"[redacted]" in kept
    assert KEY[:-1].encode() not in kept, "nor nearly all of it"


# Cut short


TEN = [f"piece {number}. " for number in range(10)]


@pytest.mark.asyncio
async def test_e12_six_pieces_of_a_cancelled_stream_are_kept_as_partial_and_fed_to_no_model(tmp_path: Path) -> None:
    six = "".join(TEN[:6])
    async with scene(tmp_path, texts(*TEN), texts("again"), policy="ask_again") as it:
        running, heard = it.start(), it.listen()
        told_first = [await it.next(heard) for _ in range(6)]
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        assert [each.text for each in told_first if isinstance(each, Piece)] == TEN[:6]
        assert await it.partials() == [(1, "text", 0, six)]
        assert await it.rest() == [piece(0, six), ended("unknown")], "whoever loads it again sees what was seen"
        await it.provider.wait_for(gone=1)

        again = it.start()
        it.beats.go(2)
        assert (await again)["said"]["message"]["content"] == "again"
        assert await it.rest() == [Restarted("r", "said", 2), piece(0, "again", attempt=2), ended(attempt=2)]
        first, second = it.provider.requests()
        assert first.body == second.body
        assert "piece" not in str(second.body)


@pytest.mark.asyncio
async def test_e12_a_run_that_is_cancelled_for_good_keeps_what_was_shown(tmp_path: Path) -> None:
    async with scene(tmp_path, texts(*TEN)) as it:
        clock = LoopClock()
        running, heard = it.start(), it.listen()
        for _ in range(6):
            await it.next(heard)
        clock.skip(1)
        await told(it.runtime, "r", "step_partial")
        await it.runtime.cancel("r", actor="ada", reason="enough")
        it.beats.go(5)
        with pytest.raises(RunCancelledError):
            await running
        assert await it.partials() == [(1, "text", 0, "".join(TEN[:6]))]
        [late] = [event for event in await events(it.runtime, "r") if event.kind == "step_returned_late"]
        assert "".join(TEN) in late.body["value"]


@pytest.mark.asyncio
async def test_m04_listeners_are_told_of_the_restart_and_the_journal_holds_the_second_try(tmp_path: Path) -> None:
    first = stream(
        delta(content="Hel"),
        calls(part(0, id="c1", name="run", arguments='{"code":"pri')),
        delta(content="!"),
        end=None,
    )
    size = sum(map(len, first.pieces[:2]))
    second = stream(
        delta(content="Hello"),
        calls(part(0, id="c1", name="run", arguments='{"code":"print(1)"}')),
        end="tool_calls",
    )
    script = Drop("mid_body", after_bytes=size, reset=True, reply=first), second
    ran: list[str] = []
    graph = ASK.step(
        "ran", lambda said: ran.append(said["message"]["tool_calls"][0]["arguments"]), after=["said"], effect="write"
    )
    async with scene(tmp_path, *script, policy="ask_again") as it:
        running, heard, slow = it.start(graph), it.listen(), it.listen()
        assert await it.next(heard) == await anext(slow) == piece(0, "Hel")
        it.beats.go()
        assert await it.next(heard) == RESTARTED
        assert await it.next(heard) == piece(0, "Hello", attempt=2)
        it.beats.go(2)
        assert [told async for told in heard] == [ended(attempt=2)]
        assert [told async for told in slow] == [RESTARTED, piece(0, "Hello", attempt=2), ended(attempt=2)]
        assert (await running)["said"]["message"]["content"] == "Hello"
        assert ran == ['{"code":"print(1)"}']
        assert it.provider.count == 2
        assert await it.partials() == [(1, "text", 0, "Hel")]


@pytest.mark.asyncio
async def test_a_stream_that_was_lost_ends_unknown_with_what_was_shown(tmp_path: Path) -> None:
    async with scene(tmp_path, texts("Hel", "lo", end=None)) as it:
        running, heard = it.start(), it.listen()
        assert [await it.next(heard), await it.next(heard)] == [piece(0, "Hel"), piece(3, "lo")]
        with pytest.raises(UnknownOutcomeError):
            await running
        assert [told async for told in heard] == [ended("unknown")]
        assert await it.partials() == [(1, "text", 0, "Hello")]


# Killed


CHILD = """
import asyncio, sys, threading
from ditto import Piece, create_ditto
from ditto_workers import create_infer_worker
from tests.engine.scene import LoopClock, told
from tests.workers.test_live_text import ASK, config_for

async def main():
    base_url, store = sys.argv[1:]
    async with create_ditto(config_for(base_url), store=store, workers=[create_infer_worker()]) as runtime:
        clock = LoopClock()
        running = asyncio.create_task(runtime.run(ASK, {}, id="r"))
        async for heard in runtime.listen("r"):
            print(heard.text, flush=True)
            if heard.text == "two ":
                clock.skip(1)
                await told(runtime, "r", "step_partial")
                print("recorded", flush=True)

asyncio.run(main())
"""


@pytest.mark.asyncio
async def test_after_a_kill_in_the_middle_the_record_is_told_and_then_a_restart(
    tmp_path: Path, start_child: Callable[..., Child]
) -> None:
    script = texts("one ", "two ", "three "), texts("anew")
    async with scene(tmp_path, *script, policy="ask_again") as it:
        store = tmp_path / "killed" / "ditto.db"
        child = start_child(CHILD, it.provider.base_url, store)
        for word in ("one ", "two "):
            it.beats.go()
            assert await asyncio.to_thread(child.line) == word
        assert await asyncio.to_thread(child.line) == "recorded"
        it.beats.go()
        assert await asyncio.to_thread(child.line) == "three "
        await asyncio.to_thread(child.kill)

        config = config_for(it.provider.base_url, policy="ask_again")
        async with create_ditto(config, store=store, workers=[create_infer_worker()]) as runtime:
            # Of the last second nothing is left; nobody drives it, so nothing more comes.
            assert [heard async for heard in runtime.listen("r")] == [piece(0, "one two ")]
            running = asyncio.create_task(runtime.run(ASK, {}, id="r"))
            heard = runtime.listen("r")
            assert [await anext(heard), await anext(heard)] == [piece(0, "one two "), RESTARTED]
            it.beats.go(2)
            assert [told async for told in heard] == [piece(0, "anew", attempt=2), ended(attempt=2)]
            assert (await running)["said"]["message"]["content"] == "anew"
        assert it.provider.count == 2
