"""The table of counts behind p50, p99 and max."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from tickwheel.server.metrics.observed import Lateness


def noted(values: list[int]) -> Lateness:
    lateness = Lateness()
    for value in values:
        lateness.note("t", [value])
    return lateness


def test_nothing_noted_is_zero() -> None:
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
