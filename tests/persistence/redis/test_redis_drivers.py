"""What a driver does when not even a descriptor is left: Redis is away, and may come back."""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tickwheel.persistence.redis.connection import check
from tickwheel.persistence.redis.driver import NotConnected, options_from
from tickwheel.persistence.redis.locator import connect


@contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """For this process, in which nothing else runs meanwhile."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(map(int, os.listdir("/proc/self/fd")))
    spare = [os.open(os.devnull, os.O_RDONLY) for _ in range(used)]  # fills the gaps below
    highest = max(map(int, os.listdir("/proc/self/fd")))
    for fd in spare[len(spare) - count :]:
        os.close(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for fd in spare[: len(spare) - count]:
            os.close(fd)


@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("driver", ["redis", "asyncio-redis"])
async def test_without_descriptors_redis_is_away(driver: str, count: int) -> None:
    """With one left it comes as far as a port at which nobody answers."""
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    options = options_from(f"redis://127.0.0.1:{port}/0?driver={driver}")
    check(options)  # imported, as in a daemon
    with descriptors_left(count), pytest.raises(NotConnected):
        await connect(options)
    with pytest.raises(NotConnected):
        await connect(options)
