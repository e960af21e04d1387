"""Torture over a real Redis: the runs that `make torture STORE=redis` makes longer; also over one
that moves, a group under Sentinels or a Cluster.

Nothing acknowledged is lost, nothing comes early or after its confirmed end: under kills of the
daemon, under every way in which Redis goes wrong, and while two daemons take turns.
"""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from crash.moving_rig import MOVING
from crash.torture_run import Options, Run
from support.redis_server import program

SHORT = {"kills": 0, "every_place": False}
"""Each kind of trouble once."""


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({"kills": 10}, id="kills", marks=pytest.mark.slow),
        pytest.param(
            {"faults": True, "hold_s_max": 1.2, **SHORT}, id="faults", marks=pytest.mark.slow
        ),
        # Takeovers: e2e/test_failover.py, persistence/redis/test_redis_sentinel.py.
        pytest.param({"daemons": 2, **SHORT}, id="failover", marks=pytest.mark.slow),
        pytest.param(
            {"mirror": False, "faults": True, "hold_s_max": 1.2, **SHORT},
            id="faults-no-mirror",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"mirror": False, "daemons": 2, "kills": 10, "every_place": False},
            id="failover-no-mirror",
            marks=pytest.mark.slow,
        ),
        pytest.param({"kills": 100}, id="100-kills", marks=pytest.mark.slow),
        pytest.param({"kills": 100, "faults": True}, id="100-faults", marks=pytest.mark.slow),
        pytest.param({"kills": 50, "daemons": 2}, id="50-changes", marks=pytest.mark.slow),
    ],
)
async def test_all_promises_hold(tmp_path: Path, how: dict[str, int | float]) -> None:
    await _holds(tmp_path, "redis", how)


@pytest.mark.slow
@pytest.mark.parametrize("store", MOVING)
async def test_all_promises_hold_during_redis_failovers(tmp_path: Path, store: str) -> None:
    """Sixty faults: failovers of each kind, of a Cluster slots that move, too; and the daemon is
    killed beside."""
    await _holds(tmp_path, store, {"kills": 60, "faults": True, "every_place": False})


@pytest.mark.slow
async def test_all_promises_hold_with_two_daemons_during_redis_failovers(tmp_path: Path) -> None:
    how = {"kills": 20, "faults": True, "daemons": 2, "every_place": False}
    await _holds(tmp_path, "sentinel", how)


async def _holds(folder: Path, store: str, how: dict[str, int | float]) -> None:
    program()
    run = Run(Options(seed=secrets.randbelow(2**31), store=store, **how), folder)  # type: ignore[arg-type]  # fields of each type
    print(f"torture: seed {run.plan.seed}")  # noqa: T201  # shown when it fails
    await run.go()
    assert run.good, run.report()
