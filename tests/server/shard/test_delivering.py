"""What is written to a consumer bears a time that is not before its due time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from support.engine_rig import Rig
from tickwheel.engine.firing import Broadcaster
from tickwheel.engine.topics import Dispatch
from tickwheel.model.lateness import Cause
from tickwheel.model.records import NO_PAST, TaskRow
from tickwheel.server.metrics.observed import Lateness
from tickwheel.server.shard.shard import Delivering


def test_a_broadcast_that_was_offered_before_the_clock_went_back_is_not_early() -> None:
    rig, written = Rig(), list[int]()
    owner = SimpleNamespace(deliver=lambda epoch, now_ms, items: written.append(now_ms))
    subscriber = Broadcaster(owner, rig.core.topic("t"), 10, "")
    delivering = Delivering(rig.engine, cast(Any, None), Lateness(10))
    items = [
        (TaskRow(1, rig.now_ms - 5, "t", b""), 1, NO_PAST),
        (TaskRow(2, rig.now_ms, "t", b""), 1, NO_PAST),
    ]
    delivering.write(Dispatch(subscriber, items, rig.now_ms + 3), rig.now_ms - 500_000)
    assert written == [rig.now_ms + 3]
    assert rig.core.totals.early == 0


def test_each_late_delivery_is_counted_by_cause() -> None:
    rig, lateness = Rig(), Lateness(10)
    subscriber = rig.subscribe()
    subscriber.sink = cast(Any, SimpleNamespace(deliver=lambda epoch, now_ms, items: None))
    delivering = Delivering(rig.engine, cast(Any, None), lateness)
    dues_ms = [rig.now_ms - late_ms for late_ms in (0, 500, 700)]
    items = [
        (TaskRow(number, due_ms, "t", b""), 1, NO_PAST) for number, due_ms in enumerate(dues_ms)
    ]
    some: list[Cause | None] = [None, Cause.RATE, Cause.PAUSED]
    delivering.write(Dispatch(subscriber, items, 0, some), rig.now_ms)
    delivering.write(Dispatch(subscriber, items[1:], 0, Cause.RATE), rig.now_ms)
    counts = {cause: sum(one.counts) for cause, one in lateness.by_cause.items()}
    assert {cause: count for cause, count in counts.items() if count} == {
        Cause.RATE: 3, Cause.PAUSED: 1,
    }  # fmt: skip
