"""Who is owed what when clocks jump, groups are made in the past, and daemons crash meanwhile.

``engine/test_ownership_model.py`` looks for what nobody has thought of; here are the known ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from support.engine_recount import recount
from support.engine_rig import CONFIG, Rig
from tickwheel.engine.ownership import order_of, owes
from tickwheel.model.records import BY_DUE_ALONE, GroupRow, GroupSettings, ProgressState, TaskRow

HOUR_MS = 3_600_000


def consume(rig: Rig, *groups: str) -> set[tuple[str, int]]:
    """What these groups get now, acked: (group, id)."""
    for group in groups:
        rig.subscribe(group=group)
    got = rig.tick()
    for item in got:
        assert rig.ack(item) == "acked"
    rig.commit()
    return {(item.group.name, item.id) for item in got}


def everywhere(*ids: int) -> set[tuple[str, int]]:
    return {(group, task_id) for group in "ab" for task_id in ids}


# --- clocks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("back_ms", [1, 2_500, HOUR_MS])
@pytest.mark.parametrize("crashes", [False, True])
@pytest.mark.parametrize("fires", [False, True])
def test_tasks_enqueued_after_a_group_belong_to_it_despite_the_clock(
    rig: Rig, back_ms: int, crashes: bool, fires: bool
) -> None:
    rig.create_group("t", "a")
    rig.after(5_000).fire()
    rig.create_group("t", "b")
    rig.commit()
    rig.now_ms -= back_ms
    early, late = rig.enqueue(), rig.enqueue(delay_ms=500)
    if fires:
        rig.fire()
    if crashes:
        rig.crash()
    rig.pass_time(500)
    assert consume(rig, "a", "b") == everywhere(early, late)
    assert rig.rows.is_empty()


@pytest.mark.parametrize("skew_ms", [-HOUR_MS, -3_000, 0, 3_000])
def test_a_takeover_with_another_clock_keeps_ownership(rig: Rig, skew_ms: int) -> None:
    rig.create_group("t", "a")
    before = rig.enqueue(delay_ms=1_000)
    rig.after(10).create_group("t", "b")
    rig.commit()
    rig.now_ms += skew_ms
    rig.crash()
    after = rig.enqueue(delay_ms=1_000)
    rig.pass_time(1_000 - min(0, skew_ms))
    assert consume(rig, "a", "b") == everywhere(before, after)


def test_a_group_made_with_the_clock_behind_gets_waiting_tasks(rig: Rig) -> None:
    """Ids from before the group, due times below what the wheel has passed."""
    rig.create_group("t", "a")
    rig.now_ms += HOUR_MS
    rig.fire()
    rig.now_ms -= HOUR_MS
    waits = rig.enqueue(delay_ms=600_000)
    rig.create_group("t", "b")
    rig.commit()
    rig.crash()
    rig.pass_time(600_000)
    assert consume(rig, "a", "b") == everywhere(waits)


@pytest.mark.parametrize("crashes", [False, True])
def test_memory_and_rows_agree_after_a_clock_set_back(rig: Rig, crashes: bool) -> None:
    """Due after the start of the new group by the clock, fired before it by the wheel."""
    rig.create_group("t", "a")
    fired, waits = rig.enqueue(delay_ms=HOUR_MS), rig.enqueue(delay_ms=2 * HOUR_MS)
    rig.after(HOUR_MS).fire()
    rig.now_ms -= HOUR_MS
    sooner = rig.enqueue(delay_ms=1_000)
    group = rig.create_group("t", "b")
    rig.commit()
    assert (group.since_ms <= rig.now_ms + 1_000) and not rig.core.topics["t"].replays
    if crashes:
        rig.crash()
    rig.pass_time(2 * HOUR_MS)
    assert consume(rig, "a", "b") == everywhere(fired, waits, sooner)


@pytest.mark.parametrize("move_ms", [0, 400])
@pytest.mark.parametrize("crashes", [False, True])
def test_a_task_moved_before_a_groups_start_still_belongs_to_it(
    rig: Rig, move_ms: int, crashes: bool
) -> None:
    rig.create_group("t", "a")
    far = rig.enqueue(delay_ms=HOUR_MS)
    rig.after(5_000).fire()
    rig.create_group("t", "b")
    rig.commit()
    rig.now_ms -= 3_000
    assert rig.reschedule(far, move_ms) == "scheduled"
    rig.commit()
    known = rig.find(far)
    assert known is not None and order_of(known.row) > far
    if crashes:
        rig.crash()
    rig.pass_time(move_ms)
    assert consume(rig, "a", "b") == everywhere(far)
    assert rig.enqueue() > order_of(known.row), "a place is given once"


@pytest.mark.parametrize("change", ["none", "made", "deleted"])
def test_tasks_that_may_need_a_place_do_not_move_as_columns(rig: Rig, change: str) -> None:
    rig.create_group("t", "a")
    far = rig.enqueue(delay_ms=HOUR_MS)
    rig.after(5_000).fire()
    if change == "made":
        rig.create_group("t", "b")
    elif change == "deleted":
        rig.close_group("t", "a")
    rig.commit()
    known = rig.find(far)
    assert known is not None
    asked = {far: rig.now_ms + 1_000}
    moved = rig.engine.control.reschedule_many("t", {far: known.row.due_ms}, lambda found: asked)
    assert moved == (asked if change == "none" else {})


def test_a_task_that_moves_as_usual_keeps_its_place(rig: Rig) -> None:
    for group in "ab":
        rig.create_group("t", group)
        rig.after(1_000).fire()
    far = rig.enqueue(delay_ms=HOUR_MS)
    for delay_ms in (0, 5, 2 * HOUR_MS):
        assert rig.reschedule(far, delay_ms) == "scheduled"
        known = rig.find(far)
        assert known is not None and known.row.options is None


# --- deletion ------------------------------------------------------------------------------------


def drained(rig: Rig, name: str) -> None:
    """Complete the deletion of a group."""
    for _ in range(20):
        group = rig.core.find_group("t", name)
        if group is None:
            return
        rig.fire()
        rig.drain(group)
        rig.commit()
    raise AssertionError("it does not end")


@pytest.mark.parametrize("ahead_ms", [0, 150, HOUR_MS])
@pytest.mark.parametrize("crashes", [False, True])
@pytest.mark.parametrize("others", [False, True])
def test_scheduled_tasks_survive_the_deletion_of_a_group(
    rig: Rig, ahead_ms: int, crashes: bool, others: bool
) -> None:
    rig.create_group("t", "g")
    if others:
        rig.create_group("t", "a")
    held = rig.enqueue()
    rig.fire()
    rig.now_ms += ahead_ms
    rig.fire()
    rig.now_ms -= ahead_ms
    scheduled = [rig.enqueue(delay_ms=delay_ms) for delay_ms in (1, 100, 600_000)]
    rig.close_group("t", "g")
    rig.commit()
    if crashes:
        rig.crash(down_ms=1)
    drained(rig, "g")
    if not (crashes and ahead_ms):
        # With the clock behind and a crash nothing records any more that it had fired.
        assert rig.state(held) == ("ready" if others else "deleted")
    rig.after(600_000).fire()
    assert [rig.state(task_id) for task_id in scheduled] == ["ready"] * 3
    assert {i for _, i in consume(rig, "a")} >= {*scheduled}


@pytest.mark.parametrize("crashes", [False, True])
def test_tasks_committed_after_a_deletion_do_not_belong_to_the_group(
    rig: Rig, crashes: bool
) -> None:
    """An enqueue that is confirmed after the deletion had not come due before it."""
    rig.create_group("t", "g")
    rig.commit()
    (staged,) = rig.stage()
    rig.close_group("t", "g")
    rig.commit()
    rig.fire()
    if crashes:
        rig.crash()
    drained(rig, "g")
    rig.fire()
    assert rig.state(staged) == "ready"
    assert consume(rig, "next") == {("next", staged)}


def test_handles_that_are_not_loaded_count_as_scheduled(rig: Rig) -> None:
    """The daemon deletes a group while the far part of its tasks is still being loaded."""
    rig.create_group("t", "g")
    far = rig.enqueue(delay_ms=5_000)
    rig.pass_time(10_000)
    rig.engine.recovery.handles_loaded(rig.now_ms - 6_000)
    group = rig.close_group("t", "g")
    known = rig.find(far)
    assert known is not None and not owes(group, known.row)


def test_a_task_moved_below_the_end_of_a_group_is_not_held_by_it(rig: Rig) -> None:
    rig.create_group("t", "g")
    rig.create_group("t", "a")
    far = rig.enqueue(delay_ms=HOUR_MS)
    rig.after(10_000).fire()
    rig.close_group("t", "g")
    rig.close_group("t", "a")
    rig.now_ms -= 5_000
    assert rig.reschedule(far, 0) == "scheduled"
    rig.commit()
    rig.crash()
    for name in "ga":
        drained(rig, name)
    rig.fire()
    assert rig.state(far) == "ready"


# --- a replay is an owner ------------------------------------------------------------------------

COUNT = 6


def replaying(rig: Rig, since_ms: int | None = 0) -> list[int]:
    """A group with tasks, and a new one for which only the first of them was looked at."""
    rig.create_group("t", "a")
    ids = rig.store(count=COUNT)
    rig.fire()
    rig.commit()
    group = rig.create_group("t", "b", since_ms, replays=False)
    rig.replay(group, 1)
    rig.commit()
    return ids


def finish_replay(rig: Rig) -> None:
    for topic in rig.core.topics.values():
        for group in list(topic.replays):
            while rig.replay(group, 2):
                recount(rig)


def delete_old(rig: Rig) -> None:
    group = rig.close_group("t", "a")
    for _ in range(2):
        rig.drain(group, 2)
        recount(rig)
        rig.commit()


def ack_old(rig: Rig) -> None:
    assert len(consume(rig, "a")) == COUNT
    recount(rig)


def ack_old_at_most_once(rig: Rig) -> None:
    rig.subscribe(group="a", at_most_once=True)
    rig.tick()
    rig.commit()
    assert len(rig.handed) == COUNT
    recount(rig)


def reject_old(rig: Rig) -> None:
    """Into the dead letters, and out of them."""
    rig.subscribe(group="a")
    for got in rig.tick():
        rig.reject(got)
        assert rig.delete_dead(got.id, "a") == "deleted"
    recount(rig)


def cut_off_old(rig: Rig) -> None:
    """Some in flight, some back, then all of it acked by receipts."""
    rig.subscribe(group="a")
    got = rig.tick()
    for item in got[:3]:
        rig.nack(item, 0)
    for item in got:
        assert rig.ack(item) == "acked"
    recount(rig)


@pytest.mark.parametrize(
    "ends", [delete_old, ack_old, ack_old_at_most_once, reject_old, cut_off_old]
)
@pytest.mark.parametrize("crashes", [False, True])
def test_unreplayed_tasks_outlive_their_other_groups(
    rig: Rig, ends: Callable[[Rig], None], crashes: bool
) -> None:
    ids = replaying(rig)
    ends(rig)
    rig.commit()
    recount(rig)
    if crashes:
        rig.crash()
        rig.fire()
    finish_replay(rig)
    recount(rig)
    assert {rig.state(task_id) for task_id in ids} == {"ready"}
    assert consume(rig, "b") == {("b", task_id) for task_id in ids}
    if ends is not delete_old:
        assert rig.rows.is_empty()
        assert {rig.state(task_id) for task_id in ids} == {"acked"}


def test_a_ttl_ending_during_a_replay_ends_the_task_once(rig: Rig) -> None:
    rig.create_group("t", "a")
    rig.store(count=3, ttl_ms=100)
    rig.fire()
    group = rig.create_group("t", "b", 0, replays=False)
    rig.after(101).fire()
    recount(rig)
    assert rig.core.totals.expired == 6, "once for each of the groups"
    rig.commit()
    assert rig.rows.is_empty()
    assert rig.replay(group) and not rig.replay(group)


def test_tasks_due_before_a_groups_start_end_with_their_group(rig: Rig) -> None:
    """The replay claims what the new group is owed, and nothing else."""
    rig.create_group("t", "a")
    early = rig.enqueue()
    rig.fire()
    rig.pass_time(1_000)
    since_ms = rig.now_ms
    late = rig.enqueue()
    rig.after(1_000).fire()
    rig.create_group("t", "b", since_ms, replays=False)
    assert consume(rig, "a") == {("a", early), ("a", late)}
    assert (rig.state(early), rig.state(late)) == ("acked", "ready")
    assert rig.rows.progress[late, "a"].state is ProgressState.DONE
    finish_replay(rig)
    assert consume(rig, "b") == {("b", late)}
    assert rig.rows.is_empty()


def test_a_replay_leaves_unfired_tasks_to_their_due_time(rig: Rig) -> None:
    rig.create_group("t", "a")
    (task_id,) = rig.stage()
    batch = rig.seal()
    assert batch is not None
    rig.apply()
    rig.engine.intake.mark_durable(batch)
    group = rig.create_group("t", "b", 0)
    assert group.ready_count == 0
    rig.engine.intake.land(batch, rig.now_ms)
    rig.fire()
    recount(rig)
    assert [group.ready_count for group in rig.core.topics["t"].groups.values()] == [1, 1]
    assert rig.state(task_id) == "ready"


def test_two_replays_each_get_everything_once(rig: Rig) -> None:
    ids = replaying(rig)
    third = rig.create_group("t", "c", 0, replays=False)
    rig.replay(third, 4)
    ack_old(rig)
    assert rig.replay(rig.group("t", "b"), 2)
    first = consume(rig, "b", "c")
    recount(rig)
    finish_replay(rig)
    second = consume(rig)
    assert not first & second
    assert first | second == {(group, task_id) for group in "bc" for task_id in ids}
    assert rig.rows.is_empty()


def test_a_replay_skips_tasks_the_group_acked(rig: Rig) -> None:
    """It fired with the new group there, and the replay has still to pass it."""
    rig.create_group("t", "a")
    task_id = rig.enqueue(delay_ms=10)
    rig.create_group("t", "b", 0, replays=False)
    rig.pass_time(10)
    assert consume(rig, "b") == {("b", task_id)}
    assert consume(rig, "a") == {("a", task_id)}
    assert rig.rows.is_empty()
    finish_replay(rig)


def test_a_recreated_group_keeps_earlier_acks(rig: Rig) -> None:
    rig.create_group("t", "a")
    rig.create_group("t", "b")
    ids = rig.store(count=2)
    consume(rig, "b")
    rig.delete_group("t", "b")
    rig.create_group("t", "b", 0, replays=False)
    consume(rig, "a")
    assert {rig.state(task_id) for task_id in ids} == {"ready"}
    finish_replay(rig)
    assert consume(rig, "b") == set()
    assert rig.rows.is_empty()


def acked_by_a_former_one(rig: Rig) -> list[int]:
    """Two tasks that a group and a former group of another one's name have acked; the replay of
    that one has still to find out."""
    rig.create_group("t", "a")
    rig.create_group("t", "b")
    ids = rig.store(count=2)
    consume(rig, "b")
    rig.delete_group("t", "b")
    rig.create_group("t", "b", 0, replays=False)
    consume(rig, "a")
    return ids


def test_a_task_acked_by_all_is_not_rescheduled(rig: Rig) -> None:
    ids = acked_by_a_former_one(rig)
    assert rig.reschedule(ids[0], 5_000) == "acked"
    recount(rig)
    finish_replay(rig)
    rig.commit()
    assert rig.rows.is_empty()
    rig.pass_time(5_000)
    assert consume(rig, "b") == set()


def test_deleting_a_recreated_group_keeps_earlier_acks(rig: Rig) -> None:
    ids = acked_by_a_former_one(rig)
    rig.close_group("t", "b")
    recount(rig)
    rig.drain(rig.group("t", "b"), 50)
    rig.commit()
    assert {rig.state(task_id) for task_id in ids} == {"acked"}
    assert rig.rows.is_empty()


@pytest.mark.parametrize("how", ["expired", "deleted"])
def test_an_unacked_task_does_not_end_as_acked(rig: Rig, how: str) -> None:
    """A former group was done with it, and not by an ack; then the last one that owed it goes."""
    rig.create_group("t", "a")
    rig.create_group("t", "b")
    [task_id] = rig.store(ttl_ms=1_000 if how == "expired" else None)
    for group in "ab":
        rig.subscribe(group=group)
    got = {delivery.group.name: delivery for delivery in rig.tick()}
    if how == "expired":
        rig.release(got["b"])
        rig.pass_time(1_001)
        assert rig.tick() == []
    else:
        rig.reject(got["b"])
        rig.delete_dead(task_id, "b")
    assert rig.views(task_id)["b"][0] == how
    rig.delete_group("t", "b")
    rig.create_group("t", "b", 0, replays=False)
    rig.delete_group("t", "a")
    recount(rig)
    finish_replay(rig)
    rig.commit()
    assert rig.state(task_id) == how
    assert rig.rows.is_empty()


def test_a_replay_ends_with_its_group(rig: Rig) -> None:
    ids = replaying(rig)
    rig.delete_group("t", "b")
    assert not rig.core.topics["t"].replays
    recount(rig)
    assert len(consume(rig, "a")) == COUNT
    assert {rig.state(task_id) for task_id in ids} == {"acked"}


def test_a_reschedule_during_a_replay_applies_to_all_groups(rig: Rig) -> None:
    ids = replaying(rig)
    rig.subscribe(group="a")
    got = {delivery.id: delivery for delivery in rig.tick() if delivery.group.name == "a"}
    rig.nack(got[ids[-1]], 50)
    assert rig.reschedule(ids[-1], 5_000) == "scheduled"
    finish_replay(rig)
    recount(rig)
    assert rig.views(ids[-1]) == {"a": ("waiting", 1), "b": ("waiting", 0)}


@pytest.mark.parametrize("verb", ["cancel", "reschedule"])
def test_commands_find_tasks_waiting_for_the_replay(rig: Rig, verb: str) -> None:
    ids = replaying(rig)
    ack_old(rig)
    if verb == "cancel":
        assert rig.cancel(ids[-1]) == "cancelled"
    else:
        assert rig.reschedule(ids[-1], 700) == "scheduled"
    recount(rig)
    finish_replay(rig)
    recount(rig)
    left = consume(rig, "b")
    rig.pass_time(700)
    late = consume(rig)
    assert len(left) == COUNT - 1
    assert late == ({("b", ids[-1])} if verb == "reschedule" else set())
    assert rig.rows.is_empty()


def test_a_replay_reports_its_progress(rig: Rig) -> None:
    replaying(rig)
    group = rig.group("t", "b")
    replay = rig.core.topics["t"].replays[group]
    assert (replay.looked_at, replay.given, replay.share) == (1, 1, 0.0)
    rig.replay(group, 3)
    assert (replay.looked_at, replay.given) == (4, 4)
    assert 0.5 < replay.share < 1.0
    finish_replay(rig)
    assert replay.is_over


def test_a_group_from_now_needs_no_replay(rig: Rig) -> None:
    rig.create_group("t", "a")
    rig.enqueue()
    rig.fire()
    rig.create_group("t", "b", replays=False)
    assert not rig.core.topics["t"].replays


# --- starts in the future -------------------------------------------------------------------------


@pytest.mark.parametrize("crashes", [False, True])
def test_a_future_start_goes_by_due_time(rig: Rig, crashes: bool) -> None:
    rig.create_group("t", "a")
    rig.create_group("t", "b", rig.now_ms + 1_000)
    rig.commit()
    if crashes:
        rig.crash()
    before, after = rig.enqueue(delay_ms=999), rig.enqueue(delay_ms=1_000)
    rig.pass_time(1_000)
    assert consume(rig, "a", "b") == everywhere(before, after) - {("b", before)}
    rig.crash()
    assert rig.group("t", "b").since_id != BY_DUE_ALONE, "its time has come"


def test_a_deleted_group_owns_tasks_enqueued_and_due_before() -> None:
    row = GroupRow("t", "g", 0, GroupSettings(closed_ms=100, closed_id=7))
    held, later, moved = (
        TaskRow(7, 100, "t", b""),
        TaskRow(8, 100, "t", b""),
        TaskRow(7, 101, "t", b""),
    )
    assert [owes(row, task) for task in (held, later, moved)] == [True, False, False]


def test_a_replay_does_not_block_other_tasks_of_its_group() -> None:
    """Their rows are not in memory, and what waits for the replay is not being read."""
    rig = Rig(replace(CONFIG, resident_bytes_max=1, loading_max=2))
    kept = replaying(rig)
    ours = rig.subscribe(group="a")
    for delivery in rig.tick():
        assert rig.ack(delivery) == "acked"
    rig.commit()
    rig.engine.subscriptions.unsubscribe(ours)
    group = rig.group(name="b")
    assert len(set(kept) & group.loading.keys()) > rig.config.loading_max
    rig.subscribe(group="b")
    new = rig.enqueue()
    rig.fire()
    rig.load()
    assert {delivery.id for delivery in rig.dispatch() if delivery.group is group} == {kept[0], new}
