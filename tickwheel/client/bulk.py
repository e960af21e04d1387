"""What the daemon says of a bulk operation, and of a dry run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from tickwheel.api.times import moment

if TYPE_CHECKING:
    from datetime import datetime

    from tickwheel.client.results import Map

EXAMPLES_MAX: Final = 10


@dataclass(frozen=True, slots=True)
class BulkInfo:
    """What is done to everything of a topic that matches, and how far it is."""

    id: str
    kind: str
    """cancel, reschedule, run_now, requeue, delete; reset."""
    topic: str
    state: str
    """running, done, cancelled, failed."""
    looked_at: int
    matched: int
    changed: int
    refused: Mapping[str, int]
    """Of those that matched and were not changed: how many, by the reason."""
    rate: float | None
    note: str
    """Why it failed."""
    raw: Map = field(repr=False)

    @property
    def is_over(self) -> bool:
        return self.state != "running"

    @property
    def made(self) -> datetime:
        return moment(self.raw["made_ms"])

    @property
    def ended(self) -> datetime | None:
        ended_ms = self.raw["ended_ms"]
        return None if ended_ms is None else moment(ended_ms)

    @classmethod
    def of(cls, raw: Map) -> BulkInfo:
        return cls(
            str(raw["id"]),
            str(raw["kind"]),
            str(raw["topic"]),
            str(raw["state"]),
            int(raw["looked_at"]),
            int(raw["matched"]),
            int(raw["changed"]),
            _counts(raw["refused"]),
            raw["rate"],
            str(raw["note"]),
            raw,
        )


@dataclass(frozen=True, slots=True)
class BulkPreview:
    """What a bulk operation would do."""

    looked_at: int
    matched: int
    refused: Mapping[str, int]
    """Of those that match and would not be changed: how many, by the reason."""
    examples: tuple[int, ...]
    """Ids of the first that would be changed."""

    @property
    def would_change(self) -> int:
        return self.matched - sum(self.refused.values())

    def and_then(self, more: BulkPreview) -> BulkPreview:
        """This dry run together with its next part."""
        return replace(
            self,
            looked_at=self.looked_at + more.looked_at,
            matched=self.matched + more.matched,
            refused=dict(Counter(self.refused) + Counter(more.refused)),
            examples=(*self.examples, *more.examples)[:EXAMPLES_MAX],
        )

    @classmethod
    def of(cls, raw: Map) -> BulkPreview:
        counts = _counts(raw["refused"])
        examples = tuple(map(int, raw["examples"]))
        return cls(int(raw["looked_at"]), int(raw["matched"]), counts, examples)


@dataclass(frozen=True, slots=True)
class ResetPreview:
    """What a reset of a group would give it."""

    tasks: int
    first: datetime | None
    last: datetime | None
    """When the first and the last of them were due."""
    lost: int
    """Of so many more nobody has the bodies any more."""
    incomplete: int
    """Gaps that the history has in that time: more may be left out, and nobody can count it."""
    raw: Map = field(repr=False)

    @classmethod
    def of(cls, raw: Map) -> ResetPreview:
        first, last = (
            None if raw[name] is None else moment(raw[name]) for name in ("first_ms", "last_ms")
        )
        lost, incomplete = int(raw["lost"]), int(raw["incomplete"])
        return cls(int(raw["tasks"]), first, last, lost, incomplete, raw)


def _counts(raw: Any) -> dict[str, int]:
    return {str(word): int(count) for word, count in raw.items()}
