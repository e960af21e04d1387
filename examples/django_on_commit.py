"""Django: enqueue an order's timeout if and only if the order is committed.

``enqueue_on_commit`` enqueues after the commit, so a rolled-back order never has a task. Errors in
the task itself are raised before the commit. If the process can die between commit and enqueue and
the task must not be lost, store it with the order: see ``inbox_django.py``.

This example is a whole project in one file. A real project has its handlers in ``shop/tasks.py``,
lists them in TICKWHEEL, and runs them with ``manage.py tickwheel_worker``.
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
            # robust: the order is already committed, so a failed enqueue is only logged.
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

    # A project would use a worker. This in-memory database belongs to one thread.
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
