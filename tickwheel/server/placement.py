"""Which node shall have which shard, and what a node does about it. Pure: all nodes that see the
same decide the same, without asking each other.

Rendezvous hashing: each pair of shard and node has a score that follows from their names alone, and
pairs are taken in the order of their scores. So a node that joins or leaves changes the order of no
other pair. A node takes no more than its bound, which is a little more than its fair share by
capacity: hashing alone would give one node twice as much as another. What operators say comes first
and knows no bound.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from fractions import Fraction
from hashlib import blake2b
from typing import Final, NamedTuple

from tickwheel.persistence.contract import Claim, NodesSeen

SLACK: Final = Fraction(5, 4)
"""So much of its fair share a node may have."""


def bound_of(shards: int, capacity: float, total: float) -> int:
    """How many of ``shards`` a node may have that has ``capacity`` of the ``total`` of all."""
    fair = shards * Fraction(capacity) / Fraction(total)
    return max(math.ceil(fair), math.floor(SLACK * fair))


def place(
    shards: int, capacities: Mapping[str, float], placed: Mapping[int, str]
) -> dict[int, str]:
    """Shard → node, for all shards. ``capacities``: of the nodes that may have shards, by name;
    without any the result is empty. ``placed``: where operators want shards; what names another
    node, or another shard, is passed over."""
    chosen = {
        shard: node for shard, node in placed.items() if node in capacities and shard < shards
    }
    total = sum(map(Fraction, capacities.values()))
    counts = Counter(chosen.values())
    room = {
        node: bound_of(shards, capacity, float(total)) - counts[node]
        for node, capacity in capacities.items()
    }
    pairs = [
        (-_score(shard, node, capacity), shard, node)
        for shard in range(shards)
        if shard not in chosen
        for node, capacity in capacities.items()
    ]
    for _, shard, node in sorted(pairs):
        if shard not in chosen and room[node] > 0:
            chosen[shard] = node
            room[node] -= 1
    return chosen


def _score(shard: int, node: str, capacity: float) -> float:
    """The larger, the rather the node has the shard; in proportion to its capacity."""
    digest = blake2b(f"{shard}/{node}".encode(), digest_size=8).digest()
    part = (int.from_bytes(digest) + 1) / (2**64 + 1)
    return capacity / -math.log(part)


# --- what a node does about it -------------------------------------------------------------------

HANDOVERS_MAX: Final = 2
"""So many shards a node hands over at the same time."""


class Decision(NamedTuple):
    """What a node shall do."""

    wanted: frozenset[int]
    """The shards that it shall have a daemon of."""
    expected: frozenset[int]
    """Those of them that it does not lead yet: another node hands them over, or nobody does."""
    given: frozenset[int]
    """The shards that it leads, or led until now, and gives to a node that stands by."""
    waits: Mapping[int, str]
    """Shard → why it is not where it shall be, in words."""


def eligible(seen: NodesSeen) -> dict[str, float]:
    """Name → capacity of the nodes that may have shards: who is not about to end, nor drained; who
    is drained only where nobody else is left."""
    staying = {name: one.capacity for name, one in seen.nodes.items() if not one.leaving}
    free = {name: capacity for name, capacity in staying.items() if name not in seen.drained}
    return free or staying


def leaders(seen: NodesSeen) -> dict[int, tuple[str, Claim]]:
    """Shard → the node that leads it, and what it says. Of two that say so the one with the higher
    epoch does: the other one is deposed, and has not noticed yet."""
    found: dict[int, tuple[str, Claim]] = {}
    for name, node in sorted(seen.nodes.items()):
        for claim in node.claims:
            if claim.shard not in found or found[claim.shard][1].epoch < claim.epoch:
                found[claim.shard] = name, claim
    return found


def decide(
    me: str,
    seen: NodesSeen,
    target: Mapping[int, str],
    has: AbstractSet[int],
    giving: AbstractSet[int],
) -> Decision:
    """What the node ``me`` does, so that each shard comes to the node that ``target`` names.
    ``has``: the shards that it has a daemon of; ``giving``: those that it gives away and nobody
    else leads yet.

    A node gives a shard away only to one that stands by for it, so that the shard is without a
    leader for as long as its daemon takes to end and another one to begin.
    """
    led_by = leaders(seen)
    has = {*has, *(shard for shard, (leader, _) in led_by.items() if leader == me)}
    wanted, expected, given, waits = set[int](), set[int](), set(giving), dict[int, str]()
    for shard in sorted(set(target) | has):
        heir = target.get(shard)
        leader = led_by[shard][0] if shard in led_by else None
        if heir is not None and leader is None:
            waits[shard] = f"nobody leads it yet; {heir} will"
        if heir == me:
            wanted.add(shard)
            given.discard(shard)
            if leader != me:
                expected.add(shard)
            if leader not in (None, me):
                waits[shard] = f"{leader} hands it over to {me}"
        elif shard in has and shard not in giving and leader in (me, None):
            stands_by = heir is not None and shard in seen.nodes[heir].standbys
            if stands_by and (leader is None or len(given) < HANDOVERS_MAX):
                if leader == me:
                    given.add(shard)
                continue
            wanted.add(shard)
        if heir is not None and leader not in (None, heir) and shard not in waits:
            is_there = shard in seen.nodes[heir].standbys
            waits[shard] = (
                f"{leader} hands it over to {heir}, one after the other"
                if is_there
                else f"{heir} does not stand by for it yet"
            )
    return Decision(frozenset(wanted), frozenset(expected), frozenset(given), waits)
