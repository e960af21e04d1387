"""The stores that the conformance suite runs over. A new store is a new entry here."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from persistence.store_subject import Subject
from support.postgresql import PostgresServer
from support.redis_groups import Cluster, slot_of
from support.redis_server import RedisServer
from tickwheel.persistence.contract import Store
from tickwheel.persistence.memory import MemoryStore
from tickwheel.persistence.postgresql import PostgresStore
from tickwheel.persistence.postgresql import options_from as postgres_options_from
from tickwheel.persistence.redis import RedisStore, options_from
from tickwheel.persistence.sqlite import SqliteOptions, SqliteStore

ENDINGS_MAX = 1_000
QUICK = "call_ms=1000&connect_ms=1000"
"""A server that stands still is soon noticed, and one that a busy machine is slow to run is not
taken for it."""

Request = pytest.FixtureRequest


def _memory(folder: Path, request: Request) -> Store:
    return MemoryStore(ENDINGS_MAX)


def _sqlite(folder: Path, request: Request) -> Store:
    return SqliteStore(str(folder / "store.db"), SqliteOptions(endings_max=ENDINGS_MAX))


def _redis(folder: Path, request: Request, driver: str = "redis") -> Store:
    server: RedisServer = request.getfixturevalue("shared_redis")
    server.call("FLUSHALL")
    return RedisStore(options_from(server.url(f"endings_max={ENDINGS_MAX}&driver={driver}")))


def _asyncio_redis(folder: Path, request: Request) -> Store:
    return _redis(folder, request, "asyncio-redis")


def _redis_without_mirror(folder: Path, request: Request) -> Store:
    return _redis(folder, request, "redis&mirror=no")


def _cluster(folder: Path, request: Request) -> Store:
    cluster: Cluster = request.getfixturevalue("shared_cluster")
    node = cluster.owner_of(slot_of("tw:default:0"))
    assert node is not None
    node.call("FLUSHALL")
    return RedisStore(options_from(cluster.url(f"endings_max={ENDINGS_MAX}")))


def _postgresql(folder: Path, request: Request) -> Store:
    server: PostgresServer = request.getfixturevalue("shared_postgres")
    url = server.url(f"endings_max={ENDINGS_MAX}")
    return PostgresStore(postgres_options_from(url))


STORES: dict[str, Callable[[Path, Request], Store]] = {
    "memory": _memory,
    "sqlite": _sqlite,
    "redis": _redis,
    "asyncio-redis": _asyncio_redis,
    "redis-without-mirror": _redis_without_mirror,
    "cluster": _cluster,
    "postgresql": _postgresql,
}


QUICK_PARTS = {
    "asyncio-redis": ("TestOpening", "TestReading"),
    "cluster": ("TestOpening", "TestStates", "test_a_new_kind_is_stored_changed_and_dropped"),
    "redis-without-mirror": ("TestBackup", "TestReading", "TestRecovery", "TestScanning"),
}
"""Redis itself runs every test quickly. The other ways to use it differ from it in few places: what
`make test` runs of them; `make test-full` runs all."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            kind = item.callspec.params.get("subject")
            names = (item.originalname, item.cls.__name__ if item.cls else "")
            if kind in QUICK_PARTS and not {*names} & {*QUICK_PARTS[kind]}:
                item.add_marker(pytest.mark.slow)  # on Redis it is quick


@pytest.fixture(scope="session")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One Cluster, without replicas, for all tests that only read and write."""
    made = Cluster(tmp_path_factory.mktemp("cluster"), replicas=0)
    try:
        yield made.start()
    finally:
        made.stop()


@pytest.fixture(params=sorted(STORES))
async def subject(request: Request, tmp_path: Path) -> AsyncIterator[Subject]:
    """An open store of each kind; it holds nothing yet and forgets all but 1,000 endings."""
    result = Subject(STORES[request.param](tmp_path, request))
    await result.open()
    yield result
    await result.store.close(clean=True)


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    """A server of the test's own, to stop and to break."""
    server = RedisServer(tmp_path / "redis").start()
    yield server
    server.kill()


@pytest.fixture
async def make(redis_server: RedisServer) -> AsyncIterator[Callable[..., Subject]]:
    """Makes stores on the test's own server; whatever happens, they are closed."""
    made: list[Subject] = []

    def make_one(query: str = "", port: int = 0) -> Subject:
        url = f"redis://127.0.0.1:{port or redis_server.port}?{QUICK}&{query}"
        made.append(Subject(RedisStore(options_from(url))))
        return made[-1]

    yield make_one
    redis_server.go_on()
    for subject in made:
        await subject.store.close(clean=False)
