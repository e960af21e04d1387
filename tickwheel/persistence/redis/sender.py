"""One batch to Redis: a script, or parts that are staged, sealed and applied; and the claim of a
shard for a connection, with the frame around writing it anew: one script each.

Knows who owns the shard and on which claim of a connection; does not know connections, nor which
batch comes next. A claim judges what it finds only as far as it makes this daemon the wrong one;
what is missing in the shard is the writer's business. Invariant: ``unknown`` is the number of a
batch whose script was sent and may still be applied, 0 when there is none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from tickwheel.persistence.contract import Fenced, StoreBehind, StoreBroken, StoreLost
from tickwheel.persistence.redis.driver import Argument, NotConnected, Packed, ServerError
from tickwheel.persistence.redis.encode import PART_BYTES_MAX
from tickwheel.persistence.redis.keys import LAYOUT, Keys, id_text
from tickwheel.persistence.redis.scripts import (
    APPLY_PART,
    CLAIM,
    COMMIT,
    REWRITE,
    SEAL,
    STAGE,
    Script,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tickwheel.model.effects import Effects
    from tickwheel.persistence.redis.connection import Connection

PART_PATIENCE = 1 + (PART_BYTES_MAX >> 20)
"""The patience for one part of a batch: a second for each MiB, for a slow disk."""


class Again(Exception):
    """The shard has to be claimed again; the claim shows what became of the batch."""


class Sender:
    """Sends batches to Redis in the name of a claim."""

    def __init__(self, line: Connection, keys: Keys) -> None:
        self._line = line
        self._keys = keys
        self.epoch = 0
        self.owner = ""
        self.link = b""
        """The number of the claim, which every script carries."""
        self.id_mark = 0
        self.unknown = 0
        self.staged = False
        """Whether a large batch is being applied, so that a read may show half of it."""

    async def send(self, n: int, effects: Effects, flat: Sequence[Packed], size_bytes: int) -> None:
        """Send a batch; returns when it is applied. Raises Again, Away, Lost, Answer."""
        id_mark = id_text(max(self.id_mark, effects.id_mark))
        position_ms = b"%d" % effects.position_ms
        makes_tasks = int(effects.makes_tasks)
        if len(flat) == 1:
            lowest = id_text(min(effects.enqueued)) if effects.enqueued else b""
            marks = (n, makes_tasks, lowest, id_mark, position_ms)
            await self._decide(COMMIT, n, (), (*marks, flat[0]), 1 + (size_bytes >> 20))
            return
        stages = tuple(self._keys.stage(i) for i in range(1, len(flat) + 1))
        for key, part in zip(stages, flat, strict=True):
            await self._decide(STAGE, n, (key,), (n, makes_tasks, part), PART_PATIENCE)
        self.staged = True
        await self._decide(SEAL, n, stages, (n, id_mark, position_ms))
        await self.apply_parts(len(flat), 0)

    async def _decide(
        self,
        script: Script,
        n: int,
        more: tuple[bytes, ...],
        args: tuple[Argument, ...],
        patience: int = 1,
    ) -> None:
        """Run a script that decides about batch ``n``; returns when it did its work."""
        self.unknown = n
        try:
            status, rest = await self.run(script, more, args, patience)
        except (NotConnected, ServerError):
            # Nothing was sent, or Redis refused at the first write. Whatever an older
            # connection had under way was voided by this one's claim.
            self.unknown = 0
            raise
        if status in ("applied", "staged"):
            return
        self.unknown = 0
        if status == "twice":
            raise StoreBroken(f"id {int(rest[0])} was assigned twice")
        # fenced, stale, gone, gap, before, parts, unstaged: the claim finds out what is there now.
        raise Again(status)

    async def apply_parts(self, count: int, applied: int) -> None:
        """Apply the remaining parts of a sealed batch."""
        self.staged = True
        for i in range(applied + 1, count + 1):
            status, _ = await self.run(APPLY_PART, (self._keys.stage(i),), (i,), PART_PATIENCE)
            if status not in ("applied", "before"):
                raise Again(status)
        self.staged = False

    async def run(
        self,
        script: Script,
        more: tuple[bytes, ...],
        args: tuple[Argument, ...],
        patience: int = 1,
    ) -> tuple[str, list[bytes]]:
        """A fenced script's status and the rest of its reply."""
        fence = (self.epoch, self.owner.encode(), self.link)
        reply: list[Any] = await self._line.run(
            script, self._keys.all + more, (*fence, *args), patience=patience
        )
        return reply[0].decode(), reply[1:]


class Expecting(Protocol):
    """What a claim is compared with; see ``Writer``."""

    rewriting: bool
    last: int
    base: int

    @property
    def epoch(self) -> int: ...


class Claim(NamedTuple):
    """What the shard said of itself when it was claimed."""

    last: int
    parts: int
    """How many parts a sealed batch has that is being applied; 0: there is none."""
    part: int
    rewriting: bool
    epoch: int
    """The epoch of the previous claim."""

    def check(self, what: str, writer: Expecting) -> None:
        """Raises StoreBehind when the batch number alone does not show what is there."""
        if self.rewriting != writer.rewriting:
            raise StoreBehind(
                f"{what} is not whole: writing it anew was cut short",
                last_seen=0,
                last_known=writer.last,
            )
        if self.epoch < writer.epoch and self.last > writer.base:
            raise StoreBehind(
                f"{what} was written by epoch {self.epoch} after {writer.epoch} had begun",
                last_seen=writer.base,
                last_known=writer.last,
            )


class Claimant:
    """Claims a shard for its owner on one line. Raises Away, Lost, Answer beside what is named."""

    def __init__(self, line: Connection, keys: Keys, name: str) -> None:
        self._line = line
        self._keys = keys
        self._name = name

    async def take(self, sender: Sender, incarnation: str) -> Claim:
        """Claim the shard, which voids all that older connections still send.

        Raises Fenced, StoreLost (it is empty).
        """
        shard = self._keys.shard
        mine = (sender.epoch, sender.owner.encode(), incarnation, sender.link or 0)
        reply: list[Any] = await self._line.run(CLAIM, self._keys.all, mine)
        status, *rest = [part.decode() for part in reply]
        if status == "fenced":
            raise Fenced(
                f"epoch {sender.epoch} of {sender.owner!r} is over:"
                f" epoch {rest[0]} of {rest[1]!r} began"
            )
        if status == "other":
            raise Fenced(
                f"{self._name}: {shard} was laid out anew (incarnation {rest[0]},"
                f" epoch {rest[1]} of {rest[2]!r})"
            )
        if status == "gone":
            raise StoreLost(f"{self._name} came back empty: {shard} is gone")
        sender.link = reply[1]
        last, parts, part, rewriting, epoch = rest[1:6]
        return Claim(int(last), int(parts or 0), int(part or 0), bool(rewriting), int(epoch))

    async def frame(
        self, sender: Sender, incarnation: str, phase: str, written: int, last: int
    ) -> None:
        """``begin``: empty the shard and mark it as not whole; ``end``: the ``written`` batches
        there are all that was confirmed up to ``last``.

        Raises Fenced, StoreLost (somebody changed it between).
        """
        mine = (sender.epoch, sender.owner.encode(), incarnation)
        args = (*mine, LAYOUT, phase, last, 0, sender.link or 0, written)
        reply: list[Any] = await self._line.run(REWRITE, self._keys.all, args)
        status, *rest = [part.decode() for part in reply]
        if status == "fenced":
            raise Fenced(f"{self._name}: epoch {rest[0]} of {rest[1]!r} began")
        if status != "applied":
            raise StoreLost(f"{self._name}: {self._keys.shard} is not as it was left ({status})")
