"""The input and the result of a case. This module knows no case."""

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
from benchmarks.peers import Queue
from benchmarks.postgres_server import Postgres, TickwheelOnPostgres
from benchmarks.redis_server import Redis, TickwheelOnRedis
from benchmarks.scale import RUN_TIMEOUT_S, Scale
from benchmarks.servers import DAEMON_COMMAND, Beanstalkd, Echo, Server, Tickwheel


@dataclass
class Result:
    """Figures of a case. ``metrics`` has named values for bounds and tools."""

    case: str
    metrics: dict[str, float] = field(default_factory=dict)
    rows: list[tuple[str, str]] = field(default_factory=list)
    """(label, figure) for people."""
    rounds: dict[str, list[float]] = field(default_factory=dict)
    """The rates of all rounds behind each median."""
    details: dict[str, Any] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    """Comparisons that were not made, with the reasons."""

    def row(self, what: str, figure: str) -> None:
        self.rows.append((what, figure))

    def metric(self, name: str, value: float) -> None:
        self.metrics[f"{self.case}.{name}"] = value

    def rate(self, name: str, what: str, rates: list[float], remark: str = "") -> float:
        """Record the median of the rounds as metric and row, and return it."""
        middle = statistics.median(rates)
        self.rounds[name] = [round(rate) for rate in rates]
        self.metric(name, middle)
        spread = f" ({min(rates):,.0f}-{max(rates):,.0f})" if len(rates) > 1 else ""
        self.row(what, f"{middle:,.0f}/s{spread}{remark}")
        return middle

    def median(self, name: str, what: str, rounds: Sequence[dict[str, Any]]) -> float:
        """Record the median rate, and the server's CPU time per task, which depends little on other
        programs on the machine."""
        self.metric(f"{name}_server_us", server_us(rounds))
        return self.rate(name, what, rates(rounds), busy(rounds))

    def ratio(self, name: str, what: str, value: float) -> None:
        self.metric(name, value)
        self.row(what, f"{value:.2f} x")

    def against_queues(self, what: str, rate: float, context: Context) -> None:
        """Record the ratio of ``rate`` to that of each queue on PostgreSQL, and the lowest."""
        ratios = []
        for queue in context.queues:
            ratios.append(rate / self.metrics[f"{self.case}.{queue.key}"])
            self.ratio(f"ratio_{queue.key}", f"{what} / {queue.name}", ratios[-1])
        if ratios:
            self.metric("ratio_queues", min(ratios))
        elif context.on_postgres:
            self.missing.append("other queues on PostgreSQL (--peers all)")


@dataclass
class Context:
    """The environment of a run."""

    scale: Scale
    folder: Path
    beanstalkd: str | None
    """The peer's program, or None if it is absent or not wanted."""
    peers_missing: str = ""
    """The reason why there is no beanstalkd."""
    postgres_programs: str | None = None
    """Folder with the programs, or None if they are absent or not wanted."""
    postgres_missing: str = ""
    on_postgres: bool = False
    """Whether PostgreSQL is the measured store."""
    queues: Sequence[Queue] = ()
    """Other queues on PostgreSQL. There are none unless all peers are wanted."""
    daemon_command: Sequence[str] = DAEMON_COMMAND
    redis_server: str | None = None
    """The program of the measured store, or None for another store."""
    peers: bool = True
    """Whether peers are wanted."""
    quiet: bool = False
    patience_s: float = 0.0
    """Maximum seconds that a round waits for an otherwise idle machine."""
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def tickwheel(self, *, history: bool = False) -> Tickwheel:
        """Return a new daemon on a new store, with a history in its folder if ``history``."""
        folder = self.fresh_folder("tickwheel")
        settings = [f"history_dir={(folder / 'history').resolve()}"] if history else []
        if self.on_postgres:
            return TickwheelOnPostgres(folder, self.postgres(), self.daemon_command, settings)
        if self.redis_server is not None:
            return TickwheelOnRedis(folder, self.redis(), self.daemon_command, settings)
        return Tickwheel(folder, self.daemon_command, settings=settings)

    def redis(self) -> Redis:
        """Return a new redis-server."""
        assert self.redis_server is not None
        return Redis(self.fresh_folder("redis"), self.redis_server)

    def peer(self, mode: str) -> Beanstalkd:
        """Return a new beanstalkd."""
        assert self.beanstalkd is not None
        return Beanstalkd(self.fresh_folder("beanstalkd"), self.beanstalkd, mode)

    def echo(self) -> Echo:
        """Return a new echo server."""
        return Echo(self.fresh_folder("echo"))

    def postgres(self) -> Postgres:
        """Return a new cluster of PostgreSQL."""
        assert self.postgres_programs is not None
        return Postgres(self.fresh_folder("postgres"), self.postgres_programs)

    def fresh_folder(self, name: str) -> Path:
        return self.folder / f"{name}-{next(self._numbers)}"

    def say(self, text: str) -> None:
        """Report progress on standard error."""
        if not self.quiet:
            print(text, file=sys.stderr, flush=True)


Contestant = Callable[[int], dict[str, Any]]
"""Runs a round of a system. Takes the round's number, returns the load's figures."""


def alternate(
    context: Context, case: str, contestants: dict[str, Contestant], rounds: int | None = None
) -> Rounds:
    """Run every contestant once per round, in turn, so that a slow minute of the machine affects
    all. ``rounds`` overrides the scale's number."""
    rounds_of: Rounds = {name: [] for name in contestants}
    for number in range(rounds or context.scale.rounds):
        for name, contestant in contestants.items():
            if context.patience_s and not wait_until_idle(context.patience_s):
                context.say(f"{case}: the machine did not become idle")
            figures = contestant(number)
            rounds_of[name].append(figures)
            rate = figures["count"] / figures["elapsed_s"]
            context.say(f"{case}: round {number + 1}: {name}: {rate:,.0f}/s")
    return rounds_of


Rounds = dict[str, list[dict[str, Any]]]


def rates(rounds: Sequence[dict[str, Any]]) -> list[float]:
    return [figures["count"] / figures["elapsed_s"] for figures in rounds]


def busy(rounds: Sequence[dict[str, Any]]) -> str:
    """Return the CPU use of both sides as text, which shows the bottleneck."""
    elapsed_s = sum(figures["elapsed_s"] for figures in rounds)
    client = sum(figures["client_cpu_s"] for figures in rounds) / elapsed_s
    server = sum(figures["server_cpu_s"] for figures in rounds) / elapsed_s
    a_task = server_us(rounds)
    return f"; CPU: server {server:.0%}, load {client:.0%}; server {a_task:.1f} us a task"


def server_us(rounds: Sequence[dict[str, Any]]) -> float:
    """Return the server's CPU time per task in microseconds."""
    cpu_s: float = sum(figures["server_cpu_s"] for figures in rounds)
    count: int = sum(figures["count"] for figures in rounds)
    return cpu_s / count * 1e6


def load_of(
    server: Server, job: str, *, limit_s: int, queue: Queue | None = None, **arguments: object
) -> Load:
    """Return a load process for a server, that of ``queue`` if any."""
    command, folder = (queue.command, queue.folder) if queue is not None else (None, None)
    return Load(job, limit_s=limit_s, command=command, folder=folder, port=server.port, **arguments)


def measured(
    server: Server,
    job: str,
    *,
    limit_s: int = RUN_TIMEOUT_S,
    queue: Queue | None = None,
    **arguments: object,
) -> dict[str, Any]:
    """Run a load against a server. Return its figures with the server's CPU time. ``queue`` is the
    peer whose job it is, if any."""
    with load_of(server, job, limit_s=limit_s, queue=queue, **arguments) as load:
        cpu_s = server.cpu_s()  # CPU time for preparing the load does not count
        figures = load.run()
        return {**figures, "server_cpu_s": server.cpu_s() - cpu_s}
