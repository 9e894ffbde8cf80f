"""The same agent against a model server that others wrote: fakellm, from the package index, in a process of its own."""

from __future__ import annotations

import json
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
from anyio import to_thread

from tests.crash.world import World
from tests.journal.pydantic_scene import DONE

pytestmark = pytest.mark.asyncio

SERVER = """
import os, socket, sys
os.environ["FAKELLM_CONFIG"] = sys.argv[1]
import uvicorn
from fakellm.server import app
bound = socket.socket()
bound.bind(("127.0.0.1", 0))
bound.listen()
print(bound.getsockname()[1], flush=True)
uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[bound])
"""

RULES = f"""
version: 1
rules:
  - name: the end
    when: {{tool_result_contains: beta is out}}
    respond: {{content: "{DONE}"}}
  - name: the report
    when: {{tools_include: beta}}
    respond:
      tool_calls:
        - {{name: alpha, arguments: {{text: alpha}}}}
        - {{name: beta, arguments: {{text: beta}}}}
"""

LIFE = "import json, sys\nfrom tests.journal.pydantic_scene import live\nprint(live(json.loads(sys.argv[1]))['output'])"


@pytest.mark.parametrize("mode", ["generate", "stream"])
async def test_killed_in_its_second_tool_and_started_again(tmp_path: Path, start_child: Any, mode: str) -> None:
    rules = tmp_path / "fakellm.yaml"
    rules.write_text(RULES, encoding="utf-8")
    port = await to_thread.run_sync(start_child(SERVER, rules).line)
    order = {
        "store": str(tmp_path / "ditto.db"),
        "world": str(tmp_path / "world.db"),
        "base_url": f"http://127.0.0.1:{port}/v1",
        "mode": mode,
        "tools": 2,
    }

    async def asked() -> Any:
        async with httpx.AsyncClient() as client:
            return (await client.get(f"http://127.0.0.1:{port}/_fakellm/stats")).json()["by_rule"]

    killed = start_child(LIFE, json.dumps({**order, "kill_in": "beta:after"}))
    assert await to_thread.run_sync(killed.end) == (-signal.SIGKILL, [])
    assert await asked() == {"the report": 1}
    again = start_child(LIFE, json.dumps(order))
    assert await to_thread.run_sync(again.end) == (0, [DONE])
    assert await asked() == {"the report": 1, "the end": 1}
    made = World(tmp_path / "world.db").calls()
    assert Counter(kind for kind, _ in made.elements()) == Counter(["alpha", "beta"])
