"""Topics, groups, policies and rates by the command line against a real daemon."""

from __future__ import annotations

import shlex
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest

from e2e.cli_runner import TIMEOUT_S, Cli, emptied
from e2e.terminal import Terminal
from support.daemon import Daemon


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


# --- groups ----------------------------------------------------------------------------------


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
    assert [group["group"] for group in cli.json("groups", "orders")] == ["billing"]
    with Terminal(cli.command("groups", "delete", "orders", "billing")) as terminal:
        terminal.read_until("[y/N]")
        terminal.type("y\n")
        terminal.read_until("deleted with 1 ready")
        assert terminal.end() == 0
    assert cli.json("groups", "orders") == []


# --- policies --------------------------------------------------------------------------------


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


# --- top -------------------------------------------------------------------------------------


def test_top_is_sorted_filtered_scrolled_and_ended_by_keys(cli: Cli) -> None:
    for number in range(30):
        cli.one("groups", "create", f"topic-{number:02d}", "g")
    cli.one("enqueue", "topic-17", "x")
    with Terminal(cli.alone("top", "--interval", "100ms", "--sort", "name"), lines=24) as shown:
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
    command = f"{shlex.join(cli.alone('top', '--interval', '100ms'))} < /dev/null"
    with Terminal(["sh", "-c", f"exec {command}"]) as shown:
        assert "q quit" not in shown.read_until("orders") + shown.read_until("orders")
        assert shown.end(signal.SIGINT) == 0


def test_top_lives_through_a_restart_of_the_daemon(cli: Cli, daemon: Daemon) -> None:
    cli.one("enqueue", "orders", "x", "--delay", "1h")
    with Terminal(cli.alone("top", "--interval", "100ms")) as terminal:
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
