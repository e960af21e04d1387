"""Clients of our own programs, which need more of a client than its verbs.

``LinkedClient`` lets its program decide how it connects (``embedded``, the test wheel). With
``WireClient`` a program passes on the requests of others, in wire form (``tickwheel/gateway.py``).
``NumberedClient`` continues the session of an earlier process (``tickwheel/inbox/``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tickwheel.api.frames import FrameType
from tickwheel.api.kinds import ID
from tickwheel.api.tasks import has_window, indexes_by_shard, rest_key
from tickwheel.api.verb import Routing
from tickwheel.api.verbs import VERBS
from tickwheel.client.client import Client
from tickwheel.client.merging import ask_in_parts, status_of
from tickwheel.client.producer import Partly, outcomes_of
from tickwheel.client.requests import raise_first
from tickwheel.client.shards import AWAY, checked_basis
from tickwheel.client.tasks import merged_receipts, receipts, size_of
from tickwheel.errors import TickwheelError
from tickwheel.model.values import shard_of

if TYPE_CHECKING:
    import ssl

    from tickwheel.api.groups import MadeGroup
    from tickwheel.api.shapes import Request
    from tickwheel.api.verb import Verb
    from tickwheel.client.connection import Open
    from tickwheel.client.delivery import Delivery
    from tickwheel.client.encodings import Codec
    from tickwheel.client.link import Link
    from tickwheel.client.subscription import SubscribeOptions, Subscription
    from tickwheel.client.tasks import Receipt, WireTask
    from tickwheel.limits import Limits

OTHER_NUMBERS = 2**52
"""Numbers of a ``NumberedClient``'s frames, except its enqueues, which have lower numbers."""
STATUS_S = 2.0
"""Seconds that a shard has to report its status."""


class LinkedClient(Client):
    """A client whose program decides how it connects."""

    def __init__(
        self,
        url: str,
        *,
        open_to: Open | None = None,
        tls: ssl.SSLContext | None = None,
        codec: Codec | None = None,
        pauses: bool = True,
        **options: Any,
    ) -> None:
        """``open_to`` opens a connection to an address. ``tls`` is the context of its connections,
        or None for plain TCP. ``codec`` encodes bodies. ``pauses``: whether it waits between two
        attempts to connect. ``options`` are those of ``Client``."""
        super().__init__(url, **options)
        if open_to is not None:
            self._options.open_to = open_to
        self._options.tls = tls
        if codec is not None:
            self._use(codec)
        self._pauses = pauses
        self._failure: TickwheelError | None = None

    def _ready(self) -> None:
        if self._failure is not None:
            raise type(self._failure)(self._failure.message)
        super()._ready()

    def _begin(self) -> None:
        super()._begin()
        if not self._pauses:
            self._reconnector.omit_pauses()

    async def fail(self, error: TickwheelError) -> None:
        """Make waiting and further calls raise ``error``."""
        self._failure = error
        if self._state == "open":
            await self._reconnector.stop(error)

    @property
    def is_new(self) -> bool:
        """Whether it has not begun to connect."""
        return self._state == "new"

    @property
    def is_asking(self) -> bool:
        """Whether a request waits to be sent or answered."""
        return self._state == "open" and self._reconnector.is_asking

    async def wait_connected(self, timeout_s: float) -> None:
        """Wait until the client is connected again, if it has ever connected. Raise Unreachable."""
        if self._state == "open":
            await self._reconnector.wait_up(timeout_s)


class WireClient(LinkedClient):
    """A client that takes and returns values in wire form. It passes refusals on at once."""

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__(url, **options)
        self._options.retries_refusals = False

    def checked_size(self, tasks: tuple[Any, ...]) -> int:
        """Return the maximum bytes that the tasks take in a frame. A subclass may refuse them."""
        return size_of(tasks)

    async def execute(self, verb: Verb, request: Request) -> Any:
        """Return the answer to a declared verb."""
        values = request.values()
        shards = await self._know_shards()
        if verb.name == "preview_bulk":
            return await self._whole_preview(values)
        fields = verb.request_type.to_frame(values)
        if shards is not None and verb.routing is Routing.PAGES:
            return await shards.page(verb, values, None)
        return await self._call(verb, fields, None)

    async def fetch_status(self) -> Any:
        """Return the combined status of all shards. Raise Unreachable if no shard answers."""
        shards, verb = await self._know_shards(), VERBS["status"]
        until_s = asyncio.get_running_loop().time() + STATUS_S
        for link in self._links:
            link.ready()
        calls = (link.call(verb, (), until_s) for link in self._links)
        results: list[Any] = await asyncio.gather(*calls, return_exceptions=True)
        raise_first([result for result in results if not isinstance(result, AWAY)])
        answers = [result for result in results if not isinstance(result, BaseException)]
        if not answers or shards is None:
            raise_first(results)
            return answers[0]
        return status_of(results, answers[0]["shards"])

    async def _whole_preview(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return a dry run of a whole bulk operation: a page of it cannot span several shards."""
        values = {name: values[name] for name in values if name not in ("after", "until_id")}
        total = await self._preview(values, None)
        return {field.name: getattr(total, field.name) for field in total.fields()} | {"next": None}

    async def put(self, tasks: tuple[Any, ...]) -> tuple[Any, ...]:
        """Enqueue tasks. The answer has an outcome for each task, as for an ENQUEUE with rules."""
        producer = await self._know_shards() or self._link.producer
        size = self.checked_size(tasks)
        if producer.is_full:
            await producer.wait_room()
        is_ruled = any(len(task) == 4 and "if_pending" in task[3] for task in tasks)
        return _stored(await producer.put(list(tasks), len(tasks), size, is_ruled=is_ruled))

    async def put_each(self, tasks: tuple[Any, ...]) -> tuple[Any, ...] | list[Any]:
        """Enqueue tasks, each independently of the others. Return the answer of ``put``, or, when
        some are refused, a list with the answer or the error of each task."""
        try:
            return await self.put(tasks)
        except TickwheelError as error:
            if len(tasks) == 1 or (error.retryable and not isinstance(error, Partly)):
                raise
            ends: list[Any] = error.receipts if isinstance(error, Partly) else [error] * len(tasks)
        ends = [end if isinstance(end, TickwheelError) else _stored([end]) for end in ends]
        # The daemon refuses a whole frame because of one task, so the others are sent again.
        again = [
            index
            for index, end in enumerate(ends)
            if isinstance(end, TickwheelError) and not end.retryable
        ]
        answers = (self.put((tasks[index],)) for index in again)
        for index, answer in zip(
            again, await asyncio.gather(*answers, return_exceptions=True), strict=True
        ):
            ends[index] = answer
        return ends

    async def put_once(self, key: bytes, fingerprint: int, tasks: Any) -> tuple[Any, ...]:
        """Enqueue tasks under an idempotency key. The key's home shard is asked first even if none
        of the tasks belongs there: it knows of earlier requests with the key, whichever shards
        their tasks went to. Each shard remembers its part of the request."""
        shards = await self._know_shards()
        self.checked_size(tasks)
        if shards is not None:
            for task in tasks:
                checked_basis(task[3] if len(task) == 4 else {})
        return _stored(await self._put_once(key, fingerprint, tasks))

    async def _put_once(
        self, key: bytes, fingerprint: int, tasks: Sequence[Any]
    ) -> Sequence[Receipt]:
        links = self._links
        parts, home = indexes_by_shard(tasks, key, len(links)), shard_of(key.hex(), len(links))

        async def put(shard: int) -> Sequence[Receipt] | dict[str, Any]:
            part = [tasks[index] for index in parts.get(shard, ())]
            return await self._put_once_at(links[shard], key, fingerprint, part)

        async def ask(shard: int, indexes: Sequence[int]) -> Any:
            return at_home if shard == home else await put(shard)

        at_home = await put(home)
        if not isinstance(at_home, dict):
            return await ask_in_parts(parts, ask)
        # The request was first sent when the store had other shards. Tasks that these did not take
        # are enqueued now, under a key derived from this one, which prevents duplicates as well.
        by_index = self._former_receipts(at_home, key, tasks)
        missing = [index for index in range(len(tasks)) if index not in by_index]
        if missing:
            part = [tasks[index] for index in missing]
            added = await self._put_once(rest_key(key), fingerprint, part)
            by_index |= zip(missing, added, strict=True)
        return [by_index[index] for index in range(len(tasks))]

    def _former_receipts(
        self, before: dict[str, Any], key: bytes, tasks: Sequence[Any]
    ) -> dict[int, Receipt]:
        """Return the receipts of the tasks that former shards took, by their indexes."""
        levels_ms, by_index = self._reconnector.delay_levels_ms, {}
        parts = indexes_by_shard(tasks, key, before["shards"])
        for shard, accepted_ms, ids, outcomes in before["parts"]:
            indexes = parts.get(shard, [])
            plain = receipts([tasks[index] for index in indexes], ids, accepted_ms, levels_ms)
            for index, receipt, (outcome, due_ms) in zip(indexes, plain, outcomes, strict=True):
                if due_ms is None and not has_window(tasks[index]):
                    due_ms = receipt.due_ms
                by_index[index] = receipt._replace(due_ms=due_ms, outcome=outcome)
        return by_index

    async def _put_once_at(
        self, link: Link, key: bytes, fingerprint: int, tasks: Any
    ) -> list[Receipt] | dict[str, Any]:
        """Enqueue the link's part of a request under an idempotency key. Return its receipts, or
        the answers of former shards to the whole request."""
        accepted_ms, ids, *rest = await link.ask(FrameType.ENQUEUE_ONCE, key, fingerprint, tasks)
        details = rest[0] if rest else {}
        if "before" in details:
            return dict(details["before"])
        if "outcomes" in details:
            return merged_receipts(ids, details["outcomes"])
        stored = receipts(tasks, ids, accepted_ms, self._reconnector.delay_levels_ms)
        if "dues_ms" in details:  # None for a task that has ended since
            return [
                receipt._replace(due_ms=due_ms)
                for receipt, due_ms in zip(stored, details["dues_ms"], strict=True)
            ]
        return stored

    async def prepare(self, name: str, group: str, part: int, tasks: Any, options: Any) -> Any:
        """Store half tasks in the shard for which the transaction's name is claimed."""
        shards = await self._know_shards()
        self.checked_size(tasks)
        home = self._link
        if shards is not None:
            home, claim = await shards.link_of_transaction(None, name, tasks, None)
            options = {**options, "claim": claim} if claim else options
        return await home.ask(FrameType.PREPARE, name, group, part, tasks, options)

    async def take(
        self, topic: str, group: str, count: int, wait_ms: int, options: dict[str, Any],
        on_new_group: Callable[[MadeGroup], None],
    ) -> list[Delivery]:  # fmt: skip
        """Wait for the first delivery and return up to ``count``. ``on_new_group`` is called for
        each group that the pull creates."""
        target = await self._know_shards() or self._link
        return await target.pull((topic, group), count, wait_ms, options, None, on_new_group)

    async def settle(
        self, verb: str, ids: Sequence[int],
        fields_of: Callable[[Sequence[int]], tuple[Any, ...]],
    ) -> list[str | None]:  # fmt: skip
        """Return the outcome of each delivery of the tasks ``ids``; None is the usual outcome.
        ``fields_of`` returns the frame's fields for the deliveries with the given indexes."""
        frame = VERBS[verb].frame
        assert frame is not None
        shards, parts = await self._know_shards(), dict[int, list[int]]()
        links = self._links
        for index, task_id in enumerate(ids):
            for shard in (0,) if shards is None else shards.shards_of(task_id):
                parts.setdefault(shard, []).append(index)

        async def ask(shard: int, indexes: Sequence[int]) -> Sequence[str | None]:
            return await links[shard].ask(frame, *fields_of(indexes)) or [None] * len(indexes)

        return await ask_in_parts(parts, ask)

    def new_subscription(
        self, options: SubscribeOptions, prefetch: int, bytes_max: int
    ) -> Subscription:
        """Return a subscription that is not yet started. ``bytes_max``: bytes of buffered bodies at
        which the shards stop sending."""
        self._ready()
        subscriptions = self._link.subscriptions
        subscriptions.buffer_bytes_max = bytes_max
        return subscriptions.make(options, prefetch)


class NumberedClient(Client):
    """A client whose program stores its session and the numbers of its enqueues, so that another
    process can repeat an enqueue, with the same session, number and tasks, and get its outcome
    (``tickwheel/inbox/taker.py``)."""

    def __init__(self, url: str | None, session: bytes, **options: Any) -> None:
        super().__init__(url, **options)
        self._options.session = session
        self._options.first_number = OTHER_NUMBERS

    @property
    def limits(self) -> Limits:
        """The limits of the connected daemon."""
        return self._checker.limits

    async def count_shards(self) -> int:
        """Return the number of shards, once connected."""
        await self._know_shards()
        return len(self._links)

    async def ack(
        self, topic: Any, group: Any, epoch: Any, task_id: Any, attempt: Any
    ) -> str | None:
        """Acknowledge a delivery of any consumer. Return its outcome; None: "acked". Raise
        BadRequest."""
        shards, links = await self._know_shards(), self._links
        ID.check(task_id, "id", self.limits)
        homes = (0,) if shards is None else shards.shards_of(task_id)
        asking = (
            links[shard].ask(FrameType.ACK, topic, group, epoch, (task_id,), (attempt,))
            for shard in homes
        )
        words = [(answer or [None])[0] for answer in await asyncio.gather(*asking)]
        return None if None in words else str(words[0])

    async def put_numbered(
        self, number: int, tasks: Sequence[WireTask]
    ) -> list[Receipt | TickwheelError]:
        """Enqueue tasks that fit a frame, and wait for the outcome however long it takes. Each
        shard takes its part completely or not at all. Return the receipt of each task, or the error
        of its part."""
        shards, links = await self._know_shards(), self._links
        parts = {0: list(range(len(tasks)))}
        if shards is not None:
            session = self._options.session or b""
            parts = indexes_by_shard(tasks, session + number.to_bytes(8), len(links))

        async def ask(shard: int, indexes: Sequence[int]) -> Sequence[Any]:
            link = links[shard]
            part = [tasks[index] for index in indexes]
            try:
                link.ready()
                await link.connect()
                future = link.producer.put_numbered(part, size_of(part), number)
            except TickwheelError as error:
                return [error] * len(part)
            await asyncio.wait((future,))
            return outcomes_of(future, len(part))

        ends = await asyncio.gather(*(ask(*part) for part in parts.items()))
        by_index: dict[int, Receipt | TickwheelError] = {}
        for indexes, outcomes in zip(parts.values(), ends, strict=True):
            by_index.update(zip(indexes, outcomes, strict=True))
        return [by_index[index] for index in range(len(tasks))]


def _stored(task_receipts: Sequence[Receipt]) -> tuple[Any, ...]:
    """Return the answer to an ENQUEUE with rules, which has an outcome for each task."""
    outcomes = [(receipt.outcome, receipt.due_ms) for receipt in task_receipts]
    return 0, [receipt.id for receipt in task_receipts], {"outcomes": outcomes}
