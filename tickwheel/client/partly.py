"""The outcome of an ``enqueue_many`` that took several frames."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tickwheel.client.tasks import Receipt
from tickwheel.errors import OutcomeUnknown, Refused, TickwheelError, Unreachable


class Partly(OutcomeUnknown):
    """Some tasks of an ``enqueue_many`` were stored, others not, or nobody knows.

    ``receipts`` has one entry a task, in order: its Receipt, or the error of its frame. After
    ``refused`` and ``unreachable`` (``is_certain``) a task was not stored; after anything else
    that is not known.
    """

    def __init__(self, message: str, receipts: list[Receipt | TickwheelError]) -> None:
        super().__init__(message)
        self.receipts = receipts


def is_certain(error: TickwheelError) -> bool:
    """Whether an enqueue that failed so was certainly not stored."""
    return isinstance(error, (Refused, Unreachable)) or not error.retryable


async def gather_receipts(
    futures: Sequence[asyncio.Future[list[Receipt]]],
    counts: Sequence[int],
    trouble: TickwheelError | None,
) -> list[Receipt]:
    """All receipts. ``counts``: tasks of each frame; frames without a future were not begun,
    for ``trouble`` or because an earlier one had failed. Raises what went wrong."""
    if futures:
        await asyncio.wait(futures)
    errors = [error for error in map(_error_of, futures) if error is not None]
    if trouble is not None:
        errors.append(trouble)
    if not errors:
        return [receipt for future in futures for receipt in future.result()]
    found: list[Receipt | TickwheelError] = []
    for index, count in enumerate(counts):
        if index >= len(futures):
            found += [Unreachable(f"not sent: {errors[-1].message}")] * count
            continue
        error = _error_of(futures[index])
        found += futures[index].result() if error is None else [error] * count
    stored = sum(isinstance(item, Receipt) for item in found)
    if not stored:
        # The error that promises least.
        raise next((error for error in errors if not is_certain(error)), errors[0])
    raise Partly(
        f"{stored} of {len(found)} tasks were stored; the first other one: {errors[0].code}:"
        f" {errors[0].message}",
        found,
    )


def _error_of(future: asyncio.Future[list[Receipt]]) -> TickwheelError | None:
    if future.cancelled():
        return OutcomeUnknown("the call was cancelled")
    error = future.exception()
    assert error is None or isinstance(error, TickwheelError)
    return error
