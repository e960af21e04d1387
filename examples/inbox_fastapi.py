"""FastAPI and SQLAlchemy: an order and its closing are one commit.

The request writes the order and the task in one transaction of the shop's database. If the card is
refused, neither exists; if the daemon is away, the task waits in the database. A taker brings it to
the daemon: here ``tickwheel inbox run`` beside the program, in production also ``tickwheel serve
--inbox URL``. With PostgreSQL only the URLs differ (docs/inbox.md).
"""

import asyncio
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import httpx
from fastapi import Depends, FastAPI, HTTPException
from sqlalchemy import create_engine, event, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from tickwheel import Client, Delivery, Task, Worker, sql

FILE = Path(tempfile.mkdtemp()) / "shop.db"
engine = create_engine(f"sqlite:///{FILE}")
closed = asyncio.Event()
worker = Worker(Client())


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    number: Mapped[str] = mapped_column(primary_key=True)
    state: Mapped[str] = mapped_column(default="open")


@event.listens_for(engine, "connect")
def use_wal(connection: object, _: object) -> None:
    connection.execute("PRAGMA journal_mode = WAL")


def transaction() -> Iterator[Session]:
    with Session(engine) as session, session.begin():
        yield session


Transaction = Annotated[Session, Depends(transaction, scope="function")]
app = FastAPI()


@app.post("/orders/{number}", status_code=201)
def place(number: str, card: str, session: Transaction) -> dict[str, str]:
    session.add(Order(number=number))
    sql.enqueue(session, Task("example.inbox", number.encode(), delay=0.5, key=number))
    if card == "stolen":
        raise HTTPException(402, "the card was refused")  # rolls back both
    return {"number": number}


@worker.on("example.inbox", group="shop")
async def close(delivery: Delivery) -> None:
    with Session(engine) as session, session.begin():
        order = session.get_one(Order, delivery.key)
        order.state = "closed"
        await delivery.ack_in(session)  # commits with the change
    print(f"order {delivery.key}: not paid in time, {order_states()}")
    closed.set()


def order_states() -> dict[str, str]:
    with Session(engine) as session:
        return {order.number: order.state for order in session.scalars(select(Order))}


async def sell() -> None:
    working = asyncio.create_task(worker.run())
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://shop") as http:
        for number, card in (("1", "stolen"), ("2", "good")):
            answer = await http.post(f"/orders/{number}", params={"card": card})
            print(f"order {number}: {answer.status_code}")
    await closed.wait()
    worker.stop()
    await working


def main() -> None:
    Base.metadata.create_all(engine)
    with engine.connect() as connection:  # the taker would create the same tables
        connection.connection.driver_connection.executescript(sql.sqlite_sql())
    command = [sys.executable, "-m", "tickwheel", "inbox", "run", f"sqlite:///{FILE}"]
    taker = subprocess.Popen(command, stderr=subprocess.DEVNULL)  # noqa: S603  # our own
    try:
        asyncio.run(sell())
    finally:
        taker.terminate()
        taker.wait()
    print("done")


if __name__ == "__main__":
    main()
