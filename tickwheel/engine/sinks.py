"""Where answers and deliveries go: what a transport gives to the shard, and no more.

Both are called in the step of the event loop in which something is known, and must not block. What
cannot be written any more (its peer is gone) is dropped in silence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tickwheel.engine.sessions import StoredAnswer
from tickwheel.model.records import TaskRow


class ReplySink(Protocol):
    """Where the answers to one caller's requests go. What was given to it leaves in one piece with
    ``flush``."""

    @property
    def label(self) -> str:
        """Who the caller is, for the history."""
        ...

    def accepted(self, answers: Sequence[StoredAnswer]) -> None:
        """Enqueue requests whose tasks are durable."""

    def result(self, request: int, value: object) -> None:
        """The answer to any other request: a plain value."""

    def error(self, request: int, code: str, message: str) -> None:
        """The request was refused, or failed: a row of the error table."""

    def flush(self) -> None:
        """Write what was given since."""


class DeliverySink(Protocol):
    """Where the deliveries of one subscription, or the one answer of a pull, go."""

    def deliver(self, epoch: int, now_ms: int, items: Sequence[tuple[TaskRow, int]]) -> None:
        """(row, attempt) of each, at once. Raises what keeps them from being written, before
        any of them is."""

    def check(self, item: tuple[TaskRow, int]) -> None:
        """Raises what keeps this one from being written."""

    def ended(self, code: str, message: str) -> None:
        """The shard has ended the subscription, for a reason of the error table."""

    def closed(self) -> None:
        """Its caller is gone."""
