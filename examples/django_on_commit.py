"""Django: an order's time-out is enqueued when, and only when, the order is committed.

One client a process, in a module of its own, used by every thread of the server; it connects with
its first call, also in each worker that gunicorn forks. ``transaction.on_commit`` calls after the
commit: what is rolled back never has a task. Between the commit and the call the process may die;
who must not lose a task even then writes it with the order: see ``sqlalchemy_outbox.py``.

Everything of a project that does not matter here stands in one file.
"""

import django
from django.conf import settings

settings.configure(
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
    DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
)
django.setup()

from django.db import connection, models, transaction  # noqa: E402

from tickwheel import TickwheelError  # noqa: E402
from tickwheel.sync import Client  # noqa: E402

client = Client()  # of TICKWHEEL_URL; in a project: shop/tasks.py


class Order(models.Model):
    number = models.CharField(max_length=20)
    paid = models.BooleanField(default=False)

    class Meta:
        app_label = "shop"


def close_unless_paid(number: str) -> None:
    """For ``on_commit``: the order is kept by now, whatever becomes of this."""
    try:
        client.enqueue("example.django", number.encode(), delay=0.2, key=number, timeout=2)
    except TickwheelError as error:
        print(f"order {number}: its time-out could not be set: {error.code}")


def place(number: str, *, card_is_good: bool) -> None:
    try:
        with transaction.atomic():
            Order.objects.create(number=number)
            transaction.on_commit(lambda: close_unless_paid(number))
            if not card_is_good:
                raise ValueError("the card was refused")
        print(f"order {number}: placed")
    except ValueError as error:
        print(f"order {number}: {error}; rolled back")


def main() -> None:
    with connection.schema_editor() as editor:
        editor.create_model(Order)
    place("1", card_is_good=True)
    place("2", card_is_good=False)
    place("3", card_is_good=True)

    # In a project: a management command, or a worker (``tickwheel work``) with sync handlers.
    left = {"1", "3"}
    with client.subscribe("example.django", group="shop") as deliveries:
        for delivery in deliveries:
            changed = Order.objects.filter(number=delivery.key, paid=False).delete()[0]
            delivery.ack()
            print(f"order {delivery.key}: not paid in time, {changed} closed")
            left.discard(str(delivery.key))
            if not left:
                break
    print(f"orders left: {Order.objects.count()}")
    client.close()
    print("done")


if __name__ == "__main__":
    main()
