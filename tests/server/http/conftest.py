"""The rig of all suites of HTTP: each test runs at the door of one shard, and at that of all."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator

import pytest

from server.http.rig import HttpRig, RigOfAll


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test at both doors, unless it says why it is about one shard alone."""
    if "door" in metafunc.fixturenames:
        is_of_one = metafunc.definition.get_closest_marker("one_shard") is not None
        doors = [HttpRig] if is_of_one else [HttpRig, RigOfAll]
        metafunc.parametrize("door", doors, ids=["one", "all"][: len(doors)])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """At the door of all shards only every fourth value of a test is quick: test_one_or_many.py
    shows that both doors accept the same."""
    seen: Counter[str] = Counter()
    for item in items:
        if isinstance(item, pytest.Function) and item.nodeid.startswith("tests/server/http/"):
            name, _, values = item.nodeid.partition("[")
            if values and item.callspec.params.get("door") is RigOfAll:
                if seen[name] % 4:
                    item.add_marker(pytest.mark.slow)
                seen[name] += 1


@pytest.fixture
async def rig(door: type[HttpRig]) -> AsyncIterator[HttpRig]:
    made = await door().start()
    yield made
    await made.stop()
