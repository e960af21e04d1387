"""How many deliveries a worker asks for, by how fast its handlers end."""

from __future__ import annotations

import pytest

from tickwheel.client.worker import AHEAD_S, Ahead


def handlers_end(ahead: Ahead, rate: float, from_s: float, for_s: float) -> float:
    """At a steady rate; when the last one did."""
    count = int(rate * for_s)
    for number in range(1, count + 1):
        ahead.ended(from_s + number / rate)
    return from_s + count / rate


@pytest.mark.parametrize(("rate", "more"), [(100, 0), (20_000, 100), (1_000_000, 256)])
def test_prefetch_grows_by_what_handlers_start_in_a_few_ms(rate: float, more: int) -> None:
    ahead = Ahead(32, 32 + 256, 10.0)
    handlers_end(ahead, rate, 10.0, 2.0)
    assert ahead.prefetch == pytest.approx(32 + more, rel=0.25)
    assert ahead.prefetch <= 32 + 256
    assert ahead.is_ahead == (more > 0)


def test_slow_handlers_reduce_the_prefetch_to_the_concurrency() -> None:
    ahead = Ahead(4, 260, 0.0)
    now_s = handlers_end(ahead, 10_000, 0.0, 1.0)
    assert ahead.prefetch == 4 + int(10_000 * AHEAD_S)
    handlers_end(ahead, 50, now_s, 4.0)
    assert ahead.prefetch == 4


def test_stuck_handlers_lower_the_prefetch() -> None:
    ahead = Ahead(4, 260, 0.0)
    now_s = handlers_end(ahead, 10_000, 0.0, 1.0)
    assert ahead.look(now_s + 0.5)
    assert (ahead.prefetch, ahead.is_ahead) == (4, False)
    assert not ahead.look(now_s + 1.0), "nothing has changed"


def test_a_small_rate_change_keeps_the_prefetch() -> None:
    ahead = Ahead(4, 260, 0.0)
    now_s = handlers_end(ahead, 10_000, 0.0, 1.0)
    before = ahead.prefetch
    handlers_end(ahead, 11_000, now_s, 1.0)
    assert ahead.prefetch == before


def test_a_fixed_prefetch_never_changes() -> None:
    ahead = Ahead(9, 9, 0.0)
    handlers_end(ahead, 100_000, 0.0, 1.0)
    assert (ahead.prefetch, ahead.is_ahead) == (9, False)
