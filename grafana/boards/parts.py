"""What dashboards are made of, and the few queries that all of them ask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

JOB = 'job="$job"'
NODE = 'job="$job",instance=~"$instance"'
TOPIC = 'job="$job",topic=~"$topic"'
PAIR = 'job="$job",topic=~"$topic",group=~"$group"'
LATE = "tickwheel_delivery_lateness_seconds"
RATE = "$__rate_interval"

Query = tuple[str, str]
"""(expression, legend)"""


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
    stacked: bool = False


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


def stat(title: str, expression: str, unit: str = "short", **colours: float) -> Panel:
    return Panel(title, [(expression, "")], unit, "stat", **colours)  # type: ignore[arg-type]
