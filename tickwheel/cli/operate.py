"""``stats`` and ``backup``: a running daemon as a whole."""

from __future__ import annotations

from typing import Annotated

import typer

from tickwheel.cli import views
from tickwheel.cli.call import Call


async def stats(call: Call) -> None:
    """Counts: the daemon's, and each topic's and group's."""
    async with call.client() as client:
        found = await client.stats()
    if call.out.as_json:
        call.out.record(dict(found.raw))
        return
    for grid in views.stats_grids(found):
        call.out.grid(grid)


async def backup(
    call: Call,
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="A file name in the daemon's backup folder; must not exist."
        ),
    ],
) -> None:
    """Copy the store while the daemon goes on. The copy is one moment's state."""
    async with call.client() as client:
        done = await client.backup(name)
    path, size = str(done["path"]), int(done["bytes"])
    if call.out.as_json:
        call.out.record({"path": path, "bytes": size})
    else:
        call.out.line(f"{path}  {size:,} bytes")
