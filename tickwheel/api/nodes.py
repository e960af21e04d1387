"""Verbs on nodes and the placement of shards.

Every daemon that serves a shard of a shared store (``?shards=N``) answers them for all nodes. Other
daemons refuse them.
"""

from __future__ import annotations

from typing import Annotated, Final

from tickwheel.api.daemon import Nothing
from tickwheel.api.frames import FrameType
from tickwheel.api.kinds import FLAG, NAME, Moment, Whole
from tickwheel.api.shapes import Answer, Request, place, when
from tickwheel.api.verb import Audit, Method, Need, Of, Right, Routing, Verb
from tickwheel.limits import SHARDS_MAX

# --- requests ------------------------------------------------------------------------------------


class MoveShard(Request):
    """The request assigns a shard to a node."""

    shard: Annotated[int, Whole(0, SHARDS_MAX - 1), "The number of the shard."]
    node: Annotated[
        str | None, NAME, "The name of the node; by default the daemons choose the node."
    ] = place(default=None)


class DrainNode(Request):
    """The request starts or ends the draining of a node."""

    node: Annotated[str, NAME, "The node's name."]
    draining: Annotated[
        bool, FLAG, "Whether the node gives its shards to others; false lets it lead shards again."
    ] = place(default=True)


# --- answers -------------------------------------------------------------------------------------


class NodeInfo(Answer):
    """A node, as last recorded in the store."""

    node: Annotated[str, "The name of the node."]
    address: Annotated[str, "The address for clients, which all its shards share."]
    http: Annotated[str | None, "The URL of the HTTP API of all its shards; None if HTTP is off."]
    version: Annotated[str, "The version of its daemons."]
    capacity: Annotated[float, "Its capacity, relative to the other nodes."]
    since_ms: Annotated[int, Moment(), "When it started."]
    seen_ms: Annotated[int, Moment(), "When it last reported, by the store's clock."]
    draining: Annotated[bool, "Whether the node gives its shards to others and gets none."]
    shards: Annotated[list[int], "The shards that it leads."]
    standbys: Annotated[list[int], "The shards for which it stands by."]

    since = when("since_ms", "When it started.")


class ShardInfo(Answer):
    """The current and the intended node of a shard."""

    shard: Annotated[int, "The number of the shard, counted from 0."]
    node: Annotated[str | None, "The node that leads it; None if no node does."]
    address: Annotated[str | None, "The address for clients."]
    epoch: Annotated[int, "The number of the leader's tenure; it grows with each takeover."]
    since_ms: Annotated[int | None, Moment(), "When its current node began to lead it."]
    wanted: Annotated[str | None, "The intended node; the shard moves there if it differs."]
    placed: Annotated[str | None, "The node that an operator chose; None if no operator did."]
    waits: Annotated[str | None, "Why the shard has no leader or does not move, in words."] = None
    http: Annotated[
        str | None, "The URL of its daemon's HTTP API; None if it is off or there is no leader."
    ] = None


class Nodes(Answer):
    """All live nodes and all shards."""

    nodes: Annotated[list[NodeInfo], "The live nodes, by name."]
    shards: Annotated[list[ShardInfo], "The shards, by number."]
    route_version: Annotated[int, "A number that grows whenever a shard moves."]


class ShardPlaced(Answer):
    """The placement of a shard that was recorded in the store."""

    shard: Annotated[int, "The number of the shard."]
    node: Annotated[str | None, "The node of the shard; None if the daemons choose it."]


class NodeDrained(Answer):
    """The draining of a node that was recorded in the store."""

    node: Annotated[str, "The name of the node."]
    draining: Annotated[bool, "Whether the node gives its shards to others and gets none."]


_ADMIN, _NOT_A_NODE, _TAG = Need(Right.ADMIN, Of.ANY), ("conflict",), "nodes"

VERBS: Final = (
    Verb(
        "nodes", Nothing, Nodes, None, "List nodes and the shards that they lead",
        "Return all nodes that serve shards of this store, and the leader of each shard. Raise"
        " Conflict if the daemon is not a node (``?shards=N``).",
        FrameType.NODE_LIST, path="GET /v1/nodes", tag=_TAG, errors=_NOT_A_NODE, standby=True,
        methods=(Method("nodes"),), routing=Routing.ONE,
    ),
    Verb(
        "move_shard", MoveShard, ShardPlaced, _ADMIN, "Assign a shard to a node",
        "Assign a shard to a node, or, without ``node``, let the daemons choose. The call returns"
        " once the assignment is recorded; the shard moves as soon as its new node stands by. While"
        " that node is unreachable or being drained, another node leads the shard. Raise NotFound"
        " for an unknown node, and Conflict if the daemon is not a node.",
        FrameType.SHARD_MOVE, path="POST /v1/shard-moves", tag=_TAG,
        errors=("not_found", *_NOT_A_NODE), audit=Audit.ALWAYS, changes=True,
        methods=(Method("move_shard"),), routing=Routing.ONE,
    ),
    Verb(
        "drain_node", DrainNode, NodeDrained, _ADMIN, "Move all shards away from a node",
        "Drain a node: it leads no shards, even after a restart, until ``draining=False``. The call"
        " returns once this is recorded; the shards then move one by one. Raise NotFound for an"
        " unknown node, and Conflict if the daemon is not a node.",
        FrameType.NODE_DRAIN, path="POST /v1/nodes/{node}/drain", tag=_TAG,
        errors=("not_found", *_NOT_A_NODE), audit=Audit.ALWAYS, changes=True,
        methods=(Method("drain_node"),), routing=Routing.ONE,
    ),
)  # fmt: skip
