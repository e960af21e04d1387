"""Is it late, and why: each row is one cause, in the order in which to look."""

from __future__ import annotations

from grafana.boards.parts import (
    JOB,
    LATE,
    PAIR,
    RATE,
    Dashboard,
    Panel,
    Row,
    heat,
    quantiles,
    rate,
    stat,
    total,
)

GUIDE = """\
**Late** is the time from a task's due millisecond until the frame of its first delivery was
written. Look from above to below; the first row that is not quiet is the cause.

1. **Nobody takes it**: ready tasks, no credit. More consumers, or quicker ones.
2. **It is held on purpose**: paused, or at its rate.
3. **Consumers die or hang**: leases end, tasks come again.
4. **The daemon is busy**: its loop lags, its processor is full.
5. **The store is slow or away**: commits take long, bodies are being read.
6. **It was not there**: a failover, a recovery, a clock that was held.
"""

WHY = Dashboard(
    "tickwheel-late",
    "Tickwheel: is it late, and why",
    "From the symptom to the cause.",
    [
        ("topic", "label_values(tickwheel_pending_tasks{" + JOB + "}, topic)"),
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
                stat(
                    "Later than 100 ms in 5 min",
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
                Panel(
                    "2. Paused (1)",
                    [
                        (
                            f"max by (topic, group) (tickwheel_paused{{{PAIR}}})",
                            "{{topic}}/{{group}}",
                        )
                    ],
                ),
                Panel(
                    "2. Held back by a rate (1)",
                    [
                        (
                            f"max by (topic, group) (tickwheel_throttled{{{PAIR}}})",
                            "{{topic}}/{{group}}",
                        )
                    ],
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
                    [(rate("process_cpu_seconds_total", JOB, "instance"), "{{instance}}")],
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
                Panel(
                    "6. Active, and serving",
                    [
                        (f"tickwheel_leader{{{JOB}}}", "{{instance}} active"),
                        (f"tickwheel_serving{{{JOB}}}", "{{instance}} serving"),
                    ],
                ),
                Panel(
                    "6. The last recovery",
                    [(f"tickwheel_recovery_seconds{{{JOB}}}", "{{instance}}")],
                    "s",
                ),
                Panel(
                    "6. The clock",
                    [
                        (f"tickwheel_clock_jumps_total{{{JOB}}}", "{{instance}} jumps"),
                        (f"tickwheel_clock_held{{{JOB}}}", "{{instance}} held"),
                    ],
                ),
            ]
        ),
    ],
)
