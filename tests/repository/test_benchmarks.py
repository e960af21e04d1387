"""The benchmarks run: every case once, small, against a real daemon, so that they cannot rot.

Says nothing about speed. What is checked is that each case finishes, measures what the bounds
name, and counts nothing early.
"""

from __future__ import annotations

import io
import json
import socket
from pathlib import Path

import pytest

from benchmarks import cli
from benchmarks.bounds import BOUNDS, failed, judge
from benchmarks.cases import CASES
from benchmarks.context import Result
from benchmarks.environment import NoDisk, choose_folder
from benchmarks.payload import beanstalkd_puts, enqueue_frames
from benchmarks.pump import Stream
from benchmarks.redis_server import find_redis
from benchmarks.report import show
from benchmarks.servers import find_beanstalkd
from benchmarks.wire import FrameCounter, WrongAnswer, check_inserted, results
from tickwheel.protocol.codec import Decoder, encode


@pytest.mark.parametrize(
    ("store", "case"), [(store, case) for store, cases in CASES.items() for case in cases]
)
def test_case_runs_and_measures_what_its_bounds_name(
    store: str, case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if store == "redis" and find_redis() is None:
        pytest.skip("redis-server is not installed")
    out = tmp_path / "figures.json"

    code = cli.main(["--quick", "--store", store, "--only", case, "--json", str(out), "--check"])

    figures = json.loads(out.read_text())
    assert code == 0, (figures["failures"], figures["bounds"], capsys.readouterr().err)
    peers = store == "redis" or find_beanstalkd() is not None
    bounds = [b for b in BOUNDS if b.store in (None, store)]
    wanted = {b.metric for b in bounds if b.metric.startswith(f"{case}.")}
    absent = wanted - figures["metrics"].keys()
    assert absent <= {b.metric for b in bounds if b.needs_peer and not peers}
    assert figures["environment"]["fdatasync_4k_ms"]["median"] > 0
    assert case in capsys.readouterr().out


def test_a_missing_peer_is_reported_and_fails_the_check_unless_not_wanted() -> None:
    judged = judge({"burst.early": 0}, ["burst"], full=True)
    assert [one.bound.metric for one in failed(judged, peers_wanted=True)] == ["burst.ratio_no_log"]
    assert failed(judged, peers_wanted=False) == []

    text = io.StringIO()
    environment = {
        "cpus": 2,
        "machine": "m",
        "kernel": "k",
        "python": "p",
        "sqlite": "s",
        "file_system": "ext4",
        "fdatasync_4k_ms": {"median": 0.3, "p99": 1.0},
        "peer": "none, not installed",
        "load_average": 0.0,
    }
    missing = Result("burst", missing=["beanstalkd: not installed"])
    show(text, environment, [missing], {"memory": "it broke"}, judged)
    assert "burst: not compared with beanstalkd: not installed" in text.getvalue()
    assert "memory: FAILED: it broke" in text.getvalue()
    assert "not measured" in text.getvalue()


@pytest.mark.parametrize(
    ("metric", "at", "beyond"),
    [
        ("enqueue_frame.ratio_no_log", 1.0, 0.999),
        ("burst.early", 0, 1),
        ("lateness.daemon_p99_ms_at_2000", 4.9, 5.0),
        ("memory.bytes_per_task", 64.0, 64.1),
    ],
)
def test_a_bound_is_judged_at_its_limit(metric: str, at: float, beyond: float) -> None:
    bound = next(b for b in BOUNDS if b.metric == metric)
    assert bound.judge({metric: at}) == "holds"
    assert bound.judge({metric: beyond}) == "broken"


def test_every_bound_belongs_to_a_case() -> None:
    known = {case for cases in CASES.values() for case in cases}
    assert {bound.metric.split(".")[0] for bound in BOUNDS} <= known
    assert {bound.store for bound in BOUNDS} <= {None, *CASES}


def test_only_cases_of_the_store_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--store", "redis", "--only", "enqueue_frame"]) == 2
    assert "redis_enqueue" in capsys.readouterr().err


def test_the_floor_is_never_above_what_a_full_window_leaves_unanswered() -> None:
    load = enqueue_frames(count=50, tasks_per_frame=2, window=4, seed=1)
    frames = Decoder(1 << 20).feed(load.blob)
    assert len(frames) == len(load.ends) == 25
    assert sum(len(tasks) for _, _, _, tasks in frames) == 50
    for _, request, floor, _ in frames:
        assert max(2, request - 3) == floor


def test_both_sides_get_the_same_bodies() -> None:
    frames = Decoder(1 << 20).feed(enqueue_frames(10, 1, 4, seed=3).blob)
    puts = beanstalkd_puts(10, seed=3).blob.split(b"\r\n")
    assert [frame[3][0][1] for frame in frames] == puts[1::2]


def test_replies_are_counted_in_pieces_and_checked_whole() -> None:
    replies = b"".join(encode((65, request, (1, (request * 10,)))) for request in (2, 3, 4))
    counter = FrameCounter()
    assert sum(counter(replies[i : i + 1]) for i in range(len(replies))) == 3
    assert [ids for _, ids in results([replies[:5], replies[5:]])] == [(20,), (30,), (40,)]
    with pytest.raises(WrongAnswer):
        list(results([encode((66, 2, "refused", "no room"))]))
    with pytest.raises(WrongAnswer):
        list(results([encode((65, 3, None))]))


def test_beanstalkds_replies_are_checked() -> None:
    assert check_inserted([b"INSERTED 1\r\nINSER", b"TED 2\r\n"]) == 2
    for wrong in (b"BURIED 1\r\n", b"INSERTED 1\r\nINS", b"DRAINING\r\n"):
        with pytest.raises(WrongAnswer):
            check_inserted([wrong])


def test_folders_in_memory_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("benchmarks.environment.file_system", lambda folder: "tmpfs")
    with pytest.raises(NoDisk):
        choose_folder(str(tmp_path))


def test_the_window_opens_a_quarter_at_a_time_and_whole_at_the_end() -> None:
    near, far = socket.socketpair()
    with near, far:
        stream = Stream(near, beanstalkd_puts(10, seed=1), 8, lambda data: 0)
        stream.open_window()
        assert stream.sendable == 8
        stream.answered = 1
        stream.open_window()
        assert stream.sendable == 8
        stream.answered = 2
        stream.open_window()
        assert stream.sendable == 10
