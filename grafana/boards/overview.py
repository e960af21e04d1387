"""Is it well?"""

from __future__ import annotations

from grafana.boards.parts import (
    CAUSE,
    JOB,
    LATE,
    LEADERS,
    LEADING,
    RATE,
    YES,
    Dashboard,
    Panel,
    Row,
    heat,
    quantiles,
    rate,
    stat,
    total,
)

OVERVIEW = Dashboard(
    "tickwheel-overview",
    "Tickwheel: overview",
    "Is it well? What comes in, what goes out, how late.",
    [],
    [
        Row(
            [
                stat(
                    "Active daemons",
                    LEADING,
                    about="Of each shard (a job, or a shard in it). A second one has not noticed"
                    " that it was deposed.",
                    states=LEADERS,
                    red_below=1,
                    red_above=2,
                ),
                stat(
                    "Serving",
                    f"min(max by (shard) (tickwheel_serving{{{JOB}}}))",
                    states=YES,
                    red_below=1,
                ),
                stat("Early, must be 0", total("tickwheel_early_total"), red_above=1),
                stat(
                    "Scheduled", total("tickwheel_scheduled_tasks"), console="tasks?state=scheduled"
                ),
                stat("Ready", total("tickwheel_ready_tasks"), console="tasks?state=ready"),
                stat(
                    "In flight", total("tickwheel_in_flight_tasks"), console="tasks?state=in_flight"
                ),
                stat(
                    "Waiting for a retry",
                    total("tickwheel_waiting_tasks"),
                    console="tasks?state=waiting",
                ),
                stat("Dead letters", total("tickwheel_dead_tasks"), red_above=1, console="dead"),
            ],
            4,
        ),
        Row(
            [
                Panel(
                    "Tasks a second",
                    [
                        (f"sum(rate(tickwheel_{what}_total{{{JOB}}}[{RATE}]))", what)
                        for what in ("enqueued", "delivered", "acked", "broadcast")
                    ],
                    "ops",
                ),
                Panel(
                    "How late first deliveries are",
                    quantiles(LATE, JOB, 0.5, 0.99, 0.999),
                    "s",
                ),
            ]
        ),
        Row(
            [
                heat("Lateness", LATE, JOB),
                Panel(
                    "Late through the daemon, share of the last hour (allowed: 0.1 %)",
                    [("job:tickwheel_deliveries_late:ratio_rate1h{" + JOB + "}", "1 h")],
                    "percentunit",
                    red_above=0.001,
                ),
                Panel(
                    "Late, and why",
                    [(rate(f"{CAUSE}_count", JOB, "cause"), "{{cause}}")],
                    "ops",
                    about="First deliveries a second that were later than 100 ms. The daemon is to"
                    " blame for daemon_down, clock, store and loop_busy.",
                    stacked=True,
                ),
            ]
        ),
        Row(
            [
                Panel(
                    "What did not go straight",
                    [
                        (f"sum(rate(tickwheel_{what}_total{{{JOB}}}[{RATE}]))", what)
                        for what in (
                            "nacked",
                            "snoozed",
                            "retried",
                            "leases_over",
                            "consumer_deaths",
                            "dead",
                            "expired",
                            "cancelled",
                            "dropped_once",
                            "dead_expired",
                        )
                    ],
                    "ops",
                ),
                Panel(
                    "Schedules",
                    [
                        (total("tickwheel_schedules"), "schedules"),
                        (total("tickwheel_schedules_paused"), "paused"),
                        *(
                            (f"sum(rate(tickwheel_schedule_{what}_total{{{JOB}}}[{RATE}]))", what)
                            for what in ("planned", "fired", "missed", "overlapped")
                        ),
                        (
                            f"sum(rate(tickwheel_schedule_lateness_seconds_sum{{{JOB}}}[{RATE}]))",
                            "seconds late",
                        ),
                    ],
                ),
                Panel(
                    "Transactions",
                    [
                        (total("tickwheel_transactions_open"), "open"),
                        (total("tickwheel_transactions_parked"), "parked"),
                        (total("tickwheel_half_tasks"), "half tasks"),
                        (total("tickwheel_half_tasks_bytes"), "their bytes"),
                        *(
                            (f"sum(rate(tickwheel_{what}_total{{{JOB}}}[{RATE}]))", said)
                            for what, said in (
                                ("transactions_committed", "committed a second"),
                                ("transactions_rolled_back", "rolled back a second"),
                                ("transaction_checks", "questions a second"),
                            )
                        ),
                    ],
                ),
                Panel(
                    "Bulk operations",
                    [
                        (total("tickwheel_bulk_running"), "running"),
                        (
                            f"sum by (kind) (rate(tickwheel_bulk_changes_total{{{JOB}}}[{RATE}]))",
                            "{{kind}} a second",
                        ),
                    ],
                ),
                Panel(
                    "The hours ahead",
                    [
                        (f"sum by (hour) (tickwheel_load_tasks{{{JOB}}})", "in {{hour}} h"),
                        (
                            f"sum(rate(tickwheel_windows_total{{{JOB}}}[{RATE}]))",
                            "windows a second",
                        ),
                    ],
                ),
                Panel(
                    "Connected",
                    [
                        (total("tickwheel_connections"), "connections"),
                        (total("tickwheel_subscribers"), "subscriptions"),
                        (total("tickwheel_groups_unused"), "groups that nobody uses"),
                        (total("tickwheel_broadcasters"), "broadcast subscriptions"),
                        (total("tickwheel_sessions"), "producer sessions remembered"),
                        (total("tickwheel_http_under_way"), "HTTP requests under way"),
                    ],
                ),
                Panel(
                    "Targets",
                    [
                        (total("tickwheel_targets"), "targets"),
                        (total("tickwheel_targets_failing"), "failing"),
                        (total("tickwheel_targets_open"), "left alone"),
                        (total("tickwheel_targets_ended"), "ended"),
                        *(
                            (f"sum(rate(tickwheel_{what}_total{{{JOB}}}[{RATE}]))", said)
                            for what, said in (
                                ("target_attempts", "sent a second"),
                                ("target_failures", "failed a second"),
                                ("outbound_restarts", "restarts a second"),
                            )
                        ),
                    ],
                ),
                Panel(
                    "Inbox",
                    [
                        (
                            f"sum(rate(tickwheel_inbox_taken_total{{{JOB}}}[{RATE}]))",
                            "taken a second",
                        ),
                        (total("tickwheel_inbox_refused_total"), "refused"),
                        (total("tickwheel_inbox_waiting"), "waiting"),
                        (total("tickwheel_inbox_delay_seconds"), "delay in s"),
                        (
                            f"sum(rate(tickwheel_inbox_restarts_total{{{JOB}}}[{RATE}]))",
                            "restarts a second",
                        ),
                    ],
                ),
                Panel(
                    "HTTP requests",
                    [
                        (f"sum(rate(tickwheel_http_{what}_total{{{JOB}}}[{RATE}]))", what)
                        for what in ("requests", "client_errors", "server_errors")
                    ],
                    "ops",
                ),
            ]
        ),
        Row(
            [
                Panel(
                    "Processor",
                    [(rate("process_cpu_seconds_total", JOB, "instance, shard"), "{{instance}}")],
                    "percentunit",
                ),
                Panel(
                    "Memory",
                    [
                        (f"process_resident_memory_bytes{{{JOB}}}", "{{instance}} process"),
                        (f"tickwheel_resident_bytes{{{JOB}}}", "{{instance}} bodies"),
                        (f"tickwheel_wheel_bytes{{{JOB}}}", "{{instance}} wheel"),
                    ],
                    "bytes",
                ),
            ]
        ),
    ],
)
