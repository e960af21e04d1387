"""Verbs on the daemon itself: counts, load, status, topics, consumers, history, backups,
restores."""

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
from tickwheel.api.verb import Audit, Home, Method, Need, Of, Right, Routing, Unique, Verb
from tickwheel.limits import ID_MAX, SHARDS_MAX

LOAD_STEPS_MAX: Final = 1_440
"""Maximum number of spans in one answer of ``load``: a day of minutes."""
FILE_NAME: Final = Text()
UNKNOWN: Final = "unknown"
"""The state of a daemon that is too old to report its state."""
UNREACHABLE: Final = "unreachable"
"""The state of a shard that does not answer a request to all shards."""
RESTORE_STEPS: Final = ("backup", "events", "tasks", "writing")
"""The steps of a restore, in order."""

# --- requests ------------------------------------------------------------------------------------


class Nothing(Request):
    """A request without fields."""


class LoadSpans(Request):
    """The request asks for ``steps`` spans of ``step_ms`` from ``from_ms`` on. The daemon also
    checks bounds that depend on its tick."""

    from_ms: Annotated[int | None, Moment(), "The start of the first span; by default now."] = (
        called("since")
    )
    step_ms: Annotated[int | None, Span(1), "The length of a span; by default a minute."] = None
    steps: Annotated[
        int | None, Whole(1, LOAD_STEPS_MAX), "The number of spans; by default 60."
    ] = None


class ConsumersPage(Request):
    """The request asks for consumers, optionally only of a topic or a group."""

    topic: Annotated[str | None, NAME, "Only consumers of this topic."] = None
    group: Annotated[str | None, NAME, "Only consumers of this group."] = None
    after: Annotated[int, Whole(0, ID_MAX), "``next`` from the previous page."] = 0
    limit: Annotated[
        int,
        PAGE,
        "Maximum number of items in the answer; a page can exceed it to include all consumers of a"
        " connection.",
    ] = 100


class OfTask(Request):
    """The request names a task by its id."""

    id: Annotated[int, ID, "The id of the task."]


class HistoryPage(Request):
    """The request asks for tasks of the history, by the times of their enqueues."""

    key: Annotated[str | None, KEY, "Only tasks with this key."] = None
    topic: Annotated[str | None, NAME, "Only tasks of this topic."] = None
    since_ms: Annotated[
        int | None, Moment(), "Only tasks that were enqueued at this moment or later."
    ] = None
    until_ms: Annotated[
        int | None, Moment(), "Only tasks that were enqueued at this moment or earlier."
    ] = None
    limit: Annotated[int, PAGE, "Maximum number of items in the answer."] = 100


class BackupName(Request):
    """The request names the new file, without a folder."""

    name: Annotated[str, FILE_NAME, "The name of a new file in the folder for backups."]


class NewRestore(Request):
    """The request names files in the folder for backups, and the tasks to restore."""

    into: Annotated[str, FILE_NAME, "The name of the new SQLite file."]
    backup: Annotated[str | None, FILE_NAME, "The backup to start from."] = None
    history: Annotated[
        bool, FLAG, "Also apply the history since the backup, if the daemon keeps one."
    ] = True
    ids: Annotated[Any, IDS, "The ids of the tasks to restore; by default all tasks."] = None
    include_overdue: Annotated[bool, FLAG, "Also restore tasks that are already due."] = True
    allow_missing_bodies: Annotated[
        bool, FLAG, "Restore even if the bodies of some tasks are missing."
    ] = False
    dry_run: Annotated[bool, FLAG, "Only report what would be restored."] = False
    id: Annotated[
        int | None, ID, "An unused id for the restore; by default the daemon chooses one."
    ] = None
    of_shards: Annotated[
        int,
        Whole(1, SHARDS_MAX),
        "How many shards restore under this id, each into its own file. Clients of several shards"
        " set it.",
    ] = 1


class RestoreId(Request):
    """The request names a restore by its id."""

    id: Annotated[int, ID, "The id of the restore."]


# --- answers -------------------------------------------------------------------------------------


class Counted(Answer):
    """Counts and settings that topics and groups have in common."""

    ready: Annotated[int, "Number of (task, group) pairs that are due and not delivered."]
    in_flight: Annotated[int, "Number of (task, group) pairs that are delivered and not settled."]
    waiting: Annotated[int, "Number of (task, group) pairs that wait for a retry."]
    dead: Annotated[int, "Number of dead letters."]
    delivered: Annotated[int, "Number of deliveries since the daemon started."]
    acked: Annotated[int, "Number of acked deliveries since the daemon started."]
    oldest_ready_ms: Annotated[
        int, "How long the oldest ready task has waited, in milliseconds; 0 if none is ready."
    ] = 0
    paused: Annotated[bool, "Whether deliveries are paused until somebody resumes them."] = False
    paused_ms: Annotated[int | None, Moment(), "When it was paused; None if it is not paused."] = (
        None
    )
    rate: Annotated[float | None, "Maximum deliveries per second; None means unlimited."] = None
    burst: Annotated[
        int | None, "Maximum burst of deliveries after an idle time; None without a rate."
    ] = None
    retry: Annotated[
        Retry | None,
        POLICY,
        "The retry policy set here; None means that the next higher level decides.",
    ] = None


class GroupStats(Counted):
    """Counts and settings of a group."""

    retrying: Annotated[int, "Number of tasks that wait for a retry; the same as waiting."] = 0
    held: Annotated[int | None, "Number of order keys that wait for an operator."] = None
    paused_keys: Annotated[int | None, "Number of keys that operators have paused."] = None
    in_lines: Annotated[int | None, "Number of tasks that wait for their turn."] = None
    subscribers: Annotated[int, "Number of its subscriptions and waiting pulls."]
    nacked: Annotated[int, "Number of nacked deliveries since the daemon started."] = 0
    snoozed: Annotated[int, "Number of snoozed deliveries since the daemon started."] = 0
    deaths: Annotated[
        int, "How many consumers died while they held a delivery, since the daemon started."
    ] = 0
    expired: Annotated[
        int, "How many tasks expired before they were delivered, since the daemon started."
    ] = 0
    filtered: Annotated[int, "How many tasks its filter excluded, since the daemon started."] = 0
    since_ms: Annotated[
        int,
        Moment(),
        "The group gets tasks due from this moment on, and tasks enqueued since it was created;"
        " 0 means all stored tasks.",
    ] = 0
    unused_ms: Annotated[
        int | None,
        "How long the group has been unused, in milliseconds; None if it was used recently.",
    ] = None
    replay: Annotated[
        Replay | None,
        "Progress of the search for tasks from before the group was created; None if it is done or"
        " not needed.",
    ] = None
    tags: Annotated[str | None, "The tags of its filter; None means any tag."] = None
    where: Annotated[str | None, "The condition of its filter; None without a condition."] = None
    order_retry_ms: Annotated[
        int | None,
        "The delay before a failed task of an order key is tried again, in milliseconds.",
    ] = None
    order_attempts: Annotated[
        int | None,
        "Number of failed attempts of a task of an order key until order_failure applies.",
    ] = None
    order_failure: Annotated[
        str | None, 'The action after order_attempts: "hold", "dead" or "retry".'
    ] = None
    fair_by: Annotated[
        str | None, 'The field whose values take turns: "key", "tag", or the name of a property.'
    ] = None
    limit_each: Annotated[int | None, "Maximum deliveries in flight per value of fair_by."] = None
    rate_each: Annotated[float | None, "Maximum deliveries per second per value of fair_by."] = None


class TopicStats(Counted):
    """Counts, settings and groups of a topic."""

    topic: Annotated[str | None, NAME, "The name of the topic, in a list of topics."] = None
    scheduled: Annotated[int, "Number of scheduled tasks."]
    enqueued: Annotated[int, "Number of tasks enqueued since the daemon started."]
    cancelled: Annotated[int, "Number of tasks cancelled since the daemon started."] = 0
    broadcasters: Annotated[int, "Number of broadcast subscriptions."] = 0
    groups: Annotated[Mapping[str, GroupStats], "The groups of the topic, by name."]
    deleting: Annotated[bool | None, "Whether the topic is being deleted."] = None
    broadcast_only: Annotated[
        bool | None, "Whether the topic has no groups and its due tasks are broadcast and end."
    ] = None
    if_pending: Annotated[
        IfPending | None,
        RULE,
        "The rule for tasks of the topic whose key is pending and that have no rule of their own.",
    ] = None


class TopicList(Answer):
    """A page of topics, by name."""

    topics: Annotated[list[TopicStats], "The topics of this page."]
    next: Annotated[str | None, NAME, "``after`` for the next page; None on the last page."]


class Stats(Answer):
    """The daemon's counts at one moment; totals count from its start."""

    node: Annotated[str, "The name of the daemon's node."] = ""
    version: Annotated[str, "The daemon's version."] = ""
    epoch: Annotated[int, "The number of the daemon's tenure; it grows with each takeover."] = 0
    now_ms: Annotated[int, Moment(), "The daemon's clock, in milliseconds since 1970."] = 0
    uptime_s: Annotated[float, "The time since the daemon started, in seconds."] = 0.0
    slots: Annotated[int, "Number of slots of the wheel."] = 0
    tick_ms: Annotated[int, "The length of a slot, in milliseconds."] = 0
    slot: Annotated[int, "The wheel's current slot."] = 0
    position_ms: Annotated[
        int, Moment(), "The moment that the wheel has reached, in milliseconds since 1970."
    ] = 0
    scheduled: Annotated[int, "Number of scheduled tasks."]
    ready: Annotated[int, "Number of (task, group) pairs that are due and not delivered."]
    in_flight: Annotated[int, "Number of (task, group) pairs that are delivered and not settled."]
    waiting: Annotated[int, "Number of (task, group) pairs that wait for a retry."]
    dead: Annotated[int, "Number of dead letters."]
    enqueued: Annotated[int, "Number of tasks enqueued since the daemon started."]
    delivered: Annotated[int, "Number of deliveries since the daemon started."]
    acked: Annotated[int, "Number of acked deliveries since the daemon started."]
    dead_total: Annotated[int, "How many tasks became dead letters since the daemon started."] = 0
    dead_expired: Annotated[int, "How many dead letters were deleted because of their age."] = 0
    dropped_once: Annotated[
        int, "At-most-once deliveries that were settled but could not be sent."
    ] = 0
    store_ok: Annotated[bool, "Whether the store accepts writes."] = True
    lateness: Annotated[
        dict[str, Any] | None,
        "Lateness of first deliveries of all topics; None if the caller may not read all topics.",
    ] = None
    topics: Annotated[Mapping[str, TopicStats], "The topics, by name."]
    topics_left_out: Annotated[int, "How many topics did not fit into the answer."] = 0
    partial: Annotated[bool, "Whether the counts include only topics that the caller may read."] = (
        False
    )


class Load(Answer):
    """How many tasks on the wheel are due in each span of time."""

    from_ms: Annotated[int, Moment(), "The start of the first span, in milliseconds since 1970."]
    step_ms: Annotated[int, "The length of a span, in milliseconds."]
    counts: Annotated[
        tuple[int, ...], "How many tasks are due in each span, in the order of the spans."
    ]
    exact: Annotated[
        bool, "Whether all counts are exact; false if counts of later spans are estimates."
    ]
    scheduled: Annotated[int, "Number of tasks on the wheel."]


class Active(Answer):
    """The active daemon, as another daemon knows it."""

    node: Annotated[str, "The name of its node."]
    address: Annotated[str, "The address at which clients reach it."]
    epoch: Annotated[int | None, "The number of its tenure; None while it takes over."]
    since_ms: Annotated[int, Moment(), "When it became active, in milliseconds since 1970."]


class Status(Answer):
    """The state of a daemon at one moment, by its own clock."""

    node: Annotated[str, "The name of the daemon's node."]
    version: Annotated[str, "The daemon's version."]
    role: Annotated[str, '"active", "standby" or "starting".']
    state: Annotated[
        str,
        '"ready", "loading", "recovering", "standby", "store_trouble", "store_full", "draining",'
        ' "clock_held"; "unknown" if the daemon is too old to report it.',
    ]
    detail: Annotated[str | None, "Details of the state, for people."] = None
    epoch: Annotated[int, "The number of the active daemon's tenure; it grows with each takeover."]
    address: Annotated[
        str | None, "The address that it announces to others; None if it announces none."
    ]
    since_ms: Annotated[int, Moment(), "When its role began."] = 0
    active: Annotated[
        Active | None,
        "The active daemon, if it is known. The active daemon answers with itself or None.",
    ] = None
    standbys: Annotated[Sequence[dict[str, Any]], "The standby daemons that it knows."] = ()
    shard: Annotated[int, "The number of the shard: its index in ``shards``."] = 0
    shards: Annotated[
        Sequence[str], "The addresses of all shards, in order; empty if there is only one."
    ] = ()
    store: Annotated[str, "The URL of the store, without secrets."] = ""
    store_at: Annotated[
        str | None, "The server that currently has the store, HOST:PORT; None if not applicable."
    ] = None
    store_ok: Annotated[bool, "Whether the store accepts writes."]
    durability: Annotated[
        str | None,
        "The failures that a confirmed task survives, for people; None if no store is open.",
    ] = None
    mirror: Annotated[
        bool | None,
        "Whether the active daemon keeps all records in memory, and writes them again if Redis"
        " loses them; None if its store is not Redis.",
    ] = None
    now_ms: Annotated[int, Moment(), "The daemon's clock, in milliseconds since 1970."]
    uptime_s: Annotated[float, "The time since the daemon started, in seconds."]
    loaded: Annotated[int, "How many tasks have been loaded since the start."] = 0
    to_load: Annotated[
        int | None, "How many tasks have to be loaded; None while that is unknown."
    ] = None
    statuses: Annotated[
        Sequence[dict[str, Any]],
        "From the HTTP API of all shards: the status of each shard, with ``shard``, ``url`` and"
        " ``reachable``. If a shard is unreachable, its ``state`` is ``unreachable``, and ``error``"
        " and ``message`` give the reason. Outside this list, ``state`` is then the worst state,"
        " ``detail`` names each shard that is not ready, and ``loaded`` and ``memory_bytes`` are"
        " sums. Most other fields describe the worst shard that answers, ``shard``.",
    ] = ()
    http: Annotated[str | None, "The URL of its HTTP API."] = None
    pid: Annotated[int | None, "Its process id."] = None
    memory_bytes: Annotated[
        int | None, "The memory of the process, in bytes; None if it is unknown."
    ] = None
    disk_used: Annotated[
        float | None, "The used share of the database's disk, 0 to 1; None if it is unknown."
    ] = None
    disk_free_bytes: Annotated[
        int | None, "The free bytes of the database's disk; None if they are unknown."
    ] = None

    since = when("since_ms", "When its role began.")

    @property
    def serves(self) -> bool:
        """Whether the daemon accepts and delivers tasks."""
        return self.role == "active" and self.state in ("ready", "loading", UNKNOWN)


class ConsumerInfo(Answer):
    """A subscription of a connected client, or a waiting pull. The client reports ``host``, ``pid``
    and ``version``; they are None if it does not."""

    topic: Annotated[str, NAME, "The topic from which it takes tasks."]
    group: Annotated[str | None, NAME, "The group; None for a broadcast subscription."]
    kind: Annotated[str, "subscription or pull."]
    in_flight: Annotated[int, "Number of deliveries that it has not settled."]
    prefetch: Annotated[int, "Maximum number of unsettled deliveries."]
    since_ms: Annotated[int, Moment(), "When the client connected."]
    client: Annotated[str, "The name that the client gives itself."]
    address: Annotated[str, "The remote address of the connection."]
    host: Annotated[str | None, "The name of the client's machine, reported by the client."]
    pid: Annotated[int | None, "The client's process id, reported by the client."]
    version: Annotated[str | None, "The version of the client's library, reported by the client."]
    token: Annotated[str | None, "The name of the client's token; None if no login was needed."]

    since = when("since_ms", "When the client connected.")


class Consumers(Answer):
    """A page of consumers; it can exceed the limit to include all consumers of a connection."""

    consumers: Annotated[list[ConsumerInfo], "The consumers of this page."]
    next: Annotated[int | None, "``after`` for the next page; None on the last page."]


class Backup(Answer):
    """The file with the backup, on the daemon's machine."""

    path: Annotated[str, "The path of the new file on the daemon's machine."]
    bytes: Annotated[int, "The size of the new file, in bytes."]


class RestoreProgress(Answer):
    """The progress of a restore."""

    step: Annotated[str, f"{', '.join(RESTORE_STEPS)}."]
    done: Annotated[int, "How many items of this step are done."]
    total: Annotated[int | None, "How many items this step has; None if that is unknown."]


class RestoreError(Answer):
    """The reason why a restore failed."""

    code: Annotated[str, "The code of the error."]
    message: Annotated[str, "The error in words."]


class RestoreState(Answer):
    """The progress or the result of a restore."""

    state: Annotated[
        str,
        Choice("str", "running", "done", "refused", "failed", "cancelled"),
        "The state; refused means that nothing was written because the tasks named in ``report``"
        " have no body.",
    ]
    into: Annotated[str, "The name of the new file."]
    backup: Annotated[str | None, "The backup to start from; None restores from the history alone."]
    ended_ms: Annotated[
        int | None, Moment(), "When it ended, in milliseconds since 1970; None while it runs."
    ]
    progress: Annotated[RestoreProgress, "The progress so far."]
    report: Annotated[
        dict[str, Any] | None, "The report in the format of ``tickwheel restore --json``."
    ]
    error: Annotated[RestoreError | None, "Why it failed; None if it did not fail."]


class RestorePart(RestoreState):
    """One shard's part of a restore."""

    shard: Annotated[int, "The number of the shard."]


class Restore(RestoreState):
    """A restore that the daemon remembers. With several shards, ``state`` is ``running`` while any
    part runs, and then the worst state of all parts."""

    id: Annotated[int, ID, "The id of the restore."]
    dry_run: Annotated[bool, "Whether it only reports what would be restored."]
    began_ms: Annotated[int, Moment(), "When it began, in milliseconds since 1970."]
    of_shards: Annotated[int, "How many shards restore under this id."] = 1
    shards: Annotated[
        tuple[RestorePart, ...], "The part of each shard; empty if a single daemon answered."
    ] = ()


class RestoreList(Answer):
    """All restores that the daemon remembers, the newest first."""

    restores: Annotated[list[Restore], "The restores, the newest first."]


class Trouble(Answer):
    """A current problem, in words."""

    level: Annotated[str, Choice("str", "error", "warning", "note"), "The severity."]
    text: Annotated[str, "The problem, in a sentence."]
    about: Annotated[
        str,
        "The page of the console with the details: tasks, groups, dead, daemon, topics,"
        " transactions or targets.",
    ]
    topic: Annotated[str | None, "The topic concerned; None if it is not a single topic."] = None
    group: Annotated[str | None, "The group concerned; None if it is not a single group."] = None


class Ring(Answer):
    """How many tasks are due in each cell of the wheel, in this rotation and the next."""

    slots: Annotated[int, "Number of slots of the wheel."]
    tick_ms: Annotated[int, "The length of a slot, in milliseconds."]
    slots_per_cell: Annotated[int, "Number of slots in each cell of ``this`` and ``next``."]
    slot: Annotated[int, "The wheel's current slot."]
    this: Annotated[list[int], "Number of tasks in each cell for this rotation."]
    next: Annotated[list[int], "Number of tasks in each cell for the next rotation."]
    exact: Annotated[bool, "Whether all counts are exact; false if some of ``next`` are estimates."]
    later: Annotated[int, "Number of tasks that are due in later rotations."]


class Overview(Answer):
    """The wheel, counts and problems at one moment."""

    node: Annotated[str, "The name of the daemon's node."]
    version: Annotated[str, "The daemon's version."]
    epoch: Annotated[int, "The number of the active daemon's tenure; it grows with each takeover."]
    state: Annotated[str, "The state of the daemon, as in its status."]
    detail: Annotated[str | None, "Details of the state; None if there are none."]
    now_ms: Annotated[int, Moment(), "The daemon's clock, in milliseconds since 1970."]
    uptime_s: Annotated[float, "The time since the daemon started, in seconds."]
    ring: Annotated[Ring, "The wheel, cell by cell."]
    counts: Annotated[dict[str, int], "Number of tasks in each state, by the name of the state."]
    totals: Annotated[
        dict[str, int], "Number of events of each kind since the daemon started, by kind."
    ]
    lateness: Annotated[
        dict[str, int],
        "Lateness of first deliveries since the start; ``recent_…`` covers about the last minute.",
    ]
    troubles: Annotated[list[Trouble], "Current problems, the worst first."]
    troubles_left_out: Annotated[int, "How many further problems there are."]


class GroupLag(Answer):
    """Samples of the last hour, one every ``every_ms``, the oldest first."""

    every_ms: Annotated[int, "The time between two samples, in milliseconds."]
    taken_ms: Annotated[list[int], "When each sample was taken, in milliseconds since 1970."]
    ready: Annotated[
        list[int | None],
        "Number of tasks that were due and not delivered at each sample; null if unknown.",
    ]
    oldest_ready_ms: Annotated[
        list[int | None],
        "How long the oldest of them had waited at each sample, in milliseconds; null if unknown.",
    ]


class TaskHistory(Answer):
    """The events of a task, in order; docs/history.md lists them."""

    events: Annotated[list[dict[str, Any]], "The events of the task."]
    is_kept: Annotated[bool, "Whether the daemon keeps a history."]
    complete: Annotated[
        bool, "Whether the list is complete; false if the history was too long to search."
    ]


class TaskOutline(ListedOptions, Answer):
    """A task and its end in the history."""

    id: Annotated[int, ID, "The id of the task."]
    state: Annotated[str, "How the task ended (acked, cancelled, …), or dead, or unfinished."]
    enqueued_ms: Annotated[
        int | None,
        Moment(),
        "When the task was enqueued, in milliseconds since 1970; None if the history does not have"
        " it.",
    ]
    due_ms: Annotated[
        int | None,
        Moment(),
        "When the task was due, in milliseconds since 1970; None if the history does not have it.",
    ]
    ended_ms: Annotated[
        int | None,
        Moment(),
        "When the task ended, in milliseconds since 1970; None if it has not ended, or if the"
        " history does not have it.",
    ]
    attempts: Annotated[int, "How many times the task was delivered."]
    topic: Annotated[str | None, NAME, "The topic of the task."] = None
    schedule: Annotated[str | None, "The schedule that created the task, or None."] = None
    reason: Annotated[str | None, "The reason for the last failure; None if no attempt failed."] = (
        None
    )
    body: Annotated[
        bytes | None, BODY, "The body, if the history keeps bodies (``history_bodies``)."
    ] = None


class FoundTasks(Answer):
    """Tasks from the history, the newest first."""

    tasks: Annotated[list[TaskOutline], "The matching tasks."]
    is_kept: Annotated[bool, "Whether the daemon keeps a history."]
    complete: Annotated[
        bool,
        "Whether the list is complete; false if there are more tasks, or if the history was too"
        " long to search.",
    ]


_ANY, _FOUND = Need(Right.READ, Of.ANY), Need(Right.READ, Of.FOUND)
_NAMED, _ADMIN = Need(Right.READ, Of.NAMED), Need(Right.ADMIN, Of.ANY)
_DAEMON, _CONSOLE, _TOPICS, _UNKNOWN = "daemon", "console", "topics", ("not_found",)
BACKUP_S: Final = 600.0
"""Number of seconds that the answer to a backup may take in addition to the usual time."""
RESTORE_STOP_S: Final = 10.0
"""Number of seconds until a restore that does not stop is killed."""

VERBS: Final = (
    Verb("ping", Nothing, None, None, "Check that the daemon answers", frame=FrameType.PING,
         standby=True, routing=Routing.ONE),
    Verb("status", Nothing, Status, None, "Role, state, store",
         "Return the daemon's role and state, and when its role began. For a daemon that is not"
         " active, use ``status_at``.",
         FrameType.STATUS, path="GET /v1/status", tag=_DAEMON, standby=True,
         methods=(Method("status"),), routing=Routing.ONE),
    Verb("stats", Nothing, Stats, _FOUND, "Counts", "Return the daemon's current counts.",
         FrameType.STATS, path="GET /v1/stats", tag=_DAEMON, methods=(Method("stats"),),
         routing=Routing.ALL),
    Verb("load", LoadSpans, Load, _ANY, "How many tasks are due in each span of time",
         "Return how many tasks the wheel has for each of ``steps`` spans of ``step``. The first"
         " begins at ``since``, rounded down to a multiple of ``step``. Raise BadRequest if a value"
         " is out of range.",
         FrameType.LOAD, path="GET /v1/load", tag=_DAEMON, methods=(Method("load"),),
         routing=Routing.ALL),
    Verb("list_topics", NamesPage, TopicList, _FOUND, "List topics with their counts",
         frame=FrameType.TOPIC_LIST, path="GET /v1/topics", tag=_TOPICS, prompt=False,
         pages="topics", routing=Routing.PAGES),
    Verb("show_topic", OfTopic, TopicStats, _NAMED, "One topic",
         frame=FrameType.TOPIC_SHOW, path="GET /v1/topics/{topic}", tag=_TOPICS, errors=_UNKNOWN,
         routing=Routing.ALL),
    Verb("consumers", ConsumersPage, Consumers, _FOUND, "List connected consumers",
         "Return each subscription and each waiting pull, in the order in which their clients"
         " connected, optionally only of a topic or a group.",
         FrameType.CONSUMER_LIST, path="GET /v1/consumers", tag=_CONSOLE, prompt=False,
         pages="consumers", methods=(Method("list_consumers"),), command="consumers",
         routing=Routing.PAGES),
    Verb("overview", Nothing, Overview, _ANY, "The wheel, counts and current problems",
         "Return the wheel, counts, and current problems in words (``troubles``), the worst first.",
         frame=FrameType.OVERVIEW, path="GET /v1/overview", tag=_CONSOLE, prompt=False,
         methods=(Method("overview"),), routing=Routing.ALL),
    Verb("group_lag", OfGroup, GroupLag, _NAMED, "How far a group was behind in the last hour",
         frame=FrameType.GROUP_LAG, path="GET /v1/topics/{topic}/groups/{group}/lag", tag=_CONSOLE,
         errors=_UNKNOWN, routing=Routing.ALL),
    Verb("task_history", OfTask, TaskHistory, _FOUND, "The history of a task",
         "Return the events of a task from the history, in order. The newest events can be missing"
         " for a moment.",
         frame=FrameType.TASK_HISTORY, path="GET /v1/tasks/{id}/history", tag=_CONSOLE,
         prompt=False, methods=(Method("task_history"),), routing=Routing.ALL),
    Verb("history_tasks", HistoryPage, FoundTasks, _FOUND,
         "Search the history for tasks, including finished tasks, by key, topic and time",
         frame=FrameType.HISTORY_LIST, path="GET /v1/history/tasks", tag=_CONSOLE, prompt=False,
         routing=Routing.ALL),
    Verb("report", Nothing, None, _ANY, "The page of the last report"),
    Verb("backup", BackupName, Backup, _ADMIN, "Copy the store to a new file",
         "Copy the store of the running daemon to a new file in its backup folder. The copy is the"
         " state at one moment.",
         FrameType.BACKUP, path="POST /v1/backups", tag=_DAEMON, status=201,
         errors=("conflict",), audit=Audit.ALWAYS, prompt=False, repeat=False, extra_s=BACKUP_S,
         methods=(Method("backup"),), command="backup NAME", routing=Routing.TURN,
         unique=Unique("name", Home.FIRST)),
    Verb("restore", NewRestore, Restore, _ADMIN,
         "Restore a backup and the history since then into a new file", frame=FrameType.RESTORE,
         path="POST /v1/restores", tag=_DAEMON, status=202, errors=("not_found", "conflict"),
         audit=Audit.ALWAYS, prompt=False, repeat=False, routing=Routing.TOGETHER,
         unique=Unique("id", Home.ALL)),
    Verb("list_restores", Nothing, RestoreList, _ANY, "List the newest restores",
         frame=FrameType.RESTORE_LIST, path="GET /v1/restores", tag=_DAEMON, routing=Routing.ALL),
    Verb("show_restore", RestoreId, Restore, _ANY, "Show the progress of a restore",
         frame=FrameType.RESTORE_SHOW, path="GET /v1/restores/{id}", tag=_DAEMON, errors=_UNKNOWN,
         routing=Routing.ALL),
    Verb("cancel_restore", RestoreId, Restore, _ADMIN, "Cancel a restore and remove its file",
         frame=FrameType.RESTORE_CANCEL, path="DELETE /v1/restores/{id}", tag=_DAEMON,
         errors=_UNKNOWN, audit=Audit.ALWAYS, prompt=False, extra_s=RESTORE_STOP_S,
         routing=Routing.ALL),
)  # fmt: skip
