"""Bulk operations: what each kind does, which tasks it touches, how it goes on after a restart, its
limits."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from support.in_process import InProcess
from support.shard_rig import NOW_MS, Peer
from tickwheel.api.frames import FrameType as T
from tickwheel.model.kinds import BULK
from tickwheel.persistence.memory import MemoryStore
from tickwheel.server.shard import bulk as bulks

TURNS_MAX = 20_000
HOUR_MS = 3_600_000


async def put(peer: Peer, delay_ms: int = HOUR_MS, topic: str = "t", **options: Any) -> int:
    answer = await peer.enqueue((topic, b"x", delay_ms, options))
    assert answer[0] == T.OK, answer
    return int(answer[2][1][0])


async def words(peer: Peer, *ids: int) -> list[str]:
    return [task["state"] for task in await peer.do(T.LOOKUP, ids)]


async def ended(peer: Peer, bulk: str) -> dict[str, Any]:
    """The bulk operation, when it is over."""
    for _ in range(TURNS_MAX):
        result: dict[str, Any] = await peer.do(T.BULK, bulk, "show")
        if result["state"] != "running":
            return result
        await asyncio.sleep(0)
    raise AssertionError("the bulk operation does not end")


async def done(peer: Peer, kind: str, topic: str = "t", **options: Any) -> dict[str, Any]:
    made = await peer.do(T.BULK_MAKE, topic, kind, options)
    assert made["state"] == "running"
    result = await ended(peer, made["id"])
    assert result["state"] == "done"
    assert result["matched"] == result["changed"] + sum(result["refused"].values())
    return result


async def tried(peer: Peer, kind: str, topic: str = "t", **options: Any) -> dict[str, Any]:
    """A dry run, all its parts together."""
    result = await peer.do(T.BULK_PREVIEW, topic, kind, options)
    while result["next"] is not None:
        moment = {name: result[name] for name in ("until_id", "until_ms")}
        asked = {**options, **moment, "after": result["next"]}
        more = await peer.do(T.BULK_PREVIEW, topic, kind, asked)
        more["refused"] = {
            word: result["refused"].get(word, 0) + more["refused"].get(word, 0)
            for word in result["refused"].keys() | more["refused"].keys()
        }
        for name in ("looked_at", "matched", "examples"):
            more[name] = result[name] + more[name]
        result = more
    return dict(result)


async def of_every_kind(daemon: InProcess, peer: Peer) -> dict[str, int]:
    """Tasks of topic t by their state."""
    await peer.do(T.SUBSCRIBE, 1, "t", "g", 3, None)
    ids = [await put(peer, 0, tag=tag) for tag in ("a", "b", "c")]
    await daemon.settle()
    frames = [frame for frame in peer.frames() if frame[0] == T.DELIVER]
    attempts = {item[0]: (item[0], frame[2], item[1]) for frame in frames for item in frame[4]}
    assert attempts.keys() == set(ids)
    await peer.do(T.PREFETCH, 1, 0)
    assert await peer.do(T.NACK, "t", "g", ((*attempts[ids[0]], 60_000, None),)) == ("retrying",)
    assert await peer.do(T.REJECT, "t", "g", ((*attempts[ids[1]], "no good"),)) == ("dead",)
    ready, scheduled = await put(peer, 0, tag="a"), await put(peer, tag="a")
    await daemon.settle()
    result = dict(zip(("waiting", "dead", "in_flight", "ready"), (*ids, ready), strict=True))
    result["scheduled"] = scheduled
    assert await words(peer, *result.values()) == list(result)
    return result


# --- what each kind does -------------------------------------------------------------------------


async def test_cancel_skips_tasks_in_flight(daemon: InProcess) -> None:
    peer = daemon.connect()
    tasks = await of_every_kind(daemon, peer)
    other = await put(peer, topic="other")
    wanted = await tried(peer, "cancel")
    assert wanted["examples"] == tuple(sorted(tasks[n] for n in ("waiting", "ready", "scheduled")))
    result = await done(peer, "cancel")
    assert (result["looked_at"], result["matched"], result["changed"]) == (5, 5, 3)
    assert result["refused"] == {"in_flight": 1, "dead": 1} == wanted["refused"]
    assert dict(zip(tasks, await words(peer, *tasks.values()), strict=True)) == {
        "waiting": "cancelled", "dead": "dead", "in_flight": "in_flight", "ready": "cancelled",
        "scheduled": "cancelled",
    }  # fmt: skip
    assert await words(peer, other) == ["scheduled"]
    daemon.recount()


async def test_bulk_reschedules_to_a_time_and_runs_now(daemon: InProcess) -> None:
    peer = daemon.connect()
    tasks = await of_every_kind(daemon, peer)
    at_ms = NOW_MS + 3 * HOUR_MS
    result = await done(peer, "reschedule", due_ms=at_ms)
    assert (result["changed"], result["refused"]) == (3, {"dead": 1, "in_flight": 1})
    shown = await peer.do(T.LOOKUP, (tasks["ready"], tasks["scheduled"]))
    assert [task["due_ms"] for task in shown] == [at_ms, at_ms]
    result = await done(peer, "run_now", state="scheduled")
    assert (result["matched"], result["changed"]) == (2, 2)
    await daemon.settle()
    assert await words(peer, tasks["ready"], tasks["scheduled"]) == ["ready", "ready"]
    daemon.recount()


async def test_a_shift_moves_each_due_time(daemon: InProcess) -> None:
    peer = daemon.connect()
    far_ms = daemon.shard.limits.delay_ms_max
    delays = (10_000, 20_000, far_ms - 1_000)
    ids = [await put(peer, delay_ms) for delay_ms in delays]
    assert (await tried(peer, "reschedule", shift_ms=5_000))["refused"] == {"due_too_far": 1}
    result = await done(peer, "reschedule", shift_ms=5_000)
    assert (result["changed"], result["refused"]) == (2, {"due_too_far": 1})
    dues = [task["due_ms"] - NOW_MS for task in await peer.do(T.LOOKUP, tuple(ids))]
    assert dues == [15_000, 25_000, far_ms - 1_000]
    await done(peer, "reschedule", shift_ms=-20_000)
    dues = [task["due_ms"] - NOW_MS for task in await peer.do(T.LOOKUP, tuple(ids))]
    assert dues == [0, 5_000, far_ms - 21_000], "the past is now"


async def test_requeue_and_delete_act_on_dead_letters(daemon: InProcess) -> None:
    peer = daemon.connect()
    tasks = await of_every_kind(daemon, peer)
    assert (await done(peer, "requeue", reason="elsewhere"))["matched"] == 0
    assert (await done(peer, "requeue", group="nobody"))["matched"] == 0
    assert (await tried(peer, "requeue", reason="NO GOOD"))["examples"] == (tasks["dead"],)
    result = await done(peer, "requeue", reason="NO GOOD", group="g")
    assert (result["looked_at"], result["matched"], result["changed"]) == (1, 1, 1)
    await daemon.settle()
    assert await words(peer, tasks["dead"]) == ["ready"]
    assert (await done(peer, "delete"))["matched"] == 0
    daemon.recount()


# --- which tasks ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, "abcd"),
        ({"tags": "eu || us"}, "ab"),
        ({"where": "amount >= 2"}, "bc"),
        ({"tags": "eu", "where": "amount > 1"}, ""),
        ({"key_prefix": "order-"}, "ac"),
        ({"due_from_ms": NOW_MS + 20_000}, "bcd"),
        ({"due_to_ms": NOW_MS + 20_000}, "a"),
        ({"due_from_ms": NOW_MS + 20_000, "due_to_ms": NOW_MS + 30_001}, "bc"),
        ({"state": "scheduled"}, "abcd"),
        ({"state": "ready"}, ""),
    ],
)
async def test_a_selection_combines_its_conditions(
    daemon: InProcess, options: dict[str, Any], wanted: str
) -> None:
    peer = daemon.connect()
    ids = {
        "a": await put(peer, 10_000, tag="eu", key="order-1", properties={"amount": 1}),
        "b": await put(peer, 20_000, tag="us", key="o-2", properties={"amount": 2}),
        "c": await put(peer, 30_000, key="order-2", properties={"amount": 2.5}),
        "d": await put(peer, 40_000),
    }
    selected = [ids[name] for name in wanted]
    assert list((await tried(peer, "cancel", **options))["examples"]) == selected
    assert (await done(peer, "cancel", **options))["changed"] == len(wanted)
    for name, word in zip(ids, await words(peer, *ids.values()), strict=True):
        assert word == ("cancelled" if name in wanted else "scheduled")


async def test_tasks_enqueued_after_a_bulk_started_are_untouched(
    daemon: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = daemon.connect()
    before = await put(peer)
    peer.send(T.ENQUEUE, peer.request + 1, (("t", b"", HOUR_MS),))
    made = peer.send(T.BULK_MAKE, "t", "cancel", {})
    after = peer.send(T.ENQUEUE, peer.request + 1, (("t", b"", HOUR_MS),))
    bulk = (await peer.answer(made))[2]
    (new,) = (await peer.answer(after))[2][1]
    result = await ended(peer, bulk["id"])
    assert result["changed"] == 2, "what was sent before is"
    assert await words(peer, before, new) == ["cancelled", "scheduled"]


@pytest.mark.parametrize("kind", ["requeue", "delete"])
@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("back_ms", [0, HOUR_MS, -HOUR_MS])
async def test_dead_letters_made_after_a_bulk_started_are_untouched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, restarts: bool, back_ms: int
) -> None:
    """Wherever the wall clock goes meanwhile, and though nothing is enqueued."""
    monkeypatch.setattr(bulks, "PACE_S_MAX", 0.0)
    store, now_ms = MemoryStore(), NOW_MS
    async with InProcess(tmp_path, store=store) as daemon:
        peer = daemon.connect()
        await peer.do(T.SUBSCRIBE, 1, "t", "g", 10, None)
        ids = [await put(peer, 0) for _ in range(3)]
        held = await taken(daemon, peer)
        await reject(peer, held, ids[:2])
        options = {"rate": 0.001, "id": "j"}  # it does one, and waits
        await peer.do(T.BULK_MAKE, "t", kind, options)
        daemon.sources.now_ms = now_ms = now_ms - back_ms
        if not restarts:
            await reject(peer, held, ids[2:])
        await daemon.settle()
        half = store.copy()
        if not restarts:
            bulk = await seen_through(daemon, peer)
            assert (bulk["looked_at"], bulk["changed"]) == (2, 2)
            return
    async with InProcess(tmp_path, store=half, now_ms=now_ms) as daemon:
        peer = daemon.connect()
        daemon.pass_time(HOUR_MS)  # what was in flight comes again
        await daemon.settle()
        await peer.do(T.SUBSCRIBE, 1, "t", "g", 10, None)
        held = await taken(daemon, peer)
        await reject(peer, held, ids[2:])
        bulk = await seen_through(daemon, peer)
        assert (bulk["looked_at"], bulk["changed"]) == (2, 2)


async def taken(daemon: InProcess, peer: Peer) -> dict[int, tuple[int, int, int]]:
    """Return the receipts of deliveries, by task."""
    await daemon.settle()
    frames = [frame for frame in peer.frames() if frame[0] == T.DELIVER]
    return {item[0]: (item[0], frame[2], item[1]) for frame in frames for item in frame[4]}


async def reject(peer: Peer, held: dict[int, tuple[int, int, int]], ids: list[int]) -> None:
    for task_id in ids:
        assert await peer.do(T.REJECT, "t", "g", ((*held[task_id], "no"),)) == ("dead",)


async def seen_through(daemon: InProcess, peer: Peer) -> dict[str, Any]:
    """Bulk operation j, which waits for its rate, when it is over."""
    for _ in range(50):
        result: dict[str, Any] = await peer.do(T.BULK, "j", "show")
        if result["state"] != "running":
            return result
        daemon.pass_time(1_000_000)
        await daemon.settle()
    raise AssertionError("the bulk operation does not end")


async def test_the_same_request_again_is_the_same_bulk(daemon: InProcess) -> None:
    peer = daemon.connect()
    await put(peer)
    made = await done(peer, "reschedule", delay_ms=5_000, id="mine")
    daemon.sources.now_ms += 1_000
    again = await peer.do(T.BULK_MAKE, "t", "reschedule", {"delay_ms": 5_000, "id": "mine"})
    assert again == made
    code, _ = await peer.refused(T.BULK_MAKE, "t", "reschedule", {"delay_ms": 1, "id": "mine"})
    assert code == "conflict"


# --- its life ------------------------------------------------------------------------------------


async def test_a_bulk_resumes_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulks, "PAGE", 4)
    store = MemoryStore()
    async with InProcess(tmp_path, store=store) as daemon:
        peer = daemon.connect()
        ids = [await put(peer, 100_000 + n) for n in range(20)]
        await peer.do(T.BULK_MAKE, "t", "reschedule", {"shift_ms": 50_000, "id": "j"})
        for _ in range(TURNS_MAX):
            result = await peer.do(T.BULK, "j", "show")
            if result["changed"] >= 8:
                break
            await asyncio.sleep(0)
        assert result["state"] == "running" and 8 <= result["changed"] < 20
        half = store.copy()
    async with InProcess(tmp_path, store=half) as daemon:
        peer = daemon.connect()
        result = await ended(peer, "j")
        assert (result["looked_at"], result["matched"], result["changed"]) == (20, 20, 20)
        dues = [task["due_ms"] - NOW_MS for task in await peer.do(T.LOOKUP, tuple(ids))]
        assert dues == [150_000 + n for n in range(20)], "each was moved once"
        daemon.recount()


async def test_a_cancelled_bulk_stops_changing_tasks(
    daemon: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulks, "PAGE", 2)
    monkeypatch.setattr(bulks, "PACE_S_MAX", 0.0)
    peer = daemon.connect()
    ids = [await put(peer) for _ in range(10)]
    made = await peer.do(T.BULK_MAKE, "t", "cancel", {"rate": 1})
    await daemon.turn()
    answer = await peer.do(T.BULK, made["id"], "cancel")
    assert answer["state"] == "cancelled"
    for _ in range(20):
        daemon.pass_time(1_000)
        await daemon.settle()
    states = await words(peer, *ids)
    assert states.count("cancelled") == answer["changed"] < 10
    assert await peer.do(T.BULK, made["id"], "cancel") == answer, "again is harmless"
    assert (await peer.do(T.BULK_LIST, {"state": "cancelled"}))["bulk"] == (answer,)
    assert daemon.shard.core.bulk_running == 0


async def test_a_bulk_keeps_its_rate(daemon: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulks, "PACE_S_MAX", 0.0)
    peer = daemon.connect()
    for _ in range(40):
        await put(peer)
    await peer.do(T.BULK_MAKE, "t", "cancel", {"rate": 10, "id": "slow"})
    changed = []
    for _ in range(5):
        await daemon.settle()
        changed.append((await peer.do(T.BULK, "slow", "show"))["changed"])
        daemon.pass_time(500)
    assert changed[0] == 1, "one at once"
    steps = [after - before for before, after in pairwise(changed)]
    assert all(step <= 5 for step in steps) and sum(steps) > 0, changed
    await peer.do(T.BULK, "slow", "cancel")


# --- what is wrong -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options", "code", "says"),
    [
        ("delete", {"state": "ready"}, "bad_request", "use cancel for pending tasks"),
        ("cancel", {"group": "g"}, "bad_request", "has no field 'group'"),
        ("cancel", {"delay_ms": 1}, "bad_request", "has no field 'delay_ms'"),
        ("reschedule", {}, "bad_request", "one of delay, at and shift"),
        ("reschedule", {"delay_ms": 1, "shift_ms": 1}, "bad_request", "one of delay"),
        ("reschedule", {"shift_ms": 1 << 60}, "bad_request", "shift_ms"),
        ("cancel", {"where": "a = = 2"}, "bad_request", "\n      ^"),
        ("cancel", {"where": "a = NULL"}, "bad_request", "a = NULL is UNKNOWN for every task"),
        ("cancel", {"rate": True}, "bad_request", "rate"),
    ],
)
async def test_invalid_bulk_requests_are_refused(
    daemon: InProcess, kind: str, options: dict[str, Any], code: str, says: str
) -> None:
    peer = daemon.connect()
    await put(peer)
    for frame in (T.BULK_MAKE, T.BULK_PREVIEW):
        got, message = await peer.refused(frame, "t", kind, options)
        assert (got, says in message) == (code, True), message
    assert (await peer.do(T.BULK_LIST, {}))["bulk"] == ()


async def test_running_bulk_operations_are_limited(tmp_path: Path) -> None:
    async with InProcess(tmp_path, bulk_max=2) as daemon:
        peer = daemon.connect()
        for _ in range(9):
            await put(peer)
        for n in range(2):
            await peer.do(T.BULK_MAKE, "t", "cancel", {"rate": 0.01, "id": str(n)})
        code, message = await peer.refused(T.BULK_MAKE, "t", "cancel", {})
        assert (code, "bulk_max" in message) == ("overloaded", True)
        await peer.do(T.BULK_MAKE, "t", "cancel", {"rate": 0.01, "id": "0"})
        await peer.do(T.BULK, "0", "cancel")
        await peer.do(T.BULK_MAKE, "t", "cancel", {"id": "2"})


async def test_ended_bulk_operations_expire_by_age_and_number(tmp_path: Path) -> None:
    async with InProcess(tmp_path, bulk_remembered_max=3, bulk_remembered_s=100) as daemon:
        peer = daemon.connect()
        await put(peer)
        for n in range(5):
            await done(peer, "run_now", state="dead", id=f"j{n}")
            daemon.sources.now_ms += 1_000
        page = await peer.do(T.BULK_LIST, {"limit": 2})
        assert ([bulk["id"] for bulk in page["bulk"]], page["next"]) == (["j4", "j3"], "j3")
        page = await peer.do(T.BULK_LIST, {"limit": 2, "after": "j3"})
        assert ([bulk["id"] for bulk in page["bulk"]], page["next"]) == (["j2"], None)
        daemon.sources.now_ms += 97_000
        daemon.shard.engine.sweep(daemon.sources.mono_ms())
        assert [bulk["id"] for bulk in (await peer.do(T.BULK_LIST, {}))["bulk"]] == ["j4", "j3"]
        await daemon.settle()
        kept = (await daemon.store.recover_small()).of_kind(BULK)
        assert sorted(row.bulk.id for row in kept) == ["j3", "j4"]


@pytest.mark.parametrize("frame", [T.BULK_MAKE, T.BULK_PREVIEW])
async def test_a_slice_ends_by_time(
    daemon: InProcess, monkeypatch: pytest.MonkeyPatch, frame: T
) -> None:
    """With a condition that takes longer than a slice may, the loop turns after each task."""
    monkeypatch.setattr(bulks, "SLICE_S", 0.0)
    peer = daemon.connect()
    for _ in range(30):
        await put(peer)
    judged, between = 0, list[int]()
    fits = bulks.Selector.fits

    def counting(selector: Any, row: Any) -> bool:
        nonlocal judged
        judged += 1
        return fits(selector, row)

    async def watch() -> None:
        while True:
            before = judged
            await asyncio.sleep(0)
            between.append(judged - before)

    monkeypatch.setattr(bulks.Selector, "fits", counting)
    watcher = asyncio.create_task(watch())
    made = await peer.do(frame, "t", "cancel", {})
    if frame == T.BULK_MAKE:
        made = await ended(peer, made["id"])
    watcher.cancel()
    assert (made["looked_at"], judged, max(between)) == (30, 30, 1)


async def test_bulk_operations_take_turns(
    daemon: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulks, "SLICE", 1)
    peer = daemon.connect()
    for n in range(20):
        await put(peer, topic=f"t{n % 2}")
    made = [await peer.do(T.BULK_MAKE, f"t{n}", "cancel", {"id": f"j{n}"}) for n in range(2)]
    assert [bulk["state"] for bulk in made] == ["running"] * 2
    results = [await ended(peer, f"j{n}") for n in range(2)]
    assert [bulk["changed"] for bulk in results] == [10, 10]
