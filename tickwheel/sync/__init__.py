"""The synchronous client, for Django, Flask and scripts. Needs msgpack and nothing heavier.

    from tickwheel.sync import Client

    client = Client("tcp://127.0.0.1:7355")          # one a process; every thread may use it
    client.enqueue("orders.close", b"42", delay=1800, timeout=2)

It is the asynchronous client, in a thread of its own: same verbs, same arguments, same errors.
"""

from tickwheel.sync.client import Client, Delivery, Subscription, Transaction

__all__ = ["Client", "Delivery", "Subscription", "Transaction"]
