"""The state machine of the stores, over PostgreSQL: parts are small, and ended tasks leave them at
any time."""

from __future__ import annotations

from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis.stateful import rule

from persistence.test_store_model import ENDINGS_MAX, StoreMachine
from support.postgresql import PostgresServer
from tickwheel.persistence.memory import MemoryStore
from tickwheel.persistence.postgresql import PostgresStore, options_from


class PostgresMachine(StoreMachine):
    """Memory, and a schema of its own for each example."""

    server: ClassVar[PostgresServer]

    def __init__(self) -> None:
        super().__init__()
        url = self.server.url(f"part_rows=20&endings_max={ENDINGS_MAX}")
        self.postgresql = PostgresStore(options_from(url))
        self.stores = {"memory": MemoryStore(ENDINGS_MAX), "postgresql": self.postgresql}

    @rule()
    def upkeep(self) -> None:
        self.run(self.postgresql._upkeep.step())


@pytest.fixture(scope="module", autouse=True)
def server(shared_postgres: PostgresServer) -> None:
    PostgresMachine.server = shared_postgres


@pytest.fixture(autouse=True)
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the machine lets tasks leave."""
    monkeypatch.setattr("tickwheel.persistence.postgresql.upkeep.EVERY_S", 3_600.0)


TestPostgresMachine = PostgresMachine.TestCase
TestPostgresMachine.settings = settings(max_examples=16, stateful_step_count=30)
