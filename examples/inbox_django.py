"""Django and PostgreSQL: an order and its closing are one commit.

The view writes the order and the task in one transaction of the shop's database. If the card is
refused, neither exists; if the daemon is away, the task waits in the database. Later the order is
closed and the delivery acknowledged in one transaction as well. The daemon takes tasks and acks
from the database itself (docs/inbox.md):

    createdb shop
    tickwheel serve --inbox postgresql:///shop

PGHOST, PGUSER and the other variables of libpq name another server. This example is a whole project
in one file. A real project runs handlers with ``manage.py tickwheel_worker``; they acknowledge with
``sql.ack(connection, delivery)``.
"""

import os

import django
from django.conf import settings

settings.configure(
    ROOT_URLCONF=__name__,
    DATABASES={
        "default": {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": os.environ.get("PGDATABASE", "shop"),
        }
    },
)
django.setup()

from django.db import connection, models, transaction  # noqa: E402
from django.http import HttpRequest, HttpResponse  # noqa: E402
from django.test import Client as Browser  # noqa: E402
from django.urls import path  # noqa: E402

from tickwheel import Task, sql  # noqa: E402
from tickwheel.sync import Client, Delivery  # noqa: E402


class Order(models.Model):
    number = models.CharField(max_length=20, primary_key=True)
    state = models.CharField(max_length=10, default="open")

    class Meta:
        app_label = "shop"


@transaction.atomic
def place(request: HttpRequest, number: str) -> HttpResponse:
    Order.objects.create(number=number)
    sql.enqueue(connection, Task("example.inbox_django", b"", delay=0.5, key=number))
    if request.POST["card"] == "stolen":
        transaction.set_rollback(True)  # of both
        return HttpResponse("the card was refused", status=402)
    return HttpResponse(status=201)


urlpatterns = [path("orders/<number>", place)]


@transaction.atomic
def close(delivery: Delivery) -> None:
    Order.objects.filter(number=delivery.key).update(state="closed")
    delivery.ack_in(connection)  # commits with the change


def sell() -> None:
    browser = Browser()
    for number, card in (("1", "stolen"), ("2", "good")):
        answer = browser.post(f"/orders/{number}", {"card": card})
        print(f"order {number}: {answer.status_code}")
    with Client() as client, client.subscribe("example.inbox_django", group="shop") as deliveries:
        delivery = next(iter(deliveries))
        close(delivery)
    states = dict(Order.objects.values_list("number", "state"))
    print(f"order {delivery.key}: not paid in time, {states}")


def main() -> None:
    with connection.schema_editor() as editor:
        editor.create_model(Order)
    try:
        sell()
    finally:
        with connection.schema_editor() as editor:
            editor.delete_model(Order)
    print("done")


if __name__ == "__main__":
    main()
