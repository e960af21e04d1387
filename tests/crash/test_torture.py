"""12 kills: the run that `make torture` makes longer. Nothing lost, early, or back again."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from crash.killer import Killer
from crash.torture_run import Options, Run


@pytest.mark.parametrize("kills", [12, pytest.param(200, marks=pytest.mark.slow)])
async def test_all_promises_hold_under_kills(tmp_path: Path, kills: int) -> None:
    await _run(Options(kills, secrets.randbelow(2**31)), tmp_path)


@pytest.mark.parametrize("kills", [25, pytest.param(100, marks=pytest.mark.slow)])
async def test_they_hold_over_http(tmp_path: Path, kills: int) -> None:
    run = await _run(Options(kills, secrets.randbelow(2**31), http=True), tmp_path)
    for client in ("http-producer-0", "http-rough", "http-audit", "http-work", "http-billing"):
        (journal,) = (j for j in run.plan.journals if j.client == client)
        assert journal.accepted or (journal.delivered and journal.finished), client


async def _run(options: Options, folder: Path) -> Run:
    kills, run = options.kills, Run(options, folder)
    print(f"torture: seed {run.plan.seed}")  # noqa: T201  # shown when it fails
    await run.go()
    assert run.good, run.report()
    assert isinstance(run.havoc.victim, Killer)
    assert run.havoc.victim.random_kills >= kills // 4
    return run
