"""What a case is given and what it gives back. Knows no case."""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.environment import wait_until_idle
from benchmarks.load import Load
from benchmarks.peers import Graphile
from benchmarks.postgres_server import Postgres
from benchmarks.redis_server import Redis, TickwheelOnRedis
from benchmarks.scale import RUN_TIMEOUT_S, Scale
from benchmarks.servers import DAEMON_COMMAND, Beanstalkd, Echo, Server, Tickwheel


@dataclass
class Result:
    """Figures of one case. ``metrics`` are what bounds and other tools read, by name."""

    case: str
    metrics: dict[str, float] = field(default_factory=dict)
    rows: list[tuple[str, str]] = field(default_factory=list)
    """(what, figure) for people."""
    rounds: dict[str, list[float]] = field(default_factory=dict)
    """Every round's rate behind a median."""
    details: dict[str, Any] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    """Comparisons that were not made, and why."""

    def row(self, what: str, figure: str) -> None:
        self.rows.append((what, figure))

    def metric(self, name: str, value: float) -> None:
        self.metrics[f"{self.case}.{name}"] = value

    def rate(self, name: str, what: str, rates: list[float], remark: str = "") -> float:
        """The median of the rounds, noted as metric and row."""
        middle = statistics.median(rates)
        self.rounds[name] = [round(rate) for rate in rates]
        self.metric(name, middle)
        spread = f" ({min(rates):,.0f}-{max(rates):,.0f})" if len(rates) > 1 else ""
        self.row(what, f"{middle:,.0f}/s{spread}{remark}")
        return middle

    def median(self, name: str, what: str, rounds: Sequence[dict[str, Any]]) -> float:
        """The rate of the rounds, and beside it the server's processor time a task: that hardly
        moves on a machine that others use too."""
        self.metric(f"{name}_server_us", server_us(rounds))
        return self.rate(name, what, rates(rounds), busy(rounds))

    def ratio(self, name: str, what: str, value: float) -> None:
        self.metric(name, value)
        self.row(what, f"{value:.2f} x")


@dataclass
class Context:
    """One run's circumstances."""

    scale: Scale
    folder: Path
    beanstalkd: str | None
    """The peer's program, None when it is absent or not wanted."""
    peers_missing: str = ""
    """Why there is no beanstalkd."""
    postgres_programs: str | None = None
    """Where the programs of that peer are, None when it is absent or not wanted."""
    postgres_missing: str = ""
    graphile: Graphile | None = None
    """A queue on it; None unless all peers are wanted."""
    daemon_command: Sequence[str] = DAEMON_COMMAND
    redis_server: str | None = None
    """The program of the store that is measured; None: the embedded store is."""
    peers: bool = True
    """Whether peers are wanted."""
    quiet: bool = False
    patience_s: float = 0.0
    """How long a round may wait for a machine that is idle otherwise."""
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def tickwheel(self, *, history: bool = False) -> Tickwheel:
        """A fresh daemon on a fresh store; with ``history`` it keeps one, in its folder."""
        folder = self.fresh_folder("tickwheel")
        settings = [f"history_dir={(folder / 'history').resolve()}"] if history else []
        if self.redis_server is None:
            return Tickwheel(folder, self.daemon_command, settings=settings)
        return TickwheelOnRedis(folder, self.redis(), self.daemon_command, settings)

    def redis(self) -> Redis:
        """A fresh redis-server."""
        assert self.redis_server is not None
        return Redis(self.fresh_folder("redis"), self.redis_server)

    def peer(self, mode: str) -> Beanstalkd:
        """A fresh beanstalkd."""
        assert self.beanstalkd is not None
        return Beanstalkd(self.fresh_folder("beanstalkd"), self.beanstalkd, mode)

    def echo(self) -> Echo:
        """A fresh server that sends back what it gets."""
        return Echo(self.fresh_folder("echo"))

    def postgres(self) -> Postgres:
        """A fresh cluster of PostgreSQL."""
        assert self.postgres_programs is not None
        return Postgres(self.fresh_folder("postgres"), self.postgres_programs)

    def fresh_folder(self, name: str) -> Path:
        return self.folder / f"{name}-{next(self._numbers)}"

    def say(self, text: str) -> None:
        """Progress, on standard error."""
        if not self.quiet:
            print(text, file=sys.stderr, flush=True)


Contestant = Callable[[int], dict[str, Any]]
"""One round of one system: the round's number in, the load's figures out."""


def alternate(
    context: Context, case: str, contestants: dict[str, Contestant], rounds: int | None = None
) -> Rounds:
    """Every contestant once a round, in turn, so that a slow minute of the machine hits all.
    ``rounds``: instead of the scale's."""
    rounds_of: Rounds = {name: [] for name in contestants}
    for number in range(rounds or context.scale.rounds):
        for name, contestant in contestants.items():
            if context.patience_s and not wait_until_idle(context.patience_s):
                context.say(f"{case}: the machine was never idle")
            figures = contestant(number)
            rounds_of[name].append(figures)
            rate = figures["count"] / figures["elapsed_s"]
            context.say(f"{case}: round {number + 1}: {name}: {rate:,.0f}/s")
    return rounds_of


Rounds = dict[str, list[dict[str, Any]]]


def rates(rounds: Sequence[dict[str, Any]]) -> list[float]:
    return [figures["count"] / figures["elapsed_s"] for figures in rounds]


def busy(rounds: Sequence[dict[str, Any]]) -> str:
    """How busy the processes were: it shows which side was the bottleneck."""
    elapsed_s = sum(figures["elapsed_s"] for figures in rounds)
    client = sum(figures["client_cpu_s"] for figures in rounds) / elapsed_s
    server = sum(figures["server_cpu_s"] for figures in rounds) / elapsed_s
    a_task = server_us(rounds)
    return f"; CPU: server {server:.0%}, load {client:.0%}; server {a_task:.1f} us a task"


def server_us(rounds: Sequence[dict[str, Any]]) -> float:
    """Processor time of the server for a task."""
    cpu_s: float = sum(figures["server_cpu_s"] for figures in rounds)
    count: int = sum(figures["count"] for figures in rounds)
    return cpu_s / count * 1e6


def measured(
    server: Server,
    job: str,
    *,
    limit_s: int = RUN_TIMEOUT_S,
    graphile: Graphile | None = None,
    **arguments: object,
) -> dict[str, Any]:
    """One load against a server, with the server's processor time. ``graphile``: it is a job of
    that peer's."""
    if graphile is not None:
        started = Load(
            job,
            limit_s=limit_s,
            command=graphile.command,
            folder=graphile.folder,
            port=server.port,
            **arguments,
        )
    else:
        started = Load(job, limit_s=limit_s, port=server.port, **arguments)
    with started as load:
        cpu_s = server.cpu_s()  # what it took to prepare the load does not count
        figures = load.run()
        return {**figures, "server_cpu_s": server.cpu_s() - cpu_s}
