"""The table of counts behind p50, p99 and max, and the counts by cause."""

from __future__ import annotations

import asyncio
import random
import re
import time
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tickwheel.engine.topics import Item
from tickwheel.model.lateness import DAEMON_CAUSES, LATE_MS, SLOW_MS, Cause
from tickwheel.model.records import NO_PAST, TaskRow
from tickwheel.server.metrics.observed import PROBE_S, Lateness, Observed, probe_loop


def noted(values: list[int]) -> Lateness:
    lateness = Lateness()
    for value in values:
        lateness.note("t", [value])
    return lateness


def test_a_summary_without_samples_is_zero() -> None:
    assert Lateness().summary() == {"p50_ms": 0, "p99_ms": 0, "max_ms": 0, "count": 0}


def test_up_to_a_second_percentiles_are_exact() -> None:
    values = list(range(1, 1001))
    random.Random(1).shuffle(values)
    summary = noted(values).summary()
    assert summary == {"p50_ms": 500, "p99_ms": 990, "max_ms": 1000, "count": 1000}


@given(st.lists(st.integers(0, 2**40), min_size=1))
def test_a_percentile_is_an_upper_bound_within_a_factor_of_two(values: list[int]) -> None:
    lateness = noted(values)
    ordered = sorted(values)
    for share in (0.01, 0.5, 0.99, 1.0):
        true = ordered[max(0, -(-int(share * 1_000_000) * len(values) // 1_000_000) - 1)]
        measured = lateness.percentile_ms(share)
        assert true <= measured
        assert measured <= max(true, 2 * true)
    assert lateness.max_ms == ordered[-1]


LATE = LATE_MS + 1


def rows(*late_ms: int) -> list[Item]:
    return [(TaskRow(1, -late, "t", b""), 1, NO_PAST) for late in late_ms]


def counted(lateness: Lateness) -> dict[Cause, int]:
    return {cause: sum(one.counts) for cause, one in lateness.by_cause.items() if any(one.counts)}


def test_late_deliveries_are_counted_by_cause() -> None:
    lateness = Lateness()
    causes = [None, Cause.RATE, Cause.NO_CREDIT, Cause.RATE]
    lateness.note_causes(rows(0, LATE, 7_000, LATE), causes, 0)
    assert counted(lateness) == {Cause.RATE: 2, Cause.NO_CREDIT: 1}
    assert lateness.by_cause[Cause.RATE].sum == 2 * LATE
    assert lateness.by_cause[Cause.NO_CREDIT].sum == 7_000


def test_a_delivery_taken_in_time_waited_for_the_store() -> None:
    lateness = Lateness()
    lateness.note_causes(rows(LATE_MS, LATE), [None, None], 0)
    assert counted(lateness) == {Cause.STORE: 1}


def test_a_retry_is_not_counted() -> None:
    lateness = Lateness()
    lateness.note_causes([(rows(LATE)[0][0], 2, NO_PAST)], [None], 0)
    assert counted(lateness) == {}


def test_every_cause_is_documented_with_its_owner() -> None:
    manual = (Path(__file__).parents[3] / "docs/metrics.md").read_text()
    table = manual.partition("| cause | whose |")[2].partition("\n\n")[0]
    documented = re.findall(r"^\| `(\w+)` \| (.*?) ?\|", table, re.MULTILINE)
    assert [word for word, _ in documented] == [cause.value for cause in Cause]
    assert {word for word, whose in documented if whose == "daemon's"} == set(DAEMON_CAUSES)


async def test_the_probe_detects_a_busy_loop() -> None:
    observed, told = Observed(), asyncio.get_running_loop().create_future()
    observed.loop_busy = told.set_result
    probe = asyncio.create_task(probe_loop(observed))
    await asyncio.sleep(0)
    until_s = time.monotonic() + PROBE_S + SLOW_MS / 1000
    while time.monotonic() < until_s:
        pass  # the loop is busy with this
    assert await told >= PROBE_S * 1000 + SLOW_MS
    probe.cancel()
