"""Structure-aware fuzz: whatever a client sends, the daemon lives, answers, and counts right.

In this process with a memory store and a clock that is moved, for numbers; against real daemons
on SQLite and on Redis, with a history, for the rest of the way. The seed of a round is printed;
a round that fails is repeated by ``FUZZ_SEED=n``.
"""

from __future__ import annotations

import os
import random
import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from server.tcp.fuzzer import UNANSWERED, Fuzzer, pack
from support.daemon import Daemon
from support.in_process import InProcess
from support.raw import Raw
from support.redis_server import RedisServer
from support.shard_rig import NOW_MS, Peer
from tickwheel.api.frames import REQUEST_MAX
from tickwheel.api.frames import FrameType as T
from tickwheel.errors import BY_CODE
from tickwheel.limits import Limits
from tickwheel.model import policies as retries
from tickwheel.model.kinds import GROUP, Effects
from tickwheel.model.records import ATTEMPT_MAX
from tickwheel.persistence import codec
from tickwheel.persistence.audit import check
from tickwheel.persistence.memory import MemoryStore
from tickwheel.protocol import encode

SMALL: dict[str, Any] = {
    "body_bytes_max": 1_000,
    "frame_bytes_max": 64 * 1024,
    "tasks_per_frame_max": 16,
    "window_max": 64,
    "pull_max": 8,
    "subscriptions_max": 4,
    "scheduled_max": 200,
    "backlog_max": 300,
    "topics_max": 30,
    "groups_per_topic_max": 6,
    "sessions_max": 10,
    "dead_retention_s": 3_600,
    "lease_max_s": 43_200,
    "schedule_interval_min_s": 60,  # a round lasts for days, and a schedule can catch up on all
}
"""Limits that are reached."""
REFUSALS = {
    "bad_request", "body_too_large", "conflict", "due_too_far", "limit_exceeded", "not_found",
    "protocol_error", "unknown_type",
}  # fmt: skip
"""What each round must have been answered, or it has not looked far."""
PEERS = 4
LATER_MS = (0, 1, 50, 100, 1_000, 5_000, 31_000, 3_600_000, 50_000_000)
LEASE_MAX_MS = 43_200_000
ROUND = 10_000
SEEDS = [int(os.environ["FUZZ_SEED"])] if "FUZZ_SEED" in os.environ else []


class Strict(MemoryStore):
    """Refuses what another store could not hold, or would give back as something else."""

    async def commit(self, epoch: int, owner: str, n: int, effects: Effects) -> bool:
        rows = [*effects.enqueued.values(), *effects.updated.values()]
        assert [codec.decode_task(codec.encode_task(row)) for row in rows] == rows
        for progress in filter(None, effects.progress.values()):
            assert codec.decode_progress(codec.encode_progress(progress)) == progress
            struct.pack("<4q", progress.id, progress.attempt, progress.at_ms, progress.epoch)
            assert progress.attempt <= ATTEMPT_MAX
        for dead in filter(None, effects.dead.values()):
            assert codec.decode_dead(codec.encode_dead(dead)) == dead
            struct.pack("<3q", dead.id, dead.attempt, dead.died_ms)
        for group in filter(None, effects.of_kind(GROUP).values()):
            struct.pack("<q", group.since_ms)
        for (kind, _), row in effects.records.items():
            if row is not None:
                assert codec.decode_record(kind, codec.encode_record(kind, row)) == row
        struct.pack(f"<{len(rows)}q", *(row.due_ms for row in rows))
        return await super().commit(epoch, owner, n, effects)


async def second_epoch() -> MemoryStore:
    """So that receipts of an earlier one can be invented."""
    store = Strict()
    await store.open("before", NOW_MS)
    await store.close(clean=True)
    return store


def extremes() -> list[dict[str, Any]]:
    """Retry policies at their edges, with delays that are soon over, and some that never are."""
    edge = retries.DELAY_MS_MAX
    grown = [
        {"kind": "exponential", "base_ms": base_ms, "factor": factor, "cap_ms": cap_ms}
        for base_ms, cap_ms in ((0, 0), (0, edge), (1, 1), (1, 1_000), (1, edge))
        for factor in (1, 1.0000001, 2, 1e3, retries.FACTOR_MAX)
    ]
    rest: list[dict[str, Any]] = [
        {"kind": "fixed", "delay_ms": delay_ms, "jitter": 1} for delay_ms in (0, 1, edge)
    ]
    rest += [{"kind": "table", "delays_ms": (0,) * n} for n in (1, retries.STEPS_MAX)]
    return [item | {"retries": retries.RETRIES_MAX} for item in grown + rest]


class Round:
    """One daemon, a few peers that send anything, and one that does real work between them."""

    def __init__(self, daemon: InProcess, seed: int) -> None:
        self.daemon = daemon
        self.random = random.Random(seed)
        self.fuzzers = [Fuzzer(seed * PEERS + n, daemon.shard.limits) for n in range(PEERS)]
        self.peers = [self._connect(n) for n in range(PEERS)]
        self.asked: list[dict[int, Any]] = [{} for _ in range(PEERS)]
        """Requests without an answer."""
        self.answers: Counter[str] = Counter()
        """Answers by their codes."""
        self.worker = daemon.connect(session=b"w" * 16)
        self.worked = 0
        self.worker.feed(encode((T.SUBSCRIBE, 2, 1, "t", "g", 50, None)))
        self.nacker = daemon.connect(session=b"n" * 16)
        self.nacker.feed(encode((T.SUBSCRIBE, 2, 1, "nacked", "g", 50, None)))
        for n, retry in enumerate(extremes(), 3):
            task = ("nacked", b"", 0, {"retry": retry})
            self.nacker.feed(encode((T.ENQUEUE, n, n, (task,))))
        self.attempts: Counter[int] = Counter()

    def _connect(self, n: int) -> Peer:
        session = bytes((n,)) * 16 if self.random.random() < 0.8 else None
        return self.daemon.connect(session=session, client=self.fuzzers[n].name())

    async def run(self, frames: int) -> None:
        for count in range(frames):
            n = self.random.randrange(PEERS)
            if self.peers[n].closed or self.random.random() < 0.002:
                self._again(n)
            self._send(n)
            if count % 10 == 0:
                await self.daemon.turn()
            if count % 50 == 0:
                self._listen()
                self._work(count)
                self.daemon.pass_time(self.random.choice(LATER_MS))

    def _again(self, n: int) -> None:
        """The connection was closed, or breaks."""
        self._hear(n)
        self.peers[n].lose()
        self.asked[n].clear()
        self.fuzzers[n].subs.clear()
        stranger = self.daemon.connect(hello=False)
        stranger.feed(pack(self.fuzzers[n].hello()))
        for frame in stranger.frames():
            assert frame[0] == T.OK or frame[2] != "internal", frame
        stranger.lose()
        self.peers[n] = self._connect(n)

    def _send(self, n: int) -> None:
        frame = self.fuzzers[n].frame()
        request = frame[1] if len(frame) > 1 else None
        if frame[0] not in (*UNANSWERED, T.PULL) and type(request) is int:
            if 0 < request <= REQUEST_MAX:
                self.asked[n][request] = frame
        self.peers[n].feed(pack(frame))

    def _listen(self) -> None:
        for n in range(PEERS):
            self._hear(n)

    def _hear(self, n: int) -> None:
        for frame in self.peers[n].frames():
            assert frame[0] in (T.OK, T.ERROR, T.DELIVER, T.ENDED, T.GOODBYE, T.CHECK), frame
            self.fuzzers[n].heard(frame)
            if frame[0] in (T.OK, T.ERROR):
                self.asked[n].pop(frame[1], None)
                self.answers["ok" if frame[0] == T.OK else frame[2]] += 1
            if frame[0] == T.ERROR:
                assert frame[2] in BY_CODE and frame[2] != "internal", frame
                assert frame[3], frame

    def _work(self, count: int) -> None:
        """What a producer and a consumer do that keep to the rules."""
        fresh = ("t", b"work", self.random.choice((0, 1_000)))
        self.worker.feed(encode((T.ENQUEUE, count + 10, count + 10, (fresh,))))
        for frame in self.worker.frames():
            assert frame[0] != T.ERROR or frame[2] in ("backlog_full", "window_full"), frame
            if frame[0] == T.DELIVER:
                for task_id, attempt, *_ in frame[4]:
                    receipt = frame[2], (task_id,), (attempt,)
                    self.worker.feed(encode((T.ACK, count + 11, "t", "g", *receipt)))
                self.worked += len(frame[4])

        for frame in self.nacker.frames():
            assert frame[0] != T.ERROR, frame
            for task_id, attempt, *_ in frame[4] if frame[0] == T.DELIVER else ():
                item = task_id, frame[2], attempt, None, None
                self.nacker.feed(encode((T.NACK, count + 100, "nacked", "g", (item,))))
                self.attempts[task_id] = attempt

    async def end(self) -> None:
        """All answers are there; then everybody leaves, and what they held comes back. What bulk
        operations have not done is left undone, so that two counts may be compared."""
        await self.daemon.settle()
        self._listen()
        for n in range(PEERS):
            assert self.peers[n].closed or not self.asked[n], f"no answer to {self.asked[n]}"
        operator = self.daemon.connect()
        running = await self.daemon.ask(operator, T.BULK_LIST, {"state": "running", "limit": 1_000})
        for bulk in running["bulk"]:
            await self.daemon.ask(operator, T.BULK, bulk["id"], "cancel")
        operator.lose()
        for peer in (*self.peers, self.worker, self.nacker):
            peer.lose()
        self.daemon.pass_time(2 * LEASE_MAX_MS)
        await self.daemon.settle()


async def counted(daemon: InProcess) -> dict[tuple[int, str], str]:
    """Places of all (task, group) pairs, counted anew; STATS must say the same."""
    result = daemon.recount()
    places = Counter(result.values())
    peer = daemon.connect()
    peer.feed(encode((T.PING, 2)))
    peer.feed(encode((T.STATS, 3)))
    await daemon.settle()
    ping, stats = peer.frames()[1:]
    assert ping == (T.OK, 2, None)
    for place in ("ready", "in_flight", "waiting"):
        assert stats[2][place] == places[place], place
    assert stats[2]["dead"] == sum(len(rows) for rows in daemon.store._dead.values())
    assert stats[2]["early"] == 0
    peer.lose()
    return result


async def one_round(folder: Path, seed: int, frames: int) -> Round:
    print(f"FUZZ_SEED={seed}")  # noqa: T201  # to repeat it
    async with InProcess(folder, store=await second_epoch(), **SMALL) as daemon:
        result = Round(daemon, seed)
        await result.run(frames)
        await result.end()
        places = await counted(daemon)
        if frames >= ROUND:
            assert sum(n > 100 for n in result.attempts.values()) > 10, result.attempts
        assert not [line for line in daemon.log.lines if "Traceback" in line]
        kept, now_ms = daemon.store.copy(), daemon.sources.now_ms
    # What is stored can be read again, and nobody is owed less. (A group may be owed more: one
    # made in the millisecond in which a task came due.)
    async with InProcess(folder, store=kept, now_ms=now_ms, **SMALL) as daemon:
        await daemon.settle()
        again = await counted(daemon)
        assert places.keys() <= again.keys()
    return result


@pytest.mark.parametrize(
    ("seed", "frames"),
    [(seed, ROUND) for seed in SEEDS]
    or [(1, 4_000), pytest.param(2, ROUND, marks=pytest.mark.slow)],
)
async def test_random_operations_keep_all_invariants(
    tmp_path: Path, seed: int, frames: int
) -> None:
    result = await one_round(tmp_path, seed, frames)
    answers = result.answers
    assert result.worked > 0
    assert answers["ok"] > frames / 10, "too little of it is accepted"
    assert answers.keys() >= REFUSALS, "not every kind of mistake is made"


@pytest.mark.slow
async def test_a_million_random_operations_keep_all_invariants(tmp_path: Path) -> None:
    first = int.from_bytes(os.urandom(4), "big")
    seeds = SEEDS or range(first, first + 1_000_000 // ROUND)
    # In a round a stranger may pause or delete the worker's group for good.
    idle = [seed for seed in seeds if not (await one_round(tmp_path, seed, ROUND)).worked]
    assert len(idle) <= len(seeds) / 10, idle


# --- a real daemon ------------------------------------------------------------------------------


class Stranger:
    """A fuzzer with a socket. It reads what is there, so that nobody waits for it."""

    def __init__(self, daemon: Daemon, seed: int) -> None:
        self._daemon = daemon
        with Raw(daemon.port) as raw:
            limits = Limits(**raw.limits)
        self.fuzzer = Fuzzer(seed, limits)
        self._raw: Raw | None = None

    def send(self, frames: int) -> None:
        """Many at once, then PING: when its answer is there, so are those before it."""
        data = b"".join(pack(self.fuzzer.frame()) for _ in range(frames))
        try:
            if self._raw is None:
                self._raw = Raw(self._daemon.port, session=None, client=self.fuzzer.name())
            self._raw.send_bytes(data)
            self.fuzzer.request += 1
            self._raw.send_bytes(pack((int(T.PING), self.fuzzer.request)))
            while True:
                frame = self._raw.next()
                self.fuzzer.heard(frame)
                assert frame[0] != T.ERROR or frame[2] != "internal", frame
                if frame[:2] in ((T.OK, self.fuzzer.request), (T.ERROR, self.fuzzer.request)):
                    return
        except (EOFError, ConnectionError):
            self.close()

    def close(self) -> None:
        if self._raw is not None:
            self._raw.close()
        self._raw, self.fuzzer.subs = None, {}


PLACES = ("ready", "in_flight", "waiting", "dead")


def walked(raw: Raw) -> Counter[str]:
    """What LIST answers of every task, page by page."""
    places: Counter[str] = Counter()
    after = 0
    while after is not None:
        page = raw.call(T.LIST, {"limit": 1_000, "after": after})[2]
        for task in page["tasks"]:
            views = [view["state"] for view in task["groups"].values()]
            # Before a topic has a group, what is due is owed to nobody by name.
            # A task whose order key is held counts as one that waits.
            places.update(
                "waiting" if item == "held" else item for item in views or [task["state"]]
            )
        after = page["next"]
    return places


def agrees(daemon: Daemon) -> None:
    """STATS and a walk say the same; tried again while something happens in between. One count
    knows at once what is in a batch on its way, the other when that has landed."""
    counted = answer = Counter[str]()
    with Raw(daemon.port) as raw:
        for _ in range(200):
            before = raw.call(T.STATS)[2]
            result = walked(raw)
            after = raw.call(T.STATS)[2]
            assert after["early"] == 0
            if any(before[name] != after[name] for name in ("scheduled", *PLACES, "batches")):
                continue
            counted = Counter({name: result[name] for name in ("scheduled", *PLACES)})
            answer = Counter(
                {name: after[name] for name in PLACES} | {"scheduled": after["scheduled"]}
            )
            if counted == answer:
                return
    assert counted == answer, "they differ for good"
    raise AssertionError("it never stands still")


@pytest.fixture
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a store in which every value must fit."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'store.db'}"
        return
    server = RedisServer(tmp_path / "redis").start()
    yield server.url()
    server.kill()


@pytest.mark.parametrize(
    ("stored", "frames"),
    [
        ("sqlite", 2_000),
        ("redis", 1_000),
        pytest.param("sqlite", 40_000, marks=pytest.mark.slow),
        pytest.param("redis", 20_000, marks=pytest.mark.slow),
    ],
    indirect=["stored"],
)
def test_a_real_daemon_survives_random_operations(tmp_path: Path, stored: str, frames: int) -> None:
    """The daemon has a history, which records every value."""
    seed = (SEEDS or [frames])[0]
    print(f"FUZZ_SEED={seed}")  # noqa: T201  # to repeat it
    folders = {name: tmp_path / name for name in ("history_dir", "backup_dir")}
    for folder in folders.values():
        folder.mkdir()
    small = {**SMALL, **folders, "reconnect_grace_s": 0.1}
    with Daemon(tmp_path, store=stored, **small) as daemon:
        strangers = [Stranger(daemon, seed + n) for n in range(3)]
        for count in range(0, frames, 20):
            strangers[count % 3].send(20)
            assert daemon.alive, daemon.log_text()
            if count % 500 == 480:
                strangers[count % 3].close()
        for stranger in strangers:
            stranger.close()
        agrees(daemon)
        assert daemon.restart(kill=True).alive
        agrees(daemon)
        assert daemon.terminate() == 0
        assert "Traceback" not in daemon.log_text(), daemon.log_text()
        assert "history_writer_ended" not in daemon.log_text()
    if stored.startswith("sqlite"):
        assert check(stored).problems == []
