"""Handlers of deliveries: pulls, streams, and settlements (acks, nacks, rejections, snoozes,
extensions, releases). A delivery has an opaque receipt, which identifies it when it is settled.
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
from tickwheel.server.http.exchange import DeliveryRequest, Receipt
from tickwheel.server.shard.groups import OF_GROUPS

if TYPE_CHECKING:
    from tickwheel.server.http.call import Call, Handler
    from tickwheel.server.http.exchange import Answer

# --- receipts ------------------------------------------------------------------------------------


_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(Receipt).decode
RECEIPT_LENGTH_MAX = 1_024


def receipt_text(receipt: Receipt) -> str:
    """Return the receipt as opaque text that is safe in a URL."""
    return base64.urlsafe_b64encode(_pack(receipt)).rstrip(b"=").decode()


def read_receipt(text: str, field: str) -> Receipt:
    """Return the receipt that a text encodes. Raise BadRequest for any other text."""
    if len(text) <= RECEIPT_LENGTH_MAX:
        try:
            return _unpack(base64.b64decode(text + "=" * (-len(text) % 4), b"-_", validate=True))
        except (ValueError, msgspec.DecodeError):
            pass
    raise BadRequest(f"{field} must be the receipt of a delivery, not {shown(text)}")


class DeliveredTask(NamedTuple):
    """One delivery in the form in which the protocol sends it to clients."""

    id: int
    attempt: int
    due_ms: int
    body: bytes
    options: dict[str, Any]
    """The task's other fields; ``failures`` and ``deaths`` may be absent if they are 0."""


AnyItem = Item | DeliveredTask


def _delivered_task(item: AnyItem) -> DeliveredTask:
    if isinstance(item, DeliveredTask):
        return item
    row, attempt, past = item
    options = {} if row.options is None else delivered(row.options)
    options |= {"failures": past.failed, "deaths": past.deaths}
    return DeliveredTask(row.id, attempt, row.due_ms, row.body, options)


def delivery_view(
    item: AnyItem, topic: str, group: str, epoch: int, now_ms: int, stream: int = 0
) -> dict[str, Any]:
    """Return the JSON fields of a delivery made at ``now_ms``."""
    task_id, attempt, due_ms, body, options = _delivered_task(item)
    receipt = Receipt(topic, group, task_id, epoch, attempt, stream)
    view: dict[str, Any] = {
        "id": str(task_id),
        # A broadcast has no group and is not settled.
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


def pull_answer(
    deliveries: Iterable[tuple[AnyItem, str, str, int, int]], new_group: dict[str, Any] | None
) -> bytes:
    """Return the JSON answer to a pull. Each element of ``deliveries`` contains the arguments of
    ``delivery_view``; ``new_group`` contains the fields of the group if the pull created it."""
    view: dict[str, Any] = {"deliveries": [delivery_view(*arguments) for arguments in deliveries]}
    return as_json(view if new_group is None else view | {"new_group": new_group})


# --- pulls and streams ---------------------------------------------------------------------------


SSE = "text/event-stream"
NEW_GROUP = b"tickwheel-new-group"
"""Header of the answer to a stream request that created a group: the group's fields as JSON."""
_pull = msgspec.json.Decoder(types.PullIn)


async def pull(call: Call) -> None:
    """Answer with up to ``max`` deliveries when the first is available, or with none after
    ``wait_ms``."""
    body = await call.json(_pull)
    checks.integer(body.wait_ms, "wait_ms", 0, call.common.wait_ms_max)
    options = {"lease_ms": body.lease_ms, **_group_settings(body)}
    request = DeliveryRequest(call.path_values["topic"], body.group, body.max, options)
    answer = call.exchange.pull(request, body.wait_ms, pull_answer)
    if not answer.done():
        disconnected = call.client.disconnection()
        await asyncio.wait((answer, disconnected), return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise ClientGone("the client has disconnected")
    await call.answer(answer.result())


async def stream(call: Call) -> None:
    """Send deliveries as server-sent events or lines until the client disconnects."""
    streams = call.common.streams
    number = streams.add(call.exchange)
    try:
        await Stream(call, call.query(types.StreamQuery), number).run()
    finally:
        streams.remove(number)


def _group_settings(request: types.PullIn | types.StreamQuery) -> dict[str, Any]:
    """Return the group settings that a request contains."""
    return {name: getattr(request, name) for name in OF_GROUPS}


class Stream:
    """One stream, which is the sink of its subscription and writes the deliveries."""

    def __init__(self, call: Call, query: types.StreamQuery, number: int) -> None:
        accepted = call.header(b"accept") or ""
        self._call = call
        self._query = query
        self._number = number
        self._topic = call.path_values["topic"]
        self._group = "" if query.broadcast else query.group or DEFAULT_GROUP
        self._is_ndjson = NDJSON in accepted or JSON in accepted
        self._settings = call.exchange.settings
        self._pieces: list[bytes] = []
        self._bytes = 0
        """Bytes of unwritten deliveries."""
        self._is_blocked = False
        self._wake = asyncio.Event()
        self._end: TickwheelError | None = None

    async def run(self) -> None:
        """Write deliveries until the client disconnects or the daemon ends the stream."""
        call = self._call
        new_group = (await self._subscribe()).get("new_group")
        headers = [] if new_group is None else [(NEW_GROUP, as_json(new_group))]
        await call.begin(NDJSON if self._is_ndjson else SSE, headers)
        disconnected = call.client.disconnection()
        disconnected.add_done_callback(lambda _: self._wake.set())
        # Send the head before the first delivery: it tells the client that the stream is open.
        await call.piece(self._keep_alive())
        while not disconnected.done():
            if not self._pieces and self._end is None:
                try:
                    async with asyncio.timeout(call.common.keep_alive_s):
                        await self._wake.wait()
                except TimeoutError:
                    await call.piece_in_time(self._keep_alive())
            self._wake.clear()
            await self._flush()
            if self._end is not None:
                await call.piece(self._end_piece(self._end), more=False)
                return
        raise ClientGone("the client has disconnected")

    async def _subscribe(self) -> dict[str, Any]:
        """Subscribe and return the answer."""
        query, exchange = self._query, self._call.exchange
        options: dict[str, Any] = {"ack": query.ack, **_group_settings(query)}
        if query.lease_ms is not None:
            options["lease_ms"] = query.lease_ms
        if query.broadcast:
            options["broadcast"] = True
        exchange.on_end = self._note_end
        request = DeliveryRequest(self._topic, query.group, query.credit, options)
        answer: dict[str, Any] = await exchange.subscribe(request, self)
        return answer

    # --- called by the shard ---------------------------------------------------------------------

    def deliver(self, epoch: int, now_ms: int, items: Sequence[AnyItem]) -> None:
        pieces = [self._piece(item, epoch, now_ms) for item in items]
        self._pieces += pieces
        self._bytes += sum(map(len, pieces))
        if self._bytes > self._settings.out_bytes_stop and not self._is_blocked:
            self._is_blocked = True
            self._call.exchange.pause()
        self._wake.set()

    def check(self, item: Item) -> None:
        self._piece(item, 0, 0)

    def ended(self, code: str, message: str) -> None:
        self._note_end(BY_CODE.get(code, InternalError)(message))

    def closed(self) -> None:
        """Do nothing: ``run`` already knows that the client has disconnected."""

    # --- writing ---------------------------------------------------------------------------------

    def _note_end(self, error: TickwheelError) -> None:
        self._end = error
        self._wake.set()

    async def _flush(self) -> None:
        while self._pieces:
            pieces, self._pieces = self._pieces, []
            data = b"".join(pieces)
            await self._call.piece_in_time(data)
            self._bytes -= len(data)
            if self._is_blocked and not self._pieces:
                self._is_blocked = False
                if self._end is None:
                    self._call.exchange.resume()

    def _piece(self, item: AnyItem, epoch: int, now_ms: int) -> bytes:
        view = as_json(delivery_view(item, self._topic, self._group, epoch, now_ms, self._number))
        if self._is_ndjson:
            return view + b"\n"
        return b"event: delivery\nid: %d\ndata: %b\n\n" % (_delivered_task(item).id, view)

    def _keep_alive(self) -> bytes:
        return b"\n" if self._is_ndjson else b": still here\n\n"

    def _end_piece(self, error: TickwheelError) -> bytes:
        data = as_json({"error": problem_line(error)})
        return data + b"\n" if self._is_ndjson else b"event: end\ndata: %b\n\n" % data


# --- settlements ---------------------------------------------------------------------------------


GROUPS_MAX = 100
"""Maximum groups in a request that settles deliveries."""


def settlement_handler(verb: str, body: type[types.AckIn], default: str) -> Handler:
    """Return the handler that settles deliveries, which can belong to several groups. It settles
    the deliveries of each group separately and answers with outcomes in the order of the receipts;
    ``default`` is the outcome of receipts for which the shard returns None."""
    decoder = msgspec.json.Decoder(body)
    options = [name for name in body.__struct_fields__ if name != "receipts"]

    async def handle(call: Call) -> None:
        request = await call.json(decoder)
        arguments = tuple(getattr(request, name) for name in options)
        settle = partial(call.exchange.settle, verb, arguments=arguments)
        await call.answer({"results": await _settle_all(call, request.receipts, settle, default)})

    handle.__name__ = verb
    return handle


async def _settle_all(
    call: Call, texts: list[str], settle: Callable[[Sequence[Receipt]], Answer], default: str
) -> list[str]:
    checks.array(tuple(texts), "receipts", call.exchange.limits.ids_per_frame_max)
    if not texts:
        raise BadRequest("receipts has 0 elements; the minimum is 1")
    receipts = [read_receipt(text, f"receipts[{i}]") for i, text in enumerate(texts)]
    groups: dict[tuple[str, str, int], list[int]] = {}
    for index, receipt in enumerate(receipts):
        groups.setdefault((receipt.topic, receipt.group, receipt.epoch), []).append(index)
    if len(groups) > GROUPS_MAX:
        raise BadRequest(
            f"the receipts belong to {len(groups)} groups; the limit is {GROUPS_MAX} for a request"
        )
    answers = [settle([receipts[index] for index in indexes]) for indexes in groups.values()]
    # Anyone can forge a receipt. It shows that a stream's consumer is alive only after the rights
    # were checked, and only for a stream of the same principal.
    ids, principal = [receipt.id for receipt in receipts], call.exchange.caller.principal
    for number in {receipt.stream for receipt in receipts} - {0}:
        call.common.streams.note_activity(number, principal, ids)
    outcomes = [default] * len(receipts)
    for indexes, results in zip(groups.values(), await asyncio.gather(*answers), strict=True):
        for index, outcome in zip(indexes, results or (), strict=False):
            outcomes[index] = outcome or default
    return outcomes
