"""Forwarders as a user sets them: a real daemon, its own process, and a real Redis behind it."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.cli_runner import Cli
from support.daemon import Daemon
from support.redis_server import RedisServer
from support.waiting import comes
from tests.outbound.conftest import PASSWORD
from tickwheel import BadRequest, Client, Conflict, Task
from tickwheel.outbound import process

LOCAL = "127.0.0.0/8"
SOON_S = 30.0


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(tmp_path / "daemon", push_allow=LOCAL) as made:
        yield made


async def state_of(client: Client, state: str) -> dict[str, Any]:
    """The only target, once it is in this state."""

    async def look() -> dict[str, Any] | None:
        (found,) = await client.targets()
        if found.state != state:
            return None
        return {"sent": found.sent, "acked": found.acked, "last_error": found.last_error}

    return await comes(look, SOON_S)


async def test_tasks_of_a_forwarded_group_are_entries_of_the_stream(
    daemon: Daemon, server: RedisServer, redis: Any
) -> None:
    async with Client(daemon.url) as client:
        url = server.url("stream=orders")
        made = await client.set_forward("orders", "warehouse", url, secret=PASSWORD)
        assert (made.kind, made.url, made.created) == ("forward", url, True)
        tasks = [Task("orders", b"%d" % n, delay=0.01 * n) for n in range(50)]
        receipts = await client.enqueue_many(tasks)
        await comes(lambda: redis.xlen("orders") >= len(tasks), SOON_S)
        entries = [fields for _, fields in redis.xrange("orders")]
        assert {int(entry[b"body"]) for entry in entries} == set(range(50))
        ids = {int(entry[b"tickwheel-dedupe-id"]) for entry in entries}
        assert ids == {receipt.id for receipt in receipts}
        await comes(lambda: _acked(client, ids), SOON_S)
        with pytest.raises(Conflict, match="forwarded"):
            await client.pull("orders", group="warehouse")
        await client.remove_target("orders", "warehouse")
        assert await client.targets() == []
        assert await client.pull("orders", group="warehouse", wait=0) == []


async def _acked(client: Client, ids: set[int]) -> bool:
    return all([(await client.lookup(task_id)).state == "acked" for task_id in ids])


async def test_the_user_comes_from_the_address(
    daemon: Daemon, server: RedisServer, redis: Any
) -> None:
    redis.acl_setuser("sender", enabled=True, passwords=["+word"], keys=["*"], commands=["+@all"])
    async with Client(daemon.url) as client:
        url = server.url("stream=orders").replace("redis://", "redis://sender@")
        await client.set_forward("orders", "warehouse", url, secret="word")
        await client.enqueue("orders", b"1")
        await comes(lambda: redis.xlen("orders"), SOON_S)


async def test_a_refused_password_is_reported_without_losses(
    daemon: Daemon, server: RedisServer, redis: Any
) -> None:
    async with Client(daemon.url) as client:
        url = server.url("stream=orders")
        await client.set_forward("orders", "warehouse", url, secret="wrong")
        await client.enqueue("orders", b"1")
        result = await state_of(client, "failing")
        assert "WRONGPASS" in result["last_error"]
        assert "wrong" not in result["last_error"].replace("WRONGPASS", "")
        await client.set_forward("orders", "warehouse", url, secret=PASSWORD)
        await comes(lambda: redis.xlen("orders"), SOON_S)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("redis://127.0.0.1:1/0", "stream=NAME"),
        ("redis://me:pa55word@127.0.0.1:1/0?stream=a", "password"),
        ("smtp://127.0.0.1/?to=x", "smtp"),
        ("redis://10.1.2.3/0?stream=a", "10.1.2.3"),
    ],
)
async def test_an_invalid_address_is_refused_at_once(daemon: Daemon, url: str, said: str) -> None:
    async with Client(daemon.url) as client:
        with pytest.raises(BadRequest, match=said) as raised:
            await client.set_forward("orders", "warehouse", url)
        assert "pa55word" not in str(raised.value)
        assert await client.targets() == []


@pytest.mark.parametrize(
    ("options", "sizes"),
    [({"batch": 512, "concurrency": 1}, (10, 1)), ({"batch": 7, "concurrency": 3}, (7, 3))],
    ids=["defaults", "chosen"],
)
async def test_the_batch_of_the_url_applies_unless_the_request_sets_one(
    options: dict[str, int], sizes: tuple[int, int]
) -> None:
    config = {"url": "tcp://127.0.0.1:1", "token": None, "allow": [], "callbacks": None}
    row = {
        "topic": "t", "group": "g", "kind": "forward", "secrets": [], "since_ms": 0,
        "url": "redis://127.0.0.1:1/0?stream=s&batch=10", "options": options,
    }  # fmt: skip
    sending = process.Sending(config, io.StringIO())
    try:
        await sending.handle({"set": row})
        (job,) = sending._jobs.values()
        await comes(lambda: job._runner is not None)
        assert job._runner is not None
        target = job._runner._target
        assert (target.batch_max, target.concurrency) == sizes
        state = job.state()
        assert (state["batch"], state["concurrency"]) == sizes
    finally:
        await sending.stop()


def test_the_command_line_sets_lists_and_removes_forwards(
    daemon: Daemon, server: RedisServer, redis: Any, tmp_path: Path
) -> None:
    file = tmp_path / "password"
    file.write_text(PASSWORD + "\n")
    file.chmod(0o600)
    cli, place = Cli(daemon), ("orders", "warehouse")
    url = server.url("list=orders&value=body")
    cli.run("forward", "set", *place, "--to", url, "--secret-file", str(file))
    cli.run("enqueue", "orders", "hello")
    shown = cli.one("forward", "list")
    assert (shown["kind"], shown["url"]) == ("forward", url)
    assert PASSWORD not in str(shown)
    assert redis.blpop("orders", timeout=SOON_S) == (b"orders", b"hello")
    cli.run("forward", "remove", *place)
    assert cli.json("forward", "list") == []
