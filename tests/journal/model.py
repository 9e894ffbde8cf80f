"""A scripted model in a process of its own: `python -m tests.journal.model DB`, which prints its address.

The first user message of a conversation says what it takes: `{"tools": n, "rounds": n, …}` as JSON; if it is `slow`, it
is not answered at all. The ids of the
calls count the requests of the conversation: whoever asks again gets other ones.
"""

from __future__ import annotations

import json
import sys
from typing import Any, Final

import anyio

from ditto.testing.provider import Call, Reply, ScriptedProvider, Stall, Text, ToolCalls, first_user_message

TOOLS: Final = ("notify", "publish", "look")


def script(request: dict[str, Any], index: int) -> Reply:
    """Calls of the first so many tools in each round, then a text."""
    messages = request["messages"]
    told = json.loads(next(message["content"] for message in messages if message["role"] == "user"))
    if told.get("slow"):
        return Stall()
    rounds = sum(message["role"] == "assistant" for message in messages)
    if rounds == told["rounds"]:
        return Text("done")
    made = enumerate(TOOLS[: told["tools"]])
    return ToolCalls([Call(f"c{index}_{at}", name, json.dumps({"text": f"{rounds}"})) for at, name in made])


async def serve(db: str) -> None:
    """Until the input ends."""
    async with ScriptedProvider(db, script, strict=True, conversation=first_user_message) as provider:
        sys.stdout.write(provider.base_url + "\n")
        sys.stdout.flush()
        await anyio.to_thread.run_sync(sys.stdin.read)


if __name__ == "__main__":
    anyio.run(serve, sys.argv[1])
