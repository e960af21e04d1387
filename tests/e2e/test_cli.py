"""The command line against a real daemon, as a person or a script would use it."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import re
import signal
import sqlite3
import subprocess
import termios
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from e2e.cli_runner import TIMEOUT_S, Cli, emptied
from support.daemon import Daemon
from support.ports import free_ports
from support.shards import key_in
from support.waiting import until
from tickwheel.cli.app import app
from tickwheel.sync import Client

Make = Callable[..., Daemon]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("daemon"), http=True) as daemon:
        yield daemon


@pytest.fixture
def daemon(shared: Daemon) -> Daemon:
    return emptied(shared)


@pytest.fixture
def cli(daemon: Daemon) -> Cli:
    return Cli(daemon)


# --- the main road ---------------------------------------------------------------------------


def test_a_task_survives_kill_9_between_enqueue_and_subscribe(make_daemon: Make) -> None:
    daemon = make_daemon().start()
    cli = Cli(daemon)
    receipt = cli.one("enqueue", "orders", "hello", "--delay", "2s")
    assert receipt["id"].isdecimal()
    daemon.restart(kill=True)
    delivery = cli.one("subscribe", "orders", "--max", "1")
    assert (delivery["id"], delivery["topic"], delivery["body"]) == (
        receipt["id"], "orders", "hello",
    )  # fmt: skip
    assert delivery["due_ms"] == receipt["due_ms"]
    assert delivery["delivered_ms"] >= delivery["due_ms"]
    assert delivery["attempt"] == 1
    assert cli.one("show", receipt["id"])["state"] == "acked"


def test_json_option_works_before_the_command(cli: Cli) -> None:
    done = cli.run("--json", "enqueue", "orders", "x")
    assert json.loads(done.stdout)["topic"] == "orders"


def test_a_body_from_stdin_can_be_any_bytes(cli: Cli) -> None:
    body = bytes(range(256))
    cli.one("enqueue", "raw", "-", stdin=body)
    delivery = cli.one("subscribe", "raw", "--max", "1")
    assert "body" not in delivery
    assert base64.b64decode(delivery["body_base64"]) == body


def test_every_field_of_a_task_is_delivered(cli: Cli) -> None:
    receipt = cli.one(
        "enqueue", "orders", "x", "--key", "k1", "--tag", "urgent", "--prop", "a=1", "--prop",
        "b=x=y", "--priority", "7", "--ttl", "1h", "--at", "2020-01-01T00:00:00Z",
    )  # fmt: skip
    delivery = cli.one("subscribe", "orders", "--max", "1", "--group", "billing")
    assert delivery["due_ms"] == receipt["due_ms"]  # what is past counts as now
    assert delivery["due_ms"] > 1_577_836_800_000
    assert (delivery["key"], delivery["tag"], delivery["priority"]) == ("k1", "urgent", 7)
    assert delivery["properties"] == {"a": "1", "b": "x=y"}
    assert delivery["group"] == "billing"


def test_output_without_json_is_readable(cli: Cli) -> None:
    cli.run("enqueue", "orders", "hello")
    later = cli.run("enqueue", "orders", "later", "--delay", "1h").stdout.decode()
    assert "due" in later
    assert "in 1h" in later or "in 59m" in later
    listed = cli.run("list", "--topic", "orders", "--state", "scheduled").stdout.decode()
    assert listed.split()[:3] == ["id", "state", "topic"]
    assert "later" in listed
    assert "hello" in cli.run("subscribe", "orders", "--max", "1").stdout.decode()
    counts = cli.run("stats").stdout.decode()
    assert "Topics" in counts
    assert "orders" in counts


# --- bulk ------------------------------------------------------------------------------------


def test_a_file_of_tasks_is_enqueued(cli: Cli, tmp_path: Path) -> None:
    count = 5_000
    source = tmp_path / "tasks.jsonl"
    source.write_text("".join(f'{{"body": "{n}", "key": "k{n}"}}\n' for n in range(count)))
    receipts = cli.json("enqueue", "bulk", "--from", str(source), "--delay", "1h")
    assert len({receipt["id"] for receipt in receipts}) == count
    assert cli.one("stats")["topics"]["bulk"]["scheduled"] == count
    finished = cli.run("enqueue", "bulk", "--from", "-", stdin=b'{"body": "x", "delay": 60}\n')
    assert finished.stdout.startswith(b"1 tasks enqueued")


def test_an_invalid_line_reports_the_tasks_enqueued_before(cli: Cli) -> None:
    lines = b'{"body": "x"}\n' * 2_000 + b'{"body": 1}\n'
    error = cli.run("enqueue", "bulk", "--from", "-", stdin=lines, expect=2).stderr.decode()
    assert "2000 tasks were enqueued" in error
    assert "line 2001: field body" in error


@pytest.mark.parametrize("kind", ["jsonl", pytest.param("csv", marks=pytest.mark.slow)])
def test_an_interrupted_file_can_be_resumed(cli: Cli, tmp_path: Path, kind: str) -> None:
    count, topic, options = 5_000, f"file-{kind}", ("--delay", "1h", "--if-pending", "keep")
    source = tmp_path / f"tasks.{kind}"
    rows = [f"k{n}" if kind == "csv" else f'{{"key": "k{n}"}}' for n in range(count)]
    source.write_text("\n".join(["key"] * (kind == "csv") + rows) + "\n")
    command = cli.command("enqueue", topic, *options, "--from", str(source), "--json")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as sending:
        assert sending.stdout is not None
        sending.stdout.readline()  # the first chunk is stored; the pipe is full before the last
        sending.send_signal(signal.SIGINT)
        _, error = sending.communicate(timeout=TIMEOUT_S)
    match = re.search(r"interrupted: (\d+) tasks are stored.*tail -n \+(\d+) FILE", error.decode())
    assert match is not None and sending.returncode == 130, error
    stored, line = map(int, match.groups())
    assert 0 < stored < count and cli.one("stats")["topics"][topic]["scheduled"] == stored
    lines = source.read_bytes().splitlines(keepends=True)
    rest = b"".join(lines[: int(kind == "csv")] + lines[line - 1 :])
    flags = ("--csv",) * (kind == "csv")
    more = cli.run("enqueue", topic, *options, "--from", "-", *flags, stdin=rest).stdout
    assert more.startswith(b"%d tasks enqueued in" % (count - stored)), more
    again = cli.run("enqueue", topic, *options, "--from", str(source)).stdout
    assert again.startswith(b"0 new, 5,000 kept in"), again


@pytest.mark.parametrize("source", [("-",), ("--from", "-")])
def test_a_signal_ends_a_command_that_waits_for_its_input(
    cli: Cli, source: tuple[str, ...]
) -> None:
    command = cli.alone("enqueue", "raw", *source)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as reading:
        assert reading.stdin is not None
        reading.stdin.write(b"x")
        reading.stdin.flush()
        until(lambda: _waits_for_more(reading))
        reading.send_signal(signal.SIGINT)
        assert reading.wait(TIMEOUT_S) == 130


def _waits_for_more(process: subprocess.Popen[bytes]) -> bool:
    """Return whether a process has read its input, and sleeps."""
    assert process.stdin is not None
    unread = array("i", [-1])
    fcntl.ioctl(process.stdin, termios.FIONREAD, unread)
    state = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
    return (unread[0], state) == (0, "S")


# --- by id -----------------------------------------------------------------------------------


def test_unknown_ids_exit_with_4(cli: Cli) -> None:
    assert "unknown" in cli.fails(4, "show", "12345")
    assert cli.json("show", "12345", expect=4) == [{"id": "12345", "state": "unknown"}]
    assert cli.json("cancel", "12345", expect=4) == [{"id": "12345", "status": "unknown"}]
    cli.run("run-now", "12345", expect=4)
    cli.run("dead", "requeue", "12345", expect=4)
    cli.fails(4, "dead", "show", "12345")


# --- subscribers -----------------------------------------------------------------------------


def _subscriber(cli: Cli, *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        cli.command("subscribe", "orders", "--json", *arguments),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def _next_line(subscriber: subprocess.Popen[bytes]) -> dict[str, Any]:
    assert subscriber.stdout is not None
    line = subscriber.stdout.readline()
    if not line:
        pytest.fail(f"the subscriber ended: {subscriber.communicate(timeout=TIMEOUT_S)}")
    answer: dict[str, Any] = json.loads(line)
    return answer


def _interrupt(subscriber: subprocess.Popen[bytes]) -> None:
    """Ctrl-C ends a subscriber at once, with exit code 0 and nothing to say."""
    subscriber.send_signal(signal.SIGINT)
    _, error = subscriber.communicate(timeout=TIMEOUT_S)
    assert (subscriber.returncode, error) == (0, b"")


LOOKS = {
    "bulk list": "", "bulk show": "mine", "consumers": "", "dead list": "", "dead show": "{dead}",
    "explain": "{dead}",
    "forward list": "", "groups held": "owned g", "groups lines": "owned g", "groups list": "",
    "groups paused": "owned g", "list": "", "load": "", "peek": "owned", "policy show": "owned",
    "push list": "", "schedule list": "", "schedule next": "daily",
    "schedule show": "daily", "show": "{dead}", "stats": "", "status": "",
    "top": "--once --interval 100ms", "topics list": "", "transactions list": "",
    "transactions show": "order-17",
}  # fmt: skip
"""Commands that only look at a daemon, with what each needs to be said."""
NO_LOOKS = frozenset(
    f"{name} {word}".strip()
    for name, words in {
        "serve": "", "demo": "", "check": "", "init": "", "reshard": "", "deploy-files": "",
        "enqueue": "",
        "subscribe": "", "cancel": "", "reschedule": "", "run-now": "", "backup": "", "pause": "",
        "resume": "", "rate": "", "restore": "", "report": "", "console": "", "work": "",
        "bench": "", "shards": "list move drain", "nodes": "list drain",
        "topics": "delete broadcast", "policy": "set clear", "pending": "set clear",
        "groups": "create set delete reset release-key skip-key pause-key resume-key",
        "push": "set remove test log resend", "forward": "set remove", "bulk": "cancel",
        "schedule": "put pause resume run backfill delete apply",
        "transactions": "commit rollback", "token": "create list revoke",
        "dead": "requeue delete purge", "history": "list tasks generate",
        "inbox": "run sql upgrade", "store": "upgrade",
    }.items()
    for word in words.split() or [""]
)  # fmt: skip
"""Commands that change something, ask no daemon, or need nodes or an endpoint."""


def commands(command: Any, *words: str) -> Iterator[str]:
    """The names of all commands below this one."""
    for word, one in getattr(command, "commands", {}).items():
        yield from commands(one, *words, word)
    if not hasattr(command, "commands"):
        yield " ".join(words)


def test_every_command_is_listed_as_reading_or_not() -> None:
    assert sorted(commands(typer.main.get_command(app))) == sorted([*LOOKS, *NO_LOOKS])


@pytest.mark.parametrize("shards", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_reading_commands_change_no_state(make_daemon: Make, tmp_path: Path, shards: int) -> None:
    """Commands that look leave groups, leases and attempts as they are; so do `--no-ack` and
    `--follow`, which are given what is due all the same."""
    if shards == 1:
        daemon = make_daemon().start()
    else:
        args = ("--processes", "2", "--listen", f"tcp://127.0.0.1:{free_ports(2)}")
        daemon = make_daemon(store=f"sqlite:///{tmp_path / 'shards'}/", args=args).start()
    cli = Cli(daemon)
    cli.run("groups", "create", "owned", "g")
    for topic in ("owned", "unowned"):
        for shard in range(2):
            cli.run("enqueue", topic, f"due {shard}", "--key", key_in(shard, 2))
            cli.run("enqueue", topic, "later", "--key", key_in(shard, 2), "--delay", "1h")
    cli.run("schedule", "put", "daily", "--topic", "owned", "--cron", "0 9 * * *")
    [dead] = cli.json("enqueue", "buried", "x")
    cli.run("groups", "create", "buried", "g")
    with Client(daemon.url) as client:
        for delivery in client.pull("buried", group="g", max=1, wait=TIMEOUT_S):
            delivery.reject("bad")
        assert client.pull("owned", group="g", max=1, lease=3_600, wait=TIMEOUT_S)
        with client.transaction("payments", id="order-17") as half:
            half.enqueue("owned", b"half", delay=3_600)
        client.cancel(topic="owned", filter={"tags": "nobody"}, id="mine")
        before = owned(client)
        for name, more in LOOKS.items():
            texts = [*name.split(), *more.format(dead=dead["id"]).split()]
            cli.run(*texts, "--json")
            assert owned(client) == before, name
        for texts in ("subscribe unowned --no-ack --max 2", "peek unowned --follow --limit 2"):
            answer = cli.json(*texts.split())
            assert sorted(entry["body"] for entry in answer) == ["due 0", "due 1"]
            assert owned(client) == before, texts
        # Nobody owns them yet: the worker that comes first gets all.
        assert len(client.pull("unowned", group="shop", max=2, wait=TIMEOUT_S)) > 0


def owned(client: Client) -> Any:
    """What each group has, and how each task stands with it."""
    tasks = [task.raw for task in client.list_tasks()]
    letters = [letter.raw for letter in client.dead_list()]
    for task in tasks:
        task.pop("cycles", None)
        for group in task.get("groups", {}).values():
            del group["at_ms"]  # the end of a lease, which is kept by another clock, to 1 ms
    counts = {
        name: (topic.raw["scheduled"], topic.raw["delivered"], sorted(topic.groups), [
            {n: it for n, it in group.raw.items() if not n.endswith("_ms")}
            for _, group in sorted(topic.groups.items())
        ])
        for name, topic in client.stats().topics.items()
    }  # fmt: skip
    return tasks, letters, counts


def test_look_follow_prints_due_tasks(cli: Cli) -> None:
    cli.run("enqueue", "orders", "now", "--key", "a")
    cli.run("enqueue", "orders", "soon", "--delay", "2s", "--key", "a")
    cli.run("enqueue", "orders", "other", "--delay", "1s", "--key", "b")
    answer = cli.json("peek", "orders", "--follow", "--limit", "2", "--key", "a")
    assert [entry["body"] for entry in answer] == ["now", "soon"]
    assert cli.one("stats")["topics"]["orders"]["groups"] == {}


def test_look_at_an_unknown_topic_exits_with_4(cli: Cli) -> None:
    assert "there is no topic 'nobody'" in cli.fails(4, "peek", "nobody")
    assert cli.json("peek", "nobody", "--due", expect=4) == []
    cli.run("enqueue", "orders", "later", "--delay", "1h")
    assert cli.json("peek", "orders", "--due") == []  # nothing to show is no error


def test_ctrl_c_ends_a_subscriber_cleanly(cli: Cli) -> None:
    cli.run("groups", "create", "orders", "default")  # one that is new says so on stderr
    cli.one("enqueue", "orders", "x")
    with _subscriber(cli) as subscriber:
        assert _next_line(subscriber)["body"] == "x"
        _interrupt(subscriber)


def test_a_subscriber_outlives_a_killed_daemon(cli: Cli, daemon: Daemon) -> None:
    first = cli.one("enqueue", "orders", "before")["id"]
    with _subscriber(cli) as subscriber:
        assert _next_line(subscriber)["id"] == first
        daemon.restart(kill=True)
        second = cli.one("enqueue", "orders", "after")["id"]
        result = _next_line(subscriber)["id"]
        if result == first:  # its ack was lost with the daemon
            result = _next_line(subscriber)["id"]
        assert result == second
        subscriber.send_signal(signal.SIGTERM)
        subscriber.communicate(timeout=TIMEOUT_S)
        assert subscriber.returncode == 0


def test_a_closed_pipe_loses_no_task(cli: Cli) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    cli.run("groups", "create", "orders", "default")  # one that is new says so on stderr
    task_id = cli.one("enqueue", "orders", "x")["id"]
    done = subprocess.run(
        cli.command("subscribe", "orders", "--json"), stdout=writing, stderr=subprocess.PIPE,
        timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, b"")
    assert cli.one("subscribe", "orders", "--max", "1")["id"] == task_id


def test_exec_acks_by_exit_code_and_gives_the_command_the_task(cli: Cli, tmp_path: Path) -> None:
    cli.run("groups", "create", "orders", "default")  # one that is new says so on stderr
    receipt = cli.one("enqueue", "orders", "the body")
    output = tmp_path / "output"
    script = f'echo "$TICKWHEEL_ID $TICKWHEEL_TOPIC $TICKWHEEL_ATTEMPT $(cat)" > {output}; echo hi'
    done = cli.run("subscribe", "orders", "--max", "1", "--exec", script, "--json")
    assert output.read_text() == f"{receipt['id']} orders 1 the body\n"
    fields = json.loads(done.stdout)  # the command's own output went to stderr
    assert (fields["exit_code"], fields["result"]) == (0, "acked")
    assert done.stderr == b"hi\n"


def test_a_command_that_outlives_the_lease_keeps_it(cli: Cli) -> None:
    cli.one("enqueue", "orders", "x")
    fields = cli.one("subscribe", "orders", "--max", "1", "--lease", "1s", "--exec", "sleep 3")
    assert (fields["attempt"], fields["result"]) == (1, "acked")


def test_a_failing_command_leads_to_the_dead_letters_and_back(make_daemon: Make) -> None:
    cli = Cli(make_daemon(retry_base_s=0.05, retry_jitter=0, retry_max=1).start())
    task_id = cli.one("enqueue", "orders", "x")["id"]
    tries = cli.json("subscribe", "orders", "--max", "2", "--exec", "exit 3")
    assert [t["attempt"] for t in tries] == [1, 2]
    assert [(t["exit_code"], t["result"]) for t in tries] == [(3, "retrying"), (3, "dead")]

    letter = cli.one("dead", "list")
    assert (letter["id"], letter["group"], letter["reason"]) == (task_id, "default", "exit code 3")
    assert [failure["attempt"] for failure in letter["failures"]] == [1, 2]
    assert cli.json("dead", "list", "--topic", "other") == []
    assert "exit code 3" in cli.run("dead", "list").stdout.decode()
    shown = cli.one("dead", "show", task_id)
    assert shown["groups"]["default"]["state"] == "dead"
    assert "exit code 3" in cli.run("dead", "show", task_id).stdout.decode()

    assert cli.one("dead", "requeue", task_id)["status"] == "requeued"
    cli.json("subscribe", "orders", "--max", "2", "--exec", "exit 4")
    assert cli.one("dead", "list")["reason"] == "exit code 4"
    assert cli.one("dead", "delete", "--topic", "orders")["deleted"] == 1
    assert cli.json("dead", "list") == []
    cli.fails(2, "dead", "delete")


# --- the daemon ------------------------------------------------------------------------------


def test_a_wrong_token_is_one_line(make_daemon: Make) -> None:
    cli = Cli(make_daemon(serve_token="right").start())
    assert "unauthorized" in cli.fails(1, "stats")
    assert "unauthorized" in cli.fails(1, "stats", "--token", "wrong")
    assert cli.one("stats", "--token", "right")["store_ok"] is True


def test_a_backup_passes_the_offline_check(cli: Cli, daemon: Daemon) -> None:
    for number in range(3):
        cli.one("enqueue", "orders", str(number), "--delay", "1h")
    made = cli.one("backup", "copy.db")
    assert made["bytes"] == Path(made["path"]).stat().st_size
    copy = f"sqlite:///{made['path']}"
    assert cli.one("check", "--store", copy)["tasks"] == 3
    assert "all rows agree" in cli.run("check", "--store", copy).stdout.decode()

    assert "in use" in cli.fails(1, "check", "--store", daemon.store)
    assert daemon.terminate() == 0
    assert cli.one("check", "--store", daemon.store)["problems"] == []
    with sqlite3.connect(made["path"]) as damaged:
        damaged.execute("UPDATE meta SET value = 0 WHERE key = 'id_mark'")
    damaged.close()
    assert "above the id mark" in cli.run("check", "--store", copy, expect=1).stdout.decode()


def test_serve_reads_flags_before_environment_before_file(
    make_daemon: Make, tmp_path: Path
) -> None:
    config = tmp_path / "tickwheel.toml"
    config.write_text('node = "file"\nslots = 7\ntick_ms = 500\n')
    daemon = make_daemon(
        args=("--config", str(config)), env={"TICKWHEEL_NODE": "env", "TICKWHEEL_SLOTS": "8"},
        slots=9,
    ).start()  # fmt: skip
    stats = Cli(daemon).one("stats")
    assert (stats["node"], stats["slots"], stats["tick_ms"]) == ("env", 9, 500)


def test_bench_leaves_no_tasks_or_groups(cli: Cli) -> None:
    began = time.monotonic()
    result = cli.one("bench", "--tasks", "500", "--rate", "200", "--seconds", "1")
    assert time.monotonic() - began < TIMEOUT_S
    assert result["early"] == 0
    assert result["tasks"] == 1_200
    assert min(result["enqueue_single_per_s"], result["delivery_per_s"]) > 0
    assert result["late_p50_ms"] >= 0
    counts = cli.one("stats")
    assert (counts["scheduled"], counts["ready"], counts["in_flight"]) == (0, 0, 0)
    assert cli.json("groups") == []
