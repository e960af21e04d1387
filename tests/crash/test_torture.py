"""12 kills: the run that `make torture` makes longer. Nothing lost, early, or back again."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from crash.killer import Killer
from crash.torture_run import Options, Run


@pytest.mark.parametrize("kills", [12, pytest.param(200, marks=pytest.mark.slow)])
async def test_all_promises_hold_under_kills(tmp_path: Path, kills: int) -> None:
    run = Run(Options(kills, secrets.randbelow(2**31)), tmp_path)
    print(f"torture: seed {run.plan.seed}")  # noqa: T201  # shown when it fails
    await run.go()
    assert run.good, run.report()
    assert isinstance(run.havoc.victim, Killer)
    assert run.havoc.victim.random_kills >= kills // 4
