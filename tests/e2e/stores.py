"""The stores that tests of a whole daemon run on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.daemon import Daemon
from support.postgresql import PostgresServer
from support.redis_server import RedisServer


def nothing(store: str, folder: Path) -> dict[str, Any]:
    return {}


def stores(*wanted: str, usual: int = 1) -> list[Any]:
    """Parameters: ``make test`` has the first store, or ``usual`` of them, ``make test-full`` all.
    Whatever a feature keeps comes back alike from each: the conformance suite and the models of
    ``tests/persistence`` ask every store and driver all that a daemon does."""
    others = (pytest.param(item, marks=pytest.mark.slow) for item in wanted[usual:])
    return [*wanted[:usual], *others]


@contextmanager
def running_store(
    store: str, folder: Path, request: pytest.FixtureRequest
) -> Iterator[dict[str, Any]]:
    """Settings of a daemon on ``store``: ``sqlite``, ``postgresql``, or a driver of Redis."""
    if store == "sqlite":
        yield {}
        return
    if store == "postgresql":
        postgres: PostgresServer = request.getfixturevalue("shared_postgres")
        yield {"store": postgres.url(), "leader_ttl_s": 5}
        return
    server = RedisServer(folder / "redis").start().lay_out()
    driver = "?driver=asyncio-redis" if store == "asyncio-redis" else ""
    yield {"store": server.url() + driver, "leader_ttl_s": 5}
    server.stop()


def killed_on(
    *wanted: str, usual: int = 1, settings: Callable[[str, Path], dict[str, Any]] = nothing
) -> Any:
    """A fixture: the daemon, not started yet, on each of the stores (``running_store``)."""

    @pytest.fixture(params=stores(*wanted, usual=usual))
    def killed(
        request: pytest.FixtureRequest, make_daemon: Callable[..., Daemon], tmp_path: Path
    ) -> Iterator[Daemon]:
        with running_store(request.param, tmp_path, request) as options:
            daemon = make_daemon(**options, **settings(request.param, tmp_path))
            yield daemon
            daemon.close()  # while its store is there: otherwise it waits for it

    return killed
