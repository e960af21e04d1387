"""Torture from the command line.

    python -m tests.crash.torture --kills 200 --seed 7
    python -m tests.crash.torture --processes 2 [--kills 100]
    python -m tests.crash.torture --store redis [--faults redis | --daemons 2] [--kills 100]
    python -m tests.crash.torture --store redis --mirror no [--faults redis | --daemons 2]
    python -m tests.crash.torture --store sentinel|cluster --faults redis [--kills 60]
    python -m tests.crash.torture --store postgresql [--faults postgresql | --daemons 2]
    python -m tests.crash.torture --nodes 4 --shards 16 --faults 100 [--store redis-cluster|redis]
        [--judge-gaps] [--gap-killed-s 5] [--gap-drained-s 0.5]
    python -m tests.crash.torture --nemesis groups,clock,network,resources [--store redis]
    python -m tests.crash.torture --nemesis watch,groups --minutes 5
    python -m tests.crash.torture --nemesis everything [--minutes 1]

Exit code 1 when any promise was broken, something that should have happened never did, or
something is left.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from crash import everything
from crash.nodes_run import NodesRun
from crash.torture_run import (
    CLOCK,
    GAP_DRAINED_S,
    GAP_KILLED_S,
    KILLS,
    NEMESES,
    POSTGRESQL,
    REDIS,
    SERVERS,
    Options,
    Run,
)
from support.redis_server import PROGRAMS

LOG_SHOWN = 4_000
EVERYTHING = "everything"
"""Not a nemesis beside others: it does what they do, and all else."""


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    seed = given.seed if given.seed is not None else secrets.randbelow(2**31)
    nemeses = frozenset((given.nemesis or KILLS).split(","))
    if nemeses == {EVERYTHING}:
        return _everything(seed, given.minutes * 60, given.keep)
    if given.nodes:
        return _nodes(seed, given)
    if given.faults not in (None, "redis", POSTGRESQL):
        _say(f"torture: --faults {given.faults} is for --nodes; else there are --faults redis")
        return 2
    if CLOCK in nemeses and given.store in SERVERS and not given.faults:
        given.daemons = 2  # their clocks disagree, and they take over from each other
    try:
        options = Options(
            given.kills,
            seed,
            given.store,
            faults=given.faults is not None,
            daemons=given.daemons,
            processes=given.processes,
            driver=given.driver,
            mirror=given.mirror == "yes",
            hold_s_max=given.hold,
            every_place=given.kills > 0 and KILLS in nemeses,
            without=frozenset(given.without.split(",")),
            nemeses=nemeses,
            watch_s=given.minutes * 60,
            http=given.http,
        )
    except ValueError as error:
        _say(f"torture: {error}")
        return 2
    if (options.faults or options.daemons > 1) and options.store not in SERVERS:
        _say(f"torture: --faults and --daemons 2 need --store {' or '.join(SERVERS)}")
        return 2
    if options.store in REDIS and not any(map(shutil.which, PROGRAMS)):
        _say(f"torture: none of {', '.join(PROGRAMS)} is installed")
        return 2
    _say(
        f"torture: seed {seed}, {given.kills} of {', '.join(sorted(nemeses))}"
        f"{' and faults of the store' if options.faults else ''}"
    )
    return _run(Run, options, given.keep)


def _nodes(seed: int, given: argparse.Namespace) -> int:
    """A run over nodes: see ``nodes_run``."""
    store = {"sqlite": "cluster", "redis-cluster": "cluster"}.get(given.store, given.store)
    faults = given.faults or "100"
    if not faults.isdecimal():
        _say(f"torture: with --nodes, --faults is how many there are, not {faults}")
        return 2
    try:
        options = Options(
            int(faults), seed, store, driver=given.driver, mirror=given.mirror == "yes",
            nodes=given.nodes, shards=given.shards, judge_gaps=given.judge_gaps,
            gap_killed_s=given.gap_killed_s, gap_drained_s=given.gap_drained_s,
        )  # fmt: skip
    except ValueError as error:
        _say(f"torture: {error}")
        return 2
    if not any(map(shutil.which, PROGRAMS)):
        _say(f"torture: none of {', '.join(PROGRAMS)} is installed")
        return 2
    _say(f"torture: seed {seed}, {faults} faults, {given.nodes} nodes, {given.shards} shards")
    return _run(NodesRun, options, given.keep)


def _run(kind: type[Run], options: Options, keep: Path | None) -> int:
    with _folder("tickwheel-torture-") as made:
        folder = keep or Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        run = kind(options, folder)
        started_s = time.monotonic()
        try:
            asyncio.run(run.go())
        except BaseExceptionGroup as group:
            run.problems += [f"a client failed: {error!r}" for error in _leaves(group)]
        _say(f"{run.report()} ({time.monotonic() - started_s:.1f} s)")
        if not run.good:
            print(run.log_text()[-LOG_SHOWN:], file=sys.stderr)  # noqa: T201
    return 0 if run.good else 1


def _folder(prefix: str) -> tempfile.TemporaryDirectory[str]:
    """A history writer can still change the folder after its daemon was killed."""
    return tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True)


def _everything(seed: int, seconds: float, keep: Path | None) -> int:
    """A run of its own: see ``everything``."""
    _say(f"everything: seed {seed}, {seconds:g} s")
    with _folder("tickwheel-everything-") as made:
        scene = asyncio.run(everything.run(seed, seconds, keep or Path(made)))
        _say(scene.report())
        if scene.problems:
            print(scene.daemon.log_text()[-LOG_SHOWN:], file=sys.stderr)  # noqa: T201
    return 1 if scene.problems else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="torture", description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=200, help="how often (with faults: those)")
    parser.add_argument("--seed", type=int, default=None, help="default: a new one, printed")
    parser.add_argument("--store", default="sqlite", help=f"sqlite, {', '.join(SERVERS)}, or a URL")
    parser.add_argument(
        "--faults",
        default=None,
        help="redis, postgresql: it goes wrong too; with --nodes: how many",
    )
    parser.add_argument("--nodes", type=int, default=0, help="on one Redis, with --shards")
    parser.add_argument("--shards", type=int, default=16, help="of all nodes together")
    parser.add_argument(
        "--judge-gaps", action="store_true", help="of nodes: fail when a gap is longer than this:"
    )
    for what, bound_s in (("killed", GAP_KILLED_S), ("drained", GAP_DRAINED_S)):
        text = f"seconds without deliveries of a shard whose node was {what} (%(default)s)"
        parser.add_argument(f"--gap-{what}-s", type=float, default=bound_s, help=text)
    parser.add_argument("--daemons", type=int, choices=[1, 2], default=1, help="on one Redis")
    parser.add_argument("--processes", type=int, default=1, help="shards of serve --processes")
    parser.add_argument(
        "--nemesis", default=KILLS, help=f"with commas: {', '.join(NEMESES)}; or {EVERYTHING}"
    )
    parser.add_argument("--http", action="store_true", help="clients go over HTTP, too")
    parser.add_argument("--minutes", type=float, default=1.0, help="that watch or everything lasts")
    parser.add_argument("--driver", default="redis", help="of the Redis store")
    parser.add_argument("--mirror", choices=["yes", "no"], default="yes", help="of that store")
    parser.add_argument("--hold", type=float, default=6.0, help="seconds a fault lasts at most")
    parser.add_argument("--without", default="", help="faults to leave out, with commas")
    parser.add_argument("--keep", type=Path, default=None, help="folder for store and log")
    return parser


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201  # its output


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    results: list[BaseException] = []
    for error in group.exceptions:
        results += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return results
