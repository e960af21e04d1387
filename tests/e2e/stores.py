"""The stores that tests of a whole daemon run on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.daemon import Daemon
from support.redis_server import RedisServer

OTHER_DRIVER = pytest.param("asyncio-redis", marks=pytest.mark.slow)
"""What a driver does is the same for every feature: ``tests/persistence`` asks each of them all,
and ``test_transactions.py`` kills a daemon on each."""


def nothing(store: str, folder: Path) -> dict[str, Any]:
    return {}


def killed_on(*stores: Any, settings: Callable[[str, Path], dict[str, Any]] = nothing) -> Any:
    """A fixture: the daemon, not started yet. A store is ``sqlite``, or a driver of Redis."""

    @pytest.fixture(params=stores)
    def killed(
        request: pytest.FixtureRequest, make_daemon: Callable[..., Daemon], tmp_path: Path
    ) -> Iterator[Daemon]:
        options = settings(request.param, tmp_path)
        if request.param == "sqlite":
            yield make_daemon(**options)
            return
        server = RedisServer(tmp_path / "redis").start().lay_out()
        driver = "?driver=asyncio-redis" if request.param == "asyncio-redis" else ""
        daemon = make_daemon(store=server.url() + driver, leader_ttl_s=5, **options)
        yield daemon
        daemon.close()  # while its Redis is there: else it waits for it
        server.stop()

    return killed
