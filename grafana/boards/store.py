"""The store, and who leads."""

from __future__ import annotations

from grafana.boards.parts import (
    ACTIVE,
    JOB,
    LEADERS,
    LEADING,
    NODE,
    RATE,
    TROUBLE,
    YES,
    Dashboard,
    Panel,
    Row,
    heat,
    quantiles,
    rate,
    stat,
    states,
)

STORE = Dashboard(
    "tickwheel-store",
    "Tickwheel: store and failover",
    "Who is active, since when, how quick the store is, what it refused; history and backups.",
    [("instance", "label_values(tickwheel_build_info{" + JOB + "}, instance)")],
    [
        Row(
            [
                stat(
                    "Active daemons",
                    LEADING,
                    about="A second one has not noticed that it was deposed.",
                    states=LEADERS,
                    red_below=1,
                    red_above=2,
                ),
                stat("Epoch", f"max(tickwheel_epoch{{{JOB}}})"),
                stat(
                    "The active one is so since",
                    f"max(time() - (tickwheel_role_start_time_seconds{{{JOB}}}"
                    f" and tickwheel_leader{{{JOB}}} == 1))",
                    "s",
                ),
                stat(
                    "Store takes commits",
                    f"min(tickwheel_store_up{{{JOB}}} and tickwheel_leader{{{JOB}}} == 1)",
                    states=YES,
                    red_below=1,
                ),
                stat(
                    "Store full",
                    f"max(tickwheel_store_full{{{JOB}}})",
                    states=TROUBLE,
                    red_above=1,
                ),
                stat("Rows missing", f"max(tickwheel_missing_tasks{{{JOB}}})", red_above=1),
                stat(
                    "Clock held",
                    f"max(tickwheel_clock_held{{{JOB}}})",
                    states=TROUBLE,
                    red_above=1,
                ),
            ],
            4,
        ),
        Row(
            [
                states(
                    "Active, or standing by",
                    [(f"tickwheel_leader{{{NODE}}}", "{{instance}}")],
                    ACTIVE,
                    "With several daemons on one Redis exactly one is active.",
                ),
                Panel(
                    "Taken over, stepped down, followed",
                    [
                        (f"tickwheel_failovers_total{{{NODE}}}", "{{instance}} took over"),
                        (f"tickwheel_deposed_total{{{NODE}}}", "{{instance}} stepped down"),
                        (
                            f"tickwheel_settings_followed_total{{{NODE}}}",
                            "{{instance}} took settings from a home shard",
                        ),
                    ],
                ),
                Panel(
                    "The last recovery",
                    [
                        (f"tickwheel_recovery_seconds{{{NODE}}}", "{{instance}} until it served"),
                        (f"tickwheel_load_seconds{{{NODE}}}", "{{instance}} until all was there"),
                    ],
                    "s",
                ),
            ]
        ),
        Row(
            [
                Panel(
                    "Commit: until a batch is durable",
                    quantiles("tickwheel_commit_seconds", NODE, 0.5, 0.99, 0.999),
                    "s",
                ),
                heat("Commit", "tickwheel_commit_seconds", NODE),
            ]
        ),
        Row(
            [
                Panel(
                    "Rows a batch",
                    quantiles("tickwheel_batch_changes", NODE, 0.5, 0.99),
                ),
                Panel(
                    "Batches and rows a second",
                    [
                        (f"sum(rate(tickwheel_commit_seconds_count{{{NODE}}}[{RATE}]))", "batches"),
                        (f"sum(rate(tickwheel_batch_changes_sum{{{NODE}}}[{RATE}]))", "rows"),
                    ],
                    "ops",
                ),
                Panel(
                    "Enqueues on their way to the store",
                    [(f"tickwheel_staged_bytes{{{NODE}}}", "{{instance}}")],
                    "bytes",
                ),
            ]
        ),
        Row(
            [
                Panel(
                    "Store errors",
                    [(rate("tickwheel_store_errors_total", NODE, "instance, kind"), "{{kind}}")],
                    "ops",
                    stacked=True,
                ),
                Panel(
                    "A Redis that had lost something",
                    [
                        (f"tickwheel_store_replays_total{{{NODE}}}", "{{instance}} replayed"),
                        (f"tickwheel_store_rewrites_total{{{NODE}}}", "{{instance}} rewritten"),
                    ],
                ),
                Panel(
                    "Loaded at the last start",
                    [(f"tickwheel_loaded_tasks{{{NODE}}}", "{{instance}}")],
                ),
            ]
        ),
        Row(
            [
                Panel(
                    "History that waits for its writer",
                    [(f"tickwheel_history_spool_bytes{{{NODE}}}", "{{instance}}")],
                    "bytes",
                    about="At history_spool_bytes_max (256 MiB) history is dropped.",
                ),
                Panel(
                    "History: events dropped, writer restarted",
                    [
                        (f"tickwheel_history_dropped_total{{{NODE}}}", "{{instance}} dropped"),
                        (
                            f"tickwheel_history_writer_restarts_total{{{NODE}}}",
                            "{{instance}} writer restarted",
                        ),
                    ],
                ),
                Panel(
                    "Until the next dead letter is deleted",
                    [
                        (
                            "clamp_min(tickwheel_dead_expire_timestamp_seconds"
                            f"{{{NODE}}} - time(), 0)",
                            "{{instance}}",
                        ),
                    ],
                    "s",
                    about="0 when there is none. An alert comes two days before.",
                ),
                Panel(
                    "Age of the newest daily backup",
                    [
                        (
                            "time() - (tickwheel_backup_last_success_timestamp_seconds"
                            f"{{{NODE}}} > 0)",
                            "{{instance}}",
                        ),
                    ],
                    "s",
                    about="Nothing when backup_daily_hour is off.",
                ),
                Panel(
                    "Daily backups that failed",
                    [(f"tickwheel_backup_failures_total{{{NODE}}}", "{{instance}}")],
                ),
            ]
        ),
        Row(
            [
                Panel(
                    "Shards of one machine: there, started again",
                    [
                        (f"tickwheel_shard_up{{{NODE}}}", "{{instance}} there"),
                        (f"tickwheel_shard_restarts_total{{{NODE}}}", "{{instance}} restarts"),
                    ],
                    about="Of `tickwheel serve --http-all`; empty without.",
                ),
                Panel(
                    "Nodes: shards, those that nobody leads, hand-overs",
                    [
                        (f"max by (node) (tickwheel_node_shards{{{NODE}}})", "{{node}} shards"),
                        (f"max by (node) (tickwheel_nodes{{{NODE}}})", "{{node}} sees nodes"),
                        (
                            f"max by (node) (tickwheel_node_unserved_shards{{{NODE}}})",
                            "{{node}} sees unserved",
                        ),
                        (
                            f"max by (node) (tickwheel_node_handovers_total{{{NODE}}})",
                            "{{node}} handed over",
                        ),
                        (
                            f"max by (node) (tickwheel_node_handover_seconds{{{NODE}}})",
                            "{{node}} s of the last one",
                        ),
                        (f"max by (node) (tickwheel_route_version{{{NODE}}})", "{{node}} route"),
                    ],
                    about="Of a store with `?shards=N`; empty without.",
                ),
                Panel("Daemons", [(f"tickwheel_build_info{{{NODE}}}", "")], kind="table"),
                Panel(
                    "The store's server, and how often it moved",
                    [
                        (f"tickwheel_store_moves_total{{{NODE}}}", "{{instance}} moves"),
                        (f"tickwheel_store_info{{{NODE}}}", "{{instance}} on {{server}}"),
                    ],
                    about="Sentinel or Cluster: a failover, or a slot that went to another node.",
                ),
                Panel(
                    "Unexpected errors, other daemons of one name",
                    [
                        (f"tickwheel_internal_errors_total{{{NODE}}}", "{{instance}} errors"),
                        (f"tickwheel_same_node_name_total{{{NODE}}}", "{{instance}} of one name"),
                    ],
                    about="Both must stay 0. The log has the traceback of each error.",
                ),
                Panel(
                    "Refused: logins, requests without the right, handshakes",
                    [
                        (
                            f"rate(tickwheel_login_failures_total{{{NODE}}}[5m])",
                            "{{instance}} logins",
                        ),
                        (
                            f"rate(tickwheel_forbidden_total{{{NODE}}}[5m])",
                            "{{instance}} requests",
                        ),
                        (
                            f"rate(tickwheel_tls_failures_total{{{NODE}}}[5m])",
                            "{{instance}} handshakes",
                        ),
                    ],
                    about="A second. Somebody guesses, or a program has an old token or too few"
                    " rights, or does not trust the certificate.",
                ),
                Panel(
                    "The certificate: days left, files in order; the audit log",
                    [
                        (
                            f"clamp_min(tickwheel_certificate_expires_seconds{{{NODE}}}"
                            " - time(), 0) / 86400",
                            "{{instance}} days",
                        ),
                        (f"tickwheel_certificate_ok{{{NODE}}}", "{{instance}} in order"),
                        (f"tickwheel_audit_ok{{{NODE}}}", "{{instance}} audit log"),
                        (
                            f"rate(tickwheel_log_dropped_total{{{NODE}}}[5m])",
                            "{{instance}} lines dropped",
                        ),
                    ],
                    about="The first is 0 when there is no certificate, or it is over."
                    " The second is 0 when files that have changed cannot be used: the"
                    " certificate of before stays. The third is 0 when the log of what operators"
                    " do cannot be written. The fourth is above 0 while nobody reads the log.",
                ),
                Panel(
                    "Descriptors",
                    [
                        (f"process_open_fds{{{NODE}}}", "{{instance}} open"),
                        (f"process_max_fds{{{NODE}}}", "{{instance}} allowed"),
                    ],
                ),
                Panel(
                    "OpenTelemetry: spans, dropped, exports that failed",
                    [
                        (f"rate(tickwheel_spans_total{{{NODE}}}[5m])", "{{instance}} spans"),
                        (
                            f"rate(tickwheel_spans_dropped_total{{{NODE}}}[5m])",
                            "{{instance}} dropped",
                        ),
                        (
                            f"rate(tickwheel_otlp_failures_total{{{NODE}}}[5m])",
                            "{{instance}} failed",
                        ),
                    ],
                    about="A second. All are 0 without otlp_endpoint.",
                ),
            ]
        ),
    ],
)
