"""Command line of a run: the cases, the scale, the peers, and the destination of the figures."""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.bounds import failed, judge
from benchmarks.cases import CASES, HEAVY
from benchmarks.context import Context, Result
from benchmarks.environment import NoDisk, choose_folder, describe
from benchmarks.peers import Queue, set_up_queues
from benchmarks.postgres_server import find_postgres
from benchmarks.redis_server import describe_redis, find_redis
from benchmarks.report import as_json, show
from benchmarks.scale import FULL, QUICK, Scale
from benchmarks.servers import DAEMON_COMMAND, find_beanstalkd

RESULTS = Path("bench-results")
_NO_POSTGRES = "not installed (apt-get install postgresql; pip install asyncpg)"
_JSON_HELP = f"file for figures; - is standard output (default: in {RESULTS}/, none if quick)"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmarks. Return 0 on success, 1 if a case failed or, with --check, a bound does
    not hold, and 2 for wrong usage."""
    options = _parser().parse_args(arguments)
    cases = CASES[options.store]
    for name in options.only or ():
        if name not in cases:
            print(f"--only {name}: not one of {', '.join(cases)}", file=sys.stderr)
            return 2
    if options.store == "redis" and find_redis() is None:
        print("redis-server is not installed (apt-get install redis-server)", file=sys.stderr)
        return 2
    if options.store == "postgresql" and find_postgres() is None:
        print(f"PostgreSQL and asyncpg: {_NO_POSTGRES}", file=sys.stderr)
        return 2
    try:
        parent = choose_folder(options.dir)
    except NoDisk as error:
        print(error, file=sys.stderr)
        return 2
    folder = Path(tempfile.mkdtemp(prefix="tickwheel-bench-", dir=parent))
    folder.chmod(0o711)  # a server that runs as another user has its folder in it
    try:
        return _run(options, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    add = parser.add_argument
    add("--quick", action="store_true", help="small counts, to check that it runs")
    add("--json", metavar="FILE", help=_JSON_HELP)
    add("--store", choices=tuple(CASES), default="sqlite", help="store of the daemon")
    names = "; ".join(f"{store}: {', '.join(cases)}" for store, cases in CASES.items())
    long = f"{names}. These run only if they are named: {', '.join(sorted(HEAVY))}"
    add("--only", nargs="+", metavar="NAME", help=long)
    add("--check", action="store_true", help="exit with 1 if a bound does not hold")
    beside = "peers: beanstalkd, PostgreSQL, redis-py; all: also queues of npm and PyPI; none"
    add("--peers", choices=("usual", "all", "none"), default="usual", help=beside)
    add("--no-peers", dest="peers", action="store_const", const="none", help="--peers none")
    waits = "maximum wait before each round of a comparison for an otherwise idle machine"
    add("--patience", metavar="SECONDS", type=float, default=0.0, help=waits)
    add(
        "--minutes",
        metavar="M",
        type=float,
        help="duration of mixed_day, postgres_long (default: 10)",
    )
    add("--dir", metavar="FOLDER", help="folder for databases and logs, on a real disk")
    add(
        "--daemon",
        metavar="COMMAND",
        default=shlex.join(DAEMON_COMMAND),
        help="command of the measured daemon, without 'serve …' (default: this version)",
    )
    return parser


def _scale(options: argparse.Namespace) -> Scale:
    scale = QUICK if options.quick else FULL
    return scale if options.minutes is None else replace(scale, mixed_s=options.minutes * 60)


def _context(options: argparse.Namespace, folder: Path) -> tuple[Context, str]:
    """Return the context, and the versions of the peers or the reason why there are none."""
    on_redis = find_redis() if options.store == "redis" else None
    on_postgres = options.store == "postgresql"
    peers = options.peers != "none"
    beanstalkd = find_beanstalkd() if peers and options.store == "sqlite" else None
    missing = "not installed (apt-get install beanstalkd)" if peers else "--no-peers"
    postgres = find_postgres() if on_postgres or (peers and on_redis is None) else None
    no_postgres = _NO_POSTGRES if peers else "--no-peers"
    queues = set_up_queues() if options.peers == "all" and postgres is not None else []
    context = Context(
        scale=_scale(options),
        folder=folder,
        beanstalkd=beanstalkd[0] if beanstalkd is not None else None,
        peers_missing=missing,
        daemon_command=tuple(shlex.split(options.daemon)),
        postgres_programs=postgres[0] if postgres is not None else None,
        postgres_missing=no_postgres,
        on_postgres=on_postgres,
        queues=[queue for queue in queues if isinstance(queue, Queue)],
        redis_server=on_redis[0] if on_redis is not None else None,
        peers=peers,
        patience_s=options.patience,
    )
    if on_redis is not None:
        versions = describe_redis(on_redis[1])
        names = (f"{name} {number}" for name, number in versions.items() if name != "server")
        in_c = "parsed in C by hiredis, except where a row says without it"
        parser = in_c if versions["hiredis"] != "none" else "parsed in Python"
        return context, f"{on_redis[1]}, {', '.join(names)} (replies {parser})"
    names = [peer[1] for peer in (beanstalkd, postgres) if peer is not None]
    names += [queue.name if isinstance(queue, Queue) else queue for queue in queues]
    return context, "; ".join(names) if names else f"none, {missing}; {no_postgres}"


def _write(options: argparse.Namespace, text: str) -> None:
    if options.json is not None:
        Path(options.json).write_text(text + "\n")
    elif not options.quick:
        RESULTS.mkdir(exist_ok=True)
        store = "" if options.store == "sqlite" else f"{options.store}-"
        name = store + datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ.json")
        (RESULTS / name).write_text(text + "\n")
        print(f"figures: {RESULTS / name}", file=sys.stderr)


def _run(options: argparse.Namespace, folder: Path) -> int:
    context, peer = _context(options, folder)
    environment: dict[str, Any] = {**describe(folder), "peer": peer}
    cases = CASES[options.store]
    asked = options.only or [name for name in cases if name not in HEAVY]
    names = [name for name in cases if name in asked]
    results: list[Result] = []
    failures: dict[str, str] = {}
    for name in names:
        context.say(f"{name} …")
        try:
            results.append(cases[name](context))
        except Exception as error:
            traceback.print_exc()
            failures[name] = f"{type(error).__name__}: {error}"
    metrics = {name: value for result in results for name, value in result.metrics.items()}
    judged = judge(metrics, names, full=not options.quick, store=options.store)
    text = as_json(environment, context.scale.name, results, failures, judged)
    if options.json != "-":
        _write(options, text)
    if options.json == "-":
        print(text)
        show(sys.stderr, environment, results, failures, judged)
    else:
        show(sys.stdout, environment, results, failures, judged)
    broken = failed(judged, peers_wanted=options.peers != "none")
    return 1 if failures or (options.check and broken) else 0
