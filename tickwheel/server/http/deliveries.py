"""Deliveries: pulls that may wait, streams of them, and their ends (acks, nacks, rejections,
snoozes, extensions, releases). A delivery has an opaque receipt, with which it is settled.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from tickwheel.engine.topics import Item
from tickwheel.errors import (
    BY_CODE,
    BadRequest,
    InternalError,
    TickwheelError,
    shown,
)
from tickwheel.model.records import DEFAULT_GROUP
from tickwheel.server import checks
from tickwheel.server.generated import delivered
from tickwheel.server.http import types
from tickwheel.server.http.call import JSON, ClientGone, as_json, put_body
from tickwheel.server.http.call import line as problem_line
from tickwheel.server.http.enqueue import NDJSON
from tickwheel.server.http.exchange import Receipt, Wish
from tickwheel.server.shard.groups import OF_GROUPS

if TYPE_CHECKING:
    from tickwheel.server.http.call import Call, Handler
    from tickwheel.server.http.exchange import Answer

# --- receipts ------------------------------------------------------------------------------------


_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(Receipt).decode
RECEIPT_LENGTH_MAX = 1_024


def receipt_text(receipt: Receipt) -> str:
    """The receipt as an opaque text that is safe in a URL."""
    return base64.urlsafe_b64encode(_pack(receipt)).rstrip(b"=").decode()


def read_receipt(text: str, field: str) -> Receipt:
    """The receipt in a text. Raises BadRequest."""
    if len(text) <= RECEIPT_LENGTH_MAX:
        try:
            return _unpack(base64.b64decode(text + "=" * (-len(text) % 4), b"-_", validate=True))
        except (ValueError, msgspec.DecodeError):
            pass
    raise BadRequest(f"{field} must be a receipt as a delivery has it, not {shown(text)}")


class Told(NamedTuple):
    """One delivery as a daemon tells it to its clients."""

    id: int
    attempt: int
    due_ms: int
    body: bytes
    options: dict[str, Any]
    """What else is said of the task, with ``failures`` and ``deaths`` where there are some."""


AnyItem = Item | Told


def _told(item: AnyItem) -> Told:
    if isinstance(item, Told):
        return item
    row, attempt, past = item
    options = {} if row.options is None else delivered(row.options)
    options |= {"failures": past.failed, "deaths": past.deaths}
    return Told(row.id, attempt, row.due_ms, row.body, options)


def delivery_view(
    item: AnyItem, topic: str, group: str, epoch: int, now_ms: int, stream: int = 0
) -> dict[str, Any]:
    """One delivery as the API answers it, made at ``now_ms``."""
    task_id, attempt, due_ms, body, options = _told(item)
    receipt = Receipt(topic, group, task_id, epoch, attempt, stream)
    view: dict[str, Any] = {
        "id": str(task_id),
        # A broadcast has no group, and nothing to settle.
        "receipt": receipt_text(receipt) if group else "",
        "due_ms": due_ms,
        "delivered_ms": now_ms,
        "attempt": attempt,
        "failures": 0,
        "deaths": 0,
    }
    put_body(view, body)
    view |= options
    if "replay_of" in view:
        view["replay_of"] = str(view["replay_of"])
    return view


def pulled(
    found: Iterable[tuple[AnyItem, str, str, int, int]], made: dict[str, Any] | None
) -> bytes:
    """Return the JSON that answers a pull. ``found`` has the first arguments of ``delivery_view``
    of each delivery; ``made`` is what there is to say of the group if the pull made it."""
    view: dict[str, Any] = {"deliveries": [delivery_view(*one) for one in found]}
    return as_json(view if made is None else view | {"new_group": made})


# --- pulls and streams ---------------------------------------------------------------------------


SSE = "text/event-stream"
NEW_GROUP = b"tickwheel-new-group"
"""The header of a stream that has made its group: what there is to say of that, as JSON."""
_pull = msgspec.json.Decoder(types.PullIn)


async def pull(call: Call) -> None:
    """Answer up to ``max`` deliveries, as soon as there is one, or none after ``wait_ms``."""
    given = await call.json(_pull)
    checks.integer(given.wait_ms, "wait_ms", 0, call.common.wait_ms_max)
    options = {"lease_ms": given.lease_ms, **_of_group(given)}
    wish = Wish(call.named["topic"], given.group, given.max, options)
    answer = call.exchange.pull(wish, given.wait_ms, pulled)
    if not answer.done():
        gone = call.client.gone()
        await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise ClientGone("the client has gone")
    await call.answer(answer.result())


async def stream(call: Call) -> None:
    """Send deliveries as they come, until the client goes: server-sent events or lines."""
    streams = call.common.streams
    number = streams.opened(call.exchange)
    try:
        await Stream(call, call.query(types.StreamQuery), number).run()
    finally:
        streams.closed(number)


def _of_group(given: types.PullIn | types.StreamQuery) -> dict[str, Any]:
    """The settings that the request wants of its group."""
    return {name: getattr(given, name) for name in OF_GROUPS}


class Stream:
    """One stream: the sink of its subscription, and the writer of its deliveries."""

    def __init__(self, call: Call, given: types.StreamQuery, number: int) -> None:
        accepted = call.header(b"accept") or ""
        self._call = call
        self._given = given
        self._number = number
        self._topic = call.named["topic"]
        self._group = "" if given.broadcast else given.group or DEFAULT_GROUP
        self._is_lines = NDJSON in accepted or JSON in accepted
        self._settings = call.exchange.settings
        self._pieces: list[bytes] = []
        self._bytes = 0
        """The bytes of deliveries that are not written."""
        self._blocked = False
        self._wake = asyncio.Event()
        self._end: TickwheelError | None = None

    async def run(self) -> None:
        """Write deliveries until the client has gone, or the daemon ends the stream."""
        call = self._call
        made = (await self._subscribe()).get("new_group")
        headers = [] if made is None else [(NEW_GROUP, as_json(made))]
        await call.begin(NDJSON if self._is_lines else SSE, headers)
        gone = call.client.gone()
        gone.add_done_callback(lambda _: self._wake.set())
        # The head is in the client's hands before the first delivery: it can tell that it is open.
        await call.piece(self._idle())
        while not gone.done():
            if not self._pieces and self._end is None:
                try:
                    async with asyncio.timeout(call.common.keep_alive_s):
                        await self._wake.wait()
                except TimeoutError:
                    await call.piece_in_time(self._idle())
            self._wake.clear()
            await self._flush()
            if self._end is not None:
                await call.piece(self._last(self._end), more=False)
                return
        raise ClientGone("the client has gone")

    async def _subscribe(self) -> dict[str, Any]:
        """Subscribe; the answer."""
        given, exchange = self._given, self._call.exchange
        options: dict[str, Any] = {"ack": given.ack, **_of_group(given)}
        if given.lease_ms is not None:
            options["lease_ms"] = given.lease_ms
        if given.broadcast:
            options["broadcast"] = True
        exchange.on_end = self._ended
        wish = Wish(self._topic, given.group, given.credit, options)
        answer: dict[str, Any] = await exchange.subscribe(wish, self)
        return answer

    # --- the shard's -----------------------------------------------------------------------------

    def deliver(self, epoch: int, now_ms: int, items: Sequence[AnyItem]) -> None:
        pieces = [self._piece(item, epoch, now_ms) for item in items]
        self._pieces += pieces
        self._bytes += sum(map(len, pieces))
        if self._bytes > self._settings.out_bytes_stop and not self._blocked:
            self._blocked = True
            self._call.exchange.blocked()
        self._wake.set()

    def check(self, item: Item) -> None:
        self._piece(item, 0, 0)

    def ended(self, code: str, message: str) -> None:
        self._ended(BY_CODE.get(code, InternalError)(message))

    def closed(self) -> None:
        """Do nothing: ``run`` knows already that the client has gone."""

    # --- the writer's ----------------------------------------------------------------------------

    def _ended(self, error: TickwheelError) -> None:
        self._end = error
        self._wake.set()

    async def _flush(self) -> None:
        while self._pieces:
            pieces, self._pieces = self._pieces, []
            data = b"".join(pieces)
            await self._call.piece_in_time(data)
            self._bytes -= len(data)
            if self._blocked and not self._pieces:
                self._blocked = False
                if self._end is None:
                    self._call.exchange.unblocked()

    def _piece(self, item: AnyItem, epoch: int, now_ms: int) -> bytes:
        view = as_json(delivery_view(item, self._topic, self._group, epoch, now_ms, self._number))
        if self._is_lines:
            return view + b"\n"
        return b"event: delivery\nid: %d\ndata: %b\n\n" % (_told(item).id, view)

    def _idle(self) -> bytes:
        return b"\n" if self._is_lines else b": still here\n\n"

    def _last(self, error: TickwheelError) -> bytes:
        said = as_json({"error": problem_line(error)})
        return said + b"\n" if self._is_lines else b"event: end\ndata: %b\n\n" % said


# --- ends of deliveries --------------------------------------------------------------------------


GROUPS_MAX = 100
"""Groups whose deliveries one request may settle."""


def settling(verb: str, body: type[types.AckIn], usual: str) -> Handler:
    """The handler that settles deliveries, possibly of several groups: each group is one question,
    and the words come back in the order asked; ``usual`` where the answer has none."""
    decoder = msgspec.json.Decoder(body)
    more = [name for name in body.__struct_fields__ if name != "receipts"]

    async def handle(call: Call) -> None:
        given = await call.json(decoder)
        rest = tuple(getattr(given, name) for name in more)
        ask = partial(call.exchange.settle, verb, more=rest)
        await call.answer({"results": await _settled(call, given.receipts, ask, usual)})

    handle.__name__ = verb
    return handle


async def _settled(
    call: Call, given: list[str], ask: Callable[[Sequence[Receipt]], Answer], usual: str
) -> list[str]:
    texts = checks.array(tuple(given), "receipts", call.exchange.limits.ids_per_frame_max)
    if not texts:
        raise BadRequest("receipts has 0 elements; at least 1 is needed")
    receipts = [read_receipt(text, f"receipts[{i}]") for i, text in enumerate(texts)]
    groups: dict[tuple[str, str, int], list[int]] = {}
    for index, receipt in enumerate(receipts):
        groups.setdefault((receipt.topic, receipt.group, receipt.epoch), []).append(index)
    if len(groups) > GROUPS_MAX:
        raise BadRequest(
            f"the receipts are of {len(groups)} groups; the limit is {GROUPS_MAX} a request"
        )
    answers = [ask([receipts[index] for index in indexes]) for indexes in groups.values()]
    # A receipt is text that anybody can write: it shows the life of a stream behind the check of
    # rights, and of the caller's own.
    for number in {receipt.stream for receipt in receipts} - {0}:
        call.common.streams.heard(number, call.exchange.caller.principal)
    words = [usual] * len(receipts)
    for indexes, found in zip(groups.values(), await asyncio.gather(*answers), strict=True):
        for index, word in zip(indexes, found or (), strict=False):
            words[index] = word or usual
    return words
