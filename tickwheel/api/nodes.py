"""Nodes: which there are, which shards each one leads, and where operators want a shard to be.

Only a daemon that is one of several shards of a shared store (``?shards=N``) can be asked; any of
them answers for all.
"""

from __future__ import annotations

from typing import Annotated, Final

from tickwheel.api.daemon import Nothing
from tickwheel.api.frames import FrameType
from tickwheel.api.kinds import FLAG, NAME, Moment, Whole
from tickwheel.api.shapes import Answer, Request, place, when
from tickwheel.api.verb import Audit, Method, Need, Of, Over, Right, Verb
from tickwheel.limits import SHARDS_MAX

# --- requests ------------------------------------------------------------------------------------


class MoveShard(Request):
    """The request says on which node a shard shall be."""

    shard: Annotated[int, Whole(0, SHARDS_MAX - 1), "The number of the shard."]
    node: Annotated[
        str | None, NAME, "The name of the node; without it the shard goes where it belongs."
    ] = place(default=None)


class DrainNode(Request):
    """The request says whether a node shall have shards."""

    node: Annotated[str, NAME, "The node's name."]
    draining: Annotated[
        bool, FLAG, "Whether the node gives its shards away; false: it gets shards again."
    ] = place(default=True)


# --- answers -------------------------------------------------------------------------------------


class NodeInfo(Answer):
    """A node, as it was seen last in the store."""

    node: Annotated[str, "The name of the node."]
    address: Annotated[str, "Its front door, as clients find it."]
    http: Annotated[
        str | None, "The URL of its HTTP, which is that of all its shards; None: it is off."
    ]
    version: Annotated[str, "The version of its daemons."]
    capacity: Annotated[float, "How much it can bear, beside the capacity of the other nodes."]
    since_ms: Annotated[int, Moment(), "When it began."]
    seen_ms: Annotated[int, Moment(), "When it was heard of last, by the clock of the store."]
    draining: Annotated[bool, "Whether the node gives its shards away and gets none."]
    shards: Annotated[list[int], "The shards that it leads."]
    standbys: Annotated[list[int], "The shards for which it stands by."]

    since = when("since_ms", "When it began.")


class ShardInfo(Answer):
    """Where a shard is, and where it shall be."""

    shard: Annotated[int, "The number of the shard, from 0 on."]
    node: Annotated[str | None, "The node that leads it; None: nobody does."]
    address: Annotated[str | None, "Where clients find it."]
    epoch: Annotated[int, "The number of the leader's term; it grows with each takeover."]
    since_ms: Annotated[int | None, Moment(), "Since when that node leads it."]
    wanted: Annotated[str | None, "The node where it shall be; another one: it moves there."]
    placed: Annotated[str | None, "The node where an operator wants it; None: anywhere."]
    waits: Annotated[str | None, "Why it is not led, or does not move, in words."] = None
    http: Annotated[
        str | None, "The URL of its daemon's HTTP; None: it is off, or nobody leads the shard."
    ] = None


class Nodes(Answer):
    """All nodes that live, by name, and all shards."""

    nodes: Annotated[list[NodeInfo], "The nodes that live, by name."]
    shards: Annotated[list[ShardInfo], "The shards, by number."]
    route_version: Annotated[int, "It grows whenever a shard is somewhere else."]


class ShardPlaced(Answer):
    """Where an operator wants a shard to be is noted in the store."""

    shard: Annotated[int, "The number of the shard."]
    node: Annotated[str | None, "The node where the shard shall be; None: anywhere."]


class NodeDrained(Answer):
    """Whether a node shall have shards is noted in the store."""

    node: Annotated[str, "The name of the node."]
    draining: Annotated[bool, "Whether the node gives its shards away and gets none."]


_ADMIN, _NOT_A_NODE, _TAG = Need(Right.ADMIN, Of.ANY), ("conflict",), "nodes"

VERBS: Final = (
    Verb(
        "nodes", Nothing, Nodes, None, "Which nodes there are, and who has which shard",
        "All nodes that serve shards of this store, and who leads which shard since when. Raises"
        " Conflict for a daemon that is not a node (``?shards=N``).",
        FrameType.NODE_LIST, path="GET /v1/nodes", tag=_TAG, errors=_NOT_A_NODE, standby=True,
        methods=(Method("nodes"),), over=Over.ONE,
    ),
    Verb(
        "move_shard", MoveShard, ShardPlaced, _ADMIN, "Say on which node a shard shall be",
        "Say that a shard shall be on a node, or, without ``node``, wherever it belongs. The answer"
        " comes once that is noted; the shard moves as soon as its new node stands by. While the"
        " node is not there, or drains, the shard is elsewhere. Raises NotFound for a node that is"
        " not there, Conflict for a daemon that is not a node.",
        FrameType.SHARD_MOVE, path="POST /v1/shard-moves", tag=_TAG,
        errors=("not_found", *_NOT_A_NODE), audit=Audit.ALWAYS, changes=True,
        methods=(Method("move_shard"),), over=Over.ONE,
    ),
    Verb(
        "drain_node", DrainNode, NodeDrained, _ADMIN, "Take the shards of a node elsewhere",
        "Say that a node shall have no shards, also after it was started again, until it is said"
        " with ``draining=False`` that it shall. The answer comes once that is noted; its shards"
        " move one after the other. Raises NotFound for a node that is not there, Conflict for a"
        " daemon that is not a node.",
        FrameType.NODE_DRAIN, path="POST /v1/nodes/{node}/drain", tag=_TAG,
        errors=("not_found", *_NOT_A_NODE), audit=Audit.ALWAYS, changes=True,
        methods=(Method("drain_node"),), over=Over.ONE,
    ),
)  # fmt: skip
