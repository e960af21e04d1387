"""Mistakes at the command line: one line on stderr, exit code 2, nothing on stdout."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from tickwheel import errors
from tickwheel.cli.app import OTHER_WORDS, app, run, shared
from tickwheel.cli.call import Call, command, exit_code

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = [
    "serve", "init", "status", "demo", "check", "shards", "nodes", "enqueue", "subscribe", "cancel",
    "reschedule",
    "run-now", "show", "explain", "list", "stats", "backup", "topics", "groups", "pause", "resume",
    "rate", "policy", "dead", "top", "work", "bench",
]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("nonsense", "nonsense"),
        ("--nonsense", "--nonsense"),
        ("enqueue", "TOPIC and BODY"),
        ("enqueue orders", "TOPIC and BODY"),
        ("enqueue orders x --delay 5x", "--delay"),
        ("enqueue orders x --delay -5s", "--delay"),
        ("enqueue orders x --delay", "--delay"),
        ("enqueue orders x --at tomorrow", "--at"),
        ("enqueue orders x --at 2030-01-01 --delay 5s", "--delay or --at"),
        ("enqueue orders x --priority 256", "--priority"),
        ("enqueue orders x --prop novalue", "--prop"),
        ("enqueue orders x --prop a=1 --prop a=2", "--prop: 'a' occurs more than once"),
        ("schedule put s --topic t --every 5s --prop a=1 --prop a:=2", "--prop: 'a' occurs more"),
        ("enqueue orders x --ttl never", "--ttl"),
        ("enqueue orders x y", "y"),
        ("enqueue --from missing-file.jsonl", "missing-file.jsonl"),
        ("enqueue orders --from - --key k", "--from"),
        ("subscribe", "TOPIC"),
        ("subscribe orders --topic orders", "give either TOPIC or --topic"),
        ("retry 5", "No such command 'retry'. Did you mean 'dead requeue'?"),
        ("subscribe --topic orders --max 0", "--max"),
        ("subscribe orders --max 0", "--max"),
        ("subscribe orders --prefetch 0", "--prefetch"),
        ("subscribe orders --lease 1ms", "--lease"),
        ("subscribe orders --no-ack --exec true", "--exec"),
        ("subscribe orders --no-ack --group g", "--group has no effect with --no-ack"),
        ("subscribe orders --no-ack --where a=1", "--where has no effect with --no-ack"),
        ("subscribe orders --no-ack --prefetch 1", "--prefetch has no effect with --no-ack"),
        ("cancel", "by topic and key"),
        ("cancel abc", "abc"),
        ("show -1", "-1"),
        ("reschedule 5", "--delay, --at, --shift, --spread"),
        ("reschedule 5 --delay 1s --at 2030-01-01", "--delay, --at, --shift, --spread"),
        ("run-now 9223372036854775808", "9223372036854775808"),
        ("list --state lost", "--state"),
        ("list --limit 0", "--limit"),
        ("enqueue orders x --retry often:x=1", "--retry"),
        (
            "enqueue orders x --retry fixed:retries=-1",
            "retries must be between 0 and 65535, not '-1'",
        ),
        ("subscribe orders --retry fixed:delay=soon", "delay: 'soon'"),
        ("subscribe orders --ack sometimes", "--ack"),
        ("subscribe orders --no-ack --ack on_delivery", "--no-ack"),
        ("subscribe orders --broadcast --group g", "--group"),
        ("subscribe orders --broadcast --no-ack", "--no-ack"),
        ("subscribe orders --broadcast --retry none", "--retry"),
        ("subscribe orders --broadcast --lease 5s", "--lease has no effect with --broadcast"),
        ("subscribe orders --ack on_delivery --retry none", "--retry has no effect with --ack"),
        ("pause", "TOPIC"),
        ("rate orders", "N|none"),
        ("rate orders 0", "'0'"),
        ("rate orders fast", "'fast'"),
        ("rate orders 5 --burst 0", "--burst"),
        ("groups --nonsense", "--nonsense"),
        ("groups orders billing", "billing"),
        ("groups create orders", "GROUP"),
        ("groups create orders g --start soon", "is neither now nor first nor an ISO-8601 time"),
        ("groups create orders g --rate 0", "--rate"),
        ("policy set orders", "SPEC"),
        ("policy set orders fixed:speed=1", "'speed=1'"),
        ("dead list --since whenever", "--since"),
        ("cancel 1 --key k", "by topic and key"),
        ("cancel --where n", "by topic and filter"),
        ("cancel --topic t --yes", "or --all"),
        ("cancel 7 --where n", "select tasks by ids, by topic and key"),
        ("cancel --topic t --key k --dry-run", "select tasks by ids, by topic and key"),
        ("cancel --topic t --due-from soon", "neither an ISO-8601 time"),
        ("reschedule --topic t --all", "--delay, --at, --shift, --spread"),
        ("reschedule --topic t --all --spread 9s --delay 1h", "--spread cannot be combined with"),
        ("dead requeue 7 --where n", "cannot be combined with --where"),
        ("run-now --topic t", "by topic and key"),
        ("reschedule --key k --delay 1s", "by topic and key"),
        ("dead requeue", "give ids"),
        ("dead requeue 1 --all", "--all"),
        ("dead requeue abc", "abc"),
        ("dead requeue --all --rate 0", "'0' is not a number above 0"),
        ("dead requeue --all --rate nan", "'nan' is not a number above 0"),
        ("groups set orders g --fair-by key --limit-each -1", "--limit-each"),
        ("groups set orders g --fair-by key --rate-each -1", "--rate-each"),
        ("schedule put s --topic t --overlap never", "'never' is not one of allow, skip"),
        ("dead delete 1 --until 2h", "--until"),
        ("top --interval 1ms", "--interval"),
        ("top --sort beauty", "--sort"),
        ("serve --set novalue", "novalue"),
        ("serve --set nosuch=1", "nosuch"),
        ("serve --listen nowhere", "listen"),
        ("serve --leader-ttl 0", "leader_ttl_s"),
        ("serve --leader-ttl soon", "--leader-ttl"),
        ("serve --advertise nowhere", "advertise"),
        ("serve --resident-bytes-max 0", "resident_bytes_max"),
        ("init --store memory:", "memory:"),
        ("init --store redis://h/x --config missing-file.toml", "missing-file.toml"),
        ("status --url http://x", "http"),
        ("serve --log-format xml", "log_format"),
        ("serve --config missing-file.toml", "missing-file.toml"),
        ("shards move", "SHARD"),
        ("shards move x a", "SHARD"),
        ("shards move 3", "either NODE or --anywhere"),
        ("shards move 3 a --anywhere", "either NODE or --anywhere"),
        ("shards drain", "NODE"),
        ("nodes drain a --now", "--now"),
        ("bench --seconds 3600", "--seconds"),
        ("demo --inbox sqlite:///app.db", "--inbox"),
    ],
)
def test_usage_errors_are_one_line_on_stderr(
    line: str, named: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(line.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert named in captured.err
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("tickwheel: ")


def test_a_bad_line_in_a_file_stops_before_anything_is_sent(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    source = tmp_path / "tasks.jsonl"
    source.write_text('{"body": "a"}\n{"body": "b", "priority": 999}\n')
    # No daemon is there: would it have tried to connect, the exit code would be 3.
    assert run(["--url", "tcp://127.0.0.1:1", "enqueue", "orders", "--from", str(source)]) == 2
    assert "line 2: task.priority" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[schedule.a]\nevery='5s'", "topic is missing"),
        ("[schedule.a]\ntopic='t'\never='5s'", "ever is not a valid field"),
        ("[schedule.a]\ntopic=5", "topic must be 1 to 255 characters"),
        ("[other]", "must contain only tables [schedule.NAME]"),
        ("x", "wrong.toml"),
    ],
)
def test_an_invalid_schedule_file_is_a_usage_error(
    text: str, named: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text(text)
    assert run(["--url", "tcp://127.0.0.1:1", "schedule", "apply", str(file), "--yes"]) == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([name, "--help"]) == 0
    shown = capsys.readouterr().out
    assert f"tickwheel {name}" in shown
    assert "--help" in shown


def test_the_program_without_a_command_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 2
    shown = capsys.readouterr().out
    assert all(name in shown for name in COMMANDS)


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("tickwheel ")


@pytest.mark.usefixtures("impatient")
def test_an_unreachable_daemon_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["stats", "--url", "tcp://127.0.0.1:1"]) == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("tickwheel: unreachable: ")
    assert captured.err.count("\n") == 1


def test_options_after_the_command_override_earlier_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str | None, str | None, bool]] = []
    app = typer.Typer()
    app.callback()(shared)

    async def look(call: Call) -> None:
        seen.append((call.url, call.token, call.out.as_json))

    command(app)(look)
    monkeypatch.setenv("TICKWHEEL_URL", "tcp://env:1")
    monkeypatch.setenv("TICKWHEEL_TOKEN", "env")
    for line in (
        "look",
        "--url tcp://before:1 --json look",
        "--url tcp://before:1 look --url tcp://after:1 --token after --json",
    ):
        app(line.split(), standalone_mode=False)
    assert seen == [
        ("tcp://env:1", "env", False),
        ("tcp://before:1", "env", True),
        ("tcp://after:1", "after", True),
    ]


def test_check_reports_a_missing_store(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["check", "--store", f"sqlite:///{tmp_path}/none.db"]) == 1
    assert "does not exist" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.Refused(), 1), (errors.SendTimeout(), 1), (errors.OutcomeUnknown(), 1),
        (errors.Unauthorized(), 1), (errors.BadRequest(), 2), (errors.DueTooFar(), 2),
        (errors.Unreachable(), 3), (errors.ConnectionLost(), 3), (errors.NotFound(), 4),
        (errors.TaskGone(), 4),
    ],
)  # fmt: skip
def test_exit_codes(error: errors.TickwheelError, code: int) -> None:
    assert exit_code(error) == code


# --- shell completion ------------------------------------------------------------------------


def _run(*command: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env={**os.environ, **env}, capture_output=True, text=True, check=False
    )


def test_completion_is_installed_for_the_current_shell(tmp_path: Path) -> None:
    tickwheel = tmp_path / "tickwheel"
    tickwheel.write_text(f'#!/bin/sh\nexec {sys.executable} -m tickwheel "$@"\n')
    tickwheel.chmod(0o755)
    home = {"HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = _run("bash", "-c", f"{tickwheel} --install-completion; true", **home)
    script = tmp_path / ".bash_completions" / "tickwheel.sh"
    assert script.exists(), done.stdout + done.stderr

    def complete(*words: str) -> list[str]:
        asked = f"COMP_WORDS=(tickwheel {shlex.join(words)}); COMP_CWORD={len(words)}"
        answer = f"_tickwheel_completion {tickwheel}; echo ${{COMPREPLY[@]}}"
        return _run("bash", "-c", f". {script}; {asked}; {answer}", **home).stdout.split()

    assert complete("re") == ["reshard", "reschedule", "resume", "restore", "report"]
    assert complete("dead", "") == ["list", "show", "requeue", "delete", "purge"]
    assert complete("groups", "") == [
        "list",
        "create",
        "set",
        "delete",
        "reset",
        "held",
        "lines",
        "release-key",
        "skip-key",
        "pause-key",
        "resume-key",
        "paused",
    ]
    assert "--delay" in complete("enqueue", "--")


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_completion_can_be_shown_for_other_shells(shell: str) -> None:
    done = _run(
        sys.executable, "-m", "tickwheel", "--show-completion", shell,
        _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"complete_{shell}" in done.stdout


def test_a_command_of_another_queue_suggests_ours() -> None:
    root = typer.main.get_command(app)
    for word, ours in OTHER_WORDS.items():
        result: Any = root
        assert word not in result.commands, f"{word} is a command"
        for part in ours.split():
            result = result.commands[part]
