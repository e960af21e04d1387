"""What ``serve --processes`` refuses before it starts anybody, and the settings of each shard; the
processes themselves: ``e2e/test_processes.py``."""

from __future__ import annotations

import json
import os
import shutil
import socket
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from support.ports import free_port, free_ports
from support.shard_rig import ShardRig, started
from tickwheel.errors import BadRequest, TickwheelError
from tickwheel.limits import SHARDS_MAX
from tickwheel.persistence import ShardFolder, parse, shard_folder
from tickwheel.persistence.contract import StoreUnusable
from tickwheel.server.fleet import processes
from tickwheel.server.fleet.board import Board
from tickwheel.server.settings import Settings, load
from tickwheel.server.shard.callers import OUTBOUND

ROUTE = ("tcp://wheel.example:7355", "tcp://wheel.example:7356")
rig = started(lambda: ShardRig(shard=1, route=",".join(ROUTE)))


def settings(folder: Path, **more: Any) -> Settings:
    fields = {"store": f"sqlite:///{folder}/d/", "processes": 2, "listen": "tcp://127.0.0.1:0"}
    return load(overrides=fields | more)


@pytest.mark.parametrize("value", ["0", "65", "-1", "two", "٣", "", "1.5", 0, 65, True, 2.0])
def test_an_invalid_number_of_processes_is_refused(value: Any) -> None:
    with pytest.raises(BadRequest) as error:
        load(overrides={"processes": value})
    expected = "setting processes: must be auto or a whole number between 1 and 64"
    assert expected in error.value.message
    assert f"got {value!r}" in error.value.message


@pytest.mark.parametrize(("value", "read"), [("1", 1), ("64", 64), ("auto", "auto"), (2, 2)])
def test_a_valid_number_of_processes_is_accepted(value: Any, read: object) -> None:
    assert load(overrides={"processes": value}).processes == read


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"store": "memory:"}, r"^processes \(2\) needs a store that is a folder.*not 'memory:'$"),
        ({"store": "sqlite:///x.db"}, r"needs a store that is a folder.*not 'sqlite:///x.db'$"),
        ({"store": "redis://a:1/0"}, "needs a store that is a folder"),
        ({"store": "sqlite:///d/?nonsense=1"}, "nonsense"),
        (
            {"shard": 3},
            r"^shard \(3\) cannot be set with processes \(2\), which assigns shards 0 to 1$",
        ),
        (
            {"listen": "tcp://0.0.0.0:7355", "insecure": True},
            r"^listen \(tcp://0.0.0.0:7355\) binds every address .* that clients connect to$",
        ),
        (
            {"http": "127.0.0.1:7356", "listen": "tcp://127.0.0.1:7355"},
            r"^with processes \(2\), listen .*7355\) and http .*7356\) need 2 consecutive",
        ),
        (
            {"listen": "tcp://127.0.0.1:65535"},
            r"^listen \(tcp://127.0.0.1:65535\) with processes \(2\) needs ports up to 65536;",
        ),
        ({"http_all": "127.0.0.1:0"}, r"^http_all \(127.0.0.1:0\) needs http, the HTTP address of"),
        (
            {"http_all": "127.0.0.1:0", "http": "127.0.0.1:0", "processes": 1},
            r"^http_all \(127.0.0.1:0\) needs several shards, but processes is 1; use http for",
        ),
        (
            {"http_all": "127.0.0.1:7456", "http": "127.0.0.1:7455"},
            r"^http_all \(127.0.0.1:7456\) is one of the 2 ports of http \(127.0.0.1:7455\) with",
        ),
        ({"http_all": "ftp://a:1", "http": "127.0.0.1:0"}, "http_all must begin with http:// or"),
        (
            {"http_all": "0.0.0.0:7500", "http": "127.0.0.1:0"},
            r"^http_all \(0.0.0.0:7500\) is open to other machines without tokens",
        ),
        (
            {"http_all": "https://127.0.0.1:0", "http": "127.0.0.1:0"},
            r"^http_all .* needs tls_cert$",
        ),
        ({"advertise": "tcp://wheel:65535"}, r"^advertise \(tcp://wheel:65535\).* up to 65536;"),
    ],
)
def test_an_invalid_setup_is_refused_and_creates_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TickwheelError, match=message):
        processes.run(settings(tmp_path, **wrong))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "cannot be read"),
        ('{"format": 3, "shards": 2}', "format must be 1 or 2, not 3"),
        ('{"format": 2, "shards": 2}', "cannot be read: 'layout'"),
        ('{"format": 2, "shards": 2, "layout": 0, "moved_id": 9, "epoch": 1}', "layout must be a"),
        ('{"format": 2, "shards": 2, "layout": 1, "moved_id": "", "epoch": 1}', "moved_id must be"),
        ('{"format": 2, "shards": 2, "layout": 1, "moved_id": 9, "epoch": 1.5}', "epoch must be a"),
        ('{"format": 1, "shards": 65}', "shards must be between 1 and 64, not 65"),
        ('{"format": 1, "shards": true}', "shards must be between 1 and 64, not True"),
        ('{"format": 1, "shards": 4}', r"it has 4 shards \(shards.json\), but processes is"),
    ],
)
def test_a_folder_with_another_number_of_shards_is_refused(
    tmp_path: Path, content: str, message: str
) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "shards.json").write_text(content)
    with pytest.raises(StoreUnusable, match=message):
        processes.run(settings(tmp_path))


def test_databases_without_their_number_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "shard-5.db").write_text("somebody's")
    with pytest.raises(StoreUnusable, match=r"shard-5.db already exists, but shards.json"):
        processes.run(settings(tmp_path))
    assert [path.name for path in (tmp_path / "d").iterdir()] == ["shard-5.db"]


def test_a_missing_parent_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreUnusable, match="missing/d/: No such file or directory"):
        processes.run(settings(tmp_path / "missing"))


def test_auto_uses_the_number_of_the_folder(tmp_path: Path) -> None:
    auto = settings(tmp_path, processes="auto")
    assert processes.count_of(auto) == min(SHARDS_MAX, len(os.sched_getaffinity(0)))
    assert processes.init(settings(tmp_path, processes=5)) == 5
    assert processes.count_of(auto) == 5
    names = sorted(path.name for path in (tmp_path / "d").glob("*.db"))
    assert names == [f"shard-{shard}.db" for shard in range(5)]
    answer = json.loads((tmp_path / "d" / "shards.json").read_text())
    assert answer == {"format": 1, "shards": 5}


def test_http_all_is_refused_with_one_process(tmp_path: Path) -> None:
    processes.init(settings(tmp_path, processes=1))
    where = {"http": "127.0.0.1:0", "http_all": "127.0.0.1:0"}
    with pytest.raises(
        BadRequest, match=r"^http_all \(.*\) needs several shards, but processes \(auto\) is 1 here"
    ):
        processes.run(settings(tmp_path, processes="auto", **where))


def test_folder_urls_are_parsed(tmp_path: Path) -> None:
    assert shard_folder("sqlite:///a%20b/?wal_bytes=9") == ShardFolder("a b/", "wal_bytes=9")
    assert shard_folder("sqlite:////abs/d/") == ShardFolder("/abs/d/")
    for other in ("sqlite:///x.db", "memory:", "redis://a/0", "sqlite:///", "sqlite:///x.db?a=b/"):
        assert shard_folder(other) is None
    one = parse(ShardFolder("/a b?/", "wal_bytes=9").url(3))
    assert (one.path, one.settings) == ("/a b?/shard-3.db", (("wal_bytes", 9),))


def test_each_shard_has_addresses_and_files_of_its_own(tmp_path: Path) -> None:
    port = free_port()
    given = settings(
        tmp_path,
        listen=f"tcp://127.0.0.1:{port}",
        advertise="tcp://wheel.example:7000",
        http="127.0.0.1:0",
        http_advertise="https://wheel.example:8000",
        audit_file="audit.log",
        ready_file="ready.json",
    )
    first, second = processes.settings_of_all(given, 2)
    assert (first.shard, second.shard) == (0, 1)
    assert second.store == f"sqlite:///{tmp_path}/d/shard-1.db"
    assert first.listen == f"tcp://127.0.0.1:{port}"
    assert second.listen == f"tcp://127.0.0.1:{port + 1}"
    assert first.route == second.route == "tcp://wheel.example:7000,tcp://wheel.example:7001"
    assert second.shard_urls[second.shard] == second.advertise == "tcp://wheel.example:7001"
    assert second.http_advertise == "https://wheel.example:8001"
    assert first.http != second.http
    assert (second.audit_file, second.ready_file) == ("audit.log.shard-1", None)
    assert second.backup_dir == str(tmp_path / "d" / "shard-1")
    assert (first.processes, second.processes) == (1, 1)


def test_ports_of_orphaned_daemons_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their parent was killed, and a supervisor starts the next one at once."""
    port = free_ports(2)
    given = settings(tmp_path, listen=f"tcp://127.0.0.1:{port}", http=None)
    with socket.create_server(("127.0.0.1", port + 1)) as orphan:
        ending = threading.Timer(0.3, orphan.close)
        ending.start()
        _, second = processes.settings_of_all(given, 2)
        ending.join()
    assert second.listen == f"tcp://127.0.0.1:{port + 1}"
    monkeypatch.setattr(processes, "ORPHANS_S", 0.1)
    with (
        socket.create_server(("127.0.0.1", port + 1)),
        pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port + 1}: Address already"),
    ):
        processes.settings_of_all(given, 2)


class HearingParent(processes.Parent):
    """A parent without processes."""

    def hear(self, numbers: bytes) -> None:
        self._note_ready(numbers)


def test_a_ready_file_that_cannot_be_renewed_ends_no_daemon(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    ready_file = folder / "ready.json"
    given = settings(tmp_path, ready_file=str(ready_file))
    daemons = [
        processes.Process(shard, of_shard)
        for shard, of_shard in enumerate(processes.settings_of_all(given, 2))
    ]
    log = Mock()
    parent = HearingParent(given, daemons, Board(2), log)
    with pytest.raises(FileNotFoundError):
        parent.hear(b"\0\1")
    for _ in range(2):
        folder.mkdir()
        parent.hear(b"\1")
        assert len(json.loads(ready_file.read_text())["shards"]) == 2
        shutil.rmtree(folder)
        log.error.reset_mock()
        parent.hear(b"\1")
        parent.hear(b"\1")
        assert [call.args for call in log.error.call_args_list] == [("ready_file_failed",)]


async def test_the_outbound_process_gets_no_route_to_other_shards(rig: ShardRig) -> None:
    rig.logins.companions[OUTBOUND] = b"secret of the moment"
    own = await rig.stranger().hello(token="secret of the moment")
    assert {"shard", "shards"}.isdisjoint(own[2])
    other = await rig.stranger().hello()
    assert (other[2]["shard"], other[2]["shards"]) == (1, ROUTE)
