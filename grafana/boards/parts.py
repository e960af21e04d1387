"""What dashboards are made of, and the few queries that all of them ask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

JOB = 'job="$job"'
NODE = 'job="$job",instance=~"$instance"'
TOPIC = 'job="$job",topic=~"$topic"'
PAIR = 'job="$job",topic=~"$topic",group=~"$group"'
LATE = "tickwheel_delivery_lateness_seconds"
CAUSE = "tickwheel_lateness_cause_seconds"
RATE = "$__rate_interval"
LEADING = f"max(sum by (shard) (tickwheel_leader{{{JOB}}}))"
"""How many daemons are active, of the shard that has the most."""

Query = tuple[str, str]
"""(expression, legend)"""


State = tuple[int, str, str]
"""(value, word, colour)"""
ACTIVE: Sequence[State] = ((0, "standby", "blue"), (1, "active", "green"))
YES: Sequence[State] = ((0, "no", "red"), (1, "yes", "green"))
TROUBLE: Sequence[State] = ((0, "no", "green"), (1, "yes", "red"))
HELD: Sequence[State] = ((0, "goes on", "green"), (1, "held", "yellow"))
LEADERS: Sequence[State] = (
    (0, "none", "red"), (1, "one", "green"), (2, "TWO", "red"), (3, "THREE", "red"),
)  # fmt: skip
"""Of one shard: a second one has not noticed that it was deposed."""
MOST = 20
"""So many lines of a panel with one for each group; there may be thousands of them."""


@dataclass
class Panel:
    """One picture. ``kind``: timeseries, stat, heatmap, table or text."""

    title: str
    queries: Sequence[Query] = ()
    unit: str = "short"
    kind: str = "timeseries"
    about: str = ""
    red_above: float | None = None
    red_below: float | None = None
    states: Sequence[State] = ()
    """Words and colours for the values of a state, instead of numbers."""
    stacked: bool = False
    console: str = ""
    """The page of the console with the tasks that are counted here, as ``tasks?state=ready``."""


@dataclass
class Row:
    """Panels side by side."""

    panels: Sequence[Panel]
    height: int = 8


@dataclass
class Dashboard:
    uid: str
    title: str
    about: str
    variables: Sequence[tuple[str, str]]
    """(name, query); ``job`` and the data source always stand before them."""
    rows: Sequence[Row]


def rate(name: str, where: str, by: str) -> str:
    return f"sum by ({by}) (rate({name}{{{where}}}[{RATE}]))"


def total(name: str, where: str = JOB, by: str = "") -> str:
    return f"sum by ({by}) ({name}{{{where}}})" if by else f"sum({name}{{{where}}})"


def most(expression: str) -> str:
    """The highest of the series."""
    return f"topk({MOST}, {expression})"


def quantiles(name: str, where: str, *shares: float) -> list[Query]:
    return [
        (
            f"histogram_quantile({share}, sum by (le) (rate({name}_bucket{{{where}}}[{RATE}])))",
            f"p{share * 100:g}",
        )
        for share in shares
    ]


def heat(title: str, name: str, where: str, unit: str = "s") -> Panel:
    expression = f"sum by (le) (increase({name}_bucket{{{where}}}[{RATE}]))"
    return Panel(title, [(expression, "{{le}}")], unit, "heatmap")


def stat(
    title: str,
    expression: str,
    unit: str = "short",
    about: str = "",
    *,
    states: Sequence[State] = (),
    red_above: float | None = None,
    red_below: float | None = None,
    console: str = "",
) -> Panel:
    colours = {"red_above": red_above, "red_below": red_below}
    query = [(expression, "")]
    return Panel(title, query, unit, "stat", about, states=states, console=console, **colours)


def states(title: str, queries: Sequence[Query], words: Sequence[State], about: str = "") -> Panel:
    """What each was when."""
    return Panel(title, queries, kind="state-timeline", about=about, states=words)
