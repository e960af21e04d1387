"""What is reckoned on paper: costs from measured times, and a fleet that is played."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.on_paper import Costs, Fleet, Master, fit, percentile, poisson

COSTS = Costs(300.0, 8.0, 100.0, 5.0, 64.0, 350.0)
FLEET = Fleet(nodes=2, masters=2, shards=8, pending=1_000_000, rate=40_000, trip_us=200.0)
SECONDS = 1.0


def test_costs_per_batch_and_task_are_fitted() -> None:
    rows = [(b, n, 300.0 * b + 8.0 * n) for b, n in ((400, 1000), (60, 1000), (3, 1000))]
    assert fit(rows) == pytest.approx((300.0, 8.0))


def test_a_fleet_with_spare_capacity_is_in_time() -> None:
    roomy = Master(FLEET, COSTS, seed=1)
    roomy.play(SECONDS)
    narrow = Master(replace(FLEET, rate=800_000), COSTS, seed=1)
    narrow.play(SECONDS)
    assert roomy.busy_us < 0.8 * SECONDS * 1e6 <= narrow.busy_us
    assert percentile(roomy.answered_ms, 0.99) < 10 < percentile(narrow.answered_ms, 0.99)
    assert percentile(roomy.late_ms, 0.99) < 10


@pytest.mark.parametrize("mean", [0.5, 8.0, 400.0])
def test_arrivals_have_the_requested_mean(mean: float) -> None:
    random = Master(FLEET, COSTS, seed=3)._random
    assert sum(poisson(random, mean) for _ in range(4000)) / 4000 == pytest.approx(mean, rel=0.1)
