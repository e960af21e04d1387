"""Real daemons on a real PostgreSQL: kills, a standby that takes over, and PostgreSQL away."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.stores import killed_on
from e2e.test_failover import is_active, status
from support.daemon import Daemon
from support.postgresql import PostgresServer
from support.raw import Raw
from support.waiting import until
from tickwheel.api.frames import FrameType as T

DAY_MS = 86_400_000


@pytest.fixture
def postgres() -> Iterator[PostgresServer]:
    with PostgresServer.running() as server:
        yield server


killed = killed_on("postgresql", "redis", usual=2, settings=lambda _, __: {"lease_checkpoint_s": 0})


def test_a_kill_between_enqueue_and_delivery_loses_no_task(killed: Daemon) -> None:
    daemon = killed.start()
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

    def works() -> bool:
        with Raw(daemon.port) as raw:
            return bool(raw.enqueue(("t", b"after", DAY_MS))[0] != T.ERROR)

    until(works, 20)
    until(lambda: is_active(daemon), 20)
    assert status(daemon)["store_at"] == f"127.0.0.1:{postgres.port}"
