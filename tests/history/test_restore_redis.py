"""Restoring into Redis: the same rows, an empty shard only, and nobody who serves meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.history_rig import HOUR_MS, NOW_MS, acked, delivered, enqueued, make_id, write
from support.redis_server import RedisServer
from support.restore_rig import LATER_MS, STARTED, held, make_backup, run, stopped
from tickwheel.errors import BadRequest, Conflict
from tickwheel.history import restore as target
from tickwheel.model.records import DeadRow, GroupRow, ProgressRow, ProgressState, TaskRow
from tickwheel.persistence import open_election
from tickwheel.persistence.contract import Leader, StoreUnusable
from tickwheel.persistence.filling import Filler
from tickwheel.persistence.redis import options_from
from tickwheel.persistence.redis.opening import RedisAdministration

A, B, C = (make_id(n) for n in range(3))
DUE = NOW_MS + HOUR_MS * 5


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path / "redis").start()
    yield server
    server.kill()


async def test_all_rows_are_restored_into_an_empty_shard(
    tmp_path: Path, redis: RedisServer
) -> None:
    rows = [TaskRow(A, DUE, "t", b"\x00a"), TaskRow(B, DUE, "t", b"b")]
    waiting = ProgressRow(B, "g", ProgressState.WAITING, 2, DUE, 4)
    letter = DeadRow(A, "h", "t", NOW_MS, 3, "no")
    groups = [GroupRow("t", "g", 0), GroupRow("t", "h", 0)]
    backup = await make_backup(
        tmp_path, rows, progress=[waiting], dead=[letter], groups=groups, opens=6
    )
    write(tmp_path, [[STARTED], [enqueued([C], DUE, bodies=[b"c"])],
                     [delivered([A]), acked([A], ended=False)], [stopped()]])  # fmt: skip
    url = redis.url("")
    report = await run(tmp_path, backup, into=url)
    result = await held(url)
    assert result.rows == {row.id: row for row in rows} | {C: TaskRow(C, DUE, "t", b"c")}
    assert result.progress[B, "g"] == waiting
    assert result.progress[A, "g"].state is ProgressState.DONE
    assert set(result.dead) == {(A, "h")}
    assert set(result.groups) == {("t", "g"), ("t", "h")}
    assert (report.epoch, result.opened.epoch) == (7, 8)
    assert result.opened.clean and result.opened.id_mark == int(report.id_mark)
    with pytest.raises(Conflict, match="is initialized"):
        await run(tmp_path, backup, into=url)


async def test_a_newly_initialised_shard_is_filled(tmp_path: Path, redis: RedisServer) -> None:
    backup = await make_backup(tmp_path, [TaskRow(A, DUE, "t", b"a")])
    url, options = redis.url(""), options_from(redis.url(""))
    redis.call("HSET", "{tw:default:0}:wheel", "format", "1", "rewriting", "gone/1")
    with pytest.raises(Conflict, match="incomplete.*tickwheel init --force --store"):
        await run(tmp_path, backup, into=url, history=())
    administration = RedisAdministration(options)
    incarnation = await administration.lay_out(await administration.look(), NOW_MS, watch_s=0)
    await run(tmp_path, backup, into=url, history=())
    assert set((await held(url)).rows) == {A}
    assert (await administration.look()).incarnation == incarnation
    with pytest.raises(Conflict, match="1 tasks"):
        await run(tmp_path, backup, into=url, history=())


async def test_a_shard_that_a_daemon_leads_is_left_alone(
    tmp_path: Path, redis: RedisServer
) -> None:
    backup = await make_backup(tmp_path, [TaskRow(A, DUE, "t", b"a")])
    url = redis.url("")
    election = open_election(url, 60_000)
    assert election is not None
    assert await election.acquire(Leader("other/1", "tcp://other:1", 0, 0))
    with pytest.raises(StoreUnusable, match="other/1 at tcp://other:1 leads this shard"):
        await run(tmp_path, backup, into=url, history=())
    await election.close()


async def test_a_restore_holds_the_lease_of_the_shard(
    tmp_path: Path, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    backup = await make_backup(tmp_path, [TaskRow(A, DUE, "t", b"a")])
    url = redis.url("")
    tried = []

    async def look(filler: Filler) -> None:
        election = open_election(url, 60_000)
        assert election is not None
        tried.append(await election.acquire(Leader("other/1", "tcp://other:1", 0, 0)))
        await election.close()

    monkeypatch.setattr(Filler, "end", look)
    await run(tmp_path, backup, into=url, history=())
    assert tried == [False]


async def test_a_lost_lease_ends_the_restore(
    tmp_path: Path, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    backup = await make_backup(tmp_path, [TaskRow(A, DUE, "t", b"a")])

    async def lost(lease: target.Lease) -> None:
        raise StoreUnusable("the leader's lease was lost")

    monkeypatch.setattr(target.Lease, "renew", lost)
    with pytest.raises(StoreUnusable, match=r"lost.*incomplete: tickwheel init --force"):
        await run(tmp_path, backup, into=redis.url(""), history=())


async def test_a_shard_with_a_part_of_a_backup_is_not_opened(
    tmp_path: Path, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The restore was interrupted."""
    backup = await make_backup(tmp_path, [TaskRow(A, DUE, "t", b"a")])
    url, administration = redis.url(""), RedisAdministration(options_from(redis.url("")))

    async def interrupt(filler: Filler) -> None:
        raise asyncio.CancelledError

    with monkeypatch.context() as patch:
        patch.setattr(Filler, "end", interrupt)
        with pytest.raises(asyncio.CancelledError):
            await run(tmp_path, backup, into=url, history=())
    with pytest.raises(StoreUnusable, match="a restore into it was interrupted"):
        await held(url)
    await administration.lay_out(await administration.look(), NOW_MS, watch_s=0)
    await run(tmp_path, backup, into=url, history=())
    assert set((await held(url)).rows) == {A}


async def test_the_shard_must_be_the_backups(tmp_path: Path, redis: RedisServer) -> None:
    backup = await make_backup(tmp_path, [TaskRow(A, DUE, "t", b"a")])
    with pytest.raises(BadRequest, match="different shards: 0, 3"):
        await run(tmp_path, backup, into=redis.url("shard=3"), history=(), now_ms=LATER_MS)
