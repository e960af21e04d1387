"""Every metric: its name, what it means, what shape it has, and where its value is read.

The values are the engine's own counts, read when somebody scrapes; nothing here costs anything
while nobody does. Knows no text format and no order of reading (``exposition``).

Names follow Prometheus: prefix ``tickwheel_``, base units (seconds, bytes), ``_total`` for what
only grows. Counters count since the process began, over all its tenures as the active daemon.
``docs/metrics.md`` has a line for each; a test compares.
"""

from __future__ import annotations

import operator
import platform
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

from tickwheel.model.policies import Merging
from tickwheel.persistence.contract import Located
from tickwheel.server import logs
from tickwheel.server.roles import readiness
from tickwheel.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from tickwheel.engine.state import Core
    from tickwheel.engine.topics import Group, Topic
    from tickwheel.persistence.contract import Store
    from tickwheel.server.metrics.observed import Histogram, Observed
    from tickwheel.server.roles import Running


Subject = TypeVar("Subject")
Part = TypeVar("Part")


def kind_of(name: str) -> str:
    return "counter" if name.endswith("_total") else "gauge"


class Moment(NamedTuple):
    """The time at which, and the engine of which, a value is read."""

    now_ms: int
    core: Core


@dataclass(frozen=True, slots=True)
class Metric(Generic[Subject]):
    """One number of each subject: group, topic or engine."""

    name: str
    help: str
    read: Callable[[Subject, Moment], float]
    merge: Callable[[float, float], float] = operator.add
    """Makes the value of several subjects of theirs."""

    @property
    def kind(self) -> str:
        return kind_of(self.name)


class Plain(NamedTuple):
    """One number of the process."""

    name: str
    help: str
    read: Callable[[Running], float]


class Labelled(NamedTuple):
    """Numbers of the process by the values of labels; none where they have no meaning now."""

    name: str
    help: str
    labels: tuple[str, ...]
    read: Callable[[Running, Moment | None], Mapping[tuple[str, ...], float]]
    """Without a moment the daemon is not active."""


class Distribution(NamedTuple):
    """A histogram of the process, or one for each value of a label."""

    name: str
    help: str
    label: str
    """The label; empty: there is one histogram."""
    read: Callable[[Observed], Sequence[tuple[str, Histogram]]]
    divisor: float = 1
    """The divisor of a value that is shown: 1000 for ms that are shown as seconds."""


@runtime_checkable
class CountsLosses(Protocol):
    """A store that can come back without what it had confirmed."""

    @property
    def replays(self) -> int: ...
    @property
    def rewrites(self) -> int: ...


def _age_s(group: Group, now_ms: int) -> float:
    since_ms = group.oldest_since_ms()
    return max(0, now_ms - since_ms) / 1000 if since_ms is not None else 0


def _of(part: Part | None, read: Callable[[Part], float]) -> float:
    """A number of a part of the daemon; 0 where it has no such part."""
    return 0 if part is None else read(part)


def _seen(daemon: Running) -> Observed:
    return daemon.roles.observed


def _noted(name: str, daemon: Running) -> float:
    found: float = getattr(_seen(daemon), name)
    return found


def _epoch(daemon: Running) -> int:
    if daemon.roles.shard is not None:
        return daemon.roles.shard.epoch
    leader = daemon.roles.leader
    return leader.epoch if leader is not None else 0


def _store_up(daemon: Running) -> bool:
    shard = daemon.roles.shard
    if shard is not None:
        committer = shard.committer
        # A store without room refuses new tasks only: ``_store_full`` says that.
        if committer.stalled or (committer.trouble is not None and not committer.full):
            return False
    return not daemon.roles.observed.election_trouble


def _store_full(daemon: Running) -> bool:
    shard = daemon.roles.shard
    return shard is not None and shard.committer.full


def _moves(store: Store) -> int:
    return store.moves if isinstance(store, Located) else 0


def _losses(store: Store) -> tuple[int, int]:
    return (store.replays, store.rewrites) if isinstance(store, CountsLosses) else (0, 0)


def _paused_s(group: Group, now_ms: int) -> float:
    pauses = group.settings.paused_ms, group.topic.settings.paused_ms
    since_ms = min((at_ms for at_ms in pauses if at_ms is not None), default=now_ms)
    return max(0, now_ms - since_ms) / 1000


GROUP: tuple[Metric[Group], ...] = (
    Metric("tickwheel_ready_tasks", "Due and waiting for a consumer.", lambda g, _: g.ready_count),
    Metric("tickwheel_in_flight_tasks", "Delivered, not finished.", lambda g, _: len(g.flight)),
    Metric("tickwheel_waiting_tasks", "Waiting for a retry.", lambda g, _: len(g.waiting)),
    Metric("tickwheel_dead_tasks", "Dead letters that are kept.", lambda g, _: g.dead),
    Metric("tickwheel_line_tasks",
           "Due, and it is not their turn: of their order key, or of what shares the group.",
           lambda g, _: g.in_key_queues),
    Metric("tickwheel_held_keys", "Order keys that are held until an operator acts.",
           lambda g, _: g.held),
    Metric("tickwheel_paused_keys", "Keys that operators have paused.",
           lambda g, _: len(g.paused_keys)),
    Metric("tickwheel_oldest_ready_age_seconds",
           "How long the longest waiting ready task has waited; 0 when none is ready.",
           lambda g, moment: _age_s(g, moment.now_ms), max),
    Metric("tickwheel_subscribers", "Open subscriptions.", lambda g, _: len(g.subscribers)),
    Metric("tickwheel_credit_tasks", "Deliveries that the subscriptions would take at once.",
           lambda g, _: sum(max(0, one.credit) for one in g.subscribers)),
    Metric("tickwheel_paused",
           "1: nothing is handed out, because the group or its topic is paused.",
           lambda g, _: g.settings.paused or g.topic.settings.paused, max),
    Metric("tickwheel_paused_seconds",
           "For how long the group, or its topic, has been paused; 0: it is not.",
           lambda g, moment: _paused_s(g, moment.now_ms), max),
    Metric("tickwheel_throttled", "1: nothing is handed out at this moment, because of a rate.",
           lambda g, moment: g in moment.core.throttled, max),
    Metric("tickwheel_delivered_total", "Deliveries, retries too.", lambda g, _: g.delivered),
    Metric("tickwheel_acked_total", "Finished by a consumer.", lambda g, _: g.acked),
    Metric("tickwheel_nacked_total", "Nacks and rejects.", lambda g, _: g.nacked),
    Metric("tickwheel_snoozed_total", "Postponed by a consumer.", lambda g, _: g.snoozed),
    Metric("tickwheel_consumer_deaths_total", "Consumers that died.", lambda g, _: g.deaths),
    Metric("tickwheel_retried_total", "Retries that came due.", lambda g, _: g.retried),
    Metric("tickwheel_dead_total", "Became dead letters.", lambda g, _: g.dead_lettered),
    Metric("tickwheel_expired_total", "Not delivered in their ttl.", lambda g, _: g.expired),
    Metric("tickwheel_filtered_total", "Left out by the filter.", lambda g, _: g.filtered),
)  # fmt: skip
"""Metrics by topic and group. Before any group exists, due tasks count with an empty group."""

TOPIC: tuple[Metric[Topic], ...] = (
    Metric("tickwheel_scheduled_tasks", "Not due yet.", lambda t, _: t.scheduled),
    Metric("tickwheel_broadcasters", "Open broadcast subscriptions.",
           lambda t, _: len(t.broadcasters)),
    Metric("tickwheel_enqueued_total", "Tasks accepted.", lambda t, _: t.enqueued),
    Metric("tickwheel_cancelled_total", "Tasks cancelled.", lambda t, _: t.cancelled),
    Metric("tickwheel_kept_total", "Tasks not stored, because one with their key was pending.",
           lambda t, _: t.merged[Merging.KEPT]),
    Metric("tickwheel_replaced_total", "Tasks that took the place of a pending one with their key.",
           lambda t, _: t.merged[Merging.REPLACED]),
    Metric("tickwheel_rejected_total",
           "Tasks refused by their own rule, because one with their key was pending.",
           lambda t, _: t.merged[Merging.REJECTED]),
    Metric("tickwheel_broadcast_total", "Broadcast deliveries.", lambda t, _: t.broadcast),
)  # fmt: skip
"""Metrics by topic."""

ENGINE: tuple[Metric[Core], ...] = (
    Metric("tickwheel_early_total", "Not due at the last check; must stay 0.",
           lambda c, _: c.totals.early),
    Metric("tickwheel_rows_missing_total",
           "Tasks that had not ended and whose rows the store did not have; must stay 0.",
           lambda c, _: c.totals.rows_missing),
    Metric("tickwheel_missing_tasks", "Those of them that are still looked for.",
           lambda c, _: len(c.missing)),
    Metric("tickwheel_leases_over_total", "Leases that ended.", lambda c, _: c.totals.leases_over),
    Metric("tickwheel_dropped_once_total", "At-most-once deliveries whose consumer was gone.",
           lambda c, _: c.totals.dropped_once),
    Metric("tickwheel_dead_expired_total", "Dead letters deleted after their retention.",
           lambda c, _: c.totals.dead_expired),
    Metric("tickwheel_schedules", "Recurring schedules.", lambda c, _: len(c.schedule_heap.known)),
    Metric("tickwheel_schedules_paused", "Those of them that are paused.",
           lambda c, _: sum(planned.row.paused for planned in c.schedule_heap.known.values())),
    Metric("tickwheel_schedule_planned_total",
           "Occurrences of schedules that came due: fired, missed and overlapping ones.",
           lambda c, _: (c.totals.schedules_fired + c.totals.schedules_missed
                         + c.totals.schedules_overlapped)),
    Metric("tickwheel_schedule_fired_total", "Occurrences that became tasks.",
           lambda c, _: c.totals.schedules_fired),
    Metric("tickwheel_schedule_missed_total",
           "Occurrences that were skipped because their time had passed.",
           lambda c, _: c.totals.schedules_missed),
    Metric("tickwheel_schedule_overlapped_total",
           "Occurrences that were skipped because the task before was unfinished.",
           lambda c, _: c.totals.schedules_overlapped),
    Metric("tickwheel_transactions_open", "Transactions that are not decided and not parked.",
           lambda c, _: c.transaction_registry.undecided - c.transaction_registry.parked),
    Metric("tickwheel_transactions_parked",
           "Transactions that were asked about often enough: an operator decides.",
           lambda c, _: c.transaction_registry.parked),
    Metric("tickwheel_half_tasks", "Half tasks of transactions that are not decided.",
           lambda c, _: c.transaction_registry.tasks),
    Metric("tickwheel_half_tasks_bytes", "Their bytes.",
           lambda c, _: c.transaction_registry.size_bytes),
    Metric("tickwheel_transactions_committed_total", "Transactions that were committed.",
           lambda c, _: c.totals.transactions_committed),
    Metric("tickwheel_transactions_rolled_back_total", "Transactions that were rolled back.",
           lambda c, _: c.totals.transactions_rolled_back),
    Metric("tickwheel_transaction_checks_total",
           "Times that a producer was asked about a transaction.",
           lambda c, _: c.totals.transactions_checked),
    Metric("tickwheel_bulk_running", "Bulk operations over all that matches that are not over.",
           lambda c, _: c.bulk_running),
    Metric("tickwheel_windows_total", "Tasks with a due window, for which a moment was chosen.",
           lambda c, _: c.totals.windows),
    Metric("tickwheel_sessions", "Producer sessions remembered.", lambda c, _: len(c.sessions)),
    Metric("tickwheel_topics", "Topics known.", lambda c, _: len(c.topics)),
    Metric("tickwheel_wheel_bytes", "Memory of the handles.", lambda c, _: c.wheel.memory_bytes),
    Metric("tickwheel_resident_bytes", "Memory of task bodies.", lambda c, _: c.resident_bytes),
    Metric("tickwheel_staged_bytes", "Enqueues on their way to the store.",
           lambda c, _: c.open.staged_bytes + (c.sealed.staged_bytes if c.sealed else 0)),
    Metric("tickwheel_reading_tasks", "Due tasks whose records are being read from the store.",
           lambda c, _: len(c.firing)),
)  # fmt: skip
"""Metrics of the engine. Gauges exist while the daemon is active."""

DOOR = (
    (
        "tickwheel_login_failures_total",
        "Wrong or missing tokens, over TCP and HTTP.",
        "login_failures",
    ),
    ("tickwheel_forbidden_total", "Requests that were refused for want of a right.", "forbidden"),
    (
        "tickwheel_tokens_file_ok",
        "1: the file of tokens could be read, or there is none.",
        "tokens_file_ok",
    ),
    (
        "tickwheel_audit_ok",
        "1: the log of what operators do can be written, or there is none.",
        "audit_ok",
    ),
    ("tickwheel_tls_failures_total", "TLS handshakes that failed, at both ports.", "tls_failures"),
    (
        "tickwheel_certificate_ok",
        "1: the files of the certificate could be read, or there are none.",
        "certificate_ok",
    ),
    (
        "tickwheel_certificate_expires_seconds",
        "When the certificate ends, since 1970; 0: there is none.",
        "certificate_until_s",
    ),
    (
        "tickwheel_http_requests_total",
        "Requests of the HTTP API that were answered.",
        "http_requests",
    ),
    (
        "tickwheel_http_client_errors_total",
        "The same with a status of 400 to 499.",
        "http_client_errors",
    ),
    (
        "tickwheel_http_server_errors_total",
        "The same with a status of 500 or more.",
        "http_server_errors",
    ),
    (
        "tickwheel_http_under_way",
        "Requests of the HTTP API that are not answered, streams included.",
        "http_under_way",
    ),
)
"""Names, meanings and attributes of ``Observed`` of what every process notes that lets somebody in:
a daemon, and the process that answers HTTP for all shards."""
DAEMON: tuple[Plain, ...] = (
    Plain("tickwheel_leader", "1: this daemon is active.", lambda d: d.roles.role == "active"),
    Plain("tickwheel_serving", "1: /readyz says yes.", lambda d: readiness(d)[0]),
    Plain("tickwheel_standbys", "Other daemons that stand by, as this one sees them.",
          lambda d: len(d.roles.standbys)),
    Plain("tickwheel_standbys_expected", "The setting expect_standbys.",
          lambda d: d.settings.expect_standbys),
    Plain("tickwheel_nodes_expected", "The setting expect_nodes.",
          lambda d: d.settings.expect_nodes),
    Plain("tickwheel_epoch", "Of the active daemon, as known.", _epoch),
    Plain("tickwheel_role_start_time_seconds", "Since when it has its role (Unix time).",
          lambda d: d.roles.role_since_ms / 1000),
    Plain("tickwheel_failovers_total", "Times it took over.", lambda d: _seen(d).failovers),
    Plain("tickwheel_deposed_total", "Times it stepped down.", lambda d: _seen(d).deposed),
    Plain("tickwheel_recovery_seconds", "The last taking over, until it served.",
          lambda d: _seen(d).recovery_s),
    Plain("tickwheel_load_seconds", "The last taking over, until everything was in memory.",
          lambda d: _seen(d).load_s),
    Plain("tickwheel_loaded_tasks", "Handles it loaded then.", lambda d: d.roles.loaded),
    Plain("tickwheel_connections", "Open connections.", lambda d: d.connection_count),
    *(Plain(name, text, partial(_noted, noted)) for name, text, noted in DOOR),
    Plain("tickwheel_log_dropped_total",
          "Lines of the log that were dropped because its reader stood still.",
          lambda d: logs.dropped()),
    Plain("tickwheel_store_up", "1: commits go through, if only those without new tasks.",
          _store_up),
    Plain("tickwheel_store_full", "1: the store has no room.", _store_full),
    Plain("tickwheel_disk_used_ratio",
          "The used share of the disk with the database, as `df` shows it; 0: none is known.",
          lambda d: _seen(d).disk_used),
    Plain("tickwheel_disk_refuse_ratio",
          "The used share above which new tasks are refused (`disk_refuse`).",
          lambda d: d.settings.disk_refuse),
    Plain("tickwheel_store_replays_total",
          "Times batches were replayed to a store that had lost them.",
          lambda d: _losses(d.roles.store)[0]),
    Plain("tickwheel_store_rewrites_total",
          "Times everything was written anew to a store that had lost more.",
          lambda d: _losses(d.roles.store)[1]),
    Plain("tickwheel_store_moves_total",
          "Times another server had the store than before: a failover, or a slot that moved.",
          lambda d: _moves(d.roles.store)),
    Plain("tickwheel_history_dropped_total", "Events of the history that were not kept.",
          lambda d: _of(d.roles.history, lambda h: h.dropped)),
    Plain("tickwheel_history_spool_bytes", "What waits for the process that writes the history.",
          lambda d: _of(d.roles.history, lambda h: h.spool_bytes)),
    Plain("tickwheel_history_writer_restarts_total",
          "Times that process ended and was started again.",
          lambda d: _of(d.roles.history, lambda h: h.writer_restarts)),
    Plain("tickwheel_backup_last_success_timestamp_seconds",
          "When the newest daily backup was begun (Unix time); 0: none is known.",
          lambda d: _seen(d).backup_s),
    Plain("tickwheel_backup_daily", "1: daily backups are set up (`backup_daily_hour`).",
          lambda d: d.settings.backup_daily_hour is not None),
    Plain("tickwheel_dead_expire_timestamp_seconds",
          "When the next dead letter is deleted, at the earliest (Unix time); 0: none is known.",
          lambda d: _seen(d).dead_expire_s),
    Plain("tickwheel_groups_unused", "Groups that nobody has used for `group_unused_report_s`.",
          lambda d: _seen(d).groups_unused),
    Plain("tickwheel_settings_followed_total",
          "Groups and topics that were made, set or deleted because their home shard has them so.",
          lambda d: _seen(d).settings_followed),
    Plain("tickwheel_backup_failures_total", "Daily backups that failed.",
          lambda d: _seen(d).backup_failures),
    Plain("tickwheel_internal_errors_total",
          "Unexpected errors of one request or one task; the log has their tracebacks.",
          lambda d: _seen(d).internal_errors),
    Plain("tickwheel_spans_total", "Spans that the endpoint of OpenTelemetry has taken.",
          lambda d: _of(d.roles.exports, lambda e: e.spans_sent)),
    Plain("tickwheel_spans_dropped_total", "Spans that were not made, or not taken.",
          lambda d: _of(d.roles.exports, lambda e: e.spans_dropped)),
    Plain("tickwheel_otlp_failures_total",
          "Exports of spans or metrics that the endpoint has not taken.",
          lambda d: _of(d.roles.exports, lambda e: e.failures)),
    Plain("tickwheel_same_node_name_total", "Other daemons seen to lead under this node's name.",
          lambda d: _seen(d).namesakes),
    Plain("tickwheel_targets", "Groups that are sent to a URL, or to another broker.",
          lambda d: _of(d.outbound, lambda o: o.count(""))),
    Plain("tickwheel_targets_failing", "Those whose last attempt failed.",
          lambda d: _of(d.outbound, lambda o: o.count("failing"))),
    Plain("tickwheel_targets_open", "Those that are sent nothing for a while: their host fails.",
          lambda d: _of(d.outbound, lambda o: o.count("open"))),
    Plain("tickwheel_targets_ended", "Those whose endpoint answered 410.",
          lambda d: _of(d.outbound, lambda o: o.count("ended"))),
    Plain("tickwheel_target_attempts_total", "Attempts to send a task to a target.",
          lambda d: _of(d.outbound, lambda o: o.total("sent"))),
    Plain("tickwheel_target_failures_total", "Those that failed.",
          lambda d: _of(d.outbound, lambda o: o.total("failed"))),
    Plain("tickwheel_outbound_restarts_total", "How often the process that sends was restarted.",
          lambda d: _of(d.outbound, lambda o: o.restarts)),
    Plain("tickwheel_clock_held", "1: firing is held.", lambda d: d.roles.clock.held),
    Plain("tickwheel_clock_jumps_total", "Jumps noticed.", lambda d: d.roles.clock.jumps),
    Plain("tickwheel_scrape_seconds", "The scrape before this.", lambda d: _seen(d).scrape_s),
)  # fmt: skip
"""Metrics of the process, whatever its role."""

HISTOGRAMS: tuple[Distribution, ...] = (
    Distribution("tickwheel_delivery_lateness_seconds",
                 "First deliveries: from the due time until the frame was written.", "topic",
                 lambda seen: list(seen.lateness.by_topic.items()), 1000),
    Distribution("tickwheel_lateness_cause_seconds",
                 "First deliveries later than 100 ms, by what they waited for.", "cause",
                 lambda seen: [(each.value, of) for each, of in seen.lateness.by_cause.items()],
                 1000),
    Distribution("tickwheel_schedule_lateness_seconds",
                 "Occurrences of schedules: from the planned time until their task was made.", "",
                 lambda seen: [("", seen.schedule_late_ms)], 1000),
    Distribution("tickwheel_commit_seconds", "Batches: until the store had them durable.", "",
                 lambda seen: [("", seen.commit_s)]),
    Distribution("tickwheel_batch_changes", "Batches: rows they changed.", "",
                 lambda seen: [("", seen.batch_changes)]),
    Distribution("tickwheel_loop_lag_seconds",
                 "Ten probes a second: how much later than asked for the event loop ran them.", "",
                 lambda seen: [("", seen.loop_lag_s)]),
)  # fmt: skip

LOAD_HOURS = 24
HOUR_MS = 3_600_000


def _load(moment: Moment | None) -> dict[tuple[str, ...], float]:
    """How many tasks are due in each hour by the clock. Rotations are hours too, unless they are
    set otherwise, so that later ones are not looked into."""
    if moment is None:
        return {}
    wheel = moment.core.wheel
    hour_ms = max(1, HOUR_MS // wheel.tick_ms) * wheel.tick_ms
    hours, _ = wheel.load(moment.now_ms // hour_ms * hour_ms, hour_ms, LOAD_HOURS)
    return _by_label(enumerate(hours))


def _by_label(pairs: Iterable[tuple[object, float]]) -> dict[tuple[str, ...], float]:
    return {(str(label),): value for label, value in pairs}


def _build(daemon: Running) -> tuple[str, ...]:
    settings = daemon.settings
    store = settings.store.partition(":")[0]
    return __version__, platform.python_version(), store, settings.node


LABELLED: tuple[Labelled, ...] = (
    Labelled("tickwheel_store_errors_total",
             "Commits (refused, full, unknown) and election calls that failed.", ("kind",),
             lambda d, _: _by_label(_seen(d).store_errors.items())),
    Labelled("tickwheel_bulk_changes_total",
             "Tasks that bulk operations have changed, by what they do.", ("kind",),
             lambda d, _: _by_label(_seen(d).bulk_changes.items())),
    Labelled("tickwheel_load_tasks",
             "Tasks on the wheel that are due in this hour (0), in the next (1), and so on.",
             ("hour",), lambda _, moment: _load(moment)),
    Labelled("tickwheel_build_info",
             "1; version of this daemon and of Python, kind of store, node.",
             ("version", "python", "store", "node"), lambda d, _: {_build(d): 1}),
    Labelled("tickwheel_store_info",
             "1; the server that has the store now, empty when it has none.", ("server",),
             lambda d, _: {(d.roles.store_at or "",): 1}),
)  # fmt: skip
"""Metrics of the process by other labels than topic and group."""
OF_SHARDS = (
    ("tickwheel_shard_up", "1: the metrics of this shard are in this answer."),
    ("tickwheel_shard_restarts_total", "Times that this shard was started again."),
)
"""Names and meanings of what is said of each shard in the metrics of all of them, beside what they
say themselves; by ``shard``."""
OF_NODES = (
    ("tickwheel_nodes", "Nodes that live, as this daemon's node sees them.", "nodes"),
    ("tickwheel_node_shards", "Shards that this daemon's node leads.", "shards"),
    (
        "tickwheel_node_handovers_total",
        "Shards that this daemon's node has handed over to another one.",
        "handovers",
    ),
    (
        "tickwheel_node_handover_seconds",
        "For how long a shard had no daemon when it was handed over last.",
        "handover_seconds",
    ),
    (
        "tickwheel_node_unserved_shards",
        "Shards that no node leads, as this daemon's node sees them.",
        "unserved",
    ),
    ("tickwheel_route_version", "Grows when a shard is led by another daemon.", "route_version"),
)
"""Name, meaning and place in ``Member.measured`` of what each daemon of a node says of its node, by
``node``."""


PROCESS = (
    "process_cpu_seconds_total", "process_max_fds", "process_open_fds",
    "process_resident_memory_bytes", "process_start_time_seconds", "process_virtual_memory_bytes",
)  # fmt: skip
"""Metrics of every process, under the names that all programs use, by prometheus-client."""


def names() -> dict[str, tuple[str, ...]]:
    """Every metric and its labels."""
    return {
        **{metric.name: ("topic", "group") for metric in GROUP},
        **{metric.name: ("topic",) for metric in TOPIC},
        **{metric.name: () for metric in ENGINE},
        **{plain.name: () for plain in DAEMON},
        **{each.name: (each.label,) if each.label else () for each in HISTOGRAMS},
        **{labelled.name: labelled.labels for labelled in LABELLED},
    }
