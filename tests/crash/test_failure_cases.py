"""The five ways in which a delivery fails: each ends in redelivery, none in loss.

A duplicate is allowed where nobody can distinguish "done" from "not done"; where the daemon knows,
there is none.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from support.daemon import Daemon
from support.raw import Raw
from tickwheel.api.frames import FrameType

SETTINGS = {"reconnect_grace_s": 0.2, "lease_checkpoint_s": 0.02}
LONG_MS = 3_600_000
WAIT_MS = 10_000


@pytest.fixture
def daemon(make: Callable[..., Daemon]) -> Daemon:
    return make(**SETTINGS)


def put(daemon: Daemon) -> int:
    with Raw(daemon.port) as raw:
        return int(raw.enqueue(("t", b"work", 0))[2][1][0])


def take(raw: Raw, lease_ms: int = LONG_MS) -> tuple[int, int, int]:
    """(epoch, id, attempt) of the one delivery there is."""
    frame = raw.call(FrameType.PULL, "t", "g", 1, WAIT_MS, {"lease_ms": lease_ms})
    epoch, _, ((task_id, attempt, *_),) = frame[2]
    return epoch, task_id, attempt


def ack(raw: Raw, receipt: tuple[int, int, int]) -> object:
    epoch, task_id, attempt = receipt
    return raw.call(FrameType.ACK, "t", "g", epoch, [task_id], [attempt])[2]


def test_a_delivery_lost_on_the_wire_is_repeated(daemon: Daemon) -> None:
    """Delivered to a connection that is gone before its client has read anything."""
    task_id = put(daemon)
    deaf = Raw(daemon.port)
    deaf.call(FrameType.SUBSCRIBE, 1, "t", "g", 10, {"lease_ms": LONG_MS})
    with Raw(daemon.port) as other:
        while other.call(FrameType.STATS)[2]["in_flight"] == 0:
            pass
        deaf.close()
        assert take(other)[1:] == (task_id, 2)


def test_a_consumer_dying_before_its_ack_causes_a_redelivery(daemon: Daemon) -> None:
    task_id = put(daemon)
    with Raw(daemon.port) as consumer:
        assert take(consumer)[1:] == (task_id, 1)
    with Raw(daemon.port) as other:
        assert take(other)[1:] == (task_id, 2)


def test_a_daemon_dying_before_the_acks_commit_redelivers(daemon: Daemon) -> None:
    """The consumer has no answer: the task comes again, a duplicate."""
    task_id = put(daemon)
    daemon.kill()
    daemon.failpoints = "commit.before=2"  # the first batch holds the new group
    daemon.start()
    with Raw(daemon.port) as consumer:
        receipt = take(consumer, lease_ms=10_000)
        consumer.send(FrameType.ACK, "t", "g", receipt[0], [task_id], [receipt[2]])
        assert consumer.closed()
    assert daemon.wait() == -signal.SIGKILL
    daemon.start()
    with Raw(daemon.port) as other:
        again = take(other)
        assert again[1] == task_id
        assert ack(other, again) is None
        assert other.call(FrameType.LOOKUP, [task_id])[2][0]["state"] == "acked"


def test_a_nack_counts_after_its_consumer_died(daemon: Daemon) -> None:
    """The nack counts; the task comes at the time that it named."""
    task_id = put(daemon)
    with Raw(daemon.port) as consumer:
        epoch, _, attempt = take(consumer)
        nack = [(task_id, epoch, attempt, 300, "boom")]
        assert consumer.call(FrameType.NACK, "t", "g", nack)[2] == ("retrying",)
    daemon.restart()
    with Raw(daemon.port) as other:
        view = other.call(FrameType.LOOKUP, [task_id])[2][0]["groups"]["g"]
        assert [(f[0], f[2]) for f in view["failures"]] == [(1, "boom")]
        assert take(other)[1:] == (task_id, 2)


def test_a_slow_consumers_late_ack_counts(daemon: Daemon) -> None:
    """The lease ends under a consumer that works on: a duplicate, and its late ack counts."""
    task_id = put(daemon)
    with Raw(daemon.port) as slow, Raw(daemon.port) as other:
        late = take(slow, lease_ms=150)
        again = take(other)
        assert again[1:] == (task_id, 2)
        assert ack(slow, late) is None
        assert ack(other, again) is None, "done already, by the first one"
        assert other.call(FrameType.STATS)[2]["in_flight"] == 0
