"""The HTTP API of all shards together, over real daemons on one machine, and on nodes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from outbound.endpoint import SECRET, Endpoint, serving
from support.certificates import Authority
from support.daemon import Daemon
from support.http_asking import Answer, ask
from support.nodes import Nodes
from support.ports import free_ports
from support.redis_server import RedisServer
from support.shards import key_in
from support.waiting import until
from tickwheel import Client
from tickwheel.model.values import SHARD_BITS

COUNT = 3
HOUR_MS = 3_600_000
NODE_SHARDS = 4
MakeDaemon = Callable[..., Daemon]


class Machine:
    """Three shards on one machine, and the HTTP of all of them."""

    def __init__(
        self, make_daemon: MakeDaemon, folder: Path, scheme: str = "", **settings: Any
    ) -> None:
        listen = f"{'tls' if scheme else 'tcp'}://127.0.0.1:{free_ports(COUNT)}"
        where = ("--listen", listen, "--http-all", f"{scheme}127.0.0.1:0")
        args = ("--processes", str(COUNT), *where)
        store = f"sqlite:///{folder / 'shards'}/"
        self.parent = make_daemon(store=store, args=args, http=True, **settings).start()
        self.url = self.parent.http_all

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        return ask(self.url, method, path, body, **headers)

    def pids(self) -> list[int]:
        answer = json.loads((self.parent.folder / "ready.json").read_text())
        return [shard["pid"] for shard in answer["shards"]]


def shard_of(task_id: str) -> int:
    return int(task_id) & ((1 << SHARD_BITS) - 1)


def test_the_gateway_serves_the_tasks_of_all_shards(
    make_daemon: MakeDaemon, tmp_path: Path
) -> None:
    machine = Machine(make_daemon, tmp_path)
    assert machine.ask("GET", "/readyz").status in (200, 503)
    assert machine.ask("PUT", "/v1/topics/orders/groups/g", {}).status == 201
    ids = []
    for n in range(9):
        task = {"body": f"b{n}", "key": key_in(n % COUNT, COUNT, f"k{n}-"), "topic": "orders"}
        answer = machine.ask("POST", "/v1/tasks", task)
        assert answer.status == 201, answer.body
        ids.append(answer.json["id"])
        assert shard_of(ids[-1]) == n % COUNT
    raw = machine.ask("POST", "/v1/topics/orders/tasks", {"any": "body"}, tickwheel_delay_ms="5")
    assert raw.status == 201
    for path in ("/v1/tasks?topic=orders&", "/v1/topics/orders/peek?"):
        found, after = list[str](), ""
        while True:
            page = machine.ask("GET", f"{path}limit=4{after}").json
            found += [task["id"] for task in page["tasks"]]
            if page["next"] is None:
                break
            after = f"&after={page['next']}"
        assert sorted(found) == sorted([*ids, raw.json["id"]]), path
    receipts = list[str]()

    def pulled() -> bool:
        asked = {"group": "g", "max": 10, "wait_ms": 1_000}
        answer = machine.ask("POST", "/v1/topics/orders/pull", asked)
        assert "new_group" not in answer.json
        receipts.extend(delivery["receipt"] for delivery in answer.json["deliveries"])
        return len(receipts) == 10

    until(pulled)
    other = machine.ask("POST", "/v1/topics/orders/pull", {"group": "h"}).json
    assert other["new_group"]["adopted"] == 0
    settled = machine.ask("POST", "/v1/acks", {"receipts": receipts})
    assert settled.json["results"] == ["acked"] * 10
    assert machine.ask("GET", "/v1/stats").json["acked"] == 10
    assert machine.ask("GET", "/console/").status == 200
    assert machine.ask("GET", "/v1/overview").json["counts"]["scheduled"] == 0
    assert machine.ask("GET", "/v1/shards").json["shards"][2]["shard"] == 2
    assert machine.parent.terminate() == 0
    assert "Traceback" not in machine.parent.log_text()


def test_a_frozen_shard_does_not_delay_the_others(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    machine = Machine(make_daemon, tmp_path)
    tasks = [{"topic": "t", "key": key_in(n, COUNT), "delay_ms": HOUR_MS} for n in range(COUNT)]
    ids = [machine.ask("POST", "/v1/tasks", task).json["id"] for task in tasks]
    frozen, task_url = machine.pids()[1], f"/v1/tasks/{ids[1]}"
    os.kill(frozen, signal.SIGSTOP)
    try:
        for shard in (0, 2):
            assert machine.ask("GET", f"/v1/tasks/{ids[shard]}").status == 200
            assert machine.ask("POST", "/v1/tasks", tasks[shard]).status == 201
        with ThreadPoolExecutor(2) as pool:  # both wait for it
            away, of_all = pool.map(partial(machine.ask, "GET"), (task_url, "/v1/status"))
        assert away.status in (502, 503, 504) and away.json["retryable"], away.body
        status = of_all.json
        assert status["state"] == "unreachable" and status["detail"].startswith("shard 1: ")
        assert [entry["reachable"] for entry in status["statuses"]] == [True, False, True]
        assert machine.ask("GET", "/healthz").status == 200
    finally:
        os.kill(frozen, signal.SIGCONT)
    until(lambda: machine.ask("GET", task_url).status == 200)


@pytest.mark.slow  # server/http/test_gateway.py, in process
def test_all_shards_are_restored_together(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    folder = tmp_path / "backups"
    folder.mkdir()
    settings = {"history_dir": str(tmp_path / "history"), "history_bodies": "true"}
    machine = Machine(make_daemon, tmp_path, backup_dir=str(folder), **settings)

    def fill(name: str) -> list[str]:
        tasks = [
            {"topic": "t", "key": key_in(n, COUNT, name), "delay_ms": HOUR_MS} for n in range(COUNT)
        ]
        return [machine.ask("POST", "/v1/tasks", task).json["id"] for task in tasks]

    def ended(**wanted: Any) -> Any:
        made = machine.ask("POST", "/v1/restores", {"backup": "a.db", **wanted})
        assert made.status == 202, made.body
        path = f"/v1/restores/{made.json['id']}"

        def over() -> Any:
            result = machine.ask("GET", path).json
            return result if result["state"] != "running" else None

        return until(over)

    before = fill("before")
    assert machine.ask("POST", "/v1/backups", {"name": "a.db"}).status == 201
    since = fill("since")
    assert machine.ask("DELETE", f"/v1/tasks/{before[2]}").status == 200
    result = ended(into="new.db")
    assert (result["state"], result["error"]) == ("done", None), result
    assert result["report"]["restored"] == 5
    assert [entry["report"]["restored"] for entry in result["shards"]] == [2, 2, 1]
    files = [folder / f"shard-{n}" / f"new-shard-{n}.db" for n in range(COUNT)]
    assert all(file.is_file() for file in files)
    one = ended(into="one.db", ids=[since[1]])
    assert (one["state"], one["into"], one["report"]["restored"]) == ("done", "one-shard-1.db", 1)
    again = machine.ask("POST", "/v1/restores", {"into": "new.db", "backup": "a.db"})
    assert (again.status, again.json["code"]) == (409, "conflict")
    assert "shard 0: new-shard-0.db already exists" in again.json["detail"]
    assert "no shard has started the restore" in again.json["detail"]
    assert len(machine.ask("GET", "/v1/restores").json["restores"]) == 2
    assert machine.parent.terminate() == 0
    for shard, file in enumerate(files):
        file.replace(tmp_path / "shards" / f"shard-{shard}.db")
    restored = Machine(make_daemon, tmp_path)
    listed = restored.ask("GET", "/v1/tasks?topic=t").json["tasks"]
    assert [task["id"] for task in listed] == sorted([*before[:2], *since], key=int)
    assert "Traceback" not in machine.parent.log_text()


@pytest.mark.parametrize("scheme", ["", "https://"])
def test_the_gateway_passes_tokens_on_with_and_without_tls(
    make_daemon: MakeDaemon, tmp_path: Path, scheme: str
) -> None:
    settings: dict[str, Any] = {"serve_token": "of-everything", "login_delay_s": 0}
    if scheme:
        pair = Authority(tmp_path).sign("daemon")
        settings |= {"tls_cert": pair.cert, "tls_key": pair.key}
    machine = Machine(make_daemon, tmp_path, scheme, **settings)
    shown = {"authorization": "Bearer of-everything"}
    for headers in ({}, {"authorization": "Bearer wrong"}):
        refused = machine.ask("GET", "/v1/stats", **headers)
        assert (refused.status, refused.json["code"]) == (401, "unauthorized")
    task = {"topic": "t", "key": key_in(2, COUNT), "delay_ms": HOUR_MS}
    made = machine.ask("POST", "/v1/tasks", task, **shown)
    assert made.status == 201 and shard_of(made.json["id"]) == 2, made.body
    console = {"tickwheel_console": "1"}
    login = machine.ask("POST", "/v1/sessions", **shown, **console)
    cookie = login.headers["set-cookie"].partition(";")[0]
    assert machine.ask("GET", "/v1/stats", cookie=cookie, **console).json["scheduled"] == 1


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """Two nodes that a few tests share."""
    folder = tmp_path_factory.mktemp("nodes")
    registry = RedisServer(folder / "redis").start().lay_out(NODE_SHARDS)
    with Nodes(folder, registry.url(), NODE_SHARDS, http=True, push_allow="127.0.0.0/8") as made:
        made.until_led("a", "ab")
        until(lambda: made.leaders("b") == made.leaders("a"), 60, made.log)
        yield made
    registry.kill()
    assert "Traceback" not in made.log()


def test_a_node_answers_for_tasks_of_the_other_node(nodes: Nodes) -> None:
    led_by = nodes.leaders("a")
    elsewhere = next(shard for shard, name in led_by.items() if name == "b")
    task = {"topic": "t", "key": key_in(elsewhere, NODE_SHARDS), "body": "x", "delay_ms": HOUR_MS}
    before = ask(nodes["a"].http, "GET", "/v1/stats").json["scheduled"]
    made = ask(nodes["a"].http, "POST", "/v1/tasks", task)
    assert made.status == 201 and shard_of(made.json["id"]) == elsewhere, made.body
    for name in "ab":
        answer = ask(nodes[name].http, "GET", f"/v1/tasks/{made.json['id']}")
        assert (answer.status, answer.json["body"]) == (200, "x")
        assert ask(nodes[name].http, "GET", "/v1/stats").json["scheduled"] == before + 1
        status = ask(nodes[name].http, "GET", "/v1/status").json
        assert status["state"] == "ready", status
        nodes_of = {entry["shard"]: entry["node"] for entry in status["statuses"]}
        assert nodes_of == led_by
    assert len(ask(nodes["a"].http, "GET", "/v1/nodes").json["nodes"]) == 2


def test_a_nodes_http_serves_its_shards(nodes: Nodes) -> None:
    led_by, node = nodes.leaders("a"), nodes["a"]
    own = [shard for shard, name in led_by.items() if name == "a"]
    assert [entry["shard"] for entry in get(node.http, "/v1/shards")["shards"]] == own
    assert get(node.http, "/readyz") == {
        "status": "ready",
        "shards": {str(shard): "ready" for shard in own},
    }
    first = get(node.http, "/v1/shards")["shards"][0]
    asked = get(first["http"], "/v1/nodes")
    assert {entry["node"]: entry["http"] for entry in asked["nodes"]} == {
        name: one.http for name, one in nodes.all.items()
    }
    text = ask(node.http, "GET", "/metrics").body.decode()
    for shard in own:
        assert f'tickwheel_node_shards{{shard="{shard}",node="a"}} {len(own)}' in text
        assert f'tickwheel_node_unserved_shards{{shard="{shard}",node="a"}} 0' in text


def get(http: str, path: str) -> Any:
    answer = ask(http, "GET", path)
    assert answer.status == 200, answer.body
    return answer.json


def test_names_are_unique_over_all_nodes(nodes: Nodes) -> None:
    """Schedules, transactions and idempotency keys, with tasks of two shards each."""

    def ask_both(method: str, path: str, body_of: Callable[[str], Any], **more: str) -> Any:
        with ThreadPoolExecutor(2) as pool:
            asked = [
                pool.submit(ask, nodes[name].http, method, path, body_of(key), **more)
                for name, key in zip(
                    "ab", (key_in(0, NODE_SHARDS), key_in(1, NODE_SHARDS)), strict=True
                )
            ]
            return sorted(item.result().status for item in asked)

    def of_transaction(key: str) -> Any:
        of = {"id": "x", "group": "g", "part": 1}
        return {"transaction": of, "tasks": [{"topic": "t", "key": key}]}

    def of_schedule(key: str) -> Any:
        return {"topic": "t", "every_ms": HOUR_MS, "task": {"key": key}}

    assert ask_both("POST", "/v1/tasks", of_transaction) == [201, 409]
    assert ask_both("PUT", "/v1/schedules/s", of_schedule) == [201, 409]
    once = {"idempotency_key": "pay-1"}
    later = {"topic": "once", "delay_ms": HOUR_MS}
    assert ask_both("POST", "/v1/tasks", lambda key: {**later, "key": key}, **once) == [
        201,
        422,
    ]
    assert len(ask(nodes["a"].http, "GET", "/v1/schedules").json["schedules"]) <= 1
    assert ask(nodes["b"].http, "POST", "/v1/transactions/x/commit").status == 200
    assert len(ask(nodes["a"].http, "GET", "/v1/tasks?topic=once").json["tasks"]) == 1


async def test_a_callback_reaches_a_moved_shard(nodes: Nodes) -> None:
    """Its address is that of the node that sent the task, which has the shard no more."""
    async with serving(Endpoint(status=202)) as endpoint:
        shard = next(n for n, name in nodes.leaders("a").items() if name == "b")
        async with Client(f"{nodes['a'].url},{nodes['b'].url}") as client:
            await client.set_push("pushed", "g", endpoint.url, secrets=[SECRET], callback_lease=600)
            sent = [
                await client.enqueue("pushed", b"x", key=key_in(shard, NODE_SHARDS))
                for _ in range(2)
            ]
            await endpoint.until_count(2)
            urls = [item.headers["tickwheel-callback"] for item in endpoint.got]
            assert all(url.startswith(nodes["b"].http + "/") for url in urls), urls
            await client.move_shard(shard, "a")
            await asyncio.to_thread(until, lambda: nodes.leaders("a")[shard] == "a")
            texts = [{}, {"result": "reject", "reason": "no"}]
            for url, one, state in zip(urls, texts, ("acked", "dead"), strict=True):
                assert (await asyncio.to_thread(ask, url + "x", "POST", "", one)).status == 404
                result = await asyncio.to_thread(ask, url, "POST", "", one)
                assert (result.status, result.json["result"]) == (200, state), result.body
            states = {(await client.lookup(task.id)).state for task in sent}
            assert states == {"acked", "dead"}
    await asyncio.to_thread(nodes.until_led, "a", "ab")
