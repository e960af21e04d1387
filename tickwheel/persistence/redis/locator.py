"""Where the server is that a shard is on: at a fixed address, at the master that Sentinels name, or
at the node of a Cluster that has the shard's slot.

A shard lives whole on one master, because its keys share a hash tag. So a Cluster is no other store
than a single Redis: only the address moves. ``Place.connect`` finds it, connects and asks the
server for its role; it is called for each new connection, and nothing is remembered that could be
wrong. Who is asked may be behind the others (a Sentinel that was cut off, a node that was frozen),
so all are asked at once, and what most of them say counts.

This module knows neither scripts nor batches. What an error of a server means for a call under way
is ``connection``'s business; ``Place.is_elsewhere`` only takes the address that an error names.
"""

from __future__ import annotations

import asyncio
from binascii import crc_hqx
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tickwheel.persistence.redis.driver import (
    CLUSTER,
    SENTINEL,
    Address,
    Driver,
    NoReply,
    NotConnected,
    RedisOptions,
    ServerError,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

SLOTS = 16_384
ASKING_PART = 2
"""The part (a half) of ``connect_ms`` in which those who are asked have to answer."""
NODES_ASKED_MAX = 16
"""Of a Cluster: the seeds, and the nodes that were named last."""
REASONS_MAX = 3
"""In a message: so many of those who did not answer are named with their reason."""


async def connect(options: RedisOptions) -> Driver:
    """A connected, authenticated driver with the database selected. Raises Away or Answer."""
    if options.driver == "asyncio-redis":
        from tickwheel.persistence.redis.driver_asyncio_redis import AsyncioRedisWire

        return await AsyncioRedisWire.connect(options)
    from tickwheel.persistence.redis.driver_redis import RedisWire

    return await RedisWire.connect(options)


class Place(Protocol):
    """The server that a shard is on."""

    @property
    def moves(self) -> bool:
        """Whether another server may have the shard after a while."""
        ...

    @property
    def doing(self) -> str:
        """What ``connect`` is at, for a message that says what it waited for; may be empty."""
        ...

    async def connect(self) -> tuple[Address, Driver]:
        """A connection to that server as it is now. Raises NotConnected, NoReply, ServerError."""
        ...

    def is_elsewhere(self, error: ServerError) -> None:
        """Take note of the address that this error names, if it names one."""
        ...


def place_of(options: RedisOptions) -> Place:
    """The place that the options name."""
    if options.kind == SENTINEL:
        return Sentinels(options)
    if options.kind == CLUSTER:
        return Nodes(options)
    return Fixed(options)


class Fixed:
    """One server at one address."""

    moves = False
    doing = ""

    def __init__(self, options: RedisOptions) -> None:
        self._options = options

    async def connect(self) -> tuple[Address, Driver]:
        options = self._options
        return Address(options.host, options.port), await connect(options)

    def is_elsewhere(self, error: ServerError) -> None:
        pass


class _Asked:
    """What Sentinels and a Cluster have in common: who is asked, and what counts of it."""

    moves = True

    def __init__(self, options: RedisOptions) -> None:
        self._options = options
        self._last: Address | None = None
        self.doing = ""

    async def _connect_to(self, address: Address) -> tuple[Address, Driver]:
        """A connection to this server, if it says that it is a master."""
        self.doing = f"connecting to the master at {address}"
        host, port = address
        wire = await connect(replace(self._options, host=host, port=port))
        try:
            self.doing = f"asking {address} for its role"
            role: list[Any] = await wire.call("ROLE")
            if role[0] != b"master":
                raise NotConnected(f"{address} is named as the master, and says it is a replica")
        except BaseException:
            await wire.close()
            raise
        self._last, self.doing = address, ""
        return address, wire

    async def _named(self, asked: Sequence[Address]) -> Address:
        """The address that most of those who are ``asked`` name, as soon as more than half name the
        same, or when there is no time left. Raises NotConnected: nobody names any."""
        limit_s = self._options.connect_ms / 1000 / ASKING_PART
        tasks = {asyncio.create_task(self._ask(one)): one for one in asked}
        votes: Counter[Address] = Counter()
        reasons: dict[Address, str] = dict.fromkeys(asked, "no answer")
        try:
            async with asyncio.timeout(limit_s):
                for ended in asyncio.as_completed(tasks):
                    one, found = await ended
                    if isinstance(found, str):
                        reasons[one] = found
                        continue
                    votes[found] += 1
                    if votes[found] > len(asked) / 2:
                        return found
        except TimeoutError:
            pass
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if not votes:
            raise NotConnected(_reasons(reasons))
        # Of two that are named as often, the one that is new was chosen later.
        return max(votes, key=lambda address: (votes[address], address != self._last))

    async def _ask(self, one: Address) -> tuple[Address, Address | str]:
        """Who was asked, and the address that it names, or why it names none."""
        try:
            wire = await connect(self._options_for(one))
        except (NotConnected, NoReply, ServerError) as error:
            return one, error.message
        try:
            return one, await self._ask_on(wire, one)
        except (NoReply, ServerError) as error:
            return one, error.message
        finally:
            await wire.close()

    def _options_for(self, one: Address) -> RedisOptions:
        return replace(self._options, host=one.host, port=one.port, db=0)

    async def _ask_on(self, wire: Driver, one: Address) -> Address | str:
        raise NotImplementedError


class Sentinels(_Asked):
    """The master that these Sentinels name."""

    async def connect(self) -> tuple[Address, Driver]:
        self.doing = f"asking {len(self._options.seeds)} sentinels for the master"
        return await self._connect_to(await self._named(self._options.seeds))

    def is_elsewhere(self, error: ServerError) -> None:
        """A master that was demoted does not say who follows it."""

    def _options_for(self, one: Address) -> RedisOptions:
        options = super()._options_for(one)
        file = options.sentinel_password_file
        try:
            password = Path(file).read_text().strip() if file else ""
        except OSError as error:
            why = f"sentinel_password_file {file}: {error.strerror}"
            raise NotConnected(why) from error
        return replace(options, username=options.sentinel_user, password=password)

    async def _ask_on(self, wire: Driver, one: Address) -> Address | str:
        name = self._options.master
        found = await wire.call("SENTINEL", "GET-MASTER-ADDR-BY-NAME", name)
        if found is None:
            return f"it knows no master {name!r} (master=)"
        host, port = found
        return Address(host.decode(), int(port))


class Nodes(_Asked):
    """The node of a Cluster that has the slot of the shard."""

    def __init__(self, options: RedisOptions) -> None:
        super().__init__(options)
        self._slot = crc_hqx(options.tag.encode(), 0) % SLOTS
        self._known: tuple[Address, ...] = ()
        self._hint: Address | None = None

    async def connect(self) -> tuple[Address, Driver]:
        hint, self._hint = self._hint, None
        if hint is not None:
            try:
                return await self._connect_to(hint)
            except (NotConnected, NoReply, ServerError):
                pass  # the others know better
        asked = tuple(dict.fromkeys((*self._options.seeds, *self._known)))[:NODES_ASKED_MAX]
        self.doing = f"asking {len(asked)} nodes for the one that has slot {self._slot}"
        return await self._connect_to(await self._named(asked))

    def is_elsewhere(self, error: ServerError) -> None:
        kind, _, rest = error.message.partition(" ")
        host, _, port = rest.partition(" ")[2].rpartition(":")
        if kind == "MOVED" and port.isdecimal():
            # Without a host: at the one that said so, on another port.
            known = self._last.host if self._last is not None else ""
            self._hint = Address(host if host not in ("", "?") else known, int(port))

    async def _ask_on(self, wire: Driver, one: Address) -> Address | str:
        ranges: list[list[Any]] = await wire.call("CLUSTER", "SLOTS")
        found: Address | str = f"slot {self._slot} is served by no node"
        named = []
        for first, last, *nodes in ranges:
            addresses = [_node(node, one) for node in nodes]
            named += addresses
            if first <= self._slot <= last:
                found = addresses[0]
        self._known = tuple(named)
        return found


def _node(node: Sequence[Any], one: Address) -> Address:
    """A node's address; one that does not know its own host is where it was asked."""
    host = node[0].decode() if node[0] else ""
    return Address(host if host not in ("", "?") else one.host, node[1])


def _reasons(reasons: dict[Address, str]) -> str:
    shown = [f"{one}: {why}" for one, why in list(reasons.items())[:REASONS_MAX]]
    left = len(reasons) - len(shown)
    return "; ".join([*shown, *([f"and {left} more"] if left else [])])
