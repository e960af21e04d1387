"""Each command's table at 80 columns: what somebody looks for is there, and whole."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from tickwheel.cli import enqueue, schedules, subscribe, tasks
from tickwheel.cli.groups import SPARE, TOPICS, group_columns
from tickwheel.cli.history import report_grid
from tickwheel.cli.output import Grid, grid_of, table_of
from tickwheel.cli.serve import TOKENS_SPARE, token_columns
from tickwheel.cli.top import Meter, rows_grid, stats_topics_grid

TERMINAL = 80
AT = "2026-11-23 06:30:58.627+01:00"
ID = "1838467236598235136"
LONG = "shop.eu-central.orders.close"
GROUP = {
    "ready": 12_345, "in_flight": 256, "waiting": 17, "dead": 3, "subscribers": 4,
    "delivered": 8_812_345, "acked": 8_812_000, "oldest_ready_ms": 73_000, "paused": False,
    "rate": None, "burst": None, "retry": None, "replay": None, "unused_ms": None,
}  # fmt: skip
TOPIC: dict[str, Any] = {
    **GROUP, "scheduled": 1_234_567, "enqueued": 9_912_345,
    "groups": {"billing": GROUP, "mail": {**GROUP, "paused": True}},
}  # fmt: skip
COUNTS = {"orders.close": TOPIC, LONG: {**TOPIC, "paused": True}}
GROUPS = [{"topic": LONG, "group": n, **of} for n, of in TOPIC["groups"].items()]
REPORTED = {
    "topic": LONG, "group": "billing", "enqueued": 100_000, "delivered": 100_123, "acked": 99_000,
    "nacked": 123, "dead": 7, "on_time_share": 0.9991, "late_p50_ms": 1.0, "late_p99_ms": 12.0,
    "late_max_ms": 73_000.0, "first_try_share": 0.99,
}  # fmt: skip


def _with(grid: Grid, *rows: tuple[str, ...]) -> Grid:
    grid.rows += rows
    return grid


def _top() -> Grid:
    raw = {
        "node": "n1", "version": "1", "epoch": 1, "uptime_s": 10.0, "store_ok": True, "early": 0,
        "connections": 1, "subscribers": 1, "topics": COUNTS, "dead": 3, **TOPIC,
    }  # fmt: skip
    meter = Meter("busy")
    meter.read(raw)
    return rows_grid(meter.read({**raw, "uptime_s": 11.0}))


TABLES: dict[str, tuple[Grid, str]] = {
    "topics": (
        grid_of(TOPICS, [{"topic": n, **of} for n, of in COUNTS.items()], spare=SPARE),
        "topic scheduled ready in flight waiting dead paused",
    ),
    "groups": (
        grid_of(group_columns(GROUPS), GROUPS, spare=SPARE),
        "topic group ready in flight waiting dead paused",
    ),
    "stats": (stats_topics_grid(COUNTS), "topic group scheduled ready in flight waiting dead"),
    "top": (_top(), "topic group ready in flight waiting dead out/s"),
    "list": (
        _with(
            grid_of(tasks.COLUMNS),
            (ID, "in flight", "orders.close", AT, "order-42", '{"order": 42}'),
        ),
        "id state topic due key",
    ),
    "dead list": (
        _with(
            grid_of(tasks.DEAD_COLUMNS, spare=tasks.DEAD_SPARE),
            (ID, "billing", LONG, AT, "3", "ValueError: no such order"),
        ),
        "id group topic died reason",
    ),
    "schedule list": (
        _with(
            grid_of(schedules.COLUMNS),
            ("nightly", "reports.daily", "0 3 * * 1-5 Europe/Berlin", AT, "7"),
        ),
        "name topic when next runs",
    ),
    "transactions list": (
        _with(
            grid_of(enqueue.COLUMNS, spare=enqueue.SPARE),
            ("9f86d081884c7d65" * 2, "pay", "parked", "3", AT, "2 of 5", LONG),
        ),
        "transaction group state tasks began asked",
    ),
    "consumers": (
        _with(
            grid_of(subscribe.CONSUMERS, spare=subscribe.SPARE),
            ("worker-17.shop.example", "4711", LONG, "billing", "12", "1,000", "3h 12m",
             "subscription", "billing-worker", "1.0.0"),
        ),
        "host pid topic group in flight prefetch",
    ),
    "token list": (
        _with(
            grid_of(token_columns({}, 0), spare=TOKENS_SPARE),
            ("8f3a2b1c", "shop", "read, consume orders.*", AT, f"{AT} (expired)", AT),
        ),
        "id name scopes expires last used",
    ),
    "report": (report_grid([REPORTED], []), "topic group enqueued dead on time p99"),
}  # fmt: skip


def drawn(grid: Grid, width: int) -> list[str]:
    out = io.StringIO()
    shown, _ = grid.fitted(width)
    Console(file=out, width=width, force_terminal=False).print(table_of(shown, width))
    return out.getvalue().splitlines()


@pytest.mark.parametrize("name", TABLES)
def test_important_columns_fit_80_columns(name: str) -> None:
    grid, wanted = TABLES[name]
    heads = " ".join(drawn(grid, TERMINAL)[1 if grid.title else 0].split())
    for head in wanted.replace("in flight", "in_flight").split():
        assert head.replace("_", " ") in heads


@pytest.mark.parametrize("name", TABLES)
def test_shown_cells_are_complete_at_any_width(name: str) -> None:
    grid, _ = TABLES[name]
    for width in range(40, 200, 3):
        shown, hidden = grid.fitted(width)
        assert not set(hidden) & set(shown.columns)
        lines = drawn(grid, width)
        assert all(len(line) <= width for line in lines)
        # Folded or not, each character of each cell is somewhere.
        results = sorted("".join("".join(lines).split()).replace("─", ""))
        texts = [shown.title, *shown.columns, *(cell for row in shown.rows for cell in row)]
        assert results == sorted("".join("".join(texts).split()))


def test_milliseconds_are_dropped_before_empty_columns() -> None:
    grid = Grid(("name", "at", "rate", "n"), right=frozenset("n"), times=frozenset(("at",)))
    grid.rows += [("a", AT, "-", "1"), ("b", "-", "", "2")]
    assert grid.fitted(TERMINAL) == (grid, [])
    shown, hidden = grid.fitted(42)
    assert [*shown.columns, *hidden] == ["name", "at", "rate", "n"]
    assert [row[1] for row in shown.rows] == [AT.replace(".627", ""), "-"]
    shown, hidden = grid.fitted(36)
    assert [*shown.columns, *hidden] == ["name", "at", "n"], "and nobody has to be told"


def test_spare_columns_are_dropped_first_and_in_order() -> None:
    heads = ("name", "a", "b", "c", "text")
    grid = Grid(heads, right=frozenset("abc"), spare=("b", "text"))
    grid.rows.append(("n" * 20, *["123456789"] * 3, "t" * 20))
    left = [grid.fitted(width)[0].columns for width in (90, 75, 60, 45, 32, 25)]
    assert [[name for name in heads if name not in columns] for columns in left] == [
        [], ["b"], ["b", "text"], ["b", "text"], ["b", "c", "text"], ["a", "b", "c", "text"],
    ]  # fmt: skip


def test_the_title_of_a_table_can_be_any_path() -> None:
    grid = Grid(("n" * 30,), "Restored into /[b]/\udcff.db")
    assert drawn(grid, TERMINAL)[0].rstrip() == r"Restored into /[b]/\udcff.db"
