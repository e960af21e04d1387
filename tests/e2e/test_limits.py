"""Bounds on connections and on peers that do not read, against a real daemon."""

from __future__ import annotations

import os
import resource
import select
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from support.daemon import Daemon
from support.raw import Raw
from tickwheel.api.frames import FrameType as T
from tickwheel.protocol import Decoder

IDLE = 2_000
CONNECTIONS_MAX = 500
DAY_MS = 86_400_000


def test_connections_over_the_limit_are_refused(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon(connections_max=CONNECTIONS_MAX, hello_timeout_s=60).start()
    kept: list[socket.socket] = []
    refused = 0
    for _ in range(IDLE // CONNECTIONS_MAX):
        fresh = [
            socket.create_connection(("127.0.0.1", daemon.port), 10) for _ in range(CONNECTIONS_MAX)
        ]
        if not kept:
            # The first ones fill the daemon; they stay idle.
            kept = fresh
            continue
        for connection in fresh:
            refused += _was_refused(connection)
            connection.close()
    assert refused == IDLE - CONNECTIONS_MAX
    for connection in kept:
        connection.close()
    _until_there_is_room(daemon)
    assert "Traceback" not in daemon.log_text()


def _was_refused(connection: socket.socket) -> bool:
    data = b""
    while chunk := connection.recv(4096):
        data += chunk
    (frame,) = Decoder(1 << 16).feed(data)
    assert frame[:3] == (T.ERROR, 0, "too_many_connections"), frame
    assert f"the limit is {CONNECTIONS_MAX}" in frame[3]
    return True


def _until_there_is_room(daemon: Daemon) -> None:
    """The closed ones are noticed, and a client is served."""
    for _ in range(1000):
        try:
            with Raw(daemon.port) as raw:
                assert raw.enqueue(("t", b"x", DAY_MS))[0] == T.OK
                return
        except (AssertionError, ConnectionError, EOFError):
            continue
    raise AssertionError("no room after the idle connections were closed")


def test_a_subscriber_that_never_reads_loses_its_tasks_to_others(
    make_daemon: Callable[..., Daemon],
) -> None:
    daemon = make_daemon(
        out_bytes_soft=65_536, slow_reader_timeout_s=1, reconnect_grace_s=0.2, lease_default_s=20
    ).start()
    count, body = 2_000, b"x" * 10_000
    with Raw(daemon.port) as silent, Raw(daemon.port) as producer:
        silent.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        silent.call(T.SUBSCRIBE, 1, "bulk", "g", 65_535, {})
        before = _rss_bytes(daemon.pid)
        for _ in range(count // 100):
            assert producer.enqueue(*[("bulk", body, 0)] * 100)[0] == T.OK
        # It is given what its buffer takes; the rest stays with the daemon as ready tasks.
        stats = producer.call(T.STATS)[2]
        assert stats["ready"] > 0
        # Its connection is ended, and everything it held goes to one that reads.
        assert _is_ended(silent.socket)
        producer.call(T.SUBSCRIBE, 1, "bulk", "g", 1000, {})
        seen: set[int] = set()
        while len(seen) < count:
            frame = producer.next()
            if frame[0] != T.DELIVER:
                continue
            ids = [delivery[0] for delivery in frame[4]]
            seen.update(ids)
            producer.send(T.ACK, "bulk", "g", frame[2], ids, [d[1] for d in frame[4]])
        grown = _rss_bytes(daemon.pid) - before
        assert grown < 3 * count * len(body), grown
    assert "slow_reader_timeout_s" in daemon.log_text()
    assert "Traceback" not in daemon.log_text()


def _is_ended(connection: socket.socket) -> bool:
    """Wait, without reading, until the peer has reset the connection."""
    poller = select.poll()
    poller.register(connection, 0)  # errors and hang-ups are reported without being asked for
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poller.poll(60_000))


def _rss_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_a_connection_without_hello_is_ended(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon(hello_timeout_s=0.3).start()
    with Raw(daemon.port, hello=False) as raw:
        frame = raw.next()
        assert frame[2] == "hello_required"
        assert "hello_timeout_s" in frame[3]
        assert raw.closed()


# --- descriptors ----------------------------------------------------------------------------------

FILES = 200


def _everything_works(raw: Raw, name: str) -> None:
    assert raw.enqueue(("t", b"x", DAY_MS))[0] == T.OK
    for kind, fields in ((T.LIST, None), (T.DEAD_LIST, None), (T.BACKUP, name)):
        answer = raw.call(kind, fields)
        assert answer[0] == T.OK, answer
    assert raw.call(T.STATS)[0] == T.OK


@pytest.mark.parametrize("http", [False, True])
def test_connections_leave_descriptors_to_the_daemon(tmp_path: Path, http: bool) -> None:
    with (
        Daemon(tmp_path, http=http, files_max=FILES, hello_timeout_s=60) as daemon,
        Raw(daemon.port) as raw,
    ):
        assert raw.limits["connections_max"] == FILES - 64 * (1 + http)
        assert daemon.log_text().count("few_file_descriptors") == 1
        idle = [socket.create_connection(("127.0.0.1", daemon.port), 10) for _ in range(FILES)]
        _everything_works(raw, "full.db")
        for connection in idle:
            connection.close()
        _until_there_is_room(daemon)
        assert "Traceback" not in daemon.log_text()


def test_a_daemon_without_descriptors_keeps_answering(tmp_path: Path) -> None:
    """However that came about; it ends with the shortage."""
    with Daemon(tmp_path, hello_timeout_s=60) as daemon, Raw(daemon.port) as raw:
        assert raw.enqueue(("t", b"x", 0))[0] == T.OK
        before = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
        used = max(map(int, os.listdir(f"/proc/{daemon.pid}/fd"))) + 1
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (used, before[1]))
        waiting = [socket.create_connection(("127.0.0.1", daemon.port), 10) for _ in range(20)]
        for kind in (T.LIST, T.DEAD_LIST):
            assert raw.call(kind, None)[0] == T.OK
        answer = raw.call(T.BACKUP, "none.db")
        assert answer[0] == T.ERROR and answer[2] in ("overloaded", "refused"), answer
        assert raw.call(T.PULL, "t", "g", 1, 20_000, None)[2][2], "the task is delivered"
        assert raw.enqueue(("t", b"x", DAY_MS))[0] == T.OK
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, before)
        for connection in waiting:
            connection.close()
        _until_there_is_room(daemon)
        _everything_works(raw, "again.db")
        assert daemon.alive
