"""The table of all verbs, from which transports, rights, the audit log, clients and documents are
derived."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from tickwheel.api import (
    bulk,
    daemon,
    groups,
    nodes,
    schedules,
    targets,
    tasks,
    transactions,
)
from tickwheel.api.frames import FrameType
from tickwheel.api.verb import Home, Need, Of, Right, Routing, Unique, Verb

_EACH, _CONSUME = Need(Right.PRODUCE, Of.EACH_TASK), Need(Right.CONSUME, Of.NAMED)

BY_HAND: Final = (
    Verb("enqueue", None, tuple, _EACH, "Store tasks", frame=FrameType.ENQUEUE, changes=True,
         fields="floor: int, tasks: array of task",
         result="[accepted_ms: int, ids: array of int, in the order of the tasks], and a map "
                "with details if tasks have due windows or rules for pending keys",
         routing=Routing.BASIS),
    Verb("enqueue_once", None, tuple, _EACH, "Store tasks once per Idempotency-Key",
         frame=FrameType.ENQUEUE_ONCE, changes=True,
         fields="key: bin, fingerprint: int, tasks: array of task", result="as ENQUEUE",
         routing=Routing.BASIS, unique=Unique("key", Home.KEY)),
    Verb("enqueue_plain", None, tuple, _EACH, "Store a run of plain tasks", changes=True),
    Verb("enqueue_columns", None, tuple, Need(Right.PRODUCE, Of.NAMED),
         "Store tasks of one topic", frame=FrameType.ENQUEUE_COLUMNS, changes=True,
         fields="floor: int, topic: str, bodies: array of bin, delays_ms: int for all, or"
                " array of int, one for each body",
         result="as ENQUEUE", routing=Routing.BASIS),
    Verb("enqueue_unanswered", None, None, _EACH, "Store tasks, without an answer",
         frame=FrameType.ONEWAY, changes=True,
         fields="tasks: array of task",
         result="none; request is 0", routing=Routing.BASIS),
    Verb("subscribe", None, None, _CONSUME, "Receive deliveries of due tasks",
         frame=FrameType.SUBSCRIBE, changes=True,
         fields="sub: int, topic: str, group: str?, prefetch: int, options: map {`lease_ms`: int,"
                " `retry`: policy, `ack`: str, `broadcast`: bool, *group options*}",
         result="map {`lease_ms`: int, `new_group`: map {`adopted`: int, `idle`: map of str to"
                " int}?}",
         routing=Routing.EACH),
    Verb("set_prefetch", None, None, None, "Change the prefetch", frame=FrameType.PREFETCH,
         fields="sub: int, prefetch: int, tell: bool (optional)",
         result="nil, or with `tell` a map {`in_flight`: int, `ready`: int}", routing=Routing.EACH),
    Verb("unsubscribe", None, None, None, "End a subscription", frame=FrameType.UNSUBSCRIBE,
         fields="sub: int",
         result="nil", routing=Routing.EACH),
    Verb("pull", None, tuple, _CONSUME, "Receive deliveries once, with an optional wait",
         frame=FrameType.PULL, changes=True,
         fields="topic: str, group: str?, max: int, wait_ms: int, options: map {`lease_ms`: int,"
                " `tell`: bool, `untied`: bool, *group options*}",
         result="[epoch: int, delivered_ms: int, array of delivery], and with `tell` `new_group` of"
                " SUBSCRIBE, or nil", routing=Routing.EACH),
    Verb("ack", None, tuple, _CONSUME, "Finish deliveries", frame=FrameType.ACK, changes=True,
         fields="topic: str, group: str?, epoch: int, ids: array of int, attempts: array "
                "of int, may_gather: bool (optional)",
         result="nil, or an array of outcomes", routing=Routing.IDS),
    Verb("nack", None, tuple, _CONSUME, "Report failed deliveries, to be retried",
         frame=FrameType.NACK, changes=True,
         fields="topic: str, group: str?, array of [id, epoch, attempt, delay_ms?, "
                "reason?]",
         result="array of outcomes", routing=Routing.IDS),
    Verb("reject", None, tuple, _CONSUME, "Report deliveries that must not be retried",
         frame=FrameType.REJECT, changes=True,
         fields="topic: str, group: str?, array of [id, epoch, attempt, reason?]",
         result="array of outcomes", routing=Routing.IDS),
    Verb("extend", None, tuple, _CONSUME, "Extend leases", frame=FrameType.EXTEND, changes=True,
         fields="topic: str, group: str?, epoch: int, ids: array of int, attempts: array "
                "of int, lease_ms: int",
         result="nil, or an array of outcomes", routing=Routing.IDS),
    Verb("snooze", None, tuple, _CONSUME, "Postpone deliveries without a failure",
         frame=FrameType.SNOOZE, changes=True,
         fields="topic: str, group: str?, array of [id, epoch, attempt, delay_ms]",
         result="array of outcomes", routing=Routing.IDS),
    Verb("release", None, tuple, _CONSUME, "Return deliveries that were not started",
         frame=FrameType.RELEASE, changes=True,
         fields="topic: str, group: str?, epoch: int, ids: array of int, attempts: array "
                "of int",
         result="nil, or an array of outcomes", routing=Routing.IDS),
    Verb("leave", None, None, None, "End the connection", frame=FrameType.BYE,
         fields="none",
         result="nil", routing=Routing.EACH),
)  # fmt: skip
"""Verbs whose frames are decoded by hand, for speed or because they carry tasks or deliveries."""

VERBS: Final[Mapping[str, Verb]] = MappingProxyType(
    {
        verb.name: verb
        for verb in (
            *BY_HAND, *tasks.VERBS, *tasks.LETTER_VERBS, *groups.VERBS, *schedules.VERBS,
            *transactions.VERBS, *bulk.VERBS, *targets.VERBS, *nodes.VERBS, *daemon.VERBS,
        )
    }
)  # fmt: skip
"""Name of a verb → its declaration."""
