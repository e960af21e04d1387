"""A client that a generator made from the OpenAPI document works."""

from __future__ import annotations

import os
import subprocess
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

from support.daemon import Daemon

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
from made import Client
from made.api.deliveries import ack, pull
from made.api.tasks import cancel_task, enqueue, look_up
from made.models import AckIn, NewTask, NewTasks, Problem, PullIn

client = Client(base_url=sys.argv[1])
one = enqueue.sync(client=client, body=NewTask(topic="t", body="hello"))
many = enqueue.sync(
    client=client, body=NewTasks(tasks=[NewTask(topic="t", delay_ms=60_000), NewTask(topic="t")])
)
assert look_up.sync(one.id, client=client).body == "hello"
assert cancel_task.sync(many.tasks[0].id, client=client).result == "cancelled"
got = pull.sync("t", client=client, body=PullIn(group="g", max_=5, wait_ms=20_000)).deliveries
assert [delivery.id for delivery in got] == [one.id, many.tasks[1].id]
settled = ack.sync(client=client, body=AckIn(receipts=[delivery.receipt for delivery in got]))
assert settled.results == ["acked", "acked"]
refused = cancel_task.sync("7", client=client)
assert isinstance(refused, Problem) and refused.code == "not_found"
print("it works")
"""


@pytest.mark.slow  # it installs the generator, which wants an older typer than ours
def test_a_generated_client_works(make_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    daemon = make_daemon(http=True).start()
    folder = tmp_path / "generator"
    venv.create(folder, with_pip=True)
    wanted = ROOT / "requirements" / "generator.txt"
    pip = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--require-hashes"]
    _run(*pip, "-r", wanted)
    _run(
        folder / "bin" / "openapi-python-client", "generate", "--meta", "none",
        "--url", f"{daemon.http}/openapi.json", "--output-path", tmp_path / "made",
        PATH=f"{folder / 'bin'}:{os.environ['PATH']}",
    )  # fmt: skip
    (tmp_path / "use.py").write_text(PROGRAM)
    done = _run(folder / "bin" / "python", tmp_path / "use.py", daemon.http)
    assert done.stdout == "it works\n"


def _run(*command: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command, env=os.environ | env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done
