"""One request as the handlers of HTTP see those whom it asks: one shard, or all shards together.

``Exchange`` is that interface, with one method for each way of asking; ``OfShard`` asks the
operations of the shard in this process, and ``OfAll`` (``tickwheel/gateway.py``) all shards as a
client does. Handlers know neither. Invariants:

* A method returns a future, or raises what is wrong with the request at once.
* An answer is made of a value in the step in which the shard gives it, by ``render``, so that what
  waits for the store is no larger than it says.
* An exchange that the daemon ends answers nothing any more: each future has the reason.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence, Sized
from typing import TYPE_CHECKING, Any, NamedTuple

from tickwheel.errors import BY_CODE, InternalError, NotFound, Overloaded, TickwheelError
from tickwheel.model.records import DEFAULT_GROUP
from tickwheel.server.shard.callers import Ask, Caller, Principal

if TYPE_CHECKING:
    from tickwheel.api.shapes import Request
    from tickwheel.clock import Clock
    from tickwheel.engine.sessions import StoredAnswer
    from tickwheel.engine.topics import DeliverySink, Item
    from tickwheel.limits import Limits
    from tickwheel.server.http.types import Once
    from tickwheel.server.settings import Settings
    from tickwheel.server.shard.operations import Conversing
    from tickwheel.server.shard.verbs import Verbs

Render = Callable[[Any], Any]
Pulled = Callable[[Sequence[tuple[Any, str, str, int, int]], "dict[str, Any] | None"], bytes]
"""Makes the answer to a pull: of each delivery its item, topic, group, epoch and time; and what
there is to say of the group if the pull made it."""
Answer = asyncio.Future[Any]
ANSWER_BYTES = 256
"""Bytes that are counted for an answer that is not bytes yet: a few words."""
_SUBSCRIPTION = 1
"""The number of the only subscription of a stream's exchange."""


class Receipt(NamedTuple):
    """What names a delivery when it is settled."""

    topic: str
    group: str
    id: int
    epoch: int
    attempt: int
    stream: int
    """The stream that the delivery came from; 0: it came from a pull."""


_BY_COLUMNS = ("ack", "release", "extend")
"""Verbs that take ids and attempts apart; others take an item for each delivery."""


def settled_fields(verb: str, some: Sequence[Receipt], more: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return what a verb takes that settles deliveries of one topic, group and epoch, in the order
    of its frame."""
    one = some[0]
    if verb in _BY_COLUMNS:
        ids, attempts = tuple(it.id for it in some), tuple(it.attempt for it in some)
        return one.topic, one.group, one.epoch, ids, attempts, *more
    return one.topic, one.group, tuple((it.id, it.epoch, it.attempt, *more) for it in some)


class Wish(NamedTuple):
    """The deliveries that a pull or a stream asks for."""

    topic: str
    group: str | None
    most: int
    """How many deliveries the pull takes at most; the credit of a stream."""
    options: dict[str, Any]
    """In the form of the wire; None: left out."""


class Exchange(ABC):
    """One request over HTTP, and what its handler may ask."""

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
        """Whether the request waits for tasks or news only: its end leaves nothing in doubt."""
        return self.on_end is not None

    def end(self, error: TickwheelError) -> None:
        """End the exchange: the daemon does not serve it any more."""
        self.ended = error
        for future in self._unanswered():
            if not future.done():
                future.set_exception(error)
        if self.on_end is not None:
            self.on_end(error)

    @abstractmethod
    def _unanswered(self) -> Sequence[Answer]:
        """Take the futures that have no answer yet."""

    # --- what handlers ask -----------------------------------------------------------------------

    @abstractmethod
    def ask(self, verb: str, request: Request, render: Render | None = None) -> Answer:
        """Ask a declared verb; ``render`` makes the answer of its value."""

    @abstractmethod
    def enqueue(self, tasks: tuple[Any, ...]) -> Answer:
        """Enqueue tasks, all or none."""

    @abstractmethod
    def enqueue_each(self, tasks: tuple[Any, ...]) -> Answer:
        """Enqueue tasks, each of them taken or refused for itself. The answer is that of
        ``enqueue``; where some are refused, the list of the answer or the error of each."""

    @abstractmethod
    def enqueue_once(self, once: Once, tasks: tuple[Any, ...]) -> Answer:
        """Enqueue tasks unless the same request has done so."""

    @abstractmethod
    def prepare(
        self, name: str, group: str, part: int, tasks: tuple[Any, ...], options: dict[str, Any]
    ) -> Answer:
        """Keep half tasks of a transaction."""

    @abstractmethod
    def pull(self, wish: Wish, wait_ms: int, render: Pulled) -> Answer:
        """Take deliveries as soon as there is one."""

    @abstractmethod
    def subscribe(self, wish: Wish, sink: DeliverySink) -> Answer:
        """Send deliveries to ``sink`` until the exchange is closed."""

    @abstractmethod
    def blocked(self) -> None:
        """Stop deliveries to a stream that nobody reads, until ``unblocked``."""

    @abstractmethod
    def unblocked(self) -> None:
        """Let deliveries go on."""

    @abstractmethod
    def settle(self, verb: str, receipts: Sequence[Receipt], more: tuple[Any, ...]) -> Answer:
        """Settle deliveries of one topic, group and epoch. The answer has a word for each, or None
        for the usual one; None: the usual one for all."""

    # --- its life --------------------------------------------------------------------------------

    @abstractmethod
    def heard(self) -> None:
        """Take note of a sign of life of the stream's consumer."""

    @abstractmethod
    def unreadable(self, verb: str, error: TickwheelError) -> None:
        """Take note of a request whose values are not what the verb takes."""

    @abstractmethod
    def survive(self, what: str, error: Exception) -> TickwheelError:
        """Log an unexpected error and return the answer that stands for it."""

    @abstractmethod
    def finished(self) -> None:
        """End an exchange that was answered: leases that it gave go on."""

    @abstractmethod
    def closed(self, broke: str = "") -> None:
        """End an exchange that nobody waits for; ``broke``: how its connection did."""


class _Rendered:
    """An answer that may wait for the store."""

    __slots__ = ("request", "value")

    def __init__(self, request: int, value: Any) -> None:
        self.request = request
        self.value = value

    def __len__(self) -> int:
        if isinstance(self.value, bytes):
            return len(self.value)
        return ANSWER_BYTES + (64 * len(self.value) if isinstance(self.value, list) else 0)


class OfShard(Exchange):
    """An exchange with the shard in this process: the ``ReplySink`` of its caller."""

    def __init__(
        self, operations: Conversing, verbs: Verbs, principal: Principal, address: str
    ) -> None:
        """``verbs``: those of the principal."""
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

    def _unanswered(self) -> Sequence[Answer]:
        waiting, self._waiting = self._waiting, {}
        return [future for future, _ in waiting.values()]

    # --- what handlers ask -----------------------------------------------------------------------

    def ask(self, verb: str, request: Request, render: Render | None = None) -> Answer:
        act, caller, now = getattr(self._verbs, verb), self.caller, self.clock.read()
        return self._act(lambda number: act(Ask(caller, number, request, now)), render)

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

    def enqueue_once(self, once: Once, tasks: tuple[Any, ...]) -> Answer:
        act, now = self._verbs.enqueue_once, self.clock.read()
        return self._act(
            lambda number: act(self.caller, once.session, number, tasks, now),
            number=once.fingerprint,
        )

    def prepare(
        self, name: str, group: str, part: int, tasks: tuple[Any, ...], options: dict[str, Any]
    ) -> Answer:
        act, now = self._verbs.prepare, self.clock.read()
        return self._act(
            lambda number: act(self.caller, number, name, group, part, tasks, options, now)
        )

    def pull(self, wish: Wish, wait_ms: int, render: Pulled) -> Answer:
        sink = _PullSink(self, wish.topic, wish.group or DEFAULT_GROUP, render)
        act, now = self._verbs.pull, self.clock.read()

        def pull(number: int) -> None:
            sink.number = number
            act(
                self.caller, number, wish.topic, wish.group, wish.most, wait_ms, wish.options,
                sink, now, sink.tell,
            )  # fmt: skip

        return self._act(pull, lambda nothing: render([], sink.made))

    def subscribe(self, wish: Wish, sink: DeliverySink) -> Answer:
        act, now = self._verbs.subscribe, self.clock.read()
        return self._act(
            lambda number: act(
                self.caller, number, _SUBSCRIPTION, wish.topic, wish.group, wish.most,
                wish.options, sink, now,
            )
        )  # fmt: skip

    def blocked(self) -> None:
        self._operations.blocked(self.caller)

    def unblocked(self) -> None:
        self._operations.unblocked(self.caller)

    def settle(self, verb: str, receipts: Sequence[Receipt], more: tuple[Any, ...]) -> Answer:
        act, fields = getattr(self._verbs, verb), settled_fields(verb, receipts, more)
        if verb != "ack":  # which asks for no time
            fields = (*fields, self.clock.read())
        return self._act(lambda number: act(self.caller, number, *fields))

    def _act(
        self,
        act: Callable[[int], None],
        render: Render | None = None,
        number: int | None = None,
    ) -> Answer:
        """Call an operation with a request number; returns a future of its answer, as ``render``
        makes it. Raises what the operation raises; the future raises what it answers."""
        operations = self._operations
        if self.ended is not None:
            raise self.ended
        if operations.is_behind(self.caller):
            raise Overloaded("too many answers wait for the store (replies_all_bytes_max)")
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
            what = f"a request over HTTP from {self.caller.address}"
            raise operations.contain(what, error) from error
        finally:
            operations.handled()
        return future

    # --- its life --------------------------------------------------------------------------------

    def heard(self) -> None:
        if self.caller.presence.doubted:
            self._operations.heard(self.caller)

    def unreadable(self, verb: str, error: TickwheelError) -> None:
        self._verbs.unreadable(self.caller, verb, error)

    def survive(self, what: str, error: Exception) -> TickwheelError:
        return self._operations.survive(what, error)

    def finished(self) -> None:
        self._operations.finished(self.caller)

    def closed(self, broke: str = "") -> None:
        # What a pull was answered has no connection that stands for its consumer.
        self._operations.closed(self.caller, broke if self.caller.subscribers else "")

    # --- the shard's -----------------------------------------------------------------------------

    @property
    def label(self) -> str:
        return self.caller.label

    def accepted(self, answers: Sequence[StoredAnswer]) -> None:
        for request, first, count, accepted_ms in answers:
            self.answer(request, (accepted_ms, first, count))

    def answer_to(self, request: int, value: object) -> Sized:
        found = self._waiting.get(request)
        if found is None or found[1] is None:
            return _Rendered(request, value)
        try:
            return _Rendered(request, found[1](value))
        except Exception as error:
            what = f"the answer to a request over HTTP from {self.caller.address}"
            return _Rendered(request, self.survive(what, error))

    def give(self, answer: Any) -> None:
        self.answer(answer.request, answer.value)

    def error(self, request: int, code: str, message: str) -> None:
        self.answer(request, BY_CODE.get(code, InternalError)(message))

    def flush(self) -> None:
        """Do nothing: each answer has left by itself."""

    def answer(self, request: int, value: object) -> None:
        """Complete an answer, or an error in its place."""
        found = self._waiting.pop(request, None)
        if found is None or found[0].done():
            return
        if isinstance(value, TickwheelError):
            found[0].set_exception(value)
        else:
            found[0].set_result(value)


class _PullSink:
    """A sink that makes the answer to a pull of deliveries."""

    def __init__(self, exchange: OfShard, topic: str, group: str, render: Pulled) -> None:
        self._exchange = exchange
        self._render = render
        self._names = topic, group
        self.number = 0
        """The number of the pull's request."""
        self.made: dict[str, Any] | None = None

    def tell(self, made: dict[str, Any] | None) -> None:
        self.made = made

    def deliver(self, epoch: int, now_ms: int, items: Sequence[Item]) -> None:
        self._exchange.answer(self.number, self._answer(epoch, now_ms, items))

    def _answer(self, epoch: int, now_ms: int, items: Sequence[Item]) -> bytes:
        return self._render([(item, *self._names, epoch, now_ms) for item in items], self.made)

    def check(self, item: Item) -> None:
        self._answer(0, 0, [item])

    def ended(self, code: str, message: str) -> None:
        self._exchange.caller.refuse(self.number, NotFound(message))

    def closed(self) -> None:
        """Nothing has to be stopped."""
