"""Change the number of shards offline: ``tickwheel reshard``.

All records of the old databases are copied to new databases in the same folder, as follows:

| record | new shard |
|---|---|
| task with a basis (``shard_by``, order key, key or schedule) | that of the basis |
| other tasks, outcomes of tasks | the same as before, see below |
| ended bulk operations | the same as before; others get the id without the counts |
| schedule | that of the basis of its tasks, else of its name |
| open transaction | that of the bases of its half tasks, else of its name |
| decided transactions, groups, topics, targets, paused keys | all |
| claim of a name | none: names in use are claimed again at their home |
| answers to a producer session | the same as before, or all if that shard is removed |
| answers to a request with an idempotency key | the home of the key, in one record |

Records of a removed shard K go to shard K modulo the new number of shards. Versions of settings
restart, because their home shards change.

Ids do not change. The order of ids determines which tasks are owed to a group, and a group begins
at a different id in each shard. A merged group begins where the earliest of its parts begins. A
task that was not owed to one of the parts gets a record that the merged group is done with it. If a
record cannot be moved exactly, the change is refused before anything is written.

Invariants: an old database changes only after the new databases are complete and verified. It is
then only marked as given up, after which no store opens it. A single rename (``shards.json``)
activates the new databases. After an interruption at any point, the next run starts again from the
old databases.
"""

from __future__ import annotations

import asyncio
import hashlib
import heapq
import os
import shutil
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import asdict, dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from tickwheel import disk, failpoints
from tickwheel.api import tasks as api
from tickwheel.engine.ownership import owing
from tickwheel.errors import BadRequest, Conflict, shown
from tickwheel.limits import SHARDS_MAX
from tickwheel.model.filters import is_before
from tickwheel.model.kinds import (
    BULK,
    CLAIM,
    GROUP,
    NAME_PROPERTY,
    PAUSED_KEY,
    SCHEDULE,
    SCHEDULE_NAMES,
    SESSION,
    TARGET,
    TRANSACTION,
    TRANSACTION_NAMES,
    BulkRow,
    ClaimRow,
    Halves,
    Kind,
    PausedKey,
    RecordKey,
    ScheduleRow,
    TargetRow,
    TransactionRow,
    keyed,
)
from tickwheel.model.records import (
    BY_DUE_ALONE,
    ID_STEP,
    TOPIC_ITSELF,
    GroupRow,
    GroupSettings,
    Once,
    OncePart,
    Outcome,
    ProgressRow,
    ProgressState,
    SessionRow,
    TaskOptions,
    TaskRow,
    order_of,
)
from tickwheel.model.values import shard_of
from tickwheel.persistence import (
    Layout,
    ShardFolder,
    audit,
    count_path,
    is_laid_out,
    layout_number,
    parse,
    read_layout,
    shard_folder,
    sqlite_url,
    unfinished,
    without_secrets,
    write_layout,
)
from tickwheel.persistence.codec import encode_dead, encode_progress, encode_task
from tickwheel.persistence.contract import Audit, SmallState, StoredTask, StoreUnusable
from tickwheel.persistence.filling import new_sqlite
from tickwheel.persistence.sqlite import SqliteOptions, options_from
from tickwheel.persistence.sqlite.database import (
    MOVED_TO,
    SINCE_EPOCH,
    FileLock,
    StoreLock,
    connect_reader,
    free_bytes,
    meta_of,
    read_meta,
    write_meta,
)
from tickwheel.persistence.sqlite.reader import Reader
from tickwheel.persistence.sqlite.store import read_small

OWNER: Final = "reshard"
PAGE: Final = 10_000
CACHE_BYTES: Final = 4 << 20
BUSY_MS: Final = 1_000
ROOM_BYTES: Final = 1 << 20
"""Free bytes needed for each new database, in addition to twice the size of the old databases."""
_NO_OPTIONS: Final = TaskOptions()
_NO_SETTINGS: Final = GroupSettings()
_T = TypeVar("_T")


class Plan(NamedTuple):
    """The change that was requested."""

    store: str
    """URL of the folder, or of a single database."""
    to: int
    into: str | None = None
    """URL of the new folder if ``store`` is a single database."""
    dry_run: bool = False


@dataclass(slots=True)
class Report:
    """The result of a run, or of a dry run. All numbers are counts."""

    store: str
    into: str
    from_shards: int
    to: int
    dry_run: bool = False
    already: bool = False
    """Whether an earlier run has already changed the number of shards."""
    tasks: int = 0
    moved: int = 0
    """Tasks whose shard number changes."""
    progress: int = 0
    dead: int = 0
    done: int = 0
    """New records that a group is done with a task, because the group began at different ids."""
    records: dict[str, int] = field(default_factory=dict)
    """Number of records by kind."""
    shards: list[dict[str, Any]] = field(default_factory=list)
    """For each new shard, its number, its number of tasks and its database."""
    kept: list[str] = field(default_factory=list)
    """The old databases, which are no longer used."""

    def fields(self) -> dict[str, Any]:
        """Return the fields of the report for ``--json``."""
        return asdict(self)


def reshard(plan: Plan, now_ms: int) -> Report:
    """Change the number of shards and return a report. Raise TickwheelError on failure; then either
    nothing has changed, or the same call completes the change."""
    if not 1 <= plan.to <= SHARDS_MAX:
        raise BadRequest(f"to must be between 1 and {SHARDS_MAX}, not {plan.to}")
    paths = _paths_of(plan)
    report = Report(
        without_secrets(plan.store), f"sqlite:///{paths.folder.path}", len(paths.old), plan.to,
        plan.dry_run,
    )  # fmt: skip
    if paths.is_done:
        report.already = True
        return report
    with ExitStack() as stack:
        endings_max = paths.options.endings_max
        sources = [
            _Source(number, path, endings_max, stack) for number, path in enumerate(paths.old)
        ]
        move = _Move(sources, plan.to, endings_max)
        move.survey(report)
        _check_room(paths, plan.to)
        if not plan.dry_run:
            _create_databases(paths, move, now_ms)
            report.kept = paths.old
    report.shards = [
        {"shard": shard, "tasks": tasks, "database": paths.new_folder.database(shard)}
        for shard, tasks in enumerate(move.tasks_of)
    ]
    return report


# --- paths ---------------------------------------------------------------------------------------


class _Paths(NamedTuple):
    """The paths of the old and new databases."""

    folder: ShardFolder
    layout: Layout
    """Current layout of the folder; a new folder has 0 shards."""
    old: list[str]
    is_done: bool

    @property
    def new_folder(self) -> ShardFolder:
        """The folder with the paths of the new databases."""
        return replace(self.folder, part=self.layout._replace(number=self.layout.number + 1).part)

    @property
    def options(self) -> SqliteOptions:
        """Options for creating the new databases."""
        url = self.folder.url(0)
        return options_from(url, parse(url).settings)


def _paths_of(plan: Plan) -> _Paths:
    folder = shard_folder(plan.store)
    if folder is None:
        return _paths_of_one(plan)
    if plan.into is not None:
        raise BadRequest(
            f"into ({plan.into}) requires a single database, but {plan.store} is a folder"
        )
    if not is_laid_out(folder):
        raise StoreUnusable(f"{count_path(folder)} is missing: the folder has no shards")
    layout = read_layout(folder)
    current = replace(folder, part=layout.part)
    paths = [current.database(shard) for shard in range(layout.shards)]
    return _Paths(folder, layout, paths, layout.shards == plan.to)


def _paths_of_one(plan: Plan) -> _Paths:
    kind = parse(plan.store).kind
    if kind != "sqlite":
        raise BadRequest(f"store {without_secrets(plan.store)!r} must be an SQLite store")
    folder = None if plan.into is None else shard_folder(plan.into)
    if folder is None:
        raise BadRequest(
            "into must be the folder of the new shards, sqlite:///DIR/ with a trailing slash, not"
            f" {shown(plan.into)}"
        )
    path = os.path.realpath(parse(plan.store).path)
    if not is_laid_out(folder):
        for existing in filter(os.path.exists, map(folder.database, range(SHARDS_MAX))):
            raise StoreUnusable(f"{existing} already exists: use another folder")
        return _Paths(folder, Layout(0), [path], is_done=False)
    layout = read_layout(folder)
    successor = f"{os.path.realpath(folder.path)}/{Layout(0, 1).part}"
    meta = meta_of(path) if os.path.exists(path) else {}
    if layout.shards != plan.to or meta.get(MOVED_TO) != successor:
        raise Conflict(f"{count_path(folder)} already exists: use another folder")
    return _Paths(folder, layout, [path], is_done=True)


def _check_room(paths: _Paths, count: int) -> None:
    """Raise StoreUnusable unless the new databases certainly fit on the disk, from which the files
    of an interrupted run are removed before they are written."""
    needed = 2 * sum(map(os.path.getsize, paths.old)) + count * ROOM_BYTES
    path = os.path.abspath(paths.folder.path)
    leftovers = (file for part in unfinished(paths.folder) for file in Path(part).rglob("*"))
    free = free_bytes(f"{path}/" if os.path.isdir(path) else path)
    free += sum(map(os.path.getsize, leftovers))
    if free < needed:
        raise StoreUnusable(
            f"{paths.folder.path}: {needed:,} bytes are needed, but {free:,} are free on disk"
        )


# --- old databases ---------------------------------------------------------------------------


class _Source:
    """An old database. It is locked and complete, and only read."""

    def __init__(self, number: int, path: str, endings_max: int, stack: ExitStack) -> None:
        """Raise StoreUnusable if the database is missing, in use, not cleanly closed or damaged."""
        self.number, self.path = number, os.path.realpath(path)
        if not os.path.exists(self.path):
            raise StoreUnusable(f"{path} is missing: restore it first")
        lock = StoreLock(self.path)
        lock.acquire(OWNER)
        stack.callback(lock.release)
        _check_intact(self.path)
        self._connection = connect_reader(self.path, CACHE_BYTES, BUSY_MS, mode="ro")
        stack.callback(self._connection.close)
        meta = read_meta(self._connection, self.path)
        if not meta["clean"]:
            raise StoreUnusable(
                f"{path} was not closed cleanly: start its daemon once and stop it with SIGTERM"
            )
        self._check_not_given_up(meta.get(MOVED_TO))
        self.epoch, self.id_mark = int(meta["epoch"]), int(meta["id_mark"])
        self.position_ms = int(meta["position_ms"])
        self.small = read_small(self._connection, endings_max)
        self._reader = Reader(self._connection)

    def _check_not_given_up(self, successor: object) -> None:
        """Raise Conflict if a completed run has replaced this database by others."""
        if successor is None:
            return
        path, _, part = str(successor).rstrip("/").rpartition("/")
        folder = ShardFolder(f"{path}/")
        if is_laid_out(folder) and layout_number(part) <= read_layout(folder).number:
            raise Conflict(f"{self.path}: its tasks were already moved to {successor}")

    def tasks(self) -> Iterator[StoredTask]:
        """Yield all tasks in the order of their ids."""
        return _tasks_of(self._reader)

    def close(self) -> None:
        self._connection.close()


def _check_intact(path: str) -> Audit:
    result = audit.check(sqlite_url(Path(path)), is_locked=True)
    if result.problems:
        raise StoreUnusable(
            f"{path} has {len(result.problems)} problems; the first: {result.problems[0]}"
        )
    return result


def _tasks_of(reader: Reader) -> Iterator[StoredTask]:
    after_id = -1
    while page := reader.scan(after_id, PAGE, None):
        yield from page
        after_id = page[-1].row.id


def _all_tasks(sources: Sequence[_Source]) -> Iterator[tuple[_Source, StoredTask]]:
    """Yield all tasks in the order of their ids, each with its old database. Raise StoreUnusable if
    a task is in two databases."""

    def pairs(source: _Source) -> Iterator[tuple[_Source, StoredTask]]:
        return ((source, task) for task in source.tasks())

    last_id = -1
    for source, task in heapq.merge(*map(pairs, sources), key=lambda pair: pair[1].row.id):
        if task.row.id == last_id:
            raise StoreUnusable(f"task {last_id} is in two shards, one of them {source.path}")
        last_id = task.row.id
        yield source, task


# --- groups --------------------------------------------------------------------------------------


class _Groups:
    """The merged groups of all shards, and the effect of the merge on tasks."""

    def __init__(self, sources: Sequence[_Source]) -> None:
        """Raise Conflict if shards disagree, or if a group is being deleted."""
        self._is_one = len(sources) == 1
        self._sources = sources
        self.rows: list[GroupRow] = []
        self._before: list[dict[str, dict[str, GroupRow]]] = [{} for _ in sources]
        """For each source, its groups by topic. A group that it lacks begins there now."""
        self._after: dict[str, dict[str, GroupRow]] = {}
        """Groups by topic in the new shards."""
        self._former_filters: list[dict[str, list[GroupRow]]] = [{} for _ in sources]
        """For each source, the groups by topic that have former filters."""
        by_name: dict[tuple[str, str], dict[int, GroupRow]] = {}
        for source in sources:
            for row in source.small.of_kind(GROUP):
                _check_settled(row)
                by_name.setdefault((row.topic, row.group), {})[source.number] = row
        if self._is_one:
            self.rows = [
                row._replace(version=0) for rows in by_name.values() for row in rows.values()
            ]
            return
        topics = [{topic for (topic, group), rows in by_name.items() if number in rows
                   and group != TOPIC_ITSELF} for number in range(len(sources))]  # fmt: skip
        for rows in by_name.values():
            self._add(rows, topics)

    def _add(self, rows: Mapping[int, GroupRow], topics: Sequence[set[str]]) -> None:
        """Merge the rows that sources have of a group, or of a topic's own settings."""
        settings = _same_settings(list(rows.values()))
        first = next(iter(rows.values()))
        topic, group = first.topic, first.group
        if group == TOPIC_ITSELF:
            self.rows.append(first._replace(settings=settings, version=0))
            return
        own_rows = {
            number: self._as_started(self._sources[number], row._replace(settings=settings))
            for number, row in rows.items()
        }
        starts = [(row.since_ms, row.since_id) for row in own_rows.values()]
        is_later = any(since_id == BY_DUE_ALONE for _, since_id in starts)
        if is_later and len(set(starts)) > 1:
            raise Conflict(
                f"group {group} of topic {topic} begins in the future at different times in the"
                " shards: delete it, or wait until it has begun"
            )
        since_ms, since_id = min(start[0] for start in starts), min(start[1] for start in starts)
        merged = GroupRow(topic, group, since_ms, settings, since_id)
        self.rows.append(merged)
        self._after.setdefault(topic, {})[group] = merged
        for source in self._sources:
            # In a source without groups of the topic, tasks wait for the topic's first group.
            if topic in topics[source.number]:
                joined = merged if is_later else merged._replace(
                    since_ms=source.position_ms + 1, since_id=source.id_mark
                )  # fmt: skip
                groups = self._before[source.number].setdefault(topic, {})
                groups[group] = own_rows.get(source.number, joined)
            row = rows.get(source.number)
            if row is not None and row.settings is not None and row.settings.former:
                self._former_filters[source.number].setdefault(topic, []).append(row)

    @staticmethod
    def _as_started(source: _Source, row: GroupRow) -> GroupRow:
        """Return the row as a start of the daemon would change it: a group may have begun since the
        row was written."""
        if row.since_id == BY_DUE_ALONE and row.since_ms <= source.position_ms:
            return row._replace(since_id=source.id_mark)
        return row

    def newly_owed(self, source: _Source, task: StoredTask) -> list[str]:
        """Return the groups that are newly owed the task because of the merge. Raise Conflict if
        this cannot be determined."""
        if self._is_one:
            return []
        row, topic = task.row, task.row.topic
        for group in self._former_filters[source.number].get(topic, ()):
            assert group.settings is not None
            if any(is_before(former, row) for former in group.settings.former):
                raise Conflict(
                    f"task {row.id} of topic {topic} became due before the filter of group"
                    f" {group.group} was changed: finish such tasks first"
                )
        groups = self._before[source.number].get(topic)
        if not groups:
            return []
        recorded = {progress.group for progress in task.progress}
        recorded |= {letter.group for letter in task.dead}
        before = {group.group for group in owing(groups, row, recorded)}
        after = {group.group for group in owing(self._after[topic], row, recorded)}
        newly_owed = sorted(after - before)
        if before - after or (newly_owed and row.due_ms > source.position_ms):
            names = ", ".join(sorted(before ^ after))
            raise Conflict(
                f"the change would affect which of the groups {names} get task {row.id} of topic"
                f" {topic}: finish it first"
            )
        return newly_owed


def _check_settled(row: GroupRow) -> None:
    if row.settings is not None and row.settings.closed_ms is not None:
        subject = f"group {row.group} of topic" if row.group != TOPIC_ITSELF else "topic"
        raise Conflict(
            f"{subject} {row.topic} is being deleted: start a daemon and let it finish the deletion"
        )


def _same_settings(rows: Sequence[GroupRow]) -> GroupSettings | None:
    """Return the settings that a group's rows share, without former filters. If the home of the
    group has newer settings than other shards, return those. Raise Conflict if rows differ."""
    newest = max(row.version for row in rows)
    versions = [
        (row.settings or _NO_SETTINGS)._replace(former=()) for row in rows if row.version == newest
    ]
    # Each shard recorded the time of a pause on its own clock.
    paused_ms = min((v.paused_ms for v in versions if v.paused_ms is not None), default=None)
    versions = [v._replace(paused_ms=paused_ms if v.paused else None) for v in versions]
    filters = {(settings.tags, settings.where) for row in rows if (settings := row.settings)}
    filters |= {(None, None) for row in rows if row.settings is None}
    if len(filters) > 1 or any(settings != versions[0] for settings in versions):
        row = rows[0]
        subject = f"group {row.group} of topic" if row.group != TOPIC_ITSELF else "topic"
        raise Conflict(f"{subject} {row.topic} has different settings in different shards")
    return None if all(row.settings is None for row in rows) else versions[0]


# --- new shards ----------------------------------------------------------------------------------


def basis_of(options: TaskOptions | None) -> str | None:
    """Return the name that determines the shard of a task with these options, or None."""
    options = options or _NO_OPTIONS
    basis = api.basis_of(options.shard_by, options.order_key, options.key)
    if basis is not None:
        return basis
    # A schedule is in the shard of its tasks, because it checks whether the last one has ended.
    schedule = (options.properties or {}).get(NAME_PROPERTY)
    return schedule if isinstance(schedule, str) else None


class _Move:
    """Assigns all records to the new shards."""

    def __init__(self, sources: Sequence[_Source], count: int, endings_max: int) -> None:
        """Raise Conflict for records that cannot be moved exactly."""
        self.sources, self.count, self.endings_max = sources, count, endings_max
        self.groups = _Groups(sources)
        self._awaited: dict[int, tuple[str, int]] = {}
        """For each task whose end a schedule awaits, the schedule and its new shard."""
        self.records: list[dict[RecordKey, Any]] = [{} for _ in range(count)]
        """All records except groups, by new shard."""
        self.outcomes: list[list[tuple[int, Outcome]]] = [[] for _ in range(count)]
        self.tasks_of = [0] * count
        self.epoch = max(source.epoch for source in sources) + 1
        self.position_ms = max(source.position_ms for source in sources)
        self.id_mark = max(source.id_mark for source in sources)
        for source in sources:
            self._add_schedules(source.small.of_kind(SCHEDULE))
            self._add_transactions(source.small.of_kind(TRANSACTION))
            self._add_bulks(source, source.small.of_kind(BULK))
            self._add_paused(source.small.of_kind(PAUSED_KEY))
            self._add_targets(source.small.of_kind(TARGET))
            self.outcomes[self._shard_without_basis(source)] += source.small.outcomes
        # Records of shards whose numbers remain take precedence, so they are added first.
        for source in sources:
            rows = list[SessionRow](source.small.of_kind(SESSION))
            self._add_sessions(source, [row for row in rows if not row.once.key])
            for row in rows:
                if row.once.key:
                    self._add_once(source, row)
        if len(sources) > 1:
            for pairs in self.outcomes:
                pairs.sort()
        for pairs in self.outcomes:
            del pairs[:-endings_max]

    @property
    def moved_id(self) -> int:
        """The highest id that the old databases can contain. New ids are higher."""
        return self.id_mark // ID_STEP * ID_STEP + ID_STEP - 1

    def id_mark_of(self, shard: int) -> int:
        """Return the id mark of a new shard. Like all ids of a shard, it contains its number."""
        return self.moved_id + 1 + shard

    def shard_of(self, basis: str) -> int:
        return shard_of(basis, self.count)

    def _shard_without_basis(self, source: _Source) -> int:
        """Return the new shard of records whose shard no name determines."""
        return source.number % self.count

    def home_of(self, source: _Source, row: TaskRow) -> int:
        """Return the new shard of a task."""
        basis = basis_of(row.options)
        return self._shard_without_basis(source) if basis is None else self.shard_of(basis)

    # --- records ---------------------------------------------------------------------------------

    def _put(self, shard: int, kind: Kind[_T], row: _T) -> None:
        """Add a record to a shard. Raise Conflict if it has a different record with this key."""
        key = (kind, kind.key(row))
        if self.records[shard].setdefault(key, row) != row:
            raise Conflict(f"{kind.name} {kind.key(row)!r} is in two shards")

    def _add_schedules(self, rows: Iterable[ScheduleRow]) -> None:
        for row in rows:
            basis = basis_of(row.schedule.options)
            shard = self.shard_of(row.schedule.name if basis is None else basis)
            if any((SCHEDULE, row.schedule.name) in records for records in self.records):
                raise Conflict(
                    f"schedule {row.schedule.name} is in two shards: delete it in one of them"
                )
            self._put(shard, SCHEDULE, row)
            self._claim(SCHEDULE_NAMES, row.schedule.name, row.schedule.topic, shard)
            if row.last_id and row.schedule.overlap != "allow":
                self._awaited[row.last_id] = row.schedule.name, shard

    def _add_transactions(self, rows: Iterable[TransactionRow | Halves]) -> None:
        parts: dict[str, list[Halves]] = {}
        heads: list[TransactionRow] = []
        for row in rows:
            if isinstance(row, Halves):
                parts.setdefault(row.transaction, []).append(row)
            else:
                heads.append(row)
        for head in heads:
            if head.state.is_decided:
                # A producer that prepares the transaction again must get its outcome in any shard.
                for shard in range(self.count):
                    self._put(shard, TRANSACTION, head)
                continue
            halves = [half for part in parts.get(head.id, ()) for half in part.halves]
            bases = {basis_of(half.options) for half in halves} - {None}
            homes = {self.shard_of(basis) for basis in bases if basis is not None}
            if len(homes) > 1:
                raise Conflict(
                    f"transaction {head.id} is open, but its tasks would be in {len(homes)}"
                    " shards: commit it or roll it back first"
                )
            shard = homes.pop() if homes else self.shard_of(head.id)
            for record in (head, *parts.get(head.id, ())):
                self._put(shard, TRANSACTION, record)
            self._claim(TRANSACTION_NAMES, head.id, head.topics[0] if head.topics else "", shard)

    def _claim(self, kind: str, name: str, topic: str, shard: int) -> None:
        """Claim a name at its home shard for the shard that uses it."""
        home = self.shard_of(name)
        if home != shard:
            number = len(self.records[home]) + 1  # unique among the claims of the shard
            self._put(home, CLAIM, ClaimRow(kind, name, topic, shard, number, self.position_ms))

    def _add_bulks(self, source: _Source, rows: Iterable[BulkRow]) -> None:
        home = self._shard_without_basis(source)
        for row in rows:
            if not row.state.is_over:
                raise Conflict(
                    f"bulk operation {row.bulk.id} is still running: start a daemon and let it"
                    " finish, or cancel it"
                )
            key, empty = (BULK, BULK.key(row)), BulkRow(row.bulk, row.state, ended_ms=row.ended_ms)
            for shard, records in enumerate(self.records):
                part = row if shard == home else empty
                records[key] = _sum(records[key], part) if key in records else part

    def _add_paused(self, rows: Iterable[PausedKey]) -> None:
        for row in rows:
            key = (PAUSED_KEY, PAUSED_KEY.key(row))
            for records in self.records:
                existing = records.get(key)
                records[key] = (
                    row if existing is None or row.since_ms < existing.since_ms else existing
                )

    def _add_targets(self, rows: Iterable[TargetRow]) -> None:
        for row in rows:
            for shard, records in enumerate(self.records):
                existing = records.get((TARGET, TARGET.key(row)))
                if existing is not None and _comparable(existing) != _comparable(row):
                    raise Conflict(
                        f"group {row.group} of topic {row.topic} has different targets in different"
                        " shards: set its target again"
                    )
                self._put(shard, TARGET, row if existing is None else existing)

    def _add_sessions(self, source: _Source, rows: Iterable[SessionRow]) -> None:
        stays = source.number < self.count
        for shard in (source.number,) if stays else range(self.count):
            sessions = {key[1][0] for key in self.records[shard] if key[0] is SESSION}
            rows_to_add = [row for row in rows if stays or row.session not in sessions]
            self.records[shard].update(keyed(SESSION, rows_to_add))

    def _add_once(self, source: _Source, row: SessionRow) -> None:
        """Merge a shard's answers to a request with an idempotency key into the record in the new
        home shard of the key."""
        merged = dict(row.merged)
        records = self.records[self.shard_of(row.once.key.hex())]
        for request, first, count, at_ms in row.answers:
            key = (SESSION, (row.session, request))
            once = row.once
            if not once.shards:
                part = OncePart(source.number, first, count, at_ms, merged.get(request, ()))
                once = Once(once.key, len(self.sources), (part,))
            existing = records.get(key)
            if existing is not None:
                once = once._replace(parts=(*existing.once.parts, *once.parts))
            answers, seen_ms = ((request, 0, 0, at_ms),), row.seen_ms
            if existing is not None:
                answers, seen_ms = existing.answers, max(seen_ms, existing.seen_ms)
            records[key] = SessionRow(row.session, 0, seen_ms, answers, once=once)

    # --- tasks -----------------------------------------------------------------------------------

    def survey(self, report: Report) -> None:
        """Count all tasks. Raise Conflict if a task cannot be moved exactly."""
        former = _ChosenDues(self.records)
        for source, task in _all_tasks(self.sources):
            home = self.home_of(source, task.row)
            name, shard = self._awaited.get(task.row.id, ("", home))
            if shard != home:
                raise Conflict(
                    f"schedule {name} waits for the end of task {task.row.id}, whose key belongs to"
                    " another shard: finish that task first"
                )
            if max(task.row.id, order_of(task.row)) > self.id_mark:
                raise StoreUnusable(f"task {task.row.id} is above the id mark {self.id_mark}")
            self.tasks_of[home] += 1
            report.tasks += 1
            report.moved += home != source.number
            report.progress += len(task.progress)
            report.dead += len(task.dead)
            report.done += len(self.groups.newly_owed(source, task))
            former.add(task.row)
        former.write()
        kinds = Counter(kind.name for source in self.sources for kind, _ in source.small.records)
        report.records = dict(sorted(kinds.items()))

    def tasks(self) -> Iterator[tuple[int, StoredTask, StoredTask]]:
        """Yield, in the order of ids, each task's new shard, the old task and the new task."""
        for source, task in _all_tasks(self.sources):
            done = tuple(
                ProgressRow(task.row.id, group, ProgressState.DONE, 0, 0)
                for group in self.groups.newly_owed(source, task)
            )
            new_task = task._replace(progress=(*task.progress, *done)) if done else task
            yield self.home_of(source, task.row), task, new_task


class _ChosenDues:
    """The due times chosen in due windows, for the answers to requests with an idempotency key:
    these times do not follow from the requests, and the tasks may be in other shards."""

    def __init__(self, records: Sequence[dict[RecordKey, Any]]) -> None:
        parts = [
            (part.first_id, part.tasks, shard_records, key)
            for shard_records in records
            for key, row in shard_records.items()
            if key[0] is SESSION
            for part in row.once.parts
            if part.tasks and not part.merged
        ]
        parts.sort(key=lambda part: part[:2])
        self._parts: dict[int, list[tuple[int, int, dict[RecordKey, Any], RecordKey]]] = {}
        """The parts by shard number in their ids, which do not overlap; each with its record."""
        for part in parts:
            self._parts.setdefault(part[0] % ID_STEP, []).append(part)
        self._chosen: dict[int, list[tuple[int, int]]] = {}
        """First id of a part → (id, due_ms) of its tasks with a due window."""

    def add(self, row: TaskRow) -> None:
        """Note the due time of a task if a part contains it and it has a due window."""
        if row.options is None or row.options.within_ms is None:
            return
        parts = self._parts.get(row.id % ID_STEP, [])
        index = bisect_right(parts, row.id, key=itemgetter(0)) - 1
        if index >= 0 and row.id < parts[index][0] + parts[index][1] * ID_STEP:
            self._chosen.setdefault(parts[index][0], []).append((row.id, row.due_ms))

    def write(self) -> None:
        """Add the due times to the records of the requests."""
        for parts in self._parts.values():
            for first_id, _, records, key in parts:
                if first_id in self._chosen:
                    row, found = records[key], self._chosen[first_id]
                    answered = [
                        part._replace(chosen=tuple((dict(found) | dict(part.chosen)).items()))
                        if part.first_id == first_id
                        else part
                        for part in row.once.parts
                    ]
                    records[key] = row._replace(once=row.once._replace(parts=tuple(answered)))


def _sum(row: BulkRow, other: BulkRow) -> BulkRow:
    """Return the sum of the rows that two shards have of an ended bulk operation."""
    refused = Counter(dict(row.refused)) + Counter(dict(other.refused))
    return row._replace(
        state=max(row.state, other.state),
        looked_at=row.looked_at + other.looked_at,
        matched=row.matched + other.matched,
        changed=row.changed + other.changed,
        refused=tuple(sorted(refused.items())),
        ended_ms=max(row.ended_ms, other.ended_ms),
        note=row.note or other.note,
    )


def _comparable(row: TargetRow) -> TargetRow:
    """Return a target, for comparison, without the time and the author of its settings."""
    return row._replace(since_ms=0, by="", ended_ms=None if row.ended_ms is None else 0)


# --- the new databases -----------------------------------------------------------------------


@dataclass(slots=True)
class _Counts:
    """The counts and the digest of a shard's tasks. They do not depend on the order of ``add``."""

    tasks: int = 0
    progress: int = 0
    dead: int = 0
    done: int = 0
    """Number of records that exist only because the number of shards was changed."""
    digest: int = 0
    """The sum of the digests of all tasks with their records."""

    def add(self, task: StoredTask) -> None:
        progress = [row for row in task.progress if not _is_from_reshard(row)]
        self.tasks += 1
        self.progress += len(progress)
        self.dead += len(task.dead)
        self.done += len(task.progress) - len(progress)
        digest = hashlib.blake2b(encode_task(task.row), digest_size=16)
        for part in sorted(map(encode_progress, progress)):
            digest.update(part)
        for part in sorted(map(encode_dead, task.dead)):
            digest.update(part)
        self.digest = (self.digest + int.from_bytes(digest.digest())) % (1 << 128)


def _is_from_reshard(row: ProgressRow) -> bool:
    """Return whether a change of the number of shards wrote the record, for a group to which the
    task was not owed."""
    return row.state is ProgressState.DONE and not (row.attempt or row.epoch or row.at_ms)


def _create_databases(paths: _Paths, move: _Move, now_ms: int) -> None:
    """Create, verify and activate the new databases."""
    folder = paths.new_folder
    try:
        Path(folder.path).mkdir(exist_ok=True)
    except OSError as error:
        raise StoreUnusable(f"store {folder.path}: {error.strerror}") from None
    lock = FileLock(f"{folder.path}reshard.lock")
    lock.acquire(OWNER)
    try:
        for leftover in unfinished(paths.folder):
            shutil.rmtree(leftover)
        new_path = f"{folder.path}{folder.part}"
        os.mkdir(new_path)
        try:
            failpoints.hit("reshard.begun")
            sums = asyncio.run(_fill(paths, move, now_ms))
            disk.sync(new_path)
            failpoints.hit("reshard.copied")
            for shard, expected in enumerate(sums):
                _verify(folder.database(shard), move, shard, expected)
            failpoints.hit("reshard.verified")
        except BaseException:
            shutil.rmtree(new_path, ignore_errors=True)  # daemons may need the space
            raise
        _switch(paths, move)
    finally:
        lock.release()


async def _fill(paths: _Paths, move: _Move, now_ms: int) -> list[_Counts]:
    """Fill the new databases, and return the counts that each of them should have."""
    meta = {SINCE_EPOCH: move.epoch}
    sums = [_Counts() for _ in range(move.count)]
    async with AsyncExitStack() as stack:
        fillers = []
        for shard in range(move.count):
            path = paths.new_folder.database(shard)
            opening = new_sqlite(path, OWNER, now_ms, move.epoch, meta, paths.options)
            filler = await stack.enter_async_context(opening)
            await filler.begin(
                move.groups.rows, move.outcomes[shard], move.id_mark_of(shard), move.position_ms
            )
            await filler.records(move.records[shard])
            fillers.append(filler)
        failpoints.hit("reshard.middle")
        for shard, task, new_task in move.tasks():
            await fillers[shard].put(new_task)
            sums[shard].add(task)
            sums[shard].done += len(new_task.progress) - len(task.progress)
    return sums


def _verify(path: str, move: _Move, shard: int, expected: _Counts) -> None:
    """Read a new database. Raise StoreUnusable unless it has exactly the expected content."""
    checked = _check_intact(path)
    connection = connect_reader(path, CACHE_BYTES, BUSY_MS, mode="ro")
    try:
        small = read_small(connection, move.endings_max)
        actual = _Counts()
        for task in _tasks_of(Reader(connection)):
            basis = basis_of(task.row.options)
            if basis is not None and move.shard_of(basis) != shard:
                raise StoreUnusable(f"{path}: task {task.row.id} is in the wrong shard")
            actual.add(task)
    finally:
        connection.close()
    counted = (checked.tasks, checked.progress, checked.dead)
    if actual != expected or counted != (
        expected.tasks, expected.progress + expected.done, expected.dead,
    ):  # fmt: skip
        raise StoreUnusable(f"{path} has {actual}, but should have {expected}")
    if small.records != _records(move, shard) or small.outcomes != move.outcomes[shard]:
        raise StoreUnusable(f"{path} has other records or outcomes than the sources")


def _records(move: _Move, shard: int) -> Mapping[RecordKey, Any]:
    return SmallState(keyed(GROUP, move.groups.rows) | move.records[shard]).records


def _switch(paths: _Paths, move: _Move) -> None:
    """Mark the old databases as given up, then activate the new ones."""
    folder = paths.new_folder
    for source in move.sources:
        source.close()
        successor = f"{os.path.realpath(folder.path)}/{folder.part}"
        write_meta(source.path, {MOVED_TO: successor})
        failpoints.hit("reshard.given_up")
    failpoints.hit("reshard.switching")
    layout = Layout(move.count, paths.layout.number + 1, move.moved_id, move.epoch)
    write_layout(paths.folder, layout)
    failpoints.hit("reshard.switched")
