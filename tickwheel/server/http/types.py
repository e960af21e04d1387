"""What the HTTP API takes and answers, as types: decoding and the OpenAPI document follow them.

The bounds in the schemas are documentation only (``extra_json_schema``): the operations check them,
with the same messages as on TCP. What is left to the types is that a field has the right type and
that no field is unknown.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType

from tickwheel.model.records import MOMENT_MS_MAX
from tickwheel.model.transactions import PART_MAX
from tickwheel.model.values import INTEGER_MAX, INTEGER_MIN

NAME_PATTERN = "^[A-Za-z0-9._:/-]{1,255}$"


def _shape(description: str, **schema: Any) -> Meta:
    return Meta(description=description, extra_json_schema=schema or None)


Name = Annotated[str, _shape("1 to 255 of A-Z a-z 0-9 . _ : / -", pattern=NAME_PATTERN)]
Id = Annotated[str, _shape("A task's id: a whole number as text.", pattern="^[0-9]{1,19}$")]
Key = Annotated[str, _shape("The producer's own name for a task.", maxLength=255)]
OrderKey = Annotated[
    str, _shape("Tasks of one are handed out one at a time, in their order.", maxLength=255)
]
TagList = Annotated[str, _shape("Tags between ||, or * for all.", maxLength=2048)]
Condition = Annotated[str, _shape("A condition of SQL on a task.", maxLength=2048)]
OrderRetry = Annotated[
    int,
    _shape(
        "Milliseconds after which a failed task of an order key is tried again.",
        minimum=10, maximum=30_000,
    ),
]  # fmt: skip
Attempts = Annotated[
    int, _shape("After so many failed attempts comes order_failure.", minimum=1, maximum=1_000_000)
]
OrderFailure = Annotated[
    str,
    _shape(
        "The task is dead, its key is held, or it is tried until it succeeds.",
        enum=["dead", "hold", "retry"],
    ),
]
FairBy = Annotated[
    str, _shape("What has equal turns: key, tag, or a property's name.", maxLength=255)
]
LimitEach = Annotated[
    int, _shape("In flight for each value of fair_by.", minimum=1, maximum=1_000_000)
]
RateEach = Annotated[float, _shape("A second for each value of fair_by.")]
Receipt = Annotated[str, _shape("Opaque: from a delivery, to settle it with.")]
Milliseconds = Annotated[int, _shape("Milliseconds.", minimum=0)]
Moment = Annotated[int, _shape("Milliseconds since 1970 by the daemon's clock.")]
PlannedMoment = Annotated[
    int,
    _shape("Milliseconds since 1970, until 2094.", minimum=0, maximum=MOMENT_MS_MAX),
]
At = Annotated[datetime, Meta(tz=True, description="RFC 3339, with its offset.")]
Span = Annotated[str | float, _shape('As people write it: "5m", "1h30m"; a number is seconds.')]
Window = Annotated[int, _shape("Due up to so much later, where there is room.", minimum=0)]
WholeNumber = Annotated[int, _shape("", minimum=INTEGER_MIN, maximum=INTEGER_MAX)]
Property = str | WholeNumber | float | bool
Properties = Annotated[dict[str, Property], _shape("The producer's own fields.", maxProperties=64)]
Retry = Annotated[
    str | dict[str, Any],
    _shape(
        'A named policy, one as text: "fixed:delay=5s,retries=3", or as a map: {"kind": "fixed",'
        ' "delay_ms": 5000, "retries": 3}.'
    ),
]
IfPending = Annotated[
    str | dict[str, Any],
    _shape('keep, replace, reject or add, or a map: {"action": "replace", "max_wait": "1h"}.'),
]
Text = Annotated[str, _shape("The body as text.")]
Base64 = Annotated[bytes, Meta(description="The body, when it is no text.")]


class In(Struct, kw_only=True, forbid_unknown_fields=True):
    """Of requests: what is not known is a mistake."""


class Out(Struct, kw_only=True):
    """Of answers: a newer daemon may add fields."""


# --- tasks ---------------------------------------------------------------------------------------


class When(In):
    """When a task is due: one of these; none: at once."""

    delay: Span | None = None
    delay_ms: Milliseconds | None = None
    due_ms: Moment | None = None
    at: At | None = None


class TaskFields(When):
    """All of a task but its topic."""

    body: Text | None = None
    body_base64: Base64 | None = None
    delay_level: Annotated[int, _shape("Instead of a delay: a level.", minimum=1)] | None = None
    key: Key | None = None
    tag: Annotated[str, _shape("", maxLength=255)] | None = None
    properties: Properties | None = None
    priority: Annotated[int, _shape("Higher first.", minimum=0, maximum=255)] = 0
    ttl: Span | None = None
    ttl_ms: Annotated[int, _shape("Worth delivering so long after due.", minimum=1)] | None = None
    retry: Retry | None = None
    within: Span | None = None
    within_ms: Window | None = None
    order_key: OrderKey | None = None
    if_pending: IfPending | None = None


class NewTask(TaskFields, kw_only=True):
    """A task to enqueue."""

    topic: Name


class OfTransaction(In):
    """Which transaction half tasks are of; the same ``part`` again is a resend."""

    id: Name
    group: Name
    """Its producer group: who is asked what became of it."""
    part: Annotated[int, _shape("1 for its first request.", minimum=1, maximum=PART_MAX)]
    count_from: Annotated[str, _shape("", enum=["enqueue", "commit"])] = "enqueue"
    """What delays count from."""


class NewTasks(In, kw_only=True):
    """Several at once: all of them or none. With a ``transaction`` they are tasks when it is
    committed."""

    transaction: OfTransaction | None = None
    tasks: Annotated[list[NewTask], _shape("", minItems=1, maxItems=16_384)]


class OneOrMany(TaskFields):
    """What both forms of an enqueue decode to; the document has them apart."""

    topic: Name | None = None
    tasks: list[NewTask] | None = None
    transaction: OfTransaction | None = None


class Accepted(Out):
    """An enqueued task: it is stored durably, and delivered at ``due_ms`` or later."""

    id: Id
    due_ms: Moment | None
    """Null: of the resend of a task with a due window that has ended meanwhile."""
    outcome: str = "stored"
    """Or kept, replaced or rejected, by its ``if_pending`` or its topic's: ``id`` and ``due_ms``
    are then those of the task that is pending."""


class AcceptedMany(Out):
    """In the order asked."""

    tasks: list[Accepted]


class Prepared(Out):
    """Half tasks that are kept; they have no ids before the commit."""

    transaction: Name
    part: int
    tasks: int


class Failure(Out):
    """Why one attempt did not end in an ack."""

    attempt: int
    at_ms: Moment
    reason: str
    subscriber: str
    trace: str
    """How the consumer came there, of the failure that made a dead letter; or empty."""


class GroupOfTask(Out):
    """One group's standing with a task."""

    state: str
    attempt: int
    at_ms: Moment
    failures: list[Failure]
    retries_left: int
    snoozes: int
    deaths: int


class Task(Out):
    """A task. Of one that has ended only ``id`` and ``state`` are known."""

    id: Id
    state: str
    topic: Name | None = None
    body: Text | None = None
    body_base64: Base64 | None = None
    due_ms: Moment | None = None
    enqueued_ms: Moment | None = None
    key: str | None = None
    tag: str | None = None
    properties: Properties | None = None
    priority: int | None = None
    ttl_ms: int | None = None
    within_ms: int | None = None
    asked_ms: Moment | None = None
    order_key: str | None = None
    slot: int | None = None
    cycles: int | None = None
    groups: dict[str, GroupOfTask] | None = None
    replay_of: Id | None = None
    replay_to: Name | None = None


class Tasks(Out):
    """A page; ``next`` is ``after`` of the next one."""

    tasks: list[Task]
    next: Id | None = None


class TaskList(Out):
    """In the order asked."""

    tasks: list[Task]


class Result(Out):
    """What became of a command on one task."""

    id: Id | None
    result: str
    due_ms: Moment | None = None


class Results(Out):
    """In the order asked."""

    results: list[Result]


Ids = Annotated[list[Id], _shape("", minItems=1, maxItems=16_384)]


class IdsIn(In):
    """Tasks by their ids."""

    ids: Ids


class RescheduleIn(When, kw_only=True):
    """A new due time for several tasks."""

    ids: Ids


class TasksQuery(In):
    """Which tasks."""

    topic: Name | None = None
    state: str | None = None
    key: Key | None = None
    key_prefix: Key | None = None
    tag: Annotated[str, _shape("", maxLength=255)] | None = None
    property: Annotated[str, _shape("NAME=VALUE", maxLength=512)] | None = None
    until_ms: Moment | None = None
    newest: bool = False
    after: Id | None = None
    limit: Annotated[int, _shape("", minimum=1, maximum=1000)] = 100


class KeyQuery(In):
    """Which tasks of a key."""

    newest: bool = False
    until_ms: Moment | None = None


# --- deliveries ----------------------------------------------------------------------------------


class PullIn(In):
    """Up to ``max`` deliveries, as soon as there is one."""

    group: Name | None = None
    max: Annotated[int, _shape("", minimum=1)] = 1
    wait_ms: Milliseconds = 0
    lease_ms: Milliseconds | None = None
    tags: TagList | None = None
    where: Condition | None = None
    order_retry_ms: OrderRetry | None = None
    order_attempts: Attempts | None = None
    order_failure: OrderFailure | None = None
    fair_by: FairBy | None = None
    limit_each: LimitEach | None = None
    rate_each: RateEach | None = None


class Delivery(Out):
    """One hand-over of a task."""

    id: Id
    receipt: Receipt
    due_ms: Moment
    delivered_ms: Moment
    attempt: int
    failures: int
    deaths: int
    body: Text | None = None
    body_base64: Base64 | None = None
    key: str | None = None
    tag: str | None = None
    properties: Properties | None = None
    priority: int | None = None
    order_key: str | None = None
    replay_of: Id | None = None


class Deliveries(Out):
    """None when the time was over."""

    deliveries: list[Delivery]


class StreamQuery(In):
    """A subscription."""

    group: Name | None = None
    credit: Annotated[int, _shape("Deliveries that may be unsettled.", minimum=0)] = 100
    lease_ms: Milliseconds | None = None
    ack: Annotated[str, _shape("", enum=["manual", "on_delivery"])] = "manual"
    broadcast: bool = False
    tags: TagList | None = None
    where: Condition | None = None
    order_retry_ms: OrderRetry | None = None
    order_attempts: Attempts | None = None
    order_failure: OrderFailure | None = None
    fair_by: FairBy | None = None
    limit_each: LimitEach | None = None
    rate_each: RateEach | None = None


Receipts = Annotated[list[Receipt], _shape("", minItems=1, maxItems=16_384)]


class AckIn(In):
    """Deliveries to settle."""

    receipts: Receipts


class NackIn(AckIn):
    """Attempts that failed; ``delay_ms``: until the next one, instead of the policy's."""

    delay_ms: Milliseconds | None = None
    reason: str | None = None


class RejectIn(AckIn):
    """Tasks that will never succeed."""

    reason: str | None = None


class SnoozeIn(AckIn, kw_only=True):
    """Tasks that are postponed, and that counts as no failure."""

    delay_ms: Milliseconds


class ExtendIn(AckIn, kw_only=True):
    """Leases that shall last ``lease_ms`` from now."""

    lease_ms: Milliseconds


class Settled(Out):
    """A word for each receipt, in the order asked."""

    results: list[str]


# --- topics and groups ---------------------------------------------------------------------------


class SettingsIn(In):
    """What is named is set; null takes a setting away."""

    paused: bool | UnsetType = UNSET
    rate: float | UnsetType | None = UNSET
    burst: int | UnsetType | None = UNSET
    retry: Retry | UnsetType | None = UNSET
    broadcast_only: bool | UnsetType = UNSET
    if_pending: IfPending | UnsetType | None = UNSET
    tags: TagList | UnsetType | None = UNSET
    where: Condition | UnsetType | None = UNSET
    order_retry_ms: OrderRetry | UnsetType | None = UNSET
    order_attempts: Attempts | UnsetType | None = UNSET
    order_failure: OrderFailure | UnsetType | None = UNSET
    fair_by: FairBy | UnsetType | None = UNSET
    limit_each: LimitEach | UnsetType | None = UNSET
    rate_each: RateEach | UnsetType | None = UNSET


class GroupIn(SettingsIn):
    """A new group; ``since``: "now", "first" or milliseconds since 1970."""

    since: str | int = "now"


class GroupSettings(Out):
    """As they are."""

    topic: Name
    group: Name | None
    paused: bool
    rate: float | None
    burst: int | None
    retry: dict[str, Any] | None
    created: bool | None = None
    broadcast_only: bool | None = None
    if_pending: IfPending | None = None
    tags: TagList | None = None
    where: Condition | None = None
    order_retry_ms: OrderRetry | None = None
    order_attempts: Attempts | None = None
    order_failure: OrderFailure | None = None
    fair_by: FairBy | None = None
    limit_each: LimitEach | None = None
    rate_each: RateEach | None = None


class Replay(Out):
    """How far the tasks from before a group have been looked at."""

    looked_at: int
    given: int
    share: float | None


class Group(Out, kw_only=True):
    """Counts and settings."""

    ready: int
    in_flight: int
    waiting: int
    retrying: int
    dead: int
    held: int | None = None
    in_lines: int | None = None
    subscribers: int
    delivered: int
    acked: int
    nacked: int
    snoozed: int
    deaths: int
    expired: int
    filtered: int
    since_ms: Moment
    unused_ms: int | None
    replay: Replay | None
    oldest_ready_ms: int
    paused: bool
    rate: float | None
    burst: int | None
    retry: dict[str, Any] | None
    tags: TagList | None = None
    where: Condition | None = None
    order_retry_ms: OrderRetry | None = None
    order_attempts: Attempts | None = None
    order_failure: OrderFailure | None = None
    fair_by: FairBy | None = None
    limit_each: LimitEach | None = None
    rate_each: RateEach | None = None


class LineQuery(In):
    """How many at most."""

    limit: Annotated[int, _shape("", minimum=1, maximum=1000)] = 100


class HeldKey(Out):
    """An order key that waits for an operator: the task that failed, and what waits behind it."""

    id: Id
    key: str | None
    since_ms: Moment
    attempt: int
    waiting: int
    reason: str
    subscriber: str


class HeldKeys(Out):
    """The oldest first; ``held``: how many there are in all."""

    keys: list[HeldKey]
    held: int


class KeyLine(Out):
    """An order key, or a value that shares the group: ``id`` is one of its tasks."""

    id: Id
    kind: Annotated[str, _shape("", enum=["order", "fair"])]
    value: Property | None
    state: str
    in_flight: int
    waiting: int


class KeyLines(Out):
    """Those with most tasks waiting; ``waiting``: in all lines of the group."""

    lines: list[KeyLine]
    waiting: int


class HeldIn(In):
    """Held tasks by their ids, or the one of an order key."""

    ids: Ids | None = None
    key: Key | None = None


class TopicCounts(Out, kw_only=True):
    """Counts and settings."""

    pending: int
    ready: int
    in_flight: int
    waiting: int
    dead: int
    enqueued: int
    delivered: int
    acked: int
    cancelled: int
    oldest_ready_ms: int
    broadcasters: int
    paused: bool
    rate: float | None
    burst: int | None
    retry: dict[str, Any] | None
    groups: dict[str, Group]
    deleting: bool | None = None
    broadcast_only: bool | None = None
    if_pending: IfPending | None = None


class Topic(TopicCounts):
    """One topic."""

    topic: Name


class Topics(Out):
    """A page, by name."""

    topics: list[Topic]
    next: Name | None


class ConsumersQuery(In):
    """Who takes tasks of a topic, or of a group; ``after`` is ``next`` of the page before."""

    topic: Name | None = None
    group: Name | None = None
    after: Annotated[int, _shape("", minimum=0)] | None = None
    limit: Annotated[int, _shape("", minimum=1, maximum=1000)] = 100


class Consumer(Out):
    """A subscription of somebody who is connected, or a pull that waits."""

    topic: Name
    group: Annotated[Name, _shape("null: a broadcast subscription.")] | None
    kind: Annotated[str, _shape("subscription, pull.")]
    in_flight: int
    prefetch: int
    since_ms: Annotated[Moment, _shape("When the connection came.")]
    client: Annotated[str, _shape("As the client calls itself.")]
    address: str
    host: Annotated[str, _shape("As the client says; over HTTP nothing is said.")] | None
    pid: int | None
    version: str | None
    token: str | None


class Consumers(Out):
    """A page; it ends behind all of one connection, so it may be a little longer."""

    consumers: list[Consumer]
    next: int | None


class NamePage(In):
    """A page by name."""

    after: Name | None = None
    limit: Annotated[int, _shape("", minimum=1, maximum=1000)] = 100


class Groups(Out):
    """Of one topic."""

    groups: dict[str, Group]


class ForceQuery(In):
    """``force``: though it holds tasks."""

    force: bool = False


class GroupHeld(Out):
    """What the deleted group held."""

    ready: int
    in_flight: int
    waiting: int
    dead: int


class TopicHeld(Out):
    """What the deleted topic held."""

    pending: int
    ready: int
    in_flight: int
    waiting: int
    dead: int
    groups: int


class Stats(Out, kw_only=True):
    """Counts of the daemon; docs/protocol.md lists what they mean."""

    node: str
    version: str
    epoch: int
    now_ms: Moment
    uptime_s: float
    slots: int
    tick_ms: int
    slot: int
    position_ms: int
    pending: int
    ready: int
    in_flight: int
    waiting: int
    dead: int
    enqueued: int
    delivered: int
    acked: int
    store_ok: bool
    lateness: dict[str, Any] | None = None
    """None: of all topics only, and the caller may not read all."""
    topics: dict[str, TopicCounts]
    topics_left_out: int
    partial: bool = False
    """The counts are of the topics that the caller may read."""


class LoadQuery(In):
    """``steps`` spans of ``step_ms`` from ``from_ms`` on."""

    from_ms: Moment | None = None
    step_ms: Milliseconds | None = None
    steps: Annotated[int, _shape("", minimum=1, maximum=1_440)] | None = None


class Load(Out):
    """How many tasks are due in each span; not ``exact``: estimates are among them."""

    from_ms: Moment
    step_ms: int
    counts: list[int]
    exact: bool
    scheduled: int


class Status(Out):
    """What the daemon says of itself; one that stands by, too."""

    node: str
    version: str
    role: str
    state: str
    detail: str | None
    epoch: int
    address: str | None
    store_ok: bool
    now_ms: Moment
    uptime_s: float
    active: dict[str, Any] | None = None
    standbys: list[dict[str, Any]] = []
    since_ms: Moment | None = None
    store: str | None = None
    durability: str | None = None
    loaded: int | None = None
    http: str | None = None
    memory_bytes: int | None = None
    disk_used: float | None = None
    disk_free_bytes: int | None = None


# --- dead letters --------------------------------------------------------------------------------


class DeadQuery(In):
    """Which dead letters; ``after`` is ``next`` of the page before."""

    topic: Name | None = None
    group: Name | None = None
    reason: str | None = None
    since_ms: Moment | None = None
    until_ms: Moment | None = None
    after: str | None = None
    limit: Annotated[int, _shape("", minimum=1, maximum=1000)] = 100


class DeadLetter(Out):
    """What a group has given up on."""

    id: Id
    group: Name
    topic: Name
    died_ms: Moment
    attempt: int
    reason: str
    failures: list[Failure]
    failed: int
    deaths: int


class DeadLetters(Out):
    """A page."""

    dead: list[DeadLetter]
    next: str | None


class DeadRef(In):
    """One dead letter."""

    id: Id
    group: Name


class DeadIn(In):
    """Dead letters."""

    items: Annotated[list[DeadRef], _shape("", minItems=1, maxItems=16_384)]


# --- schedules, backups --------------------------------------------------------------------------


class BackupIn(In):
    """A file name without a folder."""

    name: str


class Backup(Out):
    """A copy of the store."""

    path: str
    bytes: int


class RestoreIn(In):
    """Names of files in the folder for backups; without ``ids`` all tasks."""

    into: str
    """A new SQLite file."""
    backup: str | None = None
    history: bool = True
    """What happened since the backup, too, where the daemon keeps a history."""
    ids: Ids | None = None
    include_overdue: bool = True
    allow_missing_bodies: bool = False
    dry_run: bool = False


class RestoreProgress(Out):
    """``step``: backup, events, tasks, writing."""

    step: str
    done: int
    of: int | None


class RestoreError(Out):
    """Why it failed."""

    code: str
    message: str


class Restore(Out):
    """One restore."""

    id: Id
    state: Annotated[str, _shape("", enum=["running", "done", "refused", "failed", "cancelled"])]
    """Refused: nothing was written, because tasks have no body; ``report`` names them."""
    into: str
    backup: str | None
    dry_run: bool
    began_ms: Moment
    ended_ms: Moment | None
    progress: RestoreProgress
    report: dict[str, Any] | None
    """As ``tickwheel restore --json`` has it."""
    error: RestoreError | None


class RestoreList(Out):
    """The newest first."""

    restores: list[Restore]


# --- the console ---------------------------------------------------------------------------------


class Trouble(Out):
    """Something that is wrong right now, in words."""

    level: Annotated[str, _shape("", enum=["error", "warning", "note"])]
    text: str
    about: str
    """Where to look: tasks, groups, dead, daemon, topics, transactions."""
    topic: str | None = None
    group: str | None = None


class Ring(Out):
    """How many tasks are due when the wheel comes to each cell: in this turn, and the next one."""

    slots: int
    tick_ms: int
    slots_per_cell: int
    slot: int
    """Where the wheel is."""
    this: list[int]
    next: list[int]
    exact: bool
    """False: estimates are among those of the next turn."""
    later: int
    """Due in a later turn than these."""


class Overview(Out):
    """One moment."""

    node: str
    version: str
    epoch: int
    state: str
    detail: str | None
    now_ms: Moment
    uptime_s: float
    ring: Ring
    counts: dict[str, int]
    totals: dict[str, int]
    lateness: dict[str, int]
    """Of first deliveries: since the start; ``recent_…``: in about the last minute."""
    troubles: list[Trouble]
    troubles_left_out: int


class WatchQuery(In):
    """A look every ``every_ms``."""

    every_ms: Annotated[int, _shape("", minimum=500, maximum=60_000)] = 1_000


class GroupLag(Out):
    """A sample every ``every_ms`` of the last hour, the oldest first."""

    every_ms: int
    taken_ms: list[Moment]
    ready: list[int | None]
    """Due and waiting for a subscriber; null: not known."""
    oldest_ready_ms: list[int | None]
    """For how long the oldest of them had waited."""


class TaskHistory(Out):
    """Events as docs/history.md lists them, in the order of their happening."""

    events: list[dict[str, Any]]
    is_kept: bool
    """Whether the daemon keeps a history at all."""
    complete: bool
    """False: there was too much to look through."""


class HistoryQuery(In):
    """Which tasks of the history; the times are those of their enqueues."""

    key: Key | None = None
    topic: Name | None = None
    since_ms: Moment | None = None
    until_ms: Moment | None = None
    limit: Annotated[int, _shape("", minimum=1, maximum=1000)] = 100


class TaskOutline(Out):
    """What a task was and what became of it, as far as the history has it."""

    id: Id
    state: Annotated[str, _shape("Its end (acked, cancelled, …), dead, or unfinished.")]
    enqueued_ms: Moment | None
    due_ms: Moment | None
    ended_ms: Moment | None
    attempts: int
    topic: Name | None = None
    key: Key | None = None
    tag: str | None = None
    order_key: OrderKey | None = None
    priority: int | None = None
    ttl_ms: int | None = None
    within_ms: int | None = None
    properties: Properties | None = None
    schedule: str | None = None
    reason: str | None = None
    body: Text | None = None
    """Where the history keeps bodies (``history_bodies``)."""
    body_base64: str | None = None


class FoundTasks(Out):
    """The newest first."""

    tasks: list[TaskOutline]
    is_kept: bool
    """Whether the daemon keeps a history at all."""
    complete: bool
    """False: there are more, or there was too much to look through."""


class Session(Out):
    """Who asks."""

    name: str | None
    """None: nobody who has logged in, though that is needed."""
    is_login_needed: bool
    until_ms: Moment | None
    rights: dict[str, list[str]]
    """Of each right the patterns of topics."""


class SessionLink(Out):
    """To be shown as a token by a login."""

    code: str | None
    """None: no login is needed."""
    until_ms: Moment | None


class Problem(Out, omit_defaults=True):
    """An error, as RFC 9457 has it; ``code`` is one of the error table of docs/protocol.md."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    retryable: bool
    active: Annotated[str, _shape("not_active: the address of the daemon that leads.")] | None = (
        None
    )
    active_http: Annotated[str, _shape("The URL of its HTTP API.")] | None = None


class NoQuery(In):
    """Nothing may be said in the query."""
