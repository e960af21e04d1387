"""One ENQUEUE frame: the tasks of one or several callers, and who waits for which of them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from tickwheel.client.connection import Request
from tickwheel.client.tasks import Receipt, WireTask, due_of, receipts
from tickwheel.errors import (
    NotActive,
    OutcomeUnknown,
    ProtocolError,
    RequestForgotten,
    TickwheelError,
)

if TYPE_CHECKING:
    from tickwheel.client.producer import Producer

Entry = tuple[asyncio.Future[Any], int]
"""A caller's future and how many tasks of the frame are its; 0: a single one, not a list."""


class Batch(Request):
    """Sizes are upper bounds of bytes on the wire; number 0 means that it has none yet."""

    __slots__ = (
        "began_s",
        "done",
        "entries",
        "number",
        "producer",
        "refusal",
        "sent",
        "size",
        "tasks",
        "tries",
    )  # fmt: skip

    def __init__(self, producer: Producer, size: int) -> None:
        super().__init__(0.0)
        self.producer = producer
        self.began_s = 0.0
        self.tasks: list[WireTask] = []
        self.entries: list[Entry] = []
        self.size = size
        self.number = 0
        self.sent = 0
        """How often it was written under its number."""
        self.tries = 0
        self.done = False
        self.refusal: TickwheelError | None = None
        """What refused it, while it is certain that nothing of it is stored."""

    def unwanted(self) -> bool:
        """Every caller has gone before it was sent."""
        return all(future.cancelled() for future, _ in self.entries)

    def answered(self, result: Any) -> None:
        accepted_ms, ids = result
        if type(accepted_ms) is not int or len(ids) != len(self.tasks):
            raise ValueError(f"{len(ids)} ids for {len(self.tasks)} tasks")
        if len(self.entries) == len(self.tasks) and not any(n for _, n in self.entries):
            for (future, _), task_id, task in zip(self.entries, ids, self.tasks, strict=True):
                if not future.done():
                    future.set_result(Receipt(task_id, due_of(task, accepted_ms)))
        else:
            found, start = receipts(self.tasks, ids, accepted_ms), 0
            for future, count in self.entries:
                end = start + (count or 1)
                if not future.done():
                    future.set_result(found[start:end] if count else found[start])
                start = end
        self.producer.finish(self)

    def failed(self, error: TickwheelError) -> None:
        if self.done:
            return
        if isinstance(error, (RequestForgotten, ProtocolError)) and self.sent:
            # The answer was given and is not to be had any more.
            unknown = OutcomeUnknown(f"whether it was stored is not known: {error.message}")
            self.producer.give_up(self, unknown)
            return
        if error.closes_connection:
            return  # lost with its connection: the next one sends it again
        if isinstance(error, NotActive):
            # The same. An earlier daemon may have stored it, of which this one knows nothing.
            self.refusal = error if self.sent == 1 else None
            return
        self.producer.refused(self, error)

    def lost(self) -> None:
        """It stays in the window; the next connection sends it again."""

    def expired(self) -> None:
        if self.done:
            return
        link = self.producer.link
        waited_s = round(link.loop.time() - self.began_s, 1)
        if not self.sent or isinstance(self.refusal, NotActive):
            error = link.unreachable(waited_s)
        elif self.refusal is not None:
            error = self.refusal
        else:
            error = OutcomeUnknown(
                f"ENQUEUE was sent and not answered within {waited_s:g} s; whether it was stored"
                " is not known"
            )
        self.producer.give_up(self, error)


def split(batch: Batch, frame_bytes: int) -> list[Batch]:
    """A batch for each caller of ``batch``, without numbers, with the same deadline."""
    parts: list[Batch] = []
    start = 0
    for entry in batch.entries:
        count = entry[1] or 1
        share = (batch.size - frame_bytes) * count // len(batch.tasks)
        part = Batch(batch.producer, frame_bytes + share)
        part.tasks = batch.tasks[start : start + count]
        part.entries = [entry]
        part.began_s, part.deadline_s = batch.began_s, batch.deadline_s
        parts.append(part)
        start += count
    return parts
