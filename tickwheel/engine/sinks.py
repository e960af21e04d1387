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
"""One delivery of a frame: (row, attempt, what counts of the earlier deliveries)."""


class ReplySink(Protocol):
    """Where the answers to one caller's requests go. What was given to it leaves in one piece with
    ``flush``. An answer may have to wait for the store before it is given: until then it is in the
    form that the sink made of it at once, so that what is kept is no larger than it says."""

    @property
    def label(self) -> str:
        """Who the caller is, for the history."""
        ...

    def accepted(self, answers: Sequence[StoredAnswer]) -> None:
        """Answer enqueue requests whose tasks are durable."""

    def answer_to(self, request: int, value: object) -> Sized:
        """The answer to any other request with a plain value, in a form that can wait: ``len`` of
        it is about its bytes. A value that cannot be said becomes an ``error``."""
        ...

    def give(self, answer: Sized) -> None:
        """Give an answer that ``answer_to`` made, once it may be given."""

    def error(self, request: int, code: str, message: str) -> None:
        """Answer that the request was refused, or failed, with a code of the error table."""

    def flush(self) -> None:
        """Write all answers that were given since the last flush."""


class DeliverySink(Protocol):
    """Where the deliveries of one subscription, or the one answer of a pull, go."""

    def deliver(self, epoch: int, now_ms: int, items: Sequence[Item]) -> None:
        """Send all of these deliveries at once. Raises before any is written if one cannot be."""

    def check(self, item: Item) -> None:
        """Raises the error that keeps this delivery from being written."""

    def ended(self, code: str, message: str) -> None:
        """The shard has ended the subscription, with a code of the error table."""

    def closed(self) -> None:
        """The subscription's caller is gone."""
