"""The fixtures for pytest, there once the package is installed: ``tickwheel``, a ``TestWheel``, and
``tickwheel_sync``, a ``SyncTestWheel``. What they need is imported when a test asks for one.

``tickwheel`` needs a plugin that runs asynchronous tests: pytest-asyncio, or anyio's.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING

import pytest

async_fixture: Callable[[Callable[[], AsyncIterator[TestWheel]]], object]
try:
    from pytest_asyncio import fixture as async_fixture
except ImportError:  # anyio's plugin takes an ordinary one
    async_fixture = pytest.fixture

if TYPE_CHECKING:
    from tickwheel.testing import SyncTestWheel, TestWheel


@async_fixture
async def tickwheel() -> AsyncIterator[TestWheel]:
    """A daemon in this process, with a clock that the test moves."""
    from tickwheel.testing import TestWheel

    async with TestWheel() as wheel:
        yield wheel


@pytest.fixture
def tickwheel_sync() -> Iterator[SyncTestWheel]:
    """The same for programs without an event loop."""
    from tickwheel.testing import SyncTestWheel

    with SyncTestWheel() as wheel:
        yield wheel
