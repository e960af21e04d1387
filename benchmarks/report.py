"""Output of a run as JSON and as tables, with rich if it is installed, otherwise as plain text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

from benchmarks.bounds import Judged
from benchmarks.context import Result


def as_json(
    environment: dict[str, Any],
    scale: str,
    results: Sequence[Result],
    failures: dict[str, str],
    judged: Sequence[Judged],
) -> str:
    """Return a JSON object. ``metrics`` is flat for tools; the rest is for people."""
    document = {
        "environment": environment,
        "scale": scale,
        "metrics": {name: value for r in results for name, value in r.metrics.items()},
        "cases": {
            r.case: {
                "rows": dict(r.rows),
                "rounds": r.rounds,
                "details": r.details,
                "missing": r.missing,
            }
            for r in results
        },
        "failures": failures,
        "bounds": [
            {
                "metric": judgement.bound.metric,
                "relation": judgement.bound.relation,
                "limit": judgement.bound.limit,
                "measured": judgement.measured,
                "verdict": judgement.verdict,
            }
            for judgement in judged
        ],
    }
    return json.dumps(document, indent=2, ensure_ascii=False)


def environment_line(environment: dict[str, Any]) -> str:
    sync = environment["fdatasync_4k_ms"]
    return (
        f"{environment['cpus']} CPUs {environment['machine']}, Linux {environment['kernel']},"
        f" Python {environment['python']}, SQLite {environment['sqlite']},"
        f" {environment['file_system']}, fdatasync of 4 KiB {sync['median']:.2f} ms"
        f" (p99 {sync['p99']:.2f}), peer: {environment['peer']},"
        f" load before {environment['load_average']:.1f}"
    )


def show(
    out: TextIO,
    environment: dict[str, Any],
    results: Sequence[Result],
    failures: dict[str, str],
    judged: Sequence[Judged],
) -> None:
    """Print all figures for people."""
    print(environment_line(environment), file=out)
    _table(
        out,
        ("case", "what", "figure"),
        [(r.case, what, figure) for r in results for what, figure in r.rows],
    )
    for r in results:
        for what in r.missing:
            print(f"{r.case}: not compared with {what}", file=out)
    for case, error in failures.items():
        print(f"{case}: FAILED: {error}", file=out)
    if judged:
        _table(out, ("bound", "wanted", "measured", ""), [_bound_row(item) for item in judged])


def _bound_row(one: Judged) -> tuple[str, str, str, str]:
    figure = "-" if one.measured is None else f"{one.measured:.2f}"
    return one.bound.what, f"{one.bound.relation} {one.bound.limit:g}", figure, one.verdict


def _table(out: TextIO, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        _plain_table(out, [heads, *rows])
        return
    table = Table(*heads)
    for row in rows:
        table.add_row(*row)
    Console(file=out).print(table)


def _plain_table(out: TextIO, rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip(), file=out)
