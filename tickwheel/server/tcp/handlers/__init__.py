"""The command tables: frame type to handler. A handler decodes, and calls an operation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tickwheel.api.frames import FrameType
from tickwheel.api.verbs import VERBS
from tickwheel.errors import ProtocolError, UnknownType
from tickwheel.server.tcp import decode
from tickwheel.server.tcp.handlers.consuming import Consuming
from tickwheel.server.tcp.handlers.declared import declared
from tickwheel.server.tcp.handlers.producing import Producing
from tickwheel.server.tcp.handlers.settling import Settling
from tickwheel.server.tcp.handlers.transacting import Transacting
from tickwheel.server.tcp.shared import Handler, Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tickwheel.clock import Now
    from tickwheel.protocol.codec import Frame
    from tickwheel.server.shard.operations import Operations
    from tickwheel.server.shard.operations.standby import StandbyOperations
    from tickwheel.server.tcp.shared import Peer


def command_table(operations: Operations) -> Table:
    """The handlers of a daemon that leads."""
    produce, consume = Producing(operations), Consuming(operations)
    settle, transactions = Settling(operations), Transacting(operations)
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
        decode.arity(frame, 0, "none")

    return {
        FrameType.HELLO: second_hello,
        **declared(operations, [verb for verb in VERBS.values() if verb.standby]),
        FrameType.BYE: bye,
        FrameType.ALIVE: alive,
    }


def _only_a_request(frame: tuple[Any, ...]) -> int:
    decode.arity(frame, 0, "none")
    return decode.request_number(frame[1])
