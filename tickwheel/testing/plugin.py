"""The fixtures for pytest, there once the package is installed: ``tickwheel``, a ``TestWheel``, and
``tickwheel_sync``, a ``SyncTestWheel``. What they need is imported when a test asks for one.

``tickwheel`` needs a plugin that runs asynchronous tests: pytest-asyncio, or anyio's.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Any

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
    wheel: TestWheel
    async with _wheel("TestWheel") as wheel:
        yield wheel


@pytest.fixture
def tickwheel_sync() -> Iterator[SyncTestWheel]:
    """The same for programs without an event loop."""
    wheel: SyncTestWheel
    with _wheel("SyncTestWheel") as wheel:
        yield wheel


def _wheel(name: str) -> Any:
    """A wheel of this kind; without the extra that it needs, the test fails by one line."""
    try:
        from tickwheel import testing

        make = getattr(testing, name)
    except ModuleNotFoundError as error:
        pytest.fail(str(error), pytrace=False)
    return make()
