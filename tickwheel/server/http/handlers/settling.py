"""Ends of deliveries: acks, nacks, rejections, snoozes, extensions, releases."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from tickwheel.errors import BadRequest
from tickwheel.server import checks
from tickwheel.server.http import types
from tickwheel.server.http.encode import Receipt, read_receipt

if TYPE_CHECKING:
    from tickwheel.server.http.call import Call
    from tickwheel.server.http.handlers.consuming import Streams

T = TypeVar("T", bound=types.AckIn)
Ask = Callable[[int, Sequence[Receipt]], None]

_ack = msgspec.json.Decoder(types.AckIn)
_nack = msgspec.json.Decoder(types.NackIn)
_reject = msgspec.json.Decoder(types.RejectIn)
_snooze = msgspec.json.Decoder(types.SnoozeIn)
_extend = msgspec.json.Decoder(types.ExtendIn)


class Settling:
    """The requests that settle deliveries, possibly of several groups: each group is one operation,
    and the words come back in the order asked."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams

    async def ack(self, call: Call) -> None:
        """Ack deliveries."""
        given, caller = await call.json(_ack), call.exchange.caller
        operation = call.operations.ack

        def ask(number: int, some: Sequence[Receipt]) -> None:
            one = some[0]
            operation(caller, number, one.topic, one.group, one.epoch, *_columns(some))

        await self._settle(call, given, ask, "acked")

    async def release(self, call: Call) -> None:
        """Give tasks back unstarted."""
        given, caller, now = await call.json(_ack), call.exchange.caller, call.now
        operation = call.operations.release

        def ask(number: int, some: Sequence[Receipt]) -> None:
            one = some[0]
            operation(caller, number, one.topic, one.group, one.epoch, *_columns(some), now)

        await self._settle(call, given, ask, "released")

    async def extend(self, call: Call) -> None:
        """Extend leases."""
        given, caller, now = await call.json(_extend), call.exchange.caller, call.now
        operation = call.operations.extend

        def ask(number: int, some: Sequence[Receipt]) -> None:
            one, columns = some[0], _columns(some)
            operation(
                caller, number, one.topic, one.group, one.epoch, *columns, given.lease_ms, now
            )

        await self._settle(call, given, ask, "extended")

    async def nack(self, call: Call) -> None:
        """Nack deliveries: attempts failed."""
        given = await call.json(_nack)
        rest = (given.delay_ms, given.reason)
        await self._each(call, given, call.operations.nack, rest, "retrying")

    async def reject(self, call: Call) -> None:
        """Reject deliveries: their tasks will never succeed."""
        given = await call.json(_reject)
        await self._each(call, given, call.operations.reject, (given.reason,), "dead")

    async def snooze(self, call: Call) -> None:
        """Postpone tasks, which counts as no failure."""
        given = await call.json(_snooze)
        await self._each(call, given, call.operations.snooze, (given.delay_ms,), "snoozed")

    async def _each(
        self,
        call: Call,
        given: types.AckIn,
        operation: Callable[..., None],
        rest: tuple[Any, ...],
        usual: str,
    ) -> None:
        caller, now = call.exchange.caller, call.now

        def ask(number: int, some: Sequence[Receipt]) -> None:
            items = tuple((one.id, one.epoch, one.attempt, *rest) for one in some)
            operation(caller, number, some[0].topic, some[0].group, items, now)

        await self._settle(call, given, ask, usual)

    async def _settle(self, call: Call, given: types.AckIn, ask: Ask, usual: str) -> None:
        limit = call.operations.limits.ids_per_frame_max
        texts = checks.sequence(tuple(given.receipts), "receipts", limit)
        if not texts:
            raise BadRequest("receipts has 0 elements; at least 1 is needed")
        receipts = [read_receipt(text, f"receipts[{i}]") for i, text in enumerate(texts)]
        groups: dict[tuple[str, str, int], list[int]] = {}
        for index, receipt in enumerate(receipts):
            found = (receipt.topic, receipt.group, receipt.epoch)
            groups.setdefault(found, []).append(index)
        if len(groups) > GROUPS_MAX:
            raise BadRequest(
                f"the receipts are of {len(groups)} groups; the limit is {GROUPS_MAX} a request"
            )
        answers = []
        for indexes in groups.values():
            some = [receipts[index] for index in indexes]
            answers.append(call.exchange.ask(partial(_swapped, ask, some)))
        # A receipt is text that anybody can write: it shows the life of a stream behind the check
        # of rights, and of the caller's own.
        for number in {receipt.stream for receipt in receipts} - {0}:
            self._streams.heard(number, call.exchange.caller.principal)
        words = [usual] * len(receipts)
        for indexes, found_words in zip(
            groups.values(), await asyncio.gather(*answers), strict=True
        ):
            for index, word in zip(indexes, found_words or (), strict=False):
                words[index] = word
        await call.answer({"results": words})


GROUPS_MAX = 100
"""Groups whose deliveries one request may settle."""


def _swapped(ask: Ask, some: Sequence[Receipt], number: int) -> None:
    ask(number, some)


def _columns(some: Sequence[Receipt]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(ids, attempts) of the receipts."""
    return tuple(one.id for one in some), tuple(one.attempt for one in some)
