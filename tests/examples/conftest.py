"""Random subjects for the recovery tests."""

from __future__ import annotations

import random

import pytest

from tests.examples.recovery_world import Order
from tests.examples.transfer_world import Transfer


@pytest.fixture
def seed() -> int:
    chosen = random.randrange(1_000_000)
    print(f"seed {chosen}")  # noqa: T201 - to say which one failed
    return chosen


@pytest.fixture
def order(seed: int) -> Order:
    return Order.random(seed)


@pytest.fixture
def transfer(seed: int) -> Transfer:
    return Transfer.random(seed)
