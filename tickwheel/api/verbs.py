"""Every verb of the daemon: the one table from which transports, rights, the audit log, clients and
documents follow."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from tickwheel.api import bulk, daemon, dead, groups, schedules, tasks, transactions
from tickwheel.api.frames import FrameType
from tickwheel.api.verb import Need, Of, Right, Verb

_EACH, _CONSUME = Need(Right.PRODUCE, Of.EACH_TASK), Need(Right.CONSUME, Of.NAMED)

BY_HAND: Final = (
    Verb("enqueue", None, tuple, _EACH, "Store tasks", frame=FrameType.ENQUEUE, changes=True),
    Verb("enqueue_once", None, tuple, _EACH, "Store tasks, once for an Idempotency-Key",
         changes=True),
    Verb("enqueue_plain", None, tuple, _EACH, "Store a run of plain tasks", changes=True),
    Verb("enqueue_columns", None, tuple, Need(Right.PRODUCE, Of.NAMED),
         "Store tasks of one topic", frame=FrameType.ENQUEUE_COLUMNS, changes=True),
    Verb("enqueue_unanswered", None, None, _EACH, "Store tasks, without an answer",
         frame=FrameType.ONEWAY, changes=True),
    Verb("subscribe", None, None, _CONSUME, "Get deliveries as they come due",
         frame=FrameType.SUBSCRIBE, changes=True),
    Verb("set_prefetch", None, None, None, "Another prefetch", frame=FrameType.PREFETCH),
    Verb("unsubscribe", None, None, None, "No more deliveries", frame=FrameType.UNSUBSCRIBE),
    Verb("pull", None, tuple, _CONSUME, "Get deliveries, waiting for them if need be",
         frame=FrameType.PULL, changes=True),
    Verb("ack", None, tuple, _CONSUME, "Done", frame=FrameType.ACK, changes=True),
    Verb("nack", None, tuple, _CONSUME, "Failed, try again", frame=FrameType.NACK, changes=True),
    Verb("reject", None, tuple, _CONSUME, "Never again", frame=FrameType.REJECT, changes=True),
    Verb("extend", None, tuple, _CONSUME, "A longer lease", frame=FrameType.EXTEND, changes=True),
    Verb("snooze", None, tuple, _CONSUME, "Later, and no failure", frame=FrameType.SNOOZE,
         changes=True),
    Verb("release", None, tuple, _CONSUME, "Give back what was not started",
         frame=FrameType.RELEASE, changes=True),
    Verb("leave", None, None, None, "Goodbye", frame=FrameType.BYE),
)  # fmt: skip
"""Verbs whose frames are read by hand, for speed, or because they carry tasks or deliveries."""

VERBS: Final[Mapping[str, Verb]] = MappingProxyType(
    {
        verb.name: verb
        for verb in (
            *BY_HAND, *tasks.VERBS, *dead.VERBS, *groups.VERBS, *schedules.VERBS,
            *transactions.VERBS, *bulk.VERBS, *daemon.VERBS,
        )
    }
)  # fmt: skip
"""Name of a verb → its declaration."""
