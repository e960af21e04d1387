"""What the clients of ``everything`` were told and handed, and the judge of it.

Nothing here asks the daemon's memory. A promise is held against what clients sent, when, and what
came: never early, one of an order key at a time, nothing acknowledged and lost, no answer that says
``internal``. What an operator did explains an end: a cancel, a time to live, a filter, a deletion.
Where two things happen at once the judge believes either order.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from crash.clocks import SLACK_MS, Clocks
from crash.link import now_ms
from tickwheel.client import Delivery
from tickwheel.errors import TickwheelError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Member = tuple[str, str]
"""Topic and group."""
LEASE_SURE = 0.8
"""Share of a lease, from its request, for which it surely holds."""
PROBLEMS_MAX = 20
ACKED_LATELY = 40


class Sent(NamedTuple):
    """A task that the daemon has acknowledged."""

    topic: str
    key: str | None
    has_ttl: bool


class Asked(NamedTuple):
    """A pull, as it was sent."""

    at_s: float
    at_ms: int
    lease_s: float
    era: int
    life: int


class _Held(NamedTuple):
    task_id: int
    until_s: float
    era: int


@dataclass(slots=True)
class Explained:
    """What operators asked for that may end a task without a delivery; asked is enough."""

    ids: set[int] = field(default_factory=set)
    keys: set[tuple[str, str]] = field(default_factory=set)
    """Topic and key: cancelled by key, or replaced by another task with it."""
    topics: set[str] = field(default_factory=set)
    """All tasks of it, by a bulk operation."""
    limited: set[tuple[str, str]] = field(default_factory=set)
    """Topic and key: asked to be replaced by a task with a time to live, whatever was answered."""

    def cancels(self, task_id: int, sent: Sent) -> bool:
        by_key = sent.key is not None and (sent.topic, sent.key) in self.keys
        return task_id in self.ids or by_key or sent.topic in self.topics


class Witness:
    """The witness of a run; ``problems`` is its verdict."""

    def __init__(self, clocks: Clocks, keeper: Member) -> None:
        """``keeper``: a group that is there from before the first task to the end and wants
        everything: each task of its topic is its, unless something explains its end."""
        self._clocks = clocks
        self._keeper = keeper
        self.problems: list[str] = []
        self.counts: Counter[str] = Counter()
        self.accepted: dict[int, Sent] = {}
        self.cancelled = Explained()
        self.deleted_topics: set[str] = set()
        self._acking: set[int] = set()
        self.acked_lately: deque[int] = deque(maxlen=ACKED_LATELY)
        """By one group; others may have them still."""
        self._kept: set[int] = set()
        """Tasks that the keeper has been handed."""
        self._held: dict[tuple[str, str, str], _Held] = {}
        """Topic, group and order key → who surely holds it."""
        self._era = 0
        """How often the daemon was started or ended: no lease is sure over that."""
        self._lives: Counter[Member] = Counter()

    def bad(self, text: str) -> None:
        if len(self.problems) < PROBLEMS_MAX:
            self.problems.append(text)

    def error(self, error: TickwheelError, what: str) -> None:
        """A client was refused."""
        self.counts[error.code] += 1
        if error.code == "internal":
            self.bad(f"{what} was answered internal: {error.message}")

    # --- what ends leases without a word to their consumers ------------------------------------

    def new_era(self) -> None:
        """The daemon has been ended, or is there again."""
        self._era += 1

    def new_life(self, topic: str, group: str) -> None:
        """The group is being deleted, or was."""
        self._lives[topic, group] += 1
        for key in [key for key in self._held if key[:2] == (topic, group)]:
            del self._held[key]

    # --- producers -------------------------------------------------------------------------------

    def stored(self, task_id: int, sent: Sent) -> None:
        self.accepted[task_id] = sent

    # --- consumers -------------------------------------------------------------------------------

    def asks(self, topic: str, group: str, lease_s: float) -> Asked:
        life = self._lives[topic, group]
        return Asked(time.monotonic(), now_ms(), lease_s, self._era, life)

    def took(self, asked: Asked, topic: str, group: str, got: Iterable[Delivery]) -> None:
        """The answer of a pull."""
        is_sure = (asked.era, asked.life) == (self._era, self._lives[topic, group])
        now_s, high_ms = time.monotonic(), self._clocks.high(asked.at_ms, now_ms())
        for delivery in got:
            self.counts["delivered"] += 1
            due_ms = round(delivery.due.timestamp() * 1000)
            if due_ms > high_ms + SLACK_MS:
                self.bad(f"{delivery.id} of {topic} is {due_ms - high_ms} ms early")
            if (topic, group) == self._keeper:
                self._kept.add(delivery.id)
            if delivery.order_key is not None:
                self._one_at_a_time(asked, (topic, group, delivery.order_key), delivery, now_s)
                if not is_sure:
                    self._held.pop((topic, group, delivery.order_key), None)

    def _one_at_a_time(
        self, asked: Asked, key: tuple[str, str, str], delivery: Delivery, now_s: float
    ) -> None:
        other = self._held.get(key)
        if other is not None and other.task_id != delivery.id and other.era == self._era:
            if now_s < other.until_s and asked.era == self._era:
                left_s = other.until_s - now_s
                again = f"attempt {delivery.attempt}, again of {delivery.replay_of}"
                self.bad(
                    f"two of {key} at once: {other.task_id}, whose lease holds for {left_s:.1f} s,"
                    f" and {delivery.id} ({again})"
                )
        until_s = asked.at_s + asked.lease_s * LEASE_SURE
        self._held[key] = _Held(delivery.id, until_s, asked.era)

    def ends(self, topic: str, group: str, delivery: Delivery, *, acks: bool) -> None:
        """It is about to be settled, or left to itself."""
        if acks:
            self._acking.add(delivery.id)
            self.acked_lately.append(delivery.id)
        if delivery.order_key is None:
            return
        key = topic, group, delivery.order_key
        held = self._held.get(key)
        if held is not None and held.task_id == delivery.id:
            del self._held[key]

    # --- the end ---------------------------------------------------------------------------------

    def counted(self, counts: Mapping[str, object], where: str) -> None:
        """What STATS says."""
        for name, value in counts.items():
            if type(value) is int and value < 0:
                self.bad(f"{name} of {where} is {value}")

    def ended(self, task_id: int, state: str) -> None:
        """How an acknowledged task has ended, as the daemon says when all is over."""
        sent = self.accepted[task_id]
        self.counts[f"ended {state}"] += 1
        if state == "acked":
            if task_id not in self._acking:
                self.bad(f"{task_id} of {sent.topic} counts as acked, and nobody acked it")
        elif state == "cancelled":
            if not self.cancelled.cancels(task_id, sent):
                self.bad(f"{task_id} of {sent.topic} is cancelled, and nobody wanted that")
            return
        elif state == "expired":
            if not sent.has_ttl and (sent.topic, sent.key) not in self.cancelled.limited:
                key = f"key {sent.key}"
                self.bad(f"{task_id} of {sent.topic}, {key}, has expired and had no time to live")
            return
        elif state not in ("deleted", "filtered"):
            self.bad(f"{task_id} of {sent.topic} was acknowledged, and is {state} in the end")
            return
        # One that was replaced while another group had it is not given to this one any more.
        is_replaced = sent.key is not None and (sent.topic, sent.key) in self.cancelled.keys
        is_kept = sent.topic == self._keeper[0] and not (sent.has_ttl or is_replaced)
        if is_kept and task_id not in self._kept:
            self.bad(f"{task_id} is {state}, and group {self._keeper[1]} never got it")

    def text(self) -> str:
        shown = ", ".join(f"{name} {count}" for name, count in sorted(self.counts.items()))
        return f"{len(self.accepted)} tasks acknowledged; {shown}"
