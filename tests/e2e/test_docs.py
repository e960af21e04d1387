"""What the documents show is what happens: their examples are run as they stand."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from support.daemon import ANY_DISK
from support.forked_shell import commands as forked_shell_commands
from support.ports import free_port
from tickwheel.cli.app import app
from tickwheel.cli.call import DEFAULT_COMMAND, ListByDefault

ROOT = Path(__file__).parents[2]
WAIT = """
case "$1" in serve | check | init | token) ;; *)
    for _ in {{1..600}}; do (: < /dev/tcp/127.0.0.1/{port}) 2> /dev/null && break; sleep 0.1; done
esac
"""
"""A daemon that was started the line before may need longer on a busy machine than a reader, and
than a program waits: a client tries for three seconds.
"""
WAIT_FOR_HISTORY = """
if [ "$1" = history ]; then
    for _ in {{1..100}}; do
        {command} "$@" && exit 0
        code=$?
        [ $code = 4 ] || exit $code
        sleep 0.2
    done
    exit 4
fi
"""
"""The history is a moment behind, which a reader does not notice."""
TIMEOUT_S = 300.0
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(document: str, language: str) -> list[str]:
    text = (ROOT / document).read_text()
    return [code for found, code in BLOCK.findall(text) if found == language]


def run_as_it_stands(
    document: str, folder: Path, shell: dict[str, str], moved: Mapping[str, str] | None = None
) -> str:
    """All shell blocks of a document as one script, with what is ``moved``; what it prints.

    A Python block begins with the name of the file that it is kept in.
    """
    for program in blocks(document, "python"):
        name = program.partition("\n")[0].removeprefix("# ")
        assert re.fullmatch(r"\w+\.py", name), program
        (folder / name).write_text(program)
    stop = "trap 'kill $(jobs -p) 2>/dev/null || true' EXIT"
    script = "\n".join(["set -e -o pipefail", stop, *blocks(document, "bash")])
    script = script.replace(":7357", f":{free_port()}")  # a second daemon
    for old, new in (moved or {}).items():
        script = script.replace(old, new)
    out, err = folder / "shown.txt", folder / "errors.txt"
    with out.open("w") as shown, err.open("w") as errors:
        running = subprocess.Popen(
            ["bash", "-c", script],
            cwd=folder, env=shell, stdout=shown, stderr=errors, start_new_session=True,
        )  # fmt: skip
        try:
            code = running.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            code = -1
        finally:
            with contextlib.suppress(ProcessLookupError):  # whatever it left running
                os.killpg(running.pid, signal.SIGKILL)
            running.wait()
    assert code == 0, f"exit code {code}\n{out.read_text()}{err.read_text()}"
    assert "Traceback" not in err.read_text(), err.read_text()
    return out.read_text()


PARSER: Any = get_command(app)


@pytest.fixture
def shell(tmp_path: Path) -> dict[str, str]:
    """An environment in which `tickwheel` is this tree's, at an address of its own."""
    return environment(tmp_path / "bin", [sys.executable, "-m", "tickwheel"])


@pytest.fixture
def forked_shell(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The same, with commands that are forked."""
    with forked_shell_commands() as tickwheel:
        yield environment(tmp_path / "bin", tickwheel)


def environment(commands: Path, command: list[str]) -> dict[str, str]:
    """For a shell whose `tickwheel` is ``command``."""
    port = free_port()
    commands.mkdir()
    wait = WAIT.format(port=port)
    history = WAIT_FOR_HISTORY.format(command=shlex.join(command))
    tickwheel = f'{wait}{history}exec {shlex.join(command)} "$@"\n'
    python = f'{wait}exec {sys.executable} "$@"\n'
    for name, script in (("tickwheel", tickwheel), ("python", python)):
        (commands / name).write_text(f"#!/bin/bash\n{script}")
        (commands / name).chmod(0o755)
    return {
        **os.environ,
        **ANY_DISK,
        "PATH": f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "TICKWHEEL_LISTEN": f"tcp://127.0.0.1:{port}",
        "TICKWHEEL_URL": f"tcp://127.0.0.1:{port}",
    }


def test_the_readme_runs(tmp_path: Path, forked_shell: dict[str, str]) -> None:
    shown = run_as_it_stands("README.md", tmp_path, forked_shell)
    assert "order 42 was not paid in time" in shown


def test_the_tour_runs(tmp_path: Path, forked_shell: dict[str, str]) -> None:
    shown = run_as_it_stands("docs/tour.md", tmp_path, forked_shell)
    for word in (
        "order 42", "order 43", "closing order 44, attempt 1", "order 47", "due now: b'46'",
        "closed order 48",
    ):  # fmt: skip
        assert word in shown, (word, shown)
    assert "due now: b'45'" not in shown


@pytest.mark.slow  # verbs/ calls each command; each line is parsed below
def test_the_command_line_page_runs(tmp_path: Path, forked_shell: dict[str, str]) -> None:
    shown = run_as_it_stands("docs/cli.md", tmp_path, forked_shell)
    for word in ("closing order 46", "cycles left", "good morning", "1 requeued", "deleted in"):
        assert word in shown, (word, shown)


@pytest.mark.slow  # test_schedules.py, verbs/scenes/schedules.py
def test_the_schedules_page_runs(tmp_path: Path, forked_shell: dict[str, str]) -> None:
    shown = run_as_it_stands("docs/schedules.md", tmp_path, forked_shell)
    for word in (
        "daily  created  0 9 * * * Europe/Berlin",
        "poll  created  every 1m30s",
        "deleted",
    ):
        assert word in shown, (word, shown)


def at_a_free_port(folder: Path) -> None:
    """What names port 7356 gets one of its own; curl waits for the daemon, as a reader would."""
    port, commands = free_port(), folder / "bin"
    curl, tickwheel = shutil.which("curl"), (commands / "tickwheel").read_text()
    moved = f'set -- "${{@//127.0.0.1:7356/127.0.0.1:{port}}}"\n'
    (commands / "tickwheel").write_text(tickwheel.replace("exec ", f"{moved}exec ", 1))
    ready = f"{curl} -sf -o ready http://127.0.0.1:{port}/readyz"
    (commands / "curl").write_text(
        f"#!/bin/bash\nfor _ in {{1..600}}; do {ready} && break; sleep 0.1; done\n"
        f'{moved}exec {curl} "$@"\n'
    )
    (commands / "curl").chmod(0o755)


def test_the_console_page_runs(tmp_path: Path, forked_shell: dict[str, str]) -> None:
    at_a_free_port(tmp_path)
    shown = run_as_it_stands("docs/console.md", tmp_path, forked_shell)
    for word in ("/console/", '"node":', '"tasks":[]', "event: overview"):
        assert word in shown, (word, shown)


@pytest.mark.slow  # verbs/ sends each request; server/http/
def test_the_http_page_runs(tmp_path: Path, forked_shell: dict[str, str]) -> None:
    at_a_free_port(tmp_path)
    shown = run_as_it_stands("docs/http.md", tmp_path, forked_shell)
    for word in (
        '"results":["acked"]', '"results":[{"id":', "already_cancelled", "the same task",
        '"body":"to the stream"', '"outcome":"created"', "today.db", '"code":"bad_request"',
        '"role":"active"', '"transaction":"order-9","part":1,"tasks":1', '"state":"done"',
        "there is no such restore", "a restore goes into a new file",
    ):  # fmt: skip
        assert word in shown, (word, shown)


@pytest.mark.slow  # test_coalescing.py, verbs/scenes/tasks.py
def test_the_keys_page_runs(tmp_path: Path, forked_shell: dict[str, str]) -> None:
    shown = run_as_it_stands("docs/keys.md", tmp_path, forked_shell)
    for pattern in (
        r"\d+  cancelled", r"\d+  kept  due ", r"\d+  replaced  due ", '"outcome": ?"rejected"',
        "if pending: keep window=1d", r"^stored (\d+)\nkept \1$", "^replaced 20",
    ):  # fmt: skip
        assert re.search(pattern, shown, re.MULTILINE), (pattern, shown)


@pytest.mark.slow  # test_transactions.py
def test_the_transactions_page_runs(tmp_path: Path, forked_shell: dict[str, str]) -> None:
    shown = run_as_it_stands("docs/transactions.md", tmp_path, forked_shell)
    for pattern in (
        r"^died$", r"^order-2 +payments +open +2 ", r"^shipping +.* +order-2 ",
        r"^paid: order 1$", r"^paid: order 2$", r"^order-2  committed  2 tasks$",
        r"^it was committed$", r"^order-1 +payments +committed ",
    ):  # fmt: skip
        assert re.search(pattern, shown, re.MULTILINE), (pattern, shown)


@pytest.mark.slow  # test_bulk.py
def test_the_bulk_page_runs(tmp_path: Path, forked_shell: dict[str, str]) -> None:
    shown = run_as_it_stands("docs/bulk.md", tmp_path, forked_shell)
    for pattern in (
        r"^dry run  1 of 3 would be changed$", r"^cancel-\w+  done  1 of 1 changed$",
        r"^reschedule-\w+  (running|done) ", r"^run_now-\w+  done  1 of 1 changed$",
        r"^spread-\w+  done ",
        r"^2 would be cancelled$", r"^done 2 \{\}$", r"^bulk +no-sale-in-eu$",
        r"^kind +cancel$",
    ):  # fmt: skip
        assert re.search(pattern, shown, re.MULTILINE), (pattern, shown)


@pytest.mark.slow  # test_resets.py
def test_the_replay_page_runs(tmp_path: Path, forked_shell: dict[str, str]) -> None:
    shown = run_as_it_stands("docs/replay.md", tmp_path, forked_shell)
    for pattern in (
        r"^dry run  3 tasks would be delivered again, due from \S+ \S+ to \S+ \S+$",
        r"^reset-\w+  done  3 of 3 changed$", r"  replay of \d+  invoice 1$", r"^done 3$",
    ):  # fmt: skip
        assert re.search(pattern, shown, re.MULTILINE), (pattern, shown)
    assert len(re.findall(r"  replay of \d+  ", shown)) == 3, "the other group has none of it"
    assert shown.count("again b'invoice ") == 3


@pytest.mark.slow  # test_windows.py
def test_the_due_windows_page_runs(tmp_path: Path, forked_shell: dict[str, str]) -> None:
    shown = run_as_it_stands("docs/windows.md", tmp_path, forked_shell)
    for word in ("200 tasks enqueued", "10m, at its emptiest", "requested", "report  created"):
        assert word in shown, (word, shown)
    assert "dry run  100 of 100 would be changed" in shown
    assert len(re.findall(r"^spread-\w+  done  100 of 100 changed$", shown, re.MULTILINE)) == 2


@pytest.mark.slow  # test_order_daemon.py, verbs/scenes/groups.py
def test_the_order_keys_page_runs(tmp_path: Path, forked_shell: dict[str, str]) -> None:
    shown = run_as_it_stands("docs/order.md", tmp_path, forked_shell)
    places = [shown.index(word) for word in (
        "hold after 2 attempts", "bob +5", "no such account", "key alice  released", "alice +100",
        "alice -50", "key bob  paused", "carol +7", "key bob  resumed", "bob -5",
        "fair by tenant (2 in flight each)", "limited", "tiny 1",
    )]  # fmt: skip
    assert places == sorted(places), shown
    assert "acme 3" not in shown


@pytest.mark.slow  # test_bulk.py, verbs/scenes/groups.py
def test_the_filters_page_runs(tmp_path: Path, forked_shell: dict[str, str]) -> None:
    shown = run_as_it_stands("docs/filters.md", tmp_path, forked_shell)
    for pattern in (
        "order 1", "order 2", "filtered", r"europe.* tags eu \|\| uk \|\| us$", "^large: sale 11$",
        "^large: sale 12$", "not where amount > 5;", r"^ +amount > > 10\n +\^$",
    ):  # fmt: skip
        assert re.search(pattern, shown, re.MULTILINE), (pattern, shown)
    assert "large: sale 9" not in shown and "large: sale 10" not in shown


@pytest.mark.slow  # test_processes.py, test_reshard.py
def test_the_scaling_page_runs(tmp_path: Path, forked_shell: dict[str, str]) -> None:
    moved = {"127.0.0.1:7455": "127.0.0.1:0", ":7500": f":{free_port()}"}
    shown = run_as_it_stands("docs/scaling.md", tmp_path, forked_shell, moved)
    rows = re.findall(
        r"^ +([01]) +\S+ +127\.0\.0\.1:\d+ +\d+ +ready .*/shard-\1\.db$", shown, re.MULTILINE
    )
    assert rows == ["0", "1"], shown
    assert "order 1" in shown
    assert '{"status":"ready","shards":{"0":"ready","1":"ready"}}' in shown
    assert re.search(
        r'^tickwheel_scheduled_tasks\{shard="[01]",topic="orders"\} 0$', shown, re.MULTILINE
    )
    would, has = (shown.index(f"more/ {word} 3 shards") for word in ("would have", "has"))
    assert shown.index("more/ has 2 shards") < would < has


def test_the_operations_examples_run(tmp_path: Path, forked_shell: dict[str, str]) -> None:
    shown = run_as_it_stands("docs/operations.md", tmp_path, forked_shell)
    for word in ("order-42", "Restored into sqlite:///drilled.db", "all rows agree"):
        assert word in shown, (word, shown)


@pytest.mark.slow  # client/, verbs/; the tour is quick
def test_the_python_client_page_runs(tmp_path: Path, shell: dict[str, str]) -> None:
    shown = run_as_it_stands("docs/python.md", tmp_path, shell)
    for word in ("durable: ", "ann attempt 1", "True", "20 tasks", "None", "sent to busy",
                 "states: acked acked dead waiting", "still there: scheduled"):  # fmt: skip
        assert word in shown, (word, shown)


def test_the_typed_tasks_page_runs(tmp_path: Path, shell: dict[str, str]) -> None:
    shown = run_as_it_stands("docs/typed.md", tmp_path, shell)
    for word in (
        'stored b\'{"order_id":42,', "close_order: $.order_id: expected int, got str",
        "closed 42 [Line(sku='A-1', count=1), Line(sku='B-2', count=3)]",
        "shipped 42 of order-42", "to ['ann@example.org'] hello", "17000 bytes delivered",
        "aesgcm;key=2026-11 False", "encrypted with key '2026-11', which this client does not",
        "b'Ann, 4711'", 'secret.py", line 17, in admit',
    ):  # fmt: skip
        assert word in shown, (word, shown)
    assert re.search(r"^zlib \d{2,3} bytes stored$", shown, re.MULTILINE), shown
    assert "no bed" not in shown


@pytest.mark.slow  # testing/
def test_the_testing_page_runs(tmp_path: Path, shell: dict[str, str]) -> None:
    shown = run_as_it_stands("docs/testing.md", tmp_path, shell)
    assert "1 passed" in shown and "2 passed" in shown


def test_the_tracing_page_runs(tmp_path: Path, shell: dict[str, str]) -> None:
    shown = run_as_it_stands("docs/tracing.md", tmp_path, shell)
    assert shown.splitlines() == [
        "send orders.close  linked to 0",
        "POST /orders  linked to 0",
        "process orders.close nack linked to 1",
        "process orders.close ack linked to 1",
    ]


def test_the_push_page_runs(tmp_path: Path, forked_shell: dict[str, str]) -> None:
    moved = {port: str(free_port()) for port in ("8090", "8091")}
    (program,) = blocks("docs/push.md", "js")
    name, _, _ = program.removeprefix("// ").partition("\n")
    (tmp_path / name).write_text(program.replace("8091", moved["8091"]))
    shown = run_as_it_stands("docs/push.md", tmp_path, forked_shell, moved)
    for word in ("python got order 42 of task", "node got order 42", "sending", "acked", "204"):
        assert word in shown, (word, shown)


@pytest.mark.slow  # contrib/, test_examples.py
def test_the_frameworks_page_runs(tmp_path: Path, shell: dict[str, str]) -> None:
    serve_at_a_free_port(tmp_path / "bin")
    shown = run_as_it_stands("docs/frameworks.md", tmp_path, shell)
    for word in (
        "closed order 41", "charged order 43", "no issues", "welcome, ann",
        "bob, from shop@example.com",
    ):  # fmt: skip
        assert word in shown, (word, shown)


def serve_at_a_free_port(commands: Path) -> None:
    """What serves port 8000 or 8001, and curl, which waits for it, get ports of their own."""
    ports = {port: free_port() for port in (8000, 8001)}
    find = f'case "$*" in {" ".join(f"*{old}*) port={new};;" for old, new in ports.items())} esac'
    programs = {
        "uvicorn": f"exec {commands / 'python'} -m uvicorn",
        "flask": f"exec {commands / 'python'} -m flask",
        "curl": f"{find}\n{WAIT.format(port='$port')}exec {shutil.which('curl')}",
    }
    for name, program in programs.items():
        moved = "\n".join(f'set -- "${{@//{old}/{new}}}"' for old, new in ports.items())
        if name == "curl":
            moved, program = "", program.replace("exec ", f"{moved}\nexec ")
        (commands / name).write_text(f'#!/bin/bash\n{moved}\n{program} "$@"\n')
        (commands / name).chmod(0o755)


@pytest.mark.slow  # outbound/test_forward.py
def test_the_forwarders_page_runs(tmp_path: Path, forked_shell: dict[str, str]) -> None:
    port = str(free_port())
    redis_server = shutil.which("redis-server") or pytest.skip("redis-server is not installed")
    commands = tmp_path / "bin"
    moved = 'set -- "${@//6390/' + port + '}"'
    (commands / "redis-server").write_text(f'#!/bin/bash\n{moved}\nexec {redis_server} "$@"\n')
    (commands / "redis-server").chmod(0o755)
    tickwheel = (commands / "tickwheel").read_text()
    (commands / "tickwheel").write_text(tickwheel.replace("\n", f"\n{moved}\n", 1))
    python = (commands / "python").read_text()
    waits = WAIT.format(port=port).replace("serve | check | init | token) ;; *", "*")
    at_port = f'sed -i s/6390/{port}/ "$1"'
    (commands / "python").write_text(python.replace("exec ", f"{at_port}\n{waits}\nexec ", 1))
    shown = run_as_it_stands("docs/forward.md", tmp_path, forked_shell)
    places = [shown.index(word) for word in (
        "stream=orders", "order 41 of key 41", "1 invoice has come", "paper is there",
        "reports monday", "switched off",
    )]  # fmt: skip
    assert places == sorted(places), shown


@pytest.mark.slow  # test_tokens_daemon.py, test_tls.py
def test_the_security_page_runs(tmp_path: Path, forked_shell: dict[str, str]) -> None:
    at_a_free_port(tmp_path)
    shown = run_as_it_stands("docs/security.md", tmp_path, forked_shell)
    for pattern in (
        "^no right for mails$", "^no right to read$", "order 1",
        r"^\w{12} +shop +produce=orders\.\* read=orders\.\*",
        r"^token \w{12} of shop is revoked$", "^tls_required$", "^tls_failed: not trusted$",
        r"^\w{12} +mesh +produce=\* ",
    ):  # fmt: skip
        assert re.search(pattern, shown, re.MULTILINE), (pattern, shown)


DOCUMENTS = ("README.md", "docs/*.md", "docs/decisions/*.md", "grafana/*.md", "deploy/*.md")
SPANS = {
    span: path.name
    for pattern in DOCUMENTS
    for path in ROOT.glob(pattern)
    for span in re.findall(r"`tickwheel ([^`]+)`", path.read_text())
    if "COMMAND" not in span and "--install-completion" not in span
}


@pytest.mark.parametrize("span", sorted(SPANS))
def test_commands_in_sentences_exist(span: str) -> None:
    """Only parsed; a name may stand without the arguments that it needs."""
    name, words, command = "tickwheel", shlex.split(span), PARSER
    context: Any = None
    try:
        while True:
            context = command.make_context(name, words, parent=context)
            if not getattr(command, "commands", None):
                return
            rest = [*context._protected_args, *context.args]
            name, command, words = command.resolve_command(context, rest)
    except Exception as error:  # typer brings its own click, or uses click's
        if type(error).__name__ != "MissingParameter":
            raise


SHOWN = {
    line.strip(): path.name
    for pattern in DOCUMENTS
    for path in ROOT.glob(pattern)
    for _, code in BLOCK.findall(re.sub(r"^```$", "```text", path.read_text(), flags=re.MULTILINE))
    for line in code.replace("\\\n", " ").splitlines()
    if line.strip().startswith("tickwheel ")
}
"""Every line of every block, whether the block is run or not."""
NAMES_AS = re.compile(r"\b[A-Z]{2,}\b|…|\.\.\.")


@pytest.mark.parametrize("line", sorted(SHOWN))
def test_commands_in_blocks_take_their_arguments(line: str) -> None:
    """Only parsed. Names in capitals stand for something, a variable for an id."""
    words: list[str] = []
    for word in shlex.split(re.sub(r"\$\([^)]*\)", "1", line), comments=True):
        if word in {"|", "&", "&&", "||", ";", ">", "<", "2>", ">>"} or word.startswith(
            ("$(", ">")
        ):
            break
        words.append(re.sub(r"^\$\w+$", "1", word.rstrip(";")))
    if any(NAMES_AS.search(word) for word in words) or "--help" in words:
        return
    name, command, context = words[0], PARSER, None
    words = words[1:]
    while True:
        result: Any = command.make_context(name, words, parent=context)
        if not getattr(command, "commands", None):
            return
        name, command, words = command.resolve_command(
            result, [*result._protected_args, *result.args]
        )
        context = result


def test_every_command_is_on_the_page_of_the_command_line() -> None:
    text = (ROOT / "docs/cli.md").read_text()
    missing = [name for name in commands_of(PARSER) if f"tickwheel {name}" not in text]
    assert missing == []


def commands_of(command: Any, name: str = "") -> list[str]:
    """Their names with those they stand below; a command that is meant without a name is not."""
    below = getattr(command, "commands", {})
    return [name] * (not below) + [
        found
        for word, inner in below.items()
        if not (isinstance(command, ListByDefault) and word == DEFAULT_COMMAND)
        for found in commands_of(inner, f"{name} {word}".strip())
    ]


@pytest.mark.parametrize("document", ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_links_inside_the_repository_resolve(document: str) -> None:
    text = (ROOT / document).read_text()
    targets = [t for t in re.findall(r"\]\(([^)#]+)", text) if "://" not in t]
    missing = [target for target in targets if not (ROOT / target).exists()]
    assert targets
    assert missing == []


def test_make_targets_named_in_the_documents_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for document in ("README.md", "CONTRIBUTING.md"):
        for target in re.findall(r"\bmake ([a-z][a-z-]*)", (ROOT / document).read_text()):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), (document, target)


def test_paths_in_the_architecture_exist() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    paths = re.findall(r"`((?:tickwheel|tests|docs|benchmarks)/[\w/.]*)`", text)
    assert [path for path in paths if not (ROOT / path).exists()] == []
