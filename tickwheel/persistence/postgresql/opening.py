"""Opens a shard: checks the server and the user's privileges, creates the tables, and begins an
epoch. A server on which the store could not work, or would lose tasks silently, is refused with a
message that says what to change.

``Administration`` is what operators do while no daemon leads the shard: ``tickwheel init``, and the
begin and end of a restore. Unlike Redis, PostgreSQL cannot lose its data and go on, so an empty
schema has no owner that could write data back.
"""

from __future__ import annotations

import secrets
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from tickwheel.persistence.contract import Opened, StoredShard, StoreUnusable
from tickwheel.persistence.identity import (
    NEW,
    EpochRecord,
    StoreIdentity,
    mark_of,
    next_epoch,
    past_text,
    read_past,
    restored,
)
from tickwheel.persistence.on_server import (
    INIT_OWNER,
    NoReply,
    check_restored,
    connected,
    led,
    opening_errors,
    unusable,
    watch_lease,
)
from tickwheel.persistence.postgresql.driver import Link, PostgresOptions, ServerError
from tickwheel.persistence.postgresql.layout import DEAD, FOLDER, LAYOUT, SQL, Parts
from tickwheel.upgrades import Upgrade, sql_steps

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tickwheel.persistence.contract import Evidence

VERSION_MIN: Final = 14
SCHEMA: Final = FOLDER.joinpath("schema.sql").read_text("utf-8")
DDL_LOCK: Final = 0x7469636B
"""Key of the advisory lock under which tables are created and upgraded."""
DROP_WAIT_MS: Final = 50
UPGRADE_MS: Final = 3_600_000
"""Maximum milliseconds of one step of an upgrade."""


async def inspect(
    link: Link, options: PostgresOptions, *, may_create: bool = True
) -> tuple[str, int]:
    """Check the server, and create the schema and the tables that all shards share. Return
    ``Store.durability``, and the layout of the schema, which can be older; 0: it has no tables.
    Raise StoreUnusable, which says what to change, or StoreUnreachable."""
    with opening_errors(options.name):
        (facts,) = await link.fetch(SQL["facts"], options.schema)
        if objection := _objection(facts, options):
            raise unusable(options.name, objection)
        if not facts["has_layout"] and not may_create:
            return durability(facts), 0
        if not facts["has_layout"]:  # another daemon may create the tables at the same time
            ddl = "" if facts["has_schema"] else f'CREATE SCHEMA IF NOT EXISTS "{options.schema}";'
            await link.execute(f"SELECT pg_advisory_xact_lock({DDL_LOCK}); {ddl} {SCHEMA}")
        ((layout,),) = await link.fetch(SQL["layout"])
    if not 0 < layout <= LAYOUT:
        raise unusable(
            options.name,
            f"the schema {options.schema} has layout {layout}; this release reads layouts up to"
            f" {LAYOUT}: use a newer release",
        )
    return durability(facts), layout


def _objection(facts: Any, options: PostgresOptions) -> str:
    """Return why this server must not be used, or an empty text."""
    schema, role, database = options.schema, facts["role"], facts["database"]
    if facts["version"] < VERSION_MIN:
        return f"its version must be at least {VERSION_MIN}, not {facts['version']}"
    if facts["is_standby"]:
        return "it is a standby, which accepts no writes; name the primary"
    if facts["encoding"] != "UTF8":
        return (
            f"the encoding of the database {database} must be UTF8, not {facts['encoding']};"
            " CREATE DATABASE … ENCODING 'UTF8' TEMPLATE template0"
        )
    if facts["read_only"] == "on":
        return (
            f"default_transaction_read_only is on for the role {role};"
            f" ALTER ROLE {role} SET default_transaction_read_only = off"
        )
    if not facts["has_schema"] and not facts["may_create_schema"]:
        return (
            f"the schema {schema} does not exist, and the role {role} may not create it;"
            f" CREATE SCHEMA {schema} AUTHORIZATION {role}"
        )
    if facts["has_schema"] and not (facts["may_use"] and facts["may_create"]):
        missing = "USAGE" if not facts["may_use"] else "CREATE"
        return (
            f"the role {role} lacks the privilege {missing} on the schema {schema};"
            f" GRANT USAGE, CREATE ON SCHEMA {schema} TO {role}"
        )
    if facts["has_shards"] and not facts["has_layout"]:
        return (
            f"the schema {schema} belongs to another program: it has a table shard, but no table"
            " layout; choose another ?schema="
        )
    if options.allow_volatile_store:
        return ""
    insist = ", or insist with --allow-volatile-store (or ?allow_volatile_store=1 in the URL)"
    for name in ("fsync", "full_page_writes"):
        if facts[name] != "on":
            return f"{name} is {facts[name]}: a power cut can destroy it; set {name} = on{insist}"
    if facts["synchronous_commit"] == "off":
        return (
            "synchronous_commit=off in the store's URL confirms tasks that are not on the disk;"
            f" remove it{insist}"
        )
    return ""


def upgrade_steps(layout: int, options: PostgresOptions) -> tuple[str, ...]:
    """Return the SQL that upgrades a schema with this layout, in one transaction. The last step
    voids the claims of all daemons; those of an older release cannot claim a shard again."""
    steps = sql_steps(FOLDER, layout, LAYOUT)
    if not steps:
        return ()
    begin = f'SET LOCAL search_path = "{options.schema}";\nLOCK TABLE shard IN EXCLUSIVE MODE;'
    return begin, *steps, "UPDATE shard SET link = link + 1;"


async def upgrade(link: Link, options: PostgresOptions, shard: int | None = None) -> None:
    """Upgrade an older schema in one transaction. ``shard``: the one that this daemon leads. Raise
    StoreUnusable if a daemon has opened another shard, or ServerTrouble."""
    async with link.transaction():
        await link.fetch("SELECT pg_advisory_xact_lock($1)", DDL_LOCK)
        ((layout,),) = await link.fetch(SQL["layout"])
        users = await link.fetch(SQL["users"], shard) if layout < LAYOUT else ()
        if users:
            raise led(options.name, *users[0])
        try:
            for step in upgrade_steps(layout, options):
                await link.execute(step, timeout_ms=UPGRADE_MS)
        except ServerError as error:
            reason = error.message.removeprefix(f"{options.name}: ")
            raise unusable(
                options.name,
                f"layout {layout} cannot be upgraded to {LAYOUT}: {reason}; `tickwheel store"
                " upgrade --dry-run` prints the statements",
            ) from error
        ((layout,),) = await link.fetch(SQL["layout"])
        assert layout == LAYOUT, f"the steps have left layout {layout}"


_POWER = "a power cut of PostgreSQL's machine"
_STANDBYS = {
    "on": "have it on their disks",
    "remote_apply": "have it on their disks and show it to readers",
    "remote_write": "have received it, but a power cut of theirs can lose it",
}


def durability(facts: Any) -> str:
    """See ``Store.durability``."""
    level, names = facts["synchronous_commit"], facts["standbys"]
    if facts["fsync"] != "on" or facts["full_page_writes"] != "on":
        return f"fsync or full_page_writes is off: {_POWER} can destroy the database"
    if level == "off":
        return (
            f"synchronous_commit off: {_POWER}, or a crash of PostgreSQL, can lose the tasks"
            " confirmed in the last second"
        )
    text = f"synchronous_commit {level}: a confirmed task survives {_POWER}"
    if level == "local" or not names:
        reason = "synchronous_standby_names is empty" if not names else "synchronous_commit local"
        return f"{text}; a standby that is promoted can lack the newest tasks ({reason})"
    return f"{text}, and the synchronous standbys ({names}) {_STANDBYS[level]}"


# --- epochs --------------------------------------------------------------------------------------


async def begin_epoch(
    link: Link,
    options: PostgresOptions,
    owner: str,
    now_ms: int,
    may_create: bool,
    epoch_min: int,
    evidence: Sequence[Evidence],
) -> Opened:
    """Begin an epoch; create the shard if it is absent. Raise StoreUnusable or ServerTrouble."""
    name, shard = _shard_name(options), options.shard
    found = await link.fetch(SQL["shard"], shard)
    if not found:
        begun = next_epoch(name, None, evidence, epoch_min)
        if not may_create:
            raise StoreUnusable(f"{name} is empty, and another daemon had data in it")
        incarnation = secrets.token_hex(8)
        if not await create_shard(link, options, incarnation, begun.epoch, owner, now_ms):
            raise NoReply(f"{name}: another daemon has just created it")
        return Opened(
            begun.epoch, 0, 0, 0, clean=True, created=True, mark=mark_of(owner),
            incarnation=incarnation,
        )  # fmt: skip
    stored = found[0]
    check_restored(name, stored["owner"], stored["branch"], owner)
    (marks,) = await link.fetch(SQL["last"].format(at=f"{shard}_{stored['generation']}"))
    last = EpochRecord(stored["epoch"], mark_of(stored["owner"]), marks["last"])
    identity = StoreIdentity(
        last, stored["incarnation"], read_past(stored["past"]), stored["branch"]
    )
    begun = next_epoch(name, identity, evidence, epoch_min)
    past = past_text(begun.past, with_batches=False)
    rows = await link.fetch(
        SQL["begin_epoch"], shard, begun.epoch, owner, now_ms, past, last.epoch,
        identity.incarnation, LAYOUT,
    )  # fmt: skip
    if not rows:
        raise NoReply(f"{name}: another daemon has just opened it")
    # The row was locked: batches of the previous owner have ended, or will find another epoch.
    (marks,) = await link.fetch(SQL["last"].format(at=f"{shard}_{rows[0]['generation']}"))
    return Opened(
        rows[0]["epoch"], marks["last"], marks["id_mark"], marks["position_ms"],
        clean=stored["clean"], created=False, mark=mark_of(owner), incarnation=identity.incarnation,
        after=begun.after, is_branch=begun.is_branch,
        is_behind=begun.is_behind,
    )  # fmt: skip


async def create_shard(
    link: Link, options: PostgresOptions, incarnation: str, epoch: int, owner: str, now_ms: int, *,
    clean: bool = False, branch: str = "",
) -> bool:  # fmt: skip
    """Create a shard and its tables. Return False if it exists."""
    shard = options.shard
    async with link.transaction():
        await link.fetch("SELECT pg_advisory_xact_lock($1)", DDL_LOCK)
        ((layout,),) = await link.fetch(SQL["layout"])
        if layout != LAYOUT:
            raise NoReply(f"{options.name}: another daemon has just upgraded it")
        part, generation = await next_number(link), await next_number(link)
        values = shard, incarnation, epoch, owner, clean, now_ms, branch, generation
        rows = await link.fetch(SQL["new_shard"], *values)
        if rows:
            await link.execute(SQL["part_tables"].format(at=f"{shard}_{part}"))
            await link.execute(SQL["generation_tables"].format(at=f"{shard}_{generation}"))
            await link.fetch("INSERT INTO part VALUES ($1, $2, 0)", shard, part)
    return bool(rows)


async def read_parts(link: Link, shard: int, generation: int) -> Parts:
    rows = await link.fetch(SQL["read_parts"], shard)
    numbers, lows = zip(*rows, strict=True) if rows else ((), ())
    return Parts(shard, generation, numbers, lows)


async def next_number(link: Link) -> int:
    """Return a number for a new part or generation, which no other has."""
    return int((await link.fetch(SQL["next_number"]))[0][0])


async def drop_abandoned(link: Link, options: PostgresOptions, parts: Parts, upto: int) -> None:
    """Drop the shard's tables with numbers up to ``upto`` that are not in ``parts``: an interrupted
    copy, or a table that somebody was reading. Successors of this daemon have higher numbers."""
    rows = await link.fetch(SQL["abandoned"], parts.shard, options.schema, upto)
    for name in {row["relname"] for row in rows} - set(parts.tables):
        with suppress(ServerError):
            await drop(link, f"DROP TABLE IF EXISTS {name}")


async def drop(link: Link, statement: str) -> None:
    """Drop tables, unless somebody reads them. Raise ServerError if so: a waiting DROP would block
    other readers."""
    await link.execute(f"SET LOCAL lock_timeout = {DROP_WAIT_MS}; {statement}")


def _shard_name(options: PostgresOptions) -> str:
    return f"store {options.name}: shard {options.shard} in the schema {options.schema}"


# --- administration ------------------------------------------------------------------------------


class PostgresAdministration:
    """See ``contract.Administration``."""

    def __init__(self, options: PostgresOptions) -> None:
        self._options = options
        self.shard = options.shard

    async def look(self) -> StoredShard:
        options = self._options
        async with connected(options.name, Link(options)) as link:
            await self._inspect(link)
            found = await link.fetch(SQL["shard"], options.shard)
            counts = {"tasks": 0, "in_flight_or_waiting": 0, "dead": 0, "records": 0}
            last = 0
            if found:
                parts = await read_parts(link, options.shard, found[0]["generation"])
                last = (await link.fetch(SQL["last"].format(at=parts.at)))[0]["last"]
                records = SQL["count_records"].format(at=parts.at)
                counts["records"] = (await link.fetch(records))[0][0]
                for number in parts.numbers:
                    at = f"{options.shard}_{number}"
                    counts["tasks"] += (await link.fetch(SQL["count_tasks"].format(at=at)))[0][0]
                    for kind, count in await link.fetch(SQL["count_notes"].format(at=at)):
                        counts["dead" if kind == DEAD else "in_flight_or_waiting"] += count
        return StoredShard(
            store=options.name,
            shard=f"shard {options.shard} in the schema {options.schema}",
            exists=bool(found), is_complete=True, rewriting="",
            epoch=found[0]["epoch"] if found else 0,
            incarnation=found[0]["incarnation"] if found else "",
            counts=counts, last=last,
        )  # fmt: skip

    async def lay_out(
        self, stored: StoredShard, now_ms: int, *, watch_s: float | None = None,
        is_branch: bool = False,
    ) -> str:  # fmt: skip
        options, incarnation = self._options, secrets.token_hex(8)
        async with connected(options.name, Link(options)) as link:
            await self._inspect(link)
            await self._watch(link, options.shard, watch_s)
            if stored.exists:
                await self._remove(link, stored)
            epoch = stored.epoch + 1 if stored.exists else 0
            if not await create_shard(
                link, options, incarnation, epoch, INIT_OWNER, now_ms, clean=True,
                branch=NEW if is_branch else "",
            ):  # fmt: skip
                raise self._changed()
        return incarnation

    async def _remove(self, link: Link, stored: StoredShard) -> None:
        """Remove the shard that ``look`` has returned, with all its tables."""
        shard = self._options.shard
        async with link.transaction():
            removed = await link.fetch(SQL["remove_shard"], shard, stored.epoch, stored.incarnation)
            if not removed:
                raise self._changed()
            parts = await read_parts(link, shard, removed[0]["generation"])
            await link.fetch("DELETE FROM part WHERE shard = $1", shard)
            await link.execute(f"DROP TABLE IF EXISTS {', '.join(parts.tables)}")

    async def begin_branch(self, *, watch_s: float | None = None) -> None:
        options = self._options
        async with connected(options.name, Link(options)) as link:
            await self._inspect(link)
            await self._watch(link, options.shard, watch_s)
            incarnation = secrets.token_hex(8)
            if not await link.fetch(SQL["begin_branch"], options.shard, NEW, incarnation):
                raise StoreUnusable(
                    f"{_shard_name(options)} is empty: there is no store to continue with"
                )

    async def end_restore(self, after: str) -> None:
        options, values = self._options, restored(after)
        async with connected(options.name, Link(options)) as link:
            await link.fetch(
                "UPDATE shard SET branch = $2, owner = $3 WHERE number = $1",
                options.shard, values["branch"], values["owner"],
            )  # fmt: skip

    async def upgrade(self, *, dry_run: bool = False, watch_s: float | None = None) -> Upgrade:
        options = self._options
        async with connected(options.name, Link(options)) as link:
            _, layout = await inspect(link, options, may_create=False)
            steps = upgrade_steps(layout, options)
            if steps and not dry_run:
                await self._watch(link, None, watch_s)
                await upgrade(link, options)
        label = f"the schema {options.schema} in {options.name}"
        return Upgrade(label, layout, LAYOUT, steps)

    async def _inspect(self, link: Link) -> None:
        """Raise as ``inspect`` does, and StoreUnusable for an older layout."""
        options = self._options
        _, layout = await inspect(link, options)
        if layout < LAYOUT:
            raise unusable(
                options.name,
                f"the schema {options.schema} has layout {layout}; this release needs layout"
                f" {LAYOUT}: run `tickwheel store upgrade`",
            )

    async def _watch(self, link: Link, shard: int | None, watch_s: float | None) -> None:
        """Raise StoreUnusable if a daemon leads the shard, or any shard, within ``watch_s``."""

        async def find() -> StoreUnusable | None:
            leases = await link.fetch(SQL["leases"], shard)
            return led(self._options.name, *leases[0]) if leases else None

        await watch_lease(find, watch_s)

    def _changed(self) -> StoreUnusable:
        return StoreUnusable(
            f"{_shard_name(self._options)} has changed since it was read; run the command again"
        )
