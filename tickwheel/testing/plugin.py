"""The pytest fixtures ``tickwheel`` (a ``TestWheel``) and ``tickwheel_sync`` (a ``SyncTestWheel``).

The installed package provides them. Their dependencies are imported when a test uses a fixture.

``tickwheel`` needs a plugin that runs asynchronous tests: pytest-asyncio, or anyio's.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

async_fixture: Callable[[Callable[[], AsyncIterator[TestWheel]]], object]
try:
    from pytest_asyncio import fixture as async_fixture
except ImportError:  # anyio's plugin accepts an ordinary fixture
    async_fixture = pytest.fixture

if TYPE_CHECKING:
    from tickwheel.testing import SyncTestWheel, TestWheel


@async_fixture
async def tickwheel() -> AsyncIterator[TestWheel]:
    """A daemon in this process, with a clock that the test advances."""
    wheel: TestWheel
    async with _wheel("TestWheel") as wheel:
        yield wheel


@pytest.fixture
def tickwheel_sync() -> Iterator[SyncTestWheel]:
    """A daemon like ``tickwheel``, for blocking code."""
    wheel: SyncTestWheel
    with _wheel("SyncTestWheel") as wheel:
        yield wheel


def _wheel(name: str) -> Any:
    """Return a wheel of this class. If its extra is not installed, fail the test with one line."""
    try:
        from tickwheel import testing

        make = getattr(testing, name)
    except ModuleNotFoundError as error:
        pytest.fail(str(error), pytrace=False)
    return make()
