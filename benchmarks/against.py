"""Compare two builds of the daemon in turn, so that a slow minute of the machine affects both.

``python -m benchmarks.against COMMAND [--only CASE …] [--rounds N] [--store redis]`` runs each case
with the daemon that COMMAND starts and with this tree's, and prints the medians of every figure
side by side. The cases are those of ``python -m benchmarks``, without peers; a case that repeats
its rounds by itself has one here. With ``--client PYTHON`` the other daemon's load comes from the
client that this interpreter imports.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from benchmarks.cases import CASES
from benchmarks.context import Context
from benchmarks.environment import choose_folder
from benchmarks.load import client_of
from benchmarks.redis_server import find_redis
from benchmarks.scale import FULL, QUICK
from benchmarks.servers import DAEMON_COMMAND

USUAL = ("enqueue_frame", "enqueue_batched", "burst", "lateness", "memory")
Figures = dict[str, list[float]]
"""Every round's value of each metric."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison. Return 0, or 2 for wrong usage."""
    options = _parser().parse_args(arguments)
    cases = CASES[options.store]
    unknown = [name for name in options.only if name not in cases]
    if unknown:
        print(f"--only {unknown[0]}: not one of {', '.join(cases)}", file=sys.stderr)
        return 2
    redis = find_redis() if options.store == "redis" else None
    if options.store == "redis" and redis is None:
        print("--store redis: no redis-server is installed", file=sys.stderr)
        return 2
    builds = {"old": shlex.split(options.old), "new": list(DAEMON_COMMAND)}
    scale = replace(QUICK if options.quick else FULL, rounds=1)
    folder = Path(tempfile.mkdtemp(prefix="tickwheel-against-", dir=choose_folder(None)))
    try:
        for name in options.only:
            by_build: dict[str, Figures] = {build: {} for build in builds}
            for number in range(options.rounds):
                for build, command in builds.items():
                    context = Context(
                        scale, folder / f"{name}-{build}-{number}", None, daemon_command=command,
                        redis_server=redis and redis[0], peers=False, quiet=True,
                    )  # fmt: skip
                    context.folder.mkdir()
                    other = build == "old" and options.client
                    load = client_of(other, folder / "client") if other else nullcontext()
                    with load:
                        result = cases[name](context)
                    for metric, value in result.metrics.items():
                        by_build[build].setdefault(metric, []).append(value)
            _show(by_build["old"], by_build["new"])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.against", description=__doc__)
    parser.add_argument("old", metavar="COMMAND", help="the other daemon: 'serve …' is appended")
    parser.add_argument("--only", nargs="+", metavar="CASE", default=list(USUAL))
    parser.add_argument("--rounds", type=int, metavar="N", default=5)
    parser.add_argument("--store", choices=tuple(CASES), default="sqlite")
    parser.add_argument("--client", metavar="PYTHON", help="an interpreter with the other client")
    parser.add_argument("--quick", action="store_true", help="small counts")
    return parser


def _show(old: Figures, new: Figures) -> None:
    """Print a line per common metric: medians, their spread, and new / old."""
    for metric in sorted(old.keys() & new.keys()):
        middle = [statistics.median(side[metric]) for side in (old, new)]
        ratio = f"{middle[1] / middle[0]:.3f}" if middle[0] else "-"
        texts = [
            f"{_figure(value)} ({_figure(min(side[metric]))} to {_figure(max(side[metric]))})"
            for value, side in zip(middle, (old, new), strict=True)
        ]
        print(f"{metric:45} old {texts[0]}; new {texts[1]}; new / old {ratio}", flush=True)


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 1_000 else f"{value:.4g}"


if __name__ == "__main__":
    raise SystemExit(main())
