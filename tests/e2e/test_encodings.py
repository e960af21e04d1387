"""Packed bodies in real daemons: over kills on each store, and out of a restore."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from e2e.stores import killed_on
from support.daemon import Daemon
from support.history_daemon import daemon_in, taken_up
from support.restore_rig import held, url
from tickwheel import Client, Delivery, Task
from tickwheel.cli.app import run

HOUR_S = 3_600
KEYS = {"k": b"k" * 32}
LONG = b"a line of a report\n" * 500
BODIES = {b"plain": None, b"json": "json", LONG: "zlib", LONG + b"!": "json;v=2,zlib"}

killed = killed_on("sqlite", "redis", "postgresql")


async def test_packed_bodies_are_unpacked_over_kills(killed: Daemon) -> None:
    await killed.astart()
    async with Client(killed.url, send_timeout=10, compress_over=1_000) as client:
        await client.create_group("t", "g")
        await client.enqueue_many(
            [Task("t", b"plain"), Task("t", b"json", encoding="json"),
             Task("t", LONG + b"!", encoding="json;v=2")]
        )  # fmt: skip
        async with client.transaction("payments") as transaction:
            await transaction.enqueue("t", LONG)
        await killed.arestart()
        for delivery in await had(client):
            assert await delivery.nack(delay=0, reason="no") == "retrying"
        await killed.arestart()
        for delivery in await had(client):
            assert await delivery.reject("never") == "dead"
        await killed.arestart()
        by_encoding = {task.encoding: client.body_of(task) async for task in client.list_tasks()}
        assert by_encoding == {encoding: body for body, encoding in BODIES.items()}
        bulk = await client.dead_requeue(topic="t", filter={})
        await client.wait_bulk(bulk.id)
        for delivery in await had(client):
            assert await delivery.ack() == "acked"


async def had(client: Client) -> list[Delivery]:
    """The delivery of each task."""
    result: dict[bytes, Delivery] = {}
    while result.keys() != BODIES.keys():
        for delivery in await client.pull("t", group="g", max=9, wait=10, lease=60):
            result[delivery.body] = delivery
    assert {body: delivery.encoding for body, delivery in result.items()} == BODIES
    return list(result.values())


def test_a_restore_keeps_the_encoding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def living() -> None:
        daemon = daemon_in(tmp_path)
        async with daemon, Client(daemon.url, compress_over=100, keys=KEYS) as client:
            await client.enqueue("t", b"before", delay=HOUR_S)
            await client.backup("kept.db")
            await client.enqueue("t", LONG, delay=HOUR_S, encoding="json")
            await daemon.aterminate()

    asyncio.run(living())
    asyncio.run(taken_up(tmp_path / "history"))
    assert run(["history", "tasks", "--dir", str(tmp_path / "history")]) == 0
    assert capsys.readouterr().out.count("encrypted with key k") == 2
    (backup,) = tmp_path.glob("**/kept.db")
    source = ["--from", str(backup), "--history", str(tmp_path / "history")]
    assert run(["restore", *source, "--into", url(tmp_path), "--json"]) == 0
    capsys.readouterr()
    codec = Client(keys=KEYS).codec
    result = {}
    for row in asyncio.run(held(url(tmp_path))).rows.values():
        assert row.options is not None and row.options.encoding is not None
        result[codec.unpack("t", row.body, row.options.encoding)] = row.options.encoding
    assert result == {b"before": "aesgcm;key=k", LONG: "json,zlib,aesgcm;key=k"}
