"""The scenes, one family of verbs a file, as in ``tickwheel/api``."""

from verbs.scenes import (
    bulk,
    daemon,
    dead,
    deliveries,
    groups,
    nodes,
    schedules,
    targets,
    tasks,
    transactions,
)

__all__ = [
    "bulk", "daemon", "dead", "deliveries", "groups", "nodes", "schedules", "targets",
    "tasks", "transactions",
]  # fmt: skip
