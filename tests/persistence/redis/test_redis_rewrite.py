"""Redis came back empty, or older than the batches kept: everything is written again."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from persistence.redis.subjects import Make, both, content, store
from persistence.store_subject import OWNER, Subject, taken
from support.redis_server import RedisServer
from support.store_rows import ended, everything, in_flight, tasks
from support.waiting import comes, rest
from tickwheel.model.kinds import Effects
from tickwheel.model.records import TaskRow
from tickwheel.persistence.contract import (
    CommitRefused,
    CommitUnknown,
    Fenced,
    StoreAway,
    StoreBehind,
    StoreLost,
    StoreUnusable,
)
from tickwheel.persistence.memory import MemoryStore
from tickwheel.persistence.redis import options_from, recovery
from tickwheel.persistence.redis.driver import ServerError
from tickwheel.persistence.redis.store import RedisElection
from tickwheel.persistence.redis.writer import Writer
from tickwheel.persistence.sqlite.database import ORIGINAL_BATCH, meta_of

PATIENCE_S = 60.0
S = "{tw:default:0}"

Pair = tuple[Subject, Subject]
"""One on Redis, and the reference."""


async def _whole(subject: Subject) -> None:
    """Until nothing is being written anew."""
    await comes(lambda: not store(subject)._rewriter.active)


@pytest.fixture
async def pair(make: Make) -> Pair:
    """A store, and what it should hold: the same batches in plain dictionaries."""
    subject, reference = make("keep_bytes=10"), Subject(MemoryStore())
    await subject.open()
    await reference.open()
    rows = {i: TaskRow(i, i % 97, f"t{i % 3}", b"%d" % i) for i in range(1_000, 6_000)}
    for effects in (
        everything(),
        Effects(enqueued=rows, id_mark=6_000),
        Effects(progress={(i, "g"): in_flight(i, "g") for i in range(1_000, 2_500)}),
        ended(range(2_000, 2_010)),
    ):
        await both((subject, reference), effects)
    return subject, reference


async def _compare(pair: Pair) -> None:
    """In memory and, after a restart, in Redis itself."""
    subject, reference = pair
    expected = await content(reference)
    assert await content(subject) == expected
    opened = await subject.reopen()
    assert not store(subject)._mirror.complete
    assert await content(subject) == expected
    memory = await reference.reopen()
    assert (opened.last_batch, opened.id_mark, opened.position_ms, opened.clean) == (
        memory.last_batch, memory.id_mark, memory.position_ms, True,
    )  # fmt: skip


class TestEverythingIsThereAgain:
    @pytest.mark.parametrize("driver", ["redis", "asyncio-redis"])
    async def test_after_it_was_emptied(
        self, pair: Pair, redis_server: RedisServer, caplog: pytest.LogCaptureFixture, driver: str
    ) -> None:
        subject = pair[0]
        object.__setattr__(store(subject).options, "driver", driver)
        await subject.reopen()
        await subject.recover()
        incarnation = store(subject).incarnation
        redis_server.call("FLUSHALL")
        refusals = await both(pair, tasks([10_000]))
        count = len(everything().enqueued) + 5_000 - 10
        counts = f"{count} tasks, {len((await pair[1].small()).progress)} rows of progress"
        assert f"is being rewritten: 0 of {count} tasks" in refusals[0]
        assert store(subject).rewrites == 1
        assert store(subject).incarnation == incarnation
        await both(pair, ended([1_000, 10_000]))
        begun, done = caplog.records
        assert begun.levelno == logging.ERROR
        assert "has lost its data" in begun.message
        assert f"rewritten from memory: {counts}" in begun.message
        assert done.levelno == logging.WARNING
        assert f"{S} was rewritten in" in done.message
        assert counts in done.message
        await pair[1].reopen()
        await _compare(pair)

    async def test_a_redis_older_than_the_kept_batches_is_rewritten(
        self, pair: Pair, redis_server: RedisServer
    ) -> None:
        snapshot = redis_server.snapshot()
        await both(pair, ended(range(3_000, 4_000)))
        await both(pair, tasks([10_000]))
        redis_server.restart_from(snapshot)
        await both(pair, tasks([10_001]))
        assert (store(pair[0]).rewrites, store(pair[0]).replays) == (1, 0)
        await _compare(pair)

    async def test_after_it_came_back_with_an_empty_folder(
        self, pair: Pair, redis_server: RedisServer
    ) -> None:
        redis_server.restart_from(None)
        await both(pair, tasks([10_000]))
        redis_server.restart_from(None)
        await both(pair, tasks([10_001]))
        assert store(pair[0]).rewrites == 2
        await _compare(pair)

    async def test_an_empty_store_is_rewritten(self, make: Make, redis_server: RedisServer) -> None:
        subject, reference = make(), Subject(MemoryStore())
        await subject.open()
        await reference.open()
        redis_server.call("FLUSHALL")
        await both((subject, reference), tasks([1]))
        await _compare((subject, reference))

    async def test_a_batch_with_an_unknown_outcome_is_rewritten(
        self, pair: Pair, redis_server: RedisServer
    ) -> None:
        subject = pair[0]
        redis_server.pause()
        with pytest.raises(CommitUnknown):
            await subject.commit(tasks([10_000]))
        redis_server.go_on()
        redis_server.restart_from(None)
        refusals = await both(pair, tasks([10_000]))
        assert any("rewritten" in text for text in refusals)
        await _compare(pair)

    async def test_without_a_commit(
        self, pair: Pair, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """An idle daemon looks now and then, also after a bug; what only it knew would end."""
        monkeypatch.setattr(recovery, "PAUSE_S", 0.02)
        subject = pair[0]
        await subject.reopen()
        await subject.recover()
        client, bugs = store(subject)._watch._read_client, [KeyError("a bug")]
        glance = client.glance

        async def fail_once() -> None:
            if bugs:
                raise bugs.pop()
            await glance()

        monkeypatch.setattr(client, "glance", fail_once)
        redis_server.call("FLUSHALL")
        await comes(lambda: store(subject).rewrites)
        await pair[1].reopen()
        await _compare(pair)

    async def test_with_replicas_to_wait_for(
        self, make: Make, redis_server: RedisServer, tmp_path: Path
    ) -> None:
        """It is written without them; the first batch after it waits until they have it all."""
        subject = make("wait_replicas=1&wait_ms=100")
        await subject.open()
        with pytest.raises(CommitUnknown):
            await subject.commit(tasks(range(1, 3_001)))
        redis_server.call("FLUSHALL")
        with pytest.raises(CommitRefused):
            await subject.store.commit(1, OWNER, 2, tasks([3_001]))
        await _whole(subject)
        assert store(subject).rewrites == 1
        with pytest.raises(CommitUnknown, match="only 0 of 1 replicas"):
            await subject.store.commit(1, OWNER, 2, tasks([3_001]))
        address = f"127.0.0.1 {redis_server.port}"
        replica = RedisServer(tmp_path / "replica", replicaof=address).start(loaded=False)
        try:
            subject.n += 1
            await taken(subject, tasks([3_001]))
            assert replica.call("ZCARD", f"{S}:store") == b":3001\r\n"
        finally:
            replica.kill()

    async def test_while_reads_go_on(self, pair: Pair, redis_server: RedisServer) -> None:
        subject, reference = pair
        expected = await content(reference)
        redis_server.call("FLUSHALL")
        with pytest.raises(CommitRefused):
            await subject.commit(tasks([10_000]))
        assert store(subject)._rewriter.active
        assert await content(subject) == expected
        assert await subject.store.probe_room() is True
        await subject.store.verify()
        await _whole(subject)
        assert await content(subject) == expected


class TestCutShort:
    async def test_a_rewrite_restarts_until_it_is_complete(
        self,
        pair: Pair,
        redis_server: RedisServer,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        subject, writer = pair[0], store(pair[0])._writer
        _at_batch(monkeypatch, {5: redis_server.kill})
        redis_server.call("FLUSHALL")
        with pytest.raises(CommitRefused):
            await subject.commit(tasks([10_000]))
        await comes(lambda: "was interrupted after" in caplog.text)
        for _ in range(3):
            with pytest.raises(CommitRefused, match="rewritten"):
                await subject.commit(tasks([10_000]))
            await asyncio.sleep(0.2)  # real time: it looks at its Redis each 0.1 s
        assert not writer.rewriting or store(subject)._rewriter.active
        redis_server.start()
        await both(pair, tasks([10_000]))
        assert store(subject).rewrites == 1
        assert [record.levelno for record in caplog.records] == [
            logging.ERROR, logging.WARNING, logging.WARNING,
        ]  # fmt: skip
        await _compare(pair)

    @pytest.mark.parametrize("empty", [True, False])
    async def test_a_rewrite_restarts_after_another_loss(
        self, pair: Pair, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, empty: bool
    ) -> None:
        """Redis comes back empty, or as it was before, in the middle."""
        snapshot = redis_server.snapshot()

        def lose() -> None:
            redis_server.restart_from(None if empty else snapshot)

        _at_batch(monkeypatch, {4: lose, 20: lose})
        await both(pair, ended([3_000]))
        redis_server.call("FLUSHALL")
        await both(pair, tasks([10_000]))
        assert store(pair[0]).rewrites == 1
        await _compare(pair)

    async def test_an_unfinished_rewrite_makes_the_store_unusable(
        self,
        pair: Pair,
        redis_server: RedisServer,
        monkeypatch: pytest.MonkeyPatch,
        make: Make,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        subject, reached = pair[0], asyncio.Event()
        _at_batch(monkeypatch, {5: reached.set}, stay=True)
        redis_server.call("FLUSHALL")
        with pytest.raises(CommitRefused):
            await subject.commit(tasks([10_000]))
        await reached.wait()
        election = RedisElection(options_from(redis_server.url()), 3_000)
        assert (await election.look()).rewriting == OWNER, "no standby may take it from him"
        await subject.store.close(clean=True)
        assert "tasks of its rewrite" in caplog.text
        assert (await election.look()).rewriting == OWNER
        await election.close()
        with pytest.raises(StoreUnusable, match=f"incomplete, because {OWNER} was rewriting it"):
            await make().open("other")

    async def test_a_backup_during_a_rewrite_has_the_marks_of_the_shard(
        self,
        pair: Pair,
        redis_server: RedisServer,
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
    ) -> None:
        """A daemon takes tasks above the mark for new ones, and would not deliver them."""
        subject, reached = pair[0], asyncio.Event()
        _at_batch(monkeypatch, {5: reached.set}, stay=True)
        redis_server.call("FLUSHALL")
        with pytest.raises(CommitRefused):
            await subject.commit(tasks([10_000]))
        await reached.wait()
        await subject.store.backup(str(tmp_path / "copy.db"))
        meta = meta_of(str(tmp_path / "copy.db"))
        id_mark = (await pair[1].reopen()).id_mark
        assert (meta["id_mark"], meta[ORIGINAL_BATCH]) == (id_mark, subject.n)

    async def test_a_removed_batch_number_is_recovered(
        self, pair: Pair, redis_server: RedisServer
    ) -> None:
        redis_server.call("HDEL", f"{S}:wheel", "last")
        redis_server.call("CLIENT", "KILL", "TYPE", "normal")
        await both(pair, tasks([10_000]))
        assert store(pair[0]).rewrites + store(pair[0]).replays == 1
        await _compare(pair)

    async def test_a_rewrite_waits_for_memory(self, pair: Pair, redis_server: RedisServer) -> None:
        redis_server.call("FLUSHALL")
        redis_server.call("CONFIG", "SET", "maxmemory", "1")
        with pytest.raises(CommitRefused):
            await pair[0].commit(ended([1_000]))
        await asyncio.sleep(0.3)  # real time: it tries, and is refused, meanwhile
        assert store(pair[0])._rewriter.active
        redis_server.call("CONFIG", "SET", "maxmemory", "0")
        await both(pair, ended([1_000]))
        await _compare(pair)

    async def test_an_outdated_shard_leaves_a_full_redis(
        self, pair: Pair, redis_server: RedisServer
    ) -> None:
        """The data that leaves makes room for the rewrite."""
        writer = store(pair[0])._writer
        redis_server.call("CONFIG", "SET", "maxmemory", "1")
        await writer._claimant.run_phase(writer._sender, writer.incarnation, "begin", 0, 4)
        assert redis_server.call("EXISTS", f"{S}:store") == b":0\r\n"
        redis_server.call("CONFIG", "SET", "maxmemory", "0")
        await both(pair, ended([1_000]))
        await _compare(pair)


def _at_batch(
    monkeypatch: pytest.MonkeyPatch, events: dict[int, Callable[[], None]], *, stay: bool = False
) -> None:
    """Before those batches of all that are written anew something happens, once each."""
    write, count = Writer._write, 0

    async def interrupted(self: Writer, effects: Effects) -> None:
        nonlocal count
        count += 1
        event = events.get(count)
        if event is not None:
            event()
            if stay:
                await asyncio.Event().wait()
        await write(self, effects)

    monkeypatch.setattr(Writer, "_write", interrupted)


class TestWhatIsLate:
    async def test_a_late_begin_of_a_rewrite_has_no_effect(
        self, pair: Pair, redis_server: RedisServer
    ) -> None:
        subject = pair[0]
        writer = store(subject)._writer
        redis_server.call("FLUSHALL")
        link = writer._sender.link
        await both(pair, tasks([10_000]))
        now, writer._sender.link = writer._sender.link, link
        with pytest.raises(StoreLost, match="another client changed .*stale"):
            await writer._claimant.run_phase(writer._sender, writer.incarnation, "begin", 0, 9)
        writer._sender.link = now
        await _compare(pair)

    async def test_the_end_of_a_rewrite_counts_the_rows(
        self,
        pair: Pair,
        redis_server: RedisServer,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """A Redis that synced its log a second ago may have lost the last of it."""
        claimant = store(pair[0])._writer._claimant
        run_phase, losses = claimant.run_phase, [1]

        async def lose(sender: Any, incarnation: str, phase: str, *args: int) -> None:
            if phase == "end" and losses:
                redis_server.call("HINCRBY", f"{S}:wheel", "last", -losses.pop())
            await run_phase(sender, incarnation, phase, *args)

        monkeypatch.setattr(claimant, "run_phase", lose)
        redis_server.call("FLUSHALL")
        await both(pair, tasks([10_000]))
        assert f"another client changed {S} (behind)" in caplog.text
        assert store(pair[0]).rewrites == 1
        await _compare(pair)

    async def test_a_script_from_before_the_loss_has_no_effect(
        self, pair: Pair, redis_server: RedisServer
    ) -> None:
        """Claims count on over an emptied Redis: an old number fits nothing."""
        subject = pair[0]
        writer = store(subject)._writer
        for _ in range(3):
            await subject.store.verify()
        old = int(writer._sender.link)
        redis_server.call("FLUSHALL")
        await both(pair, tasks([10_000]))
        assert int(writer._sender.link) > old


class TestWhoMayNot:
    async def test_when_nobody_is_named_as_the_owner(
        self, pair: Pair, redis_server: RedisServer
    ) -> None:
        redis_server.call("HDEL", f"{S}:wheel", "owner")
        with pytest.raises(Fenced):
            await pair[0].commit(tasks([10_000]))

    async def test_with_a_part_in_memory(self, pair: Pair, redis_server: RedisServer) -> None:
        subject = pair[0]
        await subject.reopen()
        await subject.store.recover_small()
        await anext(aiter(subject.store.recover_handles(10)))
        redis_server.call("FLUSHALL")
        for _ in range(2):
            with pytest.raises(StoreLost, match="has lost its data"):
                await subject.commit(tasks([10_000]))
        with pytest.raises(StoreLost):
            await subject.store.verify()
        assert redis_server.call("DBSIZE") == b":0\r\n"

    async def test_with_a_part_in_memory_when_it_is_older(
        self, pair: Pair, redis_server: RedisServer
    ) -> None:
        subject = pair[0]
        await subject.reopen()
        snapshot = redis_server.snapshot()
        await subject.commit(tasks([10_000]))
        redis_server.restart_from(snapshot)
        with pytest.raises(StoreBehind):
            await taken(subject, tasks([10_001]))

    async def test_a_shard_laid_out_by_another_is_not_rewritten(
        self,
        pair: Pair,
        redis_server: RedisServer,
        monkeypatch: pytest.MonkeyPatch,
        make: Make,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        monkeypatch.setattr(recovery, "RETRY_S", 0.5)
        subject = pair[0]
        _at_batch(monkeypatch, {5: redis_server.kill})
        redis_server.call("FLUSHALL")
        with pytest.raises(CommitRefused):
            await subject.commit(tasks([10_000]))
        await comes(lambda: "was interrupted after" in caplog.text)
        redis_server.restart_from(None)
        other = make()
        assert (await other.open("other")).created
        await other.store.commit(1, "other", 1, tasks([1]))
        await _whole(subject)
        assert "taken over by another daemon" in caplog.text
        with pytest.raises(Fenced, match="initialized again"):
            await subject.commit(tasks([10_000]))
        assert await other.ids() == [1]
        assert store(subject).rewrites == 0

    async def test_an_older_daemon_that_wrote_meanwhile_is_overruled(
        self, pair: Pair, redis_server: RedisServer, make: Make
    ) -> None:
        """Redis lost the last opening, and the deposed daemon did not know that it was."""
        deposed, reference = pair
        snapshot = redis_server.snapshot()
        subject = make()
        await subject.open("newer")
        subject.n = subject.opened.last_batch
        await subject.recover()

        async def commit(effects: Effects) -> None:
            subject.n += 1
            await reference.commit(effects)
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    try:
                        args = (subject.opened.epoch, "newer", subject.n, effects)
                        await subject.store.commit(*args)
                        return
                    except (CommitRefused, CommitUnknown):
                        await asyncio.sleep(0.01)  # real time: Redis is another process

        await commit(tasks([20_000]))
        await commit(tasks([20_001]))
        redis_server.restart_from(snapshot)
        await taken(deposed, tasks([30_000]))
        await commit(ended([20_000]))
        assert store(subject).rewrites == 1
        with pytest.raises(Fenced):
            await taken(deposed, tasks([30_001]))
        assert await content(subject) == await content(reference)
        again = make()
        await again.open("again")
        assert await content(again) == await content(reference)

    async def test_an_unexpected_error_ends_the_daemon(
        self, pair: Pair, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def fail(*_: Any) -> None:
            raise KeyError("a bug")

        monkeypatch.setattr(Writer, "_write", fail)
        redis_server.call("FLUSHALL")
        with pytest.raises(CommitRefused):
            await pair[0].commit(tasks([10_000]))
        await _whole(pair[0])
        for _ in range(2):
            with pytest.raises(Exception, match="could not be rewritten: KeyError"):
                await pair[0].commit(tasks([10_000]))


class TestQuiet:
    async def _count(
        self, monkeypatch: pytest.MonkeyPatch, subject: Subject, work: Callable[[], Awaitable[Any]]
    ) -> int:
        """How often anything was sent, or tried to be, while ``work`` was under way."""
        calls = 0
        for line in (store(subject)._writing, store(subject)._reading):
            call = line.call

            async def counted(*args: Any, call: Any = call, **options: Any) -> Any:
                nonlocal calls
                calls += 1
                return await call(*args, **options)

            monkeypatch.setattr(line, "call", counted)
        await work()
        return calls

    async def test_an_absence_is_waited_for(
        self,
        make: Make,
        redis_server: RedisServer,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """Without a log line: who commits gets the error, and the election reports it anyway."""
        monkeypatch.setattr(recovery, "PAUSE_S", 0.05)
        subject = make()
        await subject.open()
        await subject.commit(tasks([1]))
        redis_server.kill()
        calls = await self._count(monkeypatch, subject, lambda: rest(1.5))
        assert 2 <= calls <= 32
        assert caplog.records == []
        redis_server.restart_from(None)
        await comes(lambda: store(subject).rewrites)
        assert await subject.commit(tasks([2])) is True

    async def test_a_replay_that_is_refused_for_long_is_logged_once(
        self,
        make: Make,
        redis_server: RedisServer,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        subject = make()
        await subject.open()
        await subject.commit(tasks([1]))
        snapshot = redis_server.snapshot()
        await subject.commit(tasks([2]))
        redis_server.restart_from(snapshot)

        sender = store(subject)._writer._sender
        send = sender.send

        async def refuse(*args: Any, must: bool = False) -> None:
            if must:
                raise ServerError("MISCONF", "for ten times")
            await send(*args)

        with monkeypatch.context() as refusing:
            refusing.setattr(sender, "send", refuse)
            for _ in range(10):
                with pytest.raises((CommitRefused, CommitUnknown)):
                    await subject.commit(ended([1]))
        assert len(caplog.records) == 1
        await taken(subject, ended([1]))
        assert await subject.ids() == [2]
        assert len(caplog.records) == 1

    async def test_a_rewrite_without_a_server_does_not_spin(
        self,
        pair: Pair,
        redis_server: RedisServer,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        subject = pair[0]
        redis_server.call("FLUSHALL")
        _at_batch(monkeypatch, {3: redis_server.kill})

        async def away() -> None:
            for _ in range(150):
                with pytest.raises(CommitRefused):
                    await subject.commit(ended([1]))
                await asyncio.sleep(0.01)  # real time: Redis is another process

        began_s = time.monotonic()
        calls = await self._count(monkeypatch, subject, away)
        assert calls <= 20 * max(1.5, time.monotonic() - began_s)
        assert len(caplog.records) == 2
        redis_server.start()
        await taken(subject, ended([1]))

    async def test_an_absence_of_a_store_half_loaded_is_an_answer(
        self, pair: Pair, redis_server: RedisServer
    ) -> None:
        subject = pair[0]
        await subject.reopen()
        redis_server.kill()
        with pytest.raises(StoreAway):
            await subject.store.read([1])
        await subject.store.verify()
        redis_server.start()


@pytest.mark.parametrize("comes_back", ["as it was", "empty"])
async def test_an_unreplicated_batch_keeps_its_number(
    make: Make, redis_server: RedisServer, comes_back: str
) -> None:
    """It is in memory: were it refused, other changes would come under its number, and be taken for
    it when the server is there again."""
    subject = make("keep_bytes=10&wait_replicas=1&wait_ms=50")
    await subject.open()
    messages = [await _fate(subject)]
    redis_server.kill()
    messages += [await _fate(subject) for _ in range(3)]
    if comes_back == "empty":
        redis_server.restart_from(None)
    else:
        redis_server.start()

    async def is_there() -> bool:
        messages.append(await _fate(subject))
        return "only 0 of 1 replicas" in messages[-1]

    await comes(is_there)
    assert "only 0 of 1 replicas" not in messages[3], "the server was away meanwhile"
    await _whole(subject)
    assert redis_server.call("ZCARD", f"{S}:store") == b":1\r\n"


async def _fate(subject: Subject) -> str:
    """Why the fate of the batch is unknown still; it is never refused."""
    with pytest.raises(CommitUnknown) as error:
        await subject.commit(tasks([1]))
    return error.value.message
