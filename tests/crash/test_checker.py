"""The torture's judge: each broken promise is found, and what is allowed is not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from crash.checker import check
from crash.records import (
    NO_CONNECTION,
    Accepted,
    Delivered,
    Finished,
    Journal,
    Moved,
    Refused,
    Requeued,
    Retry,
)

GROUPS = {"t": ("g",), "two": ("a", "b")}
DUE_MS = 5_000
COME = Delivered(7, "g", "x", 1, 1, DUE_MS, 5_001, 5_002, connection=1, order=10)
ACKED = Finished(7, "g", "acked", epoch=1, got_ms=5_100, connection=1, order=20)


def journal(**more: Any) -> Journal:
    """A good life: token x is task 7, came once, and its ack was confirmed."""
    lists: dict[str, Any] = {
        "accepted": [Accepted("t", ("x",), (7,), (DUE_MS,))],
        "delivered": [COME],
        "finished": [ACKED],
    }
    return Journal("c", **(lists | more))


def wrong(*journals: Journal) -> list[str]:
    return check(journals, GROUPS).violations


def test_a_good_life_is_fine() -> None:
    verdict = check([journal()], GROUPS)
    assert not verdict.violations
    assert (verdict.tasks, verdict.acked, verdict.deliveries, verdict.duplicates) == (1, 1, 1, 0)


def test_repeats_before_the_confirmation_are_counted_and_allowed() -> None:
    again = replace(COME, attempt=2, delivered_ms=5_090, got_ms=5_200, connection=2, order=30)
    verdict = check([journal(delivered=[COME, again])], GROUPS)
    assert not verdict.violations
    assert verdict.duplicates == 1


@pytest.mark.parametrize(
    ("lists", "word"),
    [
        ({"delivered": []}, "lost: x"),
        ({"finished": []}, "never confirmed"),
        ({"finished": [replace(ACKED, how="dead")]}, "never confirmed"),
        ({"finished": [replace(ACKED, group="other")]}, "never confirmed"),
        ({"delivered": [replace(COME, delivered_ms=4_999)]}, "early: x"),
        ({"delivered": [replace(COME, got_ms=4_999)]}, "early: x"),
        ({"delivered": [replace(COME, due_ms=4_000, delivered_ms=5_000)]}, "due: x"),
        ({"delivered": [replace(COME, token="y")]}, "lost: x"),
        ({"odd": ["the daemon said hm"]}, "c: the daemon said hm"),
        ({"refused": [Refused(("x",), "bad_request")]}, "was refused"),
        ({"accepted": [Accepted("t", ("x", "y"), (7,), (1, 1))]}, "2 tasks got"),
    ],
)
def test_each_broken_promise_is_found(lists: dict[str, Any], word: str) -> None:
    if lists.get("delivered") and lists["delivered"][0].token == "y":
        lists = {**lists, "delivered": [replace(lists["delivered"][0], id=8)]}
    assert any(word in text for text in wrong(journal(**lists)))


def test_a_refused_task_that_comes_without_ever_being_accepted_is_found() -> None:
    other = Journal("d", refused=[Refused(("y",), "draining")])
    other.delivered.append(replace(COME, id=8, token="y"))
    assert any("refused (draining)" in text for text in wrong(journal(), other))


def test_an_unanswered_task_may_come_or_not() -> None:
    assert not wrong(journal(), Journal("d", delivered=[replace(COME, id=8, token="y")]))


@pytest.mark.parametrize(
    "again",
    [
        replace(COME, order=21),
        replace(COME, connection=2, epoch=2),
        replace(COME, connection=NO_CONNECTION, delivered_ms=5_101, got_ms=5_102),
    ],
    ids=["later-on-the-connection", "higher-epoch", "stamped-later"],
)
@pytest.mark.parametrize("how", ["acked", "cancelled", "dead"])
def test_a_delivery_after_the_end_is_found(again: Delivered, how: str) -> None:
    group = None if how == "cancelled" else "g"
    ends = [ACKED, replace(ACKED, how=how, group=group)]
    assert any(
        "again: x" in text for text in wrong(journal(delivered=[COME, again], finished=ends))
    )


def test_a_delivery_under_way_at_the_end_is_allowed() -> None:
    """Another connection, the same epoch, stamped in the very millisecond or before."""
    for connection in (2, NO_CONNECTION):
        late = replace(COME, connection=connection, order=99, delivered_ms=5_100, got_ms=5_900)
        assert not wrong(journal(delivered=[COME, late]))
    unordered = replace(ACKED, connection=NO_CONNECTION, order=1)
    assert not wrong(journal(finished=[unordered]))


def test_a_requeue_brings_a_dead_letter_back() -> None:
    dead = Finished(7, "g", "dead", 1, 5_050, 1, 15)
    back = replace(COME, attempt=1, delivered_ms=5_070, got_ms=5_071, order=18)
    found = journal(delivered=[COME, back], finished=[dead, ACKED])
    assert any("again: x" in text for text in wrong(found))
    found.requeued.append(Requeued(7, "g", 5_060))
    assert not wrong(found)


def test_a_request_with_two_ids_is_found() -> None:
    twice = [Accepted("t", ("x",), (7,), (DUE_MS,)), Accepted("t", ("x",), (8,), (DUE_MS,))]
    assert any("duplicate" in text for text in wrong(journal(accepted=twice)))


def test_the_same_answer_twice_is_fine() -> None:
    assert not wrong(journal(accepted=[Accepted("t", ("x",), (7,), (DUE_MS,))] * 2))


def test_another_due_time_in_the_second_answer_is_found() -> None:
    twice = [Accepted("t", ("x",), (7,), (DUE_MS,)), Accepted("t", ("x",), (7,), (DUE_MS + 1,))]
    assert any("duplicate" in text for text in wrong(journal(accepted=twice)))


def test_a_second_task_that_nobody_was_told_of_is_found() -> None:
    """A resend that was stored again: its id shows in a delivery only."""
    found = journal(delivered=[COME, replace(COME, id=8)])
    assert any("several tasks: [7, 8]" in text for text in wrong(found))


def test_one_id_for_two_tasks_is_found() -> None:
    other = Journal("d", accepted=[Accepted("t", ("y",), (7,), (DUE_MS,))])
    assert any("duplicate: id 7" in text for text in wrong(journal(), other))


def test_every_group_must_get_it() -> None:
    found = Journal("c", accepted=[Accepted("two", ("x",), (7,), (DUE_MS,))])
    found.delivered = [replace(COME, group="a"), replace(COME, group="b")]
    found.finished = [replace(ACKED, group="a")]
    assert wrong(found) == ["lost: x (id 7) came to b and its ack was never confirmed"]
    found.delivered.pop()
    assert wrong(found) == ["lost: x (id 7) never came to b"]


def test_a_cancelled_task_needs_no_delivery() -> None:
    gone = replace(ACKED, group=None, how="cancelled")
    assert not wrong(journal(delivered=[], finished=[gone]))


def test_a_reschedule_counts_from_its_confirmation() -> None:
    later = Moved(7, 6_000, got_ms=4_000)
    at_old = journal(moved=[later])
    assert any("early" in text for text in wrong(at_old)), "came at its old due time"
    at_new = replace(COME, due_ms=6_000, delivered_ms=6_000, got_ms=6_001)
    acked = replace(ACKED, got_ms=6_100)
    assert not wrong(journal(moved=[later], delivered=[at_new], finished=[acked]))
    for unsure in (replace(later, got_ms=None), replace(later, got_ms=5_001)):
        assert not wrong(journal(moved=[unsure])), "it may have come first"
    back = Moved(7, 5_000, got_ms=4_500)
    assert not wrong(journal(moved=[later, back]))


def test_a_nack_delays_the_next_attempt() -> None:
    retry = Retry(7, "g", 5_080, 1, 5_010, 1, 12)
    soon = replace(COME, attempt=2, delivered_ms=5_060, got_ms=5_061, order=14)
    found = journal(delivered=[COME, soon], retries=[retry])
    assert any("early: after" in text for text in wrong(found))
    in_time = replace(soon, delivered_ms=5_080, got_ms=5_081)
    assert not wrong(journal(delivered=[COME, in_time], retries=[retry]))
