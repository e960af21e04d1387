"""Every view and every action, in a browser on a real daemon."""

from __future__ import annotations

import base64
import os
import re
import socket
import zlib
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, Self
from urllib.parse import quote

import pytest
from playwright.sync_api import Browser, Page, expect

from console.asking import (
    ask,
    dead_letters,
    enqueue,
    get,
    held_keys,
    make_group,
    post,
    prepare,
    pull,
)
from console.conftest import WIDE, Console
from support.daemon import Daemon
from support.waiting import until
from tickwheel.api.tasks import kept_options
from tickwheel.sync import Client
from tickwheel.version import __version__

Open = Callable[..., Console]
HOUR_MS = 3_600_000
HISTORY_MS = 60_000
"""A page that has waited for some seconds asks the history every twenty seconds only."""


@pytest.fixture(scope="module", autouse=True)
def behind(shop: Daemon) -> str:
    """A topic whose group g has fallen behind. From the beginning on, because the daemon looks
    every ten seconds only; the last test is about it."""
    make_group(shop, "behind", paused=True)
    enqueue(shop, "behind", 1_234)
    return "behind"


@pytest.fixture(scope="module")
def window(chromium: Browser, shop: Daemon) -> Iterator[Console]:
    context = chromium.new_context(viewport=WIDE)
    yield Console(context, shop.http)
    context.close()


@pytest.fixture
def console(window: Console) -> Iterator[Console]:
    """A browser that has seen nothing."""
    yield window
    window.forget()


def cells(page: Page, text: str) -> list[str]:
    """Of the first row that has this, as soon as it is there."""
    row = page.locator("tbody tr", has_text=text).first
    row.wait_for()
    return row.locator("td").all_inner_texts()


# --- overview ------------------------------------------------------------------------------------


def test_a_fresh_daemon_shows_three_commands(console_on: Open, tmp_path: Any) -> None:
    with Daemon(tmp_path, http=True) as daemon:
        console = console_on(daemon)
        page = console.open()
        page.locator(".commands li").nth(2).wait_for()
        lines = page.locator(".commands code").all_inner_texts()
        assert [line.split(f"--url {daemon.url} ")[1].split()[0] for line in lines] == [
            "enqueue", "subscribe", "list",
        ]  # fmt: skip
        assert page.locator(".trouble").inner_text() == "Nothing."
        enqueue(daemon, "t", delay_ms=HOUR_MS)
        expect(page.locator(".commands")).to_be_hidden()  # by the feed, without a reload


def test_the_overview_counts_as_the_daemon_does(console: Console, shop: Daemon, topic: str) -> None:
    page = console.open()
    expect(page.locator("#live")).to_have_text("Live")
    enqueue(shop, topic, 1234, delay_ms=HOUR_MS // 2)
    tile = page.locator(".tile", has_text="Scheduled").locator("b")
    expect(tile).to_have_text(f"{get(shop, '/v1/stats')['scheduled']:,}")
    page.locator(".tile", has_text="Scheduled").click()
    expect(page).to_have_url(re.compile(r"#/tasks\?state=scheduled$"))
    expect(page.locator("main h1")).to_have_text("Tasks")


def test_the_wheel_shows_the_tasks_of_a_slot(console: Console, shop: Daemon, topic: str) -> None:
    due_ms = get(shop, "/v1/status")["now_ms"] + HOUR_MS * 3 // 4  # no other test's slot
    slot = due_ms // 1000 % 3600
    enqueue(shop, topic, 77, due_ms=due_ms)
    enqueue(shop, topic, 5, due_ms=due_ms + HOUR_MS)
    page = console.open()
    wheel = page.locator("canvas.ring")
    expect(wheel).to_have_attribute("aria-valuemax", "3599")
    wheel.focus()
    wheel.press("Home")
    here = int(str(wheel.get_attribute("aria-valuenow")))
    ahead = (slot - here) % 3600
    for _ in range(ahead // 60):
        wheel.press("PageUp")
    for _ in range(ahead % 60):
        wheel.press("ArrowRight")
    expect(page.locator(".slot")).to_contain_text(f"Slot {slot:,}")
    expect(page.locator(".slot")).to_contain_text("77 this turn")
    expect(page.locator(".slot")).to_contain_text("5 in the next")
    box = wheel.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] / 2 + box["width"] * 0.35, box["y"] + box["height"] / 2)
    expect(page.locator(".slot")).to_contain_text(re.compile(r"Slot (89\d|90\d)"))


def test_troubles_link_to_their_view(console: Console, shop: Daemon, topic: str) -> None:
    make_group(shop, topic, "slow", paused=True)
    enqueue(shop, topic, 3)
    page = console.open()
    paused = re.compile(rf"Group slow of {topic} is paused since .* UTC, with 3 ready tasks")
    page.get_by_role("link", name=paused).click()
    expect(page.locator("main h2").first).to_have_text(f"Group slow of {topic}")
    ask(shop, "PATCH", f"/v1/topics/{topic}/groups/slow", {"paused": False})


@pytest.mark.parametrize("of", ["topic", "group"])
def test_a_pause_is_shown_and_ended_in_the_group_view(
    console: Console, shop: Daemon, topic: str, of: str
) -> None:
    make_group(shop, topic, "slow")
    path = f"/v1/topics/{topic}" + ("/groups/slow" if of == "group" else "")
    ask(shop, "PATCH", path, {"paused": True})
    page = console.open("groups")
    page.get_by_role("searchbox").fill(topic)
    tag = "topic paused" if of == "topic" else "paused"
    expect(console.row("slow").locator(".tag").first).to_have_text(tag)
    page = console.open(f"groups?topic={topic}&group=slow")
    stopped = page.locator(".stopped")
    expect(stopped).to_have_count(1)
    expect(stopped).to_contain_text(f"{of.title()} {topic if of == 'topic' else 'slow'} is paused")
    expect(stopped).to_be_in_viewport(ratio=1)
    stopped.get_by_role("button", name="Resume").click()
    expect(stopped).to_have_count(0)
    console.says("is resumed")
    assert get(shop, path)["paused"] is False
    ask(shop, "PATCH", path, {"paused": True})  # by somebody else, while the page is open
    expect(stopped).to_have_count(1)
    ask(shop, "PATCH", path, {"paused": False})


def test_the_feed_stops_when_nobody_looks(console: Console) -> None:
    page = console.open()
    expect(page.locator("#live")).to_have_text("Live")
    hide = "value => { Object.defineProperty(document, 'hidden', { value, configurable: true });"
    hide += " document.dispatchEvent(new Event('visibilitychange')); }"
    page.evaluate(hide, True)
    expect(page.locator("#live")).to_have_text("Paused: page hidden")
    page.evaluate(hide, False)
    expect(page.locator("#live")).to_have_text("Live")


# --- topics and groups ---------------------------------------------------------------------------


def test_a_topic_is_paused_set_and_deleted(console: Console, shop: Daemon, topic: str) -> None:
    enqueue(shop, topic, 4, delay_ms=HOUR_MS)
    page = console.open("topics")
    page.get_by_role("searchbox").fill(topic)
    console.row(topic).get_by_role("button", name="Pause …").click()
    console.confirm("Back")
    assert get(shop, f"/v1/topics/{topic}")["paused"] is False
    console.row(topic).get_by_role("button", name="Pause …").click()
    message = console.confirm("Pause")
    assert f"Pause topic {topic}?" in message and "Its 0 groups will get no tasks" in message
    console.says(f"{topic} is paused")
    assert get(shop, f"/v1/topics/{topic}")["paused"] is True
    console.row(topic).get_by_role("button", name="Set …").click()
    page.get_by_label("Maximum deliveries per second").fill("7.5")
    page.get_by_label("Retry policy").fill('{"kind": "fixed", "delay_ms": 5000, "retries": 3}')
    console.confirm("Set")
    console.says("Set")
    answer = get(shop, f"/v1/topics/{topic}")
    assert answer["rate"] == 7.5 and answer["retry"]["kind"] == "fixed"
    link = console.row(topic).get_by_role("link").first
    link.click()
    words = "again after 5 s each time, 10 % more or less; 3 retries"
    expect(page.locator(".facts")).to_contain_text(f"Retry policy\n{words}", use_inner_text=True)
    page.go_back()
    expect(page.locator("main h1")).to_have_text("Topics")
    page.get_by_role("searchbox").fill(topic)
    console.row(topic).get_by_role("button", name="Delete …").click()
    dialog = page.locator("dialog")
    assert "4 scheduled" in dialog.inner_text()
    dialog.get_by_role("button", name="Delete").click()
    expect(dialog.get_by_role("alert")).to_have_text(f"Type {topic} to confirm")
    dialog.get_by_label(f"Type {topic}").fill(topic)
    console.confirm("Delete")
    console.says("is deleted")
    status, left = ask(shop, "GET", f"/v1/topics/{topic}")
    assert status == 404 or left["deleting"]


def test_a_group_is_made_paused_set_and_deleted(console: Console, shop: Daemon, topic: str) -> None:
    enqueue(shop, topic, delay_ms=HOUR_MS)
    page = console.open(f"groups?topic={topic}")
    page.get_by_role("button", name="New group …").click()
    page.locator("dialog").get_by_label("Name").fill("billing")
    console.confirm("Create")
    console.says("billing is created")
    console.row("billing").get_by_role("button", name="Pause").click()
    console.says("billing is paused")
    expect(console.row("billing").locator(".tag")).to_have_text("paused")
    console.row("billing").get_by_role("button", name="Resume").click()
    console.says("billing is resumed")
    expect(console.row("billing").locator(".tag")).to_have_count(0)
    console.row("billing").get_by_role("button", name="Set …").click()
    page.get_by_label("Maximum deliveries per second").fill("3")
    page.get_by_label("Maximum burst").fill("9")
    console.confirm("Set")
    console.says("Set")
    answer = get(shop, f"/v1/topics/{topic}/groups/billing")
    assert (answer["rate"], answer["burst"], answer["paused"]) == (3, 9, False)
    console.row("billing").get_by_role("button", name="Delete …").click()
    assert "0 ready, 0 in flight" in console.confirm("Delete")
    console.says("billing is deleted")
    assert get(shop, f"/v1/topics/{topic}/groups") == {"groups": {}}


def test_counts_of_a_group_link_to_their_tasks(console: Console, shop: Daemon, topic: str) -> None:
    dead_letters(shop, topic, 2)
    enqueue(shop, topic, 5)
    page = console.open(f"groups?topic={topic}&group=g")
    expect(page.locator(".facts")).to_contain_text("Ready\n5", use_inner_text=True)
    console.row("g").get_by_role("link", name="2").click()
    expect(page.locator("main h1")).to_have_text("Dead letters")
    expect(page.locator("tbody tr")).to_have_count(2)
    page.go_back()
    expect(page.locator("main h1")).to_have_text("Groups of a topic")
    console.row("g").get_by_role("link", name="5").click()
    expect(page.locator("tbody tr")).to_have_count(5)


def test_form_errors_are_shown_in_the_form(console: Console, shop: Daemon, topic: str) -> None:
    make_group(shop, topic)
    page = console.open(f"groups?topic={topic}")
    console.row("g").get_by_role("button", name="Set …").click()
    page.get_by_label("Retry policy").fill("{no json")
    page.locator("dialog").get_by_role("button", name="Set", exact=True).click()
    expect(page.locator("dialog").get_by_role("alert")).to_contain_text("not valid JSON")
    page.get_by_label("Retry policy").fill("such-a-policy")
    page.locator("dialog").get_by_role("button", name="Set", exact=True).click()
    alert = page.locator("dialog").get_by_role("alert")
    expect(alert).to_contain_text("such-a-policy")  # the daemon's own words
    page.get_by_label("Retry policy").fill("none")
    console.confirm("Set")
    console.says("Set")
    assert get(shop, f"/v1/topics/{topic}/groups/g")["retry"]["kind"] == "none"


def test_a_groups_filter_is_shown_and_changed(console: Console, shop: Daemon, topic: str) -> None:
    make_group(shop, topic)
    page = console.open(f"groups?topic={topic}&group=g")
    expect(page.locator(".filter")).to_have_text("Filter: none, it gets every task")
    console.row("g").get_by_role("button", name="Set …").click()
    page.get_by_label("Only tasks with these tags").fill("eu || uk")
    page.get_by_label("Only tasks for which this is true").fill("amount > > 10")
    dialog = page.locator("dialog")
    dialog.get_by_role("button", name="Set", exact=True).click()
    alert = dialog.get_by_role("alert")
    expect(alert).to_contain_text("where, character 10: expected a name or a value, found >")
    assert alert.locator("pre").inner_text().splitlines() == ["  amount > > 10", "           ^"]
    page.get_by_label("Only tasks for which this is true").fill("amount > 10")
    console.confirm("Set")
    console.says("Set")
    expect(page.locator(".filter code")).to_have_text("tags eu || uk, where amount > 10")
    expect(console.row("g").locator(".tag")).to_have_text("filter")
    for tag, amount in (("eu", 20), ("us", 20), ("eu", 5), ("uk", 11)):
        enqueue(shop, topic, tag=tag, properties={"amount": amount})
    expect(page.locator(".facts")).to_contain_text("Excluded by its filter\n2", use_inner_text=True)
    expect(page.locator(".facts")).to_contain_text("Ready\n2", use_inner_text=True)
    assert get(shop, f"/v1/topics/{topic}/groups/g")["ready"] == 2
    console.row("g").get_by_role("button", name="Set …").click()
    expect(page.get_by_label("Only tasks with these tags")).to_have_value("eu || uk")
    page.get_by_label("Only tasks with these tags").fill("")
    page.get_by_label("Only tasks for which this is true").fill("")
    console.confirm("Set")
    expect(page.locator(".filter")).to_have_text("Filter: none, it gets every task")


def test_a_groups_ordering_and_fairness_are_changed(
    console: Console, shop: Daemon, topic: str
) -> None:
    make_group(shop, topic, order_failure="hold", order_attempts=3, limit_each=5, fair_by="tenant")
    page = console.open(f"groups?topic={topic}&group=g")
    facts = page.locator(".facts")
    text = "Order keys\nretried after 1 s, held after 3 attempts"
    expect(facts).to_contain_text(text, use_inner_text=True)
    expect(facts).to_contain_text("Fair shares\nby tenant, 5 in flight each", use_inner_text=True)
    console.row("g").get_by_role("button", name="Set …").click()
    page.get_by_label("Retry delay of a task with an order key").fill("5")
    page.get_by_label("After its last attempt, such a task").select_option("dead")
    page.get_by_label("Fair shares by").fill("")  # and with it goes what is for each
    dialog = page.locator("dialog")
    dialog.get_by_role("button", name="Set", exact=True).click()
    expect(dialog.get_by_role("alert")).to_contain_text("order_retry_ms")
    page.get_by_label("Retry delay of a task with an order key").fill("2500")
    console.confirm("Set")
    expect(facts).to_contain_text("retried after 2.5 s, dead after 3 attempts")
    expect(facts).not_to_contain_text("Fair shares")
    answer = get(shop, f"/v1/topics/{topic}/groups/g")
    assert (answer["order_retry_ms"], answer["order_failure"]) == (2500, "dead")
    assert "fair_by" not in answer and "limit_each" not in answer


def test_held_keys_are_tried_again_and_skipped(console: Console, shop: Daemon, topic: str) -> None:
    held_keys(shop, topic, "customer-1", "customer-2", "customer-3")
    page = console.open()
    page.get_by_role("link", name=f"3 order keys are held in group g of {topic}").click()
    held = page.get_by_role("table", name="Held keys").locator("tbody tr")
    expect(held).to_have_count(3)
    expect(held.first).to_contain_text("no such account")
    waiting = page.get_by_role("table", name="Waiting keys and shares").locator("tbody tr")
    expect(waiting.filter(has_text="customer-2")).to_contain_text("order key")
    held.filter(has_text="customer-3").get_by_role("link").click()
    comes = page.locator(".panel", has=page.get_by_role("heading", name="What comes next"))
    expect(comes).to_contain_text("g: held since")
    expect(comes).to_contain_text("because no such account, and its order key with it")
    page.get_by_role("link", name="An operator must decide.").click()
    held.filter(has_text="customer-1").get_by_role("checkbox").check()
    page.get_by_role("button", name="Try again …").click()
    assert "failure count restarts" in console.confirm("Try again")
    expect(held).to_have_count(2)
    [again] = pull(shop, topic)
    assert again["order_key"] == "customer-1"
    held.filter(has_text="customer-2").get_by_role("checkbox").check()
    page.get_by_role("button", name="Skip …").click()
    assert "become dead letters" in console.confirm("Skip")
    expect(held).to_have_count(1)
    assert get(shop, f"/v1/topics/{topic}/groups/g")["dead"] == 1
    [following] = pull(shop, topic)
    assert following["order_key"] == "customer-2" and following["body"] == "body 1"


def test_a_task_is_explained_with_a_remedy(console: Console, shop: Daemon, topic: str) -> None:
    make_group(shop, topic)
    assert ask(shop, "PATCH", f"/v1/topics/{topic}", {"paused": True})[0] == 200
    [task] = enqueue(shop, topic)
    page = console.open(f"task/{task}")
    comes = page.locator(".panel", has=page.get_by_role("heading", name="What comes next"))
    expect(comes).to_contain_text(f"Topic {topic} is paused")
    expect(comes).not_to_contain_text("subscriber")
    expect(comes.locator("code")).to_have_text(f"tickwheel resume {topic}")
    assert ask(shop, "PATCH", f"/v1/topics/{topic}", {"paused": False})[0] == 200
    expect(comes).to_contain_text(f"Group g of topic {topic} has no subscriber")


def test_keys_are_paused_and_resumed(console: Console, shop: Daemon, topic: str) -> None:
    make_group(shop, topic)
    enqueue(shop, topic, 2, order_key="customer-1")
    assert len(pull(shop, topic)) == 1
    page = console.open(f"groups?topic={topic}&group=g")
    lines = page.get_by_role("table", name="Waiting keys and shares").locator("tbody tr")
    lines.filter(has_text="customer-1").get_by_role("checkbox").check()
    page.get_by_role("button", name="Pause …").click()
    assert "Other keys are not affected" in console.confirm("Pause")
    paused = page.get_by_role("table", name="Paused keys").locator("tbody tr")
    expect(paused).to_have_count(1)
    expect(paused.first).to_contain_text("customer-1")
    paused.first.get_by_role("checkbox").check()
    page.get_by_role("button", name="Resume …").click()
    assert "delivered again" in console.confirm("Resume")
    expect(paused).to_have_count(0)
    assert get(shop, f"/v1/topics/{topic}/groups/g")["paused_keys"] == 0


def test_a_group_is_reset_to_a_moment(console_on: Open, tmp_path: Any, topic: str) -> None:
    with Daemon(
        tmp_path, http=True, history_dir=tmp_path / "history", history_bodies=True
    ) as daemon:
        for group in ("g", "other"):
            make_group(daemon, topic, group)
        enqueue(daemon, topic, 3)
        for group in ("g", "other"):
            taken = [pull(daemon, topic, group)[0]["receipt"] for _ in range(3)]
            post(daemon, "/v1/acks", {"receipts": taken})
        console = console_on(daemon)
        page = console.open(f"groups?topic={topic}&group=g")
        page.get_by_role("button", name="Reset …").click()
        page.get_by_label("Since").select_option("first")
        expect(page.locator("dialog")).to_contain_text("Other groups are not affected")
        page.get_by_role("button", name="Count").click()
        page.get_by_role("heading", name=re.compile("^Redeliver 3 tasks")).wait_for()
        message = console.confirm("Redeliver")
        assert "Redeliver 3 tasks to g?" in message and "They were due from 20" in message
        expect(page.locator("main h2").first).to_have_text(re.compile("^Bulk operation reset-"))
        expect(page.locator(".facts .state")).to_have_text("done")
        groups = get(daemon, f"/v1/topics/{topic}")["groups"]
        assert (groups["g"]["ready"], groups["other"]["ready"]) == (3, 0)
        [task] = get(daemon, f"/v1/tasks?topic={topic}&limit=1")["tasks"]
        page = console.open(f"task/{task['id']}")
        expect(page.locator(".facts").first).to_contain_text("Replay of")


def test_a_group_is_made_with_its_filter(console: Console, shop: Daemon, topic: str) -> None:
    enqueue(shop, topic, delay_ms=HOUR_MS)
    page = console.open(f"groups?topic={topic}")
    page.get_by_role("button", name="New group …").click()
    dialog = page.locator("dialog")
    dialog.get_by_label("Name").fill("eu")
    dialog.get_by_label("Only tasks with these tags").fill("eu ||")
    dialog.get_by_role("button", name="Create").click()
    expect(dialog.get_by_role("alert")).to_contain_text("expected a tag")
    dialog.get_by_label("Only tasks with these tags").fill("eu")
    console.confirm("Create")
    console.says("eu is created")
    assert get(shop, f"/v1/topics/{topic}/groups/eu")["tags"] == "eu"


# --- tasks ---------------------------------------------------------------------------------------


@pytest.mark.one_shard("the ids of a request ascend within a shard only")
def test_tasks_are_searched(console: Console, shop: Daemon, topic: str) -> None:
    many = [
        {
            "topic": topic,
            "delay_ms": HOUR_MS,
            "key": f"order-{n}",
            "tag": ("eu", "us")[n % 2],
            "properties": {"size": n},
        }
        for n in range(20)
    ]
    ids = [task["id"] for task in post(shop, "/v1/tasks", {"tasks": many})["tasks"]]
    page = console.open("tasks")

    def finds(*numbers: int, **fields: str) -> None:
        for label in ("Topic", "Key", "Key begins", "Tag", "Property", "Id"):
            page.get_by_label(label, exact=True).fill(fields.get(label.replace(" ", "_"), ""))
        before = page.url
        page.get_by_role("button", name="Search").click()
        expect(page).not_to_have_url(before)
        if numbers:
            keys = [f"order-{n}" for n in sorted(numbers, reverse=True)]  # newest first
            expect(page.locator("tbody tr")).to_contain_text(keys)
        else:
            expect(page.locator("main")).to_contain_text("No matching tasks")

    finds(*range(20), Topic=topic)
    finds(*range(0, 20, 2), Topic=topic, Tag="eu")
    finds(7, Topic=topic, Key="order-7")
    finds(1, *range(10, 20), Topic=topic, Key_begins="order-1")
    finds(5, Topic=topic, Property="size=5")
    finds(3, Id=ids[3])
    finds(Topic=topic, Tag="nowhere")
    page.go_back()  # filters are in the address
    expect(page.locator("tbody tr")).to_contain_text(["order-3"])


def test_a_task_is_enqueued(console: Console, shop: Daemon, topic: str) -> None:
    page = console.open(f"tasks?topic={topic}")
    page.get_by_role("button", name="New task …").click()
    dialog = page.locator("dialog")
    expect(dialog.get_by_label("Topic", exact=True)).to_have_value(topic)
    page.get_by_label("Body", exact=True).fill('{"order": 42')
    dialog.get_by_label("Body is").select_option("json")
    page.get_by_label("Due", exact=True).select_option("delay")
    page.get_by_label("Delay").fill("soon")
    dialog.locator("summary").click()
    page.get_by_label("Key", exact=True).last.fill("order-42")
    page.get_by_label("Order key").fill("customer-7")
    page.get_by_label("Tag", exact=True).last.fill("eu")
    page.get_by_label("Properties").fill("country=de\namount:=12.5\nis_new:=true\nsay=a=b")
    page.get_by_label("Priority").fill("999")
    page.get_by_label("Worth delivering for").fill("3h")
    send = dialog.get_by_role("button", name="Enqueue")
    wrong = dialog.get_by_role("alert")
    for said, label, value in (
        ("Body is not valid JSON", "Body", '{"order": 42}'),
        ("Delay is a number and s, m, h or d", "Delay", "2h"),
        ("priority must be an integer between 0 and 255, not 999", "Priority", "9"),
    ):
        send.click()
        expect(wrong).to_contain_text(said)
        dialog.get_by_label(label, exact=True).fill(value)
    expect(page.get_by_label("Order key")).to_have_value("customer-7")
    console.confirm("Enqueue")
    console.says("is enqueued")
    expect(page.locator("tbody tr")).to_have_count(1)
    [found] = get(shop, f"/v1/tasks?topic={topic}")["tasks"]
    wanted = {
        "body": '{"order": 42}', "key": "order-42", "order_key": "customer-7", "tag": "eu",
        "priority": 9, "ttl_ms": 3 * HOUR_MS,
        "properties": {"country": "de", "amount": 12.5, "is_new": True, "say": "a=b"},
    }  # fmt: skip
    assert {name: found[name] for name in wanted} == wanted
    assert found["due_ms"] - found["enqueued_ms"] == 2 * HOUR_MS


def test_a_lost_answer_does_not_enqueue_a_task_twice(
    console: Console, shop: Daemon, topic: str
) -> None:
    page = console.open(f"tasks?topic={topic}")
    lost = []

    def lose(route: Any) -> None:
        lost.append(route.fetch().status)
        route.abort()

    page.route("**/v1/tasks", lose, times=1)
    page.get_by_role("button", name="New task …").click()
    page.get_by_label("Body", exact=True).fill("once")
    page.get_by_label("Due", exact=True).select_option("at")
    page.locator("dialog").get_by_role("button", name="Enqueue").click()
    expect(page.locator("dialog").get_by_role("alert")).to_contain_text("cannot be reached")
    assert lost == [201]
    console.confirm("Enqueue")
    console.says("is enqueued")
    assert get(shop, f"/v1/topics/{topic}")["enqueued"] == 1
    page.get_by_role("button", name="New task …").click()
    console.confirm("Enqueue")  # at once, with nothing in it
    console.says("is enqueued")
    assert get(shop, f"/v1/topics/{topic}")["enqueued"] == 2


def test_selected_tasks_are_rescheduled_run_and_cancelled(
    console: Console, shop: Daemon, topic: str
) -> None:
    make_group(shop, topic)
    ids = enqueue(shop, topic, 6, delay_ms=HOUR_MS)
    page = console.open(f"tasks?topic={topic}")
    for task_id in ids[:2]:
        page.get_by_label(f"Choose {task_id}").check()
    page.get_by_role("button", name="Reschedule …").click()
    page.get_by_label("Delay").fill("2h")
    assert "2 tasks" in console.confirm("Reschedule")
    console.says("2 scheduled")
    assert get(shop, f"/v1/tasks/{ids[0]}")["due_ms"] > get(shop, f"/v1/tasks/{ids[2]}")["due_ms"]
    page.get_by_label(f"Choose {ids[2]}").check()
    page.get_by_role("button", name="Run now …").click()
    console.confirm("Run now")
    console.says("1 scheduled")
    assert pull(shop, topic)[0]["id"] == ids[2]
    page = console.open(f"tasks?topic={topic}")
    page.get_by_label("Choose all loaded rows").check()
    page.get_by_role("button", name="Cancel …").click()
    assert "is in flight" in console.confirm("Cancel them")
    console.says("5 cancelled")
    assert get(shop, f"/v1/tasks/{ids[5]}")["state"] == "cancelled"
    expect(page.locator("tbody tr")).to_have_count(1)


def test_all_matching_tasks_are_rescheduled_run_and_cancelled(
    console: Console, shop: Daemon, topic: str
) -> None:
    make_group(shop, topic)
    odd = 'it\'s "odd"'
    for size, count in ((5, 30), ("5", 3), (6, 40)):
        enqueue(shop, topic, count, delay_ms=HOUR_MS, properties={"si ze": size}, tag=odd)
    [flying] = enqueue(shop, topic, properties={"si ze": 5}, tag=odd)
    pull(shop, topic)
    page = console.open("tasks")
    page.locator("tbody tr").first.wait_for()
    cancel = page.get_by_role("button", name="Cancel all matching …")
    expect(cancel).to_be_disabled()
    expect(cancel).to_have_attribute("title", "Requires a topic: search for one first")
    wanted = f"topic={topic}&property=si+ze%3D5&tag={quote(odd)}"
    before = get(shop, f"/v1/tasks?{wanted}&state=scheduled&limit=1000")["tasks"]
    assert len(before) == 33
    page = console.open(f"tasks?{wanted}")
    expect(page.locator("p[role=status]", has_text="34 tasks")).to_be_visible()
    page.get_by_role("button", name="Reschedule all matching …").click()
    page.get_by_label("Due").select_option("later")
    page.get_by_label("Delay").fill("2h")
    message = console.confirm("Reschedule them")
    assert "Reschedule 33 tasks?" in message and "1 more matches and is not changed" in message
    expect(page.locator(".facts .state")).to_have_text("done")
    expect(page.locator(".facts")).to_contain_text("Not done: in flight\n1", use_inner_text=True)
    after = get(shop, f"/v1/tasks?{wanted}&state=scheduled&limit=1000")["tasks"]
    assert [entry["due_ms"] for entry in after] == [
        entry["due_ms"] + 2 * HOUR_MS for entry in before
    ]
    page = console.open(f"tasks?{wanted}")
    page.get_by_role("button", name="Cancel all matching …").click()
    page.get_by_label("Type cancel").fill("cancel")
    assert "Cancel 33 tasks?" in console.confirm("Cancel them")
    expect(page.locator(".facts .state")).to_have_text("done")
    assert get(shop, f"/v1/topics/{topic}")["scheduled"] == 40
    assert get(shop, f"/v1/tasks/{flying}")["state"] == "in_flight"
    page = console.open(f"tasks?topic={topic}&state=scheduled")
    page.get_by_role("button", name="Run all matching …").click()
    console.confirm("Run them")
    expect(page.locator(".facts .state")).to_have_text("done")
    until(lambda: get(shop, f"/v1/topics/{topic}")["groups"]["g"]["ready"] == 40)
    page = console.open(f"tasks?topic={topic}&state=in_flight")
    page.get_by_role("button", name="Cancel all matching …").click()
    console.says("1 matches but cannot be changed")


def test_actions_need_a_confirmation(console: Console, shop: Daemon, topic: str) -> None:
    [task] = enqueue(shop, topic, delay_ms=HOUR_MS)
    page = console.open(f"task/{task}")
    page.get_by_role("button", name="Cancel …").click()
    console.confirm("Back")
    page.get_by_role("button", name="Cancel …").click()
    page.keyboard.press("Escape")
    page.locator("dialog").wait_for(state="detached")
    assert get(shop, f"/v1/tasks/{task}")["state"] == "scheduled"


def test_a_task_has_a_timeline(console: Console, shop: Daemon, topic: str) -> None:
    make_group(shop, topic)
    body = '{"order": 42, "lines": [1, 2]}'
    [task] = [
        row["id"]
        for row in post(
            shop,
            "/v1/tasks",
            {"tasks": [{"topic": topic, "body": body, "key": "k", "properties": {"region": "eu"}}]},
        )["tasks"]
    ]
    [first] = pull(shop, topic)
    post(
        shop,
        "/v1/nacks",
        {"receipts": [first["receipt"]], "reason": "time-out of the shop", "delay_ms": HOUR_MS},
    )
    page = console.open(f"task/{task}")
    expect(page.locator("main")).to_contain_text("attempt 2 comes")
    expect(page.locator("main")).to_contain_text(
        "because the last one failed: time-out of the shop"
    )
    life = page.locator(".timeline b")
    expect(life).to_have_text(["enqueued", "delivered", "nacked"], timeout=HISTORY_MS)
    content = page.locator(".content")
    expect(content).to_have_text(re.compile(r'"order": 42'))
    page.get_by_role("button", name="Hex").click()
    expect(content).to_contain_text("7b 22 6f 72 64 65 72")
    page.get_by_role("button", name="Text").click()
    expect(content).to_have_text(body)
    page.get_by_role("button", name="Hide").click()
    expect(content).to_be_hidden()
    page.get_by_role("button", name="Run now …").click()
    console.confirm("Run now")
    [second] = pull(shop, topic)
    expect(page.locator("main")).to_contain_text("attempt 2 is with a subscriber")
    post(shop, "/v1/acks", {"receipts": [second["receipt"]]})
    expect(page.locator("main .head .state")).to_have_text("acked")
    expect(life.last).to_have_text("acked", timeout=HISTORY_MS)
    expect(page.get_by_role("button", name="Cancel …")).to_be_disabled()


def test_a_dead_task_is_requeued_and_deleted_where_it_is(
    console: Console, shop: Daemon, topic: str
) -> None:
    first, second = dead_letters(shop, topic, 2)
    page = console.open(f"tasks?topic={topic}")
    page.get_by_label(f"Choose {first}").check()
    page.get_by_role("button", name="Run now …").click()
    message = console.confirm("To the task")
    assert f"Task {first} is a dead letter" in message
    assert "its group has given up. Requeue it for the group instead" in message
    expect(page.locator("main h1")).to_contain_text(first)
    page.get_by_role("button", name="Requeue for group g").click()
    assert "failure count restarts" in console.confirm("Requeue")
    console.says("1 requeued")
    expect(page.locator("main .head .state")).to_have_text("ready")
    expect(page.get_by_role("button", name="Requeue for group g")).to_have_count(0)
    page = console.open(f"task/{second}")
    page.get_by_role("button", name="Delete for group g").click()
    console.confirm("Delete")
    console.says("1 deleted")
    assert get(shop, f"/v1/topics/{topic}")["groups"]["g"]["dead"] == 0


def test_dead_letters_among_selected_tasks_are_not_run(
    console: Console, shop: Daemon, topic: str
) -> None:
    dead_letters(shop, topic, 1)
    enqueue(shop, topic, delay_ms=HOUR_MS)
    page = console.open(f"tasks?topic={topic}")
    page.get_by_label("Choose all loaded rows").check()
    page.get_by_role("button", name="Run now …").click()
    assert "One of them is a dead letter and is not run" in console.confirm("Run now")
    console.says("1 scheduled")


def test_bytes_are_shown_as_bytes(console: Console, shop: Daemon, topic: str) -> None:
    [task] = [
        row["id"]
        for row in post(
            shop,
            "/v1/tasks",
            {"tasks": [{"topic": topic, "body_base64": "AP8BAg==", "delay_ms": HOUR_MS}]},
        )["tasks"]
    ]
    page = console.open(f"task/{task}")
    expect(page.locator(".content")).to_contain_text("000000  00 ff 01 02")


PACKED = [
    ("json,zlib", zlib.compress(b'{"order": 42}'), '"order": 42', "13 bytes, decoded from "),
    ("zlib", zlib.compress(bytes(2 << 20)), "000000  78 ", "compressed by zlib, larger than 1 MiB"),
    ("zlib", zlib.compress(b"order")[:-1] + b"x", "000000  78 ", "compressed by zlib, and damaged"),
    ("json,zlib,aesgcm;key=2026-11", b"\xff" * 40, "ff ff", "40 bytes, encrypted with key 2026-11"),
    ("zstd", b"\xff" * 40, "ff ff", "40 bytes, compressed by zstd"),
    ("protobuf;v=1", b"\xff\x01", "ff 01", "2 bytes"),
]


@pytest.mark.parametrize(("encoding", "body", "content", "title"), PACKED)
def test_a_packed_body_is_unpacked_or_the_reason_shown(
    console: Console, shop: Daemon, topic: str, encoding: str, body: bytes, content: str, title: str
) -> None:
    given = {"topic": topic, "encoding": encoding, "delay_ms": HOUR_MS}
    given["body_base64"] = base64.b64encode(body).decode()
    [task] = [row["id"] for row in post(shop, "/v1/tasks", {"tasks": [given]})["tasks"]]
    page = console.open(f"task/{task}")
    expect(page.locator(".content")).to_contain_text(content)
    expect(page.locator("main")).to_contain_text(f"Body, {title}" if title[0].isdigit() else title)
    expect(page.locator("main")).to_contain_text(encoding)


def test_a_changed_schedule_keeps_hidden_task_fields(
    console: Console, shop: Daemon, topic: str
) -> None:
    sealed = {"body_base64": base64.b64encode(b"\xff" * 40).decode()}
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    task = {"encoding": "json,aesgcm;key=2026-11", "trace": trace}
    name = f"{topic}-sealed"
    ask(
        shop,
        "PUT",
        f"/v1/schedules/{name}",
        {"topic": topic, "every_ms": HOUR_MS, "task": task} | sealed,
    )
    page = console.open(f"schedules?name={name}")
    expect(page.locator("main")).to_contain_text("(encrypted with key 2026-11)")
    console.row(name).get_by_role("button", name="Set …").click()
    console.confirm("Set")
    shown = get(shop, f"/v1/schedules/{name}")
    assert (shown["task"], shown["body_base64"]) == (task, sealed["body_base64"])


def test_an_unknown_task_is_reported(console: Console) -> None:
    page = console.open("task/12345")
    expect(page.locator("main")).to_contain_text("there is no task 12345")


# --- dead letters --------------------------------------------------------------------------------


def test_dead_letters_are_filtered_and_selected(console: Console, shop: Daemon, topic: str) -> None:
    first = dead_letters(shop, topic, 3, "no such order")
    dead_letters(shop, topic, 2, "card refused")
    page = console.open(f"dead?topic={topic}")
    expect(page.locator(".chip")).to_have_text(["no such order 3", "card refused 2"])
    page.get_by_label(f"Choose {first[0]} g").check()
    page.get_by_role("button", name="Requeue …", exact=True).click()
    assert "failure count restarts" in console.confirm("Requeue")
    console.says("1 requeued")
    assert pull(shop, topic)[0]["id"] == first[0]
    page.get_by_label(f"Choose {first[1]} g").check()
    page.get_by_role("button", name="Delete …", exact=True).click()
    console.confirm("Delete")
    console.says("1 deleted")
    page.locator(".chip", has_text="card refused").click()
    expect(page.locator("tbody tr")).to_have_count(2)
    expect(page).to_have_url(re.compile("reason=card"))


def test_all_matching_dead_letters_are_a_bulk(console: Console, shop: Daemon, topic: str) -> None:
    dead_letters(shop, topic, 1200, "card refused")
    dead_letters(shop, topic, 1, "no such order")
    page = console.open(f"dead?topic={topic}&reason=card")
    expect(page.locator("p[role=status]", has_text="so far")).to_be_visible()
    page.get_by_role("button", name="Requeue all matching …").click()
    page.get_by_label("Pace").select_option("0")
    message = console.confirm("Requeue them")
    assert "Requeue 1,200 dead letters?" in message and "reason card" in message
    console.says("is running")
    expect(page.locator("main h2").first).to_have_text(re.compile("^Bulk operation requeue-"))
    expect(page.locator(".facts .state")).to_have_text("done")
    expect(page.locator(".facts")).to_contain_text("Done\n1,200", use_inner_text=True)
    assert get(shop, f"/v1/topics/{topic}")["groups"]["g"]["ready"] == 1200
    page = console.open(f"dead?topic={topic}")
    page.get_by_role("button", name="Delete all matching …").click()
    page.locator("dialog").get_by_label("Type delete").fill("delete")
    console.confirm("Delete them")
    expect(page.locator(".facts .state")).to_have_text("done")
    page = console.open(f"dead?topic={topic}")
    expect(page.locator("main")).to_contain_text("No matching dead letters")


def test_a_bulk_is_stopped(console: Console, shop: Daemon, topic: str) -> None:
    dead_letters(shop, topic, 600)  # a minute of work
    page = console.open(f"dead?topic={topic}")
    page.get_by_role("button", name="Requeue all matching …").click()
    page.get_by_label("Pace").select_option("10")
    console.confirm("Requeue them")
    page.get_by_role("button", name="Stop …").click()
    assert "Earlier changes remain" in console.confirm("Stop")
    expect(page.locator(".facts .state")).to_have_text("cancelled")
    assert get(shop, f"/v1/topics/{topic}")["groups"]["g"]["dead"] > 0
    page = console.open(f"bulk?topic={topic}&state=cancelled")
    assert cells(page, "requeue-")[2:5] == ["requeue", topic, "cancelled"]
    page = console.open(f"bulk?topic={topic}&state=running")
    expect(page.locator("main")).to_contain_text("No matching bulk operations")


def test_requeuing_all_dead_letters_shows_progress(
    console: Console, shop: Daemon, topic: str
) -> None:
    dead_letters(shop, topic, 1200, f"refused by {topic}")
    page = console.open(f"dead?reason={topic}")
    page.get_by_role("button", name="Requeue all matching …").click()
    page.get_by_label("Pace").select_option("1000")
    held: list[Any] = []
    page.route("**/v1/dead-letters/requeue", lambda route: held.append(route), times=1)
    with page.expect_request("**/v1/dead-letters/requeue"):
        page.locator("dialog").get_by_role("button", name="Requeue all").click()
    expect(page.locator("dialog progress")).to_be_visible()
    held[0].continue_()
    console.says("1,200 requeued")
    assert get(shop, f"/v1/topics/{topic}")["groups"]["g"]["ready"] == 1200


def test_a_running_requeue_can_be_stopped(console: Console, shop: Daemon, topic: str) -> None:
    dead_letters(shop, topic, 600, f"refused by {topic}")  # a minute of work
    page = console.open(f"dead?reason={topic}")
    page.get_by_role("button", name="Requeue all matching …").click()
    page.get_by_label("Pace").select_option("10")
    page.locator("dialog").get_by_role("button", name="Requeue all").click()
    page.locator("dialog").get_by_role("button", name="Stop").click()
    console.says("Stopped after")
    assert 0 < get(shop, f"/v1/topics/{topic}")["groups"]["g"]["dead"] < 600


# --- transactions --------------------------------------------------------------------------------


def test_a_transaction_is_found_looked_at_and_committed(
    console: Console, shop: Daemon, topic: str
) -> None:
    name, group = f"{topic}-1", f"{topic}-shop"
    tasks = ({"topic": topic, "body": b"now"}, {"topic": topic, "delay": 3600, "key": "k"})
    prepare(shop, name, *tasks, group=group)
    prepare(shop, f"{topic}-2", tasks[0])
    page = console.open(f"transactions?group={group}")
    expect(page.locator("tbody tr")).to_have_count(1)
    assert cells(page, name)[2:5] == ["open", group, "2"]
    console.row(name).get_by_role("link", name=name).click()
    expect(page.locator("main h2").first).to_have_text(f"Transaction {name}")
    facts = page.locator(".facts")
    for text in ("Producer group\n" + group, "Asked\nnot yet", "Tasks\n2"):
        expect(facts).to_contain_text(text, use_inner_text=True)
    halves = page.get_by_role("table", name="Half tasks")
    expect(halves.locator("tbody tr")).to_have_count(2)
    expect(halves.locator("tbody tr").last).to_contain_text("k")
    assert get(shop, f"/v1/tasks?topic={topic}")["tasks"] == []
    page.get_by_role("button", name="Commit …").click()
    message = console.confirm("Commit")
    assert (
        f"Its 2 half tasks of {topic} become tasks" in message and "1 at once, 1 later" in message
    )
    assert "may be about to decide otherwise" in message and "cannot be undone" in message
    console.says(f"{name} committed: 2 tasks")
    expect(page.locator(".facts .state")).to_have_text("committed")
    expect(page.get_by_role("button", name="Commit …")).to_be_hidden()
    page.locator(".facts a.mono, .facts a", has=page.locator(".mono")).click()
    expect(page.locator("main h1")).to_contain_text("Task")
    assert len(get(shop, f"/v1/tasks?topic={topic}")["tasks"]) == 2


def test_selected_transactions_are_rolled_back(console: Console, shop: Daemon, topic: str) -> None:
    for number in range(3):
        prepare(shop, f"{topic}-{number}", {"topic": topic}, {"topic": topic}, group=topic)
    page = console.open(f"transactions?group={topic}")
    for number in (0, 2):
        page.get_by_label(f"Choose {topic}-{number}").check()
    page.get_by_role("button", name="Roll back …").click()
    message = console.confirm("Roll back")
    assert "Roll back 2 transactions?" in message
    assert f"Their 4 half tasks of {topic} are deleted" in message
    console.says("2 rolled back")
    expect(page.locator("tbody tr")).to_have_count(1)
    page.get_by_label("State").select_option("rolled_back")
    page.get_by_role("button", name="Search").click()
    expect(page.locator("tbody tr")).to_have_count(2)
    expect(page.get_by_role("checkbox")).to_have_count(0)  # what is decided stays so
    assert get(shop, f"/v1/transactions/{topic}-1")["state"] == "open"


def test_a_decision_made_elsewhere_is_shown(console: Console, shop: Daemon, topic: str) -> None:
    prepare(shop, topic, {"topic": topic}, group=topic)
    page = console.open(f"transactions?group={topic}")
    page.get_by_label(f"Choose {topic}").check()
    post(shop, f"/v1/transactions/{topic}/commit")
    page.get_by_role("button", name="Roll back …").click()
    console.confirm("Roll back")
    console.says(f"1 not rolled back: transaction {topic} was committed")
    expect(page.locator("main")).to_contain_text("No matching transactions")


def test_an_unknown_transaction_is_reported(console: Console) -> None:
    page = console.open("transactions?id=nothing")
    expect(page.locator("main")).to_contain_text("there is no transaction nothing")


# --- the rest ------------------------------------------------------------------------------------


def test_a_schedule_is_paused_run_and_deleted(console: Console, shop: Daemon, topic: str) -> None:
    daily = {
        "topic": topic,
        "body": "good morning",
        "cron": "0 9 * * *",
        "timezone": "Europe/Berlin",
    }
    ask(shop, "PUT", "/v1/schedules/daily", daily)
    page = console.open("schedules?name=daily")
    expect(page.locator(".facts")).to_contain_text("0 9 * * * Europe/Berlin")
    row = console.row("daily")
    row.get_by_role("button", name="Pause").click()
    console.says("daily is paused")
    assert get(shop, "/v1/schedules/daily")["paused"] is True
    row.get_by_role("button", name="Resume").click()
    console.says("daily is resumed")
    row.get_by_role("button", name="Run now …").click()
    console.confirm("Run now")
    console.says("is created")
    assert get(shop, f"/v1/topics/{topic}")["enqueued"] == 1
    row.get_by_role("button", name="Delete …").click()
    console.confirm("Delete")
    console.says("daily is deleted")
    expect(page.locator("main")).to_contain_text("No schedule yet")


def told(page: Page) -> Any:
    """What the dialog says is wrong."""
    return page.locator("dialog").get_by_role("alert")


def test_a_schedule_is_made_with_its_next_times(console: Console, shop: Daemon, topic: str) -> None:
    enqueue(shop, topic, delay_ms=HOUR_MS)
    page = console.open("schedules")
    page.get_by_role("button", name="New schedule …").click()
    dialog = page.locator("dialog")
    make = dialog.get_by_role("button", name="Create")
    expect(dialog.locator(f"datalist option[value='{topic}']")).to_have_count(0)
    expect(page.locator(f".view datalist option[value='{topic}']")).to_have_count(1)
    page.get_by_label("Name", exact=True).fill("made.here")
    dialog.get_by_label("Topic", exact=True).fill(topic)
    page.get_by_label("Cron expression").fill("0 9 * * mondey")
    page.get_by_label("Time zone").fill("Europe/Berlin")
    page.get_by_label("Body", exact=True).fill('{"n": 1}')
    dialog.get_by_label("Body is").select_option("json")
    dialog.locator("summary").first.click()
    page.get_by_label("If the last run is unfinished, the next one").select_option("queue_one")
    page.get_by_label("Of missed runs").select_option("all")
    page.get_by_label("Maximum age for catching up").fill("2h")
    page.get_by_label("A time that the clock skips").select_option("skip")
    page.get_by_label("A time that occurs twice").select_option("both")
    dialog.locator("summary").last.click()
    page.get_by_label("Key", exact=True).fill("k")
    page.get_by_label("Properties").fill("country=de\namount:=12.5")
    page.get_by_label("Worth delivering for").fill("90s")
    make.click()
    expect(told(page)).to_contain_text("cron '0 9 * * mondey'")  # in the daemon's words
    expect(page.get_by_label("Cron expression")).to_have_value("0 9 * * mondey")
    expect(page.get_by_label("Body", exact=True)).to_have_value('{"n": 1}')
    page.get_by_label("Cron expression").fill("0 9 * * mon")
    make.click()
    console.says("made.here is created")
    expect(page).to_have_url(re.compile(r"#/schedules\?name=made\.here$"))
    expect(page.locator("h3", has_text="Next").locator("xpath=..").locator("li")).to_have_count(5)
    answer = get(shop, "/v1/schedules/made.here")
    wanted = {
        "topic": topic, "cron": "0 9 * * mon", "timezone": "Europe/Berlin", "body": '{"n": 1}',
        "overlap": "queue_one", "catch_up": "all", "catch_up_ms": 2 * HOUR_MS, "gap": "skip",
        "fold": "both", "paused": False, "every_ms": None,
        "task": {"key": "k", "properties": {"country": "de", "amount": 12.5}, "ttl_ms": 90_000},
    }  # fmt: skip
    assert {name: answer[name] for name in wanted} == wanted
    page.get_by_role("button", name="New schedule …").click()
    page.get_by_label("Name", exact=True).fill("made.here")
    dialog.get_by_label("Topic", exact=True).fill(topic)
    page.get_by_label("When", exact=True).select_option("every")
    page.get_by_label("Every", exact=True).fill("often")
    make.click()
    expect(told(page)).to_have_text("Every is a number and s, m, h or d: 90s, 10m")
    page.get_by_label("Every", exact=True).fill("1h")
    make.click()
    expect(told(page)).to_contain_text("the schedule made.here already exists")
    console.confirm("Back")
    ask(shop, "DELETE", "/v1/schedules/made.here")


def test_a_changed_schedule_keeps_hidden_fields(console: Console, shop: Daemon, topic: str) -> None:
    """Bytes that nobody can type, bounds, a retry policy: a setting of one thing is of that."""
    given: dict[str, Any] = {
        "topic": topic, "body_base64": "/wA=", "every_ms": 5_400_000, "anchor_ms": 12_345,
        "jitter_ms": 1_500, "start_ms": 1_000, "end_ms": 3_900_000_000_000, "runs_max": 9,
        "overlap": "skip", "catch_up": "skip", "catch_up_ms": 1_500,
        "task": {
            "key": " k ", "tag": "t", "priority": 7, "ttl_ms": 1_250,
            "within_ms": 60_000, "retry": "rocketmq", "shard_by": "s", "encoding": "avro",
            "trace": f"00-{1:032}-{2:016}-01",
            "properties": {"a=b": "x", "line": "1\n2", "n": 5, "on": True, "t": "5"},
        },
    }  # fmt: skip
    missing = {option.name for option, _ in kept_options()} - given["task"].keys()
    assert missing == {"order_key"}, "all but the one that retry excludes"
    status, before = ask(shop, "PUT", "/v1/schedules/kept", given)
    assert status == 201, before
    before = get(shop, "/v1/schedules/kept")
    page = console.open("schedules?name=kept")
    set_ = console.row("kept").get_by_role("button", name="Set …")
    dialog = page.locator("dialog")
    set_.click()
    expect(page.get_by_label("Every", exact=True)).to_have_value("90m")
    console.confirm("Set")
    console.says("kept is unchanged")
    assert get(shop, "/v1/schedules/kept") == before
    set_.click()
    page.get_by_label("Priority").evaluate("one => { one.closest('details').open = true; }")
    page.get_by_label("Priority").fill("256")
    dialog.get_by_label("It", exact=True).select_option("true")
    dialog.get_by_role("button", name="Set", exact=True).click()
    expect(told(page)).to_contain_text("priority must be an integer between 0 and 255, not 256")
    page.get_by_label("Priority").fill("8")
    console.confirm("Set")
    console.says("kept is changed")
    expect(page.locator("tbody .tag")).to_have_text("paused")
    changed = {**before, "paused": True, "task": {**before["task"], "priority": 8}}
    answer = get(shop, "/v1/schedules/kept")
    assert {**answer, "next": None, "next_ms": None} == {**changed, "next": None, "next_ms": None}
    set_.click()
    dialog.get_by_label("It", exact=True).select_option("false")
    page.get_by_label("When", exact=True).select_option("cron")
    page.get_by_label("Cron expression").fill("@daily")
    dialog.get_by_label("Body is").select_option("text")
    page.get_by_label("Body", exact=True).fill("a text now")
    console.confirm("Set")
    expect(page.locator(".facts")).to_contain_text("@daily")
    answer = get(shop, "/v1/schedules/kept")
    assert (answer["paused"], answer["every_ms"], answer["body"]) == (False, None, "a text now")
    ask(shop, "DELETE", "/v1/schedules/kept")


@pytest.mark.one_shard("the shards divide the prefetch")
def test_consumers_are_listed_with_host_and_process(
    console: Console, shop: Daemon, topic: str
) -> None:
    enqueue(shop, topic)
    with Client(shop.url, name="billing-worker") as client:
        messages = client.subscribe(topic, group="g", prefetch=3)
        next(iter(messages))
        page = console.open(f"groups?topic={topic}&group=g")
        page.locator(".facts").get_by_role("link", name="1").last.click()
        expect(page.locator("main h1")).to_have_text("Consumers")
        row = console.row("billing-worker")
        for text in (socket.gethostname(), str(os.getpid()), topic, "1 of 3", __version__):
            expect(row).to_contain_text(text)
    expect(page.locator("main")).to_contain_text("No consumer matches")


def test_a_push_target_is_shown_resent_and_removed(
    console_on: Open, tmp_path: Any, topic: str
) -> None:
    with Answering() as endpoint, Daemon(tmp_path, http=True, push_allow="127.0.0.0/8") as daemon:
        secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
        path = f"/v1/topics/{topic}/groups/g"
        fields = {"url": f"{endpoint.url}?code=hushed", "secrets": [secret]}
        assert ask(daemon, "PUT", f"{path}/push", fields)[0] == 201
        (task,) = enqueue(daemon, topic)
        until(lambda: get(daemon, f"{path}/push/log").get("requests"))
        console = console_on(daemon)
        page = console.open("targets")
        row = console.row(topic)
        for text in ("g", f"{endpoint.url}?code=…", "sending"):
            expect(row).to_contain_text(text)
        row.get_by_role("link", name="g", exact=True).click()
        sent = page.get_by_role("table", name="The last requests").locator("tbody tr")
        expect(sent).to_have_count(1)
        for text in (task, "acked", "204"):
            expect(sent.first).to_contain_text(text)
        sent.first.get_by_role("button").click()
        console.confirm("Send")
        console.says("The endpoint answered 204")
        expect(sent).to_have_count(2)
        assert endpoint.count == 2
        endpoint.status = 410
        enqueue(daemon, topic)
        expect(console.row(topic)).to_contain_text("ended")
        console.open()
        page.locator(".trouble", has_text="receives no more tasks").get_by_role("link").click()
        console.row(topic).get_by_role("checkbox").check()
        page.get_by_role("button", name="Remove …").click()
        assert "secrets" in console.confirm("Remove")
        expect(page.locator("main")).to_contain_text("No group")
        assert "hushed" not in page.content() and secret not in page.content()


class Answering:
    """An endpoint in a thread that answers ``status`` and counts."""

    status = 204
    count = 0

    def __enter__(self) -> Self:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                outer.count += 1
                self.send_response(outer.status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *args: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/hook"
        self._thread = Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def test_the_node_view_shows_the_status(console: Console, shop: Daemon) -> None:
    page = console.open("nodes")
    facts = page.locator(".facts").first
    expect(facts).to_contain_text("active")
    for text in ("ready", shop.url, "sqlite:", "MiB", "% used"):
        expect(facts).to_contain_text(text)
    expect(page.locator("main")).to_contain_text("body bytes max")


def test_a_report_is_shown_in_a_sandboxed_frame(console_on: Open, tmp_path: Any) -> None:
    with Daemon(tmp_path, http=True, report_dir=tmp_path / "report") as daemon:
        console = console_on(daemon)
        page = console.open("reports")
        expect(page.locator("main")).to_contain_text("No report yet")
        (tmp_path / "report").mkdir()
        (tmp_path / "report" / "report.html").write_text(
            "<h1>figures</h1><p></p><script>const p = document.querySelector('p');"
            "try { p.textContent = parent.document.title } catch { p.textContent = 'alone' }"
            "</script>"
        )
        page = console.open("reports")
        frame = page.frame_locator("iframe.report")
        expect(frame.locator("h1")).to_have_text("figures")
        expect(frame.locator("p")).to_have_text("alone")


def test_leaving_a_view_closes_its_dialog(console: Console, shop: Daemon, topic: str) -> None:
    enqueue(shop, topic, delay_ms=HOUR_MS)
    page = console.open("topics")
    page.get_by_role("searchbox").fill(topic)
    console.row(topic).get_by_role("button", name="Delete …").click()
    page.locator("dialog").wait_for()
    page.evaluate("location.hash = '#/nodes'")
    expect(page.locator("main h1")).to_have_text("Nodes")
    expect(page.locator("dialog")).to_have_count(0)
    assert get(shop, f"/v1/topics/{topic}")["scheduled"] == 1


def test_logarithmic_scales_say_so(console: Console, shop: Daemon, topic: str) -> None:
    enqueue(shop, topic, 5_000, delay_ms=HOUR_MS // 3)
    page = console.open()
    scales = page.locator(".legend", has_text="Logarithmic scale: a full bar is ")
    expect(scales).to_have_count(2)
    expect(scales.first).to_have_text(
        re.compile(r"a full bar is [\d,]+ tasks in one slot, half of one about [\d,]+\.$")
    )
    expect(scales.last).to_contain_text("in one turn")


def test_an_unknown_page_is_reported(console: Console) -> None:
    page = console.page
    page.goto(f"{console.http}/console/#/nothing")
    expect(page.locator("main")).to_contain_text("This page does not exist")


def test_light_and_dark_are_kept(console: Console) -> None:
    page = console.open("nodes")
    shade = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(shade)
    for _ in range(2):
        page.locator("#theme").click()
    assert page.evaluate(shade) != light
    page.reload()
    assert page.locator("#theme").inner_text() == "Theme: dark"


def test_a_group_shows_its_last_hour(console: Console, behind: str) -> None:
    page = console.open(f"groups?topic={behind}&group=g")
    hour = page.locator(".panel", has=page.get_by_role("heading", name="The last hour"))
    ready = hour.locator(".hour").first
    expect(ready.locator("b")).to_have_text("1,234", timeout=30_000)
    expect(ready).to_contain_text(re.compile(r"Maximum 1,234 at \d\d:\d\d:\d\d"))
    label = ready.locator("canvas").get_attribute("aria-label")
    assert label is not None and label.startswith("Ready in the last hour. Maximum 1,234 at ")
    drawn = (
        "canvas => canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height)"
        ".data.some(Boolean)"
    )
    assert ready.locator("canvas").evaluate(drawn)
    expect(hour.locator(".hour-ends")).to_contain_text("recorded since")
