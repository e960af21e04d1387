"""Token buckets on a clock that a test moves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tickwheel.engine.queues import Bucket, adjusted_bucket


def test_a_bucket_starts_full_and_refills() -> None:
    bucket = Bucket(2.0, 3, 1_000)
    assert bucket.left(1_000) == 3
    bucket.take(3)
    assert bucket.left(1_499) == 0
    assert bucket.next_mono_ms() == 1_500
    assert bucket.left(1_500) == 1
    assert bucket.left(99_999) == 3


@pytest.mark.parametrize(("rate", "burst"), [(0.01, 1), (0.5, 1), (1.0, 1), (7.0, 7)])
def test_the_default_burst_is_one_second_and_at_least_one(rate: float, burst: int) -> None:
    assert Bucket(rate, None, 0).left(0) == burst


@given(
    st.floats(0.01, 5_000),
    st.integers(1, 50),
    st.lists(st.tuples(st.integers(0, 700), st.integers(1, 60)), max_size=60),
)
def test_a_bucket_never_exceeds_its_rate(
    rate: float, burst: int, steps: list[tuple[int, int]]
) -> None:
    bucket, now_ms, sent = Bucket(rate, burst, 0), 0, 0
    for pause_ms, wanted in steps:
        now_ms += pause_ms
        count = min(wanted, bucket.left(now_ms))
        bucket.take(count)
        sent += count
        assert sent <= burst + now_ms * rate / 1000 + 1e-3
        if bucket.left(now_ms) == 0:
            wake_ms = bucket.next_mono_ms()
            assert wake_ms > now_ms
            assert Bucket.left(bucket, wake_ms) >= 1, "it is there when it was said to be"
            now_ms = wake_ms


def test_a_changed_rate_gives_no_second_burst() -> None:
    bucket = Bucket(10.0, 10, 0)
    bucket.take(10)
    slower = adjusted_bucket(bucket, 1.0, 5, 0)
    assert slower is not None
    assert slower.left(0) == 0
    assert slower.left(1_000) == 1
    assert adjusted_bucket(slower, None, None, 0) is None
