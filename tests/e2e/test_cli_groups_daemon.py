"""Topics, groups, policies and rates by the command line against a real daemon."""

from __future__ import annotations

import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any

import pytest

from e2e.cli_runner import TIMEOUT_S, Cli
from e2e.terminal import Terminal
from support.daemon import Daemon

Make = Callable[..., Daemon]


@pytest.fixture
def cli(daemon: Daemon) -> Cli:
    return Cli(daemon)


def _groups(cli: Cli, topic: str) -> dict[str, dict[str, Any]]:
    return {group["group"]: group for group in cli.json("groups", topic)}


# --- groups ----------------------------------------------------------------------------------


def test_a_created_group_survives_kill_9(cli: Cli, daemon: Daemon) -> None:
    made = cli.one(
        "groups", "create", "orders", "billing", "--retry", "fixed:delay=50ms,retries=3",
        "--rate", "500", "--burst", "20",
    )  # fmt: skip
    assert (made["topic"], made["group"], made["created"]) == ("orders", "billing", True)
    assert (made["rate"], made["burst"], made["paused"]) == (500, 20, False)
    assert (made["retry"]["kind"], made["retry"]["delay_ms"]) == ("fixed", 50)
    cli.one("groups", "create", "orders", "mail")
    again = cli.run("groups", "create", "orders", "billing", "--rate", "1")
    assert b"already exists" in again.stderr
    task_id = cli.one("enqueue", "orders", "x")["id"]
    daemon.restart(kill=True)
    groups = _groups(cli, "orders")
    assert sorted(groups) == ["billing", "mail"]
    assert (groups["billing"]["rate"], groups["billing"]["ready"]) == (500, 1)
    for group in groups:
        result = cli.one("subscribe", "orders", "--group", group, "--max", "1")
        assert (result["id"], result["group"]) == (task_id, group)
    table = cli.run("groups").stdout.decode().splitlines()
    assert table[0].split()[:2] == ["topic", "group"]
    assert "fixed x3" in table[1]
    assert "500/s burst 20" in table[1]
    assert "not_found" in cli.fails(4, "groups", "nosuch")


def test_on_a_terminal_deleting_asks_first(cli: Cli) -> None:
    cli.one("groups", "create", "orders", "billing")
    cli.one("enqueue", "orders", "x")
    with Terminal(cli.command("groups", "delete", "orders", "billing")) as terminal:
        terminal.read_until("[y/N]")
        terminal.type("n\n")
        terminal.read_until("nothing was deleted")
        assert terminal.end() == 1
    with Terminal(cli.command("groups", "delete", "orders", "billing")) as terminal:
        terminal.read_until("[y/N]")
        assert terminal.end(signal.SIGINT) == 130  # Ctrl-C
    assert list(_groups(cli, "orders")) == ["billing"]
    with Terminal(cli.command("groups", "delete", "orders", "billing")) as terminal:
        terminal.read_until("[y/N]")
        terminal.type("y\n")
        terminal.read_until("deleted with 1 ready")
        assert terminal.end() == 0
    assert _groups(cli, "orders") == {}


# --- topics ----------------------------------------------------------------------------------


def test_topics_show_counts_pauses_and_rates(cli: Cli) -> None:
    cli.one("groups", "create", "orders", "billing")
    cli.one("enqueue", "orders", "x")
    cli.one("enqueue", "orders", "y", "--delay", "1h")
    cli.one("pause", "orders")
    cli.one("rate", "orders", "50")
    (topic,) = cli.json("topics")
    assert (topic["topic"], topic["scheduled"], topic["ready"]) == ("orders", 1, 1)
    assert (topic["paused"], topic["rate"], topic["enqueued"]) == (True, 50, 2)
    assert topic["oldest_ready_ms"] >= 0
    head, row = cli.run("topics").stdout.decode().splitlines()
    assert head.split()[:4] == ["topic", "scheduled", "ready", "in"]
    assert row.split()[:3] == ["orders", "1", "1"]
    assert "paused" in row
    assert "50/s" in row


def test_a_paused_topic_delivers_no_tasks_over_a_restart(cli: Cli, daemon: Daemon) -> None:
    assert cli.one("pause", "orders")["paused"] is True
    task_id = cli.one("enqueue", "orders", "x")["id"]
    daemon.restart(kill=True)
    command = cli.command("subscribe", "orders", "--max", "1", "--json")
    with subprocess.Popen(command, stdout=subprocess.PIPE) as subscriber:
        while not cli.json("groups", "orders"):  # until it has subscribed
            pass
        assert cli.one("topics")["ready"] == 1
        assert cli.run("resume", "orders").stdout.decode() == "orders  active  no rate limit\n"
        assert task_id.encode() in subscriber.communicate(timeout=TIMEOUT_S)[0]


def test_a_rate_limits_deliveries(cli: Cli) -> None:
    limited = cli.one("rate", "orders", "20", "--burst", "1")
    assert (limited["rate"], limited["burst"]) == (20, 1)
    lines = b'{"body": "x"}\n' * 11
    cli.json("enqueue", "orders", "--from", "-", stdin=lines)
    answer = cli.json("subscribe", "orders", "--max", "11")
    spread_ms = answer[-1]["delivered_ms"] - answer[0]["delivered_ms"]
    assert spread_ms >= 450  # ten gaps of 50 ms, less what one tick may round
    free = cli.one("rate", "orders", "none")
    assert (free["rate"], free["burst"]) == (None, None)


# --- policies --------------------------------------------------------------------------------


def test_policies_are_set_shown_and_cleared(cli: Cli, daemon: Daemon) -> None:
    cli.one("groups", "create", "orders", "billing")
    cli.one("policy", "set", "orders", "exponential:base=1s,factor=3,cap=1m,retries=4,jitter=0")
    cli.one("policy", "set", "orders", "rocketmq", "--group", "billing")
    daemon.restart(kill=True)
    of_topic, of_group = cli.json("policy", "show", "orders")
    assert (of_topic["group"], of_topic["from"]) == (None, "topic")
    assert (of_topic["retry"]["base_ms"], of_topic["retry"]["retries"]) == (1_000, 4)
    assert (of_group["group"], of_group["retry"]["name"]) == ("billing", "rocketmq")
    shown = cli.run("policy", "show", "orders").stdout.decode()
    assert "exponential:base=1s,factor=3,cap=1m,retries=4,jitter=0" in shown
    assert "rocketmq (table:10s,30s,1m," in shown
    cli.one("policy", "clear", "orders", "--group", "billing")
    (of_group,) = cli.json("policy", "show", "orders", "--group", "billing")
    assert (of_group["retry"], of_group["from"]) == (None, "topic")
    cli.one("policy", "clear", "orders")
    assert "the daemon's default" in cli.run("policy", "show", "orders").stdout.decode()
    assert "not_found" in cli.fails(4, "policy", "show", "nosuch")
    assert "nosuch" in cli.fails(2, "policy", "set", "orders", "nosuch")


def test_a_tasks_policy_applies_and_show_counts_retries(cli: Cli) -> None:
    cli.one("policy", "set", "orders", "fixed:delay=1h,retries=9")
    task_id = cli.one("enqueue", "orders", "x", "--retry", "fixed:delay=10ms,retries=2")["id"]
    for failures, result, left in ((0, "retrying", 2), (1, "retrying", 1), (2, "dead", 0)):
        (tried,) = cli.json("subscribe", "orders", "--max", "1", "--exec", "exit 3")
        assert (tried["failures"], tried["result"]) == (failures, result)
        assert cli.one("show", task_id)["groups"]["default"]["retries_left"] == left
    assert "retries left" in cli.run("show", task_id).stdout.decode()


def test_policies_in_bulk_lines(cli: Cli) -> None:
    lines = (
        b'{"body": "a", "retry": "none"}\n'
        b'{"body": "b", "retry": {"kind": "fixed", "delay_ms": 10, "retries": 1}}\n'
    )
    cli.json("enqueue", "orders", "--from", "-", stdin=lines)
    tries = cli.json("subscribe", "orders", "--max", "3", "--exec", "exit 1")
    assert sorted((t["body"], t["attempt"], t["result"]) for t in tries) == [
        ("a", 1, "dead"), ("b", 1, "retrying"), ("b", 2, "dead"),
    ]  # fmt: skip


def test_subscribe_sets_the_groups_policy(cli: Cli) -> None:
    cli.one("enqueue", "orders", "x")
    cli.json(
        "subscribe", "orders", "--max", "2", "--exec", "exit 1", "--retry",
        "fixed:delay=10ms,retries=1",
    )  # fmt: skip
    assert cli.one("dead", "list")["attempt"] == 2
    (of_group,) = cli.json("policy", "show", "orders", "--group", "default")
    assert of_group["retry"]["kind"] == "fixed"
    cli.one("enqueue", "orders", "y")
    refused = cli.fails(1, "subscribe", "orders", "--max", "1", "--retry", "none")
    assert refused.startswith("tickwheel: conflict: ")


# --- other ways to subscribe -----------------------------------------------------------------


def test_at_most_once_is_acked_before_it_is_printed(cli: Cli, daemon: Daemon) -> None:
    task_id = cli.one("enqueue", "orders", "x")["id"]
    result = cli.one(
        "subscribe", "orders", "--max", "1", "--ack", "on_delivery", "--exec", "exit 7"
    )
    assert (result["id"], result["exit_code"], result["result"]) == (task_id, 7, "done")
    daemon.restart(kill=True)
    assert cli.one("show", task_id)["state"] == "acked"
    assert cli.one("stats")["dead"] == 0


def test_a_broadcast_gets_tasks_in_addition_to_groups(cli: Cli) -> None:
    command = cli.command("subscribe", "orders", "--broadcast", "--max", "2", "--json")
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE) as one,
        subprocess.Popen(command, stdout=subprocess.PIPE) as two,
    ):
        while not any(topic.get("broadcasters") == 2 for topic in cli.json("topics")):
            pass
        ids = {cli.one("enqueue", "orders", body)["id"] for body in "ab"}
        for listener in (one, two):
            out = listener.communicate(timeout=TIMEOUT_S)[0].decode()
            assert all(task_id in out for task_id in ids)
            assert listener.returncode == 0
    # The topic still owes them to its first group.
    assert {d["id"] for d in cli.json("subscribe", "orders", "--max", "2")} == ids


# --- dead letters ----------------------------------------------------------------------------


def _bury(cli: Cli, topic: str, count: int, code: int = 3, group: str = "default") -> None:
    cli.json("enqueue", topic, "--from", "-", "--retry", "none", stdin=b'{"body": "x"}\n' * count)
    cli.json(
        "subscribe", topic, "--max", str(count), "--exec", f"exit {code}", "--prefetch", "16",
        "--group", group,
    )  # fmt: skip


def test_dead_letters_are_requeued_at_a_rate_and_deleted(cli: Cli, daemon: Daemon) -> None:
    _bury(cli, "orders", 12)
    _bury(cli, "mails", 2, code=4)
    daemon.restart(kill=True)
    assert len(cli.json("dead", "list", "--reason", "EXIT CODE 4")) == 2
    assert cli.json("dead", "list", "--until", "1h") == []
    assert len(cli.json("dead", "list", "--since", "1h", "--topic", "orders")) == 12
    assert cli.one("dead", "requeue", "--reason", "code 9")["matched"] == 0
    began = time.monotonic()
    done = cli.one("dead", "requeue", "--topic", "orders", "--rate", "20")
    assert time.monotonic() - began >= 12 / 20
    assert (done["requeued"], done["matched"]) == (12, 12)
    assert len(cli.json("subscribe", "orders", "--max", "12")) == 12
    output = cli.run("dead", "delete", "--since", "1h", "--reason", "exit").stdout.decode()
    assert output.startswith("2 deleted in ")
    assert cli.json("dead", "list") == []


def test_purge_asks_on_a_terminal_and_elsewhere_wants_yes(cli: Cli) -> None:
    _bury(cli, "orders", 3)
    _bury(cli, "mails", 1)
    refused = cli.fails(1, "dead", "purge", "--topic", "orders")
    assert "3 dead letters of topic orders would be deleted" in refused
    with Terminal(cli.command("dead", "purge", "--topic", "orders")) as terminal:
        terminal.read_until("Delete 3 dead letters of topic orders for good? [y/N]")
        terminal.type("y\n")
        terminal.read_until("3 deleted in ")
        assert terminal.end() == 0
    assert cli.one("dead", "purge", "--yes")["deleted"] == 1


def test_dead_show_has_every_failure(cli: Cli) -> None:
    task_id = cli.one("enqueue", "orders", "x", "--retry", "fixed:delay=10ms,retries=2")["id"]
    cli.json("subscribe", "orders", "--max", "3", "--exec", "exit $TICKWHEEL_ATTEMPT")
    group = cli.one("dead", "show", task_id)["groups"]["default"]
    assert [(f["attempt"], f["reason"]) for f in group["failures"]] == [
        (1, "exit code 1"), (2, "exit code 2"), (3, "exit code 3"),
    ]  # fmt: skip
    assert group["retries_left"] == 0
    shown = cli.run("dead", "show", task_id).stdout.decode()
    assert shown.index("exit code 1") < shown.index("exit code 2") < shown.index("exit code 3")


# --- top -------------------------------------------------------------------------------------


def test_top_once_prints_one_picture_with_rates(cli: Cli) -> None:
    cli.one("groups", "create", "orders", "billing")
    cli.one("enqueue", "orders", "x")
    frame = cli.one("top", "--once", "--interval", "200ms")
    assert (frame["role"], frame["ready"], frame["reconnecting"]) == ("active", 1, False)
    assert frame["enqueued_per_s"] == 0
    (topic,) = frame["topics"]
    assert (topic["topic"], topic["ready"]) == ("orders", 1)
    assert topic["groups"][0]["group"] == "billing"
    text = cli.run("top", "--once", "--interval", "50ms").stdout.decode()
    assert "active" in text.splitlines()[0]
    assert "late p50 / p99" in text


def test_top_is_sorted_filtered_scrolled_and_ended_by_keys(cli: Cli) -> None:
    for number in range(30):
        cli.one("groups", "create", f"topic-{number:02d}", "g")
    cli.one("enqueue", "topic-17", "x")
    with Terminal(cli.command("top", "--interval", "100ms", "--sort", "name"), lines=24) as shown:
        picture = shown.picture("q quit")
        assert "topic-00" in picture and "topic-17" not in picture
        shown.read_until("1 of 60")
        shown.type("ss")
        shown.read_until("sort: ready")
        shown.read_until("topic-17")
        shown.type("S")
        shown.read_until("sort: scheduled")
        shown.type("G")
        picture = shown.picture("46 of 60")
        assert "topic-29" in picture and "topic-00" not in picture
        shown.type("/topic-2")
        shown.read_until("filter: topic-2_")
        shown.type("5\r")
        picture = shown.picture("/ filter: topic-25")
        assert "topic-25" in picture and "topic-24" not in picture
        shown.type("\x1b")
        shown.read_until("1 of 60")
        shown.type("q")
        assert shown.end() == 0


def test_top_without_a_keyboard_is_ended_by_a_signal(cli: Cli) -> None:
    cli.one("enqueue", "orders", "x")
    command = f"{shlex.join(cli.command('top', '--interval', '100ms'))} < /dev/null"
    with Terminal(["sh", "-c", f"exec {command}"]) as shown:
        assert "q quit" not in shown.read_until("orders") + shown.read_until("orders")
        assert shown.end(signal.SIGINT) == 0


def test_top_lives_through_a_restart_of_the_daemon(cli: Cli, daemon: Daemon) -> None:
    cli.one("enqueue", "orders", "x", "--delay", "1h")
    with Terminal(cli.command("top", "--interval", "100ms")) as terminal:
        terminal.read_until("orders")
        daemon.kill()
        terminal.read_until("reconnecting")
        daemon.start()
        picture = "reconnecting"
        while "reconnecting" in picture:
            picture = terminal.picture("orders")
        assert "active" in picture
        assert terminal.end(signal.SIGINT) == 0
    cli.fails(3, "top", "--url", "tcp://127.0.0.1:1")
