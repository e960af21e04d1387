"""The interface between an HTTP handler and the shard, or all shards, that execute its request.

``Exchange`` has one method for each kind of request. ``ShardExchange`` calls the operations of the
shard in this process; ``AllShardsExchange`` (``tickwheel/gateway.py``) is a client of all shards.
Handlers do not know which of them they use. Invariants:

* A method returns a future, or immediately raises the error of an invalid request.
* ``render`` converts a value to the answer as soon as the shard returns the value, so that the size
  of an answer that waits for the store is known.
* When the daemon ends an exchange, all its futures fail with the reason.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence, Sized
from typing import TYPE_CHECKING, Any, NamedTuple

from tickwheel.errors import (
    BY_CODE,
    InternalError,
    NotFound,
    OutcomeUnknown,
    Overloaded,
    TickwheelError,
)
from tickwheel.model.records import DEFAULT_GROUP
from tickwheel.server.shard.callers import Call, Caller, Principal

if TYPE_CHECKING:
    from tickwheel.api.shapes import Request
    from tickwheel.clock import Clock
    from tickwheel.engine.sessions import StoredAnswer
    from tickwheel.engine.topics import DeliverySink, Item
    from tickwheel.limits import Limits
    from tickwheel.server.http.types import RequestIdentity
    from tickwheel.server.settings import Settings
    from tickwheel.server.shard.operations import ShardInterface
    from tickwheel.server.shard.verbs import Verbs

Render = Callable[[Any], Any]
RenderPull = Callable[[Sequence[tuple[Any, str, str, int, int]], "dict[str, Any] | None"], bytes]
"""Encodes the answer to a pull. The arguments are the item, topic, group, epoch and time of each
delivery, and the fields of the group if the pull created it."""
Answer = asyncio.Future[Any]
ANSWER_BYTES = 256
"""Bytes that a small answer counts while it is not yet encoded."""
_SUBSCRIPTION = 1
"""The number of the only subscription of a stream's exchange."""


class Receipt(NamedTuple):
    """Identifies a delivery when it is settled."""

    topic: str
    group: str
    id: int
    epoch: int
    attempt: int
    stream: int
    """Number of the stream that sent the delivery; 0 for a pull."""


_BY_COLUMNS = ("ack", "release", "extend")
"""Verbs whose frames have an array of ids and an array of attempts. Frames of other verbs have one
item for each delivery."""


def settle_fields(
    verb: str, receipts: Sequence[Receipt], arguments: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Return the frame fields of a verb that settles deliveries of one topic, group and epoch."""
    first = receipts[0]
    if verb in _BY_COLUMNS:
        ids, attempts = zip(*((receipt.id, receipt.attempt) for receipt in receipts), strict=True)
        return first.topic, first.group, first.epoch, ids, attempts, *arguments
    items = tuple((receipt.id, receipt.epoch, receipt.attempt, *arguments) for receipt in receipts)
    return first.topic, first.group, items


class DeliveryRequest(NamedTuple):
    """The deliveries that a pull or a stream requests."""

    topic: str
    group: str | None
    limit: int
    """Maximum deliveries of a pull, or the credit of a stream."""
    options: dict[str, Any]
    """Options in wire form. An option whose value is None is not set."""


class Exchange(ABC):
    """The execution of one HTTP request, with the operations that its handler can call."""

    settings: Settings
    limits: Limits
    clock: Clock

    def __init__(self, caller: Caller) -> None:
        self.caller = caller
        caller.name = "http"
        self.ended: TickwheelError | None = None
        self.on_end: Callable[[TickwheelError], None] | None = None
        """Called with the reason when the daemon ends the exchange."""

    @property
    def only_waits(self) -> bool:
        """Whether the request only waits for tasks or events. Ending it then leaves no outcome
        unknown."""
        return self.on_end is not None

    def end(self, error: TickwheelError) -> None:
        """End the exchange with ``error``, because the daemon can no longer execute it. What it has
        begun to execute has an unknown outcome, unless it only waits."""
        unknown = OutcomeUnknown(f"{error.message}; resend the request to learn its outcome")
        outcome, self.ended = error if self.only_waits else unknown, error
        for future in self.unanswered():
            if not future.done():
                future.set_exception(outcome)
        if self.on_end is not None:
            self.on_end(error)

    @abstractmethod
    def unanswered(self) -> Sequence[Answer]:
        """Remove and return the futures without an answer."""

    # --- requests of handlers --------------------------------------------------------------------

    @abstractmethod
    def ask(self, verb: str, request: Request, render: Render | None = None) -> Answer:
        """Execute a declared verb. ``render`` converts the verb's result to the answer."""

    @abstractmethod
    def enqueue(self, tasks: tuple[Any, ...]) -> Answer:
        """Enqueue all tasks or none."""

    @abstractmethod
    def enqueue_each(self, tasks: tuple[Any, ...]) -> Answer:
        """Enqueue tasks, each independently of the others. The answer is that of ``enqueue``, or,
        if some tasks are refused, a list with the answer or the error of each task."""

    @abstractmethod
    def enqueue_once(self, identity: RequestIdentity, tasks: tuple[Any, ...]) -> Answer:
        """Enqueue tasks unless a request with the same identity has already enqueued them."""

    @abstractmethod
    def prepare(
        self, name: str, group: str, part: int, tasks: tuple[Any, ...], options: dict[str, Any]
    ) -> Answer:
        """Store half tasks of a transaction."""

    @abstractmethod
    def pull(self, request: DeliveryRequest, wait_ms: int, render: RenderPull) -> Answer:
        """Wait for the first delivery and return all available deliveries, up to the limit."""

    @abstractmethod
    def subscribe(self, request: DeliveryRequest, sink: DeliverySink) -> Answer:
        """Subscribe, and send deliveries to ``sink`` until the exchange is closed."""

    @abstractmethod
    def pause(self) -> None:
        """Stop the deliveries of a stream that its client does not read, until ``resume``."""

    @abstractmethod
    def resume(self) -> None:
        """Resume the deliveries of a stream."""

    @abstractmethod
    def settle(self, verb: str, receipts: Sequence[Receipt], arguments: tuple[Any, ...]) -> Answer:
        """Settle deliveries of one topic, group and epoch. The answer contains the outcome of each
        delivery, or None for the usual outcome. The answer None means the usual outcome for all."""

    # --- lifecycle -------------------------------------------------------------------------------

    @abstractmethod
    def note_activity(self, ids: Iterable[int]) -> None:
        """Record that the stream's consumer is alive: it has settled or extended deliveries of
        these tasks."""

    @abstractmethod
    def unreadable(self, verb: str, error: TickwheelError) -> None:
        """Record a request whose values the verb does not accept."""

    @abstractmethod
    def survive(self, what: str, error: Exception) -> TickwheelError:
        """Log an unexpected error and return the error for the client."""

    @abstractmethod
    def finish(self) -> None:
        """End an exchange that was answered. Leases that it granted continue."""

    @abstractmethod
    def close(self, reason: str = "") -> None:
        """End an exchange whose client has disconnected. ``reason`` tells how it did."""


class _RenderedAnswer:
    """An answer that can wait until the store has committed."""

    __slots__ = ("request", "value")

    def __init__(self, request: int, value: Any) -> None:
        self.request = request
        self.value = value

    def __len__(self) -> int:
        if isinstance(self.value, bytes):
            return len(self.value)
        return ANSWER_BYTES + (64 * len(self.value) if isinstance(self.value, list) else 0)


class ShardExchange(Exchange):
    """An exchange with the shard in this process. It is the ``ReplySink`` of its caller."""

    def __init__(
        self, operations: ShardInterface, verbs: Verbs, principal: Principal, address: str
    ) -> None:
        """``verbs`` are the operations as this principal may call them."""
        super().__init__(Caller(self, principal=principal, address=address))
        self._operations, self._verbs = operations, verbs
        self.settings, self.limits = operations.settings, operations.limits
        self.clock = operations.clock
        self._waiting: dict[int, tuple[Answer, Render | None]] = {}
        self._number = 0
        operations.opened(self.caller)

    @property
    def only_waits(self) -> bool:
        return bool(self.caller.pulls or self.caller.subscribers) or super().only_waits

    def unanswered(self) -> Sequence[Answer]:
        waiting, self._waiting = self._waiting, {}
        return [future for future, _ in waiting.values()]

    # --- requests of handlers --------------------------------------------------------------------

    def ask(self, verb: str, request: Request, render: Render | None = None) -> Answer:
        act, caller, now = getattr(self._verbs, verb), self.caller, self.clock.read()
        return self._act(lambda number: act(Call(caller, number, request, now)), render)

    def enqueue(self, tasks: tuple[Any, ...]) -> Answer:
        enqueue, caller, now = self._verbs.enqueue, self.caller, self.clock.read()
        return self._act(lambda number: enqueue(caller, number, 0, tasks, now))

    def enqueue_each(self, tasks: tuple[Any, ...]) -> Answer:
        try:
            return self.enqueue(tasks)
        except TickwheelError as error:
            if len(tasks) == 1 or error.retryable:
                raise
        return asyncio.gather(*map(self._enqueue_alone, tasks), return_exceptions=True)

    def _enqueue_alone(self, task: Any) -> Answer:
        try:
            return self.enqueue((task,))
        except TickwheelError as error:
            refused: Answer = asyncio.get_running_loop().create_future()
            refused.set_exception(error)
            return refused

    def enqueue_once(self, identity: RequestIdentity, tasks: tuple[Any, ...]) -> Answer:
        act, now = self._verbs.enqueue_once, self.clock.read()
        return self._act(
            lambda number: act(self.caller, identity.session, number, tasks, now),
            number=identity.fingerprint,
        )

    def prepare(
        self, name: str, group: str, part: int, tasks: tuple[Any, ...], options: dict[str, Any]
    ) -> Answer:
        act, now = self._verbs.prepare, self.clock.read()
        return self._act(
            lambda number: act(self.caller, number, name, group, part, tasks, options, now)
        )

    def pull(self, request: DeliveryRequest, wait_ms: int, render: RenderPull) -> Answer:
        sink = _PullSink(self, request.topic, request.group or DEFAULT_GROUP, render)
        act, now = self._verbs.pull, self.clock.read()

        def pull(number: int) -> None:
            sink.number = number
            act(
                self.caller, number, request.topic, request.group, request.limit, wait_ms,
                request.options, sink, now, sink.note_group,
            )  # fmt: skip

        return self._act(pull, lambda nothing: render([], sink.new_group))

    def subscribe(self, request: DeliveryRequest, sink: DeliverySink) -> Answer:
        act, now = self._verbs.subscribe, self.clock.read()
        return self._act(
            lambda number: act(
                self.caller, number, _SUBSCRIPTION, request.topic, request.group, request.limit,
                request.options, sink, now,
            )
        )  # fmt: skip

    def pause(self) -> None:
        self._operations.blocked(self.caller)

    def resume(self) -> None:
        self._operations.unblocked(self.caller)

    def settle(self, verb: str, receipts: Sequence[Receipt], arguments: tuple[Any, ...]) -> Answer:
        act, fields = getattr(self._verbs, verb), settle_fields(verb, receipts, arguments)
        if verb != "ack":  # every other verb takes the current time
            fields = (*fields, self.clock.read())
        return self._act(lambda number: act(self.caller, number, *fields))

    def _act(
        self,
        act: Callable[[int], None],
        render: Render | None = None,
        number: int | None = None,
    ) -> Answer:
        """Call an operation with a request number. Return the future of its answer, which
        ``render`` converts, or of its error. Raise the operation's error."""
        operations = self._operations
        if self.ended is not None:
            raise self.ended
        if operations.is_behind(self.caller):
            raise Overloaded(
                "answers that wait for the store have reached the limit of"
                f" {self.settings.replies_all_bytes_max} bytes (replies_all_bytes_max)"
            )
        if number is None:
            number = self._number = self._number + 1
        future: Answer = asyncio.get_running_loop().create_future()
        self._waiting[number] = (future, render)
        operations.begin()
        try:
            act(number)
        except Exception as error:
            del self._waiting[number]
            if isinstance(error, TickwheelError):
                raise
            source = f"a request over HTTP from {self.caller.address}"
            raise operations.contain(source, error) from error
        finally:
            operations.handled()
        return future

    # --- lifecycle -------------------------------------------------------------------------------

    def note_activity(self, ids: Iterable[int]) -> None:
        if self.caller.presence.doubted:
            self._operations.heard(self.caller)

    def unreadable(self, verb: str, error: TickwheelError) -> None:
        self._verbs.unreadable(self.caller, verb, error)

    def survive(self, what: str, error: Exception) -> TickwheelError:
        return self._operations.survive(what, error)

    def finish(self) -> None:
        self._operations.finished(self.caller)

    def close(self, reason: str = "") -> None:
        # The consumer of an answered pull is not tied to a connection.
        self._operations.closed(self.caller, reason if self.caller.subscribers else "")

    # --- called by the shard ---------------------------------------------------------------------

    @property
    def label(self) -> str:
        return self.caller.label

    def accepted(self, answers: Sequence[StoredAnswer]) -> None:
        for request, first, count, accepted_ms in answers:
            self.answer(request, (accepted_ms, first, count))

    def answer_to(self, request: int, value: object) -> Sized:
        _, render = self._waiting.get(request, (None, None))
        if render is None:
            return _RenderedAnswer(request, value)
        try:
            return _RenderedAnswer(request, render(value))
        except Exception as error:
            source = f"the answer to a request over HTTP from {self.caller.address}"
            return _RenderedAnswer(request, self.survive(source, error))

    def give(self, answer: Any) -> None:
        self.answer(answer.request, answer.value)

    def error(self, request: int, code: str, message: str) -> None:
        self.answer(request, BY_CODE.get(code, InternalError)(message))

    def flush(self) -> None:
        """Do nothing: answers are not buffered."""

    def answer(self, request: int, value: object) -> None:
        """Complete the future of a request's answer with a value or an error."""
        future, _ = self._waiting.pop(request, (None, None))
        if future is None or future.done():
            return
        if isinstance(value, TickwheelError):
            future.set_exception(value)
        else:
            future.set_result(value)


class _PullSink:
    """A sink that answers a pull with its deliveries."""

    def __init__(self, exchange: ShardExchange, topic: str, group: str, render: RenderPull) -> None:
        self._exchange = exchange
        self._render = render
        self._names = topic, group
        self.number = 0
        """Request number of the pull."""
        self.new_group: dict[str, Any] | None = None

    def note_group(self, new_group: dict[str, Any] | None) -> None:
        self.new_group = new_group

    def deliver(self, epoch: int, now_ms: int, items: Sequence[Item]) -> None:
        self._exchange.answer(self.number, self._answer(epoch, now_ms, items))

    def _answer(self, epoch: int, now_ms: int, items: Sequence[Item]) -> bytes:
        return self._render([(item, *self._names, epoch, now_ms) for item in items], self.new_group)

    def check(self, item: Item) -> None:
        self._answer(0, 0, [item])

    def ended(self, code: str, message: str) -> None:
        self._exchange.caller.refuse(self.number, NotFound(message))

    def closed(self) -> None:
        """Do nothing: a pull has nothing to stop."""
