"""The stores that tests of a whole daemon run on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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


def killed_on(
    *wanted: str, usual: int = 1, settings: Callable[[str, Path], dict[str, Any]] = nothing
) -> Any:
    """A fixture: the daemon, not started yet. A store is ``sqlite``, ``postgresql``, or a driver of
    Redis."""

    @pytest.fixture(params=stores(*wanted, usual=usual))
    def killed(
        request: pytest.FixtureRequest, make_daemon: Callable[..., Daemon], tmp_path: Path
    ) -> Iterator[Daemon]:
        options = settings(request.param, tmp_path)
        if request.param == "sqlite":
            yield make_daemon(**options)
            return
        if request.param == "postgresql":
            postgres: PostgresServer = request.getfixturevalue("shared_postgres")
            daemon = make_daemon(store=postgres.url(), leader_ttl_s=5, **options)
            yield daemon
            daemon.close()
            return
        server = RedisServer(tmp_path / "redis").start().lay_out()
        driver = "?driver=asyncio-redis" if request.param == "asyncio-redis" else ""
        daemon = make_daemon(store=server.url() + driver, leader_ttl_s=5, **options)
        yield daemon
        daemon.close()  # while its Redis is there: else it waits for it
        server.stop()

    return killed
