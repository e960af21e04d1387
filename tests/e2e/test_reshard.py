"""``tickwheel reshard`` on what real daemons have kept: nothing is lost, doubled or out of order;
killed at each of its places, then run again."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import pytest

from e2e.cli_runner import Cli
from support.daemon import Daemon, DaemonFailed
from support.http_asking import ask
from support.ports import free_ports
from support.shards import alone
from support.waiting import comes
from tickwheel import Client, Retry, Task, failpoints
from tickwheel.api.frames import FrameType as T
from tickwheel.api.tasks import indexes_by_shard
from tickwheel.model.records import ID_STEP
from tickwheel.server.http.types import request_identity
from tickwheel.server.shard.callers import ANONYMOUS

HOUR = 3600
MakeDaemon = Callable[..., Daemon]
CLI = Cli(SimpleNamespace(url="tcp://127.0.0.1:1", log_text=str))  # type: ignore[arg-type]
KILLED = -9
ORDERED = [f"o{n}" for n in range(6)]


def reshard(store: str, to: int, *more: str) -> dict[str, Any]:
    return CLI.one("reshard", "--store", store, "--to", str(to), *more)


class Home:
    """A store, and a daemon or several for it whenever a test wants them."""

    def __init__(self, make_daemon: MakeDaemon, tmp_path: Path) -> None:
        self._make = make_daemon
        self.file = f"sqlite:///{tmp_path}/one.db"
        self.path = tmp_path / "shards"
        self.folder = f"sqlite:///{self.path}/"

    def serve(self, **options: Any) -> Daemon:
        """A daemon, or several, for what there is; started, and it ends with the test."""
        if not (self.path / "shards.json").exists():
            return self.serve_file(**options)
        return self.serve_folder("auto", **options)

    def serve_file(self, **options: Any) -> Daemon:
        return self._make(store=self.file, **options).start()

    def serve_folder(self, processes: str, **options: Any) -> Daemon:
        args = ("--processes", processes)
        return self._make(store=self.folder, args=args, **options).start()

    def to(self, count: int, *more: str) -> dict[str, Any]:
        if not (self.path / "shards.json").exists():
            return reshard(self.file, count, "--into", self.folder, *more)
        return reshard(self.folder, count, *more)

    def said(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads((self.path / "shards.json").read_text())
        return answer


@asynccontextmanager
async def stopping(daemon: Daemon) -> AsyncIterator[Daemon]:
    """A daemon that is stopped cleanly at the end."""
    yield daemon
    assert await daemon.aterminate() == 0


@pytest.fixture
def home(make_daemon: MakeDaemon, tmp_path: Path) -> Home:
    return Home(make_daemon, tmp_path)


async def populate(client: Client) -> dict[str, list[int]]:
    """Create tasks of every kind and state. Return ids by expectation."""
    await client.create_group("t", "g", order_failure="hold", order_attempts=1)
    await client.create_group("t", "late")
    await client.configure("t", "g", rate=100_000)
    plain = await client.enqueue_many([Task("t", b"%d" % n, delay=HOUR) for n in range(150)])
    keyed = await client.enqueue_many(
        [Task("t", b"", delay=HOUR, key=f"k{n}", tag="x") for n in range(40)]
    )
    (gone,) = await client.enqueue_many([Task("t", b"", delay=HOUR, key="gone")])
    assert await client.cancel(gone.id) == "cancelled"
    # An order key is held, and another task waits for its retry.
    ordered = [
        await client.enqueue("t", f"{n} {key}".encode(), order_key=key)
        for n in range(3) for key in ORDERED
    ]  # fmt: skip
    dead, acked, waiting = [], [], []
    await client.create_group("d", "g", retry=Retry.fixed(HOUR))
    await client.enqueue_many([Task("d", b"%d" % n, key=f"d{n}") for n in range(9)])
    for delivery in await client.pull("d", group="g", max=9):
        if delivery.body < b"3":
            assert await delivery.reject("no good") == "dead"
            dead.append(delivery.id)
        elif delivery.body < b"6":
            assert await delivery.nack() == "retrying"
            waiting.append(delivery.id)
        else:
            assert await delivery.ack() == "acked"
            acked.append(delivery.id)
    held_ids = []
    for delivery in await client.pull("t", group="g", max=6):
        if delivery.order_key == "o0":
            await delivery.nack()
            held_ids.append(delivery.id)
        else:
            await delivery.release()
    await client.put_schedule("plain", topic="t", every=24 * HOUR, overlap="skip")
    await client.put_schedule("keyed", topic="t", every=24 * HOUR, key="k1")
    await client.run_schedule("plain")
    async with client.transaction("payments", id="paid") as transaction:
        await transaction.enqueue("t", b"half", delay=HOUR, key="k7")
    await client.pause_key("t", "g", key="o5")
    return {
        "scheduled": [task.id for task in (*plain, *keyed, *transaction.receipts)],
        "cancelled": [gone.id], "dead": dead, "waiting": waiting, "acked": acked,
        "held": held_ids, "ordered": [task.id for task in ordered],
    }  # fmt: skip


async def seen_by(client: Client, ids: dict[str, list[int]]) -> dict[str, Any]:
    """All that a client can see, but for what counts from a start."""
    named = sorted(item for some in ids.values() for item in some)
    tasks = {
        task.id: (
            task.state, task.topic, task.body, task.due_ms, task.key, task.order_key, task.tag,
            task.properties, sorted(task.groups),
        )
        for task in await client.lookup_many(named)
    }  # fmt: skip
    return {
        "tasks": tasks,
        "listed": [task.id async for task in client.list_tasks()],
        "dead": [letter async for letter in client.dead_list(topic="d")],
        "schedules": [schedule async for schedule in client.list_schedules()],
        "transactions": [transaction async for transaction in client.list_transactions()],
        "held": [(held_key.key, held_key.id) for held_key in await client.held_keys("t", "g")],
        "paused": [paused_key.value for paused_key in await client.paused_keys("t", "g")],
        "groups": sorted(
            (topic, name, group.rate)
            for topic, one in (await client.stats()).topics.items()
            for name, group in one.groups.items()
        ),
    }


async def check_places(count: int, client: Client) -> None:
    """Check that every keyed task is in its shard and every id in one shard."""
    places: dict[int, int] = {}
    shards = client._shards
    assert (1 if shards is None else len(shards.links)) == count
    for shard in range(count):
        one = client if shards is None else alone(client, shard)
        async for task in one.list_tasks():
            assert places.setdefault(task.id, shard) == shard
            if basis := task.order_key or task.key:
                assert shard == crc32(basis.encode()) % count, task


@pytest.mark.parametrize(
    "counts", [(2, 3, 1), pytest.param((2, 3, 2, 1, 4), marks=pytest.mark.slow)]
)
async def test_resharding_keeps_all_tasks(home: Home, counts: tuple[int, ...]) -> None:
    daemon = home.serve()
    async with Client(daemon.url) as client:
        ids = await populate(client)
        before = await seen_by(client, ids)
    assert await daemon.aterminate() == 0
    assert {before["tasks"][item][0] for item in ids["dead"]} == {"dead"}
    assert before["held"] == [("o0", ids["held"][0])]
    for count in counts:
        would = home.to(count, "--dry-run")
        done = home.to(count)
        assert would == {**done, "dry_run": True, "kept": []}
        assert (
            done["tasks"]
            == len(before["listed"])
            == sum(shard["tasks"] for shard in done["shards"])
        )
        for shard in done["shards"]:
            CLI.run("check", "--store", f"sqlite:///{shard['database']}")
        daemon = home.serve()
        async with Client(daemon.url) as client:
            assert await seen_by(client, ids) == before, count
            more = await client.enqueue("t", b"new", delay=HOUR, key=f"new-{count}")
            assert more.id > home.said()["moved_id"]
            assert more.id % ID_STEP == crc32(f"new-{count}".encode()) % count
            assert await client.cancel(more.id) == "cancelled"
            assert (await client.lookup(more.id)).state == "cancelled"
            await check_places(count, client)
        assert await daemon.aterminate() == 0
    await deliver_all(home.serve(), ids, before)


async def deliver_all(daemon: Daemon, ids: dict[str, list[int]], before: dict[str, Any]) -> None:
    """Everything comes once, and that of a key in its order."""
    async with Client(daemon.url) as client:
        assert await client.release_key("t", "g", ids["held"][0]) == "released"
        requeued = await client.dead_requeue([(item, "g") for item in ids["dead"]])
        assert requeued == ["requeued"] * len(ids["dead"])
        again = await client.pull("d", group="g", max=9)
        assert sorted(task.id for task in again) == sorted(ids["dead"])
        await client.resume_key("t", "g", key="o5")
        scheduled = [item for item in before["listed"] if item not in ids["ordered"]]
        moved = await client.run_now_many(
            [item for item in scheduled if item not in (*ids["dead"], *ids["waiting"])]
        )
        assert {task.status for task in moved} == {"scheduled"}, moved[:3]
        results: list[tuple[int, bytes, str | None]] = []
        wanted = set(before["listed"]) - set(ids["dead"]) - set(ids["waiting"])

        async def consume() -> None:
            async for delivery in client.subscribe("t", group="g"):
                results.append((delivery.id, delivery.body, delivery.order_key))
                await delivery.ack()

        consuming = asyncio.ensure_future(consume())
        await comes(lambda: len(results) >= len(wanted))
        consuming.cancel()
        assert sorted(row[0] for row in results) == sorted(wanted)
        for key in ORDERED:
            assert [body for _, body, of in results if of == key] == [
                f"{n} {key}".encode() for n in range(3)
            ]


# --- requests that come again --------------------------------------------------------------------


def json_task(key: str | None, **more: Any) -> dict[str, Any]:
    task = {"topic": "t", "body": "x", "delay_ms": HOUR * 1000, "key": key} | more
    return {name: value for name, value in task.items() if value is not None}


KEYS = ["a", "b", "c", "d", None, "e"]
DUE_MS = (int(time.time()) + HOUR) * 1000
REQUESTS: dict[str, Any] = {
    **{f"one-{key}": json_task(key) for key in KEYS},
    "many": {"tasks": [json_task(key, delay_ms=HOUR * 1000 + n) for n, key in enumerate(KEYS)]},
    "kept": {"tasks": [json_task(key, if_pending="keep") for key in KEYS if key]},
    "at": {"tasks": [json_task(key, delay_ms=None, due_ms=DUE_MS) for key in KEYS]},
    "windows": {"tasks": [json_task(key, within_ms=HOUR * 1000) for key in KEYS]},
}
"""Idempotency key → the request."""


async def put_all(daemon: Daemon, count: int) -> dict[str, Any]:
    url = daemon.http if count < 2 else daemon.http_all
    result = {}
    for name, body in REQUESTS.items():
        answer = await asyncio.to_thread(ask, url, "POST", "/v1/tasks", body, idempotency_key=name)
        assert answer.status == 201, answer.body
        result[name] = answer.json
    return result


async def put_part(daemon: Daemon, name: str, count: int) -> None:
    """The request as one that was cut off: its home alone has taken its part."""
    of_wire = tuple(
        (task["topic"], b"x", task["delay_ms"], *([{"key": task["key"]}] if "key" in task else []))
        for task in REQUESTS["many"]["tasks"]
    )
    of = request_identity(name, ANONYMOUS, of_wire)
    home = crc32(of.session.hex().encode()) % count
    part = [of_wire[index] for index in indexes_by_shard(of_wire, of.session, count).get(home, ())]
    async with Client(daemon.url) as client:
        await client.ping()
        assert client._shards is not None
        await client._shards.links[home].ask(T.ENQUEUE_ONCE, of.session, of.fingerprint, part)


def serve_http(home: Home, count: int) -> Daemon:
    if count < 2:
        return home.serve(http=True)
    listen = f"tcp://127.0.0.1:{free_ports(count)}"
    args = ("--processes", str(count), "--listen", listen, "--http-all", "127.0.0.1:0")
    return home._make(store=home.folder, args=args, http=True).start()


@pytest.mark.parametrize(
    ("begins", "counts"),
    [
        (0, (3, 1)),
        *(pytest.param(begins, (3, 2, 4, 1), marks=pytest.mark.slow) for begins in (0, 2)),
    ],
)
async def test_resharding_keeps_idempotency_keys(
    home: Home, begins: int, counts: tuple[int, ...]
) -> None:
    """Also one of which some shards have not taken their part: then the rest comes, once."""
    daemon = serve_http(home, begins)
    before = await put_all(daemon, begins)
    if begins:
        await put_part(daemon, "cut", begins)
    assert await daemon.aterminate() == 0
    whole = None
    for count in counts:
        home.to(count)
        daemon = serve_http(home, count)
        assert await put_all(daemon, count) == before, count
        url = daemon.http if count < 2 else daemon.http_all
        if begins:
            args = url, "POST", "/v1/tasks", REQUESTS["many"]
            cut = await asyncio.to_thread(ask, *args, idempotency_key="cut")
            assert cut.status == 201, cut.body
            ids = [task["id"] for task in cut.json["tasks"]]
            assert len(set(ids)) == len(KEYS) and whole in (None, ids)
            whole = ids
        args = url, "POST", "/v1/tasks", json_task("other")
        reused = await asyncio.to_thread(ask, *args, idempotency_key="one-a")
        assert (reused.status, reused.json["code"]) == (422, "idempotency_key_reused")
        async with Client(daemon.url) as client:
            stored = [task.id async for task in client.list_tasks()]
        singles = [one["id"] for name, one in before.items() if name.startswith("one")]
        many = [task["id"] for one in before.values() for task in one.get("tasks", ())]
        assert set(map(str, stored)) == {*singles, *many, *(whole or ())}
        assert await daemon.aterminate() == 0


# --- cut off -------------------------------------------------------------------------------------

SERVES_THE_OLD = ("reshard.begun", "reshard.middle", "reshard.copied", "reshard.verified")
SERVES_NOTHING = ("reshard.given_up", "reshard.given_up=2", "reshard.switching")
SERVES_THE_NEW = ("reshard.switched",)


def test_every_failpoint_of_resharding_is_tested() -> None:
    tried = {*SERVES_THE_OLD, *SERVES_NOTHING, *SERVES_THE_NEW}
    assert {place.partition("=")[0] for place in tried} == set(failpoints.OFFLINE)


def first_of_each(*groups: Sequence[str]) -> list[Any]:
    """Parameters: `make test` has one place of each outcome, `make test-full` all."""
    return [
        pytest.param(place, marks=pytest.mark.slow) if n else place
        for group in groups
        for n, place in enumerate(group)
    ]


@pytest.mark.parametrize("place", first_of_each(SERVES_THE_OLD, SERVES_NOTHING, SERVES_THE_NEW))
async def test_a_killed_resharding_can_be_repeated(
    home: Home, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [f"k{n}" for n in range(30)]
    async with stopping(home.serve()) as daemon, Client(daemon.url) as client:
        tasks = [Task("t", key.encode(), delay=HOUR, key=key) for key in keys]
        made = {item.id for item in await client.enqueue_many(tasks)}
    if place.endswith("=2"):
        home.to(2)  # there are two databases to give up
    first, last = (2, 3) if place.endswith("=2") else (1, 2)
    monkeypatch.setenv("TICKWHEEL_FAILPOINTS", place)
    into = () if first > 1 else ("--into", home.folder)
    store = home.folder if first > 1 else home.file
    arguments = ("reshard", "--store", store, "--to", str(last), *into)
    assert CLI.code(*arguments) == KILLED
    monkeypatch.delenv("TICKWHEEL_FAILPOINTS")
    if place in SERVES_NOTHING:
        with pytest.raises(DaemonFailed, match="run reshard again if it was interrupted"):
            home.serve()
        if first == 1:
            with pytest.raises(DaemonFailed, match="layout-1 already exists.*run it again"):
                home.serve_folder("2")
    else:
        async with stopping(home.serve()) as daemon, Client(daemon.url) as client:
            assert {task.id async for task in client.list_tasks()} == made
            count = len(client._shards.links) if client._shards else 1
            assert count == (last if place in SERVES_THE_NEW else first)
    done = CLI.one(*arguments)
    assert done["already"] == (place in SERVES_THE_NEW)
    async with stopping(home.serve()) as daemon, Client(daemon.url) as client:
        assert {task.id async for task in client.list_tasks()} == made
        await check_places(last, client)
    assert CLI.one(*arguments)["already"]
    if first == 1:
        with pytest.raises(DaemonFailed, match="were moved to .*shards/layout-1/ by `tickwheel"):
            home.serve_file()


# --- what comes after ----------------------------------------------------------------------------


async def test_a_resharded_shard_is_restored_from_later_history_only(
    home: Home, tmp_path: Path
) -> None:
    history = str(tmp_path / "history")
    backups = tmp_path / "backups"
    backups.mkdir()
    fields: dict[str, Any] = {"history_dir": history, "history_bodies": "true"}
    fields["backup_dir"] = str(backups)
    keys = [f"k{n}" for n in range(20)]
    async with stopping(home.serve(**fields)) as daemon, Client(daemon.url) as client:
        await client.enqueue_many([Task("t", b"", delay=HOUR, key=key) for key in keys])
        await client.backup("before.db")
    home.to(2)
    async with stopping(home.serve(**fields)) as daemon, Client(daemon.url) as client:
        await client.backup("after.db")
        later = [f"later{n}" for n in range(20)]
        await client.enqueue_many([Task("t", b"", delay=HOUR, key=key) for key in later])
        ids = [task.id async for task in client.list_tasks()]
        assert len(ids) == len(keys + later)
    for shard, source in ((0, ("--from", str(backups / "before.db"))), (1, ("--shard", "1"))):
        database = home.path / "layout-1" / f"shard-{shard}.db"
        database.unlink()
        CLI.run("restore", "--into", f"sqlite:///{database}", "--history", history, *source)
        with pytest.raises(DaemonFailed, match=f"shard-{shard}.db belongs to another layout"):
            home.serve(**fields)
        database.unlink()
        backup = str(backups / f"shard-{shard}" / f"after-shard-{shard}.db")
        CLI.run(
            "restore", "--into", f"sqlite:///{database}", "--history", history, "--from", backup
        )
    async with stopping(home.serve(**fields)) as daemon, Client(daemon.url) as client:
        assert [task.id async for task in client.list_tasks()] == ids
        await check_places(2, client)
