"""The HTTP API of all shards together: what it answers is what a daemon alone would, of all."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

import tickwheel
from server.access.access_rig import AccessRig
from server.http.rig import Request, Response
from support.ports import free_port
from support.shard_rig import NOW_MS
from support.shards import Shards, key_in
from support.waiting import comes, soon
from tickwheel import gateway as gateways
from tickwheel.api.daemon import NewRestore, Restore, Status
from tickwheel.api.verbs import VERBS
from tickwheel.client import Client, wire
from tickwheel.client import shards as client_shards
from tickwheel.client.subscription import Subscription
from tickwheel.clock import Clock
from tickwheel.errors import Conflict, Overloaded, SendTimeout
from tickwheel.gateway import Gateway, GatewayClient
from tickwheel.model.values import SHARD_BITS
from tickwheel.server.access import tokens
from tickwheel.server.access.logins import REVOKED, Logins
from tickwheel.server.http.declared import answer_type
from tickwheel.server.http.pages import document_bytes
from tickwheel.server.metrics.observed import Observed
from tickwheel.server.settings import Settings
from tickwheel.server.shard import backups
from tickwheel.server.shard.callers import Principal
from tickwheel.server.shard.enqueue import Producing
from tickwheel.server.shard.overview import Watching
from tickwheel.webhooks import Callback, callback_token

COUNT = 3
HOUR_MS = 3_600_000
CONSOLE = {"tickwheel-console": "1", "host": "hall:1"}


class Hall:
    """Three shards in this process, and the API of them together."""

    def __init__(self, patch: pytest.MonkeyPatch, **settings: Any) -> None:
        of_shards = {name: it for name, it in settings.items() if name != "audit_file"}
        self.shards = Shards(COUNT, **of_shards)
        patch.setattr("tickwheel.client.client.connect", self.shards._open_to)
        self.settings = Settings(store="memory:", http="127.0.0.1:0", **settings)
        doors = [
            self.settings.model_copy(update={"listen": url, "advertise": url})
            for url in self.shards.urls
        ]
        clock, observed = Clock(10**15, self.shards.sources), Observed()
        self.events: list[str] = []
        self.logins = Logins(self.settings, clock, self._note, observed)
        self.http_of: dict[int, str] = {}
        """Where the HTTP of a shard is said to be."""
        self.gateway = Gateway(
            self.settings, doors, lambda shard: self.http_of.get(shard, ""), self.logins, clock,
            observed, self._note,
        )  # fmt: skip

    def _note(self, event: str, text: str) -> None:
        self.events.append(f"{event} {text}")

    async def start(self) -> Hall:
        await self.shards.__aenter__()
        await self.logins.start()
        self.gateway.start()
        return self

    async def stop(self) -> None:
        await self.gateway.stop()
        await self.shards.__aexit__()
        assert not self.events, "nothing went wrong that should not"

    def begin(self, method: str, target: str, body: Any = None, /, **headers: str) -> Request:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
            named.setdefault("content-type", "application/json")
        return Request(self.gateway, method, target, body, named)

    async def call(self, method: str, target: str, body: Any = None, /, **headers: str) -> Response:
        request = self.begin(method, target, body, **headers)
        await soon(request.task)
        return request.response

    async def get(self, target: str, **headers: str) -> Any:
        return self._fine(await self.call("GET", target, **headers))

    async def post(self, target: str, body: Any = None, /, **headers: str) -> Any:
        return self._fine(await self.call("POST", target, body, **headers))

    @staticmethod
    def _fine(answer: Response) -> Any:
        assert answer.status in (200, 201), (answer.status, answer.body)
        return answer.json

    async def refused(self, method: str, target: str, body: Any = None, /, **more: str) -> Response:
        answer = await self.call(method, target, body, **more)
        assert answer.headers["content-type"] == "application/problem+json", answer.body
        assert answer.json["status"] == answer.status
        return answer

    async def fill(self, count: int = 9, **more: Any) -> list[str]:
        """Tasks with keys, as many in each shard; their ids, the oldest first."""
        ids = []
        for n in range(count):
            key = key_in(n % COUNT, COUNT, f"k{n}-")
            task = {"topic": "t", "body": f"b{n}", "key": key, "delay_ms": HOUR_MS, **more}
            ids.append((await self.post("/v1/tasks", task))["id"])
            self.shards.pass_time(1)
        assert {shard_of(task_id) for task_id in ids} == set(range(COUNT))
        return ids

    async def pages(self, target: str, name: str, place: Callable[[Any], Any]) -> list[Any]:
        """The places of all items of a list, three pages and more."""
        found, after, count = list[Any](), "", 0
        while True:
            page = await self.get(f"{target}{after}")
            found += map(place, page[name])
            count += 1
            if page["next"] is None:
                assert count >= 3, "it had three pages"
                return found
            assert page[name], "no page of these is empty"
            after = f"&after={page['next']}"


def shard_of(task_id: str) -> int:
    return int(task_id) & ((1 << SHARD_BITS) - 1)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that try a shard which is away for a short time only."""
    assert Client.__init__.__kwdefaults__ is not None
    for name, value in (("send_timeout", 0.3), ("retries", 0)):
        monkeypatch.setitem(Client.__init__.__kwdefaults__, name, value)


@pytest.fixture
async def hall(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Hall]:
    result = await Hall(monkeypatch).start()
    yield result
    await result.stop()


# --- tasks ---------------------------------------------------------------------------------------


async def test_a_task_is_stored_and_found_in_its_shard(hall: Hall) -> None:
    ids = await hall.fill()
    for n, task_id in enumerate(ids):
        assert shard_of(task_id) == n % COUNT
        answer = await hall.get(f"/v1/tasks/{task_id}")
        assert (answer["id"], answer["body"], answer["state"]) == (task_id, f"b{n}", "scheduled")
    many = await hall.post("/v1/lookups", {"ids": ids})
    assert [task["id"] for task in many["tasks"]] == ids
    by_key = await hall.get(f"/v1/topics/t/keys/{many['tasks'][4]['key']}")
    assert [task["id"] for task in by_key["tasks"]] == [ids[4]]
    stats = await hall.get("/v1/stats")
    assert (stats["scheduled"], stats["topics"]["t"]["scheduled"]) == (9, 9)


async def test_answers_keep_the_order_of_a_request(hall: Hall) -> None:
    tasks = [
        {"topic": "t", "body": str(n), "delay_ms": HOUR_MS, "key": key_in(n % 3, 3, f"k{n}-")}
        for n in range(12)
    ]
    answer = await hall.post("/v1/tasks", {"tasks": tasks})
    assert [shard_of(row["id"]) for row in answer["tasks"]] == [n % 3 for n in range(12)]
    assert {entry["outcome"] for entry in answer["tasks"]} == {"stored"}
    lines = b"".join(json.dumps(task).encode() + b"\n" for task in tasks) + b"no task\n"
    streamed = await hall.call("POST", "/v1/tasks", lines, content_type="application/x-ndjson")
    *good, bad = streamed.lines
    assert [shard_of(row["id"]) for row in good] == [n % 3 for n in range(12)]
    assert (bad["error"]["line"], bad["error"]["code"]) == (13, "bad_request")
    ruled = await hall.post("/v1/tasks", {**tasks[0], "key": "r", "if_pending": "replace"})
    again = await hall.post("/v1/tasks", {**tasks[0], "key": "r", "if_pending": "replace"})
    assert (again["id"], again["outcome"]) == (ruled["id"], "replaced")


@pytest.mark.parametrize(
    "task", [{"priority": 2**70}, {"priority": 900}, {"ttl_ms": -5}, {"tag": "x" * 10_000}]
)
async def test_an_invalid_task_does_not_affect_other_requests(
    hall: Hall, task: dict[str, Any]
) -> None:
    good = hall.begin("POST", "/v1/tasks", {"topic": "t", "delay_ms": HOUR_MS})
    wrong = hall.begin("POST", "/v1/tasks", {"topic": "t", "delay_ms": HOUR_MS, **task})
    await soon(asyncio.gather(good.task, wrong.task))
    assert good.response.status == 201
    assert wrong.response.status == 400, wrong.response.body
    assert next(iter(task)) in wrong.response.json["detail"] or 2**70 in task.values()


async def test_a_request_over_the_frame_limit_is_refused(
    hall: Hall, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = [{"topic": "t", "body": "x" * 900_000, "delay_ms": HOUR_MS}] * 5
    monkeypatch.setattr(hall.gateway._api, "_body_limits", (16 << 20, 60.0))
    answer = await hall.refused("POST", "/v1/tasks", {"tasks": tasks})
    assert answer.json["code"] == "limit_exceeded" and "frame_bytes_max" in answer.json["detail"]
    assert (await hall.get("/v1/stats"))["scheduled"] == 0


async def test_a_request_with_an_idempotency_key_is_done_once(hall: Hall) -> None:
    many = {"tasks": [{"topic": "t", "key": key_in(n % 4, 3, f"k{n}-"), "delay_ms": HOUR_MS}
                      for n in (0, 1, 2)]}  # fmt: skip
    for body in (many, {"topic": "t", "delay_ms": HOUR_MS}, WINDOW):
        before = (await hall.get("/v1/stats"))["scheduled"]
        key = f"once-{before}"
        first = await hall.post("/v1/tasks", body, idempotency_key=key)
        hall.shards.pass_time(1)
        again = await hall.post("/v1/tasks", body, idempotency_key=key)
        assert again == first
        added = (await hall.get("/v1/stats"))["scheduled"] - before
        assert added == len(first.get("tasks", (1,)))
        other = await hall.refused(
            "POST", "/v1/tasks", {**body, **OTHER[len(body)]}, idempotency_key=key
        )
        assert (other.status, other.json["code"]) == (422, "idempotency_key_reused")
        assert (await hall.get("/v1/stats"))["scheduled"] == before + added
    assert shard_of(first["id"]) in range(COUNT)


WINDOW = {"topic": "t", "within_ms": 9_000, "delay_ms": HOUR_MS}
OTHER: dict[int, dict[str, Any]] = {
    1: {"tasks": [{"topic": "t", "key": key_in(0, COUNT, "k0-"), "tag": "x"}]},
    2: {"tag": "x"},
    3: {"tag": "x"},
}
"""What makes another payload of one, by how many fields it has."""


# --- lists ---------------------------------------------------------------------------------------


async def test_tasks_are_listed_page_by_page_in_both_directions(hall: Hall) -> None:
    ids = await hall.fill(10)
    for limit in (1, 3, 4):
        listed = f"/v1/tasks?topic=t&limit={limit}"
        assert await hall.pages(listed, "tasks", lambda it: it["id"]) == ids
        newest = f"{listed}&newest=true"
        assert await hall.pages(newest, "tasks", lambda it: it["id"]) == ids[::-1]


async def test_a_listing_of_one_full_shard_pages_correctly(hall: Hall) -> None:
    """One shard has all tasks, the pages of the others are empty."""
    key = key_in(1, COUNT)
    ids = [
        (await hall.post("/v1/tasks", {"topic": "t", "key": key, "delay_ms": HOUR_MS}))["id"]
        for _ in range(7)
    ]
    assert await hall.pages("/v1/tasks?topic=t&limit=2", "tasks", lambda it: it["id"]) == ids


# --- groups, transactions, counts ----------------------------------------------------------------


async def test_overview_covers_all_shards(hall: Hall) -> None:
    await hall.fill()
    client = await hall.shards.client().connect()
    for shard in range(2):
        await client.enqueue("full", b"", key=key_in(shard, COUNT), delay=0)
    hall.shards.pass_time(61_000)  # from then on they wait for long
    seen = await hall.get("/v1/overview")
    assert seen["counts"]["scheduled"] == 9
    assert sum(seen["ring"]["this"]) + sum(seen["ring"]["next"]) + seen["ring"]["later"] == 9
    assert seen["totals"]["enqueued"] == 11 and seen["state"] == "ready"
    texts = [trouble["text"] for trouble in seen["troubles"] if trouble["topic"] == "full"]
    assert [text.partition(":")[0] for text in sorted(texts)] == ["Shard 0", "Shard 1"]
    watching = hall.begin("GET", "/v1/overview/stream?every_ms=500")
    await watching.until(lambda it: b"event: overview" in it.body)
    watching.leave()
    await soon(watching.task)


async def test_console_files_and_openapi_are_served(hall: Hall) -> None:
    assert (await hall.call("GET", "/openapi.json")).body == document_bytes(60_000)[
        0
    ]  # as of one shard
    page = await hall.call("GET", "/console/")
    assert page.status == 200 and b"<title>" in page.body
    assert (await hall.get("/v1/limits"))["frame_bytes_max"] == 4 << 20
    assert (await hall.refused("GET", "/v1/nothing")).json["code"] == "not_found"
    assert (await hall.refused("PATCH", "/v1/stats")).json["code"] == "method_not_allowed"


# --- deliveries ----------------------------------------------------------------------------------


async def test_deliveries_of_all_shards_are_pulled_and_settled(hall: Hall) -> None:
    await hall.call("PUT", "/v1/topics/t/groups/g", {})
    await hall.fill(delay_ms=0, properties={"n": 5}, tag="x")
    taken = list[Any]()
    while len(taken) < 9:
        some = await hall.post("/v1/topics/t/pull", {"group": "g", "max": 4})
        taken += some["deliveries"]
    one = taken[0]
    assert (one["attempt"], one["failures"], one["deaths"]) == (1, 0, 0)
    assert (one["tag"], one["properties"]) == ("x", {"n": 5})
    receipts = [entry["receipt"] for entry in taken]
    ends: tuple[tuple[str, list[str], dict[str, Any], str], ...] = (
        ("acks", receipts[:3], {}, "acked"),
        ("nacks", receipts[3:5], {"delay_ms": 0}, "retrying"),
        ("extensions", receipts[5:], {"lease_ms": 60_000}, "extended"),
        ("snoozes", receipts[5:6], {"delay_ms": HOUR_MS}, "snoozed"),
        ("releases", receipts[6:], {}, "released"),
    )
    for path, some, more, word in ends:
        answer = await hall.post(f"/v1/{path}", {"receipts": some, **more})
        assert answer["results"] == [word] * len(some), path
    assert (await hall.post("/v1/acks", {"receipts": receipts[:1]}))["results"] == ["acked"]
    wrong = await hall.refused("POST", "/v1/topics/t/pull", {"max": 0})
    assert wrong.json["code"] == "bad_request"


async def test_a_pull_waits_for_the_first_shard_with_tasks(hall: Hall) -> None:
    await hall.call("PUT", "/v1/topics/t/groups/g", {})
    waiting = hall.begin("POST", "/v1/topics/t/pull", {"group": "g", "wait_ms": 30_000})
    await hall.shards.settle()
    await hall.post("/v1/tasks", {"topic": "t", "body": "late", "key": key_in(2, COUNT)})
    await soon(waiting.task)
    assert [delivery["body"] for delivery in waiting.response.json["deliveries"]] == ["late"]


async def test_an_abandoned_pull_takes_no_tasks(hall: Hall) -> None:
    await hall.call("PUT", "/v1/topics/t/groups/g", {})
    waiting = hall.begin("POST", "/v1/topics/t/pull", {"group": "g", "wait_ms": 30_000})
    await hall.shards.settle()
    waiting.leave()
    await soon(waiting.task)
    await hall.post("/v1/tasks", {"topic": "t", "body": "mine"})
    again = await hall.post("/v1/topics/t/pull", {"group": "g", "wait_ms": 30_000})
    assert [delivery["body"] for delivery in again["deliveries"]] == ["mine"]


async def test_deliveries_of_an_unsent_answer_are_released_at_once(hall: Hall) -> None:
    await hall.call("PUT", "/v1/topics/t/groups/g", {})
    await hall.fill(3, delay_ms=0)
    pulled = {"group": "g", "max": 9, "lease_ms": 600_000}
    asked = hall.begin("POST", "/v1/topics/t/pull", pulled)
    asked.reads.clear()

    async def are(state: str) -> bool:
        return (await hall.get("/v1/topics/t/groups/g"))[state] == 3

    await comes(partial(are, "in_flight"))
    await hall.shards.settle()
    asked.leave()
    await hall.shards.settle()
    asked.reads.set()
    await soon(asked.task)
    await comes(partial(are, "ready"), 10.0)
    again = (await hall.post("/v1/topics/t/pull", pulled))["deliveries"]
    assert [(it["attempt"], it["failures"]) for it in again] == [(2, 0)] * 3


async def test_a_stream_delivers_from_all_shards(hall: Hall) -> None:
    await hall.call("PUT", "/v1/topics/t/groups/g", {})
    stream = hall.begin(
        "GET", "/v1/topics/t/deliveries?group=g&credit=30", accept="text/event-stream"
    )
    await stream.until(lambda it: it.body)
    assert "tickwheel-new-group" not in stream.response.headers
    ids = await hall.fill(delay_ms=0)
    await stream.until(lambda it: it.body.count(b"event: delivery") == 9)
    texts = [
        json.loads(line[6:]) for line in stream.response.body.splitlines() if line[:5] == b"data:"
    ]
    assert sorted(row["id"] for row in texts) == sorted(ids)
    acked = await hall.post("/v1/acks", {"receipts": [entry["receipt"] for entry in texts[:3]]})
    assert acked["results"] == ["acked"] * 3
    assert (await hall.get("/v1/consumers?topic=t"))["consumers"]
    stream.leave()
    await soon(stream.task)
    while (await hall.get("/v1/consumers?topic=t"))["consumers"]:
        await hall.shards.settle()
    hall.shards.pass_time(20_000)  # less than a lease
    left = list[Any]()
    while len(left) < 6:
        left += (await hall.post("/v1/topics/t/pull", {"group": "g", "max": 9}))["deliveries"]
        hall.shards.pass_time(500)
    assert {row["id"] for row in left} == {row["id"] for row in texts[3:]}


async def test_a_stream_of_a_silent_consumer_gets_no_more(
    hall: Hall, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although the client of the stream answers the heartbeats of the shards."""
    clients: list[GatewayClient] = []
    new_client = hall.gateway.new_client

    def noting(principal: Principal) -> GatewayClient:
        clients.append(new_client(principal))
        return clients[-1]

    await hall.call("PUT", "/v1/topics/t/groups/g", {})
    monkeypatch.setattr(hall.gateway, "new_client", noting)
    stream = hall.begin(
        "GET", "/v1/topics/t/deliveries?group=g&lease_ms=60000", accept="application/x-ndjson"
    )
    await stream.until(lambda it: it.body)
    await hall.post("/v1/tasks", {"topic": "t", "body": "x"})
    await stream.until(lambda it: it.lines)
    [exchange] = [made for made in hall.gateway._api._exchanges if made.on_end is not None]
    assert isinstance(exchange, gateways.AllShardsExchange)
    exchange._unsettled = dict.fromkeys(exchange._unsettled, 0.0)
    hall.shards.pass_time(60_001)
    await hall.shards.settle()
    await clients[0].stats()  # as an answer to a heartbeat

    async def is_given_back() -> bool:
        consumers = (await hall.get("/v1/consumers?topic=t"))["consumers"]
        is_paused = all(consumer["prefetch"] == 0 for consumer in consumers)
        return is_paused and (await hall.get("/v1/topics/t/groups/g"))["ready"] == 1

    await comes(is_given_back, 10.0)
    [first] = stream.response.lines
    words = await hall.post("/v1/acks", {"receipts": [first["receipt"]]})
    assert words["results"] == ["acked"], "the task was not started again"
    await hall.post("/v1/tasks", {"topic": "t", "body": "y"})
    await stream.until(lambda it: len(it.lines) == 2)
    assert stream.response.lines[1]["body"] == "y"
    stream.leave()
    await soon(stream.task)


async def test_streams_of_lines_and_refused_streams(hall: Hall) -> None:
    await hall.call("PUT", "/v1/topics/t/groups/g", {"tags": "a"})
    refused = await hall.refused("GET", "/v1/topics/t/deliveries?group=g&tags=b")
    assert refused.json["code"] == "conflict" and "filter" in refused.json["detail"]
    refused = await hall.refused("GET", "/v1/topics/t/deliveries?group=g&broadcast=true")
    assert "cannot have group" in refused.json["detail"]
    stream = hall.begin(
        "GET", "/v1/topics/u/deliveries?ack=on_delivery", accept="application/x-ndjson"
    )
    await stream.until(lambda it: it.body)
    assert json.loads(stream.response.headers["tickwheel-new-group"])["adopted"] == 0
    await hall.post("/v1/tasks", {"topic": "u", "body": "x"})
    await stream.until(lambda it: it.lines)
    assert stream.response.lines[0]["body"] == "x"
    await hall.call("DELETE", "/v1/topics/u?force=true")
    await soon(stream.task)
    assert stream.response.lines[-1]["error"]["code"] == "not_found"


@pytest.mark.parametrize(
    ("kind", "method"), [(gateways.GatewayClient, "new_subscription"), (Subscription, "batches")]
)
async def test_an_unexpected_error_ends_a_stream(
    hall: Hall, monkeypatch: pytest.MonkeyPatch, kind: type, method: str
) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("on purpose")

    monkeypatch.setattr(kind, method, broken)
    answer = await hall.call("GET", "/v1/topics/t/deliveries?group=g")
    assert b'"code":"internal"' in answer.body and not hall.gateway._api._exchanges
    event = hall.events.pop()
    assert event.startswith("internal_error") and "Traceback" in event and "on purpose" in event


# --- restores ------------------------------------------------------------------------------------

RESTORES = """
import json, sys
plan = json.loads(sys.stdin.readline())
shard = int(plan["into"].rpartition("-shard-")[2][:-3])
if plan["into"].endswith("/half-shard-1.db"):
    print(json.dumps({"error": {"code": "store_error", "message": "no room"}}), flush=True)
elif "/half-" in plan["into"] or "/all-" in plan["into"]:
    some = {"count": shard, "ids": [f"{shard}{n}" for n in range(shard)]}
    report = {"refused": False, "restored": 10 + shard, "groups": 2, "shard": shard,
              "exact": shard > 0, "gaps": ["a gap"] * (shard == 2), "skipped_overdue": some,
              "targets_lost": {"count": 1, "names": ["t g"]}, "backup_ms": 5 + shard}
    print(json.dumps({"report": report}), flush=True)
else:
    print(json.dumps({"step": "writing" if shard else "tasks", "done": 5, "of": 9}), flush=True)
    sys.stdin.read()
"""
"""In the place of the process of a restore: into ``all-…`` and ``half-…`` it ends by itself; into
``half-…`` it fails in shard 1. All others work until they shall end."""


class Files:
    """The folders for backups of all shards, each with a backup of the name ``a.db``."""

    def __init__(self, hall: Hall, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.hall, self.folder = hall, folder
        patch.setattr(backups, "COMMAND", (sys.executable, "-S", "-c", RESTORES))
        for shard in range(COUNT):
            (folder / str(shard)).mkdir()
            self.of(shard, "a").write_bytes(b"a backup")
            self.known(shard)._folder = folder / str(shard)

    def of(self, shard: int, stem: str) -> Path:
        return self.folder / str(shard) / f"{stem}-shard-{shard}.db"

    def known(self, shard: int) -> backups.Restores:
        return self.hall.shards.shard(shard).restores

    async def begin(self, into: str = "new.db", **more: Any) -> Any:
        fields = {"into": into, "backup": "a.db", **more}
        answer = await self.hall.call("POST", "/v1/restores", fields)
        assert answer.status == 202, answer.body
        return right(answer.json)

    async def refused(self, into: str = "new.db", **more: Any) -> Response:
        return await self.hall.refused("POST", "/v1/restores", {"into": into, **more})

    async def show(self, restore: str) -> Any:
        return right(await self.hall.get(f"/v1/restores/{restore}"))

    async def ended(self, restore: str) -> Any:
        for shard in range(COUNT):
            await self.known(shard).find(int(restore)).ended.wait()
        return await self.show(restore)

    def states(self) -> list[list[str]]:
        """The states of the restores of each shard, the newest first."""
        return [[item.state for item in self.known(shard).all()] for shard in range(COUNT)]


def right(found: Any) -> Any:
    """An answer that has the form of the document."""
    msgspec.json.decode(json.dumps(found), type=answer_type(Restore))
    return found


@pytest.fixture
async def files(hall: Hall, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Files:
    await hall.get("/v1/stats")  # all are connected, and are asked in their order
    return Files(hall, tmp_path, monkeypatch)


async def test_a_restore_covers_all_shards_with_separate_files(files: Files) -> None:
    made = await files.begin()
    assert (made["state"], made["of_shards"], made["report"]) == ("running", COUNT, None)
    for shard in range(COUNT):
        one = files.known(shard).find(int(made["id"]))
        assert (one.wanted.into, one.wanted.backup) == (
            f"new-shard-{shard}.db",
            f"a-shard-{shard}.db",
        )
        await comes(lambda one=one: one.step in ("tasks", "writing"))
    assert made["into"] == "new-shard-0.db, new-shard-1.db, new-shard-2.db"
    assert made["backup"] == "a-shard-0.db, a-shard-1.db, a-shard-2.db"
    shown = await files.show(made["id"])
    assert [one["progress"]["step"] for one in shown["shards"]] == ["tasks", "writing", "writing"]
    assert shown["progress"] == {"step": "tasks", "done": 5, "total": 9}, "where the last one is"
    files.known(0).find(int(made["id"])).step = "writing"
    assert (await files.show(made["id"]))["progress"] == {
        "step": "writing",
        "done": 15,
        "total": 27,
    }
    ended = right((await files.hall.call("DELETE", f"/v1/restores/{made['id']}")).json)
    assert (ended["state"], ended["error"]) == ("cancelled", None) and ended["ended_ms"]
    assert files.states() == [["cancelled"]] * COUNT
    files.hall.shards.pass_time(5)
    again = await files.begin()
    listed = (await files.hall.get("/v1/restores"))["restores"]
    assert [right(one)["id"] for one in listed] == [again["id"], made["id"]]
    assert [one["state"] for one in listed] == ["running", "cancelled"]
    none = await files.hall.refused("GET", "/v1/restores/7")
    assert (none.status, none.json["code"]) == (404, "not_found")


async def test_a_restore_report_covers_all_shards(files: Files) -> None:
    made = await files.begin("all.db")
    result = await files.ended(made["id"])
    assert (result["state"], result["error"]) == ("done", None)
    assert result["report"] == {
        "refused": False, "restored": 33, "groups": 2, "exact": False, "gaps": ["shard 2: a gap"],
        "skipped_overdue": {"count": 3, "ids": ["10", "20", "21"]}, "backup_ms": 5,
        "targets_lost": {"count": 1, "names": ["t g"]},
        "backup": "a-shard-0.db, a-shard-1.db, a-shard-2.db",
    }  # fmt: skip
    assert [shard["report"]["restored"] for shard in result["shards"]] == [10, 11, 12]
    assert [shard["shard"] for shard in result["shards"]] == [0, 1, 2]


async def test_a_restore_failing_in_one_shard_is_reported(files: Files) -> None:
    made = await files.begin("half.db")
    result = await files.ended(made["id"])
    assert result["state"] == "failed"
    assert result["error"] == {"code": "store_error", "message": "shard 1: no room"}
    assert [shard["state"] for shard in result["shards"]] == ["done", "failed", "done"]
    assert result["report"]["restored"] == 22, "what the others have restored"


async def test_a_refusal_by_one_shard_cancels_the_restore(files: Files) -> None:
    files.of(2, "new").write_bytes(b"it is there")
    answer = await files.refused(backup="a.db", id="77")
    assert (answer.status, answer.json["code"]) == (409, "conflict")
    assert answer.json["detail"] == (
        "shard 2: new-shard-2.db already exists; restore into a new file;"
        " restore 77 was cancelled in shards 0, 1, which had started it"
    )
    assert files.states() == [["cancelled"], ["cancelled"], []]
    shown = await files.show("77")
    assert shown["state"] == "failed" and shown["error"]["message"] == (
        "shards 2: no restore of this id, or forgotten"
    )
    files.of(0, "b").write_bytes(b"a backup")
    answer = await files.refused(backup="b.db")
    assert (answer.status, answer.json["code"]) == (404, "not_found")
    assert answer.json["detail"].startswith("shard 1: there is no backup b-shard-1.db; restore ")
    first = await files.refused("../new.db", backup="a.db")
    assert first.json["code"] == "bad_request" and first.json["detail"] == (
        "shard 0: into must be a file name without a folder, not '../new.db';"
        " no shard has started the restore"
    )
    assert files.states()[2] == []
    for name in ("../new.db", "..", "a/"):
        answer = await files.hall.refused("POST", "/v1/backups", {"name": name})
        assert (answer.status, answer.json["code"]) == (400, "bad_request"), name


async def test_an_unavailable_shard_prevents_a_restore(impatient: None, files: Files) -> None:
    files.hall.shards.lose(2)
    await files.hall.shards.settle()
    answer = await files.refused(backup="a.db")
    assert (answer.status, answer.json["code"]) == (503, "unreachable")
    detail = answer.json["detail"]
    assert detail.startswith("shard 2: ") and detail.endswith("; no shard has started the restore")
    assert files.states() == [[]] * COUNT


async def test_a_restore_with_an_unknown_start_is_cancelled_or_named(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask, cancel = client_shards.Shards._ask, backups.Restores.cancel

    async def unsure(shards: client_shards.Shards, link: Any, verb: Any, *more: Any) -> Any:
        answer = await ask(shards, link, verb, *more)
        if verb.name == "restore" and link is shards.links[1]:
            raise SendTimeout("the answer was lost")
        return answer

    async def busy(restores: backups.Restores, restore: backups.Restore) -> None:
        if restores is files.known(1):
            raise Conflict("not now")
        await cancel(restores, restore)

    monkeypatch.setattr(client_shards.Shards, "_ask", unsure)
    answer = await files.refused(backup="a.db")
    assert (answer.status, answer.json["code"]) == (504, "send_timeout")
    assert files.states() == [["cancelled"], ["cancelled"], []]
    with monkeypatch.context() as patch:
        patch.setattr(backups.Restores, "cancel", busy)
        answer = await files.refused(backup="a.db", id="9")
    assert answer.json["detail"] == (
        "shard 1: the answer was lost; restore 9 was cancelled in shards 0, which had started it;"
        " restore 9 may still run in shards 1: cancel it again"
    )
    assert [some[:1] for some in files.states()] == [["cancelled"], ["running"], []]
    assert (await files.hall.call("DELETE", "/v1/restores/9")).json["state"] == "failed"
    assert files.states()[1][0] == "cancelled"


async def test_a_restore_begun_at_one_shard_is_separate(files: Files) -> None:
    wanted = NewRestore(into="x-shard-1.db", backup="a-shard-1.db", history=False)
    one = await files.known(1).begin(wanted)
    [listed] = (await files.hall.get("/v1/restores"))["restores"]
    assert (listed["state"], listed["of_shards"]) == ("running", 1)
    assert [part["shard"] for part in listed["shards"]] == [1]
    busy = await files.refused(backup="a.db")
    assert f"shard 1: restore {one.id} is running" in busy.json["detail"]
    assert (await files.hall.call("DELETE", f"/v1/restores/{one.id}")).json["state"] == "cancelled"


async def test_named_tasks_are_restored_by_their_shards(files: Files) -> None:
    made = await files.begin(ids=["1026", "2048", "3074"])  # of shards 2, 0 and 2
    assert (made["of_shards"], made["into"]) == (2, "new-shard-0.db, new-shard-2.db")
    assert [shard["shard"] for shard in made["shards"]] == [0, 2]
    assert files.known(2).find(int(made["id"])).wanted.ids == (1026, 3074)
    assert files.states()[1] == []


async def test_a_restore_forgotten_by_a_shard_is_not_successful(files: Files) -> None:
    made = await files.begin("all.db")
    await files.ended(made["id"])
    files.known(1)._known.clear()  # as after a restart
    task = await files.show(made["id"])
    assert (task["state"], task["error"]["code"]) == ("failed", "not_found")
    assert "shards 1: no restore" in task["error"]["message"]
    assert (await files.hall.get("/v1/restores"))["restores"] == [task]


# --- how all are ---------------------------------------------------------------------------------


async def test_status_covers_all_shards(hall: Hall) -> None:
    answer = await hall.get("/v1/status")
    msgspec.json.decode(json.dumps(answer), type=answer_type(Status))
    assert (answer["state"], answer["detail"], answer["role"]) == ("ready", None, "active")
    assert [status["shard"] for status in answer["statuses"]] == [0, 1, 2]
    assert [status["node"] for status in answer["statuses"]] == ["n0", "n1", "n2"]
    assert [status["url"] for status in answer["statuses"]] == hall.shards.urls == answer["shards"]
    assert all(status["reachable"] for status in answer["statuses"])
    hall.shards.shard(2).loaded.clear()
    answer = await hall.get("/v1/status")
    assert (answer["state"], answer["shard"], answer["node"]) == ("loading", 2, "n2")
    assert answer["detail"] == "shard 2: loading"
    assert [status["state"] for status in answer["statuses"]] == ["ready", "ready", "loading"]


async def test_status_names_an_unavailable_shard_and_its_reason(
    hall: Hall, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "STATUS_S", 0.2)
    await hall.get("/v1/stats")
    hall.shards.lose(1)
    answer = await hall.get("/v1/status")
    msgspec.json.decode(json.dumps(answer), type=answer_type(Status))
    away = answer["statuses"][1]
    assert away.keys() == {"shard", "url", "reachable", "state", "error", "message"}
    assert (away["shard"], away["url"]) == (1, hall.shards.urls[1])
    assert (away["reachable"], away["state"], away["error"]) == (
        False, "unreachable", "unreachable",
    )  # fmt: skip
    assert answer["state"] == "unreachable" and answer["shard"] != 1
    assert answer["detail"] == f"shard 1: unreachable ({away['message']})"
    assert [status["state"] for status in answer["statuses"]] == ["ready", "unreachable", "ready"]


# --- what is not there ---------------------------------------------------------------------------


@pytest.mark.parametrize("said", [b"12 no", b"{}", b""])
async def test_a_callback_goes_to_the_shard_of_its_token(hall: Hall, said: bytes) -> None:
    def path(shard: int) -> str:
        return f"/v1/callbacks/{callback_token(Callback('t', 'g', 1024 + shard, 1, 1), 'secret')}"

    came: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came.append(await reader.readuntil(b"}"))
        status = b"200 OK" if said == b"12 no" else b"500 Broken"
        writer.write(b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n%b" % (status, len(said), said))
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as other:
        at = other.sockets[0].getsockname()[1]
        hall.http_of |= {1: f"http://127.0.0.1:{free_port()}", 2: f"http://127.0.0.1:{at}"}
        for shard, why in ((0, "is not known"), (1, "no valid answer"), (1023, "is not known"),
                           (2, "no valid answer")):  # fmt: skip
            refusal = await hall.refused(
                "POST", path(shard), {"result": "extend", "lease_ms": 5_000}
            )
            assert (refusal.status, refusal.json["code"]) == (503, "unreachable"), refusal.body
            assert why in refusal.json["detail"] and f"shard {shard} " in refusal.json["detail"]
    head, _, body = came[0].partition(b"\r\n\r\n")
    assert head.startswith(f"POST {path(2)} HTTP/1.1\r\n".encode())
    assert json.loads(body) == {"result": "extend", "lease_ms": 5_000}
    assert (await hall.refused("POST", "/v1/callbacks/abc", {})).status == 404


async def test_an_unavailable_shard_is_named_and_the_others_serve(
    impatient: None, hall: Hall
) -> None:
    ids = await hall.fill()
    hall.shards.lose(1)
    for method, path, body in (
        ("GET", f"/v1/tasks/{ids[1]}", None),
        ("GET", "/v1/stats", None),
        ("GET", "/v1/tasks", None),
        ("POST", "/v1/tasks", {"topic": "t", "key": key_in(1, COUNT)}),
    ):
        answer = await hall.refused(method, path, body)
        assert (answer.status, answer.json["code"]) == (503, "unreachable"), answer.body
        assert answer.json["retryable"] and answer.headers["retry-after"] == "1"
    assert (await hall.get(f"/v1/tasks/{ids[2]}"))["id"] == ids[2]
    assert (await hall.post("/v1/tasks", {"topic": "t", "key": key_in(0, COUNT)}))["id"]
    assert (await hall.post("/v1/tasks", {"topic": "t"}))["id"]
    hall.shards.away.clear()
    assert (await hall.get(f"/v1/tasks/{ids[1]}"))["id"] == ids[1]


# --- tokens --------------------------------------------------------------------------------------


class Guarded:
    """Three shards that want tokens: ``all`` may do all, ``reader`` may read topics ``a*``,
    ``operator`` may operate on them and read nothing."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path, **settings: Any) -> None:
        self.path = folder / "tokens.json"
        self.all, self.reader = self._token("all", "all"), self._token("reader", "read=a*")
        self.operator = self._token("operator", "operate=a*")
        self.hall = Hall(patch, tokens_file=str(self.path), login_delay_s=0, **settings)

    def _token(self, name: str, *scopes: str) -> str:
        return tokens.create(self.path, name, tokens.parse_scopes(scopes), NOW_MS, None)[1]

    def revoke(self) -> None:
        self.path.write_text(self.path.read_text().replace('"read"', '"produce"'))


@pytest.fixture
async def guarded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AsyncIterator[Guarded]:
    result = Guarded(monkeypatch, tmp_path)
    await result.hall.start()
    yield result
    result.hall.events[:] = [
        event for event in result.hall.events if not event.startswith("tokens_read")
    ]
    await result.hall.stop()


def bearer(token: str) -> str:
    return f"Bearer {token}"


async def test_each_caller_uses_its_own_token(guarded: Guarded) -> None:
    hall = guarded.hall
    for topic in ("a1", "b1"):
        for n in range(COUNT):
            task = {"topic": topic, "key": key_in(n, COUNT), "delay_ms": HOUR_MS}
            await hall.post("/v1/tasks", task, authorization=bearer(guarded.all))
    for token, topics in ((guarded.all, ["a1", "b1"]), (guarded.reader, ["a1"])):
        stats = await hall.get("/v1/stats", authorization=bearer(token))
        assert list(stats["topics"]) == topics
    forbidden = await hall.refused(
        "POST", "/v1/tasks", {"topic": "a1"}, authorization=bearer(guarded.reader)
    )
    assert (forbidden.status, forbidden.json["code"]) == (403, "forbidden")
    for headers in ({}, {"authorization": bearer("tw_wrong")}):
        assert (await hall.refused("GET", "/v1/stats", **headers)).status == 401
    assert len(hall.gateway._clients) == 2


async def test_a_used_up_quota_says_when_to_try_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    guarded = Guarded(monkeypatch, tmp_path, quota_tasks_per_s=COUNT)
    hall, ours = await guarded.hall.start(), {"authorization": f"Bearer {guarded.all}"}
    task = {"topic": "t", "key": key_in(0, COUNT)}
    await hall.call("POST", "/v1/tasks", {"tasks": [task] * 10}, **ours)
    answer = await hall.refused("POST", "/v1/tasks", task, **ours)
    assert (answer.status, answer.headers["retry-after"]) == (429, "9"), answer.body
    await hall.stop()


async def test_a_bulk_operation_needs_no_right_to_read(guarded: Guarded) -> None:
    task = {"topic": "a1", "key": key_in(1, COUNT), "delay_ms": HOUR_MS}
    await guarded.hall.post("/v1/tasks", task, authorization=bearer(guarded.all))
    fields, token = {"topic": "a1", "kind": "cancel", "id": "mine"}, bearer(guarded.operator)
    assert (await guarded.hall.post("/v1/bulk", fields, authorization=token))["id"] == "mine"


async def test_putting_a_schedule_needs_no_right_to_read(guarded: Guarded) -> None:
    fields, token = {"topic": "a1", "every_ms": HOUR_MS}, bearer(guarded.operator)
    put = await guarded.hall.call("PUT", "/v1/schedules/s", fields, authorization=token)
    assert put.status == 201, put.body


async def test_a_browser_logs_in_and_its_session_asks_with_that_token(guarded: Guarded) -> None:
    hall = guarded.hall
    login = await hall.call("POST", "/v1/sessions", authorization=bearer(guarded.reader), **CONSOLE)
    assert login.status == 201 and login.json["rights"] == {"read": ["a*"]}
    cookie = login.headers["set-cookie"].partition(";")[0]
    seen = await hall.get("/v1/stats", cookie=cookie, **CONSOLE)
    assert seen["partial"] is True
    link = await hall.post("/v1/session-links", authorization=bearer(guarded.all))
    by_link = await hall.call("POST", "/v1/sessions", authorization=bearer(link["code"]), **CONSOLE)
    cookie = by_link.headers["set-cookie"].partition(";")[0]
    seen = await hall.get("/v1/stats", cookie=cookie, **CONSOLE)
    assert seen["partial"] is False


async def test_invalid_tokens_are_forgotten(guarded: Guarded) -> None:
    hall = guarded.hall
    await hall.get("/v1/stats", authorization=bearer(guarded.reader))
    [principal] = hall.gateway.tokens
    assert "reader" in principal.name
    guarded.revoke()
    await hall.logins.reload_if_changed()
    hall.gateway.dismiss()
    assert not hall.gateway.tokens and not hall.gateway._clients


async def test_a_revocation_ends_a_stream_of_lines(guarded: Guarded) -> None:
    hall, line = guarded.hall, b'{"topic":"t","delay_ms":3600000}\n'
    headers = {"content-type": "application/x-ndjson", "authorization": bearer(guarded.all)}
    stream = Request(hall.gateway, "POST", "/v1/tasks", line, headers, whole=False)
    await stream.until(lambda response: response.status)
    tokens.revoke(guarded.path, hall.logins.authenticate(guarded.all).token_id)
    await hall.logins.reload_if_changed()
    hall.gateway.dismiss()
    stream.send(line)  # the client would send more
    _, late = (await stream.done()).lines
    assert late == {
        "error": {"line": 2, "code": "unauthorized", "detail": REVOKED, "retryable": False}
    }


async def test_a_certificate_alone_is_refused_with_where_to_ask(guarded: Guarded) -> None:
    hall = guarded.hall
    peer = {"subject": ((("commonName", "app"),),)}
    principal = hall.logins.authenticate(guarded.all)._replace(name="certificate CN=app")
    hall.gateway._api._logins = _Certified(principal)  # type: ignore[assignment]  # its part
    request = Request(
        hall.gateway,
        "GET",
        "/v1/stats",
        None,
        {},
        connection={"certificate": peer},
    )
    await soon(request.task)
    answer = request.response
    assert (answer.status, answer.json["code"]) == (403, "forbidden")
    assert "/v1/shards" in answer.json["detail"]


class _Certified:
    """Logins where a certificate is enough."""

    def __init__(self, principal: Any) -> None:
        self._principal = principal
        self.quotas = _NoQuotas()

    def check_certificate(self, peer: Any) -> None: ...

    def authenticate(self, shown: Any, peer: Any) -> Any:
        return self._principal


class _NoQuotas:
    def enter(self, caller: Any) -> None: ...

    def leave(self, caller: Any) -> None: ...


async def test_the_report_needs_the_right_to_read_all(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "report.html").write_text("<p>all is well</p>")
    guarded = Guarded(monkeypatch, tmp_path, report_dir=str(tmp_path))
    await guarded.hall.start()
    page = await guarded.hall.call("GET", "/v1/report", authorization=bearer(guarded.all))
    assert page.body == b"<p>all is well</p>"
    for_some = await guarded.hall.refused("GET", "/v1/report", authorization=bearer(guarded.reader))
    assert for_some.status == 403
    await guarded.hall.stop()


ALL, READER, NOBODY = "all", "reader", "tw_x_y"
OF_OPERATORS: list[tuple[str, str, str, Any, int]] = [
    (ALL, "POST", "/v1/sessions", None, 201),
    (ALL, "POST", "/v1/session-links", None, 201),
    (NOBODY, "POST", "/v1/sessions", None, 401),
    (ALL, "DELETE", "/v1/session", None, 200),
    (ALL, "PUT", "/v1/topics/t/groups/g", {}, 201),
    (ALL, "PATCH", "/v1/topics/t/groups/g", {"paused": True}, 200),
    (READER, "PATCH", "/v1/topics/t/groups/g", {"paused": True}, 403),
    (ALL, "PUT", "/v1/schedules/s", {"topic": "t", "every_ms": 60_000}, 201),
    (ALL, "DELETE", "/v1/schedules/none", None, 404),
    (ALL, "POST", "/v1/cancellations", {"ids": ["4096"]}, 200),
    (ALL, "POST", "/v1/transactions/none/commit", None, 404),
    (READER, "GET", "/v1/stats", None, 200),
]
"""Who asks what, and the status of the answer."""


async def test_operators_and_logins_leave_the_same_lines_at_both_doors(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def said_at(
        logins: Logins, call: Callable[..., Any], tokens_of: dict[str, str]
    ) -> list[dict[str, Any]]:
        assert logins.audit is not None and logins.audit.close(10)
        before = logins.audit._path.read_text().count("\n") if logins.audit._path.exists() else 0
        for who, method, path, body, status in OF_OPERATORS:
            answer = await call(tokens_of.get(who, who), method, path, body)
            assert answer.status == status, (who, method, path, answer.body)
        assert logins.audit.close(10)
        lines = [json.loads(line) for line in logins.audit._path.read_text().splitlines()[before:]]
        return [{n: it for n, it in line.items() if n not in ("at", "token")} for line in lines]

    rig = await AccessRig(audit_file=str(tmp_path / "own"), login_delay_s=0).start()
    assert isinstance(rig, AccessRig)
    of_rig = {ALL: await rig.token("all", name="all"),
              READER: await rig.token("read=a*", name="reader")}  # fmt: skip
    at_own_door = await said_at(rig.logins, rig.http, of_rig)
    await rig.stop()

    guarded = Guarded(monkeypatch, tmp_path, audit_file=str(tmp_path / "all"))
    hall = await guarded.hall.start()

    async def call(token: str, method: str, path: str, body: Any) -> Response:
        return await hall.call(method, path, body, authorization=bearer(token))

    of_hall = {ALL: guarded.all, READER: guarded.reader}
    at_door_of_all = await said_at(hall.logins, call, of_hall)
    await hall.stop()
    assert len(at_own_door) == len(OF_OPERATORS) - 1, "a reader's look is none"
    assert at_door_of_all == at_own_door
    assert {line["from"] for line in at_door_of_all} == {"127.0.0.1:5"}


# --- clients -------------------------------------------------------------------------------------


async def test_idle_clients_are_closed(guarded: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateways, "IDLE_S", 0.0)
    monkeypatch.setattr(gateways, "CHECK_S", 0.01)
    hall = guarded.hall
    await hall.get("/v1/stats", authorization=bearer(guarded.reader))
    waiting = hall.begin(
        "POST", "/v1/topics/a/pull", {"wait_ms": 30_000}, authorization=bearer(guarded.all)
    )
    await hall.shards.settle()
    hall.gateway._idle_closer.cancel()  # type: ignore[union-attr]  # one with the new pause
    hall.gateway.start()
    await comes(lambda: len(hall.gateway._clients) == 1)
    [left] = hall.gateway._clients
    assert "all" in left.name, "its request is in progress"
    waiting.leave()
    await comes(lambda: not hall.gateway._clients)


async def test_kept_clients_are_limited(guarded: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateways, "IDLE_MAX", 1)
    hall = guarded.hall
    for token in (guarded.all, guarded.reader, guarded.all):
        await hall.get("/v1/stats", authorization=bearer(token))
        assert len(hall.gateway._clients) == 1
    monkeypatch.setattr(gateways, "CLIENTS_MAX", 1)
    waiting = hall.begin(
        "POST", "/v1/topics/a/pull", {"wait_ms": 30_000}, authorization=bearer(guarded.all)
    )
    await hall.shards.settle()
    full = await hall.refused("GET", "/v1/stats", authorization=bearer(guarded.reader))
    assert (full.status, full.json["code"]) == (429, "overloaded")
    waiting.leave()
    await soon(waiting.task)


async def test_a_refusal_of_a_shard_is_passed_on_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a lone daemon: who asks decides whether and when to ask again."""
    asked: list[Any] = []

    def refuse(*args: Any) -> Any:
        asked.append(args)
        raise Overloaded("a queue is full")

    monkeypatch.setattr(Producing, "enqueue", refuse)
    monkeypatch.setattr(Watching, "stats", refuse)
    hall = await Hall(monkeypatch).start()
    for method, path, body in (("POST", "/v1/tasks", {"topic": "t"}), ("GET", "/v1/stats", None)):
        asked.clear()
        full = await hall.refused(method, path, body)
        assert (full.status, full.json["code"]) == (429, "overloaded")
        assert len(asked) <= COUNT, "each shard is asked once"
    await hall.stop()


@pytest.mark.parametrize("is_orderly", [True, False])
async def test_a_pulled_lease_outlives_the_connections_of_the_gateway(
    hall: Hall, *, is_orderly: bool
) -> None:
    """The consumer may live on, and settle its task at the next process of this API."""
    await hall.call("PUT", "/v1/topics/t/groups/g", {})
    await hall.post("/v1/tasks", {"topic": "t"})
    pulled = {"group": "g", "lease_ms": 600_000}
    [taken] = (await hall.post("/v1/topics/t/pull", pulled))["deliveries"]
    if is_orderly:
        for principal in list(hall.gateway._clients):
            hall.gateway._close(principal)
        await soon(asyncio.gather(*hall.gateway._closing))
    else:
        for shard in range(COUNT):
            hall.shards.lose(shard)
        hall.shards.away.clear()
    for _ in range(2):
        hall.shards.pass_time(60_000)
        await hall.shards.settle()
    state = (await hall.get(f"/v1/tasks/{taken['id']}"))["groups"]["g"]
    assert (state["state"], state["attempt"], state["deaths"]) == ("in_flight", 1, 0)
    assert (await hall.post("/v1/acks", {"receipts": [taken["receipt"]]}))["results"] == ["acked"]


async def test_an_unread_stream_uses_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateways, "STREAM_BYTES_MAX", 300_000)
    small = {"out_bytes_soft": 65_536, "out_bytes_max": 1 << 20, "frame_bytes_max": 1 << 17}
    hall = await Hall(monkeypatch, **small).start()
    client = await hall.shards.client().connect()
    await client.create_group("t", "g")
    body, count = bytes(40_000), 120
    await client.enqueue_many(
        [tickwheel.Task("t", body, key=f"k{n}", delay=0) for n in range(count)]
    )
    hall.shards.pass_time(1)
    stream = hall.begin("GET", "/v1/topics/t/deliveries?group=g&credit=65535")
    stream.reads.clear()

    async def stands() -> bool:
        before = (await client.stats()).in_flight
        await hall.shards.settle()
        return before > 0 and (await client.stats()).in_flight == before

    await comes(stands)
    assert (await client.stats()).in_flight * len(body) < 2_400_000
    stream.reads.set()
    await stream.until(lambda it: it.body.count(b"event: delivery") == count)
    stream.leave()
    await soon(stream.task)
    await hall.stop()


def test_every_verb_is_answered() -> None:
    """Verbs without a frame are answered by the gateway or have no route."""
    unframed = {name for name, verb in VERBS.items() if verb.frame is None}
    assert unframed == {"report", "enqueue_plain", "settle_callback"}
