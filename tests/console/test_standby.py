"""The console of a daemon that does not lead: it says so, and where the one is that does."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from console.asking import enqueue, make_group
from console.conftest import Console
from support.daemon import Daemon
from support.redis_server import RedisServer

Open = Callable[..., Console]
VIEWS = (
    "", "topics", "groups", "groups?topic=t&group=g", "tasks", "task/1", "dead",
    "schedules?name=s", "transactions", "bulk", "reports",
)  # fmt: skip


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Daemon, Daemon]]:
    """The one that leads, and the one that stands by: it does not take over from one that a busy
    machine is slow to run."""
    server = RedisServer(tmp_path / "redis").start()
    try:
        server.lay_out()
        options: dict[str, Any] = {"store": server.url(), "http": True, "leader_ttl_s": 3.0}
        with (
            Daemon(tmp_path / "first", node="first", **options) as first,
            Daemon(tmp_path / "second", node="second", **options) as second,
        ):
            yield first, second
    finally:
        server.kill()


def notice(page: Page) -> Any:
    return page.locator("#notice")


def test_every_view_of_a_standby_links_the_leader(
    console_on: Open, pair: tuple[Daemon, Daemon]
) -> None:
    leader, standby = pair
    console = console_on(standby)
    for view in VIEWS:
        page = console.open(view)
        expect(notice(page)).to_contain_text("second stands by")
        link = notice(page).get_by_role("link")
        expect(link).to_have_attribute("href", f"{leader.http}/console/#/{view}")
        expect(page.locator("main")).to_contain_text("Only the active daemon has this page")
        expect(page.locator(".problem, .toast-error")).to_have_count(0)
    expect(page.locator("#live")).to_have_text("Standby")
    for daemon in pair:
        page = console_on(daemon).open("nodes")
        nodes = page.get_by_role("table", name="All nodes")
        first, second = (nodes.locator("tbody tr", has_text=name) for name in ("first", "second"))
        expect(first).to_contain_text("active")
        expect(second).to_contain_text("standby")
        expect(page.locator("main")).to_contain_text("cannot reach the store disappears")


def test_a_standby_that_takes_over_shows_its_data(
    console_on: Open, pair: tuple[Daemon, Daemon]
) -> None:
    leader, standby = pair
    enqueue(leader, "kept", 3, delay_ms=3_600_000)
    page = console_on(standby).open("topics")
    expect(notice(page)).to_contain_text("first leads")
    leader.kill()
    expect(page.locator("tbody tr", has_text="kept")).to_be_visible()
    expect(notice(page)).to_be_hidden()
    expect(page.locator("#live")).to_have_text("Live")


@pytest.mark.parametrize("view", [pytest.param("", marks=pytest.mark.slow), "topics"])
def test_a_deposed_leaders_console_links_the_new_leader(
    console_on: Open, pair: tuple[Daemon, Daemon], view: str
) -> None:
    leader, standby = pair
    make_group(leader, "kept")
    page = console_on(leader).open(view)
    expect(page.locator("#live")).to_have_text("Live")
    other = console_on(standby).open("nodes")
    leader.pause()
    expect(other.locator("#live")).to_have_text("Live")
    leader.go_on()
    expect(notice(page)).to_contain_text("first does not lead any more")
    link = notice(page).get_by_role("link")
    expect(link).to_have_attribute("href", re.compile(f"^{re.escape(standby.http)}/console/#/"))
    expect(page.locator("#live")).to_have_text("Standby")
    page.evaluate("location.hash = '#/bulk'")
    expect(page.locator("main")).to_contain_text("Only the active daemon has this page")
    standby.kill()
    expect(page.locator("main")).to_contain_text("No bulk operation")  # it leads again
    expect(notice(page)).to_be_hidden()
