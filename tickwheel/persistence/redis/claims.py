"""Claiming a shard for a connection, and the frame around writing it anew: one script each.

Knows who owns the shard (the sender); judges what it finds only as far as it makes this daemon
the wrong one. What is missing in the shard is the writer's business.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from tickwheel.persistence.redis.layout import LAYOUT, Keys
from tickwheel.persistence.redis.line import Line
from tickwheel.persistence.redis.scripts_life import CLAIM, REWRITE
from tickwheel.persistence.redis.sender import Sender
from tickwheel.persistence.store import Fenced, StoreBehind, StoreLost


class Expecting(Protocol):
    """What a claim is held against; see ``Writer``."""

    rewriting: bool
    last: int
    base: int

    @property
    def epoch(self) -> int: ...


class Claim(NamedTuple):
    """What the shard said when it was claimed."""

    last: int
    parts: int
    """Of a sealed batch that is being applied; 0 when none is."""
    part: int
    rewriting: bool
    epoch: int
    """That of the last one who claimed it before."""

    def check(self, what: str, writer: Expecting) -> None:
        """Raises StoreBehind when the batch number alone does not tell what is there."""
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
    """The owner's voice on one line. Raises Away, Lost, Answer beside what is named."""

    def __init__(self, line: Line, keys: Keys, name: str) -> None:
        self._line = line
        self._keys = keys
        self._name = name

    async def take(self, sender: Sender, incarnation: str) -> Claim:
        """Whatever older connections still send is void from here on.

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
