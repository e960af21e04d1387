"""``tickwheel shards`` and ``tickwheel nodes``: list shards and nodes, move a shard, drain a node.

The state of a shard comes from its own daemon, so that the list also works where shards do not move
(``serve --processes``). The target of a move comes from the shard's node.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

from tickwheel import environment
from tickwheel.api.nodes import NodeInfo, ShardInfo
from tickwheel.cli.call import EXIT_FAILED, Call
from tickwheel.cli.options import argument, flag
from tickwheel.cli.output import Grid, Listing, fields_of, format_time, printable
from tickwheel.cli.serve import Answered, status_fields, status_row
from tickwheel.client import Status, status_at, statuses
from tickwheel.errors import BadRequest, TickwheelError, Unreachable

CLIENT_NAME = "tickwheel-cli"
NodeArgument = Annotated[str, argument("NODE", "The node's name, as `tickwheel nodes` shows it.")]
UndoFlag = Annotated[bool, flag("Give the node shards again.", "--undo")]

# --- shards --------------------------------------------------------------------------------------

_COLUMNS = ("shard", "node", "address", "pid", "state", "epoch", "since", "store")
Row = tuple[int, ShardInfo | None, Answered]
"""A shard, what its node knows of it (None: shards do not move there), and its daemon's status."""


async def list_shards(call: Call) -> int:
    """List the shards of the daemon at --url: node, address, process, state and start of each.

    Exit code 0 if all of them serve, 1 if one does not, 3 if --url cannot be reached.
    """
    async with call.client() as client:
        info = client.server_info
        urls: Sequence[str] = info.get("shards") or ()
        shards = (await client.nodes()).shards if "route_version" in info else []
    answers = await asyncio.gather(*(_answer(call, url) for url in urls))
    if not urls:
        answers = list((await statuses(call.url, token=call.token, name=CLIENT_NAME)).items())
    infos = {info.shard: info for info in shards}
    rows = [(shard, infos.get(shard), answer) for shard, answer in enumerate(answers)]
    grid = Grid(_COLUMNS, right=("shard", "pid", "epoch"), spare=("store", "pid"))
    Listing(call.out, grid, _shard_row, _shard_fields).show(rows)
    all_serve = all(isinstance(answer, Status) and answer.serves for _, answer in answers)
    return 0 if all_serve else EXIT_FAILED


async def _answer(call: Call, url: str) -> Answered:
    token = call.token if call.token is not None else environment.value("TICKWHEEL_TOKEN")
    try:
        if not url:
            raise Unreachable("no daemon serves it")
        return url, await status_at(url, token=token, name=CLIENT_NAME)
    except TickwheelError as error:
        return url, error


def _shard_fields(row: Row) -> dict[str, Any]:
    shard, info, answered = row
    where = {} if info is None else {
        "node": info.node, "wanted": info.wanted, "placed": info.placed, "waits": info.waits,
    }  # fmt: skip
    return {"shard": shard, **status_fields(answered), **where}


def _shard_row(row: Row) -> tuple[str, ...]:
    shard, info, (url, answer) = row
    address, node, role, state, epoch, since, store = status_row((url, answer))
    pid = "-"
    if isinstance(answer, Status):
        pid = "-" if answer.pid is None else str(answer.pid)
    else:
        state = f"{role}: {state}"
    if info is not None:
        node, state = printable(info.node or "-"), f"{state}{_move(info)}"
    return str(shard), node, address or "-", pid, state, epoch, since, store


def _move(info: ShardInfo) -> str:
    """Describe where a shard moves to, and what it waits for."""
    target = f", moves to {info.wanted}" if info.wanted and info.wanted != info.node else ""
    return printable(target + (f" ({info.waits})" if info.waits else ""))


async def move(
    call: Call,
    shard: Annotated[int, argument("SHARD", "The number of the shard.", min=0)],
    node: Annotated[str | None, argument("NODE", "The node to move it to.")] = None,
    anywhere: Annotated[bool, flag("Allow any node again.", "--anywhere")] = False,
) -> None:
    """Move a shard to a node. It moves as soon as its daemon there is a standby."""
    if (node is None) != anywhere:
        raise BadRequest("give either NODE or --anywhere")
    done = await call.ask(lambda client: client.move_shard(shard, node))
    where = "can be on any node" if done.node is None else f"moves to {printable(done.node)}"
    call.out.result(dict(done.raw), f"shard {done.shard} {where}")


# --- nodes ---------------------------------------------------------------------------------------

_NODE_COLUMNS = ("node", "address", "state", "version", "capacity", "shards", "stands by", "since")


async def list_nodes(call: Call) -> int:
    """List all nodes that serve shards of the same store: address, state, shards and start.

    Exit code 0 if every shard is led, 1 if one is not, 3 if --url cannot be reached.
    """
    nodes = await call.ask(lambda client: client.nodes())
    grid = Grid(_NODE_COLUMNS, right=("capacity",), spare=("stands by", "version", "capacity"))
    Listing(call.out, grid, _node_row, fields_of).show(nodes.nodes)
    leaderless = [shard.shard for shard in nodes.shards if shard.node is None]
    if leaderless:
        call.out.remark(f"no daemon serves these shards: {format_ranges(leaderless)}")
    return EXIT_FAILED if leaderless else 0


def _node_row(node: NodeInfo) -> tuple[str, ...]:
    return (
        printable(node.node),
        printable(node.address.removeprefix("tcp://").removeprefix("tls://")),
        "draining" if node.draining else "serves",
        printable(node.version),
        f"{node.capacity:g}",
        format_ranges(node.shards),
        format_ranges(node.standbys),
        format_time(node.since_ms)[:-4],
    )


def format_ranges(numbers: Iterable[int]) -> str:
    """Format numbers with ranges: ``0-3, 7``; a dash for none."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ", ".join(f"{a}-{b}" if b > a else f"{a}" for a, b in ranges) or "-"


async def drain(call: Call, node: NodeArgument, undo: UndoFlag = False) -> None:
    """Move all shards of a node elsewhere, one after the other, and give it none until --undo."""
    done = await call.ask(lambda client: client.drain_node(node, draining=not undo))
    effect = "gives its shards away and gets no more" if done.draining else "gets shards again"
    call.out.result(dict(done.raw), f"{printable(done.node)} {effect}")
