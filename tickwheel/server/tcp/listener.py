"""The TCP connections of a daemon in each role, and the tables that map frame types to handlers.

A handler reads a frame and calls an operation. Frames of declared verbs are read according to their
declarations. For speed, handwritten code reads the frames of tasks and settlements (ENQUEUE to
PULL, ACK to SNOOZE, PREPARE, CHECKS) and writes deliveries.
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
from tickwheel.server.access.logins import REVOKED
from tickwheel.server.generated import delivered
from tickwheel.server.shard.callers import PRINCIPALS_KEPT_MAX, Call, Caller
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
    from tickwheel.server.access.logins import Logins
    from tickwheel.server.shard.callers import Principal
    from tickwheel.server.shard.operations import Operations, ShardInterface, StandbyOperations
    from tickwheel.server.shard.verbs import Verbs
    from tickwheel.server.tcp.shared import Peer

_ENQUEUE = int(FrameType.ENQUEUE)


ONCE_KEY_BYTES_MAX = 255


class _OnceCaller:
    """The separate caller of an ENQUEUE_ONCE, whose session is that of the idempotency key. It is
    the sink of the caller's answers and gives them the number of the frame."""

    def __init__(self, operations: ShardInterface, peer: Caller, request: int) -> None:
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
    """Handlers of producers' frames."""

    def __init__(self, operations: ShardInterface, verbs: Verbs) -> None:
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
        once = _OnceCaller(self._operations, peer.caller, request)
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
        """Enqueue the tasks of consecutive ENQUEUE frames, up to ``stop``, each of which has one
        plain task. This is the hot path.

        Return the index of the first frame that is not plain, new and valid; ``enqueue`` handles or
        refuses it.
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
        size += keys_bytes(keys)  # the decoder has checked that they are UTF-8
        taken: int = self._verbs.enqueue_plain(
            peer.caller, requests, floor_max, new_tasks, size, now, keyed=bool(keys)
        )
        return start + taken

    def oneway(self, peer: Peer, frame: Frame, now: Now) -> None:
        shared.arity(frame, 1, "tasks")
        self._verbs.enqueue_unanswered(peer.caller, frame[2], now)


def _check_number(request: object) -> None:
    if type(request) is not int or not 0 < request <= REQUEST_MAX:
        raise BadRequest(
            f"request must be between 1 and {REQUEST_MAX}, not {checks.shown(request)}"
        )


# --- settling ------------------------------------------------------------------------------------


class SettlementFrames:
    """Handlers of frames that settle deliveries."""

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
        """Handle a frame with an item for each delivery."""
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
_PULL_OPTIONS = ("lease_ms", "tell", "untied", *OF_GROUPS)


class ConsumerFrames:
    """Handlers of frames that request deliveries."""

    def __init__(self, verbs: Verbs) -> None:
        self._verbs = verbs

    def subscribe(self, peer: Peer, frame: Frame, now: Now) -> None:
        shared.arity(frame, 5, "sub, topic, group, prefetch, options")
        request, number, topic, group, prefetch, options = frame[1:]
        shared.request_number(request)
        checked = checks.options(options, _OPTIONS)
        sink = SubscriptionSink(peer, number)
        self._verbs.subscribe(
            peer.caller, request, number, topic, group, prefetch, checked, sink, now
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
        checked = checks.options(options, _PULL_OPTIONS)
        sink, tells = PullSink(peer, request), shared.flag(checked.pop("tell", False), "tell")
        shared.flag(checked.get("untied", False), "untied")
        self._verbs.pull(
            peer.caller, request, topic, group, count, wait_ms, checked, sink, now,
            sink.note_group if tells else None,
        )  # fmt: skip


class SubscriptionSink:
    """A sink that sends deliveries as DELIVER frames."""

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
        """Do nothing: the sink has nothing to stop."""


class PullSink:
    """A sink that sends deliveries as the answer to a PULL."""

    def __init__(self, peer: Peer, request: int) -> None:
        self._peer = peer
        self._request = request
        self._new_group: tuple[dict[str, Any] | None, ...] = ()

    def note_group(self, new_group: dict[str, Any] | None) -> None:
        """Note the fields of the group for the answer; None if the PULL did not create it."""
        self._new_group = (new_group,)

    def deliver(self, epoch: int, now_ms: int, items: Sequence[Item]) -> None:
        frame = (_OK, self._request, (epoch, now_ms, delivery_items(items), *self._new_group))
        self._peer.send(encode(frame))

    def check(self, item: Item) -> None:
        encode(delivery_items([item]))

    def ended(self, code: str, message: str) -> None:
        self._peer.caller.refuse(self._request, NotFound(message))

    def closed(self) -> None:
        """Do nothing: a PULL has nothing to stop."""


# --- deliveries as fields of frames --------------------------------------------------------------


def delivery_items(items: Sequence[Item]) -> list[tuple[Any, ...]]:
    """Return the items of a DELIVER frame."""
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
    """Return the options, extended by the counts of failures and deaths that are not 0."""
    counts = {"failures": past.failed, "deaths": past.deaths}
    nonzero = {name: count for name, count in counts.items() if count}
    return {**(options or {}), **nonzero} if nonzero else options


def delivery_extras(all_options: Sequence[TaskOptions | None]) -> Sequence[dict[str, Any] | None]:
    """Return, for each task, its options as ``delivered`` returns them, or None without options."""
    if all(all_options):
        columns = columns_of(all_options)
        present = [
            (name, column)
            for name, index, default in _DELIVERED_OPTIONS
            if (column := columns[index])[0] != default or column.count(default) != len(column)
        ]
        if len(present) == 1:
            ((name, column),) = present
            if all(column) and name != "replayed":
                return [{name: value} for value in column]
    return [None if options is None else delivered(options) for options in all_options]


_DELIVERED_OPTIONS = [
    (name, TaskOptions._fields.index(name), TaskOptions._field_defaults[name])
    for name in (*(field.name for field, _ in kept_options(delivered=True)), "replayed")
]
"""Name, index in ``TaskOptions`` and default of each option that deliveries contain."""


def value_bytes(value: object) -> int:
    """Return the size in bytes of an encoded value."""
    return len(encode_all((value,)))


# --- half tasks and checks of transactions -------------------------------------------------------


_CHECK = int(FrameType.CHECK)


class TransactionFrames:
    """Handlers of frames about transactions."""

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
    """A sink that sends checks of transactions as CHECK frames."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    def ask(self, group: str, rows: Sequence[TransactionRow]) -> None:
        transactions = [(row.id, row.began_ms, row.tasks, row.checks + 1) for row in rows]
        self._peer.send(encode((_CHECK, group, transactions)))


GOODBYE_WAIT_S = 1.0
"""Seconds after GOODBYE until the connection is aborted."""


class Listener:
    """Creates connections, and ends them when the daemon's role changes."""

    def __init__(
        self,
        standby: StandbyOperations,
        logins: Logins,
        is_about_to_lead: Callable[[], bool] | None = None,
    ) -> None:
        """``is_about_to_lead`` returns whether the shard is being handed over to this standby."""
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
        """Return a protocol for a new connection."""
        return Connection(self._active or self._standby)

    def serve(self, operations: Operations) -> None:
        """Serve new connections as the active daemon, with these operations."""
        settings = operations.settings
        pipeline = Pipeline(operations, self._logins.note_forbidden, self._logins.audit)

        @lru_cache(maxsize=PRINCIPALS_KEPT_MAX)
        def table_of(principal: Principal) -> Table:
            return command_table(operations, pipeline.of(principal))

        self._active = shared = Shared[Connection](operations, table_of, self._logins)
        shared.elsewhere, shared.is_leased = self._elsewhere, self._is_leased
        operations.shard.on_landed = shared.resume_waiting
        heartbeats = Heartbeats(
            shared.connections,
            operations.clock,
            interval_s=settings.heartbeat_interval_s,
            timeout_s=settings.heartbeat_timeout_s,
        )
        operations.shard.spawn(heartbeats.run())

    def set_lease(self, *, held: bool) -> None:
        """Tell all peers that asked for it, now or after their HELLO, whether the lease is held."""
        self._is_leased = held
        if self._active is not None:
            self._active.is_leased = held
            for connection in list(self._active.connections):
                connection.send_lease()

    def leave_standby(self, message: str) -> None:
        """End the connections of a standby, after ``serve``. Connections that have not sent HELLO
        stay open and are served by the active role."""
        assert self._active is not None, "serve was called"
        for connection in list(self._standby.connections):
            if connection.change_role(self._active):
                connection.resume()
        self.end_standby(message)

    def end_standby(self, message: str) -> None:
        """End the connections of a standby. Clients reconnect and find the active daemon."""
        for connection in list(self._standby.connections):
            connection.send_goodbye(NotActive.code, message)
            connection.close()

    def stand_by(self) -> None:
        """End the connections of a daemon that is no longer active."""
        active, self._active = self._active, None
        if active is not None:
            active.is_over = True
        for connection in list(active.connections) if active is not None else ():
            message = "this daemon is no longer active"
            self._end(connection, NotActive.code, message)

    def dismiss(self) -> None:
        """End the connections of callers whose principals are no longer valid."""
        for connection in self.connections:
            if not self._logins.is_valid(connection.caller.principal):
                self._end(connection, Unauthorized.code, REVOKED)

    @staticmethod
    def _end(connection: Connection, code: str, message: str) -> None:
        """Send GOODBYE and end the connection even if its peer does not read."""
        connection.end(code, message)
        asyncio.get_running_loop().call_later(GOODBYE_WAIT_S, connection.abort)

    def abort(self) -> None:
        """Abort all connections of the active role."""
        for connection in list(self._active.connections) if self._active is not None else ():
            connection.abort()


# --- tables of handlers --------------------------------------------------------------------------


def command_table(operations: ShardInterface, verbs: Verbs) -> Table:
    """Return the handlers of an active daemon for a principal with these verbs."""
    produce, consume = ProducerFrames(operations, verbs), ConsumerFrames(verbs)
    settle, transactions = SettlementFrames(verbs), TransactionFrames(verbs)
    handlers: dict[int, Handler] = {
        **declared(operations.limits, verbs, VERBS.values()),
        **_connection_handlers(operations.limits, verbs),
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
        raise UnknownType(f"this version does not know the frame type {frame[0]}")

    return Table(handlers, unknown, produce.enqueue_plain)


def standby_table(operations: StandbyOperations) -> Table:
    """Return the handlers of a standby."""

    def refuse(peer: Peer, frame: Frame, now: Now) -> None:
        raise operations.refusal()

    def take_none(peer: Peer, frames: Sequence[Frame], start: int, stop: int, now: Now) -> int:
        return start

    handlers = _connection_handlers(operations.limits, operations.verbs)
    return Table(handlers, refuse, take_none)


def _connection_handlers(limits: Limits, verbs: Verbs) -> dict[int, Handler]:
    def second_hello(peer: Peer, frame: Frame, now: Now) -> None:
        raise ProtocolError("HELLO was already sent on this connection")

    def goodbye(peer: Peer, frame: Frame, now: Now) -> None:
        verbs.leave(peer.caller, _bare_request(frame), now)

    def check_heartbeat(peer: Peer, frame: Frame, now: Now) -> None:
        """Check the answer to HEARTBEAT; its arrival was already recorded."""
        shared.arity(frame, 0, "none")

    return {
        FrameType.HELLO: second_hello,
        **declared(limits, verbs, [verb for verb in VERBS.values() if verb.standby]),
        FrameType.BYE: goodbye,
        FrameType.ALIVE: check_heartbeat,
    }


def _bare_request(frame: tuple[Any, ...]) -> int:
    shared.arity(frame, 0, "none")
    return shared.request_number(frame[1])


# --- declared verbs ------------------------------------------------------------------------------


def declared(limits: Limits, verbs: Verbs, candidates: Iterable[Verb]) -> dict[int, Handler]:
    """Return, by frame number, the handlers of the verbs that have a declared request."""
    handlers: dict[int, Handler] = {}
    words: dict[int, dict[str, Verb]] = {}
    for verb in candidates:
        if verb.request is None or verb.frame is None:
            continue
        if verb.word:
            words.setdefault(int(verb.frame), {})[verb.word] = verb
        else:
            handlers[int(verb.frame)] = _handler(limits, verbs, verb)
    return handlers | {
        number: _shared_handler(limits, verbs, by_word) for number, by_word in words.items()
    }


def _handler(limits: Limits, verbs: Verbs, verb: Verb) -> Handler:
    request, operation = verb.request_type, getattr(verbs, verb.name)

    def handle(peer: Peer, frame: Frame, now: Now) -> None:
        number = shared.request_number(frame[1] if len(frame) > 1 else None)
        try:
            values = request.of_frame(frame[2:], limits)
        except TickwheelError as error:
            verbs.unreadable(peer.caller, verb.name, error)
            raise
        operation(Call(peer.caller, number, values, now))

    return handle


def _shared_handler(limits: Limits, verbs: Verbs, words: Mapping[str, Verb]) -> Handler:
    """Return the handler of a frame that several verbs share; its second field selects the verb."""
    count = 2 + any(verb.request_type.options() for verb in words.values())
    names = ("name", "verb", "options")[:count]
    handlers = {word: (v.request_type, _handler(limits, verbs, v)) for word, v in words.items()}

    def handle(peer: Peer, frame: Frame, now: Now) -> None:
        shared.arity(frame, count, ", ".join(names))
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
