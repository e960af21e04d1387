"""``serve --processes``: a daemon for each shard, all real processes; what becomes of the others
when one of them, or their parent, dies."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from e2e.cli_runner import NOWHERE, Cli
from support.daemon import Daemon, DaemonFailed
from support.ports import free_ports
from support.raw import Raw
from support.waiting import until
from tickwheel.api.frames import FrameType as T
from tickwheel.model.records import ID_STEP

DAY_MS = 86_400_000
SHARDS = 2
GONE_S = 1.0
MakeDaemon = Callable[..., Daemon]


class Shards:
    """Two shards in one folder, at ports that stay."""

    def __init__(self, make_daemon: MakeDaemon, folder: Path, **options: Any) -> None:
        self.folder = folder / "shards"
        self.port = free_ports(SHARDS)
        args = ("--processes", str(SHARDS), "--listen", f"tcp://127.0.0.1:{self.port}")
        args += options.pop("args", ())
        self.parent = make_daemon(store=f"sqlite:///{self.folder}/", args=args, **options)

    def start(self) -> Shards:
        self.parent.start()
        return self

    @property
    def log(self) -> str:
        return self.parent.log_text()

    def ready(self) -> list[dict[str, Any]]:
        """The shards as the ready file names them."""
        answer = json.loads((self.parent.folder / "ready.json").read_text())
        shards: list[dict[str, Any]] = answer["shards"]
        assert answer["pid"] == self.parent.pid
        return shards

    def pids(self) -> list[int]:
        return [shard["pid"] for shard in self.ready()]

    def raw(self, shard: int) -> Raw:
        return Raw(self.port + shard)

    def are_free(self) -> bool:
        """Whether nobody listens at the ports any more."""
        return not any(map(listens, range(self.port, self.port + SHARDS)))


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def is_over(pid: int) -> bool:
    """Return whether a process has ended that is not our child."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in "ZX"


@pytest.fixture
def shards(make_daemon: MakeDaemon, tmp_path: Path) -> Shards:
    return Shards(make_daemon, tmp_path).start()


def enqueued(raw: Raw, delay_ms: int = DAY_MS) -> int:
    answer = raw.enqueue(("t", b"body", delay_ms))
    assert answer[0] == T.OK, answer
    return int(answer[2][1][0])


# --- what each of them is to a client -------------------------------------------------------------


def test_hello_for_another_shard_names_its_address(shards: Shards) -> None:
    with Raw(shards.port, shard=1) as raw:
        hello_answer = raw.hello_answer
        assert (hello_answer["role"], hello_answer["active"]) == (
            "standby",
            f"tcp://127.0.0.1:{shards.port + 1}",
        )
        assert raw.enqueue(("t", b"kept nowhere", DAY_MS))[2] == "not_active"
        assert raw.call(T.PING)[0] == T.OK
    with Raw(shards.port, shard=0) as raw:
        assert (raw.hello_answer["role"], raw.hello_answer["shard"]) == ("active", 0)
        assert enqueued(raw)
    with Raw(shards.port, shard=SHARDS) as raw:
        assert raw.hello_answer["active"] is None
    for wrong in (-1, 64, "1", True):
        with Raw(shards.port, hello=False) as raw:
            assert raw.hello(shard=wrong)[2] == "bad_request"


def test_each_shard_serves_and_lists_all_shards(shards: Shards) -> None:
    route = tuple(f"tcp://127.0.0.1:{shards.port + shard}" for shard in range(SHARDS))
    with shards.raw(0) as first, shards.raw(1) as second:
        for shard, raw in enumerate((first, second)):
            hello_answer = raw.hello_answer
            assert (hello_answer["shard"], hello_answer["shards"]) == (shard, route)
            raw.call(T.SUBSCRIBE, 1, "t", "g", 10, {})
            task = enqueued(raw, 0)
            assert task % ID_STEP == shard
            _, _, epoch, _, ((delivered, attempt, *_),) = raw.next()
            assert delivered == task
            assert raw.call(T.ACK, "t", "g", epoch, [task], [attempt])[2] is None
            assert raw.call(T.LOOKUP, [task])[2][0]["state"] == "acked"
        later = enqueued(first)
        assert first.call(T.LOOKUP, [later])[2][0]["state"] == "scheduled"
        assert second.call(T.LOOKUP, [later])[2][0]["state"] == "unknown"
    cli = Cli(shards.parent)
    rows = cli.json("shards")
    assert [row["shard"] for row in rows] == [0, 1]
    assert [row["url"] for row in rows] == list(route)
    assert [row["pid"] for row in rows] == shards.pids()
    assert [row["state"] for row in rows] == ["ready", "ready"]
    assert all(row["store"].endswith(f"shard-{row['shard']}.db") for row in rows)
    head, *shown = cli.run("shards").stdout.decode().splitlines()
    assert head.split()[:5] == ["shard", "node", "address", "pid", "state"]
    assert [line.split()[3] for line in shown] == [str(pid) for pid in shards.pids()]


def test_commands_at_one_shard_cover_all_shards(shards: Shards) -> None:
    with shards.raw(0) as first, shards.raw(1) as second:
        for raw, count in ((first, 2), (second, 3)):
            for _ in range(count):
                enqueued(raw)
    cli = Cli(shards.parent)
    rows = cli.json("status")
    assert [row["pid"] for row in rows] == shards.pids()
    assert [row["shard"] for row in rows] == [0, 1]
    (stats,) = cli.json("stats")
    assert (stats["enqueued"], stats["scheduled"]) == (5, 5)
    os.kill(shards.pids()[1], signal.SIGSTOP)
    try:
        serving, silent = cli.json("status", expect=1)
        assert (serving["state"], silent["reachable"]) == ("ready", False)
    finally:
        os.kill(shards.pids()[1], signal.SIGCONT)


def test_a_folder_of_one_shard_is_served_by_this_process(
    make_daemon: MakeDaemon, tmp_path: Path
) -> None:
    daemon = make_daemon(store=f"sqlite:///{tmp_path}/one/").start()
    with Raw(daemon.port) as raw:
        assert {"shard", "shards"}.isdisjoint(raw.hello_answer)
        assert raw.call(T.STATUS)[2]["pid"] == daemon.pid
        assert raw.call(T.STATUS)[2]["store"].endswith("/one/shard-0.db")
    assert json.loads((tmp_path / "one" / "shards.json").read_text()) == {"format": 1, "shards": 1}


def test_free_ports_and_http_of_each(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    daemon = make_daemon(store=f"sqlite:///{tmp_path}/d/", http=True, args=("--processes", "2"))
    daemon.start()
    shards = json.loads((daemon.folder / "ready.json").read_text())["shards"]
    assert len({shard["url"] for shard in shards} | {shard["http"] for shard in shards}) == 4
    for number, shard in enumerate(shards):
        with Raw(int(shard["url"].rpartition(":")[2])) as raw:
            status = raw.call(T.STATUS)[2]
            assert (status["pid"], status["http"]) == (shard["pid"], shard["http"])
            assert raw.hello_answer["shard"] == number


def test_logs_of_a_shard_have_its_number(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    shards = Shards(make_daemon, tmp_path, log_format="json").start()
    assert shards.parent.terminate() == 0
    lines = [json.loads(line) for line in shards.log.splitlines()]
    of = {
        shard: [line["event"] for line in lines if line.get("shard") == shard]
        for shard in (None, 0, 1)
    }
    assert of[0] == of[1] == ["recovered", "serving", "stopping", "stopped"]
    assert of[None] == ["starting", "all_shards_serve", "stopping", "stopped"]


# --- ends -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_an_ended_shard_is_restarted_with_its_tasks(shards: Shards, number: int) -> None:
    with shards.raw(0) as other, shards.raw(1) as raw:
        kept, task = enqueued(other), enqueued(raw)
        first, killed = shards.pids()
        os.kill(killed, number)
        assert raw.closed()
        until(lambda: shards.pids()[1] != killed, log=lambda: shards.log)
        with shards.raw(1) as again:
            assert again.call(T.LOOKUP, [task])[2][0]["state"] == "scheduled"
        # The other one was not disturbed.
        assert other.call(T.LOOKUP, [kept])[2][0]["state"] == "scheduled"
        assert shards.pids()[0] == first
    assert shards.parent.terminate() == 0


def test_a_crashing_shard_is_restarted_and_the_others_serve(shards: Shards) -> None:
    database = shards.folder / "shard-1.db"
    database.rename(database.with_suffix(".away"))
    database.mkdir()  # no database can be opened there
    before = shards.pids()
    os.kill(before[1], signal.SIGKILL)
    until(lambda: shards.log.count("restarting in") >= 2, log=lambda: shards.log)
    with shards.raw(0) as raw:
        enqueued(raw)
    serving, away = Cli(shards.parent).json("shards", expect=1)
    assert serving["pid"] == before[0]
    assert away["reachable"] is False
    database.rmdir()
    database.with_suffix(".away").rename(database)
    until(lambda: shards.pids()[1] != before[1], log=lambda: shards.log)
    assert shards.parent.terminate() == 0


def test_shards_are_gone_within_a_second_when_the_parent_is_killed(shards: Shards) -> None:
    with shards.raw(0), shards.raw(1) as raw:  # a drain would wait for these
        task = enqueued(raw)
        pids = shards.pids()
        shards.parent.kill()
        # A process counts as over when its first thread is; the ports are free with its last one.
        until(lambda: all(map(is_over, pids)) and shards.are_free(), GONE_S, lambda: shards.log)
    shards.start()
    with shards.raw(1) as raw:
        assert raw.call(T.LOOKUP, [task])[2][0]["state"] == "scheduled"


def test_sigterm_drains_all(shards: Shards) -> None:
    with shards.raw(0) as first, shards.raw(1) as second:
        pids = shards.pids()
        tasks = [enqueued(raw) for raw in (first, second)]
        assert shards.parent.terminate() == 0
        assert [raw.next()[:2] for raw in (first, second)] == [(T.GOODBYE, "draining")] * 2
        assert all(map(is_over, pids))
    shards.start()
    assert "recovered_after_unclean_stop" not in shards.log
    for shard, task in enumerate(tasks):
        with shards.raw(shard) as raw:
            assert raw.call(T.LOOKUP, [task])[2][0]["state"] == "scheduled"


def children_of(pid: int) -> set[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return set(map(int, text.split()))


def handles(pid: int, number: int) -> bool:
    """Whether the process catches this signal."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    [mask] = [line.split()[1] for line in lines if line.startswith("SigCgt:")]
    return bool(int(mask, 16) >> (number - 1) & 1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_start_stopped_at_any_moment_is_cleaned_up(
    make_daemon: MakeDaemon, tmp_path: Path, number: int
) -> None:
    """Before it has processes, while they start, and when all are there: no process, no port, no
    lock; and the next start serves."""
    shards = Shards(make_daemon, tmp_path)
    for count in range(SHARDS + 1):
        shards.parent.spawn()
        seen = set[int]()

        def has_enough(seen: set[int] = seen, count: int = count) -> bool:
            seen |= children_of(shards.parent.pid)
            # Python itself catches SIGINT before the program begins.
            return len(seen) >= count and (count > 0 or handles(shards.parent.pid, signal.SIGTERM))

        until(has_enough)
        os.kill(shards.parent.pid, number)
        assert shards.parent.wait() == 0
        until(lambda seen=seen: all(map(is_over, seen)))
        assert shards.are_free()
    assert "Traceback" not in shards.log
    shards.start()
    assert len(shards.pids()) == SHARDS


def test_a_second_signal_kills_those_that_do_not_end(shards: Shards) -> None:
    pids = shards.pids()
    os.kill(pids[1], signal.SIGSTOP)
    os.kill(shards.parent.pid, signal.SIGTERM)
    until(lambda: is_over(pids[0]), log=lambda: shards.log)
    assert shards.parent.alive
    assert not is_over(pids[1])
    assert shards.parent.terminate() == 1
    assert is_over(pids[1])


# --- what is refused ------------------------------------------------------------------------------


def refusal(daemon: Daemon, code: int) -> str:
    """The one line that a start says which fails so."""
    before = len(daemon.log_text())
    with pytest.raises(DaemonFailed, match=rf"ended with {code} "):
        daemon.start()
    answer = daemon.log_text()[before:]
    assert answer.count("\n") == 1, answer
    return answer


def test_a_missing_database_is_not_recreated(shards: Shards) -> None:
    shards.parent.terminate()
    (shards.folder / "shard-1.db").unlink()
    error = refusal(shards.parent, 1)
    assert f"{shards.folder}/shard-1.db is missing" in error
    assert not (shards.folder / "shard-1.db").exists()


def test_a_port_in_use_is_reported_and_creates_no_folder(
    make_daemon: MakeDaemon, tmp_path: Path
) -> None:
    shards = Shards(make_daemon, tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", shards.port + 1))
        taken.listen()
        assert f"cannot listen on 127.0.0.1:{shards.port + 1}" in refusal(shards.parent, 1)
    assert not shards.folder.exists()


def test_a_shard_that_cannot_open_its_store_ends_the_whole(shards: Shards) -> None:
    shards.parent.terminate()
    (shards.folder / "shard-1.db").write_text("no database, and long enough to be looked at" * 50)
    before = len(shards.log)
    with pytest.raises(DaemonFailed, match="ended with 1 "):
        shards.start()
    answer = shards.log[before:]
    (own,) = [line for line in answer.splitlines() if " failed " in line]
    assert "database" in own
    assert own.endswith("shard=1")
    assert "exit code 1 before it served; all processes are stopped" in answer
    assert "Traceback" not in answer
    assert shards.are_free()


def test_a_second_parent_of_one_folder_is_refused(make_daemon: MakeDaemon, shards: Shards) -> None:
    second = make_daemon(store=shards.parent.store, args=("--processes", "2"))
    with pytest.raises(DaemonFailed, match=r"(?s)ended with 1.*lock"):
        second.start()
    with shards.raw(0) as raw:
        enqueued(raw)


# --- commands on a folder -------------------------------------------------------------------------


def test_init_creates_a_folder_once(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    shards = Shards(make_daemon, tmp_path)
    cli, store = Cli(NOWHERE), shards.parent.store
    (made,) = cli.json("init", "--store", store, "--processes", "2")
    assert made == {"store": store, "created": True, "shards": 2}
    assert "shards.json already exists" in cli.fails(1, "init", "--store", store)
    shards.start()
    with shards.raw(1) as raw:
        assert raw.hello_answer["shard"] == 1


def test_store_commands_need_the_database_of_a_shard(
    make_daemon: MakeDaemon, tmp_path: Path
) -> None:
    shards = Shards(make_daemon, tmp_path)
    cli, store = Cli(NOWHERE), shards.parent.store
    cli.run("init", "--store", store, "--processes", "2")
    one = f"{store}shard-0.db"
    restore = ("restore", "--into", store, "--history", str(tmp_path))
    for command in (("check", "--store", store), restore):
        assert f"name the database of one shard, for example {one}" in cli.fails(1, *command)
    assert b"all rows agree" in cli.run("check", "--store", one).stdout


def test_each_shard_has_its_own_folder_for_backups(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    (tmp_path / "backups").mkdir()
    shards = Shards(make_daemon, tmp_path, backup_dir=str(tmp_path / "backups")).start()
    for shard in range(SHARDS):
        with shards.raw(shard) as raw:
            task = enqueued(raw)
            path = raw.call(T.BACKUP, "monday.db")[2]["path"]
            assert path == str(tmp_path / "backups" / f"shard-{shard}" / "monday.db")
            assert task
    assert shards.parent.terminate() == 0
