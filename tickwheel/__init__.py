"""Tickwheel: a hashed timing-wheel scheduler daemon and its client.

``from tickwheel import Client, Task`` needs nothing but the base install (msgpack). Each name is
imported with its first use: the daemon, its history's writer and the command line import this
package too, and start without the client. Every name here is described in docs/python.md; whatever
is not named here, in ``tickwheel.client`` or in ``tickwheel.sync`` is private.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tickwheel.version import __version__

if TYPE_CHECKING:
    from tickwheel.client import (
        Active,
        Backup,
        BulkInfo,
        BulkPreview,
        Check,
        Client,
        DeadLetter,
        Delivery,
        GroupInfo,
        GroupSettings,
        GroupStats,
        HeldKey,
        IfPending,
        KeyLine,
        KeyOutcome,
        Load,
        Partly,
        Receipt,
        Receipts,
        Rescheduled,
        ResetPreview,
        Retry,
        ScheduleInfo,
        ScheduleRun,
        Stats,
        Status,
        Subscription,
        Task,
        TaskInfo,
        TopicStats,
        Transaction,
        TransactionInfo,
        status_at,
        statuses,
    )
    from tickwheel.client.idempotence import Once
    from tickwheel.client.worker import Reject, RetryLater, Snooze, Worker
    from tickwheel.errors import (
        BacklogFull,
        BadRequest,
        BodyTooLarge,
        ClientClosed,
        Conflict,
        ConnectionLost,
        Draining,
        DueTooFar,
        Forbidden,
        FrameTooLarge,
        HelloRequired,
        IdempotencyKeyReused,
        InternalError,
        LimitExceeded,
        MethodNotAllowed,
        NotActive,
        NotFound,
        OutcomeUnknown,
        Overloaded,
        PeerSilent,
        ProtocolError,
        Refused,
        RequestForgotten,
        RequestTimeout,
        RowMissing,
        SendTimeout,
        SlowReader,
        StaleReceipt,
        StoreFull,
        TaskGone,
        TickwheelError,
        TlsFailed,
        TlsRequired,
        TooManyConnections,
        TooManySessions,
        TransactionCommitted,
        TransactionRolledBack,
        Unauthorized,
        UnknownTransaction,
        UnknownType,
        Unreachable,
        UnsupportedMediaType,
        VersionUnsupported,
        WindowFull,
    )

__all__ = [
    "Active",
    "BacklogFull",
    "Backup",
    "BadRequest",
    "BodyTooLarge",
    "BulkInfo",
    "BulkPreview",
    "Check",
    "Client",
    "ClientClosed",
    "Conflict",
    "ConnectionLost",
    "DeadLetter",
    "Delivery",
    "Draining",
    "DueTooFar",
    "Forbidden",
    "FrameTooLarge",
    "GroupInfo",
    "GroupSettings",
    "GroupStats",
    "HeldKey",
    "HelloRequired",
    "IdempotencyKeyReused",
    "IfPending",
    "InternalError",
    "KeyLine",
    "KeyOutcome",
    "LimitExceeded",
    "Load",
    "MethodNotAllowed",
    "NotActive",
    "NotFound",
    "Once",
    "OutcomeUnknown",
    "Overloaded",
    "Partly",
    "PeerSilent",
    "ProtocolError",
    "Receipt",
    "Receipts",
    "Refused",
    "Reject",
    "RequestForgotten",
    "RequestTimeout",
    "Rescheduled",
    "ResetPreview",
    "Retry",
    "RetryLater",
    "RowMissing",
    "ScheduleInfo",
    "ScheduleRun",
    "SendTimeout",
    "SlowReader",
    "Snooze",
    "StaleReceipt",
    "Stats",
    "Status",
    "StoreFull",
    "Subscription",
    "Task",
    "TaskGone",
    "TaskInfo",
    "TickwheelError",
    "TlsFailed",
    "TlsRequired",
    "TooManyConnections",
    "TooManySessions",
    "TopicStats",
    "Transaction",
    "TransactionCommitted",
    "TransactionInfo",
    "TransactionRolledBack",
    "Unauthorized",
    "UnknownTransaction",
    "UnknownType",
    "Unreachable",
    "UnsupportedMediaType",
    "VersionUnsupported",
    "WindowFull",
    "Worker",
    "__version__",
    "status_at",
    "statuses",
]
_PLACES = {
    "Once": "tickwheel.client.idempotence",
    "Reject": "tickwheel.client.worker",
    "RetryLater": "tickwheel.client.worker",
    "Snooze": "tickwheel.client.worker",
    "Worker": "tickwheel.client.worker",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    place = _PLACES.get(name)
    if place is None:
        # An error needs no client: whoever only catches one need not import it.
        is_error = hasattr(import_module("tickwheel.errors"), name)
        place = "tickwheel.errors" if is_error else "tickwheel.client"
    found = globals()[name] = getattr(import_module(place), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
