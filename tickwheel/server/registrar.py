"""The registrar of a node: announces the node and its shards in the store, watches the other nodes,
decides which shards this node should have, and serves the node's front door.

It is a separate process without tasks. It reads the state of the node's daemons from the board and
writes its decisions to the bulletin. Invariants:

* It decides only on current data from the store, and only some time after its start or after the
  store was unreachable, because other nodes may not be visible before. Without the store nothing
  changes.
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
from tickwheel.server.board import Member, Node, Role
from tickwheel.server.lease import RENEWALS_PER_TTL, Life, is_over
from tickwheel.server.logins import Entrance
from tickwheel.server.logs import Log, Sparing, configure, say
from tickwheel.server.metrics.observed import Observed
from tickwheel.server.roles import memory_bytes
from tickwheel.server.shard.operations import StandbyOperations
from tickwheel.server.tcp.listener import Listener
from tickwheel.server.tls import TlsServer
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
    """Return the maximum number of ``shards`` for a node with ``capacity`` out of ``total``."""
    fair = shards * Fraction(capacity) / Fraction(total)
    return max(math.ceil(fair), math.floor(SLACK * fair))


def place(
    shards: int, capacities: Mapping[str, float], placed: Mapping[int, str]
) -> dict[int, str]:
    """Return the node of each shard. ``capacities`` has the eligible nodes by name; without any,
    the result is empty. ``placed`` has the placements by operators; entries with an ineligible node
    or an unknown shard are ignored."""
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
    """Return the score of a pair: the node with the highest score gets the shard, in proportion to
    the capacities."""
    digest = blake2b(f"{shard}/{node}".encode(), digest_size=8).digest()
    part = (int.from_bytes(digest) + 1) / (2**64 + 1)
    return capacity / -math.log(part)


# --- decisions of a node -------------------------------------------------------------------------

HANDOVERS_MAX: Final = 2
"""Maximum simultaneous handovers of a node."""


class Decision(NamedTuple):
    """The decisions of a node."""

    wanted: frozenset[int]
    """Shards for which the node should have a daemon."""
    expected: frozenset[int]
    """Wanted shards that the node does not lead yet."""
    given: frozenset[int]
    """Shards that the node leads, or led until now, and hands over to a standby on another node."""
    waits: Mapping[int, str]
    """Reason why a shard is not yet on its planned node, by shard."""


def eligible(seen: NodesSeen) -> dict[str, float]:
    """Return the capacities of the nodes that can have shards, by name. Leaving and drained nodes
    are excluded, but if all others are drained, drained nodes are included."""
    staying = {name: node.capacity for name, node in seen.nodes.items() if not node.leaving}
    free = {name: capacity for name, capacity in staying.items() if name not in seen.drained}
    return free or staying


def leaders(seen: NodesSeen) -> dict[int, tuple[str, Claim]]:
    """Return the leading node and its claim for each shard. If two nodes claim a shard, the claim
    with the higher epoch is valid; the other node is deposed but does not know it yet."""
    led_by: dict[int, tuple[str, Claim]] = {}
    for name, node in sorted(seen.nodes.items()):
        for claim in node.claims:
            if claim.shard not in led_by or led_by[claim.shard][1].epoch < claim.epoch:
                led_by[claim.shard] = name, claim
    return led_by


def decide(
    me: str,
    seen: NodesSeen,
    target: Mapping[int, str],
    has: AbstractSet[int],
    giving: AbstractSet[int],
) -> Decision:
    """Return the decisions of node ``me`` that move shards to their nodes in ``target``. ``has``
    are the shards with a daemon on this node; ``giving`` are the shards that it is handing over and
    that no other node leads yet.

    A node hands a shard over only to a node with a standby for it. The shard is then without a
    leader only while one daemon ends and the other takes over.
    """
    led_by = leaders(seen)
    has = {*has, *(shard for shard, (leader, _) in led_by.items() if leader == me)}
    wanted, expected, handing_over, waits = set[int](), set[int](), set(giving), dict[int, str]()
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
        elif shard in has and shard not in giving and leader in (me, None):
            stands_by = heir is not None and shard in seen.nodes[heir].standbys
            if stands_by and (leader is None or len(handing_over) < HANDOVERS_MAX):
                if leader == me:
                    handing_over.add(shard)
                continue
            wanted.add(shard)
        if heir is not None and leader not in (None, heir) and shard not in waits:
            is_there = shard in seen.nodes[heir].standbys
            waits[shard] = (
                f"{leader} will hand it over to {heir} after other shards"
                if is_there
                else f"{heir} has no standby for it yet"
            )
    return Decision(frozenset(wanted), frozenset(expected), frozenset(handing_over), waits)


# --- the registrar --------------------------------------------------------------------------------

SETTLE_S: Final = 1.0
"""Seconds after a node's first announcement, or after the store was unreachable, without
decisions."""
LOOK_S: Final = 0.25
"""Seconds between checks of the other nodes."""
HURRY_S: Final = 0.05
"""Seconds between checks while a shard is being handed over."""
LEAVE_S: Final = 10.0
"""Seconds that a stopping node waits for standbys of its shards on other nodes."""
GIVEN_S: Final = 15.0
"""Seconds for which a shard without a leader counts as being handed over."""


def run(node: Node, look: Callable[[], None], on_start: Callable[[], None]) -> int:
    """Run the registrar until SIGTERM, then hand over all shards; return the exit code. ``look``
    makes the parent read the bulletin; ``on_start`` is called after the first decision."""
    settings = node.settings
    log = configure(settings.log_format, settings.log_level, settings.node)
    daemon.use_one_arena()
    with asyncio.Runner() as runner:
        return runner.run(_serve(node, look, on_start, log))


async def _serve(
    node: Node, look: Callable[[], None], on_start: Callable[[], None], log: Log
) -> int:
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(daemon.LoopErrors(log, loop.time))
    code = 0
    registrar = door = None
    try:
        registrar = Registrar(node, log, look, on_start)
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
    """The node's registrar: call ``run`` once and ``close`` at the end."""

    def __init__(
        self, node: Node, log: Log, look: Callable[[], None], on_start: Callable[[], None]
    ) -> None:
        self._node = node
        self._log = log
        self._look = look
        self._on_start = on_start
        self._count = len(node.shards)
        self._registry = open_nodes(node.registry, self._count)
        self._ttl_ms = int(node.settings.leader_ttl_s * 1000)
        self._look_s = min(LOOK_S, self._ttl_ms / 1000 / RENEWALS_PER_TTL)
        before = node.bulletin.read()
        """Decisions of an earlier process of this registrar."""
        self._wanted = frozenset[int](before.get("wanted", ()))
        self._measured = {"handovers": 0, "handover_seconds": 0.0, **before.get("measured", {})}
        self._giving: dict[int, float] = {}
        """Start of each shard's handover, by the steady clock."""
        self._decides_s = 0.0 if before else float("inf")
        """Time of the first decision, by the steady clock."""
        self._has_decided = bool(before)
        self._trouble = ""
        self._troubles = Sparing()
        self._is_trouble_logged = False
        self._namesake_s = 0.0
        """Time when another node with this name was first seen; 0 if there is none."""
        self._twins = frozenset[str]()
        """Nodes seen at this node's address."""
        self._leaves_s: float | None = None
        """Time when the node began to hand over all shards, because it is stopping."""
        self._is_news = asyncio.Event()

    def leave(self) -> None:
        """Hand over all shards, then end."""
        if self._leaves_s is None:
            self._leaves_s = time.monotonic()
            self._is_news.set()

    async def run(self) -> None:
        """Run until all shards are handed over after ``leave``. Raise StoreUnusable if the store is
        unusable."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._node.heard, self._hear)
        if self._has_decided:
            self._on_start()
        while True:
            self._is_news.clear()
            pause_s = self._look_s
            try:
                seen = await self._beat()
            except StoreUnusable:
                raise
            except StoreError as error:
                self._ill(error)
                if self._leaves_s is not None:
                    return
            else:
                self._well()
                if seen is not None:
                    pause_s = self._act(seen)
                    if self._has_left(seen):
                        return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._is_news.wait()

    def _hear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._node.heard, 4_096)
        self._is_news.set()

    async def close(self) -> None:
        """Remove the node from the store."""
        with contextlib.suppress(StoreError):
            await self._registry.leave(self._record())
        await self._registry.close()

    # --- one look --------------------------------------------------------------------------------

    async def _beat(self) -> NodesSeen | None:
        """Announce this node and return the store's data, or None if another node has its name.
        Raise StoreUnusable if that node cannot be an earlier life of this node, or StoreError on
        other failures."""
        me, began_s = self._record(), time.monotonic()
        seen = await self._registry.beat(me)
        other = seen.namesake
        if other is None:
            self._namesake_s = 0.0
            if self._decides_s == float("inf"):
                self._decides_s = time.monotonic() + SETTLE_S
            return seen
        if is_over(other.life, Life.own()):
            await self._registry.beat(me, instead_of=other.run)
            return None
        if not self._namesake_s:
            self._namesake_s = began_s
            detail = f"another node at {other.address} has this node's name, {me.name}, or had it"
            self._log.warning("same_node_name", detail=detail)
        wait_s = other.ttl_ms / 1000 + SETTLE_S
        if not self._has_decided and began_s - self._namesake_s > wait_s:
            raise StoreUnusable(
                f"node {me.name!r}: another node at {other.address} lives under this name; give"
                " each a name of its own (--set node=NAME)"
            )
        return None

    def _record(self) -> NodeRecord:
        """Return the node's record for the store."""
        node = self._node
        claims, standbys = list[Claim](), dict[int, str]()
        for shard in node.shards:
            part = node.board.read_part(shard.shard)
            if part is None or part.role is Role.STARTING:
                continue
            address = str(shard.advertise)
            if part.role is Role.ACTIVE:
                http = shard.http_for_others(str(shard.http_url)) if shard.http else ""
                claims.append(Claim(shard.shard, part.epoch, address, part.since_ms, http))
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
            leaving=self._leaves_s is not None,
            http=settings.http_for_others(str(settings.http_url)) if settings.http else "",
            life=node.life,
            claims=tuple(claims),
            standbys=standbys,
        )

    def _act(self, seen: NodesSeen) -> float:
        """Decide, and write the decision to the bulletin. Return the seconds until the next one."""
        now_s = time.monotonic()
        me = self._node.settings.node
        if me in seen.nodes:
            # One of the node's daemons may have begun to lead since the request was sent.
            seen = replace(seen, nodes={**seen.nodes, me: self._record()})
        self._note_given(seen, me, now_s)
        self._note_twins(seen, me)
        target = place(self._count, eligible(seen), seen.placed)
        decision = decide(me, seen, target, self._wanted, self._giving.keys())
        may_decide = now_s >= self._decides_s
        if may_decide:
            # A shard that the node now keeps is no longer being handed over.
            self._giving = {shard: self._giving.get(shard, now_s) for shard in decision.given}
            self._log_changes(decision.wanted)
            self._wanted = decision.wanted
        self._write(seen, target, decision)
        if may_decide and not self._has_decided:
            self._has_decided = True
            self._on_start()
        is_moving = bool(self._giving or decision.expected or self._leaves_s is not None)
        until_s = max(0.01, self._decides_s - now_s) if not may_decide else self._look_s
        return min(HURRY_S if is_moving else self._look_s, until_s)

    def _note_given(self, seen: NodesSeen, me: str, now_s: float) -> None:
        """Note the new leaders of shards that this node handed over."""
        led_by = leaders(seen)
        for shard, since_s in list(self._giving.items()):
            leader = led_by[shard][0] if shard in led_by else None
            if leader not in (None, me):
                self._measured["handovers"] += 1
                self._measured["handover_seconds"] = round(now_s - since_s, 3)
                detail = f"to {leader} in {now_s - since_s:.3f} s"
                self._log.info("shard_handed_over", shard=shard, detail=detail)
                del self._giving[shard]
            elif now_s - since_s > GIVEN_S:
                del self._giving[shard]

    def _note_twins(self, seen: NodesSeen, me: str) -> None:
        """Log other nodes that announce the address of this one."""
        address = str(self._node.settings.advertise)
        nodes = seen.nodes.items()
        twins = {name for name, node in nodes if name != me and node.address == address}
        for name in sorted(twins - self._twins):
            detail = f"node {name} also has the address {address}: clients look for its shards here"
            self._log.warning("same_node_address", detail=detail)
        self._twins = frozenset(twins)

    def _log_changes(self, wanted: frozenset[int]) -> None:
        if more := sorted(wanted - self._wanted):
            self._log.info("shards_wanted", shards=more)
        if fewer := sorted(self._wanted - wanted):
            self._log.info("shards_given_away", shards=fewer)

    def _write(self, seen: NodesSeen, target: dict[int, str], decision: Decision) -> None:
        """Write the decision and the store's data to the bulletin."""
        led_by = leaders(seen)
        claims = {shard: claim for shard, (_, claim) in led_by.items()}
        shards = range(self._count)
        me = self._node.settings.node
        given = decision.given & target.keys()
        heirs = {shard: seen.nodes[target[shard]].standbys.get(shard, "") for shard in given}
        before = self._node.bulletin.read().get("wanted")
        measured = {
            **self._measured,
            "nodes": len(seen.nodes),
            "shards": sum(name == me for name, _ in led_by.values()),
            "unserved": self._count - len(led_by),
            "route_version": seen.version,
        }
        self._node.bulletin.write(
            {
                "wanted": sorted(self._wanted),
                "expected": sorted(decision.expected),
                "heirs": [heirs.get(shard, "") for shard in shards],
                "version": seen.version,
                "route": [claims[s].address if s in claims else "" for s in shards],
                "http": [claims[s].http if s in claims else "" for s in shards],
                "measured": measured,
                "listing": _listing(seen, self._count, target, decision),
            }
        )
        if before != sorted(self._wanted):
            self._look()

    def _has_left(self, seen: NodesSeen) -> bool:
        """Return whether a stopping node can end now."""
        if self._leaves_s is None:
            return False
        me = self._node.settings.node
        has_heirs = any(not node.leaving for name, node in seen.nodes.items() if name != me)
        has_shards = bool(self._giving) or any(name == me for name, _ in leaders(seen).values())
        is_late = time.monotonic() - self._leaves_s > LEAVE_S
        return is_late or not has_heirs or not has_shards

    # --- one line when trouble begins, one when it ends ------------------------------------------

    def _ill(self, error: StoreError) -> None:
        if not self._trouble:
            self._trouble = error.message
            rest = self._troubles.note(time.monotonic())
            self._is_trouble_logged = rest is not None
            if rest is not None:
                detail = f"{error.message}; no shard is moved meanwhile{rest}"
                self._log.warning("registry_trouble", detail=detail)

    def _well(self) -> None:
        if self._trouble:
            self._trouble = ""
            self._decides_s = max(self._decides_s, time.monotonic() + SETTLE_S)
            if self._is_trouble_logged:
                self._log.info("registry_works_again", detail="the other nodes are visible again")


def _listing(
    seen: NodesSeen, count: int, target: dict[int, str], decision: Decision
) -> dict[str, Any]:
    """Return the answer to the verb ``nodes``."""
    led_by = leaders(seen)
    nodes = [
        {
            "node": name,
            "address": node.address,
            "http": node.http or None,
            "version": node.version,
            "capacity": node.capacity,
            "since_ms": node.since_ms,
            "seen_ms": seen.seen_ms[name],
            "draining": node.leaving or name in seen.drained,
            "shards": sorted(shard for shard, (leader, _) in led_by.items() if leader == name),
            "standbys": list(node.standbys),
        }
        for name, node in sorted(seen.nodes.items())
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
                "placed": seen.placed.get(shard),
                "waits": decision.waits.get(shard),
                "http": None if claim is None else claim.http or None,
            }
        )
    return {"nodes": nodes, "shards": shards, "route_version": seen.version}


# --- the front door ------------------------------------------------------------------------------


class FrontDoor:
    """The node's listener, which leads no shard and tells clients the addresses of the shards."""

    def __init__(self, node: Node, log: Log) -> None:
        self._settings = settings = daemon.within_file_limit(node.settings, log)
        self._log = log
        self._observed = Observed()
        self._member = Member(node, None)
        self._since_ms = node.since_ms
        clock = Clock(int(settings.clock_hold_over_s * 1000))
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
        """Listen. Raise OSError if the address is in use, or BadRequest for invalid files."""
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
        say(self._log, event, text)

    def _any_leader(self) -> Leader | None:
        address, http = self._member.any_whereabouts()
        return Leader("", address, 0, 0, http=http) if address else None

    def _status(self) -> dict[str, Any]:
        """Return the answer to STATUS: the front door is a standby that never leads."""
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
