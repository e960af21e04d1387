"""Which store a history is of: what a start compares, and which branch a restore follows.

The walk is a model: one store with its history, which is stopped, killed, lost, emptied, copied,
put back, served without its history and restored, in an order that comes from a seed.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import secrets
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from support.daemon import Daemon, DaemonFailed
from support.history_daemon import daemon_in
from support.history_rig import NODE, NOW_MS, enqueued, make_id
from support.redis_server import RedisServer
from tickwheel import Client, Task
from tickwheel.cli.app import run
from tickwheel.history.branches import REACHED, STARTS, Branch, Reached, Start, find_evidence
from tickwheel.history.daemon import History, HistoryOptions, Notes
from tickwheel.history.lines import EventKind
from tickwheel.history.restore import Plan, Report, restore
from tickwheel.history.segments import STATE
from tickwheel.model.kinds import Effects
from tickwheel.model.records import Outcome, TaskRow
from tickwheel.persistence.contract import Evidence, Opened, StoreUnusable
from tickwheel.persistence.identity import (
    COPY,
    NEW,
    Beginning,
    EpochRecord,
    StoreIdentity,
    next_epoch,
)
from tickwheel.persistence.sqlite import SqliteOptions, SqliteStore
from tickwheel.persistence.sqlite.database import begin_anew, begin_branch, write_meta

DUE_MS = NOW_MS + 10**9
OPTIONS = SqliteOptions(reserve_bytes=0)


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path / "redis").start()
    yield server
    server.kill()


@pytest.fixture(autouse=True)
def nothing_runs_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """End the daemons of a test that fails, too."""
    started: list[Daemon] = []
    spawn = Daemon.spawn

    def noted(daemon: Daemon) -> None:
        started.append(daemon)
        spawn(daemon)

    monkeypatch.setattr(Daemon, "spawn", noted)
    yield
    for daemon in started:
        daemon.close()


class Served:
    """One start of a store, with or without its history."""

    def __init__(self, world: World, *, with_history: bool) -> None:
        self.world, self.store = world, SqliteStore(str(world.path), OPTIONS)
        self.owner = f"{NODE}/{secrets.token_hex(6)}"
        self.history = None
        if with_history:
            options = HistoryOptions(str(world.history), NODE, bodies=True)
            clock = SimpleNamespace(read=lambda: SimpleNamespace(now_ms=world.tick()))
            self.history = History(options, clock, lambda event, text: None)  # type: ignore[arg-type]

    async def begin(self) -> Opened:
        result = self.history.evidence() if self.history is not None else []
        self.opened = await self.store.open(self.owner, self.world.tick(), evidence=result)
        self.n = self.opened.last_batch
        if self.history is not None:
            self.history.begin(self.opened)
        return self.opened

    async def commit(self, new: int, ended: set[int]) -> None:
        now_ms = self.world.tick()
        effects = Effects(
            enqueued={new: TaskRow(new, DUE_MS, "t", b"x")},
            ended=dict.fromkeys(ended, Outcome.CANCELLED),
            id_mark=new, position_ms=now_ms,
        )  # fmt: skip
        self.n += 1
        await self.store.commit(self.opened.epoch, self.owner, self.n, effects)
        records = [list(enqueued([new], DUE_MS, time_ms=now_ms, bodies=[b"x"]))]
        if ended:
            records.append([EventKind.ENDED, now_ms, "t", None, "cancelled", sorted(ended), None])
        if self.history is not None:
            self.history.keep(self.n, Notes([], records, []))

    async def ids(self) -> set[int]:
        return {task.row.id for task in await self.store.scan(-1, 100_000, None)}

    async def end(self, clean: bool) -> None:
        await self.store.close(clean)
        if self.history is not None:
            self.history.end(clean)


class World:
    """A store at one place with one history, and what is true of both."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.random = folder, random.Random(seed)
        self.path, self.history = folder / "s.db", folder / "history"
        self.now_ms = NOW_MS
        self.files: list[tuple[Path, frozenset[int]]] = []
        """Copies of the store, and the batches that each has."""
        self.backups: list[Path] = []
        self.has: frozenset[int] | None = frozenset()
        """The batches that the store has; None: it is gone, or empty."""
        self.confirmed: frozenset[int] = frozenset()
        """The batches that the history has of the branch that was served last."""
        self.tasks: set[int] = set()
        """What that had when it was closed."""
        self.is_known = True
        """Whether the last start was with the history."""
        self.is_newest = True
        """Whether the store is as it was left by its last start."""
        self.said: Counter[str] = Counter()
        self._ids = 0

    def tick(self) -> int:
        self.now_ms += 1_000
        return self.now_ms

    def id(self) -> int:
        self._ids += 1
        return make_id(self._ids)

    async def start(self, *, with_history: bool, is_permitted: bool = False) -> None:
        served = Served(self, with_history=with_history)
        try:
            await served.begin()
        except StoreUnusable as error:
            self.said["refused"] += 1
            assert "tickwheel restore" in error.message
            assert "tickwheel init" in error.message
            assert "\n" not in error.message
            assert not (self.is_newest and self.has is not None and with_history == self.is_known)
            assert not is_permitted
            await self.decide(with_history=with_history)
            return
        self.said["served"] += 1
        if self.has is None:
            assert is_permitted or not self.files, "an empty store is made anew in silence"
            self.has = frozenset()
        if with_history:
            lost = self.confirmed - self.has
            assert is_permitted or not lost, "what was confirmed is missing, and nobody said so"
            self.confirmed = self.has
        await self.serve(served)

    async def serve(self, served: Served) -> None:
        assert self.has is not None
        for _ in range(self.random.randrange(4)):
            new, there = self.id(), await served.ids()
            some = there if self.random.random() < 0.3 else set()
            await served.commit(new, {item for item in some if self.random.random() < 0.3})
            self.has |= {new}
            if served.history is not None:
                self.confirmed |= {new}
            if self.random.random() < 0.2:
                backup = self.folder / f"backup-{len(self.backups)}.db"
                await served.store.backup(str(backup))
                self.backups.append(backup)
                self.files.append((backup, self.has))
        self.tasks = await served.ids()
        self.is_known, self.is_newest = served.history is not None, True
        await served.end(clean=self.random.random() < 0.95)
        if self.random.random() < 0.5:
            copy = self.folder / f"copy-{len(self.files)}.db"
            shutil.copyfile(self.path, copy)
            self.files.append((copy, self.has))

    async def decide(self, *, with_history: bool) -> None:
        """Do what the line says that a daemon has ended with."""
        if self.backups and self.random.random() < 0.4:
            await self.bring_back(self.random.choice(self.backups))
        elif self.has is None:
            begin_anew(str(self.path))
            store = SqliteStore(str(self.path), OPTIONS)
            await store.open(f"init/{secrets.token_hex(6)}", self.tick())
            await store.close(clean=True)
            write_meta(str(self.path), {"branch": NEW})
            self.has = frozenset()
        else:
            begin_branch(str(self.path))
        await self.start(with_history=with_history, is_permitted=True)

    async def bring_back(self, backup: Path) -> None:
        report, into = await self.restore(backup)
        self.path.unlink(missing_ok=True)
        into.rename(self.path)
        store = SqliteStore(str(shutil.copyfile(self.path, self.folder / "look.db")), OPTIONS)
        await store.open("look", 0)
        ids = {task.row.id for task in await store.scan(-1, 100_000, None)}
        await store.close(clean=True)
        # One that is exact has all; of another one only what is in it is certain.
        self.has = self.confirmed | ids if report.exact and self.is_known else frozenset(ids)
        self.is_newest = False
        self.said["exact" if report.exact else "inexact"] += 1
        if report.exact and self.is_known:
            assert ids == self.tasks, "it was called exact"

    async def restore(self, backup: Path) -> tuple[Report, Path]:
        into = self.folder / f"restored-{self.tick()}.db"
        folders = (str(self.history),) if self.history.exists() else ()
        plan = Plan(f"sqlite:///{into}", str(backup), folders)
        return await restore(plan, self.tick()), into

    async def step(self) -> None:
        what = self.random.random()
        if what < 0.5:
            # A store is served without its history now and then.
            await self.start(with_history=self.random.random() < 0.85)
        elif what < 0.54:
            self.path.unlink(missing_ok=True)
            self.has, self.is_newest = None, False
        elif what < 0.57 and self.path.exists():
            os.truncate(self.path, 0)
            self.has, self.is_newest = None, False
        elif what < 0.64 and self.files:
            copy, self.has = self.random.choice(self.files)
            shutil.copyfile(copy, self.path)
            self.is_newest = False
        elif self.backups and self.is_known:
            report, into = await self.restore(self.random.choice(self.backups))
            store = SqliteStore(str(into), OPTIONS)
            await store.open("look", 0)
            ids = {task.row.id for task in await store.scan(-1, 100_000, None)}
            await store.close(clean=True)
            self.said["exact" if report.exact else "inexact"] += 1
            assert ids == self.tasks or not report.exact, "it was called exact"
            assert report.exact or report.gaps or not report.clean_stop


def _begun(history: Path) -> Iterator[Start]:
    for folder in (history / STATE).glob("*-s0"):
        for line in (folder / STARTS).read_text().splitlines():
            yield Start(**json.loads(line))


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 6))]
)
def test_a_loss_by_file_operations_is_never_silent(tmp_path: Path, seed: int) -> None:
    world = World(tmp_path, seed)

    async def walk() -> None:
        await world.start(with_history=True)
        for _ in range(40):
            await world.step()

    asyncio.run(walk())
    assert {"served", "refused", "inexact"} <= world.said.keys()
    begun = Counter(start.epoch for start in _begun(world.history))
    assert set(begun.values()) == {1}, "an epoch was given twice"


# --- a start -------------------------------------------------------------------------------------

M1, M2, M3, M9 = (EpochRecord(epoch, f"m{epoch}", 10 * epoch) for epoch in (1, 2, 3, 9))
HELD = StoreIdentity(M3, "inc", (M1, M2))


def at(began: EpochRecord) -> Evidence:
    return Evidence("its history h", *began)


@pytest.mark.parametrize(
    "one",
    [
        at(M1),
        at(M3),
        at(M3._replace(batch=29)),
        Evidence("the setting expect_store"),
        Evidence("h", 2),
    ],
)
def test_a_complete_store_continues(one: Evidence) -> None:
    assert next_epoch("s", HELD, [one]) == Beginning(4, (M1, M2, M3), "m3")


@pytest.mark.parametrize(
    "one", [at(M9), at(M3._replace(batch=31)), at(M3._replace(mark="x")), at(M1._replace(mark="x"))]
)
@pytest.mark.parametrize("branch", ["", COPY])
def test_an_older_store_needs_an_operators_decision(one: Evidence, branch: str) -> None:
    held = StoreIdentity(M3, "inc", (M1, M2), branch)
    with pytest.raises(StoreUnusable, match=r"^s is an older or another store: .*epoch 3 \(m3\)"):
        next_epoch("s", held, [one])
    permitted = StoreIdentity(M3, "inc", (M1, M2), NEW)
    epoch = max(4, one.epoch + 1)
    assert next_epoch("s", permitted, [one]) == Beginning(epoch, (), "m3", True, True)


def test_a_complete_copy_begins_a_new_branch() -> None:
    held = StoreIdentity(M3, "inc", (M1, M2), COPY)
    assert next_epoch("s", held, [at(M3), Evidence("h", 7)]) == Beginning(8, (), "m3", True)


@pytest.mark.parametrize("one", [at(M1), Evidence("the setting expect_store")])
def test_an_emptied_store_is_refused(one: Evidence) -> None:
    with pytest.raises(StoreUnusable, match=r"^s is empty, but .*`tickwheel init --force`"):
        next_epoch("s", None, [one])


def test_an_unmarked_history_only_reserves_epochs() -> None:
    assert next_epoch("s", None, [Evidence("h", 7)]) == Beginning(8)


def test_torn_and_missing_notes_are_ignored(tmp_path: Path) -> None:
    folder = tmp_path / STATE / f"{NODE}-s0"
    folder.mkdir(parents=True)
    assert find_evidence(tmp_path, 0) == []
    reached = Reached(folder, Start(4, "m4"), 7)
    reached.note(9)
    reached.note(8)
    (found,) = find_evidence(tmp_path, 0)
    assert found[1:4] == (4, "m4", 9)
    assert find_evidence(tmp_path, 1) == []
    whole = (folder / REACHED).read_bytes()
    (folder / REACHED).write_bytes(whole[:20] + b"x" + whole[21:])
    assert find_evidence(tmp_path, 0) == []


def test_a_frozen_daemon_keeps_its_successors_note(tmp_path: Path) -> None:
    frozen = Reached(tmp_path, Start(4, "m4"), 7)
    Reached(tmp_path, Start(5, "m5", "m4"), 7).note(8)
    frozen.note(20)
    folder = tmp_path / STATE / f"{NODE}-s0"
    folder.parent.mkdir()
    shutil.copytree(tmp_path, folder, ignore=shutil.ignore_patterns(STATE))
    assert find_evidence(tmp_path, 0)[0][1:4] == (5, "m5", 8)


# --- a restore -----------------------------------------------------------------------------------


def branch_of(tmp_path: Path, epoch: int, mark: str, *starts: Start) -> Branch:
    folder = tmp_path / STATE / f"{NODE}-s0"
    folder.mkdir(parents=True)
    for start in starts:
        Reached(folder, start, 0).close()
    return Branch([tmp_path], 0, epoch, mark)


def epochs_of(branch: Branch, epochs: range, time_ms: int = 5) -> list[int]:
    return [item for item in epochs if branch.includes({"epoch": item, "time_ms": time_ms})]


LINE = (Start(1, "a"), Start(2, "b", "a"), Start(3, "c", "b"))


def test_a_single_branch_history_is_used_whole(tmp_path: Path) -> None:
    branch = branch_of(tmp_path, 1, "a", *LINE)
    assert (epochs_of(branch, range(6)), branch.notes, branch.head) == ([*range(6)], [], "c")


def test_the_last_served_branch_is_followed(tmp_path: Path) -> None:
    fork = Start(4, "d", "b", 4, is_branch=True)
    branch = branch_of(tmp_path, 1, "a", *LINE, fork)
    assert epochs_of(branch, range(1, 5), time_ms=4) == [1, 2, 4]
    assert epochs_of(branch, range(1, 5), time_ms=5) == [1, 4]
    assert len(branch.notes) == 1
    assert "epoch 4 continued with an older copy" in branch.notes[0]


def test_a_backup_of_a_lost_branch_restores_that_branch(tmp_path: Path) -> None:
    branch = branch_of(tmp_path, 3, "c", *LINE, Start(4, "d", "b", 4, is_branch=True))
    assert (epochs_of(branch, range(1, 5)), branch.head) == ([1, 2, 3], "c")
    assert "continues to epoch 4 in another branch" in branch.notes[0]


def test_history_alone_starts_at_the_recreated_store(tmp_path: Path) -> None:
    branch = branch_of(
        tmp_path, 0, "", *LINE, Start(4, "d", "", is_branch=True), Start(5, "e", "d")
    )
    assert (epochs_of(branch, range(1, 6)), branch.notes) == ([4, 5], [])


def test_skipped_epochs_are_not_gaps_if_marks_follow(tmp_path: Path) -> None:
    branch = branch_of(tmp_path, 1, "a", *LINE, Start(20, "d", "c", is_branch=True))
    assert branch.missing({1, 2, 3, 20}) == 0
    assert branch.missing({1, 3, 20, 22}) == 2


# --- a daemon ------------------------------------------------------------------------------------


async def ids_of(daemon: Daemon) -> set[int]:
    async with Client(daemon.url) as client:
        return {task.id async for task in client.list_tasks()}


async def enqueue(daemon: Daemon, count: int) -> None:
    async with Client(daemon.url) as client:
        await client.enqueue_many([Task("t", b"x", delay=3_600) for _ in range(count)])


def refusal(daemon: Daemon) -> str:
    with pytest.raises(DaemonFailed) as failed:
        daemon.start()
    return [line for line in str(failed.value).splitlines() if "store_error" in line][-1]


async def test_a_moved_database_stops_the_start(tmp_path: Path) -> None:
    daemon = daemon_in(tmp_path)
    daemon.start()
    await enqueue(daemon, 3)
    daemon.terminate()
    for path in tmp_path.glob("store.db*"):  # what lies beside it, too
        path.unlink()
    assert "store.db is empty, but its history" in refusal(daemon)
    assert not list(tmp_path.glob("store.db"))
    assert await asyncio.to_thread(run, ["init", "--force", "--store", daemon.store]) == 0
    daemon.start()
    async with Client(daemon.url) as client:
        assert (await client.status()).epoch == 2
    daemon.terminate()
    daemon.start()
    daemon.terminate()


async def test_an_operator_can_serve_an_older_copy(tmp_path: Path) -> None:
    daemon = daemon_in(tmp_path)
    daemon.start()
    await enqueue(daemon, 3)
    daemon.terminate()
    shutil.copy(tmp_path / "store.db", tmp_path / "old.db")
    daemon.start()
    await enqueue(daemon, 2)
    daemon.terminate()
    shutil.copy(tmp_path / "old.db", tmp_path / "store.db")
    assert "older or another store" in refusal(daemon)
    assert await asyncio.to_thread(run, ["init", "--branch", "--store", daemon.store]) == 0
    daemon.start()
    assert len(await ids_of(daemon)) == 3
    async with Client(daemon.url) as client:
        assert (await client.status()).epoch == 3
    daemon.terminate()


async def test_an_emptied_redis_stops_the_start(tmp_path: Path, redis: RedisServer) -> None:
    daemon = daemon_in(tmp_path, store=redis.url(""))
    daemon.start()
    await enqueue(daemon, 3)
    daemon.terminate()
    redis.call("FLUSHALL")
    assert "{tw:default:0} is empty, but its history" in refusal(daemon)
    command = ["init", "--force", "--yes", "--store", daemon.store]
    assert await asyncio.to_thread(run, command) == 0
    daemon.start()
    async with Client(daemon.url) as client:
        assert (await client.status()).epoch == 2
    daemon.terminate()
    redis.call("HINCRBY", "{tw:default:0}:wheel", "epoch", -1)
    assert "older or another store" in refusal(daemon)
    assert await asyncio.to_thread(run, ["init", "--branch", "--store", daemon.store]) == 0
    daemon.start()
    daemon.terminate()


def test_expect_store_stops_a_start_without_any_history(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, expect_store="true")
    assert "the setting expect_store proves that a store existed" in refusal(daemon)
    assert run(["init", "--store", daemon.store]) == 0
    daemon.start()
    daemon.terminate()
