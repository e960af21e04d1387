"""One topic and its groups."""

from __future__ import annotations

from grafana.boards.parts import (
    JOB,
    LATE,
    PAIR,
    RATE,
    TOPIC,
    Dashboard,
    Panel,
    Row,
    rate,
    stat,
    total,
)

TOPICS = Dashboard(
    "tickwheel-topic",
    "Tickwheel: topic and group",
    "One topic, some or all; topics beyond metrics_topics_max are summed up as _other.",
    [
        ("topic", "label_values(tickwheel_scheduled_tasks{" + JOB + "}, topic)"),
        ("group", "label_values(tickwheel_ready_tasks{" + TOPIC + "}, group)"),
    ],
    [
        Row(
            [
                stat("Scheduled", total("tickwheel_scheduled_tasks", TOPIC)),
                stat("Ready", total("tickwheel_ready_tasks", PAIR)),
                stat("In flight", total("tickwheel_in_flight_tasks", PAIR)),
                stat("Waiting for a retry", total("tickwheel_waiting_tasks", PAIR)),
                stat("Dead letters", total("tickwheel_dead_tasks", PAIR), red_above=1),
                stat(
                    "Oldest ready",
                    f"max(tickwheel_oldest_ready_age_seconds{{{PAIR}}})",
                    "s",
                    red_above=300,
                ),
            ],
            4,
        ),
        Row(
            [
                Panel(
                    "In",
                    [
                        (rate(f"tickwheel_{what}_total", TOPIC, "topic"), "{{topic}} " + what)
                        for what in ("enqueued", "cancelled", "kept", "replaced", "rejected")
                    ],
                    "ops",
                ),
                Panel(
                    "Out",
                    [
                        (
                            rate(f"tickwheel_{what}_total", PAIR, "topic, group"),
                            "{{topic}}/{{group}} " + what,
                        )
                        for what in ("delivered", "acked")
                    ]
                    + [(rate("tickwheel_broadcast_total", TOPIC, "topic"), "{{topic}} broadcast")],
                    "ops",
                ),
            ]
        ),
        Row(
            [
                Panel(
                    "Ready",
                    [(total("tickwheel_ready_tasks", PAIR, "topic, group"), "{{topic}}/{{group}}")],
                ),
                Panel(
                    "Age of the oldest ready task",
                    [
                        (
                            "max by (topic, group) (tickwheel_oldest_ready_age_seconds{"
                            + PAIR
                            + "})",
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
                    "Not straight",
                    [
                        (
                            rate(f"tickwheel_{what}_total", PAIR, "topic, group"),
                            "{{topic}}/{{group}} " + what,
                        )
                        for what in ("nacked", "retried", "dead", "expired", "filtered")
                    ],
                    "ops",
                ),
                Panel(
                    "Waiting for their turn",
                    [
                        (
                            total(f"tickwheel_{name}", PAIR, "topic, group"),
                            "{{topic}}/{{group}} " + what,
                        )
                        for name, what in (
                            ("line_tasks", "in lines"),
                            ("held_keys", "held keys"),
                            ("paused_keys", "paused keys"),
                        )
                    ],
                    about="Order keys and fair shares: tickwheel groups lines, groups held.",
                ),
                Panel(
                    "Held by consumers, and who could take more",
                    [
                        (
                            total(f"tickwheel_{name}", PAIR, "topic, group"),
                            "{{topic}}/{{group}} " + what,
                        )
                        for name, what in (
                            ("in_flight_tasks", "in flight"),
                            ("credit_tasks", "credit"),
                            ("subscribers", "subscriptions"),
                        )
                    ],
                ),
            ]
        ),
        Row(
            [
                Panel(
                    "Lateness by topic, p99",
                    [
                        (
                            "histogram_quantile(0.99, sum by (topic, le) (rate("
                            f'{LATE}_bucket{{job="$job",topic=~"($topic)|_other"}}[{RATE}])))',
                            "{{topic}}",
                        )
                    ],
                    "s",
                    about="Topics beyond metrics_lateness_topics_max share _other.",
                ),
                Panel(
                    "Pending",
                    [(total("tickwheel_scheduled_tasks", TOPIC, "topic"), "{{topic}}")],
                ),
            ]
        ),
        Row(
            [
                Panel(
                    "Largest backlogs",
                    [
                        (
                            f"topk(20, sum by (topic, group) (tickwheel_ready_tasks{{{JOB}}}))",
                            "",
                        )
                    ],
                    kind="table",
                ),
                Panel(
                    "Most dead letters",
                    [(f"topk(20, sum by (topic, group) (tickwheel_dead_tasks{{{JOB}}}))", "")],
                    kind="table",
                ),
            ]
        ),
    ],
)
