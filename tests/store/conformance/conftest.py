"""Fixtures of the conformance suite: each test is put to every store under test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from ditto.errors import TransitionRefusedError
from ditto.store.committer import Transition
from ditto.store.store import Store
from tests.store.conformance.stores import STORES
from tests.store.conformance.under_test import Refused, StoreUnderTest, opened


@pytest.fixture(params=STORES)
def under_test(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoreUnderTest]:
    """A new store."""
    with STORES[request.param](tmp_path) as store:
        yield store


@pytest_asyncio.fixture
async def store(under_test: StoreUnderTest) -> AsyncIterator[Store]:
    """It, opened."""
    async with opened(under_test) as store:
        yield store


@pytest.fixture
def refused(under_test: StoreUnderTest, store: Store) -> Refused:
    """A transition is refused by name, and nothing of it is written."""

    async def commit(transition: Transition, name: str) -> TransitionRefusedError:
        before = under_test.look()
        with pytest.raises(TransitionRefusedError) as error:
            await store.commit(transition)
        assert error.value.transition == name
        assert str(error.value).startswith(f"{name}: ")
        assert under_test.look() == before
        return error.value

    return commit
