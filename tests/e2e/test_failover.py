"""Several daemons on one Redis: one is active, the others stand by and take over."""

from __future__ import annotations

import asyncio
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.daemon import Daemon
from support.http_asking import ask
from support.raw import Raw
from support.redis_proxy import Proxy
from support.redis_server import RedisServer
from support.waiting import comes, until
from tickwheel import Client
from tickwheel.api.frames import FrameType as T

DAY_MS = 86_400_000
TAKEOVER_S = 5.0
"""What is promised, with the default time to live of 3 s."""
STANDBY_OK = ("", "?standby=no", "?standby=ok")


@pytest.fixture
def pair(
    server: RedisServer, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[tuple[Daemon, Daemon]]:
    """The active one and the one that stands by. The parameter is the settings of their lease."""
    options: dict[str, Any] = {"store": server.url(), "lease_checkpoint_s": 0, "http": True}
    options |= getattr(request, "param", {"leader_ttl_s": 1.5})
    # Nobody has to wait for an owner of the empty store to come back.
    server.lay_out()
    with (
        Daemon(tmp_path / "first", **options) as first,
        Daemon(tmp_path / "second", **options) as second,
    ):
        yield first, second


def status(daemon: Daemon) -> dict[str, Any]:
    with Raw(daemon.port) as raw:
        answer: dict[str, Any] = raw.call(T.STATUS)[2]
        return answer


def is_active(daemon: Daemon) -> bool:
    try:
        return bool(status(daemon)["role"] == "active")
    except (OSError, EOFError):
        return False  # its role is changing


def test_a_standby_names_the_leader_and_refuses_work(pair: tuple[Daemon, Daemon]) -> None:
    active, standby = pair
    assert " durability " in active.log_text(), "what can be lost is said at the start"
    assert " durability " not in standby.log_text()
    assert status(standby)["durability"] is None
    answer = status(active)
    assert answer["durability"] in active.log_text()
    assert (answer["role"], answer["state"], answer["active"]["address"]) == (
        "active",
        "ready",
        active.url,
    )
    assert answer["active"]["since_ms"] <= answer["now_ms"]
    answer = status(standby)
    assert (answer["role"], answer["state"]) == ("standby", "standby")
    assert answer["active"]["address"] == active.url
    with Raw(standby.port, hello=False) as raw:
        hello = raw.hello()[2]
        assert (hello["role"], hello["active"]) == ("standby", active.url)
        assert raw.call(T.PING)[0] == T.OK
        refused = raw.enqueue(("t", b"x", 0))
        assert (refused[0], refused[2]) == (T.ERROR, "not_active")
        assert active.url in refused[3]
        assert raw.call(T.PING)[0] == T.OK, "the connection survives"


def test_a_standby_names_the_leaders_http_and_each_lists_both(pair: tuple[Daemon, Daemon]) -> None:
    active, standby = pair
    refused = ask(standby.http, "GET", "/v1/topics")
    problem = refused.json
    assert (refused.status, problem["code"]) == (503, "not_active")
    assert (problem["active"], problem["active_http"]) == (active.url, active.http)
    assert active.http in problem["detail"]
    assert ask(active.http, "GET", "/v1/topics").status == 200
    assert ask(standby.http, "GET", "/readyz").json["active_http"] == active.http
    answers = [ask(item.http, "GET", f"/readyz{how}").status for item in pair for how in STANDBY_OK]
    assert answers == [200, 200, 200, 503, 503, 200], "a standby is ready for who asks so, only"
    for daemon in pair:
        until(
            lambda daemon=daemon: bool(ask(daemon.http, "GET", "/v1/status").json["standbys"]),
            TAKEOVER_S,
        )  # type: ignore[misc]
        answer = ask(daemon.http, "GET", "/v1/status").json
        assert (answer["active"]["address"], answer["active"]["http"]) == (active.url, active.http)
        [other] = answer["standbys"]
        assert (other["address"], other["http"]) == (standby.url, standby.http)
    active.kill()
    until(lambda: is_active(standby), TAKEOVER_S)
    assert ask(standby.http, "GET", "/v1/topics").status == 200
    assert ask(standby.http, "GET", "/v1/status").json["standbys"] == [], (
        "nobody is its own standby"
    )
    active.start()
    until(lambda: bool(ask(standby.http, "GET", "/v1/status").json["standbys"]), TAKEOVER_S)
    assert ask(active.http, "GET", "/v1/topics").json["active_http"] == standby.http


@pytest.mark.parametrize("pair", [{}], indirect=True)
@pytest.mark.parametrize("how", ["killed", pytest.param("stopped", marks=pytest.mark.slow)])
def test_the_standby_delivers_after_the_leader_died(pair: tuple[Daemon, Daemon], how: str) -> None:
    active, standby = pair
    epoch = status(active)["epoch"]
    with Raw(active.port) as raw:
        ids = raw.enqueue(("t", b"soon", 200), ("t", b"far", DAY_MS))[2][1]
    if how == "killed":
        active.kill()
    else:
        active.pause()
    until(lambda: is_active(standby), TAKEOVER_S)
    with Raw(standby.port) as raw:
        new_epoch, delivered_ms, items = raw.call(T.PULL, "t", "g", 10, 20_000, {})[2]
        assert [(item[0], item[3]) for item in items] == [(ids[0], b"soon")]
        assert new_epoch > epoch
        assert delivered_ms >= items[0][2]
        assert raw.call(T.ACK, "t", "g", new_epoch, [ids[0]], [1])[2] is None
        assert raw.call(T.STATS)[2]["scheduled"] == 1


def test_a_deposed_daemon_is_fenced(pair: tuple[Daemon, Daemon], server: RedisServer) -> None:
    active, standby = pair
    with Raw(active.port) as old:
        ids = old.enqueue(*[("t", b"%d" % n, 4_000) for n in range(20)])[2][1]
        old.call(T.SUBSCRIBE, 1, "t", "g", 100, {})
        active.pause()
        # It waits in the socket of a process that stands still: the late batch.
        request = old.send(T.ENQUEUE, 0, [("t", b"late", DAY_MS)])
        until(lambda: is_active(standby), TAKEOVER_S)
        with Raw(standby.port) as raw:
            taken: list[int] = []
            while len(taken) < len(ids):
                epoch, _, items = raw.call(T.PULL, "t", "g", 100, 20_000, {})[2]
                some = [item[0] for item in items]
                raw.call(T.ACK, "t", "g", epoch, some, [item[1] for item in items])
                taken += some
            assert sorted(taken) == sorted(ids)
            active.go_on()
            until(lambda: not is_active(active), TAKEOVER_S)
            seen: list[Any] = []
            with pytest.raises((EOFError, ConnectionError)):
                while True:
                    seen.append(old.next())
            assert not [frame for frame in seen if frame[0] == T.DELIVER]
            assert not [frame for frame in seen if frame[:2] == (T.OK, request)]
            assert raw.call(T.STATS)[2]["scheduled"] == 0, "the late batch changed nothing"
        until(lambda: status(active)["state"] == "standby", TAKEOVER_S)
        until(lambda: (status(active)["active"] or {}).get("address") == standby.url, TAKEOVER_S)
        assert "deposed" in active.log_text()
        assert "Traceback" not in active.log_text()


def test_a_clean_stop_hands_over_at_once(pair: tuple[Daemon, Daemon]) -> None:
    active, standby = pair
    with Raw(active.port) as raw:
        raw.enqueue(("t", b"x", DAY_MS))
    assert active.terminate() == 0
    until(lambda: is_active(standby), 2.0)
    with Raw(standby.port) as raw:
        assert raw.call(T.STATS)[2]["scheduled"] == 1
    active.start()
    assert status(active)["role"] == "standby"


def test_surviving_consumers_can_ack_after_a_failover(pair: tuple[Daemon, Daemon]) -> None:
    active, standby = pair
    with Raw(active.port) as raw:
        (task_id,) = raw.enqueue(("t", b"x", 0))[2][1]
        epoch, _, items = raw.call(T.PULL, "t", "g", 1, 20_000, {"lease_ms": 60_000})[2]
        raw.enqueue(("t", b"far", DAY_MS))  # the lease's checkpoint is in this batch or before
        raw.enqueue(("t", b"far", DAY_MS))
    active.kill()
    until(lambda: is_active(standby), TAKEOVER_S)
    with Raw(standby.port) as raw:
        assert raw.call(T.ACK, "t", "g", epoch, [task_id], [items[0][1]])[2] is None
        assert raw.call(T.LOOKUP, [task_id])[2][0]["state"] == "acked"


@pytest.mark.parametrize(
    "place",
    [
        *(pytest.param(f"takeover.{at}", marks=pytest.mark.slow) for at in ("elected", "opened")),
        "recovery.middle",
    ],
)
def test_an_interrupted_takeover_is_completed_by_another_daemon(
    server: RedisServer, tmp_path: Path, place: str
) -> None:
    with Daemon(tmp_path / "first", store=server.url(), leader_ttl_s=0.5) as first:
        until(lambda: is_active(first), TAKEOVER_S)
        with Raw(first.port) as raw:
            assert raw.enqueue(("t", b"x", DAY_MS))[0] == T.OK
        first.terminate()
        first.failpoints = f"{place}=1"
        first.spawn()
        first.wait()
        assert first.hits == [place]
        with Daemon(tmp_path / "second", store=server.url(), leader_ttl_s=0.5) as second:
            until(lambda: is_active(second), TAKEOVER_S)
            with Raw(second.port) as raw:
                # The rest is loaded while it serves.
                until(lambda: raw.call(T.STATS)[2]["scheduled"] == 1, TAKEOVER_S)


def test_a_single_daemon_recovers_from_a_redis_outage(server: RedisServer, tmp_path: Path) -> None:
    """Longer than its lease: it delivers nothing meanwhile, and everything afterwards."""
    with Daemon(tmp_path / "one", store=server.url(), leader_ttl_s=0.5) as daemon:
        with Raw(daemon.port) as raw:
            raw.enqueue(("t", b"due meanwhile", 500), ("t", b"later", 4_000))
            raw.call(T.SUBSCRIBE, 1, "t", "g", 100, {})
            server.kill()
            server.start()
            first, second = raw.next(), raw.next()
            assert first[0] == second[0] == T.DELIVER
        assert is_active(daemon)


def test_takeovers_that_fail_over_and_over_are_logged_once(
    pair: tuple[Daemon, Daemon], server: RedisServer
) -> None:
    active, standby = pair
    active.kill()
    server.call("SET", "{tw:default:0}:records", "theirs")

    def tries() -> int:
        match = re.search(rb"cmdstat_set:calls=(\d+)", server.call("INFO", "commandstats"))
        return int(match[1]) if match else 0

    until(lambda: "takeover_failed" in standby.log_text(), TAKEOVER_S)
    before = tries()
    until(lambda: tries() >= before + 3, 10)
    log = standby.log_text()
    assert log.count("takeover_failed") == 1
    assert len(re.findall(r" role  .*role=standby", log)) <= 2, "at its start, and after the first"


def test_a_live_daemon_keeps_its_lease_from_a_namesake(server: RedisServer, tmp_path: Path) -> None:
    """Cloned machines, or one address of a load balancer: both say the same of themselves."""
    server.lay_out()
    same: dict[str, Any] = {
        "store": server.url(),
        "advertise": "tcp://127.0.0.1:7399",
        "node": "clone",
        "leader_ttl_s": 3,
        "http": True,
    }
    with Daemon(tmp_path / "first", **same) as first:
        epoch = status(first)["epoch"]
        with Daemon(tmp_path / "second", **same) as second:
            until(lambda: "same_node_name" in second.log_text(), TAKEOVER_S)
            second.restart()
            assert status(second)["role"] == "standby"
            shown = status(first)
            assert (shown["role"], shown["epoch"]) == ("active", epoch)
            assert first.log_text().count("deposed") == 0
            until(lambda: second.log_text().count("same_node_name") == 2, TAKEOVER_S)
            with urllib.request.urlopen(f"{second.http}/metrics") as answer:  # noqa: S310  # our own
                assert b"tickwheel_same_node_name_total 1\n" in answer.read()
            first.kill()
            until(lambda: is_active(second), TAKEOVER_S)


def test_a_killed_local_leader_leads_again_at_once(server: RedisServer, tmp_path: Path) -> None:
    """With a lease that nobody would wait for, and at another address."""
    server.lay_out()
    options: dict[str, Any] = {"store": server.url(), "leader_ttl_s": 600}
    with Daemon(tmp_path / "first", **options) as first:
        epoch = status(first)["epoch"]
        first.restart()
        assert (status(first)["role"], status(first)["epoch"]) == ("active", epoch + 1)
        first.kill()
        with Daemon(tmp_path / "second", **options) as second:
            assert status(second)["role"] == "active"
            assert "waiting" not in second.log_text()


def test_a_standby_does_not_lay_out_a_store_that_came_back_empty(
    pair: tuple[Daemon, Daemon], server: RedisServer
) -> None:
    active, standby = pair
    active.kill()
    server.call("FLUSHALL")
    until(lambda: "store_came_back_empty" in standby.log_text(), TAKEOVER_S)
    assert status(standby)["role"] == "standby"
    assert server.call("EXISTS", "{tw:default:0}:wheel") == b":0\r\n"


async def test_clients_leave_a_leader_cut_off_from_redis(
    server: RedisServer, tmp_path: Path
) -> None:
    """It stays cut off until they have gone on: they reach it, and it cannot know more."""
    server.lay_out()
    wall = await Proxy(server.port).start()
    cut = Daemon(tmp_path / "cut", store=f"redis://127.0.0.1:{wall.port}/0")
    other = Daemon(tmp_path / "other", store=server.url())
    try:
        await asyncio.to_thread(cut.start)
        await asyncio.to_thread(other.start)
        async with Client(f"{cut.url},{other.url}") as client:
            await client.enqueue("t", b"before", delay=1)
            old = client._reconnector.connection
            async with client.subscribe("t", group="g") as deliveries:
                wall.hold()
                await client.enqueue("t", b"after")  # its first daemon cannot keep it
                came = {(await anext(deliveries)).body for _ in range(2)}
            assert came == {b"before", b"after"}
            assert old is not None and not old.is_leased, "it said so"
            assert client.server_info["node"] == (await asyncio.to_thread(status, other))["node"]
            wall.let_go()
            await comes(lambda: "deposed" in cut.log_text())
            await client.enqueue("t", b"at last")
    finally:
        cut.close()
        other.close()
        await wall.stop()
