"""Fixtures of the journal's tests."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator

import pytest_asyncio


@pytest_asyncio.fixture(autouse=True)
async def http_clients() -> AsyncIterator[None]:
    """The HTTP clients that a test's models were given are closed with it."""
    yield
    scene = sys.modules.get("tests.journal.pydantic_scene")
    while scene is not None and scene.CLIENTS:
        await scene.CLIENTS.pop().aclose()
