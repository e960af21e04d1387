"""The benchmarks run: every case once, small, against a real daemon, so that they cannot rot.

Says nothing about speed. What is checked is that each case finishes, measures what the bounds
name, and counts nothing early.
"""

from __future__ import annotations

import io
import json
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import cli, peers
from benchmarks.bounds import BOUNDS, failed, judge
from benchmarks.cases import CASES, HEAVY
from benchmarks.context import Context, Result
from benchmarks.environment import NoDisk, choose_folder
from benchmarks.payload import beanstalkd_puts, enqueue_frames, in_calls
from benchmarks.postgres_server import find_postgres
from benchmarks.pump import Stream
from benchmarks.redis_server import find_redis
from benchmarks.report import show
from benchmarks.servers import find_beanstalkd, processor_s
from benchmarks.wire import FrameCounter, WrongAnswer, check_inserted, results
from observe.prometheus import clean_environment
from tickwheel.protocol import Decoder, encode

ROOT = Path(__file__).resolve().parents[2]
DAILY = {
    ("sqlite", "enqueue_frame"),
    ("sqlite", "steady_worker"),
    ("sqlite", "steady_history"),
    ("sqlite", "lateness"),
    ("sqlite", "transactions"),
    ("redis", "redis_recovery"),
}
"""Cases that `make test` runs, one of each kind; the others are for `make test-full`."""


@pytest.mark.parametrize(
    ("store", "case"),
    [
        pytest.param(store, case, marks=[] if (store, case) in DAILY else [pytest.mark.slow])
        for store, cases in CASES.items()
        for case in cases
    ],
)
def test_each_case_measures_the_metrics_of_its_bounds(
    store: str, case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if store == "redis" and find_redis() is None:
        pytest.skip("redis-server is not installed")
    if store == "postgresql" and find_postgres() is None:
        pytest.skip("PostgreSQL or asyncpg is not installed")
    out = tmp_path / "figures.json"

    code = cli.main(["--quick", "--store", store, "--only", case, "--json", str(out), "--check"])

    figures = json.loads(out.read_text())
    assert code == 0, (figures["failures"], figures["bounds"], capsys.readouterr().err)
    result = {
        "beanstalkd": find_beanstalkd(),
        "PostgreSQL": find_postgres(),
        "redis-py": find_redis(),
        "queues": None,  # --peers all, below
    }
    bounds = [b for b in BOUNDS if b.store in (None, store)]
    wanted = {b.metric for b in bounds if b.metric.startswith(f"{case}.")}
    absent = wanted - figures["metrics"].keys()
    assert absent <= {b.metric for b in bounds if b.peer and result[b.peer] is None}
    assert figures["environment"]["fdatasync_4k_ms"]["median"] > 0
    assert case in capsys.readouterr().out


def test_a_missing_peer_fails_the_check() -> None:
    judged = judge({"burst.early": 0}, ["burst"], full=True)
    unmeasured = {item.bound.metric for item in failed(judged, peers_wanted=True)}
    assert unmeasured == {"burst.ratio_no_log", "burst.ratio_postgres"}
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
        ("enqueue_frame.ratio_no_log", 1.7, 1.699),
        ("burst.early", 0, 1),
        ("lateness.daemon_p99_ms_at_2000", 4.9, 5.0),
        ("memory.bytes_per_task", 64.0, 64.1),
    ],
)
def test_a_bound_is_judged_at_its_limit(metric: str, at: float, beyond: float) -> None:
    bound = next(b for b in BOUNDS if b.metric == metric)
    assert bound.judge({metric: at}) == "holds"
    assert bound.judge({metric: beyond}) == "broken"


def test_the_page_of_benchmarks_has_the_bounds_of_a_run() -> None:
    text = (ROOT / "docs/benchmarks.md").read_text()
    relations = {"≥": ">=", "≤": "<=", "<": "<"}
    printed = {
        (relations[sign], float(number) * (1_000 if thousands else 1))
        for sign, number, thousands in re.findall(r"([≥≤<]) (\d[\d.]*)( k)?", text)
    }
    assert len(printed) > 20
    assert printed <= {(bound.relation, bound.limit) for bound in BOUNDS}
    assert "broken" not in text, "a bound that does not hold is mended, or replaced with its reason"


def test_every_bound_belongs_to_a_case() -> None:
    known = {case for cases in CASES.values() for case in cases}
    assert {bound.metric.split(".")[0] for bound in BOUNDS} <= known
    assert {bound.store for bound in BOUNDS} <= {None, *CASES}


def test_a_case_of_another_store_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--store", "redis", "--only", "enqueue_frame"]) == 2
    assert "redis_enqueue" in capsys.readouterr().err


def test_the_floor_never_passes_an_unanswered_request() -> None:
    load = enqueue_frames(count=50, tasks_per_frame=2, window=4, seed=1)
    frames = Decoder(1 << 20).feed(load.blob)
    assert len(frames) == len(load.ends) == 25
    assert sum(len(tasks) for _, _, _, tasks in frames) == 50
    for _, request, floor, _ in frames:
        assert max(2, request - 3) == floor


def test_both_peers_get_the_same_bodies() -> None:
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


def test_heavy_cases_run_only_when_they_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []

    def case(name: str) -> Callable[[Context], Result]:
        def run(context: Context) -> Result:
            ran.append(name)
            return Result(name)

        return run

    heavy = {name for cases in CASES.values() for name in cases} & HEAVY
    assert heavy == HEAVY
    monkeypatch.setitem(cli.CASES, "sqlite", {name: case(name) for name in ("light", *HEAVY)})
    assert cli.main(["--quick", "--json", "-"]) == 0
    assert ran == ["light"]
    assert cli.main(["--quick", "--json", "-", "--only", *HEAVY]) == 0
    assert sorted(ran[1:]) == sorted(HEAVY)


def test_minutes_set_the_length_of_a_mixed_day(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seconds: list[float] = []

    def case(context: Context) -> Result:
        seconds.append(context.scale.mixed_s)
        return Result("mixed_day")

    monkeypatch.setitem(cli.CASES, "sqlite", {"mixed_day": case})
    asked = ["--only", "mixed_day", "--json", str(tmp_path / "figures.json")]
    assert cli.main(asked) == 0
    assert cli.main([*asked, "--minutes", "2.5"]) == 0
    assert seconds == [600, 150]


def test_the_calls_of_a_long_run_are_made_once_and_repeated() -> None:
    made: list[int] = []

    def make(number: int) -> int:
        made.append(number)
        return number

    calls = in_calls(make, count=1_000_000, per_call=1_000)
    assert made == list(range(200))
    assert list(calls) == list(range(200)) * 5
    assert list(in_calls(make, count=30, per_call=10)) == [0, 1, 2]
    with pytest.raises(AssertionError):
        in_calls(make, count=25, per_call=10)


def _npm(folder: Path, script: str) -> str:
    """A PATH with a node that is never started, and an npm that is a shell script."""
    for name, text in (("node", "exit 1"), ("npm", script)):
        program = folder / name
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
    return f"{folder}:/usr/bin:/bin"


def test_queues_of_npm_are_installed_once_into_their_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder, calls = tmp_path / "queues", tmp_path / "calls"
    monkeypatch.setenv("PATH", _npm(tmp_path, f'echo "$@" >>{calls}'))

    for _ in range(2):
        queues = peers.set_up_node_queues(folder)
        for queue, key in zip(queues, peers.NODE_PACKAGES, strict=True):
            assert isinstance(queue, peers.Queue)
            assert (queue.key, queue.folder) == (key, folder)
            assert (queue.command[0], queue.command[-1]) == (str(tmp_path / "node"), key)
    (call,) = calls.read_text().splitlines()
    assert call.startswith(f"install --no-audit --no-fund --prefix {folder} ")
    assert set(peers.NODE_PACKAGES.values()) < set(call.split())


def test_queues_of_npm_that_cannot_be_installed_say_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", _npm(tmp_path, "echo no network >&2; exit 1"))
    for _ in range(2):
        (answer,) = peers.set_up_node_queues(tmp_path / "queues")
        assert isinstance(answer, str)
        assert "no network" in answer
    monkeypatch.setenv("PATH", str(tmp_path / "queues"))
    (answer,) = peers.set_up_node_queues(tmp_path / "queues")
    assert isinstance(answer, str)
    assert "Node.js" in answer


ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = {
    "metrics_scrape": (
        ["--topics", "20", "--rate", "200", "--seconds", "2"],
        ("20 topics, 200 deliveries a second", "scrape (", "late with scraping"),
    ),
    "tracing": (
        ["--tasks", "100", "--rounds", "1", "--before", str(ROOT)],
        ("before", "client off", "client all", "daemon 0.01, tasks with trace"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_programs_for_one_question_run(name: str, tmp_path: Path) -> None:
    arguments, words = PROGRAMS[name]
    command = [sys.executable, "-m", f"benchmarks.{name}", *arguments, "--dir", str(tmp_path)]
    environment = clean_environment()
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [word for word in words if word not in done.stdout] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "suffix"), [("burst_client", ""), ("bulk_client", ""), ("postgres_steady", "_rate")]
)
def test_all_queues_on_postgresql_take_part(case: str, suffix: str, tmp_path: Path) -> None:
    queues = peers.set_up_queues() if find_postgres() is not None else ["PostgreSQL is missing"]
    if missing := [queue for queue in queues if isinstance(queue, str)]:
        pytest.skip("; ".join(missing))
    out = tmp_path / "figures.json"
    asked = ["--quick", "--store", "postgresql", "--peers", "all", "--only", case]
    assert cli.main([*asked, "--json", str(out)]) == 0
    figures = json.loads(out.read_text())
    for queue in queues:
        assert isinstance(queue, peers.Queue)
        assert figures["metrics"][f"{case}.{queue.key}{suffix}"] > 0
        assert queue.name in figures["environment"]["peer"]


def test_processor_time_of_children_counts_when_they_have_ended() -> None:
    burn = "import time; end = time.process_time() + 0.2\nwhile time.process_time() < end: pass"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {burn!r}]); "
    wait = "print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", parent + wait], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        alone_s, all_s = processor_s(process.pid), processor_s(process.pid, with_children=True)
        process.communicate()
    assert all_s - alone_s > 0.19


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
