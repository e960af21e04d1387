"""Redis away, full, read-only, slow, late, empty, older: nothing confirmed is lost or doubled."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from persistence.redis.subjects import Make, store
from persistence.store_subject import Subject, taken
from support.redis_proxy import Proxy
from support.redis_server import RedisServer
from support.store_rows import ended, in_flight, tasks
from support.waiting import comes
from tickwheel.model.kinds import GROUP, Effects, keyed
from tickwheel.model.records import GroupRow, TaskRow
from tickwheel.persistence.contract import (
    CommitRefused,
    CommitUnknown,
    Fenced,
    StoreBehind,
    StoreBroken,
    StoreLost,
)
from tickwheel.persistence.redis.layout import SEAL, STAGE, Script, TopicNumbers, prepare
from tickwheel.persistence.redis.writer import ReclaimNeeded, Sender

S = "{tw:default:0}"
PATIENCE_S = 60.0


@pytest.fixture
async def subject(make: Make) -> Subject:
    result = make()
    await result.open()
    return result


class TestWithoutMemory:
    async def test_only_new_tasks_are_refused_without_memory(
        self, subject: Subject, redis_server: RedisServer
    ) -> None:
        await subject.commit(tasks(range(1, 11)))
        redis_server.call("CONFIG", "SET", "maxmemory", "1")
        for _ in range(2):
            with pytest.raises(CommitRefused, match="OOM") as refused:
                await subject.commit(tasks([11]))
            assert refused.value.full
        assert await subject.store.probe_room() is False
        await subject.commit(ended([1, 2]))
        await subject.commit(
            Effects(
                progress={(3, "a"): in_flight(3, "a")},
                records=keyed(GROUP, [GroupRow("t", "a", 0)]),
                updated={4: TaskRow(4, 9_000, "t", b"later")},
            )
        )
        assert await subject.ids() == list(range(3, 11))
        redis_server.call("CONFIG", "SET", "maxmemory", "0")
        assert await subject.store.probe_room() is True
        assert await subject.commit(tasks([11])) is True
        assert (await subject.store.read([3]))[3].progress == (in_flight(3, "a"),)

    async def test_a_large_batch_is_refused_whole(
        self, subject: Subject, redis_server: RedisServer
    ) -> None:
        redis_server.call("CONFIG", "SET", "maxmemory", "1")
        with pytest.raises(CommitRefused) as refused:
            await subject.commit(tasks(range(1, 22_000)))
        assert refused.value.full
        redis_server.call("CONFIG", "SET", "maxmemory", "0")
        assert await subject.ids() == []
        assert await subject.commit(tasks([1])) is True
        redis_server.call("CONFIG", "SET", "maxmemory", "1")
        await subject.commit(Effects(progress={(i, "g"): in_flight(i, "g") for i in range(9_000)}))
        await subject.commit(ended(range(1, 30_000)))
        assert await subject.ids() == []
        assert redis_server.call("KEYS", "*stage*") == b"*0\r\n"

    async def test_a_large_batch_that_is_refused_midway_leaves_no_parts(
        self, subject: Subject, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sender, scripts = store(subject)._writer._sender, list[Script]()
        decide = sender._decide

        async def fill_up(script: Script, *args: Any) -> None:
            scripts.append(script)
            if len(scripts) == 2:
                redis_server.call("CONFIG", "SET", "maxmemory", "1")
            await decide(script, *args)

        rows = {i: TaskRow(i, 5, "t", bytes(1 << 20)) for i in range(1, 21)}
        with monkeypatch.context() as patch:
            patch.setattr(sender, "_decide", fill_up)
            with pytest.raises(CommitRefused, match="OOM"):
                await subject.commit(Effects(enqueued=rows, id_mark=20))
        assert scripts == [STAGE, STAGE]
        assert redis_server.call("KEYS", "*stage*") == b"*0\r\n"
        redis_server.call("CONFIG", "SET", "maxmemory", "0")
        assert await subject.commit(tasks([1])) is True


class TestARedisThatTakesNoWrites:
    async def test_read_only(self, subject: Subject, redis_server: RedisServer) -> None:
        await subject.commit(tasks([1]))
        redis_server.call("REPLICAOF", "127.0.0.1", "1")
        with pytest.raises(CommitRefused, match="READONLY") as refused:
            await subject.commit(tasks([2]))
        assert not refused.value.full
        redis_server.call("REPLICAOF", "NO", "ONE")
        await taken(subject, tasks([3]))
        assert await subject.ids() == [1, 3]

    async def test_too_few_replicas_refuse_a_batch(
        self, subject: Subject, redis_server: RedisServer
    ) -> None:
        redis_server.call("CONFIG", "SET", "min-replicas-to-write", "1")
        with pytest.raises(CommitRefused, match="NOREPLICAS"):
            await subject.commit(ended([2]))
        redis_server.call("CONFIG", "SET", "min-replicas-to-write", "0")
        await subject.commit(ended([2]))

    async def test_an_unreachable_or_loading_redis_refuses_commits(
        self, subject: Subject, redis_server: RedisServer
    ) -> None:
        redis_server.call("MSET", *(word for i in range(1_000) for word in (f"theirs:{i}", i)))
        await subject.commit(tasks([1]))
        redis_server.rewrite()
        redis_server.kill()
        # The batch may have been on its way when the connection broke; nothing else may.
        with pytest.raises((CommitUnknown, CommitRefused)):
            await subject.commit(tasks([2]))
        with pytest.raises((CommitUnknown, CommitRefused)):
            await subject.commit(tasks([2]))
        assert await subject.store.probe_room() is False
        assert list(await subject.store.read([1])) == [1], "from memory"
        assert await subject.ids() == [1]
        redis_server.options["key-load-delay"] = "500"
        redis_server.options["loading-process-events-interval-bytes"] = "1024"
        redis_server.start(loaded=False)
        message = ""
        async with asyncio.timeout(PATIENCE_S):
            while "LOADING" not in message.upper():
                with pytest.raises((CommitUnknown, CommitRefused)) as refused:
                    await subject.commit(tasks([2]))
                message = refused.value.message
                await asyncio.sleep(0.01)  # real time: Redis is another process
        await taken(subject, tasks([2]))
        assert await subject.ids() == [1, 2]

    async def test_never_sent_is_certainly_not_applied(
        self, subject: Subject, redis_server: RedisServer
    ) -> None:
        await subject.commit(tasks([1]))
        redis_server.kill()
        with pytest.raises((CommitUnknown, CommitRefused)):
            await subject.commit(ended([1]))  # finds the connection broken
        redis_server.start()
        await taken(subject, ended([1]))
        redis_server.kill()
        with pytest.raises((CommitUnknown, CommitRefused)):
            await subject.commit(tasks([2]))
        await store(subject)._writer._connection.close()
        subject.n += 1
        store(subject)._writer._sender.unknown = 0
        with pytest.raises(CommitRefused):
            await subject.commit(tasks([3]))
        subject.n -= 1


class TestASilentRedis:
    async def test_a_stopped_server_leaves_the_fate_open(
        self, subject: Subject, redis_server: RedisServer
    ) -> None:
        await subject.commit(tasks([1]))
        redis_server.pause()
        for _ in range(2):
            with pytest.raises(CommitUnknown):
                await subject.commit(tasks([2]))
        redis_server.go_on()
        await taken(subject, tasks([2]))
        assert await subject.commit(tasks([3])) is True
        assert await subject.ids() == [1, 2, 3]

    async def test_a_reply_that_was_lost_is_found_out(
        self, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, make: Make
    ) -> None:
        """Applied, but the answer did not come: the same number says that it had been."""
        subject = make()
        await subject.open()
        line = store(subject)._writing
        run = line.run

        async def lose_the_answer(*args: Any, **options: Any) -> None:
            await run(*args, **options)
            await line._drop("lost")
            from tickwheel.persistence.on_server import NoReply

            raise NoReply("lost")

        monkeypatch.setattr(line, "run", lose_the_answer)
        for effects in (tasks([1]), tasks(range(10, 22_000))):
            with pytest.raises(CommitUnknown):
                await subject.commit(effects)
            with monkeypatch.context() as healed:
                healed.setattr(line, "run", run)
                await asyncio.sleep(0.2)  # real time: what was lost is over by then
                assert await subject.commit(effects) is (len(effects.enqueued) > 1)
        assert len(await subject.ids()) == 21_991
        await subject.store.close(clean=False)


class TestALateScript:
    @pytest.fixture
    async def proxy(self, redis_server: RedisServer) -> AsyncIterator[Proxy]:
        proxy = await Proxy(redis_server.port).start()
        yield proxy
        await proxy.stop()

    @pytest.fixture
    async def held(self, proxy: Proxy, make: Make) -> Subject:
        """Its commit of tasks 1 to 3 is under way and will be delivered late."""
        subject = make(port=proxy.port)
        await subject.open()
        proxy.hold()
        with pytest.raises(CommitUnknown):
            await subject.commit(tasks([1, 2, 3]))
        proxy.let_new_through()
        await asyncio.sleep(0.2)  # real time: what was lost is over by then
        return subject

    async def test_a_late_script_is_not_applied_twice(self, proxy: Proxy, held: Subject) -> None:
        await held.commit(tasks([1, 2, 3]))
        await held.commit(ended([2]))
        proxy.let_go()
        await proxy.late.wait()
        assert await held.ids() == [1, 3]
        assert await held.commit(ended([3])) is True
        assert await held.ids() == [1]

    async def test_a_late_script_of_a_refused_batch_is_void(
        self, proxy: Proxy, held: Subject, redis_server: RedisServer
    ) -> None:
        redis_server.call("CONFIG", "SET", "maxmemory", "1")
        with pytest.raises(CommitRefused) as refused:
            await held.commit(tasks([1, 2, 3]))
        assert refused.value.full
        redis_server.call("CONFIG", "SET", "maxmemory", "0")
        proxy.let_go()
        await proxy.late.wait()
        assert await held.commit(ended([9])) is True
        assert await held.ids() == []

    async def test_a_late_script_of_a_deposed_daemon_is_fenced(
        self, proxy: Proxy, held: Subject, redis_server: RedisServer, make: Make
    ) -> None:
        other = make()
        await other.open("other")
        proxy.let_go()
        await proxy.late.wait()
        assert await other.ids() == []
        with pytest.raises(Fenced, match="epoch 2 of 'other' began"):
            await held.commit(tasks([1, 2, 3]))
        with pytest.raises(Fenced):
            await held.commit(ended([1]))


class TestTheScriptItself:
    """Beside what the claim voids: the same claim, and a number that is over or not yet due."""

    async def test_applies_a_number_once(self, subject: Subject) -> None:
        await subject.commit(tasks([1]))
        await subject.commit(ended([1]))
        sender = store(subject)._writer._sender
        for n, effects in ((1, tasks([1])), (2, tasks([7])), (4, tasks([8]))):
            await _says(sender, "gap" if n == 4 else "before", n, effects)
            await _says(sender, "gap" if n == 4 else "before", n, tasks(range(10, 22_000)))
        assert await subject.ids() == []
        assert await subject.commit(tasks([2])) is True

    async def test_a_sealed_batch_is_applied_first(
        self, subject: Subject, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def die(count: int, applied: int) -> None:
            raise KeyError("killed")

        sender = store(subject)._writer._sender
        with monkeypatch.context() as dying:
            dying.setattr(sender, "apply_parts", die)
            with pytest.raises(KeyError):
                await subject.commit(tasks(range(1, 22_000)))
        await _says(sender, "parts", 2, ended([5]))
        await _says(sender, "parts", 2, tasks(range(30_000, 52_000)))
        sender.unknown = 1
        await subject.store.verify()
        assert await subject.ids() == [], "nothing was confirmed yet"
        assert await subject.commit(tasks(range(1, 22_000))) is False
        assert len(await subject.ids()) == 21_999
        assert await subject.commit(ended([5])) is True


async def _says(sender: Sender, status: str, n: int, effects: Effects) -> None:
    with pytest.raises(ReclaimNeeded, match=status):
        prepared = prepare(effects, 1_000, TopicNumbers())
        await sender.send(n, effects, prepared.flat, prepared.size_bytes)


class TestADeposedDaemon:
    async def test_a_deposed_daemon_is_fenced_for_reads(
        self, subject: Subject, redis_server: RedisServer, make: Make
    ) -> None:
        await subject.commit(tasks([1]))
        other = make()
        await other.open("other")
        with pytest.raises(Fenced):
            await subject.commit(tasks([2]))
        await subject.store.close(clean=True)
        assert await other.store.commit(other.opened.epoch, "other", 2, tasks([5])) is True
        other_again = make()
        assert (await other_again.open()).clean is False, "the deposed one closed nothing"
        await other.store.close(clean=False)


class TestARedisThatLostSomething:
    async def _lose(self, subject: Subject, server: RedisServer, *, empty: bool = False) -> None:
        """Five batches, of which Redis keeps the first two, or none."""
        for i in (1, 2):
            await subject.commit(tasks([i]))
        snapshot = server.snapshot()
        await subject.commit(tasks([3]))
        await subject.commit(ended([1]))
        await subject.commit(Effects(progress={(2, "a"): in_flight(2, "a")}, id_mark=3))
        server.restart_from(None if empty else snapshot)

    async def test_older_gets_the_missing_batches_again(
        self, subject: Subject, redis_server: RedisServer
    ) -> None:
        await self._lose(subject, redis_server)
        await taken(subject, tasks([4]))
        assert store(subject).replays == 1
        assert await subject.ids() == [2, 3, 4]
        assert (await subject.small()).progress == [in_flight(2, "a")]
        assert [i for i, _ in (await subject.small()).outcomes] == [1]
        assert (await subject.reopen()).last_batch == 6

    async def test_confirmed_tasks_are_replayed_without_memory(
        self, subject: Subject, redis_server: RedisServer
    ) -> None:
        """Acks, which free memory, wait for the replay."""
        await subject.commit(tasks([1]))
        snapshot = redis_server.snapshot()
        await subject.commit(tasks([2]))
        await subject.commit(tasks(range(10, 22_000)))
        redis_server.options["maxmemory"] = "1"
        redis_server.restart_from(snapshot)
        await taken(subject, ended([1]))
        assert store(subject).replays == 1
        assert await subject.ids() == [2, *range(10, 22_000)]
        with pytest.raises(CommitRefused, match="OOM"):
            await subject.commit(tasks([3]))

    async def test_older_is_noticed_by_a_read(
        self, subject: Subject, redis_server: RedisServer
    ) -> None:
        """While not everything is in memory."""
        await subject.commit(tasks([100]))
        await subject.reopen()
        await self._lose(subject, redis_server)
        rows = await subject.store.read([1, 2, 3])
        assert sorted(rows) == [2, 3]
        assert store(subject).replays == 1

    async def test_older_than_the_last_opening(self, redis_server: RedisServer, make: Make) -> None:
        subject = make()
        await subject.open()
        await subject.commit(tasks([1]))
        await subject.store.close(clean=True)
        snapshot = redis_server.snapshot()
        await subject.open()
        await subject.commit(tasks([2]))
        redis_server.restart_from(snapshot)
        await taken(subject, tasks([3]))
        assert await subject.ids() == [1, 2, 3]
        assert (await subject.reopen()).epoch == 3
        await subject.store.close(clean=True)

    async def test_an_older_redis_than_the_kept_batches_is_refused(
        self, redis_server: RedisServer, make: Make
    ) -> None:
        """And not everything is in memory yet."""
        subject = make("keep_bytes=10")
        await subject.open()
        await subject.reopen()
        await self._lose(subject, redis_server)
        for _ in range(2):
            with pytest.raises(
                StoreBehind, match="its last batch is 2, after it confirmed 5"
            ) as behind:
                await subject.commit(tasks([4]))
            assert (behind.value.last_seen, behind.value.last_known) == (2, 5)
        with pytest.raises(StoreBehind):
            await subject.store.read([1])
        await subject.store.close(clean=True)

    async def test_empty(self, subject: Subject, redis_server: RedisServer) -> None:
        """And not everything is in memory yet."""
        await subject.reopen()
        await self._lose(subject, redis_server, empty=True)
        with pytest.raises(StoreLost, match="has lost its data"):
            await subject.commit(tasks([4]))
        with pytest.raises(StoreLost):
            await subject.store.read([1])
        assert redis_server.call("DBSIZE") == b":0\r\n"

    async def test_a_shard_laid_out_by_another_daemon_fences(
        self, subject: Subject, redis_server: RedisServer, make: Make
    ) -> None:
        await subject.commit(tasks([1]))
        redis_server.call("FLUSHALL")
        other = make()
        await other.open("other")
        for _ in range(2):
            with pytest.raises(Fenced, match="initialized again.*epoch 1, by 'other'"):
                await subject.commit(tasks([2]))
        with pytest.raises(Fenced):
            await subject.store.verify()
        assert await other.ids() == []
        assert await other.store.commit(other.opened.epoch, "other", 1, tasks([1])) is True


class TestLargeBatches:
    async def test_large_batches_are_applied(self, subject: Subject) -> None:
        rows = {i: TaskRow(i, 5, "t", bytes(1 << 20)) for i in range(1, 21)}
        await subject.commit(Effects(enqueued=rows, id_mark=20))
        result = await subject.store.read(list(rows))
        assert {i: task.row for i, task in result.items()} == rows

    async def test_a_body_of_twenty_mebibytes(self, subject: Subject) -> None:
        row = TaskRow(1, 5, "t", bytes(20 << 20))
        await subject.commit(Effects(enqueued={1: row, 2: TaskRow(2, 5, "t", b"")}, id_mark=2))
        assert (await subject.store.read([1]))[1].row == row

    async def test_a_duplicate_id_refuses_the_whole_batch(self, subject: Subject) -> None:
        await subject.commit(tasks([21_999], body=b"first"))
        with pytest.raises(StoreBroken, match="id 21999 was assigned twice"):
            await subject.commit(tasks(range(1, 22_000)))
        await subject.reopen(clean=False)
        assert await subject.ids() == [21_999]

    async def test_sealed_by_a_daemon_that_died_is_applied_by_the_next(
        self,
        subject: Subject,
        redis_server: RedisServer,
        monkeypatch: pytest.MonkeyPatch,
        make: Make,
    ) -> None:
        async def die(count: int, applied: int) -> None:
            raise KeyError("killed")

        monkeypatch.setattr(store(subject)._writer._sender, "apply_parts", die)
        with pytest.raises(KeyError):
            await subject.commit(tasks(range(1, 22_000)))
        following = make()
        assert (await following.open()).last_batch == 1
        assert len(await following.ids()) == 21_999
        assert redis_server.call("KEYS", "*stage*") == b"*0\r\n"

    async def test_staged_and_not_sealed_never_was(
        self,
        subject: Subject,
        redis_server: RedisServer,
        monkeypatch: pytest.MonkeyPatch,
        make: Make,
    ) -> None:
        sender = store(subject)._writer._sender
        decide = sender._decide

        async def die(script: Script, *args: Any) -> None:
            if script is SEAL:
                raise KeyError("killed")
            await decide(script, *args)

        monkeypatch.setattr(sender, "_decide", die)
        with pytest.raises(KeyError):
            await subject.commit(tasks(range(1, 22_000)))
        following = make()
        assert (await following.open()).last_batch == 0
        assert redis_server.call("KEYS", "*stage*") == b"*0\r\n"
        assert await following.ids() == []
        await following.commit(tasks(range(1, 22_000)))
        assert len(await following.ids()) == 21_999


class TestReplicas:
    async def test_a_batch_waits_for_them(
        self, redis_server: RedisServer, tmp_path: Path, make: Make
    ) -> None:
        subject = make("wait_replicas=1&wait_ms=100")
        await subject.open()
        for _ in range(2):
            with pytest.raises(CommitUnknown, match="only 0 of 1 replicas"):
                await subject.commit(tasks([1]))
        replica = RedisServer(
            tmp_path / "replica", replicaof=f"127.0.0.1 {redis_server.port}"
        ).start(loaded=False)
        try:

            async def repeated() -> list[bool]:
                with contextlib.suppress(CommitRefused, CommitUnknown):
                    return [await subject.commit(tasks([1]))]
                return []

            assert await comes(repeated) == [False], "it was there"
            await taken(subject, tasks([2]))
            assert replica.call("ZCARD", f"{S}:store") == b":2\r\n"
            await subject.store.close(clean=True)
        finally:
            replica.kill()


class TestTheSecondDriver:
    """The cases in which our own time-outs and error handling around it decide."""

    async def test_outlives_silence_absence_and_refusal(
        self, redis_server: RedisServer, make: Make
    ) -> None:
        subject = make("driver=asyncio-redis")
        await subject.open()
        await subject.commit(tasks([1]))
        redis_server.pause()
        with pytest.raises(CommitUnknown):
            await subject.commit(tasks([2]))
        redis_server.go_on()
        await taken(subject, tasks([2]))
        redis_server.kill()
        with pytest.raises((CommitUnknown, CommitRefused)):
            await subject.commit(tasks([3]))
        redis_server.start()
        await taken(subject, tasks([3]))
        redis_server.call("CONFIG", "SET", "maxmemory", "1")
        with pytest.raises(CommitRefused) as refused:
            await subject.commit(tasks([4]))
        assert refused.value.full
        assert await subject.commit(ended([1])) is True
        assert await subject.ids() == [2, 3]

    async def test_the_second_driver_replays_to_an_older_redis(
        self, redis_server: RedisServer, make: Make
    ) -> None:
        subject = make("driver=asyncio-redis")
        await subject.open()
        await subject.commit(tasks([1]))
        snapshot = redis_server.snapshot()
        await subject.commit(tasks([2]))
        redis_server.restart_from(snapshot)
        await taken(subject, tasks([3]))
        assert await subject.ids() == [1, 2, 3]


class TestReadingBesideCommits:
    async def test_a_listing_and_a_copy_see_whole_tasks(
        self, subject: Subject, tmp_path: Path
    ) -> None:
        await subject.commit(tasks(range(1, 4_001)))

        async def go_on() -> None:
            for i in range(40):
                await subject.commit(tasks(range(5_000 + i * 10, 5_010 + i * 10)))
                await subject.commit(ended(range(1 + i * 10, 11 + i * 10)))
                await subject.commit(
                    Effects(progress={(2_000 + i, "g"): in_flight(2_000 + i, "g")})
                )

        path = tmp_path / "copy.db"
        going = asyncio.ensure_future(go_on())
        await subject.store.backup(str(path))
        during = await subject.ids()
        await going
        assert during == sorted(set(during))
        from tickwheel.persistence.sqlite import SqliteStore

        copy = Subject(SqliteStore(str(path)))
        await copy.open()
        copied = await copy.ids()
        rows = len((await copy.small()).progress)
        ended_ids = {i for i, _ in (await copy.small()).outcomes}
        await copy.store.close(clean=True)
        # Whole batches: of every ten made or ended together, all or none are there.
        made = [i for i in copied if i >= 5_000]
        assert len(made) % 10 == 0
        assert len(ended_ids) % 10 == 0
        assert ended_ids.isdisjoint(copied)
        assert len(made) // 10 - len(ended_ids) // 10 in (0, 1)
        assert len(ended_ids) // 10 - rows in (0, 1)


async def test_the_proxy_ignores_a_server_gone_while_it_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server has gone while it held: that is what its tests are about, and no fault."""

    def not_connected(writer: asyncio.StreamWriter) -> None:
        raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))

    monkeypatch.setattr(asyncio.StreamWriter, "write_eof", not_connected)
    async with await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0) as gone:
        proxy = await Proxy(gone.sockets[0].getsockname()[1]).start()
        proxy.hold()
        _, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(b"held")
        await proxy.held.wait()
        (serving,) = proxy.connections
        proxy.let_go()
        writer.close()
        await serving
        await proxy.stop()
