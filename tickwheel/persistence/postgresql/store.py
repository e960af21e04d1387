"""The PostgreSQL store: a connection that writes, a few that read, and one for upkeep.

Reads do not wait for batches, and the upkeep waits for neither. ``election.py`` has the leader's
lease and the registry of nodes, with connections of their own.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Sequence
from typing import Final

from tickwheel.model.key_hash import SEED_BYTES
from tickwheel.model.kinds import Effects
from tickwheel.persistence.contract import (
    Evidence,
    Handles,
    Keyed,
    Opened,
    SmallState,
    StoreAway,
    StoreError,
)
from tickwheel.persistence.on_server import ServerStore, ServerTrouble, opening_errors
from tickwheel.persistence.postgresql import opening
from tickwheel.persistence.postgresql.driver import LOOKUPS, Link, PostgresOptions
from tickwheel.persistence.postgresql.layout import SQL
from tickwheel.persistence.postgresql.reader import KeyedTasks, Reader
from tickwheel.persistence.postgresql.upkeep import Upkeep
from tickwheel.persistence.postgresql.writer import Writer, log

PROBE_BYTES: Final = 8 << 20
"""Enqueues have room if a table of this size can be written."""


class PostgresStore(ServerStore):
    """The PostgreSQL store; see ``contract.Store``. It can be opened again after it was closed."""

    _reader: Reader

    def __init__(self, options: PostgresOptions) -> None:
        super().__init__(options.name)
        self.options = options
        self._link = Link(options, LOOKUPS)
        self._now_ms = 0
        self._reset()

    def _reset(self) -> None:
        options, before = self.options, self._link
        self._link = Link(options, LOOKUPS)
        self._link.address, self._link.server_changes = before.address, before.server_changes
        self._writer = Writer(self._link, options)
        self._reader = Reader(options, self._writer)
        self._upkeep = Upkeep(options, self._writer)
        self._key_seed = secrets.token_bytes(SEED_BYTES)
        self._keyed = KeyedTasks(self._key_seed)

    @property
    def address(self) -> str:
        return self._link.address

    @property
    def server_changes(self) -> int:
        return self._link.server_changes

    async def open(
        self, owner: str, now_ms: int, *, epoch_min: int = 1, evidence: Sequence[Evidence] = (),
        may_create: bool = True,
    ) -> Opened:  # fmt: skip
        self._reset()
        options, link = self.options, self._link
        try:
            with opening_errors(self.name):
                self._durability, layout = await opening.inspect(link, options)
                if opening.upgrade_steps(layout, options):
                    await opening.upgrade(link, options, options.shard)
                upto = await opening.next_number(link)
                opened = await opening.begin_epoch(
                    link, options, owner, now_ms, may_create, epoch_min, evidence
                )
                await self._writer.begin(owner, opened)
        except BaseException:
            link.drop()
            raise
        # The seed changes with each start. Hashes are not stored, because a start reads every key.
        self._now_ms, opened.key_seed = now_ms, self._key_seed
        self._is_open = True
        self._upkeep.start(upto)
        return opened

    async def recover_small(self) -> SmallState:
        self._check_open()
        return await self._reader.small()

    async def recover_handles(self, chunk: int = 10_000) -> AsyncIterator[Handles]:
        self._check_open()
        self._keyed = KeyedTasks(self._key_seed)
        async for handles in self._reader.handles(chunk, self._now_ms, self._keyed):
            yield handles

    async def recover_keys(self) -> AsyncIterator[Keyed]:
        self._check_open()
        keyed, self._keyed = self._keyed, KeyedTasks(self._key_seed)
        for chunk in keyed.chunks():
            yield chunk

    async def commit(self, epoch: int, owner: str, n: int, effects: Effects) -> bool:
        self._check_open()
        return await self._writer.commit(epoch, owner, n, effects)

    async def backup(self, path: str) -> int:
        """Copy the data to a SQLite database, which a daemon can open as its store."""
        self._check_open()
        return await self._reader.backup(path)

    async def probe_room(self) -> bool:
        self._check_open()
        link = Link(self.options)
        try:
            number = await opening.next_number(link)
            await link.execute("BEGIN")
            await link.execute(SQL["probe"].format(number, PROBE_BYTES // 4_096))
        except ServerTrouble:
            return False
        finally:
            link.drop()
        return True

    async def verify(self) -> None:
        """See ``Store.verify``. Raise StoreForgot if PostgreSQL lacks confirmed batches."""
        self._check_open()
        try:
            await self._writer.verify()
        except ServerTrouble as error:
            raise StoreAway(error.message) from error

    async def close(self, clean: bool) -> None:
        """See ``Store.close``. If PostgreSQL cannot be reached, ``clean`` is not recorded."""
        if not self._is_open:
            return
        self._is_open = False
        await self._upkeep.stop()
        try:
            if clean:
                await self._writer.end()
        except StoreError as error:
            log.warning("store %s: not closed cleanly: %s", self.name, error.message)
        finally:
            await self._link.close()
            await self._reader.close()
