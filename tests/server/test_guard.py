"""What a principal that is limited in topics sees and changes of what there is, and what it does
not learn."""

from __future__ import annotations

from typing import Any

import pytest

from server.access.access_rig import AccessRig
from support.shard_rig import NOW_MS, Peer, started
from tickwheel.api.frames import FrameType as T
from tickwheel.api.kinds import Whole
from tickwheel.protocol import encode
from tickwheel.server.http.types import request_identity
from tickwheel.server.shard import tasks
from tickwheel.server.shard.callers import Principal

HOUR_MS = 3_600_000
NEVER = 5
"""An id that no task had."""


rig = started(AccessRig)


async def two_tasks(rig: AccessRig) -> tuple[Peer, int, int]:
    """Who may do all, and the ids of a task of ours and of another's."""
    owner = await rig.peer_with("all")
    answer = await owner.enqueue(("ours.a", b"1", HOUR_MS), ("theirs", b"2", HOUR_MS))
    ours, theirs = answer[2][1]
    return owner, ours, theirs


async def words(peer: Peer, kind: T, *fields: Any) -> Any:
    answer = await peer.call(kind, *fields)
    assert answer[0] == T.OK, answer
    return answer[2]


async def test_ids_of_other_topics_are_unknown(rig: AccessRig) -> None:
    owner, ours, theirs = await two_tasks(rig)
    peer = await rig.peer_with("all=ours.*")
    ids = (ours, theirs, NEVER)
    result = await words(peer, T.LOOKUP, ids)
    assert [task["state"] for task in result] == ["scheduled", "unknown", "unknown"]
    assert result[1] == {"id": theirs, "state": "unknown"}
    moved = await words(peer, T.RESCHEDULE, ids, {"delay_ms": 2 * HOUR_MS})
    assert moved[0][:2] == (ours, "scheduled")
    assert moved[1:] == ((theirs, "unknown"), (NEVER, "unknown"))
    dead = tuple((task_id, "g") for task_id in ids[1:])
    assert await words(peer, T.DEAD_REQUEUE, dead) == ("unknown", "unknown")
    assert await words(peer, T.DEAD_DELETE, dead) == ("unknown", "unknown")
    ran = await words(peer, T.RUN_NOW, ids[1:])
    assert [word for _, word in ran] == ["unknown", "unknown"]
    ended = await words(peer, T.CANCEL, ids)
    assert [word for _, word in ended] == ["cancelled", "unknown", "unknown"]
    kept = await words(owner, T.LOOKUP, ids)
    assert [task["state"] for task in kept] == ["cancelled", "scheduled", "unknown"]
    assert kept[1]["due_ms"] == NOW_MS + HOUR_MS


async def test_ended_tasks_of_other_topics_are_unknown(rig: AccessRig) -> None:
    owner, ours, theirs = await two_tasks(rig)
    await words(owner, T.CANCEL, (ours, theirs))
    peer = await rig.peer_with("all=ours.*")
    ended = await words(peer, T.CANCEL, (ours, theirs))
    assert ended == ((ours, "unknown"), (theirs, "unknown"))


async def test_tasks_of_other_topics_with_options_are_hidden(rig: AccessRig) -> None:
    owner = await rig.peer_with("all")
    answer = await owner.enqueue(("theirs", b"", HOUR_MS, {"key": "k", "tag": "x"}))
    peer = await rig.peer_with("all=ours.*")
    ids = answer[2][1]
    assert await words(peer, T.CANCEL, ids) == ((ids[0], "unknown"),)


async def test_listings_show_only_readable_topics(rig: AccessRig) -> None:
    _, ours, _ = await two_tasks(rig)
    peer = await rig.peer_with("read=ours.*")
    page = await words(peer, T.LIST, {})
    assert [task["id"] for task in page["tasks"]] == [ours]
    token = await rig.token("read=ours.*")
    topics = (await rig.http(token, "GET", "/v1/topics")).json
    assert [topic["topic"] for topic in topics["topics"]] == ["ours.a"] and topics["next"] is None
    assert (await rig.http(token, "GET", "/v1/topics/ours.a")).status == 200
    there = await rig.http(token, "GET", "/v1/topics/theirs")
    not_there = await rig.http(token, "GET", "/v1/topics/nothing")
    assert there.status == not_there.status == 403


@pytest.mark.parametrize("topic", ["theirs", "never"])
async def test_a_named_topic_is_forbidden_whether_it_exists_or_not(
    rig: AccessRig, topic: str
) -> None:
    await two_tasks(rig)
    peer, token = await rig.peer_with("all=ours.*"), await rig.token("all=ours.*")
    for name in ("LIST", "DEAD_LIST", "CONSUMER_LIST", "TARGET_LIST", "HISTORY_LIST", "BULK_LIST"):
        assert (await peer.call(T[name], {"topic": topic}))[2] == "forbidden", name
    assert (await peer.call(T.EXPLAIN, None, {"topic": topic, "key": "k"}))[2] == "forbidden"
    for path in (f"topics/{topic}/keys/k/explanation", f"tasks?topic={topic}"):
        assert (await rig.http(token, "GET", f"/v1/{path}")).status == 403


async def test_dead_letters_of_other_topics_are_not_shown(
    rig: AccessRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = await rig.peer_with("all")
    for topic in ("ours.a", "theirs"):
        await words(owner, T.GROUP_CREATE, topic, "g", {"since": "first"})
    ours, theirs = (await owner.enqueue(("ours.a", b"", 0), ("theirs", b"", 0)))[2][1]
    for topic in ("ours.a", "theirs"):
        epoch, _, [item] = await words(owner, T.PULL, topic, "g", 1, 0, None)
        await words(owner, T.REJECT, topic, "g", ((item[0], epoch, item[1], None),))
    assert len((await words(owner, T.DEAD_LIST, {}))["dead"]) == 2
    peer = await rig.peer_with("all=ours.*")
    shown = (await words(peer, T.DEAD_LIST, {}))["dead"]
    assert [letter["topic"] for letter in shown] == ["ours.a"]
    monkeypatch.setattr(tasks, "PAGE", Whole(1, 1))
    monkeypatch.setattr(tasks, "SCANNED_PER_REQUEST_MAX", 1)
    page = await words(peer, T.DEAD_LIST, {"after": (ours, "g")})
    assert page == {"dead": (), "next": (theirs + 1, "")}, "the group of theirs is not named"


async def test_hidden_schedules_still_reserve_their_names(rig: AccessRig) -> None:
    owner = await rig.peer_with("all")
    every = {"every_ms": HOUR_MS, "body": b""}
    await words(owner, T.SCHEDULE_PUT, "theirs", every | {"topic": "theirs"})
    peer = await rig.peer_with("all=ours.*")
    await words(peer, T.SCHEDULE_PUT, "ours", every | {"topic": "ours.a"})
    page = await words(peer, T.SCHEDULE_LIST, {})
    assert [schedule["name"] for schedule in page["schedules"]] == ["ours"]
    for verb in ("show", "pause", "resume", "run", "delete"):
        answers = [await peer.call(T.SCHEDULE, name, verb, {}) for name in ("theirs", "never")]
        assert [answer[2] for answer in answers] == ["not_found", "not_found"], verb
        assert answers[0][3] == answers[1][3].replace("never", "theirs")
    # Neither taken over nor turned to another's topic.
    for name, topic in (("theirs", "ours.a"), ("ours", "theirs"), ("new", "theirs")):
        answer = await peer.call(T.SCHEDULE_PUT, name, every | {"topic": topic})
        assert answer[2] == "forbidden", (name, topic)
    known = rig.core.schedule_heap.by_name
    assert {n: known[n].row.schedule.topic for n in known} == {"theirs": "theirs", "ours": "ours.a"}
    assert (await words(peer, T.SCHEDULE, "ours", "delete", {}))["name"] == "ours"


async def test_bulk_operations_on_other_topics_are_hidden(rig: AccessRig) -> None:
    owner, peer = await rig.peer_with("all"), await rig.peer_with("all=ours.*")
    for topic in ("theirs", "ours.a"):
        await words(owner, T.ENQUEUE, 1, ((topic, b"", 60_000),))
        await words(owner, T.BULK_MAKE, topic, "cancel", {"id": topic, "tags": "none"})
    page = await words(peer, T.BULK_LIST, {})
    assert [row["id"] for row in page["bulk"]] == ["ours.a"]
    for verb in ("show", "cancel"):
        answers = [await peer.call(T.BULK, name, verb) for name in ("theirs", "never")]
        assert [answer[2] for answer in answers] == ["not_found", "not_found"], verb
        assert answers[0][3] == answers[1][3].replace("never", "theirs")
    for kind in (T.BULK_MAKE, T.BULK_PREVIEW):
        assert (await peer.call(kind, "theirs", "cancel", None))[2] == "forbidden"
    assert (await words(peer, T.BULK_PREVIEW, "ours.a", "cancel", None))["matched"] == 1
    reader = await rig.peer_with("read=ours.*")
    assert (await words(reader, T.BULK_PREVIEW, "ours.a", "cancel", None))["matched"] == 1
    assert (await reader.call(T.BULK_MAKE, "ours.a", "cancel", None))[2] == "forbidden"
    assert (await reader.call(T.BULK, "ours.a", "cancel"))[2] == "forbidden"


async def test_consumers_of_other_topics_are_not_shown(rig: AccessRig) -> None:
    owner = await rig.peer_with("all")
    for sub, topic in ((1, "ours.a"), (2, "theirs")):
        await words(owner, T.SUBSCRIBE, sub, topic, "g", 5, None)
    peer = await rig.peer_with("read=ours.*")
    consumers = (await words(peer, T.CONSUMER_LIST, None))["consumers"]
    assert [(row["topic"], row["prefetch"]) for row in consumers] == [("ours.a", 5)]
    assert len((await words(owner, T.CONSUMER_LIST, None))["consumers"]) == 2
    producer = await rig.peer_with("produce=ours.*")
    assert (await producer.call(T.CONSUMER_LIST, None))[2] == "forbidden"


async def test_hidden_transactions_still_reserve_their_names(rig: AccessRig) -> None:
    owner = await rig.peer_with("all")
    for name, topics in (("theirs", ("theirs",)), ("both", ("theirs", "ours.a"))):
        await words(owner, T.PREPARE, name, "g", 1, [(topic, b"", 0) for topic in topics], None)
    peer = await rig.peer_with("all=ours.*")
    await words(peer, T.PREPARE, "ours", "g", 1, [("ours.a", b"", 0)], None)
    page = await words(peer, T.TRANSACTION_LIST, {})
    assert [transaction["id"] for transaction in page["transactions"]] == ["ours"]
    for verb in (T.TRANSACTION_SHOW, T.COMMIT, T.ROLLBACK):
        answers = [await peer.call(verb, name) for name in ("theirs", "both", "never")]
        assert [answer[2] for answer in answers] == ["unknown_transaction"] * 3, verb
        assert answers[0][3] == answers[2][3].replace("never", "theirs")
    for name, topic in (("theirs", "ours.a"), ("both", "ours.a"), ("new", "theirs")):
        answer = await peer.call(T.PREPARE, name, "g", 2, [(topic, b"", 0)], None)
        assert answer[2] == "forbidden", (name, topic)
    assert {name: one.row.tasks for name, one in rig.core.transaction_registry.by_name.items()} == {
        "theirs": 1, "both": 2, "ours": 1,
    }  # fmt: skip
    assert len((await words(peer, T.COMMIT, "ours"))[1]) == 1


async def test_an_explanation_names_no_hidden_transaction(rig: AccessRig) -> None:
    owner, peer = await rig.peer_with("all"), await rig.peer_with("read=ours.*")
    for name, topics in (("both", ("theirs", "ours.a")), ("ours", ("ours.b",))):
        halves = [(topic, b"", 0, {"key": "k"}) for topic in topics]
        await words(owner, T.PREPARE, name, "g", 1, halves, None)
    found = [
        (await words(asker, T.EXPLAIN, None, {"topic": topic, "key": "k"}))["cause"]
        for asker in (owner, peer)
        for topic in ("ours.a", "ours.b")
    ]
    assert found == ["transaction", "transaction", "not_found", "transaction"]


async def test_one_forbidden_topic_refuses_the_whole_request(rig: AccessRig) -> None:
    peer = await rig.peer_with("produce=ours.*")
    answer = await peer.enqueue(("ours.a", b"", 0), ("theirs", b"", 0))
    assert answer[2] == "forbidden" and "theirs" in answer[3]
    assert rig.core.tasks == 0 and not rig.core.topics


async def test_plain_requests_in_one_read_are_checked_separately(rig: AccessRig) -> None:
    """The way of fast producers: frames of one task each, taken in one go."""
    await two_tasks(rig)
    peer = await rig.peer_with("produce=ours.*")
    before = rig.core.tasks
    topics = ("ours.a", "theirs", "ours.a", "ours.a", "theirs")
    frames = [(int(T.ENQUEUE), 10 + n, 0, ((t, b"", HOUR_MS),)) for n, t in enumerate(topics)]
    peer.request = 20
    peer.feed(b"".join(map(encode, frames)))
    answers = [await peer.answer(10 + n) for n in range(len(topics))]
    assert [answer[0] == T.OK for answer in answers] == [t == "ours.a" for t in topics]
    assert rig.core.tasks == before + 3


async def test_http_lines_are_refused_separately(rig: AccessRig) -> None:
    token = await rig.token("produce=ours.*")
    lines = b'{"topic":"ours.a"}\n{"topic":"theirs"}\n{"topic":"ours.b"}\n'
    response = await rig.call(
        "POST", "/v1/tasks", lines,
        content_type="application/x-ndjson", authorization=f"Bearer {token}",
    )  # fmt: skip
    codes = [line.get("error", {}).get("code") for line in response.lines]
    assert codes == [None, "forbidden", None]


async def test_a_group_of_ours_does_not_settle_tasks_of_others(rig: AccessRig) -> None:
    owner = await rig.peer_with("all")
    for topic in ("ours.a", "theirs"):
        await words(owner, T.GROUP_CREATE, topic, "g", {"since": "first"})
    await owner.enqueue(("theirs", b"", 0))
    epoch, _, [item] = await words(owner, T.PULL, "theirs", "g", 1, 0, None)
    peer = await rig.peer_with("all=ours.*")
    await peer.call(T.ACK, "ours.a", "g", epoch, (item[0],), (item[1],))
    await peer.call(T.REJECT, "ours.a", "g", ((item[0], epoch, item[1], None),))
    assert rig.core.tasks == 1
    assert await words(owner, T.ACK, "theirs", "g", epoch, (item[0],), (item[1],)) is None


async def test_sessions_are_separate_per_token(rig: AccessRig) -> None:
    """Else a request of somebody else would be taken for a resend, and its tasks for stored."""
    token = await rig.token("produce=ours.*", name="shop")
    session = request_identity("order-42", Principal("token shop", None), ()).session
    for thief in (await rig.token("all=theirs", name="thief"), token):
        peer = await rig.peer(token=thief, session=session)
        await peer.enqueue(("theirs", b"", HOUR_MS))
    headers = {"authorization": f"Bearer {token}", "idempotency-key": "order-42"}
    stored = await rig.call("POST", "/v1/tasks", {"topic": "ours.a"}, **headers)
    assert stored.status == 201
    peers = [await rig.peer(token=await rig.token("all", name=n), session=b"s" * 16) for n in "ab"]
    answers = [await peer.enqueue((f"of.{n}", b"", HOUR_MS)) for n, peer in enumerate(peers)]
    assert answers[0][2][1] != answers[1][2][1] and "of.1" in rig.core.topics


async def test_a_resend_is_recognised_with_a_newer_token(rig: AccessRig) -> None:
    answers = []
    for _ in range(2):
        token = await rig.token("produce", name="shop")
        peer = await rig.peer(token=token, session=b"s" * 16)
        answers.append(await peer.enqueue(("t", b"", HOUR_MS)))
    assert answers[0] == answers[1] and rig.core.tasks == 1


async def test_frames_read_with_hello_have_its_rights(rig: AccessRig) -> None:
    token = await rig.token("read")
    peer = rig.stranger()
    hello = (int(T.HELLO), 1, {"v": 1, "token": token, "client": "x"})
    peer.feed(encode(hello) + encode((int(T.ENQUEUE), 2, 0, (("t", b"", 0),))))
    assert (await peer.answer(1))[0] == T.OK
    assert (await peer.answer(2))[2] == "forbidden"
    peer.request = 2
    assert (await peer.call(T.STATS))[0] == T.OK


async def test_stats_cover_only_readable_topics(rig: AccessRig) -> None:
    owner, _, _ = await two_tasks(rig)
    await owner.enqueue(("ours.b", b"", HOUR_MS))
    for topic in ("ours.a", "theirs"):
        await words(owner, T.GROUP_CREATE, topic, "g", {})
    all_of_them = await words(owner, T.STATS)
    assert all_of_them["scheduled"] == 3 and not all_of_them["partial"]
    result = await words(await rig.peer_with("read=ours.*"), T.STATS)
    assert (result["scheduled"], result["enqueued"], result["partial"]) == (2, 2, True)
    assert set(result["topics"]) == {"ours.a", "ours.b"} and result["topics_left_out"] == 0
    assert result["topics"]["ours.a"] == all_of_them["topics"]["ours.a"]
    hidden = {"connections", "sessions", "lateness", "transactions", "batches", "schedules"}
    assert not hidden & result.keys() and result.keys() <= all_of_them.keys()
    nothing = await words(await rig.peer_with("read=nothing"), T.STATS)
    assert (nothing["scheduled"], nothing["topics"]) == (0, {})
    token = await rig.token("read=ours.*")
    assert (await rig.http(token, "GET", "/v1/stats")).json["scheduled"] == 2
    for path in ("/v1/load", "/v1/overview"):
        assert (await rig.http(token, "GET", path)).status == 403
