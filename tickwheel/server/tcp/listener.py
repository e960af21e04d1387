"""The TCP connections of a daemon, role after role, and their tables: type of frame to handler. A
handler reads a frame, and calls an operation; the frames of verbs that are declared whole are read
as their declaration says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from tickwheel.api.frames import FrameType
from tickwheel.api.shapes import named
from tickwheel.api.verb import Verb
from tickwheel.api.verbs import VERBS
from tickwheel.errors import NotActive, ProtocolError, TickwheelError, Unauthorized, UnknownType
from tickwheel.server import checks
from tickwheel.server.logins import REVOKED
from tickwheel.server.shard.access import PRINCIPALS_KEPT_MAX
from tickwheel.server.shard.callers import Ask
from tickwheel.server.shard.guard import Guards
from tickwheel.server.tcp import shared
from tickwheel.server.tcp.connection import Connection, Heartbeats
from tickwheel.server.tcp.shared import Handler, Shared, Table
from tickwheel.server.tcp.tasks import Consuming, Producing, Settling, Transacting

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tickwheel.clock import Now
    from tickwheel.protocol import Frame
    from tickwheel.server.logins import Logins
    from tickwheel.server.shard.access import Principal
    from tickwheel.server.shard.operations import Operations, StandbyOperations
    from tickwheel.server.tcp.shared import Peer

GOODBYE_WAIT_S = 1.0
"""How long, in seconds, a peer that does not read has until it is cut off."""


class Listener:
    """Makes connections, and ends them when the daemon's role changes."""

    def __init__(self, standby: StandbyOperations, logins: Logins) -> None:
        table = standby_table(standby)
        self._logins = logins
        self._elsewhere = table
        self._standby = Shared[Connection](standby, lambda _: table, logins)
        self._active: Shared[Connection] | None = None

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
        guards = Guards(operations, self._logins.refused, self._logins.audit)

        @lru_cache(maxsize=PRINCIPALS_KEPT_MAX)
        def table_of(principal: Principal) -> Table:
            return command_table(guards.of(principal))

        self._active = shared = Shared[Connection](operations, table_of, self._logins)
        shared.elsewhere = self._elsewhere
        operations.shard.on_landed = shared.landed
        heartbeats = Heartbeats(
            shared.connections,
            operations.clock,
            interval_s=settings.heartbeat_interval_s,
            timeout_s=settings.heartbeat_timeout_s,
        )
        operations.shard.spawn(heartbeats.run())

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


def command_table(operations: Operations) -> Table:
    """The handlers of a daemon that leads."""
    produce, consume = Producing(operations), Consuming(operations)
    settle = Settling(operations)
    transactions = Transacting(operations)
    handlers: dict[int, Handler] = {
        **declared(operations, VERBS.values()),
        **_about_the_conversation(operations),
        FrameType.ENQUEUE: produce.enqueue,
        FrameType.ENQUEUE_COLUMNS: produce.enqueue_columns,
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

    return Table(_about_the_conversation(operations), refused, none_taken)


def _about_the_conversation(operations: Operations | StandbyOperations) -> dict[int, Handler]:
    def second_hello(peer: Peer, frame: Frame, now: Now) -> None:
        raise ProtocolError("HELLO was sent before on this connection")

    def bye(peer: Peer, frame: Frame, now: Now) -> None:
        operations.leave(peer.caller, _only_a_request(frame))

    def alive(peer: Peer, frame: Frame, now: Now) -> None:
        """Take the answer to HEARTBEAT: that it came is all that counts, and was noted."""
        shared.arity(frame, 0, "none")

    return {
        FrameType.HELLO: second_hello,
        **declared(operations, [verb for verb in VERBS.values() if verb.standby]),
        FrameType.BYE: bye,
        FrameType.ALIVE: alive,
    }


def _only_a_request(frame: tuple[Any, ...]) -> int:
    shared.arity(frame, 0, "none")
    return shared.request_number(frame[1])


# --- verbs that are declared whole ---------------------------------------------------------------


def declared(
    operations: Operations | StandbyOperations, verbs: Iterable[Verb]
) -> dict[int, Handler]:
    """The handlers of those of the verbs that are declared whole, by the number of their frame."""
    found: dict[int, Handler] = {}
    words: dict[int, dict[str, Verb]] = {}
    for verb in verbs:
        if verb.request is None or verb.frame is None:
            continue
        if verb.word:
            words.setdefault(int(verb.frame), {})[verb.word] = verb
        else:
            found[int(verb.frame)] = _handler(operations, verb)
    return found | {number: _by_word(operations, some) for number, some in words.items()}


def _handler(operations: Operations | StandbyOperations, verb: Verb) -> Handler:
    request, operation = verb.asked, getattr(operations, verb.name)
    limits = operations.limits

    def handle(peer: Peer, frame: Frame, now: Now) -> None:
        number = shared.request_number(frame[1] if len(frame) > 1 else None)
        try:
            asked = request.of_frame(frame[2:], limits)
        except TickwheelError as error:
            operations.unreadable(peer.caller, verb.name, error)
            raise
        operation(Ask(peer.caller, number, asked, now))

    return handle


def _by_word(operations: Operations | StandbyOperations, verbs: Mapping[str, Verb]) -> Handler:
    """The handler of a frame that several verbs share: the second place says which it is."""
    most = 2 + any(verb.asked.options() for verb in verbs.values())
    places = ("name", "verb", "options")[:most]
    handlers = {word: (v.asked, _handler(operations, v)) for word, v in verbs.items()}

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
