"""Many runs, one after the other: what failed with its seed, and what all of them have seen.

They have a process of their own, which ``prepare`` makes fit for them: what it changes holds until
that process ends.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NamedTuple

from simulation.world import Outcome, simulate

COLLECT_RUNS = 25
"""Runs between two garbage collections, which do not affect a run."""
SHOWN_MAX = 20
STUCK_S = 60.0
"""Processor seconds after which a run is stuck: it prints its stack and ends the process."""
LEFT: list[str] = []
"""What went wrong where nobody could catch it, as a coroutine that nobody has closed."""


class Report(NamedTuple):
    """The result of some runs."""

    failed: list[Outcome]
    runs: int
    used_s: float
    """Seconds of processor time."""
    virtual_s: float
    faults: Counter[str]
    events: Counter[str]
    counts: Counter[str]

    def text(self) -> str:
        rate = self.runs / max(self.used_s, 1e-9) * 60
        return "\n".join((
            f"{self.runs} runs, {len(self.failed)} failed; {self.used_s:.1f} s of a core,"
            f" {rate:,.0f} a minute, {self.virtual_s:,.0f} s of their own time",
            f"  seen: {_listed(self.counts)}",
            f"  faults: {_listed(self.faults)}",
            f"  logged: {_listed(self.events)}",
            *(f"  LEFT: {text}" for text in LEFT[:SHOWN_MAX]),
        ))  # fmt: skip

    def json(self) -> str:
        """All of it in one line."""
        failed = [vars(outcome) for outcome in self.failed]
        return json.dumps(self._asdict() | {"failed": failed, "left": LEFT})


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items()))


class Kind(NamedTuple):
    """A kind of runs."""

    name: str
    simulate: Callable[..., Outcome]
    each: int = 1
    """One in this number of seeds has a run of this slow kind."""


def _simulate_nodes(seed: int, **options: Any) -> Outcome:
    from simulation import nodes  # the other runs need nothing of it

    return nodes.simulate(seed, **options)


def _simulate_whole(seed: int, **options: Any) -> Outcome:
    from simulation import whole

    return whole.simulate(seed, **options)


DAEMONS = Kind("daemons", simulate)
NODES = Kind("nodes", _simulate_nodes)
WHOLE = Kind("whole", _simulate_whole, each=4)
KINDS = {kind.name: kind for kind in (DAEMONS, NODES, WHOLE)}


def command(seed: int, kind: Kind = DAEMONS) -> str:
    """What repeats a run."""
    return f"make simulate KIND={kind.name} SEED={seed}"


def prepare() -> None:
    """Make this process one that does nothing but runs."""
    logging.getLogger("tickwheel").setLevel(logging.CRITICAL)
    warnings.simplefilter("error")
    sys.unraisablehook = lambda what: LEFT.append(f"{what.exc_value!r} in {what.object!r}")
    gc.collect()
    gc.freeze()
    gc.disable()  # it is collected between runs


def run_all(seeds: Sequence[int], *, stop_at: int = 0, kind: Kind = DAEMONS) -> Report:
    """Run these seeds until `stop_at` have failed (0: all)."""
    failed: list[Outcome] = []
    faults, events, counts = Counter[str](), Counter[str](), Counter[str]()
    began_s, virtual_s, runs = time.process_time(), 0.0, 0
    for seed in seeds:
        _watch(seed, kind)
        outcome = kind.simulate(seed)
        runs += 1
        virtual_s += outcome.virtual_s
        faults += outcome.faults
        events += outcome.events
        counts += outcome.counts
        if outcome.problems:
            failed.append(outcome)
            print(failure(outcome, kind), flush=True)  # noqa: T201  # its output
        if runs % COLLECT_RUNS == 0:
            gc.collect()
        if stop_at and len(failed) >= stop_at:
            break
    signal.setitimer(signal.ITIMER_PROF, 0)
    gc.collect()
    used_s = time.process_time() - began_s
    return Report(failed, runs, used_s, virtual_s, faults, events, counts)


def _watch(seed: int, kind: Kind) -> None:
    """End the process if this run does not end."""

    def stuck(number: int, frame: FrameType | None) -> None:
        print(f"seed {seed} has no end: {command(seed, kind)}", file=sys.stderr)  # noqa: T201  # its output
        traceback.print_stack(frame)
        os._exit(1)

    signal.signal(signal.SIGPROF, stuck)
    signal.setitimer(signal.ITIMER_PROF, STUCK_S)


def failure(outcome: Outcome, kind: Kind = DAEMONS) -> str:
    """Return the problems of a run and how to repeat it."""
    again = command(outcome.seed, kind)
    lines = [f"FAILED seed {outcome.seed} (trace {outcome.trace_hash}): {again}"]
    lines += [f"  {text}" for text in outcome.problems[:SHOWN_MAX]]
    return "\n".join(lines)


def main(given: Sequence[str] | None = None) -> int:
    """0: all runs held."""
    parser = argparse.ArgumentParser(prog="simulate", description=__doc__)
    parser.add_argument("--kind", choices=KINDS, help="runs of this kind alone")
    parser.add_argument("--seeds", type=int, default=1_000, help="how many runs")
    parser.add_argument("--first", type=int, default=1, help="the first seed")
    parser.add_argument("--seed", type=int, help="this run alone, with its trace")
    parser.add_argument("--stop-at", type=int, default=0, help="stop after so many failures")
    parser.add_argument("--json", action="store_true", help="a report is a line of JSON")
    args = parser.parse_args(given)
    if args.seed is not None and args.kind is None:
        parser.error(f"--seed needs --kind, one of {', '.join(KINDS)}")
    if os.environ.get("PYTHONHASHSEED") != "0":
        # Sets of text are gone through in an order that this seed decides.
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606  # itself
    prepare()
    if args.seed is not None:
        return _one(args.seed, KINDS[args.kind])
    seeds, has_failed = range(args.first, args.first + args.seeds), False
    for kind in KINDS.values() if args.kind is None else (KINDS[args.kind],):
        some = [seed for seed in seeds if args.kind is not None or seed % kind.each == 0]
        report = run_all(some, stop_at=args.stop_at, kind=kind)
        print(report.json() if args.json else f"{kind.name}: {report.text()}", flush=True)  # noqa: T201  # its output
        has_failed |= bool(report.failed)
    return 1 if has_failed or LEFT else 0


def _one(seed: int, kind: Kind) -> int:
    lines: list[tuple[Any, ...]] = []
    _watch(seed, kind)
    outcome = kind.simulate(seed, lines=lines)
    for at_s, *what in lines:
        print(f"{at_s:9.4f} {' '.join(map(str, what))}")  # noqa: T201  # its output
    print(f"seed {seed}: trace {outcome.trace_hash}, {outcome.lines} lines")  # noqa: T201  # its output
    if outcome.problems:
        print(failure(outcome, kind))  # noqa: T201  # its output
    return 1 if outcome.problems else 0
