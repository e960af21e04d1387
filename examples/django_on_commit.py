"""Django: an order's time-out is enqueued when, and only when, the order is committed.

``enqueue_on_commit`` calls the client of the process after the commit: what is rolled back never
has a task. What is wrong with the task itself is raised before. Between the commit and the call the
process may die; who must not lose a task even then writes it with the order: see
``sqlalchemy_outbox.py``.

Everything of a project that does not matter here stands in one file. A project has the handlers in
``shop/tasks.py``, names them in TICKWHEEL, and runs them by ``manage.py tickwheel_worker``.
"""

import django
from django.conf import settings

settings.configure(
    INSTALLED_APPS=["tickwheel.contrib.django"],
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
    DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
    TICKWHEEL={"TIMEOUT": 2},  # the daemon at TICKWHEEL_URL; a request waits 2 s at most
)
django.setup()

from django.core.management import call_command  # noqa: E402
from django.db import connection, models, transaction  # noqa: E402

from tickwheel.contrib.django import client, enqueue_on_commit  # noqa: E402


class Order(models.Model):
    number = models.CharField(max_length=20)
    paid = models.BooleanField(default=False)

    class Meta:
        app_label = "shop"


def place(number: str, *, card_is_good: bool) -> None:
    try:
        with transaction.atomic():
            Order.objects.create(number=number)
            # robust: the order is kept by now, whatever becomes of its time-out; that is logged.
            enqueue_on_commit("example.django", b"", delay=0.2, key=number, robust=True)
            if not card_is_good:
                raise ValueError("the card was refused")
        print(f"order {number}: placed")
    except ValueError as error:
        print(f"order {number}: {error}; rolled back")


def main() -> None:
    call_command("check")
    with connection.schema_editor() as editor:
        editor.create_model(Order)
    place("1", card_is_good=True)
    place("2", card_is_good=False)
    place("3", card_is_good=True)

    # In a project this is a handler of a worker: the database here is in the memory of one thread.
    left = {"1", "3"}
    with client().subscribe("example.django", group="shop") as deliveries:
        for delivery in deliveries:
            changed = Order.objects.filter(number=delivery.key, paid=False).delete()[0]
            delivery.ack()
            print(f"order {delivery.key}: not paid in time, {changed} closed")
            left.discard(str(delivery.key))
            if not left:
                break
    print(f"orders left: {Order.objects.count()}")
    print("done")


if __name__ == "__main__":
    main()
