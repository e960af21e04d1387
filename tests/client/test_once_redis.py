"""``Once`` among processes: what one marks, the other sees; a claim outlives nobody for long."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys

import pytest

from support.redis_server import RedisServer
from tickwheel import errors
from tickwheel.client.idempotence import Once, RedisDedupStore

WAIT_S = 60.0
PROGRAM = """
import asyncio, sys
from tickwheel.client.idempotence import Once

async def main():
    once = Once(sys.argv[1], claim=0.5)
    async with once.claim("k"):
        print("claimed", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


async def do(once: Once, key: str) -> bool:
    async with asyncio.timeout(WAIT_S), once.claim(key) as first:
        return first


@pytest.fixture
def url(shared_redis: RedisServer) -> str:
    shared_redis.call("FLUSHALL")
    return shared_redis.url()


async def test_done_work_is_known_to_other_processes(url: str, shared_redis: RedisServer) -> None:
    async with Once(url, ttl=100) as one, Once(url) as other:
        assert await do(one, "a")
        assert not await do(other, "a")
        assert await other.is_done("a") and not await other.is_done("b")
        assert 90 < int(shared_redis.call("TTL", "tickwheel:once:a")[1:]) <= 100
        await other.forget("a")
        assert await do(one, "a")


async def test_a_failed_body_frees_the_claim_for_others_at_once(url: str) -> None:
    async with Once(url) as one, Once(url) as other:
        with pytest.raises(LookupError):
            async with one.claim("a"):
                raise LookupError
        assert await do(other, "a")


async def test_a_second_claim_waits_for_the_first(url: str) -> None:
    async with Once(url) as one, Once(url) as other, Once(url, wait=0.1) as hasty:
        async with one.claim("a") as first:
            assert first
            waiting = asyncio.ensure_future(do(other, "a"))
            with pytest.raises(errors.Conflict):
                await do(hasty, "a")
            assert not waiting.done()
        assert await waiting is False


async def test_a_wait_ends_although_a_cancellation_was_swallowed(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Once(url) as one, Once(url, wait=0.1) as hasty:
        assert isinstance(hasty._marks, RedisDedupStore)
        redis = hasty._marks._redis
        get = redis.get

        async def swallowing(key: str) -> object:
            """As ``asyncio.wait_for`` of Python 3.11 when a result and a cancellation meet."""
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.2)  # real time: longer than the wait
            return await get(key)

        monkeypatch.setattr(redis, "get", swallowing)
        async with one.claim("a"):
            with pytest.raises(errors.Conflict):
                await do(hasty, "a")


async def test_a_claim_is_renewed_while_the_body_runs(url: str) -> None:
    async with Once(url, claim=1.5) as one, Once(url, claim=1.5, wait=3.5) as other:
        async with one.claim("a"):
            with pytest.raises(errors.Conflict):
                await do(other, "a")
        assert not await do(other, "a")


async def test_the_claim_of_a_process_that_was_killed_ends(url: str) -> None:
    killed = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, url], stdout=subprocess.PIPE, text=True
    )
    try:
        assert killed.stdout is not None
        assert await asyncio.to_thread(killed.stdout.readline) == "claimed\n"
        killed.kill()
        async with Once(url) as once:
            assert await do(once, "k")
    finally:
        killed.kill()
        killed.communicate()


async def test_an_unavailable_redis_is_unreachable() -> None:
    async with Once("redis://127.0.0.1:1") as once:
        with pytest.raises(errors.Unreachable, match="Redis"):
            await do(once, "a")


async def test_finished_work_is_marked_done_despite_a_lost_claim(
    url: str, shared_redis: RedisServer
) -> None:
    async with Once(url) as once:
        async with once.claim("a"):
            shared_redis.call("DEL", "tickwheel:once:a")
        assert await once.is_done("a")
