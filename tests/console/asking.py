"""The daemon's HTTP API for the browser's tests: what the pages shall show is made with it."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

from support.daemon import Daemon
from tickwheel.sync import Client

TIMEOUT_S = 60
PULL_WAIT_MS = 30_000


def ask(
    daemon: Daemon, method: str, path: str, body: Any = None, token: str | None = None
) -> tuple[int, Any]:
    """(status, JSON)"""
    headers = {"content-type": "application/json"}
    if token is not None:
        headers["authorization"] = f"Bearer {token}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{daemon.http}{path}", data, headers, method=method)  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:  # noqa: S310
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def post(daemon: Daemon, path: str, body: Any = None, token: str | None = None) -> Any:
    status, said = ask(daemon, "POST", path, body, token)
    assert status in (200, 201), said
    return said


def get(daemon: Daemon, path: str) -> Any:
    return ask(daemon, "GET", path)[1]


def enqueue(daemon: Daemon, topic: str, count: int = 1, **task: Any) -> list[str]:
    """Ids of so many tasks."""
    tasks = [{"topic": topic, "body": f"body {n}", **task} for n in range(count)]
    return [row["id"] for row in post(daemon, "/v1/tasks", {"tasks": tasks})["tasks"]]


def pull(daemon: Daemon, topic: str, group: str = "g", count: int = 1) -> list[Any]:
    """What is ready, up to so many; at least one, which is waited for."""
    given = {"group": group, "max": count, "wait_ms": PULL_WAIT_MS}
    deliveries: list[Any] = post(daemon, f"/v1/topics/{topic}/pull", given)["deliveries"]
    return deliveries


def make_group(daemon: Daemon, topic: str, group: str = "g", **settings: Any) -> None:
    status, said = ask(daemon, "PUT", f"/v1/topics/{topic}/groups/{group}", settings)
    assert status in (200, 201), said


def held_keys(daemon: Daemon, topic: str, *keys: str, group: str = "g") -> None:
    """Keys whose first task was rejected, and that have another one behind it."""
    make_group(daemon, topic, group, order_failure="hold")
    for key in keys:
        enqueue(daemon, topic, 2, order_key=key)
    receipts: list[str] = []
    while len(receipts) < len(keys):
        some = pull(daemon, topic, group, len(keys) - len(receipts))
        receipts += [entry["receipt"] for entry in some]
    post(daemon, "/v1/rejections", {"receipts": receipts, "reason": "no such account"})


def dead_letters(
    daemon: Daemon, topic: str, count: int, reason: str = "no such order"
) -> list[str]:
    """Ids of so many dead letters of group g."""
    make_group(daemon, topic)
    enqueue(daemon, topic, count)
    results: list[str] = []
    while len(results) < count:
        some = pull(daemon, topic, count=min(500, count))
        receipts = [entry["receipt"] for entry in some]
        post(daemon, "/v1/rejections", {"receipts": receipts, "reason": reason})
        results += [row["id"] for row in some]
    return results


def prepare(
    daemon: Daemon,
    name: str,
    *tasks: dict[str, Any],
    group: str = "payments",
    token: str | None = None,
) -> None:
    """A transaction that its producer leaves open."""
    with Client(daemon.url, token=token) as client:
        transaction = client.transaction(group, id=name)
        for task in tasks:
            transaction.enqueue(**{"body": b""} | task)
