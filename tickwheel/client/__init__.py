"""The asynchronous client. Needs msgpack and nothing heavier.

    async with Client("tcp://127.0.0.1:7355") as client:
        receipt = await client.enqueue("orders.close", b"42", delay=1800)
        async with client.subscribe("orders.close", group="billing") as deliveries:
            async for delivery in deliveries:
                await delivery.ack()

This module lists every public name; the modules below are private. To learn how the client works,
begin with ``reconnector.py``: it owns the connection, and each other part (``producer``, ``acks``,
``requests``, ``subscription``) is a source of frames for it.
"""

from tickwheel.api.bulk import BulkInfo, BulkPreview
from tickwheel.api.daemon import (
    Active,
    Backup,
    ConsumerInfo,
    GroupStats,
    Load,
    Overview,
    Stats,
    Status,
    TaskHistory,
    TopicStats,
    Trouble,
)
from tickwheel.api.groups import (
    GroupHeld,
    GroupSettings,
    HeldKey,
    KeyLine,
    KeyPause,
    MadeGroup,
    PausedKey,
    ResetPreview,
    TopicHeld,
)
from tickwheel.api.nodes import NodeDrained, NodeInfo, Nodes, ShardInfo, ShardPlaced
from tickwheel.api.policies import IfPending, Retry
from tickwheel.api.schedules import ScheduleInfo, ScheduleRun
from tickwheel.api.targets import PushSent, TargetInfo, TargetRemoved
from tickwheel.api.tasks import DeadLetter, Explanation, GroupInfo, Reason, TaskInfo, TaskOutcome
from tickwheel.api.transactions import TransactionInfo
from tickwheel.client.checks import Check
from tickwheel.client.client import Client
from tickwheel.client.delivery import Delivery
from tickwheel.client.keywords import (
    AnyMoveKeywords,
    AnySelectionKeywords,
    DeadSelectionKeywords,
    GroupKeywords,
    NewGroupKeywords,
    ScheduledTaskKeywords,
    SettingsKeywords,
    TaskKeywords,
    TaskSelectionKeywords,
)
from tickwheel.client.producer import Partly
from tickwheel.client.status import status_at, statuses
from tickwheel.client.subscription import Subscription
from tickwheel.client.task_options import Task
from tickwheel.client.tasks import Receipt, Receipts
from tickwheel.client.transactions import Transaction

__all__ = [
    "Active",
    "AnyMoveKeywords",
    "AnySelectionKeywords",
    "Backup",
    "BulkInfo",
    "BulkPreview",
    "Check",
    "Client",
    "ConsumerInfo",
    "DeadLetter",
    "DeadSelectionKeywords",
    "Delivery",
    "Explanation",
    "GroupHeld",
    "GroupInfo",
    "GroupKeywords",
    "GroupSettings",
    "GroupStats",
    "HeldKey",
    "IfPending",
    "KeyLine",
    "KeyPause",
    "Load",
    "MadeGroup",
    "NewGroupKeywords",
    "NodeDrained",
    "NodeInfo",
    "Nodes",
    "Overview",
    "Partly",
    "PausedKey",
    "PushSent",
    "Reason",
    "Receipt",
    "Receipts",
    "ResetPreview",
    "Retry",
    "ScheduleInfo",
    "ScheduleRun",
    "ScheduledTaskKeywords",
    "SettingsKeywords",
    "ShardInfo",
    "ShardPlaced",
    "Stats",
    "Status",
    "Subscription",
    "TargetInfo",
    "TargetRemoved",
    "Task",
    "TaskHistory",
    "TaskInfo",
    "TaskKeywords",
    "TaskOutcome",
    "TaskSelectionKeywords",
    "TopicHeld",
    "TopicStats",
    "Transaction",
    "TransactionInfo",
    "Trouble",
    "status_at",
    "statuses",
]
