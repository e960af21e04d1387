"""Tickwheel: a hashed timing-wheel scheduler daemon and its client.

``from tickwheel import Client, Task`` needs only the base install (msgpack). Each name is imported
on first use because the daemon, the history writer and the command line also import this package
and start faster without the client. docs/python.md describes every name here. Names that are not
listed here, in ``tickwheel.client``, ``tickwheel.sql`` or ``tickwheel.sync`` are private.
"""

# ruff: noqa: F403, F405  # type checkers verify that each name exists
from importlib import import_module
from typing import TYPE_CHECKING, Any

from tickwheel.version import __version__

if TYPE_CHECKING:  # __all__ lists the public names
    from tickwheel.client import *
    from tickwheel.client.idempotence import Once
    from tickwheel.client.jobs import HandlerKeywords
    from tickwheel.client.typed import (
        BlockingTask,
        DeliveryTask,
        TypedTask,
        TypedTaskOptions,
        task,
    )
    from tickwheel.client.worker import Reject, RetryLater, Snooze, Worker
    from tickwheel.errors import *
    from tickwheel.inside import Embedded, embedded
    from tickwheel.persistence.contract import StoreBroken

__all__ = [
    "Active",
    "AnyMoveKeywords",
    "AnySelectionKeywords",
    "BacklogFull",
    "Backup",
    "BadBody",
    "BadRequest",
    "BlockingTask",
    "BodyTooLarge",
    "BulkInfo",
    "BulkPreview",
    "Check",
    "Client",
    "ClientClosed",
    "Conflict",
    "ConnectionLost",
    "ConsumerInfo",
    "DeadLetter",
    "DeadSelectionKeywords",
    "Delivery",
    "DeliveryTask",
    "Draining",
    "DueTooFar",
    "Embedded",
    "Explanation",
    "Forbidden",
    "FrameTooLarge",
    "GroupHeld",
    "GroupInfo",
    "GroupKeywords",
    "GroupSettings",
    "GroupStats",
    "HandlerKeywords",
    "HeldKey",
    "HelloRequired",
    "IdempotencyKeyReused",
    "IfPending",
    "InternalError",
    "KeyLine",
    "KeyPause",
    "LimitExceeded",
    "Load",
    "MadeGroup",
    "MethodNotAllowed",
    "NewGroupKeywords",
    "NotActive",
    "NotFound",
    "Once",
    "OutcomeUnknown",
    "Overloaded",
    "Overview",
    "Partly",
    "PausedKey",
    "PeerSilent",
    "ProtocolError",
    "PushSent",
    "Reason",
    "Receipt",
    "Receipts",
    "Refused",
    "Reject",
    "RequestForgotten",
    "RequestTimeout",
    "ResetPreview",
    "Retry",
    "RetryLater",
    "RowMissing",
    "ScheduleInfo",
    "ScheduleRun",
    "ScheduledTaskKeywords",
    "SendTimeout",
    "SettingsKeywords",
    "SlowReader",
    "Snooze",
    "StaleReceipt",
    "Stats",
    "Status",
    "StoreBroken",
    "StoreFull",
    "Subscription",
    "TargetInfo",
    "TargetRemoved",
    "Task",
    "TaskGone",
    "TaskHistory",
    "TaskInfo",
    "TaskKeywords",
    "TaskOutcome",
    "TaskSelectionKeywords",
    "TickwheelError",
    "TlsFailed",
    "TlsRequired",
    "TooManyConnections",
    "TooManySessions",
    "TopicHeld",
    "TopicStats",
    "Transaction",
    "TransactionCommitted",
    "TransactionInfo",
    "TransactionRolledBack",
    "Trouble",
    "TypedTask",
    "TypedTaskOptions",
    "Unauthorized",
    "Undecodable",
    "UnknownTransaction",
    "UnknownType",
    "Unreachable",
    "UnsupportedMediaType",
    "VersionUnsupported",
    "WindowFull",
    "Worker",
    "__version__",
    "embedded",
    "status_at",
    "statuses",
    "task",
]
_MODULES = {
    "BlockingTask": "tickwheel.client.typed",
    "DeliveryTask": "tickwheel.client.typed",
    "Embedded": "tickwheel.inside",
    "HandlerKeywords": "tickwheel.client.jobs",
    "Once": "tickwheel.client.idempotence",
    "Reject": "tickwheel.client.worker",
    "RetryLater": "tickwheel.client.worker",
    "Snooze": "tickwheel.client.worker",
    "StoreBroken": "tickwheel.persistence.contract",
    "TypedTask": "tickwheel.client.typed",
    "TypedTaskOptions": "tickwheel.client.typed",
    "Worker": "tickwheel.client.worker",
    "embedded": "tickwheel.inside",
    "task": "tickwheel.client.typed",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _MODULES.get(name)
    if module is None:
        # Code that only catches an error does not import the client.
        is_error = hasattr(import_module("tickwheel.errors"), name)
        module = "tickwheel.errors" if is_error else "tickwheel.client"
    value = globals()[name] = getattr(import_module(module), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
