"""The console at the HTTP of all shards: every view, and what is done in it, is of all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from playwright.sync_api import expect

from console.asking import ask, get, make_group, post
from console.conftest import Console
from support.daemon import Daemon
from support.ports import free_ports
from support.shards import key_in

COUNT = 3
HOUR_MS = 3_600_000
Open = Callable[..., Console]


@pytest.fixture(scope="module")
def hall(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Three shards on one machine; ``http`` is that of all."""
    folder = tmp_path_factory.mktemp("hall")
    listen = f"tcp://127.0.0.1:{free_ports(COUNT)}"
    args = ("--processes", str(COUNT), "--listen", listen, "--http-all", "127.0.0.1:0")
    store = f"sqlite:///{folder / 'shards'}/"
    with Daemon(folder, store=store, args=args, http=True) as parent:
        yield SimpleNamespace(http=parent.http_all)


def of_each(hall: Any, topic: str, **task: Any) -> list[str]:
    """The ids of two tasks in each shard."""
    tasks = [
        {
            "topic": topic,
            "key": key_in(n % COUNT, COUNT, f"{topic}{n}-"),
            "body": f"body {n}",
            **task,
        }
        for n in range(2 * COUNT)
    ]
    return [post(hall, "/v1/tasks", task)["id"] for task in tasks]


def test_every_view_covers_all_shards(console_on: Open, hall: Any, topic: str) -> None:
    make_group(hall, topic)
    ids = of_each(hall, topic, delay_ms=HOUR_MS)
    schedule = {"topic": topic, "every_ms": HOUR_MS, "task": {"key": key_in(1, COUNT)}}
    assert get(hall, "/v1/stats")["scheduled"] == len(ids)
    post(hall, "/v1/bulk", {"id": topic, "kind": "cancel", "topic": topic, "where": "key = 'none'"})
    console = console_on(hall)
    page = console.open(f"tasks?topic={topic}")
    expect(page.locator("tbody tr")).to_have_count(len(ids))
    for task_id in ids[:COUNT]:
        page = console.open(f"task/{task_id}")
        expect(page.locator("main")).to_contain_text(task_id)
    status, said = ask(hall, "PUT", f"/v1/schedules/{topic}", schedule)
    assert status == 201, said
    for view, text in (
        ("", str(len(ids))),
        ("topics", topic),
        (f"groups?topic={topic}", "g"),
        (f"groups?topic={topic}&group=g", "g"),
        (f"schedules?name={topic}", topic),
        (f"bulk?id={topic}", topic),
    ):
        page = console.open(view)
        expect(page.locator("main")).to_contain_text(text)
    for view in ("dead", "transactions", "consumers"):
        console.open(view)


def test_each_shard_links_its_own_console(console_on: Open, hall: Any) -> None:
    page = console_on(hall).open("nodes")
    table = page.get_by_role("table", name="All shards", exact=True)
    for status in get(hall, "/v1/status")["statuses"]:
        row = table.locator(f'tr[data-key="{status["shard"]}"]')
        expect(row).to_contain_text("ready")
        expect(row).to_contain_text(status["url"])
        there = f"{status['http']}/console/#/nodes"
        expect(row.get_by_role("link")).to_have_attribute("href", there)
    expect(page.locator("main")).to_contain_text("All shards")
    expect(page.get_by_role("heading", name="All nodes on this store")).to_have_count(0)


def test_selected_tasks_are_cancelled_in_every_shard(
    console_on: Open, hall: Any, topic: str
) -> None:
    ids = of_each(hall, topic, delay_ms=HOUR_MS)
    console = console_on(hall)
    page = console.open(f"tasks?topic={topic}")
    expect(page.locator("tbody tr")).to_have_count(len(ids))
    page.get_by_label("Choose all loaded rows").check()
    page.get_by_role("button", name="Cancel …").click()
    console.confirm("Cancel them")
    console.says(f"{len(ids)} cancelled")
    assert {get(hall, f"/v1/tasks/{task_id}")["state"] for task_id in ids} == {"cancelled"}
