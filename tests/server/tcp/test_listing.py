"""How much of a store one LIST reads at a time: its rows come with their bodies."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tickwheel.api.tasks import PAGE, TasksPage
from tickwheel.model.records import ID_STEP, TaskRow, TaskSnapshot
from tickwheel.server.shard import tasks
from tickwheel.server.shard.tasks import (
    BYTES_PER_REQUEST_MAX,
    STEP_BYTES,
    STEP_FIRST,
    TaskPages,
    _Conditions,
)
from tickwheel.server.tcp.listener import value_bytes

COUNT = 2_000
MIB = 1 << 20


class Reads:
    """Rows that share one body; what was asked of them."""

    def __init__(self, body: bytes) -> None:
        self._rows = [TaskRow(n * ID_STEP, n, "t", body, None) for n in range(1, COUNT + 1)]
        self.steps: list[int] = []

    async def scan(
        self, after_id: int, limit: int, topic: str | None, *, back: bool
    ) -> tuple[list[TaskSnapshot], int | None]:
        self.steps.append(limit)
        first = after_id // ID_STEP
        rows = self._rows[first : first + limit]
        following = rows[-1].id if len(rows) == limit else None
        return [TaskSnapshot(row, {}, {}) for row in rows], following


@pytest.fixture(autouse=True)
def rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Describe a task of which only the row exists."""

    def described(parts: object, known: TaskSnapshot) -> dict[str, Any]:
        return {"id": known.row.id, "body": known.row.body}

    monkeypatch.setattr(tasks, "described", described)


def listing_of(reads: Reads) -> TaskPages:
    shell: Any = SimpleNamespace(reader=reads, limits=SimpleNamespace(frame_bytes_max=8 * MIB))
    unused: Any = None
    return TaskPages(shell, unused, value_bytes)


async def request(reads: Reads, limit: int, **options: Any) -> dict[str, Any]:
    return await listing_of(reads)._page(_Conditions.of(TasksPage(**options)), limit)


async def test_small_rows_are_read_in_large_steps() -> None:
    reads = Reads(b"x" * 100)
    assert await request(reads, 1, key="none") == {"tasks": [], "next": None}
    assert reads.steps == [STEP_FIRST, 4 * STEP_FIRST, PAGE.high, PAGE.high]


async def test_large_rows_are_read_in_small_steps() -> None:
    reads = Reads(bytes(MIB))
    answer = await request(reads, 1, key="none")
    assert answer["tasks"] == [] and answer["next"] == sum(reads.steps) * ID_STEP
    assert max(reads.steps[1:]) * MIB <= STEP_BYTES + MIB
    assert 0 <= sum(reads.steps) * MIB - BYTES_PER_REQUEST_MAX < STEP_BYTES + MIB


@pytest.mark.parametrize(("limit", "steps"), [(5, [5]), (100, [100]), (600, [100, 400, 100])])
async def test_a_listing_reads_no_more_than_its_limit(limit: int, steps: list[int]) -> None:
    reads = Reads(b"x")
    answer = await request(reads, limit)
    assert len(answer["tasks"]) == limit and answer["next"] == limit * ID_STEP
    assert reads.steps == steps


async def test_a_page_of_large_rows_ends_at_half_a_frame() -> None:
    reads = Reads(bytes(MIB))
    answer = await request(reads, PAGE.high)
    # Each takes a little more than its body.
    assert len(answer["tasks"]) == 3 and answer["next"] == 3 * ID_STEP
    assert reads.steps == [STEP_FIRST]
