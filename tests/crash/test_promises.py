"""One promise a test, against a real daemon, in a second each: what torture shows together.

The mutations run these: each of the bugs seeded there breaks one of them.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import pytest

from support.daemon import Daemon
from support.raw import Raw
from tickwheel.api.frames import FrameType
from tickwheel.persistence import audit
from tickwheel.protocol import Frame, encode

FAR_MS = 3_600_000
SESSION = b"0123456789abcdef"
NOTHING_COMES_MS = 250
WAIT_MS = 10_000
"""For what comes."""
STEP_MS = 15_000
"""Maximum milliseconds of a test step."""
CLOCKS_MS = 100


def pull(raw: Raw, wait_ms: int, lease_ms: int = FAR_MS, count: int = 100) -> Frame:
    """[epoch, delivered_ms, deliveries]"""
    fields = ("t", "g", count, wait_ms, {"lease_ms": lease_ms})
    frame = raw.call(FrameType.PULL, *fields)
    assert frame[0] == FrameType.OK, frame
    result: Frame = frame[2]
    return result


def ack(raw: Raw, epoch: int, task_id: int, attempt: int) -> str:
    frame = raw.call(FrameType.ACK, "t", "g", epoch, [task_id], [attempt])
    assert frame[0] == FrameType.OK, frame
    return "acked" if frame[2] is None else str(frame[2][0])


def state(raw: Raw, task_id: int) -> str:
    return str(raw.call(FrameType.LOOKUP, [task_id])[2][0]["state"])


def test_no_task_is_early(make: Callable[..., Daemon]) -> None:
    daemon = make(tick_ms=50, slots=4)
    with Raw(daemon.port) as raw:
        raw.call(FrameType.SUBSCRIBE, 1, "t", "g", 1_000, {})
        count = 60
        raw.enqueue(*[("t", b"", i * 10) for i in range(count)])
        came = []
        while len(came) < count:
            frame = raw.next()
            got_ms = time.time_ns() // 1_000_000
            if frame[0] == FrameType.DELIVER:
                came += [(item[2], frame[3], got_ms) for item in frame[4]]
        assert not [c for c in came if min(c[1:]) < c[0]]
        assert raw.call(FrameType.STATS)[2]["early"] == 0


def test_a_lease_is_kept_and_then_ends(make: Callable[..., Daemon]) -> None:
    daemon = make()
    with Raw(daemon.port) as raw, Raw(daemon.port) as other:
        (task_id,) = raw.enqueue(("t", b"", 0))[2][1]
        lease_ms = 2_500
        _, delivered_ms, ((_, attempt, *_),) = pull(raw, WAIT_MS, lease_ms)
        assert attempt == 1
        assert pull(other, NOTHING_COMES_MS)[2] == (), "it is leased to the first one"
        epoch, again_ms, items = pull(other, WAIT_MS)
        assert [(item[0], item[1]) for item in items] == [(task_id, 2)]
        assert again_ms >= delivered_ms + lease_ms
        assert ack(other, epoch, task_id, 2) == "acked"


def lease_ends_ms(raw: Raw, ids: list[int]) -> list[int]:
    result = raw.call(FrameType.LOOKUP, ids)[2]
    assert {task["state"] for task in result} == {"in_flight"}
    return [task["groups"]["g"]["at_ms"] for task in result]


def test_a_stop_keeps_leases_and_late_acks_count(make: Callable[..., Daemon]) -> None:
    """Each to its own end, whatever a broken connection would have left of it."""
    daemon = make(reconnect_grace_s=2)
    leases_ms = (30_000, FAR_MS, 12 * FAR_MS)
    with Raw(daemon.port) as raw:
        got = []
        for lease_ms in leases_ms:
            raw.enqueue(("t", b"", 0))
            epoch, _, ((task_id, attempt, *_),) = pull(raw, WAIT_MS, lease_ms)
            got.append((task_id, attempt))
        ids = [task_id for task_id, _ in got]
        extended = raw.call(FrameType.EXTEND, "t", "g", epoch, [ids[0]], [got[0][1]], FAR_MS // 2)
        assert extended[2] is None
        before = lease_ends_ms(raw, ids)
        now_ms = raw.call(FrameType.STATUS)[2]["now_ms"]
        for end_ms, lease_ms in zip(before, (FAR_MS // 2, *leases_ms[1:]), strict=True):
            assert 0 <= now_ms + lease_ms - end_ms < STEP_MS
        assert daemon.terminate() == 0
    daemon.start()
    with Raw(daemon.port) as raw:
        assert pull(raw, NOTHING_COMES_MS)[2] == ()
        after = lease_ends_ms(raw, ids)
        # Both ends come from two clocks, each of which is read on its own.
        assert [abs(a - b) <= CLOCKS_MS for a, b in zip(after, before, strict=True)] == [True] * 3
        for task_id, attempt in got:
            assert ack(raw, epoch, task_id, attempt) == "acked"
            assert ack(raw, epoch, task_id, attempt) == "acked", "done: a repeat is fine"


def test_an_earlier_receipt_can_only_ack(make: Callable[..., Daemon]) -> None:
    daemon = make()
    with Raw(daemon.port) as raw:
        (task_id,) = raw.enqueue(("t", b"", 0))[2][1]
        epoch, _, _ = pull(raw, WAIT_MS, lease_ms=100)
        assert pull(raw, WAIT_MS)[2][0][1] == 2
        old = (task_id, epoch, 1)
        nack = raw.call(FrameType.NACK, "t", "g", [(*old, None, None)])
        assert nack[2] == ("stale",)
        assert raw.call(FrameType.REJECT, "t", "g", [(*old, None)])[2] == ("stale",)
        assert state(raw, task_id) == "in_flight"
        assert ack(raw, epoch, task_id, 1) == "acked"


def test_a_dead_letter_is_not_brought_back_by_a_late_ack(make: Callable[..., Daemon]) -> None:
    daemon = make()
    with Raw(daemon.port) as raw:
        (task_id,) = raw.enqueue(("t", b"", 0))[2][1]
        epoch, _, _ = pull(raw, WAIT_MS)
        reject = raw.call(FrameType.REJECT, "t", "g", [(task_id, epoch, 1, "no")])
        assert reject[2] == ("dead",)
    daemon.restart()
    with Raw(daemon.port) as raw:
        assert ack(raw, epoch, task_id, 1) == "dead"
        counts = raw.call(FrameType.STATS)[2]
        assert (counts["dead"], counts["ready"]) == (1, 0)
        assert raw.call(FrameType.DEAD_REQUEUE, [(task_id, "g")])[2] == ("requeued",)
        assert pull(raw, WAIT_MS)[2][0][0] == task_id


def test_an_id_named_twice_in_an_ack_counts_once(make: Callable[..., Daemon]) -> None:
    """By receipts of a delivery that a crash made the daemon forget."""
    daemon = make(lease_checkpoint_s=60)
    with Raw(daemon.port) as raw:
        raw.call(FrameType.SUBSCRIBE, 1, "t", "g", 0, {})  # the group is recorded
        raw.enqueue(("t", b"", 0))
        epoch, _, ((task_id, *_),) = pull(raw, WAIT_MS)
    daemon.restart()
    with Raw(daemon.port) as raw:
        while raw.call(FrameType.STATS)[2]["ready"] == 0:
            pass
        frame = raw.call(FrameType.ACK, "t", "g", epoch, [task_id, task_id], [1, 1])
        assert frame[2] is None
        counts = raw.call(FrameType.STATS)[2]
        assert (counts["ready"], counts["acked"]) == (0, 1)


def test_an_update_and_its_drop_in_one_batch_leave_no_row(make: Callable[..., Daemon]) -> None:
    """Reschedule and cancel in one write, so that one batch holds both: of tasks of which only the
    due time changes, and of those whose row is written again."""
    daemon = make()
    with Raw(daemon.port) as raw:
        tasks = [("t", b"", FAR_MS), ("t", b"", FAR_MS, {"tag": "x"})] * 25
        ids = raw.enqueue(*tasks)[2][1]
        moves, cancels = raw.request + 1, raw.request + 2
        move = (int(FrameType.RESCHEDULE), moves, ids, {"delay_ms": 2 * FAR_MS})
        raw.send_bytes(encode(move) + encode((int(FrameType.CANCEL), cancels, ids)))
        raw.request = cancels
        assert {row[1] for row in raw.answer(moves)[2]} == {"scheduled"}
        assert {row[1] for row in raw.answer(cancels)[2]} == {"cancelled"}
    daemon.restart()
    with Raw(daemon.port) as raw:
        assert {task["state"] for task in raw.call(FrameType.LOOKUP, ids)[2]} == {"cancelled"}
        assert raw.call(FrameType.STATS)[2]["scheduled"] == 0
    assert daemon.terminate() == 0
    assert audit.check(daemon.store).problems == []


def test_moved_tasks_keep_their_bodies_and_new_times_over_a_kill(
    make: Callable[..., Daemon],
) -> None:
    """Due times change beside the rows: some tasks are due at once now, some later."""
    daemon = make()
    with Raw(daemon.port) as raw:
        ids = raw.enqueue(*[("t", b"%d" % n, FAR_MS) for n in range(300)])[2][1]
        for delay_ms, some in ((2 * FAR_MS, ids[::3]), (3 * FAR_MS, ids[::6]), (0, ids[1::30])):
            moves = raw.call(FrameType.RESCHEDULE, some, {"delay_ms": delay_ms})
            assert {move[1] for move in moves[2]} == {"scheduled"}
        before = raw.call(FrameType.LOOKUP, ids)[2]
        assert [task["body"] for task in before] == [b"%d" % n for n in range(300)]
    daemon.restart()
    with Raw(daemon.port) as raw:
        after = raw.call(FrameType.LOOKUP, ids)[2]
        assert [(t["due_ms"], t["body"]) for t in after] == [
            (t["due_ms"], t["body"]) for t in before
        ]
        bodies: dict[int, bytes] = {}
        while len(bodies) < 10:
            bodies |= {task_id: body for task_id, _, _, body in pull(raw, WAIT_MS)[2]}
        assert bodies == {i: b"%d" % n for n, i in enumerate(ids) if i in ids[1::30]}
    assert daemon.terminate() == 0
    assert audit.check(daemon.store).problems == []


def test_a_restart_finds_every_task(make: Callable[..., Daemon]) -> None:
    """More than recovery reads in one chunk."""
    daemon = make()
    count = 25_000
    with Raw(daemon.port) as raw:
        for start in range(0, count, 5_000):
            tasks = [("t", b"%d" % i, FAR_MS + i) for i in range(start, start + 5_000)]
            assert raw.enqueue(*tasks)[0] == FrameType.OK
    daemon.restart()
    with Raw(daemon.port) as raw:
        assert raw.call(FrameType.STATS)[2]["scheduled"] == count


def test_a_task_that_was_nacked_keeps_its_time_over_a_kill(make: Callable[..., Daemon]) -> None:
    daemon = make()
    with Raw(daemon.port) as raw:
        raw.enqueue(("t", b"", 0))
        epoch, _, ((task_id, *_),) = pull(raw, WAIT_MS)
        nack = raw.call(FrameType.NACK, "t", "g", [(task_id, epoch, 1, FAR_MS, "later")])
        assert nack[2] == ("retrying",)
    daemon.restart()
    with Raw(daemon.port) as raw:
        assert pull(raw, NOTHING_COMES_MS)[2] == ()
        assert state(raw, task_id) == "waiting"


@pytest.mark.parametrize("place", ["commit.before", "commit.after"])
def test_a_resend_after_a_kill_is_one_task(make: Callable[..., Daemon], place: str) -> None:
    """The reply never came. Before the commit the resend is new, after it gets the first answer."""
    daemon = make()
    with Raw(daemon.port, session=SESSION) as raw:
        (before,) = raw.enqueue(("t", b"before", FAR_MS))[2][1]
        number = raw.request
    daemon.kill()
    # The start commits nothing, so the first batch is the one that the request makes.
    daemon.failpoints = f"{place}=1"
    daemon.start()
    task = ("t", b"once", FAR_MS)
    with Raw(daemon.port, session=SESSION) as raw:
        raw.request = number
        raw.send(FrameType.ENQUEUE, number + 1, [task])
        assert raw.closed()
    assert daemon.wait() == -signal.SIGKILL
    assert daemon.hits == [place]
    daemon.start()
    with Raw(daemon.port, session=SESSION) as raw:
        answers = set()
        for _ in range(3):
            raw.request = number
            answers.add(raw.enqueue(task)[2])
        ((_, (once,)),) = answers
        assert once != before
        assert raw.call(FrameType.STATS)[2]["scheduled"] == 2


def test_a_refused_request_number_can_be_reused(make: Callable[..., Daemon]) -> None:
    """Refused for what it says, then sent again under its number, corrected."""
    daemon = make()
    with Raw(daemon.port, session=SESSION) as raw:
        assert raw.enqueue(("t", b"good", FAR_MS), ("t", b"bad", -1))[2] == "bad_request"
        assert raw.call(FrameType.STATS)[2]["scheduled"] == 0
        raw.request -= 2
        assert raw.enqueue(("t", b"good", FAR_MS))[0] == FrameType.OK
        assert raw.call(FrameType.STATS)[2]["scheduled"] == 1
