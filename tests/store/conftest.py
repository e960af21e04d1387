"""The stores that the conformance suite runs over. A new store is a new entry here."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from store_subject import Subject

from tickwheel.persistence.memory import MemoryStore
from tickwheel.persistence.sqlite import SqliteOptions, SqliteStore
from tickwheel.persistence.store import Store

ENDINGS_MAX = 1_000


def _memory(folder: Path) -> Store:
    return MemoryStore(ENDINGS_MAX)


def _sqlite(folder: Path) -> Store:
    return SqliteStore(str(folder / "store.db"), SqliteOptions(endings_max=ENDINGS_MAX))


STORES: dict[str, Callable[[Path], Store]] = {"memory": _memory, "sqlite": _sqlite}


@pytest.fixture(params=sorted(STORES))
async def subject(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Subject]:
    """An open store of each kind; it holds nothing yet and forgets all but 1,000 endings."""
    found = Subject(STORES[request.param](tmp_path))
    await found.open()
    yield found
    await found.store.close(clean=True)
