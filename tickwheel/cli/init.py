"""``init``: lay a store out without serving, or anew when what it holds is given up.

Knows the daemon's packages, as ``serve`` does, and imports them when it runs.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Annotated

import typer

from tickwheel.cli.call import EXIT_FAILED, Call, ask, can_ask, merge
from tickwheel.cli.serve import (
    ConfigOption,
    JsonOption,
    StoreOption,
    VolatileOption,
    load_settings,
    only_given,
)
from tickwheel.errors import BadRequest, Conflict

if TYPE_CHECKING:
    from tickwheel.persistence.redis.initialise import Found


def init(
    ctx: typer.Context,
    store: StoreOption = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Redis: also when there is data, which is removed for good."),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    allow_volatile_store: VolatileOption = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> int:
    """Lay a store out without serving: a new SQLite file, or an empty shard in Redis.

    What is there already is refused, with exit code 1. With --force a shard in Redis is laid
    out anew: everything in it is removed, and no daemon that used it before can write to it any
    more. That is for a shard that came back empty, damaged, or half written. Never done while
    a daemon leads the shard.
    """
    given = {"store": store, "allow_volatile_store": allow_volatile_store or None}
    settings = load_settings(config, only_given(given))
    from tickwheel.persistence.urls import parse, with_setting

    call = merge(ctx, None, None, as_json)
    url, kind = settings.store, parse(settings.store).kind
    if kind == "memory":
        raise BadRequest("store memory: is empty at every start; there is nothing to lay out")
    if kind == "sqlite":
        return _sqlite(call, url, parse(url).path, force=force)
    if settings.allow_volatile_store:
        url = with_setting(url, "allow_volatile", "1")
    return _redis(call, url, force=force, yes=yes)


def _sqlite(call: Call, url: str, path: str, *, force: bool) -> int:
    from tickwheel.clock import SystemSources
    from tickwheel.persistence import open_url

    if os.path.exists(path):
        hint = "; --force is for Redis: move the file away yourself" if force else ""
        raise Conflict(f"{path} exists already{hint}")

    async def lay_out() -> None:
        store = open_url(url)
        await store.open("init", SystemSources().wall_ms())
        await store.close(clean=True)

    asyncio.run(lay_out())
    _done(call, url, "was laid out")
    return 0


def _redis(call: Call, url: str, *, force: bool, yes: bool) -> int:
    from tickwheel.clock import SystemSources
    from tickwheel.persistence.redis import initialise, options_from

    options = options_from(url)
    found = asyncio.run(initialise.look(options))
    if found.exists and not _may_remove(call, found, force=force, yes=yes):
        return EXIT_FAILED
    incarnation = asyncio.run(initialise.lay_out(options, found, SystemSources().wall_ms()))
    what = "was laid out anew" if found.exists else "was laid out"
    _done(call, found.store, what, shard=found.shard, incarnation=incarnation,
          removed=found.counts if found.exists else None)  # fmt: skip
    return 0


def _may_remove(call: Call, found: Found, *, force: bool, yes: bool) -> bool:
    """Whether the operator means it; says what there is."""
    what = f"{found.shard} in {found.store} is {found.state}"
    if not force:
        raise Conflict(f"{what}. Exists already; --force removes it and lays it out anew")
    call.out.remark(what)
    if yes:
        return True
    if not can_ask(call):
        call.out.remark("conflict: all of it would be removed for good; say --yes")
        return False
    if not ask("Remove all of it for good, and lay the shard out anew?"):
        call.out.remark("nothing was changed")
        return False
    return True


def _done(call: Call, store: str, what: str, **more: object) -> None:
    if call.out.as_json:
        call.out.record({"store": store, "created": True, **more})
    else:
        shard = f"{more['shard']} in " if "shard" in more else ""
        call.out.line(f"{shard}{store} {what}")
