"""25 kills: the run that `make torture` makes longer. Nothing lost, early, or back again."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from crash.torture_run import Run


@pytest.mark.parametrize("kills", [25, pytest.param(200, marks=pytest.mark.slow)])
async def test_all_promises_hold_under_kills(tmp_path: Path, kills: int) -> None:
    run = Run(kills, secrets.randbelow(2**31), tmp_path)
    print(f"torture: seed {run.plan.seed}")  # noqa: T201  # shown when it fails
    await run.go()
    assert run.good, run.report()
    assert run.killer.random_kills >= kills // 4
