"""``tickwheel shards`` and ``tickwheel nodes``: which shards there are and where each one is, which
nodes serve them; a shard moved to a node, a node that gives its shards away.

What is said of a shard is asked of its own daemon, so that it holds also where shards do not move
(``serve --processes``). Where it moves to is what its node knows.
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
UndoFlag = Annotated[bool, flag("It shall have shards again.", "--undo")]

# --- shards --------------------------------------------------------------------------------------

_COLUMNS = ("shard", "node", "address", "pid", "state", "epoch", "since", "store")
Row = tuple[int, ShardInfo | None, Answered]
"""A shard, what its node knows of it (None: its node is none that shares shards), and what its
daemon says of itself."""


async def list_shards(call: Call) -> int:
    """The shards of the daemon of --url: node, address, process and state of each, since when.

    Exit code 0 when all of them serve, 1 when one does not, 3 when --url cannot be reached.
    """
    async with call.client() as client:
        info = client.server_info
        urls: Sequence[str] = info.get("shards") or ()
        known = (await client.nodes()).shards if "route_version" in info else []
    answers = await asyncio.gather(*(_answer(call, url) for url in urls))
    if not urls:
        answers = list((await statuses(call.url, token=call.token, name=CLIENT_NAME)).items())
    infos = {one.shard: one for one in known}
    rows = [(shard, infos.get(shard), one) for shard, one in enumerate(answers)]
    grid = Grid(_COLUMNS, right=("shard", "pid", "epoch"), spare=("store", "pid"))
    Listing(call.out, grid, _shard_row, _shard_fields).show(rows)
    all_serve = all(isinstance(answer, Status) and answer.serves for _, answer in answers)
    return 0 if all_serve else EXIT_FAILED


async def _answer(call: Call, url: str) -> Answered:
    token = call.token if call.token is not None else environment.value("TICKWHEEL_TOKEN")
    try:
        if not url:
            raise Unreachable("nobody serves it")
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
    """Where a shard goes, and what it waits for, behind its state."""
    goes = f", goes to {info.wanted}" if info.wanted and info.wanted != info.node else ""
    return printable(goes + (f" ({info.waits})" if info.waits else ""))


async def move(
    call: Call,
    shard: Annotated[int, argument("SHARD", "The number of the shard.", min=0)],
    node: Annotated[str | None, argument("NODE", "The node where it shall be.")] = None,
    anywhere: Annotated[bool, flag("It may be on any node again.", "--anywhere")] = False,
) -> None:
    """Say on which node a shard shall be. It moves there as soon as its daemon there stands by."""
    if (node is None) != anywhere:
        raise BadRequest("say a NODE, or --anywhere")
    done = await call.ask(lambda client: client.move_shard(shard, node))
    where = "may be on any node" if done.node is None else f"shall be on {printable(done.node)}"
    call.out.result(dict(done.raw), f"shard {done.shard} {where}")


# --- nodes ---------------------------------------------------------------------------------------

_NODE_COLUMNS = ("node", "address", "state", "version", "capacity", "shards", "stands by", "since")


async def list_nodes(call: Call) -> int:
    """All nodes that serve shards of the same store: address, state, shards, since when.

    Exit code 0 when every shard is led, 1 when one is not, 3 when --url cannot be reached.
    """
    found = await call.ask(lambda client: client.nodes())
    grid = Grid(_NODE_COLUMNS, right=("capacity",), spare=("stands by", "version", "capacity"))
    Listing(call.out, grid, _node_row, fields_of).show(found.nodes)
    alone = [one.shard for one in found.shards if one.node is None]
    if alone:
        call.out.remark(f"nobody serves shard {spans(alone)}")
    return EXIT_FAILED if alone else 0


def _node_row(node: NodeInfo) -> tuple[str, ...]:
    return (
        printable(node.node),
        printable(node.address.removeprefix("tcp://").removeprefix("tls://")),
        "draining" if node.draining else "serves",
        printable(node.version),
        f"{node.capacity:g}",
        spans(node.shards),
        spans(node.standbys),
        format_time(node.since_ms)[:-4],
    )


def spans(numbers: Iterable[int]) -> str:
    """Numbers with those that follow each other as one: ``0-3, 7``; a dash for none."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(f"{a}-{b}" if b > a else f"{a}" for a, b in found) or "-"


async def drain(call: Call, node: NodeArgument, undo: UndoFlag = False) -> None:
    """Take all shards of a node elsewhere, one after the other, and give it none until --undo."""
    done = await call.ask(lambda client: client.drain_node(node, draining=not undo))
    says = "gives its shards away, and gets none" if done.draining else "gets shards again"
    call.out.result(dict(done.raw), f"{printable(done.node)} {says}")
