"""Several shards on one machine: a daemon in a process of its own for each database of a folder.

``run`` is what ``tickwheel serve --processes N`` does. It lays the folder out or checks it, and is
the parent (``parent.py``) of a daemon for each shard. HTTP of all together (``http_all``) is one
more such process, which reads from a ``Board`` what the parent knows.

Invariant: a folder is served with the number of shards that it was laid out with.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import structlog

from tickwheel.clock import sources
from tickwheel.errors import BadRequest, Conflict
from tickwheel.limits import SHARDS_MAX
from tickwheel.persistence import (
    COUNT_FILE,
    Layout,
    ShardFolder,
    check_databases,
    count_path,
    is_laid_out,
    open_url,
    read_layout,
    shard_folder,
    unfinished,
    with_layout,
    without_secrets,
    write_layout,
)
from tickwheel.persistence.contract import StoreUnusable
from tickwheel.server import daemon
from tickwheel.server.board import Board
from tickwheel.server.logs import configure
from tickwheel.server.parent import (
    Kind,
    Parent,
    Process,
    live_with,
    places_of,
    say_ready,
)
from tickwheel.server.settings import Settings


def run(settings: Settings) -> int:
    """Serve all shards of the store's folder until SIGTERM or SIGINT. 0 after a clean stop, 1 when
    they could not go on; a daemon that ends before it has served decides it by its own exit code.

    Returns in each of the processes. Raises BadRequest and StoreUnusable for what cannot be served.
    """
    folder, count = _folder_of(settings), count_of(settings)
    was_laid_out = is_laid_out(folder)
    if was_laid_out:
        _check(folder, count)
    log = configure(settings.log_format, settings.log_level).bind(node=settings.node)
    try:
        of_all = settings_of_all(settings, count)
    except OSError as error:
        log.error("failed", detail=daemon.explain(error))
        return 1
    if not was_laid_out:
        lay_out(folder, count)
    if count == 1:
        return daemon.run(of_all[0])
    for one in of_all:
        Path(str(one.backup_dir)).mkdir(parents=True, exist_ok=True)
    log.info("starting", detail=f"{count} shards in {folder.path}", pid=os.getpid())
    processes = [Process(one.shard, one) for one in of_all]
    if settings.http_all is not None:
        processes.append(Process(count, settings_of_http_all(settings, of_all), Kind.HTTP_ALL))
    board = Board(count)
    with Parent(settings, processes, board, log) as parent:
        mine = parent.watch()
    if mine is None:
        return parent.code
    live_with(parent.lifeline)
    if mine.kind is Kind.SHARD:
        return _serve(mine, parent.ready)
    from tickwheel.server.http import whole  # not needed by who serves a shard

    return whole.run(mine.settings, of_all, board, lambda: say_ready(parent.ready, mine.number))


def init(settings: Settings) -> int:
    """Lay the folder of the store out and serve nothing; returns the number of shards."""
    count = count_of(settings)
    lay_out(_folder_of(settings), count)
    return count


def count_of(settings: Settings) -> int:
    """How many shards are asked for. "auto": as many as the folder has; as the process may use
    processors, when it is not laid out."""
    if settings.processes != "auto":
        return settings.processes
    folder = _folder_of(settings)
    if is_laid_out(folder):
        return read_layout(folder).shards
    affinity = getattr(os, "sched_getaffinity", None)  # Linux
    usable = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return min(usable, SHARDS_MAX)


# --- the folder ----------------------------------------------------------------------------------


def _folder_of(settings: Settings) -> ShardFolder:
    """The folder of the store. Raises BadRequest when the store is no folder."""
    folder = shard_folder(settings.store)
    if folder is None:
        raise BadRequest(
            f"processes ({settings.processes}) needs a store that is a folder, sqlite:///DIR/"
            f" with the slash at its end, not {without_secrets(settings.store)!r}"
        )
    open_url(folder.url(0))  # raises for settings of the URL that there are not
    return with_layout(folder)


def _check(folder: ShardFolder, count: int) -> None:
    """Raises StoreUnusable unless the folder has so many shards, and all their databases."""
    laid_out = read_layout(folder).shards
    if count != laid_out:
        raise StoreUnusable(
            f"store {folder.path}: it was laid out with {laid_out} shards ({COUNT_FILE}), and"
            f" processes is {count}; `tickwheel reshard` changes the number of shards"
        )
    check_databases(folder)


def lay_out(folder: ShardFolder, count: int) -> None:
    """Make the databases of ``count`` shards, and last the file that says how many they are.
    Raises Conflict or StoreUnusable when there is one of them already."""
    try:
        Path(folder.path).mkdir(exist_ok=True)
    except OSError as error:
        raise StoreUnusable(f"store {folder.path}: {error.strerror}") from None
    if is_laid_out(folder):
        raise Conflict(f"{count_path(folder)} exists already")
    for path in unfinished(folder):
        raise StoreUnusable(
            f"{path} exists already, and {COUNT_FILE} beside it does not: `tickwheel reshard` was"
            " cut off; run it again, or remove that folder"
        )
    for path in filter(os.path.exists, map(folder.database, range(SHARDS_MAX))):
        raise StoreUnusable(
            f"{path} exists already, and {COUNT_FILE} beside it does not: take another folder, or"
            " move away what is there"
        )

    async def make(url: str) -> None:
        store = open_url(url)
        await store.open("init", sources().wall_ms())
        await store.close(clean=True)

    for shard in range(count):
        asyncio.run(make(folder.url(shard)))
    write_layout(folder, Layout(count))


# --- settings -------------------------------------------------------------------------------------


def settings_of_all(settings: Settings, count: int) -> list[Settings]:
    """The settings of the daemon of each shard: its own store, addresses, files and folders. Raises
    OSError when an address is taken, BadRequest for what cannot be of several."""
    folder = _folder_of(settings)
    moved_id = read_layout(folder).moved_id if is_laid_out(folder) else 0
    if count == 1:
        if settings.http_all is not None:
            raise BadRequest(
                f"http_all ({settings.http_all}) is of several shards, and processes"
                f" ({settings.processes}) is 1 here: one daemon has http"
            )
        one = {"store": folder.url(0), "processes": 1, "moved_id": moved_id}
        return [settings.model_copy(update=one)]
    if settings.shard != 0:
        raise BadRequest(
            f"shard ({settings.shard}) cannot be set with processes ({count}): they have 0 to"
            f" {count - 1}"
        )
    places = places_of(settings, count, f"processes ({count})")
    return [
        places.of_shard(
            settings,
            shard,
            shard,
            store=folder.url(shard),
            moved_id=moved_id,
            processes=1,
            http_all=places.http_all,
            route=",".join(places.route),
            backup_dir=str(Path(settings.backup_dir or folder.path) / f"shard-{shard}"),
        )
        for shard in range(count)
    ]


def settings_of_http_all(settings: Settings, of_all: list[Settings]) -> Settings:
    """The settings of the process that answers for all: its HTTP is ``http_all``, at the address
    that was chosen with those of the shards."""
    own = {"http": of_all[0].http_all, "http_advertise": None, "audit_file": None}
    return settings.model_copy(update=own)


# --- a daemon ------------------------------------------------------------------------------------


def _serve(process: Process, ready: int) -> int:
    """Be the daemon of a shard; its exit code."""
    structlog.contextvars.bind_contextvars(shard=process.number)
    return daemon.run(process.settings, lambda: say_ready(ready, process.number))
