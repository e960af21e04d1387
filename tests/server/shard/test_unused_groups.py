"""Groups that nobody uses: reported, and ended when that is set."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from support.in_process import InProcess
from support.shard_rig import Peer
from tickwheel.api.frames import FrameType as T
from tickwheel.server.settings import Settings

WEEK_MS = 7 * 86_400_000


@asynccontextmanager
async def running(folder: Path, **settings: Any) -> AsyncIterator[tuple[InProcess, Peer]]:
    """A daemon that has looked at its groups g and other, in topic t, once."""
    async with InProcess(folder, **settings) as daemon:
        peer = daemon.connect()
        for group in ("g", "other"):
            assert (await peer.call(T.GROUP_CREATE, "t", group, None))[0] == T.OK
        await look(daemon)
        yield daemon, peer


async def look(daemon: InProcess) -> None:
    await daemon.shard.upkeep.unused.look()


async def unused(peer: Peer) -> dict[str, int | None]:
    groups = (await peer.call(T.STATS))[2]["topics"]["t"]["groups"]
    return {name: group["unused_ms"] for name, group in groups.items()}


def logged(daemon: InProcess, event: str) -> list[str]:
    return [line for line in daemon.log.lines if event in line]


async def test_unused_groups_are_reported_once_after_their_time(tmp_path: Path) -> None:
    async with running(tmp_path) as (daemon, peer):
        observed = daemon.daemon.roles.observed
        daemon.pass_time(WEEK_MS - 1)
        await look(daemon)
        assert await unused(peer) == {"g": None, "other": None}
        assert observed.groups_unused == 0
        daemon.pass_time(1)
        await look(daemon)
        daemon.pass_time(5_000)
        await look(daemon)
        assert await unused(peer) == {"g": WEEK_MS + 5_000, "other": WEEK_MS + 5_000}
        assert observed.groups_unused == 2
        (line, _) = logged(daemon, "group_unused")
        assert "group g of topic t: not used for 604800 s; it holds 0 ready" in line
        assert not logged(daemon, "group_ended"), "by default none ends"


@pytest.mark.parametrize("how", ["subscribes", "pulls between two looks", "keeps a delivery"])
async def test_any_use_of_a_group_resets_its_unused_time(tmp_path: Path, how: str) -> None:
    async with running(tmp_path, lease_max_s=10 * WEEK_MS / 1000) as (daemon, peer):
        if how == "keeps a delivery":
            assert (await peer.enqueue(("t", b"", 0)))[0] == T.OK
            await daemon.settle()
            answer = await peer.call(T.PULL, "t", "g", 1, 0, {"lease_ms": 5 * WEEK_MS})
            assert answer[0] == T.OK, answer
            await look(daemon)
        daemon.pass_time(WEEK_MS)
        if how != "keeps a delivery":
            await look(daemon)
            assert (await unused(peer))["g"] == WEEK_MS
        if how == "subscribes":
            assert (await peer.call(T.SUBSCRIBE, 1, "t", "g", 1, None))[0] == T.OK
        elif how == "pulls between two looks":
            waiting = peer.send(T.PULL, "t", "g", 1, 0, None)
            assert (await peer.answer(waiting))[0] == T.OK
        assert (await unused(peer))["g"] is None
        await look(daemon)
        daemon.pass_time(WEEK_MS - 1 if how.startswith("pulls") else WEEK_MS)
        await look(daemon)
        result = await unused(peer)
        assert result["g"] is None
        assert result["other"] is not None


async def test_group_unused_end_s_ends_groups_with_their_tasks(tmp_path: Path) -> None:
    async with running(tmp_path, group_unused_end_s=WEEK_MS / 500) as (daemon, peer):
        answer = await peer.enqueue(("t", b"", 0), ("t", b"", 3 * WEEK_MS))
        assert (await peer.call(T.SUBSCRIBE, 1, "t", "other", 5, None))[0] == T.OK
        await daemon.settle()
        daemon.pass_time(2 * WEEK_MS - 1)
        await look(daemon)
        assert set(await unused(peer)) == {"g", "other"}
        daemon.pass_time(1)
        await look(daemon)
        await daemon.settle()
        assert set(await unused(peer)) == {"other"}, "it has a subscriber"
        (line,) = logged(daemon, "group_ended")
        assert "g of topic t: not used for 1209600 s (group_unused_end_s)" in line
        assert "it held 1 ready, 0 waiting, 0 dead" in line
        result = (await peer.call(T.LOOKUP, answer[2][1]))[2]
        assert [set(task["groups"]) for task in result] == [{"other"}, set()]
        daemon.pass_time(2 * WEEK_MS)
        await look(daemon)
        assert set(await unused(peer)) == {"other"}, "still"
        daemon.recount()


async def test_a_restart_resets_the_unused_time(tmp_path: Path) -> None:
    settings = {"group_unused_end_s": WEEK_MS / 1000}
    async with running(tmp_path, **settings) as (daemon, _):
        daemon.pass_time(WEEK_MS - 1)
        await look(daemon)
        store, now_ms = daemon.store.copy(), daemon.sources.now_ms
    async with InProcess(tmp_path, store=store, now_ms=now_ms, **settings) as daemon:
        peer = daemon.connect()
        await look(daemon)
        daemon.pass_time(WEEK_MS - 1)
        await look(daemon)
        assert set(await unused(peer)) == {"g", "other"}


async def test_a_group_is_reported_before_it_ends() -> None:
    with pytest.raises(ValidationError, match="must not be below group_unused_report_s"):
        Settings(group_unused_report_s=10, group_unused_end_s=9)
