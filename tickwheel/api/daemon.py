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

    from_ms: Annotated[int | None, Moment(), "The first moment; default: now."] = called("since")
    step_ms: Annotated[int | None, Span(1), "How long a span is; default: a minute."] = None
    steps: Annotated[int | None, Whole(1, LOAD_STEPS_MAX), "How many spans; default 60."] = None


class ConsumersPage(Request):
    """The request asks for those who take tasks of a topic, or of a group."""

    topic: Annotated[str | None, NAME, "Of this topic."] = None
    group: Annotated[str | None, NAME, "Of this group."] = None
    after: Annotated[int, Whole(0, ID_MAX), "``next`` of the page before."] = 0
    limit: Annotated[int, PAGE, "How many at most; a page ends behind all of one connection."] = 100


class OfTask(Request):
    """The request names a task by its id."""

    id: Annotated[int, ID, "Its id."]


class HistoryPage(Request):
    """The request asks for tasks of the history; the times are those of their enqueues."""

    key: Annotated[str | None, KEY, "With this key."] = None
    topic: Annotated[str | None, NAME, "Of this topic."] = None
    since_ms: Annotated[int | None, Moment(), "Then or later."] = None
    until_ms: Annotated[int | None, Moment(), "Then or earlier."] = None
    limit: Annotated[int, PAGE, "How many at most."] = 100


class BackupName(Request):
    """The request names the new file, without a folder."""

    name: Annotated[str, FILE_NAME, "The name of a new file in the folder for backups."]


class NewRestore(Request):
    """The request names files in the folder for backups; without ``ids`` it means all tasks."""

    into: Annotated[str, FILE_NAME, "A new SQLite file."]
    backup: Annotated[str | None, FILE_NAME, "The backup to begin with."] = None
    history: Annotated[
        bool, FLAG, "What happened since the backup, too, where the daemon keeps a history."
    ] = True
    ids: Annotated[Any, IDS, "These tasks alone."] = None
    include_overdue: Annotated[bool, FLAG, "Also tasks that are due already."] = True
    allow_missing_bodies: Annotated[bool, FLAG, "Though tasks have no body."] = False
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

    id: Annotated[int, ID, "Its id."]


# --- answers -------------------------------------------------------------------------------------


class Counted(Answer):
    """Topics and groups have these counts and settings in common."""

    ready: int
    in_flight: int
    waiting: int
    dead: int
    delivered: int
    acked: int
    oldest_ready_ms: Annotated[
        int, "For how long the oldest of the ready ones has been; 0: there is none."
    ] = 0
    paused: bool = False
    rate: float | None = None
    burst: int | None = None
    retry: Annotated[Retry | None, POLICY] = None


class GroupStats(Counted):
    """A group has these counts and settings."""

    retrying: Annotated[int, "Those that wait for their next attempt."] = 0
    held: Annotated[int | None, "Order keys that wait for an operator."] = None
    paused_keys: Annotated[int | None, "Keys that operators have paused."] = None
    in_lines: Annotated[int | None, "Tasks that wait for their turn."] = None
    subscribers: int
    nacked: int = 0
    snoozed: int = 0
    deaths: int = 0
    expired: int = 0
    filtered: Annotated[int, "Tasks that its filter left out."] = 0
    since_ms: Annotated[
        int,
        Moment(),
        "It is owed what is due from then on, and what was enqueued since it was made; 0: all that"
        " is there.",
    ] = 0
    unused_ms: Annotated[
        int | None,
        "For how long nobody has used it, once that is so long that the daemon says so.",
    ] = None
    replay: Annotated[
        Replay | None,
        "It begins in the past: how much of what was there before it has been looked at; None: all"
        " of it.",
    ] = None
    tags: str | None = None
    where: str | None = None
    order_retry_ms: int | None = None
    order_attempts: int | None = None
    order_failure: str | None = None
    fair_by: str | None = None
    limit_each: int | None = None
    rate_each: float | None = None


class TopicStats(Counted):
    """A topic has these counts and settings, and its groups."""

    topic: Annotated[str | None, NAME] = None
    pending: int
    enqueued: int
    cancelled: int = 0
    broadcasters: Annotated[int, "Subscribers that get everything while they are connected."] = 0
    groups: Mapping[str, GroupStats]
    deleting: bool | None = None
    broadcast_only: bool | None = None
    if_pending: Annotated[IfPending | None, RULE] = None


class TopicList(Answer):
    """A page of topics, by name."""

    topics: list[TopicStats]
    next: Annotated[str | None, NAME]


class Stats(Answer):
    """The daemon's counts at one moment; totals are since its start."""

    node: str = ""
    version: str = ""
    epoch: int = 0
    now_ms: Annotated[int, Moment()] = 0
    uptime_s: float = 0.0
    slots: int = 0
    tick_ms: int = 0
    slot: Annotated[int, "Where the wheel is."] = 0
    position_ms: Annotated[int, Moment()] = 0
    pending: int
    ready: int
    in_flight: int
    waiting: int
    dead: int
    enqueued: int
    delivered: int
    acked: int
    dead_total: Annotated[int, "That ever became dead letters."] = 0
    dead_expired: Annotated[int, "Dead letters that were kept for as long as they are kept."] = 0
    dropped_once: Annotated[
        int, "Deliveries of at-most-once subscriptions that had their end and were not sent."
    ] = 0
    store_ok: bool = True
    lateness: Annotated[
        dict[str, Any] | None, "Of all topics; None: the caller may not read all."
    ] = None
    topics: Mapping[str, TopicStats]
    topics_left_out: Annotated[int, "Topics for which there was no room in the answer."] = 0
    partial: Annotated[bool, "The counts are of the topics that the caller may read."] = False


class Load(Answer):
    """How many tasks are due in each span of time, as they stand on the wheel."""

    from_ms: Annotated[int, Moment()]
    step_ms: int
    counts: tuple[int, ...]
    exact: Annotated[bool, "False: what is far away and very much was estimated from a part of it."]
    scheduled: Annotated[int, "All that is on the wheel."]


class Active(Answer):
    """The active daemon, as another one knows it."""

    node: str
    address: str
    epoch: Annotated[int | None, "None while it takes over."]
    since_ms: Annotated[int, Moment()]


class Status(Answer):
    """A daemon at one moment, by its own clock."""

    node: str
    version: str
    role: Annotated[str, '"active", "standby" or "starting".']
    state: Annotated[
        str,
        '"ready", "loading", "recovering", "standby", "store_trouble", "store_full", "draining",'
        ' "clock_held"; "unknown": it is too old to say.',
    ]
    detail: Annotated[str | None, "More about the state, for people."] = None
    epoch: int
    address: Annotated[str | None, "Where others find it, as it says."]
    since_ms: Annotated[int, Moment(), "When its role began."] = 0
    active: Annotated[
        Active | None,
        "The active daemon, if it knows one; on the active one itself that one, or None.",
    ] = None
    standbys: Annotated[Sequence[dict[str, Any]], "Those who stand by, as it knows them."] = ()
    shard: Annotated[int, "Which one of ``shards`` it is."] = 0
    shards: Annotated[
        Sequence[str], "The addresses of all shards, in their order; empty: there is one."
    ] = ()
    store: str = ""
    store_at: Annotated[
        str | None, "The server that has the store now, HOST:PORT; None: it has none, or unknown."
    ] = None
    store_ok: bool
    durability: Annotated[
        str | None,
        "What a confirmed task survives there, for people; None: it has no store open.",
    ] = None
    mirror: Annotated[
        bool | None,
        "Whether the active daemon keeps all records in memory, and writes them again to a Redis"
        " that lost them; None: its store is not Redis.",
    ] = None
    now_ms: Annotated[int, Moment()]
    uptime_s: float
    loaded: Annotated[int, "Tasks in memory again after a start."] = 0
    to_load: Annotated[int | None, "How many there are; None: that is not known yet."] = None
    statuses: Annotated[
        Sequence[dict[str, Any]],
        "Over the HTTP of all shards: the status of each, with ``shard``, ``url`` and"
        " ``reachable``; of one that is away its ``state`` is unreachable, and ``error`` and"
        " ``message`` say why. What stands beside this list is of all then: ``state`` is the worst"
        " of them, ``detail`` says of which; sizes, and tasks that are loaded, are added. The rest"
        " is of the worst shard that answers, ``shard``.",
    ] = ()
    http: Annotated[str | None, "The URL of its HTTP API."] = None
    pid: Annotated[int | None, "Its process, on its machine."] = None
    memory_bytes: int | None = None
    disk_used: float | None = None
    disk_free_bytes: int | None = None

    since = when("since_ms", "When its role began.")

    @property
    def serves(self) -> bool:
        """Whether tasks may be handed in and are delivered."""
        return self.role == "active" and self.state in ("ready", "loading", UNKNOWN)


class ConsumerInfo(Answer):
    """A subscription of somebody who is connected, or a pull that waits. ``host``, ``pid`` and
    ``version`` are what the client says of itself, None where it says nothing."""

    topic: Annotated[str, NAME]
    group: Annotated[str | None, NAME, "None: a broadcast subscription."]
    kind: Annotated[str, "subscription, pull."]
    in_flight: int
    prefetch: int
    since_ms: Annotated[int, Moment(), "When the connection came."]
    client: Annotated[str, "As the client calls itself."]
    address: str
    host: str | None
    pid: int | None
    version: str | None
    token: str | None

    since = when("since_ms", "When the connection came.")


class Consumers(Answer):
    """A page; it ends behind all of one connection, so it may be a little longer."""

    consumers: list[ConsumerInfo]
    next: int | None


class Backup(Answer):
    """A backup was written to this file, on the daemon's machine."""

    path: str
    bytes: int


class RestoreProgress(Answer):
    """How far a restore is."""

    step: Annotated[str, f"{', '.join(RESTORE_STEPS)}."]
    done: int
    total: int | None


class RestoreError(Answer):
    """The error says why a restore failed."""

    code: str
    message: str


class RestoreState(Answer):
    """How far a restore is, or how it ended."""

    state: Annotated[
        str,
        Choice("str", "running", "done", "refused", "failed", "cancelled"),
        "Refused: nothing was written, because tasks have no body; ``report`` names them.",
    ]
    into: str
    backup: str | None
    ended_ms: Annotated[int | None, Moment()]
    progress: RestoreProgress
    report: Annotated[dict[str, Any] | None, "As ``tickwheel restore --json`` has it."]
    error: RestoreError | None


class RestorePart(RestoreState):
    """The part of a restore that one of several shards does."""

    shard: int


class Restore(RestoreState):
    """One restore, as the daemon remembers it; of several shards, made of what each of them does:
    ``state`` is ``running`` while one runs, and then the worst of all."""

    id: Annotated[int, ID]
    dry_run: bool
    began_ms: Annotated[int, Moment()]
    of_shards: Annotated[int, "How many shards restore under this id."] = 1
    shards: Annotated[
        tuple[RestorePart, ...], "What each of these does; empty: a daemon has answered for itself."
    ] = ()


class RestoreList(Answer):
    """All restores that are remembered, the newest first."""

    restores: list[Restore]


class Trouble(Answer):
    """Something that is wrong right now, in words."""

    level: Annotated[str, Choice("str", "error", "warning", "note")]
    text: str
    about: Annotated[
        str, "Where to look: tasks, groups, dead, daemon, topics, transactions, targets."
    ]
    topic: str | None = None
    group: str | None = None


class Ring(Answer):
    """How many tasks are due when the wheel comes to each cell: in this turn, and the next one."""

    slots: int
    tick_ms: int
    slots_per_cell: int
    slot: Annotated[int, "Where the wheel is."]
    this: list[int]
    next: list[int]
    exact: Annotated[bool, "False: estimates are among those of the next turn."]
    later: Annotated[int, "Due in a later turn than these."]


class Overview(Answer):
    """The wheel, counts and what is wrong, at one moment."""

    node: str
    version: str
    epoch: int
    state: str
    detail: str | None
    now_ms: Annotated[int, Moment()]
    uptime_s: float
    ring: Ring
    counts: dict[str, int]
    totals: dict[str, int]
    lateness: Annotated[
        dict[str, int],
        "Of first deliveries: since the start; ``recent_…``: in about the last minute.",
    ]
    troubles: list[Trouble]
    troubles_left_out: int


class GroupLag(Answer):
    """A sample every ``every_ms`` of the last hour, the oldest first."""

    every_ms: int
    taken_ms: list[int]
    ready: Annotated[list[int | None], "Due and waiting for a subscriber; null: not known."]
    oldest_ready_ms: Annotated[list[int | None], "For how long the oldest of them had waited."]


class TaskHistory(Answer):
    """Events as docs/history.md lists them, in the order of their happening."""

    events: list[dict[str, Any]]
    is_kept: Annotated[bool, "Whether the daemon keeps a history at all."]
    complete: Annotated[bool, "False: there was too much to look through."]


class TaskOutline(ListedOptions, Answer):
    """A task as the history has it: what it was, and what became of it."""

    id: Annotated[int, ID]
    state: Annotated[str, "Its end (acked, cancelled, …), dead, or unfinished."]
    enqueued_ms: Annotated[int | None, Moment()]
    due_ms: Annotated[int | None, Moment()]
    ended_ms: Annotated[int | None, Moment()]
    attempts: int
    topic: Annotated[str | None, NAME] = None
    schedule: str | None = None
    reason: str | None = None
    body: Annotated[bytes | None, BODY, "Where the history keeps bodies (``history_bodies``)."] = (
        None
    )


class FoundTasks(Answer):
    """The tasks that were found in the history, the newest first."""

    tasks: list[TaskOutline]
    is_kept: Annotated[bool, "Whether the daemon keeps a history at all."]
    complete: Annotated[bool, "False: there are more, or there was too much to look through."]


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
