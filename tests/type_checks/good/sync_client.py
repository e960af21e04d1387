"""What type checkers must see of the synchronous client: the types of all that it returns."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from datetime import timedelta
from typing import assert_type

from tickwheel import BulkInfo, Receipt, Receipts, Task, TaskInfo, TaskOutcome, sync

client = sync.Client()
assert_type(client.enqueue("orders.close", b"42", delay=timedelta(minutes=30), key="42"), Receipt)
assert_type(client.enqueue_nowait("orders.close", b"42", ttl=60), Future[Receipt])
assert_type(client.enqueue_many([Task("orders.close", b"42")]), list[Receipt])
assert_type(client.enqueue_columns("orders.close", [b"42"], delays=[1]), Receipts)
assert_type(client.lookup(42), TaskInfo)
assert_type(client.lookup(topic="orders.close", key="42", newest=True), list[TaskInfo])
assert_type(client.reschedule(42, delay=5), TaskOutcome)
assert_type(client.reschedule(topic="orders.close", key="42", delay=5), list[TaskOutcome])
assert_type(client.reschedule(topic="orders.close", filter={"tags": "eu"}, shift=5), BulkInfo)
assert_type(client.list_tasks(state="ready"), Iterator[TaskInfo])
assert_type(client.pull("orders.close", max=8, wait=1), list[sync.Delivery])
assert_type(client.subscribe("orders.close", group="billing"), sync.Subscription)
with client.transaction("orders") as transaction:
    assert_type(transaction.enqueue("orders.close", b"42", tag="eu"), None)
    assert_type(transaction.commit(timeout=1), list[Receipt])
