"""Consumers that are gone and left their connections behind, against a real daemon.

A host that lost power sends no FIN, and the kernel of a process that was stopped goes on
acknowledging. Time passes by the daemon's own clock: a task that is due then shows it.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from support.daemon import Daemon
from support.raw import Raw
from tickwheel.api.frames import FrameType as T
from tickwheel.protocol import Frame

LEASE_MS = 200
CLIENT = """
import asyncio, sys
from tickwheel import Client

async def main():
    async with Client(sys.argv[1]) as client:
        async for delivery in client.subscribe("t", group="g", lease=3600):
            print(delivery.id, flush=True)

asyncio.run(main())
"""


def pass_time(raw: Raw, ms: int) -> None:
    """By the daemon's clock."""
    raw.enqueue(("time", b"has passed", ms))
    epoch, _, [item] = raw.call(T.PULL, "time", "g", 1, ms + 20_000, {})[2]
    raw.call(T.ACK, "time", "g", epoch, [item[0]], [item[1]])


def counts(raw: Raw) -> dict[str, int]:
    """Return the counts of group g of topic t."""
    answer: dict[str, Any] = raw.call(T.STATS)[2]["topics"]["t"]["groups"]["g"]
    return {name: answer[name] for name in ("ready", "in_flight", "waiting", "dead")}


def delivered(raw: Raw) -> int:
    """How often tasks of the topic t were handed out."""
    return int(raw.call(T.STATS)[2]["topics"]["t"]["groups"]["g"]["delivered"])


def heard(raw: Raw) -> list[Frame]:
    """All that came so far, and the answer to a PING."""
    request = raw.send(T.PING)
    frames = [raw.next()]
    while frames[-1][:2] != (T.OK, request):
        frames.append(raw.next())
    return frames


@pytest.fixture
def daemon(make_daemon: Callable[..., Daemon]) -> Daemon:
    return make_daemon(
        heartbeat_interval_s=0.2, heartbeat_timeout_s=1, reconnect_grace_s=0.2
    ).start()


@pytest.fixture
def process(daemon: Daemon) -> Iterator[subprocess.Popen[str]]:
    """A consumer with a lease of an hour, as people write them."""
    result = subprocess.Popen(
        [sys.executable, "-c", CLIENT, daemon.url], stdout=subprocess.PIPE, text=True
    )
    yield result
    result.kill()
    result.communicate()


def test_a_frozen_consumer_buries_no_tasks(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon(retry_max=4).start()
    with Raw(daemon.port) as raw, Raw(daemon.port) as dead:
        dead.call(T.SUBSCRIBE, 1, "t", "g", 2, {"lease_ms": LEASE_MS})
        dead.send(T.PULL, "t", "g", 1, 60_000, {"lease_ms": LEASE_MS})
        ids = raw.enqueue(*[("t", b"x", 0)] * 5)[2][1]
        pass_time(raw, 8 * LEASE_MS)
        assert counts(raw) == {"ready": 5, "in_flight": 0, "waiting": 0, "dead": 0}
        assert raw.call(T.STATS)[2]["delivered"] <= 3 + 1, "one attempt of what it held"

        # It was only slow: what it says, be it a PING, is life.
        before = delivered(raw)
        dead.call(T.PING)
        pass_time(raw, 1)
        assert delivered(raw) == before + 2, "what its subscription takes"
        pass_time(raw, 8 * LEASE_MS)
        assert counts(raw) == {"ready": 5, "in_flight": 0, "waiting": 0, "dead": 0}

        epoch, _, items = raw.call(T.PULL, "t", "g", 10, 20_000, {})[2]
        assert sorted(item[0] for item in items) == list(ids)
        assert max(item[1] for item in items) <= 3
        acked = raw.call(T.ACK, "t", "g", epoch, [i[0] for i in items], [i[1] for i in items])
        assert acked[2] is None


def test_the_tasks_of_a_stopped_process_go_to_others(
    process: subprocess.Popen[str], daemon: Daemon
) -> None:
    """Long before their leases end; and one that goes on later is served again."""
    with Raw(daemon.port) as raw:
        (first,) = raw.enqueue(("t", b"x", 0))[2][1]
        assert process.stdout is not None
        assert process.stdout.readline() == f"{first}\n"
        process.send_signal(signal.SIGSTOP)
        epoch, _, [item] = raw.call(T.PULL, "t", "g", 1, 20_000, {})[2]
        assert (item[0], item[1]) == (first, 2)
        assert raw.call(T.ACK, "t", "g", epoch, [first], [2])[2] is None
        (silent_s,) = re.findall(r"the peer sent nothing for (\d+\.\d+)", daemon.log_text())
        assert float(silent_s) >= 1, "the heartbeat's time-out"
        (second,) = raw.enqueue(("t", b"y", 0))[2][1]
        process.send_signal(signal.SIGCONT)
        assert process.stdout.readline() == f"{second}\n"


def test_heartbeats_need_the_option_of_hello(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon(heartbeat_interval_s=0.3, heartbeat_timeout_s=2).start()
    with (
        Raw(daemon.port) as old,
        Raw(daemon.port, heartbeat=True) as talks,
        Raw(daemon.port, heartbeat=True) as silent,
        Raw(daemon.port, hello=False) as greeted,
    ):
        shown = greeted.hello()[2]["heartbeat"]
        assert shown == {"interval_ms": 300, "timeout_ms": 2_000}
        for _ in range(6):
            assert talks.next() == (T.HEARTBEAT,)
            talks.send(T.ALIVE)
        assert talks.call(T.PING)[0] == T.OK, "ALIVE has no answer, also with a number"
        assert silent.next() == (T.HEARTBEAT,)
        assert silent.closed()
        pass_time(talks, 1)
        assert heard(old) == [(T.OK, old.request, None)], "asked for nothing, and there"
    refused = Raw(daemon.port, hello=False)
    answer = refused.hello(heartbeat=1)
    assert (answer[0], answer[2]) == (T.ERROR, "bad_request")
    assert "heartbeat must be true or false" in answer[3]
    refused.close()
