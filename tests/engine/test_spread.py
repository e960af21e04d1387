"""A crowd of tasks is spread over a due window: onto its emptiest ticks, each once, and nothing but
what is scheduled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

from support.engine_rig import Rig
from support.engine_rig_base import CONFIG
from tickwheel.model.kinds import Bulk, at_once
from tickwheel.model.records import TaskRow

CROWD = 600
TICK_MS = CONFIG.tick_ms
TICKS = 60
HOUR_MS, WINDOW_MS, DELAY_MS_MAX = 3_600_000, TICKS * TICK_MS, 10**12
STEP = 128


@pytest.fixture
def rig() -> Rig:
    return Rig()


def crowd(rig: Rig, count: int = CROWD, delay_ms: int = HOUR_MS, **options: Any) -> list[int]:
    ids = [i for _ in range(count) for i in rig.store(delay_ms=delay_ms, **options)]
    rig.commit()
    return ids


def heaviest(rig: Rig, ids: Iterable[int]) -> int:
    """How many of the tasks the tick has that has most of them."""
    ticks = Counter(row.due_ms // TICK_MS for row in rows(rig, ids))
    return max(ticks.values())


def rows(rig: Rig, ids: Iterable[int]) -> list[TaskRow]:
    return [known.row for known in rig.known(list(ids)).values()]


def spread(rig: Rig, ids: list[int], *, as_columns: bool, **arguments: int) -> Counter[str]:
    """What a bulk operation does in its steps; how many had each word."""
    change: Bulk = at_once("spread", arguments, rig.now_ms)
    words = Counter[str]()
    for start in range(0, len(ids), STEP):
        some = rig.known(ids[start : start + STEP])
        plain = {i: known.row.due_ms for i, known in some.items()} if as_columns else {}
        done = rig.engine.bulks.act(
            change, list(some.values()), "t", plain, {}, rig.now_ms, DELAY_MS_MAX
        )
        assert done.keys() == some.keys()
        words.update(word for word, _ in done.values())
        rig.commit()
    return words


@pytest.mark.parametrize("as_columns", [True, False])
def test_spreading_reduces_the_heaviest_tick(rig: Rig, as_columns: bool) -> None:
    ids = crowd(rig)
    assert heaviest(rig, ids) == CROWD
    words = spread(rig, ids, as_columns=as_columns, within_ms=WINDOW_MS)
    assert words == {"scheduled": CROWD}
    # The tick that they all come from counts as full until the wheel is asked again.
    assert heaviest(rig, ids) <= -(-CROWD // (TICKS - 1)) + 1
    due_ms = rig.now_ms + HOUR_MS
    assert all(due_ms <= row.due_ms < due_ms + WINDOW_MS for row in rows(rig, ids))
    assert len(rig.core.wheel) == CROWD == rig.core.scheduled


@pytest.mark.parametrize("as_columns", [True, False])
def test_an_explicit_window_replaces_the_due_times(rig: Rig, as_columns: bool) -> None:
    ids = [*crowd(rig, 50), *crowd(rig, 50, 2 * HOUR_MS)]
    start_ms = rig.now_ms + 5 * WINDOW_MS
    spread(rig, ids, as_columns=as_columns, start_ms=start_ms, within_ms=WINDOW_MS)
    result = rows(rig, ids)
    assert all(start_ms <= row.due_ms < start_ms + WINDOW_MS for row in result)
    assert heaviest(rig, ids) == 2


def test_full_ticks_are_avoided(rig: Rig) -> None:
    first = rig.now_ms + HOUR_MS
    taken = [
        i for n in range(30) for _ in range(3) for i in rig.store(delay_ms=HOUR_MS + n * TICK_MS)
    ]
    rig.commit()
    ids = crowd(rig, 30, 2 * HOUR_MS)
    spread(rig, ids, as_columns=True, start_ms=first, within_ms=WINDOW_MS)
    assert min(row.due_ms for row in rows(rig, ids)) >= first + 30 * TICK_MS, (
        "the second half is empty"
    )
    assert heaviest(rig, [*ids, *taken]) == 3


def test_a_started_window_begins_now(rig: Rig) -> None:
    ids = crowd(rig, 20)
    start_ms = rig.now_ms - WINDOW_MS // 2
    spread(rig, ids, as_columns=True, start_ms=start_ms, within_ms=WINDOW_MS)
    assert all(rig.now_ms <= row.due_ms < start_ms + WINDOW_MS for row in rows(rig, ids))
    over = crowd(rig, 5)
    spread(rig, over, as_columns=True, start_ms=start_ms, within_ms=WINDOW_MS // 4)
    assert {row.due_ms for row in rows(rig, over)} == {rig.now_ms}, "the window is over: at once"


def test_unscheduled_tasks_are_counted_by_state(rig: Rig) -> None:
    rig.subscribe(group="g", prefetch=1)
    now = crowd(rig, 3, 0)
    assert len(rig.tick()) == 1
    ids = [*now, *crowd(rig, 2)]
    before = {row.id: row.due_ms for row in rows(rig, now)}
    words = spread(rig, ids, as_columns=False, within_ms=WINDOW_MS)
    assert words == {"in_flight": 1, "ready": 2, "scheduled": 2}
    assert {row.id: row.due_ms for row in rows(rig, now)} == before
