"""A Redis stream and a list as targets, on a real server."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import redis as redis_module

from support.redis_server import RedisServer
from support.waiting import comes
from tests.outbound.conftest import PASSWORD, in_time, running, tls_relay
from tests.outbound.endpoint import flooding
from tickwheel import Retry
from tickwheel.outbound import forward, runner
from tickwheel.outbound.runner import Runner
from tickwheel.outbound.target import target_of
from tickwheel.testing import TestWheel


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pauses between tries to connect pass in real time."""
    monkeypatch.setattr(runner, "PAUSE_S", 0.001)


def to(server: RedisServer, query: str, secret: str | None = PASSWORD) -> Any:
    return target_of(server.url(query), secret)


async def test_a_stream_entry_has_body_and_headers(
    wheel: TestWheel, server: RedisServer, redis: Any
) -> None:
    receipt = await wheel.client.enqueue(
        "t", b"\x00\xff", key="k", properties={"paid": True, "amount": 3}
    )
    async with running(wheel.client, to(server, "stream=orders")):
        await comes(lambda: redis.xlen("orders"))
    ((_, fields),) = redis.xrange("orders")
    assert abs(int(fields.pop(b"tickwheel-enqueued-ms")) - receipt.due_ms) < 1000
    number = str(receipt.id).encode()
    assert fields == {
        b"body": b"\x00\xff", b"tickwheel-dedupe-id": number, b"tickwheel-id": number,
        b"tickwheel-topic": b"t", b"tickwheel-due-ms": str(receipt.due_ms).encode(),
        b"tickwheel-attempt": b"1", b"tickwheel-key": b"k", b"property-paid": b"true",
        b"property-amount": b"3",
    }  # fmt: skip
    assert [found.state for found in await wheel.client.lookup_many([receipt.id])] == ["acked"]


async def test_entries_are_in_due_order(wheel: TestWheel, server: RedisServer, redis: Any) -> None:
    bodies = [b"%d" % number for number in range(3_000)]
    for start in range(0, 3_000, 1_000):
        await wheel.client.enqueue_columns("t", bodies[start : start + 1_000])
    async with running(wheel.client, to(server, "stream=s&batch=100")):
        await comes(lambda: redis.xlen("s") == 3_000)
    assert [fields[b"body"] for _, fields in redis.xrange("s")] == bodies


async def test_entries_are_sent_over_tls(
    wheel: TestWheel, server: RedisServer, redis: Any, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    proxy, authority = await tls_relay(server.port, tmp_path / "tls")
    url = f"rediss://localhost:{proxy.port}/0?stream=s"
    await wheel.client.enqueue("t", b"x")
    async with running(wheel.client, target_of(url, PASSWORD)) as made:
        await comes(lambda: made.trouble)
        assert "CERTIFICATE_VERIFY_FAILED" in (made.trouble or "")
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.ca))
    async with running(wheel.client, target_of(url, PASSWORD)):
        await in_time(wheel, lambda: redis.xlen("s"))
    await proxy.stop()


async def test_concurrent_batches_get_their_own_replies(
    wheel: TestWheel, server: RedisServer, redis: Any
) -> None:
    redis.set("taken", "by a string")
    await wheel.client.configure("t", group="g", retry=Retry.none())
    await wheel.client.enqueue_columns("t", [b"%d" % number for number in range(100)])
    target = to(server, "stream=s&batch=5")
    target.concurrency = 4
    heard: list[tuple[bytes, str]] = []
    make = target._make.command

    def every_third_elsewhere(found: Any) -> tuple[str | bytes, ...]:
        words = list(make(found))
        words[1] = "taken" if int(found.body) % 3 == 0 else "s"
        return tuple(words)

    target._make.command = every_third_elsewhere
    async with running(
        wheel.client, target, on_settled=lambda d, o, word: heard.append((d.body, word))
    ):
        await comes(lambda: len(heard) == 100)
    assert all((word == "dead") == (int(body) % 3 == 0) for body, word in heard)
    assert bodies(redis) == {body for body, word in heard if word == "acked"}


async def test_maxlen_bounds_the_stream(wheel: TestWheel, server: RedisServer, redis: Any) -> None:
    await wheel.client.enqueue_columns("t", [b"x"] * 1_000)
    words: list[str] = []
    target = to(server, "stream=s&maxlen=100")
    async with running(wheel.client, target, on_settled=lambda d, o, word: words.append(word)):
        await comes(lambda: len(words) == 1_000)
    assert 100 <= redis.xlen("s") < 400, "Redis removes whole pieces of a stream"


async def test_an_element_of_a_list_is_json_or_the_body(
    wheel: TestWheel, server: RedisServer, redis: Any
) -> None:
    await wheel.client.enqueue("t", "ä".encode(), properties={"paid": True, "amount": 3})
    await wheel.client.enqueue("t", b"\xff")
    async with running(wheel.client, to(server, "list=l")):
        await comes(lambda: redis.llen("l") == 2)
    text, binary = map(json.loads, redis.lrange("l", 0, -1))
    assert text["body"] == "ä" and text["headers"]["property-amount"] == 3
    assert text["headers"]["property-paid"] is True
    assert binary["body_base64"] == "/w=="
    await wheel.client.enqueue("t", b"\xff")
    async with running(wheel.client, to(server, "list=plain&value=body")):
        await comes(lambda: redis.llen("plain"))
    assert redis.lrange("plain", 0, -1) == [b"\xff"]


async def test_database_and_user_are_selected(
    wheel: TestWheel, server: RedisServer, redis: Any
) -> None:
    redis.acl_setuser("ann", enabled=True, passwords=["+anns"], keys=["*"], commands=["+@all"])
    await wheel.client.enqueue("t", b"x")
    target = target_of(f"redis://ann@127.0.0.1:{server.port}/3?stream=s", "anns")
    with redis_module.Redis(port=server.port, password=PASSWORD, db=3) as third:
        async with running(wheel.client, target):
            await comes(lambda: third.xlen("s") == 1)


@pytest.mark.parametrize(
    ("secret", "words"), [(None, "NOAUTH"), ("wrong", "WRONGPASS")]
)  # fmt: skip
async def test_a_wrong_password_names_the_reason(
    wheel: TestWheel, server: RedisServer, secret: str | None, words: str
) -> None:
    await wheel.client.enqueue("t", b"x")
    async with running(wheel.client, to(server, "stream=s", secret)) as made:
        await comes(lambda: made.trouble)
        assert (made.trouble or "").startswith(f"RedisFailed: {words}")


async def test_a_refused_command_is_its_tasks_reason(
    wheel: TestWheel, server: RedisServer, redis: Any
) -> None:
    redis.set("taken", "by a string")
    await wheel.client.configure("t", group="g", retry=Retry.none())
    await wheel.client.enqueue("t", b"x")
    async with running(wheel.client, to(server, "stream=taken")) as made:
        await comes(lambda: wheel.dead_letters("t", "g"))
        assert made.is_connected
    (dead,) = await wheel.dead_letters("t", "g")
    assert dead.failures[-1].reason.startswith("WRONGTYPE ")


async def test_a_read_only_server_is_a_failing_target(
    wheel: TestWheel, server: RedisServer, redis: Any
) -> None:
    await wheel.client.configure("t", group="g", retry=Retry.fixed(delay=1, retries=5))
    redis.config_set("maxmemory", 1)
    receipt = await wheel.client.enqueue("t", b"x")
    async with running(wheel.client, to(server, "stream=s")) as made:
        await comes(lambda: made.trouble and not made.is_connected)
        assert (made.trouble or "").startswith("RedisFailed: OOM ")
        redis.config_set("maxmemory", 0)
        await in_time(wheel, lambda: redis.xlen("s") == 1)
    assert [found.state for found in await wheel.client.lookup_many([receipt.id])] == ["acked"]


@pytest.mark.parametrize("word", ["NOPERM", "BUSY", "OOM", "NOREPLICAS"])
async def test_server_errors_use_no_attempt(
    wheel: TestWheel, server: RedisServer, redis: Any, word: str
) -> None:
    await wheel.client.configure("t", group="g", retry=Retry.none())
    async with running(wheel.client, to(server, "stream=s&batch=4")) as made:
        await wheel.client.enqueue("t", b"first")
        await comes(lambda: redis.xlen("s") == 1)
        with trouble(server, redis, word):
            await wheel.client.enqueue_columns("t", [b"%d" % n for n in range(10)])
            await comes(lambda: made.tries > 2)
            assert word in (made.trouble or "")
        await comes(lambda: redis.xlen("s") == 11)
    assert await wheel.dead_letters("t", "g") == []


@contextmanager
def trouble(server: RedisServer, redis: Any, word: str) -> Iterator[None]:
    """While the server answers with this word."""
    script = None
    if word == "NOPERM":
        redis.execute_command("ACL", "SETUSER", "default", "-xadd")
    elif word == "OOM":
        redis.config_set("maxmemory", 1)
    elif word == "NOREPLICAS":
        redis.config_set("min-replicas-to-write", 3)
    else:
        redis.config_set("lua-time-limit", 50)
        script = threading.Thread(target=_hold, args=(server,))
        script.start()
        while _answers(redis):
            pass
    yield
    if word == "NOPERM":
        redis.execute_command("ACL", "SETUSER", "default", "+xadd")
    elif word == "OOM":
        redis.config_set("maxmemory", 0)
    elif word == "NOREPLICAS":
        redis.config_set("min-replicas-to-write", 0)
    elif script is not None:
        redis.script_kill()
        script.join()


def _answers(redis: Any) -> bool:
    try:
        return bool(redis.ping())
    except redis_module.ResponseError:
        return False


def _hold(server: RedisServer) -> None:
    with (
        redis_module.Redis(port=server.port, password=PASSWORD, socket_timeout=60) as other,
        suppress(redis_module.ResponseError),
    ):
        other.eval("while true do end", 0)


FLOODS = {
    "a bulk": (b"$500000000000\r\n", b"x" * (1 << 20)),
    "an array": (b"*1000000000\r\n", b":1\r\n" * 100_000),
    "a map": (b"%1000000000\r\n", b":1\r\n" * 100_000),
    "a line": (b"+", b"x" * (1 << 20)),
    "an error": (b"-ERR ", b"x" * (1 << 20)),
    "replies": (b"+OK\r\n", b":1\r\n" * 100_000),
}


@pytest.mark.parametrize("what", FLOODS)
@pytest.mark.parametrize("begin", [b"", b"+OK\r\n"], ids=["at once", "later"])
async def test_an_endless_reply_is_not_read(
    wheel: TestWheel, server: RedisServer, redis: Any, begin: bytes, what: str
) -> None:
    first, piece = FLOODS[what]
    await wheel.client.create_group("u", "g")
    with flooding(begin + first, piece) as hostile:
        target = target_of(f"redis://127.0.0.1:{hostile.port}/0?stream=s")
        flooded = Runner(wheel.client, "u", "g", target)
        running_on = asyncio.create_task(flooded.run())
        await wheel.client.enqueue("u", b"x")
        async with running(wheel.client, to(server, "stream=s")):
            await comes(lambda: flooded.tries > 3)
            await wheel.client.enqueue("t", b"x")
            await comes(lambda: redis.xlen("s") == 1)
        await flooded.stop()
        await running_on
        assert "the server" in (flooded.trouble or "")
        assert hostile.sent < 200 * (1 << 20), "kernels take some; each try reads a little"


async def test_a_partly_refused_batch_uses_no_attempt(
    wheel: TestWheel, server: RedisServer, redis: Any
) -> None:
    await wheel.client.configure("t", group="g", retry=Retry.none())
    await wheel.client.enqueue_columns("t", [b"%d" % number for number in range(20)])
    redis.execute_command("ACL", "SETUSER", "default", "resetkeys", "~s")
    target = to(server, "stream=s")
    make = target._make.command

    def every_third_elsewhere(found: Any) -> tuple[str | bytes, ...]:
        words = list(make(found))
        words[1] = "forbidden" if int(found.body) % 3 == 0 else "s"
        return tuple(words)

    target._make.command = every_third_elsewhere
    async with running(wheel.client, target) as made:
        await comes(lambda: made.tries > 1)
        assert len(bodies(redis)) == redis.xlen("s") == 13, "what was taken is not sent again"
        redis.execute_command("ACL", "SETUSER", "default", "allkeys")
        await comes(lambda: redis.xlen("forbidden") == 7)
    assert await wheel.dead_letters("t", "g") == []


async def test_a_hanging_server_is_retried_later(
    wheel: TestWheel, server: RedisServer, redis: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward, "ANSWER_S", 1.0)
    await wheel.client.configure("t", group="g", retry=Retry.fixed(delay=1, retries=5))
    async with running(wheel.client, to(server, "stream=s")) as made:
        await wheel.client.enqueue("t", b"first")
        await comes(lambda: redis.xlen("s") == 1)
        server.pause()
        await wheel.client.enqueue("t", b"second")
        await comes(lambda: made.trouble)
        assert made.trouble == "no answer in time"
        server.go_on()
        await in_time(wheel, lambda: bodies(redis) == {b"first", b"second"})
        server.kill()
        await wheel.client.enqueue("t", b"third")
        await comes(lambda: not made.is_connected)
        server.start()
        await in_time(wheel, lambda: b"third" in bodies(redis))


def bodies(redis: Any) -> set[bytes]:
    """Return the bodies in stream ``s``."""
    return {fields[b"body"] for _, fields in redis.xrange("s")}
