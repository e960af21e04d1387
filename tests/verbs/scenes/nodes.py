"""Scenes of nodes: which there are, where a shard shall be, who gives its own away."""

from __future__ import annotations

from typing import Any

from verbs.scene import Stage, Values, refusal, scene


@scene("nodes")
def nodes(stage: Stage) -> Any:
    stage.house.be_node(True)
    yield (
        {},
        {
            "nodes": [{"node": "a", "shards": [0]}],
            "shards": [{"shard": 0, "node": "a", "epoch": 3}],
            "route_version": 7,
        },
    )


@scene("move_shard")
def move_shard(stage: Stage) -> Any:
    stage.house.be_node(True)
    yield {"shard": 0, "node": "a"}, {"shard": 0, "node": "a"}
    assert stage.ask("nodes")["shards"][0]["placed"] == "a"
    stage.ask("move_shard", shard=0, node=None)


@scene("move_shard", "anywhere")
def move_anywhere(stage: Stage) -> Any:
    stage.house.be_node(True)
    stage.ask("move_shard", shard=0, node="a")
    yield {"shard": 0, "node": None}, {"shard": 0}
    assert stage.ask("nodes")["shards"][0]["placed"] is None


@scene("drain_node")
def drain_node(stage: Stage) -> Any:
    stage.house.be_node(True)
    yield {"node": "a", "draining": True}, {"node": "a", "draining": True}
    assert stage.ask("nodes")["nodes"][0]["draining"]
    stage.ask("drain_node", node="a", draining=False)


@scene("drain_node", "no more")
def drain_no_more(stage: Stage) -> Any:
    stage.house.be_node(True)
    stage.ask("drain_node", node="a", draining=True)
    yield {"node": "a", "draining": False}, {"node": "a", "draining": False}
    assert not stage.ask("nodes")["nodes"][0]["draining"]


@refusal("move_shard", "not_found")
def no_node(stage: Stage) -> Values:
    stage.house.be_node(True)
    return {"shard": 0, "node": "none"}


@refusal("move_shard", "bad_request")
def no_shard(stage: Stage) -> Values:
    stage.house.be_node(True)
    return {"shard": 63, "node": "a"}


@refusal("drain_node", "not_found")
def nobody(stage: Stage) -> Values:
    stage.house.be_node(True)
    return {"node": "none", "draining": True}


# --- a daemon that is not a node -----------------------------------------------------------------


@refusal("nodes", "conflict")
def nodes_of_none(stage: Stage) -> Values:
    stage.house.be_node(False)
    return {}


@refusal("move_shard", "conflict")
def moved_by_none(stage: Stage) -> Values:
    return nodes_of_none(stage) | {"shard": 0, "node": "a"}


@refusal("drain_node", "conflict")
def drained_by_none(stage: Stage) -> Values:
    return nodes_of_none(stage) | {"node": "a", "draining": True}
