"""Another number of shards, of databases that are written here: where each kind of record goes,
what becomes of groups of which shards disagree, and what is refused before anything is changed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from support.shards import key_in
from tickwheel.errors import BadRequest, Conflict, TickwheelError
from tickwheel.model.kinds import (
    BULK,
    CLAIM,
    COUNTER,
    GROUP,
    NAME_PROPERTY,
    PAUSED_KEY,
    SCHEDULE,
    SESSION,
    TARGET,
    TRANSACTION,
    Bulk,
    BulkRow,
    BulkState,
    Effects,
    Half,
    Halves,
    Kind,
    PausedKey,
    Schedule,
    ScheduleRow,
    Selection,
    TargetRow,
    TransactionRow,
    TransactionState,
    keyed,
)
from tickwheel.model.records import (
    BY_DUE_ALONE,
    ID_STEP,
    TOPIC_ITSELF,
    DeadRow,
    FormerFilter,
    GroupRow,
    GroupSettings,
    Once,
    OncePart,
    Outcome,
    ProgressRow,
    ProgressState,
    SessionRow,
    SettingsCounter,
    TaskOptions,
    TaskRow,
)
from tickwheel.persistence import Layout, ShardFolder, audit, read_layout, write_layout
from tickwheel.persistence.contract import SmallState, StoredTask, StoreUnusable
from tickwheel.persistence.sqlite import SqliteOptions, SqliteStore
from tickwheel.server.fleet import reshard as resharding
from tickwheel.server.fleet.reshard import Plan, Report, reshard

NOW_MS = 1_800_000_000_000
POSITION_MS = 1_000_000
TOPIC, GROUP_NAME = "t", "g"
OPTIONS = SqliteOptions(reserve_bytes=0)


def ident(number: int, shard: int) -> int:
    return number * ID_STEP + shard


def task(
    number: int, shard: int, due_ms: int = POSITION_MS + 5, topic: str = TOPIC, **options: Any
) -> TaskRow:
    extras = TaskOptions(**options) if options else None
    return TaskRow(ident(number, shard), due_ms, topic, b"body %d" % number, extras)


class Folder:
    """A folder of shards whose databases hold what a test says."""

    def __init__(self, path: Path, count: int) -> None:
        self.folder = ShardFolder(f"{path}/d/")
        self.count = count
        self.batches = [Effects(position_ms=POSITION_MS) for _ in range(count)]

    def add(self, shard: int, *rows: TaskRow | ProgressRow | DeadRow) -> None:
        batch = self.batches[shard]
        for row in rows:
            if isinstance(row, TaskRow):
                batch.enqueued[row.id] = row
            elif isinstance(row, ProgressRow):
                batch.progress[row.id, row.group] = row
            else:
                batch.dead[row.id, row.group] = row

    def keep(self, shard: int, kind: Kind[Any], *rows: Any) -> None:
        self.batches[shard].records |= keyed(kind, rows)

    def everywhere(self, kind: Kind[Any], *rows: Any) -> None:
        for shard in range(self.count):
            self.keep(shard, kind, *rows)

    def write(self, *, clean: bool = True) -> None:
        Path(self.folder.path).mkdir()
        for shard, batch in enumerate(self.batches):
            batch.id_mark = max([ident(3_000, shard), *batch.enqueued, *batch.ended])
            asyncio.run(self._write(shard, batch, clean=clean))
        write_layout(self.folder, Layout(self.count))

    async def _write(self, shard: int, batch: Effects, *, clean: bool) -> None:
        store = SqliteStore(self.folder.database(shard), OPTIONS)
        opened = await store.open("test", NOW_MS, epoch_min=7 + shard)
        ended, batch.ended = batch.ended, {}
        await store.commit(opened.epoch, "test", 1, batch)
        if ended:
            await store.commit(opened.epoch, "test", 2, Effects(ended=ended))
        await store.close(clean=clean)

    def to(self, count: int, **more: Any) -> Report:
        return reshard(Plan(f"sqlite:///{self.folder.path}", count, **more), NOW_MS)

    def refuses(self, count: int, *words: str, error: type[TickwheelError] = Conflict) -> None:
        """It says so in one line, and has changed nothing."""
        before = self.bytes()
        with pytest.raises(error) as raised:
            self.to(count)
        assert "\n" not in raised.value.message
        for word in words:
            assert word in raised.value.message
        assert self.bytes() == before

    def bytes(self) -> dict[str, bytes]:
        files = Path(self.folder.path).rglob("*")
        return {
            str(path): path.read_bytes()
            for path in files
            if path.is_file() and not path.name.endswith((".lock", "-shm", "-wal"))
        }

    def read(self, shard: int) -> Found:
        layout = read_layout(self.folder)
        folder = ShardFolder(self.folder.path, part=layout.part)
        return asyncio.run(_read(folder.database(shard)))


def by_text(rows: Iterable[Any]) -> list[Any]:
    return sorted(rows, key=str)


class Found:
    def __init__(
        self, small: SmallState, tasks: list[StoredTask], epoch: int, id_mark: int
    ) -> None:
        self.small, self.epoch, self.id_mark = small, epoch, id_mark
        self.tasks = {item.row.id: item for item in tasks}

    def of(self, kind: Kind[Any]) -> list[Any]:
        return by_text(self.small.of_kind(kind))


async def _read(path: str) -> Found:
    assert audit.check(f"sqlite:///{path}").problems == []
    store = SqliteStore(path, OPTIONS)
    opened = await store.open("test", NOW_MS)
    try:
        scanned = await store.scan(-1, 10_000, None)
        # One by one: what lies under another shard's pack is found only beside its neighbours.
        tasks = [task for item in scanned for task in (await store.read([item.row.id])).values()]
        assert tasks == scanned
        return Found(await store.recover_small(), tasks, opened.epoch - 1, opened.id_mark)
    finally:
        await store.close(clean=True)


def in_shard(key: str, count: int) -> int:
    return crc32(key.encode()) % count


# --- tasks ---------------------------------------------------------------------------------------


def test_tasks_go_to_the_shard_of_their_basis_and_others_stay(tmp_path: Path) -> None:
    folder = Folder(tmp_path, 2)
    rows: dict[int, tuple[TaskRow, int]] = {}
    for number in range(1, 400):
        shard = number % 2
        options: dict[str, Any] = [
            {},
            {"key": f"k{number}"},
            {"key": f"k{number}", "order_key": f"o{number % 7}"},
            {"properties": {NAME_PROPERTY: f"s{number}"}},
            {"tag": "x"},
            {"key": f"k{number}", "shard_by": f"b{number % 5}"},
        ][number % 6]
        row = task(number, shard, **options)
        names = (options.get(name) for name in ("shard_by", "order_key", "key"))
        basis = next(filter(None, names), f"s{number}" if "properties" in options else None)
        rows[row.id] = row, shard if basis is None else in_shard(basis, 3)
        folder.add(shard, row)
    folder.write()
    report = folder.to(3)
    results = [folder.read(shard) for shard in range(3)]
    for shard in range(3):
        expected = {one: row for one, (row, home) in rows.items() if home == shard}
        assert {one: got.row for one, got in results[shard].tasks.items()} == expected
        assert report.shards[shard]["tasks"] == len(expected) > 0
        assert results[shard].epoch > 8, "above that of any shard before"
        assert results[shard].id_mark % ID_STEP == shard
        assert results[shard].id_mark > read_layout(folder.folder).moved_id > max(rows)
    assert report.tasks == len(rows)
    assert report.moved == sum(home != one % ID_STEP for one, (_, home) in rows.items())


def test_interleaved_id_runs_of_several_shards_are_found(tmp_path: Path) -> None:
    """Packs are looked for by the order of ids: those of one shard must not lie over another's."""
    folder = Folder(tmp_path, 2)
    wanted = set[int]()
    runs = ((1_001, 2_001, 0), (1_981, 2_500, 1))
    for start, end, shard in runs:
        some = [task(number, shard) for number in range(start, end)]
        folder.add(shard, *some)
        wanted |= {row.id for row in some}
    folder.write()
    folder.to(1)
    assert set(folder.read(0).tasks) == wanted


def test_progress_dead_letters_and_outcomes_are_moved(tmp_path: Path) -> None:
    folder = Folder(tmp_path, 1)
    folder.keep(0, GROUP, GroupRow(TOPIC, GROUP_NAME, 0, None, 0))
    keys = [key_in(shard, 3) for shard in range(3)]
    rows = [task(n + 1, 0, 5, key=key) for n, key in enumerate(keys)]
    waiting = ProgressRow(rows[1].id, GROUP_NAME, ProgressState.WAITING, 2, 99, 7, failed=2)
    dead = DeadRow(rows[2].id, GROUP_NAME, TOPIC, 9, 3, "no", failed=3)
    folder.add(0, *rows, waiting, dead)
    folder.batches[0].ended = {ident(50, 0): Outcome.ACKED, ident(40, 0): Outcome.EXPIRED}
    folder.write()
    folder.to(3)
    results = [folder.read(shard) for shard in range(3)]
    assert results[1].tasks[rows[1].id].progress == (waiting,)
    assert results[2].tasks[rows[2].id].dead == (dead,)
    assert results[0].tasks[rows[0].id] == StoredTask(rows[0], (), ())
    assert results[0].small.outcomes == [
        (ident(50, 0), Outcome.ACKED), (ident(40, 0), Outcome.EXPIRED),
    ]  # fmt: skip
    assert [len(item.small.outcomes) for item in results] == [2, 0, 0]


# --- records -------------------------------------------------------------------------------------


def schedule(name: str, options: TaskOptions | None = None, **more: Any) -> ScheduleRow:
    last_id = more.pop("last_id", 0)
    row = Schedule(name, TOPIC, b"", options, None, "UTC", 60_000, 0, **more)
    return ScheduleRow(row, last_id=last_id)


def bulk(name: str, state: BulkState = BulkState.DONE, **more: Any) -> BulkRow:
    return BulkRow(Bulk(name, "cancel", TOPIC, Selection(), (), None, 5, 9), state, **more)


def target(url: str, since_ms: int = 5) -> TargetRow:
    return TargetRow(TOPIC, GROUP_NAME, "push", url, ("secret",), (), since_ms, "somebody")


def session(name: bytes, first: int = 1) -> SessionRow:
    return SessionRow(name * 16, 0, 5, ((first, ident(3, 0), 1, 5),))


def transaction(name: str, state: TransactionState = TransactionState.OPEN) -> TransactionRow:
    return TransactionRow(name, "p", state, 1, 2)


def halves(name: str, *keys: str | None) -> tuple[TransactionRow, Halves]:
    results = tuple(
        Half(TOPIC, 5, None, b"", TaskOptions(key=key) if key else None) for key in keys
    )
    size = sum(half.size_bytes for half in results)
    return transaction(name)._replace(tasks=len(keys), size_bytes=size), Halves(name, 1, 5, results)


def test_each_kind_of_record_goes_to_the_right_shards(tmp_path: Path) -> None:
    folder = Folder(tmp_path, 2)
    folder.everywhere(GROUP, GroupRow(TOPIC, GROUP_NAME, 0, None, 0))
    names = [f"s{n}" for n in range(9)]
    plain = [schedule(name) for name in names]
    with_key = schedule("keyed", TaskOptions(key="k2"))
    folder.keep(0, SCHEDULE, *plain[:4], with_key)
    folder.keep(1, SCHEDULE, *plain[4:])
    folder.keep(0, SESSION, session(b"a"), session(b"b"), session(b"b", 7))
    folder.keep(1, SESSION, session(b"a"), session(b"c"))
    open_ones = halves("open", "k1", None, "k1")
    folder.keep(0, TRANSACTION, *open_ones)
    decided = transaction("decided", TransactionState.COMMITTED)
    folder.keep(1, TRANSACTION, decided)
    folder.keep(0, BULK, bulk("b", changed=3, refused=(("x", 1),)), bulk("mine"))
    folder.keep(1, BULK, bulk("b", BulkState.CANCELLED, changed=4, refused=(("x", 2), ("y", 1))))
    paused = PausedKey(TOPIC, GROUP_NAME, None, "o1", 9, "somebody")
    folder.everywhere(PAUSED_KEY, paused)
    folder.keep(0, PAUSED_KEY, paused._replace(since_ms=8))
    folder.everywhere(TARGET, target("https://a.example/"))
    folder.write()
    folder.to(3)
    results = [folder.read(shard) for shard in range(3)]
    for shard, one in enumerate(results):
        expected = [row for row in plain if in_shard(row.schedule.name, 3) == shard]
        expected += [with_key] if in_shard("k2", 3) == shard else []
        assert one.of(SCHEDULE) == by_text(expected)
        assert one.of(PAUSED_KEY) == [paused._replace(since_ms=8)]
        assert one.of(TARGET) == [target("https://a.example/")]
        kept = {
            row.id if isinstance(row, TransactionRow) else "half" for row in one.of(TRANSACTION)
        }
        assert kept == {"decided", *(("open", "half") if in_shard("k1", 3) == shard else ())}
    assert results[0].of(SESSION) == by_text([session(b"a"), session(b"b"), session(b"b", 7)])
    assert results[1].of(SESSION) == by_text([session(b"a"), session(b"c")])
    bulks = [[(row.bulk.id, row.changed) for row in one.of(BULK)] for one in results]
    assert bulks == [[("b", n), ("mine", 0)] for n in (3, 4, 0)], "each knows the ids"
    claims = [(shard, row.of, row.name, row.shard) for shard, one in enumerate(results)
              for row in one.of(CLAIM)]  # fmt: skip
    homes = {("schedule", "keyed"): "k2", ("transaction", "open"): "k1"}
    assert sorted(claims) == sorted(
        (in_shard(name, 3), of, name, in_shard(key, 3))
        for (of, name), key in homes.items()
        if in_shard(name, 3) != in_shard(key, 3)
    )
    folder.to(1)
    assert folder.read(0).of(CLAIM) == []
    (one, other) = folder.read(0).of(BULK)
    assert one == bulk("b", BulkState.CANCELLED, changed=7, refused=(("x", 3), ("y", 1)))
    assert other == bulk("mine")
    assert len(folder.read(0).of(SCHEDULE)) == 10
    assert folder.read(0).of(SESSION) == by_text(
        [session(b"a"), session(b"b"), session(b"b", 7), session(b"c")]
    )


def test_answers_of_a_removed_shard_are_known_in_all_shards(tmp_path: Path) -> None:
    folder = Folder(tmp_path, 3)
    folder.keep(0, SESSION, session(b"a"))
    folder.keep(2, SESSION, session(b"a", 9), session(b"z"))
    folder.write()
    folder.to(2)
    assert folder.read(0).of(SESSION) == [session(b"a"), session(b"z")]
    assert folder.read(1).of(SESSION) == by_text([session(b"a", 9), session(b"z")])


def test_idempotency_answers_move_to_their_new_home_shard(tmp_path: Path) -> None:
    def answered(first: int, tasks: int) -> SessionRow:
        return SessionRow(b"s" * 16, 0, 5, ((2**40, first, tasks, 5),), once=Once(b"key"))

    folder, rows = Folder(tmp_path, 2), {0: answered(0, 0), 1: answered(ident(3, 1), 2)}
    for shard, row in rows.items():
        folder.keep(shard, SESSION, row)
    folder.write()
    parts = (OncePart(0, 0, 0, 5), OncePart(1, ident(3, 1), 2, 5))
    moved = SessionRow(b"s" * 16, 0, 5, ((2**40, 0, 0, 5),), once=Once(b"key", 2, parts))
    for count in (5, 3, 1):
        folder.to(count)
        home = in_shard(b"key".hex(), count)
        expected = [[moved] if shard == home else [] for shard in range(count)]
        assert [folder.read(shard).of(SESSION) for shard in range(count)] == expected


def test_chosen_due_times_are_answered_again(tmp_path: Path) -> None:
    """The record lacks the time of an ended task. Other due times follow from the request."""
    folder, first_id = Folder(tmp_path, 2), ident(3, 1)
    row = SessionRow(b"s" * 16, 0, 5, ((2**40, first_id, 3, 5),), once=Once(b"key"))
    folder.keep(1, SESSION, row)
    windowed = [task(number, 1, POSITION_MS + number, within_ms=9) for number in (2, 3, 6)]
    folder.add(1, *windowed, task(4, 1), task(3, 0, within_ms=9))
    folder.write()
    for count in (3, 1):
        folder.to(count)
        [moved] = folder.read(in_shard(b"key".hex(), count)).of(SESSION)
        chosen = ((first_id, POSITION_MS + 3),)
        assert moved.once.parts == (OncePart(1, first_id, 3, 5, (), chosen),)


# --- groups --------------------------------------------------------------------------------------


def test_a_moved_task_is_owed_to_the_same_groups(tmp_path: Path) -> None:
    """In shard 0 both groups are old, in shard 1 the second one came late."""
    folder = Folder(tmp_path, 2)
    folder.keep(0, GROUP, GroupRow(TOPIC, "a", 0, None, 0), GroupRow(TOPIC, "b", 10, None, 1))
    late = GroupRow(TOPIC, "b", POSITION_MS - 10, None, ident(500, 1))
    folder.keep(1, GROUP, GroupRow(TOPIC, "a", 0, None, 0), late)
    fired = [task(n, 1, POSITION_MS - 20) for n in range(1, 11)]
    later = [task(n, 1, POSITION_MS + 20) for n in range(11, 21)]
    others = [task(n, 0, POSITION_MS - 20) for n in range(1, 11)]
    folder.add(1, *fired, *later)
    folder.add(0, *others)
    folder.write()
    assert folder.to(1).done == len(fired)
    rows = folder.read(0)
    assert rows.of(GROUP) == [GroupRow(TOPIC, "a", 0, None, 0), GroupRow(TOPIC, "b", 10, None, 1)]
    for row in fired:
        done = ProgressRow(row.id, "b", ProgressState.DONE, 0, 0)
        assert rows.tasks[row.id].progress == (done,)
    assert all(not rows.tasks[row.id].progress for row in (*later, *others))
    # A repeated run keeps the records of a task without duplicates.
    assert folder.to(2).done == 0
    assert sum(len(item.progress) for item in folder.read(1).tasks.values()) == 0
    assert sum(len(item.progress) for item in folder.read(0).tasks.values()) == len(fired)


def test_a_group_missing_in_a_shard_starts_there_now(tmp_path: Path) -> None:
    folder = Folder(tmp_path, 2)
    settings = GroupSettings(rate=5.0)
    folder.keep(0, GROUP, GroupRow(TOPIC, "a", 0, None, 0), GroupRow(TOPIC, "b", 0, settings, 0))
    folder.keep(1, GROUP, GroupRow(TOPIC, "a", 0, None, 0))
    folder.add(1, task(1, 1, POSITION_MS - 1), task(2, 1, POSITION_MS + 1))
    # Shard 1 has no group of another topic: its tasks wait for any.
    folder.keep(0, GROUP, GroupRow("u", "a", 0, None, 0))
    folder.add(1, task(3, 1, POSITION_MS - 1, topic="u"))
    folder.keep(1, GROUP, GroupRow("u", TOPIC_ITSELF, 0, GroupSettings(rate=9.0)))
    folder.write()
    assert folder.to(3).done == 1
    result = folder.read(1)
    assert result.tasks[ident(1, 1)].progress == (
        ProgressRow(ident(1, 1), "b", ProgressState.DONE, 0, 0),
    )
    assert not result.tasks[ident(2, 1)].progress
    assert not result.tasks[ident(3, 1)].progress
    for shard in range(3):
        rows = {(row.topic, row.group): row.settings for row in folder.read(shard).of(GROUP)}
        assert rows == {
            (TOPIC, "a"): None, (TOPIC, "b"): settings, ("u", "a"): None,
            ("u", TOPIC_ITSELF): GroupSettings(rate=9.0),
        }  # fmt: skip


def test_groups_of_a_single_shard_are_copied_unchanged(tmp_path: Path) -> None:
    folder = Folder(tmp_path, 1)
    former = (FormerFilter("x", None, 5, ident(9, 0)),)
    rows = [
        GroupRow(TOPIC, "a", 0, GroupSettings(tags="y", former=former), 0),
        GroupRow(TOPIC, "b", NOW_MS, None, BY_DUE_ALONE),
    ]
    folder.keep(0, GROUP, *rows)
    folder.add(0, task(1, 0, 3))
    folder.write()
    folder.to(2)
    assert folder.read(0).of(GROUP) == folder.read(1).of(GROUP) == rows


# --- what is refused -----------------------------------------------------------------------------


def _bulk_runs(folder: Folder) -> Iterable[str]:
    folder.keep(1, BULK, bulk("sweep", BulkState.RUNNING))
    return "bulk operation sweep", "is still running"


def _group_is_deleted(folder: Folder) -> Iterable[str]:
    settings = GroupSettings(closed_ms=5, closed_id=9)
    folder.keep(1, GROUP, GroupRow(TOPIC, "a", 0, settings, 0))
    return ("group a of topic t is being deleted",)


def _topic_is_deleted(folder: Folder) -> Iterable[str]:
    folder.keep(1, GROUP, GroupRow(TOPIC, TOPIC_ITSELF, 0, GroupSettings(closed_ms=5)))
    return ("topic t is being deleted",)


def test_the_home_shards_settings_win(tmp_path: Path) -> None:
    folder = Folder(tmp_path, 2)
    folder.keep(0, GROUP, GroupRow(TOPIC, "a", 0, GroupSettings(rate=1.0), 0, 3))
    folder.keep(1, GROUP, GroupRow(TOPIC, "a", 0, GroupSettings(rate=2.0), 0, 7))
    folder.keep(1, GROUP, GroupRow(TOPIC, "", 0, GroupSettings(paused=True), version=8))
    folder.everywhere(COUNTER, SettingsCounter(8))
    folder.write()
    folder.to(3)
    for shard in range(3):
        rows = {row.group: row for row in folder.read(shard).of(GROUP)}
        assert rows["a"].settings == GroupSettings(rate=2.0)
        assert [row.version for row in rows.values()] == [0, 0], "homes have changed"
        assert folder.read(shard).of(COUNTER) == []


def _filters_differ(folder: Folder) -> Iterable[str]:
    """Which tasks a shard has left out rests on its filter."""
    folder.keep(0, GROUP, GroupRow(TOPIC, "a", 0, GroupSettings(tags="x"), 0, 3))
    folder.keep(1, GROUP, GroupRow(TOPIC, "a", 0, None, 0, 7))
    return ("group a of topic t has different settings",)


def _settings_differ(folder: Folder) -> Iterable[str]:
    folder.keep(0, GROUP, GroupRow(TOPIC, "a", 0, GroupSettings(rate=1.0), 0))
    folder.keep(1, GROUP, GroupRow(TOPIC, "a", 0, GroupSettings(rate=2.0), 0))
    return ("group a of topic t has different settings",)


def _starts_differ(folder: Folder) -> Iterable[str]:
    folder.keep(0, GROUP, GroupRow(TOPIC, "a", NOW_MS, None, BY_DUE_ALONE))
    folder.keep(1, GROUP, GroupRow(TOPIC, "a", NOW_MS + 1, None, BY_DUE_ALONE))
    return ("group a of topic t begins in the future",)


def _former_filter(folder: Folder) -> Iterable[str]:
    former = (FormerFilter("x", None, POSITION_MS, ident(500, 1)),)
    folder.keep(0, GROUP, GroupRow(TOPIC, "a", 0, GroupSettings(tags="y"), 0))
    folder.keep(1, GROUP, GroupRow(TOPIC, "a", 0, GroupSettings(tags="y", former=former), 0))
    folder.add(1, task(5, 1, POSITION_MS - 1))
    return f"task {ident(5, 1)}", "before the filter of group a was changed"


def _targets_differ(folder: Folder) -> Iterable[str]:
    folder.everywhere(GROUP, GroupRow(TOPIC, GROUP_NAME, 0, None, 0))
    folder.keep(0, TARGET, target("https://a.example/"))
    folder.keep(1, TARGET, target("https://b.example/"))
    return ("group g of topic t has different targets",)


def _transaction_of_two(folder: Folder) -> Iterable[str]:
    keys = [key_in(0, 3), key_in(1, 3)]
    folder.keep(0, TRANSACTION, *halves("pay", *keys))
    return "transaction pay is open", "2 shards"


def _schedule_waits(folder: Folder) -> Iterable[str]:
    name = next(f"s{n}" for n in range(99) if in_shard(f"s{n}", 3) == 0)
    folder.keep(0, SCHEDULE, schedule(name, last_id=ident(5, 0), overlap="skip"))
    folder.add(0, task(5, 0, key=key_in(1, 3)))
    return (f"schedule {name} waits for the end of task {ident(5, 0)}",)


def _schedule_twice(folder: Folder) -> Iterable[str]:
    folder.everywhere(SCHEDULE, schedule("s"))
    return ("schedule s is in two shards",)


def _owed_before_alone(folder: Folder) -> Iterable[str]:
    """Nobody was owed the task, so that it went to the earliest group; now another one is owed."""
    folder.keep(0, GROUP, GroupRow(TOPIC, "a", 50, None, ident(9, 0)))
    folder.keep(0, GROUP, GroupRow(TOPIC, "b", 60, None, ident(9, 0)))
    folder.keep(1, GROUP, GroupRow(TOPIC, "a", 50, None, ident(9, 1)))
    folder.keep(1, GROUP, GroupRow(TOPIC, "b", 20, None, ident(9, 1)))
    folder.add(0, task(1, 0, 30))
    return f"task {ident(1, 0)} of topic t", "a, b"


@pytest.mark.parametrize(
    "prepare",
    [
        _bulk_runs, _group_is_deleted, _topic_is_deleted, _settings_differ, _filters_differ,
        _starts_differ,
        _former_filter, _targets_differ, _transaction_of_two, _schedule_waits, _schedule_twice,
        _owed_before_alone,
    ],
)  # fmt: skip
def test_records_that_cannot_be_moved_are_refused(
    tmp_path: Path, prepare: Callable[[Folder], Iterable[str]]
) -> None:
    folder = Folder(tmp_path, 2)
    words = prepare(folder)
    folder.write()
    folder.refuses(3, *words)


def test_a_database_that_was_not_closed_is_refused(tmp_path: Path) -> None:
    folder = Folder(tmp_path, 2)
    folder.write(clean=False)
    folder.refuses(3, "shard-0.db was not closed cleanly", error=StoreUnusable)


def test_a_database_in_use_or_missing_is_refused(tmp_path: Path) -> None:
    folder = Folder(tmp_path, 2)
    folder.write()

    async def while_open() -> None:
        store = SqliteStore(folder.folder.database(1), OPTIONS)
        await store.open("somebody", NOW_MS)
        with pytest.raises(StoreUnusable, match=r"shard-1.db is in use by pid \d+ somebody"):
            folder.to(3)
        await store.close(clean=True)

    asyncio.run(while_open())
    Path(folder.folder.database(1)).unlink()
    folder.refuses(3, "shard-1.db is missing", error=StoreUnusable)


def test_a_task_that_is_in_two_shards_is_refused(tmp_path: Path) -> None:
    folder = Folder(tmp_path, 2)
    folder.add(0, task(5, 0))
    folder.add(1, task(5, 0))
    folder.write()
    folder.refuses(3, f"task {ident(5, 0)} is in two shards", error=StoreUnusable)


def test_a_disk_without_room_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Folder(tmp_path, 1)
    folder.write()
    monkeypatch.setattr(resharding, "free_bytes", lambda path: 1_000)
    folder.refuses(2, "1,000 are free on disk", "are needed", error=StoreUnusable)


def test_an_interrupted_run_is_repeated_without_more_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it left counts as room, because the next run removes it first."""
    folder = Folder(tmp_path, 1)
    folder.add(0, task(1, 0), task(2, 0))
    folder.write()

    def used_bytes() -> int:
        return sum(path.stat().st_size for path in Path(folder.folder.path).rglob("*"))

    needed = 2 * Path(folder.folder.database(0)).stat().st_size + 2 * resharding.ROOM_BYTES
    disk_bytes = used_bytes() + needed + 65_536  # for files beside the databases
    monkeypatch.setattr(resharding, "free_bytes", lambda path: disk_bytes - used_bytes())

    def end(place: str) -> None:
        if place == "reshard.given_up":
            raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(resharding.failpoints, "hit", end)
        folder.to(2)
    assert disk_bytes - used_bytes() < needed
    assert folder.to(2, dry_run=True).tasks == folder.to(2).tasks == 2


@pytest.mark.parametrize(
    ("store", "to", "into", "message"),
    [
        ("sqlite:///d/", 0, None, "to must be between 1 and 64, not 0"),
        ("sqlite:///d/", 65, None, "to must be between 1 and 64, not 65"),
        ("sqlite:///d/", 2, "sqlite:///e/", "into (sqlite:///e/) requires a single database"),
        ("sqlite:///x.db", 2, None, "into must be the folder of the new shards"),
        ("sqlite:///x.db", 2, "sqlite:///y.db", "into must be the folder of the new shards"),
        ("memory:", 2, "sqlite:///e/", "must be an SQLite store"),
        ("redis://u:secret@h:1/0", 2, None, "store 'redis://h:1/0' must be an SQLite store"),
    ],
)
def test_invalid_plans_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: str, to: int, into: str | None,
    message: str
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadRequest) as error:
        reshard(Plan(store, to, into), NOW_MS)
    assert message in error.value.message
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_shards_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreUnusable, match="shards.json is missing: the folder has no shards"):
        reshard(Plan(f"sqlite:///{tmp_path}/", 2), NOW_MS)
    with pytest.raises(StoreUnusable, match="x.db is missing"):
        reshard(Plan(f"sqlite:///{tmp_path}/x.db", 2, f"sqlite:///{tmp_path}/d/"), NOW_MS)


def test_a_database_can_be_resharded_into_one_folder_only(tmp_path: Path) -> None:
    folder = Folder(tmp_path, 1)
    folder.add(0, task(1, 0), task(2, 0))
    folder.write()
    one = f"sqlite:///{folder.folder.database(0)}"
    with pytest.raises(Conflict, match=r"d/shards.json already exists: use another folder"):
        reshard(Plan(one, 2, f"sqlite:///{tmp_path}/d/"), NOW_MS)
    made = reshard(Plan(one, 2, f"sqlite:///{tmp_path}/e/"), NOW_MS)
    assert (made.tasks, made.from_shards, made.kept) == (2, 1, [folder.folder.database(0)])
    with pytest.raises(
        Conflict, match=r"shard-0.db: its tasks were already moved to .*/e/layout-1/"
    ):
        reshard(Plan(one, 2, f"sqlite:///{tmp_path}/f/"), NOW_MS)
    assert reshard(Plan(one, 2, f"sqlite:///{tmp_path}/e/"), NOW_MS).already
    with pytest.raises(Conflict, match=r"e/shards.json already exists"):
        reshard(Plan(one, 3, f"sqlite:///{tmp_path}/e/"), NOW_MS)


@pytest.mark.parametrize("rounds", [1, 2])
def test_a_check_refuses_superseded_databases(tmp_path: Path, rounds: int) -> None:
    folder = Folder(tmp_path, 1)
    folder.add(0, task(1, 0), task(2, 0))
    folder.write()
    url = f"sqlite:///{folder.folder.path}"

    def named() -> str:
        """The database that a check of the folder names."""
        with pytest.raises(StoreUnusable, match="a folder of several shards") as refused:
            audit.check(url)
        return str(refused.value).rpartition(" ")[2]

    for number in range(1, rounds + 1):
        before = named()
        assert audit.check(before).problems == []
        reshard(Plan(url, number + 1), NOW_MS)
        counts = named()
        assert f"layout-{number}/" in counts and audit.check(counts).problems == []
        with pytest.raises(StoreUnusable, match="its tasks were moved to") as refused:
            audit.check(before)
        assert counts in str(refused.value)


# --- the verification ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "loses",
    [
        lambda batch: batch.enqueued.pop(min(batch.enqueued)),
        lambda batch: batch.progress.clear(),
        lambda batch: batch.dead.clear(),
        lambda batch: batch.enqueued.update(
            {i: row._replace(due_ms=1) for i, row in batch.enqueued.items()}
        ),
        lambda batch: batch.records.clear(),
        lambda batch: batch.ended.clear(),
    ],
)
def test_a_wrongly_written_row_is_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loses: Callable[[Effects], Any]
) -> None:
    folder = Folder(tmp_path, 1)
    folder.keep(0, GROUP, GroupRow(TOPIC, GROUP_NAME, 0, None, 0))
    folder.keep(0, SCHEDULE, schedule("s"))
    rows = [task(n, 0, 5) for n in range(1, 4)]
    waiting = ProgressRow(rows[1].id, GROUP_NAME, ProgressState.WAITING, 2, 99, 7)
    folder.add(0, *rows, waiting, DeadRow(rows[2].id, GROUP_NAME, TOPIC, 9, 3, "no"))
    folder.batches[0].ended = {ident(50, 0): Outcome.ACKED}
    folder.write()
    commit = SqliteStore.commit

    async def forgetful(
        self: SqliteStore, epoch: int, owner: str, n: int, effects: Effects
    ) -> bool:
        with suppress(ValueError):  # there is nothing to lose in this batch
            loses(effects)
        return await commit(self, epoch, owner, n, effects)

    before = folder.bytes()
    with monkeypatch.context() as patched:
        patched.setattr(SqliteStore, "commit", forgetful)
        with pytest.raises(StoreUnusable, match=r"layout-1/shard-0.db (holds|does not|has)"):
            folder.to(1 + 1)
    after = folder.bytes()
    assert after == before, "what there was still counts, and nothing is left"
    assert folder.to(2).tasks == len(rows)
