"""A store and a history that a daemon left when it was killed: opened, served, read.

Each test runs once for each sample in ``tests/golden/samples``, which ``make_sample.py`` writes.
Nothing depends on the date: the daemons live a minute after the sample's end, and then ten years
after it; what must stay is due in the year 2099.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.steering import WallClock
from support.waiting import until
from tickwheel.api.frames import FrameType as T
from tickwheel.cli import main
from upgrade.sample import (
    COUNTS,
    LATER_MS,
    STORES,
    Expected,
    Peer,
    daemon_on,
    expected_of,
    found_samples,
    place_for,
    restore_store,
)

PATIENCE_S = 60.0
LEASE_MS = 30_000
YEARS_MS = 10 * 365 * 86_400_000
Command = Callable[..., list[dict[str, Any]]]
PendingGroups = dict[tuple[str, str], set[int]]


def test_each_store_has_a_sample() -> None:
    assert {path.name for path in found_samples()} == set(STORES)


@pytest.fixture(params=found_samples(), ids=lambda path: f"{path.parent.name}-{path.name}")
def sample(request: pytest.FixtureRequest) -> Path:
    return Path(request.param)


@pytest.fixture(
    params=[
        # The history does not depend on the store.
        pytest.param(path, marks=[pytest.mark.slow] if path.name == "redis" else [])
        for path in found_samples()
    ],
    ids=lambda path: f"{path.parent.name}-{path.name}",
)
def past(request: pytest.FixtureRequest) -> Path:
    """A sample whose history is looked at."""
    return Path(request.param)


@pytest.fixture
def tickwheel(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """``tickwheel("check", "--store", URL)``: what the command prints with ``--json``."""

    def run(*arguments: str) -> list[dict[str, Any]]:
        monkeypatch.setattr(sys, "argv", ["tickwheel", *arguments, "--json"])
        code = main()
        out, err = capsys.readouterr()
        assert code == 0, err
        return [json.loads(line) for line in out.splitlines()]

    return run


def test_a_sample_store_is_served(sample: Path, tmp_path: Path, tickwheel: Command) -> None:
    expected, history = expected_of(sample), tmp_path / "history"
    with place_for(sample.name, tmp_path) as url:
        restore_store(sample, url)
        shutil.copytree(sample / "history", history)
        if sample.name == "sqlite":
            nothing_is_wrong(tickwheel, url)
        clock = clock_of(expected, tmp_path)
        with daemon_on(tmp_path / "daemon", url, history, clock.env) as daemon:
            with Peer(daemon.port) as peer:
                everything_is_as_it_was(peer, expected)
                deleted_groups_go(peer, expected)
                nothing_is_wrong(tickwheel, f"sqlite:///{peer.do(T.BACKUP, 'copy.db')['path']}")
            answers_are_repeated(daemon.port, expected)
            with Peer(daemon.port) as peer:
                old_receipts_count(peer, expected)
                what_is_due_is_delivered(peer, expected)
            assert daemon.terminate() == 0
            clock.step(YEARS_MS)
            daemon.settings["accept_clock"] = True
            daemon.start()
            with Peer(daemon.port) as peer:
                assert peer.do(T.STATS)["now_ms"] > expected["opened_ms"] + YEARS_MS
                only_the_far_part_is_left(peer, expected)
        the_history_goes_on(tickwheel, history, expected)


def test_a_sample_history_is_restored(past: Path, tmp_path: Path, tickwheel: Command) -> None:
    expected, history = expected_of(past), tmp_path / "history"
    shutil.copytree(past / "history", history)
    ids = {task["id"] for task in expected["tasks"]}
    events = tickwheel("history", "list", "--dir", str(history), "--limit", "0")
    listed = {int(event["task_id"]) for event in events if event["event"] == "enqueued"}
    assert listed < ids, "the newest tasks are in the spool only"
    into = f"sqlite:///{tmp_path / 'restored.db'}"
    (report,) = tickwheel("restore", "--history", str(history), "--into", into)
    assert report["spool_events"] > 0
    assert report["missing_events"] == report["torn_lines"] == report["unusable_events"] == 0
    assert report["without_body"]["count"] == 0
    nothing_is_wrong(tickwheel, into)
    clock = clock_of(expected, tmp_path)
    again = daemon_on(tmp_path / "daemon", into, tmp_path / "new", clock.env)
    with again as daemon, Peer(daemon.port) as peer:
        everything_is_as_it_was(peer, expected)


def clock_of(expected: Expected, folder: Path) -> WallClock:
    """It shows the time at which the sample is to be opened."""
    return WallClock(folder / "clock", expected["opened_ms"] - int(time.time() * 1000))


def nothing_is_wrong(tickwheel: Command, url: str) -> None:
    (found,) = tickwheel("check", "--store", url)
    assert found["problems"] == [] and found["tasks"] > 0


# --- what holds -----------------------------------------------------------------------------------


def everything_is_as_it_was(peer: Peer, expected: Expected) -> None:
    """Tasks, dead letters, groups and settings, but for what a minute's time changes."""
    ids = [task["id"] for task in expected["tasks"]]
    wanted = [later(task, expected) for task in expected["tasks"]]
    until_none(
        lambda: [
            (want, found)
            for want, found in zip(wanted, peer.lookup(ids), strict=True)
            if not agrees(want, found)
        ]
    )
    assert peer.dead() == letters(expected)
    leaving = {tuple(names) for names in expected["leaving"]}
    for settings in expected["settings"]:
        if (settings["topic"], settings["group"]) not in leaving:
            assert peer.settings(settings["topic"], settings["group"]) == settings
    stats = peer.do(T.STATS)
    assert 0 <= stats["now_ms"] - expected["opened_ms"] < LATER_MS, "the clock is not the sample's"
    topics = stats["topics"]
    for topic, groups in expected["groups"].items():
        assert sorted(topics[topic]["groups"]) == [g for g in groups if (topic, g) not in leaving]


def deleted_groups_go(peer: Peer, expected: Expected) -> None:
    """Their names are free again in the end."""
    for topic, group in expected["leaving"]:
        until_none(lambda: [] if is_made(peer, topic, group) else [group])  # noqa: B023  # called here
        assert peer.do(T.GROUP_DELETE, topic, group, False)["ready"] == 0


def is_made(peer: Peer, topic: str, group: str) -> bool:
    since_ms = 3_900_000_000_000  # it is owed nothing
    answer = peer.call(T.GROUP_CREATE, topic, group, {"since": since_ms})
    if answer[0] == T.ERROR:
        assert answer[2] == "refused", answer
        return False
    assert answer[2]["created"]
    return True


def answers_are_repeated(port: int, expected: Expected) -> None:
    """A producer that never heard the answers sends everything again."""
    by_session: dict[str, list[Any]] = defaultdict(list)
    for request in expected["requests"]:
        by_session[request["session"]].append(request)
    for session, requests in by_session.items():
        with Peer(port, session=session.encode("latin-1")) as peer:
            for known in requests:
                peer.request = known["request"] - 1
                tasks = [[t[0], t[1].encode("latin-1"), *t[2:]] for t in known["tasks"]]
                accepted_ms, ids = peer.do(T.ENQUEUE, 1, tasks)
                assert [accepted_ms, list(ids)] == known["answer"]
            assert peer.do(T.STATS)["enqueued"] == 0


def old_receipts_count(peer: Peer, expected: Expected) -> None:
    for receipt in expected["receipts"]:
        fields = [receipt[name] for name in ("topic", "group", "epoch", "ids", "attempts")]
        assert peer.do(T.ACK, *fields) is None, receipt


def what_is_due_is_delivered(peer: Peer, expected: Expected) -> None:
    """To every group what it is owed, once, and nothing else."""
    bodies = {task["id"]: task.get("body") for task in expected["tasks"]}
    peer.do(T.CONFIGURE, "held", None, {"paused": False})
    for (topic, group), ids in owed(expected).items():
        if group not in expected["groups"].get(topic, ()):
            assert peer.do(T.GROUP_CREATE, topic, group, {})["created"]
        peer.do(T.CONFIGURE, topic, group, {"paused": False})
        epoch, items = peer.pull(topic, group, len(ids), LEASE_MS)
        assert {item[0] for item in items} == ids, (topic, group)
        assert all(item[3].decode("latin-1") == bodies[item[0]] for item in items)
        receipt = [item[0] for item in items], [item[1] for item in items]
        assert peer.do(T.ACK, topic, group, epoch, *receipt) is None
        assert peer.do(T.PULL, topic, group, 10, 0, {})[2] == ()
    for topic, groups in expected["groups"].items():
        for group in groups:
            if [topic, group] not in expected["leaving"]:
                assert peer.do(T.PULL, topic, group, 10, 0, {})[2] == (), (topic, group)
    only_the_far_part_is_left(peer, expected)


def only_the_far_part_is_left(peer: Peer, expected: Expected) -> None:
    """Check that tasks of the year 2099 and dead letters are left."""
    states: dict[int, str] = {}
    waiting = 0
    for task in (later(task, expected) for task in expected["tasks"]):
        groups = [group["state"] for group in task.get("groups", {}).values()]
        waiting += groups.count("waiting")
        for word in ("dead", "waiting"):
            if word in groups:
                states[task["id"]] = word
        if task["state"] == "scheduled":
            states[task["id"]] = "scheduled"
    answer = peer.do(T.STATS)
    assert {name: answer[name] for name in (*COUNTS, "early")} == {
        "scheduled": list(states.values()).count("scheduled"),
        "ready": 0,
        "in_flight": 0,
        "waiting": waiting,
        "dead": len(letters(expected)),
        "early": 0,
    }
    assert peer.dead() == letters(expected)
    assert {task["id"]: task["state"] for task in peer.lookup(list(states))} == states


def the_history_goes_on(tickwheel: Command, history: Path, expected: Expected) -> None:
    """Check that the old spool became lines next to the new daemon's."""
    state = history / "_state"
    until_none(lambda: [str(path) for path in state.glob("*/spool-*-*")])
    events = tickwheel("history", "list", "--dir", str(history), "--limit", "0")
    ids = {task["id"] for task in expected["tasks"]}
    assert {int(event["task_id"]) for event in events if event["event"] == "enqueued"} == ids
    numbers = [(event["epoch"], event["seq"]) for event in events]
    for epoch in range(1, max(epoch for epoch, _ in numbers) + 1):
        results = sorted(seq for e, seq in numbers if e == epoch)
        assert results == list(range(1, len(results) + 1))


# --- what a minute changes ------------------------------------------------------------------------


def later(task: dict[str, Any], expected: Expected) -> dict[str, Any]:
    """A task as it must be when the sample is opened: leases are over, retries are due, groups
    that were being deleted are gone."""
    if "topic" not in task:
        return task
    now_ms, topic = expected["opened_ms"], task["topic"]
    leaving = [group for name, group in expected["leaving"] if name == topic]
    if task["state"] == "scheduled":
        if task["due_ms"] > now_ms:
            return task
        stay = [group for group in expected["groups"].get(topic, ()) if group not in leaving]
        return task | {"state": "ready", "groups": {g: {"state": "ready"} for g in stay}}
    if not task["groups"]:
        return task
    groups = {g: _later(of, now_ms) for g, of in task["groups"].items() if g not in leaving}
    states = {of["state"] for of in groups.values()}
    if states <= {"acked"}:
        return {"id": task["id"], "state": "deleted"}
    state = next(word for word in ("waiting", "ready", "dead") if word in states)
    return task | {"state": state, "groups": groups}


def _later(group: dict[str, Any], now_ms: int) -> dict[str, Any]:
    state = group["state"]
    if state == "in_flight":
        return {"state": "ready", "attempt": group["attempt"]}
    if (state == "waiting" and group["at_ms"] > now_ms) or state in {"dead", "acked"}:
        return group
    return {name: value for name, value in group.items() if name != "at_ms"} | {"state": "ready"}


def agrees(want: dict[str, Any], found: dict[str, Any]) -> bool:
    """Return whether the counts agree; groups count only if `want` names them."""
    wanted, groups = want.get("groups", {}), found.get("groups", {})
    return (
        want | {"groups": {}} == found | {"groups": {}}
        and wanted.keys() == groups.keys()
        and all(of.items() <= groups[group].items() for group, of in wanted.items())
    )


def letters(expected: Expected) -> list[dict[str, Any]]:
    return [
        letter
        for letter in expected["dead"]
        if [letter["topic"], letter["group"]] not in expected["leaving"]
    ]


def owed(expected: Expected) -> PendingGroups:
    """What each group must get, once the old receipts were acked. A topic that never had a group
    gives everything to its first one."""
    acked = {
        (receipt["group"], task_id)
        for receipt in expected["receipts"]
        for task_id in receipt["ids"]
    }
    result: PendingGroups = defaultdict(set)
    for task in (later(task, expected) for task in expected["tasks"]):
        if task["state"] == "ready" and not task["groups"]:
            result[task["topic"], "first"].add(task["id"])
        for group, of in task.get("groups", {}).items():
            if of["state"] == "ready" and (group, task["id"]) not in acked:
                result[task["topic"], group].add(task["id"])
    return result


# --- asking ---------------------------------------------------------------------------------------


def until_none(wrong: Callable[[], list[Any]]) -> None:
    """Until the daemon has done in the background what it is to do."""
    wrong_now: list[Any] = []

    def is_none() -> bool:
        wrong_now[:] = wrong()
        return not wrong_now

    until(is_none, PATIENCE_S, lambda: f"{len(wrong_now)} do not agree, for example {wrong_now[0]}")
