"""The engine's part of bulk operations: their rows, what is counted, and what a refused batch
leaves."""

from __future__ import annotations

import pytest

from tickwheel.engine.engine import Engine
from tickwheel.engine.state import EngineConfig
from tickwheel.engine.tasks import Selector, Step
from tickwheel.model.kinds import BULK, REFUSALS_MAX, Bulk, BulkRow, BulkState, Selection
from tickwheel.model.records import TaskOptions, TaskRow

NOW_MS = 1_800_000_000_000


def engine(**limits: int) -> Engine:
    return Engine(EngineConfig(**limits), 1, 0, NOW_MS)


def bulk(name: str, made_ms: int = 0, **options: object) -> Bulk:
    return Bulk(name, "cancel", "t", Selection(**options), (), None, made_ms, 5)  # type: ignore[arg-type]


def test_reasons_beyond_the_limit_are_counted_together() -> None:
    bulks = engine().bulks
    bulks.make(bulk("a"))
    for n in range(REFUSALS_MAX + 5):
        bulks.record_step("a", Step((n, ""), 2, 2, {f"reason-{n:02}": 1, "cancelled": 1}))
    row = bulks.record_step("a", Step((99, ""), 1, 1, {"reason-00": 1}))
    refused = dict(row.refused)
    assert len(refused) == REFUSALS_MAX + 1
    assert (refused["reason-00"], refused["reason-31"], refused["other"]) == (2, 1, 5)
    assert (row.place, row.changed, row.matched) == ((99, ""), 37, 75)
    assert row.matched == row.changed + sum(refused.values())


def test_a_refused_batch_keeps_the_progress_of_a_bulk() -> None:
    """Like an ack: with the next batch, or a later state of it."""
    ours = engine()
    ours.bulks.make(bulk("a"))
    sealed = ours.seal(NOW_MS, 0)
    assert sealed is not None and sealed.effects.records.keys() == {(BULK, "a")}
    ours.bulks.make(bulk("b"))
    later = ours.bulks.record_step("a", Step((7, ""), 1, 0, {}))
    ours.intake.refuse(sealed)
    again = ours.seal(NOW_MS, 0)
    assert again is not None
    assert again.effects.of_kind(BULK) == {"a": later, "b": BulkRow(bulk("b"))}


def test_bulk_rows_are_recovered_in_creation_order() -> None:
    ours = engine()
    rows = [
        BulkRow(bulk("b", 2)),
        BulkRow(bulk("a", 3), BulkState.DONE, ended_ms=9),
        BulkRow(bulk("c", 1), BulkState.FAILED, ended_ms=4, note="why"),
    ]
    ours.bulks.restore(rows, NOW_MS, 0)
    assert list(ours.bulks.rows) == ["c", "b", "a"]
    assert ours.core.bulk_running == 1
    assert ours.core.open.is_empty()


def test_running_bulk_operations_are_never_forgotten() -> None:
    ours = engine(bulk_remembered_max=1, bulk_remembered_ms=10)
    for name in "abc":
        ours.bulks.make(bulk(name))
    ours.bulks.end("b", BulkState.DONE, NOW_MS, 0)
    ours.bulks.end("a", BulkState.CANCELLED, NOW_MS - 5_000, 1)  # the clock was set back
    assert list(ours.bulks.rows) == ["a", "c"]
    ours.sweep(100)
    assert list(ours.bulks.rows) == ["c"]
    assert ours.core.open.effects.of_kind(BULK)["a"] is None


@pytest.mark.parametrize(
    ("options", "row", "fits"),
    [
        ({}, TaskRow(1, 5, "t", b""), True),
        ({"due_from_ms": 5, "due_to_ms": 6}, TaskRow(1, 5, "t", b""), True),
        ({"due_from_ms": 6}, TaskRow(1, 5, "t", b""), False),
        ({"due_to_ms": 5}, TaskRow(1, 5, "t", b""), False),
        ({"key_prefix": "k"}, TaskRow(1, 5, "t", b""), False),
        ({"key_prefix": "k"}, TaskRow(1, 5, "t", b"", TaskOptions("ki")), True),
        ({"key_prefix": "ki"}, TaskRow(1, 5, "t", b"", TaskOptions("k")), False),
        ({"tags": "a", "where": "x > 1"}, TaskRow(1, 5, "t", b"", TaskOptions(tag="a")), False),
        (
            {"tags": "a", "where": "x > 1"},
            TaskRow(1, 5, "t", b"", TaskOptions(tag="a", properties={"x": 2})),
            True,
        ),
    ],
)
def test_a_selection_matches_if_all_parts_match(
    options: dict[str, object], row: TaskRow, fits: bool
) -> None:
    assert Selector(bulk("a", **options).selection).fits(row) is fits
