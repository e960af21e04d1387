"""Is it late, and why: each row is one cause, in the order in which to look."""

from __future__ import annotations

from grafana.boards.parts import (
    ACTIVE,
    CAUSE,
    HELD,
    JOB,
    LATE,
    PAIR,
    RATE,
    YES,
    Dashboard,
    Panel,
    Row,
    heat,
    quantiles,
    rate,
    stat,
    states,
    total,
)

GUIDE = """\
**Lateness** is the time from a task's due millisecond until the frame of its first delivery was
written. More than 100 ms is late, and has a **cause**. Look at the causes first, then at the row
of the cause.

1. **Nobody takes it** (`no_subscriber`, `no_credit`): more consumers, or quicker ones. `endpoint`:
   where a group is pushed or forwarded to is slow or away; `tickwheel push list` and
   `tickwheel forward list` say more.
2. **It is held on purpose** (`paused`, `key_paused`, `rate`).
3. **Consumers die or hang** (`lease_over`): leases end, tasks come again.
4. **The daemon is busy** (`loop_busy`): its loop lags, its processor is full.
5. **The store is slow or away** (`store`): commits take long, bodies are being read.
6. **It was not there** (`daemon_down`, `clock`): a failover, a recovery, a clock that jumped.
7. **Its turn has not come** (`key_busy`): an earlier task of the order key is not done, or the fair
   share has no place. `tickwheel groups lines TOPIC GROUP` says who waits for whom.
"""

WHY = Dashboard(
    "tickwheel-late",
    "Tickwheel: is it late, and why",
    "From the symptom to the cause.",
    [
        ("topic", "label_values(tickwheel_scheduled_tasks{" + JOB + "}, topic)"),
        ("group", "label_values(tickwheel_ready_tasks{" + JOB + "}, group)"),
    ],
    [
        Row(
            [
                Panel("How to read this", kind="text", about=GUIDE),
                heat("Lateness of everything", LATE, JOB),
                Panel("Lateness of everything", quantiles(LATE, JOB, 0.5, 0.99, 0.999), "s"),
            ],
            9,
        ),
        Row(
            [
                Panel(
                    "Late deliveries by cause",
                    [(rate(f"{CAUSE}_count", JOB, "cause"), "{{cause}}")],
                    "ops",
                    about="A second, later than 100 ms. The daemon is to blame for daemon_down,"
                    " clock, store and loop_busy.",
                    stacked=True,
                ),
                Panel(
                    "Seconds of lateness by cause",
                    [(rate(f"{CAUSE}_sum", JOB, "cause"), "{{cause}}")],
                    "s",
                    about="Of late deliveries, for each second.",
                    stacked=True,
                ),
                Panel(
                    "How quickly the budget is spent, in 1 h",
                    [("job:tickwheel_lateness_budget:burn1h{" + JOB + "}", "1 h")],
                    red_above=1,
                ),
            ]
        ),
        Row(
            [
                stat(
                    "Late through the daemon in 5 min",
                    "job:tickwheel_deliveries_late:ratio_rate5m{" + JOB + "}",
                    "percentunit",
                    red_above=0.001,
                ),
                stat(
                    "in 1 h",
                    "job:tickwheel_deliveries_late:ratio_rate1h{" + JOB + "}",
                    "percentunit",
                    red_above=0.001,
                ),
                stat(
                    "in 3 days",
                    "job:tickwheel_deliveries_late:ratio_rate3d{" + JOB + "}",
                    "percentunit",
                    red_above=0.001,
                ),
                stat("Early, must be 0", total("tickwheel_early_total"), red_above=1),
            ],
            4,
        ),
        Row(
            [
                Panel(
                    "1. Ready, and nobody who would take it",
                    [
                        (
                            f"sum by (topic, group) (tickwheel_ready_tasks{{{PAIR}}}"
                            f" * (tickwheel_credit_tasks{{{PAIR}}} == bool 0))",
                            "{{topic}}/{{group}}",
                        )
                    ],
                ),
                Panel(
                    "1. Credit: what consumers would take at once",
                    [
                        (
                            total("tickwheel_credit_tasks", PAIR, "topic, group"),
                            "{{topic}}/{{group}}",
                        )
                    ],
                ),
                Panel(
                    "1. Age of the oldest ready task",
                    [
                        (
                            f"max by (topic, group) (tickwheel_oldest_ready_age_seconds{{{PAIR}}})",
                            "{{topic}}/{{group}}",
                        )
                    ],
                    "s",
                ),
            ]
        ),
        Row(
            [
                states(
                    "2. Paused",
                    [
                        (
                            f"max by (topic, group) (tickwheel_paused{{{PAIR}}})",
                            "{{topic}}/{{group}}",
                        )
                    ],
                    HELD,
                ),
                states(
                    "2. Held back by a rate",
                    [
                        (
                            f"max by (topic, group) (tickwheel_throttled{{{PAIR}}})",
                            "{{topic}}/{{group}}",
                        )
                    ],
                    HELD,
                ),
                Panel(
                    "3. Leases that ended, retries, nacks",
                    [
                        (f"sum(rate(tickwheel_leases_over_total{{{JOB}}}[{RATE}]))", "leases over"),
                        (f"sum(rate(tickwheel_retried_total{{{PAIR}}}[{RATE}]))", "retried"),
                        (f"sum(rate(tickwheel_nacked_total{{{PAIR}}}[{RATE}]))", "nacked"),
                    ],
                    "ops",
                ),
            ]
        ),
        Row(
            [
                Panel(
                    "4. Lag of the event loop",
                    quantiles("tickwheel_loop_lag_seconds", JOB, 0.5, 0.99, 0.999),
                    "s",
                ),
                Panel(
                    "4. Processor",
                    [(rate("process_cpu_seconds_total", JOB, "instance, shard"), "{{instance}}")],
                    "percentunit",
                ),
                Panel(
                    "4. Scrapes",
                    [(f"tickwheel_scrape_seconds{{{JOB}}}", "{{instance}}")],
                    "s",
                ),
            ]
        ),
        Row(
            [
                Panel(
                    "5. Commit: until a batch is durable",
                    quantiles("tickwheel_commit_seconds", JOB, 0.5, 0.99),
                    "s",
                ),
                Panel(
                    "5. Due tasks whose records are being read",
                    [(f"tickwheel_reading_tasks{{{JOB}}}", "{{instance}}")],
                ),
                Panel(
                    "5. Store errors",
                    [(rate("tickwheel_store_errors_total", JOB, "kind"), "{{kind}}")],
                    "ops",
                ),
            ]
        ),
        Row(
            [
                states("6. Active", [(f"tickwheel_leader{{{JOB}}}", "{{instance}}")], ACTIVE),
                states("6. Serving", [(f"tickwheel_serving{{{JOB}}}", "{{instance}}")], YES),
                Panel(
                    "6. The last recovery",
                    [(f"tickwheel_recovery_seconds{{{JOB}}}", "{{instance}}")],
                    "s",
                ),
                Panel(
                    "6. Jumps of the clock",
                    [(f"tickwheel_clock_jumps_total{{{JOB}}}", "{{instance}}")],
                ),
                states(
                    "6. The clock is held",
                    [(f"tickwheel_clock_held{{{JOB}}}", "{{instance}}")],
                    HELD,
                ),
            ]
        ),
    ],
)
