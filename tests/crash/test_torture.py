"""A few kills: the run that `make torture` makes longer. Nothing lost, early, or back again."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from crash.killer import Killer
from crash.shard_killer import PARENT, PARENT_EVERY, SHARD, ShardKiller
from crash.torture_run import Options, Run
from tickwheel.model.records import ID_STEP


@pytest.mark.parametrize(
    "kills", [6, *(pytest.param(kills, marks=pytest.mark.slow) for kills in (12, 200))]
)
async def test_all_promises_hold_under_kills(tmp_path: Path, kills: int) -> None:
    await _run(Options(kills, secrets.randbelow(2**31)), tmp_path)


@pytest.mark.parametrize("kills", [4, pytest.param(100, marks=pytest.mark.slow)])
async def test_all_promises_hold_over_http(tmp_path: Path, kills: int) -> None:
    every = kills > 4  # each place is quick over TCP
    options = Options(kills, secrets.randbelow(2**31), http=True, every_place=every)
    run = await _run(options, tmp_path)
    for client in ("http-producer-0", "http-rough", "http-audit", "http-work", "http-billing"):
        (journal,) = (j for j in run.plan.journals if j.client == client)
        assert journal.accepted or (journal.delivered and journal.finished), client


@pytest.mark.parametrize("kills", [5, pytest.param(100, marks=pytest.mark.slow)])
async def test_all_promises_hold_over_shards(tmp_path: Path, kills: int) -> None:
    """Kills of the daemons of two shards, and of their parent for each five of them."""
    run = await _run(Options(kills, secrets.randbelow(2**31), processes=2), tmp_path)
    assert isinstance(run.havoc.victim, ShardKiller)
    assert run.havoc.victim.done[SHARD] == kills
    assert run.havoc.victim.done[PARENT] == kills // PARENT_EVERY
    shards = {task.id % ID_STEP for journal in run.plan.journals for task in journal.finished}
    assert shards == {0, 1}


async def _run(options: Options, folder: Path) -> Run:
    kills, run = options.kills, Run(options, folder)
    print(f"torture: seed {run.plan.seed}")  # noqa: T201  # shown when it fails
    await run.go()
    assert run.good, run.report()
    if isinstance(run.havoc.victim, Killer):
        assert run.havoc.victim.random_kills >= kills // 4
    return run
