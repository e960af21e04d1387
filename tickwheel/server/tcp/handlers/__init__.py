"""The command table: frame type to handler. No business logic here."""

from __future__ import annotations

from tickwheel.protocol.frames import FrameType
from tickwheel.server.shard.shard import Shell
from tickwheel.server.tcp.connection import Handler, RunHandler
from tickwheel.server.tcp.handlers.consuming import Consuming
from tickwheel.server.tcp.handlers.controlling import Controlling
from tickwheel.server.tcp.handlers.grouping import Grouping
from tickwheel.server.tcp.handlers.listing import Listing
from tickwheel.server.tcp.handlers.producing import Producing
from tickwheel.server.tcp.handlers.settling import Settling


def command_table(shell: Shell) -> tuple[dict[int, Handler], RunHandler]:
    """Handlers of one daemon by frame type, and the one for runs of plain enqueues."""
    produce, consume, settle = Producing(shell), Consuming(shell), Settling(shell)
    control, show, groups = Controlling(shell), Listing(shell), Grouping(shell)
    table: dict[int, Handler] = {
        FrameType.HELLO: produce.second_hello,
        FrameType.ENQUEUE: produce.enqueue,
        FrameType.ONEWAY: produce.oneway,
        FrameType.BYE: produce.bye,
        FrameType.SUBSCRIBE: consume.subscribe,
        FrameType.PREFETCH: consume.prefetch,
        FrameType.UNSUBSCRIBE: consume.unsubscribe,
        FrameType.PULL: consume.pull,
        FrameType.ACK: settle.ack,
        FrameType.NACK: settle.nack,
        FrameType.REJECT: settle.reject,
        FrameType.EXTEND: settle.extend,
        FrameType.RELEASE: settle.release,
        FrameType.CANCEL: control.cancel,
        FrameType.RESCHEDULE: control.reschedule,
        FrameType.RUN_NOW: control.run_now,
        FrameType.LOOKUP: control.lookup,
        FrameType.DEAD_REQUEUE: control.dead_requeue,
        FrameType.DEAD_DELETE: control.dead_delete,
        FrameType.GROUP_CREATE: groups.create,
        FrameType.GROUP_DELETE: groups.delete,
        FrameType.CONFIGURE: groups.configure,
        FrameType.LIST: show.tasks,
        FrameType.STATS: show.stats,
        FrameType.DEAD_LIST: show.dead,
        FrameType.BACKUP: show.backup,
        FrameType.PING: show.ping,
        FrameType.ALIVE: show.alive,
        FrameType.STATUS: show.status,
    }
    return table, produce.enqueue_run
