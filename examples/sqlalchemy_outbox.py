"""SQLAlchemy: store a task in the same transaction as the order, with an outbox.

A database and the daemon cannot commit together. So the task is first stored as a row in the
transaction of the order. A relay enqueues the rows and deletes those that are durable in Tickwheel.
If it dies in between, or the outcome is unknown (OutcomeUnknown), it enqueues a row again. The
consumer recognizes a completed task by its key. Several relays can run if the database supports
``skip_locked``.
"""

from sqlalchemy import Engine, ForeignKey, create_engine, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from sqlalchemy.pool import StaticPool

from tickwheel import OutcomeUnknown, Refused, Task, Unreachable
from tickwheel.sync import Client

AT_A_TIME = 200


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    number: Mapped[str] = mapped_column(primary_key=True)


class Outbox(Base):
    __tablename__ = "outbox"
    id: Mapped[int] = mapped_column(primary_key=True)
    order_number: Mapped[str] = mapped_column(ForeignKey("orders.number"))
    topic: Mapped[str]
    delay_s: Mapped[float]


def place(session: Session, number: str) -> None:
    """Add the order and its timeout, which the caller commits together."""
    session.add(Order(number=number))
    session.add(Outbox(order_number=number, topic="example.outbox", delay_s=0.1))


def relay(engine: Engine, client: Client) -> int:
    """Run one round and return the number of enqueued tasks. After an error the rows stay."""
    with Session(engine) as session, session.begin():
        rows = session.scalars(
            select(Outbox).order_by(Outbox.id).limit(AT_A_TIME).with_for_update(skip_locked=True)
        ).all()
        tasks = [
            Task(row.topic, row.order_number.encode(), delay=row.delay_s, key=row.order_number)
            for row in rows
        ]
        try:
            client.enqueue_many(tasks, timeout=5)
        except (Refused, Unreachable, OutcomeUnknown) as error:
            print(f"the outbox waits: {error.code}")
            return 0
        for row in rows:
            session.delete(row)
        return len(rows)


def main() -> None:
    # An in-memory database needs a static pool; a file or server does not.
    engine = create_engine("sqlite://", poolclass=StaticPool)
    Base.metadata.create_all(engine)
    with Session(engine) as session, session.begin():
        place(session, "1")
        place(session, "2")
    with Session(engine) as session:
        place(session, "3")
        session.rollback()
        print("order 3: rolled back, and its task with it")

    nobody = Client("tcp://127.0.0.1:1", connect_timeout=0.1)  # nothing listens there
    relay(engine, nobody)
    nobody.close()
    with Client() as client:
        print(f"enqueued: {relay(engine, client)}, then {relay(engine, client)}")
        done: set[str] = set()
        with client.subscribe("example.outbox", group="shop") as deliveries:
            for delivery in deliveries:
                if delivery.key not in done:
                    done.add(str(delivery.key))
                    print(f"order {delivery.key}: not paid in time")
                delivery.ack()
                if len(done) == 2:
                    break
    print("done")


if __name__ == "__main__":
    main()
