"""An outbox: store a task in the same transaction as the order, in your own table.

The order and a row of the table ``outbox`` are committed together in your database, without the
daemon. A relay enqueues the rows and deletes those that are durable in Tickwheel. If it dies in
between, the next relay reads the same rows. A task that is enqueued twice has the same key: the
second is dropped while the first is pending (``if_pending="keep"``), and later the consumer
recognizes it. docs/transactions.md has the same guarantee without a table, if the daemon is
available.

PostgreSQL needs three changes. The relay reads with ``SELECT … ORDER BY id LIMIT %s FOR UPDATE SKIP
LOCKED`` in one transaction with its DELETE, so that several relays share the rows. ``id`` is
``BIGINT GENERATED ALWAYS AS IDENTITY``, which is not the order of commits: delete the enqueued rows
instead of remembering the last id. A trigger can send ``NOTIFY outbox`` after an insert, and the
relay waits with ``LISTEN outbox`` instead of polling.
"""

import asyncio
import sqlite3
import tempfile
from pathlib import Path

from tickwheel import Client, OutcomeUnknown, Refused, Task, Unreachable

AT_A_TIME = 200
TOPIC = "example.table"
TABLES = """
CREATE TABLE orders(number TEXT PRIMARY KEY);
CREATE TABLE outbox(id INTEGER PRIMARY KEY, topic TEXT, body BLOB, key TEXT, delay_s REAL);
"""


def place(database: sqlite3.Connection, number: str, *, card_works: bool = True) -> None:
    """Store the order together with its timeout."""
    with database:
        database.execute("INSERT INTO orders VALUES (?)", (number,))
        database.execute(
            "INSERT INTO outbox(topic, body, key, delay_s) VALUES (?, ?, ?, 0.1)",
            (TOPIC, number.encode(), f"order-{number}"),
        )
        if not card_works:
            raise ValueError("the card was refused")


async def relay(database: sqlite3.Connection, client: Client, *, dies: bool = False) -> int:
    """Run one round and return the number of enqueued rows. After an error the rows stay."""
    rows = database.execute(
        "SELECT id, topic, body, key, delay_s FROM outbox ORDER BY id LIMIT ?", (AT_A_TIME,)
    ).fetchall()
    tasks = [
        Task(topic, body, key=key, delay=delay_s, if_pending="keep")
        for _, topic, body, key, delay_s in rows
    ]
    try:
        await client.enqueue_many(tasks, timeout=5)
    except (Refused, Unreachable, OutcomeUnknown) as error:
        print(f"the outbox waits: {error.code}")
        return 0
    if dies:
        print("the relay died before it deleted the rows")
        return 0
    with database:
        database.executemany("DELETE FROM outbox WHERE id = ?", [(row[0],) for row in rows])
    return len(rows)


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        database = sqlite3.connect(Path(folder) / "shop.db")
        database.executescript(TABLES)
        place(database, "1")
        place(database, "2")
        try:
            place(database, "3", card_works=False)
        except ValueError as error:
            print(f"order 3: {error}; rolled back, and its task with it")
        async with Client() as client:
            await relay(database, client, dies=True)
            print(
                f"enqueued: {await relay(database, client)}, then {await relay(database, client)}"
            )
            async with client.subscribe(TOPIC, group="shop") as deliveries:
                for _ in range(2):
                    delivery = await anext(deliveries)
                    print(f"{delivery.key}: not paid in time")
                    await delivery.ack()
            left = [task async for task in client.list_tasks(topic=TOPIC)]
            print(f"tasks left: {len(left)}")
        database.close()
    print("done")


if __name__ == "__main__":
    asyncio.run(main())
