"""A store that fails as soon as any store would.

Each batch passes the encoders of all stores and of the history."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack

from support.shard_rig import GatedStore
from tickwheel.history.lines import policy_map
from tickwheel.persistence.contract import Evidence, Opened
from tickwheel.persistence.redis import layout
from tickwheel.persistence.sqlite.store import SqliteStore

if TYPE_CHECKING:
    from tickwheel.history.daemon import Recorder
    from tickwheel.model.kinds import Effects

ENDINGS_MAX = 10_000


class EncodingStore(GatedStore):
    """A memory store with a SQLite database that gets the same batches."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._sqlite = SqliteStore(str(folder / "beside.db"))
        self._numbers = layout.TopicNumbers()
        self.batches = 0

    async def open(
        self, owner: str, now_ms: int, *, epoch_min: int = 1, evidence: Sequence[Evidence] = ()
    ) -> Opened:
        await self._sqlite.open(owner, now_ms, epoch_min=epoch_min, evidence=evidence)
        return await super().open(owner, now_ms, epoch_min=epoch_min, evidence=evidence)

    async def commit(self, epoch: int, owner: str, n: int, effects: Effects) -> bool:
        layout.prepare(effects, ENDINGS_MAX, self._numbers)
        await self._sqlite.commit(epoch, owner, n, effects)
        self.batches += 1
        return await super().commit(epoch, owner, n, effects)

    async def close(self, clean: bool) -> None:
        await self._sqlite.close(clean)
        await super().close(clean)


class Encoded:
    """A history that packs each batch's records, as strictly as msgpack can, and drops them."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._pack = msgpack.Packer(default=policy_map).pack

    def prepare(self, number: int, notes: Any) -> None:
        if notes is not None:
            self._pack((number, self._recorder.records(notes)))

    def keep(self, number: int, notes: object) -> None: ...

    def note_clock(self, now_ms: int, position_ms: int) -> None: ...
