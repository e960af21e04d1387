"""Where answers and deliveries go: what a transport gives to the shard, and no more.

Both are called in the step of the event loop in which something is known, and must not block. What
cannot be written any more (its peer is gone) is dropped in silence.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized
from typing import Protocol

from tickwheel.engine.sessions import StoredAnswer
from tickwheel.model.records import Past, TaskRow

Item = tuple[TaskRow, int, Past]
"""One delivery of a frame: (row, attempt, what counts of the deliveries before)."""


class ReplySink(Protocol):
    """Where the answers to one caller's requests go. What was given to it leaves in one piece with
    ``flush``. An answer may have to wait for the store before it is given: until then it is in the
    form that the sink made of it at once, so that what is kept is no larger than it says."""

    @property
    def label(self) -> str:
        """Who the caller is, for the history."""
        ...

    def accepted(self, answers: Sequence[StoredAnswer]) -> None:
        """Enqueue requests whose tasks are durable."""

    def answer_to(self, request: int, value: object) -> Sized:
        """The answer to any other request, with a plain value, as it can wait: ``len`` of it is
        about the bytes that it takes. A value that cannot be said becomes an ``error``."""
        ...

    def give(self, answer: Sized) -> None:
        """One that ``answer_to`` made, and whose time has come."""

    def error(self, request: int, code: str, message: str) -> None:
        """The request was refused, or failed: a row of the error table."""

    def flush(self) -> None:
        """Write what was given since."""


class DeliverySink(Protocol):
    """Where the deliveries of one subscription, or the one answer of a pull, go."""

    def deliver(self, epoch: int, now_ms: int, items: Sequence[Item]) -> None:
        """Each of them, at once. Raises what keeps them from being written, before any of them
        is."""

    def check(self, item: Item) -> None:
        """Raises what keeps this one from being written."""

    def ended(self, code: str, message: str) -> None:
        """The shard has ended the subscription, for a reason of the error table."""

    def closed(self) -> None:
        """Its caller is gone."""
