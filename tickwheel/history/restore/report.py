"""What a restore has done, and how exact it is. Values and sentences; no input or output."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

LISTED_MAX = 100
"""Ids of a kind that are listed; all are counted."""


@dataclass(slots=True)
class Listed:
    """Tasks of one kind: all counted, the first ones named."""

    count: int = 0
    ids: list[str] = field(default_factory=list)

    def add(self, task_id: int) -> None:
        self.count += 1
        if len(self.ids) < LISTED_MAX:
            self.ids.append(str(task_id))


@dataclass(slots=True)
class Report:
    """Times in ms since 1970; tasks as counts."""

    dry_run: bool = False
    backup: str | None = None
    backup_ms: int | None = None
    """The backup holds what had happened by then."""
    shard: int = 0
    # the history
    history: bool = False
    events: int = 0
    first_event_ms: int | None = None
    last_event_ms: int | None = None
    spool_events: int = 0
    """Found in a spool that no writer had turned into files."""
    reaches_back: bool = True
    """The history begins before the backup was made."""
    missing_events: int = 0
    dropped_events: int = 0
    drops: int = 0
    lost_bytes: int = 0
    torn_lines: int = 0
    unusable_events: int = 0
    crashes: int = 0
    """Since the backup; each may have lost the batch that was being appended."""
    clean_stop: bool = False
    """The newest event is a clean stop: nothing can have happened after it."""
    tail_ms: int | None = None
    """From the newest event to the last thing that was written to a spool."""
    # the tasks
    restored: int = 0
    from_backup: int = 0
    from_history: int = 0
    """Enqueued after the backup."""
    ended_since: int = 0
    """Ended after the backup was made, or were enqueued and ended since."""
    overdue: int = 0
    """Of those restored: due already, they go out at once."""
    waiting: int = 0
    dead_letters: int = 0
    groups: int = 0
    skipped_overdue: Listed = field(default_factory=Listed)
    without_body: Listed = field(default_factory=Listed)
    """Cannot be restored: enqueued after the backup, and the history holds no bodies."""
    not_found: Listed = field(default_factory=Listed)
    """Asked for by id, and not there."""
    refused: bool = False
    """Nothing was written, because tasks without a body would be missing."""
    epoch: int = 0
    id_mark: str = "0"

    @property
    def exact(self) -> bool:
        """The store is as it was when it was last written, as far as can be known, but for what
        was left out on demand."""
        return self.history and self.clean_stop and not self.gaps and not self.without_body.count

    @property
    def gaps(self) -> list[str]:
        """What is known to be missing from the history, in words."""
        found = []
        if self.history and not self.reaches_back:
            found.append("it begins after the backup was made")
        if self.missing_events:
            found.append(f"{self.missing_events:,} events are in no file")
        if self.drops:
            found.append(f"the daemon dropped {self.dropped_events:,} events or more")
        if self.crashes:
            found.append(
                f"a daemon crashed since the backup ({self.crashes}); the last batch before that"
                " may not be in it"
            )
        if self.lost_bytes:
            found.append(f"{self.lost_bytes:,} bytes of a spool are torn or damaged")
        if self.unusable_events:
            found.append(f"{self.unusable_events:,} events lack fields")
        return found

    def fields(self) -> dict[str, Any]:
        """For ``--json``."""
        return {**asdict(self), "exact": self.exact, "gaps": self.gaps}
