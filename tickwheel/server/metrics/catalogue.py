"""Every metric: its name, help text, shape, and the source of its value.

Values are read from the engine's counts at each scrape; without scrapes they cost nothing. The text
format and the order of reading are in ``exposition``.

Names follow Prometheus: prefix ``tickwheel_``, base units (seconds, bytes), ``_total`` for
counters. Counters start with the process and continue if the daemon stops leading and leads again.
``docs/metrics.md`` has a line for each metric; a test compares them.
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
    """The engine that is read, and the time."""

    now_ms: int
    core: Core


@dataclass(frozen=True, slots=True)
class Metric(Generic[Subject]):
    """A metric with a value for each subject: group, topic or engine."""

    name: str
    help: str
    read: Callable[[Subject, Moment], float]
    merge: Callable[[float, float], float] = operator.add
    """Combines the values of several subjects."""

    @property
    def kind(self) -> str:
        return kind_of(self.name)


class Plain(NamedTuple):
    """A number of the process."""

    name: str
    help: str
    read: Callable[[Running], float]


class Labelled(NamedTuple):
    """Numbers of the process by label values; empty while there are none."""

    name: str
    help: str
    labels: tuple[str, ...]
    read: Callable[[Running, Moment | None], Mapping[tuple[str, ...], float]]
    """Its second argument is None if the daemon does not lead."""


class Distribution(NamedTuple):
    """A histogram of the process, or a histogram for each value of a label."""

    name: str
    help: str
    label: str
    """Name of the label; empty for a single histogram."""
    read: Callable[[Observed], Sequence[tuple[str, Histogram]]]
    divisor: float = 1
    """Divisor of exported values: 1000 converts milliseconds to seconds."""


@runtime_checkable
class CountsLosses(Protocol):
    """A store that can lose confirmed batches when it restarts."""

    @property
    def replays(self) -> int: ...
    @property
    def rewrites(self) -> int: ...


def _age_s(group: Group, now_ms: int) -> float:
    since_ms = group.oldest_since_ms()
    return max(0, now_ms - since_ms) / 1000 if since_ms is not None else 0


def _number_of(part: Part | None, read: Callable[[Part], float]) -> float:
    """Return a number that a part of the daemon provides, or 0 if the daemon lacks the part."""
    return 0 if part is None else read(part)


def _observed(daemon: Running) -> Observed:
    return daemon.roles.observed


def _value_of(name: str, daemon: Running) -> float:
    value: float = getattr(_observed(daemon), name)
    return value


def _epoch(daemon: Running) -> int:
    if daemon.roles.shard is not None:
        return daemon.roles.shard.epoch
    leader = daemon.roles.leader
    return leader.epoch if leader is not None else 0


def _store_up(daemon: Running) -> bool:
    shard = daemon.roles.shard
    if shard is not None:
        committer = shard.committer
        # A full store refuses only new tasks, which ``_store_full`` reports.
        if committer.stalled or (committer.trouble is not None and not committer.full):
            return False
    return not daemon.roles.observed.election_trouble


def _store_full(daemon: Running) -> bool:
    shard = daemon.roles.shard
    return shard is not None and shard.committer.full


def _moves(store: Store) -> int:
    return store.server_changes if isinstance(store, Located) else 0


def _losses(store: Store) -> tuple[int, int]:
    return (store.replays, store.rewrites) if isinstance(store, CountsLosses) else (0, 0)


def _paused_s(group: Group, now_ms: int) -> float:
    pauses = group.settings.paused_ms, group.topic.settings.paused_ms
    since_ms = min((at_ms for at_ms in pauses if at_ms is not None), default=now_ms)
    return max(0, now_ms - since_ms) / 1000


GROUP: tuple[Metric[Group], ...] = (
    Metric("tickwheel_ready_tasks", "Due tasks that wait for a consumer.",
           lambda g, _: g.ready_count),
    Metric("tickwheel_in_flight_tasks", "Delivered tasks that are not settled.",
           lambda g, _: len(g.flight)),
    Metric("tickwheel_waiting_tasks", "Tasks that wait for a retry.", lambda g, _: len(g.waiting)),
    Metric("tickwheel_dead_tasks", "Stored dead letters.", lambda g, _: g.dead),
    Metric("tickwheel_line_tasks",
           "Due tasks that wait for their turn: by order key, or by fair share of the group.",
           lambda g, _: g.awaiting_turn),
    Metric("tickwheel_held_keys", "Order keys that are held until an operator acts.",
           lambda g, _: g.held),
    Metric("tickwheel_paused_keys", "Keys that operators paused.",
           lambda g, _: len(g.paused_keys)),
    Metric("tickwheel_oldest_ready_age_seconds",
           "Longest waiting time of a ready task; 0 if no task is ready.",
           lambda g, moment: _age_s(g, moment.now_ms), max),
    Metric("tickwheel_subscribers", "Open subscriptions.", lambda g, _: len(g.subscribers)),
    Metric("tickwheel_credit_tasks", "Deliveries that the subscriptions can take immediately.",
           lambda g, _: sum(max(0, subscriber.credit) for subscriber in g.subscribers)),
    Metric("tickwheel_paused",
           "1 if deliveries are stopped because the group or its topic is paused.",
           lambda g, _: g.settings.paused or g.topic.settings.paused, max),
    Metric("tickwheel_paused_seconds",
           "Time since the group or its topic was paused; 0 if neither is paused.",
           lambda g, moment: _paused_s(g, moment.now_ms), max),
    Metric("tickwheel_throttled", "1 if a rate limit currently stops deliveries.",
           lambda g, moment: g in moment.core.throttled, max),
    Metric("tickwheel_delivered_total", "Deliveries, including retries.", lambda g, _: g.delivered),
    Metric("tickwheel_acked_total", "Tasks acknowledged by consumers.", lambda g, _: g.acked),
    Metric("tickwheel_nacked_total", "Nacks and rejects.", lambda g, _: g.nacked),
    Metric("tickwheel_snoozed_total", "Tasks snoozed by consumers.", lambda g, _: g.snoozed),
    Metric("tickwheel_consumer_deaths_total", "Consumers that died.", lambda g, _: g.deaths),
    Metric("tickwheel_retried_total", "Retries that became due.", lambda g, _: g.retried),
    Metric("tickwheel_dead_total", "Tasks that became dead letters.", lambda g, _: g.dead_lettered),
    Metric("tickwheel_expired_total", "Tasks not delivered within their ttl.",
           lambda g, _: g.expired),
    Metric("tickwheel_filtered_total", "Tasks excluded by the group's filter.",
           lambda g, _: g.filtered),
)  # fmt: skip
"""Metrics by topic and group. Due tasks of a topic without groups have an empty group label."""

TOPIC: tuple[Metric[Topic], ...] = (
    Metric("tickwheel_scheduled_tasks", "Tasks that are not yet due.", lambda t, _: t.scheduled),
    Metric("tickwheel_broadcasters", "Open broadcast subscriptions.",
           lambda t, _: len(t.broadcasters)),
    Metric("tickwheel_enqueued_total", "Tasks accepted.", lambda t, _: t.enqueued),
    Metric("tickwheel_cancelled_total", "Tasks cancelled.", lambda t, _: t.cancelled),
    Metric("tickwheel_kept_total", "Tasks not stored because their rule kept a pending task.",
           lambda t, _: t.merged[Merging.KEPT]),
    Metric("tickwheel_replaced_total", "Tasks that replaced a pending task with the same key.",
           lambda t, _: t.merged[Merging.REPLACED]),
    Metric("tickwheel_rejected_total",
           "Tasks not stored because their rule rejects a task with a pending key.",
           lambda t, _: t.merged[Merging.REJECTED]),
    Metric("tickwheel_broadcast_total", "Broadcast deliveries.", lambda t, _: t.broadcast),
)  # fmt: skip
"""Metrics by topic."""

ENGINE: tuple[Metric[Core], ...] = (
    Metric("tickwheel_early_total",
           "Tasks found not yet due at the last check before delivery; must stay 0.",
           lambda c, _: c.totals.early),
    Metric("tickwheel_rows_missing_total",
           "Unfinished tasks whose rows were missing in the store; must stay 0.",
           lambda c, _: c.totals.rows_missing),
    Metric("tickwheel_missing_tasks", "Tasks whose missing rows are still searched for.",
           lambda c, _: len(c.missing)),
    Metric("tickwheel_leases_over_total", "Leases that expired.",
           lambda c, _: c.totals.leases_over),
    Metric("tickwheel_dropped_once_total",
           "At-most-once deliveries dropped because their consumer had gone.",
           lambda c, _: c.totals.dropped_once),
    Metric("tickwheel_dead_expired_total", "Dead letters deleted after their retention.",
           lambda c, _: c.totals.dead_expired),
    Metric("tickwheel_schedules", "Recurring schedules.",
           lambda c, _: len(c.schedule_heap.by_name)),
    Metric("tickwheel_schedules_paused", "Paused recurring schedules.",
           lambda c, _: sum(planned.row.paused for planned in c.schedule_heap.by_name.values())),
    Metric("tickwheel_schedule_planned_total",
           "Occurrences of schedules that became due: fired, missed and overlapping.",
           lambda c, _: (c.totals.schedules_fired + c.totals.schedules_missed
                         + c.totals.schedules_overlapped)),
    Metric("tickwheel_schedule_fired_total", "Occurrences that became tasks.",
           lambda c, _: c.totals.schedules_fired),
    Metric("tickwheel_schedule_missed_total",
           "Occurrences skipped because their time had passed.",
           lambda c, _: c.totals.schedules_missed),
    Metric("tickwheel_schedule_overlapped_total",
           "Occurrences skipped because the previous task was unfinished.",
           lambda c, _: c.totals.schedules_overlapped),
    Metric("tickwheel_transactions_open", "Undecided transactions that are not parked.",
           lambda c, _: c.transaction_registry.undecided - c.transaction_registry.parked),
    Metric("tickwheel_transactions_parked",
           "Transactions that wait for an operator's decision after the maximum number of checks.",
           lambda c, _: c.transaction_registry.parked),
    Metric("tickwheel_half_tasks", "Half tasks of undecided transactions.",
           lambda c, _: c.transaction_registry.tasks),
    Metric("tickwheel_half_tasks_bytes", "Bytes of half tasks.",
           lambda c, _: c.transaction_registry.size_bytes),
    Metric("tickwheel_transactions_committed_total", "Committed transactions.",
           lambda c, _: c.totals.transactions_committed),
    Metric("tickwheel_transactions_rolled_back_total", "Rolled-back transactions.",
           lambda c, _: c.totals.transactions_rolled_back),
    Metric("tickwheel_transaction_checks_total",
           "Questions to producers about the outcome of a transaction.",
           lambda c, _: c.totals.transactions_checked),
    Metric("tickwheel_bulk_running", "Running bulk operations on all matching tasks.",
           lambda c, _: c.bulk_running),
    Metric("tickwheel_windows_total", "Tasks with a due window for which a due time was chosen.",
           lambda c, _: c.totals.windows),
    Metric("tickwheel_sessions", "Producer sessions remembered.", lambda c, _: len(c.sessions)),
    Metric("tickwheel_topics", "Topics.", lambda c, _: len(c.topics)),
    Metric("tickwheel_wheel_bytes", "Memory of the handles.", lambda c, _: c.wheel.memory_bytes),
    Metric("tickwheel_resident_bytes", "Memory of task bodies.", lambda c, _: c.resident_bytes),
    Metric("tickwheel_staged_bytes", "Bytes of enqueues that are not yet durable.",
           lambda c, _: c.open.staged_bytes + (c.sealed.staged_bytes if c.sealed else 0)),
    Metric("tickwheel_reading_tasks", "Due tasks whose rows are being read from the store.",
           lambda c, _: len(c.firing)),
)  # fmt: skip
"""Metrics of the engine. Gauges exist while the daemon is active."""

CONNECTION_METRICS = (
    ("tickwheel_login_failures_total", "Wrong or missing tokens, over TCP and HTTP.",
     "login_failures"),
    ("tickwheel_forbidden_total", "Requests refused because of a missing right.", "forbidden"),
    ("tickwheel_tokens_file_ok", "1 if the file of tokens was read successfully or is not set.",
     "tokens_file_ok"),
    ("tickwheel_audit_ok", "1 if the audit log can be written or is not set.", "audit_ok"),
    ("tickwheel_tls_failures_total", "Failed TLS handshakes on both ports.", "tls_failures"),
    ("tickwheel_certificate_ok",
     "1 if the certificate's files were read successfully or are not set.", "certificate_ok"),
    ("tickwheel_certificate_expires_seconds",
     "Expiry of the certificate (Unix time); 0 without a certificate.", "certificate_until_s"),
    ("tickwheel_http_requests_total", "Answered requests of the HTTP API.", "http_requests"),
    ("tickwheel_http_client_errors_total",
     "Requests of the HTTP API answered with a status of 400 to 499.", "http_client_errors"),
    ("tickwheel_http_server_errors_total",
     "Requests of the HTTP API answered with a status of 500 or more.", "http_server_errors"),
    ("tickwheel_http_under_way", "Unanswered requests of the HTTP API, including streams.",
     "http_under_way"),
    ("tickwheel_internal_errors_total",
     "Unexpected errors of single requests or tasks; the log has their tracebacks.",
     "internal_errors"),
)  # fmt: skip
"""Name, help text and attribute of ``Observed`` for each metric of connections, logins and single
requests. Daemons and the process that serves HTTP for all shards have these metrics."""
DAEMON_METRICS = (
    ("tickwheel_failovers_total", "Takeovers by this daemon.", "failovers"),
    ("tickwheel_deposed_total", "Times that this daemon stepped down.", "deposed"),
    ("tickwheel_recovery_seconds", "Duration of the last recovery until the daemon served.",
     "recovery_s"),
    ("tickwheel_load_seconds", "Duration of the last recovery until all tasks were in memory.",
     "load_s"),
    ("tickwheel_disk_used_ratio",
     "Used fraction of the database's disk, as shown by `df`; 0 if unknown.", "disk_used"),
    ("tickwheel_backup_last_success_timestamp_seconds",
     "Start of the newest successful daily backup (Unix time); 0 if none is known.", "backup_s"),
    ("tickwheel_backup_failures_total", "Daily backups that failed.", "backup_failures"),
    ("tickwheel_dead_expire_timestamp_seconds",
     "Earliest time at which a dead letter is deleted (Unix time); 0 if none is known.",
     "dead_expire_s"),
    ("tickwheel_groups_unused", "Groups unused for `group_unused_report_s`.", "groups_unused"),
    ("tickwheel_settings_followed_total",
     "Groups and topics that were created, changed or deleted to match their home shard.",
     "settings_followed"),
    ("tickwheel_same_node_name_total", "Times that another daemon led under this node's name.",
     "namesakes"),
    ("tickwheel_scrape_seconds", "Duration of the previous scrape.", "scrape_s"),
)  # fmt: skip
"""The same for metrics that only daemons have."""
DAEMON: tuple[Plain, ...] = (
    Plain("tickwheel_leader", "1 if this daemon is active.", lambda d: d.roles.role == "active"),
    Plain("tickwheel_serving", "1 if /readyz answers with status 200.", lambda d: readiness(d)[0]),
    Plain("tickwheel_standbys", "Standby daemons that this daemon sees.",
          lambda d: len(d.roles.standbys)),
    Plain("tickwheel_standbys_expected", "The setting expect_standbys.",
          lambda d: d.settings.expect_standbys),
    Plain("tickwheel_nodes_expected", "The setting expect_nodes.",
          lambda d: d.settings.expect_nodes),
    Plain("tickwheel_epoch", "Epoch of the active daemon, if known.", _epoch),
    Plain("tickwheel_role_start_time_seconds", "Time at which the daemon's role began (Unix time).",
          lambda d: d.roles.role_since_ms / 1000),
    Plain("tickwheel_loaded_tasks", "Tasks loaded by the last recovery.", lambda d: d.roles.loaded),
    Plain("tickwheel_connections", "Open connections.", lambda d: d.connection_count),
    *(
        Plain(name, text, partial(_value_of, field))
        for name, text, field in (*CONNECTION_METRICS, *DAEMON_METRICS)
    ),
    Plain("tickwheel_log_dropped_total",
          "Log lines dropped because the reader of the log was blocked.",
          lambda d: logs.dropped()),
    Plain("tickwheel_store_up", "1 if commits succeed, or succeed without new tasks.",
          _store_up),
    Plain("tickwheel_store_full", "1 if the store is full.", _store_full),
    Plain("tickwheel_disk_refuse_ratio",
          "Used fraction of the disk above which new tasks are refused (`disk_refuse`).",
          lambda d: d.settings.disk_refuse),
    Plain("tickwheel_store_replays_total",
          "Times that batches were replayed to a store that had lost them.",
          lambda d: _losses(d.roles.store)[0]),
    Plain("tickwheel_store_rewrites_total",
          "Times that all data was rewritten to a store that had lost more.",
          lambda d: _losses(d.roles.store)[1]),
    Plain("tickwheel_store_moves_total",
          "Times that the store moved to another server: a failover, or a moved hash slot.",
          lambda d: _moves(d.roles.store)),
    Plain("tickwheel_history_dropped_total", "History events that were not stored.",
          lambda d: _number_of(d.roles.history, lambda h: h.dropped)),
    Plain("tickwheel_history_spool_bytes", "Bytes that wait for the history writer process.",
          lambda d: _number_of(d.roles.history, lambda h: h.spool_bytes)),
    Plain("tickwheel_history_writer_restarts_total",
          "Restarts of the history writer process.",
          lambda d: _number_of(d.roles.history, lambda h: h.writer_restarts)),
    Plain("tickwheel_backup_daily", "1 if daily backups are configured (`backup_daily_hour`).",
          lambda d: d.settings.backup_daily_hour is not None),
    Plain("tickwheel_spans_total", "Spans accepted by the OpenTelemetry endpoint.",
          lambda d: _number_of(d.roles.exports, lambda e: e.spans_sent)),
    Plain("tickwheel_spans_dropped_total", "Spans that were not created or not accepted.",
          lambda d: _number_of(d.roles.exports, lambda e: e.spans_dropped)),
    Plain("tickwheel_otlp_failures_total",
          "Failed exports of spans or metrics to the OpenTelemetry endpoint.",
          lambda d: _number_of(d.roles.exports, lambda e: e.failures)),
    Plain("tickwheel_targets", "Groups with a target: a URL or another broker.",
          lambda d: _number_of(d.outbound, lambda o: o.count(""))),
    Plain("tickwheel_targets_failing", "Targets whose last attempt failed.",
          lambda d: _number_of(d.outbound, lambda o: o.count("failing"))),
    Plain("tickwheel_targets_open",
          "Targets paused by the circuit breaker because their host fails.",
          lambda d: _number_of(d.outbound, lambda o: o.count("open"))),
    Plain("tickwheel_targets_ended", "Targets whose endpoint answered 410.",
          lambda d: _number_of(d.outbound, lambda o: o.count("ended"))),
    Plain("tickwheel_target_attempts_total", "Attempts to send a task to a target.",
          lambda d: _number_of(d.outbound, lambda o: o.total("sent"))),
    Plain("tickwheel_target_failures_total", "Failed attempts to send a task to a target.",
          lambda d: _number_of(d.outbound, lambda o: o.total("failed"))),
    Plain("tickwheel_outbound_restarts_total",
          "Restarts of the process that sends tasks to targets.",
          lambda d: _number_of(d.outbound, lambda o: o.restarts)),
    Plain("tickwheel_inbox_taken_total", "Rows taken from the inbox of applications.",
          lambda d: _number_of(d.inbox, lambda i: i.total("taken"))),
    Plain("tickwheel_inbox_refused_total",
          "Rows of the inbox that the daemon refused; its table of refused rows has them.",
          lambda d: _number_of(d.inbox, lambda i: i.total("refused"))),
    Plain("tickwheel_inbox_waiting", "1 if rows of the inbox cannot be taken now.",
          lambda d: _number_of(d.inbox, lambda i: i.is_waiting)),
    Plain("tickwheel_inbox_delay_seconds",
          "Time from writing the oldest row of the last batch until its task was stored.",
          lambda d: _number_of(d.inbox, lambda i: i.delay_s)),
    Plain("tickwheel_inbox_restarts_total", "Restarts of the process that reads the inbox.",
          lambda d: _number_of(d.inbox, lambda i: i.restarts)),
    Plain("tickwheel_clock_held", "1 if the clock is held, so no task fires.",
          lambda d: d.roles.clock.held),
    Plain("tickwheel_clock_jumps_total", "Detected jumps of the wall clock.",
          lambda d: d.roles.clock.jumps),
)  # fmt: skip
"""Metrics of the process in any role."""

HISTOGRAMS: tuple[Distribution, ...] = (
    Distribution("tickwheel_delivery_lateness_seconds",
                 "Time from the due time of a first delivery until its frame was written.", "topic",
                 lambda seen: list(seen.lateness.by_topic.items()), 1000),
    Distribution("tickwheel_lateness_cause_seconds",
                 "Lateness of first deliveries over 100 ms, by cause.", "cause",
                 lambda seen: [
                     (cause.value, times) for cause, times in seen.lateness.by_cause.items()
                 ],
                 1000),
    Distribution("tickwheel_schedule_lateness_seconds",
                 "Time from the planned time of an occurrence until its task was created.", "",
                 lambda seen: [("", seen.schedule_late_ms)], 1000),
    Distribution("tickwheel_commit_seconds", "Time until a batch was durable in the store.", "",
                 lambda seen: [("", seen.commit_s)]),
    Distribution("tickwheel_batch_changes", "Rows changed by a batch.", "",
                 lambda seen: [("", seen.batch_changes)]),
    Distribution("tickwheel_loop_lag_seconds",
                 "Delay of the event loop, measured by ten timers a second.", "",
                 lambda seen: [("", seen.loop_lag_s)]),
)  # fmt: skip

LOAD_HOURS = 24
HOUR_MS = 3_600_000


def _load(moment: Moment | None) -> dict[tuple[str, ...], float]:
    """Return the number of tasks due in each hour of the clock. With the default settings, a
    rotation of the wheel also takes an hour, so later rotations are not searched."""
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
             "Failed commits (refused, full, unknown) and failed election calls.", ("kind",),
             lambda d, _: _by_label(_observed(d).store_errors.items())),
    Labelled("tickwheel_bulk_changes_total",
             "Tasks changed by bulk operations, by kind of operation.", ("kind",),
             lambda d, _: _by_label(_observed(d).bulk_changes.items())),
    Labelled("tickwheel_load_tasks",
             "Tasks on the wheel that are due in the current hour (0), the next hour (1), etc.",
             ("hour",), lambda _, moment: _load(moment)),
    Labelled("tickwheel_build_info",
             "1, with the versions of the daemon and Python, the kind of store and the node.",
             ("version", "python", "store", "node"), lambda d, _: {_build(d): 1}),
    Labelled("tickwheel_store_info",
             "1, with the server that currently has the store, if any.", ("server",),
             lambda d, _: {(d.roles.store_at or "",): 1}),
)  # fmt: skip
"""Metrics of the process with labels other than topic and group."""
SHARD_METRICS = (
    ("tickwheel_shard_up", "1 if this answer contains the metrics of the shard."),
    ("tickwheel_shard_restarts_total", "Restarts of the shard's daemon."),
)
"""Name and help text of the metrics by ``shard`` that the HTTP server for all shards adds."""
NODE_METRICS = (
    ("tickwheel_nodes", "Live nodes that this daemon's node sees.", "nodes"),
    ("tickwheel_node_shards", "Shards that this daemon's node leads.", "shards"),
    ("tickwheel_node_handovers_total",
     "Shards that this daemon's node handed over to another node.", "handovers"),
    ("tickwheel_node_handover_seconds",
     "Time without a daemon for the shard in the last handover.", "handover_seconds"),
    ("tickwheel_node_unserved_shards", "Shards without a leader that this daemon's node sees.",
     "unserved"),
    ("tickwheel_route_version",
     "Version of the route, which grows when another daemon leads a shard.", "route_version"),
)  # fmt: skip
"""Name, help text and key in ``Member.measured`` of metrics by ``node``."""


PROCESS = (
    "process_cpu_seconds_total", "process_max_fds", "process_open_fds",
    "process_resident_memory_bytes", "process_start_time_seconds", "process_virtual_memory_bytes",
)  # fmt: skip
"""Standard process metrics of prometheus-client."""


def names() -> dict[str, tuple[str, ...]]:
    """Return the labels of every metric by its name."""
    return {
        **{metric.name: ("topic", "group") for metric in GROUP},
        **{metric.name: ("topic",) for metric in TOPIC},
        **{metric.name: () for metric in ENGINE},
        **{plain.name: () for plain in DAEMON},
        **{metric.name: (metric.label,) if metric.label else () for metric in HISTOGRAMS},
        **{labelled.name: labelled.labels for labelled in LABELLED},
    }
