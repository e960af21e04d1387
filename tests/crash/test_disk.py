"""A real daemon whose disk is full, and one whose disk fails.

Full: new tasks are refused and can be sent again, acks go through, readiness says why, and all
is well when there is room. Failing: it stops, says so in one line, and promises nothing more.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from crash.shim import Shimmed, frames
from support.daemon import Daemon
from support.http_asking import ask
from support.mounts import may_mount, mount
from support.postgresql import USER, PostgresServer
from support.raw import Raw
from tickwheel.api.frames import FrameType
from tickwheel.errors import BY_CODE

DISK_BYTES = 16 << 20
LOG_BYTES = 64 << 20
FAR_MS = 3_600_000
TIMEOUT_S = 60.0
BODY = b"b" * 4_000


class Disk:
    """Something that a test can fill and free."""

    daemon: Daemon
    starts_when_full = True
    """The reserve, given up, is room enough for a start."""
    takes_acks = True
    """Acks and cancels have room when enqueues have not. Otherwise they wait for it."""
    says = "room"
    """A word of the reason why the daemon is not ready."""

    def fill(self) -> None: ...

    def free(self) -> None: ...


class SmallDisk(Disk):
    """A mounted file system of a few MiB, filled by somebody else's file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "disk"
        self.folder.mkdir()
        assert mount(self.folder, DISK_BYTES)
        store = f"sqlite:///{self.folder / 'store.db'}"
        self.daemon = Daemon(folder / "daemon", store=store, http=True)

    def fill(self) -> None:
        filler = (self.folder / "filler").open("wb", buffering=0)
        with filler, contextlib.suppress(OSError):
            while True:
                filler.write(bytes(4_096))

    def free(self) -> None:
        (self.folder / "filler").unlink(missing_ok=True)

    def remove(self) -> None:
        subprocess.run(["umount", "--lazy", str(self.folder)], check=True)


class PostgresDisk(SmallDisk):
    """A small file system with a part of PostgreSQL's data."""

    def __init__(self, folder: Path, size_bytes: int) -> None:
        self.server = PostgresServer()
        self.folder = self.server.folder / "disk"
        self.folder.mkdir()
        assert mount(self.folder, size_bytes)
        self.daemon = Daemon(folder / "daemon", store=self.server.url(), http=True)

    def remove(self) -> None:
        self.server.kill()
        super().remove()
        self.server.close()


class TablesDisk(PostgresDisk):
    """A small file system with its tables. The write-ahead log is elsewhere."""

    starts_when_full = takes_acks = False
    says = "No space left on device"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, DISK_BYTES)
        self.server.own(self.folder)
        self.server.start().sql(
            f"CREATE TABLESPACE small LOCATION '{self.folder}'",
            f"ALTER ROLE {USER} SET default_tablespace = small",
        )


class LogDisk(PostgresDisk):
    """A small file system with its write-ahead log: PostgreSQL ends when it is full."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, LOG_BYTES)
        log = self.server.folder / "data" / "pg_wal"
        shutil.copytree(log, self.folder / "log")
        shutil.rmtree(log)
        log.symlink_to(self.folder / "log")
        for path in (self.folder, *self.folder.rglob("*")):
            self.server.own(path)
        self.server.start()


class RefusingDisk(Disk):
    """Every write that needs a new block fails with ENOSPC, as if no reserve could help."""

    starts_when_full = False

    def __init__(self, folder: Path) -> None:
        self.daemon = self._shimmed = Shimmed(folder / "daemon", http=True)

    def fill(self) -> None:
        self._shimmed.fail("enospc")

    def free(self) -> None:
        self._shimmed.mend()

    def remove(self) -> None:
        """There is nothing to remove."""


KINDS: dict[str, Callable[[Path], Any]] = {"refusing": RefusingDisk}
if may_mount():
    KINDS |= {"small": SmallDisk, "tables": TablesDisk}


@pytest.fixture(params=sorted(KINDS))
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    made = KINDS[request.param](tmp_path)
    yield made
    made.daemon.kill()
    made.remove()


def ready(daemon: Daemon) -> tuple[bool, dict[str, Any]]:
    answer = ask(daemon.http, "GET", "/readyz")
    return answer.status == 200, answer.json


def wait_ready(daemon: Daemon) -> None:
    """The daemon looks for room by itself, every half second."""
    deadline = time.monotonic() + TIMEOUT_S
    while not ready(daemon)[0]:
        assert time.monotonic() < deadline, ready(daemon)


def refused_enqueue(raw: Raw) -> None:
    """Enqueue until one is refused; each refusal can be sent again later."""
    for _ in range(5_000):
        frame = raw.enqueue(*[("t", BODY, FAR_MS)] * 20)
        if frame[0] == FrameType.ERROR:
            assert frame[2] == "store_full", frame
            assert BY_CODE[frame[2]].retryable
            return
    raise AssertionError("the disk never became full")


def test_a_full_disk_refuses_tasks_and_keeps_promises(disk: Disk) -> None:
    daemon = disk.daemon.start()
    with Raw(daemon.port) as raw:
        first = raw.enqueue(*[("t", b"due", 0)] * 50, ("t", b"far", FAR_MS))[2][1]
        raw.call(FrameType.SUBSCRIBE, 1, "t", "g", 100, {"lease_ms": FAR_MS})
        deliver = raw.next()
        while deliver[0] != FrameType.DELIVER:
            deliver = raw.next()
        disk.fill()
        refused_enqueue(raw)
        is_ready, answer = ready(daemon)
        assert not is_ready
        assert answer["status"] == "store_full"
        assert disk.says in answer["reason"]
        # Acks and cancels go through, and are durable.
        asked = [
            raw.send(FrameType.ACK, "t", "g", deliver[2], [item[0]], [item[1]])
            for item in deliver[4]
        ]
        asked.append(raw.send(FrameType.CANCEL, [first[-1]]))
        if not disk.takes_acks:
            disk.free()
        *acks, cancelled = map(raw.answer, asked)
        assert all(frame[0] == FrameType.OK and frame[2] is None for frame in acks), acks
        assert cancelled[2][0][1] == "cancelled"
        assert not disk.takes_acks or not ready(daemon)[0]
        pending = raw.call(FrameType.STATS)[2]["scheduled"]
    daemon.kill()
    if not disk.starts_when_full:
        disk.free()
    daemon.start()
    with Raw(daemon.port) as raw:
        words = [task["state"] for task in raw.call(FrameType.LOOKUP, list(first))[2]]
        acked = len(deliver[4])
        assert words[:acked] == ["acked"] * acked
        assert words[-1] == "cancelled"
        assert raw.call(FrameType.STATS)[2]["scheduled"] == pending, "what was accepted is there"
        if disk.starts_when_full:
            is_ready, answer = ready(daemon)
            assert (is_ready, answer["status"]) == (False, "store_full")
            refused_enqueue(raw)
            disk.free()
        wait_ready(daemon)
        assert raw.enqueue(("t", b"again", FAR_MS))[0] == FrameType.OK
    assert "Traceback" not in daemon.log_text()
    assert daemon.terminate() == 0


def test_a_refused_request_can_be_sent_again(disk: Disk) -> None:
    daemon = disk.daemon.start()
    with Raw(daemon.port, session=b"s" * 16) as raw:
        disk.fill()
        refused_enqueue(raw)
        number = raw.request
        disk.free()
        wait_ready(daemon)
        raw.request = number - 1
        frame = raw.enqueue(("t", b"again", FAR_MS))
        assert frame[0] == FrameType.OK and frame[1] == number, frame
        assert raw.call(FrameType.LOOKUP, list(frame[2][1]))[2][0]["state"] == "scheduled"


@pytest.mark.skipif(not may_mount(), reason="mounting is not allowed here")
def test_a_full_disk_of_postgresqls_log_loses_nothing(tmp_path: Path) -> None:
    disk = LogDisk(tmp_path)
    with contextlib.ExitStack() as stack:
        stack.callback(disk.remove)
        stack.callback(disk.daemon.kill)
        daemon = disk.daemon.start()
        confirmed = 0
        with Raw(daemon.port, session=b"s" * 16) as raw:
            disk.fill()
            while (frame := raw.enqueue(*[("t", BODY, FAR_MS)] * 20))[0] == FrameType.OK:
                confirmed += len(frame[2][1])
            assert frame[2] == "outcome_unknown", frame
            assert ready(daemon)[1]["status"] == "store_trouble"
            disk.free()
            disk.server.restart()
            wait_ready(daemon)
            raw.request -= 1  # send it again, with its number
            confirmed += len(raw.enqueue(*[("t", BODY, FAR_MS)] * 20)[2][1])
            assert raw.call(FrameType.STATS)[2]["scheduled"] == confirmed
        assert daemon.terminate() == 0
        daemon.start()
        with Raw(daemon.port) as raw:
            assert raw.call(FrameType.STATS)[2]["scheduled"] == confirmed
        assert "Traceback" not in daemon.log_text()


USED_MOST = 0.9


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind == "small"])
def test_disk_refuse_refuses_and_accepts_tasks(kind: str, tmp_path: Path) -> None:
    disk = KINDS[kind](tmp_path)
    daemon = disk.daemon
    daemon.settings["disk_refuse"] = USED_MOST
    with contextlib.ExitStack() as stack:
        stack.callback(disk.remove)
        stack.callback(daemon.kill)
        daemon.start()
        with Raw(daemon.port) as raw:
            assert raw.enqueue(("t", b"first", FAR_MS))[0] == FrameType.OK
            filler = disk.folder / "filler"
            filler.write_bytes(bytes(int(DISK_BYTES * 0.88) - used_bytes(disk.folder)))
            assert raw.enqueue(("t", b"below", FAR_MS))[0] == FrameType.OK
            with filler.open("ab") as file:
                file.write(bytes(int(DISK_BYTES * 0.04)))
            frame = raw.enqueue(("t", b"above", FAR_MS))
            assert frame[2] == "store_full", frame
            assert "full; the limit is 90.0% (disk_refuse)" in frame[3]
            assert ready(daemon)[1]["status"] == "store_full"
            filler.unlink()
            wait_ready(daemon)
            assert raw.enqueue(("t", b"again", FAR_MS))[0] == FrameType.OK
            assert raw.call(FrameType.STATS)[2]["scheduled"] == 3


def used_bytes(folder: Path) -> int:
    disk = os.statvfs(folder)
    return (disk.f_blocks - disk.f_bfree) * disk.f_frsize


# --- a disk that fails -------------------------------------------------------------------------


@pytest.fixture
def failing(tmp_path: Path) -> Iterator[Shimmed]:
    made = Shimmed(tmp_path / "failing")
    yield made
    made.kill()


@pytest.mark.parametrize(
    ("verb", "what"),
    [
        ("enqueue", "eio-sync"),
        ("ack", "eio-write"),
        # Each verb and each failure is quick.
        pytest.param("enqueue", "eio-write", marks=pytest.mark.slow),
        pytest.param("ack", "eio-sync", marks=pytest.mark.slow),
    ],
)
def test_a_failing_disk_stops_the_daemon(failing: Shimmed, what: str, verb: str) -> None:
    failing.start()
    with Raw(failing.port) as raw:
        (kept,) = raw.enqueue(("t", b"kept", 0))[2][1]
        raw.call(FrameType.SUBSCRIBE, 1, "t", "g", 100, {"lease_ms": FAR_MS})
        deliver = raw.next()
        while deliver[0] != FrameType.DELIVER:
            deliver = raw.next()
        failing.fail(what)
        if verb == "enqueue":
            asked = raw.send(FrameType.ENQUEUE, 0, [("t", b"lost?", FAR_MS)])
        else:
            asked = raw.send(FrameType.ACK, "t", "g", deliver[2], [kept], [1])
        assert raw.closed()
    assert failing.wait() == 1
    answers = [s.frame for s in frames(failing.events(), "R") if s.frame[0] == FrameType.OK]
    assert asked not in [frame[1] for frame in answers], "no reply for the batch"
    logged = [line for line in failing.log_text().splitlines() if "failed" in line]
    assert any("the store failed and cannot be trusted" in line for line in logged), logged
    assert "Traceback" not in failing.log_text()
    failing.mend()
    failing.start()
    with Raw(failing.port) as raw:
        (found,) = raw.call(FrameType.LOOKUP, [kept])[2]
        allowed = {"scheduled", "ready", "in_flight"}
        if verb == "ack":
            allowed.add("acked")  # it was not confirmed; it may have been taken or not
        assert found["state"] in allowed
        assert raw.enqueue(("t", b"works", FAR_MS))[0] == FrameType.OK
    assert failing.terminate() == 0


def test_a_disk_failing_at_the_start_ends_the_daemon(failing: Shimmed) -> None:
    failing.start()
    failing.kill()
    failing.fail("eio-write")
    failing.spawn()
    assert failing.wait() == 1
    assert "Traceback" not in failing.log_text()
    failing.mend()
    failing.start()
