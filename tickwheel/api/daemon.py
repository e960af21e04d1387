"""The daemon itself: counts, load, status, topics, consumers, history, backups, restores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

from tickwheel.api.frames import FrameType
from tickwheel.api.groups import OfGroup, OfTopic, Replay
from tickwheel.api.kinds import (
    BODY,
    FLAG,
    ID,
    IDS,
    KEY,
    NAME,
    POLICY,
    RULE,
    Choice,
    Moment,
    Span,
    Text,
    Whole,
)
from tickwheel.api.policies import IfPending, Retry
from tickwheel.api.schedules import NamesPage
from tickwheel.api.shapes import Answer, Request, called, when
from tickwheel.api.tasks import PAGE, ListedOptions
from tickwheel.api.verb import Audit, Home, Method, Need, Of, Over, Right, Unique, Verb
from tickwheel.limits import ID_MAX, SHARDS_MAX

LOAD_STEPS_MAX: Final = 1_440
"""Spans of one answer of ``load``: a day of minutes."""
FILE_NAME: Final = Text()
UNKNOWN: Final = "unknown"
"""The state of a daemon that is too old to be asked."""
UNREACHABLE: Final = "unreachable"
"""The state of a shard that gives no answer, where all are asked."""
RESTORE_STEPS: Final = ("backup", "events", "tasks", "writing")
"""The steps of a restore, in their order."""

# --- requests ------------------------------------------------------------------------------------


class Nothing(Request):
    """The request says nothing beside its verb."""


class LoadSpans(Request):
    """``steps`` spans of ``step_ms`` from ``from_ms`` on; the operation knows the bounds that
    follow from the daemon's tick."""

    from_ms: Annotated[int | None, Moment(), "The beginning of the first span; by default now."] = (
        called("since")
    )
    step_ms: Annotated[int | None, Span(1), "The length of a span; by default a minute."] = None
    steps: Annotated[
        int | None, Whole(1, LOAD_STEPS_MAX), "How many spans to answer; by default 60."
    ] = None


class ConsumersPage(Request):
    """The request asks for those who take tasks of a topic, or of a group."""

    topic: Annotated[str | None, NAME, "Only those of this topic."] = None
    group: Annotated[str | None, NAME, "Only those of this group."] = None
    after: Annotated[int, Whole(0, ID_MAX), "The ``next`` of the page before."] = 0
    limit: Annotated[
        int, PAGE, "The most items of the answer; a page ends behind all of one connection."
    ] = 100


class OfTask(Request):
    """The request names a task by its id."""

    id: Annotated[int, ID, "The id."]


class HistoryPage(Request):
    """The request asks for tasks of the history; the times are those of their enqueues."""

    key: Annotated[str | None, KEY, "Only those with this key."] = None
    topic: Annotated[str | None, NAME, "Only those of this topic."] = None
    since_ms: Annotated[
        int | None, Moment(), "Only those that were enqueued at this moment or later."
    ] = None
    until_ms: Annotated[
        int | None, Moment(), "Only those that were enqueued at this moment or earlier."
    ] = None
    limit: Annotated[int, PAGE, "The most items of the answer."] = 100


class BackupName(Request):
    """The request names the new file, without a folder."""

    name: Annotated[str, FILE_NAME, "The name of a new file in the folder for backups."]


class NewRestore(Request):
    """The request names files in the folder for backups; without ``ids`` it means all tasks."""

    into: Annotated[str, FILE_NAME, "A new SQLite file."]
    backup: Annotated[str | None, FILE_NAME, "The backup to begin with."] = None
    history: Annotated[
        bool, FLAG, "Also apply the history since the backup, where the daemon keeps one."
    ] = True
    ids: Annotated[Any, IDS, "The ids of the tasks to restore; by default all."] = None
    include_overdue: Annotated[bool, FLAG, "Also tasks that are due already."] = True
    allow_missing_bodies: Annotated[
        bool, FLAG, "Whether to restore although tasks have no body."
    ] = False
    dry_run: Annotated[bool, FLAG, "Only say what would be restored."] = False
    id: Annotated[int | None, ID, "Its id, which no restore has yet; default: one of its own."] = (
        None
    )
    of_shards: Annotated[
        int,
        Whole(1, SHARDS_MAX),
        "How many shards restore under this id, each a file of its own; said by a client of several"
        " shards.",
    ] = 1


class RestoreId(Request):
    """The request names a restore by its number."""

    id: Annotated[int, ID, "The id."]


# --- answers -------------------------------------------------------------------------------------


class Counted(Answer):
    """Topics and groups have these counts and settings in common."""

    ready: Annotated[int, "How many (task, group) pairs are due and not delivered."]
    in_flight: Annotated[int, "How many (task, group) pairs are delivered and not settled."]
    waiting: Annotated[int, "How many (task, group) pairs wait for a retry."]
    dead: Annotated[int, "How many dead letters there are."]
    delivered: Annotated[int, "How many deliveries there were since the start of the daemon."]
    acked: Annotated[int, "How many deliveries were acked since the start of the daemon."]
    oldest_ready_ms: Annotated[
        int, "How long the oldest ready task has waited, in milliseconds; 0: none is ready."
    ] = 0
    paused: Annotated[bool, "Whether nothing is delivered until somebody resumes it."] = False
    paused_ms: Annotated[int | None, Moment(), "Since when it is paused; None: it is not."] = None
    rate: Annotated[float | None, "The most deliveries a second; None: there is no limit."] = None
    burst: Annotated[
        int | None, "The most deliveries at once after a pause; None: there is no rate."
    ] = None
    retry: Annotated[
        Retry | None, POLICY, "The retry policy that was set; None: the one above it holds."
    ] = None


class GroupStats(Counted):
    """A group has these counts and settings."""

    retrying: Annotated[int, "How many tasks wait for a retry: the same as waiting."] = 0
    held: Annotated[int | None, "How many order keys wait for an operator."] = None
    paused_keys: Annotated[int | None, "How many keys operators have paused."] = None
    in_lines: Annotated[int | None, "How many tasks wait for their turn."] = None
    subscribers: Annotated[int, "How many subscriptions and waiting pulls take its tasks."]
    nacked: Annotated[int, "How many deliveries were nacked since the start of the daemon."] = 0
    snoozed: Annotated[int, "How many deliveries were snoozed since the start of the daemon."] = 0
    deaths: Annotated[
        int, "How many consumers died with a delivery since the start of the daemon."
    ] = 0
    expired: Annotated[
        int, "How many tasks expired before they were delivered since the start of the daemon."
    ] = 0
    filtered: Annotated[
        int, "How many tasks its filter has left out since the start of the daemon."
    ] = 0
    since_ms: Annotated[
        int,
        Moment(),
        "It is owed what is due from then on, and what was enqueued since it was made; 0: all that"
        " is there.",
    ] = 0
    unused_ms: Annotated[
        int | None,
        "How long nobody has used the group, in milliseconds, once that is long enough to mention.",
    ] = None
    replay: Annotated[
        Replay | None,
        "It begins in the past: how much of what was there before it has been looked at; None: all"
        " of it.",
    ] = None
    tags: Annotated[str | None, "The tags of its filter; None: tags are not looked at."] = None
    where: Annotated[str | None, "The condition of its filter; None: there is none."] = None
    order_retry_ms: Annotated[
        int | None,
        "How long it waits before it tries a failed task of an order key again, in milliseconds.",
    ] = None
    order_attempts: Annotated[
        int | None, "The failed attempts of a task of an order key after which order_failure holds."
    ] = None
    order_failure: Annotated[
        str | None, 'The action after these attempts: "hold", "dead" or "retry".'
    ] = None
    fair_by: Annotated[
        str | None, 'The field whose values take turns: "key", "tag", or the name of a property.'
    ] = None
    limit_each: Annotated[int | None, "The most deliveries in flight of each value of fair_by."] = (
        None
    )
    rate_each: Annotated[float | None, "The most deliveries a second of each value of fair_by."] = (
        None
    )


class TopicStats(Counted):
    """A topic has these counts and settings, and its groups."""

    topic: Annotated[str | None, NAME, "The name of the topic, in a list of topics."] = None
    scheduled: Annotated[int, "How many tasks are scheduled."]
    enqueued: Annotated[int, "How many tasks were enqueued since the start of the daemon."]
    cancelled: Annotated[int, "How many tasks were cancelled since the start of the daemon."] = 0
    broadcasters: Annotated[int, "How many broadcast subscriptions there are."] = 0
    groups: Annotated[Mapping[str, GroupStats], "The groups of the topic, by name."]
    deleting: Annotated[bool | None, "Whether the topic is being deleted."] = None
    broadcast_only: Annotated[
        bool | None, "Whether the topic has no groups, and its due tasks are broadcast and end."
    ] = None
    if_pending: Annotated[
        IfPending | None,
        RULE,
        "The rule for a task of the topic whose key is pending, unless the task has its own.",
    ] = None


class TopicList(Answer):
    """A page of topics, by name."""

    topics: Annotated[list[TopicStats], "The topics of this page."]
    next: Annotated[str | None, NAME, "The ``after`` of the next page; None: this is the last one."]


class Stats(Answer):
    """The daemon's counts at one moment; totals are since its start."""

    node: Annotated[str, "The name of the daemon's node."] = ""
    version: Annotated[str, "The daemon's version."] = ""
    epoch: Annotated[
        int, "The number of the daemon's term as the active one; it grows with each takeover."
    ] = 0
    now_ms: Annotated[int, Moment(), "The daemon's clock, in milliseconds since 1970."] = 0
    uptime_s: Annotated[float, "The time since the start of the daemon, in seconds."] = 0.0
    slots: Annotated[int, "How many slots the wheel has."] = 0
    tick_ms: Annotated[int, "The time that a slot stands for, in milliseconds."] = 0
    slot: Annotated[int, "The slot that the wheel has come to."] = 0
    position_ms: Annotated[
        int, Moment(), "The moment up to which the wheel has turned, in milliseconds since 1970."
    ] = 0
    scheduled: Annotated[int, "How many tasks are scheduled."]
    ready: Annotated[int, "How many (task, group) pairs are due and not delivered."]
    in_flight: Annotated[int, "How many (task, group) pairs are delivered and not settled."]
    waiting: Annotated[int, "How many (task, group) pairs wait for a retry."]
    dead: Annotated[int, "How many dead letters there are."]
    enqueued: Annotated[int, "How many tasks were enqueued since the start of the daemon."]
    delivered: Annotated[int, "How many deliveries there were since the start of the daemon."]
    acked: Annotated[int, "How many deliveries were acked since the start of the daemon."]
    dead_total: Annotated[
        int, "How many tasks became dead letters since the start of the daemon."
    ] = 0
    dead_expired: Annotated[int, "How many dead letters were deleted because they were old."] = 0
    dropped_once: Annotated[
        int, "Deliveries of at-most-once subscriptions that had their end and were not sent."
    ] = 0
    store_ok: Annotated[bool, "Whether the store takes what it is given."] = True
    lateness: Annotated[
        dict[str, Any] | None,
        "How late first deliveries of all topics were; None: the caller may not read all.",
    ] = None
    topics: Annotated[Mapping[str, TopicStats], "The topics, by name."]
    topics_left_out: Annotated[int, "How many topics had no room in the answer."] = 0
    partial: Annotated[
        bool, "Whether the counts are only of the topics that the caller may read."
    ] = False


class Load(Answer):
    """How many tasks are due in each span of time, as they stand on the wheel."""

    from_ms: Annotated[
        int, Moment(), "The beginning of the first span, in milliseconds since 1970."
    ]
    step_ms: Annotated[int, "The length of a span, in milliseconds."]
    counts: Annotated[
        tuple[int, ...], "How many tasks are due in each span, in the order of the spans."
    ]
    exact: Annotated[
        bool, "Whether all counts are exact; false: far counts were estimated from a sample."
    ]
    scheduled: Annotated[int, "How many tasks are on the wheel."]


class Active(Answer):
    """The active daemon, as another one knows it."""

    node: Annotated[str, "The name of its node."]
    address: Annotated[str, "The address where clients find it."]
    epoch: Annotated[int | None, "The number of its term; None while it takes over."]
    since_ms: Annotated[int, Moment(), "When it became the active one, in milliseconds since 1970."]


class Status(Answer):
    """A daemon at one moment, by its own clock."""

    node: Annotated[str, "The name of the daemon's node."]
    version: Annotated[str, "The daemon's version."]
    role: Annotated[str, '"active", "standby" or "starting".']
    state: Annotated[
        str,
        '"ready", "loading", "recovering", "standby", "store_trouble", "store_full", "draining",'
        ' "clock_held"; "unknown": it is too old to say.',
    ]
    detail: Annotated[str | None, "More about the state, for people."] = None
    epoch: Annotated[int, "The number of the active daemon's term; it grows with each takeover."]
    address: Annotated[
        str | None, "The address where others find it, as it says; None: it says none."
    ]
    since_ms: Annotated[int, Moment(), "When its role began."] = 0
    active: Annotated[
        Active | None,
        "The active daemon, if it knows one; on the active one itself that one, or None.",
    ] = None
    standbys: Annotated[
        Sequence[dict[str, Any]], "The daemons that stand by, as it knows them."
    ] = ()
    shard: Annotated[int, "The number of the shard: its place in ``shards``."] = 0
    shards: Annotated[
        Sequence[str], "The addresses of all shards, in their order; empty: there is one."
    ] = ()
    store: Annotated[str, "The URL of the store, without what may be secret in it."] = ""
    store_at: Annotated[
        str | None, "The server that has the store now, HOST:PORT; None: it has none, or unknown."
    ] = None
    store_ok: Annotated[bool, "Whether the store takes what it is given."]
    durability: Annotated[
        str | None,
        "What a confirmed task survives there, for people; None: it has no store open.",
    ] = None
    mirror: Annotated[
        bool | None,
        "Whether the active daemon keeps all records in memory, and writes them again to a Redis"
        " that lost them; None: its store is not Redis.",
    ] = None
    now_ms: Annotated[int, Moment(), "The daemon's clock, in milliseconds since 1970."]
    uptime_s: Annotated[float, "The time since the start of the daemon, in seconds."]
    loaded: Annotated[int, "How many tasks have been loaded since the start."] = 0
    to_load: Annotated[
        int | None, "How many tasks have to be loaded; None: it is not known yet."
    ] = None
    statuses: Annotated[
        Sequence[dict[str, Any]],
        "Over the HTTP of all shards: the status of each, with ``shard``, ``url`` and"
        " ``reachable``; of one that is away its ``state`` is unreachable, and ``error`` and"
        " ``message`` say why. The fields beside this list then describe all shards: ``state`` is"
        " the worst state, ``detail`` names its shard; sizes and loaded tasks are sums. The rest"
        " describes the worst shard that answers, ``shard``.",
    ] = ()
    http: Annotated[str | None, "The URL of its HTTP API."] = None
    pid: Annotated[int | None, "The number of its process on its machine."] = None
    memory_bytes: Annotated[
        int | None, "The memory that the process holds, in bytes; None: it is not known."
    ] = None
    disk_used: Annotated[
        float | None, "The used share of the disk with the database, 0 to 1; None: it is not known."
    ] = None
    disk_free_bytes: Annotated[
        int | None, "The free bytes of the disk with the database; None: they are not known."
    ] = None

    since = when("since_ms", "When its role began.")

    @property
    def serves(self) -> bool:
        """Whether tasks may be handed in and are delivered."""
        return self.role == "active" and self.state in ("ready", "loading", UNKNOWN)


class ConsumerInfo(Answer):
    """A subscription of somebody who is connected, or a pull that waits. ``host``, ``pid`` and
    ``version`` are what the client says of itself, None where it says nothing."""

    topic: Annotated[str, NAME, "The topic that it takes tasks from."]
    group: Annotated[str | None, NAME, "The group; None: it is a broadcast subscription."]
    kind: Annotated[str, "What it is: subscription or pull."]
    in_flight: Annotated[int, "How many deliveries it has not settled."]
    prefetch: Annotated[int, "The most deliveries that it has unsettled at a time."]
    since_ms: Annotated[int, Moment(), "When the connection came."]
    client: Annotated[str, "The name that the client gives itself."]
    address: Annotated[str, "The address that its connection comes from."]
    host: Annotated[str | None, "The name of its machine, as the client says."]
    pid: Annotated[int | None, "The number of its process, as the client says."]
    version: Annotated[str | None, "The version of its library, as the client says."]
    token: Annotated[str | None, "The name of the token that it has shown; None: it needed none."]

    since = when("since_ms", "When the connection came.")


class Consumers(Answer):
    """A page; it ends behind all of one connection, so it may be a little longer."""

    consumers: Annotated[list[ConsumerInfo], "The consumers of this page."]
    next: Annotated[int | None, "The ``after`` of the next page; None: this is the last one."]


class Backup(Answer):
    """A backup was written to this file, on the daemon's machine."""

    path: Annotated[str, "The path of the new file on the daemon's machine."]
    bytes: Annotated[int, "The size of the new file, in bytes."]


class RestoreProgress(Answer):
    """How far a restore is."""

    step: Annotated[str, f"{', '.join(RESTORE_STEPS)}."]
    done: Annotated[int, "How much of this step is done."]
    total: Annotated[int | None, "How much there is to do in this step; None: it is not known."]


class RestoreError(Answer):
    """The error says why a restore failed."""

    code: Annotated[str, "The code of the error."]
    message: Annotated[str, "The error in words."]


class RestoreState(Answer):
    """How far a restore is, or how it ended."""

    state: Annotated[
        str,
        Choice("str", "running", "done", "refused", "failed", "cancelled"),
        "Refused: nothing was written, because tasks have no body; ``report`` names them.",
    ]
    into: Annotated[str, "The name of the new file."]
    backup: Annotated[
        str | None, "The backup that it begins with; None: it restores from the history alone."
    ]
    ended_ms: Annotated[
        int | None, Moment(), "When it ended, in milliseconds since 1970; None: it still runs."
    ]
    progress: Annotated[RestoreProgress, "How far it is."]
    report: Annotated[dict[str, Any] | None, "As ``tickwheel restore --json`` has it."]
    error: Annotated[RestoreError | None, "Why it failed; None: it did not fail."]


class RestorePart(RestoreState):
    """The part of a restore that one of several shards does."""

    shard: Annotated[int, "The number of the shard."]


class Restore(RestoreState):
    """One restore, as the daemon remembers it; of several shards, made of what each of them does:
    ``state`` is ``running`` while one runs, and then the worst of all."""

    id: Annotated[int, ID, "The id of the restore."]
    dry_run: Annotated[bool, "Whether it only says what would be restored."]
    began_ms: Annotated[int, Moment(), "When it began, in milliseconds since 1970."]
    of_shards: Annotated[int, "How many shards restore under this id."] = 1
    shards: Annotated[
        tuple[RestorePart, ...], "What each of these does; empty: a daemon has answered for itself."
    ] = ()


class RestoreList(Answer):
    """All restores that are remembered, the newest first."""

    restores: Annotated[list[Restore], "The restores, the newest first."]


class Trouble(Answer):
    """Something that is wrong right now, in words."""

    level: Annotated[str, Choice("str", "error", "warning", "note"), "How bad it is."]
    text: Annotated[str, "The trouble, in a sentence."]
    about: Annotated[
        str,
        "The page of the console to look at: tasks, groups, dead, daemon, topics, transactions"
        " or targets.",
    ]
    topic: Annotated[
        str | None, "The topic that it is about; None: it is about no single topic."
    ] = None
    group: Annotated[
        str | None, "The group that it is about; None: it is about no single group."
    ] = None


class Ring(Answer):
    """How many tasks are due when the wheel comes to each cell: in this turn, and the next one."""

    slots: Annotated[int, "How many slots the wheel has."]
    tick_ms: Annotated[int, "The time that a slot stands for, in milliseconds."]
    slots_per_cell: Annotated[
        int, "How many slots each number of ``this`` and ``next`` stands for."
    ]
    slot: Annotated[int, "The slot that the wheel has come to."]
    this: Annotated[list[int], "How many tasks each cell has for this turn of the wheel."]
    next: Annotated[list[int], "How many tasks each cell has for the next turn of the wheel."]
    exact: Annotated[
        bool, "Whether all counts are exact; false: some of the next turn are estimates."
    ]
    later: Annotated[int, "How many tasks are due in later turns."]


class Overview(Answer):
    """The wheel, counts and what is wrong, at one moment."""

    node: Annotated[str, "The name of the daemon's node."]
    version: Annotated[str, "The daemon's version."]
    epoch: Annotated[int, "The number of the active daemon's term; it grows with each takeover."]
    state: Annotated[str, "The state of the daemon, as in its status."]
    detail: Annotated[str | None, "The state in more words; None: there is no more to say."]
    now_ms: Annotated[int, Moment(), "The daemon's clock, in milliseconds since 1970."]
    uptime_s: Annotated[float, "The time since the start of the daemon, in seconds."]
    ring: Annotated[Ring, "The wheel, cell by cell."]
    counts: Annotated[
        dict[str, int], "How many tasks are in each state now, by the name of the state."
    ]
    totals: Annotated[
        dict[str, int],
        "How often each thing has happened since the start of the daemon, by its name.",
    ]
    lateness: Annotated[
        dict[str, int],
        "Lateness of first deliveries since the start; ``recent_…``: of about the last minute.",
    ]
    troubles: Annotated[list[Trouble], "Present troubles, the worst first."]
    troubles_left_out: Annotated[int, "How many more troubles there are."]


class GroupLag(Answer):
    """A sample every ``every_ms`` of the last hour, the oldest first."""

    every_ms: Annotated[int, "The time between two samples, in milliseconds."]
    taken_ms: Annotated[list[int], "When each sample was taken, in milliseconds since 1970."]
    ready: Annotated[
        list[int | None],
        "How many tasks were due and not delivered at each sample; null: it is not known.",
    ]
    oldest_ready_ms: Annotated[
        list[int | None],
        "How long the oldest of these had waited at each sample, in milliseconds; null: it is"
        " not known.",
    ]


class TaskHistory(Answer):
    """Events as docs/history.md lists them, in the order of their happening."""

    events: Annotated[list[dict[str, Any]], "The events of the task."]
    is_kept: Annotated[bool, "Whether the daemon keeps a history at all."]
    complete: Annotated[bool, "Whether these are all; false: there was too much to look through."]


class TaskOutline(ListedOptions, Answer):
    """A task as the history has it: what it was, and what became of it."""

    id: Annotated[int, ID, "The id of the task."]
    state: Annotated[str, "How the task ended (acked, cancelled, …), or dead, or unfinished."]
    enqueued_ms: Annotated[
        int | None,
        Moment(),
        "When the task was enqueued, in milliseconds since 1970; None: the history does not know.",
    ]
    due_ms: Annotated[
        int | None,
        Moment(),
        "When the task was due, in milliseconds since 1970; None: the history does not know.",
    ]
    ended_ms: Annotated[
        int | None,
        Moment(),
        "When the task ended, in milliseconds since 1970; None: it has not ended, or the history"
        " does not know.",
    ]
    attempts: Annotated[int, "How often the task was delivered."]
    topic: Annotated[str | None, NAME, "The topic of the task."] = None
    schedule: Annotated[str | None, "The schedule that made the task; None: no schedule did."] = (
        None
    )
    reason: Annotated[str | None, "The reason of the last failure; None: there was none."] = None
    body: Annotated[
        bytes | None, BODY, "The body, where the history keeps bodies (``history_bodies``)."
    ] = None


class FoundTasks(Answer):
    """The tasks that were found in the history, the newest first."""

    tasks: Annotated[list[TaskOutline], "The tasks that were found."]
    is_kept: Annotated[bool, "Whether the daemon keeps a history at all."]
    complete: Annotated[
        bool, "Whether these are all; false: there are more, or there was too much to look through."
    ]


_ANY, _FOUND = Need(Right.READ, Of.ANY), Need(Right.READ, Of.FOUND)
_NAMED, _ADMIN = Need(Right.READ, Of.NAMED), Need(Right.ADMIN, Of.ANY)
_DAEMON, _CONSOLE, _TOPICS, _UNKNOWN = "daemon", "console", "topics", ("not_found",)
BACKUP_S: Final = 600.0
"""How much longer than other answers that of a backup may take, in seconds."""
RESTORE_STOP_S: Final = 10.0
"""A restore that shall stop is killed after this many seconds."""

VERBS: Final = (
    Verb("ping", Nothing, None, None, "Is the daemon there", frame=FrameType.PING, standby=True,
         over=Over.ONE),
    Verb("status", Nothing, Status, None, "Role, state, store",
         "How the daemon is: its role and state, and since when. For one that is not active see"
         " ``status_at``.",
         FrameType.STATUS, path="GET /v1/status", tag=_DAEMON, standby=True,
         methods=(Method("status"),), over=Over.ONE),
    Verb("stats", Nothing, Stats, _FOUND, "Counts", "The daemon's counts at this moment.",
         FrameType.STATS, path="GET /v1/stats", tag=_DAEMON, methods=(Method("stats"),),
         over=Over.ALL),
    Verb("load", LoadSpans, Load, _ANY, "How many tasks are due when",
         "How many tasks the wheel has for each of ``steps`` spans of ``step``, from ``since`` on,"
         " which is rounded down to a whole ``step``. Raises BadRequest.",
         FrameType.LOAD, path="GET /v1/load", tag=_DAEMON, methods=(Method("load"),),
         over=Over.ALL),
    Verb("list_topics", NamesPage, TopicList, _FOUND, "List topics with their counts",
         frame=FrameType.TOPIC_LIST, path="GET /v1/topics", tag=_TOPICS, prompt=False,
         pages="topics", over=Over.PAGES),
    Verb("show_topic", OfTopic, TopicStats, _NAMED, "One topic",
         frame=FrameType.TOPIC_SHOW, path="GET /v1/topics/{topic}", tag=_TOPICS, errors=_UNKNOWN,
         over=Over.ALL),
    Verb("consumers", ConsumersPage, Consumers, _FOUND, "Who is connected and takes tasks",
         "Who is connected and takes tasks: each subscription, and each pull that waits, in the"
         " order in which their connections came; of a topic, of a group.",
         FrameType.CONSUMER_LIST, path="GET /v1/consumers", tag=_CONSOLE, prompt=False,
         pages="consumers", methods=(Method("list_consumers"),), over=Over.PAGES),
    Verb("overview", Nothing, Overview, _ANY, "The wheel, counts and what is wrong right now",
         "The wheel, counts, and what is wrong right now in words (``troubles``), the worst first.",
         frame=FrameType.OVERVIEW, path="GET /v1/overview", tag=_CONSOLE, prompt=False,
         methods=(Method("overview"),), over=Over.ALL),
    Verb("group_lag", OfGroup, GroupLag, _NAMED, "How far a group was behind in the last hour",
         frame=FrameType.GROUP_LAG, path="GET /v1/topics/{topic}/groups/{group}/lag", tag=_CONSOLE,
         errors=_UNKNOWN, over=Over.ALL),
    Verb("task_history", OfTask, TaskHistory, _FOUND, "What the history has of a task",
         "The events of a task in their order, as the history has them, a moment late.",
         frame=FrameType.TASK_HISTORY, path="GET /v1/tasks/{id}/history", tag=_CONSOLE,
         prompt=False, methods=(Method("task_history"),), over=Over.ALL),
    Verb("history_tasks", HistoryPage, FoundTasks, _FOUND,
         "Tasks of the history by key, topic and time, finished ones too",
         frame=FrameType.HISTORY_LIST, path="GET /v1/history/tasks", tag=_CONSOLE, prompt=False,
         over=Over.ALL),
    Verb("report", Nothing, None, _ANY, "The page of the last report"),
    Verb("backup", BackupName, Backup, _ADMIN, "Copy the store to a new file",
         "Copy the store to a new file ``name`` in the daemon's backup folder, while it works.",
         FrameType.BACKUP, path="POST /v1/backups", tag=_DAEMON, status=201,
         errors=("conflict",), audit=Audit.ALWAYS, prompt=False, repeat=False, extra_s=BACKUP_S,
         methods=(Method("backup"),), over=Over.TURN, unique=Unique("name", Home.FIRST)),
    Verb("restore", NewRestore, Restore, _ADMIN,
         "Restore a backup and the history since into a new file", frame=FrameType.RESTORE,
         path="POST /v1/restores", tag=_DAEMON, status=202, errors=("not_found", "conflict"),
         audit=Audit.ALWAYS, prompt=False, repeat=False, over=Over.TOGETHER,
         unique=Unique("id", Home.ALL)),
    Verb("list_restores", Nothing, RestoreList, _ANY, "The newest restores",
         frame=FrameType.RESTORE_LIST, path="GET /v1/restores", tag=_DAEMON, over=Over.ALL),
    Verb("show_restore", RestoreId, Restore, _ANY, "How far a restore is",
         frame=FrameType.RESTORE_SHOW, path="GET /v1/restores/{id}", tag=_DAEMON, errors=_UNKNOWN,
         over=Over.ALL),
    Verb("cancel_restore", RestoreId, Restore, _ADMIN, "Cancel a restore: nothing of it stays",
         frame=FrameType.RESTORE_CANCEL, path="DELETE /v1/restores/{id}", tag=_DAEMON,
         errors=_UNKNOWN, audit=Audit.ALWAYS, prompt=False, extra_s=RESTORE_STOP_S,
         over=Over.ALL),
)  # fmt: skip
