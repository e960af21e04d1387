"""A store under test with its epoch, owner and batch numbers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from support.waiting import comes
from tickwheel.model.kinds import Effects
from tickwheel.persistence.contract import (
    CommitRefused,
    CommitUnknown,
    Handles,
    Opened,
    SmallState,
    Store,
    StoreUnreachable,
)

OWNER = "tester"
OPEN_S = 20.0
"""How long ``open`` tries a server that a busy machine is slow to run, in seconds."""


@dataclass
class Subject:
    """``commit`` numbers batches; everything else is called on ``store``."""

    store: Store
    opened: Opened = field(init=False)
    n: int = 0

    async def open(self, owner: str = OWNER) -> Opened:
        """Open the store, as a daemon does: again while it cannot be reached, for ``OPEN_S``."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + OPEN_S
        while True:
            try:
                self.opened = await self.store.open(owner, 1_700_000_000_000)
                break
            except StoreUnreachable:
                if loop.time() > until_s:
                    raise
                await asyncio.sleep(0.1)  # real time: a server comes up by itself
        self.n = self.opened.last_batch
        return self.opened

    async def reopen(self, clean: bool = True) -> Opened:
        await self.store.close(clean)
        return await self.open()

    async def commit(self, effects: Effects) -> bool:
        return await self.commit_as(OWNER, effects)

    async def commit_as(self, owner: str, effects: Effects) -> bool:
        self.n += 1
        try:
            return await self.store.commit(self.opened.epoch, owner, self.n, effects)
        except BaseException:
            self.n -= 1
            raise

    async def ids(self) -> list[int]:
        return [task.row.id for task in await self.store.scan(-1, 1_000_000, None)]

    async def handles(self, chunk: int = 10_000) -> list[Handles]:
        return [handles async for handles in self.store.recover_handles(chunk)]

    async def recover(self, chunk: int = 10_000) -> list[int]:
        """As a start does. Returns the ids of the handles."""
        await self.store.recover_small()
        handles = await self.handles(chunk)
        await self.keys()
        return [task_id for some in handles for task_id in some.ids]

    async def keys(self) -> dict[int, int]:
        """id → hash; one that comes twice is an error."""
        pairs = [
            pair
            async for keyed in self.store.recover_keys()
            for pair in zip(*keyed[:2], strict=True)
        ]
        assert len(dict(pairs)) == len(pairs)
        return dict(pairs)

    async def small(self) -> SmallState:
        """With lists that have no order of their own sorted."""
        small = await self.store.recover_small()
        small.progress.sort()
        small.dead.sort()
        return small


async def taken(subject: Subject, effects: Effects) -> list[str]:
    """Commit as a committer does: the same number until its fate is known. Returns the refusals
    before the batch was taken."""
    refusals: list[str] = []

    async def tried() -> bool:
        try:
            await subject.commit(effects)
        except (CommitRefused, CommitUnknown) as error:
            refusals.append(error.message)
            return False
        return True

    await comes(tried, every_s=0.01)
    return refusals
