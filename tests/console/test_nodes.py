"""The view of nodes that share the shards of a Redis: who has what, moves, drains."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from console.asking import ask
from console.conftest import Console
from console.test_looks import AXE, HIDDEN_BUTTONS, LONG, PHONE, WIDE
from console.test_safety import log_in
from support.daemon import Daemon
from support.nodes import Node, Nodes
from support.redis_server import RedisServer
from support.waiting import until
from tickwheel.server.access import tokens

Open = Callable[..., Console]
OTHER = LONG[:100]
"""The name of the second node."""
HERE, THERE = 0, 1
"""A shard that belongs on node a, and one on the other, which may go without a third one moving."""
BELONGS = {HERE: "a", THERE: OTHER, 2: OTHER}
TTL_S = 3.0


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """Two nodes of three shards."""
    folder = tmp_path_factory.mktemp("nodes")
    server = RedisServer(folder / "redis").start()
    try:
        options: dict[str, Any] = {"http": True, "leader_ttl_s": TTL_S}
        server.lay_out(3)
        with Nodes(folder, server.url(), 3, ("a", OTHER), **options) as nodes:
            yield nodes
    finally:
        server.kill()


@pytest.fixture
def settled(pair: Nodes) -> Nodes:
    """The two nodes, once each shard is where it belongs and both say so."""
    until(lambda: pair.leaders("a") == pair.leaders(OTHER) == BELONGS, 60, pair.log)
    return pair


def console_of(console_on: Open, nodes: Nodes, shard: int, **options: Any) -> Console:
    """The console of the daemon that leads a shard."""
    one = next(entry for entry in nodes["a"].nodes()["shards"] if entry["shard"] == shard)
    return console_on(SimpleNamespace(http=one["http"]), **options)


def row(page: Page, table: str, key: object) -> Any:
    """The row of a node, or of a shard."""
    rows = page.get_by_role("table", name=table, exact=True)
    return rows.locator(f'tr[data-key="{key}"]')


NODES, SHARDS = "Nodes that share the shards", "Shards"


def test_nodes_show_their_shards(console_on: Open, settled: Nodes) -> None:
    page = console_of(console_on, settled, HERE).open("nodes")
    listing = settled["a"].nodes()
    for node in listing["nodes"]:
        shown = row(page, NODES, node["node"])
        assert node["http"] == settled[node["node"]].http
        expect(shown.get_by_role("link")).to_have_attribute("href", f"{node['http']}/")
        for text in ("serves", node["address"], node["version"]):
            expect(shown).to_contain_text(text)
        led = [shard for shard, name in BELONGS.items() if name == node["node"]]
        expect(shown.locator("td.number").first).to_have_text(str(len(led)))
    for entry in listing["shards"]:
        shown = row(page, SHARDS, entry["shard"])
        expect(shown).to_contain_text(entry["address"])
        expect(shown.locator("td.name").first).to_have_text(BELONGS[entry["shard"]])
        if entry["shard"] == HERE:
            expect(shown).to_contain_text("this one")
            continue
        there = f"{entry['http']}/console/"
        expect(shown.get_by_role("link")).to_have_attribute("href", f"{there}#/nodes")
        other = console_on(SimpleNamespace(http=entry["http"])).open("nodes")
        expect(row(other, SHARDS, entry["shard"])).to_contain_text("this one")
    expect(page.locator("main")).to_contain_text(f"Node a, shard {HERE}")
    expect(page.get_by_role("heading", name="All nodes on this store")).to_have_count(0)


def test_a_shard_is_moved_and_released(console_on: Open, settled: Nodes) -> None:
    console = console_of(console_on, settled, HERE)
    page = console.open("nodes")
    shown = row(page, SHARDS, THERE)
    shown.get_by_role("button", name=f"Move shard {THERE}").click()
    page.locator("dialog select").select_option("a")
    message = console.confirm("Move")
    assert f"It is on {OTHER}" in message and "This console" not in message
    console.says(f"Shard {THERE} is moving to a")
    expect(shown.locator(".tag")).to_have_text("placed")
    expect(shown.locator("td.name").first).to_have_text("a")
    until(lambda: settled.leaders(OTHER)[THERE] == "a", 60, settled.log)
    shown.get_by_role("button", name=f"Move shard {THERE}").click()
    page.locator("dialog select").select_option("")
    console.confirm("Move")
    console.says(f"Shard {THERE} can be on any node")
    expect(shown.locator(".tag")).to_have_count(0)
    expect(shown.locator("td.name").first).to_have_text(OTHER)
    row(page, SHARDS, HERE).get_by_role("button").click()
    assert "This console belongs to shard" in console.confirm("Back")


def test_a_node_is_drained_until_that_is_ended(console_on: Open, settled: Nodes) -> None:
    console = console_of(console_on, settled, HERE)
    page = console.open("nodes")
    node, shard = row(page, NODES, OTHER), row(page, SHARDS, THERE)
    node.get_by_role("button", name=f"Drain {OTHER}").click()
    assert "It hands its 2 shards" in console.confirm("Drain")
    console.says("hands its shards over")
    expect(node).to_contain_text("draining")
    expect(shard.locator("td.name").first).to_have_text("a")
    row(page, NODES, "a").get_by_role("button", name="Drain a").click()
    assert "No other node takes shards" in console.confirm("Back")
    node.get_by_role("button", name=f"End draining {OTHER}").click()
    console.confirm("End draining")
    console.says("gets shards again")
    expect(node).to_contain_text("serves")
    expect(shard.locator("td.name").first).to_have_text(OTHER)


def test_a_refused_move_is_shown_in_the_dialog(console_on: Open, settled: Nodes) -> None:
    """A node that dies while somebody is asked."""
    console = console_of(console_on, settled, HERE)
    page = console.open("nodes")
    row(page, SHARDS, HERE).get_by_role("button").click()
    page.locator("dialog select").select_option(OTHER)
    settled[OTHER].kill()
    until(lambda: len(settled["a"].nodes()["nodes"]) == 1, 60, settled.log)
    page.locator("dialog").get_by_role("button", name="Move", exact=True).click()
    expect(page.locator("dialog").get_by_role("alert")).to_contain_text("not found")
    console.confirm("Back")
    assert {shard["placed"] for shard in settled["a"].nodes()["shards"]} == {None}
    expect(row(page, NODES, OTHER)).to_have_count(0)
    settled[OTHER].start()
    expect(row(page, NODES, OTHER)).to_be_visible()


@pytest.mark.parametrize(
    ("scheme", "size"),
    [pytest.param("light", WIDE, marks=pytest.mark.slow), ("dark", PHONE)],  # the phone is quick
    ids=["light-wide", "dark-narrow"],
)
def test_the_nodes_view_is_accessible(
    console_on: Open, settled: Nodes, scheme: str, size: dict[str, int]
) -> None:
    """What axe finds, in the view and in its dialog; no button is out of sight."""
    options: dict[str, Any] = {"color_scheme": scheme, "viewport": size, "bypass_csp": True}
    page = console_of(console_on, settled, HERE, **options).open("nodes")
    expect(row(page, NODES, OTHER)).to_be_visible()
    assert page.evaluate(HIDDEN_BUTTONS) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
    page.evaluate(AXE)
    violations = page.evaluate("axe.run(document)")["violations"]
    button = row(page, SHARDS, THERE).get_by_role("button")
    button.focus()
    page.keyboard.press("Enter")
    dialog = page.locator("dialog")
    expect(page.get_by_label("To", exact=True)).to_be_focused()
    width, inside, right = dialog.evaluate(
        "d => [d.scrollWidth, d.clientWidth, d.getBoundingClientRect().right]"
    )
    assert width <= inside and right <= size["width"]
    violations += page.evaluate("axe.run(document.querySelector('dialog'))")["violations"]
    assert [item["id"] for item in violations if item["impact"] in ("serious", "critical")] == []
    page.keyboard.press("Escape")
    dialog.wait_for(state="detached")
    expect(button).to_be_focused()


def test_buttons_without_the_right_are_disabled(console_on: Open, tmp_path: Path) -> None:
    kept = tmp_path / "tokens.json"
    reader = tokens.create(kept, "reader", tokens.parse_scopes(["read"]), 1, None)[1]
    server = RedisServer(tmp_path / "redis").start()
    try:
        with Node(tmp_path / "a", "a", server.url(), 1, http=True, tokens_file=kept) as node:
            [shard] = ask(node, "GET", "/v1/shards", token=reader)[1]["shards"]
            daemon: Any = SimpleNamespace(http=shard["http"])
            console = console_on(daemon)
            log_in(console, reader)
            expect(console.page.locator("main h1")).to_have_text("Overview")
            page = console.open("nodes")
            expect(row(page, NODES, "a").get_by_role("button")).to_be_disabled()
            button = row(page, SHARDS, 0).get_by_role("button")
            expect(button).to_be_disabled()
            expect(button).to_have_attribute("title", "Requires the right admin")
            for path, body in (
                ("/v1/nodes/a/drain", {"draining": True}),
                ("/v1/shard-moves", {"shard": 0, "node": "a"}),
            ):
                status, said = ask(daemon, "POST", path, body, reader)
                assert (status, said["code"]) == (403, "forbidden"), said
    finally:
        server.kill()


def test_shards_of_a_folder_have_no_nodes_view(console_on: Open, tmp_path: Path) -> None:
    store, asked = f"sqlite:///{tmp_path}/shards/", list[str]()
    with Daemon(tmp_path, store=store, http=True, args=("--processes", "2")) as daemon:
        console = console_on(daemon)
        console.page.on("request", lambda request: asked.append(request.url))
        page = console.open("nodes")
        expect(page.get_by_role("table", name="All nodes")).to_be_visible()
        facts = page.locator(".facts", has_text="Role").element_handle()
        assert facts is not None
        page.wait_for_function("old => !old.isConnected", arg=facts)  # looked again
        expect(page.get_by_role("heading", name=SHARDS)).to_have_count(0)
        expect(page.locator(".problem, .toast-error")).to_have_count(0)
    assert sum(url.endswith("/v1/nodes") for url in asked) == 1
