"""The torture's judge: each broken promise is found, and what is allowed is not."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from crash.checker import check
from crash.clocks import Clocks, Piece
from crash.link import Link, Lost
from crash.plan import Plan
from crash.records import (
    NO_CONNECTION,
    Accepted,
    Cast,
    Delivered,
    Finished,
    GroupLife,
    Journal,
    Looked,
    Moved,
    Refused,
    Requeued,
    Retry,
)
from crash.settle import Receipt, Settler

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


def test_a_correct_run_has_no_problems() -> None:
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


def test_a_delivery_of_a_refused_task_is_found() -> None:
    other = Journal("d", refused=[Refused(("y",), "draining")])
    other.delivered.append(replace(COME, id=8, token="y"))
    assert any("refused (draining)" in text for text in wrong(journal(), other))


def test_an_unanswered_task_can_be_stored_or_not() -> None:
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
    lines = journal(delivered=[COME, back], finished=[dead, ACKED])
    assert any("again: x" in text for text in wrong(lines))
    lines.requeued.append(Requeued(7, "g", 5_060))
    assert not wrong(lines)


def test_a_request_with_two_ids_is_found() -> None:
    twice = [Accepted("t", ("x",), (7,), (DUE_MS,)), Accepted("t", ("x",), (8,), (DUE_MS,))]
    assert any("duplicate" in text for text in wrong(journal(accepted=twice)))


def test_the_same_answer_twice_is_fine() -> None:
    assert not wrong(journal(accepted=[Accepted("t", ("x",), (7,), (DUE_MS,))] * 2))


def test_another_due_time_in_the_second_answer_is_found() -> None:
    twice = [Accepted("t", ("x",), (7,), (DUE_MS,)), Accepted("t", ("x",), (7,), (DUE_MS + 1,))]
    assert any("duplicate" in text for text in wrong(journal(accepted=twice)))


@pytest.mark.parametrize(("after_ms", "is_right"), [(0, True), (100, True), (101, False)])
def test_a_moment_outside_of_the_window_is_found(after_ms: int, is_right: bool) -> None:
    accepted = [Accepted("t", ("x",), (7,), (DUE_MS,), within_ms=100)]
    due_ms = DUE_MS + after_ms
    come = replace(COME, due_ms=due_ms, delivered_ms=max(COME.delivered_ms, due_ms))
    result = wrong(journal(accepted=accepted, delivered=[come]))
    assert any("a due time it never had" in text for text in result) != is_right


def test_a_second_task_that_was_never_confirmed_is_found() -> None:
    """A resend that was stored again: its id shows in a delivery only."""
    lines = journal(delivered=[COME, replace(COME, id=8)])
    assert any("several tasks: [7, 8]" in text for text in wrong(lines))


def test_an_id_of_two_tasks_is_found() -> None:
    other = Journal("d", accepted=[Accepted("t", ("y",), (7,), (DUE_MS,))])
    assert any("duplicate: id 7" in text for text in wrong(journal(), other))


def test_every_group_must_get_it() -> None:
    result = Journal("c", accepted=[Accepted("two", ("x",), (7,), (DUE_MS,))])
    result.delivered = [replace(COME, group="a"), replace(COME, group="b")]
    result.finished = [replace(ACKED, group="a")]
    assert wrong(result) == ["lost: x (id 7) came to b and its ack was never confirmed"]
    result.delivered.pop()
    assert wrong(result) == ["lost: x (id 7) never came to b"]


def test_a_cancelled_task_does_not_need_a_delivery() -> None:
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
    lines = journal(delivered=[COME, soon], retries=[retry])
    assert any("early: after" in text for text in wrong(lines))
    in_time = replace(soon, delivered_ms=5_080, got_ms=5_081)
    assert not wrong(journal(delivered=[COME, in_time], retries=[retry]))


# --- ttl, at most once, broadcast, priorities ------------------------------------------------


def brief(**more: Any) -> Journal:
    """A task that lives for 100 ms after its due time."""
    accepted = [Accepted("t", ("x",), (7,), (DUE_MS,), ttl_ms=100)]
    return journal(**({"accepted": accepted} | more))


def test_an_expired_task_does_not_need_a_delivery() -> None:
    gone = [Looked(7, "expired", DUE_MS + 100)]
    assert not wrong(brief(delivered=[], finished=[], looked=gone))
    assert not wrong(brief(looked=[Looked(7, "acked", 9_000)]))


@pytest.mark.parametrize(
    ("found", "word"),
    [
        (brief(delivered=[], finished=[], looked=[Looked(7, "expired", DUE_MS + 99)]), "expired"),
        (journal(delivered=[], finished=[], looked=[Looked(7, "expired", 9_000)]), "has no ttl"),
        (brief(delivered=[], finished=[], looked=[Looked(7, "gone", 9_000)]), "lost: x"),
        (brief(delivered=[replace(COME, delivered_ms=5_101, got_ms=5_101)]), "late: x"),
        (brief(looked=[Looked(7, "ready", 9_000)]), "'ready' at the end"),
    ],
)
def test_deliveries_after_the_ttl_are_found(found: Journal, word: str) -> None:
    assert any(word in text for text in wrong(found))


def test_at_most_once_is_never_delivered_twice() -> None:
    come = replace(COME, once=True)
    ended = [Looked(7, "acked", 9_000)]

    def found(*deliveries: Delivered, looked: Any = ended, unbroken: bool = False) -> list[str]:
        parts = journal(delivered=list(deliveries), finished=[], looked=looked)
        return check([parts], GROUPS, once={"t"}, unbroken=unbroken).violations

    assert not found(come)
    assert not found()
    again = replace(come, epoch=2, order=30)
    assert any("twice" in text for text in found(come, again))
    assert any("twice" in text for text in found(come, replace(again, once=False)))
    assert any("nothing broke" in text for text in found(unbroken=True))
    assert any("lost: x" in text for text in found(looked=[]))
    assert any("'ready'" in text for text in found(looked=[Looked(7, "ready", 9_000)]))


def test_a_priority_that_changed_is_found() -> None:
    accepted = [Accepted("t", ("x",), (7,), (DUE_MS,), priority=9)]
    assert any("priority: x" in text for text in wrong(journal(accepted=accepted)))
    assert not wrong(journal(accepted=accepted, delivered=[replace(COME, priority=9)]))


def test_a_broadcast_is_complete_and_without_repeats() -> None:
    accepted = [Accepted("t", ("x",), (7,), (DUE_MS,), sent=50, order=51)]

    def found(*deliveries: Delivered, confirmed: int = 40, lost: bool = False) -> list[str]:
        cast = Cast("t", 1, confirmed, lost, list(deliveries))
        return wrong(journal(accepted=accepted, casts=[cast]))

    come = replace(COME, group="")
    assert not found(come)
    assert any("not broadcast" in text for text in found())
    assert not found(lost=True)
    assert not found(confirmed=60), "it was enqueued before"
    assert any("broadcast 2 times" in text for text in found(come, come))
    assert any("early" in text for text in found(replace(come, delivered_ms=4_999)))


# --- groups that come and go ---------------------------------------------------------------------

LIFE = GroupLife("dyn", "g", "now", sent=100, confirmed=110, confirmed_ms=4_000)
KEEPER = GroupLife("dyn", "keeper", "first", sent=1, confirmed=2, confirmed_ms=1)
LATER = Accepted("dyn", ("x",), (7,), (DUE_MS,), sent=120, order=121)
BEFORE = replace(LATER, sent=90, order=91)


def lives(accepted: Accepted, *found: GroupLife, come: Any = (), ends: Any = ()) -> list[str]:
    parts = {"accepted": [accepted], "delivered": list(come), "finished": list(ends)}
    return check([journal(**parts, groups=list(found))], {}).violations


def got(group: str, order: int) -> Delivered:
    return replace(COME, group=group, order=order, connection=NO_CONNECTION)


def ended(group: str, order: int) -> Finished:
    return Finished(7, group, "acked", 1, 6_000, NO_CONNECTION, order)


KEPT = {"come": [got("keeper", 300)], "ends": [ended("keeper", 301)]}


@pytest.mark.parametrize(
    ("accepted", "life", "why"),
    [
        (LATER, LIFE, "enqueued after it"),
        (LATER, replace(LIFE, since="first"), "enqueued after it"),
        (LATER, replace(LIFE, since=DUE_MS), "enqueued after it"),
        (LATER, replace(LIFE, perhaps_since_ms=DUE_MS), "enqueued after it"),
        (BEFORE, replace(LIFE, since="first", confirmed_ms=DUE_MS), "still there"),
        (BEFORE, replace(LIFE, since=DUE_MS, confirmed_ms=DUE_MS), "still there"),
        (BEFORE, LIFE, "due after it"),
        (LATER, replace(LIFE, deleted=200, quiet=150, quiet_ms=DUE_MS), "held nothing"),
    ],
)
def test_a_missing_delivery_to_a_group_is_found(
    accepted: Accepted, life: GroupLife, why: str
) -> None:
    (text,) = lives(accepted, KEEPER, life, **KEPT)
    assert "lost: x (id 7) never came to g" in text
    assert why in text
    come, ends = [*KEPT["come"], got("g", 310)], KEPT["ends"]
    (text,) = lives(accepted, KEEPER, life, come=come, ends=ends)
    assert "its ack was never confirmed" in text
    assert not lives(accepted, KEEPER, life, come=come, ends=[*ends, ended("g", 320)])


@pytest.mark.parametrize(
    ("accepted", "life"),
    [
        (LATER, replace(LIFE, since=DUE_MS + 1)),
        (LATER, replace(LIFE, perhaps_since_ms=DUE_MS + 1)),
        (LATER, replace(LIFE, deleted=200)),
        (LATER, replace(LIFE, deleted=200, quiet=120, quiet_ms=DUE_MS)),
        (LATER, replace(LIFE, deleted=200, quiet=150, quiet_ms=DUE_MS - 1)),
        (BEFORE, replace(LIFE, confirmed_ms=DUE_MS)),
        (replace(LATER, sent=105, order=106), replace(LIFE, confirmed_ms=DUE_MS)),
    ],
)
def test_a_delivery_the_group_may_not_be_owed_is_not_required(
    accepted: Accepted, life: GroupLife
) -> None:
    assert not lives(accepted, KEEPER, life, **KEPT)


def test_tasks_finished_before_a_groups_confirmation_can_be_missing() -> None:
    first = replace(LIFE, since="first", confirmed_ms=DUE_MS)
    over = {"come": [got("keeper", 105)], "ends": [ended("keeper", 106)]}
    assert not lives(BEFORE, KEEPER, first, **over)
    other = replace(KEEPER, group="other", deleted=108)
    alone = {"come": [got("other", 300)], "ends": []}
    assert not lives(BEFORE, other, first, **alone), "nobody owed it for certain any more"
    replaced = replace(other, deleted=111)
    assert lives(BEFORE, replaced, first, **alone), "deleted after the new one was confirmed"


def test_acks_of_a_former_group_excuse_the_next() -> None:
    former = replace(LIFE, sent=10, confirmed=20, deleted=85, gone=86)
    first = replace(LIFE, since="first", confirmed_ms=DUE_MS)
    first_got = {"come": [got("g", 60), got("keeper", 300)], "ends": KEPT["ends"]}
    early = replace(BEFORE, sent=30, order=31)
    assert lives(early, KEEPER, former, first, **KEPT), "it never came to the former one"
    assert not lives(early, KEEPER, former, first, **first_got)


def test_the_first_group_after_a_gap_gets_the_backlog() -> None:
    gone = replace(KEEPER, deleted=50, deleted_ms=3_000, gone=60)
    late = replace(LIFE, confirmed_ms=DUE_MS)
    (text,) = lives(BEFORE, gone, late)
    assert "waiting for a group" in text
    during = replace(BEFORE, sent=55, order=56)
    (text,) = lives(during, gone, late)
    assert "due without a group" in text
    assert not lives(during, replace(gone, deleted_ms=DUE_MS), late)
    assert not lives(BEFORE, replace(gone, gone=None), late)
    assert not lives(BEFORE, gone, replace(late, since=DUE_MS + 1)), "others may begin before it"


def test_an_end_in_a_former_group_does_not_bind_the_next() -> None:
    dead = Finished(7, "g", "dead", 1, 4_500, 1, 80)
    come = [got("keeper", 300), got("g", 310)]
    ends = [ended("keeper", 301), ended("g", 320)]
    former = replace(LIFE, sent=10, confirmed=20, deleted=85, gone=86)
    assert not lives(LATER, KEEPER, former, LIFE, come=come, ends=[dead, *ends])
    once_only = lives(
        LATER, KEEPER, replace(LIFE, sent=10, confirmed=20), come=come, ends=[dead, *ends]
    )
    assert any("again: x" in text for text in once_only)


# --- clocks --------------------------------------------------------------------------------------

HOUR_MS = 3_600_000


def with_clock(*pieces: Piece, **lists: Any) -> list[str]:
    return check([journal(**lists)], GROUPS, clocks=Clocks(pieces)).violations


def piece(off_ms: int, from_ms: int = 0, until_ms: int | None = None, **more: Any) -> Piece:
    return Piece(0, from_ms, off_ms, 1.0, 2, until_ms, **more)


AHEAD = replace(COME, delivered_ms=HOUR_MS + 5_001)


def test_an_impossible_time_stamp_is_found() -> None:
    assert not with_clock(piece(HOUR_MS), delivered=[AHEAD])
    assert with_clock(piece(HOUR_MS)), "that was an hour before this clock"
    assert with_clock(piece(0), delivered=[AHEAD])
    stepped = (piece(0, 0, 4_000), piece(HOUR_MS, 4_000))
    assert not with_clock(*stepped, delivered=[AHEAD])
    assert not with_clock(
        *stepped,
        delivered=[replace(COME, due_ms=3_900, delivered_ms=3_950)],
        accepted=[Accepted("t", ("x",), (7,), (3_900,))],
    )
    since = replace(COME, due_ms=3_900, delivered_ms=3_950, since_ms=4_500)
    assert with_clock(*stepped, delivered=[since]), "its connection is younger than that"
    assert not with_clock(piece(0, 0, 4_000), piece(HOUR_MS, 4_000, loose=True))


def test_a_drifting_clock_shows_its_drift() -> None:
    clocks = Clocks([Piece(0, 0, 0, 1.1, 2)])
    assert clocks.may_have_shown(1_100, 0, 1_000)
    assert not clocks.may_have_shown(1_200, 0, 1_000)
    assert clocks.high(0, 1_000) == 1_102
    assert clocks.low(500, 1_000) == 548
    assert clocks.first_shown(1_100) in range(990, 1_001)


def test_order_after_a_confirmation_goes_by_clock_readings() -> None:
    behind = replace(
        COME, connection=NO_CONNECTION, due_ms=0, delivered_ms=5_200 - HOUR_MS, got_ms=5_300
    )
    first = replace(COME, due_ms=-HOUR_MS, delivered_ms=5_001 - HOUR_MS)
    accepted = [Accepted("t", ("x",), (7,), (-HOUR_MS,))]
    again = replace(behind, due_ms=-HOUR_MS)
    result = with_clock(piece(-HOUR_MS), accepted=accepted, delivered=[first, again])
    assert any("again: x" in text for text in result)
    under_way = replace(again, delivered_ms=5_050 - HOUR_MS)
    assert not with_clock(piece(-HOUR_MS), accepted=accepted, delivered=[first, under_way])


def test_a_nacks_delay_ends_when_the_clock_reached_it() -> None:
    retry = Retry(7, "g", 5_080, 1, 5_010, 1, 12)
    soon = replace(COME, attempt=2, delivered_ms=5_060, got_ms=5_061, order=14)
    assert with_clock(piece(0), delivered=[COME, soon], retries=[retry])
    jumped = (piece(0, 0, 5_040), piece(HOUR_MS, 5_040, 5_050), piece(0, 5_050))
    assert not with_clock(*jumped, delivered=[COME, soon], retries=[retry])


# --- how an ack was answered ------------------------------------------------------------------


async def test_an_unanswered_ack_can_have_ended_a_deleted_task() -> None:
    """Then another group's deletion ended the task, and nobody remembers who had acked it."""
    result = Journal("c")
    settler = Settler(cast(Plan, None), result, ("deleted",))
    receipt = Receipt("t", "g", 7, 1, 1)
    settler.word(receipt, "deleted", 1, 1, 1)
    assert not result.finished
    link = cast(Link, Unanswering())
    with pytest.raises(Lost):
        await settler.ack(link, [receipt])
    settler.word(receipt, "deleted", 1, 1, 1)
    assert [(end.id, end.group, end.how) for end in result.finished] == [(7, "g", "acked")]
    assert not result.odd


class Unanswering:
    """A connection that is lost before an answer came."""

    numbers = SimpleNamespace(last=1)

    def send(self, *_: object) -> None: ...

    async def wait(self, _: object) -> None:
        raise Lost("killed")
