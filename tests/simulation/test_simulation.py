"""The simulation holds, repeats itself, and finds what was broken on purpose; see
docs/durability.md. Seeded bugs that it finds are in tests/mutations/bugs.py.

It replaces time and randomness of the process in which it runs. So that is never this one: it runs
in one of its own, as `make simulate` does, and the tests judge what that prints.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from simulation.cases import CASES, LOST, NAMED
from simulation.faults import FAILING_OVER, FAULTS
from simulation.nodes import FAULTS as NODE_FAULTS
from simulation.nodes import WISHED
from simulation.whole import FAULTS as WHOLE_FAULTS

ROOT = Path(__file__).resolve().parents[2]
SEEDS = [60, pytest.param(1_000, marks=pytest.mark.slow)]
NODE_SEEDS = [30, pytest.param(2_000, marks=pytest.mark.slow)]
WHOLE_SEEDS = [12, pytest.param(40, marks=pytest.mark.slow)]
"""A hundred in `make test`, which see every fault, and each kind of event that is asked for; so
many in `make test-full` that a seeded bug which one run of two hundred finds is not missed."""
TIMEOUT_S = 1_500
"""A thousand runs use less than two minutes of a core, which others may want too."""


def _run(*arguments: str) -> Any:
    """What a process of the simulation prints last."""
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        env={**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": paths},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=TIMEOUT_S,
    )  # fmt: skip
    assert done.stdout, done.stderr[-4_000:]
    *others, last = done.stdout.splitlines()
    assert last.startswith("{"), done.stdout[-4_000:] + done.stderr[-4_000:]
    return json.loads(last) | {"code": done.returncode, "shown": others}


REPEATED = ("named", "named_whole")
"""Cases that run seeds again; only the slow test needs them."""


@cache
def _cases() -> dict[str, Any]:
    """All cases but REPEATED, in one process."""
    once = [name for name in CASES if name not in REPEATED]
    seen: dict[str, Any] = _run("simulation.cases", *once)
    return seen


def _case(name: str, seen: dict[str, Any] | None = None) -> Any:
    case = (_cases() if seen is None else seen)[name]
    assert "error" not in case, case["error"]
    assert not case["left"], "nothing is left to be collected"
    return case["result"]


def _report(kind: str, seeds: int) -> Any:
    """Return the report of `seeds` runs, all of which must hold."""
    options = ("--kind", kind, "--seeds", str(seeds), "--stop-at", "1", "--json")
    report = _run("simulation", *options)
    assert not report["failed"], "\n".join(report["shown"])
    assert report["runs"] == seeds
    assert not report["left"], "nothing is left to be collected, of killed daemons neither"
    assert report["code"] == 0
    return report


@pytest.mark.parametrize("seeds", SEEDS)
def test_every_run_holds(seeds: int) -> None:
    report = _report("daemons", seeds)
    assert {*FAULTS, *FAILING_OVER} <= set(report["faults"]), "each fault happens"
    for seen in ("deposed", "recovered_after_unclean_stop", "store_trouble", "clock_jumped"):
        assert report["events"].get(seen), f"no run has seen {seen}"
    counts = report["counts"]
    assert counts["epochs"] > seeds and counts["fenced"], "leaders change, and old ones write"
    assert counts["replays"], "a store has lost what it had confirmed"
    assert counts["tasks"] > 10 * seeds and counts["deliveries"] > counts["tasks"]


@pytest.mark.parametrize("seeds", NODE_SEEDS)
def test_every_run_of_nodes_holds(seeds: int) -> None:
    report = _report("nodes", seeds)
    assert {*NODE_FAULTS, *WISHED} <= set(report["faults"]), "each happens"
    for seen in ("shard_handed_over", "same_node_name", "registry_works_again", "registrar_ended"):
        assert report["events"].get(seen), f"no run has seen {seen}"
    counts = report["counts"]
    assert counts["epochs"] > 4 * seeds, "shards move, and nodes that die are replaced"
    assert counts["hand_overs"] > seeds // 2, "in calm runs, where the time that it takes counts"


@pytest.mark.parametrize("seeds", WHOLE_SEEDS)
def test_every_run_of_the_whole_holds(seeds: int) -> None:
    report = _report("whole", seeds)
    assert {*NODE_FAULTS, *WHOLE_FAULTS} <= set(report["faults"]), "each happens"
    for seen in ("shard_handed_over", "deposed", "recovered_after_unclean_stop"):
        assert report["events"].get(seen), f"no run has seen {seen}"
    counts = report["counts"]
    assert counts["epochs"] > 4 * seeds, "shards move, and nodes that die are replaced"
    assert counts["hand_overs"] > seeds // 2, "in calm runs"
    assert counts["fenced"], "former leaders write"
    assert counts["tasks"] > 10 * seeds and counts["deliveries"] > counts["tasks"]


@pytest.mark.slow
def test_a_seed_gives_the_same_run_in_every_process() -> None:
    ours, others = (_run("simulation.cases", *REPEATED) for _ in range(2))
    here, there = _case("named", ours), _case("named", others)
    assert here == there
    by_seed: dict[int, Any] = {}
    for run in here:
        assert run["lines"] > 200 and not run["problems"]
        assert by_seed.setdefault(run["seed"], run) == run, "it is the same as before"
    assert len(here) == len(by_seed) + len(NAMED)
    assert len({run["trace_hash"] for run in here}) == len(by_seed), "seeds are different runs"
    first, second, again = _case("named_whole", ours)
    assert [first, second, again] == _case("named_whole", others)
    assert first == again and first["trace_hash"] != second["trace_hash"]


@pytest.mark.parametrize("nodes", ["1", "2", "3"])
def test_a_run_without_faults_delivers_once(nodes: str) -> None:
    outcome = _case("without_faults")[nodes]
    assert not outcome["problems"]
    assert outcome["counts"]["epochs"] == 1
    assert outcome["counts"]["tasks"] == 20


def test_a_failure_says_how_to_see_it_again() -> None:
    """With a leader that delivers on when its lease may be over."""
    seen = _case("failing")
    (failed,), (again,) = seen["failed"], seen["again"]
    assert any("two lead" in problem for problem in failed["problems"])
    assert (again["problems"], again["trace_hash"]) == (failed["problems"], failed["trace_hash"])
    assert f"make simulate KIND=daemons SEED={failed['seed']}" in seen["shown"]
    assert failed["trace_hash"] in seen["shown"]


# --- one thing at a time -------------------------------------------------------------------------


@pytest.mark.parametrize("lost", LOST)
def test_a_store_lost_in_the_first_takeover_is_retried(lost: str) -> None:
    """It waited for the lease; now it tries on, as it does in every later takeover."""
    outcome = _case("store_away")[lost]
    assert outcome["seen"] == [lost]
    assert not outcome["problems"]
    assert outcome["events"]["takeover_failed"] == 1
    assert outcome["events"]["serving"] == 1, "it is the same process"


def test_a_killed_host_stops_and_a_frozen_one_resumes() -> None:
    assert _case("hosts") == {"ran": ["middle", "two at 1", "two at 3"], "ended_s": 4.0}


def test_leftover_programs_are_closed_after_the_run() -> None:
    """Nothing of them runs before, and nothing that they begin then."""
    assert _case("programs") == ["over", "killed closes", "alive closes"]


def test_the_network_keeps_order_only_within_a_connection() -> None:
    """Bytes of one arrive in order, whatever the latency; those of others overtake them."""
    arrived = _case("network")
    for number in (0, 1):
        assert "".join(data for one, data in arrived if one == number) == "01234"
    assert [one for one, _ in arrived] != sorted(one for one, _ in arrived), "they overtake"


def test_the_server_accepts_only_the_newest_owners_batches() -> None:
    seen = _case("server")
    assert seen["said"] == [True, False, "Fenced", "StoreBehind"], "the second one is there"
    assert seen["last_batch"] == 1
    assert seen["fenced"] == 1


def test_every_case_is_judged() -> None:
    text = Path(__file__).read_text()
    assert [name for name in CASES if f'_case("{name}"' not in text] == []
