"""What ``tickwheel consumers`` asks the daemon, and how it shows its answers."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from cli.test_groups import _ask
from tickwheel.api.frames import FrameType as T
from tickwheel.cli.subscribe import consumers
from tickwheel.errors import BadRequest

ONE: dict[str, Any] = {
    "topic": "orders.close", "group": "billing", "kind": "subscription", "in_flight": 3,
    "prefetch": 1_000, "since_ms": 0, "client": "worker", "address": "10.0.0.7:5123",
    "host": "w-3.example", "pid": 4_711, "version": "1.0", "token": None,
}  # fmt: skip
SILENT = ONE | {
    "group": None, "kind": "pull", "client": "", "host": None, "pid": None, "version": None,
}  # fmt: skip


async def test_each_consumer_has_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    since_ms = int(time.time() * 1000) - 60_000
    results = tuple(item | {"since_ms": since_ms} for item in (ONE, SILENT))
    answer = {"consumers": results, "next": None}
    assert await _ask(consumers, T.CONSUMER_LIST, answer) == ({"limit": 101},)
    said, silent = capsys.readouterr().out.splitlines()[1:]
    for word in ("w-3.example", "4711", "orders.close", "billing", "3", "1,000", " 1m"):
        assert word in said, (word, said)
    assert silent.startswith("10.0.0.7:5123") and "(broadcast)" in silent and " - " in silent


async def test_consumers_as_json_have_one_object_per_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    answer = {"consumers": (ONE, SILENT), "next": None}
    asked = await _ask(
        lambda call: consumers(call, topic="orders.close", group="billing"), T.CONSUMER_LIST,
        answer, as_json=True,
    )  # fmt: skip
    assert asked == ({"topic": "orders.close", "group": "billing", "limit": 1_000},)
    results = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert results == [item | {"since": "1970-01-01T00:00:00.000Z"} for item in (ONE, SILENT)]


async def test_a_page_longer_than_the_limit_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    """A page ends behind all of one connection."""
    answer = {"consumers": (ONE,) * 5, "next": None}
    asked = await _ask(lambda call: consumers(call, limit=2), T.CONSUMER_LIST, answer, as_json=True)
    assert asked == ({"limit": 2},)
    assert len(capsys.readouterr().out.splitlines()) == 2
    await _ask(lambda call: consumers(call, limit=2), T.CONSUMER_LIST, answer)
    shown = capsys.readouterr()
    assert len(shown.out.splitlines()) == 3 and "only the first 2 rows are shown" in shown.err


async def test_an_empty_consumer_list_is_reported_on_stderr(
    capsys: pytest.CaptureFixture[str],
) -> None:
    await _ask(consumers, T.CONSUMER_LIST, {"consumers": (), "next": None})
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "tickwheel: no matching consumer is connected\n")


async def test_consumers_raises_the_daemons_error() -> None:
    with pytest.raises(BadRequest, match="topic"):
        await _ask(consumers, T.CONSUMER_LIST, BadRequest("topic must be a name"))
