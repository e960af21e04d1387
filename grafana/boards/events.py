"""What is drawn into every dashboard as a line at its time, and what the metrics mean."""

from __future__ import annotations

from grafana.boards.parts import JOB
from tickwheel.server.metrics import catalogue

ANNOTATIONS = (
    (
        "Restart",
        f"changes(process_start_time_seconds{{{JOB}}}[2m]) > 0",
        "{{instance}} {{shard}} was started again",
        "orange",
    ),
    (
        "Failover",
        f"increase(tickwheel_failovers_total{{{JOB}}}[2m]) > 0",
        "{{instance}} took over",
        "red",
    ),
)
"""(name, expression, text, colour)"""

_TABLES = (
    catalogue.GROUP,
    catalogue.TOPIC,
    catalogue.ENGINE,
    catalogue.DAEMON,
    catalogue.HISTOGRAMS,
)
_OF_THE_PROCESS = {
    "process_cpu_seconds_total": "Processor time.",
    "process_resident_memory_bytes": "Memory of the process.",
    "process_open_fds": "Descriptors in use.",
    "process_max_fds": "Descriptors it may have.",
}
_RECORDED = {
    **{
        f"job:tickwheel_deliveries_late:ratio_rate{window}": (
            "Share of first deliveries that were late through the daemon, of those that nothing"
            f" else held back, in {window}."
        )
        for window in ("5m", "1h", "3d")
    },
    "job:tickwheel_lateness_budget:burn1h": (
        "How many times as many deliveries were late through the daemon in the last hour as the"
        " objective allows; at 1 the budget lasts its 30 days."
    ),
}
HELP: dict[str, str] = {
    **{metric.name: metric.help for table in _TABLES for metric in table},
    **{labelled.name: labelled.help for labelled in catalogue.LABELLED},
    **dict(catalogue.SHARD_METRICS),
    **{name: about for name, about, _ in catalogue.NODE_METRICS},
    **_OF_THE_PROCESS,
    **_RECORDED,
}
"""What each metric that stands in a dashboard means."""
