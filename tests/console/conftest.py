"""A real Chromium on a real daemon. What the page reports as an error fails the test; so does a
request to another host, because no name is resolved."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Error, Page, expect, sync_playwright

from reports.browser import NAMES
from support.daemon import Daemon, TwoShards

WAIT_MS = 20_000
WIDE = {"width": 1280, "height": 860}
# What is expected of a page, too: else five seconds, less than a start on a busy machine takes.
expect.set_options(timeout=WAIT_MS)


@pytest.fixture(scope="package")
def chromium() -> Iterator[Browser]:
    """One program for all tests here, and no longer: while it runs, its thread has an event loop
    of Playwright's, in which no other test can run one of its own."""
    program = next((result for name in NAMES if (result := shutil.which(name))), None)
    if program is None:
        reason = "no chromium: apt install chromium-headless-shell"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    arguments = ["--disable-gpu", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
    # Few processes: each of them costs a third of a second.
    arguments += [
        "--in-process-gpu",
        "--renderer-process-limit=1",
        "--disable-site-isolation-trials",
    ]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=program,
            args=[*arguments, *(["--no-sandbox"] if os.geteuid() == 0 else [])],
        )
        yield browser
        browser.close()


class Console:
    """One browser with its cookies, on one page of one daemon."""

    def __init__(self, context: BrowserContext, http: str) -> None:
        self.context = context
        self.http = http
        self.errors: list[str] = []
        self.page = self.another()

    def another(self) -> Page:
        """One more page of the same browser."""
        page = self.context.new_page()
        page.set_default_timeout(WAIT_MS)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", self._said)
        page.on("request", self._asked)
        return page

    def _said(self, message: Any) -> None:
        text = message.text
        # What the daemon refuses, or a daemon that is away, is said by the network, too.
        if message.type == "error" and "Failed to load resource" not in text:
            self.errors.append(text)

    def _asked(self, request: Any) -> None:
        if not request.url.startswith((self.http, "data:")):
            self.errors.append(f"asked for {request.url}")

    def open(self, view: str = "") -> Page:
        """``tasks?state=ready``, from its beginning."""
        page = self.page
        if page.url.startswith(self.http):
            page.evaluate(
                "hash => { document.querySelector('.view').dataset.old = '1';"
                " if (location.hash === hash) dispatchEvent(new Event('hashchange'));"
                " else location.hash = hash; }",
                f"#/{view}",
            )
        else:
            page.goto(f"{self.http}/console/#/{view}")
        page.locator(".view:not([data-old]) h1").first.wait_for()
        return page

    def forget(self) -> None:
        """Be as a new browser: an empty page, and nothing that was kept. The first page stays,
        and with it the process that draws it, which is most of what a browser costs."""
        for page in self.context.pages:
            if page is not self.page:
                page.close()
        if self.page.url.startswith(self.http):
            self.page.evaluate("localStorage.clear(); sessionStorage.clear();")
        self.context.clear_cookies()
        self.page.unroute_all()
        self.page.mouse.move(0, 0)
        self.page.goto("about:blank")
        errors, self.errors = self.errors, []
        assert not errors, errors

    def says(self, text: str) -> None:
        """A toast does."""
        self.page.locator(".toast", has_text=text).first.wait_for()

    def row(self, text: str) -> Any:
        """The first row of a table with this in it."""
        return self.page.locator("tbody tr", has_text=text).first

    def confirm(self, button: str) -> str:
        """What the dialog says; then its button."""
        dialog = self.page.locator("dialog")
        dialog.wait_for()
        text = dialog.inner_text()
        dialog.get_by_role("button", name=button, exact=True).click()
        dialog.wait_for(state="detached")
        return text


@pytest.fixture(scope="package")
def forgotten(chromium: Browser) -> dict[str, list[Console]]:
    """Browsers that have forgotten all, by what they were made with: another one costs half a
    second of a processor, and as much again to draw its first page."""
    return {}


@pytest.fixture
def console_on(
    chromium: Browser, forgotten: dict[str, list[Console]]
) -> Iterator[Callable[..., Console]]:
    """``console_on(daemon)``: a browser of its own."""
    taken: list[tuple[str, Console]] = []

    def take(daemon: Daemon, **options: Any) -> Console:
        options = {"viewport": WIDE, **options}
        kind = repr(sorted(options.items()))
        free = forgotten.setdefault(kind, [])
        console = free.pop() if free else Console(chromium.new_context(**options), daemon.http)
        console.http = daemon.http
        taken.append((kind, console))
        return console

    yield take
    errors = [error for _, console in taken for error in console.errors]
    for kind, console in taken:
        console.errors.clear()
        try:
            console.forget()
        except Error:  # of Playwright: its page is not one that can be left
            console.context.close()
        else:
            forgotten[kind].append(console)
    assert not errors, errors


AT_BOTH_DOORS = [
    pytest.param(Daemon, id="one"),
    pytest.param(TwoShards, id="all", marks=pytest.mark.slow),
]
"""The HTTP of one shard, and that of all shards."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests about one shard alone at the HTTP of all shards."""
    of_one = [
        item
        for item in items
        if item.get_closest_marker("one_shard") is not None
        and isinstance(item, pytest.Function)
        and item.callspec.params.get("shop") is TwoShards
    ]
    config.hook.pytest_deselected(items=of_one)
    items[:] = [item for item in items if item not in of_one]


@pytest.fixture(scope="module", params=AT_BOTH_DOORS)
def shop(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Daemon]:
    """A daemon that a module's tests share, each on topics of its own."""
    folder: Path = tmp_path_factory.mktemp("shop")
    with request.param(folder, http=True, history_dir=folder / "history") as daemon:
        yield daemon


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """One of its own for each test."""
    return str(request.node.name).partition("[")[0].removeprefix("test_")
