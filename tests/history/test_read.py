"""Questions to the history: all that is wanted, once, in order, whatever lies beside it."""

from __future__ import annotations

import gzip
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.history_rig import (
    HOUR_MS,
    NODE,
    NOW_MS,
    Clock,
    acked,
    delivered,
    enqueued,
    make_id,
    numbers,
    segment_names,
    spool_of,
    write,
    writer_of,
)
from tickwheel.errors import LimitExceeded
from tickwheel.history import read, segments
from tickwheel.history.lines import EventKind
from tickwheel.history.read import Follow, Query, Replay, flow, newest, search
from tickwheel.history.segments import Tally, hour_folder
from tickwheel.history.writer import Sealer

KEY = 'ключ "1"\n'


def some_history(folder: Path) -> list[int]:
    """Four tasks of two topics over three hours, the last one in two groups."""
    ids = [make_id(n) for n in range(4)]
    later = NOW_MS + HOUR_MS
    write(
        folder,
        [
            [enqueued(ids[:2], later, options={0: [KEY]}, time_ms=NOW_MS - 5)],
            [enqueued(ids[2:], later, ["t", "u"], options={1: [KEY]}, time_ms=NOW_MS)],
            [delivered(ids[:3], time_ms=later), acked(ids[:2], time_ms=later + 1)],
            [delivered(ids[3:], topic="u", time_ms=later + 2)],
            [delivered(ids[3:], topic="u", group="h", time_ms=later + 3)],
        ],
    )
    return ids


def pairs(events: Any) -> list[tuple[str, int]]:
    return [(event["event"], int(event["task_id"])) for event in events]


def find(folder: Path, **wanted: Any) -> list[Any]:
    return list(search(folder, Query(**wanted), Tally()))


def test_all_events_are_read_oldest_first(tmp_path: Path) -> None:
    some_history(tmp_path)
    assert numbers(find(tmp_path)) == [(1, seq) for seq in range(1, 12)]


def test_events_are_filtered_by_id_topic_group_and_event(tmp_path: Path) -> None:
    ids = some_history(tmp_path)
    assert pairs(find(tmp_path, ids=frozenset((ids[1],)))) == [
        ("enqueued", ids[1]), ("delivered", ids[1]), ("acked", ids[1])
    ]  # fmt: skip
    assert pairs(find(tmp_path, topic="u")) == [
        ("enqueued", ids[3]), ("delivered", ids[3]), ("delivered", ids[3])
    ]  # fmt: skip
    assert pairs(find(tmp_path, group="h")) == [("delivered", ids[3])]
    assert pairs(find(tmp_path, events=frozenset(("acked",)))) == [
        ("acked", ids[0]), ("acked", ids[1])
    ]  # fmt: skip
    assert find(tmp_path, topic="t", group="h") == []
    assert find(tmp_path, ids=frozenset()) == []


def test_a_key_finds_all_events_of_its_tasks(tmp_path: Path) -> None:
    ids = some_history(tmp_path)
    assert pairs(find(tmp_path, key=KEY)) == [
        ("enqueued", ids[0]), ("enqueued", ids[3]), ("delivered", ids[0]), ("acked", ids[0]),
        ("delivered", ids[3]), ("delivered", ids[3]),
    ]  # fmt: skip
    assert pairs(find(tmp_path, key=KEY, topic="u", events=frozenset(("enqueued",)))) == [
        ("enqueued", ids[3])
    ]
    # It was enqueued before the time that is asked for.
    since_ms = NOW_MS + HOUR_MS + 1
    assert pairs(find(tmp_path, key=KEY, since_ms=since_ms))[0] == ("acked", ids[0])
    assert find(tmp_path, key="1") == []


def test_tasks_of_a_searched_key_are_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    some_history(tmp_path)
    monkeypatch.setattr(read, "KEY_IDS_MAX", 1)
    with pytest.raises(LimitExceeded, match="more than 1 tasks have the key"):
        find(tmp_path, key=KEY)
    with pytest.raises(LimitExceeded, match="limit must be at most"):
        list(newest(tmp_path, Query(), 10**9, Tally()))


def test_times_are_from_and_before(tmp_path: Path) -> None:
    some_history(tmp_path)
    assert [e["time_ms"] for e in find(tmp_path, since_ms=NOW_MS, until_ms=NOW_MS + HOUR_MS)] == [
        NOW_MS, NOW_MS
    ]  # fmt: skip
    assert len(find(tmp_path, since_ms=NOW_MS - 5)) == 11
    assert len(find(tmp_path, until_ms=NOW_MS - 5)) == 0


@pytest.mark.parametrize("limit", [0, 1, 5, 11, 50])
def test_the_newest_first(tmp_path: Path, limit: int) -> None:
    some_history(tmp_path)
    result = numbers(newest(tmp_path, Query(), limit, Tally()))
    assert result == [(1, seq) for seq in range(11, 0, -1)][:limit]


def test_only_the_requested_hours_are_opened(tmp_path: Path) -> None:
    some_history(tmp_path)
    tally = Tally()
    assert len(list(newest(tmp_path, Query(), 3, tally))) == 3
    assert tally.lines == 7
    list(search(tmp_path, Query(since_ms=NOW_MS, until_ms=NOW_MS + 1), tally))
    assert tally.lines == 9


def test_all_events_of_a_task_are_found(tmp_path: Path) -> None:
    ids = some_history(tmp_path)
    assert [e["event"] for e in flow(tmp_path, ids[0], NOW_MS, Tally())] == [
        "enqueued", "delivered", "acked"
    ]  # fmt: skip
    # An id that says another time than it was enqueued at: everything is looked through.
    assert len(flow(tmp_path, ids[0], NOW_MS + 500 * HOUR_MS, Tally())) == 3
    assert flow(tmp_path, make_id(77), NOW_MS, Tally()) == []


def test_daemons_side_by_side_are_merged_by_time(tmp_path: Path) -> None:
    folder = tmp_path / hour_folder(NOW_MS)
    folder.mkdir(parents=True)
    for node, start in (("a", 1), ("b", 2)):
        lines = [
            json.dumps({"v": 1, "time_ms": NOW_MS + n, "event": "acked", "seq": n, "epoch": 1,
                        "shard": start, "task_id": str(n)})
            for n in range(start, 101, 2)
        ]  # fmt: skip
        text = "\n".join(lines) + "\n"
        (folder / f"{node}-s{start}-e1-000001.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    assert [event["time_ms"] - NOW_MS for event in find(tmp_path)] == [*range(1, 101)]


def test_other_files_are_ignored(tmp_path: Path) -> None:
    some_history(tmp_path)
    folder = tmp_path / hour_folder(NOW_MS)
    for name in ("_x.jsonl", ".tmp-n-s0-e1-000009.jsonl.gz", "notes.txt", "x.jsonl", "y.gz"):
        (folder / name).write_text('{"time_ms":1}\n')
    (tmp_path / "dt=nonsense").mkdir()
    (tmp_path / "dt=2026-13-77").mkdir()
    (folder.parent / "hour=99").mkdir()
    (tmp_path / "dt=2026-11-22").write_text("a file")
    assert len(find(tmp_path)) == 11


def test_torn_lines_and_segments_are_skipped_and_counted(tmp_path: Path) -> None:
    folder = tmp_path / hour_folder(NOW_MS)
    folder.mkdir(parents=True)
    good = json.dumps({"time_ms": NOW_MS, "event": "acked", "seq": 1})
    lines = [good, "[1]", '{"time_ms":"x"}', "{}", '{"time_ms":', "\udcff"]
    data = "\n".join(lines).encode("utf-8", "surrogateescape") + b"\n" + good.encode()
    (folder / "a-s0-e1-000001.jsonl").write_bytes(data)
    (folder / "b-s0-e1-000001.jsonl.gz").write_bytes(gzip.compress(f"{good}\n".encode() * 9)[:-9])
    (folder / "c-s0-e1-000001.jsonl.gz").write_bytes(b"no gzip")
    tally = Tally()
    assert len(list(search(tmp_path, Query(), tally))) == 2
    assert tally.torn == 6
    assert tally.unreadable == 2


def test_duplicate_segments_are_read_once(tmp_path: Path) -> None:
    some_history(tmp_path)
    for segment in segments.find(tmp_path):
        text = gzip.decompress(segment.path.read_bytes()).decode()
        segment.path.with_suffix("").write_text(text)  # as if it had just been sealed
        twin = segment.name._replace(number=segment.name.number + 50, sealed=False)
        (segment.path.parent / str(twin)).write_text(text)  # a part of one, after a crash
    assert numbers(find(tmp_path)) == [(1, seq) for seq in range(1, 12)]
    assert len(list(newest(tmp_path, Query(), 100, Tally()))) == 11


def test_a_large_body_is_read_back(tmp_path: Path) -> None:
    """``body_bytes_max`` can be set as high as one likes."""
    body = bytes(15 << 20)
    write(tmp_path, [[enqueued([make_id(1)], bodies=[body])]])
    tally = Tally()
    (event,) = search(tmp_path, Query(), tally)
    assert len(event["body"]) == 20 << 20 and tally.torn == 0


# --- as it comes -------------------------------------------------------------------------------


def test_following_yields_new_events_once(tmp_path: Path) -> None:
    spool, clock = spool_of(tmp_path), Clock()
    writer = writer_of(tmp_path, clock=clock, segment_bytes=600)
    follow = Follow(tmp_path, Query(), NOW_MS, Tally())
    results: list[Any] = []
    for n in range(12):
        spool.append(n, [enqueued([make_id(n)])])
        for _ in range(1 + n % 3):
            writer.step()
            results += follow.read()
    spool.close()
    writer.finish()
    results += follow.read()
    assert numbers(results) == [(1, seq) for seq in range(1, 13)]
    assert follow.read() == []
    assert len(segment_names(tmp_path)) > 2
    writer.close()


def test_following_survives_a_concurrent_sealing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder was listed with two open segments; then the first is sealed."""
    spool = spool_of(tmp_path)
    writer = writer_of(tmp_path, segment_bytes=1)
    follow = Follow(tmp_path, Query(), NOW_MS, Tally())
    for n in range(2):
        spool.append(n, [enqueued([make_id(n)])])
        writer.follower.step()
        if not n:
            writer.output.close_finished(NOW_MS)
    listed = segments.find(tmp_path)
    assert [segment.name.sealed for segment in listed] == [False, False]
    sealer = Sealer()
    sealer.add(listed[0].path)
    while sealer.step():
        pass
    with monkeypatch.context() as patched:
        patched.setattr("tickwheel.history.read.segments.find", lambda *_: listed)
        rows = follow.read()
    rows += follow.read()
    assert numbers(rows) == [(1, 1), (1, 2)]
    writer.close()
    spool.close()


def test_following_does_not_take_half_a_line(tmp_path: Path) -> None:
    folder = tmp_path / hour_folder(NOW_MS)
    folder.mkdir(parents=True)
    path = folder / f"{NODE}-s0-e1-000001.jsonl"
    line = json.dumps({"time_ms": NOW_MS, "event": "acked", "seq": 1}) + "\n"
    follow = Follow(tmp_path, Query(), NOW_MS, tally := Tally())
    path.write_text(line[:10])
    assert follow.read() == []
    path.write_text(line)
    assert len(follow.read()) == 1
    assert tally.torn == 0


def test_following_a_key_learns_its_tasks(tmp_path: Path) -> None:
    follow = Follow(tmp_path, Query(key="k"), NOW_MS, Tally())
    one, other = make_id(1), make_id(2)
    write(
        tmp_path,
        [[enqueued([one, other], options={0: ["k"], 1: ["x"]})],
         [delivered([one, other])]],
    )  # fmt: skip
    assert pairs(follow.read()) == [("enqueued", one), ("delivered", one)]


def test_following_begins_at_its_time(tmp_path: Path) -> None:
    some_history(tmp_path)
    follow = Follow(
        tmp_path, Query(events=frozenset(("delivered",))), NOW_MS + HOUR_MS + 3, Tally()
    )
    assert [event["group"] for event in follow.read()] == ["h"]


def test_following_without_a_time_begins_at_the_ends_of_the_files(tmp_path: Path) -> None:
    """Whatever the reader's clock says: the daemon's can be behind it, and be set back."""
    some_history(tmp_path)
    spool, writer = spool_of(tmp_path, 2), writer_of(tmp_path)
    spool.append(1, [enqueued([make_id(7)])])
    writer.step()
    follow = Follow(tmp_path, Query(), None, Tally())
    assert follow.read() == []
    early_ms = NOW_MS - 5 * HOUR_MS
    spool.append(2, [enqueued([make_id(8)]), enqueued([make_id(9)], time_ms=early_ms)])
    writer.step()
    assert pairs(follow.read()) == [("enqueued", make_id(9)), ("enqueued", make_id(8))]
    spool.close()
    assert writer.finish()
    writer.close()
    assert follow.read() == []


def test_group_and_daemon_events_have_no_task(tmp_path: Path) -> None:
    write(tmp_path, [[[EventKind.DAEMON, NOW_MS, "started", {"clean": True}],
                      [EventKind.GROUP, NOW_MS, "t", "g", "created", {}]]])  # fmt: skip
    assert [event["event"] for event in find(tmp_path)] == ["started", "group_created"]
    assert [event["event"] for event in find(tmp_path, topic="t")] == ["group_created"]
    assert find(tmp_path, ids=frozenset((1,))) == []


def test_the_newest_task_with_a_key(tmp_path: Path) -> None:
    ids = some_history(tmp_path)

    def found(**wanted: Any) -> int | None:
        return read.newest_id(tmp_path, Query(key=KEY, **wanted), Tally())

    assert found() == ids[3]
    assert found(topic="u") == ids[3]
    assert found(topic="t") == ids[0]
    assert found(topic="none") is None
    assert found(until_ms=NOW_MS + 1) == ids[3]
    assert found(until_ms=NOW_MS) == ids[0]
    assert found(until_ms=NOW_MS - 5) is None
    assert read.newest_id(tmp_path, Query(key="none"), Tally()) is None


def test_the_newest_task_with_a_key_has_the_highest_id(tmp_path: Path) -> None:
    """The clock was set back between its enqueue and that of another one."""
    for index, at_ms in enumerate((NOW_MS, NOW_MS - 2 * HOUR_MS, NOW_MS)):
        options = {0: [KEY]} if index < 2 else {}
        write(tmp_path, [[enqueued([make_id(index)], options=options, time_ms=at_ms)]])
    assert read.newest_id(tmp_path, Query(key=KEY), Tally()) == make_id(1)


def test_the_newest_of_many_is_found_without_reading_on(tmp_path: Path) -> None:
    ids = [make_id(n) for n in range(3)]
    for hour, one in enumerate(ids):
        at_ms = NOW_MS + hour * HOUR_MS
        write(tmp_path, [[enqueued([one], options={0: [KEY]}, time_ms=at_ms)]], hour + 1)
    oldest, *_ = segments.find(tmp_path)
    oldest.path.write_bytes(b"not a segment")
    tally = Tally()
    assert read.newest_id(tmp_path, Query(key=KEY), tally) == ids[2]
    assert tally.unreadable == tally.torn == 0


# --- replays ----------------------------------------------------------------------------------


@given(st.data())
def test_a_replay_yields_each_event_once_in_the_order_of_numbers(data: st.DataObject) -> None:
    """Files of an epoch overlap, repeat each other, and end in the middle of a line."""
    with tempfile.TemporaryDirectory() as name:
        hour = Path(name) / "dt=2026-11-21/hour=10"
        hour.mkdir(parents=True)
        kept: list[tuple[int, int]] = []
        missing = torn = 0
        for epoch in (1, 2):
            numbered = data.draw(st.lists(st.integers(1, 60), unique=True, max_size=40).map(sorted))
            places = st.lists(st.sampled_from([0, 1, 2]), min_size=1, max_size=2, unique=True)
            files: dict[int, list[int]] = {}
            for seq in numbered:
                for file in data.draw(places):
                    files.setdefault(file, []).append(seq)
            for file, seqs in files.items():
                lines = "".join(
                    json.dumps({"time_ms": NOW_MS + seq, "event": "e", "epoch": epoch, "seq": seq})
                    + "\n"
                    for seq in seqs
                )
                tail = data.draw(st.sampled_from(["", '{"time_ms": 1, "se']))
                torn += bool(tail)
                (hour / f"{NODE}-s0-e{epoch}-00000{file}.jsonl").write_text(lines + tail)
            is_first = not kept
            kept += [(epoch, seq) for seq in numbered]
            if numbered:
                missing += numbered[-1] - len(numbered) - (numbered[0] - 1 if is_first else 0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(segments, "BLOCK_BYTES", data.draw(st.sampled_from([64, 300, 1 << 20])))
            replay = Replay([Path(name)], 0)
            assert numbers(replay.events()) == kept
        findings = replay.findings
        assert (findings.events, findings.missing_events) == (len(kept), missing)
        assert findings.tally.torn == torn
