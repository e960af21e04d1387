"""The state machine of the stores, over Redis: every rule takes round trips, so there are fewer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis.stateful import rule

from persistence.test_store_model import ENDINGS_MAX, StoreMachine
from support.redis_server import RedisServer
from support.waiting import comes
from tickwheel.persistence.memory import MemoryStore
from tickwheel.persistence.redis import RedisStore, options_from


class RedisMachine(StoreMachine):
    """Memory and both drivers, each driver with a shard of its own; and one without a mirror, in
    another database, which is never emptied."""

    server: ClassVar[RedisServer]

    def __init__(self) -> None:
        super().__init__()
        self.server.call("FLUSHALL")
        self.stores = {"memory": MemoryStore(ENDINGS_MAX)}
        for driver in ("redis", "asyncio-redis"):
            query = f"driver={driver}&namespace={driver}&endings_max={ENDINGS_MAX}"
            self.stores[driver] = RedisStore(options_from(self.server.url(query)))
        url = self.server.url(f"mirror=no&endings_max={ENDINGS_MAX}").replace("/0?", "/1?")
        self.stores["without a mirror"] = RedisStore(options_from(url))

    @rule()
    def redis_forgets_everything(self) -> None:
        """What every daemon knows once it has recovered is written back, by each for itself."""
        self.recover(5)
        self.recover_keys()
        self.server.call("FLUSHDB")
        for store in self.stores.values():
            if isinstance(store, RedisStore) and store.mirror:
                self.run(_whole_again(store))


async def _whole_again(store: RedisStore) -> None:
    before = store.rewrites
    await store.verify()
    await comes(lambda: store.rewrites > before)


@pytest.fixture(scope="module", autouse=True)
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    RedisMachine.server = RedisServer(tmp_path_factory.mktemp("redis") / "data").start()
    yield
    RedisMachine.server.kill()


TestRedisMachine = RedisMachine.TestCase
TestRedisMachine.settings = settings(max_examples=60, stateful_step_count=30)
