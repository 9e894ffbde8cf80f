"""Fixtures of the engine's tests."""

from __future__ import annotations

import pytest

from tests.engine.scene import World


@pytest.fixture
def world() -> World:
    """What is outside."""
    return World()
