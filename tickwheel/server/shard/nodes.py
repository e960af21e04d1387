"""The verbs about nodes: which there are, where operators want shards to be, who is drained.

What they say is in the store that all nodes share, and is read and written by a ``Directory``; here
is only what a caller is answered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tickwheel.errors import Conflict

if TYPE_CHECKING:
    from tickwheel.api.daemon import Nothing
    from tickwheel.api.nodes import DrainNode, MoveShard
    from tickwheel.server.shard.callers import Ask
    from tickwheel.server.shard.listings import Listings
    from tickwheel.server.shard.parts import Directory, Parts


def known(directory: Directory | None) -> Directory:
    """The directory. Raises Conflict where the daemon is not one of a node."""
    if directory is None:
        raise Conflict(
            "this daemon is no node: its shards do not move. Nodes share a Redis, with ?shards=N in"
            " the URL of its store"
        )
    return directory


class Placing:
    """The operations about nodes."""

    def __init__(self, parts: Parts, listings: Listings) -> None:
        self._parts = parts
        self._listings = listings

    def nodes(self, ask: Ask[Nothing]) -> None:
        """Answer all nodes and shards, as this daemon's node saw them last. Raises Conflict."""
        ask.answer(known(self._parts.directory).listing())

    def move_shard(self, ask: Ask[MoveShard]) -> None:
        """Note where a shard shall be, then answer. Raises Conflict, Overloaded."""
        directory, shard, node = known(self._parts.directory), ask.request.shard, ask.request.node

        async def work() -> dict[str, Any]:
            await directory.place(shard, node)
            return {"shard": shard, "node": node}

        self._listings.answer(ask, work, at_once=True)

    def drain_node(self, ask: Ask[DrainNode]) -> None:
        """Note whether a node shall have shards, then answer. Raises Conflict, Overloaded."""
        directory, node = known(self._parts.directory), ask.request.node
        draining = ask.request.draining

        async def work() -> dict[str, Any]:
            await directory.drain(node, draining=draining)
            return {"node": node, "draining": draining}

        self._listings.answer(ask, work, at_once=True)
