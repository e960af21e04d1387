"""Resets: what a group is given again, out of the history and out of the store; the dry run says
the same; restarts, refusals, limits. A whole daemon, with a real history."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import tempfile
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from server.shard.test_bulk import put
from support.in_process import InProcess
from support.shard_rig import NOW_MS, Peer
from support.stand_in import stand_in
from support.waiting import comes
from tickwheel.api.frames import FrameType as T
from tickwheel.history import reset_plan
from tickwheel.history.lines import EventKind
from tickwheel.history.segments import safe_node
from tickwheel.persistence.contract import CommitRefused
from tickwheel.persistence.memory import MemoryStore
from tickwheel.server.shard import bulk as bulks
from tickwheel.server.shard import resets

LOOKS_MAX = 30_000


def daemon_of(
    folder: Path, *, history: bool = True, store: MemoryStore | None = None, **settings: Any
) -> InProcess:
    if history:
        settings |= {"history_dir": str(folder / "history"), "history_bodies": True}
    return InProcess(folder, store=store, **settings)


@pytest.fixture
async def daemon(tmp_path: Path) -> AsyncIterator[InProcess]:
    async with daemon_of(tmp_path) as made:
        yield made


async def bulk_when(
    peer: Peer, bulk: str, holds: Callable[[dict[str, Any]], bool]
) -> dict[str, Any]:
    """The bulk operation, when it is so. Its plan is made by another process."""

    async def look() -> dict[str, Any] | None:
        result: dict[str, Any] = await peer.do(T.BULK, bulk, "show")
        return result if holds(result) else None

    result = await comes(look, every_s=0.002)
    assert result is not None
    return result


async def over(daemon: InProcess, peer: Peer, bulk: str) -> dict[str, Any]:
    """The bulk operation, when it is."""
    result = await bulk_when(peer, bulk, lambda bulk: bulk["state"] != "running")
    await daemon.settle()
    return result


def has_begun(bulk: dict[str, Any]) -> bool:
    return bool(bulk["changed"])


async def reset(daemon: InProcess, peer: Peer, group: str = "g", **options: Any) -> dict[str, Any]:
    options.setdefault("to", "first")
    made = await peer.do(T.GROUP_RESET, "t", group, options)
    assert (made["kind"], made["state"]) == ("reset", "running")
    result = await over(daemon, peer, made["id"])
    assert result["state"] == "done", result["note"]
    return result


async def tried(
    daemon: InProcess, peer: Peer, group: str = "g", to: Any = "first"
) -> dict[str, Any]:
    """Return the result of a dry run, which starts a process."""
    answer = await preview(daemon, peer, group, to)
    assert answer[0] == T.OK, answer
    return dict(answer[2])


async def preview(daemon: InProcess, peer: Peer, group: str, to: Any) -> tuple[Any, ...]:
    number = peer.send(T.GROUP_RESET_PREVIEW, "t", group, {"to": to})
    for _ in range(LOOKS_MAX):
        await asyncio.sleep(0.002)  # real time: another process
        if not daemon.shard.resets.previews.count:
            break
    return tuple(await peer.answer(number))


async def take(daemon: InProcess, peer: Peer, group: str = "g") -> list[tuple[int, dict[str, Any]]]:
    """What a group is handed now, acked: ids and options."""
    number = peer.request + 1
    await peer.do(T.SUBSCRIBE, number, "t", group, 100, None)
    results: list[tuple[int, dict[str, Any]]] = []
    while True:
        await daemon.settle()
        frames = [row for row in peer.frames() if row[0] == T.DELIVER]
        if not frames:
            break
        for frame in frames:
            items = frame[4]
            results += [(item[0], item[4] if len(item) > 4 else {}) for item in items]
            ids, attempts = zip(*((item[0], item[1]) for item in items), strict=True)
            assert await peer.do(T.ACK, "t", group, frame[2], ids, attempts) is None
    await peer.do(T.UNSUBSCRIBE, number)
    return results


async def make(peer: Peer, *groups: str) -> None:
    for group in groups:
        await peer.do(T.GROUP_CREATE, "t", group, {})


def originals(taken: list[tuple[int, dict[str, Any]]]) -> list[int | None]:
    return [options.get("replay_of") for _, options in taken]


@pytest.mark.parametrize("history", [True, False])
async def test_a_reset_redelivers_finished_tasks_to_that_group_only(
    tmp_path: Path, history: bool
) -> None:
    async with daemon_of(tmp_path, history=history) as daemon:
        peer = daemon.connect()
        await make(peer, "g", "other")
        ids = [await put(peer, 0, key=f"k{n}", tag="eu", properties={"n": n}) for n in range(3)]
        assert [one for one, _ in await take(daemon, peer)] == ids
        assert (await take(daemon, peer))[:1] == []
        # Without a history only what others still have can come again.
        expected = ids
        if history:
            assert [one for one, _ in await take(daemon, peer, "other")] == ids
        wanted = await tried(daemon, peer)
        assert (wanted["tasks"], wanted["lost"]) == (3, 0)
        assert (wanted["first_ms"], wanted["last_ms"]) == (NOW_MS, NOW_MS)
        done = await reset(daemon, peer)
        assert (done["looked_at"], done["matched"], done["changed"]) == (3, 3, 3)
        taken = await take(daemon, peer)
        assert originals(taken) == expected
        assert [options for _, options in taken] == [
            {"key": f"k{n}", "tag": "eu", "properties": {"n": n}, "replay_of": ids[n]}
            for n in range(3)
        ]
        others = await take(daemon, peer, "other")
        assert [one for one, _ in others] == ([] if history else ids)
        assert originals(others) == [None] * len(others)
        daemon.recount()


async def test_a_reset_does_not_duplicate_unfinished_tasks(daemon: InProcess, peer: Peer) -> None:
    await make(peer, "g", "other")
    had = [await put(peer, 0) for _ in range(2)]
    await take(daemon, peer)
    await put(peer, 0)
    await daemon.settle()
    await put(peer, 60_000)
    assert (await tried(daemon, peer))["tasks"] == 2
    assert (await reset(daemon, peer))["changed"] == 2
    taken = await take(daemon, peer)
    assert sorted(filter(None, originals(taken))) == had
    assert len(taken) == 3


async def test_a_reset_skips_tasks_acked_after_it_started(daemon: InProcess, peer: Peer) -> None:
    """However long the plan takes: it goes by the history up to the reset."""
    await make(peer, "g")
    before = await put(peer, 0)
    await take(daemon, peer)
    after = await put(peer, 0)
    await daemon.settle()
    async with daemon.shard.resets._plan_lock:
        made = await peer.do(T.GROUP_RESET, "t", "g", {"to": "first"})
        assert [one for one, _ in await take(daemon, peer)] == [after]
    assert (await over(daemon, peer, made["id"]))["changed"] == 1
    assert originals(await take(daemon, peer)) == [before]


async def test_a_reset_since_a_time_goes_by_due_time(daemon: InProcess, peer: Peer) -> None:
    await make(peer, "g")
    ids = []
    for _ in range(3):
        ids.append(await put(peer, 0))
        await take(daemon, peer)
        daemon.pass_time(1_000)
    assert (await tried(daemon, peer, to=NOW_MS + 1_000))["tasks"] == 2
    await reset(daemon, peer, to=NOW_MS + 1_000)
    assert originals(await take(daemon, peer)) == ids[1:]
    await reset(daemon, peer, to=NOW_MS + 2_001)
    assert await take(daemon, peer) == []
    await reset(daemon, peer)
    assert originals(await take(daemon, peer)) == ids, "what stood for others stands for none"


async def test_a_reset_gives_a_newer_group_the_older_tasks(daemon: InProcess, peer: Peer) -> None:
    await make(peer, "g")
    ended = await put(peer, 0)
    await take(daemon, peer)
    held = await put(peer, 0)
    await daemon.settle()
    daemon.pass_time(5)
    await make(peer, "late")
    assert await take(daemon, peer, "late") == []
    assert (await tried(daemon, peer, "late"))["tasks"] == 2
    await reset(daemon, peer, "late")
    assert originals(await take(daemon, peer, "late")) == [ended, held]
    assert [one for one, _ in await take(daemon, peer)] == [held]


async def test_a_reset_respects_the_groups_filter(daemon: InProcess, peer: Peer) -> None:
    await make(peer, "g", "other")
    eu, _ = await put(peer, 0, tag="eu"), await put(peer, 0, tag="us")
    await take(daemon, peer)
    await peer.do(T.CONFIGURE, "t", "g", {"tags": "eu"})
    assert (await tried(daemon, peer))["tasks"] == 1
    assert (await reset(daemon, peer))["changed"] == 1
    assert originals(await take(daemon, peer)) == [eu]


async def test_a_reset_without_stored_bodies_counts_the_losses(tmp_path: Path) -> None:
    async with InProcess(tmp_path, history_dir=str(tmp_path / "history")) as daemon:
        peer = daemon.connect()
        await make(peer, "g", "other")
        await put(peer, 0)
        for group in ("g", "other"):
            await take(daemon, peer, group)
        kept = await put(peer, 0)
        await take(daemon, peer)
        wanted = await tried(daemon, peer)
        assert (wanted["tasks"], wanted["lost"]) == (1, 1)
        done = await reset(daemon, peer)
        assert (done["matched"], done["changed"], done["refused"]) == (2, 1, {"no_body": 1})
        assert originals(await take(daemon, peer)) == [kept]


async def test_a_reset_reports_gaps_in_the_history(daemon: InProcess) -> None:
    peer, history = daemon.connect(), daemon.shard.history
    await make(peer, "g")
    await put(peer, 0)
    await take(daemon, peer)
    assert history is not None
    assert (await tried(daemon, peer))["incomplete"] == 0
    assert (await reset(daemon, peer))["note"] == ""
    await take(daemon, peer)
    history._append([[EventKind.DROPPED, daemon.sources.now_ms, 7, "full"]], 1)
    assert (await tried(daemon, peer))["incomplete"] == 1
    done = await reset(daemon, peer)
    assert done["note"].startswith("incomplete: the history has a gap")


async def test_a_reset_resumes_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resets, "PAGE", 3)
    store = MemoryStore()
    async with daemon_of(tmp_path, store=store) as daemon:
        peer = daemon.connect()
        await make(peer, "g")
        ids = [await put(peer, 0) for _ in range(20)]
        await take(daemon, peer)
        await peer.do(T.GROUP_RESET, "t", "g", {"to": "first", "id": "r"})
        result = await bulk_when(peer, "r", has_begun)
        assert result["state"] == "running"
        half = store.copy()
    async with daemon_of(tmp_path, store=half) as daemon:
        peer = daemon.connect()
        result = await over(daemon, peer, "r")
        assert (result["state"], result["changed"]) == ("done", 20)
        taken = originals(await take(daemon, peer))
        assert Counter(taken) == Counter(ids), "each of them once"


async def test_a_reset_retries_batches_the_store_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resets, "PAGE", 4)
    store = MemoryStore()
    async with daemon_of(tmp_path, store=store) as daemon:
        peer = daemon.connect()
        await make(peer, "g")
        ids = [await put(peer, 0) for _ in range(10)]
        await take(daemon, peer)
        refusals = 0
        commit = store.commit

        async def reluctant(epoch: int, owner: str, number: int, effects: Any) -> None:
            nonlocal refusals
            if effects.enqueued and refusals < 3:
                refusals += 1
                raise CommitRefused("not now")
            await commit(epoch, owner, number, effects)

        monkeypatch.setattr(store, "commit", reluctant)
        done = await reset(daemon, peer)
        assert (refusals, done["looked_at"], done["matched"], done["changed"]) == (3, 10, 10, 10)
        assert Counter(originals(await take(daemon, peer))) == Counter(ids)
        daemon.recount()


async def test_a_reset_keeps_its_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulks, "PACE_S_MAX", 0.001)
    async with daemon_of(tmp_path) as daemon:
        peer = daemon.connect()
        await make(peer, "g")
        for _ in range(30):
            await put(peer, 0)
        await take(daemon, peer)
        await peer.do(T.GROUP_RESET, "t", "g", {"to": "first", "rate": 10, "id": "r"})
        seen = [(await bulk_when(peer, "r", has_begun))["changed"]]
        for _ in range(4):
            daemon.pass_time(500)
            result = await bulk_when(peer, "r", lambda bulk: bulk["changed"] > seen[-1])
            seen.append(result["changed"])
        assert all(count <= 1 + 5 * n for n, count in enumerate(seen)), seen
        await peer.do(T.BULK, "r", "cancel")


async def test_a_reset_waits_for_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resets, "NO_ROOM_RETRY_S", 0.001)
    async with daemon_of(tmp_path, tasks_max=4) as daemon:
        peer = daemon.connect()
        await make(peer, "g")
        ids = [await put(peer, 0) for _ in range(3)]
        await take(daemon, peer)
        for _ in range(2):
            await put(peer, 60_000)
        await peer.do(T.GROUP_RESET, "t", "g", {"to": "first", "id": "r"})
        result = await bulk_when(peer, "r", lambda bulk: bulk["changed"] == 2)
        for _ in range(20):
            await asyncio.sleep(0.001)  # real time: it does no more meanwhile
        assert (await peer.do(T.BULK, "r", "show")) == result, "there is no more room"
        taken = await take(daemon, peer)
        assert (await over(daemon, peer, "r"))["changed"] == 3
        assert originals(taken + await take(daemon, peer)) == ids


async def test_a_cancelled_reset_stops_enqueuing(daemon: InProcess, peer: Peer) -> None:
    await make(peer, "g")
    for _ in range(5):
        await put(peer, 0)
    await take(daemon, peer)
    await peer.do(T.GROUP_RESET, "t", "g", {"to": "first", "rate": 0.001, "id": "r"})
    answer = await peer.do(T.BULK, "r", "cancel")
    assert answer["state"] == "cancelled"
    async with daemon.shard.resets._plan_lock:  # its plan is not made any more
        pass
    assert len(await take(daemon, peer)) == answer["changed"] <= 1


@pytest.mark.parametrize("comes_back", [False, True])
async def test_a_reset_without_its_group_fails(
    daemon: InProcess, peer: Peer, comes_back: bool
) -> None:
    await make(peer, "g", "other")
    await put(peer, 0)
    await take(daemon, peer)
    async with daemon.shard.resets._plan_lock:
        await peer.do(T.GROUP_RESET, "t", "g", {"to": "first", "id": "r"})
        if comes_back:
            await comes(lambda: daemon.shard.resets.plans, every_s=0.002)
        await peer.do(T.GROUP_DELETE, "t", "g", True)
        await daemon.settle()
        await make(peer, *["g"] * comes_back)
    result = await over(daemon, peer, "r")
    assert (result["state"], result["note"]) == ("failed", "group g of topic t was deleted")


async def test_a_reset_whose_plan_fails_names_the_reason(tmp_path: Path) -> None:
    async with daemon_of(tmp_path, reset_plan_bytes_max=40_960) as daemon:
        peer = daemon.connect()
        await make(peer, "g")
        await peer.enqueue(("t", b"x" * 100_000, 0, {}))
        prefix = f"reset-{safe_node(daemon.shard.settings.node)}-s0-"
        (tmp_path / "history" / "_state" / f"{prefix}killed.plan").touch()
        await take(daemon, peer)
        await peer.do(T.GROUP_RESET, "t", "g", {"to": "first", "id": "r"})
        result = await over(daemon, peer, "r")
        assert result["state"] == "failed"
        assert "database or disk is full" in result["note"]
        assert "reset_plan_bytes_max" in result["note"]
        _, _, code, message = (await preview(daemon, peer, "g", "first"))[:4]
        assert (code, "reset_plan_bytes_max" in message) == ("refused", True)
        assert not list((tmp_path / "history" / "_state").glob("*.plan"))
        assert daemon.shard.resets.plans == 0


async def test_the_files_of_a_plan_are_used_in_threads_only(
    daemon: InProcess, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk of the history can hang."""
    used: dict[str, bool] = {}

    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **options: Any) -> Any:
            in_loop = threading.current_thread() is threading.main_thread()
            used[function.__name__] = used.get(function.__name__, False) or in_loop
            return function(*given, **options)

        return call

    for user, module, name in (
        (resets, tempfile, "mkstemp"), (resets, os, "unlink"), (reset_plan, sqlite3, "connect"),
    ):  # fmt: skip
        replaced = stand_in(module, **{name: noted(getattr(module, name))})
        monkeypatch.setattr(user, module.__name__, replaced)
    await make(peer, "g")
    await put(peer, 0)
    await take(daemon, peer)
    assert (await tried(daemon, peer))["tasks"] == 1
    assert used == {"mkstemp": False, "unlink": False, "connect": False}


# --- what is wrong -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "to is missing"),
        ({"to": "last"}, "to must be 'first' or milliseconds"),
        ({"to": True}, "to must be"),
        ({"to": -1}, "to"),
        ({"to": NOW_MS + 1}, "1 ms in the future"),
        ({"to": "first", "rate": 0}, "rate"),
        ({"to": "first", "id": "no spaces"}, "id must be"),
        ({"to": "first", "more": 1}, "more"),
    ],
)
async def test_invalid_reset_requests_are_refused(
    tmp_path: Path, options: dict[str, Any], says: str
) -> None:
    async with daemon_of(tmp_path, history=False) as daemon:
        peer = daemon.connect()
        await make(peer, "g")
        code, message = await peer.refused(T.GROUP_RESET, "t", "g", options)
        assert (code, says in message) == ("bad_request", True), message
        if not options.keys() & {"rate", "id"}:
            assert (await peer.refused(T.GROUP_RESET_PREVIEW, "t", "g", options))[0] == code


async def test_resets_need_a_history_and_are_limited(tmp_path: Path) -> None:
    async with daemon_of(tmp_path, history=False, resets_max=2) as daemon:
        peer = daemon.connect()
        for kind in (T.GROUP_RESET, T.GROUP_RESET_PREVIEW):
            assert (await peer.refused(kind, "t", "g", {"to": "first"}))[0] == "not_found"
        await make(peer, "g", "h", "i")
        slow = {"to": "first", "rate": 0.001}
        async with daemon.shard.resets._plan_lock:
            made = await peer.do(T.GROUP_RESET, "t", "g", {**slow, "id": "r"})
            assert await peer.do(T.GROUP_RESET, "t", "g", {**slow, "id": "r"}) == made
            code, message = await peer.refused(T.GROUP_RESET, "t", "g", slow)
            assert (code, message) == (
                "conflict",
                "bulk operation r is already resetting this group; wait for it or cancel it",
            )  # fmt: skip
            code, _ = await peer.refused(T.GROUP_RESET, "t", "h", {**slow, "id": "r"})
            assert code == "conflict"
            await peer.do(T.GROUP_RESET, "t", "h", slow)
            code, message = await peer.refused(T.GROUP_RESET, "t", "i", slow)
            assert (code, "the limit is 2 (resets_max)" in message) == ("overloaded", True)
