"""``tickwheel shards`` and ``tickwheel nodes``: list shards and nodes, move a shard, drain a node.

The state of a shard comes from its own daemon, so that the list also works where shards do not move
(``serve --processes``). The target of a move comes from the shard's node.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

from tickwheel import environment
from tickwheel.api.nodes import NodeInfo
from tickwheel.cli.call import CLIENT_NAME, EXIT_FAILED, Call
from tickwheel.cli.options import argument, flag
from tickwheel.cli.output import Column, Listing, column, fields_of, printable, text_columns
from tickwheel.cli.serve import Answered, short_address, short_time, status_row
from tickwheel.client import Status, status_at, statuses
from tickwheel.errors import BadRequest, TickwheelError, Unreachable

NodeArgument = Annotated[str, argument("NODE", "The node's name, as `tickwheel nodes` shows it.")]
UndoFlag = Annotated[bool, flag("Give the node shards again.", "--undo")]

# --- shards --------------------------------------------------------------------------------------

SHARDS = (
    column("shard", right=True), *text_columns("node", "address"), column("pid", right=True),
    column("state"), column("epoch", right=True), *text_columns("since", "store"),
)  # fmt: skip


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
    rows: list[dict[str, Any]] = []
    for shard, (url, answer) in enumerate(answers):
        row = status_row((url, answer)) | {"shard": shard}
        fields = {"shard": shard, **row["fields"]}
        if isinstance(answer, Status):
            row["pid"] = answer.pid
        else:
            row["state"] = f"{row['role']}: {row['state']}"
        if (place := infos.get(shard)) is not None:
            if place.wanted and place.wanted != place.node:
                row["state"] += f", moves to {place.wanted}"
            if place.waits:
                row["state"] += f" ({place.waits})"
            row["node"] = place.node
            fields |= {n: getattr(place, n) for n in ("node", "wanted", "placed", "waits")}
        rows.append(row | {"fields": fields})
    Listing(call.out, SHARDS, lambda row: row["fields"], spare=("store", "pid")).show(rows)
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


def format_ranges(numbers: Iterable[int]) -> str:
    """Format numbers with ranges: ``0-3, 7``; a dash for none."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ", ".join(f"{a}-{b}" if b > a else f"{a}" for a, b in ranges) or "-"


NODES = (
    column("node"), column("address", show=short_address),
    Column[NodeInfo]("state", lambda node: "draining" if node.draining else "serves"),
    column("version"), column("capacity", show="{:g}".format, right=True),
    column("shards", show=format_ranges), column("stands by", "standbys", format_ranges),
    column("since", "since_ms", short_time),
)  # fmt: skip


async def list_nodes(call: Call) -> int:
    """List all nodes that serve shards of the same store: address, state, shards and start.

    Exit code 0 if every shard is led, 1 if one is not, 3 if --url cannot be reached.
    """
    nodes = await call.ask(lambda client: client.nodes())
    spare = "stands by", "version", "capacity"
    Listing(call.out, NODES, fields_of, spare=spare).show(nodes.nodes)
    leaderless = [shard.shard for shard in nodes.shards if shard.node is None]
    if leaderless:
        call.out.remark(f"no daemon serves these shards: {format_ranges(leaderless)}")
    return EXIT_FAILED if leaderless else 0


async def drain(call: Call, node: NodeArgument, undo: UndoFlag = False) -> None:
    """Move all shards of a node elsewhere, one after the other, and give it none until --undo."""
    done = await call.ask(lambda client: client.drain_node(node, draining=not undo))
    effect = "gives its shards away and gets no more" if done.draining else "gets shards again"
    call.out.result(dict(done.raw), f"{printable(done.node)} {effect}")
