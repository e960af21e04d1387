"""``tickwheel status`` against daemons that say what a test wants."""

from __future__ import annotations

import asyncio
import json

import pytest

from support.fake_daemon import NOW_MS, FakeDaemon
from tickwheel.cli.app import run

Capture = pytest.CaptureFixture[str]


async def status(url: str, *options: str) -> int:
    return await asyncio.to_thread(run, ["status", "--url", url, *options])


async def test_status_has_a_row_per_address_and_for_the_named_leader(capsys: Capture) -> None:
    async with FakeDaemon() as standby, FakeDaemon() as active:
        leader = {"node": "left", "address": active.url, "epoch": 7, "since_ms": NOW_MS}
        standby.set_status(node="right", role="standby", state="standby", active=leader, epoch=0)
        active.set_status(node="left", state="loading", loaded=12_000, to_load=100_000, epoch=7)
        assert await status(f"{standby.url},127.0.0.1:1") == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["address", "node", "role", "state", "epoch", "since", "store"]
    assert [row.split()[0] for row in rows] == [standby.address, "127.0.0.1:1", active.address]
    assert rows[0].split()[1:5] == ["right", "standby", "standby", "-"]
    assert rows[1].split()[2] == "unreachable"
    assert "loading (12,000 of 100,000 loaded)" in rows[2]
    assert "(1h 2m)" in rows[2]
    assert "redis://r:6379/0" in rows[2]


async def test_status_prints_the_durability(capsys: Capture) -> None:
    async with FakeDaemon() as daemon:
        daemon.set_status(durability="appendfsync everysec: \x1b can lose a second")
        assert await status(daemon.url) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("durability: appendfsync everysec: ")
    assert "\x1b" not in last


async def test_status_prints_current_warnings(capsys: Capture) -> None:
    async with FakeDaemon() as daemon, FakeDaemon() as standby:
        daemon.set_status()
        standby.set_status(role="standby", state="standby")
        daemon.troubles = [("warning", "Group g of t is paused\x1b, with 3 ready tasks")]
        assert await status(daemon.url) == 0
        assert await status(standby.url) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "paused" in line] == [
        "warning: Group g of t is paused\\x1b, with 3 ready tasks"
    ]


async def test_status_json_has_one_object_per_address(capsys: Capture) -> None:
    async with FakeDaemon() as daemon:
        expected = daemon.set_status(address="tcp://known.as:7355")
        assert await status(f"{daemon.url},127.0.0.1:1", "--json") == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first == {"url": daemon.url, "reachable": True, **expected}
    assert second["url"] == "tcp://127.0.0.1:1"
    assert (second["reachable"], second["error"]) == (False, "unreachable")
    assert second["message"]


@pytest.mark.parametrize("state", ["store_trouble", "draining", "recovering"])
async def test_status_exits_with_1_if_no_daemon_serves(state: str, capsys: Capture) -> None:
    async with FakeDaemon() as daemon, FakeDaemon() as standby:
        daemon.set_status(state=state, detail="for a reason", store_ok=False)
        standby.set_status(role="standby", state="standby")
        assert await status(f"{daemon.url},{standby.address}") == 1
    out = capsys.readouterr().out
    assert f"{state.replace('_', ' ')} (for a reason)" in out
    assert "(NOT OK)" in out


async def test_status_of_one_shard_lists_all_shards(capsys: Capture) -> None:
    async with FakeDaemon() as first, FakeDaemon() as second:
        shards = [first.url, second.url, "tcp://127.0.0.1:1"]
        first.set_status(address=first.url, shard=0, shards=shards[:2], durability="on a disk")
        second.set_status(address=second.url, shard=1, shards=shards[:2], durability="on a disk")
        assert await status(second.address) == 0
        head, *rows, last = capsys.readouterr().out.splitlines()
        assert [row.split()[0] for row in rows] == [second.address, first.address]
        assert last == "durability: on a disk"
        first.set_status(address=first.url, shard=0, shards=shards, state="draining")
        second.set_status(address=second.url, shard=1, shards=shards)
        assert await status(second.address) == 1
        assert await status(f"{first.address},{second.address}") == 1
        first.set_status(address=first.url, shard=0, shards=shards)
        assert await status(second.address) == 1
    rows = capsys.readouterr().out.splitlines()[-3:]
    assert [row.split()[0] for row in rows] == [second.address, first.address, "127.0.0.1:1"]
    assert rows[2].split()[2] == "unreachable"


async def test_status_exits_with_3_if_no_daemon_is_reachable(capsys: Capture) -> None:
    assert await status("tcp://127.0.0.1:1,127.0.0.1:2") == 3
    captured = capsys.readouterr()
    assert captured.out.count("unreachable") == 2
    assert captured.err == ""


async def test_status_shows_a_daemon_that_refuses_the_token(capsys: Capture) -> None:
    async with FakeDaemon() as daemon:
        daemon.greet = lambda peer, frame: (peer.error(frame, "unauthorized", "no"), peer.close())[
            0
        ]
        assert await status(daemon.url) == 1
    assert "unauthorized" in capsys.readouterr().out
