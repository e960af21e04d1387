"""Real daemons on a real PostgreSQL: kills, a standby that takes over, and PostgreSQL away."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.test_failover import is_active, status
from support.daemon import Daemon
from support.postgresql import PostgresServer
from support.raw import Raw
from support.waiting import until
from tickwheel.api.frames import FrameType as T

DAY_MS = 86_400_000


SAFE = {"fsync": "on", "full_page_writes": "on"}


@pytest.fixture
def postgres() -> Iterator[PostgresServer]:
    with PostgresServer.running(**SAFE) as server:
        yield server


@pytest.fixture
def standby(postgres: PostgresServer) -> Iterator[PostgresServer]:
    """A streaming standby of ``postgres``, asynchronous at first."""
    with PostgresServer.running(following=postgres, **SAFE) as server:
        yield server


def configure(server: PostgresServer, setting: str, value: str) -> None:
    server.sql(f"ALTER SYSTEM SET {setting} = '{value}'", "SELECT pg_reload_conf()")
    until(lambda: server.sql(f"SHOW {setting}")[0][0] == value, 20)


def url_of_both(postgres: PostgresServer, standby: PostgresServer) -> str:
    address = f"127.0.0.1:{postgres.port}"
    return postgres.url().replace(address, f"{address},127.0.0.1:{standby.port}")


def enqueue_far(daemon: Daemon, count: int = 50) -> list[int]:
    with Raw(daemon.port) as raw:
        _, ids = raw.enqueue(*[("t", b"%d" % n, DAY_MS) for n in range(count)])[2]
        return list(ids)


def states(daemon: Daemon, ids: list[int]) -> set[str]:
    with Raw(daemon.port) as raw:
        return {answer["state"] for answer in raw.call(T.LOOKUP, ids)[2]}


def enqueues(daemon: Daemon) -> bool:
    with Raw(daemon.port) as raw:
        return bool(raw.enqueue(("t", b"after", DAY_MS))[0] != T.ERROR)


@pytest.mark.slow  # on SQLite: test_cli.py, crash/
def test_a_kill_between_enqueue_and_delivery_loses_no_task(
    make_daemon: Callable[..., Daemon], shared_postgres: PostgresServer
) -> None:
    daemon = make_daemon(store=shared_postgres.url(), lease_checkpoint_s=0).start()
    with Raw(daemon.port) as raw:
        _, ids = raw.enqueue(*[("t", b"%d" % n, 0) for n in range(50)], ("t", b"far", DAY_MS))[2]
    daemon.restart()
    assert "fsync" in status(daemon)["durability"]
    with Raw(daemon.port) as raw:
        epoch, _, items = raw.call(T.PULL, "t", "g", 100, 20_000, {})[2]
        assert [item[0] for item in items] == list(ids[:50])
        assert raw.call(T.ACK, "t", "g", epoch, ids[:50], [1] * 50)[2] is None
    daemon.restart()
    with Raw(daemon.port) as raw:
        stats = raw.call(T.STATS)[2]
        assert (stats["scheduled"], stats["ready"], stats["in_flight"]) == (1, 0, 0)
        assert raw.call(T.LOOKUP, [ids[0]])[2][0]["state"] == "acked"
    assert daemon.terminate() == 0


def test_a_standby_takes_over_and_the_former_leader_follows(
    shared_postgres: PostgresServer, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"store": shared_postgres.url(), "leader_ttl_s": 1}
    with Daemon(tmp_path / "a", **options) as first, Daemon(tmp_path / "b", **options) as second:
        assert is_active(first)
        assert status(second)["role"] == "standby"
        epoch = status(first)["epoch"]
        with Raw(first.port) as raw:
            raw.enqueue(("t", b"far", DAY_MS))
        first.kill()
        until(lambda: is_active(second), 20)
        assert status(second)["epoch"] == epoch + 1
        first.start()
        until(lambda: status(first)["role"] == "standby", 20)
        assert status(first)["active"]["address"] == second.url


def test_the_daemon_outlives_a_restart_of_postgresql(
    make_daemon: Callable[..., Daemon], postgres: PostgresServer
) -> None:
    daemon = make_daemon(store=postgres.url("call_ms=2000")).start()
    with Raw(daemon.port) as raw:
        raw.enqueue(("t", b"before", DAY_MS))
    postgres.kill()
    postgres.start()

    until(lambda: enqueues(daemon), 20)
    until(lambda: is_active(daemon), 20)
    assert status(daemon)["store_at"] == f"127.0.0.1:{postgres.port}"


def test_a_promoted_synchronous_standby_has_all_confirmed_tasks(
    make_daemon: Callable[..., Daemon], postgres: PostgresServer, standby: PostgresServer
) -> None:
    configure(postgres, "synchronous_standby_names", "*")
    daemon = make_daemon(store=url_of_both(postgres, standby)).start()
    assert "synchronous standbys" in status(daemon)["durability"]
    ids = enqueue_far(daemon)
    postgres.kill()
    standby.sql("SELECT pg_promote()")
    until(lambda: enqueues(daemon), 30)
    assert states(daemon, ids) == {"scheduled"}
    assert status(daemon)["store_at"] == f"127.0.0.1:{standby.port}"


def test_a_promoted_standby_without_confirmed_tasks_ends_the_daemon(
    make_daemon: Callable[..., Daemon], postgres: PostgresServer, standby: PostgresServer
) -> None:
    daemon = make_daemon(store=url_of_both(postgres, standby)).start()
    received = enqueue_far(daemon)
    ((position,),) = postgres.sql("SELECT pg_current_wal_lsn()::text")
    caught_up = f"SELECT pg_last_wal_replay_lsn() >= '{position}'"
    until(lambda: bool(standby.sql(caught_up)[0][0]), 20)
    configure(standby, "primary_conninfo", "")
    until(lambda: not standby.sql("SELECT FROM pg_stat_wal_receiver"), 20)
    missed = enqueue_far(daemon)
    postgres.kill()
    standby.sql("SELECT pg_promote()")
    assert daemon.wait(30) != 0
    assert "came back older" in daemon.log_text()
    daemon.start()
    assert states(daemon, received) == {"scheduled"}
    assert states(daemon, missed) == {"unknown"}
    assert enqueues(daemon)
