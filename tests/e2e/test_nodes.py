"""Nodes that share the shards of a Redis: how they divide them, what becomes of the shards when one
dies, stands still, is drained or told to move one, and what they say of themselves."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from support.daemon import Daemon
from support.nodes import Node, Nodes, family
from support.redis_server import RedisServer
from support.waiting import until
from tickwheel.api.frames import FrameType as T
from tickwheel.server.daemon import GOODBYE_WAIT_S

SHARDS = 4
TTL_S = 1.0
DAY_MS = 86_400_000
GAP_S = 0.5
"""What is promised of a shard that is handed over, on a machine that has nothing else to do."""
BUSY = 6
"""Factor for limits on a busy machine."""


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    made = RedisServer(tmp_path_factory.mktemp("registry") / "redis").start()
    yield made
    made.kill()


@pytest.fixture(scope="module")
def shared(registry: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    folder = tmp_path_factory.mktemp("nodes")
    with Nodes(folder, registry.url(), SHARDS, leader_ttl_s=TTL_S) as nodes:
        yield nodes


@pytest.fixture
def pair(shared: Nodes) -> Nodes:
    """The same two nodes for many tests: both live, neither is drained, and no shard is placed."""
    settle(shared)
    return shared


def settle(nodes: Nodes) -> None:
    for node in nodes.all.values():
        if not node.alive:
            node.start()
    until(lambda: is_undone(nodes), 60, nodes.log)
    until(lambda: is_settled(nodes), 60, nodes.log)


def is_undone(nodes: Nodes) -> bool:
    """Return whether no node drains and no shard is placed. Otherwise ask the leader for that.
    The leader can change meanwhile."""
    leader = nodes.leaders("a")[0]
    if leader is None:
        return False
    listing = nodes["a"].nodes()
    draining = [entry["node"] for entry in listing["nodes"] if entry["draining"]]
    placed = [entry["shard"] for entry in listing["shards"] if entry["placed"]]
    with suppress(OSError, EOFError, AssertionError), nodes[str(leader)].raw(0) as raw:
        for name in draining:
            raw.call(T.NODE_DRAIN, name, False)
        for shard in placed:
            raw.call(T.SHARD_MOVE, shard, None)
    return not draining and not placed


def is_settled(nodes: Nodes) -> bool:
    shards = nodes["a"].nodes()["shards"]
    led_by = nodes.leaders("a")
    return (
        sorted(map(str, led_by.values())) == ["a", "a", "b", "b"]
        and nodes.leaders("b") == led_by
        and all(entry["placed"] is None for entry in shards)
        and all(entry["wanted"] == entry["node"] for entry in shards)
        and all(len(family(node.pid)) == 2 + SHARDS // 2 for node in nodes.all.values())
    )


class Since:
    """What the nodes log from now on."""

    def __init__(self, *nodes: Node) -> None:
        self._begins = [(node, len(node.log_text())) for node in nodes]

    def __call__(self) -> str:
        return "\n".join(node.log_text()[begin:] for node, begin in self._begins)


def enqueued(node: Node, shard: int) -> int:
    with node.raw(shard) as raw:
        answer = raw.enqueue(("t", b"body", DAY_MS))
        assert answer[0] == T.OK, answer
        return int(answer[2][1][0])


def state(node: Node, shard: int, task: int) -> str:
    with node.raw(shard) as raw:
        return str(raw.call(T.LOOKUP, [task])[2][0]["state"])


# --- dividing ------------------------------------------------------------------------------------


def test_two_nodes_divide_the_shards(pair: Nodes) -> None:
    led_by = pair.leaders("a")
    assert sorted(map(list(led_by.values()).count, "ab")) == [2, 2]
    assert pair.leaders("b") == led_by
    urls = tuple(pair[str(led_by[shard])].url_of(shard) for shard in range(SHARDS))
    listing = pair["a"].nodes()
    assert [node["node"] for node in listing["nodes"]] == ["a", "b"]
    for node in listing["nodes"]:
        assert node["address"] == f"tcp://127.0.0.1:{pair[node['node']].first_port}"
        assert list(node["shards"]) == [
            shard for shard, name in led_by.items() if name == node["node"]
        ]
        assert (node["draining"], node["capacity"]) == (False, 1.0)
    for shard in listing["shards"]:
        assert shard["address"] == urls[shard["shard"]]
        assert (shard["wanted"], shard["placed"]) == (shard["node"], None)
    with pair["a"].front() as raw:
        hello_answer = raw.hello_answer
        assert (hello_answer["role"], hello_answer["shards"]) == ("standby", urls)
        assert hello_answer["active"] in urls
        assert hello_answer["active"].startswith(f"tcp://127.0.0.1:{pair['a'].first_port}"[:-2])
        assert raw.call(T.ENQUEUE, 1, [("t", b"x", 0)])[2] == "not_active"
        assert raw.call(T.STATUS)[2]["role"] == "standby"


def test_hello_names_the_daemon_of_a_shard(pair: Nodes) -> None:
    led_by = pair.leaders("a")
    for shard, name in led_by.items():
        url = pair[str(name)].url_of(shard)
        for node in pair.all.values():
            with node.front(shard=shard) as raw:
                assert (raw.hello_answer["role"], raw.hello_answer["active"]) == ("standby", url)
        with pair[str(name)].raw(shard, shard=shard) as raw:
            hello_answer = raw.hello_answer
            assert (hello_answer["role"], hello_answer["shard"], hello_answer["active"]) == (
                "active",
                shard,
                None,
            )
            assert hello_answer["route_version"] >= SHARDS
    here, there = 0, next(shard for shard, name in led_by.items() if name != led_by[0])
    with pair[str(led_by[here])].raw(here, shard=there) as raw:
        assert raw.hello_answer["active"] == pair[str(led_by[there])].url_of(there)
        assert raw.enqueue(("t", b"kept nowhere", DAY_MS))[2] == "not_active"
    with pair["a"].front(shard=SHARDS) as raw:
        assert raw.hello_answer["active"] is None


def test_another_node_of_the_same_name_is_refused(pair: Nodes, tmp_path: Path) -> None:
    store = pair["a"].store.partition("?")[0]
    other = Node(tmp_path / "other", "a", store, SHARDS, leader_ttl_s=TTL_S)
    other.spawn()
    assert other.wait() == 1
    assert "lives under this name" in other.log_text()
    assert set(pair.leaders("b").values()) == {"a", "b"}


@pytest.mark.parametrize(
    ("store", "args", "said"),
    [
        ("redis://127.0.0.1:1/0?shards=4&shard=1", (), "shard=1 and shards=4 cannot be combined"),
        ("redis://127.0.0.1:1/0?shards=65", (), "shards must be between 1 and 64, not"),
        ("sqlite:///x.db?shards=2", (), "is only valid for a server"),
        (
            "redis://127.0.0.1:1/0?shards=2",
            ("--processes", "2"),
            "processes (2) cannot be set with",
        ),
        ("redis://127.0.0.1:1/0?shards=2", ("--set", "shard=1"), "shard cannot be set with"),
        ("redis://127.0.0.1:1/0?shards=2", ("--set", "node=host a"), "node must be 1 to 255"),
        (
            "redis://127.0.0.1:1/0?shards=2",
            ("--http", "127.0.0.1:0", "--http-all", "127.0.0.1:0", "--processes", "2"),
            "processes (2) cannot be set with",
        ),
    ],
)
def test_settings_invalid_for_nodes_are_refused(
    make_daemon: Callable[..., Daemon], store: str, args: tuple[str, ...], said: str
) -> None:
    daemon = make_daemon(store=store, args=args)
    daemon.spawn()
    assert daemon.wait() != 0
    assert said in daemon.log_text()


# --- moving --------------------------------------------------------------------------------------


def test_a_joining_node_gets_only_its_share(server: RedisServer, tmp_path: Path) -> None:
    with Nodes(tmp_path, server.url(), SHARDS, "a", leader_ttl_s=TTL_S) as nodes:
        assert nodes.until_led("a", "a") == dict.fromkeys(range(SHARDS), "a")
        task = {shard: enqueued(nodes["a"], shard) for shard in range(SHARDS)}
        second = Node(tmp_path / "node-b", "b", server.url(), SHARDS, leader_ttl_s=TTL_S)
        nodes.all["b"] = second
        second.start()
        led_by = nodes.until_led("a", "ab")
        assert list(led_by.values()).count("b") == SHARDS // 2
        for shard, name in led_by.items():
            assert state(nodes[str(name)], shard, task[shard]) == "scheduled"
        log = nodes["a"].log_text()
        assert log.count("shard_handed_over") == SHARDS // 2
        stayed = [shard for shard, name in led_by.items() if name == "a"]
        ready = r"epoch=1 leases_kept=0 node=a .*ready=0 .*scheduled=0\b"
        assert len(re.findall(ready, log)) >= len(stayed)
        assert {entry["epoch"] for entry in second.nodes()["shards"] if entry["node"] == "a"} == {1}


def test_a_duplicate_node_address_is_logged(server: RedisServer, tmp_path: Path) -> None:
    with Nodes(tmp_path, server.url(), 1, "a", leader_ttl_s=TTL_S) as nodes:
        taken = f"tcp://127.0.0.1:{nodes['a'].first_port}"
        with Nodes(tmp_path, server.url(), 1, "b", leader_ttl_s=TTL_S, advertise=taken) as others:
            text = f"node b also has the address {taken}"
            until(lambda: text in nodes.log() and "same_node_address" in nodes.log(), 60, nodes.log)
            until(lambda: "detail='node a also has" in others.log(), 60, others.log)


def test_an_operator_moves_a_shard_and_back(pair: Nodes) -> None:
    before = pair.leaders("a")
    shard = next(shard for shard, name in before.items() if name == "a")
    epoch = pair["a"].nodes()["shards"][shard]["epoch"]
    with pair["a"].raw(shard) as raw:
        assert raw.call(T.SHARD_MOVE, shard, "b")[2] == {"shard": shard, "node": "b"}
        goodbye = raw.next()
        assert (goodbye[:2], goodbye[3:]) == ((T.GOODBYE, "draining"), (pair["b"].url_of(shard),))
    until(lambda: pair.leaders("b")[shard] == "b", 60, pair.log)
    answer = pair["b"].nodes()["shards"][shard]
    assert (answer["placed"], answer["wanted"], answer["epoch"]) == ("b", "b", epoch + 1)
    with pair["b"].raw(shard) as raw:
        assert raw.call(T.SHARD_MOVE, shard, None)[2] == {"shard": shard, "node": None}
    until(lambda: pair.leaders("a") == before, 60, pair.log)


def test_a_connected_client_does_not_delay_a_move(pair: Nodes) -> None:
    """It reads no GOODBYE, and a daemon alone would wait a second for it. On a machine that has
    other work a move may take longer than that now and then, but not each time."""
    leader, tries = str(pair.leaders("a")[0]), 5
    log = Since(*pair.all.values())
    while True:
        to = "b" if leader == "a" else "a"
        with pair[leader].raw(0) as raw:
            raw.call(T.SHARD_MOVE, 0, to)
            until(lambda: pair.leaders("a")[0] == to, 60, pair.log)  # noqa: B023  # at once
            until(lambda: handed_over(log()), 60, pair.log)
        gaps_s = [float(line.rpartition(" in ")[2].split()[0]) for line in handed_over(log())]
        leader, tries = to, tries - 1
        if min(gaps_s) < GOODBYE_WAIT_S:
            return
        assert tries, gaps_s


def test_a_drained_node_hands_over_until_undrained(pair: Nodes) -> None:
    before = pair.leaders("a")
    shard = next(shard for shard, name in before.items() if name == "a")
    with pair["a"].raw(shard) as raw:
        assert raw.call(T.NODE_DRAIN, "b", True)[2] == {"node": "b", "draining": True}
    pair.until_led("b", "a")
    draining = {node["node"]: node["draining"] for node in pair["a"].nodes()["nodes"]}
    assert draining == {"a": False, "b": True}
    with pair["a"].raw(shard) as raw:
        raw.call(T.NODE_DRAIN, "a", True)
        until(lambda: pair["a"].nodes()["nodes"][0]["draining"], 60, pair.log)
        # Somebody has to serve: where all are drained, all may have shards.
        pair.until_led("b", "ab")
    holder = pair.leaders("a")
    first = str(holder[0])
    for name in "ab":
        with pair[first].raw(0) as raw:
            raw.call(T.NODE_DRAIN, name, False)
    until(lambda: pair.leaders("a") == before, 60, pair.log)


# --- ends ----------------------------------------------------------------------------------------


def test_the_shards_of_a_node_that_was_killed_go_to_the_others(pair: Nodes) -> None:
    led_by = pair.leaders("a")
    tasks = {shard: enqueued(pair[str(name)], shard) for shard, name in led_by.items()}
    pids = family(pair["b"].pid)
    pair["b"].kill()
    pair.until_led("a", "a")
    for shard, task in tasks.items():
        assert state(pair["a"], shard, task) == "scheduled"
    assert [node["node"] for node in pair["a"].nodes()["nodes"]] == ["a"]
    until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids[1:]))
    pair["b"].start()
    until(lambda: pair.leaders("a") == led_by, 60, pair.log)


def test_a_stopping_node_hands_its_shards_over_first(pair: Nodes) -> None:
    led_by = pair.leaders("a")
    tasks = {shard: enqueued(pair[str(name)], shard) for shard, name in led_by.items()}
    before = len(pair["a"].log_text())  # the first of two nodes gives the other one its part
    assert pair["a"].terminate() == 0
    assert set(pair.leaders("b").values()) == {"b"}, "before it has ended"
    log = pair["a"].log_text()[before:]
    assert log.count("shard_handed_over") == list(led_by.values()).count("a")
    gaps_s = [float(line.rpartition(" in ")[2].split()[0]) for line in handed_over(log)]
    assert max(gaps_s) < BUSY * GAP_S, gaps_s
    for shard, task in tasks.items():
        assert state(pair["b"], shard, task) == "scheduled"
    until(lambda: len(pair["b"].nodes()["nodes"]) == 1, TTL_S / 2, pair.log)
    began_s = time.monotonic()
    assert pair["b"].terminate() == 0
    assert time.monotonic() - began_s < 8, "alone it waits for nobody"


def handed_over(log: str) -> list[str]:
    return [line for line in log.splitlines() if "shard_handed_over" in line]


def test_a_handover_is_short(pair: Nodes) -> None:
    """Asked all the time, as somebody who knows both addresses would."""
    led_by = pair.leaders("a")
    shard = next(shard for shard, name in led_by.items() if name == "a")

    def took(node: Node) -> bool:
        try:
            enqueued(node, shard)
        except (OSError, EOFError, AssertionError):
            return False
        return True

    assert took(pair["a"])
    last_s = time.monotonic()
    os.kill(pair["a"].pid, signal.SIGTERM)
    while not took(pair["b"]):
        if took(pair["a"]):
            last_s = time.monotonic()
    gap_s = time.monotonic() - last_s
    assert gap_s < BUSY * GAP_S, gap_s
    assert pair["a"].wait() == 0


def test_a_frozen_node_is_fenced_and_gets_its_shards_back(pair: Nodes) -> None:
    led_by = pair.leaders("a")
    tasks = {shard: enqueued(pair[str(name)], shard) for shard, name in led_by.items()}
    frozen = pair["b"].freeze()
    try:
        pair.until_led("a", "a")
    finally:
        pair["b"].wake(frozen)
    until(lambda: pair.leaders("a") == led_by, 60, pair.log)
    for shard, task in tasks.items():
        assert state(pair[str(led_by[shard])], shard, task) == "scheduled"


def test_a_dead_registrar_does_not_affect_shards(pair: Nodes) -> None:
    led_by, epochs = pair.leaders("a"), {entry["epoch"] for entry in pair["a"].nodes()["shards"]}
    children = family(pair["b"].pid)[1:]
    serving = {shard: enqueued(pair[str(name)], shard) for shard, name in led_by.items()}
    leading = [int(pid) for pid in pids_of_shards(pair["b"], led_by)]
    [registrar] = [pid for pid in children if pid not in leading]
    log = Since(pair["b"])
    os.kill(registrar, signal.SIGKILL)
    until(lambda: "registrar_ended" in log(), 60, pair.log)
    until(lambda: answers(pair["b"]), 60, pair.log)
    assert pair.leaders("b") == led_by
    assert {entry["epoch"] for entry in pair["a"].nodes()["shards"]} == epochs
    assert len(serving) == SHARDS
    assert sorted(map(int, pids_of_shards(pair["b"], led_by))) == sorted(leading)


def answers(node: Node) -> bool:
    try:
        return bool(node.nodes()["nodes"])
    except (OSError, EOFError):
        return False


def pids_of_shards(node: Node, led_by: dict[int, str | None]) -> list[int]:
    results = []
    for shard, name in led_by.items():
        if name == node.name:
            with node.raw(shard) as raw:
                results.append(raw.call(T.STATUS)[2]["pid"])
    return results


def test_a_daemon_that_dies_is_started_again_where_it_was(pair: Nodes) -> None:
    led_by = pair.leaders("a")
    pids = pids_of_shards(pair["b"], led_by)
    log = Since(pair["b"])
    os.kill(pids[0], signal.SIGKILL)
    until(lambda: "shard_ended" in log(), 60, pair.log)

    def is_back() -> bool:
        try:
            now = pids_of_shards(pair["b"], led_by)
        except (OSError, EOFError):
            return False
        return pids[0] not in now and pair.leaders("a") == led_by

    until(is_back, 60, pair.log)


def test_shards_stay_in_place_during_a_redis_outage(pair: Nodes, registry: RedisServer) -> None:
    led_by, log = pair.leaders("a"), Since(pair["a"])
    registry.kill()
    until(lambda: "registry_trouble" in log(), 60, pair.log)
    registry.start()
    until(lambda: "registry_works_again" in log(), 60, pair.log)
    until(lambda: pair.leaders("a") == led_by == pair.leaders("b"), 60, pair.log)


# --- what became of the store --------------------------------------------------------------------


def test_a_node_on_an_emptied_store_ends_with_one_line_per_shard(
    server: RedisServer, tmp_path: Path
) -> None:
    options = {"leader_ttl_s": TTL_S, "history_dir": tmp_path / "history"}
    with Nodes(tmp_path, server.url(), 2, "a", **options) as nodes:
        nodes.until_led("a", "a")
        node = nodes["a"]
        for shard in range(2):
            enqueued(node, shard)
        assert node.terminate() == 0
        server.call("FLUSHALL")
        before = len(node.log_text())
        node.spawn()
        assert node.wait() != 0
        answer = node.log_text()[before:]
        assert "is empty, but its history" in answer and "tickwheel restore" in answer
        assert "Traceback" not in answer
