"""What must be noted as it happens, because it cannot be read from memory later.

Once a batch, once a probe, once a frame; never once a task. Lives as long as the process, over
any number of tenures as the active daemon.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from tickwheel.engine.state import Core
from tickwheel.model.effects import Effects
from tickwheel.persistence.store import CommitRefused, CommitUnknown, StoreError
from tickwheel.server.histogram import Histogram
from tickwheel.server.lateness import Lateness

COMMIT_BOUNDS_S = (
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
BATCH_BOUNDS = (1, 2, 5, 10, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 50_000)
LAG_BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
PROBE_S = 0.1
REFUSED, FULL, UNKNOWN, ELECTION = "refused", "full", "unknown", "election"
STORE_ERROR_KINDS = (REFUSED, FULL, UNKNOWN, ELECTION)


class Observed:
    """Filled by the committer, the deliveries, the roles and the probe."""

    def __init__(self, lateness_topics_max: int = 100) -> None:
        self.lateness = Lateness(lateness_topics_max)
        self.commit_s = Histogram(COMMIT_BOUNDS_S)
        """From handing a batch to the store until it is durable, repetitions included."""
        self.batch_changes = Histogram(BATCH_BOUNDS)
        self.loop_lag_s = Histogram(LAG_BOUNDS_S)
        self.store_errors = dict.fromkeys(STORE_ERROR_KINDS, 0)
        self.election_trouble = False
        self.failovers = 0
        self.deposed = 0
        self.namesakes = 0
        self.recovery_s = 0.0
        """Of the last taking over, until it served."""
        self.load_s = 0.0
        """The same until everything was in memory."""
        self.backup_s = 0.0
        """When the newest daily backup was begun, Unix time; 0: none is known."""
        self.backup_failures = 0
        self.internal_errors = 0
        """Unexpected exceptions of one request or one task, which the daemon survived."""
        self.scrape_s = 0.0
        """How long the last reading of ``/metrics`` took."""
        self.ended: Callable[[Core], None] = lambda core: None
        """Called at the end of each tenure as the active daemon, before its engine is let go."""

    def committed(self, effects: Effects, elapsed_s: float) -> None:
        """A batch is durable."""
        self.commit_s.observe(elapsed_s)
        self.batch_changes.observe(
            len(effects.enqueued)
            + len(effects.updated)
            + len(effects.ended)
            + len(effects.progress)
            + len(effects.dead)
            + len(effects.groups)
            + len(effects.sessions)
        )

    def store_error(self, error: StoreError) -> None:
        """A commit did not go through at the first try."""
        if isinstance(error, CommitUnknown):
            kind = UNKNOWN
        else:
            kind = FULL if isinstance(error, CommitRefused) and error.full else REFUSED
        self.store_errors[kind] += 1

    def notice(self, event: str) -> None:
        """One of the shard's notices to the log."""
        if event == "deposed":
            self.deposed += 1
        elif event == "same_node_name":
            self.namesakes += 1
        elif event == "election_trouble":
            self.store_errors[ELECTION] += 1
            self.election_trouble = True
        elif event == "election_works_again":
            self.election_trouble = False
        elif event == "backup_failed":
            self.backup_failures += 1
        elif event == "internal_error":
            self.internal_errors += 1

    def backed_up(self, begun_s: float) -> None:
        """A daily backup is there that was begun then, by Unix time."""
        self.backup_s = begun_s


async def probe_loop(lag_s: Histogram) -> None:
    """For ever: how much later than asked for this task of the event loop runs."""
    while True:
        asked_s = time.monotonic() + PROBE_S
        await asyncio.sleep(PROBE_S)
        lag_s.observe(max(0.0, time.monotonic() - asked_s))
