"""Ready tasks that are handed out in one step, because nothing has to be decided about them one by
one. For speed alone: whatever is not so is leased task by task (``Delivery._lease_all``), to the
same end. Their options are looked at as columns, which C does."""

from __future__ import annotations

from collections import Counter
from itertools import repeat
from typing import TYPE_CHECKING, Any

from tickwheel.engine.topics import PLAIN, Lease, traits_of
from tickwheel.model.records import NO_PAST, columns_bytes, columns_of, is_absent

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tickwheel.engine.topics import Group, Subscriber, Traits
    from tickwheel.model.records import Columns, TaskRow


class LeaseBatch:
    """Tasks that were just taken from the ready queue of a group, that are due and have their rows
    in memory, that nobody in the group has had, and whose time to live does not end. It is leased
    in one step, and is not a batch of the store."""

    __slots__ = ("ids", "marks", "rows", "size_bytes", "traits")

    def __init__(
        self,
        ids: Sequence[int],
        rows: list[TaskRow],
        size_bytes: int,
        marks: list[int] | None,
        traits: list[Traits] | None,
    ) -> None:
        self.ids = ids
        self.rows = rows
        self.size_bytes = size_bytes
        """The bytes of all tasks of the batch, as ``task_bytes`` counts them."""
        self.marks = marks
        """The marks of the tasks' order keys; None: no task has an order key."""
        self.traits = traits
        """The traits of the tasks; None: all are ``PLAIN``."""

    def part(self, places: Sequence[int]) -> LeaseBatch:
        """A batch of the tasks at these places, with the ``size_bytes`` of the whole."""
        marks, traits = self.marks, self.traits
        return LeaseBatch(
            list(map(self.ids.__getitem__, places)),
            list(map(self.rows.__getitem__, places)),
            self.size_bytes,
            None if marks is None else list(map(marks.__getitem__, places)),
            None if traits is None else list(map(traits.__getitem__, places)),
        )

    def leases(
        self, group: Group, subscriber: Subscriber, epoch: int, mono_ms: int
    ) -> dict[int, Lease]:
        """New leases of these tasks by id, the first delivery of each, beginning now."""
        leases = map(
            Lease,
            self.ids,
            repeat(group),
            repeat(subscriber),
            repeat(1),
            repeat(epoch),
            repeat(mono_ms),
            repeat(mono_ms + subscriber.lease_ms),
            [row[1] for row in self.rows],
            repeat(PLAIN) if self.traits is None else self.traits,
            repeat(NO_PAST),
            repeat(0) if self.marks is None else self.marks,
        )
        return dict(zip(self.ids, leases, strict=True))


def lease_batch_of(
    resident: Mapping[int, TaskRow], group: Group, ids: Sequence[int], now_ms: int
) -> LeaseBatch | None:
    """These ready tasks of a group as a batch; None: some of them have to be looked at one by one.
    ``resident``: rows in memory."""
    if not ids or group.stale or not _all_first(group, ids):
        return None
    if group.unjudged_id and min(ids) <= group.unjudged_id:
        return None
    rows: list[Any] = list(map(resident.get, ids))
    if not all(rows):
        return None
    _, dues_ms, _, bodies, options = zip(*rows, strict=True)
    if max(dues_ms) > now_ms:
        return None
    size_bytes = sum(map(len, bodies))
    if not any(options):
        return LeaseBatch(ids, rows, size_bytes, None, None)
    if not all(options):
        return None
    columns = columns_of(options)
    marks = _marks(columns)
    if not is_absent(columns.ttl_ms) or (marks is not None and not all(marks)):
        return None
    traits: list[Traits] | None = None
    others = (columns.key, columns.retry, columns.replayed)
    if any(columns.priority) or not all(map(is_absent, others)):
        traits = list(map(traits_of, rows))
    return LeaseBatch(ids, rows, size_bytes + columns_bytes(columns, options), marks, traits)


def _all_first(group: Group, ids: Sequence[int]) -> bool:
    """Whether nobody in the group has had any of these tasks."""
    attempts, numbers = group.delivery_attempts, group.numbers
    return (not attempts or attempts.keys().isdisjoint(ids)) and (
        not numbers or numbers.keys().isdisjoint(ids)
    )


def _marks(columns: Columns) -> list[int] | None:
    """The marks of the tasks' order keys; None: no task has one. 0 stands for a task that has to
    be looked at."""
    if is_absent(columns.order_key):
        return None
    return list(map(hash, columns.order_key)) if all(columns.order_key) else [0]


def share_out(
    wanted: Sequence[Subscriber | None], room: Mapping[Subscriber, int]
) -> tuple[dict[Subscriber, list[int]], bool]:
    """Who gets which places of ``wanted``: whoever is named there, if there is room, else somebody
    else; and whether there is such a place. ``room`` is enough for all."""
    numbers: dict[Any, int] = {subscriber: number for number, subscriber in enumerate(room)}
    found: Any = list(map(numbers.get, wanted, repeat(len(room))))
    places = sorted(range(len(wanted)), key=found.__getitem__)
    counts, begin = Counter(found), 0
    parts: dict[Subscriber, list[int]] = {}
    others: list[int] = []
    for subscriber, number in numbers.items():
        end = begin + min(counts[number], room[subscriber])
        parts[subscriber] = places[begin:end]
        begin += counts[number]
        others += places[end:begin]
    others = sorted(others + places[begin:])
    has_others = bool(others)
    while others:
        left = {one: count for one in room if (count := room[one] - len(parts[one]))}
        share = -(-len(others) // len(left))
        for subscriber, count in left.items():
            parts[subscriber] += others[: min(share, count)]
            del others[: min(share, count)]
    return {one: places for one, places in parts.items() if places}, has_others
