"""For all tests: repeatable Hypothesis runs, no daemon settings from somebody's shell, and the
order in which several processes share the work."""

from __future__ import annotations

import os
from pathlib import Path

import hypothesis
import pytest

# The seed of a failing example is printed, so that it can be repeated anywhere.
hypothesis.settings.register_profile("tickwheel", deadline=None, print_blob=True)
hypothesis.settings.load_profile("tickwheel")

for _name in [name for name in os.environ if name.startswith("TICKWHEEL_")]:
    del os.environ[_name]

TESTS = Path(__file__).parent
TOGETHER = ("reports",)
"""Folders whose tests share something that is dear to start: one Spark for all of them."""
LONG = (
    "reports", "e2e/test_cli_groups_daemon.py", "crash/test_torture_redis.py",
    "unit/test_benchmarks.py", "e2e/test_cli.py", "mutations/test_mutations.py",
    "e2e/test_failover.py", "model/test_engine_model.py", "e2e/test_docs.py",
    "crash/test_torture.py", "e2e/test_following.py", "store/test_redis_mirror_daemon.py",
    "history/test_history_daemon.py", "e2e/test_groups_daemon.py", "model/test_timing_model.py",
    "history/test_writer_process.py",
)  # fmt: skip
"""Begun first, so that no process is left with one of them at the end."""


@pytest.hookimpl(tryfirst=True)  # before xdist looks for the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A file stays in one process, which is what ``--dist loadgroup`` goes by."""
    places = {item: _place(item) for item in items}
    for item, place in places.items():
        item.add_marker(pytest.mark.xdist_group(place))
    ranks = {place: rank for rank, place in enumerate(LONG)}
    items.sort(key=lambda item: ranks.get(places[item], len(LONG)))


def _place(item: pytest.Item) -> str:
    path = item.path.relative_to(TESTS)
    return path.parts[0] if path.parts[0] in TOGETHER else str(path)
