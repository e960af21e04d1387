"""What type checkers must reject of the synchronous client: each line that ends so."""

from __future__ import annotations

from tickwheel import sync

client = sync.Client()
client.enqueue("orders.close")  # error
client.enqueue("orders.close", "42")  # error
client.enqueue("orders.close", b"42", dely=30)  # error
client.enqueue("orders.close", b"42", delay=b"30m")  # error
client.enqueue("orders.close", b"42", kay="42")  # error
client.enqueue("orders.close", b"42", key=42)  # error
str(client.enqueue_nowait("orders.close", b"42").ide)  # error
str(client.enqueue_nowait("orders.close", b"42").result().ide)  # error
client.enqueue_many([b"42"])  # error
client.lookup("42")  # error
client.lookup(42, key="42")  # error
str(client.lookup(42).sate)  # error
client.cancel(topic="orders.close")  # error
client.cancel(topic="orders.close", filter={"tag": "eu"})  # error
str(client.cancel(42).status)  # error
client.list_tasks(state="redy")  # error
client.pull("orders.close", max="32")  # error
client.transaction("orders", count_from="later")  # error

for task in client.list_tasks(limit=10):
    str(task.kay)  # error
for delivery in client.subscribe("orders.close", prefetch=10):
    str(delivery.ack().upper().nothing)  # error
    delivery.nack(delay=b"5m")  # error
    delivery.extend()  # error
with client.transaction("orders") as transaction:
    transaction.enqueue("orders.close", b"42", if_panding="keep")  # error
    str(transaction.commit()[0].ide)  # error
