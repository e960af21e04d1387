"""``auto_ack=True``: deliveries are acked by coming back for the next one.

An iterator does not learn how the body of its ``async for`` ended. What it does know is this:

* An ``async for`` (or ``aiter()``, or ``batches()``) that asks for the next delivery is done with
  what it got before: acked, also when the body caught an exception itself. The same holds for a
  new ``async for`` in the same task of the event loop.
* ``async with`` that is left without an exception (``break``, ``return``, the end): what that
  task got is acked.
* ``async with`` that is left by an exception: what that task got is nacked, with "Type: text" as
  the reason; when the task was cancelled it is released.
* Without ``async with`` a ``break`` or an exception goes unnoticed, and so does what the bodies
  of other tasks do: the lease ends by itself, and the task is delivered again.

What the body settled on its own (``ack``, ``nack``, …) is left alone. Leases are not kept up while
a body runs.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from tickwheel.client.delivery import Delivery
from tickwheel.errors import TickwheelError

REASON_CHARACTERS_MAX = 1000
"""Characters of an exception's text that are sent; the daemon keeps still less."""
TRACE_CHARACTERS_MAX = 16_000
"""Characters of a traceback that are sent, from its end."""
_OURS = str(Path(__file__).parent)


def reason_of(error: BaseException) -> str:
    """The reason for a nack: "Type: text" on the first line, and the traceback from where it leaves
    this client behind that."""
    text = " ".join(str(error).splitlines())
    name = type(error).__name__
    said = (f"{name}: {text}" if text else name)[:REASON_CHARACTERS_MAX]
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_OURS):
        trace = trace.tb_next
    if trace is None:
        return said
    told = "".join(traceback.format_exception(type(error), error, trace))
    told = told.removeprefix("Traceback (most recent call last):\n").rstrip()
    return f"{said}\n{told[-TRACE_CHARACTERS_MAX:]}"


class Reader:
    """One ``async for``, and the deliveries that its body works on."""

    def __init__(self, take: Callable[[], Coroutine[Any, Any, Delivery]]) -> None:
        self._take = take
        self._held: Sequence[Delivery] = ()
        self.task = asyncio.current_task()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delivery:
        self.ack()
        delivery = await self._take()
        self.took((delivery,))
        return delivery

    def took(self, deliveries: Sequence[Delivery]) -> None:
        """Note the deliveries that the body gets."""
        self._held, self.task = deliveries, asyncio.current_task()

    def ack(self) -> None:
        """Ack the deliveries that the body is done with."""
        for delivery in self.open():
            with suppress(TickwheelError):  # closed: the lease ends by itself
                delivery.ack_nowait()

    def open(self) -> list[Delivery]:
        """The deliveries that the body has not settled; none of them is returned twice."""
        held, self._held = self._held, ()
        return [delivery for delivery in held if not delivery.settled]


class AutoAck:
    """The readers of one subscription."""

    def __init__(self) -> None:
        self._readers: list[Reader] = []

    def reader(self, take: Callable[[], Coroutine[Any, Any, Delivery]]) -> Reader:
        """A new ``async for``: the body of an earlier one in the same task is over."""
        task = asyncio.current_task()
        for reader in self._readers:
            if reader.task is task:
                reader.ack()
        # Bodies of tasks that have ended are nobody's any more; their leases end by themselves.
        others = [r for r in self._readers if r.task is not None and not r.task.done()]
        made = Reader(take)
        self._readers = [*(reader for reader in others if reader.task is not task), made]
        return made

    async def left(self, error: BaseException | None) -> None:
        """Settle what the current task holds as it leaves the ``async with``: ack, nack,
        release."""
        task = asyncio.current_task()
        for reader in [reader for reader in self._readers if reader.task is task]:
            if error is None:
                reader.ack()
                continue
            for delivery in reader.open():
                with suppress(TickwheelError):
                    if isinstance(error, Exception):
                        await delivery.nack(reason=reason_of(error))
                    else:
                        await delivery.release()
