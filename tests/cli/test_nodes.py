"""What the commands about nodes and shards ask, and how they show the answers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from cli.test_groups import _ask
from support.fake_daemon import NOW_MS, FakeDaemon, Peer
from support.waiting import soon
from tickwheel.api.frames import FrameType as T
from tickwheel.cli import nodes
from tickwheel.cli.call import EXIT_FAILED, Call
from tickwheel.cli.output import Output
from tickwheel.errors import BadRequest, Conflict

NODE: dict[str, Any] = {
    "node": "a", "address": "tcp://host-a:7355", "http": None, "version": "1.2", "capacity": 1.5,
    "since_ms": NOW_MS, "seen_ms": NOW_MS + 500, "draining": False, "shards": [3, 0, 1],
    "standbys": [],
}  # fmt: skip
OTHER = NODE | {"node": "b", "draining": True, "shards": [], "standbys": [1], "capacity": 1.0}
SHARD: dict[str, Any] = {
    "shard": 0, "node": "a", "address": "tcp://host-a:7356", "epoch": 4, "since_ms": NOW_MS,
    "wanted": "a", "placed": None, "waits": None, "http": None,
}  # fmt: skip
NOBODYS = SHARD | {"shard": 1, "node": None, "address": None, "wanted": "b", "waits": "b starts"}


def listing(*shards: dict[str, Any]) -> dict[str, Any]:
    return {"nodes": [NODE, OTHER], "shards": list(shards), "route_version": 7}


@pytest.mark.parametrize(
    ("numbers", "text"),
    [((), "-"), ((4,), "4"), ((2, 0, 1, 7), "0-2, 7"), ((0, 2, 4), "0, 2, 4"), ((5, 6), "5-6")],
)
def test_consecutive_shard_numbers_are_a_range(numbers: tuple[int, ...], text: str) -> None:
    assert nodes.format_ranges(numbers) == text


async def test_nodes_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    codes: list[int] = []

    async def run(call: Call) -> None:
        codes.append(await nodes.list_nodes(call))

    assert await _ask(run, T.NODE_LIST, listing(SHARD)) == ()
    head, first, second = capsys.readouterr().out.splitlines()
    assert head.split() == [
        "node", "address", "state", "version", "capacity", "shards", "stands", "by", "since",
    ]  # fmt: skip
    assert first.split()[:7] == ["a", "host-a:7355", "serves", "1.2", "1.5", "0-1,", "3"]
    assert second.split()[:7] == ["b", "host-a:7355", "draining", "1.2", "1", "-", "1"]
    await _ask(run, T.NODE_LIST, listing(SHARD, NOBODYS), as_json=True)
    shown = capsys.readouterr()
    results = [json.loads(line) for line in shown.out.splitlines()]
    assert results[0] == NODE | {
        "since": "2026-09-21T14:13:20.000Z", "seen": "2026-09-21T14:13:20.500Z",
    }  # fmt: skip
    assert "no daemon serves these shards: 1" in shown.err
    assert codes == [0, EXIT_FAILED]


async def test_nodes_raises_the_error_of_a_daemon_without_nodes() -> None:
    with pytest.raises(Conflict, match="not a node"):
        await _ask(nodes.list_nodes, T.NODE_LIST, Conflict("this daemon is not a node"))


async def test_a_shard_is_moved(capsys: pytest.CaptureFixture[str]) -> None:
    answer: dict[str, Any] = {"shard": 3, "node": "b"}
    asked = await _ask(lambda c: nodes.move(c, 3, "b"), T.SHARD_MOVE, answer)
    assert asked == (3, "b")
    assert capsys.readouterr().out == "shard 3 moves to b\n"
    asked = await _ask(
        lambda c: nodes.move(c, 3, anywhere=True), T.SHARD_MOVE, answer | {"node": None},
        as_json=True,
    )  # fmt: skip
    assert asked == (3, None)
    assert json.loads(capsys.readouterr().out) == {"shard": 3, "node": None}


@pytest.mark.parametrize(("node", "anywhere"), [(None, False), ("b", True)])
async def test_move_takes_a_node_or_anywhere_but_not_both(
    node: str | None, *, anywhere: bool
) -> None:
    with pytest.raises(BadRequest, match="either NODE or --anywhere"):
        await nodes.move(Call(None, None, Output(as_json=False)), 3, node, anywhere=anywhere)


@pytest.mark.parametrize("undo", [False, True])
async def test_a_node_is_drained(capsys: pytest.CaptureFixture[str], *, undo: bool) -> None:
    answer = {"node": "b", "draining": not undo}
    asked = await _ask(lambda c: nodes.drain(c, "b", undo=undo), T.NODE_DRAIN, answer)
    assert asked == ("b", not undo)
    outcome = "b gets shards again" if undo else "b gives its shards away and gets no more"
    assert capsys.readouterr().out == outcome + "\n"


@pytest.mark.parametrize("as_json", [False, True])
async def test_shards_show_owner_target_and_trouble(
    capsys: pytest.CaptureFixture[str], *, as_json: bool
) -> None:
    async with FakeDaemon() as daemon:
        daemon.set_status(node="a", pid=4711, shard=0, shards=[daemon.url, ""])
        daemon.more = {"shard": 0, "shards": [daemon.url, ""], "route_version": 7}
        call = Call(daemon.url, None, Output(as_json=as_json))
        listing_ = asyncio.ensure_future(nodes.list_shards(call))
        peer: Peer = await daemon.peer()
        moving = SHARD | {"wanted": "b", "waits": "b reads"}
        peer.ok(await peer.next(T.NODE_LIST), listing(moving, NOBODYS))
        assert await soon(listing_) == EXIT_FAILED
        shown = capsys.readouterr().out
        if as_json:
            first, second = map(json.loads, shown.splitlines())
            assert (first["shard"], first["node"], first["pid"]) == (0, "a", 4711)
            assert (first["wanted"], first["waits"], first["url"]) == ("b", "b reads", daemon.url)
            assert (second["shard"], second["node"], second["reachable"]) == (1, None, False)
            assert second["message"] == "no daemon serves it"
            return
        head, one, two = shown.splitlines()
        assert head.split()[:4] == ["shard", "node", "address", "pid"]
        assert one.split()[:4] == ["0", "a", daemon.address, "4711"]
        assert "ready, moves to b (b reads)" in one
        assert two.split()[:4] == ["1", "-", "-", "-"]
        assert "unreachable: no daemon serves it, moves to b (b starts)" in two


async def test_shards_of_a_single_daemon_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    async with FakeDaemon() as daemon:
        daemon.set_status(node="alone")
        call = Call(daemon.url, None, Output(as_json=False))
        assert await soon(nodes.list_shards(call)) == 0
        [_, one] = capsys.readouterr().out.splitlines()
        assert one.split()[:3] == ["0", "alone", daemon.address]
