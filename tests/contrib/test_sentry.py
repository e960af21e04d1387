"""Sentry's integration in a process of its own, with a transport that keeps what would be sent.

Of its own, because ``sentry_sdk.init`` changes threads, logging and more for a whole process.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from contrib.forking import Forking
from support.frameworks import need

need("sentry_sdk")

ROOT = Path(__file__).parents[2]
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
PROGRAM = """
import asyncio, json, logging, sys

import sentry_sdk
from sentry_sdk.transport import Transport

from tickwheel import Client, Delivery, Reject, Retry, RetryLater, Snooze, Worker
from tickwheel.contrib.sentry import TickwheelIntegration
from tickwheel.testing import TestWheel

sent = []

class Kept(Transport):
    def capture_envelope(self, envelope):
        for item in envelope.items:
            sent.append((item.type, item.payload.json))

worker = Worker(Client())
once = Retry.fixed(1, retries=1)

@worker.on("async", retry=once)
async def coroutine(delivery: Delivery) -> None:
    {handler}

@worker.on("plain", group="shop", retry=once)
def plain(delivery: Delivery) -> None:
    {handler}

def handle(delivery: Delivery) -> None:
    body, told = delivery.body, delivery.body.decode()
    sentry_sdk.add_breadcrumb(message=f"crumb of {{delivery.key}}")
    if told.startswith("broken"):
        raise ValueError("it is broken")
    if told.startswith("tells"):
        raise ValueError(told) from KeyError(told)
    if told.startswith("message"):
        sentry_sdk.capture_message("said by the handler")
    if told.startswith("reject"):
        raise Reject("no such order")
    if told.startswith("later") and delivery.attempt == 1:
        raise RetryLater(1)
    if told.startswith("snooze") and delivery.attempt == 1:
        raise Snooze(1)

@worker.on("slow", timeout=0.02, retry=Retry.none())
async def slow(delivery: Delivery) -> None:
    secret = delivery.body
    await asyncio.sleep(60)  # real time: cancelled at once

@worker.on("itself", retry=Retry.none())
async def captures(delivery: Delivery) -> None:
    try:
        raise KeyError("captured by itself")
    except KeyError as error:
        sentry_sdk.capture_exception(error)
        raise

async def main() -> None:
    async with TestWheel() as wheel:
        await wheel.client.enqueue("before", b"")
        async with wheel.working(worker):
            for task in json.load(sys.stdin):
                trace = task.get("trace")
                await wheel.client.enqueue(
                    task["topic"], task["body"].encode(), key=task.get("key"), trace=trace
                )
                await wheel.run_until_idle()

# Its integrations of other frameworks would import these.
sentry_sdk.init(
    "http://key@127.0.0.1/1", transport=Kept, auto_enabling_integrations=False, {init}
)
asyncio.run(main())
sentry_sdk.flush()
print(json.dumps(sent))
"""
INIT = "integrations=[TickwheelIntegration()]"
SECRET = "SECRET-of-a-body"
FORKING = Forking("asyncio", "sentry_sdk", "tickwheel.contrib.sentry", "tickwheel.testing")


@pytest.fixture(scope="module", autouse=True)
def forking() -> Iterator[None]:
    yield
    FORKING.close()


def sent(*tasks: dict[str, str], init: str = INIT, **env: str) -> list[tuple[str, Any]]:
    program = PROGRAM.replace("{handler}", "handle(delivery)").replace("{init}", init)
    program = program.replace("{{", "{").replace("}}", "}")
    code, out, err = FORKING.run(  # not as arguments: those are sent
        program, stdin=json.dumps(tasks), cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
    )  # fmt: skip
    assert code == 0, err
    answer: list[tuple[str, Any]] = json.loads(out)
    return answer


def events(*tasks: dict[str, str], init: str = INIT) -> list[Any]:
    return [event for kind, event in sent(*tasks, init=init) if kind == "event"]


def tags(event: Any) -> list[str]:
    return [event["tags"][f"tickwheel.{name}"] for name in ("topic", "group", "attempt")]


def error_of(event: Any) -> str:
    last = event["exception"]["values"][-1]
    return f"{last['type']}: {last['value']}"


def test_handler_errors_are_captured_once_per_attempt() -> None:
    result = events({"topic": "async", "body": "broken"}, {"topic": "plain", "body": "broken"})
    assert [tags(event) for event in result] == [
        ["async", "default", "1"], ["async", "default", "2"],
        ["plain", "shop", "1"], ["plain", "shop", "2"],
    ]  # fmt: skip
    assert {error_of(event) for event in result} == {"ValueError: it is broken"}
    assert all(int(event["tags"]["tickwheel.task_id"]) for event in result)
    mechanism = result[0]["exception"]["values"][-1]["mechanism"]
    assert (mechanism["type"], mechanism["handled"]) == ("tickwheel", False)


def test_each_attempt_has_its_own_scope() -> None:
    result = events(
        {"topic": "async", "body": "fine", "key": "1"},
        {"topic": "async", "body": "message", "key": "2"},
        {"topic": "plain", "body": "message", "key": "3"},
    )
    assert [event["message"] for event in result] == ["said by the handler"] * 2
    assert [tags(event) for event in result] == [["async", "default", "1"], ["plain", "shop", "1"]]
    crumbs = [[value["message"] for value in event["breadcrumbs"]["values"]] for event in result]
    assert crumbs == [["crumb of 2"], ["crumb of 3"]]


def test_verdicts_are_captured_on_request() -> None:
    tasks = [{"topic": "async", "body": body} for body in ("reject", "later", "snooze")]
    assert events(*tasks) == []
    result = events(*tasks, init="integrations=[TickwheelIntegration(verdicts=True)]")
    assert [event["exception"]["values"][-1]["type"] for event in result] == [
        "Reject", "RetryLater", "Snooze",
    ]  # fmt: skip


def test_captured_errors_are_not_captured_again() -> None:
    result = events({"topic": "slow", "body": "x"}, {"topic": "itself", "body": "x"})
    assert [event["exception"]["values"][-1]["type"] for event in result] == [
        "TimeoutError", "KeyError",
    ]  # fmt: skip


def test_bodies_are_never_sent() -> None:
    tasks = [
        {"topic": topic, "body": f"{body} {SECRET}", "key": "42"}
        for topic in ("async", "plain", "slow", "itself")
        for body in ("broken", "message", "reject")
    ]
    init = (
        "integrations=[TickwheelIntegration(verdicts=True)], traces_sample_rate=1.0,"
        " attach_stacktrace=True, send_default_pii=True, include_local_variables=True"
    )
    result = sent(*tasks, init=init)
    kinds = [kind for kind, _ in result]
    assert kinds.count("transaction") > len(tasks) and kinds.count("event") > len(tasks)
    assert sum("threads" in event for kind, event in result if kind == "event") == 2
    assert SECRET not in json.dumps(result)


def test_messages_of_encrypted_tasks_errors_are_not_sent(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"a {base64.b64encode(b'k' * 32).decode()}")
    keys.chmod(0o600)
    task = {"topic": "plain", "body": f"tells {SECRET}"}
    assert SECRET in json.dumps(sent(task))
    result = sent(task, TICKWHEEL_KEYS_FILE=str(keys))
    errors = [event["exception"]["values"] for kind, event in result if kind == "event"]
    assert [[value["type"] for value in values] for values in errors] == [
        ["KeyError", "ValueError"]
    ] * 2
    assert SECRET not in json.dumps(result)


def test_each_attempt_is_a_transaction_in_its_tasks_trace() -> None:
    result = sent(
        {"topic": "async", "body": "fine", "trace": TRACE},
        {"topic": "plain", "body": "broken"},
        init=f"{INIT}, traces_sample_rate=1.0",
    )
    transactions = [event for kind, event in result if kind == "transaction"]
    contexts = [event["contexts"]["trace"] for event in transactions]
    assert [event["transaction"] for event in transactions] == [
        "async (default)", "plain (shop)", "plain (shop)",
    ]  # fmt: skip
    assert [context["status"] for context in contexts] == ["ok"] + ["internal_error"] * 2
    assert {context["op"] for context in contexts} == {"queue.process"}
    assert contexts[0]["trace_id"] == TRACE.split("-")[1]
    assert contexts[0]["parent_span_id"] == TRACE.split("-")[2]
    data = contexts[2]["data"]
    assert data["messaging.destination.name"] == "plain"
    assert data["messaging.message.retry.count"] == 1
    errors = [event for kind, event in result if kind == "event"]
    assert [event["contexts"]["trace"]["trace_id"] for event in errors] == [
        context["trace_id"] for context in contexts[1:]
    ]


def test_disabled_tracing_sends_no_transactions() -> None:
    assert [kind for kind, _ in sent({"topic": "async", "body": "fine"})] == []
    other = sent({"topic": "async", "body": "message"}, init="")
    assert [event.get("tags") for kind, event in other if kind == "event"] in ([None], [{}])
