"""The rig of all suites of HTTP: each test runs at the door of one shard, and at that of all."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from server.http.rig import HttpRig, RigOfAll


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test at both doors, unless it says why it is about one shard alone."""
    if "door" in metafunc.fixturenames:
        is_of_one = metafunc.definition.get_closest_marker("one_shard") is not None
        doors = [HttpRig] if is_of_one else [HttpRig, RigOfAll]
        metafunc.parametrize("door", doors, ids=["one", "all"][: len(doors)])


@pytest.fixture
async def rig(door: type[HttpRig]) -> AsyncIterator[HttpRig]:
    made = await door().start()
    yield made
    await made.stop()
