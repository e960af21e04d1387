"""The registrar of a node: announces the node and its shards in the store, watches the other nodes,
decides which shards this node should have, and serves the node's front door.

It is a separate process without tasks. It reads the state of the node's daemons from the board and
writes its decisions to the bulletin. Invariants:

* It decides only on current data from the store. It makes no decision for some time after its start
  and after the store was unreachable, because other nodes may not be visible yet. While the store
  is unreachable, nothing changes.
* A registrar that dies is restarted with the same name and run, and continues its work.
* The front door answers HELLO like a standby and names an active daemon.
* Decisions are a pure function of the store's data (``place``, ``decide``). Nodes that see the same
  data therefore decide the same, without communication.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import replace
from fractions import Fraction
from hashlib import blake2b
from typing import Any, Final, NamedTuple

from tickwheel.clock import Clock
from tickwheel.errors import TickwheelError
from tickwheel.model.policies import duration_ms
from tickwheel.persistence import open_nodes, without_secrets
from tickwheel.persistence.contract import (
    Claim,
    Leader,
    NodeRecord,
    NodesSeen,
    StoreError,
    StoreUnusable,
)
from tickwheel.server import daemon
from tickwheel.server.access.logins import Entrance
from tickwheel.server.access.tls import TlsServer
from tickwheel.server.fleet.board import Member, Node, Role
from tickwheel.server.fleet.lease import RENEWALS_PER_TTL, Life, is_over
from tickwheel.server.logs import Log, LogRateLimit, configure, log_event
from tickwheel.server.metrics.observed import Observed
from tickwheel.server.roles import memory_bytes
from tickwheel.server.shard.operations import StandbyOperations
from tickwheel.server.tcp.listener import Listener
from tickwheel.version import __version__

# --- placement of shards -------------------------------------------------------------------------
# Rendezvous hashing: each pair of shard and node has a score that depends only on their names, and
# pairs are chosen in the order of their scores. A node that joins or leaves does not change the
# order of other pairs. Each node has a bound slightly above its fair share by capacity, because
# hashing alone could give one node twice as many shards as another. Placements by operators take
# precedence and ignore the bound.

SLACK: Final = Fraction(5, 4)
"""Maximum ratio of a node's shards to its fair share."""


def bound_of(shards: int, capacity: float, total: float) -> int:
    """Return how many of ``shards`` shards a node with ``capacity`` of the ``total`` may have."""
    fair = shards * Fraction(capacity) / Fraction(total)
    return max(math.ceil(fair), math.floor(SLACK * fair))


def place(
    shards: int, capacities: Mapping[str, float], placed: Mapping[int, str]
) -> dict[int, str]:
    """Return the node of each shard. ``capacities`` contains the eligible nodes by name; if there
    are none, the result is empty. ``placed`` contains the placements by operators; entries with an
    ineligible node or an unknown shard are ignored."""
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
    """Return the score of a shard and a node. A node has the highest score for a share of the
    shards that is proportional to its capacity."""
    digest = blake2b(f"{shard}/{node}".encode(), digest_size=8).digest()
    part = (int.from_bytes(digest) + 1) / (2**64 + 1)
    return capacity / -math.log(part)


# --- decisions of a node -------------------------------------------------------------------------

HANDOVERS_MAX: Final = 2
"""Maximum handovers of a node at a time."""


class Decision(NamedTuple):
    """A node's decision about its shards."""

    wanted: frozenset[int]
    """Shards for which the node should have a daemon."""
    expected: frozenset[int]
    """Wanted shards that the node does not lead yet."""
    handing_over: frozenset[int]
    """Shards that the node hands over to a standby on another node."""
    wait_reasons: Mapping[int, str]
    """For each shard that is not yet on its planned node, the reason."""


def eligible(cluster: NodesSeen) -> dict[str, float]:
    """Return the capacities of the nodes that can have shards, by name. Leaving nodes are excluded.
    Drained nodes are excluded unless all remaining nodes are drained."""
    staying = {name: node.capacity for name, node in cluster.nodes.items() if not node.leaving}
    free = {name: capacity for name, capacity in staying.items() if name not in cluster.drained}
    return free or staying


def leaders(cluster: NodesSeen) -> dict[int, tuple[str, Claim]]:
    """Return the leading node of each shard and its claim. If two nodes claim a shard, the claim
    with the higher epoch is valid; the other node is deposed but does not know it yet."""
    led_by: dict[int, tuple[str, Claim]] = {}
    for name, node in sorted(cluster.nodes.items()):
        for claim in node.claims:
            if claim.shard not in led_by or led_by[claim.shard][1].epoch < claim.epoch:
                led_by[claim.shard] = name, claim
    return led_by


def decide(
    me: str,
    cluster: NodesSeen,
    target: Mapping[int, str],
    has: AbstractSet[int],
    unfinished: AbstractSet[int],
) -> Decision:
    """Return the decision of node ``me`` that moves shards to their nodes in ``target``. ``has``
    are the shards that have a daemon on this node; ``unfinished`` are those that it is handing over
    and that no other node leads yet.

    A node hands a shard over only to a node with a standby for it. The shard is then without a
    leader only while one daemon ends and the other takes over.
    """
    led_by = leaders(cluster)
    has = {*has, *(shard for shard, (leader, _) in led_by.items() if leader == me)}
    wanted, expected, handing_over = set[int](), set[int](), set(unfinished)
    waits = dict[int, str]()
    for shard in sorted(set(target) | has):
        heir = target.get(shard)
        leader = led_by[shard][0] if shard in led_by else None
        if heir is not None and leader is None:
            waits[shard] = f"no node leads it yet; {heir} will"
        if heir == me:
            wanted.add(shard)
            handing_over.discard(shard)
            if leader != me:
                expected.add(shard)
            if leader not in (None, me):
                waits[shard] = f"{leader} is handing it over to {me}"
        elif shard in has and shard not in unfinished and leader in (me, None):
            stands_by = heir is not None and shard in cluster.nodes[heir].standbys
            if stands_by and (leader is None or len(handing_over) < HANDOVERS_MAX):
                if leader == me:
                    handing_over.add(shard)
                continue
            wanted.add(shard)
        if heir is not None and leader not in (None, heir) and shard not in waits:
            is_there = shard in cluster.nodes[heir].standbys
            waits[shard] = (
                f"{leader} will hand it over to {heir} after other shards"
                if is_there
                else f"{heir} has no standby for it yet"
            )
    return Decision(frozenset(wanted), frozenset(expected), frozenset(handing_over), waits)


# --- the registrar --------------------------------------------------------------------------------

SETTLE_S: Final = 1.0
"""Seconds without decisions after the first announcement, and after the store was unreachable."""
CHECK_S: Final = 0.25
"""Seconds between checks of the other nodes."""
HANDOVER_CHECK_S: Final = 0.05
"""Seconds between checks while a shard is being handed over."""
LEAVE_S: Final = 10.0
"""Maximum seconds that a stopping node takes to hand over its shards."""
HANDOVER_S_MAX: Final = 15.0
"""Maximum seconds for which a shard without a leader counts as being handed over."""


def run(node: Node, on_bulletin: Callable[[], None], on_start: Callable[[], None]) -> int:
    """Run the registrar until SIGTERM, then hand over all shards. Return the exit code.
    ``on_bulletin`` makes the parent read the bulletin; ``on_start`` is called after the first
    decision."""
    settings = node.settings
    log = configure(settings.log_format, settings.log_level, settings.node)
    daemon.use_one_arena()
    with asyncio.Runner() as runner:
        return runner.run(_serve(node, on_bulletin, on_start, log))


async def _serve(
    node: Node, on_bulletin: Callable[[], None], on_start: Callable[[], None], log: Log
) -> int:
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(daemon.LoopErrors(log, loop.time))
    code = 0
    registrar = door = None
    try:
        registrar = Registrar(node, log, on_bulletin, on_start)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, registrar.leave)
        door = FrontDoor(node, log)
        await door.start()
        await registrar.run()
    except (TickwheelError, OSError) as error:
        log.error("failed", detail=daemon.explain(error))
        code = 1
    if registrar is not None:
        await registrar.close()
    if door is not None:
        await door.stop()
    return code


class Registrar:
    """The registrar of a node. Call ``run`` once, and ``close`` at the end."""

    def __init__(
        self, node: Node, log: Log, on_bulletin: Callable[[], None], on_start: Callable[[], None]
    ) -> None:
        self._node = node
        self._log = log
        self._on_bulletin = on_bulletin
        self._on_start = on_start
        self._count = len(node.shards)
        self._registry = open_nodes(node.registry, self._count)
        self._ttl_ms = duration_ms(node.settings.leader_ttl_s)
        self._check_s = min(CHECK_S, self._ttl_ms / 1000 / RENEWALS_PER_TTL)
        before = node.bulletin.read()
        """The last bulletin of an earlier process of this registrar; empty if there is none."""
        self._wanted = frozenset[int](before.get("wanted", ()))
        self._measured = {"handovers": 0, "handover_seconds": 0.0, **before.get("measured", {})}
        self._handovers: dict[int, float] = {}
        """Time, on the steady clock, when the unfinished handover of each shard began."""
        self._decides_after_s = 0.0 if before else float("inf")
        """Time, on the steady clock, before which no decision is made."""
        self._has_decided = bool(before)
        self._trouble = ""
        self._troubles = LogRateLimit()
        self._is_trouble_logged = False
        self._namesake_since_s = 0.0
        """Time when another node with this name was first found; 0 if there is none."""
        self._same_address = frozenset[str]()
        """Other nodes that announce the address of this one."""
        self._leaving_since_s: float | None = None
        """Time when the node began to hand over all shards because it is stopping; None before."""
        self._wake = asyncio.Event()

    def leave(self) -> None:
        """Hand over all shards, and then end ``run``."""
        if self._leaving_since_s is None:
            self._leaving_since_s = time.monotonic()
            self._wake.set()

    async def run(self) -> None:
        """Announce and decide until ``leave`` is called and all shards are handed over. Raise
        StoreUnusable if the store is unusable."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._node.wake_reader, self._wake_up)
        if self._has_decided:
            self._on_start()
        while True:
            self._wake.clear()
            pause_s = self._check_s
            try:
                cluster = await self._announce()
            except StoreUnusable:
                raise
            except StoreError as error:
                self._note_trouble(error)
                if self._leaving_since_s is not None:
                    return
            else:
                self._note_recovery()
                if cluster is not None:
                    pause_s = self._decide(cluster)
                if self._may_end(cluster):
                    return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._wake.wait()

    def _wake_up(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._node.wake_reader, 4_096)
        self._wake.set()

    async def close(self) -> None:
        """Remove the node from the store."""
        with contextlib.suppress(StoreError):
            await self._registry.leave(self._record())
        await self._registry.close()

    # --- one round -------------------------------------------------------------------------------

    async def _announce(self) -> NodesSeen | None:
        """Announce this node, and return the store's data, or None if another node has its name.
        Raise StoreUnusable if the other node cannot be an earlier process of this node, or
        StoreError on other failures."""
        me, began_s = self._record(), time.monotonic()
        cluster = await self._registry.beat(me)
        other = cluster.namesake
        if other is None:
            self._namesake_since_s = 0.0
            if self._decides_after_s == float("inf"):
                self._decides_after_s = time.monotonic() + SETTLE_S
            return cluster
        if is_over(other.life, Life.own()):
            await self._registry.beat(me, instead_of=other.run)
            return None
        if not self._namesake_since_s:
            self._namesake_since_s = began_s
            detail = f"another node at {other.address} has this node's name, {me.name}, or had it"
            self._log.warning("same_node_name", detail=detail)
        wait_s = other.ttl_ms / 1000 + SETTLE_S
        if not self._has_decided and began_s - self._namesake_since_s > wait_s:
            raise StoreUnusable(
                f"node {me.name!r}: another node at {other.address} lives under this name; give"
                " each a name of its own (--set node=NAME)"
            )
        return None

    def _record(self) -> NodeRecord:
        """Return the record with which the node announces itself in the store."""
        node = self._node
        claims, standbys = list[Claim](), dict[int, str]()
        for shard in node.shards:
            report = node.board.read_role(shard.shard)
            if report is None or report.role is Role.STARTING:
                continue
            address = str(shard.advertise)
            if report.role is Role.ACTIVE:
                http = shard.http_for_others(str(shard.http_url)) if shard.http else ""
                claims.append(Claim(shard.shard, report.epoch, address, report.since_ms, http))
            elif shard.shard in self._wanted:
                standbys[shard.shard] = address
        settings = node.settings
        return NodeRecord(
            name=settings.node,
            run=node.run,
            address=str(settings.advertise),
            version=__version__,
            capacity=settings.node_capacity,
            since_ms=node.since_ms,
            ttl_ms=self._ttl_ms,
            leaving=self._leaving_since_s is not None,
            http=settings.http_for_others(str(settings.http_url)) if settings.http else "",
            life=node.life,
            claims=tuple(claims),
            standbys=standbys,
        )

    def _decide(self, cluster: NodesSeen) -> float:
        """Make a decision and write it to the bulletin. Return the seconds until the next round."""
        now_s = time.monotonic()
        me = self._node.settings.node
        if me in cluster.nodes:
            # One of the node's daemons may have begun to lead since the request was sent.
            cluster = replace(cluster, nodes={**cluster.nodes, me: self._record()})
        self._note_handovers(cluster, me, now_s)
        self._note_shared_address(cluster, me)
        target = place(self._count, eligible(cluster), cluster.placed)
        decision = decide(me, cluster, target, self._wanted, self._handovers.keys())
        may_decide = now_s >= self._decides_after_s
        if may_decide:
            # A shard that the node now keeps is no longer being handed over.
            self._handovers = {
                shard: self._handovers.get(shard, now_s) for shard in decision.handing_over
            }
            self._log_changes(decision.wanted)
            self._wanted = decision.wanted
        self._write(cluster, target, decision)
        if may_decide and not self._has_decided:
            self._has_decided = True
            self._on_start()
        is_moving = bool(self._handovers or decision.expected or self._leaving_since_s is not None)
        until_s = max(0.01, self._decides_after_s - now_s) if not may_decide else self._check_s
        return min(HANDOVER_CHECK_S if is_moving else self._check_s, until_s)

    def _note_handovers(self, cluster: NodesSeen, me: str, now_s: float) -> None:
        """Finish the handover of each shard that another node leads, or that takes too long."""
        led_by = leaders(cluster)
        for shard, since_s in list(self._handovers.items()):
            leader = led_by[shard][0] if shard in led_by else None
            if leader not in (None, me):
                self._measured["handovers"] += 1
                self._measured["handover_seconds"] = round(now_s - since_s, 3)
                detail = f"to {leader} in {now_s - since_s:.3f} s"
                self._log.info("shard_handed_over", shard=shard, detail=detail)
                del self._handovers[shard]
            elif now_s - since_s > HANDOVER_S_MAX:
                del self._handovers[shard]

    def _note_shared_address(self, cluster: NodesSeen, me: str) -> None:
        """Log other nodes that announce the address of this one."""
        address = str(self._node.settings.advertise)
        nodes = cluster.nodes.items()
        same_address = {name for name, node in nodes if name != me and node.address == address}
        for name in sorted(same_address - self._same_address):
            detail = f"node {name} also has the address {address}: clients look for its shards here"
            self._log.warning("same_node_address", detail=detail)
        self._same_address = frozenset(same_address)

    def _log_changes(self, wanted: frozenset[int]) -> None:
        if added := sorted(wanted - self._wanted):
            self._log.info("shards_wanted", shards=added)
        if removed := sorted(self._wanted - wanted):
            self._log.info("shards_given_away", shards=removed)

    def _write(self, cluster: NodesSeen, target: dict[int, str], decision: Decision) -> None:
        """Write the decision and the store's data to the bulletin."""
        led_by = leaders(cluster)
        claims = {shard: claim for shard, (_, claim) in led_by.items()}
        shards = range(self._count)
        me = self._node.settings.node
        moving = decision.handing_over & target.keys()
        heirs = {shard: cluster.nodes[target[shard]].standbys.get(shard, "") for shard in moving}
        before = self._node.bulletin.read().get("wanted")
        measured = {
            **self._measured,
            "nodes": len(cluster.nodes),
            "shards": sum(name == me for name, _ in led_by.values()),
            "unserved": self._count - len(led_by),
            "route_version": cluster.version,
        }
        self._node.bulletin.write(
            {
                "wanted": sorted(self._wanted),
                "expected": sorted(decision.expected),
                "heirs": [heirs.get(shard, "") for shard in shards],
                "version": cluster.version,
                "route": [claims[s].address if s in claims else "" for s in shards],
                "http": [claims[s].http if s in claims else "" for s in shards],
                "measured": measured,
                "listing": _listing(cluster, self._count, target, decision),
            }
        )
        if before != sorted(self._wanted):
            self._on_bulletin()

    def _may_end(self, cluster: NodesSeen | None) -> bool:
        """Return whether a stopping node can end now. Without ``cluster``, another node has its
        name, so it can hand nothing over."""
        if self._leaving_since_s is None or cluster is None:
            return self._leaving_since_s is not None
        me = self._node.settings.node
        has_heirs = any(not node.leaving for name, node in cluster.nodes.items() if name != me)
        leading = {name for name, _ in leaders(cluster).values()}
        has_shards = bool(self._handovers) or me in leading
        is_late = time.monotonic() - self._leaving_since_s > LEAVE_S
        return is_late or not has_heirs or not has_shards

    # --- one line when trouble begins, one when it ends ------------------------------------------

    def _note_trouble(self, error: StoreError) -> None:
        if not self._trouble:
            self._trouble = error.message
            rest = self._troubles.note(time.monotonic())
            self._is_trouble_logged = rest is not None
            if rest is not None:
                detail = f"{error.message}; no shard is moved meanwhile{rest}"
                self._log.warning("registry_trouble", detail=detail)

    def _note_recovery(self) -> None:
        if self._trouble:
            self._trouble = ""
            self._decides_after_s = max(self._decides_after_s, time.monotonic() + SETTLE_S)
            if self._is_trouble_logged:
                self._log.info("registry_works_again", detail="the other nodes are visible again")


def _listing(
    cluster: NodesSeen, count: int, target: dict[int, str], decision: Decision
) -> dict[str, Any]:
    """Return the answer to the verb ``nodes``."""
    led_by = leaders(cluster)
    nodes = [
        {
            "node": name,
            "address": node.address,
            "http": node.http or None,
            "version": node.version,
            "capacity": node.capacity,
            "since_ms": node.since_ms,
            "seen_ms": cluster.seen_ms[name],
            "draining": node.leaving or name in cluster.drained,
            "shards": sorted(shard for shard, (leader, _) in led_by.items() if leader == name),
            "standbys": list(node.standbys),
        }
        for name, node in sorted(cluster.nodes.items())
    ]
    shards = []
    for shard in range(count):
        leader, claim = led_by.get(shard, (None, None))
        shards.append(
            {
                "shard": shard,
                "node": leader,
                "address": None if claim is None else claim.address,
                "epoch": 0 if claim is None else claim.epoch,
                "since_ms": None if claim is None else claim.since_ms,
                "wanted": target.get(shard),
                "placed": cluster.placed.get(shard),
                "waits": decision.wait_reasons.get(shard),
                "http": None if claim is None else claim.http or None,
            }
        )
    return {"nodes": nodes, "shards": shards, "route_version": cluster.version}


# --- the front door ------------------------------------------------------------------------------


class FrontDoor:
    """The node's own listener, which leads no shard and tells clients where all shards are."""

    def __init__(self, node: Node, log: Log) -> None:
        self._settings = settings = daemon.within_file_limit(node.settings, log)
        self._log = log
        self._observed = Observed()
        self._member = Member(node, None)
        self._since_ms = node.since_ms
        clock = Clock(duration_ms(settings.clock_hold_over_s))
        self._entrance = Entrance(settings, clock, self._on_event, self._observed, ("listen",))
        self._clock = clock
        operations = StandbyOperations(
            settings,
            settings.limits(),
            clock,
            active=self._any_leader,
            status=self._status,
            on_event=self._on_event,
            directory=self._member,
        )
        self._listener = Listener(operations, self._entrance.logins)
        self._server: asyncio.Server | TlsServer | None = None

    async def start(self) -> None:
        """Begin to listen. Raise OSError if the address is in use, or BadRequest for bad files."""
        await self._entrance.start()
        self._entrance.watch(
            lambda: [connection.caller.principal for connection in self._listener.connections],
            self._listener.dismiss,
        )
        sock, tls_server = daemon.bind(self._settings.listen), self._entrance.tls_server
        self._server = await daemon.listen(sock, self._listener, self._settings, tls_server)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        self._listener.end_standby("the node is shutting down")
        await self._entrance.stop()

    def _on_event(self, event: str, text: str) -> None:
        log_event(self._log, event, text)

    def _any_leader(self) -> Leader | None:
        address, http = self._member.any_whereabouts()
        return Leader("", address, 0, 0, http=http) if address else None

    def _status(self) -> dict[str, Any]:
        """Return the answer to STATUS, that of a standby because the front door never leads."""
        settings, now_ms = self._settings, self._clock.read().now_ms
        _, urls = self._member.route()
        return {
            "node": settings.node,
            "version": __version__,
            "role": "standby",
            "state": "standby",
            "detail": "the front door of a node",
            "epoch": 0,
            "address": settings.advertise,
            "since_ms": self._since_ms,
            "active": None,
            "standbys": [],
            "shards": urls,
            "store": without_secrets(settings.store),
            "store_ok": True,
            "now_ms": now_ms,
            "uptime_s": round((now_ms - self._since_ms) / 1000, 3),
            "pid": os.getpid(),
            "memory_bytes": memory_bytes(),
        }
