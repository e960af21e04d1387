"""The TCP connections of a daemon, role after role, and their tables: type of frame to handler. A
handler reads a frame, and calls an operation; the frames of verbs that are declared whole are read
as their declaration says. Those that carry tasks and deliveries are read by hand for speed: ENQUEUE
to PULL, ACK to SNOOZE, PREPARE, CHECKS; and so is written what deliveries become.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any

from tickwheel.api.frames import REQUEST_MAX, FrameType
from tickwheel.api.shapes import named
from tickwheel.api.tasks import kept_options
from tickwheel.api.verb import Verb
from tickwheel.api.verbs import VERBS
from tickwheel.engine.topics import Item
from tickwheel.errors import (
    BadRequest,
    NotActive,
    NotFound,
    ProtocolError,
    TickwheelError,
    Unauthorized,
    UnknownType,
)
from tickwheel.model.records import NO_PAST, Past, TaskOptions, columns_of, keys_bytes
from tickwheel.protocol import encode, encode_all
from tickwheel.server import checks
from tickwheel.server.generated import delivered
from tickwheel.server.logins import REVOKED
from tickwheel.server.shard.callers import PRINCIPALS_KEPT_MAX, Ask, Caller
from tickwheel.server.shard.groups import OF_GROUPS
from tickwheel.server.shard.guard import Pipeline
from tickwheel.server.shard.new_tasks import key_alone
from tickwheel.server.shard.transactions import PREPARE_OPTIONS
from tickwheel.server.tcp import shared
from tickwheel.server.tcp.connection import Connection, Heartbeats
from tickwheel.server.tcp.shared import Handler, Shared, Table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence, Sized

    from tickwheel.clock import Now
    from tickwheel.engine.sessions import StoredAnswer
    from tickwheel.limits import Limits
    from tickwheel.model.kinds import TransactionRow
    from tickwheel.model.records import NewTask
    from tickwheel.protocol import Frame
    from tickwheel.server.logins import Logins
    from tickwheel.server.shard.callers import Principal
    from tickwheel.server.shard.operations import Conversing, Operations, StandbyOperations
    from tickwheel.server.shard.verbs import Verbs
    from tickwheel.server.tcp.shared import Peer

_ENQUEUE = int(FrameType.ENQUEUE)


ONCE_KEY_BYTES_MAX = 255


class _Once:
    """One ENQUEUE_ONCE: its own caller, whose session is that of its key, and the sink of that,
    which answers under the number of the frame."""

    def __init__(self, operations: Conversing, peer: Caller, request: int) -> None:
        self._operations, self._replies, self._request = operations, peer.replies, request
        self.caller = Caller(self, principal=peer.principal, address=peer.address)
        self.caller.name, self.caller.quota = peer.name, peer.quota

    def end(self) -> None:
        self._operations.finished(self.caller)

    @property
    def label(self) -> str:
        return self._replies.label

    def accepted(self, answers: Sequence[StoredAnswer]) -> None:
        self._replies.accepted([(self._request, *answer[1:]) for answer in answers])
        self.end()

    def answer_to(self, request: int, value: object) -> Sized:
        return self._replies.answer_to(self._request, value)

    def give(self, answer: Sized) -> None:
        self._replies.give(answer)
        self.end()

    def error(self, request: int, code: str, message: str) -> None:
        self._replies.error(self._request, code, message)
        self.end()

    def flush(self) -> None:
        self._replies.flush()


class ProducerFrames:
    """The frames of producers."""

    def __init__(self, operations: Conversing, verbs: Verbs) -> None:
        self._operations, self._verbs = operations, verbs
        self._plain = verbs.plain_tasks

    def enqueue(self, peer: Peer, frame: Frame, now: Now) -> None:
        shared.arity(frame, 2, "floor, tasks")
        _, request, floor, tasks = frame
        _check_number(request)
        self._verbs.enqueue(peer.caller, request, floor, tasks, now)

    def enqueue_once(self, peer: Peer, frame: Frame, now: Now) -> None:
        shared.arity(frame, 3, "key, fingerprint, tasks")
        _, request, key, fingerprint, tasks = frame
        _check_number(request)
        if type(key) is not bytes or not 0 < len(key) <= ONCE_KEY_BYTES_MAX:
            checks.wrong("key", f"1 to {ONCE_KEY_BYTES_MAX} bytes", key)
        checks.integer(fingerprint, "fingerprint", 1, REQUEST_MAX)
        once = _Once(self._operations, peer.caller, request)
        try:
            self._verbs.enqueue_once(once.caller, key, fingerprint, tasks, now, is_part=True)
        except BaseException:
            once.end()
            raise

    def enqueue_columns(self, peer: Peer, frame: Frame, now: Now) -> None:
        shared.arity(frame, 4, "floor, topic, bodies, delays_ms")
        _, request, floor, topic, bodies, delays_ms = frame
        _check_number(request)
        self._verbs.enqueue_columns(peer.caller, request, floor, topic, bodies, delays_ms, now)

    def enqueue_plain(
        self, peer: Peer, frames: Sequence[Frame], start: int, stop: int, now: Now
    ) -> int:
        """Take consecutive ENQUEUE frames of one plain task each in one go, those before ``stop``:
        the hot path.

        Returns the index of the first frame that it left alone, because something about it is
        not plain, new and right; ``enqueue`` says what, or deals with it.
        """
        session = peer.caller.session
        if session is None:
            return start
        topics, body_max, delay_max, key_max = self._plain
        now_ms, last, floor_max, size = now.now_ms, session.last, session.floor, 0
        requests: list[int] = []
        new_tasks: list[NewTask] = []
        keys: list[str] = []
        for frame in islice(frames, start, stop):
            if len(frame) != 4:
                break
            kind, request, floor, tasks = frame
            if kind != _ENQUEUE or type(tasks) is not tuple or len(tasks) != 1:
                break
            task, options = tasks[0], None
            if type(task) is not tuple:
                break
            if len(task) == 3:
                topic, body, delay_ms = task
            else:
                if (options := key_alone(task, key_max)) is None:
                    break
                topic, body, delay_ms = task[:3]
            if not (
                type(request) is int
                and last < request <= REQUEST_MAX
                and type(floor) is int
                and 0 <= floor <= request
                and type(body) is bytes
                and type(delay_ms) is int
                and 0 <= delay_ms <= delay_max
                and len(body) <= body_max
                and type(topic) is str
                and topic in topics
            ):
                break
            last = request
            if floor > floor_max:
                floor_max = floor
            requests.append(request)
            new_tasks.append((topic, now_ms + delay_ms, body, options))
            size += len(body)
            if options is not None:
                keys.append(task[3]["key"])
        if not requests:
            return start
        size += keys_bytes(keys)  # the decoder has let nothing through that is not UTF-8
        taken: int = self._verbs.enqueue_plain(
            peer.caller, requests, floor_max, new_tasks, size, now_ms, keyed=bool(keys)
        )
        return start + taken

    def oneway(self, peer: Peer, frame: Frame, now: Now) -> None:
        shared.arity(frame, 1, "tasks")
        self._verbs.enqueue_unanswered(peer.caller, frame[2], now)


def _check_number(request: object) -> None:
    if type(request) is not int or not 0 < request <= REQUEST_MAX:
        raise BadRequest(f"request must be 1 to {REQUEST_MAX}, not {checks.shown(request)}")


# --- settling ------------------------------------------------------------------------------------


class SettlementFrames:
    """The frames by which consumers settle deliveries."""

    def __init__(self, verbs: Verbs) -> None:
        self._verbs = verbs

    def ack(self, peer: Peer, frame: Frame, now: Now) -> None:
        may_gather = False
        if len(frame) == 8:
            may_gather = shared.flag(frame[7], "may_gather")
        else:
            shared.arity(frame, 5, "topic, group, epoch, ids, attempts")
        _, request, topic, group, epoch, ids, attempts = frame[:7]
        shared.request_number(request)
        self._verbs.ack(
            peer.caller, request, topic, group, epoch, ids, attempts, may_gather=may_gather
        )

    def nack(self, peer: Peer, frame: Frame, now: Now) -> None:
        self._each(self._verbs.nack, peer, frame, now)

    def reject(self, peer: Peer, frame: Frame, now: Now) -> None:
        self._each(self._verbs.reject, peer, frame, now)

    def snooze(self, peer: Peer, frame: Frame, now: Now) -> None:
        self._each(self._verbs.snooze, peer, frame, now)

    @staticmethod
    def _each(operation: Callable[..., None], peer: Peer, frame: Frame, now: Now) -> None:
        """A frame with an item for each delivery."""
        shared.arity(frame, 3, "topic, group, items")
        _, request, topic, group, items = frame
        shared.request_number(request)
        operation(peer.caller, request, topic, group, items, now)

    def extend(self, peer: Peer, frame: Frame, now: Now) -> None:
        shared.arity(frame, 6, "topic, group, epoch, ids, attempts, lease_ms")
        _, request, topic, group, epoch, ids, attempts, lease_ms = frame
        shared.request_number(request)
        self._verbs.extend(peer.caller, request, topic, group, epoch, ids, attempts, lease_ms, now)

    def release(self, peer: Peer, frame: Frame, now: Now) -> None:
        shared.arity(frame, 5, "topic, group, epoch, ids, attempts")
        _, request, topic, group, epoch, ids, attempts = frame
        shared.request_number(request)
        self._verbs.release(peer.caller, request, topic, group, epoch, ids, attempts, now)


# --- consuming -----------------------------------------------------------------------------------


_DELIVER, _OK, _ENDED = int(FrameType.DELIVER), int(FrameType.OK), int(FrameType.ENDED)
_OPTIONS = ("lease_ms", "retry", "ack", "broadcast", *OF_GROUPS)
_PULL_OPTIONS = ("lease_ms", "tell", *OF_GROUPS)


class ConsumerFrames:
    """The frames by which consumers get tasks."""

    def __init__(self, verbs: Verbs) -> None:
        self._verbs = verbs

    def subscribe(self, peer: Peer, frame: Frame, now: Now) -> None:
        shared.arity(frame, 5, "sub, topic, group, prefetch, options")
        request, number, topic, group, prefetch, options = frame[1:]
        shared.request_number(request)
        wanted = checks.options(options, _OPTIONS)
        sink = SubscriptionSink(peer, number)
        self._verbs.subscribe(
            peer.caller, request, number, topic, group, prefetch, wanted, sink, now
        )

    def prefetch(self, peer: Peer, frame: Frame, now: Now) -> None:
        tell = False
        if len(frame) == 5:
            tell = shared.flag(frame[4], "tell")
        else:
            shared.arity(frame, 2, "sub, prefetch")
        request = shared.request_number(frame[1])
        self._verbs.set_prefetch(peer.caller, request, frame[2], frame[3], tell=tell)

    def unsubscribe(self, peer: Peer, frame: Frame, now: Now) -> None:
        shared.arity(frame, 1, "sub")
        request = shared.request_number(frame[1])
        self._verbs.unsubscribe(peer.caller, request, frame[2])

    def pull(self, peer: Peer, frame: Frame, now: Now) -> None:
        shared.arity(frame, 5, "topic, group, max, wait_ms, options")
        request, topic, group, count, wait_ms, options = frame[1:]
        shared.request_number(request)
        wanted = checks.options(options, _PULL_OPTIONS)
        sink, tells = PullSink(peer, request), shared.flag(wanted.pop("tell", False), "tell")
        self._verbs.pull(
            peer.caller, request, topic, group, count, wait_ms, wanted, sink, now,
            sink.tell if tells else None,
        )  # fmt: skip


class SubscriptionSink:
    """A sink that makes DELIVER frames of deliveries."""

    def __init__(self, peer: Peer, number: int) -> None:
        self._peer = peer
        self._number = number

    def deliver(self, epoch: int, now_ms: int, items: Sequence[Item]) -> None:
        frame = (_DELIVER, self._number, epoch, now_ms, delivery_items(items))
        self._peer.send(encode(frame))

    def check(self, item: Item) -> None:
        encode(delivery_items([item]))

    def ended(self, code: str, message: str) -> None:
        self._peer.send(encode((_ENDED, self._number, code, message)))

    def closed(self) -> None:
        """Nothing has to be stopped."""


class PullSink:
    """A sink that makes the answer to a PULL of deliveries."""

    def __init__(self, peer: Peer, request: int) -> None:
        self._peer = peer
        self._request = request
        self._told: tuple[dict[str, Any] | None, ...] = ()

    def tell(self, made: dict[str, Any] | None) -> None:
        """Say also whether the group was made."""
        self._told = (made,)

    def deliver(self, epoch: int, now_ms: int, items: Sequence[Item]) -> None:
        frame = (_OK, self._request, (epoch, now_ms, delivery_items(items), *self._told))
        self._peer.send(encode(frame))

    def check(self, item: Item) -> None:
        encode(delivery_items([item]))

    def ended(self, code: str, message: str) -> None:
        self._peer.caller.refuse(self._request, NotFound(message))

    def closed(self) -> None:
        """Nothing has to be stopped."""


# --- deliveries as fields of frames --------------------------------------------------------------


def delivery_items(items: Sequence[Item]) -> list[tuple[Any, ...]]:
    """The deliveries of a DELIVER frame."""
    all_options = [row[4] for row, _, _ in items]
    pasts = [past for _, _, past in items]
    are_first = pasts.count(NO_PAST) == len(pasts)
    if are_first and not any(all_options):
        return [(row[0], attempt, row[1], row[3]) for row, attempt, _ in items]
    extras = delivery_extras(all_options)
    if not are_first:
        extras = list(map(_with_past, extras, pasts))
    return [
        (row[0], attempt, row[1], row[3])
        if options is None
        else (row[0], attempt, row[1], row[3], options)
        for (row, attempt, _), options in zip(items, extras, strict=True)
    ]


def _with_past(options: dict[str, Any] | None, past: Past) -> dict[str, Any] | None:
    """The options with the numbers of failures and deaths, where there are some."""
    counts = {"failures": past.failed, "deaths": past.deaths}
    said = {name: count for name, count in counts.items() if count}
    return {**(options or {}), **said} if said else options


def delivery_extras(all_options: Sequence[TaskOptions | None]) -> Sequence[dict[str, Any] | None]:
    """``delivered`` of each task that has options."""
    if all(all_options):
        columns = columns_of(all_options)
        present = [
            (name, column)
            for name, place, default in _SAID
            if (column := columns[place])[0] != default or column.count(default) != len(column)
        ]
        if len(present) == 1:
            ((name, column),) = present
            if all(column) and name != "replayed":
                return [{name: value} for value in column]
    return [None if options is None else delivered(options) for options in all_options]


_SAID = [
    (name, TaskOptions._fields.index(name), TaskOptions._field_defaults[name])
    for name in (*(field.name for field, _ in kept_options(delivered=True)), "replayed")
]
"""What deliveries are made of: each option's name, its place in ``TaskOptions`` and its default."""


def value_bytes(value: object) -> int:
    """The bytes that a plain value takes in an answer."""
    return len(encode_all((value,)))


# --- half tasks, and questions about transactions ------------------------------------------------


_CHECK = int(FrameType.CHECK)


class TransactionFrames:
    """The frames about transactions."""

    def __init__(self, verbs: Verbs) -> None:
        self._verbs = verbs

    def prepare(self, peer: Peer, frame: Frame, now: Now) -> None:
        shared.arity(frame, 5, "transaction, group, part, tasks, options")
        request = shared.request_number(frame[1])
        transaction, group, part, tasks = frame[2:6]
        options = checks.options(frame[6], PREPARE_OPTIONS)
        self._verbs.prepare(peer.caller, request, transaction, group, part, tasks, options, now)

    def answer_checks(self, peer: Peer, frame: Frame, now: Now) -> None:
        shared.arity(frame, 1, "groups")
        request = shared.request_number(frame[1])
        sink = CheckFrames(peer)
        self._verbs.answer_checks(peer.caller, request, frame[2], sink)


class CheckFrames:
    """A sink that makes CHECK frames of questions about transactions."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    def ask(self, group: str, rows: Sequence[TransactionRow]) -> None:
        asked = [(row.id, row.began_ms, row.tasks, row.checks + 1) for row in rows]
        self._peer.send(encode((_CHECK, group, asked)))


GOODBYE_WAIT_S = 1.0
"""How long, in seconds, a peer that does not read has until it is cut off."""


class Listener:
    """Makes connections, and ends them when the daemon's role changes."""

    def __init__(
        self,
        standby: StandbyOperations,
        logins: Logins,
        is_about_to_lead: Callable[[], bool] | None = None,
    ) -> None:
        """``is_about_to_lead``: whether the shard is on its way to this daemon, which stands by."""
        table = standby_table(standby)
        self._logins = logins
        self._elsewhere = table
        self._standby = Shared[Connection](standby, lambda _: table, logins)
        if is_about_to_lead is not None:
            self._standby.is_about_to_lead = is_about_to_lead
        self._active: Shared[Connection] | None = None
        self._is_leased = True

    @property
    def connections(self) -> tuple[Connection, ...]:
        """The connections of both roles."""
        active = self._active.connections if self._active is not None else ()
        return (*self._standby.connections, *active)

    def __call__(self) -> Connection:
        """A protocol for a new connection."""
        return Connection(self._active or self._standby)

    def serve(self, operations: Operations) -> None:
        """Begin to lead: new connections get these operations."""
        settings = operations.settings
        pipeline = Pipeline(operations, self._logins.refused, self._logins.audit)

        @lru_cache(maxsize=PRINCIPALS_KEPT_MAX)
        def table_of(principal: Principal) -> Table:
            return command_table(operations, pipeline.of(principal))

        self._active = shared = Shared[Connection](operations, table_of, self._logins)
        shared.elsewhere, shared.is_leased = self._elsewhere, self._is_leased
        operations.shard.on_landed = shared.landed
        heartbeats = Heartbeats(
            shared.connections,
            operations.clock,
            interval_s=settings.heartbeat_interval_s,
            timeout_s=settings.heartbeat_timeout_s,
        )
        operations.shard.spawn(heartbeats.run())

    def leased(self, *, held: bool) -> None:
        """Tell all who want to know it, now or when they greet, whether the lease is held."""
        self._is_leased = held
        if self._active is not None:
            self._active.is_leased = held
            for connection in list(self._active.connections):
                connection.say_lease()

    def leave_standby(self, message: str) -> None:
        """End the connections of a standby behind ``serve``, but for those that have not greeted
        yet: they are answered by the daemon that leads."""
        assert self._active is not None, "it leads"
        for connection in list(self._standby.connections):
            if connection.change_role(self._active):
                connection.go_on()
        self.end_standby(message)

    def end_standby(self, message: str) -> None:
        """End the connections of a standby: clients connect again and learn who leads now."""
        for connection in list(self._standby.connections):
            connection.say_goodbye(NotActive.code, message)
            connection.close()

    def stand_by(self) -> None:
        """End the connections of a daemon that does not lead any more."""
        active, self._active = self._active, None
        if active is not None:
            active.is_over = True
        for connection in list(active.connections) if active is not None else ():
            message = "this daemon is not the active one any more"
            self._end(connection, NotActive.code, message)

    def dismiss(self) -> None:
        """End the connections of callers whose principals are no longer valid."""
        for connection in self.connections:
            if not self._logins.is_valid(connection.caller.principal):
                self._end(connection, Unauthorized.code, REVOKED)

    @staticmethod
    def _end(connection: Connection, code: str, message: str) -> None:
        """End a connection, whether its peer reads the GOODBYE or not."""
        connection.part(code, message)
        asyncio.get_running_loop().call_later(GOODBYE_WAIT_S, connection.abort)

    def abort(self) -> None:
        """Cut off all connections to the daemon that leads."""
        for connection in list(self._active.connections) if self._active is not None else ():
            connection.abort()


# --- tables of handlers --------------------------------------------------------------------------


def command_table(operations: Conversing, verbs: Verbs) -> Table:
    """The handlers of a daemon that leads, for a principal with these verbs."""
    produce, consume = ProducerFrames(operations, verbs), ConsumerFrames(verbs)
    settle, transactions = SettlementFrames(verbs), TransactionFrames(verbs)
    handlers: dict[int, Handler] = {
        **declared(operations.limits, verbs, VERBS.values()),
        **_about_the_conversation(operations.limits, verbs),
        FrameType.ENQUEUE: produce.enqueue,
        FrameType.ENQUEUE_COLUMNS: produce.enqueue_columns,
        FrameType.ENQUEUE_ONCE: produce.enqueue_once,
        FrameType.ONEWAY: produce.oneway,
        FrameType.SUBSCRIBE: consume.subscribe,
        FrameType.PREFETCH: consume.prefetch,
        FrameType.UNSUBSCRIBE: consume.unsubscribe,
        FrameType.PULL: consume.pull,
        FrameType.ACK: settle.ack,
        FrameType.NACK: settle.nack,
        FrameType.REJECT: settle.reject,
        FrameType.EXTEND: settle.extend,
        FrameType.RELEASE: settle.release,
        FrameType.SNOOZE: settle.snooze,
        FrameType.PREPARE: transactions.prepare,
        FrameType.CHECKS: transactions.answer_checks,
    }

    def unknown(peer: Peer, frame: Frame, now: Now) -> None:
        raise UnknownType(f"frame type {frame[0]} is not known to this version")

    return Table(handlers, unknown, produce.enqueue_plain)


def standby_table(operations: StandbyOperations) -> Table:
    """The handlers of a daemon that stands by."""

    def refused(peer: Peer, frame: Frame, now: Now) -> None:
        raise operations.refusal()

    def none_taken(peer: Peer, frames: Sequence[Frame], start: int, stop: int, now: Now) -> int:
        return start

    handlers = _about_the_conversation(operations.limits, operations.verbs)
    return Table(handlers, refused, none_taken)


def _about_the_conversation(limits: Limits, verbs: Verbs) -> dict[int, Handler]:
    def second_hello(peer: Peer, frame: Frame, now: Now) -> None:
        raise ProtocolError("HELLO was sent before on this connection")

    def bye(peer: Peer, frame: Frame, now: Now) -> None:
        verbs.leave(peer.caller, _only_a_request(frame), now)

    def alive(peer: Peer, frame: Frame, now: Now) -> None:
        """Take the answer to HEARTBEAT: that it came is all that counts, and was noted."""
        shared.arity(frame, 0, "none")

    return {
        FrameType.HELLO: second_hello,
        **declared(limits, verbs, [verb for verb in VERBS.values() if verb.standby]),
        FrameType.BYE: bye,
        FrameType.ALIVE: alive,
    }


def _only_a_request(frame: tuple[Any, ...]) -> int:
    shared.arity(frame, 0, "none")
    return shared.request_number(frame[1])


# --- verbs that are declared whole ---------------------------------------------------------------


def declared(limits: Limits, verbs: Verbs, some: Iterable[Verb]) -> dict[int, Handler]:
    """The handlers of those of the verbs that are declared whole, by the number of their frame."""
    found: dict[int, Handler] = {}
    words: dict[int, dict[str, Verb]] = {}
    for verb in some:
        if verb.request is None or verb.frame is None:
            continue
        if verb.word:
            words.setdefault(int(verb.frame), {})[verb.word] = verb
        else:
            found[int(verb.frame)] = _handler(limits, verbs, verb)
    return found | {number: _by_word(limits, verbs, of) for number, of in words.items()}


def _handler(limits: Limits, verbs: Verbs, verb: Verb) -> Handler:
    request, operation = verb.asked, getattr(verbs, verb.name)

    def handle(peer: Peer, frame: Frame, now: Now) -> None:
        number = shared.request_number(frame[1] if len(frame) > 1 else None)
        try:
            asked = request.of_frame(frame[2:], limits)
        except TickwheelError as error:
            verbs.unreadable(peer.caller, verb.name, error)
            raise
        operation(Ask(peer.caller, number, asked, now))

    return handle


def _by_word(limits: Limits, verbs: Verbs, words: Mapping[str, Verb]) -> Handler:
    """The handler of a frame that several verbs share: the second place says which it is."""
    most = 2 + any(verb.asked.options() for verb in words.values())
    places = ("name", "verb", "options")[:most]
    handlers = {word: (v.asked, _handler(limits, verbs, v)) for word, v in words.items()}

    def handle(peer: Peer, frame: Frame, now: Now) -> None:
        shared.arity(frame, most, ", ".join(places))
        word = frame[3]
        if type(word) is not str or word not in handlers:
            checks.wrong("verb", f"one of {', '.join(handlers)}", word)
        request, handler = handlers[word]
        rest = frame[4:]
        if not request.options():
            named(rest[0] if rest else None, ())
            rest = ()
        handler(peer, (*frame[:3], *rest), now)

    return handle
