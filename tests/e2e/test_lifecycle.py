"""Start, drain, kill, start again: what a daemon keeps, and what it says."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from e2e.cli_runner import NOWHERE, Cli, tickwheel
from support.daemon import Daemon, DaemonFailed
from support.http_asking import ask
from support.raw import Raw
from tickwheel import Client
from tickwheel.api.frames import FrameType as T
from tickwheel.client import statuses

DAY_MS = 86_400_000
ROOT = Path(__file__).parents[2]
MakeDaemon = Callable[..., Daemon]
NOWHERE_URL = "tcp://127.0.0.1:1"


def test_a_drain_says_goodbye_and_keeps_leases_for_the_next_start(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon(lease_default_s=60, reconnect_grace_s=0.1).start()
    with Raw(daemon.port) as raw:
        raw.call(T.SUBSCRIBE, 1, "held", "g", 1, {})
        raw.enqueue(("held", b"first", 0))
        _, _, epoch, _, ((task_id, attempt, _, _),) = raw.next()
        raw.enqueue(("held", b"later", DAY_MS))
        assert daemon.terminate() == 0
        assert raw.next()[:2] == (T.GOODBYE, "draining")
        assert raw.closed()
    daemon.start()
    assert daemon.logs(f"epoch={epoch + 1}")
    assert "recovered_after_unclean_stop" not in daemon.log_text()
    with Raw(daemon.port) as raw:
        stats = raw.call(T.STATS)[2]
        assert (stats["in_flight"], stats["ready"], stats["scheduled"]) == (1, 0, 1)
        assert stats["epoch"] == epoch + 1
        # Nobody else gets it, and the consumer that held it may still ack.
        assert raw.call(T.PULL, "held", "g", 1, 0, {})[2][2] == ()
        assert raw.call(T.ACK, "held", "g", epoch, [task_id], [attempt])[2] is None
        assert raw.call(T.LOOKUP, [task_id])[2][0]["state"] == "acked"


def test_leases_end_within_the_grace_after_a_kill(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon(lease_default_s=60, reconnect_grace_s=0.3, lease_checkpoint_s=0).start()
    with Raw(daemon.port) as raw:
        raw.call(T.SUBSCRIBE, 1, "held", "g", 1, {})
        raw.enqueue(("held", b"x", 0))
        _, _, epoch, _, ((task_id, attempt, _, _),) = raw.next()
        # A later commit is behind the lease's checkpoint.
        raw.enqueue(("held", b"later", DAY_MS))
        raw.enqueue(("held", b"later", DAY_MS))
        daemon.kill()
    daemon.start()
    assert daemon.logs("recovered_after_unclean_stop")
    with Raw(daemon.port) as raw:
        answer = raw.call(T.PULL, "held", "g", 1, 20_000, {})
        _, _, ((again, second, *_),) = answer[2]
        assert again == task_id
        assert second in (attempt, attempt + 1)
        # The first receipt is a genuine earlier one: its ack finishes the task.
        assert raw.call(T.ACK, "held", "g", epoch, [task_id], [attempt])[2] is None


MODES_OF_FOLDERS = {0o600: 0o700, 0o640: 0o750, 0o644: 0o755}


@pytest.mark.parametrize(
    ("args", "file_mode", "most"),
    [((), None, 0o640), (("--processes", "2"), None, 0o640), ((), "0600", 0o600)],
)
def test_files_have_at_most_the_configured_mode(
    make_daemon: MakeDaemon,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    args: tuple[str, ...],
    file_mode: str | None,
    most: int,
) -> None:
    data = tmp_path / "data"
    for folder in (data, data / "backups"):
        folder.mkdir(mode=0o700)
    options: dict[str, Any] = {} if file_mode is None else {"file_mode": file_mode}
    store = f"sqlite:///{data}/{'shards/' if args else 'store.db'}"
    daemon = make_daemon(
        store=store, args=args, history_dir=str(data / "history"), history_bodies=True,
        backup_dir=str(data / "backups"), audit_file=str(data / "audit.log"), **options,
    )  # fmt: skip
    if not args:  # an earlier release has left one that everybody reads
        Cli(NOWHERE).run("init", "--store", store)
        (data / "store.db").chmod(0o644)
    daemon.start()
    cli = Cli(daemon)
    cli.run("enqueue", "orders", "secret", "--delay", "1h")
    cli.run("backup", "copy.db")
    made = modes_below(data)  # with what is removed at a stop: -wal, -shm, pending lines
    assert daemon.terminate() == 0
    made |= modes_below(data)
    copy = next((data / "backups").rglob("copy*.db"))
    if file_mode is not None:
        monkeypatch.setenv("TICKWHEEL_FILE_MODE", file_mode)
    Cli(NOWHERE).run("restore", "--from", str(copy), "--into", f"sqlite:///{data}/again.db")
    made |= modes_below(data)
    names = "".join(made)
    parts = ("-wal", ".lock", "copy", "audit.log", ".jsonl", "again.db")
    assert [part for part in parts if part not in names] == []
    for name, (is_folder, mode) in made.items():
        allowed = MODES_OF_FOLDERS[most] if is_folder else most
        assert mode & ~allowed == 0, f"{name} has {mode:04o}"


def modes_below(folder: Path) -> dict[str, tuple[bool, int]]:
    """Each path below a folder, whether it is a folder, and its mode."""
    result = {}
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            answer = path.lstat()
            result[str(path)] = (path.is_dir(), answer.st_mode & 0o777)
    return result


def test_health_and_readiness(daemon: Daemon) -> None:
    alive, ready = (ask(daemon.http, "GET", path) for path in ("/healthz", "/readyz"))
    assert (alive.status, alive.json) == (200, {"status": "alive"})
    assert (ready.status, ready.json["status"]) == (200, "ready")
    assert ask(daemon.http, "GET", "/nothing").status == 404


def test_a_second_daemon_on_one_database_is_refused(make_daemon: MakeDaemon) -> None:
    first = make_daemon().start()
    second = make_daemon(store=first.store)
    with pytest.raises(DaemonFailed, match=r"(?s)ended with 1.*lock"):
        second.start()
    assert "Traceback" not in second.log_text()
    with Raw(first.port) as raw:
        assert raw.enqueue(("t", b"x", DAY_MS))[0] == T.OK


def test_an_address_in_use_is_reported(make_daemon: MakeDaemon) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        daemon = make_daemon(args=("--listen", f"tcp://127.0.0.1:{port}"))
        with pytest.raises(DaemonFailed, match=rf"(?s)ended with 1.*127\.0\.0\.1:{port}"):
            daemon.start()
    assert "Traceback" not in daemon.log_text()


@pytest.mark.parametrize(
    ("setting", "value"), [("slots", "1"), ("nonsense", "1"), ("listen", "somewhere")]
)
def test_an_invalid_setting_stops_the_start(tmp_path: Path, setting: str, value: str) -> None:
    done = subprocess.run(
        [*tickwheel(), "serve", "--set", f"{setting}={value}"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert setting in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_store_that_cannot_be_opened_is_reported(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    (tmp_path / "text.db").write_text("this is no database, and long enough to be looked at" * 50)
    for store, word in (
        (f"sqlite:///{tmp_path}/text.db", "database"),
        (f"sqlite:///{tmp_path}/missing/x.db", "missing"),
        ("mysql://x", "sqlite"),
    ):
        daemon = make_daemon(store=store)
        with pytest.raises(DaemonFailed, match=rf"(?s)ended with [12].*{word}"):
            daemon.start()
        assert "Traceback" not in daemon.log_text(), daemon.log_text()


def test_json_logs_have_one_object_per_line(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon(log_format="json", node="n1").start()
    assert daemon.terminate() == 0
    events = [json.loads(line) for line in daemon.log_text().splitlines()]
    assert [event["event"] for event in events] == ["recovered", "serving", "stopping", "stopped"]
    assert all(event["node"] == "n1" and event["level"] == "info" for event in events)
    assert all(event["timestamp"].endswith("Z") for event in events)


def test_ids_and_dedupe_survive_a_kill(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon().start()
    session = b"0123456789abcdef"
    with Raw(daemon.port, session=session) as raw:
        raw.request = 10
        request = raw.send(T.ENQUEUE, 11, [("t", b"x", DAY_MS)])
        first = raw.answer(request)
    daemon.restart()
    with Raw(daemon.port, session=session) as raw:
        raw.request = request - 1
        raw.send(T.ENQUEUE, 11, [("t", b"x", DAY_MS)])
        assert raw.answer(request) == first
        assert raw.call(T.STATS)[2]["scheduled"] == 1
        fresh = raw.enqueue(("t", b"y", DAY_MS))
        assert fresh[2][1][0] > first[2][1][0]


def test_a_backup_is_a_database_that_can_be_served(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon().start()
    with Raw(daemon.port) as raw:
        raw.enqueue(*[("t", b"x", DAY_MS)] * 500)
        answer = raw.call(T.BACKUP, "copy.db")
        assert answer[0] == T.OK, answer
        path = Path(answer[2]["path"])
        assert path.stat().st_size == answer[2]["bytes"]
        assert raw.call(T.BACKUP, "copy.db")[2] == "conflict"
        raw.enqueue(("t", b"after", DAY_MS))
    other = make_daemon(store=f"sqlite:///{path}").start()
    with Raw(other.port) as raw:
        assert raw.call(T.STATS)[2]["scheduled"] == 500


def test_the_start_of_a_pause_survives_a_kill(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon(http=True).start()
    with Raw(daemon.port) as raw:
        raw.call(T.GROUP_CREATE, "t", "g", {})
        since_ms = raw.call(T.CONFIGURE, "t", "g", {"paused": True})[2]["paused_ms"]
        of_topic = raw.call(T.CONFIGURE, "u", None, {"paused": True})[2]["paused_ms"]
    daemon.kill()
    daemon.start()
    with Raw(daemon.port) as raw:
        topics = raw.call(T.STATS)[2]["topics"]
        assert topics["t"]["groups"]["g"]["paused_ms"] == since_ms
        assert topics["u"]["paused_ms"] == of_topic
        assert raw.call(T.CONFIGURE, "t", "g", {"paused": False})[2].get("paused_ms") is None
        raw.call(T.CONFIGURE, "t", "g", {"paused": True})
    with urllib.request.urlopen(f"{daemon.http}/metrics", timeout=60) as answer:  # noqa: S310  # our own address
        lines = answer.read().decode().splitlines()
    name = 'tickwheel_paused_seconds{topic="t",group="g"'
    [line] = [item for item in lines if item.startswith(name)]
    assert 0 <= float(line.rpartition(" ")[2]) < 60


def test_the_status_as_json_has_every_field(daemon: Daemon) -> None:
    first, second = Cli(daemon).json("status", "--url", f"{daemon.url},{NOWHERE_URL}")
    assert first["reachable"] is True
    assert first["url"] == first["address"] == daemon.url
    assert {
        "node", "version", "role", "state", "detail", "epoch", "address", "since_ms", "active",
        "store", "store_ok", "durability", "now_ms", "uptime_s", "loaded",
    } <= set(first)  # fmt: skip
    assert first["store"].startswith("sqlite:///")
    assert first["now_ms"] >= first["since_ms"] > 0
    assert second["reachable"] is False


async def test_the_client_returns_the_same_status(daemon: Daemon) -> None:
    async with Client(daemon.url) as client:
        assert client.server_info["role"] == "active"
        mine = await client.status()
    answers: dict[str, Any] = await statuses(f"{daemon.url},{NOWHERE_URL}")
    assert answers[daemon.url].since_ms == mine.since_ms
    assert answers[daemon.url].epoch == mine.epoch == 1
    assert mine.serves
