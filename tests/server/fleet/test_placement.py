"""Which node shall have which shard, and what a node does about it: for any nodes at all."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tickwheel.persistence.contract import Claim, NodeRecord, NodesSeen
from tickwheel.server.fleet import registrar
from tickwheel.server.fleet.board import Board, Bulletin, Node
from tickwheel.server.fleet.registrar import (
    HANDOVERS_MAX,
    Registrar,
    bound_of,
    decide,
    eligible,
    leaders,
    place,
)
from tickwheel.server.logs import configure
from tickwheel.server.settings import Settings

names = st.text("abcdefgh0123", min_size=1, max_size=6)
capacities = st.dictionaries(names, st.sampled_from((0.5, 1.0, 2.0, 8.0)), min_size=1, max_size=9)
counts = st.integers(1, 64)


@given(counts, capacities, st.dictionaries(st.integers(0, 70), names, max_size=8))
def test_each_shard_gets_one_node_within_its_bound(
    shards: int, nodes: dict[str, float], placed: dict[int, str]
) -> None:
    result = place(shards, nodes, placed)
    assert result.keys() == set(range(shards))
    wanted = {s: n for s, n in placed.items() if n in nodes and s < shards}
    assert wanted.items() <= result.items()
    total = sum(nodes.values())
    by_hand = Counter(wanted.values())
    for node, count in Counter(result.values()).items():
        assert count <= max(bound_of(shards, nodes[node], total), by_hand[node])


@given(counts, capacities)
def test_a_nodes_bound_is_125_percent_of_its_fair_share(
    shards: int, nodes: dict[str, float]
) -> None:
    total = sum(nodes.values())
    for capacity in nodes.values():
        fair = shards * capacity / total
        assert fair - 1e-6 <= bound_of(shards, capacity, total) <= max(1.25 * fair, fair + 1)


@given(counts, capacities, st.randoms())
def test_placement_does_not_depend_on_the_order_of_nodes(
    shards: int, nodes: dict[str, float], order: Random
) -> None:
    items = list(nodes.items())
    order.shuffle(items)
    assert place(shards, dict(items), {}) == place(shards, nodes, {})


@given(st.integers(8, 64), st.sets(names, min_size=2, max_size=6), names)
def test_a_joining_node_moves_few_other_shards(shards: int, nodes: set[str], new: str) -> None:
    nodes.discard(new)
    before = place(shards, dict.fromkeys(nodes, 1.0), {})
    after = place(shards, dict.fromkeys(nodes | {new}, 1.0), {})
    if not before:
        return
    moved = [shard for shard in before if before[shard] != after[shard]]
    gets = list(after.values()).count(new)
    bound = bound_of(shards, 1.0, len(nodes) + 1)
    assert gets <= bound
    # Those whose bound is smaller now give some more away.
    assert len(moved) <= gets + shards // 3 + 1


@given(st.integers(1, 64), st.sets(names, min_size=2, max_size=6))
def test_a_leaving_node_moves_few_other_shards(shards: int, nodes: set[str]) -> None:
    gone = min(nodes)
    before = place(shards, dict.fromkeys(nodes, 1.0), {})
    after = place(shards, dict.fromkeys(nodes - {gone}, 1.0), {})
    assert gone not in after.values()
    moved = [s for s in before if before[s] != after[s] and before[s] != gone]
    assert len(moved) <= shards // 3 + 1


def test_shards_follow_the_capacity_of_nodes() -> None:
    result = Counter(place(60, {"small": 1.0, "large": 2.0}, {}).values())
    assert 15 <= result["small"] <= 25
    assert result["large"] == 60 - result["small"]


def test_placement_without_nodes_is_empty() -> None:
    assert place(4, {}, {0: "a"}) == {}


# --- who may have shards, who leads --------------------------------------------------------------


def node(name: str, *claims: tuple[int, int], standbys: tuple[int, ...] = ()) -> NodeRecord:
    return NodeRecord(
        name, f"run-{name}", f"tcp://{name}:1", "1", 1.0, 0, 3_000,
        standbys={shard: f"tcp://{name}:{shard}" for shard in standbys},
        claims=tuple(Claim(shard, epoch, f"tcp://{name}:{shard}", 0) for shard, epoch in claims),
    )  # fmt: skip


def seen(*nodes: NodeRecord, drained: str = "") -> NodesSeen:
    return NodesSeen(
        0, {item.name: item for item in nodes}, dict.fromkeys("ab", 0), {}, frozenset(drained), 0
    )


def test_drained_nodes_get_shards_only_as_a_last_resort() -> None:
    a, b = node("a"), node("b")
    assert eligible(seen(a, b)).keys() == {"a", "b"}
    assert eligible(seen(a, b, drained="b")).keys() == {"a"}
    assert eligible(seen(a, b, drained="ab")).keys() == {"a", "b"}
    assert eligible(seen(replace(a, leaving=True), b)).keys() == {"b"}
    assert eligible(seen(replace(a, leaving=True), b, drained="b")).keys() == {"b"}
    assert eligible(seen(replace(a, leaving=True))) == {}


def test_the_highest_epoch_decides_between_two_leaders() -> None:
    result = leaders(seen(node("a", (0, 2), (1, 5)), node("b", (0, 3))))
    assert {shard: name for shard, (name, _) in result.items()} == {0: "b", 1: "a"}


# --- what a node does ----------------------------------------------------------------------------

NONE = frozenset[int]()


def test_a_node_starts_a_standby_for_each_assigned_shard() -> None:
    decision = decide("a", seen(node("a"), node("b", (0, 1))), {0: "a", 1: "a"}, NONE, NONE)
    assert (decision.wanted, decision.handing_over) == ({0, 1}, NONE)
    assert decision.expected == {0, 1}, "it looks often until it leads, also when b has just ended"
    assert decision.wait_reasons == {
        0: "b is handing it over to a",
        1: "no node leads it yet; a will",
    }


def test_a_shard_is_handed_over_only_to_a_standby() -> None:
    a = node("a", (0, 1))
    decision = decide("a", seen(a, node("b")), {0: "b"}, {0}, NONE)
    assert (decision.wanted, decision.handing_over) == ({0}, NONE)
    assert decision.wait_reasons == {0: "b has no standby for it yet"}
    decision = decide("a", seen(a, node("b", standbys=(0,))), {0: "b"}, {0}, NONE)
    assert (decision.wanted, decision.handing_over) == (NONE, {0})


def test_a_led_shard_counts_as_had() -> None:
    """A registrar that was started again may not know it."""
    decision = decide("a", seen(node("a", (0, 1)), node("b")), {0: "b"}, NONE, NONE)
    assert decision.wanted == {0}


def test_concurrent_handovers_are_limited() -> None:
    shards = range(5)
    a, b = node("a", *((s, 1) for s in shards)), node("b", standbys=tuple(shards))
    decision = decide("a", seen(a, b), dict.fromkeys(shards, "b"), set(shards), NONE)
    assert len(decision.handing_over) == HANDOVERS_MAX
    assert decision.wanted == set(shards) - decision.handing_over
    decision = decide(
        "a", seen(a, b), dict.fromkeys(shards, "b"), decision.wanted, decision.handing_over
    )
    assert len(decision.handing_over) == HANDOVERS_MAX, "those that nobody leads yet count"


def test_a_shard_assigned_back_during_a_handover_is_kept() -> None:
    decision = decide("a", seen(node("a", (0, 1)), node("b")), {0: "a"}, NONE, {0})
    assert (decision.wanted, decision.handing_over) == ({0}, NONE)


def test_an_unneeded_standby_ends() -> None:
    a = node("a", standbys=(0,))
    decision = decide("a", seen(a, node("b", (0, 1))), {0: "b"}, {0}, NONE)
    assert decision.wanted == NONE


def test_a_standby_of_a_leaderless_shard_waits_for_the_successor() -> None:
    a = node("a", standbys=(0,))
    assert decide("a", seen(a, node("b")), {0: "b"}, {0}, NONE).wanted == {0}
    heir = node("b", standbys=(0,))
    assert decide("a", seen(a, heir), {0: "b"}, {0}, NONE).wanted == NONE


def test_a_handover_without_a_successor_changes_nothing() -> None:
    assert decide("a", seen(node("a", (0, 1))), {}, {0}, NONE).wanted == {0}


@given(st.integers(1, 16), st.data())
def test_decisions_converge_to_the_placement(shards: int, data: st.DataObject) -> None:
    """A model of nodes: daemons begin at once, and who ends gives the lease to one who stands by.
    Never are more shards without a leader than may be handed over at a time."""
    owners = {shard: data.draw(st.sampled_from("abc")) for shard in range(shards)}
    nodes = data.draw(st.sets(st.sampled_from("abcd"), min_size=1))
    has = {name: {s for s, o in owners.items() if o == name} for name in "abcd"}
    target = place(shards, dict.fromkeys(nodes, 1.0), {})
    giving: dict[str, set[int]] = {name: set() for name in "abcd"}
    for _ in range(4 * shards + 4):
        picture = seen(
            *(
                node(
                    name,
                    *((s, 1) for s in has[name] if owners[s] == name),
                    standbys=tuple(s for s in has[name] if owners[s] != name),
                )
                for name in "abcd"
            )
        )
        for name in "abcd":
            giving[name] = {s for s in giving[name] if owners[s] == name}
            decision = decide(name, picture, target, has[name], giving[name])
            giving[name] |= decision.handing_over
            assert len(giving[name]) <= HANDOVERS_MAX
            for shard in has[name] - decision.wanted:
                if owners[shard] == name:
                    owners[shard] = next(n for n in "abcd" if n != name and shard in has[n])
            has[name] = set(decision.wanted)
    assert owners == target
    assert all(has[name] == {s for s, o in target.items() if o == name} for name in "abcd")


@pytest.mark.parametrize("shards", [16, 64])
def test_a_join_moves_about_the_new_nodes_share(shards: int) -> None:
    moved = []
    for run in range(50):
        nodes = [f"{run}-{number}" for number in range(4)]
        before = place(shards, dict.fromkeys(nodes, 1.0), {})
        after = place(shards, dict.fromkeys([*nodes, f"{run}-new"], 1.0), {})
        moved.append(sum(before[shard] != after[shard] for shard in before))
    assert sum(moved) / len(moved) < 1.3 * shards / 5


# --- the registrar -------------------------------------------------------------------------------


async def test_a_node_whose_name_another_has_taken_can_be_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was suspended, and its replacement has its name: it has nothing to hand over."""
    announced = asyncio.Event()

    class Taken:
        async def beat(self, me: NodeRecord, instead_of: str = "") -> NodesSeen:
            announced.set()
            return replace(seen(), namesake=replace(node("a"), run="another"))

    monkeypatch.setattr(registrar, "open_nodes", lambda url, count: Taken())
    settings = Settings(store="memory:", node="a", advertise="tcp://a:1", leader_ttl_s=0.2)
    bulletin = Bulletin()
    bulletin.write({"wanted": []})  # it had decided before
    reader, writer = os.pipe()
    members = Node(settings, [], "", Board(1), bulletin, "run-a", "", 0, reader, writer)
    log = configure("console", "error")
    made = Registrar(members, log, lambda: None, lambda: None)
    running = asyncio.create_task(made.run())
    await announced.wait()
    made.leave()
    async with asyncio.timeout(5):
        await running
    asyncio.get_running_loop().remove_reader(reader)
    os.close(reader)
    os.close(writer)
