"""For everybody: what axe finds, the keyboard alone, narrow and wide, light and dark. The pictures
of the documents are taken here: ``PICTURES=docs .venv/bin/pytest -n0 tests/console/test_looks.py``
writes them."""

from __future__ import annotations

import json
import os
import random
import re
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from playwright.sync_api import Page, expect

from console.asking import ask, enqueue, get, held_keys, make_group, post, prepare, pull
from console.conftest import Console
from support.daemon import Daemon

Open = Callable[..., Console]
AXE = (Path(__file__).parent / "axe" / "axe.min.js").read_text()
DOCS = Path(__file__).resolve().parents[2] / "docs"
PICTURES = os.environ.get("PICTURES")
PICTURE_BYTES_MAX = 300_000
LOAD_S = 25.0
"""So long the load is that the rates of a picture are lines."""
HOUR_MS = 3_600_000
PHONE = {"width": 390, "height": 844}
WIDE = {"width": 1280, "height": 860}
NARROW_FIRST = [
    pytest.param(PHONE, id="narrow"),
    pytest.param(WIDE, id="wide", marks=pytest.mark.slow),
]
"""What fits a phone, fits: the wide window is for `make test-full`."""


class Shop:
    """A daemon with something of everything."""

    def __init__(self, folder: Path) -> None:
        (folder / "report").mkdir(parents=True)
        (folder / "report" / "report.html").write_text("<!doctype html><title>r</title><h1>r</h1>")
        self.daemon = Daemon(
            folder / "daemon", http=True, node="shop-1",
            history_dir=folder / "history", report_dir=folder / "report",
        )  # fmt: skip
        self.task = ""

    def fill(self) -> None:
        daemon, chance = self.daemon, random.Random(7355)
        for topic, group in (
            ("orders.close", "billing"),
            ("mails.send", "smtp"),
            ("payments.check", "bank"),
        ):
            make_group(daemon, topic, group)
            tasks = [
                {
                    "topic": topic,
                    "body": json.dumps({"order": 4_000 + n, "customer": f"c-{n % 70}"}),
                    "delay_ms": 60_000 + int(chance.random() ** 2 * 12 * HOUR_MS),
                    "key": f"order-{4_000 + n}", "tag": chance.choice(("eu", "us")),
                }
                for n in range(3_000)
            ]  # fmt: skip
            post(daemon, "/v1/tasks", {"tasks": tasks})
        ask(daemon, "PATCH", "/v1/topics/mails.send/groups/smtp", {"paused": True})
        enqueue(daemon, "mails.send", 120)
        ask(
            daemon,
            "PATCH",
            "/v1/topics/mails.send/groups/smtp",
            {"where": "size > 0 OR size IS NULL"},
        )
        for order in (4_711, 4_712):
            mail = {"topic": "mails.send", "body": b"paid", "delay": 60.0, "key": f"order-{order}"}
            prepare(daemon, f"order-{order}", mail, {"topic": "orders.close", "delay": 86_400.0})
        bulk = {
            "id": "second-day",
            "kind": "cancel",
            "topic": "orders.close",
            "where": "tag = 'us'",
        }
        post(daemon, "/v1/bulk", bulk | {"key_prefix": "order-69"})
        held_keys(daemon, "accounts.book", "account-17", "account-4", group="ledger")
        self._fail()
        daily = {"topic": "mails.send", "cron": "0 9 * * *", "timezone": "Europe/Berlin"}
        ask(daemon, "PUT", "/v1/schedules/daily-summary", daily)

    def _fail(self) -> None:
        """Attempts that end in a retry, and some that never will succeed."""
        daemon = self.daemon
        body = json.dumps({"order": 42, "lines": [{"sku": "A-1", "count": 2}], "total": "19.90"})
        given = {"topic": "payments.check", "body": body, "key": "order-42", "tag": "eu"}
        self.task = post(daemon, "/v1/tasks", given | {"properties": {"country": "de"}})["id"]
        for _ in range(2):
            [one] = pull(daemon, "payments.check", "bank")
            fields = {"receipts": [one["receipt"]], "reason": "the bank does not answer"}
            post(daemon, "/v1/nacks", fields | {"delay_ms": 0})
        [one] = pull(daemon, "payments.check", "bank")
        fields = {"receipts": [one["receipt"]], "reason": "the bank does not answer"}
        post(daemon, "/v1/nacks", fields | {"delay_ms": 480_000})
        for reason, many in (("no such order", 7), ("card refused", 12), ("unknown country", 3)):
            enqueue(daemon, "orders.close", many)
            deliveries = pull(daemon, "orders.close", "billing", many)
            fields = {
                "receipts": [delivery["receipt"] for delivery in deliveries],
                "reason": reason,
            }
            post(daemon, "/v1/rejections", fields)
        enqueue(daemon, "orders.close", 9)
        pull(daemon, "orders.close", "billing", 6)

    def work(self, page: Page) -> None:
        """Load, for as long as a picture needs, and somebody who waits for the tasks."""
        over, chance = threading.Event(), random.Random(1)

        def consume() -> None:
            while not over.is_set():
                deliveries = pull(self.daemon, "orders.close", "billing", 100)
                receipts = [delivery["receipt"] for delivery in deliveries]
                if receipts:
                    post(self.daemon, "/v1/acks", {"receipts": receipts})

        consumer = threading.Thread(target=consume)
        consumer.start()
        began = time.monotonic()
        while time.monotonic() - began < LOAD_S:
            enqueue(self.daemon, "orders.close", 20 + chance.randrange(20), delay_ms=300)
            page.wait_for_timeout(120)
        over.set()
        consumer.join()


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    result = Shop(tmp_path_factory.mktemp("shop"))
    with result.daemon:
        result.fill()
        yield result


VIEWS = (
    "", "topics", "groups", "groups?topic=orders.close&group=billing",
    "groups?topic=accounts.book&group=ledger", "tasks", "task/TASK", "dead",
    "schedules?name=daily-summary", "consumers", "targets", "transactions",
    "transactions?id=order-4711", "bulk", "bulk?id=second-day", "nodes",
    "reports", "tasks?topic=nothing.here",
)  # fmt: skip


def looked_at(console: Console, shop: Shop, view: str) -> Page:
    """The view with its data in it."""
    page = console.open(view.replace("TASK", shop.task))
    if view == "":
        expect(page.locator(".tile b").first).to_have_text(re.compile(r"^[\d,]+$"))
        page.locator(".turn").first.wait_for()
    elif view == "reports":
        page.locator("iframe").wait_for()
    elif view.startswith(("task/", "nodes")):
        page.locator(".facts").first.wait_for()
    else:
        page.locator("tbody tr:visible, .empty:visible").first.wait_for()
    return page


AXE_OPTIONS: dict[str, Any] = {"iframes": False, "resultTypes": ["violations"]}


@pytest.mark.parametrize(
    ("scheme", "size"),
    [
        pytest.param("light", WIDE, marks=pytest.mark.slow),  # the phone shows light colours
        ("dark", PHONE),
    ],
    ids=["light-wide", "dark-narrow"],
)
def test_views_pass_axe_and_fit_the_window(
    console_on: Open, shop: Shop, scheme: Literal["light", "dark"], size: dict[str, int]
) -> None:
    # axe is put into the page, which its policy forbids to everybody else.
    console = console_on(shop.daemon, color_scheme=scheme, viewport=size, bypass_csp=True)
    console.page.goto(f"{console.http}/console/")
    console.page.evaluate(AXE)

    def violations(page: Page, **options: Any) -> list[tuple[str, str, str]]:
        value = page.evaluate("options => axe.run(document, options)", AXE_OPTIONS | options)
        return [
            (violation["id"], violation["impact"], violation["nodes"][0]["html"][:200])
            for violation in value["violations"]
            if violation["impact"] in ("serious", "critical")
        ]

    for view in VIEWS:
        page = looked_at(console, shop, view)
        bad = violations(page)
        page.emulate_media(color_scheme="light")
        bad += violations(page, runOnly=["color-contrast"])
        page.emulate_media(color_scheme=scheme)
        assert not bad, (view, bad)
        wide = page.evaluate("document.documentElement.scrollWidth")
        assert wide <= size["width"], (view, wide)


LONG = "a-name-of-a-team.and-of-its-service.and-what-it-does" * 4
"""Without a place to break at."""
LONG_VIEWS = (
    "", "topics", "groups", f"groups?topic={LONG}", f"groups?topic={LONG}&group={LONG}", "tasks",
    "task/TASK", "dead", "consumers", "targets", "schedules", f"schedules?name={LONG}",
    "transactions", f"transactions?id={LONG}", "bulk", "nodes", "reports",
)  # fmt: skip
HIDDEN_BUTTONS = """() => [...document.querySelectorAll('main button, main .tag')].filter((one) => {
  if (!one.checkVisibility()) return false;
  one.scrollIntoView({ block: 'center', inline: 'nearest' });
  const box = one.closest('.scroll');
  if (box) box.scrollLeft = 0;
  const at = one.getBoundingClientRect();
  const x = at.left + at.width / 2, y = at.top + at.height / 2;
  const there = document.elementFromPoint(x, y);
  const isWhole = at.width > 8 && at.left >= 0 && at.right <= innerWidth;
  return !isWhole || !(one.contains(there) || there?.contains(one) && one.matches('.tag'));
}).map((one) => one.outerHTML.slice(0, 120))"""
"""Those that are not seen, or covered, while nothing has been scrolled sideways."""


@pytest.fixture(scope="module")
def long_names(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Daemon, str]]:
    """A daemon whose names are all long, and a task of it."""
    with Daemon(tmp_path_factory.mktemp("long"), http=True, node=LONG[:120]) as daemon:
        make_group(daemon, LONG, LONG, where="size > 0 OR size IS NULL")
        given = {"key": LONG, "tag": LONG, "properties": {LONG: LONG}}
        enqueue(daemon, LONG, 2, **given)
        for one in pull(daemon, LONG, LONG, 2):
            receipts = {"receipts": [one["receipt"]], "reason": LONG}
            post(daemon, "/v1/rejections", receipts)
        [task, *_] = enqueue(daemon, LONG, 3, **given)
        [one] = pull(daemon, LONG, LONG)
        later = {"receipts": [one["receipt"]], "reason": LONG, "delay_ms": HOUR_MS}
        post(daemon, "/v1/nacks", later)
        held_keys(daemon, f"held.{LONG}", LONG[:200], group=LONG)
        ask(daemon, "PATCH", f"/v1/topics/{LONG}", {"paused": True})
        ask(daemon, "PATCH", f"/v1/topics/{LONG}/groups/{LONG}", {"paused": True})
        ask(daemon, "PUT", f"/v1/schedules/{LONG}", {"topic": LONG, "cron": "0 9 * * *"})
        ask(daemon, "POST", f"/v1/schedules/{LONG}/pause")
        prepare(daemon, LONG, {"topic": LONG, "key": LONG}, group=LONG)
        bulk = {"id": LONG[:64], "kind": "cancel", "topic": LONG, "where": f"tag = '{LONG}x'"}
        post(daemon, "/v1/bulk", bulk)
        yield daemon, task


@pytest.mark.parametrize("size", NARROW_FIRST)
def test_long_names_fit_the_window(
    console_on: Open, long_names: tuple[Daemon, str], size: dict[str, int]
) -> None:
    """Nothing is wider than the window, and every button and badge is there to be pressed and
    read without scrolling sideways."""
    daemon, task = long_names
    console = console_on(daemon, viewport=size)
    for view in LONG_VIEWS:
        page = console.open(view.replace("TASK", task))
        expect(page.locator(LONG_SIGNS.get(view, "tbody tr:visible")).first).to_be_visible()
        wide = page.evaluate("document.documentElement.scrollWidth")
        assert wide <= size["width"], (view, wide)
        hidden = page.evaluate(HIDDEN_BUTTONS)
        assert hidden == [], (view, hidden)


LONG_SIGNS = {
    "": ".trouble",
    "task/TASK": ".content",
    "reports": ".command",
    "consumers": ".empty",
    "targets": ".empty",
}


@pytest.mark.parametrize("size", NARROW_FIRST)
def test_dialogs_with_long_names_fit(
    console_on: Open, long_names: tuple[Daemon, str], size: dict[str, int]
) -> None:
    console = console_on(long_names[0], viewport=size)
    for view, button in (
        ("topics", "Set …"), ("topics", "Delete …"), (f"groups?topic={LONG}", "Set …"),
        (f"groups?topic={LONG}", "Delete …"), ("schedules", "Delete …"), ("schedules", "Set …"),
        (f"transactions?id={LONG}", "Commit …"), (f"tasks?topic={LONG}", "New task …"),
    ):  # fmt: skip
        page = console.open(view)
        page.get_by_role("button", name=button).first.click()
        dialog = page.locator("dialog")
        dialog.wait_for()
        dialog.evaluate("d => d.querySelectorAll('details').forEach((one) => { one.open = true; })")
        box = dialog.evaluate(
            "d => [d.scrollWidth, d.clientWidth, d.getBoundingClientRect().right]"
        )
        assert box[0] <= box[1] and box[2] <= size["width"], (view, button, box)
        console.confirm("Back")


@pytest.mark.parametrize("size", NARROW_FIRST)
@pytest.mark.parametrize(
    ("view", "button"),
    [
        ("task/TASK", "Reschedule …"), ("tasks", "New task …"), ("schedules", "New schedule …"),
        ("schedules", "Set …"),
    ],
)  # fmt: skip
def test_dialogs_are_accessible(
    console_on: Open, shop: Shop, view: str, button: str, size: dict[str, int]
) -> None:
    console = console_on(shop.daemon, viewport=size, bypass_csp=True)
    page = looked_at(console, shop, view)
    page.evaluate(AXE)
    page.get_by_role("button", name=button).first.click()
    dialog = page.locator("dialog")
    dialog.wait_for()
    dialog.evaluate("d => d.querySelectorAll('details').forEach((one) => { one.open = true; })")
    value: Any = page.evaluate("axe.run(document.querySelector('dialog'))")
    assert [
        violation["id"]
        for violation in value["violations"]
        if violation["impact"] in ("serious", "critical")
    ] == []
    unnamed = "d => [...d.querySelectorAll('input, select, textarea')]"
    unnamed += ".filter((one) => !one.labels.length)"
    assert dialog.evaluate(f"{unnamed}.length") == 0


def test_a_task_is_enqueued_by_keyboard(console_on: Open, shop: Shop) -> None:
    page = looked_at(console_on(shop.daemon), shop, "tasks")
    page.get_by_role("button", name="New task …").focus()
    page.keyboard.press("Enter")
    page.locator("dialog").wait_for()
    expect(page.get_by_label("Topic", exact=True).last).to_be_focused()
    page.keyboard.type("typed.topic")
    for _ in range(2):  # what the body is, and the body
        page.keyboard.press("Tab")
    page.keyboard.type("typed body")
    page.get_by_label("Topic", exact=True).last.focus()
    page.keyboard.press("Enter")
    page.locator(".toast", has_text="is enqueued").wait_for()
    expect(page.get_by_role("button", name="New task …")).to_be_focused()
    tasks = get(shop.daemon, "/v1/tasks?topic=typed.topic")["tasks"]
    assert [entry["body"] for entry in tasks] == ["typed body"]


def test_the_console_works_by_keyboard(console_on: Open, shop: Shop) -> None:
    page = console_on(shop.daemon).open("")
    page.locator(".tile b", has_text=",").first.wait_for()
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("Tab")
    expect(page.locator("#skip")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()
    assert page.url.endswith("/console/#/")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.locator("main h1")).to_have_text("Tasks")
    page.locator("tbody tr a").first.focus()
    page.keyboard.press("Enter")
    cancel = page.get_by_role("button", name="Cancel …")
    cancel.focus()
    page.keyboard.press("Enter")
    dialog = page.locator("dialog")
    dialog.wait_for()
    expect(dialog.get_by_role("button", name="Back")).to_be_focused()  # the harmless one
    before = page.locator("main .head button.danger").element_handle()
    assert before is not None
    page.wait_for_function("old => !old.isConnected", arg=before)  # drawn anew behind it
    page.keyboard.press("Escape")
    dialog.wait_for(state="detached")
    expect(cancel).to_be_focused()


def test_redrawing_keeps_the_focus(console_on: Open, shop: Shop) -> None:
    console = console_on(shop.daemon)
    page = looked_at(console, shop, "groups?topic=orders.close&group=billing")
    held = page.locator(".facts a").last
    held.focus()
    before = held.element_handle()
    assert before is not None
    page.wait_for_function("old => !old.isConnected", arg=before)
    expect(held).to_be_focused()


def test_forms_on_a_phone_show_their_errors(console_on: Open, shop: Shop) -> None:
    console = console_on(shop.daemon, viewport=PHONE)
    page = looked_at(console, shop, "transactions")
    expect(page.locator("nav a[aria-current]")).to_be_in_viewport(ratio=1)
    looked_at(console, shop, "groups?topic=mails.send&group=smtp")
    groups = page.get_by_role("region", name="Groups")
    groups.evaluate("box => { box.scrollLeft = box.scrollWidth; }")
    console.row("smtp").get_by_role("button", name="Set …").click()
    page.get_by_label("Only tasks for which this is true").fill("a > > 1")
    page.locator("dialog").get_by_role("button", name="Set", exact=True).click()
    caret = page.locator("dialog pre")
    expect(caret).to_be_in_viewport(ratio=1)
    here, buttons = caret.bounding_box(), page.locator("dialog .buttons").bounding_box()
    assert here is not None and buttons is not None
    assert here["y"] + here["height"] <= buttons["y"] + 1
    console.confirm("Back")


def test_troubles_come_first_on_a_phone(console_on: Open, shop: Shop) -> None:
    console = console_on(shop.daemon, viewport=PHONE)
    page = looked_at(console, shop, "")
    headings = page.locator("main section:visible > h2")
    expect(headings.first).to_have_text("Current problems")
    wrong = page.get_by_role("region", name="Current problems")
    expect(wrong.locator(".trouble").first).to_be_in_viewport(ratio=1)
    tiles = page.locator(".tiles").bounding_box()
    box = wrong.bounding_box()
    assert box is not None and tiles is not None and box["y"] + box["height"] <= tiles["y"]
    page.set_viewport_size({"width": 1280, "height": 800})  # turned, or another window
    expect(headings.first).to_have_text("The wheel")
    expect(wrong).to_be_visible()


def test_reduced_motion_stops_the_animation(console_on: Open, shop: Shop) -> None:
    """The hand stands still between two looks."""
    console = console_on(shop.daemon, reduced_motion="reduce")
    page = console.page
    page.add_init_script(
        "window.frames_asked = 0; const theirs = requestAnimationFrame;"
        " window.requestAnimationFrame = (act) => { window.frames_asked += 1;"
        " return theirs(act); };"
    )
    looked_at(console, shop, "")
    before = page.evaluate("window.frames_asked")
    page.wait_for_timeout(300)
    assert page.evaluate("window.frames_asked") - before < 5


# --- pictures ------------------------------------------------------------------------------------

TAKEN = (
    ("console.png", "", WIDE, "light"),
    ("console-task.png", "task/TASK", WIDE, "light"),
    ("console-dead.png", "dead", {"width": 1280, "height": 640}, "dark"),
    (
        "console-transaction.png",
        "transactions?id=order-4711",
        {"width": 1280, "height": 700},
        "light",
    ),
    ("console-phone.png", "", PHONE, "dark"),
)


@pytest.mark.parametrize(("name", "view", "size", "scheme"), TAKEN, ids=[row[0] for row in TAKEN])
def test_screenshots_of_the_documents_are_made(
    console_on: Open, shop: Shop, tmp_path: Path, name: str, view: str, size: Any, scheme: str
) -> None:
    console = console_on(shop.daemon, color_scheme=scheme, viewport=size)
    page = looked_at(console, shop, view)
    if PICTURES and name == "console.png":
        shop.work(page)
    path = (DOCS if PICTURES == "docs" else tmp_path) / name
    page.screenshot(path=path)
    kept = (DOCS / name).read_bytes()
    assert dimensions(path.read_bytes()) == dimensions(kept) == (size["width"], size["height"])
    assert len(kept) <= PICTURE_BYTES_MAX
    assert f"({name})" in (DOCS / "console.md").read_text()


def dimensions(png: bytes) -> tuple[int, int]:
    wide, tall = struct.unpack(">II", png[16:24])
    return wide, tall
